// SPDX-License-Identifier: Apache-2.0
//! Keeps a server running as long as its mount is there, and stops it while it is not.
//!
//! A server that has a dead mount open answers with errors until it is restarted. A stopped one
//! gives no answer: NFS clients and iSCSI initiators wait, retry, and continue when it is back.

use crate::error::ExportError;
use crate::mount::Mount;
use crate::refusal::MachineRefusal;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::process::Child;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Between two looks at server, mount and the request to stop.
const PAUSE: Duration = Duration::from_millis(50);

/// A server must answer within this time.
const READY_WITHIN: Duration = Duration::from_secs(60);

/// A report of the keeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// The server answers clients.
    Serving,
    /// The mount is missing; the server was stopped and starts with the mount.
    Waiting,
}

/// A server of the distribution, for one export.
pub trait Server {
    /// Its program's name.
    fn program(&self) -> &'static str;
    /// The address on which it will listen.
    fn address(&self) -> SocketAddr;
    /// Starts it. It need not answer yet.
    fn start(&mut self) -> Result<Child, ExportError>;
    /// Sends it its configuration as soon as it can take that. Returns  whether it
    /// answers
    fn make_ready(&mut self) -> Result<bool, ExportError>;
    /// Ends it and waits for that.
    fn stop(&mut self, child: Child);
}

/// The keeper would take another program that listens there for the server.
fn check_free(address: SocketAddr) -> Result<(), ExportError> {
    let (ip, port) = (address.ip(), address.port());
    match TcpListener::bind(address).map_err(|error| error.kind()) {
        Err(ErrorKind::AddrInUse) => Err(MachineRefusal::PortInUse { ip, port }.into()),
        Err(ErrorKind::AddrNotAvailable) => Err(MachineRefusal::OtherAddress(ip).into()),
        // The server reports any other fault.
        _ => Ok(()),
    }
}

/// Serves until `stop` is set.
///
/// Errors   the server cannot be started, or ended by itself
pub fn keep(
    mount: &Mount,
    server: &mut dyn Server,
    stop: &AtomicBool,
    mut tell: impl FnMut(Told),
) -> Result<(), ExportError> {
    let watch = mount.watch()?;
    check_free(server.address())?;
    let asked = || stop.load(Ordering::Acquire);
    while !asked() {
        let Some(device) = watch.device() else {
            std::thread::sleep(PAUSE);
            continue;
        };
        let is_there = || watch.device() == Some(device);
        let started = server.start()?;
        let mut child = Guard(Some(started));
        let begun = Instant::now();
        let mut ready = false;
        while is_there() && !asked() {
            if let Some(status) = child.ended() {
                return Err(ExportError::Server {
                    program: server.program(),
                    what: format!("ended by itself ({status})"),
                });
            }
            if !ready && server.make_ready()? {
                ready = true;
                tell(Told::Serving);
            }
            if !ready && begun.elapsed() > READY_WITHIN {
                return Err(ExportError::Server {
                    program: server.program(),
                    what: format!("does not answer after {READY_WITHIN:?}"),
                });
            }
            std::thread::sleep(PAUSE);
        }
        if let Some(child) = child.0.take() {
            server.stop(child);
        }
        if !asked() {
            tell(Told::Waiting);
        }
    }
    Ok(())
}

/// A child that does not outlive an error.
struct Guard(Option<Child>);

impl Guard {
    fn ended(&mut self) -> Option<std::process::ExitStatus> {
        self.0.as_mut().and_then(|child| child.try_wait().ok())?
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
