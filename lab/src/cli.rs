// SPDX-License-Identifier: Apache-2.0
//! The command line: every flag of every experiment, in one place.

pub use crate::amounts::{parse_amount, parse_bitrate, parse_seconds, parse_span};
use crate::clients::writer::Extend;
use crate::disk::FileSystem;
use crate::disk::cli::DiskCommand;
use crate::edit::args::EditArgs;
use crate::experiments::compare::Contender;
use crate::experiments::fill::Fill;
use crate::experiments::metadata::{LabelledFolder, Metadata};
use crate::experiments::play::{Play, Start};
use crate::experiments::record::{Pace, Record};
use crate::experiments::scatter::{Scatter, Writers};
use crate::experiments::strokes::Strokes;
use crate::experiments::throughput::Throughput;
use crate::experiments::tidy::{Tidy, Untidy};
use crate::power;
use crate::power::cut::Lie;
use crate::servers::server::{self, Kind, Way};
use crate::stage::footage::PAGE_BYTES;
use crate::stage::ground::{Ground, Layout, Place};
use clap::{ArgAction, Args, Parser, Subcommand};
use std::path::PathBuf;
use std::time::Duration;

/// An honest playback benchmark for media servers.
#[derive(Debug, Parser)]
#[command(name = "rushes lab", version, about)]
pub struct Cli {
    /// The command to run.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands of the lab.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Play N streams from one server and report late frames
    Play(Box<PlayArgs>),
    /// Editors at work: timelines with cuts, multicam, scrubbing, conforming and mixes, on several
    /// servers in turn
    Edit(Box<EditArgs>),
    /// Record N streams through one server; check acknowledgement, durability, extents and bytes
    Record(Box<RecordArgs>),
    /// Players, recorders and copiers at once
    Mixed(Box<MixedArgs>),
    /// Players on a pool while other clients fill it completely
    Fill(Box<FillArgs>),
    /// Clients that copy large files to the server at full speed
    CopyIn(Box<CopyInArgs>),
    /// Small random writes into an existing file, by clients or by fio, then a flush
    Scatter(Box<ScatterArgs>),
    /// Metadata: files created, examined, listed, renamed and deleted per second in given folders
    Metadata(MetadataArgs),
    /// Microseconds per call: frames and small writes of one program in given folders
    Strokes(StrokesArgs),
    /// Clients that read and write their own files at full speed
    Throughput(Box<ThroughputArgs>),
    /// Find the largest number of streams without a late frame
    Most(Box<MostArgs>),
    /// Compare servers and stream counts, interleaved and repeated, with plots
    Compare(Box<CompareArgs>),
    /// Find the smallest preroll with which N players that start at once have no late frame
    Preroll(Box<PrerollArgs>),
    /// Read a cached file: server CPU per GiB and throughput, compared with stock Samba
    Hits(Box<TrialArgs>),
    /// Random mixed load (70 % reads of 4 to 256 KiB), compared with stock Samba
    Mixedio(Box<TrialArgs>),
    /// The Samba module without its daemon, compared with stock Samba
    Absent(Box<TrialArgs>),
    /// Play real footage to many players, with copies beside them, and plot dropped frames
    Demo(Box<DemoArgs>),
    /// Cut the power of a disk at many instants, and check that acknowledged data is there
    PowerCuts(PowerArgs),
    /// Use a slow disk without a server
    #[command(subcommand)]
    Disk(DiskCommand),
    /// Delete mounts, loop devices and files that killed runs left
    Clean {
        /// Also delete the disk that `--keep DIR` kept in this folder
        #[arg(long, value_name = "DIR")]
        kept: Option<PathBuf>,
    },
    /// Print all words of the command line as JSON, for `rushes completions`
    #[command(hide = true)]
    Words,
    /// Internal: a player
    #[command(hide = true)]
    Player,
    /// Internal: an editor
    #[command(hide = true)]
    Editor,
    /// Internal: a writer
    #[command(hide = true)]
    Writer,
    /// Internal: a client that fills a pool
    #[command(hide = true)]
    Filler,
    /// Internal: a client that lists and examines files
    #[command(hide = true)]
    Storm,
    /// Internal: a client that reads and writes at full speed
    #[command(hide = true)]
    Work,
}

/// Folders, and numbers of files.
#[derive(Clone, Debug, Args)]
pub struct MetadataArgs {
    /// Folders to measure in turn, each with a name for the report
    #[arg(value_name = "LABEL=FOLDER", required = true)]
    pub places: Vec<LabelledFolder>,
    /// Number of files per client
    #[arg(long, default_value_t = 4000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub files: u64,
    /// Numbers of clients at once; each is measured in turn
    #[arg(long, value_delimiter = ',', default_value = "1,8", value_parser = clap::value_parser!(u64).range(1..=256))]
    pub clients: Vec<u64>,
    /// Number of repetitions
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=100))]
    pub rounds: u64,
    /// Number of folders for the files of each client
    #[arg(long, value_name = "F", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub folders: u64,
    /// Write 4 KiB into each N-th file; 0: all files are empty
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub bytes_every: u64,
    /// Leave out renaming
    #[arg(long)]
    pub no_rename: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

impl MetadataArgs {
    /// The request.
    pub fn metadata(&self) -> Metadata {
        Metadata {
            places: self.places.clone(),
            file_count: self.files,
            client_counts: self.clients.clone(),
            round_count: self.rounds,
            folder_count: self.folders,
            bytes_every: self.bytes_every,
            renames: !self.no_rename,
        }
    }
}

/// Folders, and numbers of calls.
#[derive(Clone, Debug, Args)]
pub struct StrokesArgs {
    /// Folders to measure in turn, each with a name for the report; on file systems with direct I/O
    #[arg(value_name = "LABEL=FOLDER", required = true)]
    pub places: Vec<LabelledFolder>,
    /// Frames per round
    #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub frames: u64,
    /// Pages of 4 KiB per frame; the default is 2K film: 2,048 × 1,556 pixels of four bytes, and a
    /// header
    #[arg(long, value_name = "N", default_value_t = 3113, value_parser = clap::value_parser!(u64).range(1..=65_536))]
    pub frame_pages: u64,
    /// Small writes per round
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub small: u64,
    /// Number of repetitions
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=100))]
    pub rounds: u64,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

impl StrokesArgs {
    /// The request.
    pub fn strokes(&self) -> Strokes {
        Strokes {
            places: self.places.clone(),
            frame_count: self.frames,
            frame_bytes: self.frame_pages * 4096,
            small_count: self.small,
            round_count: self.rounds,
        }
    }
}

/// Number of disks, and the layout that joins them.
#[derive(Clone, Debug, Args)]
pub struct ArrayArgs {
    /// Number of equal disks; more than one requires --layout
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=64))]
    pub disks: u64,
    /// Layout that joins the disks
    #[arg(long, value_enum, default_value_t = Layout::Plain)]
    pub layout: Layout,
    /// Policy of the pool, in the words of `rushes pool policy`, such as "choose=least_loaded"
    #[arg(long, value_name = "WORDS")]
    pub wish: Option<String>,
}

/// The disk and its footage.
#[derive(Clone, Debug, Args)]
pub struct StageArgs {
    /// `table5` (a modelled disk array), `table5-half`, `table5-quarter`, `table5-eighth` (at a
    /// half, a quarter, an eighth of its rates), `ssd` (a modelled solid-state drive), `memory` (a
    /// device that takes no time) or a folder on your own disk
    #[arg(long, default_value = "table5")]
    pub disk: Place,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub array: ArrayArgs,
    /// Keep the modelled disk and its footage in this folder, and use it again if it fits
    #[arg(long, value_name = "DIR")]
    pub keep: Option<PathBuf>,
    /// Least number of streams to prepare footage for, so that runs can share a kept disk
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub footage_streams: u64,
    /// Least number of copiers to prepare footage for
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub footage_copies: u64,
    /// Least length of the footage in seconds
    #[arg(long, value_name = "S", default_value_t = 0.0)]
    pub footage_seconds: f64,
    /// Prepare the folder for --storm, also without --storm
    #[arg(long)]
    pub footage_archive: bool,
    /// Seed of the footage's content
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Players.
#[derive(Clone, Debug, Args)]
pub struct PlayersArgs {
    /// Rate of each stream, bits per second
    #[arg(long, default_value = "100M", value_parser = parse_bitrate)]
    pub bitrate: u64,
    /// Time that each player plays
    #[arg(long, default_value = "60", value_parser = parse_seconds)]
    pub seconds: f64,
    /// Time between a player's open and its first deadline
    #[arg(long, default_value = "500ms", value_parser = parse_span)]
    pub preroll: Duration,
    /// Frames per second; default 25, with --sequence 24
    #[arg(long)]
    pub fps: Option<f64>,
    /// Pattern of starts
    #[arg(long, value_enum, default_value_t = Start::Staggered)]
    pub start: Start,
    /// Time between two starts
    #[arg(long, default_value = "250ms", value_parser = parse_span)]
    pub stagger: Duration,
    /// One file per frame
    #[arg(long)]
    pub sequence: bool,
    /// Also drop names, inodes and extents from memory, as after a restart of the machine; by
    /// default the folders were listed before, and only the footage is cold
    #[arg(long)]
    pub cold_metadata: bool,
    /// Time beyond its length after which a run that cannot keep up is ended
    #[arg(long, default_value = "10s", value_parser = parse_span)]
    pub grace: Duration,
}

/// Other clients.
#[derive(Clone, Debug, Args)]
pub struct OthersArgs {
    /// Number of clients that copy cold files larger than the cache
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub copies: u64,
    /// Number of clients that examine and list files in a folder
    #[arg(long, value_name = "C", default_value_t = 0)]
    pub storm: u64,
    /// Look-ups per second of each
    #[arg(long, value_name = "R", default_value_t = 50.0)]
    pub storm_rate: f64,
    /// Time between two listings of the whole folder by each; 0: never
    #[arg(long, value_name = "SPAN", default_value = "20s", value_parser = parse_span)]
    pub storm_list_every: Duration,
    /// Number of entries in that folder
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    pub storm_entries: u64,
    /// List the folder first, so that its metadata is in memory
    #[arg(long)]
    pub storm_warm: bool,
}

/// The server.
#[derive(Clone, Debug, Args)]
pub struct ServerArgs {
    /// Protocol of the clients
    #[arg(long, value_enum, default_value_t = Way::Smb)]
    pub door: Way,
    /// Memory for cached data; default 1GiB, with `edit --again` a quarter of the cut lists
    #[arg(long, value_parser = parse_amount)]
    pub cache: Option<u64>,
    /// Rushes without its pattern analyser
    #[arg(long)]
    pub no_analyser: bool,
    /// Do not tell Rushes the bitrate; it has to measure it
    #[arg(long)]
    pub no_rule: bool,
    /// Device model for Rushes, written by `rushes calibrate`; by default it is measured first
    #[arg(long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// Path of the Samba module
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

/// Memory for cached data where no other size is given. Units: bytes.
pub const CACHE_BYTES: u64 = 1 << 30;

impl ServerArgs {
    /// Memory for cached data. Units: bytes.
    pub fn cache_bytes(&self) -> u64 {
        self.cache.unwrap_or(CACHE_BYTES)
    }
}

/// `lab play`.
#[derive(Clone, Debug, Args)]
pub struct PlayArgs {
    /// The server
    #[arg(long, value_enum, default_value_t = Kind::Rushes)]
    pub server: Kind,
    /// Number of players
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
    /// Include the lateness of every frame in the JSON
    #[arg(long)]
    pub timeline: bool,
}

/// The disk of a run that writes. It is created for the run and never kept.
#[derive(Clone, Debug, Args)]
pub struct GroundArgs {
    /// `table5` (a modelled disk array), `table5-half`, `table5-quarter`, `table5-eighth` (at a
    /// half, a quarter, an eighth of its rates), `ssd` (a modelled solid-state drive), `memory` (a
    /// device that takes no time) or a folder on your own disk
    #[arg(long, default_value = "table5")]
    pub disk: Place,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub array: ArrayArgs,
    /// File system of the modelled disk
    #[arg(long, value_enum, default_value_t = FileSystem::Ext4)]
    pub fs: FileSystem,
    /// Make and mount ext4 as docs/guide/recording.md recommends for media: with its tables in one
    /// place, so that they do not split large files, and a journal commit every 30 s. By default
    /// mkfs.ext4 and mount use their own defaults
    #[arg(long)]
    pub media_format: bool,
    /// Volatile write cache of 256 MB on the modelled disk, as in the paper's array;
    /// `--write-back=false`: none
    #[arg(long, value_name = "BOOL", default_value_t = true, action = ArgAction::Set, num_args = 0..=1,
          require_equals = true, default_missing_value = "true")]
    pub write_back: bool,
    /// Folder for the bytes of the modelled disk, if memory is too small; it has to be on a disk
    /// several times as fast
    #[arg(long, value_name = "DIR")]
    pub disk_folder: Option<PathBuf>,
    /// Write buffer of Rushes; 0: its daemon takes no writes. Rivals get the same amount of
    /// additional page cache
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = parse_amount)]
    pub write_buffer: u64,
    /// A line for [write] in rushes.toml, such as 'age="2s"'; may be repeated
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse_pair)]
    pub write_option: Vec<(String, String)>,
    /// Seed of all content
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Writers.
#[derive(Clone, Debug, Args)]
pub struct WritersArgs {
    /// Bytes per call without pacing
    #[arg(long, value_name = "BYTES", default_value = "1MiB", value_parser = parse_pieces)]
    pub write_bytes: u64,
    /// Bytes per writer without pacing
    #[arg(long, default_value = "1GiB", value_parser = parse_pieces)]
    pub bytes: u64,
    /// Flush each file (SMB2 FLUSH, which smbd answers with fsync) before it is closed
    #[arg(long)]
    pub flush: bool,
    /// Include the lateness of every written frame in the JSON
    #[arg(long)]
    pub timeline: bool,
}

/// `lab record`.
#[derive(Clone, Debug, Args)]
pub struct RecordArgs {
    /// The server
    #[arg(long, value_enum, default_value_t = Kind::Rushes)]
    pub server: Kind,
    /// Number of writers
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u64).range(1..))]
    pub streams: u64,
    /// Bits per second of each, or `max`: write --bytes at full speed
    #[arg(long, default_value = "100M", value_parser = parse_rate)]
    pub bitrate: Rate,
    /// Time that each writer records
    #[arg(long, default_value = "60", value_parser = parse_seconds)]
    pub seconds: f64,
    /// Time between a writer's open and its first deadline
    #[arg(long, default_value = "500ms", value_parser = parse_span)]
    pub preroll: Duration,
    /// Frames per second
    #[arg(long, default_value_t = 25.0)]
    pub fps: f64,
    /// Pattern of starts
    #[arg(long, value_enum, default_value_t = Start::Staggered)]
    pub start: Start,
    /// Time between two starts
    #[arg(long, default_value = "250ms", value_parser = parse_span)]
    pub stagger: Duration,
    /// Time beyond its length after which a run that cannot keep up is ended
    #[arg(long, default_value = "10s", value_parser = parse_span)]
    pub grace: Duration,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub writers: WritersArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub setup: ServerArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub ground: GroundArgs,
    /// Print one JSON object and nothing else
    #[arg(long)]
    pub json: bool,
}

/// A pool that tidies itself while clients play and record.
#[derive(Clone, Debug, Args)]
pub struct TidyArgs {
    /// Work for tidying: files beside the footage, in several segments or on members to which
    /// others are added
    #[arg(long, value_name = "WHAT", value_enum)]
    pub tidy: Option<Untidy>,
    /// Number of these files
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub tidy_files: u64,
    /// Size of each
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = parse_pieces)]
    pub tidy_bytes: u64,
    /// Time of tidying, in the words of `rushes pool policy --tidy`; `off` to compare
    #[arg(long, value_name = "WHEN", default_value = "always")]
    pub tidy_when: String,
    /// Number of disks that become members only after all files are written; default 1, with
    /// `--tidy grow` 2
    #[arg(long, value_name = "N")]
    pub added: Option<u64>,
}

impl TidyArgs {
    /// The request.
    pub fn tidy(&self, seed: u64) -> Option<Tidy> {
        Some(Tidy {
            untidy: self.tidy?,
            file_count: self.tidy_files,
            file_bytes: self.tidy_bytes,
            schedule: self.tidy_when.clone(),
            seed,
        })
    }

    /// Disks, some of which are added later.
    pub fn on(&self, ground: Ground) -> Ground {
        let added_count = match self.tidy {
            None => return ground,
            Some(Untidy::Rebalance) => 1,
            Some(Untidy::Grow) => 2,
            Some(Untidy::Defrag) => 0,
        };
        Ground {
            added_count: self.added.unwrap_or(added_count),
            idles_soon: true,
            room_bytes: ground.room_bytes + self.tidy_files * self.tidy_bytes,
            ..ground
        }
    }
}

/// `lab mixed`.
#[derive(Clone, Debug, Args)]
pub struct MixedArgs {
    /// The server
    #[arg(long, value_enum, default_value_t = Kind::Rushes)]
    pub server: Kind,
    /// Number of players
    #[arg(long, value_name = "R", default_value_t = 6, value_parser = clap::value_parser!(u64).range(1..))]
    pub readers: u64,
    /// Number of recorders
    #[arg(long, value_name = "W", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    pub writers: u64,
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
    pub ground: GroundArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub tidying: TidyArgs,
    /// Print one JSON object and nothing else
    #[arg(long)]
    pub json: bool,
    /// Include the lateness of every frame, played and written, in the JSON
    #[arg(long)]
    pub timeline: bool,
}

/// `lab fill`.
#[derive(Clone, Debug, Args)]
pub struct FillArgs {
    /// The server
    #[arg(long, value_enum, default_value_t = Kind::Rushes)]
    pub server: Kind,
    /// Number of players
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..))]
    pub streams: u64,
    /// Number of clients that fill the pool
    #[arg(long, value_name = "K", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..))]
    pub fillers: u64,
    /// Size of each written file
    #[arg(long, default_value = "256MiB", value_parser = parse_pieces)]
    pub bytes: u64,
    /// Bytes per write call
    #[arg(long, value_name = "BYTES", default_value = "1MiB", value_parser = parse_pieces)]
    pub write_bytes: u64,
    /// Sizes of the disks, separated by commas; --disks is then their number
    #[arg(long, value_name = "SIZES", value_delimiter = ',', default_value = "1GiB,2GiB,3GiB,4GiB", value_parser = parse_pieces)]
    pub sizes: Vec<u64>,
    /// Time after which the filling clients stop
    #[arg(long, default_value = "300", value_parser = parse_seconds)]
    pub limit: f64,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub players: PlayersArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub setup: ServerArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub ground: GroundArgs,
    /// Print one JSON object and nothing else
    #[arg(long)]
    pub json: bool,
}

impl FillArgs {
    /// Players and filling clients.
    pub fn play(&self) -> Play {
        let mut play = play_of(
            self.server,
            self.streams,
            &self.players,
            &no_others(),
            &self.setup,
            self.ground.seed,
        );
        play.server.client_count += self.fillers;
        self.ground.buffer(&mut play.server);
        play.fill = Some(Fill {
            filler_count: self.fillers,
            file_bytes: self.bytes.next_multiple_of(self.write_bytes),
            write_bytes: self.write_bytes,
            limit: Duration::from_secs_f64(self.limit),
            seed: self.ground.seed,
        });
        play
    }

    /// Disks of these sizes.
    pub fn ground(&self) -> Ground {
        let mut ground = self.ground.ground(0);
        ground.disk_count = self.sizes.len() as u64;
        ground.sizes.clone_from(&self.sizes);
        ground
    }
}

/// Preparation of a file by a copying client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum ExtendArg {
    /// Write one byte at the end of each --extend-step, as the redirector of Windows does
    OneByte,
    /// Set the end of the file
    SetEof,
    /// Nothing
    None,
}

/// `lab copy-in`.
#[derive(Clone, Debug, Args)]
pub struct CopyInArgs {
    /// The server
    #[arg(long, value_enum, default_value_t = Kind::Rushes)]
    pub server: Kind,
    /// Number of copying clients
    #[arg(long, value_name = "K", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..))]
    pub clients: u64,
    /// Number of files in the folder that each client copies
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..))]
    pub files: u64,
    /// Size of each file
    #[arg(long, default_value = "256MiB", value_parser = parse_pieces)]
    pub bytes: u64,
    /// Bytes per write call
    #[arg(long, value_name = "BYTES", default_value = "1MiB", value_parser = parse_pieces)]
    pub write_bytes: u64,
    /// Preparation of each file before it is written
    #[arg(long, value_enum, default_value_t = ExtendArg::OneByte)]
    pub extend: ExtendArg,
    /// Distance of these bytes: the allocation unit that a server reports to its clients
    #[arg(long, value_name = "BYTES", default_value = "1MiB", value_parser = parse_pieces)]
    pub extend_step: u64,
    /// Flush each file (SMB2 FLUSH, which smbd answers with fsync) before it is closed
    #[arg(long)]
    pub flush: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub setup: ServerArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub ground: GroundArgs,
    /// Print one JSON object and nothing else
    #[arg(long)]
    pub json: bool,
}

/// `lab scatter`.
#[derive(Clone, Debug, Args)]
pub struct ScatterArgs {
    /// The server
    #[arg(long, value_enum, default_value_t = Kind::Rushes)]
    pub server: Kind,
    /// Use no server: threads of fio write into the file, buffered
    #[arg(long, conflicts_with = "server")]
    pub fio: bool,
    /// Number of clients, or of threads of fio
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..))]
    pub clients: u64,
    /// Bytes that all write together
    #[arg(long, default_value = "256MiB", value_parser = parse_pieces)]
    pub bytes: u64,
    /// Size of the file
    #[arg(long, default_value = "1GiB", value_parser = parse_pages)]
    pub file_bytes: u64,
    /// Smallest write, a multiple of 4 KiB
    #[arg(long, value_name = "BYTES", default_value = "4KiB", value_parser = parse_pages)]
    pub block_min: u64,
    /// Largest write, a multiple of 4 KiB
    #[arg(long, value_name = "BYTES", default_value = "64KiB", value_parser = parse_pages)]
    pub block_max: u64,
    /// The file is not in memory at the start
    #[arg(long)]
    pub cold: bool,
    /// Rushes bridges no gaps
    #[arg(long)]
    pub no_coalesce: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub setup: ServerArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub ground: GroundArgs,
    /// Print one JSON object and nothing else
    #[arg(long)]
    pub json: bool,
}

/// `lab throughput`.
#[derive(Clone, Debug, Args)]
pub struct ThroughputArgs {
    /// The server
    #[arg(long, value_enum, default_value_t = Kind::Rushes)]
    pub server: Kind,
    /// Number of readers
    #[arg(long, value_name = "R", default_value_t = 1)]
    pub readers: u64,
    /// Number of writers
    #[arg(long, value_name = "W", default_value_t = 0)]
    pub writers: u64,
    /// Size of each client's file
    #[arg(long, default_value = "1GiB", value_parser = parse_pages)]
    pub bytes: u64,
    /// Bytes per call, a multiple of 4 KiB
    #[arg(long, value_name = "BYTES", default_value = "1MiB", value_parser = parse_pages)]
    pub block: u64,
    /// Time after which all clients stop; by default each stops at the end of its file
    #[arg(long, value_parser = parse_seconds)]
    pub seconds: Option<f64>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub setup: ServerArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub ground: GroundArgs,
    /// Print one JSON object and nothing else
    #[arg(long)]
    pub json: bool,
}

/// `lab most`.
#[derive(Clone, Debug, Args)]
pub struct MostArgs {
    /// The server
    #[arg(long, default_value = "rushes")]
    pub server: Contender,
    /// Smallest number to try
    #[arg(long, default_value_t = 1)]
    pub least: u64,
    /// Largest number to try
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=512))]
    pub most: u64,
    /// Number of clients that copy cold files larger than the cache meanwhile
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub copies: u64,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub players: PlayersArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub setup: ServerArgs,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub stage: StageArgs,
    /// Print one JSON object and nothing else
    #[arg(long)]
    pub json: bool,
}

/// `lab compare`.
#[derive(Clone, Debug, Args)]
pub struct CompareArgs {
    /// Servers: rushes, rushes-no-analyser, stock, stock-tuned, stock-strict, stock-uring,
    /// io_uring, absent
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "rushes,stock,stock-tuned"
    )]
    pub servers: Vec<Contender>,
    /// Numbers of players, in turn
    #[arg(long, value_delimiter = ',', default_value = "3,5,7,9,11,12,13,15")]
    pub streams: Vec<u64>,
    /// Runs of each
    #[arg(long, default_value_t = 3)]
    pub repeat: u64,
    /// Folder for raw reports and plots
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
    /// The servers
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "rushes,stock,stock-tuned"
    )]
    pub servers: Vec<Contender>,
    /// Number of players
    #[arg(long, value_delimiter = ',', default_value = "9,10,11,12")]
    pub streams: Vec<u64>,
    /// Longest preroll to try
    #[arg(long, default_value = "8s", value_parser = parse_span)]
    pub max: Duration,
    /// Step of the search
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
    /// The server to compare (not for `absent`)
    #[arg(long, default_value = "rushes")]
    pub server: Contender,
    /// Runs of each server; default: enough for a median
    #[arg(long)]
    pub repeat: Option<u64>,
    /// Length of a run (mixedio)
    #[arg(long, default_value = "20s", value_parser = parse_seconds)]
    pub seconds: f64,
    /// Number of clients (mixedio)
    #[arg(long, default_value_t = 4)]
    pub clients: u64,
    /// Bytes read in a run (hits)
    #[arg(long, value_name = "GIB", default_value_t = 4)]
    pub gib: u64,
    /// Folder for raw results
    #[arg(long, value_name = "DIR", default_value = "build/lab/trials")]
    pub out: PathBuf,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub setup: ServerArgs,
    /// `table5` or a folder on your own disk
    #[arg(long, default_value = "table5")]
    pub disk: Place,
    /// Print JSON instead of the table
    #[arg(long)]
    pub json: bool,
}

/// `lab demo`.
#[derive(Clone, Debug, Args)]
pub struct DemoArgs {
    /// Number of players
    #[arg(long, default_value_t = 10)]
    pub streams: u64,
    /// Number of copying clients
    #[arg(long, default_value_t = 2)]
    pub copies: u64,
    /// Time that each player plays
    #[arg(long, default_value = "60", value_parser = parse_seconds)]
    pub seconds: f64,
    /// Folder for footage, reports and the plot
    #[arg(long, value_name = "DIR", default_value = "build/demo")]
    pub out: PathBuf,
    /// `table5` or a folder on your own disk
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
    /// The file system
    #[arg(long)]
    pub fs: FileSystem,
    /// A file system, or the mount of a pool: a catalogue on ext4 and three members, one of them on
    /// ext4
    #[arg(long, value_enum, default_value_t = power::Layout::Plain)]
    pub layout: power::Layout,
    /// Door through which the workload writes
    #[arg(long, value_enum, default_value_t = power::Server::Rushes)]
    pub server: power::Server,
    /// Number of power cuts
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..))]
    pub points: u64,
    /// Seed of workloads and instants
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Only this instant, as a reported violation names it
    #[arg(long, value_name = "P", conflicts_with = "points")]
    pub point: Option<u64>,
    /// Folder for recordings that show a violation
    #[arg(long, value_name = "DIR", default_value = "build/lab/power-cuts")]
    pub keep: PathBuf,
    /// Use recordings kept in this folder; each new recording differs a little, because of the
    /// kernel's timing
    #[arg(long, value_name = "DIR")]
    pub from: Option<PathBuf>,
    /// Mount options to try, such as barrier=0
    #[arg(long, value_name = "OPTIONS", default_value = "")]
    pub mount_options: String,
    /// Let the disk or the door lie, to check that this is found
    #[arg(long, value_enum, default_value_t = Lie::None)]
    pub lie: Lie,
    /// Print one JSON object and nothing else
    #[arg(long)]
    pub json: bool,
}

/// Playback of experiments without player options.
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

/// No other clients.
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

/// Builds a run from its parts.
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
            cache_bytes: setup.cache_bytes(),
            analyser: !setup.no_analyser,
            preroll: players.preroll,
            bitrate: (told && !players.sequence).then_some(players.bitrate),
            frames_per_kilosecond: (told && players.sequence).then_some(frames_per_kilosecond),
            smb_options: setup.smb_option.clone(),
            rushes_options: setup.rushes_option.clone(),
            read_ahead_kib: setup.read_ahead_kib,
            model: setup.model.clone(),
            module: setup.module.clone(),
            nameless: false,
            client_count: streams + others.copies + others.storm,
            write_buffer_bytes: 0,
            write_options: Vec::new(),
            share_options: Vec::new(),
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
        record: None,
        fill: None,
        tidy: None,
    }
}

/// Rate of a writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rate {
    /// Units: bits a second.
    Bits(u64),
    /// Full speed.
    Max,
}

impl GroundArgs {
    /// Memory of the server for writers.
    pub fn buffer(&self, server: &mut server::Spec) {
        server.write_buffer_bytes = self.write_buffer;
        server.write_options.clone_from(&self.write_option);
    }

    /// Place for the stage, with space for so many bytes.
    pub fn ground(&self, room_bytes: u64) -> Ground {
        Ground {
            file_system: self.fs,
            media_format: self.media_format,
            write_back: self.write_back,
            room_bytes,
            folder: self.disk_folder.clone(),
            ..self.array.ground()
        }
    }
}

impl ArrayArgs {
    /// Disks with ext4 and without a write cache, for runs that only read.
    pub fn ground(&self) -> Ground {
        Ground {
            disk_count: self.disks,
            layout: self.layout,
            wish: self.wish.clone(),
            ..Ground::default()
        }
    }
}

impl RecordArgs {
    /// The writers.
    pub fn record(&self) -> Record {
        let frames_per_kilosecond = (self.fps * 1000.0).round().max(1.0) as u64;
        let (pace, file_bytes) = match self.bitrate {
            Rate::Bits(bitrate) => (
                Pace::Frames {
                    bitrate,
                    frames_per_kilosecond,
                },
                Record::recording_bytes(bitrate, frames_per_kilosecond, self.seconds),
            ),
            Rate::Max => {
                let write_bytes = self.writers.write_bytes;
                (Pace::Max { write_bytes }, self.writers.bytes)
            }
        };
        Record {
            experiment: "record",
            writer_count: self.streams,
            files_per_writer: 1,
            file_bytes,
            pace,
            preroll: self.preroll,
            start: self.start,
            stagger: self.stagger,
            grace: self.grace,
            extend: Extend::None,
            flush: self.writers.flush,
            timeline: self.writers.timeline,
            seed: self.ground.seed,
        }
    }

    /// The server, without players.
    pub fn play(&self) -> Play {
        let players = PlayersArgs {
            bitrate: match self.bitrate {
                Rate::Bits(bitrate) => bitrate,
                Rate::Max => default_players().bitrate,
            },
            preroll: self.preroll,
            ..default_players()
        };
        let no_rule = self.setup.no_rule || self.bitrate == Rate::Max;
        let setup = ServerArgs {
            no_rule,
            ..self.setup.clone()
        };
        let mut play = play_of(
            self.server,
            0,
            &players,
            &no_others(),
            &setup,
            self.ground.seed,
        );
        play.server.nameless = self.writers.flush;
        play.server.client_count = self.streams;
        self.ground.buffer(&mut play.server);
        play
    }
}

impl MixedArgs {
    /// Players, copiers and, in it, writers; all of one rate and length.
    pub fn play(&self) -> Play {
        let mut play = play_of(
            self.server,
            self.readers,
            &self.players,
            &self.others,
            &self.setup,
            self.ground.seed,
        );
        play.timeline = self.timeline;
        play.tidy = self.tidying.tidy(self.ground.seed);
        play.server.client_count += self.writers;
        self.ground.buffer(&mut play.server);
        let (bitrate, frames_per_kilosecond) = (play.bitrate, play.frames_per_kilosecond);
        play.record = Some(Record {
            experiment: "record",
            writer_count: self.writers,
            files_per_writer: 1,
            file_bytes: Record::recording_bytes(bitrate, frames_per_kilosecond, play.seconds),
            pace: Pace::Frames {
                bitrate,
                frames_per_kilosecond,
            },
            preroll: play.preroll,
            start: play.start,
            stagger: play.stagger,
            grace: play.grace,
            extend: Extend::None,
            flush: false,
            timeline: self.timeline,
            seed: self.ground.seed,
        });
        play
    }
}

impl CopyInArgs {
    /// The copying clients.
    pub fn record(&self) -> Record {
        Record {
            experiment: "copy-in",
            writer_count: self.clients,
            files_per_writer: self.files,
            file_bytes: self.bytes,
            pace: Pace::Max {
                write_bytes: self.write_bytes,
            },
            preroll: Duration::ZERO,
            start: Start::Together,
            stagger: Duration::ZERO,
            grace: Duration::ZERO,
            extend: match self.extend {
                ExtendArg::OneByte => Extend::OneByte(self.extend_step),
                ExtendArg::SetEof => Extend::SetEof,
                ExtendArg::None => Extend::None,
            },
            flush: self.flush,
            timeline: false,
            seed: self.ground.seed,
        }
    }

    /// The server, without players.
    pub fn play(&self) -> Play {
        let setup = ServerArgs {
            no_rule: true,
            ..self.setup.clone()
        };
        let players = default_players();
        let mut play = play_of(
            self.server,
            0,
            &players,
            &no_others(),
            &setup,
            self.ground.seed,
        );
        play.server.nameless = self.flush || self.extend == ExtendArg::SetEof;
        play.server.client_count = self.clients;
        self.ground.buffer(&mut play.server);
        play
    }
}

impl ThroughputArgs {
    /// The load.
    pub fn throughput(&self) -> Throughput {
        Throughput {
            reader_count: self.readers,
            writer_count: self.writers,
            file_bytes: self.bytes.next_multiple_of(self.block),
            block_bytes: self.block,
            seconds: self.seconds.unwrap_or(0.0),
        }
    }

    /// The server, without rates.
    pub fn server(&self) -> server::Spec {
        let setup = ServerArgs {
            no_rule: true,
            ..self.setup.clone()
        };
        let clients = self.readers + self.writers;
        let players = default_players();
        let play = play_of(
            self.server,
            clients,
            &players,
            &no_others(),
            &setup,
            self.ground.seed,
        );
        let mut server = play.server;
        self.ground.buffer(&mut server);
        server
    }
}

impl ScatterArgs {
    /// The load.
    pub fn scatter(&self) -> Scatter {
        Scatter {
            client_count: self.clients,
            bytes: self.bytes,
            blocks: (self.block_min, self.block_max),
            seed: self.ground.seed,
            is_warm: !self.cold,
        }
    }

    /// Source of the load.
    pub fn writers(&self) -> Writers {
        if self.fio {
            return Writers::Fio(self.setup.cache_bytes() + self.ground.write_buffer);
        }
        let setup = ServerArgs {
            no_rule: true,
            ..self.setup.clone()
        };
        let players = default_players();
        let mut play = play_of(
            self.server,
            0,
            &players,
            &no_others(),
            &setup,
            self.ground.seed,
        );
        self.ground.buffer(&mut play.server);
        let switch = ("coalesce".to_owned(), (!self.no_coalesce).to_string());
        play.server.rushes_options.push(switch);
        // No other program writes to this share.
        let alone = ("exclusive".to_owned(), "true".to_owned());
        play.server.share_options.push(alone);
        Writers::Clients(Box::new(play.server))
    }
}

/// Footage for a run, or for the largest of several.
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

fn parse_rate(text: &str) -> Result<Rate, String> {
    if text == "max" {
        return Ok(Rate::Max);
    }
    match parse_bitrate(text)? {
        0..8 => Err(format!(
            "`{text}` is not a rate; expected for instance 100M, or max"
        )),
        bits => Ok(Rate::Bits(bits)),
    }
}

/// A number of bytes, not zero.
fn parse_pieces(text: &str) -> Result<u64, String> {
    match parse_amount(text)? {
        0 => Err("0 bytes to write show nothing; expected more".to_owned()),
        bytes => Ok(bytes),
    }
}

fn parse_pages(text: &str) -> Result<u64, String> {
    match parse_amount(text)? {
        bytes if bytes > 0 && bytes % PAGE_BYTES as u64 == 0 => Ok(bytes),
        _ => Err(format!(
            "`{text}` is not a multiple of 4 KiB; expected whole pages"
        )),
    }
}

fn parse_pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text
        .split_once('=')
        .ok_or_else(|| format!("`{text}` is not a setting; expected KEY=VALUE"))?;
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

    fn record_args(line: &str) -> RecordArgs {
        let words = ["rushes-lab", "record"].into_iter();
        match Cli::try_parse_from(words.chain(line.split_whitespace())).map(|cli| cli.command) {
            Ok(Command::Record(args)) => *args,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn recordings_are_understood() {
        let args = record_args("--server stock-strict --streams 3 --seconds 10 --fs xfs");
        assert!(args.ground.write_back, "the paper's array had one");
        let record = args.record();
        assert_eq!((record.writer_count, record.file_bytes), (3, 125_000_000));
        let args = record_args("--bitrate max --bytes 64MiB --write-back=false");
        assert!(!args.ground.write_back);
        let record = args.record();
        assert_eq!(record.bytes(), 12 * (64 << 20));
        assert_eq!(
            record.pace,
            Pace::Max {
                write_bytes: 1 << 20
            }
        );
        assert!(record_args("--write-back").ground.write_back);
        assert!(parse_rate("0").is_err() && parse_rate("fast").is_err());
        assert!(parse_pages("5000").is_err());
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
