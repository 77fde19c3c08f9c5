// SPDX-License-Identifier: Apache-2.0
//! Files that ffmpeg writes: we find the same facts as ffprobe.
//!
//! Without ffmpeg the tests print that they skip; with `RUSHES_TEST_ALL=1` they fail.
#![allow(clippy::unwrap_used)] // A panic is how a test says no.

use rushes_header::{Container, HeaderFacts, PROBE_BYTES_MAX, PROBE_READ_COUNT_MAX, ReadAt, probe};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

/// A folder that is deleted at the end of its test.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Scratch {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("rushes-header-{}-{count}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap();
        Scratch(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Counts the reads and bytes of a probe.
struct Counting {
    file: File,
    read_count: u32,
    byte_count: usize,
}

impl ReadAt for Counting {
    fn read_at(&mut self, offset: u64, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.read_count += 1;
        self.byte_count += buffer.len();
        self.file.read_at(offset, buffer)
    }
}

fn run(program: &str, arguments: &[&str]) -> Option<Output> {
    // ffmpeg has been seen to spin for ever.
    Command::new("timeout")
        .args(["-k", "5", "60", program])
        .args(arguments)
        .output()
        .ok()
}

fn has_ffmpeg() -> bool {
    let found = ["ffmpeg", "ffprobe"]
        .iter()
        .all(|program| run(program, &["-version"]).is_some_and(|out| out.status.success()));
    if !found {
        let all = std::env::var_os("RUSHES_TEST_ALL").is_some();
        assert!(!all, "ffmpeg is missing: apt-get install ffmpeg");
        eprintln!("SKIPPED: ffmpeg is missing: apt-get install ffmpeg");
    }
    found
}

fn make(file: &Path, sources: &[&str], options: &[&str]) {
    let mut arguments = vec!["-v", "error", "-nostdin"];
    for source in sources {
        arguments.extend(["-f", "lavfi", "-i", source]);
    }
    arguments.extend(options);
    let path = file.to_str().unwrap();
    arguments.push(path);
    let output = run("ffmpeg", &arguments).unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ffmpeg {arguments:?}: {message}");
}

/// Duration in seconds and size in bytes, as ffprobe sees them.
fn ask_ffprobe(file: &Path) -> (f64, u64) {
    let path = file.to_str().unwrap();
    let entries = "format=duration,size";
    let arguments = [
        "-v",
        "error",
        "-show_entries",
        entries,
        "-of",
        "csv=p=0",
        path,
    ];
    let output = run("ffprobe", &arguments).unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let (duration, size) = text.trim().split_once(',').unwrap();
    (duration.parse().unwrap(), size.parse().unwrap())
}

fn probed(file: &Path) -> Option<HeaderFacts> {
    let size = file.metadata().unwrap().len();
    let mut reader = Counting {
        file: File::open(file).unwrap(),
        read_count: 0,
        byte_count: 0,
    };
    let facts = probe(&mut reader, size).unwrap();
    assert!(reader.read_count <= PROBE_READ_COUNT_MAX);
    assert!(reader.byte_count <= PROBE_BYTES_MAX);
    facts
}

fn check(
    name: &str,
    sources: &[&str],
    options: &[&str],
    container: Container,
    frames: Option<u32>,
) {
    if !has_ffmpeg() {
        return;
    }
    let scratch = Scratch::new();
    let file = scratch.0.join(name);
    make(&file, sources, options);
    let (duration, size) = ask_ffprobe(&file);
    let facts = probed(&file).unwrap_or_else(|| panic!("{name}: no facts"));
    let seconds = facts.duration.0 as f64 / 1e9;
    let rate = facts.bytes_per_second.0 as f64;
    let near = |a: f64, b: f64| (a - b).abs() <= b * 0.02;
    assert_eq!(facts.container, container);
    assert!(near(seconds, duration), "{seconds} s, ffprobe {duration} s");
    let expect = size as f64 / duration;
    assert!(near(rate, expect), "{rate} B/s, ffprobe {expect} B/s");
    assert_eq!(facts.frames_per_kilosecond, frames);
}

const PICTURE: &str = "testsrc2=size=640x360:rate=25:duration=3";
const CINEMA: &str = "testsrc2=size=640x360:rate=24000/1001:duration=3";
const FULL_HD: &str = "testsrc2=size=1920x1080:rate=25:duration=1.6";
const SOUND: &str = "sine=frequency=440:sample_rate=48000:duration=3";
const SHORT_SOUND: &str = "sine=frequency=440:sample_rate=48000:duration=1.6";

#[test]
fn quicktime_prores_with_its_description_behind_the_media() {
    check(
        "prores.mov",
        &[PICTURE, SOUND],
        &["-c:v", "prores_ks", "-c:a", "pcm_s24le"],
        Container::QuickTime,
        Some(25_000),
    );
}

#[test]
fn quicktime_at_a_fraction_of_a_frame_with_many_sound_tracks() {
    let mut options = vec!["-map", "1", "-map", "1", "-map", "1", "-map", "0"];
    options.extend(["-c:v", "prores_ks", "-c:a", "pcm_s24le"]);
    check(
        "fraction.mov",
        &[CINEMA, SOUND],
        &options,
        Container::QuickTime,
        Some(23_976),
    );
}

#[test]
fn mp4_with_its_description_in_front_and_behind() {
    let video = ["-c:v", "mpeg4", "-b:v", "8M", "-c:a", "aac"];
    let front = [&video[..], &["-movflags", "+faststart"]].concat();
    let sources = [PICTURE, SOUND];
    check("behind.mp4", &sources, &video, Container::Mp4, Some(25_000));
    check("front.mp4", &sources, &front, Container::Mp4, Some(25_000));
}

/// As ffmpeg writes them: into fragments with and without an index, a description before and
/// behind.
const KINDS: [(&str, &[&str]); 13] = [
    ("behind.mov", &["-c:v", "prores_ks"]),
    ("behind.mp4", &["-c:v", "mpeg4", "-b:v", "8M"]),
    (
        "front.mp4",
        &["-c:v", "mpeg4", "-b:v", "8M", "-movflags", "+faststart"],
    ),
    (
        "front.mov",
        &["-c:v", "prores_ks", "-movflags", "+faststart"],
    ),
    (
        "fragments.mov",
        &["-c:v", "mjpeg", "-g", "5", "-movflags", "frag_keyframe"],
    ),
    (
        "fragments.mp4",
        &[
            "-c:v",
            "mpeg4",
            "-b:v",
            "8M",
            "-g",
            "5",
            "-movflags",
            "frag_keyframe",
        ],
    ),
    (
        "empty.mp4",
        &[
            "-c:v",
            "mpeg4",
            "-b:v",
            "8M",
            "-g",
            "5",
            "-movflags",
            "frag_keyframe+empty_moov",
        ],
    ),
    (
        "dash.mp4",
        &[
            "-c:v",
            "mpeg4",
            "-b:v",
            "8M",
            "-g",
            "5",
            "-movflags",
            "frag_keyframe+dash",
        ],
    ),
    (
        "index.mp4",
        &[
            "-c:v",
            "mpeg4",
            "-b:v",
            "8M",
            "-g",
            "5",
            "-movflags",
            "frag_keyframe+dash+global_sidx",
        ],
    ),
    ("op1a.mxf", &["-c:v", "mpeg2video", "-b:v", "20M"]),
    (
        "atom.mxf",
        &[
            "-c:v",
            "dnxhd",
            "-b:v",
            "120M",
            "-s",
            "1920x1080",
            "-f",
            "mxf_opatom",
        ],
    ),
    ("plain.avi", &["-c:v", "mjpeg", "-q:v", "2"]),
    ("plain.wav", &["-f", "wav"]),
];

/// Files of which the first part gives the facts of the whole: the header stands in front.
const TELL_FROM_THE_FRONT: [&str; 7] = [
    "front.mp4",
    "front.mov",
    "index.mp4",
    "op1a.mxf",
    "atom.mxf",
    "plain.avi",
    "plain.wav",
];

fn kind_source(name: &str, seconds: u32) -> String {
    match name {
        "plain.wav" => format!("sine=frequency=440:sample_rate=48000:duration={seconds}"),
        _ => format!("testsrc2=size=320x180:rate=25:duration={seconds}"),
    }
}

#[test]
fn a_file_that_is_not_whole_has_the_rate_that_it_will_have_or_none() {
    if !has_ffmpeg() {
        return;
    }
    let scratch = Scratch::new();
    for (name, options) in KINDS {
        let file = scratch.0.join(name);
        let source = kind_source(name, 2);
        make(&file, &[&source], options);
        let (duration, size) = ask_ffprobe(&file);
        let expect = size as f64 / duration;
        let bytes = std::fs::read(&file).unwrap();
        for eighths in 1..=8 {
            let length = bytes.len() * eighths / 8;
            let facts = probe(&mut &bytes[..length], length as u64).ok().flatten();
            let of = format!("{name}, {eighths} eighths");
            let must = TELL_FROM_THE_FRONT.contains(&name) || eighths == 8;
            // The index of one fragment does not list all, and ffmpeg then writes no table at the
            // end.
            assert!(facts.is_some() || !must || name == "dash.mp4", "{of}: none");
            if let Some(facts) = facts {
                let rate = facts.bytes_per_second.0 as f64;
                let seconds = facts.duration.0 as f64 / 1e9;
                assert!(
                    (rate - expect).abs() <= expect * 0.1,
                    "{of}: {rate} for {expect} B/s"
                );
                assert!(
                    (seconds - duration).abs() <= duration * 0.1,
                    "{of}: {seconds} s"
                );
            }
        }
    }
}

#[test]
fn a_recording_that_was_left_alone_has_no_rate_or_the_right_one() {
    if !has_ffmpeg() {
        return;
    }
    let scratch = Scratch::new();
    for (name, options) in KINDS.iter().filter(|(name, _)| !name.starts_with("front")) {
        let whole = scratch.0.join(format!("whole-{name}"));
        make(&whole, &[&kind_source(name, 2)], options);
        let (duration, size) = ask_ffprobe(&whole);
        let expect = size as f64 / duration;
        let file = scratch.0.join(name);
        let mut recorder = Command::new("timeout")
            .args(["-k", "5", "60", "ffmpeg", "-v", "error", "-nostdin"])
            .args(["-f", "lavfi", "-i", &kind_source(name, 3600)])
            .args(*options)
            .arg(&file)
            .spawn()
            .unwrap();
        while file.metadata().map_or(0, |at| at.len()) < 300_000 {
            assert!(
                recorder.try_wait().unwrap().is_none(),
                "{name}: ffmpeg ended"
            );
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        // We cannot wait for the end of the child of `timeout`: take the bytes written by now.
        let bytes = std::fs::read(&file).unwrap();
        let pid = recorder.id().to_string();
        let _ = Command::new("pkill").args(["-KILL", "-P", &pid]).status();
        recorder.wait().unwrap();
        let facts = probe(&mut &bytes[..], bytes.len() as u64).ok().flatten();
        let rate = facts.map(|facts| facts.bytes_per_second.0 as f64);
        let right = |rate: f64| (rate - expect).abs() <= expect * 0.2;
        assert!(rate.is_none_or(right), "{name}: {rate:?} for {expect} B/s");
    }
}

#[test]
fn mxf_dnxhd_op1a() {
    check(
        "dnxhd.mxf",
        &[FULL_HD, SHORT_SOUND],
        &["-c:v", "dnxhd", "-b:v", "120M", "-c:a", "pcm_s16le"],
        Container::Mxf,
        Some(25_000),
    );
}

#[test]
fn mxf_op_atom() {
    check(
        "atom.mxf",
        &[FULL_HD],
        &["-c:v", "dnxhd", "-b:v", "120M", "-f", "mxf_opatom"],
        Container::Mxf,
        Some(25_000),
    );
}

#[test]
fn mxf_mpeg2_at_a_fraction_of_a_frame() {
    check(
        "mpeg2.mxf",
        &["testsrc2=size=1280x720:rate=30000/1001:duration=3", SOUND],
        &["-c:v", "mpeg2video", "-b:v", "30M", "-c:a", "pcm_s16le"],
        Container::Mxf,
        Some(29_970),
    );
}

#[test]
fn avi_motion_jpeg() {
    check(
        "mjpeg.avi",
        &[CINEMA, SOUND],
        &["-c:v", "mjpeg", "-q:v", "2", "-c:a", "pcm_s16le"],
        Container::Avi,
        Some(23_976),
    );
}

#[test]
fn wav_and_rf64() {
    let sources = [SOUND];
    let tagged = [
        "-c:a",
        "pcm_s24le",
        "-metadata",
        "title=scene",
        "-write_bext",
        "1",
    ];
    check(
        "plain.wav",
        &sources,
        &["-c:a", "pcm_s16le"],
        Container::Wave,
        None,
    );
    check("tagged.wav", &sources, &tagged, Container::Wave, None);
    check(
        "long.wav",
        &sources,
        &["-rf64", "always"],
        Container::Wave,
        None,
    );
}

#[test]
fn frames_stills_and_other_files_have_no_rate() {
    if !has_ffmpeg() {
        return;
    }
    let scratch = Scratch::new();
    for name in ["f.dpx", "f.tiff", "f.exr", "f.jpg", "f.mkv", "f.mp3"] {
        let file = scratch.0.join(name);
        let sound = name == "f.mp3";
        let options = if sound {
            ["-t", "1"]
        } else {
            ["-frames:v", "1"]
        };
        make(&file, &[if sound { SOUND } else { PICTURE }], &options);
        assert_eq!(probed(&file), None, "{name}");
    }
}

#[test]
fn files_that_were_cut_anywhere_are_survived() {
    if !has_ffmpeg() {
        return;
    }
    let scratch = Scratch::new();
    let kinds: [(&str, &[&str]); 5] = [
        ("cut.mov", &["-c:v", "prores_ks"]),
        ("cut.mp4", &["-c:v", "mpeg4", "-movflags", "+faststart"]),
        ("cut.mxf", &["-c:v", "mpeg2video"]),
        ("cut.avi", &["-c:v", "mjpeg"]),
        ("cut.wav", &["-f", "wav"]),
    ];
    for (name, options) in kinds {
        let file = scratch.0.join(name);
        let source = if name == "cut.wav" { SOUND } else { PICTURE };
        make(&file, &[source], &[options, &["-t", "0.4"]].concat());
        let whole = std::fs::read(&file).unwrap();
        let lengths = (0..whole.len().min(6000)).chain((6000..whole.len()).step_by(997));
        for length in lengths {
            let mut cut = &whole[..length];
            let _ = probe(&mut cut, length as u64);
            // Its size as a directory entry may say it, or as it was a moment ago.
            let _ = probe(&mut cut, whole.len() as u64);
        }
    }
}
