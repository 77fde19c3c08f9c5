// SPDX-License-Identifier: Apache-2.0
//! Shares whose file systems come late, go, and come again.

#![allow(clippy::unwrap_used)] // The helpers are tests, too.

mod support;

use rushes_control::{Answer, Ask, Status};
use std::fs::File;
use support::ext4::Ext4;
use support::*;

const LENGTH: usize = 300_000;

/// The share lies on the disk, without trouble.
fn is_on(status: &Status, disk: &Ext4) -> bool {
    let share = &status.shares[0];
    share.device == disk.name()
        && share.file_system == "ext4"
        && share.mounted_on == disk.mount().display().to_string()
        && share.trouble.is_none()
}

#[test]
fn a_disk_that_is_mounted_after_the_start_is_served() {
    if !is_root("a loop device") {
        return;
    }
    let disk = Ext4::unmounted();
    let daemon = Daemon::start(&disk.mount(), "");
    let before = daemon.status();
    assert_ne!(before.shares[0].device, disk.name());
    let mut client = daemon.connect();
    disk.plug();
    std::fs::write(disk.mount().join("x.mov"), pattern(1, LENGTH)).unwrap();
    // At once, before the daemon has noticed the mount.
    let (_file, handle) = open(&mut client, &disk.mount(), "x.mov");
    assert!(read(&mut client, handle, 0, LENGTH) == pattern(1, LENGTH));
    let status = daemon.status_when("on the disk", |status| is_on(status, &disk));
    assert_eq!(status.daemon.plain_open_count, 0);
    let stream = &status.streams[0];
    assert_eq!(stream.device, disk.name());
    assert!(status.devices.iter().any(|d| d.name == disk.name()));
}

#[test]
fn a_disk_that_is_unmounted_is_let_go_of_and_served_when_it_is_back() {
    if !is_root("a loop device") {
        return;
    }
    let disk = Ext4::new();
    let path = disk.mount().join("x.mov");
    std::fs::write(&path, pattern(1, LENGTH)).unwrap();
    let daemon = Daemon::start(&disk.mount(), "[write]\nbuffer_bytes = \"64MiB\"\n");
    assert!(is_on(&daemon.status(), &disk), "{:#?}", daemon.status());
    let mut client = daemon.connect();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let handle = client.open(&file, b"x.mov").unwrap();
    assert!(read(&mut client, handle, 0, LENGTH) == pattern(1, LENGTH));
    assert!(client.write(handle, b"acknowledged", 5000).is_ok());
    // Bytes of it are in memory, it is read ahead, and a client has it open.
    disk.unplug();
    let status = daemon.status_when("not on the disk", |status| {
        status.shares[0].device != disk.name()
    });
    let trouble = status.shares[0].trouble.clone().unwrap();
    assert!(
        trouble.contains("is not mounted") && trouble.contains(disk.name()),
        "{trouble}"
    );
    assert!(disk.is_in_use());
    let note = status.daemon.notes.join("\n");
    assert!(note.contains("in use: 1 file "), "{note}");
    client.close(handle);
    drop(file);
    disk.wait_until_unused();
    let notes = daemon.status().daemon.notes;
    assert!(!notes.join("\n").contains("still in use"), "{notes:?}");
    disk.plug();
    let mut expected = pattern(1, LENGTH);
    expected[5000..5012].copy_from_slice(b"acknowledged");
    assert!(
        std::fs::read(&path).unwrap() == expected,
        "it was written first"
    );
    daemon.status_when("on the disk again", |status| is_on(status, &disk));
    let (_file, handle) = open(&mut client, &disk.mount(), "x.mov");
    assert!(read(&mut client, handle, 0, LENGTH) == expected);
    assert_eq!(daemon.status().daemon.plain_open_count, 0);
}

#[test]
fn a_disk_that_is_mounted_again_while_its_files_are_open_is_one_and_the_same() {
    if !is_root("a loop device") {
        return;
    }
    let disk = Ext4::new();
    let path = disk.mount().join("x.mov");
    std::fs::write(&path, pattern(1, LENGTH)).unwrap();
    let daemon = Daemon::start(&disk.mount(), "");
    let mut client = daemon.connect();
    let (former, before) = open(&mut client, &disk.mount(), "x.mov");
    assert!(read(&mut client, before, 0, LENGTH) == pattern(1, LENGTH));
    disk.unplug();
    disk.plug();
    let (file, after) = open(&mut client, &disk.mount(), "x.mov");
    assert!(read(&mut client, after, 0, LENGTH) == pattern(1, LENGTH));
    assert!(read(&mut client, before, 0, LENGTH) == pattern(1, LENGTH));
    client.close(before);
    drop(former);
    assert!(read(&mut client, after, 0, LENGTH) == pattern(1, LENGTH));
    client.close(after);
    drop(file);
    let status = daemon.status_when("on the disk", |status| is_on(status, &disk));
    assert_eq!(status.daemon.plain_open_count, 0);
    // Files that were opened through one mount do not keep the other in use.
    disk.unplug();
    disk.wait_until_unused();
}

#[test]
fn a_file_that_is_written_is_written_through_its_new_mount_when_the_former_has_taken_all() {
    if !is_root("a loop device") {
        return;
    }
    let disk = Ext4::new();
    let path = disk.mount().join("x.mov");
    std::fs::write(&path, pattern(1, LENGTH)).unwrap();
    let daemon = Daemon::start(&disk.mount(), "[write]\nbuffer_bytes = \"64MiB\"\n");
    let mut client = daemon.connect();
    let writable = || File::options().read(true).write(true).open(&path).unwrap();
    let former = writable();
    let before = client.open(&former, b"x.mov").unwrap();
    // Less than a page: it goes through the kernel's cache.
    assert!(client.write(before, b"acknowledged", 5000).is_ok());
    disk.unplug();
    disk.plug();
    let file = writable();
    let after = client.open(&file, b"x.mov").unwrap();
    assert!(client.write(after, b"and more", 9000).is_ok());
    assert!(client.sync(after).is_ok());
    let mut expected = pattern(1, LENGTH);
    expected[5000..5012].copy_from_slice(b"acknowledged");
    expected[9000..9008].copy_from_slice(b"and more");
    assert!(std::fs::read(&path).unwrap() == expected);
    assert!(client.write(after, b"after it", 13_000).is_ok());
    expected[13_000..13_008].copy_from_slice(b"after it");
    assert!(read(&mut client, after, 0, LENGTH) == expected);
    client.close(before);
    client.close(after);
    drop((former, file));
    assert_eq!(daemon.status().daemon.plain_open_count, 0);
    disk.unplug();
    disk.wait_until_unused();
    disk.plug();
    assert!(std::fs::read(&path).unwrap() == expected);
}

#[test]
fn a_folder_that_goes_with_its_disk_is_let_go_of_and_served_when_it_is_back() {
    if !is_root("a loop device") {
        return;
    }
    let disk = Ext4::new();
    let folder = disk.mount().join("clips");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("x.mov"), pattern(1, LENGTH)).unwrap();
    let daemon = Daemon::start(&folder, "");
    let mut client = daemon.connect();
    let (file, handle) = open(&mut client, &folder, "x.mov");
    assert!(read(&mut client, handle, 0, LENGTH) == pattern(1, LENGTH));
    client.close(handle);
    drop(file);
    disk.unplug();
    let status = daemon.status_when("not there", |status| status.shares[0].trouble.is_some());
    let trouble = status.shares[0].trouble.clone().unwrap();
    assert!(trouble.contains("No such file"), "{trouble}");
    // A booking script gets no admission for it, and `status` shows no device of it.
    assert!(status.shares[0].is_absent);
    assert!(
        !status
            .devices
            .iter()
            .any(|device| device.name == disk.name())
    );
    for path in [None, Some(status.shares[0].path.clone())] {
        let asked = daemon.ask(&Ask::Admit {
            bitrate: 10_000_000,
            count: 1,
            path,
        });
        match asked {
            Answer::Admit(admission) => assert!(!admission.admitted, "{admission:?}"),
            Answer::Error { error } => assert!(error.contains("No such file"), "{error}"),
            other => panic!("{other:?}"),
        }
    }
    disk.wait_until_unused();
    disk.plug();
    let (_file, handle) = open(&mut client, &folder, "x.mov");
    assert!(read(&mut client, handle, 0, LENGTH) == pattern(1, LENGTH));
    let status = daemon.status_when("on the disk", |status| is_on(status, &disk));
    assert_eq!(status.daemon.plain_open_count, 0);
}

#[test]
fn a_reload_that_fails_is_seen_in_status_until_one_succeeds() {
    let share = Folder::below(&std::env::temp_dir());
    let daemon = Daemon::start(&share.0, "");
    let good = std::fs::read_to_string(daemon.config_file()).unwrap();
    std::fs::write(daemon.config_file(), format!("{good}\nnonsense = 1\n")).unwrap();
    let answer = daemon.ask(&Ask::Reload {});
    assert!(matches!(answer, Answer::Error { .. }), "{answer:?}");
    let said = daemon.status().daemon.reload_error.unwrap();
    assert!(said.contains("nonsense"), "{said}");
    std::fs::write(daemon.config_file(), good).unwrap();
    let answer = daemon.ask(&Ask::Reload {});
    assert!(matches!(answer, Answer::Done { .. }), "{answer:?}");
    assert_eq!(daemon.status().daemon.reload_error, None);
}
