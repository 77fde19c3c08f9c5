// SPDX-License-Identifier: Apache-2.0
//! People at work: timelines, scrubbing, shuttling, conforming, and mixes of them, against several
//! servers in turn.
//!
//! A way of working is data ([`workload`]), drawn from a seed into a list of one client's reads and
//! writes ([`script`]); a process for each client works through its list ([`editor`]). All servers
//! of a round get the same lists, one server after the other, each over a cold stage; the next
//! round draws others. Absent: the admission of seats. An editor sees frames alone.

pub mod args;
pub mod editor;
pub mod edl;
pub mod media;
pub mod passes;
pub mod picture;
pub mod report;
pub mod script;
pub mod workload;

use crate::clients::client::{Client, Crowd};
use crate::clients::copies::{Copies, Tally};
use crate::clients::door::Address;
use crate::clients::player::{now_ns, sleep_until_ns};
use crate::experiments::compare::Contender;
use crate::experiments::play::{COPIES_LEAD, REEL_BYTES_OVER_CACHE, REELS_PER_COPIER, reels};
use crate::reports::head::Head;
use crate::reports::outcome::Outcome;
use crate::reports::report::{Processors, environment};
use crate::servers::server::{self, Kind, Server, Way};
use crate::stage::room::{Room, go_on, pause};
use crate::stage::{MATERIAL, Plan, Stage};
use anyhow::{Context, Result, bail, ensure};
use editor::{Edited, Job};
use media::Original;
use passes::DiskMarks;
use report::{ClientRow, EditReport, EditRun, KindRow};
use script::{Passes, Script};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use workload::{Mix, OUTPUT, Part, Scene};

const STATUS_EVERY: Duration = Duration::from_millis(1000);
/// From the last message to the clients until the first begins.
const LEAD: Duration = Duration::from_millis(300);
const COPY: &str = "copy";
/// The hidden subcommand of a client.
const EDITOR: &str = "editor";

/// One comparison.
#[derive(Clone, Debug)]
pub struct Edit {
    /// How servers are set up; `contenders` says which they are.
    pub server: server::Spec,
    /// The servers, in turn.
    pub contenders: Vec<Contender>,
    /// The clients of a run, in turn.
    pub mixes: Vec<Mix>,
    /// How often each mix runs against each server.
    pub rounds: u64,
    /// Files of footage that cut lists use.
    pub file_count: u64,
    /// Size of each, rounded down to whole frames. Units: bytes.
    pub file_bytes: u64,
    /// Units: bits a second.
    pub bitrate: u64,
    /// Frames in 1000 s.
    pub frames_per_kilosecond: u64,
    /// How long each client works; with a list, in one pass over it.
    pub seconds: f64,
    /// How often each list is repeated.
    pub again: u64,
    /// From the last frame of a pass to the first of the next.
    pub rest: Duration,
    /// Memory for cached data by `--cache`; without it the server's, or less where lists are
    /// repeated. Units: bytes.
    pub cache_told: Option<u64>,
    /// A frame is late when it comes so long after its time.
    pub late: Duration,
    /// Time between the starts of two clients.
    pub stagger: Duration,
    /// How long a run that collapsed goes on.
    pub grace: Duration,
    /// Metadata of the footage is as cold as the footage.
    pub cold_metadata: bool,
    /// Report the lateness of every frame.
    pub timeline: bool,
    /// Seed of content and cut lists.
    pub seed: u64,
    /// Real files in place of made-up footage, as many as `file_count`; none: the footage is made
    /// up.
    pub originals: Vec<Original>,
    /// The folder for raw reports, the table and plots.
    pub out: Option<PathBuf>,
}

impl Edit {
    /// The files that the stage must at least hold.
    pub fn plan(&self) -> Plan {
        let copies = self.mixes.iter().map(Mix::copy_count).max().unwrap_or(0);
        let plan = Plan {
            seed: self.seed,
            stream_count: self.file_count,
            bitrate: self.bitrate,
            frames_per_kilosecond: self.frames_per_kilosecond,
            frame_count: 0,
            sequence: false,
            copy_count: copies * REELS_PER_COPIER,
            copy_bytes: self.server.data_bytes() + REEL_BYTES_OVER_CACHE,
            entry_count: 0,
        };
        Plan {
            frame_count: (self.file_bytes / plan.frame_bytes().max(1)).max(1),
            ..plan
        }
    }

    /// Room for the files beside the footage that the lab makes and clients write. Units: bytes.
    pub fn room_bytes(&self) -> u64 {
        let plan = self.plan();
        let scene = self.scene(&plan, Passes::default());
        let material: u64 = self.material(&scene).iter().map(|file| file.bytes).sum();
        let written = |mix: &Mix| match mix.writes() {
            true => mix.client_count() * self.file_bytes,
            false => 0,
        };
        material + self.mixes.iter().map(written).max().unwrap_or(0)
    }

    fn scene<'a>(&'a self, plan: &'a Plan, passes: Passes) -> Scene<'a> {
        Scene {
            plan,
            originals: &self.originals,
            seconds: self.seconds,
            passes,
        }
    }

    /// The first client begins a pass one rest after the last client has ended the pass before.
    fn passes(&self, mix: &Mix) -> Passes {
        let others = mix.client_count().saturating_sub(1);
        let length = (self.seconds * 1e9) as u64 + self.stagger.as_nanos() as u64 * others;
        Passes {
            count: self.again + 1,
            every_ns: length + self.rest.as_nanos() as u64,
        }
    }

    /// The clients of a mix; each round draws other cuts.
    fn draw(&self, mix: &Mix, plan: &Plan, round: u64) -> Vec<Part> {
        let scene = self.scene(plan, self.passes(mix));
        mix.draw(&scene, self.seed.wrapping_add((round - 1) << 32))
    }

    /// The server's memory for cached data with these clients. Units: bytes.
    fn cache_bytes(&self, parts: &[Part]) -> Result<u64> {
        if self.again == 0 {
            return Ok(self.server.cache_bytes);
        }
        let list_bytes = passes::list_bytes(parts);
        passes::cache_bytes(list_bytes, self.cache_told, self.server.write_buffer_bytes)
    }

    /// Checks that lists that clients repeat do not fit into the cache.
    ///
    /// Errors   the lists of a mix are too short for that
    pub fn check_lists(&self) -> Result<()> {
        let plan = self.plan();
        for mix in &self.mixes {
            self.cache_bytes(&self.draw(mix, &plan, 1))
                .with_context(|| mix.to_string())?;
        }
        Ok(())
    }

    fn material(&self, scene: &Scene<'_>) -> Vec<script::Source> {
        let all = self.mixes.iter().flat_map(|mix| mix.material(scene));
        let mut all: Vec<script::Source> = all.collect();
        all.sort_by(|a, b| a.path.cmp(&b.path));
        all.dedup_by(|a, b| a.path == b.path);
        all
    }

    /// One of the mixes has programs that read the disks themselves.
    pub fn has_beside(&self) -> bool {
        self.mixes.iter().any(|mix| mix.beside_count() > 0)
    }

    /// One of the mixes has clients that write.
    pub fn writes(&self) -> bool {
        self.mixes.iter().any(Mix::writes)
    }

    fn check(&self) -> Result<()> {
        let copies = self.mixes.iter().any(|mix| mix.copy_count() > 0);
        ensure!(
            !copies || matches!(self.server.way, Way::Smb | Way::Nfs),
            "copies go over SMB or NFS; leave `copy` out of the mix, or use --door smb or nfs"
        );
        let rushes = self.contenders.iter().any(|one| one.kind == Kind::Rushes);
        ensure!(
            !(self.writes() && self.server.way == Way::Local && rushes),
            "over `--door local` the lab only reads through the daemon; leave out what writes (render, grow), or use --door smb"
        );
        Ok(())
    }

    /// Runs all rounds. The stage must cover [`Edit::plan`].
    ///
    /// Errors   the setup failed; a late frame is not an error but a figure
    pub fn run(&self, room: &Room, stage: &mut Stage) -> Result<EditReport> {
        self.check()?;
        ensure!(
            stage.plan().covers(&self.plan()),
            "the stage does not hold what this run needs"
        );
        if let Some(out) = &self.out {
            std::fs::create_dir_all(out)
                .with_context(|| format!("{} cannot be made", out.display()))?;
        }
        self.make_material(stage)?;
        let mut runs = Vec::new();
        for round in 1..=self.rounds {
            for mix in &self.mixes {
                for contender in &self.contenders {
                    go_on()?;
                    let run = self.run_once(room, stage, (*contender, mix, round))?;
                    eprintln!("{}", run.line());
                    self.keep(&run, runs.len() + 1)?;
                    runs.push(run);
                }
            }
        }
        let mut report = self.describe(stage, runs);
        if let Some(out) = &self.out {
            std::fs::write(out.join("table.md"), report.table()?)?;
            picture::draw(&report.runs, &report.medians, report.late_ms, out)?;
        }
        if !self.timeline {
            let rows = report.runs.iter_mut().flat_map(|run| &mut run.per_client);
            rows.for_each(|row| row.lateness_ms = None);
        }
        Ok(report)
    }

    fn keep(&self, run: &EditRun, serial: usize) -> Result<()> {
        let Some(out) = &self.out else {
            return Ok(());
        };
        let mix = run.mix.replace(['=', ','], "-").replace('/', "_");
        let file = out.join(format!(
            "{serial:03}-{}-{mix}-{}.json",
            run.server, run.round
        ));
        std::fs::write(&file, serde_json::to_vec(run)?)
            .with_context(|| format!("{} cannot be written", file.display()))
    }

    /// Makes the files beside the footage, once for all runs.
    fn make_material(&self, stage: &Stage) -> Result<()> {
        let material = self.material(&self.scene(stage.plan(), Passes::default()));
        if material.is_empty() {
            return Ok(());
        }
        stage.timing(false)?;
        stage.make_folder_anew(MATERIAL)?;
        for file in &material {
            stage.write_material(&file.path, file.clip(stage.plan().seed), file.bytes)?;
        }
        stage.own_everything()
    }

    fn run_once(
        &self,
        room: &Room,
        stage: &mut Stage,
        (contender, mix, round): (Contender, &Mix, u64),
    ) -> Result<EditRun> {
        // Rounds differ, servers of one round do not.
        let parts = self.draw(mix, stage.plan(), round);
        let cache_bytes = self.cache_bytes(&parts)?;
        stage.timing(false)?;
        if mix.writes() {
            stage.make_folder_anew(OUTPUT)?;
        }
        stage.cool()?;
        if !self.cold_metadata {
            stage.look_through()?;
        }
        let spec = server::Spec {
            kind: contender.kind,
            analyser: contender.analyser,
            cache_bytes,
            client_count: parts.len() as u64 + mix.copy_count() - mix.beside_count(),
            ..self.server.clone()
        };
        let server = Server::start(room, "server", stage, &spec)?;
        let performed = self.perform(room, stage, &server, &parts, mix);
        let performed = server.stop_after(stage, spec.kind, performed)?;
        let (mut run, mut edited, t0, tally) = performed;
        if mix.writes() {
            stage.cool()?;
            check_written(stage, &parts, &mut edited)?;
        }
        self.check_real(&mut edited)?;
        run.server = contender.to_string();
        run.mix = mix.to_string();
        run.round = round;
        run.clients = parts.len() as u64 + mix.copy_count();
        run.cache_bytes_max = spec.data_bytes();
        run.list_bytes = (self.again > 0).then(|| passes::list_bytes(&parts));
        add_clients(&mut run, &parts, &edited, t0);
        if let Some(tally) = tally {
            add_copies(&mut run, mix.copy_count(), tally);
        }
        Ok(run)
    }

    fn perform(
        &self,
        room: &Room,
        stage: &Stage,
        server: &Server,
        parts: &[Part],
        mix: &Mix,
    ) -> Result<(EditRun, Vec<Edited>, u64, Option<Tally>)> {
        let whole_ns = self.whole_ns(stage, mix);
        let mut clients = self.start_clients(server, parts, stage, whole_ns)?;
        stage.timing(true)?;
        stage.reset_statistics()?;
        let copies = match mix.copy_count() {
            0 => None,
            count => Some(Copies::start(room, server.address(), reels(stage, count))?),
        };
        let lead = if copies.is_some() { COPIES_LEAD } else { LEAD };
        let t0 = now_ns() + lead.as_nanos() as u64;
        for (client, part) in clients.iter_mut().zip(parts) {
            client.begin(t0 + part.client * self.stagger.as_nanos() as u64)?;
        }
        sleep_until_ns(t0);
        let cpu_before = server.cpu()?;
        let machine_before = Processors::now();
        let copied_before = copies.as_ref().map_or(0, Copies::bytes);
        let passes = self.passes(mix);
        let mut marks = DiskMarks::begin(stage, t0, passes, self.rest)?;
        let crowd = Crowd::<Edited>::gather(clients);
        let mut status = Value::Null;
        let mut errors = Vec::new();
        let copies_end = t0 + whole_ns;
        while !crowd.is_done() || (parts.is_empty() && now_ns() < copies_end) {
            pause(STATUS_EVERY.min(marks.wait().unwrap_or(STATUS_EVERY)))?;
            marks.look(stage)?;
            if let Some(daemon) = server.daemon() {
                // If the daemon does not answer, the next round asks again; if it died, the figures
                // show it.
                match daemon.status() {
                    Ok(said) => status = said,
                    Err(error) => errors = vec![format!("{error:#}")],
                }
            }
        }
        let wall_s = (now_ns() - t0) as f64 / 1e9;
        let machine = Processors::now().since(machine_before);
        let server_cpu_s = (server.cpu()? - cpu_before).as_secs_f64();
        let tally = copies.map(Copies::stop).map(|tally| Tally {
            bytes: tally.bytes - copied_before,
            ..tally
        });
        let disk_statistics = stage.statistics()?;
        let (block_statistics, passes) = marks.end(stage, passes)?;
        let edited = crowd.results()?;
        let run = EditRun {
            wall_s,
            server_cpu_s,
            clients_cpu_s: edited.iter().map(|one| one.cpu_s).sum(),
            machine_cpu_s: machine.busy_s,
            stolen_cpu_s: machine.stolen_s,
            server_memory_bytes_peak: server.memory_bytes_peak()?,
            errors,
            settings: server.settings().clone(),
            disk_statistics,
            block_statistics,
            passes,
            device_model: server
                .daemon()
                .map_or(Value::Null, |daemon| daemon.model().clone()),
            status,
            ..EditRun::default()
        };
        Ok((run, edited, t0, tally))
    }

    /// How long a client without a clock works. Units: ns.
    fn whole_ns(&self, stage: &Stage, mix: &Mix) -> u64 {
        (self.scene(stage.plan(), self.passes(mix)).whole_s() * 1e9) as u64
    }

    fn start_clients(
        &self,
        server: &Server,
        parts: &[Part],
        stage: &Stage,
        length_ns: u64,
    ) -> Result<Vec<Client>> {
        let mut natives = Natives::default();
        let mut clients = Vec::new();
        for part in parts {
            let mut job = Job {
                address: server.address().clone(),
                script: part.script.clone(),
                seed: stage.plan().seed,
                late_ns: self.late.as_nanos() as u64,
                length_ns,
                grace_ns: self.grace.as_nanos() as u64,
            };
            clients.push(match part.is_beside {
                true => {
                    job.address = Address::Disk(stage.root().to_owned());
                    natives.rename(&mut job.script, stage)?;
                    Client::start_beside(EDITOR, &job)?
                }
                false => Client::start(EDITOR, server, &job)?,
            });
        }
        for client in &mut clients {
            client.wait_ready()?;
        }
        Ok(clients)
    }

    /// Compare the pieces that clients read of real files with the originals.
    fn check_real(&self, edited: &mut [Edited]) -> Result<()> {
        for edited in edited {
            for (file, original) in self.originals.iter().enumerate() {
                let pieces = edited.hashed.iter().filter(|piece| piece.file == file);
                let pieces: Vec<&editor::Hashed> = pieces.collect();
                edited.bytes_wrong += media::wrong_bytes(original, &pieces)?;
            }
        }
        Ok(())
    }

    fn describe(&self, stage: &Stage, runs: Vec<EditRun>) -> EditReport {
        let plan = stage.plan();
        EditReport {
            head: Head::of("edit").on(stage).by(self.server.way),
            files: plan.stream_count,
            file_bytes: plan.frame_offset(plan.frame_count),
            bitrate: self.bitrate,
            frames_per_s: self.frames_per_kilosecond as f64 / 1e3,
            seconds: self.seconds,
            passes: self.again + 1,
            rest_ms: self.rest.as_secs_f64() * 1e3,
            late_ms: self.late.as_secs_f64() * 1e3,
            stagger_ms: self.stagger.as_secs_f64() * 1e3,
            seed: self.seed,
            cache_bytes_max: runs
                .iter()
                .map(|run| run.cache_bytes_max)
                .max()
                .unwrap_or(0),
            bytes_wrong: runs.iter().map(|run| run.bytes_wrong).sum(),
            stolen_cpu_s: runs.iter().map(|run| run.stolen_cpu_s).sum(),
            machine_cpu_s: runs.iter().map(|run| run.machine_cpu_s).sum(),
            medians: report::medians(&runs),
            runs,
            environment: environment(),
        }
    }
}

/// Paths of files for programs that read the disks themselves; each is looked up once.
#[derive(Debug, Default)]
struct Natives(BTreeMap<String, String>);

impl Natives {
    /// Gives files the paths that they have on their own file system.
    ///
    /// Errors   a file is on no disk, or on several: it is striped
    fn rename(&mut self, script: &mut Script, stage: &Stage) -> Result<()> {
        for source in &mut script.files {
            if let Some(known) = self.0.get(&source.path) {
                source.path.clone_from(known);
                continue;
            }
            let places = stage.native(&source.path)?;
            let [place] = places.as_slice() else {
                bail!(
                    "{} is {} files of the disks, expected one; direct readers take whole files: leave them out, or use \
                     --layout plain or pool",
                    source.path,
                    places.len()
                );
            };
            let place = place.display().to_string();
            self.0
                .insert(std::mem::replace(&mut source.path, place.clone()), place);
        }
        Ok(())
    }
}

/// Adds the rows of clients and of kinds, and their sums.
fn add_clients(run: &mut EditRun, parts: &[Part], edited: &[Edited], t0: u64) {
    for (part, edited) in parts.iter().zip(edited) {
        let row = ClientRow::new(part.client, &part.kind, &part.script, edited, t0);
        if let Some(error) = &row.error {
            let said = format!("client {} ({}): {error}", row.client, row.kind);
            run.errors.push(said);
        }
        run.per_client.push(row);
    }
    let mut kinds: Vec<&str> = parts.iter().map(|part| part.kind.as_str()).collect();
    kinds.sort_unstable();
    kinds.dedup();
    for kind in kinds {
        let all = run.per_client.iter().zip(edited);
        let mine: Vec<(&ClientRow, &Edited)> = all.filter(|(row, _)| row.kind == kind).collect();
        run.kinds.push(KindRow::new(kind, &mine));
    }
    run.frames = run.kinds.iter().map(|row| row.frames).sum();
    run.late_frames = run.kinds.iter().map(|row| row.late_frames).sum();
    run.bytes_wrong = run.kinds.iter().map(|row| row.bytes_wrong).sum();
    run.count_passes();
}

fn add_copies(run: &mut EditRun, clients: u64, tally: Tally) {
    run.bytes_wrong += tally.bytes_wrong;
    run.errors.extend(tally.failures);
    run.kinds.push(KindRow {
        kind: COPY.to_owned(),
        clients,
        mb_per_s: tally.bytes as f64 / 1e6 / run.wall_s.max(1e-9),
        bytes_read: tally.bytes,
        bytes_wrong: tally.bytes_wrong,
        ..KindRow::default()
    });
}

/// Read the files that clients wrote from the stage itself; bytes that differ count as the client's
/// wrong bytes.
fn check_written(stage: &Stage, parts: &[Part], edited: &mut [Edited]) -> Result<()> {
    let seed = stage.plan().seed;
    for (part, edited) in parts.iter().zip(edited) {
        edited.written.sort_unstable();
        edited.written.dedup();
        for (file, source) in part.script.files.iter().enumerate() {
            let pieces = edited.written.iter().filter(|piece| piece.0 == file);
            let mut pieces = pieces.peekable();
            if pieces.peek().is_none() {
                continue;
            }
            let path = stage.root().join(&source.path);
            let mut wrong = 0;
            let opened = File::open(&path).with_context(|| path.display().to_string())?;
            for (_, place, length) in pieces {
                wrong += wrong_bytes(&opened, source.clip(seed), *place, *length, &path)?;
            }
            edited.bytes_wrong += wrong;
        }
    }
    Ok(())
}

fn wrong_bytes(
    file: &File,
    clip: crate::stage::footage::Clip,
    place: u64,
    length: u64,
    path: &Path,
) -> Result<u64> {
    let mut buffer = vec![0; length as usize];
    let mut got = 0;
    while got < buffer.len() {
        let more = file
            .read_at(&mut buffer[got..], place + got as u64)
            .with_context(|| path.display().to_string())?;
        if more == 0 {
            break;
        }
        got += more;
    }
    Ok((buffer.len() - got) as u64 + clip.wrong_bytes(place, &buffer[..got]))
}
