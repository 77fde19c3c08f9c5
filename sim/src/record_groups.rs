// SPDX-License-Identifier: Apache-2.0
//! Clients of a scenario that write through lanes: their names in a scenario, their files on its
//! disks, and the sums of their results.

use crate::client::Kind;
use crate::disk::volatile::JOURNAL_BYTES;
use crate::files::{FileIndex, contiguous};
use crate::recorder::{Recorder, Track, TrackPlan};
use crate::scatterer::{ScatterPlan, Scatterer};
use crate::scenario::Scenario;
use crate::space::Space;
use crate::world::World;
use rushes_core::server::{PAGE_BYTES, RateHint, RateSource, WriteWay};
use rushes_core::units::*;
use serde::{Deserialize, Serialize};

/// Some recorders: each writes one file at its rate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RecordGroup {
    /// How many.
    pub count: u64,
    /// Rate of each. Units: Mb/s.
    pub megabits: f64,
    /// Time from frame to frame. Units: ms.
    pub frame_ms: f64,
    /// How late a frame may be acknowledged. Units: ms.
    pub preroll_ms: u64,
    /// The first starts then. Units: ms.
    pub start_ms: u64,
    /// The others follow so far apart. Units: ms.
    pub every_ms: u64,
    /// How long each records; 0: to the end.
    pub seconds: u64,
    /// A rule has the rate of the files.
    pub ruled: bool,
    /// The client asks for a sync after so many frames; 0: none.
    pub sync_every: u64,
    /// Deaths, before so many frames in ten thousand.
    pub die_per_10k: u64,
}

impl Default for RecordGroup {
    fn default() -> RecordGroup {
        RecordGroup {
            count: 1,
            megabits: 100.0,
            frame_ms: 40.0,
            preroll_ms: 500,
            start_ms: 0,
            every_ms: 250,
            seconds: 0,
            ruled: false,
            sync_every: 0,
            die_per_10k: 0,
        }
    }
}

/// Some copies in: each writes one file as fast as the server lets it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CopyInGroup {
    /// How many.
    pub count: u64,
    /// The first starts then. Units: ms.
    pub start_ms: u64,
    /// The others follow so far apart. Units: ms.
    pub every_ms: u64,
    /// Length of a request. Units: KiB.
    pub request_kib: u64,
    /// Size of each file. Units: MiB.
    pub file_mib: u64,
    /// They first announce the length of a file, a byte a request, as Windows does.
    pub announce: bool,
    /// They share one session, as the clients of a pool's mount do.
    pub one_session: bool,
    /// The client asks for a sync after the last byte.
    pub sync_at_end: bool,
}

impl Default for CopyInGroup {
    fn default() -> CopyInGroup {
        CopyInGroup {
            count: 1,
            start_ms: 0,
            every_ms: 250,
            request_kib: 1024,
            file_mib: 1024,
            announce: false,
            one_session: false,
            sync_at_end: false,
        }
    }
}

/// Some clients that read one file, each its own part, and then write at random places in all of
/// it, together as much as it is long.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ScatterGroup {
    /// How many.
    pub count: u64,
    /// They start then. Units: ms.
    pub start_ms: u64,
    /// Size of the file. Units: MiB.
    pub file_mib: u64,
    /// Longest write. Units: pages of 4 KiB.
    pub pages_max: u64,
}

impl Default for ScatterGroup {
    fn default() -> ScatterGroup {
        ScatterGroup {
            count: 1,
            start_ms: 0,
            file_mib: 256,
            pages_max: 16,
        }
    }
}

/// The results that writers must have.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WrittenExpect {
    /// Frames of recorders that are acknowledged late.
    pub late_max: u64,
    /// Bytes of recorders that reach the device more than 5 s after their acknowledgement.
    pub device_late_bytes_max: u64,
    /// Frames that recorders write, at least.
    pub frames_min: u64,
    /// Requests of writers that give an error.
    pub failed_max: u64,
    /// Writes that the server leaves to clients.
    pub plain_max: u64,
    /// All copies in together. Units: MB/s.
    pub copy_mb_min: f64,
    /// The slowest copy in, as a part of their mean.
    pub copy_even_min: f64,
    /// Extents of one file.
    pub fragments_max: Option<u64>,
    /// Times that a drive must flush before a read.
    pub flushes_min: u64,
    /// See there.
    pub flushes_max: Option<u64>,
}

impl Default for WrittenExpect {
    fn default() -> WrittenExpect {
        WrittenExpect {
            late_max: 0,
            device_late_bytes_max: 0,
            frames_min: 0,
            failed_max: 0,
            plain_max: 0,
            copy_mb_min: 0.0,
            copy_even_min: 0.0,
            fragments_max: None,
            flushes_min: 0,
            flushes_max: None,
        }
    }
}

/// The results of a run's writers.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Recorded {
    /// Frames of recorders that were acknowledged.
    pub frames: u64,
    /// Frames of recorders that were acknowledged late, or not at all although they were due.
    pub late: u64,
    /// The worst of those. Units: ms.
    pub worst_ms: f64,
    /// Bytes of recorders that reached the device more than 5 s after their acknowledgement.
    pub device_late_bytes: u64,
    /// The longest of those times, of all writers.
    pub device_worst_s: f64,
    /// Acknowledged bytes that devices lack at the end.
    pub missing_bytes: u64,
    /// Most of the write buffer that was in use at once. Units: bytes.
    pub dirty_bytes_max: u64,
    /// Time from the last acknowledgement until the devices had everything.
    pub final_write_s: f64,
    /// All copies in together, while there was work. Units: MB/s.
    pub copy_mb_per_second: f64,
    /// The slowest copy in, as a part of their mean, from the start of the last one until the end;
    /// 1 without them.
    pub copy_even: f64,
    /// Longest time that a copy in made no progress. Units: ms.
    pub copy_wait_ms_max: f64,
    /// Requests that gave an error.
    pub failed: u64,
    /// Writes that the server left to clients.
    pub plain: u64,
    /// Syncs that were answered.
    pub syncs: u64,
    /// Most extents of a file.
    pub fragments_max: u64,
    /// Requests of the server that write.
    pub writes: u64,
    /// Their mean. Units: MB.
    pub write_mb_mean: f64,
    /// Bytes that were written and that the devices had already. Units: bytes.
    pub bridged_bytes: u64,
    /// Bytes of scatterers to their devices, from their first write until all were there. Units:
    /// MB/s.
    pub scatter_mb_per_second: f64,
    /// Times that drives had to flush before a read.
    pub flushes: u64,
    /// Memory of the write buffer that went from one lane to another. Units: bytes.
    pub moved_bytes: u64,
}

/// The clients that write through lanes, with their files.
#[derive(Default)]
pub struct Writers {
    clients: Vec<(Kind, Instant)>,
    /// Tracks of recorders, and when they begin.
    pub(crate) recorded: Vec<(TrackPlan, Instant)>,
}

impl Scenario {
    /// Whether some clients write through lanes.
    pub fn has_lanes(&self) -> bool {
        !self.record.is_empty() || !self.copy_in.is_empty() || !self.scatter.is_empty()
    }

    /// The lanes of a world, and the place of new files: behind `used` of each disk.
    pub(crate) fn add_lanes(&self, world: &mut World, used: &[u64]) {
        let limits = self.server.limits();
        world.lane_pages = (limits.write_buffer_bytes / PAGE_BYTES) as u32;
        for ((space, disk), used) in world.spaces.iter_mut().zip(&world.disks).zip(used) {
            let size = disk.truth.size.0;
            *space = Space::new(*used, size);
            space.withhold(size / 2, JOURNAL_BYTES);
        }
    }

    /// Makes the files of all clients that write through lanes.
    pub(crate) fn writers(&self, world: &mut World) -> Writers {
        let mut writers = Writers::default();
        for (number, group) in self.record.iter().enumerate() {
            self.add_recorders(world, number, group, &mut writers);
        }
        for (number, group) in self.copy_in.iter().enumerate() {
            self.add_copies_in(world, number, group, &mut writers);
        }
        for (number, group) in self.scatter.iter().enumerate() {
            self.add_scatterers(world, number, group, &mut writers);
        }
        writers
    }

    fn add_recorders(
        &self,
        world: &mut World,
        number: usize,
        group: &RecordGroup,
        writers: &mut Writers,
    ) {
        let rate = BytesPerSecond::from_bits((group.megabits * 1e6) as u64);
        let period = Duration((group.frame_ms * 1e6) as u64);
        let longest = self.server.limits().write_bytes_max;
        let hint = group
            .ruled
            .then_some(RateHint::Rate(rate, RateSource::Rule));
        for index in 0..group.count {
            let start_ms = group.start_ms + index * group.every_ms;
            let whole = (self.seconds * 1000).saturating_sub(start_ms);
            let ms = match group.seconds {
                0 => whole,
                seconds => whole.min(seconds * 1000),
            };
            let plan = TrackPlan {
                file: new_file(world, &format!("record{number}"), index, hint),
                frame_bytes: rate.bytes_in(period).0.clamp(1, longest),
                frame_count: ms * 1_000_000 / period.0.max(1),
                period,
                preroll: Duration::from_ms(group.preroll_ms),
                delay: Duration::ZERO,
                announces: false,
                sync_every: group.sync_every,
                syncs_at_end: false,
            };
            let recorder = Recorder::new(vec![plan], group.die_per_10k);
            let begin = Instant::ZERO + Duration::from_ms(start_ms);
            writers.recorded.push((plan, begin));
            writers.clients.push((Kind::Record(recorder), begin));
        }
    }

    fn add_copies_in(
        &self,
        world: &mut World,
        number: usize,
        group: &CopyInGroup,
        writers: &mut Writers,
    ) {
        let longest = self.server.limits().write_bytes_max;
        let bytes = (group.request_kib << 10).clamp(4096, longest);
        let mut plans = Vec::new();
        for index in 0..group.count {
            plans.push(TrackPlan {
                file: new_file(world, &format!("in{number}"), index, None),
                frame_bytes: bytes,
                frame_count: (group.file_mib << 20) / bytes,
                period: Duration::ZERO,
                preroll: Duration::ZERO,
                delay: Duration::from_ms(index * group.every_ms),
                announces: group.announce,
                sync_every: 0,
                syncs_at_end: group.sync_at_end,
            });
        }
        let sessions: Vec<Vec<TrackPlan>> = match group.one_session {
            true => vec![plans],
            false => plans.into_iter().map(|plan| vec![plan]).collect(),
        };
        let begin = Instant::ZERO + Duration::from_ms(group.start_ms);
        for plans in sessions {
            let recorder = Recorder::new(plans, 0);
            writers.clients.push((Kind::Record(recorder), begin));
        }
    }

    fn add_scatterers(
        &self,
        world: &mut World,
        number: usize,
        group: &ScatterGroup,
        writers: &mut Writers,
    ) {
        let read_bytes = self.server.limits().read_bytes_max.min(1 << 20);
        let reads = (group.file_mib << 20) / read_bytes / group.count.max(1);
        let size = reads * read_bytes * group.count;
        let file = new_file(world, &format!("scatter{number}"), number as u64, None);
        let it = world.files.get_mut(file);
        let space = &mut world.spaces[it.device.0 as usize];
        space.reserve(it, ByteRange::new(0, size), size);
        it.size = size;
        it.sizes = vec![(0, size)];
        it.is_exclusive = true;
        let pages_max = group.pages_max.clamp(1, (size / PAGE_BYTES).max(1));
        let mean = (pages_max + 1) * PAGE_BYTES / 2;
        for index in 0..group.count {
            let plan = ScatterPlan {
                file,
                first: index * reads * read_bytes,
                read_bytes,
                read_count: reads,
                write_count: size / group.count / mean,
                pages_max,
            };
            let begin = Instant::ZERO + Duration::from_ms(group.start_ms);
            let kind = Kind::Scatter(Scatterer::new(plan));
            writers.clients.push((kind, begin));
        }
    }
}

impl Writers {
    /// Adds the clients, each at its time.
    pub(crate) fn join(self, world: &mut World, end: Instant) {
        for (kind, begin) in self.clients {
            world.add_client(kind, begin, end);
        }
    }
}

/// An empty file on the next disk.
fn new_file(world: &mut World, folder: &str, index: u64, hint: Option<RateHint>) -> FileIndex {
    let device = DeviceId((index % world.disks.len().max(1) as u64) as u16);
    let mut file = contiguous(folder, &format!("w{index}.mov"), device, 0, 0, hint);
    file.extents.clear();
    file.way = WriteWay::Extents;
    world.files.add(file)
}

/// Adds up the results of the writers. `seconds`: how long there was work.
pub fn recorded(world: &World, seconds: f64) -> Option<Recorded> {
    if world.lane_pages == 0 {
        return None;
    }
    let mut sum = Recorded {
        copy_even: copy_even(world, seconds),
        dirty_bytes_max: world.lane_bytes_max,
        plain: world.server.writes().plain_count,
        moved_bytes: world.checker.written.given_back_bytes,
        ..Recorded::default()
    };
    let mut last = Instant::ZERO;
    let (mut scattered, mut scatter_from) = (0, Instant::NEVER);
    for client in &world.clients {
        match &client.kind {
            Kind::Record(recorder) => {
                for track in &recorder.tracks {
                    sum.add(world, track, seconds);
                    last = last.max(track.count.acknowledged.last().copied().unwrap_or(last));
                }
            }
            Kind::Scatter(scatterer) => {
                sum.failed += scatterer.failed_count;
                scattered += scatterer.bytes;
                scatter_from = scatter_from.min(scatterer.writes_from);
                last = last.max(scatterer.progress_at);
            }
            _ => {}
        }
    }
    let took = world.wrote_at.since(scatter_from).0.max(1) as f64;
    sum.scatter_mb_per_second = scattered as f64 * 1e3 / took;
    let mut bytes = 0;
    for disk in &world.disks {
        sum.writes += disk.count.write_count;
        bytes += disk.count.write_bytes;
    }
    sum.write_mb_mean = bytes as f64 / 1e6 / sum.writes.max(1) as f64;
    sum.final_write_s = world.wrote_at.since(last).0 as f64 / 1e9;
    let devices = world.server.devices();
    sum.flushes = devices.iter().map(|device| device.flush_count).sum();
    sum.bridged_bytes = devices.iter().map(|device| device.write_bridged.0).sum();
    Some(sum)
}

/// All tracks of copies in.
fn copies(world: &World) -> impl Iterator<Item = &Track> {
    let recorders = world
        .clients
        .iter()
        .filter_map(|client| match &client.kind {
            Kind::Record(recorder) => Some(recorder),
            _ => None,
        });
    let tracks = recorders.flat_map(|recorder| &recorder.tracks);
    tracks.filter(|track| track.plan.period == Duration::ZERO)
}

fn copy_even(world: &World, seconds: f64) -> f64 {
    let begin = |track: &Track| track.count.acknowledged.first().copied();
    let from = copies(world).filter_map(begin).max().unwrap_or_default();
    let end = Instant((seconds * 1e9) as u64);
    let within = |track: &Track| {
        let is_in = |at: &&Instant| (from..=end).contains(*at);
        track.count.acknowledged.iter().filter(is_in).count() as f64
    };
    let sum: f64 = copies(world).map(within).sum();
    let least = copies(world).map(within).reduce(f64::min);
    let count = copies(world).count() as f64;
    least.map_or(1.0, |least| least * count / sum.max(1.0))
}

impl Recorded {
    fn add(&mut self, world: &World, track: &Track, seconds: f64) {
        let (plan, count) = (&track.plan, &track.count);
        let late = world.checker.written.late(plan.file);
        let ms = |span: Duration| span.0 as f64 / 1e6;
        if plan.period > Duration::ZERO {
            self.frames += count.acknowledged.len() as u64;
            self.late += count.late_count;
            self.worst_ms = self.worst_ms.max(ms(count.worst_late));
            self.device_late_bytes += late.bytes;
        } else {
            self.copy_mb_per_second += track.bytes() as f64 / 1e6 / seconds;
            self.copy_wait_ms_max = self.copy_wait_ms_max.max(ms(count.longest_wait));
        }
        self.device_worst_s = self.device_worst_s.max(late.worst.0 as f64 / 1e9);
        self.failed += count.failed_count;
        self.syncs += count.sync_count;
        self.missing_bytes += world.checker.written.missing(plan.file);
        let extents = world.files.get(plan.file).extents.len() as u64;
        self.fragments_max = self.fragments_max.max(extents);
    }
}

impl WrittenExpect {
    /// Sentences about unmet expectations.
    pub fn judge(&self, got: &Recorded) -> Vec<String> {
        let mut failures = Vec::new();
        let most = [
            ("late frames of recorders", got.late, Some(self.late_max)),
            (
                "bytes that reached their device late",
                got.device_late_bytes,
                Some(self.device_late_bytes_max),
            ),
            (
                "requests of writers that failed",
                got.failed,
                Some(self.failed_max),
            ),
            ("writes left to clients", got.plain, Some(self.plain_max)),
            ("extents of a file", got.fragments_max, self.fragments_max),
            ("flushes", got.flushes, self.flushes_max),
        ];
        for (what, got, limit) in most {
            if let Some(limit) = limit.filter(|limit| got > *limit) {
                failures.push(format!("{what}: {got}, at most {limit} expected"));
            }
        }
        let least = [
            ("flushes", got.flushes as f64, self.flushes_min as f64),
            (
                "frames of recorders",
                got.frames as f64,
                self.frames_min as f64,
            ),
            ("copies in (MB/s)", got.copy_mb_per_second, self.copy_mb_min),
            (
                "the slowest copy in by the mean",
                got.copy_even,
                self.copy_even_min,
            ),
        ];
        for (what, got, limit) in least {
            if got < limit {
                failures.push(format!("{what}: {got:.2}, at least {limit:.2} expected"));
            }
        }
        failures
    }
}
