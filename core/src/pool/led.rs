// SPDX-License-Identifier: Apache-2.0
//! The part of an object to which the record of its file leads. No reader ever sees the rest of the
//! object: a move that was interrupted left it, or will put its bytes there.

use super::layout::{Layout, Object, Shape};
use crate::units::{ByteOffset, ByteRange};
use alloc::vec::Vec;

/// The entry of a record for one of its objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Led {
    /// How the bytes of the file are spread over the object and its mates.
    pub shape: Shape,
    /// The byte of the file that is the first of them.
    pub origin: ByteOffset,
    /// Which of them it is.
    pub index: usize,
    /// Offsets in the object that the record leads to, in order, without overlap; the last may
    /// reach to `u64::MAX`, which is without end.
    pub ranges: Vec<ByteRange>,
}

impl Led {
    /// None: the record does not name it, or in more than one way, which no Rushes writes.
    pub fn of(layout: &Layout, object: Object) -> Option<Led> {
        let mut found: Option<Led> = None;
        for (at, segment) in layout.segments().iter().enumerate() {
            let mut places = segment.objects.iter().enumerate();
            let mut places = places.by_ref().filter(|(_, one)| **one == object);
            let Some((index, _)) = places.next() else {
                continue;
            };
            let led = found.get_or_insert_with(|| Led {
                shape: segment.shape,
                origin: segment.origin,
                index,
                ranges: Vec::new(),
            });
            let is_alike =
                (led.shape, led.origin, led.index) == (segment.shape, segment.origin, index);
            if !is_alike || places.next().is_some() {
                return None;
            }
            let range = layout.range_of(at);
            let share = |at: u64| segment.shape.share(index, at - segment.origin.0);
            let start = share(range.start.0);
            let end = match range.end() {
                u64::MAX => u64::MAX,
                end => share(end),
            };
            if start < end {
                led.ranges.push(ByteRange::new(start, end - start));
            }
        }
        found
    }

    /// Parts of a range of the object, each with the range of the file that it is. A stripe is cut
    /// at its units.
    pub fn in_file(&self, range: ByteRange) -> Vec<(ByteRange, ByteRange)> {
        let mut parts = Vec::new();
        let mut at = range.start.0;
        while at < range.end() {
            let rest = range.end() - at;
            let length = match self.shape {
                Shape::Single => rest,
                shape => rest.min(shape.unit_bytes() - at % shape.unit_bytes()),
            };
            let behind = self.shape.offset_of(self.index, at);
            let start = self.origin.0.saturating_add(behind);
            parts.push((ByteRange::new(at, length), ByteRange::new(start, length)));
            at += length;
        }
        parts
    }
}

/// The parts of a range that are in none of `others`.
pub fn outside(range: ByteRange, others: &[ByteRange]) -> Vec<ByteRange> {
    let mut parts = alloc::vec![range];
    for other in others {
        let cut = |part: ByteRange| {
            let before = part.end().min(other.start.0).max(part.start.0);
            let behind = part.start.0.max(other.end()).min(part.end());
            [
                ByteRange::new(part.start.0, before - part.start.0),
                ByteRange::new(behind, part.end() - behind),
            ]
        };
        parts = match other.length.0 {
            0 => parts,
            _ => parts.into_iter().flat_map(cut).collect(),
        };
        parts.retain(|part| part.length.0 > 0);
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::layout::{FileIdentity, MemberNumber, ObjectId};

    fn object(id: u64) -> Object {
        Object {
            member: MemberNumber(id as u16),
            id: ObjectId(id),
        }
    }

    fn layout() -> Layout {
        let mut layout = Layout::new(FileIdentity {
            number: 1,
            generation: 1,
        });
        let shape = Shape::Striped {
            unit_log2: 12,
            members: 3,
        };
        let all = |from: u64| (from..from + 3).map(object).collect();
        layout.lay(ByteRange::new(0, u64::MAX), ByteOffset(0), shape, all(0));
        let rest = ByteRange::new(50_000, u64::MAX - 50_000);
        layout.lay(rest, ByteOffset(49_152), shape, all(3));
        layout.assign(ByteRange::new(9_000, 20_000), ByteOffset(0), object(6));
        layout.assign(ByteRange::new(60_000, 5_000), ByteOffset(0), object(6));
        layout
    }

    #[test]
    fn each_byte_is_led_to_in_the_one_object_where_it_is_looked_for() {
        let layout = layout();
        for byte in 0..120_000 {
            let located = layout.locate(ByteOffset(byte)).expect("it covers all");
            for id in 0..7 {
                let led = Led::of(&layout, object(id)).expect("it is named");
                let behind = byte.saturating_sub(led.origin.0);
                let shares = led.shape.share(led.index, behind);
                let has = |at: u64| {
                    let mut all = led.ranges.iter();
                    all.any(|one| one.start.0 <= at && at < one.end())
                };
                if located.object == object(id) {
                    assert_eq!(located.object_offset.0, shares, "byte {byte}");
                    assert!(has(shares), "byte {byte} of {id}");
                    let back = led.in_file(ByteRange::new(shares, 1));
                    assert_eq!(back[0].1, ByteRange::new(byte, 1));
                } else if byte >= led.origin.0 {
                    let (index, at, _) = led.shape.locate(byte - led.origin.0);
                    assert!(index != led.index || !has(at), "byte {byte} of {id}");
                }
            }
        }
        let last = Led::of(&layout, object(3)).expect("it is named");
        assert_eq!(last.ranges.last().map(|one| one.end()), Some(u64::MAX));
        assert_eq!(Led::of(&layout, object(9)), None);
    }

    #[test]
    fn what_is_outside_of_some_ranges_and_in_them_is_all_there_is() {
        let others = [
            (3, 4),
            (7, 1),
            (12, 3),
            (14, 9),
            (0, 0),
            (40, u64::MAX - 40),
        ];
        let others = others.map(|(start, length)| ByteRange::new(start, length));
        for (start, length) in [(0, 50), (4, 2), (5, 8), (22, 30), (50, 5), (0, u64::MAX)] {
            let range = ByteRange::new(start, length);
            let parts = outside(range, &others);
            for at in 0..60 {
                let is_in = |one: &ByteRange| one.start.0 <= at && at < one.end();
                let expected = is_in(&range) && !others.iter().any(is_in);
                let found = parts.iter().filter(|one| is_in(one)).count();
                assert_eq!(found, usize::from(expected), "{range:?} {at}");
            }
        }
        assert_eq!(outside(ByteRange::new(4, 2), &[]), [ByteRange::new(4, 2)]);
    }
}
