// SPDX-License-Identifier: Apache-2.0
//! A scenario: workload, faults and expectations, as a small text file.
//!
//! Every key has a default, so that a file has only the keys that matter to it; an unknown key is
//! an error. With a seed a scenario is one run, always the same.

use crate::client::{Kind, Latency};
use crate::disk::volatile::{INTO_MEMORY, MemoryPlan};
use crate::disk::{Faults, table5};
use crate::files::{FileIndex, WorldFile, contiguous};
use crate::judge::{Report, Watch, report};
use crate::machine::Machine;
use crate::op_atom::{OpAtom, OpAtomPlan};
use crate::others::{Copy, Foreign, Rambler, Writer};
use crate::player::{Pattern, Player, PlayerPlan, Shot, Source};
use crate::prng::Prng;
use crate::record_groups::{CopyInGroup, RecordGroup, ScatterGroup, Writers, WrittenExpect};
use crate::scrubber::{ScrubPlan, Scrubber};
use crate::world::World;
use rushes_core::server::{
    DeviceModel, Extent, Limits, Policy, RateHint, RateSource, Server, ServiceModel,
};
use rushes_core::units::*;
use serde::{Deserialize, Serialize};

/// The events of a run, and the results that it must have.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Scenario {
    /// Its goal, a sentence.
    pub goal: String,
    /// How long there is work.
    pub seconds: u64,
    /// Time between two looks at the ledger. Units: ms; 0: 1000.
    pub look_ms: u64,
    /// The server's bounds and policy.
    pub server: ServerPlan,
    /// The latencies.
    pub latency: LatencyPlan,
    /// Disks.
    pub disk: Vec<DiskPlan>,
    /// Players.
    pub player: Vec<PlayerGroup>,
    /// Copies.
    pub copy: Vec<CopyGroup>,
    /// Random readers.
    pub ramble: Vec<RambleGroup>,
    /// Readers of single frames.
    pub scrub: Vec<ScrubGroup>,
    /// Editors whose clips are several files.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub op_atom: Vec<OpAtomGroup>,
    /// Writers on their own descriptors.
    pub writer: Vec<WriterGroup>,
    /// Recorders.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub record: Vec<RecordGroup>,
    /// Copies that come in.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub copy_in: Vec<CopyInGroup>,
    /// Clients that write at random places.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub scatter: Vec<ScatterGroup>,
    /// Strangers that write.
    pub foreign: Vec<ForeignGroup>,
    /// The results that it must have.
    pub expect: Expect,
}

/// Bounds and policy that differ from the defaults; 0 is the default.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServerPlan {
    /// Buffers.
    pub slots: u32,
    /// Size of each. Units: KiB.
    pub slot_kib: u32,
    /// Longest device request. Units: KiB.
    pub chunk_kib: u64,
    /// Longest read. Units: KiB.
    pub read_kib: u64,
    /// Bytes one session may pin. Units: KiB.
    pub pin_kib: u64,
    /// Frames opened ahead.
    pub sequence_ahead: u32,
    /// Preroll of contracts. Units: ms.
    pub preroll_ms: u64,
    /// The margin of admission.
    pub margin_permille: Option<u32>,
    /// Without the analyser.
    pub no_analyser: bool,
    /// The write buffer. Units: MiB.
    pub write_buffer_mib: u64,
    /// The server bridges no gap.
    pub no_coalesce: bool,
    /// The server does not remember which run followed which.
    pub no_rehearsal: bool,
}

/// Delays; 0 is the default of [`Latency`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LatencyPlan {
    /// Client to server and back. Units: µs.
    pub door_us: u64,
    /// Reads overtake each other. Units: µs.
    pub reorder_us: u64,
    /// Server to disk, and back. Units: µs.
    pub disk_us: Option<u64>,
    /// Looking up a file. Units: µs.
    pub open_us: u64,
    /// Small reads of the disk for that look-up.
    pub open_reads: u32,
    /// Small reads of the disk for a name that does not exist, the first time.
    pub absent_reads: u32,
    /// Bytes out of the cache. Units: MB/s.
    pub copy_mb: u64,
}

/// Some equal disks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DiskPlan {
    /// How many.
    pub count: u32,
    /// Positioning at the shortest distance; 0: the disk of Table 5, whole. Units: µs.
    pub fixed_us: u64,
    /// The time that the longest distance adds. Units: µs.
    pub span_us: u64,
    /// Transfer. Units: MB/s.
    pub rate_mb: u64,
    /// Size. Units: GB.
    pub size_gb: u64,
    /// True times as a percentage of those that the server knows.
    pub truth_percent: u64,
    /// Of the disk of Table 5: mean positioning of a write; 0: 8000. Units: µs.
    pub write_way_us: u64,
    /// Of the disk of Table 5: it moves so many times fewer bytes a second, and positions as
    /// quickly; 0: 1.
    pub slower: u64,
    /// Its memory.
    pub memory: MemoryPlan,
    /// Its faults.
    pub faults: Faults,
}

impl Default for DiskPlan {
    fn default() -> DiskPlan {
        DiskPlan {
            count: 1,
            fixed_us: 0,
            span_us: 0,
            rate_mb: 0,
            size_gb: 40,
            truth_percent: 100,
            write_way_us: 0,
            slower: 0,
            memory: MemoryPlan::default(),
            faults: Faults::default(),
        }
    }
}

/// Some players of one kind, spread over the disks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PlayerGroup {
    /// How many.
    pub count: u64,
    /// Rate of each. Units: Mb/s.
    pub megabits: f64,
    /// Time from frame to frame. Units: ms.
    pub frame_ms: f64,
    /// How late a first frame may be; 0: 500. Units: ms.
    pub preroll_ms: u64,
    /// The first starts then. Units: ms.
    pub start_ms: u64,
    /// The others follow so far apart. Units: ms.
    pub every_ms: u64,
    /// How long each plays; 0: to the end.
    pub seconds: u64,
    /// Longest request; 0: a frame, at most 8 MiB. Units: KiB.
    pub request_kib: u64,
    /// Requests at once; 0: 1.
    pub in_flight: usize,
    /// One file a frame.
    pub sequence: bool,
    /// From a pool with the disks as members: its frames lie on one after the other. Then all
    /// players are clients of its door.
    pub pool: bool,
    /// From the last frame to the first.
    pub reverse: bool,
    /// Every so many-th frame only; 0 and 1: each.
    pub stride: u64,
    /// No rule has the rate.
    pub unruled: bool,
    /// All play the same file.
    pub shared: bool,
    /// Asks up to so much later. Units: µs.
    pub jitter_us: u64,
    /// Pauses.
    pub pause_per_10k: u64,
    /// Jumps.
    pub jump_per_10k: u64,
    /// Deaths.
    pub die_per_10k: u64,
    /// Holds its slots so long before it releases them. Units: ms.
    pub hold_ms: u64,
    /// Length of extents, scattered; 0: in one piece. Units: MB.
    pub extent_mb: u64,
    /// The driver cannot find the file's extents.
    pub unknown_extents: bool,
    /// Each plays a timeline: cuts, so far apart at least, between clips that all of them share. 0:
    /// no cuts. Units: ms.
    pub cut_ms_min: u64,
    /// And so far apart at most. Units: ms.
    pub cut_ms_max: u64,
    /// They play files while recorders record them, each another recorder's, at its rate. Units: ms
    /// behind; 0: no.
    pub behind_ms: u64,
    /// They close each clip before they open the next.
    pub closes_first: bool,
    /// Each plays its timeline so many times again.
    pub again: u64,
    /// Every so many-th clip of a timeline that is played again is another one; 0: none.
    pub again_changed: u64,
    /// All work under one login.
    pub one_login: bool,
    /// Clips of the timelines.
    pub clips: u64,
    /// Length of each clip; 0: as long as its place on the disk allows, a gigabyte at most. Units:
    /// MB.
    pub clip_mb: u64,
}

impl Default for PlayerGroup {
    fn default() -> PlayerGroup {
        PlayerGroup {
            count: 1,
            megabits: 100.0,
            frame_ms: 40.0,
            preroll_ms: 500,
            start_ms: 0,
            every_ms: 250,
            seconds: 0,
            request_kib: 0,
            in_flight: 1,
            sequence: false,
            pool: false,
            reverse: false,
            stride: 0,
            unruled: false,
            shared: false,
            jitter_us: 200,
            pause_per_10k: 0,
            jump_per_10k: 0,
            die_per_10k: 0,
            hold_ms: 0,
            extent_mb: 0,
            unknown_extents: false,
            cut_ms_min: 0,
            cut_ms_max: 0,
            behind_ms: 0,
            closes_first: false,
            again: 0,
            again_changed: 0,
            one_login: false,
            clips: 16,
            clip_mb: 0,
        }
    }
}

/// Some copies.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CopyGroup {
    /// How many.
    pub count: u64,
    /// They start then. Units: ms.
    pub start_ms: u64,
    /// Longest request. Units: KiB.
    pub request_kib: u64,
    /// Requests at once.
    pub in_flight: usize,
    /// Size of each file. Units: MB.
    pub file_mb: u64,
    /// A rule matches the files, of so many Mb/s; 0: none does.
    pub megabits: f64,
}

impl Default for CopyGroup {
    fn default() -> CopyGroup {
        CopyGroup {
            count: 1,
            start_ms: 0,
            request_kib: 8192,
            in_flight: 2,
            file_mb: 2000,
            megabits: 0.0,
        }
    }
}

/// Some random readers, on the players' files and on some of their own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RambleGroup {
    /// How many.
    pub count: u64,
    /// They start then. Units: ms.
    pub start_ms: u64,
    /// Longest request. Units: KiB.
    pub request_kib: u64,
    /// Requests at once.
    pub in_flight: usize,
    /// Longest pause. Units: ms.
    pub think_ms: u64,
    /// Own files.
    pub files: u64,
    /// Size of each. Units: KiB.
    pub file_kib: u64,
    /// Also the players' files.
    pub players_files: bool,
    /// Holds its slots so long. Units: ms.
    pub hold_ms: u64,
    /// Deaths.
    pub die_per_10k: u64,
}

impl Default for RambleGroup {
    fn default() -> RambleGroup {
        RambleGroup {
            count: 1,
            start_ms: 0,
            request_kib: 256,
            in_flight: 2,
            think_ms: 20,
            files: 4,
            file_kib: 50_000,
            players_files: true,
            hold_ms: 0,
            die_per_10k: 0,
        }
    }
}

/// Some readers of single frames: a hand on the mouse, a conform.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ScrubGroup {
    /// How many.
    pub count: u64,
    /// They start then. Units: ms.
    pub start_ms: u64,
    /// Least time from one frame to the request for the next; 0: none. Units: ms.
    pub every_ms: u64,
    /// Longest step from one frame to the next.
    pub step_frames_max: u64,
    /// So many steps in a thousand change direction.
    pub turn_permille: u64,
    /// So many go to another clip and place.
    pub elsewhere_permille: u64,
    /// Rate of the clips, in frames of 40 ms. Units: Mb/s.
    pub megabits: f64,
    /// No rule has the rate.
    pub unruled: bool,
    /// Longest request; 0: a frame, at most 8 MiB. Units: KiB.
    pub request_kib: u64,
    /// Clips that all of them use.
    pub clips: u64,
}

impl Default for ScrubGroup {
    fn default() -> ScrubGroup {
        ScrubGroup {
            count: 1,
            start_ms: 0,
            every_ms: 40,
            step_frames_max: 25,
            turn_permille: 100,
            elsewhere_permille: 20,
            megabits: 100.0,
            unruled: false,
            request_kib: 0,
            clips: 16,
        }
    }
}

/// Some editors that work Avid's way: a clip is a file of picture and several of sound.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OpAtomGroup {
    /// How many.
    pub count: u64,
    /// The first starts then. Units: ms.
    pub start_ms: u64,
    /// Between two starts. Units: ms.
    pub every_ms: u64,
    /// Rate of the picture, in frames of 40 ms. Units: Mb/s.
    pub megabits: f64,
    /// Layers, each of another clip; 0: 1.
    pub layers: u64,
    /// Sounds of a clip, 144 kB a second each.
    pub sounds: u64,
    /// Their headers have that rate.
    pub sound_told: bool,
    /// Shortest and longest run between two cuts. Units: ms.
    pub cut_ms_min: u64,
    /// See there.
    pub cut_ms_max: u64,
    /// Clips from which all of them cut.
    pub clips: u64,
}

impl Default for OpAtomGroup {
    fn default() -> OpAtomGroup {
        OpAtomGroup {
            count: 1,
            start_ms: 0,
            every_ms: 250,
            megabits: 100.0,
            layers: 0,
            sounds: 8,
            sound_told: false,
            cut_ms_min: 1500,
            cut_ms_max: 6000,
            clips: 16,
        }
    }
}

/// Some writers, on the ramblers' and copies' files and, if set, the players'.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WriterGroup {
    /// How many.
    pub count: u64,
    /// Longest write. Units: KiB.
    pub write_kib: u64,
    /// Longest pause. Units: ms.
    pub think_ms: u64,
    /// Also the players' files.
    pub players_files: bool,
}

impl Default for WriterGroup {
    fn default() -> WriterGroup {
        WriterGroup {
            count: 1,
            write_kib: 1024,
            think_ms: 200,
            players_files: false,
        }
    }
}

/// Some strangers that write to the same files as [`WriterGroup`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ForeignGroup {
    /// How many.
    pub count: u64,
    /// Longest pause. Units: ms.
    pub think_ms: u64,
    /// Longest time until the server learns of a change, or until an unreported change is done.
    /// Units: ms.
    pub delay_ms: u64,
    /// No client reports their changes.
    pub silent: bool,
    /// Also the players' files.
    pub players_files: bool,
}

impl Default for ForeignGroup {
    fn default() -> ForeignGroup {
        ForeignGroup {
            count: 1,
            think_ms: 500,
            delay_ms: 50,
            silent: false,
            players_files: false,
        }
    }
}

/// The results that a run must have. Violations of the seam and a ledger that disagrees are always
/// failures.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Expect {
    /// Late frames of promised streams.
    pub late_promised_max: u64,
    /// Promised streams with late frames.
    pub late_promised_streams_max: Option<u64>,
    /// Contracts withdrawn.
    pub shed_max: u64,
    /// Streams promised.
    pub promised_min: u64,
    /// Streams promised.
    pub promised_max: Option<u64>,
    /// Late frames of all players.
    pub late_max: Option<u64>,
    /// Late frames of all players in the last pass of timelines that are played again.
    pub late_last_pass_max: Option<u64>,
    /// Late frames of promised streams after pauses and jumps of theirs.
    pub late_after_jump_max: Option<u64>,
    /// Slowest first frame of a promised stream. Units: ms.
    pub first_frame_ms_max: Option<f64>,
    /// Time from a cut to its first frame, of all players: 19 of 20 come within it. Units: ms.
    pub cut_ms_p95_max: Option<f64>,
    /// Of 20 single frames 19 come sooner. Units: ms.
    pub scrub_ms_p95_max: Option<f64>,
    /// Single frames that come, at least.
    pub scrub_frames_min: u64,
    /// The bytes that disks read for each hundred bytes that clients got, at most.
    pub read_percent_max: Option<f64>,
    /// The slowest. Units: ms.
    pub cut_ms_max: Option<f64>,
    /// All copies together. Units: MB/s.
    pub copy_mb_min: Option<f64>,
    /// Longest standstill of a copy. Units: ms.
    pub copy_wait_ms_max: Option<f64>,
    /// Late frames of editors whose clips are several files.
    pub op_atom_late_max: Option<u64>,
    /// Frames with an error, at least.
    pub failed_min: u64,
    /// Frames with an error.
    pub failed_max: u64,
    /// Reads left to the client.
    pub plain_max: u64,
    /// Longest wait for an answer; 0: 60.
    pub patience_seconds: u64,
    /// Frames that must come.
    pub frames_min: u64,
    /// Compares the ledger with the players' measure.
    pub ledger: bool,
    /// Results of clients that write through lanes.
    pub written: WrittenExpect,
}

impl Default for Expect {
    fn default() -> Expect {
        Expect {
            late_promised_max: 0,
            late_promised_streams_max: None,
            shed_max: 0,
            promised_min: 0,
            promised_max: None,
            late_max: None,
            late_last_pass_max: None,
            late_after_jump_max: None,
            first_frame_ms_max: None,
            cut_ms_p95_max: None,
            scrub_ms_p95_max: None,
            scrub_frames_min: 0,
            read_percent_max: None,
            cut_ms_max: None,
            copy_mb_min: None,
            copy_wait_ms_max: None,
            op_atom_late_max: None,
            failed_min: 0,
            failed_max: 0,
            plain_max: 0,
            patience_seconds: 60,
            frames_min: 0,
            ledger: true,
            written: WrittenExpect::default(),
        }
    }
}

impl PlayerGroup {
    pub(crate) fn has_cuts(&self) -> bool {
        self.cut_ms_max > 0
    }

    fn file_count(&self) -> u64 {
        match self.has_cuts() {
            true => self.clips.max(1),
            false if self.behind_ms > 0 => 0,
            false => self.count,
        }
    }

    /// Shots of random lengths, from random places of random clips.
    fn cut_list(&self, clips: &[(FileIndex, u64)], frame_count: u64, prng: &mut Prng) -> Vec<Shot> {
        let frames = |ms: u64| ((ms as f64 / self.frame_ms) as u64).max(1);
        let (least, most) = (frames(self.cut_ms_min), frames(self.cut_ms_max));
        let pass = frame_count / (1 + self.again);
        let shot = |prng: &mut Prng, first: u64| {
            let (file, length) = clips[prng.below(clips.len() as u64) as usize];
            let count = prng.between(least, most.max(least)).min(length);
            let frame = prng.below(length - count + 1);
            (Shot { first, file, frame }, first + count)
        };
        let mut shots = Vec::new();
        let mut first = 0;
        while first < pass {
            let (shot, end) = shot(prng, first);
            shots.push(shot);
            first = end;
        }
        // The last one is as long as the pass.
        let once = shots.clone();
        for nth in 1..=self.again {
            for (place, again) in (1..).zip(&once) {
                let first = nth * pass + again.first;
                let is_changed = self.again_changed > 0 && place % self.again_changed == 0;
                shots.push(match is_changed {
                    true => shot(prng, first).0,
                    false => Shot { first, ..*again },
                });
            }
        }
        shots
    }
}

fn or<T: Default + PartialEq>(value: T, default: T) -> T {
    if value == T::default() {
        default
    } else {
        value
    }
}

impl ServerPlan {
    /// The bounds.
    pub fn limits(&self) -> Limits {
        let base = Limits::default();
        Limits {
            slot_count: or(self.slots, base.slot_count),
            slot_bytes: or(self.slot_kib << 10, base.slot_bytes),
            session_count_max: 16_384,
            handle_count_max: base.handle_count_max,
            session_pin_bytes_max: or(self.pin_kib << 10, base.session_pin_bytes_max),
            read_bytes_max: or(self.read_kib << 10, base.read_bytes_max),
            chunk_bytes_max: or(self.chunk_kib << 10, base.chunk_bytes_max),
            sequence_ahead_max: or(self.sequence_ahead, base.sequence_ahead_max),
            write_buffer_bytes: or(self.write_buffer_mib << 20, base.write_buffer_bytes),
            ..base
        }
    }

    /// The policy.
    pub fn policy(&self) -> Policy {
        let base = Policy::default();
        Policy {
            preroll: match self.preroll_ms {
                0 => base.preroll,
                ms => Duration::from_ms(ms),
            },
            margin_permille: self.margin_permille.unwrap_or(base.margin_permille),
            analyser: !self.no_analyser,
            coalesce: !self.no_coalesce,
            rehearsal: !self.no_rehearsal,
            ..base
        }
    }
}

impl LatencyPlan {
    fn latency(&self) -> Latency {
        let base = Latency::default();
        let us = |us: u64, base: Duration| match us {
            0 => base,
            us => Duration::from_us(us),
        };
        let disk = self.disk_us.map_or(base.submit, Duration::from_us);
        Latency {
            door: us(self.door_us, base.door),
            reorder: Duration::from_us(self.reorder_us),
            submit: disk,
            complete: disk,
            open: us(self.open_us, base.open),
            open_reads: self.open_reads,
            absent_reads: self.absent_reads,
            timer: base.timer,
            reserve: base.reserve,
            copy_rate: BytesPerSecond(or(self.copy_mb * 1_000_000, base.copy_rate.0)),
        }
    }
}

impl DiskPlan {
    /// The model that the server gets.
    pub fn told(&self) -> DeviceModel {
        match self.memory.mb {
            0 => self.nominal(),
            _ => DeviceModel {
                write: INTO_MEMORY,
                ..self.nominal()
            },
        }
    }

    /// The model of the medium.
    fn nominal(&self) -> DeviceModel {
        if self.rate_mb == 0 {
            let mut model = table5();
            if self.write_way_us > 0 {
                model.write.fixed = Duration(self.write_way_us * 1000 * 40 / 100);
                model.write.span = Duration(self.write_way_us * 1000 * 113 / 100);
            }
            for service in [&mut model.read, &mut model.write] {
                service.rate = BytesPerSecond(service.rate.0 / self.slower.max(1));
            }
            return model;
        }
        let model = ServiceModel {
            fixed: Duration::from_us(self.fixed_us),
            span: Duration::from_us(self.span_us),
            rate: BytesPerSecond(self.rate_mb * 1_000_000),
        };
        DeviceModel {
            read: model,
            write: model,
            size: ByteCount(self.size_gb * 1_000_000_000),
        }
    }

    fn truth(&self) -> DeviceModel {
        let slower = |model: ServiceModel| ServiceModel {
            fixed: Duration(model.fixed.0 * self.truth_percent / 100),
            span: Duration(model.span.0 * self.truth_percent / 100),
            rate: BytesPerSecond(model.rate.0 * 100 / self.truth_percent.max(1)),
        };
        let told = self.nominal();
        DeviceModel {
            read: slower(told.read),
            write: slower(told.write),
            size: told.size,
        }
    }
}

/// The place of the next file.
struct Layout {
    disk_count: u64,
    /// By disk: places taken, and the number of places.
    taken: Vec<u64>,
    places: u64,
    turn: u64,
    sizes: Vec<u64>,
    prng: Prng,
}

impl Layout {
    /// The disk of the next file, its position there, and its room.
    fn next(&mut self) -> (DeviceId, u64, u64) {
        let disk = self.turn % self.disk_count;
        self.turn += 1;
        let gap = self.sizes[disk as usize] / self.places;
        let at = self.taken[disk as usize] % self.places * gap;
        self.taken[disk as usize] += 1;
        (DeviceId(disk as u16), at & !4095, gap)
    }
}

/// Splits a file into extents of `bytes`, in any order within its room.
fn scatter(file: &mut WorldFile, bytes: u64, room: u64, prng: &mut Prng) {
    let Some(first) = file.extents.first().copied() else {
        return;
    };
    let count = first.length.0.div_ceil(bytes);
    let spacing = (room / count).max(bytes);
    let mut order: Vec<u64> = (0..count).collect();
    for index in (1..order.len()).rev() {
        order.swap(index, prng.below(index as u64 + 1) as usize);
    }
    file.extents = (0..count)
        .map(|index| Extent {
            logical: ByteOffset(index * bytes),
            physical: ByteOffset((first.physical.0 + order[index as usize] * spacing) & !4095),
            length: ByteCount(bytes.min(first.length.0 - index * bytes)),
        })
        .collect();
}

impl Scenario {
    /// Reads a scenario from its text.
    ///
    /// Errors   a sentence: the text that the parser found, and the text that it expected.
    pub fn parse(text: &str) -> Result<Scenario, String> {
        toml::from_str(text).map_err(|error| format!("not a scenario: {error}"))
    }

    /// As text.
    pub fn print(&self) -> String {
        toml::to_string(self).unwrap_or_else(|error| format!("# cannot be written: {error}\n"))
    }

    /// The world before the first event.
    pub fn world(&self, seed: u64) -> World {
        let server = Server::new(self.server.limits(), self.server.policy());
        self.world_of(seed, Box::new(server))
    }

    /// The same around another server.
    pub fn world_of(&self, seed: u64, server: Box<dyn Machine>) -> World {
        let limits = self.server.limits();
        let mut world = World::new(seed, server, limits, self.latency.latency());
        world.checker.patience = Duration::from_s(or(self.expect.patience_seconds, 60));
        world.is_pool = self.player.iter().any(|group| group.pool);
        let mut sizes = Vec::new();
        for plan in &self.disk {
            for _ in 0..plan.count {
                sizes.push(plan.told().size.0);
                let disk = world.add_disk(plan.told(), plan.truth(), plan.faults.clone());
                if plan.memory.mb > 0 {
                    world.add_memory(disk, plan.memory);
                }
            }
        }
        let files: u64 = self.player.iter().map(PlayerGroup::file_count).sum::<u64>()
            + self.copy.iter().map(|g| g.count).sum::<u64>()
            + self.ramble.iter().map(|g| g.files).sum::<u64>()
            + self.scrub.iter().map(|g| g.clips).sum::<u64>()
            + self.op_atom.iter().map(|g| g.clips).sum::<u64>();
        let disk_count = sizes.len() as u64;
        if self.has_lanes() {
            // Files for reading lie in the first half, files for writing in the other.
            let part = if files > 0 { 2 } else { u64::MAX };
            let used: Vec<u64> = sizes.iter().map(|size| size / part).collect();
            self.add_lanes(&mut world, &used);
            if files > 0 {
                sizes = used;
            }
        }
        let mut layout = Layout {
            disk_count,
            taken: vec![0; sizes.len()],
            places: files.div_ceil(disk_count.max(1)).max(1),
            turn: 0,
            sizes,
            prng: Prng::fork(seed, 2),
        };
        if disk_count > 0 {
            self.fill(&mut world, &mut layout);
        }
        world
    }

    fn end(&self) -> Instant {
        Instant::ZERO + Duration::from_s(self.seconds)
    }

    fn fill(&self, world: &mut World, layout: &mut Layout) {
        let mut played = Vec::new();
        let mut others = Vec::new();
        let writers = self.writers(world);
        for (number, group) in self.player.iter().enumerate() {
            match group.behind_ms {
                0 => self.add_players(world, layout, number, group, &mut played),
                _ => self.add_followers(world, group, &writers),
            }
        }
        for (number, group) in self.copy.iter().enumerate() {
            for index in 0..group.count {
                let (device, at, gap) = layout.next();
                let rate = BytesPerSecond::from_bits((group.megabits * 1e6) as u64);
                let hint = (rate.0 > 0).then_some(RateHint::Rate(rate, RateSource::Rule));
                let size = (group.file_mb * 1_000_000)
                    .min(gap.saturating_sub(4096))
                    .max(4096);
                let name = format!("c{index}.mov");
                let folder = format!("copy{number}");
                let file = contiguous(&folder, &name, device, at, size, hint);
                let file = world.files.add(file);
                others.push(file);
                let bytes = or(group.request_kib << 10, 8 << 20);
                let kind = Copy::kind(vec![file], bytes, group.in_flight.max(1));
                let begin = Instant::ZERO + Duration::from_ms(group.start_ms);
                world.add_client(kind, begin, self.end());
            }
        }
        for (number, group) in self.ramble.iter().enumerate() {
            self.add_ramblers(world, layout, (number, group), &played, &mut others);
        }
        for (number, group) in self.scrub.iter().enumerate() {
            self.add_scrubbers(world, layout, number, group);
        }
        for (number, group) in self.op_atom.iter().enumerate() {
            self.add_op_atom(world, layout, number, group);
        }
        let targets = |with_played: bool| -> Vec<FileIndex> {
            let played = played.iter().filter(|_| with_played);
            others.iter().chain(played).copied().collect()
        };
        for group in &self.writer {
            let files = targets(group.players_files);
            for _ in (0..group.count).filter(|_| !files.is_empty()) {
                let think = Duration::from_ms(group.think_ms);
                let kind = Kind::Write(Writer::new(files.clone(), group.write_kib << 10, think));
                world.add_client(kind, Instant::ZERO, self.end());
            }
        }
        for group in &self.foreign {
            let files = targets(group.players_files);
            for _ in (0..group.count).filter(|_| !files.is_empty()) {
                let kind = Kind::Foreign(Foreign {
                    files: files.clone(),
                    think: Duration::from_ms(group.think_ms),
                    delay: Duration::from_ms(group.delay_ms),
                    silent: group.silent,
                });
                world.add_client(kind, Instant::ZERO, self.end());
            }
        }
        writers.join(world, self.end());
    }

    fn add_ramblers(
        &self,
        world: &mut World,
        layout: &mut Layout,
        (number, group): (usize, &RambleGroup),
        played: &[FileIndex],
        others: &mut Vec<FileIndex>,
    ) {
        let mut files: Vec<FileIndex> = Vec::new();
        for index in 0..group.files {
            let (device, at, gap) = layout.next();
            let size = (group.file_kib << 10)
                .min(gap.saturating_sub(4096))
                .max(4096);
            let folder = format!("ramble{number}");
            let mut file = contiguous(&folder, &format!("r{index}"), device, at, size, None);
            // Room to grow, as an allocator leaves it that reserves ahead.
            file.extents[0].length = ByteCount((size + (1 << 20)).next_multiple_of(4096));
            files.push(world.files.add(file));
        }
        others.extend(&files);
        if group.players_files {
            files.extend(played);
        }
        if files.is_empty() {
            return;
        }
        for _ in 0..group.count {
            let bytes =
                or(group.request_kib << 10, 256 << 10).min(self.server.limits().read_bytes_max);
            let think = Duration::from_ms(group.think_ms);
            let mut rambler = Rambler::new(files.clone(), bytes, group.in_flight.max(1), think);
            rambler.die_per_10k = group.die_per_10k;
            let begin = Instant::ZERO + Duration::from_ms(group.start_ms);
            let client = world.add_client(Kind::Ramble(rambler), begin, self.end());
            world.clients[client as usize].hand.hold = Duration::from_ms(group.hold_ms);
        }
    }

    fn add_scrubbers(
        &self,
        world: &mut World,
        layout: &mut Layout,
        number: usize,
        group: &ScrubGroup,
    ) {
        let clips = PlayerGroup {
            megabits: group.megabits,
            unruled: group.unruled,
            clips: group.clips,
            ..PlayerGroup::default()
        };
        let rate = BytesPerSecond::from_bits((group.megabits * 1e6) as u64);
        let frame_bytes = rate.bytes_in(Duration::from_ms(40)).0.max(1);
        let folder = format!("scrub{number}");
        let files = self.clips(world, layout, &folder, &clips, frame_bytes);
        let files: Vec<FileIndex> = files.into_iter().map(|(file, _)| file).collect();
        let plan = ScrubPlan {
            files,
            frame_bytes,
            request_bytes: or(group.request_kib << 10, 8 << 20)
                .min(self.server.limits().read_bytes_max),
            every: Duration::from_ms(group.every_ms),
            step_frames_max: group.step_frames_max,
            turn_permille: group.turn_permille,
            elsewhere_permille: group.elsewhere_permille,
        };
        for _ in 0..group.count {
            let kind = Kind::Scrub(Scrubber::new(plan.clone()));
            let begin = Instant::ZERO + Duration::from_ms(group.start_ms);
            world.add_client(kind, begin, self.end());
        }
    }

    fn add_op_atom(
        &self,
        world: &mut World,
        layout: &mut Layout,
        number: usize,
        group: &OpAtomGroup,
    ) {
        const SOUND_BYTES: u64 = 144_000;
        const PICTURE_BYTES: u64 = 500_000_000;
        let period = Duration::from_ms(40);
        let rate = BytesPerSecond::from_bits((group.megabits * 1e6) as u64);
        let frame_bytes = rate.bytes_in(period).0.max(1);
        let frames = PICTURE_BYTES / frame_bytes;
        let sound_size = (frames / 25 + 1) * SOUND_BYTES;
        let sound_rate = RateHint::Rate(BytesPerSecond(SOUND_BYTES), RateSource::Header);
        let clip = |index: u64| {
            let (device, at, _) = layout.next();
            let folder = format!("op{number}/{index}");
            let hint = Some(RateHint::Rate(rate, RateSource::Rule));
            let picture = contiguous(&folder, "v.mxf", device, at, frames * frame_bytes, hint);
            let mut next = at + (frames * frame_bytes).next_multiple_of(4096);
            let mut files = vec![world.files.add(picture)];
            for sound in 0..group.sounds {
                let name = format!("a{sound}.mxf");
                let mut file = contiguous(&folder, &name, device, next, sound_size, None);
                // Without a rate only the beginning of the file is read.
                file.header = Some(match group.sound_told {
                    true => (Some(sound_rate), 3),
                    false => (None, 1),
                });
                next += sound_size.next_multiple_of(4096);
                files.push(world.files.add(file));
            }
            files
        };
        let plan = OpAtomPlan {
            clips: (0..group.clips.max(1)).map(clip).collect(),
            layers: group.layers,
            frame_bytes,
            period,
            sound_bytes: SOUND_BYTES,
            sound_frames: 25,
            run_frames: (group.cut_ms_min / 40, group.cut_ms_max / 40),
            late: Duration::from_ms(500),
        };
        for index in 0..group.count {
            let kind = Kind::OpAtom(OpAtom::new(plan.clone()));
            let begin = Instant::ZERO + Duration::from_ms(group.start_ms + index * group.every_ms);
            world.add_client(kind, begin, self.end());
        }
    }

    fn add_players(
        &self,
        world: &mut World,
        layout: &mut Layout,
        number: usize,
        group: &PlayerGroup,
        played: &mut Vec<FileIndex>,
    ) {
        let period = Duration((group.frame_ms * 1e6) as u64);
        let rate = BytesPerSecond::from_bits((group.megabits * 1e6) as u64);
        let frame_bytes = rate.bytes_in(period).0.max(1);
        let seconds = or(group.seconds, self.seconds);
        let frame_count = (NS_PER_S * seconds / period.0.max(1)).max(1);
        // Passes of a timeline are of one length.
        let frame_count = frame_count / (1 + group.again) * (1 + group.again);
        let mut shared = None;
        let clips = match group.has_cuts() {
            true => self.clips(world, layout, &format!("play{number}"), group, frame_bytes),
            false => Vec::new(),
        };
        played.extend(clips.iter().map(|&(file, _)| file));
        for index in 0..group.count {
            let source = match (&shared, group.shared) {
                _ if group.has_cuts() => {
                    Source::Timeline(group.cut_list(&clips, frame_count, &mut layout.prng))
                }
                (Some(source), true) => Source::clone(source),
                _ => self.footage(
                    world,
                    layout,
                    (number, index),
                    group,
                    frame_bytes,
                    frame_count,
                ),
            };
            match &source {
                Source::File(file) => played.push(*file),
                Source::Sequence(files) => played.extend(files.iter().take(4)),
                Source::Timeline(_) => {}
            }
            shared = Some(source.clone());
            let longest = (8 << 20).min(self.server.limits().read_bytes_max);
            let plan = PlayerPlan {
                source,
                frame_bytes,
                period,
                preroll: Duration::from_ms(or(group.preroll_ms, 500)),
                frame_count,
                request_bytes: or(group.request_kib << 10, frame_bytes).min(longest),
                in_flight: group.in_flight.max(1),
                closes_first: group.closes_first,
                pass_frames: frame_count / (1 + group.again),
                pattern: match (group.reverse, group.stride) {
                    (true, _) => Pattern::Reverse,
                    (false, 0 | 1) => Pattern::Forward,
                    (false, stride) => Pattern::Strided(stride),
                },
                jitter: Duration::from_us(group.jitter_us),
                pause_per_10k: group.pause_per_10k,
                jump_per_10k: group.jump_per_10k,
                die_per_10k: group.die_per_10k,
            };
            let begin = Duration::from_ms(group.start_ms + index * group.every_ms);
            let client = world.add_client(Player::kind(plan), Instant::ZERO + begin, self.end());
            let hand = &mut world.clients[client as usize].hand;
            hand.hold = Duration::from_ms(group.hold_ms);
            if group.one_login {
                hand.login = format!("group{number}");
            }
        }
    }

    /// Players behind recorders, each at the rate of its recorder.
    fn add_followers(&self, world: &mut World, group: &PlayerGroup, writers: &Writers) {
        let recorded = writers.recorded.iter().cycle();
        for (track, begin) in recorded.take(group.count as usize) {
            let longest = self.server.limits().read_bytes_max.min(8 << 20);
            let plan = PlayerPlan {
                pass_frames: u64::MAX,
                source: Source::File(track.file),
                frame_bytes: track.frame_bytes,
                period: track.period,
                preroll: Duration::from_ms(or(group.preroll_ms, 500)),
                frame_count: track.frame_count,
                request_bytes: or(group.request_kib << 10, track.frame_bytes).min(longest),
                in_flight: group.in_flight.max(1),
                closes_first: false,
                pattern: Pattern::Forward,
                jitter: Duration::from_us(group.jitter_us),
                pause_per_10k: group.pause_per_10k,
                jump_per_10k: 0,
                die_per_10k: group.die_per_10k,
            };
            let begin = *begin + Duration::from_ms(group.behind_ms);
            let client = world.add_client(Player::kind(plan), begin, self.end());
            world.clients[client as usize].hand.hold = Duration::from_ms(group.hold_ms);
        }
    }

    /// The clips of a group's timelines, and the number of frames of each.
    fn clips(
        &self,
        world: &mut World,
        layout: &mut Layout,
        folder: &str,
        group: &PlayerGroup,
        frame_bytes: u64,
    ) -> Vec<(FileIndex, u64)> {
        let rate = BytesPerSecond::from_bits((group.megabits * 1e6) as u64);
        let hint = (!group.unruled).then_some(RateHint::Rate(rate, RateSource::Rule));
        let add = |index| {
            let (device, at, room) = layout.next();
            let wanted = or(group.clip_mb * 1_000_000, 1_000_000_000);
            let frames = (wanted.min(room.saturating_sub(4096)) / frame_bytes).max(1);
            let name = format!("clip{index}.mov");
            let mut file = contiguous(folder, &name, device, at, frames * frame_bytes, hint);
            if group.extent_mb > 0 {
                scatter(&mut file, group.extent_mb << 20, room, &mut layout.prng);
            }
            file.tells_extents = !group.unknown_extents;
            (world.files.add(file), frames)
        };
        (0..group.clips.max(1)).map(add).collect()
    }

    fn footage(
        &self,
        world: &mut World,
        layout: &mut Layout,
        (number, index): (usize, u64),
        group: &PlayerGroup,
        frame_bytes: u64,
        frame_count: u64,
    ) -> Source {
        let (device, at, room) = layout.next();
        let rate = BytesPerSecond::from_bits((group.megabits * 1e6) as u64);
        if !group.sequence {
            let hint = (!group.unruled).then_some(RateHint::Rate(rate, RateSource::Rule));
            let name = format!("p{index}.mov");
            let size = frame_bytes * frame_count;
            let mut file = contiguous(&format!("play{number}"), &name, device, at, size, hint);
            if group.extent_mb > 0 {
                scatter(&mut file, group.extent_mb << 20, room, &mut layout.prng);
            }
            file.tells_extents = !group.unknown_extents;
            return Source::File(world.files.add(file));
        }
        let per_kilosecond = (1e6 / group.frame_ms) as u32;
        let hint = RateHint::FramesPerKilosecond(per_kilosecond, RateSource::Rule);
        let hint = (!group.unruled).then_some(hint);
        let list = (0..frame_count)
            .map(|k| {
                let place = at + k * frame_bytes.next_multiple_of(4096);
                let device = match group.pool {
                    // The members are alike, and so is its place on each.
                    true => DeviceId(((u64::from(device.0) + k) % layout.disk_count) as u16),
                    false => device,
                };
                let name = format!("shot.{:05}.dpx", k + 1);
                let folder = format!("play{number}/s{index}");
                let file = contiguous(&folder, &name, device, place, frame_bytes, hint);
                world.files.add(file)
            })
            .collect();
        Source::Sequence(list)
    }

    /// Plays it.
    pub fn run(&self, name: &str, seed: u64) -> Report {
        self.play(name, seed, self.world(seed))
    }

    /// Plays it in `world`.
    pub fn play(&self, name: &str, seed: u64, mut world: World) -> Report {
        self.play_in(name, seed, &mut world)
    }

    /// Plays it in `world`, which stays as it is at the end.
    pub fn play_in(&self, name: &str, seed: u64, world: &mut World) -> Report {
        let mut watch = Watch::default();
        let every = Duration::from_ms(or(self.look_ms, 1000));
        watch.run(world, self.end(), every);
        // All clients have time to get an answer and leave.
        let patience = world.checker.patience;
        let last = world.now + patience;
        while world.is_busy() && world.now < last {
            world.run_until(world.now + Duration::from_s(1));
        }
        let until = world.now + Duration::from_s(5);
        world.run_until(until);
        // Blocks that were fetched ahead for clients that have left may still be in a long queue.
        let last = world.now + Duration::from_s(60);
        while world.checker.flight_count() > 0 && world.now < last {
            world.run_until(world.now + Duration::from_s(1));
        }
        // Acknowledged bytes go to their device, if that ever recovers.
        let last = world.now + Duration::from_s(600);
        while world.checker.written.is_dirty() && world.now < last {
            world.run_until(world.now + Duration::from_s(1));
        }
        let now = world.now;
        for client in &mut world.clients {
            client.close_books(now);
        }
        world.checker.audit(now, &world.files);
        world.check_server();
        world.finish();
        let mut report = report(world, &watch, self.seconds as f64);
        report.scenario = name.to_owned();
        report.seed = seed;
        self.expect.judge(&mut report);
        report
    }
}

impl Expect {
    /// Enters unmet expectations.
    fn judge(&self, report: &mut Report) {
        let mut failures = Vec::new();
        let mut most = |what: &str, got: f64, limit: f64| {
            if got > limit {
                failures.push(format!("{what}: {got:.1}, at most {limit:.1} expected"));
            }
        };
        let r = &*report;
        most("violations", r.violation_count as f64, 0.0);
        most(
            "late frames of promised streams",
            r.late_promised as f64,
            self.late_promised_max as f64,
        );
        most("contracts withdrawn", r.shed as f64, self.shed_max as f64);
        most(
            "frames with an error",
            r.failed as f64,
            self.failed_max as f64,
        );
        most(
            "reads left to clients",
            r.plain as f64,
            self.plain_max as f64,
        );
        if self.ledger {
            most(
                "ledger lines that disagree",
                r.ledger_wrong.len() as f64,
                0.0,
            );
        }
        let optional = [
            (
                "late frames",
                r.late as f64,
                self.late_max.map(|n| n as f64),
            ),
            (
                "late frames of the last pass",
                r.late_last_pass as f64,
                self.late_last_pass_max.map(|n| n as f64),
            ),
            (
                "promised streams",
                r.promised as f64,
                self.promised_max.map(|n| n as f64),
            ),
            (
                "promised streams with late frames",
                r.late_promised_streams as f64,
                self.late_promised_streams_max.map(|n| n as f64),
            ),
            (
                "late frames after jumps",
                r.late_after_jump as f64,
                self.late_after_jump_max.map(|n| n as f64),
            ),
            (
                "first frame (ms)",
                r.first_frame_ms_max,
                self.first_frame_ms_max,
            ),
            ("cut, p95 (ms)", r.cut_ms_p95, self.cut_ms_p95_max),
            ("cut (ms)", r.cut_ms_max, self.cut_ms_max),
            (
                "single frame, p95 (ms)",
                r.scrub_ms_p95,
                self.scrub_ms_p95_max,
            ),
            (
                "read of disks for 100 bytes that clients got",
                r.read_percent,
                self.read_percent_max,
            ),
            (
                "late frames of clips of several files",
                r.op_atom_late as f64,
                self.op_atom_late_max.map(|n| n as f64),
            ),
            (
                "standstill of a copy (ms)",
                r.copy_wait_ms_max,
                self.copy_wait_ms_max,
            ),
        ];
        for (what, got, limit) in optional {
            if let Some(limit) = limit {
                most(what, got, limit);
            }
        }
        let least = [
            (
                "promised streams",
                r.promised as f64,
                self.promised_min as f64,
            ),
            (
                "copies (MB/s)",
                r.copy_mb_per_second,
                self.copy_mb_min.unwrap_or(0.0),
            ),
            (
                "frames with an error",
                r.failed as f64,
                self.failed_min as f64,
            ),
            ("frames", r.frames as f64, self.frames_min as f64),
            (
                "single frames",
                r.scrub_frames as f64,
                self.scrub_frames_min as f64,
            ),
        ];
        for (what, got, limit) in least {
            if got < limit {
                failures.push(format!("{what}: {got:.1}, at least {limit:.1} expected"));
            }
        }
        if let Some(recorded) = &report.recorded {
            failures.extend(self.written.judge(recorded));
        }
        report.failures = failures;
    }
}
