// SPDX-License-Identifier: Apache-2.0
//! A disk that takes writes into a volatile memory and destages them later, as `lab/src/disk` does.
//!
//! Writes go into the memory at once, as long as there is room. The head destages when no read has
//! come for a while, when a flush waits, and when little room is left. The file system on the disk
//! commits its journal every five seconds, and until a commit has ended the drive takes no write,
//! like one that gets SATA's FLUSH CACHE, or one behind a loop device.

use super::{Disk, Job, Owner};
use crate::drive_memory::DriveMemory;
use crate::files::Files;
use rushes_core::server::{Flushed, ServiceModel};
use rushes_core::units::*;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// A drive without a read for so long begins to destage.
const IDLE: Duration = Duration::from_ms(100);
/// Between two commits of ext4's journal.
pub const COMMITS: Duration = Duration::from_s(5);
/// The length of a commit. Units: bytes.
pub const JOURNAL_BYTES: u64 = 64 << 10;

/// Calibration's view of writes that go to a drive's memory.
pub const INTO_MEMORY: ServiceModel = ServiceModel {
    fixed: Duration::from_us(150),
    span: Duration::ZERO,
    rate: BytesPerSecond(1_900_000_000),
};

/// The memory of a drive in a scenario.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MemoryPlan {
    /// Size; 0: the drive has none. Units: MB.
    pub mb: u64,
    /// The drive takes no flush, and vouches for its memory.
    pub no_flush: bool,
    /// The drive takes a flush, and never answers.
    pub flush_hangs: bool,
}

/// The one that waits for a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asker {
    /// The server's own.
    Server,
    /// A sync of this file.
    Sync(FileId),
}

/// An alarm of a drive.
#[derive(Clone, Copy, Debug)]
pub enum Wake {
    /// A write has been taken, or has failed.
    Taken(Job, bool),
    /// A run is on the medium.
    Destaged,
    /// The file system commits its journal.
    Commit,
    /// Perhaps no read has come for a while.
    Idle,
}

/// A message of a drive to the world.
#[derive(Clone, Debug)]
pub enum News {
    /// The world must wake it then.
    Wake(Instant, Wake),
    /// It takes these bytes of a request into its memory, at these places.
    Takes(IoId, Vec<(u64, u64)>),
    /// It begins to destage these bytes.
    Destages(ByteRange),
    /// They are on the medium.
    Destaged,
    /// A flush has ended.
    Flushed(Asker, Flushed),
}

/// The volatile part of a disk.
pub struct Volatile {
    /// How the drive takes flushes.
    pub plan: MemoryPlan,
    memory: DriveMemory,
    /// Writes that wait for room.
    waiting: VecDeque<Job>,
    /// A commit waits for that flush; true: the journal itself is written then.
    commit: Option<(u64, bool)>,
    is_destaging: bool,
    /// Flushes that have not ended.
    flushes: Vec<(u64, Asker)>,
    /// The last instant when a read wanted the head.
    wanted_at: Instant,
    /// It wakes then to see whether it is idle.
    idle_at: Instant,
    news: Vec<News>,
}

impl Volatile {
    /// An empty memory.
    pub fn new(plan: MemoryPlan) -> Volatile {
        Volatile {
            plan,
            memory: DriveMemory::new(plan.mb * 1_000_000),
            waiting: VecDeque::new(),
            commit: None,
            is_destaging: false,
            flushes: Vec::new(),
            wanted_at: Instant::ZERO,
            idle_at: Instant::ZERO,
            news: vec![News::Wake(Instant::ZERO + COMMITS, Wake::Commit)],
        }
    }

    /// A commit continues when the bytes for which it waits are on the medium. `place`: of the
    /// journal.
    fn go_on_committing(&mut self, place: u64) {
        let Some((flush, is_journal_due)) = self.commit else {
            return;
        };
        if self.memory.has_of(flush) || self.is_destaging {
            return;
        }
        self.commit = None;
        if is_journal_due {
            self.memory.put(place, JOURNAL_BYTES);
            self.commit = Some((self.memory.begin_flush(), false));
        }
    }

    fn end_flushes(&mut self) {
        if self.plan.flush_hangs || self.is_destaging {
            return;
        }
        let memory = &self.memory;
        let (ended, left) = self
            .flushes
            .iter()
            .partition(|(flush, _)| !memory.has_of(*flush));
        self.flushes = left;
        let ended: Vec<(u64, Asker)> = ended;
        let news = ended.into_iter().map(|(_, asker)| asker);
        self.news
            .extend(news.map(|asker| News::Flushed(asker, Flushed::Done)));
    }
}

impl Disk {
    /// Takes the drive's messages, in order.
    pub fn take_news(&mut self) -> Vec<News> {
        self.volatile
            .as_mut()
            .map(|it| std::mem::take(&mut it.news))
            .unwrap_or_default()
    }

    /// A write comes to a drive with a memory.
    pub(super) fn submit_to_memory(&mut self, now: Instant, job: Job, files: &Files) {
        if let Some(it) = &mut self.volatile {
            it.waiting.push_back(job);
            self.take_in(now, files);
        }
    }

    /// A flush is requested. Returns when to call [`Disk::finish`], unless a call is due already.
    pub fn flush(&mut self, now: Instant, asker: Asker, files: &Files) -> Option<Instant> {
        let it = self.volatile.as_mut()?;
        if it.plan.no_flush {
            let outcome = match asker {
                Asker::Server => Flushed::Never,
                Asker::Sync(_) => Flushed::Done,
            };
            it.news.push(News::Flushed(asker, outcome));
            return None;
        }
        let flush = it.memory.begin_flush();
        it.flushes.push((flush, asker));
        it.end_flushes();
        self.go_on(now, files)
    }

    /// An event for which the drive waited has come. Returns when to call [`Disk::finish`], unless
    /// a call is due already.
    pub fn wake(&mut self, now: Instant, wake: Wake, files: &Files) -> Option<Instant> {
        let place = self.truth.size.0 / 2;
        let it = self.volatile.as_mut()?;
        match wake {
            Wake::Taken(..) | Wake::Idle => {}
            Wake::Destaged => {
                it.is_destaging = false;
                it.news.push(News::Destaged);
                self.idle_since = now;
            }
            Wake::Commit => {
                it.commit = Some((it.memory.begin_flush(), true));
                it.news.push(News::Wake(now + COMMITS, Wake::Commit));
            }
        }
        it.go_on_committing(place);
        it.end_flushes();
        self.go_on(now, files)
    }

    fn go_on(&mut self, now: Instant, files: &Files) -> Option<Instant> {
        self.take_in(now, files);
        match self.service {
            Some(_) => None,
            None => self.begin(now, files),
        }
    }

    /// Writes that fit are as good as done.
    fn take_in(&mut self, now: Instant, files: &Files) {
        let Some(it) = &mut self.volatile else {
            return;
        };
        while let Some(job) = it.waiting.front().copied() {
            let pieces: Vec<(u64, u64)> = match job.file {
                Some(file) => files.pieces(file, job.range).collect(),
                None => vec![(job.range.start.0, job.range.length.0)],
            };
            // A stranger's truncation is a job over all bytes behind the cut: only the file's
            // blocks count.
            let bytes = pieces.iter().map(|&(_, bytes)| bytes).sum();
            if it.memory.is_full_for(bytes) || it.commit.is_some() {
                return;
            }
            it.waiting.pop_front();
            let is_bad = |&(at, bytes): &(u64, u64)| self.faults.is_bad(now, at, bytes);
            let failed = pieces.iter().any(is_bad);
            if !failed {
                for &(at, bytes) in &pieces {
                    it.memory.put(at, bytes);
                }
                if let Owner::Server(io) = job.owner {
                    self.count.write_count += 1;
                    self.count.write_bytes += bytes;
                    it.news.push(News::Takes(io, pieces));
                }
            }
            let at = now + INTO_MEMORY.fixed + INTO_MEMORY.transfer(bytes);
            it.news.push(News::Wake(at, Wake::Taken(job, failed)));
        }
    }

    /// The head has nothing in service. True: it destages, and serves no request meanwhile.
    pub(super) fn destages(&mut self, now: Instant, files: &Files) -> bool {
        self.take_in(now, files);
        let nearest = self
            .best(now)
            .map(|index| (self.pending[index].0, self.pending[index].1.arrived));
        let head = self.head;
        let Some(it) = &mut self.volatile else {
            return false;
        };
        if it.is_destaging {
            return true;
        }
        if nearest.is_some() {
            it.wanted_at = now;
        }
        let Some((start, bytes)) = it.memory.next_run(head) else {
            return false;
        };
        let is_idle = now >= it.wanted_at + IDLE;
        let is_nearer = nearest.is_none_or(|(place, arrived)| {
            let patient = now.since(arrived) < super::IMPATIENCE;
            patient && start.wrapping_sub(head) < place.wrapping_sub(head)
        });
        let presses = !it.waiting.is_empty() || it.memory.is_pressing();
        if (is_idle && nearest.is_none()) || (is_nearer && presses) {
            self.destage(now, start, bytes);
            return true;
        }
        if nearest.is_none() && it.idle_at <= now {
            it.idle_at = it.wanted_at + IDLE;
            it.news.push(News::Wake(it.idle_at, Wake::Idle));
        }
        false
    }

    fn destage(&mut self, now: Instant, start: u64, bytes: u64) {
        let write = self.truth.write;
        // Among the many runs that wait there the next is near, and a short way costs little: the
        // law of the lab's disk, way^0.8. Roots are exact on every machine, and powers are not.
        let way = start.abs_diff(self.head) as f64 / self.truth.size.0 as f64;
        let (half, quarter) = (way.sqrt(), way.sqrt().sqrt());
        let thirtieth = quarter.sqrt().sqrt().sqrt();
        let power = half * quarter * thirtieth * thirtieth.sqrt();
        let mean = write.fixed.0 * 5 / 2;
        let positioning = (mean as f64 * (193.0 * power).min(1.0)) as u64;
        let ns = positioning + write.rate.time_for(ByteCount(bytes)).0;
        let ns = self.trouble(now, ns);
        self.head = start + bytes;
        self.count.request_ns += ns;
        self.count.positioning_ns += positioning;
        let Some(it) = &mut self.volatile else {
            return;
        };
        it.memory.remove(start, bytes);
        it.is_destaging = true;
        it.news.push(News::Destages(ByteRange::new(start, bytes)));
        it.news.push(News::Wake(now + Duration(ns), Wake::Destaged));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::{Faults, table5};
    use crate::prng::Prng;
    use rushes_core::server::IoClass;

    fn write(start: u64) -> Job {
        Job {
            owner: Owner::Storm,
            file: None,
            range: ByteRange::new(start, 1 << 20),
            write: true,
            class: IoClass::BestEffort,
            arrived: Instant::ZERO,
        }
    }

    fn disk(plan: MemoryPlan) -> Disk {
        let mut disk = Disk::new(table5(), Faults::default(), Prng::new(1));
        disk.volatile = Some(Volatile::new(plan));
        disk
    }

    /// Plays until `end`. Returns the drive's messages with their instants.
    fn play(disk: &mut Disk, end: Instant) -> Vec<(Instant, News)> {
        let (files, mut told, mut queue) = (Files::default(), Vec::new(), Vec::new());
        let mut now = Instant::ZERO;
        loop {
            for news in disk.take_news() {
                match news {
                    News::Wake(at, wake) => queue.push((at, wake)),
                    other => told.push((now, other)),
                }
            }
            queue.sort_by_key(|(at, _)| *at);
            if queue.first().is_none_or(|(at, _)| *at > end) {
                return told;
            }
            let (at, wake) = queue.remove(0);
            now = at;
            disk.wake(now, wake, &files);
        }
    }

    fn flushed(told: &[(Instant, News)]) -> Vec<(Instant, Flushed)> {
        let flushed = told.iter().filter_map(|(at, news)| match news {
            News::Flushed(_, outcome) => Some((*at, *outcome)),
            _ => None,
        });
        flushed.collect()
    }

    #[test]
    fn a_flush_ends_when_the_medium_has_what_came_before() {
        let plan = MemoryPlan {
            mb: 64,
            ..MemoryPlan::default()
        };
        let mut disk = disk(plan);
        let files = Files::default();
        disk.submit(Instant::ZERO, write(1 << 30), &files);
        disk.flush(Instant::ZERO, Asker::Server, &files);
        let told = play(&mut disk, Instant::ZERO + Duration::from_s(1));
        let ended = flushed(&told);
        assert!(
            matches!(ended.as_slice(), [(at, Flushed::Done)] if at.0 > 7_000_000),
            "{told:?}"
        );
    }

    #[test]
    fn a_flush_is_refused_or_hangs_where_the_plan_says_so() {
        let files = Files::default();
        for (no_flush, flush_hangs) in [(true, false), (false, true)] {
            let mb = 64;
            let mut disk = disk(MemoryPlan {
                mb,
                no_flush,
                flush_hangs,
            });
            disk.submit(Instant::ZERO, write(1 << 30), &files);
            disk.flush(Instant::ZERO, Asker::Server, &files);
            let told = play(&mut disk, Instant::ZERO + Duration::from_s(2));
            let ended: Vec<Flushed> = flushed(&told).iter().map(|(_, outcome)| *outcome).collect();
            let expected: &[Flushed] = if no_flush { &[Flushed::Never] } else { &[] };
            assert_eq!(ended, expected);
        }
    }

    #[test]
    fn an_idle_drive_empties_its_memory() {
        let mut disk = disk(MemoryPlan {
            mb: 64,
            ..MemoryPlan::default()
        });
        disk.submit(Instant::ZERO, write(1 << 30), &Files::default());
        let told = play(&mut disk, Instant::ZERO + Duration::from_s(1));
        assert!(
            told.iter()
                .any(|(at, news)| matches!(news, News::Destaged) && at.0 > IDLE.0),
            "{told:?}"
        );
    }
}
