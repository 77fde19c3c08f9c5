// SPDX-License-Identifier: Apache-2.0
//! Contracts and their rates: a clip that is played before all of it is on its disk has the rate of
//! its header or no contract, and every byte as the copy grows; frames that the daemon cannot fetch
//! ahead have none.

use rushes_tests::daemon::Daemon;
use rushes_tests::disk::make_cold;
use rushes_tests::fsx::{client, setup};
use rushes_tests::needs::{Need, all_there, path_of};
use rushes_tests::pattern;
use rushes_tests::smb2::{Connection, Disposition, Handle};
use rushes_tests::smbd::{PASSWORD, SHARE, USER};
use rushes_tests::world::{Backing, Setup, World};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// Length of the pictures.
const BYTES: u64 = 32 * MIB;
const SECONDS: u32 = 8;
/// Units: bytes a second.
const RATE: u64 = BYTES / SECONDS as u64;
const BLOCK: usize = PART;

fn atom(name: &[u8; 4], body: &[u8]) -> Vec<u8> {
    let length = body.len() as u32 + 8;
    [&length.to_be_bytes(), &name[..], body].concat()
}

fn moov(seconds: u32) -> Vec<u8> {
    let mut header = vec![0; 100];
    // Units to a second, then the duration in these units: milliseconds.
    header[12..16].copy_from_slice(&1000u32.to_be_bytes());
    header[16..20].copy_from_slice(&(seconds * 1000).to_be_bytes());
    atom(b"moov", &atom(b"mvhd", &header))
}

/// A movie with its header in front of the pictures, or behind them.
fn movie(header_last: bool) -> Vec<u8> {
    movie_of(BYTES, SECONDS, header_last)
}

/// The same with `length` bytes of pictures.
fn movie_of(length: u64, seconds: u32, header_last: bool) -> Vec<u8> {
    let mut bytes = atom(b"ftyp", b"qt  \0\0\0\0qt  ");
    if !header_last {
        bytes.extend(moov(seconds));
    }
    bytes.extend(atom(b"mdat", &pattern::bytes(7, 0, length as usize)));
    if header_last {
        bytes.extend(moov(seconds));
    }
    bytes
}

fn world() -> Option<World> {
    World::build(&Setup {
        backing: Backing::Ext4,
        server: String::new(),
        ..setup("64MiB")
    })
}

/// Longest request. Units: bytes.
const PART: usize = 1 << 16;

fn write(client: &Connection, file: Handle, bytes: &[u8], from: usize, to: usize) {
    for at in (from..to).step_by(PART) {
        let end = (at + PART).min(to);
        client
            .write(file, at as u64, &bytes[at..end])
            .expect("taken");
    }
}

/// Plays by the clock, as an editing program does.
struct Player<'a> {
    client: &'a Connection,
    file: Handle,
    name: &'static str,
    begun: Instant,
    at: usize,
    /// Contracts that it had: rate and source of the rate.
    promised: BTreeSet<(u64, String)>,
}

impl<'a> Player<'a> {
    fn open(client: &'a Connection, name: &'static str) -> Player<'a> {
        let (file, _) = client.open_to_read(name).expect("opened");
        Player {
            client,
            file,
            name,
            begun: Instant::now(),
            at: 0,
            promised: BTreeSet::new(),
        }
    }

    /// Plays up to this offset, reading each block when it is due.
    fn play_to(&mut self, end: usize, bytes: &[u8], world: &mut World) {
        while self.at < end {
            let due = Duration::from_millis(self.at as u64 * 1000 / RATE);
            std::thread::sleep(due.saturating_sub(self.begun.elapsed()));
            let length = BLOCK.min(end - self.at);
            let found = self.client.read(self.file, self.at as u64, length);
            let found = found.expect("read");
            assert!(found == bytes[self.at..self.at + length], "at {}", self.at);
            self.at += length;
            if let Some((rate, source)) = promise(&world.daemon().status(), self.name) {
                let is_right = rate.abs_diff(RATE) <= RATE / 5;
                assert!(
                    is_right,
                    "{rate} B/s by {source} at {}, not {RATE}",
                    self.at
                );
                self.promised.insert((rate, source));
            }
        }
    }

    fn has_header(&self) -> bool {
        self.promised.iter().any(|(_, source)| source == "header")
    }
}

/// The rate of the contract of a stream of this file, and the source of the rate.
fn promise(status: &Value, name: &str) -> Option<(u64, String)> {
    let streams = status["streams"].as_array()?;
    let mut all = streams.iter().filter(|stream| stream["path"] == name);
    let stream = all.find(|stream| stream["standing"] == "contract")?;
    let rate = stream["rate_bytes_per_s"].as_u64()?;
    let source = stream["rate_source"].as_str()?;
    Some((rate, source.to_owned()))
}

#[test]
fn a_clip_that_is_being_copied_in_is_promised_what_its_header_says_from_the_first_eighth_on() {
    let Some(mut world) = world() else {
        return;
    };
    let (copier, editor) = (client(&world), client(&world));
    let bytes = movie(false);
    let eighth = bytes.len() / 8;
    let (file, _) = copier
        .open("copied.mov", Disposition::OpenIf)
        .expect("made");
    write(&copier, file, &bytes, 0, eighth);
    let mut player = Player::open(&editor, "copied.mov");
    player.play_to(eighth - BLOCK, &bytes, &mut world);
    // The copy is quicker than the editor that follows it.
    for part in 1..8 {
        let end = (part + 1) * eighth;
        write(&copier, file, &bytes, part * eighth, end);
        player.play_to(end - BLOCK, &bytes, &mut world);
    }
    write(&copier, file, &bytes, 8 * eighth, bytes.len());
    copier.close(file).expect("closed");
    player.play_to(bytes.len(), &bytes, &mut world);
    assert!(player.has_header(), "{:?}", player.promised);
    editor.close(player.file).expect("closed");
    world.everything_is_written();
}

#[test]
fn a_clip_whose_header_comes_last_and_is_in_memory_still_is_promised_what_it_says() {
    let Some(mut world) = world() else {
        return;
    };
    let (copier, editor) = (client(&world), client(&world));
    let bytes = movie(true);
    for name in ["first.mov", "second.mov"] {
        let (file, _) = copier.open(name, Disposition::OpenIf).expect("made");
        // All but the header is on the disk, and its blocks are reserved: the disk has zeros there.
        let pictures = bytes.len() - moov(SECONDS).len();
        write(&copier, file, &bytes, 0, pictures);
        copier.flush(file).expect("flushed");
        write(&copier, file, &bytes, pictures, bytes.len());
        let mut player = Player::open(&editor, name);
        player.play_to(2 * BLOCK, &bytes, &mut world);
        if name == "second.mov" {
            copier.close(file).expect("closed");
        }
        player.play_to(bytes.len() * 3 / 4, &bytes, &mut world);
        assert!(player.has_header(), "{name}: {:?}", player.promised);
        editor.close(player.file).expect("closed");
        // A player that opens it then has the rate of the header from its first reads on.
        world.everything_is_written();
        let mut player = Player::open(&editor, name);
        player.play_to(bytes.len() / 4, &bytes, &mut world);
        assert!(player.has_header(), "{name} again: {:?}", player.promised);
        editor.close(player.file).expect("closed");
    }
}

/// Links into a store, whose file names do not show which frame is next.
#[test]
fn frames_that_are_symbolic_links_are_promised_nothing_once_that_is_known() {
    const FRAMES: usize = 40;
    const FRAME_BYTES: usize = 1 << 20;
    /// Frames that may have a contract before the daemon finds out.
    const SEEN: usize = 10;
    let built = World::build(&Setup {
        backing: Backing::Ext4,
        server: String::new(),
        more: String::from("[[rule]]\nmatch = \"shot/*\"\nframes_per_second = 24\n"),
        ..setup("64MiB")
    });
    let Some(mut world) = built else {
        return;
    };
    let frame = |number: usize| format!("shot/f.{number:04}.dpx");
    std::fs::create_dir(world.path("shot")).expect("made");
    std::fs::create_dir(world.path("store")).expect("made");
    for number in 1..=FRAMES {
        let store: String = (0..8)
            .map(|digit| char::from(b'g' + (number * (digit + 3) * 7 % 19) as u8))
            .collect();
        let bytes = pattern::bytes(number as u64, 0, FRAME_BYTES);
        std::fs::write(world.path(&format!("store/{store}{number}")), bytes).expect("room");
        let link = world.path(&frame(number));
        std::os::unix::fs::symlink(format!("../store/{store}{number}"), link).expect("made");
    }
    world.disk.make_cold();
    // The daemon drops cached bytes of a version that is less than 2 s old (decision 0038).
    std::thread::sleep(Duration::from_millis(2500));
    let player = client(&world);
    let begun = Instant::now();
    let mut promised = Vec::new();
    for number in 1..=FRAMES {
        let (file, _) = player.open_to_read(&frame(number)).expect("opened");
        let mut found = Vec::with_capacity(FRAME_BYTES);
        while found.len() < FRAME_BYTES {
            let length = BLOCK.min(FRAME_BYTES - found.len());
            found.extend(player.read(file, found.len() as u64, length).expect("read"));
        }
        pattern::check(number as u64, 0, &found, &frame(number));
        let status = world.daemon().status();
        let streams = status["streams"].as_array().expect("a list");
        let has_one = |stream: &&Value| stream["standing"] == "contract" && stream["open"] == true;
        if let Some(stream) = streams.iter().find(has_one) {
            promised.push((number, stream["path"].to_string()));
        }
        player.close(file).expect("closed");
        let due = Duration::from_micros(41_667) * number as u32;
        std::thread::sleep(due.saturating_sub(begun.elapsed()));
    }
    let last = promised.last().map_or(0, |(number, _)| *number);
    assert!(last <= SEEN, "{promised:?}");
    let status = world.daemon().status();
    let streams = status["streams"].as_array().expect("a list");
    let is_it = |stream: &Value| stream["sequence"] == true && stream["path"] == frame(1);
    assert!(streams.iter().any(is_it), "{streams:#?}");
    world.everything_is_written();
}

/// Length of a clip that a client copies. Units: bytes.
const COPIED_BYTES: u64 = 120 * MIB;
/// The rate in its header. Units: bytes a second.
const COPIED_RATE: u64 = MIB;
/// A stream of known rate gets a contract or a refusal within this time.
const TOLD_AFTER: Duration = Duration::from_secs(1);
/// Time for which the player has to keep its contract beside the copies.
const BESIDE: Duration = Duration::from_secs(2);

/// A client that copies a file of the share to nowhere, as fast as it can. It ends when it is
/// dropped.
struct Copier(Child);

impl Copier {
    fn connect(world: &World) -> Copier {
        let folder = world.scratch.folder("smbclient");
        let settings = folder.join("smb.conf");
        if !settings.exists() {
            fs::write(&settings, "[global]\n").expect("scratch is writable");
        }
        let child = Command::new(path_of("smbclient"))
            .arg(format!("//127.0.0.1/{SHARE}"))
            .args(["-p", &world.smbd.port().to_string()])
            .args(["-U", &format!("{USER}%{PASSWORD}"), "-s"])
            .arg(settings)
            .env("HOME", &folder)
            .current_dir(world.scratch.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Copier(child.expect("checked before"))
    }

    fn copy(&mut self, name: &str) {
        // It ends after this command: its input is closed.
        let mut input = self.0.stdin.take().expect("it is piped");
        writeln!(input, "get {name} /dev/null").expect("it reads commands");
    }

    fn end(&mut self) -> Option<ExitStatus> {
        self.0.try_wait().expect("it is our child")
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A client that the daemon serves. On a busy machine an smbd that gets no session soon does
/// without the daemon for a while; then this tries another client.
fn served<T>(daemon: &Daemon, connect: impl Fn() -> T) -> T {
    let latest = || {
        let status = daemon.status();
        let sessions = status["sessions"].as_array().expect("a list");
        let numbers = sessions.iter().map(|one| one["session"].as_u64());
        numbers.max().flatten()
    };
    for _ in 0..10 {
        let before = latest();
        let client = connect();
        let end = Instant::now() + Duration::from_secs(5);
        while Instant::now() < end {
            if latest() > before {
                return client;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    panic!("the daemon lets nobody in: {}", daemon.log());
}

/// Plays by the clock until `is_over`.
fn play(client: &Connection, name: &str, is_over: &AtomicBool) {
    let (file, _) = client.open_to_read(name).expect("opened");
    let begun = Instant::now();
    let mut at = 0;
    while at < COPIED_BYTES && !is_over.load(Ordering::Relaxed) {
        let due = Duration::from_millis(at * 1000 / COPIED_RATE);
        std::thread::sleep(due.saturating_sub(begun.elapsed()));
        client.read(file, at, BLOCK).expect("read");
        at += BLOCK as u64;
    }
    client.close(file).expect("closed");
}

/// Sets the flag when it is dropped, also by a panic.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The stream of a file that a client has open.
fn open_stream<'a>(status: &'a Value, name: &str) -> Option<&'a Value> {
    let mut streams = status["streams"].as_array()?.iter();
    streams.find(|one| one["path"] == name && one["open"] == true)
}

fn has_contract(stream: &Value) -> bool {
    stream["standing"] == "contract"
}

/// Whether its rate is known, and it neither has a contract nor waits for one.
fn is_copy(stream: &Value) -> bool {
    stream["standing"] == "best_effort" && stream["rate_source"] == "header"
}

/// Each copy gets ahead of the rate of its clip by many seconds in the first third of it, on a slow
/// machine, too.
#[test]
fn six_copies_of_clips_with_a_rate_leave_the_contract_to_an_editor() {
    if !all_there(&[Need::Program("smbclient")]) {
        return;
    }
    let built = World::build(&Setup {
        backing: Backing::Slow,
        cache: String::from("256MiB"),
        server: String::new(),
        ..setup("64MiB")
    });
    let Some(world) = built else {
        return;
    };
    let seconds = (COPIED_BYTES / COPIED_RATE) as u32;
    let bytes = movie_of(COPIED_BYTES, seconds, false);
    let names: Vec<String> = (0..6).map(|number| format!("copied{number}.mov")).collect();
    for name in names.iter().map(String::as_str).chain(["played.mov"]) {
        let path = world.path(name);
        fs::write(&path, &bytes).expect("there is room");
        make_cold(&path);
    }
    drop(bytes);
    // The daemon drops cached bytes of a version that is less than 2 s old (decision 0038).
    std::thread::sleep(Duration::from_millis(2500));
    let daemon = world.daemon.as_ref().expect("it runs");
    let editor = served(daemon, || client(&world));
    let copiers = names
        .iter()
        .map(|_| served(daemon, || Copier::connect(&world)));
    let mut copiers: Vec<Copier> = copiers.collect();
    // All six together read 46 MB/s at most: they are at it for 16 s at least.
    world.disk.tell("timing on");
    world.disk.tell("slow 3");
    for (copier, name) in copiers.iter_mut().zip(&names) {
        copier.copy(name);
    }
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _over = Over(&is_over);
        let mut status = || {
            std::thread::sleep(Duration::from_millis(20));
            let status = daemon.status();
            let ended = copiers.iter_mut().find_map(Copier::end);
            assert_eq!(ended, None, "a copy has ended: {status:#}");
            status
        };
        // Since when the daemon takes each for a copy.
        let mut told: BTreeMap<&str, Instant> = BTreeMap::new();
        while told.len() < names.len() || told.values().any(|since| since.elapsed() < TOLD_AFTER) {
            let status = status();
            for name in &names {
                if open_stream(&status, name).is_some_and(is_copy) {
                    told.entry(name).or_insert_with(Instant::now);
                } else {
                    told.remove(name.as_str());
                }
            }
        }
        scope.spawn(|| play(&editor, "played.mov", &is_over));
        let mut admitted: Option<Instant> = None;
        while admitted.is_none_or(|since| since.elapsed() < BESIDE) {
            let status = status();
            for name in &names {
                let stream = open_stream(&status, name);
                let is_copy = stream.is_none_or(is_copy);
                assert!(is_copy, "{name} is no copy any more: {status:#}");
            }
            let is_playing = open_stream(&status, "played.mov").is_some_and(has_contract);
            assert!(is_playing || admitted.is_none(), "it is lost: {status:#}");
            if is_playing {
                admitted.get_or_insert_with(Instant::now);
            }
        }
    });
}
