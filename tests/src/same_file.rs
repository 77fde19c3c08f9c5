// SPDX-License-Identifier: Apache-2.0
//! Several SMB clients write over one another in one file while daemons and smbds are killed; each
//! block says in the end which write it is from.
//!
//! A block may have the bytes of any write that was not over before another one of that block,
//! which was acknowledged, began: clients that write at once have no order. A write whose
//! connection broke was over when the client saw that: it is there by then, or never. A model that
//! takes the order of answers for the order of writes finds a few blocks wrong in most rounds;
//! these are printed as well.

use crate::random::Random;
use crate::smb2::{Connection, Disposition, Handle};
use crate::smbd::SHARE;
use crate::stand::{Servants, Stand};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
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

/// The value of a byte of this version, wherever it lies.
fn byte_of(version: u64, at: u64) -> u8 {
    version.to_le_bytes()[(at % 8) as usize]
}

fn bytes_of(version: u64, start: u64, end: u64) -> Vec<u8> {
    (start..end).map(|at| byte_of(version, at)).collect()
}

fn connect(port: u16, done: &AtomicBool) -> Option<(Connection, Handle)> {
    while !done.load(Ordering::Relaxed) {
        if let Ok(client) = Connection::connect_mortal(port, SHARE)
            && let Ok((file, _)) = client.open(NAME, Disposition::OpenIf)
        {
            return Some((client, file));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    None
}

/// The work of one client until it is told to end.
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
        // Numbers of which no two bytes in the same place are likely the same.
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

/// Blocks that do not begin with the bytes of the write that was answered last: what a model would
/// say that takes answers for an order.
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
    let servants = Servants::of(stand.smbd());
    let base = fs::read(stand.seen(NAME)).unwrap_or_default();
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
                    servants.kill_one(&mut random);
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
                    recover_now(stand);
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
                    servants.kill_one(&mut random);
                }
            }
        }
        done.store(true, Ordering::Relaxed);
        if random.below(2) == 0 {
            log.push("daemon killed at the end, recovered");
            stand.daemon().kill();
            recover_now(stand);
        } else {
            log.push("daemon stopped at the end");
            stand.daemon().end();
        }
    });
    let writes = writes.into_inner().expect("nobody panics with it");
    let place = stand.place(NAME);
    let found = fs::read(&place).expect("it is there");
    let mut wrong = check(&found, &base, &writes, block, &format!("seed {seed}: disk"));
    let seen = File::open(stand.seen(NAME)).expect("it is there");
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

fn recover_now(stand: &Stand) {
    let output = stand.recover(&[]).output().expect("rushes starts");
    if !output.status.success() {
        println!("recover: {output:?}");
    }
}
