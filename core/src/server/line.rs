// SPDX-License-Identifier: Apache-2.0
//! The line of writes that wait for room in the write buffer: by device, and for one device the
//! file with the least progress first.
//!
//! Of writers without a claim none gets far ahead of another one that waits: start-time fair
//! queueing, Goyal et al. 1996.

use super::state::*;
use super::*;
use alloc::vec::Vec;

/// A writer without a claim waits for writers that got so much less. Units: bytes.
const AHEAD_BYTES: u64 = 2 << 20;

/// A write's place among those that wait for one device: its file's progress, then the order of
/// asking.
type Place = (u64, u64);

/// Where a write that wants pages stands in its lane.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum InLine {
    First,
    /// Another write to the same device comes first.
    BehindItsOwn,
    /// A write to another device comes first, and has waited for room longer.
    BehindAnother,
}

impl Server {
    /// There is more room in the write buffer: this step looks again at the writes that wait for
    /// it.
    pub(super) fn roomier(&mut self) {
        self.is_roomier = true;
    }

    /// Look again at the writes that wait for room in the write buffer: first those of the device
    /// with the longest waiting one, and those of one device in their order. A write that waits for
    /// its own file, or for blocks of it, holds up no other.
    pub(super) fn give_room(&mut self, actions: &mut Actions) {
        if !core::mem::take(&mut self.is_roomier) {
            return;
        }
        let mut line: Vec<(u64, DeviceId, Place, LaneId, u32)> = Vec::new();
        for (&lane, state) in &self.lanes {
            let placed = |&key: &u32| {
                let (device, place) = self.place_in_line(key)?;
                Some((0, device, place, lane, key))
            };
            line.extend(state.waiting.iter().filter_map(placed));
        }
        let mut longest: BTreeMap<DeviceId, u64> = BTreeMap::new();
        for &(_, device, (_, asked), ..) in &line {
            let first = longest.entry(device).or_insert(asked);
            *first = asked.min(*first);
        }
        for (first, device, ..) in &mut line {
            *first = longest.get(device).copied().unwrap_or(0);
        }
        line.sort_unstable();
        let mut blocked: Vec<(LaneId, DeviceId)> = Vec::new();
        for (_, device, _, lane, key) in line {
            if blocked.contains(&(lane, device)) {
                // If it still counted as waiting for room, it could hold writes to other devices
                // behind one that comes before it.
                if let Some(write) = self.writes.get_mut(key)
                    && write.waits_for == WaitsFor::Room
                {
                    write.waits_for = WaitsFor::Device;
                }
                continue;
            }
            self.advance_write(key, actions);
            if let Some(WaitsFor::Room | WaitsFor::Device) = self.waits_for(key) {
                blocked.push((lane, device));
            }
        }
    }

    // Start-time fair queueing: see the head of this file.

    /// Where a write stands among those that wait, and for which device: progress is counted by
    /// device, and says nothing of a file on another one.
    fn place_in_line(&self, key: u32) -> Option<(DeviceId, Place)> {
        let write = self.writes.get(key)?;
        let file = write.file?;
        let device = self.files.get(&file)?.device;
        Some((device, (self.progress_of(file), write.asked)))
    }

    /// The progress of a file, as its device counts. A writer gets no credit for a time of silence.
    /// Units: bytes.
    fn progress_of(&self, id: FileId) -> u64 {
        let Some(file) = self.files.get(&id) else {
            return 0;
        };
        let others = self.devices.get(&file.device).map(|device| device.progress);
        file.writing.progress.max(others.unwrap_or(0))
    }

    fn waits_for(&self, key: u32) -> Option<WaitsFor> {
        self.writes.get(key).map(|write| write.waits_for)
    }

    /// The place of a write in its lane: of those that wait for one device the one with the least
    /// progress comes first; between devices the one whose writes have waited for room longest. At
    /// most one for each device waits for room, so these orders make no circle.
    pub(super) fn place_in_lane(&self, lane: &LaneState, key: u32) -> InLine {
        let Some((device, own)) = self.place_in_line(key) else {
            return InLine::First;
        };
        let mut place = InLine::First;
        for &other in lane.waiting.iter().filter(|&&other| other != key) {
            let Some((elsewhere, theirs)) = self.place_in_line(other) else {
                continue;
            };
            let waits_for = self.waits_for(other);
            if elsewhere == device {
                let is_in_line = matches!(waits_for, Some(WaitsFor::Room | WaitsFor::Device));
                if is_in_line && theirs < own {
                    return InLine::BehindItsOwn;
                }
            } else if waits_for == Some(WaitsFor::Room) && theirs.1 < own.1 {
                place = InLine::BehindAnother;
            }
        }
        place
    }

    /// The progress of the last of the files that wait for room on a device, or for their earlier
    /// bytes. A write that waits for its lane's turn, which is another device's, or for a file that
    /// its device does not take, holds up no other lane. Units: bytes.
    fn least_progress(&self, id: DeviceId) -> Option<u64> {
        let of_lane = |state: &LaneState| -> Option<u64> {
            let mut least: Option<u64> = None;
            let mut is_shared = false;
            for write in state.waiting.iter().filter_map(|&key| self.writes.get(key)) {
                let Some((file, known)) = write
                    .file
                    .and_then(|file| Some((file, self.files.get(&file)?)))
                else {
                    continue;
                };
                if known.device != id {
                    is_shared |= write.waits_for == WaitsFor::Room;
                } else if write.waits_for != WaitsFor::Other && known.writing.failing.is_none() {
                    let progress = self.progress_of(file);
                    least = Some(least.map_or(progress, |least| least.min(progress)));
                }
            }
            least.filter(|_| !is_shared)
        };
        self.lanes.values().filter_map(of_lane).min()
    }

    /// Its file has got so much more than another one that waits that its write has to wait, too.
    pub(super) fn is_ahead(&self, key: u32) -> bool {
        let Some(id) = self.writes.get(key).and_then(|write| write.file) else {
            return false;
        };
        let device = self.files.get(&id).map(|file| file.device);
        device
            .and_then(|device| self.least_progress(device))
            .is_some_and(|least| self.progress_of(id) > least.saturating_add(AHEAD_BYTES))
    }

    pub(super) fn progressed(&mut self, id: FileId, bytes: u64) {
        let progress = self.progress_of(id);
        let Some(file) = self.files.get_mut(&id) else {
            return;
        };
        file.writing.progress = progress.saturating_add(bytes);
        let device = file.device;
        let least = self
            .least_progress(device)
            .unwrap_or(progress)
            .min(progress);
        if let Some(device) = self.devices.get_mut(&device) {
            device.progress = device.progress.max(least);
        }
    }
}
