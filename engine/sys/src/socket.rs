// SPDX-License-Identifier: Apache-2.0
//! Seqpacket sockets that carry descriptors, and the process at the other end.
//!
//! Every call here passes MSG_DONTWAIT and MSG_NOSIGNAL itself: it does not trust the flags of a
//! shared description, and a library inside another program must not raise SIGPIPE. Received
//! descriptors are close-on-exec from the start (MSG_CMSG_CLOEXEC).

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    accept_with, bind, connect, listen, recvmsg, sendmsg, socket_with,
};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// Descriptors that one packet can bring; the kernel closes further ones and reports it.
pub const PACKET_FDS_MAX: usize = 8;

/// The process that connected, as the kernel recorded it at connect(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Process id; 0 when it is in a process namespace that we cannot see.
    pub pid: i32,
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// A received packet.
#[derive(Debug)]
pub struct Packet {
    /// Its length. Units: bytes. More than the buffer given: it was cut.
    pub bytes: usize,
    /// Its descriptors.
    pub fds: Vec<OwnedFd>,
    /// It brought more than [`PACKET_FDS_MAX`]; the kernel has closed the others.
    pub fds_cut: bool,
}

/// Listen at `path` (replacing a socket left there), for root's connections only (mode 0600).
pub fn listen_at(path: &Path) -> io::Result<OwnedFd> {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let new = Path::new(&new);
    let address = SocketAddrUnix::new(new)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    match std::fs::symlink_metadata(path) {
        Ok(found) => {
            use std::os::unix::fs::FileTypeExt;
            if !found.file_type().is_socket() {
                let what = format!("{} is there and is no socket", path.display());
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    // fchmod on a socket before bind(2) gives the file its mode from its first moment (unix(7)).
    rustix::fs::fchmod(&socket, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)?;
    // It gets its name only once it listens: a client that a socket refuses does not soon try the
    // same one again.
    match std::fs::remove_file(new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    bind(&socket, &address)?;
    listen(&socket, 128)?;
    std::fs::rename(new, path)?;
    Ok(socket)
}

/// The next connection, if one waits. The new socket is nonblocking.
pub fn accept(listener: impl AsFd) -> io::Result<Option<OwnedFd>> {
    match accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
        Ok(socket) => Ok(Some(socket)),
        // The client is gone already: as if it had not connected.
        Err(
            rustix::io::Errno::AGAIN | rustix::io::Errno::CONNABORTED | rustix::io::Errno::INTR,
        ) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Connect to `path` without waiting. EAGAIN: the listener's queue is full.
pub fn connect_to(path: &Path) -> io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    connect(&socket, &address)?;
    Ok(socket)
}

/// Two connected nonblocking ends, for tests and children.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        flags,
        None,
    )?)
}

/// The process at the other end, by SO_PEERCRED.
pub fn peer(socket: impl AsFd) -> io::Result<Peer> {
    // Not rustix: its Pid is never 0, but the kernel says 0 across process namespaces.
    let mut found = libc::ucred {
        pid: 0,
        uid: u32::MAX,
        gid: u32::MAX,
    };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `found`, which is that large and plain
    // data.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &mut length,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Peer {
        pid: found.pid,
        uid: found.uid,
        gid: found.gid,
    })
}

/// Whether the process at the other end is known to have ended. Its sockets may outlive it for a
/// while: the kernel tears down an io_uring that holds one late, and until then a client that
/// connects waits in a queue without a reader. False also if we cannot see the process.
pub fn peer_has_ended(socket: impl AsFd) -> bool {
    let Some(pid) = peer(socket).ok().and_then(|peer| Pid::from_raw(peer.pid)) else {
        return false;
    };
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(process) => {
            // Readable once it has ended, also before its parent waits for it.
            let mut fds = [PollFd::new(&process, PollFlags::IN)];
            poll(&mut fds, Some(&Timespec::default())).is_ok_and(|count| count > 0)
        }
        Err(error) => error == rustix::io::Errno::SRCH,
    }
}

/// Send one packet with descriptors, whole or not at all. WouldBlock: the peer's queue is full.
pub fn send(socket: impl AsFd, parts: &[&[u8]], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PACKET_FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut slices = [IoSlice::new(&[]); 4];
    let slices = slices
        .get_mut(..parts.len())
        .ok_or(io::ErrorKind::InvalidInput)?;
    for (slice, part) in slices.iter_mut().zip(parts) {
        *slice = IoSlice::new(part);
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::io::retry_on_intr(|| sendmsg(&socket, slices, &mut control, flags))?;
    Ok(())
}

/// The next packet, if one waits. A packet of zero bytes without descriptors is the end: the peer
/// has closed (seqpacket sockets cannot tell the two apart).
pub fn receive(socket: impl AsFd, buffer: &mut [u8]) -> io::Result<Option<Packet>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PACKET_FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC | RecvFlags::TRUNC;
    let received = rustix::io::retry_on_intr(|| {
        recvmsg(&socket, &mut [IoSliceMut::new(buffer)], &mut control, flags)
    });
    let received = match received {
        Ok(received) => received,
        Err(rustix::io::Errno::AGAIN) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    Ok(Some(Packet {
        bytes: received.bytes,
        fds,
        fds_cut: received.flags.contains(ReturnFlags::CTRUNC),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_arrive_close_on_exec_and_the_end_is_seen() {
        let (ours, theirs) = pair().unwrap();
        let null = std::fs::File::open("/dev/null").unwrap();
        send(&ours, &[b"ab", b"cd"], &[null.as_fd(), null.as_fd()]).unwrap();
        let mut buffer = [0; 16];
        let packet = receive(&theirs, &mut buffer).unwrap().unwrap();
        assert_eq!((packet.bytes, &buffer[..4]), (4, b"abcd".as_slice()));
        assert_eq!((packet.fds.len(), packet.fds_cut), (2, false));
        for fd in &packet.fds {
            assert!(
                rustix::io::fcntl_getfd(fd)
                    .unwrap()
                    .contains(rustix::io::FdFlags::CLOEXEC)
            );
        }
        assert!(receive(&theirs, &mut buffer).unwrap().is_none());
        drop(ours);
        assert_eq!(receive(&theirs, &mut buffer).unwrap().unwrap().bytes, 0);
        assert_eq!(
            send(&theirs, &[b"x"], &[]).unwrap_err().kind(),
            io::ErrorKind::BrokenPipe
        );
    }

    #[test]
    fn more_descriptors_than_we_take_are_said_and_closed() {
        let (ours, theirs) = pair().unwrap();
        let (pipe_out, pipe_in) = rustix::pipe::pipe().unwrap();
        {
            // Sent by hand: `send` has no room for so many.
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(12))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let fds = [pipe_in.as_fd(); 12];
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
            sendmsg(
                &ours,
                &[IoSlice::new(b"x")],
                &mut control,
                SendFlags::empty(),
            )
            .unwrap();
        }
        drop(pipe_in);
        let packet = receive(&theirs, &mut [0; 4]).unwrap().unwrap();
        assert!(packet.fds_cut);
        drop(packet);
        // All writing ends are closed: the pipe is at its end.
        assert_eq!(rustix::io::read(&pipe_out, &mut [0; 1]).unwrap(), 0);
    }

    #[test]
    fn peer_is_this_process() {
        let (ours, _theirs) = pair().unwrap();
        let found = peer(&ours).unwrap();
        assert_eq!(found.pid, std::process::id() as i32);
        assert_eq!(found.uid, rustix::process::getuid().as_raw());
    }
}
