// SPDX-License-Identifier: Apache-2.0
//! The private smbd of a test ([`rushes_kit::smbd`]): in its scratch folder, with our module.

use crate::needs;
use crate::scratch::Scratch;
use rushes_kit::smbd::Spec;
use std::path::{Path, PathBuf};
use std::process::Command;

pub use rushes_kit::smbd::{PASSWORD, SHARE, Smbd, USER};

/// The share to be served.
#[derive(Clone, Debug)]
pub struct SmbdSpec {
    /// Folder of the share.
    pub path: PathBuf,
    /// Further lines of the share, `key = value`.
    pub share: Vec<String>,
    /// Further lines of `[global]`.
    pub global: Vec<String>,
}

/// Start it and wait until it answers.
///
/// Panics   when it does not
pub fn start(scratch: &Scratch, spec: &SmbdSpec) -> Smbd {
    start_with(scratch, spec, needs::module().as_deref())
}

/// The same with another build of our module.
pub fn start_with(scratch: &Scratch, spec: &SmbdSpec, module: Option<&Path>) -> Smbd {
    let folder = scratch.folder("smbd");
    let whole = Spec {
        smbd: needs::path_of("smbd"),
        share_path: spec.path.clone(),
        home: scratch.path().to_owned(),
        global: spec.global.clone(),
        share: spec.share.clone(),
        module: module.map(Path::to_owned),
        log_level: 1,
    };
    let mut unshare = Command::new("unshare");
    // By it a later run finds what a killed one left.
    unshare.current_dir(&folder);
    Smbd::start(&folder, &whole, unshare, &|| Ok(())).unwrap_or_else(|error| panic!("{error:#}"))
}
