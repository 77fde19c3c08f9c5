// SPDX-License-Identifier: Apache-2.0
//! Where a calibration reads and writes: the whole disk, data on it, or a file of its own.
//!
//! It writes only to a file that it created and that has no name any more. Reads go through the
//! block device, opened read-only, because only that reaches every distance: anywhere on a disk
//! with a moving head; on flash only where data lies, since a flash drive answers reads of blocks
//! that were never written in no time.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rushes_core::server::Extent;
use rushes_sys::extents;
use rushes_sys::file::read_full;
use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};

use super::store::{Under, node_of};

/// Alignment of direct requests, the same for all devices. Units: bytes.
pub(super) const BLOCK_BYTES: u64 = 4096;

/// The bytes that were read to measure reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// Any place of the block device.
    WholeDevice,
    /// Those places of the block device where data lies.
    DataOnDevice,
    /// A scratch file: the block device could not be found or opened. Distances are not known.
    ScratchFile,
}

/// A run of bytes that may be read. Units: bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Region {
    pub(super) start: u64,
    pub(super) length: u64,
}

/// Where to read.
#[derive(Debug)]
pub(super) struct Ground {
    file: File,
    regions: Vec<Region>,
    /// Size that distances are parts of. Units: bytes.
    pub(super) bytes: u64,
    pub(super) source: Source,
}

/// Pseudo-random numbers for places of requests; not fit for secrets.
#[derive(Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Random {
        Random(seed | 1)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// At least 0, less than `end` (0 when that is 0).
    pub(super) fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(end)) >> 64) as u64
    }
}

/// Memory for direct I/O, at a multiple of [`BLOCK_BYTES`].
#[derive(Debug)]
pub(super) struct Aligned {
    memory: Vec<u8>,
    start: usize,
    length: usize,
}

impl Aligned {
    pub(super) fn new(length: u64) -> Aligned {
        let length = length as usize;
        // Never grown, so its start stays where it is.
        let memory = vec![0u8; length + BLOCK_BYTES as usize];
        let start = memory.as_ptr().align_offset(BLOCK_BYTES as usize);
        Aligned {
            memory,
            start,
            length,
        }
    }

    pub(super) fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.length]
    }

    /// Bytes that neither compress nor repeat.
    pub(super) fn scramble(&mut self, random: &mut Random) {
        for chunk in self.bytes().chunks_exact_mut(8) {
            chunk.copy_from_slice(&random.next().to_le_bytes());
        }
    }
}

impl Ground {
    /// The disk under a path; `None` when it has none that we may open.
    pub(super) fn device(path: &Path, under: &Under) -> Option<Ground> {
        let facts = under.facts.as_ref()?;
        let disk = PathBuf::from("/dev").join(facts.disk.replace('!', "/"));
        let file = open_direct(&disk)
            // A container may have the node of the partition only.
            .or_else(|_| match node_of(facts.major, facts.minor) {
                Some(node) if facts.partition_offset == 0 => open_direct(&node),
                _ => Err(io::ErrorKind::NotFound.into()),
            })
            .ok()?;
        let whole = Region {
            start: 0,
            length: facts.disk_bytes,
        };
        let mut ground = Ground {
            file,
            regions: vec![whole],
            bytes: facts.disk_bytes,
            source: Source::WholeDevice,
        };
        if !facts.rotational {
            ground.source = Source::DataOnDevice;
            ground.regions = data_below(path, facts.partition_offset);
        }
        Some(ground)
    }

    /// Reads the scratch file where there is nothing else.
    pub(super) fn scratch(scratch: &Scratch, bytes: u64) -> io::Result<Ground> {
        Ok(Ground {
            file: scratch.file.try_clone()?,
            regions: vec![Region {
                start: 0,
                length: scratch.bytes,
            }],
            bytes,
            source: Source::ScratchFile,
        })
    }

    /// Bytes that may be read.
    pub(super) fn readable(&self) -> u64 {
        self.regions.iter().map(|region| region.length).sum()
    }

    /// Adds where the scratch file lies.
    pub(super) fn add(&mut self, regions: impl IntoIterator<Item = Region>) {
        self.regions.extend(regions);
    }

    /// A place for `bytes`, every one as likely as the others. None: no region is long enough.
    pub(super) fn place(&self, random: &mut Random, bytes: u64) -> Option<u64> {
        let room = |region: &Region| region.length.checked_sub(bytes).map(|room| room + 1);
        let total: u64 = self.regions.iter().filter_map(room).sum();
        if total == 0 {
            return None;
        }
        let mut choice = random.below(total);
        for region in &self.regions {
            let Some(room) = room(region) else { continue };
            if choice < room {
                // Down to a block; a region may start off one, and then its first block is left
                // out.
                let place = (region.start + choice) / BLOCK_BYTES * BLOCK_BYTES;
                return Some(place.max(region.start.next_multiple_of(BLOCK_BYTES)));
            }
            choice -= room;
        }
        None
    }

    /// True when all of it may be read.
    pub(super) fn contains(&self, start: u64, bytes: u64) -> bool {
        self.regions
            .iter()
            .any(|region| start >= region.start && start + bytes <= region.start + region.length)
    }

    /// Reads at `at`, as much as `buffer` holds. Returns how long it took. Units: s.
    pub(super) fn read(&self, at: u64, buffer: &mut [u8]) -> io::Result<f64> {
        let start = Instant::now();
        if read_full(&self.file, buffer, at)? < buffer.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(start.elapsed().as_secs_f64())
    }
}

fn open_direct(path: &Path) -> io::Result<File> {
    std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(OFlags::DIRECT.bits() as i32)
        .open(path)
}

/// Smaller files are skipped. Units: bytes.
const FILE_BYTES_MIN: u64 = 16 << 20;
/// Bounds of the search for large files.
const ENTRY_COUNT_MAX: usize = 50_000;
const SEARCH_TIME_MAX: Duration = Duration::from_secs(1);
/// Enough to read. Units: bytes.
const DATA_BYTES_ENOUGH: u64 = 256 << 30;

/// Where the large files below `path` lie on the disk.
fn data_below(path: &Path, partition_offset: u64) -> Vec<Region> {
    use std::os::unix::fs::MetadataExt;
    let Ok(device) = std::fs::metadata(path).map(|meta| meta.dev()) else {
        return Vec::new();
    };
    let start = Instant::now();
    let (mut regions, mut found, mut looked_at) = (Vec::new(), 0, 0);
    let mut folders = vec![path.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            looked_at += 1;
            if looked_at > ENTRY_COUNT_MAX
                || start.elapsed() > SEARCH_TIME_MAX
                || found > DATA_BYTES_ENOUGH
            {
                return regions;
            }
            // Of the entry itself: no symbolic link is followed, no other file system entered.
            let Ok(meta) = entry.metadata() else { continue };
            if meta.dev() != device {
                continue;
            }
            if meta.is_dir() {
                folders.push(entry.path());
            } else if meta.is_file() && meta.len() >= FILE_BYTES_MIN {
                let placed = regions_of(&entry.path(), partition_offset);
                found += placed.iter().map(|region| region.length).sum::<u64>();
                regions.extend(placed);
            }
        }
    }
    regions
}

fn regions_of(path: &Path, partition_offset: u64) -> Vec<Region> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOATIME;
    let file = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(flags.bits() as i32)
        .open(path);
    let Ok(map) = file.and_then(|file| extents::of(&file, 64)) else {
        return Vec::new();
    };
    map.extents
        .iter()
        .map(|extent| Region {
            start: extent.physical.0 + partition_offset,
            length: extent.length.0,
        })
        .collect()
}

/// A file of ours without a name: gone when it is closed, however that happens.
#[derive(Debug)]
pub(super) struct Scratch {
    file: File,
    /// Its size. Units: bytes.
    pub(super) bytes: u64,
    /// Where it lies on its file system's device; empty when that is not known.
    extents: Vec<Extent>,
    partition_offset: u64,
}

impl Scratch {
    /// Makes one of `bytes` in `folder` and fills it; `progress` gets the part done, 0 to 1.
    ///
    /// Errors   EINVAL: no direct I/O on this file system; EROFS, ENOSPC, EACCES as usual
    pub(super) fn create(
        folder: &Path,
        bytes: u64,
        partition_offset: u64,
        random: &mut Random,
        progress: &mut dyn FnMut(f64),
    ) -> io::Result<Scratch> {
        let file = open_nameless(folder)?;
        // Asks for one extent; a failure is harmless, the extents are read below.
        let _ = rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes);
        let chunk = (4u64 << 20).min(bytes);
        let mut buffer = Aligned::new(chunk);
        let mut at = 0;
        while at < bytes {
            let length = chunk.min(bytes - at) as usize;
            buffer.scramble(random);
            write_all(&file, &buffer.bytes()[..length], at)?;
            at += length as u64;
            progress(at as f64 / bytes as f64);
        }
        // Until then delayed allocation leaves bytes without a place on the disk.
        file.sync_all()?;
        let extents = match extents::of(&file, 4096) {
            Ok(map) if map.complete => map.extents,
            _ => Vec::new(),
        };
        Ok(Scratch {
            file,
            bytes,
            extents,
            partition_offset,
        })
    }

    /// Where it lies on the disk.
    pub(super) fn regions(&self) -> impl Iterator<Item = Region> + '_ {
        self.extents.iter().map(|extent| Region {
            start: extent.physical.0 + self.partition_offset,
            length: extent.length.0,
        })
    }

    /// True when its places on the disk are known.
    pub(super) fn is_placed(&self) -> bool {
        !self.extents.is_empty()
    }

    /// Where `bytes` at `at` lie on the disk; `None` when they are not in one piece.
    pub(super) fn physical(&self, at: u64, bytes: u64) -> Option<u64> {
        self.extents
            .iter()
            .find(|extent| {
                at >= extent.logical.0 && at + bytes <= extent.logical.0 + extent.length.0
            })
            .map(|extent| extent.physical.0 + self.partition_offset + (at - extent.logical.0))
    }

    /// Writes `bytes` at `at`. Returns how long it took. Units: s.
    pub(super) fn write(&self, at: u64, bytes: &[u8]) -> io::Result<f64> {
        let start = Instant::now();
        write_all(&self.file, bytes, at)?;
        Ok(start.elapsed().as_secs_f64())
    }
}

fn write_all(file: &File, bytes: &[u8], at: u64) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match rustix::io::pwrite(file, &bytes[done..], at + done as u64) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => done += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn open_nameless(folder: &Path) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    match rustix::fs::open(folder, flags | OFlags::TMPFILE, mode) {
        // No O_TMPFILE: file systems answer EOPNOTSUPP, old kernels EISDIR.
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR) => {}
        other => return Ok(File::from(other?)),
    }
    let name = format!(".rushes-calibrate-{}", std::process::id());
    let path = folder.join(name);
    let file = rustix::fs::open(&path, flags | OFlags::CREATE | OFlags::EXCL, mode)?;
    std::fs::remove_file(&path)?;
    Ok(File::from(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ground(regions: &[(u64, u64)]) -> Ground {
        Ground {
            file: File::open("/dev/null").unwrap(),
            regions: regions
                .iter()
                .map(|&(start, length)| Region { start, length })
                .collect(),
            bytes: 1 << 40,
            source: Source::DataOnDevice,
        }
    }

    #[test]
    fn places_lie_on_blocks_inside_regions_and_reach_all_of_them() {
        let ground = ground(&[(4096, 1 << 20), (1 << 30, 8192), (5 << 30, 1 << 20)]);
        let mut random = Random::new(7);
        let mut reached = [false; 3];
        for _ in 0..2000 {
            let place = ground.place(&mut random, 65_536).unwrap();
            assert_eq!(place % BLOCK_BYTES, 0);
            assert!(ground.contains(place, 65_536), "{place}");
            reached[(place >> 30).min(2) as usize] = true;
        }
        assert_eq!(reached, [true, false, true]);
        assert_eq!(ground.place(&mut random, 2 << 20), None);
    }

    #[test]
    fn aligned_memory_is_aligned_and_scrambled() {
        let mut buffer = Aligned::new(8192);
        buffer.scramble(&mut Random::new(1));
        let bytes = buffer.bytes();
        assert_eq!(bytes.len(), 8192);
        assert_eq!(bytes.as_ptr() as usize % BLOCK_BYTES as usize, 0);
        assert_ne!(bytes[..4096], bytes[4096..]);
    }

    #[test]
    fn random_numbers_stay_below_their_end() {
        let mut random = Random::new(3);
        assert_eq!(random.below(0), 0);
        assert!((0..1000).all(|_| random.below(10) < 10));
        assert!((0..1000).any(|_| random.below(10) == 9));
    }
}
