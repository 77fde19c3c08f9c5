// SPDX-License-Identifier: Apache-2.0
//! Disks that are mounted late, go and come back, behind Samba and behind a pool: the daemon serves
//! a client again that opens a file there, and first writes data that lanes have for such a disk.

use rushes_tests::daemon::{Daemon, DaemonSpec};
use rushes_tests::disk::{Disk, run};
use rushes_tests::hand::Hand;
use rushes_tests::needs::{Need, all_there, path_of};
use rushes_tests::pattern;
use rushes_tests::pool::{self, EXT4, PoolWorld};
use rushes_tests::scratch::Scratch;
use rushes_tests::smbd::{self, Smbd, SmbdSpec};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

const HAND: &str = env!("CARGO_BIN_EXE_smb-hand");
const LENGTH: usize = 3_000_001;

/// A disk, a daemon and Samba, started in any order.
struct Late {
    smbd: Option<Smbd>,
    daemon: Daemon,
    disk: Disk,
    scratch: Scratch,
}

impl Late {
    /// The daemon finds an empty folder at the later place of the disk.
    fn build() -> Option<Late> {
        let wanted = [
            Need::Root,
            Need::Program("smbd"),
            Need::Program("pdbedit"),
            Need::Program("mkfs.ext4"),
            Need::Program("rushes"),
            Need::Module,
        ];
        if !all_there(&wanted) {
            return None;
        }
        let scratch = Scratch::new();
        let disk = Disk::ext4(&scratch, 256 << 20);
        fs::set_permissions(disk.path(), fs::Permissions::from_mode(0o777)).expect("ours");
        run(Command::new("umount").arg(disk.path()));
        let spec = DaemonSpec {
            share: disk.path().to_path_buf(),
            cache: String::from("64MiB"),
            write_buffer: Some("64MiB"),
            server: String::new(),
            more: String::new(),
        };
        let daemon = Daemon::start(&scratch, &spec);
        Some(Late {
            smbd: None,
            daemon,
            disk,
            scratch,
        })
    }

    fn mount(&self) {
        run(Command::new("mount")
            .args(["-o", "loop"])
            .arg(self.scratch.path().join("disk.img"))
            .arg(self.disk.path()));
    }

    /// Mounts the disk as another device: a disk that was pulled as sdb comes back as sdc.
    fn mount_as_another(&self) {
        let images = ["disk.img", "other.img"].map(|name| self.scratch.path().join(name));
        run(Command::new("cp").arg("--sparse=always").args(&images));
        run(Command::new("mount")
            .args(["-o", "loop"])
            .arg(&images[1])
            .arg(self.disk.path()));
    }

    /// As `systemctl reload` does it. Returns the daemon's notes, which come after the reload.
    fn reload(&self) -> String {
        let answer = self.daemon.ask("{\"ask\":\"reload\"}");
        let answer = answer.expect("an answer");
        assert_eq!(answer["answer"], "done", "{answer:#}");
        let notes = answer["notes"].as_array().expect("a list");
        let notes: Vec<&str> = notes.iter().filter_map(Value::as_str).collect();
        notes.join("\n")
    }

    /// The findings of `rushes check` about the place of its share, each with the advice to mount
    /// the disk.
    fn complaints(&self) -> Vec<String> {
        let output = Command::new(path_of("rushes"))
            .args(["check", "--json", "--config"])
            .arg(self.scratch.path().join("rushes.toml"))
            .output()
            .expect("it was built");
        let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let findings = report["findings"].as_array().expect("a list");
        let place = self.disk.path().display().to_string();
        findings
            .iter()
            .filter(|finding| finding["level"] != "ok")
            .map(|finding| format!("{} -> {}", finding["finding"], finding["remedy"]))
            .filter(|text| text.contains(&place) && text.contains("mount it"))
            .collect()
    }

    /// Ends all processes that could write the acknowledged bytes, then the disk goes.
    fn pull(&mut self, client: Hand) {
        self.daemon.kill();
        client.kill();
        self.smbd = None;
        self.unmount();
    }

    fn unmount(&self) {
        run(Command::new("umount").arg("--lazy").arg(self.disk.path()));
    }

    /// Its smbd stands on the file system that is mounted by now, and stays there.
    fn start_samba(&mut self) -> Hand {
        let share = vec![
            String::from("vfs objects = rushes"),
            format!(
                "rushes:socket = {}",
                Daemon::session_socket(&self.scratch).display()
            ),
            String::from("rushes:recover after = 600"),
        ];
        let spec = SmbdSpec {
            path: self.disk.path().to_path_buf(),
            share,
            global: Vec::new(),
        };
        let smbd = self.smbd.insert(smbd::start(&self.scratch, &spec));
        Hand::connect(HAND, smbd.port())
    }
}

fn is_on_disk(status: &Value) -> bool {
    let share = &status["shares"][0];
    let device = share["device"].as_str().unwrap_or_default();
    device.starts_with("loop") && share["trouble"] == Value::Null
}

fn plain_count(daemon: &Daemon) -> u64 {
    let count = &daemon.status()["daemon"]["plain_open_count"];
    count.as_u64().expect("a number")
}

#[test]
fn smb_clients_of_a_disk_that_came_late_and_came_again_are_served() {
    let Some(mut world) = Late::build() else {
        return;
    };
    assert!(!is_on_disk(&world.daemon.status()));
    world.mount();
    for (number, name) in [(1, "one.mov"), (2, "two.mov")] {
        let bytes = pattern::bytes(number, 0, LENGTH);
        fs::write(world.disk.path().join(name), bytes).expect("there is room");
    }
    let mut client = world.start_samba();
    let held = client.open("one.mov");
    pattern::check(1, 0, &client.read(held, 0, LENGTH), "one.mov");
    assert_eq!(plain_count(&world.daemon), 0);
    world.daemon.wait_for("it lies on the disk", is_on_disk);
    world.unmount();
    world
        .daemon
        .wait_for("it does not lie on the disk", |status| !is_on_disk(status));
    world.mount();
    world
        .daemon
        .wait_for("it lies on the disk again", is_on_disk);
    let other = client.open("two.mov");
    pattern::check(2, 0, &client.read(other, 0, LENGTH), "two.mov");
    pattern::check(1, 0, &client.read(held, 0, LENGTH), "one.mov");
    assert_eq!(plain_count(&world.daemon), 0);
    let status = world.daemon.status();
    let streams = status["streams"].as_array().expect("a list");
    assert!(
        streams.iter().any(|stream| stream["path"] == "two.mov"),
        "{status:#}"
    );
}

#[test]
fn check_says_where_a_share_lies_and_a_reload_finds_it_there() {
    let Some(mut world) = Late::build() else {
        return;
    };
    world.mount();
    fs::write(
        world.disk.path().join("one.mov"),
        pattern::bytes(1, 0, LENGTH),
    )
    .expect("room");
    world.daemon.wait_for("it lies on the disk", is_on_disk);
    assert_eq!(world.complaints(), [""; 0]);
    world.unmount();
    world
        .daemon
        .wait_for("it does not lie on the disk", |status| !is_on_disk(status));
    let ill = world.complaints();
    assert!(!ill.is_empty());
    // A reload does not change that, and its answer names the trouble.
    let said = world.reload();
    let trouble = world.daemon.status()["shares"][0]["trouble"].clone();
    let trouble = trouble.as_str().expect("a sentence").to_owned();
    assert!(said.contains(&trouble), "{trouble}: {said}");
    assert!(!is_on_disk(&world.daemon.status()));
    assert_eq!(world.complaints(), ill);
    world.mount();
    let said = world.reload();
    assert!(!said.contains(&trouble), "{said}");
    // At once, when the daemon answers the reload, not some seconds later.
    let status = world.daemon.status();
    assert!(is_on_disk(&status), "{status:#}");
    // The daemon no longer lists the disk below the mount point as a device.
    let devices = status["devices"].as_array().expect("a list");
    let names: Vec<&Value> = devices.iter().map(|device| &device["name"]).collect();
    assert_eq!(names, [&status["shares"][0]["device"]], "{status:#}");
    let notes = status["daemon"]["notes"].as_array().expect("a list");
    let device = status["shares"][0]["device"].as_str().expect("a name");
    let mut noted = notes.iter().filter_map(Value::as_str);
    assert!(
        noted.all(|note| !note.contains("never measured") || note.starts_with(device)),
        "{notes:#?}"
    );
    assert_eq!(world.complaints(), [""; 0]);
    let mut client = world.start_samba();
    let held = client.open("one.mov");
    pattern::check(1, 0, &client.read(held, 0, LENGTH), "one.mov");
    assert_eq!(plain_count(&world.daemon), 0);
}

#[test]
fn a_disk_that_comes_back_as_another_device_is_served_from_there() {
    let Some(mut world) = Late::build() else {
        return;
    };
    world.mount();
    for (number, name) in [(1, "one.mov"), (2, "two.mov")] {
        let path = world.disk.path().join(name);
        fs::write(&path, pattern::bytes(number, 0, LENGTH)).expect("there is room");
        fs::set_permissions(path, fs::Permissions::from_mode(0o666)).expect("ours");
    }
    let status = world.daemon.wait_for("it lies on the disk", is_on_disk);
    let device = status["shares"][0]["device"].clone();
    let mut client = world.start_samba();
    let held = client.open_rw("one.mov");
    client.write(held, 0, &pattern::bytes(3, 0, 100_000));
    pattern::check(3, 0, &client.read(held, 0, 100_000), "one.mov");
    world.daemon.wait_for("all of it is on the disk", |status| {
        status["write"]["used_bytes"] == 0
    });
    world.disk.make_cold();
    world.unmount();
    world.mount_as_another();
    let status = world.daemon.wait_for("it lies on the other one", |status| {
        is_on_disk(status) && status["shares"][0]["device"] != device
    });
    assert_eq!(world.complaints(), [""; 0], "{status:#}");
    // The smbd of the first client stands in the folder that it found.
    client.kill();
    world.smbd = None;
    let mut client = world.start_samba();
    let held = client.open_rw("one.mov");
    pattern::check(3, 0, &client.read(held, 0, 100_000), "one.mov");
    let other = client.open("two.mov");
    pattern::check(2, 0, &client.read(other, 0, LENGTH), "two.mov");
    client.write(held, 0, &pattern::bytes(4, 0, 100_000));
    world.daemon.wait_for("all of it is on the disk", |status| {
        status["write"]["used_bytes"] == 0
    });
    assert_eq!(plain_count(&world.daemon), 0);
    let found = fs::read(world.disk.path().join("one.mov")).expect("it is there");
    pattern::check(4, 0, &found[..100_000], "one.mov on the other device");
}

#[test]
fn what_was_left_is_written_to_the_disk_that_comes_back_as_another_device() {
    let Some(mut world) = Late::build() else {
        return;
    };
    world.mount();
    let path = world.disk.path().join("take.mov");
    fs::write(&path, pattern::bytes(1, 0, LENGTH)).expect("there is room");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("ours");
    world.daemon.wait_for("it lies on the disk", is_on_disk);
    world.disk.make_cold();
    let mut client = world.start_samba();
    let held = client.open_rw("take.mov");
    let bytes = pattern::bytes(5, 0, LENGTH);
    client.write(held, 0, &bytes);
    world.pull(client);
    world.mount_as_another();
    assert!(fs::read(&path).expect("it is there") != bytes, "it is left");
    world.daemon.start_again();
    world.daemon.wait_for("all of it is on the disk", |status| {
        let is_written = status["write"]["used_bytes"] == 0;
        is_written && fs::read(&path).is_ok_and(|found| found == bytes)
    });
}

#[test]
fn what_was_left_for_a_disk_that_is_not_there_is_written_when_it_comes() {
    let Some(mut world) = Late::build() else {
        return;
    };
    world.mount();
    let mut client = world.start_samba();
    world.daemon.wait_for("it lies on the disk", is_on_disk);
    let held = client.create("take.mov");
    let bytes = pattern::bytes(5, 0, LENGTH);
    client.write(held, 0, &bytes);
    world.pull(client);
    world.daemon.start_again();
    let status = world.daemon.status();
    let notes = status["daemon"]["notes"].to_string();
    assert!(notes.contains("is not mounted where a share is"), "{notes}");
    world.mount();
    let path = world.disk.path().join("take.mov");
    world.daemon.wait_for("all of it is on the disk", |status| {
        let is_written = status["write"]["used_bytes"] == 0;
        is_on_disk(status) && is_written && fs::read(&path).is_ok_and(|found| found == bytes)
    });
    let notes = world.daemon.status()["daemon"]["notes"].to_string();
    assert!(!notes.contains("a former daemon"), "{notes}");
}

#[test]
fn a_member_that_was_lost_and_came_back_is_read_by_way_of_the_daemon_again() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 200), (EXT4, 200)]) else {
        return;
    };
    let daemon = world.served(2, "");
    let on_second = (0..8).map(|number| format!("clip{number}.mov"));
    let mut names = Vec::new();
    for (number, name) in on_second.enumerate() {
        pool::put(&world.path(&name), number as u64, LENGTH).expect("there is room");
        if world.members_of(&name) == [1] {
            names.push((number as u64, name));
        }
    }
    assert!(!names.is_empty(), "members of one size take turns");
    run(Command::new("umount").arg("--lazy").arg(world.member(1)));
    daemon.wait_for("the member is not there", |status| {
        status["shares"][1]["trouble"] != Value::Null
    });
    world.plug(1, "loop");
    daemon.wait_for("the member is there", |status| {
        status["shares"][1]["trouble"] == Value::Null
    });
    rushes_tests::caches::drop("3");
    let before = plain_count(&daemon);
    let read_before = read_count(&daemon);
    for (number, name) in &names {
        pool::check(&world.path(name), *number, LENGTH);
    }
    assert_eq!(plain_count(&daemon), before);
    assert!(read_count(&daemon) > read_before, "by way of the daemon");
    drop(daemon);
    world.end();
}

/// Reads that the cache answered or missed.
fn read_count(daemon: &Daemon) -> u64 {
    let cache = &daemon.status()["cache"];
    let of = |name: &str| cache[name].as_u64().expect("a number");
    of("hit_count") + of("miss_count")
}
