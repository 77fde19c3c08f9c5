// SPDX-License-Identifier: Apache-2.0
//! The keeper: a process that holds a mount's connection to the kernel, so that the death of the
//! serving process is only a pause.
//!
//! It holds three things and looks at none of them: the device, the table of the mount's
//! obligations to the kernel (table.rs), and the pool's lock, so that no tool takes the pool in the
//! pause. It reads no request, opens no file of the pool and has no state but the serial number of
//! the serving process: so little that it does not die. A kill of the keeper kills the mount.
//! Decision: docs/decisions/0032.

use crate::daemon::DaemonPlace;
use crate::door::Door;
use crate::kernel::protocol::{self, Mounted};
use crate::kernel::table::{self, Table};
use crate::lock::locked;
use rushes_pool::Pool;
use rushes_sys::socket::{pair, receive, send};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, getpid, getppid, kill_process, pidfd_open,
    set_parent_process_death_signal, waitid,
};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A process that dies sooner after it began to serve was killed by a request, and the next one
/// will be.
const QUICK: Duration = Duration::from_millis(200);
/// After so many such deaths in a row the keeper gives the mount up.
const QUICK_COUNT_MAX: u32 = 10;
/// Before the next try after the first such death; twice as long each time.
const PAUSE: Duration = Duration::from_millis(10);

/// By this exit code a serving process says that it got two signals and ended before all was done.
pub const HURRIED: u8 = 1;

/// How a serving process is asked to make way for another one.
#[derive(Debug, Default)]
pub struct Replacing {
    serving: Mutex<Option<Pid>>,
    is_wanted: AtomicBool,
    has_mounted: AtomicBool,
    /// The kernel sends unanswered requests again.
    is_kept: AtomicBool,
}

impl Replacing {
    /// Replaces the serving process by one of the program that is installed now. Does nothing if
    /// its death would end the mount.
    pub fn replace(&self) {
        if !self.is_kept.load(Ordering::Acquire) {
            tracing::warn!(
                "the process that serves the mount is not replaced, because no other process could continue (that needs Linux 6.9 or later). The new \
                 program serves from the next mount on"
            );
            return;
        }
        let serving = locked(&self.serving);
        self.is_wanted.store(true, Ordering::Release);
        if let Some(pid) = *serving {
            // It has written down all that must not be lost, so a kill is the normal way to end it.
            let _ = kill_process(pid, Signal::KILL);
        }
    }

    /// The pool is, or was, mounted and served.
    pub(crate) fn has_mounted(&self) -> bool {
        self.has_mounted.load(Ordering::Acquire)
    }

    /// Tells the serving process to wait for no program (SIGUSR2, which it handles). It ends with
    /// [`HURRIED`].
    pub fn hurry(&self) {
        if let Some(pid) = *locked(&self.serving) {
            let _ = kill_process(pid, Signal::USR2);
        }
    }
}

/// How a mount with a keeper ended.
#[derive(Debug)]
pub enum Ended {
    /// It was unmounted.
    Unmounted,
    /// It got two signals to end, and did not wait for its users.
    Hurried,
    /// The mount failed. The process has logged the error.
    NeverMounted(ExitStatus),
    /// The serving processes died one after the other; the last one with this status.
    GivenUp(ExitStatus),
    /// The serving process died, and this kernel cannot continue with another.
    NotKept(ExitStatus),
}

/// Starts processes of `program`, one after the other, which mount the folder and serve it until it
/// is unmounted.
///
/// `lock`: the pool's. `program`: its argument says whether to start the installed program instead
/// of the running one; its standard input is ours.
///
/// Assumes  called by the process's first thread: the death of the caller ends the serving process
/// Errors   a process cannot be started
pub fn keep(
    lock: OwnedFd,
    mut program: impl FnMut(bool) -> Command,
    replacing: &Replacing,
) -> io::Result<Ended> {
    let table = table::create()?;
    let mut mounted: Option<OwnedFd> = None;
    let (mut quick_count, mut is_installed, mut serial) = (0, false, 0u32);
    loop {
        serial += 1;
        let (ours, its) = pair()?;
        let words = [serial, getpid().as_raw_nonzero().get() as u32];
        let mut fds = vec![table.as_fd(), lock.as_fd()];
        fds.extend(mounted.as_ref().map(AsFd::as_fd));
        send(&ours, &[&words.map(u32::to_ne_bytes).concat()], &fds)?;
        let started = program(is_installed).stdin(Stdio::from(its)).spawn();
        let mut child = match (started, &mounted) {
            (Ok(child), _) => child,
            (Err(error), Some(device)) if quick_count + 1 < QUICK_COUNT_MAX => {
                // No memory for it, for example; or no program file during an installation.
                tracing::warn!("cannot start a process that serves the mount: {error}");
                quick_count += 1;
                is_installed = false;
                if is_unmounted(device, pause(quick_count))? {
                    return Ok(Ended::Unmounted);
                }
                continue;
            }
            (Err(error), _) => return Err(error),
        };
        let pid = Pid::from_child(&child);
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        *locked(&replacing.serving) = Some(pid);
        let hello = hello(&ours, &process)?;
        let served_since = hello.as_ref().map(|_| Instant::now());
        if let Some(hello) = &hello {
            replacing.has_mounted.store(true, Ordering::Release);
            replacing.is_kept.store(hello.asks_again, Ordering::Release);
        }
        waitid(
            WaitId::Pid(pid),
            WaitIdOptions::EXITED | WaitIdOptions::NOWAIT,
        )?;
        // Before another process can have its number.
        *locked(&replacing.serving) = None;
        let status = child.wait()?;
        if status.success() {
            return Ok(Ended::Unmounted);
        }
        if status.code() == Some(i32::from(HURRIED)) {
            return Ok(Ended::Hurried);
        }
        match hello {
            Some(Hello { device, asks_again }) if mounted.is_none() => {
                mounted = device;
                if !asks_again {
                    return Ok(Ended::NotKept(status));
                }
            }
            None if mounted.is_none() => return Ok(Ended::NeverMounted(status)),
            _ => {}
        }
        let is_wanted = replacing.is_wanted.swap(false, Ordering::AcqRel);
        let is_quick = served_since.is_none_or(|since| since.elapsed() < QUICK);
        quick_count = if is_quick && !is_wanted {
            quick_count + 1
        } else {
            0
        };
        if quick_count == QUICK_COUNT_MAX {
            return Ok(Ended::GivenUp(status));
        }
        // A program that cannot continue the mount is not tried twice.
        is_installed = is_wanted || (is_installed && served_since.is_some());
        tracing::warn!(
            "the process that served the mount has ended ({status}); programs on the mount wait \
             for process number {}",
            serial + 1
        );
        if let Some(device) = &mounted
            && is_unmounted(device, pause(quick_count))?
        {
            return Ok(Ended::Unmounted);
        }
    }
}

fn pause(quick_count: u32) -> Duration {
    match quick_count {
        0 => Duration::ZERO,
        count => PAUSE * 2u32.pow(count - 1),
    }
}

/// The message of a process that begins to serve.
struct Hello {
    /// From the first process, which opened it.
    device: Option<OwnedFd>,
    asks_again: bool,
}

/// None: the process ended before.
fn hello(socket: &OwnedFd, process: &OwnedFd) -> io::Result<Option<Hello>> {
    let mut byte = [0];
    loop {
        let mut fds = [
            PollFd::new(socket, PollFlags::IN),
            PollFd::new(process, PollFlags::IN),
        ];
        // Interrupted or not: look at both again.
        let _ = poll(&mut fds, None);
        // Looked at before the socket, in which its message may lie from before its end. Processes
        // that it started have the socket, too.
        let has_ended = !fds[1].revents().is_empty();
        match receive(socket, &mut byte) {
            Ok(Some(mut packet)) => {
                return Ok((packet.bytes == 1).then(|| Hello {
                    device: packet.fds.pop(),
                    asks_again: byte[0] == 1,
                }));
            }
            Ok(None) if has_ended => return Ok(None),
            Ok(None) => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            Err(error) => return Err(error),
        }
    }
}

/// Whether no program can send requests any more; waits so long for that.
pub(crate) fn is_unmounted(device: &OwnedFd, pause: Duration) -> io::Result<bool> {
    let limit = Timespec {
        tv_sec: pause.as_secs() as i64,
        tv_nsec: i64::from(pause.subsec_nanos()),
    };
    let mut fds = [PollFd::new(device, PollFlags::empty())];
    match poll(&mut fds, Some(&limit)) {
        Ok(count) => Ok(count > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// The things that a process gets from its keeper.
#[derive(Debug)]
pub struct Handover {
    keeper: OwnedFd,
    serial: u32,
    table: OwnedFd,
    /// The connection to the kernel. None: nothing is mounted yet.
    device: Option<OwnedFd>,
}

impl Handover {
    /// Receives them from the keeper at the other end of this socket, with the lock of the pool.
    /// From now on the keeper's death ends this process.
    ///
    /// Errors   InvalidData: it is no keeper
    pub fn receive(socket: impl AsFd) -> io::Result<(Handover, OwnedFd)> {
        let none = || {
            io::Error::new(
                io::ErrorKind::InvalidData,
                "standard input is not a keeper's socket; expected a start by `rushes pool mount \
                 --keeper`",
            )
        };
        let keeper = socket.as_fd().try_clone_to_owned()?;
        let mut words = [0; 8];
        let packet = receive(&keeper, &mut words).ok().flatten();
        let packet = packet
            .filter(|packet| packet.bytes == words.len())
            .ok_or_else(none)?;
        let word = |at: usize| {
            let mut word = [0; 4];
            word.copy_from_slice(&words[at..at + 4]);
            u32::from_ne_bytes(word)
        };
        let mut fds = packet.fds.into_iter();
        let (Some(table), Some(lock)) = (fds.next(), fds.next()) else {
            return Err(none());
        };
        set_parent_process_death_signal(Some(Signal::KILL))?;
        let parent = getppid().map(|pid| pid.as_raw_nonzero().get() as u32);
        if parent != Some(word(4)) {
            return Err(io::Error::other(
                "the keeper has ended; expected it to run: mount the pool again",
            ));
        }
        let handover = Handover {
            keeper,
            serial: word(0),
            table,
            device: fds.next(),
        };
        Ok((handover, lock))
    }

    /// Whether the pool is mounted already, and a process before this one died.
    pub fn goes_on(&self) -> bool {
        self.device.is_some()
    }

    /// Mounts the pool, or goes on serving it, as [`crate::mount`] does.
    ///
    /// Errors   as there; InvalidData if this version cannot continue after that of the former
    /// process
    pub fn mount(
        self,
        pool: Pool,
        daemon: Option<&DaemonPlace>,
        tidy_after: Duration,
        folder: &Path,
    ) -> io::Result<Mounted> {
        crate::ask_of_the_machine();
        let kept = Table::open(self.table, self.serial)?;
        let door = Arc::new(Door::new(pool, daemon, tidy_after, Some(kept))?);
        match self.device {
            Some(device) => {
                let mounted = protocol::go_on(door, &device)?;
                send(&self.keeper, &[&[1]], &[])?;
                Ok(mounted)
            }
            None => {
                let (mounted, device, asks_again) = protocol::mount_kept(door, folder)?;
                if !asks_again {
                    tracing::warn!(
                        "this kernel cannot repeat requests (Linux 6.9 can): if the mount's process dies, the mount is dead"
                    );
                }
                send(&self.keeper, &[&[u8::from(asks_again)]], &[device.as_fd()])?;
                Ok(mounted)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_ended_whose_death_would_be_the_mounts() {
        let mut child = Command::new("sleep").arg("60").spawn().expect("it starts");
        let replacing = Replacing::default();
        *locked(&replacing.serving) = Some(Pid::from_child(&child));
        replacing.replace();
        assert!(child.try_wait().expect("ours").is_none(), "it lives");
        replacing.is_kept.store(true, Ordering::Release);
        replacing.replace();
        assert!(!child.wait().expect("ours").success());
    }
}
