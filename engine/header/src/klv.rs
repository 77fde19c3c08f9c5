// SPDX-License-Identifier: Apache-2.0
//! MXF, SMPTE ST 377-1: keys of 16 bytes, BER lengths, values. The smallest reader that finds rate
//! and length; the one crate, `mxf`, panics on unexpected input.
//!
//! The file begins with a partition that carries the description, as sets of tagged items. The
//! values needed stand in a descriptor (sample rate 3001, container duration 3002) or, where that
//! has no duration, in a track (edit rate 4B01, its sequence 4803) and a sequence (duration 0202).
//! If the header was written while the file was still open, the footer has them.
//!
//! The place of the footer, now or later, gives the amount of media: a completed header has it even
//! if only the beginning of the file is there. A file without a footer anywhere is being recorded,
//! and its present length says nothing about its rate.

use crate::source::{Source, WINDOW_BYTES, broken, part};
use crate::{Container, HeaderError, HeaderFacts, duration_of, facts, frames_per_kilosecond};
use rushes_core::units::Duration;

/// How every partition pack's key begins; then kind, status and a zero.
const PARTITION_KEY: [u8; 13] = [
    0x06, 0x0e, 0x2b, 0x34, 0x02, 0x05, 0x01, 0x01, 0x0d, 0x01, 0x02, 0x01, 0x01,
];
const HEADER_PARTITION: u8 = 2;
const FOOTER_PARTITION: u8 = 4;
const RANDOM_INDEX: u8 = 0x11;

/// Key of a filler. Fillers also stand between a partition's pack and its metadata, so that these
/// begin on a grid.
const FILL_KEY: [u8; 16] = [
    0x06, 0x0e, 0x2b, 0x34, 0x01, 0x01, 0x01, 0x02, 0x03, 0x01, 0x02, 0x10, 0x01, 0x00, 0x00, 0x00,
];

/// Fillers in a row that are stepped over.
const FILL_COUNT_MAX: u32 = 16;

/// How the key of a set begins whose items have two bytes each of tag and length. Byte 14 is the
/// kind of set.
const SET_KEY: [u8; 14] = [
    0x06, 0x0e, 0x2b, 0x34, 0x02, 0x53, 0x01, 0x01, 0x0d, 0x01, 0x01, 0x01, 0x01, 0x01,
];
/// Registries differ in this byte of a key: it is a version.
const VERSION_BYTE: usize = 7;

const SEQUENCE_SET: u8 = 0x0f;
const TRACK_SETS: [u8; 2] = [0x3a, 0x3b];
/// Generic picture, CDCI, RGBA, MPEG-2 video.
const PICTURE_DESCRIPTORS: [u8; 4] = [0x27, 0x28, 0x29, 0x51];
/// Plain, generic sound, data, multiple, wave, AES3.
const OTHER_DESCRIPTORS: [u8; 6] = [0x25, 0x42, 0x43, 0x44, 0x48, 0x47];

/// Description read at most; the wanted sets are near its beginning. Units: bytes.
const METADATA_BYTES_MAX: u64 = 512 << 10;

/// Sets, fillers and primers looked at in one partition.
const SET_COUNT_MAX: u32 = 4096;

/// Tracks and sequences remembered.
const TRACK_COUNT_MAX: usize = 64;

type Uid = [u8; 16];

/// Where the header partition begins: at once, or behind a run-in. None: no MXF file.
pub(crate) fn find_header_partition(source: &mut Source<'_>) -> Result<Option<u64>, HeaderError> {
    let length = source.size().min(WINDOW_BYTES as u64) as usize;
    let Some(start) = source.bytes(0, length)? else {
        return Ok(None);
    };
    let is_key = |bytes: &[u8]| partition_kind(bytes) == Some(HEADER_PARTITION);
    Ok(start.windows(16).position(is_key).map(|at| at as u64))
}

fn partition_kind(key: &[u8]) -> Option<u8> {
    let alike = key.len() == 16
        && key[..VERSION_BYTE] == PARTITION_KEY[..VERSION_BYTE]
        && key[VERSION_BYTE + 1..13] == PARTITION_KEY[VERSION_BYTE + 1..];
    alike.then(|| key[13])
}

pub(crate) fn probe(
    source: &mut Source<'_>,
    run_in: u64,
) -> Result<Option<HeaderFacts>, HeaderError> {
    let Some(header) = Partition::read(source, run_in, run_in)? else {
        return Err(broken(
            Container::Mxf,
            run_in,
            "the header partition is truncated",
        ));
    };
    let mut found = Description::default();
    found.read(source, &header)?;
    let Some(essence_end) = find_footer(source, &header, run_in)? else {
        return Ok(None);
    };
    if found.duration().is_none()
        && let Some(footer) = Partition::read(source, essence_end, run_in)?
    {
        found.read(source, &footer)?;
    }
    Ok(facts(
        Container::Mxf,
        found.duration(),
        essence_end.saturating_sub(header.metadata_end),
        found.frames,
    ))
}

struct Klv {
    key: [u8; 16],
    value: u64,
    length: u64,
}

impl Klv {
    /// None when the file ends before.
    fn read(source: &mut Source<'_>, at: u64) -> Result<Option<Klv>, HeaderError> {
        let most = source.size().saturating_sub(at).min(25) as usize;
        if most < 17 {
            return Ok(None);
        }
        let Some(bytes) = source.bytes(at, most)? else {
            return Ok(None);
        };
        let first = bytes[16];
        // BER: short form, or the count of the bytes that follow.
        let count = if first < 0x80 {
            0
        } else {
            usize::from(first & 0x7f)
        };
        if count > 8 || most < 17 + count {
            let problem = "a length of more than eight bytes";
            return Err(broken(Container::Mxf, at, problem));
        }
        let long = bytes[17..17 + count]
            .iter()
            .fold(0, |length, byte| length << 8 | u64::from(*byte));
        Ok(Some(Klv {
            key: part(bytes, 0),
            value: at + 17 + count as u64,
            length: if first < 0x80 { u64::from(first) } else { long },
        }))
    }

    fn end(&self) -> u64 {
        self.value.saturating_add(self.length)
    }
}

struct Partition {
    start: u64,
    /// Offset of the footer partition in the file; at or before the header when not known.
    footer: u64,
    metadata_start: u64,
    metadata_end: u64,
}

impl Partition {
    /// The partition pack at `start`. None: there is none.
    fn read(
        source: &mut Source<'_>,
        start: u64,
        run_in: u64,
    ) -> Result<Option<Partition>, HeaderError> {
        let Some(klv) = Klv::read(source, start)? else {
            return Ok(None);
        };
        if partition_kind(&klv.key).is_none() {
            return Ok(None);
        }
        // Versions, grid, this, previous, footer, bytes of metadata, bytes of index.
        let Some(body) = source.array::<48>(klv.value)? else {
            return Ok(None);
        };
        let long = |at| u64::from_be_bytes(part(&body, at));
        let start_of_metadata = behind_fill(source, klv.end())?;
        Ok(Some(Partition {
            start,
            footer: long(24).saturating_add(run_in),
            metadata_start: start_of_metadata,
            metadata_end: start_of_metadata
                .saturating_add(long(32))
                .saturating_add(long(40)),
        }))
    }
}

/// The place of the first KLV from `at` on that is no filler.
fn behind_fill(source: &mut Source<'_>, at: u64) -> Result<u64, HeaderError> {
    let mut at = at;
    for _ in 0..FILL_COUNT_MAX {
        match Klv::read(source, at) {
            Ok(Some(klv)) if is_fill(&klv.key) => at = klv.end(),
            // The caller reads these bytes next, and reports that they are no KLV.
            Ok(_) | Err(HeaderError::Broken { .. }) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(at)
}

fn is_fill(key: &[u8; 16]) -> bool {
    key[..VERSION_BYTE] == FILL_KEY[..VERSION_BYTE]
        && key[VERSION_BYTE + 1..] == FILL_KEY[VERSION_BYTE + 1..]
}

/// Where the footer partition is, as the header or the random index pack says, or where it will be
/// in a file that is not whole yet. None: neither says, or something else is there.
fn find_footer(
    source: &mut Source<'_>,
    header: &Partition,
    run_in: u64,
) -> Result<Option<u64>, HeaderError> {
    let place = match header.footer <= run_in {
        true => indexed_footer(source, run_in)?,
        false => Some(header.footer),
    };
    let Some(place) = place.filter(|&place| place > header.start) else {
        return Ok(None);
    };
    if place.saturating_add(16) > source.size() {
        return Ok(Some(place));
    }
    let key = source.array::<16>(place)?;
    let is_footer = key.is_some_and(|key| partition_kind(&key) == Some(FOOTER_PARTITION));
    Ok(is_footer.then_some(place))
}

/// The last entry of the random index pack. The last four bytes of the file are the pack's length.
fn indexed_footer(source: &mut Source<'_>, run_in: u64) -> Result<Option<u64>, HeaderError> {
    let size = source.size();
    let Some(last) = source.array::<4>(size.saturating_sub(4))? else {
        return Ok(None);
    };
    let pack_bytes = u64::from(u32::from_be_bytes(last));
    let Some(start) = size.checked_sub(pack_bytes) else {
        return Ok(None);
    };
    let Some(klv) = Klv::read(source, start)? else {
        return Ok(None);
    };
    if partition_kind(&klv.key) != Some(RANDOM_INDEX) || klv.end() != size || klv.length < 16 {
        return Ok(None);
    }
    // Entries are a stream's id and an offset.
    let entry = source.array::<8>(size - 12)?;
    Ok(entry.map(|offset| u64::from_be_bytes(offset).saturating_add(run_in)))
}

/// The contents of the sets.
#[derive(Default)]
struct Description {
    described: Option<Duration>,
    frames: Option<u32>,
    tracks: Vec<(Uid, Rate)>,
    sequences: Vec<(Uid, u64)>,
}

#[derive(Clone, Copy)]
struct Rate {
    rate: u64,
    scale: u64,
}

impl Rate {
    /// None when either part is not above zero.
    fn read(bytes: &[u8]) -> Option<Rate> {
        let rate = i32::from_be_bytes(part(bytes, 0));
        let scale = i32::from_be_bytes(part(bytes, 4));
        (rate > 0 && scale > 0).then_some(Rate {
            rate: rate as u64,
            scale: scale as u64,
        })
    }

    fn duration(&self, units: u64) -> Option<Duration> {
        duration_of(units.checked_mul(self.scale)?, self.rate)
    }
}

impl Description {
    fn duration(&self) -> Option<Duration> {
        self.described.or_else(|| self.longest_track())
    }

    fn longest_track(&self) -> Option<Duration> {
        let durations = self.tracks.iter().filter_map(|(sequence, rate)| {
            let found = self.sequences.iter().find(|(uid, _)| uid == sequence)?;
            rate.duration(found.1)
        });
        durations.max()
    }

    fn read(&mut self, source: &mut Source<'_>, partition: &Partition) -> Result<(), HeaderError> {
        let start = partition.metadata_start;
        let most = start.saturating_add(METADATA_BYTES_MAX);
        let end = partition.metadata_end.min(source.size()).min(most);
        let mut at = start;
        for _ in 0..SET_COUNT_MAX {
            if at >= end {
                break;
            }
            let Some(klv) = Klv::read(source, at)? else {
                break;
            };
            if klv.key[..VERSION_BYTE] == SET_KEY[..VERSION_BYTE]
                && klv.key[VERSION_BYTE + 1..14] == SET_KEY[VERSION_BYTE + 1..]
            {
                self.read_set(source, &klv)?;
            }
            at = klv.end();
        }
        Ok(())
    }

    fn read_set(&mut self, source: &mut Source<'_>, klv: &Klv) -> Result<(), HeaderError> {
        let Ok(length) = usize::try_from(klv.length) else {
            return Ok(());
        };
        // Sets above the window exist, such as lists of references; none of them is wanted here.
        let Some(set) = source.bytes(klv.value, length)? else {
            return Ok(());
        };
        let kind = klv.key[14];
        if kind == SEQUENCE_SET {
            self.take_sequence(set);
        } else if TRACK_SETS.contains(&kind) {
            self.take_track(set);
        } else if PICTURE_DESCRIPTORS.contains(&kind) {
            self.take_descriptor(set, true);
        } else if OTHER_DESCRIPTORS.contains(&kind) {
            self.take_descriptor(set, false);
        }
        Ok(())
    }

    fn take_descriptor(&mut self, set: &[u8], is_picture: bool) {
        let Some(rate) = item(set, 0x3001).and_then(Rate::read) else {
            return;
        };
        let units = item(set, 0x3002).and_then(length_of);
        let duration = units.and_then(|units| rate.duration(units));
        // Tracks may differ by a little; the file plays as long as the longest.
        self.described = self.described.max(duration);
        if is_picture && self.frames.is_none() {
            self.frames = frames_per_kilosecond(rate.rate, rate.scale);
        }
    }

    fn take_track(&mut self, set: &[u8]) {
        let rate = item(set, 0x4b01).and_then(Rate::read);
        let sequence = item(set, 0x4803).and_then(|bytes| bytes.try_into().ok());
        if let (Some(rate), Some(sequence)) = (rate, sequence)
            && self.tracks.len() < TRACK_COUNT_MAX
        {
            self.tracks.push((sequence, rate));
        }
    }

    fn take_sequence(&mut self, set: &[u8]) {
        let uid = item(set, 0x3c0a).and_then(|bytes| bytes.try_into().ok());
        let units = item(set, 0x0202).and_then(length_of);
        if let (Some(uid), Some(units)) = (uid, units)
            && self.sequences.len() < TRACK_COUNT_MAX
        {
            self.sequences.push((uid, units));
        }
    }
}

/// A length in edit units; -1 means "not known yet".
fn length_of(bytes: &[u8]) -> Option<u64> {
    let units = i64::from_be_bytes(bytes.try_into().ok()?);
    u64::try_from(units).ok().filter(|&units| units > 0)
}

/// The value of an item of a set.
fn item(set: &[u8], tag: u16) -> Option<&[u8]> {
    let mut rest = set;
    while rest.len() >= 4 {
        let found = u16::from_be_bytes(part(rest, 0));
        let length = usize::from(u16::from_be_bytes(part(rest, 2)));
        let value = rest.get(4..4 + length)?;
        if found == tag {
            return Some(value);
        }
        rest = &rest[4 + length..];
    }
    None
}
