// SPDX-License-Identifier: Apache-2.0
//! The loop's part for shares whose file systems come and go: finds them again, serves them, and
//! releases their former mounts.
//!
//! A share is known by its path. That path may come to lie on another mount: the disk was
//! unmounted, was mounted again, or came late. The kernel's table of mounts shows it, and so does a
//! door that brings a descriptor of another mount; a worker then looks where the path leads, and
//! the share is opened again. Files that were opened on the former mount stay open there until
//! their last close, and the daemon writes the bytes that clients wrote to them; then nothing of
//! ours keeps that mount in use. See docs/decisions/0042.

use crate::calibrate::Calibration;
use crate::config::{Config, ShareConfig};
use crate::doctor::counted;
use crate::error::ServeError;
use crate::event_loop::Daemon;
use crate::files::Files;
use crate::jobs::{Job, OpenedShare};
use crate::mounts::{MountTable, MountWatch};
use crate::share::{ServedShare, Share};
use crate::worker::Urgency;
use rushes_core::server::{Event, FileKey};
use rushes_core::units::{Duration, FileId, Instant};
use rushes_sys::space::{self, WriteFile};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Weak};

/// How often the daemon looks for absent shares: a program may make the folder or correct a link,
/// which the table of mounts does not show.
const LOOK_AGAIN: Duration = Duration::from_s(5);
/// Descriptors that doors bring make us look at a share no more often than this.
const LOOK_EVERY: Duration = Duration::from_s(1);

/// The places of shares, as far as they are known.
#[derive(Debug, Default)]
pub(crate) struct Moves {
    watch: Option<MountWatch>,
    /// Configured, and not there: why so.
    absent: BTreeMap<String, (ShareConfig, String)>,
    /// Shares that a worker looks at. A look has no bound in time, so there is one at a time for
    /// each share.
    looking: HashSet<String>,
    /// Of these, those for which something has changed meanwhile.
    missed: HashSet<String>,
    look_again_at: Instant,
    looked_at: Instant,
    /// Shares as they were before they moved, while any of their files is in use.
    left: Vec<LeftShare>,
    /// New descriptors of files that were opened through another mount. A file takes them over when
    /// all its writes through the former mount are durable.
    to_write: HashMap<FileId, (u64, WriteFile)>,
}

#[derive(Debug)]
struct LeftShare {
    share: Weak<Share>,
    name: String,
    /// Where it was mounted.
    point: String,
    device: String,
}

impl LeftShare {
    /// Its open files.
    fn files(&self, files: &Files) -> Vec<FileId> {
        let Some(share) = self.share.upgrade() else {
            return Vec::new();
        };
        let is_of_it = |id: &FileId| {
            let file = files.get(*id);
            file.is_some_and(|file| Arc::ptr_eq(&file.share, &share))
        };
        let keys = files.keys().into_iter();
        keys.filter_map(|key| files.id_of(key))
            .filter(is_of_it)
            .collect()
    }

    fn is_used(&self, files: &Files) -> bool {
        !self.files(files).is_empty()
    }
}

impl Moves {
    /// A daemon that cannot watch mounts notices a move when doors bring files, and at a reload.
    pub(crate) fn new() -> Moves {
        let watch = MountWatch::new()
            .map_err(|error| {
                tracing::warn!(
                    "cannot watch mounts: {error}; a file system that comes back is found later"
                )
            })
            .ok();
        Moves {
            watch,
            ..Moves::default()
        }
    }

    /// Shares that are configured and not there, each with a sentence.
    pub(crate) fn absent(&self) -> impl Iterator<Item = (&ShareConfig, &str)> {
        self.absent
            .values()
            .map(|(config, why)| (config, why.as_str()))
    }

    /// Why a share of this name is not there.
    pub(crate) fn why_absent(&self, name: &str) -> Option<&str> {
        let mut all = self.absent();
        all.find(|(config, _)| config.name.eq_ignore_ascii_case(name))
            .map(|(_, why)| why)
    }
}

impl Daemon {
    /// A configured share is not there now.
    pub(crate) fn share_is_absent(&mut self, share: ShareConfig, error: &ServeError) {
        let sentence = format!("{error}; it is served as soon as it is there");
        let name = share.name.clone();
        let former = self.moves.absent.insert(name, (share, sentence.clone()));
        if former.is_none_or(|(_, said)| said != sentence) {
            tracing::warn!("{sentence}");
        }
    }

    /// Now and then: has something been mounted or unmounted?
    pub(super) fn look_at_mounts(&mut self, now: Instant) {
        if self.only_recovers {
            return;
        }
        let watch = self.moves.watch.as_ref();
        if watch.is_some_and(MountWatch::has_changed) {
            self.compare_with_table();
            self.look_for_absent();
        } else if now >= self.moves.look_again_at {
            self.look_for_absent();
        }
        self.exchange_descriptors();
        self.let_go_of_left();
    }

    /// A file that is written was opened through another mount.
    pub(super) fn write_through_other(&mut self, id: FileId, generation: u64, opened: WriteFile) {
        self.moves.to_write.insert(id, (generation, opened));
        self.exchange_descriptors();
    }

    /// The descriptor that writes is the one that syncs: the kernel reports a failure to write its
    /// cache to the descriptors that were there. See decision 0036.
    fn exchange_descriptors(&mut self) {
        for (id, (generation, opened)) in std::mem::take(&mut self.moves.to_write) {
            let Some(file) = self.files.same_mut(id, generation) else {
                continue;
            };
            if self.server.is_unsettled(id) {
                self.moves.to_write.insert(id, (generation, opened));
            } else if let Some(written) = &mut file.written {
                // An error that the former descriptors got must not count against its first write.
                let _ = space::untold_error(&*opened.direct);
                written.file = Ok(opened);
                self.files.count_again(id);
            }
        }
    }

    /// Look at all shares that lie on another mount by the table than in our state.
    fn compare_with_table(&mut self) {
        let table = match MountTable::read() {
            Ok(table) => table,
            Err(error) => {
                self.say_once(format!("the table of mounts cannot be read: {error}"));
                return;
            }
        };
        let elsewhere = |served: &&Arc<ServedShare>| {
            let now = table.over(&served.share.real);
            now.is_some_and(|now| now != served.share.mount) && !served.is_nowhere
        };
        let moved = self.shares.iter().filter(elsewhere).cloned();
        for served in moved.collect::<Vec<_>>() {
            self.look_at(&served);
        }
    }

    /// A door has brought a file of a mount that we do not know: perhaps its share's path leads
    /// there by now.
    pub(super) fn look_after_stranger(&mut self, served: &Arc<ServedShare>, now: Instant) {
        if now >= self.moves.looked_at + LOOK_EVERY {
            self.moves.looked_at = now;
            self.look_at(served);
        }
    }

    fn look_at(&mut self, served: &ServedShare) {
        let known = (!served.share.is_left()).then(|| served.share.place());
        self.push_look(served.share.config.clone(), known);
    }

    fn look_for_absent(&mut self) {
        self.moves.look_again_at = rushes_sys::clock::now() + LOOK_AGAIN;
        let absent = self.moves.absent.values().map(|(config, _)| config.clone());
        for config in absent.collect::<Vec<_>>() {
            self.push_look(config, None);
        }
        let nowhere = self.shares.iter().filter(|served| served.is_nowhere);
        for served in nowhere.cloned().collect::<Vec<_>>() {
            self.look_at(&served);
        }
    }

    fn push_look(&mut self, share: ShareConfig, known: Option<crate::share::Place>) {
        if !self.moves.looking.insert(share.name.clone()) {
            self.moves.missed.insert(share.name);
            return;
        }
        let name = share.name.clone();
        let job = Job::Look {
            share,
            config: self.config.clone(),
            known,
        };
        if self.workers.push(Urgency::Now, job).is_err() {
            self.moves.looking.remove(&name);
        }
    }

    pub(super) fn looked(
        &mut self,
        share: ShareConfig,
        result: Result<Option<OpenedShare>, ServeError>,
    ) {
        let name = share.name.clone();
        self.moves.looking.remove(&name);
        match result {
            Ok(None) => {}
            Ok(Some(opened)) => {
                self.share_is_at(*opened);
            }
            Err(error) => self.share_leads_nowhere(share, &error),
        }
        if !self.moves.missed.remove(&name) {
            return;
        }
        let index = self.index_of(&name);
        if let Some(served) = index.and_then(|index| self.shares.get(index)).cloned() {
            self.look_at(&served);
        } else if let Some((config, _)) = self.moves.absent.get(&name).cloned() {
            self.push_look(config, None);
        }
    }

    /// Its open files stay open; doors can open no other.
    fn share_leads_nowhere(&mut self, share: ShareConfig, error: &ServeError) {
        let trouble = error.to_string();
        let Some(index) = self.index_of(&share.name) else {
            return self.share_is_absent(share, error);
        };
        let Some(served) = self.shares.get(index).cloned() else {
            return;
        };
        if served.trouble.as_ref() != Some(&trouble) {
            tracing::warn!("{trouble}");
        }
        self.leave(&served);
        let served = ServedShare {
            trouble: Some(trouble),
            is_nowhere: true,
            ..ServedShare::clone(&served)
        };
        self.put_share(index, served);
        self.let_go_of_left();
    }

    fn index_of(&self, name: &str) -> Option<usize> {
        let mut all = self.shares.iter();
        all.position(|served| served.share.config.name.eq_ignore_ascii_case(name))
    }

    /// A worker has opened a share that is new, or that lies elsewhere by now. Returns the share as
    /// it is served from now on.
    pub(super) fn share_is_at(
        &mut self,
        (share, calibration): (Share, Option<Calibration>),
    ) -> Arc<Share> {
        let model = calibration.map(|calibration| calibration.model());
        let Some(index) = self.index_of(&share.config.name) else {
            return self.add_share(share, model);
        };
        let Some(former) = self.shares.get(index).cloned() else {
            return Arc::new(share);
        };
        if !former.share.is_left() && former.share.place() == share.place() {
            // Another worker has opened it already.
            return former.share.clone();
        }
        let device = self.device_of(&share, model);
        let name = self.device_name(device);
        let (trouble, home) = trouble_of(&share, &name, &former.home);
        tracing::warn!(
            "share {:?}: {} lies on another mount now: {} ({}, device {name}); before it was {} (device {})",
            share.config.name,
            share.config.path.display(),
            share.mount_point.display(),
            share.file_system,
            former.share.mount_point.display(),
            self.device_name(former.device),
        );
        if let Some(trouble) = &trouble {
            tracing::warn!("{trouble}");
        }
        self.leave(&former);
        drop(former);
        let share = Arc::new(share);
        self.warm(&share);
        let served = ServedShare {
            share: share.clone(),
            device,
            trouble,
            is_nowhere: false,
            home,
        };
        self.put_share(index, served);
        self.look_for_kept_soon();
        self.let_go_of_left();
        share
    }

    fn leave(&mut self, former: &ServedShare) {
        if former.share.is_left() {
            return;
        }
        former.share.let_go();
        self.moves.left.push(LeftShare {
            share: Arc::downgrade(&former.share),
            name: former.share.config.name.clone(),
            point: former.share.mount_point.display().to_string(),
            device: self.device_name(former.device),
        });
    }

    /// Replace the served share, for sessions too.
    fn put_share(&mut self, index: usize, served: ServedShare) {
        let served = Arc::new(served);
        let name = &served.share.config.name;
        for door in self.sessions.doors.values_mut() {
            if door.share.share.config.name.eq_ignore_ascii_case(name) {
                door.share = served.clone();
            }
        }
        if let Some(place) = self.shares.get_mut(index) {
            *place = served;
        }
    }

    /// Stop waiting for shares that are not configured any more.
    pub(super) fn moves_only_of(&mut self, config: &Config) {
        let absent = &mut self.moves.absent;
        absent.retain(|name, _| config.share(name).is_some());
    }

    /// The share is there: it is absent no longer.
    pub(super) fn share_is_there(&mut self, name: &str) {
        let is_it = |key: &String| key.eq_ignore_ascii_case(name);
        self.moves.absent.retain(|key, _| !is_it(key));
    }

    /// Close the files of a former mount after their last use, even if some of their bytes are
    /// cached.
    fn let_go_of_left(&mut self) {
        if self.moves.left.is_empty() {
            return;
        }
        for key in self.files_of_left() {
            self.feed(Event::LetGo { key });
        }
        let files = &self.files;
        let are_exchanged = self.moves.to_write.is_empty();
        self.moves.left.retain(|left| {
            let is_used = left.is_used(files) || !are_exchanged;
            if !is_used {
                tracing::info!(
                    "share {:?}: the file system that was mounted on {} (device {}) is no longer in use",
                    left.name,
                    left.point,
                    left.device
                );
            }
            is_used
        });
    }

    fn files_of_left(&self) -> Vec<FileKey> {
        let keys = self.files.keys().into_iter();
        keys.filter(|key| {
            let file = self.files.by_key(*key);
            file.is_some_and(|file| file.share.is_left())
        })
        .collect()
    }

    /// True: a file of a former mount on this device is still in use.
    pub(super) fn is_left_on(&self, device: &str) -> bool {
        let mut left = self.moves.left.iter();
        left.any(|left| left.device == device && left.is_used(&self.files))
    }

    /// Sentences on the files of former mounts that are still in use.
    pub(super) fn notes_of_left(&self) -> Vec<String> {
        let note = |left: &LeftShare| {
            let ids = left.files(&self.files);
            let (mut count, mut dirty_count) = (0_usize, 0);
            for id in ids {
                count += 1;
                dirty_count += u32::from(self.server.is_dirty(id));
            }
            (count > 0).then(|| {
                format!(
                    "share {:?}: still in use: {} of the file system that was mounted on {} before \
                     (device {}), {dirty_count} of them with bytes to be written; the daemon uses \
                     it until clients have closed them and they are written{}",
                    left.name,
                    counted(count, "file"),
                    left.point,
                    left.device,
                    if dirty_count > 0 {
                        " (if that device is gone and came back as another, restart the daemon: it writes them there)"
                    } else {
                        ""
                    }
                )
            })
        };
        self.moves.left.iter().filter_map(note).collect()
    }
}

/// The fault of the place where a share lies, in a sentence, and its home from now on.
pub(super) fn trouble_of(
    share: &Share,
    device: &str,
    home: &(std::path::PathBuf, String),
) -> (Option<String>, (std::path::PathBuf, String)) {
    let path = share.config.path.display();
    let point = share.mount_point.display();
    let is_above = home.0 != share.mount_point && home.0.starts_with(&share.mount_point);
    let now = format!("the folder lies on {point} (device {device})");
    let trouble = if let Some(lacks) = &share.lacks {
        let lacks = lacks.display();
        Some(format!(
            "share {:?}: {lacks} is not mounted, although /etc/fstab has a file system for it: \
             {now} until it is; mount it",
            share.config.name
        ))
    } else if is_above {
        Some(format!(
            "share {:?}: the file system of {path} is not mounted (it was on {}, device {}): {now} until it is; mount it",
            share.config.name,
            home.0.display(),
            home.1
        ))
    } else {
        None
    };
    let home = match is_above {
        true => home.clone(),
        false => (share.mount_point.clone(), device.to_owned()),
    };
    (trouble, home)
}
