// SPDX-License-Identifier: Apache-2.0
//! Files that meet in one bucket of a daemon's facts: `core/src/format/facts.rs`, read as somebody
//! would who has the table's key. Only root can read that.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Files that a bucket takes.
pub const WAYS: usize = 32;
const BUCKETS: u64 = 2048;
/// Where the key stands in the table. Units: bytes.
const KEY_AT: u64 = 48;

/// Of these files the ones of the bucket that has most of them, in their order. `runtime`: the
/// daemon's folder.
///
/// Shape    each file: whatever the caller calls it, its `st_dev`, its `st_ino`
pub fn of_one_bucket<T>(runtime: &Path, files: impl IntoIterator<Item = (T, u64, u64)>) -> Vec<T> {
    let mut key = [0; 16];
    File::open(runtime.join("lanes/facts"))
        .and_then(|table| table.read_exact_at(&mut key, KEY_AT))
        .expect("a daemon with a write buffer has a table");
    let key = u128::from_ne_bytes(key);
    assert_ne!(key, 0, "its key is by chance");
    let mut buckets: HashMap<u64, Vec<T>> = HashMap::new();
    for (file, device, inode) in files {
        let hash = siphash([key as u64, (key >> 64) as u64], [device, inode]);
        buckets
            .entry((hash >> 40) % BUCKETS)
            .or_default()
            .push(file);
    }
    let fullest = buckets.into_values().max_by_key(Vec::len);
    fullest.unwrap_or_default()
}

/// Inodes of which the table says something: their files lack bytes.
pub fn told(runtime: &Path) -> HashSet<u64> {
    let table = std::fs::read(runtime.join("lanes/facts")).expect("there is a table");
    let word = |entry: &[u8], number: usize| {
        let bytes = entry[number * 8..][..8].try_into();
        u64::from_ne_bytes(bytes.expect("eight of them"))
    };
    table
        .chunks_exact(64)
        // A mark of reserved blocks is no fact.
        .filter(|entry| word(entry, 1) >> 63 == 0)
        .map(|entry| word(entry, 2))
        .filter(|&inode| inode != 0)
        .collect()
}

/// SipHash-2-4 of two words.
fn siphash(key: [u64; 2], words: [u64; 2]) -> u64 {
    let mut v = [
        key[0] ^ 0x736f_6d65_7073_6575,
        key[1] ^ 0x646f_7261_6e64_6f6d,
        key[0] ^ 0x6c79_6765_6e65_7261,
        key[1] ^ 0x7465_6462_7974_6573,
    ];
    for word in words.into_iter().chain([16 << 56]) {
        v[3] ^= word;
        (0..2).for_each(|_| round(&mut v));
        v[0] ^= word;
    }
    v[2] ^= 0xff;
    (0..4).for_each(|_| round(&mut v));
    v[0] ^ v[1] ^ v[2] ^ v[3]
}

fn round(v: &mut [u64; 4]) {
    v[0] = v[0].wrapping_add(v[1]);
    v[2] = v[2].wrapping_add(v[3]);
    v[1] = v[1].rotate_left(13) ^ v[0];
    v[3] = v[3].rotate_left(16) ^ v[2];
    v[0] = v[0].rotate_left(32);
    v[2] = v[2].wrapping_add(v[1]);
    v[0] = v[0].wrapping_add(v[3]);
    v[1] = v[1].rotate_left(17) ^ v[2];
    v[3] = v[3].rotate_left(21) ^ v[0];
    v[2] = v[2].rotate_left(32);
}
