// SPDX-License-Identifier: Apache-2.0
//! The actors that write and read in the torture: each is a client of the share, with a connection
//! and a handle or two, or a program on the server. The work of each follows from the seed; each
//! request goes through the model, and an error without an excuse is a fault.

use super::Stage;
use super::model::{Content, FileModel, Outcome};
use crate::pattern;
use crate::random::Random;
use crate::smb2::{
    Chunk, Connection, Disposition, GONE, HANGS, Handle, NOT_FOUND, REQUEST_MAX, Status,
};
use crate::smbd::SHARE;
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// The file that clients write over one another, in place, in blocks of several sizes.
pub const SHARED: &str = "shared.mov";
/// A file that clients write over one another, lengthen, let the server copy into and zero.
pub const MIXED: &str = "mixed.mov";
/// The file that the server copies from.
pub const SOURCE: &str = "source.mov";
/// Length of these files at first. Units: bytes.
pub const SHARED_BYTES: u64 = 640 << 10;
/// Seed of the source's bytes.
pub const SOURCE_SEED: u64 = 77;
/// Bound of offsets in a file of one writer. Units: bytes.
const OWN_MAX: u64 = 1 << 20;
/// A file that only grows stops at this length. Units: bytes.
const APPENDED_MAX: u64 = 3 << 20;

/// Tries of an open: no client meets a file that has changed under its name so often in a row.
const MISMATCHES: usize = 10;

/// The work of an actor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Writes blocks over those of others.
    Overlap,
    /// Writes a few bytes, here and there or one after the other.
    Tiny,
    /// Writes behind the end.
    Append,
    /// Writes a file, and gives it the name of the one before.
    Rename,
    /// Sets a length, then writes.
    SetEnd,
    /// Lets the server copy.
    Copy,
    /// Leaves holes and makes some.
    Sparse,
    /// Flushes any file.
    Flush,
    /// Reads anything.
    Read,
    /// A program on the server with a file of its own.
    Local,
    /// A program on the server that writes blocks over those of clients. Only where it goes through
    /// the same mount as they do.
    LocalOverlap,
}

impl Role {
    /// All roles.
    pub const ALL: [Role; 11] = [
        Role::Overlap,
        Role::Tiny,
        Role::Append,
        Role::Rename,
        Role::SetEnd,
        Role::Copy,
        Role::Sparse,
        Role::Flush,
        Role::Read,
        Role::Local,
        Role::LocalOverlap,
    ];

    /// The role of this name, which is written as one word.
    pub fn named(word: &str) -> Option<Role> {
        let is_so = |role: &&Role| format!("{role:?}").eq_ignore_ascii_case(word);
        Role::ALL.iter().find(is_so).copied()
    }

    /// The file it has for itself.
    pub fn own_file(self, number: u64) -> Option<String> {
        let word = match self {
            Role::Tiny => "tiny",
            Role::Append => "append",
            Role::SetEnd => "end",
            Role::Copy => "copy",
            Role::Sparse => "sparse",
            Role::Local => "local",
            _ => return None,
        };
        Some(format!("{word}-{number}.mov"))
    }
}

/// An actor.
pub struct Actor<'a> {
    stage: &'a Stage,
    role: Role,
    number: u64,
    name: String,
    random: Random,
    step: u64,
    client: Option<(Connection, Instant)>,
    /// Its open handles, each with the instant of the open.
    handles: HashMap<String, (Handle, Instant)>,
    /// Size of the blocks that it writes. Units: bytes.
    block: u64,
    /// Offset at which it writes single bytes one after the other.
    next: u64,
}

impl<'a> Actor<'a> {
    /// Its work follows from these numbers.
    pub fn new(stage: &'a Stage, role: Role, number: u64) -> Actor<'a> {
        let mut random = Random::of(&[stage.seed, stage.round, number]);
        let block = random.one_of(&[512, 3001, 4096, 9000, 60_000]);
        Actor {
            stage,
            role,
            number,
            name: format!("{role:?} {number}"),
            random,
            step: 0,
            client: None,
            handles: HashMap::new(),
            block,
            next: 0,
        }
    }

    /// Works until the stage ends.
    pub fn work(mut self) {
        while self.stage.goes_on() {
            self.step += 1;
            let result = match self.role {
                Role::Overlap => self.overlap(),
                Role::Tiny => self.tiny(),
                Role::Append => self.append(),
                Role::Rename => self.rename(),
                Role::SetEnd => self.set_end(),
                Role::Copy => self.copy(),
                Role::Sparse => self.sparse(),
                Role::Flush => self.flush(),
                Role::Read => self.read(),
                Role::Local => self.local(),
                Role::LocalOverlap => self.local_overlap(),
            };
            if result.is_some() {
                self.stage.step();
            } else {
                // After a failure it does not retry at full speed.
                std::thread::sleep(Duration::from_millis(5));
            }
            let pause = self.random.one_of(&[0, 0, 0, 0, 0, 0, 1, 20]);
            std::thread::sleep(Duration::from_millis(pause));
        }
    }

    /// Its connection, a new one if it has none. None: smbd takes none yet.
    fn client(&mut self) -> Option<&Connection> {
        if self.client.is_none() {
            let connected = Instant::now();
            let client = Connection::connect_mortal(self.stage.port(), SHARE).ok()?;
            self.client = Some((client, connected));
        }
        self.client.as_ref().map(|(client, _)| client)
    }

    /// The connection of its handles. None: it broke.
    fn same_client(&self) -> Option<&Connection> {
        self.client.as_ref().map(|(client, _)| client)
    }

    /// An open handle of a file.
    fn handle(&mut self, name: &str) -> Option<Handle> {
        if let Some((handle, _)) = self.handles.get(name) {
            return Some(*handle);
        }
        let since = Instant::now();
        let opened = self.client()?.open(name, Disposition::OpenIf);
        let handle = self.done("open", name, opened)?.0;
        self.handles.insert(name.to_owned(), (handle, since));
        Some(handle)
    }

    /// The result of a request that succeeded.
    fn done<T>(&mut self, what: &str, name: &str, result: Result<T, Status>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(status) => {
                self.failed(what, name, status);
                None
            }
        }
    }

    /// A request failed: without an excuse that is a fault. Returns  its possible outcome
    fn failed(&mut self, what: &str, name: &str, status: Status) -> Outcome {
        let connected = self.client.as_ref().map(|(_, connected)| *connected);
        if status == GONE || status == HANGS {
            self.client = None;
            self.handles.clear();
        }
        if let Some(why) = self.stage.wrong(status, connected) {
            let who = &self.name;
            let place = format!("{who}, step {}: {what} {name}", self.step);
            self.stage
                .fault(&format!("{place}: {:#010x}: {why}", status.0));
        }
        if status == HANGS {
            Outcome::Endless
        } else {
            Outcome::Unknown
        }
    }

    fn outcome(&mut self, what: &str, name: &str, result: Result<(), Status>) -> Outcome {
        match result {
            Ok(()) => Outcome::Acknowledged,
            Err(status) => self.failed(what, name, status),
        }
    }

    fn fault(&self, result: Result<(), String>, how: &str) {
        if let Err(wrong) = result {
            let place = format!("{}, step {}, {how}", self.name, self.step);
            self.stage.fault(&format!("{place}: {wrong}"));
        }
    }

    /// Bytes that differ for each write.
    fn version(&self) -> Content {
        let number = (self.number << 40 | self.step) + 1;
        Content::Version(number.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    /// One write.
    fn write(&mut self, model: &FileModel, start: u64, length: u64) -> Option<()> {
        let handle = self.handle(&model.name)?;
        let (content, end) = (self.version(), start + length);
        let bytes = content.bytes(start, end);
        let ticket = model.begin(&self.name, start, end, content);
        let written = match self.client() {
            Some(client) => client.write(handle, start, &bytes),
            None => Err(GONE),
        };
        let outcome = self.outcome("write", &model.name, written);
        model.end(ticket, outcome, true);
        (outcome == Outcome::Acknowledged).then_some(())
    }

    /// One read, compared.
    fn look(&mut self, model: &FileModel, at: u64, length: usize) -> Option<()> {
        let handle = self.handle(&model.name)?;
        let look = model.look();
        let read = match self.client() {
            Some(client) => client.read(handle, at, length),
            None => Err(GONE),
        };
        match read {
            Ok(bytes) => {
                self.fault(model.found(look, at, length, &bytes), "over SMB");
                Some(())
            }
            Err(status) => {
                model.forget(look);
                self.failed("read", &model.name, status);
                None
            }
        }
    }

    fn flush_file(&mut self, model: &FileModel) -> Option<()> {
        let handle = self.handle(&model.name)?;
        let since = self.handles.get(&model.name)?.1;
        // Asked before the flush and after it: the disk may begin to fail in between.
        let failed = model.loses_now();
        let begun = Instant::now();
        let flushed = self.client()?.flush(handle);
        if flushed.is_err() {
            model.flush_was_refused(&self.name, since);
        }
        self.done("flush", &model.name, flushed)?;
        if failed || model.loses_now() {
            model.flushed_by(begun, &self.name, since);
        } else {
            model.flushed(begun);
        }
        Some(())
    }

    /// Closes a file now and then; the next request opens it.
    fn close_sometimes(&mut self, name: &str) -> Option<()> {
        if self.random.once_in(30)
            && let Some((handle, _)) = self.handles.remove(name)
        {
            let closed = self.client()?.close(handle);
            self.done("close", name, closed)?;
        }
        Some(())
    }

    /// An offset in a file that is written over, mostly where others write.
    fn place(&mut self, bytes: u64, length: u64) -> u64 {
        let span = if self.random.once_in(3) {
            bytes
        } else {
            48 << 10
        };
        let at = self.random.below(span.saturating_sub(length).max(1));
        if self.random.once_in(2) {
            at / self.block * self.block
        } else {
            at
        }
    }

    fn overlap(&mut self) -> Option<()> {
        let name = if self.random.once_in(4) {
            MIXED
        } else {
            SHARED
        };
        let model = self.stage.file(name);
        let count = 1 + self.random.below(4).min(65_000 / self.block - 1);
        let length = count * self.block;
        let most = if name == MIXED {
            2 * SHARED_BYTES
        } else {
            SHARED_BYTES
        };
        let at = self.place(most, length);
        self.write(&model, at, length)?;
        self.close_sometimes(name)
    }

    fn tiny(&mut self) -> Option<()> {
        let own = self.role.own_file(self.number).expect("it has one");
        if self.random.once_in(3) {
            let model = self.stage.file(self.random.one_of(&[SHARED, MIXED]));
            let length = 1 + self.random.below(60);
            let at = self.place(SHARED_BYTES, length);
            return self.write(&model, at, length);
        }
        let model = self.stage.file(&own);
        // As a program that writes byte by byte, then as one that jumps about.
        let (at, length) = if (self.step / 500).is_multiple_of(2) {
            self.next = (self.next + 1) % OWN_MAX;
            (self.next, 1)
        } else {
            (self.random.below(9000), 1 + self.random.below(60))
        };
        self.write(&model, at, length)?;
        if self.random.once_in(40) {
            self.look(&model, self.next.saturating_sub(3000), 6000)?;
        }
        self.close_sometimes(&own)
    }

    /// Asks for the length, which no other actor changes.
    fn ask_length(&mut self, model: &FileModel) -> Option<u64> {
        let handle = self.handle(&model.name)?;
        let info = self.client()?.info(handle);
        let size = self.done("information", &model.name, info)?.size;
        self.fault(model.is_long(size), "over SMB");
        Some(size)
    }

    fn append(&mut self) -> Option<()> {
        let own = self.role.own_file(self.number).expect("it has one");
        let model = self.stage.file(&own);
        let (least, most) = model.length();
        let length = if least == most {
            least
        } else {
            self.ask_length(&model)?
        };
        if length > APPENDED_MAX {
            return self.look(&model, self.random.clone().below(length), REQUEST_MAX);
        }
        let most = self.random.one_of(&[1, 100, 5000, 60_000]);
        let more = 1 + self.random.below(most);
        self.write(&model, length, more)?;
        match self.random.below(20) {
            0 => self.flush_file(&model)?,
            1 => self.look(&model, length.saturating_sub(30_000), REQUEST_MAX)?,
            2 => _ = self.ask_length(&model)?,
            _ => {}
        }
        self.close_sometimes(&own)
    }

    fn set_length(&mut self, model: &FileModel, length: u64) -> Option<()> {
        let handle = self.handle(&model.name)?;
        let ticket = model.begin_length(&self.name, length);
        let set = match self.client() {
            Some(client) => client.set_size(handle, length),
            None => Err(GONE),
        };
        let outcome = self.outcome("set the length of", &model.name, set);
        model.end_length(ticket, outcome, length);
        (outcome == Outcome::Acknowledged).then_some(())
    }

    fn set_end(&mut self) -> Option<()> {
        let own = self.role.own_file(self.number).expect("it has one");
        let model = self.stage.file(&own);
        let length = self.ask_length(&model)?;
        let end = self.random.below(OWN_MAX / 2);
        match self.random.below(4) {
            // As programs that copy do: the length first, then bytes.
            0 => {
                self.set_length(&model, end)?;
                let at = self.random.below(end + 1);
                self.write(&model, at, 1 + (end - at).min(60_000))?;
            }
            1 => self.set_length(&model, length.saturating_sub(end))?,
            2 => {
                let at = self.random.below(length + 30_000);
                let more = 1 + self.random.below(20_000);
                self.write(&model, at, more)?;
            }
            _ => self.look(&model, self.random.clone().below(length + 1), REQUEST_MAX)?,
        }
        if self.random.once_in(20) {
            self.flush_file(&model)?;
        }
        self.close_sometimes(&own)
    }

    fn copy(&mut self) -> Option<()> {
        let own = self.role.own_file(self.number).expect("it has one");
        let name = if self.random.once_in(3) {
            MIXED
        } else {
            own.as_str()
        };
        let model = self.stage.file(name);
        let (source, target) = (self.handle(SOURCE)?, self.handle(name)?);
        let length = 1 + self.random.below(REQUEST_MAX as u64);
        let from = self.random.below(SHARED_BYTES - length);
        let to = self.place(SHARED_BYTES, length);
        let chunk = Chunk {
            from,
            to,
            length: length as u32,
        };
        let content = Content::Pattern(SOURCE_SEED, from.wrapping_sub(to));
        let ticket = model.begin(&self.name, to, to + length, content);
        let copied = match self.client() {
            Some(client) => client.copy(source, target, &[chunk]),
            None => Err(GONE),
        };
        let outcome = self.outcome("copy to", name, copied);
        model.end(ticket, outcome, true);
        if self.random.once_in(4) {
            self.look(&model, to, length as usize)?;
        }
        self.close_sometimes(name)
    }

    fn sparse(&mut self) -> Option<()> {
        let own = self.role.own_file(self.number).expect("it has one");
        let name = if self.random.once_in(5) {
            MIXED
        } else {
            own.as_str()
        };
        let model = self.stage.file(name);
        let handle = self.handle(name)?;
        if self.step == 1 {
            let set = self.client()?.set_sparse(handle, true);
            self.done("make sparse", name, set)?;
        }
        if self.random.once_in(2) {
            let at = self.random.below(OWN_MAX);
            let length = 1 + self.random.below(9000);
            return self.write(&model, at, length);
        }
        let (length, _) = model.length();
        let from = self.random.below(length.max(1));
        let to = length.min(from + 1 + self.random.below(100_000));
        if from < to {
            let ticket = model.begin_within(&self.name, from, to, Content::Zero);
            let zeroed = match self.client() {
                Some(client) => client.zero(handle, from, to),
                None => Err(GONE),
            };
            let outcome = self.outcome("make zero", name, zeroed);
            model.end(ticket, outcome, false);
        }
        if self.random.once_in(3) {
            self.look(&model, from, REQUEST_MAX)?;
        }
        self.close_sometimes(name)
    }

    fn flush(&mut self) -> Option<()> {
        let model = self.stage.any_file(&mut self.random);
        self.flush_file(&model)?;
        let pause = self.random.below(300);
        std::thread::sleep(Duration::from_millis(pause));
        Some(())
    }

    fn read(&mut self) -> Option<()> {
        let pick = self.random.below(4);
        if pick == 0
            && let Some(name) = self.stage.any_name(&mut self.random)
        {
            return self.read_whole(name);
        }
        let model = match pick {
            1 => self.stage.file(SHARED),
            _ => self.stage.any_file(&mut self.random),
        };
        let (_, most) = model.length();
        let at = self.random.below(most.max(1));
        let length = 1 + self.random.below(REQUEST_MAX as u64) as usize;
        self.look(&model, at, length)?;
        self.close_sometimes(&model.name)
    }

    /// Reads all of a file under a name that others are renamed to.
    fn read_whole(&mut self, number: usize) -> Option<()> {
        let model = &self.stage.names[number];
        let begun = Instant::now();
        let mut opened = self.client()?.open_to_read(&model.name);
        // Samba looks a name up and then opens it: when another file got it between, it answers
        // that there is none, by the "dev/ino mismatch" of its pathref.
        for _ in 0..MISMATCHES {
            if !matches!(opened, Err(Status(NOT_FOUND))) {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
            opened = self.client()?.open_to_read(&model.name);
        }
        let handle = match opened {
            Err(Status(NOT_FOUND)) => {
                self.fault(model.found(begun, None), "over SMB");
                return Some(());
            }
            other => self.done("open", &model.name, other)?.0,
        };
        let mut all = Vec::new();
        loop {
            let read = self.client()?.read(handle, all.len() as u64, REQUEST_MAX);
            let part = self.done("read", &model.name, read)?;
            all.extend_from_slice(&part);
            if part.len() < REQUEST_MAX {
                break;
            }
        }
        self.fault(model.found(begun, Some(&all)), "over SMB");
        let closed = self.client()?.close(handle);
        self.done("close", &model.name, closed)
    }

    fn rename(&mut self) -> Option<()> {
        let stage = self.stage;
        let model = stage
            .names
            .iter()
            .find(|one| one.name == renamed(self.number));
        let model = model.expect("it has one");
        let passing = format!("passing-{}.tmp", self.number);
        let Content::Version(version) = self.version() else {
            return None;
        };
        let length = 1 + self.random.below(200_000);
        let made = self.client()?.open(&passing, Disposition::OverwriteIf);
        let handle = self.done("make", &passing, made)?.0;
        for at in (0..length).step_by(REQUEST_MAX) {
            let end = length.min(at + REQUEST_MAX as u64);
            let bytes = Content::Version(version).bytes(at, end);
            let written = self.same_client()?.write(handle, at, &bytes);
            if self.done("write", &passing, written).is_none() {
                // Its contents are unknown: it does not get the name.
                let closed = self.same_client()?.close(handle);
                return self.done("close", &passing, closed);
            }
        }
        if self.random.once_in(3) {
            let flushed = self.same_client()?.flush(handle);
            // A disk that has failed gets the bytes later.
            let _ = self.done("flush", &passing, flushed);
        }
        let ticket = model.begin(version, length);
        let given = match self.same_client() {
            Some(client) => client.rename(handle, &model.name),
            None => Err(GONE),
        };
        let outcome = self.outcome("rename to", &model.name, given);
        model.end(ticket, outcome);
        let closed = self.same_client()?.close(handle);
        self.done("close", &model.name, closed)
    }

    /// Opens a file as a program on the server: each time anew, so that it gets over a mount that
    /// died.
    fn locally(&mut self, name: &str) -> Option<File> {
        let path = self.stage.folder.join(name);
        let opened = File::options().read(true).write(true).open(&path);
        self.locally_done("open", name, opened)
    }

    fn locally_done<T>(&mut self, what: &str, name: &str, done: std::io::Result<T>) -> Option<T> {
        match done {
            Ok(value) => Some(value),
            Err(error) => {
                if !self.stage.excuses_local(&error) {
                    let place = format!("{}, step {}: {what} {name}", self.name, self.step);
                    self.stage.fault(&format!("{place}: {error}"));
                }
                None
            }
        }
    }

    fn write_locally(&mut self, model: &FileModel, at: u64, length: u64) -> Option<()> {
        let file = self.locally(&model.name)?;
        let content = self.version();
        let bytes = content.bytes(at, at + length);
        let ticket = model.begin(&self.name, at, at + length, content);
        let written = file.write_all_at(&bytes, at);
        let done = self.locally_done("write", &model.name, written);
        let outcome = done.map_or(Outcome::Unknown, |()| Outcome::Acknowledged);
        model.end(ticket, outcome, true);
        done
    }

    fn look_locally(&mut self, model: &FileModel, at: u64, length: usize) -> Option<()> {
        let file = self.locally(&model.name)?;
        let look = model.look();
        let mut bytes = vec![0; length];
        let mut count = 0;
        while count < length {
            match file.read_at(&mut bytes[count..], at + count as u64) {
                Ok(0) => break,
                Ok(more) => count += more,
                Err(error) => {
                    model.forget(look);
                    return self.locally_done("read", &model.name, Err(error));
                }
            }
        }
        self.fault(
            model.found(look, at, length, &bytes[..count]),
            "on the server",
        );
        Some(())
    }

    fn local(&mut self) -> Option<()> {
        let own = self.role.own_file(self.number).expect("it has one");
        let model = self.stage.file(&own);
        let at = self.random.below(OWN_MAX);
        let length = 1 + self.random.below(30_000);
        match self.random.below(4) {
            0 => self.look_locally(&model, at, length as usize)?,
            1 => {
                let file = self.locally(&own)?;
                let ticket = model.begin_length(&self.name, at);
                let done = self.locally_done("cut", &own, file.set_len(at));
                let outcome = done.map_or(Outcome::Unknown, |()| Outcome::Acknowledged);
                model.end_length(ticket, outcome, at);
            }
            _ => self.write_locally(&model, at, length)?,
        }
        std::thread::sleep(Duration::from_millis(self.random.below(50)));
        Some(())
    }

    fn local_overlap(&mut self) -> Option<()> {
        let model = self.stage.file(self.random.one_of(&[SHARED, MIXED]));
        let length = self.block;
        let at = self.place(SHARED_BYTES, length);
        if self.random.once_in(2) {
            return self.look_locally(&model, at, 2 * length as usize);
        }
        self.write_locally(&model, at, length)?;
        std::thread::sleep(Duration::from_millis(self.random.below(20)));
        Some(())
    }
}

/// The name that the files of this actor get.
pub fn renamed(number: u64) -> String {
    format!("renamed-{number}.mov")
}

/// The bytes that the server copies from.
pub fn source() -> Vec<u8> {
    pattern::bytes(SOURCE_SEED, 0, SHARED_BYTES as usize)
}
