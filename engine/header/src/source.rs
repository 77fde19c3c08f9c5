// SPDX-License-Identifier: Apache-2.0
//! Reads of a file that count themselves: what is asked for comes from a small window, and when the
//! budget is spent there is no more.

use crate::{Container, HeaderError};
use std::io;

/// Reads a probe may make.
pub const PROBE_READ_COUNT_MAX: u32 = 64;

/// Bytes a probe may read. Units: bytes.
pub const PROBE_BYTES_MAX: usize = 1 << 20;

/// Bytes fetched at once: what is small and near comes along.
pub(crate) const WINDOW_BYTES: usize = PROBE_BYTES_MAX / PROBE_READ_COUNT_MAX as usize;

/// Something that can be read at an offset, as `pread` does.
pub trait ReadAt {
    /// Fill the front of `buffer` from `offset`; 0 at the end of the file.
    ///
    /// Errors   the world's
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
    window: Vec<u8>,
    window_start: u64,
    reads_left: u32,
}

impl<'a> Source<'a> {
    pub(crate) fn new(reader: &'a mut dyn ReadAt, size: u64) -> Source<'a> {
        Source {
            reader,
            size,
            window: Vec::with_capacity(WINDOW_BYTES),
            window_start: 0,
            reads_left: PROBE_READ_COUNT_MAX,
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
        if !self.holds(offset, end) {
            self.fetch(offset)?;
        }
        let start = (offset - self.window_start) as usize;
        Ok(self.window.get(start..start + length))
    }

    /// `N` bytes at `offset`. None when the file ends before.
    pub(crate) fn array<const N: usize>(
        &mut self,
        offset: u64,
    ) -> Result<Option<[u8; N]>, HeaderError> {
        let bytes = self.bytes(offset, N)?;
        Ok(bytes.and_then(|bytes| bytes.try_into().ok()))
    }

    fn holds(&self, offset: u64, end: u64) -> bool {
        offset >= self.window_start && end <= self.window_start + self.window.len() as u64
    }

    /// Make the window start at `offset`; shorter than usual only at the end of the file.
    fn fetch(&mut self, offset: u64) -> Result<(), HeaderError> {
        self.window.resize(WINDOW_BYTES, 0);
        self.window_start = offset;
        let mut filled = 0;
        let wanted = (self.size - offset).min(WINDOW_BYTES as u64) as usize;
        while filled < wanted {
            let at = offset + filled as u64;
            self.reads_left = self
                .reads_left
                .checked_sub(1)
                .ok_or(HeaderError::TooScattered)?;
            let buffer = &mut self.window[filled..wanted];
            let most = buffer.len();
            match self.reader.read_at(at, buffer) {
                // The file was cut while we read it.
                Ok(0) => break,
                Ok(count) => filled += count.min(most),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(HeaderError::Read { offset: at, source }),
            }
        }
        self.window.truncate(filled);
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
