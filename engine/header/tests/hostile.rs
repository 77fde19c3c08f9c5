// SPDX-License-Identifier: Apache-2.0
//! Headers built by hand: sizes no test could afford as a file, and lies of every kind.
#![allow(clippy::unwrap_used)] // A panic is how a test says no.

use proptest::prelude::*;
use rushes_header::{
    Container, HeaderError, HeaderFacts, PROBE_BYTES_MAX, PROBE_READ_COUNT_MAX, ReadAt, probe,
};
use std::io;

/// A file of which only some pieces are not zero, and which counts what is read of it.
#[derive(Clone, Default)]
struct Sparse {
    pieces: Vec<(u64, Vec<u8>)>,
    size: u64,
    read_count: u32,
    byte_count: usize,
}

impl Sparse {
    fn append(&mut self, bytes: Vec<u8>) {
        let start = self.size;
        self.size += bytes.len() as u64;
        if !bytes.is_empty() {
            self.pieces.push((start, bytes));
        }
    }

    fn append_zeros(&mut self, length: u64) {
        self.size += length;
    }

    fn probe(&mut self) -> Result<Option<HeaderFacts>, HeaderError> {
        let size = self.size;
        let result = probe(self, size);
        assert!(self.read_count <= PROBE_READ_COUNT_MAX);
        assert!(self.byte_count <= PROBE_BYTES_MAX);
        result
    }
}

impl ReadAt for Sparse {
    fn read_at(&mut self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let length = buffer.len().min(self.size.saturating_sub(offset) as usize);
        self.read_count += 1;
        self.byte_count += length;
        buffer[..length].fill(0);
        let end = offset + length as u64;
        for (start, piece) in &self.pieces {
            let (from, to) = (offset.max(*start), end.min(start + piece.len() as u64));
            if from < to {
                let part = &piece[(from - start) as usize..(to - start) as usize];
                buffer[(from - offset) as usize..(to - offset) as usize].copy_from_slice(part);
            }
        }
        Ok(length)
    }
}

// ---- Builders ----

fn mp4_box(kind: &[u8; 4], parts: &[&[u8]]) -> Vec<u8> {
    let body = parts.concat();
    let size = (body.len() as u32 + 8).to_be_bytes();
    [&size[..], kind, &body].concat()
}

/// Only the front of a box of `length` bytes.
fn long_box_head(kind: &[u8; 4], length: u64) -> Vec<u8> {
    [&1u32.to_be_bytes()[..], kind, &length.to_be_bytes()].concat()
}

fn mvhd(timescale: u32, duration: u32) -> Vec<u8> {
    let mut body = vec![0; 100];
    body[12..16].copy_from_slice(&timescale.to_be_bytes());
    body[16..20].copy_from_slice(&duration.to_be_bytes());
    mp4_box(b"mvhd", &[&body])
}

fn video_track(timescale: u32, duration: u32, sample_count: u32) -> Vec<u8> {
    let mut mdhd = vec![0; 24];
    mdhd[12..16].copy_from_slice(&timescale.to_be_bytes());
    mdhd[16..20].copy_from_slice(&duration.to_be_bytes());
    let mdhd = mp4_box(b"mdhd", &[&mdhd]);
    let hdlr = mp4_box(b"hdlr", &[&[0; 8], b"vide", &[0; 12], b"\x0cVideoHandler"]);
    let sizes = vec![7; 4 * sample_count.min(100_000) as usize];
    let stsz = mp4_box(b"stsz", &[&[0; 8], &sample_count.to_be_bytes(), &sizes]);
    let stco = mp4_box(b"stco", &[&vec![1; 300_000]]);
    let stbl = mp4_box(b"stbl", &[&stco, &stsz]);
    let minf = mp4_box(b"minf", &[&stbl]);
    mp4_box(b"trak", &[&mp4_box(b"mdia", &[&mdhd, &hdlr, &minf])])
}

fn feature_film() -> Sparse {
    let mut file = Sparse::default();
    file.append(mp4_box(b"ftyp", &[b"qt  ", &[0; 4]]));
    file.append(long_box_head(b"mdat", 600 << 30));
    file.append_zeros((600 << 30) - 16);
    let movie = [
        mvhd(600, 600 * 7200),
        video_track(24_000, 24_000 * 7200, 172_800),
    ];
    file.append(mp4_box(b"moov", &[&movie.concat()]));
    file
}

fn chunk(kind: &[u8; 4], body: &[u8]) -> Vec<u8> {
    let pad = &[0][..body.len() % 2];
    [&kind[..], &(body.len() as u32).to_le_bytes(), body, pad].concat()
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// 25 frames a second, `first` frames in the first RIFF, `all` in all.
fn avi(first: u32, all: u32, media_bytes: u64) -> Sparse {
    let mut avih = words(&[40_000, 0, 0, 0, first]);
    avih.resize(56, 0);
    let mut strh = [&b"vidsMJPG"[..], &words(&[0, 0, 0, 1, 25, 0, first])].concat();
    strh.resize(56, 0);
    let strl = [
        &b"strl"[..],
        &chunk(b"strh", &strh),
        &chunk(b"strf", &[0; 40]),
    ]
    .concat();
    let odml = [&b"odml"[..], &chunk(b"dmlh", &words(&[all]))].concat();
    let hdrl = [
        &b"hdrl"[..],
        &chunk(b"avih", &avih),
        &chunk(b"LIST", &strl),
        &chunk(b"LIST", &odml),
    ]
    .concat();
    let mut file = Sparse::default();
    file.append([&b"RIFF\0\0\0\0AVI "[..], &chunk(b"LIST", &hdrl)].concat());
    file.append(chunk(b"JUNK", &[0; 3001]));
    file.append(b"LIST\xff\xff\xff\xffmovi".to_vec());
    file.append_zeros(media_bytes);
    file
}

fn wave(magic: &[u8; 4], ds64: Option<u64>, length: u32, present: u64) -> Sparse {
    let mut file = Sparse::default();
    file.append([&magic[..], b"\xff\xff\xff\xffWAVE"].concat());
    if let Some(length) = ds64 {
        let body = [&[0; 8][..], &length.to_le_bytes(), &[0; 12]].concat();
        file.append(chunk(b"ds64", &body));
    }
    file.append(chunk(b"bext", &[0; 603]));
    // 48 kHz, 24 bits, stereo.
    let fmt = [
        &[1, 0, 2, 0][..],
        &words(&[48_000, 288_000]),
        &[6, 0, 24, 0],
    ]
    .concat();
    file.append(chunk(b"fmt ", &fmt));
    file.append([&b"data"[..], &length.to_le_bytes()].concat());
    file.append_zeros(present);
    file
}

const KEY: [u8; 13] = [
    0x06, 0x0e, 0x2b, 0x34, 0x02, 0x05, 0x01, 0x01, 0x0d, 0x01, 0x02, 0x01, 0x01,
];

fn klv(key: &[u8], body: &[u8]) -> Vec<u8> {
    let length = (body.len() as u32).to_be_bytes();
    [key, &[0x83], &length[1..], body].concat()
}

fn partition(kind: u8, footer: u64, metadata: &[u8]) -> Vec<u8> {
    let mut body = vec![0; 88];
    body[24..32].copy_from_slice(&footer.to_be_bytes());
    body[32..40].copy_from_slice(&(metadata.len() as u64).to_be_bytes());
    let pack = klv(&[&KEY[..], &[kind, 4, 0]].concat(), &body);
    [&pack[..], metadata].concat()
}

fn set(kind: u8, items: &[(u16, &[u8])]) -> Vec<u8> {
    let mut key = [
        0x06, 0x0e, 0x2b, 0x34, 0x02, 0x53, 0x01, 0x01, 0x0d, 0x01, 0x01, 0x01, 0x01, 0x01, 0, 0,
    ];
    key[14] = kind;
    let mut body = Vec::new();
    for (tag, value) in items {
        body.extend(tag.to_be_bytes());
        body.extend((value.len() as u16).to_be_bytes());
        body.extend(*value);
    }
    klv(&key, &body)
}

fn rational(rate: i32, scale: i32) -> Vec<u8> {
    [rate.to_be_bytes(), scale.to_be_bytes()].concat()
}

fn descriptor(duration: i64) -> Vec<u8> {
    let rate = rational(24_000, 1001);
    set(0x28, &[(0x3001, &rate), (0x3002, &duration.to_be_bytes())])
}

/// A camera's file of `frames` frames of 1,000,000 bytes; what the header does not know is in the
/// footer, and where that is in the header or the random index.
fn mxf(run_in: usize, in_header: bool, footer_known: bool, frames: i64) -> Sparse {
    let unknown = if in_header { frames } else { -1 };
    let metadata = descriptor(unknown);
    let header_bytes = partition(2, 0, &metadata).len() as u64;
    let media_bytes = frames as u64 * 1_000_000;
    let footer_at = header_bytes + media_bytes;
    let footer = if footer_known { footer_at } else { 0 };
    let mut file = Sparse::default();
    file.append(vec![0x55; run_in]);
    file.append(partition(2, footer, &metadata));
    file.append_zeros(media_bytes);
    file.append(partition(4, footer_at, &descriptor(frames)));
    let index = [&[0; 4][..], &footer_at.to_be_bytes(), &[0, 0, 0, 36]].concat();
    file.append(klv(&[&KEY[..], &[0x11, 1, 0]].concat(), &index));
    file
}

// ---- Honest ones ----

fn check(mut file: Sparse, container: Container, seconds: f64, rate: u64, frames: Option<u32>) {
    let facts = file.probe().unwrap().unwrap();
    assert_eq!(facts.container, container);
    let found = facts.duration.0 as f64 / 1e9;
    assert!((found - seconds).abs() < 0.01 * seconds, "{found} s");
    let found = facts.bytes_per_second.0;
    assert!(found.abs_diff(rate) * 100 <= rate, "{found} B/s");
    assert_eq!(facts.frames_per_kilosecond, frames);
}

#[test]
fn a_feature_film_of_600_gib_with_its_tables_behind_is_probed_in_a_few_reads() {
    let mut file = feature_film();
    file.probe().unwrap().unwrap();
    assert!(file.read_count <= 8, "{} reads", file.read_count);
    let rate = (600 << 30) / 7200;
    check(
        feature_film(),
        Container::QuickTime,
        7200.0,
        rate,
        Some(24_000),
    );
}

#[test]
fn avi_beyond_its_first_riff() {
    check(
        avi(1000, 90_000, 90_000 * 800_000),
        Container::Avi,
        3600.0,
        20_000_000,
        Some(25_000),
    );
    check(
        avi(1000, 0, 800_000_000),
        Container::Avi,
        40.0,
        20_000_000,
        Some(25_000),
    );
}

#[test]
fn wav_of_every_length() {
    let minute = 60 * 288_000;
    let hours = 10_000 * 288_000u64;
    let expect = |file, seconds| check(file, Container::Wave, seconds, 288_000, None);
    expect(wave(b"RIFF", None, minute as u32, minute), 60.0);
    expect(wave(b"RF64", Some(hours), u32::MAX, hours), 10_000.0);
    expect(wave(b"BW64", Some(hours), u32::MAX, hours), 10_000.0);
    // A recorder that has not come back, and one that was cut off.
    expect(wave(b"RIFF", None, 0, minute), 60.0);
    expect(wave(b"RIFF", None, u32::MAX, minute), 60.0);
    expect(wave(b"RIFF", None, minute as u32, minute / 2), 30.0);
}

#[test]
fn mxf_however_its_recorder_left_it() {
    let rate = 1_000_000 * 24_000 / 1001;
    for (in_header, footer_known) in [(true, true), (true, false), (false, true), (false, false)] {
        for run_in in [0, 5000] {
            let file = mxf(run_in, in_header, footer_known, 2400);
            check(file, Container::Mxf, 100.1, rate, Some(23_976));
        }
    }
}

#[test]
fn mxf_whose_length_only_its_tracks_know() {
    let uid = [7; 16];
    let rate = rational(25, 1);
    let metadata = [
        set(0x0f, &[(0x3c0a, &uid), (0x0202, &500i64.to_be_bytes())]),
        set(0x3b, &[(0x4b01, &rate), (0x4803, &uid)]),
        set(0x28, &[(0x3001, &rate)]),
    ];
    let mut file = Sparse::default();
    file.append(partition(2, 0, &metadata.concat()));
    file.append_zeros(100_000_000);
    check(file, Container::Mxf, 20.0, 5_000_000, Some(25_000));
}

#[test]
fn recording_that_has_not_ended_has_no_facts() {
    let mut file = Sparse::default();
    file.append(mp4_box(b"ftyp", &[b"qt  ", &[0; 4]]));
    file.append(long_box_head(b"mdat", 1 << 40));
    file.append_zeros(1 << 30);
    assert_eq!(file.probe().unwrap(), None);
    let mut file = Sparse::default();
    file.append(partition(2, 0, &descriptor(-1)));
    file.append_zeros(1 << 30);
    assert_eq!(file.probe().unwrap(), None);
    assert_eq!(avi(0, 0, 1 << 30).probe().unwrap(), None);
}

// ---- Liars ----

fn broken(mut file: Sparse) -> bool {
    matches!(file.probe(), Err(HeaderError::Broken { .. }))
}

#[test]
fn boxes_that_cannot_be_are_named() {
    let mut small = Sparse::default();
    small.append(mp4_box(b"ftyp", &[b"isom", &[0; 4]]));
    small.append([&3u32.to_be_bytes()[..], b"moov", &[0; 100]].concat());
    assert!(broken(small.clone()));
    let text = small.probe().unwrap_err().to_string();
    assert_eq!(
        text,
        "the MP4 header is broken at byte 16: a box is smaller than its own header"
    );
    let mut headless = Sparse::default();
    headless.append(mp4_box(b"moov", &[&mp4_box(b"free", &[&[0; 50]])]));
    assert!(broken(headless));
    let mut cut = Sparse::default();
    cut.append([&5000u32.to_be_bytes()[..], b"moov", &mvhd(600, 6000)].concat());
    assert!(broken(cut));
}

#[test]
fn absurd_rates_are_no_facts() {
    for (timescale, duration) in [(0, 100), (600, 0), (1, u32::MAX - 1), (600, u32::MAX)] {
        let mut file = Sparse::default();
        file.append(mp4_box(b"moov", &[&mvhd(timescale, duration)]));
        file.append(mp4_box(b"mdat", &[&[1; 1000]]));
        assert_eq!(file.probe().unwrap(), None, "{timescale} {duration}");
    }
}

#[test]
fn a_disk_that_cannot_be_read_is_told() {
    struct Bad;
    impl ReadAt for Bad {
        fn read_at(&mut self, _: u64, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::from_raw_os_error(5))
        }
    }
    let error = probe(&mut Bad, 1000).unwrap_err();
    assert!(
        matches!(error, HeaderError::Read { offset: 0, .. }),
        "{error}"
    );
}

#[test]
fn a_reader_that_gives_single_bytes_is_given_up() {
    struct Slow(Sparse);
    impl ReadAt for Slow {
        fn read_at(&mut self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
            let most = buffer.len().min(1);
            self.0.read_at(offset, &mut buffer[..most])
        }
    }
    let file = feature_film();
    let size = file.size;
    let result = probe(&mut Slow(file), size);
    assert!(matches!(result, Err(HeaderError::TooScattered)));
}

#[test]
fn empty_and_tiny_files_are_nothing() {
    for length in 0..64usize {
        for byte in [0, 0xff, b'R'] {
            let bytes = vec![byte; length];
            let result = probe(&mut &bytes[..], length as u64);
            assert!(matches!(result, Ok(None) | Err(HeaderError::Broken { .. })));
        }
    }
}

fn seed(number: usize) -> Sparse {
    match number {
        0 => feature_film(),
        1 => avi(100, 200, 100_000),
        2 => wave(b"RF64", Some(100_000), u32::MAX, 100_000),
        3 => mxf(0, false, true, 3),
        _ => mxf(100, false, false, 3),
    }
}

proptest! {
    // A case that fails is printed; it becomes a test with a name.
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn changed_bytes_change_facts_at_worst(
        number in 0usize..5,
        changes in prop::collection::vec((any::<prop::sample::Index>(), 0usize..2000, any::<u8>()), 1..12),
    ) {
        let mut file = seed(number);
        for (piece, at, byte) in changes {
            let pieces = file.pieces.len();
            let piece = &mut file.pieces[piece.index(pieces)].1;
            let at = at % piece.len();
            piece[at] = byte;
        }
        if let Ok(Some(facts)) = file.probe() {
            prop_assert!(facts.duration.0 > 0 && facts.bytes_per_second.0 > 0);
        }
    }

    #[test]
    fn sizes_that_are_not_the_files_are_survived(number in 0usize..5, size in any::<u64>(), shift in 0u32..64) {
        let mut file = seed(number);
        let _ = probe(&mut file, size >> shift);
        prop_assert!(file.read_count <= PROBE_READ_COUNT_MAX);
    }

    #[test]
    fn noise_behind_a_true_beginning_is_survived(
        start in prop::sample::select(vec![
            b"RIFF\0\0\0\0AVI LIST".to_vec(),
            b"RF64\xff\xff\xff\xffWAVE".to_vec(),
            b"\0\0\0\x10ftypqt  \0\0\0\0".to_vec(),
            [&KEY[..], &[2, 4, 0]].concat(),
        ]),
        noise in prop::collection::vec(any::<u8>(), 0..4000),
        declared in 0u64..1 << 40,
    ) {
        let bytes = [start, noise].concat();
        let _ = probe(&mut &bytes[..], bytes.len() as u64);
        let _ = probe(&mut &bytes[..], declared);
    }

    #[test]
    fn noise_alone_is_survived(noise in prop::collection::vec(any::<u8>(), 0..30_000)) {
        let _ = probe(&mut &noise[..], noise.len() as u64);
    }
}
