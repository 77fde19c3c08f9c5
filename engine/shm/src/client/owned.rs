// SPDX-License-Identifier: Apache-2.0
//! A client that keeps the buffers of its reads itself, for callers who have threads and no need of pointers.

use super::*;

/// A session with the daemon; each read takes a buffer in and gives it back.
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
    /// As it was given.
    pub buffer: Vec<u8>,
    /// How many bytes of the buffer were read; short only at the end of the file.
    pub result: Result<usize, ReadError>,
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

    /// Start a read of as many bytes as the buffer has; [`OwnedClient::poll`] reports its end. Returns its number.
    ///
    /// Errors   not taken, read plainly: the buffer
    pub fn read_send(
        &mut self,
        file: FileHandle,
        mut buffer: Vec<u8>,
        offset: u64,
    ) -> Result<usize, Vec<u8>> {
        self.number_last = self.number_last.wrapping_add(1);
        let number = self.number_last;
        // SAFETY: the bytes lie on the heap, where moving the vector leaves them, and the vector stays in `buffers`, untouched, until
        // the read is reported (`poll`); what is left then goes after the client.
        let sent = unsafe {
            self.client
                .read_send(file, buffer.as_mut_ptr(), buffer.len(), offset, number)
        };
        match sent {
            Some(_) => {
                self.buffers.insert(number, buffer);
                Ok(number)
            }
            None => Err(buffer),
        }
    }

    /// As [`Client::poll`].
    pub fn poll(&mut self) -> Option<OwnedRead> {
        loop {
            let finished = self.client.poll()?;
            let number = finished.private_data;
            if let Some(buffer) = self.buffers.remove(&number) {
                let result = finished.result;
                return Some(OwnedRead {
                    number,
                    buffer,
                    result,
                });
            }
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

    /// End the session: numbers and buffers of the reads that were under way, of which nothing is to be believed.
    pub fn end(self) -> impl Iterator<Item = (usize, Vec<u8>)> {
        drop(self.client);
        self.buffers.into_iter()
    }

    /// Whether a read is under way.
    pub fn is_busy(&self) -> bool {
        !self.buffers.is_empty()
    }
}
