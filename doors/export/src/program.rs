// SPDX-License-Identifier: Apache-2.0
//! Programs of the distribution: their paths, and a start so that none outlives this process.

use crate::error::ExportError;
use crate::refusal::MachineRefusal;
use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use rustix::io::Errno;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The path of a program.
///
/// Errors   Refused, naming the package that has it
pub(crate) fn find(name: &str, package: &str) -> Result<PathBuf, ExportError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/usr/bin", "/sbin"].map(PathBuf::from))
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
        .ok_or_else(|| {
            let (name, package) = (name.to_owned(), package.to_owned());
            MachineRefusal::NoProgram { name, package }.into()
        })
}

/// A command that gets `signal` when this process dies in any way: after that nothing would stop it
/// with its mount.
///
/// The kernel sends it when the thread that started it ends, so that must be the thread that waits.
pub(crate) fn bound(program: &Path, signal: &str) -> Result<Command, ExportError> {
    let mut command = Command::new(find("setpriv", "util-linux")?);
    command.args(["--pdeathsig", signal, "--"]).arg(program);
    Ok(command)
}

/// A folder for root alone; all users may pass through those above it, as with the daemon's own.
pub(crate) fn folder(path: &Path) -> Result<(), ExportError> {
    let above = path.parent().map_or(Ok(()), std::fs::create_dir_all);
    above
        .and_then(
            |()| match std::fs::DirBuilder::new().mode(0o700).create(path) {
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
                made => made,
            },
        )
        .map_err(|error| ExportError::at("make the folder", path, error))
}

/// The same, for one export alone as long as the descriptor is open: two would overwrite each
/// other's configuration and lists of clients.
///
/// Errors   Refused if another export has it; `option` names another one
pub(crate) fn own_folder(path: &Path, option: &'static str) -> Result<OwnedFd, ExportError> {
    folder(path)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = open(path, flags, Mode::empty())
        .map_err(|error| ExportError::at("open the folder", path, error))?;
    match flock(&fd, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(fd),
        Err(Errno::WOULDBLOCK) => {
            let folder = path.to_path_buf();
            Err(MachineRefusal::FolderInUse { folder, option }.into())
        }
        Err(error) => Err(ExportError::at("lock the folder", path, error)),
    }
}

/// Writes a file for root alone with this text, whole or not at all.
pub(crate) fn write(path: &Path, text: &str) -> Result<(), ExportError> {
    let failed = |error: std::io::Error| ExportError::at("write", path, error);
    let new = path.with_extension("new");
    let flags =
        OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = open(&new, flags, Mode::RUSR | Mode::WUSR).map_err(|error| failed(error.into()))?;
    std::fs::File::from(fd)
        .write_all(text.as_bytes())
        .and_then(|()| std::fs::rename(&new, path))
        .map_err(failed)
}

/// A word of a shell command that a person may copy.
pub(crate) fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-:=,@[]".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn words_are_quoted_where_a_shell_needs_it() {
        assert_eq!(quoted("portal=[::1]:3260"), "portal=[::1]:3260");
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("it's"), "'it'\\''s'");
    }
}
