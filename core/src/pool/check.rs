// SPDX-License-Identifier: Apache-2.0
//! The faults of a pool: records and objects, as a look through all of them found them, held
//! against each other.
//!
//! Nothing here touches a file. A finding states a fact; [`Finding::remedy`] names the remedy that
//! loses no byte. Which of two copies of a byte counts is decided in one place, [`assemble`]:
//! without a record, the copy in the object that was made later.

use super::layout::{
    BackPointer, FileIdentity, Layout, LayoutFault, MemberNumber, Object, Part, PoolId, Shape,
};
use crate::units::{ByteOffset, ByteRange};
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

/// A stub's layout record, as found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// None.
    Absent,
    /// One that says where the bytes are.
    Sound(Layout),
    /// One that cannot be used, and its bytes.
    Faulty(LayoutFault, Vec<u8>),
}

/// A regular file of the catalogue. Files with several names are one stub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stub {
    /// Its size. Units: bytes.
    pub size: u64,
    /// Its record.
    pub record: Record,
}

/// An object's mark, as found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// None.
    Absent,
    /// One that names the file that it belongs to.
    Sound(BackPointer),
    /// One that cannot be used.
    Faulty(LayoutFault),
}

/// An object that is on a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundObject {
    /// Which.
    pub object: Object,
    /// The mark on it, which names its file.
    pub mark: Mark,
    /// It has bytes, not only holes.
    pub has_data: bool,
}

/// A fault. Stubs are named by their place in the list that was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// A record that cannot be used.
    RecordFaulty {
        /// The stub.
        stub: usize,
        /// Why.
        fault: LayoutFault,
        /// The file that it was, proved by the record's own bytes and the marks of objects that no
        /// record names; None when it is not known.
        file: Option<FileIdentity>,
    },
    /// A size, and no record.
    RecordAbsent {
        /// The stub.
        stub: usize,
    },
    /// The record names a member that the pool does not have.
    MemberUnknown {
        /// The stub.
        stub: usize,
        /// The object that it names there.
        object: Object,
    },
    /// The member is there, the object is not: its bytes are lost.
    ObjectAbsent {
        /// The stub.
        stub: usize,
        /// Which.
        object: Object,
    },
    /// The power went while the file was being made: its record is there, an object of it is not,
    /// and no client had synced it.
    NeverSynced {
        /// The stub.
        stub: usize,
    },
    /// The object says that it is another file's, or another pool's.
    ObjectOfOther {
        /// The stub that names it.
        stub: usize,
        /// Which.
        object: Object,
    },
    /// Its mark cannot be used or is not there, but a record names it.
    MarkFaulty {
        /// The stub that names it.
        stub: usize,
        /// Which.
        object: Object,
        /// The part that the mark should say.
        part: Part,
        /// A newer version wrote it.
        is_newer: bool,
    },
    /// Two stubs name it.
    NamedTwice {
        /// The second one.
        stub: usize,
        /// The first one.
        first: usize,
        /// Which.
        object: Object,
    },
    /// Two stubs say that they are the same file.
    SameFile {
        /// The second one.
        stub: usize,
        /// The first one.
        first: usize,
    },
    /// No record names it.
    Unnamed {
        /// Which.
        object: Object,
        /// The file that its mark names; None when it names none.
        file: Option<FileIdentity>,
        /// The stub that is that file.
        stub: Option<usize>,
        /// It has bytes.
        has_data: bool,
    },
    /// An object of another pool, or of a newer Rushes, that no record names: it is not ours to
    /// touch.
    Foreign {
        /// Which.
        object: Object,
    },
}

/// The remedy of a finding that loses no byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// A new record from the objects of the file.
    WriteRecord(FileIdentity),
    /// A new mark for an object that a record names.
    WriteMark,
    /// Remove it: it has no bytes.
    Remove,
    /// Remove it if each byte of it is where the file's record says; else a name in `lost+found`.
    RemoveIfCopied,
    /// A name in `lost+found`.
    Keep,
    /// A record without objects; objects of it that are there get a name in `lost+found`.
    Empty,
    /// Nothing: a person has to decide, or bytes are gone.
    None,
}

/// The circumstances under which a remedy could lose bytes, or another one is right.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Doubt {
    /// A stub has a layout of a newer version, which may name anything.
    pub has_newer_layouts: bool,
    /// A member is away, or has an object that cannot be read: no file is known whole.
    pub is_member_away: bool,
    /// A member was given up with its bytes.
    pub is_member_lost: bool,
    /// Another stub names an object of the finding's stub, or says that it is the same file: a
    /// person decides.
    pub is_stub_doubtful: bool,
    /// The finding's stub names an object on a member that was given up.
    pub names_lost: bool,
    /// The finding's stub is in `lost+found`, and got this object of a stripe just before fsck was
    /// interrupted.
    pub is_half_kept: bool,
    /// The finding's file was removed, and is buried now: an object of it that was on its way to
    /// another member is left.
    pub is_buried: bool,
    /// The finding's object is a part of a stripe.
    pub is_in_stripe: bool,
}

impl Finding {
    /// The remedy. Where bytes could be lost by it: [`Remedy::None`].
    pub fn remedy(&self, doubt: &Doubt) -> Remedy {
        let is_whole = !doubt.is_member_away && !doubt.is_member_lost;
        match self {
            // Bytes that are, or were, on such a member would be missing in the file, and read as
            // zeros.
            Finding::RecordFaulty {
                fault,
                file: Some(file),
                ..
            } if is_whole && !matches!(fault, LayoutFault::Newer { .. }) => {
                Remedy::WriteRecord(*file)
            }
            Finding::MarkFaulty {
                is_newer: false, ..
            } => Remedy::WriteMark,
            Finding::ObjectOfOther { .. } if doubt.is_half_kept && !doubt.is_stub_doubtful => {
                Remedy::WriteMark
            }
            // Objects of it that are there would have no name then.
            Finding::NeverSynced { .. } | Finding::Unnamed { .. } if doubt.has_newer_layouts => {
                Remedy::None
            }
            // The object may be one that another file names, or on its way.
            Finding::NeverSynced { .. }
                if doubt.is_stub_doubtful || doubt.is_member_away || doubt.names_lost =>
            {
                Remedy::None
            }
            Finding::NeverSynced { .. } => Remedy::Empty,
            // Of a stripe nothing can be said before all of it is there.
            Finding::Unnamed { .. } if doubt.is_member_away && doubt.is_in_stripe => Remedy::None,
            Finding::Unnamed {
                has_data: false, ..
            } => Remedy::Remove,
            Finding::Unnamed { stub: Some(_), .. } => Remedy::RemoveIfCopied,
            Finding::Unnamed { .. } if doubt.is_buried => Remedy::Remove,
            Finding::Unnamed { .. } => Remedy::Keep,
            _ => Remedy::None,
        }
    }
}

/// Hold all stubs against all objects.
///
/// `known`    the members that the pool has
/// `looked_at` those of them whose objects are in `objects`; others have no findings
pub fn check(
    pool: PoolId,
    known: &BTreeSet<MemberNumber>,
    looked_at: &BTreeSet<MemberNumber>,
    stubs: &[Stub],
    objects: &[FoundObject],
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut named: BTreeMap<Object, usize> = BTreeMap::new();
    let mut files: BTreeMap<FileIdentity, usize> = BTreeMap::new();
    let there: BTreeMap<Object, &FoundObject> =
        objects.iter().map(|found| (found.object, found)).collect();
    for (at, stub) in stubs.iter().enumerate() {
        let layout = match &stub.record {
            Record::Sound(layout) => layout,
            Record::Absent if stub.size > 0 => {
                findings.push(Finding::RecordAbsent { stub: at });
                continue;
            }
            Record::Absent | Record::Faulty(..) => continue,
        };
        match files.get(&layout.file) {
            Some(&first) => findings.push(Finding::SameFile { stub: at, first }),
            None => {
                files.insert(layout.file, at);
            }
        }
        let is_missing =
            |object: &Object| looked_at.contains(&object.member) && !there.contains_key(object);
        let was_never_synced = layout.is_unsettled() && layout.objects().iter().any(is_missing);
        if was_never_synced {
            findings.push(Finding::NeverSynced { stub: at });
        }
        for object in layout.objects() {
            if let Some(&first) = named.get(&object) {
                findings.push(Finding::NamedTwice {
                    stub: at,
                    first,
                    object,
                });
                continue;
            }
            named.insert(object, at);
            if !known.contains(&object.member) {
                findings.push(Finding::MemberUnknown { stub: at, object });
            } else if looked_at.contains(&object.member) && !was_never_synced {
                findings.extend(named_one(
                    pool,
                    layout,
                    at,
                    object,
                    there.get(&object).copied(),
                ));
            }
        }
    }
    let unnamed: Vec<&FoundObject> = objects
        .iter()
        .filter(|found| !named.contains_key(&found.object))
        .collect();
    let mut proved: BTreeSet<FileIdentity> = BTreeSet::new();
    for (at, stub) in stubs.iter().enumerate() {
        if let Record::Faulty(fault, bytes) = &stub.record {
            let file = proved_file(pool, bytes, &unnamed)
                .filter(|file| !files.contains_key(file) && proved.insert(*file));
            findings.push(Finding::RecordFaulty {
                stub: at,
                fault: *fault,
                file,
            });
        }
    }
    // An empty object of a stripe is part of it as long as another one has bytes.
    let stripe = |found: &FoundObject| match found.mark {
        Mark::Sound(mark) if mark.part.shape != Shape::Single => {
            let part = mark.part;
            let of = (mark.pool, mark.file, part.serial, part.origin);
            Some((of, part.shape.bytes()))
        }
        _ => None,
    };
    let stripes_with_data: BTreeSet<_> = objects
        .iter()
        .filter(|found| found.has_data)
        .filter_map(stripe)
        .collect();
    for found in unnamed {
        let object = found.object;
        let has_data = found.has_data
            || stripe(found).is_some_and(|stripe| stripes_with_data.contains(&stripe));
        let file = match found.mark {
            Mark::Sound(mark) if mark.pool != pool => {
                findings.push(Finding::Foreign { object });
                continue;
            }
            Mark::Faulty(LayoutFault::Newer { .. }) => {
                findings.push(Finding::Foreign { object });
                continue;
            }
            Mark::Sound(mark) => Some(mark.file),
            Mark::Absent | Mark::Faulty(_) => None,
        };
        // It gets its name with the record that is written anew.
        if file.is_some_and(|file| proved.contains(&file)) {
            continue;
        }
        findings.push(Finding::Unnamed {
            object,
            file,
            stub: file.and_then(|file| files.get(&file).copied()),
            has_data,
        });
    }
    findings
}

/// An object that a record names, on a member that was looked at.
fn named_one(
    pool: PoolId,
    layout: &Layout,
    stub: usize,
    object: Object,
    found: Option<&FoundObject>,
) -> Option<Finding> {
    let Some(found) = found else {
        return Some(Finding::ObjectAbsent { stub, object });
    };
    match found.mark {
        Mark::Sound(mark) if mark.pool == pool && mark.file == layout.file => None,
        Mark::Sound(_) => Some(Finding::ObjectOfOther { stub, object }),
        Mark::Absent | Mark::Faulty(_) => Some(Finding::MarkFaulty {
            stub,
            object,
            part: part_of(layout, object),
            is_newer: matches!(found.mark, Mark::Faulty(LayoutFault::Newer { .. })),
        }),
    }
}

/// The part that the mark of an object that this layout names should say. How many objects came
/// before it is not known any more: those that the layout has before it.
pub fn part_of(layout: &Layout, object: Object) -> Part {
    let mut before = BTreeSet::new();
    for segment in layout.segments() {
        let place = segment.objects.iter().position(|one| *one == object);
        if let Some(place) = place {
            return Part {
                serial: before.len() as u16,
                place: place as u16,
                origin: segment.origin,
                shape: segment.shape,
            };
        }
        before.extend(segment.objects.iter().copied());
    }
    Part::single(0)
}

/// The file of a damaged record. The record has its number and generation in their place, or the id
/// of one of its objects anywhere, and no other record names that object. 96 or 64 bits, mostly
/// drawn at random, do not agree by chance.
fn proved_file(pool: PoolId, bytes: &[u8], unnamed: &[&FoundObject]) -> Option<FileIdentity> {
    let mut found = None;
    for one in unnamed {
        let Mark::Sound(mark) = one.mark else {
            continue;
        };
        if mark.pool != pool {
            continue;
        }
        let mut head = [0; 12];
        head[..8].copy_from_slice(&mark.file.number.to_le_bytes());
        head[8..].copy_from_slice(&mark.file.generation.to_le_bytes());
        let id = one.object.id.0.to_le_bytes();
        let agrees = bytes.get(8..20) == Some(&head[..])
            || bytes.windows(id.len()).any(|window| window == id);
        match found {
            _ if !agrees => {}
            None => found = Some(mark.file),
            Some(file) if file == mark.file => {}
            // Of two files: do not guess.
            Some(_) => return None,
        }
    }
    found
}

/// An object that holds bytes of a file with a lost layout, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Which.
    pub object: Object,
    /// The bytes of the file that it has, from its mark.
    pub part: Part,
    /// Where it has bytes, in order, without overlap; as offsets in the object.
    pub data: Vec<ByteRange>,
}

impl Holder {
    /// Where in the file its last byte ends; 0 when it has none.
    pub fn end(&self) -> u64 {
        match self.data.last().and_then(|last| last.end().checked_sub(1)) {
            Some(last) => {
                let behind = self
                    .part
                    .shape
                    .offset_of(usize::from(self.part.place), last);
                self.part.origin.0.saturating_add(behind).saturating_add(1)
            }
            None => 0,
        }
    }
}

/// Objects that bytes of a file are in together.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Home {
    origin: ByteOffset,
    shape: Shape,
    objects: Vec<Object>,
}

/// A layout for a file from its objects alone. Where two have the same byte, that of the later one
/// counts; objects that it does not name are left to the next look. The file ends where the last
/// byte is. A stripe counts from its first byte to its last, holes too.
///
/// Returns  None: a stripe is not whole, so that the places of its bytes are not known
pub fn assemble(file: FileIdentity, holders: &[Holder]) -> Option<Layout> {
    // Objects of one stripe together; any other by itself.
    let mut groups: BTreeMap<_, Vec<&Holder>> = BTreeMap::new();
    for holder in holders {
        let part = holder.part;
        let alone = (part.shape == Shape::Single).then_some(holder.object);
        let key = (
            part.serial,
            alone.is_none(),
            part.origin,
            part.shape.bytes(),
            alone,
        );
        groups.entry(key).or_default().push(holder);
    }
    let mut homes: Vec<(Home, Vec<ByteRange>)> = Vec::new();
    let mut ends: Vec<(u16, bool)> = Vec::new();
    for ((serial, is_striped, ..), group) in groups {
        // Nothing was ever written to it: made when the power went, or a hole as long as the file.
        if is_striped && group.iter().all(|holder| holder.data.is_empty()) {
            continue;
        }
        let part = group[0].part;
        let all = whole(part.shape, &group)?;
        let home = Home {
            origin: part.origin,
            shape: part.shape,
            objects: all.iter().map(|holder| holder.object).collect(),
        };
        homes.push((home, bytes_of(part, &all)));
        ends.push((serial, is_striped));
    }
    // An object that was there before a stripe may have taken bytes out of it later: only the
    // record knew their owner.
    let overlap = |one: &[ByteRange], other: &[ByteRange]| {
        one.iter()
            .any(|range| other.iter().any(|part| range.overlaps(*part)))
    };
    for (at, (stripe, is_striped)) in ends.iter().enumerate() {
        let is_in_doubt = |(of, (serial, is_other)): (usize, &(u16, bool))| {
            *is_striped && !is_other && serial <= stripe && overlap(&homes[of].1, &homes[at].1)
        };
        if ends.iter().enumerate().any(is_in_doubt) {
            return None;
        }
    }
    // Start of each stretch, its end, number of its home.
    let mut painted: BTreeMap<u64, (u64, usize)> = BTreeMap::new();
    for (at, (_, data)) in homes.iter().enumerate() {
        for range in data {
            paint(&mut painted, range.start.0, range.end(), at);
        }
    }
    let mut layout = Layout::new(file);
    if homes.is_empty() {
        return Some(layout);
    }
    let mut now = painted.values().next().map_or(0, |&(_, home)| home);
    let mut give = |start: u64, home: usize| {
        let (home, _) = &homes[home];
        // A stripe has no byte before its origin.
        let start = start.max(home.origin.0);
        layout.lay(
            ByteRange::new(start, u64::MAX - start),
            home.origin,
            home.shape,
            home.objects.clone(),
        );
    };
    // The first segment begins with the file: bytes before a stripe are a hole of another one.
    if homes[now].0.origin.0 > 0 {
        now = homes.iter().position(|(home, _)| home.origin.0 == 0)?;
    }
    give(0, now);
    for (start, (_, home)) in painted {
        if home != now {
            give(start, home);
            now = home;
        }
    }
    Some(layout)
}

/// The objects of a stripe, in their places. None: one is not there, or two have bytes for one
/// place.
fn whole<'a>(shape: Shape, group: &[&'a Holder]) -> Option<Vec<&'a Holder>> {
    if shape == Shape::Single {
        return Some(group.to_vec());
    }
    (0..shape.object_count())
        .map(|place| {
            let mut found = group
                .iter()
                .filter(|holder| usize::from(holder.part.place) == place);
            let first = *found.next()?;
            // A copy that was begun and not named is no reason to doubt, as long as it is empty.
            found.try_fold(first, |known, other| match (&known.data, &other.data) {
                (_, data) if data.is_empty() => Some(known),
                (data, _) if data.is_empty() => Some(*other),
                _ => None,
            })
        })
        .collect()
}

/// The bytes of the file in these objects, which are all of a stripe, or one.
fn bytes_of(part: Part, all: &[&Holder]) -> Vec<ByteRange> {
    if part.shape == Shape::Single {
        let moved = all.iter().flat_map(|holder| &holder.data);
        return moved
            .map(|range| {
                let start = range.start.0.saturating_add(part.origin.0);
                ByteRange::new(start, range.length.0)
            })
            .collect();
    }
    let offset = |place: usize, at: u64| {
        let behind = part.shape.offset_of(place, at);
        part.origin.0.saturating_add(behind)
    };
    let ranges = || {
        let all = all.iter().enumerate();
        all.flat_map(|(place, holder)| holder.data.iter().map(move |range| (place, range)))
    };
    let first = ranges().map(|(place, range)| offset(place, range.start.0));
    let last = ranges()
        .map(|(place, range)| offset(place, range.end().saturating_sub(1)).saturating_add(1));
    match (first.min(), last.max()) {
        (Some(first), Some(last)) => alloc::vec![ByteRange::new(first, last - first)],
        _ => Vec::new(),
    }
}

fn paint(painted: &mut BTreeMap<u64, (u64, usize)>, start: u64, end: u64, home: usize) {
    if start >= end {
        return;
    }
    let beneath: Vec<(u64, (u64, usize))> = painted
        .range(..end)
        .rev()
        .take_while(|(_, (stretch_end, _))| *stretch_end > start)
        .map(|(&at, &stretch)| (at, stretch))
        .collect();
    for (at, (stretch_end, of)) in beneath {
        painted.remove(&at);
        if at < start {
            painted.insert(at, (start, of));
        }
        if stretch_end > end {
            painted.insert(end, (stretch_end, of));
        }
    }
    painted.insert(start, (end, home));
}

/// Whether every segment is one that this version writes: single, byte for byte where the file has
/// it.
pub fn is_plain(layout: &Layout) -> bool {
    layout
        .segments()
        .iter()
        .all(|segment| segment.shape == Shape::Single && segment.origin == ByteOffset(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::layout::ObjectId;
    use alloc::vec;

    const POOL: PoolId = PoolId(7);

    fn file(number: u64) -> FileIdentity {
        FileIdentity {
            number,
            generation: 0x1234_5678,
        }
    }

    fn object(member: u16, id: u64) -> Object {
        Object {
            member: MemberNumber(member),
            id: ObjectId(0x9e37_79b9_0000_0000 | id),
        }
    }

    fn layout(number: u64, objects: &[Object]) -> Layout {
        let mut layout = Layout::new(file(number));
        for (at, &object) in (0u64..).zip(objects) {
            let rest = ByteRange::new(at * 4096, u64::MAX - at * 4096);
            layout.assign(rest, ByteOffset(0), object);
        }
        layout
    }

    fn sound(number: u64, objects: &[Object]) -> Stub {
        Stub {
            size: 9000,
            record: Record::Sound(layout(number, objects)),
        }
    }

    fn mark(number: u64) -> Mark {
        Mark::Sound(BackPointer {
            pool: POOL,
            file: file(number),
            part: Part::single(0),
        })
    }

    fn found(object: Object, mark: Mark) -> FoundObject {
        FoundObject {
            object,
            mark,
            has_data: true,
        }
    }

    fn checked(stubs: &[Stub], objects: &[FoundObject]) -> Vec<Finding> {
        let known = [0, 1, 2].map(MemberNumber).into();
        let looked_at = [0, 1].map(MemberNumber).into();
        check(POOL, &known, &looked_at, stubs, objects)
    }

    #[test]
    fn a_pool_in_order_has_no_findings_and_a_member_that_is_away_is_no_finding() {
        let (a, b, away) = (object(0, 1), object(1, 2), object(2, 3));
        let stubs = [
            sound(1, &[a, away]),
            sound(2, &[b]),
            Stub {
                size: 0,
                record: Record::Absent,
            },
            sound(3, &[]),
        ];
        assert_eq!(checked(&stubs, &[found(a, mark(1)), found(b, mark(2))]), []);
    }

    #[test]
    fn names_without_objects_and_objects_of_others_are_said_and_left() {
        let (a, b, c) = (object(0, 1), object(1, 2), object(5, 3));
        let stubs = [sound(1, &[a, b, c]), sound(2, &[a]), sound(1, &[])];
        let findings = checked(&stubs, &[found(b, mark(9))]);
        assert_eq!(
            findings,
            [
                Finding::ObjectAbsent { stub: 0, object: a },
                Finding::ObjectOfOther { stub: 0, object: b },
                Finding::MemberUnknown { stub: 0, object: c },
                Finding::NamedTwice {
                    stub: 1,
                    first: 0,
                    object: a
                },
                Finding::SameFile { stub: 2, first: 0 },
            ]
        );
        for finding in findings {
            assert_eq!(finding.remedy(&SURE), Remedy::None, "{finding:?}");
        }
    }

    /// Nothing is in doubt.
    const SURE: Doubt = Doubt {
        has_newer_layouts: false,
        is_member_away: false,
        is_member_lost: false,
        is_stub_doubtful: false,
        names_lost: false,
        is_half_kept: false,
        is_buried: false,
        is_in_stripe: false,
    };
    const NEWER: Doubt = Doubt {
        has_newer_layouts: true,
        ..SURE
    };

    #[test]
    fn a_doubt_leaves_what_it_would_lose() {
        let unnamed = |stub, has_data| Finding::Unnamed {
            object: object(0, 1),
            file: Some(file(1)),
            stub,
            has_data,
        };
        let faulty = |fault| Finding::RecordFaulty {
            stub: 0,
            fault,
            file: Some(file(1)),
        };
        let broken = || faulty(LayoutFault::Checksum);
        let newer = || faulty(LayoutFault::Newer { version: 9 });
        let never = Finding::NeverSynced { stub: 0 };
        let of_other = Finding::ObjectOfOther {
            stub: 0,
            object: object(0, 1),
        };
        let write_record = Remedy::WriteRecord(file(1));
        let away = Doubt {
            is_member_away: true,
            ..SURE
        };
        let lost = Doubt {
            is_member_lost: true,
            ..SURE
        };
        let doubtful = Doubt {
            is_stub_doubtful: true,
            ..SURE
        };
        let names_lost = Doubt {
            names_lost: true,
            ..lost
        };
        let half_kept = Doubt {
            is_half_kept: true,
            ..SURE
        };
        let half_kept_doubtful = Doubt {
            is_stub_doubtful: true,
            ..half_kept
        };
        let buried = Doubt {
            is_buried: true,
            ..SURE
        };
        let stripe_away = Doubt {
            is_in_stripe: true,
            ..away
        };
        let stripe = Doubt {
            is_in_stripe: true,
            ..SURE
        };
        let buried_newer = Doubt {
            is_buried: true,
            ..NEWER
        };
        for (finding, doubt, remedy) in [
            (&broken(), SURE, write_record),
            (&broken(), away, Remedy::None),
            (&broken(), lost, Remedy::None),
            (&broken(), doubtful, write_record),
            (&broken(), NEWER, write_record),
            (&newer(), SURE, Remedy::None),
            (&never, SURE, Remedy::Empty),
            (&never, away, Remedy::None),
            (&never, lost, Remedy::Empty),
            (&never, names_lost, Remedy::None),
            (&never, doubtful, Remedy::None),
            (&never, NEWER, Remedy::None),
            (&of_other, SURE, Remedy::None),
            (&of_other, half_kept, Remedy::WriteMark),
            (&of_other, half_kept_doubtful, Remedy::None),
            (&unnamed(None, true), SURE, Remedy::Keep),
            (&unnamed(None, true), buried, Remedy::Remove),
            (&unnamed(None, true), buried_newer, Remedy::None),
            (&unnamed(None, true), away, Remedy::Keep),
            (&unnamed(None, true), stripe, Remedy::Keep),
            (&unnamed(None, true), stripe_away, Remedy::None),
            (&unnamed(None, false), SURE, Remedy::Remove),
            (&unnamed(None, false), stripe_away, Remedy::None),
            (&unnamed(None, false), NEWER, Remedy::None),
            (&unnamed(Some(0), true), SURE, Remedy::RemoveIfCopied),
            (&unnamed(Some(0), true), buried, Remedy::RemoveIfCopied),
            (&unnamed(Some(0), true), stripe_away, Remedy::None),
            (&unnamed(Some(0), false), SURE, Remedy::Remove),
        ] {
            assert_eq!(finding.remedy(&doubt), remedy, "{finding:?} {doubt:?}");
        }
    }

    #[test]
    fn an_object_that_was_never_durable_is_missed_by_nobody() {
        let (a, b, away) = (object(0, 1), object(1, 2), object(2, 3));
        let unsettled = |objects: &[Object]| {
            let mut layout = layout(1, objects);
            layout.set_unsettled(true);
            Stub {
                size: 9000,
                record: Record::Sound(layout),
            }
        };
        let lost = [Finding::NeverSynced { stub: 0 }];
        assert_eq!(checked(&[unsettled(&[a, b])], &[found(b, mark(1))]), lost);
        assert_eq!(lost[0].remedy(&SURE), Remedy::Empty);
        assert_eq!(lost[0].remedy(&NEWER), Remedy::None);
        let both = [found(a, mark(1)), found(b, mark(1))];
        assert_eq!(checked(&[unsettled(&[a, b])], &both), []);
        assert_eq!(checked(&[unsettled(&[away])], &[]), []);
    }

    #[test]
    fn a_mark_is_written_anew_from_the_record_that_names_the_object_unless_it_is_newer() {
        let a = object(0, 1);
        for (mark, remedy) in [
            (Mark::Absent, Remedy::WriteMark),
            (Mark::Faulty(LayoutFault::Checksum), Remedy::WriteMark),
            (
                Mark::Faulty(LayoutFault::Newer { version: 2 }),
                Remedy::None,
            ),
        ] {
            let findings = checked(&[sound(1, &[a])], &[found(a, mark)]);
            let [finding @ Finding::MarkFaulty { .. }] = findings.as_slice() else {
                panic!("{findings:?}")
            };
            assert_eq!(finding.remedy(&SURE), remedy);
        }
    }

    #[test]
    fn objects_that_nobody_names_are_kept_unless_nothing_is_in_them() {
        let (a, b) = (object(0, 1), object(0, 2));
        let stubs = [sound(1, &[a])];
        for (mark, has_data, remedy) in [
            (mark(1), true, Remedy::RemoveIfCopied),
            (mark(2), true, Remedy::Keep),
            (Mark::Absent, true, Remedy::Keep),
            (Mark::Faulty(LayoutFault::NotARecord), true, Remedy::Keep),
            (mark(2), false, Remedy::Remove),
            (Mark::Absent, false, Remedy::Remove),
        ] {
            let one = FoundObject {
                object: b,
                mark,
                has_data,
            };
            let findings = checked(&stubs, &[found(a, super::tests::mark(1)), one]);
            let [finding @ Finding::Unnamed { .. }] = findings.as_slice() else {
                panic!("{findings:?}")
            };
            assert_eq!(finding.remedy(&SURE), remedy, "{finding:?}");
            assert_eq!(
                finding.remedy(&NEWER),
                Remedy::None,
                "a newer record may name it"
            );
        }
        let other = Mark::Sound(BackPointer {
            pool: PoolId(8),
            file: file(1),
            part: Part::single(0),
        });
        let findings = checked(&[], &[found(b, other)]);
        assert_eq!(findings, [Finding::Foreign { object: b }]);
        assert_eq!(findings[0].remedy(&SURE), Remedy::None);
    }

    #[test]
    fn a_damaged_record_is_written_anew_where_its_own_bytes_prove_whose_it_was() {
        let (a, b) = (object(0, 1), object(1, 2));
        let good = layout(1, &[a, b]).encode();
        let faulty = |bytes: Vec<u8>| Stub {
            size: 9000,
            record: Record::Faulty(LayoutFault::Checksum, bytes),
        };
        let objects = [found(a, mark(1)), found(b, mark(1))];
        let proved = |bytes: &[u8], objects: &[FoundObject]| {
            let findings = checked(&[faulty(bytes.to_vec())], objects);
            let Some(Finding::RecordFaulty { file, .. }) = findings.first() else {
                panic!("{findings:?}")
            };
            (*file, findings.len())
        };
        for at in 0..good.len() {
            let mut bytes = good.clone();
            bytes[at] ^= 0x55;
            assert_eq!(proved(&bytes, &objects), (Some(file(1)), 1), "byte {at}");
        }
        // Only an object's id is left of it, then nothing.
        assert_eq!(proved(&good[44..52], &objects), (Some(file(1)), 1));
        assert_eq!(proved(b"RSL\x01forged", &objects), (None, 3));
        // Two files agree: no guess.
        assert_eq!(
            proved(&good, &[found(a, mark(1)), found(b, mark(2))]).0,
            None
        );
        // That file has a stub already.
        let stubs = [sound(1, &[]), faulty(good)];
        let findings = checked(&stubs, &objects);
        assert!(matches!(
            findings[0],
            Finding::RecordFaulty { file: None, .. }
        ));
    }

    #[test]
    fn a_layout_from_objects_has_each_byte_that_any_of_them_has() {
        let mut seed = 0x9e37_79b9_7f4a_7c15u64;
        let mut next = move |below: u64| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed % below
        };
        for round in 0..3_000 {
            let holders: Vec<Holder> = (0..=next(4))
                .map(|at| {
                    let mut data = Vec::new();
                    let mut from = next(20);
                    while from < 60 && next(4) > 0 {
                        let length = 1 + next(15);
                        data.push(ByteRange::new(from, length));
                        from += length + 1 + next(15);
                    }
                    Holder {
                        object: object(at as u16, at),
                        part: Part::single(next(3) as u16),
                        data,
                    }
                })
                .collect();
            let layout = assemble(file(1), &holders).expect("there is no stripe");
            assert_eq!(Layout::decode(&layout.encode()).as_ref(), Ok(&layout));
            for byte in 0..100 {
                let has = |holder: &&Holder| {
                    holder
                        .data
                        .iter()
                        .any(|range| range.start.0 <= byte && byte < range.end())
                };
                let latest = holders
                    .iter()
                    .filter(has)
                    .max_by_key(|holder| (holder.part.serial, holder.object));
                let Some(latest) = latest else { continue };
                let located = layout.locate(ByteOffset(byte));
                let located = located.map(|located| located.object);
                assert_eq!(located, Some(latest.object), "round {round} byte {byte}");
            }
        }
        assert_eq!(assemble(file(1), &[]), Some(layout(1, &[])));
        let empty = Holder {
            object: object(0, 1),
            part: Part::single(0),
            data: vec![],
        };
        assert_eq!(
            assemble(file(1), &[empty]),
            Some(layout(1, &[object(0, 1)]))
        );
    }

    /// A stripe, of which a part was moved, and another one behind it: as a pool writes it whose
    /// first members got full.
    fn striped() -> (Layout, Vec<Holder>) {
        let shape = Shape::Striped {
            unit_log2: 12,
            members: 3,
        };
        let all = |from: u16| (from..from + 3).map(|at| object(at, u64::from(at)));
        let behind = ByteRange::new(45_000, u64::MAX - 45_000);
        let mut found = Layout::new(file(1));
        found.lay(
            ByteRange::new(0, u64::MAX),
            ByteOffset(0),
            shape,
            all(0).collect(),
        );
        found.lay(behind, ByteOffset(40_960), shape, all(3).collect());
        found.assign(ByteRange::new(8192, 8192), ByteOffset(0), object(6, 6));
        let mut holders: Vec<Holder> = (0..7)
            .map(|at| Holder {
                object: object(at, u64::from(at)),
                part: Part {
                    serial: at / 3 * 3,
                    place: at % 3,
                    origin: ByteOffset(if at / 3 == 1 { 40_960 } else { 0 }),
                    shape: if at == 6 { Shape::Single } else { shape },
                },
                data: Vec::new(),
            })
            .collect();
        let mut at = 0;
        while at < 100_000 {
            let located = found.locate(ByteOffset(at)).expect("it covers all");
            let length = located.length.0.min(100_000 - at);
            let holder = holders
                .iter_mut()
                .find(|holder| holder.object == located.object);
            let range = ByteRange::new(located.object_offset.0, length);
            holder.expect("it has a holder").data.push(range);
            at += length;
        }
        (found, holders)
    }

    #[test]
    fn stripes_are_put_together_again_when_they_are_whole() {
        let (layout, mut holders) = striped();
        holders.reverse();
        assert_eq!(assemble(file(1), &holders), Some(layout));
        for missing in 0..6 {
            let (_, mut holders) = striped();
            holders.remove(missing);
            assert_eq!(assemble(file(1), &holders), None, "object {missing}");
        }
    }

    #[test]
    fn what_only_the_record_knew_is_not_guessed_at() {
        // A copy that was begun and not named.
        let (layout, mut holders) = striped();
        let mut spare = holders[1].clone();
        spare.object = object(8, 8);
        spare.data.clear();
        holders.push(spare.clone());
        assert_eq!(assemble(file(1), &holders), Some(layout));
        spare.data = vec![ByteRange::new(0, 4096)];
        holders.pop();
        holders.push(spare);
        assert_eq!(assemble(file(1), &holders), None);
        // An object that was there before the stripe has bytes where the stripe has some, too.
        let (_, mut holders) = striped();
        holders[6].part.serial = 0;
        assert_eq!(assemble(file(1), &holders), None);
        // A stripe that was made and never written to is no part of the file.
        let (layout, mut holders) = striped();
        for at in 0..3 {
            let mut empty = holders[at].clone();
            empty.object = object(9, at as u64 + 20);
            empty.part.serial = 9;
            empty.data.clear();
            holders.push(empty);
        }
        assert_eq!(assemble(file(1), &holders), Some(layout));
    }

    #[test]
    fn an_empty_object_of_a_stripe_is_kept_with_the_others() {
        let (_, holders) = striped();
        let objects: Vec<FoundObject> = holders[..3]
            .iter()
            .map(|holder| FoundObject {
                object: holder.object,
                mark: Mark::Sound(BackPointer {
                    pool: POOL,
                    file: file(1),
                    part: holder.part,
                }),
                has_data: holder.part.place == 0,
            })
            .collect();
        for finding in checked(&[], &objects) {
            assert_eq!(finding.remedy(&SURE), Remedy::Keep, "{finding:?}");
        }
        let empty: Vec<FoundObject> = objects
            .into_iter()
            .map(|found| FoundObject {
                has_data: false,
                ..found
            })
            .collect();
        for finding in checked(&[], &empty) {
            assert_eq!(finding.remedy(&SURE), Remedy::Remove, "{finding:?}");
        }
    }

    #[test]
    fn a_lost_mark_is_written_as_it_was() {
        let (layout, holders) = striped();
        for holder in holders {
            let part = part_of(&layout, holder.object);
            assert_eq!(
                Part { serial: 0, ..part },
                Part {
                    serial: 0,
                    ..holder.part
                }
            );
        }
    }
}
