// SPDX-License-Identifier: Apache-2.0
//! How long a request takes from one process to another and back.
//!
//! ```text
//! cargo run --release -p rushes-shm --example round_trip
//! ```
//!
//! The other process is the echo server. A CHANGED carries nothing: its time is the session's own.
//! Reads add the server's `pread` from the page cache and the client's copy. No test depends on
//! these numbers.

#[path = "../tests/support/mod.rs"]
mod support;

use rushes_shm::Connect;
use rushes_shm::client::Client;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};
use support::{Echo, EchoSize};

/// Kills the server at its drop, on every way out.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn main() -> std::io::Result<()> {
    let mut arguments = std::env::args().skip(1);
    if let (Some(path), Some(sweeps)) = (arguments.next(), arguments.next()) {
        let size = EchoSize {
            sweeps: sweeps == "sweeps",
            ..EchoSize::default()
        };
        let mut server = Echo::new(Path::new(&path), size)?;
        loop {
            server.turn(60_000)?;
            server.notices.clear();
        }
    }
    let folder = std::env::temp_dir().join(format!("rushes-round-trip-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let result = measure(&folder);
    std::fs::remove_dir_all(&folder)?;
    result
}

fn measure(folder: &Path) -> std::io::Result<()> {
    let clip = folder.join("clip");
    let mut file = File::create(&clip)?;
    for n in 0..64u8 {
        file.write_all(&vec![n; 1 << 20])?;
    }
    let file = File::open(&clip)?;
    println!(
        "{:<34} {:>10} {:>10} {:>10}",
        "", "p50 µs", "p99 µs", "p99.9 µs"
    );
    for manner in ["rings", "sweeps"] {
        let path = folder.join(manner);
        let program = std::env::current_exe()?;
        let _server = Server(Command::new(program).arg(&path).arg(manner).spawn()?);
        let mut client = connected(&path)?;
        let handle = client
            .open(&file, b"clip")
            .ok_or_else(|| std::io::Error::other("the file was not taken"))?;
        report(&format!("{manner}: CHANGED"), 50_000, |n| {
            client.changed(1, n, 0, 1)
        });
        for length in [4096, 65_536, 1 << 20] {
            let mut buffer = vec![0; length];
            let count = if length < 1 << 20 { 20_000 } else { 3_000 };
            report(&format!("{manner}: read of {length}"), count, |n| {
                let offset = n * length as u64 % (60 << 20);
                assert_eq!(client.read(handle, &mut buffer, offset), Ok(length));
            });
        }
    }
    Ok(())
}

fn connected(path: &Path) -> std::io::Result<Client> {
    let who = Connect {
        door: 3,
        ..Connect::default()
    };
    let start = Instant::now();
    loop {
        match Client::connect(path, &who) {
            Ok(client) => return Ok(client),
            Err(error) if start.elapsed() > Duration::from_secs(5) => {
                return Err(std::io::Error::other(error));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

fn report(name: &str, count: u64, mut work: impl FnMut(u64)) {
    let mut times: Vec<u64> = (0..count)
        .map(|n| {
            let start = Instant::now();
            work(n);
            start.elapsed().as_nanos() as u64
        })
        .collect();
    times.sort_unstable();
    let at = |permille: u64| times[(count * permille / 1000).min(count - 1) as usize] as f64 / 1e3;
    println!(
        "{name:<34} {:>10.1} {:>10.1} {:>10.1}",
        at(500),
        at(990),
        at(999)
    );
}
