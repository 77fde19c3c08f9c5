// SPDX-License-Identifier: Apache-2.0
//! A member's folder that no pool has any more: its disk was given up and came back, or its pool is gone. It is freed as a destroy frees one. What a pool still has is not
//! freed here, nor is anything put back into a pool.
//!
//! The trick: a member does not say where its catalogue is. So catalogues are looked for wherever one may be known to lie: those that are mounted, those that logs of names
//! speak of, and on the disks of this machine. If none is found, that is said, and who knows better decides.

use crate::change;
use crate::create::{self, Folder, refused};
use crate::destroy::{self, Destroyed, Files, vacate};
use crate::error::PoolError;
use crate::find::{folders_on_disks, mounted, mounts_below};
use crate::format::{FORMAT_FILE, Format, MemberEntry, MemberFormat, format_at, format_in};
use crate::member::{Listed, Member, MemberState};
use crate::names::catalogues_in_logs;
use rushes_core::pool::check::Mark;
use rushes_core::pool::{MemberNumber, PoolId};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// What a catalogue's format file is called while something is done to its pool that was interrupted.
const UNDER_WAY: [&str; 3] = [create::PLAN, change::PLAN, destroy::DESTROYING];

/// A member's folder that may be freed.
#[derive(Debug)]
pub struct Orphan {
    folder: Folder,
    member: Member,
    of: MemberFormat,
    /// Of its pool, which has it no more. None: none was found.
    pub catalogue: Option<PathBuf>,
    /// Files that have bytes in it.
    pub file_count: u64,
    /// Objects, and what has the name of one and cannot be read.
    pub object_count: u64,
    /// As long as the objects are. Units: bytes.
    pub bytes: u64,
}

impl Orphan {
    /// Look whether it may be freed. Nothing is changed.
    ///
    /// Errors   [`PoolError::Refused`]: it is no member's, or its pool has it still
    pub fn look(path: &Path) -> Result<Orphan, PoolError> {
        let folder = Folder::enter(String::from("the member"), path)?;
        let of = match &folder.format {
            Some(Format::Member(of)) => *of,
            Some(Format::Catalogue(_)) => {
                return refused(format!(
                    "{0} is the catalogue of a pool, not a member; expected a folder with the file {FORMAT_FILE} of a member (`rushes pool destroy {0}` undoes the pool)",
                    folder.path.display()
                ));
            }
            None => {
                return refused(format!(
                    "{} is no member of a pool; expected a folder with the file {FORMAT_FILE} of one",
                    folder.path.display()
                ));
            }
        };
        folder.lock()?;
        let entry = MemberEntry::new(of.number, of.id, folder.path.clone());
        let mut orphan = Orphan {
            member: Member::new(&entry, of.pool),
            of,
            folder,
            catalogue: None,
            file_count: 0,
            object_count: 0,
            bytes: 0,
        };
        if orphan.member.look()?.state == MemberState::ReadOnly {
            let (member, path) = (of.number, orphan.folder.path.clone());
            return Err(PoolError::ReadOnly { member, path });
        }
        if let Some(mount) = mounts_below(&orphan.folder.path)?.first() {
            return refused(format!(
                "something is mounted on {}, inside of {}; unmount it first",
                mount.display(),
                orphan.folder.path.display()
            ));
        }
        for catalogue in orphan.catalogues()? {
            orphan.must_be_let_go_by(&catalogue)?;
            orphan.catalogue.get_or_insert(catalogue);
        }
        orphan.count()?;
        Ok(orphan)
    }

    /// Every catalogue of its pool that is found.
    fn catalogues(&self) -> Result<Vec<PathBuf>, PoolError> {
        let mut named: BTreeSet<PathBuf> = mounted()?
            .into_iter()
            .map(|mounted| mounted.catalogue)
            .chain(catalogues_in_logs(&self.member))
            .collect();
        let mut asked = BTreeSet::new();
        for folder in folders_on_disks()? {
            // Others of its pool may have a log where it has none.
            if let Some(Format::Member(other)) = format_in(&folder, FORMAT_FILE)
                && other.pool == self.of.pool
            {
                let entry = MemberEntry::new(other.number, other.id, folder.clone());
                named.extend(catalogues_in_logs(&Member::new(&entry, other.pool)));
            }
            asked.insert(folder);
        }
        for folder in named {
            // It may list this one.
            if let Err(fault) = format_at(&folder, FORMAT_FILE) {
                return refused(format!(
                    "{} {fault}, so that it cannot be said whether a pool has {} still; expected a catalogue that can be read (by a newer Rushes, say)",
                    folder.join(FORMAT_FILE).display(),
                    self.folder.path.display()
                ));
            }
            asked.insert(folder);
        }
        asked.retain(|folder| {
            let names = UNDER_WAY.into_iter().chain([FORMAT_FILE]);
            names.filter_map(|name| format_in(folder, name)).any(
                |format| matches!(format, Format::Catalogue(format) if format.pool == self.of.pool),
            )
        });
        Ok(asked.into_iter().collect())
    }

    fn must_be_let_go_by(&self, catalogue: &Path) -> Result<(), PoolError> {
        let lists_it = |name: &str| match format_in(catalogue, name) {
            Some(Format::Catalogue(format)) => format
                .members
                .iter()
                .any(|entry| (entry.number, entry.id) == (self.of.number, self.of.id)),
            _ => false,
        };
        let (path, number) = (self.folder.path.display(), self.of.number.0);
        let catalogue_path = catalogue.display();
        if lists_it(FORMAT_FILE) {
            return refused(format!(
                "{path} is member {number} of the pool {catalogue_path}, which has it still; expected one that its pool has given up, or whose pool is gone. Empty it with `rushes pool drain \
                 {catalogue_path} {number}`, then `rushes pool remove {catalogue_path} {number}` frees it"
            ));
        }
        if let Some(name) = UNDER_WAY.into_iter().find(|name| lists_it(name)) {
            return refused(format!(
                "{path} is member {number} in {}, so that a create, an add or a destroy of that pool was interrupted; repeat that first",
                catalogue.join(name).display()
            ));
        }
        Ok(())
    }

    fn count(&mut self) -> Result<(), PoolError> {
        let mut files = BTreeSet::new();
        let (mut object_count, mut bytes) = (0, 0);
        self.member.list(|listed| {
            match listed {
                // It stays.
                Listed::Object { found, .. } if self.is_of_another(&found.mark) => {}
                Listed::Object { found, size } => {
                    object_count += 1;
                    bytes += size;
                    match found.mark {
                        Mark::Sound(mark) => {
                            files.insert((mark.file.number, mark.file.generation));
                        }
                        // Whose it is nobody can say; it is somebody's.
                        _ => {
                            files.insert((found.object.id.0, u32::MAX));
                        }
                    }
                }
                Listed::Unreadable(..) => object_count += 1,
                Listed::Stranger(_) => {}
            }
            Ok(())
        })?;
        self.file_count = files.len() as u64;
        (self.object_count, self.bytes) = (object_count, bytes);
        Ok(())
    }

    fn is_of_another(&self, mark: &Mark) -> bool {
        matches!(mark, Mark::Sound(mark) if mark.pool != self.of.pool)
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.folder.path
    }

    /// Of which pool it was.
    pub fn pool(&self) -> PoolId {
        self.of.pool
    }

    /// Which member of that.
    pub fn number(&self) -> MemberNumber {
        self.of.number
    }

    /// Free it, durably. When it is interrupted it is a member's folder still, and the same again goes on.
    ///
    /// Errors   [`PoolError::Refused`]: it has objects that are not to go
    pub fn free(self, files: Files) -> Result<Destroyed, PoolError> {
        if self.object_count > 0 && files == Files::None {
            return refused(format!(
                "{} has bytes of {} files, which would be lost for good; expected an empty member. Say --with-files if they may go",
                self.folder.path.display(),
                self.file_count
            ));
        }
        let mut destroyed = Destroyed::default();
        let root = self.member.root()?;
        vacate(self.of.pool, &self.member, &root, &mut destroyed)?;
        Ok(destroyed)
    }
}
