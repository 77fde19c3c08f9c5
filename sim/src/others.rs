// SPDX-License-Identifier: Apache-2.0
//! Clients that do not play: copies, random readers, writers, strangers.

use crate::client::{Answer, Hand, Kind, Message, Scene};
use crate::disk::Job;
use crate::files::FileIndex;
use crate::world::{Silent, What};
use rushes_core::units::*;

/// A copy: a file from its first to its last byte, requests back to back; then the next.
pub struct Copy {
    /// The files to copy, and again from the first.
    pub files: Vec<FileIndex>,
    /// Longest request.
    pub request_bytes: u64,
    /// Requests at once.
    pub in_flight: usize,
    /// Bytes that came.
    pub bytes: u64,
    /// Requests that gave an error.
    pub failed_count: u64,
    /// The last instant when bytes came.
    pub progress_at: Instant,
    /// Longest time without progress.
    pub longest_wait: Duration,
    turn: usize,
    offset: u64,
    handle: Option<HandleId>,
}

impl Copy {
    /// A copy of `files` with `in_flight` requests of `request_bytes`.
    pub fn kind(files: Vec<FileIndex>, request_bytes: u64, in_flight: usize) -> Kind {
        Kind::Copy(Copy {
            files,
            request_bytes,
            in_flight,
            bytes: 0,
            failed_count: 0,
            progress_at: Instant::ZERO,
            longest_wait: Duration::ZERO,
            turn: 0,
            offset: 0,
            handle: None,
        })
    }

    /// Opens the first file.
    pub fn begin(&mut self, hand: &mut Hand, scene: &mut Scene<'_>) {
        self.progress_at = scene.now;
        self.handle = Some(hand.open(scene, self.files[self.turn]));
    }

    /// Keeps its requests outstanding.
    pub fn act(&mut self, hand: &mut Hand, scene: &mut Scene<'_>) {
        while hand.waiting.len() < self.in_flight {
            let Some(mut handle) = self.handle else {
                return;
            };
            if self.offset >= scene.files.get(self.files[self.turn]).size {
                if !hand.waiting.is_empty() {
                    return;
                }
                hand.close(scene, handle);
                self.turn = (self.turn + 1) % self.files.len();
                self.offset = 0;
                handle = hand.open(scene, self.files[self.turn]);
                self.handle = Some(handle);
            }
            let file = self.files[self.turn];
            let left = scene.files.get(file).size.saturating_sub(self.offset);
            let bytes = self.request_bytes.min(left).max(1);
            let range = ByteRange::new(self.offset, bytes);
            self.offset += bytes;
            hand.read(scene, handle, file, range, 0);
        }
    }

    /// Takes an answer.
    pub fn arrived(&mut self, answer: Answer, now: Instant) {
        match answer {
            Answer::Data(bytes) => self.bytes += bytes,
            Answer::Failed(_) => self.failed_count += 1,
            Answer::Done | Answer::Plain | Answer::Granted(_) => {}
        }
        self.longest_wait = self.longest_wait.max(now.since(self.progress_at));
        self.progress_at = now;
    }

    /// Counts the time since its last progress.
    pub fn close_books(&mut self, hand: &Hand, now: Instant) {
        if hand.session.is_some() || hand.over {
            let wait = now.min(hand.end).since(self.progress_at);
            self.longest_wait = self.longest_wait.max(wait);
        }
    }
}

/// Reads anywhere, aligned or not, also past the end; opens and closes at random.
pub struct Rambler {
    /// The files.
    pub files: Vec<FileIndex>,
    /// Longest read.
    pub request_bytes: u64,
    /// Requests at once.
    pub in_flight: usize,
    /// Longest pause between two reads.
    pub think: Duration,
    /// So many reads in a thousand name a handle that is not open.
    pub wrong_permille: u64,
    /// After so many reads in a thousand it closes the file.
    pub close_permille: u64,
    /// It dies with reads outstanding, before so many reads in ten thousand.
    pub die_per_10k: u64,
    /// Reads answered with data.
    pub data_count: u64,
    /// Reads answered with an error.
    pub failed_count: u64,
    /// Bytes that came.
    pub bytes: u64,
    open: Vec<(FileIndex, HandleId)>,
    next_at: Instant,
}

impl Rambler {
    /// A reader with these habits.
    pub fn new(
        files: Vec<FileIndex>,
        request_bytes: u64,
        in_flight: usize,
        think: Duration,
    ) -> Self {
        Rambler {
            files,
            request_bytes,
            in_flight,
            think,
            wrong_permille: 5,
            close_permille: 20,
            die_per_10k: 0,
            data_count: 0,
            failed_count: 0,
            bytes: 0,
            open: Vec::new(),
            next_at: Instant::ZERO,
        }
    }

    /// Sends reads.
    pub fn act(&mut self, hand: &mut Hand, scene: &mut Scene<'_>) {
        while hand.waiting.len() < self.in_flight {
            if self.next_at > scene.now {
                hand.set_alarm(scene, self.next_at);
                return;
            }
            if hand.waiting.is_empty() && hand.prng.chance(self.close_permille) {
                for (_, handle) in self.open.drain(..) {
                    hand.close(scene, handle);
                }
            }
            self.next_at = scene.now + Duration(1 + hand.prng.below(self.think.0.max(1)));
            self.read(hand, scene);
            if self.die_per_10k > 0 && hand.prng.below(10_000) < self.die_per_10k {
                hand.leave(scene);
                return;
            }
        }
    }

    fn read(&mut self, hand: &mut Hand, scene: &mut Scene<'_>) {
        let file = self.files[hand.prng.below(self.files.len() as u64) as usize];
        let known = self.open.iter().find(|(f, _)| *f == file).copied();
        let mut handle = match known {
            Some((_, handle)) => handle,
            None => {
                let handle = hand.open(scene, file);
                self.open.push((file, handle));
                handle
            }
        };
        if hand.prng.chance(self.wrong_permille) {
            handle = HandleId(u32::MAX);
        }
        let size = scene.files.get(file).size;
        let mut start = hand.prng.below(size + self.request_bytes / 4 + 1);
        let mut bytes = 1 + hand.prng.below(self.request_bytes);
        if hand.prng.chance(700) {
            start &= !4095;
            bytes = bytes.next_multiple_of(4096).min(self.request_bytes);
        }
        hand.read(scene, handle, file, ByteRange::new(start, bytes), 0);
    }

    /// Takes an answer.
    pub fn arrived(&mut self, answer: Answer) {
        match answer {
            Answer::Data(bytes) => {
                self.data_count += 1;
                self.bytes += bytes;
            }
            Answer::Failed(_) => self.failed_count += 1,
            Answer::Done | Answer::Plain | Answer::Granted(_) => {}
        }
    }
}

/// Writes through the door: natively, then reports the change and waits until no client sees older
/// bytes.
pub struct Writer {
    /// The files.
    pub files: Vec<FileIndex>,
    /// Longest write.
    pub bytes: u64,
    /// Longest pause.
    pub think: Duration,
    /// So many in a thousand truncate the file.
    pub truncate_permille: u64,
    /// So many in a thousand make it longer, if it has room.
    pub extend_permille: u64,
    /// So many in a thousand remove its name.
    pub unlink_permille: u64,
    /// Changes acknowledged.
    pub count: u64,
    next_at: Instant,
}

impl Writer {
    /// A writer with these habits.
    pub fn new(files: Vec<FileIndex>, bytes: u64, think: Duration) -> Writer {
        Writer {
            files,
            bytes,
            think,
            truncate_permille: 20,
            extend_permille: 100,
            unlink_permille: 2,
            count: 0,
            next_at: Instant::ZERO,
        }
    }

    /// Makes a change, when the last one is acknowledged.
    pub fn act(&mut self, hand: &mut Hand, scene: &mut Scene<'_>) {
        if !hand.waiting.is_empty() {
            return;
        }
        if self.next_at > scene.now {
            hand.set_alarm(scene, self.next_at);
            return;
        }
        self.next_at = scene.now + Duration(1 + hand.prng.below(self.think.0.max(1)));
        let file = self.files[hand.prng.below(self.files.len() as u64) as usize];
        if hand.prng.chance(self.unlink_permille) {
            scene.files.get_mut(file).linked = false;
            let request = hand.expect(scene.now, file, ByteRange::default(), 0);
            hand.say(scene, Message::Gone { request, file }, Duration::ZERO);
            return;
        }
        let range = self.change(hand, scene, file);
        scene.files.get_mut(file).told_at = Some(scene.now);
        let serial = scene.files.serial(file);
        let request = hand.expect(scene.now, file, range, 0);
        let message = Message::Changed {
            request,
            file,
            range,
            serial,
        };
        hand.say(scene, message, Duration::ZERO);
    }

    fn change(&self, hand: &mut Hand, scene: &mut Scene<'_>, file: FileIndex) -> ByteRange {
        let size = scene.files.get(file).size;
        scene.files.stamp(file, scene.now);
        if hand.prng.chance(self.truncate_permille) {
            let to = hand.prng.below(size + 1);
            return scene.files.truncate(file, to);
        }
        let bytes = 1 + hand.prng.below(self.bytes);
        let start = if hand.prng.chance(self.extend_permille) {
            size
        } else {
            hand.prng.below(size.max(1))
        };
        let range = scene.files.write(file, ByteRange::new(start, bytes));
        write_to_disk(hand, scene, file, range);
        range
    }
}

/// The native write goes to the disk in its own time; readers see its bytes at once.
fn write_to_disk(hand: &Hand, scene: &mut Scene<'_>, file: FileIndex, range: ByteRange) {
    if range.length.0 == 0 {
        return;
    }
    let job = Job::native_write(hand.index, file, range, scene.now);
    let disk = scene.files.get(file).device;
    scene.queue.push(scene.now, What::Job { disk, job });
}

/// Changes files behind the server's back; the server learns of it some time later.
pub struct Foreign {
    /// The files.
    pub files: Vec<FileIndex>,
    /// Longest pause.
    pub think: Duration,
    /// Longest time until the server learns of it; or, if no client reports it, until the change is
    /// done.
    pub delay: Duration,
    /// No client reports it: only the files' versions show it, from its beginning on.
    pub silent: bool,
}

impl Foreign {
    /// Makes a change.
    pub fn act(&mut self, hand: &mut Hand, scene: &mut Scene<'_>) {
        let next_at = scene.now + Duration(1 + hand.prng.below(self.think.0.max(1)));
        hand.set_alarm(scene, next_at);
        let file = self.files[hand.prng.below(self.files.len() as u64) as usize];
        let size = scene.files.get(file).size;
        scene.files.stamp(file, scene.now);
        if self.silent {
            let change = if hand.prng.chance(100) {
                Silent::Cut(hand.prng.below(size + 1))
            } else {
                let start = hand.prng.below(size.max(1));
                let bytes = 1 + hand.prng.below(1 << 20);
                Silent::Write(ByteRange::new(start, bytes))
            };
            let at = scene.now + Duration(hand.prng.below(self.delay.0.max(1)));
            scene.queue.push(at, What::Silent { file, change });
            return;
        }
        let range = if hand.prng.chance(100) {
            let to = hand.prng.below(size + 1);
            scene.files.truncate(file, to)
        } else {
            let start = hand.prng.below(size.max(1));
            let bytes = 1 + hand.prng.below(1 << 20);
            scene.files.write(file, ByteRange::new(start, bytes))
        };
        write_to_disk(hand, scene, file, range);
        let at = scene.now + Duration(hand.prng.below(self.delay.0.max(1)));
        scene.queue.push(at, What::ForeignChange { file });
    }
}
