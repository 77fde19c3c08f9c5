// SPDX-License-Identifier: Apache-2.0
//! An NFSv4.0 client of our own, as small as the tests allow (RFC 7530, 7531): it has handles,
//! cookies and states in its hands, which a client library keeps to itself, and it says what the
//! server said.

mod extended;

pub use extended::Extended;

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

/// Of RFC 7530, 13.
pub const NFS4ERR_IO: u32 = 5;
/// A name is too long.
pub const NFS4ERR_NAMETOOLONG: u32 = 63;
/// Nobody is let in here.
pub const NFS4ERR_ACCESS: u32 = 13;
/// There is no such name.
pub const NFS4ERR_NOENT: u32 = 2;
/// The handle leads nowhere.
pub const NFS4ERR_STALE: u32 = 70;
/// The handle is none.
pub const NFS4ERR_BADHANDLE: u32 = 10001;
/// The server does not do that.
pub const NFS4ERR_NOTSUPP: u32 = 10004;
/// The client has not renewed its lease in time.
pub const NFS4ERR_EXPIRED: u32 = 10011;
/// Somebody else has the lock.
pub const NFS4ERR_DENIED: u32 = 10010;
/// Clients are still claiming what they had before a restart.
pub const NFS4ERR_GRACE: u32 = 10013;

/// A handle, as the server gave it.
pub type Handle = Vec<u8>;

const ACCESS: u32 = 3;
const CLOSE: u32 = 4;
const CREATE: u32 = 6;
const GETATTR: u32 = 9;
const GETFH: u32 = 10;
const LINK_TYPE: u32 = 5;
const LOCK: u32 = 12;
const LOCKU: u32 = 14;
const LOOKUP: u32 = 15;
const OPEN: u32 = 18;
const OPENATTR: u32 = 19;
const OPEN_CONFIRM: u32 = 20;
const PUTFH: u32 = 22;
const PUTROOTFH: u32 = 24;
const READ: u32 = 25;
const READDIR: u32 = 26;
const READLINK: u32 = 27;
const REMOVE: u32 = 28;
const RENAME: u32 = 29;
const SAVEFH: u32 = 32;
const SETATTR: u32 = 34;
const SETCLIENTID: u32 = 35;
const SETCLIENTID_CONFIRM: u32 = 36;
const WRITE: u32 = 38;
/// Reads by it ask for no open file.
const ANONYMOUS: [u8; 16] = [0; 16];

/// A connection, with its client id if it asked for one.
#[derive(Debug)]
pub struct Nfs4 {
    stream: TcpStream,
    xid: u32,
    minor: u32,
    client: u64,
    /// By what it is known: name and boot.
    known_as: Option<(String, u64)>,
    owners: u32,
}

/// So often in a row an open finds that the lease has expired.
const EXPIRED_MAX: usize = 5;

/// A file that is open.
#[derive(Clone, Debug)]
pub struct Open {
    /// Of the file.
    pub handle: Handle,
    state: [u8; 16],
    owner: u32,
    sequence: u32,
}

/// A lock on a range of an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lock {
    state: [u8; 16],
    offset: u64,
    length: u64,
}

/// The answer of GETATTR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// 1 file, 2 folder, 5 symbolic link.
    pub kind: u32,
    /// Units: bytes.
    pub size: u64,
    /// Inode number.
    pub number: u64,
}

/// A page of a directory.
#[derive(Debug)]
pub struct Page {
    /// Names, each with the cookie behind it.
    pub names: Vec<(u64, Vec<u8>)>,
    /// For the next page.
    pub verifier: [u8; 8],
    /// There are no more.
    pub is_last: bool,
}

/// Operations of a request, and how many.
#[derive(Default)]
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

    fn opaque(self, bytes: &[u8]) -> Ops {
        let mut ops = self.u32(bytes.len() as u32).fixed(bytes);
        ops.bytes.resize(ops.bytes.len().next_multiple_of(4), 0);
        ops
    }

    fn at(self, handle: &[u8]) -> Ops {
        self.op(PUTFH).opaque(handle)
    }

    /// No attributes are set.
    fn no_attributes(self) -> Ops {
        self.u32(0).u32(0)
    }
}

/// An answer that is being read.
struct Answer {
    bytes: Vec<u8>,
    at: usize,
}

impl Answer {
    fn fixed<const N: usize>(&mut self) -> [u8; N] {
        let found = self.bytes[self.at..self.at + N].try_into();
        self.at += N;
        found.expect("of that length")
    }

    fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.fixed())
    }

    fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.fixed())
    }

    fn opaque(&mut self) -> Vec<u8> {
        let length = self.u32() as usize;
        let found = self.bytes[self.at..self.at + length].to_vec();
        self.at += length.next_multiple_of(4);
        found
    }

    fn bitmap(&mut self) {
        for _ in 0..self.u32() {
            self.u32();
        }
    }

    /// The next operation's result begins. `Err`: its status.
    fn op(&mut self, number: u32) -> Result<(), u32> {
        let found = self.u32();
        assert_eq!(found, number, "the server answers what was asked");
        match self.u32() {
            0 => Ok(()),
            status => Err(status),
        }
    }
}

impl Nfs4 {
    /// Connect, from an address of this machine.
    pub fn connect_from(from: IpAddr, port: u16) -> Nfs4 {
        let socket = rustix::net::socket(
            rustix::net::AddressFamily::INET,
            rustix::net::SocketType::STREAM,
            None,
        )
        .expect("a socket");
        // As a kernel's client does: from a port that only root may use. Some are taken, or were
        // until a moment ago.
        let begin = std::process::id() as u16 % 400;
        let bound = (0..400)
            .map(|step| 600 + (begin + step) % 400)
            .find(|&own| rustix::net::bind(&socket, &SocketAddr::new(from, own)).is_ok());
        bound.expect("an address of this machine, and a free port");
        Nfs4::over(socket, port)
    }

    /// The same from a port that any program may have.
    pub fn connect_from_any_port(port: u16) -> Nfs4 {
        let socket = rustix::net::socket(
            rustix::net::AddressFamily::INET,
            rustix::net::SocketType::STREAM,
            None,
        );
        Nfs4::over(socket.expect("a socket"), port)
    }

    fn over(socket: std::os::fd::OwnedFd, port: u16) -> Nfs4 {
        let server = SocketAddr::from(([127, 0, 0, 1], port));
        rustix::net::connect(&socket, &server).expect("the server listens");
        let stream = TcpStream::from(socket);
        stream
            .set_read_timeout(Some(Duration::from_secs(60)))
            .expect("a time");
        let xid = std::process::id() << 12;
        Nfs4 {
            stream,
            xid,
            minor: 0,
            client: 0,
            known_as: None,
            owners: 0,
        }
    }

    /// Connect as the client of this name, which may open files. The same name and boot: the same
    /// client.
    pub fn connect(port: u16, name: &str, boot: u64) -> Nfs4 {
        let mut nfs = Nfs4::connect_from(IpAddr::from([127, 0, 0, 1]), port);
        nfs.known_as = Some((name.to_owned(), boot));
        nfs.identify();
        nfs
    }

    /// Get a client id for its name and boot.
    fn identify(&mut self) {
        let Some((name, boot)) = self.known_as.clone() else {
            return;
        };
        let ops = Ops::default()
            .op(SETCLIENTID)
            .u64(boot)
            .opaque(name.as_bytes())
            .u32(0x4000_0000)
            .opaque(b"tcp")
            .opaque(b"127.0.0.1.0.1")
            .u32(0);
        let mut answer = self.ask(&ops).expect("a client id");
        answer.op(SETCLIENTID).expect("a client id");
        self.client = answer.u64();
        let confirm: [u8; 8] = answer.fixed();
        let ops = Ops::default()
            .op(SETCLIENTID_CONFIRM)
            .u64(self.client)
            .fixed(&confirm);
        self.ask(&ops)
            .and_then(|mut answer| answer.op(SETCLIENTID_CONFIRM))
            .expect("confirmed");
    }

    /// One COMPOUND as root of "test". `Err`: the connection is gone, which is 0, or what the RPC
    /// layer said.
    fn ask(&mut self, ops: &Ops) -> Result<Answer, u32> {
        self.xid += 1;
        let call = Ops::default()
            .u32(self.xid)
            .u32(0)
            .u32(2)
            .u32(100_003)
            .u32(4)
            .u32(1)
            // AUTH_SYS: stamp, machine, user, group, no further groups.
            .u32(1)
            .opaque(
                &Ops::default()
                    .u32(0)
                    .opaque(b"test")
                    .u32(0)
                    .u32(0)
                    .u32(0)
                    .bytes,
            )
            .u32(0)
            .u32(0)
            .opaque(b"")
            .u32(self.minor)
            .u32(ops.count)
            .fixed(&ops.bytes);
        let mark = 0x8000_0000 | call.bytes.len() as u32;
        let sent = self
            .stream
            .write_all(&mark.to_be_bytes())
            .and_then(|()| self.stream.write_all(&call.bytes));
        let bytes = sent.and_then(|()| self.record()).map_err(|_| 0u32)?;
        let mut answer = Answer { bytes, at: 0 };
        assert_eq!(answer.u32(), self.xid, "answers come in order");
        assert_eq!((answer.u32(), answer.u32()), (1, 0), "the call is accepted");
        answer.u32();
        answer.opaque();
        assert_eq!(answer.u32(), 0, "the call is understood");
        let (_status, _tag, _count) = (answer.u32(), answer.opaque(), answer.u32());
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

    /// The folder that is exported under this name.
    pub fn root(&mut self, name: &str) -> Result<Handle, u32> {
        let ops = Ops::default()
            .op(PUTROOTFH)
            .op(LOOKUP)
            .opaque(name.as_bytes())
            .op(GETFH);
        let mut answer = self.ask(&ops)?;
        answer.op(PUTROOTFH)?;
        answer.op(LOOKUP)?;
        answer.op(GETFH)?;
        Ok(answer.opaque())
    }

    /// The handle of a name.
    pub fn lookup(&mut self, folder: &[u8], name: &[u8]) -> Result<Handle, u32> {
        let ops = Ops::default().at(folder).op(LOOKUP).opaque(name).op(GETFH);
        let mut answer = self.ask(&ops)?;
        answer.op(PUTFH)?;
        answer.op(LOOKUP)?;
        answer.op(GETFH)?;
        Ok(answer.opaque())
    }

    /// The attributes of a file.
    pub fn known(&mut self, handle: &[u8]) -> Result<Known, u32> {
        let wanted = (1 << 1) | (1 << 4) | (1 << 20);
        let ops = Ops::default().at(handle).op(GETATTR).u32(1).u32(wanted);
        let mut answer = self.ask(&ops)?;
        answer.op(PUTFH)?;
        answer.op(GETATTR)?;
        answer.bitmap();
        answer.u32();
        Ok(Known {
            kind: answer.u32(),
            size: answer.u64(),
            number: answer.u64(),
        })
    }

    /// When it was modified: seconds since 1970, nanoseconds.
    pub fn modified(&mut self, handle: &[u8]) -> Result<(i64, u32), u32> {
        let ops = Ops::default()
            .at(handle)
            .op(GETATTR)
            .u32(2)
            .u32(0)
            .u32(1 << 21);
        let mut answer = self.ask(&ops)?;
        answer.op(PUTFH)?;
        answer.op(GETATTR)?;
        answer.bitmap();
        answer.u32();
        Ok((answer.u64() as i64, answer.u32()))
    }

    /// Say when it was modified.
    pub fn set_modified(&mut self, handle: &[u8], time: (i64, u32)) -> Result<(), u32> {
        let time = Ops::default().u32(1).u64(time.0 as u64).u32(time.1).bytes;
        let ops = Ops::default()
            .at(handle)
            .op(SETATTR)
            .fixed(&ANONYMOUS)
            .u32(2)
            .u32(0)
            .u32(1 << 22)
            .opaque(&time);
        let mut answer = self.ask(&ops)?;
        answer.op(PUTFH)?;
        answer.op(SETATTR)
    }

    /// Where a symbolic link leads.
    pub fn read_link(&mut self, handle: &[u8]) -> Result<Vec<u8>, u32> {
        let mut answer = self.ask(&Ops::default().at(handle).op(READLINK))?;
        answer.op(PUTFH)?;
        answer.op(READLINK)?;
        Ok(answer.opaque())
    }

    /// Make a folder, or a symbolic link to `target`.
    pub fn make(&mut self, folder: &[u8], name: &[u8], target: Option<&[u8]>) -> Result<(), u32> {
        let ops = Ops::default().at(folder).op(CREATE);
        let ops = match target {
            Some(target) => ops.u32(LINK_TYPE).opaque(target),
            None => ops.u32(2),
        };
        let mut answer = self.ask(&ops.opaque(name).no_attributes())?;
        answer.op(PUTFH)?;
        answer.op(CREATE)
    }

    /// Take a name away.
    pub fn remove(&mut self, folder: &[u8], name: &[u8]) -> Result<(), u32> {
        let mut answer = self.ask(&Ops::default().at(folder).op(REMOVE).opaque(name))?;
        answer.op(PUTFH)?;
        answer.op(REMOVE)
    }

    /// Give something another name in the same folder.
    pub fn rename(&mut self, folder: &[u8], from: &[u8], to: &[u8]) -> Result<(), u32> {
        let ops = Ops::default()
            .at(folder)
            .op(SAVEFH)
            .op(RENAME)
            .opaque(from)
            .opaque(to);
        let mut answer = self.ask(&ops)?;
        answer.op(PUTFH)?;
        answer.op(SAVEFH)?;
        answer.op(RENAME)
    }

    /// Open a name for reading and writing, and make it if asked.
    pub fn open(&mut self, folder: &[u8], name: &[u8], make: bool) -> Result<Open, u32> {
        let how = |ops: Ops| {
            let ops = ops.u32(u32::from(make));
            let ops = if make {
                ops.u32(0).no_attributes()
            } else {
                ops
            };
            ops.u32(0).opaque(name)
        };
        // The lease is two seconds, and nobody renews it beside the requests of a test: on a busy
        // machine it expires between two of them. A kernel's client asks for a new id then.
        for _ in 0..EXPIRED_MAX {
            match self.open_by(Ops::default().at(folder), how) {
                Err(NFS4ERR_EXPIRED) => self.identify(),
                other => return other,
            }
        }
        Err(NFS4ERR_EXPIRED)
    }

    /// Claim a file that was open before the server was started again.
    pub fn reclaim(&mut self, open: &Open) -> Result<Open, u32> {
        self.open_by(Ops::default().at(&open.handle), |ops| {
            ops.u32(0).u32(1).u32(0)
        })
    }

    fn open_by(&mut self, ops: Ops, how: impl FnOnce(Ops) -> Ops) -> Result<Open, u32> {
        self.owners += 1;
        let owner = self.owners;
        let ops = ops
            .op(OPEN)
            .u32(1)
            .u32(3)
            .u32(0)
            .u64(self.client)
            .opaque(&owner.to_be_bytes());
        let mut answer = self.ask(&how(ops).op(GETFH))?;
        answer.op(PUTFH)?;
        answer.op(OPEN)?;
        let mut state: [u8; 16] = answer.fixed();
        // The change of the folder.
        answer.fixed::<20>();
        let flags = answer.u32();
        answer.bitmap();
        assert_eq!(answer.u32(), 0, "no delegation was asked for");
        answer.op(GETFH)?;
        let handle = answer.opaque();
        let mut sequence = 1;
        if flags & 2 != 0 {
            sequence += 1;
            let ops = Ops::default()
                .at(&handle)
                .op(OPEN_CONFIRM)
                .fixed(&state)
                .u32(sequence);
            let mut answer = self.ask(&ops)?;
            answer.op(PUTFH)?;
            answer.op(OPEN_CONFIRM)?;
            state = answer.fixed();
        }
        Ok(Open {
            handle,
            state,
            owner,
            sequence,
        })
    }

    /// Close it.
    pub fn close(&mut self, open: Open) -> Result<(), u32> {
        let ops = Ops::default()
            .at(&open.handle)
            .op(CLOSE)
            .u32(open.sequence + 1)
            .fixed(&open.state);
        let mut answer = self.ask(&ops)?;
        answer.op(PUTFH)?;
        answer.op(CLOSE)
    }

    /// Bytes of an open file.
    pub fn read(&mut self, open: &Open, offset: u64, length: u32) -> Result<Vec<u8>, u32> {
        self.read_by(&open.handle, &open.state, offset, length)
    }

    /// Bytes of whatever a handle leads to; nobody has it open.
    pub fn read_closed(&mut self, handle: &[u8], offset: u64, length: u32) -> Result<Vec<u8>, u32> {
        self.read_by(handle, &ANONYMOUS, offset, length)
    }

    fn read_by(
        &mut self,
        handle: &[u8],
        state: &[u8],
        offset: u64,
        length: u32,
    ) -> Result<Vec<u8>, u32> {
        let ops = Ops::default()
            .at(handle)
            .op(READ)
            .fixed(state)
            .u64(offset)
            .u32(length);
        let mut answer = self.ask(&ops)?;
        answer.op(PUTFH)?;
        answer.op(READ)?;
        answer.u32();
        Ok(answer.opaque())
    }

    /// Write bytes; they are durable when it returns.
    pub fn write(&mut self, open: &Open, offset: u64, bytes: &[u8]) -> Result<(), u32> {
        let mut done = 0;
        while done < bytes.len() {
            let ops = Ops::default()
                .at(&open.handle)
                .op(WRITE)
                .fixed(&open.state)
                .u64(offset + done as u64)
                .u32(2)
                .opaque(&bytes[done..]);
            let mut answer = self.ask(&ops)?;
            answer.op(PUTFH)?;
            answer.op(WRITE)?;
            done += answer.u32() as usize;
        }
        Ok(())
    }

    /// A lock for writing on a range of it, for an owner that has none yet.
    pub fn lock(&mut self, open: &mut Open, offset: u64, length: u64) -> Result<Lock, u32> {
        open.sequence += 1;
        let ops = Ops::default()
            .at(&open.handle)
            .op(LOCK)
            .u32(2)
            .u32(0)
            .u64(offset)
            .u64(length)
            .u32(1)
            .u32(open.sequence)
            .fixed(&open.state)
            .u32(0)
            .u64(self.client)
            .opaque(format!("lock {} {}", open.owner, open.sequence).as_bytes());
        let mut answer = self.ask(&ops)?;
        answer.op(PUTFH)?;
        answer.op(LOCK)?;
        Ok(Lock {
            state: answer.fixed(),
            offset,
            length,
        })
    }

    /// Give it back.
    pub fn unlock(&mut self, open: &Open, lock: Lock) -> Result<(), u32> {
        let ops = Ops::default()
            .at(&open.handle)
            .op(LOCKU)
            .u32(2)
            .u32(1)
            .fixed(&lock.state)
            .u64(lock.offset)
            .u64(lock.length);
        let mut answer = self.ask(&ops)?;
        answer.op(PUTFH)?;
        answer.op(LOCKU)
    }

    /// A page of names from a cookie on; 0 is the start.
    pub fn page(
        &mut self,
        folder: &[u8],
        cookie: u64,
        verifier: [u8; 8],
        bytes_max: u32,
    ) -> Result<Page, u32> {
        let ops = Ops::default()
            .at(folder)
            .op(READDIR)
            .u64(cookie)
            .fixed(&verifier)
            .u32(bytes_max)
            .u32(bytes_max)
            .u32(1)
            .u32(1 << 20);
        let mut answer = self.ask(&ops)?;
        answer.op(PUTFH)?;
        answer.op(READDIR)?;
        let verifier = answer.fixed();
        let mut names = Vec::new();
        while answer.u32() != 0 {
            names.push((answer.u64(), answer.opaque()));
            answer.bitmap();
            answer.opaque();
        }
        Ok(Page {
            names,
            verifier,
            is_last: answer.u32() != 0,
        })
    }

    /// All names of a folder, as many requests as it takes. `between` is called after each.
    pub fn list(
        &mut self,
        folder: &[u8],
        bytes_max: u32,
        mut between: impl FnMut(),
    ) -> Result<Vec<Vec<u8>>, u32> {
        let (mut names, mut cookie, mut verifier) = (Vec::new(), 0, [0; 8]);
        loop {
            let page = self.page(folder, cookie, verifier, bytes_max)?;
            between();
            verifier = page.verifier;
            for (next, name) in page.names {
                cookie = next;
                names.push(name);
            }
            if page.is_last {
                return Ok(names);
            }
        }
    }

    /// The folder of named attributes, which is where a server would show extended ones.
    pub fn named_attributes(&mut self, handle: &[u8]) -> Result<Handle, u32> {
        let mut answer = self.ask(&Ops::default().at(handle).op(OPENATTR).u32(0).op(GETFH))?;
        answer.op(PUTFH)?;
        answer.op(OPENATTR)?;
        answer.op(GETFH)?;
        Ok(answer.opaque())
    }

    /// Which of these rights (1 read … 32 execute) we have.
    pub fn access(&mut self, handle: &[u8], asked: u32) -> Result<u32, u32> {
        let mut answer = self.ask(&Ops::default().at(handle).op(ACCESS).u32(asked))?;
        answer.op(PUTFH)?;
        answer.op(ACCESS)?;
        answer.u32();
        Ok(answer.u32())
    }
}
