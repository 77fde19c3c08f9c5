// SPDX-License-Identifier: Apache-2.0
//! Reads of a file within a budget: bytes come from a small window, and once the budget is spent,
//! reads fail. Heads that lie far from each other are read by themselves, with a budget of their
//! own: a recording may come in hundreds of pieces, of which the probe needs only the length.

use crate::{Container, HeaderError};
use std::io;

/// Windows a probe may read, and heads beside them.
const WINDOW_COUNT_MAX: u32 = 64;
const HEAD_COUNT_MAX: u32 = 256;

/// Bytes fetched at once: small things nearby come along.
pub(crate) const WINDOW_BYTES: usize = 16 << 10;

/// Bytes fetched with a head: a disk reads no less.
const HEAD_BYTES: usize = 512;

/// A head no farther than this from the last one is read with the bytes behind it: more heads may
/// follow. Units: bytes.
const NEAR_BYTES: u64 = WINDOW_BYTES as u64 / 8;

/// Reads a probe may make.
pub const PROBE_READ_COUNT_MAX: u32 = WINDOW_COUNT_MAX + HEAD_COUNT_MAX;

/// Bytes a probe may read. Units: bytes.
pub const PROBE_BYTES_MAX: usize =
    WINDOW_COUNT_MAX as usize * WINDOW_BYTES + HEAD_COUNT_MAX as usize * HEAD_BYTES;

/// Something that can be read at an offset, as `pread` does.
pub trait ReadAt {
    /// Fill the front of `buffer` from `offset`; 0 at the end of the file.
    ///
    /// Errors   those of the file's read
    fn read_at(&mut self, offset: u64, buffer: &mut [u8]) -> io::Result<usize>;
}

impl ReadAt for std::fs::File {
    fn read_at(&mut self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        std::os::unix::fs::FileExt::read_at(self, buffer, offset)
    }
}

impl ReadAt for &[u8] {
    fn read_at(&mut self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let start = usize::try_from(offset).map_or(self.len(), |start| start.min(self.len()));
        let length = buffer.len().min(self.len() - start);
        buffer[..length].copy_from_slice(&self[start..start + length]);
        Ok(length)
    }
}

/// A file under examination.
pub(crate) struct Source<'a> {
    reader: &'a mut dyn ReadAt,
    size: u64,
    window: Window,
    /// The bytes of the last head that was read by itself.
    head: Window,
    last_head: u64,
}

/// A piece of the file.
struct Window {
    bytes: Vec<u8>,
    start: u64,
    /// Bytes read at once.
    most: usize,
    reads_left: u32,
}

impl<'a> Source<'a> {
    pub(crate) fn new(reader: &'a mut dyn ReadAt, size: u64) -> Source<'a> {
        Source {
            reader,
            size,
            window: Window::new(WINDOW_BYTES, WINDOW_COUNT_MAX),
            head: Window::new(HEAD_BYTES, HEAD_COUNT_MAX),
            last_head: 0,
        }
    }

    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// `length` bytes at `offset`. None when the file ends before, or `length` is above the window.
    pub(crate) fn bytes(
        &mut self,
        offset: u64,
        length: usize,
    ) -> Result<Option<&[u8]>, HeaderError> {
        let end = offset.saturating_add(length as u64);
        if length > WINDOW_BYTES || end > self.size {
            return Ok(None);
        }
        let window = match self.head.holds(offset, end) {
            true => &mut self.head,
            false => &mut self.window,
        };
        if !window.holds(offset, end) {
            window.fetch(self.reader, self.size, offset)?;
        }
        let start = (offset - window.start) as usize;
        Ok(window.bytes.get(start..start + length))
    }

    /// The same, for the head of a part of which the caller may want nothing else.
    pub(crate) fn head<const N: usize>(
        &mut self,
        offset: u64,
    ) -> Result<Option<[u8; N]>, HeaderError> {
        let end = offset.saturating_add(N as u64);
        let is_near = offset.abs_diff(self.last_head) <= NEAR_BYTES;
        self.last_head = offset;
        let is_there = self.window.holds(offset, end) || self.head.holds(offset, end);
        if !is_near && !is_there && end <= self.size {
            self.head.fetch(self.reader, self.size, offset)?;
        }
        self.array(offset)
    }

    /// `N` bytes at `offset`. None when the file ends before.
    pub(crate) fn array<const N: usize>(
        &mut self,
        offset: u64,
    ) -> Result<Option<[u8; N]>, HeaderError> {
        let bytes = self.bytes(offset, N)?;
        Ok(bytes.and_then(|bytes| bytes.try_into().ok()))
    }
}

impl Window {
    fn new(most: usize, reads_left: u32) -> Window {
        Window {
            bytes: Vec::with_capacity(most),
            start: 0,
            most,
            reads_left,
        }
    }

    fn holds(&self, offset: u64, end: u64) -> bool {
        offset >= self.start && end <= self.start + self.bytes.len() as u64
    }

    /// Make it start at `offset`; shorter than usual only at the end of the file.
    fn fetch(
        &mut self,
        reader: &mut dyn ReadAt,
        size: u64,
        offset: u64,
    ) -> Result<(), HeaderError> {
        self.bytes.resize(self.most, 0);
        self.start = offset;
        let mut filled = 0;
        let wanted = (size - offset).min(self.most as u64) as usize;
        while filled < wanted {
            let at = offset + filled as u64;
            self.reads_left = self
                .reads_left
                .checked_sub(1)
                .ok_or(HeaderError::TooScattered)?;
            let buffer = &mut self.bytes[filled..wanted];
            let most = buffer.len();
            match reader.read_at(at, buffer) {
                // Another program truncated the file meanwhile.
                Ok(0) => break,
                Ok(count) => filled += count.min(most),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(HeaderError::Read { offset: at, source }),
            }
        }
        self.bytes.truncate(filled);
        Ok(())
    }
}

pub(crate) fn broken(container: Container, offset: u64, problem: &'static str) -> HeaderError {
    HeaderError::Broken {
        container,
        offset,
        problem,
    }
}

/// The `N` bytes at `at`, zeros where there are none.
pub(crate) fn part<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut part = [0; N];
    let found = bytes.get(at..).unwrap_or(&[]);
    let length = found.len().min(N);
    part[..length].copy_from_slice(&found[..length]);
    part
}
