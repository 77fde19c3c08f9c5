// SPDX-License-Identifier: Apache-2.0
//! An NFSv4.0 client as small as a player or a recorder needs (RFC 7530, 7531): it opens files of
//! an export and reads or writes them, one request at a time. Bytes that it writes are not stable
//! until it asks for that ([`Nfs::commit`]), as a kernel's client does at fsync and close.
//!
//! It keeps nothing: no cache, no reading ahead. A thread with a connection of its own renews its
//! lease, as a request may take longer than that lasts (a COMMIT of all that a slow disk has to
//! write).

use anyhow::{Context, Result, bail, ensure};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

const CLOSE: u32 = 4;
const COMMIT: u32 = 5;
const GETFH: u32 = 10;
const LOOKUP: u32 = 15;
const OPEN: u32 = 18;
const OPEN_CONFIRM: u32 = 20;
const PUTFH: u32 = 22;
const PUTROOTFH: u32 = 24;
const READ: u32 = 25;
const RENEW: u32 = 30;
const SETCLIENTID: u32 = 35;
const SETCLIENTID_CONFIRM: u32 = 36;
const WRITE: u32 = 38;

const PROGRAM: u32 = 100_003;
const VERSION: u32 = 4;
const AUTH_SYS: u32 = 1;
/// Of a call-back program that nobody offers.
const NO_CALLBACK: u32 = 0x4000_0000;
const NFS4ERR_GRACE: u32 = 10013;
/// OPEN4_RESULT_CONFIRM.
const CONFIRM: u32 = 2;
/// Longest read or write; servers may give or take less. Units: bytes.
const IO_BYTES_MAX: usize = 1 << 20;
/// OPEN4_SHARE_ACCESS_…
const FOR_READING: u32 = 1;
const FOR_WRITING: u32 = 2;
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
/// Ports that only root may use, as a kernel's client comes from.
const PORTS: std::ops::Range<u16> = 600..1000;

/// A connection, and the folder that is exported.
#[derive(Debug)]
pub struct Nfs {
    stream: TcpStream,
    port: u16,
    xid: u32,
    client: u64,
    owners: u32,
    root: Vec<u8>,
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
        let mut nfs = Nfs::of(stream_to(port)?, port);
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

/// A file that is open.
#[derive(Clone, Debug)]
pub struct NfsFile {
    handle: Vec<u8>,
    state: [u8; 16],
    /// Of its owner's next request that counts.
    sequence: u32,
}

/// Operations of a request.
#[derive(Clone, Debug, Default)]
struct Ops {
    bytes: Vec<u8>,
    count: u32,
}

impl Ops {
    fn op(mut self, number: u32) -> Ops {
        self.count += 1;
        self.u32(number)
    }

    fn u32(mut self, value: u32) -> Ops {
        self.bytes.extend(value.to_be_bytes());
        self
    }

    fn u64(mut self, value: u64) -> Ops {
        self.bytes.extend(value.to_be_bytes());
        self
    }

    fn fixed(mut self, bytes: &[u8]) -> Ops {
        self.bytes.extend(bytes);
        self
    }

    /// A length, the bytes, and zeros up to four.
    fn opaque(self, bytes: &[u8]) -> Ops {
        let mut ops = self.u32(bytes.len() as u32).fixed(bytes);
        ops.bytes.resize(ops.bytes.len().next_multiple_of(4), 0);
        ops
    }
}

/// An answer that is being read.
#[derive(Debug)]
struct Answer {
    bytes: Vec<u8>,
    at: usize,
}

impl Answer {
    fn take(&mut self, count: usize) -> Result<&[u8]> {
        let found = self.bytes.get(self.at..self.at + count);
        self.at += count.next_multiple_of(4);
        found.context("an answer of the NFS server is shorter than it says")
    }

    fn fixed<const N: usize>(&mut self) -> Result<[u8; N]> {
        Ok(self.take(N)?.try_into()?)
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_be_bytes(self.fixed()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_be_bytes(self.fixed()?))
    }

    fn opaque(&mut self) -> Result<&[u8]> {
        let length = self.u32()? as usize;
        self.take(length)
    }

    fn skip_bitmap(&mut self) -> Result<()> {
        let words = self.u32()? as usize;
        self.take(4 * words).map(drop)
    }

    /// The next operation's result begins.
    fn op(&mut self, number: u32) -> Result<()> {
        match self.status(number)? {
            0 => Ok(()),
            status => bail!("the NFS server refused operation {number} with status {status}"),
        }
    }

    fn status(&mut self, number: u32) -> Result<u32> {
        let found = self.u32()?;
        ensure!(
            found == number,
            "the NFS server answered operation {found}; expected {number}"
        );
        self.u32()
    }
}

impl Nfs {
    fn of(stream: TcpStream, port: u16) -> Nfs {
        Nfs {
            stream,
            port,
            xid: std::process::id() << 12,
            client: 0,
            owners: 0,
            root: Vec::new(),
            renewer: None,
        }
    }

    /// Connect to a server on this machine as root, with `export`, a name without slashes, as the
    /// client's root.
    ///
    /// Errors   nobody listens, or it refuses us
    pub fn connect(port: u16, export: &str) -> Result<Nfs> {
        let mut nfs = Nfs::of(stream_to(port)?, port);
        let ops = Ops::default()
            .op(PUTROOTFH)
            .op(LOOKUP)
            .opaque(export.as_bytes())
            .op(GETFH);
        let mut answer = nfs.ask(&ops)?;
        answer.op(PUTROOTFH)?;
        answer.op(LOOKUP)?;
        answer.op(GETFH)?;
        nfs.root = answer.opaque()?.to_vec();
        Ok(nfs)
    }

    /// Become a client that may open files. Not before the first open: a client that then waited
    /// for its beginning would lose its lease.
    fn register(&mut self) -> Result<()> {
        // A process may be several clients; one that comes by the name of another would end what
        // that has open.
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let serial = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("rushes-lab {} {serial}", std::process::id());
        let boot = crate::clients::player::now_ns();
        let ops = Ops::default()
            .op(SETCLIENTID)
            .u64(boot)
            .opaque(name.as_bytes())
            .u32(NO_CALLBACK)
            .opaque(b"tcp")
            .opaque(b"127.0.0.1.0.1")
            .u32(0);
        let mut answer = self.ask(&ops)?;
        answer.op(SETCLIENTID)?;
        self.client = answer.u64()?;
        let confirm: [u8; 8] = answer.fixed()?;
        let ops = Ops::default()
            .op(SETCLIENTID_CONFIRM)
            .u64(self.client)
            .fixed(&confirm);
        self.ask(&ops)?.op(SETCLIENTID_CONFIRM)?;
        self.renewer = Some(Renewer::start(self.port, self.client)?);
        Ok(())
    }

    /// Open a file below the export for reading. While clients of an earlier server may claim what
    /// they had, it waits.
    pub fn open(&mut self, path: &str) -> Result<NfsFile> {
        self.opened(path, false)
    }

    /// Create or empty a file below the export and open it for writing; it waits as [`Nfs::open`].
    pub fn open_new(&mut self, path: &str) -> Result<NfsFile> {
        self.opened(path, true)
    }

    fn opened(&mut self, path: &str, is_new: bool) -> Result<NfsFile> {
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        if self.client == 0 {
            self.register()?;
        }
        let handle = self.lookup(folder)?;
        let end = std::time::Instant::now() + PATIENCE;
        loop {
            if let Some(file) = self.try_open(&handle, name, is_new)? {
                return Ok(file);
            }
            ensure!(
                std::time::Instant::now() < end,
                "{path}: the NFS server has let no client open files for {PATIENCE:?}"
            );
            std::thread::sleep(GRACE_STEP);
        }
    }

    fn lookup(&mut self, folder: &str) -> Result<Vec<u8>> {
        let names: Vec<&str> = folder.split('/').filter(|name| !name.is_empty()).collect();
        let mut ops = Ops::default().op(PUTFH).opaque(&self.root);
        for name in &names {
            ops = ops.op(LOOKUP).opaque(name.as_bytes());
        }
        let mut answer = self.ask(&ops.op(GETFH))?;
        answer.op(PUTFH)?;
        for name in names {
            answer
                .op(LOOKUP)
                .with_context(|| format!("folder {name}"))?;
        }
        answer.op(GETFH)?;
        Ok(answer.opaque()?.to_vec())
    }

    /// None: not yet.
    fn try_open(&mut self, folder: &[u8], name: &str, is_new: bool) -> Result<Option<NfsFile>> {
        self.owners += 1;
        let access = if is_new { FOR_WRITING } else { FOR_READING };
        let ops = Ops::default()
            .op(PUTFH)
            .opaque(folder)
            .op(OPEN)
            // Sequence, for what, denying nobody.
            .u32(1)
            .u32(access)
            .u32(0)
            .u64(self.client)
            .opaque(&self.owners.to_be_bytes());
        let ops = match is_new {
            // Made (whether or not it is there), of no size and with these rights.
            true => ops
                .u32(1)
                .u32(0)
                .u32(2)
                .u32(SIZE_BIT)
                .u32(MODE_BIT)
                .opaque(&Ops::default().u64(0).u32(NEW_FILE_MODE).bytes),
            false => ops.u32(0),
        };
        // By its name.
        let ops = ops.u32(0).opaque(name.as_bytes()).op(GETFH);
        let mut answer = self.ask(&ops)?;
        answer.op(PUTFH)?;
        match answer.status(OPEN)? {
            0 => {}
            NFS4ERR_GRACE => return Ok(None),
            status => bail!("the NFS server does not open {name}: status {status}"),
        }
        let state: [u8; 16] = answer.fixed()?;
        // The change of the folder: a flag and two numbers.
        answer.fixed::<20>()?;
        let flags = answer.u32()?;
        answer.skip_bitmap()?;
        ensure!(
            answer.u32()? == 0,
            "the NFS server gave a delegation; expected none"
        );
        answer.op(GETFH)?;
        let handle = answer.opaque()?.to_vec();
        let mut file = NfsFile {
            handle,
            state,
            sequence: 2,
        };
        if flags & CONFIRM != 0 {
            let ops = Ops::default()
                .op(PUTFH)
                .opaque(&file.handle)
                .op(OPEN_CONFIRM)
                .fixed(&state)
                .u32(2);
            let mut answer = self.ask(&ops)?;
            answer.op(PUTFH)?;
            answer.op(OPEN_CONFIRM)?;
            file.state = answer.fixed()?;
            file.sequence += 1;
        }
        Ok(Some(file))
    }

    /// Bytes of an open file; fewer than asked where the server gives no more at once, 0 at its
    /// end.
    pub fn read(&mut self, file: &NfsFile, buffer: &mut [u8], offset: u64) -> Result<usize> {
        let length = buffer.len().min(IO_BYTES_MAX);
        let ops = Ops::default()
            .op(PUTFH)
            .opaque(&file.handle)
            .op(READ)
            .fixed(&file.state)
            .u64(offset)
            .u32(length as u32);
        let mut answer = self.ask(&ops)?;
        answer.op(PUTFH)?;
        answer.op(READ)?;
        let _is_end = answer.u32()?;
        let found = answer.opaque()?;
        ensure!(
            found.len() <= length,
            "the NFS server sent more than was asked for"
        );
        buffer[..found.len()].copy_from_slice(found);
        Ok(found.len())
    }

    /// Write into an open file.
    ///
    /// Returns  how much of it was taken; the server has it, and its disk perhaps not
    pub fn write(&mut self, file: &NfsFile, content: &[u8], offset: u64) -> Result<usize> {
        let content = &content[..content.len().min(IO_BYTES_MAX)];
        let ops = Ops::default()
            .op(PUTFH)
            .opaque(&file.handle)
            .op(WRITE)
            .fixed(&file.state)
            .u64(offset)
            // UNSTABLE4.
            .u32(0)
            .opaque(content);
        let mut answer = self.ask(&ops)?;
        answer.op(PUTFH)?;
        answer.op(WRITE)?;
        let count = answer.u32()? as usize;
        ensure!(
            (1..=content.len()).contains(&count),
            "the NFS server took {count} bytes of {}",
            content.len()
        );
        Ok(count)
    }

    /// All that was written into it is on stable storage.
    pub fn commit(&mut self, file: &NfsFile) -> Result<()> {
        let ops = Ops::default()
            .op(PUTFH)
            .opaque(&file.handle)
            .op(COMMIT)
            .u64(0)
            .u32(0);
        let mut answer = self.ask(&ops)?;
        answer.op(PUTFH)?;
        answer.op(COMMIT)
    }

    /// Nothing more is done with it.
    pub fn close(&mut self, file: &NfsFile) -> Result<()> {
        let ops = Ops::default()
            .op(PUTFH)
            .opaque(&file.handle)
            .op(CLOSE)
            .u32(file.sequence)
            .fixed(&file.state);
        let mut answer = self.ask(&ops)?;
        answer.op(PUTFH)?;
        answer.op(CLOSE)
    }

    /// One COMPOUND as root.
    fn ask(&mut self, ops: &Ops) -> Result<Answer> {
        self.xid = self.xid.wrapping_add(1);
        let call = call(self.xid, ops);
        // Its last and only fragment.
        let mark = 0x8000_0000 | call.len() as u32;
        self.stream
            .write_all(&mark.to_be_bytes())
            .and_then(|()| self.stream.write_all(&call))
            .context("the NFS server is gone")?;
        let bytes = self.record().context("the NFS server is gone")?;
        let mut answer = Answer { bytes, at: 0 };
        ensure!(
            answer.u32()? == self.xid,
            "the NFS server answered another call"
        );
        ensure!(
            (answer.u32()?, answer.u32()?) == (1, 0),
            "the NFS server did not accept a call"
        );
        answer.u32()?;
        answer.opaque()?;
        ensure!(
            answer.u32()? == 0,
            "the NFS server did not understand a call"
        );
        answer.u32()?;
        answer.opaque()?;
        answer.u32()?;
        Ok(answer)
    }

    fn record(&mut self) -> std::io::Result<Vec<u8>> {
        let mut whole = Vec::new();
        loop {
            let mut mark = [0; 4];
            self.stream.read_exact(&mut mark)?;
            let mark = u32::from_be_bytes(mark);
            let start = whole.len();
            whole.resize(start + (mark & 0x7fff_ffff) as usize, 0);
            self.stream.read_exact(&mut whole[start..])?;
            if mark & 0x8000_0000 != 0 {
                return Ok(whole);
            }
        }
    }
}

/// The RPC call around a COMPOUND, without its record mark.
fn call(xid: u32, ops: &Ops) -> Vec<u8> {
    // Stamp, machine, user, group, no further groups.
    let root = Ops::default()
        .u32(0)
        .opaque(b"lab")
        .u32(0)
        .u32(0)
        .u32(0)
        .bytes;
    Ops::default()
        .u32(xid)
        .u32(0)
        .u32(2)
        .u32(PROGRAM)
        .u32(VERSION)
        // The procedure COMPOUND.
        .u32(1)
        .u32(AUTH_SYS)
        .opaque(&root)
        .u32(0)
        .u32(0)
        // Its tag and minor version.
        .opaque(b"")
        .u32(0)
        .u32(ops.count)
        .fixed(&ops.bytes)
        .bytes
}

fn stream_to(port: u16) -> Result<TcpStream> {
    let socket = rustix::net::socket(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::STREAM,
        None,
    )?;
    let count = PORTS.end - PORTS.start;
    // Clients come by the dozen: each begins to look somewhere else.
    let begin = (std::process::id() % u32::from(count)) as u16;
    let bound = (0..count)
        .map(|step| PORTS.start + (begin + step) % count)
        .any(|own| rustix::net::bind(&socket, &SocketAddr::from(([127, 0, 0, 1], own))).is_ok());
    ensure!(
        bound,
        "no port from {PORTS:?} can be had: NFS clients have to use those; end programs that have \
         them, or run the lab as root"
    );
    // All requests are answered when it is closed. A port that is kept for a minute then would be
    // gone for copiers, who come with a dozen for each file.
    rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::ZERO))?;
    rustix::net::connect(&socket, &SocketAddr::from(([127, 0, 0, 1], port)))
        .with_context(|| format!("no NFS server listens on 127.0.0.1:{port}"))?;
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opaque_bytes_are_padded_to_four_and_read_back() {
        let ops = Ops::default().op(READ).opaque(b"abcde").u64(7);
        assert_eq!((ops.bytes.len(), ops.count), (4 + 4 + 8 + 8, 1));
        let mut answer = Answer {
            bytes: ops.bytes,
            at: 0,
        };
        assert_eq!(answer.u32().unwrap(), READ);
        assert_eq!(answer.opaque().unwrap(), b"abcde");
        assert_eq!(answer.u64().unwrap(), 7);
        assert!(answer.u32().is_err(), "there is no more");
    }

    #[test]
    fn a_refusal_names_its_status() {
        let bytes = Ops::default().u32(OPEN).u32(13).bytes;
        let mut answer = Answer { bytes, at: 0 };
        let said = answer.op(OPEN).unwrap_err().to_string();
        assert!(said.contains("13"), "{said}");
    }
}
