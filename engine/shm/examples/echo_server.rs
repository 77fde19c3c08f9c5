// SPDX-License-Identifier: Apache-2.0
//! A stand-in for the daemon: serves every file that a door sends it, by plain `pread`.
//!
//! ```text
//! cargo run -p rushes-shm --example echo_server -- SOCKET [SLOTS [SLOT_BYTES]]
//! ```
//!
//! For trying doors only: it vets nothing, caches nothing and keeps no contract.

#[path = "../tests/support/mod.rs"]
mod support;

use std::path::Path;
use support::{Echo, EchoSize};

fn main() -> std::io::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let Some(path) = arguments.next() else {
        eprintln!("usage: echo_server SOCKET [SLOTS [SLOT_BYTES]]");
        std::process::exit(2);
    };
    let mut number = |otherwise: u32| match arguments.next() {
        None => Ok(otherwise),
        Some(text) => text
            .parse()
            .map_err(|_| std::io::Error::other(format!("expected a number, read {text:?}"))),
    };
    let size = EchoSize {
        slot_count: number(256)?,
        slot_bytes: number(1 << 20)?,
        ..EchoSize::default()
    };
    let mut server = Echo::new(Path::new(&path), size)?;
    eprintln!(
        "echo_server: listening on {path}, {} buffers of {} bytes",
        size.slot_count, size.slot_bytes
    );
    loop {
        server.turn(60_000)?;
        for fault in server.faults.drain(..) {
            eprintln!("echo_server: ended a session: {fault}");
        }
        server.notices.clear();
    }
}
