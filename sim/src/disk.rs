// SPDX-License-Identifier: Apache-2.0
//! A disk of the simulated world: one request in service, the nearest ahead next, and faults.
//!
//! The model is that of FACTS §2, which the lab's real device also follows: positioning by
//! distance, none when a request starts where the last one ended. Among pending requests the disk
//! takes the nearest ahead (C-SCAN), but first one that has waited 100 ms. A drive goes on reading
//! while it is idle, so that a contiguous request after a pause gets up to 8 MB at no cost. The
//! server's model may differ from the truth here: that is the purpose of [`Faults`].

pub mod volatile;

use crate::files::{FileIndex, Files};
use crate::prng::Prng;
use rushes_core::server::{DeviceModel, IoClass, ServiceModel};
use rushes_core::units::*;
use serde::{Deserialize, Serialize};

/// A request that has waited so long is served before nearer ones.
const IMPATIENCE: Duration = Duration::from_ms(100);

/// The bytes that a drive reads ahead into its own memory while it has no request. Units: bytes.
const READ_AHEAD_BYTES: u64 = 8 << 20;

/// A scheduler of classes turns to a lower one so long after the last real-time request has ended:
/// until then another real-time request may come, and goes first.
const CLASS_RESTART: Duration = Duration::from_us(300);

/// The array of rt-Samba's Table 5: 15.2 ms and 172 MB/s for reads, 8 ms and 145 MB/s for writes,
/// 40 GB.
pub fn table5() -> DeviceModel {
    let model = |ns: u64, rate: u64| ServiceModel {
        fixed: Duration(ns * 40 / 100),
        span: Duration(ns * 113 / 100),
        rate: BytesPerSecond(rate),
    };
    DeviceModel {
        read: model(15_200_000, 172_000_000),
        write: model(8_000_000, 145_000_000),
        size: ByteCount(40_000_000_000),
    }
}

/// How a disk departs from the server's model of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Faults {
    /// Each request takes up to so many thousandths more or less.
    pub noise_permille: u64,
    /// Phases in which everything takes longer.
    pub slow: Vec<SlowPhase>,
    /// So many requests in a thousand take `stall_ms` longer.
    pub stall_permille: u64,
    /// The length of a stall.
    pub stall_ms: u64,
    /// Ranges that cannot be read.
    pub bad: Vec<BadRange>,
    /// Small reads and writes by others all over the disk, so many per second: a metadata storm.
    pub storm_per_second: u64,
    /// First instant of the storm. Units: ms.
    pub storm_from_ms: u64,
    /// Its last instant; 0: it never ends. Units: ms.
    pub storm_to_ms: u64,
    /// The disk serves real-time requests before best effort ones, as mq-deadline does: it serves
    /// no lower class beside them, nor within a moment after the last one.
    pub honours_class: bool,
}

impl Faults {
    /// Whether these bytes of the device give an error now.
    fn is_bad(&self, now: Instant, at: u64, bytes: u64) -> bool {
        self.bad.iter().any(|bad| {
            at < bad.start + bad.bytes
                && bad.start < at + bytes
                && now.0 >= bad.from_ms * 1_000_000
                && (bad.to_ms == 0 || now.0 < bad.to_ms * 1_000_000)
        })
    }
}

/// Everything takes `percent` of its usual time from `from_ms` to `to_ms`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SlowPhase {
    /// Begin.
    pub from_ms: u64,
    /// End.
    pub to_ms: u64,
    /// 100 is no change.
    pub percent: u64,
}

/// Bytes that give an error while it lasts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BadRange {
    /// First byte on the device.
    pub start: u64,
    /// Their number.
    pub bytes: u64,
    /// Begin.
    pub from_ms: u64,
    /// End; 0: never healed.
    pub to_ms: u64,
}

/// The owner of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// The server's.
    Server(IoId),
    /// A client's own: plain reads, native writes.
    Client {
        /// The client.
        client: u32,
        /// The number of its life.
        life: u32,
        /// Its request.
        serial: u64,
    },
    /// The kernel's, for a client that opens a file.
    Open {
        /// The client.
        client: u32,
        /// The number of its life.
        life: u32,
        /// The handle.
        handle: HandleId,
        /// The file.
        file: FileIndex,
        /// How many more requests follow.
        left: u32,
    },
    /// The driver's, for the header of a file.
    Header {
        /// How many more places of it follow.
        left: u32,
    },
    /// No one that matters.
    Storm,
}

/// A request to a disk.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    /// Its owner.
    pub owner: Owner,
    /// Its file; without one, `range` is on the device itself.
    pub file: Option<FileIndex>,
    /// Its bytes.
    pub range: ByteRange,
    /// True: they are written.
    pub write: bool,
    /// Its priority.
    pub class: IoClass,
    /// The instant when it came.
    pub arrived: Instant,
}

impl Job {
    /// A client's write that goes around the server.
    pub fn native_write(client: u32, file: FileIndex, range: ByteRange, arrived: Instant) -> Job {
        Job {
            owner: Owner::Client {
                client,
                life: u32::MAX,
                serial: 0,
            },
            file: Some(file),
            range,
            write: true,
            class: IoClass::BestEffort,
            arrived,
        }
    }
}

/// The work of a disk so far. Units: as named; times in ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DiskCount {
    /// The server's requests that read.
    pub request_count: u64,
    /// Their bytes.
    pub request_bytes: u64,
    /// Its requests that write.
    pub write_count: u64,
    /// Bytes of the server's requests that write.
    pub write_bytes: u64,
    /// Time spent on all of these.
    pub request_ns: u64,
    /// Of that, positioning.
    pub positioning_ns: u64,
    /// Others' requests.
    pub foreign_count: u64,
    /// Time spent on those.
    pub foreign_ns: u64,
}

struct Service {
    job: Job,
    failed: bool,
    serial: u64,
    ends: Instant,
}

/// A disk.
pub struct Disk {
    /// The true service times.
    pub truth: DeviceModel,
    /// Requests and bytes of others since the driver last looked.
    pub others: (u64, u64),
    /// The driver will look.
    pub sampled: bool,
    /// The server had a request here since the driver last looked.
    pub served: bool,
    /// Its faults.
    pub faults: Faults,
    /// Its work so far.
    pub count: DiskCount,
    /// Its memory, if it has one.
    pub volatile: Option<volatile::Volatile>,
    prng: Prng,
    pending: Vec<(u64, Job)>,
    service: Option<Service>,
    head: u64,
    idle_since: Instant,
    /// Requests of a lower class wait until then, if the disk honours classes.
    others_from: Instant,
}

/// A request that ended.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    /// The request.
    pub job: Job,
    /// It gave an error.
    pub failed: bool,
    /// The version of the file's content when it was read ([`Files::serial`]).
    pub serial: u64,
}

impl Disk {
    /// A disk at rest with its head at the start.
    pub fn new(truth: DeviceModel, faults: Faults, prng: Prng) -> Disk {
        Disk {
            truth,
            others: (0, 0),
            sampled: false,
            served: false,
            faults,
            count: DiskCount::default(),
            volatile: None,
            prng,
            pending: Vec::with_capacity(64),
            service: None,
            head: 0,
            idle_since: Instant::ZERO,
            others_from: Instant::ZERO,
        }
    }

    /// Takes a request. Returns when to call [`Disk::finish`], unless a call is due already.
    pub fn submit(&mut self, now: Instant, job: Job, files: &Files) -> Option<Instant> {
        if job.write && self.volatile.is_some() {
            self.submit_to_memory(now, job, files);
            return match self.service {
                Some(_) => None,
                None => self.begin(now, files),
            };
        }
        let start = match job.file {
            Some(file) => files.physical(file, job.range.start),
            None => job.range.start.0,
        };
        self.pending.push((start, job));
        if self.service.is_some() {
            return None;
        }
        self.begin(now, files)
    }

    /// The request in service ends, or it is time for requests of a lower class. Returns the ended
    /// request, and when to call again.
    pub fn finish(&mut self, now: Instant, files: &Files) -> (Option<Done>, Option<Instant>) {
        let Some(service) = self.service.take_if(|service| service.ends <= now) else {
            let next = match self.service {
                None => self.begin(now, files),
                Some(_) => None,
            };
            return (None, next);
        };
        self.idle_since = now;
        if service.job.class == IoClass::RealTime {
            self.others_from = now + CLASS_RESTART;
        }
        let done = Done {
            job: service.job,
            failed: service.failed,
            serial: service.serial,
        };
        (Some(done), self.begin(now, files))
    }

    /// Requests waiting or in service.
    pub fn depth(&self) -> usize {
        self.pending.len() + usize::from(self.service.is_some())
    }

    fn begin(&mut self, now: Instant, files: &Files) -> Option<Instant> {
        if self.waits_for_others(now) {
            return Some(self.others_from);
        }
        if self.volatile.is_some() && self.destages(now, files) {
            return None;
        }
        let (start, job) = self.choose(now)?;
        let mut positioning = 0;
        let mut transfer = 0;
        let mut failed = false;
        let model = if job.write {
            self.truth.write
        } else {
            self.truth.read
        };
        let mut piece = |at: u64, bytes: u64, head: &mut u64, idle_since: Instant| {
            if at != *head {
                positioning += positioning_ns(&model, self.truth.size, *head, at);
                transfer += model.rate.time_for(ByteCount(bytes)).0;
            } else {
                // A drive writes nothing ahead of time.
                let ahead = match job.owner {
                    Owner::Server(_) if job.write => 0,
                    _ => model.rate.bytes_in(now.since(idle_since)).0,
                };
                let free = ahead.min(READ_AHEAD_BYTES).min(bytes);
                transfer += model.rate.time_for(ByteCount(bytes - free)).0;
            }
            *head = at + bytes;
            failed |= self.faults.is_bad(now, at, bytes);
        };
        let mut head = self.head;
        // Credit belongs to the first piece only: later ones follow without a pause.
        let mut idle_since = self.idle_since;
        match job.file {
            None => piece(start, job.range.length.0, &mut head, idle_since),
            Some(file) => {
                for (at, bytes) in files.pieces(file, job.range) {
                    piece(at, bytes, &mut head, idle_since);
                    idle_since = now;
                }
            }
        }
        self.head = head;
        let ns = self.trouble(now, positioning + transfer);
        match job.owner {
            Owner::Server(_) => {
                let (count, bytes) = match job.write {
                    true => (&mut self.count.write_count, &mut self.count.write_bytes),
                    false => (&mut self.count.request_count, &mut self.count.request_bytes),
                };
                *count += 1;
                *bytes += job.range.length.0;
                self.count.request_ns += ns;
                self.count.positioning_ns += positioning;
            }
            Owner::Client { .. } | Owner::Open { .. } | Owner::Header { .. } | Owner::Storm => {
                self.count.foreign_count += 1;
                self.count.foreign_ns += ns;
            }
        }
        let serial = job.file.map_or(0, |file| files.serial(file));
        let ends = now + Duration(ns);
        self.service = Some(Service {
            job,
            failed,
            serial,
            ends,
        });
        Some(ends)
    }

    /// The time that a request takes, with noise, slow phases and stalls.
    fn trouble(&mut self, now: Instant, ns: u64) -> u64 {
        let mut ns = ns;
        if self.faults.noise_permille > 0 {
            let swing = self.prng.below(2 * self.faults.noise_permille + 1);
            ns = ns / 1000 * (1000 + swing).saturating_sub(self.faults.noise_permille);
        }
        for phase in &self.faults.slow {
            if now.0 >= phase.from_ms * 1_000_000 && now.0 < phase.to_ms * 1_000_000 {
                ns = ns / 100 * phase.percent;
            }
        }
        if self.faults.stall_permille > 0 && self.prng.chance(self.faults.stall_permille) {
            ns += self.faults.stall_ms * 1_000_000;
        }
        ns
    }

    /// Whether only requests of a lower class wait, and it is too early for them.
    fn waits_for_others(&self, now: Instant) -> bool {
        let is_real_time = |(_, job): &(u64, Job)| job.class == IoClass::RealTime;
        self.faults.honours_class
            && now < self.others_from
            && !self.pending.is_empty()
            && !self.pending.iter().any(is_real_time)
    }

    /// The request to serve next, taken out of the pending ones.
    fn choose(&mut self, now: Instant) -> Option<(u64, Job)> {
        // remove, not swap_remove: equal keys are served in the order they came.
        self.best(now).map(|index| self.pending.remove(index))
    }

    /// The place of that request among the pending ones.
    fn best(&self, now: Instant) -> Option<usize> {
        let top = if self.faults.honours_class {
            self.pending.iter().map(|(_, job)| rank(job.class)).min()?
        } else {
            u8::MAX
        };
        let mut best: Option<(bool, u64, usize)> = None;
        for (index, (start, job)) in self.pending.iter().enumerate() {
            if rank(job.class) > top {
                continue;
            }
            let patient = now.since(job.arrived) < IMPATIENCE;
            let order = if patient {
                // A job that lies behind the head comes after everything ahead of it.
                start.wrapping_sub(self.head)
            } else {
                job.arrived.0
            };
            let key = (patient, order, index);
            if best.is_none_or(|b| key < b) {
                best = Some(key);
            }
        }
        best.map(|(_, _, index)| index)
    }
}

fn rank(class: IoClass) -> u8 {
    match class {
        IoClass::RealTime => 0,
        IoClass::BestEffort => 1,
        IoClass::Idle => 2,
    }
}

/// Time to get from `head` to `at`. Units: ns.
pub fn positioning_ns(model: &ServiceModel, size: ByteCount, head: u64, at: u64) -> u64 {
    if head == at {
        return 0;
    }
    let distance = head.abs_diff(at) as f64 / (size.0.max(1)) as f64;
    model.fixed.0 + (model.span.0 as f64 * distance.min(1.0).sqrt()) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(start: u64, bytes: u64, arrived: Instant) -> Job {
        Job {
            owner: Owner::Storm,
            file: None,
            range: ByteRange::new(start, bytes),
            write: false,
            class: IoClass::BestEffort,
            arrived,
        }
    }

    #[test]
    fn random_reads_are_as_fast_as_table_5_says() {
        // rt-Samba's Table 5: direct random reads in Mb/s by request size; one line fits it to 12
        // %.
        let goal = [
            (64 << 10, 35.0),
            (512 << 10, 205.0),
            (1 << 20, 361.0),
            (2 << 20, 570.0),
            (4 << 20, 822.0),
            (8 << 20, 1032.0),
            (16 << 20, 1217.0),
        ];
        for (bytes, megabits) in goal {
            let mut prng = Prng::new(1);
            let mut disk = Disk::new(table5(), Faults::default(), Prng::new(2));
            let files = Files::default();
            let mut now = Instant::ZERO;
            for _ in 0..2000 {
                let at = prng.below(disk.truth.size.0 - bytes) & !4095;
                now = disk.submit(now, read(at, bytes, now), &files).unwrap();
                disk.finish(now, &files);
            }
            let got = 2000.0 * bytes as f64 * 8e3 / now.0 as f64;
            assert!(
                (got / megabits - 1.0).abs() < 0.12,
                "{bytes}: {got:.0} Mb/s"
            );
        }
    }

    #[test]
    fn nearest_ahead_goes_first_until_another_has_waited_too_long() {
        let files = Files::default();
        let mut disk = Disk::new(table5(), Faults::default(), Prng::new(2));
        let mut now = disk.submit(Instant::ZERO, read(1 << 30, 1 << 20, Instant::ZERO), &files);
        for start in [20 << 30, 5 << 30, 0] {
            disk.submit(Instant(1), read(start, 24 << 20, Instant(1)), &files);
        }
        let mut order = Vec::new();
        while let Some(at) = now {
            let (done, next) = disk.finish(at, &files);
            order.push(done.unwrap().job.range.start.0 >> 30);
            now = next;
        }
        // 24 MiB take 0.16 s: after the second, the one behind the head has waited as long as the
        // other, and is first among equals by its arrival.
        assert_eq!(order, [1, 5, 20, 0]);
    }

    #[test]
    fn requests_of_a_lower_class_wait_for_a_moment_without_real_time() {
        let files = Files::default();
        let faults = Faults {
            honours_class: true,
            ..Faults::default()
        };
        let mut disk = Disk::new(table5(), faults, Prng::new(2));
        let real_time = |start, now| Job {
            class: IoClass::RealTime,
            ..read(start, 1 << 20, now)
        };
        let first = disk.submit(Instant::ZERO, real_time(0, Instant::ZERO), &files);
        assert_eq!(
            disk.submit(Instant(1), read(1 << 30, 4096, Instant(1)), &files),
            None
        );
        let (done, turn) = disk.finish(first.unwrap(), &files);
        assert!(done.is_some());
        let turn = turn.unwrap();
        assert_eq!(turn, first.unwrap() + CLASS_RESTART);
        // Another real-time request comes in time.
        let soon = first.unwrap() + Duration::from_us(100);
        let second = disk.submit(soon, real_time(1 << 20, soon), &files);
        assert!(
            disk.finish(turn, &files).0.is_none(),
            "it is still in service"
        );
        let (done, turn) = disk.finish(second.unwrap(), &files);
        assert_eq!(done.unwrap().job.class, IoClass::RealTime);
        let (done, last) = disk.finish(turn.unwrap(), &files);
        assert!(done.is_none(), "the small one goes into service now");
        let (done, _) = disk.finish(last.unwrap(), &files);
        assert_eq!(done.unwrap().job.class, IoClass::BestEffort);
    }
}
