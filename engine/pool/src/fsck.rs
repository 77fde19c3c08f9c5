// SPDX-License-Identifier: Apache-2.0
//! Searches a whole pool for inconsistencies, and mends those that it can without losing a byte.
//!
//! core/pool/check says which findings there are and which remedies are allowed; here are the looks
//! and the repairs. Every repair may be interrupted: the next look finds the rest. Bytes that no
//! layout names get a name in the folder `lost+found` of the tree; fsck deletes them only if each
//! of them is also where a layout says.

use crate::data::data_ranges;
use crate::error::PoolError;
use crate::hole::vacate_beside;
use crate::member::{Access, Listed, Member, MemberState, ObjectName};
use crate::pool::Pool;
use crate::reserved::Reserved;
use crate::walk::{each_stub, open_below};
use crate::xattr::{self, LAYOUT_ATTRIBUTE};
use rushes_core::pool::check::{
    Doubt, Finding, FoundObject, Holder, Mark, Record, Remedy, Stub, assemble, check, part_of,
};
use rushes_core::pool::led::{Led, outside};
use rushes_core::pool::{
    BackPointer, FileIdentity, Layout, LayoutFault, MemberNumber, Object, Part, Shape,
};
use rushes_core::units::{ByteCount, ByteOffset, ByteRange};
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, chmodat, fstat, fsync, ftruncate, linkat, mkdirat, openat,
};
use rustix::io::{Errno, pread};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// In the tree: the folder for bytes that had no name.
pub(crate) const LOST: &str = "lost+found";
/// Compared at a time. Units: bytes.
const CHUNK_BYTES: usize = 1 << 20;
/// Names tried for one find before giving up.
const NAMES_MAX: usize = 1000;

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// So many files were looked at.
    Files(u64),
    /// So many objects were looked at.
    Objects(u64),
    /// So many findings are done, of so many.
    Mending(usize, usize),
}

/// The outcome of a finding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// It can be mended without loss.
    Mendable,
    /// It was mended; the words say how.
    Mended(String),
    /// No program can mend it: bytes are gone, or a person has to decide.
    Open,
}

/// The kinds of findings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IssueKind {
    /// A layout cannot be used.
    RecordFaulty,
    /// A file with a size has no layout.
    RecordAbsent,
    /// Bytes are on a member that was given up.
    MemberLost,
    /// A layout names a member that the pool does not have.
    MemberUnknown,
    /// An object that a layout names is not there.
    ObjectAbsent,
    /// An object of bytes that were never made durable is not there.
    NeverSynced,
    /// An object that a layout names belongs to another file.
    ObjectOfOther,
    /// The mark of an object cannot be used.
    MarkFaulty,
    /// Two layouts name one object.
    NamedTwice,
    /// Two stubs say that they are the same file.
    SameFile,
    /// No layout names an object.
    Unnamed,
    /// An object is another pool's.
    Foreign,
    /// A name in a member's folder for objects is no object's.
    Stranger,
    /// An object cannot be looked at.
    ObjectUnreadable,
    /// Deleted files are not cleaned up.
    Removed,
    /// The number of the next file is too low, or cannot be read.
    Numbers,
    /// An object has bytes that are also where the layout says.
    Copied,
    /// The log of names is not as it should be, or the catalogue that a member names as its own.
    LogOfNames,
}

impl IssueKind {
    /// A word for programs.
    pub fn name(self) -> &'static str {
        match self {
            IssueKind::RecordFaulty => "record_faulty",
            IssueKind::RecordAbsent => "record_absent",
            IssueKind::MemberLost => "member_lost",
            IssueKind::MemberUnknown => "member_unknown",
            IssueKind::ObjectAbsent => "object_absent",
            IssueKind::NeverSynced => "never_synced",
            IssueKind::ObjectOfOther => "object_of_other",
            IssueKind::MarkFaulty => "mark_faulty",
            IssueKind::NamedTwice => "named_twice",
            IssueKind::SameFile => "same_file",
            IssueKind::Unnamed => "unnamed",
            IssueKind::Foreign => "foreign",
            IssueKind::Stranger => "stranger",
            IssueKind::ObjectUnreadable => "object_unreadable",
            IssueKind::Removed => "removed",
            IssueKind::Numbers => "numbers",
            IssueKind::Copied => "copied",
            IssueKind::LogOfNames => "log_of_names",
        }
    }
}

/// A finding, for people.
#[derive(Clone, Debug)]
pub struct Issue {
    /// Its kind.
    pub kind: IssueKind,
    /// A sentence.
    pub sentence: String,
    /// The file below the tree, if one is known.
    pub path: Option<PathBuf>,
    /// Object, if it is about one.
    pub object: Option<Object>,
    /// The outcome of it.
    pub state: State,
}

/// The outcome of a look.
#[derive(Clone, Debug, Default)]
pub struct Fsck {
    /// Regular files, each once.
    pub file_count: u64,
    /// Objects on members that are there.
    pub object_count: u64,
    /// All findings.
    pub issues: Vec<Issue>,
    /// Members that could not be looked at, and why.
    pub missing: Vec<(MemberNumber, String)>,
    /// Objects with bytes behind their file's end. A crash leaves them there; no reader sees them,
    /// and they are no finding.
    pub behind_end_count: u64,
    /// Blocks without a byte to which no layout leads, or behind files' ends: no finding, since
    /// writers that found a member full and file systems leave some, too. `repair` frees them.
    /// Units: bytes.
    pub reserved_bytes: u64,
}

impl Fsck {
    /// Findings that are there still.
    pub fn left_count(&self) -> usize {
        let mended = |issue: &&Issue| matches!(issue.state, State::Mended(_));
        self.issues.len() - self.issues.iter().filter(mended).count()
    }
}

/// All that a look has found.
#[derive(Default)]
struct Look {
    paths: Vec<PathBuf>,
    stubs: Vec<Stub>,
    objects: Vec<FoundObject>,
    sizes: BTreeMap<Object, u64>,
    strangers: Vec<PathBuf>,
    unreadable: Vec<(MemberNumber, PathBuf, Errno)>,
    missing: Vec<(MemberNumber, String)>,
}

/// Looks of one repair. The next look sees the results of a repair: a file put together in
/// `lost+found` may show bytes that are there twice.
const LOOKS_MAX: usize = 4;

/// Look through a pool without a door, and mend if asked, until a look finds nothing more to mend.
/// Keeps some 300 bytes of memory for each file and object.
///
/// `pool`   opened by [`Pool::serve`]
/// Errors   of the look; a fault that cannot be mended is an [`Issue`]
pub fn fsck(
    pool: &Pool,
    repair: bool,
    mut progress: impl FnMut(Progress),
) -> Result<Fsck, PoolError> {
    let was_mended = |issue: &Issue| matches!(issue.state, State::Mended(_));
    let mut report = look_once(pool, repair, &mut progress)?;
    let mut is_settled = !report.issues.iter().any(was_mended);
    for _ in 1..LOOKS_MAX {
        if is_settled {
            break;
        }
        let next = look_once(pool, repair, &mut progress)?;
        is_settled = !next.issues.iter().any(was_mended);
        let mended = report.issues.into_iter().filter(was_mended);
        report = Fsck {
            issues: mended.chain(next.issues).collect(),
            reserved_bytes: report.reserved_bytes + next.reserved_bytes,
            ..next
        };
    }
    Ok(report)
}

/// One look, and the repairs that follow from it.
fn look_once(
    pool: &Pool,
    repair: bool,
    progress: &mut impl FnMut(Progress),
) -> Result<Fsck, PoolError> {
    let mut report = Fsck::default();
    let buried = removed(pool, repair, &mut report)?;
    let look = look(pool, progress)?;
    report.file_count = look.stubs.len() as u64;
    report.object_count = look.objects.len() as u64;
    report.missing = look.missing.clone();
    numbers(pool, &look, repair, &mut report)?;
    for stranger in &look.strangers {
        report.issues.push(Issue {
            kind: IssueKind::Stranger,
            sentence: format!(
                "{} is no object; something else put it there, move it away",
                stranger.display()
            ),
            path: None,
            object: None,
            state: State::Open,
        });
    }
    for (_, path, error) in &look.unreadable {
        report.issues.push(Issue {
            kind: IssueKind::ObjectUnreadable,
            sentence: format!(
                "{} cannot be read ({error}); its disk fails or its file system is damaged: empty that member with `rushes pool drain`. What may depend on it is left as it is",
                path.display()
            ),
            path: None,
            object: None,
            state: State::Open,
        });
    }
    let known: BTreeSet<MemberNumber> = pool.members().iter().map(|one| one.number()).collect();
    // A member with an unreadable object counts as one that is not there: not all of it is known.
    let missing = look.missing.iter().map(|(number, _)| *number);
    let unreadable = look.unreadable.iter().map(|(number, ..)| *number);
    let away: BTreeSet<MemberNumber> = missing.chain(unreadable).collect();
    let looked_at = known.difference(&away).copied().collect();
    let lost = pool.lost();
    let mut findings = check(pool.id(), &known, &looked_at, &look.stubs, &look.objects);
    // The objects of a removed file go before its stub: such a stub is half done, and the next
    // mount goes on.
    let removed = Path::new("..").join(crate::catalogue::REMOVED);
    findings.retain(|finding| match finding {
        Finding::ObjectAbsent { stub, .. } | Finding::NeverSynced { stub } => {
            !look.paths[*stub].starts_with(&removed)
        }
        // No finding if the member had nothing of the file.
        Finding::MemberUnknown { stub, object } if lost.contains(&object.member) => {
            !look.paths[*stub].starts_with(&removed) && look.has_bytes(*stub, *object)
        }
        _ => true,
    });
    let newer = look
        .stubs
        .iter()
        .any(|stub| matches!(stub.record, Record::Faulty(LayoutFault::Newer { .. }, _)));
    if repair {
        // Bytes may be moved and not synced: their old place must not go before their layout is
        // durable.
        pool.catalogue().sync()?;
    }
    let unnamed = findings.iter().filter_map(|finding| match finding {
        Finding::Unnamed { object, .. } => Some(*object),
        _ => None,
    });
    let files = look.stubs.iter().filter_map(|stub| match &stub.record {
        Record::Sound(layout) => Some(layout.file),
        _ => None,
    });
    let mender = Mender {
        pool,
        look: &look,
        unnamed: RefCell::new(unnamed.collect()),
        settled: RefCell::default(),
        files: RefCell::new(files.collect()),
    };
    let circumstances = Circumstances {
        has_newer_layouts: newer,
        is_member_away: !away.is_empty(),
        lost: &lost,
        doubtful: in_doubt(&findings),
        buried: &buried,
    };
    let count = findings.len();
    for (at, finding) in findings.iter().enumerate() {
        progress(Progress::Mending(at, count));
        let remedy = finding.remedy(&mender.doubt(finding, &circumstances));
        let state = match (remedy, repair) {
            (Remedy::None, _) => State::Open,
            (remedy, _) if !mender.can(remedy)? => State::Open,
            (_, false) => State::Mendable,
            (remedy, true) => State::Mended(mender.mend(finding, remedy)?),
        };
        report.issues.push(mender.issue(finding, state));
    }
    // Nor take anything from objects that have got another file's name meanwhile.
    let never_synced = findings.iter().filter_map(|finding| match finding {
        Finding::NeverSynced { stub } => Some(*stub),
        _ => None,
    });
    let doubtful = circumstances.doubtful.iter().copied();
    let left_alone = doubtful.chain(never_synced).collect();
    mender.leftovers(repair, &left_alone, &mut report)?;
    Ok(report)
}

/// The facts of the whole pool on which remedies depend.
struct Circumstances<'a> {
    has_newer_layouts: bool,
    /// A member is away, or has an object that cannot be read.
    is_member_away: bool,
    /// Members that were given up.
    lost: &'a BTreeSet<MemberNumber>,
    /// Stubs whose objects another one may need.
    doubtful: BTreeSet<usize>,
    /// Files that were removed, and are buried now.
    buried: &'a BTreeSet<FileIdentity>,
}

/// Stubs whose objects another one may need: a person decides.
fn in_doubt(findings: &[Finding]) -> BTreeSet<usize> {
    let mut stubs = BTreeSet::new();
    for finding in findings {
        if let Finding::NamedTwice { stub, first, .. } | Finding::SameFile { stub, first } = finding
        {
            stubs.extend([*stub, *first]);
        }
    }
    stubs
}

/// Files on their way out.
///
/// Returns  those that are gone now
fn removed(
    pool: &Pool,
    repair: bool,
    report: &mut Fsck,
) -> Result<BTreeSet<FileIdentity>, PoolError> {
    let issue = |sentence, state| Issue {
        kind: IssueKind::Removed,
        sentence,
        path: None,
        object: None,
        state,
    };
    if !repair {
        let path = pool.catalogue().path().join(crate::catalogue::REMOVED);
        let count = std::fs::read_dir(&path)
            .map_err(|error| PoolError::system("list", path.display().to_string(), error))?
            .count();
        if count > 0 {
            let sentence = format!(
                "{count} removed files still have their bytes; the next mount removes them, too"
            );
            report.issues.push(issue(sentence, State::Mendable));
        }
        return Ok(BTreeSet::new());
    }
    let buried = pool.bury(|_| false, || ())?;
    if buried.file_count > 0 {
        let sentence = format!("{} removed files still had their bytes", buried.file_count);
        let state = State::Mended(String::from("removed"));
        report.issues.push(issue(sentence, state));
    }
    for error in buried.kept {
        let sentence = format!("a removed file keeps its bytes: {error}");
        report.issues.push(issue(sentence, State::Open));
    }
    Ok(buried.files.into_iter().collect())
}

fn look(pool: &Pool, progress: &mut impl FnMut(Progress)) -> Result<Look, PoolError> {
    let mut look = Look::default();
    let mut linked = BTreeSet::new();
    each_stub(pool.catalogue(), &mut linked, |named, stub| {
        look.stub(named.path.to_path_buf(), stub)?;
        if look.stubs.len().is_multiple_of(1000) {
            progress(Progress::Files(look.stubs.len() as u64));
        }
        Ok(())
    })?;
    // Stubs that could not be buried name objects as well.
    let path = pool.catalogue().path().join(crate::catalogue::REMOVED);
    let failed = |error| PoolError::system("list", path.display().to_string(), error);
    for entry in std::fs::read_dir(&path).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let stub = match openat(
            pool.catalogue().removed(),
            entry.file_name(),
            flags,
            Mode::empty(),
        ) {
            Ok(stub) => stub,
            // No stub.
            Err(Errno::LOOP | Errno::NXIO) => continue,
            Err(error) => return Err(failed(error.into())),
        };
        let status = fstat(&stub).map_err(|error| failed(error.into()))?;
        let is_linked = status.st_nlink > 1 && !linked.insert(status.st_ino);
        if FileType::from_raw_mode(status.st_mode) == FileType::RegularFile && !is_linked {
            look.stub(
                Path::new("..")
                    .join(crate::catalogue::REMOVED)
                    .join(entry.file_name()),
                &stub,
            )?;
        }
    }
    for member in pool.members().iter() {
        if let MemberState::Missing(why) = member.status().state {
            look.missing.push((member.number(), why));
            continue;
        }
        member.list(|listed| {
            match listed {
                Listed::Object { found, size, .. } => {
                    look.sizes.insert(found.object, size);
                    look.objects.push(found);
                    if look.objects.len().is_multiple_of(1000) {
                        progress(Progress::Objects(look.objects.len() as u64));
                    }
                }
                Listed::Stranger(path) => look.strangers.push(path),
                Listed::Unreadable(path, error) => {
                    look.unreadable.push((member.number(), path, error));
                }
            }
            Ok(())
        })?;
    }
    Ok(look)
}

impl Look {
    fn layout(&self, stub: usize) -> Option<&Layout> {
        match &self.stubs[stub].record {
            Record::Sound(layout) => Some(layout),
            _ => None,
        }
    }

    fn names_lost(&self, stub: usize, lost: &BTreeSet<MemberNumber>) -> bool {
        let objects = self.layout(stub).map(Layout::objects).unwrap_or_default();
        objects.iter().any(|object| lost.contains(&object.member))
    }

    /// Bytes of the file are, or were, in one of its objects.
    fn has_bytes(&self, stub: usize, object: Object) -> bool {
        self.layout(stub).is_some_and(|layout| {
            let lengths = layout.lengths(ByteCount(self.stubs[stub].size));
            lengths.get(&object).is_some_and(|length| *length > 0)
        })
    }

    fn stub(&mut self, path: PathBuf, fd: &OwnedFd) -> Result<(), PoolError> {
        let failed = |error| PoolError::system("look at", path.display().to_string(), error);
        let size = fstat(fd).map_err(failed)?.st_size as u64;
        let record = match xattr::get(fd.as_fd(), LAYOUT_ATTRIBUTE).map_err(failed)? {
            None => Record::Absent,
            Some(bytes) => match Layout::decode(&bytes) {
                Ok(layout) => Record::Sound(layout),
                Err(fault) => Record::Faulty(fault, bytes),
            },
        };
        self.stubs.push(Stub { size, record });
        self.paths.push(path);
        Ok(())
    }
}

/// The pool must never give a number again that a file has.
fn numbers(pool: &Pool, look: &Look, repair: bool, report: &mut Fsck) -> Result<(), PoolError> {
    let of_stubs = look.stubs.iter().filter_map(|stub| match &stub.record {
        Record::Sound(layout) => Some(layout.file.number),
        _ => None,
    });
    let of_objects = look.objects.iter().filter_map(|found| match found.mark {
        Mark::Sound(mark) if mark.pool == pool.id() => Some(mark.file.number),
        _ => None,
    });
    let most = of_stubs.chain(of_objects).max().unwrap_or(0);
    let end = pool.catalogue().numbers_end();
    if end.is_some_and(|end| end > most) {
        return Ok(());
    }
    let state = if repair {
        let end = most.saturating_add(1).max(end.unwrap_or(1));
        pool.catalogue().set_numbers_end(end)?;
        State::Mended(format!("the next file gets the number {end}"))
    } else {
        State::Mendable
    };
    report.issues.push(Issue {
        kind: IssueKind::Numbers,
        sentence: match end {
            Some(end) => format!("the next file would get the number {end}, but {most} is given"),
            None => String::from("the number of the next file cannot be read"),
        },
        path: None,
        object: None,
        state,
    });
    Ok(())
}

struct Mender<'a> {
    pool: &'a Pool,
    look: &'a Look,
    /// Objects that no layout names.
    unnamed: RefCell<Vec<Object>>,
    /// Those of them that are deleted, or in a file that got a name.
    settled: RefCell<BTreeSet<Object>>,
    /// Files that have a stub.
    files: RefCell<BTreeSet<FileIdentity>>,
}

impl Mender<'_> {
    fn object_path(&self, object: Object) -> String {
        let name = ObjectName::of(object.id);
        match self.pool.member(object.member) {
            Some(member) => member.path().join(name.as_str()).display().to_string(),
            None => format!("{} of member {}", name.as_str(), object.member.0),
        }
    }

    fn issue(&self, finding: &Finding, state: State) -> Issue {
        let shown = |stub: usize| self.look.paths[stub].display();
        let (kind, stub, object, sentence) = match *finding {
            Finding::RecordFaulty { stub, fault, .. } => (
                IssueKind::RecordFaulty,
                Some(stub),
                None,
                format!("{}: the layout record cannot be used: {fault}", shown(stub)),
            ),
            Finding::RecordAbsent { stub } => (
                IssueKind::RecordAbsent,
                Some(stub),
                None,
                format!(
                    "{}: the layout record is not there although the file has {} bytes",
                    shown(stub),
                    self.look.stubs[stub].size
                ),
            ),
            Finding::MemberUnknown { stub, object } if self.pool.is_lost(object.member) => (
                IssueKind::MemberLost,
                Some(stub),
                Some(object),
                format!(
                    "{}: {} were on member {}, which was given up; put the file back from your backup, or remove it",
                    shown(stub),
                    self.lost_ranges(stub, object),
                    object.member.0
                ),
            ),
            Finding::MemberUnknown { stub, object } => (
                IssueKind::MemberUnknown,
                Some(stub),
                Some(object),
                format!(
                    "{}: bytes of it are on member {}, which the pool has not",
                    shown(stub),
                    object.member.0
                ),
            ),
            Finding::ObjectAbsent { stub, object } => (
                IssueKind::ObjectAbsent,
                Some(stub),
                Some(object),
                format!(
                    "{}: {} is not there, and with it {}",
                    shown(stub),
                    self.object_path(object),
                    self.lost_ranges(stub, object)
                ),
            ),
            Finding::NeverSynced { stub } => (
                IssueKind::NeverSynced,
                Some(stub),
                None,
                format!(
                    "{}: it was being made when the power went, and never synced: what was written to it is gone",
                    shown(stub)
                ),
            ),
            Finding::ObjectOfOther { stub, object } => (
                IssueKind::ObjectOfOther,
                Some(stub),
                Some(object),
                format!(
                    "{}: {} says that it belongs to another file or pool",
                    shown(stub),
                    self.object_path(object)
                ),
            ),
            Finding::MarkFaulty {
                stub,
                object,
                is_newer,
                ..
            } => (
                IssueKind::MarkFaulty,
                Some(stub),
                Some(object),
                format!(
                    "{}: the mark of {} {}",
                    shown(stub),
                    self.object_path(object),
                    if is_newer {
                        "is of a newer version; use a newer Rushes"
                    } else {
                        "cannot be used"
                    }
                ),
            ),
            Finding::NamedTwice {
                stub,
                first,
                object,
            } => (
                IssueKind::NamedTwice,
                Some(stub),
                Some(object),
                format!(
                    "{} and {} both name {}; copy one of them and remove it",
                    shown(first),
                    shown(stub),
                    self.object_path(object)
                ),
            ),
            Finding::SameFile { stub, first } => (
                IssueKind::SameFile,
                Some(stub),
                None,
                format!(
                    "{} and {} have the number of one file; copy one of them and remove it",
                    shown(first),
                    shown(stub)
                ),
            ),
            Finding::Unnamed {
                object, has_data, ..
            } => (
                IssueKind::Unnamed,
                None,
                Some(object),
                format!(
                    "{} is named by no file{}",
                    self.object_path(object),
                    if has_data { "" } else { ", and empty" }
                ),
            ),
            Finding::Foreign { object } => (
                IssueKind::Foreign,
                None,
                Some(object),
                format!(
                    "{} belongs to another pool, or is of a newer Rushes",
                    self.object_path(object)
                ),
            ),
        };
        Issue {
            kind,
            sentence,
            path: stub.map(|stub| self.look.paths[stub].clone()),
            object,
            state,
        }
    }

    /// "its bytes 0 to 4095 and from 8192 on"
    fn lost_ranges(&self, stub: usize, object: Object) -> String {
        let Some(layout) = self.look.layout(stub) else {
            return String::from("its bytes");
        };
        let ranges: Vec<String> = layout
            .segments()
            .iter()
            .enumerate()
            .filter(|(_, segment)| segment.objects.contains(&object))
            .map(|(at, segment)| match layout.range_of(at).end() {
                u64::MAX => format!("from {} on", segment.start.0),
                end => format!("{} to {}", segment.start.0, end - 1),
            })
            .collect();
        format!("its bytes {}", ranges.join(" and "))
    }

    /// The mark of an object of a stripe.
    fn stripe_of(&self, object: Object) -> Option<BackPointer> {
        let found = self.look.objects.iter().find(|one| one.object == object)?;
        match found.mark {
            Mark::Sound(mark) if mark.part.shape != Shape::Single => Some(mark),
            _ => None,
        }
    }

    /// Whether a remedy is possible at all: a layout from a stripe that is not whole would make
    /// lost bytes look like holes.
    fn can(&self, remedy: Remedy) -> Result<bool, PoolError> {
        Ok(match remedy {
            Remedy::WriteRecord(file) => assemble(file, &self.holders(file)?).is_some(),
            _ => true,
        })
    }

    fn mend(&self, finding: &Finding, remedy: Remedy) -> Result<String, PoolError> {
        match (finding, remedy) {
            (Finding::Unnamed { object, .. }, _) if self.settled.borrow().contains(object) => {
                Ok(format!("it is in {LOST} with the rest of its file"))
            }
            (Finding::RecordFaulty { stub, .. }, Remedy::WriteRecord(file)) => {
                let layout = assemble(file, &self.holders(file)?);
                let layout = layout.expect("asked before whether there is one");
                let fd = self.open_stub(*stub)?;
                self.pool.set_layout(fd.as_fd(), &layout)?;
                sync(&fd, "layout record")?;
                Ok(String::from("the record was written anew from its objects"))
            }
            (Finding::NeverSynced { stub }, Remedy::Empty) => {
                let Some(layout) = self.look.layout(*stub) else {
                    return Ok(String::new());
                };
                let fd = self.open_stub(*stub)?;
                let mut next = layout.clone();
                let left = self.pool.empty(fd.as_fd(), &mut next)?;
                self.files.borrow_mut().insert(next.file);
                self.keep_left(layout.file, &left)
            }
            (Finding::ObjectOfOther { stub, object }, Remedy::WriteMark) => {
                if let Some((file, part)) = self.half_kept(*stub, *object) {
                    self.member(*object)?.write_mark(object.id, file, part)?;
                }
                Ok(String::from("the mark was written anew from the record"))
            }
            (
                Finding::MarkFaulty {
                    stub, object, part, ..
                },
                Remedy::WriteMark,
            ) => {
                let Some(layout) = self.look.layout(*stub) else {
                    return Ok(String::new());
                };
                let part = self.as_its_mates(layout, *object, *part);
                self.member(*object)?
                    .write_mark(object.id, layout.file, part)?;
                Ok(String::from("the mark was written anew from the record"))
            }
            (Finding::Unnamed { object, .. }, Remedy::Remove) => {
                self.remove(*object)?;
                Ok(String::from("removed"))
            }
            (
                Finding::Unnamed {
                    object,
                    stub: Some(stub),
                    ..
                },
                Remedy::RemoveIfCopied,
            ) => {
                if self.is_copied(*object, *stub)? {
                    self.remove(*object)?;
                    return Ok(String::from("removed: each byte of it is in the file"));
                }
                self.keep_alone(*object)
            }
            (Finding::Unnamed { object, file, .. }, _) => match file {
                Some(file) => self.keep(*object, *file),
                None => self.keep_alone(*object),
            },
            _ => Ok(String::new()),
        }
    }

    /// Keep all objects of a file whose stub has another number now.
    fn keep_left(&self, file: FileIdentity, left: &[Object]) -> Result<String, PoolError> {
        let mut said = String::from("it reads as zeroes");
        if left.is_empty() {
            return Ok(said);
        }
        self.files.borrow_mut().remove(&file);
        self.unnamed.borrow_mut().extend(left);
        for found in &self.look.objects {
            let is_its = matches!(
                found.mark,
                Mark::Sound(mark) if (mark.pool, mark.file) == (self.pool.id(), file)
            );
            // The next look sees one with another mark.
            if is_its
                && left.contains(&found.object)
                && !self.settled.borrow().contains(&found.object)
            {
                let kept = self.keep(found.object, file)?;
                said = format!("{said}; what is there of it: {kept}");
            }
        }
        Ok(said)
    }

    /// The doubts about one finding. A search for a mark goes through all objects, so it runs only
    /// where it may decide something.
    fn doubt(&self, finding: &Finding, pool: &Circumstances<'_>) -> Doubt {
        let mut doubt = Doubt {
            has_newer_layouts: pool.has_newer_layouts,
            is_member_away: pool.is_member_away,
            is_member_lost: !pool.lost.is_empty(),
            ..Doubt::default()
        };
        match finding {
            Finding::NeverSynced { stub } => {
                doubt.is_stub_doubtful = pool.doubtful.contains(stub);
                doubt.names_lost = self.look.names_lost(*stub, pool.lost);
            }
            Finding::ObjectOfOther { stub, object } => {
                doubt.is_stub_doubtful = pool.doubtful.contains(stub);
                doubt.is_half_kept =
                    !doubt.is_stub_doubtful && self.half_kept(*stub, *object).is_some();
            }
            Finding::Unnamed { object, file, .. } => {
                doubt.is_buried = file.is_some_and(|file| pool.buried.contains(&file));
                doubt.is_in_stripe = pool.is_member_away && self.stripe_of(*object).is_some();
            }
            _ => {}
        }
        doubt
    }

    /// A stub in `lost+found` names an object of a stripe whose mark still says another file: a
    /// repair gave the stub its name and was then interrupted.
    ///
    /// Returns  the file and part for the mark
    fn half_kept(&self, stub: usize, object: Object) -> Option<(FileIdentity, Part)> {
        let layout = self.look.layout(stub)?;
        let mark = self.stripe_of(object)?;
        let part = part_of(layout, object);
        let is_its_place = (part.place, part.origin, part.shape)
            == (mark.part.place, mark.part.origin, mark.part.shape);
        let is_kept = is_in_lost(&self.look.paths[stub]);
        (is_kept && is_its_place && mark.pool == self.pool.id()).then_some((layout.file, mark.part))
    }

    fn remove(&self, object: Object) -> Result<(), PoolError> {
        self.member(object)?.unlink(object.id)?;
        self.settled.borrow_mut().insert(object);
        Ok(())
    }

    fn member(&self, object: Object) -> Result<Arc<Member>, PoolError> {
        self.pool.known(object.member)
    }

    fn open_stub(&self, stub: usize) -> Result<OwnedFd, PoolError> {
        let path = &self.look.paths[stub];
        open_below(
            self.pool.catalogue().tree(),
            path,
            OFlags::RDWR | OFlags::NONBLOCK,
        )
        .map_err(|error| PoolError::system("open", path.display().to_string(), error))
    }

    /// All objects of a file that this version could have written.
    fn holders(&self, file: FileIdentity) -> Result<Vec<Holder>, PoolError> {
        Ok(self.holders_and_size(file)?.0)
    }

    /// The same, and where the last byte of any of them ends.
    fn holders_and_size(&self, file: FileIdentity) -> Result<(Vec<Holder>, u64), PoolError> {
        let mut holders = Vec::new();
        let mut opened = Vec::new();
        for found in &self.look.objects {
            let Mark::Sound(mark) = found.mark else {
                continue;
            };
            let is_settled = self.settled.borrow().contains(&found.object);
            if mark.pool == self.pool.id() && mark.file == file && !is_settled {
                let member = self.member(found.object)?;
                let fd = member.open_any(found.object.id, Access::Read)?;
                holders.push(Holder {
                    object: found.object,
                    part: mark.part,
                    data: self.ranges(&fd)?,
                });
                opened.push(fd);
            }
        }
        let size = size_of(&holders);
        let is_single = |holder: &Holder| holder.part.shape == Shape::Single;
        let shares = |at: usize, holder: &Holder| {
            let others = holders.iter().enumerate().filter(|(other, _)| *other != at);
            let mut others = others
                .map(|(_, other)| other)
                .filter(|other| is_single(other));
            is_single(holder)
                && others.any(|other| {
                    let touches =
                        |range: &ByteRange| holder.data.iter().any(|own| own.overlaps(*range));
                    other.data.iter().any(touches)
                })
        };
        let shared: Vec<bool> = (0..)
            .zip(&holders)
            .map(|(at, one)| shares(at, one))
            .collect();
        for ((holder, fd), shared) in holders.iter_mut().zip(&opened).zip(shared) {
            if shared {
                // If the file goes on elsewhere inside a block, each of the two objects has zeroes
                // in it for the other's part.
                holder.data = self.written(fd)?;
            }
        }
        Ok((holders, size))
    }

    fn ranges(&self, fd: &OwnedFd) -> Result<Vec<ByteRange>, PoolError> {
        data_ranges(fd).map_err(|error| PoolError::system("look for data in an object", "", error))
    }

    /// The same without less than a block of zeroes at either end: a segment that begins or ends
    /// inside a block, as where a member was full, leaves them beside the hole.
    fn written(&self, fd: &OwnedFd) -> Result<Vec<ByteRange>, PoolError> {
        let failed = |error| PoolError::system("look at an object", "", error);
        let block = fstat(fd).map_err(failed)?.st_blksize.max(1) as u64;
        let mut ranges = Vec::new();
        for range in self.ranges(fd)? {
            let length = range.length.0.min(block) as usize;
            let first = read(fd, range.start.0, length)?;
            let last = read(fd, range.end() - length as u64, length)?;
            let zeroes = |count: usize| if count < block as usize { count } else { 0 };
            let before = zeroes(first.iter().take_while(|byte| **byte == 0).count()) as u64;
            let after = zeroes(last.iter().rev().take_while(|byte| **byte == 0).count()) as u64;
            let left = range.length.0.saturating_sub(before + after);
            ranges.push(ByteRange::new(range.start.0 + before, left));
        }
        Ok(ranges)
    }

    /// A part of an object without the zeroes at its ends that share a block with bytes outside of
    /// it: a hole that begins or ends inside a block leaves them, and no other hole takes them
    /// away.
    fn without_edges(&self, fd: &OwnedFd, part: ByteRange) -> Result<ByteRange, PoolError> {
        let failed = |error| PoolError::system("look at an object", "", error);
        let block = fstat(fd).map_err(failed)?.st_blksize.max(1) as u64;
        let is_zero = |start: u64, end: u64| -> Result<bool, PoolError> {
            let bytes = read(fd, start, (end - start) as usize)?;
            Ok(bytes.iter().all(|byte| *byte == 0))
        };
        let (mut start, mut end) = (part.start.0, part.end());
        let first = (start.next_multiple_of(block)).min(end);
        if is_zero(start, first)? {
            start = first;
        }
        let last = (end / block * block).max(start);
        if is_zero(last, end)? {
            end = last;
        }
        Ok(ByteRange::new(start, end - start))
    }

    /// Keep a file without a stub, with all its objects.
    fn keep(&self, object: Object, file: FileIdentity) -> Result<String, PoolError> {
        if self.files.borrow().contains(&file) {
            return self.keep_alone(object);
        }
        let (holders, size) = self.holders_and_size(file)?;
        let Some(layout) = assemble(file, &holders).filter(|all| all.objects().contains(&object))
        else {
            return self.keep_alone(object);
        };
        self.settled.borrow_mut().extend(layout.objects());
        self.files.borrow_mut().insert(file);
        let name = format!("{}.{:08x}", file.number, file.generation);
        adopt(self.pool, &name, &layout, size)
    }

    /// The part for a lost mark: the other objects of its stripe still know how many objects came
    /// before that.
    fn as_its_mates(&self, layout: &Layout, object: Object, part: Part) -> Part {
        let mut segments = layout.segments().iter();
        let segment = segments.find(|segment| segment.objects.contains(&object));
        let serial = segment.and_then(|segment| {
            let mates = segment.objects.iter().filter(|mate| **mate != object);
            mates.filter_map(|mate| self.stripe_of(*mate)).next()
        });
        Part {
            serial: serial.map_or(part.serial, |mate| mate.part.serial),
            ..part
        }
    }

    /// Keep bytes whose file is not known, or has others in their place, as a file of their own.
    fn keep_alone(&self, object: Object) -> Result<String, PoolError> {
        if let Some(mark) = self.stripe_of(object) {
            return self.keep_stripe(object, mark);
        }
        let member = self.member(object)?;
        let file = self.pool.new_file()?;
        let fd = member.open_any(object.id, Access::Read)?;
        let holder = Holder {
            object,
            part: Part::single(0),
            data: self.ranges(&fd)?,
        };
        let layout = assemble(file, std::slice::from_ref(&holder)).expect("one object is whole");
        member.write_mark(object.id, file, holder.part)?;
        self.settled.borrow_mut().insert(object);
        let name = format!("{}.{:016x}", object.member.0, object.id.0);
        adopt(self.pool, &name, &layout, size_of(&[holder]))
    }

    /// Keep a stripe that is not whole, or whose file has others in its place: as a file with its
    /// bytes where they were. Empty objects stand for lost ones.
    ///
    /// It gets the number in the marks, if no other file has that, so that no mark changes; else
    /// the marks change once its stub is there. If an interruption left marks of two files, the
    /// stripe would become two.
    fn keep_stripe(&self, object: Object, of: BackPointer) -> Result<String, PoolError> {
        let is_taken = self.files.borrow().contains(&of.file);
        let file = match is_taken {
            true => self.pool.new_file()?,
            false => of.file,
        };
        let key = |mark: BackPointer| {
            let part = mark.part;
            (mark.file, part.serial, part.origin, part.shape)
        };
        let shape = of.part.shape;
        let mut found: Vec<Option<Object>> = vec![None; shape.object_count()];
        found[usize::from(of.part.place)] = Some(object);
        for &other in self.unnamed.borrow().iter() {
            let mark = self.stripe_of(other).filter(|mark| key(*mark) == key(of));
            let place = mark.and_then(|mark| found.get_mut(usize::from(mark.part.place)));
            // Two objects of one place become two files.
            if let Some(place @ None) = place
                && !self.settled.borrow().contains(&other)
            {
                *place = Some(other);
            }
        }
        let origin = of.part.origin;
        let mut layout = Layout::new(file);
        if origin.0 > 0 {
            // A file has its first segment from 0 on.
            let hole = self.make_empty(file, Part::single(0))?;
            layout.assign(ByteRange::new(0, u64::MAX), ByteOffset(0), hole);
        }
        let mut holders = Vec::with_capacity(found.len());
        for (known, place) in found.into_iter().zip(0..) {
            let part = Part { place, ..of.part };
            let holder = match known {
                Some(object) => {
                    let member = self.member(object)?;
                    let data = self.ranges(&member.open_any(object.id, Access::Read)?)?;
                    Holder { object, part, data }
                }
                None => Holder {
                    object: self.make_empty(file, part)?,
                    part,
                    data: Vec::new(),
                },
            };
            holders.push(holder);
        }
        let objects: Vec<Object> = holders.iter().map(|holder| holder.object).collect();
        self.settled.borrow_mut().extend(objects.iter().copied());
        let range = ByteRange::new(origin.0, u64::MAX - origin.0);
        layout.lay(range, origin, shape, objects);
        self.files.borrow_mut().insert(file);
        let name = format!("{}.{:08x}", of.file.number, of.file.generation);
        let kept = adopt(self.pool, &name, &layout, size_of(&holders))?;
        for holder in holders.iter().filter(|_| is_taken) {
            let (member, id) = (self.member(holder.object)?, holder.object.id);
            member.write_mark(id, file, holder.part)?;
        }
        Ok(kept)
    }

    /// Make an object on the first member that takes it.
    fn make_empty(&self, file: FileIdentity, part: Part) -> Result<Object, PoolError> {
        let mut failure = PoolError::NoRoom;
        for member in self.pool.members().iter() {
            match member.create_object(file, part, true) {
                Ok((object, _)) => return Ok(object),
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    /// Whether every byte of it is also where its file's layout says.
    fn is_copied(&self, object: Object, stub: usize) -> Result<bool, PoolError> {
        let Some(layout) = self.look.layout(stub) else {
            return Ok(false);
        };
        if let Some(mark) = self.stripe_of(object) {
            return Ok(self.is_twin(object, mark.part, layout)?
                || self.is_spread(object, mark.part, layout)?);
        }
        let fd = self.member(object)?.open_any(object.id, Access::Read)?;
        for range in self.written(&fd)? {
            if !self.is_same(&fd, range.start.0, layout, range)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether every byte of an object of a stripe is also in the one that has its place now: it
    /// was moved, or was about to be.
    fn is_twin(&self, object: Object, part: Part, layout: &Layout) -> Result<bool, PoolError> {
        let mut segments = layout.segments().iter();
        let segment = segments.find(|one| (one.origin, one.shape) == (part.origin, part.shape));
        let Some(named) = segment.and_then(|one| one.objects.get(usize::from(part.place))) else {
            return Ok(false);
        };
        let Ok(named) = self.pool.open_object(layout, *named, Access::Read) else {
            return Ok(false);
        };
        let fd = self.member(object)?.open_any(object.id, Access::Read)?;
        for range in self.ranges(&fd)? {
            let mut at = range.start.0;
            while at < range.end() {
                let length = (range.end() - at).min(CHUNK_BYTES as u64) as usize;
                if read(&fd, at, length)? != read(&named, at, length)? {
                    return Ok(false);
                }
                at += length as u64;
            }
        }
        Ok(true)
    }

    /// Whether every byte of an object of a stripe is also where the layout leads: the file was
    /// moved from this stripe to another one, or was about to be moved to this one.
    fn is_spread(&self, object: Object, part: Part, layout: &Layout) -> Result<bool, PoolError> {
        let fd = self.member(object)?.open_any(object.id, Access::Read)?;
        let unit = part.shape.unit_bytes();
        for range in self.written(&fd)? {
            let mut at = range.start.0;
            while at < range.end() {
                let length = (range.end() - at).min(unit - at % unit);
                let behind = part.shape.offset_of(usize::from(part.place), at);
                let there = ByteRange::new(part.origin.0.saturating_add(behind), length);
                if !self.is_same(&fd, at, layout, there)? {
                    return Ok(false);
                }
                at += length;
            }
        }
        Ok(true)
    }

    /// Whether an object has from byte `from` on the same bytes that the layout has in this range
    /// of the file.
    fn is_same(
        &self,
        fd: &OwnedFd,
        from: u64,
        layout: &Layout,
        range: ByteRange,
    ) -> Result<bool, PoolError> {
        let mut opened: Option<(Object, OwnedFd)> = None;
        let mut at = range.start.0;
        while at < range.end() {
            let Some(located) = layout.locate(ByteOffset(at)) else {
                return Ok(false);
            };
            if opened
                .as_ref()
                .is_none_or(|(object, _)| *object != located.object)
            {
                match self.pool.open_object(layout, located.object, Access::Read) {
                    Ok(other) => opened = Some((located.object, other)),
                    // Gone or away: then this object may have the last copy of these bytes.
                    Err(_) => return Ok(false),
                }
            }
            let Some((_, other)) = &opened else {
                return Ok(false);
            };
            let length = (range.end() - at)
                .min(located.length.0)
                .min(CHUNK_BYTES as u64) as usize;
            let there = located.object_offset.0;
            let here = from + (at - range.start.0);
            if read(fd, here, length)? != read(other, there, length)? {
                return Ok(false);
            }
            at += length as u64;
        }
        Ok(true)
    }

    /// Bytes to which the layout does not lead, and blocks without any: an interrupted spill or
    /// move had still to free them.
    fn leftovers(
        &self,
        repair: bool,
        in_doubt: &BTreeSet<usize>,
        report: &mut Fsck,
    ) -> Result<(), PoolError> {
        for (at, stub) in self.look.stubs.iter().enumerate() {
            let Record::Sound(layout) = &stub.record else {
                continue;
            };
            let objects = layout.lengths(ByteCount(stub.size));
            for (&object, &length) in &objects {
                let size = self.look.sizes.get(&object);
                report.behind_end_count += u64::from(size.is_some_and(|&size| size > length));
                let Some(led) = Led::of(layout, object) else {
                    continue;
                };
                if in_doubt.contains(&at) || size.is_none() {
                    continue;
                }
                let Ok(fd) = self.pool.open_object(layout, object, Access::Write) else {
                    continue;
                };
                let copied = self.copied(layout, (&led, &fd), repair)?;
                if copied > 0 {
                    let state = if repair {
                        State::Mended(String::from("given back"))
                    } else {
                        State::Mendable
                    };
                    report.issues.push(Issue {
                        kind: IssueKind::Copied,
                        sentence: format!(
                            "{}: {copied} bytes in {} are also where the record says",
                            self.look.paths[at].display(),
                            self.object_path(object)
                        ),
                        path: Some(self.look.paths[at].clone()),
                        object: Some(object),
                        state,
                    });
                }
                report.reserved_bytes += reserved(&fd, &led, ByteCount(length), repair)?;
            }
        }
        Ok(())
    }

    /// How many bytes of an object are copies: the layout leads to the same bytes elsewhere.
    /// `repair` makes them holes.
    fn copied(
        &self,
        layout: &Layout,
        (led, fd): (&Led, &OwnedFd),
        repair: bool,
    ) -> Result<u64, PoolError> {
        let mut copied = 0;
        for range in self.ranges(fd)? {
            for part in elsewhere(led, layout, range) {
                let part = self.without_edges(fd, part)?;
                for (here, there) in led.in_file(part) {
                    if !self.is_same(fd, here.start.0, layout, there)? {
                        continue;
                    }
                    copied += here.length.0;
                    if repair {
                        vacate_beside(fd, led, here).map_err(|error| {
                            PoolError::system("make a hole in an object", "", error)
                        })?;
                    }
                }
            }
        }
        Ok(copied)
    }
}

/// How many bytes of blocks without a byte an object has, where the layout leads elsewhere or
/// behind the end of its file. `repair` frees them.
fn reserved(fd: &OwnedFd, led: &Led, length: ByteCount, repair: bool) -> Result<u64, PoolError> {
    let failed = |error| PoolError::system("look for blocks of an object", "", error);
    let Some(found) = Reserved::of(fd, led, Some(length)).map_err(failed)? else {
        return Ok(0);
    };
    if repair {
        found
            .give_back(fd)
            .map_err(|error| PoolError::system("give back blocks of an object", "", error))?;
    }
    Ok(found.bytes())
}

/// Parts of a range of an object to which the layout does not lead. Of an unstriped object, cut so
/// that the layout has each in one other object.
fn elsewhere(led: &Led, layout: &Layout, range: ByteRange) -> Vec<ByteRange> {
    let parts = outside(range, &led.ranges);
    if led.shape != Shape::Single {
        return parts;
    }
    let mut each = Vec::new();
    for part in parts {
        let mut at = part.start.0;
        while at < part.end() {
            let of_file = ByteOffset(led.origin.0.saturating_add(at));
            let Some(located) = layout.locate(of_file) else {
                break;
            };
            let length = located.length.0.min(part.end() - at);
            each.push(ByteRange::new(at, length));
            at += length;
        }
    }
    each
}

fn size_of(holders: &[Holder]) -> u64 {
    holders.iter().map(Holder::end).max().unwrap_or(0)
}

/// As many bytes as asked; behind the end they are zero.
fn read(fd: &OwnedFd, at: u64, length: usize) -> Result<Vec<u8>, PoolError> {
    let mut bytes = vec![0; length];
    let mut done = 0;
    while done < length {
        match pread(fd, &mut bytes[done..], at + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) => return Err(PoolError::system("read an object", "", error)),
        }
    }
    Ok(bytes)
}

fn sync(fd: &OwnedFd, what: &str) -> Result<(), PoolError> {
    fsync(fd).map_err(|error| PoolError::system("make durable", what, error))
}

/// The folder `lost+found` of the tree, made if it is not there, and its name. Where that is no
/// folder, or another user's, to whom its contents must not be open, it is the first of
/// `lost+found.1`, … that is neither.
pub(crate) fn lost_folder(pool: &Pool) -> Result<(OwnedFd, String), PoolError> {
    let tree = pool.catalogue().tree();
    for attempt in 0..NAMES_MAX {
        let name = match attempt {
            0 => LOST.to_owned(),
            attempt => format!("{LOST}.{attempt}"),
        };
        let failed = |error| PoolError::system("write to", name.clone(), error);
        match mkdirat(tree, name.as_str(), Mode::RWXU) {
            Ok(()) => chmodat(tree, name.as_str(), Mode::RWXU, AtFlags::empty()).map_err(failed)?,
            Err(Errno::EXIST) => {}
            Err(error) => return Err(failed(error)),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = match openat(tree, name.as_str(), flags, Mode::empty()) {
            Ok(folder) => folder,
            Err(Errno::NOTDIR | Errno::LOOP) => continue,
            Err(error) => return Err(failed(error)),
        };
        if fstat(&folder).map_err(failed)?.st_uid == rustix::process::geteuid().as_raw() {
            return Ok((folder, name));
        }
    }
    Err(PoolError::system("make", LOST, Errno::EXIST))
}

/// Whether a path of the tree is in such a folder.
fn is_in_lost(path: &Path) -> bool {
    let first = path.components().next();
    let name = first.and_then(|part| part.as_os_str().to_str());
    name.and_then(|name| name.strip_prefix(LOST))
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Make a stub in `lost+found` for this layout, durably.
pub(crate) fn adopt(
    pool: &Pool,
    name: &str,
    layout: &Layout,
    size: u64,
) -> Result<String, PoolError> {
    let (folder, lost) = lost_folder(pool)?;
    let failed = |error| PoolError::system("write to", format!("{lost}/{name}"), error);
    // Without a name until it is whole: no program ever sees it half made.
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    let stub = openat(&folder, ".", flags, Mode::RUSR | Mode::WUSR).map_err(failed)?;
    pool.set_layout(stub.as_fd(), layout)?;
    ftruncate(&stub, size).map_err(failed)?;
    sync(&stub, name)?;
    for attempt in 0..NAMES_MAX {
        let name = match attempt {
            0 => name.to_owned(),
            attempt => format!("{name}.{attempt}"),
        };
        match linkat(&stub, c"", &folder, name.as_str(), AtFlags::EMPTY_PATH) {
            Ok(()) => {}
            Err(Errno::EXIST) => continue,
            Err(error) => return Err(failed(error)),
        }
        sync(&folder, &lost)?;
        sync_tree(pool)?;
        return Ok(format!("it is {lost}/{name} now"));
    }
    Err(failed(Errno::EXIST))
}

fn sync_tree(pool: &Pool) -> Result<(), PoolError> {
    fsync(pool.catalogue().tree())
        .map_err(|error| PoolError::system("make durable", "the tree", error))
}
