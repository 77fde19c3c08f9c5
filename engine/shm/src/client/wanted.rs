// SPDX-License-Identifier: Apache-2.0
//! Messages between a pool's door and the daemon beside reads and writes: files that will be read
//! soon, and clients that have files open.

use super::*;
use crate::layout::{read_wanted, write_found, write_station};

/// A file of its tree that the daemon asks a pool's door for: a stream will probably read it next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedFile {
    /// For [`Client::found`].
    pub number: u64,
    /// Below the root of the tree.
    pub path: Vec<u8>,
}

/// Files that the daemon has asked for and the door has not taken; the client drops more.
const WANTED_MAX: usize = 1024;

impl Client {
    /// The next file that the daemon asks for. Answer with [`Client::found`], or not at all. Never
    /// waits.
    pub fn take_wanted(&mut self) -> Option<WantedFile> {
        if self.wanted.is_empty() && self.is_of_pool && self.usable() {
            self.look_at_socket();
        }
        self.wanted.pop_front()
    }

    /// Answer the daemon: a descriptor of the file that it asked for, or the errno by which there
    /// is none. It may have asked in another session; the file lies in the share of this one.
    pub fn found(&mut self, number: u64, file: Result<BorrowedFd<'_>, u32>) {
        if !self.usable() {
            return;
        }
        let (errno, fds) = match &file {
            Ok(fd) => (0, std::slice::from_ref(fd)),
            // An errno of 0 would promise a descriptor.
            Err(errno) => ((*errno).max(1), [].as_slice()),
        };
        match socket::send(&self.socket, &[&write_found(number, errno)], fds) {
            // The daemon is busy, and does without the answer.
            Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => self.die(error.into()),
            Ok(()) | Err(_) => {}
        }
    }

    /// Tell the daemon the user and client of a file, in place of the session's; again when they
    /// change. Never waits: a busy daemon does not get it.
    pub fn station(&mut self, file: FileHandle, user: &str, client: &str) {
        if !self.usable() || !self.is_open(file) {
            return;
        }
        let said = write_station(file.0, user, client);
        match socket::send(&self.socket, &[&said], &[]) {
            Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => self.die(error.into()),
            Ok(()) | Err(_) => {}
        }
    }

    /// A packet of the daemon.
    pub(super) fn hear_wanted(&mut self, said: &[u8]) {
        match read_wanted(said) {
            Ok((number, path)) if self.wanted.len() < WANTED_MAX => {
                let path = path.to_vec();
                self.wanted.push_back(WantedFile { number, path });
            }
            Ok(_) => {}
            Err(error) => self.die(error),
        }
    }
}
