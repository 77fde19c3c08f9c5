// SPDX-License-Identifier: Apache-2.0
//! An iSCSI client that stays logged in: `qemu-io`, which is libiscsi with a command line. Every
//! wait has a bound.

use crate::needs;
use crate::random::Random;
use std::io::{Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// Its prompt when it waits for a command.
const PROMPT: &str = "qemu-io> ";
/// Longer than anything but a hang takes.
const ANSWER_MAX: Duration = Duration::from_secs(60);

/// `qemu-io` on the iSCSI disk, one command after the other.
#[derive(Debug)]
pub struct Disk {
    child: Child,
    input: ChildStdin,
    said: Receiver<Vec<u8>>,
}

impl Disk {
    /// At `iscsi://…`.
    pub fn log_in(url: &str) -> Disk {
        let mut child = Command::new(needs::path_of("qemu-io"))
            .args(["-f", "raw", "-t", "none", url])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .expect("qemu-io starts");
        let input = child.stdin.take().expect("it is piped");
        let mut output = child.stdout.take().expect("it is piped");
        let (tell, said) = channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                if tell.send(bytes[..count].to_vec()).is_err() {
                    return;
                }
            }
        });
        let mut disk = Disk { child, input, said };
        disk.answer().expect("it logs in");
        disk
    }

    /// One command at a time: what is there of a second one it does not see.
    pub fn ask(&mut self, command: &str) -> Result<(), String> {
        let told = writeln!(self.input, "{command}").and_then(|()| self.input.flush());
        told.map_err(|error| error.to_string())?;
        self.answer()
    }

    /// Until it asks for the next command.
    fn answer(&mut self) -> Result<(), String> {
        let mut said = String::new();
        while !said.ends_with(PROMPT) {
            let more = self.said.recv_timeout(ANSWER_MAX);
            let more = more.map_err(|error| format!("{error}: {said}"))?;
            said += &String::from_utf8_lossy(&more);
        }
        let is_good = !["fail", "rror", "invalid"]
            .iter()
            .any(|word| said.contains(word));
        if is_good { Ok(()) } else { Err(said) }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Blocks of a disk that are written and read anywhere, each all of one byte.
#[derive(Debug)]
pub struct Blocks {
    random: Random,
    block_bytes: usize,
    bytes: Vec<u8>,
}

impl Blocks {
    /// So many at the start of a disk that has zeroes there.
    pub fn new(seed: u64, count: u64, block_bytes: usize) -> Blocks {
        Blocks {
            random: Random(seed),
            block_bytes,
            bytes: vec![0; count as usize],
        }
    }

    /// The next command for the disk; bytes that it writes count as written.
    pub fn command(&mut self) -> String {
        let block = self.random.below(self.bytes.len() as u64);
        let length = self.block_bytes;
        let at = block * length as u64;
        let byte = &mut self.bytes[block as usize];
        match self.random.below(10) {
            0 => String::from("flush"),
            1..5 => {
                *byte = self.random.below(256) as u8;
                format!("write -P {byte} {at} {length}")
            }
            _ => format!("read -P {byte} {at} {length}"),
        }
    }

    /// Of each block the byte that it has.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}
