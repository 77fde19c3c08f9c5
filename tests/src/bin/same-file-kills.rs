// SPDX-License-Identifier: Apache-2.0
//! Several SMB clients write over one another in one file while daemons and smbds are killed, round
//! after round ([`rushes_tests::same_file`]).
//!
//! `RUSHES_TEST_KILLS` is the count of rounds, `RUSHES_TEST_SEED` the first seed;
//! `RUSHES_TEST_SHARE=plain` goes without a pool.

use rushes_tests::kills;
use rushes_tests::same_file::round;
use rushes_tests::stand::Stand;
use rushes_tests::words::explained;

const USAGE: &str = "\
Several SMB clients write over one another in one file while daemons and smbds are killed, round after round.
Takes no options. Needs root and the built release programs.

RUSHES_TEST_KILLS          how many rounds; 50
RUSHES_TEST_SEED           the seed of the first; 1
RUSHES_TEST_SHARE=plain    without a pool

Exit code: 0 when nothing was lost (or something is missing here, which it says), 101 otherwise.";

fn main() {
    if explained(USAGE) {
        return;
    }
    let plain = std::env::var("RUSHES_TEST_SHARE").as_deref() == Ok("plain");
    let Some(mut stand) = (if plain { Stand::plain() } else { Stand::pool() }) else {
        return;
    };
    let first = std::env::var("RUSHES_TEST_SEED");
    let first: u64 = first.ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let wrong: u64 = (first..first + kills::wanted() as u64)
        .map(|seed| round(&mut stand, seed))
        .sum();
    assert_eq!(wrong, 0, "blocks that are not what was written last");
}
