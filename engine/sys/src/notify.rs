// SPDX-License-Identifier: Apache-2.0
//! Notifies systemd of our state (sd_notify(3)), without its library.

use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sendto, socket_with,
};
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;

/// Notify the service manager; `state` as in sd_notify(3): `READY=1`,
/// `RELOADING=1\nMONOTONIC_USEC=…`, `STATUS=…`. False when there is none, that is, no
/// NOTIFY_SOCKET. Never waits.
pub fn notify(state: &str) -> io::Result<bool> {
    match std::env::var_os("NOTIFY_SOCKET") {
        Some(path) if !path.is_empty() => notify_at(&path, state).map(|()| true),
        _ => Ok(false),
    }
}

fn notify_at(path: &OsStr, state: &str) -> io::Result<()> {
    let address = match path.as_bytes() {
        [b'@', name @ ..] => SocketAddrUnix::new_abstract_name(name)?,
        path => SocketAddrUnix::new(path)?,
    };
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendto(&socket, state.as_bytes(), flags, &address)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};

    #[test]
    fn state_arrives_at_path_and_abstract_sockets() {
        let name = format!("rushes-notify-{}", std::process::id());
        let path = std::env::temp_dir().join(&name);
        let by_path = UnixDatagram::bind(&path).unwrap();
        let by_name =
            UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        notify_at(path.as_os_str(), "READY=1").unwrap();
        notify_at(OsStr::new(&format!("@{name}")), "STOPPING=1").unwrap();
        let mut buffer = [0; 32];
        let count = by_path.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..count], b"READY=1");
        let count = by_name.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..count], b"STOPPING=1");
        std::fs::remove_file(path).unwrap();
    }
}
