// SPDX-License-Identifier: Apache-2.0
//! `rushes pool destroy` undoes a create and deletes nothing else; `create` refuses a pool inside
//! of a pool.

use rushes_tests::disk::run;
use rushes_tests::pool::{EXT4, PoolWorld, XFS, put};
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const MIB: usize = 1 << 20;

fn refused(output: &Output, sentence: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(said.contains(sentence), "{said}\nexpected: {sentence}");
}

fn destroy(world: &PoolWorld, words: &[&str]) -> Output {
    let all = [&["destroy"], words].concat();
    world.command(&all, &[]).output().expect("rushes starts")
}

fn members(world: &PoolWorld) -> [PathBuf; 2] {
    [0, 1].map(|number| world.member(number).join("pool"))
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("listed");
    let mut names: Vec<String> = entries
        .map(|entry| entry.expect("listed").file_name().to_string_lossy().into())
        .collect();
    names.sort();
    names
}

#[test]
fn a_pool_goes_only_when_nobody_has_it_all_of_it_is_there_and_its_files_may_go() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 60), (XFS, 320)]) else {
        return;
    };
    put(&world.path("reel"), 1, MIB).expect("there is room");
    refused(
        &destroy(&world, &["--yes", "--with-files"]),
        "is served already",
    );
    world.end();
    refused(&destroy(&world, &["--yes"]), "--with-files");
    world.unplug(1);
    let all = ["--yes", "--with-files"];
    refused(&destroy(&world, &all), "member 1 is missing");
    world.plug(1, "loop");
    // `destroy` refuses while a foreign file system is mounted inside of the catalogue.
    let inside = world.catalogue().join("tree/inside");
    fs::create_dir(&inside).expect("made");
    run(Command::new("mount")
        .args(["-t", "tmpfs", "none"])
        .arg(&inside));
    fs::write(inside.join("others"), "kept").expect("written");
    let output = destroy(&world, &all);
    assert!(inside.join("others").exists(), "it is somebody else's");
    run(Command::new("umount").arg(&inside));
    refused(&output, "a file system is mounted on");
    // Without --yes the command only reports.
    let (report, code) = world.json(&["destroy", "--with-files"], &[]);
    assert_eq!(
        (code, &report["is_done"]),
        (Some(0), &json!(false)),
        "{report}"
    );
    assert_eq!(report["object_count"], 1, "{report}");
    world.start();
    assert!(world.path("reel").exists(), "nothing was changed");
    world.end();

    // A file that is not the pool's, beside its objects.
    let own = members(&world)[0].join("objects/own");
    fs::write(&own, "kept").expect("written");
    let (report, code) = world.json(&["destroy", "--with-files", "--yes"], &[]);
    assert_eq!(
        (code, &report["is_done"]),
        (Some(0), &json!(true)),
        "{report}"
    );
    assert_eq!(names(&world.catalogue()), [] as [&str; 0]);
    let [first, second] = members(&world);
    assert_eq!(names(&second), [] as [&str; 0]);
    assert_eq!(
        (names(&first), own.exists()),
        (vec![String::from("objects")], true)
    );
    fs::remove_dir_all(first.join("objects")).expect("removed");
    // `create` makes a pool of the same folders again.
    assert!(world.create(&[]).status.success());
    world.start();
    assert_eq!(names(&world.path("")), [] as [&str; 0]);
    world.end();
    // An empty pool needs no --with-files.
    assert!(destroy(&world, &["--yes"]).status.success());
}

#[test]
fn a_destroy_that_was_interrupted_goes_on_and_meanwhile_the_pool_is_none() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 60), (EXT4, 60)]) else {
        return;
    };
    put(&world.path("reel"), 1, MIB).expect("there is room");
    world.end();
    // The state after each step of a destroy: one more thing is gone each time.
    let catalogue = world.catalogue();
    let (going, [first, second]) = (catalogue.join("rushes-pool.destroying"), members(&world));
    fs::rename(catalogue.join("rushes-pool"), &going).expect("renamed");
    let steps: [&dyn Fn(); 5] = [
        &|| {},
        &|| fs::remove_dir_all(first.join("objects/00")).expect("removed"),
        &|| {
            fs::remove_dir_all(first.join("objects")).expect("removed");
            let _ = fs::remove_dir_all(first.join("names"));
            fs::remove_file(first.join("rushes-pool")).expect("removed");
        },
        &|| fs::remove_dir_all(catalogue.join("tree")).expect("removed"),
        &|| fs::remove_file(catalogue.join("lock")).expect("removed"),
    ];
    for step in steps {
        step();
        let output = world.command(&["fsck"], &[]).output();
        refused(
            &output.expect("rushes starts"),
            "not the catalogue of a pool",
        );
        refused(&world.create(&[]), "");
        let (report, code) = world.json(&["destroy"], &[]);
        assert_eq!(
            (code, &report["is_resumed"]),
            (Some(0), &json!(true)),
            "{report}"
        );
    }
    assert!(destroy(&world, &["--yes"]).status.success());
    for folder in [&catalogue, &first, &second] {
        assert_eq!(names(folder), [] as [&str; 0], "{}", folder.display());
    }
    assert!(world.create(&[]).status.success());
}

#[test]
fn no_folder_inside_of_a_pool_is_made_part_of_another_one() {
    let Some(mut world) = PoolWorld::build(&[(EXT4, 60), (EXT4, 60)]) else {
        return;
    };
    let [first, _] = members(&world);
    let free = world.disk("free", (EXT4, 60));
    let create = |catalogue: &Path, member: &Path| {
        Command::new(rushes_tests::needs::path_of("rushes"))
            .args(["pool", "create"])
            .args([catalogue, member])
            .output()
            .expect("rushes starts")
    };
    for inside in [
        first.join("another"),
        first.join("objects/3f/another"),
        world.catalogue().join("another"),
        world.catalogue().join("tree/another"),
    ] {
        fs::create_dir(&inside).expect("made");
        refused(&create(&free, &inside), "is inside ");
        refused(&create(&inside, &free), "is inside ");
        fs::remove_dir(&inside).expect("nothing was put there");
    }
    assert_eq!(names(&free), [] as [&str; 0]);
    world.end();
}
