// SPDX-License-Identifier: Apache-2.0
//! Messages between a pool's door and the daemon beside reads and writes: files that will be read
//! soon, and clients that have files open.

use super::*;
use crate::layout::{read_wanted, write_found, write_station};

/// A file of its tree that the daemon asks a pool's door for: one that will be read next, as far as
/// can be seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedFile {
    /// For [`Client::found`].
    pub number: u64,
    /// Below the root of the tree.
    pub path: Vec<u8>,
}

/// Files that it may have asked for and nobody has taken; more are not looked at.
const WANTED_MAX: usize = 1024;

impl Client {
    /// The next file that the daemon asks for; it is to be told ([`Client::found`]), and may be
    /// told nothing. Never waits.
    pub fn take_wanted(&mut self) -> Option<WantedFile> {
        if self.wanted.is_empty() && self.is_of_pool && self.usable() {
            self.look_at_socket();
        }
        self.wanted.pop_front()
    }

    /// Tell the daemon of a file that it has asked for: a descriptor of it, or why there is none
    /// (an errno). It need not be this session that was asked: the file lies in this one's share.
    pub fn found(&mut self, number: u64, file: Result<BorrowedFd<'_>, u32>) {
        if !self.usable() {
            return;
        }
        let (errno, fds) = match &file {
            Ok(fd) => (0, std::slice::from_ref(fd)),
            // Nobody is told that there is one and none.
            Err(errno) => ((*errno).max(1), [].as_slice()),
        };
        match socket::send(&self.socket, &[&write_found(number, errno)], fds) {
            // The daemon is busy, and does not wait for it.
            Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => self.die(error.into()),
            Ok(()) | Err(_) => {}
        }
    }

    /// Tell the daemon whose a file is, in place of what the session said; again, when somebody
    /// else has it. Never waits: a daemon that is busy does not hear it.
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

    /// The daemon has said something.
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
