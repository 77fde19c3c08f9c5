// SPDX-License-Identifier: Apache-2.0
//! A program that has a file mapped, and closed: what the kernel does not tell anybody of.

use crate::needs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Maps a file whole, closes it, and reads and stores as it is told.
const MAPPER: &str = r#"
import mmap, os, sys
writes = sys.argv[2] == "w"
fd = os.open(sys.argv[1], os.O_RDWR if writes else os.O_RDONLY)
memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0))
os.close(fd)
print("mapped", flush=True)
for line in sys.stdin:
    word, at, what = line.split()
    at = int(at)
    if word == "store":
        what = bytes.fromhex(what)
        memory[at:at + len(what)] = what
        print("stored", flush=True)
    elif word == "flush":
        memory.flush()
        print("flushed", flush=True)
    else:
        print(memory[at:at + int(what)].hex(), flush=True)
"#;

/// A program that has a file mapped, and closed. It ends when it is dropped.
#[derive(Debug)]
pub struct Mapper {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Mapper {
    /// `way`: `w` to store, too; needs python3.
    pub fn new(path: &Path, way: &str) -> Mapper {
        let mut child = Command::new(needs::path_of("python3"))
            .args(["-c", MAPPER])
            .arg(path)
            .arg(way)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 starts");
        let mut mapper = Mapper {
            input: child.stdin.take(),
            output: BufReader::new(child.stdout.take().expect("it is piped")),
            child,
        };
        assert_eq!(mapper.line(), "mapped");
        mapper
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("it says so");
        line.trim_end().to_owned()
    }

    fn ask(&mut self, words: &str) -> String {
        let input = self.input.as_mut().expect("it lives");
        writeln!(input, "{words}").expect("it hears");
        self.line()
    }

    /// Bytes that it sees, in hexadecimal.
    pub fn sees(&mut self, at: usize, length: usize) -> String {
        self.ask(&format!("read {at} {length}"))
    }

    /// It stores these bytes there.
    pub fn stores(&mut self, at: usize, bytes: &[u8]) {
        assert_eq!(self.ask(&format!("store {at} {}", hex(bytes))), "stored");
    }

    /// As stores that come later than the disk has those before.
    pub fn flushes(&mut self) {
        assert_eq!(self.ask("flush 0 0"), "flushed");
    }
}

impl Drop for Mapper {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.wait();
    }
}

/// As [`Mapper::sees`] says it.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
