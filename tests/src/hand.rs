// SPDX-License-Identifier: Apache-2.0
//! The other end of `smb-hand`: an SMB client that does one thing at a time, when it is told.
//!
//! Every answer is waited for with a bound: a hang is a failure with a name, not a test that never
//! ends.

use crate::smbd::{PASSWORD, SHARE, USER};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

/// Longer than anything but a hang takes.
const ANSWER_MAX: Duration = Duration::from_secs(30);

/// The answer of a hand: a number and perhaps bytes, or a sentence.
pub type Answer = Result<(u64, Vec<u8>), String>;

/// A file that a hand holds open.
#[derive(Clone, Copy, Debug)]
pub struct Held(u64);

/// An SMB client process.
#[derive(Debug)]
pub struct Hand {
    child: Child,
    input: ChildStdin,
    answers: Receiver<Answer>,
}

impl Hand {
    /// Start a client; it connects at its first command. `program`:
    /// `env!("CARGO_BIN_EXE_smb-hand")`.
    pub fn connect(program: &str, port: u16) -> Hand {
        let mut child = Command::new(Path::new(program))
            .arg(format!("smb://127.0.0.1:{port}"))
            .args([SHARE, USER, PASSWORD])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("smb-hand was built with the tests");
        let input = child.stdin.take().expect("stdin is piped");
        let output = child.stdout.take().expect("stdout is piped");
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            let mut output = BufReader::new(output);
            while let Some(answer) = next_answer(&mut output) {
                if sender.send(answer).is_err() {
                    return;
                }
            }
        });
        Hand {
            child,
            input,
            answers,
        }
    }

    /// Open for reading.
    pub fn open(&mut self, name: &str) -> Held {
        Held(self.must(&format!("open r {name}"), &[]).0)
    }

    /// Open for reading and writing.
    pub fn open_rw(&mut self, name: &str) -> Held {
        Held(self.must(&format!("open rw {name}"), &[]).0)
    }

    /// Create, or cut to nothing.
    pub fn create(&mut self, name: &str) -> Held {
        Held(self.must(&format!("open new {name}"), &[]).0)
    }

    /// Read; shorter only at the end of the file.
    pub fn read(&mut self, file: Held, offset: u64, length: usize) -> Vec<u8> {
        self.try_read(file, offset, length)
            .unwrap_or_else(|error| panic!("read at {offset}: {error}"))
    }

    /// Read, and say so when it fails.
    pub fn try_read(&mut self, file: Held, offset: u64, length: usize) -> Result<Vec<u8>, String> {
        self.ask(&format!("read {} {offset} {length}", file.0), &[])
            .map(|(_, bytes)| bytes)
    }

    /// Begin a read; [`Hand::finish_read`] waits for it.
    pub fn begin_read(&mut self, file: Held, offset: u64, length: usize) {
        self.tell(&format!("read {} {offset} {length}", file.0), &[]);
    }

    /// The read begun before.
    pub fn finish_read(&mut self) -> Result<Vec<u8>, String> {
        self.answer("read").map(|(_, bytes)| bytes)
    }

    /// Write all of it.
    pub fn write(&mut self, file: Held, offset: u64, bytes: &[u8]) {
        self.must(&format!("write {} {offset} {}", file.0, bytes.len()), bytes);
    }

    /// Close.
    pub fn close(&mut self, file: Held) {
        self.must(&format!("close {}", file.0), &[]);
    }

    /// Remove a file.
    pub fn unlink(&mut self, name: &str) {
        self.must(&format!("unlink {name}"), &[]);
    }

    /// Rename a file.
    pub fn rename(&mut self, from: &str, to: &str) {
        self.must(&format!("rename {from} {to}"), &[]);
    }

    /// How long a file is, as the server says.
    pub fn size(&mut self, name: &str) -> u64 {
        self.must(&format!("size {name}"), &[]).0
    }

    /// End it without a good-bye, as a crashed or unplugged workstation does.
    pub fn kill(mut self) {
        self.child.kill().expect("it is our child");
    }

    fn must(&mut self, command: &str, bytes: &[u8]) -> (u64, Vec<u8>) {
        self.ask(command, bytes)
            .unwrap_or_else(|error| panic!("{command}: {error}"))
    }

    fn ask(&mut self, command: &str, bytes: &[u8]) -> Answer {
        self.tell(command, bytes);
        self.answer(command)
    }

    fn tell(&mut self, command: &str, bytes: &[u8]) {
        writeln!(self.input, "{command}")
            .and_then(|()| self.input.write_all(bytes))
            .and_then(|()| self.input.flush())
            .unwrap_or_else(|error| panic!("{command}: the client is gone: {error}"));
    }

    fn answer(&mut self, command: &str) -> Answer {
        match self.answers.recv_timeout(ANSWER_MAX) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Timeout) => {
                panic!("{command}: no answer within {ANSWER_MAX:?}: something hangs")
            }
            Err(RecvTimeoutError::Disconnected) => panic!("{command}: the client process ended"),
        }
    }
}

impl Drop for Hand {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn next_answer(output: &mut impl BufRead) -> Option<Answer> {
    let mut line = String::new();
    if output.read_line(&mut line).ok()? == 0 {
        return None;
    }
    let line = line.trim_end();
    if let Some(error) = line.strip_prefix("err ") {
        return Some(Err(error.to_owned()));
    }
    let (number, length) = match line.strip_prefix("ok ")?.split_once(' ') {
        Some((number, length)) => (number, length.parse().ok()?),
        None => (line.strip_prefix("ok ")?, 0),
    };
    let mut bytes = vec![0; length];
    output.read_exact(&mut bytes).ok()?;
    Some(Ok((number.parse().ok()?, bytes)))
}
