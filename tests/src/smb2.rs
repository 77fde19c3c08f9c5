// SPDX-License-Identifier: Apache-2.0
//! An SMB2 client in a few hundred lines, for what libsmbclient does not let us say: several
//! requests under way in one connection, ranges made zero, copies on the server, allocation sizes.
//!
//! It comes as a guest (no keys, so no signing and no encryption), speaks the oldest dialect
//! (2.0.2: at most 64 KiB a request, one credit each) unless leases are wanted (2.1), and keeps
//! nothing for itself unless it is told to ([`Keeping`]). Any number of threads may use one
//! connection: each waits for its own answers only, and every wait has a bound.

mod keeping;

pub use keeping::{Break, Keeping, Kept};

use rushes_kit::wire::utf16;
use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Line of smb.conf's `[global]` under which guests are let in.
pub const GLOBAL: &str = "map to guest = bad user";
/// Lines of the share for the same.
pub const SHARE_LINES: [&str; 2] = ["guest ok = yes", "force user = daemon"];
/// Most bytes of one request.
pub const REQUEST_MAX: usize = 65_536;

/// Longer than anything but a hang takes.
const ANSWER_MAX: Duration = Duration::from_secs(60);
const HEADER: usize = 64;
const PENDING: u32 = 0x0000_0103;
const BUFFER_OVERFLOW: u32 = 0x8000_0005;
const NO_MORE_FILES: u32 = 0x8000_0006;
const END_OF_FILE: u32 = 0xC000_0011;
const MORE_PROCESSING: u32 = 0xC000_0016;
const NO_SUCH_FILE: u32 = 0xC000_000F;
const NO_ATTRIBUTES: u32 = 0xC000_0052;
/// Id of what a server says unasked.
const UNASKED: u64 = u64::MAX;
/// Dialects: SMB 2.0.2 and 2.1.
const OLDEST: u16 = 0x0202;
const WITH_LEASES: u16 = 0x0210;
/// Reading, writing, attributes of both kinds, deleting; and no deleting.
const EVERYTHING: u32 = 0x0013_019F;
/// Reading bytes and attributes alone.
const READING: u32 = 0x0012_0089;
/// With everybody, for everything.
const SHARED: u32 = 7;
/// It must be no folder.
const NO_FOLDER: u32 = 0x40;

/// There is no such name.
pub const NOT_FOUND: u32 = 0xC000_0034;
/// It is no name.
pub const NO_NAME: u32 = 0xC000_0033;
/// Somebody has a lock on these bytes.
pub const LOCK_CONFLICT: u32 = 0xC000_0054;
/// Somebody opened it and does not share it for this.
pub const SHARING_VIOLATION: u32 = 0xC000_0043;
/// It goes with its last close, and nobody opens it any more.
pub const DELETE_PENDING: u32 = 0xC000_0056;

/// Somebody else has it.
pub const LOCK_NOT_GRANTED: u32 = 0xC000_0055;
/// The status from a client of [`Connection::connect_mortal`] when its server has ended the
/// connection.
pub const GONE: Status = Status(0xC000_020C);
/// The status when nobody has answered for a minute.
pub const HANGS: Status = Status(0xC000_00B5);
/// "disk full"
pub const DISK_FULL: u32 = 0xC000_007F;
/// A limit of a user or a folder.
pub const QUOTA_EXCEEDED: u32 = 0xC000_0044;

/// The status that a server returns instead of doing it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(pub u32);

/// An open file.
#[derive(Clone, Copy, Debug)]
pub struct Handle([u8; 16]);

/// Rights and manner of an open; start from [`Access::default`].
#[derive(Clone, Copy, Debug)]
pub struct Access {
    /// `FILE_WRITE_DATA`; without it a handle may append alone.
    pub write: bool,
    /// `FILE_WRITE_THROUGH`: each write is answered when it is on stable storage.
    pub write_through: bool,
}

impl Default for Access {
    fn default() -> Access {
        Access {
            write: true,
            write_through: false,
        }
    }
}

/// The facts of a file that a server gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    /// In units of 100 ns since 1601.
    pub written: u64,
    /// Bytes on the disk, as the server tells them.
    pub allocated: u64,
    /// Length.
    pub size: u64,
}

/// The treatment of a file that is there, or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// Must be there.
    Open = 1,
    /// Made if it is not there.
    OpenIf = 3,
    /// Cut to nothing, or made.
    OverwriteIf = 5,
}

/// Part of a file to be copied by the server.
#[derive(Clone, Copy, Debug)]
pub struct Chunk {
    /// Where it is.
    pub from: u64,
    /// Where it goes.
    pub to: u64,
    /// Bytes.
    pub length: u32,
}

type Waiting = Arc<Mutex<HashMap<u64, SyncSender<Vec<u8>>>>>;

/// The access for which a file is opened, and how.
#[derive(Clone, Copy, Debug)]
struct Manner {
    access: u32,
    share: u32,
    options: u32,
    oplock: u8,
}

/// For everything, sharing it with everybody, keeping nothing.
const PLAINLY: Manner = Manner {
    access: EVERYTHING,
    share: SHARED,
    options: NO_FOLDER,
    oplock: 0,
};

/// A tree connect.
#[derive(Debug)]
pub struct Connection {
    out: Mutex<(TcpStream, u64)>,
    waiting: Waiting,
    unasked: Mutex<Receiver<Vec<u8>>>,
    session: u64,
    tree: u32,
    /// Its server may end meanwhile.
    is_mortal: bool,
}

impl Connection {
    /// Connect to a share as guest.
    pub fn connect(port: u16, share: &str) -> io::Result<Connection> {
        Connection::speaking(OLDEST, port, share)
    }

    /// The same to a server that may end meanwhile: what nobody answers fails with [`GONE`] or
    /// [`HANGS`].
    pub fn connect_mortal(port: u16, share: &str) -> io::Result<Connection> {
        let mut connection = Connection::new(port)?;
        connection.is_mortal = true;
        connection.introduce(OLDEST, share)?;
        Ok(connection)
    }

    /// The same in a dialect that has leases.
    pub fn connect_with_leases(port: u16, share: &str) -> io::Result<Connection> {
        Connection::speaking(WITH_LEASES, port, share)
    }

    fn speaking(dialect: u16, port: u16, share: &str) -> io::Result<Connection> {
        let mut connection = Connection::new(port)?;
        connection.introduce(dialect, share)?;
        Ok(connection)
    }

    fn introduce(&mut self, dialect: u16, share: &str) -> io::Result<()> {
        self.negotiate(dialect)?;
        self.log_on()?;
        self.connect_tree(share)
    }

    fn new(port: u16) -> io::Result<Connection> {
        let stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_nodelay(true)?;
        let waiting = Waiting::default();
        let (mut incoming, told) = (stream.try_clone()?, Arc::clone(&waiting));
        let (tell, unasked) = channel();
        std::thread::spawn(move || {
            while let Ok(answer) = next_answer(&mut incoming) {
                hand_out(&told, &tell, answer);
            }
            // A caller that asks from now on cannot send, and one that still waits sees its channel
            // closed.
            let _ = incoming.shutdown(std::net::Shutdown::Both);
            lock(&told).clear();
        });
        Ok(Connection {
            out: Mutex::new((stream, 0)),
            waiting,
            unasked: Mutex::new(unasked),
            session: 0,
            tree: 0,
            is_mortal: false,
        })
    }

    fn negotiate(&self, dialect: u16) -> io::Result<()> {
        // Leases are a client's, whatever its connections: each of ours is one.
        static CLIENTS: AtomicU64 = AtomicU64::new(1);
        let mut body = Bytes::new(36);
        body.u16(1).u16(1).u16(0).u32(0);
        body.u64(u64::from(std::process::id()))
            .u64(CLIENTS.fetch_add(1, Ordering::Relaxed));
        body.u64(0).u16(dialect);
        self.ask(0, &body.0).map(|_| ()).map_err(said)
    }

    fn log_on(&mut self) -> io::Result<()> {
        let flags = 0x0008_8205; // unicode, target, NTLM, always sign, extended session security
        let mut hello = Bytes::default();
        hello.raw(b"NTLMSSP\0").u32(1).u32(flags).raw(&[0; 16]);
        let answer = self.set_up_session(&hello.0)?;
        self.session = u64_at(&answer, 40);
        // Neither a name nor a proof: a client that says nothing is a guest.
        let mut nobody = Bytes::default();
        nobody.raw(b"NTLMSSP\0").u32(3);
        for _ in 0..6 {
            nobody.u16(0).u16(0).u32(64);
        }
        nobody.u32(flags | 0x800); // anonymous
        self.set_up_session(&nobody.0).map(|_| ())
    }

    fn set_up_session(&self, token: &[u8]) -> io::Result<Vec<u8>> {
        let mut body = Bytes::new(25);
        body.raw(&[0, 1])
            .u32(0)
            .u32(0)
            .u16(88)
            .u16(token.len() as u16);
        body.u64(0).raw(token);
        let answer = self.exchange(1, &body.0)?;
        match status_of(&answer) {
            0 | MORE_PROCESSING => Ok(answer),
            status => Err(said(Status(status))),
        }
    }

    fn connect_tree(&mut self, share: &str) -> io::Result<()> {
        let path = utf16(&format!("\\\\127.0.0.1\\{share}"));
        let mut body = Bytes::new(9);
        body.u16(0).u16(72).u16(path.len() as u16).raw(&path);
        let answer = self.ask(3, &body.0).map_err(said)?;
        self.tree = u32_at(&answer, 36);
        Ok(())
    }

    /// Open a file for everything, sharing it with everybody.
    pub fn open(&self, name: &str, how: Disposition) -> Result<(Handle, Info), Status> {
        self.create(name, how, PLAINLY, None)
            .map(|answer| opened(&answer))
    }

    /// The same, with other rights or in another manner.
    pub fn open_as(&self, name: &str, how: Disposition, access: Access) -> Result<Handle, Status> {
        let append_alone = EVERYTHING & !2;
        let manner = Manner {
            access: if access.write {
                EVERYTHING
            } else {
                append_alone
            },
            options: NO_FOLDER | if access.write_through { 2 } else { 0 },
            ..PLAINLY
        };
        self.create(name, how, manner, None)
            .map(|answer| opened(&answer).0)
    }

    /// The same of a file that is there, for reading alone.
    pub fn open_to_read(&self, name: &str) -> Result<(Handle, Info), Status> {
        let manner = Manner {
            access: READING,
            ..PLAINLY
        };
        self.create(name, Disposition::Open, manner, None)
            .map(|answer| opened(&answer))
    }

    /// The same, saying how long it will be.
    pub fn open_sized(&self, name: &str, how: Disposition, bytes: u64) -> Result<Handle, Status> {
        self.create(name, how, PLAINLY, Some((b"AlSi", &bytes.to_le_bytes())))
            .map(|answer| opened(&answer).0)
    }

    /// The same for oneself alone: nobody else may read, write or delete it meanwhile.
    pub fn open_alone(&self, name: &str, how: Disposition) -> Result<Handle, Status> {
        let manner = Manner {
            share: 0,
            ..PLAINLY
        };
        self.create(name, how, manner, None)
            .map(|answer| opened(&answer).0)
    }

    fn create(
        &self,
        name: &str,
        how: Disposition,
        manner: Manner,
        context: Option<(&[u8; 4], &[u8])>,
    ) -> Result<Vec<u8>, Status> {
        let name = utf16(name);
        let mut body = Bytes::new(57);
        body.raw(&[0, manner.oplock]).u32(2).u64(0).u64(0);
        body.u32(manner.access).u32(0).u32(manner.share);
        body.u32(how as u32).u32(manner.options);
        body.u16(120).u16(name.len() as u16);
        let context_at = (120 + name.len()).next_multiple_of(8);
        let (at, length) = match context {
            Some((_, data)) => (context_at, 24 + data.len()),
            None => (0, 0),
        };
        body.u32(at as u32).u32(length as u32).raw(&name);
        if name.is_empty() {
            body.raw(&[0]);
        }
        if let Some((tag, data)) = context {
            body.0.resize(context_at - HEADER, 0);
            body.u32(0).u16(16).u16(4).u16(0).u16(24);
            body.u32(data.len() as u32).raw(tag).u32(0).raw(data);
        }
        self.ask(5, &body.0)
    }

    /// Close.
    pub fn close(&self, file: Handle) -> Result<(), Status> {
        let mut body = Bytes::new(24);
        body.u16(0).u32(0).raw(&file.0);
        self.ask(6, &body.0).map(|_| ())
    }

    /// To stable storage.
    pub fn flush(&self, file: Handle) -> Result<(), Status> {
        let mut body = Bytes::new(24);
        body.u16(0).u32(0).raw(&file.0);
        self.ask(7, &body.0).map(|_| ())
    }

    /// Read; shorter only at the end of the file.
    pub fn read(&self, file: Handle, offset: u64, length: usize) -> Result<Vec<u8>, Status> {
        let mut body = Bytes::new(49);
        body.raw(&[0, 0])
            .u32(length as u32)
            .u64(offset)
            .raw(&file.0);
        body.u32(0).u32(0).u32(0).u32(0).raw(&[0]);
        match self.ask(8, &body.0) {
            Ok(answer) => {
                let at = usize::from(answer[HEADER + 2]);
                let count = u32_at(&answer, HEADER + 4) as usize;
                Ok(answer[at..at + count].to_vec())
            }
            Err(Status(END_OF_FILE)) => Ok(Vec::new()),
            Err(status) => Err(status),
        }
    }

    /// Write all of it, by a server that may end meanwhile.
    pub fn try_write(&self, file: Handle, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let answer = self.exchange(9, &write_body(file, offset, bytes, 0))?;
        match status_of(&answer) {
            0 => Ok(()),
            status => Err(said(Status(status))),
        }
    }

    /// Write all of it.
    pub fn write(&self, file: Handle, offset: u64, bytes: &[u8]) -> Result<(), Status> {
        self.write_flagged(file, offset, bytes, 0)
    }

    /// The same with `SMB2_WRITEFLAG_WRITE_THROUGH`: it is answered when it is on stable storage.
    pub fn write_through(&self, file: Handle, offset: u64, bytes: &[u8]) -> Result<(), Status> {
        self.write_flagged(file, offset, bytes, 1)
    }

    fn write_flagged(
        &self,
        file: Handle,
        offset: u64,
        bytes: &[u8],
        flags: u32,
    ) -> Result<(), Status> {
        let answer = self.ask(9, &write_body(file, offset, bytes, flags))?;
        let count = u32_at(&answer, HEADER + 4) as usize;
        assert_eq!(count, bytes.len(), "a write was cut short");
        Ok(())
    }

    /// Lock a range for oneself, or unlock it. A lock is not waited for.
    pub fn lock(&self, file: Handle, from: u64, length: u64, locks: bool) -> Result<(), Status> {
        let mut body = Bytes::new(48);
        body.u16(1).u32(0).raw(&file.0).u64(from).u64(length);
        // Exclusive and fail at once; or unlock.
        body.u32(if locks { 0x12 } else { 0x04 }).u32(0);
        self.ask(10, &body.0).map(|_| ())
    }

    /// FSCTL: a question about a file, or an order.
    fn control(&self, file: Handle, code: u32, input: &[u8]) -> Result<Vec<u8>, Status> {
        let mut body = Bytes::new(57);
        body.u16(0).u32(code).raw(&file.0);
        body.u32(120).u32(input.len() as u32).u32(0);
        body.u32(0).u32(0).u32(REQUEST_MAX as u32).u32(1).u32(0);
        body.raw(input);
        if input.is_empty() {
            body.raw(&[0]);
        }
        let answer = self.ask(11, &body.0)?;
        let at = u32_at(&answer, HEADER + 32) as usize;
        let count = u32_at(&answer, HEADER + 36) as usize;
        Ok(if count == 0 {
            Vec::new()
        } else {
            answer[at..at + count].to_vec()
        })
    }

    /// `FSCTL_SET_ZERO_DATA`: bytes become zero, the length stays.
    pub fn zero(&self, file: Handle, from: u64, to: u64) -> Result<(), Status> {
        let mut input = Bytes::default();
        input.u64(from).u64(to);
        self.control(file, 0x0009_80C8, &input.0).map(|_| ())
    }

    /// `FSCTL_SET_SPARSE`.
    pub fn set_sparse(&self, file: Handle, sparse: bool) -> Result<(), Status> {
        self.control(file, 0x0009_00C4, &[u8::from(sparse)])
            .map(|_| ())
    }

    /// `FSCTL_QUERY_ALLOCATED_RANGES`: where bytes are, as (offset, length).
    pub fn allocated(
        &self,
        file: Handle,
        from: u64,
        length: u64,
    ) -> Result<Vec<(u64, u64)>, Status> {
        let mut input = Bytes::default();
        input.u64(from).u64(length);
        let answer = self.control(file, 0x0009_40CF, &input.0)?;
        Ok(answer
            .chunks_exact(16)
            .map(|pair| (u64_at(pair, 0), u64_at(pair, 8)))
            .collect())
    }

    /// `FSCTL_SRV_COPYCHUNK`: the server copies from one file to another.
    pub fn copy(&self, from: Handle, to: Handle, chunks: &[Chunk]) -> Result<(), Status> {
        let key = self.control(from, 0x0014_0078, &[])?;
        let mut input = Bytes::default();
        input.raw(&key[..24]).u32(chunks.len() as u32).u32(0);
        for chunk in chunks {
            input.u64(chunk.from).u64(chunk.to).u32(chunk.length).u32(0);
        }
        self.control(to, 0x0014_40F2, &input.0).map(|_| ())
    }

    fn set_info(&self, file: Handle, class: u8, buffer: &[u8]) -> Result<(), Status> {
        let mut body = Bytes::new(33);
        body.raw(&[1, class])
            .u32(buffer.len() as u32)
            .u16(96)
            .u16(0);
        body.u32(0).raw(&file.0).raw(buffer);
        self.ask(17, &body.0).map(|_| ())
    }

    /// Set the length.
    pub fn set_size(&self, file: Handle, bytes: u64) -> Result<(), Status> {
        self.set_info(file, 20, &bytes.to_le_bytes())
    }

    /// Set the allocation size: cuts a file that is longer.
    pub fn set_allocation(&self, file: Handle, bytes: u64) -> Result<(), Status> {
        self.set_info(file, 19, &bytes.to_le_bytes())
    }

    /// Set the time of the last write.
    pub fn set_written(&self, file: Handle, time: u64) -> Result<(), Status> {
        let mut buffer = Bytes::default();
        buffer.u64(0).u64(0).u64(time).u64(0).u64(0);
        self.set_info(file, 4, &buffer.0)
    }

    /// Give a file another name; a file that has that name loses it.
    pub fn rename(&self, file: Handle, to: &str) -> Result<(), Status> {
        self.set_info(file, 10, &another_name(to))
    }

    /// Give a file one more name.
    pub fn link(&self, file: Handle, to: &str) -> Result<(), Status> {
        self.set_info(file, 11, &another_name(to))
    }

    /// Set an extended attribute, as the protocol has them.
    pub fn set_attribute(&self, file: Handle, name: &str, value: &[u8]) -> Result<(), Status> {
        let mut buffer = Bytes::default();
        buffer.u32(0).raw(&[0, name.len() as u8]);
        buffer.u16(value.len() as u16);
        buffer.raw(name.as_bytes()).raw(&[0]).raw(value);
        self.set_info(file, 15, &buffer.0)
    }

    /// Names and values of its extended attributes.
    pub fn attributes(&self, file: Handle) -> Result<Vec<(String, Vec<u8>)>, Status> {
        let mut body = Bytes::new(41);
        body.raw(&[1, 15]).u32(REQUEST_MAX as u32).u16(0).u16(0);
        // From the first one on.
        body.u32(0).u32(0).u32(1).raw(&file.0).raw(&[0]);
        let answer = match self.ask(16, &body.0) {
            Err(Status(NO_ATTRIBUTES)) => return Ok(Vec::new()),
            answer => answer?,
        };
        let mut at = usize::from(u16_at(&answer, HEADER + 2));
        let mut found = Vec::new();
        // An empty list has a length of 0.
        while at + 8 <= answer.len() {
            let name_length = usize::from(answer[at + 5]);
            let value_length = usize::from(u16_at(&answer, at + 6));
            let name = &answer[at + 8..][..name_length];
            let value = &answer[at + 9 + name_length..][..value_length];
            found.push((String::from_utf8_lossy(name).into_owned(), value.to_vec()));
            match u32_at(&answer, at) {
                0 => break,
                next => at += next as usize,
            }
        }
        Ok(found)
    }

    /// It goes with its last close.
    pub fn delete_on_close(&self, file: Handle) -> Result<(), Status> {
        self.set_info(file, 13, &[1])
    }

    /// The facts of an open file.
    pub fn info(&self, file: Handle) -> Result<Info, Status> {
        let mut body = Bytes::new(41);
        // FileNetworkOpenInformation
        body.raw(&[1, 34])
            .u32(56)
            .u16(0)
            .u16(0)
            .u32(0)
            .u32(0)
            .u32(0);
        body.raw(&file.0).raw(&[0]);
        let answer = self.ask(16, &body.0)?;
        let at = usize::from(u16_at(&answer, HEADER + 2));
        Ok(Info {
            written: u64_at(&answer, at + 16),
            allocated: u64_at(&answer, at + 32),
            size: u64_at(&answer, at + 40),
        })
    }

    /// The folder's entry of a name; None: nothing of that name.
    pub fn list(&self, name: &str) -> Result<Option<Info>, Status> {
        let found = self.pages(name, 1)?;
        Ok(found.first().map(|page| {
            let at = usize::from(u16_at(page, HEADER + 2));
            Info {
                written: u64_at(page, at + 24),
                allocated: u64_at(page, at + 48),
                size: u64_at(page, at + 40),
            }
        }))
    }

    /// All names in the share's own folder, as the server shows them.
    pub fn names(&self) -> Result<Vec<String>, Status> {
        let mut names = Vec::new();
        for page in self.pages("*", usize::MAX)? {
            let mut at = usize::from(u16_at(&page, HEADER + 2));
            loop {
                let length = u32_at(&page, at + 60) as usize;
                let units: Vec<u16> = page[at + 64..][..length]
                    .chunks_exact(2)
                    .map(|pair| u16_at(pair, 0))
                    .collect();
                names.push(String::from_utf16_lossy(&units));
                match u32_at(&page, at) {
                    0 => break,
                    next => at += next as usize,
                }
            }
        }
        names.retain(|name| name != "." && name != "..");
        Ok(names)
    }

    /// Answers about the names of the share's own folder that match.
    fn pages(&self, pattern: &str, page_count_max: usize) -> Result<Vec<Vec<u8>>, Status> {
        let manner = Manner {
            access: 0x0010_0081,
            options: 1,
            ..PLAINLY
        };
        let (folder, _) = opened(&self.create("", Disposition::Open, manner, None)?);
        let pattern = utf16(pattern);
        let mut body = Bytes::new(33);
        body.raw(&[1, 0]).u32(0).raw(&folder.0);
        body.u16(96)
            .u16(pattern.len() as u16)
            .u32(REQUEST_MAX as u32);
        body.raw(&pattern);
        let mut pages = Vec::new();
        let mut end = Ok(());
        while pages.len() < page_count_max && end.is_ok() {
            match self.ask(14, &body.0) {
                Ok(page) => pages.push(page),
                Err(Status(NO_MORE_FILES | NO_SUCH_FILE)) => break,
                Err(status) => end = Err(status),
            }
        }
        self.close(folder)?;
        end.map(|()| pages)
    }

    /// A request and its answer; a failure is a status.
    fn ask(&self, command: u16, body: &[u8]) -> Result<Vec<u8>, Status> {
        let answer = match self.exchange(command, body) {
            Ok(answer) => answer,
            Err(error) if !self.is_mortal => panic!("SMB2 command {command}: {error}"),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => return Err(HANGS),
            Err(_) => return Err(GONE),
        };
        match status_of(&answer) {
            0 | BUFFER_OVERFLOW => Ok(answer),
            status => Err(Status(status)),
        }
    }

    fn exchange(&self, command: u16, body: &[u8]) -> io::Result<Vec<u8>> {
        let (sender, answer) = sync_channel(1);
        {
            let mut out = lock(&self.out);
            let id = out.1;
            out.1 += 1;
            lock(&self.waiting).insert(id, sender);
            let message = self.message(command, id, body);
            out.0.write_all(&message)?;
        }
        answer.recv_timeout(ANSWER_MAX).map_err(|why| match why {
            RecvTimeoutError::Timeout => io::Error::new(
                io::ErrorKind::TimedOut,
                "no answer within a minute: something hangs",
            ),
            RecvTimeoutError::Disconnected => io::Error::other("the server ended the connection"),
        })
    }

    fn message(&self, command: u16, id: u64, body: &[u8]) -> Vec<u8> {
        let mut message = Bytes::default();
        let length = u32::try_from(HEADER + body.len()).expect("far below 16 MiB");
        message.raw(&length.to_be_bytes()).raw(b"\xfeSMB").u16(64);
        // A hundred credits asked for each time, far more than requests are under way.
        message.u16(0).u32(0).u16(command).u16(100).u32(0).u32(0);
        message.u64(id).u32(0xFEFF).u32(self.tree).u64(self.session);
        message.raw(&[0; 16]).raw(body);
        message.0
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The reading thread ends with it.
        let _ = lock(&self.out).0.shutdown(std::net::Shutdown::Both);
    }
}

/// From the answer to a CREATE.
fn opened(answer: &[u8]) -> (Handle, Info) {
    let info = Info {
        written: u64_at(answer, HEADER + 24),
        allocated: u64_at(answer, HEADER + 40),
        size: u64_at(answer, HEADER + 48),
    };
    let mut id = [0; 16];
    id.copy_from_slice(&answer[HEADER + 64..HEADER + 80]);
    (Handle(id), info)
}

/// Of a rename or a link, taking the name from the file that has it.
fn another_name(to: &str) -> Vec<u8> {
    let name = utf16(to);
    let mut buffer = Bytes::default();
    buffer.raw(&[1, 0, 0, 0, 0, 0, 0, 0]).u64(0);
    buffer.u32(name.len() as u32).raw(&name);
    // Windows sends eight bytes of a name at least.
    buffer.0.resize(buffer.0.len().max(24), 0);
    buffer.0
}

fn write_body(file: Handle, offset: u64, bytes: &[u8], flags: u32) -> Vec<u8> {
    let mut body = Bytes::new(49);
    body.u16(112).u32(bytes.len() as u32).u64(offset);
    body.raw(&file.0).u32(0).u32(0).u32(0).u32(flags).raw(bytes);
    body.0
}

fn next_answer(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let mut answer = vec![0; u32::from_be_bytes(length) as usize];
    stream.read_exact(&mut answer)?;
    Ok(answer)
}

fn hand_out(waiting: &Waiting, unasked: &Sender<Vec<u8>>, answer: Vec<u8>) {
    if answer.len() < HEADER || status_of(&answer) == PENDING {
        return;
    }
    if u64_at(&answer, 24) == UNASKED {
        // Nobody listens when the connection is going.
        let _ = unasked.send(answer);
        return;
    }
    if let Some(sender) = lock(waiting).remove(&u64_at(&answer, 24)) {
        let _ = sender.send(answer);
    }
}

/// A thread that failed holding it left nothing half done.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn said(status: Status) -> io::Error {
    io::Error::other(format!("the server says {:#010x}", status.0))
}

fn status_of(answer: &[u8]) -> u32 {
    u32_at(answer, 8)
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

/// A message under construction: little-endian numbers, one after the other.
#[derive(Default)]
struct Bytes(Vec<u8>);

impl Bytes {
    /// A body; each begins with its own size, as [MS-SMB2] has it.
    fn new(size: u16) -> Bytes {
        Bytes(size.to_le_bytes().to_vec())
    }

    fn raw(&mut self, bytes: &[u8]) -> &mut Bytes {
        self.0.extend_from_slice(bytes);
        self
    }

    fn u16(&mut self, value: u16) -> &mut Bytes {
        self.raw(&value.to_le_bytes())
    }

    fn u32(&mut self, value: u32) -> &mut Bytes {
        self.raw(&value.to_le_bytes())
    }

    fn u64(&mut self, value: u64) -> &mut Bytes {
        self.raw(&value.to_le_bytes())
    }
}
