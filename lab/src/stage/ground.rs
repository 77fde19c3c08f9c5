// SPDX-License-Identifier: Apache-2.0
//! The ground of a stage: which disks, how many, and the layer that makes one place for files of
//! them.
//!
//! Only the description; [`crate::stage`] and [`crate::stage::array`] put it up.

use crate::disk::timing::DiskTiming;
use crate::disk::{DiskSpec, FileSystem};
use rushes_core::units::ByteCount;
use std::path::PathBuf;

/// The kind of disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// The disk array of rt-Samba's Table 5 as a device, with its transfer rates divided by this.
    Table5(u32),
    /// A modelled drive without moving parts.
    Ssd,
    /// A device in memory that takes no time but the processor's.
    Memory,
    /// A folder on a disk of the user.
    Folder(PathBuf),
}

/// Divisors of the rates, and their names.
const PARTS: [(u32, &str); 4] = [
    (1, "table5"),
    (2, "table5-half"),
    (4, "table5-quarter"),
    (8, "table5-eighth"),
];
const SSD: &str = "ssd";
const MEMORY: &str = "memory";

impl std::str::FromStr for Place {
    type Err = String;
    fn from_str(text: &str) -> Result<Place, String> {
        if let Some((part, _)) = PARTS.iter().find(|(_, name)| *name == text) {
            return Ok(Place::Table5(*part));
        }
        match text {
            SSD => return Ok(Place::Ssd),
            MEMORY => return Ok(Place::Memory),
            _ => {}
        }
        let path = PathBuf::from(text);
        if path.is_dir() {
            return Ok(Place::Folder(path));
        }
        Err(format!(
            "`{text}` is neither table5, table5-half, table5-quarter, table5-eighth, ssd, memory, nor a folder on the disk to be tried"
        ))
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Place::Table5(part) => match PARTS.iter().find(|(known, _)| known == part) {
                Some((_, name)) => f.write_str(name),
                None => write!(f, "table5/{part}"),
            },
            Place::Ssd => f.write_str(SSD),
            Place::Memory => f.write_str(MEMORY),
            Place::Folder(path) => path.display().fmt(f),
        }
    }
}

/// The layer that makes one place for files of the disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Layout {
    /// One file system on one disk
    #[default]
    Plain,
    /// A pool of ours: each file on one disk
    Pool,
    /// A pool of ours: each file striped over all disks
    PoolStriped,
    /// btrfs, data striped over all disks
    Raid0,
    /// btrfs, data in large pieces on one disk after the other
    Single,
    /// mergerfs over a file system on each disk
    Mergerfs,
}

impl Layout {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Layout::Plain => "plain",
            Layout::Pool => "pool",
            Layout::PoolStriped => "pool-striped",
            Layout::Raid0 => "raid0",
            Layout::Single => "single",
            Layout::Mergerfs => "mergerfs",
        }
    }

    /// True for a pool of ours.
    pub fn is_pool(self) -> bool {
        matches!(self, Layout::Pool | Layout::PoolStriped)
    }

    /// True for one btrfs over all disks.
    pub fn is_btrfs(self) -> bool {
        matches!(self, Layout::Raid0 | Layout::Single)
    }
}

/// The ground under the files: disks, file system and layout, and room beside the footage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ground {
    /// The file system.
    pub file_system: FileSystem,
    /// ext4 keeps its own tables in one place.
    pub media_format: bool,
    /// The disk has its volatile write cache.
    pub write_back: bool,
    /// Room for the files that runs write. Units: bytes.
    pub room_bytes: u64,
    /// The folder for the disk's bytes; `None`: in memory.
    pub folder: Option<PathBuf>,
    /// Number of disks.
    pub disk_count: u64,
    /// Size of each disk; empty: all alike, and as large as needed. Units: bytes.
    pub sizes: Vec<u64>,
    /// The layer over the disks.
    pub layout: Layout,
    /// The pool's policy for its files, in the words of `rushes pool policy`.
    pub wish: Option<String>,
    /// So many of the disks, the last ones, join the pool only when the run adds them.
    pub added_count: u64,
    /// The pool counts as idle after a second.
    pub idles_soon: bool,
}

impl Default for Ground {
    fn default() -> Ground {
        Ground {
            file_system: FileSystem::default(),
            media_format: false,
            write_back: false,
            room_bytes: 0,
            folder: None,
            disk_count: 1,
            sizes: Vec::new(),
            layout: Layout::Plain,
            wish: None,
            added_count: 0,
            idles_soon: false,
        }
    }
}

impl Ground {
    /// A modelled disk of this size.
    pub fn disk_spec(&self, bytes: ByteCount, place: &Place) -> DiskSpec {
        let table5 = match self.write_back {
            true => DiskTiming::TABLE5_WRITE_BACK,
            false => DiskTiming::TABLE5,
        };
        let mut spec = DiskSpec {
            timing: match place {
                Place::Ssd => DiskTiming::SSD,
                Place::Table5(part) => table5.with_rates_times(1.0 / f64::from((*part).max(1))),
                // These are not modelled disks, and no caller needs a modelled one for them.
                Place::Memory | Place::Folder(_) => table5,
            },
            ..DiskSpec::table5(bytes)
        };
        if let Some(folder) = &self.folder {
            spec.folder.clone_from(folder);
        }
        spec
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_are_called_as_they_are_shown() {
        for (text, place) in [
            ("table5", Place::Table5(1)),
            ("table5-half", Place::Table5(2)),
            ("table5-eighth", Place::Table5(8)),
            ("ssd", Place::Ssd),
            ("memory", Place::Memory),
        ] {
            assert_eq!(text.parse(), Ok(place.clone()));
            assert_eq!(place.to_string(), text);
        }
        assert!("table5-third".parse::<Place>().is_err());
    }

    #[test]
    fn half_a_disk_has_half_the_rates_and_positions_as_long() {
        let spec = Ground::default().disk_spec(ByteCount(1 << 30), &Place::Table5(2));
        assert_eq!(spec.timing.read.bytes_per_second, 86_000_000);
        assert_eq!(spec.timing.write.bytes_per_second, 72_500_000);
        let whole = DiskTiming::TABLE5.read.positioning_ms;
        assert_eq!(spec.timing.read.positioning_ms, whole);
        let ssd = Ground::default().disk_spec(ByteCount(1 << 30), &Place::Ssd);
        assert_eq!(ssd.timing, DiskTiming::SSD);
    }
}
