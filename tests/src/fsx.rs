// SPDX-License-Identifier: Apache-2.0
//! Random operations on files through the real door, compared with a model of them: what fsx is for
//! a local file system, with what SMB adds (copies on the server, several clients, allocation
//! sizes).
//!
//! Each worker has two files of its own and does one thing at a time, so the bytes of a file are
//! always known; many workers share a few connections, so that requests are pipelined and the
//! daemon is busy with all of them. The work of a worker follows from the seed and its number
//! alone, whatever the others do: a divergence can be looked for again with fewer workers. Which
//! operations there are, and how often, changes every few hundred of them: rare meetings are found
//! by leaving the rest out.

use crate::pattern;
use crate::smb2::{self, Chunk, Connection, Disposition, Handle, Info, REQUEST_MAX, Status};
use crate::smbd::SHARE;
use crate::world::{Backing, Setup, World};
use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Bits of a page of the kernel; most faults lie near its multiples.
const PAGE: u64 = 4096;
/// Operations between two choices of what there is.
const EPOCH: u64 = 300;
/// Operations that a divergence tells.
const HISTORY_MAX: usize = 60;
/// Seconds from 1601 to 1970.
const EPOCH_1601_S: u64 = 11_644_473_600;

/// The plan of a run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The operations that follow from it are always the same.
    pub seed: u64,
    /// Of all workers together.
    pub operations: u64,
    /// Each has two files.
    pub workers: u64,
    /// Only this one, to look at what it found.
    pub only: Option<u64>,
    /// Connections, each an smbd of its own.
    pub clients: usize,
    /// Say nothing on the way.
    pub quiet: bool,
    /// The daemon dies meanwhile. Then times are not compared: one that a file has may be
    /// milliseconds older after that, which is an open fault; bytes and lengths are compared as
    /// ever.
    pub daemon_dies: bool,
    /// Rises with each operation, for a thread that waits for them.
    pub steps: Arc<AtomicU64>,
}

impl Plan {
    /// Four workers over two connections, silently.
    pub fn new(seed: u64, operations: u64) -> Plan {
        Plan {
            seed,
            operations,
            workers: 4,
            only: None,
            clients: 2,
            quiet: true,
            daemon_dies: false,
            steps: Default::default(),
        }
    }
}

/// The work of a run.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Operations, each compared with the model.
    pub operations: u64,
    /// By kind.
    pub kinds: Vec<(&'static str, u64)>,
}

const KINDS: [(&str, u64); 18] = [
    ("read", 30),
    ("write", 30),
    ("append", 10),
    ("shorter", 4),
    ("longer", 4),
    ("zero", 6),
    ("allocation", 3),
    ("flush", 2),
    ("reopen", 5),
    ("close all", 2),
    ("rename", 2),
    ("delete", 2),
    ("overwrite", 2),
    ("copy", 4),
    ("information", 8),
    ("set time", 2),
    ("ranges", 2),
    ("announce", 1),
];

/// A server to do it on.
pub fn setup(write_buffer: &'static str) -> Setup {
    Setup {
        write_buffer: Some(write_buffer),
        // The analyser would leave scattered reads to the kernel's cache; here ours is on trial.
        server: String::from("analyser = false"),
        global: vec![String::from(smb2::GLOBAL)],
        share: smb2::SHARE_LINES
            .into_iter()
            .chain(["allocation roundup size = 0"])
            .map(String::from)
            .collect(),
        ..Setup::default()
    }
}

/// Such a server on a disk of this kind. None: something is missing, and was said.
pub fn world(backing: Backing) -> Option<World> {
    World::build(&Setup {
        backing,
        ..setup("64MiB")
    })
}

/// A client of its share.
pub fn client(world: &World) -> Connection {
    Connection::connect(world.smbd.port(), SHARE).expect("smbd lets guests in")
}

/// Do it.
///
/// Errors   the first divergence: what differs, what was done to the file before, how to see it
/// again
pub fn run(port: u16, folder: &Path, plan: &Plan) -> Result<Report, String> {
    let clients: Vec<Arc<Connection>> = (0..plan.clients)
        .map(|_| Connection::connect(port, crate::smbd::SHARE).map(Arc::new))
        .collect::<Result<_, _>>()
        .map_err(|error| format!("connecting: {error}"))?;
    let counts: Vec<AtomicU64> = KINDS.iter().map(|_| AtomicU64::new(0)).collect();
    let (stop, done) = (AtomicBool::new(false), AtomicBool::new(false));
    let numbers: Vec<u64> = match plan.only {
        Some(only) => vec![only],
        None => (0..plan.workers).collect(),
    };
    let failed = std::thread::scope(|scope| {
        let running: Vec<_> = numbers
            .iter()
            .map(|&number| {
                let mut worker = Worker::new(plan.seed, number, clients.clone(), folder);
                worker.daemon_dies = plan.daemon_dies;
                let (stop, counts) = (&stop, &counts);
                let (told, steps) = (&plan.steps, plan.operations / plan.workers);
                scope.spawn(move || {
                    worker.work(steps, stop, counts, told).map_err(|error| {
                        stop.store(true, Ordering::Relaxed);
                        worker.tell(plan, &error)
                    })
                })
            })
            .collect();
        if !plan.quiet {
            scope.spawn(|| tell_progress(&counts, &done));
        }
        let failed: Vec<String> = running
            .into_iter()
            .filter_map(|worker| {
                // One that panicked has said why: no answer came.
                let ended = worker.join();
                ended
                    .unwrap_or_else(|_| Err(String::from("fsx: a worker had no answer")))
                    .err()
            })
            .collect();
        done.store(true, Ordering::Relaxed);
        failed
    });
    if !failed.is_empty() {
        return Err(failed.join("\n"));
    }
    let kinds: Vec<(&str, u64)> = KINDS
        .iter()
        .zip(&counts)
        .map(|((name, _), count)| (*name, count.load(Ordering::Relaxed)))
        .collect();
    Ok(Report {
        operations: kinds.iter().map(|(_, count)| count).sum(),
        kinds,
    })
}

fn tell_progress(counts: &[AtomicU64], done: &AtomicBool) {
    let mut ticks = 0_u32;
    while !done.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(100));
        ticks += 1;
        if ticks.is_multiple_of(300) {
            let count: u64 = counts.iter().map(|c| c.load(Ordering::Relaxed)).sum();
            println!("fsx: {count} operations in {} s", ticks / 10);
        }
    }
}

#[derive(Debug)]
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let mixed = self.0 ^ (self.0 >> 29);
        (mixed.wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 20) % limit
    }

    fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }
}

/// A file as it must be.
#[derive(Debug)]
struct File {
    name: String,
    bytes: Vec<u8>,
    handles: Vec<Option<Handle>>,
    /// Time of the last write, while nothing may change it.
    written: Option<u64>,
}

struct Worker<'a> {
    number: u64,
    clients: Vec<Arc<Connection>>,
    folder: &'a Path,
    random: Random,
    files: Vec<File>,
    weights: [u64; KINDS.len()],
    size_max: u64,
    /// Rises with each operation, so that each writes bytes of its own.
    step: u64,
    names: u64,
    history: VecDeque<String>,
    daemon_dies: bool,
}

type Step = Result<(), String>;

fn must<T>(what: &str, result: Result<T, Status>) -> Result<T, String> {
    result.map_err(|status| format!("{what}: the server says {:#010x}", status.0))
}

impl<'a> Worker<'a> {
    fn new(seed: u64, number: u64, clients: Vec<Arc<Connection>>, folder: &'a Path) -> Worker<'a> {
        let handles = vec![None; clients.len()];
        Worker {
            number,
            clients,
            folder,
            random: Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (number << 32)),
            files: (0..2)
                .map(|index| File {
                    name: format!("w{number}-{index}"),
                    bytes: Vec::new(),
                    handles: handles.clone(),
                    written: None,
                })
                .collect(),
            weights: KINDS.map(|(_, weight)| weight),
            size_max: 0,
            step: 0,
            names: 2,
            history: VecDeque::new(),
            daemon_dies: false,
        }
    }

    fn work(
        &mut self,
        steps: u64,
        stop: &AtomicBool,
        counts: &[AtomicU64],
        told: &AtomicU64,
    ) -> Step {
        self.size_max = [20_000, 60_000, 200_000, 1_000_000][self.random.below(4) as usize];
        for file in 0..2 {
            self.open_all(file, Disposition::OverwriteIf)?;
        }
        while self.step < steps && !stop.load(Ordering::Relaxed) {
            if self.step.is_multiple_of(EPOCH) {
                self.choose_weights();
            }
            self.step += 1;
            let kind = self.choose_kind();
            let file = self.random.below(2) as usize;
            let client = self.random.below(self.clients.len() as u64) as usize;
            self.act(kind, file, client)?;
            self.look_again(file)?;
            counts[kind].fetch_add(1, Ordering::Relaxed);
            told.fetch_add(1, Ordering::Relaxed);
        }
        for file in 0..2 {
            self.check_all(file, 0)?;
            self.flush(file, 0)?;
            self.close_all(file)?;
        }
        Ok(())
    }

    /// Some things not at all, others many times as often.
    fn choose_weights(&mut self) {
        for (weight, (_, usual)) in self.weights.iter_mut().zip(KINDS) {
            *weight = match self.random.below(6) {
                0 => 0,
                1 => usual * 8,
                _ => usual,
            };
        }
        // Something has to be there to be looked at.
        self.weights[1] = self.weights[1].max(10);
    }

    fn choose_kind(&mut self) -> usize {
        let mut left = self.random.below(self.weights.iter().sum());
        for (kind, weight) in self.weights.iter().enumerate() {
            if left < *weight {
                return kind;
            }
            left -= weight;
        }
        0
    }

    fn act(&mut self, kind: usize, file: usize, client: usize) -> Step {
        match KINDS[kind].0 {
            "read" => self.read(file, client),
            "write" => {
                let (offset, length) = self.range(self.size_max);
                self.write(file, client, offset, length)
            }
            "append" => {
                let (offset, length) = (self.size(file), self.length());
                if offset + length > self.size_max {
                    return self.read(file, client);
                }
                self.write(file, client, offset, length)
            }
            "shorter" => {
                let size = self.random.below(self.size(file) + 1);
                self.set_size(file, client, size)
            }
            "longer" => {
                let size = self.size(file) + self.random.below(5 * PAGE);
                self.set_size(file, client, size.min(self.size_max.max(self.size(file))))
            }
            "zero" => self.zero(file, client),
            "allocation" => self.set_allocation(file, client),
            "flush" => self.flush(file, client),
            "reopen" => {
                self.close(file, client)?;
                self.open(file, client, Disposition::Open)
            }
            "close all" => {
                self.close_all(file)?;
                self.note_time(file)?;
                self.open_all(file, Disposition::Open)
            }
            "rename" => self.rename(file, client),
            "delete" => self.delete(file, client),
            "overwrite" => {
                self.close(file, client)?;
                self.said(format!("{} is overwritten", self.files[file].name));
                self.open(file, client, Disposition::OverwriteIf)?;
                self.changed(file).clear();
                Ok(())
            }
            "copy" => self.copy(file, client),
            "information" => self.information(file),
            "set time" => self.set_time(file, client),
            "ranges" => self.ranges(file, client),
            _ => self.announce(file, client),
        }
    }

    // ---- what is done

    fn read(&mut self, file: usize, client: usize) -> Step {
        let (offset, length) = self.range(self.size(file) + PAGE);
        self.check(file, client, offset, length)
    }

    fn write(&mut self, file: usize, client: usize, offset: u64, length: u64) -> Step {
        let bytes = if self.random.one_in(20) {
            vec![0; length as usize]
        } else {
            pattern::bytes(self.number << 40 | self.step, offset, length as usize)
        };
        self.said(format!(
            "{}: client {client} writes {offset}..{}",
            self.files[file].name,
            offset + length
        ));
        must(
            "write",
            self.clients[client].write(self.handle(file, client), offset, &bytes),
        )?;
        let (start, end) = (offset as usize, offset as usize + bytes.len());
        let model = self.changed(file);
        if model.len() < end {
            model.resize(end, 0);
        }
        model[start..end].copy_from_slice(&bytes);
        Ok(())
    }

    fn set_size(&mut self, file: usize, client: usize, size: u64) -> Step {
        self.said(format!(
            "{}: client {client} sets the size, {} to {size}",
            self.files[file].name,
            self.size(file)
        ));
        must(
            "set size",
            self.clients[client].set_size(self.handle(file, client), size),
        )?;
        self.changed(file).resize(size as usize, 0);
        Ok(())
    }

    fn zero(&mut self, file: usize, client: usize) -> Step {
        let (offset, length) = self.range(self.size(file) + PAGE);
        if self.random.one_in(4) {
            let sparse = self.random.one_in(2);
            self.said(format!("{}: sparse: {sparse}", self.files[file].name));
            must(
                "set sparse",
                self.clients[client].set_sparse(self.handle(file, client), sparse),
            )?;
        }
        self.said(format!(
            "{}: client {client} zeroes {offset}..{}",
            self.files[file].name,
            offset + length
        ));
        must(
            "zero",
            self.clients[client].zero(self.handle(file, client), offset, offset + length),
        )?;
        let size = self.size(file);
        let (start, end) = (
            offset.min(size) as usize,
            (offset + length).min(size) as usize,
        );
        self.changed(file)[start..end].fill(0);
        Ok(())
    }

    fn set_allocation(&mut self, file: usize, client: usize) -> Step {
        let bytes = self.random.below(self.size(file) * 2 + 5 * PAGE);
        self.said(format!(
            "{}: client {client} sets the allocation, size {} to {bytes}",
            self.files[file].name,
            self.size(file)
        ));
        must(
            "set allocation",
            self.clients[client].set_allocation(self.handle(file, client), bytes),
        )?;
        if bytes < self.size(file) {
            self.changed(file).truncate(bytes as usize);
        } else {
            self.files[file].written = None;
        }
        Ok(())
    }

    /// After it the file on the disk is what it should be, seen from beside the door.
    fn flush(&mut self, file: usize, client: usize) -> Step {
        self.said(format!(
            "{}: client {client} flushes",
            self.files[file].name
        ));
        must(
            "flush",
            self.clients[client].flush(self.handle(file, client)),
        )?;
        let found = fs::read(self.path(file)).map_err(|error| format!("on the disk: {error}"))?;
        self.compare(
            file,
            0,
            &found,
            found.len() as u64,
            "on the disk after a flush",
        )?;
        if found.len() as u64 != self.size(file) {
            return Err(format!(
                "on the disk after a flush: {} bytes, expected {}",
                found.len(),
                self.size(file)
            ));
        }
        Ok(())
    }

    fn rename(&mut self, file: usize, client: usize) -> Step {
        let name = self.fresh_name();
        if self.random.one_in(2) {
            // It takes the name of a file that was written a moment ago.
            let (handle, _) = must(
                "create",
                self.clients[client].open(&name, Disposition::OpenIf),
            )?;
            let bytes = vec![0xEE; self.length() as usize];
            must("write", self.clients[client].write(handle, 0, &bytes))?;
            must("close", self.clients[client].close(handle))?;
            self.said(format!("{name} is made"));
        }
        // Another smbd that has it open learns of a new name by and by only, and looks for the old
        // one until then.
        for other in (0..self.clients.len()).filter(|&other| other != client) {
            self.close(file, other)?;
        }
        self.said(format!(
            "{}: client {client} renames it to {name}",
            self.files[file].name
        ));
        must(
            "rename",
            self.clients[client].rename(self.handle(file, client), &name),
        )?;
        self.files[file].name = name;
        self.open_all(file, Disposition::Open)
    }

    fn delete(&mut self, file: usize, client: usize) -> Step {
        self.said(format!(
            "{}: client {client} deletes it",
            self.files[file].name
        ));
        must(
            "delete",
            self.clients[client].delete_on_close(self.handle(file, client)),
        )?;
        if self.random.one_in(2) {
            // A client that has it open may go on with it.
            let other = self.random.below(self.clients.len() as u64) as usize;
            let (offset, length) = self.range(self.size_max);
            self.write(file, other, offset, length)?;
            self.check_all(file, client)?;
        }
        self.close_all(file)?;
        let name = self.files[file].name.clone();
        let left = must("list", self.clients[client].list(&name))?;
        if left.is_some() || self.path(file).exists() {
            return Err(format!("{name} is there after it was deleted: {left:?}"));
        }
        if self.random.one_in(2) {
            self.files[file].name = self.fresh_name();
        }
        self.changed(file).clear();
        self.open_all(file, Disposition::OpenIf)
    }

    fn copy(&mut self, file: usize, client: usize) -> Step {
        let source = self.random.below(2) as usize;
        if self.size(source) == 0 {
            return self.read(file, client);
        }
        let mut model = std::mem::take(&mut self.files[file].bytes);
        let from_bytes = if source == file {
            model.clone()
        } else {
            self.files[source].bytes.clone()
        };
        let mut chunks = Vec::new();
        for _ in 0..=self.random.below(2) {
            let from = self.random.below(from_bytes.len() as u64);
            let length = self.length().min(from_bytes.len() as u64 - from);
            let to = self.random.below(self.size_max - length);
            // Ranges that overlap within a file have no meaning of their own.
            if source == file && (chunks.len() == 1 || to < from + length && from < to + length) {
                continue;
            }
            let end = (to + length) as usize;
            model.resize(model.len().max(end), 0);
            model[to as usize..end]
                .copy_from_slice(&from_bytes[from as usize..(from + length) as usize]);
            chunks.push(Chunk {
                from,
                to,
                length: length as u32,
            });
        }
        self.files[file].bytes = model;
        self.files[file].written = None;
        if chunks.is_empty() {
            return Ok(());
        }
        self.said(format!(
            "{} from {}: client {client} copies {chunks:?}",
            self.files[file].name, self.files[source].name
        ));
        must(
            "copy",
            self.clients[client].copy(
                self.handle(source, client),
                self.handle(file, client),
                &chunks,
            ),
        )
    }

    fn information(&mut self, file: usize) -> Step {
        for client in 0..self.clients.len() {
            let info = must(
                "information",
                self.clients[client].info(self.handle(file, client)),
            )?;
            self.compare_size(file, info, "an open file")?;
        }
        let name = self.files[file].name.clone();
        let client = self.random.below(self.clients.len() as u64) as usize;
        let listed = must("list", self.clients[client].list(&name))?;
        let info = listed.ok_or_else(|| format!("{name} is not in the folder"))?;
        self.compare_size(file, info, "the folder")
    }

    fn set_time(&mut self, file: usize, client: usize) -> Step {
        // A handle that has written sets the time once more when it is closed.
        self.close_all(file)?;
        self.open(file, client, Disposition::Open)?;
        let time = (EPOCH_1601_S + self.random.below(1_700_000_000)) * 10_000_000;
        self.said(format!("{}: time set to {time}", self.files[file].name));
        must(
            "set time",
            self.clients[client].set_written(self.handle(file, client), time),
        )?;
        self.close(file, client)?;
        self.files[file].written = Some(time);
        self.open_all(file, Disposition::Open)
    }

    /// Every byte that is not zero lies where the file says that something is.
    fn ranges(&mut self, file: usize, client: usize) -> Step {
        let size = self.size(file);
        let ranges = must(
            "ranges",
            self.clients[client].allocated(self.handle(file, client), 0, size),
        )?;
        let mut at = 0;
        for (start, length) in ranges.into_iter().chain([(size, 0)]) {
            let hole = &self.files[file].bytes[at.min(size) as usize..start.min(size) as usize];
            if let Some(wrong) = hole.iter().position(|&byte| byte != 0) {
                return Err(format!(
                    "byte {} of {size} is said to be in a hole",
                    at + wrong as u64
                ));
            }
            at = start + length;
        }
        Ok(())
    }

    /// How Windows says how long a file will be: one byte an allocation unit, from the front to the
    /// end.
    fn announce(&mut self, file: usize, client: usize) -> Step {
        let unit = 1 << (12 + self.random.below(5));
        let mut offset = self.size(file).next_multiple_of(unit) + unit - 1;
        for _ in 0..8 {
            if offset >= self.size_max {
                break;
            }
            self.write(file, client, offset, 1)?;
            offset += unit;
        }
        Ok(())
    }

    // ---- opening and closing

    fn open(&mut self, file: usize, client: usize, how: Disposition) -> Step {
        let name = &self.files[file].name;
        let opened = if self.random.one_in(10) && how != Disposition::Open {
            let bytes = self.random.below(self.size_max);
            self.clients[client].open_sized(name, how, bytes)
        } else {
            self.clients[client]
                .open(name, how)
                .map(|(handle, _)| handle)
        };
        self.files[file].handles[client] = Some(must("open", opened)?);
        Ok(())
    }

    fn open_all(&mut self, file: usize, how: Disposition) -> Step {
        for client in 0..self.clients.len() {
            if self.files[file].handles[client].is_none() {
                self.open(file, client, how)?;
            }
        }
        Ok(())
    }

    fn close(&mut self, file: usize, client: usize) -> Step {
        self.said(format!("{}: client {client} closes", self.files[file].name));
        match self.files[file].handles[client].take() {
            Some(handle) => must("close", self.clients[client].close(handle)),
            None => Ok(()),
        }
    }

    fn close_all(&mut self, file: usize) -> Step {
        for client in 0..self.clients.len() {
            self.close(file, client)?;
        }
        Ok(())
    }

    // ---- what is compared

    /// A file that everybody closed keeps its time, whether or not all of it is on the disk yet.
    fn note_time(&mut self, file: usize) -> Step {
        let name = self.files[file].name.clone();
        let listed = must("list", self.clients[0].list(&name))?;
        let info = listed.ok_or_else(|| format!("{name} is not in the folder"))?;
        self.compare_size(file, info, "the folder, all closed")?;
        if let Some(written) = self.files[file].written
            && written != info.written
            && !self.daemon_dies
        {
            return Err(format!(
                "written at {}, and nobody changed it since {written}",
                info.written
            ));
        }
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .expect("after 1970");
        if info.written / 10_000_000 > EPOCH_1601_S + now.as_secs() + 1 {
            return Err(format!("written at {}, in the future", info.written));
        }
        self.files[file].written = Some(info.written);
        Ok(())
    }

    fn compare_size(&self, file: usize, info: Info, who: &str) -> Step {
        if info.size == self.size(file) {
            return Ok(());
        }
        Err(format!(
            "{who} says {} bytes, expected {}",
            info.size,
            self.size(file)
        ))
    }

    /// Every third time somebody looks at what was done: all of a small file, else a part.
    fn look_again(&mut self, file: usize) -> Step {
        if !self.random.one_in(3) {
            return Ok(());
        }
        let client = self.random.below(self.clients.len() as u64) as usize;
        if self.size(file) < REQUEST_MAX as u64 || self.random.one_in(30) {
            return self.check_all(file, client);
        }
        let offset = self.random.below(self.size(file));
        self.check(file, client, offset, REQUEST_MAX as u64)
    }

    fn check_all(&mut self, file: usize, client: usize) -> Step {
        // One more than there is, so that the end is seen.
        let mut offset = 0;
        while offset <= self.size(file) {
            self.check(file, client, offset, REQUEST_MAX as u64)?;
            offset += REQUEST_MAX as u64;
        }
        Ok(())
    }

    fn check(&mut self, file: usize, client: usize, offset: u64, length: u64) -> Step {
        let found = must(
            "read",
            self.clients[client].read(self.handle(file, client), offset, length as usize),
        )?;
        self.compare(
            file,
            offset,
            &found,
            length,
            &format!("client {client} reads"),
        )
    }

    fn compare(&self, file: usize, offset: u64, found: &[u8], asked: u64, who: &str) -> Step {
        let model = &self.files[file].bytes;
        let start = (offset as usize).min(model.len());
        let expected = &model[start..(start + asked as usize).min(model.len())];
        if found == expected {
            return Ok(());
        }
        let wrong = found.iter().zip(expected).position(|(a, b)| a != b);
        let Some(wrong) = wrong else {
            return Err(format!(
                "{who} {} bytes at {offset} of {}, expected {}",
                found.len(),
                self.files[file].name,
                expected.len()
            ));
        };
        let count = found.iter().zip(expected).filter(|(a, b)| a != b).count();
        let zeros = found
            .iter()
            .zip(expected)
            .filter(|(a, b)| a != b && **a == 0);
        Err(format!(
            "{who} {}: byte {} of {} is {:#04x}, expected {:#04x}; {count} wrong in {} bytes at {offset}, {} of them zero",
            self.files[file].name,
            start + wrong,
            model.len(),
            found[wrong],
            expected[wrong],
            found.len(),
            zeros.count(),
        ))
    }

    // ---- the rest

    fn length(&mut self) -> u64 {
        1 + match self.random.below(8) {
            0 => self.random.below(REQUEST_MAX as u64),
            1..3 => self.random.below(3 * PAGE),
            3 => PAGE * (1 + self.random.below(3)) - 1,
            _ => self.random.below(600),
        }
        .min(self.size_max / 4)
    }

    /// Begins or ends at a page now and then, and lies below `limit`.
    fn range(&mut self, limit: u64) -> (u64, u64) {
        let length = self.length().min(limit);
        let offset = self.random.below(limit - length + 1);
        let offset = match self.random.below(4) {
            0 => offset / PAGE * PAGE,
            1 => (offset + length).next_multiple_of(PAGE).min(limit) - length,
            _ => offset,
        };
        (offset, length)
    }

    fn fresh_name(&mut self) -> String {
        self.names += 1;
        format!("w{}-{}", self.number, self.names)
    }

    fn size(&self, file: usize) -> u64 {
        self.files[file].bytes.len() as u64
    }

    fn handle(&self, file: usize, client: usize) -> Handle {
        self.files[file].handles[client].expect("open between operations")
    }

    fn path(&self, file: usize) -> PathBuf {
        self.folder.join(&self.files[file].name)
    }

    /// The model's bytes, to be changed.
    fn changed(&mut self, file: usize) -> &mut Vec<u8> {
        self.files[file].written = None;
        &mut self.files[file].bytes
    }

    fn said(&mut self, sentence: String) {
        if self.history.len() == HISTORY_MAX {
            self.history.pop_front();
        }
        self.history
            .push_back(format!("{:6} {sentence}", self.step));
    }

    fn tell(&self, plan: &Plan, error: &str) -> String {
        let history: Vec<&str> = self.history.iter().map(String::as_str).collect();
        format!(
            "{}\nfsx: worker {} of {}, step {}: {error}\nagain: smb-fsx --seed {} --operations {} --workers {}, perhaps --only {}",
            history.join("\n"),
            self.number,
            plan.workers,
            self.step,
            plan.seed,
            plan.operations,
            plan.workers,
            self.number
        )
    }
}
