// SPDX-License-Identifier: Apache-2.0
//! The private smbd of a run ([`rushes_kit::smbd`]): in its control group, and with the `rushes`
//! that is measured in its PATH.

use crate::servers::cgroup::Cgroup;
use crate::servers::daemon::find_rushes;
use crate::stage::room::{Room, go_on};
use anyhow::Result;
use rushes_kit::smbd::{find_smbd, module_folder};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

pub use rushes_kit::smbd::{PASSWORD, SHARE, Smbd, USER};

/// The smbd to start.
#[derive(Clone, Debug, Default)]
pub struct Spec {
    /// Folder that the share shows.
    pub share_path: PathBuf,
    /// Further lines of `[global]`.
    pub global: Vec<(String, String)>,
    /// Further lines of the share.
    pub share: Vec<(String, String)>,
    /// A module that is not installed: path of its `.so`, loaded under its file name.
    pub module: Option<PathBuf>,
}

/// Start one in `room` under `name` and wait until it answers.
///
/// Errors   Samba is not installed, or did not answer within 20 s (its log is quoted)
pub fn start(room: &Room, name: &str, spec: &Spec, cgroup: &Cgroup) -> Result<Smbd> {
    let mut unshare = cgroup.command(Path::new("unshare"));
    if spec.module.is_some() {
        // For what the module starts: `rushes recover`.
        unshare.env("PATH", path_with_rushes()?);
    }
    let whole = rushes_kit::smbd::Spec {
        smbd: find_smbd()?,
        share_path: spec.share_path.clone(),
        home: room.path().to_owned(),
        global: lines(&spec.global),
        share: lines(&spec.share),
        module: spec.module.clone(),
        log_level: 0,
    };
    Smbd::start(&room.folder(name)?, &whole, unshare, &go_on)
}

fn lines(options: &[(String, String)]) -> Vec<String> {
    options
        .iter()
        .map(|(key, value)| format!("{key} = {value}"))
        .collect()
}

/// Version of the installed Samba, as smbd prints it.
pub fn version() -> Result<String> {
    rushes_kit::smbd::version(&find_smbd()?)
}

/// A module of the installed Samba, whether or not it is there.
pub fn installed_module(file_name: &str) -> Result<PathBuf> {
    Ok(module_folder(&find_smbd()?)?.join(file_name))
}

/// The folder of the `rushes` that is measured, then all others.
fn path_with_rushes() -> Result<OsString> {
    let binary = find_rushes()?;
    let own = binary.parent().map(Path::to_owned);
    let all = std::env::var_os("PATH").unwrap_or_default();
    Ok(std::env::join_paths(
        own.into_iter().chain(std::env::split_paths(&all)),
    )?)
}
