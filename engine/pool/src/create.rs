// SPDX-License-Identifier: Apache-2.0
//! Makes a pool of existing folders: checks everything before it writes anything, and continues an
//! interrupted create.
//!
//! The trick: it first writes the catalogue's format file under another name, the **plan**. This
//! has the ids, so that a second run recognises the work of the first one. The file gets its own
//! name last; a folder without a file of that name is no pool.

use crate::catalogue::{NUMBERS, REMOVED, TREE};
use crate::error::PoolError;
use crate::format::{
    self, CatalogueFormat, CatalogueIdentity, FORMAT_FILE, Format, MemberEntry, MemberFormat,
    MemberId,
};
use crate::member::random;
use crate::pool::Pool;
use crate::refusal::{FolderRefusal, Occupant, PoolFolder, Role, refused};
use crate::rules::Rules;
use crate::xattr::{self, HIDDEN_PREFIX};
use rushes_core::pool::tidy::Schedule;
use rushes_core::pool::{MemberNumber, Policy, PoolId, Wish};
use rustix::fs::{
    AtFlags, FlockOperation, Mode, OFlags, chmodat, fchmod, flock, fstat, fsync, mkdirat, open,
    openat, renameat, statat, syncfs, unlinkat,
};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

/// The catalogue's format file before the pool is one.
const PLAN: &str = "rushes-pool.plan";
/// Below it are a member's objects.
pub(crate) const OBJECTS: &str = "objects";
/// Every new ext4 has this.
pub(crate) const LOST_AND_FOUND: &str = "lost+found";
/// A file that a create makes and deletes again to test a file system.
pub(crate) const PROBE: &str = "rushes-pool.probe";
/// Most members of one pool.
pub const MEMBER_COUNT_MAX: usize = 1024;
/// As many bytes as the layout of a file in one segment. Units: bytes.
const PROBE_BYTES: usize = 56;

/// The parts of a future pool.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// A folder for the directory tree.
    pub catalogue: PathBuf,
    /// A folder each, on file systems that are mounted.
    pub members: Vec<PathBuf>,
    /// How members are chosen.
    pub policy: Policy,
}

/// A pool that was made.
#[derive(Debug)]
pub struct Created {
    /// Opened to look.
    pub pool: Pool,
    /// An earlier create had been interrupted, and this one finished it.
    pub is_resumed: bool,
}

/// A folder of the future pool, locked so that no other create takes it.
pub(crate) struct Folder {
    role: Role,
    pub(crate) path: PathBuf,
    pub(crate) fd: OwnedFd,
    device: u64,
    inode: u64,
    /// The content of its format file. None: it has none.
    pub(crate) format: Option<Format>,
}

/// Make a pool, durably.
///
/// `progress`  called for each member that is ready: how many are, of how many
/// Errors   [`PoolError::Refused`] names the folder and its fault; then nothing was changed
pub fn create(
    wanted: &Wanted,
    mut progress: impl FnMut(usize, usize),
) -> Result<Created, PoolError> {
    let member_count = wanted.members.len();
    if !(1..=MEMBER_COUNT_MAX).contains(&member_count) {
        return refused(FolderRefusal::MemberCount {
            count: member_count,
        });
    }
    let catalogue = Folder::enter(Role::Catalogue, &wanted.catalogue)?;
    let mut members = Vec::with_capacity(member_count);
    for (path, number) in wanted.members.iter().zip(0u16..) {
        members.push(Folder::enter(Role::Member(MemberNumber(number)), path)?);
    }
    all_apart(&catalogue, &members)?;
    for folder in [&catalogue].into_iter().chain(&members) {
        folder.lock()?;
    }
    if let Some(Format::Catalogue(made)) = &catalogue.format
        && is_as_wanted(made, wanted.policy, &members)
    {
        // A command that was killed after its last step is repeated all the same.
        return Ok(Created {
            pool: Pool::look(&catalogue.path)?,
            is_resumed: true,
        });
    }
    let plan = catalogue.plan()?;
    let is_resumed = plan.is_some();
    if let Some(plan) = &plan {
        same_as_wanted(plan, wanted.policy, &catalogue, &members)?;
    }
    for folder in [&catalogue].into_iter().chain(&members) {
        folder.check_in_no_pool()?;
    }
    catalogue.check_free(plan.as_ref(), None)?;
    for (at, member) in members.iter().enumerate() {
        let entry = plan.as_ref().map(|plan| &plan.members[at]);
        member.check_free(plan.as_ref(), entry)?;
    }
    for folder in [&catalogue].into_iter().chain(&members) {
        folder.probe_records()?;
    }

    let plan = match plan {
        Some(plan) => plan,
        None => {
            let plan = new_plan(wanted.policy, &members)?;
            let format = Format::Catalogue(plan.clone());
            format::write(catalogue.fd.as_fd(), &catalogue.path, PLAN, &format)?;
            plan
        }
    };
    catalogue.furnish_catalogue()?;
    for (at, (member, entry)) in members.iter().zip(&plan.members).enumerate() {
        member.furnish_member(&plan, entry)?;
        progress(at + 1, member_count);
    }
    catalogue.failed(
        "name the catalogue",
        renameat(&catalogue.fd, PLAN, &catalogue.fd, FORMAT_FILE)
            .and_then(|()| fsync(&catalogue.fd)),
    )?;
    Ok(Created {
        pool: Pool::look(&catalogue.path)?,
        is_resumed,
    })
}

/// No folder twice, none in another. Bind mounts may hide that one is in another; then the outer
/// one is not empty, which `check_free` refuses.
pub(crate) fn all_apart(catalogue: &Folder, members: &[Folder]) -> Result<(), PoolError> {
    let all: Vec<&Folder> = [catalogue].into_iter().chain(members).collect();
    for (at, one) in all.iter().enumerate() {
        for other in &all[at + 1..] {
            let (outer, inner) = if other.path.starts_with(&one.path) {
                (one, other)
            } else {
                (other, one)
            };
            if (one.device, one.inode) == (other.device, other.inode) {
                return refused(FolderRefusal::Twice {
                    path: one.path.clone(),
                    roles: [one.role, other.role],
                });
            }
            if inner.path.starts_with(&outer.path) {
                return refused(FolderRefusal::Nested {
                    inner: inner.named(),
                    outer: outer.named(),
                });
            }
        }
    }
    Ok(())
}

/// A folder that is a catalogue's or a member's, of any pool, and its part there; None: it is none.
pub(crate) fn of_pool(folder: &Path) -> Option<(&Path, Occupant)> {
    // A folder that cannot be entered shows no format file.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let fd = open(folder, flags, Mode::empty()).ok()?;
    let of = match format::read(fd.as_fd(), FORMAT_FILE) {
        Ok(None) | Err(format::FormatFault::Failed(_)) => return None,
        Ok(Some(Format::Catalogue(of))) => Occupant::Catalogue(of.pool),
        Ok(Some(Format::Member(of))) => Occupant::Member(of.number, of.pool),
        Err(format::FormatFault::Wrong(_)) => Occupant::Unknown,
    };
    Some((folder, of))
}

fn is_as_wanted(plan: &CatalogueFormat, policy: Policy, members: &[Folder]) -> bool {
    let planned = plan.members.iter().map(|entry| &entry.path);
    policy == plan.policy && planned.eq(members.iter().map(|member| &member.path))
}

/// An interrupted create goes on only if it is repeated.
fn same_as_wanted(
    plan: &CatalogueFormat,
    policy: Policy,
    catalogue: &Folder,
    members: &[Folder],
) -> Result<(), PoolError> {
    if is_as_wanted(plan, policy, members) {
        return Ok(());
    }
    refused(FolderRefusal::OtherCreate {
        catalogue: catalogue.path.clone(),
        members: plan
            .members
            .iter()
            .map(|entry| entry.path.clone())
            .collect(),
        policy: plan.policy,
    })
}

fn new_plan(policy: Policy, members: &[Folder]) -> Result<CatalogueFormat, PoolError> {
    let id = || Ok::<u128, PoolError>(u128::from(random()?) << 64 | u128::from(random()?));
    let entries: Result<Vec<MemberEntry>, PoolError> = members
        .iter()
        .zip(0u16..)
        .map(|(member, number)| {
            Ok(MemberEntry::new(
                MemberNumber(number),
                MemberId(id()?),
                member.path.clone(),
            ))
        })
        .collect();
    Ok(CatalogueFormat {
        catalogue: CatalogueIdentity::default(),
        pool: PoolId(id()?),
        policy,
        wish: Wish::default(),
        rules: Rules::default(),
        tidy: Schedule::Off,
        members: entries?,
        members_given: 0,
        lost: BTreeSet::new(),
    })
}

impl Folder {
    pub(crate) fn enter(role: Role, path: &Path) -> Result<Folder, PoolError> {
        let entered = path.canonicalize().and_then(|path| {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let fd = open(&path, flags, Mode::empty())?;
            let status = fstat(&fd)?;
            Ok((path, fd, status))
        });
        let (path, fd, status) = match entered {
            Ok(entered) => entered,
            Err(error) => {
                return refused(FolderRefusal::NotEntered {
                    folder: PoolFolder {
                        path: path.to_path_buf(),
                        role,
                    },
                    error,
                });
            }
        };
        let format = match format::read(fd.as_fd(), FORMAT_FILE) {
            Ok(format) => format,
            Err(fault) => {
                return refused(FolderRefusal::Format {
                    file: path.join(FORMAT_FILE),
                    role: Some(role),
                    fault,
                });
            }
        };
        Ok(Folder {
            role,
            path,
            fd,
            device: status.st_dev,
            inode: status.st_ino,
            format,
        })
    }

    pub(crate) fn named(&self) -> PoolFolder {
        PoolFolder {
            path: self.path.clone(),
            role: self.role,
        }
    }

    pub(crate) fn failed<T>(
        &self,
        operation: &'static str,
        done: Result<T, Errno>,
    ) -> Result<T, PoolError> {
        done.map_err(|error| PoolError::system(operation, self.named().to_string(), error))
    }

    pub(crate) fn lock(&self) -> Result<(), PoolError> {
        match flock(&self.fd, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(()),
            Err(Errno::WOULDBLOCK) => refused(FolderRefusal::Locked {
                folder: self.named(),
            }),
            Err(error) => self.failed("lock", Err(error)),
        }
    }

    /// The plan that an interrupted create has left in a catalogue.
    fn plan(&self) -> Result<Option<CatalogueFormat>, PoolError> {
        match format::read(self.fd.as_fd(), PLAN) {
            Ok(None) => Ok(None),
            Ok(Some(Format::Catalogue(plan))) => Ok(Some(plan)),
            Ok(Some(Format::Member(_))) => refused(FolderRefusal::MembersPlan {
                plan: self.path.join(PLAN),
            }),
            Err(fault) => refused(FolderRefusal::Format {
                file: self.path.join(PLAN),
                role: None,
                fault,
            }),
        }
    }

    /// It has no foreign data, and is of no other pool. `entry`: a member's, of the plan.
    pub(crate) fn check_free(
        &self,
        plan: Option<&CatalogueFormat>,
        entry: Option<&MemberEntry>,
    ) -> Result<(), PoolError> {
        let ours = match (plan, entry) {
            (Some(plan), Some(entry)) => Some(Format::Member(member_format(plan, entry))),
            _ => None,
        };
        match &self.format {
            None => {}
            found if found.is_some() && *found == ours => {}
            Some(Format::Catalogue(of)) => {
                return refused(FolderRefusal::IsCatalogue {
                    folder: self.named(),
                    pool: of.pool,
                });
            }
            Some(Format::Member(of)) => {
                return refused(FolderRefusal::IsMember {
                    folder: self.named(),
                    number: of.number,
                    pool: of.pool,
                });
            }
        }
        let mut known: BTreeSet<OsString> = [LOST_AND_FOUND, PROBE].map(OsString::from).into();
        if self.is_catalogue() {
            known.insert(format!("{PLAN}.tmp").into());
            if plan.is_some() {
                known.extend([PLAN, TREE, REMOVED, NUMBERS, "numbers.tmp"].map(OsString::from));
            }
        } else if plan.is_some() {
            known.extend([FORMAT_FILE, OBJECTS].map(OsString::from));
            known.insert(format!("{FORMAT_FILE}.tmp").into());
        }
        for name in self.names(Path::new(""))? {
            if !known.contains(&name) {
                return refused(FolderRefusal::NotEmpty {
                    folder: self.named(),
                    name,
                });
            }
        }
        if plan.is_none() {
            return Ok(());
        }
        // A folder that an interrupted create made has no data; one that has is not ours.
        let must_be_empty: Vec<PathBuf> = if self.is_catalogue() {
            [TREE, REMOVED].map(PathBuf::from).into()
        } else {
            all_object_folders().map(PathBuf::from).collect()
        };
        for folder in must_be_empty {
            if let Some(name) = self.names(&folder)?.into_iter().next() {
                return refused(FolderRefusal::Strange {
                    folder: self.named(),
                    below: folder,
                    name,
                });
            }
        }
        Ok(())
    }

    /// None of its outer folders is a catalogue's or a member's, of this pool or another one.
    pub(crate) fn check_in_no_pool(&self) -> Result<(), PoolError> {
        match self.path.ancestors().skip(1).find_map(of_pool) {
            None => Ok(()),
            Some((outer, occupant)) => refused(FolderRefusal::InPool {
                folder: self.named(),
                outer: outer.to_path_buf(),
                occupant,
            }),
        }
    }

    fn is_catalogue(&self) -> bool {
        self.role == Role::Catalogue
    }

    /// The names in a folder below it; one that is not there has none.
    pub(crate) fn names(&self, below: &Path) -> Result<Vec<OsString>, PoolError> {
        let path = self.path.join(below);
        let listed = std::fs::read_dir(&path).and_then(|entries| {
            entries
                .map(|entry| entry.map(|entry| entry.file_name()))
                .collect()
        });
        match listed {
            Ok(names) => Ok(names),
            Err(error)
                if error.kind() == std::io::ErrorKind::NotFound && below != Path::new("") =>
            {
                Ok(Vec::new())
            }
            Err(error) => Err(PoolError::system("list", path.display().to_string(), error)),
        }
    }

    /// Its file system can be written to and keeps attributes that only root sees.
    pub(crate) fn probe_records(&self) -> Result<(), PoolError> {
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let tried = openat(&self.fd, PROBE, flags, Mode::RUSR | Mode::WUSR).and_then(|fd| {
            let name = format!("{HIDDEN_PREFIX}probe");
            let kept = xattr::set(fd.as_fd(), &name, &[0; PROBE_BYTES]);
            unlinkat(&self.fd, PROBE, AtFlags::empty())?;
            Ok(kept)
        });
        match tried {
            Ok(Ok(())) => Ok(()),
            Ok(Err(Errno::OPNOTSUPP)) => refused(FolderRefusal::NoAttributes {
                folder: self.named(),
            }),
            Ok(Err(Errno::PERM)) | Err(Errno::ACCESS | Errno::PERM) => {
                refused(FolderRefusal::NotWritable {
                    folder: self.named(),
                })
            }
            Err(Errno::ROFS) => refused(FolderRefusal::ReadOnly {
                folder: self.named(),
            }),
            Ok(Err(error)) | Err(error) => self.failed("write to", Err(error)),
        }
    }

    fn make_folder(&self, name: &str, mode: Mode) -> Result<(), PoolError> {
        match mkdirat(&self.fd, name, mode) {
            // Set the mode again: the process's umask may have taken bits away.
            Ok(()) => self.failed(
                "make a folder in",
                chmodat(&self.fd, name, mode, AtFlags::empty()),
            ),
            Err(Errno::EXIST) => Ok(()),
            Err(error) => self.failed("make a folder in", Err(error)),
        }
    }

    pub(crate) fn furnish_catalogue(&self) -> Result<(), PoolError> {
        let own = Mode::RWXU;
        // Only the door gets in here: checks of rights begin at `tree`, as at the root of a file
        // system.
        self.failed("close to others", fchmod(&self.fd, own))?;
        let all = own | Mode::RGRP | Mode::XGRP | Mode::ROTH | Mode::XOTH;
        self.make_folder(TREE, all)?;
        self.make_folder(REMOVED, own)?;
        if self.failed("look at", exists(&self.fd, NUMBERS))? {
            return Ok(());
        }
        format::replace_file(self.fd.as_fd(), &self.path, NUMBERS, b"1\n")
    }

    pub(crate) fn furnish_member(
        &self,
        plan: &CatalogueFormat,
        entry: &MemberEntry,
    ) -> Result<(), PoolError> {
        if self.format.is_some() {
            return Ok(());
        }
        self.make_folder(OBJECTS, Mode::RWXU)?;
        for folder in all_object_folders() {
            self.make_folder(&folder, Mode::RWXU)?;
        }
        // The format file says that all this is there.
        self.failed("make durable", syncfs(&self.fd))?;
        let format = Format::Member(member_format(plan, entry));
        format::write(self.fd.as_fd(), &self.path, FORMAT_FILE, &format)
    }
}

/// The format file of a member of this catalogue.
pub(crate) fn member_format(catalogue: &CatalogueFormat, entry: &MemberEntry) -> MemberFormat {
    MemberFormat {
        pool: catalogue.pool,
        catalogue: catalogue.catalogue,
        number: entry.number,
        id: entry.id,
    }
}

fn all_object_folders() -> impl Iterator<Item = String> {
    (0..=u8::MAX).map(|at| format!("{OBJECTS}/{at:02x}"))
}

fn exists(folder: &OwnedFd, name: &str) -> Result<bool, Errno> {
    match statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(_) => Ok(true),
        Err(Errno::NOENT) => Ok(false),
        Err(error) => Err(error),
    }
}
