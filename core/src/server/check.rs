// SPDX-License-Identifier: Apache-2.0
//! Whether the server's state agrees with itself: each count with the things counted, each name
//! with the thing named.
//!
//! The daemon never calls it: it is for the simulator and the random tests, which end with the
//! first contradiction, long before it has become a wrong byte or a buffer that is never freed.

use super::state::*;
use super::*;
use crate::cache::Users;
use alloc::format;

/// The counts of a file elsewhere.
#[derive(Default)]
struct OfFile {
    grants: u32,
    flights: usize,
    users: u32,
}

/// The counts of a lane elsewhere.
#[derive(Default)]
struct OfLane {
    pages: u32,
    records: u32,
}

/// The counts of a piece elsewhere.
#[derive(Clone, Copy, Default)]
struct OfPiece {
    live: u64,
    loose: u64,
}

/// Sentences about the contradictions.
#[derive(Default)]
struct Odd(Vec<String>);

impl Odd {
    fn same<T: PartialEq + core::fmt::Debug>(
        &mut self,
        what: core::fmt::Arguments<'_>,
        said: T,
        found: T,
    ) {
        if said != found {
            self.0.push(format!(
                "{what}: the count is {said:?}, but there are {found:?}"
            ));
        }
    }

    fn holds(&mut self, is_so: bool, what: core::fmt::Arguments<'_>) {
        if !is_so {
            self.0.push(format!("{what}"));
        }
    }
}

impl Server {
    /// The contradictions of the state, a sentence each; none: it agrees. Call it between steps.
    /// The time that it takes grows with the state.
    pub fn check(&self) -> Vec<String> {
        let mut odd = Odd::default();
        self.check_buffers(&mut odd);
        self.check_sessions(&mut odd);
        self.check_reads(&mut odd);
        self.check_promises(&mut odd);
        self.check_writes(&mut odd);
        self.check_files(&mut odd);
        self.check_devices(&mut odd);
        odd.0
    }

    fn check_buffers(&self, odd: &mut Odd) {
        let mut users = Vec::new();
        users.resize(self.limits.slot_count as usize, Users::default());
        let mut count = |slot: SlotIndex, add: fn(&mut Users)| {
            if let Some(users) = users.get_mut(slot.0 as usize) {
                add(users);
            }
        };
        for pinned in self.pins.values() {
            for &slot in &pinned.slots[..usize::from(pinned.count)] {
                count(slot, |users| users.pins += 1);
            }
        }
        for &slot in self.write_flights.iter().flat_map(|(_, io)| &io.pins) {
            count(slot, |users| users.pins += 1);
        }
        for held in self.streams.iter().flat_map(|(_, stream)| &stream.held) {
            count(held.slot, |users| users.holds += 1);
        }
        for &slot in self.flights.iter().flat_map(|(_, io)| &io.slots) {
            count(slot, |users| users.fills += 1);
        }
        self.cache.check(&users, &mut odd.0);
        let mut owned = 0;
        for (id, file) in &self.files {
            for (&number, &slot) in &file.blocks {
                let block = crate::cache::Block { file: *id, number };
                odd.holds(
                    self.cache.owner(slot) == Some(block),
                    format_args!(
                        "block {number} of file {} names buffer {}, which is not its own",
                        id.0, slot.0
                    ),
                );
                owned += 1;
            }
        }
        odd.same(
            format_args!("buffers that have an owner"),
            self.cache.owned_count(),
            owned,
        );
    }

    fn check_sessions(&self, odd: &mut Odd) {
        for (id, session) in &self.sessions {
            let own = (*id, RequestId(0))..=(*id, RequestId(u64::MAX));
            let pinned = self.pins.range(own).map(|(_, pinned)| pinned.bytes).sum();
            odd.same(
                format_args!("bytes in the hands of session {}", id.0),
                session.pinned_bytes,
                pinned,
            );
            let own = (*id, HandleId(0))..=(*id, HandleId(u32::MAX));
            let handles = self.handles.range(own).count() as u32;
            odd.same(
                format_args!("handles of session {}", id.0),
                session.handle_count,
                handles,
            );
            for &key in &session.parked {
                let is_own = self.reads.get(key).is_some_and(|read| read.session == *id);
                odd.holds(
                    is_own,
                    format_args!(
                        "session {} has parked read {key}, which is none of its own",
                        id.0
                    ),
                );
            }
        }
        let known = |session: &SessionId| self.sessions.contains_key(session);
        let left = self
            .handles
            .keys()
            .filter(|(session, _)| !known(session))
            .count()
            + self
                .pins
                .keys()
                // A client whose session ended at the stop may still copy from them.
                .filter(|(session, _)| !known(session) && !self.is_stopping)
                .count()
            + self
                .grants
                .keys()
                .filter(|(session, _)| !known(session))
                .count();
        odd.same(
            format_args!("handles, pins and grants of sessions that are gone"),
            0,
            left,
        );
    }

    fn check_reads(&self, odd: &mut Odd) {
        let mut waiting: BTreeMap<u32, u32> = BTreeMap::new();
        for (key, read) in self.reads.iter() {
            if let Some(id) = read.stream {
                *waiting.entry(id.0).or_default() += u32::from(self.streams.get(id.0).is_some());
            }
            let Some(id) = read.file else {
                continue;
            };
            let file = self.files.get(&id);
            let times = file.map_or(0, |file| {
                file.waiting.iter().filter(|&&other| other == key).count()
            });
            odd.same(
                format_args!("file {} lists read {key}, which waits for it", id.0),
                1,
                times,
            );
        }
        for (key, stream) in self.streams.iter() {
            let reads = waiting.get(&key).copied().unwrap_or(0);
            odd.same(
                format_args!("reads of stream {key} without an answer"),
                stream.waiting_count,
                reads,
            );
        }
        for (id, file) in &self.files {
            let strange = |key: &&u32| {
                self.reads
                    .get(**key)
                    .is_none_or(|read| read.file != Some(*id))
            };
            let strange = file.waiting.iter().filter(strange).count();
            odd.same(
                format_args!("reads of others that wait for file {}", id.0),
                0,
                strange,
            );
        }
    }

    fn check_promises(&self, odd: &mut Odd) {
        let mut promised = Promised::default();
        for (key, stream) in self.streams.iter() {
            let is_promised = stream.standing == Standing::Contract;
            if is_promised {
                let rate = stream.rate.map_or(0, |(rate, _)| rate.0);
                promised.rate = promised.rate.saturating_add(rate);
                promised.least_bytes =
                    (promised.least_bytes).saturating_add(self.least_buffers(rate));
            }
            for device in (0..).map_while(|at| stream.device_at(at)) {
                let known = self.devices.get(&device);
                let is_listed = known.is_some_and(|known| known.contracts.contains(&StreamId(key)));
                odd.holds(
                    known.is_none() || is_listed == is_promised,
                    format_args!(
                        "stream {key} is promised: {is_promised}, but device {} says {is_listed}",
                        device.0
                    ),
                );
            }
        }
        let kept = self.streams.iter().filter(|(_, stream)| stream.is_kept);
        let kept: Vec<u32> = kept.map(|(key, _)| key).collect();
        let mut listed: Vec<u32> = self.kept.iter().map(|kept| kept.0).collect();
        listed.sort_unstable();
        odd.same(format_args!("promises that are kept"), listed, kept);
        odd.same(
            format_args!("what is promised to all"),
            self.promised,
            promised,
        );
        for (id, device) in &self.devices {
            for stream in &device.contracts {
                let is_alive = self.streams.get(stream.0).is_some();
                odd.holds(
                    is_alive,
                    format_args!(
                        "device {} has promised something to stream {}, which is gone",
                        id.0, stream.0
                    ),
                );
                let times = device
                    .contracts
                    .iter()
                    .filter(|&other| other == stream)
                    .count();
                odd.same(
                    format_args!("promises of device {} to stream {}", id.0, stream.0),
                    1,
                    times,
                );
            }
        }
    }

    fn check_writes(&self, odd: &mut Odd) {
        let mut pieces: BTreeMap<PieceKey, OfPiece> = BTreeMap::new();
        let all = ByteRange::new(0, u64::MAX);
        for (id, file) in &self.files {
            let writing = &file.writing;
            for span in writing.dirty.spans(all) {
                pieces.entry(span.piece).or_default().live += span.range.length.0;
            }
            for span in writing.loose.spans(all) {
                pieces.entry(span.piece).or_default().loose += span.range.length.0;
                let is_dirty = writing.dirty.spans(span.range).next().is_some();
                odd.holds(
                    !is_dirty,
                    format_args!("bytes of file {} are dirty and loose", id.0),
                );
            }
            odd.same(
                format_args!("whether file {} has loose bytes", id.0),
                writing.is_loose,
                !writing.loose.is_empty(),
            );
        }
        let mut lanes: BTreeMap<LaneId, OfLane> = BTreeMap::new();
        for (key, piece) in self.pieces.iter() {
            let found = pieces.remove(&PieceKey(key)).unwrap_or_default();
            odd.same(
                format_args!("dirty bytes of piece {key}"),
                piece.live,
                found.live,
            );
            odd.same(
                format_args!("loose bytes of piece {key}"),
                piece.loose,
                found.loose,
            );
            let lane = lanes.entry(piece.lane).or_default();
            if !piece.shares_pages {
                lane.pages += piece.runs.page_count();
            }
            lane.records += u32::from(piece.record != NO_RECORD);
        }
        odd.same(
            format_args!("pieces that are gone and have bytes"),
            0,
            pieces.len(),
        );
        for grant in self.grants.values() {
            let lane = lanes.entry(grant.lane).or_default();
            lane.pages += grant.runs.page_count();
            lane.records += 1;
        }
        for (id, lane) in &self.lanes {
            let found = lanes.remove(id).unwrap_or_default();
            let taken = lane.pages.page_count() - lane.pages.free_count();
            odd.same(
                format_args!("pages of lane {} in use", id.0),
                taken,
                found.pages + lane.pages.held_alone_count(),
            );
            let taken = lane.record_count - (lane.records.len() + lane.kept.len()) as u32;
            odd.same(
                format_args!("records of lane {} in use", id.0),
                taken,
                found.records,
            );
        }
        odd.same(
            format_args!("lanes that are gone and have pages"),
            0,
            lanes.len(),
        );
    }

    fn check_files(&self, odd: &mut Odd) {
        let mut files: BTreeMap<FileId, OfFile> = BTreeMap::new();
        for grant in self.grants.values() {
            files.entry(grant.file).or_default().grants += 1;
        }
        for (_, io) in self.write_flights.iter() {
            files.entry(io.file).or_default().flights += 1;
        }
        for (_, read) in self.reads.iter() {
            if let Some(id) = read.file {
                files.entry(id).or_default().users += 1;
            }
        }
        for handle in self.handles.values() {
            if let HandleState::Ready(id) = handle.state {
                files.entry(id).or_default().users += 1;
            }
        }
        for (_, io) in self.flights.iter() {
            files.entry(io.file).or_default().users += 1;
        }
        let unused: BTreeSet<(u64, FileId)> = self.unused.iter().copied().collect();
        for (id, file) in &self.files {
            // A file that could not be forgotten at once has nothing cached any more; the end of
            // the request that it waits for forgets it.
            let is_idle = file.use_count == 0 && !file.blocks.is_empty();
            odd.holds(
                !is_idle || unused.contains(&(file.unused_since, *id)),
                format_args!("file {} is unused and not among those that may go", id.0),
            );
            let found = files.remove(id).unwrap_or_default();
            let writing = &file.writing;
            odd.same(
                format_args!("grants of file {}", id.0),
                writing.grant_count,
                found.grants,
            );
            odd.same(
                format_args!("writes to file {} on their way", id.0),
                writing.flights.len(),
                found.flights,
            );
            let users = found.users + u32::from(writing.is_listed) + u32::from(writing.is_loose);
            odd.holds(
                file.use_count >= users,
                format_args!(
                    "file {} counts {} uses, but has {users} at least",
                    id.0, file.use_count
                ),
            );
            let is_writer =
                (self.devices.get(&file.device)).is_some_and(|device| device.writers.contains(id));
            odd.same(
                format_args!("whether file {} is in its device's list of writers", id.0),
                writing.is_listed,
                is_writer,
            );
        }
        odd.same(
            format_args!("files that are gone and in use"),
            0,
            files.len(),
        );
        for (key, id) in &self.keys {
            let is_so = self.files.get(id).is_some_and(|file| file.key == *key);
            odd.holds(
                is_so,
                format_args!(
                    "inode {} leads to file {}, which has another",
                    key.inode, id.0
                ),
            );
        }
        let writing_out = self
            .files
            .values()
            .filter(|file| file.writing.is_writing_out)
            .count();
        odd.same(
            format_args!("files that are being written out"),
            self.writing_out.len(),
            writing_out,
        );
    }

    fn check_devices(&self, odd: &mut Odd) {
        let mut flights: BTreeMap<DeviceId, u32> = BTreeMap::new();
        let reads = self.flights.iter().map(|(_, io)| io.device);
        let writes = self.write_flights.iter().map(|(_, io)| io.device);
        for device in reads.chain(writes) {
            *flights.entry(device).or_default() += 1;
        }
        for (id, device) in &self.devices {
            let found = flights.get(id).copied().unwrap_or(0);
            odd.same(
                format_args!("requests with device {}", id.0),
                device.queue.flight_count,
                found,
            );
            odd.same(
                format_args!("deadlines of requests with device {}", id.0),
                device.queue.flight_deadlines.len() as u32,
                found,
            );
        }
        odd.same(
            format_args!("devices to be looked at when a step has ended"),
            0,
            self.touched.len(),
        );
        odd.same(
            format_args!("reads to be looked at when a step has ended"),
            0,
            self.unsettled.len(),
        );
    }
}
