// SPDX-License-Identifier: Apache-2.0
//! NFS by NFS-Ganesha and its FSAL_VFS: the configuration, and the server.
//!
//! By default Ganesha caches names and attributes for a minute, during which a client would not see
//! changes by the mount, iSCSI or Samba. Both caches are off: the kernel's own below the mount
//! answers as fast, and is right. Ganesha also keeps files open that no client has open any more,
//! until there are very many: a file that another program removes would keep its space. Here it
//! closes them after seconds.

use crate::error::ExportError;
use crate::keep::Server;
use crate::mount::Mount;
use crate::program;
use crate::refusal::NfsRefusal;
use rustix::fs::OFlags;
use rustix::process::{Pid, Signal, kill_process};
use std::fmt::Write;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// It is killed after this time. It has no data that the kernel lacks.
const STOP_WITHIN: Duration = Duration::from_secs(10);

/// The rights that a client's users have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Squash {
    /// Users keep the ids that the client sends; its root becomes the anonymous user.
    #[default]
    Root,
    /// All users become the anonymous user.
    All,
    /// Users keep the ids that the client sends, root too.
    None,
}

/// One folder, for some clients.
#[derive(Clone, Debug)]
pub struct NfsExport {
    /// A mount or a folder in it; canonical.
    pub folder: PathBuf,
    /// The name that clients mount: `/media`.
    pub name: String,
    /// The address on which it listens.
    pub listen: SocketAddr,
    /// Addresses, networks (`192.168.7.0/24`), host names.
    pub clients: Vec<String>,
    /// No client may write.
    pub read_only: bool,
    /// Accepts clients from ports that any program may use: then any user of a client, or of this
    /// machine, can claim to be another user.
    pub any_port: bool,
    /// The rights that users have.
    pub squash: Squash,
    /// User and group of the anonymous user.
    pub anonymous: Option<(u32, u32)>,
    /// Also NFSv3, with its mount protocol on this port.
    pub v3_mount_port: Option<u16>,
    /// How long clients have after a restart to reclaim their open files. Units: seconds.
    pub grace_s: u32,
    /// Configuration and process id; goes with a reboot.
    pub runtime: PathBuf,
    /// The clients that had files open; must outlive a reboot.
    pub state: PathBuf,
}

impl NfsExport {
    /// The configuration for `ganesha.nfsd`.
    ///
    /// Errors   Refused: Ganesha cannot get this setting, or must not
    pub fn configuration(&self, mount: &Mount) -> Result<String, ExportError> {
        self.check(mount)?;
        let (high, low) = ((mount.pool().0 >> 64) as u64, mount.pool().0 as u64);
        let protocols = if self.v3_mount_port.is_some() {
            "3, 4"
        } else {
            "4"
        };
        let access = if self.read_only { "RO" } else { "RW" };
        let squash = match self.squash {
            Squash::Root => "root_squash",
            Squash::All => "all_squash",
            Squash::None => "no_root_squash",
        };
        let mut text = format!(
            "# Written by `rushes pool export nfs` at each start: change it by its options, not here.\n\
             NFS_CORE_PARAM {{\n\
             \x20   Bind_addr = {}; NFS_Port = {}; Protocols = {protocols};\n\
             \x20   MNT_Port = {}; NLM_Port = 0; Enable_NLM = false; Enable_RQUOTA = false; Enable_UDP = false;\n\
             \x20   mount_path_pseudo = true; fsid_device = false;\n\
             }}\n",
            self.listen.ip(),
            self.listen.port(),
            self.v3_mount_port.unwrap_or(0),
        );
        // Clients renew within the lease, so it must be shorter than the time they have to come
        // back.
        let _ = write!(
            text,
            "NFSv4 {{\n\
             \x20   Grace_Period = {}; Lease_Lifetime = {}; Minor_Versions = 0, 1, 2;\n\
             \x20   RecoveryBackend = fs; RecoveryRoot = {};\n\
             \x20   Only_Numeric_Owners = true; Allow_Numeric_Owners = true;\n\
             }}\n\
             NFS_KRB5 {{ Active_krb5 = false; }}\n\
             # Changes by other doors are seen at once.\n\
             MDCACHE {{ Dir_Chunk = 0; FD_LWMark_Percent = 0; LRU_Run_Interval = 5; Reaper_Work_Per_Lane = 1000; }}\n\
             EXPORT_DEFAULTS {{ Attr_Expiration_Time = 0; }}\n",
            self.grace_s,
            (self.grace_s / 2).max(1),
            quoted(&self.state)?,
        );
        let anonymous = self.anonymous.map_or_else(String::new, |(user, group)| {
            format!("    Anonymous_uid = {user}; Anonymous_gid = {group};\n")
        });
        let _ = write!(
            text,
            "EXPORT {{\n\
             \x20   Export_Id = 1; Path = {}; Pseudo = {}; Filesystem_Id = {high}.{low};\n\
             \x20   Access_Type = NONE; PrivilegedPort = {}; Squash = {squash}; SecType = sys; Protocols = {protocols}; Transports = TCP;\n\
             {anonymous}\
             \x20   CLIENT {{ Clients = {}; Access_Type = {access}; Protocols = {protocols}; }}\n\
             \x20   FSAL {{ Name = VFS; }}\n\
             }}\n",
            quoted(&self.folder)?,
            quoted(Path::new(&self.name))?,
            !self.any_port,
            self.clients.join(", "),
        );
        Ok(text)
    }

    fn check(&self, mount: &Mount) -> Result<(), ExportError> {
        if !self.folder.is_dir() {
            return Err(NfsRefusal::NotFolder(self.folder.clone()).into());
        }
        if !mount.has_lasting_handles() {
            return Err(NfsRefusal::HandlesEnd(mount.folder().to_path_buf()).into());
        }
        let name_is_plain = self.name.starts_with('/')
            && self.name.len() > 1
            && !self.name.ends_with('/')
            && !self.name.contains("//");
        if !name_is_plain {
            return Err(NfsRefusal::Name(self.name.clone()).into());
        }
        if self.clients.is_empty() {
            return Err(NfsRefusal::NoClient.into());
        }
        // They stand in the configuration without quotes.
        let plain = |c: char| c.is_ascii_alphanumeric() || ".:/-_*?@".contains(c);
        match self
            .clients
            .iter()
            .find(|client| client.is_empty() || !client.chars().all(plain))
        {
            Some(client) => Err(NfsRefusal::Client(client.clone()).into()),
            None => Ok(()),
        }
    }

    fn conf(&self) -> PathBuf {
        self.runtime.join("ganesha.conf")
    }

    /// The program and arguments that start it.
    fn arguments(&self) -> Vec<PathBuf> {
        let words = ["-F", "-L", "STDERR", "-f"].map(PathBuf::from);
        let mut all = words.to_vec();
        all.extend([
            self.conf(),
            PathBuf::from("-p"),
            self.runtime.join("ganesha.pid"),
        ]);
        all
    }

    /// The command that starts the server, for people.
    pub fn command_line(&self) -> String {
        let mut line = String::from("ganesha.nfsd");
        for word in self.arguments() {
            line.push(' ');
            line.push_str(&program::quoted(&word.to_string_lossy()));
        }
        line
    }
}

/// A string in Ganesha's configuration, which has no escapes.
fn quoted(path: &Path) -> Result<String, ExportError> {
    match path.to_str() {
        Some(text) if !text.contains(['"', '\\', '\n']) => Ok(format!("\"{text}\"")),
        _ => Err(NfsRefusal::NotQuotable(path.to_path_buf()).into()),
    }
}

/// Ganesha for one export.
pub struct NfsServer {
    export: NfsExport,
    program: PathBuf,
    configuration: String,
    mount: Mount,
    /// Its folders, locked.
    held: Vec<OwnedFd>,
}

impl NfsServer {
    /// A server ready to start.
    ///
    /// Errors   Refused: there is no Ganesha here, or it cannot get this configuration
    pub fn new(export: NfsExport, mount: &Mount) -> Result<NfsServer, ExportError> {
        Ok(NfsServer {
            program: program::find("ganesha.nfsd", "nfs-ganesha nfs-ganesha-vfs")?,
            configuration: export.configuration(mount)?,
            mount: mount.clone(),
            held: Vec::new(),
            export,
        })
    }

    /// Ganesha 4.3 writes the mount's device number into handles and refuses those with another.
    /// The kernel gives the lowest free number, which after a restart mostly is the same, and takes
    /// no request for one.
    fn compare_device(&self) -> Result<(), ExportError> {
        let file = self.export.state.join("device");
        let folder = self.mount.folder();
        let now = rustix::fs::stat(folder)
            .map_err(|error| ExportError::at("look at", folder, error))?
            .st_dev
            .to_string();
        let before = std::fs::read_to_string(&file).unwrap_or_default();
        if !before.is_empty() && before.trim() != now {
            tracing::warn!(
                "{} has a new device number: clients that have it mounted may get \"stale file handle\" and have to mount it again",
                folder.display()
            );
        }
        program::write(&file, &now)
    }
}

impl Server for NfsServer {
    fn program(&self) -> &'static str {
        "ganesha.nfsd"
    }

    fn address(&self) -> SocketAddr {
        self.export.listen
    }

    fn start(&mut self) -> Result<Child, ExportError> {
        if self.held.is_empty() {
            let state = program::own_folder(&self.export.state, "--state-dir")?;
            self.held.push(state);
            if self.export.runtime != self.export.state {
                let runtime = program::own_folder(&self.export.runtime, "--runtime-dir")?;
                self.held.push(runtime);
            }
        }
        self.compare_device()?;
        drop(
            self.mount
                .open(&self.export.folder, OFlags::PATH | OFlags::DIRECTORY)?,
        );
        program::write(&self.export.conf(), &self.configuration)?;
        let mut command: Command = program::bound(&self.program, "TERM")?;
        command
            .args(self.export.arguments())
            .current_dir(&self.export.runtime)
            .stdin(Stdio::null())
            // Our standard output is for our caller.
            .stdout(Stdio::null())
            .spawn()
            .map_err(|error| ExportError::at("start", &self.program, error))
    }

    fn make_ready(&mut self) -> Result<bool, ExportError> {
        let mut address = self.export.listen;
        if address.ip().is_unspecified() {
            let loopback = match address.ip() {
                IpAddr::V4(_) => IpAddr::from([127, 0, 0, 1]),
                IpAddr::V6(_) => IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1]),
            };
            address.set_ip(loopback);
        }
        Ok(TcpStream::connect_timeout(&address, Duration::from_millis(200)).is_ok())
    }

    fn stop(&mut self, mut child: Child) {
        if let Some(pid) = Pid::from_raw(child.id() as i32) {
            let _ = kill_process(pid, Signal::TERM);
        }
        let end = Instant::now() + STOP_WITHIN;
        while Instant::now() < end {
            if matches!(child.try_wait(), Ok(Some(_)) | Err(_)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        tracing::warn!("ganesha.nfsd did not stop within {STOP_WITHIN:?}; it is killed");
        let _ = child.kill();
        let _ = child.wait();
    }
}
