// SPDX-License-Identifier: Apache-2.0
//! A stream: a run of related reads, its schedule, and its line in the ledger. `flow` follows its
//! reader, `contracts` promises it a rate.

use super::clock::PlayClock;
use super::flow::SAFETY;
use super::frames::Frames;
use super::glances::{Glances, Row};
use super::rehearsal::RunPlace;
use super::ways::{Leg, Legacy, PresentRun};
use super::*;
use crate::stream::CursorIndex;

/// How a stream goes through its bytes. `v` counts bytes in the order they are read, from where the
/// stream began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flow {
    /// File offset = origin + v.
    Forward,
    /// File offset = origin − v, each stretch read forward.
    Reverse,
    /// Stretches of `stretch_bytes` bytes, `stride` apart from start to start; negative: towards
    /// the start of the file.
    Strided { stride: i64, stretch_bytes: u64 },
    /// One file a frame.
    Frames,
}

/// All contracts together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Promised {
    /// Units: bytes a second.
    pub rate: u64,
    /// Buffers that they cannot do without. Units: bytes.
    pub least_bytes: u64,
}

impl Promised {
    /// Without a stream of that rate, which needs so many buffers at least.
    pub(super) fn less(self, rate: u64, least_bytes: u64) -> Promised {
        Promised {
            rate: self.rate.saturating_sub(rate),
            least_bytes: self.least_bytes.saturating_sub(least_bytes),
        }
    }
}

/// A slot kept for a stream until it has passed.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeldSlot {
    pub slot: SlotIndex,
    /// The stream's `v` at the end of the bytes that it wants from the slot.
    pub end: u64,
}

/// The next byte to be fetched for a stream from a device.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct NextPlace {
    /// Where it lies on the device.
    pub physical: u64,
    /// The bytes that are left to fetch from there. Zero: there is no such byte.
    pub left: u64,
}

/// The bytes to fetch next for a stream from a device, by one request or none.
#[derive(Clone, Copy, Debug)]
pub(super) struct NextFetch {
    pub file: FileId,
    pub range: ByteRange,
    /// By how much the stream is further when all of it is fetched.
    pub worth: u64,
}

/// A run of related reads, and its line in the ledger.
#[derive(Clone, Debug)]
pub(super) struct Stream {
    /// As in [`StreamRecord::number`].
    pub number: u32,
    pub session: SessionId,
    /// Of the handle that last read it.
    pub station: Option<Station>,
    /// None once the handle is closed; a sequence lives between handles.
    pub handle: Option<HandleId>,
    /// The file that is being fetched; of a sequence, the one that the player is in.
    pub file: FileId,
    /// Where that lies. A sequence of a pool is fetched from others as well, see
    /// [`Stream::device_at`].
    pub device: DeviceId,
    pub path: String,
    /// The part of the file of that path.
    pub part: FilePart,
    pub standing: Standing,
    /// When it was refused a contract first.
    pub refused_at: Instant,
    pub rate: Option<(BytesPerSecond, RateSource)>,
    /// Why it was refused a contract, when that last happened.
    pub refusal: Option<Refusal>,
    /// It is only a contract that its seat keeps: see `kept`. Its `origin` is where its place ended
    /// on the device.
    pub is_kept: bool,
    /// Its reader copies: it takes all that it gets, and needs no contract.
    pub is_copy: bool,
    /// How often the reader was taken for one.
    pub copied_count: u32,
    /// How far the reader is ahead of a clock that runs at its rate. Units: ns.
    pub ahead_ns: i64,
    /// When that was computed.
    pub ahead_at: Instant,
    pub flow: Flow,
    pub frames: Option<Frames>,
    pub cursor: Option<CursorIndex>,
    /// Its reader jumps about, and nothing can be fetched before it is asked for.
    pub scattered: bool,
    /// Reads in a row that belonged to another cursor.
    pub stray_count: u32,
    /// The last reads of it in a row, and places that were left at once if no session tells its
    /// readers apart.
    pub row: Row,
    pub glances: Glances,
    /// Its reader cut to where it is now, and took the contract along.
    pub was_cut_to: bool,
    /// It is followed from a first read on, and nothing has shown yet that it is read on.
    pub is_presumed: bool,
    pub origin: u64,
    /// `v` of the next byte the player will ask for.
    pub consumed: u64,
    /// `v` up to which the device was asked. Of a sequence over several devices all that lies
    /// before: see [`Frames`].
    pub fetched: u64,
    /// When the player asked for v = 0, or would have at its rate.
    pub anchor: Instant,
    pub read_bytes: u64,
    pub held: VecDeque<HeldSlot>,
    /// The runs ahead along which it is read; none: only its own file.
    pub way: Vec<Leg>,
    /// Of the stream that its contract came from, for the read that is being looked at.
    pub legacy: Option<Legacy>,
    /// The run that its reader is in.
    pub run: Option<PresentRun>,
    /// The run that its reader was in when the contract came here, and the bytes that were fetched
    /// ahead there.
    pub came_from: Option<RunPlace>,
    pub left_ahead: u64,
    pub last_read: Instant,
    /// The clock of the run that it follows, and of one that has begun elsewhere.
    pub clock: Option<PlayClock>,
    pub begun: Option<PlayClock>,
    /// The stream whose answer came just before its reader's last read.
    pub turn: Option<StreamId>,
    /// When its reader's last read is due by that clock; NEVER: by none.
    pub clock_due: Instant,
    /// Its reader's last read, if that began a run.
    pub first_read: Option<FirstRead>,
    /// For the ledger.
    pub reads: ReadCounts,
    /// Its last read was answered after it was due at the device, so the schedule stands.
    pub late_before: bool,
    /// When a read elsewhere was last served at the contract's cost.
    pub looked_away: Instant,
    /// Reads of it that are not answered yet.
    pub waiting_count: u32,
}

/// Where the stretch after `steps` of a strided flow starts; None before the file's start.
pub(super) fn strided_offset(origin: u64, stride: i64, steps: u64) -> Option<u64> {
    let way = i64::try_from(steps).ok()?.checked_mul(stride)?;
    origin.checked_add_signed(way)
}

impl Flow {
    pub(super) fn same_kind(self, other: Flow) -> bool {
        match (self, other) {
            (Flow::Strided { stride: a, .. }, Flow::Strided { stride: b, .. }) => a == b,
            (a, b) => core::mem::discriminant(&a) == core::mem::discriminant(&b),
        }
    }
}

impl Stream {
    pub(super) fn new(
        session: SessionId,
        handle: HandleId,
        file: FileId,
        device: DeviceId,
        (path, part): (alloc::string::String, FilePart),
        now: Instant,
    ) -> Stream {
        Stream {
            number: 0,
            session,
            station: None,
            handle: Some(handle),
            file,
            device,
            path,
            part,
            standing: Standing::BestEffort,
            refused_at: Instant::ZERO,
            rate: None,
            refusal: None,
            is_kept: false,
            is_copy: false,
            copied_count: 0,
            ahead_ns: 0,
            ahead_at: now,
            flow: Flow::Forward,
            frames: None,
            cursor: None,
            scattered: false,
            stray_count: 0,
            row: Default::default(),
            glances: Default::default(),
            was_cut_to: false,
            is_presumed: false,
            origin: 0,
            consumed: 0,
            fetched: 0,
            anchor: now,
            read_bytes: 0,
            held: VecDeque::new(),
            way: Vec::new(),
            legacy: None,
            run: None,
            came_from: None,
            left_ahead: 0,
            last_read: now,
            reads: ReadCounts::default(),
            clock: None,
            begun: None,
            turn: None,
            clock_due: Instant::NEVER,
            first_read: None,
            late_before: false,
            looked_away: Instant::ZERO,
            waiting_count: 0,
        }
    }

    /// The devices that it is fetched from, one after the other.
    pub(super) fn device_at(&self, at: usize) -> Option<DeviceId> {
        match &self.frames {
            Some(frames) => frames.devices().get(at).copied(),
            None => (at == 0).then_some(self.device),
        }
    }

    /// `v` of the next byte to be fetched from a device.
    pub(super) fn fetched_on(&self, device: DeviceId) -> u64 {
        let next = self.frames.as_ref().and_then(|frames| frames.next(device));
        next.unwrap_or(self.fetched)
    }

    /// A device's portion of `whole`.
    pub(super) fn portion_of(&self, device: DeviceId, whole: u64) -> u64 {
        match &self.frames {
            Some(frames) => frames.portion_of(device, whole),
            None => whole,
        }
    }

    /// So many bytes more were asked of a device.
    pub(super) fn count_fetched(&mut self, device: DeviceId, bytes: u64) {
        match &mut self.frames {
            Some(frames) => {
                frames.count_fetched(device, bytes);
                self.fetched = frames.fetched();
            }
            None => self.fetched += bytes,
        }
    }

    /// The bytes that are fetched, or on their way, ahead of its reader.
    pub(super) fn ahead_bytes(&self) -> u64 {
        self.fetched.saturating_sub(self.consumed)
    }

    /// Bytes from `v` on are asked of devices again.
    pub(super) fn fetch_again(&mut self, v: u64) {
        match &mut self.frames {
            Some(frames) => {
                frames.fetch_again(v);
                self.fetched = frames.fetched();
            }
            None => self.fetched = self.fetched.min(v),
        }
    }

    /// When the byte `fetched` must be there, the first not yet asked of the device. The last byte
    /// of a read is due with its first, so one read's length is taken off. A reader that asks for
    /// nothing although its next bytes would have been due has paused: they are due a preroll after
    /// it comes back, not before now.
    pub(super) fn deadline(&self, fetched: u64, now: Instant, preroll: Duration) -> Instant {
        let anchor = self.anchor + self.pause(now, preroll);
        let whole = fetched.saturating_sub(self.read_bytes);
        (anchor + self.rate_or_none().time_for(ByteCount(whole)) + preroll).before(SAFETY)
    }

    /// By how much a reader that has paused is behind its schedule.
    pub(super) fn pause(&self, now: Instant, preroll: Duration) -> Duration {
        let expected = self.anchor + self.rate_or_none().time_for(ByteCount(self.consumed));
        if self.waiting_count > 0 || self.late_before || now <= expected + preroll {
            return Duration::ZERO;
        }
        now.since(expected)
    }

    pub(super) fn rate_or_none(&self) -> BytesPerSecond {
        self.rate.map_or(BytesPerSecond(0), |(rate, _)| rate)
    }

    /// The reader's schedule starts anew from its present place.
    pub(super) fn reanchor(&mut self, now: Instant) {
        let rate = self.rate_or_none();
        let at = self.consumed.saturating_sub(self.read_bytes);
        self.anchor = now.before(rate.time_for(ByteCount(at)));
    }

    /// When a read that starts at `start` is due. A reader that comes later than its bytes were
    /// due, and not because we were late before, has paused: its schedule moves.
    pub(super) fn due(&mut self, start: u64, arrived: Instant, preroll: Duration) -> Instant {
        if self.standing != Standing::Contract {
            return Instant::NEVER;
        }
        let rate = self.rate_or_none();
        let scheduled = self.anchor + rate.time_for(ByteCount(start));
        if arrived > scheduled + preroll && !self.late_before {
            self.anchor = arrived.before(rate.time_for(ByteCount(start)));
            return arrived + preroll;
        }
        scheduled + preroll
    }
}
