// SPDX-License-Identifier: Apache-2.0
//! What is wrong with a pool: records and objects, as a look through all of them found them, held against each other.
//!
//! Nothing here touches a file. A finding says what is so; what may be done about it without losing a byte is [`Finding::remedy`]. Which of two copies of
//! a byte counts is decided in one place, [`assemble`]: where there is no record to say it, the object that was made later has it.

use super::layout::{
    BackPointer, FileIdentity, Layout, LayoutFault, MemberNumber, Object, PoolId, Shape,
};
use crate::units::{ByteOffset, ByteRange};
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

/// What a stub has for a layout record.
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

/// What an object has for a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// None.
    Absent,
    /// One that says whose it is.
    Sound(BackPointer),
    /// One that cannot be used.
    Faulty(LayoutFault),
}

/// An object that is on a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundObject {
    /// Which.
    pub object: Object,
    /// Whose it says it is.
    pub mark: Mark,
    /// It has bytes, not only holes.
    pub has_data: bool,
}

/// Something that is not as it should be. Stubs are named by their place in what was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// A record that cannot be used. `file` and `objects`: whose the bytes are by what is left of it, and where; None when it is not known.
    RecordFaulty {
        /// The stub.
        stub: usize,
        /// Why.
        fault: LayoutFault,
        /// The file that it was, proved by the record's own bytes and the marks of objects that nobody else names.
        file: Option<FileIdentity>,
    },
    /// A size, and no record.
    RecordAbsent {
        /// The stub.
        stub: usize,
    },
    /// The record names a member that the pool has not.
    MemberUnknown {
        /// The stub.
        stub: usize,
        /// What it names there.
        object: Object,
    },
    /// The member is there, the object is not: its bytes are lost.
    ObjectAbsent {
        /// The stub.
        stub: usize,
        /// Which.
        object: Object,
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
        /// Of its segment.
        origin: ByteOffset,
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
        /// Whose it says it is; None when it does not say.
        file: Option<FileIdentity>,
        /// The stub that is that file.
        stub: Option<usize>,
        /// It has bytes.
        has_data: bool,
    },
    /// An object of another pool, or of a newer Rushes, that no record names: none of ours to touch.
    Foreign {
        /// Which.
        object: Object,
    },
}

/// What may be done about a finding without losing a byte.
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
    /// Nothing: a person has to decide, or bytes are gone.
    None,
}

impl Finding {
    /// What may be done.
    ///
    /// `newer_records`  a stub has a record of a newer version, which may name anything: then nothing is removed or given a name
    pub fn remedy(&self, newer_records: bool) -> Remedy {
        match self {
            Finding::RecordFaulty {
                fault,
                file: Some(file),
                ..
            } if !matches!(fault, LayoutFault::Newer { .. }) => Remedy::WriteRecord(*file),
            Finding::MarkFaulty {
                is_newer: false, ..
            } => Remedy::WriteMark,
            Finding::Unnamed { .. } if newer_records => Remedy::None,
            Finding::Unnamed {
                has_data: false, ..
            } => Remedy::Remove,
            Finding::Unnamed { stub: Some(_), .. } => Remedy::RemoveIfCopied,
            Finding::Unnamed { .. } => Remedy::Keep,
            _ => Remedy::None,
        }
    }
}

/// Hold all stubs against all objects.
///
/// `known`    the members that the pool has
/// `looked_at` those of them whose objects are in `objects`; of others nothing is said
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
            } else if looked_at.contains(&object.member) {
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
    for found in unnamed {
        let (object, has_data) = (found.object, found.has_data);
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
            origin: layout
                .segments()
                .iter()
                .find(|segment| segment.objects.contains(&object))
                .map_or(ByteOffset(0), |segment| segment.origin),
            is_newer: matches!(found.mark, Mark::Faulty(LayoutFault::Newer { .. })),
        }),
    }
}

/// Whose a damaged record was: number and generation where they stand in a record, or the id of an object anywhere, are in it, and an object that no
/// record names says the same. 96 or 64 bits, mostly drawn at random, do not agree by chance.
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
            // Of two files: damaged in a way that nobody should guess at.
            Some(_) => return None,
        }
    }
    found
}

/// An object of a file whose record is lost, and where it has bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Which.
    pub object: Object,
    /// How many objects the file had before it, from its mark.
    pub serial: u16,
    /// Where it has bytes, in order, without overlap; byte 0 of it is byte 0 of the file.
    pub data: Vec<ByteRange>,
}

/// A layout for a file from its objects alone. Where two have the same byte, that of the later one is taken; which are not named by it is left to the
/// next look. The file ends where the last byte is.
pub fn assemble(file: FileIdentity, pieces: &[Piece]) -> Layout {
    let mut order: Vec<&Piece> = pieces.iter().collect();
    order.sort_by_key(|piece| (piece.serial, piece.object));
    // Start of each stretch, its end, its object.
    let mut painted: BTreeMap<u64, (u64, Object)> = BTreeMap::new();
    for piece in &order {
        for range in &piece.data {
            paint(&mut painted, range.start.0, range.end(), piece.object);
        }
    }
    let mut layout = Layout::new(file);
    let first = painted.values().next().map(|&(_, object)| object);
    let Some(mut now) = first.or_else(|| order.first().map(|piece| piece.object)) else {
        return layout;
    };
    layout.assign(ByteRange::new(0, u64::MAX), ByteOffset(0), now);
    for (start, (_, object)) in painted {
        if object != now {
            let rest = ByteRange::new(start, u64::MAX - start);
            layout.assign(rest, ByteOffset(0), object);
            now = object;
        }
    }
    layout
}

fn paint(painted: &mut BTreeMap<u64, (u64, Object)>, start: u64, end: u64, object: Object) {
    if start >= end {
        return;
    }
    let beneath: Vec<(u64, (u64, Object))> = painted
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
    painted.insert(start, (end, object));
}

/// Whether every segment is one that this version writes: single, byte for byte where the file has it.
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
            serial: 0,
            place: 0,
            origin: ByteOffset(0),
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
            assert_eq!(finding.remedy(false), Remedy::None, "{finding:?}");
        }
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
            assert_eq!(finding.remedy(false), remedy);
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
            assert_eq!(finding.remedy(false), remedy, "{finding:?}");
            assert_eq!(
                finding.remedy(true),
                Remedy::None,
                "a newer record may name it"
            );
        }
        let other = Mark::Sound(BackPointer {
            pool: PoolId(8),
            file: file(1),
            serial: 0,
            place: 0,
            origin: ByteOffset(0),
        });
        let findings = checked(&[], &[found(b, other)]);
        assert_eq!(findings, [Finding::Foreign { object: b }]);
        assert_eq!(findings[0].remedy(false), Remedy::None);
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
        // Two files agree: nobody guesses.
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
            let pieces: Vec<Piece> = (0..=next(4))
                .map(|at| {
                    let mut data = Vec::new();
                    let mut from = next(20);
                    while from < 60 && next(4) > 0 {
                        let length = 1 + next(15);
                        data.push(ByteRange::new(from, length));
                        from += length + 1 + next(15);
                    }
                    Piece {
                        object: object(at as u16, at),
                        serial: next(3) as u16,
                        data,
                    }
                })
                .collect();
            let layout = assemble(file(1), &pieces);
            assert_eq!(Layout::decode(&layout.encode()).as_ref(), Ok(&layout));
            for byte in 0..100 {
                let has = |piece: &&Piece| {
                    piece
                        .data
                        .iter()
                        .any(|range| range.start.0 <= byte && byte < range.end())
                };
                let latest = pieces
                    .iter()
                    .filter(has)
                    .max_by_key(|piece| (piece.serial, piece.object));
                let Some(latest) = latest else { continue };
                let located = layout.locate(ByteOffset(byte));
                let located = located.map(|located| located.object);
                assert_eq!(located, Some(latest.object), "round {round} byte {byte}");
            }
        }
        assert_eq!(assemble(file(1), &[]), layout(1, &[]));
        let empty = Piece {
            object: object(0, 1),
            serial: 0,
            data: vec![],
        };
        assert_eq!(assemble(file(1), &[empty]), layout(1, &[object(0, 1)]));
    }
}
