// SPDX-License-Identifier: Apache-2.0
//! One pool behind several doors at once: a real smbd and Debian's Ganesha over its mount, and
//! programs on the mount itself. The tests show the guarantees for a client of one door beside the
//! others, and the files that no door reaches. The table in docs/guide/doors.md lists both.

use rushes_tests::disk::run;
use rushes_tests::export::{Export, NFS};
use rushes_tests::needs::{self, Need};
use rushes_tests::nfs4::{
    Extended, Handle as NfsHandle, NFS4ERR_DENIED, NFS4ERR_NAMETOOLONG, NFS4ERR_NOENT,
    NFS4ERR_NOTSUPP, Nfs4, Open as NfsOpen,
};
use rushes_tests::pattern;
use rushes_tests::pool::{self, EXT4, PoolWorld};
use rushes_tests::smb2::{
    self, Connection, DELETE_PENDING, Disposition, Handle, Keeping, Kept, LOCK_CONFLICT,
    LOCK_NOT_GRANTED, NO_NAME, NOT_FOUND, SHARING_VIOLATION, Status,
};
use rushes_tests::smbd::{self, SHARE, Smbd, SmbdSpec};
use rushes_tests::tree;
use rushes_tests::ways::{Hands, READERS, Range, WRITERS};
use rustix::fs::{FlockOperation, OFlags, Timespec, Timestamps, fcntl_lock};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const FILE_BYTES: usize = 300_000;
/// An event that does not come within this time counts as one that never comes.
const NEVER: Duration = Duration::from_secs(2);
/// For slow events: a server finds that a client is gone, a reader waits.
const PATIENCE: Duration = Duration::from_secs(60);
const EXDEV: i32 = 18;
const ENAMETOOLONG: i32 = 36;

/// The doors of a pool. They end in this order.
struct Doors {
    smbd: Smbd,
    export: Export,
    world: PoolWorld,
}

/// The lines of docs/guide/doors.md for the share of a pool.
fn documented() -> Vec<String> {
    let guide = fs::read_to_string(tree::root().join("docs/guide/doors.md"));
    let guide = guide.expect("the guide has a page on doors");
    let block = guide.split("```ini\n").nth(1).expect("with a share");
    let block = block.split("```").next().expect("that ends");
    let lines: Vec<String> = block
        .lines()
        .map(|line| line.trim().to_owned())
        .filter(|line| !line.starts_with('[') && !line.starts_with("path ="))
        .collect();
    assert!(!lines.is_empty(), "{block}");
    lines
}

impl Doors {
    /// All doors, the share with these lines. None: the machine lacks something, which was printed.
    fn open(lines: &[String], global: &[&str]) -> Option<Doors> {
        let needs = [Need::Program("smbd"), Need::Program("pdbedit")];
        if !needs::all_there(NFS) || !needs::all_there(&needs) {
            return None;
        }
        if lines.iter().any(|line| line.contains("rushes")) && !needs::all_there(&[Need::Module]) {
            return None;
        }
        let world = PoolWorld::build(&[(EXT4, 100), (EXT4, 100)])?;
        let everybody = fs::Permissions::from_mode(0o777);
        fs::set_permissions(world.path(""), everybody).expect("our own mount");
        let guests = smb2::SHARE_LINES.map(String::from);
        let smbd = smbd::start(
            &world.scratch,
            &SmbdSpec {
                path: world.path(""),
                share: lines.iter().cloned().chain(guests).collect(),
                global: [smb2::GLOBAL]
                    .iter()
                    .chain(global)
                    .map(|line| String::from(*line))
                    .collect(),
            },
        );
        // Ganesha drops an NFS client that is silent for half of this time.
        let export = Export::nfs_with(&world, &["--grace", "20"]);
        Some(Doors {
            smbd,
            export,
            world,
        })
    }

    fn smb(&self) -> Connection {
        Connection::connect(self.smbd.port(), SHARE).expect("smbd lets guests in")
    }

    fn smb_with_leases(&self) -> Connection {
        Connection::connect_with_leases(self.smbd.port(), SHARE).expect("smbd lets guests in")
    }

    /// An NFS client, and the exported folder.
    fn nfs(&self, name: &str) -> (Nfs4, NfsHandle) {
        let mut nfs = Nfs4::connect(self.export.port, name, 1);
        let root = nfs.root("media").expect("exported");
        (nfs, root)
    }

    /// Makes a file that every user may write.
    fn put(&self, name: &str, seed: u64) {
        let path = self.world.path(name);
        fs::write(&path, pattern::bytes(seed, 0, FILE_BYTES)).expect("there is room");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("ours");
    }

    fn local(&self, name: &str) -> File {
        File::options()
            .read(true)
            .write(true)
            .open(self.world.path(name))
            .expect("it is there")
    }

    /// Waits until the pool has no object: all its files were removed.
    fn nothing_is_left(&self) {
        let end = Instant::now() + PATIENCE;
        loop {
            let left: Vec<_> = (0..2).flat_map(|number| self.objects(number)).collect();
            if left.is_empty() {
                return;
            }
            assert!(
                Instant::now() < end,
                "objects that nobody names: {left:?}; named are {:?}",
                fs::read_dir(self.world.path("")).map(|all| all
                    .flatten()
                    .map(|entry| entry.file_name())
                    .collect::<Vec<_>>())
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn objects(&self, member: usize) -> Vec<std::path::PathBuf> {
        let folders = fs::read_dir(self.world.member(member).join("pool/objects"));
        folders
            .expect("root may look")
            .flatten()
            .filter_map(|folder| fs::read_dir(folder.path()).ok())
            .flat_map(|all| all.flatten().map(|entry| entry.path()))
            .collect()
    }
}

/// Locks the file; false if another process has a lock. The kernel drops the lock when this process
/// closes any descriptor of the file.
fn locked(file: &File) -> bool {
    match fcntl_lock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => true,
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::ACCESS) => false,
        Err(error) => panic!("a lock is refused by {error}"),
    }
}

fn unlocked(file: &File) {
    fcntl_lock(file, FlockOperation::Unlock).expect("ours");
}

fn is_free(file: &File) -> bool {
    let free = locked(file);
    if free {
        unlocked(file);
    }
    free
}

fn becomes(sentence: &str, mut what: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !what() {
        assert!(Instant::now() < end, "not within {PATIENCE:?}: {sentence}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn is_refused(lock: Result<(), Status>) -> bool {
    matches!(lock, Err(Status(LOCK_NOT_GRANTED | LOCK_CONFLICT)))
}

fn locks_hold(lines: &[String]) {
    let Some(doors) = Doors::open(lines, &[]) else {
        return;
    };
    doors.put("project.prproj", 1);
    let local = doors.local("project.prproj");
    let (mut nfs, root) = doors.nfs("locks");
    let mut theirs = nfs.open(&root, b"project.prproj", false).expect("opened");
    let smb = doors.smb();
    let (file, _) = smb
        .open("project.prproj", Disposition::Open)
        .expect("opened");

    // A lock of an SMB client.
    smb.lock(file, 100, 50, true).expect("nobody has it");
    assert!(!locked(&local), "a program has what an SMB client locked");
    let refused = nfs.lock(&mut theirs, 120, 10);
    assert_eq!(refused, Err(NFS4ERR_DENIED));
    let beside = nfs.lock(&mut theirs, 150, 10).expect("nobody has that");
    let other = doors.smb();
    let (again, _) = other
        .open("project.prproj", Disposition::Open)
        .expect("opened");
    assert!(is_refused(other.lock(again, 155, 1, true)), "it is NFS's");
    nfs.unlock(&theirs, beside).expect("ours");
    smb.lock(file, 100, 50, false).expect("ours");
    assert!(is_free(&local));
    // It ends when the file is closed, and when the client is gone.
    smb.lock(file, 0, 10, true).expect("nobody has it");
    smb.close(file).expect("closed");
    assert!(is_free(&local), "closed");
    other.lock(again, 0, 10, true).expect("nobody has it");
    assert!(!is_free(&local));
    drop(other);
    becomes("the lock of an SMB client that is gone is, too", || {
        // This read keeps the NFS client: Ganesha drops a silent one.
        nfs.read(&theirs, 0, 8).expect("open");
        is_free(&local)
    });

    // A lock of an NFS client.
    let (file, _) = smb
        .open("project.prproj", Disposition::Open)
        .expect("opened");
    let ours = nfs.lock(&mut theirs, 1000, 1000).expect("nobody has it");
    assert!(!locked(&local), "a program has what an NFS client locked");
    assert!(is_refused(smb.lock(file, 1999, 1, true)));
    smb.lock(file, 2000, 1, true).expect("nobody has that");
    smb.lock(file, 2000, 1, false).expect("ours");
    nfs.unlock(&theirs, ours).expect("ours");
    smb.lock(file, 1999, 1, true).expect("it is free");
    smb.lock(file, 1999, 1, false).expect("ours");
    let mut gone = Nfs4::connect(doors.export.port, "gone", 1);
    let mut open = gone.open(&root, b"project.prproj", false).expect("opened");
    gone.lock(&mut open, 0, 5).expect("nobody has it");
    assert!(!is_free(&local));
    drop(gone);
    becomes("the lock of an NFS client that is gone is, too", || {
        nfs.read(&theirs, 0, 8).expect("open");
        is_free(&local)
    });

    // A lock of a program. smbd applies it to each read and write of SMB clients, too.
    assert!(locked(&local));
    assert!(is_refused(smb.lock(file, 5000, 1, true)));
    let refused = nfs.lock(&mut theirs, 5000, 1);
    assert_eq!(refused, Err(NFS4ERR_DENIED));
    let read = smb.read(file, 0, 100);
    assert_eq!(read, Err(Status(LOCK_CONFLICT)));
    let written = smb.write(file, 0, b"x");
    assert_eq!(written, Err(Status(LOCK_CONFLICT)));
    drop(local);
    let read = smb.read(file, 0, 100).expect("closed");
    pattern::check(1, 0, &read, "project.prproj");
    smb.lock(file, 5000, 1, true).expect("closed");

    // For NFS clients and programs locks are advisory: reads and writes ignore them.
    let local = doors.local("project.prproj");
    let mut found = [0; 8];
    local.read_exact_at(&mut found, 5000).expect("read");
    nfs.write(&theirs, 5000, &found).expect("written");
}

#[test]
fn a_byte_range_lock_of_one_door_is_refused_at_the_others_and_goes_with_who_had_it() {
    locks_hold(&documented());
}

#[test]
fn byte_range_locks_hold_with_our_module_in_the_share_too() {
    let mut lines = documented();
    lines.push(String::from("vfs objects = rushes"));
    locks_hold(&lines);
}

const KEY: [u8; 16] = *b"one lease of one";

/// Bytes that a client of one door writes are in the next read by any other door.
fn agree(doors: &Doors, smb: &Connection, file: Handle, name: &str) {
    let (mut nfs, root) = doors.nfs(&format!("agree on {file:?}"));
    let open = nfs.open(&root, name.as_bytes(), false).expect("opened");
    let local = doors.local(name);
    for round in 0..30u64 {
        let at = round * 1000;
        let (one, two, three) = (
            pattern::bytes(round, 0, 999),
            pattern::bytes(round, 1, 999),
            pattern::bytes(round, 2, 999),
        );
        local.write_all_at(&one, at).expect("written");
        assert!(smb.read(file, at, 999).expect("read") == one, "{round}");
        nfs.write(&open, at, &two).expect("written");
        assert!(smb.read(file, at, 999).expect("read") == two, "{round}");
        smb.write(file, at, &three).expect("written");
        let mut found = vec![0; 999];
        local.read_exact_at(&mut found, at).expect("read");
        assert!(found == three, "{round}");
        assert!(nfs.read(&open, at, 999).expect("read") == three, "{round}");
    }
    nfs.close(open).expect("closed");
}

/// Of the file of the table. Units: bytes.
const TABLE_BYTES: u64 = 256 << 10;

/// One file at all doors: an SMB client, an NFS client, and a program on the mount.
struct Table<'a> {
    smb: (&'a Connection, Handle),
    nfs: (Nfs4, NfsOpen),
    hands: Hands,
    path: PathBuf,
}

impl Table<'_> {
    /// The bytes of a range as each reader has them: different ones, in hexadecimal.
    fn seen(&mut self, (at, length): Range) -> Vec<(String, String)> {
        let mut by_smb = Vec::new();
        let mut by_nfs = Vec::new();
        for from in (at..at + length).step_by(smb2::REQUEST_MAX) {
            let part = (at + length - from).min(smb2::REQUEST_MAX as u64);
            let (smb, file) = self.smb;
            by_smb.extend(smb.read(file, from, part as usize).expect("read"));
            let (nfs, open) = &mut self.nfs;
            by_nfs.extend(nfs.read(open, from, part as u32).expect("read"));
        }
        let distinct = |bytes: Vec<u8>| {
            assert_eq!(bytes.len() as u64, length, "bytes that were read at {at}");
            let all: BTreeSet<u8> = bytes.into_iter().collect();
            all.iter().map(|byte| format!("{byte:02x}")).collect()
        };
        let mut seen = vec![
            (String::from("SMB"), distinct(by_smb)),
            (String::from("NFS"), distinct(by_nfs)),
        ];
        self.hands.open("new open", &self.path, OFlags::RDONLY);
        for (word, name) in READERS.into_iter().chain([("see", "new open")]) {
            let bytes = self.hands.does(word, name, (at, length), "-");
            seen.push((format!("{word}, {name}"), bytes));
        }
        self.hands.close("new open");
        seen
    }

    /// A range changed to this byte at a door, or by the program.
    ///
    /// Returns   the byte that is there now
    fn change(&mut self, writer: &str, (at, length): Range, byte: u8) -> u8 {
        if WRITERS.contains(&writer) {
            return self.hands.change(writer, (at, length), byte);
        }
        for from in (at..at + length).step_by(smb2::REQUEST_MAX) {
            let part = (at + length - from).min(smb2::REQUEST_MAX as u64);
            let bytes = vec![byte; part as usize];
            if writer == "SMB" {
                let (smb, file) = self.smb;
                smb.write(file, from, &bytes).expect("written");
            } else {
                let (nfs, open) = &mut self.nfs;
                nfs.write(open, from, &bytes).expect("written");
            }
        }
        byte
    }
}

/// Each way to write beside each way to read, where the writer or the reader is another door.
fn table(doors: &Doors, name: &str) {
    let path = doors.world.path(name);
    fs::write(&path, vec![255; TABLE_BYTES as usize]).expect("there is room");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("ours");
    let smb = doors.smb();
    let (file, _) = smb.open(name, Disposition::Open).expect("opened");
    let (mut nfs, root) = doors.nfs(&format!("table of {name}"));
    let open = nfs.open(&root, name.as_bytes(), false).expect("opened");
    let mut hands = Hands::new();
    hands.open_to_read(&path, OFlags::RDWR);
    let source = doors.world.path("source");
    hands.open("source", &source, OFlags::RDWR | OFlags::CREATE);
    let mut table = Table {
        smb: (&smb, file),
        nfs: (nfs, open),
        hands,
        path,
    };
    let mut byte = 1;
    for writer in ["SMB", "NFS"].into_iter().chain(WRITERS) {
        let is_local = WRITERS.contains(&writer);
        if is_local {
            table.hands.open_to_change(writer, &table.path);
        }
        for range in [
            (0, TABLE_BYTES),
            (40 << 10, 8 << 10),
            (TABLE_BYTES - 4096, 4096),
        ] {
            let range = match writer {
                "cut and made longer" => (range.0, TABLE_BYTES - range.0),
                _ => range,
            };
            // Each reader has the old bytes.
            table.seen(range);
            let expected = format!("{:02x}", table.change(writer, range, byte));
            for (reader, bytes) in table.seen(range) {
                assert_eq!(bytes, expected, "written: {writer}; read: {reader}; {name}");
            }
            byte += 1;
        }
        if is_local {
            table.hands.close(writer);
        }
    }
    let (mut nfs, open) = table.nfs;
    nfs.close(open).expect("closed");
    smb.close(file).expect("closed");
}

#[test]
fn what_is_written_at_one_door_in_any_way_is_read_at_another_in_any_way() {
    if !needs::all_there(&[Need::Program("python3")]) {
        return;
    }
    let Some(doors) = Doors::open(&documented(), &[]) else {
        return;
    };
    table(&doors, "alone.mov");
    // By way of a daemon, through its lanes.
    let _daemon = doors.world.served(2, "");
    table(&doors, "served.mov");
}

/// The findings of `rushes check` on the pool in this smbd's configuration.
fn checked(doors: &Doors) -> Vec<(String, String, String)> {
    let scratch = doors.world.scratch.path();
    let config = scratch.join("rushes.toml");
    let share = format!(
        "[[share]]\nname = \"m0\"\npath = {:?}\n",
        doors.world.member(0).join("pool")
    );
    fs::write(&config, share).expect("ours");
    let output = Command::new(needs::path_of("rushes"))
        .args(["check", "--json", "--config"])
        .arg(&config)
        .arg("--smb-conf")
        .arg(scratch.join("smbd/smb.conf"))
        .output()
        .expect("rushes starts");
    let said: serde_json::Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {output:?}"));
    let area = format!("pool {}", doors.world.path("").display());
    let area = area.trim_end_matches('/');
    let text = |finding: &serde_json::Value, key: &str| {
        let text = finding[key].as_str().unwrap_or_default();
        text.to_owned()
    };
    said["findings"]
        .as_array()
        .expect("a list")
        .iter()
        .filter(|finding| finding["area"] == area)
        .map(|finding| {
            (
                text(finding, "level"),
                text(finding, "finding"),
                text(finding, "remedy"),
            )
        })
        .collect()
}

#[test]
fn with_the_lines_of_the_guide_smb_clients_keep_nothing_and_everybody_sees_each_byte() {
    let Some(doors) = Doors::open(&documented(), &[]) else {
        return;
    };
    doors.put("a.mov", 1);
    let smb = doors.smb_with_leases();
    let (file, _, kept) = smb
        .open_keeping("a.mov", Disposition::Open, Keeping::Lease(KEY))
        .expect("opened");
    assert!(kept.is_nothing(), "{kept:?}");
    agree(&doors, &smb, file, "a.mov");
    smb.close(file).expect("closed");
    let old = doors.smb();
    let (file, _, kept) = old
        .open_keeping("a.mov", Disposition::Open, Keeping::Batch)
        .expect("opened");
    assert!(kept.is_nothing(), "{kept:?}");
    agree(&doors, &old, file, "a.mov");
    let said = checked(&doors);
    assert_eq!(said.len(), 1, "{said:?}");
    assert_eq!(said[0].0, "ok", "{said:?}");
}

/// smbd breaks no lease for another door: so the guide has those lines, and `rushes check` asks for
/// them.
#[test]
fn leases_are_not_broken_by_other_doors_and_check_says_so() {
    let Some(doors) = Doors::open(&[], &[]) else {
        return;
    };
    doors.put("a.mov", 1);
    let smb = doors.smb_with_leases();
    let (file, _, kept) = smb
        .open_keeping("a.mov", Disposition::Open, Keeping::Lease(KEY))
        .expect("opened");
    assert_eq!(kept, Kept::Lease(7));
    let local = doors.local("a.mov");
    local.write_all_at(b"another byte", 0).expect("written");
    assert_eq!(smb.next_break(NEVER), None, "smbd breaks it by itself now");
    let (mut nfs, root) = doors.nfs("leases");
    let open = nfs.open(&root, b"a.mov", false).expect("opened");
    nfs.write(&open, 0, b"yet another").expect("written");
    assert_eq!(smb.next_break(NEVER), None, "smbd breaks it by itself now");
    // For another SMB client smbd breaks the lease.
    let other = doors.smb();
    let (second, told) = std::thread::scope(|scope| {
        let opening = scope.spawn(|| other.open("a.mov", Disposition::Open));
        let told = smb.next_break(PATIENCE).expect("a break");
        smb.acknowledge(told).expect("acknowledged");
        (opening.join().expect("opened"), told)
    });
    assert!(matches!(told.to, Kept::Lease(state) if state & 4 == 0));
    other.close(second.expect("opened").0).expect("closed");
    // Reads and writes past the client's cache are right all the same.
    agree(&doors, &smb, file, "a.mov");
    let said = checked(&doors);
    assert_eq!(said.len(), 1, "{said:?}");
    let (level, finding, remedy) = &said[0];
    assert_eq!(level, "warning");
    assert!(
        finding.contains("leases") && finding.contains("NFS"),
        "{finding}"
    );
    assert!(remedy.contains("oplocks = no"), "{remedy}");
}

/// The other way of the guide: oplocks that are leases of the kernel.
#[test]
fn oplocks_of_the_kernel_are_broken_before_another_door_opens_the_file() {
    let lines = [String::from("kernel oplocks = yes")];
    let Some(doors) = Doors::open(&lines, &[]) else {
        return;
    };
    doors.put("a.mov", 1);
    let smb = doors.smb_with_leases();
    let lease = smb.open_keeping("a.mov", Disposition::Open, Keeping::Lease(KEY));
    let (file, _, kept) = lease.expect("opened");
    assert!(kept.is_nothing(), "leases are off then: {kept:?}");
    smb.close(file).expect("closed");
    for (round, door) in ["a program", "NFS", "a program that reads"]
        .into_iter()
        .enumerate()
    {
        let (file, _, kept) = smb
            .open_keeping("a.mov", Disposition::Open, Keeping::Batch)
            .expect("opened");
        assert_eq!(kept, Kept::Oplock(9), "before {door}");
        let new = pattern::bytes(50 + round as u64, 0, 1000);
        let found = std::thread::scope(|scope| {
            let opening = scope.spawn(|| {
                let mut found = vec![0; 1000];
                match door {
                    "NFS" => {
                        let (mut nfs, root) = doors.nfs("oplocks");
                        let open = nfs.open(&root, b"a.mov", false).expect("opened");
                        found = nfs.read(&open, 0, 1000).expect("read");
                        nfs.close(open).expect("closed");
                    }
                    _ => {
                        File::options()
                            .read(true)
                            .write(door == "a program")
                            .open(doors.world.path("a.mov"))
                            .and_then(|file| file.read_exact_at(&mut found, 0))
                            .expect("read");
                    }
                }
                found
            });
            let told = smb.next_break(PATIENCE);
            let told = told.unwrap_or_else(|| panic!("{door} breaks nothing"));
            assert!(!opening.is_finished(), "{door} does not wait");
            // The client first writes the bytes that it had only in its cache.
            smb.write(file, 0, &new).expect("written");
            smb.acknowledge(told).expect("acknowledged");
            opening.join().expect("opened")
        });
        assert!(found == new, "{door} has old bytes");
        smb.close(file).expect("closed");
    }
    // While a program has the file open, an SMB client gets no oplock.
    for write in [true, false] {
        let local = File::options()
            .read(true)
            .write(write)
            .open(doors.world.path("a.mov"))
            .expect("opened");
        let (file, _, kept) = smb
            .open_keeping("a.mov", Disposition::Open, Keeping::Batch)
            .expect("opened");
        assert!(kept.is_nothing(), "{kept:?}");
        smb.close(file).expect("closed");
        drop(local);
    }
    let said = checked(&doors);
    assert_eq!(said.len(), 1, "{said:?}");
    assert_eq!(said[0].0, "ok", "{said:?}");
}

#[test]
fn share_modes_of_the_kernel_open_no_file_and_check_says_so() {
    let lines = ["oplocks = no", "kernel share modes = yes"].map(String::from);
    let Some(doors) = Doors::open(&lines, &[]) else {
        return;
    };
    doors.put("a.mov", 1);
    let refused = doors.smb().open("a.mov", Disposition::Open);
    assert_eq!(refused.err(), Some(Status(SHARING_VIOLATION)));
    let said = checked(&doors);
    assert_eq!(said.len(), 1, "{said:?}");
    assert_eq!(said[0].0, "error", "{said:?}");
    assert!(said[0].1.contains("kernel share modes"), "{said:?}");
}

#[test]
fn what_is_removed_by_one_door_is_whole_for_who_has_it_open_at_another() {
    let Some(doors) = Doors::open(&documented(), &[]) else {
        return;
    };
    let (mut nfs, root) = doors.nfs("removed");
    let (smb, other) = (doors.smb(), doors.smb());
    // A program, then an NFS client, removes the file while an SMB client has it open; the name is
    // free for another file at once.
    for (seed, by_nfs) in [(1, false), (2, true)] {
        doors.put("take.mov", seed);
        let (file, _) = smb.open("take.mov", Disposition::Open).expect("opened");
        if by_nfs {
            nfs.remove(&root, b"take.mov").expect("removed");
        } else {
            fs::remove_file(doors.world.path("take.mov")).expect("removed");
        }
        let gone = other.open("take.mov", Disposition::Open);
        assert_eq!(gone.err(), Some(Status(NOT_FOUND)));
        doors.put("take.mov", seed + 10);
        let found = smb.read(file, 100, 60_000).expect("it is open");
        pattern::check(seed, 100, &found, "the removed one");
        smb.write(file, 500_000, b"longer").expect("it is open");
        let (new, _) = other.open("take.mov", Disposition::Open).expect("opened");
        let found = other.read(new, 100, 60_000).expect("read");
        pattern::check(seed + 10, 100, &found, "the new one");
        other.close(new).expect("closed");
        smb.close(file).expect("closed");
        let new = fs::read(doors.world.path("take.mov")).expect("read");
        assert_eq!(new.len(), FILE_BYTES, "the removed one was made longer");
        fs::remove_file(doors.world.path("take.mov")).expect("removed");
    }
    // A removal by SMB waits for the last SMB client with the file open, and for no other door.
    doors.put("take.mov", 3);
    let local = doors.local("take.mov");
    let theirs = nfs.open(&root, b"take.mov", false).expect("opened");
    let (file, _) = smb.open("take.mov", Disposition::Open).expect("opened");
    let (second, _) = other.open("take.mov", Disposition::Open).expect("opened");
    smb.delete_on_close(file).expect("marked");
    smb.close(file).expect("closed");
    let pending = smb.open("take.mov", Disposition::Open);
    assert_eq!(pending.err(), Some(Status(DELETE_PENDING)));
    assert!(doors.world.path("take.mov").exists(), "until the last one");
    other.close(second).expect("closed");
    assert!(!doors.world.path("take.mov").exists());
    assert_eq!(nfs.lookup(&root, b"take.mov"), Err(NFS4ERR_NOENT));
    let mut found = vec![0; FILE_BYTES];
    local.read_exact_at(&mut found, 0).expect("it is open");
    pattern::check(3, 0, &found, "by a program");
    let found = nfs.read(&theirs, 0, 60_000).expect("it is open");
    pattern::check(3, 0, &found, "by NFS");
    nfs.close(theirs).expect("closed");
    drop(local);
    // An SMB client that shares the file with nobody keeps SMB clients out, but no other door.
    doors.put("alone.mov", 4);
    let alone = smb
        .open_alone("alone.mov", Disposition::Open)
        .expect("opened");
    let refused = other.open("alone.mov", Disposition::Open);
    assert_eq!(refused.err(), Some(Status(SHARING_VIOLATION)));
    doors
        .local("alone.mov")
        .write_all_at(b"x", 0)
        .expect("written");
    nfs.remove(&root, b"alone.mov").expect("removed");
    assert_eq!(smb.read(alone, 0, 1).expect("it is open"), b"x");
    smb.close(alone).expect("closed");
    doors.nothing_is_left();
}

#[test]
fn a_rename_over_a_file_leaves_who_has_it_open_the_old_one() {
    let Some(doors) = Doors::open(&documented(), &[]) else {
        return;
    };
    let (mut nfs, root) = doors.nfs("renamed");
    let (smb, other) = (doors.smb(), doors.smb());
    for (seed, door) in ["a program", "NFS", "SMB"].into_iter().enumerate() {
        let (old, new) = (2 * seed as u64, 2 * seed as u64 + 1);
        doors.put("cut.prproj", old);
        doors.put("cut.prproj.new", new);
        let local = doors.local("cut.prproj");
        let theirs = nfs.open(&root, b"cut.prproj", false).expect("opened");
        let (file, _) = smb.open("cut.prproj", Disposition::Open).expect("opened");
        match door {
            "NFS" => nfs
                .rename(&root, b"cut.prproj.new", b"cut.prproj")
                .map_err(|status| status.0),
            "SMB" => {
                let (from, _) = other
                    .open("cut.prproj.new", Disposition::Open)
                    .expect("opened");
                other.rename(from, "cut.prproj").expect("renamed");
                other.close(from).map_err(|status| status.0)
            }
            _ => {
                let (from, to) = ("cut.prproj.new", "cut.prproj");
                fs::rename(doors.world.path(from), doors.world.path(to)).expect("renamed");
                Ok(())
            }
        }
        .unwrap_or_else(|status| panic!("{door}: {status:#x}"));
        let mut found = vec![0; FILE_BYTES];
        local.read_exact_at(&mut found, 0).expect("it is open");
        pattern::check(old, 0, &found, door);
        let found = nfs.read(&theirs, 0, 60_000).expect("it is open");
        pattern::check(old, 0, &found, door);
        let found = smb.read(file, 0, 60_000).expect("it is open");
        pattern::check(old, 0, &found, door);
        smb.close(file).expect("closed");
        nfs.close(theirs).expect("closed");
        drop(local);
        // Every door has the new file under the name at once.
        let found = fs::read(doors.world.path("cut.prproj")).expect("read");
        pattern::check(new, 0, &found, door);
        let handle = nfs.lookup(&root, b"cut.prproj").expect("there");
        let found = nfs.read_closed(&handle, 0, 60_000).expect("read");
        pattern::check(new, 0, &found, door);
        let (file, _) = other.open("cut.prproj", Disposition::Open).expect("opened");
        let found = other.read(file, 0, 60_000).expect("read");
        pattern::check(new, 0, &found, door);
        other.close(file).expect("closed");
        assert_eq!(nfs.lookup(&root, b"cut.prproj.new"), Err(NFS4ERR_NOENT));
    }
    fs::remove_file(doors.world.path("cut.prproj")).expect("removed");
    doors.nothing_is_left();
}

/// Each door reads each file that it shows, and opens each name that it lists.
#[test]
fn names_at_the_limits_are_one_file_at_every_door_or_are_not_shown() {
    let Some(doors) = Doors::open(&documented(), &[]) else {
        return;
    };
    let long = "n".repeat(255);
    let wide = "\u{6620}".repeat(85);
    assert_eq!(wide.len(), 255);
    // Windows cannot use a name with a line end, a colon, a backslash or a space at the end: SMB
    // shows another one. It does not show a name that is not UTF-8.
    let plain: [&[u8]; 3] = [long.as_bytes(), wide.as_bytes(), "\u{e9}".as_bytes()];
    let foreign: [&[u8]; 4] = [b"line\nend", b"a:b", b"space at the end ", b"back\\slash"];
    let no_text: [&[u8]; 2] = [b"a\xff\xfe.mov", b"\xc3"];
    let all = || plain.iter().chain(&foreign).chain(&no_text);
    let (mut nfs, root) = doors.nfs("names");
    for (seed, name) in all().enumerate() {
        let path = doors.world.path(OsStr::from_bytes(name));
        fs::write(&path, pattern::bytes(seed as u64, 0, 5000)).expect("made");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("ours");
    }
    let by_nfs: BTreeSet<Vec<u8>> = nfs
        .list(&root, 8192, || {})
        .expect("listed")
        .into_iter()
        .collect();
    let made: BTreeSet<Vec<u8>> = all().map(|name| name.to_vec()).collect();
    assert_eq!(by_nfs, made);
    for (seed, name) in all().enumerate() {
        let handle = nfs.lookup(&root, name).expect("there");
        let found = nfs.read_closed(&handle, 0, 5000).expect("read");
        pattern::check(seed as u64, 0, &found, "by NFS");
    }
    let smb = doors.smb();
    let shown = smb.names().expect("listed");
    for (seed, name) in plain.iter().enumerate() {
        let name = std::str::from_utf8(name).expect("text");
        assert!(shown.iter().any(|one| one == name), "{name} in {shown:?}");
        let (file, _) = smb.open(name, Disposition::Open).expect("opened");
        let found = smb.read(file, 0, 5000).expect("read");
        pattern::check(seed as u64, 0, &found, name);
        smb.close(file).expect("closed");
    }
    // Each name that SMB shows is one file, with all its bytes.
    let expected: BTreeSet<Vec<u8>> = (0..all().count())
        .map(|seed| pattern::bytes(seed as u64, 0, 5000))
        .collect();
    let mut seen = BTreeSet::new();
    for name in &shown {
        let (file, _) = smb
            .open(name, Disposition::Open)
            .unwrap_or_else(|status| panic!("{name:?} is shown: {status:?}"));
        let found = smb.read(file, 0, 5000).expect("read");
        assert!(expected.contains(&found), "{name:?} is no file of ours");
        assert!(seen.insert(found), "{name:?} is shown twice: {shown:?}");
        smb.close(file).expect("closed");
    }
    assert_eq!(
        shown.len(),
        plain.len() + foreign.len(),
        "shown by SMB: {shown:?}"
    );
    // Each door refuses a name that is one byte longer.
    let longer = "n".repeat(256);
    let error = fs::write(doors.world.path(&longer), "x").expect_err("too long");
    assert_eq!(error.raw_os_error(), Some(ENAMETOOLONG));
    let refused = nfs.open(&root, longer.as_bytes(), true);
    assert_eq!(refused.err(), Some(NFS4ERR_NAMETOOLONG));
    let refused = smb.open(&longer, Disposition::OpenIf);
    assert!(
        matches!(refused, Err(Status(NO_NAME | NOT_FOUND))),
        "{refused:?}"
    );
    // A name short enough in characters, but too long in bytes.
    let refused = smb.open(&format!("{wide}\u{6620}"), Disposition::OpenIf);
    assert!(refused.is_err(), "258 bytes");
    // An SMB client makes a file with the longest name.
    let made = format!("{}.mov", "m".repeat(251));
    let (file, _) = smb.open(&made, Disposition::OpenIf).expect("made");
    smb.write(file, 0, &pattern::bytes(99, 0, 5000))
        .expect("written");
    smb.close(file).expect("closed");
    let handle = nfs.lookup(&root, made.as_bytes()).expect("there");
    let found = nfs.read_closed(&handle, 0, 5000).expect("read");
    pattern::check(99, 0, &found, "by NFS");
    for name in all().copied().chain([made.as_bytes()]) {
        nfs.remove(&root, name).expect("removed");
    }
    assert!(smb.names().expect("listed").is_empty());
    doors.nothing_is_left();
}

fn set_modified(path: &Path, (seconds, nanoseconds): (i64, u32)) {
    let time = Timespec {
        tv_sec: seconds,
        tv_nsec: i64::from(nanoseconds),
    };
    let times = Timestamps {
        last_access: time,
        last_modification: time,
    };
    let folder = rustix::fs::CWD;
    let flags = rustix::fs::AtFlags::empty();
    rustix::fs::utimensat(folder, path, &times, flags).expect("ours");
}

/// A time as SMB sends it. Units: 100 ns since 1601.
fn windows_time((seconds, nanoseconds): (i64, u32)) -> u64 {
    let since_1601 = u64::try_from(seconds + 11_644_473_600).expect("since 1601");
    since_1601 * 10_000_000 + u64::from(nanoseconds / 100)
}

#[test]
fn times_far_ahead_and_running_backwards_are_the_same_at_every_door_and_hide_no_byte() {
    let Some(mut doors) = Doors::open(&documented(), &[]) else {
        return;
    };
    let (mut nfs, root) = doors.nfs("times");
    let smb = doors.smb();
    doors.put("clip.mov", 0);
    let path = doors.world.path("clip.mov");
    let handle = nfs.lookup(&root, b"clip.mov").expect("there");
    let now = fs::metadata(&path).expect("known").mtime();
    // Far ahead, then ever further back; ext4 has times from 1901 to 2446 only.
    let times = [
        (15_000_000_000, 999_999_900),
        (4_294_967_296, 0),
        (2_147_483_648, 100),
        (now - 3600, 500),
        (1, 0),
        (-1, 999_999_900),
        (-2_000_000_000, 300),
    ];
    for (round, time) in times.into_iter().enumerate() {
        match round % 3 {
            0 => set_modified(&path, time),
            1 => nfs.set_modified(&handle, time).expect("set"),
            _ => {
                let (file, _) = smb.open("clip.mov", Disposition::Open).expect("opened");
                smb.set_written(file, windows_time(time)).expect("set");
                smb.close(file).expect("closed");
            }
        }
        let known = fs::metadata(&path).expect("known");
        assert_eq!((known.mtime(), known.mtime_nsec() as u32), time, "{round}");
        assert_eq!(nfs.modified(&handle), Ok(time), "{round}");
        // While an SMB client has the file open, smbd shows the time of that open, also after
        // changes by other doors.
        let (file, info) = smb.open("clip.mov", Disposition::Open).expect("opened");
        assert_eq!(info.written, windows_time(time), "{round}");
        let info = smb.list("clip.mov").expect("listed").expect("there");
        assert_eq!(info.written, windows_time(time), "{round}");
        // Every door sees new bytes also where the file's time does not move, or moves back.
        let bytes = pattern::bytes(100 + round as u64, 0, 1000);
        match round % 2 {
            0 => doors.local("clip.mov").write_all_at(&bytes, 0),
            _ => File::options()
                .write(true)
                .truncate(true)
                .open(&path)
                .and_then(|file| file.write_all_at(&bytes, 0)),
        }
        .expect("written");
        set_modified(&path, time);
        let found = nfs.read_closed(&handle, 0, 1000).expect("read");
        assert!(found == bytes, "{round}: NFS has old bytes");
        assert!(smb.read(file, 0, 1000).expect("read") == bytes, "{round}");
        assert!(fs::read(&path).expect("read")[..1000] == bytes, "{round}");
        smb.close(file).expect("closed");
    }
    let last = *times.last().expect("some");
    // A rescue goes by the order of the log of names, not by times: the last name and time count.
    for (number, time) in times.into_iter().enumerate() {
        let to = doors.world.path(format!("renamed {number}"));
        let from = if number == 0 {
            path.clone()
        } else {
            doors.world.path(format!("renamed {}", number - 1))
        };
        fs::rename(from, &to).expect("renamed");
        set_modified(&to, time);
        // The mount writes the log once a second.
        std::thread::sleep(Duration::from_millis(400));
    }
    let name = format!("renamed {}", times.len() - 1);
    let before = fs::read(doors.world.path(&name)).expect("read");
    std::thread::sleep(Duration::from_millis(1500));
    doors.export.end();
    drop(doors.smbd);
    doors.world.end();
    doors.world.lose_catalogue();
    let members = [0, 1].map(|number| doors.world.member(number).join("pool"));
    let rescued = doors
        .world
        .command(&["rescue"], &members)
        .output()
        .expect("rushes starts");
    assert!(rescued.status.success(), "{rescued:?}");
    doors.world.start();
    let names: Vec<_> = fs::read_dir(doors.world.path(""))
        .expect("listed")
        .flatten()
        .map(|entry| entry.file_name())
        .filter(|name| name != "lost+found")
        .collect();
    assert_eq!(names, [OsStr::new(&name)]);
    let known = fs::metadata(doors.world.path(&name)).expect("known");
    assert_eq!((known.mtime(), known.mtime_nsec() as u32), last);
    assert!(fs::read(doors.world.path(&name)).expect("read") == before);
}

/// A stub's layout, as root reads it in the catalogue.
fn record(doors: &Doors, name: &str) -> Vec<u8> {
    let stub = doors.world.catalogue().join("tree").join(name);
    let output = Command::new(needs::path_of("getfattr"))
        .args(["-n", "trusted.rushes.layout", "-e", "hex", "--only-values"])
        .args(["--absolute-names"])
        .arg(stub)
        .output()
        .expect("it starts");
    assert!(output.status.success(), "{output:?}");
    output.stdout
}

#[test]
fn layouts_are_neither_seen_nor_set_by_smb_and_nfs_whatever_they_are_called() {
    let Some(doors) = Doors::open(&documented(), &[]) else {
        return;
    };
    doors.put("a.mov", 1);
    doors.put("b.mov", 2);
    let before = record(&doors, "a.mov");
    let forged = record(&doors, "b.mov");
    assert_ne!(before, forged);
    let names = [
        "trusted.rushes.layout",
        "rushes.layout",
        "TRUSTED.RUSHES.LAYOUT",
        "user.trusted.rushes.layout",
        "trusted.rushes.object",
        "trusted.rushes.inode",
        "../trusted.rushes.layout",
    ];
    let smb = doors.smb();
    let (file, _) = smb.open("a.mov", Disposition::Open).expect("opened");
    let (mut nfs, root) = doors.nfs("forger");
    let handle = nfs.lookup(&root, b"a.mov").expect("there");
    let mut extended = Extended::connect(doors.export.port, "forger").expect("NFSv4.2");
    // SMB sets an attribute of a user; so it can only refuse those below for their names. Ganesha
    // 4.3 passes on no attribute at all.
    smb.set_attribute(file, "colour", b"blue").expect("set");
    let seen = smb.attributes(file).expect("listed");
    assert_eq!(seen, [(String::from("colour"), b"blue".to_vec())]);
    assert_eq!(extended.get(&handle, "colour"), Err(NFS4ERR_NOTSUPP));
    for name in names {
        // May succeed: as an attribute of users, beside many others, but not as the layout.
        let _ = smb.set_attribute(file, name, &forged);
        let _ = extended.set(&handle, name, &forged);
        let stream = format!("a.mov:{name}");
        if let Ok((stream, _)) = smb.open(&stream, Disposition::OpenIf) {
            let _ = smb.write(stream, 0, &forged);
            smb.close(stream).expect("closed");
        }
        assert!(record(&doors, "a.mov") == before, "{name} is the record");
    }
    let seen = smb.attributes(file).expect("listed");
    assert!(
        seen.iter().all(|(_, value)| *value != before),
        "SMB shows the record: {seen:?}"
    );
    for name in extended.names(&handle).unwrap_or_default() {
        let value = extended.get(&handle, &name).unwrap_or_default();
        assert!(value != before, "NFS shows the record as {name}");
    }
    for name in names {
        let value = extended.get(&handle, name).unwrap_or_default();
        assert!(value != before, "NFS gives the record as {name}");
        let _ = extended.remove(&handle, name);
        let _ = smb.set_attribute(file, name, b"");
        assert!(record(&doors, "a.mov") == before, "{name} is the record");
    }
    pool::check(&doors.world.path("a.mov"), 1, FILE_BYTES);
}

#[test]
fn no_link_and_no_path_leads_from_a_door_to_objects_or_the_catalogue() {
    // Also where smb.conf lets links lead out of the share.
    let lines = [
        documented(),
        vec![
            String::from("wide links = yes"),
            String::from("follow symlinks = yes"),
        ],
    ]
    .concat();
    let Some(doors) = Doors::open(&lines, &["allow insecure wide links = yes"]) else {
        return;
    };
    doors.put("a.mov", 1);
    let scratch = doors.world.scratch.path();
    let object = [0, 1]
        .into_iter()
        .flat_map(|member| doors.objects(member))
        .next()
        .expect("a.mov has one");
    let stub = doors.world.catalogue().join("tree/a.mov");
    let places = [
        object.clone(),
        stub.clone(),
        doors.world.catalogue().join("rushes-pool"),
        doors.world.member(0).join("pool/rushes-pool"),
        doors.world.member(0).join("pool/objects"),
    ];
    let smb = doors.smb();
    let (mut nfs, root) = doors.nfs("links");
    for (number, place) in places.iter().enumerate() {
        // A symbolic link leads only where its reader may go, and only root may enter these places.
        let name = format!("link {number}");
        symlink(place, doors.world.path(&name)).expect("made");
        let through = smb.open(&name, Disposition::Open);
        assert!(through.is_err(), "SMB reaches {}", place.display());
        let handle = nfs.lookup(&root, name.as_bytes()).expect("there");
        assert!(nfs.read_closed(&handle, 0, 100).is_err());
        assert!(nfs.open(&root, name.as_bytes(), false).is_err());
        let read = Command::new("setpriv")
            .args(["--reuid=1", "--regid=1", "--clear-groups", "cat"])
            .arg(doors.world.path(&name))
            .output()
            .expect("setpriv comes with util-linux");
        assert!(!read.status.success(), "a user reads {}", place.display());
        // A hard link cannot leave its file system, not even one of root.
        let linked = fs::hard_link(place, doors.world.path("hard"));
        let refused = linked.expect_err("another file system").raw_os_error();
        assert!(
            refused == Some(EXDEV) || place.is_dir() && refused.is_some(),
            "{refused:?}"
        );
        if !place.is_dir() {
            let moved = fs::rename(doors.world.path("a.mov"), place.with_extension("new"));
            let refused = moved.expect_err("another file system").raw_os_error();
            assert_eq!(refused, Some(EXDEV));
        }
        // Paths do not go above the share.
        let below = place.strip_prefix(scratch).expect("it is in there");
        let below = below.display().to_string().replace('/', "\\");
        for path in [
            format!("..\\{below}"),
            format!("a.mov\\..\\..\\{below}"),
            format!(".\\..\\{below}"),
            place.display().to_string().replace('/', "\\"),
        ] {
            assert!(smb.open(&path, Disposition::Open).is_err(), "{path}");
        }
    }
    let (file, _) = smb.open("a.mov", Disposition::Open).expect("opened");
    for name in ["..\\stolen", "..\\catalogue\\pool\\tree\\stolen"] {
        assert!(smb.link(file, name).is_err(), "{name}");
        assert!(smb.rename(file, name).is_err(), "{name}");
    }
    for name in [&b".."[..], b"../catalogue", b"."] {
        assert!(nfs.lookup(&root, name).is_err());
        assert!(nfs.rename(&root, b"a.mov", name).is_err());
    }
    assert!(!scratch.join("stolen").exists());
    // A user may look neither at members nor at the catalogue.
    for folder in [
        doors.world.member(0).join("pool/objects"),
        doors.world.catalogue().join("tree"),
        doors.world.catalogue(),
    ] {
        let mode = fs::metadata(&folder).expect("root may look").mode();
        let above = fs::metadata(folder.parent().expect("there is one")).expect("root may look");
        assert!(
            mode & 0o077 == 0 || above.mode() & 0o077 == 0,
            "{}: mode {mode:o}",
            folder.display()
        );
    }
    pool::check(&doors.world.path("a.mov"), 1, FILE_BYTES);
    run(Command::new("ls").arg(doors.world.path("")));
}
