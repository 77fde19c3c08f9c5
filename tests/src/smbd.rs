// SPDX-License-Identifier: Apache-2.0
//! A private smbd: the distribution's own, with folders, a port and a user list of its own.
//!
//! Our module is shown to this smbd alone, by a bind mount over Samba's module folder in a mount
//! namespace of its own: Samba takes modules from that folder only, and nothing of the machine's
//! Samba may change because somebody runs tests.

use crate::needs;
use crate::scratch::Scratch;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The one share.
pub const SHARE: &str = "media";
/// An account that every Debian has.
pub const USER: &str = "daemon";
/// For a port on loopback, for seconds.
pub const PASSWORD: &str = "rushes-tests";

/// The share to be served.
#[derive(Clone, Debug)]
pub struct SmbdSpec {
    /// Folder of the share.
    pub path: PathBuf,
    /// Further lines of the share, `key = value`.
    pub share: Vec<String>,
    /// Further lines of `[global]`.
    pub global: Vec<String>,
}

/// A running smbd; it and its children end when it is dropped.
#[derive(Debug)]
pub struct Smbd {
    child: Child,
    port: u16,
    log: PathBuf,
}

impl Smbd {
    /// Start it and wait until it answers.
    pub fn start(scratch: &Scratch, spec: &SmbdSpec) -> Smbd {
        Smbd::start_with(scratch, spec, needs::module().as_deref())
    }

    /// The same with another build of our module.
    pub fn start_with(scratch: &Scratch, spec: &SmbdSpec, module: Option<&Path>) -> Smbd {
        let folder = scratch.folder("smbd");
        let port = TcpListener::bind(("127.0.0.1", 0))
            .and_then(|listener| listener.local_addr())
            .expect("loopback has a free port")
            .port();
        let conf = write_conf(&folder, port, spec);
        add_user(&conf);
        let child = spawn(&folder, &conf, module);
        let mut smbd = Smbd {
            child,
            port,
            log: folder.join("log"),
        };
        smbd.wait_until_ready();
        smbd
    }

    /// Its TCP port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Its process, the parent of those that serve clients.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Everything it and its children logged.
    pub fn log(&self) -> String {
        let mut all = String::new();
        for entry in fs::read_dir(&self.log).into_iter().flatten().flatten() {
            all.push_str(&fs::read_to_string(entry.path()).unwrap_or_default());
        }
        all
    }

    /// End it and its children, before its disk goes.
    pub fn end(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        // Its children are in its process group.
        let group = format!("-{}", self.child.id());
        for signal in ["-TERM", "-KILL"] {
            let _ = Command::new("kill")
                .args([signal, "--", &group])
                .stderr(Stdio::null())
                .status();
            let end = Instant::now() + Duration::from_secs(5);
            while Instant::now() < end {
                if matches!(self.child.try_wait(), Ok(Some(_))) {
                    break;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        let _ = self.child.wait();
    }

    fn wait_until_ready(&mut self) {
        let end = Instant::now() + Duration::from_secs(20);
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            let ended = self.child.try_wait().expect("it is our child");
            assert!(ended.is_none(), "smbd ended ({ended:?}):\n{}", self.log());
            assert!(
                Instant::now() < end,
                "smbd did not answer within 20 s:\n{}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Smbd {
    fn drop(&mut self) {
        self.end();
    }
}

fn write_conf(folder: &Path, port: u16, spec: &SmbdSpec) -> PathBuf {
    let mut text = String::from("[global]\n");
    let mut line = |text_line: &str| {
        writeln!(text, "\t{text_line}").expect("a String takes all");
    };
    for (key, name) in [
        ("private dir", "private"),
        ("lock directory", "lock"),
        ("state directory", "state"),
        ("cache directory", "cache"),
        ("pid directory", "pid"),
        ("ncalrpc dir", "ncalrpc"),
    ] {
        let path = folder.join(name);
        fs::create_dir_all(&path).expect("scratch is writable");
        line(&format!("{key} = {}", path.display()));
    }
    fs::create_dir_all(folder.join("log")).expect("scratch is writable");
    line(&format!("smb ports = {port}"));
    for fixed in [
        "interfaces = 127.0.0.1/8",
        "bind interfaces only = yes",
        "disable netbios = yes",
        "load printers = no",
        "disable spoolss = yes",
        "printcap name = /dev/null",
        "server role = standalone server",
        "map to guest = never",
        "log level = 1",
        "max log size = 0",
    ] {
        line(fixed);
    }
    spec.global.iter().for_each(|l| line(l));
    line(&format!("[{SHARE}]"));
    line(&format!("path = {}", spec.path.display()));
    line("read only = no");
    spec.share.iter().for_each(|l| line(l));
    let path = folder.join("smb.conf");
    fs::write(&path, text).expect("scratch is writable");
    path
}

fn add_user(conf: &Path) {
    let mut pdbedit = Command::new(needs::path_of("pdbedit"))
        .arg("-s")
        .arg(conf)
        .args(["-a", "-t", "-u", USER])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("pdbedit comes with Samba");
    let mut input = pdbedit.stdin.take().expect("stdin is piped");
    write!(input, "{PASSWORD}\n{PASSWORD}\n").expect("pdbedit reads");
    drop(input);
    let output = pdbedit.wait_with_output().expect("it is our child");
    assert!(
        output.status.success(),
        "pdbedit: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

fn spawn(folder: &Path, conf: &Path, module: Option<&Path>) -> Child {
    let smbd = needs::path_of("smbd");
    let theirs = module_folder(&smbd);
    let ours = folder.join("vfs");
    fs::create_dir_all(&ours).expect("scratch is writable");
    for entry in fs::read_dir(&theirs)
        .expect("smbd names its module folder")
        .flatten()
    {
        fs::copy(entry.path(), ours.join(entry.file_name())).expect("scratch has room");
    }
    if let Some(module) = module {
        fs::copy(module, ours.join("rushes.so")).expect("scratch has room");
    }
    let scratch = folder.parent().expect("it lies in the scratch folder");
    // Mounts of other tests would not end before this smbd does.
    let script = format!(
        "awk -v own='{}/' '$5 ~ /\\/rushes-tests\\./ && index($5 \"/\", own) != 1 {{ print $5 }}' /proc/self/mountinfo | \
         while read -r other; do umount -l \"$other\"; done 2> /dev/null; \
         mount --bind '{}' '{}' && exec \"$@\"",
        scratch.display(),
        ours.display(),
        theirs.display()
    );
    Command::new("unshare")
        .args(["--mount", "--propagation", "private", "/bin/sh", "-c"])
        .arg(script)
        .arg("sh")
        .arg(smbd)
        .args(["--foreground", "--no-process-group", "-s"])
        .arg(conf)
        .arg("-l")
        .arg(folder.join("log"))
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(folder.join("log/stderr")).expect("scratch is writable"))
        .process_group(0)
        .spawn()
        .expect("unshare comes with util-linux")
}

/// Where smbd takes its VFS modules from.
fn module_folder(smbd: &Path) -> PathBuf {
    let output = Command::new(smbd).arg("-b").output().expect("smbd runs");
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .find_map(|line| line.trim().strip_prefix("MODULESDIR:"))
        .map(|folder| Path::new(folder.trim()).join("vfs"))
        .expect("smbd -b names MODULESDIR")
}
