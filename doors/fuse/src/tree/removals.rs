// SPDX-License-Identifier: Apache-2.0
//! Removal of a file's last name: the door moves its stub aside, and removes its objects when no
//! program has it open.
//!
//! The stub waits among the catalogue's removed ones, so that a crash forgets neither it nor its
//! objects. They are removed in the background, after the removal itself is durable: removing an
//! object before its name could leave a name without bytes.

use crate::door::Door;
use crate::kernel::answer::Answer;
use crate::lock::locked;
use crate::tree::nodes::{Node, S_IFMT, S_IFREG, status};
use rushes_pool::{Buried, MemberNumber, Opens, PoolError};
use rustix::fs::{
    AtFlags, Mode, OFlags, RawDir, RenameFlags, linkat, openat, renameat_with, statat, unlinkat,
};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// Between two looks for removed files.
const PAUSE: Duration = Duration::from_millis(500);
/// Between two burials: each makes members flush cached data to their disks, which slows
/// recordings. No such pause if a request finds no room.
const REST: Duration = Duration::from_secs(5);
/// Until the next try for a file that could not be removed, if nothing shows when it would succeed;
/// then twice as long each time.
const TRY_AGAIN: Duration = Duration::from_secs(30);
const TRY_AGAIN_MAX: Duration = Duration::from_secs(3600);
/// A removed file that the kernel knows may be opened for so long: on other file systems a program
/// that has it as a path can.
const OPENED_UNTIL: Duration = Duration::from_secs(60);
/// A request that finds no room waits at most so long for that of removed files: a disk that hangs
/// ends no burial.
const ROOM_COMES_MAX: Duration = Duration::from_secs(10);

/// Removed files whose objects are not deleted yet: room that will be free.
#[derive(Debug, Default)]
pub(crate) struct Burials {
    counts: Mutex<Counts>,
    ended: Condvar,
    /// The thread that buries.
    burier: OnceLock<Thread>,
    /// The files that it could not remove.
    unburied: Mutex<Unburied>,
    /// Inode numbers of stubs whose objects are being removed: they cannot be opened any more.
    closed_off: Mutex<BTreeSet<u64>>,
}

/// The removed files that must not be buried.
pub(crate) struct FilesInUse<'a> {
    pub(crate) door: &'a Door,
    /// Waits for files that the kernel knows: a program that has only looked one up, or has it as a
    /// path (O_PATH), may still open it.
    pub(crate) waits: bool,
}

impl Opens for &FilesInUse<'_> {
    fn need(&self, inode: u64) -> bool {
        if self.door.has_open(inode) {
            return true;
        }
        // A file that has lost objects cannot be opened: the burial does not wait.
        let may_be = self.waits && !self.door.burials.has_closed_off(inode);
        let is_known = may_be && self.door.may_be_opened(inode);
        if is_known {
            // Nothing reports when the kernel forgets it.
            self.door.something_removed();
        }
        is_known
    }

    fn is_open(&self, inode: u64) -> bool {
        self.door.has_open(inode)
    }

    fn close_off(&self, inode: u64) -> bool {
        locked(&self.door.burials.closed_off).insert(inode);
        let is_free = !self.door.has_open(inode);
        if !is_free {
            self.let_go(inode, || ());
        }
        is_free
    }

    fn let_go<T>(&self, inode: u64, last: impl FnOnce() -> T) -> T {
        let mut closed_off = locked(&self.door.burials.closed_off);
        let done = last();
        closed_off.remove(&inode);
        done
    }
}

/// Removed files that keep their space for now.
#[derive(Debug, Default)]
struct Unburied {
    /// Missing or read-only members that have bytes of them.
    waits_for: BTreeSet<MemberNumber>,
    /// Some have another reason, which may end.
    is_otherwise: bool,
    /// The last try, and the last look for its members.
    tried: Option<Instant>,
    looked: Option<Instant>,
    /// Tries in a row without success.
    tries: u32,
}

impl Unburied {
    /// A burial has ended with these errors for files that it could not remove.
    fn note(&mut self, errors: &[PoolError]) {
        self.tried = Some(Instant::now());
        self.looked = self.tried;
        self.waits_for.clear();
        self.is_otherwise = false;
        for error in errors {
            match error {
                PoolError::Missing { member, .. } | PoolError::ReadOnly { member, .. } => {
                    self.waits_for.insert(*member);
                }
                _ => self.is_otherwise = true,
            }
        }
        if errors.is_empty() {
            self.tries = 0;
        }
    }

    /// Members to look for now.
    fn looked_for_next(&mut self) -> BTreeSet<MemberNumber> {
        if self.looked.is_none_or(|at| at.elapsed() < REST) {
            return BTreeSet::new();
        }
        self.looked = Some(Instant::now());
        self.waits_for.clone()
    }

    /// `there` are the members that have returned. For a missing member the waits start again,
    /// however often it was tried.
    ///
    /// Returns  whether it is worth another try
    fn begin_try(&mut self, there: &BTreeSet<MemberNumber>) -> bool {
        if self.waits_for.is_empty() && !self.is_otherwise {
            return false;
        }
        if !self.waits_for.is_empty() && there.is_empty() && !self.is_otherwise {
            self.tries = 0;
            return false;
        }
        let pause = match there.is_empty() {
            true => TRY_AGAIN,
            false => REST,
        };
        let pause = pause * 2u32.saturating_pow(self.tries.min(10));
        let is_due = self
            .tried
            .is_some_and(|at| at.elapsed() >= pause.min(TRY_AGAIN_MAX));
        self.tries += u32::from(is_due);
        is_due
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    /// Removals so far.
    removed: u64,
    /// How many of them have been buried, or tried.
    buried: u64,
    /// The count for which a request has waited in vain: no other request waits for it, or all
    /// threads might.
    given_up: u64,
    /// A request found no room: removed files must not wait.
    is_wanted: bool,
}

impl Burials {
    /// Counts one more, or one that needs another try.
    pub(crate) fn one_more(&self) {
        locked(&self.counts).removed += 1;
    }

    /// Whether the file of this inode cannot be opened any more.
    pub(crate) fn has_closed_off(&self, inode: u64) -> bool {
        locked(&self.closed_off).contains(&inode)
    }

    /// Whether a request waits for room.
    fn is_wanted(&self) -> bool {
        locked(&self.counts).is_wanted
    }

    /// Takes the wish for room. Returns whether there are files to bury now. `has_rested`: long
    /// enough after the last time.
    fn take_due(&self, has_rested: bool) -> bool {
        let mut counts = locked(&self.counts);
        let is_wanted = std::mem::take(&mut counts.is_wanted);
        (has_rested || is_wanted) && counts.removed > counts.buried
    }

    /// The count for [`Burials::end`] when all present removed files are buried.
    fn begin(&self) -> u64 {
        locked(&self.counts).removed
    }

    fn end(&self, begun: u64) {
        let mut counts = locked(&self.counts);
        counts.buried = counts.buried.max(begun);
        drop(counts);
        self.ended.notify_all();
    }

    /// There is no room: waits for files removed before, at most until then.
    ///
    /// Returns  false: no room will come, or it does not come in time
    fn wait(&self, until: Instant) -> bool {
        let mut counts = locked(&self.counts);
        let wanted = counts.removed;
        if counts.buried >= wanted || counts.given_up > counts.buried {
            return false;
        }
        counts.is_wanted = true;
        if let Some(burier) = self.burier.get() {
            burier.unpark();
        }
        while counts.buried < wanted {
            let rest = until.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                counts.given_up = wanted;
                return false;
            }
            let waited = self.ended.wait_timeout(counts, rest);
            counts = waited.unwrap_or_else(PoisonError::into_inner).0;
            // A burial that ended meanwhile may have begun before the removal that this waits for.
            counts.is_wanted = true;
        }
        true
    }
}

/// A request's search for room.
#[derive(Debug, Default)]
pub(crate) struct RoomSought {
    until: Option<Instant>,
}

impl Door {
    /// Whether the objects of this inode must outlive its name: the name is its last, and it has
    /// objects or may get some.
    fn needs_burial(&self, victim: &OwnedFd, node: Option<&Arc<Node>>) -> Answer<bool> {
        let found = status(victim)?;
        let is_last = u32::from(found.stx_mode) & S_IFMT == S_IFREG && found.stx_nlink == 1;
        let is_open = node.is_some_and(|node| locked(&node.file).is_open());
        Ok(is_last && (is_open || found.stx_size > 0 || self.may_have_objects(victim)))
    }

    fn aside(&self, mut put: impl FnMut(&str) -> Answer<()>) -> Answer<String> {
        loop {
            let serial = self.removed_serial.fetch_add(1, Ordering::Relaxed);
            let name = format!("{:x}.{serial}", std::process::id());
            match put(&name) {
                Err(Errno::EXIST) => {}
                done => return done.map(|()| name),
            }
        }
    }

    /// unlink(2). Makes and removes links of one file one at a time, so that the last one is
    /// recognised.
    pub(crate) fn remove_name(
        &self,
        folder: &OwnedFd,
        name: &OsStr,
        victim: &OwnedFd,
    ) -> Answer<()> {
        let _links = locked(&self.links);
        let node = self.nodes.find(victim)?;
        if !self.needs_burial(victim, node.as_ref())? {
            return unlinkat(folder, name, AtFlags::empty());
        }
        let removed = self.pool.catalogue().removed();
        self.aside(|aside| renameat_with(folder, name, removed, aside, RenameFlags::NOREPLACE))?;
        self.nameless(node);
        Ok(())
    }

    /// `replace` puts another file under the victim's name.
    pub(crate) fn replace_name(
        &self,
        victim: &OwnedFd,
        replace: impl FnOnce() -> Answer<()>,
    ) -> Answer<()> {
        let _links = locked(&self.links);
        let node = self.nodes.find(victim)?;
        if !self.needs_burial(victim, node.as_ref())? {
            return replace();
        }
        let removed = self.pool.catalogue().removed();
        let aside = self.aside(|aside| linkat(victim, c"", removed, aside, AtFlags::EMPTY_PATH))?;
        let done = replace();
        if done.is_err() || status(victim)?.stx_nlink > 1 {
            // It kept its name, for instance as another name of the inode that was moved onto it.
            unlinkat(removed, aside.as_str(), AtFlags::empty())?;
            return done;
        }
        self.nameless(node);
        Ok(())
    }

    /// Enters files that have been open since earlier processes and have lost their last name. One
    /// that still has a name was about to be replaced.
    ///
    /// Assumes  no request comes yet
    pub(crate) fn know_nameless(&self) -> Answer<()> {
        let removed = self.pool.catalogue().removed();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = openat(removed, c".", flags, Mode::empty())?;
        let mut room = Vec::with_capacity(8192);
        let mut names = Vec::new();
        let mut entries = RawDir::new(folder, room.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            let entry = entry?;
            if self.has_open(entry.ino()) {
                names.push(entry.file_name().to_owned());
            }
        }
        for name in names {
            let found = statat(removed, &name, AtFlags::SYMLINK_NOFOLLOW)?;
            if found.st_nlink > 1 {
                unlinkat(removed, &name, AtFlags::empty())?;
            } else if let Ok(node) = self.nodes.get(self.nodes.number_of(found.st_ino)) {
                locked(&node.file).nameless = true;
            }
        }
        Ok(())
    }

    /// Whether the file is open whose stub has this inode number.
    pub(crate) fn has_open(&self, inode: u64) -> bool {
        let node = self.nodes.get(self.nodes.number_of(inode));
        node.is_ok_and(|node| locked(&node.file).is_open())
    }

    /// Whether the kernel knows it, and it lost its name not long ago.
    fn may_be_opened(&self, inode: u64) -> bool {
        let node = self.nodes.get(self.nodes.number_of(inode));
        let since = node.ok().and_then(|node| locked(&node.file).nameless_since);
        since.is_some_and(|since| since.elapsed() < OPENED_UNTIL)
    }

    fn nameless(&self, node: Option<Arc<Node>>) {
        if let Some(node) = node {
            let mut slot = locked(&node.file);
            slot.nameless = true;
            slot.nameless_since = Some(Instant::now());
        }
        self.something_removed();
    }

    /// Gives the burying thread work.
    pub(crate) fn something_removed(&self) {
        self.burials.one_more();
    }

    /// A request found no room. Waits for files that were removed before it: a program that removes
    /// a file and then writes finds its room.
    ///
    /// Returns  whether another look is worth it
    pub(crate) fn room_comes(&self, sought: &mut RoomSought) -> bool {
        let until = *sought
            .until
            .get_or_insert_with(|| Instant::now() + ROOM_COMES_MAX);
        self.burials.wait(until)
    }

    /// Runs until the door closes.
    pub(crate) fn bury_now_and_then(&self) {
        let _ = self.burials.burier.set(std::thread::current());
        let mut last: Option<Instant> = None;
        while !self.closing.load(Ordering::Acquire) {
            std::thread::park_timeout(PAUSE);
            let has_rested = last.is_none_or(|last| last.elapsed() >= REST);
            // They may hang: no lock is held meanwhile.
            let mut there = locked(&self.burials.unburied).looked_for_next();
            there.retain(|&member| self.pool.can_bury_on(member));
            if has_rested && locked(&self.burials.unburied).begin_try(&there) {
                self.something_removed();
            }
            let waits = !self.burials.is_wanted();
            if self.burials.take_due(has_rested) {
                self.bury_removed(waits);
                last = Some(Instant::now());
            }
        }
        self.bury_removed(false);
    }

    /// As [`Pool::bury`]. A file that the kernel has not forgotten yet stays for the next time.
    ///
    /// Assumes  `burying` is held
    pub(crate) fn bury_unless(&self, in_use: FilesInUse<'_>) -> Result<Buried, PoolError> {
        let buried = self.pool.bury(&in_use, || locked(&self.links))?;
        if buried.left_count > 0 {
            self.something_removed();
        }
        Ok(buried)
    }

    /// Not beside the opening of a file by its stub: such a file has a name, or is known to be
    /// open.
    pub(crate) fn bury_removed(&self, waits: bool) {
        let _burying = locked(&self.burying);
        let begun = self.burials.begin();
        match self.bury_unless(FilesInUse { door: self, waits }) {
            Ok(buried) => {
                locked(&self.burials.unburied).note(&buried.kept);
                for error in buried.kept {
                    // Other files get the same error, each time.
                    self.say_once(format!("a deleted file keeps its space for now: {error}"));
                }
            }
            Err(error) => tracing::warn!("{error}"),
        }
        self.burials.end(begun);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn who_finds_no_room_waits_for_what_was_removed_before_and_for_nothing_else() {
        let burials = Burials::default();
        assert!(!burials.wait(soon()), "nothing was removed");
        burials.one_more();
        assert!(!burials.wait(Instant::now()), "nobody buries it");
        assert!(burials.take_due(false), "somebody wanted it");
        assert!(!burials.wait(soon()), "it was waited for in vain");
        burials.end(burials.begin());
        burials.one_more();
        std::thread::scope(|scope| {
            let begun = burials.begin();
            let waiting = scope.spawn(|| burials.wait(soon()));
            burials.end(begun);
            waiting.join().expect("it ends")
        });
        assert!(!burials.wait(soon()), "all of it was buried");
        assert!(!burials.take_due(true));
    }

    #[test]
    fn what_a_member_kept_is_tried_again_when_that_is_there() {
        let (one, two) = (MemberNumber(1), MemberNumber(2));
        let (none, some) = (BTreeSet::new(), BTreeSet::from([one]));
        let path = || "/m".into();
        let away = PoolError::Missing {
            member: one,
            path: path(),
            why: String::new(),
        };
        let read_only = PoolError::ReadOnly {
            member: two,
            path: path(),
        };
        let ago = |time| Instant::now().checked_sub(time);
        let mut unburied = Unburied::default();
        assert!(!unburied.begin_try(&some), "nothing is kept");
        unburied.note(&[away, read_only]);
        assert!(
            unburied.looked_for_next().is_empty(),
            "it was tried just now"
        );
        (unburied.looked, unburied.tried) = (ago(REST), ago(REST));
        assert_eq!(unburied.looked_for_next(), BTreeSet::from([one, two]));
        assert!(!unburied.begin_try(&none), "they are away");
        assert!(
            unburied.looked_for_next().is_empty(),
            "and were just looked for"
        );
        assert!(unburied.begin_try(&some), "one is there");
        unburied.note(&[]);
        assert_eq!(unburied.tries, 0);

        // If nothing shows when it would succeed, the tries become less frequent.
        unburied.note(&[PoolError::NoRoom]);
        assert!(!unburied.begin_try(&none));
        unburied.tried = ago(TRY_AGAIN);
        assert!(unburied.begin_try(&none));
        unburied.note(&[PoolError::NoRoom]);
        unburied.tried = ago(TRY_AGAIN);
        assert!(!unburied.begin_try(&none));
        unburied.tried = ago(TRY_AGAIN * 2);
        assert!(unburied.begin_try(&none));
        for _ in 0..40 {
            unburied.note(&[PoolError::NoRoom]);
            unburied.tried = ago(TRY_AGAIN_MAX);
            assert!(unburied.begin_try(&none), "it is never given up");
        }
    }

    #[test]
    fn a_burial_that_began_before_is_not_the_one_that_is_waited_for() {
        let burials = Burials::default();
        burials.one_more();
        let begun = burials.begin();
        burials.one_more();
        burials.end(begun);
        assert!(burials.take_due(true), "the second one is to be buried");
        assert!(!burials.wait(Instant::now()));
        burials.end(burials.begin());
        assert!(!burials.take_due(true));
    }
}
