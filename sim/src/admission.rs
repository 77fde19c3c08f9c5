// SPDX-License-Identifier: Apache-2.0
//! Ten thousand questions: which streams are admitted, are any of those late, and how many could
//! have been admitted?
//!
//! Each question is a device, a cache and streams that join one by one, drawn from a seed. The
//! The server answers by its ledger; streams with a contract from their first frame on must never
//! be late in the simulated world. The [`Oracle`] then says how many could have been kept, in two
//! senses: *first come*, which admits each newcomer in its turn if it fits, as a server must; and
//! *any subset*, the largest number of them in any order. No server can know that number, since it
//! may not refuse a large stream in the hope of small ones.

use crate::client::{Kind, Latency};
use crate::disk::{Faults, table5};
use crate::files::contiguous;
use crate::judge::Watch;
use crate::oracle::{Ask, Oracle};
use crate::others::Copy;
use crate::player::{Pattern, Player, PlayerPlan, Source};
use crate::prng::Prng;
use crate::world::World;
use clap::Args;
use rushes_core::server::{
    DeviceModel, Limits, Policy, RateHint, RateSource, Server, ServiceModel,
};
use rushes_core::units::*;
use serde::Serialize;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Kinds of devices in the questions.
pub const CLASSES: [&str; 4] = ["table5", "disk", "array", "flash"];

/// A question.
#[derive(Clone, Debug)]
pub struct Question {
    /// Its seed.
    pub seed: u64,
    /// Index into [`CLASSES`].
    pub class: usize,
    /// The device, in truth and as the server knows it.
    pub device: DeviceModel,
    /// Buffers of 1 MiB.
    pub slot_count: u32,
    /// The streams, in the order in which they join.
    pub asks: Vec<Ask>,
    /// Copies beside them.
    pub copy_count: u64,
    /// Length of the run. Units: s.
    pub seconds: u64,
}

/// The result of a question.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Answer {
    /// Its seed.
    pub seed: u64,
    /// Kind of device.
    pub class: usize,
    /// Streams that asked.
    pub asked: u64,
    /// Streams with a contract from their first frame on.
    pub admitted: u64,
    /// Streams that the oracle keeps, first come first served.
    pub first_come: u64,
    /// Streams that the oracle keeps, the largest number of any.
    pub any_subset: u64,
    /// Rate of the admitted streams. Units: bytes per second.
    pub admitted_rate: u64,
    /// Rate that the oracle keeps, first come first served. Units: bytes per second.
    pub first_come_rate: u64,
    /// Streams that were admitted and late.
    pub late_streams: u64,
    /// The worst of those. Units: ms.
    pub worst_ms: f64,
    /// Contracts withdrawn.
    pub shed: u64,
    /// Violations of the seam.
    pub violations: u64,
    /// The first of them, in sentences.
    pub told: Vec<String>,
    /// Events played.
    pub events: u64,
}

impl Question {
    /// The question that belongs to `seed`.
    pub fn new(seed: u64) -> Question {
        let mut p = Prng::fork(seed, 99);
        let class = [0, 1, 1, 1, 1, 2, 2, 3, 3, 3][p.below(10) as usize];
        let device = device(&mut p, class);
        let slot_count = [512, 1024, 1024, 1024, 2048, 4096][p.below(6) as usize];
        let count = p.between(1, 40);
        let same = p.chance(500);
        let together = p.chance(100);
        let spread = p.chance(500);
        let mut rate = p.log_between(5.0, 500.0);
        let mut at = 0;
        let mut asks = Vec::new();
        for index in 0..count {
            if !same {
                rate = p.log_between(5.0, 500.0);
            }
            let rate = BytesPerSecond::from_bits((rate * 1e6) as u64);
            // Frames of 40, 80 or 160 ms, at most 4 MiB: a player's reads, coarse if all frames are
            // alike.
            let mut period = 40u64 << p.below(3);
            while rate.bytes_in(Duration::from_ms(period)).0 > 4 << 20 {
                period /= 2;
            }
            let place = if spread {
                index * device.size.0 / count
            } else {
                p.below(device.size.0)
            };
            asks.push(Ask {
                start: Instant::ZERO + Duration::from_ms(at),
                rate,
                position: place & !4095,
                period: Duration::from_ms(period),
                preroll: Duration::from_ms(500),
            });
            if !together {
                at += p.between(20, 900);
            }
        }
        // One run in twenty is long, to find slow drifts.
        let after = if p.chance(50) { 90 } else { 12 };
        let seconds = at / 1000 + 1 + after;
        let copy_count = if p.chance(250) { p.between(1, 2) } else { 0 };
        Question {
            seed,
            class,
            device,
            slot_count,
            asks,
            copy_count,
            seconds,
        }
    }

    /// The world of this question.
    pub fn world(&self) -> World {
        let limits = Limits {
            slot_count: self.slot_count,
            ..Limits::default()
        };
        let server = Server::new(limits.clone(), Policy::default());
        let latency = Latency {
            submit: Duration::from_us(50),
            complete: Duration::from_us(50),
            ..Latency::default()
        };
        let mut world = World::new(self.seed, Box::new(server), limits, latency);
        let device = world.add_disk(self.device, self.device, Faults::default());
        let end = Instant::ZERO + Duration::from_s(self.seconds);
        for (index, ask) in self.asks.iter().enumerate() {
            let frame_bytes = ask.rate.bytes_in(ask.period).0.max(1);
            let frame_count = end.since(ask.start).0 / ask.period.0;
            let hint = RateHint::Rate(ask.rate, RateSource::Rule);
            let size = frame_bytes * frame_count;
            let name = format!("p{index}.mov");
            let file = contiguous("play", &name, device, ask.position, size, Some(hint));
            let plan = PlayerPlan {
                pass_frames: u64::MAX,
                source: Source::File(world.files.add(file)),
                frame_bytes,
                period: ask.period,
                preroll: ask.preroll,
                frame_count,
                request_bytes: frame_bytes,
                in_flight: 1,
                closes_first: false,
                pattern: Pattern::Forward,
                jitter: Duration::ZERO,
                pause_per_10k: 0,
                jump_per_10k: 0,
                die_per_10k: 0,
            };
            world.add_client(Player::kind(plan), ask.start, end);
        }
        for index in 0..self.copy_count {
            let middle = (2 * index + 1) * self.device.size.0 / (2 * self.copy_count);
            let at = middle & !4095;
            let file = contiguous("copy", &format!("c{index}"), device, at, 4 << 30, None);
            let file = world.files.add(file);
            let begin = Instant::ZERO + Duration::from_s(self.seconds / 4);
            world.add_client(Copy::kind(vec![file], 8 << 20, 2), begin, end);
        }
        world
    }

    /// Plays the question and asks the oracle.
    pub fn answer(&self) -> Answer {
        let mut world = self.world();
        let mut watch = Watch::default();
        let end = Instant::ZERO + Duration::from_s(self.seconds);
        watch.run(&mut world, end, Duration::from_ms(500));
        let now = world.now;
        let mut answer = Answer {
            seed: self.seed,
            class: self.class,
            asked: self.asks.len() as u64,
            violations: world.checker.violation_count,
            told: world.checker.told.clone(),
            events: world.count.event_count,
            ..Answer::default()
        };
        for (client, seen) in world.clients.iter_mut().zip(&watch.seen) {
            client.close_books(now);
            let Kind::Play(player) = &client.kind else {
                continue;
            };
            if !seen.promised() {
                continue;
            }
            answer.admitted += 1;
            answer.admitted_rate += self.asks[client.hand.index as usize].rate.0;
            answer.shed += u64::from(seen.shed_at.is_some());
            if player.count.late_count > 0 {
                answer.late_streams += 1;
                answer.worst_ms = answer.worst_ms.max(player.count.worst_late_ns as f64 / 1e6);
            }
        }
        let cache = u64::from(self.slot_count) << 20;
        let mut oracle = Oracle::new(self.device, cache, end);
        let kept = oracle.first_come(&self.asks);
        let taken = self.asks.iter().zip(&kept).filter(|(_, kept)| **kept);
        answer.first_come_rate = taken.map(|(ask, _)| ask.rate.0).sum();
        answer.first_come = kept.iter().filter(|kept| **kept).count() as u64;
        answer.any_subset = oracle.largest(&self.asks, answer.first_come as usize) as u64;
        answer
    }
}

fn device(p: &mut Prng, class: usize) -> DeviceModel {
    let (fixed_us, span_us, rate_mb, size_gb) = match class {
        0 => return table5(),
        // One drive of 7200 or 5400 turns, from its outer to its inner tracks.
        1 => (
            p.between(3000, 9000),
            p.between(4000, 18_000),
            p.between(80, 280),
            p.between(500, 20_000),
        ),
        2 => (
            p.between(3000, 9000),
            p.between(4000, 18_000),
            p.between(150, 900),
            p.between(2000, 100_000),
        ),
        _ => (
            p.between(50, 250),
            p.below(30),
            p.between(300, 3000),
            p.between(200, 8000),
        ),
    };
    let model = ServiceModel {
        fixed: Duration::from_us(fixed_us),
        span: Duration::from_us(span_us),
        rate: BytesPerSecond(rate_mb * 1_000_000),
    };
    DeviceModel {
        read: model,
        write: model,
        size: ByteCount(size_gb * 1_000_000_000),
    }
}

/// Asks many questions.
#[derive(Clone, Debug, Args)]
pub struct Admission {
    /// Number of questions.
    #[arg(long, default_value_t = 1000)]
    pub count: u64,
    /// The first question's seed.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// One JSON object.
    #[arg(long)]
    pub json: bool,
    /// Every question with a bad answer: late streams, or much fewer admitted than possible.
    #[arg(long)]
    pub verbose: bool,
}

/// Sums over answers.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Sum {
    /// The name of the sum.
    pub name: String,
    /// Questions.
    pub questions: u64,
    /// Streams that asked.
    pub asked: u64,
    /// Admitted.
    pub admitted: u64,
    /// Oracle, first come.
    pub first_come: u64,
    /// Oracle, any subset.
    pub any_subset: u64,
    /// Admitted streams, as a part of those that the oracle keeps, first come.
    pub ratio_first_come: f64,
    /// The same in bytes a second.
    pub ratio_first_come_rate: f64,
    /// Admitted streams, as a part of those that the oracle keeps, any subset.
    pub ratio_any_subset: f64,
    /// Streams that were admitted and late.
    pub late_streams: u64,
    /// Questions with a late stream.
    pub late_questions: u64,
    /// The worst lateness. Units: ms.
    pub worst_ms: f64,
    /// Contracts withdrawn.
    pub shed: u64,
    /// Violations of the seam.
    pub violations: u64,
    /// Events played.
    pub events: u64,
}

impl Sum {
    fn of<'a>(name: &str, answers: impl Iterator<Item = &'a Answer>) -> Sum {
        let mut sum = Sum {
            name: name.to_owned(),
            ..Sum::default()
        };
        let (mut rate, mut first_come_rate) = (0, 0);
        for answer in answers {
            sum.questions += 1;
            sum.asked += answer.asked;
            sum.admitted += answer.admitted;
            sum.first_come += answer.first_come;
            sum.any_subset += answer.any_subset;
            rate += answer.admitted_rate;
            first_come_rate += answer.first_come_rate;
            sum.late_streams += answer.late_streams;
            sum.late_questions += u64::from(answer.late_streams > 0);
            sum.worst_ms = sum.worst_ms.max(answer.worst_ms);
            sum.shed += answer.shed;
            sum.violations += answer.violations;
            sum.events += answer.events;
        }
        let ratio = |of: u64, all: u64| of as f64 / all.max(1) as f64;
        sum.ratio_first_come = ratio(sum.admitted, sum.first_come);
        sum.ratio_any_subset = ratio(sum.admitted, sum.any_subset);
        sum.ratio_first_come_rate = ratio(rate, first_come_rate);
        sum
    }
}

/// The results of all.
#[derive(Clone, Debug, Serialize)]
pub struct Result {
    /// All together.
    pub all: Sum,
    /// By kind of device, and by number of streams that asked.
    pub parts: Vec<Sum>,
    /// Duration of the run. Units: s.
    pub seconds: f64,
    /// Seeds of questions with a late stream, or with a violation; the first ones.
    pub bad_seeds: Vec<u64>,
}

impl Admission {
    /// Asks all questions on all cores.
    pub fn ask(&self) -> (Result, Vec<Answer>) {
        let began = std::time::Instant::now();
        let next = AtomicU64::new(0);
        let answers = Mutex::new(Vec::new());
        let work = || {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= self.count {
                    return;
                }
                let answer = Question::new(self.seed + index).answer();
                if let Ok(mut answers) = answers.lock() {
                    answers.push(answer);
                }
            }
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            for _ in 0..cores {
                scope.spawn(work);
            }
        });
        let mut answers = answers.into_inner().unwrap_or_default();
        answers.sort_by_key(|answer| answer.seed);
        let mut parts = Vec::new();
        for (class, name) in CLASSES.iter().enumerate() {
            parts.push(Sum::of(name, answers.iter().filter(|a| a.class == class)));
        }
        for (name, low, high) in [
            ("1 to 6 ask", 1, 6),
            ("7 to 15 ask", 7, 15),
            ("16 to 40 ask", 16, 40),
        ] {
            let part = answers.iter().filter(|a| (low..=high).contains(&a.asked));
            parts.push(Sum::of(name, part));
        }
        let scarce = answers.iter().filter(|a| a.any_subset < a.asked);
        parts.push(Sum::of("not all fit", scarce));
        let bad = answers.iter().filter(|a| a.late_streams + a.violations > 0);
        let result = Result {
            all: Sum::of("all", answers.iter()),
            parts,
            seconds: began.elapsed().as_secs_f64(),
            bad_seeds: bad.map(|a| a.seed).take(50).collect(),
        };
        (result, answers)
    }

    /// Asks and prints. True: no stream was late, no violation, and at least nine tenths admitted.
    pub fn print(&self) -> bool {
        let (result, answers) = self.ask();
        let all = &result.all;
        let good = all.late_streams == 0 && all.violations == 0 && all.ratio_first_come >= 0.9;
        if self.json {
            println!("{}", serde_json::to_string(&result).unwrap_or_default());
            return good;
        }
        println!(
            "{:14} {:>9} {:>7} {:>8} {:>10} {:>7} {:>8} {:>10} {:>7} {:>5} {:>8} {:>5} {:>5}",
            "",
            "questions",
            "asked",
            "admitted",
            "first come",
            "ratio",
            "by rate",
            "any subset",
            "ratio",
            "late",
            "worst ms",
            "shed",
            "viol."
        );
        for sum in result.parts.iter().chain([all]) {
            println!(
                "{:14} {:>9} {:>7} {:>8} {:>10} {:>6.1}% {:>7.1}% {:>10} {:>6.1}% {:>5} {:>8.1} {:>5} {:>5}",
                sum.name,
                sum.questions,
                sum.asked,
                sum.admitted,
                sum.first_come,
                sum.ratio_first_come * 100.0,
                sum.ratio_first_come_rate * 100.0,
                sum.any_subset,
                sum.ratio_any_subset * 100.0,
                sum.late_streams,
                sum.worst_ms,
                sum.shed,
                sum.violations
            );
        }
        println!(
            "{} events in {:.1} s; seeds with a late stream or a violation: {:?}",
            all.events, result.seconds, result.bad_seeds
        );
        if self.verbose {
            for a in &answers {
                if a.late_streams + a.violations > 0 || a.admitted * 10 < a.first_come * 8 {
                    let question = Question::new(a.seed);
                    println!("{a:?}");
                    println!(
                        "    {:?} {} slots, {} copies, {} s",
                        question.device.read,
                        question.slot_count,
                        question.copy_count,
                        question.seconds
                    );
                    let list: Vec<String> = question
                        .asks
                        .iter()
                        .map(|ask| {
                            format!(
                                "{}@{:.2}",
                                ask.rate.0 * 8 / 1_000_000,
                                ask.start.0 as f64 / 1e9
                            )
                        })
                        .collect();
                    println!("    Mb/s@s: {}", list.join(" "));
                }
            }
        }
        good
    }
}
