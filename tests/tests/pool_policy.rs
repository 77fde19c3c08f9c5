// SPDX-License-Identifier: Apache-2.0
//! Where files of a mounted pool go: classes of members, folders that say so, users, and devices of which much is promised.

use rushes_tests::daemon::{Daemon, DaemonSpec};
use rushes_tests::disk::run;
use rushes_tests::needs::{self, Need};
use rushes_tests::pattern;
use rushes_tests::pool::{EXT4, PoolWorld};
use rustix::fs::{
    CWD, FileType, Mode, OFlags, XattrFlags, getxattr, mknodat, removexattr, setxattr,
};
use rustix::io::Errno;
use serde_json::Value;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const ATTRIBUTE: &str = "user.rushes.policy";

fn put(world: &PoolWorld, name: &str, length: usize) {
    fs::write(world.path(name), pattern::bytes(1, 0, length)).expect("there is room");
}

/// `rushes pool policy PATH WORDS…`
fn policy(path: &Path, words: &[&str]) -> Output {
    Command::new(needs::path_of("rushes"))
        .args(["pool", "policy"])
        .arg(path)
        .args(words)
        .output()
        .expect("rushes starts")
}

fn said(path: &Path, words: &[&str]) -> Value {
    let output = policy(path, &[words, &["--json"]].concat());
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn refused(output: &Output, sentence: &str) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(text.contains(sentence), "{text}\nexpected: {sentence}");
}

/// The attribute of a file or folder; None: it has none.
fn own(path: &Path) -> Option<String> {
    let mut value = [0; 256];
    match getxattr(path, ATTRIBUTE, &mut value[..]) {
        Ok(length) => Some(String::from_utf8_lossy(&value[..length]).into_owned()),
        Err(Errno::NODATA) => None,
        Err(error) => panic!("{}: {error}", path.display()),
    }
}

/// A folder of this name that says so.
fn folder(world: &PoolWorld, name: &str, words: &str) {
    fs::create_dir(world.path(name)).expect("made");
    said(&world.path(name), &["--set", words]);
}

/// Members of these classes, said while the pool is not mounted.
fn with_classes(world: &mut PoolWorld, classes: &str) {
    world.end();
    said(&world.catalogue(), &["--class", classes]);
    world.start();
}

#[test]
fn what_is_made_in_a_folder_of_a_class_goes_to_the_members_of_that_class_alone() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 40), (EXT4, 60), (EXT4, 200)]) else {
        return;
    };
    with_classes(&mut world, "0=ssd,1=ssd,2=raid");
    put(&world, "outside", 2 * MIB);
    assert_eq!(world.members_of("outside"), [2], "most room");
    folder(&world, "fast", "class=ssd");
    fs::create_dir_all(world.path("fast/reel/scene")).expect("made");
    let files = ["fast/a", "fast/reel/b", "fast/reel/scene/c"];
    for name in files {
        put(&world, name, 2 * MIB);
    }
    // As NFS servers make files.
    let made = world.path("fast/reel/made");
    mknodat(
        CWD,
        &made,
        FileType::RegularFile,
        Mode::RUSR | Mode::WUSR,
        0,
    )
    .expect("made");
    put(&world, "fast/reel/made", 2 * MIB);
    for name in files.iter().chain(&["fast/reel/made"]) {
        assert_ne!(world.members_of(name), [2], "{name}");
        assert_eq!(world.members_of(name).len(), 1, "{name}");
        assert_eq!(
            own(&world.path(name)).as_deref(),
            Some("class=ssd"),
            "{name}"
        );
    }
    assert_eq!(own(&world.path("fast/reel")).as_deref(), Some("class=ssd"));
    let found = world.where_is("fast/a");
    assert_eq!(found["wish"], "class=ssd");
    assert_eq!(found["segments"][0]["objects"][0]["assigned_class"], "ssd");

    // Nothing that has a name already is made there.
    fs::rename(world.path("outside"), world.path("fast/moved")).expect("renamed");
    fs::hard_link(world.path("fast/moved"), world.path("fast/linked")).expect("linked");
    assert_eq!(own(&world.path("fast/linked")), None);
    assert_eq!(world.members_of("fast/linked"), [2]);
    fs::rename(world.path("fast/reel"), world.path("reel")).expect("renamed");
    assert_eq!(own(&world.path("reel")).as_deref(), Some("class=ssd"));
    put(&world, "reel/later", 2 * MIB);
    assert_ne!(world.members_of("reel/later"), [2]);
    // What is no file and no folder has no such attribute, and is made all the same.
    std::os::unix::fs::symlink("a", world.path("fast/link")).expect("made");
    run(Command::new("mkfifo").arg(world.path("fast/pipe")));

    // A file over all that the class has, to the last block.
    let (long, length) = world.fill("fast/long", 5, 120 << 20);
    drop(long);
    assert_eq!(world.members_of("fast/long"), [0, 1]);
    for number in 0..2 {
        world.must_be_full(number);
    }
    let found = fs::read(world.path("fast/long")).expect("read");
    assert_eq!(found.len() as u64, length);
    pattern::check(5, 0, &found, "long");
    // Others have room.
    put(&world, "after", 2 * MIB);
    assert_eq!(world.members_of("after"), [2]);
}

#[test]
fn folders_choose_in_turn_or_by_user_beside_each_other() {
    let Some(world) = PoolWorld::build(&[(EXT4, 120), (EXT4, 120), (EXT4, 250)]) else {
        return;
    };
    if !needs::all_there(&[Need::Program("setpriv")]) {
        return;
    }
    folder(&world, "turn", "choose=round_robin");
    let mut counts = [0; 3];
    for number in 0..6 {
        let name = format!("turn/{number}");
        put(&world, &name, MIB);
        for member in world.members_of(&name) {
            counts[member as usize] += 1;
        }
    }
    assert_eq!(counts, [2, 2, 2]);

    folder(&world, "users", "choose=per_user");
    let all = fs::Permissions::from_mode(0o777);
    fs::set_permissions(world.path("users"), all).expect("set");
    for number in 0..4 {
        for (user, member) in [(1000, 1), (1001, 2), (1002, 0)] {
            let name = format!("users/{user}-{number}");
            let write = "head -c 1048576 /dev/zero > \"$0\"";
            run(Command::new(needs::path_of("setpriv"))
                .args([format!("--reuid={user}"), format!("--regid={user}")])
                .args(["--clear-groups", "sh", "-c", write])
                .arg(world.path(&name)));
            assert_eq!(world.members_of(&name), [member], "{name}");
        }
    }
}

/// Both members are shares of a daemon; the second has more room.
fn served() -> Option<(PoolWorld, Daemon)> {
    let world = PoolWorld::build(&[(EXT4, 150), (EXT4, 300)])?;
    let spec = DaemonSpec {
        share: world.member(0).join("pool"),
        cache: String::from("192MiB"),
        write_buffer: None,
        server: String::new(),
        more: format!(
            "[[share]]\nname = \"second\"\npath = {:?}\n",
            world.member(1).join("pool")
        ),
    };
    let daemon = Daemon::start(&world.scratch, &spec);
    Some((world, daemon))
}

/// From now on what is read is promised a quarter of a device.
fn promise_much(world: &PoolWorld, daemon: &Daemon) {
    let status = daemon.status();
    let rate = status["devices"][0]["read_bytes_per_s"]
        .as_u64()
        .expect("a rate");
    let mut config = File::options()
        .append(true)
        .open(world.scratch.path().join("rushes.toml"))
        .expect("there is one");
    write!(
        config,
        "[[rule]]\nmatch = \"**\"\nbitrate = \"{}k\"\n",
        rate / 4 * 8 / 1000
    )
    .expect("written");
    let answer = daemon.ask("{\"ask\":\"reload\"}").expect("an answer");
    assert_eq!(answer["answer"], "done", "{answer:#}");
}

fn promised(status: &Value) -> u64 {
    let devices = status["devices"].as_array().expect("a list");
    devices
        .iter()
        .filter_map(|device| device["promised_bytes_per_s"].as_u64())
        .sum()
}

/// The member that a new file goes to.
fn next(world: &PoolWorld, folder: &str, number: &mut u32) -> Vec<u64> {
    *number += 1;
    let name = format!("{folder}/new{number}");
    put(world, &name, MIB);
    world.members_of(&name)
}

/// Until new files go there; the door hears of the daemon once a second.
fn wait_for_member(world: &PoolWorld, member: u64, number: &mut u32) {
    let end = Instant::now() + Duration::from_secs(10);
    while next(world, "light", number) != [member] {
        assert!(
            Instant::now() < end,
            "files do not go to {member}: {}",
            world.log()
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn new_files_avoid_the_device_that_plays() {
    let Some((world, daemon)) = served() else {
        return;
    };
    folder(&world, "light", "choose=least_loaded");
    fs::create_dir(world.path("plain")).expect("made");
    put(&world, "clip", 60 * MIB);
    assert_eq!(world.members_of("clip"), [1], "most room");
    let mut number = 0;
    wait_for_member(&world, 1, &mut number);
    promise_much(&world, &daemon);

    let is_enough = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Stops the player also when something here fails.
        struct Stop<'a>(&'a AtomicBool);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Release);
            }
        }
        let stop = Stop(&is_enough);
        let (world, is_enough) = (&world, &is_enough);
        scope.spawn(move || {
            // Past the kernel's cache, so that each read is the daemon's.
            let clip = File::options()
                .read(true)
                .custom_flags(OFlags::DIRECT.bits() as i32)
                .open(world.path("clip"))
                .expect("opened");
            let mut piece = vec![0; MIB / 2];
            let mut at = 0;
            while !is_enough.load(Ordering::Acquire) {
                clip.read_exact_at(&mut piece, at).expect("read");
                pattern::check(1, at, &piece[..64], "clip");
                at = (at + piece.len() as u64) % (60 * MIB as u64);
                std::thread::sleep(Duration::from_millis(40));
            }
        });
        daemon.wait_for("a promise", |status| promised(status) > 0);
        wait_for_member(world, 0, &mut number);
        for _ in 0..5 {
            assert_eq!(next(world, "light", &mut number), [0]);
            assert_eq!(next(world, "plain", &mut number), [1], "most room");
        }
        drop(stop);
    });
    // The player is gone, and with him what he was promised.
    daemon.wait_for("no promise", |status| promised(status) == 0);
    wait_for_member(&world, 1, &mut number);
}

#[test]
fn words_that_are_none_are_refused_by_mount_and_command_with_a_sentence() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 40), (EXT4, 40)]) else {
        return;
    };
    fs::create_dir(world.path("reel")).expect("made");
    let reel = world.path("reel");
    let set = |value: &str| setxattr(&reel, ATTRIBUTE, value.as_bytes(), XattrFlags::empty());
    assert_eq!(set("class=ssd fast"), Err(Errno::INVAL));
    assert_eq!(set("class=ssd fast"), Err(Errno::INVAL));
    assert_eq!(own(&reel), None);
    let log = world.log();
    assert!(log.contains("\"fast\": expected single"), "{log}");
    assert_eq!(log.matches("\"fast\"").count(), 1, "{log}");
    let bytes = setxattr(&reel, ATTRIBUTE, b"single \xff", XattrFlags::empty());
    assert_eq!(bytes, Err(Errno::INVAL));
    // Any other attribute is the users' own.
    setxattr(&reel, "user.note", b"fast", XattrFlags::empty()).expect("set");

    refused(&policy(&reel, &["--set", "fast"]), "expected single");
    refused(
        &policy(&reel, &["--set", "striped=1"]),
        "with 2 to 64 members",
    );
    refused(
        &policy(&reel, &["--set", "class=ssd"]),
        "none is of a class yet",
    );
    refused(&policy(&reel, &["--class", "0=ssd"]), "about members");
    refused(&policy(Path::new("/proc"), &[]), "in no pool");
    let catalogue = world.catalogue();
    for words in [["--set", "single"], ["--class", "0=ssd"]] {
        refused(&policy(&catalogue, &words), "is served already (process ");
    }
    let inside = catalogue.join("tree/reel");
    refused(&policy(&inside, &["--set", "single"]), "below the mount");
    std::os::unix::fs::symlink("nowhere", world.path("link")).expect("made");
    refused(&policy(&world.path("link"), &[]), "No such file");

    // Shown, also while it is mounted.
    let shown = said(&catalogue, &[]);
    assert_eq!(shown["is_served"], true);
    assert_eq!(
        (&shown["path"], &shown["own"]),
        (&Value::Null, &Value::Null)
    );
    assert_eq!(shown["wish"], "");
    assert_eq!(shown["policy"], "most_free_space");
    let format = catalogue.join("rushes-pool");
    let never = fs::read_to_string(&format).expect("read");
    assert!(
        !never.contains("wish") && !never.contains("class"),
        "{never}"
    );

    world.end();
    refused(&policy(&catalogue, &["--class", "7=ssd"]), "no member 7");
    refused(
        &policy(&catalogue, &["--set", "class=ssd"]),
        "--class NUMBER=ssd",
    );
    refused(
        &policy(&catalogue, &["--class", "0=The SSD"]),
        "small letters",
    );
    assert_eq!(fs::read_to_string(&format).expect("read"), never);
    let shown = said(
        &catalogue,
        &["--set", "choose=per_user class=ssd", "--class", "1=ssd"],
    );
    assert_eq!(shown["is_served"], false);
    assert_eq!(shown["wish"], "choose=per_user class=ssd");
    assert_eq!(shown["policy"], "per_user");
    assert_eq!(shown["members"][0]["assigned_class"], Value::Null);
    assert_eq!(shown["members"][1]["assigned_class"], "ssd");
    let (listed, _) = world.json(&["ls"], &[]);
    assert_eq!(listed[0]["policy"], "per_user");
    assert_eq!(listed[0]["members"][1]["assigned_class"], "ssd");
    let (status, _) = world.json(&["status"], &[]);
    assert_eq!(status[0]["wish"], "choose=per_user class=ssd");
    assert_eq!(status[0]["members"][1]["assigned_class"], "ssd");
    // Members may not lose the class that is wished for.
    refused(
        &policy(&catalogue, &["--class", "1="]),
        "no member is of the class ssd",
    );
    said(&inside, &["--set", "single"]);

    world.start();
    assert_eq!(own(&reel).as_deref(), Some("single"));
    let shown = said(&reel, &[]);
    assert_eq!(shown["own"], "single");
    assert_eq!(shown["wish"], "single choose=per_user class=ssd");
    assert_eq!(shown["path"], reel.to_str().expect("text"));
    put(&world, "reel/clip", MIB);
    assert_eq!(world.members_of("reel/clip"), [1]);
    let text = policy(&reel, &["--set", "choose=round_robin"]);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("choose=round_robin class=ssd"), "{text}");
    assert!(text.contains("from now on"), "{text}");
    assert_eq!(own(&world.path("reel/clip")).as_deref(), Some("single"));
    let shown = said(&reel, &["--clear"]);
    assert_eq!(shown["own"], Value::Null);
    assert_eq!(own(&reel), None);
    said(&reel, &["--clear"]);
    // By hand as well.
    set("single").expect("set");
    removexattr(&reel, ATTRIBUTE).expect("removed");
    put(&world, "reel/other", MIB);
    assert_eq!(own(&world.path("reel/other")), None);

    // The pool says nothing again, and is what older versions read.
    world.end();
    said(&catalogue, &["--clear", "--class", "1="]);
    assert_eq!(fs::read_to_string(&format).expect("read"), never);
    world.start();
}
