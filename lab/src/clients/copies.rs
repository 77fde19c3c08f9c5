// SPDX-License-Identifier: Apache-2.0
//! Clients that copy while others play: real `smbclient` processes, which keep 2 × 8 MiB in flight;
//! over NFS threads with as many bytes in flight, in requests of 1 MiB, since Ganesha takes no
//! larger ones. Each thread has a connection of its own, where an smbclient has one in all.
//!
//! Each smbclient downloads files of its own, one after the other, into a pipe whose other end is
//! the lab: the lab compares every byte, counts bytes as they arrive, and keeps nothing. Files are
//! larger than the cache, and each copier has several, so that it finds none of them cached.

use crate::clients::door::Address;
use crate::clients::nfs::Nfs;
use crate::stage::footage::Clip;
use crate::stage::room::Room;
use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{FileType, Mode, OFlags};
use std::fs::File;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Units: bytes.
const PIPE_READ_BYTES: usize = 1 << 20;
/// Size of one request over NFS. Units: bytes.
const NFS_READ_BYTES: usize = 1 << 20;
/// Requests that a copier has in flight over NFS.
const NFS_READ_COUNT: usize = 16;

/// The work of all copiers.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Bytes that arrived.
    pub bytes: u64,
    /// Bytes that differ from those written.
    pub bytes_wrong: u64,
    /// Whole files that arrived.
    pub file_count: u64,
    /// The errors.
    pub failures: Vec<String>,
}

/// Copiers at work.
#[derive(Debug)]
pub struct Copies {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    stopping: AtomicBool,
    bytes: AtomicU64,
    bytes_wrong: AtomicU64,
    file_count: AtomicU64,
    failures: Mutex<Vec<String>>,
    children: Mutex<Vec<Child>>,
}

/// A file to copy: its path below the share, its content and its size.
#[derive(Clone, Debug)]
pub struct Reel {
    /// Its path below the share.
    pub path: String,
    /// The content that must arrive; `None`: the lab only counts bytes.
    pub clip: Option<Clip>,
    /// Units: bytes.
    pub bytes: u64,
}

impl Copies {
    /// Start one copier for each list of reels; it loops over them until stopped.
    pub fn start(room: &Room, address: &Address, reels: Vec<Vec<Reel>>) -> Result<Copies> {
        let shared = Arc::new(Shared::default());
        let mut threads = Vec::new();
        for (index, reels) in reels.into_iter().enumerate() {
            let fifo = room.path().join(format!("copy{index}.fifo"));
            if !fifo.exists() {
                let mode = Mode::from_raw_mode(0o600);
                rustix::fs::mknodat(rustix::fs::CWD, &fifo, FileType::Fifo, mode, 0)
                    .context("a pipe for a copier cannot be created")?;
            }
            let (shared, address) = (Arc::clone(&shared), address.clone());
            threads.push(std::thread::spawn(move || {
                for reel in reels.iter().cycle() {
                    if shared.stopping.load(Ordering::SeqCst) {
                        return;
                    }
                    if let Err(error) = copy(&shared, &address, &fifo, reel) {
                        shared.fail(format!("{}: {error:#}", reel.path));
                        return;
                    }
                }
            }));
        }
        Ok(Copies { shared, threads })
    }

    /// Bytes that arrived so far.
    pub fn bytes(&self) -> u64 {
        self.shared.bytes.load(Ordering::Relaxed)
    }

    /// End them, even in the middle of a file; bytes that arrived count.
    pub fn stop(mut self) -> Tally {
        self.halt();
        let shared = &self.shared;
        Tally {
            bytes: shared.bytes.load(Ordering::SeqCst),
            bytes_wrong: shared.bytes_wrong.load(Ordering::SeqCst),
            file_count: shared.file_count.load(Ordering::SeqCst),
            failures: std::mem::take(
                &mut *shared
                    .failures
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner),
            ),
        }
    }

    fn halt(&mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        let mut children = self.shared.lock_children();
        children.iter_mut().for_each(|child| {
            let _ = child.kill();
        });
        drop(children);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        self.halt();
    }
}

impl Shared {
    fn lock_children(&self) -> std::sync::MutexGuard<'_, Vec<Child>> {
        self.children.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, what: String) {
        self.failures
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(what);
    }
}

fn copy(shared: &Shared, address: &Address, fifo: &Path, reel: &Reel) -> Result<()> {
    if let Address::Nfs { port, export } = address {
        return copy_over_nfs(shared, (*port, export), reel);
    }
    // Open without a wait for a writer; then let reads block. A read returns 0 bytes while no
    // writer has the pipe open: before smbclient opens it, and after it has closed it.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let pipe = File::from(rustix::fs::open(fifo, flags, Mode::empty())?);
    rustix::fs::fcntl_setfl(&pipe, OFlags::empty())?;
    let child = smbclient(
        address,
        &format!("get {} {}", reel.path.replace('/', "\\"), fifo.display()),
    )?;
    let pid = child.id();
    {
        let mut children = shared.lock_children();
        children.push(child);
        if shared.stopping.load(Ordering::SeqCst) {
            // `halt` may have killed the others before this child was on the list.
            children.iter_mut().for_each(|child| drop(child.kill()));
        }
    }
    let got = drain(shared, pipe, reel, pid);
    let mut children = shared.lock_children();
    let Some(position) = children.iter().position(|child| child.id() == pid) else {
        bail!("a copier is missing");
    };
    let child = children.remove(position);
    drop(children);
    let out = child.wait_with_output()?;
    if shared.stopping.load(Ordering::SeqCst) {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&out.stderr).trim().to_owned()
        + String::from_utf8_lossy(&out.stdout).trim();
    let got = got?;
    if !out.status.success() || got != reel.bytes {
        bail!(
            "{got} bytes of {} came ({}): {said}",
            reel.bytes,
            out.status
        );
    }
    shared.file_count.fetch_add(1, Ordering::SeqCst);
    Ok(())
}

/// Each request has a connection of its own: our client waits for each answer.
fn copy_over_nfs(shared: &Shared, (port, export): (u16, &str), reel: &Reel) -> Result<()> {
    let next = AtomicU64::new(0);
    let one = || -> Result<()> {
        let mut nfs = Nfs::connect(port, export)?;
        let file = nfs.open(&reel.path)?;
        let mut buffer = vec![0; NFS_READ_BYTES];
        while !shared.stopping.load(Ordering::SeqCst) {
            let at = next.fetch_add(NFS_READ_BYTES as u64, Ordering::SeqCst);
            let Some(left) = reel.bytes.checked_sub(at).filter(|left| *left > 0) else {
                break;
            };
            let wanted = left.min(NFS_READ_BYTES as u64) as usize;
            let mut done = 0;
            while done < wanted {
                let got = nfs.read(&file, &mut buffer[done..wanted], at + done as u64)?;
                ensure!(got > 0, "it ends at {}", at + done as u64);
                done += got;
            }
            if let Some(clip) = reel.clip {
                let wrong = clip.wrong_bytes(at, &buffer[..wanted]);
                shared.bytes_wrong.fetch_add(wrong, Ordering::Relaxed);
            }
            shared.bytes.fetch_add(wanted as u64, Ordering::Relaxed);
        }
        nfs.close(&file)
    };
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..NFS_READ_COUNT).map(|_| scope.spawn(one)).collect();
        for thread in all {
            match thread.join() {
                Ok(done) => done?,
                Err(_) => bail!("a copier panicked"),
            }
        }
        Ok(())
    })?;
    shared.file_count.fetch_add(1, Ordering::SeqCst);
    Ok(())
}

/// Read the bytes that the child writes until it closes its end; returns their number.
fn drain(shared: &Shared, mut pipe: File, reel: &Reel, pid: u32) -> Result<u64> {
    let _ = rustix::pipe::fcntl_setpipe_size(&pipe, PIPE_READ_BYTES);
    let mut buffer = vec![0u8; PIPE_READ_BYTES];
    let mut done = 0u64;
    let mut begun = false;
    loop {
        let got = pipe.read(&mut buffer)?;
        if got == 0 {
            // The child does not have it open for writing: not yet, or no more.
            if begun || has_ended(shared, pid) {
                return Ok(done);
            }
            std::thread::sleep(std::time::Duration::from_millis(2));
            continue;
        }
        begun = true;
        if let Some(clip) = reel.clip {
            let wrong = clip.wrong_bytes(done, &buffer[..got]);
            shared.bytes_wrong.fetch_add(wrong, Ordering::Relaxed);
        }
        done += got as u64;
        shared.bytes.fetch_add(got as u64, Ordering::Relaxed);
    }
}

fn has_ended(shared: &Shared, pid: u32) -> bool {
    shared
        .lock_children()
        .iter_mut()
        .filter(|child| child.id() == pid)
        .any(|child| !matches!(child.try_wait(), Ok(None)))
}

/// Download a file of the share to `target`.
pub fn get(address: &Address, path: &str, target: &Path) -> Result<()> {
    let command = format!("get {} {}", path.replace('/', "\\"), target.display());
    let out = smbclient(address, &command)?.wait_with_output()?;
    ensure!(
        out.status.success(),
        "smbclient could not get {path}: {}{}",
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    );
    Ok(())
}

/// An `smbclient` that runs one command on the share.
pub fn smbclient(address: &Address, command: &str) -> Result<Child> {
    let Address::Smb {
        port,
        share,
        user,
        password,
        home,
    } = address
    else {
        bail!("copies go over SMB; expected another door than `--door local`");
    };
    let settings: PathBuf = home.join(".smb/smb.conf");
    Command::new("smbclient")
        .arg(format!("//127.0.0.1/{share}"))
        .args(["-p", &port.to_string(), "-U", &format!("{user}%{password}")])
        .arg("-s")
        .arg(settings)
        .args(["-c", command])
        .env("HOME", home)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .context("smbclient (package smbclient) cannot be run")
}
