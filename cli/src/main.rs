// SPDX-License-Identifier: Apache-2.0
//! The one command of Rushes: it asks and prints; other crates do the work.

mod admit;
mod args;
mod ask;
mod calibrate;
mod check;
mod export_args;
mod lab;
mod lab_words;
mod man;
mod pool;
mod recover;
mod serve;
mod show;
mod status;
mod top;

use args::{Cli, Command};
use clap::FromArgMatches;
use std::process::ExitCode;

fn main() -> ExitCode {
    let words = args::with_whole_usage().get_matches();
    let cli = Cli::from_arg_matches(&words).unwrap_or_else(|error| error.exit());
    let done = match &cli.command {
        Command::Serve(args) => serve::run(args),
        Command::Recover(args) => recover::run(args),
        Command::Calibrate(args) => calibrate::run(args),
        Command::Check(args) => check::run(args),
        Command::Status(args) => status::run(args),
        Command::Top(args) => top::run(args),
        Command::Admit(args) => admit::run(args),
        Command::Pool { command } => pool::run(command),
        Command::Lab { args } => lab::run(args),
        Command::Completions { shell } => man::completions(*shell),
        Command::Man { out } => man::man(out.as_deref()),
    };
    done.unwrap_or_else(|error| {
        eprintln!("rushes: {error}");
        ExitCode::from(2)
    })
}
