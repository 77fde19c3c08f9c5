// SPDX-License-Identifier: Apache-2.0
//! Sequences: one file a frame, followed across files.
//!
//! The reader opens, reads and closes a file for every frame; the stream lives on between them. Its
//! `v` runs through the frames in reading order, so that buffers, deadlines and admission are those
//! of any other stream. The driver opens the next frames beside the one that the reader has open,
//! and the server fetches them. A client gets their bytes only by its own open of the same inode,
//! since every read goes through a handle of the client. A reader with several threads may have
//! several frames open at once, and open them in any order: those behind the last one that it has
//! come to stay until it has closed them.
//!
//! On a pool the frames of one sequence lie on any of its members. It is one stream with one place
//! in `v`; but each device is asked for its own frames by itself, in the order of `v`, so that a
//! slow device does not hold up fetches from the others. Each is charged the portion of the rate
//! that its frames have (docs/decisions/0034).

use super::clock::Due;
use super::state::*;
use super::*;
use crate::stream::{Cadence, Moved, SequenceTracker};
use alloc::collections::VecDeque;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

/// Neighbours asked for at once, of one stream.
const ASKED_MAX: usize = 16;
/// The most frames that a reader leaves out at once.
const STEPS_MAX: i128 = 16;
/// A sequence whose reader opened nothing for so long has ended.
const SILENCE: Duration = Duration::from_s(10);

/// The last so many frames show how a sequence is spread over devices.
const LATELY_MAX: usize = 32;

/// The server asks a device again when its portion of a sequence has become larger by so much.
/// Thousandths of the whole.
const PORTION_GROWN: u64 = 125;

/// The owner of the opens among which the server looks for a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Owner {
    Session(SessionId),
    /// All sessions of a pool's door.
    Pool(PoolNumber),
}

/// Where the driver looks for a frame by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Place {
    /// In the folder of this file.
    Beside(FileId),
    /// In the tree of a pool.
    Pool(PoolNumber),
}

/// The sequences that one owner reads in one folder.
#[derive(Clone, Debug, Default)]
pub(super) struct Folder {
    tracker: SequenceTracker,
    touched: Instant,
    /// By reader.
    streams: Vec<Option<StreamId>>,
    /// Names whose numbers count clips.
    clips: Vec<ClipName>,
}

/// A file with this ending was read like a clip.
#[derive(Clone, Debug)]
struct ClipName {
    ending: String,
    /// How many of them in a row were read like frames, the last ones.
    framed_count: u32,
}

/// So many in a row are frames after all.
const FRAMED_MAX: u32 = 8;

/// The most such endings of one folder.
const CLIP_COUNT_MAX: usize = 16;

/// After so many frames in a row that the driver could not open ahead, though their reader then
/// opened them, the sequence counts as one that cannot be fetched ahead.
const MISSED_MAX: u32 = 8;

/// Readers at once in one folder of a pool: all clients of a mount are one owner.
const POOL_READER_COUNT_MAX: usize = 64;

/// How many frames behind the last one that its reader has come to are kept, as long as the reader
/// has them open or has left them out.
const BEHIND_MAX: usize = 8;

/// Folders of one owner that are watched for sequences; an indexer opens files in all folders.
const FOLDER_COUNT_MAX: usize = 64;

/// A frame of a sequence that is open.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame {
    number: u64,
    file: FileId,
    device: DeviceId,
    /// `v` of its first byte.
    start: u64,
    size: u64,
    /// The bytes of it, from its start on, that its device was asked for. Units: bytes.
    fetched: u64,
    /// Handles that its reader has of it.
    handle_count: u32,
    /// The reader has come to it.
    was_entered: bool,
}

impl Frame {
    /// A frame that the reader has not come to, and of which no device was asked for anything.
    fn new(number: u64, file: FileId, device: DeviceId, (start, size): (u64, u64)) -> Frame {
        Frame {
            number,
            file,
            device,
            start,
            size,
            fetched: 0,
            handle_count: 0,
            was_entered: false,
        }
    }

    /// Its reader opens it.
    fn enter(&mut self) {
        self.handle_count = self.handle_count.saturating_add(1);
        self.was_entered = true;
    }

    /// Behind the last one: the reader does not need it any more.
    fn is_done(&self) -> bool {
        self.was_entered && self.handle_count == 0
    }

    fn end(&self) -> u64 {
        self.start + self.size
    }

    fn lacks_on(&self, device: DeviceId) -> bool {
        self.device == device && self.fetched < self.size
    }
}

/// The state of a neighbour that was asked for.
#[derive(Clone, Copy, Debug)]
enum Asked {
    Waiting,
    Opened(FileId, u64),
    Absent,
}

/// The frames of one sequence, as one reader goes through them.
#[derive(Clone, Debug)]
pub(super) struct Frames {
    owner: Owner,
    folder: String,
    reader: usize,
    step: i64,
    /// The devices that it is fetched from.
    devices: Vec<DeviceId>,
    /// For each of these, the portion for which it was last asked. Thousandths.
    portions: Vec<u64>,
    /// Device and size of the frames opened lately; of all that are open, at least.
    lately: VecDeque<(DeviceId, u64)>,
    /// Frames opened, in reading order.
    open: VecDeque<Frame>,
    /// The last of these that its reader has come to. The reader may still be in some before it.
    at: usize,
    /// Neighbours that were asked for, in reading order.
    asked: VecDeque<(u64, Asked)>,
    /// The next one does not exist: ask again when the reader moves on.
    ended: bool,
    /// The last one that was asked for did not exist. The next is asked for alone: the driver has
    /// to look on the disk for a name that does not exist.
    is_doubtful: bool,
    /// Frames in a row that did not exist when they were asked for, and then were opened.
    missed_count: u32,
    /// The driver cannot open frames ahead: they are links, or only just being written. A contract
    /// would promise nothing.
    is_blind: bool,
    cadence: Cadence,
}

impl Frames {
    /// Every file that is kept open for it.
    pub(super) fn files(&self) -> impl Iterator<Item = FileId> {
        let opened = self.asked.iter().filter_map(|(_, asked)| match asked {
            Asked::Opened(file, _) => Some(*file),
            Asked::Waiting | Asked::Absent => None,
        });
        self.open.iter().map(|frame| frame.file).chain(opened)
    }

    /// The frame that is fetched next from a device.
    fn next_frame(&self, device: DeviceId) -> Option<&Frame> {
        self.open.iter().find(|frame| frame.lacks_on(device))
    }

    fn end(&self) -> u64 {
        self.open.back().map_or(0, Frame::end)
    }

    /// The devices on which frames of it lie.
    pub(super) fn devices(&self) -> &[DeviceId] {
        &self.devices
    }

    /// `v` of the next byte that a device is asked for; without an open frame there, the end of all
    /// open ones.
    pub(super) fn next(&self, device: DeviceId) -> Option<u64> {
        let next = self.next_frame(device);
        match next {
            Some(frame) => Some(frame.start + frame.fetched),
            None => self.open.back().map(Frame::end),
        }
    }

    /// `v` up to which all devices were asked.
    pub(super) fn fetched(&self) -> u64 {
        let lacking = self.open.iter().find(|frame| frame.fetched < frame.size);
        lacking.map_or(self.end(), |frame| frame.start + frame.fetched)
    }

    /// The bytes before `v` that a device was not asked for yet. Units: bytes.
    pub(super) fn lacking_before(&self, device: DeviceId, v: u64) -> u64 {
        self.open
            .iter()
            .take_while(|frame| frame.start < v)
            .filter(|frame| frame.device == device)
            .map(|frame| {
                frame
                    .end()
                    .min(v)
                    .saturating_sub(frame.start + frame.fetched)
            })
            .sum()
    }

    pub(super) fn count_fetched(&mut self, device: DeviceId, bytes: u64) {
        let next = self.open.iter_mut().find(|frame| frame.lacks_on(device));
        if let Some(frame) = next {
            frame.fetched = frame.fetched.saturating_add(bytes).min(frame.size);
        }
    }

    pub(super) fn fetch_again(&mut self, v: u64) {
        for frame in self.open.iter_mut() {
            frame.fetched = frame.fetched.min(v.saturating_sub(frame.start));
        }
    }

    /// A device's portion of `whole`: that of their bytes that recent frames had there.
    pub(super) fn portion_of(&self, device: DeviceId, whole: u64) -> u64 {
        if self.devices == [device] {
            return whole;
        }
        let mut all = 0u128;
        let mut there = 0u128;
        for &(other, size) in &self.lately {
            all += u128::from(size);
            if other == device {
                there += u128::from(size);
            }
        }
        u64::try_from(u128::from(whole) * there / all.max(1)).unwrap_or(whole)
    }

    /// The last frame that its reader has come to.
    fn current(&self) -> Option<&Frame> {
        self.open.get(self.at)
    }

    /// The reader has come to one that was opened ahead, or that it had left out.
    fn enter(&mut self, place: usize) {
        if let Some(frame) = self.open.get_mut(place) {
            frame.enter();
        }
        if place <= self.at {
            return;
        }
        // Frames that the reader leaves out are not fetched for it, unless it opens them after all.
        let left_out = self.open.range_mut(self.at + 1..place);
        left_out.for_each(|frame| frame.fetched = frame.size);
        self.at = place;
    }

    /// The reader has come to one that was not opened ahead: it lies behind all that are open.
    fn join(&mut self, frame: Frame) {
        self.push(frame);
        self.enter(self.open.len() - 1);
    }

    /// The frames that the reader has passed go.
    ///
    /// `bytes_max`  of those behind the last one that are kept for a reader that still has them
    ///              open
    fn pass(&mut self, bytes_max: u64) -> Vec<FileId> {
        let mut passed = Vec::new();
        let start = self.current().map_or(0, |frame| frame.start);
        while self.at > 0
            && let Some(front) = self.open.front()
            && (front.is_done() || self.at > BEHIND_MAX || start - front.start > bytes_max)
        {
            passed.extend(self.open.pop_front().map(|frame| frame.file));
            self.at -= 1;
        }
        passed
    }

    /// The number is that of the frame behind all that are open.
    fn is_next(&self, number: u64) -> bool {
        let last = self.open.back().map(|frame| frame.number);
        let next = last.and_then(|last| last.checked_add_signed(self.step));
        let mut asked = self.asked.iter().map(|(asked, _)| *asked);
        next == Some(number) && asked.next().is_none_or(|asked| asked == number)
    }

    /// The way from the last frame that its reader has come to, to the one with this number:
    /// frames, in the direction in which the reader reads.
    fn way_to(&self, number: u64) -> i128 {
        let at = self.current().map_or(number, |frame| frame.number);
        (i128::from(number) - i128::from(at)) * i128::from(self.step.signum())
    }

    /// A frame joins those that are open.
    fn push(&mut self, frame: Frame) {
        self.open.push_back(frame);
        self.lately.push_back((frame.device, frame.size));
        while self.lately.len() > self.open.len().max(LATELY_MAX) {
            self.lately.pop_front();
        }
    }

    /// Frames that are not open yet may lie on any of its devices.
    pub(super) fn goes_on_elsewhere(&self) -> bool {
        !self.ended && self.devices.len() > 1
    }

    fn lies_on(&self, device: DeviceId) -> bool {
        self.lately.iter().any(|(other, _)| *other == device)
    }
}

impl Folder {
    /// Where in `clips` a name is.
    fn clip_name(&self, name: &str) -> Option<usize> {
        let is_it = |clip: &ClipName| clip.ending.eq_ignore_ascii_case(ending(name));
        self.clips.iter().position(is_it)
    }
}

/// The ending of a name, without the dot.
fn ending(name: &str) -> &str {
    name.rsplit_once('.').map_or("", |(_, ending)| ending)
}

fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}

impl Server {
    /// A client opened a file: a frame of a sequence?
    pub(super) fn frame_opened(
        &mut self,
        session: SessionId,
        handle: HandleId,
        actions: &mut Actions,
    ) {
        if !self.policy.analyser {
            return;
        }
        let Some(entry) = self.handles.get(&(session, handle)) else {
            return;
        };
        let HandleState::Ready(file) = entry.state else {
            return;
        };
        if !entry.part.is_whole() {
            // Each device has one, under one name: they would be taken for readers of that frame,
            // and the bytes of each for all of it.
            return;
        }
        let (path, hint) = (entry.path.clone(), entry.hint);
        let (folder_name, name) = split(&path);
        let Some(size) = self.files.get(&file).map(|file| file.size) else {
            return;
        };
        let owner = self.owner_of(session);
        let key = (owner, folder_name.to_string());
        if !self.folders.contains_key(&key) {
            self.make_room_for_folder(owner);
        }
        let now = self.now;
        let folder = self.folders.entry(key.clone()).or_insert_with(|| Folder {
            tracker: match owner {
                Owner::Session(_) => SequenceTracker::new(),
                Owner::Pool(_) => SequenceTracker::of_readers(POOL_READER_COUNT_MAX),
            },
            ..Folder::default()
        });
        folder.touched = now;
        if folder.clip_name(name).is_some() {
            return;
        }
        let Some(seen) = folder.tracker.opened(now, name, ByteCount(size)) else {
            if folder.streams.iter().all(Option::is_none) && folder.clips.is_empty() {
                self.folders.remove(&key);
            }
            return;
        };
        let reader = usize::from(seen.reader.0);
        if folder.streams.len() <= reader {
            folder.streams.resize(reader + 1, None);
        }
        let ruled = matches!(hint, Some(RateHint::FramesPerKilosecond(..))) && !seen.is_guess;
        // With a rule that speaks of frames the first one is a start; else two in order are.
        let step = seen.step.or(ruled.then_some(1));
        if let Moved::Jumped { from } = seen.moved {
            // The reader is the same one elsewhere: it has one stream and one contract, here.
            let left = folder
                .streams
                .get_mut(usize::from(from.0))
                .and_then(Option::take);
            if let Some(left) = left {
                self.end_stream(left, actions);
            }
        }
        let Some(folder) = self.folders.get(&key) else {
            return;
        };
        let known = folder.streams.get(reader).copied().flatten();
        if let Some(former) = known
            && matches!(seen.moved, Moved::Began)
        {
            self.end_stream(former, actions);
        }
        let Some(step) = step.filter(|_| size > 0) else {
            return;
        };
        let id = match self.sequence_of(&key, reader) {
            Some(id) => id,
            None => match self.begin_sequence(&key, reader, (session, handle), file, &path, step) {
                Some(id) => id,
                None => return,
            },
        };
        let mut station = None;
        if let Some(entry) = self.handles.get_mut(&(session, handle)) {
            entry.stream = Some(id);
            station.clone_from(&entry.station);
        }
        if let Some(stream) = self.streams.get_mut(id.0) {
            stream.session = session;
            stream.handle = Some(handle);
            // The station of the frame before stays until this one's is known.
            stream.station = station.or(stream.station.take());
        }
        self.enter_frame(
            id,
            seen.frame,
            file,
            size,
            step,
            !matches!(seen.moved, Moved::Jumped { .. }),
            actions,
        );
        self.sequence_rate(id, hint, size);
        self.ask_neighbours(id, actions);
    }

    /// Notes that files taken for frames are clips, and ends their stream.
    pub(super) fn drop_sequence(&mut self, id: StreamId, actions: &mut Actions) {
        let Some(stream) = self.streams.get(id.0) else {
            return;
        };
        if let Some(frames) = &stream.frames {
            let key = (frames.owner, frames.folder.clone());
            let name = split(&stream.path).1;
            if let Some(folder) = self.folders.get_mut(&key)
                && folder.clips.len() < CLIP_COUNT_MAX
                && folder.clip_name(name).is_none()
            {
                folder.clips.push(ClipName {
                    ending: ending(name).to_string(),
                    framed_count: 0,
                });
            }
        }
        self.end_stream(id, actions);
    }

    /// A client closed a file whose name may be that of a clip: note whether it was read like a
    /// frame.
    pub(super) fn frame_left(
        &mut self,
        session: SessionId,
        (path, cadence): (&str, &Cadence),
        file: FileId,
    ) {
        if !cadence.is_known() {
            return;
        }
        let (folder, name) = split(path);
        let key = (self.owner_of(session), folder.to_string());
        let (Some(folder), Some(file)) = (self.folders.get_mut(&key), self.files.get(&file)) else {
            return;
        };
        let Some(place) = folder.clip_name(name) else {
            return;
        };
        let is_framed = cadence.is_of_a_frame(ByteCount(file.size));
        let clip = &mut folder.clips[place];
        clip.framed_count = match is_framed {
            true => clip.framed_count + 1,
            false => 0,
        };
        if clip.framed_count >= FRAMED_MAX {
            folder.clips.remove(place);
        }
    }

    fn owner_of(&self, session: SessionId) -> Owner {
        let pool = self.sessions.get(&session).and_then(|entry| entry.pool);
        pool.map_or(Owner::Session(session), Owner::Pool)
    }

    /// Of the folders in which nothing is played, forget the one in which nothing was opened for
    /// longest.
    fn make_room_for_folder(&mut self, owner: Owner) {
        let own = || {
            self.folders
                .range((owner, String::new())..)
                .take_while(move |((other, _), _)| *other == owner)
        };
        if own().count() < FOLDER_COUNT_MAX {
            return;
        }
        let idle = own()
            .filter(|(_, folder)| folder.streams.iter().all(Option::is_none))
            .min_by_key(|(_, folder)| folder.touched)
            .map(|(key, _)| key.clone());
        if let Some(key) = idle {
            self.folders.remove(&key);
        }
    }

    fn sequence_of(&self, key: &(Owner, String), reader: usize) -> Option<StreamId> {
        self.folders
            .get(key)?
            .streams
            .get(reader)
            .copied()
            .flatten()
    }

    fn begin_sequence(
        &mut self,
        key: &(Owner, String),
        reader: usize,
        (session, handle): (SessionId, HandleId),
        file: FileId,
        path: &str,
        step: i64,
    ) -> Option<StreamId> {
        let device = self.files.get(&file)?.device;
        let mut stream = Stream::new(
            session,
            handle,
            file,
            device,
            (path.to_string(), FilePart::WHOLE),
            self.now,
        );
        stream.flow = Flow::Frames;
        stream.frames = Some(Frames {
            owner: key.0,
            folder: key.1.clone(),
            reader,
            step,
            devices: alloc::vec![device],
            portions: alloc::vec![1000],
            lately: VecDeque::new(),
            open: VecDeque::new(),
            at: 0,
            asked: VecDeque::new(),
            ended: false,
            is_doubtful: false,
            missed_count: 0,
            is_blind: false,
            cadence: Cadence::new(),
        });
        self.folders.get(key)?.streams.get(reader)?;
        let id = self.add_stream(stream);
        *self.folders.get_mut(key)?.streams.get_mut(reader)? = Some(id);
        self.sequences.insert(id.0);
        self.enlist_background(id);
        self.block(device);
        Some(id)
    }

    /// The reader is in frame `number` now: let go of those that it has passed.
    #[expect(clippy::too_many_arguments, reason = "one observation, as it was made")]
    fn enter_frame(
        &mut self,
        id: StreamId,
        number: u64,
        file: FileId,
        size: u64,
        step: i64,
        continued: bool,
        actions: &mut Actions,
    ) {
        let now = self.now;
        let bytes_max = self.behind_max(id);
        let (Some(stream), Some(device)) = (
            self.streams.get_mut(id.0),
            self.files.get(&file).map(|file| file.device),
        ) else {
            return;
        };
        let Some(frames) = &mut stream.frames else {
            return;
        };
        let was_ended = core::mem::take(&mut frames.ended);
        let turned = frames.step != step;
        frames.step = step;
        let mut passed: Vec<FileId> = Vec::new();
        let mut unforeseen = false;
        let known = frames
            .open
            .iter()
            .position(|frame| frame.number == number && frame.file == file);
        let goes_on = continued && !turned && !frames.open.is_empty();
        let behind = -frames.way_to(number);
        match known {
            Some(place) if !turned => {
                if place > frames.at {
                    frames.missed_count = 0;
                }
                frames.enter(place);
                passed = frames.pass(bytes_max);
            }
            // Another thread of the reader has gone on meanwhile, and the frame was let go.
            None if goes_on && (1..=BEHIND_MAX as i128).contains(&behind) => {
                frames.ended = was_ended;
                return;
            }
            // The reader is quicker than the driver, which opens frames ahead for it.
            None if goes_on && !was_ended && frames.is_next(number) => {
                let asked = frames.asked.pop_front();
                let start = frames.end();
                frames.join(Frame::new(number, file, device, (start, size)));
                passed = frames.pass(bytes_max);
                // Answers come in any order.
                if let Some((_, Asked::Opened(file, _))) = asked {
                    passed.push(file);
                }
                if let Some(file) = self.files.get_mut(&file) {
                    file.use_count += 1;
                }
            }
            _ => {
                // Not foreseen: frames that were opened ahead lie elsewhere.
                if was_ended && goes_on {
                    frames.missed_count = frames.missed_count.saturating_add(1);
                }
                passed.extend(frames.files());
                frames.asked.clear();
                // The reader's schedule goes on with the frame after the one it was in, even if
                // others were opened ahead for it; frames that it leaves out count with their time.
                let steps = frames.way_to(number).clamp(1, STEPS_MAX) as u64;
                let start = frames.current().map_or(0, |current| {
                    current.start + current.size.saturating_mul(steps)
                });
                unforeseen = true;
                frames.open.clear();
                frames.at = 0;
                frames.join(Frame::new(number, file, device, (start, size)));
                stream.consumed = start;
                if let Some(file) = self.files.get_mut(&file) {
                    file.use_count += 1;
                }
            }
        }
        stream.fetched = frames.fetched();
        let jumped = known.is_none() && !continued;
        self.unsettle(id);
        if let Some(stream) = self.streams.get_mut(id.0) {
            stream.file = file;
            stream.device = device;
            stream.read_bytes = size;
            stream.last_read = now;
        }
        let start = self.frame_start(id);
        self.release_held(id, if unforeseen { u64::MAX } else { start });
        for file in passed {
            self.release(file, actions);
        }
        self.settle_devices(id);
        self.settle_sight(id);
        if jumped
            || self
                .streams
                .get(id.0)
                .is_some_and(|stream| stream.reads.read_count == 0)
        {
            let Some(stream) = self.streams.get_mut(id.0) else {
                return;
            };
            stream.origin = start;
            stream.clock = None;
            stream.reanchor(now);
            if stream.standing == Standing::Contract {
                self.resign(id);
                self.ask_admission(id);
            }
        }
        // Behind the frame that has joined there may be some that were opened before it.
        self.line_up_frames(id, actions);
    }

    /// How much behind the last frame that its reader has come to is kept for the reader. Units:
    /// bytes.
    fn behind_max(&self, id: StreamId) -> u64 {
        let rate = (self.streams.get(id.0)).map_or(0, |stream| stream.rate_or_none().0);
        self.cap_for(rate, self.promised) / 4
    }

    /// The reader has closed a frame.
    pub(super) fn frame_closed(&mut self, id: StreamId, file: FileId, actions: &mut Actions) {
        let bytes_max = self.behind_max(id);
        let stream = self.streams.get_mut(id.0);
        let Some(frames) = stream.and_then(|stream| stream.frames.as_mut()) else {
            return;
        };
        let Some(frame) = frames.open.iter_mut().find(|frame| frame.file == file) else {
            return;
        };
        frame.handle_count = frame.handle_count.saturating_sub(1);
        let passed = frames.pass(bytes_max);
        if passed.is_empty() {
            return;
        }
        let start = self.frame_start(id);
        self.release_held(id, start);
        for file in passed {
            self.release(file, actions);
        }
        self.settle_devices(id);
        self.touch_devices_of(id);
    }

    /// A sequence of which nothing can be fetched ahead has no contract, even if its rate is known.
    fn settle_sight(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get_mut(id.0) else {
            return;
        };
        let knows_rate = stream.rate.is_some();
        let Some(frames) = &mut stream.frames else {
            return;
        };
        let was_blind = frames.is_blind;
        frames.is_blind = match frames.missed_count {
            0 => false,
            count => was_blind || count >= MISSED_MAX,
        };
        match (was_blind, frames.is_blind) {
            (false, true) => self.ask_no_more(id),
            (true, false) if knows_rate => {
                stream.reanchor(self.now);
                self.ask_admission(id);
            }
            _ => {}
        }
    }

    /// Fetch the sequence from the devices on which frames of it lie.
    fn settle_devices(&mut self, id: StreamId) {
        let Some(frames) = self
            .streams
            .get_mut(id.0)
            .and_then(|stream| stream.frames.as_mut())
        else {
            return;
        };
        let mut left: Vec<DeviceId> = Vec::new();
        let mut come: Vec<DeviceId> = Vec::new();
        for &device in &frames.devices {
            if !frames.lies_on(device) {
                left.push(device);
            }
        }
        for &(device, _) in &frames.lately {
            if !frames.devices.contains(&device) && !come.contains(&device) {
                come.push(device);
            }
        }
        let stays = |(device, _): &(DeviceId, u64)| !left.contains(device);
        let before = frames
            .devices
            .iter()
            .copied()
            .zip(frames.portions.iter().copied());
        let (devices, portions) = before.filter(stays).unzip();
        (frames.devices, frames.portions) = (devices, portions);
        for &device in &come {
            // The portion for which admission will ask the device.
            let portion = frames.portion_of(device, 1000);
            frames.devices.push(device);
            frames.portions.push(portion);
        }
        for device in come {
            self.comes_to(id, device);
            self.block(device);
        }
        for device in left {
            self.goes_from(id, device);
        }
        self.settle_portions(id);
    }

    /// A device that was asked for one portion has not promised more: played with another step, the
    /// sequence may have more frames there than the device can serve.
    fn settle_portions(&mut self, id: StreamId) {
        for at in 0.. {
            let Some(stream) = self.streams.get_mut(id.0) else {
                return;
            };
            let promised = stream.standing == Standing::Contract;
            let Some(frames) = &mut stream.frames else {
                return;
            };
            let Some(&device) = frames.devices.get(at) else {
                return;
            };
            let now = frames.portion_of(device, 1000);
            let Some(asked) = frames.portions.get_mut(at) else {
                return;
            };
            let grown = now > *asked + PORTION_GROWN;
            if grown || now + PORTION_GROWN < *asked {
                *asked = now;
            }
            if grown && promised {
                self.portion_grows(id, device);
            }
        }
    }

    fn frame_start(&self, id: StreamId) -> u64 {
        self.streams
            .get(id.0)
            .and_then(|stream| stream.frames.as_ref()?.open.front())
            .map_or(0, |frame| frame.start)
    }

    fn sequence_rate(&mut self, id: StreamId, hint: Option<RateHint>, size: u64) {
        let Some(stream) = self.streams.get(id.0) else {
            return;
        };
        if stream.rate.is_some() {
            return;
        }
        let known = match hint {
            Some(RateHint::FramesPerKilosecond(frames, source)) => Some((
                BytesPerSecond(size.saturating_mul(u64::from(frames)).div_ceil(1000)),
                source,
            )),
            Some(RateHint::Rate(rate, source)) => Some((rate, source)),
            None => stream
                .frames
                .as_ref()
                .and_then(|frames| frames.cadence.rate())
                .filter(|_| self.policy.contracts_from_cadence)
                .map(|rate| (BytesPerSecond(rate.0 + rate.0 / 20), RateSource::Cadence)),
        };
        let Some(known) = known.filter(|(rate, _)| rate.0 > 0) else {
            return;
        };
        let now = self.now;
        let mut is_blind = false;
        if let Some(stream) = self.streams.get_mut(id.0) {
            stream.rate = Some(known);
            stream.reanchor(now);
            is_blind = stream.frames.as_ref().is_some_and(|one| one.is_blind);
        }
        if !is_blind {
            self.ask_admission(id);
        }
    }

    /// Ask the driver to open the frames that the stream's buffers can take.
    fn ask_neighbours(&mut self, id: StreamId, actions: &mut Actions) {
        let Some(stream) = self.streams.get(id.0) else {
            return;
        };
        let Some(frames) = &stream.frames else {
            return;
        };
        let Some(current) = frames.current() else {
            return;
        };
        let rate = stream.rate.map_or(0, |(rate, _)| rate.0);
        let wanted_bytes = match stream.standing {
            Standing::Contract => {
                self.cap_for(rate, self.promised)
                    .saturating_mul(self.packing(stream))
                    / 1000
            }
            Standing::Refused | Standing::BestEffort => 8 << 20,
        };
        let wanted =
            (wanted_bytes / current.size.max(1) + 2).min(u64::from(self.limits.sequence_ahead_max));
        let have = frames.open.len() - frames.at + frames.asked.len();
        let asked_max = if frames.is_doubtful { 1 } else { ASKED_MAX };
        if frames.ended || have as u64 >= wanted || frames.asked.len() >= asked_max {
            return;
        }
        let count = (wanted as usize - have).min(asked_max - frames.asked.len());
        let last = frames
            .asked
            .back()
            .map(|(number, _)| *number)
            .or(frames.open.back().map(|frame| frame.number))
            .unwrap_or(current.number);
        let (place, step, reader) = match frames.owner {
            Owner::Session(_) => (Place::Beside(current.file), frames.step, frames.reader),
            Owner::Pool(pool) => (Place::Pool(pool), frames.step, frames.reader),
        };
        let folder = (frames.owner, frames.folder.clone());
        let mut asked: Vec<(u64, String)> = Vec::new();
        if let Some(folder) = self.folders.get(&folder) {
            let mut number = last;
            for _ in 0..count {
                let Some(next) = number.checked_add_signed(step) else {
                    break;
                };
                number = next;
                let reader = crate::stream::ReaderIndex(reader as u8);
                match folder.tracker.name(reader, number) {
                    Some(name) => asked.push((number, name)),
                    None => break,
                }
            }
        }
        for (number, name) in asked {
            let name = match place {
                Place::Pool(_) if !folder.1.is_empty() => alloc::format!("{}/{name}", folder.1),
                Place::Pool(_) | Place::Beside(_) => name,
            };
            if let Some(frames) = self
                .streams
                .get_mut(id.0)
                .and_then(|stream| stream.frames.as_mut())
            {
                frames.asked.push_back((number, Asked::Waiting));
            }
            let askers = self.neighbours.entry((place, name.clone())).or_default();
            if !askers.contains(&(id, number)) {
                askers.push((id, number));
            }
            if askers.len() == 1 {
                actions.list.push(match place {
                    Place::Beside(beside) => Action::OpenNeighbour { beside, name },
                    Place::Pool(pool) => Action::AskPool { pool, path: name },
                });
            }
        }
    }

    pub(super) fn neighbour_opened(
        &mut self,
        asked: (Place, String),
        facts: Result<FileFacts, Errno>,
        actions: &mut Actions,
    ) {
        let askers = self.neighbours.remove(&asked).unwrap_or_default();
        let opened = match facts {
            Ok(facts) if self.devices.contains_key(&facts.device) && facts.size.0 > 0 => {
                let size = facts.size.0;
                Some((self.adopt(facts, (0, None), actions), size))
            }
            Ok(facts) => {
                let file = self.adopt(facts, (0, None), actions);
                self.release(file, actions);
                None
            }
            Err(_) => None,
        };
        for (id, number) in askers {
            let Some(frames) = self
                .streams
                .get_mut(id.0)
                .and_then(|stream| stream.frames.as_mut())
            else {
                continue;
            };
            let Some(entry) = frames
                .asked
                .iter_mut()
                .find(|(asked, state)| *asked == number && matches!(state, Asked::Waiting))
            else {
                continue;
            };
            entry.1 = match opened {
                Some((file, size)) => {
                    if let Some(file) = self.files.get_mut(&file) {
                        file.use_count += 1;
                    }
                    Asked::Opened(file, size)
                }
                None => Asked::Absent,
            };
            self.line_up_frames(id, actions);
            self.ask_neighbours(id, actions);
        }
        if let Some((file, _)) = opened {
            self.release(file, actions);
        }
    }

    /// Frames that came join those that are open, in reading order.
    fn line_up_frames(&mut self, id: StreamId, actions: &mut Actions) {
        let Some(stream) = self.streams.get_mut(id.0) else {
            return;
        };
        let Some(frames) = &mut stream.frames else {
            return;
        };
        let mut dropped: Vec<FileId> = Vec::new();
        while let Some(&(number, asked)) = frames.asked.front() {
            match asked {
                Asked::Waiting => break,
                Asked::Opened(file, size) => {
                    frames.asked.pop_front();
                    frames.is_doubtful = false;
                    let Some(device) = self.files.get(&file).map(|file| file.device) else {
                        continue;
                    };
                    let start = frames.end();
                    frames.push(Frame::new(number, file, device, (start, size)));
                }
                Asked::Absent => {
                    // The sequence ends or has a gap here; frames behind it are not fetched for it.
                    frames.ended = true;
                    frames.is_doubtful = true;
                    for (_, asked) in frames.asked.drain(..) {
                        if let Asked::Opened(file, _) = asked {
                            dropped.push(file);
                        }
                    }
                }
            }
        }
        stream.fetched = frames.fetched();
        for file in dropped {
            self.release(file, actions);
        }
        self.settle_devices(id);
        self.touch_devices_of(id);
    }

    /// A read of a frame the reader is in; when it is due: a frame is due as a whole.
    pub(super) fn frame_read(
        &mut self,
        id: StreamId,
        file: FileId,
        range: ByteRange,
        arrived: Instant,
    ) -> Due {
        let preroll = self.policy.preroll;
        let now = self.now;
        let Some(stream) = self.streams.get_mut(id.0) else {
            return Due::NEVER;
        };
        stream.last_read = now;
        let Some(frames) = &mut stream.frames else {
            return Due::NEVER;
        };
        frames.cadence.read_arrived(now, range.length);
        let (lately, is_blind) = (frames.cadence.lately(), frames.is_blind);
        let mut entered = frames.open.iter().take(frames.at + 1);
        let Some(frame) = entered.find(|frame| frame.file == file).copied() else {
            return Due::NEVER;
        };
        stream.consumed = stream
            .consumed
            .max(frame.start + range.end().min(frame.size));
        let by_clock = stream.due_by_clock((frame.start, range.length.0), arrived, preroll);
        let due = Due::of_stream(stream.due(frame.start, arrived, preroll), by_clock);
        self.keep_clock_of(id, &due);
        if !is_blind {
            self.tell_copy(id, range.length, lately);
        }
        self.touch_devices_of(id);
        due
    }

    /// A read of a sequence was answered.
    pub(super) fn frame_answered(&mut self, id: StreamId) {
        let now = self.now;
        if let Some(frames) = self
            .streams
            .get_mut(id.0)
            .and_then(|stream| stream.frames.as_mut())
        {
            frames.cadence.read_answered(now);
        }
    }

    pub(super) fn frame_place(&self, stream: &Stream, device: DeviceId) -> NextPlace {
        let Some(frames) = &stream.frames else {
            return NextPlace::default();
        };
        let Some(frame) = frames.next_frame(device) else {
            return NextPlace::default();
        };
        let physical = self
            .files
            .get(&frame.file)
            .map_or(0, |file| file.place(frame.fetched).physical);
        NextPlace {
            physical,
            left: frames.lacking_before(device, u64::MAX),
        }
    }

    pub(super) fn next_of_frame(
        &self,
        stream: &Stream,
        device: DeviceId,
        bytes: u64,
    ) -> Option<NextFetch> {
        let frame = stream.frames.as_ref()?.next_frame(device)?;
        let start = frame.fetched;
        let file = self.files.get(&frame.file)?;
        let size = frame.size.min(file.size.max(1));
        let end = start
            .saturating_add(bytes)
            .min(size)
            .min(start.saturating_add(file.place(start).contiguous));
        if start >= end {
            // A frame that has become shorter is passed over: no more of it is fetched, and all of
            // it counts as done.
            let rest = frame.size - start;
            return Some(NextFetch {
                file: frame.file,
                range: ByteRange::new(start, 0),
                worth: rest,
            });
        }
        Some(NextFetch {
            file: frame.file,
            range: ByteRange::new(start, end - start),
            worth: end - start,
        })
    }

    /// `v` of the first byte of a frame that is being fetched, or will be.
    pub(super) fn frame_to_fetch(&self, stream: &Stream, id: FileId) -> Option<u64> {
        let frames = stream.frames.as_ref()?;
        let frame = frames.open.iter().find(|frame| frame.file == id)?;
        (frame.fetched < frame.size).then_some(frame.start)
    }

    /// Thousandths of its buffers that a stream can fill: a frame that ends in the middle of a slot
    /// wastes the rest of it.
    pub(super) fn packing(&self, stream: &Stream) -> u64 {
        let Some(frame) = stream
            .frames
            .as_ref()
            .and_then(|frames| frames.open.front())
        else {
            return 1000;
        };
        let slots = frame.size.div_ceil(self.slot_bytes()).max(1);
        (frame.size.saturating_mul(1000) / (slots * self.slot_bytes())).max(1)
    }

    /// End sequences whose readers opened nothing for [`SILENCE`].
    pub(super) fn end_silent_sequences(&mut self, device: DeviceId, actions: &mut Actions) {
        let now = self.now;
        let silent: Vec<(StreamId, bool)> = self
            .sequences
            .iter()
            .filter_map(|&key| {
                let id = StreamId(key);
                let stream = self.streams.get(id.0).filter(|stream| {
                    let frames = stream.frames.as_ref();
                    frames.is_some_and(|frames| frames.devices.contains(&device))
                })?;
                Some((
                    id,
                    stream.handle.is_none() && now.since(stream.last_read) > SILENCE,
                ))
            })
            .collect();
        for &(id, silent) in &silent {
            if silent {
                self.end_stream(id, actions);
            }
        }
        if silent.iter().any(|(_, silent)| !silent) {
            self.block(device);
        }
    }

    pub(super) fn end_session_sequences(&mut self, session: SessionId, actions: &mut Actions) {
        let pool = self.sessions.get(&session).and_then(|entry| entry.pool);
        let owner = pool.map_or(Owner::Session(session), Owner::Pool);
        // If another session of the pool's door goes on, only sequences end that were last read in
        // this one.
        let goes_on = pool.is_some()
            && self
                .sessions
                .iter()
                .any(|(other, entry)| *other != session && entry.pool == pool);
        let keys: Vec<(Owner, String)> = self
            .folders
            .range((owner, String::new())..)
            .take_while(|((other, _), _)| *other == owner)
            .map(|(key, _)| key.clone())
            .collect();
        for key in keys {
            let streams = self
                .folders
                .get(&key)
                .map(|folder| folder.streams.clone())
                .unwrap_or_default();
            for id in streams.into_iter().flatten() {
                let is_here = |stream: &Stream| stream.session == session;
                if !goes_on || self.streams.get(id.0).is_some_and(is_here) {
                    self.end_stream(id, actions);
                }
            }
            if !goes_on {
                self.folders.remove(&key);
            }
        }
    }

    /// The stream ended: forget it in its folder and among those that asked for neighbours.
    pub(super) fn leave_folder(&mut self, id: StreamId, frames: &Frames) {
        let key = (frames.owner, frames.folder.clone());
        if let Some(folder) = self.folders.get_mut(&key) {
            for entry in folder.streams.iter_mut() {
                if *entry == Some(id) {
                    *entry = None;
                }
            }
        }
        for askers in self.neighbours.values_mut() {
            askers.retain(|(asker, _)| *asker != id);
        }
    }
}

impl Stream {
    /// `v` at the end of a frame.
    pub(super) fn frame_end(&self, file: FileId) -> u64 {
        self.frames
            .as_ref()
            .and_then(|frames| frames.open.iter().find(|frame| frame.file == file))
            .map_or(self.fetched, Frame::end)
    }
}
