// SPDX-License-Identifier: Apache-2.0
//! The process that serves a mount is killed, again and again, and programs on the mount wait for
//! the next one: they get no error and no wrong byte.

use rushes_tests::daemon::Daemon;
use rushes_tests::disk::run;
use rushes_tests::export::{Export, NFS};
use rushes_tests::local::Model;
use rushes_tests::needs;
use rushes_tests::nfs4::Nfs4;
use rushes_tests::pattern;
use rushes_tests::pool::{EXT4, Made, PoolWorld, SERVES_AT_LEAST, XFS, check, put};
use rushes_tests::random::Random;
use rushes_tests::stop::StopAtEnd;
use rustix::fs::{
    CWD, FlockOperation, RenameFlags, XattrFlags, flock, getxattr, removexattr, renameat_with,
    setxattr,
};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const ATTRIBUTE: &str = "user.note";
const ENOTCONN: i32 = 107;

fn wish(folder: &Path, words: &str) {
    let name = "user.rushes.policy";
    setxattr(folder, name, words.as_bytes(), XattrFlags::empty()).expect("a wish");
}

/// Nothing is wrong but what each death may leave: an object that was made and got no byte, because
/// nobody has named it yet.
fn assert_sound_after_kills(world: &PoolWorld) {
    let (report, _) = world.json(&["fsck"], &[]);
    for finding in report["findings"].as_array().expect("a list") {
        let sentence = finding["sentence"].as_str().expect("text");
        let is_left = finding["kind"] == "unnamed" && sentence.ends_with("and empty");
        assert!(is_left, "{finding}");
    }
    let (report, code) = world.json(&["fsck", "--repair"], &[]);
    assert_eq!(code, Some(0), "{report}");
    world.assert_sound("after the repair");
}

/// Programs that repeat their work until `stop`, with the count of rounds of each.
struct Programs<'a> {
    stop: &'a AtomicBool,
    rounds: &'a [AtomicU64],
}

impl Programs<'_> {
    /// Repeats `work`, which gets the count of rounds before this one.
    fn repeat(&self, which: usize, mut work: impl FnMut(u64)) {
        let mut round = 0;
        while !self.stop.load(Ordering::Relaxed) {
            work(round);
            round += 1;
            self.rounds[which].store(round, Ordering::Relaxed);
        }
    }

    /// Waits until each has done two more rounds, and the serving process has lived for a while.
    fn wait_for_all(&self, world: &PoolWorld) {
        let before: Vec<u64> = self
            .rounds
            .iter()
            .map(|one| one.load(Ordering::Relaxed))
            .collect();
        let begun = Instant::now();
        loop {
            std::thread::sleep(Duration::from_millis(5));
            let waits: Vec<usize> = (0..before.len())
                .filter(|one| self.rounds[*one].load(Ordering::Relaxed) <= before[*one] + 1)
                .collect();
            let is_long = begun.elapsed() >= SERVES_AT_LEAST;
            if self.stop.load(Ordering::Relaxed) || (waits.is_empty() && is_long) {
                return;
            }
            assert!(
                begun.elapsed() < Duration::from_secs(90),
                "programs {waits:?} do not go on: {}",
                world.log()
            );
        }
    }
}

/// Kills a serving process that has lived for a while.
fn kill_after_a_while(world: &PoolWorld) {
    std::thread::sleep(SERVES_AT_LEAST);
    world.kill_serving();
}

/// Makes, changes and removes names, and checks every answer.
fn names(folder: &Path, round: u64) {
    let at = |name: &str| folder.join(name);
    let (file, folder, other) = (at("file"), at("folder"), at("other"));
    File::create_new(&file).expect("it is not there");
    fs::create_dir(&folder).expect("it is not there");
    fs::hard_link(&file, &other).expect("linked");
    assert_eq!(fs::metadata(&file).expect("known").nlink(), 2);
    let value = round.to_le_bytes();
    setxattr(&file, ATTRIBUTE, &value, XattrFlags::CREATE).expect("it has none");
    let mut found = [0; 8];
    assert_eq!(getxattr(&other, ATTRIBUTE, &mut found[..]), Ok(8));
    assert_eq!(found, value);
    removexattr(&other, ATTRIBUTE).expect("it has one");
    symlink("other", at("link")).expect("it is not there");
    let numbers = [&file, &folder].map(|path| fs::metadata(path).expect("known").ino());
    renameat_with(CWD, &file, CWD, &folder, RenameFlags::EXCHANGE).expect("both are there");
    let now = [&file, &folder].map(|path| fs::metadata(path).expect("known").ino());
    assert_eq!([now[1], now[0]], numbers, "exchanged once");
    fs::rename(&folder, at("third")).expect("there");
    fs::write(&folder, b"replaces").expect("written");
    fs::rename(&folder, at("third")).expect("replaced");
    assert_eq!(fs::read(at("third")).expect("there"), b"replaces");
    for name in ["third", "link", "other"] {
        fs::remove_file(at(name)).expect("it is there");
    }
    fs::remove_dir(&file).expect("it is there");
}

/// Writes and reads a file without a name; every 23 rounds a new one.
fn nameless(path: &Path, kept: &mut Option<(File, u64)>, round: u64) {
    if round.is_multiple_of(23) {
        let file = File::create_new(path).expect("it is not there");
        drop(file);
        let file = File::options()
            .read(true)
            .write(true)
            .open(path)
            .expect("there");
        fs::remove_file(path).expect("there");
        *kept = Some((file, 0));
    }
    let (file, length) = kept.as_mut().expect("made in the first round");
    let bytes = pattern::bytes(9, *length, 30_000);
    file.write_all_at(&bytes, *length).expect("it is open");
    *length += bytes.len() as u64;
    let found = file.metadata().expect("it is open");
    assert_eq!((found.len(), found.nlink()), (*length, 0));
    let mut bytes = vec![0; *length as usize];
    file.read_exact_at(&mut bytes, 0).expect("it is open");
    pattern::check(9, 0, &bytes, "without a name");
}

/// A program that has a file mapped, writes to it and reads it, until its input ends.
fn mapping(path: &Path) -> Child {
    let script = r"
import mmap, os, random, select, sys
length = 4 << 20
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, length)
memory = mmap.mmap(fd, length)
model = bytearray(length)
while not select.select([sys.stdin], [], [], 0)[0]:
    at = random.randrange(length - 5000)
    piece = os.urandom(random.randrange(1, 5000))
    memory[at:at + len(piece)] = piece
    model[at:at + len(piece)] = piece
    if random.random() < .2: memory.flush()
    if random.random() < .2: os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    at = random.randrange(length - 70000)
    if memory[at:at + 70000] != model[at:at + 70000]: sys.exit('mapped bytes are others')
memory.flush()
if os.pread(fd, length, 0) != model: sys.exit('written bytes are others')
";
    Command::new(needs::path_of("python3"))
        .args(["-c", script])
        .arg(path)
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts")
}

fn must_end_well(mut mapped: Child) {
    drop(mapped.stdin.take());
    let output = mapped.wait_with_output().expect("it is ours");
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn programs_do_not_notice_that_the_process_behind_the_mount_is_killed() {
    if !needs::all_there(&[needs::Need::Program("python3")]) {
        return;
    }
    let Some(mut world) = PoolWorld::kept(&[(EXT4, 300), (XFS, 300)]) else {
        return;
    };
    for folder in ["one", "two", "three", "many", "striped"] {
        fs::create_dir(world.path(folder)).expect("made");
    }
    wish(&world.path("striped"), "striped unit=64KiB");
    let many: BTreeSet<String> = (0..3000)
        .map(|number| format!("name {number:04}"))
        .collect();
    for name in &many {
        File::create(world.path("many").join(name)).expect("made");
    }
    put(&world.path("read.mov"), 3, 20 * MIB).expect("room");
    let locked = File::create(world.path("locked")).expect("made");
    flock(&locked, FlockOperation::LockExclusive).expect("nobody has it");
    let mapped = mapping(&world.path("mapped"));
    let mut models = vec![
        Model::new(&world.path("single"), 70, 900_000, 120_000),
        Model::new(&world.path("striped/f"), 71, 900_000, 120_000),
    ];
    let (stop, rounds) = (AtomicBool::new(false), [const { AtomicU64::new(0) }; 9]);
    let programs = Programs {
        stop: &stop,
        rounds: &rounds,
    };
    let mut line_count = 0;
    std::thread::scope(|scope| {
        let (world, programs, stop) = (&world, &programs, &stop);
        for (which, model) in models.iter_mut().enumerate() {
            scope.spawn(move || {
                let _stop = StopAtEnd(stop);
                programs.repeat(which, |round| model.step(round));
            });
        }
        for (which, folder) in [(2, "one"), (3, "two"), (4, "three")] {
            scope.spawn(move || {
                let _stop = StopAtEnd(stop);
                programs.repeat(which, |round| names(&world.path(folder), round));
            });
        }
        scope.spawn(move || {
            let _stop = StopAtEnd(stop);
            let mut kept = None;
            programs.repeat(5, |round| {
                nameless(&world.path("nameless"), &mut kept, round);
            });
        });
        scope.spawn(|| {
            let _stop = StopAtEnd(stop);
            let path = world.path("lines");
            let mut file = File::options()
                .append(true)
                .create(true)
                .open(path)
                .expect("made");
            programs.repeat(6, |round| {
                writeln!(file, "line {round}").expect("appended");
                line_count = round + 1;
            });
        });
        scope.spawn(move || {
            let _stop = StopAtEnd(stop);
            programs.repeat(7, |_| {
                let listed = fs::read_dir(world.path("many")).expect("opened");
                let names: Vec<String> = listed
                    .map(|entry| {
                        entry
                            .expect("listed")
                            .file_name()
                            .into_string()
                            .expect("text")
                    })
                    .collect();
                assert_eq!(names.len(), many.len(), "each once");
                assert_eq!(names.into_iter().collect::<BTreeSet<_>>(), many);
            });
        });
        scope.spawn(move || {
            let _stop = StopAtEnd(stop);
            let file = File::open(world.path("read.mov")).expect("opened");
            programs.repeat(8, |round| {
                let at = round * 777_777 % (18 * MIB as u64);
                let mut bytes = vec![0; 2 * MIB];
                file.read_exact_at(&mut bytes, at).expect("read");
                pattern::check(3, at, &bytes, "read.mov");
                rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("done");
                let other = File::open(world.path("locked")).expect("opened");
                let tried = flock(&other, FlockOperation::NonBlockingLockExclusive);
                assert_eq!(tried, Err(Errno::WOULDBLOCK), "the lock is held");
            });
        });
        let _stop = StopAtEnd(stop);
        let mut pauses = Vec::new();
        for _ in 0..25 {
            programs.wait_for_all(world);
            if stop.load(Ordering::Relaxed) {
                break;
            }
            pauses.push(world.measure_kill());
        }
        pauses.sort();
        eprintln!("{} kills; pauses: {pauses:?}", pauses.len());
    });
    must_end_well(mapped);
    for model in models {
        let (path, bytes) = model.end();
        assert!(
            fs::read(&path).expect("read") == bytes,
            "{}",
            path.display()
        );
    }
    let lines = fs::read_to_string(world.path("lines")).expect("read");
    let expected: String = (0..line_count)
        .map(|line| format!("line {line}\n"))
        .collect();
    assert!(lines == expected, "lines are missing or doubled");
    for folder in ["one", "two", "three"] {
        assert_eq!(fs::read_dir(world.path(folder)).expect("listed").count(), 0);
    }
    drop(locked);
    world.end();
    assert_sound_after_kills(&world);
}

/// A pool of these members, and a daemon that serves them.
fn served(members: &[Made]) -> Option<(PoolWorld, Daemon)> {
    let world = PoolWorld::kept(members)?;
    let daemon = world.served(members.len(), "");
    Some((world, daemon))
}

#[test]
fn each_byte_is_what_was_written_whichever_of_daemon_and_mount_dies() {
    let Some((mut world, mut daemon)) = served(&[(EXT4, 200), (XFS, 300)]) else {
        return;
    };
    let mut models = Vec::new();
    for (number, words) in ["single", "striped unit=4KiB", "single"]
        .into_iter()
        .enumerate()
    {
        let folder = world.path(format!("d{number}"));
        fs::create_dir(&folder).expect("made");
        wish(&folder, words);
        let seed = 80 + number as u64;
        models.push(Model::new(&folder.join("f"), seed, 900_000, 120_000));
    }
    let (stop, rounds) = (AtomicBool::new(false), [const { AtomicU64::new(0) }; 3]);
    let programs = Programs {
        stop: &stop,
        rounds: &rounds,
    };
    std::thread::scope(|scope| {
        let (world, programs, stop) = (&world, &programs, &stop);
        for (which, model) in models.iter_mut().enumerate() {
            scope.spawn(move || {
                let _stop = StopAtEnd(stop);
                programs.repeat(which, |round| model.step(round));
            });
        }
        let _stop = StopAtEnd(stop);
        let mut random = Random(4);
        for kill in 0..16 {
            programs.wait_for_all(world);
            if stop.load(Ordering::Relaxed) {
                break;
            }
            // Kill the daemon alone, the serving process alone, or both.
            if kill % 4 != 0 {
                world.kill_serving();
            }
            if kill % 4 != 1 {
                daemon.kill();
                std::thread::sleep(Duration::from_millis(random.below(100)));
                daemon.start_again();
            }
        }
    });
    let files: Vec<(PathBuf, Vec<u8>)> = models.into_iter().map(Model::end).collect();
    world.end();
    daemon.wait_for("an empty write buffer", |status| {
        status["write"]["used_bytes"].as_u64() == Some(0)
    });
    assert_sound_after_kills(&world);
    daemon.end();
    world.start();
    for (path, bytes) in files {
        assert!(
            fs::read(&path).expect("read") == bytes,
            "{}",
            path.display()
        );
    }
}

/// Has strace kill the serving process as it is about to send an answer: its next one, once this
/// function has returned.
fn die_before_answering(world: &PoolWorld) -> (u32, Child) {
    let serving = world.serving().expect("it serves");
    let tracer = Command::new(needs::path_of("strace"))
        .args(["-f", "-qq", "-o", "/dev/null", "-e", "trace=writev"])
        .args(["-e", "inject=writev:signal=SIGKILL:when=1"])
        .args(["-p", &serving.to_string()])
        .stderr(Stdio::null())
        .spawn()
        .expect("strace starts");
    let end = Instant::now() + Duration::from_secs(30);
    let is_traced = |entry: std::io::Result<fs::DirEntry>| {
        let status = entry.and_then(|entry| fs::read_to_string(entry.path().join("status")));
        status.is_ok_and(|text| !text.contains("TracerPid:\t0\n"))
    };
    let threads = format!("/proc/{serving}/task");
    while !fs::read_dir(&threads).expect("it lives").all(is_traced) {
        assert!(Instant::now() < end, "strace does not begin");
        std::thread::sleep(Duration::from_millis(10));
    }
    (serving, tracer)
}

/// A call that must not happen twice happens once, although the process died after it and before
/// the answer.
#[test]
fn what_was_done_and_not_answered_is_not_done_again() {
    if !needs::all_there(&[needs::Need::Program("strace")]) {
        return;
    }
    let Some(mut world) = PoolWorld::kept(&[(EXT4, 100)]) else {
        return;
    };
    let at = |name: &str| world.path(name);
    put(&at("a"), 1, 10_000).expect("room");
    put(&at("b"), 2, 10_000).expect("room");
    put(&at("c"), 3, 10_000).expect("room");
    fs::create_dir(at("d")).expect("made");
    setxattr(at("a"), "user.first", b"1", XattrFlags::empty()).expect("set");
    type Act<'a> = (&'a str, &'a dyn Fn());
    let acts: [Act<'_>; 6] = [
        ("exchange", &|| {
            renameat_with(CWD, at("a"), CWD, at("b"), RenameFlags::EXCHANGE).expect("both there");
        }),
        ("removexattr", &|| {
            removexattr(at("b"), "user.first").expect("it has one");
        }),
        ("setxattr", &|| {
            setxattr(at("b"), "user.second", b"2", XattrFlags::CREATE).expect("it has none");
        }),
        ("rename", &|| {
            fs::rename(at("c"), at("a")).expect("both are there");
        }),
        ("unlink", &|| fs::remove_file(at("b")).expect("it is there")),
        ("rmdir", &|| fs::remove_dir(at("d")).expect("it is there")),
    ];
    for (what, act) in acts {
        let (killed, mut tracer) = die_before_answering(&world);
        act();
        let _ = tracer.wait();
        // A look at a name would have been answered instead by one that lived.
        assert_ne!(world.serving(), Some(killed), "{what} was answered");
        match what {
            "exchange" => {
                check(&at("b"), 1, 10_000);
                check(&at("a"), 2, 10_000);
            }
            "rename" => check(&at("a"), 3, 10_000),
            _ => {}
        }
    }
    let left: Vec<_> = fs::read_dir(world.path(""))
        .expect("listed")
        .map(|entry| entry.expect("listed").file_name())
        .collect();
    assert_eq!(left, ["a"]);
    world.end();
    assert_sound_after_kills(&world);
}

#[test]
fn a_mount_is_replaced_on_request_and_given_up_when_nobody_can_serve_it() {
    let Some(mut world) = PoolWorld::kept(&[(EXT4, 100)]) else {
        return;
    };
    let mut file = File::create(world.path("a.mov")).expect("made");
    file.write_all(b"before ").expect("room");
    let (keeper, serving) = (world.keeper().to_string(), world.serving());
    run(Command::new("kill").args(["-USR1", &keeper]));
    let end = Instant::now() + Duration::from_secs(30);
    while world.serving().is_none() || world.serving() == serving {
        assert!(Instant::now() < end, "it is not replaced: {}", world.log());
        std::thread::sleep(Duration::from_millis(10));
    }
    file.write_all(b"behind").expect("it is open");
    assert_eq!(
        fs::read(world.path("a.mov")).expect("read"),
        b"before behind"
    );

    // Without this file no process can serve the mount: the keeper gives it up.
    let format = world.catalogue().join("rushes-pool");
    let aside = format.with_extension("aside");
    fs::rename(&format, &aside).expect("there");
    world.kill_serving();
    let status = world.wait();
    assert_eq!(status.code(), Some(2), "{}", world.log());
    assert!(world.log().contains("given up"), "{}", world.log());
    let error = file.write_all(b"nobody").expect_err("it is dead");
    assert!(error.raw_os_error().is_some());
    let error = fs::read(world.path("a.mov")).expect_err("it is dead");
    assert_eq!(error.raw_os_error(), Some(ENOTCONN));
    drop(file);
    fs::rename(&aside, &format).expect("there");
    world.start();
    assert_eq!(
        fs::read(world.path("a.mov")).expect("read"),
        b"before behind"
    );
}

#[test]
fn nfs_clients_go_on_with_what_they_have_open_and_ganesha_is_not_started_again() {
    if !needs::all_there(NFS) {
        return;
    }
    let Some(mut world) = PoolWorld::kept(&[(EXT4, 100), (XFS, 300)]) else {
        return;
    };
    let export = Export::nfs(&world);
    let mut nfs = Nfs4::connect(export.port, "kept", 1);
    let root = nfs.root("media").expect("exported");
    let open = nfs.open(&root, b"take.mov", true).expect("made");
    let server = export.server();
    let mut at = 0;
    for round in 0..8 {
        for _ in 0..4 {
            let bytes = pattern::bytes(5, at, 65_536);
            nfs.write(&open, at, &bytes).expect("written");
            at += bytes.len() as u64;
        }
        kill_after_a_while(&world);
        let name = format!("name {round}");
        nfs.make(&root, name.as_bytes(), None).expect("made");
        let bytes = nfs.read(&open, at - 65_536, 65_536).expect("read");
        pattern::check(5, at - 65_536, &bytes, "take.mov");
        kill_after_a_while(&world);
        nfs.remove(&root, name.as_bytes()).expect("removed");
    }
    nfs.close(open).expect("closed");
    assert_eq!(export.server(), server, "{}", export.log());
    check(&world.path("take.mov"), 5, at as usize);
    export.end();
    world.end();
    assert_sound_after_kills(&world);
}
