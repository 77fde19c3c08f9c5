// SPDX-License-Identifier: Apache-2.0
//! A client that keeps the buffers of its reads itself, for callers who have threads and no need of pointers.

use super::*;

/// A session with the daemon; each read makes a buffer and gives it away when it is filled.
pub struct OwnedClient {
    /// Goes before the buffers that it may write to.
    client: Client,
    buffers: HashMap<usize, Vec<u8>>,
    number_last: usize,
}

/// A read of an [`OwnedClient`] that ended.
#[derive(Debug)]
pub struct OwnedRead {
    /// As [`OwnedClient::read_send`] said.
    pub number: usize,
    /// What was read; fewer bytes than asked only at the end of the file.
    pub result: Result<Vec<u8>, ReadError>,
}

impl OwnedClient {
    /// With nothing under way.
    pub fn new(client: Client) -> OwnedClient {
        OwnedClient {
            client,
            buffers: HashMap::new(),
            number_last: 0,
        }
    }

    /// Start a read of `length` bytes; [`OwnedClient::poll`] reports its end. Returns its number. None: not taken, read plainly.
    pub fn read_send(&mut self, file: FileHandle, length: usize, offset: u64) -> Option<usize> {
        self.number_last = self.number_last.wrapping_add(1);
        let number = self.number_last;
        let mut buffer = Vec::with_capacity(length);
        // SAFETY: the bytes lie on the heap, where moving the vector leaves them, and the vector stays in `buffers`, untouched, until
        // the read is reported (`poll`); what is left then goes after the client.
        unsafe {
            self.client
                .read_send(file, buffer.as_mut_ptr(), length, offset, number)
        }?;
        self.buffers.insert(number, buffer);
        Some(number)
    }

    /// As [`Client::poll`].
    pub fn poll(&mut self) -> Option<OwnedRead> {
        loop {
            let finished = self.client.poll()?;
            let number = finished.private_data;
            let Some(mut buffer) = self.buffers.remove(&number) else {
                continue;
            };
            let result = finished.result.map(|count| {
                let count = count.min(buffer.capacity());
                // SAFETY: so many bytes from the start on were written; the client counts no gap in.
                unsafe { buffer.set_len(count) };
                buffer
            });
            return Some(OwnedRead { number, result });
        }
    }

    /// As [`Client::open`].
    pub fn open(&mut self, fd: impl AsFd, path: &[u8]) -> Option<FileHandle> {
        self.client.open(fd, path)
    }

    /// As [`Client::close`]. Nothing of the file may be under way: it would not be reported.
    pub fn close(&mut self, file: FileHandle) {
        self.client.close(file);
    }

    /// As [`Client::changed`].
    pub fn changed(&mut self, device: u64, inode: u64, offset: u64, length: u64) {
        self.client.changed(device, inode, offset, length);
    }

    /// As [`Client::gone`].
    pub fn gone(&mut self, device: u64, inode: u64) {
        self.client.gone(device, inode);
    }

    /// As [`Client::alive`].
    pub fn alive(&self) -> bool {
        self.client.alive()
    }

    /// As [`Client::heartbeat`].
    pub fn heartbeat(&self) -> u32 {
        self.client.heartbeat()
    }

    /// As [`Client::event_fds`].
    pub fn event_fds(&self) -> [BorrowedFd<'_>; 2] {
        self.client.event_fds()
    }

    /// Whether a read is under way.
    pub fn is_busy(&self) -> bool {
        !self.buffers.is_empty()
    }
}
