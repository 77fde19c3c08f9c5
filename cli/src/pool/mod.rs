// SPDX-License-Identifier: Apache-2.0
//! `rushes pool`: the dispatcher of its commands. It calls the files beside it, and none of them
//! calls it. None asks the daemon.

mod bars;
mod create;
mod destroy;
mod error;
mod export;
mod files;
mod hand;
mod listing;
mod members;
mod mount;
mod opening;
mod policy;
mod repair;
mod state;
mod status;
mod tidying;
mod words;

use crate::args::PoolCommand;
use std::process::ExitCode;

pub(crate) fn run(command: &PoolCommand) -> Result<ExitCode, String> {
    match command {
        PoolCommand::Create(args) => create::create(args),
        PoolCommand::Destroy(args) => destroy::destroy(args),
        PoolCommand::Ls(args) => listing::ls(args),
        PoolCommand::Where(args) => files::where_is(args),
        PoolCommand::Mount(args) => mount::mount(args),
        PoolCommand::Fsck(args) => repair::fsck(args),
        PoolCommand::Rescue(args) => repair::rescue(args),
        PoolCommand::Add(args) => members::add(args),
        PoolCommand::Drain(args) => members::drain(args),
        PoolCommand::Rebalance(args) => tidying::rebalance(args),
        PoolCommand::Defrag(args) => tidying::defrag(args),
        PoolCommand::Remove(args) => members::remove(args),
        PoolCommand::Status(args) => status::status(args),
        PoolCommand::Policy(args) => policy::policy(args),
        PoolCommand::Export { command } => export::run(command),
    }
}
