// SPDX-License-Identifier: Apache-2.0
//! A client that works instead of playing: sequential, random and metadata loads, one request at a
//! time.
//!
//! It compares every byte read with the stage's content or its own last write: pages that it
//! overwrote carry a generation of their own. A [`Load::Pass`] compares one page of each block.

use crate::clients::client;
use crate::clients::door::{Address, Door, Opened};
use crate::clients::player::{now_ns, sleep_until_ns};
use crate::stage::footage::{Clip, Dice, PAGE_BYTES, mix};
use anyhow::Result;
use serde::{Deserialize, Serialize};

const PAGE: u64 = PAGE_BYTES as u64;
/// Distance of generations in clip numbers, so large that no other clip has them.
const GENERATION: u64 = 1 << 32;

/// The work of a worker; one line of JSON on its standard input.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// The server's address.
    pub address: Address,
    /// Path of the file below the share; a folder for metadata.
    pub path: String,
    /// The clip that it holds: seed and number.
    pub clip: (u64, u64),
    /// The part of the file, from its front, that the worker uses. Units: bytes.
    pub file_bytes: u64,
    /// The kind of load.
    pub load: Load,
    /// Seed of offsets and sizes.
    pub seed: u64,
}

/// Kinds of work.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Load {
    /// Read the whole file, so many times.
    SequentialRead {
        /// Size of a request. Units: bytes.
        block: u64,
        /// Number of times.
        rounds: u64,
    },
    /// Write the whole file, so many times.
    SequentialWrite {
        /// Size of a request. Units: bytes.
        block: u64,
        /// Number of times.
        rounds: u64,
    },
    /// Read the file once, or make it anew and write it once; compares the first page of each block
    /// that it reads.
    Pass {
        /// Size of a request, whole pages. Units: bytes.
        block: u64,
        /// Write a [`Pattern`].
        write: bool,
        /// Stop after so long; 0: at the end. Units: s.
        seconds: f64,
    },
    /// Read blocks anywhere.
    RandomRead {
        /// Size of a request. Units: bytes.
        block: u64,
        /// Number of requests.
        count: u64,
    },
    /// Create, look up, open and remove so many small files.
    Metadata {
        /// Number of files.
        count: u64,
    },
    /// Read or write pieces of random size anywhere, for a time.
    Mixed {
        /// Reads in 100 requests.
        read_percent: u64,
        /// Smallest request. Units: bytes.
        block_min: u64,
        /// Largest request. Units: bytes.
        block_max: u64,
        /// Units: s.
        seconds: f64,
    },
    /// Write pieces of random size anywhere in a client's own share of the file.
    Scatter {
        /// The client's share, and the sizes of its writes.
        places: Scattered,
        /// Bytes in all. Units: bytes.
        bytes: u64,
    },
}

/// Writes of several clients that never overlap: the file is cut into cells of the size of the
/// largest write, and each client has every `client_count`-th cell. So the lab can compute the
/// content of the file later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scattered {
    /// Number of the client.
    pub client: u64,
    /// Number of clients.
    pub client_count: u64,
    /// Smallest write; whole pages. Units: bytes.
    pub block_min: u64,
    /// Largest write, and the size of a cell. Units: bytes.
    pub block_max: u64,
}

/// One of these writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScatteredWrite {
    /// Units: bytes.
    pub offset: u64,
    /// Units: bytes.
    pub length: u64,
    /// Generation of its content.
    pub generation: u32,
}

impl Scattered {
    /// The client's writes, without end.
    pub fn of(self, seed: u64, file_bytes: u64) -> impl Iterator<Item = ScatteredWrite> {
        let mut dice = Dice::new(seed ^ mix(self.client + 1));
        let cells = file_bytes / self.block_max;
        let own = (cells.saturating_sub(self.client)).div_ceil(self.client_count);
        let sizes = (self.block_max - self.block_min) / PAGE + 1;
        (0..).map(move |index: u64| {
            let cell = dice.below(own) * self.client_count + self.client;
            let length = self.block_min + dice.below(sizes) * PAGE;
            let places = (self.block_max - length) / PAGE + 1;
            ScatteredWrite {
                offset: cell * self.block_max + dice.below(places) * PAGE,
                length,
                generation: (index * self.client_count + self.client + 1) as u32,
            }
        })
    }
}

/// The result of a worker; one line of JSON on its standard output.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Done {
    /// Time from the first request to the end.
    pub seconds: f64,
    /// Requests.
    pub request_count: u64,
    /// Bytes read and written.
    pub bytes: u64,
    /// Bytes read that differ from those written.
    pub bytes_wrong: u64,
    /// Mean time of a request.
    pub response_ms_mean: f64,
    /// The 99th percentile of these times.
    pub response_ms_p99: f64,
    /// First error.
    pub error: Option<String>,
}

/// The hidden subcommand: reads a [`Job`], connects, prints `ready`, waits for the instant of its
/// beginning, works.
pub fn main() -> Result<()> {
    let (job, door, begin) = client::take_job(|job: &Job| &job.address)?;
    sleep_until_ns(begin);
    let mut worker = Worker::new(&job);
    let start = now_ns();
    let result = worker.work(&door, &job);
    let mut done = worker.done(start);
    done.error = result.err().map(|error| format!("{error:#}"));
    println!("{}", serde_json::to_string(&done)?);
    Ok(())
}

struct Worker {
    clip: Clip,
    /// Generation of each page: 0 is the stage's content.
    generations: Vec<u32>,
    responses_ns: Vec<u64>,
    bytes: u64,
    bytes_wrong: u64,
    buffer: Vec<u8>,
}

impl Worker {
    fn new(job: &Job) -> Worker {
        Worker {
            clip: Clip {
                seed: job.clip.0,
                number: job.clip.1,
            },
            generations: vec![0; job.file_bytes.div_ceil(PAGE) as usize],
            responses_ns: Vec::new(),
            bytes: 0,
            bytes_wrong: 0,
            buffer: Vec::new(),
        }
    }

    fn work(&mut self, door: &Door, job: &Job) -> Result<()> {
        let blocks = |block: u64| (0..job.file_bytes / block).map(move |n| n * block);
        let mut dice = Dice::new(job.seed);
        match job.load {
            Load::Metadata { count } => self.metadata(door, &job.path, count),
            Load::SequentialRead { block, rounds } => {
                let mut file = door.open(&job.path, false)?;
                for offset in (0..rounds).flat_map(|_| blocks(block)) {
                    self.read(&mut file, offset, block)?;
                }
                Ok(())
            }
            Load::SequentialWrite { block, rounds } => {
                let mut file = door.open(&job.path, true)?;
                for round in 0..rounds {
                    for offset in blocks(block) {
                        self.write(&mut file, offset, block, round as u32 + 1)?;
                    }
                }
                Ok(())
            }
            Load::Pass {
                block,
                write,
                seconds,
            } => {
                let end = match seconds > 0.0 {
                    true => now_ns() + (seconds * 1e9) as u64,
                    false => u64::MAX,
                };
                let offsets = blocks(block).take_while(|_| now_ns() < end);
                match write {
                    true => self.write_pass(door, &job.path, offsets, block),
                    false => self.read_pass(door, &job.path, offsets, block),
                }
            }
            Load::RandomRead { block, count } => {
                let mut file = door.open(&job.path, false)?;
                for _ in 0..count {
                    let offset = dice.below(job.file_bytes / block) * block;
                    self.read(&mut file, offset, block)?;
                }
                Ok(())
            }
            Load::Scatter { places, bytes } => {
                let mut file = door.open(&job.path, true)?;
                for write in places.of(job.seed, job.file_bytes) {
                    if self.bytes >= bytes {
                        break;
                    }
                    self.write(&mut file, write.offset, write.length, write.generation)?;
                }
                Ok(())
            }
            Load::Mixed {
                read_percent,
                block_min,
                block_max,
                seconds,
            } => {
                let mut file = door.open(&job.path, true)?;
                let end = now_ns() + (seconds * 1e9) as u64;
                let mut generation = 0;
                while now_ns() < end {
                    // All powers of two are equally likely, as with applications.
                    let doublings = (block_max / block_min).ilog2();
                    let block = block_min << dice.below(u64::from(doublings) + 1);
                    let places = (job.file_bytes - block) / PAGE + 1;
                    let offset = dice.below(places) * PAGE;
                    if dice.below(100) < read_percent {
                        self.read(&mut file, offset, block)?;
                    } else {
                        generation += 1;
                        self.write(&mut file, offset, block, generation)?;
                    }
                }
                Ok(())
            }
        }
    }

    fn timed<R>(&mut self, request: impl FnOnce(&mut Vec<u8>) -> Result<R>) -> Result<R> {
        let start = now_ns();
        let result = request(&mut self.buffer)?;
        self.responses_ns.push(now_ns() - start);
        Ok(result)
    }

    fn read(&mut self, file: &mut Opened<'_>, offset: u64, length: u64) -> Result<()> {
        self.buffer.resize(length as usize, 0);
        let got = self.timed(|buffer| file.read_at(buffer, offset))? as u64;
        self.bytes += got;
        self.bytes_wrong += length - got;
        for (index, page) in self.buffer[..got as usize].chunks(PAGE_BYTES).enumerate() {
            let at = offset + index as u64 * PAGE;
            let clip = clip_of(self.clip, self.generations[(at / PAGE) as usize]);
            self.bytes_wrong += clip.wrong_bytes(at, page);
        }
        Ok(())
    }

    fn read_pass(
        &mut self,
        door: &Door,
        path: &str,
        offsets: impl Iterator<Item = u64>,
        block: u64,
    ) -> Result<()> {
        let mut file = door.open(path, false)?;
        self.buffer.resize(block as usize, 0);
        for offset in offsets {
            let got = self.timed(|buffer| file.read_at(buffer, offset))?;
            self.bytes += got as u64;
            self.bytes_wrong += block - got as u64;
            let page = &self.buffer[..got.min(PAGE_BYTES)];
            self.bytes_wrong += self.clip.wrong_bytes(offset, page);
        }
        Ok(())
    }

    fn write_pass(
        &mut self,
        door: &Door,
        path: &str,
        offsets: impl Iterator<Item = u64>,
        block: u64,
    ) -> Result<()> {
        let mut file = door.open_new(path)?;
        let mut pattern = Pattern::new(self.clip, block);
        for offset in offsets {
            let content = pattern.at(offset);
            self.timed(|_| file.write_at(content, offset))?;
            self.bytes += block;
        }
        file.finish()
    }

    fn write(
        &mut self,
        file: &mut Opened<'_>,
        offset: u64,
        length: u64,
        generation: u32,
    ) -> Result<()> {
        self.buffer.resize(length as usize, 0);
        clip_of(self.clip, generation).fill(offset, &mut self.buffer);
        self.timed(|buffer| file.write_at(buffer, offset))?;
        let pages = (offset / PAGE) as usize..(offset + length).div_ceil(PAGE) as usize;
        self.generations[pages].fill(generation);
        self.bytes += length;
        Ok(())
    }

    fn metadata(&mut self, door: &Door, folder: &str, count: u64) -> Result<()> {
        for index in 0..count {
            let path = format!("{folder}/note{index:05}.txt");
            self.timed(|_| door.create(&path, b"shot list\n"))?;
        }
        for index in 0..count {
            let path = format!("{folder}/note{index:05}.txt");
            self.timed(|_| door.stat(&path))?;
            self.timed(|_| door.open(&path, false).map(drop))?;
        }
        self.timed(|_| door.list(folder))?;
        for index in 0..count {
            let path = format!("{folder}/note{index:05}.txt");
            self.timed(|_| door.remove(&path))?;
        }
        Ok(())
    }

    fn done(mut self, start: u64) -> Done {
        self.responses_ns.sort_unstable();
        let count = self.responses_ns.len();
        let p99 = self.responses_ns.get(count.saturating_sub(1) * 99 / 100);
        Done {
            seconds: (now_ns() - start) as f64 / 1e9,
            request_count: count as u64,
            bytes: self.bytes,
            bytes_wrong: self.bytes_wrong,
            response_ms_mean: self.responses_ns.iter().sum::<u64>() as f64
                / 1e6
                / count.max(1) as f64,
            response_ms_p99: *p99.unwrap_or(&0) as f64 / 1e6,
            error: None,
        }
    }
}

/// Content that takes next to no time to make: the same block again and again, but for its first
/// page.
#[derive(Clone, Debug)]
pub struct Pattern {
    clip: Clip,
    block: Vec<u8>,
}

impl Pattern {
    /// A pattern of blocks of so many bytes, whole pages.
    pub fn new(clip: Clip, block_bytes: u64) -> Pattern {
        let mut block = vec![0; block_bytes as usize];
        clip.fill(0, &mut block);
        Pattern { clip, block }
    }

    /// The block that begins at `offset`.
    pub fn at(&mut self, offset: u64) -> &[u8] {
        let first = self.block.len().min(PAGE_BYTES);
        clip_of(self.clip, 1).fill(offset, &mut self.block[..first]);
        &self.block
    }
}

/// The content of generation `generation` of a clip's page.
pub fn clip_of(clip: Clip, generation: u32) -> Clip {
    Clip {
        number: clip.number + u64::from(generation) * GENERATION,
        ..clip
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work_in(folder: &std::path::Path, load: Load) -> Done {
        let job = Job {
            address: Address::Local(folder.to_owned()),
            path: "file".to_owned(),
            clip: (5, 9),
            file_bytes: 1 << 20,
            load,
            seed: 3,
        };
        let door = Door::connect(&job.address).unwrap();
        let mut worker = Worker::new(&job);
        worker.work(&door, &job).unwrap();
        worker.done(now_ns())
    }

    fn made_file(room: &crate::stage::room::Room) -> Clip {
        let clip = Clip { seed: 5, number: 9 };
        let mut bytes = vec![0; 1 << 20];
        clip.fill(0, &mut bytes);
        std::fs::write(room.path().join("file"), bytes).unwrap();
        clip
    }

    #[test]
    fn a_mixed_load_finds_its_own_writes_again() {
        let room = crate::stage::room::Room::create().unwrap();
        made_file(&room);
        let load = Load::Mixed {
            read_percent: 50,
            block_min: 4096,
            block_max: 65536,
            seconds: 0.2,
        };
        let done = work_in(room.path(), load);
        assert_eq!(done.bytes_wrong, 0);
        assert!(done.request_count > 10);
    }

    #[test]
    fn a_pass_reads_what_was_made_and_writes_what_its_pattern_says() {
        let room = crate::stage::room::Room::create().unwrap();
        let clip = made_file(&room);
        let pass = |write| Load::Pass {
            block: 1 << 18,
            write,
            seconds: 0.0,
        };
        let done = work_in(room.path(), pass(false));
        assert_eq!((done.bytes, done.bytes_wrong), (1 << 20, 0));
        let done = work_in(room.path(), pass(true));
        assert_eq!((done.bytes, done.request_count), (1 << 20, 4));
        let written = std::fs::read(room.path().join("file")).unwrap();
        let mut pattern = Pattern::new(clip, 1 << 18);
        for (block, offset) in written.chunks(1 << 18).zip((0..).step_by(1 << 18)) {
            assert_eq!(block, pattern.at(offset));
        }
        assert_ne!(pattern.at(0).to_vec(), pattern.at(1 << 18).to_vec());
        // A pass over it that expects footage finds other bytes.
        assert!(work_in(room.path(), pass(false)).bytes_wrong > 0);
    }

    #[test]
    fn scattered_writes_of_two_clients_never_meet() {
        let places = |client| Scattered {
            client,
            client_count: 2,
            block_min: 4096,
            block_max: 65536,
        };
        let file_bytes = 9 * 65536;
        let pages = |client: u64| -> std::collections::BTreeSet<u64> {
            places(client)
                .of(7, file_bytes)
                .take(500)
                .flat_map(|write| write.offset / PAGE..(write.offset + write.length) / PAGE)
                .collect()
        };
        let (first, second) = (pages(0), pages(1));
        assert!(first.is_disjoint(&second));
        assert_eq!(first.union(&second).count() as u64, file_bytes / PAGE);
        assert_eq!(places(1).of(7, file_bytes).nth(3).unwrap().generation, 8);
    }

    #[test]
    fn a_byte_changed_by_another_is_seen() {
        let room = crate::stage::room::Room::create().unwrap();
        made_file(&room);
        let path = room.path().join("file");
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[70_000] ^= 0xff;
        std::fs::write(&path, bytes).unwrap();
        let load = Load::SequentialRead {
            block: 1 << 16,
            rounds: 2,
        };
        assert_eq!(work_in(room.path(), load).bytes_wrong, 2);
    }
}
