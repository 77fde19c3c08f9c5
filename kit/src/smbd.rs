// SPDX-License-Identifier: Apache-2.0
//! A private smbd: the distribution's own, with folders, a port and a user list of its own.
//!
//! Several run side by side, and nothing of the machine's own Samba is touched. A VFS module that
//! is not installed is shown to this smbd alone, by a bind mount over the module folder in a mount
//! namespace of its own: Samba takes modules from that folder only.
//!
//! A mount namespace begins as a copy of all mounts of the machine, and each copy keeps its disk
//! busy. So it first lets go of the mounts of other tests and of the lab ([`crate::mounts`]), which
//! could not end before this smbd.

use crate::free_port;
use crate::mounts::in_own_namespace;
use anyhow::{Context, Result, bail, ensure};
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The one share.
pub const SHARE: &str = "media";
/// A system account that every Debian has; it owns what the share shows.
pub const USER: &str = "daemon";
/// Of a user whom only a program of this machine can reach, for as long as a run lasts.
pub const PASSWORD: &str = "rushes-kit";

const READY_MAX: Duration = Duration::from_secs(20);
/// Between the friendly signal and the other.
const END_MAX: Duration = Duration::from_secs(5);
/// Of the log, in error messages.
const TAIL_LINES: usize = 12;

/// The smbd to start.
#[derive(Clone, Debug)]
pub struct Spec {
    /// The program.
    pub smbd: PathBuf,
    /// Folder that the share shows. The mounts that it lies on stay.
    pub share_path: PathBuf,
    /// Folder of the test or of the run. The mounts in it stay.
    pub home: PathBuf,
    /// Further lines of `[global]`, `key = value`.
    pub global: Vec<String>,
    /// Further lines of the share.
    pub share: Vec<String>,
    /// A module that is not installed: path of its `.so`, loaded under its file name.
    pub module: Option<PathBuf>,
    /// `log level`.
    pub log_level: u32,
}

/// A running smbd; it and its children end when it is dropped.
#[derive(Debug)]
pub struct Smbd {
    child: Child,
    port: u16,
    log: PathBuf,
}

impl Smbd {
    /// Start one with its files in `folder`, and wait until it answers. `unshare`: the command that
    /// starts the program `unshare`, without arguments; it may carry a control group, a working
    /// folder or variables. `go_on` fails when the wait is to end.
    ///
    /// Errors   a part of Samba is not installed, or it did not answer within 20 s; the end of its
    ///          log is quoted
    pub fn start(
        folder: &Path,
        spec: &Spec,
        unshare: Command,
        go_on: &dyn Fn() -> Result<()>,
    ) -> Result<Smbd> {
        let port = free_port()?;
        let conf = write_conf(folder, port, spec)?;
        add_user(&conf)?;
        let mut smbd = Smbd {
            child: spawn(folder, &conf, spec, unshare)?,
            port,
            log: folder.join("log"),
        };
        smbd.wait_until_ready(go_on)?;
        Ok(smbd)
    }

    /// Its TCP port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Its process, the parent of those that serve clients.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Everything that it and its children logged.
    pub fn log(&self) -> String {
        let files = fs::read_dir(&self.log).into_iter().flatten().flatten();
        files
            .map(|file| fs::read_to_string(file.path()).unwrap_or_default())
            .collect()
    }

    /// The end of its own log, for error messages, behind the words of the shell that started it.
    pub fn log_tail(&self) -> String {
        let read = |name: &str| fs::read_to_string(self.log.join(name)).unwrap_or_default();
        let text = read("stderr") + &read("log.smbd");
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
    }

    fn wait_until_ready(&mut self, go_on: &dyn Fn() -> Result<()>) -> Result<()> {
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
        if let Ok(None) = self.child.try_wait() {
            // The whole process group: smbd's children are in it.
            let group = rustix::process::Pid::from_child(&self.child);
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::TERM);
            let end = Instant::now() + END_MAX;
            while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(10));
            }
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
        let _ = self.child.wait();
    }
}

impl Drop for Smbd {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The installed smbd, where Debian or Samba's own build puts it.
pub fn find_smbd() -> Result<PathBuf> {
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

/// Version of this Samba, as smbd prints it.
pub fn version(smbd: &Path) -> Result<String> {
    let out = Command::new(smbd).arg("--version").output()?;
    Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned())
}

/// The folder that this smbd loads VFS modules from.
pub fn module_folder(smbd: &Path) -> Result<PathBuf> {
    let out = Command::new(smbd).arg("-b").output()?;
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
    writeln!(text, "    smb ports = {port}")?;
    writeln!(text, "    log level = {}", spec.log_level)?;
    let fixed = [
        "interfaces = 127.0.0.1/8",
        "bind interfaces only = yes",
        "disable netbios = yes",
        "load printers = no",
        "disable spoolss = yes",
        "printcap name = /dev/null",
        "server role = standalone server",
        "map to guest = never",
        "max log size = 0",
    ];
    for line in fixed
        .into_iter()
        .chain(spec.global.iter().map(String::as_str))
    {
        writeln!(text, "    {line}")?;
    }
    writeln!(text, "[{SHARE}]")?;
    writeln!(text, "    path = {}", spec.share_path.display())?;
    writeln!(text, "    read only = no")?;
    for line in &spec.share {
        writeln!(text, "    {line}")?;
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

fn spawn(folder: &Path, conf: &Path, spec: &Spec, mut unshare: Command) -> Result<Child> {
    let (ours, theirs) = match &spec.module {
        Some(module) => gather_modules(folder, &spec.smbd, module)?,
        None => Default::default(),
    };
    let over = (!theirs.as_os_str().is_empty()).then_some((&*ours, &*theirs));
    in_own_namespace(&mut unshare, &[&spec.home, &spec.share_path], over)
        .arg(&spec.smbd)
        .args(["--foreground", "--no-process-group", "-s"])
        .arg(conf)
        .arg("-l")
        .arg(folder.join("log"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(fs::File::create(folder.join("log/stderr"))?)
        .process_group(0)
        .spawn()
        .context("smbd cannot be started (unshare of util-linux is needed, too)")
}

/// A folder with all installed modules and ours among them; returns it and what it is to be mounted
/// over.
fn gather_modules(folder: &Path, smbd: &Path, module: &Path) -> Result<(PathBuf, PathBuf)> {
    let theirs = module_folder(smbd)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_has_the_lines_of_its_caller_in_their_sections() {
        let folder = std::env::temp_dir().join(format!("rushes-kit.{}", std::process::id()));
        let spec = Spec {
            smbd: PathBuf::from("smbd"),
            share_path: PathBuf::from("/mnt/footage"),
            home: folder.clone(),
            global: vec!["map to guest = bad user".to_owned()],
            share: vec!["guest ok = yes".to_owned()],
            module: None,
            log_level: 1,
        };
        let conf = write_conf(&folder, 4455, &spec).unwrap();
        let text = fs::read_to_string(conf).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        let (global, share) = text.split_once("[media]\n").unwrap();
        for line in ["smb ports = 4455", "log level = 1"] {
            assert!(global.contains(&format!("    {line}\n")), "{text}");
        }
        // The last one counts.
        assert!(global.ends_with("    map to guest = bad user\n"), "{text}");
        let expected = "    path = /mnt/footage\n    read only = no\n    guest ok = yes\n";
        assert_eq!(share, expected);
    }
}
