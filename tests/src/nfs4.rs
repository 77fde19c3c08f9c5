// SPDX-License-Identifier: Apache-2.0
//! The NFSv4.0 requests of the tests (RFC 7530, 7531), on [`rushes_kit::nfs`]: each returns the
//! status that the server gave.

mod extended;

pub use extended::Extended;
pub use rushes_kit::nfs::{Handle, Open};

use rushes_kit::nfs::{self, Access, Nfs, NfsError, Ops, Stability};
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::time::Duration;

/// The status that a server returns instead of doing it; 0: the connection is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(pub u32);

impl From<NfsError> for Status {
    /// Panics   the answer is none of NFSv4
    fn from(error: NfsError) -> Status {
        match error {
            NfsError::Refused { status, .. } => Status(status),
            NfsError::Gone(_) => Status(0),
            NfsError::Broken(sentence) => panic!("{sentence}"),
        }
    }
}

/// Of RFC 7530, 13.
pub const NFS4ERR_IO: Status = Status(5);
/// A name is too long.
pub const NFS4ERR_NAMETOOLONG: Status = Status(63);
/// Nobody is let in here.
pub const NFS4ERR_ACCESS: Status = Status(13);
/// There is no such name.
pub const NFS4ERR_NOENT: Status = Status(2);
/// The handle leads nowhere.
pub const NFS4ERR_STALE: Status = Status(70);
/// The handle is none.
pub const NFS4ERR_BADHANDLE: Status = Status(10001);
/// The server does not do that.
pub const NFS4ERR_NOTSUPP: Status = Status(10004);
/// The client has not renewed its lease in time.
pub const NFS4ERR_EXPIRED: Status = Status(10011);
/// Somebody else has the lock.
pub const NFS4ERR_DENIED: Status = Status(10010);
/// Clients are still claiming what they had before a restart.
pub const NFS4ERR_GRACE: Status = Status(nfs::NFS4ERR_GRACE);

const ACCESS: u32 = 3;
const CREATE: u32 = 6;
const GETATTR: u32 = 9;
const LINK_TYPE: u32 = 5;
const LOCK: u32 = 12;
const LOCKU: u32 = 14;
const OPENATTR: u32 = 19;
const READDIR: u32 = 26;
const READLINK: u32 = 27;
const REMOVE: u32 = 28;
const RENAME: u32 = 29;
const SAVEFH: u32 = 32;
const SETATTR: u32 = 34;
/// Reads by it ask for no open file.
const ANONYMOUS: [u8; 16] = [0; 16];
/// Longer than anything but a hang takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// A connection, with its client id if it asked for one.
#[derive(Debug)]
pub struct Nfs4 {
    nfs: Nfs,
    /// By what it is known: name and boot.
    known_as: Option<(String, u64)>,
}

/// So often in a row an open finds that the lease has expired.
const EXPIRED_MAX: usize = 5;

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

/// No attributes are set.
fn no_attributes(ops: Ops) -> Ops {
    ops.u32(0).u32(0)
}

impl Nfs4 {
    /// Connect, from an address of this machine.
    pub fn connect_from(from: IpAddr, port: u16) -> Nfs4 {
        let socket = nfs::privileged_socket(from).expect("a socket");
        Nfs4::over(nfs::connect(
            socket.expect("an address of this machine, and a free port"),
            port,
        ))
    }

    /// The same from a port that any program may have.
    pub fn connect_from_any_port(port: u16) -> Nfs4 {
        Nfs4::over(nfs::connect(nfs::socket().expect("a socket"), port))
    }

    fn over(connected: std::io::Result<TcpStream>) -> Nfs4 {
        let stream = connected.expect("the server listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a time");
        Nfs4 {
            nfs: Nfs::over(stream, "test"),
            known_as: None,
        }
    }

    /// Connect as the client of this name, which may open files. The same name and boot: the same
    /// client.
    pub fn connect(port: u16, name: &str, boot: u64) -> Nfs4 {
        let mut nfs = Nfs4::connect_from(IpAddr::from(Ipv4Addr::LOCALHOST), port);
        nfs.known_as = Some((name.to_owned(), boot));
        nfs.identify();
        nfs
    }

    /// Get a client id for its name and boot.
    fn identify(&mut self) {
        if let Some((name, boot)) = &self.known_as {
            self.nfs.identify(name, *boot).expect("a client id");
        }
    }

    /// The folder that is exported under this name.
    pub fn root(&mut self, name: &str) -> Result<Handle, Status> {
        Ok(self.nfs.root(name)?)
    }

    /// The handle of a name.
    pub fn lookup(&mut self, folder: &[u8], name: &[u8]) -> Result<Handle, Status> {
        let ops = Ops::default()
            .at(folder)
            .op(nfs::LOOKUP)
            .opaque(name)
            .op(nfs::GETFH);
        Ok(self.nfs.result_of(&ops)?.opaque()?.to_vec())
    }

    /// The attributes of a file.
    pub fn known(&mut self, handle: &[u8]) -> Result<Known, Status> {
        let wanted = (1 << 1) | (1 << 4) | (1 << 20);
        let ops = Ops::default().at(handle).op(GETATTR).u32(1).u32(wanted);
        let mut answer = self.nfs.result_of(&ops)?;
        answer.skip_bitmap()?;
        answer.u32()?;
        Ok(Known {
            kind: answer.u32()?,
            size: answer.u64()?,
            number: answer.u64()?,
        })
    }

    /// When it was modified: seconds since 1970, nanoseconds.
    pub fn modified(&mut self, handle: &[u8]) -> Result<(i64, u32), Status> {
        let ops = Ops::default()
            .at(handle)
            .op(GETATTR)
            .u32(2)
            .u32(0)
            .u32(1 << 21);
        let mut answer = self.nfs.result_of(&ops)?;
        answer.skip_bitmap()?;
        answer.u32()?;
        Ok((answer.u64()? as i64, answer.u32()?))
    }

    /// Say when it was modified.
    pub fn set_modified(&mut self, handle: &[u8], time: (i64, u32)) -> Result<(), Status> {
        let time = Ops::default().u32(1).u64(time.0 as u64).u32(time.1);
        let ops = Ops::default()
            .at(handle)
            .op(SETATTR)
            .fixed(&ANONYMOUS)
            .u32(2)
            .u32(0)
            .u32(1 << 22)
            .wrapped(&time);
        self.done(&ops)
    }

    /// Where a symbolic link leads.
    pub fn read_link(&mut self, handle: &[u8]) -> Result<Vec<u8>, Status> {
        let ops = Ops::default().at(handle).op(READLINK);
        Ok(self.nfs.result_of(&ops)?.opaque()?.to_vec())
    }

    /// Make a folder, or a symbolic link to `target`.
    pub fn make(
        &mut self,
        folder: &[u8],
        name: &[u8],
        target: Option<&[u8]>,
    ) -> Result<(), Status> {
        let ops = Ops::default().at(folder).op(CREATE);
        let ops = match target {
            Some(target) => ops.u32(LINK_TYPE).opaque(target),
            None => ops.u32(2),
        };
        self.done(&no_attributes(ops.opaque(name)))
    }

    /// Take a name away.
    pub fn remove(&mut self, folder: &[u8], name: &[u8]) -> Result<(), Status> {
        self.done(&Ops::default().at(folder).op(REMOVE).opaque(name))
    }

    /// Give something another name in the same folder.
    pub fn rename(&mut self, folder: &[u8], from: &[u8], to: &[u8]) -> Result<(), Status> {
        let ops = Ops::default()
            .at(folder)
            .op(SAVEFH)
            .op(RENAME)
            .opaque(from)
            .opaque(to);
        self.done(&ops)
    }

    /// Open a name for reading and writing, and make it if asked.
    pub fn open(&mut self, folder: &[u8], name: &[u8], make: bool) -> Result<Open, Status> {
        let how = Ops::default().u32(u32::from(make));
        let how = if make { no_attributes(how.u32(0)) } else { how };
        let how = how.u32(0).opaque(name);
        // The lease is two seconds, and nobody renews it beside the requests of a test: on a busy
        // machine it expires between two of them. A kernel's client asks for a new id then.
        for _ in 0..EXPIRED_MAX {
            match self
                .nfs
                .open(folder, Access::Both, &how)
                .map_err(Status::from)
            {
                Err(NFS4ERR_EXPIRED) => self.identify(),
                other => return other,
            }
        }
        Err(NFS4ERR_EXPIRED)
    }

    /// Claim a file that was open before the server was started again.
    pub fn reclaim(&mut self, open: &Open) -> Result<Open, Status> {
        let how = Ops::default().u32(0).u32(1).u32(0);
        Ok(self.nfs.open(&open.handle, Access::Both, &how)?)
    }

    /// Close it.
    pub fn close(&mut self, open: Open) -> Result<(), Status> {
        Ok(self.nfs.close(&open)?)
    }

    /// Bytes of an open file.
    pub fn read(&mut self, open: &Open, offset: u64, length: u32) -> Result<Vec<u8>, Status> {
        self.read_by((&open.handle, &open.state), offset, length)
    }

    /// Bytes of whatever a handle leads to; nobody has it open.
    pub fn read_closed(
        &mut self,
        handle: &[u8],
        offset: u64,
        length: u32,
    ) -> Result<Vec<u8>, Status> {
        self.read_by((handle, &ANONYMOUS), offset, length)
    }

    fn read_by(
        &mut self,
        place: (&[u8], &[u8; 16]),
        offset: u64,
        length: u32,
    ) -> Result<Vec<u8>, Status> {
        let mut bytes = vec![0; length as usize];
        let count = self.nfs.read(place, offset, &mut bytes)?;
        bytes.truncate(count);
        Ok(bytes)
    }

    /// Write bytes; they are durable when it returns.
    pub fn write(&mut self, open: &Open, offset: u64, bytes: &[u8]) -> Result<(), Status> {
        let mut done = 0;
        while done < bytes.len() {
            let (at, rest) = (offset + done as u64, &bytes[done..]);
            done += self.nfs.write(open, at, Stability::Durable, rest)?;
        }
        Ok(())
    }

    /// A lock for writing on a range of it, for an owner that has none yet.
    pub fn lock(&mut self, open: &mut Open, offset: u64, length: u64) -> Result<Lock, Status> {
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
            .u64(self.nfs.client())
            .opaque(format!("lock {} {}", open.owner, open.sequence).as_bytes());
        Ok(Lock {
            state: self.nfs.result_of(&ops)?.fixed()?,
            offset,
            length,
        })
    }

    /// Give it back.
    pub fn unlock(&mut self, open: &Open, lock: Lock) -> Result<(), Status> {
        let ops = Ops::default()
            .at(&open.handle)
            .op(LOCKU)
            .u32(2)
            .u32(1)
            .fixed(&lock.state)
            .u64(lock.offset)
            .u64(lock.length);
        self.done(&ops)
    }

    /// A page of names from a cookie on; 0 is the start.
    pub fn page(
        &mut self,
        folder: &[u8],
        cookie: u64,
        verifier: [u8; 8],
        bytes_max: u32,
    ) -> Result<Page, Status> {
        let ops = Ops::default()
            .at(folder)
            .op(READDIR)
            .u64(cookie)
            .fixed(&verifier)
            .u32(bytes_max)
            .u32(bytes_max)
            .u32(1)
            .u32(1 << 20);
        let mut answer = self.nfs.result_of(&ops)?;
        let verifier = answer.fixed()?;
        let mut names = Vec::new();
        while answer.u32()? != 0 {
            names.push((answer.u64()?, answer.opaque()?.to_vec()));
            answer.skip_bitmap()?;
            answer.opaque()?;
        }
        Ok(Page {
            names,
            verifier,
            is_last: answer.u32()? != 0,
        })
    }

    /// All names of a folder, as many requests as it takes. `between` is called after each.
    pub fn list(
        &mut self,
        folder: &[u8],
        bytes_max: u32,
        mut between: impl FnMut(),
    ) -> Result<Vec<Vec<u8>>, Status> {
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
    pub fn named_attributes(&mut self, handle: &[u8]) -> Result<Handle, Status> {
        let ops = Ops::default().at(handle).op(OPENATTR).u32(0).op(nfs::GETFH);
        Ok(self.nfs.result_of(&ops)?.opaque()?.to_vec())
    }

    /// Which of these rights (1 read … 32 execute) we have.
    pub fn access(&mut self, handle: &[u8], asked: u32) -> Result<u32, Status> {
        let ops = Ops::default().at(handle).op(ACCESS).u32(asked);
        let mut answer = self.nfs.result_of(&ops)?;
        answer.u32()?;
        Ok(answer.u32()?)
    }

    /// A request that returns nothing.
    fn done(&mut self, ops: &Ops) -> Result<(), Status> {
        self.nfs.result_of(ops)?;
        Ok(())
    }
}
