// SPDX-License-Identifier: Apache-2.0
//! Kills a daemon that holds its folder and gives no answer, so that `rushes recover` can write
//! the data in its lanes.

use crate::error::ServeError;
use crate::runtime_dir::{Purpose, RuntimeDir};
use rushes_control::{Answer, Ask, Client, ControlError};
use rushes_sys::SysError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

/// For one question, and between two.
const ASK_PATIENCE: Duration = Duration::from_secs(6);
const ASK_PAUSE: Duration = Duration::from_secs(1);
/// How long a process that was killed may take to be gone. One that waits for a device takes until
/// that answers.
const END_PATIENCE: Timespec = Timespec {
    tv_sec: 60,
    tv_nsec: 0,
};

/// Take the folder, if need be from a daemon that gives no answer for `patience`.
///
/// Errors   Running: it is not hung, or cannot be ended.
pub(crate) fn take_or_end(path: &Path, patience: Duration) -> Result<RuntimeDir, ServeError> {
    let running = match RuntimeDir::take(path, Purpose::Recover) {
        Err(running @ ServeError::Running { .. }) => running,
        taken => return taken,
    };
    // A starting daemon gives no answer while it waits for a door's change, for the data of an
    // earlier daemon or for memory.
    let Some((pid, Purpose::Serve)) = RuntimeDir::holder(path) else {
        return Err(running);
    };
    if is_answering(path, patience) {
        return Err(running);
    }
    tracing::error!(
        "the daemon (pid {}) has not answered for {} s; it is killed now, and its acknowledged \
         writes are written",
        pid.as_raw_nonzero(),
        patience.as_secs()
    );
    let failed = |error: rustix::io::Errno| {
        let pid = pid.as_raw_nonzero().to_string();
        ServeError::System(SysError::new(
            "end the hung daemon, pid",
            pid,
            io::Error::from(error),
        ))
    };
    let process = pidfd_open(pid, PidfdFlags::empty()).map_err(failed)?;
    // The pidfd is the daemon's if the daemon holds the folder now as before: its pid cannot have
    // been reused between.
    if RuntimeDir::holder(path) != Some((pid, Purpose::Serve)) {
        return RuntimeDir::take(path, Purpose::Recover);
    }
    pidfd_send_signal(&process, Signal::KILL).map_err(failed)?;
    let mut ended = [PollFd::new(&process, PollFlags::IN)];
    if poll(&mut ended, Some(&END_PATIENCE)).map_err(failed)? == 0 {
        return Err(failed(rustix::io::Errno::TIMEDOUT));
    }
    RuntimeDir::take(path, Purpose::Recover)
}

/// Also true when we cannot connect: then nothing shows that it is hung.
fn is_answering(path: &Path, patience: Duration) -> bool {
    let end = Instant::now() + patience;
    loop {
        let asked = Client::connect(&path.join("control.sock"), ASK_PATIENCE.min(patience))
            .and_then(|mut client| client.ask(&Ask::Status {}));
        match asked {
            // The control socket's threads answer that the loop does not.
            Ok(Answer::Error { .. }) | Err(ControlError::Talk { .. }) => {}
            _ => return true,
        }
        if Instant::now() > end {
            return false;
        }
        std::thread::sleep(ASK_PAUSE);
    }
}
