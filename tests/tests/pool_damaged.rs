// SPDX-License-Identifier: Apache-2.0
//! A disk with a file that cannot be read, and a tree in which the name `lost+found` is taken,
//! under which a repair puts files.

use rushes_tests::disk::run;
use rushes_tests::needs;
use rushes_tests::pool::{EXT4, PoolWorld, check, put};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::{MetadataExt, chown, symlink};
use std::path::PathBuf;
use std::process::Command;

const MIB: usize = 1 << 20;
const LENGTH: usize = MIB + 17;

fn findings(report: &Value) -> Vec<(&str, &str)> {
    let all = report["findings"].as_array().expect("a list").iter();
    all.map(|one| {
        let word = |name: &str| one[name].as_str().unwrap_or_default();
        (word("kind"), word("state"))
    })
    .collect()
}

fn members(world: &PoolWorld) -> Vec<PathBuf> {
    (0..2).map(|at| world.member(at).join("pool")).collect()
}

#[test]
fn a_disk_that_does_not_give_one_file_is_emptied_of_all_others_and_rescued_with_them() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 100), (EXT4, 100)]) else {
        return;
    };
    let names: Vec<String> = (0..8).map(|seed| format!("f{seed}")).collect();
    for (seed, name) in (0..).zip(&names) {
        put(&world.path(name), seed, LENGTH).expect("there is room");
    }
    let object = world.object_of(&world.where_is("f0")["segments"][0]);
    let home = world.members_of("f0");
    let member = home[0] as usize;
    let there: Vec<&String> = names
        .iter()
        .filter(|name| world.members_of(name) == home)
        .collect();
    assert!(there.len() >= 3, "{there:?}");
    world.end();
    // Damage the object's inode, as a bad block of the disk would: the file system refuses to open
    // it with EBADMSG or EIO.
    let inode = fs::metadata(&object).expect("ours").ino();
    world.unplug(member);
    let image = world.scratch.path().join(format!("m{member}.img"));
    run(Command::new(needs::path_of("debugfs"))
        .args([
            "-w",
            "-R",
            &format!("set_inode_field <{inode}> checksum 0x1234"),
        ])
        .arg(&image));
    world.plug(member, "loop");
    fs::File::open(&object).expect_err("it is damaged");

    // fsck checks the others, and repairs nothing that may depend on the unreadable object.
    for words in [&["fsck"][..], &["fsck", "--repair"]] {
        let (report, code) = world.json(words, &[]);
        assert_eq!(
            findings(&report),
            [("object_unreadable", "open")],
            "{report}"
        );
        assert_eq!(code, Some(1), "{report}");
    }
    // Mounted, drain moves all others and names the file that it could not move.
    world.start();
    let number = member.to_string();
    let (report, code) = world.json(&["drain", &number], &[]);
    assert_eq!(code, Some(1), "{report}");
    assert_eq!(report["is_empty"], false, "{report}");
    assert_eq!(report["failed_count"], 1, "{report}");
    assert_eq!(report["failed"][0]["file"], "f0", "{report}");
    assert_eq!(report["moved_count"], there.len() as u64 - 1, "{report}");
    for (seed, name) in (0..).zip(&names).skip(1) {
        assert_ne!(world.members_of(name), home, "{name}");
        check(&world.path(name), seed, LENGTH);
    }
    fs::read(world.path("f0")).expect_err("its disk does not give it");
    world.end();
    // Unmounted, drain names it again.
    let output = world.command(&["drain", &number], &[]).output();
    let output = output.expect("rushes starts");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("1 file could not be read or moved"), "{said}");
    assert!(said.contains("f0: "), "{said}");

    // A rescue brings all names back, this one as well.
    world.lose_catalogue();
    let (report, code) = world.json(&["rescue"], &members(&world));
    assert_eq!(code, Some(1), "{report}");
    assert_eq!(
        findings(&report["fsck"]),
        [("object_unreadable", "open")],
        "{report}"
    );
    world.start();
    for (seed, name) in (0..).zip(&names).skip(1) {
        check(&world.path(name), seed, LENGTH);
    }
    let lost = fs::metadata(world.path("f0")).expect("its name is there");
    assert_eq!(lost.len(), LENGTH as u64);
    fs::read(world.path("f0")).expect_err("its disk does not give it");
    world.end();
}

#[test]
fn whatever_is_called_lost_and_found_keeps_no_repair_from_its_end() {
    for taken in ["a file", "a link", "somebody's folder"] {
        let Some(mut world) = PoolWorld::build(&[(EXT4, 100), (EXT4, 100)]) else {
            return;
        };
        put(&world.path("kept"), 1, LENGTH).expect("there is room");
        put(&world.path("nameless"), 2, LENGTH).expect("there is room");
        let lost = world.path("lost+found");
        match taken {
            "a file" => fs::write(&lost, "mine").expect("made"),
            "a link" => symlink("/etc", &lost).expect("made"),
            _ => {
                fs::create_dir(&lost).expect("made");
                chown(&lost, Some(1000), Some(1000)).expect("root");
            }
        }
        world.end();
        fs::remove_file(world.catalogue().join("tree/nameless")).expect("our own disk");
        let (report, code) = world.json(&["fsck", "--repair"], &[]);
        assert_eq!(code, Some(0), "{taken}: {report}");
        assert_eq!(
            findings(&report),
            [("unnamed", "mended")],
            "{taken}: {report}"
        );
        let found = |world: &PoolWorld| {
            let folder = fs::read_dir(world.path("lost+found.1")).expect("it is a folder");
            let names: Vec<PathBuf> = folder.flatten().map(|entry| entry.path()).collect();
            assert_eq!(names.len(), 1, "{taken}: {names:?}");
            check(&names[0], 2, LENGTH);
            let owner = fs::metadata(world.path("lost+found.1"))
                .expect("there")
                .uid();
            assert_eq!(owner, 0, "{taken}");
            check(&world.path("kept"), 1, LENGTH);
        };
        world.start();
        found(&world);
        world.end();
        // A rescue finds bytes without a name as well.
        let (report, code) = world.json(&["fsck"], &[]);
        assert_eq!(
            (findings(&report).len(), code),
            (0, Some(0)),
            "{taken}: {report}"
        );
        let names = fs::read_dir(world.catalogue().join("tree/lost+found.1")).expect("listed");
        for entry in names.flatten() {
            fs::remove_file(entry.path()).expect("our own disk");
        }
        fs::remove_dir(world.catalogue().join("tree/lost+found.1")).expect("our own disk");
        world.start();
        world.end();
        world.lose_catalogue();
        let (report, code) = world.json(&["rescue"], &members(&world));
        assert_eq!(code, Some(0), "{taken}: {report}");
        world.start();
        found(&world);
        world.end();
    }
}

#[test]
fn a_new_disk_at_the_place_of_one_that_is_away_is_refused_and_nothing_is_changed() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 100), (EXT4, 100)]) else {
        return;
    };
    put(&world.path("f"), 1, LENGTH).expect("there is room");
    world.end();
    let before = world.json(&["ls"], &[]).0;
    world.unplug(1);
    let place = world.member(1).join("pool");
    fs::create_dir(&place).expect("the folder below the mount");
    let output = world
        .command(&["add"], std::slice::from_ref(&place))
        .output();
    let output = output.expect("rushes starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("is the place of member 1"), "{said}");
    assert_eq!(fs::read_dir(&place).expect("listed").count(), 0);
    fs::remove_dir(&place).expect("ours");
    world.plug(1, "loop");
    let after = world.json(&["ls"], &[]).0;
    assert_eq!(after[0]["members"], before[0]["members"]);
    world.start();
    check(&world.path("f"), 1, LENGTH);
    world.end();
}
