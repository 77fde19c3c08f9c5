// SPDX-License-Identifier: Apache-2.0
//! Trials of cost rather than of deadlines: from cache, mixed random, and with the daemon absent.
//!
//! Two servers are up at once and take turns, so that both meet the same machine; only the median
//! of the ratios of neighbouring runs counts. They cannot share a disk, so where the load needs
//! one, one server is up at a time.

use crate::clients::client::{Client, Crowd};
use crate::clients::copies::{get, smbclient};
use crate::clients::player::now_ns;
use crate::clients::work::{self, Load};
use crate::experiments::compare::{Contender, spread};
use crate::experiments::play::Play;
use crate::reports::outcome::Outcome;
use crate::reports::report::environment;
use crate::servers::server::{Kind, Server};
use crate::stage::footage::Clip;
use crate::stage::room::{Room, go_on};
use crate::stage::{Plan, Stage};
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::Instant;

const GIB: f64 = (1u64 << 30) as f64;
/// Size of the file, which fits into the cache. Units: bytes.
pub const WARM_FILE_BYTES: u64 = 512 << 20;
/// Unit of comparisons of a downloaded file. Units: bytes.
const COMPARE_BYTES: usize = 1 << 20;
/// Smallest and largest request of the mixed load. Units: bytes.
const MIXED_BLOCKS: (u64, u64) = (4 << 10, 256 << 10);
const MIXED_READ_PERCENT: u64 = 70;
/// Runs of two servers that are up at once, before the lab starts two new ones.
const RUNS_OF_A_PAIR: u64 = 8;
/// Folder of the metadata load, below the share.
const METADATA_FOLDER: &str = "archive";

/// One measured quantity of two servers.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The measured quantity, with its unit.
    pub what: String,
    /// Values of the server on trial: lowest, median, highest.
    pub ours: (f64, f64, f64),
    /// Values of stock.
    pub stock: (f64, f64, f64),
    /// Median of the ratios of neighbouring runs: ours by stock's.
    pub ratio: f64,
    /// The ratio to reach.
    pub wanted: String,
}

/// The findings of a trial.
#[derive(Clone, Debug, Serialize)]
pub struct Trial {
    /// Its name.
    pub trial: String,
    /// The server on trial.
    pub server: String,
    /// Runs of each server.
    pub runs: u64,
    /// Results.
    pub rows: Vec<Row>,
    /// Bytes that differ from those written, of all compared bytes.
    pub bytes_wrong: u64,
    /// Machine and revision.
    pub environment: serde_json::Value,
}

impl Trial {
    fn new(trial: &str, server: Contender, runs: u64) -> Trial {
        Trial {
            trial: trial.to_owned(),
            server: server.to_string(),
            runs,
            rows: Vec::new(),
            bytes_wrong: 0,
            environment: environment(),
        }
    }

    /// Adds a row. `pairs`: ours and stock's of neighbouring runs.
    fn row(&mut self, what: &str, wanted: &str, pairs: &[(f64, f64)]) {
        let ratios = pairs.iter().map(|(ours, stock)| ours / stock);
        self.rows.push(Row {
            what: what.to_owned(),
            ours: spread(pairs.iter().map(|pair| pair.0)),
            stock: spread(pairs.iter().map(|pair| pair.1)),
            ratio: spread(ratios).1,
            wanted: wanted.to_owned(),
        });
    }
}

impl Outcome for Trial {
    fn table(&self) -> Result<String> {
        let mut out = format!(
            "| {} ({} runs each) | {} | stock | ratio | wanted |\n|---|---|---|---|---|\n",
            self.trial, self.runs, self.server
        );
        for row in &self.rows {
            let show =
                |(low, median, high): (f64, f64, f64)| format!("{median:.3} ({low:.3}–{high:.3})");
            writeln!(
                out,
                "| {} | {} | {} | {:.3} | {} |",
                row.what,
                show(row.ours),
                show(row.stock),
                row.ratio,
                row.wanted
            )?;
        }
        writeln!(out, "\nwrong bytes: {}", self.bytes_wrong)?;
        Ok(out)
    }
}

/// Two servers over one stage.
struct Duel {
    ours: Server,
    stock: Server,
}

impl Duel {
    fn start(room: &Room, stage: &Stage, base: &Play, contender: Contender) -> Result<Duel> {
        let start = |name: &str, kind, analyser| {
            let spec = crate::servers::server::Spec {
                kind,
                analyser,
                ..base.server.clone()
            };
            Server::start(room, name, stage, &spec)
        };
        Ok(Duel {
            ours: start("ours", contender.kind, contender.analyser)?,
            stock: start("stock", Kind::Stock, true)?,
        })
    }

    /// Run `measure` on both, `runs` times; the two go first in turn.
    fn take_turns<R>(
        &self,
        runs: u64,
        mut measure: impl FnMut(&Server) -> Result<R>,
    ) -> Result<Vec<(R, R)>> {
        let mut pairs = Vec::new();
        for run in 0..runs {
            go_on()?;
            if run % 2 == 0 {
                let ours = measure(&self.ours)?;
                pairs.push((ours, measure(&self.stock)?));
            } else {
                let stock = measure(&self.stock)?;
                pairs.push((measure(&self.ours)?, stock));
            }
        }
        Ok(pairs)
    }

    fn stop(self, stage: &Stage) -> Result<()> {
        self.ours.stop(stage)?;
        self.stock.stop(stage)
    }
}

/// Cost of a measured piece of work.
#[derive(Clone, Copy, Debug)]
struct Cost {
    seconds: f64,
    cpu_s: f64,
    bytes: f64,
}

/// A file from cache, by smbclient: server CPU per GiB and throughput.
pub fn hits(
    room: &Room,
    stage: &mut Stage,
    base: &Play,
    contender: Contender,
    runs: u64,
    gib: u64,
) -> Result<Trial> {
    stage.timing(false)?;
    stage.cool()?;
    let duel = Duel::start(room, stage, base, contender)?;
    let rounds = (gib << 30) / WARM_FILE_BYTES;
    let mut trial = Trial::new("from cache, smbclient", contender, runs);
    for server in [&duel.ours, &duel.stock] {
        download(server, 1)?;
        // This download comes from the cache and is compared; the timed ones go to /dev/null.
        let file = room.path().join("came-out");
        get(server.address(), &Plan::copy_path(0), &file)?;
        trial.bytes_wrong += wrong_bytes(&file, stage.plan().copy_clip(0), WARM_FILE_BYTES)?;
        std::fs::remove_file(&file)?;
    }
    let pairs = duel.take_turns(runs, |server| download(server, rounds))?;
    duel.stop(stage)?;
    let per_gib = |cost: &Cost| cost.cpu_s / (cost.bytes / GIB);
    let speed = |cost: &Cost| cost.bytes / 1e6 / cost.seconds;
    let of = |value: &dyn Fn(&Cost) -> f64| -> Vec<(f64, f64)> {
        pairs.iter().map(|(a, b)| (value(a), value(b))).collect()
    };
    trial.row("server CPU, s/GiB", "≤ 1.0, aim 0.8", &of(&per_gib));
    trial.row("throughput, MB/s", "≥ 1.0, aim 1.2", &of(&speed));
    Ok(trial)
}

/// Number of bytes of a downloaded file that differ from its clip, missing and surplus ones
/// included.
fn wrong_bytes(path: &Path, clip: Clip, length: u64) -> Result<u64> {
    let mut file = File::open(path).with_context(|| format!("{}", path.display()))?;
    let mut buffer = vec![0u8; COMPARE_BYTES];
    let (mut done, mut wrong) = (0, 0);
    loop {
        let got = file.read(&mut buffer)?;
        if got == 0 {
            return Ok(wrong + length.abs_diff(done));
        }
        wrong += clip.wrong_bytes(done, &buffer[..got]);
        done += got as u64;
    }
}

/// Get the same file so many times in one session.
fn download(server: &Server, rounds: u64) -> Result<Cost> {
    let file = Plan::copy_path(0).replace('/', "\\");
    let command = vec![format!("get {file} /dev/null"); rounds as usize].join("; ");
    let (cpu, start) = (server.cpu()?, Instant::now());
    let out = smbclient(server.address(), &command)?.wait_with_output()?;
    let seconds = start.elapsed().as_secs_f64();
    ensure!(
        out.status.success(),
        "smbclient failed: {}{}",
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    );
    Ok(Cost {
        seconds,
        cpu_s: (server.cpu()? - cpu).as_secs_f64(),
        bytes: (rounds * WARM_FILE_BYTES) as f64,
    })
}

/// Let one client work. Returns its result and the server's CPU time. Units: s.
fn work_once(server: &Server, stage: &Stage, load: Load) -> Result<(work::Done, f64)> {
    let plan = stage.plan();
    let metadata = matches!(load, Load::Metadata { .. });
    let clip = plan.copy_clip(0);
    let job = work::Job {
        address: server.address().clone(),
        path: if metadata {
            METADATA_FOLDER.to_owned()
        } else {
            Plan::copy_path(0)
        },
        clip: (clip.seed, clip.number),
        file_bytes: plan.copy_bytes,
        load,
        seed: 1,
    };
    let mut client = Client::start("work", server, &job)?;
    client.wait_ready()?;
    let cpu = server.cpu()?;
    client.begin(now_ns())?;
    let done: work::Done = client.result()?;
    if let Some(error) = &done.error {
        anyhow::bail!("{load:?} failed: {error}");
    }
    Ok((done, (server.cpu()? - cpu).as_secs_f64()))
}

/// Measures the cost of the module where there is no daemon.
pub fn absent(room: &Room, stage: &mut Stage, base: &Play, runs: u64) -> Result<Trial> {
    let contender = Contender {
        kind: Kind::Absent,
        analyser: true,
    };
    stage.timing(false)?;
    let mut trial = Trial::new("daemon absent, time", contender, runs);
    let loads = [
        (
            "sequential read, s",
            Load::SequentialRead {
                block: 1 << 20,
                rounds: 2,
            },
        ),
        (
            "random read of 4 KiB, s",
            Load::RandomRead {
                block: 4096,
                count: 5000,
            },
        ),
        ("metadata, s", Load::Metadata { count: 500 }),
        // Last: it replaces the stage's content of the file.
        (
            "sequential write, s",
            Load::SequentialWrite {
                block: 1 << 20,
                rounds: 1,
            },
        ),
    ];
    let mut pairs = vec![Vec::new(); loads.len()];
    let mut left = runs;
    while left > 0 {
        // New servers every few runs: two of the same kind differ by more than this trial must
        // show, by the places of their databases and processes, and for as long as they live.
        let turns = left.min(RUNS_OF_A_PAIR);
        left -= turns;
        stage.rewrite_copies()?;
        stage.cool()?;
        let duel = Duel::start(room, stage, base, contender)?;
        for ((_, load), pairs) in loads.iter().zip(&mut pairs) {
            // Both once before the measurement, to warm page cache and smbd's own memory.
            work_once(&duel.ours, stage, *load)?;
            work_once(&duel.stock, stage, *load)?;
            pairs.extend(duel.take_turns(turns, |server| {
                let (done, cpu_s) = work_once(server, stage, *load)?;
                trial.bytes_wrong += done.bytes_wrong;
                Ok((done.seconds, cpu_s))
            })?);
        }
        duel.stop(stage)?;
    }
    for ((what, _), pairs) in loads.iter().zip(&pairs) {
        let times: Vec<(f64, f64)> = pairs.iter().map(|(a, b)| (a.0, b.0)).collect();
        let cpus: Vec<(f64, f64)> = pairs.iter().map(|(a, b)| (a.1, b.1)).collect();
        trial.row(what, "≤ 1.02", &times);
        trial.row(&what.replace(", s", ", server CPU s"), "≤ 1.02", &cpus);
    }
    Ok(trial)
}

/// Many clients, each with a file of its own, in small random pieces.
pub fn mixed(
    room: &Room,
    stage: &mut Stage,
    base: &Play,
    contender: Contender,
    runs: u64,
    seconds: f64,
) -> Result<Trial> {
    let mut trial = Trial::new("random mixed load", contender, runs);
    let stock = Contender {
        kind: Kind::Stock,
        analyser: true,
    };
    let mut pairs = Vec::new();
    for run in 0..runs {
        let mut turn = |contender| mixed_once(room, stage, base, contender, seconds, run);
        let (ours, theirs) = if run % 2 == 0 {
            let ours = turn(contender)?;
            (ours, turn(stock)?)
        } else {
            let theirs = turn(stock)?;
            (turn(contender)?, theirs)
        };
        pairs.push((ours, theirs));
    }
    for (ours, stock) in &pairs {
        trial.bytes_wrong += ours.bytes_wrong + stock.bytes_wrong;
    }
    let of = |value: fn(&Mixed) -> f64| -> Vec<(f64, f64)> {
        pairs.iter().map(|(a, b)| (value(a), value(b))).collect()
    };
    trial.row("throughput, MB/s", "≥ 1.0", &of(|m| m.mb_per_s));
    trial.row("mean response, ms", "≤ 1.0", &of(|m| m.response_ms));
    trial.row("p99 response, ms", "", &of(|m| m.response_ms_p99));
    trial.row("server CPU, s/GiB", "", &of(|m| m.cpu_s_per_gib));
    Ok(trial)
}

/// One server's share of a mixed trial.
#[derive(Clone, Debug)]
struct Mixed {
    mb_per_s: f64,
    response_ms: f64,
    response_ms_p99: f64,
    cpu_s_per_gib: f64,
    bytes_wrong: u64,
}

fn mixed_once(
    room: &Room,
    stage: &mut Stage,
    base: &Play,
    contender: Contender,
    seconds: f64,
    run: u64,
) -> Result<Mixed> {
    stage.timing(false)?;
    stage.rewrite_copies()?;
    stage.cool()?;
    let spec = crate::servers::server::Spec {
        kind: contender.kind,
        analyser: contender.analyser,
        ..base.server.clone()
    };
    let server = Server::start(room, "server", stage, &spec)?;
    let plan = stage.plan();
    let mut clients = Vec::new();
    for copy in 0..plan.copy_count {
        let clip = plan.copy_clip(copy);
        let job = work::Job {
            address: server.address().clone(),
            path: Plan::copy_path(copy),
            clip: (clip.seed, clip.number),
            file_bytes: plan.copy_bytes,
            load: Load::Mixed {
                read_percent: MIXED_READ_PERCENT,
                block_min: MIXED_BLOCKS.0,
                block_max: MIXED_BLOCKS.1,
                seconds,
            },
            // The same requests for both servers of a pair.
            seed: run * 1000 + copy,
        };
        clients.push(Client::start("work", &server, &job)?);
    }
    for client in &mut clients {
        client.wait_ready()?;
    }
    stage.timing(true)?;
    let begin = now_ns() + 100_000_000;
    for client in &mut clients {
        client.begin(begin)?;
    }
    let cpu = server.cpu()?;
    let done = Crowd::<work::Done>::gather(clients).results()?;
    let cpu_s = (server.cpu()? - cpu).as_secs_f64();
    stage.timing(false)?;
    server.stop(stage)?;
    if let Some(error) = done.iter().find_map(|one| one.error.as_ref()) {
        anyhow::bail!("{contender}: {error}");
    }
    let bytes: u64 = done.iter().map(|one| one.bytes).sum();
    let requests: u64 = done.iter().map(|one| one.request_count).sum();
    let longest = done.iter().map(|one| one.seconds).fold(0.0, f64::max);
    let weighted = done
        .iter()
        .map(|one| one.response_ms_mean * one.request_count as f64);
    let mixed = Mixed {
        mb_per_s: bytes as f64 / 1e6 / longest,
        response_ms: weighted.sum::<f64>() / requests.max(1) as f64,
        // That of the worst client, not a mean of percentiles.
        response_ms_p99: done
            .iter()
            .map(|one| one.response_ms_p99)
            .fold(0.0, f64::max),
        cpu_s_per_gib: cpu_s / (bytes as f64 / GIB),
        bytes_wrong: done.iter().map(|one| one.bytes_wrong).sum(),
    };
    eprintln!(
        "{contender:>18}: {:.2} MB/s, {:.1} ms mean, {:.1} ms p99, {} wrong",
        mixed.mb_per_s, mixed.response_ms, mixed.response_ms_p99, mixed.bytes_wrong
    );
    Ok(mixed)
}

/// The stage of a trial: so many files, and a folder.
pub fn plan(seed: u64, file_count: u64, file_bytes: u64) -> Plan {
    Plan {
        seed,
        stream_count: 0,
        bitrate: 100_000_000,
        frames_per_kilosecond: 25_000,
        frame_count: 0,
        sequence: false,
        copy_count: file_count,
        copy_bytes: file_bytes,
        entry_count: 0,
    }
}

/// Writes the results into a folder, made if it is missing.
pub fn keep(trial: &Trial, out: &Path) -> Result<()> {
    std::fs::create_dir_all(out).with_context(|| format!("{} cannot be made", out.display()))?;
    let file = out.join(format!("{}.json", trial.trial.replace([' ', ','], "-")));
    std::fs::write(&file, serde_json::to_vec_pretty(trial)?)
        .with_context(|| format!("{} cannot be written", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_missing_and_surplus_bytes_of_a_download_are_counted() {
        let room = Room::create().unwrap();
        let path = room.path().join("came-out");
        let clip = Clip { seed: 1, number: 2 };
        let mut bytes = vec![0; 3 * COMPARE_BYTES / 2];
        clip.fill(0, &mut bytes);
        let length = bytes.len() as u64;
        let count = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            wrong_bytes(&path, clip, length).unwrap()
        };
        assert_eq!(count(&bytes), 0);
        bytes[COMPARE_BYTES + 7] ^= 1;
        assert_eq!(count(&bytes), 1);
        assert_eq!(count(&bytes[..bytes.len() - 10]), 11);
        assert_eq!(count(&[]), length);
    }
}
