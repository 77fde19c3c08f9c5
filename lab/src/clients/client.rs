// SPDX-License-Identifier: Apache-2.0
//! Client processes of the lab: starts them with a job, waits until they are connected, sends the
//! instant of their beginning, collects their results.
//!
//! They are this program again with a hidden subcommand. libsmbclient keeps state per process, and
//! a real client is a process, with an smbd child, of its own.

use crate::clients::door::{Address, Door};
use crate::servers::server::Server;
use anyhow::{Context, Result, anyhow};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

/// The beginning of each hidden subcommand: reads a job, connects, prints `ready`, reads the
/// instant of its beginning.
///
/// Returns  job, connection, and the instant. Units: ns, CLOCK_MONOTONIC
/// Errors   no job, a server that refuses us, or no instant
pub fn take_job<J: DeserializeOwned>(address: impl Fn(&J) -> &Address) -> Result<(J, Door, u64)> {
    let mut lines = std::io::stdin().lock().lines();
    let job: J = serde_json::from_str(&lines.next().context("no job was given")??)
        .context("the job is not understood")?;
    let door = Door::connect(address(&job))?;
    println!("ready");
    std::io::stdout().flush()?;
    let begin = lines
        .next()
        .context("no instant to begin at was given")??
        .trim()
        .parse()
        .context("the instant to begin at is not a number")?;
    Ok((job, door, begin))
}

/// A client process; killed when dropped.
#[derive(Debug)]
pub struct Client {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Client {
    /// Start `rushes-lab SUBCOMMAND` and hand it its job.
    pub fn start<J: Serialize>(subcommand: &str, server: &Server, job: &J) -> Result<Client> {
        let program = std::env::current_exe()?;
        let command = match server.address() {
            Address::Smb { home, .. } => {
                let mut command = Command::new(program);
                command.env("HOME", home);
                command
            }
            // Our NFS client has no cache.
            Address::Nfs { .. } => Command::new(program),
            Address::Disk(_) => Command::new(program),
            // The kernel charges page cache to the reader: local clients run in the server's
            // control group.
            Address::Local(_) | Address::Rushes { .. } => server.cgroup().command(&program),
        };
        Client::spawn(command, subcommand, job)
    }

    /// The same for a program that is not a client of the server: its processor time and memory do
    /// not count as the server's.
    pub fn start_beside<J: Serialize>(subcommand: &str, job: &J) -> Result<Client> {
        Client::spawn(Command::new(std::env::current_exe()?), subcommand, job)
    }

    fn spawn<J: Serialize>(mut command: Command, subcommand: &str, job: &J) -> Result<Client> {
        let mut child = command
            .arg(subcommand)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .process_group(0)
            .spawn()
            .context("a client process cannot be started")?;
        let input = child.stdin.take().context("a client without input")?;
        let output = child.stdout.take().context("a client without output")?;
        let mut client = Client {
            child,
            input,
            output: BufReader::new(output),
        };
        writeln!(client.input, "{}", serde_json::to_string(job)?)?;
        Ok(client)
    }

    /// Wait until it is connected.
    pub fn wait_ready(&mut self) -> Result<()> {
        let line = self.line()?;
        anyhow::ensure!(line == "ready", "a client wrote `{line}`; expected `ready`");
        Ok(())
    }

    /// Send it the instant of its beginning. Units: ns, CLOCK_MONOTONIC.
    pub fn begin(&mut self, at_ns: u64) -> Result<()> {
        writeln!(self.input, "{at_ns}").context("a client is gone")
    }

    /// Wait for its result.
    pub fn result<R: DeserializeOwned>(mut self) -> Result<R> {
        let line = self.line()?;
        let result = serde_json::from_str(&line).context("a client's result is not understood")?;
        let _ = self.child.wait();
        Ok(result)
    }

    /// Its process number.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        if self.output.read_line(&mut line)? == 0 {
            let status = self.child.wait()?;
            return Err(anyhow!(
                "a client ended early ({status}); its message stands above"
            ));
        }
        Ok(line.trim_end().to_owned())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Clients at work, with a thread for each that waits for it; killed when dropped before they are
/// done.
#[derive(Debug)]
pub struct Crowd<R> {
    waiting: Vec<Waiting>,
    results: mpsc::Receiver<(usize, Result<R>)>,
}

#[derive(Debug)]
struct Waiting {
    pid: u32,
    done: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl<R: DeserializeOwned + Send + 'static> Crowd<R> {
    /// Start to wait for these clients.
    pub fn gather(clients: Vec<Client>) -> Crowd<R> {
        let (sender, results) = mpsc::channel();
        let wait = |(index, client): (usize, Client)| {
            let (sender, done) = (sender.clone(), Arc::new(AtomicBool::new(false)));
            let (pid, flag) = (client.pid(), Arc::clone(&done));
            let thread = std::thread::spawn(move || {
                let result = client.result();
                flag.store(true, Ordering::SeqCst);
                let _ = sender.send((index, result));
            });
            Waiting {
                pid,
                done,
                thread: Some(thread),
            }
        };
        Crowd {
            waiting: clients.into_iter().enumerate().map(wait).collect(),
            results,
        }
    }

    /// True when all have returned their results.
    pub fn is_done(&self) -> bool {
        self.waiting
            .iter()
            .all(|one| one.done.load(Ordering::SeqCst))
    }

    /// Wait for their results; returns them in the order of the clients.
    pub fn results(mut self) -> Result<Vec<R>> {
        for one in &mut self.waiting {
            if let Some(thread) = one.thread.take() {
                thread
                    .join()
                    .map_err(|_| anyhow!("a waiting thread panicked"))?;
            }
        }
        let mut results: Vec<(usize, Result<R>)> = self.results.try_iter().collect();
        results.sort_by_key(|(index, _)| *index);
        results.into_iter().map(|(_, result)| result).collect()
    }
}

impl<R> Drop for Crowd<R> {
    fn drop(&mut self) {
        for one in &self.waiting {
            // The thread sets the flag just after it has reaped its child. Only in the few
            // instructions between the two, on the way out, may the number be another process's.
            if !one.done.load(Ordering::SeqCst)
                && let Some(pid) = rustix::process::Pid::from_raw(one.pid as i32)
            {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        for one in &mut self.waiting {
            if let Some(thread) = one.thread.take() {
                let _ = thread.join();
            }
        }
    }
}
