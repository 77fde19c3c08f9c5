// SPDX-License-Identifier: Apache-2.0
//! One run: players, copiers and storms against one server over a cold stage, and its report.

use crate::clients::client::{Client, Crowd};
use crate::clients::copies::{Copies, Reel, Tally};
use crate::clients::player::{self, Playback, now_ns, sleep_until_ns};
use crate::clients::storm;
use crate::clients::writer;
use crate::experiments::fill::{self, Fill};
use crate::experiments::record::{Performed, Record};
use crate::experiments::tidy::Tidy;
use crate::reports::head::Head;
use crate::reports::report::{self, Played, Report, StreamRow, Timeline};
use crate::servers::server::{self, Kind, Server, Way};
use crate::stage::room::{Room, pause};
use crate::stage::{Plan, Stage};
use anyhow::{Context, Result, ensure};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Files of each copier; each is larger than the cache, so the first is cold again after the
/// second.
pub const REELS_PER_COPIER: u64 = 2;
/// How much larger than the cache a copier's file is. Units: bytes.
pub const REEL_BYTES_OVER_CACHE: u64 = 128 << 20;
/// Reads that may come before the daemon can recognise a player.
const LOOKS: u64 = 2;
/// Copiers run for so long before the first player starts, so that no player meets a quiet server.
pub const COPIES_LEAD: Duration = Duration::from_millis(1500);
/// A pool tidies itself for so long before the first player starts, so that players meet disks at
/// work.
const TIDY_LEAD: Duration = Duration::from_secs(3);
/// Storms run for so long before the first player starts, so that the server can know how much of
/// the disk they take.
const STORM_LEAD: Duration = Duration::from_secs(10);
const STATUS_EVERY: Duration = Duration::from_millis(1000);

/// When players start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Start {
    /// One after the other.
    Staggered,
    /// All in one instant.
    Together,
}

/// A run.
#[derive(Clone, Debug)]
pub struct Play {
    /// The server.
    pub server: server::Spec,
    /// Players.
    pub stream_count: u64,
    /// Units: bits a second.
    pub bitrate: u64,
    /// Frames in 1000 s.
    pub frames_per_kilosecond: u64,
    /// How long each plays.
    pub seconds: f64,
    /// Time between open and the first deadline.
    pub preroll: Duration,
    /// When players start.
    pub start: Start,
    /// Time between two starts.
    pub stagger: Duration,
    /// Each frame is a file.
    pub sequence: bool,
    /// Metadata of the footage is as cold as the footage.
    pub cold_metadata: bool,
    /// Copiers.
    pub copy_count: u64,
    /// Storm clients.
    pub storm_count: u64,
    /// Look-ups a second of each.
    pub storm_rate: f64,
    /// Time between two listings of each; 0: none. Units: s.
    pub storm_list_every_s: f64,
    /// The lab lists the folder once before the run.
    pub storm_warm: bool,
    /// Entries of the listed folder.
    pub entry_count: u64,
    /// How long a collapsed run goes on.
    pub grace: Duration,
    /// Keep the lateness of every frame in the report.
    pub timeline: bool,
    /// Seed of the footage.
    pub seed: u64,
    /// Real footage: the hashes of each stream's frames.
    pub real: Option<Arc<Vec<Vec<u64>>>>,
    /// Recorders beside the players.
    pub record: Option<Record>,
    /// Clients that fill the pool meanwhile.
    pub fill: Option<Fill>,
    /// Files that the pool tidies meanwhile.
    pub tidy: Option<Tidy>,
}

/// The results of a run, before the lab reads the written files.
struct Performance {
    report: Report,
    recorded: Option<Performed>,
    filled: Vec<fill::Done>,
    /// When fillers began. Units: ns, CLOCK_MONOTONIC.
    fill_ns: u64,
    /// The pool's status, if it tidied itself.
    tidied: Option<Value>,
}

impl Play {
    /// Frames of each player.
    pub fn frame_count(&self) -> u64 {
        (self.seconds * self.frames_per_kilosecond as f64 / 1000.0).round() as u64
    }

    /// The files that the stage must at least hold.
    pub fn plan(&self) -> Plan {
        Plan {
            seed: self.seed,
            stream_count: self.stream_count,
            bitrate: self.bitrate,
            frames_per_kilosecond: self.frames_per_kilosecond,
            frame_count: self.frame_count(),
            sequence: self.sequence,
            copy_count: self.copy_count * REELS_PER_COPIER,
            copy_bytes: self.server.data_bytes() + REEL_BYTES_OVER_CACHE,
            entry_count: if self.storm_count > 0 {
                self.entry_count
            } else {
                0
            },
        }
    }

    /// Play it. The stage must cover [`Play::plan`].
    ///
    /// Errors   the setup failed; bad results of the server are not errors but figures
    pub fn run(&self, room: &Room, stage: &mut Stage, quiet: bool) -> Result<Report> {
        ensure!(
            stage.plan().covers(&self.plan()),
            "the stage does not hold what this run needs"
        );
        ensure!(
            self.copy_count == 0 || matches!(self.server.way, Way::Smb | Way::Nfs),
            "copies go over SMB or NFS; leave out --copies, or use --door smb or nfs"
        );
        ensure!(
            self.storm_count == 0 || self.server.way != Way::Nfs,
            "over NFS the lab does not look names up; leave out --storm or use --door smb"
        );
        stage.timing(false)?;
        if let Some(tidy) = &self.tidy {
            tidy.prepare(stage)?;
        }
        stage.cool()?;
        if !self.cold_metadata {
            stage.look_through()?;
        }
        if let Some(record) = &self.record {
            record.prepare(stage, &self.server)?;
        }
        if let Some(fill) = &self.fill {
            fill.prepare(stage)?;
        }
        let server = Server::start(room, "server", stage, &self.server)?;
        let performance = self.perform(room, stage, &server, quiet);
        let performance = server.stop_after(stage, self.server.kind, performance)?;
        let mut report = performance.report;
        if let Some(fill) = &self.fill {
            let filled = fill.judge(stage, &performance.filled, performance.fill_ns)?;
            report.filling = Some(Box::new(filled));
        }
        if let (Some(tidy), Some(status)) = (&self.tidy, performance.tidied) {
            stage.cool()?;
            report.tidying = Some(Box::new(tidy.judge(stage, status)?));
        }
        if let (Some(record), Some(mut recorded)) = (&self.record, performance.recorded) {
            recorded.share(&report);
            let recording = record.judge(stage, &self.server, recorded, quiet)?;
            report.recording = Some(Box::new(recording));
        }
        Ok(report)
    }

    fn perform(
        &self,
        room: &Room,
        stage: &Stage,
        server: &Server,
        quiet: bool,
    ) -> Result<Performance> {
        let chosen = stage.chosen_streams(self.stream_count);
        let paths: Vec<String> = chosen
            .iter()
            .map(|stream| stage.plan().stream_path(*stream))
            .collect();
        let served: BTreeMap<u64, Vec<String>> = chosen
            .iter()
            .copied()
            .zip(stage.served_names(&paths)?)
            .collect();
        let mut players = self.start_players(stage, server, &chosen)?;
        let mut writers = match &self.record {
            Some(record) => record.start_writers(server)?,
            None => Vec::new(),
        };
        let mut fillers = match &self.fill {
            Some(fill) => fill.start(server)?,
            None => Vec::new(),
        };
        let mut storms = self.start_storms(server)?;
        if self.storm_warm && self.storm_count > 0 {
            crate::clients::door::Door::connect(server.address())?.list("archive")?;
        }
        stage.timing(true)?;
        stage.reset_statistics()?;
        let copies = match self.copy_count {
            0 => None,
            count => Some(Copies::start(room, server.address(), reels(stage, count))?),
        };
        if let Some(tidy) = &self.tidy {
            tidy.begin(stage)?;
        }
        let storm_t0 = now_ns() + Duration::from_millis(300).as_nanos() as u64;
        let t0 = now_ns()
            + if self.storm_count > 0 {
                STORM_LEAD
            } else if self.tidy.is_some() {
                TIDY_LEAD
            } else if copies.is_some() {
                COPIES_LEAD
            } else {
                Duration::from_millis(300)
            }
            .as_nanos() as u64;
        for (index, player) in players.iter_mut().enumerate() {
            let delay = match self.start {
                Start::Together => 0,
                Start::Staggered => index as u64 * self.stagger.as_nanos() as u64,
            };
            player.begin(t0 + delay)?;
        }
        let begun = match &self.record {
            // Writers start after the players, each at the next start.
            Some(record) => Some(record.begin(stage, &mut writers, t0, self.stream_count)?),
            None => None,
        };
        // When all players play.
        let fill_ns = t0 + self.stream_count * self.stagger.as_nanos() as u64;
        for filler in &mut fillers {
            filler.begin(fill_ns)?;
        }
        for storm in &mut storms {
            storm.begin(storm_t0)?;
        }
        sleep_until_ns(t0);
        let cpu_before = server.cpu()?;
        let machine_before = report::Processors::now();
        let copied_before = copies.as_ref().map_or(0, Copies::bytes);
        let crowd = Crowd::<Playback>::gather(players);
        let writers = Crowd::<writer::Done>::gather(writers);
        let fillers = Crowd::<fill::Done>::gather(fillers);
        let is_done = || crowd.is_done() && writers.is_done() && fillers.is_done();
        let ledger = self.wait(&is_done, server, quiet)?;
        let wall_s = (now_ns() - t0) as f64 / 1e9;
        let cpu_s = (server.cpu()? - cpu_before).as_secs_f64();
        let machine = report::Processors::now().since(machine_before);
        let tidied = self.tidy.as_ref().map(|tidy| tidy.end(stage));
        let tally = copies.map(Copies::stop);
        let statistics = stage.statistics()?;
        let storm_results = Crowd::<storm::Done>::gather(storms).results()?;
        let playbacks = crowd.results()?;
        let recorded = match (&self.record, begun) {
            (Some(record), Some(begun)) => Some(record.settle(stage, writers.results()?, begun)?),
            _ => None,
        };

        let filled = fillers.results()?;

        let mut report = self.describe(stage, server)?;
        report.streams_per_disk = stage.files_per_disk(&paths)?;
        report.wall_s = wall_s;
        report.server_cpu_s = cpu_s;
        (report.machine_cpu_s, report.stolen_cpu_s) = (machine.busy_s, machine.stolen_s);
        report.disk_statistics = statistics;
        report.storm = storm_results;
        if let Some(tally) = tally {
            let bytes = tally.bytes - copied_before;
            report.add_copies(Tally { bytes, ..tally }, wall_s);
        }
        self.add_playbacks(&mut report, &served, t0, playbacks, ledger);
        Ok(Performance {
            report,
            recorded,
            filled,
            fill_ns,
            tidied: tidied.transpose()?,
        })
    }

    fn start_players(&self, stage: &Stage, server: &Server, chosen: &[u64]) -> Result<Vec<Client>> {
        let plan = stage.plan();
        let mut players = Vec::new();
        for stream in chosen {
            let files = if plan.sequence {
                (0..self.frame_count())
                    .map(|frame| plan.frame_path(*stream, frame))
                    .collect()
            } else {
                vec![plan.stream_path(*stream)]
            };
            let job = player::Job {
                stream: *stream,
                address: server.address().clone(),
                files,
                seed: plan.seed,
                frame_count: self.frame_count(),
                frame_bytes: plan.frame_bytes(),
                frame_stride: plan.frame_offset(1),
                period_ns: plan.period().as_nanos() as u64,
                preroll_ns: self.preroll.as_nanos() as u64,
                grace_ns: self.grace.as_nanos() as u64,
                content: match &self.real {
                    None => player::Content::MadeUp,
                    Some(hashes) => player::Content::Hashes(
                        hashes
                            .get(*stream as usize)
                            .cloned()
                            .context("a stream without hashes")?,
                    ),
                },
            };
            players.push(Client::start("player", server, &job)?);
        }
        for player in &mut players {
            player.wait_ready()?;
        }
        Ok(players)
    }

    fn start_storms(&self, server: &Server) -> Result<Vec<Client>> {
        let mut storms = Vec::new();
        for index in 0..self.storm_count {
            let job = storm::Job {
                address: server.address().clone(),
                entry_count: self.entry_count,
                rate: self.storm_rate,
                list_every_s: self.storm_list_every_s,
                seconds: self.seconds + STORM_LEAD.as_secs_f64(),
                seed: self.seed + index,
            };
            storms.push(Client::start("storm", server, &job)?);
        }
        for storm in &mut storms {
            storm.wait_ready()?;
        }
        Ok(storms)
    }

    /// Wait until all players and writers are done; note the daemon's status every second.
    fn wait(&self, is_done: &dyn Fn() -> bool, server: &Server, quiet: bool) -> Result<Ledger> {
        let bar = progress(self, quiet);
        let mut ledger = Ledger::default();
        while !is_done() {
            pause(STATUS_EVERY)?;
            bar.inc(STATUS_EVERY.as_millis() as u64);
            if let Some(daemon) = server.daemon() {
                // If the daemon does not answer, the next round asks again; if it died, the figures
                // show it.
                match daemon.status() {
                    Ok(status) => ledger.note(status),
                    Err(error) => ledger.complaint = Some(format!("{error:#}")),
                }
            }
        }
        bar.finish_and_clear();
        Ok(ledger)
    }

    fn describe(&self, stage: &Stage, server: &Server) -> Result<Report> {
        Ok(Report {
            head: Head {
                experiment: None,
                file_system: None,
                ..Head::of("play")
                    .on(stage)
                    .by(self.server.way)
                    .with_server(self.server.kind.name())
            },
            start: match self.start {
                Start::Staggered => "staggered".to_owned(),
                Start::Together => "together".to_owned(),
            },
            cache_bytes_max: self.server.data_bytes(),
            stagger_ms: self.stagger.as_secs_f64() * 1e3,
            bitrate: self.bitrate,
            seconds: self.seconds,
            preroll_ms: self.preroll.as_secs_f64() * 1e3,
            sequence: self.sequence,
            cold_metadata: self.cold_metadata,
            frames_per_s: self.frames_per_kilosecond as f64 / 1e3,
            copies: self.copy_count,
            storm_rate: (self.storm_count > 0).then_some(self.storm_rate),
            storm_warm: self.storm_warm,
            server_memory_bytes_peak: server.memory_bytes_peak()?,
            analyser: self.server.kind == Kind::Rushes && self.server.analyser,
            settings: server.settings().clone(),
            device_model: server
                .daemon()
                .map_or(Value::Null, |daemon| daemon.model().clone()),
            environment: report::environment(),
            ..Report::default()
        })
    }

    fn add_playbacks(
        &self,
        report: &mut Report,
        served: &BTreeMap<u64, Vec<String>>,
        t0: u64,
        playbacks: Vec<Playback>,
        ledger: Ledger,
    ) {
        let limit_ms = self.seconds * 1e3 + self.grace.as_secs_f64() * 1e3;
        report.players_cpu_s = playbacks.iter().map(|playback| playback.cpu_s).sum();
        report.stream_bytes = playbacks.iter().map(|playback| playback.bytes).sum();
        report.timeline = self.timeline.then(|| {
            let timeline = |playback: &Playback| Timeline {
                stream: playback.stream,
                start_s: playback.start_ns.saturating_sub(t0) as f64 / 1e9,
                lateness_ms: playback.lateness_ms.clone(),
            };
            playbacks.iter().map(timeline).collect()
        });
        let rows = playbacks
            .into_iter()
            .map(|playback| {
                let names = served.get(&playback.stream).map_or(&[][..], Vec::as_slice);
                let (standings, admitted) = ledger.of(names);
                let played = Played {
                    playback,
                    standings,
                    admitted,
                };
                StreamRow::new(&played, self.frame_count(), limit_ms)
            })
            .collect();
        report.add_streams(rows);
        report.errors.extend(ledger.complaint);
        report.daemon_bytes_beside_cache_max = ledger.bytes_beside_cache_max;
        report.cache_bytes_peak = ledger.cache_bytes_peak;
        report.status = ledger.last;
    }
}

/// The files of each copier.
pub fn reels(stage: &Stage, copier_count: u64) -> Vec<Vec<Reel>> {
    let plan = stage.plan();
    (0..copier_count)
        .map(|copier| {
            (0..REELS_PER_COPIER)
                .map(|reel| {
                    let copy = copier * REELS_PER_COPIER + reel;
                    Reel {
                        path: Plan::copy_path(copy),
                        clip: Some(plan.copy_clip(copy)),
                        bytes: plan.copy_bytes,
                    }
                })
                .collect()
        })
        .collect()
}

fn progress(play: &Play, quiet: bool) -> ProgressBar {
    let target = if quiet {
        ProgressDrawTarget::hidden()
    } else {
        ProgressDrawTarget::stderr()
    };
    let stagger = match play.start {
        Start::Together => Duration::ZERO,
        Start::Staggered => {
            let writer_count = play.record.as_ref().map_or(0, |record| record.writer_count);
            play.stagger * (play.stream_count + writer_count) as u32
        }
    };
    let length = (play.seconds * 1e3) as u64 + stagger.as_millis() as u64;
    let bar = ProgressBar::with_draw_target(Some(length), target);
    if let Ok(style) = ProgressStyle::with_template("{msg} {wide_bar} {elapsed}") {
        bar.set_style(style);
    }
    bar.set_message(format!(
        "{}: {} streams",
        play.server.kind, play.stream_count
    ));
    bar
}

/// The daemon's entries of its streams in the course of a run.
#[derive(Debug, Default)]
struct Ledger {
    /// By path below the share, with the part of a striped file; a sequence by its folder.
    standings: BTreeMap<String, Vec<String>>,
    /// By the same: it was under contract from its first read on.
    admitted: BTreeMap<String, bool>,
    bytes_beside_cache_max: Option<u64>,
    cache_bytes_peak: Option<u64>,
    last: Value,
    complaint: Option<String>,
}

impl Ledger {
    /// The entries of a stream that the daemon knows by these names; of several the worst one.
    fn of(&self, names: &[String]) -> (Vec<String>, bool) {
        let standings = |name: &String| self.standings.get(name).cloned().unwrap_or_default();
        let worst = names
            .iter()
            .map(standings)
            .min_by_key(|all| all.last().is_some_and(|last| last == "contract"));
        let admitted = names
            .iter()
            .all(|name| self.admitted.get(name).copied().unwrap_or(false));
        (worst.unwrap_or_default(), admitted && !names.is_empty())
    }

    fn note(&mut self, status: Value) {
        let mut now: BTreeMap<String, String> = BTreeMap::new();
        for stream in status["streams"].as_array().into_iter().flatten() {
            let (Some(path), Some(standing)) =
                (stream["path"].as_str(), stream["standing"].as_str())
            else {
                continue;
            };
            let path = path.trim_start_matches("./").trim_start_matches('/');
            let name = match stream["part"].as_str() {
                _ if stream["sequence"] == true => {
                    String::from(path.rsplit_once('/').map_or(path, |(folder, _)| folder))
                }
                Some(part) => format!("{path} {part}"),
                None => String::from(path),
            };
            if let (Some(reads), Some(promised)) = (
                stream["read_count"].as_u64(),
                stream["promised_count"].as_u64(),
            ) && reads > 0
            {
                // Once admitted it counts as admitted, even if the contract is withdrawn later.
                *self.admitted.entry(name.clone()).or_default() |=
                    standing == "contract" && promised > 0 && promised + LOOKS >= reads;
            }
            // A file may have several rows, one for each position; a contract in any of them
            // counts.
            let entry = now.entry(name).or_default();
            if entry != "contract" {
                *entry = standing.to_owned();
            }
        }
        for (name, standing) in now {
            let seen = self.standings.entry(name).or_default();
            if seen.last() != Some(&standing) {
                seen.push(standing);
            }
        }
        let beside = status["daemon"]["rss_beside_cache_bytes"].as_u64();
        self.bytes_beside_cache_max = self.bytes_beside_cache_max.max(beside);
        let cache = &status["cache"];
        if let (Some(all), Some(free), Some(bytes)) = (
            cache["buffer_count"].as_u64(),
            cache["free_count"].as_u64(),
            cache["buffer_bytes"].as_u64(),
        ) {
            let held = all.saturating_sub(free) * bytes;
            self.cache_bytes_peak = self.cache_bytes_peak.max(Some(held));
        }
        self.last = status;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_promise_withdrawn_was_a_promise() {
        let mut ledger = Ledger::default();
        let status = |standing: &str, reads: u64, due: u64| {
            json!({"streams": [{
                "path": "footage/stream00/clip.mov", "standing": standing, "sequence": false,
                "read_count": reads, "promised_count": due,
            }]})
        };
        ledger.note(status("contract", 10, 10));
        ledger.note(status("refused", 20, 12));
        assert!(ledger.admitted["footage/stream00/clip.mov"]);
        let mut ledger = Ledger::default();
        ledger.note(status("best_effort", 5, 0));
        ledger.note(status("contract", 20, 15));
        assert!(!ledger.admitted["footage/stream00/clip.mov"]);
    }

    #[test]
    fn a_striped_stream_is_admitted_where_all_its_parts_are() {
        let mut ledger = Ledger::default();
        let part = |name: &str, part: &str, standing: &str| json!({"path": name, "part": part, "standing": standing, "sequence": false, "read_count": 4, "promised_count": 4});
        ledger
            .note(json!({"streams": [part("a", "1/2", "contract"), part("a", "2/2", "contract")]}));
        ledger
            .note(json!({"streams": [part("b", "1/2", "contract"), part("b", "2/2", "refused")]}));
        let names = |text: &str| [1, 2].map(|part| format!("{text} {part}/2"));
        assert_eq!(ledger.of(&names("a")), (vec!["contract".into()], true));
        assert_eq!(ledger.of(&names("b")), (vec!["refused".into()], false));
        assert_eq!(ledger.of(&[]), (Vec::new(), false));
    }

    #[test]
    fn a_ledger_remembers_that_a_stream_was_admitted() {
        let mut ledger = Ledger::default();
        let status = |standing: &str| {
            json!({"streams": [
                {"path": "footage/stream00/clip.mov", "standing": standing, "sequence": false},
                {"path": "footage/stream01/shot.0001.dpx", "standing": "contract", "sequence": true},
            ]})
        };
        ledger.note(status("contract"));
        ledger.note(status("best_effort"));
        assert_eq!(
            ledger.standings["footage/stream00/clip.mov"],
            ["contract", "best_effort"]
        );
        assert_eq!(ledger.standings["footage/stream01"], ["contract"]);
    }
}
