// SPDX-License-Identifier: Apache-2.0
//! The commands that an operator types, against a daemon with a client: their output is there,
//! parses, and agrees with the reference.
//!
//! Runs alone (tests/programs.sh): it keeps time.

use rushes_tests::disk::said;
use rushes_tests::hand::Hand;
use rushes_tests::needs;
use rushes_tests::pattern;
use rushes_tests::scratch::Scratch;
use rushes_tests::tree::root;
use rushes_tests::world::{Setup, World};
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

const HAND: &str = env!("CARGO_BIN_EXE_smb-hand");

fn world() -> Option<World> {
    let world = World::build(&Setup {
        more: String::from("[[rule]]\nmatch = \"**/*.mov\"\nbitrate = \"8M\""),
        ..Setup::default()
    })?;
    world.put("footage/clip.mov", 1, 12_000_000);
    Some(world)
}

/// `rushes ARGS` for the daemon of this world.
fn rushes(world: &World, args: &[&str]) -> Output {
    Command::new(needs::path_of("rushes"))
        .args(args)
        .arg("--config")
        .arg(world.scratch.path().join("rushes.toml"))
        .output()
        .expect("rushes starts")
}

fn printed(output: &Output) -> String {
    assert!(
        output.status.success(),
        "{}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn json(output: &Output) -> Value {
    let text = printed(output);
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text}"))
}

#[test]
fn a_stream_that_plays_is_in_the_ledger_with_its_contract() {
    let Some(mut world) = world() else { return };
    let mut hand = Hand::connect(HAND, world.smbd.port());
    let file = hand.open("footage/clip.mov");
    for piece in 0..20 {
        let found = hand.read(file, piece * 100_000, 100_000);
        pattern::check(1, piece * 100_000, &found, "played");
    }
    world.daemon().wait_for("a stream of clip.mov", |status| {
        status["streams"].as_array().is_some_and(|s| !s.is_empty())
    });
    let status = json(&rushes(&world, &["status", "--json"]));
    let stream = &status["streams"][0];
    assert_eq!(stream["path"], "footage/clip.mov");
    assert_eq!(stream["user"], "daemon");
    assert_eq!(stream["share"], "media");
    assert_eq!(stream["standing"], "contract");
    assert_eq!(stream["rate_bytes_per_s"], 1_000_000);
    assert_eq!(stream["rate_source"], "rule");
    assert_eq!(stream["open"], true);
    let count = |key: &str| stream[key].as_u64().unwrap_or_default();
    assert!(count("due_count") >= 15, "{stream:#}");
    assert_eq!(
        count("on_time_count") + count("late_count"),
        count("due_count")
    );
    assert_eq!(count("bytes"), 2_000_000);

    let text = printed(&rushes(&world, &["status"]));
    assert!(text.contains("footage/clip.mov"), "{text}");
    let picture = printed(&rushes(
        &world,
        &["top", "--once", "--interval", "50ms", "--width", "160"],
    ));
    assert!(picture.contains("clip.mov"), "{picture}");
}

#[test]
fn cuts_of_a_timeline_that_is_played_again_are_told_of() {
    const FRAME: usize = 40_000;
    const FRAME_TIME: Duration = Duration::from_millis(40);
    const FRAMES: u32 = 30;
    let Some(mut world) = world() else { return };
    world.put("footage/next.mov", 2, 12_000_000);
    let mut hand = Hand::connect(HAND, world.smbd.port());
    let clips = [
        hand.open("footage/clip.mov"),
        hand.open("footage/next.mov"),
        hand.open("footage/clip.mov"),
    ];
    let starts = [0, 2_400_000, 7_200_000];
    for _ in 0..2 {
        for (clip, start) in clips.into_iter().zip(starts) {
            let began = Instant::now();
            for frame in 0..FRAMES {
                let left = (FRAME_TIME * frame).saturating_sub(began.elapsed());
                std::thread::sleep(left);
                hand.read(clip, start + u64::from(frame) * FRAME as u64, FRAME);
            }
        }
    }
    let count = |seat: &Value, key: &str| seat[key].as_u64().unwrap_or_default();
    world.daemon().wait_for("a seat that rehearses", |status| {
        let seat = &status["seats"][0];
        let rehearsed = count(seat, "rehearsed_cuts");
        (1..=rehearsed).contains(&count(seat, "foreseen_cuts"))
    });
    let text = printed(&rushes(&world, &["status"]));
    assert!(text.contains(" · as rehearsed: "), "{text}");
}

#[test]
fn can_i_add_two_more_is_answered_in_a_tenth_of_a_second() {
    let Some(world) = world() else { return };
    // The quickest of ten: other programs use this machine, too.
    let ask = |args: &[&str]| {
        let asked = (0..10).map(|_| {
            let start = Instant::now();
            let output = rushes(&world, args);
            (output, start.elapsed())
        });
        let quickest = asked.min_by_key(|(_, time)| *time);
        quickest.expect("it was asked")
    };
    let (yes, time) = ask(&["admit", "--bitrate", "1M", "--count", "2", "--json"]);
    let answer = json(&yes);
    assert_eq!(answer["admitted"], true, "{answer:#}");
    assert!(answer["devices"][0]["left_bytes_per_s"].as_u64() > Some(0));
    assert!(time < Duration::from_millis(100), "{time:?}");

    let (no, time) = ask(&["admit", "--bitrate", "100G", "--json"]);
    assert_eq!(no.status.code(), Some(1), "no is exit code 1");
    let answer: Value = serde_json::from_slice(&no.stdout).expect("JSON");
    assert_eq!(answer["admitted"], false);
    let verdict = &answer["devices"][0];
    assert_ne!(verdict["reason"], "");
    assert!(time < Duration::from_millis(100), "{time:?}");
    // The answer names a lower load that fits; `admit` then admits it.
    let lower = &verdict["lower"];
    assert!(lower["bytes_per_s"].as_u64() > Some(0), "{answer:#}");
    let (bitrate, count) = (lower["bitrate"].to_string(), lower["count"].to_string());
    let (yes, _) = ask(&["admit", "--bitrate", &bitrate, "--count", &count, "--json"]);
    assert_eq!(json(&yes)["admitted"], true, "{answer:#}");
}

#[test]
fn what_is_installed_can_be_taken_away_again() {
    let scratch = Scratch::new();
    let place = scratch.path().join("machine");
    let run = |script: &str, args: &[&Path]| {
        let output = Command::new(root().join("packaging").join(script))
            .args(args)
            .env("DESTDIR", &place)
            .output()
            .expect("it starts");
        assert!(output.status.success(), "{}", said(&output));
    };
    let programs = needs::path_of("rushes");
    let folder = programs.parent().expect("it is in one");
    run("install.sh", &[folder]);
    let files = || {
        let found = Command::new("find")
            .arg(&place)
            .args(["-type", "f"])
            .output();
        let found = found.expect("find starts").stdout;
        String::from_utf8_lossy(&found).into_owned()
    };
    // The page that messages name is installed, and so are the pages that it links to.
    let guide = place.join("usr/share/doc/rushes/docs/guide/recording.md");
    let text = std::fs::read_to_string(&guide).expect("the guide is installed");
    for link in text
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next())
    {
        let page = link.split('#').next().unwrap_or_default();
        let is_there = page.contains("://") || guide.with_file_name(page).exists();
        assert!(page.is_empty() || is_there, "{link} leads nowhere");
    }
    assert!(files().contains("/usr/bin/rushes\n"), "{}", files());
    run("uninstall.sh", &[]);
    let left = place.join("etc/rushes/rushes.toml").display().to_string();
    assert_eq!(files().trim_end(), left);
}

/// Names of metrics between backquotes in the guide.
fn described_metrics() -> BTreeSet<String> {
    std::fs::read_to_string(root().join("docs/guide/metrics.md"))
        .expect("docs/guide/metrics.md")
        .lines()
        .filter(|line| line.starts_with("| `rushes_"))
        .filter_map(|line| line.split('`').nth(1))
        .map(str::to_owned)
        .collect()
}

#[test]
fn metrics_are_those_of_the_guide_and_name_nobody() {
    let Some(world) = world() else { return };
    let mut hand = Hand::connect(HAND, world.smbd.port());
    let file = hand.open("footage/clip.mov");
    hand.read(file, 0, 1_000_000);
    let socket = world.scratch.path().join("run/metrics.sock");
    let mut stream = UnixStream::connect(socket).expect("the daemon listens");
    stream
        .set_read_timeout(Some(Duration::from_secs(5)))
        .expect("a socket has timeouts");
    stream
        .write_all(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")
        .expect("the daemon reads");
    let mut text = String::new();
    stream
        .read_to_string(&mut text)
        .expect("the daemon answers and closes");
    let (head, body) = text.split_once("\r\n\r\n").expect("HTTP has a head");
    assert!(
        head.starts_with("HTTP/1.") && head.contains(" 200 "),
        "{head}"
    );

    let names: BTreeSet<String> = body
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split(['{', ' ']).next())
        .map(str::to_owned)
        .collect();
    assert_eq!(
        described_metrics(),
        names,
        "left: the guide, right: the daemon"
    );
    for name in [
        "clip.mov",
        "footage",
        "127.0.0.1",
        world.disk.path().to_str().unwrap(),
    ] {
        assert!(!body.contains(name), "{name} is told in\n{body}");
    }
}

#[test]
fn a_wrong_configuration_is_refused_with_line_and_key() {
    let Some(world) = World::build(&Setup {
        daemon: false,
        ..Setup::default()
    }) else {
        return;
    };
    if !needs::all_there(&[needs::Need::Program("rushes")]) {
        return;
    }
    let config = world.scratch.path().join("rushes.toml");
    let text = format!(
        "[cache]\nbytes = \"many\"\n[server]\nruntime_dir = {:?}\nprerol = \"1s\"\n\
         [[share]]\nname = \"media\"\npath = {:?}\n",
        world.scratch.path().join("run"),
        world.disk.path()
    );
    std::fs::write(config, text).unwrap();
    for command in ["serve", "check"] {
        let output = rushes(&world, &[command]);
        assert!(!output.status.success(), "{command} accepts it");
        let said = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        for part in ["2", "cache.bytes", "many", "5", "prerol", "preroll"] {
            assert!(
                said.contains(part),
                "{command} does not say {part:?}: {said}"
            );
        }
    }
}
