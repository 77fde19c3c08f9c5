// SPDX-License-Identifier: Apache-2.0
//! Streams with a promise, and whether it was kept, by the players' own measure.
//!
//! A stream counts as promised if the ledger says *contract* right after the server took its first
//! read. If nothing is decided then, as for a sequence, and in worlds too large for so many looks,
//! the first look after its first frame counts. From then on every late frame of it is a broken
//! promise, except after a pause or jump of its own, which is counted apart. A contract that is
//! withdrawn while the player plays counts as shed. A contract that comes later does not count
//! here: the player's clock has run since its open.

use crate::client::Kind;
use crate::player::{Player, PlayerCount, Source};
use crate::record_groups::{Recorded, recorded};
use crate::world::World;
use rushes_core::server::{RateSource, Standing, StreamRecord};
use rushes_core::units::*;
use serde::Serialize;

/// The ledger's entries of one client, look by look.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    /// Right after the first read, or at the first look after the first frame.
    pub first: Option<Standing>,
    /// At the last look.
    pub last: Option<Standing>,
    /// When the contract that it had from the first frame on was withdrawn.
    pub shed_at: Option<Instant>,
}

impl Seen {
    /// Whether it had a contract from its first frame on.
    pub fn promised(&self) -> bool {
        self.first == Some(Standing::Contract)
    }
}

/// In worlds of more clients there is no look at the ledger for each first read.
const LOOKED_AT_MAX: usize = 300;

/// Closed streams that the ledger keeps, by its own documentation.
const CLOSED_KEPT: usize = 256;

/// Looks at the ledger from time to time.
#[derive(Default)]
pub struct Watch {
    /// By client.
    pub seen: Vec<Seen>,
    unseen_first: usize,
}

/// The client of a line of the ledger.
pub fn client_of(record: &StreamRecord) -> Option<usize> {
    record.label.client.strip_prefix("client")?.parse().ok()
}

fn rank(standing: Standing) -> u8 {
    match standing {
        Standing::BestEffort => 0,
        Standing::Refused => 1,
        Standing::Contract => 2,
    }
}

impl Watch {
    /// Plays until `end`, and looks at the ledger every `every`, and when a player has its first
    /// frame.
    pub fn run(&mut self, world: &mut World, end: Instant, every: Duration) {
        world.stop_at_first_reads = world.clients.len() <= LOOKED_AT_MAX;
        let short = Duration((every.0 / 10).max(1));
        let mut look_at = world.now + every;
        let mut short_at = world.now + short;
        while world.now < end {
            world.run_until(short_at.min(end));
            if world.stop_at_first_reads && !world.first_reads.is_empty() {
                self.look_at_first_reads(world);
                continue;
            }
            short_at = world.now + short;
            let news = self.news(world);
            if news || world.now >= look_at {
                self.look(world);
                world.checker.audit(world.now, &world.files);
                look_at = world.now + every;
            }
        }
        world.stop_at_first_reads = false;
    }

    fn look_at_first_reads(&mut self, world: &mut World) {
        self.seen.resize(world.clients.len(), Seen::default());
        let records = world.server.streams(world.now);
        for client in world.first_reads.drain(..) {
            let index = client as usize;
            let Kind::Play(player) = &world.clients[index].kind else {
                continue;
            };
            if matches!(player.plan.source, Source::Sequence(_)) {
                continue;
            }
            let mut standing = Standing::BestEffort;
            for record in records.iter().filter(|r| client_of(r) == Some(index)) {
                if rank(record.standing) > rank(standing) {
                    standing = record.standing;
                }
            }
            // Nothing is decided yet, since its pattern is not clear, or no rule has its rate: look
            // again after its first frame.
            if standing != Standing::BestEffort {
                self.seen[index].first = Some(standing);
            }
        }
    }

    /// True when a player's first frame came since the last look.
    fn news(&mut self, world: &World) -> bool {
        self.seen.resize(world.clients.len(), Seen::default());
        while let Some(client) = world.clients.get(self.unseen_first) {
            let done = match &client.kind {
                Kind::Play(_) => self.seen[self.unseen_first].first.is_some() || client.hand.over,
                _ => true,
            };
            if !done {
                break;
            }
            self.unseen_first += 1;
        }
        let later = world.clients.iter().zip(&self.seen).skip(self.unseen_first);
        later.into_iter().any(|(client, seen)| match &client.kind {
            Kind::Play(player) => player.count.frame_count > 0 && seen.first.is_none(),
            _ => false,
        })
    }

    /// Looks at the ledger.
    pub fn look(&mut self, world: &World) {
        self.seen.resize(world.clients.len(), Seen::default());
        let mut now: Vec<Option<Standing>> = vec![None; world.clients.len()];
        for record in world.server.streams(world.now) {
            let Some(entry) = client_of(&record).and_then(|index| now.get_mut(index)) else {
                continue;
            };
            if record.open && entry.is_none_or(|old| rank(old) < rank(record.standing)) {
                *entry = Some(record.standing);
            }
        }
        // A client that has closed one clip and not opened the next has the contract that its seat
        // keeps.
        for seat in world.server.seats(world.now) {
            let index = seat.label.client.strip_prefix("client");
            let index = index.and_then(|index| index.parse::<usize>().ok());
            if let Some(entry) = index.and_then(|index| now.get_mut(index))
                && !seat.kept.is_empty()
            {
                *entry = Some(Standing::Contract);
            }
        }
        for ((client, seen), standing) in world.clients.iter().zip(&mut self.seen).zip(now) {
            let Kind::Play(player) = &client.kind else {
                seen.last = standing.or(seen.last);
                continue;
            };
            let playing = player.count.frame_count > 0 && !client.hand.over;
            if !playing {
                continue;
            }
            if seen.first.is_none() {
                seen.first = Some(standing.unwrap_or(Standing::BestEffort));
            }
            let kept = standing == Some(Standing::Contract);
            if seen.promised() && !kept && seen.shed_at.is_none() {
                seen.shed_at = Some(world.now);
            }
            seen.last = standing;
        }
    }
}

/// A run in numbers.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Name of the scenario.
    pub scenario: String,
    /// Seed of the run.
    pub seed: u64,
    /// Players that asked.
    pub players: u64,
    /// Players promised from their first frame on.
    pub promised: u64,
    /// Promises withdrawn.
    pub shed: u64,
    /// Frames that came.
    pub frames: u64,
    /// Late frames of all.
    pub late: u64,
    /// Those of them in the last pass of timelines that are played again.
    pub late_last_pass: u64,
    /// Late frames of promised players, before any pause or jump of theirs and before their
    /// contract was withdrawn.
    pub late_promised: u64,
    /// Promised players with such frames.
    pub late_promised_streams: u64,
    /// Late frames of promised players after pauses or jumps of theirs.
    pub late_after_jump: u64,
    /// The worst lateness of a promised player. Units: ms.
    pub worst_promised_ms: f64,
    /// The worst of all. Units: ms.
    pub worst_ms: f64,
    /// The slowest first frame of a promised player. Units: ms.
    pub first_frame_ms_max: f64,
    /// Cuts of timelines.
    pub cuts: u64,
    /// Time from a cut to its first frame: the median, 19 of 20, the slowest. Units: ms.
    pub cut_ms_p50: f64,
    /// See there.
    pub cut_ms_p95: f64,
    /// See there.
    pub cut_ms_max: f64,
    /// Frames that gave an error.
    pub failed: u64,
    /// Reads that the server left to clients.
    pub plain: u64,
    /// Bytes a second of all copies. Units: MB/s.
    pub copy_mb_per_second: f64,
    /// Longest time that a copy made no progress. Units: ms.
    pub copy_wait_ms_max: f64,
    /// Requests of copies that failed.
    pub copy_failed: u64,
    /// Single frames of scrubbing, and the time from the request for one until it came, for 19 of
    /// 20. Units: ms.
    pub scrub_frames: u64,
    /// See there.
    pub scrub_ms_p95: f64,
    /// Frames of editors whose clips are several files, late ones, and the longest delay of one.
    /// Units: ms.
    pub op_atom_frames: u64,
    /// See there.
    pub op_atom_late: u64,
    /// See there.
    pub op_atom_worst_ms: f64,
    /// The bytes that disks read for the server, for each hundred bytes that clients got.
    pub read_percent: f64,
    /// Answered reads of ramblers.
    pub ramble_count: u64,
    /// Acknowledged changes.
    pub change_count: u64,
    /// Device requests of the server.
    pub requests: u64,
    /// Their mean. Units: MB.
    pub request_mb_mean: f64,
    /// Part of the time that disks worked for the server, mean.
    pub busy: f64,
    /// Lines of the ledger that disagree with the players' measure.
    pub ledger_wrong: Vec<String>,
    /// Violations that the checker reported.
    pub violations: Vec<String>,
    /// The number of all violations.
    pub violation_count: u64,
    /// Events of the world.
    pub events: u64,
    /// Steps of the server.
    pub steps: u64,
    /// Virtual seconds.
    pub virtual_seconds: f64,
    /// The results of clients that write through lanes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recorded: Option<Recorded>,
    /// Fingerprint.
    pub digest: String,
    /// Expectations that were not met, as sentences. Empty: the run passed.
    pub failures: Vec<String>,
}

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

/// Adds up a run. `seconds`: how long there was work.
pub fn report(world: &World, watch: &Watch, seconds: f64) -> Report {
    let mut report = Report {
        violations: world.checker.told.clone(),
        violation_count: world.checker.violation_count,
        events: world.count.event_count,
        steps: world.count.step_count,
        virtual_seconds: world.now.0 as f64 / 1e9,
        digest: format!("{:016x}", world.digest.0),
        ..Report::default()
    };
    let mut given = 0;
    for (client, seen) in world.clients.iter().zip(&watch.seen) {
        match &client.kind {
            Kind::Play(player) => {
                report.player(player, seen);
                given += player.count.bytes;
            }
            Kind::Copy(copy) => {
                given += copy.bytes;
                report.copy_mb_per_second += copy.bytes as f64 / 1e6 / seconds;
                report.copy_wait_ms_max = report.copy_wait_ms_max.max(ms(copy.longest_wait.0));
                report.copy_failed += copy.failed_count;
            }
            Kind::Ramble(rambler) => {
                report.ramble_count += rambler.data_count;
                given += rambler.bytes;
            }
            Kind::Scrub(scrubber) => {
                report.scrub_frames += scrubber.frame_count;
                report.failed += scrubber.failed_count;
                given += scrubber.bytes;
            }
            Kind::OpAtom(editor) => {
                report.op_atom_frames += editor.frame_count;
                report.op_atom_late += editor.late_count;
                report.op_atom_worst_ms = report.op_atom_worst_ms.max(ms(editor.worst_ns));
                report.failed += editor.failed_count;
                given += editor.bytes;
            }
            Kind::Write(writer) => report.change_count += writer.count,
            Kind::Scatter(scatterer) => given += scatterer.read_bytes,
            Kind::Foreign(_) | Kind::Record(_) => {}
        }
    }
    report.recorded = recorded(world, seconds);
    report.cuts(world);
    let mut bytes = 0;
    for disk in &world.disks {
        report.requests += disk.count.request_count;
        bytes += disk.count.request_bytes;
        report.busy += disk.count.request_ns as f64 / 1e9 / seconds / world.disks.len() as f64;
    }
    report.read_percent = bytes as f64 * 100.0 / given.max(1) as f64;
    report.request_mb_mean = bytes as f64 / 1e6 / report.requests.max(1) as f64;
    ledger(world, watch, &mut report);
    report
}

impl Report {
    fn cuts(&mut self, world: &World) {
        let (mut cuts, mut scrubs): (Vec<u64>, Vec<u64>) = (Vec::new(), Vec::new());
        for client in &world.clients {
            match &client.kind {
                Kind::Play(player) => cuts.extend(&player.count.cut_ns),
                Kind::Scrub(scrubber) => scrubs.extend(&scrubber.frame_ns),
                Kind::OpAtom(editor) => cuts.extend(&editor.cut_ns),
                _ => {}
            }
        }
        cuts.sort_unstable();
        scrubs.sort_unstable();
        let at = |all: &[u64], permille: usize| {
            all.get(all.len() * permille / 1000)
                .copied()
                .map_or(0.0, ms)
        };
        self.cuts = cuts.len() as u64;
        self.cut_ms_p50 = at(&cuts, 500);
        self.cut_ms_p95 = at(&cuts, 950);
        self.cut_ms_max = cuts.last().copied().map_or(0.0, ms);
        self.scrub_ms_p95 = at(&scrubs, 950);
    }

    fn player(&mut self, player: &Player, seen: &Seen) {
        let count = &player.count;
        self.players += 1;
        self.frames += count.frame_count;
        self.late += count.late_count;
        self.late_last_pass += count.late_last_pass_count;
        self.failed += count.failed_count;
        self.plain += count.plain_count;
        self.worst_ms = self.worst_ms.max(ms(count.worst_late_ns));
        if !seen.promised() {
            return;
        }
        self.promised += 1;
        self.late_after_jump += count.late_after_jump_count;
        let first_ms = count.first_frame_ns.map_or(f64::INFINITY, ms);
        self.first_frame_ms_max = self.first_frame_ms_max.max(first_ms);
        if let Some(shed_at) = seen.shed_at {
            // A client that jumps asks again, and may be refused.
            let asked_anew = count.wrapped_at.is_some_and(|wrapped| wrapped <= shed_at);
            self.shed += u64::from(!asked_anew);
            if count.first_late_at.is_none_or(|late| late >= shed_at) {
                return;
            }
        }
        self.late_promised += count.late_count - count.late_after_jump_count;
        if count.late_count > count.late_after_jump_count {
            self.late_promised_streams += 1;
            self.worst_promised_ms = self.worst_promised_ms.max(ms(count.worst_late_ns));
        }
    }
}

/// Compares the ledger with the players' measure.
fn ledger(world: &World, watch: &Watch, report: &mut Report) {
    let records = world.server.streams(world.now);
    let closed_count = records.iter().filter(|record| !record.open).count();
    let mut lines: Vec<Vec<&StreamRecord>> = vec![Vec::new(); world.clients.len()];
    for record in &records {
        if let Some(of_client) = client_of(record).and_then(|index| lines.get_mut(index)) {
            of_client.push(record);
        }
    }
    for (index, (client, seen)) in world.clients.iter().zip(&watch.seen).enumerate() {
        let Kind::Play(player) = &client.kind else {
            continue;
        };
        // Jumps may have split streams, or the bounded ledger may have forgotten them. An editor
        // has one for each clip.
        let cuts = matches!(player.plan.source, Source::Timeline(_));
        let record = match lines[index].as_slice() {
            [record] => StreamRecord::clone(record),
            several if cuts && !several.is_empty() => together(several),
            _ => continue,
        };
        if player.died || player.count.plain_count > 0 {
            continue;
        }
        // A jump begins a new line, and so does the second frame of a sequence without a rule; the
        // ledger keeps a limited number of closed ones.
        let many_lines = player.count.jump_count > 0 || record.sequence || cuts;
        if many_lines && closed_count >= CLOSED_KEPT {
            continue;
        }
        // Frames of a sequence that was not recognised are lines of their own, most of them
        // forgotten.
        if record.sequence != matches!(player.plan.source, Source::Sequence(_)) {
            continue;
        }
        if let Some(told) = disagree(&player.count, &record, seen) {
            let told = format!("client {index}: {told}");
            if report.ledger_wrong.len() < 10 {
                report.ledger_wrong.push(told);
            }
        }
    }
}

/// All lines of one client as one.
fn together(lines: &[&StreamRecord]) -> StreamRecord {
    let mut all = StreamRecord::clone(lines[0]);
    for line in &lines[1..] {
        all.reads.read_count += line.reads.read_count;
        all.reads.due_count += line.reads.due_count;
        all.reads.late_count += line.reads.late_count;
        all.reads.promised_count += line.reads.promised_count;
        all.reads.promised_late_count += line.reads.promised_late_count;
        all.reads.worst_lateness = all.reads.worst_lateness.max(line.reads.worst_lateness);
        all.reads.bytes.0 += line.reads.bytes.0;
        for (sum, count) in all.reads.guilty.iter_mut().zip(line.reads.guilty) {
            *sum += count;
        }
        // If the rate of one line is unknown, that of all is.
        if line
            .rate
            .is_none_or(|(_, source)| source == RateSource::Cadence)
        {
            all.rate = line.rate;
        }
    }
    all
}

fn disagree(count: &PlayerCount, record: &StreamRecord, seen: &Seen) -> Option<String> {
    let (asked, got) = (count.read_count, count.answered_count);
    if record.reads.read_count < got || record.reads.read_count > asked {
        let told = record.reads.read_count;
        return Some(format!(
            "the ledger knows {told} reads, the player {got} of {asked}"
        ));
    }
    if record.reads.bytes.0 != count.bytes && got == asked {
        let told = record.reads.bytes.0;
        return Some(format!(
            "the ledger knows {told} bytes, the player {}",
            count.bytes
        ));
    }
    if record.reads.on_time_count() + record.reads.late_count != record.reads.due_count {
        return Some(format!(
            "{} on time and {} late are not {} due",
            record.reads.on_time_count(),
            record.reads.late_count,
            record.reads.due_count
        ));
    }
    if record.reads.guilty.iter().sum::<u64>() != record.reads.late_count {
        let (late, guilty) = (record.reads.late_count, record.reads.guilty);
        return Some(format!("{late} late, but {guilty:?} guilty"));
    }
    if record.reads.promised_late_count > record.reads.promised_count {
        return Some(format!(
            "{} late of {} promised",
            record.reads.promised_late_count, record.reads.promised_count
        ));
    }
    // A client that jumps has closed lines.
    if count.jump_count > 0 {
        return None;
    }
    // Before the rate is known no read is due; and a copy's reads are always on time.
    let known = matches!(record.rate, Some((_, source)) if source != RateSource::Cadence);
    let steady = seen.promised() && seen.shed_at.is_none();
    if (known || steady) && count.clearly_late_count > 0 && record.reads.late_count == 0 {
        return Some(format!(
            "the player saw {} frames clearly late, the worst by {} ms, the ledger none of {} reads due ({:?})",
            count.clearly_late_count,
            ms(count.worst_late_ns),
            record.reads.due_count,
            record.standing,
        ));
    }
    if record.reads.late_count > 0 && count.nearly_late_count == 0 {
        return Some(format!(
            "the ledger has {} late reads of {}, the worst by {}, the player none",
            record.reads.late_count, record.reads.due_count, record.reads.worst_lateness
        ));
    }
    None
}
