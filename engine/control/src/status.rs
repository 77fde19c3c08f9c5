// SPDX-License-Identifier: Apache-2.0
//! The output of `rushes status --json`. Names and units are promised; see the crate's head.

use serde::{Deserialize, Serialize};

/// Version of the field names; a rename or a change of unit would raise it.
pub const STATUS_VERSION: u32 = 1;

/// Everything.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// [`STATUS_VERSION`].
    pub status_version: u32,
    /// The process.
    pub daemon: DaemonStatus,
    /// The cache segment.
    pub cache: CacheStatus,
    /// Bytes that clients wrote and disks do not have yet.
    pub write: WriteStatus,
    /// The shares.
    pub shares: Vec<ShareStatus>,
    /// The devices under the shares.
    pub devices: Vec<DeviceStatus>,
    /// The connected sessions.
    pub sessions: Vec<SessionStatus>,
    /// Clients at their work, and their contracts.
    #[serde(default)]
    pub seats: Vec<SeatStatus>,
    /// The ledger: open streams, then the most recent closed ones.
    pub streams: Vec<StreamStatus>,
}

/// The daemon's own figures.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DaemonStatus {
    /// Process.
    pub pid: u32,
    /// Of the program.
    pub version: String,
    /// Of the session protocol; a door with another one does plain I/O.
    pub protocol_version: u32,
    /// Since it was ready.
    pub uptime_s: f64,
    /// Configuration in force.
    pub config: String,
    /// Where its sockets are.
    pub runtime_dir: String,
    /// Resident memory in all.
    pub rss_bytes: u64,
    /// Of that, not the cache segment.
    pub rss_beside_cache_bytes: u64,
    /// CPU time used so far, user and system.
    pub cpu_s: f64,
    /// How the event loop keeps up.
    pub event_loop: LoopStatus,
    /// Settings that an operator may change while the daemon runs.
    pub policy: PolicyStatus,
    /// Notes for the operator: a guessed device model, a share without direct I/O, no fanotify.
    pub notes: Vec<String>,
    /// Of those, the notes on acknowledged bytes that cannot be written now.
    #[serde(default)]
    pub unwritten: Vec<String>,
    /// Sessions refused since the start.
    pub refused_session_count: u64,
    /// Sessions that the daemon ended because their door broke the protocol.
    pub expelled_session_count: u64,
    /// Files that a door opened and that are not served: the door does plain I/O.
    pub plain_open_count: u64,
    /// Why the last reload failed, a sentence; None: it did not, or there was none.
    #[serde(default)]
    pub reload_error: Option<String>,
}

/// Turns of the event loop, and how long they made others wait.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoopStatus {
    /// Turns so far.
    pub turn_count: u64,
    /// Length of a turn, which is how long an event may have waited for the loop: median.
    pub lag_p50_us: u64,
    /// 99 in 100.
    pub lag_p99_us: u64,
    /// 999 in 1000.
    pub lag_p999_us: u64,
    /// The longest since the start.
    pub lag_max_us: u64,
    /// Real-time scheduling or niceness obtained, in words.
    pub priority: String,
    /// Jobs waiting for the worker pool.
    pub worker_queue_count: u64,
}

/// See the keys of the same names in the configuration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PolicyStatus {
    /// Start-up time a contract assumes of a player.
    pub preroll_ms: u64,
    /// So long after its last read a seat with nothing open keeps its contracts.
    #[serde(default)]
    pub pause_ms: u64,
    /// Part of every device kept free, in thousandths.
    pub margin_permille: u32,
    /// Patterns are recognised.
    pub analyser: bool,
    /// Contracts from observed rates.
    pub contracts_from_cadence: bool,
    /// Contracts from container headers.
    pub contracts_from_header: bool,
    /// Gaps are bridged where that is cheaper.
    pub coalesce: bool,
    /// Cuts are remembered, and data is read ahead across those that are known.
    #[serde(default)]
    pub rehearsal: bool,
    /// Rules in force.
    pub rule_count: u32,
}

/// The cache.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CacheStatus {
    /// Configured size.
    pub bytes: u64,
    /// Size of a buffer.
    pub buffer_bytes: u64,
    /// All buffers.
    pub buffer_count: u32,
    /// Never used, or free again.
    pub free_count: u32,
    /// Held for streams under contract.
    pub held_count: u32,
    /// Pinned while a door copies from them.
    pub pinned_count: u32,
    /// Reads answered at once.
    pub hit_count: u64,
    /// Reads that waited.
    pub miss_count: u64,
    /// Locked in memory.
    pub locked: bool,
}

/// Writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteStatus {
    /// Configured size; 0: doors write on their own descriptors, past the
    /// daemon.
    pub buffer_bytes: u64,
    /// In use: granted to clients, or acknowledged and not on a disk yet.
    pub used_bytes: u64,
    /// An acknowledged byte is on its disk at most so long after, if the disk keeps up.
    pub age_ms: u64,
    /// Files with bytes that their disk does not have.
    pub dirty_file_count: u32,
    /// Writes that wait for room or blocks.
    pub waiting_count: u32,
    /// Writes acknowledged.
    pub write_count: u64,
    /// Writes that doors did past the daemon.
    pub plain_count: u64,
}

/// A share.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareStatus {
    /// As configured.
    pub name: String,
    /// As configured.
    pub path: String,
    /// Kind of file system.
    pub file_system: String,
    /// False: served buffered.
    pub direct_io: bool,
    /// The way of clients' writes to its disk: `extents`, `through` or `unknown`.
    pub write_way: String,
    /// The reason for that way, a sentence.
    pub write_way_reason: String,
    /// As in [`DeviceStatus::name`].
    pub device: String,
    /// Changes by others are noticed (fanotify).
    pub foreign_changes_noticed: bool,
    /// The folder on which the file system that it lies on is mounted.
    #[serde(default)]
    pub mounted_on: String,
    /// It is configured, and its folder is not there: nothing of it is served.
    #[serde(default)]
    pub is_absent: bool,
    /// The fault of the place where it lies, a sentence: the share is absent, or not on its own
    /// disk.
    #[serde(default)]
    pub trouble: Option<String>,
}

/// A device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceStatus {
    /// Kernel name (`sda`, `md0`), or the kind of file system where there is no block device.
    pub name: String,
    /// Number in this daemon.
    pub device: u16,
    /// `calibrated`, `default (rotational)`, `default (solid state)` or `default (no block
    /// device)`.
    pub model_source: String,
    /// Read model as refined so far: positioning at the shortest distance.
    pub read_fixed_ms: f64,
    /// Added by the longest distance.
    pub read_span_ms: f64,
    /// Transfer rate.
    pub read_bytes_per_s: u64,
    /// Size.
    pub size_bytes: u64,
    /// Streams under contract.
    pub contract_count: u32,
    /// The sum of their contracts' rates.
    pub promised_bytes_per_s: u64,
    /// Requests sent for contracts, and for reads that seem to begin a play.
    pub real_time_request_count: u64,
    /// Requests sent as best effort.
    pub best_effort_request_count: u64,
    /// Bytes read by them.
    pub real_time_bytes: u64,
    /// Bytes read as best effort.
    pub best_effort_bytes: u64,
    /// Requests that wrote.
    pub write_request_count: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Of `written_bytes`, bytes that the device had already: gaps between dirty ranges.
    pub write_bridged_bytes: u64,
    /// Of the bytes read, gaps between wanted ranges, which no read had asked for.
    pub read_bridged_bytes: u64,
    /// Bytes fetched ahead of readers that these have left unread.
    #[serde(default)]
    pub unread_bytes: u64,
    /// Turns in which the daemon sent it requests, one or several.
    pub batch_count: u64,
    /// Flushes of its volatile cache before a read.
    pub flush_count: u64,
    /// Time with a request in service, or with a flush.
    pub busy_s: f64,
    /// Time of its latest requests, in thousandths of the time by its model.
    pub slowness_permille: u32,
    /// Part of its time that others take, in thousandths.
    pub foreign_permille: u32,
}

/// A connected door.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionStatus {
    /// Number in this daemon.
    pub session: u32,
    /// `smb`, `fuse`, `local`.
    pub door: String,
    /// Process at the other end.
    pub pid: i32,
    /// Share.
    pub share: String,
    /// User.
    pub user: String,
    /// Address or machine.
    pub client: String,
    /// Files it has open.
    pub handle_count: u32,
}

/// One client at its work: a session; through the door of a pool each stream.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SeatStatus {
    /// As in [`SessionStatus::session`].
    pub session: u32,
    /// Share.
    pub share: String,
    /// User.
    pub user: String,
    /// Address or machine.
    pub client: String,
    /// `plays`, `paused`, or `away`: nothing is open, and it keeps its contracts.
    pub state: String,
    /// The sum of its contracts' rates.
    pub promised_bytes_per_s: u64,
    /// Time since its last read.
    pub silent_ms: u64,
    /// Bytes that it reads at one place before it cuts to another, in the mean; None: it has not
    /// cut yet.
    pub run_bytes: Option<u64>,
    /// Its cuts out of runs that its user had played before.
    #[serde(default)]
    pub rehearsed_cuts: u64,
    /// Of those, cuts to where the user had cut last time.
    #[serde(default)]
    pub foreseen_cuts: u64,
    /// Bytes fetched ahead of it that it has left unread; 0 through the door of a pool.
    #[serde(default)]
    pub unread_bytes: u64,
    /// Where it plays, or would play on.
    pub playheads: Vec<PlayheadStatus>,
    /// Its contracts that no playhead uses now.
    pub kept: Vec<KeptStatus>,
    /// Its open streams, as in [`StreamStatus::stream`].
    pub streams: Vec<u32>,
}

/// A place that a seat plays at.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlayheadStatus {
    /// As in [`StreamStatus::stream`].
    pub stream: u32,
    /// The byte that will be read next: of the file; of a sequence, of all frames since it began.
    pub position_bytes: u64,
    /// As in [`StreamStatus::standing`].
    pub standing: String,
}

/// A contract that a seat keeps with nothing open.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptStatus {
    /// As in [`DeviceStatus::name`].
    pub device: String,
    /// Its rate.
    pub rate_bytes_per_s: u64,
    /// The file that was played last.
    pub path: String,
    /// How long it is kept, if nothing plays.
    pub left_ms: u64,
}

/// One line of the ledger.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StreamStatus {
    /// Number in this daemon.
    pub stream: u32,
    /// As in [`SessionStatus::session`].
    pub session: u32,
    /// Share.
    pub share: String,
    /// User.
    pub user: String,
    /// Address or machine.
    pub client: String,
    /// As it was opened; of a sequence its first frame.
    pub path: String,
    /// Which part of that file, as `2/4`; None: all of it.
    pub part: Option<String>,
    /// One file a frame.
    pub sequence: bool,
    /// As in [`DeviceStatus::name`]; of a sequence of a pool all devices on which its latest frames
    /// lay, separated by commas.
    pub device: String,
    /// `contract`, `refused` or `best_effort`.
    pub standing: String,
    /// The rate at which it is read, when known.
    pub rate_bytes_per_s: Option<u64>,
    /// `rule`, `header` or `cadence`.
    pub rate_source: Option<String>,
    /// Why it has no contract, if it was refused one: a sentence.
    pub refusal: Option<String>,
    /// Reads so far.
    pub read_count: u64,
    /// Reads that were due by the player's clock, promised or not. Reads that still wait, or never
    /// got an answer, are among them, so they may be more than `read_count`.
    pub due_count: u64,
    /// Of those, answered in time.
    pub on_time_count: u64,
    /// Of `due_count`, answered late, still waiting past their time, or never answered.
    pub late_count: u64,
    /// Reads under contract.
    #[serde(default)]
    pub promised_count: u64,
    /// Of those, answered later than their contract promised.
    #[serde(default)]
    pub promised_late_count: u64,
    /// The largest lateness among the reads of `late_count`.
    pub worst_lateness_ms: f64,
    /// Late reads by guilty stage.
    pub guilty: GuiltyStatus,
    /// Bytes answered.
    pub bytes: u64,
    /// Reads answered without waiting for a device.
    pub hit_count: u64,
    /// Playing time of its bytes that are cached ahead of it.
    pub ahead_ms: f64,
    /// A client holds it open.
    pub open: bool,
}

/// Late reads by the stage that cost them most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuiltyStatus {
    /// Between the client's door and the daemon.
    pub door: u64,
    /// Its file was still being opened.
    #[serde(default)]
    pub open: u64,
    /// No buffer was free.
    pub cache: u64,
    /// Waiting for its turn.
    pub queue: u64,
    /// The device was slower than its model.
    pub device: u64,
}
