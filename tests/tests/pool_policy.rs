// SPDX-License-Identifier: Apache-2.0
//! Where files of a mounted pool go: by classes of members, policies of folders, placement rules,
//! users, and contracts on devices.

use rushes_tests::daemon::{Daemon, DaemonSpec};
use rushes_tests::disk::run;
use rushes_tests::export::{Export, NFS};
use rushes_tests::needs::{self, Need};
use rushes_tests::nfs4::Nfs4;
use rushes_tests::pattern;
use rushes_tests::pool::{EXT4, PoolWorld, check};
use rushes_tests::smb2::{self, Connection, Disposition};
use rushes_tests::smbd::{self, SHARE, SmbdSpec};
use rushes_tests::stop::StopAtEnd;
use rustix::fs::{
    CWD, FileType, Mode, OFlags, XattrFlags, getxattr, mknodat, removexattr, setxattr,
};
use rustix::io::Errno;
use serde_json::Value;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
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

/// Makes a folder of this name with this policy.
fn folder(world: &PoolWorld, name: &str, words: &str) {
    fs::create_dir(world.path(name)).expect("made");
    said(&world.path(name), &["--set", words]);
}

/// Makes a file of this name. Returns  its members and its own policy
fn place_of(world: &PoolWorld, name: &str) -> (Vec<u64>, Option<String>) {
    put(world, name, MIB);
    (world.members_of(name), own(&world.path(name)))
}

/// A pool of the classes ssd, archive and raid; files without a rule go to the last one.
fn ruled(rules: &[&str]) -> Option<PoolWorld> {
    let mut world = PoolWorld::build(&[(EXT4, 60), (EXT4, 60), (EXT4, 60)])?;
    world.end();
    let words = ["--set", "class=raid", "--class", "0=ssd,1=archive,2=raid"];
    said(&world.catalogue(), &[&words, rules].concat());
    world.start();
    Some(world)
}

/// Gives members these classes while the pool is not mounted.
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
    // By mknod, as NFS servers make files.
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

    // A file that has a name already does not get the folder's policy.
    fs::rename(world.path("outside"), world.path("fast/moved")).expect("renamed");
    fs::hard_link(world.path("fast/moved"), world.path("fast/linked")).expect("linked");
    assert_eq!(own(&world.path("fast/linked")), None);
    assert_eq!(world.members_of("fast/linked"), [2]);
    fs::rename(world.path("fast/reel"), world.path("reel")).expect("renamed");
    assert_eq!(own(&world.path("reel")).as_deref(), Some("class=ssd"));
    put(&world, "reel/later", 2 * MIB);
    assert_ne!(world.members_of("reel/later"), [2]);
    // An entry that is no file and no folder gets no policy, and is made all the same.
    std::os::unix::fs::symlink("a", world.path("fast/link")).expect("made");
    run(Command::new("mkfifo").arg(world.path("fast/pipe")));

    // A file that fills all members of the class to the last block.
    let (long, length) = world.fill("fast/long", 5, 120 << 20);
    drop(long);
    assert_eq!(world.members_of("fast/long"), [0, 1]);
    for number in 0..2 {
        world.must_be_full(number);
    }
    let found = fs::read(world.path("fast/long")).expect("read");
    assert_eq!(found.len() as u64, length);
    pattern::check(5, 0, &found, "long");
    // Other members have room.
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

/// From now on a stream gets a contract of a quarter of a device.
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

/// Makes a new file. Returns  its members
fn next(world: &PoolWorld, folder: &str, number: &mut u32) -> Vec<u64> {
    *number += 1;
    let name = format!("{folder}/new{number}");
    put(world, &name, MIB);
    world.members_of(&name)
}

/// Waits until new files go there: the door learns the daemon's state once a second.
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
        let stop = StopAtEnd(&is_enough);
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
    // The player is gone, and with it its contract.
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
    // Any other attribute is free for users.
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
    refused(&policy(&reel, &["--class", "0=ssd"]), "for members");
    refused(&policy(Path::new("/proc"), &[]), "in no pool");
    let catalogue = world.catalogue();
    // A mounted pool takes new classes, but no policy of its own.
    refused(
        &policy(&catalogue, &["--set", "single"]),
        "is served already (process ",
    );
    let inside = catalogue.join("tree/reel");
    refused(&policy(&inside, &["--set", "single"]), "below the mount");
    std::os::unix::fs::symlink("nowhere", world.path("link")).expect("made");
    refused(&policy(&world.path("link"), &[]), "No such file");

    // The command shows the pool's policy, also while it is mounted.
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
    // The last member of a class that the pool's policy names cannot lose it.
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
    // The attribute can be set and removed by hand as well.
    set("single").expect("set");
    removexattr(&reel, ATTRIBUTE).expect("removed");
    put(&world, "reel/other", MIB);
    assert_eq!(own(&world.path("reel/other")), None);

    // Without a policy and classes the pool's file is again as older versions read it.
    world.end();
    said(&catalogue, &["--clear", "--class", "1="]);
    assert_eq!(fs::read_to_string(&format).expect("read"), never);
    world.start();
}

#[test]
fn files_go_where_the_first_rule_for_their_name_says() {
    let Some(world) = ruled(&[
        "--rule",
        "keep/**",
        "",
        "--rule",
        "**/*.proxy.mov",
        "class=archive",
        "--rule",
        "conform/**/*.{exr,mov}",
        "class=ssd choose=round_robin",
    ]) else {
        return;
    };
    let ssd = Some("choose=round_robin class=ssd");
    let archive = Some("class=archive");
    fs::create_dir_all(world.path("conform/a/b")).expect("made");
    for name in ["keep", "reel", "CONFORM"] {
        fs::create_dir(world.path(name)).expect("made");
    }
    let check = |name: &str, member: u64, expect: Option<&str>| {
        let (members, own) = place_of(&world, name);
        assert_eq!((members, own.as_deref()), (vec![member], expect), "{name}");
    };
    check("conform/f.0001.exr", 0, ssd);
    check("conform/a/b/f.0001.exr", 0, ssd);
    check("conform/a/b/f.0001.EXR", 2, None);
    check("CONFORM/f.0001.exr", 2, None);
    check("conform/a/b/f.0001.dpx", 2, None);
    check("f.0001.exr", 2, None);
    check("x.proxy.mov", 1, archive);
    check("reel/x.proxy.mov", 1, archive);
    check("conform/x.proxy.mov", 1, archive);
    check("conform/x.mov", 0, ssd);
    check("keep/x.proxy.mov", 2, None);
    let found = world.where_is("conform/x.mov");
    assert_eq!(found["wish"].as_str(), ssd);
    // By mknod, as NFS servers make files.
    let made = world.path("conform/made.mov");
    let mode = Mode::RUSR | Mode::WUSR;
    mknodat(CWD, &made, FileType::RegularFile, mode, 0).expect("made");
    check("conform/made.mov", 0, ssd);
    // A rule does not apply to folders, and a folder's own words go before its, word by word.
    fs::create_dir(world.path("conform/folder.mov")).expect("made");
    assert_eq!(own(&world.path("conform/folder.mov")), None);
    folder(&world, "conform/slow", "class=archive");
    let both = Some("choose=round_robin class=archive");
    check("conform/slow/x.mov", 1, both);
    said(&world.path("conform/slow"), &["--clear"]);
    check("conform/slow/y.mov", 0, ssd);
}

#[test]
fn the_name_counts_that_a_file_is_made_under() {
    let Some(world) = ruled(&["--rule", "conform/**/*.exr", "class=ssd"]) else {
        return;
    };
    let path = |name: &str| world.path(name);
    for name in ["conform", "conform/a", "reel"] {
        fs::create_dir(path(name)).expect("made");
    }
    let ssd = (vec![0], Some(String::from("class=ssd")));
    let nothing = (vec![2], None);
    assert_eq!(place_of(&world, "conform/a/1.exr"), ssd);
    // Another name changes nothing of a file.
    put(&world, "reel/1.mov", MIB);
    fs::rename(path("reel/1.mov"), path("conform/2.exr")).expect("renamed");
    assert_eq!(place_of(&world, "conform/2.exr"), nothing);
    fs::hard_link(path("conform/2.exr"), path("conform/3.exr")).expect("linked");
    assert_eq!(own(&path("conform/3.exr")), None);
    let mut options = File::options();
    options.write(true).create(true).truncate(true);
    drop(options.open(path("conform/2.exr")).expect("opened"));
    assert_eq!(place_of(&world, "conform/2.exr"), nothing);
    // Of a program that writes under another name first, that name counts.
    put(&world, "conform/.4.exr.Xq3", MIB);
    fs::rename(path("conform/.4.exr.Xq3"), path("conform/4.exr")).expect("renamed");
    assert_eq!(place_of(&world, "conform/4.exr"), nothing);
    fs::rename(path("conform/a/1.exr"), path("reel/1.mov")).expect("renamed");
    assert_eq!(place_of(&world, "reel/1.mov"), ssd);
    // For new files in a moved folder its place now counts.
    fs::rename(path("conform/a"), path("old")).expect("renamed");
    assert_eq!(place_of(&world, "old/5.exr"), nothing);
    fs::rename(path("reel"), path("conform/reel")).expect("renamed");
    assert_eq!(place_of(&world, "conform/reel/5.exr"), ssd);
    // A file's own policy can be cleared.
    said(&path("conform/reel/5.exr"), &["--clear"]);
    assert_eq!(own(&path("conform/reel/5.exr")), None);
}

#[test]
fn files_that_smb_clients_make_fall_under_rules() {
    if !needs::all_there(&[Need::Program("smbd")]) {
        return;
    }
    let Some(world) = ruled(&["--rule", "conform/**/*.exr", "class=ssd"]) else {
        return;
    };
    let all = fs::Permissions::from_mode(0o777);
    fs::create_dir(world.path("conform")).expect("made");
    fs::set_permissions(world.path("conform"), all).expect("set");
    let smbd = smbd::start(
        &world.scratch,
        &SmbdSpec {
            path: world.path(""),
            share: smb2::SHARE_LINES.map(String::from).to_vec(),
            global: vec![String::from(smb2::GLOBAL)],
        },
    );
    let client = Connection::connect(smbd.port(), SHARE).expect("smbd lets guests in");
    // A rule sees the folder's name on the server, however a client writes it.
    for (name, path, member) in [
        ("conform\\f.0001.exr", "conform/f.0001.exr", 0),
        ("CONFORM\\f.0002.exr", "conform/f.0002.exr", 0),
        ("conform\\f.0001.dpx", "conform/f.0001.dpx", 2),
    ] {
        let (file, _) = client.open(name, Disposition::OpenIf).expect(name);
        client
            .write(file, 0, &pattern::bytes(1, 0, 4096))
            .expect(name);
        client.close(file).expect(name);
        assert_eq!(world.members_of(path), [member], "{path}");
    }
}

#[test]
fn files_that_nfs_clients_make_fall_under_rules() {
    if !needs::all_there(NFS) {
        return;
    }
    let Some(world) = ruled(&["--rule", "conform/**/*.exr", "class=ssd"]) else {
        return;
    };
    let export = Export::nfs(&world);
    let mut nfs = Nfs4::connect(export.port, "rules", 1);
    let root = nfs.root("media").expect("exported");
    nfs.make(&root, b"conform", None).expect("made");
    let mut folder = nfs.lookup(&root, b"conform").expect("there");
    for (path, member) in [
        ("conform/f.exr", 0),
        ("conform/a/f.exr", 0),
        ("conform/a/f.dpx", 2),
    ] {
        if path == "conform/a/f.exr" {
            nfs.make(&folder, b"a", None).expect("made");
            folder = nfs.lookup(&folder, b"a").expect("there");
        }
        let name = path.rsplit('/').next().expect("a name").as_bytes();
        let open = nfs.open(&folder, name, true).expect("made");
        let bytes = pattern::bytes(1, 0, 4096);
        nfs.write(&open, 0, &bytes).expect("written");
        nfs.close(open).expect("closed");
        assert_eq!(world.members_of(path), [member], "{path}");
    }
}

/// The rules as `--json` shows them.
fn patterns(shown: &Value) -> Vec<String> {
    let rules = shown["rules"].as_array().expect("a list").iter();
    let text = |rule: &Value| format!("{}: {}", rule["pattern"], rule["wish"]).replace('"', "");
    rules.map(text).collect()
}

#[test]
fn rules_are_said_in_their_order_replaced_and_taken_away() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 40), (EXT4, 40)]) else {
        return;
    };
    let catalogue = world.catalogue();
    let format = catalogue.join("rushes-pool");
    let text = || fs::read_to_string(&format).expect("read");
    let never = text();
    let one = ["--rule", "a/**", "single"];
    refused(&policy(&catalogue, &one), "is served already (process ");
    refused(
        &policy(&world.path(""), &one),
        "rules are for the whole pool",
    );
    assert_eq!(patterns(&said(&catalogue, &[])), [""; 0]);
    world.end();
    let check = |words: &[&str], expect: &[&str]| {
        assert_eq!(patterns(&said(&catalogue, words)), expect, "{words:?}");
        assert_eq!(patterns(&said(&catalogue, &[])), expect, "{words:?}");
    };
    check(
        &[&one[..], &["--rule", "b/**", ""]].concat(),
        &["a/**: single", "b/**: "],
    );
    check(&["--rule", "a/**", "striped"], &["a/**: striped", "b/**: "]);
    check(
        &[
            "--before",
            "a/**",
            "--rule",
            "c",
            "single",
            "--rule",
            "b/**",
            "unit=4MiB",
        ],
        &["c: single", "b/**: unit=4MiB", "a/**: striped"],
    );
    check(&["--no-rule", "c"], &["b/**: unit=4MiB", "a/**: striped"]);
    for (words, sentence) in [
        (
            &["--no-rule", "c"][..],
            "expected one of \"b/**\", \"a/**\"",
        ),
        (&["--rule", "c/", "single"], "expected \"c/**\""),
        (&["--rule", "{c", "single"], "\"{c\" is no pattern"),
        (&["--rule", "c", "fast"], "expected single"),
        (
            &["--rule", "c", "class=ssd"],
            "the rule \"c\": no member is of the class ssd",
        ),
        (
            &["--rule", "c", "single", "--before", "d"],
            "no rule for the pattern \"d\"",
        ),
        (&["--rule", "c=class=ssd"], "2 values required"),
    ] {
        refused(&policy(&catalogue, words), sentence);
        check(&[], &["b/**: unit=4MiB", "a/**: striped"]);
    }
    // A class that a rule names has to be some member's.
    let ssd = [
        "--class",
        "1=ssd",
        "--no-rules",
        "--rule",
        "**",
        "class=ssd",
    ];
    check(&ssd, &["**: class=ssd"]);
    refused(
        &policy(&catalogue, &["--class", "1="]),
        "the rule \"**\": no member is of",
    );
    let shown = policy(&catalogue, &["--rule", "x/**", ""]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("(none; no rule below counts)"), "{shown}");
    assert!(shown.contains("made from now on"), "{shown}");

    // The mount changes the pool's file, too.
    world.start();
    check(&["--tidy", "idle"], &["**: class=ssd", "x/**: "]);
    assert_eq!(
        place_of(&world, "f"),
        (vec![1], Some(String::from("class=ssd")))
    );
    check(&["--tidy", "off"], &["**: class=ssd", "x/**: "]);
    world.end();
    check(&["--clear", "--class", "1="], &[]);
    assert_eq!(text(), never, "as older versions read it");
    world.start();
}

#[test]
fn a_command_that_is_killed_has_said_all_rules_or_none() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 40), (EXT4, 40)]) else {
        return;
    };
    world.end();
    let catalogue = world.catalogue();
    let many: Vec<String> = (0..64)
        .flat_map(|number| {
            [
                String::from("--rule"),
                format!("{number}/**"),
                String::from("single"),
            ]
        })
        .collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let (mut none, mut all) = (0, 0);
    for round in 0..40 {
        said(&catalogue, &["--no-rules"]);
        let mut command = Command::new(needs::path_of("rushes"))
            .args(["pool", "policy"])
            .arg(&catalogue)
            .args(&many)
            .stdout(std::process::Stdio::null())
            .spawn()
            .expect("rushes starts");
        std::thread::sleep(Duration::from_micros(500 * round));
        command.kill().expect("ours");
        command.wait().expect("ours");
        match patterns(&said(&catalogue, &[])).len() {
            0 => none += 1,
            64 => all += 1,
            other => panic!("{other} rules"),
        }
    }
    assert!(none > 0, "none was killed in time; {all} were done");
    assert_eq!(patterns(&said(&catalogue, &many)).len(), 64);
    world.start();
    assert_eq!(place_of(&world, "f").1, None);
    fs::create_dir(world.path("7")).expect("made");
    assert_eq!(place_of(&world, "7/f").1.as_deref(), Some("single"));
}

#[test]
fn a_new_disk_gets_its_class_while_the_pool_is_in_use_and_brings_room_to_it() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 40), (EXT4, 60)]) else {
        return;
    };
    world.end();
    let done = |world: &PoolWorld, words: &[&str], paths: &[PathBuf]| {
        let output = world.command(words, paths).output().expect("it starts");
        assert!(output.status.success(), "{words:?}: {output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let stays = |world: &PoolWorld, why: &str| {
        let drain = world.command(&["drain", "0"], &[]).output();
        let said = drain.expect("it starts").stdout;
        let said = String::from_utf8_lossy(&said);
        assert!(said.contains(why), "{said}");
        done(world, &["drain", "0", "--cancel"], &[]);
    };
    done(
        &world,
        &[
            "policy",
            "--class",
            "0=raid,1=archive",
            "--set",
            "class=raid",
        ],
        &[],
    );
    world.start();
    let (_, length) = world.fill("full", 1, 1 << 30);
    assert_eq!(world.members_of("full"), [0]);
    // The log says why, once.
    let log = world.log();
    let line = "\"full\": no member of the class raid that is there has room left";
    assert_eq!(log.matches(line).count(), 1, "{log}");
    stays(
        &world,
        "full: the file is bound to members of the class raid",
    );

    let disks = ["third", "fourth"].map(|name| world.disk(name, (EXT4, 20)));
    let said = done(&world, &["add"], &disks[..1]);
    assert!(
        said.contains("has no class, and others have archive, raid"),
        "{said}"
    );
    done(&world, &["add", "--class", "raid"], &disks[1..]);
    done(&world, &["add", "--class", "raid"], &disks[1..]);
    let class = |world: &PoolWorld, number: usize| {
        world.json(&["ls"], &[]).0[0]["members"][number]["assigned_class"].clone()
    };
    assert_eq!(
        [class(&world, 2), class(&world, 3)],
        [Value::Null, Value::from("raid")]
    );
    // Two members of the class; the other one is too small for the file.
    stays(
        &world,
        "no member of the class raid that is there has room left",
    );
    let refused = world
        .command(&["policy", "--class", "0=,3="], &[])
        .output()
        .expect("it starts");
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    done(&world, &["policy", "--class", "1=raid"], &[]);
    done(&world, &["drain", "0"], &[]);
    let end = |world: &PoolWorld| check(&world.path("full"), 1, length as usize);
    end(&world);
    assert!(!world.members_of("full").contains(&0));
    world.end();
    world.start();
    assert_eq!(class(&world, 1), "raid");
    end(&world);
}
