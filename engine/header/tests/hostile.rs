// SPDX-License-Identifier: Apache-2.0
//! Headers built by hand: sizes no test could afford as a file, and lies of every kind.
#![allow(clippy::unwrap_used)] // A panic is how a test says no.

use proptest::prelude::*;
use rushes_header::{
    Container, HeaderError, HeaderFacts, PROBE_BYTES_MAX, PROBE_READ_COUNT_MAX, ReadAt, probe,
};
use std::io;

/// A file that is zero except for some pieces, and that counts the reads and bytes.
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

fn video_track(timescale: u32, duration: u32, sample_count: u32, last_chunk: u64) -> Vec<u8> {
    let mut mdhd = vec![0; 24];
    mdhd[12..16].copy_from_slice(&timescale.to_be_bytes());
    mdhd[16..20].copy_from_slice(&duration.to_be_bytes());
    let mdhd = mp4_box(b"mdhd", &[&mdhd]);
    let hdlr = mp4_box(b"hdlr", &[&[0; 8], b"vide", &[0; 12], b"\x0cVideoHandler"]);
    let sizes = vec![7; 4 * sample_count.min(100_000) as usize];
    let stsz = mp4_box(b"stsz", &[&[0; 8], &sample_count.to_be_bytes(), &sizes]);
    let mut chunks = vec![1; 8 * 40_000];
    chunks[8 * 40_000 - 8..].copy_from_slice(&last_chunk.to_be_bytes());
    let co64 = mp4_box(b"co64", &[&[0; 4], &40_000u32.to_be_bytes(), &chunks]);
    let stbl = mp4_box(b"stbl", &[&co64, &stsz]);
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
        video_track(24_000, 24_000 * 7200, 172_800, (600 << 30) - 100_000),
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

/// 25 frames a second, `first` frames and bytes in the first RIFF, `others` in those behind it.
fn avi(first: (u32, u32), others: &[(u32, u32)]) -> Sparse {
    let all = first.0 + others.iter().map(|other| other.0).sum::<u32>();
    let mut avih = words(&[40_000, 0, 0, 0, first.0]);
    avih.resize(56, 0);
    let mut strh = [&b"vidsMJPG"[..], &words(&[0, 0, 0, 1, 25, 0, all])].concat();
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
    let head = [&chunk(b"LIST", &hdrl)[..], &chunk(b"JUNK", &[0; 3001])].concat();
    let mut file = Sparse::default();
    let length = (4 + head.len() as u32 + 12 + first.1).to_le_bytes();
    file.append([b"RIFF", &length[..], b"AVI ", &head].concat());
    file.append([b"LIST", &(4 + first.1).to_le_bytes()[..], b"movi"].concat());
    file.append_zeros(u64::from(first.1));
    for (_, bytes) in others {
        let length = (4 + 12 + bytes).to_le_bytes();
        file.append([b"RIFF", &length[..], b"AVIX"].concat());
        file.append([b"LIST", &(4 + bytes).to_le_bytes()[..], b"movi"].concat());
        file.append_zeros(u64::from(*bytes));
    }
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

/// A camera's file of `frames` frames of 1,000,000 bytes; the footer has the duration, which the
/// header may lack, and the header or the random index has the footer's place.
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
    assert!(file.read_count <= 10, "{} reads", file.read_count);
    let rate = (600 << 30) / 7200;
    check(
        feature_film(),
        Container::QuickTime,
        7200.0,
        rate,
        Some(24_000),
    );
}

/// The first `size` bytes of a file.
fn cut(mut file: Sparse, size: u64) -> Sparse {
    file.pieces.retain(|piece| piece.0 < size);
    if let Some((start, last)) = file.pieces.last_mut() {
        last.truncate((size - *start) as usize);
    }
    file.size = size;
    file
}

#[test]
fn avi_beyond_its_first_riff() {
    let expect = |file, seconds, rate| check(file, Container::Avi, seconds, rate, Some(25_000));
    let riff = (1250, 1_000_000_000);
    expect(avi((1000, 800_000_000), &[]), 40.0, 20_000_000);
    expect(avi(riff, &[riff; 3]), 200.0, 20_000_000);
    // Those behind the first have another rate: the whole file gives the rate as long as the probe
    // steps over all of them, and the first one in a file with more.
    let slower = (1250, 500_000_000);
    expect(avi(riff, &[slower; 32]), 1650.0, 10_303_030);
    expect(avi(riff, &[slower; 33]), 50.0, 20_000_000);
    expect(avi(riff, &[slower; 60]), 50.0, 20_000_000);
    // Being copied in.
    expect(cut(avi(riff, &[riff; 3]), 700_000_000), 50.0, 20_000_000);
    expect(cut(avi(riff, &[riff; 3]), 2_700_000_000), 50.0, 20_000_000);
    expect(cut(avi((500, 400_000_000), &[]), 100_000), 20.0, 20_000_000);
    // Being copied in, its size set before its bytes.
    let copied = |file: Sparse, upto| {
        let size = file.size;
        Sparse {
            size,
            ..cut(file, upto)
        }
    };
    for upto in [700_000_000, 1_000_000_000, 2_700_000_000] {
        expect(copied(avi(riff, &[riff; 3]), upto), 50.0, 20_000_000);
    }
    // The length of the second RIFF is not filled in yet.
    let mut written = avi(riff, &[riff]);
    written.pieces[2].1[4..8].fill(0);
    expect(written, 50.0, 20_000_000);
    // Other bytes behind an only RIFF, whose main header counts less than its stream.
    let mut tagged = avi(riff, &[]);
    let head = &mut tagged.pieces[0].1;
    let avih = head.windows(4).position(|at| at == b"avih").unwrap();
    head[avih + 24..avih + 28].copy_from_slice(&1u32.to_le_bytes());
    tagged.append(vec![b'x'; 128]);
    expect(tagged, 50.0, 20_000_000);
    // A writer that counts all frames in the main header: its cut file would look slow.
    let mut other = avi(riff, &[riff; 3]);
    let head = &mut other.pieces[0].1;
    let avih = head.windows(4).position(|at| at == b"avih").unwrap();
    head[avih + 24..avih + 28].copy_from_slice(&5000u32.to_le_bytes());
    expect(other.clone(), 200.0, 20_000_000);
    assert_eq!(cut(other.clone(), 700_000_000).probe().unwrap(), None);
    assert_eq!(copied(other, 700_000_000).probe().unwrap(), None);
}

#[test]
fn a_movie_that_is_not_there_yet_has_the_rate_that_its_boxes_declare() {
    let film = |parts: &[u64], last_chunk: u64| {
        let mut file = Sparse::default();
        let movie = [mvhd(600, 60_000), video_track(25, 2500, 2500, last_chunk)];
        file.append(mp4_box(b"ftyp", &[b"qt  ", &[0; 4]]));
        file.append(mp4_box(b"moov", &[&movie.concat()]));
        for &bytes in parts {
            file.append(long_box_head(b"mdat", bytes + 16));
            file.append_zeros(bytes);
        }
        file
    };
    let expect = |file| check(file, Container::QuickTime, 100.0, 10_000_000, Some(25_000));
    expect(film(&[1_000_000_000], 900_000_000));
    expect(cut(film(&[1_000_000_000], 900_000_000), 50_000_000));
    // Half of the media is in a box that is not there yet.
    let halves = film(&[500_000_000; 2], 900_000_000);
    expect(halves.clone());
    assert_eq!(cut(halves, 50_000_000).probe().unwrap(), None);
    // The last box goes on to the end, wherever that will be.
    let mut open = film(&[], 900_000_000);
    open.append([&[0; 4], &b"mdat"[..]].concat());
    let start = open.size;
    open.append_zeros(500_000_000);
    assert_eq!(open.probe().unwrap(), None);
    open.size = start + 1_000_000_000;
    open.read_count = 0;
    open.byte_count = 0;
    expect(open);
}

#[test]
fn fragments_are_not_counted_by_the_movie_header() {
    let mut file = Sparse::default();
    file.append(mp4_box(b"ftyp", &[b"isom", &[0; 4]]));
    file.append(mp4_box(b"mdat", &[&[1; 5000]]));
    let trex = mp4_box(b"mvex", &[&mp4_box(b"trex", &[&[0; 24]])]);
    let movie = [mvhd(600, 600), video_track(25, 25, 25, 100), trex];
    file.append(mp4_box(b"moov", &[&movie.concat()]));
    // Alone, with the first of the rest, and with more of it.
    assert_eq!(file.probe().unwrap(), None);
    file.append(mp4_box(b"mdat", &[&[1; 900_000]]));
    assert_eq!(file.probe().unwrap(), None);
    file.append(mp4_box(b"moof", &[&[0; 100]]));
    assert_eq!(file.probe().unwrap(), None);
}

/// Media in `count` boxes of a megabyte, each behind a `wide` or not, and the description before or
/// behind them.
fn in_pieces(count: u32, is_wide: bool, is_behind: bool) -> Sparse {
    let wide = mp4_box(b"wide", &[]);
    let ahead = if is_wide { &wide[..] } else { &[] };
    let whole = u64::from(count) << 20;
    let track = video_track(24_000, 24_000 * 20, 480, whole - 1000);
    let movie = mp4_box(b"moov", &[&mvhd(600, 600 * 20), &track]);
    let mut file = Sparse::default();
    file.append(mp4_box(b"ftyp", &[b"qt  ", &[0; 4]]));
    if !is_behind {
        file.append(movie.clone());
    }
    for _ in 0..count {
        let head = ((1u32 << 20) + 8).to_be_bytes();
        file.append([ahead, &head[..], b"mdat"].concat());
        file.append_zeros(1 << 20);
    }
    if is_behind {
        file.append(movie);
    }
    file
}

#[test]
fn media_in_a_hundred_large_pieces_are_counted_and_in_any_number_given_up() {
    for (is_wide, is_behind) in [(false, false), (false, true), (true, false), (true, true)] {
        for count in [70, 100, 200] {
            let rate = (u64::from(count) << 20) / 20;
            let file = in_pieces(count, is_wide, is_behind);
            check(file, Container::QuickTime, 20.0, rate, Some(24_000));
        }
        let result = in_pieces(3000, is_wide, is_behind).probe();
        assert!(matches!(result, Err(HeaderError::TooScattered)));
    }
}

#[test]
fn what_readers_step_over_is_stepped_over() {
    let film = |between: &[u8], mvhd: Vec<u8>, mdhd_more: usize, behind: &[u8]| {
        let mut track = video_track(25, 2500, 2500, 1_000_000);
        let at = track.windows(4).position(|at| at == b"mdhd").unwrap();
        track.splice(at + 28..at + 28, vec![0; mdhd_more]);
        for kind in [b"trak", b"mdia", b"mdhd"] {
            let at = track.windows(4).position(|at| at == kind).unwrap() - 4;
            let size = u32::from_be_bytes(track[at..at + 4].try_into().unwrap());
            let size = size + mdhd_more as u32;
            track[at..at + 4].copy_from_slice(&size.to_be_bytes());
        }
        let mut file = Sparse::default();
        file.append(mp4_box(b"ftyp", &[b"qt  ", &[0; 4]]));
        file.append(long_box_head(b"mdat", 100_000_016));
        file.append_zeros(100_000_000);
        file.append(between.to_vec());
        file.append(mp4_box(b"moov", &[&mvhd, &track]));
        file.append(behind.to_vec());
        check(file, Container::QuickTime, 100.0, 1_000_000, Some(25_000));
    };
    let padded = mp4_box(b"mvhd", &[&mvhd(600, 60_000)[8..], &[0; 8]]);
    film(&[], mvhd(600, 60_000), 0, &[]);
    film(&[], padded, 4, &[]);
    film(&[], mvhd(600, 60_000), 0, &[0; 4096]);
    film(&[], mvhd(600, 60_000), 0, &[0, 0, 0, 3, 7, 7, 7, 7, 7, 7]);
    film(
        &mp4_box(b"free", &[]).repeat(1000),
        mvhd(600, 60_000),
        0,
        &[],
    );

    let fill = |bytes| {
        let key = [6, 14, 43, 52, 1, 1, 1, 2, 3, 1, 2, 16, 1, 0, 0, 0];
        klv(&key, &vec![0; bytes])
    };
    for fills in [vec![], fill(300), [fill(400), fill(70_000)].concat()] {
        let metadata = descriptor(2400);
        let mut head = partition(2, 2_500_000_000, &metadata);
        let at = head.len() - metadata.len();
        head.splice(at..at, fills);
        let mut file = Sparse::default();
        file.append(head);
        file.append_zeros(1_000_000_000);
        check(file, Container::Mxf, 100.1, 24_975_000, Some(23_976));
    }
}

#[test]
fn wav_of_every_length() {
    let minute = 60 * 288_000;
    let hours = 10_000 * 288_000u64;
    let expect = |file, seconds| check(file, Container::Wave, seconds, 288_000, None);
    expect(wave(b"RIFF", None, minute as u32, minute), 60.0);
    expect(wave(b"RF64", Some(hours), u32::MAX, hours), 10_000.0);
    expect(wave(b"BW64", Some(hours), u32::MAX, hours), 10_000.0);
    // A recorder that has not filled in the length, and one that was cut off.
    expect(wave(b"RIFF", None, 0, minute), 60.0);
    expect(wave(b"RIFF", None, u32::MAX, minute), 60.0);
    expect(wave(b"RIFF", None, minute as u32, minute / 2), 60.0);
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
fn mxf_that_is_not_whole_has_the_rate_that_its_header_declares() {
    let rate = 1_000_000 * 24_000 / 1001;
    for run_in in [0, 5000] {
        let file = cut(mxf(run_in, true, true, 2400), 100_000_000);
        check(file, Container::Mxf, 100.1, rate, Some(23_976));
        // The header lacks the place of the footer, the duration, or both.
        for (in_header, footer_known) in [(true, false), (false, true), (false, false)] {
            let mut file = cut(mxf(run_in, in_header, footer_known, 2400), 100_000_000);
            assert_eq!(file.probe().unwrap(), None);
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
    let metadata = metadata.concat();
    let header_bytes = partition(2, 0, &metadata).len() as u64;
    file.append(partition(2, header_bytes + 100_000_000, &metadata));
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
    let mut file = avi((0, 1 << 30), &[]);
    assert_eq!(file.probe().unwrap(), None);
    // Frames counted, but no length filled in: they may not belong together.
    let mut file = avi((1000, 1 << 30), &[]);
    for kind in [b"RIFF", b"movi"] {
        let piece = file.pieces.iter_mut();
        let mut found = piece.filter_map(|(_, bytes)| {
            let at = bytes.windows(4).position(|at| at == kind)?;
            Some(&mut bytes[if at == 0 { 4..8 } else { at - 4..at }])
        });
        found.next().unwrap().fill(0xff);
    }
    assert_eq!(file.probe().unwrap(), None);
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
        1 => avi((100, 100_000), &[(100, 100_000)]),
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
