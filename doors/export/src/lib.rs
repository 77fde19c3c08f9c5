// SPDX-License-Identifier: Apache-2.0
//! NFS and iSCSI from the mount of a pool, by the distribution's own servers: NFS-Ganesha and tgt.
//!
//! This crate has their configuration, and a keeper that starts and stops them with the mount. It
//! has no protocol and no bytes: the servers have those, and read and write the mount as any
//! program does. docs/decisions/0024.

mod error;
mod iscsi;
mod keep;
mod mount;
mod nfs;
mod program;
mod refusal;

pub use error::ExportError;
pub use iscsi::{DiskExport, Initiator};
pub use keep::{Server, Told, keep};
pub use mount::Mount;
pub use nfs::{NfsExport, NfsServer, Squash};
pub use refusal::{DiskFault, MachineRefusal, MountRefusal, NfsRefusal, Refusal, TargetRefusal};
