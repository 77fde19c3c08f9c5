// SPDX-License-Identifier: Apache-2.0
//! A pool by NFS, through Debian's Ganesha: both directions, names, long folders that change,
//! restarts, locks, and files that no client may reach.

use rushes_tests::disk::run;
use rushes_tests::export::{self, Export, GRACE_S, NFS};
use rushes_tests::needs;
use rushes_tests::nfs4::{
    Handle, NFS4ERR_BADHANDLE, NFS4ERR_DENIED, NFS4ERR_GRACE, NFS4ERR_IO, NFS4ERR_STALE, Nfs4, Open,
};
use rushes_tests::pattern;
use rushes_tests::pool::{EXT4, PoolWorld};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Read;
use std::net::IpAddr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;

fn world(members: &[rushes_tests::pool::Made]) -> Option<PoolWorld> {
    if !needs::all_there(NFS) {
        return None;
    }
    PoolWorld::build(members)
}

/// The output of a tool.
fn printed(program: &str, words: &[&str]) -> Vec<u8> {
    let output = Command::new(needs::path_of(program))
        .args(words)
        .output()
        .expect("it starts");
    assert!(output.status.success(), "{program} {words:?}: {output:?}");
    output.stdout
}

fn made(nfs: &mut Nfs4, folder: &Handle, name: &[u8], seed: u64, length: usize) -> Open {
    let open = nfs.open(folder, name, true).expect("made");
    for at in (0..length).step_by(MIB / 2) {
        let bytes = pattern::bytes(seed, at as u64, (MIB / 2).min(length - at));
        nfs.write(&open, at as u64, &bytes).expect("written");
    }
    open
}

fn put(world: &PoolWorld, name: &str, seed: u64, length: usize) {
    fs::write(world.path(name), pattern::bytes(seed, 0, length)).expect("there is room");
}

/// Opens a file, after the grace period: in it only files open before a restart may be opened.
fn opened(nfs: &mut Nfs4, folder: &Handle, name: &[u8]) -> Open {
    let end = Instant::now() + Duration::from_secs(GRACE_S * 4 + 10);
    loop {
        match nfs.open(folder, name, false) {
            Err(NFS4ERR_GRACE) if Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(100));
            }
            opened => return opened.unwrap_or_else(|status| panic!("{name:?}: {status:?}")),
        }
    }
}

#[test]
fn what_one_door_writes_the_other_reads_under_any_name() {
    let Some(world) = world(&[(EXT4, 100), (EXT4, 100)]) else {
        return;
    };
    let export = Export::nfs(&world);
    let mut nfs = Nfs4::connect(export.port, "both", 1);
    let root = nfs.root("media").expect("exported");
    let long = vec![b'n'; 255];
    let names: [&[u8]; 5] = [b"plain.mov", b"a\xff\xfe.mov", b"line\nend", &long, b" "];
    for (seed, name) in names.iter().enumerate() {
        let open = made(&mut nfs, &root, name, seed as u64, 2 * MIB + 17);
        nfs.close(open).expect("closed");
        let found = fs::read(world.path(OsStr::from_bytes(name))).expect("through the mount");
        assert_eq!(found.len(), 2 * MIB + 17);
        pattern::check(seed as u64, 0, &found, "by NFS");
    }
    nfs.make(&root, b"made\nby nfs", None).expect("made");
    let inside = nfs.lookup(&root, b"made\nby nfs").expect("there");
    nfs.make(&inside, b"link\xff", Some(b"../plain.mov"))
        .expect("made");
    let link = world.path(OsStr::from_bytes(b"made\nby nfs/link\xff"));
    assert_eq!(
        fs::read_link(&link).expect("a link").as_os_str(),
        "../plain.mov"
    );
    // The other direction, by libnfs's own tools.
    put(&world, "mounted.mov", 9, 3 * MIB + 5);
    let text = printed("nfs-cat", &[&export.url("/mounted.mov")]);
    assert_eq!(text.len(), 3 * MIB + 5);
    pattern::check(9, 0, &text, "through the mount");
    let listed = printed("nfs-ls", &[&export.url("")]);
    for name in names.iter().chain([&b"mounted.mov".as_slice()]) {
        let there = listed.windows(name.len()).any(|found| found == *name);
        assert!(there, "nfs-ls does not show {:?}", OsStr::from_bytes(name));
    }
    // A change through one door is seen at the other at once, although that has just looked.
    let file = nfs.lookup(&root, b"mounted.mov").expect("there");
    for round in 1..20u64 {
        let size = 4096 * round;
        let open = File::options()
            .write(true)
            .open(world.path("mounted.mov"))
            .expect("opened");
        open.set_len(size).expect("cut");
        open.write_all_at(&round.to_le_bytes(), 0).expect("written");
        assert_eq!(nfs.known(&file).expect("known").size, size);
        let bytes = nfs.read_closed(&file, 0, 8).expect("read");
        assert_eq!(bytes, round.to_le_bytes());
        let name = format!("new{round}");
        fs::write(world.path(&name), "x").expect("written");
        assert!(nfs.lookup(&root, name.as_bytes()).is_ok(), "{name}");
        let names = nfs.list(&root, 8192, || {}).expect("listed");
        assert!(names.contains(&name.clone().into_bytes()), "{name}");
        nfs.rename(&root, name.as_bytes(), b"renamed")
            .expect("done");
        assert!(!world.path(&name).exists() && world.path("renamed").exists());
        fs::remove_file(world.path("renamed")).expect("removed");
        assert!(nfs.lookup(&root, b"renamed").is_err());
    }
    let number = fs::metadata(world.path("mounted.mov"))
        .expect("known")
        .ino();
    assert_eq!(nfs.known(&file).expect("known").number, number);
    export.end();
}

#[test]
fn a_long_folder_that_changes_is_listed_whole_and_without_doubles() {
    let Some(world) = world(&[(EXT4, 64)]) else {
        return;
    };
    let folder = world.path("d");
    fs::create_dir(&folder).expect("made");
    let stays: BTreeSet<Vec<u8>> = (0..10_000)
        .map(|number| format!("stays {number:05}").into_bytes())
        .collect();
    for name in &stays {
        File::create(folder.join(OsStr::from_bytes(name))).expect("made");
    }
    let export = Export::nfs(&world);
    let mut nfs = Nfs4::connect(export.port, "list", 1);
    let root = nfs.root("media").expect("exported");
    let handle = nfs.lookup(&root, b"d").expect("there");
    for bytes_max in [2000, 32_768] {
        let (mut serial, mut page_count) = (0u64, 0);
        let at = |what: &str, serial: u64| folder.join(format!("{what} {serial}"));
        let names = nfs
            .list(&handle, bytes_max, || {
                // Make, rename and remove files between two pages, so that every page meets another
                // folder.
                page_count += 1;
                for _ in 0..20 {
                    serial += 1;
                    File::create(at("comes", serial)).expect("made");
                    if serial > 20 {
                        let (old, new) = (at("comes", serial - 20), at("renamed", serial - 20));
                        fs::rename(old, new).expect("renamed");
                    }
                    if serial > 40 {
                        fs::remove_file(at("renamed", serial - 40)).expect("removed");
                    }
                }
            })
            .expect("listed");
        assert!(page_count > 9, "only {page_count} pages");
        // The folder was empty of them at first: a later page has met the changes before it.
        for what in [&b"comes "[..], b"renamed "] {
            let is_met = names.iter().any(|name| name.starts_with(what));
            assert!(is_met, "{page_count} pages show no change: {what:?}");
        }
        let mut counts: BTreeMap<&[u8], u32> = BTreeMap::new();
        for name in &names {
            *counts.entry(name).or_default() += 1;
        }
        let twice: Vec<_> = counts.iter().filter(|(_, count)| **count > 1).collect();
        assert!(twice.is_empty(), "listed twice: {twice:?}");
        let missing: Vec<_> = stays
            .iter()
            .filter(|name| !counts.contains_key(name.as_slice()))
            .collect();
        assert!(missing.is_empty(), "not listed: {missing:?}");
        for left in serial - 39..=serial {
            let what = if left > serial - 20 {
                "comes"
            } else {
                "renamed"
            };
            fs::remove_file(at(what, left)).expect("removed");
        }
    }
    // A cookie is valid after a restart of Ganesha and the mount, too.
    let first = nfs.page(&handle, 0, [0; 8], 8192).expect("listed");
    let (cookie, verifier) = (first.names.last().expect("some").0, first.verifier);
    drop(export);
    let mut world = world;
    world.kill();
    world.start();
    let export = Export::nfs(&world);
    let mut nfs = Nfs4::connect(export.port, "list", 2);
    let root = nfs.root("media").expect("exported");
    let handle = nfs.lookup(&root, b"d").expect("there");
    let mut found: Vec<Vec<u8>> = first.names.into_iter().map(|(_, name)| name).collect();
    let (mut cookie, mut verifier) = (cookie, verifier);
    loop {
        let page = nfs.page(&handle, cookie, verifier, 8192).expect("listed");
        verifier = page.verifier;
        for (next, name) in page.names {
            cookie = next;
            found.push(name);
        }
        if page.is_last {
            break;
        }
    }
    let count = found.len();
    let found: BTreeSet<Vec<u8>> = found.into_iter().collect();
    assert_eq!((found.len(), count), (10_000, 10_000));
    assert_eq!(found, stays);
}

/// The number by which Ganesha's handles name the mount. The kernel gives the lowest free one.
fn device(world: &PoolWorld) -> u64 {
    fs::metadata(world.path("")).expect("mounted").dev()
}

/// Handles of files, folders and links in the pool that a client keeps.
struct Kept {
    reel: Handle,
    take: Open,
    empty: Handle,
    link: Handle,
    mounted: Handle,
    plain: Handle,
}

impl Kept {
    fn new(nfs: &mut Nfs4) -> Kept {
        let root = nfs.root("media").expect("exported");
        let reel = nfs.lookup(&root, b"reel").expect("there");
        Kept {
            take: opened(nfs, &reel, b"take.mov"),
            empty: nfs.lookup(&reel, b"empty").expect("there"),
            link: nfs.lookup(&reel, b"link").expect("there"),
            mounted: nfs.lookup(&reel, b"mounted").expect("there"),
            plain: nfs.lookup(&root, b"plain.mov").expect("there"),
            reel,
        }
    }

    /// After a restart a client that looked up nothing reclaims its open files; until then Ganesha
    /// refuses all other opens.
    fn are_good(&mut self, nfs: &mut Nfs4, what: &str) {
        let refused = nfs.open(&self.reel, b"take.mov", false);
        assert_eq!(refused.err(), Some(NFS4ERR_GRACE), "{what}");
        self.take = nfs
            .reclaim(&self.take)
            .unwrap_or_else(|status| panic!("{what}: not claimed: {status:?}"));
        let bytes = nfs.read(&self.take, 0, 65_536).expect("read");
        pattern::check(1, 0, &bytes, "take.mov");
        let at = 3 * MIB as u64 - 4096;
        nfs.write(&self.take, at, &pattern::bytes(1, at, 4096))
            .expect("written");
        assert_eq!(nfs.known(&self.empty).map(|known| known.size), Ok(0));
        assert_eq!(nfs.read_link(&self.link), Ok(b"take.mov".to_vec()));
        assert_eq!(nfs.read_link(&self.mounted), Ok(b"elsewhere".to_vec()));
        let bytes = loop {
            // A read of a file that is not open waits for the end of the grace period, too.
            match nfs.read_closed(&self.plain, 0, 65_536) {
                Err(NFS4ERR_GRACE) => std::thread::sleep(Duration::from_millis(100)),
                read => break read.expect("read"),
            }
        };
        pattern::check(2, 0, &bytes, "plain.mov");
        let again = opened(nfs, &self.reel, b"empty");
        assert_eq!(again.handle, self.empty, "{what}");
        nfs.close(again).expect("closed");
    }
}

#[test]
fn handles_and_open_files_are_good_after_ganesha_and_the_mount_were_started_again() {
    let Some(mut world) = world(&[(EXT4, 100), (EXT4, 100)]) else {
        return;
    };
    let mut export = Export::nfs(&world);
    let mut nfs = Nfs4::connect(export.port, "again", 1);
    let root = nfs.root("media").expect("exported");
    nfs.make(&root, b"reel", None).expect("made");
    let reel = nfs.lookup(&root, b"reel").expect("there");
    let take = made(&mut nfs, &reel, b"take.mov", 1, 3 * MIB);
    nfs.close(take).expect("closed");
    let empty = nfs.open(&reel, b"empty", true).expect("made");
    nfs.close(empty).expect("closed");
    nfs.make(&reel, b"link", Some(b"take.mov")).expect("made");
    symlink("elsewhere", world.path("reel/mounted")).expect("made");
    put(&world, "plain.mov", 2, MIB);
    run(Command::new("sync").arg("-f").arg(world.path("")));
    let mut kept = Kept::new(&mut nfs);
    for round in [
        "the mount's process died",
        "all was stopped and started",
        "Ganesha died",
    ] {
        let before = device(&world);
        match round {
            // Ganesha's keeper stops it, and starts it again with the mount.
            "the mount's process died" => {
                world.kill();
                assert!(export.says("waiting"), "{}", export.log());
                world.start();
                assert!(export.says("serving"), "{}", export.log());
            }
            "all was stopped and started" => {
                export.end();
                world.end();
                world.start();
                export = Export::nfs(&world);
            }
            // Ganesha's keeper says so and ends, for systemd to start it again.
            _ => {
                run(Command::new("kill")
                    .arg("-KILL")
                    .arg(export.server().to_string()));
                assert_eq!(export.wait().code(), Some(2), "{}", export.log());
                export = Export::nfs(&world);
            }
        }
        nfs = Nfs4::connect(export.port, "again", 1);
        if device(&world) == before {
            kept.are_good(&mut nfs, round);
        } else {
            // Another mount took the number; the log says that clients have to mount again.
            assert_eq!(nfs.known(&kept.plain).err(), Some(NFS4ERR_STALE));
            assert!(export.log().contains("a new device number"), "{round}");
            kept = Kept::new(&mut nfs);
        }
    }
    let mut found = Vec::new();
    File::open(world.path("reel/take.mov"))
        .and_then(|mut file| file.read_to_end(&mut found))
        .expect("read");
    assert_eq!(found.len(), 3 * MIB);
    pattern::check(1, 0, &found, "take.mov");
    // A handle of a removed file is stale as soon as Ganesha has closed the file that it read last.
    fs::remove_file(world.path("plain.mov")).expect("removed");
    let end = Instant::now() + Duration::from_secs(60);
    while nfs.known(&kept.plain).err() != Some(NFS4ERR_STALE) {
        assert!(Instant::now() < end, "it keeps what was removed");
        std::thread::sleep(Duration::from_millis(200));
    }
}

#[test]
fn a_mount_with_another_device_number_is_said_and_old_handles_are_stale() {
    let Some(mut world) = world(&[(EXT4, 64)]) else {
        return;
    };
    put(&world, "a.mov", 1, MIB);
    let export = Export::nfs(&world);
    let mut nfs = Nfs4::connect(export.port, "number", 1);
    let root = nfs.root("media").expect("exported");
    let a = nfs.lookup(&root, b"a.mov").expect("there");
    let before = device(&world);
    export.end();
    world.end();
    // Another mount takes the number meanwhile, as may happen at a reboot.
    for other in 0.. {
        assert!(other < 50, "it gets the same number for ever");
        run(Command::new("mount")
            .args(["-t", "tmpfs", "tmpfs"])
            .arg(world.scratch.folder(&format!("other{other}"))));
        world.start();
        if device(&world) != before {
            break;
        }
        world.end();
    }
    let export = Export::nfs(&world);
    assert!(export.log().contains("a new device number"));
    let mut nfs = Nfs4::connect(export.port, "number", 2);
    assert_eq!(nfs.known(&a).err(), Some(NFS4ERR_STALE));
    let root = nfs.root("media").expect("whoever mounts it again has it");
    let a = nfs.lookup(&root, b"a.mov").expect("there");
    let bytes = nfs.read_closed(&a, 0, 65_536).expect("read");
    pattern::check(1, 0, &bytes, "a.mov");
}

#[test]
fn who_writes_while_the_mount_dies_claims_his_file_and_has_lost_nothing() {
    let Some(mut world) = world(&[(EXT4, 200)]) else {
        return;
    };
    let mut export = Export::nfs(&world);
    let port = export.port;
    let mut nfs = Nfs4::connect(port, "writer", 1);
    let root = nfs.root("media").expect("exported");
    let mut open = nfs.open(&root, b"ingest.mov", true).expect("made");
    let written = Arc::new(AtomicU64::new(0));
    let (count, (back, is_back)) = (Arc::clone(&written), mpsc::channel());
    const PIECE: usize = 64 * 1024;
    const PIECES: u64 = 300;
    let writer = std::thread::spawn(move || {
        let mut heard = Vec::new();
        // However fast it is, it writes until it was interrupted twice.
        while heard.len() < 2 || count.load(Ordering::Acquire) < PIECES {
            let at = count.load(Ordering::Acquire) % PIECES * PIECE as u64;
            match nfs.write(&open, at, &pattern::bytes(1, at, PIECE)) {
                Ok(()) => {
                    count.fetch_add(1, Ordering::AcqRel);
                }
                Err(NFS4ERR_GRACE) => std::thread::sleep(Duration::from_millis(100)),
                Err(status) => {
                    heard.push(status);
                    is_back.recv().expect("it comes back");
                    nfs = Nfs4::connect(port, "writer", 1);
                    open = match nfs.reclaim(&open) {
                        // Another mount took the device number.
                        Err(NFS4ERR_STALE) => {
                            let root = nfs.root("media").expect("exported");
                            opened(&mut nfs, &root, b"ingest.mov")
                        }
                        open => open.expect("claimed"),
                    };
                }
            }
        }
        heard
    });
    for (round, at) in [60, 180].into_iter().enumerate() {
        let end = Instant::now() + Duration::from_secs(120);
        while written.load(Ordering::Acquire) < at {
            assert!(Instant::now() < end, "it does not go on");
            std::thread::sleep(Duration::from_millis(2));
        }
        // The second time the mount ends cleanly, with Ganesha in it.
        if round == 0 {
            world.kill();
        } else {
            world.end();
        }
        assert!(export.says("waiting"), "{}", export.log());
        world.start();
        assert!(export.says("serving"), "{}", export.log());
        back.send(()).expect("it waits");
    }
    let heard = writer.join().expect("it went on to the end");
    assert_eq!(heard.len(), 2, "one trouble each: {heard:?}");
    eprintln!("the writer heard {heard:?} (Status(0): the connection ended)");
    let found = fs::read(world.path("ingest.mov")).expect("read");
    assert_eq!(found.len() as u64, PIECES * PIECE as u64);
    pattern::check(1, 0, &found, "ingest.mov");
}

/// A copy of a handle with another node: its number, and its generation behind that.
fn with_node(handle: &Handle, from: (u64, u32), to: (u64, u32)) -> Option<Handle> {
    let words = |(number, generation): (u64, u32)| {
        let mut words = (number as u32).to_le_bytes().to_vec();
        // FILEID_INO64_GEN as FUSE has it: upper half, lower half, generation.
        words.splice(0..0, ((number >> 32) as u32).to_le_bytes());
        words.extend(generation.to_le_bytes());
        words
    };
    let (from, to) = (words(from), words(to));
    let at = handle.windows(12).position(|found| found == from)?;
    let mut forged = handle.clone();
    forged[at..at + 12].copy_from_slice(&to);
    Some(forged)
}

/// Inode number, and the generation as the mount makes it from an ext4 handle.
fn node_of(path: &std::path::Path) -> (u64, u32) {
    let number = fs::symlink_metadata(path).expect("there").ino();
    let text = printed("lsattr", &["-vd", &path.display().to_string()]);
    let text = String::from_utf8_lossy(&text).into_owned();
    let generation: u32 = text
        .split_whitespace()
        .next()
        .and_then(|word| word.parse().ok())
        .unwrap_or_else(|| panic!("{text}"));
    (number, generation ^ number as u32)
}

#[test]
fn handles_that_a_client_makes_up_reach_nothing_but_the_tree() {
    let Some(mut world) = world(&[(EXT4, 64)]) else {
        return;
    };
    put(&world, "a.mov", 1, MIB);
    put(&world, "b.mov", 2, MIB);
    fs::create_dir(world.path("d")).expect("made");
    let catalogue = world.catalogue();
    let above = catalogue.parent().expect("its file system").to_path_buf();
    // Files that are not the pool's, on the catalogue's file system.
    fs::create_dir(above.join("private")).expect("made");
    fs::write(above.join("private/secret"), "secret").expect("written");
    let victims = [
        above.clone(),
        above.join("private"),
        above.join("private/secret"),
        catalogue.clone(),
        catalogue.join("rushes-pool"),
        catalogue.join("numbers"),
        catalogue.join("removed"),
    ];
    let mut export = Export::nfs(&world);
    let mut nfs;
    let real = node_of(&catalogue.join("tree/a.mov"));
    let other = node_of(&catalogue.join("tree/b.mov"));
    let folder = node_of(&catalogue.join("tree/d"));
    // The forged handle has the right format: with another file's node it is that file, also when
    // no client looked that up.
    world.kill();
    assert!(export.says("waiting"));
    world.start();
    assert!(export.says("serving"), "{}", export.log());
    nfs = Nfs4::connect(export.port, "forger", 2);
    let root = nfs.root("media").expect("exported");
    let a = nfs.lookup(&root, b"a.mov").expect("there");
    let known = |nfs: &mut Nfs4, handle: &Handle| nfs.known(handle).map(|known| known.number);
    let forged = with_node(&a, real, other).expect("the node stands in the handle");
    assert_eq!(known(&mut nfs, &forged), Ok(other.0));
    let forged = with_node(&a, real, folder).expect("as before");
    assert_eq!(known(&mut nfs, &forged), Ok(folder.0));
    for victim in &victims {
        let node = node_of(victim);
        let forged = with_node(&a, real, node).expect("as before");
        let status = known(&mut nfs, &forged);
        assert!(
            matches!(status, Err(NFS4ERR_STALE | NFS4ERR_BADHANDLE)),
            "{} is reached: {status:?}",
            victim.display()
        );
        assert!(nfs.read_closed(&forged, 0, 100).is_err());
        assert!(nfs.list(&forged, 8192, || {}).is_err());
    }
    // A wrong generation names an earlier file with that number.
    let forged = with_node(&a, real, (other.0, other.1 ^ 1)).expect("as before");
    assert_eq!(known(&mut nfs, &forged), Err(NFS4ERR_STALE));
    // Named attributes cannot be seen, and no name leads out of the tree.
    assert!(nfs.named_attributes(&a).is_err());
    assert!(nfs.lookup(&root, b"..").is_err());
    let names = nfs.list(&root, 8192, || {}).expect("listed");
    assert_eq!(names.len(), 3, "{names:?}");
}

#[test]
fn a_member_that_is_away_is_an_error_at_once_and_only_of_its_files() {
    let Some(world) = world(&[(EXT4, 60), (EXT4, 120)]) else {
        return;
    };
    put(&world, "on1.mov", 1, 70 * MIB);
    put(&world, "on0.mov", 2, 5 * MIB);
    assert_eq!(world.members_of("on1.mov"), [1]);
    assert_eq!(world.members_of("on0.mov"), [0]);
    let export = Export::nfs(&world);
    let mut nfs = Nfs4::connect(export.port, "away", 1);
    let root = nfs.root("media").expect("exported");
    world.unplug(1);
    rushes_tests::caches::drop("3");
    let begun = Instant::now();
    let away = nfs.lookup(&root, b"on1.mov").expect("its name is there");
    assert_eq!(nfs.known(&away).expect("known").size, 70 * MIB as u64);
    assert_eq!(nfs.read_closed(&away, 0, 4096), Err(NFS4ERR_IO));
    assert!(begun.elapsed() < Duration::from_secs(5), "at once");
    let there = nfs.lookup(&root, b"on0.mov").expect("there");
    let bytes = nfs.read_closed(&there, 0, 65_536).expect("not touched");
    pattern::check(2, 0, &bytes, "on0.mov");
    let new = made(&mut nfs, &root, b"new.mov", 3, 2 * MIB);
    nfs.close(new).expect("closed");
    assert_eq!(world.members_of("new.mov"), [0]);
    world.plug(1, "loop");
    let bytes = nfs.read_closed(&away, 0, 65_536).expect("it is back");
    pattern::check(1, 0, &bytes, "on1.mov");
}

#[test]
fn locks_hold_between_doors_and_an_open_file_outlives_its_name() {
    let Some(world) = world(&[(EXT4, 64)]) else {
        return;
    };
    let export = Export::nfs(&world);
    let mut nfs = Nfs4::connect(export.port, "locks", 1);
    let root = nfs.root("media").expect("exported");
    let mut open = made(&mut nfs, &root, b"project.prproj", 1, 100_000);
    let local = File::options()
        .read(true)
        .write(true)
        .open(world.path("project.prproj"))
        .expect("opened");
    let lock = |operation| rustix::fs::fcntl_lock(&local, operation);
    lock(rustix::fs::FlockOperation::NonBlockingLockExclusive).expect("nobody has it");
    assert_eq!(nfs.lock(&mut open, 0, 100), Err(NFS4ERR_DENIED));
    lock(rustix::fs::FlockOperation::Unlock).expect("ours");
    let ours = nfs.lock(&mut open, 0, 100).expect("nobody has it");
    assert!(lock(rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err());
    let mut again = Nfs4::connect(export.port, "somebody else", 1);
    let mut theirs = again.open(&root, b"project.prproj", false).expect("opened");
    assert_eq!(again.lock(&mut theirs, 50, 10), Err(NFS4ERR_DENIED));
    let other = again.lock(&mut theirs, 200, 10).expect("nobody has it");
    again.unlock(&theirs, other).expect("theirs");
    nfs.unlock(&open, ours).expect("ours");
    lock(rustix::fs::FlockOperation::NonBlockingLockExclusive).expect("nobody has it");
    // One door renames over the file, the other removes it; it is open all the while.
    let over = made(&mut nfs, &root, b"over", 2, 100_000);
    fs::rename(world.path("project.prproj"), world.path("over")).expect("renamed over it");
    let bytes = nfs.read(&over, 0, 65_536).expect("it is open");
    pattern::check(2, 0, &bytes, "over");
    nfs.remove(&root, b"over").expect("removed");
    assert!(!world.path("over").exists());
    let bytes = again.read(&theirs, 0, 65_536).expect("it is open");
    pattern::check(1, 0, &bytes, "project.prproj");
    nfs.write(&open, 100_000, &pattern::bytes(1, 100_000, 1000))
        .expect("it is open");
    let mut bytes = vec![0; 1000];
    local
        .read_exact_at(&mut bytes, 100_000)
        .expect("it is open");
    pattern::check(1, 100_000, &bytes, "project.prproj");
    for (client, open) in [(&mut again, theirs), (&mut nfs, open)] {
        client.close(open).expect("closed");
    }
    nfs.close(over).expect("closed");
    drop(local);
    // No object of them is left.
    let objects = world.member(0).join("pool/objects");
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        let left = printed("find", &[&objects.display().to_string(), "-type", "f"]);
        if left.is_empty() {
            break;
        }
        assert!(
            Instant::now() < end,
            "objects that nobody names: {}",
            String::from_utf8_lossy(&left)
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn nobody_is_let_in_who_was_not_named() {
    let Some(world) = world(&[(EXT4, 64)]) else {
        return;
    };
    let folder = world.path("").display().to_string();
    let said = |words: &[&str]| {
        let output = export::export(&world, words);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let open = said(&["nfs", &folder, "--listen", "0.0.0.0"]);
    assert!(open.contains("--client"), "{open}");
    let strange = said(&["nfs", &folder, "--client", "a; Access_Type = RW"]);
    assert!(strange.contains("is not a client"), "{strange}");
    let elsewhere = said(&["nfs", &world.catalogue().display().to_string()]);
    assert!(elsewhere.contains("no pool that is mounted"), "{elsewhere}");
    let output = export::export(&world, &["nfs", &folder, "--print"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{output:?}");
    for line in [
        "Clients = 127.0.0.1;",
        "Access_Type = NONE;",
        "root_squash",
        "PrivilegedPort = true",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    // Folders of one name get different runtime folders.
    let config = |folder: &str| {
        let folder = world.path(folder);
        fs::create_dir_all(&folder).expect("made");
        let words = ["nfs", &folder.display().to_string(), "--print"];
        let output = export::export(&world, &words);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.lines().next().unwrap_or_default().to_owned()
    };
    let (one, other) = (config("x/media"), config("y/media"));
    assert!(one.contains("/run/rushes/nfs-media-"), "{one}");
    assert_ne!(one, other);
    assert_eq!(one, config("x/media"));
    let export = Export::nfs_with(&world, &["--client", "127.0.0.3", "--read-only"]);
    let from = |last| Nfs4::connect_from(IpAddr::from([127, 0, 0, last]), export.port);
    let mut named = from(3);
    let root = named.root("media").expect("it is named");
    assert_eq!(named.known(&root).expect("known").kind, 2);
    let refused = named.make(&root, b"new", None);
    assert!(refused.is_err(), "it is read-only");
    for last in [1, 2] {
        let mut nobody = from(last);
        assert!(nobody.root("media").is_err(), "127.0.0.{last} is let in");
        assert!(nobody.known(&root).is_err(), "127.0.0.{last} is let in");
    }
    export.end();
    // Without a privileged port any user could claim to be another one.
    for (options, expected) in [(vec![], false), (vec!["--any-port"], true)] {
        let export = Export::nfs_with(&world, &options);
        let root = Nfs4::connect_from_any_port(export.port).root("media");
        assert_eq!(root.is_ok(), expected, "{options:?}: {root:?}");
        let mut as_root = Nfs4::connect_from(IpAddr::from([127, 0, 0, 1]), export.port);
        as_root.root("media").expect("it is named");
        if let Ok(export_root) = root {
            assert_eq!(as_root.known(&export_root).expect("known").kind, 2);
        }
        // A second export cannot use its folders.
        let (runtime, state) = (
            world.scratch.folder("nfs"),
            world.scratch.folder("nfs-state"),
        );
        let (runtime, state) = (runtime.display().to_string(), state.display().to_string());
        let port = rushes_kit::free_port()
            .expect("loopback has a free port")
            .to_string();
        let words = ["nfs", &folder, "--port", &port, "--state-dir", &state];
        let second = said(&[&words[..], &["--runtime-dir", &runtime]].concat());
        assert!(second.contains("in use by another export"), "{second}");
        assert!(second.contains("--state-dir"), "{second}");
        export.end();
    }
    // Root of a client becomes nobody by default, and all users can become one.
    fs::set_permissions(world.path(""), fs::Permissions::from_mode(0o777)).expect("set");
    for (options, owner) in [
        (vec!["--squash", "root"], u32::MAX - 1),
        (vec!["--squash", "all", "--anonymous", "1234:4321"], 1234),
        (vec!["--squash", "none"], 0),
    ] {
        let export = Export::nfs_with(&world, &options);
        let mut nfs = Nfs4::connect_from(IpAddr::from([127, 0, 0, 1]), export.port);
        let root = nfs.root("media").expect("it is named");
        let name = format!("of {owner}");
        nfs.make(&root, name.as_bytes(), None).expect("made");
        let found = fs::metadata(world.path(&name)).expect("known");
        assert_eq!(found.uid(), owner, "{options:?}");
        export.end();
    }
}

/// NFSv3 needs a portmapper, of which a machine has one: both run in a network of their own. The
/// second interface is for getaddrinfo(3), which answers nothing where there is only loopback.
const WITH_NFS3: &str = r#"
set -e
# Copies of other tests' mounts would keep these from ending.
while read -r _ _ _ _ place _ rest; do
    case "$place" in "$3"/*) continue ;; esac
    case "$rest" in *" /dev/loop"*|*"- fuse"*) umount -l "$place" || true ;; esac
done </proc/self/mountinfo
ip link set lo up
ip link add v0 type veth peer name v1
ip addr add 10.99.0.1/24 dev v0
ip link set v0 up
ip link set v1 up
mount -t tmpfs tmpfs /run
rpcbind -f -w &
portmapper=$!
for _ in $(seq 200); do
    if rpcinfo -p 127.0.0.1 >/dev/null 2>&1; then break; fi
    sleep 0.1
done
coproc export { exec "$1" pool export nfs "$2" --name /media --v3 --squash none --grace 2 --port 2049 \
    --runtime-dir "$3/nfs3" --state-dir "$3/nfs3-state"; }
server=$export_PID
trap 'kill $server $portmapper; wait $server' EXIT
read -r said <&"${export[0]}"
echo "$said"
nfs-cp "$3/original" "nfs://127.0.0.1/media/copied?version=3&nfsport=2049&mountport=20048"
nfs-cp "nfs://127.0.0.1/media/mounted?version=3&nfsport=2049&mountport=20048" "$3/back"
"#;

#[test]
fn nfsv3_clients_write_and_read_with_libnfss_own_tools() {
    let programs = ["rpcbind", "rpcinfo", "ip", "unshare", "nfs-cp"].map(needs::Need::Program);
    if !needs::all_there(&programs) {
        return;
    }
    let Some(world) = world(&[(EXT4, 100), (EXT4, 100)]) else {
        return;
    };
    let length = 20 * MIB + 5;
    let scratch = world.scratch.path();
    fs::write(scratch.join("original"), pattern::bytes(1, 0, length)).expect("written");
    put(&world, "mounted", 2, length);
    let output = Command::new(needs::path_of("unshare"))
        .args(["--net", "--mount", "bash", "-c", WITH_NFS3, "nfs3"])
        .arg(needs::path_of("rushes"))
        .arg(world.path(""))
        .arg(scratch)
        .current_dir(scratch)
        .stdin(std::process::Stdio::null())
        .output()
        .expect("it starts");
    let said = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(output.status.success(), "{said}");
    for (seed, path) in [(1, world.path("copied")), (2, scratch.join("back"))] {
        let found = fs::read(&path).expect("it was copied");
        assert_eq!(found.len(), length, "{}: {said}", path.display());
        pattern::check(seed, 0, &found, "nfs-cp");
    }
}
