// SPDX-License-Identifier: Apache-2.0
//! Real files with changed sizes, counts, kinds and order of the parts that a reader walks by.
//!
//! ffmpeg made the corpus with `-fflags +bitexact` from a test picture of 32 x 32; each file is cut
//! where media follows:
//!
//! | file | made with |
//! |---|---|
//! | `behind.mp4`, `front.mov` | `mpeg4`, the second with `-movflags +faststart` |
//! | `fragments.mp4`, `index.mp4` | `mpeg4 -movflags frag_keyframe`, and `frag_keyframe+dash+global_sidx` |
//! | `op1a.mxf` | `mpeg2video` |
//! | `plain.avi` | `mjpeg` |
//! | `plain.wav`, `long.wav` | `pcm_s16le`, the second with `-rf64 always` |
//!
//! The changes come from a generator of our own with a seed: each run is the same run. A fault that
//! they find becomes a test in `hostile.rs`.
#![allow(clippy::unwrap_used)] // A panic is how a test says no.

use rushes_header::{HeaderFacts, PROBE_BYTES_MAX, PROBE_READ_COUNT_MAX, ReadAt, probe};

const CORPUS: [(&str, &[u8]); 8] = [
    ("behind.mp4", include_bytes!("corpus/behind.mp4")),
    ("front.mov", include_bytes!("corpus/front.mov")),
    ("fragments.mp4", include_bytes!("corpus/fragments.mp4")),
    ("index.mp4", include_bytes!("corpus/index.mp4")),
    ("op1a.mxf", include_bytes!("corpus/op1a.mxf")),
    ("plain.avi", include_bytes!("corpus/plain.avi")),
    ("plain.wav", include_bytes!("corpus/plain.wav")),
    ("long.wav", include_bytes!("corpus/long.wav")),
];

/// Changed files of each of the corpus.
const ROUNDS: u64 = 4000;

/// Xorshift.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit.max(1) as u64) as usize
    }
}

/// A part that a reader walks by: a box, a chunk, a KLV.
#[derive(Clone, Copy, Debug)]
struct Part {
    start: usize,
    /// Where its length stands, and in how many bytes.
    size_at: usize,
    size_bytes: usize,
    is_little: bool,
    end: usize,
    depth: usize,
}

fn parts_of(bytes: &[u8]) -> Vec<Part> {
    let mut parts = Vec::new();
    match bytes.get(..4) {
        Some(b"RIFF" | b"RF64") => riff(bytes, 0, bytes.len(), 0, &mut parts),
        Some([6, 14, 43, 52]) => klvs(bytes, &mut parts),
        _ => boxes(bytes, 0, bytes.len(), 0, &mut parts),
    }
    parts
}

fn boxes(bytes: &[u8], mut at: usize, end: usize, depth: usize, parts: &mut Vec<Part>) {
    while at + 8 <= end {
        let size = u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
        let stop = at + size;
        if size < 8 {
            return;
        }
        parts.push(Part {
            start: at,
            size_at: at,
            size_bytes: 4,
            is_little: false,
            end: stop.min(end),
            depth,
        });
        let kinds: [&[u8; 4]; 8] = [
            b"moov", b"trak", b"mdia", b"minf", b"stbl", b"mvex", b"moof", b"mfra",
        ];
        if kinds.iter().any(|kind| &bytes[at + 4..at + 8] == *kind) {
            boxes(bytes, at + 8, stop.min(end), depth + 1, parts);
        }
        at = stop;
    }
}

fn riff(bytes: &[u8], mut at: usize, end: usize, depth: usize, parts: &mut Vec<Part>) {
    while at + 8 <= end {
        let size = u32::from_le_bytes(bytes[at + 4..at + 8].try_into().unwrap()) as usize;
        let stop = (at + 8 + size + size % 2).min(end);
        parts.push(Part {
            start: at,
            size_at: at + 4,
            size_bytes: 4,
            is_little: true,
            end: stop,
            depth,
        });
        if matches!(&bytes[at..at + 4], b"RIFF" | b"RF64" | b"LIST") {
            riff(bytes, at + 12, stop, depth + 1, parts);
        }
        at = stop;
    }
}

fn klvs(bytes: &[u8], parts: &mut Vec<Part>) {
    let mut at = 0;
    while at + 25 <= bytes.len() {
        let count = match bytes[at + 16] {
            short if short < 0x80 => 0,
            long => usize::from(long & 0x7f).min(8),
        };
        let value = at + 17 + count;
        let length = match count {
            0 => usize::from(bytes[at + 16]),
            _ => bytes[at + 17..value]
                .iter()
                .fold(0, |length, byte| length << 8 | usize::from(*byte)),
        };
        let end = value.saturating_add(length).min(bytes.len());
        parts.push(Part {
            start: at,
            size_at: if count == 0 { at + 16 } else { at + 17 },
            size_bytes: count.max(1),
            is_little: false,
            end,
            depth: 0,
        });
        at = end;
    }
}

/// Sizes at the limits of a parser.
fn odd_size(random: &mut Random, is: u64) -> u64 {
    let large = [u64::MAX, 1 << 31, 1 << 32, 1 << 63, 0xff_ffff, 0x7fff_ffff];
    match random.below(6) {
        0 => random.below(9) as u64,
        1 => large[random.below(large.len())],
        2 => is.wrapping_add(random.below(17) as u64).wrapping_sub(8),
        3 => is.wrapping_mul(2),
        4 => is / 2,
        _ => random.below(1 << 20) as u64,
    }
}

fn change(bytes: &mut Vec<u8>, random: &mut Random) {
    let parts = parts_of(bytes);
    if parts.is_empty() {
        return;
    }
    let one = parts[random.below(parts.len())];
    let body = (one.size_at + one.size_bytes + 4).min(one.end);
    match random.below(8) {
        0 | 1 => {
            let width = one.size_bytes;
            let size = odd_size(random, (one.end - one.start) as u64);
            let place = &mut bytes[one.size_at..one.size_at + width];
            match one.is_little {
                true => place.copy_from_slice(&size.to_le_bytes()[..width]),
                false => place.copy_from_slice(&size.to_be_bytes()[8 - width..]),
            }
        }
        // A word of its body: a version, a count, a duration, an offset.
        2 | 3 => {
            let words = (one.end - body).min(64) / 4;
            if words > 0 {
                let at = body + 4 * random.below(words);
                let word = odd_size(random, 1) as u32;
                bytes[at..at + 4].copy_from_slice(&word.to_be_bytes());
            }
        }
        4 => {
            let copy = bytes[one.start..one.end].to_vec();
            let times = 1 + random.below(80);
            let more = copy.repeat(times.min(1 + 40_000 / copy.len().max(1)));
            bytes.splice(one.start..one.start, more);
        }
        5 => drop(bytes.drain(one.start..one.end)),
        6 => {
            let other = parts[random.below(parts.len())];
            let copy = bytes[one.start..one.end].to_vec();
            bytes.splice(other.start..other.start, copy);
        }
        _ => bytes.truncate(one.start + random.below(one.end - one.start + 1)),
    }
}

struct Counting<'a> {
    bytes: &'a [u8],
    read_count: u32,
    byte_count: usize,
}

impl ReadAt for Counting<'_> {
    fn read_at(&mut self, offset: u64, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.read_count += 1;
        self.byte_count += buffer.len();
        self.bytes.read_at(offset, buffer)
    }
}

fn probed(bytes: &[u8], size: u64) -> Option<HeaderFacts> {
    let mut reader = Counting {
        bytes,
        read_count: 0,
        byte_count: 0,
    };
    let facts = probe(&mut reader, size);
    assert!(reader.read_count <= PROBE_READ_COUNT_MAX);
    assert!(reader.byte_count <= PROBE_BYTES_MAX);
    if let Ok(Some(facts)) = &facts {
        assert!(facts.duration.0 > 0 && facts.bytes_per_second.0 > 0);
    }
    facts.ok().flatten()
}

#[test]
fn a_header_that_is_changed_anywhere_is_survived() {
    for (name, file) in CORPUS {
        let size = file.len() as u64;
        assert!(probed(file, size).is_some(), "{name} says nothing");
        assert!(parts_of(file).len() > 2, "{name} is not understood");
        for round in 1..=ROUNDS {
            let mut random = Random(round.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let mut bytes = file.to_vec();
            for _ in 0..=random.below(3) {
                change(&mut bytes, &mut random);
            }
            let size = bytes.len() as u64;
            // Also while it is growing, and after it was cut.
            for size in [size, size / 2, size * 3, u64::MAX] {
                let _ = probed(&bytes, size);
            }
        }
    }
}

#[test]
fn what_says_nothing_changes_nothing() {
    let padding = |name: &str| match name.rsplit('.').next() {
        Some("mp4" | "mov") => [&24u32.to_be_bytes()[..], b"free", &[0; 16]].concat(),
        Some("mxf") => {
            let key = [6, 14, 43, 52, 1, 1, 1, 2, 3, 1, 2, 16, 1, 0, 0, 0];
            [&key[..], &[0x83, 0, 0, 30], &[0; 30]].concat()
        }
        _ => [&b"JUNK"[..], &20u32.to_le_bytes(), &[0; 20]].concat(),
    };
    for (name, file) in CORPUS {
        let expect = probed(file, file.len() as u64).unwrap();
        // Before a fragment's index they would count as media of a fragment.
        let depth = usize::from(name.ends_with("avi") || name.ends_with("wav"));
        for part in parts_of(file) {
            let name_of = file.get(part.start + 4..part.start + 8);
            let is_first = part.start == 0 || (depth == 1 && part.start == 12);
            if part.depth != depth || is_first || name_of == Some(b"mfra") {
                continue;
            }
            if name.starts_with("fragments") || name.starts_with("index") {
                continue;
            }
            let mut bytes = file.to_vec();
            bytes.splice(part.start..part.start, padding(name));
            let found = probed(&bytes, bytes.len() as u64);
            // The bytes that it adds to the first RIFF, or before a footer, are not media.
            let near = found.is_some_and(|found| {
                let (rate, expect) = (found.bytes_per_second.0, expect.bytes_per_second.0);
                rate.abs_diff(expect) * 20 <= expect
            });
            assert!(near, "{name} at {}: {found:?} for {expect:?}", part.start);
        }
        // If a file declares its length, bytes behind it do not count either.
        if name.starts_with("behind") || name.starts_with("front") {
            for tail in [vec![0; 4096], vec![0, 0, 0, 5, 1, 2, 3, 4], vec![7; 3]] {
                let bytes = [file, &tail].concat();
                let found = probed(&bytes, bytes.len() as u64);
                assert!(found.is_some() || name.starts_with("front"), "{name}");
            }
        }
    }
}

#[test]
fn a_part_of_a_file_has_its_rate_or_none() {
    for (name, file) in CORPUS {
        let expect = probed(file, file.len() as u64).unwrap();
        for length in 0..file.len() {
            let found = probed(&file[..length], length as u64);
            let rate = found.map_or(expect.bytes_per_second.0, |f| f.bytes_per_second.0);
            let apart = rate.abs_diff(expect.bytes_per_second.0);
            assert!(
                apart * 10 <= expect.bytes_per_second.0,
                "{name}, {length} bytes: {rate} for {}",
                expect.bytes_per_second.0
            );
        }
    }
}
