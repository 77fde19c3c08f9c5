// SPDX-License-Identifier: Apache-2.0
//! An NFSv4.0 client (RFC 7530, 7531): it has handles and states in its hands, which a client
//! library keeps to itself, and it says what the server said.
//!
//! One request at a time, no cache, no reading ahead, and no renewal of a lease. A caller adds
//! requests of its own with [`Ops`] and [`Nfs::result_of`].

mod xdr;

pub use xdr::{Answer, Ops};

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;

/// Operation of that name, as all below.
pub const CLOSE: u32 = 4;
/// The handle is in the answer.
pub const GETFH: u32 = 10;
/// A name of the current folder.
pub const LOOKUP: u32 = 15;
/// Opens a file, and perhaps makes it.
pub const OPEN: u32 = 18;
/// The next operation is about this handle.
pub const PUTFH: u32 = 22;
const OPEN_CONFIRM: u32 = 20;
const PUTROOTFH: u32 = 24;
const READ: u32 = 25;
const SETCLIENTID: u32 = 35;
const SETCLIENTID_CONFIRM: u32 = 36;
const WRITE: u32 = 38;

const PROGRAM: u32 = 100_003;
const VERSION: u32 = 4;
/// The procedure COMPOUND.
const COMPOUND: u32 = 1;
const AUTH_SYS: u32 = 1;
/// Of a call-back program that nobody offers.
pub const NO_CALLBACK: u32 = 0x4000_0000;
/// OPEN4_RESULT_CONFIRM.
const CONFIRM: u32 = 2;
/// In the mark of a record: no fragment follows.
const LAST: u32 = 0x8000_0000;
/// Clients are still claiming what they had before a restart.
pub const NFS4ERR_GRACE: u32 = 10013;

/// Ports that only root may use, as a kernel's client comes from.
pub const PORTS: std::ops::Range<u16> = 600..1000;

/// A handle, as the server gave it.
pub type Handle = Vec<u8>;

/// A request that failed.
#[derive(Debug)]
pub enum NfsError {
    /// The server does not do this operation.
    Refused {
        /// Its number.
        operation: u32,
        /// Of RFC 7530, 13.
        status: u32,
    },
    /// The connection ended, or nobody answered in time.
    Gone(io::Error),
    /// The answer is none of NFSv4.
    Broken(String),
}

impl fmt::Display for NfsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NfsError::Refused { operation, status } => write!(
                f,
                "the NFS server refused operation {operation} with status {status}"
            ),
            NfsError::Gone(_) => f.write_str("the NFS server is gone"),
            NfsError::Broken(sentence) => f.write_str(sentence),
        }
    }
}

impl std::error::Error for NfsError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            NfsError::Gone(error) => Some(error),
            NfsError::Refused { .. } | NfsError::Broken(_) => None,
        }
    }
}

/// The result of a request.
pub type Result<T> = std::result::Result<T, NfsError>;

fn ensure(holds: bool, sentence: impl FnOnce() -> String) -> Result<()> {
    if holds {
        Ok(())
    } else {
        Err(NfsError::Broken(sentence()))
    }
}

/// The purpose of an open: OPEN4_SHARE_ACCESS_…
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// READ.
    Read = 1,
    /// WRITE.
    Write = 2,
    /// BOTH.
    Both = 3,
}

/// The moment at which a write is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stability {
    /// UNSTABLE4: the server has the bytes, and its disk perhaps not.
    Unstable = 0,
    /// FILE_SYNC4: they are durable.
    Durable = 2,
}

/// A file that is open.
#[derive(Clone, Debug)]
pub struct Open {
    /// Of the file.
    pub handle: Handle,
    /// Of the open, for reads and writes.
    pub state: [u8; 16],
    /// The owner, of whom there is one for each open.
    pub owner: u32,
    /// Of its owner's last request that counts.
    pub sequence: u32,
}

/// A connection, with its client id if it asked for one.
#[derive(Debug)]
pub struct Nfs {
    stream: TcpStream,
    machine: &'static str,
    minor: u32,
    xid: u32,
    client: u64,
    owners: u32,
}

impl Nfs {
    /// A client, as root of a machine of this name, over a connection.
    pub fn over(stream: TcpStream, machine: &'static str) -> Nfs {
        Nfs {
            stream,
            machine,
            minor: 0,
            xid: std::process::id() << 12,
            client: 0,
            owners: 0,
        }
    }

    /// Speak another minor version of NFSv4 from now on.
    pub fn set_minor(&mut self, minor: u32) {
        self.minor = minor;
    }

    /// Its client id. 0: it has asked for none.
    pub fn client(&self) -> u64 {
        self.client
    }

    /// Get a client id, with which it may open files. The same name and boot: the same client.
    pub fn identify(&mut self, name: &str, boot: u64) -> Result<()> {
        let ops = Ops::default()
            .op(SETCLIENTID)
            .u64(boot)
            .opaque(name.as_bytes())
            .u32(NO_CALLBACK)
            .opaque(b"tcp")
            .opaque(b"127.0.0.1.0.1")
            .u32(0);
        let mut answer = self.result_of(&ops)?;
        self.client = answer.u64()?;
        let confirm: [u8; 8] = answer.fixed()?;
        let ops = Ops::default()
            .op(SETCLIENTID_CONFIRM)
            .u64(self.client)
            .fixed(&confirm);
        self.result_of(&ops).map(drop)
    }

    /// The folder that is exported under this name, which has no slash.
    pub fn root(&mut self, name: &str) -> Result<Handle> {
        let ops = Ops::default()
            .op(PUTROOTFH)
            .op(LOOKUP)
            .opaque(name.as_bytes())
            .op(GETFH);
        Ok(self.result_of(&ops)?.opaque()?.to_vec())
    }

    /// Open a file. `at`: its folder, or itself where it is claimed. `how`: the arguments behind
    /// the owner, which say whether it is made, and its name.
    pub fn open(&mut self, at: &[u8], access: Access, how: &Ops) -> Result<Open> {
        self.owners += 1;
        let owner = self.owners;
        let ops = Ops::default()
            .at(at)
            .op(OPEN)
            // The owner's first request, the access, denying nobody.
            .u32(1)
            .u32(access as u32)
            .u32(0)
            .u64(self.client)
            .opaque(&owner.to_be_bytes())
            .fixed(&how.bytes)
            .op(GETFH);
        let mut answer = self.ask(&ops)?;
        answer.op(PUTFH)?;
        answer.op(OPEN)?;
        let state: [u8; 16] = answer.fixed()?;
        // The change of the folder: a flag and two numbers.
        answer.fixed::<20>()?;
        let flags = answer.u32()?;
        answer.skip_bitmap()?;
        let delegation = answer.u32()?;
        ensure(delegation == 0, || {
            "the NFS server gave a delegation; expected none".to_owned()
        })?;
        answer.op(GETFH)?;
        let mut open = Open {
            handle: answer.opaque()?.to_vec(),
            state,
            owner,
            sequence: 1,
        };
        if flags & CONFIRM != 0 {
            open.sequence += 1;
            let ops = Ops::default()
                .at(&open.handle)
                .op(OPEN_CONFIRM)
                .fixed(&open.state)
                .u32(open.sequence);
            open.state = self.result_of(&ops)?.fixed()?;
        }
        Ok(open)
    }

    /// Nothing more is done with it.
    pub fn close(&mut self, open: &Open) -> Result<()> {
        let ops = Ops::default()
            .at(&open.handle)
            .op(CLOSE)
            .u32(open.sequence + 1)
            .fixed(&open.state);
        self.result_of(&ops).map(drop)
    }

    /// Fill a buffer with bytes of a file.
    ///
    /// Returns  how many: fewer where the server gives no more at once, 0 at the file's end
    pub fn read(
        &mut self,
        (handle, state): (&[u8], &[u8; 16]),
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<usize> {
        let ops = Ops::default()
            .at(handle)
            .op(READ)
            .fixed(state)
            .u64(offset)
            .u32(buffer.len() as u32);
        let mut answer = self.result_of(&ops)?;
        let _is_end = answer.u32()?;
        let found = answer.opaque()?;
        ensure(found.len() <= buffer.len(), || {
            "the NFS server sent more than was asked for".to_owned()
        })?;
        buffer[..found.len()].copy_from_slice(found);
        Ok(found.len())
    }

    /// Write into an open file, once.
    ///
    /// Returns  how much of it was taken, a byte at least
    pub fn write(
        &mut self,
        open: &Open,
        offset: u64,
        stability: Stability,
        bytes: &[u8],
    ) -> Result<usize> {
        let ops = Ops::default()
            .at(&open.handle)
            .op(WRITE)
            .fixed(&open.state)
            .u64(offset)
            .u32(stability as u32)
            .opaque(bytes);
        let count = self.result_of(&ops)?.u32()? as usize;
        ensure((1..=bytes.len()).contains(&count), || {
            format!("the NFS server took {count} bytes of {}", bytes.len())
        })?;
        Ok(count)
    }

    /// The result of the last operation, where those before it have none.
    ///
    /// Errors   any of them is refused
    pub fn result_of(&mut self, ops: &Ops) -> Result<Answer> {
        let mut answer = self.ask(ops)?;
        ops.numbers.iter().try_for_each(|&op| answer.op(op))?;
        Ok(answer)
    }

    /// One COMPOUND as root; its results begin.
    pub fn ask(&mut self, ops: &Ops) -> Result<Answer> {
        self.xid = self.xid.wrapping_add(1);
        let call = self.call(ops);
        let mark = LAST | call.len() as u32;
        let sent = self
            .stream
            .write_all(&mark.to_be_bytes())
            .and_then(|()| self.stream.write_all(&call));
        let bytes = sent.and_then(|()| self.record()).map_err(NfsError::Gone)?;
        let mut answer = Answer { bytes, at: 0 };
        let xid = answer.u32()?;
        ensure(xid == self.xid, || {
            "the NFS server answered another call".to_owned()
        })?;
        let (kind, is_denied) = (answer.u32()?, answer.u32()?);
        ensure((kind, is_denied) == (1, 0), || {
            "the NFS server did not accept a call".to_owned()
        })?;
        let (_flavour, _) = (answer.u32()?, answer.opaque()?);
        let state = answer.u32()?;
        ensure(state == 0, || {
            "the NFS server did not understand a call".to_owned()
        })?;
        let (_status, _) = (answer.u32()?, answer.opaque()?);
        let _count = answer.u32()?;
        Ok(answer)
    }

    /// The RPC call around a COMPOUND, without its record mark.
    fn call(&self, ops: &Ops) -> Vec<u8> {
        // Stamp, machine, user, group, no further groups.
        let root = Ops::default()
            .u32(0)
            .opaque(self.machine.as_bytes())
            .u32(0)
            .u32(0)
            .u32(0);
        Ops::default()
            .u32(self.xid)
            .u32(0)
            .u32(2)
            .u32(PROGRAM)
            .u32(VERSION)
            .u32(COMPOUND)
            .u32(AUTH_SYS)
            .wrapped(&root)
            .u32(0)
            .u32(0)
            // Its tag.
            .opaque(b"")
            .u32(self.minor)
            .u32(ops.numbers.len() as u32)
            .fixed(&ops.bytes)
            .bytes
    }

    fn record(&mut self) -> io::Result<Vec<u8>> {
        let mut whole = Vec::new();
        loop {
            let mut mark = [0; 4];
            self.stream.read_exact(&mut mark)?;
            let mark = u32::from_be_bytes(mark);
            let start = whole.len();
            whole.resize(start + (mark & !LAST) as usize, 0);
            self.stream.read_exact(&mut whole[start..])?;
            if mark & LAST != 0 {
                return Ok(whole);
            }
        }
    }
}

/// A socket at an address of this machine and a port that any program may have.
pub fn socket() -> io::Result<OwnedFd> {
    Ok(rustix::net::socket(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::STREAM,
        None,
    )?)
}

/// A socket at this address of this machine and one of [`PORTS`]. None: none can be had.
pub fn privileged_socket(from: IpAddr) -> io::Result<Option<OwnedFd>> {
    let socket = socket()?;
    let count = PORTS.end - PORTS.start;
    // Clients come by the dozen: each begins to look somewhere else. Some ports are taken, or were
    // until a moment ago.
    let begin = (std::process::id() % u32::from(count)) as u16;
    let is_bound = (0..count)
        .map(|step| PORTS.start + (begin + step) % count)
        .any(|port| rustix::net::bind(&socket, &SocketAddr::new(from, port)).is_ok());
    Ok(is_bound.then_some(socket))
}

/// Connect a socket with the server at this port of 127.0.0.1.
pub fn connect(socket: OwnedFd, port: u16) -> io::Result<TcpStream> {
    let server = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    rustix::net::connect(&socket, &server)?;
    Ok(TcpStream::from(socket))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// Answers one call by a record of two fragments, with these results behind its head. Returns
    /// the call.
    fn answered(listener: &TcpListener, results: &[u8]) -> Vec<u8> {
        let (mut stream, _) = listener.accept().expect("the client comes");
        let mut mark = [0; 4];
        stream.read_exact(&mut mark).expect("a mark");
        let length = u32::from_be_bytes(mark) & !LAST;
        let mut call = vec![0; length as usize];
        stream.read_exact(&mut call).expect("a call");
        let head = Ops::default()
            .fixed(&call[..4])
            .u32(1)
            .u32(0)
            .u32(0)
            .opaque(b"")
            .u32(0)
            .u32(0)
            .opaque(b"")
            .u32(1);
        for (part, last) in [(&head.bytes[..], 0), (results, LAST)] {
            let mark = last | part.len() as u32;
            stream.write_all(&mark.to_be_bytes()).expect("it reads");
            stream.write_all(part).expect("it reads");
        }
        call
    }

    #[test]
    fn a_call_is_answered_over_fragments_and_a_lost_server_is_gone() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let results = Ops::default().op(PUTROOTFH).u32(0).op(LOOKUP).u32(70).bytes;
        let server = std::thread::spawn(move || answered(&listener, &results));
        let mut nfs = Nfs::over(connect(socket().unwrap(), port).unwrap(), "unit");
        let error = nfs.root("media").unwrap_err();
        let said = error.to_string();
        assert_eq!(said, "the NFS server refused operation 15 with status 70");
        let call = server.join().unwrap();
        // Behind the numbers of the call: a credential of 24 bytes, with the machine's name in it.
        let name = call.windows(4).filter(|four| four == b"unit").count();
        assert_eq!((name, call.len() % 4), (1, 0));
        let error = nfs.root("media").unwrap_err();
        assert!(matches!(error, NfsError::Gone(_)), "{error:?}");
        assert_eq!(error.to_string(), "the NFS server is gone");
    }
}
