// SPDX-License-Identifier: Apache-2.0
//! The report of `rushes lab power-cuts`: counts, and each violation with the command to repeat it.

use crate::reports::outcome::Outcome;
use anyhow::{Result, ensure};
use serde::Serialize;
use serde_json::Value;

use super::check::Finding;

/// Version of the field names; docs/reference/lab-json.md describes them.
pub const REPORT_VERSION: u64 = 2;

/// The report of one run.
#[derive(Clone, Debug, Serialize)]
pub struct PowerReport {
    /// Version of these names.
    pub report_version: u64,
    /// `ext4` or `xfs`; of a pool that of all members but one.
    pub file_system: &'static str,
    /// `plain` or `pool`.
    pub layout: &'static str,
    /// Seed of workloads and points.
    pub seed: u64,
    /// Mount options beside the usual ones.
    pub mount_options: String,
    /// How the disk or the door lied, on purpose: `none`, `flush`, `flushes`, `superblock`,
    /// `misdirect`, `door`.
    pub lie: &'static str,
    /// The workloads wrote through a daemon.
    pub served: bool,
    /// Writes that the daemon took.
    pub writes_served: u64,
    /// Writes that the daemon left to the workload's own descriptors.
    pub writes_plain: u64,
    /// Files of a pool that lay in more than one segment when a recording ended.
    pub files_in_pieces: u64,
    /// Files of a pool that were striped then.
    pub files_striped: u64,
    /// How often the lab filled, drained or tidied a member of a pool during recordings.
    pub disturbances: u64,
    /// Power cuts.
    pub points: u64,
    /// Recorded workloads.
    pub recordings: u64,
    /// Records of all logs.
    pub log_records: u64,
    /// Bytes of all logs.
    pub log_bytes: u64,
    /// Flushes in all logs.
    pub flushes: u64,
    /// Writes that were not safe at a cut and were whole on the medium all the same.
    pub writes_kept: u64,
    /// Unsafe writes of which some sectors were there.
    pub writes_torn: u64,
    /// Unsafe writes that were lost.
    pub writes_lost: u64,
    /// Files read after cuts.
    pub files_read: u64,
    /// Their bytes.
    pub bytes_read: u64,
    /// Points after which the file system's own checker ran as well.
    pub fsck_points: u64,
    /// Misfits of a pool after cuts that `rushes pool fsck --repair` mended.
    pub findings_mended: u64,
    /// Files of a pool in `lost+found` after that.
    pub orphans: u64,
    /// The first violations.
    pub violations: Vec<Violation>,
    /// Number of all violations.
    pub violation_count: u64,
    /// Units: s.
    pub wall_s: f64,
    /// Power cuts a second, recording included.
    pub points_per_s: f64,
    /// Machine and revision.
    pub environment: Value,
}

/// One broken promise.
#[derive(Clone, Debug, Serialize)]
pub struct Violation {
    /// Number of the point.
    pub point: u64,
    /// Records of the log before the cut.
    pub record: usize,
    /// Steps of each lane that were acknowledged.
    pub steps_done: Vec<usize>,
    /// The content expected and the content read.
    #[serde(flatten)]
    pub finding: Finding,
    /// The command that repeats this point.
    pub replay: String,
}

impl PowerReport {
    /// The report as text for people.
    pub fn text(&self) -> String {
        let mut text = format!(
            "{}{}: {} power cuts over {} recordings {}({} records, {} flushes) in {:.0} s, {:.1} a second\n\
             of the writes that were not safe {} were kept, {} torn, {} lost\n\
             {} files read ({:.1} MB); {} points checked by fsck as well\n",
            match self.layout {
                "pool" => "pool of ",
                _ => "",
            },
            self.file_system,
            self.points,
            self.recordings,
            if self.served {
                "of what a daemon wrote "
            } else {
                ""
            },
            self.log_records,
            self.flushes,
            self.wall_s,
            self.points_per_s,
            self.writes_kept,
            self.writes_torn,
            self.writes_lost,
            self.files_read,
            self.bytes_read as f64 / 1e6,
            self.fsck_points,
        );
        if self.layout == "pool" {
            text.push_str(&format!(
                "at the end of recordings {} files were in pieces, {} striped; members were disturbed {} times\n\
                 fsck mended {} findings and put {} files aside\n",
                self.files_in_pieces,
                self.files_striped,
                self.disturbances,
                self.findings_mended,
                self.orphans,
            ));
        }
        for violation in &self.violations {
            text.push_str(&violation.text());
        }
        text.push_str(&match self.violation_count {
            0 => String::from("no violation\n"),
            count => format!("{count} VIOLATIONS\n"),
        });
        text
    }
}

impl Outcome for PowerReport {
    fn table(&self) -> Result<String> {
        Ok(self.text())
    }

    fn check(&self) -> Result<()> {
        ensure!(
            self.violation_count == 0,
            "{} promises are broken",
            self.violation_count
        );
        Ok(())
    }
}

impl Violation {
    fn text(&self) -> String {
        format!(
            "VIOLATION ({:?}) at point {}, record {}, after steps {:?}\n  \
             {} (file {:#x})\n  expected {}\n  read     {}\n  again    {}\n",
            self.finding.rule,
            self.point,
            self.record,
            self.steps_done,
            self.finding.path,
            self.finding.file,
            self.finding.expected,
            self.finding.read,
            self.replay
        )
    }
}
