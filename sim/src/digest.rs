// SPDX-License-Identifier: Apache-2.0
//! A fingerprint of a whole run: every instant, event and action, in order.
//!
//! Two runs of one seed must have the same; a difference means that some code reads a clock, an
//! address or an unordered map. Not a checksum of anything stored.
//!
//! `#[derive(Hash)]` on the types chooses the fields, so that none is left out. The hasher is our
//! own and takes each number as 64 bits: the standard one may differ in the next release, and the
//! width of a `usize` depends on the machine.

use rushes_core::server::{Actions, Event};
use rushes_core::units::Instant;
use std::hash::{Hash, Hasher};

/// The fingerprint so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest(pub u64);

impl Default for Digest {
    fn default() -> Digest {
        Digest(0x517C_C1B7_2722_0A95)
    }
}

impl Digest {
    /// Adds a number.
    pub fn mix(&mut self, value: u64) {
        let mixed = (self.0 ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = mixed ^ (mixed >> 29);
    }

    /// Adds an event and its instant.
    pub fn event(&mut self, now: Instant, event: &Event) {
        (now, event).hash(self);
    }

    /// Adds the actions that the server requests.
    pub fn actions(&mut self, actions: &Actions) {
        actions.hash(self);
    }
}

macro_rules! as_64_bits {
    ($($name:ident: $number:ty),*) => {
        $(fn $name(&mut self, value: $number) {
            self.mix(value as u64);
        })*
    };
}

impl Hasher for Digest {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.mix(bytes.len() as u64);
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.mix(u64::from_le_bytes(word));
        }
    }

    as_64_bits!(
        write_u8: u8, write_u16: u16, write_u32: u32, write_u64: u64, write_usize: usize,
        write_i8: i8, write_i16: i16, write_i32: i32, write_i64: i64, write_isize: isize
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use rushes_core::server::{Action, RateHint, RateSource};
    use rushes_core::units::*;

    fn of(action: Action) -> u64 {
        let mut digest = Digest::default();
        digest.actions(&Actions {
            list: vec![action],
            ..Actions::default()
        });
        digest.0
    }

    #[test]
    fn events_and_actions_that_differ_in_one_field_have_other_fingerprints() {
        let file = FileId(1);
        let actions = [
            Action::Stat { file },
            Action::Sync { file },
            Action::WriteOut { file },
            Action::Clean { file },
            Action::Loose {
                file,
                is_loose: true,
            },
            Action::Loose {
                file,
                is_loose: false,
            },
            Action::ReadHeader {
                file,
                size: ByteCount(0),
            },
            Action::Known {
                file,
                size: ByteCount(0),
            },
            Action::Known {
                file,
                size: ByteCount(1),
            },
            Action::AskPool {
                pool: PoolNumber(1),
                path: String::new(),
            },
            Action::AskPool {
                pool: PoolNumber(1),
                path: "a".into(),
            },
        ];
        let all: std::collections::BTreeSet<u64> = actions.iter().cloned().map(of).collect();
        assert_eq!(all.len(), actions.len());

        let event = |source| {
            let mut digest = Digest::default();
            let hint = Some(RateHint::Rate(BytesPerSecond(1), source));
            digest.event(Instant(1), &Event::Hint { file, hint });
            digest.0
        };
        assert_ne!(event(RateSource::Header), event(RateSource::Rule));
    }

    /// It tells a kept seed from a replay on another machine: the mixed values must not depend on
    /// the machine or the compiler.
    #[test]
    fn the_fingerprint_of_a_known_run_stays() {
        let mut digest = Digest::default();
        digest.event(Instant(5), &Event::Timer);
        let file = FileId(7);
        digest.actions(&Actions {
            list: vec![
                Action::Stat { file },
                Action::AskPool {
                    pool: PoolNumber(2),
                    path: "reel/a.mov".into(),
                },
            ],
            ..Actions::default()
        });
        assert_eq!(format!("{:016x}", digest.0), "d25aa6d2d4aa1690");
    }
}
