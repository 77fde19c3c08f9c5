// SPDX-License-Identifier: Apache-2.0
//! A client that keeps the bytes of its reads and writes itself, for callers that have threads and
//! no need of pointers.

use super::*;

/// A session with the daemon. Each read allocates a buffer and returns it filled; each write reads
/// bytes that the caller lends.
pub struct OwnedClient {
    /// Dropped before the buffers that it may use.
    client: Client,
    /// The buffers that reads fill.
    buffers: HashMap<usize, Vec<u8>>,
    /// The bytes of writes; a sync or a hold has none.
    sources: HashMap<usize, Option<Lent>>,
    number_last: usize,
}

/// A request to an [`OwnedClient`] that has ended.
#[derive(Debug)]
pub struct OwnedDone {
    /// As returned when it began.
    pub number: usize,
    /// Bytes of a read, fewer than asked only at the end of the file; else no bytes.
    pub result: Result<Vec<u8>, ReadError>,
}

impl OwnedClient {
    /// With nothing under way.
    pub fn new(client: Client) -> OwnedClient {
        OwnedClient {
            client,
            buffers: HashMap::new(),
            sources: HashMap::new(),
            number_last: 0,
        }
    }

    fn next_number(&mut self) -> usize {
        self.number_last = self.number_last.wrapping_add(1);
        self.number_last
    }

    /// Start a read of `length` bytes; [`OwnedClient::poll`] reports its end. Returns its number.
    /// None: not taken, read plainly.
    pub fn read_send(&mut self, file: FileHandle, length: usize, offset: u64) -> Option<usize> {
        let number = self.next_number();
        let mut buffer = Vec::with_capacity(length);
        // SAFETY: the bytes lie on the heap, where moving the vector leaves them, and the vector
        // stays in `buffers`, untouched, until `poll` reports the read; vectors that are left are
        // dropped after the client.
        unsafe {
            self.client
                .read_send(file, buffer.as_mut_ptr(), length, offset, number)
        }?;
        self.buffers.insert(number, buffer);
        Some(number)
    }

    /// Start a write; [`OwnedClient::poll`] reports its end: all of it was acknowledged, or
    /// nothing.
    ///
    /// Returns  its number. None: not taken, write plainly
    pub fn write_send(&mut self, file: FileHandle, lent: Lent, offset: u64) -> Option<usize> {
        let number = self.next_number();
        let bytes = lent.bytes();
        // SAFETY: `sources` keeps the loan from here on, until `poll` reports the write; loans that
        // are left are dropped after the client. The client does not read the bytes of a write that
        // it does not take.
        unsafe {
            self.client
                .write_send(file, bytes.as_ptr(), bytes.len(), offset, number)
        }?;
        self.sources.insert(number, Some(lent));
        Some(number)
    }

    /// As [`Client::sync_send`].
    pub fn sync_send(&mut self, file: FileHandle) -> Option<usize> {
        let number = self.next_number();
        self.client.sync_send(file, number)?;
        self.sources.insert(number, None);
        Some(number)
    }

    /// As [`Client::hold_send`].
    pub fn hold_send(&mut self, file: FileHandle) -> Option<usize> {
        let number = self.next_number();
        self.client.hold_send(file, number)?;
        self.sources.insert(number, None);
        Some(number)
    }

    /// As [`Client::poll`].
    pub fn poll(&mut self) -> Option<OwnedDone> {
        loop {
            let finished = self.client.poll()?;
            let number = finished.private_data;
            if self.sources.remove(&number).is_some() {
                let result = finished.result.map(|_| Vec::new());
                return Some(OwnedDone { number, result });
            }
            let Some(mut buffer) = self.buffers.remove(&number) else {
                continue;
            };
            let result = finished.result.map(|count| {
                let count = count.min(buffer.capacity());
                // SAFETY: the client has written so many bytes from the start on, without a gap.
                unsafe { buffer.set_len(count) };
                buffer
            });
            return Some(OwnedDone { number, result });
        }
    }

    /// As [`Client::linger`].
    pub fn linger(&mut self, else_: impl FnMut() -> bool) -> bool {
        self.client.linger(else_)
    }

    /// The session's client, with its properties and state.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// As [`Client::open`].
    pub fn open(&mut self, fd: impl AsFd, path: &[u8]) -> Option<FileHandle> {
        self.client.open(fd, path)
    }

    /// The same, for an object that has a part of that file's bytes. In sessions of a pool's door.
    pub fn open_part(&mut self, fd: impl AsFd, path: &[u8], part: FilePart) -> Option<FileHandle> {
        self.client.open_for(fd, path, Writer::default(), part)
    }

    /// As [`Client::renew`].
    pub fn renew(&mut self, file: FileHandle, fd: impl AsFd) -> bool {
        self.client.renew(file, fd)
    }

    /// As [`Client::close`]. Nothing of the file may be under way: it would not be reported.
    pub fn close(&mut self, file: FileHandle) {
        self.client.close(file);
    }

    /// As [`Client::changed`].
    pub fn changed(&mut self, device: u64, inode: u64, offset: u64, length: u64) {
        self.client.changed(device, inode, offset, length);
    }

    /// As [`Client::resized`].
    pub fn resized(&mut self, device: u64, inode: u64, offset: u64) {
        self.client.resized(device, inode, offset);
    }

    /// As [`Client::hold`].
    pub fn hold(&mut self, device: u64, inode: u64) -> Result<(), ReadError> {
        self.client.hold(device, inode)
    }

    /// As [`Client::gone`].
    pub fn gone(&mut self, device: u64, inode: u64) {
        self.client.gone(device, inode);
    }

    /// As [`Client::lose`].
    pub fn lose(&mut self) {
        self.client.lose();
    }

    /// As [`Client::reconnect`].
    pub fn reconnect(
        &mut self,
        path: &Path,
        who: &Connect,
        patience: Duration,
    ) -> Result<(), ConnectError> {
        self.client.reconnect(path, who, patience)
    }

    /// As [`Client::give_up`].
    pub fn give_up(&mut self) {
        self.client.give_up();
    }

    /// As [`Client::take_wanted`].
    pub fn take_wanted(&mut self) -> Option<WantedFile> {
        self.client.take_wanted()
    }

    /// As [`Client::found`].
    pub fn found(&mut self, number: u64, file: Result<BorrowedFd<'_>, u32>) {
        self.client.found(number, file);
    }

    /// As [`Client::station`].
    pub fn station(&mut self, file: FileHandle, user: &str, client: &str) {
        self.client.station(file, user, client);
    }

    /// As [`Client::event_fds`].
    pub fn event_fds(&self) -> [BorrowedFd<'_>; 2] {
        self.client.event_fds()
    }

    /// Whether something is under way.
    pub fn is_busy(&self) -> bool {
        !self.buffers.is_empty() || !self.sources.is_empty()
    }
}
