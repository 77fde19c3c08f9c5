// SPDX-License-Identifier: Apache-2.0
//! Troubles of the server while clients work: programs that are killed, disks that fail, hang and
//! fill; and the end of all troubles.

use super::Stage;
use super::actors::{SHARED, SHARED_BYTES};
use crate::disk::said;
use crate::random::Random;
use crate::stand::{Servants, Stand, smbd_of};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Length of the range of a disk that fails at once. Units: bytes.
const FAILS_BYTES: u64 = 65_536;
/// So many serving processes of a mount in a row may die as soon as they serve: half of the number
/// at which its keeper gives up.
const HASTY_MAX: u32 = 5;

/// Then one lives for longer than the time below which its keeper calls a death quick.
const LET_LIVE: Duration = Duration::from_millis(500);

/// A process writes all that it has within this time, on a busy machine.
const BY_THEN: Duration = Duration::from_secs(90);

/// A trouble.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// SIGKILL to the daemon, and after this time another start. Units: milliseconds.
    Daemon(u64),
    /// The same, and `rushes recover` before the pause; with a first time, one more before that,
    /// which is killed after this time.
    Recover(Option<u64>, u64),
    /// SIGTERM to the daemon.
    Stop(u64),
    /// SIGKILL to the daemon and to an smbd.
    Both(u64),
    /// SIGKILL to an smbd.
    Smbd,
    /// SIGKILL to the process that serves a mount that has a keeper.
    Serving,
    /// SIGKILL to a mount's keeper, with which its serving process ends, or to the only process of
    /// the mount; then a new mount and another smbd.
    Mount,
    /// A part of a file cannot be written.
    Fail,
    /// The disk does not answer for this time. Units: milliseconds.
    Stall(u64),
    /// A program fills all disks.
    Fill,
    /// Disks are sound again.
    Clear,
    /// Disks have room again.
    Unfill,
}

/// The troubles that a stand can have.
#[derive(Clone, Copy, Debug)]
pub struct Possible {
    /// Its disk obeys the test.
    pub disk_obeys: bool,
    /// It is a pool.
    pub is_pool: bool,
    /// Its mount has a keeper.
    pub is_kept: bool,
}

/// The names of all kinds that a round may have.
pub const KINDS: [&str; 10] = [
    "daemon", "recover", "stop", "both", "smbd", "fill", "fail", "stall", "serving", "mount",
];

/// Troubles of one round, each with its instant.
///
/// `wanted`   kinds of [`KINDS`], as far as they are possible; empty: some are drawn
pub fn draw(
    random: &mut Random,
    possible: Possible,
    wanted: &[String],
    time: Duration,
) -> Vec<(Duration, Trouble)> {
    let mut kinds = vec![
        "daemon", "daemon", "recover", "stop", "both", "smbd", "smbd", "fill",
    ];
    if possible.disk_obeys {
        kinds.extend(["fail", "fail", "stall"]);
    }
    if possible.is_kept {
        kinds.extend(["serving", "serving"]);
    }
    if possible.is_pool {
        kinds.push("mount");
    }
    // With few kinds at a time, rare combinations come up.
    let count = 1 + random.below(4);
    let mut some: Vec<&str> = (0..count).map(|_| random.one_of(&kinds)).collect();
    if !wanted.is_empty() {
        kinds.retain(|kind| wanted.iter().any(|name| name == kind));
        some = kinds;
    }
    if some.is_empty() {
        return Vec::new();
    }
    let pause = random.one_of(&[400, 1500, 4000]);
    let mut all = Vec::new();
    let mut at = Duration::from_millis(random.below(1500));
    let mut is_full_until = Duration::ZERO;
    while at < time {
        let down = random.one_of(&[0, 50, 400, 2000, 7000]);
        let down = random.below(down + 1);
        let lasts = Duration::from_millis(500 + random.below(4000));
        let trouble = match random.one_of(&some) {
            "daemon" => Trouble::Daemon(down),
            "recover" => {
                let again = random.once_in(2).then(|| random.below(60));
                Trouble::Recover(again, down)
            }
            "stop" => Trouble::Stop(down),
            "both" => Trouble::Both(down),
            "smbd" => Trouble::Smbd,
            "serving" => Trouble::Serving,
            "mount" => Trouble::Mount,
            "fail" => {
                all.push((at + lasts, Trouble::Clear));
                Trouble::Fail
            }
            "stall" => {
                all.push((at + lasts, Trouble::Clear));
                Trouble::Stall(lasts.as_millis() as u64)
            }
            // Disks are filled once at a time.
            _ if at <= is_full_until => Trouble::Smbd,
            _ => {
                is_full_until = at + lasts;
                all.push((is_full_until, Trouble::Unfill));
                Trouble::Fill
            }
        };
        all.push((at, trouble));
        at += Duration::from_millis(50 + random.below(2 * pause));
    }
    all.sort_by_key(|(at, _)| *at);
    all.retain(|(at, _)| *at < time);
    all
}

/// Whether the daemon is away at times.
pub fn daemon_goes(all: &[(Duration, Trouble)]) -> bool {
    all.iter().any(|(_, trouble)| {
        matches!(
            trouble,
            Trouble::Daemon(_) | Trouble::Recover(..) | Trouble::Stop(_) | Trouble::Both(_)
        )
    })
}

/// The actor that makes the troubles.
pub struct Troublemaker<'a> {
    /// The stand that gets them.
    pub stand: &'a mut Stand,
    /// The stage of the round's clients.
    pub stage: &'a Stage,
    /// The processes that serve clients.
    pub servants: Servants,
    /// The draws that decide the troubles.
    pub random: Random,
    /// Count of serving processes that were killed since the last one that could live for a while.
    pub hasty_count: u32,
}

impl Troublemaker<'_> {
    /// Makes each trouble at its instant, or as soon as the one before is over.
    pub fn make(&mut self, all: &[(Duration, Trouble)], time: Duration) {
        let begun = Instant::now();
        for (at, trouble) in all {
            if begun.elapsed() >= time {
                break;
            }
            std::thread::sleep(at.saturating_sub(begun.elapsed()));
            self.stage.tell(&format!("{trouble:?}"));
            self.make_one(*trouble);
        }
        std::thread::sleep(time.saturating_sub(begun.elapsed()));
    }

    fn make_one(&mut self, trouble: Trouble) {
        let pause = |ms| std::thread::sleep(Duration::from_millis(ms));
        match trouble {
            Trouble::Daemon(down) => {
                self.stand.daemon().kill();
                pause(down);
                self.stand.daemon().start_again();
            }
            Trouble::Recover(again, down) => {
                self.stand.daemon().kill();
                if let Some(after) = again {
                    self.kill_recover(after);
                }
                let _ = self.recover();
                pause(down);
                self.stand.daemon().start_again();
            }
            Trouble::Stop(down) => {
                self.stand.daemon().end();
                pause(down);
                self.stand.daemon().start_again();
            }
            Trouble::Both(down) => {
                self.stand.daemon().kill();
                self.stage.excuse_connections();
                self.servants.kill_one(&mut self.random);
                pause(down);
                self.stand.daemon().start_again();
            }
            Trouble::Smbd => {
                self.stage.excuse_connections();
                self.servants.kill_one(&mut self.random);
            }
            Trouble::Serving => {
                self.stage.excuse_left_over();
                if let Stand::Pool(_, _, world) = &self.stand {
                    // The keeper gives up after ten in a row that die as soon as they serve: it
                    // takes the program for one that cannot.
                    self.hasty_count += 1;
                    let is_let_live = self.hasty_count == HASTY_MAX;
                    if is_let_live || self.random.once_in(2) {
                        // A name that the kernel does not know yet: the process has to answer.
                        let name = format!("is-{}-there", self.random.below(u64::MAX));
                        let _ = fs::metadata(world.path(&name));
                    }
                    if is_let_live {
                        std::thread::sleep(LET_LIVE);
                        self.hasty_count = 0;
                    }
                    world.kill_serving();
                }
            }
            Trouble::Mount => self.mount_anew(),
            Trouble::Fail => {
                self.stage.excuse_disk();
                let at = self.random.below(SHARED_BYTES - FAILS_BYTES) & !4095;
                let path = self.stand.place(SHARED);
                if let Some(disk) = self.stand.disk()
                    && path.starts_with(disk.path())
                {
                    let place = disk.physical(&path, at) & !4095;
                    disk.tell(&format!("fail write {place} {FAILS_BYTES}"));
                }
            }
            Trouble::Stall(ms) => {
                if let Some(disk) = self.stand.disk() {
                    disk.tell("timing on");
                    disk.tell(&format!("stall {ms}"));
                }
            }
            Trouble::Clear => self.clear(),
            Trouble::Fill => {
                self.stage.excuse_full();
                self.folders().iter().for_each(|folder| fill(folder));
            }
            Trouble::Unfill => self.unfill(),
        }
    }

    fn clear(&self) {
        if let Some(disk) = self.stand.disk()
            && disk.obeys()
        {
            disk.tell("clear");
            disk.tell("timing off");
            self.stage.disk_is_sound();
        }
    }

    fn unfill(&self) {
        for folder in self.folders() {
            for turn in 0..FILLERS {
                let _ = fs::remove_file(folder.join(format!("filler{turn}")));
            }
        }
    }

    /// Where the file systems are mounted.
    fn folders(&self) -> Vec<PathBuf> {
        match &self.stand {
            Stand::Pool(.., world) => world.file_systems(),
            Stand::Plain(world) => vec![world.disk.path().to_path_buf()],
        }
    }

    fn mount_anew(&mut self) {
        self.stage.excuse_connections();
        self.stage.excuse_mount();
        self.stage.excuse_left_over();
        if let Stand::Pool(smbd, _, world) = &mut *self.stand {
            world.kill();
            world.start();
            // This smbd has the dead mount, in a name space of its own.
            smbd.stop();
            *smbd = smbd_of(world);
            self.stage.come_to(smbd.port());
            self.servants = Servants::of(smbd);
        }
    }

    fn kill_recover(&mut self, after: u64) {
        let mut command = self.stand.recover(&[]);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().expect("rushes starts");
        std::thread::sleep(Duration::from_millis(after));
        child.kill().expect("it is our child");
        child.wait().expect("it is our child");
    }

    /// Runs `rushes recover` while no daemon serves. Returns  whether nothing is left
    fn recover(&mut self) -> bool {
        let output = self.stand.recover(&[]).output().expect("rushes starts");
        match output.status.code() {
            Some(0) => true,
            // Its disk fails or is full; or a door has started another recovery.
            Some(1) if self.stage.disk_is_excused() => false,
            Some(2) => false,
            _ => {
                let said = said(&output);
                self.stage
                    .fault(&format!("rushes recover: {}: {said}", output.status));
                false
            }
        }
    }

    /// All troubles are over; the daemon is there.
    pub fn end_all(&mut self) {
        self.unfill();
        self.clear();
        if !self.stand.daemon().is_alive() {
            let log = self.stand.daemon().log();
            let last = &log[log.len().saturating_sub(2000)..];
            self.stage
                .fault(&format!("the daemon ended by itself:\n{last}"));
            self.stand.daemon().start_again();
        }
    }

    /// Brings everything to its disks in one of three ways: by another program, by the daemon that
    /// ends, or by the daemon that goes on.
    pub fn settle(&mut self, way: u64) {
        match way {
            0 => {
                self.stage.tell("killed at the end, and recovered");
                self.stand.daemon().kill();
                if self.random.once_in(2) {
                    let after = self.random.below(60);
                    self.kill_recover(after);
                }
                let end = Instant::now() + BY_THEN;
                self.stage.disks_are_over();
                while !self.recover() && Instant::now() < end {
                    std::thread::sleep(Duration::from_millis(200));
                }
                self.nothing_is_left();
                self.stand.daemon().start_again();
            }
            1 => {
                self.stage.tell("stopped at the end");
                self.stand.daemon().end();
                self.nothing_is_left();
                self.stand.daemon().start_again();
            }
            _ => {
                self.stage.tell("waited for at the end");
                let end = Instant::now() + BY_THEN;
                while self.stand.daemon().status()["write"]["used_bytes"] != 0 {
                    if Instant::now() > end {
                        let status = self.stand.daemon().status();
                        let left = &status["write"];
                        let notes = &status["daemon"]["notes"];
                        self.stage
                            .fault(&format!("not written after {BY_THEN:?}: {left} {notes}"));
                        break;
                    }
                    std::thread::sleep(Duration::from_millis(50));
                }
            }
        }
    }

    fn nothing_is_left(&self) {
        let output = self.stand.recover(&["--list", "--json"]).output();
        let output = output.expect("rushes starts");
        let lanes = serde_json::from_slice::<serde_json::Value>(&output.stdout);
        let is_empty = lanes.is_ok_and(|lanes| {
            let all = lanes.as_array().into_iter().flatten();
            all.filter_map(|lane| lane["write_count"].as_u64())
                .sum::<u64>()
                == 0
        });
        if !is_empty {
            self.stage
                .fault(&format!("something is left: {}", said(&output)));
        }
    }
}

/// Most files that fill a disk.
const FILLERS: usize = 30;

/// Fills a file system, nearly to the last block.
fn fill(folder: &Path) {
    for turn in 0..FILLERS {
        let Ok(found) = rustix::fs::statvfs(folder) else {
            return;
        };
        let room = found.f_bavail * found.f_frsize;
        if room < 1 << 16 {
            return;
        }
        // A file system does not give its very last blocks to one request.
        let part = if turn < 3 { room } else { room / 2 };
        let _ = Command::new("fallocate")
            .arg("-l")
            .arg(part.to_string())
            .arg(folder.join(format!("filler{turn}")))
            .output();
    }
}
