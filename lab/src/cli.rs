// SPDX-License-Identifier: Apache-2.0
//! The command line: every flag of every experiment, in one place.

use crate::compare::Contender;
use crate::disk::FileSystem;
use crate::disk::cli::DiskCommand;
use crate::play::{Play, Start};
use crate::power::cut::Lie;
use crate::server::{self, Kind, Way};
use crate::stage::Place;
use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;
use std::time::Duration;

/// An honest playback benchmark for media servers.
#[derive(Debug, Parser)]
#[command(name = "rushes lab", version, about)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What the lab can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Play N streams against one server and say who was late
    Play(Box<PlayArgs>),
    /// Several servers and stream counts, interleaved and repeated, with plots
    Compare(Box<CompareArgs>),
    /// The smallest preroll that keeps N players started at once
    Preroll(Box<PrerollArgs>),
    /// A file from cache: server CPU per GiB and throughput, beside stock
    Hits(Box<TrialArgs>),
    /// Random mixed load (70 % reads of 4 to 256 KiB), beside stock
    Mixedio(Box<TrialArgs>),
    /// Our module without its daemon, beside stock
    Absent(Box<TrialArgs>),
    /// Real footage, many players, copies beside them: who drops frames?
    Demo(Box<DemoArgs>),
    /// Cut the power of a disk at many instants: is what was promised there?
    PowerCuts(PowerArgs),
    /// Slow disks by themselves
    #[command(subcommand)]
    Disk(DiskCommand),
    /// Remove what runs that were killed left behind
    Clean {
        /// And the disk that `--keep DIR` kept in this folder
        #[arg(long, value_name = "DIR")]
        kept: Option<PathBuf>,
    },
    /// A player (started by the lab itself)
    #[command(hide = true)]
    Player,
    /// A storm client (started by the lab itself)
    #[command(hide = true)]
    Storm,
    /// A client that works (started by the lab itself)
    #[command(hide = true)]
    Work,
}

/// Which disk, and what lies on it.
#[derive(Clone, Debug, Args)]
pub struct StageArgs {
    /// `table5` (a modelled disk array) or a folder on a disk of yours
    #[arg(long, default_value = "table5")]
    pub disk: Place,
    /// Keep the modelled disk with its footage in this folder, and use it again when it fits
    #[arg(long, value_name = "DIR")]
    pub keep: Option<PathBuf>,
    /// Prepare footage for at least so many streams (to share a kept disk between runs)
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub footage_streams: u64,
    /// Prepare footage for at least so many copiers
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub footage_copies: u64,
    /// Prepare footage of at least so many seconds
    #[arg(long, value_name = "S", default_value_t = 0.0)]
    pub footage_seconds: f64,
    /// Prepare the folder that storms list, whether or not there is one
    #[arg(long)]
    pub footage_archive: bool,
    /// Of the footage's content
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// How players play.
#[derive(Clone, Debug, Args)]
pub struct PlayersArgs {
    /// Bits a second of each stream
    #[arg(long, default_value = "100M", value_parser = parse_amount)]
    pub bitrate: u64,
    /// How long each plays
    #[arg(long, default_value = "60", value_parser = parse_seconds)]
    pub seconds: f64,
    /// Time between a player's open and its first deadline
    #[arg(long, default_value = "500ms", value_parser = parse_span)]
    pub preroll: Duration,
    /// Frames a second; 25, and 24 with --sequence
    #[arg(long)]
    pub fps: Option<f64>,
    /// When players start
    #[arg(long, value_enum, default_value_t = Start::Staggered)]
    pub start: Start,
    /// Between two starts
    #[arg(long, default_value = "250ms", value_parser = parse_span)]
    pub stagger: Duration,
    /// One file a frame
    #[arg(long)]
    pub sequence: bool,
    /// Names, inodes and extents are cold too, as after a restart of the machine; without this the folders
    /// were looked through before, as people do, and only the footage itself is cold
    #[arg(long)]
    pub cold_metadata: bool,
    /// How long a run that collapsed goes on
    #[arg(long, default_value = "10s", value_parser = parse_span)]
    pub grace: Duration,
}

/// Who else is there.
#[derive(Clone, Debug, Args)]
pub struct OthersArgs {
    /// Clients that download cold files larger than the cache
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub copies: u64,
    /// Clients that stat and list a folder
    #[arg(long, value_name = "C", default_value_t = 0)]
    pub storm: u64,
    /// Look-ups a second of each
    #[arg(long, value_name = "R", default_value_t = 50.0)]
    pub storm_rate: f64,
    /// Each lists the whole folder so often; 0 never
    #[arg(long, value_name = "SPAN", default_value = "20s", value_parser = parse_span)]
    pub storm_list_every: Duration,
    /// Entries of that folder
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    pub storm_entries: u64,
    /// The folder was listed before, so its metadata is in memory
    #[arg(long)]
    pub storm_warm: bool,
}

/// How a server is set up.
#[derive(Clone, Debug, Args)]
pub struct ServerArgs {
    /// How clients come
    #[arg(long, value_enum, default_value_t = Way::Smb)]
    pub door: Way,
    /// Memory for cached data
    #[arg(long, default_value = "1GiB", value_parser = parse_amount)]
    pub cache: u64,
    /// Rushes without its pattern analyser
    #[arg(long)]
    pub no_analyser: bool,
    /// Do not tell Rushes the bitrate; it has to find out
    #[arg(long)]
    pub no_rule: bool,
    /// Device model for Rushes, as `rushes calibrate` wrote it; else it is measured first
    #[arg(long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// The Samba module to try
    #[arg(long, value_name = "FILE")]
    pub module: Option<PathBuf>,
    /// A line for the share in smb.conf, such as "strict locking=no"; may be repeated
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse_pair)]
    pub smb_option: Vec<(String, String)>,
    /// A line for [server] in rushes.toml, such as 'margin="0%"'; may be repeated
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse_pair)]
    pub rushes_option: Vec<(String, String)>,
    /// Read-ahead of the device
    #[arg(long, value_name = "KIB")]
    pub read_ahead_kib: Option<u64>,
}

/// `lab play`.
#[derive(Clone, Debug, Args)]
pub struct PlayArgs {
    /// Against which server
    #[arg(long, value_enum, default_value_t = Kind::Rushes)]
    pub server: Kind,
    /// How many players
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u64).range(1..))]
    pub streams: u64,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub players: PlayersArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub others: OthersArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub setup: ServerArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub stage: StageArgs,
    /// Print one JSON object and nothing else
    #[arg(long)]
    pub json: bool,
    /// Put the lateness of every frame into the JSON
    #[arg(long)]
    pub timeline: bool,
}

/// `lab compare`.
#[derive(Clone, Debug, Args)]
pub struct CompareArgs {
    /// Which: rushes, rushes-no-analyser, stock, stock-tuned, absent
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "rushes,stock,stock-tuned"
    )]
    pub servers: Vec<Contender>,
    /// How many players, in turn
    #[arg(long, value_delimiter = ',', default_value = "3,5,7,9,11,12,13,15")]
    pub streams: Vec<u64>,
    /// How often each
    #[arg(long, default_value_t = 3)]
    pub repeat: u64,
    /// Where raw reports and plots go
    #[arg(long, value_name = "DIR", default_value = "build/lab/compare")]
    pub out: PathBuf,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub players: PlayersArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub others: OthersArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub setup: ServerArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub stage: StageArgs,
    /// Print all reports as one JSON array instead of the table
    #[arg(long)]
    pub json: bool,
}

/// `lab preroll`.
#[derive(Clone, Debug, Args)]
pub struct PrerollArgs {
    /// Which servers
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "rushes,stock,stock-tuned"
    )]
    pub servers: Vec<Contender>,
    /// How many players
    #[arg(long, value_delimiter = ',', default_value = "9,10,11,12")]
    pub streams: Vec<u64>,
    /// No longer than this
    #[arg(long, default_value = "8s", value_parser = parse_span)]
    pub max: Duration,
    /// So exactly
    #[arg(long, default_value = "100ms", value_parser = parse_span)]
    pub step: Duration,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub players: PlayersArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub setup: ServerArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub stage: StageArgs,
    /// Print JSON instead of the table
    #[arg(long)]
    pub json: bool,
}

/// `lab hits`, `lab mixedio`, `lab absent`.
#[derive(Clone, Debug, Args)]
pub struct TrialArgs {
    /// The server on trial (not for `absent`)
    #[arg(long, default_value = "rushes")]
    pub server: Contender,
    /// Runs of each server; enough for a median, else the trial's own number
    #[arg(long)]
    pub repeat: Option<u64>,
    /// Length of a run (mixedio)
    #[arg(long, default_value = "20s", value_parser = parse_seconds)]
    pub seconds: f64,
    /// Clients (mixedio)
    #[arg(long, default_value_t = 4)]
    pub clients: u64,
    /// Data read in a run (hits)
    #[arg(long, value_name = "GIB", default_value_t = 4)]
    pub gib: u64,
    /// Where raw results go
    #[arg(long, value_name = "DIR", default_value = "build/lab/trials")]
    pub out: PathBuf,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub setup: ServerArgs,
    /// `table5` or a folder on a disk of yours
    #[arg(long, default_value = "table5")]
    pub disk: Place,
    /// Print JSON instead of the table
    #[arg(long)]
    pub json: bool,
}

/// `lab demo`.
#[derive(Clone, Debug, Args)]
pub struct DemoArgs {
    /// How many players
    #[arg(long, default_value_t = 10)]
    pub streams: u64,
    /// Clients that copy beside them
    #[arg(long, default_value_t = 2)]
    pub copies: u64,
    /// How long each plays
    #[arg(long, default_value = "60", value_parser = parse_seconds)]
    pub seconds: f64,
    /// Where footage, reports and the plot go
    #[arg(long, value_name = "DIR", default_value = "build/demo")]
    pub out: PathBuf,
    /// `table5` or a folder on a disk of yours
    #[arg(long, default_value = "table5")]
    pub disk: Place,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub setup: ServerArgs,
    /// Print the three reports as one JSON array and nothing else
    #[arg(long)]
    pub json: bool,
}

/// `lab power-cuts`.
#[derive(Clone, Debug, Args)]
pub struct PowerArgs {
    /// On which file system
    #[arg(long)]
    pub fs: FileSystem,
    /// How many power cuts
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..))]
    pub points: u64,
    /// Of workloads and points
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// This point only, as a violation names it
    #[arg(long, value_name = "P", conflicts_with = "points")]
    pub point: Option<u64>,
    /// Recordings that show a violation are kept in this folder
    #[arg(long, value_name = "DIR", default_value = "build/lab/power-cuts")]
    pub keep: PathBuf,
    /// Take recordings that were kept in this folder: the kernel's own timing makes each new one a little different
    #[arg(long, value_name = "DIR")]
    pub from: Option<PathBuf>,
    /// Mount options to try, such as barrier=0
    #[arg(long, value_name = "OPTIONS", default_value = "")]
    pub mount_options: String,
    /// Let the disk lie, to see that it is found out
    #[arg(long, value_enum, default_value_t = Lie::None)]
    pub lie: Lie,
    /// Print one JSON object and nothing else
    #[arg(long)]
    pub json: bool,
}

/// What every experiment that takes no player flags plays.
pub fn default_players() -> PlayersArgs {
    PlayersArgs {
        bitrate: 100_000_000,
        seconds: 60.0,
        preroll: Duration::from_millis(500),
        fps: None,
        start: Start::Staggered,
        stagger: Duration::from_millis(250),
        sequence: false,
        cold_metadata: false,
        grace: Duration::from_secs(10),
    }
}

/// Nobody else is there.
pub fn no_others() -> OthersArgs {
    OthersArgs {
        copies: 0,
        storm: 0,
        storm_rate: 0.0,
        storm_list_every: Duration::ZERO,
        storm_entries: 0,
        storm_warm: false,
    }
}

/// Put a run together from its parts.
pub fn play_of(
    kind: Kind,
    streams: u64,
    players: &PlayersArgs,
    others: &OthersArgs,
    setup: &ServerArgs,
    seed: u64,
) -> Play {
    let fps = players
        .fps
        .unwrap_or(if players.sequence { 24.0 } else { 25.0 });
    let frames_per_kilosecond = (fps * 1000.0).round().max(1.0) as u64;
    let told = !setup.no_rule;
    Play {
        server: server::Spec {
            kind,
            way: setup.door,
            cache_bytes: setup.cache,
            analyser: !setup.no_analyser,
            preroll: players.preroll,
            bitrate: (told && !players.sequence).then_some(players.bitrate),
            frames_per_kilosecond: (told && players.sequence).then_some(frames_per_kilosecond),
            smb_options: setup.smb_option.clone(),
            rushes_options: setup.rushes_option.clone(),
            read_ahead_kib: setup.read_ahead_kib,
            model: setup.model.clone(),
            module: setup.module.clone(),
        },
        stream_count: streams,
        bitrate: players.bitrate,
        frames_per_kilosecond,
        seconds: players.seconds,
        preroll: players.preroll,
        start: players.start,
        stagger: players.stagger,
        sequence: players.sequence,
        cold_metadata: players.cold_metadata,
        copy_count: others.copies,
        storm_count: others.storm,
        storm_rate: others.storm_rate,
        storm_list_every_s: others.storm_list_every.as_secs_f64(),
        storm_warm: others.storm_warm,
        entry_count: others.storm_entries,
        grace: players.grace,
        timeline: false,
        seed,
        real: None,
    }
}

/// What to prepare for a run, or for the largest of several.
pub fn plan_of(play: &Play, stage: &StageArgs) -> crate::stage::Plan {
    let largest = Play {
        stream_count: play.stream_count.max(stage.footage_streams),
        copy_count: play.copy_count.max(stage.footage_copies),
        seconds: play.seconds.max(stage.footage_seconds),
        storm_count: play.storm_count.max(u64::from(stage.footage_archive)),
        ..play.clone()
    };
    largest.plan()
}

/// `100M`, `1GiB`, `750000000`.
pub fn parse_amount(text: &str) -> Result<u64, String> {
    let units: [(&str, u64); 9] = [
        ("KiB", 1 << 10),
        ("MiB", 1 << 20),
        ("GiB", 1 << 30),
        ("TiB", 1 << 40),
        ("k", 1_000),
        ("K", 1_000),
        ("M", 1_000_000),
        ("G", 1_000_000_000),
        ("T", 1_000_000_000_000),
    ];
    let (number, factor) = units
        .iter()
        .find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, *factor)))
        .unwrap_or((text, 1));
    let number: f64 = number.trim().parse().map_err(|_| {
        format!("`{text}` is no amount; expected a number with k, M, G, KiB, MiB or GiB behind it")
    })?;
    if !number.is_finite() || number < 0.0 {
        return Err(format!("`{text}` is no amount; it must not be negative"));
    }
    Ok((number * factor as f64).round() as u64)
}

/// `500ms`, `2s`, `1.5`.
pub fn parse_span(text: &str) -> Result<Duration, String> {
    let units = [("ms", 1e-3), ("us", 1e-6), ("s", 1.0), ("m", 60.0)];
    let (number, factor) = units
        .iter()
        .find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, *factor)))
        .unwrap_or((text, 1.0));
    number
        .trim()
        .parse::<f64>()
        .ok()
        .and_then(|number| Duration::try_from_secs_f64(number * factor).ok())
        .ok_or_else(|| format!("`{text}` is no span of time; expected for instance 500ms or 2s"))
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    let seconds = parse_span(text)?.as_secs_f64();
    if seconds == 0.0 {
        return Err("a run of no length shows nothing".to_owned());
    }
    Ok(seconds)
}

fn parse_pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text
        .split_once('=')
        .ok_or_else(|| format!("`{text}` is no KEY=VALUE"))?;
    Ok((key.trim().to_owned(), value.trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn amounts_and_spans_are_read_as_people_write_them() {
        assert_eq!(parse_amount("100M"), Ok(100_000_000));
        assert_eq!(parse_amount("1GiB"), Ok(1 << 30));
        assert_eq!(parse_amount("1.5k"), Ok(1500));
        assert!(parse_amount("fast").is_err());
        assert!(parse_amount("-1").is_err());
        assert_eq!(parse_span("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_span("2"), Ok(Duration::from_secs(2)));
        assert!(parse_span("-1s").is_err());
    }

    #[test]
    fn the_issues_own_command_is_understood() {
        let line = "rushes-lab play --server stock --door smb --streams 12 --bitrate 100M --seconds 60 \
                    --preroll 500ms --copies 2 --disk table5 --json";
        let cli = Cli::try_parse_from(line.split_whitespace()).unwrap();
        let Command::Play(args) = cli.command else {
            panic!("not a play");
        };
        let play = play_of(
            args.server,
            args.streams,
            &args.players,
            &args.others,
            &args.setup,
            args.stage.seed,
        );
        assert_eq!(play.frame_count(), 1500);
        assert_eq!(play.plan().frame_bytes(), 500_000);
        assert_eq!(play.plan().copy_count, 4);
        assert!(play.plan().copy_bytes > play.server.cache_bytes);
    }
}
