// SPDX-License-Identifier: Apache-2.0
//! Clients that read and write files of their own from end to end, as fast as possible, all at
//! once: how much is that together, how even, and how much CPU time does it take?
//!
//! The timed reads compare one page of each block, so that the lab does not measure itself.
//! Afterwards clients read their files once more through the same door, the lab reads the written
//! files from the disks, and both compare every byte.

use crate::clients::client::{Client, Crowd};
use crate::clients::player::now_ns;
use crate::clients::work::{self, Load, Pattern};
use crate::experiments::record::sync;
use crate::reports::head::Head;
use crate::reports::outcome::Outcome;
use crate::reports::report::{self, environment};
use crate::servers::server::{self, Kind, Server, Way};
use crate::stage::footage::Clip;
use crate::stage::room::{Room, go_on, pause};
use crate::stage::{Plan, Stage};
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde_json::Value;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Read;
use std::time::Duration;

const BEGIN_IN: Duration = Duration::from_millis(300);
const WATCH_EVERY: Duration = Duration::from_millis(20);
/// Clip numbers of written files begin here, above those of files to read.
const WRITER_CLIP_BASE: u64 = 1 << 24;
const FOLDER: &str = "written";

/// The load.
#[derive(Clone, Debug)]
pub struct Throughput {
    /// Clients that read.
    pub reader_count: u64,
    /// Clients that write.
    pub writer_count: u64,
    /// Size of each file. Units: bytes.
    pub file_bytes: u64,
    /// Size of one request. Units: bytes.
    pub block_bytes: u64,
    /// All clients stop after this; 0: each at the end of its file. Units: s.
    pub seconds: f64,
}

/// One JSON object. Fields may be added, never renamed or given another unit.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ThroughputReport {
    /// Which experiment, server and disks.
    #[serde(flatten)]
    pub(crate) head: Head,
    /// The modelled disks had their volatile write cache; null on others.
    pub write_back: Option<bool>,
    /// Clients that read.
    pub readers: u64,
    /// Clients that write.
    pub writers: u64,
    /// Size of each file. Units: bytes.
    pub file_bytes: u64,
    /// Size of one request. Units: bytes.
    pub block_bytes: u64,
    /// All clients stopped after this; 0: each at the end of its file. Units: s.
    pub seconds: f64,
    /// Bytes received.
    pub bytes_read: u64,
    /// Bytes acknowledged.
    pub bytes_written: u64,
    /// From the beginning to the end of the last client.
    pub wall_s: f64,
    /// From then until the disks had everything; without writers 0.
    pub final_sync_s: f64,
    /// All bytes by `wall_s`.
    pub mb_per_s: f64,
    /// All bytes by `wall_s` and `final_sync_s`.
    pub mb_per_s_synced: f64,
    /// Mean rate of the clients, each by its own time.
    pub client_mb_per_s_mean: f64,
    /// Rate of the slowest client.
    pub client_mb_per_s_min: f64,
    /// Rate of each client, readers first.
    pub client_mb_per_s: Vec<f64>,
    /// Bytes that differ from those written, or are missing.
    pub bytes_wrong: u64,
    /// CPU time of the server, and of local clients, until the disks had everything.
    pub server_cpu_s: f64,
    /// CPU time of the whole machine meanwhile.
    pub machine_cpu_s: f64,
    /// CPU time that its host gave to others meanwhile.
    pub stolen_cpu_s: f64,
    /// CPU time of the modelled disks meanwhile; null on others.
    pub disks_cpu_s: Option<f64>,
    /// CPU time of the machine without the modelled disks, by GiB read and written.
    pub cpu_s_per_gib: f64,
    /// The most memory that the server held, cache included.
    pub server_memory_bytes_peak: u64,
    /// Memory that the server may use for cached data.
    pub cache_bytes_max: u64,
    /// Errors of clients.
    pub errors: Vec<String>,
    /// Settings that distinguish the server.
    pub settings: Value,
    /// The counts of the modelled disks during the run.
    pub disk_statistics: Value,
    /// The kernel's counts of the block devices during the run.
    pub block_statistics: Value,
    /// Last status of the daemon.
    pub status: Value,
    /// Machine and revision.
    pub environment: Value,
}

/// The report of a run so far, and the bytes that each writer wrote.
struct Performed {
    report: ThroughputReport,
    written: Vec<u64>,
}

impl Throughput {
    /// The files that the stage must hold; beside them it needs room for
    /// [`Throughput::written_bytes`].
    pub fn plan(&self, seed: u64) -> Plan {
        crate::experiments::trials::plan(seed, self.reader_count, self.file_bytes)
    }

    /// The most bytes that writers write. Units: bytes.
    pub fn written_bytes(&self) -> u64 {
        self.writer_count * self.file_bytes
    }

    /// Let the clients work, and judge.
    ///
    /// Errors   the setup failed; bad results of a server are not errors but figures
    pub fn run(
        &self,
        room: &Room,
        stage: &mut Stage,
        spec: &server::Spec,
    ) -> Result<ThroughputReport> {
        ensure!(
            self.reader_count + self.writer_count > 0,
            "no client reads or writes; give --readers or --writers"
        );
        ensure!(
            self.writer_count == 0
                || spec.way == Way::Smb
                || spec.kind == Kind::Stock
                || stage.is_pool(),
            "through the daemon's own door the lab only reads; use --door smb"
        );
        stage.timing(false)?;
        stage.cool()?;
        stage.look_through()?;
        stage.make_folder_anew(FOLDER)?;
        let server = Server::start(room, "server", stage, spec)?;
        let performed = self.perform(stage, &server);
        let performed = server.stop_after(stage, spec.kind, performed)?;
        let Performed {
            mut report,
            written,
        } = performed;
        stage.cool()?;
        for (writer, bytes) in (0..).zip(written) {
            report.bytes_wrong += self.wrong_bytes(stage, writer, bytes)?;
        }
        self.describe(&mut report, stage, spec);
        Ok(report)
    }

    fn job(&self, stage: &Stage, server: &Server, client: u64, load: Load) -> work::Job {
        let is_reader = client < self.reader_count;
        let (path, clip) = match is_reader {
            true => (Plan::copy_path(client), stage.plan().copy_clip(client)),
            false => {
                let writer = client - self.reader_count;
                (written_path(writer), written_clip(stage, writer))
            }
        };
        work::Job {
            address: server.address().clone(),
            path,
            clip: (clip.seed, clip.number),
            file_bytes: self.file_bytes,
            load,
            seed: stage.plan().seed,
        }
    }

    /// Start the first `count` clients and wait until they are connected.
    fn start(
        &self,
        stage: &Stage,
        server: &Server,
        count: u64,
        load: &dyn Fn(u64) -> Load,
    ) -> Result<Vec<Client>> {
        let mut clients = Vec::new();
        for client in 0..count {
            let job = self.job(stage, server, client, load(client));
            clients.push(Client::start("work", server, &job)?);
        }
        for client in &mut clients {
            client.wait_ready()?;
        }
        Ok(clients)
    }

    fn perform(&self, stage: &Stage, server: &Server) -> Result<Performed> {
        let count = self.reader_count + self.writer_count;
        let clients = self.start(stage, server, count, &|client| Load::Pass {
            block: self.block_bytes,
            write: client >= self.reader_count,
            seconds: self.seconds,
        })?;
        stage.timing(true)?;
        stage.reset_statistics()?;
        let blocks_before = stage.block_statistics()?;
        let disks_before = disks_cpu_s(stage)?;
        let cpu_before = server.cpu()?;
        let machine_before = report::Processors::now();
        let done = work_all(clients)?;
        let wall_s = done.iter().map(|done| done.seconds).fold(0.0, f64::max);
        let asked_ns = now_ns();
        if self.writer_count > 0 {
            sync(stage)?;
        }
        let synced_ns = now_ns();
        let machine = report::Processors::now().since(machine_before);
        let disks = disks_cpu_s(stage)?;
        let mut report = ThroughputReport {
            wall_s,
            final_sync_s: (synced_ns - asked_ns) as f64 / 1e9,
            machine_cpu_s: machine.busy_s,
            stolen_cpu_s: machine.stolen_s,
            disks_cpu_s: disks.zip(disks_before).map(|(later, then)| later - then),
            server_cpu_s: (server.cpu()? - cpu_before).as_secs_f64(),
            server_memory_bytes_peak: server.memory_bytes_peak()?,
            settings: server.settings().clone(),
            disk_statistics: stage.statistics()?,
            block_statistics: blocks_before.until(&stage.block_statistics()?),
            status: server
                .daemon()
                .and_then(|daemon| daemon.status().ok())
                .unwrap_or(Value::Null),
            ..ThroughputReport::default()
        };
        let (read, written) = done.split_at(self.reader_count as usize);
        report.add_clients(read, written);
        stage.timing(false)?;
        self.read_again(stage, server, &mut report)?;
        let written = written.iter().map(|done| done.bytes).collect();
        Ok(Performed { report, written })
    }

    /// Let clients read all files once more, without timing, and compare every byte.
    fn read_again(
        &self,
        stage: &Stage,
        server: &Server,
        report: &mut ThroughputReport,
    ) -> Result<()> {
        let load = Load::SequentialRead {
            block: self.block_bytes,
            rounds: 1,
        };
        let clients = self.start(stage, server, self.reader_count, &|_| load)?;
        for done in work_all(clients)? {
            report.bytes_wrong += done.bytes_wrong;
            report.errors.extend(done.error);
        }
        Ok(())
    }

    /// Wrong bytes among those acknowledged to a writer, read from the disks.
    fn wrong_bytes(&self, stage: &Stage, writer: u64, bytes: u64) -> Result<u64> {
        let path = stage.root().join(written_path(writer));
        let cannot = || format!("{} cannot be read", path.display());
        let mut file = File::open(&path).with_context(cannot)?;
        let length = file.metadata().with_context(cannot)?.len();
        let mut pattern = Pattern::new(written_clip(stage, writer), self.block_bytes);
        let mut found = vec![0; self.block_bytes as usize];
        let mut wrong = length.abs_diff(bytes);
        for offset in (0..bytes.min(length)).step_by(self.block_bytes as usize) {
            go_on()?;
            file.read_exact(&mut found).with_context(cannot)?;
            let expected = pattern.at(offset);
            if found != expected {
                wrong += found.iter().zip(expected).filter(|(a, b)| a != b).count() as u64;
            }
        }
        Ok(wrong)
    }

    fn describe(&self, report: &mut ThroughputReport, stage: &Stage, spec: &server::Spec) {
        report.head = Head::of("throughput")
            .on(stage)
            .by(spec.way)
            .with_server(spec.kind.name());
        report.write_back = stage.write_back();
        report.readers = self.reader_count;
        report.writers = self.writer_count;
        report.file_bytes = self.file_bytes;
        report.block_bytes = self.block_bytes;
        report.seconds = self.seconds;
        report.cache_bytes_max = spec.data_bytes();
        report.environment = environment();
    }
}

fn written_path(writer: u64) -> String {
    format!("{FOLDER}/reel{writer:03}.mxf")
}

fn written_clip(stage: &Stage, writer: u64) -> Clip {
    stage.plan().copy_clip(WRITER_CLIP_BASE + writer)
}

/// Let all clients begin, and wait for their results.
fn work_all(mut clients: Vec<Client>) -> Result<Vec<work::Done>> {
    let begin_ns = now_ns() + BEGIN_IN.as_nanos() as u64;
    for client in &mut clients {
        client.begin(begin_ns)?;
    }
    let crowd = Crowd::<work::Done>::gather(clients);
    while !crowd.is_done() {
        pause(WATCH_EVERY)?;
    }
    crowd.results()
}

fn disks_cpu_s(stage: &Stage) -> Result<Option<f64>> {
    Ok(stage.statistics()?["cpu_ms"].as_f64().map(|ms| ms / 1e3))
}

impl ThroughputReport {
    /// Compute the figures of the clients; the times are there already.
    fn add_clients(&mut self, read: &[work::Done], written: &[work::Done]) {
        let bytes = |all: &[work::Done]| all.iter().map(|done| done.bytes).sum::<u64>();
        self.bytes_read = bytes(read);
        self.bytes_written = bytes(written);
        let all = (self.bytes_read + self.bytes_written) as f64;
        self.mb_per_s = all / 1e6 / self.wall_s.max(1e-9);
        self.mb_per_s_synced = all / 1e6 / (self.wall_s + self.final_sync_s).max(1e-9);
        let own_cpu_s = self.machine_cpu_s - self.disks_cpu_s.unwrap_or(0.0);
        self.cpu_s_per_gib = own_cpu_s / (all / f64::from(1 << 30)).max(1e-9);
        for done in read.iter().chain(written) {
            self.bytes_wrong += done.bytes_wrong;
            self.errors.extend(done.error.clone());
            let rate = done.bytes as f64 / 1e6 / done.seconds.max(1e-9);
            self.client_mb_per_s.push(rate);
        }
        let count = self.client_mb_per_s.len().max(1) as f64;
        self.client_mb_per_s_mean = self.client_mb_per_s.iter().sum::<f64>() / count;
        let slowest = self.client_mb_per_s.iter().copied().reduce(f64::min);
        self.client_mb_per_s_min = slowest.unwrap_or(0.0);
    }
}

impl Outcome for ThroughputReport {
    fn table(&self) -> Result<String> {
        let mut out = format!(
            "throughput: {} over {}, {} ({}): {} read, {} write, in requests of {} KiB\n",
            self.head.server(),
            self.head.words_on_disks(),
            self.head.layout(),
            self.head.file_system(),
            self.readers,
            self.writers,
            self.block_bytes >> 10
        );
        // Writing to a String cannot fail.
        let _ = writeln!(
            out,
            "  {:.1} MB/s together in {:.2} s, with the final sync of {:.2} s {:.1} MB/s; mean client {:.1}, slowest {:.1} MB/s",
            self.mb_per_s,
            self.wall_s,
            self.final_sync_s,
            self.mb_per_s_synced,
            self.client_mb_per_s_mean,
            self.client_mb_per_s_min
        );
        let _ = writeln!(
            out,
            "  CPU {:.2} s a GiB, of the server {:.2} s in all, stolen {:.2} s; wrong bytes {}",
            self.cpu_s_per_gib, self.server_cpu_s, self.stolen_cpu_s, self.bytes_wrong
        );
        for error in &self.errors {
            let _ = writeln!(out, "  {error}");
        }
        Ok(out)
    }

    /// A server that spoils bytes or fails a client has failed, however fast it is.
    ///
    /// Errors   the server has failed
    fn check(&self) -> Result<()> {
        ensure!(
            self.bytes_wrong == 0 && self.errors.is_empty(),
            "{} wrong bytes and {} errors of clients, expected none; the report above has them",
            self.bytes_wrong,
            self.errors.len()
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_are_counted_each_by_his_own_time() {
        let client = |bytes: u64, seconds: f64| work::Done {
            bytes,
            seconds,
            ..work::Done::default()
        };
        let mut report = ThroughputReport {
            wall_s: 4.0,
            final_sync_s: 1.0,
            machine_cpu_s: 5.0,
            disks_cpu_s: Some(1.0),
            ..ThroughputReport::default()
        };
        report.add_clients(
            &[client(400_000_000, 4.0)],
            &[client(600_000_000, 2.0), client(200_000_000, 4.0)],
        );
        assert_eq!(
            (report.bytes_read, report.bytes_written),
            (400_000_000, 800_000_000)
        );
        assert_eq!((report.mb_per_s, report.mb_per_s_synced), (300.0, 240.0));
        assert_eq!(report.client_mb_per_s, [100.0, 300.0, 50.0]);
        assert_eq!(
            (report.client_mb_per_s_mean, report.client_mb_per_s_min),
            (150.0, 50.0)
        );
        let gib = 1.2e9 / f64::from(1 << 30);
        assert!((report.cpu_s_per_gib - 4.0 / gib).abs() < 1e-9);
        assert!(report.check().is_ok());
    }
}
