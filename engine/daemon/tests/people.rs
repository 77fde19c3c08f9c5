// SPDX-License-Identifier: Apache-2.0
//! The uses that people make of a daemon: ask, scrape, reload, start a second one, stop it.

#![allow(clippy::unwrap_used)] // The helpers are tests, too.

mod support;

use rushes_control::{Answer, Ask, ShareStatus};
use rushes_daemon::ServeError;
use rushes_daemon::calibrate::{Calibration, Fit, Source, identity_of};
use rushes_daemon::config::Config;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};
use support::ext4::Ext4;
use support::*;

fn notes(answer: Answer) -> String {
    match answer {
        Answer::Done { notes } => notes.join("\n"),
        other => panic!("{other:?}"),
    }
}

fn error(answer: Answer) -> String {
    match answer {
        Answer::Error { error } => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_second_daemon_is_told_who_is_there() {
    let share = Folder::below(&std::env::temp_dir());
    let daemon = Daemon::start(&share.0, "");
    let config = Config::load(&daemon.config_file()).unwrap();
    let error = rushes_daemon::serve(config).expect_err("one is there already");
    assert!(matches!(error, ServeError::Running { .. }), "{error:?}");
    let text = error.to_string();
    assert!(
        text.contains(&format!("pid {}", std::process::id())),
        "{text}"
    );
    // The first one serves as before.
    assert_eq!(daemon.status().shares.len(), 1);
    drop(daemon.connect());
}

#[test]
fn a_share_that_is_not_there_keeps_the_daemon_from_starting() {
    let folder = Folder::below(&std::env::temp_dir());
    let text = configuration(&folder.0, Path::new("/nonexistent/media"), "");
    let config = Config::parse(Path::new("x"), &text, |_| true).unwrap();
    let error = rushes_daemon::serve(config)
        .expect_err("no share")
        .to_string();
    assert!(
        error.contains("/nonexistent/media") && error.contains("mount it first"),
        "{error}"
    );
    // It leaves no socket that would keep the next daemon from starting.
    assert!(!folder.0.join("run/session.sock").exists());
}

#[test]
fn a_share_that_is_not_there_is_served_when_it_comes_and_the_others_at_once() {
    let share = Folder::below(&std::env::temp_dir());
    let other = Folder::below(&std::env::temp_dir());
    let later = other.0.join("later");
    let more = format!("[[share]]\nname = \"later\"\npath = {later:?}\n");
    let daemon = Daemon::start(&share.0, &more);
    let status = daemon.status();
    assert!(!status.shares[0].is_absent && status.shares[1].is_absent);
    let trouble = status.shares[1].trouble.clone().unwrap();
    assert!(trouble.contains("as soon as it is there"), "{trouble}");
    std::fs::create_dir(&later).unwrap();
    let told = notes(daemon.ask(&Ask::Reload {}));
    assert!(
        told.contains("share \"later\" is served from now on"),
        "{told}"
    );
    let status = daemon.status();
    assert_eq!(status.shares.len(), 2);
    let is_well = |share: &ShareStatus| !share.is_absent && share.trouble.is_none();
    assert!(status.shares.iter().all(is_well), "{:?}", status.shares);
}

#[test]
fn stopping_leaves_no_sockets_and_tells_the_doors() {
    let share = Folder::below(&std::env::temp_dir());
    let mut daemon = Daemon::start(&share.0, "");
    let run = daemon.folder.0.join("run");
    std::fs::write(share.0.join("x.mov"), pattern(1, 100_000)).unwrap();
    let mut client = daemon.connect();
    let (_file, handle) = open(&mut client, &share.0, "x.mov");
    assert_eq!(read(&mut client, handle, 0, 10).len(), 10);
    daemon.stop();
    for socket in ["session.sock", "control.sock", "metrics.sock"] {
        assert!(!run.join(socket).exists(), "{socket} is left");
    }
    let start = Instant::now();
    assert!(client.read(handle, &mut [0; 10], 0).is_err());
    assert!(start.elapsed() < Duration::from_millis(100));
    assert!(!client.alive());
    // And the next one starts in the same place.
    let folder = Folder(daemon.folder.0.clone());
    let again = Daemon::start_in(folder, &share.0, "");
    drop(again.connect());
}

#[test]
fn admission_is_answered_at_once_and_by_device() {
    let share = Folder::below(&std::env::temp_dir());
    let daemon = Daemon::start(&share.0, "");
    let ask = |bitrate, count, path: Option<&Path>| {
        let start = Instant::now();
        let answer = daemon.ask(&Ask::Admit {
            bitrate,
            count,
            path: path.map(|path| path.display().to_string()),
        });
        assert!(
            start.elapsed() < Duration::from_millis(100),
            "{:?}",
            start.elapsed()
        );
        answer
    };
    let Answer::Admit(one) = ask(10_000_000, 1, Some(&share.0.join("a/b"))) else {
        panic!()
    };
    assert!(one.admitted && one.devices.len() == 1, "{one:?}");
    assert!(!one.devices[0].reason.is_empty());
    let Answer::Admit(many) = ask(10_000_000_000, 1000, None) else {
        panic!()
    };
    assert!(!many.admitted, "{many:?}");
    let outside = error(ask(1, 1, Some(Path::new("/elsewhere"))));
    assert!(outside.contains("is in no share"), "{outside}");
}

#[test]
fn reload_takes_over_what_it_can_and_says_what_it_cannot() {
    let share = Folder::below(&std::env::temp_dir());
    let daemon = Daemon::start(&share.0, "");
    let rewrite = |text: &str| std::fs::write(daemon.config_file(), text).unwrap();
    let base = configuration(&daemon.folder.0, &share.0, "");

    // A wrong file: the old configuration stays, and the sentence names the line.
    rewrite(&format!("{base}[[rule]]\nmatch = \"*\"\nbitrate = 0\n"));
    let wrong = error(daemon.ask(&Ask::Reload {}));
    assert!(
        wrong.contains("stays in force") && wrong.contains("rule[1].bitrate = 0"),
        "{wrong}"
    );
    let policy = daemon.status().daemon.policy;
    assert_eq!((policy.rule_count, policy.rehearsal), (0, true));

    // Rules, policy, a new share; the size of the cache must wait.
    let second = Folder::below(&std::env::temp_dir());
    std::fs::write(second.0.join("y.bin"), pattern(2, 5000)).unwrap();
    let text = base.replace("64MiB", "128MiB").replace(
        "[server]\n",
        "[server]\npreroll = \"250ms\"\nrehearsal = false\n",
    ) + &format!(
        "[[share]]\nname = \"second\"\npath = {:?}\n[[rule]]\nmatch = \"**\"\nbitrate = \"8M\"\n",
        second.0
    );
    rewrite(&text);
    let told = notes(daemon.ask(&Ask::Reload {}));
    for expect in [
        "cache.bytes stays 64 MiB until the daemon is restarted",
        "share \"second\" is served from now on",
        "the policy changed",
        "1 rule is in force",
    ] {
        assert!(told.contains(expect), "{expect:?} is missing in {told}");
    }
    let status = daemon.status();
    assert_eq!(status.daemon.policy.preroll_ms, 250);
    assert_eq!(status.daemon.policy.rule_count, 1);
    assert!(!status.daemon.policy.rehearsal);
    assert_eq!(status.cache.bytes, 64 << 20);
    assert_eq!(status.shares.len(), 2);
    let mut client =
        rushes_shm::client::Client::connect(&daemon.session_socket(), &who("SECOND")).unwrap();
    let (_file, handle) = open(&mut client, &second.0, "y.bin");
    assert!(read(&mut client, handle, 0, 5000) == pattern(2, 5000));

    // The rule counts for files that are opened from now on.
    std::fs::write(share.0.join("z.bin"), pattern(3, 2 << 20)).unwrap();
    let mut player = daemon.connect();
    let (_file, handle) = open(&mut player, &share.0, "z.bin");
    for frame in 0..20 {
        read(&mut player, handle, frame * 40_000, 40_000);
    }
    let status = daemon.status_when("a stream with a rule", |status| {
        status
            .streams
            .iter()
            .any(|s| s.path == "z.bin" && s.rate_source.is_some())
    });
    let stream = status.streams.iter().find(|s| s.path == "z.bin").unwrap();
    assert_eq!(stream.rate_source.as_deref(), Some("rule"));
    assert_eq!(stream.rate_bytes_per_s, Some(1_000_000));

    // A share taken out is still served, and the answer says so.
    rewrite(&base);
    let told = notes(daemon.ask(&Ask::Reload {}));
    assert!(
        told.contains("share \"second\" is no longer configured"),
        "{told}"
    );
    let (_file, handle) = open(&mut client, &second.0, "y.bin");
    assert_eq!(read(&mut client, handle, 0, 10).len(), 10);
}

#[test]
fn what_was_measured_meanwhile_counts_from_a_reload_on() {
    if !is_root("a loop device") {
        return;
    }
    let disk = Ext4::new();
    let share = disk.mount();
    let daemon = Daemon::start(&share, "");
    let before = daemon.status();
    let noted = |status: &rushes_control::Status| {
        let mut notes = status.daemon.notes.iter();
        notes.any(|note| note.contains("was never measured"))
    };
    assert!(noted(&before), "{:?}", before.daemon.notes);
    let fit = Fit {
        fixed_ns: 5_000_000,
        span_ns: 7_000_000,
        bytes_per_second: 321_000_000,
        sample_count: 91,
        residual_percent_median: 0.4,
        residual_percent_p95: 2.1,
        estimated: false,
        span_estimated: false,
    };
    let measured = Calibration {
        version: 1,
        identity: identity_of(&share).unwrap(),
        measured_at: String::from("2026-11-21T10:00:00Z"),
        quick: false,
        source: Source::WholeDevice,
        writes_missing: None,
        buffered_file: None,
        read: fit,
        write: fit,
        read_table: Vec::new(),
        write_table: Vec::new(),
    };
    measured.save(&daemon.folder.0.join("state")).unwrap();
    let meanwhile = daemon.status();
    assert!(!noted(&meanwhile), "{:?}", meanwhile.daemon.notes);
    let mut said = meanwhile.daemon.notes.iter();
    assert!(
        said.any(|note| note.contains("was measured on 2026-11-21T10:00:00Z")
            && note.contains("systemctl reload rushes")),
        "{:?}",
        meanwhile.daemon.notes
    );
    let told = notes(daemon.ask(&Ask::Reload {}));
    assert!(
        told.contains("was measured: positioning 5") && told.contains("321 MB/s"),
        "{told}"
    );
    let after = daemon.status();
    let device = &after.devices[0];
    assert_eq!(device.model_source, "calibrated");
    assert_eq!(device.read_bytes_per_s, 321_000_000);
    assert!(!noted(&after), "{:?}", after.daemon.notes);
    // Once: the next reload does not mention it.
    let told = notes(daemon.ask(&Ask::Reload {}));
    assert!(!told.contains("was measured"), "{told}");
}

#[test]
fn a_reload_that_failed_stands_in_the_status_until_one_succeeds() {
    let share = Folder::below(&std::env::temp_dir());
    let daemon = Daemon::start(&share.0, "");
    let base = configuration(&daemon.folder.0, &share.0, "");
    let rewrite = |text: &str| std::fs::write(daemon.config_file(), text).unwrap();
    assert_eq!(daemon.status().daemon.reload_error, None);
    rewrite(&format!("{base}[[rule]]\nmatch = \"*\"\nbitrate = 0\n"));
    let wrong = error(daemon.ask(&Ask::Reload {}));
    assert_eq!(daemon.status().daemon.reload_error, Some(wrong));
    rewrite(&base);
    notes(daemon.ask(&Ask::Reload {}));
    assert_eq!(daemon.status().daemon.reload_error, None);
}

#[test]
fn the_control_socket_bears_nonsense_and_has_its_mode() {
    let share = Folder::below(&std::env::temp_dir());
    let daemon = Daemon::start(&share.0, "");
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&daemon.control_socket()), 0o660);
    assert_eq!(mode(&daemon.session_socket()), 0o600);
    let talk = |text: &[u8]| {
        let stream = UnixStream::connect(daemon.control_socket()).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        let mut stream = BufReader::new(stream);
        stream.get_mut().write_all(text).unwrap();
        let mut line = String::new();
        stream.read_line(&mut line).unwrap();
        // The connection is good for another question.
        stream
            .get_mut()
            .write_all(b"{\"ask\":\"status\"}\n")
            .unwrap();
        let mut second = String::new();
        stream.read_line(&mut second).unwrap();
        (line, second)
    };
    for nonsense in [&b"\n"[..], b"\xff\xfe\n", b"{\"ask\":\"fly\"}\n", b"[]\n"] {
        let (line, second) = talk(nonsense);
        assert!(
            line.starts_with("{\"answer\":\"error\",\"error\":\""),
            "{line}"
        );
        assert!(second.starts_with("{\"answer\":\"status\""), "{second}");
    }
    // Longer than any question: the daemon answers with an error and closes.
    let stream = UnixStream::connect(daemon.control_socket()).unwrap();
    let mut stream = BufReader::new(stream);
    stream.get_mut().write_all(&vec![b'x'; 70_000]).unwrap();
    let mut line = String::new();
    stream.read_line(&mut line).unwrap();
    assert!(line.contains("longer than 65536 bytes"), "{line}");
    // Many silent connections do not keep others out once they are closed.
    let silent: Vec<UnixStream> = (0..40)
        .map(|_| UnixStream::connect(daemon.control_socket()).unwrap())
        .collect();
    drop(silent);
    daemon.status();
}

#[test]
fn metrics_come_over_the_socket_and_over_tcp_by_choice() {
    let share = Folder::below(&std::env::temp_dir());
    std::fs::write(share.0.join("secret.mov"), pattern(1, 3_000_000)).unwrap();
    // A free port: bound and closed again just before.
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let folder = Folder::below(&std::env::temp_dir());
    let text = configuration(&folder.0, &share.0, "").replace(
        "[server]\n",
        &format!("[server]\nmetrics_listen = \"127.0.0.1:{port}\"\n"),
    );
    std::fs::write(folder.0.join("rushes.toml"), text).unwrap();
    let daemon = Daemon::start_written(folder);
    let mut client = daemon.connect();
    let (_file, handle) = open(&mut client, &share.0, "secret.mov");
    for frame in 0..6 {
        read(&mut client, handle, frame * 500_000, 500_000);
    }
    let get = |mut stream: Box<dyn ReadWrite>, request: &str| {
        stream.write_all(request.as_bytes()).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    };
    let unix = || Box::new(UnixStream::connect(daemon.metrics_socket()).unwrap());
    let request = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";
    let text = get(unix(), request);
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
    for expect in ["rushes_sessions 1", "rushes_cache_bytes 67108864", "# EOF"] {
        assert!(text.contains(expect), "{expect:?} is missing in\n{text}");
    }
    for secret in ["secret.mov", "tester", "media"] {
        assert!(!text.contains(secret), "{secret:?} is told in\n{text}");
    }
    let tcp = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    assert!(get(Box::new(tcp), request).contains("rushes_sessions 1"));
    assert!(get(unix(), "GET /else HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
    assert!(get(unix(), "POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
    assert!(get(unix(), "\r\n\r\n").starts_with("HTTP/1.1 405"));
}

trait ReadWrite: Read + Write {}
impl<T: Read + Write> ReadWrite for T {}

/// Play three runs of two clips, each frame at its time. Returns the cuts out of runs that the user
/// had played before.
fn play_list(daemon: &Daemon, share: &Path) -> u64 {
    const FRAME: usize = 40_000;
    const FRAME_TIME: Duration = Duration::from_millis(40);
    let mut client = daemon.connect();
    let clips = [("a.mov", 0), ("b.mov", 2_400_000), ("a.mov", 7_200_000)];
    let clips = clips.map(|(name, start)| (open(&mut client, share, name), start));
    for ((_, handle), start) in &clips {
        let began = Instant::now();
        for frame in 0..30u32 {
            std::thread::sleep((FRAME_TIME * frame).saturating_sub(began.elapsed()));
            let offset = start + u64::from(frame) * FRAME as u64;
            read(&mut client, *handle, offset, FRAME);
        }
    }
    daemon.status().seats[0].rehearsed_cuts
}

#[test]
fn cuts_that_were_played_before_a_restart_are_rehearsed() {
    const RULE: &str = "[[rule]]\nmatch = \"**/*.mov\"\nbitrate = \"8M\"\n";
    let share = Folder::below(&std::env::temp_dir());
    for (seed, name) in [(1, "a.mov"), (2, "b.mov")] {
        std::fs::write(share.0.join(name), pattern(seed, 12_000_000)).unwrap();
    }
    let folder = Folder::below(&std::env::temp_dir());
    let place = || Folder(folder.0.clone());
    let mut daemon = Daemon::start_in(place(), &share.0, RULE);
    assert_eq!(play_list(&daemon, &share.0), 0);
    daemon.stop();
    let file = folder.0.join("state/rehearsal.json");
    let written = std::fs::read(&file).unwrap();
    let mode = std::fs::metadata(&file).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    // The folder is the test's.
    std::mem::forget(daemon);

    // While rehearsal is off the file stays as it is, and is not used.
    let text = configuration(&folder.0, &share.0, RULE);
    let off = text.replace("[server]\n", "[server]\nrehearsal = false\n");
    std::fs::write(folder.0.join("rushes.toml"), off).unwrap();
    let mut daemon = Daemon::start_written(place());
    assert_eq!(play_list(&daemon, &share.0), 0);
    daemon.stop();
    assert_eq!(std::fs::read(&file).unwrap(), written);
    std::mem::forget(daemon);

    let mut daemon = Daemon::start_in(place(), &share.0, RULE);
    assert!(play_list(&daemon, &share.0) > 0);
    daemon.stop();
    std::mem::forget(daemon);

    // A damaged file keeps no daemon from serving, and the next save replaces it.
    std::fs::write(&file, &written[..written.len() / 2]).unwrap();
    let mut daemon = Daemon::start_in(place(), &share.0, RULE);
    assert_eq!(play_list(&daemon, &share.0), 0);
    daemon.stop();
    assert!(std::fs::read(&file).unwrap().ends_with(b"]}\n"));
    std::mem::forget(daemon);
}
