// SPDX-License-Identifier: Apache-2.0
//! Where the bytes of a file of a pool are: its layout record, and the mark that each object
//! carries in return.
//!
//! **The layout record** (`trusted.rushes.layout` of the stub). All numbers are little-endian. The
//! record of a file with one segment has 56 bytes: as much as an ext4 inode of 256 bytes has room
//! for, so that opening a file reads no further block.
//!
//! | offset | size | meaning |
//! |---|---|---|
//! | 0 | 3 | `RSL` |
//! | 3 | 1 | version of the record: 1; of an unsettled file 2 |
//! | 4 | 4 | CRC-32C of the whole record with these four bytes zero |
//! | 8 | 8 | inode number of the file, the pool's own; not 0 |
//! | 16 | 4 | generation of the file |
//! | 20 | 2 | how many segments |
//! | 22 | 2 | flags; 1: it is unsettled. All others are 0 |
//! | 24 | … | the segments, in the order of the file |
//!
//! **Unsettled** is a file whose first objects are not durable yet. They become so before its first
//! fsync ends; until then a power cut may leave its record and not them. Such a file never had a
//! synced byte. Records of version 1 with that flag are read, too: they were written for a few
//! days.
//!
//! A segment is 20 bytes, then 12 bytes for each of its objects:
//!
//! | offset | size | meaning |
//! |---|---|---|
//! | 0 | 8 | first byte of the file that is in it; it reaches to the next segment, the last one without end |
//! | 8 | 8 | origin: the byte of the file that is (or would be) byte 0 of its objects; not behind the first byte |
//! | 16 | 1 | logarithm of the unit of the stripe; 0: not striped |
//! | 17 | 1 | logarithm of the unit of the stripe over groups; 0: one stage |
//! | 18 | 1 | groups |
//! | 19 | 1 | members of a group |
//! | 20 | 12 each | the objects, group by group: id (8), number of the member (2), 0 (2) |
//!
//! **The back-pointer** (`trusted.rushes.object` of an object), 48 bytes, or 52 of an object of a
//! stripe, with which an object names its file:
//!
//! | offset | size | meaning |
//! |---|---|---|
//! | 0 | 3 | `RSO` |
//! | 3 | 1 | version: 1, of an object of a stripe 2 |
//! | 4 | 4 | CRC-32C of the whole with these four bytes zero |
//! | 8 | 16 | id of the pool |
//! | 24 | 8 | inode number of the file |
//! | 32 | 4 | generation of the file |
//! | 36 | 2 | how many objects the file had before it, or before its stripe |
//! | 38 | 2 | place in its stripe; 0 where there is none |
//! | 40 | 8 | origin, as in the segment |
//! | 48 | 4 | of a stripe only: its shape, as bytes 16 to 19 of a segment |
//!
//! A record that cannot have been written by this version is refused, never guessed at:
//! [`LayoutFault`] tells damage and newer versions apart.

use crate::units::{ByteCount, ByteOffset, ByteRange};
use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt;

/// Version of the layout record, and of the back-pointer of an object that is in no stripe.
pub const VERSION: u8 = 1;
/// Of the layout record of an unsettled file: an older Rushes would take the flag for damage, and
/// write the record anew.
const UNSETTLED_VERSION: u8 = 2;
/// Of the back-pointer of an object of a stripe: an older Rushes would take it for one that has
/// bytes where the file has them.
const STRIPED_VERSION: u8 = 2;
/// Of the record before its segments. Units: bytes.
pub const HEAD_BYTES: usize = 24;
/// Of a segment before its objects. Units: bytes.
pub const SEGMENT_BYTES: usize = 20;
/// Of an object in a segment. Units: bytes.
pub const OBJECT_BYTES: usize = 12;
/// Of a back-pointer of an object that is in no stripe. Units: bytes.
pub const BACK_POINTER_BYTES: usize = 48;
/// Most segments of one file. A catalogue's file system may have room for fewer.
pub const SEGMENT_COUNT_MAX: usize = 1024;
/// Smallest and largest unit of a stripe, as logarithms: 4 KiB, 1 GiB.
pub(super) const UNIT_LOG2: core::ops::RangeInclusive<u8> = 12..=30;

const LAYOUT_MAGIC: [u8; 3] = *b"RSL";
const OBJECT_MAGIC: [u8; 3] = *b"RSO";
const UNSETTLED: u16 = 1;

const _: () = assert!(HEAD_BYTES + SEGMENT_BYTES + OBJECT_BYTES == 56);
const _: () = assert!(BACK_POINTER_BYTES == 8 + 16 + 8 + 4 + 2 + 2 + 8);

/// Of one pool, and of no other: 128 random bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolId(pub u128);

/// A member's number in its pool. Never given to another member of that pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberNumber(pub u16);

/// Names an object on its member: 64 random bits, no two alike on one member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectId(pub u64);

/// The identity of a file for as long as the pool lives: no two files of a pool have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileIdentity {
    /// Inode number, the pool's own.
    pub number: u64,
    /// Differs for a number that was given a second time, after a catalogue was restored from a
    /// copy.
    pub generation: u32,
}

/// A regular file on a member, which holds bytes of one file of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Object {
    /// On which member.
    pub member: MemberNumber,
    /// Under which name.
    pub id: ObjectId,
}

/// How a segment's bytes are spread over its objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// One object has them all.
    Single,
    /// Unit by unit over all objects in turn.
    Striped {
        /// Logarithm of the unit.
        unit_log2: u8,
        /// Objects; 2 at least.
        members: u8,
    },
    /// Unit by unit over groups, and each group's bytes unit by unit over its members.
    StripedTwice {
        /// Logarithm of the unit within a group.
        unit_log2: u8,
        /// Logarithm of the unit over groups; not smaller.
        group_unit_log2: u8,
        /// Groups; 2 at least.
        groups: u8,
        /// Objects of each group; 2 at least.
        members: u8,
    },
}

impl Shape {
    /// How many objects such a segment has.
    pub const fn object_count(self) -> usize {
        match self {
            Shape::Single => 1,
            Shape::Striped { members, .. } => members as usize,
            Shape::StripedTwice {
                groups, members, ..
            } => groups as usize * members as usize,
        }
    }

    /// As it stands in a record.
    pub(super) const fn bytes(self) -> [u8; 4] {
        match self {
            Shape::Single => [0, 0, 1, 1],
            Shape::Striped { unit_log2, members } => [unit_log2, 0, 1, members],
            Shape::StripedTwice {
                unit_log2,
                group_unit_log2,
                groups,
                members,
            } => [unit_log2, group_unit_log2, groups, members],
        }
    }

    fn of(bytes: [u8; 4]) -> Option<Shape> {
        let shape = match bytes {
            [0, 0, 1, 1] => Shape::Single,
            [unit_log2, 0, 1, members] => Shape::Striped { unit_log2, members },
            [unit_log2, group_unit_log2, groups, members] => Shape::StripedTwice {
                unit_log2,
                group_unit_log2,
                groups,
                members,
            },
        };
        shape.is_sound().then_some(shape)
    }

    fn is_sound(self) -> bool {
        match self {
            Shape::Single => true,
            Shape::Striped { unit_log2, members } => UNIT_LOG2.contains(&unit_log2) && members >= 2,
            Shape::StripedTwice {
                unit_log2,
                group_unit_log2,
                groups,
                members,
            } => {
                UNIT_LOG2.contains(&unit_log2)
                    && UNIT_LOG2.contains(&group_unit_log2)
                    && group_unit_log2 >= unit_log2
                    && groups >= 2
                    && members >= 2
            }
        }
    }

    /// The length of object `index` when it has its share of the first `length` bytes behind the
    /// origin, and so the place in it of the first byte that lies at `length` or behind.
    pub fn share(self, index: usize, length: u64) -> u64 {
        fn stripe(length: u64, unit_log2: u8, ways: u8, way: u64) -> u64 {
            let unit = 1u64 << unit_log2;
            let round = unit * u64::from(ways);
            let rest = (length % round).saturating_sub(way * unit);
            length / round * unit + rest.min(unit)
        }
        let index = index as u64;
        match self {
            Shape::Single => length,
            Shape::Striped { unit_log2, members } => stripe(length, unit_log2, members, index),
            Shape::StripedTwice {
                unit_log2,
                group_unit_log2,
                groups,
                members,
            } => {
                let (group, way) = (index / u64::from(members), index % u64::from(members));
                let in_group = stripe(length, group_unit_log2, groups, group);
                stripe(in_group, unit_log2, members, way)
            }
        }
    }

    /// How far behind the origin byte `at` of object `index` is: the place from which
    /// [`Shape::locate`] leads to it.
    pub fn offset_of(self, index: usize, at: u64) -> u64 {
        fn back(at: u64, unit_log2: u8, ways: u8, way: u64) -> u64 {
            let unit = 1u64 << unit_log2;
            (at >> unit_log2)
                .saturating_mul(u64::from(ways))
                .saturating_add(way)
                .saturating_mul(unit)
                .saturating_add(at & (unit - 1))
        }
        let index = index as u64;
        match self {
            Shape::Single => at,
            Shape::Striped { unit_log2, members } => back(at, unit_log2, members, index),
            Shape::StripedTwice {
                unit_log2,
                group_unit_log2,
                groups,
                members,
            } => {
                let (group, way) = (index / u64::from(members), index % u64::from(members));
                let in_group = back(at, unit_log2, members, way);
                back(in_group, group_unit_log2, groups, group)
            }
        }
    }

    /// The unit that all of it is made of. Units: bytes.
    pub const fn unit_bytes(self) -> u64 {
        match self {
            Shape::Single => 1,
            Shape::Striped { unit_log2, .. } | Shape::StripedTwice { unit_log2, .. } => {
                1 << unit_log2
            }
        }
    }

    /// Which object has the byte `at` bytes behind the origin, where in it, and how many bytes
    /// follow there.
    pub fn locate(self, at: u64) -> (usize, u64, u64) {
        /// Which of `ways`, where in its stream, how far to the end of the unit.
        fn stripe(at: u64, unit_log2: u8, ways: u8) -> (u64, u64, u64) {
            let unit = 1u64 << unit_log2;
            let (turn, within) = (at >> unit_log2, at & (unit - 1));
            let way = turn % u64::from(ways);
            let place = ((turn / u64::from(ways)) << unit_log2) + within;
            (way, place, unit - within)
        }
        match self {
            Shape::Single => (0, at, u64::MAX - at),
            Shape::Striped { unit_log2, members } => {
                let (way, place, left) = stripe(at, unit_log2, members);
                (way as usize, place, left)
            }
            Shape::StripedTwice {
                unit_log2,
                group_unit_log2,
                groups,
                members,
            } => {
                let (group, in_group, group_left) = stripe(at, group_unit_log2, groups);
                let (way, place, left) = stripe(in_group, unit_log2, members);
                let index = group * u64::from(members) + way;
                (index as usize, place, left.min(group_left))
            }
        }
    }
}

/// A part of a file whose bytes are in the same objects. It ends where the next one starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First byte of the file in it.
    pub start: ByteOffset,
    /// The byte of the file that is byte 0 of its objects; at most `start`.
    pub origin: ByteOffset,
    /// How its bytes are spread.
    pub shape: Shape,
    /// As many as the shape says.
    pub objects: Vec<Object>,
}

/// Where a byte of a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Located {
    /// Number of the segment in its layout.
    pub segment_index: usize,
    /// In which object.
    pub object: Object,
    /// Where in the object.
    pub object_offset: ByteOffset,
    /// How many bytes of the file lie one after the other from there on. Never 0.
    pub length: ByteCount,
}

/// Where the bytes of a file are. A file to which nothing was written has no segment; the segments
/// of any other cover it from 0 on without end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Which file.
    pub file: FileIdentity,
    segments: Vec<Segment>,
    is_unsettled: bool,
}

/// Why a record is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayoutFault {
    /// Shorter than its own counts say, or than any record.
    Truncated {
        /// How much there is. Units: bytes.
        read: usize,
        /// How much there should be at least. Units: bytes.
        expected: usize,
    },
    /// It does not begin as a record does.
    NotARecord,
    /// Written by a newer Rushes.
    Newer {
        /// Its version.
        version: u8,
    },
    /// Its checksum is of other bytes.
    Checksum,
    /// Its checksum is right, but no Rushes of this version writes this; the words name the fault.
    Unsound(&'static str),
}

impl fmt::Display for LayoutFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LayoutFault::Truncated { read, expected } => {
                write!(
                    f,
                    "it is cut off: {read} bytes, expected {expected} at least"
                )
            }
            LayoutFault::NotARecord => write!(f, "it does not begin as such a record does"),
            LayoutFault::Newer { version } => write!(
                f,
                "it is of version {version}, which this Rushes does not know; use a newer Rushes"
            ),
            LayoutFault::Checksum => write!(f, "its checksum does not fit its bytes"),
            LayoutFault::Unsound(what) => write!(f, "{what}"),
        }
    }
}

impl Layout {
    /// Of a file to which nothing was written.
    pub fn new(file: FileIdentity) -> Layout {
        Layout {
            file,
            segments: Vec::new(),
            is_unsettled: false,
        }
    }

    /// Its first objects may be missing after a power cut: see this file's head.
    pub fn is_unsettled(&self) -> bool {
        self.is_unsettled
    }

    /// Its objects are durable, or not yet. A layout without segments has none that could be
    /// missing.
    pub fn set_unsettled(&mut self, is_unsettled: bool) {
        self.is_unsettled = is_unsettled && !self.segments.is_empty();
    }

    /// Its segments, in the order of the file.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Which bytes of the file a segment has.
    ///
    /// Panics   when there is no such segment
    pub fn range_of(&self, segment_index: usize) -> ByteRange {
        let start = self.segments[segment_index].start.0;
        let end = self
            .segments
            .get(segment_index + 1)
            .map_or(u64::MAX, |next| next.start.0);
        ByteRange::new(start, end - start)
    }

    /// Where a byte is. None: the file has no segments, so that all its bytes are zero.
    pub fn locate(&self, offset: ByteOffset) -> Option<Located> {
        let segment_index = self.segment_at(offset)?;
        let segment = &self.segments[segment_index];
        let (object_index, object_offset, run) = segment.shape.locate(offset.0 - segment.origin.0);
        let to_end = self.range_of(segment_index).end() - offset.0;
        Some(Located {
            segment_index,
            object: segment.objects[object_index],
            object_offset: ByteOffset(object_offset),
            length: ByteCount(run.min(to_end).max(1)),
        })
    }

    /// Number of the segment that has this byte.
    pub fn segment_at(&self, offset: ByteOffset) -> Option<usize> {
        self.segments
            .partition_point(|segment| segment.start <= offset)
            .checked_sub(1)
    }

    /// All objects, each once.
    pub fn objects(&self) -> Vec<Object> {
        let mut all: Vec<Object> = self
            .segments
            .iter()
            .flat_map(|segment| segment.objects.iter().copied())
            .collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// The object that holds bytes of this file singly on this member from this origin on, if there
    /// is one.
    pub fn single_on(&self, member: MemberNumber, origin: ByteOffset) -> Option<Object> {
        self.segments
            .iter()
            .filter(|segment| segment.shape == Shape::Single && segment.origin == origin)
            .flat_map(|segment| segment.objects.iter().copied())
            .find(|object| object.member == member)
    }

    /// From now on these bytes are in this object, singly. Neighbours that come to be in the same
    /// object become one.
    ///
    /// Assumes  origin ≤ range.start; the first segment of a file covers all of it (both asserted)
    pub fn assign(&mut self, range: ByteRange, origin: ByteOffset, object: Object) {
        self.lay(range, origin, Shape::Single, vec![object]);
    }

    /// From now on these bytes are in these objects, as the shape says. Neighbours that come to be
    /// in the same objects become one.
    ///
    /// Assumes  as [`Layout::assign`]; as many objects as the shape says (asserted)
    pub fn lay(
        &mut self,
        range: ByteRange,
        origin: ByteOffset,
        shape: Shape,
        objects: Vec<Object>,
    ) {
        assert!(origin <= range.start, "an origin behind the first byte");
        assert!(
            objects.len() == shape.object_count(),
            "a shape has its number of objects"
        );
        let new = Segment {
            start: range.start,
            origin,
            shape,
            objects,
        };
        if self.segments.is_empty() {
            assert!(
                range.start.0 == 0 && range.end() == u64::MAX,
                "the first segment covers the whole file"
            );
            self.segments.push(new);
            return;
        }
        if range.length.0 == 0 {
            return;
        }
        let end = ByteOffset(range.end());
        // Bytes behind the range go on where they were.
        let tail = (end.0 != u64::MAX).then(|| {
            let mut tail = self.segments[self.segment_at(end).unwrap_or(0)].clone();
            tail.start = end;
            tail
        });
        self.segments
            .retain(|segment| segment.start < range.start || segment.start > end);
        let at = self
            .segments
            .partition_point(|segment| segment.start < range.start);
        self.segments.insert(at, new);
        if let Some(tail) = tail {
            self.segments.insert(at + 1, tail);
        }
        self.segments.dedup_by(|next, before| {
            next.origin == before.origin
                && next.shape == before.shape
                && next.objects == before.objects
        });
    }

    /// The bytes of one object are in another, byte for byte.
    pub fn replace(&mut self, before: Object, after: Object) {
        let all = self.segments.iter_mut();
        for object in all.flat_map(|segment| &mut segment.objects) {
            if *object == before {
                *object = after;
            }
        }
    }

    /// How long each object may be in a file of `size` bytes. One that is longer has bytes behind
    /// the file's end.
    pub fn lengths(&self, size: ByteCount) -> BTreeMap<Object, u64> {
        let mut lengths = BTreeMap::new();
        for segment in &self.segments {
            let length = size.0.saturating_sub(segment.origin.0);
            for (index, &object) in segment.objects.iter().enumerate() {
                let share = segment.shape.share(index, length);
                let known = lengths.entry(object).or_insert(share);
                *known = share.max(*known);
            }
        }
        lengths
    }

    /// Forget all segments that start at or behind `size`; of a file of no bytes, all. Returns
    /// objects that are named no longer.
    pub fn cut(&mut self, size: ByteCount) -> Vec<Object> {
        let mut before = self.objects();
        self.segments.retain(|segment| segment.start.0 < size.0);
        self.set_unsettled(self.is_unsettled);
        let after = self.objects();
        before.retain(|object| after.binary_search(object).is_err());
        before
    }

    /// The record.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD_BYTES + 2 * (SEGMENT_BYTES + OBJECT_BYTES));
        out.extend(LAYOUT_MAGIC);
        out.push(match self.is_unsettled {
            true => UNSETTLED_VERSION,
            false => VERSION,
        });
        out.extend([0; 4]);
        out.extend(self.file.number.to_le_bytes());
        out.extend(self.file.generation.to_le_bytes());
        out.extend((self.segments.len() as u16).to_le_bytes());
        let flags = if self.is_unsettled { UNSETTLED } else { 0 };
        out.extend(flags.to_le_bytes());
        for segment in &self.segments {
            out.extend(segment.start.0.to_le_bytes());
            out.extend(segment.origin.0.to_le_bytes());
            out.extend(segment.shape.bytes());
            for object in &segment.objects {
                out.extend(object.id.0.to_le_bytes());
                out.extend(object.member.0.to_le_bytes());
                out.extend([0; 2]);
            }
        }
        seal(&mut out);
        out
    }

    /// Whether it has no more segments than a record may have.
    pub fn fits_a_record(&self) -> bool {
        self.segments.len() <= SEGMENT_COUNT_MAX
    }

    /// A layout from its record.
    pub fn decode(record: &[u8]) -> Result<Layout, LayoutFault> {
        let (mut reader, version) =
            Reader::open(record, LAYOUT_MAGIC, HEAD_BYTES, UNSETTLED_VERSION)?;
        let file = FileIdentity {
            number: reader.u64()?,
            generation: reader.u32()?,
        };
        let segment_count = usize::from(reader.u16()?);
        let flags = reader.u16()?;
        let mut segments: Vec<Segment> = Vec::new();
        for _ in 0..segment_count {
            let start = ByteOffset(reader.u64()?);
            let origin = ByteOffset(reader.u64()?);
            let shape = reader.array::<4>()?;
            let shape = Shape::of(shape).ok_or(LayoutFault::Unsound(
                "a segment has a shape that there is not",
            ))?;
            let mut objects = Vec::new();
            for _ in 0..shape.object_count() {
                let id = ObjectId(reader.u64()?);
                let member = MemberNumber(reader.u16()?);
                if reader.u16()? != 0 {
                    return Err(LayoutFault::Unsound(
                        "an object has bytes that must be zero",
                    ));
                }
                objects.push(Object { member, id });
            }
            let expected = segments.last().map(|before| before.start);
            let in_order = match expected {
                None => start.0 == 0,
                Some(before) => start > before,
            };
            if !in_order {
                return Err(LayoutFault::Unsound(
                    "its segments do not follow each other from byte 0 on",
                ));
            }
            if origin > start {
                return Err(LayoutFault::Unsound(
                    "a segment's origin is behind its first byte",
                ));
            }
            segments.push(Segment {
                start,
                origin,
                shape,
                objects,
            });
        }
        reader.end()?;
        if file.number == 0 {
            return Err(LayoutFault::Unsound("it is of a file with the number 0"));
        }
        let is_unsettled = flags & UNSETTLED != 0;
        let may_be = match is_unsettled {
            true => !segments.is_empty(),
            false => version == VERSION,
        };
        if flags & !UNSETTLED != 0 || !may_be {
            return Err(LayoutFault::Unsound("it has flags that there are not"));
        }
        if segments.len() > SEGMENT_COUNT_MAX {
            return Err(LayoutFault::Unsound("it has too many segments"));
        }
        Ok(Layout {
            file,
            segments,
            is_unsettled,
        })
    }
}

/// The part of a file's bytes that an object has, by its own mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// How many objects the file had before it, or before its stripe.
    pub serial: u16,
    /// Place in its stripe.
    pub place: u16,
    /// As in its segment.
    pub origin: ByteOffset,
    /// As in its segment.
    pub shape: Shape,
}

impl Part {
    /// Of an object that has each byte where the file has it.
    pub const fn single(serial: u16) -> Part {
        Part {
            serial,
            place: 0,
            origin: ByteOffset(0),
            shape: Shape::Single,
        }
    }
}

/// The file that an object belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackPointer {
    /// Of which pool.
    pub pool: PoolId,
    /// Of which file.
    pub file: FileIdentity,
    /// Which of its bytes it has.
    pub part: Part,
}

impl BackPointer {
    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        let is_striped = self.part.shape != Shape::Single;
        let mut out = Vec::with_capacity(BACK_POINTER_BYTES + 4);
        out.extend(OBJECT_MAGIC);
        out.push(if is_striped { STRIPED_VERSION } else { VERSION });
        out.extend([0; 4]);
        out.extend(self.pool.0.to_le_bytes());
        out.extend(self.file.number.to_le_bytes());
        out.extend(self.file.generation.to_le_bytes());
        out.extend(self.part.serial.to_le_bytes());
        out.extend(self.part.place.to_le_bytes());
        out.extend(self.part.origin.0.to_le_bytes());
        if is_striped {
            out.extend(self.part.shape.bytes());
        }
        seal(&mut out);
        out
    }

    /// From its bytes.
    pub fn decode(bytes: &[u8]) -> Result<BackPointer, LayoutFault> {
        let (mut reader, version) =
            Reader::open(bytes, OBJECT_MAGIC, BACK_POINTER_BYTES, STRIPED_VERSION)?;
        let pool = PoolId(u128::from_le_bytes(reader.array()?));
        let file = FileIdentity {
            number: reader.u64()?,
            generation: reader.u32()?,
        };
        let mut part = Part {
            serial: reader.u16()?,
            place: reader.u16()?,
            origin: ByteOffset(reader.u64()?),
            shape: Shape::Single,
        };
        if version == STRIPED_VERSION {
            let shape = Shape::of(reader.array::<4>()?)
                .filter(|shape| *shape != Shape::Single)
                .ok_or(LayoutFault::Unsound("it is of a stripe that there is not"))?;
            if usize::from(part.place) >= shape.object_count() {
                return Err(LayoutFault::Unsound(
                    "its place is one that its stripe has not",
                ));
            }
            part.shape = shape;
        }
        reader.end()?;
        Ok(BackPointer { pool, file, part })
    }
}

/// Takes numbers from the front of checked bytes.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    /// Length, magic and version, and only then the checksum: a newer version may have another one.
    ///
    /// Returns  it and the version
    fn open(
        bytes: &[u8],
        magic: [u8; 3],
        least: usize,
        newest: u8,
    ) -> Result<(Reader<'_>, u8), LayoutFault> {
        let mut reader = Reader { bytes, at: 0 };
        if reader.array::<3>()? != magic {
            return Err(LayoutFault::NotARecord);
        }
        let [version] = reader.array::<1>()?;
        if version > newest {
            return Err(LayoutFault::Newer { version });
        }
        if bytes.len() < least {
            return Err(LayoutFault::Truncated {
                read: bytes.len(),
                expected: least,
            });
        }
        let said = reader.u32()?;
        if version == 0 || said != checksum(bytes) {
            return Err(LayoutFault::Checksum);
        }
        Ok((reader, version))
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], LayoutFault> {
        let found = self.bytes[self.at..]
            .first_chunk::<N>()
            .ok_or(LayoutFault::Truncated {
                read: self.bytes.len(),
                expected: self.at + N,
            })?;
        self.at += N;
        Ok(*found)
    }

    fn u16(&mut self) -> Result<u16, LayoutFault> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, LayoutFault> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, LayoutFault> {
        self.array().map(u64::from_le_bytes)
    }

    fn end(&self) -> Result<(), LayoutFault> {
        if self.at == self.bytes.len() {
            Ok(())
        } else {
            Err(LayoutFault::Unsound("bytes follow its end"))
        }
    }
}

/// Where magic and version end and the checksum stands.
const CHECKSUM_AT: core::ops::Range<usize> = 4..8;

fn seal(record: &mut [u8]) {
    let sum = checksum(record);
    record[CHECKSUM_AT].copy_from_slice(&sum.to_le_bytes());
}

/// CRC-32C of a record whose own checksum counts as zero.
fn checksum(record: &[u8]) -> u32 {
    let mut sum = u32::MAX;
    for (at, &byte) in record.iter().enumerate() {
        let byte = if CHECKSUM_AT.contains(&at) { 0 } else { byte };
        sum = CRC32C[usize::from(sum as u8 ^ byte)] ^ sum >> 8;
    }
    !sum
}

/// CRC-32C of these bytes.
pub fn crc32c(bytes: &[u8]) -> u32 {
    let step = |sum: u32, &byte: &u8| CRC32C[usize::from(sum as u8 ^ byte)] ^ sum >> 8;
    !bytes.iter().fold(u32::MAX, step)
}

/// Castagnoli's polynomial, reflected: it finds every change of up to five bits in records as short
/// as these.
const CRC32C: [u32; 256] = {
    let mut table = [0u32; 256];
    let mut at = 0;
    while at < 256 {
        let mut sum = at as u32;
        let mut bit = 0;
        while bit < 8 {
            sum = if sum & 1 == 1 {
                sum >> 1 ^ 0x82f6_3b78
            } else {
                sum >> 1
            };
            bit += 1;
        }
        table[at] = sum;
        at += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileIdentity = FileIdentity {
        number: 77,
        generation: 5,
    };

    /// The same numbers in every run (xorshift).
    struct Chance(u64);

    impl Chance {
        fn next(&mut self, below: u64) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0 % below
        }
    }

    fn object(member: u16, id: u64) -> Object {
        Object {
            member: MemberNumber(member),
            id: ObjectId(id),
        }
    }

    fn all() -> ByteRange {
        ByteRange::new(0, u64::MAX)
    }

    fn single() -> Layout {
        let mut layout = Layout::new(FILE);
        layout.assign(all(), ByteOffset(0), object(3, 0x3f00_0000_0000_0001));
        layout
    }

    /// One of each shape.
    fn of_all_shapes() -> Layout {
        let shapes = [
            Shape::Single,
            Shape::Striped {
                unit_log2: 16,
                members: 3,
            },
            Shape::StripedTwice {
                unit_log2: 12,
                group_unit_log2: 20,
                groups: 2,
                members: 2,
            },
        ];
        let segments = shapes.into_iter().zip(0u64..).map(|(shape, at)| Segment {
            start: ByteOffset(at << 30),
            origin: ByteOffset(at << 29),
            shape,
            objects: (0..shape.object_count() as u16)
                .map(|member| object(member, at * 100 + u64::from(member)))
                .collect(),
        });
        Layout {
            file: FILE,
            segments: segments.collect(),
            is_unsettled: false,
        }
    }

    const FOUR_OF_64_KIB: Shape = Shape::Striped {
        unit_log2: 16,
        members: 4,
    };

    fn mark(shape: Shape) -> BackPointer {
        BackPointer {
            pool: PoolId(1 << 100 | 7),
            file: FILE,
            part: Part {
                serial: 2,
                place: 1,
                origin: ByteOffset(4096),
                shape,
            },
        }
    }

    fn resealed(mut record: Vec<u8>, at: usize, bytes: &[u8]) -> Vec<u8> {
        record[at..at + bytes.len()].copy_from_slice(bytes);
        seal(&mut record);
        record
    }

    #[test]
    fn records_read_back_as_they_were_written() {
        let mut unsettled = single();
        unsettled.set_unsettled(true);
        for layout in [Layout::new(FILE), single(), of_all_shapes(), unsettled] {
            assert_eq!(Layout::decode(&layout.encode()), Ok(layout));
        }
        assert_eq!(single().encode().len(), 56);
        for (shape, bytes) in [
            (Shape::Single, BACK_POINTER_BYTES),
            (FOUR_OF_64_KIB, BACK_POINTER_BYTES + 4),
        ] {
            let mark = mark(shape);
            assert_eq!(mark.encode().len(), bytes);
            assert_eq!(BackPointer::decode(&mark.encode()), Ok(mark));
        }
    }

    #[test]
    fn a_mark_of_a_stripe_that_cannot_be_is_unsound() {
        let sound = mark(FOUR_OF_64_KIB).encode();
        for (at, bytes) in [
            (38, &[4u8][..]),
            (48, &[0, 0, 1, 1][..]),
            (48, &[16, 0, 1, 1][..]),
        ] {
            let fault = BackPointer::decode(&resealed(sound.clone(), at, bytes));
            assert!(matches!(fault, Err(LayoutFault::Unsound(_))), "{fault:?}");
        }
        // A version that knows only the first one takes it for a newer one.
        assert_eq!(sound[3], 2);
        let older = resealed(sound, 3, &[1]);
        assert!(matches!(
            BackPointer::decode(&older),
            Err(LayoutFault::Unsound(_))
        ));
    }

    #[test]
    fn the_bytes_are_where_the_table_says() {
        let record = single().encode();
        assert_eq!(&record[..4], b"RSL\x01");
        assert_eq!(record[8..16], 77u64.to_le_bytes());
        assert_eq!(record[16..20], 5u32.to_le_bytes());
        assert_eq!(record[20..24], [1, 0, 0, 0]);
        assert_eq!(record[40..44], [0, 0, 1, 1]);
        assert_eq!(record[44..52], 0x3f00_0000_0000_0001u64.to_le_bytes());
        assert_eq!(record[52..56], [3, 0, 0, 0]);
    }

    #[test]
    fn the_checksum_is_the_common_one() {
        // RFC 3720 B.4: 32 bytes of zeroes; where the checksum stands, zero counts anyway.
        assert_eq!(checksum(&[0; 32]), 0x8a91_36aa);
    }

    #[test]
    fn every_flipped_bit_is_found() {
        let mark = BackPointer {
            pool: PoolId(9),
            file: FILE,
            part: Part::single(0),
        };
        for (record, is_layout) in [
            (single().encode(), true),
            (of_all_shapes().encode(), true),
            (mark.encode(), false),
        ] {
            for bit in 0..record.len() * 8 {
                let mut damaged = record.clone();
                damaged[bit / 8] ^= 1 << (bit % 8);
                let fault = if is_layout {
                    Layout::decode(&damaged).err()
                } else {
                    BackPointer::decode(&damaged).err()
                };
                match bit / 8 {
                    0..3 => assert_eq!(fault, Some(LayoutFault::NotARecord)),
                    // Version 0 is none; all others are newer ones.
                    3 if damaged[3] == 0 => assert_eq!(fault, Some(LayoutFault::Checksum)),
                    3 => assert_eq!(
                        fault,
                        Some(LayoutFault::Newer {
                            version: damaged[3]
                        })
                    ),
                    _ => assert_eq!(fault, Some(LayoutFault::Checksum), "bit {bit}"),
                }
            }
        }
    }

    #[test]
    fn what_is_cut_off_is_told_from_damage() {
        let record = single().encode();
        for length in 0..HEAD_BYTES {
            let fault = Layout::decode(&record[..length]).unwrap_err();
            assert!(
                matches!(fault, LayoutFault::Truncated { read, .. } if read == length),
                "{length}: {fault:?}"
            );
        }
        for length in HEAD_BYTES..record.len() {
            assert_eq!(
                Layout::decode(&record[..length]),
                Err(LayoutFault::Checksum)
            );
            // Cut off on purpose, with a right checksum.
            let mut cut = record[..length].to_vec();
            seal(&mut cut);
            assert!(matches!(
                Layout::decode(&cut),
                Err(LayoutFault::Truncated { .. })
            ));
        }
        let mut longer = record;
        longer.push(0);
        seal(&mut longer);
        assert_eq!(
            Layout::decode(&longer),
            Err(LayoutFault::Unsound("bytes follow its end"))
        );
    }

    #[test]
    fn a_forged_record_with_a_right_checksum_is_unsound() {
        let one = single().encode();
        let many = of_all_shapes().encode();
        let forged = [
            ("file number 0", resealed(one.clone(), 8, &[0; 8])),
            ("flags", resealed(one.clone(), 22, &[2])),
            (
                "unsettled without objects",
                resealed(Layout::new(FILE).encode(), 22, &[1]),
            ),
            ("settled, of version 2", resealed(one.clone(), 3, &[2])),
            ("first segment not at 0", resealed(one.clone(), 24, &[1])),
            ("origin behind the start", resealed(one.clone(), 32, &[1])),
            ("shape without members", resealed(one.clone(), 43, &[0])),
            ("unit too small", resealed(one.clone(), 40, &[11, 0, 1, 1])),
            (
                "unit beyond 64 bits",
                resealed(many.clone(), 56 + 16, &[64]),
            ),
            ("second segment not behind", resealed(many, 56, &[0; 8])),
            ("bytes that must be zero", resealed(one, 54, &[1])),
        ];
        for (what, record) in forged {
            let found = Layout::decode(&record);
            assert!(
                matches!(found, Err(LayoutFault::Unsound(_))),
                "{what}: {found:?}"
            );
        }
    }

    #[test]
    fn random_bytes_are_never_a_record_and_never_a_panic() {
        let mut chance = Chance(0x1234_5678_9abc_def1);
        for _ in 0..20_000 {
            let length = chance.next(200) as usize;
            let mut record: Vec<u8> = (0..length).map(|_| chance.next(256) as u8).collect();
            assert!(Layout::decode(&record).is_err());
            if length >= HEAD_BYTES {
                record[..4].copy_from_slice(b"RSL\x01");
                record[20..24].copy_from_slice(&[chance.next(4) as u8, 0, 0, 0]);
                seal(&mut record);
                if let Ok(layout) = Layout::decode(&record) {
                    assert_eq!(layout.encode(), record);
                }
            }
        }
    }

    #[test]
    fn assigning_and_cutting_agree_with_a_model_of_single_bytes() {
        const BYTES: u64 = 64;
        let mut chance = Chance(0xfeed_beef_0bad_cafe);
        for round in 0..2_000 {
            let mut layout = single();
            let mut model = [object(3, 0x3f00_0000_0000_0001); BYTES as usize];
            for step in 0..chance.next(30) {
                if chance.next(8) == 0 {
                    let size = chance.next(BYTES) + 1;
                    let before = layout.objects();
                    let gone = layout.cut(ByteCount(size));
                    // A segment that began behind the size is where the byte before it is.
                    let last = layout.locate(ByteOffset(size - 1)).unwrap().object;
                    assert_eq!(last, model[size as usize - 1]);
                    model[size as usize..].fill(last);
                    let after = layout.objects();
                    for object in before {
                        assert_ne!(gone.contains(&object), after.contains(&object));
                    }
                    continue;
                }
                let start = chance.next(BYTES);
                let end = match chance.next(4) {
                    0 => u64::MAX,
                    _ => start + chance.next(BYTES - start + 1),
                };
                let object = object(chance.next(4) as u16, chance.next(3));
                layout.assign(ByteRange::new(start, end - start), ByteOffset(0), object);
                let shown_end = end.min(BYTES);
                model[start as usize..shown_end as usize].fill(object);
                for (at, &expected) in model.iter().enumerate() {
                    let found = layout.locate(ByteOffset(at as u64)).unwrap();
                    assert_eq!(
                        found.object, expected,
                        "round {round} step {step} byte {at}"
                    );
                    assert_eq!(found.object_offset, ByteOffset(at as u64));
                    let run = found.length.0.min(BYTES - at as u64) as usize;
                    assert!(model[at..at + run].iter().all(|&one| one == expected));
                }
                let neighbours_differ = layout.segments().windows(2).all(|pair| {
                    pair[0].objects != pair[1].objects && pair[0].start < pair[1].start
                });
                assert!(neighbours_differ, "{:?}", layout.segments());
                assert_eq!(Layout::decode(&layout.encode()).as_ref(), Ok(&layout));
            }
        }
    }

    #[test]
    fn an_older_rushes_takes_an_unsettled_record_for_a_newer_one_and_no_other() {
        let mut unsettled = single();
        assert_eq!(unsettled.encode()[3], 1);
        unsettled.set_unsettled(true);
        let record = unsettled.encode();
        let older = Reader::open(&record, LAYOUT_MAGIC, HEAD_BYTES, 1);
        assert!(matches!(older, Err(LayoutFault::Newer { version: 2 })));
        // As it was written before the version said so.
        let before = resealed(record, 3, &[1]);
        assert_eq!(Layout::decode(&before), Ok(unsettled));
    }

    #[test]
    fn what_has_no_objects_is_not_unsettled() {
        let mut layout = Layout::new(FILE);
        layout.set_unsettled(true);
        assert!(!layout.is_unsettled());
        let mut layout = single();
        layout.set_unsettled(true);
        layout.cut(ByteCount(1));
        assert!(layout.is_unsettled());
        layout.cut(ByteCount(0));
        assert_eq!(layout, Layout::new(FILE));
    }

    #[test]
    fn a_file_cut_to_nothing_names_nothing() {
        let mut layout = single();
        assert_eq!(layout.cut(ByteCount(0)), [object(3, 0x3f00_0000_0000_0001)]);
        assert!(layout.segments().is_empty());
        assert_eq!(layout.locate(ByteOffset(0)), None);
    }

    #[test]
    fn stripes_put_each_byte_in_one_place_and_their_runs_are_right() {
        for shape in [
            Shape::Striped {
                unit_log2: 12,
                members: 3,
            },
            Shape::StripedTwice {
                unit_log2: 12,
                group_unit_log2: 14,
                groups: 2,
                members: 3,
            },
        ] {
            let mut taken = alloc::collections::BTreeSet::new();
            let mut at = 0;
            while at < 1 << 20 {
                let (index, place, run) = shape.locate(at);
                assert!(index < shape.object_count());
                assert_eq!(run, 4096, "a unit at a time");
                assert!(taken.insert((index, place)), "{shape:?} at {at}");
                // Within a run bytes follow each other.
                assert_eq!(shape.locate(at + 100), (index, place + 100, run - 100));
                at += run;
            }
            // No object has a hole before its end: places are dense.
            for index in 0..shape.object_count() {
                let places: Vec<u64> = taken
                    .iter()
                    .filter(|(of, _)| *of == index)
                    .map(|(_, place)| *place)
                    .collect();
                let holes = places.windows(2).filter(|pair| pair[1] - pair[0] != 4096);
                let end_of_file = 1usize;
                assert!(holes.count() <= end_of_file, "{shape:?} object {index}");
            }
        }
    }

    #[test]
    fn shares_and_offsets_agree_with_where_bytes_are() {
        for shape in [
            Shape::Single,
            Shape::Striped {
                unit_log2: 12,
                members: 3,
            },
            Shape::StripedTwice {
                unit_log2: 12,
                group_unit_log2: 14,
                groups: 3,
                members: 2,
            },
        ] {
            let mut lengths = vec![0; shape.object_count()];
            let mut at = 0;
            while at < 400_000 {
                for (index, &length) in lengths.iter().enumerate() {
                    assert_eq!(shape.share(index, at), length, "{shape:?} {index} at {at}");
                }
                let (index, place, _) = shape.locate(at);
                assert_eq!(shape.offset_of(index, place), at);
                assert_eq!(place, lengths[index], "each object grows at its end");
                // Steps that now and then end with a unit.
                let step = (4096 - at % 4096).min(1500);
                lengths[index] += step;
                at += step;
            }
        }
        let far = Shape::Striped {
            unit_log2: 30,
            members: 64,
        };
        assert_eq!(far.share(63, u64::MAX), (1 << 58) - 1);
        assert_eq!(far.offset_of(63, u64::MAX), u64::MAX);
    }

    #[test]
    fn objects_end_where_a_file_does() {
        let mut layout = single();
        let stripe = [object(0, 1), object(1, 2), object(2, 3), object(5, 4)];
        let from = ByteRange::new(1 << 20, u64::MAX - (1 << 20));
        layout.lay(from, ByteOffset(1 << 20), FOUR_OF_64_KIB, stripe.to_vec());
        let lengths = layout.lengths(ByteCount((1 << 20) + (64 << 10) + 10));
        let lengths: Vec<u64> = stripe.iter().map(|object| lengths[object]).collect();
        assert_eq!(lengths, [64 << 10, 10, 0, 0]);
        assert_eq!(Layout::decode(&layout.encode()), Ok(layout.clone()));
        // A piece of it elsewhere: bytes behind it go on in the stripe.
        layout.assign(
            ByteRange::new(2 << 20, 1 << 20),
            ByteOffset(0),
            object(7, 9),
        );
        assert_eq!(layout.segments().len(), 4);
        let behind = layout.locate(ByteOffset(3 << 20)).expect("it is there");
        assert_eq!(
            (behind.object, behind.object_offset.0),
            (stripe[0], 512 << 10)
        );
        layout.replace(stripe[0], object(8, 10));
        assert!(!layout.objects().contains(&stripe[0]));
        let behind = layout.locate(ByteOffset(3 << 20)).expect("it is there");
        assert_eq!(behind.object, object(8, 10));
    }

    #[test]
    fn two_stages_go_over_groups_first() {
        let shape = Shape::StripedTwice {
            unit_log2: 12,
            group_unit_log2: 13,
            groups: 2,
            members: 2,
        };
        let objects: Vec<usize> = (0..8).map(|unit| shape.locate(unit << 12).0).collect();
        assert_eq!(objects, [0, 1, 2, 3, 0, 1, 2, 3]);
        assert_eq!(shape.locate(4 << 12), (0, 4096, 4096));
    }
}
