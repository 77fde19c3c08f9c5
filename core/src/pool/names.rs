// SPDX-License-Identifier: Apache-2.0
//! The log of names: the members' knowledge of the catalogue, so that a lost one can be made anew.
//!
//! It is a list of facts, each true when it was written: "in this folder this name leads to that
//! inode", "that inode is so". A later fact about the same name or inode replaces the earlier one,
//! so that a checkpoint, a list of all that is there, may be read while things change, if the
//! changes follow it, and a folder that is renamed costs one fact, however full it is. Inodes are
//! numbered as in the catalogue, the root of the tree is 1.
//!
//! Each fact is a frame; all numbers are little-endian:
//!
//! | offset | size | meaning |
//! |---|---|---|
//! | 0 | 4 | length of the bytes behind the checksum |
//! | 4 | 4 | CRC-32C of that |
//! | 8 | 1 | 1 head, 2 name, 3 inode |
//!
//! | fact | then |
//! |---|---|
//! | head | version (4), serial (8), id of the pool (16), path of the catalogue, its format file, identity of the tree's root (not in version 1) |
//! | name | inode of the folder (8), inode it leads to (8; 0: the name is gone), the name |
//! | inode | inode, mode, user, group (8, 4, 4, 4), device (8), size (8), modified (8 s, 4 ns), layout record, target of a link, count of attributes (4), of each name and value |
//!
//! Byte strings have their length (4) before them. Bytes behind a frame that is cut off or damaged
//! are not read.

use super::layout::{PoolId, crc32c};
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

/// Version of the log; older ones are read, too.
pub const VERSION: u32 = 2;
/// The root of the tree.
pub const ROOT: u64 = 1;
/// Longest frame. Units: bytes.
pub const FRAME_BYTES_MAX: usize = 1 << 20;

const HEAD: u8 = 1;
const NAME: u8 = 2;
const INODE: u8 = 3;

/// The first fact of each log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// Later logs have higher ones.
    pub serial: u64,
    /// Of which pool.
    pub pool: PoolId,
    /// Where the catalogue was.
    pub catalogue: Vec<u8>,
    /// The catalogue's format file.
    pub format: Vec<u8>,
    /// The mark that tells the tree's root from that of a copy of it, where inodes have other
    /// numbers. Empty: not known.
    pub root: Vec<u8>,
}

/// The known facts of an inode.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inode {
    /// Its number in the catalogue.
    pub number: u64,
    /// Type and permissions, as in stat(2).
    pub mode: u32,
    /// Owner.
    pub user: u32,
    /// Group.
    pub group: u32,
    /// Of a device node.
    pub device: u64,
    /// Units: bytes.
    pub size: u64,
    /// When it was modified: seconds, nanoseconds.
    pub modified: (i64, u32),
    /// The layout record of a regular file; empty if it has none.
    pub record: Vec<u8>,
    /// Of a symbolic link.
    pub target: Vec<u8>,
    /// Extended attributes, ACLs among them; Rushes's own are not.
    pub attributes: Vec<(Vec<u8>, Vec<u8>)>,
}

/// A fact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fact {
    /// The pool that it is the log of.
    Head(Head),
    /// Where a name leads; 0: nowhere, it is gone.
    Name {
        /// The folder it is in.
        folder: u64,
        /// The name.
        name: Vec<u8>,
        /// The inode it leads to.
        inode: u64,
    },
    /// How an inode is.
    Inode(Inode),
}

fn string(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend((bytes.len() as u32).to_le_bytes());
    out.extend(bytes);
}

impl Fact {
    /// Add its frame. One that its attributes would make too long goes without them.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend([0; 8]);
        match self {
            Fact::Head(head) => {
                out.push(HEAD);
                out.extend(VERSION.to_le_bytes());
                out.extend(head.serial.to_le_bytes());
                out.extend(head.pool.0.to_le_bytes());
                string(out, &head.catalogue);
                string(out, &head.format);
                string(out, &head.root);
            }
            Fact::Name {
                folder,
                name,
                inode,
            } => {
                out.push(NAME);
                out.extend(folder.to_le_bytes());
                out.extend(inode.to_le_bytes());
                string(out, name);
            }
            Fact::Inode(inode) => inode.encode(out),
        }
        if let Fact::Inode(inode) = self
            && out.len() - start > FRAME_BYTES_MAX
        {
            out.truncate(start + 8);
            let mut shorter = inode.clone();
            shorter.attributes.clear();
            shorter.encode(out);
        }
        let length = (out.len() - start - 8) as u32;
        let sum = crc32c(&out[start + 8..]);
        out[start..start + 4].copy_from_slice(&length.to_le_bytes());
        out[start + 4..start + 8].copy_from_slice(&sum.to_le_bytes());
    }

    fn decode(payload: &[u8]) -> Option<Fact> {
        let mut reader = Reader(payload);
        let [tag] = reader.array::<1>()?;
        let fact = match tag {
            HEAD => {
                let version = u32::from_le_bytes(reader.array()?);
                if !(1..=VERSION).contains(&version) {
                    return None;
                }
                Fact::Head(Head {
                    serial: reader.u64()?,
                    pool: PoolId(u128::from_le_bytes(reader.array()?)),
                    catalogue: reader.string()?,
                    format: reader.string()?,
                    root: match version {
                        1 => Vec::new(),
                        _ => reader.string()?,
                    },
                })
            }
            NAME => {
                let (folder, inode) = (reader.u64()?, reader.u64()?);
                Fact::Name {
                    folder,
                    name: reader.string()?,
                    inode,
                }
            }
            INODE => Fact::Inode(Inode::decode(&mut reader)?),
            _ => return None,
        };
        reader.0.is_empty().then_some(fact)
    }
}

impl Inode {
    fn encode(&self, out: &mut Vec<u8>) {
        out.push(INODE);
        out.extend(self.number.to_le_bytes());
        out.extend(self.mode.to_le_bytes());
        out.extend(self.user.to_le_bytes());
        out.extend(self.group.to_le_bytes());
        out.extend(self.device.to_le_bytes());
        out.extend(self.size.to_le_bytes());
        out.extend(self.modified.0.to_le_bytes());
        out.extend(self.modified.1.to_le_bytes());
        string(out, &self.record);
        string(out, &self.target);
        out.extend((self.attributes.len() as u32).to_le_bytes());
        for (name, value) in &self.attributes {
            string(out, name);
            string(out, value);
        }
    }

    fn decode(reader: &mut Reader<'_>) -> Option<Inode> {
        let mut inode = Inode {
            number: reader.u64()?,
            mode: reader.u32()?,
            user: reader.u32()?,
            group: reader.u32()?,
            device: reader.u64()?,
            size: reader.u64()?,
            modified: (reader.u64()? as i64, reader.u32()?),
            record: reader.string()?,
            target: reader.string()?,
            attributes: Vec::new(),
        };
        for _ in 0..reader.u32()? {
            let name = reader.string()?;
            inode.attributes.push((name, reader.string()?));
        }
        Some(inode)
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (found, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*found)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn string(&mut self) -> Option<Vec<u8>> {
        let length = self.u32()? as usize;
        if length > self.0.len() {
            return None;
        }
        let (found, rest) = self.0.split_at(length);
        self.0 = rest;
        Some(found.to_vec())
    }
}

/// The content of a log, read to the last sound frame.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    /// Its first fact. None: it is no log.
    pub head: Option<Head>,
    /// Where names lead: folder and name, inode.
    pub names: BTreeMap<(u64, Vec<u8>), u64>,
    /// How inodes are, by their number.
    pub inodes: BTreeMap<u64, Inode>,
    /// How much of the log is sound. Units: bytes.
    pub sound_bytes: usize,
}

impl Names {
    /// From a log's bytes.
    pub fn read(log: &[u8]) -> Names {
        let mut found = Names::default();
        let mut rest = log;
        while let Some((fact, after)) = next(rest) {
            match fact {
                Fact::Head(head) if found.head.is_none() => found.head = Some(head),
                // A log without a head is none; a second head ends it.
                Fact::Head(_) => break,
                _ if found.head.is_none() => break,
                Fact::Name {
                    folder,
                    name,
                    inode: 0,
                } => {
                    found.names.remove(&(folder, name));
                }
                Fact::Name {
                    folder,
                    name,
                    inode,
                } => {
                    found.names.insert((folder, name), inode);
                }
                Fact::Inode(inode) => {
                    found.inodes.insert(inode.number, inode);
                }
            }
            rest = after;
            found.sound_bytes = log.len() - rest.len();
        }
        found
    }
}

/// Whether a newer version wrote this log.
pub fn is_newer(log: &[u8]) -> bool {
    let mut reader = Reader(log);
    reader.array::<8>().is_some()
        && reader.array::<1>() == Some([HEAD])
        && reader.u32().is_some_and(|version| version > VERSION)
}

/// Before each fact. Units: bytes.
pub const PREFIX_BYTES: usize = 8;

/// How long the fact is that follows a frame's first bytes. Units: bytes. None: no fact is so long.
pub fn fact_bytes(prefix: &[u8; PREFIX_BYTES]) -> Option<usize> {
    let length = Reader(prefix).u32()? as usize;
    (length <= FRAME_BYTES_MAX).then_some(length)
}

/// The fact of a frame. None: it is damaged.
pub fn fact_of(prefix: &[u8; PREFIX_BYTES], payload: &[u8]) -> Option<Fact> {
    let [_, _, _, _, sum @ ..] = *prefix;
    (crc32c(payload) == u32::from_le_bytes(sum))
        .then(|| Fact::decode(payload))
        .flatten()
}

/// The first fact, and the bytes behind it. None: it is cut off or damaged.
fn next(log: &[u8]) -> Option<(Fact, &[u8])> {
    let (prefix, rest) = log.split_first_chunk::<PREFIX_BYTES>()?;
    let (payload, rest) = rest.split_at_checked(fact_bytes(prefix)?)?;
    Some((fact_of(prefix, payload)?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    fn facts() -> Vec<Fact> {
        let name = |folder, name: &[u8], inode| Fact::Name {
            folder,
            name: name.to_vec(),
            inode,
        };
        vec![
            Fact::Head(Head {
                serial: 3,
                pool: PoolId(9),
                catalogue: b"/c\xff".to_vec(),
                format: b"{}".to_vec(),
                root: vec![4, 0, 4],
            }),
            name(ROOT, b"reel", 12),
            name(12, b"a\n\xfe", 13),
            Fact::Inode(Inode {
                number: 13,
                mode: 0o100_640,
                user: 5,
                group: 6,
                size: 1 << 40,
                modified: (-7, 999_999_999),
                record: vec![1, 2, 3],
                attributes: vec![(b"user.x".to_vec(), vec![0, 1])],
                ..Inode::default()
            }),
            name(ROOT, b"gone", 14),
            name(ROOT, b"gone", 0),
            name(ROOT, b"reel", 0),
            name(ROOT, b"scene", 12),
        ]
    }

    fn encoded(facts: &[Fact]) -> Vec<u8> {
        let mut log = Vec::new();
        facts.iter().for_each(|fact| fact.encode(&mut log));
        log
    }

    #[test]
    fn later_facts_replace_earlier_ones_and_a_renamed_folder_keeps_what_is_in_it() {
        let facts = facts();
        let log = encoded(&facts);
        let found = Names::read(&log);
        assert_eq!(found.sound_bytes, log.len());
        let names: Vec<_> = found.names.iter().collect();
        assert_eq!(
            names,
            [
                (&(1, b"scene".to_vec()), &12),
                (&(12, b"a\n\xfe".to_vec()), &13)
            ]
        );
        let Fact::Inode(inode) = &facts[3] else {
            panic!("it is one")
        };
        assert_eq!(found.inodes.get(&13), Some(inode));
    }

    #[test]
    fn a_log_that_is_cut_off_or_damaged_anywhere_says_what_is_before_it() {
        let facts = facts();
        let log = encoded(&facts);
        let ends: Vec<usize> = (0..=facts.len())
            .map(|count| encoded(&facts[..count]).len())
            .collect();
        for length in 0..=log.len() {
            let whole = ends.iter().filter(|&&end| end <= length).max();
            assert_eq!(Some(&Names::read(&log[..length]).sound_bytes), whole);
        }
        for at in 0..log.len() {
            let mut damaged = log.clone();
            damaged[at] ^= 0x21;
            let whole = ends.iter().filter(|&&end| end <= at).max();
            assert_eq!(Some(&Names::read(&damaged).sound_bytes), whole, "byte {at}");
        }
        // A head is first and once.
        assert_eq!(Names::read(&encoded(&facts[1..])).sound_bytes, 0);
        let twice = [&facts[..2], &facts[..1]].concat();
        assert_eq!(Names::read(&encoded(&twice)).sound_bytes, ends[2]);
    }

    #[test]
    fn a_newer_log_is_told_apart_from_a_damaged_one() {
        let mut log = encoded(&facts());
        assert!(!is_newer(&log) && !is_newer(&log[..12]) && !is_newer(b""));
        log[9] = 3;
        assert!(is_newer(&log));
        assert_eq!(Names::read(&log), Names::default());
    }

    #[test]
    fn a_log_of_version_1_is_read_and_does_not_know_the_root() {
        let mut payload = vec![HEAD];
        payload.extend(1u32.to_le_bytes());
        payload.extend(7u64.to_le_bytes());
        payload.extend(9u128.to_le_bytes());
        string(&mut payload, b"/c");
        string(&mut payload, b"{}");
        let mut log = (payload.len() as u32).to_le_bytes().to_vec();
        log.extend(crc32c(&payload).to_le_bytes());
        log.extend(payload);
        assert!(!is_newer(&log));
        let head = Names::read(&log).head.expect("it has one");
        assert_eq!((head.serial, head.pool), (7, PoolId(9)));
        assert_eq!((head.format, head.root), (b"{}".to_vec(), Vec::new()));
    }

    #[test]
    fn attributes_that_are_too_long_are_left_out() {
        let mut inode = Inode {
            number: 2,
            size: 5,
            ..Inode::default()
        };
        inode.attributes = vec![(b"user.big".to_vec(), vec![7; FRAME_BYTES_MAX])];
        let log = encoded(&[facts()[0].clone(), Fact::Inode(inode.clone())]);
        inode.attributes.clear();
        assert_eq!(Names::read(&log).inodes.get(&2), Some(&inode));
    }
}
