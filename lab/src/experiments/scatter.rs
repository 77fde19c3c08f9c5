// SPDX-License-Identifier: Apache-2.0
//! Small writes anywhere in an existing file, then a sync: how well does a server order them?
//!
//! Clients come over SMB, or fio stands in for them: threads that write the same kind of load into
//! the same file, buffered, on the file system itself. After clients the lab reads the file cold
//! and compares it; the content of fio's writes is fio's own.

use crate::clients::client::{Client, Crowd};
use crate::clients::player::now_ns;
use crate::clients::work::{self, Load, Scattered, clip_of};
use crate::experiments::record::{read_progress, sync};
use crate::reports::head::Head;
use crate::reports::outcome::Outcome;
use crate::reports::report::environment;
use crate::servers::cgroup::Cgroup;
use crate::servers::server::{self, OWN_BYTES, Server, Way};
use crate::stage::footage::{Clip, PAGE_BYTES};
use crate::stage::room::{Room, go_on, pause};
use crate::stage::{Plan, Stage};
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

const BEGIN_IN: Duration = Duration::from_millis(300);
const WATCH_EVERY: Duration = Duration::from_millis(100);
/// Time after writes to a file until no server sets its times any more; smbd does so after 2 s.
const SETTLES_IN: Duration = Duration::from_secs(4);
const PAGE: u64 = PAGE_BYTES as u64;
/// The stage's only file.
const FILE: u64 = 0;

/// The programs that write.
#[derive(Clone, Debug)]
pub enum Writers {
    /// Clients of a server.
    Clients(Box<server::Spec>),
    /// fio, with as much memory as a rival gets. Units: bytes.
    Fio(u64),
}

/// The load.
#[derive(Clone, Debug)]
pub struct Scatter {
    /// Clients, or threads.
    pub client_count: u64,
    /// Bytes that all write together. Units: bytes.
    pub bytes: u64,
    /// Smallest and largest write; whole pages. Units: bytes.
    pub blocks: (u64, u64),
    /// Seed of places and sizes.
    pub seed: u64,
    /// A client has read the file once through the door before; fio reads it into the kernel's
    /// cache.
    pub is_warm: bool,
}

/// One JSON object. Fields may be added, never renamed or given another unit.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ScatterReport {
    /// Which experiment, server and disks.
    #[serde(flatten)]
    pub(crate) head: Head,
    /// The modelled disk had its volatile write cache; null on other disks.
    pub write_back: Option<bool>,
    /// Clients, or threads.
    pub clients: u64,
    /// The file had been read before, through the same door.
    pub warm: bool,
    /// Size of the file. Units: bytes.
    pub file_bytes: u64,
    /// Smallest write.
    pub block_bytes_min: u64,
    /// Largest write.
    pub block_bytes_max: u64,
    /// Acknowledged writes.
    pub writes: u64,
    /// Their bytes.
    pub bytes: u64,
    /// From the first write to the last acknowledgement.
    pub wall_s: f64,
    /// From then until the disk had everything.
    pub final_sync_s: f64,
    /// Acknowledged bytes by `wall_s`.
    pub mb_per_s: f64,
    /// Acknowledged bytes by `wall_s` and `final_sync_s`.
    pub mb_per_s_synced: f64,
    /// Write requests to the block device.
    pub device_write_count: Option<u64>,
    /// Bytes of gaps that the daemon bridged: it wrote them again although the disk had them; null
    /// without a daemon.
    pub bytes_bridged: Option<u64>,
    /// The 99th percentile of the time to an acknowledgement, of the slowest client.
    pub response_ms_p99: f64,
    /// Bytes that differ from those written, read cold from the file system below; null for fio.
    pub bytes_wrong: Option<u64>,
    /// CPU time of smbd and daemon, or of fio.
    pub server_cpu_s: f64,
    /// Memory that the server may use for cached data.
    pub cache_bytes_max: u64,
    /// Errors of clients.
    pub errors: Vec<String>,
    /// Settings that distinguish the server.
    pub settings: Value,
    /// The counts of the slow disk during the run.
    pub disk_statistics: Value,
    /// The kernel's counts of the block device during the run.
    pub block_statistics: Value,
    /// Last status of the daemon.
    pub status: Value,
    /// Machine and revision.
    pub environment: Value,
}

impl Scatter {
    /// Write and judge. The stage holds one file.
    ///
    /// Errors   the setup failed; bad results of a server are not errors but figures
    pub fn run(
        &self,
        room: &Room,
        stage: &mut Stage,
        writers: &Writers,
        quiet: bool,
    ) -> Result<ScatterReport> {
        stage.timing(false)?;
        stage.cool()?;
        stage.look_through()?;
        let report = match writers {
            Writers::Clients(spec) => self.with_clients(room, stage, spec, quiet),
            Writers::Fio(cache_bytes) => self.with_fio(room, stage, *cache_bytes),
        };
        stage.timing(false)?;
        let mut report = report?;
        report.head = Head {
            disks: None,
            layout: None,
            ..report.head.on(stage)
        };
        report.write_back = stage.write_back();
        report.clients = self.client_count;
        report.warm = self.is_warm;
        report.bytes_bridged = bridged(&report.status);
        report.file_bytes = file_bytes(stage);
        (report.block_bytes_min, report.block_bytes_max) = self.blocks;
        report.mb_per_s = report.bytes as f64 / 1e6 / report.wall_s.max(1e-9);
        report.mb_per_s_synced =
            report.bytes as f64 / 1e6 / (report.wall_s + report.final_sync_s).max(1e-9);
        report.device_write_count = report.block_statistics["write_count"].as_u64();
        report.environment = environment();
        Ok(report)
    }

    fn scattered(&self, client: u64) -> Scattered {
        Scattered {
            client,
            client_count: self.client_count,
            block_min: self.blocks.0,
            block_max: self.blocks.1,
        }
    }

    fn with_clients(
        &self,
        room: &Room,
        stage: &mut Stage,
        spec: &server::Spec,
        quiet: bool,
    ) -> Result<ScatterReport> {
        let server = Server::start(room, "server", stage, spec)?;
        let performed = self.perform(stage, &server);
        let performed = server.stop_after(stage, spec.kind, performed)?;
        let (mut report, done) = performed;
        report.head = Head::of("scatter")
            .by(spec.way)
            .with_server(spec.kind.name());
        report.cache_bytes_max = spec.data_bytes();
        stage.cool()?;
        report.bytes_wrong = Some(self.wrong_bytes(stage, &done, quiet)?);
        Ok(report)
    }

    /// Let one client write to the file, and one read all of it. At the first write to a file smbd
    /// sets an attribute of it; at the next open that looks like a change by another program, which
    /// would drop the cached bytes of the file.
    fn warm(&self, stage: &Stage, server: &Server) -> Result<()> {
        let first_write = Load::Scatter {
            places: self.scattered(0),
            bytes: 1,
        };
        self.alone(stage, server, first_write)?;
        sync(stage)?;
        pause(SETTLES_IN)?;
        let reading = Load::SequentialRead {
            block: 1 << 20,
            rounds: 1,
        };
        self.alone(stage, server, reading)
    }

    /// Let one client perform this load.
    fn alone(&self, stage: &Stage, server: &Server, load: Load) -> Result<()> {
        let clip = stage.plan().copy_clip(FILE);
        let job = work::Job {
            address: server.address().clone(),
            path: Plan::copy_path(FILE),
            clip: (clip.seed, clip.number),
            file_bytes: file_bytes(stage),
            load,
            seed: self.seed,
        };
        let mut client = Client::start("work", server, &job)?;
        client.wait_ready()?;
        client.begin(now_ns())?;
        let crowd = Crowd::<work::Done>::gather(vec![client]);
        while !crowd.is_done() {
            pause(WATCH_EVERY)?;
        }
        crowd.results()?;
        Ok(())
    }

    fn perform(&self, stage: &Stage, server: &Server) -> Result<(ScatterReport, Vec<work::Done>)> {
        let clip = stage.plan().copy_clip(FILE);
        if self.is_warm {
            self.warm(stage, server)?;
        }
        let mut clients = Vec::new();
        for client in 0..self.client_count {
            let job = work::Job {
                address: server.address().clone(),
                path: Plan::copy_path(FILE),
                clip: (clip.seed, clip.number),
                file_bytes: file_bytes(stage),
                load: Load::Scatter {
                    places: self.scattered(client),
                    bytes: self.bytes / self.client_count,
                },
                seed: self.seed,
            };
            clients.push(Client::start("work", server, &job)?);
        }
        for client in &mut clients {
            client.wait_ready()?;
        }
        stage.timing(true)?;
        stage.reset_statistics()?;
        let blocks_before = stage.block_statistics()?;
        let cpu_before = server.cpu()?;
        let begun_ns = now_ns() + BEGIN_IN.as_nanos() as u64;
        for client in &mut clients {
            client.begin(begun_ns)?;
        }
        let crowd = Crowd::<work::Done>::gather(clients);
        while !crowd.is_done() {
            pause(WATCH_EVERY)?;
        }
        let done = crowd.results()?;
        let wall_s = done.iter().map(|done| done.seconds).fold(0.0, f64::max);
        sync(stage)?;
        let synced_s = (now_ns() - begun_ns) as f64 / 1e9;
        let report = ScatterReport {
            writes: done.iter().map(|done| done.request_count).sum(),
            bytes: done.iter().map(|done| done.bytes).sum(),
            wall_s,
            final_sync_s: (synced_s - wall_s).max(0.0),
            response_ms_p99: done
                .iter()
                .map(|done| done.response_ms_p99)
                .fold(0.0, f64::max),
            server_cpu_s: (server.cpu()? - cpu_before).as_secs_f64(),
            errors: done.iter().filter_map(|done| done.error.clone()).collect(),
            settings: server.settings().clone(),
            disk_statistics: stage.statistics()?,
            block_statistics: blocks_before.until(&stage.block_statistics()?),
            status: server
                .daemon()
                .and_then(|daemon| daemon.status().ok())
                .unwrap_or(Value::Null),
            ..ScatterReport::default()
        };
        Ok((report, done))
    }

    fn with_fio(&self, room: &Room, stage: &Stage, cache_bytes: u64) -> Result<ScatterReport> {
        let memory_bytes = cache_bytes + OWN_BYTES / 4;
        let cgroup = Cgroup::create(room, "fio", memory_bytes)?;
        let file = stage.root().join(Plan::copy_path(FILE));
        let arguments = self.fio_arguments(&file, file_bytes(stage));
        stage.timing(true)?;
        stage.reset_statistics()?;
        let blocks_before = stage.block_statistics()?;
        let out = room.path().join("fio.json");
        let child = cgroup
            .command(Path::new("fio"))
            .args(&arguments)
            .arg(format!("--output={}", out.display()))
            .current_dir(room.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .spawn()
            .context("fio (package fio) cannot be run")?;
        wait(child)?;
        let ended_ns = now_ns();
        sync(stage)?;
        let synced_ns = now_ns();
        let text = std::fs::read_to_string(&out).context("fio wrote no report")?;
        let said: Value = serde_json::from_str(&text).context("fio's report is not understood")?;
        let write = &said["jobs"][0]["write"];
        let number = |name: &str| {
            write[name]
                .as_u64()
                .with_context(|| format!("fio's report has no {name}"))
        };
        let p99 = &write["clat_ns"]["percentile"]["99.000000"];
        Ok(ScatterReport {
            head: Head::of("scatter").by(Way::Local).with_server("fio"),
            writes: number("total_ios")?,
            bytes: number("io_bytes")?,
            wall_s: number("runtime")? as f64 / 1e3,
            final_sync_s: (synced_ns - ended_ns) as f64 / 1e9,
            response_ms_p99: p99.as_f64().unwrap_or(0.0) / 1e6,
            server_cpu_s: cgroup.cpu()?.as_secs_f64(),
            cache_bytes_max: cache_bytes,
            settings: json!({
                "fio": said["fio version"],
                "arguments": arguments[1..],
                "memory_bytes_max": memory_bytes,
                "read_ahead_kib": stage.read_ahead(),
            }),
            disk_statistics: stage.statistics()?,
            block_statistics: blocks_before.until(&stage.block_statistics()?),
            ..ScatterReport::default()
        })
    }

    /// The arguments of fio. The file is the first, since the report leaves it out: it shows paths
    /// of this machine.
    fn fio_arguments(&self, file: &Path, file_bytes: u64) -> Vec<String> {
        let mut arguments = vec![format!("--filename={}", file.display())];
        arguments.extend(
            [
                "--name=scatter",
                "--ioengine=psync",
                "--rw=randwrite",
                "--norandommap",
                "--direct=0",
                "--thread",
                "--fallocate=none",
                "--group_reporting",
                "--output-format=json",
            ]
            .map(str::to_owned),
        );
        // Without --cold the file is in memory; with it warm pages would favour fio over clients
        // of a cold server.
        let cache = match self.is_warm {
            true => "--pre_read=1",
            false => "--invalidate=1",
        };
        arguments.push(cache.to_owned());
        let (least, most) = self.blocks;
        arguments.extend([
            format!("--bsrange={least}-{most}"),
            format!("--numjobs={}", self.client_count),
            format!("--size={file_bytes}"),
            format!("--io_size={}", self.bytes / self.client_count),
            format!("--randseed={}", self.seed),
        ]);
        arguments
    }

    /// Compares the file with the clients' writes, which follow from the number of acknowledged
    /// writes of each.
    fn wrong_bytes(&self, stage: &Stage, done: &[work::Done], quiet: bool) -> Result<u64> {
        let bytes = file_bytes(stage);
        let mut generations = vec![0; bytes.div_ceil(PAGE) as usize];
        for (client, done) in (0..).zip(done) {
            let places = self.scattered(client);
            let writes = places
                .of(self.seed, bytes)
                .take(done.request_count as usize);
            for write in writes {
                let pages = (write.offset / PAGE) as usize..;
                generations[pages][..(write.length / PAGE) as usize].fill(write.generation);
            }
        }
        let path: PathBuf = stage.root().join(Plan::copy_path(FILE));
        wrong_pages(&path, stage.plan().copy_clip(FILE), &generations, quiet)
    }
}

fn bridged(status: &Value) -> Option<u64> {
    let devices = status["devices"].as_array()?;
    let each = devices
        .iter()
        .filter_map(|device| device["write_bridged_bytes"].as_u64());
    Some(each.sum())
}

fn file_bytes(stage: &Stage) -> u64 {
    stage.plan().copy_bytes
}

/// Compare a file page by page with the expected generations.
fn wrong_pages(path: &Path, clip: Clip, generations: &[u32], quiet: bool) -> Result<u64> {
    let cannot = || format!("{} cannot be read", path.display());
    let mut file = File::open(path).with_context(cannot)?;
    let bar = read_progress(generations.len() as u64 * PAGE, quiet);
    let mut page = [0; PAGE_BYTES];
    let mut wrong = 0;
    for (index, generation) in (0..).zip(generations) {
        if index % 256 == 0 {
            go_on()?;
        }
        file.read_exact(&mut page).with_context(cannot)?;
        wrong += clip_of(clip, *generation).wrong_bytes(index * PAGE, &page);
        bar.inc(PAGE);
    }
    bar.finish_and_clear();
    Ok(wrong)
}

/// Wait until it ends; kill it at an interrupt.
fn wait(mut child: Child) -> Result<()> {
    loop {
        if let Some(status) = child.try_wait()? {
            ensure!(
                status.success(),
                "fio failed ({status}); its message stands above"
            );
            return Ok(());
        }
        if let Err(error) = pause(WATCH_EVERY) {
            let _ = child.kill();
            let _ = child.wait();
            return Err(error);
        }
    }
}

impl Outcome for ScatterReport {
    fn table(&self) -> Result<String> {
        let mut out = format!(
            "scatter: {} ({}): {} clients, {} writes of {} to {} KiB into a file of {:.0} MB\n",
            self.head.words(),
            self.head.file_system(),
            self.clients,
            self.writes,
            self.block_bytes_min >> 10,
            self.block_bytes_max >> 10,
            self.file_bytes as f64 / 1e6
        );
        let show = |count: Option<u64>| count.map_or("-".to_owned(), |count| count.to_string());
        // Writing to a String cannot fail.
        let _ = writeln!(
            out,
            "  {:.1} MB in {:.2} s ({:.1} MB/s), with the final sync of {:.2} s {:.1} MB/s",
            self.bytes as f64 / 1e6,
            self.wall_s,
            self.mb_per_s,
            self.final_sync_s,
            self.mb_per_s_synced
        );
        let _ = writeln!(
            out,
            "  the device was sent {} writes, {} bytes of gaps in them; wrong bytes {}; server CPU {:.2} s",
            show(self.device_write_count),
            show(self.bytes_bridged),
            show(self.bytes_wrong),
            self.server_cpu_s
        );
        for error in &self.errors {
            let _ = writeln!(out, "  {error}");
        }
        Ok(out)
    }

    /// A server that spoils bytes or fails a write has failed, however fast it is.
    ///
    /// Errors   the server has failed
    fn check(&self) -> Result<()> {
        ensure!(
            self.bytes_wrong.unwrap_or(0) == 0 && self.errors.is_empty(),
            "{} wrong bytes and {} clients that failed, expected none; the report above has them",
            self.bytes_wrong.unwrap_or(0),
            self.errors.len()
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fio_gets_the_same_load() {
        let scatter = Scatter {
            client_count: 8,
            bytes: 256 << 20,
            blocks: (4096, 65536),
            seed: 3,
            is_warm: false,
        };
        let arguments = scatter.fio_arguments(Path::new("/stage/clip.mov"), 1 << 30);
        assert_eq!(arguments[0], "--filename=/stage/clip.mov");
        for wanted in [
            "--bsrange=4096-65536",
            "--numjobs=8",
            "--io_size=33554432",
            "--size=1073741824",
        ] {
            assert!(arguments.iter().any(|one| one == wanted), "{wanted}");
        }
    }
}
