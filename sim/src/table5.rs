// SPDX-License-Identifier: Apache-2.0
//! The lab's figures played in the simulator: a tuning aid.
//!
//! The same players, copies and disk as `rushes lab play --disk table5`, without Samba and without
//! waiting: 100 Mb/s in frames of 500 kB every 40 ms, files spread evenly over 40 GB, 1 GiB of
//! cache.

use crate::client::{Kind, Latency};
use crate::disk::{self, Faults};
use crate::files::contiguous;
use crate::machine::{Machine, Mistake, Naive};
use crate::others::Copy;
use crate::player::{Pattern, Player, PlayerPlan, Source};
use crate::world::World;
use clap::{Args, ValueEnum};
use rushes_core::server::{Limits, Policy, RateHint, RateSource, Server, Standing};
use rushes_core::units::*;
use serde::Serialize;

/// When players start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Start {
    /// At one instant.
    Together,
    /// 250 ms apart.
    Staggered,
}

/// The run to play.
#[derive(Clone, Debug, Args)]
pub struct Table5 {
    /// Players.
    #[arg(long, default_value_t = 12)]
    pub streams: u64,
    /// Copies beside them, from the start.
    #[arg(long, default_value_t = 0)]
    pub copies: u64,
    /// When players start.
    #[arg(long, value_enum, default_value_t = Start::Staggered)]
    pub start: Start,
    /// How late a first frame may be. Units: ms.
    #[arg(long, default_value_t = 500)]
    pub preroll: u64,
    /// How long each player plays.
    #[arg(long, default_value_t = 60)]
    pub seconds: u64,
    /// Rate of each stream. Units: Mb/s.
    #[arg(long, default_value_t = 100)]
    pub bitrate: u64,
    /// Small reads of others a second (a storm of metadata).
    #[arg(long, default_value_t = 0)]
    pub storm: u64,
    /// Small reads that opening a file takes: metadata that no cache holds.
    #[arg(long, default_value_t = 0)]
    pub open_reads: u32,
    /// One file a frame, 24 a second.
    #[arg(long)]
    pub sequence: bool,
    /// Cache. Units: MiB.
    #[arg(long, default_value_t = 1024)]
    pub cache: u32,
    /// Longest single device request. Units: KiB.
    #[arg(long, default_value_t = 4096)]
    pub chunk: u64,
    /// The copies' files match the rule as well.
    #[arg(long)]
    pub copies_match_rule: bool,
    /// Without the analyser.
    #[arg(long)]
    pub no_analyser: bool,
    /// A server without a plan instead, to compare with.
    #[arg(long)]
    pub naive: bool,
    /// Chance.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// One JSON object.
    #[arg(long)]
    pub json: bool,
}

/// The result.
#[derive(Clone, Debug, Serialize)]
pub struct Result5 {
    /// Asked.
    pub streams: u64,
    /// Under contract, by the ledger.
    pub streams_admitted: u64,
    /// Frames of all players.
    pub frames: u64,
    /// Late frames of all players.
    pub late_frames: u64,
    /// Late frames of players under contract.
    pub late_frames_admitted: u64,
    /// Players with a late frame.
    pub late_streams: u64,
    /// The worst lateness.
    pub worst_lateness_ms: f64,
    /// The slowest first frame, from the open on.
    pub first_frame_ms_max: f64,
    /// The shortest time between a frame and its due instant; 0: some were late.
    pub slack_ms_min: f64,
    /// Bytes copied while players played.
    pub copy_bytes: u64,
    /// A second.
    pub copy_mb_per_second: f64,
    /// The server's requests.
    pub requests: u64,
    /// Their mean.
    pub request_mb_mean: f64,
    /// Part of the time that the disk was busy for the server.
    pub busy: f64,
    /// Part spent positioning.
    pub positioning: f64,
    /// Events of the world.
    pub events: u64,
    /// How.
    pub start: Start,
    /// Least slack by second: negative is late. Units: ms.
    pub slack_ms_by_second: Vec<Option<f64>>,
}

impl Table5 {
    /// The world before the first event, and its end.
    fn build(&self) -> (World, Instant) {
        let limits = Limits {
            slot_count: self.cache,
            chunk_bytes_max: self.chunk << 10,
            ..Limits::default()
        };
        let policy = Policy {
            preroll: Duration::from_ms(self.preroll),
            analyser: !self.no_analyser,
            ..Policy::default()
        };
        let server: Box<dyn Machine> = if self.naive {
            Box::new(Naive::new(limits.clone(), Mistake::None))
        } else {
            Box::new(Server::new(limits.clone(), policy))
        };
        let latency = Latency {
            open_reads: self.open_reads,
            ..Latency::default()
        };
        let mut world = World::new(self.seed, server, limits, latency);
        let model = disk::table5();
        let faults = Faults {
            storm_per_second: self.storm,
            ..Faults::default()
        };
        let device = world.add_disk(model, model, faults);
        let rate = BytesPerSecond::from_bits(self.bitrate * 1_000_000);
        let gap = model.size.0 / (self.streams + self.copies).max(1);
        let end = Instant::ZERO + Duration::from_s(self.seconds + 30);
        for index in 0..self.streams {
            let kind = self.player(&mut world, device, index, index * gap, rate);
            let begin = match self.start {
                Start::Together => Instant::ZERO,
                Start::Staggered => Instant::ZERO + Duration::from_ms(250 * index),
            };
            world.add_client(kind, begin, end);
        }
        for index in 0..self.copies {
            let hint = self
                .copies_match_rule
                .then_some(RateHint::Rate(rate, RateSource::Rule));
            let at = (self.streams + index) * gap;
            let size = (gap - 4096).min(8 << 30);
            let file = contiguous("copies", &format!("c{index}.mov"), device, at, size, hint);
            let file = world.files.add(file);
            let kind = Copy::kind(vec![file], 8 << 20, 2);
            let stop = Instant::ZERO + Duration::from_s(self.seconds);
            world.add_client(kind, Instant::ZERO, stop);
        }
        (world, end)
    }

    fn player(
        &self,
        world: &mut World,
        device: DeviceId,
        index: u64,
        at: u64,
        rate: BytesPerSecond,
    ) -> Kind {
        let period = if self.sequence {
            Duration(NS_PER_S / 24)
        } else {
            Duration::from_ms(40)
        };
        let frame_bytes = rate.bytes_in(period).0;
        let frame_count = NS_PER_S * self.seconds / period.0;
        let source = if self.sequence {
            let hint = RateHint::FramesPerKilosecond(24_000, RateSource::Rule);
            let list = (0..frame_count)
                .map(|k| {
                    let place = at + k * frame_bytes.next_multiple_of(4096);
                    let name = format!("shot.{:05}.dpx", k + 1);
                    world.files.add(contiguous(
                        &format!("s{index}"),
                        &name,
                        device,
                        place,
                        frame_bytes,
                        Some(hint),
                    ))
                })
                .collect();
            Source::Sequence(list)
        } else {
            let hint = RateHint::Rate(rate, RateSource::Rule);
            let size = frame_bytes * frame_count;
            let name = format!("p{index}.mov");
            let file = contiguous("play", &name, device, at, size, Some(hint));
            Source::File(world.files.add(file))
        };
        Player::kind(PlayerPlan {
            pass_frames: u64::MAX,
            source,
            frame_bytes,
            period,
            preroll: Duration::from_ms(self.preroll),
            frame_count,
            request_bytes: frame_bytes.min(8 << 20),
            in_flight: 1,
            closes_first: false,
            pattern: Pattern::Forward,
            jitter: Duration::from_us(200),
            pause_per_10k: 0,
            jump_per_10k: 0,
            die_per_10k: 0,
        })
    }

    /// Plays it.
    pub fn run(&self) -> (Result5, World) {
        let (mut world, end) = self.build();
        let playing = Instant::ZERO + Duration::from_s(self.seconds);
        world.run_until(playing);
        let disk = world.disks[0].count;
        world.run_until(end);
        let now = world.now;
        for client in &mut world.clients {
            client.close_books(now);
        }
        let result = self.result(&world, disk);
        (result, world)
    }

    fn result(&self, world: &World, disk: disk::DiskCount) -> Result5 {
        let records = world.server.streams(world.now);
        let mut result = Result5 {
            streams: self.streams,
            streams_admitted: 0,
            frames: 0,
            late_frames: 0,
            late_frames_admitted: 0,
            late_streams: 0,
            worst_lateness_ms: 0.0,
            first_frame_ms_max: 0.0,
            slack_ms_min: f64::MAX,
            copy_bytes: 0,
            copy_mb_per_second: 0.0,
            requests: disk.request_count,
            request_mb_mean: disk.request_bytes as f64 / 1e6 / disk.request_count.max(1) as f64,
            busy: disk.request_ns as f64 / 1e9 / self.seconds as f64,
            positioning: disk.positioning_ns as f64 / 1e9 / self.seconds as f64,
            events: world.count.event_count,
            start: self.start,
            slack_ms_by_second: world
                .slack
                .seconds
                .iter()
                .map(|s| (s.0 < i64::MAX).then_some(s.0 as f64 / 1e6))
                .collect(),
        };
        for client in &world.clients {
            match &client.kind {
                Kind::Play(player) => {
                    let count = &player.count;
                    let label = format!("client{}", client.hand.index);
                    let admitted = records
                        .iter()
                        .any(|r| r.label.client == label && r.standing == Standing::Contract);
                    let late = count.late_count;
                    result.streams_admitted += u64::from(admitted);
                    result.frames += count.frame_count;
                    result.late_frames += late;
                    result.late_frames_admitted += if admitted { late } else { 0 };
                    result.late_streams += u64::from(late > 0);
                    let ms = |ns: u64| ns as f64 / 1e6;
                    result.worst_lateness_ms =
                        result.worst_lateness_ms.max(ms(count.worst_late_ns));
                    result.first_frame_ms_max = result
                        .first_frame_ms_max
                        .max(count.first_frame_ns.map_or(f64::INFINITY, ms));
                    if count.frame_count > 0 {
                        result.slack_ms_min = result.slack_ms_min.min(ms(count.slack_ns_min));
                    }
                }
                Kind::Copy(copy) => result.copy_bytes += copy.bytes,
                Kind::Ramble(_)
                | Kind::Scrub(_)
                | Kind::OpAtom(_)
                | Kind::Write(_)
                | Kind::Foreign(_)
                | Kind::Record(_)
                | Kind::Scatter(_) => {}
            }
        }
        if result.frames == 0 {
            result.slack_ms_min = 0.0;
        }
        result.copy_mb_per_second = result.copy_bytes as f64 / 1e6 / self.seconds as f64;
        result
    }

    /// Plays it and prints the results.
    pub fn print(&self) {
        let began = std::time::Instant::now();
        let (result, world) = self.run();
        if self.json {
            println!("{}", serde_json::to_string(&result).unwrap_or_default());
            return;
        }
        println!(
            "{} streams of {} Mb/s, {} copies, {:?}, preroll {} ms, {} s",
            self.streams, self.bitrate, self.copies, self.start, self.preroll, self.seconds
        );
        println!(
            "  late {} of {} frames ({} of admitted), {} streams late, worst {:.1} ms, first frame max {:.1} ms, least slack {:.1} ms",
            result.late_frames,
            result.frames,
            result.late_frames_admitted,
            result.late_streams,
            result.worst_lateness_ms,
            result.first_frame_ms_max,
            result.slack_ms_min
        );
        println!(
            "  copies {:.1} MB/s ({} MB); disk busy {:.1} % (positioning {:.1} %), {} requests of {:.2} MB",
            result.copy_mb_per_second,
            result.copy_bytes / 1_000_000,
            result.busy * 100.0,
            result.positioning * 100.0,
            result.requests,
            result.request_mb_mean
        );
        print!("  least slack by second (ms):");
        for (second, slack) in result.slack_ms_by_second.iter().enumerate() {
            if second % 15 == 0 {
                print!("\n   {second:4}");
            }
            match slack {
                Some(ms) => print!(" {ms:6.0}"),
                None => print!("      -"),
            }
        }
        println!();
        println!(
            "  client  frames  late  worst ms  slack ms  first ms | ledger: standing  due  late  worst ms  hits  guilty"
        );
        let records = world.server.streams(world.now);
        for client in &world.clients {
            let label = format!("client{}", client.hand.index);
            let record = records.iter().find(|r| r.label.client == label);
            match &client.kind {
                Kind::Play(p) => print!(
                    "  {:6}  {:6}  {:4}  {:8.1}  {:8.1}  {:8.1} |",
                    client.hand.index,
                    p.count.frame_count,
                    p.count.late_count,
                    p.count.worst_late_ns as f64 / 1e6,
                    if p.count.frame_count > 0 {
                        p.count.slack_ns_min as f64 / 1e6
                    } else {
                        0.0
                    },
                    p.count.first_frame_ns.map_or(-1.0, |ns| ns as f64 / 1e6)
                ),
                Kind::Copy(c) => print!(
                    "  {:6}  copied {} MB, {} failed, longest wait {:.0} ms |",
                    client.hand.index,
                    c.bytes / 1_000_000,
                    c.failed_count,
                    c.longest_wait.0 as f64 / 1e6
                ),
                Kind::Ramble(_)
                | Kind::Scrub(_)
                | Kind::OpAtom(_)
                | Kind::Write(_)
                | Kind::Foreign(_)
                | Kind::Record(_)
                | Kind::Scatter(_) => {}
            }
            match record {
                Some(r) => println!(
                    " {:?}  {}  {}  {:.1}  {}  {:?}",
                    r.standing,
                    r.reads.due_count,
                    r.reads.late_count,
                    r.reads.worst_lateness.0 as f64 / 1e6,
                    r.reads.hit_count,
                    r.reads.guilty
                ),
                None => println!(" not in the ledger"),
            }
        }
        for device in world.server.devices() {
            println!(
                "  device: {} contracts, promised {} MB/s, requests {:?}, bytes {:?}",
                device.contract_count,
                device.promised.0 / 1_000_000,
                device.request_count,
                device.bytes.map(|b| b.0 / 1_000_000)
            );
        }
        for told in &world.checker.told {
            println!("  VIOLATION {told}");
        }
        println!(
            "  {:?}; {} events, {} server steps in {:.2} s",
            world.server.cache(),
            world.count.event_count,
            world.count.step_count,
            began.elapsed().as_secs_f64()
        );
    }
}
