// SPDX-License-Identifier: Apache-2.0
//! Table 5 again: direct random reads and writes of 64 KiB to 16 MiB, beside the paper's figures.

/// Random reads in rt-Samba's Table 5: request size in KiB, Mb/s.
pub const TABLE5_READ_MBPS: [(u64, f64); 7] = [
    (64, 35.0),
    (512, 204.5),
    (1024, 361.2),
    (2048, 569.9),
    (4096, 821.7),
    (8192, 1032.4),
    (16384, 1216.6),
];

/// Random writes there. (Its small writes were absorbed by the array's memory, which this disk has not.)
pub const TABLE5_WRITE_MBPS: [(u64, f64); 7] = [
    (64, 224.3),
    (512, 376.3),
    (1024, 440.9),
    (2048, 674.0),
    (4096, 816.6),
    (8192, 925.2),
    (16384, 1123.2),
];
