// SPDX-License-Identifier: Apache-2.0
//! `rushes pool create`, `ls` and `where` on real file systems over loop devices, and their
//! refusals.

use rushes_tests::disk::{Disk, run};
use rushes_tests::needs::{self, Need};
use rushes_tests::scratch::Scratch;
use rustix::fs::{XattrFlags, setxattr};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const MIB: u64 = 1 << 20;

/// One disk of each file system, each with a scratch folder: an image has a fixed name there.
struct Disks {
    ext4: Disk,
    xfs: Disk,
    btrfs: Disk,
    _scratches: [Scratch; 3],
}

fn disks() -> Option<Disks> {
    let all = ["rushes", "mkfs.ext4", "mkfs.xfs", "mkfs.btrfs"].map(Need::Program);
    if !needs::all_there(&[&all[..], &[Need::Root]].concat()) {
        return None;
    }
    let scratches = [Scratch::new(), Scratch::new(), Scratch::new()];
    Some(Disks {
        ext4: Disk::ext4(&scratches[0], 64 * MIB),
        xfs: Disk::made(&scratches[1], &["mkfs.xfs", "-q", "-f"], 320 * MIB),
        btrfs: Disk::made(&scratches[2], &["mkfs.btrfs", "-q", "-f"], 160 * MIB),
        _scratches: scratches,
    })
}

impl Disks {
    /// A new folder on each.
    fn folders(&self, name: &str) -> [PathBuf; 3] {
        [&self.ext4, &self.xfs, &self.btrfs].map(|disk| {
            let path = disk.path().join(name);
            fs::create_dir(&path).expect("our own disk");
            path
        })
    }
}

fn pool(words: &[&str], paths: &[&Path]) -> Output {
    Command::new(needs::path_of("rushes"))
        .arg("pool")
        .args(words)
        .args(paths)
        .output()
        .expect("rushes starts")
}

fn json(output: &Output, code: i32) -> Value {
    assert_eq!(output.status.code(), Some(code), "{output:?}");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// The command ended with exit code 2 and this sentence.
fn refused(output: &Output, sentence: &str) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(text.contains(sentence), "{text}\nexpected: {sentence}");
}

/// Appends CRC-32C, computed bit by bit: not by the code under test.
fn seal(mut record: Vec<u8>) -> Vec<u8> {
    let mut sum = u32::MAX;
    for &byte in &record {
        sum ^= u32::from(byte);
        for _ in 0..8 {
            sum = sum >> 1 ^ if sum & 1 == 1 { 0x82f6_3b78 } else { 0 };
        }
    }
    record[4..8].copy_from_slice(&(!sum).to_le_bytes());
    record
}

/// A file with one object, made by hand from the tables in docs. Returns the object's path.
fn put(catalogue: &Path, name: &str, pool_id: &str, member: u16, folder: &Path) -> PathBuf {
    let (number, id) = (900u64, 0x7f00_0000_0000_0033u64);
    let mut record = b"RSL\x01\0\0\0\0".to_vec();
    record.extend(number.to_le_bytes());
    record.extend([1, 0, 0, 0, 1, 0, 0, 0]);
    record.extend([0; 16]);
    record.extend([0, 0, 1, 1]);
    record.extend(id.to_le_bytes());
    record.extend(member.to_le_bytes());
    record.extend([0, 0]);
    let stub = catalogue.join("tree").join(name);
    let file = fs::File::create(&stub).expect("our own disk");
    let none = XattrFlags::empty();
    setxattr(&stub, "trusted.rushes.layout", &seal(record), none).expect("our own disk");
    file.set_len(5).expect("our own disk");

    let object = folder.join("objects/7f/7f00000000000033");
    fs::write(&object, "bytes").expect("our own disk");
    let pool_id = u128::from_str_radix(pool_id, 16).expect("32 digits");
    let mut mark = b"RSO\x01\0\0\0\0".to_vec();
    mark.extend(pool_id.to_le_bytes());
    mark.extend(number.to_le_bytes());
    mark.extend([1, 0, 0, 0]);
    mark.extend([0; 12]);
    setxattr(&object, "trusted.rushes.object", &seal(mark), none).expect("our own disk");
    object
}

#[test]
fn a_pool_is_made_shown_and_a_file_found_on_its_member() {
    let Some(disks) = disks() else { return };
    let members = disks.folders("pool");
    let [catalogue, second_on_xfs, _] = disks.folders("more");
    let [ext4, xfs, btrfs] = &members;
    let all: [&Path; 5] = [&catalogue, ext4, xfs, btrfs, &second_on_xfs];
    let made = json(&pool(&["create", "--json"], &all), 0);
    assert_eq!(made["policy"], "most_free_space");
    assert_eq!(made["is_resumed"], false);
    assert_eq!(made["device_count"], 3);
    let of = |member: usize, field: &str| made["members"][member][field].clone();
    assert_eq!(of(0, "with_catalogue"), true);
    assert_eq!(of(2, "with_catalogue"), false);
    assert_eq!(of(1, "same_device_as"), serde_json::json!([3]));
    assert_eq!(of(2, "same_device_as"), serde_json::json!([]));
    let sum: u64 = [0, 1, 2]
        .iter()
        .filter_map(|&member| of(member, "bytes_total").as_u64())
        .sum();
    assert_eq!(made["bytes_total"], sum, "each device once");

    let status = json(&pool(&["status", "--json"], &[&catalogue]), 0);
    assert_eq!(status[0]["is_empty"], true, "nothing is wrong with it yet");
    let shown = json(&pool(&["ls", "--json"], &[&catalogue]), 0);
    assert_eq!(shown[0]["pool_id"], made["pool_id"]);
    let text = pool(&["ls"], &[&catalogue]);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("on one device with 3"), "{text}");

    let pool_id = made["pool_id"].as_str().expect("text");
    let object = put(&catalogue, "clip.mov", pool_id, 2, btrfs);
    let clip = catalogue.join("tree/clip.mov");
    let found = json(&pool(&["where", "--json"], &[&clip]), 0);
    assert_eq!(found[0]["bytes"], 5);
    assert_eq!(found[0]["number"], 900);
    let segment = &found[0]["segments"][0];
    assert_eq!(
        (segment["start"].as_u64(), &segment["end"]),
        (Some(0), &Value::Null)
    );
    assert_eq!(segment["objects"][0]["member"], 2);
    assert_eq!(
        segment["objects"][0]["path"],
        object.to_str().expect("text")
    );
    assert_eq!(segment["objects"][0]["state"], "present");

    // Names at the limits, and a file that was never written to.
    let name: std::ffi::OsString =
        std::os::unix::ffi::OsStringExt::from_vec([&b"a\n\xff"[..], &[b'x'; 252]].concat());
    let long = catalogue.join("tree").join(name);
    fs::write(&long, "").expect("255 bytes");
    let found = json(&pool(&["where", "--json"], &[&long]), 0);
    assert_eq!(found[0]["segments"], serde_json::json!([]));

    // One that is wrong keeps nobody from the others, and paths are whole.
    let found = Command::new(rushes_tests::needs::path_of("rushes"))
        .args(["pool", "where", "--json", "missing.mov", "clip.mov"])
        .current_dir(catalogue.join("tree"))
        .output()
        .expect("rushes starts");
    assert_eq!(found.status.code(), Some(2), "{found:?}");
    let said = String::from_utf8_lossy(&found.stderr).into_owned();
    assert!(said.contains("missing.mov"), "{found:?}");
    let found: Value = serde_json::from_slice(&found.stdout).expect("JSON");
    assert_eq!(found.as_array().expect("a list").len(), 1);
    assert_eq!(found[0]["file"], clip.to_str().expect("text"));

    // The object differs from the layout, as it is deleted; then its whole member is missing.
    fs::remove_file(&object).expect("our own disk");
    let found = json(&pool(&["where", "--json"], &[&clip]), 1);
    assert_eq!(found[0]["segments"][0]["objects"][0]["state"], "unusable");
    run(Command::new("umount").arg(disks.btrfs.path()));
    let found = json(&pool(&["where", "--json"], &[&clip]), 1);
    assert_eq!(found[0]["segments"][0]["objects"][0]["state"], "missing");
    let shown = json(&pool(&["ls", "--json"], &[&catalogue]), 1);
    assert_eq!(shown[0]["missing_count"], 1);
    assert_eq!(shown[0]["members"][2]["state"], "missing");
    run(Command::new("mount")
        .args(["-o", "remount,ro"])
        .arg(disks.xfs.path()));
    let shown = json(&pool(&["ls", "--json"], &[&catalogue]), 1);
    assert_eq!(shown[0]["members"][1]["state"], "read_only");

    // `where` names a damaged layout, and refuses a folder, which has no bytes.
    let none = XattrFlags::empty();
    setxattr(&clip, "trusted.rushes.layout", b"RSL\x01forged", none).expect("our own disk");
    refused(&pool(&["where"], &[&clip]), "cut off");
    setxattr(&clip, "trusted.rushes.layout", b"RSL\x63newer", none).expect("our own disk");
    refused(&pool(&["where"], &[&clip]), "use a newer Rushes");
    refused(
        &pool(&["where"], &[&catalogue.join("tree")]),
        "no regular file",
    );
    refused(&pool(&["where"], &[Path::new("/proc")]), "in no pool");
}

#[test]
fn create_refuses_what_it_must_not_take_and_changes_nothing_then() {
    let Some(disks) = disks() else { return };
    let [catalogue, a, b] = &disks.folders("pool");
    let create = |paths: &[&Path]| pool(&["create"], paths);
    let unchanged = || {
        for folder in [catalogue, a, b] {
            assert_eq!(
                fs::read_dir(folder).expect("it is there").count(),
                0,
                "{folder:?}"
            );
        }
    };
    refused(
        &create(&[catalogue, a, &a.join(".")]),
        "member 0 and member 1 at once",
    );
    refused(
        &create(&[catalogue, a, catalogue]),
        "the catalogue and member 1 at once",
    );
    refused(
        &create(&[catalogue, &a.join("no")]),
        "expected a folder that is there",
    );
    refused(&create(&[catalogue, a, disks.xfs.path()]), "is inside");
    let inside = catalogue.join("inside");
    fs::create_dir(&inside).expect("our own disk");
    refused(&create(&[catalogue, &inside]), "is inside");
    // The same folder, hidden by a bind mount of it elsewhere.
    let elsewhere = disks.btrfs.path().join("elsewhere");
    fs::create_dir(&elsewhere).expect("our own disk");
    run(Command::new("mount")
        .arg("--bind")
        .arg(&inside)
        .arg(&elsewhere));
    refused(&create(&[catalogue, &elsewhere]), "is not empty");
    run(Command::new("umount").arg(&elsewhere));
    fs::remove_dir(&inside).expect("our own disk");
    unchanged();

    fs::write(a.join("letter"), "dear").expect("our own disk");
    refused(
        &create(&[catalogue, a, b]),
        "is not empty: it has \"letter\"",
    );
    fs::remove_file(a.join("letter")).expect("our own disk");
    unchanged();

    let ram = disks.ext4.path().join("ram");
    fs::create_dir(&ram).expect("our own disk");
    run(Command::new("mount")
        .args(["-t", "ramfs", "ramfs"])
        .arg(&ram));
    refused(&create(&[&ram, a, b]), "keeps no extended attributes");
    refused(
        &create(&[catalogue, a, &ram]),
        "keeps no extended attributes",
    );
    run(Command::new("umount").arg(&ram));
    unchanged();

    run(Command::new("mount")
        .args(["-o", "remount,ro"])
        .arg(disks.btrfs.path()));
    refused(&create(&[catalogue, a, b]), "read-only");
    run(Command::new("mount")
        .args(["-o", "remount,rw"])
        .arg(disks.btrfs.path()));
    unchanged();

    let newer = r#"{"rushes_pool": "member", "format_version": 9, "colour": "blue"}"#;
    fs::write(a.join("rushes-pool"), newer).expect("our own disk");
    refused(&create(&[catalogue, a, b]), "is of format version 9");
    fs::write(a.join("rushes-pool"), "{}").expect("our own disk");
    refused(&create(&[catalogue, a, b]), "cannot be understood");
    fs::remove_file(a.join("rushes-pool")).expect("our own disk");
    unchanged();

    assert!(create(&[catalogue, a]).status.success());
    refused(&create(&[catalogue, b]), "the catalogue of the pool");
    let other = disks.folders("other");
    refused(&create(&[&other[0], a, b]), "expected a folder of no pool");
    refused(
        &create(&[&other[0], catalogue]),
        "the catalogue of the pool",
    );
    refused(&pool(&["ls"], &[a]), "expected the catalogue of that pool");
    // A member of a newer Rushes counts as missing, and `ls` says why.
    fs::write(a.join("rushes-pool"), newer).expect("our own disk");
    let shown = json(&pool(&["ls", "--json"], &[catalogue]), 1);
    let reason = shown[0]["members"][0]["reason"].as_str().expect("text");
    assert!(reason.contains("format version 9"), "{reason}");
    // No command changes a pool of a newer Rushes.
    let newer = r#"{"rushes_pool": "catalogue", "format_version": 9, "colour": "blue"}"#;
    fs::write(catalogue.join("rushes-pool"), newer).expect("our own disk");
    let asked: [&[&Path]; 3] = [
        &[catalogue],
        &[catalogue, b],
        &[catalogue, disks.btrfs.path()],
    ];
    for (words, folders) in [
        (&["ls"][..], asked[0]),
        (&["fsck"], asked[0]),
        (&["fsck", "--repair"], asked[0]),
        (&["destroy", "--yes"], asked[0]),
        (&["add"], asked[1]),
        (&["mount"], asked[2]),
    ] {
        refused(&pool(words, folders), "format version 9");
    }
    let kept = fs::read_to_string(catalogue.join("rushes-pool")).expect("our own disk");
    assert_eq!(kept, newer);
}
