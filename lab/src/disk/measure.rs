// SPDX-License-Identifier: Apache-2.0
//! Table 5 again: direct random reads and writes of 64 KiB to 16 MiB, beside the paper's figures
//! and those of the timing model on a virtual clock.
//!
//! The difference between measured and model comes from loop device, FUSE and scheduling on this
//! machine; that between model and paper is the error of the fit. The memory of the paper's array
//! absorbed its writes: the lab measures a disk with a write cache while that is full, and a disk
//! without one differs from the paper at small requests.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rushes_core::units::{ByteCount, Instant as Moment};
use rustix::fs::OFlags;
use serde::Serialize;

use super::cache::{Bytes, WriteCache};
use super::server::DESTAGE_BYTES;
use super::timing::{Direction, DiskTiming, Mechanics, Request};

/// Random reads in rt-Samba's Table 5: request size in KiB, Mb/s.
pub const TABLE5_READ_MBPS: [(u64, f64); 7] = [
    (64, 35.0),
    (512, 204.5),
    (1024, 361.2),
    (2048, 569.9),
    (4096, 821.7),
    (8192, 1032.4),
    (16384, 1216.6),
];

/// Random writes in the same table.
pub const TABLE5_WRITE_MBPS: [(u64, f64); 7] = [
    (64, 224.3),
    (512, 376.3),
    (1024, 440.9),
    (2048, 674.0),
    (4096, 816.6),
    (8192, 925.2),
    (16384, 1123.2),
];

/// Alignment of direct requests. Units: bytes.
const BLOCK_BYTES: u64 = 4096;
/// Requests that the model serves; enough to keep the error by chance below a percent.
const MODEL_REQUEST_COUNT: u32 = 4000;

/// One cell of the table, measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Cell {
    /// Reads or writes.
    pub direction: Direction,
    /// Size of a request.
    pub bytes: u64,
    /// Number of requests measured.
    pub count: u32,
    /// The rate measured, one request after the other. Units: Mb/s, 10⁶ bits a second.
    pub mbps: f64,
    /// The rate of the timing model on a virtual clock. Units: Mb/s.
    pub model_mbps: f64,
    /// The rate in the paper. Units: Mb/s.
    pub paper_mbps: f64,
    /// The rate measured above that of the paper. Units: percent.
    pub deviation_percent: f64,
}

/// The table, measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Table {
    /// Size of the disk.
    pub disk_bytes: u64,
    /// Its timing.
    pub timing: DiskTiming,
    /// All sizes of reads, then of writes if they were measured.
    pub cells: Vec<Cell>,
    /// Sequential reads of 1 MiB. Units: Mb/s.
    pub sequential_read_mbps: f64,
}

/// The plan of a measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plan {
    /// Time for each cell.
    pub time: Duration,
    /// Measure writes too: **this destroys the content of the disk**.
    pub writes: bool,
}

/// Pseudo-random numbers for places; the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((u128::from(self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)) * u128::from(end)) >> 64) as u64
    }

    /// A place for a request of `bytes` on a disk of `size`.
    fn place(&mut self, bytes: u64, size: u64) -> u64 {
        self.below((size.saturating_sub(bytes)) / BLOCK_BYTES + 1) * BLOCK_BYTES
    }
}

fn random() -> Random {
    Random(0x9e37_79b9_7f4a_7c15)
}

fn mbps(bytes: f64, seconds: f64) -> f64 {
    bytes * 8.0 / seconds / 1e6
}

/// Throughput of random requests by the model alone. Units: Mb/s.
pub fn model_mbps(
    timing: DiskTiming,
    size: ByteCount,
    direction: Direction,
    bytes: ByteCount,
) -> f64 {
    if direction == Direction::Write && timing.write_cache_bytes > 0 {
        return model_cached_write_mbps(timing, size, bytes);
    }
    let mut disk = Mechanics::new(timing, size);
    let mut random = random();
    let mut now = Moment::ZERO;
    for _ in 0..MODEL_REQUEST_COUNT {
        let request = Request {
            direction,
            offset: random.place(bytes.0, size.0),
            length: bytes,
            arrived: now,
        };
        now = disk.serve(&request, 1.0).done;
    }
    let total = bytes.0 as f64 * f64::from(MODEL_REQUEST_COUNT);
    mbps(total, now.0 as f64 / 1e9)
}

/// The throughput of writes through a cache that is full when the clock starts.
fn model_cached_write_mbps(timing: DiskTiming, size: ByteCount, bytes: ByteCount) -> f64 {
    let mut disk = Mechanics::new(timing, size);
    let mut cache = WriteCache::new(timing.write_cache_bytes);
    let content: Arc<[u8]> = Arc::from(vec![0; bytes.0 as usize]);
    let mut random = random();
    let mut now = Moment::ZERO;
    let mut begun = None;
    let mut count = 0u32;
    // The first cacheful fills it, the second lets the order of positions settle, the third is
    // timed.
    let enough = (timing.write_cache_bytes / bytes.0.max(1)).max(64) as u32;
    while count < 3 * enough {
        while !cache.fits(bytes.0) {
            let Some((offset, length)) = cache.next_run(disk.head(), DESTAGE_BYTES) else {
                break;
            };
            cache.forget(offset, length);
            let request = Request {
                direction: Direction::Write,
                offset,
                length: ByteCount(length),
                arrived: now,
            };
            now = disk.serve(&request, 1.0).done;
        }
        cache.put(random.place(bytes.0, size.0), Bytes::from(content.clone()));
        count += 1;
        if count == 2 * enough {
            begun = Some(now);
        }
    }
    let span = now.since(begun.unwrap_or(Moment::ZERO));
    let total = bytes.0 as f64 * f64::from(enough);
    mbps(total, span.0 as f64 / 1e9)
}

/// Measures the block device.
///
/// Errors   it cannot be opened for direct I/O, or a request fails
pub fn measure(
    device: &Path,
    size: ByteCount,
    timing: DiskTiming,
    plan: Plan,
    progress: &mut dyn FnMut(&Cell),
) -> io::Result<Table> {
    let file = OpenOptions::new()
        .read(true)
        .write(plan.writes)
        .custom_flags(OFlags::DIRECT.bits() as i32)
        .open(device)?;
    let mut buffer = Aligned::new(16 << 20);
    let mut cells = Vec::new();
    let directions = [
        (Direction::Read, TABLE5_READ_MBPS, true),
        (Direction::Write, TABLE5_WRITE_MBPS, plan.writes),
    ];
    for (direction, paper, wanted) in directions {
        for (kib, paper_mbps) in paper.into_iter().filter(|_| wanted) {
            let bytes = kib << 10;
            let slice = &mut buffer.bytes()[..bytes as usize];
            if direction == Direction::Write && timing.write_cache_bytes > 0 {
                fill_cache(&file, slice, size.0, timing.write_cache_bytes)?;
            }
            let (count, seconds) = time_random(&file, direction, slice, size.0, plan.time)?;
            let measured = mbps(bytes as f64 * f64::from(count), seconds);
            let cell = Cell {
                direction,
                bytes,
                count,
                mbps: measured,
                model_mbps: model_mbps(timing, size, direction, ByteCount(bytes)),
                paper_mbps,
                deviation_percent: (measured / paper_mbps - 1.0) * 100.0,
            };
            progress(&cell);
            cells.push(cell);
        }
    }
    let sequential_read_mbps =
        time_sequential(&file, &mut buffer.bytes()[..1 << 20], size.0, plan.time)?;
    Ok(Table {
        disk_bytes: size.0,
        timing,
        cells,
        sequential_read_mbps,
    })
}

/// Leaves the write cache full of requests of this size at random places.
fn fill_cache(file: &File, buffer: &[u8], size: u64, capacity: u64) -> io::Result<()> {
    file.sync_all()?;
    let bytes = buffer.len() as u64;
    let mut random = Random(0xd1b5_4a32_d192_ed03);
    for _ in 0..capacity.div_ceil(bytes) {
        file.write_all_at(buffer, random.place(bytes, size))?;
    }
    Ok(())
}

/// Sends one request after the other at random places, at least three. Returns their number and the
/// seconds that they took.
fn time_random(
    file: &File,
    direction: Direction,
    buffer: &mut [u8],
    size: u64,
    time: Duration,
) -> io::Result<(u32, f64)> {
    let mut random = random();
    let bytes = buffer.len() as u64;
    let start = Instant::now();
    let mut count = 0;
    while count < 3 || start.elapsed() < time {
        let at = random.place(bytes, size);
        match direction {
            Direction::Read => file.read_exact_at(buffer, at)?,
            Direction::Write => file.write_all_at(buffer, at)?,
        }
        count += 1;
    }
    Ok((count, start.elapsed().as_secs_f64()))
}

/// Reads sequentially from the middle of the disk. Returns Mb/s.
fn time_sequential(file: &File, buffer: &mut [u8], size: u64, time: Duration) -> io::Result<f64> {
    let bytes = buffer.len() as u64;
    let mut at = size / 2 / BLOCK_BYTES * BLOCK_BYTES;
    // The first read pays for the seek.
    file.read_exact_at(buffer, at)?;
    let start = Instant::now();
    let mut done = 0;
    while start.elapsed() < time && at + 2 * bytes <= size {
        at += bytes;
        file.read_exact_at(buffer, at)?;
        done += bytes;
    }
    Ok(mbps(done as f64, start.elapsed().as_secs_f64()))
}

impl Table {
    /// Prints a table for people: as in the paper, sizes from left to right.
    pub fn print(&self, out: &mut dyn io::Write) -> io::Result<()> {
        for direction in [Direction::Read, Direction::Write] {
            let cells: Vec<&Cell> = self
                .cells
                .iter()
                .filter(|cell| cell.direction == direction)
                .collect();
            if cells.is_empty() {
                continue;
            }
            let mut line = |name: &str, text: &dyn Fn(&Cell) -> String| {
                write!(out, "{name:<22}")?;
                for cell in &cells {
                    write!(out, "{:>9}", text(cell))?;
                }
                writeln!(out)
            };
            line(&format!("Random {direction}, KiB"), &|cell| {
                (cell.bytes >> 10).to_string()
            })?;
            line("  measured, Mb/s", &|cell| format!("{:.1}", cell.mbps))?;
            line("  timing model", &|cell| format!("{:.1}", cell.model_mbps))?;
            line("  Table 5 of the paper", &|cell| {
                format!("{:.1}", cell.paper_mbps)
            })?;
            line("  measured to paper, %", &|cell| {
                format!("{:+.1}", cell.deviation_percent)
            })?;
        }
        writeln!(
            out,
            "Sequential reads of 1 MiB: {:.1} Mb/s",
            self.sequential_read_mbps
        )
    }
}

/// Memory for direct I/O.
struct Aligned {
    memory: Vec<u8>,
    start: usize,
    length: usize,
}

impl Aligned {
    fn new(length: usize) -> Aligned {
        // It never grows, so its start stays in place. Not zeros: the disk stores no pages of
        // zeros.
        let memory = vec![0x5a; length + BLOCK_BYTES as usize];
        let start = memory.as_ptr().align_offset(BLOCK_BYTES as usize);
        Aligned {
            memory,
            start,
            length,
        }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.length]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: ByteCount = ByteCount(40_000_000_000);

    #[test]
    fn model_reads_within_15_percent_of_table_5() {
        for (kib, paper) in TABLE5_READ_MBPS {
            let got = model_mbps(
                DiskTiming::TABLE5,
                SIZE,
                Direction::Read,
                ByteCount(kib << 10),
            );
            assert!(
                (got / paper - 1.0).abs() < 0.15,
                "{kib} KiB: {got:.1} Mb/s, the paper has {paper}"
            );
        }
    }

    #[test]
    fn model_writes_through_the_cache_within_15_percent_of_table_5() {
        for (kib, paper) in TABLE5_WRITE_MBPS {
            let got = model_mbps(
                DiskTiming::TABLE5_WRITE_BACK,
                SIZE,
                Direction::Write,
                ByteCount(kib << 10),
            );
            assert!(
                (got / paper - 1.0).abs() < 0.15,
                "{kib} KiB: {got:.1} Mb/s, the paper has {paper}"
            );
        }
    }

    /// Below 1 MiB the paper's array absorbed writes in its memory, so only larger ones are
    /// compared.
    #[test]
    fn model_writes_from_1_mib_within_45_percent_of_table_5() {
        for (kib, paper) in TABLE5_WRITE_MBPS.into_iter().skip(2) {
            let got = model_mbps(
                DiskTiming::TABLE5,
                SIZE,
                Direction::Write,
                ByteCount(kib << 10),
            );
            assert!(
                (got / paper - 1.0).abs() < 0.45,
                "{kib} KiB: {got:.1} Mb/s, the paper has {paper}"
            );
        }
    }

    #[test]
    fn printed_table_has_all_rows() {
        let cell = Cell {
            direction: Direction::Read,
            bytes: 64 << 10,
            count: 10,
            mbps: 33.0,
            model_mbps: 33.5,
            paper_mbps: 35.0,
            deviation_percent: -5.7,
        };
        let table = Table {
            disk_bytes: SIZE.0,
            timing: DiskTiming::TABLE5,
            cells: vec![cell],
            sequential_read_mbps: 1354.0,
        };
        let mut out = Vec::new();
        table.print(&mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        for expect in ["Random read, KiB", "33.0", "33.5", "35.0", "-5.7", "1354.0"] {
            assert!(text.contains(expect), "{text}");
        }
        assert!(!text.contains("Random write"));
    }
}
