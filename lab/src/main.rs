// SPDX-License-Identifier: Apache-2.0
//! `rushes-lab`: what `rushes lab …` executes.

use anyhow::{Context, Result};
use clap::{CommandFactory, Parser};
use rushes_lab::cli::{
    Cli, Command, CompareArgs, CopyInArgs, DemoArgs, FillArgs, MetadataArgs, MixedArgs, MostArgs,
    OthersArgs, PlayArgs, PowerArgs, PrerollArgs, RecordArgs, ScatterArgs, StageArgs, StrokesArgs,
    ThroughputArgs, TrialArgs, default_players, no_others, plan_of, play_of,
};
use rushes_lab::clients::{player, storm, work, writer};
use rushes_lab::edit::args::EditArgs;
use rushes_lab::experiments::play::Play;
use rushes_lab::experiments::record::Record;
use rushes_lab::experiments::trials::{self, Trial};
use rushes_lab::experiments::{compare, demo, fill, most, preroll};
use rushes_lab::reports::written::WriteReport;
use rushes_lab::servers::server::Kind;
use rushes_lab::stage::Stage;
use rushes_lab::stage::ground::Ground;
use rushes_lab::stage::room::{self, Room};
use rushes_lab::{disk, edit, power, stage, words};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::ExitCode;

/// Of everything that takes no `--seed`.
const SEED: u64 = 1;
/// Runs of each server where a few percent have to show.
const ABSENT_RUNS: u64 = 11;
const HITS_RUNS: u64 = 7;
const MIXED_RUNS: u64 = 3;
/// More than the cache holds in all, so that a mixed load needs the disk.
const MIXED_FILE_BYTES: u64 = 512 << 20;
const ABSENT_FILE_BYTES: u64 = 256 << 20;

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
        // Clients answer to the lab that started them, not to the keyboard.
        Command::Words => {
            let mut command = Cli::command();
            command.build();
            println!("{}", serde_json::to_string(&words::of(&command))?);
            Ok(())
        }
        Command::Player => player::main(),
        Command::Editor => edit::editor::main(),
        Command::Writer => writer::main(),
        Command::Filler => fill::main(),
        Command::Storm => storm::main(),
        Command::Work => work::main(),
        // Has its own way with signals.
        Command::Disk(command) => Ok(disk::cli::run(&command)?),
        command => {
            room::catch_interrupts()?;
            experiment(command)
        }
    }
}

fn experiment(command: Command) -> Result<()> {
    match command {
        Command::Play(args) => play(&args),
        Command::Edit(args) => edit(&args),
        Command::Record(args) => record(&args),
        Command::Mixed(args) => play_and_record(&args),
        Command::Fill(args) => fill_up(&args),
        Command::CopyIn(args) => copy_in(&args),
        Command::Scatter(args) => scatter(&args),
        Command::Metadata(args) => metadata(&args),
        Command::Strokes(args) => strokes(&args),
        Command::Throughput(args) => throughput(&args),
        Command::Most(args) => find_most(&args),
        Command::Compare(args) => compare_servers(&args),
        Command::Preroll(args) => find_preroll(&args),
        Command::Hits(args) => hits(&args),
        Command::Mixedio(args) => mixed(&args),
        Command::Absent(args) => absent(&args),
        Command::Demo(args) => show(&args),
        Command::PowerCuts(args) => cut_power(&args),
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

fn play(args: &PlayArgs) -> Result<()> {
    let mut play = play_of(
        args.server,
        args.streams,
        &args.players,
        &args.others,
        &args.setup,
        args.stage.seed,
    );
    play.timeline = args.timeline;
    let room = Room::create()?;
    let mut stage = prepare(&room, &play, &args.stage, args.json)?;
    let report = play.run(&room, &mut stage, args.json)?;
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print!("{}", report.table());
    }
    report.check()
}

fn edit(args: &EditArgs) -> Result<()> {
    let edit = args.edit()?;
    // A kept disk belongs to runs that come later, too.
    if args.keep.is_none() {
        with_own_mounts()?;
    }
    let room = Room::create()?;
    let (disk, plan) = (&args.ground.disk, edit.plan());
    let ground = args.ground.ground(edit.room_bytes());
    let keep = args.keep.as_deref();
    let mut stage = match edit.originals.is_empty() {
        true => Stage::prepare(&room, disk, &plan, ground, keep, args.json)?,
        false => edit::media::prepare(&room, disk, &plan, &edit.originals)?,
    };
    let report = edit.run(&room, &mut stage)?;
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print!("{}", report.table());
    }
    report.check()
}

fn record(args: &RecordArgs) -> Result<()> {
    let (play, record) = (args.play(), args.record());
    let room = Room::create()?;
    let ground = args.ground.ground(record.bytes());
    let mut stage =
        Stage::prepare_to_write(&room, &args.ground.disk, &play.plan(), ground, args.json)?;
    let report = record.run(&room, &mut stage, &play.server, args.json)?;
    tell_written(&report, args.json)
}

fn copy_in(args: &CopyInArgs) -> Result<()> {
    let (play, record) = (args.play(), args.record());
    let room = Room::create()?;
    let ground = args.ground.ground(record.bytes());
    let mut stage =
        Stage::prepare_to_write(&room, &args.ground.disk, &play.plan(), ground, args.json)?;
    let report = record.run(&room, &mut stage, &play.server, args.json)?;
    tell_written(&report, args.json)
}

fn tell_written(report: &WriteReport, json: bool) -> Result<()> {
    if json {
        println!("{}", serde_json::to_string(report)?);
    } else {
        print!("{}", report.table());
    }
    report.check()
}

fn play_and_record(args: &MixedArgs) -> Result<()> {
    let play = args.play();
    let room = Room::create()?;
    let room_bytes = play.record.as_ref().map_or(0, Record::bytes);
    let ground = args.tidying.on(args.ground.ground(room_bytes));
    let mut stage =
        Stage::prepare_to_write(&room, &args.ground.disk, &play.plan(), ground, args.json)?;
    let report = play.run(&room, &mut stage, args.json)?;
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print!("{}", report.table());
    }
    report.check()
}

fn fill_up(args: &FillArgs) -> Result<()> {
    let play = args.play();
    let room = Room::create()?;
    let ground = args.ground();
    let mut stage =
        Stage::prepare_to_write(&room, &args.ground.disk, &play.plan(), ground, args.json)?;
    let report = play.run(&room, &mut stage, args.json)?;
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print!("{}", report.table());
    }
    report.check()
}

fn scatter(args: &ScatterArgs) -> Result<()> {
    anyhow::ensure!(
        args.block_min <= args.block_max && args.block_max * args.clients <= args.file_bytes,
        "each of {} clients needs a place for its largest write: {} KiB, in a file of {} KiB",
        args.clients,
        args.block_max >> 10,
        args.file_bytes >> 10
    );
    let scatter = args.scatter();
    let plan = trials::plan(args.ground.seed, 1, args.file_bytes);
    let room = Room::create()?;
    let ground = args.ground.ground(0);
    let mut stage = Stage::prepare_to_write(&room, &args.ground.disk, &plan, ground, args.json)?;
    let report = scatter.run(&room, &mut stage, &args.writers(), args.json)?;
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print!("{}", report.table());
    }
    report.check()
}

fn metadata(args: &MetadataArgs) -> Result<()> {
    let report = args.metadata().run()?;
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print!("{}", report.table());
    }
    Ok(())
}

fn strokes(args: &StrokesArgs) -> Result<()> {
    let report = args.strokes().run()?;
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print!("{}", report.table());
    }
    Ok(())
}

fn prepare(room: &Room, play: &Play, args: &StageArgs, quiet: bool) -> Result<Stage> {
    let plan = plan_of(play, args);
    let ground = args.array.ground();
    Stage::prepare(room, &args.disk, &plan, ground, args.keep.as_deref(), quiet)
}

fn throughput(args: &ThroughputArgs) -> Result<()> {
    let load = args.throughput();
    let room = Room::create()?;
    let ground = args.ground.ground(load.written_bytes());
    let plan = load.plan(args.ground.seed);
    let mut stage = Stage::prepare_to_write(&room, &args.ground.disk, &plan, ground, args.json)?;
    let report = load.run(&room, &mut stage, &args.server())?;
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print!("{}", report.table());
    }
    report.check()
}

fn find_most(args: &MostArgs) -> Result<()> {
    let others = OthersArgs {
        copies: args.copies,
        ..no_others()
    };
    let base = play_of(
        args.server.kind,
        args.most,
        &args.players,
        &others,
        &args.setup,
        args.stage.seed,
    );
    let room = Room::create()?;
    let mut stage = prepare(&room, &base, &args.stage, args.json)?;
    let range = (args.least, args.most);
    let report = most::search(&room, &mut stage, &base, args.server, range, args.json)?;
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print!("{}", report.text());
    }
    report.check()
}

fn compare_servers(args: &CompareArgs) -> Result<()> {
    let most = *args.streams.iter().max().context("no stream counts")?;
    let base = play_of(
        Kind::Rushes,
        most,
        &args.players,
        &args.others,
        &args.setup,
        args.stage.seed,
    );
    let room = Room::create()?;
    let mut stage = prepare(&room, &base, &args.stage, false)?;
    let results = compare::compare(
        &room,
        &mut stage,
        &base,
        &args.servers,
        &args.streams,
        args.repeat,
        &args.out,
    )?;
    compare::draw(&results, &args.out)?;
    let table = compare::table(&results)?;
    std::fs::write(args.out.join("table.md"), &table)?;
    if args.json {
        let all: Vec<_> = results.values().flatten().collect();
        println!("{}", serde_json::to_string(&all)?);
    } else {
        print!("{table}");
        println!("\nraw reports and plots: {}", args.out.display());
    }
    Ok(())
}

fn find_preroll(args: &PrerollArgs) -> Result<()> {
    let most = *args.streams.iter().max().context("no stream counts")?;
    let base = play_of(
        Kind::Rushes,
        most,
        &args.players,
        &no_others(),
        &args.setup,
        args.stage.seed,
    );
    let range = preroll::Range {
        max_ms: args.max.as_millis() as u64,
        step_ms: (args.step.as_millis() as u64).max(1),
    };
    let room = Room::create()?;
    let mut stage = prepare(&room, &base, &args.stage, false)?;
    let mut answers = Vec::new();
    for streams in &args.streams {
        for server in &args.servers {
            let answer = preroll::search(&room, &mut stage, &base, *server, *streams, range)?;
            answers.push(answer);
        }
    }
    if args.json {
        println!("{}", serde_json::to_string(&answers)?);
    } else {
        print!("{}", preroll::table(&answers)?);
    }
    Ok(())
}

/// A trial's stage: so many files of one size.
fn trial_stage(room: &Room, args: &TrialArgs, count: u64, bytes: u64) -> Result<(Play, Stage)> {
    let base = play_of(
        Kind::Rushes,
        0,
        &default_players(),
        &no_others(),
        &args.setup,
        SEED,
    );
    let plan = trials::plan(SEED, count, bytes);
    let stage = Stage::prepare(room, &args.disk, &plan, Ground::default(), None, args.json)?;
    Ok((base, stage))
}

fn hits(args: &TrialArgs) -> Result<()> {
    let room = Room::create()?;
    let (base, mut stage) = trial_stage(&room, args, 1, trials::WARM_FILE_BYTES)?;
    let runs = args.repeat.unwrap_or(HITS_RUNS);
    let trial = trials::hits(&room, &mut stage, &base, args.server, runs, args.gib)?;
    tell(&trial, args)
}

fn mixed(args: &TrialArgs) -> Result<()> {
    let room = Room::create()?;
    let (base, mut stage) = trial_stage(&room, args, args.clients, MIXED_FILE_BYTES)?;
    let runs = args.repeat.unwrap_or(MIXED_RUNS);
    let trial = trials::mixed(&room, &mut stage, &base, args.server, runs, args.seconds)?;
    tell(&trial, args)
}

fn absent(args: &TrialArgs) -> Result<()> {
    let room = Room::create()?;
    let (base, mut stage) = trial_stage(&room, args, 1, ABSENT_FILE_BYTES)?;
    let runs = args.repeat.unwrap_or(ABSENT_RUNS);
    let trial = trials::absent(&room, &mut stage, &base, runs)?;
    tell(&trial, args)
}

fn tell(trial: &Trial, args: &TrialArgs) -> Result<()> {
    trials::keep(trial, &args.out)?;
    if args.json {
        println!("{}", serde_json::to_string(trial)?);
    } else {
        print!("{}", trial.table()?);
    }
    Ok(())
}

fn show(args: &DemoArgs) -> Result<()> {
    let mut play = play_of(
        Kind::Rushes,
        args.streams,
        &default_players(),
        &no_others(),
        &args.setup,
        SEED,
    );
    play.copy_count = args.copies;
    play.seconds = args.seconds;
    demo::demo(args, &play)
}

/// Set in the environment of a process that has mounts of its own.
const OWN_MOUNTS: &str = "RUSHES_LAB_OWN_MOUNTS";

/// Go on as a process whose mounts nobody else sees: a process that copies the machine's (a
/// container that starts, an smbd of a test) would keep a device mounted for as long as it lives.
/// It could not be written anew for the next recording, and its page cache would outlive each
/// unmount that is to make it cold.
fn with_own_mounts() -> Result<()> {
    if std::env::var_os(OWN_MOUNTS).is_some() {
        return Ok(());
    }
    let error = std::process::Command::new("unshare")
        .args(["--mount", "--propagation", "private", "--"])
        .arg(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .env(OWN_MOUNTS, "1")
        .exec();
    Err(error).context("unshare (package util-linux) cannot be run")
}

fn cut_power(args: &PowerArgs) -> Result<()> {
    with_own_mounts()?;
    let plan = power::Plan {
        layout: args.layout,
        server: args.server,
        point: args.point,
        lie: args.lie,
        mount_options: args.mount_options.clone(),
        keep: args.from.is_none().then(|| args.keep.clone()),
        from: args.from.clone(),
        ..power::Plan::new(args.fs, args.seed, args.points)
    };
    let bar = match args.json {
        true => indicatif::ProgressBar::hidden(),
        false => indicatif::ProgressBar::new(args.point.map_or(args.points, |_| 1)),
    };
    let report = power::cut_power(&plan, &mut |done| bar.set_position(done))?;
    bar.finish_and_clear();
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print!("{}", report.text());
    }
    anyhow::ensure!(
        report.violation_count == 0,
        "{} promises are broken",
        report.violation_count
    );
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
