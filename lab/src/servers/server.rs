// SPDX-License-Identifier: Apache-2.0
//! The servers that the lab compares: Rushes, the same smbd without it, and that smbd with several
//! sets of options.
//!
//! All get the same smbd, the same disk and the same memory. A control group of `data_bytes` bounds
//! the rivals' page cache; Rushes' daemon and smbd together get that and [`OWN_BYTES`] for all
//! memory that is not cache. A process that makes one place of several disks, such as the mount of
//! a pool or mergerfs, is in the group, too.

use crate::clients::door::Address;
use crate::servers::cgroup::Cgroup;
use crate::servers::daemon::{self, Daemon};
use crate::servers::export::{self, Export};
use crate::servers::smbd::{self, Smbd};
use crate::stage::Stage;
use crate::stage::array::UnionMount;
use crate::stage::ground::Layout;
use crate::stage::room::{Room, interrupted};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Memory for the processes themselves, beside the cache; a rival gets a quarter of it. Units:
/// bytes.
pub const OWN_BYTES: u64 = 256 << 20;

/// Memory for each client's smbd when there are many, for every server. Units: bytes.
const CLIENT_BYTES: u64 = 8 << 20;
/// Memory for the process that makes one place of several disks, for every server on such a stage:
/// it holds requests of all clients at once. Units: bytes.
const MOUNT_BYTES: u64 = 256 << 20;
/// Clients for which the memory of the processes suffices.
const CLIENTS_WITHIN: u64 = 16;

/// Read-ahead of the tuned rival. Of 4, 8 and 16 MiB the last keeps most streams on `table5`.
/// Units: KiB.
const TUNED_READ_AHEAD_KIB: u64 = 16384;

/// Which server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Kind {
    /// smbd with our module, and the daemon.
    Rushes,
    /// smbd as it comes.
    Stock,
    /// smbd with the settings that its manual and the usual guides recommend for video.
    StockTuned,
    /// smbd that reserves a file's blocks before it writes beyond its end (`strict allocate`).
    StockStrict,
    /// The same through io_uring.
    StockUring,
    /// smbd that reads and writes through io_uring, and nothing else changed.
    #[value(name = "io_uring")]
    IoUring,
    /// smbd with our module, and no daemon.
    Absent,
}

impl Kind {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Rushes => "rushes",
            Kind::Stock => "stock",
            Kind::StockTuned => "stock-tuned",
            Kind::StockStrict => "stock-strict",
            Kind::StockUring => "stock-uring",
            Kind::IoUring => "io_uring",
            Kind::Absent => "absent",
        }
    }

    /// True if smbd has our module.
    fn has_module(self) -> bool {
        matches!(self, Kind::Rushes | Kind::Absent)
    }
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// The way by which clients reach the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Way {
    /// SMB over loopback.
    Smb,
    /// NFS over loopback: a pool, and Debian's Ganesha. Players, recorders, copiers.
    Nfs,
    /// Calls on the mount itself.
    Local,
}

impl Way {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Way::Smb => "smb",
            Way::Nfs => "nfs",
            Way::Local => "local",
        }
    }
}

/// The server to start.
#[derive(Clone, Debug)]
pub struct Spec {
    /// Which server.
    pub kind: Kind,
    /// The way of its clients.
    pub way: Way,
    /// Memory for cached data. Units: bytes.
    pub cache_bytes: u64,
    /// False: Rushes without pattern analyser.
    pub analyser: bool,
    /// The players' preroll in Rushes' configuration.
    pub preroll: Duration,
    /// The footage's rate in Rushes' configuration; `None`: Rushes must find it out. Units: bits a
    /// second.
    pub bitrate: Option<u64>,
    /// Frames a second of a sequence, in thousandths, instead of a bitrate.
    pub frames_per_kilosecond: Option<u64>,
    /// Further lines of the share.
    pub smb_options: Vec<(String, String)>,
    /// Further lines of `[server]` in rushes.toml.
    pub rushes_options: Vec<(String, String)>,
    /// Further lines of `[write]` in rushes.toml.
    pub write_options: Vec<(String, String)>,
    /// Further lines of the `[[share]]` in rushes.toml.
    pub share_options: Vec<(String, String)>,
    /// Read-ahead of the device for this run. Units: KiB.
    pub read_ahead_kib: Option<u64>,
    /// A device model measured before; `None`: the setup measures one.
    pub model: Option<PathBuf>,
    /// Our module; `None`: the one in the usual places.
    pub module: Option<PathBuf>,
    /// The share accepts guests, too: [`rushes_kit::wire`] connects as one.
    pub nameless: bool,
    /// Number of clients.
    pub client_count: u64,
    /// Rushes' write buffer; a rival's cache is so much larger. 0: Rushes takes no writes. Units:
    /// bytes.
    pub write_buffer_bytes: u64,
}

impl Spec {
    /// Memory for bytes of files, read or written. Units: bytes.
    pub fn data_bytes(&self) -> u64 {
        self.cache_bytes + self.write_buffer_bytes
    }

    /// Memory for everything else. Units: bytes.
    fn own_bytes(&self) -> u64 {
        let own = match self.kind {
            Kind::Rushes => OWN_BYTES,
            // Page cache and processes share one limit, and smbd's own memory must not shrink the
            // cache.
            _ => OWN_BYTES / 4,
        };
        own + self.client_count.saturating_sub(CLIENTS_WITHIN) * CLIENT_BYTES
    }

    /// Checks that this server can serve that stage.
    fn check(&self, stage: &Stage) -> Result<()> {
        let layout = stage.layout();
        let stands = match self.kind {
            Kind::Rushes => layout == Layout::Plain || layout.is_pool(),
            Kind::Absent => layout == Layout::Plain,
            _ => true,
        };
        ensure!(
            stands,
            "{} cannot use `--layout {}`; with rushes give pool or pool-striped, the others are \
             for stock",
            self.kind,
            layout.name()
        );
        ensure!(
            self.model.is_none() || stage.disk_count() == 1,
            "--model is of one disk, and these are {}; leave it out, and all are measured",
            stage.disk_count()
        );
        ensure!(
            self.way != Way::Nfs || layout.is_pool() || self.kind == Kind::Stock,
            "`--door nfs` is the export of a pool, or of what stock has; give --layout pool or --server stock as well"
        );
        ensure!(
            self.way == Way::Smb || matches!(self.kind, Kind::Stock | Kind::Rushes),
            "`--door local` does without SMB, where only stock and rushes differ; use --door smb \
             for {}",
            self.kind
        );
        Ok(())
    }
}

/// A running server.
#[derive(Debug)]
pub struct Server {
    // Dropped in this order: clients of the daemon before the daemon, processes before their group.
    smbd: Option<Smbd>,
    export: Option<Export>,
    mount: Option<UnionMount>,
    daemon: Option<Daemon>,
    cgroup: Cgroup,
    address: Address,
    settings: Value,
    read_ahead_before: Option<u64>,
}

impl Server {
    /// Start it over a stage. `name`: the name of its folder in the room.
    ///
    /// Errors   a part is not built or not installed, which the error names, or did not come up
    pub fn start(room: &Room, name: &str, stage: &Stage, spec: &Spec) -> Result<Server> {
        spec.check(stage)?;
        let mount_bytes = stage.array().map_or(0, |_| MOUNT_BYTES);
        let memory_bytes = spec.data_bytes() + spec.own_bytes() + mount_bytes;
        let cgroup = Cgroup::create(room, name, memory_bytes)?;
        let daemon = match spec.kind {
            Kind::Rushes => Some(Daemon::start(room, name, stage, spec, &cgroup)?),
            _ => None,
        };
        let mount = match stage.array() {
            Some(array) => array.serve(&daemon::runtime_folder(room, name), &cgroup)?,
            None => None,
        };
        if let (Some(daemon), Some(mount)) = (&daemon, &mount) {
            daemon.wait_for_doors(stage.disk_count(), &|| mount.log_tail())?;
        }
        // A mount has a read-ahead of its own.
        let tuned = spec.kind == Kind::StockTuned;
        let read_ahead = spec
            .read_ahead_kib
            .or(tuned.then_some(TUNED_READ_AHEAD_KIB));
        let read_ahead_before = match read_ahead {
            Some(kib) => Some(stage.set_read_ahead(kib)?),
            None => None,
        };
        let smb = smb_spec(room, name, stage, spec)?;
        let smbd = match spec.way {
            Way::Smb => Some(smbd::start(room, &format!("{name}-smbd"), &smb, &cgroup)?),
            Way::Nfs | Way::Local => None,
        };
        let export = match spec.way {
            Way::Nfs => Some(Export::start(
                room,
                name,
                (stage.root(), stage.is_pool()),
                &cgroup,
            )?),
            Way::Smb | Way::Local => None,
        };
        let home = room.folder("client-home")?;
        crate::clients::door::client_home(&home)?;
        let nfs = export.as_ref().map(|export| Address::Nfs {
            port: export.port(),
            export: export::EXPORT.to_owned(),
        });
        let address = match &smbd {
            Some(smbd) => Address::Smb {
                port: smbd.port(),
                share: smbd::SHARE.to_owned(),
                user: smbd::USER.to_owned(),
                password: smbd::PASSWORD.to_owned(),
                home,
            },
            // The mount of a pool is itself a door of the daemon.
            None if daemon.is_some() && mount.is_none() => Address::Rushes {
                root: stage.root().to_owned(),
                socket: session_socket(room, name),
                share: smbd::SHARE.to_owned(),
            },
            None => nfs.unwrap_or_else(|| Address::Local(stage.root().to_owned())),
        };
        let settings = json!({
            "server": spec.kind.name(),
            "smbd": if smbd.is_some() { smbd::version()? } else { String::new() },
            "share_options": pairs(&smb.share),
            "global_options": pairs(&smb.global),
            "read_ahead_kib": stage.read_ahead(),
            "memory_bytes_max": memory_bytes,
            "rushes_toml": daemon.as_ref().map(Daemon::config_text),
        });
        Ok(Server {
            smbd,
            export,
            mount,
            daemon,
            cgroup,
            address,
            settings,
            read_ahead_before,
        })
    }

    /// Its address for clients.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The daemon, where there is one.
    pub fn daemon(&self) -> Option<&Daemon> {
        self.daemon.as_ref()
    }

    /// CPU time of smbd and daemon so far.
    pub fn cpu(&self) -> Result<Duration> {
        self.cgroup.cpu()
    }

    /// The most memory that they held. Units: bytes.
    pub fn memory_bytes_peak(&self) -> Result<u64> {
        self.cgroup.memory_bytes_peak()
    }

    /// The control group, to run a local client in.
    pub fn cgroup(&self) -> &Cgroup {
        &self.cgroup
    }

    /// The settings that distinguish it.
    pub fn settings(&self) -> &Value {
        &self.settings
    }

    /// The logs' ends, for messages.
    pub fn log_tail(&self) -> String {
        let smbd = self.smbd.as_ref().map(Smbd::log_tail).unwrap_or_default();
        let export = self.export.as_ref().map(Export::log_tail);
        let mount = self.mount.as_ref().map(UnionMount::log_tail);
        let daemon = self.daemon.as_ref().map(Daemon::log_tail);
        format!(
            "{smbd}\n{}\n{}\n{}",
            export.unwrap_or_default(),
            mount.unwrap_or_default(),
            daemon.unwrap_or_default()
        )
        .trim()
        .to_owned()
    }

    /// Stop it after this work, and the timing of the stage's slow disks.
    ///
    /// Errors   the work's, with the ends of the logs unless the run was interrupted; or the server
    /// did not stop
    pub fn stop_after<T>(self, stage: &Stage, kind: Kind, done: Result<T>) -> Result<T> {
        let done = done.map_err(|error| match interrupted() {
            true => error,
            false => error.context(format!("the last output of {kind}:\n{}", self.log_tail())),
        });
        stage.timing(false)?;
        self.stop(stage)?;
        done
    }

    /// Stop it and put the stage's settings back.
    pub fn stop(mut self, stage: &Stage) -> Result<()> {
        let restored = match self.read_ahead_before.take() {
            Some(kib) => stage.set_read_ahead(kib).map(drop),
            None => Ok(()),
        };
        self.smbd = None;
        self.export = None;
        self.mount = None;
        self.daemon = None;
        restored
    }
}

fn pairs(options: &[(String, String)]) -> Value {
    options
        .iter()
        .map(|(key, value)| (key.clone(), Value::from(value.clone())))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

fn session_socket(room: &Room, name: &str) -> PathBuf {
    daemon::runtime_folder(room, name).join("session.sock")
}

fn smb_spec(room: &Room, name: &str, stage: &Stage, spec: &Spec) -> Result<smbd::Spec> {
    let option = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    let mut share = Vec::new();
    let mut global = Vec::new();
    let mut module = None;
    // Over the mount of a pool the module would only be a second way to the same daemon.
    if spec.kind.has_module() && !stage.is_pool() {
        module = Some(find_module(spec.module.as_deref())?);
        share.push(option("vfs objects", "rushes"));
        let socket = session_socket(room, name);
        share.push(option("rushes:socket", &socket.display().to_string()));
        share.push(option(
            "rushes:recover",
            &daemon::recover_command(room, name),
        ));
    }
    if spec.kind == Kind::StockTuned {
        // From smb.conf(5), vfs_io_uring(8) and the common advice of guides for video servers.
        share.push(option("vfs objects", "io_uring"));
        share.push(option("strict locking", "no"));
        share.push(option("posix locking", "no"));
        share.push(option("kernel share modes", "no"));
        global.push(option("use sendfile", "yes"));
        global.push(option("min receivefile size", "16384"));
        global.push(option("aio read size", "1"));
        global.push(option("aio write size", "1"));
        global.push(option("aio max threads", "200"));
        global.push(option(
            "socket options",
            "TCP_NODELAY IPTOS_LOWDELAY SO_RCVBUF=2097152 SO_SNDBUF=2097152",
        ));
        global.push(option("kernel oplocks", "no"));
    }
    if matches!(spec.kind, Kind::StockStrict | Kind::StockUring) {
        share.push(option("strict allocate", "yes"));
    }
    if matches!(spec.kind, Kind::StockUring | Kind::IoUring) {
        let module = smbd::installed_module("io_uring.so")?;
        ensure!(
            module.exists(),
            "this Samba has no module io_uring ({} is not there); install it \
             (Debian: apt-get install samba-vfs-modules) or leave {} out",
            module.display(),
            spec.kind
        );
        share.push(option("vfs objects", "io_uring"));
    }
    if spec.nameless {
        share.push(option("guest ok", "yes"));
        share.push(option("force user", smbd::USER));
    }
    share.extend(spec.smb_options.iter().cloned());
    Ok(smbd::Spec {
        share_path: stage.root().to_owned(),
        global,
        share,
        module,
    })
}

/// Finds `rushes.so`: the one told, the one built in this tree, or the installed one.
pub fn find_module(told: Option<&Path>) -> Result<PathBuf> {
    if let Some(path) = told {
        ensure!(
            path.exists(),
            "the module {} (--module) does not exist; build it (make build), or name another",
            path.display()
        );
        return Ok(path.to_owned());
    }
    let built = ancestors_of_binary().map(|folder| folder.join("build/rushes.so"));
    let installed = smbd::installed_module("rushes.so");
    built
        .chain(installed.ok())
        .find(|path| path.exists())
        .context("rushes.so was not found: `make build` puts it into build/, `--module FILE` names another")
}

/// The current folder and the path of this program, with all folders above them.
pub fn ancestors_of_binary() -> impl Iterator<Item = PathBuf> {
    let here = std::env::current_dir().unwrap_or_default();
    let binary = std::env::current_exe().unwrap_or_default();
    let mut folders: Vec<PathBuf> = here.ancestors().map(Path::to_owned).collect();
    folders.extend(binary.ancestors().map(Path::to_owned));
    folders.into_iter()
}
