// SPDX-License-Identifier: Apache-2.0
//! What lies in lanes, for an operator: looked at and given up without a daemon.

use crate::config::Config;
use crate::error::ServeError;
use crate::recovery::lane_error;
use crate::runtime_dir::{Purpose, RuntimeDir};
use rushes_core::units::LaneId;
use rushes_shm::lane::{LaneFile, lanes_in, remove_lane};
use rushes_sys::SysError;
use serde::Serialize;
use std::collections::BTreeMap;

/// A lane with something in it.
#[derive(Clone, Debug, Serialize)]
pub struct LaneLeft {
    /// Its number.
    pub lane: u32,
    /// Acknowledged writes in it.
    pub write_count: u64,
    /// Their bytes.
    pub bytes: u64,
    /// By file.
    pub files: Vec<FileLeft>,
    /// Why it cannot be read, when it cannot.
    pub fault: Option<String>,
}

/// What of it belongs to one file.
#[derive(Clone, Debug, Default, Serialize)]
pub struct FileLeft {
    /// `st_dev`, as it was.
    pub device_major: u32,
    /// The same.
    pub device_minor: u32,
    /// `st_ino`.
    pub inode: u64,
    /// Writes.
    pub write_count: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Where the last of them ends.
    pub end: u64,
}

/// What lies in the lanes of this configuration's runtime folder. A daemon may be writing it meanwhile.
pub fn list(config: &Config) -> Result<Vec<LaneLeft>, ServeError> {
    let folder = config.runtime_dir.join("lanes");
    let found = match lanes_in(&folder) {
        Ok(found) => found,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => {
            return Err(SysError::new("read", folder.display().to_string(), error).into());
        }
    };
    let mut lanes = Vec::new();
    for id in found {
        let lane = match look(&folder, id) {
            Ok(Some(lane)) => lane,
            Ok(None) => continue,
            Err(fault) => LaneLeft {
                lane: id.0,
                write_count: 0,
                bytes: 0,
                files: Vec::new(),
                fault: Some(fault.to_string()),
            },
        };
        if lane.write_count > 0 || lane.fault.is_some() {
            lanes.push(lane);
        }
    }
    Ok(lanes)
}

fn look(folder: &std::path::Path, id: LaneId) -> Result<Option<LaneLeft>, ServeError> {
    let wrong = |fault| lane_error(folder, id, fault);
    let Some(lane) = LaneFile::look(folder, id).map_err(wrong)? else {
        return Ok(None);
    };
    let mut files: BTreeMap<u32, FileLeft> = BTreeMap::new();
    let mut bytes = 0;
    let pieces = lane.pieces().map_err(wrong)?;
    for (_, _, piece) in &pieces {
        let entry = files.entry(piece.file).or_default();
        entry.write_count += 1;
        entry.bytes += piece.range.length.0;
        entry.end = entry.end.max(piece.range.end());
        bytes += piece.range.length.0;
        if let Some(named) = lane.file(piece.file).map_err(wrong)? {
            entry.device_major = rustix::fs::major(named.device);
            entry.device_minor = rustix::fs::minor(named.device);
            entry.inode = named.inode;
        }
    }
    Ok(Some(LaneLeft {
        lane: id.0,
        write_count: pieces.len() as u64,
        bytes,
        files: files.into_values().collect(),
        fault: None,
    }))
}

/// Delete a lane with what is in it.
///
/// Errors   Running: a daemon is there, whose it is.
pub fn give_up(config: &Config, lane: u32) -> Result<(), ServeError> {
    let _ours = RuntimeDir::take(&config.runtime_dir, Purpose::Recover)?;
    let folder = config.runtime_dir.join("lanes");
    let known = lanes_in(&folder)
        .unwrap_or_default()
        .contains(&LaneId(lane));
    if !known {
        let error = std::io::Error::from(std::io::ErrorKind::NotFound);
        return Err(SysError::new("give up lane", lane.to_string(), error).into());
    }
    remove_lane(&folder, LaneId(lane));
    Ok(())
}
