// SPDX-License-Identifier: Apache-2.0
//! The experiments of the command line: each sets up its stage, measures, and hands its report
//! back.
//!
//! Absent: printing, which is in [`crate::reports::outcome`], and measuring, which each experiment
//! does in its own file.

use crate::cli::{
    CompareArgs, CopyInArgs, DemoArgs, FillArgs, GroundArgs, MetadataArgs, MixedArgs, MostArgs,
    OthersArgs, PlayArgs, PlayersArgs, PowerArgs, PrerollArgs, RecordArgs, ScatterArgs, ServerArgs,
    StageArgs, StrokesArgs, ThroughputArgs, TrialArgs, default_players, no_others, plan_of,
    play_of,
};
use crate::edit;
use crate::edit::args::EditArgs;
use crate::edit::report::EditReport;
use crate::experiments::compare::{self, Results};
use crate::experiments::demo::{self, DemoOutcome};
use crate::experiments::metadata::MetadataReport;
use crate::experiments::most::{self, MostReport};
use crate::experiments::play::Play;
use crate::experiments::preroll::{self, Answer};
use crate::experiments::record::Record;
use crate::experiments::scatter::ScatterReport;
use crate::experiments::strokes::StrokesReport;
use crate::experiments::throughput::ThroughputReport;
use crate::experiments::trials::{self, Trial};
use crate::power;
use crate::power::report::PowerReport;
use crate::reports::outcome::{Experiment, Outcome};
use crate::reports::report::Report;
use crate::reports::written::WriteReport;
use crate::servers::server::Kind;
use crate::stage::Stage;
use crate::stage::ground::Ground;
use crate::stage::room::Room;
use anyhow::{Context, Result, ensure};
use serde::{Serialize, Serializer};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;

/// Seed of experiments without `--seed`.
const SEED: u64 = 1;
/// Runs of each server where a difference of a few percent must show.
const ABSENT_RUNS: u64 = 11;
const HITS_RUNS: u64 = 7;
const MIXED_RUNS: u64 = 3;
/// Larger than the cache for all clients together, so that a mixed load needs the disk.
const MIXED_FILE_BYTES: u64 = 512 << 20;
const ABSENT_FILE_BYTES: u64 = 256 << 20;

impl Experiment for PlayArgs {
    type Outcome = Report;

    fn run(&self) -> Result<Report> {
        let mut play = play_of(
            self.server,
            self.streams,
            &self.players,
            &self.others,
            &self.setup,
            self.stage.seed,
        );
        play.timeline = self.timeline;
        let room = Room::create()?;
        let mut stage = prepare(&room, &play, &self.stage, self.json)?;
        play.run(&room, &mut stage, self.json)
    }
}

impl Experiment for EditArgs {
    type Outcome = EditReport;

    fn run(&self) -> Result<EditReport> {
        let edit = self.edit()?;
        // A kept disk must stay visible to later runs.
        if self.keep.is_none() {
            with_own_mounts()?;
        }
        let room = Room::create()?;
        let (disk, plan) = (&self.ground.disk, edit.plan());
        let ground = self.ground.ground(edit.room_bytes());
        let keep = self.keep.as_deref();
        let mut stage = match edit.originals.is_empty() {
            true => Stage::prepare(&room, disk, &plan, ground, keep, self.json)?,
            false => edit::media::prepare(&room, disk, &plan, &edit.originals)?,
        };
        edit.run(&room, &mut stage)
    }
}

impl Experiment for RecordArgs {
    type Outcome = WriteReport;

    fn run(&self) -> Result<WriteReport> {
        write(&self.play(), &self.record(), &self.ground, self.json)
    }
}

impl Experiment for CopyInArgs {
    type Outcome = WriteReport;

    fn run(&self) -> Result<WriteReport> {
        write(&self.play(), &self.record(), &self.ground, self.json)
    }
}

fn write(play: &Play, record: &Record, args: &GroundArgs, is_quiet: bool) -> Result<WriteReport> {
    let room = Room::create()?;
    let ground = args.ground(record.bytes());
    let mut stage = Stage::prepare_to_write(&room, &args.disk, &play.plan(), ground, is_quiet)?;
    record.run(&room, &mut stage, &play.server, is_quiet)
}

impl Experiment for MixedArgs {
    type Outcome = Report;

    fn run(&self) -> Result<Report> {
        let play = self.play();
        let room_bytes = play.record.as_ref().map_or(0, Record::bytes);
        let ground = self.tidying.on(self.ground.ground(room_bytes));
        play_beside_writers(&play, ground, &self.ground, self.json)
    }
}

impl Experiment for FillArgs {
    type Outcome = Report;

    fn run(&self) -> Result<Report> {
        play_beside_writers(&self.play(), self.ground(), &self.ground, self.json)
    }
}

fn play_beside_writers(
    play: &Play,
    ground: Ground,
    args: &GroundArgs,
    is_quiet: bool,
) -> Result<Report> {
    let room = Room::create()?;
    let mut stage = Stage::prepare_to_write(&room, &args.disk, &play.plan(), ground, is_quiet)?;
    play.run(&room, &mut stage, is_quiet)
}

impl Experiment for ScatterArgs {
    type Outcome = ScatterReport;

    fn run(&self) -> Result<ScatterReport> {
        ensure!(
            self.block_min <= self.block_max && self.block_max * self.clients <= self.file_bytes,
            "each of {} clients needs a place for its largest write: {} KiB, in a file of {} KiB",
            self.clients,
            self.block_max >> 10,
            self.file_bytes >> 10
        );
        let scatter = self.scatter();
        let plan = trials::plan(self.ground.seed, 1, self.file_bytes);
        let room = Room::create()?;
        let ground = self.ground.ground(0);
        let disk = &self.ground.disk;
        let mut stage = Stage::prepare_to_write(&room, disk, &plan, ground, self.json)?;
        scatter.run(&room, &mut stage, &self.writers(), self.json)
    }
}

impl Experiment for MetadataArgs {
    type Outcome = MetadataReport;

    fn run(&self) -> Result<MetadataReport> {
        self.metadata().run()
    }
}

impl Experiment for StrokesArgs {
    type Outcome = StrokesReport;

    fn run(&self) -> Result<StrokesReport> {
        self.strokes().run()
    }
}

impl Experiment for ThroughputArgs {
    type Outcome = ThroughputReport;

    fn run(&self) -> Result<ThroughputReport> {
        let load = self.throughput();
        let room = Room::create()?;
        let ground = self.ground.ground(load.written_bytes());
        let plan = load.plan(self.ground.seed);
        let disk = &self.ground.disk;
        let mut stage = Stage::prepare_to_write(&room, disk, &plan, ground, self.json)?;
        load.run(&room, &mut stage, &self.server())
    }
}

impl Experiment for MostArgs {
    type Outcome = MostReport;

    fn run(&self) -> Result<MostReport> {
        let others = OthersArgs {
            copies: self.copies,
            ..no_others()
        };
        let base = play_of(
            self.server.kind,
            self.most,
            &self.players,
            &others,
            &self.setup,
            self.stage.seed,
        );
        let room = Room::create()?;
        let mut stage = prepare(&room, &base, &self.stage, self.json)?;
        let range = (self.least, self.most);
        most::search(&room, &mut stage, &base, self.server, range, self.json)
    }
}

/// The play that a comparison of servers begins with: Rushes, and the largest of these numbers of
/// streams.
fn base_of(
    streams: &[u64],
    players: &PlayersArgs,
    others: &OthersArgs,
    setup: &ServerArgs,
    seed: u64,
) -> Result<Play> {
    let most = *streams
        .iter()
        .max()
        .context("no number of streams was given")?;
    Ok(play_of(Kind::Rushes, most, players, others, setup, seed))
}

/// All reports of a comparison, and the folder that has them with their plots.
#[derive(Debug)]
pub struct Compared {
    results: Results,
    out: PathBuf,
}

impl Serialize for Compared {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.results.values().flatten())
    }
}

impl Outcome for Compared {
    fn table(&self) -> Result<String> {
        let table = compare::table(&self.results)?;
        let out = self.out.display();
        Ok(format!("{table}\nraw reports and plots: {out}\n"))
    }
}

impl Experiment for CompareArgs {
    type Outcome = Compared;

    fn run(&self) -> Result<Compared> {
        let base = base_of(
            &self.streams,
            &self.players,
            &self.others,
            &self.setup,
            self.stage.seed,
        )?;
        let room = Room::create()?;
        let mut stage = prepare(&room, &base, &self.stage, false)?;
        let results = compare::compare(
            &room,
            &mut stage,
            &base,
            &self.servers,
            &self.streams,
            self.repeat,
            &self.out,
        )?;
        compare::draw(&results, &self.out)?;
        std::fs::write(self.out.join("table.md"), compare::table(&results)?)?;
        Ok(Compared {
            results,
            out: self.out.clone(),
        })
    }
}

impl Outcome for Vec<Answer> {
    fn table(&self) -> Result<String> {
        preroll::table(self)
    }
}

impl Experiment for PrerollArgs {
    type Outcome = Vec<Answer>;

    fn run(&self) -> Result<Vec<Answer>> {
        let base = base_of(
            &self.streams,
            &self.players,
            &no_others(),
            &self.setup,
            self.stage.seed,
        )?;
        let range = preroll::Range {
            max_ms: self.max.as_millis() as u64,
            step_ms: (self.step.as_millis() as u64).max(1),
        };
        let room = Room::create()?;
        let mut stage = prepare(&room, &base, &self.stage, false)?;
        let mut answers = Vec::new();
        for streams in &self.streams {
            for server in &self.servers {
                let answer = preroll::search(&room, &mut stage, &base, *server, *streams, range)?;
                answers.push(answer);
            }
        }
        Ok(answers)
    }
}

/// A trial against stock Samba: one of the three that take the same options.
#[derive(Clone, Copy, Debug)]
pub enum TrialOf<'a> {
    /// Cached reads.
    Hits(&'a TrialArgs),
    /// Random mixed load.
    Mixed(&'a TrialArgs),
    /// The module without its daemon.
    Absent(&'a TrialArgs),
}

impl TrialOf<'_> {
    fn args(&self) -> &TrialArgs {
        match self {
            TrialOf::Hits(args) | TrialOf::Mixed(args) | TrialOf::Absent(args) => args,
        }
    }

    fn find(&self) -> Result<Trial> {
        let args = self.args();
        let room = Room::create()?;
        let repeat = |usual: u64| args.repeat.unwrap_or(usual);
        let server = args.server;
        match self {
            TrialOf::Hits(_) => {
                let (base, mut stage) = trial_stage(&room, args, 1, trials::WARM_FILE_BYTES)?;
                let runs = repeat(HITS_RUNS);
                trials::hits(&room, &mut stage, &base, server, runs, args.gib)
            }
            TrialOf::Mixed(_) => {
                let (base, mut stage) = trial_stage(&room, args, args.clients, MIXED_FILE_BYTES)?;
                let runs = repeat(MIXED_RUNS);
                trials::mixed(&room, &mut stage, &base, server, runs, args.seconds)
            }
            TrialOf::Absent(_) => {
                let (base, mut stage) = trial_stage(&room, args, 1, ABSENT_FILE_BYTES)?;
                trials::absent(&room, &mut stage, &base, repeat(ABSENT_RUNS))
            }
        }
    }
}

impl Experiment for TrialOf<'_> {
    type Outcome = Trial;

    fn run(&self) -> Result<Trial> {
        let trial = self.find()?;
        trials::keep(&trial, &self.args().out)?;
        Ok(trial)
    }
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

impl Experiment for DemoArgs {
    type Outcome = DemoOutcome;

    fn run(&self) -> Result<DemoOutcome> {
        let mut play = play_of(
            Kind::Rushes,
            self.streams,
            &default_players(),
            &no_others(),
            &self.setup,
            SEED,
        );
        play.copy_count = self.copies;
        play.seconds = self.seconds;
        demo::demo(self, &play)
    }
}

impl Experiment for PowerArgs {
    type Outcome = PowerReport;

    fn run(&self) -> Result<PowerReport> {
        with_own_mounts()?;
        let plan = power::Plan {
            layout: self.layout,
            server: self.server,
            point: self.point,
            lie: self.lie,
            mount_options: self.mount_options.clone(),
            keep: self.from.is_none().then(|| self.keep.clone()),
            from: self.from.clone(),
            ..power::Plan::new(self.fs, self.seed, self.points)
        };
        let bar = match self.json {
            true => indicatif::ProgressBar::hidden(),
            false => indicatif::ProgressBar::new(self.point.map_or(self.points, |_| 1)),
        };
        let report = power::cut_power(&plan, &mut |done| bar.set_position(done))?;
        bar.finish_and_clear();
        Ok(report)
    }
}

fn prepare(room: &Room, play: &Play, args: &StageArgs, quiet: bool) -> Result<Stage> {
    let plan = plan_of(play, args);
    let ground = args.array.ground();
    Stage::prepare(room, &args.disk, &plan, ground, args.keep.as_deref(), quiet)
}

/// Set in the environment of a process that has mounts of its own.
const OWN_MOUNTS: &str = "RUSHES_LAB_OWN_MOUNTS";

/// Go on as a process with a mount namespace of its own: a process that copies the machine's, such
/// as a starting container or an smbd of a test, would keep our device mounted for as long as it
/// lives. We could not write the device anew for the next recording, and its page cache would
/// outlive each unmount that makes it cold. For the same reason it lets go of the mounts of others.
fn with_own_mounts() -> Result<()> {
    if std::env::var_os(OWN_MOUNTS).is_some() {
        return Ok(());
    }
    // The rooms and disks of this run are made in there.
    let folder = std::env::current_dir()?;
    let mut unshare = std::process::Command::new("unshare");
    let error = rushes_kit::mounts::in_own_namespace(&mut unshare, &[&folder], None)
        .arg(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .env(OWN_MOUNTS, "1")
        .exec();
    Err(error).context("unshare (package util-linux) cannot be run")
}
