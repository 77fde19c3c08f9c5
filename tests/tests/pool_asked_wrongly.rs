// SPDX-License-Identifier: Apache-2.0
//! Mistakes of operators with a pool: each message says what was found and what to do, and no
//! command changes anything.

use rushes_tests::disk::run;
use rushes_tests::export;
use rushes_tests::pool::{EXT4, PoolWorld, check, put};
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const MIB: usize = 1 << 20;

fn refused(output: &Output, sentence: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(said.contains(sentence), "{said}\nexpected: {sentence}");
}

fn done(world: &PoolWorld, words: &[&str], paths: &[PathBuf]) -> Output {
    let output = world.command(words, paths).output().expect("it starts");
    assert!(output.status.success(), "{words:?}: {output:?}");
    output
}

struct Tmpfs(PathBuf);

impl Tmpfs {
    fn mount(at: &Path) -> Tmpfs {
        fs::create_dir(at).expect("made");
        run(Command::new("mount").args(["-t", "tmpfs", "none"]).arg(at));
        Tmpfs(at.to_path_buf())
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

#[test]
fn a_file_system_in_memory_is_no_member() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 60)]) else {
        return;
    };
    let memory = Tmpfs::mount(&world.scratch.path().join("memory"));
    let place = memory.0.join("pool");
    fs::create_dir(&place).expect("made");
    let output = world.command(&["add"], std::slice::from_ref(&place));
    let output = { output }.output().expect("it starts");
    refused(&output, "in memory");
    assert_eq!(fs::read_dir(&place).expect("listed").count(), 0);
    world.end();
}

#[test]
fn who_asks_for_a_pool_that_is_just_unmounted_waits_until_its_mount_has_gone() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 60), (EXT4, 60)]) else {
        return;
    };
    put(&world.path("f"), 1, MIB).expect("there is room");
    for _ in 0..3 {
        run(Command::new("umount").arg(world.path("")));
        done(&world, &["fsck"], &[]);
        assert!(world.wait().success());
        world.start();
        run(Command::new("umount").arg(world.path("")));
        let mut before = world.take();
        world.start();
        assert!(before.wait().expect("it is ours").success());
        check(&world.path("f"), 1, MIB);
    }
    world.end();
}

#[test]
fn the_last_member_of_a_class_stays_while_a_rule_names_that_and_a_drain_says_what_is_bound_to_it() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 60), (EXT4, 60)]) else {
        return;
    };
    world.end();
    let words = ["policy", "--class", "0=ssd", "--rule", "*.mov", "class=ssd"];
    done(&world, &words, &[]);
    world.start();
    put(&world.path("a.mov"), 1, MIB).expect("there is room");
    let output = world.command(&["drain", "0"], &[]).output();
    let output = output.expect("it starts");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        said.contains("a.mov: the file is bound to members of the class ssd"),
        "{said}"
    );
    fs::remove_file(world.path("a.mov")).expect("removed");
    done(&world, &["drain", "0"], &[]);
    let output = world.command(&["remove", "0"], &[]).output();
    refused(&output.expect("it starts"), "no member is of the class ssd");
    assert_eq!(world.json(&["ls"], &[]).0[0]["members"][0]["number"], 0);
    world.end();
}

#[test]
fn an_export_that_cannot_listen_or_has_no_room_says_so_before_it_takes_anything() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 60), (EXT4, 60)]) else {
        return;
    };
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("bound").port().to_string();
    fs::write(world.path("disk"), vec![0; MIB]).expect("written");
    let run_dir = world.scratch.folder("exports").display().to_string();
    let (root, disk) = (world.path(""), world.path("disk"));
    for (kind, path) in [("nfs", root), ("iscsi", disk)] {
        let path = path.display().to_string();
        let words = [
            kind,
            &path,
            "--client",
            "127.0.0.1",
            "--runtime-dir",
            &run_dir,
        ];
        let asked = |more: &[&str]| export::export(&world, &[&words, more].concat());
        refused(
            &asked(&["--port", &port]),
            "another program listens on port",
        );
        let elsewhere = asked(&["--listen", "192.0.2.1"]);
        refused(&elsewhere, "is not an address of this machine");
    }
    let free = || {
        rustix::fs::statvfs(world.path(""))
            .expect("mounted")
            .f_bavail
    };
    let before = free();
    let huge = world.path("huge").display().to_string();
    let words = ["iscsi", &huge, "--size", "2TiB", "--client", "127.0.0.1"];
    let output = export::export(&world, &[&words[..], &["--runtime-dir", &run_dir]].concat());
    refused(&output, "no room for a disk of 2199023255552 bytes");
    assert_eq!(free(), before);
    assert!(!world.path("huge").exists());
    world.end();
}

#[test]
fn who_asks_for_a_member_hears_whose_it_is_and_who_may_not_look_is_told_that() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 60), (EXT4, 60)]) else {
        return;
    };
    put(&world.path("reel"), 1, MIB).expect("there is room");
    let rushes = rushes_tests::needs::path_of("rushes");
    let member = world.member(1).join("pool");
    let asked = |path: &Path| {
        let output = Command::new(&rushes)
            .args(["pool", "ls"])
            .arg(path)
            .output();
        output.expect("it starts")
    };
    let catalogue = format!("whose catalogue is {}", world.catalogue().display());
    refused(&asked(&member), "member 1 of the pool ");
    refused(&asked(&member.join("objects")), &catalogue);

    // Only root may enter the catalogue.
    run(Command::new("chmod").arg("a+x").arg(world.scratch.path()));
    let as_nobody = |words: &[&str], path: Option<PathBuf>| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
        command.arg(&rushes).arg("pool").args(words).args(path);
        command.output().expect("it starts")
    };
    // Only where user nobody may execute the program.
    if as_nobody(&["--help"], None).status.success() {
        let of_mount = as_nobody(&["where"], Some(world.path("reel")));
        refused(&of_mount, "you are not allowed to look into");
        let of_catalogue = as_nobody(&["ls"], Some(world.catalogue()));
        refused(&of_catalogue, "you are not allowed to look into");
        refused(
            &as_nobody(&["ls"], None),
            "you are not allowed to look into",
        );
    }
    world.end();
    refused(&asked(&member), "which is not mounted here");
}

/// The text that a command printed to either output.
fn said(output: &Output) -> String {
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}

fn asked(world: &PoolWorld, words: &[&str]) -> Output {
    world.command(words, &[]).output().expect("it starts")
}

/// The command that lets this member take bytes again, as an operator types it.
fn cancel(world: &PoolWorld, number: usize) -> String {
    let catalogue = world.catalogue();
    format!(
        "`rushes pool drain --cancel {} {number}`",
        catalogue.display()
    )
}

#[test]
fn the_last_member_that_takes_bytes_is_not_drained_and_who_lacks_room_hears_which_others_have_some()
{
    let Some(mut world) = PoolWorld::build(&[(EXT4, 60), (EXT4, 60), (EXT4, 30)]) else {
        return;
    };
    for seed in 0..5 {
        put(&world.path(format!("f{seed}")), seed, 12 * MIB).expect("there is room");
    }
    done(&world, &["drain", "0"], &[]);
    let short = asked(&world, &["drain", "1"]);
    assert!(matches!(short.status.code(), Some(1 | 2)), "{short:?}");
    let text = said(&short);
    assert!(text.contains(&cancel(&world, 0)), "{text}");
    assert!(text.contains("MiB free)"), "{text}");
    for is_mounted in [true, false] {
        if !is_mounted {
            world.end();
        }
        let last = asked(&world, &["drain", "2"]);
        refused(&last, "member 2 is the last one that takes bytes");
        refused(&last, "member 0 is draining");
        refused(&last, &cancel(&world, 0));
        let (report, _) = world.json(&["ls"], &[]);
        assert_eq!(report[0]["members"][2]["duty"], "full", "{report}");
    }
    // The commands that the message names work.
    done(&world, &["drain", "--cancel", "0"], &[]);
    done(&world, &["drain", "1"], &[]);
    world.start();
    for seed in 0..5 {
        check(&world.path(format!("f{seed}")), seed, 12 * MIB);
    }
    world.end();
}

#[test]
fn a_member_that_takes_no_bytes_is_given_up_and_of_the_last_that_does_it_is_said_who_could_instead()
{
    let Some(mut world) = PoolWorld::build(&[(EXT4, 60), (EXT4, 60), (EXT4, 60)]) else {
        return;
    };
    put(&world.path("f"), 1, MIB).expect("there is room");
    world.end();
    // An older Rushes let all members drain.
    let file = world.catalogue().join("rushes-pool");
    let text = fs::read_to_string(&file).expect("ours");
    let mut format: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    for member in format["members"].as_array_mut().expect("a list") {
        member["duty"] = "draining".into();
    }
    fs::write(&file, format.to_string()).expect("ours");
    world.unplug(1);
    done(&world, &["remove", "--lost", "--yes", "1"], &[]);
    done(&world, &["drain", "--cancel", "2"], &[]);
    world.unplug(2);
    let last = asked(&world, &["remove", "--lost", "--yes", "2"]);
    refused(&last, "member 2 is the last one that takes bytes: member 0");
    refused(&last, "member 0 is draining (");
    refused(&last, &cancel(&world, 0));
    done(&world, &["drain", "--cancel", "0"], &[]);
    done(&world, &["remove", "--lost", "--yes", "2"], &[]);
    world.unplug(0);
    refused(
        &asked(&world, &["remove", "--lost", "--yes", "0"]),
        "member 0 is the only one of the pool",
    );
}

#[test]
fn a_pool_is_not_mounted_where_it_would_hide_what_it_is_made_of() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 60), (EXT4, 60)]) else {
        return;
    };
    put(&world.path("f"), 1, MIB).expect("there is room");
    world.end();
    let mounted_on = |folder: &Path, option: &str| {
        let output = Command::new("timeout")
            .arg("20")
            .arg(rushes_tests::needs::path_of("rushes"))
            .args(["pool", "mount", option, "--runtime-dir"])
            .arg(world.scratch.path().join("run"))
            .arg(world.catalogue())
            .arg(folder)
            .output();
        output.expect("it starts")
    };
    let (member, catalogue) = (world.member(0), world.catalogue());
    let alias = world.scratch.folder("alias");
    run(Command::new("mount").arg("--bind").arg(&member).arg(&alias));
    let inside = member.join("pool/inside");
    fs::create_dir(&inside).expect("made");
    world.unplug(1);
    for (folder, sentence) in [
        (member.as_path(), "contains "),
        (&member.join("pool"), " is "),
        (&member.join("pool/objects/3f"), "is inside "),
        (&inside, "is inside "),
        (&catalogue, "(the catalogue)"),
        (&catalogue.join("tree"), "is inside "),
        (world.scratch.path(), "contains "),
        // The member by another path.
        (&alias, "contains "),
        (&alias.join("pool"), "member 0 of the pool "),
        (&alias.join("pool/inside"), "is inside "),
        // The place of a missing member, whose disk comes back.
        (&world.member(1), "contains "),
    ] {
        for option in ["--keeper", "--protect"] {
            let output = mounted_on(folder, option);
            refused(&output, sentence);
            refused(&output, "cannot be mounted on it");
        }
    }
    // The refused folders are unchanged.
    fs::remove_dir(&inside).expect("not protected");
    run(Command::new("umount").arg(&alias));
    world.plug(1, "loop");
    world.start();
    check(&world.path("f"), 1, MIB);
    world.end();
}

#[test]
fn a_look_through_a_pool_of_which_a_member_is_missing_does_not_say_that_all_is_well() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 60), (EXT4, 60)]) else {
        return;
    };
    put(&world.path("f"), 1, MIB).expect("there is room");
    world.end();
    world.unplug(1);
    for words in [&["fsck"][..], &["fsck", "--repair"]] {
        let output = asked(&world, words);
        let text = said(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains("member 1 was not checked"), "{text}");
        let sentence = "Nothing is wrong in the part that was checked";
        assert!(text.contains(sentence), "{text}");
        assert!(!text.contains("Nothing is wrong."), "{text}");
        let (report, code) = world.json(words, &[]);
        assert_eq!(code, Some(1), "{report}");
        assert_eq!(report["missing"][0]["member"], 1, "{report}");
        assert_eq!(report["left_count"], 0, "{report}");
    }
    world.plug(1, "loop");
    let output = done(&world, &["fsck"], &[]);
    assert!(said(&output).contains("Nothing is wrong."), "{output:?}");
}

#[test]
fn no_export_listens_on_port_0() {
    let Some(world) = PoolWorld::build(&[(EXT4, 60)]) else {
        return;
    };
    let (root, disk) = (world.path(""), world.path("disk"));
    fs::write(&disk, vec![0; MIB]).expect("written");
    for (kind, path) in [("nfs", root), ("iscsi", disk)] {
        let path = path.display().to_string();
        let output = export::export(
            &world,
            &[kind, &path, "--port", "0", "--client", "127.0.0.1"],
        );
        refused(&output, "0 is not in 1..");
    }
}
