// SPDX-License-Identifier: Apache-2.0
//! A private NFS export on a port of its own, by the distribution's Ganesha: for a pool's mount by
//! `rushes pool export nfs`, for any other place with Ganesha's own defaults.

use crate::clients::nfs::Nfs;
use crate::servers::cgroup::Cgroup;
use crate::servers::daemon::find_rushes;
use crate::stage::room::{Room, go_on, pause};
use anyhow::{Context, Result, ensure};
use rushes_kit::free_port;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// Name of the export, below the server's root.
pub const EXPORT: &str = "media";

const READY_MAX: Duration = Duration::from_secs(60);
const END_MAX: Duration = Duration::from_secs(15);
/// Grace period, in which clients of an earlier server may reclaim their state; there are none.
/// Ganesha's leases are about as long. Units: s.
const GRACE_S: u64 = 8;

/// The configuration for the export of a place that is not a pool; keys that it does not set have
/// Ganesha's defaults.
fn stock_configuration(folder: &Path, port: u16, state: &Path) -> String {
    format!(
        "NFS_CORE_PARAM {{ Bind_addr = 127.0.0.1; NFS_Port = {port}; Protocols = 4; NLM_Port = 0; Enable_NLM = false; \
         Enable_RQUOTA = false; Enable_UDP = false; mount_path_pseudo = true; fsid_device = false; }}\n\
         NFSv4 {{ Graceless = true; RecoveryBackend = fs; RecoveryRoot = \"{}\"; Only_Numeric_Owners = true; \
         Allow_Numeric_Owners = true; }}\n\
         NFS_KRB5 {{ Active_krb5 = false; }}\n\
         EXPORT {{ Export_Id = 1; Path = \"{}\"; Pseudo = \"/{EXPORT}\"; Filesystem_Id = 1.1; Access_Type = RW; \
         Squash = no_root_squash; SecType = sys; Protocols = 4; Transports = TCP; FSAL {{ Name = VFS; }} }}\n",
        state.display(),
        folder.display()
    )
}

/// A running export; ended when dropped.
#[derive(Debug)]
pub struct Export {
    child: Child,
    port: u16,
    log: PathBuf,
}

impl Export {
    /// Serve the folder, and wait until clients may open files. `is_pool`: by Rushes' own command.
    ///
    /// Errors   Ganesha is not installed, or does not answer within 60 s
    pub fn start(
        room: &Room,
        name: &str,
        (folder, is_pool): (&Path, bool),
        cgroup: &Cgroup,
    ) -> Result<Export> {
        let home = room.folder(&format!("{name}-nfs"))?;
        let log = home.join("export.log");
        let port = free_port()?;
        let (run, state) = (home.join("run"), home.join("state"));
        let mut command = if is_pool {
            let mut command = cgroup.command(&find_rushes()?);
            command
                .args(["pool", "export", "nfs"])
                .arg(folder)
                .args(["--name", &format!("/{EXPORT}"), "--squash", "none"])
                .args(["--grace", &GRACE_S.to_string()])
                .args(["--port", &port.to_string()])
                .arg("--runtime-dir")
                .arg(run)
                .arg("--state-dir")
                .arg(state);
            command
        } else {
            fs::create_dir_all(&run)?;
            fs::create_dir_all(&state)?;
            let configuration = run.join("ganesha.conf");
            fs::write(&configuration, stock_configuration(folder, port, &state))?;
            let mut command = cgroup.command(Path::new("ganesha.nfsd"));
            command
                .args(["-F", "-L", "STDERR", "-f"])
                .arg(configuration)
                .arg("-p")
                .arg(run.join("ganesha.pid"));
            command
        };
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log)?)
            .process_group(0)
            .spawn()
            .context("the NFS export cannot be started")?;
        let mut export = Export { child, port, log };
        export.wait_until_ready()?;
        if is_pool {
            // Clients cannot open files during the grace period.
            pause(Duration::from_secs(GRACE_S + 1))?;
        }
        Ok(export)
    }

    /// Its TCP port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The last lines of its log.
    pub fn log_tail(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(12)..].join("\n")
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let end = Instant::now() + READY_MAX;
        while Nfs::connect(self.port, EXPORT).is_err() {
            go_on()?;
            ensure!(
                self.child.try_wait()?.is_none() && Instant::now() < end,
                "the NFS export does not serve on 127.0.0.1:{}:\n{}",
                self.port,
                self.log_tail()
            );
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        // At SIGTERM our command stops Ganesha, which has the mount open, and ends.
        if let (Some(pid), Ok(None)) = (
            rustix::process::Pid::from_raw(self.child.id() as i32),
            self.child.try_wait(),
        ) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            let end = Instant::now() + END_MAX;
            while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(20));
            }
            let _ = rustix::process::kill_process_group(pid, rustix::process::Signal::KILL);
        }
        let _ = self.child.wait();
    }
}
