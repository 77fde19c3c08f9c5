// SPDX-License-Identifier: Apache-2.0
//! A private smbd: the distribution's own, with folders, port and users of its own.
//!
//! Several run side by side, and nothing of the machine's own Samba is touched. A VFS module that
//! is not installed is shown to this smbd alone, by a bind mount over the module folder in a mount
//! namespace of its own (Samba refuses modules by absolute path).

use crate::servers::cgroup::Cgroup;
use crate::servers::daemon::find_rushes;
use crate::stage::room::{Room, go_on};
use anyhow::{Context, Result, bail, ensure};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The one share.
pub const SHARE: &str = "media";
/// A system account that every Debian has; it owns what the share shows.
pub const USER: &str = "daemon";
/// Known to nobody who could reach a port on loopback in a lab.
pub const PASSWORD: &str = "rushes-lab";

const READY_MAX: Duration = Duration::from_secs(20);

/// The smbd to start.
#[derive(Clone, Debug, Default)]
pub struct Spec {
    /// Folder that the share shows.
    pub share_path: PathBuf,
    /// Further lines of `[global]`.
    pub global: Vec<(String, String)>,
    /// Further lines of the share.
    pub share: Vec<(String, String)>,
    /// A module that is not installed: path of its `.so`, loaded under its file name.
    pub module: Option<PathBuf>,
}

/// A running smbd; ended when dropped.
#[derive(Debug)]
pub struct Smbd {
    child: Child,
    port: u16,
    folder: PathBuf,
}

impl Smbd {
    /// Start one in `room` under `name` and wait until it answers.
    ///
    /// Errors   Samba is not installed, or did not answer within 20 s (its log is quoted)
    pub fn start(room: &Room, name: &str, spec: &Spec, cgroup: Option<&Cgroup>) -> Result<Smbd> {
        let binary = find_smbd()?;
        let folder = room.folder(name)?;
        let port = free_port()?;
        let conf = write_conf(&folder, port, spec)?;
        add_user(&conf)?;
        let child = spawn(&binary, &folder, &conf, spec, cgroup)?;
        let mut smbd = Smbd {
            child,
            port,
            folder,
        };
        smbd.wait_until_ready()?;
        Ok(smbd)
    }

    /// Its TCP port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Where its logs are.
    pub fn log_folder(&self) -> PathBuf {
        self.folder.join("log")
    }

    /// The end of its log, for error messages.
    pub fn log_tail(&self) -> String {
        let text = fs::read_to_string(self.log_folder().join("log.smbd")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(12)..].join("\n")
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let end = Instant::now() + READY_MAX;
        loop {
            go_on()?;
            if let Some(status) = self.child.try_wait()? {
                bail!("smbd ended at once ({status}):\n{}", self.log_tail());
            }
            if TcpStream::connect(("127.0.0.1", self.port)).is_ok() {
                return Ok(());
            }
            ensure!(
                Instant::now() < end,
                "smbd did not answer on 127.0.0.1:{} within {READY_MAX:?}:\n{}",
                self.port,
                self.log_tail()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// End it and its children, and wait for that.
    pub fn stop(&mut self) {
        if let Ok(None) = self.child.try_wait()
            && let Some(pid) = rustix::process::Pid::from_raw(self.child.id() as i32)
        {
            // The whole process group: smbd's children are in it.
            let _ = rustix::process::kill_process_group(pid, rustix::process::Signal::TERM);
            let end = Instant::now() + Duration::from_secs(5);
            while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(10));
            }
            let _ = rustix::process::kill_process_group(pid, rustix::process::Signal::KILL);
        }
        let _ = self.child.wait();
    }
}

impl Drop for Smbd {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A port on loopback that was free a moment ago.
pub fn free_port() -> Result<u16> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).context("no free port on 127.0.0.1")?;
    Ok(listener.local_addr()?.port())
}

/// Version of the installed Samba, as smbd prints it.
pub fn version() -> Result<String> {
    let out = Command::new(find_smbd()?).arg("--version").output()?;
    Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned())
}

fn find_smbd() -> Result<PathBuf> {
    [
        "/usr/sbin/smbd",
        "/usr/local/samba/sbin/smbd",
        "/usr/bin/smbd",
    ]
    .iter()
    .map(PathBuf::from)
    .find(|path| path.exists())
    .context("no smbd was found; install it (Debian: apt-get install samba samba-vfs-modules)")
}

/// The folder that smbd loads VFS modules from.
pub fn module_folder() -> Result<PathBuf> {
    let out = Command::new(find_smbd()?).arg("-b").output()?;
    String::from_utf8_lossy(&out.stdout)
        .lines()
        .find_map(|line| line.trim().strip_prefix("MODULESDIR:"))
        .map(|folder| Path::new(folder.trim()).join("vfs"))
        .context("`smbd -b` names no MODULESDIR")
}

fn write_conf(folder: &Path, port: u16, spec: &Spec) -> Result<PathBuf> {
    let mut text = String::from("[global]\n");
    for (key, name) in [
        ("private dir", "private"),
        ("lock directory", "lock"),
        ("state directory", "state"),
        ("cache directory", "cache"),
        ("pid directory", "pid"),
        ("ncalrpc dir", "ncalrpc"),
    ] {
        let path = folder.join(name);
        fs::create_dir_all(&path)?;
        writeln!(text, "    {key} = {}", path.display())?;
    }
    fs::create_dir_all(folder.join("log"))?;
    for (key, value) in [
        ("smb ports", port.to_string().as_str()),
        ("interfaces", "127.0.0.1/8"),
        ("bind interfaces only", "yes"),
        ("disable netbios", "yes"),
        ("load printers", "no"),
        ("disable spoolss", "yes"),
        ("printcap name", "/dev/null"),
        ("server role", "standalone server"),
        ("map to guest", "never"),
        ("log level", "0"),
        ("max log size", "0"),
    ] {
        writeln!(text, "    {key} = {value}")?;
    }
    for (key, value) in &spec.global {
        writeln!(text, "    {key} = {value}")?;
    }
    writeln!(text, "[{SHARE}]")?;
    writeln!(text, "    path = {}", spec.share_path.display())?;
    writeln!(text, "    read only = no")?;
    for (key, value) in &spec.share {
        writeln!(text, "    {key} = {value}")?;
    }
    let path = folder.join("smb.conf");
    fs::write(&path, text).with_context(|| format!("{} cannot be written", path.display()))?;
    Ok(path)
}

fn add_user(conf: &Path) -> Result<()> {
    let mut pdbedit = Command::new("pdbedit")
        .arg("-s")
        .arg(conf)
        .args(["-a", "-t", "-u", USER])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("pdbedit cannot be run; install Samba")?;
    if let Some(mut input) = pdbedit.stdin.take() {
        write!(input, "{PASSWORD}\n{PASSWORD}\n")?;
    }
    let out = pdbedit.wait_with_output()?;
    ensure!(
        out.status.success(),
        "pdbedit could not add the user {USER}: {}",
        String::from_utf8_lossy(&out.stderr)
    );
    Ok(())
}

fn spawn(
    binary: &Path,
    folder: &Path,
    conf: &Path,
    spec: &Spec,
    cgroup: Option<&Cgroup>,
) -> Result<Child> {
    let shell = Path::new("/bin/sh");
    let mut command = match cgroup {
        Some(cgroup) => cgroup.command(Path::new("unshare")),
        None => Command::new("unshare"),
    };
    command
        .args(["--mount", "--propagation", "private"])
        .arg(shell);
    let modules = match &spec.module {
        Some(module) => Some(gather_modules(folder, module)?),
        None => None,
    };
    let script = match &modules {
        Some((ours, theirs)) => format!(
            "mount --bind {} {} && exec \"$@\"",
            ours.display(),
            theirs.display()
        ),
        None => "exec \"$@\"".to_owned(),
    };
    command.arg("-c").arg(script).arg("sh").arg(binary);
    command.args(["--foreground", "--no-process-group", "-s"]);
    command.arg(conf).arg("-l").arg(folder.join("log"));
    if spec.module.is_some() {
        // For what the module starts: `rushes recover`.
        command.env("PATH", path_with_rushes()?);
    }
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(fs::File::create(folder.join("log/stderr"))?)
        .process_group(0)
        .spawn()
        .context("smbd cannot be started (unshare of util-linux is needed, too)")
}

/// The folder of the `rushes` that is measured, then all others.
fn path_with_rushes() -> Result<OsString> {
    let binary = find_rushes()?;
    let own = binary.parent().map(Path::to_owned);
    let all = std::env::var_os("PATH").unwrap_or_default();
    Ok(std::env::join_paths(
        own.into_iter().chain(std::env::split_paths(&all)),
    )?)
}

/// A folder with all installed modules and ours among them; returns it and what it is to be mounted
/// over.
fn gather_modules(folder: &Path, module: &Path) -> Result<(PathBuf, PathBuf)> {
    let theirs = module_folder()?;
    let ours = folder.join("vfs");
    fs::create_dir_all(&ours)?;
    for entry in
        fs::read_dir(&theirs).with_context(|| format!("{} cannot be listed", theirs.display()))?
    {
        let entry = entry?;
        fs::copy(entry.path(), ours.join(entry.file_name()))?;
    }
    let name = module.file_name().context("the module has no file name")?;
    fs::copy(module, ours.join(name))
        .with_context(|| format!("{} cannot be read; build it first (make)", module.display()))?;
    Ok((ours, theirs))
}
