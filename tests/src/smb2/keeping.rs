// SPDX-License-Identifier: Apache-2.0
//! The rights by which a client keeps parts of a file for itself, oplocks and leases, and how it
//! learns that it may no longer.

use super::{
    Bytes, Connection, Disposition, HEADER, Handle, Info, Manner, PLAINLY, Status, lock, opened,
    u16_at, u32_at,
};
use std::time::Duration;

/// OPLOCK_BREAK, asked and unasked.
const BREAK: u16 = 18;
/// Level of an oplock that is a lease.
const LEASE: u8 = 0xff;
/// Bytes of a break that is about an oplock; of a lease it is longer.
const OPLOCK_BREAK_BYTES: u16 = 24;

/// The right that a client asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeping {
    /// All that it reads and writes, and the open file itself, until it is told otherwise: the
    /// strongest that SMB 2.0 has.
    Batch,
    /// Reading, writing and the open file, by a key of the client's.
    Lease([u8; 16]),
}

/// The right that it was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// An oplock: 0 none, 1 reading (level II), 8 exclusive, 9 batch.
    Oplock(u8),
    /// A lease; bits: 1 reading, 2 the open file, 4 writing.
    Lease(u32),
}

impl Kept {
    /// Nothing may be kept.
    pub fn is_nothing(self) -> bool {
        matches!(self, Kept::Oplock(0) | Kept::Lease(0))
    }
}

/// A server says what may be kept from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Break {
    /// No more than this.
    pub to: Kept,
    /// The handle of an oplock, the key of a lease.
    whose: [u8; 16],
}

impl Connection {
    /// Open a file for everything, sharing it with everybody, and ask to keep something of it.
    pub fn open_keeping(
        &self,
        name: &str,
        how: Disposition,
        keeping: Keeping,
    ) -> Result<(Handle, Info, Kept), Status> {
        let manner = |oplock| Manner { oplock, ..PLAINLY };
        let answer = match keeping {
            Keeping::Batch => self.create(name, how, manner(9), None),
            Keeping::Lease(key) => {
                let mut lease = Bytes::default();
                lease.raw(&key).u32(7).u32(0).u64(0);
                self.create(name, how, manner(LEASE), Some((b"RqLs", &lease.0)))
            }
        }?;
        let (handle, info) = opened(&answer);
        let kept = match answer[HEADER + 2] {
            LEASE => Kept::Lease(lease_state(&answer).unwrap_or(0)),
            level => Kept::Oplock(level),
        };
        Ok((handle, info, kept))
    }

    /// The next break, if one comes in this time.
    pub fn next_break(&self, within: Duration) -> Option<Break> {
        let said = lock(&self.unasked).recv_timeout(within).ok()?;
        let body = &said[HEADER..];
        let mut whose = [0; 16];
        whose.copy_from_slice(&body[8..24]);
        let to = match u16_at(body, 0) {
            OPLOCK_BREAK_BYTES => Kept::Oplock(body[2]),
            _ => Kept::Lease(u32_at(body, 28)),
        };
        Some(Break { to, whose })
    }

    /// All that was kept beyond it is written or forgotten.
    pub fn acknowledge(&self, told: Break) -> Result<(), Status> {
        let mut body;
        match told.to {
            Kept::Oplock(level) => {
                body = Bytes::new(OPLOCK_BREAK_BYTES);
                body.raw(&[level, 0]).u32(0).raw(&told.whose);
            }
            Kept::Lease(state) => {
                body = Bytes::new(36);
                body.u16(0).u32(0).raw(&told.whose).u32(state).u64(0);
            }
        }
        self.ask(BREAK, &body.0).map(drop)
    }
}

/// From the contexts of an answer to CREATE.
fn lease_state(answer: &[u8]) -> Option<u32> {
    let (mut at, length) = (
        u32_at(answer, HEADER + 80) as usize,
        u32_at(answer, HEADER + 84) as usize,
    );
    let end = at + length;
    while at + 24 <= end {
        let name = at + usize::from(u16_at(answer, at + 4));
        let data = at + usize::from(u16_at(answer, at + 10));
        if &answer[name..name + 4] == b"RqLs" {
            return Some(u32_at(answer, data + 16));
        }
        match u32_at(answer, at) {
            0 => break,
            next => at += next as usize,
        }
    }
    None
}
