// SPDX-License-Identifier: Apache-2.0
//! Several SMB clients write over one another in one file while daemons and smbds are killed; each block says in the end which write it is from.
//!
//! A block may have the bytes of any write that was not over before another one of that block, which was acknowledged, began: clients that
//! write at once have no order. A write whose connection broke was over when the client saw that: it is there by then, or never.
//! A model that takes the order of answers for the order of writes finds a few blocks wrong in most rounds; these are printed as well.

use crate::daemon::{Daemon, DaemonSpec};
use crate::needs::{self, Need};
use crate::pool::{EXT4, PoolWorld, XFS};
use crate::random::Random;
use crate::smb2::{self, Connection, Disposition, Handle};
use crate::smbd::{SHARE, Smbd, SmbdSpec};
use crate::world::{Backing, Setup, World};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const CLIENTS: u64 = 4;
const NAME: &str = "same.mov";
const ROUND: Duration = Duration::from_secs(4);
const BLOCKS: u64 = 160;

/// A write that a client has asked for.
#[derive(Clone, Debug)]
struct Write {
    version: u64,
    /// Which bytes of the file.
    start: u64,
    end: u64,
    begun: Instant,
    /// When it was answered, or its connection broke.
    over: Instant,
    is_acknowledged: bool,
}

/// What a byte of this version is, wherever it lies.
fn byte_of(version: u64, at: u64) -> u8 {
    version.to_le_bytes()[(at % 8) as usize]
}

fn bytes_of(version: u64, start: u64, end: u64) -> Vec<u8> {
    (start..end).map(|at| byte_of(version, at)).collect()
}

/// The pool or the plain share, and its daemon and smbd. They end in this order.
#[derive(Debug)]
pub enum Stand {
    /// On a pool's mount.
    Pool(Smbd, Daemon, PoolWorld),
    /// On a share with our module.
    Plain(World),
}

impl Stand {
    /// With our module between smbd and the disk: a lane a client.
    pub fn plain() -> Option<Stand> {
        let mut share = smb2::SHARE_LINES.map(String::from).to_vec();
        share.push(String::from("oplocks = no"));
        World::build(&Setup {
            backing: Backing::Ext4,
            share,
            global: vec![String::from(smb2::GLOBAL)],
            write_buffer: Some("64MiB"),
            ..Setup::default()
        })
        .map(Stand::Plain)
    }

    /// On a pool's mount: a lane a member.
    pub fn pool() -> Option<Stand> {
        if !needs::all_there(&[Need::Program("smbd"), Need::Program("pdbedit")]) {
            return None;
        }
        let world = PoolWorld::build(&[(EXT4, 200), (XFS, 300)])?;
        let member = |number| world.member(number).join("pool");
        let daemon = Daemon::start(
            &world.scratch,
            &DaemonSpec {
                share: member(0),
                cache: String::from("64MiB"),
                write_buffer: Some("64MiB"),
                server: String::new(),
                more: format!("[[share]]\nname = \"m1\"\npath = {:?}\n", member(1)),
            },
        );
        let everybody = fs::Permissions::from_mode(0o777);
        fs::set_permissions(world.path(""), everybody).expect("our own mount");
        let mut share = smb2::SHARE_LINES.map(String::from).to_vec();
        share.push(String::from("oplocks = no"));
        let spec = SmbdSpec {
            path: world.path(""),
            share,
            global: vec![String::from(smb2::GLOBAL)],
        };
        let smbd = Smbd::start(&world.scratch, &spec);
        Some(Stand::Pool(smbd, daemon, world))
    }

    fn smbd(&self) -> &Smbd {
        match self {
            Stand::Pool(smbd, ..) => smbd,
            Stand::Plain(world) => &world.smbd,
        }
    }

    fn daemon(&mut self) -> &mut Daemon {
        match self {
            Stand::Pool(_, daemon, _) => daemon,
            Stand::Plain(world) => world.daemon.as_mut().expect("there is one"),
        }
    }

    fn scratch(&self) -> &Path {
        match self {
            Stand::Pool(.., world) => world.scratch.path(),
            Stand::Plain(world) => world.scratch.path(),
        }
    }

    /// Where its bytes lie, whoever is there.
    fn place(&self) -> PathBuf {
        match self {
            Stand::Pool(.., world) => {
                let report = world.where_is(NAME);
                let path = report["segments"][0]["objects"][0]["path"].as_str();
                PathBuf::from(path.expect("text"))
            }
            Stand::Plain(world) => world.path(NAME),
        }
    }

    fn seen(&self) -> PathBuf {
        match self {
            Stand::Pool(.., world) => world.path(NAME),
            Stand::Plain(world) => world.path(NAME),
        }
    }
}

fn children(parent: u32) -> Vec<u32> {
    let all = fs::read_dir("/proc").expect("it is there").flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let behind = stat.rsplit_once(')').map_or("", |(_, behind)| behind);
        behind.split_whitespace().nth(1) == Some(&parent.to_string())
    })
    .collect()
}

fn connect(port: u16, done: &AtomicBool) -> Option<(Connection, Handle)> {
    while !done.load(Ordering::Relaxed) {
        // (One whose smbd is killed meanwhile panics.)
        let connected = catch_unwind(|| {
            let client = Connection::connect(port, SHARE).ok()?;
            let (file, _) = client.open(NAME, Disposition::OpenIf).ok()?;
            Some((client, file))
        });
        if let Ok(Some(connected)) = connected {
            return Some(connected);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    None
}

/// What one client does until it is told to end.
fn write_on(
    port: u16,
    client: u64,
    seed: u64,
    block: u64,
    done: &AtomicBool,
    next: &AtomicU64,
) -> Vec<Write> {
    let mut random = Random(seed * 1000 + client);
    let mut all = Vec::new();
    let mut connected = connect(port, done);
    while let Some((connection, file)) = &connected {
        if done.load(Ordering::Relaxed) {
            break;
        }
        // Mostly in one hot place, so that they meet.
        let span = if random.below(3) == 0 { BLOCKS } else { 12 };
        let count = 1 + random.below(4).min(65_000 / block);
        let start = random.below(span) * block;
        let end = (start + count * block).min(BLOCKS * block);
        // (Numbers of which no two bytes in the same place are likely the same.)
        let version = next
            .fetch_add(1, Ordering::Relaxed)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let bytes = bytes_of(version, start, end);
        let begun = Instant::now();
        let result = connection.try_write(*file, start, &bytes);
        let over = Instant::now();
        all.push(Write {
            version,
            start,
            end,
            begun,
            over,
            is_acknowledged: result.is_ok(),
        });
        if let Err(error) = result {
            println!("client {client}: {error}");
            connected = connect(port, done);
        }
    }
    all
}

/// Which writes may be what a block has.
fn allowed(writes: &[Write], at: u64) -> Vec<&Write> {
    let of: Vec<&Write> = writes
        .iter()
        .filter(|write| write.start <= at && at < write.end)
        .collect();
    let last_begun = of
        .iter()
        .filter(|write| write.is_acknowledged)
        .map(|write| write.begun)
        .max();
    of.into_iter()
        .filter(|write| last_begun.is_none_or(|begun| write.over >= begun))
        .collect()
}

fn check(found: &[u8], base: &[u8], writes: &[Write], block: u64, what: &str) -> u64 {
    let mut wrong = 0;
    let mut said = 0;
    for number in 0..BLOCKS {
        let (start, end) = (number * block, (number + 1) * block);
        let may = allowed(writes, start);
        let none_acknowledged = !writes
            .iter()
            .any(|write| write.is_acknowledged && write.start <= start && start < write.end);
        let is_right = |at: u64| {
            let byte = found.get(at as usize).copied().unwrap_or(0);
            may.iter().any(|write| byte_of(write.version, at) == byte)
                || none_acknowledged && base.get(at as usize).copied().unwrap_or(0) == byte
        };
        let Some(at) = (start..end).find(|&at| !is_right(at)) else {
            continue;
        };
        wrong += 1;
        said += 1;
        if said > 3 {
            continue;
        }
        let last = (start..end).rev().find(|&at| !is_right(at)).unwrap_or(at);
        let from = writes.iter().find(|write| {
            let into = at.max(write.start)..(at + 8).min(end).min(write.end);
            write.start <= at
                && at < write.end
                && into.clone().count() >= 4
                && into
                    .clone()
                    .all(|at| found.get(at as usize) == Some(&byte_of(write.version, at)))
        });
        println!(
            "{what}: block {number}, bytes {at}..={last} of {start}..{end}: from {from:#?}, expected one of {may:#?}; found {:x?}",
            found.get(at as usize..(at + 16).min(found.len() as u64) as usize)
        );
    }
    wrong
}

/// Blocks that do not begin with the bytes of the write that was answered last: what a model would say that takes answers for an order.
fn otherwise(found: &[u8], writes: &[Write], block: u64) -> usize {
    let differs = |number: &u64| {
        let at = number * block;
        let of = writes
            .iter()
            .filter(|write| write.is_acknowledged && write.start <= at && at < write.end);
        let last = of.max_by_key(|write| write.over);
        last.is_some_and(|last| {
            !(at..at + 8).all(|at| found.get(at as usize) == Some(&byte_of(last.version, at)))
        })
    };
    (0..BLOCKS).filter(differs).count()
}

/// One of them. How many blocks are wrong, on the disk and as they are seen.
pub fn round(stand: &mut Stand, seed: u64) -> u64 {
    let mut random = Random(seed);
    let block = [512, 3001, 4096, 9000][random.below(4) as usize];
    let done = AtomicBool::new(false);
    let next = AtomicU64::new(1);
    let port = stand.smbd().port();
    let smbd = stand.smbd().pid();
    let helpers: BTreeSet<u32> = children(smbd).into_iter().collect();
    let base = fs::read(stand.seen()).unwrap_or_default();
    let writes = Mutex::new(Vec::new());
    let mut log = Vec::new();
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (done, next, writes) = (&done, &next, &writes);
            scope.spawn(move || {
                let all = write_on(port, client, seed, block, done, next);
                writes.lock().expect("nobody panics with it").extend(all);
            });
        }
        let end = Instant::now() + ROUND;
        while Instant::now() < end {
            std::thread::sleep(Duration::from_millis(50 + random.below(500)));
            match random.below(5) {
                4 => {
                    log.push("daemon and smbd killed");
                    stand.daemon().kill();
                    kill_one(smbd, &helpers, &mut random);
                    std::thread::sleep(Duration::from_millis(random.below(300)));
                    stand.daemon().start_again();
                }
                0 => {
                    log.push("daemon killed");
                    stand.daemon().kill();
                    stand.daemon().start_again();
                }
                1 => {
                    log.push("daemon killed, recovered");
                    stand.daemon().kill();
                    recover(stand);
                    std::thread::sleep(Duration::from_millis(random.below(400)));
                    stand.daemon().start_again();
                }
                2 => {
                    log.push("daemon stopped");
                    stand.daemon().end();
                    std::thread::sleep(Duration::from_millis(random.below(400)));
                    stand.daemon().start_again();
                }
                _ => {
                    log.push("smbd killed");
                    kill_one(smbd, &helpers, &mut random);
                }
            }
        }
        done.store(true, Ordering::Relaxed);
        if random.below(2) == 0 {
            log.push("daemon killed at the end, recovered");
            stand.daemon().kill();
            recover(stand);
        } else {
            log.push("daemon stopped at the end");
            stand.daemon().end();
        }
    });
    let writes = writes.into_inner().expect("nobody panics with it");
    let place = stand.place();
    let found = fs::read(&place).expect("it is there");
    let mut wrong = check(&found, &base, &writes, block, &format!("seed {seed}: disk"));
    let seen = File::open(stand.seen()).expect("it is there");
    let mut by_mount = vec![0; found.len()];
    seen.read_exact_at(&mut by_mount, 0).expect("read");
    wrong += check(
        &by_mount,
        &base,
        &writes,
        block,
        &format!("seed {seed}: seen"),
    );
    println!(
        "seed {seed}: {} writes of {block}, {} not acknowledged, {wrong} wrong, {} not what was answered last; {log:?}",
        writes.len(),
        writes.iter().filter(|write| !write.is_acknowledged).count(),
        otherwise(&found, &writes, block)
    );
    stand.daemon().start_again();
    wrong
}

/// One of those that serve clients.
fn kill_one(smbd: u32, helpers: &BTreeSet<u32>, random: &mut Random) {
    let mut clients = children(smbd);
    clients.retain(|pid| !helpers.contains(pid));
    if !clients.is_empty() {
        let pid = clients[random.below(clients.len() as u64) as usize];
        let _ = Command::new("kill").arg("-9").arg(pid.to_string()).status();
    }
}

fn recover(stand: &Stand) {
    let output = Command::new(needs::path_of("rushes"))
        .args(["recover", "--config"])
        .arg(stand.scratch().join("rushes.toml"))
        .output()
        .expect("rushes starts");
    if !output.status.success() {
        println!("recover: {output:?}");
    }
}
