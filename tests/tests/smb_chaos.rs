// SPDX-License-Identifier: Apache-2.0
//! The Samba module against `doors/smb/test/chaos_client.c`, a client library that does everything
//! its header allows, as nastily as it may: its cache drops bytes only when the module tells it to,
//! its answers come late and in any order, and its daemon dies and returns several times a second.

use rushes_tests::disk::run;
use rushes_tests::hand::{Hand, Held};
use rushes_tests::needs::{Need, all_there};
use rushes_tests::pattern;
use rushes_tests::scratch::Scratch;
use rushes_tests::smbd::{self, Smbd, SmbdSpec};
use rushes_tests::tree;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

const HAND: &str = env!("CARGO_BIN_EXE_smb-hand");
const NAMES: [&str; 3] = ["a.mov", "b.mov", "c.mov"];
const LENGTH_MAX: u64 = 3_000_000;

/// The life of the daemon.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// It lives for ever, so that only messages of the module change its cache.
    Immortal,
    /// It dies and returns several times a second.
    Mortal,
    /// There is none, until [`Chaos::give_birth`].
    Unborn,
}

/// A daemon that dies and returns: a file that is replaced or missing every now and then.
struct Mortal {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Mortal {
    fn haunt(socket: PathBuf) -> Mortal {
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let next = socket.with_extension("next");
            for turn in 0_u64.. {
                if told.load(Ordering::Relaxed) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(20 + turn * 37 % 230));
                if turn % 3 == 0 {
                    let _ = fs::remove_file(&socket);
                    std::thread::sleep(Duration::from_millis(turn % 70));
                }
                let _ = fs::write(&next, "").and_then(|()| fs::rename(&next, &socket));
            }
        });
        Mortal {
            stop,
            thread: Some(thread),
        }
    }
}

impl Drop for Mortal {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// smbd with the module for tests over a folder in scratch.
struct Chaos {
    smbd: Smbd,
    share: PathBuf,
    socket: PathBuf,
    _mortal: Option<Mortal>,
    _scratch: Scratch,
}

impl Chaos {
    fn build(global: &[&str], fate: Fate) -> Option<Chaos> {
        let needs = [
            Need::Root,
            Need::Program("smbd"),
            Need::Program("pdbedit"),
            Need::Module,
        ];
        if !all_there(&needs) {
            return None;
        }
        let scratch = Scratch::new();
        let module = scratch.path().join("rushes.so");
        run(Command::new(tree::root().join("doors/smb/build.sh"))
            .arg("--chaos")
            .arg(&module));
        let share = scratch.folder("share");
        fs::set_permissions(&share, fs::Permissions::from_mode(0o777)).expect("it is ours");
        let socket = scratch.path().join("socket");
        if fate != Fate::Unborn {
            fs::write(&socket, "").expect("scratch is writable");
        }
        let mortal = (fate == Fate::Mortal).then(|| Mortal::haunt(socket.clone()));
        let spec = SmbdSpec {
            path: share.clone(),
            share: vec![
                "vfs objects = rushes".to_owned(),
                format!("rushes:socket = {}", socket.display()),
            ],
            global: global.iter().map(|line| (*line).to_owned()).collect(),
        };
        Some(Chaos {
            smbd: smbd::start_with(&scratch, &spec, Some(&module)),
            share,
            socket,
            _mortal: mortal,
            _scratch: scratch,
        })
    }

    /// From now on there is a daemon.
    fn give_birth(&self) {
        fs::write(&self.socket, "").expect("scratch is writable");
    }

    /// The module broke no rule of the header, and no smbd panicked.
    fn assert_well(&self) {
        let log = self.smbd.log();
        for word in ["chaos_client:", "PANIC", "INTERNAL ERROR"] {
            let found: Vec<&str> = log.lines().filter(|line| line.contains(word)).collect();
            assert!(found.is_empty(), "smbd's log says {found:#?}");
        }
    }
}

/// Chance with a seed.
struct Chance(u64);

impl Chance {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    fn length(&mut self) -> usize {
        let most = [100, 10_000, 200_000, 2_000_000][self.below(4) as usize];
        self.below(most) as usize + 1
    }
}

/// A client with every file open.
struct Player {
    hand: Hand,
    files: Vec<Held>,
}

impl Player {
    fn connect(port: u16) -> Player {
        let mut hand = Hand::connect(HAND, port);
        let files = NAMES.map(|name| hand.open_rw(name)).to_vec();
        Player { hand, files }
    }

    fn reopen(&mut self, which: usize) {
        self.hand.close(self.files[which]);
        self.files[which] = self.hand.open_rw(NAMES[which]);
    }
}

fn expected(model: &[u8], offset: u64, length: usize) -> &[u8] {
    let start = (offset as usize).min(model.len());
    &model[start..(start + length).min(model.len())]
}

#[track_caller]
fn assert_bytes(step: u64, name: &str, offset: u64, found: &[u8], expected: &[u8]) {
    assert_eq!(
        found.len(),
        expected.len(),
        "step {step}: how much of {name} there is at {offset}"
    );
    let wrong = found.iter().zip(expected).position(|(a, b)| a != b);
    assert_eq!(
        wrong, None,
        "step {step}: first wrong byte of {name} after {offset}"
    );
}

fn write(player: &mut Player, which: usize, model: &mut Vec<u8>, step: u64, chance: &mut Chance) {
    let offset = chance.below(LENGTH_MAX);
    let bytes = pattern::bytes(1000 + step, offset, chance.length().min(300_000));
    let end = offset as usize + bytes.len();
    if model.len() < end {
        model.resize(end, 0);
    }
    model[offset as usize..end].copy_from_slice(&bytes);
    player.hand.write(player.files[which], offset, &bytes);
}

/// Makes another file of the same name, or truncates the same one to nothing.
fn replace(players: &mut [Player], by: usize, which: usize, unlink: bool) {
    let name = NAMES[which];
    if unlink {
        for player in players.iter_mut() {
            player.hand.close(player.files[which]);
        }
        players[by].hand.unlink(name);
        let created = players[by].hand.create(name);
        players[by].hand.close(created);
        for player in players.iter_mut() {
            player.files[which] = player.hand.open_rw(name);
        }
    } else {
        let created = players[by].hand.create(name);
        players[by].hand.close(created);
    }
}

/// Several reads on their way at once, one of each client.
fn read_together(players: &mut [Player], models: &[Vec<u8>], step: u64, chance: &mut Chance) {
    let wanted: Vec<(usize, u64, usize)> = players
        .iter()
        .map(|_| {
            (
                chance.below(NAMES.len() as u64) as usize,
                chance.below(LENGTH_MAX + 100_000),
                chance.length(),
            )
        })
        .collect();
    for (player, &(which, offset, length)) in players.iter_mut().zip(&wanted) {
        player.hand.begin_read(player.files[which], offset, length);
    }
    for (player, &(which, offset, length)) in players.iter_mut().zip(&wanted) {
        let found = player.hand.finish_read().expect("the read is answered");
        assert_bytes(
            step,
            NAMES[which],
            offset,
            &found,
            expected(&models[which], offset, length),
        );
    }
}

/// Three clients act at random; every byte is as a model has it.
fn check(global: &[&str], fate: Fate, seed: u64) {
    let Some(chaos) = Chaos::build(global, fate) else {
        return;
    };
    let sendfile = global.iter().any(|line| line.contains("sendfile"));
    let mut chance = Chance(seed);
    let mut models = Vec::new();
    for (index, name) in NAMES.iter().enumerate() {
        let bytes = pattern::bytes(index as u64, 0, 2_500_001);
        put(&chaos.share.join(name), &bytes);
        models.push(bytes);
    }
    let mut players: Vec<Player> = (0..3).map(|_| Player::connect(chaos.smbd.port())).collect();
    for step in 0..300 {
        let by = chance.below(players.len() as u64) as usize;
        let which = chance.below(NAMES.len() as u64) as usize;
        match chance.below(100) {
            0..25 => write(
                &mut players[by],
                which,
                &mut models[which],
                step,
                &mut chance,
            ),
            25..29 => players[by].reopen(which),
            29..31 => {
                // sendfile sends zeros for bytes that another client has cut off: smbd trusts the
                // size it saw last.
                let unlink = sendfile || step % 2 == 0;
                replace(&mut players, by, which, unlink);
                models[which].clear();
            }
            _ => read_together(&mut players, &models, step, &mut chance),
        }
    }
    for (name, model) in NAMES.iter().zip(&models) {
        let file = fs::read(chaos.share.join(name)).expect("our own folder");
        assert!(file == *model, "{name} itself differs from the model");
    }
    chaos.assert_well();
}

fn put(path: &Path, bytes: &[u8]) {
    fs::write(path, bytes).expect("our own folder");
    fs::set_permissions(path, fs::Permissions::from_mode(0o666)).expect("our own file");
}

#[test]
fn every_change_is_told_when_smbd_reads_and_writes_asynchronously() {
    check(&[], Fate::Immortal, 11);
}

#[test]
fn every_change_is_told_when_smbd_reads_and_writes_synchronously() {
    check(
        &["aio read size = 0", "aio write size = 0"],
        Fate::Immortal,
        12,
    );
}

#[test]
fn every_change_is_told_when_smbd_receives_into_files_and_sends_from_them() {
    check(
        &[
            "aio read size = 0",
            "use sendfile = yes",
            "min receivefile size = 16384",
        ],
        Fate::Immortal,
        13,
    );
}

#[test]
fn a_daemon_that_dies_all_the_time_is_not_noticed_asynchronously() {
    check(&[], Fate::Mortal, 21);
}

#[test]
fn a_daemon_that_dies_all_the_time_is_not_noticed_synchronously() {
    check(
        &["aio read size = 0", "aio write size = 0"],
        Fate::Mortal,
        22,
    );
}

#[test]
fn a_daemon_that_dies_all_the_time_is_not_noticed_by_sendfile() {
    check(
        &["aio read size = 0", "use sendfile = yes"],
        Fate::Mortal,
        23,
    );
}

#[test]
fn clients_that_vanish_in_the_middle_of_reads_and_writes_leave_nothing_behind() {
    let Some(chaos) = Chaos::build(&[], Fate::Mortal) else {
        return;
    };
    for name in NAMES {
        put(&chaos.share.join(name), &pattern::bytes(1, 0, 8_000_000));
    }
    let mut chance = Chance(31);
    for round in 0..25 {
        let mut player = Player::connect(chaos.smbd.port());
        player.hand.begin_read(player.files[0], 0, 8_000_000);
        if round % 2 == 0 {
            std::thread::sleep(Duration::from_millis(chance.below(20)));
        }
        player.hand.kill();
    }
    let mut last = Player::connect(chaos.smbd.port());
    let found = last.hand.read(last.files[0], 0, 8_000_000);
    pattern::check(1, 0, &found, "after all the others vanished");
    chaos.assert_well();
}

#[test]
fn a_writer_that_found_no_daemon_tells_the_one_that_came_since() {
    let Some(chaos) = Chaos::build(&[], Fate::Unborn) else {
        return;
    };
    for name in NAMES {
        put(&chaos.share.join(name), &pattern::bytes(1, 0, 1_000_000));
    }
    let mut writer = Player::connect(chaos.smbd.port());
    writer
        .hand
        .write(writer.files[0], 0, b"written without a daemon");
    chaos.give_birth();
    let mut reader = Player::connect(chaos.smbd.port());
    let before = reader.hand.read(reader.files[0], 300_000, 200_000);
    pattern::check(1, 300_000, &before, "before the write");
    // Less than a second after the writer's smbd found no daemon: it must tell the new one now, not
    // after its next look.
    let bytes = pattern::bytes(2, 300_000, 200_000);
    writer.hand.write(writer.files[0], 300_000, &bytes);
    let after = reader.hand.read(reader.files[0], 300_000, 200_000);
    pattern::check(2, 300_000, &after, "after the write");
    chaos.assert_well();
}
