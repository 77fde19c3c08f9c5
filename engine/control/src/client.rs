// SPDX-License-Identifier: Apache-2.0
//! A blocking client for command line tools and tests.

use crate::wire::{ANSWER_BYTES_MAX, Answer, Ask, line_of};
use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Why there is no answer.
#[derive(Debug)]
pub enum ControlError {
    /// No daemon listens on that socket.
    Connect {
        /// Which socket.
        socket: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The connection broke or the daemon did not answer in time.
    Talk {
        /// Which socket.
        socket: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// This program does not know the answer.
    Answer {
        /// Its beginning.
        read: String,
        /// The parser's message.
        source: serde_json::Error,
    },
}

impl fmt::Display for ControlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ControlError::Connect { socket, source } => {
                let remedy = match source.kind() {
                    io::ErrorKind::PermissionDenied => {
                        "be root or a member of the control group (`control_group` in rushes.toml)"
                    }
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                        "start the daemon (`rushes serve`, `systemctl start rushes`) or name its \
                         folder with --runtime-dir"
                    }
                    _ => "see whether the daemon runs (`systemctl status rushes`)",
                };
                write!(
                    f,
                    "no daemon answers on {}: {source}; {remedy}",
                    socket.display()
                )
            }
            ControlError::Talk { socket, source } => write!(
                f,
                "the daemon behind {} did not answer: {source}; see its log",
                socket.display()
            ),
            ControlError::Answer { read, source } => write!(
                f,
                "the daemon answered {read:?}, which this program does not understand ({source}); \
                 install program and daemon of one release"
            ),
        }
    }
}

impl std::error::Error for ControlError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            ControlError::Connect { source, .. } | ControlError::Talk { source, .. } => {
                Some(source)
            }
            ControlError::Answer { source, .. } => Some(source),
        }
    }
}

/// One connection; any number of questions, one after the other.
#[derive(Debug)]
pub struct Client {
    socket: PathBuf,
    stream: BufReader<UnixStream>,
}

impl Client {
    /// Connect to `<runtime_dir>/control.sock`.
    ///
    /// Units    timeout: for each question, not for all of them
    pub fn connect(socket: &Path, timeout: Duration) -> Result<Client, ControlError> {
        let connect_error = |source| ControlError::Connect {
            socket: socket.to_path_buf(),
            source,
        };
        let stream = UnixStream::connect(socket).map_err(connect_error)?;
        stream
            .set_read_timeout(Some(timeout))
            .and_then(|()| stream.set_write_timeout(Some(timeout)))
            .map_err(connect_error)?;
        Ok(Client {
            socket: socket.to_path_buf(),
            stream: BufReader::new(stream),
        })
    }

    /// Put a question and wait for its answer.
    pub fn ask(&mut self, ask: &Ask) -> Result<Answer, ControlError> {
        let line = self.exchange(ask).map_err(|source| ControlError::Talk {
            socket: self.socket.clone(),
            source,
        })?;
        serde_json::from_str(&line).map_err(|source| ControlError::Answer {
            read: line.chars().take(200).collect(),
            source,
        })
    }

    fn exchange(&mut self, ask: &Ask) -> io::Result<String> {
        self.stream.get_mut().write_all(line_of(ask).as_bytes())?;
        let mut line = String::new();
        let count = (&mut self.stream)
            .take(ANSWER_BYTES_MAX as u64)
            .read_line(&mut line)?;
        if count == 0 {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "it closed the connection",
            ));
        }
        Ok(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    fn socket_name(what: &str) -> PathBuf {
        std::env::temp_dir().join(format!("rushes-control-{what}-{}", std::process::id()))
    }

    #[test]
    fn a_question_is_answered() {
        let path = socket_name("talk");
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut stream = BufReader::new(stream);
            let mut line = String::new();
            stream.read_line(&mut line).unwrap();
            let answer = Answer::Done { notes: vec![line] };
            stream
                .get_mut()
                .write_all(line_of(&answer).as_bytes())
                .unwrap();
        });
        let mut client = Client::connect(&path, Duration::from_secs(5)).unwrap();
        let answer = client.ask(&Ask::Reload {}).unwrap();
        assert_eq!(
            answer,
            Answer::Done {
                notes: vec![String::from("{\"ask\":\"reload\"}\n")]
            }
        );
        server.join().unwrap();
        let gone = client.ask(&Ask::Status {}).expect_err("the server is gone");
        assert!(gone.to_string().contains("did not answer"), "{gone}");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn nobody_there_says_how_to_start_one() {
        let error = Client::connect(&socket_name("nobody"), Duration::from_secs(1))
            .expect_err("no such socket");
        assert!(error.to_string().contains("rushes serve"), "{error}");
    }
}
