// SPDX-License-Identifier: Apache-2.0
//! The torture: clients of every kind write, read and rename while programs are killed and disks
//! fail, hang and fill, round after round, for as long as one likes; and a model has the values of
//! each byte that a reader may see.
//!
//! A seed and the number of a round decide all that the program can decide: the stand, which is a
//! plain share on a disk that obeys, or a pool, each built for this round; the [`actors`]; the
//! [`troubles`] and their instants; and the end. The machine decides the order of things done at
//! once. A round is played again by its number alone.
//!
//! The promises, as the [`model`] has them:
//! - each later reader sees an acknowledged change, which stays through kills of any of our
//!   programs and of smbd;
//! - requests of several clients at once have no order; a change that was refused, or never
//!   answered, may be there or not;
//! - a change that a flush covers stays also through a disk that failed meanwhile; so do all
//!   others, unless a client wrote past a daemon that was away;
//! - no client gets an error without a reason: its smbd was killed, a disk has failed, disks are
//!   full, the mount has died;
//! - a name that files are renamed to has one of them, whole;
//! - programs on the server and clients see each other's bytes within [`LAG`] on a plain share, at
//!   once on a pool;
//! - in the end everything is on the disks, nothing is left in a lane, `rushes recover` says so,
//!   and fsck of a pool finds nothing.
//!
//! After a round the program reads all files over SMB, and once more from the disk, or of a pool
//! from a mount without a daemon.

pub mod actors;
pub mod model;
pub mod troubles;

use crate::needs;
use crate::pool::{EXT4, PoolWorld, XFS};
use crate::random::Random;
use crate::smb2::{Connection, DISK_FULL, Disposition, GONE, HANGS, REQUEST_MAX, Status};
use crate::smbd::SHARE;
use crate::stand::{Servants, Stand};
use crate::world::Backing;
use actors::{Actor, MIXED, Role, SHARED, SHARED_BYTES, SOURCE, renamed, source};
use model::{FileModel, NameModel};
use rustix::fs::{SeekFrom, seek};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use troubles::{Possible, Trouble, Troublemaker};

/// Clients see changes by programs on the server to a plain share within this time; a second is
/// promised where no client writes, three elsewhere.
pub const LAG: Duration = Duration::from_secs(5);
/// A kill may break a connection that was made up to so long after the kill was noted.
const JUST_BEFORE: Duration = Duration::from_secs(2);
/// Disks that are sound again take everything within this time.
const FLUSHED_BY: Duration = Duration::from_secs(60);
/// Faults of one round that are printed, at most.
const TOLD_MAX: usize = 6;

/// The plan of a torture.
#[derive(Clone, Debug)]
pub struct Plan {
    /// All draws follow from it.
    pub seed: u64,
    /// No round begins after this time.
    pub time: Duration,
    /// Only stands of this kind.
    pub stand: Option<Kind>,
    /// Only this round.
    pub only: Option<u64>,
    /// The length of each round; None: drawn from the seed.
    pub round: Option<Duration>,
    /// The roles of the actors, in turn; empty: drawn from the seed.
    pub roles: Vec<Role>,
    /// The kinds of its troubles, of [`troubles::KINDS`], each as likely; empty: drawn by the seed.
    pub troubles: Vec<String>,
    /// At the end of each round a byte of a file changes on its disk, past every program: the model
    /// must find that.
    pub flips: bool,
}

/// The kind of folder that clients write to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A share with our module.
    Plain,
    /// A pool's mount.
    Pool,
}

/// The number of steps, and the faults.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Rounds.
    pub rounds: u64,
    /// Requests of all clients that succeeded.
    pub steps: u64,
    /// The faults.
    pub faults: Vec<String>,
}

/// Runs the torture. None: the machine lacks something, which was printed.
pub fn run(plan: &Plan) -> Option<Report> {
    let begun = Instant::now();
    let mut report = Report::default();
    let first = plan.only.unwrap_or(0);
    for number in first.. {
        let is_over = begun.elapsed() >= plan.time || plan.only.is_some_and(|only| only != number);
        if is_over {
            break;
        }
        let draw = Draw::of(plan, number);
        let Some(Played {
            steps,
            refused,
            faults,
        }) = play(plan, &draw)
        else {
            return (report.rounds > 0).then_some(report);
        };
        println!(
            "torture: {:>5} s, seed {} round {number}: {steps} steps, {refused} refused, {} faults; {}",
            begun.elapsed().as_secs(),
            plan.seed,
            faults.len(),
            draw.told()
        );
        report.rounds += 1;
        report.steps += steps;
        report.faults.extend(faults);
    }
    Some(report)
}

/// The draws of the seed for one round.
#[derive(Clone, Debug)]
struct Draw {
    number: u64,
    stand: Drawn,
    roles: Vec<Role>,
    troubles: Vec<(Duration, Trouble)>,
    time: Duration,
    /// The way in which it ends.
    way: u64,
    /// Whether all files are flushed before.
    is_flushed: bool,
}

#[derive(Clone, Copy, Debug)]
enum Drawn {
    Plain(Backing),
    Pool {
        member_count: usize,
        is_kept: bool,
        disk_obeys: bool,
    },
}

impl Draw {
    fn of(plan: &Plan, number: u64) -> Draw {
        let mut random = Random::of(&[plan.seed, number]);
        let kind = match (plan.stand, random.below(2)) {
            (Some(kind), _) => kind,
            (None, 0) => Kind::Plain,
            (None, _) => Kind::Pool,
        };
        let stand = match kind {
            Kind::Plain => {
                let all = [
                    Backing::Ext4,
                    Backing::Slow,
                    Backing::Slow,
                    Backing::SlowXfs,
                ];
                Drawn::Plain(random.one_of(&all))
            }
            Kind::Pool => Drawn::Pool {
                member_count: 1 + random.below(4) as usize,
                is_kept: !random.once_in(3),
                disk_obeys: random.once_in(2),
            },
        };
        let time = Duration::from_millis(10_000 + random.below(25_000));
        let time = plan.round.unwrap_or(time);
        let possible = match stand {
            Drawn::Plain(backing) => Possible {
                disk_obeys: backing.is_lab_disk(),
                is_pool: false,
                is_kept: false,
            },
            Drawn::Pool {
                is_kept,
                disk_obeys,
                ..
            } => Possible {
                disk_obeys,
                is_pool: true,
                is_kept,
            },
        };
        let drawn = roles(&mut random, possible);
        let roles = match plan.roles.is_empty() {
            true => drawn,
            false => plan.roles.clone(),
        };
        Draw {
            number,
            stand,
            roles,
            troubles: troubles::draw(&mut random, possible, &plan.troubles, time),
            time,
            way: random.below(3),
            is_flushed: random.once_in(2),
        }
    }

    fn build(&self) -> Option<Stand> {
        match self.stand {
            Drawn::Plain(backing) => Stand::plain_on(backing),
            Drawn::Pool {
                member_count,
                is_kept,
                disk_obeys,
            } => {
                let all = [(EXT4, 200), (XFS, 300), (EXT4, 200), (XFS, 300)];
                Stand::pool_of(&all[..member_count], is_kept, disk_obeys)
            }
        }
    }

    /// The draw in half a line.
    fn told(&self) -> String {
        let mut words = BTreeMap::<String, u64>::new();
        for role in &self.roles {
            *words.entry(format!("{role:?}")).or_default() += 1;
        }
        for (_, trouble) in &self.troubles {
            let word = format!("{trouble:?}");
            let word = word.split('(').next().unwrap_or_default();
            *words
                .entry(format!("{}!", word.to_lowercase()))
                .or_default() += 1;
        }
        let words: Vec<String> = words
            .iter()
            .map(|(word, n)| format!("{n} {word}"))
            .collect();
        format!(
            "{:?} {} s: {}",
            self.stand,
            self.time.as_secs(),
            words.join(", ")
        )
    }
}

/// The roles of a round. Two actors always write over each other, and one reads.
fn roles(random: &mut Random, possible: Possible) -> Vec<Role> {
    let is_drawn = |role: &Role| match role {
        Role::Read => false,
        Role::LocalOverlap => possible.is_pool,
        _ => true,
    };
    let kinds: Vec<Role> = Role::ALL.into_iter().filter(is_drawn).collect();
    let mut all = vec![Role::Overlap, Role::Overlap, Role::Read];
    let count = 3 + random.below(6);
    all.extend((0..count).map(|_| random.one_of(&kinds)));
    all
}

/// The state that all actors of one round share.
pub struct Stage {
    /// The seed of the torture.
    pub seed: u64,
    /// The number of the round.
    pub round: u64,
    /// The folder that clients write to, as programs on the server see it.
    pub folder: PathBuf,
    /// The models of the files.
    files: Vec<Arc<FileModel>>,
    /// Names that files are renamed to.
    pub names: Vec<NameModel>,
    port: AtomicU16,
    done: AtomicBool,
    steps: AtomicU64,
    /// Requests that failed with an excuse, without those whose connection broke.
    refused: AtomicU64,
    begun: Instant,
    excuses: Mutex<Excuses>,
    story: Mutex<Vec<String>>,
    faults: Mutex<Vec<String>>,
    /// A process that served a mount was killed.
    mount_died: AtomicBool,
    /// The daemon is away at times: bytes that go past it may be lost with a disk.
    daemon_goes: bool,
    /// The logs of daemon and smbd.
    logs: Mutex<[String; 2]>,
}

/// Reasons for which a request may fail.
#[derive(Clone, Copy, Debug, Default)]
struct Excuses {
    /// When an smbd, or all of them, was killed last.
    connections: Option<Instant>,
    disk: bool,
    full: bool,
    mount: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Stage {
    /// Whether clients go on.
    pub fn goes_on(&self) -> bool {
        !self.done.load(Ordering::Relaxed)
    }

    /// Counts a request that succeeded.
    pub fn step(&self) {
        self.steps.fetch_add(1, Ordering::Relaxed);
    }

    /// The port of smbd.
    pub fn port(&self) -> u16 {
        self.port.load(Ordering::Relaxed)
    }

    /// Sets the port of another smbd.
    pub fn come_to(&self, port: u16) {
        self.port.store(port, Ordering::Relaxed);
    }

    /// The model of a file.
    pub fn file(&self, name: &str) -> Arc<FileModel> {
        let found = self.files.iter().find(|file| file.name == name);
        Arc::clone(found.expect("it was made"))
    }

    /// The model of some file.
    pub fn any_file(&self, random: &mut Random) -> Arc<FileModel> {
        let number = random.below(self.files.len() as u64);
        Arc::clone(&self.files[number as usize])
    }

    /// Some name that files are renamed to.
    pub fn any_name(&self, random: &mut Random) -> Option<usize> {
        let count = self.names.len() as u64;
        (count > 0).then(|| random.below(count) as usize)
    }

    /// Adds a trouble to the story of the round.
    pub fn tell(&self, what: &str) {
        let at = self.begun.elapsed().as_secs_f64();
        lock(&self.story).push(format!("{at:.3} {what}"));
    }

    /// Adds a fault.
    pub fn fault(&self, what: &str) {
        let at = self.begun.elapsed().as_secs_f64();
        lock(&self.faults).push(format!("{at:.3} {what}"));
    }

    /// Connections break now.
    pub fn excuse_connections(&self) {
        lock(&self.excuses).connections = Some(Instant::now());
    }

    /// A disk fails from now on.
    pub fn excuse_disk(&self) {
        lock(&self.excuses).disk = true;
        self.file(SHARED).disk_fails();
    }

    /// Disks are full from now on.
    pub fn excuse_full(&self) {
        lock(&self.excuses).full = true;
    }

    /// The process that serves the mount is killed: a file that it was about to remove or to name
    /// may be left over.
    pub fn excuse_left_over(&self) {
        self.mount_died.store(true, Ordering::Relaxed);
    }

    /// The mount dies.
    pub fn excuse_mount(&self) {
        lock(&self.excuses).mount = true;
    }

    /// Whether disks fail, or are full.
    pub fn disk_is_excused(&self) -> bool {
        let excuses = lock(&self.excuses);
        excuses.disk || excuses.full
    }

    /// Disks are no excuse any more.
    pub fn disks_are_over(&self) {
        let mut excuses = lock(&self.excuses);
        (excuses.disk, excuses.full) = (false, false);
    }

    /// A disk does not fail any more.
    pub fn disk_is_sound(&self) {
        if lock(&self.excuses).disk && self.daemon_goes {
            self.file(SHARED).lose_what_is_not_durable();
        }
    }

    /// Why a request may not fail with this status; None: it has an excuse. `connected`: when its
    /// client connected.
    pub fn wrong(&self, status: Status, connected: Option<Instant>) -> Option<&'static str> {
        let excuses = *lock(&self.excuses);
        match status {
            HANGS => Some("nobody has answered for a minute"),
            GONE => {
                let is_hit = |at: Instant| connected.is_none_or(|came| at + JUST_BEFORE > came);
                let excused = excuses.connections.is_some_and(is_hit);
                (!excused).then_some("its smbd ended by itself")
            }
            Status(DISK_FULL) if excuses.full => self.is_refused(),
            _ if excuses.disk || excuses.mount => self.is_refused(),
            _ => Some("there is no reason for it"),
        }
    }

    fn is_refused(&self) -> Option<&'static str> {
        self.refused.fetch_add(1, Ordering::Relaxed);
        None
    }

    /// Whether a program on the server may get this error.
    pub fn excuses_local(&self, error: &std::io::Error) -> bool {
        let excuses = *lock(&self.excuses);
        let is_full = error.kind() == std::io::ErrorKind::StorageFull && excuses.full;
        // EIO, of a disk that fails.
        let is_failing = error.raw_os_error() == Some(5) && excuses.disk;
        is_full || is_failing || excuses.mount
    }
}

/// Ends all actors when it is dropped, also by a panic.
struct Finally<'a>(&'a Stage);

impl Drop for Finally<'_> {
    fn drop(&mut self) {
        self.0.done.store(true, Ordering::Relaxed);
    }
}

/// The result of one round.
struct Played {
    /// Requests that succeeded.
    steps: u64,
    /// Those that failed with an excuse.
    refused: u64,
    faults: Vec<String>,
}

/// Plays one round. None: the machine lacks something.
fn play(plan: &Plan, draw: &Draw) -> Option<Played> {
    let mut stand = draw.build()?;
    let stage = set_up(plan, draw, &mut stand);
    // A panic of a round is a fault as any other, and ends the stand in order.
    let played = catch_unwind(AssertUnwindSafe(|| play_on(plan, draw, &stage, stand)));
    if let Err(panic) = played {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        stage.fault(&text.unwrap_or_else(|| String::from("a panic without words")));
    }
    let mut faults = std::mem::take(&mut *lock(&stage.faults));
    let log = lock(&stage.logs)[0].clone();
    let told: Vec<&str> = log
        .lines()
        .filter(|line| line.contains(TOLD_OF_OTHERS))
        .collect();
    let kernel = match faults.is_empty() {
        true => String::new(),
        false => kernel_log(),
    };
    faults.retain(|fault| {
        let is_known = is_told_of_others(fault, &told) || is_collision(fault, &stage, &kernel);
        if is_known {
            stage.refused.fetch_add(1, Ordering::Relaxed);
            println!("known ({TOLD_OF_OTHERS}): {fault}");
        }
        !is_known
    });
    if !faults.is_empty() {
        println!("{}", tell(plan, draw, &stage, &faults));
        keep_logs(&stage);
    }
    Some(Played {
        steps: stage.steps.load(Ordering::Relaxed),
        refused: stage.refused.load(Ordering::Relaxed),
        faults,
    })
}

/// The daemon's words when it returns an error to a client that may not come from a disk: a limit
/// that docs/decisions/0036 names.
const TOLD_OF_OTHERS: &str = "a flush fails with an error that may not come from a disk";

/// A flush of a file was refused without an excuse, and the daemon's log has those words of the
/// same file. It logs them once a minute for a file: a line may be about several flushes.
fn is_told_of_others(fault: &str, told: &[&str]) -> bool {
    refused_flush(fault).is_some_and(|name| {
        let name = format!("{name:?}");
        told.iter().any(|line| line.contains(&name))
    })
}

/// The kernel's log says of that file that the kernel could not drop a page of its cache behind a
/// write past it: it returns that as an error of the disk to each descriptor of the file, also
/// where `rushes recover` wrote, and a client flushes its own writes while no daemon is there. It
/// logs ten files a day.
fn is_collision(fault: &str, stage: &Stage, kernel: &str) -> bool {
    refused_flush(fault).is_some_and(|name| {
        let file = format!("File: {} PID", stage.folder.join(name).display());
        kernel.lines().any(|line| line.contains(&file))
    })
}

/// The file whose flush was refused with an error of the disk.
fn refused_flush(fault: &str) -> Option<&str> {
    let (_, rest) = fault.split_once(": flush ")?;
    let (name, why) = rest.split_once(": ")?;
    why.starts_with("0xc0000185").then_some(name)
}

fn kernel_log() -> String {
    let output = Command::new("dmesg").output();
    output.map_or_else(
        |_| String::new(),
        |output| String::from_utf8_lossy(&output.stdout).into_owned(),
    )
}

fn tell(plan: &Plan, draw: &Draw, stage: &Stage, faults: &[String]) -> String {
    let story = lock(&stage.story).join("; ");
    let told = faults[..faults.len().min(TOLD_MAX)].join("\n");
    let mut stand = String::from(match plan.stand {
        None => "any",
        Some(Kind::Plain) => "plain",
        Some(Kind::Pool) => "pool",
    });
    if !plan.roles.is_empty() {
        let words = plan
            .roles
            .iter()
            .map(|role| format!("{role:?}").to_lowercase());
        stand += &format!(" --roles {}", words.collect::<Vec<_>>().join(","));
    }
    if !plan.troubles.is_empty() {
        stand += &format!(" --troubles {}", plan.troubles.join(","));
    }
    format!(
        "FAULT: seed {} round {}, {} faults:\n{told}\n{story}\n\
         again: make torture TORTURE=\"--seed {} --stand {stand} --only {}\"",
        plan.seed,
        draw.number,
        faults.len(),
        plan.seed,
        draw.number
    )
}

fn set_up(plan: &Plan, draw: &Draw, stand: &mut Stand) -> Stage {
    let is_plain = matches!(draw.stand, Drawn::Plain(_));
    let daemon_goes = troubles::daemon_goes(&draw.troubles);
    let fails = draw.troubles.iter().any(|(_, one)| *one == Trouble::Fail);
    let mut files = Vec::new();
    for name in [SHARED, MIXED, SOURCE] {
        let model = FileModel::new(name, source());
        let loses = name == SHARED && fails && daemon_goes;
        files.push(if loses { model.losing() } else { model });
    }
    for (number, role) in (0..).zip(&draw.roles) {
        let Some(name) = role.own_file(number) else {
            continue;
        };
        let model = FileModel::new(&name, Vec::new());
        let is_behind = *role == Role::Local && is_plain;
        files.push(if is_behind { model.behind(LAG) } else { model });
    }
    for file in &files {
        let path = stand.seen(&file.name);
        let bytes = if file.length().0 == SHARED_BYTES {
            source()
        } else {
            Vec::new()
        };
        fs::write(&path, bytes).expect("our own disk");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("our own disk");
    }
    if let Some(disk) = stand.disk() {
        disk.make_cold();
    }
    let renames = (0..)
        .zip(&draw.roles)
        .filter(|(_, role)| **role == Role::Rename);
    Stage {
        seed: plan.seed,
        round: draw.number,
        folder: stand.seen(""),
        files: files.into_iter().map(Arc::new).collect(),
        names: renames
            .map(|(number, _)| NameModel::new(&renamed(number)))
            .collect(),
        port: AtomicU16::new(stand.smbd().port()),
        done: AtomicBool::new(false),
        steps: AtomicU64::new(0),
        refused: AtomicU64::new(0),
        begun: Instant::now(),
        excuses: Mutex::default(),
        story: Mutex::default(),
        faults: Mutex::default(),
        mount_died: AtomicBool::new(false),
        daemon_goes,
        logs: Mutex::default(),
    }
}

fn play_on(plan: &Plan, draw: &Draw, stage: &Stage, mut stand: Stand) {
    let servants = Servants::of(stand.smbd());
    let mut maker = Troublemaker {
        stand: &mut stand,
        stage,
        servants,
        random: Random::of(&[plan.seed, draw.number, u64::MAX]),
        hasty_count: 0,
    };
    std::thread::scope(|scope| {
        let _all = Finally(stage);
        let running: Vec<_> = (0..)
            .zip(&draw.roles)
            .map(|(number, role)| {
                let actor = Actor::new(stage, *role, number);
                scope.spawn(move || actor.work())
            })
            .collect();
        maker.make(&draw.troubles, draw.time);
        // Before clients end: some wait for a disk.
        maker.end_all();
        stage.done.store(true, Ordering::Relaxed);
        for (actor, role) in running.into_iter().zip(&draw.roles) {
            if actor.join().is_err() {
                stage.fault(&format!("{role:?} panicked"));
            }
        }
    });
    if draw.is_flushed {
        flush_all(stage);
    }
    maker.settle(draw.way);
    let mut random = maker.random.clone();
    read_all(stage, "over SMB in the end", |name| by_smb(stage, name));
    let mut flip = |path: PathBuf| {
        let file = fs::File::options().read(true).write(true).open(path);
        let file = file.expect("our own disk");
        let at = random.below(SHARED_BYTES);
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).expect("our own disk");
        file.write_all_at(&[!byte[0]], at).expect("our own disk");
    };
    match &mut stand {
        Stand::Plain(world) => {
            if plan.flips {
                flip(world.path(SHARED));
            }
            // The kernel returns the error of a failed write-back once: this sync takes it, if no
            // other has.
            let _ = Command::new("sync")
                .arg("-f")
                .arg(world.disk.path())
                .output();
            world.disk.make_cold();
            read_all(stage, "on the disk in the end", |name| {
                local(world.path(name))
            });
            logs(stage, &world.daemon().log(), &world.smbd.log());
        }
        Stand::Pool(smbd, daemon, world) => {
            logs(stage, &daemon.log(), &smbd.log());
            smbd.stop();
            world.end();
            daemon.end();
            world.start();
            if plan.flips {
                flip(world.path(SHARED));
            }
            read_all(stage, "on the mount in the end", |name| {
                local(world.path(name))
            });
            world.end();
            look_through(stage, world);
        }
    }
}

/// fsck finds nothing in the pool but objects that a killed mount was about to remove or name, and
/// mends these.
fn look_through(stage: &Stage, world: &mut PoolWorld) {
    let (report, code) = world.json(&["fsck"], &[]);
    if code == Some(0) {
        return;
    }
    let findings = report["findings"].as_array().into_iter().flatten();
    let is_left_over = |one: &serde_json::Value| {
        one["kind"].as_str() == Some("unnamed") && one["state"].as_str() == Some("mendable")
    };
    let is_excused = stage.mount_died.load(Ordering::Relaxed) && findings.clone().all(is_left_over);
    if !is_excused {
        let shown: Vec<String> = findings.clone().map(|one| look_at(world, one)).collect();
        world.start();
        let files = findings.filter_map(|one| one["file"].as_str());
        let places: BTreeMap<&str, serde_json::Value> =
            files.map(|file| (file, world.where_is(file))).collect();
        world.end();
        return stage.fault(&format!(
            "fsck: {code:?}: {report:#}\n{}\n{places:?}",
            shown.join("\n")
        ));
    }
    for options in [&["fsck", "--repair"][..], &["fsck"]] {
        let (report, code) = world.json(options, &[]);
        if code != Some(0) {
            stage.fault(&format!("{options:?}: {code:?}: {report:#}"));
        }
    }
}

/// The contents of the object of a finding, to help find its cause.
fn look_at(world: &PoolWorld, finding: &serde_json::Value) -> String {
    let (Some(member), Some(object)) = (finding["member"].as_u64(), finding["object"].as_str())
    else {
        return String::new();
    };
    let path = world.member(member as usize).join("pool").join(object);
    let parts = match File::open(&path).and_then(|object| data_of(&object)) {
        Ok(parts) => parts.join(" "),
        Err(error) => error.to_string(),
    };
    format!("{}: {parts}", path.display())
}

/// Ranges in which an object has data, each with the count of its bytes that are not zero.
fn data_of(object: &File) -> std::io::Result<Vec<String>> {
    let length = object.metadata()?.len();
    let mut parts = Vec::new();
    let mut at = 0;
    while let Ok(start) = seek(object, SeekFrom::Data(at)) {
        at = seek(object, SeekFrom::Hole(start))?;
        let mut bytes = vec![0; (at - start) as usize];
        object.read_exact_at(&mut bytes, start)?;
        let count = bytes.iter().filter(|byte| **byte != 0).count();
        parts.push(format!("{start}..{at} ({count} not zero)"));
    }
    parts.push(format!("{length} in all"));
    Ok(parts)
}

/// Flushes all files. All disks are sound: each flush succeeds, if not at once.
fn flush_all(stage: &Stage) {
    let end = Instant::now() + FLUSHED_BY;
    let Ok(client) = Connection::connect_mortal(stage.port(), SHARE) else {
        return stage.fault("nobody lets a client in");
    };
    for model in &stage.files {
        let Ok((file, _)) = client.open(&model.name, Disposition::Open) else {
            stage.fault(&format!("{} cannot be opened to be flushed", model.name));
            continue;
        };
        loop {
            let begun = Instant::now();
            match client.flush(file) {
                Ok(()) => break model.flushed(begun),
                Err(status) if Instant::now() > end || status == GONE => {
                    break stage.fault(&format!("flush {}: {:#010x}", model.name, status.0));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(200)),
            }
        }
        let _ = client.close(file);
    }
}

/// Reads all files after the end of all requests: each byte that the model does not have is a
/// fault.
fn read_all(stage: &Stage, how: &str, read: impl Fn(&str) -> Result<Option<Vec<u8>>, String>) {
    for model in &stage.files {
        let wrong = match read(&model.name) {
            Ok(Some(bytes)) => model.is_whole(&bytes).err(),
            Ok(None) => Some(format!("{}: it is gone", model.name)),
            Err(error) => Some(format!("{}: {error}", model.name)),
        };
        if let Some(wrong) = wrong {
            stage.fault(&format!("{how}: {wrong}"));
        }
    }
    for model in &stage.names {
        let found =
            read(&model.name).and_then(|bytes| model.found(Instant::now(), bytes.as_deref()));
        if let Err(wrong) = found {
            stage.fault(&format!("{how}: {wrong}"));
        }
    }
}

/// All of a file; None: there is none.
fn by_smb(stage: &Stage, name: &str) -> Result<Option<Vec<u8>>, String> {
    let said = |status: Status| format!("{:#010x}", status.0);
    let client = Connection::connect_mortal(stage.port(), SHARE);
    let client = client.map_err(|error| error.to_string())?;
    let (file, info) = match client.open_to_read(name) {
        Err(Status(crate::smb2::NOT_FOUND)) => return Ok(None),
        other => other.map_err(said)?,
    };
    let mut all = Vec::new();
    loop {
        let part = client
            .read(file, all.len() as u64, REQUEST_MAX)
            .map_err(said)?;
        all.extend_from_slice(&part);
        if part.len() < REQUEST_MAX {
            break;
        }
    }
    if info.size != all.len() as u64 {
        return Err(format!("{} bytes of {} were read", all.len(), info.size));
    }
    Ok(Some(all))
}

fn local(path: PathBuf) -> Result<Option<Vec<u8>>, String> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

/// Keeps all logs, to help find the cause of a fault that does not come again.
fn keep_logs(stage: &Stage) {
    let name = format!("torture-seed-{}-round-{}", stage.seed, stage.round);
    let folder = needs::build_folder().join(name);
    let [daemon, smbd] = std::mem::take(&mut *lock(&stage.logs));
    let kept = fs::create_dir_all(&folder)
        .and_then(|()| fs::write(folder.join("daemon.log"), daemon))
        .and_then(|()| fs::write(folder.join("smbd.log"), smbd))
        .and_then(|()| fs::write(folder.join("kernel.log"), kernel_log()));
    match kept {
        Ok(()) => println!("logs kept: {}", folder.display()),
        Err(error) => println!("logs could not be kept: {}: {error}", folder.display()),
    }
}

/// Takes the logs. A panic in them is a fault by itself.
fn logs(stage: &Stage, daemon: &str, smbd: &str) {
    *lock(&stage.logs) = [daemon.to_owned(), smbd.to_owned()];
    // Samba itself panics if the folder of a share dies: vfs_default.c asserts that it can go
    // there.
    let smbd = if lock(&stage.excuses).mount { "" } else { smbd };
    for (whose, log, word) in [
        ("the daemon", daemon, "panicked"),
        ("smbd", smbd, "PANIC"),
        ("smbd", smbd, "INTERNAL ERROR"),
    ] {
        if let Some(line) = log.lines().find(|line| line.contains(word)) {
            stage.fault(&format!("{whose} says: {line}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_refused_flush_is_known_where_the_daemon_said_so_of_that_file() {
        let fault =
            "18.263 SetEnd 3, step 1494: flush end-3.mov: 0xc0000185: there is no reason for it";
        let said = format!("ERROR \"end-3.mov\": {TOLD_OF_OTHERS} (Input/output error)");
        let told = [said.as_str()];
        assert!(!is_told_of_others(&fault.replace("end-3", "end-4"), &told));
        assert!(!is_told_of_others(&fault.replace("end-3", "nd-3"), &told));
        assert!(!is_told_of_others(&fault.replace("flush", "read"), &told));
        assert!(!is_told_of_others(&fault.replace("0185", "0022"), &told));
        assert!(is_told_of_others(fault, &told));
        assert!(!is_told_of_others(fault, &[]), "it was not said");
    }

    #[test]
    fn everybody_and_every_trouble_comes_on_each_kind_of_stand_where_it_can() {
        for (kind, trouble_count) in [(Kind::Plain, 10), (Kind::Pool, 12)] {
            let plan = Plan {
                seed: 1,
                time: Duration::ZERO,
                stand: Some(kind),
                only: None,
                round: None,
                roles: Vec::new(),
                troubles: Vec::new(),
                flips: false,
            };
            let mut seen = BTreeSet::new();
            let mut troubles = BTreeSet::new();
            for draw in (0..200).map(|number| Draw::of(&plan, number)) {
                seen.extend(draw.roles.iter().map(|role| format!("{role:?}")));
                let words = draw.troubles.iter().map(|(_, one)| format!("{one:?}"));
                troubles.extend(words.map(|word| word.split('(').next().map(String::from)));
            }
            let role_count = if kind == Kind::Pool { 11 } else { 10 };
            assert_eq!(seen.len(), role_count, "{seen:?}");
            assert_eq!(troubles.len(), trouble_count, "{troubles:?}");
        }
    }
}
