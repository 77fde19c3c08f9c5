// SPDX-License-Identifier: Apache-2.0
//! Recordings on the lab's disk, from a command line: `rushes lab record` and `mixed` without Samba
//! and without waiting.
//!
//! The flags make a scenario, which is played like any other. The disk is rt-Samba's Table 5, with
//! 14 ms for a write's positioning.

use crate::disk::volatile::MemoryPlan;
use crate::judge::Report;
use crate::record_groups::{CopyInGroup, RecordGroup, ScatterGroup};
use crate::scenario::{CopyGroup, DiskPlan, PlayerGroup, Scenario, ServerPlan};
use clap::Args;

/// The clients of a run.
#[derive(Clone, Debug, Args)]
pub struct Recording {
    /// Players under contract.
    #[arg(long, default_value_t = 0)]
    pub readers: u64,
    /// Writers at that rate.
    #[arg(long, default_value_t = 11)]
    pub writers: u64,
    /// Writers that begin when half of the time is over.
    #[arg(long, default_value_t = 0)]
    pub late_writers: u64,
    /// Clients that read as fast as they are let.
    #[arg(long, default_value_t = 0)]
    pub copies: u64,
    /// Clients that write a file as fast as they are let.
    #[arg(long, default_value_t = 0)]
    pub copies_in: u64,
    /// They first announce the length of a file, a byte a MiB, as Windows does.
    #[arg(long)]
    pub announce: bool,
    /// Size of their files. Units: MiB.
    #[arg(long, default_value_t = 1024)]
    pub copy_in_mib: u64,
    /// They all come by one session, as the clients of a pool's mount do.
    #[arg(long)]
    pub one_session: bool,
    /// The disk moves so many times fewer bytes a second, and positions as quickly.
    #[arg(long, default_value_t = 1)]
    pub slower: u64,
    /// Clients that write up to 64 KiB anywhere in one file, as much together as it is long, when
    /// they have read it.
    #[arg(long, default_value_t = 0)]
    pub scatterers: u64,
    /// Size of that file. Units: MiB.
    #[arg(long, default_value_t = 256)]
    pub scatter_mib: u64,
    /// The server goes over no gap.
    #[arg(long)]
    pub no_coalesce: bool,
    /// How long players play and writers write.
    #[arg(long, default_value_t = 60)]
    pub seconds: u64,
    /// Units: Mb/s.
    #[arg(long, default_value_t = 100)]
    pub bitrate: u64,
    /// Write buffer. Units: MiB.
    #[arg(long, default_value_t = 1024)]
    pub buffer: u64,
    /// True times of the disk, in hundredths of those that the server knows.
    #[arg(long, default_value_t = 100)]
    pub truth_percent: u64,
    /// Players do not begin before this.
    #[arg(long, default_value_t = 0)]
    pub readers_from: u64,
    /// The disk takes writes into a memory of its own of this size and brings them to the medium
    /// later, as the lab's does with 256. Units: MB.
    #[arg(long, default_value_t = 0)]
    pub memory: u64,
    /// It cannot be told to bring that to the medium.
    #[arg(long)]
    pub no_flush: bool,
    /// It is told, and never says that it has.
    #[arg(long)]
    pub flush_hangs: bool,
}

impl Default for Recording {
    fn default() -> Recording {
        Recording {
            readers: 0,
            writers: 0,
            late_writers: 0,
            copies: 0,
            copies_in: 0,
            announce: false,
            copy_in_mib: 1024,
            one_session: false,
            slower: 1,
            scatterers: 0,
            scatter_mib: 256,
            no_coalesce: false,
            seconds: 60,
            bitrate: 100,
            buffer: 1024,
            truth_percent: 100,
            readers_from: 0,
            memory: 0,
            no_flush: false,
            flush_hangs: false,
        }
    }
}

impl Recording {
    /// The scenario for the flags. It expects nothing.
    pub fn scenario(&self) -> Scenario {
        let mut scenario = Scenario {
            goal: "Recordings on the lab's disk.".to_owned(),
            seconds: self.seconds,
            server: ServerPlan {
                write_buffer_mib: self.buffer,
                no_coalesce: self.no_coalesce,
                ..ServerPlan::default()
            },
            disk: vec![self.disk()],
            ..Scenario::default()
        };
        let megabits = self.bitrate as f64;
        if self.readers > 0 {
            scenario.player.push(PlayerGroup {
                count: self.readers,
                megabits,
                start_ms: self.readers_from * 1000,
                jitter_us: 0,
                ..PlayerGroup::default()
            });
        }
        let late_ms = self.seconds * 500;
        for (count, start_ms) in [(self.writers, 0), (self.late_writers, late_ms)] {
            let group = RecordGroup {
                count,
                megabits,
                start_ms,
                ..RecordGroup::default()
            };
            scenario.record.extend((count > 0).then_some(group));
        }
        if self.copies > 0 {
            scenario.copy.push(CopyGroup {
                count: self.copies,
                request_kib: 1024,
                in_flight: 1,
                file_mb: 40_000,
                ..CopyGroup::default()
            });
        }
        if self.copies_in > 0 {
            scenario.copy_in.push(CopyInGroup {
                count: self.copies_in,
                file_mib: self.copy_in_mib,
                announce: self.announce,
                one_session: self.one_session,
                ..CopyInGroup::default()
            });
        }
        if self.scatterers > 0 {
            scenario.scatter.push(ScatterGroup {
                count: self.scatterers,
                file_mib: self.scatter_mib,
                ..ScatterGroup::default()
            });
        }
        scenario
    }

    fn disk(&self) -> DiskPlan {
        DiskPlan {
            truth_percent: self.truth_percent,
            write_way_us: 14_000,
            slower: self.slower,
            memory: MemoryPlan {
                mb: self.memory,
                no_flush: self.no_flush,
                flush_hangs: self.flush_hangs,
            },
            ..DiskPlan::default()
        }
    }

    /// Plays it.
    pub fn run(&self) -> Report {
        self.scenario().run("recording", 1)
    }

    /// Plays it and prints the results. True: the checker found nothing.
    pub fn print(&self) -> bool {
        let report = self.run();
        println!(
            "{}",
            serde_json::to_string_pretty(&report).unwrap_or_default()
        );
        report.violation_count == 0
    }
}
