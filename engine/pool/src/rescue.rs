// SPDX-License-Identifier: Apache-2.0
//! A new catalogue from the members, when the old one is lost.
//!
//! Names, owners, rights, times and layouts come from the newest log of names; then fsck compares
//! every object that is there with them, so that objects without a known name get one in
//! `lost+found`. The rescue only reads members until the tree is whole. Until the last step the
//! catalogue's format file has another name: a repeated rescue deletes its work and makes it again.

use crate::catalogue::{LOCK, Lock, NUMBERS, REMOVED, TREE};
use crate::create::{Folder, LOST_AND_FOUND, PROBE, all_apart};
use crate::data::data_ranges;
use crate::error::PoolError;
use crate::format::{self, CatalogueFormat, CatalogueIdentity, FORMAT_FILE, Format, MemberEntry};
use crate::fsck::{Fsck, Issue, IssueKind, Progress, State, fsck, lost_folder};
use crate::member::{Access, Listed, MemberState};
use crate::names;
use crate::pool::Pool;
use crate::refusal::{RescueRefusal, Role, refused};
use crate::rules::Rules;
use crate::walk::open_below;
use crate::xattr::INODE_ATTRIBUTE;
use rushes_core::pool::check::{Holder, Mark, assemble, is_plain};
use rushes_core::pool::names::{Inode, Names, ROOT, is_newer};
use rushes_core::pool::tidy::Schedule;
use rushes_core::pool::{
    FileIdentity, Layout, MemberNumber, Object, Part, Policy, PoolId, Shape, Wish,
};
use rushes_core::units::{ByteOffset, ByteRange};
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, Timespec, Timestamps, XattrFlags, chmodat, chownat, fstat,
    fsync, ftruncate, linkat, mkdirat, mknodat, openat, renameat, setxattr, symlinkat, utimensat,
};
use rustix::io::Errno;
use rustix::process::{Gid, Uid};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The format file until the catalogue is whole.
const PLAN: &str = "rushes-pool.rescue";
/// Numbers that a door may have given without a trace.
const NUMBERS_SPARE: u64 = 1 << 20;

/// A catalogue that was made anew.
#[derive(Debug)]
pub struct Rescued {
    /// Its folder.
    pub catalogue: PathBuf,
    /// Names that are back, folders among them.
    pub name_count: u64,
    /// The log of names that they are from; None: no member had one.
    pub log_serial: Option<u64>,
    /// Attributes that its file system did not take.
    pub attributes_lost: u64,
    /// The faults of bytes and layouts that fsck found then, and mended.
    pub fsck: Fsck,
}

/// Make a new catalogue in an empty folder, of a pool whose old one is lost. Keeps all names in
/// memory.
///
/// `members`   folders of all members that are left; the pool finds those whose place has changed
///             there from now on
/// `progress`  called for names that are back, then for the steps of fsck
/// Errors   [`PoolError::Refused`] names the folder and its fault; then nothing was changed
pub fn rescue(
    catalogue: &Path,
    members: &[PathBuf],
    mut progress: impl FnMut(Progress),
) -> Result<Rescued, PoolError> {
    let folder = Folder::enter(Role::Catalogue, catalogue)?;
    let mut given = Vec::with_capacity(members.len());
    for path in members {
        given.push(Folder::enter(Role::SomeMember, path)?);
    }
    all_apart(&folder, &given)?;
    let (id, identity, entries) = of_one_pool(&given)?;
    for one in [&folder].into_iter().chain(&given) {
        one.lock()?;
    }
    check_fillable(&folder, id)?;
    folder.probe_records()?;

    let first = CatalogueFormat {
        pool: id,
        catalogue: identity,
        policy: Policy::default(),
        wish: Wish::default(),
        rules: Rules::default(),
        tidy: Schedule::Off,
        members: entries.clone(),
        members_given: 0,
        lost: BTreeSet::new(),
    };
    start(&folder, &first)?;
    let mut pool = Pool::open(&folder.path, Lock::Take, PLAN)?;
    let mut unread = Vec::new();
    let log = newest(&pool, &mut unread)?;
    if let Some((_, names)) = &log {
        let format = known_format(&folder, names, identity, &entries)?;
        drop(pool);
        let format = Format::Catalogue(format);
        format::write(folder.fd.as_fd(), &folder.path, PLAN, &format)?;
        pool = Pool::open(&folder.path, Lock::Take, PLAN)?;
    }
    // Layouts will say that objects are settled: make those that are there durable. If a disk
    // cannot, and loses one, the layout then says that it is missing.
    for member in pool.members().iter() {
        let _ = member.sync();
    }
    let (objects, unreadable) = objects(&pool)?;
    let records = log.iter().flat_map(|(_, names)| names.inodes.values());
    let most = records
        .filter_map(|inode| Layout::decode(&inode.record).ok())
        .map(|layout| layout.file.number)
        .chain(objects.keys().map(|file| file.number))
        .max()
        .unwrap_or(0);
    pool.catalogue()
        .set_numbers_end(most.saturating_add(NUMBERS_SPARE))?;
    let mut maker = Maker {
        pool: &pool,
        objects,
        away: &(&away(&pool) | &unreadable) | &pool.lost(),
        first_names: BTreeMap::new(),
        folders: Vec::new(),
        name_count: 0,
        attributes_lost: 0,
    };
    if let Some((_, names)) = &log {
        maker.make(names, &mut progress)?;
    }
    let (name_count, attributes_lost) = (maker.name_count, maker.attributes_lost);
    pool.catalogue().sync()?;
    let mut fsck = fsck(&pool, true, &mut progress)?;
    pool.catalogue().sync()?;
    folder.failed(
        "name the catalogue",
        renameat(&folder.fd, PLAN, &folder.fd, FORMAT_FILE).and_then(|()| fsync(&folder.fd)),
    )?;
    for member in pool.members().iter() {
        if let Err(error) = member.take_over() {
            fsck.issues.push(about_log(format!(
                "member {} was not told that this catalogue is its own: {error}; the next mount tells it. Until then keep the old catalogue away",
                member.number().0
            )));
        }
    }
    for error in unread {
        let sentence = format!(
            "a copy of the log of names could not be read: {error}; it was not the only one"
        );
        fsck.issues.push(about_log(sentence));
    }
    // Until now the old log stays, as a repeated rescue needs it. It lacks the new inodes.
    if let Err(error) = names::checkpoint_now(&pool) {
        let sentence =
            format!("the log of names could not be written: {error}; the next mount tries again");
        fsck.issues.push(about_log(sentence));
    }
    Ok(Rescued {
        catalogue: folder.path.clone(),
        name_count,
        log_serial: log.map(|(serial, _)| serial),
        attributes_lost,
        fsck,
    })
}

/// All given folders are members of one pool, each once.
///
/// Returns  that pool, a catalogue of it that follows theirs, and these members
fn of_one_pool(
    given: &[Folder],
) -> Result<(PoolId, CatalogueIdentity, Vec<MemberEntry>), PoolError> {
    let mut identity = CatalogueIdentity::draw()?;
    let mut entries: Vec<MemberEntry> = Vec::new();
    let mut pool = None;
    for folder in given {
        let Some(Format::Member(format)) = &folder.format else {
            return refused(RescueRefusal::NotMember {
                path: folder.path.clone(),
            });
        };
        if *pool.get_or_insert(format.pool) != format.pool {
            return refused(RescueRefusal::OtherPool {
                path: folder.path.clone(),
                first: entries[0].path.clone(),
            });
        }
        if let Some(other) = entries.iter().find(|entry| entry.number == format.number) {
            return refused(RescueRefusal::Copies {
                paths: [other.path.clone(), folder.path.clone()],
                number: format.number,
            });
        }
        identity = identity.following(format.catalogue);
        entries.push(MemberEntry::new(
            format.number,
            format.id,
            folder.path.clone(),
        ));
    }
    entries.sort_by_key(|entry| entry.number);
    match pool {
        Some(pool) => Ok((pool, identity, entries)),
        None => refused(RescueRefusal::NoMember),
    }
}

/// It must be empty, or have only files of an interrupted rescue of this pool.
fn check_fillable(folder: &Folder, pool: PoolId) -> Result<(), PoolError> {
    if folder.format.is_some() {
        return refused(RescueRefusal::InPool {
            folder: folder.named(),
        });
    }
    let is_ours = match format::read(folder.fd.as_fd(), PLAN) {
        Ok(Some(Format::Catalogue(plan))) if plan.pool == pool => true,
        Ok(None) => false,
        _ => {
            return refused(RescueRefusal::OtherPlan {
                folder: folder.named(),
                plan: PLAN,
            });
        }
    };
    let ours = [TREE, REMOVED, NUMBERS, LOCK, PLAN].map(OsStr::new);
    for name in folder.names(Path::new(""))? {
        let temporary = name.as_bytes().ends_with(b".tmp");
        let known =
            name == LOST_AND_FOUND || name == PROBE || name == format!("{PLAN}.tmp").as_str();
        if !known && !(is_ours && (temporary || ours.contains(&name.as_os_str()))) {
            return refused(RescueRefusal::NotEmpty {
                folder: folder.named(),
                name,
            });
        }
    }
    Ok(())
}

/// Delete the work of an earlier rescue, and make an empty tree.
fn start(folder: &Folder, format: &CatalogueFormat) -> Result<(), PoolError> {
    let format = Format::Catalogue(format.clone());
    format::write(folder.fd.as_fd(), &folder.path, PLAN, &format)?;
    for name in [TREE, REMOVED] {
        let path = folder.path.join(name);
        match std::fs::remove_dir_all(&path) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => {
                return Err(PoolError::system(
                    "remove",
                    path.display().to_string(),
                    error,
                ));
            }
        }
    }
    folder.furnish_catalogue()
}

fn about_log(sentence: String) -> Issue {
    Issue {
        kind: IssueKind::LogOfNames,
        sentence,
        path: None,
        object: None,
        state: State::Open,
    }
}

/// The newest log that any member has.
///
/// `unread`  gets the errors of logs that could not be read, though another could
/// Errors    none could be read
fn newest(pool: &Pool, unread: &mut Vec<PoolError>) -> Result<Option<(u64, Names)>, PoolError> {
    let mut found = names::logs(pool);
    found.sort_by_key(|log| std::cmp::Reverse(log.serial));
    let mut best: Option<(u64, Names)> = None;
    for log in found {
        if best
            .as_ref()
            .is_some_and(|(serial, _)| *serial > log.serial)
        {
            break;
        }
        let bytes = match names::read(&*pool.known(log.member)?, log.serial) {
            Ok(bytes) => bytes,
            Err(error) => {
                unread.push(error);
                continue;
            }
        };
        if is_newer(&bytes) {
            return refused(RescueRefusal::NewerLog { number: log.member });
        }
        let names = Names::read(&bytes);
        let is_ours = names
            .head
            .as_ref()
            .is_some_and(|head| head.pool == pool.id());
        let longest = best.as_ref().map_or(0, |(_, names)| names.sound_bytes);
        if is_ours && names.sound_bytes > longest {
            best = Some((log.serial, names));
        }
    }
    match unread.pop_if(|_| best.is_none()) {
        Some(error) => Err(error),
        None => Ok(best),
    }
}

/// The log's format file, with members at their given places, and with the identity made to follow
/// the log's catalogue, too.
fn known_format(
    folder: &Folder,
    names: &Names,
    identity: CatalogueIdentity,
    given: &[MemberEntry],
) -> Result<CatalogueFormat, PoolError> {
    let head = names.head.as_ref();
    let text = head.map(|head| String::from_utf8_lossy(&head.format).into_owned());
    let format = text.and_then(|text| Format::of(&text).ok());
    let Some(Format::Catalogue(mut format)) = format else {
        return refused(RescueRefusal::NoMembersInLog);
    };
    let was = head.map(|head| PathBuf::from(OsStr::from_bytes(&head.catalogue)));
    if let Some(was) = was.filter(|was| *was != folder.path) {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let there = rustix::fs::open(&was, flags, Mode::empty())
            .ok()
            .and_then(|fd| format::read(fd.as_fd(), FORMAT_FILE).ok().flatten());
        if matches!(&there, Some(Format::Catalogue(of)) if of.pool == format.pool) {
            return refused(RescueRefusal::CatalogueThere { catalogue: was });
        }
    }
    format.catalogue = identity.following(format.catalogue);
    for entry in given {
        match format
            .members
            .iter_mut()
            .find(|one| one.number == entry.number)
        {
            Some(known) => {
                known.id = entry.id;
                known.path.clone_from(&entry.path);
            }
            None if format.lost.contains(&entry.number) => {
                return refused(RescueRefusal::GivenUp {
                    path: entry.path.clone(),
                    number: entry.number,
                });
            }
            None => format.members.push(entry.clone()),
        }
    }
    format.members.sort_by_key(|entry| entry.number);
    Ok(format)
}

const ACCESS_ACL: &str = "system.posix_acl_access";

/// Objects whose marks name their file and their bytes, by file.
type Objects = BTreeMap<FileIdentity, Vec<(Object, Part)>>;

/// Returns  also members with unreadable objects, of which nothing is known for sure
fn objects(pool: &Pool) -> Result<(Objects, BTreeSet<MemberNumber>), PoolError> {
    let mut found = Objects::new();
    let mut unreadable = BTreeSet::new();
    for member in pool.members().iter() {
        if matches!(member.status().state, MemberState::Missing(_)) {
            continue;
        }
        member.list(|listed| {
            match listed {
                Listed::Object { found: one, .. } => {
                    if let Mark::Sound(mark) = one.mark
                        && mark.pool == pool.id()
                    {
                        let all = found.entry(mark.file).or_default();
                        all.push((one.object, mark.part));
                    }
                }
                Listed::Unreadable(..) => drop(unreadable.insert(member.number())),
                Listed::Stranger(_) => {}
            }
            Ok(())
        })?;
    }
    Ok((found, unreadable))
}

fn away(pool: &Pool) -> BTreeSet<MemberNumber> {
    pool.members()
        .iter()
        .filter(|member| matches!(member.status().state, MemberState::Missing(_)))
        .map(|member| member.number())
        .collect()
}

/// Makes the tree.
struct Maker<'a> {
    pool: &'a Pool,
    objects: Objects,
    away: BTreeSet<MemberNumber>,
    /// Of inodes that are made and no folders.
    first_names: BTreeMap<u64, PathBuf>,
    /// In the order in which they were made; they get their times last.
    folders: Vec<(PathBuf, Inode)>,
    name_count: u64,
    attributes_lost: u64,
}

impl Maker<'_> {
    fn make(
        &mut self,
        names: &Names,
        progress: &mut impl FnMut(Progress),
    ) -> Result<(), PoolError> {
        if let Some(root) = names.inodes.get(&ROOT) {
            self.folders.push((PathBuf::new(), root.clone()));
        }
        let mut seen = BTreeSet::from([ROOT]);
        self.below(names, ROOT, PathBuf::new(), &mut seen, progress)?;
        // Folders whose own name came too late for the log: their content is not lost.
        let folders: BTreeSet<u64> = names.names.keys().map(|(folder, _)| *folder).collect();
        let inner: BTreeSet<u64> = names.names.values().copied().collect();
        let tops = folders.iter().filter(|folder| !inner.contains(folder));
        // In a log of ours all are below one without a name; of a circle, try each.
        for &folder in tops.chain(&folders) {
            if seen.insert(folder) {
                let lost = Inode {
                    mode: FileType::Directory.as_raw_mode() | 0o700,
                    ..Inode::default()
                };
                let path = Path::new(&lost_folder(self.pool)?.1).join(format!("folder.{folder}"));
                let known = names.inodes.get(&folder).cloned().unwrap_or(lost);
                self.one(&path, &known)?;
                self.below(names, folder, path, &mut seen, progress)?;
            }
        }
        for (path, inode) in std::mem::take(&mut self.folders).into_iter().rev() {
            let fd = self.open(&path)?;
            self.dress(&path, &fd, &inode)?;
        }
        Ok(())
    }

    fn below(
        &mut self,
        names: &Names,
        folder: u64,
        path: PathBuf,
        seen: &mut BTreeSet<u64>,
        progress: &mut impl FnMut(Progress),
    ) -> Result<(), PoolError> {
        let mut waiting = vec![(folder, path)];
        while let Some((folder, path)) = waiting.pop() {
            let children = names
                .names
                .range((folder, Vec::new())..)
                .take_while(|((of, _), _)| *of == folder);
            for ((_, name), &number) in children {
                let path = path.join(OsStr::from_bytes(name));
                // The log has only its name: a name below it shows a folder.
                let inside = names.names.range((number, Vec::new())..).next();
                let mode = match inside.is_some_and(|((of, _), _)| *of == number) {
                    true => FileType::Directory.as_raw_mode() | 0o700,
                    false => FileType::RegularFile.as_raw_mode() | 0o600,
                };
                let unknown = Inode {
                    number,
                    mode,
                    ..Inode::default()
                };
                let inode = names.inodes.get(&number).unwrap_or(&unknown);
                let is_folder = FileType::from_raw_mode(inode.mode) == FileType::Directory;
                if is_folder && !seen.insert(number) {
                    continue;
                }
                self.one(&path, inode)?;
                self.name_count += 1;
                if self.name_count.is_multiple_of(1000) {
                    progress(Progress::Files(self.name_count));
                }
                if is_folder {
                    waiting.push((number, path));
                }
            }
        }
        Ok(())
    }

    fn open(&self, path: &Path) -> Result<OwnedFd, PoolError> {
        open_below(self.pool.catalogue().tree(), path, OFlags::PATH)
            .map_err(|error| PoolError::system("open", path.display().to_string(), error))
    }

    fn one(&mut self, path: &Path, inode: &Inode) -> Result<(), PoolError> {
        let failed = |error| PoolError::system("make", path.display().to_string(), error);
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Ok(());
        };
        let folder = self.open(parent)?;
        let kind = FileType::from_raw_mode(inode.mode);
        if inode.number != 0
            && kind != FileType::Directory
            && let Some(first) = self.first_names.get(&inode.number)
        {
            let first = self.open(first)?;
            return linkat(&first, c"", &folder, name, AtFlags::EMPTY_PATH).map_err(failed);
        }
        let made = match kind {
            FileType::Directory => match mkdirat(&folder, name, Mode::RWXU) {
                Err(Errno::EXIST) => return Ok(()),
                made => made,
            },
            FileType::Symlink => symlinkat(OsStr::from_bytes(&inode.target), &folder, name),
            FileType::RegularFile => {
                let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
                let stub = openat(&folder, name, flags, Mode::RUSR | Mode::WUSR).map_err(failed)?;
                self.fill(&stub, inode)?;
                Ok(())
            }
            kind => mknodat(&folder, name, kind, Mode::RUSR | Mode::WUSR, inode.device),
        };
        made.map_err(failed)?;
        if kind == FileType::Directory {
            self.folders.push((path.to_path_buf(), inode.clone()));
            return Ok(());
        }
        let fd = self.open(path)?;
        if kind != FileType::RegularFile {
            let by_descriptor = format!("/proc/self/fd/{}", fd.as_raw_fd());
            let id = self.pool.id().0.to_le_bytes();
            let none = XattrFlags::empty();
            if setxattr(by_descriptor.as_str(), INODE_ATTRIBUTE, &id, none).is_err() {
                self.attributes_lost += 1;
            }
        }
        self.dress(path, &fd, inode)?;
        self.first_names.insert(inode.number, path.to_path_buf());
        Ok(())
    }

    /// Owner, attributes, rights, times, in the order in which none undoes another.
    fn dress(&mut self, path: &Path, fd: &OwnedFd, inode: &Inode) -> Result<(), PoolError> {
        let failed =
            |error| PoolError::system("give its owner to", path.display().to_string(), error);
        let (user, group) = (Uid::from_raw(inode.user), Gid::from_raw(inode.group));
        chownat(fd, c"", Some(user), Some(group), AtFlags::EMPTY_PATH).map_err(failed)?;
        let by_descriptor = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let mut mode = inode.mode & 0o7777;
        for (name, value) in &inode.attributes {
            let name = OsStr::from_bytes(name);
            if setxattr(by_descriptor.as_str(), name, value, XattrFlags::empty()).is_err() {
                self.attributes_lost += 1;
                if name == ACCESS_ACL {
                    // With the ACL the bits of the group are its mask; without it they would be the
                    // group's rights.
                    mode &= !0o070;
                }
            }
        }
        if FileType::from_raw_mode(inode.mode) != FileType::Symlink {
            let mode = Mode::from_raw_mode(mode);
            chmodat(
                rustix::fs::CWD,
                by_descriptor.as_str(),
                mode,
                AtFlags::empty(),
            )
            .map_err(failed)?;
        }
        let modified = Timespec {
            tv_sec: inode.modified.0,
            tv_nsec: inode.modified.1.into(),
        };
        let times = Timestamps {
            last_access: modified,
            last_modification: modified,
        };
        utimensat(fd, c"", &times, AtFlags::EMPTY_PATH).map_err(failed)
    }

    /// Layout and size of a stub. The log's layout may be a second older than the objects.
    fn fill(&self, stub: &OwnedFd, inode: &Inode) -> Result<(), PoolError> {
        let mut size = inode.size;
        if let Ok(mut layout) = Layout::decode(&inode.record) {
            // The file may have been settled, and moved, since the log was written: a missing
            // object is harmless only if there never was one.
            if self.objects.contains_key(&layout.file) || !self.away.is_empty() {
                layout.set_unsettled(false);
            }
            let layout = self.as_it_is(layout, inode.modified)?;
            for (at, segment) in layout.segments().iter().enumerate() {
                let range = layout.range_of(at);
                for (index, &object) in segment.objects.iter().enumerate() {
                    if !self.is_there(&layout, object) {
                        continue;
                    }
                    // An object that does not open has no say in the file's length.
                    let Ok(fd) = self.pool.open_object(&layout, object, Access::Read) else {
                        continue;
                    };
                    // Bytes behind the segment are from before another one took that range.
                    let share = segment.shape.share(index, range.end() - segment.origin.0);
                    let data = ranges(&fd).unwrap_or_default();
                    let last = data.iter().rev().find(|data| data.start.0 < share);
                    let last = last.and_then(|data| data.end().min(share).checked_sub(1));
                    if let Some(last) = last {
                        let behind = segment.shape.offset_of(index, last);
                        let end = segment.origin.0.saturating_add(behind).saturating_add(1);
                        size = size.max(end.min(range.end()));
                    }
                }
            }
            self.pool.set_layout(stub.as_fd(), &layout)?;
        } else if !inode.record.is_empty() {
            // One of a newer version stays as it was, and fsck says so.
            let record = inode.record.as_slice();
            crate::xattr::set(stub.as_fd(), crate::xattr::LAYOUT_ATTRIBUTE, record)
                .map_err(|error| PoolError::system("write the layout record", "", error))?;
        } else if size == 0 {
            // A door tells by the layout whether an inode is of the tree.
            let layout = Layout::new(self.pool.new_file()?);
            self.pool.set_layout(stub.as_fd(), &layout)?;
        }
        ftruncate(stub, size).map_err(|error| PoolError::system("give its size to", "", error))
    }

    fn is_there(&self, layout: &Layout, object: Object) -> bool {
        self.objects
            .get(&layout.file)
            .is_some_and(|all| all.iter().any(|(one, _)| *one == object))
    }

    /// Objects that the layout does not name have bytes that its own do not have, or not any more,
    /// if they are as new as the layout. An older one is left of bytes that were cut off or
    /// replaced; fsck gives it a name of its own.
    fn as_it_is(&self, mut layout: Layout, modified: (i64, u32)) -> Result<Layout, PoolError> {
        self.with_moved(&mut layout);
        if layout.segments().is_empty()
            && let Some(whole) = self.whole_of_stripes(layout.file)?
        {
            return Ok(whole);
        }
        let named = layout.objects();
        let Some(all) = self.objects.get(&layout.file).filter(|_| is_plain(&layout)) else {
            return Ok(layout);
        };
        let is_extra = |(object, part): &&(Object, Part)| {
            !named.contains(object) && *part == Part::single(part.serial)
        };
        for &(extra, _) in all.iter().filter(is_extra) {
            let fd = self.pool.open_object(&layout, extra, Access::Read)?;
            let status =
                fstat(&fd).map_err(|error| PoolError::system("look at an object", "", error))?;
            if (status.st_mtime, status.st_mtime_nsec as u32) < modified {
                continue;
            }
            for range in ranges(&fd)? {
                if layout.segments().is_empty() {
                    layout.assign(ByteRange::new(0, u64::MAX), ByteOffset(0), extra);
                }
                for part in self.free_parts(&layout, range)? {
                    layout.assign(part, ByteOffset(0), extra);
                }
            }
        }
        Ok(layout)
    }

    /// If an object of a stripe is not where the layout says, and just one other object has the
    /// same place, origin and shape in its mark, it was moved there.
    fn with_moved(&self, layout: &mut Layout) {
        let named = layout.objects();
        let mut moved = Vec::new();
        for segment in layout.segments() {
            for (&object, place) in segment.objects.iter().zip(0u16..) {
                let is_away = self.away.contains(&object.member);
                if segment.shape == Shape::Single || is_away || self.is_there(layout, object) {
                    continue;
                }
                let is_it = |(one, part): &&(Object, Part)| {
                    !named.contains(one)
                        && (part.place, part.origin, part.shape)
                            == (place, segment.origin, segment.shape)
                };
                let all = self.objects.get(&layout.file).into_iter().flatten();
                let mut found = all.filter(is_it);
                if let (Some((one, _)), None) = (found.next(), found.next()) {
                    moved.push((object, *one));
                }
            }
        }
        for (before, after) in moved {
            layout.replace(before, after);
        }
    }

    /// A file that was striped in the last second before the log ended. None: it was not, or not
    /// all of it is there.
    fn whole_of_stripes(&self, file: FileIdentity) -> Result<Option<Layout>, PoolError> {
        let all = self.objects.get(&file).map_or(&[][..], Vec::as_slice);
        let is_striped = |(_, part): &(Object, Part)| part.shape != Shape::Single;
        if !self.away.is_empty() || !all.iter().any(is_striped) {
            return Ok(None);
        }
        let layout = Layout::new(file);
        let mut holders = Vec::new();
        for &(object, part) in all {
            let fd = self.pool.open_object(&layout, object, Access::Read)?;
            let data = ranges(&fd)?;
            holders.push(Holder { object, part, data });
        }
        Ok(assemble(file, &holders))
    }

    /// Parts of a range of which no named object has a byte. The bytes of one on a member that is
    /// away are not known.
    fn free_parts(&self, layout: &Layout, range: ByteRange) -> Result<Vec<ByteRange>, PoolError> {
        let mut free = Vec::new();
        let mut at = range.start.0;
        while at < range.end() {
            let Some(located) = layout.locate(ByteOffset(at)) else {
                break;
            };
            let end = at + located.length.0.min(range.end() - at);
            if self.away.contains(&located.object.member) {
                at = end;
                continue;
            }
            let mut taken = Vec::new();
            if self.is_there(layout, located.object) {
                let fd = self
                    .pool
                    .open_object(layout, located.object, Access::Read)?;
                taken = ranges(&fd)?;
            }
            for data in taken {
                let (first, last) = (data.start.0.max(at), data.end().min(end));
                if first >= last {
                    continue;
                }
                free.push(ByteRange::new(at, first - at));
                at = last;
            }
            free.push(ByteRange::new(at, end - at));
            at = end;
        }
        free.retain(|part| part.length.0 > 0);
        Ok(free)
    }
}

fn ranges(fd: &OwnedFd) -> Result<Vec<ByteRange>, PoolError> {
    data_ranges(fd).map_err(|error| PoolError::system("look for data in an object", "", error))
}
