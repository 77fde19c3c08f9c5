// SPDX-License-Identifier: Apache-2.0
//! Requests for an export that are refused: one type for each group, with the facts that its
//! sentence names. A sentence has the finding, the expectation and the remedy, in this order.

use crate::error::ExportError;
use crate::iscsi::{Initiator, SIZE_STEP_BYTES};
use rushes_pool::PoolError;
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

/// A request for an export that is refused.
#[derive(Debug)]
pub enum Refusal {
    /// The pool refuses it, or cannot be looked at.
    Pool(PoolError),
    /// The path cannot be exported from a mount.
    Mount(MountRefusal),
    /// By NFS.
    Nfs(NfsRefusal),
    /// Of the settings of an iSCSI target.
    Target(TargetRefusal),
    /// Of the file of an iSCSI disk.
    Disk {
        /// Its path.
        file: PathBuf,
        /// The reason.
        fault: DiskFault,
    },
    /// On this machine.
    Machine(MachineRefusal),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Pool(error) => error.fmt(f),
            Refusal::Mount(refusal) => refusal.fmt(f),
            Refusal::Nfs(refusal) => refusal.fmt(f),
            Refusal::Target(refusal) => refusal.fmt(f),
            Refusal::Disk { file, fault } => write!(f, "{}: {fault}", file.display()),
            Refusal::Machine(refusal) => refusal.fmt(f),
        }
    }
}

macro_rules! from {
    ($($group:ident($refusal:ident)),+) => {$(
        impl From<$refusal> for ExportError {
            fn from(refusal: $refusal) -> ExportError {
                ExportError::Refused(Box::new(Refusal::$group(refusal)))
            }
        }
    )+};
}

from!(
    Pool(PoolError),
    Mount(MountRefusal),
    Nfs(NfsRefusal),
    Target(TargetRefusal),
    Machine(MachineRefusal)
);

/// Why a path cannot be exported from a mount.
#[derive(Debug)]
pub enum MountRefusal {
    /// No mount of a pool has it.
    InNoPool(PathBuf),
    /// It led through folders alone when the export began.
    ThroughLink(PathBuf),
    /// It is on another file system than the mount.
    NotInMount {
        /// The path.
        path: PathBuf,
        /// The folder of the mount.
        folder: PathBuf,
    },
}

impl fmt::Display for MountRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MountRefusal::InNoPool(path) => write!(
                f,
                "{} is in no pool that is mounted here; expected the folder of `rushes pool \
                 mount`, or something in it",
                path.display()
            ),
            MountRefusal::ThroughLink(path) => write!(
                f,
                "{}: a part of this path is a symbolic link now; expected the folders with which \
                 the export began",
                path.display()
            ),
            MountRefusal::NotInMount { path, folder } => write!(
                f,
                "{} is not in the mount on {} any more",
                path.display(),
                folder.display()
            ),
        }
    }
}

/// Why NFS cannot serve a folder so.
#[derive(Debug)]
pub enum NfsRefusal {
    /// Not a folder.
    NotFolder(PathBuf),
    /// Handles of files would not outlast the mount on this folder.
    HandlesEnd(PathBuf),
    /// The name for clients.
    Name(String),
    /// No client is named.
    NoClient,
    /// Not a client.
    Client(String),
    /// A path or a name, which Ganesha's configuration cannot have.
    NotQuotable(PathBuf),
}

impl fmt::Display for NfsRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NfsRefusal::NotFolder(path) => {
                write!(f, "{} is not a folder; NFS exports folders", path.display())
            }
            NfsRefusal::HandlesEnd(folder) => write!(
                f,
                "the catalogue of {} is not on ext4: clients would lose their files (\"stale file \
                 handle\") whenever the mount is started again; put the catalogue of a pool for \
                 NFS on ext4",
                folder.display()
            ),
            NfsRefusal::Name(name) => write!(
                f,
                "{name:?} is not a name that clients can mount; expected one like /media"
            ),
            NfsRefusal::NoClient => f.write_str(
                "no client is named; give --client with an address, a network such as \
                 192.168.7.0/24, or a host's name",
            ),
            NfsRefusal::Client(client) => write!(
                f,
                "{client:?} is not a client; expected an address, a network such as \
                 192.168.7.0/24, or a host's name"
            ),
            NfsRefusal::NotQuotable(path) => write!(
                f,
                "{} cannot stand in Ganesha's configuration; expected a path in UTF-8 without \
                 quotes, backslashes and line ends",
                path.display()
            ),
        }
    }
}

/// Why an iSCSI target cannot be set so.
#[derive(Debug)]
pub enum TargetRefusal {
    /// No client is named.
    NoClient,
    /// Clients are named by address and by name.
    BothKinds,
    /// The name of the target.
    Name(String),
    /// Not an initiator.
    Initiator(Initiator),
    /// The path of tgtd's socket in this folder would be too long.
    LongFolder(PathBuf),
}

impl fmt::Display for TargetRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TargetRefusal::NoClient => f.write_str(
                "no client is named; give --client with an address or network, or --initiator with \
                 a name (iqn.…). There are no passwords: a named client has the whole disk, and \
                 with --client 127.0.0.1 every user of this machine has it",
            ),
            TargetRefusal::BothKinds => f.write_str(
                "--client and --initiator were given together, and tgt lets in a client that \
                 matches either; expected addresses or initiators, not both",
            ),
            TargetRefusal::Name(name) => write!(
                f,
                "{name:?} is not a target's name; expected one like iqn.2026-01.com.example:media"
            ),
            TargetRefusal::Initiator(initiator) => write!(
                f,
                "{initiator:?} is not an initiator; expected an address, a network such as \
                 192.168.7.0/24, ALL, or a name (iqn.…)"
            ),
            TargetRefusal::LongFolder(folder) => write!(
                f,
                "{} is too long for a socket; give a shorter folder with --runtime-dir",
                folder.display()
            ),
        }
    }
}

/// Why a file cannot be an iSCSI disk. Units: bytes.
#[derive(Debug)]
pub enum DiskFault {
    /// Its length is no disk's, or it is something else than a file.
    NotSectors,
    /// It has another size than the one asked for.
    OtherSize {
        /// Its own.
        found: u64,
        /// The one asked for.
        wanted: u64,
    },
    /// There is none, and no size is given.
    Absent,
    /// A size that no disk has.
    Size(u64),
    /// The pool has no room for it.
    NoRoom {
        /// The size asked for.
        size: u64,
        /// Free bytes, if that was asked before the file was made.
        free: Option<u64>,
    },
    /// Another process has made it in the meantime.
    MadeMeanwhile,
    /// Another process makes it.
    BeingMade,
    /// Its path is not in UTF-8.
    NotUtf8,
    /// Not a file.
    NotFile,
}

impl fmt::Display for DiskFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DiskFault::NotSectors => {
                f.write_str("expected a file of whole sectors of 512 bytes, or none")
            }
            DiskFault::OtherSize { found, wanted } => write!(
                f,
                "the file exists and has {found} bytes, not {wanted}; leave --size out to serve \
                 it as it is"
            ),
            DiskFault::Absent => f.write_str("the file does not exist; create it with --size"),
            DiskFault::Size(size) => write!(
                f,
                "a disk of {size} bytes was asked for; expected a multiple of {SIZE_STEP_BYTES}"
            ),
            DiskFault::NoRoom { size, free } => {
                write!(f, "no room for a disk of {size} bytes")?;
                if let Some(free) = free {
                    write!(f, ", {free} are free")?;
                }
                f.write_str(
                    "; with --sparse it takes room only as it is written, and a full pool then \
                     gives disk errors",
                )
            }
            DiskFault::MadeMeanwhile => {
                f.write_str("another process has created it meanwhile: repeat this")
            }
            DiskFault::BeingMade => f.write_str(
                "another process is creating this disk now; repeat this when it is done",
            ),
            DiskFault::NotUtf8 => f.write_str("expected a path in UTF-8"),
            DiskFault::NotFile => f.write_str("expected a file"),
        }
    }
}

/// Why this machine cannot run an export.
#[derive(Debug)]
pub enum MachineRefusal {
    /// A program that is not installed.
    NoProgram {
        /// Its name.
        name: String,
        /// The package that has it.
        package: String,
    },
    /// A folder that another export has.
    FolderInUse {
        /// The folder.
        folder: PathBuf,
        /// The option that names another one.
        option: &'static str,
    },
    /// A file that another program has locked, perhaps as a disk.
    DiskInUse(PathBuf),
    /// A port on which another program listens.
    PortInUse {
        /// The address.
        ip: IpAddr,
        /// The port.
        port: u16,
    },
    /// The address of another machine.
    OtherAddress(IpAddr),
}

impl fmt::Display for MachineRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MachineRefusal::NoProgram { name, package } => write!(
                f,
                "the program {name} was not found; on Debian install it with `apt-get install \
                 {package}`"
            ),
            MachineRefusal::FolderInUse { folder, option } => write!(
                f,
                "{} is in use by another export that runs; end that one, or give another folder \
                 with {option}",
                folder.display()
            ),
            MachineRefusal::DiskInUse(file) => write!(
                f,
                "{0} is served already as an iSCSI disk, or another program has locked it \
                 (flock); expected no other user: `lslocks` shows the process that has {0}",
                file.display()
            ),
            MachineRefusal::PortInUse { ip, port } => write!(
                f,
                "another program listens on port {port} of {ip}; expected a free one: `ss -ltnp` \
                 says which program it is, --port takes another port"
            ),
            MachineRefusal::OtherAddress(ip) => write!(
                f,
                "{ip} is not an address of this machine; expected one that `ip address` shows, \
                 for --listen"
            ),
        }
    }
}
