// SPDX-License-Identifier: Apache-2.0
//! `rushes-lab`: the program that `rushes lab …` executes.

use anyhow::Result;
use clap::{CommandFactory, Parser};
use rushes_lab::cli::{Cli, Command};
use rushes_lab::clients::{player, storm, work, writer};
use rushes_lab::commands::TrialOf;
use rushes_lab::experiments::fill;
use rushes_lab::reports::outcome::perform;
use rushes_lab::stage::room;
use rushes_lab::{disk, edit, stage, words};
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
    match command {
        Command::Words => {
            let mut command = Cli::command();
            command.build();
            println!("{}", serde_json::to_string(&words::of(&command))?);
            Ok(())
        }
        // Clients have process groups of their own, which Ctrl-C does not reach: no handler.
        Command::Player => player::main(),
        Command::Editor => edit::editor::main(),
        Command::Writer => writer::main(),
        Command::Filler => fill::main(),
        Command::Storm => storm::main(),
        Command::Work => work::main(),
        // It handles signals itself.
        Command::Disk(command) => Ok(disk::cli::run(&command)?),
        command => {
            room::catch_interrupts()?;
            experiment(command)
        }
    }
}

fn experiment(command: Command) -> Result<()> {
    match command {
        Command::Play(args) => perform(&*args, args.json),
        Command::Edit(args) => perform(&*args, args.json),
        Command::Record(args) => perform(&*args, args.json),
        Command::Mixed(args) => perform(&*args, args.json),
        Command::Fill(args) => perform(&*args, args.json),
        Command::CopyIn(args) => perform(&*args, args.json),
        Command::Scatter(args) => perform(&*args, args.json),
        Command::Metadata(args) => perform(&args, args.json),
        Command::Strokes(args) => perform(&args, args.json),
        Command::Throughput(args) => perform(&*args, args.json),
        Command::Most(args) => perform(&*args, args.json),
        Command::Compare(args) => perform(&*args, args.json),
        Command::Preroll(args) => perform(&*args, args.json),
        Command::Hits(args) => perform(&TrialOf::Hits(&args), args.json),
        Command::Mixedio(args) => perform(&TrialOf::Mixed(&args), args.json),
        Command::Absent(args) => perform(&TrialOf::Absent(&args), args.json),
        Command::Demo(args) => perform(&*args, args.json),
        Command::PowerCuts(args) => perform(&args, args.json),
        Command::Clean { kept } => clean(kept.as_deref()),
        Command::Player
        | Command::Words
        | Command::Editor
        | Command::Writer
        | Command::Filler
        | Command::Storm
        | Command::Work
        | Command::Disk(_) => Ok(()),
    }
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
