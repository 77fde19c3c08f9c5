// SPDX-License-Identifier: Apache-2.0
//! Acknowledged bytes: every client reads them back, they reach the disk, and they outlive the
//! daemon.

use rushes_tests::hand::{Hand, Held};
use rushes_tests::needs::path_of;
use rushes_tests::patience::until;
use rushes_tests::pattern;
use rushes_tests::random::Random;
use rushes_tests::world::{Setup, World};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const HAND: &str = env!("CARGO_BIN_EXE_smb-hand");
/// Smbd starts another recovery after half a minute.
const RECOVERED_BY: Duration = Duration::from_secs(90);

fn setup() -> Setup {
    Setup {
        write_buffer: Some("64MiB"),
        // The analyser would leave scattered reads to the kernel's cache; this tests the daemon's.
        server: String::from("analyser = false"),
        ..Setup::default()
    }
}

/// The bytes that a file must have, and the writes that made them.
struct Model {
    bytes: Vec<u8>,
    /// Step, offset and length of each write.
    writes: Vec<(u64, u64, usize)>,
    /// Where the file lies.
    path: PathBuf,
}

impl Model {
    fn of(path: PathBuf, bytes: Vec<u8>) -> Model {
        Model {
            bytes,
            writes: Vec::new(),
            path,
        }
    }

    /// A client writes or reads at random, and gets the bytes of the model.
    fn act(&mut self, random: &mut Random, step: u64, hand: &mut Hand, file: Held) {
        let offset = random.below(6_000_000);
        let length = match random.below(3) {
            0 => random.below(100) + 1,
            1 => random.below(10_000) + 1,
            _ => random.below(1_000_000) + 1,
        } as usize;
        if random.below(2) == 0 {
            let bytes = pattern::bytes(1000 + step, offset, length.min(300_000));
            let end = offset as usize + bytes.len();
            if self.bytes.len() < end {
                self.bytes.resize(end, 0);
            }
            self.bytes[offset as usize..end].copy_from_slice(&bytes);
            self.writes.push((step, offset, bytes.len()));
            hand.write(file, offset, &bytes);
            return;
        }
        let found = hand.read(file, offset, length);
        if let Some(fault) = self.fault(offset, length, &found) {
            let on_disk = self.on_disk(offset, length);
            std::thread::sleep(Duration::from_secs(2));
            let again = hand.read(file, offset, length);
            let after = self.fault(offset, length, &again);
            let then = self.on_disk(offset, length);
            panic!(
                "step {step}: {fault}; two seconds later: {after:?}; the disk itself had {on_disk:?}, and then {then:?}"
            );
        }
    }

    /// The fault in the bytes that the disk itself has.
    fn on_disk(&self, offset: u64, length: usize) -> Option<String> {
        let bytes = std::fs::read(&self.path).expect("our own file");
        let start = (offset as usize).min(bytes.len());
        let end = (start + length).min(bytes.len());
        self.fault(offset, length, &bytes[start..end])
    }

    /// The fault in bytes that were read.
    fn fault(&self, offset: u64, length: usize, found: &[u8]) -> Option<String> {
        let start = (offset as usize).min(self.bytes.len());
        let expected = &self.bytes[start..(start + length).min(self.bytes.len())];
        if found.len() != expected.len() {
            let (read, wanted) = (found.len(), expected.len());
            return Some(format!("read {read} bytes at {offset}, expected {wanted}"));
        }
        let wrong = found.iter().zip(expected).position(|(a, b)| a != b)?;
        let at = offset + wrong as u64;
        let covering =
            |&&(_, from, length): &&(u64, u64, usize)| (from..from + length as u64).contains(&at);
        let writes: Vec<u64> = self
            .writes
            .iter()
            .filter(covering)
            .map(|(step, _, _)| *step)
            .collect();
        let tail = &found[wrong..found.len().min(wrong + 16)];
        let shown = writes
            .iter()
            .find(|step| tail == &pattern::bytes(1000 + *step, at, tail.len())[..]);
        let count = writes.len();
        let last = &writes[count.saturating_sub(5)..];
        Some(format!(
            "wrong from {at} on (read {offset}+{length}); written by steps {last:?}, shown is that of {shown:?}"
        ))
    }
}

#[test]
fn writes_go_through_lanes_and_reach_the_disk_by_themselves() {
    let Some(mut world) = World::build(&setup()) else {
        return;
    };
    let mut hand = Hand::connect(HAND, world.smbd.port());
    let mut other = Hand::connect(HAND, world.smbd.port());
    let file = hand.create("take.mov");
    let bytes = pattern::bytes(5, 0, 10_000_001);
    for (at, part) in (0..).step_by(1_000_000).zip(bytes.chunks(1_000_000)) {
        hand.write(file, at, part);
    }
    // Other clients of the door see the length at once.
    assert_eq!(other.size("take.mov"), bytes.len() as u64);
    let reading = other.open("take.mov");
    let back = other.read(reading, 9_000_000, 2_000_000);
    pattern::check(5, 9_000_000, &back, "another client's read");
    assert_eq!(back.len(), 1_000_001);
    let status = world.daemon().status();
    assert!(
        status["write"]["write_count"].as_u64() >= Some(10),
        "{status}"
    );
    assert_eq!(status["write"]["plain_count"], 0, "{status}");
    world.wait_for_file("take.mov", &bytes);
    hand.close(file);
    world.everything_is_written();
}

#[test]
fn a_daemon_that_is_killed_again_and_again_loses_nothing_and_nobody_sees_an_error() {
    kills(1);
}

#[test]
fn three_clients_of_one_file_see_one_another_while_the_daemon_is_killed() {
    kills(3);
}

/// An smbd that soon takes a daemon for hung, and soon starts a recovery.
fn impatient() -> Setup {
    Setup {
        share: vec![
            String::from("rushes:hung after = 2"),
            String::from("rushes:recover after = 1"),
        ],
        ..setup()
    }
}

/// Three megabytes in a lane alone, a client that has written them, and another.
fn written(setup: &Setup) -> Option<(World, Hand, Hand, Held)> {
    let world = World::build(setup)?;
    let mut hand = Hand::connect(HAND, world.smbd.port());
    let mut other = Hand::connect(HAND, world.smbd.port());
    let file = hand.create("take.mov");
    hand.write(file, 0, &pattern::bytes(5, 0, 3_000_000));
    let reading = other.open("take.mov");
    Some((world, hand, other, reading))
}

/// Both clients go on without an error, and the disk gets all bytes.
fn go_on(world: &World, hand: &mut Hand, other: &mut Hand, reading: Held) {
    let back = other.read(reading, 0, 3_000_000);
    assert_eq!(back.len(), 3_000_000);
    pattern::check(5, 0, &back, "what nobody but a daemon that is gone had");
    let file = hand.open_rw("take.mov");
    hand.write(file, 3_000_000, &pattern::bytes(5, 3_000_000, 1_000_000));
    assert_eq!(other.size("take.mov"), 4_000_000);
    world.wait_for_file("take.mov", &pattern::bytes(5, 0, 4_000_000));
}

#[test]
fn without_another_daemon_somebody_writes_what_the_last_one_had_and_clients_go_on() {
    let Some((mut world, mut hand, mut other, reading)) = written(&impatient()) else {
        return;
    };
    world.daemon().kill();
    go_on(&world, &mut hand, &mut other, reading);
    world.daemon().start_again();
    assert_eq!(hand.size("take.mov"), 4_000_000);
}

/// The first recovery fails, as by a disk that fails, or by a daemon that starts and then dies; and
/// so does each that another smbd starts within twenty seconds.
#[test]
fn what_writes_that_for_a_daemon_that_is_gone_is_started_again_when_something_is_still_left() {
    let mut setup = impatient();
    let rushes = path_of("rushes");
    let tried = "$RUSHES_RUNTIME_DIR/tried";
    setup.share.push(format!(
        "rushes:recover = [ -e {tried} ] || touch {tried}; [ -n \"$(find {tried} -newermt '20 seconds ago')\" ] && exit 1; \
         exec {} recover --hung-after 2s",
        rushes.display()
    ));
    let Some((mut world, mut hand, mut other, reading)) = written(&setup) else {
        return;
    };
    world.daemon().kill();
    let begun = Instant::now();
    let bytes = pattern::bytes(5, 0, 3_000_000);
    let is_written = || std::fs::read(world.path("take.mov")).is_ok_and(|found| found == bytes);
    until("the second one writes it", RECOVERED_BY, is_written);
    assert!(
        begun.elapsed() > Duration::from_secs(20),
        "the first one did"
    );
    go_on(&world, &mut hand, &mut other, reading);
}

#[test]
fn a_smbd_that_has_never_seen_a_daemon_waits_for_what_one_had() {
    let Some((mut world, mut hand, other, _)) = written(&impatient()) else {
        return;
    };
    other.kill();
    world.daemon().kill();
    let mut newcomer = Hand::connect(HAND, world.smbd.port());
    let reading = newcomer.open("take.mov");
    go_on(&world, &mut hand, &mut newcomer, reading);
}

#[test]
fn a_daemon_whose_lanes_were_taken_over_ends_at_once() {
    let Some((mut world, mut hand, mut other, reading)) = written(&setup()) else {
        return;
    };
    let lanes = world.scratch.folder("run").join("lanes");
    // Offset of the epoch in a table's head; see docs/reference/session.md.
    const EPOCH_AT: u64 = 4 * 8;
    for entry in std::fs::read_dir(&lanes).expect("lanes").flatten() {
        if entry.path().extension().is_some_and(|end| end == "table") {
            let table = std::fs::File::options().write(true).open(entry.path());
            let raised =
                table.and_then(|table| table.write_all_at(&99_u64.to_le_bytes(), EPOCH_AT));
            raised.expect("our own daemon's");
        }
    }
    let end = Instant::now() + Duration::from_secs(20);
    while world.daemon().is_alive() {
        assert!(Instant::now() < end, "it goes on with another's lanes");
        std::thread::sleep(Duration::from_millis(50));
    }
    let log = world.daemon().log();
    assert!(log.contains("another daemon has taken over"), "{log}");
    world.daemon().start_again();
    go_on(&world, &mut hand, &mut other, reading);
}

#[test]
fn a_hung_daemon_is_ended_and_what_it_had_is_written() {
    let Some((mut world, mut hand, mut other, reading)) = written(&impatient()) else {
        return;
    };
    world.daemon().stop();
    go_on(&world, &mut hand, &mut other, reading);
    assert!(!world.daemon().is_alive(), "it still has what it had");
}

fn number_from(variable: &str) -> Option<usize> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().expect("a number"))
}

/// Waits until a step that began after the kill has ended: the one under way then, and another.
fn wait_for_steps(steps: &AtomicU64, count: u64, done: &AtomicBool) {
    while steps.load(Ordering::Relaxed) < count && !done.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Sets the flag when it is dropped, also by a panic.
struct Finally<'a>(&'a AtomicBool);

impl Drop for Finally<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn kills(hand_count: usize) {
    let count = number_from("RUSHES_TEST_KILLS").unwrap_or(50);
    let Some(mut world) = World::build(&setup()) else {
        return;
    };
    world.put("clip.mov", 1, 5_000_000);
    let path = world.path("clip.mov");
    let mut model = Model::of(path, pattern::bytes(1, 0, 5_000_000));
    let mut random = Random(77);
    let mut hands: Vec<(Hand, Held)> = (0..hand_count)
        .map(|_| {
            let mut hand = Hand::connect(HAND, world.smbd.port());
            let file = hand.open_rw("clip.mov");
            (hand, file)
        })
        .collect();
    let mut daemon = world.daemon.take().expect("a daemon");
    let done = AtomicBool::new(false);
    let steps = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let killer = scope.spawn(|| {
            let mut random = Random(5);
            let mut longest = Duration::ZERO;
            for _ in 0..count {
                if done.load(Ordering::Relaxed) {
                    break;
                }
                std::thread::sleep(Duration::from_millis(20 + random.below(200)));
                let (before, killed) = (steps.load(Ordering::Relaxed), Instant::now());
                daemon.kill();
                daemon.start_again();
                // Other daemons die before they have answered a client.
                if random.below(4) > 0 {
                    wait_for_steps(&steps, before + 2, &done);
                    longest = longest.max(killed.elapsed());
                }
            }
            done.store(true, Ordering::Relaxed);
            longest
        });
        // Ends the killer's wait for steps when one has failed.
        let failed = Finally(&done);
        let mut step = 0;
        while !done.load(Ordering::Relaxed) || step < 100 {
            let (hand, file) = &mut hands[random.below(hand_count as u64) as usize];
            model.act(&mut random, step, hand, *file);
            step += 1;
            steps.store(step, Ordering::Relaxed);
        }
        drop(failed);
        let longest = killer.join().expect("the killer");
        println!(
            "{hand_count} clients, {step} steps, {count} kills, longest pause {} ms",
            longest.as_millis()
        );
    });
    for (hand, file) in &mut hands {
        hand.close(*file);
    }
    assert!(
        !daemon.log().contains("serving without waiting"),
        "a door has not let go of its lock"
    );
    world.daemon = Some(daemon);
    world.wait_for_file("clip.mov", &model.bytes);
    world.everything_is_written();
}
