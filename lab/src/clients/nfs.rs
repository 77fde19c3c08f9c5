// SPDX-License-Identifier: Apache-2.0
//! A player's or a recorder's NFS client, on [`rushes_kit::nfs`]: it opens files of an export and
//! reads or writes them, one request at a time. Bytes that it writes are not stable until it asks
//! for that ([`Nfs::commit`]), as a kernel's client does at fsync and close.
//!
//! It keeps nothing: no cache, no reading ahead. A thread with a connection of its own renews its
//! lease, as a request may take longer than that lasts (a COMMIT of all that a slow disk has to
//! write).

use anyhow::{Context, Result, bail, ensure};
use rushes_kit::nfs::{self, Access, GETFH, LOOKUP, NFS4ERR_GRACE, NfsError, OPEN, Ops, PUTFH};
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use rushes_kit::nfs::Open as NfsFile;

const COMMIT: u32 = 5;
const RENEW: u32 = 30;

/// Longest read or write; servers may give or take less. Units: bytes.
const IO_BYTES_MAX: usize = 1 << 20;
/// FATTR4_SIZE and FATTR4_MODE, as bits of the two words of a bitmap.
const SIZE_BIT: u32 = 1 << 4;
const MODE_BIT: u32 = 1 << (33 - 32);
const NEW_FILE_MODE: u32 = 0o644;
/// Longer than any collapse that a run waits for.
const PATIENCE: Duration = Duration::from_secs(120);
/// Much shorter than any lease.
const RENEW_EVERY: Duration = Duration::from_secs(1);
/// Between two tries to open what nobody may open yet.
const GRACE_STEP: Duration = Duration::from_millis(200);

/// A connection, and the folder that is exported.
#[derive(Debug)]
pub struct Nfs {
    nfs: nfs::Nfs,
    port: u16,
    root: nfs::Handle,
    renewer: Option<Renewer>,
}

/// Keeps a client's lease; ended when dropped.
#[derive(Debug)]
struct Renewer {
    end: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Renewer {
    fn start(port: u16, client: u64) -> Result<Renewer> {
        let mut nfs = client_of(port)?;
        let (end, ended) = mpsc::channel();
        let renew = move || {
            while ended.recv_timeout(RENEW_EVERY) == Err(RecvTimeoutError::Timeout) {
                // A client that has lost it learns so from its own next request.
                if nfs.ask(&Ops::default().op(RENEW).u64(client)).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().spawn(renew)?;
        Ok(Renewer {
            end: Some(end),
            thread: Some(thread),
        })
    }
}

impl Drop for Renewer {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Nfs {
    /// Connect to a server on this machine as root, with `export`, a name without slashes, as the
    /// client's root.
    ///
    /// Errors   nobody listens, or it refuses us
    pub fn connect(port: u16, export: &str) -> Result<Nfs> {
        let mut nfs = client_of(port)?;
        let root = nfs.root(export)?;
        Ok(Nfs {
            nfs,
            port,
            root,
            renewer: None,
        })
    }

    /// Become a client that may open files. Not before the first open: a client that then waited
    /// for its beginning would lose its lease.
    fn register(&mut self) -> Result<()> {
        // A process may be several clients; one that comes by the name of another would end what
        // that has open.
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let serial = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("rushes-lab {} {serial}", std::process::id());
        self.nfs.identify(&name, crate::clients::player::now_ns())?;
        self.renewer = Some(Renewer::start(self.port, self.nfs.client())?);
        Ok(())
    }

    /// Open a file below the export for reading. While clients of an earlier server may claim what
    /// they had, it waits.
    pub fn open(&mut self, path: &str) -> Result<NfsFile> {
        self.opened(path, Access::Read, &Ops::default().u32(0))
    }

    /// Create or empty a file below the export and open it for writing; it waits as [`Nfs::open`].
    pub fn open_new(&mut self, path: &str) -> Result<NfsFile> {
        let attributes = Ops::default().u64(0).u32(NEW_FILE_MODE);
        // Made, whether or not it is there, of no size and with these rights.
        let how = Ops::default()
            .u32(1)
            .u32(0)
            .u32(2)
            .u32(SIZE_BIT)
            .u32(MODE_BIT)
            .wrapped(&attributes);
        self.opened(path, Access::Write, &how)
    }

    fn opened(&mut self, path: &str, access: Access, how: &Ops) -> Result<NfsFile> {
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        if self.nfs.client() == 0 {
            self.register()?;
        }
        let folder = self.lookup(folder)?;
        // By its name.
        let how = how.clone().u32(0).opaque(name.as_bytes());
        let end = Instant::now() + PATIENCE;
        loop {
            match self.nfs.open(&folder, access, &how) {
                Err(NfsError::Refused {
                    operation: OPEN,
                    status: NFS4ERR_GRACE,
                }) => {}
                Err(NfsError::Refused {
                    operation: OPEN,
                    status,
                }) => bail!("the NFS server does not open {name}: status {status}"),
                done => return Ok(done?),
            }
            ensure!(
                Instant::now() < end,
                "{path}: the NFS server has let no client open files for {PATIENCE:?}"
            );
            std::thread::sleep(GRACE_STEP);
        }
    }

    fn lookup(&mut self, folder: &str) -> Result<nfs::Handle> {
        let names: Vec<&str> = folder.split('/').filter(|name| !name.is_empty()).collect();
        let mut ops = Ops::default().at(&self.root);
        for name in &names {
            ops = ops.op(LOOKUP).opaque(name.as_bytes());
        }
        let mut answer = self.nfs.ask(&ops.op(GETFH))?;
        answer.op(PUTFH)?;
        for name in names {
            answer
                .op(LOOKUP)
                .with_context(|| format!("folder {name}"))?;
        }
        answer.op(GETFH)?;
        Ok(answer.opaque()?.to_vec())
    }

    /// Bytes of an open file; fewer than asked where the server gives no more at once, 0 at its
    /// end.
    pub fn read(&mut self, file: &NfsFile, buffer: &mut [u8], offset: u64) -> Result<usize> {
        let length = buffer.len().min(IO_BYTES_MAX);
        let place = (&file.handle[..], &file.state);
        Ok(self.nfs.read(place, offset, &mut buffer[..length])?)
    }

    /// Write into an open file.
    ///
    /// Returns  how much of it was taken; the server has it, and its disk perhaps not
    pub fn write(&mut self, file: &NfsFile, content: &[u8], offset: u64) -> Result<usize> {
        let content = &content[..content.len().min(IO_BYTES_MAX)];
        let unstable = nfs::Stability::Unstable;
        Ok(self.nfs.write(file, offset, unstable, content)?)
    }

    /// All that was written into it is on stable storage.
    pub fn commit(&mut self, file: &NfsFile) -> Result<()> {
        let ops = Ops::default().at(&file.handle).op(COMMIT).u64(0).u32(0);
        self.nfs.result_of(&ops)?;
        Ok(())
    }

    /// Nothing more is done with it.
    pub fn close(&mut self, file: &NfsFile) -> Result<()> {
        Ok(self.nfs.close(file)?)
    }
}

fn client_of(port: u16) -> Result<nfs::Nfs> {
    Ok(nfs::Nfs::over(stream_to(port)?, "lab"))
}

fn stream_to(port: u16) -> Result<TcpStream> {
    let socket = nfs::privileged_socket(IpAddr::from(Ipv4Addr::LOCALHOST))?;
    let socket = socket.with_context(|| {
        format!(
            "no port from {:?} can be had: NFS clients have to use those; end programs that have \
             them, or run the lab as root",
            nfs::PORTS
        )
    })?;
    // All requests are answered when it is closed. A port that is kept for a minute then would be
    // gone for copiers, who come with a dozen for each file.
    rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::ZERO))?;
    let stream = nfs::connect(socket, port)
        .with_context(|| format!("no NFS server listens on 127.0.0.1:{port}"))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}
