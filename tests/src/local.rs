// SPDX-License-Identifier: Apache-2.0
//! Calls of a program on a file of a mount, by chance, beside a model of the file in memory.

use crate::pattern;
use crate::random::Random;
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// A file, and what it is to be.
pub struct Model {
    path: PathBuf,
    file: File,
    bytes: Vec<u8>,
    random: Random,
    /// The last call comes last.
    done: Vec<String>,
    /// Offsets are less. Units: bytes.
    span: u64,
    /// Nothing is longer. Units: bytes.
    length_max: u64,
}

/// A file to read and to write.
pub fn open(path: &Path, create: bool) -> File {
    File::options()
        .read(true)
        .write(true)
        .create(create)
        .open(path)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

impl Model {
    /// A new file; what is done to it follows from the seed.
    pub fn new(path: &Path, seed: u64, span: u64, length_max: u64) -> Model {
        Model {
            path: path.to_owned(),
            file: open(path, true),
            bytes: Vec::new(),
            random: Random(seed),
            done: Vec::new(),
            span,
            length_max,
        }
    }

    /// One thing of many.
    pub fn step(&mut self, number: u64) {
        let at = self.random.below(self.span);
        let length = self.random.below(self.length_max) as usize;
        let what = self.random.below(12);
        self.done
            .push(format!("{number}: {what} at {at}, {length}"));
        match what {
            0..=3 => self.write(number, at, length),
            4 => self.cut(at),
            5 if length > 0 => self.punch(at, length),
            6 if length > 0 => self.reserve(at, length),
            7 => self.look_for_holes(at),
            8 => self
                .file
                .sync_all()
                .unwrap_or_else(|error| self.fail(&error.to_string())),
            9 => self.write(number, self.bytes.len() as u64 % self.span, length),
            _ => self.read(at, length),
        }
    }

    /// By another descriptor from now on.
    pub fn reopen(&mut self) {
        self.file = open(&self.path, false);
    }

    /// Closed, with its path and as its bytes are to be.
    pub fn end(self) -> (PathBuf, Vec<u8>) {
        self.check();
        (self.path, self.bytes)
    }

    /// All of it.
    fn check(&self) {
        let found = std::fs::read(&self.path).unwrap_or_else(|error| self.fail(&error.to_string()));
        self.compare(&found, 0, &self.bytes);
    }

    fn write(&mut self, number: u64, at: u64, length: usize) {
        if length == 0 {
            return;
        }
        let bytes = pattern::bytes(number, at, length);
        if let Err(error) = self.file.write_all_at(&bytes, at) {
            self.fail(&format!("written: {error}"));
        }
        let end = at as usize + length;
        self.bytes.resize(self.bytes.len().max(end), 0);
        self.bytes[at as usize..end].copy_from_slice(&bytes);
    }

    fn cut(&mut self, at: u64) {
        if let Err(error) = self.file.set_len(at) {
            self.fail(&format!("cut: {error}"));
        }
        self.bytes.resize(at as usize, 0);
    }

    fn punch(&mut self, at: u64, length: usize) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if let Err(error) = fallocate(&self.file, flags, at, length as u64) {
            self.fail(&format!("punched: {error}"));
        }
        let end = self.bytes.len().min(at as usize + length);
        if (at as usize) < end {
            self.bytes[at as usize..end].fill(0);
        }
    }

    fn reserve(&mut self, at: u64, length: usize) {
        if let Err(error) = fallocate(&self.file, FallocateFlags::empty(), at, length as u64) {
            self.fail(&format!("reserved: {error}"));
        }
        let end = at as usize + length;
        self.bytes.resize(self.bytes.len().max(end), 0);
    }

    /// Data are where something was written; what is said to be a hole is zero.
    fn look_for_holes(&self, at: u64) {
        let Ok(hole) = seek(&self.file, SeekFrom::Hole(at)) else {
            return;
        };
        let data = seek(&self.file, SeekFrom::Data(hole));
        let end = data.map_or(self.bytes.len(), |data| data as usize);
        let hole = (hole as usize).min(end);
        if self.bytes[hole..end].iter().any(|&byte| byte != 0) {
            self.fail(&format!("data were said to be a hole, {hole} to {end}"));
        }
    }

    fn read(&self, at: u64, length: usize) {
        let mut found = vec![0; length];
        let mut count = 0;
        while count < length {
            match self.file.read_at(&mut found[count..], at + count as u64) {
                Ok(0) => break,
                Ok(more) => count += more,
                Err(error) => self.fail(&format!("read: {error}")),
            }
        }
        let end = self.bytes.len().min(at as usize + length);
        let expected = self.bytes.get(at as usize..end).unwrap_or_default();
        self.compare(&found[..count], at, expected);
    }

    fn compare(&self, found: &[u8], at: u64, expected: &[u8]) {
        if found == expected {
            return;
        }
        let differs = found.iter().zip(expected).position(|(a, b)| a != b);
        self.fail(&format!(
            "at {at}: found {} bytes, expected {}; the first that differs is at {differs:?}",
            found.len(),
            expected.len()
        ));
    }

    fn fail(&self, why: &str) -> ! {
        let last = &self.done[self.done.len().saturating_sub(25)..];
        panic!("{}: {why}\n{}", self.path.display(), last.join("\n"));
    }
}
