// SPDX-License-Identifier: Apache-2.0
//! An SMB2 client in a few hundred lines, for what libsmbclient does not let us say: several requests
//! under way in one connection, ranges made zero, copies on the server, allocation sizes.
//!
//! It comes as a guest (no keys, so no signing and no encryption), speaks the oldest dialect (2.0.2: at
//! most 64 KiB a request, one credit each) and asks for no oplocks. Any number of threads may use one
//! connection: each waits for its own answers only, and every wait has a bound.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
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

/// Somebody else has it.
pub const LOCK_NOT_GRANTED: u32 = 0xC000_0055;
/// "disk full"
pub const DISK_FULL: u32 = 0xC000_007F;
/// A limit of a user or a folder.
pub const QUOTA_EXCEEDED: u32 = 0xC000_0044;

/// What a server says instead of doing it.
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

/// What a server knows about a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    /// In units of 100 ns since 1601.
    pub written: u64,
    /// Bytes on the disk, as the server tells them.
    pub allocated: u64,
    /// Length.
    pub size: u64,
}

/// What to do with a file that is there, or not.
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

/// A tree connect.
#[derive(Debug)]
pub struct Connection {
    out: Mutex<(TcpStream, u64)>,
    waiting: Waiting,
    session: u64,
    tree: u32,
}

impl Connection {
    /// Connect to a share as guest.
    pub fn connect(port: u16, share: &str) -> io::Result<Connection> {
        let stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_nodelay(true)?;
        let waiting = Waiting::default();
        let (mut incoming, told) = (stream.try_clone()?, Arc::clone(&waiting));
        std::thread::spawn(move || {
            while let Ok(answer) = next_answer(&mut incoming) {
                hand_out(&told, answer);
            }
            // Who asks from now on cannot send, and whoever still waits sees its channel closed.
            let _ = incoming.shutdown(std::net::Shutdown::Both);
            lock(&told).clear();
        });
        let mut connection = Connection {
            out: Mutex::new((stream, 0)),
            waiting,
            session: 0,
            tree: 0,
        };
        connection.negotiate()?;
        connection.log_on()?;
        connection.connect_tree(share)?;
        Ok(connection)
    }

    fn negotiate(&self) -> io::Result<()> {
        let mut body = Bytes::new(36);
        body.u16(1).u16(1).u16(0).u32(0).raw(&[0; 16]).u64(0);
        body.u16(0x0202);
        self.ask(0, &body.0).map(|_| ()).map_err(said)
    }

    fn log_on(&mut self) -> io::Result<()> {
        let flags = 0x0008_8205; // unicode, target, NTLM, always sign, extended session security
        let mut hello = Bytes::default();
        hello.raw(b"NTLMSSP\0").u32(1).u32(flags).raw(&[0; 16]);
        let answer = self.set_up_session(&hello.0)?;
        self.session = u64_at(&answer, 40);
        // Neither a name nor a proof: whoever says nothing is a guest.
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
        let path = wide(&format!("\\\\127.0.0.1\\{share}"));
        let mut body = Bytes::new(9);
        body.u16(0).u16(72).u16(path.len() as u16).raw(&path);
        let answer = self.ask(3, &body.0).map_err(said)?;
        self.tree = u32_at(&answer, 36);
        Ok(())
    }

    /// Open a file for everything, sharing it with everybody.
    pub fn open(&self, name: &str, how: Disposition) -> Result<(Handle, Info), Status> {
        self.create(name, how, 0x0013_019F, 0x40, None)
    }

    /// The same, with other rights or in another manner.
    pub fn open_as(&self, name: &str, how: Disposition, access: Access) -> Result<Handle, Status> {
        let rights = if access.write {
            0x0013_019F
        } else {
            0x0013_019D
        };
        let options = if access.write_through { 0x42 } else { 0x40 };
        self.create(name, how, rights, options, None)
            .map(|(handle, _)| handle)
    }

    /// The same, saying how long it will be.
    pub fn open_sized(&self, name: &str, how: Disposition, bytes: u64) -> Result<Handle, Status> {
        self.create(name, how, 0x0013_019F, 0x40, Some(bytes))
            .map(|(handle, _)| handle)
    }

    fn create(
        &self,
        name: &str,
        how: Disposition,
        access: u32,
        options: u32,
        allocation: Option<u64>,
    ) -> Result<(Handle, Info), Status> {
        let name = wide(name);
        let mut body = Bytes::new(57);
        body.raw(&[0, 0]).u32(2).u64(0).u64(0);
        body.u32(access).u32(0).u32(7).u32(how as u32).u32(options);
        body.u16(120).u16(name.len() as u16);
        let context_at = (120 + name.len()).next_multiple_of(8);
        let context_bytes = if allocation.is_some() { 32 } else { 0 };
        body.u32(if allocation.is_some() {
            context_at as u32
        } else {
            0
        });
        body.u32(context_bytes).raw(&name);
        if name.is_empty() {
            body.raw(&[0]);
        }
        if let Some(bytes) = allocation {
            body.0.resize(context_at - HEADER, 0);
            body.u32(0).u16(16).u16(4).u16(0).u16(24).u32(8);
            body.raw(b"AlSi").u32(0).u64(bytes);
        }
        let answer = self.ask(5, &body.0)?;
        let info = Info {
            written: u64_at(&answer, HEADER + 24),
            allocated: u64_at(&answer, HEADER + 40),
            size: u64_at(&answer, HEADER + 48),
        };
        let mut id = [0; 16];
        id.copy_from_slice(&answer[HEADER + 64..HEADER + 80]);
        Ok((Handle(id), info))
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

    /// Give a file another name; who has that name loses it.
    pub fn rename(&self, file: Handle, to: &str) -> Result<(), Status> {
        let name = wide(to);
        let mut buffer = Bytes::default();
        buffer.raw(&[1, 0, 0, 0, 0, 0, 0, 0]).u64(0);
        buffer.u32(name.len() as u32).raw(&name);
        // Windows sends eight bytes of a name at least.
        buffer.0.resize(buffer.0.len().max(24), 0);
        self.set_info(file, 10, &buffer.0)
    }

    /// It goes with its last close.
    pub fn delete_on_close(&self, file: Handle) -> Result<(), Status> {
        self.set_info(file, 13, &[1])
    }

    /// What is known about an open file.
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

    /// What the folder says of a name; None: nothing of that name.
    pub fn list(&self, name: &str) -> Result<Option<Info>, Status> {
        let (folder, _) = self.create("", Disposition::Open, 0x0010_0081, 0x01, None)?;
        let pattern = wide(name);
        let mut body = Bytes::new(33);
        body.raw(&[1, 0]).u32(0).raw(&folder.0);
        body.u16(96)
            .u16(pattern.len() as u16)
            .u32(REQUEST_MAX as u32);
        body.raw(&pattern);
        let found = match self.ask(14, &body.0) {
            Ok(answer) => {
                let at = usize::from(u16_at(&answer, HEADER + 2));
                Ok(Some(Info {
                    written: u64_at(&answer, at + 24),
                    allocated: u64_at(&answer, at + 48),
                    size: u64_at(&answer, at + 40),
                }))
            }
            Err(Status(NO_MORE_FILES | 0xC000_000F)) => Ok(None),
            Err(status) => Err(status),
        };
        self.close(folder)?;
        found
    }

    /// A request and its answer; a failure is a status.
    fn ask(&self, command: u16, body: &[u8]) -> Result<Vec<u8>, Status> {
        let answer = self
            .exchange(command, body)
            .unwrap_or_else(|error| panic!("SMB2 command {command}: {error}"));
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
        answer.recv_timeout(ANSWER_MAX).map_err(|why| {
            io::Error::other(match why {
                RecvTimeoutError::Timeout => "no answer within a minute: something hangs",
                RecvTimeoutError::Disconnected => "the server ended the connection",
            })
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

fn hand_out(waiting: &Waiting, answer: Vec<u8>) {
    if answer.len() < HEADER || status_of(&answer) == PENDING {
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

fn wide(text: &str) -> Vec<u8> {
    text.encode_utf16().flat_map(u16::to_le_bytes).collect()
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
