// SPDX-License-Identifier: Apache-2.0
//! Clients. Each has one or several hands, each with one file open, that do one thing after the
//! other; each answer is compared with the contents that clients have been told.

use super::file::{Cell, OneFile};
use super::trouble::{FLIPPED, Flip};
use super::world::{What, World};
use crate::prng::Prng;
use rushes_core::server::*;
use rushes_core::units::*;
use std::ops::Range;

/// An error may come so long after its cause: a file that its disk did not take refuses until it
/// has everything.
const REASON: Duration = Duration::from_s(60);
/// The time of a device's answer to the daemon.
const ON_ITS_WAY: Duration = Duration::from_ms(25);

#[derive(Debug)]
pub(super) struct Client {
    /// 0: it has no session.
    pub(super) session: SessionId,
    pub(super) lane: Option<LaneId>,
}

/// The habit of a hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A byte or a few, one after the other.
    Tiny,
    Appends,
    /// Whole pages, at random places.
    Scatters,
    /// Anything, in one place.
    Overlaps,
    /// Far past the end as well.
    Sparse,
    /// Announces the length of the file, then writes it.
    Announces,
    Cuts,
    Reads,
    /// At its rate, from the beginning to the end.
    Plays,
    Syncs,
    Holds,
}

const KINDS: [Kind; 11] = [
    Kind::Tiny,
    Kind::Appends,
    Kind::Scatters,
    Kind::Overlaps,
    Kind::Sparse,
    Kind::Announces,
    Kind::Cuts,
    Kind::Reads,
    Kind::Plays,
    Kind::Syncs,
    Kind::Holds,
];

impl Kind {
    pub(super) fn drawn(random: &mut Prng) -> Kind {
        KINDS[random.below(KINDS.len() as u64) as usize]
    }

    /// How often it writes, reads, syncs, truncates, holds and closes, of a hundred.
    fn weights(self) -> [u64; 6] {
        match self {
            Kind::Tiny => [78, 14, 3, 1, 1, 3],
            Kind::Appends => [66, 24, 4, 2, 1, 3],
            Kind::Scatters | Kind::Overlaps => [58, 32, 5, 1, 1, 3],
            Kind::Sparse => [56, 30, 4, 5, 1, 4],
            Kind::Announces => [70, 18, 4, 4, 1, 3],
            Kind::Cuts => [40, 30, 5, 20, 1, 4],
            Kind::Reads | Kind::Plays => [0, 97, 0, 0, 0, 3],
            Kind::Syncs => [40, 20, 36, 1, 1, 2],
            Kind::Holds => [20, 40, 3, 4, 30, 3],
        }
    }
}

/// The changes that a client makes itself to a file that it holds.
#[derive(Clone, Copy, Debug)]
pub(super) enum Own {
    Write(ByteRange),
    Cut(u64),
    Nothing,
}

#[derive(Debug)]
pub(super) enum Doing {
    Nothing,
    Reading {
        request: RequestId,
        range: ByteRange,
        then: Vec<Cell>,
        length: u64,
        since: u64,
        /// It must read on its own descriptor.
        is_plain: bool,
    },
    /// Its bytes are in these places of buffers until it has copied them.
    Copying {
        request: RequestId,
        places: Vec<Range<usize>>,
        cells: Vec<Cell>,
    },
    /// Waits for pages.
    Writing {
        request: RequestId,
        range: ByteRange,
    },
    Granted {
        request: RequestId,
        range: ByteRange,
        change: u64,
        /// The places of the rest of its bytes.
        rest: Vec<(usize, Cell)>,
    },
    /// Its bytes are published.
    Ended {
        request: RequestId,
    },
    Syncing {
        request: RequestId,
        then: Vec<Cell>,
        since: u64,
    },
    Holding {
        request: RequestId,
        own: Own,
    },
    /// It holds the file.
    Held {
        own: Own,
    },
    /// It has changed the file and reported that; the change's number in the log.
    Changed {
        request: RequestId,
        news: Option<u64>,
    },
}

#[derive(Debug)]
pub(super) struct Hand {
    pub(super) client: usize,
    pub(super) file: usize,
    kind: Kind,
    pub(super) handle: HandleId,
    is_open: bool,
    pub(super) doing: Doing,
    pub(super) begun: Instant,
    /// Events with another epoch are void.
    pub(super) epoch: u64,
    position: u64,
    plays_at: Instant,
}

impl Hand {
    pub(super) fn new(client: usize, file: usize, kind: Kind) -> Hand {
        Hand {
            client,
            file,
            kind,
            handle: HandleId(0),
            is_open: false,
            doing: Doing::Nothing,
            begun: Instant::ZERO,
            epoch: 0,
            position: 0,
            plays_at: Instant::ZERO,
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        matches!(self.doing, Doing::Nothing)
    }

    /// Its session has ended.
    pub(super) fn left(&mut self) {
        self.doing = Doing::Nothing;
        self.is_open = false;
        self.epoch += 1;
    }

    fn request(&self) -> Option<RequestId> {
        match &self.doing {
            Doing::Nothing | Doing::Held { .. } | Doing::Copying { .. } => None,
            Doing::Reading { request, .. }
            | Doing::Writing { request, .. }
            | Doing::Granted { request, .. }
            | Doing::Ended { request }
            | Doing::Syncing { request, .. }
            | Doing::Holding { request, .. }
            | Doing::Changed { request, .. } => Some(*request),
        }
    }

    /// Whether it is about to write bytes of that range.
    pub(super) fn writes(&self, range: ByteRange) -> bool {
        match &self.doing {
            Doing::Writing { range: own, .. } | Doing::Granted { range: own, .. } => {
                own.overlaps(range)
            }
            Doing::Holding { .. } | Doing::Held { .. } | Doing::Changed { .. } => true,
            _ => false,
        }
    }

    /// Whether it is changing the file itself.
    pub(super) fn changes(&self, file: usize) -> bool {
        let changes = matches!(self.doing, Doing::Held { .. } | Doing::Changed { .. });
        self.file == file && changes
    }

    /// Whether other hands of its session must wait.
    fn keeps_off(&self) -> bool {
        matches!(
            self.doing,
            Doing::Holding { .. } | Doing::Held { .. } | Doing::Changed { .. }
        )
    }
}

impl World {
    // ---- Their work ----

    pub(super) fn think(&mut self, index: usize, epoch: u64) {
        let hand = &self.hands[index];
        let is_there = self.clients[hand.client].session != SessionId(0);
        if hand.epoch != epoch || !is_there || !hand.is_idle() || self.server.is_none() {
            return;
        }
        if self.is_quiet {
            return;
        }
        if self.files[hand.file].is_kept {
            // No client is served before the server knows the bytes that were left.
            return self.later(Duration::from_ms(100), What::Think(index, epoch));
        }
        if !hand.is_open {
            self.open(index);
            if self.random.chance(500) {
                return self.rest(index);
            }
        }
        self.begin(index);
    }

    /// It does something else after a while.
    fn rest(&mut self, index: usize) {
        self.hands[index].doing = Doing::Nothing;
        let (epoch, file) = (self.hands[index].epoch, self.hands[index].file);
        let delay = self.pause(self.plan.think);
        self.later(delay, What::Think(index, epoch));
        if self.files[file].log.len() > 64 {
            let asked = |hand: &Hand| match &hand.doing {
                Doing::Reading { since, .. } | Doing::Syncing { since, .. } => Some(*since),
                _ => None,
            };
            let hands = self.hands.iter().filter(|hand| hand.file == file);
            let since = hands.filter_map(asked).min().unwrap_or(u64::MAX);
            self.files[file].prune(since);
        }
    }

    fn tell(&mut self, index: usize, event: Event) {
        let session = self.clients[self.hands[index].client].session;
        let delay = self.turn();
        self.later(delay, What::FromClient(self.life, session, Box::new(event)));
    }

    fn open(&mut self, index: usize) {
        let handle = HandleId(self.number() as _);
        let hand = &mut self.hands[index];
        hand.handle = handle;
        hand.is_open = true;
        hand.position = 0;
        let event = Event::Opening {
            session: self.clients[hand.client].session,
            handle,
            path: self.files[hand.file].path.clone(),
            part: FilePart::WHOLE,
        };
        // In a session's ring nothing overtakes it: the server gets it at once.
        self.step(event);
        let delay = Duration::from_us(self.random.log_between(100.0, 30_000.0) as u64);
        self.later(delay, What::OpenLook(self.life, index, handle));
    }

    pub(super) fn look_to_open(&mut self, life: u64, index: usize, handle: HandleId) {
        if self.life != life || self.server.is_none() {
            return;
        }
        let at = self.hands[index].file;
        let hangs = self.disks[self.files[at].device].hangs_until;
        if hangs > self.now {
            return self.queue.push(hangs, What::OpenLook(life, index, handle));
        }
        let mut facts = self.facts(at, FileId(0));
        if self.random.chance(300) && matches!(self.hands[index].kind, Kind::Reads | Kind::Plays) {
            facts.way = None;
        }
        let delay = self.turn();
        self.later(delay, What::Opened(life, index, handle, Box::new(facts)));
    }

    pub(super) fn opened(&mut self, life: u64, index: usize, handle: HandleId, facts: FileFacts) {
        let (client, at) = (self.hands[index].client, self.hands[index].file);
        let session = self.clients[client].session;
        if self.life != life || self.server.is_none() || session == SessionId(0) {
            return;
        }
        // Also if it was closed meanwhile.
        let file = self.id_of(at);
        let facts = Ok(FileFacts { file, ..facts });
        let lives = self.step(Event::Opened {
            session,
            handle,
            facts,
        });
        if lives && self.files[at].is_left_reserved && self.files[at].id == Some(file) {
            self.files[at].is_left_reserved = false;
            self.step(Event::ReserveFound { file });
        }
    }

    fn begin(&mut self, index: usize) {
        let weights = self.hands[index].kind.weights();
        let mut drawn = self.random.below(weights.iter().sum());
        let mut which = 0;
        for (nth, weight) in weights.iter().enumerate() {
            which = nth;
            if drawn < *weight {
                break;
            }
            drawn -= weight;
        }
        let (client, file) = (self.hands[index].client, self.hands[index].file);
        let mut others =
            self.hands.iter().enumerate().filter(|(other, hand)| {
                *other != index && hand.client == client && hand.file == file
            });
        let is_kept_off = others.clone().any(|(_, hand)| hand.keeps_off());
        let is_written = others.any(|(_, hand)| {
            matches!(
                hand.doing,
                Doing::Writing { .. } | Doing::Granted { .. } | Doing::Ended { .. }
            )
        });
        if is_kept_off || (is_written && which > 2) {
            return self.rest(index);
        }
        self.hands[index].begun = self.now;
        match which {
            0 => self.write(index),
            1 => self.read(index),
            2 => self.sync_as_client(index),
            3 => {
                let own = Own::Cut(self.length_to_cut(index));
                self.hold(index, own);
            }
            4 => self.hold(index, Own::Nothing),
            _ => {
                let hand = &mut self.hands[index];
                hand.is_open = false;
                let event = Event::Closed {
                    session: self.clients[hand.client].session,
                    handle: hand.handle,
                };
                self.tell(index, event);
                self.rest(index);
            }
        }
    }

    fn length_to_cut(&mut self, index: usize) -> u64 {
        let length = self.files[self.hands[index].file].flat.len() as u64;
        let longer = length + self.random.below(self.plan.most / 2 + 1);
        match self.hands[index].kind {
            Kind::Announces => {
                self.hands[index].position = length.min(longer);
                longer.min(self.plan.most)
            }
            _ if self.random.chance(300) => longer.min(self.plan.most),
            _ if self.random.chance(200) => 0,
            _ => self.random.below(length + 1),
        }
    }

    fn range_to_write(&mut self, index: usize) -> ByteRange {
        let hand = &self.hands[index];
        let (kind, position) = (hand.kind, hand.position);
        let length = self.files[hand.file].flat.len() as u64;
        let most = self.plan.most;
        let random = &mut self.random;
        let (start, count) = match kind {
            Kind::Tiny => {
                let count = [1, 1, 1, 3, 40, 700][random.below(6) as usize];
                let start = match random.chance(30) {
                    true => random.below(most),
                    false => position,
                };
                self.hands[index].position = (start + count) % most;
                (start, count)
            }
            Kind::Appends => (length, random.log_between(1.0, 40_000.0) as u64),
            Kind::Announces => {
                let count = random.log_between(1.0, 60_000.0) as u64;
                self.hands[index].position = (position + count) % most;
                (position, count)
            }
            Kind::Scatters => {
                let pages = most / PAGE_BYTES;
                (
                    random.below(pages) * PAGE_BYTES,
                    random.between(1, 2) * PAGE_BYTES,
                )
            }
            Kind::Sparse if random.chance(250) => (length + 65_535, 1),
            Kind::Sparse => (random.below(most), random.between(1, 9000)),
            _ if random.chance(300) => (
                random.below(most / PAGE_BYTES) * PAGE_BYTES,
                random.log_between(1.0, 90_000.0) as u64,
            ),
            _ => (random.below(most), random.log_between(1.0, 60_000.0) as u64),
        };
        let start = if start >= most {
            random.below(most)
        } else {
            start
        };
        ByteRange::new(start, count.min(most - start).clamp(1, 90_000))
    }

    fn write(&mut self, index: usize) {
        let range = self.range_to_write(index);
        let request = RequestId(self.number());
        let hand = &mut self.hands[index];
        hand.doing = Doing::Writing { request, range };
        let event = Event::WriteBegin {
            session: self.clients[hand.client].session,
            handle: hand.handle,
            request,
            range,
            sent: self.now,
        };
        self.tell(index, event);
    }

    fn read(&mut self, index: usize) {
        let request = RequestId(self.number());
        let hand = &self.hands[index];
        let file = &self.files[hand.file];
        let length = file.flat.len() as u64;
        let range = match hand.kind {
            Kind::Plays => {
                let start = if hand.position >= length {
                    0
                } else {
                    hand.position
                };
                ByteRange::new(start, 16 << 10)
            }
            _ => {
                let start = self.random.below(length + 4000);
                ByteRange::new(start, self.random.log_between(1.0, 90_000.0) as u64)
            }
        };
        let (then, since) = (file.slice(range), file.since());
        let hand = &mut self.hands[index];
        hand.position = match hand.kind {
            Kind::Plays => range.end(),
            _ => hand.position,
        };
        hand.doing = Doing::Reading {
            request,
            range,
            then,
            length,
            since,
            is_plain: false,
        };
        let event = Event::Read {
            session: self.clients[hand.client].session,
            handle: hand.handle,
            request,
            range,
            sent: self.now,
        };
        self.tell(index, event);
    }

    fn sync_as_client(&mut self, index: usize) {
        let request = RequestId(self.number());
        let hand = &mut self.hands[index];
        let file = &self.files[hand.file];
        hand.doing = Doing::Syncing {
            request,
            then: file.flat.clone(),
            since: file.log_end(),
        };
        let event = Event::Sync {
            session: self.clients[hand.client].session,
            handle: hand.handle,
            request,
        };
        self.tell(index, event);
    }

    fn hold(&mut self, index: usize, own: Own) {
        let request = RequestId(self.number());
        let hand = &mut self.hands[index];
        hand.doing = Doing::Holding { request, own };
        let event = Event::Hold {
            session: self.clients[hand.client].session,
            request,
            key: self.files[hand.file].key,
        };
        self.tell(index, event);
    }

    /// A client's own change reaches the daemon.
    pub(super) fn tell_of_change(&mut self, asked: RequestId) {
        for hand in &self.hands {
            if let Doing::Changed { request, news } = &hand.doing
                && *request == asked
            {
                let untold = &mut self.files[hand.file].untold;
                untold.retain(|index| Some(*index) != *news);
            }
        }
    }

    // ---- Its results ----

    pub(super) fn reply(
        &mut self,
        session: SessionId,
        request: RequestId,
        outcome: Outcome,
        actions: &Actions,
    ) {
        let client = self.clients.iter().position(|one| one.session == session);
        let found = self
            .hands
            .iter()
            .position(|hand| Some(hand.client) == client && hand.request() == Some(request));
        let Some(index) = found else {
            return;
        };
        let doing = std::mem::replace(&mut self.hands[index].doing, Doing::Nothing);
        let epoch = self.hands[index].epoch;
        let at = self.hands[index].file;
        let next = match (doing, outcome) {
            (
                Doing::Reading {
                    range,
                    then,
                    length,
                    since,
                    ..
                },
                Outcome::Data {
                    slots,
                    first_offset,
                    length: count,
                },
            ) => {
                let mut places: Vec<Range<usize>> = Vec::new();
                let mut left = count.0 as usize;
                for (nth, slot) in actions.slots_of(slots).iter().enumerate() {
                    let skip = if nth == 0 { first_offset } else { 0 };
                    let start = self.slot_place(*slot, skip);
                    let end = self.slot_place(*slot, self.limits.slot_bytes);
                    let end = end.min(start + left);
                    left -= end - start;
                    places.push(start..end);
                }
                let cells = self.cells_at(&places);
                self.check_read(at, range, &cells, (&then, length, since));
                self.counts.reads += 1;
                if self.plan.flip == Some(Flip::Buffer)
                    && let Some(place) = places.first()
                {
                    self.slots[place.start] = FLIPPED;
                }
                Some(Doing::Copying {
                    request,
                    places,
                    cells,
                })
            }
            (
                Doing::Reading {
                    request,
                    range,
                    then,
                    length,
                    since,
                    ..
                },
                Outcome::Plain,
            ) => Some(Doing::Reading {
                request,
                range,
                then,
                length,
                since,
                is_plain: true,
            }),
            (Doing::Reading { .. }, Outcome::Failed(errno)) => {
                self.check_reason(index, "a read", errno, |file, since| {
                    file.reasons.read + ON_ITS_WAY >= since
                });
                None
            }
            (
                Doing::Writing { range, .. },
                Outcome::Granted {
                    runs, first_offset, ..
                },
            ) => Some(self.granted(index, request, range, (runs, first_offset))),
            (Doing::Writing { range, .. }, Outcome::Plain) => Some(Doing::Holding {
                request: RequestId(0),
                own: Own::Write(range),
            }),
            (Doing::Ended { .. }, Outcome::Done) => {
                self.counts.writes += 1;
                None
            }
            (Doing::Syncing { then, since, .. }, Outcome::Done) => {
                self.counts.syncs += 1;
                self.files[at].synced(&then, since);
                let file = &self.files[at];
                if let Some(lost) = file.not_durable(&file.medium) {
                    self.violate(format!(
                        "a sync of {} is answered, but {lost}",
                        self.files[at].path
                    ));
                }
                None
            }
            // It syncs its own descriptor, which covers none of our bytes.
            (Doing::Syncing { .. }, Outcome::Plain) => None,
            (Doing::Holding { own, .. }, Outcome::Done) => {
                self.counts.holds += 1;
                // The change takes its time; a fault also shows at the end.
                if request.0.is_multiple_of(4) {
                    self.check_held(at);
                }
                Some(Doing::Held { own })
            }
            (Doing::Changed { .. }, Outcome::Done) => None,
            (
                Doing::Writing { .. } | Doing::Syncing { .. } | Doing::Holding { .. },
                Outcome::Failed(errno),
            ) => {
                self.check_reason(index, "it", errno, |file, since| {
                    file.reasons.write.max(file.reasons.full) + REASON >= since
                });
                self.counts.refused += 1;
                None
            }
            (doing, outcome) => {
                self.violate(format!("{doing:?} is answered {outcome:?}"));
                None
            }
        };
        match next {
            Some(doing) => {
                self.hands[index].doing = doing;
                let delay = self.turn();
                self.later(delay, What::GoOn(index, epoch));
            }
            None => self.rest(index),
        }
    }

    fn cells_at(&self, places: &[Range<usize>]) -> Vec<Cell> {
        let found = places.iter().map(|place| &self.slots[place.clone()]);
        found.flatten().copied().collect()
    }

    /// An error must have a cause in the world.
    fn check_reason(
        &mut self,
        index: usize,
        what: &str,
        errno: Errno,
        has_reason: impl Fn(&OneFile, Instant) -> bool,
    ) {
        let (at, begun) = (self.hands[index].file, self.hands[index].begun);
        if !has_reason(&self.files[at], begun) {
            self.violate(format!(
                "{what} fails with {errno:?} and no reason: {:?}",
                self.hands[index]
            ));
        }
    }

    fn check_read(
        &mut self,
        at: usize,
        range: ByteRange,
        cells: &[Cell],
        then: (&[Cell], u64, u64),
    ) {
        if let Some(wrong) = self.files[at].wrong_read(range, cells, then) {
            self.violate(format!("a read of {}: {wrong}", self.files[at].path));
        }
    }

    /// A client that changes a file itself must find all bytes there.
    fn check_held(&mut self, at: usize) {
        let file = &self.files[at];
        let shown = file.differs(&file.native);
        if let Some(differs) = shown.or_else(|| file.differs(&file.disk)) {
            let sentence = format!("{} is held, and not all there: {differs}", file.path);
            self.violate(sentence);
        }
    }

    /// It puts some of its bytes into its lane, and the rest later.
    fn granted(
        &mut self,
        index: usize,
        request: RequestId,
        range: ByteRange,
        (runs, first_offset): (Runs, u32),
    ) -> Doing {
        let hand = &self.hands[index];
        let change = self.files[hand.file].change();
        let cells = self.files[hand.file].cells(change, range);
        let mut rest: Vec<(usize, Cell)> = Vec::with_capacity(cells.len());
        for (at, cell) in (u64::from(first_offset)..).zip(cells) {
            match runs.place((at / PAGE_BYTES) as u32) {
                Some((page, _)) => {
                    rest.push((
                        (u64::from(page) * PAGE_BYTES + at % PAGE_BYTES) as usize,
                        cell,
                    ));
                }
                None => {
                    self.violate(format!("{range:?} is granted fewer pages: {runs:?}"));
                    break;
                }
            }
        }
        let now = self.random.below(rest.len() as u64 + 1) as usize;
        let later = rest.split_off(now);
        self.copy(index, &rest);
        Doing::Granted {
            request,
            range,
            change,
            rest: later,
        }
    }

    fn copy(&mut self, index: usize, cells: &[(usize, Cell)]) {
        let lane = self.clients[self.hands[index].client].lane;
        let memory = lane.and_then(|lane| self.lanes.get_mut(&lane));
        let Some(memory) = memory else {
            return self.violate(format!("{lane:?} of a client is gone"));
        };
        for &(place, cell) in cells {
            memory.cells[place] = cell;
        }
    }

    pub(super) fn go_on(&mut self, index: usize, epoch: u64) {
        if self.hands[index].epoch != epoch || self.server.is_none() {
            return;
        }
        let at = self.hands[index].file;
        let session = self.clients[self.hands[index].client].session;
        let doing = std::mem::replace(&mut self.hands[index].doing, Doing::Nothing);
        match doing {
            Doing::Copying {
                request,
                places,
                cells,
            } => {
                if self.cells_at(&places) != cells {
                    self.violate(format!(
                        "a buffer in a client's hands was changed: {request:?}"
                    ));
                }
                self.tell(index, Event::ReadEnd { session, request });
                self.read_is_over(index);
            }
            Doing::Reading {
                range,
                then,
                length,
                since,
                is_plain: true,
                ..
            } => {
                if self.files[at].is_marked_loose {
                    // A door takes a hold first, which is checked.
                    return self.hold(index, Own::Nothing);
                }
                let pages = OneFile::pages(range);
                self.let_some_go(at, pages.clone());
                let native = self.files[at].seen(pages, |_| true);
                let end = (range.end() as usize).min(native.len());
                let got = native.get(range.start.0 as usize..end).unwrap_or(&[]);
                let got = got.to_vec();
                self.check_read(at, range, &got, (&then, length, since));
                self.counts.plain_reads += 1;
                self.read_is_over(index);
            }
            Doing::Granted {
                request,
                range,
                change,
                rest,
            } => {
                self.copy(index, &rest);
                if self.random.chance(40) {
                    self.tell(index, Event::WriteAbort { session, request });
                    return self.rest(index);
                }
                self.hands[index].doing = Doing::Granted {
                    request,
                    range,
                    change,
                    rest: Vec::new(),
                };
                let delay = self.turn();
                self.later(delay, What::Commit(self.life, index, epoch));
            }
            // It must write on its own descriptor.
            Doing::Holding { own, .. } => self.hold(index, own),
            Doing::Held { own } => self.change(index, own),
            other => self.hands[index].doing = other,
        }
    }

    /// Players read at their rate, with any result.
    fn read_is_over(&mut self, index: usize) {
        let hand = &mut self.hands[index];
        let rate = match self.files[hand.file].hint {
            Some(RateHint::Rate(rate, _)) => rate,
            _ => BytesPerSecond(400_000),
        };
        if hand.kind != Kind::Plays {
            return self.rest(index);
        }
        hand.doing = Doing::Nothing;
        let due = hand.plays_at + rate.time_for(ByteCount(16 << 10));
        hand.plays_at = due.max(self.now);
        let epoch = hand.epoch;
        self.queue.push(hand.plays_at, What::Think(index, epoch));
    }

    /// It reports that its bytes are in its lane.
    pub(super) fn commit(&mut self, index: usize, epoch: u64) {
        if self.hands[index].epoch != epoch {
            return;
        }
        let Doing::Granted {
            request,
            range,
            change,
            ..
        } = &self.hands[index].doing
        else {
            return;
        };
        let (request, range, change) = (*request, *range, *change);
        let (at, session) = (
            self.hands[index].file,
            self.clients[self.hands[index].client].session,
        );
        // Before the step: its own actions may already answer readers with the new bytes.
        let before = self.published;
        let dies_after = self.death();
        let file = &mut self.files[at];
        let old = (dies_after < usize::MAX).then(|| file.flat.clone());
        file.happens(change);
        let cells = file.cells(change, range);
        file.told(range.start.0, cells, false);
        self.hands[index].doing = Doing::Ended { request };
        let lives = self.step_to(Event::WriteEnd { session, request }, dies_after);
        if !lives
            && self.published == before
            && let Some(old) = old
        {
            // Not published: no client was told, and the change never happened.
            self.files[at].untell(change, old);
        }
    }

    /// It changes the file itself, and reports that.
    fn change(&mut self, index: usize, own: Own) {
        let at = self.hands[index].file;
        let now = self.now;
        let before = self.files[at].log_end();
        let to_the_end = |start: u64| ByteRange::new(start, u64::MAX - start);
        let has_bytes = match own {
            Own::Nothing => false,
            Own::Write(_) => true,
            // Zeros behind the end, within a page.
            Own::Cut(length) => {
                length < self.files[at].size() && !length.is_multiple_of(PAGE_BYTES)
            }
        };
        let range = match own {
            Own::Nothing => ByteRange::new(0, 0),
            Own::Write(range) => match self.map(at, OneFile::pages(range)) {
                true => {
                    let file = &mut self.files[at];
                    let change = file.change();
                    file.happens(change);
                    let cells = file.cells(change, range);
                    file.write_direct(range.start.0, &cells, now);
                    file.told(range.start.0, cells, true);
                    self.counts.plain_writes += 1;
                    range
                }
                // The client's own error.
                false => to_the_end(range.start.0),
            },
            Own::Cut(length) => {
                let file = &mut self.files[at];
                let start = length.min(file.size());
                file.truncate(length, now);
                file.told_cut(length);
                self.unmap_beyond(at);
                self.counts.cuts += 1;
                to_the_end(start)
            }
        };
        let request = RequestId(self.number());
        // Until the daemon learns of it no other client need see it.
        let news = (self.files[at].log_end() > before).then_some(before);
        self.files[at].untold.extend(news);
        self.hands[index].doing = Doing::Changed { request, news };
        let event = Event::Changed {
            session: self.clients[self.hands[index].client].session,
            request,
            key: self.files[at].key,
            range,
            has_bytes,
        };
        self.tell(index, event);
    }
}
