// SPDX-License-Identifier: Apache-2.0
//! The values that each byte of a file may have for a reader: the model of the torture.
//!
//! A request that changes bytes is a [`Change`] from its sending to its answer. Clients that write
//! at once have no order: only changes of a byte that were over before another one began are hidden
//! by that one, and only from a reader that begins after its acknowledgement. The reader may see
//! all others. A change that was refused, or whose connection broke, may be there or not, and was
//! over when its client saw that. An acknowledged change stays, whichever process is killed.
//!
//! The model does not know requests, clients or servers.

use crate::pattern;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Longest file. Units: bytes.
pub const LENGTH_MAX: u64 = 4 << 20;
/// The index of changes goes by pages of this size. Units: bytes.
const PAGE: u64 = 4096;
/// With fewer changes of a page, none are dropped from the index.
const CHANGES_OF_A_PAGE: usize = 48;
/// Wrong places that one error names, at most.
const NAMED_MAX: usize = 3;

/// The bytes that a change makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// The eight bytes of this number, again and again.
    Version(u64),
    /// Zeros.
    Zero,
    /// Bytes of the pattern of this seed, from their own offset plus this one, modulo 2^64.
    Pattern(u64, u64),
}

impl Content {
    /// The bytes of a range. Units: bytes.
    pub fn bytes(self, start: u64, end: u64) -> Vec<u8> {
        match self {
            Content::Version(version) => (start..end).map(|at| byte_of(version, at)).collect(),
            Content::Zero => vec![0; (end - start) as usize],
            Content::Pattern(seed, ahead) => {
                pattern::bytes(seed, start.wrapping_add(ahead), (end - start) as usize)
            }
        }
    }
}

/// The value of a byte of this version.
pub fn byte_of(version: u64, at: u64) -> u8 {
    version.to_le_bytes()[(at % 8) as usize]
}

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Its client got an acknowledgement.
    Acknowledged,
    /// It was refused, or not answered: done or not done.
    Unknown,
    /// It was not answered, and may still be under way.
    Endless,
}

#[derive(Clone, Debug)]
struct Change {
    who: String,
    content: Content,
    start: u64,
    end: u64,
    begun: Instant,
    /// None: it is under way.
    over: Option<Instant>,
    is_acknowledged: bool,
    is_durable: bool,
    /// It was lost, or may have been.
    is_lost: bool,
}

impl Change {
    fn is_by(&self, who: &str, since: Instant) -> bool {
        let by = self.who.rsplit_once(" #").map(|(name, _)| name);
        by == Some(who) && self.begun >= since
    }

    fn covers(&self, at: u64) -> bool {
        self.start <= at && at < self.end
    }
}

/// A request that is under way.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Ticket(usize);

/// A read that is under way.
#[derive(Debug)]
#[must_use]
pub struct Look(u64);

/// The instant at which a read began, and the bounds of the file's length since then.
#[derive(Clone, Copy, Debug)]
struct Looking {
    begun: Instant,
    length_min: u64,
    length_max: u64,
}

#[derive(Debug, Default)]
struct State {
    base: Vec<u8>,
    changes: Vec<Change>,
    pages: HashMap<u64, Vec<usize>>,
    /// Bounds of its length.
    length_min: u64,
    length_max: u64,
    looks: HashMap<u64, Looking>,
    look_count: u64,
    /// A reader may be behind by this time.
    lag: Duration,
    /// A disk may lose bytes that were not flushed.
    loses: bool,
    /// And may do so now.
    fails: bool,
}

/// A file.
#[derive(Debug)]
pub struct FileModel {
    /// Its name in the share.
    pub name: String,
    state: Mutex<State>,
}

impl FileModel {
    /// A file with these bytes, which every reader sees.
    pub fn new(name: &str, base: Vec<u8>) -> FileModel {
        let length = base.len() as u64;
        FileModel {
            name: name.to_owned(),
            state: Mutex::new(State {
                base,
                length_min: length,
                length_max: length,
                ..State::default()
            }),
        }
    }

    /// A reader of it may be behind by this time.
    pub fn behind(self, lag: Duration) -> FileModel {
        self.state().lag = lag;
        self
    }

    /// A disk may lose bytes that were not flushed: [`FileModel::lose_what_is_not_durable`].
    pub fn losing(self) -> FileModel {
        self.state().loses = true;
        self
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A client that panics with the lock leaves no half a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A client sends a request that changes these bytes, and makes a shorter file end at `end`.
    pub fn begin(&self, who: &str, start: u64, end: u64, content: Content) -> Ticket {
        let mut state = self.state();
        let (least, most) = (state.length_min, state.length_max.max(end));
        state.is_between(least, most);
        state.enter(who, start, end, content)
    }

    /// The same for bytes within the file: its length stays.
    pub fn begin_within(&self, who: &str, start: u64, end: u64, content: Content) -> Ticket {
        self.state().enter(who, start, end, content)
    }

    /// The request is over.
    pub fn end(&self, ticket: Ticket, outcome: Outcome, grows: bool) {
        let mut state = self.state();
        let change = &mut state.changes[ticket.0];
        change.is_acknowledged = outcome == Outcome::Acknowledged && !change.is_lost;
        change.over = (outcome != Outcome::Endless).then(Instant::now);
        let end = change.end;
        if grows && outcome == Outcome::Acknowledged {
            let (least, most) = (state.length_min.max(end), state.length_max);
            state.is_between(least, most);
        }
    }

    /// A client sends a request that sets the file's length. No other one changes the file
    /// meanwhile.
    pub fn begin_length(&self, who: &str, length: u64) -> Ticket {
        let mut state = self.state();
        let (least, most) = (state.length_min.min(length), state.length_max.max(length));
        state.is_between(least, most);
        state.enter(who, length, LENGTH_MAX, Content::Zero)
    }

    /// That request is over.
    pub fn end_length(&self, ticket: Ticket, outcome: Outcome, length: u64) {
        self.end(ticket, outcome, false);
        if outcome == Outcome::Acknowledged {
            self.state().is_between(length, length);
        }
    }

    /// A flush that began then has succeeded.
    pub fn flushed(&self, begun: Instant) {
        let mut state = self.state();
        let safe = |change: &&mut Change| change.over.is_some_and(|over| over < begun);
        let changes = state.changes.iter_mut().filter(safe);
        changes.for_each(|change| change.is_durable = true);
    }

    /// The same for a file of which the disk loses bytes now. For bytes that went past the daemon,
    /// each descriptor that wrote some gets the error of a failing disk once: bytes of others may
    /// be lost, and these get the error.
    ///
    /// `who`    the client that flushed
    /// `since`  it has its handle since then
    pub fn flushed_by(&self, begun: Instant, who: &str, since: Instant) {
        let mut state = self.state();
        let safe = |change: &&mut Change| {
            let is_over = change.over.is_some_and(|over| over < begun);
            is_over && change.is_by(who, since)
        };
        let changes = state.changes.iter_mut().filter(safe);
        changes.for_each(|change| change.is_durable = true);
    }

    /// A flush of a file whose disk fails was refused: bytes that went past the daemon by the same
    /// handle may be lost, and their client got the error.
    pub fn flush_was_refused(&self, who: &str, since: Instant) {
        let mut state = self.state();
        if !state.loses {
            return;
        }
        let told = |change: &&mut Change| !change.is_durable && change.is_by(who, since);
        let lost = state.changes.iter_mut().filter(told);
        lost.for_each(|change| (change.is_acknowledged, change.is_lost) = (false, true));
    }

    /// From now on a disk fails: a reader may see bytes that went past the daemon and were not
    /// flushed, or not.
    pub fn disk_fails(&self) {
        let mut state = self.state();
        state.fails = state.loses;
    }

    /// Whether bytes that were not flushed may be lost just now.
    pub fn loses_now(&self) -> bool {
        self.state().fails
    }

    /// The disk is sound again, and some bytes went past the daemon: those that were not flushed
    /// may be lost.
    pub fn lose_what_is_not_durable(&self) {
        let mut state = self.state();
        state.fails = false;
        let lost = state.changes.iter_mut().filter(|one| !one.is_durable);
        lost.for_each(|change| (change.is_acknowledged, change.is_lost) = (false, true));
    }

    /// A client sends a read.
    pub fn look(&self) -> Look {
        let mut state = self.state();
        let number = state.look_count;
        state.look_count += 1;
        let looking = Looking {
            begun: Instant::now(),
            length_min: state.length_min,
            length_max: state.length_max,
        };
        state.looks.insert(number, looking);
        Look(number)
    }

    /// The read failed.
    pub fn forget(&self, look: Look) {
        self.state().looks.remove(&look.0);
    }

    /// The read has returned these bytes of that place, of `asked` requested ones.
    ///
    /// Errors   a length, or places, that the model does not have
    pub fn found(&self, look: Look, at: u64, asked: usize, bytes: &[u8]) -> Result<(), String> {
        let mut state = self.state();
        let looking = state.looks.remove(&look.0).expect("it is under way");
        let end = at + bytes.len() as u64;
        let least = looking.length_min.min(at + asked as u64);
        let is_too_long = end > looking.length_max && !bytes.is_empty();
        // A reader that may be behind may also have an old length.
        if state.lag.is_zero() && (end < least || is_too_long) {
            return Err(format!(
                "{}: {} bytes of {asked} at {at}; its length is between {} and {}",
                self.name,
                bytes.len(),
                looking.length_min,
                looking.length_max
            ));
        }
        state.check(&self.name, at, bytes, looking.begun, state.lag)
    }

    /// Bounds of its length. Units: bytes.
    pub fn length(&self) -> (u64, u64) {
        let state = self.state();
        (state.length_min, state.length_max)
    }

    /// The server told its only writer this length.
    ///
    /// Errors   it cannot be
    pub fn is_long(&self, length: u64) -> Result<(), String> {
        let mut state = self.state();
        let may_be = state.length_min..=state.length_max;
        if !may_be.contains(&length) {
            return Err(format!(
                "{}: {length} bytes long, expected {may_be:?}",
                self.name
            ));
        }
        state.is_between(length, length);
        Ok(())
    }

    /// A reader has read all of it, after the end of all requests.
    ///
    /// Errors   a length, or places, that the model does not have
    pub fn is_whole(&self, bytes: &[u8]) -> Result<(), String> {
        let state = self.state();
        let may_be = state.length_min..=state.length_max;
        if !may_be.contains(&(bytes.len() as u64)) {
            let length = bytes.len();
            return Err(format!(
                "{}: {length} bytes long, expected {may_be:?}",
                self.name
            ));
        }
        state.check(&self.name, 0, bytes, Instant::now(), Duration::ZERO)
    }

    /// Count of changes so far.
    pub fn change_count(&self) -> usize {
        self.state().changes.len()
    }
}

impl State {
    /// From now on its length is within these bounds.
    fn is_between(&mut self, least: u64, most: u64) {
        (self.length_min, self.length_max) = (least, most);
        for look in self.looks.values_mut() {
            look.length_min = look.length_min.min(least);
            look.length_max = look.length_max.max(most);
        }
    }

    fn enter(&mut self, who: &str, start: u64, end: u64, content: Content) -> Ticket {
        let number = self.changes.len();
        self.changes.push(Change {
            who: format!("{who} #{number}"),
            content,
            start,
            end,
            begun: Instant::now(),
            over: None,
            is_acknowledged: false,
            is_durable: false,
            is_lost: false,
        });
        for page in start / PAGE..end.div_ceil(PAGE) {
            self.pages.entry(page).or_default().push(number);
            self.prune(page);
        }
        Ticket(number)
    }

    /// Drops changes of a page that no reader may see any more.
    fn prune(&mut self, page: u64) {
        let all = &self.pages[&page];
        if all.len() < CHANGES_OF_A_PAGE || !all.len().is_multiple_of(8) {
            return;
        }
        let oldest_look = self.looks.values().map(|look| look.begun).min();
        let oldest_look = oldest_look.unwrap_or_else(Instant::now);
        let clip = |change: &Change| {
            let (from, to) = (page * PAGE, (page + 1) * PAGE);
            change.start.max(from)..change.end.min(to)
        };
        let is_over = |number: &usize| {
            let old = &self.changes[*number];
            let Some(over) = old.over else { return false };
            let part = clip(old);
            all.iter().any(|&other| {
                let new = &self.changes[other];
                let its = clip(new);
                // A change that is not durable may be lost, and the one before it be seen again.
                (new.is_durable || !self.loses)
                    && new.is_acknowledged
                    && over < new.begun
                    && its.start <= part.start
                    && part.end <= its.end
                    && new.over.is_some_and(|over| over + self.lag < oldest_look)
            })
        };
        let left = all.iter().copied().filter(|number| !is_over(number));
        let left = left.collect();
        self.pages.insert(page, left);
    }

    /// Checks bytes of a read that began then.
    fn check(
        &self,
        name: &str,
        at: u64,
        bytes: &[u8],
        begun: Instant,
        lag: Duration,
    ) -> Result<(), String> {
        let end = at + bytes.len() as u64;
        let mut said = String::new();
        let mut wrong = 0;
        for page in at / PAGE..end.div_ceil(PAGE) {
            let (from, to) = (at.max(page * PAGE), end.min((page + 1) * PAGE));
            let of: Vec<&Change> = self
                .pages
                .get(&page)
                .into_iter()
                .flatten()
                .map(|&number| &self.changes[number])
                .collect();
            let mut edges: Vec<u64> = of
                .iter()
                .flat_map(|change| [change.start, change.end])
                .filter(|edge| from < *edge && *edge < to)
                .chain([from, to])
                .collect();
            edges.sort_unstable();
            edges.dedup();
            for pair in edges.windows(2) {
                let found = &bytes[(pair[0] - at) as usize..(pair[1] - at) as usize];
                let may = self.allowed(&of, pair[0], begun, lag);
                let contents: Vec<Vec<u8>> = may
                    .iter()
                    .map(|one| self.bytes(*one, pair[0], pair[1]))
                    .collect();
                let is_right = |place: usize| contents.iter().any(|one| one[place] == found[place]);
                let Some(first) = (0..found.len()).find(|&place| !is_right(place)) else {
                    continue;
                };
                wrong += 1;
                if wrong <= NAMED_MAX {
                    self.tell(&mut said, pair[0], first, found, &of, &may);
                }
            }
        }
        if wrong == 0 {
            return Ok(());
        }
        Err(format!("{name}: {wrong} places are wrong:\n{said}"))
    }

    /// The changes whose byte a reader may see there; None: the byte before all changes.
    fn allowed<'a>(
        &self,
        of: &[&'a Change],
        at: u64,
        begun: Instant,
        lag: Duration,
    ) -> Vec<Option<&'a Change>> {
        let of = of.iter().copied().filter(|change| change.covers(at));
        let is_certain = |change: &&Change| {
            let is_kept = change.is_durable || !self.fails;
            is_kept && change.is_acknowledged && change.over.is_some_and(|over| over + lag < begun)
        };
        let certain = of.clone().filter(is_certain).map(|change| change.begun);
        let last = certain.max();
        let seen = of.filter(|change| {
            let is_before = |last: Instant| change.over.is_some_and(|over| over < last);
            !last.is_some_and(is_before)
        });
        seen.map(Some)
            .chain(last.is_none().then_some(None))
            .collect()
    }

    fn bytes(&self, change: Option<&Change>, start: u64, end: u64) -> Vec<u8> {
        match change {
            Some(change) => change.content.bytes(start, end),
            None => (start..end)
                .map(|at| self.base.get(at as usize).copied().unwrap_or(0))
                .collect(),
        }
    }

    fn tell(
        &self,
        said: &mut String,
        start: u64,
        first: usize,
        found: &[u8],
        of: &[&Change],
        may: &[Option<&Change>],
    ) {
        let at = start + first as u64;
        let part = &found[first..found.len().min(first + 16)];
        let end = at + part.len() as u64;
        let from = of.iter().find(|change| {
            change.covers(at) && change.content.bytes(at, end) == part && part.len() >= 3
        });
        let from = match from {
            Some(change) => told(change),
            None if self.bytes(None, at, end) == part => String::from("what it had at first"),
            None => String::from("nothing that anybody wrote there"),
        };
        let _ = writeln!(
            said,
            "  byte {at} of {start}..{}: read {part:02x?}, which is {from}; expected",
            start + found.len() as u64
        );
        for change in may {
            let bytes = self.bytes(*change, at, end);
            let what = change.map_or_else(|| String::from("what it had at first"), told);
            let _ = writeln!(said, "    {bytes:02x?}, {what}");
        }
    }
}

fn told(change: &Change) -> String {
    let age = |at: Instant| format!("{:.3} s ago", at.elapsed().as_secs_f64());
    format!(
        "{} ({}..{}, sent {}, {} {}{})",
        change.who,
        change.start,
        change.end,
        age(change.begun),
        if change.is_acknowledged {
            "acknowledged"
        } else {
            "not acknowledged"
        },
        change
            .over
            .map_or_else(|| String::from("and under way"), age),
        if change.is_durable { ", flushed" } else { "" },
    )
}

/// A name that files are renamed to, one over the other: a client that opens it gets one of them,
/// whole.
#[derive(Debug)]
pub struct NameModel {
    /// The name.
    pub name: String,
    takes: Mutex<Vec<Take>>,
}

/// One of these files.
#[derive(Clone, Debug)]
struct Take {
    version: u64,
    length: u64,
    begun: Instant,
    over: Option<Instant>,
    is_acknowledged: bool,
}

impl NameModel {
    /// A name that no file has yet.
    pub fn new(name: &str) -> NameModel {
        NameModel {
            name: name.to_owned(),
            takes: Mutex::default(),
        }
    }

    fn takes(&self) -> MutexGuard<'_, Vec<Take>> {
        self.takes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A file gets the name: all of it is this version.
    pub fn begin(&self, version: u64, length: u64) -> Ticket {
        let mut takes = self.takes();
        takes.push(Take {
            version,
            length,
            begun: Instant::now(),
            over: None,
            is_acknowledged: false,
        });
        Ticket(takes.len() - 1)
    }

    /// The rename is over, with this outcome.
    pub fn end(&self, ticket: Ticket, outcome: Outcome) {
        let take = &mut self.takes()[ticket.0];
        take.is_acknowledged = outcome == Outcome::Acknowledged;
        take.over = (outcome != Outcome::Endless).then(Instant::now);
    }

    /// An open that began then got a file with these bytes; None: no file of that name.
    ///
    /// Errors   bytes of no file that may have the name
    pub fn found(&self, begun: Instant, bytes: Option<&[u8]>) -> Result<(), String> {
        let takes = self.takes();
        let certain = takes
            .iter()
            .filter(|take| take.is_acknowledged && take.over.is_some_and(|over| over < begun));
        let last = certain.map(|take| take.begun).max();
        let Some(bytes) = bytes else {
            return match last {
                None => Ok(()),
                Some(_) => Err(format!("{}: nothing has this name any more", self.name)),
            };
        };
        let may: Vec<&Take> = takes
            .iter()
            .filter(|take| last.is_none_or(|last| take.over.is_none_or(|over| over >= last)))
            .collect();
        let is = |take: &&&Take| {
            bytes.len() as u64 == take.length
                && bytes
                    .iter()
                    .zip(0..)
                    .all(|(&byte, at)| byte == byte_of(take.version, at))
        };
        if may.iter().any(|take| is(&take)) {
            return Ok(());
        }
        let old = takes.iter().find(|take| is(&take));
        let differs: Vec<String> = may.iter().map(|take| difference(take, bytes)).collect();
        Err(format!(
            "{}: {} bytes that are {}; expected one of {may:?}; {}",
            self.name,
            bytes.len(),
            old.map_or_else(
                || String::from("none of these files, whole"),
                |take| format!("{take:?}, whole")
            ),
            differs.join("; "),
        ))
    }
}

/// Where bytes differ from those of a file, for people.
fn difference(take: &Take, bytes: &[u8]) -> String {
    let wrong = |&(&byte, at): &(&u8, u64)| byte != byte_of(take.version, at);
    let mut all = bytes.iter().zip(0..).filter(wrong);
    let Some((_, first)) = all.next() else {
        return format!("{:x}: only its length", take.version);
    };
    let (count, last) = all.fold((1, first), |(count, _), (_, at)| (count + 1, at));
    let zeros = bytes
        .iter()
        .zip(0..)
        .filter(wrong)
        .filter(|&(&byte, _)| byte == 0);
    format!(
        "{:x}: {count} bytes between {first} and {last} differ, {} of them are 0",
        take.version,
        zeros.count()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Content = Content::Version(0x0101_0101_0101_0101);
    const B: Content = Content::Version(0x0202_0202_0202_0202);

    fn model() -> FileModel {
        FileModel::new("f", vec![9; 100]).losing()
    }

    fn write(model: &FileModel, content: Content, outcome: Outcome) {
        let ticket = model.begin("w", 10, 20, content);
        model.end(ticket, outcome, true);
        std::thread::sleep(Duration::from_millis(1));
    }

    /// The file with these ten bytes.
    fn whole(byte: u8) -> Vec<u8> {
        let mut bytes = vec![9; 100];
        bytes[10..20].fill(byte);
        bytes
    }

    #[test]
    fn what_was_acknowledged_last_alone_may_be_seen() {
        let model = model();
        write(&model, A, Outcome::Acknowledged);
        write(&model, B, Outcome::Acknowledged);
        assert!(model.is_whole(&whole(2)).is_ok());
        assert!(model.is_whole(&whole(1)).is_err());
        assert!(model.is_whole(&whole(9)).is_err());
    }

    #[test]
    fn what_nobody_answered_may_be_there_or_not() {
        let model = model();
        write(&model, A, Outcome::Acknowledged);
        write(&model, B, Outcome::Unknown);
        assert!(model.is_whole(&whole(1)).is_ok());
        assert!(model.is_whole(&whole(2)).is_ok());
        write(&model, A, Outcome::Acknowledged);
        assert!(model.is_whole(&whole(2)).is_err());
    }

    #[test]
    fn requests_at_once_have_no_order() {
        let model = model();
        let one = model.begin("one", 10, 20, A);
        let other = model.begin("other", 10, 20, B);
        let look = model.look();
        assert!(model.found(look, 0, 100, &whole(9)).is_ok());
        model.end(other, Outcome::Acknowledged, true);
        model.end(one, Outcome::Acknowledged, true);
        std::thread::sleep(Duration::from_millis(1));
        for byte in [1, 2] {
            let look = model.look();
            assert!(model.found(look, 0, 100, &whole(byte)).is_ok());
        }
        let look = model.look();
        let error = model.found(look, 0, 100, &whole(9)).expect_err("it is old");
        assert!(error.contains("byte 10 of 10..20"), "{error}");
    }

    #[test]
    fn what_a_disk_lost_may_be_seen_again() {
        let model = model();
        write(&model, A, Outcome::Acknowledged);
        model.flushed(Instant::now());
        write(&model, B, Outcome::Acknowledged);
        model.lose_what_is_not_durable();
        assert!(model.is_whole(&whole(1)).is_ok());
        assert!(model.is_whole(&whole(2)).is_ok());
        assert!(model.is_whole(&whole(9)).is_err());
    }

    #[test]
    fn on_a_disk_that_fails_each_handle_is_told_of_its_own() {
        let model = FileModel::new("f", vec![9; 100]).losing();
        let begun = Instant::now();
        for (who, content) in [("one", A), ("other", B)] {
            let ticket = model.begin(who, 10, 20, content);
            model.end(ticket, Outcome::Acknowledged, true);
            std::thread::sleep(Duration::from_millis(1));
        }
        model.flushed_by(Instant::now(), "one", begun);
        assert!(model.is_whole(&whole(1)).is_err());
        model.disk_fails();
        assert!(model.is_whole(&whole(1)).is_ok());
        assert!(model.is_whole(&whole(9)).is_err());
        model.lose_what_is_not_durable();
        assert!(model.is_whole(&whole(1)).is_ok());
        assert!(model.is_whole(&whole(9)).is_err());
        model.flush_was_refused("one", begun);
        assert!(model.is_whole(&whole(9)).is_err(), "it was flushed before");
    }

    #[test]
    fn cut_and_made_longer_it_has_zeros() {
        let model = model();
        for length in [50, 80] {
            let ticket = model.begin_length("w", length);
            model.end_length(ticket, Outcome::Acknowledged, length);
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut bytes = vec![9; 50];
        bytes.resize(80, 0);
        assert!(model.is_whole(&bytes).is_ok());
        bytes[60] = 9;
        assert!(model.is_whole(&bytes).is_err());
        assert!(model.is_whole(&bytes[..79]).is_err());
    }

    #[test]
    fn hundreds_of_changes_are_left_out_and_the_last_one_is_known() {
        let model = model();
        for _ in 0..300 {
            write(&model, A, Outcome::Acknowledged);
            model.flushed(Instant::now());
        }
        write(&model, B, Outcome::Acknowledged);
        assert!(model.state().pages[&0].len() < 2 * CHANGES_OF_A_PAGE);
        assert!(model.is_whole(&whole(2)).is_ok());
        assert!(model.is_whole(&whole(1)).is_err());
    }

    #[test]
    fn who_opens_a_name_has_one_of_its_files_whole() {
        let model = NameModel::new("n");
        assert!(model.found(Instant::now(), None).is_ok());
        for version in [1, 2] {
            let ticket = model.begin(version, 16);
            model.end(ticket, Outcome::Acknowledged);
            std::thread::sleep(Duration::from_millis(1));
        }
        let bytes = |version: u64| Content::Version(version).bytes(0, 16);
        assert!(model.found(Instant::now(), Some(&bytes(2))).is_ok());
        assert!(model.found(Instant::now(), Some(&bytes(1))).is_err());
        assert!(model.found(Instant::now(), Some(&bytes(2)[..8])).is_err());
        assert!(model.found(Instant::now(), None).is_err());
    }
}
