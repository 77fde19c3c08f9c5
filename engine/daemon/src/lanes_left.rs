// SPDX-License-Identifier: Apache-2.0
//! The contents of lanes, for an operator: lists them and deletes a lane without a daemon.
//!
//! A damaged lane keeps a daemon from starting. Here each of its records is read by itself, and
//! those that can be read are shown.

use crate::config::{Config, ShareConfig};
use crate::error::ServeError;
use crate::recovery::lane_error;
use crate::runtime_dir::{Purpose, RuntimeDir};
use rushes_core::format::lane::{FileRecord, State};
use rushes_core::units::{ByteRange, LaneId};
use rushes_shm::lane::{LaneFault, lanes_in, remove_lane};
use rushes_shm::survey::{Survey, survey};
use rushes_sys::{SysError, space};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

/// A lane with something in it.
#[derive(Clone, Debug, Serialize)]
pub struct LaneLeft {
    /// Its number.
    pub lane: u32,
    /// Acknowledged writes in it that can be read.
    pub write_count: u64,
    /// Their bytes.
    pub bytes: u64,
    /// By file.
    pub files: Vec<FileLeft>,
    /// Why it cannot be used; None: it can. With a fault, the fields above count only the readable
    /// records.
    pub fault: Option<String>,
    /// Its table.
    pub table: PathBuf,
    /// Records of the table that cannot be read.
    pub damage: Vec<DamageLeft>,
    /// Memory that its bytes take, on disk already or not.
    pub memory_bytes: u64,
}

/// The part of it that belongs to one file.
#[derive(Clone, Debug, Default, Serialize)]
pub struct FileLeft {
    /// Its name, if it is on a file system that a share is on.
    pub path: Option<PathBuf>,
    /// Major number of `st_dev` at the time of the write; 0 when that record is damaged.
    pub device_major: u32,
    /// The minor number.
    pub device_minor: u32,
    /// `st_ino`.
    pub inode: u64,
    /// Writes.
    pub write_count: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Where the last of them ends.
    pub end: u64,
    /// The ranges that they cover, ascending.
    pub ranges: Vec<RangeLeft>,
}

/// Bytes of a file that a lane has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RangeLeft {
    /// First byte.
    pub start: u64,
    /// Behind the last.
    pub end: u64,
}

/// A record that cannot be read.
#[derive(Clone, Debug, Serialize)]
pub struct DamageLeft {
    /// `piece` or `file`.
    pub what: &'static str,
    /// Which.
    pub record: u32,
    /// Where it begins in the table.
    pub table_offset: u64,
    /// How, as a clause.
    pub reason: String,
}

/// The contents of the lanes of this configuration's runtime folder. A daemon may be writing them
/// meanwhile.
pub fn list(config: &Config) -> Result<Vec<LaneLeft>, ServeError> {
    list_in(&config.runtime_dir, &config.shares)
}

/// The same of any runtime folder. `shares`: only files in these have names in the list.
pub fn list_in(runtime_dir: &Path, shares: &[ShareConfig]) -> Result<Vec<LaneLeft>, ServeError> {
    let folder = runtime_dir.join("lanes");
    let found = match lanes_in(&folder) {
        Ok(found) => found,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => {
            return Err(SysError::new("read", folder.display().to_string(), error).into());
        }
    };
    let names = Names::of(shares);
    let mut lanes = Vec::new();
    for id in found {
        let told = survey(&folder, id).map_err(|fault| lane_error(&folder, id, fault))?;
        let Some(told) = told else {
            continue;
        };
        let lane = describe(&folder, id, &told, &names);
        if lane.write_count > 0 || lane.fault.is_some() {
            lanes.push(lane);
        }
    }
    Ok(lanes)
}

fn describe(folder: &Path, id: LaneId, told: &Survey, names: &Names) -> LaneLeft {
    let mut files: BTreeMap<u32, (FileLeft, Vec<ByteRange>)> = BTreeMap::new();
    let waiting = || {
        let is_waiting = |state| matches!(state, State::Committed | State::Submitted);
        told.pieces
            .iter()
            .filter(move |found| is_waiting(found.state))
    };
    for found in waiting() {
        let (entry, ranges) = files.entry(found.piece.file).or_insert_with(|| {
            let named = found.file.as_ref().map(|file| names.describe(file));
            (named.unwrap_or_default(), Vec::new())
        });
        entry.write_count += 1;
        entry.bytes += found.piece.range.length.0;
        entry.end = entry.end.max(found.piece.range.end());
        ranges.push(found.piece.range);
    }
    let files: Vec<FileLeft> = files
        .into_values()
        .map(|(file, ranges)| FileLeft {
            ranges: joined(ranges),
            ..file
        })
        .collect();
    let damage = told.damage.iter().map(|found| DamageLeft {
        what: found.what,
        record: found.record,
        table_offset: found.table_offset,
        reason: found.damage.to_string(),
    });
    let fault = match (told.head, told.damage.first()) {
        (Err(fault), _) => Some(LaneFault::Head(fault)),
        (Ok(_), Some(first)) => Some(LaneFault::Record {
            what: first.what,
            record: first.record,
            damage: first.damage,
        }),
        (Ok(_), None) => None,
    };
    LaneLeft {
        lane: id.0,
        write_count: waiting().count() as u64,
        bytes: files.iter().map(|file| file.bytes).sum(),
        files,
        fault: fault.map(|fault| lane_error(folder, id, fault).to_string()),
        table: rushes_shm::lane::table_path(folder, id),
        damage: damage.collect(),
        memory_bytes: told.memory_bytes,
    }
}

/// Ranges in order, those that touch or overlap as one.
fn joined(mut ranges: Vec<ByteRange>) -> Vec<RangeLeft> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut out: Vec<RangeLeft> = Vec::new();
    for range in ranges {
        let (start, end) = (range.start.0, range.end());
        match out.last_mut().filter(|last| start <= last.end) {
            Some(last) => last.end = last.end.max(end),
            None => out.push(RangeLeft { start, end }),
        }
    }
    out
}

/// A root folder for each file system, to look up the names of files.
struct Names(Vec<([u8; 16], File)>);

impl Names {
    fn of(shares: &[ShareConfig]) -> Names {
        let known = shares.iter().filter_map(|share| {
            let root = File::open(&share.path).ok()?;
            Some((space::file_system_id(&root).ok()?, root))
        });
        Names(known.collect())
    }

    fn describe(&self, file: &FileRecord) -> FileLeft {
        FileLeft {
            path: self.name(file),
            device_major: rustix::fs::major(file.device),
            device_minor: rustix::fs::minor(file.device),
            inode: file.inode,
            ..FileLeft::default()
        }
    }

    fn name(&self, file: &FileRecord) -> Option<PathBuf> {
        let (_, root) = self.0.iter().find(|(id, _)| *id == file.file_system)?;
        let handle = file.handle.get(..file.handle_bytes as usize)?;
        space::name_by_handle(root, file.handle_kind, handle).ok()
    }
}

/// Delete a lane and its data.
///
/// Errors   Running: a daemon has the folder
pub fn give_up(config: &Config, lane: u32) -> Result<(), ServeError> {
    let _ours = RuntimeDir::take(&config.runtime_dir, Purpose::Recover)?;
    let folder = config.runtime_dir.join("lanes");
    let known = lanes_in(&folder)
        .unwrap_or_default()
        .contains(&LaneId(lane));
    if !known {
        return Err(ServeError::NoLane { folder, lane });
    }
    remove_lane(&folder, LaneId(lane));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_touch_are_one() {
        let ranges = [(10, 5), (0, 4), (15, 1), (3, 2), (30, 1), (12, 1)];
        let ranges = ranges.map(|(start, length)| ByteRange::new(start, length));
        let expected = [(0, 5), (10, 16), (30, 31)].map(|(start, end)| RangeLeft { start, end });
        assert_eq!(joined(ranges.to_vec()), expected);
    }
}
