// SPDX-License-Identifier: Apache-2.0
//! Waiting for acknowledged bytes: syncs, holds of clients that change a file by themselves, and
//! the work on a file when nothing of it is under way any more.

use super::state::*;
use super::*;
use alloc::collections::VecDeque;

/// Holds of files that are not known; more of them are not remembered.
const HOLDS_OF_UNKNOWN_MAX: usize = 4096;

impl Server {
    pub(super) fn sync(
        &mut self,
        session: SessionId,
        handle: HandleId,
        request: RequestId,
        actions: &mut Actions,
    ) {
        if !self.sessions.contains_key(&session) {
            return;
        }
        let entry = self.handles.get_mut(&(session, handle));
        let outcome = match entry.map(|entry| &mut entry.state) {
            Some(HandleState::Ready(file)) => {
                let id = *file;
                if !self.is_the_kernels(id) {
                    let commit = self.commit_count;
                    if let Some(file) = self.files.get_mut(&id) {
                        file.use_count += 1;
                        file.writing.syncs.push_back(SyncWaiter {
                            session,
                            request,
                            commit,
                        });
                        let device = file.device;
                        self.touch(device);
                    }
                    return self.settle_waiters(id, actions);
                }
                Outcome::Plain
            }
            // Another handle may have written bytes that the kernel does not have.
            Some(HandleState::Opening(waiting)) => return waiting.syncs.push(request),
            Some(HandleState::Plain) => Outcome::Plain,
            None => Outcome::Failed(Errno::BAD_HANDLE),
        };
        actions.list.push(Action::Reply {
            session,
            request,
            outcome,
        });
    }

    /// The server has no bytes of it that its device may lack: a client syncs the kernel's part by
    /// itself, and gets that result as for any file.
    fn is_the_kernels(&self, id: FileId) -> bool {
        self.files.get(&id).is_some_and(|file| {
            let writing = &file.writing;
            let is_free = writing.syncs.is_empty() && writing.failing.is_none();
            writing.is_settled() && is_free && !writing.is_loose && !writing.is_syncing
        })
    }

    pub(super) fn hold(
        &mut self,
        session: SessionId,
        request: RequestId,
        key: FileKey,
        actions: &mut Actions,
    ) {
        if !self.sessions.contains_key(&session) {
            return;
        }
        let Some(&id) = self.keys.get(&key) else {
            if self.holds_of_unknown.len() < HOLDS_OF_UNKNOWN_MAX {
                self.holds_of_unknown.push((key, session));
            }
            actions.list.push(Action::Reply {
                session,
                request,
                outcome: Outcome::Done,
            });
            return;
        };
        if let Some(file) = self.files.get_mut(&id) {
            file.writing.holds.push((session, Some(request)));
            let device = file.device;
            self.touch(device);
        }
        self.settle_waiters(id, actions);
    }

    /// The client has reported its change of the file: its hold ends.
    pub(super) fn end_hold(&mut self, session: SessionId, key: FileKey, actions: &mut Actions) {
        let Some(&id) = self.keys.get(&key) else {
            let mut unknown = self.holds_of_unknown.iter();
            if let Some(at) = unknown.position(|hold| *hold == (key, session)) {
                self.holds_of_unknown.swap_remove(at);
            }
            return;
        };
        let Some(file) = self.files.get_mut(&id) else {
            return;
        };
        let holds = &mut file.writing.holds;
        // One `Changed` ends one hold that was answered.
        if let Some(at) = holds
            .iter()
            .position(|(holder, request)| *holder == session && request.is_none())
        {
            holds.remove(at);
            self.hold_released(id, actions);
        }
    }

    /// A file becomes known: take the holds that sessions have on it already.
    pub(super) fn holds_of(&mut self, key: FileKey) -> Vec<(SessionId, Option<RequestId>)> {
        let unknown = self
            .holds_of_unknown
            .extract_if(.., |(held, _)| *held == key);
        unknown.map(|(_, session)| (session, None)).collect()
    }

    pub(super) fn hold_released(&mut self, id: FileId, actions: &mut Actions) {
        self.settle_waiters(id, actions);
        self.advance_writes(id, actions);
        self.trim_if_left(id, actions);
        self.forget_if_unused(id, actions);
    }

    /// Look again at every write that waits for a file.
    pub(super) fn advance_writes(&mut self, id: FileId, actions: &mut Actions) {
        let waiting = self
            .files
            .get(&id)
            .map(|file| file.writing.waiting.clone())
            .unwrap_or_default();
        for key in waiting {
            self.advance_write(key, actions);
        }
    }

    /// Bytes of the file were written, or a write failed: look at the requests that wait for that.
    pub(super) fn settle_waiters(&mut self, id: FileId, actions: &mut Actions) {
        let due = self.due_syncs(id);
        let Some(file) = self.files.get_mut(&id) else {
            return;
        };
        let writing = &mut file.writing;
        if let Some(errno) = writing.failing {
            // The device gets the bytes when it works again: no request waits for that.
            let outcome = Outcome::Failed(errno);
            let holds = writing.holds.len();
            writing.holds.retain(|&(holder, request)| {
                if let Some(request) = request {
                    actions.list.push(Action::Reply {
                        session: holder,
                        request,
                        outcome,
                    });
                }
                request.is_none()
            });
            let is_free = writing.holds.len() < holds;
            let waiters = core::mem::take(&mut writing.syncs);
            writing.syncing = 0;
            self.answer_syncs(id, waiters, outcome, actions);
            if is_free {
                self.advance_writes(id, actions);
                self.forget_if_unused(id, actions);
            }
            return;
        }
        if !writing.is_syncing && due > 0 {
            writing.is_syncing = true;
            writing.syncing = due;
            writing.synced_loose = self.loose_count;
            writing.others_syncing = writing.others_changed;
            actions.list.push(Action::Sync { file: id });
        }
        if writing.is_settled() && writing.is_loose {
            // A client that changes the file waits until the kernel has written its bytes of it:
            // bytes that are written again could come over that change.
            if writing.holds.iter().any(|(_, request)| request.is_some()) {
                self.write_out(id, actions);
            }
        } else if writing.is_settled() {
            for (holder, request) in &mut writing.holds {
                if let Some(request) = request.take() {
                    actions.list.push(Action::Reply {
                        session: *holder,
                        request,
                        outcome: Outcome::Done,
                    });
                }
            }
        }
    }

    pub(super) fn answer_syncs(
        &mut self,
        id: FileId,
        waiters: VecDeque<SyncWaiter>,
        outcome: Outcome,
        actions: &mut Actions,
    ) {
        for waiter in waiters {
            actions.list.push(Action::Reply {
                session: waiter.session,
                request: waiter.request,
                outcome,
            });
            self.release(id, actions);
        }
    }

    pub(super) fn synced(&mut self, id: FileId, result: Result<(), Errno>, actions: &mut Actions) {
        let Some(file) = self.files.get_mut(&id) else {
            return;
        };
        // A sync covers nothing if the kernel has reported an error elsewhere meanwhile, which it
        // does not report to the sync.
        if let (Ok(()), Some(errno)) = (result, file.writing.not_kept.take()) {
            file.writing.uncovered_syncs += 1;
            if file.writing.uncovered_syncs < LOST_IN_A_ROW {
                return self.sync_doubted(id, errno, actions);
            }
            return self.synced(id, Err(errno), actions);
        }
        let is_written_out = core::mem::take(&mut file.writing.is_writing_out);
        file.writing.is_syncing = false;
        if result != Err(Errno::AGAIN) {
            file.writing.uncovered_syncs = 0;
        }
        if result.is_ok() && !is_written_out {
            file.writing.others_synced = file.writing.others_syncing;
        }
        self.writing_out.retain(|other| *other != id);
        let (asked, all) = (
            core::mem::take(&mut file.writing.syncing),
            file.writing.syncs.len(),
        );
        let count = match result {
            // The failed bytes may be those that later syncs wait for, and the kernel does not
            // report the error again.
            Err(errno) if errno != Errno::AGAIN => all,
            _ => asked.min(all),
        };
        let waiters: VecDeque<SyncWaiter> = file.writing.syncs.drain(..count).collect();
        let outcome = match result {
            Ok(()) => Outcome::Done,
            Err(errno) => Outcome::Failed(errno),
        };
        match result {
            Ok(()) => self.loose_synced(id, actions),
            // A client that holds the file and waits for this waits on: a retry at once would end
            // the same.
            Err(Errno::AGAIN) if is_written_out => return self.try_loose_again(id),
            Err(Errno::AGAIN) => self.try_loose_again(id),
            Err(errno) => self.write_again(id, Some(errno), actions),
        }
        self.answer_syncs(id, waiters, outcome, actions);
        self.settle_waiters(id, actions);
    }

    /// A sync has ended, and covers nothing. Its waiters wait on: the server writes again the bytes
    /// that the error may be about, then asks for a sync once more. If the error may be about bytes
    /// that others wrote past us, the sync has failed.
    pub(super) fn sync_doubted(&mut self, id: FileId, errno: Errno, actions: &mut Actions) {
        let Some(file) = self.files.get_mut(&id) else {
            return;
        };
        let writing = &mut file.writing;
        writing.not_kept = None;
        if writing.may_have_bytes_of_others() {
            return self.synced(id, Err(errno), actions);
        }
        writing.is_syncing = false;
        writing.syncing = 0;
        writing.is_writing_out = false;
        self.writing_out.retain(|other| *other != id);
        self.write_again(id, None, actions);
        self.settle_waiters(id, actions);
    }

    /// How many of the requests that wait for stable storage, from the first on, need nothing but a
    /// sync: the device has got all that was committed before them, or the bytes written over it.
    pub(super) fn due_syncs(&mut self, id: FileId) -> usize {
        let Some(file) = self.files.get_mut(&id) else {
            return 0;
        };
        let pieces = &self.pieces;
        let Writing { commits, syncs, .. } = &mut file.writing;
        // No sync needs spent pieces. One that is hidden, but still under way to the device, stays.
        while let Some(first) = commits.front()
            && piece_of(pieces, first).is_none_or(Piece::is_spent)
        {
            commits.pop_front();
        }
        let mut due = syncs.len();
        for entry in commits {
            let Some(owed) = piece_of(pieces, entry).and_then(Piece::owed) else {
                continue;
            };
            due = syncs
                .partition_point(|waiter| waiter.commit < owed)
                .min(due);
            if due == 0 {
                break;
            }
        }
        due
    }

    /// A handle is being closed: give back the blocks reserved past the end when no client writes
    /// any more.
    pub(super) fn trim_if_left(&mut self, id: FileId, actions: &mut Actions) {
        let others = self
            .handles
            .values()
            .any(|handle| matches!(handle.state, HandleState::Ready(file) if file == id));
        let Some(file) = self.files.get_mut(&id) else {
            return;
        };
        let writing = &mut file.writing;
        let done = writing.is_reserved
            // A client that holds the file may be lengthening it on its own descriptor. One that
            // asks for a hold now waits for the cut.
            && writing.holds.iter().all(|(_, request)| request.is_some())
            && (!others || writing.gives_room && writing.holds.is_empty() && !file.size_stale)
            && writing.dirty.is_empty()
            && writing.grant_count == 0
            && writing.reserving.is_none()
            && writing.waiting.is_empty();
        // To give back is to cut: a client that writes to the file beside us could lose bytes, and
        // no file is cut to a length that may be old. The driver does it when no program has the
        // file open; that it does not have it open itself is up to us.
        if done && (writing.is_open_elsewhere || file.size_stale) {
            self.drop_blocks(id, 0, u64::MAX);
            self.forget_if_unused(id, actions);
        } else if done {
            writing.is_reserved = false;
            writing.is_short = others;
            let size = ByteCount(file.size);
            if others {
                // Doors without a session find a fact of it until it is cut.
                actions.list.push(Action::Known { file: id, size });
            }
            actions.list.push(Action::Trim { file: id, size });
            writing.settling += 1;
            // A writer that goes on asks for blocks anew, which comes behind the cut; also for the
            // rest of the last page, where a client has the file open.
            let whole = if others {
                file.size
            } else {
                file.size.next_multiple_of(PAGE_BYTES)
            };
            file.unmap_from(whole / PAGE_BYTES * PAGE_BYTES);
        }
    }
}
