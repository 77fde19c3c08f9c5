// SPDX-License-Identifier: Apache-2.0
//! SIGTERM, SIGINT and SIGHUP as something the loop can wait for.

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::{SigId, flag, low_level};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Signals caught while this lives.
pub(crate) struct Signals {
    stop: Arc<AtomicBool>,
    reload: Arc<AtomicBool>,
    pipe: UnixStream,
    ids: Vec<SigId>,
}

/// The requests since last time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) stop: bool,
    pub(crate) reload: bool,
}

impl Signals {
    /// From now on these signals are ours.
    pub(crate) fn catch() -> io::Result<Signals> {
        let (pipe, bell) = UnixStream::pair()?;
        pipe.set_nonblocking(true)?;
        let stop = Arc::new(AtomicBool::new(false));
        let reload = Arc::new(AtomicBool::new(false));
        let mut ids = Vec::new();
        for (signal, wanted) in [(SIGTERM, &stop), (SIGINT, &stop), (SIGHUP, &reload)] {
            // The flag first: hooks run in order, and the bell must not ring before the flag is
            // set.
            ids.push(flag::register(signal, wanted.clone())?);
            ids.push(low_level::pipe::register(signal, bell.try_clone()?)?);
        }
        Ok(Signals {
            stop,
            reload,
            pipe,
            ids,
        })
    }

    /// Readable when a signal came.
    pub(crate) fn fd(&self) -> io::Result<Arc<OwnedFd>> {
        Ok(Arc::new(OwnedFd::from(self.pipe.try_clone()?)))
    }

    /// Take the signals that came.
    pub(crate) fn take(&mut self) -> Wanted {
        let mut bytes = [0; 64];
        while matches!(self.pipe.read(&mut bytes), Ok(count) if count > 0) {}
        Wanted {
            stop: self.stop.swap(false, Ordering::SeqCst),
            reload: self.reload.swap(false, Ordering::SeqCst),
        }
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for id in self.ids.drain(..) {
            low_level::unregister(id);
        }
    }
}
