// SPDX-License-Identifier: Apache-2.0
//! NFS and iSCSI from the mount of a pool, by the distribution's own servers: NFS-Ganesha and tgt.
//!
//! Here is what they are told, and a keeper that starts them and stops them with the mount. No
//! protocol and no bytes: those are the servers', which read and write the mount as any program
//! does. docs/decisions/0024.

mod error;
mod iscsi;
mod keep;
mod mount;
mod nfs;
mod program;

pub use error::ExportError;
pub use iscsi::{DiskExport, Initiator};
pub use keep::{Server, Told, keep};
pub use mount::Mount;
pub use nfs::{NfsExport, NfsServer, Squash};
