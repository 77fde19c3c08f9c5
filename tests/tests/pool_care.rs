// SPDX-License-Identifier: Apache-2.0
//! Maintenance of a pool on real file systems: commands that change it are killed at every step,
//! fsck checks and repairs it, and rescue makes its lost catalogue anew.

use rushes_tests::needs::{self, Need};
use rushes_tests::pool::{BTRFS, EXT4, Made, PoolWorld, XFS, check, killed_at, put};
use rustix::fs::XattrFlags;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;

/// System calls at which a program is killed: all that change a file system.
const STEPS: [&str; 10] = [
    "openat",
    "fsetxattr",
    "pwrite64",
    "write",
    "fsync",
    "fallocate",
    "renameat",
    "unlinkat",
    "mkdirat",
    "ftruncate",
];

/// Kinds of the findings of fsck, each mendable. `--repair` leaves no finding.
fn mended(world: &PoolWorld, context: &str) -> Vec<String> {
    let (found, _) = world.json(&["fsck"], &[]);
    let kinds = kinds(&found, "mendable", context);
    let (report, code) = world.json(&["fsck", "--repair"], &[]);
    assert_eq!(code, Some(0), "{context}: {report}");
    let (report, code) = world.json(&["fsck"], &[]);
    assert_eq!(code, Some(0), "{context}: {report}");
    assert_eq!(report["findings"], serde_json::json!([]), "{context}");
    kinds
}

fn kinds(report: &Value, state: &str, context: &str) -> Vec<String> {
    let findings = report["findings"].as_array().expect("a list");
    let kind = |finding: &Value| {
        assert_eq!(finding["state"], state, "{context}: {finding}");
        finding["kind"].as_str().expect("text").to_owned()
    };
    findings.iter().map(kind).collect()
}

fn build(members: &[Made]) -> Option<PoolWorld> {
    if !needs::all_there(&[Need::Program("strace")]) {
        return None;
    }
    PoolWorld::build(members)
}

#[test]
fn a_drain_may_be_killed_at_every_step_and_no_byte_is_lost() {
    let Some(mut world) = build(&[(EXT4, 100), (EXT4, 100), (EXT4, 100)]) else {
        return;
    };
    // A file over two members, of which a drain moves one part.
    let over_two = world.path("two");
    fs::create_dir(&over_two).expect("made");
    let words = b"striped=2 unit=64KiB";
    rustix::fs::setxattr(&over_two, "user.rushes.policy", words, XattrFlags::empty())
        .expect("a policy");
    put(&over_two.join("f"), 7, 4 * MIB + 17).expect("there is room");
    assert_eq!(world.members_of("two/f").len(), 2);
    let sizes: Vec<usize> = (0..7).map(|at| at * MIB + 4096 * at + 17).collect();
    for (seed, &length) in sizes.iter().enumerate() {
        put(&world.path(format!("f{seed}")), seed as u64, length).expect("there is room");
    }
    fs::hard_link(world.path("f3"), world.path("also")).expect("linked");
    // A file longer than a member, nearly all of it a hole.
    let hole = File::create(world.path("hole")).expect("made");
    std::os::unix::fs::FileExt::write_all_at(&hole, b"end", 150 << 20).expect("written");
    hole.sync_all().expect("synced");
    drop(hole);
    world.end();
    assert_eq!(mended(&world, "at first"), [] as [&str; 0]);
    let mut member = 0;
    let mut kill_count = 0;
    let mut found = Vec::new();
    for call in STEPS {
        for count in (1..6).chain([11, 23, 47]) {
            let context = format!("drain of {member} killed at {call} {count}");
            let number = member.to_string();
            if !killed_at(&world.command(&["drain", &number], &[]), call, count) {
                // The command ran to its end, the member is empty: drain the next one.
                let (done, code) = world.json(&["drain", &number], &[]);
                assert_eq!((&done["is_empty"], code), (&true.into(), Some(0)), "{done}");
                let (_, code) = world.json(&["drain", &number, "--cancel"], &[]);
                assert_eq!(code, Some(0));
                member = (member + 1) % 3;
                continue;
            }
            kill_count += 1;
            found.extend(mended(&world, &context));
        }
        world.start();
        for (seed, &length) in sizes.iter().enumerate() {
            check(&world.path(format!("f{seed}")), seed as u64, length);
        }
        check(&world.path("also"), 3, sizes[3]);
        check(&world.path("two/f"), 7, 4 * MIB + 17);
        let mut bytes = Vec::new();
        File::open(world.path("hole"))
            .and_then(|mut file| file.read_to_end(&mut bytes))
            .expect("read");
        assert!(bytes.len() == (150 << 20) + 3 && bytes.ends_with(b"\0end"));
        assert!(
            !world.path("lost+found").exists(),
            "after {call}: {found:?}"
        );
        world.end();
    }
    assert!(kill_count > 30, "only {kill_count} kills");
    assert!(!found.is_empty(), "kills left nothing to mend");
}

#[test]
fn add_and_remove_may_be_killed_at_every_step_and_are_finished_by_repeating_them() {
    let Some(mut world) = build(&[(EXT4, 32), (EXT4, 32)]) else {
        return;
    };
    put(&world.path("f"), 1, 3 * MIB).expect("there is room");
    world.end();
    let new = world.disk("new", (EXT4, 32));
    let mut kill_count = 0;
    for call in STEPS {
        for count in [1, 2, 3, 5, 9, 200] {
            let add = world.command(&["add"], std::slice::from_ref(&new));
            if !killed_at(&add, call, count) {
                let (status, _) = world.json(&["status"], &[]);
                let members = status[0]["members"].as_array().expect("a list");
                let number = members[2]["number"].to_string();
                assert_eq!(members[2]["state"], "present", "{status}");
                for count in [1, 2, 3, 5, 9, 200] {
                    let remove = world.command(&["remove", &number], &[]);
                    if !killed_at(&remove, call, count) {
                        break;
                    }
                    kill_count += 1;
                }
                let (_, code) = world.json(&["remove", &number], &[]);
                assert_eq!(code, Some(0), "{call}");
                let left = fs::read_dir(&new).expect("it is there").count();
                assert_eq!(left, 0, "{call}: the folder is not empty");
                continue;
            }
            kill_count += 1;
            let (report, code) = world.json(&["fsck"], &[]);
            assert_eq!(code, Some(0), "{call} {count}: {report}");
        }
        // Finish a killed `add`, so that the next one begins anew.
        let (done, code) = world.json(&["add"], std::slice::from_ref(&new));
        assert_eq!(code, Some(0), "{call}: {done}");
        let (_, code) = world.json(&["remove", &done["numbers"][0].to_string()], &[]);
        assert_eq!(code, Some(0), "{call}");
    }
    assert!(kill_count > 20, "only {kill_count} kills");
    world.start();
    check(&world.path("f"), 1, 3 * MIB);
}

#[test]
fn after_an_add_files_are_spread_anew_also_when_that_is_killed() {
    let Some(mut world) = build(&[(EXT4, 64), (EXT4, 64)]) else {
        return;
    };
    let sizes: Vec<usize> = (0..24).map(|at| 3 * MIB + 4096 * at + 17).collect();
    for (seed, &length) in sizes.iter().enumerate() {
        put(&world.path(format!("f{seed}")), seed as u64, length).expect("there is room");
    }
    world.end();
    let third = world.disk("third", (EXT4, 64));
    let (report, code) = world.json(&["add"], &[third]);
    assert_eq!(code, Some(0), "{report}");
    let used = |world: &PoolWorld| -> Vec<u64> {
        let (report, _) = world.json(&["ls"], &[]);
        let members = report[0]["members"].as_array().expect("a list");
        let bytes = |member: &Value, key: &str| member[key].as_u64().expect("a number");
        members
            .iter()
            .map(|member| {
                let total = bytes(member, "bytes_total");
                (total - bytes(member, "bytes_free")) * 1000 / total
            })
            .collect()
    };
    let before = used(&world);
    assert!(before[2] < 100 && before[0] > 500, "{before:?}");
    let mut kill_count = 0;
    // Early calls: each kill comes before the rebalance has moved much.
    for (call, counts) in [
        ("openat", [9, 60]),
        ("fsetxattr", [1, 2]),
        ("pwrite64", [1, 3]),
        ("fsync", [1, 3]),
        ("unlinkat", [1, 2]),
    ] {
        for count in counts {
            let context = format!("rebalance killed at {call} {count}");
            let rebalance = world.command(&["rebalance"], &[]);
            kill_count += usize::from(killed_at(&rebalance, call, count));
            mended(&world, &context);
        }
    }
    assert!(kill_count > 6, "only {kill_count} were killed");
    let (report, code) = world.json(&["rebalance"], &[]);
    assert_eq!(code, Some(0), "{report}");
    let after = used(&world);
    let (most, least) = (after.iter().max(), after.iter().min());
    // No file is larger than a 19th of a member.
    assert!(
        most.zip(least)
            .is_some_and(|(most, least)| most - least < 80),
        "{before:?} {after:?}"
    );
    let (again, _) = world.json(&["rebalance"], &[]);
    assert_eq!(again["moved_count"], 0, "{again}");
    world.start();
    for (seed, &length) in sizes.iter().enumerate() {
        check(&world.path(format!("f{seed}")), seed as u64, length);
    }
}

#[test]
fn create_may_be_killed_at_every_step_and_is_finished_by_repeating_it() {
    let Some(world) = build(&[(EXT4, 32)]) else {
        return;
    };
    let disk = world.disk("new", (EXT4, 32));
    let folders = ["c", "a", "b"].map(|name| disk.join(name));
    let mut kill_count = 0;
    for call in STEPS {
        for folder in &folders {
            let _ = fs::remove_dir_all(folder);
            fs::create_dir(folder).expect("our own file system");
        }
        let mut create = Command::new(needs::path_of("rushes"));
        create.args(["pool", "create"]).args(&folders);
        // Kills at later and later steps; each command continues from the killed one. The last one
        // runs to its end.
        for count in [1, 2, 3, 5, 9, 300] {
            if !killed_at(&create, call, count) {
                break;
            }
            kill_count += 1;
        }
        let done = create.output().expect("it starts");
        assert!(done.status.success(), "{call}: {done:?}");
        let fsck = Command::new(needs::path_of("rushes"))
            .args(["pool", "fsck"])
            .arg(&folders[0])
            .output()
            .expect("it starts");
        assert!(fsck.status.success(), "{call}: {fsck:?}");
    }
    assert!(kill_count > 15, "only {kill_count} kills");
}

#[test]
fn a_mount_that_is_killed_under_load_leaves_nothing_that_cannot_be_mended() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 20), (EXT4, 26)]) else {
        return;
    };
    /// `files`: all calls on them have returned. `busy`: names of the call under way.
    #[derive(Default)]
    struct Model {
        files: BTreeMap<String, (u64, usize)>,
        busy: Vec<String>,
    }
    let model = Arc::new(Mutex::new(Model::default()));
    let mut seed = 0x9e37_79b9_7f4a_7c15u64;
    for round in 0..8u64 {
        let folder = world.path("");
        let shared = Arc::clone(&model);
        let mut next = move || {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed
        };
        let pause = Duration::from_millis(150 + next() % 500);
        let worker = std::thread::spawn(move || {
            let lock = || shared.lock().expect("nobody panics with it");
            loop {
                let (what, number) = (next() % 10, next() % 12);
                let name = format!("f{number}");
                let other = format!("f{}", next() % 12);
                let length = (next() % (6 << 20)) as usize;
                lock().busy = vec![name.clone(), other.clone()];
                let path = folder.join(&name);
                let done = match what {
                    0..=4 => put(&path, number ^ length as u64, length).map(|()| {
                        lock()
                            .files
                            .insert(name.clone(), (number ^ length as u64, length));
                    }),
                    5 | 6 => fs::rename(&path, folder.join(&other)).map(|()| {
                        let mut model = lock();
                        if let Some(file) = model.files.remove(&name) {
                            model.files.insert(other.clone(), file);
                        }
                    }),
                    _ => fs::remove_file(&path).map(|()| {
                        lock().files.remove(&name);
                    }),
                };
                match done.map_err(|error| error.raw_os_error()) {
                    Ok(()) | Err(Some(2)) => {}
                    // Full: a part of the file stays, so remove it.
                    Err(Some(28)) => {
                        if fs::remove_file(&path).is_err() {
                            return next;
                        }
                        lock().files.remove(&name);
                    }
                    // The mount was killed.
                    Err(_) => return next,
                }
                lock().busy.clear();
            }
        });
        std::thread::sleep(pause);
        world.kill();
        let mut next = worker.join().expect("it ends with the mount");
        seed = next();
        let context = format!("round {round}");
        let found = mended(&world, &context);
        world.start();
        let mut model = model.lock().expect("nobody panics with it");
        let busy = std::mem::take(&mut model.busy);
        for name in &busy {
            model.files.remove(name);
            let _ = fs::remove_file(world.path(name));
        }
        for (name, &(seed, length)) in &model.files {
            check(&world.path(name), seed, length);
        }
        let names = fs::read_dir(world.path("")).expect("listed");
        let names: Vec<_> = names.flatten().map(|entry| entry.file_name()).collect();
        let lost = usize::from(world.path("lost+found").exists());
        assert_eq!(
            names.len(),
            model.files.len() + lost,
            "{context}: {names:?} {found:?}"
        );
    }
}

#[test]
fn mending_may_be_killed_at_every_step_and_is_finished_by_repeating_it() {
    let Some(mut world) = build(&[(EXT4, 40), (XFS, 300)]) else {
        return;
    };
    let mut kill_count = 0;
    for (round, call) in (0u64..).zip(STEPS) {
        let seeds = [1, 2, 3].map(|at| 10 * round + at);
        for seed in seeds {
            put(&world.path(format!("f{seed}")), seed, MIB + seed as usize).expect("room");
        }
        world.end();
        // A stub is gone without its objects, a layout is damaged, an object was never written, a
        // removed file is not deleted yet.
        let tree = world.catalogue().join("tree");
        fs::remove_file(tree.join(format!("f{}", seeds[0]))).expect("our own disk");
        let stub = tree.join(format!("f{}", seeds[1]));
        let mut record = [0; 56];
        let name = "trusted.rushes.layout";
        rustix::fs::getxattr(&stub, name, &mut record[..]).expect("it has one");
        record[21] ^= 1;
        let none = XattrFlags::empty();
        rustix::fs::setxattr(&stub, name, &record, none).expect("our own disk");
        let empty = format!("pool/objects/00/00{round:014x}");
        fs::write(world.member(0).join(empty), "").expect("our own disk");
        let going = world.catalogue().join(format!("removed/{round}"));
        fs::rename(tree.join(format!("f{}", seeds[2])), going).expect("our own disk");
        let (found, code) = world.json(&["fsck"], &[]);
        assert_eq!(code, Some(1));
        let mut kinds = kinds(&found, "mendable", call);
        kinds.sort();
        assert_eq!(kinds, ["record_faulty", "removed", "unnamed", "unnamed"]);
        for count in [1, 2, 3, 5, 8, 300] {
            if !killed_at(&world.command(&["fsck", "--repair"], &[]), call, count) {
                break;
            }
            kill_count += 1;
        }
        mended(&world, call);
        world.start();
        check(
            &world.path(format!("f{}", seeds[1])),
            seeds[1],
            MIB + seeds[1] as usize,
        );
        let lost = fs::read_dir(world.path("lost+found")).expect("listed");
        let lost: Vec<PathBuf> = lost.flatten().map(|entry| entry.path()).collect();
        assert_eq!(lost.len(), 1, "{call}: {lost:?}");
        check(&lost[0], seeds[0], MIB + seeds[0] as usize);
        fs::remove_dir_all(world.path("lost+found")).expect("removed");
        fs::remove_file(world.path(format!("f{}", seeds[1]))).expect("removed");
    }
    assert!(kill_count > 15, "only {kill_count} kills");
}

/// Names, kinds, owners, rights, times, sizes and links below a folder.
fn shown(root: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut waiting = vec![root.to_path_buf()];
    while let Some(folder) = waiting.pop() {
        for entry in fs::read_dir(&folder).expect("listed") {
            let path = entry.expect("listed").path();
            let seen = fs::symlink_metadata(&path).expect("known");
            let size = if seen.is_dir() { 0 } else { seen.len() };
            found.push(format!(
                "{:?} {:o} {size} {}.{} {} {} {} {:?}",
                path.strip_prefix(root).expect("below it"),
                seen.mode(),
                seen.mtime(),
                seen.mtime_nsec(),
                seen.uid(),
                seen.gid(),
                seen.nlink(),
                fs::read_link(&path).ok(),
            ));
            if seen.is_dir() {
                waiting.push(path);
            }
        }
    }
    found.sort();
    found
}

#[test]
fn a_lost_catalogue_is_made_anew_from_the_members_also_when_that_is_killed() {
    let Some(mut world) = build(&[(EXT4, 60), (XFS, 300), (BTRFS, 120)]) else {
        return;
    };
    fs::create_dir_all(world.path("reel/a")).expect("made");
    for seed in 0..6 {
        put(
            &world.path(format!("reel/a/{seed}")),
            seed,
            MIB + seed as usize,
        )
        .expect("room");
    }
    fs::rename(world.path("reel"), world.path("day 1")).expect("renamed");
    fs::rename(world.path("day 1/a/0"), world.path("zero")).expect("renamed");
    fs::remove_file(world.path("day 1/a/1")).expect("removed");
    fs::hard_link(world.path("zero"), world.path("day 1/also")).expect("linked");
    symlink("zero", world.path("link")).expect("made");
    fs::write(world.path("empty"), "").expect("made");
    std::os::unix::fs::chown(world.path("zero"), Some(1000), Some(1001)).expect("root");
    fs::set_permissions(world.path("zero"), fs::Permissions::from_mode(0o640)).expect("set");
    let before = shown(&world.path(""));
    // The log of names is a second behind at most.
    std::thread::sleep(Duration::from_millis(2500));
    put(&world.path("late"), 99, 2 * MIB).expect("room");
    world.kill();
    let (status, _) = world.json(&["status"], &[]);
    let copies = status[0]["log_members"].as_array().expect("a list").len();
    assert_eq!(copies, 2, "{status}");
    let members: Vec<PathBuf> = (0..3).map(|at| world.member(at).join("pool")).collect();
    let again = world
        .command(&["rescue"], &members)
        .output()
        .expect("it starts");
    let said = String::from_utf8_lossy(&again.stderr).into_owned();
    assert!(
        said.contains("rushes pool fsck"),
        "a catalogue that is there: {said}"
    );
    // The mount point of a killed process keeps the catalogue busy until it is unmounted.
    let dead = Command::new("umount")
        .args(["--lazy"])
        .arg(world.path(""))
        .status();
    assert!(dead.expect("umount starts").success());
    world.lose_catalogue();
    let mut kill_count = 0;
    for (call, counts) in [
        ("fsetxattr", [1, 3]),
        ("openat", [40, 200]),
        ("mkdirat", [1, 3]),
        ("renameat", [1, 3]),
        ("fsync", [2, 4]),
    ] {
        for count in counts {
            let rescue = world.command(&["rescue"], &members);
            if !killed_at(&rescue, call, count) {
                panic!("it has more calls of {call} than {count}");
            }
            kill_count += 1;
        }
    }
    assert_eq!(kill_count, 10);
    let (report, code) = world.json(&["rescue"], &members);
    assert_eq!(code, Some(0), "{report}");
    world.start();
    // `late` may have no name yet. On a slow machine the removed file still has its objects, and
    // is there as well.
    let lost = fs::read_dir(world.path("lost+found"));
    let lost = lost.into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = lost.map(|entry| entry.path()).collect();
    found.extend(Some(world.path("late")).filter(|path| path.exists()));
    let length = |path: &PathBuf| fs::metadata(path).expect("there").len();
    let (late, removed): (Vec<PathBuf>, Vec<PathBuf>) =
        found.into_iter().partition(|path| length(path) == 2 << 20);
    assert_eq!(late.len(), 1, "its bytes are somewhere");
    check(&late[0], 99, 2 * MIB);
    for path in &removed {
        check(path, 1, MIB + 1);
    }
    for path in late.iter().chain(&removed) {
        fs::remove_file(path).expect("removed");
    }
    let _ = fs::remove_dir(world.path("lost+found"));
    let after = shown(&world.path(""));
    assert_eq!(after, before);
    check(&world.path("zero"), 0, MIB);
    for seed in 2..6 {
        check(
            &world.path(format!("day 1/a/{seed}")),
            seed,
            MIB + seed as usize,
        );
    }
    put(&world.path("new"), 7, MIB).expect("it is a pool like any other");
    world.end();
    assert_eq!(mended(&world, "after the rescue"), [] as [&str; 0]);
}

#[test]
fn a_mounted_pool_is_not_looked_through_and_its_status_is_told() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 40), (EXT4, 40)]) else {
        return;
    };
    put(&world.path("f"), 1, MIB).expect("there is room");
    for words in [&["fsck"][..], &["fsck", "--repair"]] {
        let output = world.command(words, &[]).output().expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        assert!(said.contains("is served already"), "{said}");
        // The message names the mount's folder.
        let place = format!(", mounted on {})", world.path("").display());
        let place = place.replace("/)", ")");
        assert!(said.contains(&place), "{place}: {said}");
    }
    // `drain` refuses the mount's folder, as it is neither a member nor the catalogue.
    let mount = [world.path("")];
    let output = world.command(&["drain"], &mount).output();
    let said = String::from_utf8_lossy(&output.expect("it starts").stderr).into_owned();
    assert!(said.contains("is where the pool is mounted"), "{said}");
    // Members have the names a second later, one after another, or later on a slow machine.
    let end = Instant::now() + Duration::from_secs(60);
    let now = loop {
        let (now, code) = world.json(&["status"], &[]);
        if code == Some(0) && now[0]["log_members"] == serde_json::json!([0, 1]) {
            break now[0].clone();
        }
        assert!(Instant::now() < end, "{now}");
        std::thread::sleep(Duration::from_millis(50));
    };
    assert_eq!(now["is_served"], true, "{now}");
    let objects = |status: &Value| -> u64 {
        let members = status["members"].as_array().expect("a list");
        members
            .iter()
            .filter_map(|member| member["object_count"].as_u64())
            .sum()
    };
    assert_eq!(objects(&now), 1, "{now}");
    world.end();
    let status = world.json(&["status"], &[]);
    assert_eq!(status.0[0]["is_served"], false);
    let text = world.command(&["status"], &[]).output().expect("it starts");
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("not in use, names are on 0 and 1"), "{text}");
    world.unplug(0);
    let (away, code) = world.json(&["status"], &[]);
    assert_eq!(code, Some(1));
    assert_eq!(away[0]["members"][0]["state"], "missing");
    assert_eq!(away[0]["members"][0]["object_count"], Value::Null);
    let (found, code) = world.json(&["fsck"], &[]);
    assert_eq!((code, &found["missing"][0]["member"]), (Some(1), &0.into()));
    world.plug(0, "loop");
    world.start();
    check(&world.path("f"), 1, MIB);
}
