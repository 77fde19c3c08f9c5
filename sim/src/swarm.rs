// SPDX-License-Identifier: Apache-2.0
//! A scenario from a seed alone: the kinds of faults vary, not only their order.
//!
//! Every kind of client and fault is switched off as often as on, and its weight varies wildly, so
//! that rare combinations occur. If nothing in the world breaks the premises of the promise (the
//! disk is as the server knows it, no other program uses it), no promised stream may ever be late;
//! otherwise everything but lateness must hold.

use crate::disk::volatile::MemoryPlan;
use crate::disk::{BadRange, Faults, SlowPhase};
use crate::prng::Prng;
use crate::record_groups::{CopyInGroup, RecordGroup, ScatterGroup, WrittenExpect};
use crate::scenario::*;

/// The scenario of `seed`.
pub fn scenario(seed: u64) -> Scenario {
    let mut p = Prng::fork(seed, 77);
    let calm = p.chance(400);
    let mut scenario = Scenario {
        goal: format!("Swarm {seed}: whatever the seed brings."),
        seconds: p.between(6, 30),
        look_ms: 200,
        server: server(&mut p),
        latency: latency(&mut p),
        ..Scenario::default()
    };
    for _ in 0..p.between(1, 3) {
        scenario.disk.push(disk(&mut p, calm));
    }
    let read_kib = scenario.server.limits().read_bytes_max >> 10;
    for _ in 0..p.below(4) {
        scenario.player.push(players(&mut p, calm, read_kib));
    }
    if p.chance(500) {
        scenario.copy.push(CopyGroup {
            count: p.between(1, 4),
            start_ms: p.below(5000),
            request_kib: p.between(16, 8192).min(read_kib),
            in_flight: p.between(1, 6) as usize,
            file_mb: p.between(1, 4000),
            megabits: if p.chance(300) {
                p.log_between(5.0, 200.0)
            } else {
                0.0
            },
        });
    }
    if p.chance(500) || scenario.player.is_empty() {
        scenario.ramble.push(RambleGroup {
            count: p.between(1, 10),
            start_ms: p.below(3000),
            request_kib: p.between(4, read_kib),
            in_flight: p.between(1, 12) as usize,
            think_ms: p.between(1, 200),
            files: p.between(1, 6),
            file_kib: p.between(1, 60_000),
            players_files: p.chance(500),
            hold_ms: if p.chance(300) { p.below(1500) } else { 0 },
            die_per_10k: if p.chance(300) { p.below(200) } else { 0 },
        });
    }
    if !calm {
        trouble(&mut p, &mut scenario);
    }
    // From random numbers of their own: older parts of a seed's scenario stay as they were.
    editors(&mut Prng::fork(seed, 78), &mut scenario, read_kib);
    writers(&mut Prng::fork(seed, 79), &mut scenario);
    for group in &mut scenario.player {
        let least = group.least_kib(&scenario.latency);
        if group.request_kib > 0 {
            group.request_kib = group.request_kib.max(least).min(read_kib);
        }
    }
    expect(&mut scenario, calm);
    scenario
}

fn server(p: &mut Prng) -> ServerPlan {
    let slot_kib = 64 << p.below(5);
    // A reply names 16 slots at most, one of them for the unaligned start.
    let read_kib = u64::from(slot_kib * 15).min(8192);
    let bytes_mb = p.log_between(64.0, 1024.0) as u32;
    ServerPlan {
        slots: bytes_mb * 1024 / slot_kib,
        slot_kib,
        chunk_kib: p.between(u64::from(slot_kib), 8192).next_multiple_of(64),
        read_kib,
        pin_kib: read_kib * p.between(2, 12),
        sequence_ahead: if p.chance(300) {
            p.between(1, 200) as u32
        } else {
            0
        },
        preroll_ms: 0,
        margin_permille: None,
        no_analyser: p.chance(60),
        ..ServerPlan::default()
    }
}

fn latency(p: &mut Prng) -> LatencyPlan {
    LatencyPlan {
        door_us: p.between(1, 300),
        reorder_us: if p.chance(300) { p.below(3000) } else { 0 },
        disk_us: Some(p.below(200)),
        open_us: p.between(1, 3000),
        open_reads: 0,
        absent_reads: 0,
        copy_mb: p.between(300, 4000),
    }
}

fn disk(p: &mut Prng, calm: bool) -> DiskPlan {
    let mut plan = match p.below(4) {
        0 | 1 => DiskPlan::default(),
        2 => DiskPlan {
            fixed_us: p.between(500, 12_000),
            span_us: p.between(0, 20_000),
            rate_mb: p.between(60, 400),
            size_gb: p.between(10, 4000),
            ..DiskPlan::default()
        },
        _ => DiskPlan {
            fixed_us: p.between(30, 300),
            span_us: p.below(50),
            rate_mb: p.between(300, 3000),
            size_gb: p.between(100, 4000),
            ..DiskPlan::default()
        },
    };
    if calm {
        return plan;
    }
    let mut faults = Faults::default();
    if p.chance(300) {
        plan.truth_percent = p.between(80, 150);
    }
    if p.chance(300) {
        faults.noise_permille = p.below(300);
    }
    if p.chance(250) {
        let from_ms = p.below(20_000);
        faults.slow.push(SlowPhase {
            from_ms,
            to_ms: from_ms + p.below(5000),
            percent: p.between(100, 600),
        });
    }
    if p.chance(250) {
        faults.stall_permille = p.below(40);
        faults.stall_ms = p.below(2000);
    }
    if p.chance(300) {
        let from_ms = p.below(10_000);
        faults.bad.push(BadRange {
            start: p.below(plan.told().size.0),
            bytes: p.log_between(4096.0, 4e9) as u64,
            from_ms,
            to_ms: if p.chance(500) {
                from_ms + p.below(8000)
            } else {
                0
            },
        });
    }
    if p.chance(250) {
        faults.storm_per_second = p.between(1, 60);
        faults.storm_from_ms = p.below(10_000);
        // A disk that stalls has the storm for longer, and one that never gets over it answers no
        // request.
        if faults.stall_permille > 0 {
            faults.storm_to_ms = faults.storm_from_ms + 10_000;
        }
    }
    faults.honours_class = p.chance(200);
    plan.faults = faults;
    plan
}

fn players(p: &mut Prng, calm: bool, read_kib: u64) -> PlayerGroup {
    let sequence = p.chance(250);
    let megabits = p.log_between(5.0, 400.0);
    let frame_ms: f64 = [20.0, 40.0, 41.666_666, 100.0, 500.0][p.below(5) as usize];
    let rare = |p: &mut Prng, most: u64| if p.chance(250) { p.below(most) } else { 0 };
    PlayerGroup {
        count: p.between(1, 8),
        megabits: if sequence {
            megabits.min(150.0)
        } else {
            megabits
        },
        frame_ms: if sequence {
            frame_ms.min(100.0)
        } else {
            frame_ms
        },
        preroll_ms: 500,
        start_ms: p.below(6000),
        every_ms: [0, 50, 250, 1000, 3000][p.below(5) as usize],
        seconds: if p.chance(300) { p.between(1, 10) } else { 0 },
        request_kib: if p.chance(400) {
            p.between(16, 1024).min(read_kib)
        } else {
            0
        },
        in_flight: if p.chance(400) {
            p.between(2, 8) as usize
        } else {
            1
        },
        sequence,
        pool: false,
        reverse: p.chance(80),
        stride: if p.chance(80) { p.between(2, 6) } else { 0 },
        unruled: p.chance(200),
        shared: !sequence && p.chance(100),
        jitter_us: p.below(3000),
        pause_per_10k: rare(p, 100),
        jump_per_10k: rare(p, 100),
        die_per_10k: rare(p, 100),
        hold_ms: if !calm && p.chance(150) {
            p.below(400)
        } else {
            0
        },
        extent_mb: if p.chance(200) { p.between(1, 64) } else { 0 },
        unknown_extents: p.chance(50),
        ..PlayerGroup::default()
    }
}

/// Clients that cut, that scrub, and whose clips are several files.
fn editors(p: &mut Prng, scenario: &mut Scenario, read_kib: u64) {
    if p.chance(500) {
        let cut_ms_min = p.between(200, 4000);
        scenario.player.push(PlayerGroup {
            count: p.between(1, 8),
            megabits: p.log_between(5.0, 400.0),
            frame_ms: [20.0, 40.0, 41.666_666][p.below(3) as usize],
            start_ms: p.below(6000),
            every_ms: [0, 50, 250, 1000][p.below(4) as usize],
            request_kib: if p.chance(300) {
                p.between(64, 1024).min(read_kib)
            } else {
                0
            },
            in_flight: p.between(1, 3) as usize,
            unruled: p.chance(200),
            jitter_us: p.below(3000),
            cut_ms_min,
            cut_ms_max: cut_ms_min + p.below(6000),
            closes_first: p.chance(300),
            clips: p.between(2, 32),
            clip_mb: if p.chance(300) { p.between(20, 400) } else { 0 },
            ..PlayerGroup::default()
        });
    }
    if p.chance(250) {
        scenario.scrub.push(ScrubGroup {
            count: p.between(1, 4),
            start_ms: p.below(6000),
            every_ms: [0, 20, 40, 200][p.below(4) as usize],
            step_frames_max: p.between(1, 200),
            turn_permille: p.below(500),
            elsewhere_permille: p.below(300),
            megabits: p.log_between(5.0, 400.0),
            unruled: p.chance(300),
            request_kib: if p.chance(300) {
                p.between(64, 1024).min(read_kib)
            } else {
                0
            },
            clips: p.between(1, 24),
        });
    }
    if p.chance(200) {
        let cut_ms_min = p.between(500, 4000);
        scenario.op_atom.push(OpAtomGroup {
            count: p.between(1, 4),
            start_ms: p.below(6000),
            every_ms: [0, 250, 1000][p.below(3) as usize],
            // They read a frame in one piece, of 40 ms.
            megabits: p.log_between(20.0, 200.0).min(read_kib as f64 / 5.0),
            layers: 0,
            sounds: p.between(1, 16),
            sound_told: p.chance(600),
            cut_ms_min,
            cut_ms_max: cut_ms_min + p.below(6000),
            clips: p.between(1, 24),
        });
    }
}

/// Clients that write through lanes, players behind them, and drives with a memory.
fn writers(p: &mut Prng, scenario: &mut Scenario) {
    if !p.chance(400) {
        return;
    }
    scenario.server.write_buffer_mib = p.between(16, 512);
    if p.chance(700) {
        scenario.record.push(recorders(p));
    }
    if p.chance(500) {
        scenario.copy_in.push(CopyInGroup {
            count: p.between(1, 4),
            start_ms: p.below(5000),
            every_ms: [0, 250, 1000][p.below(3) as usize],
            request_kib: p.between(4, 8192),
            file_mib: p.between(1, 512),
            announce: p.chance(500),
            one_session: p.chance(300),
            sync_at_end: p.chance(500),
        });
    }
    if p.chance(250) {
        scenario.scatter.push(ScatterGroup {
            count: p.between(1, 4),
            start_ms: p.below(5000),
            file_mib: p.between(4, 128),
            pages_max: p.between(1, 64),
        });
    }
    if p.chance(500) && !scenario.record.is_empty() {
        scenario.player.push(PlayerGroup {
            count: p.between(1, 3),
            behind_ms: p.between(500, 4000),
            jitter_us: p.below(3000),
            die_per_10k: if p.chance(200) { p.below(100) } else { 0 },
            ..PlayerGroup::default()
        });
    }
    for disk in &mut scenario.disk {
        if p.chance(300) {
            disk.memory = MemoryPlan {
                mb: p.between(8, 256),
                no_flush: p.chance(200),
                flush_hangs: false,
            };
        }
    }
}

fn recorders(p: &mut Prng) -> RecordGroup {
    RecordGroup {
        count: p.between(1, 6),
        megabits: p.log_between(5.0, 200.0),
        frame_ms: [20.0, 40.0, 41.666_666, 100.0][p.below(4) as usize],
        preroll_ms: 500,
        start_ms: p.below(6000),
        every_ms: [0, 250, 1000, 3000][p.below(4) as usize],
        seconds: if p.chance(300) { p.between(1, 10) } else { 0 },
        ruled: p.chance(600),
        sync_every: if p.chance(400) { p.between(5, 200) } else { 0 },
        die_per_10k: if p.chance(300) { p.below(100) } else { 0 },
    }
}

fn trouble(p: &mut Prng, scenario: &mut Scenario) {
    if p.chance(500) {
        scenario.writer.push(WriterGroup {
            count: p.between(1, 4),
            write_kib: p.between(1, 4096),
            think_ms: p.between(1, 1000),
            players_files: p.chance(400),
        });
    }
    if p.chance(300) {
        scenario.foreign.push(ForeignGroup {
            count: 1,
            think_ms: p.between(10, 2000),
            delay_ms: p.between(1, 500),
            players_files: p.chance(400),
            silent: false,
        });
    }
}

impl PlayerGroup {
    /// Units: KiB.
    fn frame_kib(&self) -> u64 {
        (self.megabits * self.frame_ms / 8.0 * 1000.0 / 1024.0).ceil() as u64
    }

    /// Shorter requests go too slowly over the wire, whatever the server does: each goes there and
    /// back. Units: KiB.
    fn least_kib(&self, wire: &LatencyPlan) -> u64 {
        let way_us = 2 * (2 * wire.door_us + wire.reorder_us + self.jitter_us);
        let bytes = self.megabits / 8.0 * way_us as f64 / self.in_flight.max(1) as f64;
        (bytes / 1024.0).ceil() as u64
    }

    /// Its longest request, if one of `most` may be sent. Units: KiB.
    fn request_kib(&self, most: u64) -> u64 {
        match self.request_kib {
            0 => most.min(8192),
            told => told.min(most),
        }
    }
}

/// The results to expect: lateness counts only if the premises of promises hold.
fn expect(scenario: &mut Scenario, calm: bool) {
    let many = u64::MAX / 2;
    let read_kib = scenario.server.limits().read_bytes_max >> 10;
    // Reads pinned for long, jumps and readers that guess are in no contract; but the others'
    // promises must hold beside them. Nor does a server that sees reads know that they are pieces
    // of a frame, which is due as a whole with its first byte: for frames of half a second that is
    // much. And a player that cuts to another disk asks for a contract there.
    let is_whole =
        |g: &PlayerGroup| g.frame_ms <= 100.0 || g.frame_kib() <= g.request_kib(read_kib);
    let premises = calm
        && scenario.player.iter().all(|g| {
            let is_blind =
                g.unknown_extents || g.unruled || g.has_cuts() && scenario.disk.len() > 1;
            !is_blind && g.pause_per_10k + g.jump_per_10k == 0 && is_whole(g)
        });
    scenario.expect = Expect {
        late_promised_max: if premises { 0 } else { many },
        shed_max: if premises { 0 } else { many },
        failed_max: if calm { 0 } else { many },
        plain_max: many,
        // Each of twelve readers may have twelve reads of 8 MB before one on a disk at its slowest.
        patience_seconds: if calm { 120 } else { 600 },
        ledger: !scenario.player.iter().any(|g| g.shared || g.behind_ms > 0),
        // Nothing promises the speed of writers; acknowledged bytes are promised.
        written: WrittenExpect {
            late_max: many,
            device_late_bytes_max: many,
            failed_max: if calm { 0 } else { many },
            plain_max: many,
            ..WrittenExpect::default()
        },
        ..Expect::default()
    };
}
