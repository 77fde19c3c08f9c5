// SPDX-License-Identifier: Apache-2.0
//! `rushes-lab`: what `rushes lab …` executes.

use anyhow::Result;
use clap::Parser;
use rushes_lab::cli::{Cli, Command, PlayArgs, plan_of, play_of};
use rushes_lab::room::{self, Room};
use rushes_lab::stage::Stage;
use rushes_lab::{disk, player, stage, storm};
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    match dispatch(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rushes lab: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(command: Command) -> Result<()> {
    match &command {
        // Clients answer to the lab that started them, not to the keyboard.
        Command::Player => return player::main(),
        Command::Storm => return storm::main(),
        // Has its own way with signals.
        Command::Disk(command) => return Ok(disk::cli::run(command)?),
        _ => room::catch_interrupts()?,
    }
    match command {
        Command::Play(args) => play(&args),
        Command::Clean { kept } => clean(kept.as_deref()),
        Command::Player | Command::Storm | Command::Disk(_) => Ok(()),
    }
}

fn play(args: &PlayArgs) -> Result<()> {
    let mut play = play_of(
        args.server,
        args.streams,
        &args.players,
        &args.others,
        &args.setup,
        &args.stage,
    );
    play.timeline = args.timeline;
    let plan = plan_of(&play, &args.stage);
    let room = Room::create()?;
    let mut stage = Stage::prepare(
        &room,
        &args.stage.disk,
        &plan,
        args.stage.keep.as_deref(),
        args.json,
    )?;
    let report = play.run(&room, &mut stage, args.json)?;
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print!("{}", report.table());
    }
    Ok(())
}

fn clean(kept: Option<&Path>) -> Result<()> {
    for path in room::clean()? {
        println!("removed {}", path.display());
    }
    for name in disk::clean(false)? {
        println!("took down the disk {name}");
    }
    if let Some(folder) = kept {
        stage::drop_kept(folder)?;
    }
    Ok(())
}
