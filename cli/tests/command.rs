// SPDX-License-Identifier: Apache-2.0
//! The command as people and service managers use it.

#![allow(clippy::unwrap_used)] // The helpers are tests, too.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// A folder with a configuration and a share, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("rushes-cli-{}-{number}", std::process::id()));
        std::fs::create_dir_all(path.join("share")).unwrap();
        let folder = Folder(path);
        folder.write("");
        folder
    }

    fn config(&self) -> PathBuf {
        self.0.join("rushes.toml")
    }

    fn write(&self, more: &str) {
        let text = format!(
            "[cache]\nbytes = \"64MiB\"\n[server]\nruntime_dir = {:?}\nstate_dir = {:?}\n\
             [[share]]\nname = \"media\"\npath = {:?}\n{more}",
            self.0.join("run"),
            self.0.join("state"),
            self.0.join("share"),
        );
        std::fs::write(self.config(), text).unwrap();
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn rushes() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rushes"));
    command.stdin(Stdio::null());
    command
}

fn run(config: &Path, args: &[&str]) -> Output {
    rushes()
        .args(args)
        .arg("--config")
        .arg(config)
        .output()
        .unwrap()
}

fn json(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// `rushes serve`, killed at the end if it still runs.
struct Daemon(Child);

impl Daemon {
    fn start(folder: &Folder, notify: &Path) -> Daemon {
        let child = rushes()
            .args(["serve", "--log", "error", "--config"])
            .arg(folder.config())
            .env("NOTIFY_SOCKET", notify)
            .spawn()
            .unwrap();
        Daemon(child)
    }

    fn signal(&self, name: &str) {
        let pid = self.0.id().to_string();
        assert!(
            Command::new("kill")
                .args(["-s", name, &pid])
                .status()
                .unwrap()
                .success()
        );
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn wait_exit(child: &mut Child) -> std::process::ExitStatus {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        assert!(Instant::now() < end, "it does not end");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The socket on which a service manager gets its daemon's messages.
fn manager_in(folder: &Folder) -> (PathBuf, UnixDatagram) {
    let notify = folder.0.join("notify");
    let manager = UnixDatagram::bind(&notify).unwrap();
    let patience = Some(Duration::from_secs(30));
    manager.set_read_timeout(patience).unwrap();
    (notify, manager)
}

#[test]
fn a_daemon_is_started_asked_reloaded_and_stopped() {
    let folder = Folder::new();
    let (notify, manager) = manager_in(&folder);
    let told = || {
        let mut buffer = [0; 256];
        let count = manager.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..count]).into_owned()
    };
    let mut daemon = Daemon::start(&folder, &notify);
    assert_eq!(told(), "READY=1");

    let config = folder.config();
    let status = json(&run(&config, &["status", "--json"]));
    assert_eq!(status["daemon"]["pid"], daemon.0.id());
    assert_eq!(status["shares"][0]["name"], "media");
    let beside = status["daemon"]["rss_beside_cache_bytes"].as_u64().unwrap();
    assert!(beside < 64 << 20, "{} MiB beside the cache", beside >> 20);
    let text = String::from_utf8(run(&config, &["status"]).stdout).unwrap();
    assert!(text.contains("streams: 0 open"), "{text}");
    let picture = run(&config, &["top", "--once", "--interval", "50ms"]);
    assert!(String::from_utf8_lossy(&picture.stdout).contains("0 streams open"));

    let start = Instant::now();
    let yes = run(&config, &["admit", "--bitrate", "1M", "--json"]);
    assert!(start.elapsed() < Duration::from_millis(100) || cfg!(debug_assertions));
    assert_eq!(yes.status.code(), Some(0));
    assert_eq!(json(&yes)["admitted"], true);
    assert_eq!(json(&yes)["devices"][0]["shares"][0], "media");
    let yes = run(&config, &["admit", "--bitrate", "1M"]);
    let text = String::from_utf8(yes.stdout).unwrap();
    assert!(text.contains("(share media): yes, one stream"), "{text}");
    assert!(text.contains("after these there is room for"), "{text}");
    let no = run(
        &config,
        &["admit", "--bitrate", "500G", "--count", "9", "--json"],
    );
    assert_eq!(no.status.code(), Some(1));
    assert_eq!(json(&no)["admitted"], false);
    let share = folder.0.join("share");
    let path = share.to_str().unwrap();
    let here = run(&config, &["admit", "--bitrate", "1M", "--path", path]);
    assert_eq!(here.status.code(), Some(0));
    let nowhere = run(&config, &["admit", "--bitrate", "1M", "--path", "/proc"]);
    assert_eq!(nowhere.status.code(), Some(2));

    let second = rushes()
        .args(["serve", "--config"])
        .arg(&config)
        .output()
        .unwrap();
    assert_eq!(second.status.code(), Some(2));
    let why = String::from_utf8_lossy(&second.stderr);
    assert!(why.contains("another daemon"), "{why}");

    folder.write("[[rule]]\nmatch = \"**\"\nbitrate = \"5M\"\n");
    daemon.signal("HUP");
    let reloading = told();
    assert!(
        reloading.starts_with("RELOADING=1\nMONOTONIC_USEC="),
        "{reloading}"
    );
    assert_eq!(told(), "READY=1");
    let status = json(&run(&config, &["status", "--json"]));
    assert_eq!(status["daemon"]["policy"]["rule_count"], 1);

    let report = json(&run(&config, &["check", "--json"]));
    let findings = report["findings"].as_array().unwrap();
    assert!(
        findings
            .iter()
            .any(|f| f["area"] == "daemon" && f["finding"].as_str().unwrap().contains("is running")),
        "{report}"
    );

    daemon.signal("TERM");
    assert_eq!(told(), "STOPPING=1");
    assert!(wait_exit(&mut daemon.0).success());
    assert!(!folder.0.join("run/session.sock").exists());
    let gone = run(&config, &["status"]);
    assert_eq!(gone.status.code(), Some(2));
    let why = String::from_utf8_lossy(&gone.stderr);
    assert!(why.contains("start the daemon"), "{why}");
}

#[test]
fn beside_a_daemon_recover_says_that_it_is_not_needed() {
    let folder = Folder::new();
    let (notify, manager) = manager_in(&folder);
    let _daemon = Daemon::start(&folder, &notify);
    // A process that was stopped and goes on is told EINTR by a socket with a timeout.
    let heard = || manager.recv(&mut [0; 256]);
    while heard().is_err_and(|error| error.kind() == std::io::ErrorKind::Interrupted) {}
    let recovered = run(&folder.config(), &["recover"]);
    let said = String::from_utf8_lossy(&recovered.stderr).into_owned();
    assert_eq!(recovered.status.code(), Some(2), "{said}");
    assert!(said.contains("there is nothing to recover"), "{said}");
    assert!(!said.contains("another server.runtime_dir"), "{said}");
    let given_up = run(&folder.config(), &["recover", "--give-up", "3", "--yes"]);
    let said = String::from_utf8_lossy(&given_up.stderr).into_owned();
    assert!(
        said.contains("nothing is given up: a daemon serves"),
        "{said}"
    );
}

#[test]
fn a_daemon_that_was_started_with_another_runtime_folder_is_found() {
    let folder = Folder::new();
    let (notify, manager) = manager_in(&folder);
    let _daemon = Daemon::start(&folder, &notify);
    let mut buffer = [0; 64];
    let count = manager.recv(&mut buffer).unwrap();
    assert_eq!(&buffer[..count], b"READY=1");
    let text = std::fs::read_to_string(folder.config()).unwrap();
    let new = folder.0.join("new");
    let text = text.replace(
        folder.0.join("run").to_str().unwrap(),
        new.to_str().unwrap(),
    );
    std::fs::write(folder.config(), text).unwrap();
    let former = folder.0.join("run");
    for words in [&["status"][..], &["top", "--once"]] {
        let output = run(&folder.config(), words);
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        for expect in [
            format!("looked for it in {}, the runtime_dir", new.display()),
            format!("is in {0}: --runtime-dir {0}", former.display()),
        ] {
            assert!(said.contains(&expect), "{expect}: {said}");
        }
    }
    let report = json(&run(&folder.config(), &["check", "--json"]));
    let findings = report["findings"].as_array().unwrap();
    let found = findings.iter().find(|one| {
        let finding = one["finding"].as_str().unwrap();
        finding.contains("was started with another runtime_dir")
    });
    let found = found.unwrap_or_else(|| panic!("{report:#}"));
    assert!(found["remedy"].as_str().unwrap().contains("restart rushes"));
}

#[test]
fn usage_of_a_wrong_command_is_the_same_with_and_without_the_environment() {
    for words in [&["admit"][..], &["pool", "mount"], &["check", "--bogus"]] {
        let said = |is_set: bool| {
            let mut command = rushes();
            command.args(words).env_remove("RUSHES_CONFIG");
            if is_set {
                command
                    .env("RUSHES_CONFIG", "/x")
                    .env("RUSHES_RUNTIME_DIR", "/y");
            }
            let output = command.output().unwrap();
            assert_eq!(output.status.code(), Some(2), "{words:?}");
            String::from_utf8(output.stderr).unwrap()
        };
        let plain = said(false);
        assert!(plain.contains("Usage: rushes "), "{plain}");
        assert!(plain.contains("[OPTIONS]"), "{plain}");
        assert_eq!(said(true), plain, "{words:?}");
    }
}

#[test]
fn killed_it_leaves_a_place_where_the_next_one_starts() {
    let folder = Folder::new();
    for _ in 0..2 {
        let notify = folder
            .0
            .join(format!("notify{}", NUMBER.fetch_add(1, Ordering::Relaxed)));
        let manager = UnixDatagram::bind(&notify).unwrap();
        manager
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        let mut daemon = Daemon::start(&folder, &notify);
        let mut buffer = [0; 64];
        let count = manager.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..count], b"READY=1");
        daemon.signal("KILL");
        wait_exit(&mut daemon.0);
    }
}

#[test]
fn a_wrong_configuration_is_told_with_line_and_remedy() {
    let folder = Folder::new();
    folder.write("[[rule]]\nmatch = \"*\"\nbitrate = \"100 megs\"\n");
    for command in ["serve", "check"] {
        let output = run(&folder.config(), &[command]);
        let all = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&all);
        assert_eq!(
            output.status.code(),
            Some(if command == "serve" { 2 } else { 1 })
        );
        assert!(
            text.contains("line 11: rule[1].bitrate = \"100 megs\": expected bits a second"),
            "{text}"
        );
    }
}

#[test]
fn calibrating_memory_says_that_there_is_no_device() {
    if !Path::new("/dev/shm").is_dir() {
        eprintln!("SKIPPED: no /dev/shm");
        return;
    }
    let output = rushes()
        .args(["calibrate", "/dev/shm", "--quick", "--json"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(!output.stderr.is_empty());
}

#[test]
fn man_pages_and_completions_come_from_the_same_table() {
    let folder = Folder::new();
    let out = folder.0.join("man");
    assert!(
        rushes()
            .args(["man", "--out"])
            .arg(&out)
            .status()
            .unwrap()
            .success()
    );
    for page in ["rushes.1", "rushes-serve.1", "rushes-admit.1"] {
        let text = std::fs::read_to_string(out.join(page)).unwrap();
        assert!(text.contains(".TH"), "{page}");
    }
    let printed = rushes().arg("man").output().unwrap().stdout;
    let written = std::fs::read(out.join("rushes.1")).unwrap();
    assert_eq!(printed, written);
    let pages: Vec<_> = std::fs::read_dir(&out).unwrap().flatten().collect();
    assert!(pages.len() > 25, "{pages:?}");
    for page in pages {
        let page = std::fs::read_to_string(page.path()).unwrap();
        for section in [".SH \"EXIT STATUS\"", ".SH FILES", ".SH EXAMPLES"] {
            assert_eq!(page.matches(section).count(), 1, "{section}: {page}");
        }
    }
    for shell in ["bash", "zsh", "fish"] {
        let script = rushes().args(["completions", shell]).output().unwrap();
        assert!(String::from_utf8_lossy(&script.stdout).contains("calibrate"));
    }
}

/// Names under "Commands:" of a help text.
fn commands_of(words: &[&str]) -> Vec<String> {
    let output = rushes().args(words).arg("--help").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let list = text.split("Commands:\n").nth(1).unwrap();
    list.lines()
        .take_while(|line| !line.is_empty())
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .map(str::to_owned)
        .collect()
}

/// The words that bash offers after these, by the output of `rushes completions bash`.
fn offered(script: &Path, words: &[&str]) -> Vec<String> {
    let line = words.join(" ");
    let ask = format!(
        "source {}; COMP_WORDS=({line} ''); COMP_CWORD={}; _rushes rushes '' {}; echo \"${{COMPREPLY[@]}}\"",
        script.display(),
        words.len(),
        words.last().unwrap(),
    );
    let output = Command::new("bash")
        .args(["--norc", "-c", &ask])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.split_whitespace().map(str::to_owned).collect()
}

#[test]
fn each_command_of_a_pool_has_its_man_page_and_is_completed() {
    let folder = Folder::new();
    let out = folder.0.join("man");
    let made = rushes().args(["man", "--out"]).arg(&out).status().unwrap();
    assert!(made.success());
    let script = folder.0.join("completions");
    let shell = rushes().args(["completions", "bash"]).output().unwrap();
    std::fs::write(&script, shell.stdout).unwrap();
    for (words, at_least) in [(&["pool"][..], 12), (&["pool", "export"], 2)] {
        let commands = commands_of(words);
        assert!(commands.len() >= at_least, "{words:?}: {commands:?}");
        let offered_here = offered(&script, &[&["rushes"][..], words].concat());
        for command in commands {
            let page = format!("rushes-{}-{command}.1", words.join("-"));
            let text = std::fs::read_to_string(out.join(&page))
                .unwrap_or_else(|error| panic!("{page}: {error}"));
            assert!(text.contains(".SH DESCRIPTION"), "{page}: {text}");
            assert!(
                offered_here.contains(&command),
                "{command}: {offered_here:?}"
            );
            // And its own options behind it.
            let options = offered(&script, &[&["rushes"][..], words, &[&command]].concat());
            assert!(options.contains(&String::from("--help")), "{command}");
        }
    }
}

#[test]
fn commands_and_options_of_the_lab_are_completed() {
    let folder = Folder::new();
    // If the lab was built, it is beside the program and gets the question itself; else this stands
    // in for it.
    let lab = folder.0.join("rushes-lab");
    let words = r#"{"name":"lab","about":"","options":[],"commands":[{"name":"play","about":"","commands":[],"options":[
        {"long":"streams","short":null,"name":"streams","help":"","takes_value":true,"values":[],"is_path":false,"may_repeat":false},
        {"long":"server","short":null,"name":"server","help":"","takes_value":true,"values":["rushes","stock"],"is_path":false,"may_repeat":false}]}]}"#;
    std::fs::write(&lab, format!("#!/bin/sh\ncat <<'END'\n{words}\nEND\n")).unwrap();
    std::fs::set_permissions(&lab, std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", folder.0.display(), std::env::var("PATH").unwrap());
    for shell in ["bash", "zsh", "fish"] {
        let mut command = rushes();
        let made = command
            .args(["completions", shell])
            .env("PATH", &path)
            .output()
            .unwrap();
        let text = String::from_utf8(made.stdout).unwrap();
        assert!(text.contains("streams"), "{shell}");
        if shell == "bash" {
            let script = folder.0.join("completions");
            std::fs::write(&script, text).unwrap();
            assert!(offered(&script, &["rushes", "lab"]).contains(&String::from("play")));
            let options = offered(&script, &["rushes", "lab", "play"]);
            assert!(options.contains(&String::from("--streams")), "{options:?}");
            assert!(options.contains(&String::from("--server")), "{options:?}");
        }
    }
}

#[test]
fn asking_with_a_wrong_configuration_says_that_it_was_not_used() {
    let folder = Folder::new();
    folder.write("[nonsense]\n");
    let output = run(&folder.config(), &["status"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(
        said.contains("is invalid (") && said.contains("nonsense"),
        "{said}"
    );
}

#[test]
fn a_runtime_folder_that_a_wrong_configuration_names_is_looked_in() {
    let folder = Folder::new();
    for fault in ["[nonsense]\n", "[[share]\n"] {
        folder.write(fault);
        let run_folder = folder.0.join("run");
        for words in [&["status"][..], &["admit", "--bitrate", "50M"]] {
            let said = run(&folder.config(), words);
            let said = String::from_utf8_lossy(&said.stderr).into_owned();
            let named = format!("looks for the daemon in {}, which", run_folder.display());
            let (error, named) = (said.find("is invalid ("), said.find(&named));
            assert!(error.is_some() && error < named, "{words:?}: {said}");
            assert!(!said.contains("/run/rushes"), "{words:?}: {said}");
        }
        let listed = run(&folder.config(), &["recover", "--list"]);
        let said = String::from_utf8_lossy(&listed.stderr).into_owned();
        let named = format!("what is left in {};", run_folder.display());
        assert!(
            listed.status.success() && said.contains(&named),
            "{listed:?}"
        );
        assert_eq!(String::from_utf8_lossy(&listed.stdout), "nothing is left\n");
    }
    // A door that misses its daemon says where that was.
    folder.write("[nonsense]\n");
    let missed = folder.0.join("missed");
    let listed = rushes()
        .args(["recover", "--list"])
        .env("RUSHES_CONFIG", folder.config())
        .env("RUSHES_RUNTIME_DIR", &missed)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&listed.stderr).into_owned();
    let named = format!("what is left in {};", missed.display());
    assert!(listed.status.success() && said.contains(&named), "{said}");
}
