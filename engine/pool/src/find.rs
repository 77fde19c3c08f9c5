// SPDX-License-Identifier: Apache-2.0
//! From a path that a user types to the catalogue it belongs to: through the mount of a pool, or
//! below a catalogue itself.
//!
//! A door's mount is of the type [`MOUNT_TYPE`] and names its catalogue as its source; the search
//! asks only the kernel's table of mounts, so a hung door delays it no longer than the path's own
//! look-up takes.

use crate::catalogue::TREE;
use crate::error::PoolError;
use crate::format::{self, FORMAT_FILE, Format};
use crate::refusal::{CatalogueRefusal, refused};
use rushes_sys::file::FdInfo;
use rustix::fs::{Mode, OFlags, open};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// Type of a pool's mount in the kernel's table.
pub const MOUNT_TYPE: &str = "fuse.rushes";

/// Where a path leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The catalogue of its pool.
    pub catalogue: PathBuf,
    /// Below the tree; empty for its root, or where the path is the catalogue itself.
    pub below: PathBuf,
}

/// A pool that is mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mounted {
    /// Its catalogue.
    pub catalogue: PathBuf,
    /// Where.
    pub mount: PathBuf,
}

/// The pool that this path is in: a mount of it, a path below that, its catalogue, or a path in its
/// tree.
pub fn find(path: &Path) -> Result<Place, PoolError> {
    let path = match path.canonicalize() {
        Ok(path) => path,
        Err(error) => {
            let path = path.to_path_buf();
            return refused(CatalogueRefusal::Unreached { path, error });
        }
    };
    let mut shut = None;
    let fd = open(&path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        .map_err(|error| PoolError::system("open", path.display().to_string(), error))?;
    let mount = FdInfo::of(&fd)
        .map_err(|error| PoolError::system("look at", path.display().to_string(), error))?
        .mount;
    let table = mount_table()?;
    if let Some(row) = rows(&table).find(|row| row.id == mount.0)
        && row.is_pool()?
    {
        let (Ok(below_mount), Ok(below_root)) =
            (path.strip_prefix(&row.mount), row.root.strip_prefix("/"))
        else {
            return refused(CatalogueRefusal::OutsideMount {
                path,
                mount: row.mount,
            });
        };
        let below = below_root.join(below_mount);
        // A mount of a single file has nothing below it, and join would add a slash.
        let below = below.components().collect();
        return Ok(Place {
            catalogue: row.source,
            below,
        });
    }
    for folder in path.ancestors() {
        match is_file(&folder.join(FORMAT_FILE)) {
            Ok(true) if folder.join(TREE).is_dir() => {}
            // Without the right to look there, this cannot say that nothing is.
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                shut = Some(folder);
                continue;
            }
            Ok(true) => {
                if let Some(refusal) = of_member(&path, folder) {
                    return refused(refusal);
                }
                continue;
            }
            _ => continue,
        }
        let inside = path.strip_prefix(folder).unwrap_or(Path::new(""));
        if let Ok(below) = inside.strip_prefix(TREE) {
            return Ok(Place {
                catalogue: folder.to_path_buf(),
                below: below.to_path_buf(),
            });
        }
        if inside == Path::new("") {
            return Ok(Place {
                catalogue: folder.to_path_buf(),
                below: PathBuf::new(),
            });
        }
    }
    if let Some(shut) = shut {
        return refused(CatalogueRefusal::Shut {
            folder: shut.to_path_buf(),
            path: path.clone(),
        });
    }
    refused(CatalogueRefusal::InNoPool { path })
}

fn is_file(path: &Path) -> io::Result<bool> {
    match path.metadata() {
        Ok(found) => Ok(found.is_file()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// A path in a member's folder is in no catalogue. None: the folder is no member's.
fn of_member(path: &Path, folder: &Path) -> Option<CatalogueRefusal> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = open(folder, flags, Mode::empty()).ok()?;
    let Ok(Some(Format::Member(of))) = format::read(fd.as_fd(), FORMAT_FILE) else {
        return None;
    };
    let is_its = |one: &Mounted| {
        let root = open(&one.catalogue, flags, Mode::empty()).ok();
        let format = root.and_then(|root| format::read(root.as_fd(), FORMAT_FILE).ok().flatten());
        matches!(format, Some(Format::Catalogue(format)) if format.pool == of.pool)
    };
    Some(CatalogueRefusal::InMember {
        path: path.to_path_buf(),
        folder: folder.to_path_buf(),
        number: of.number,
        pool: of.pool,
        mounted: mounted().unwrap_or_default().into_iter().find(is_its),
    })
}

/// All pools that are mounted here.
pub fn mounted() -> Result<Vec<Mounted>, PoolError> {
    let table = mount_table()?;
    let mut found = Vec::new();
    for row in rows(&table) {
        if row.is_pool()? {
            found.push(Mounted {
                catalogue: row.source,
                mount: row.mount,
            });
        }
    }
    Ok(found)
}

/// Where a pool with a catalogue of this name is mounted, by the kernel's table alone: asks no file
/// system, which may hang.
pub fn mounts_of(catalogue: &Path) -> Result<Vec<PathBuf>, PoolError> {
    let table = mount_table()?;
    Ok(rows(&table)
        .filter(|row| row.kind == MOUNT_TYPE && row.source == catalogue)
        .map(|row| row.mount)
        .collect())
}

/// Processes that keep a pool mounted after it was unmounted here, one of each other mount
/// namespace that has the pool: its number and name.
///
/// A container, or a service with a mount namespace of its own, gets a copy of each mount when it
/// starts. If that copy is private, an unmount here does not reach it, and the process that serves
/// the mount goes on. Leaves out processes that it may not read.
fn mounted_elsewhere(catalogue: &Path) -> Vec<(u32, String)> {
    let namespace_of = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/mnt")).ok();
    let mut seen: BTreeSet<PathBuf> = namespace_of("self").into_iter().collect();
    let Ok(processes) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for entry in processes.flatten() {
        let number = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok());
        let Some(number) = number else { continue };
        let number: u32 = number;
        let is_new = namespace_of(&number.to_string()).is_some_and(|name| seen.insert(name));
        let folder = entry.path();
        let table = is_new.then(|| std::fs::read(folder.join("mountinfo")).unwrap_or_default());
        let has_it = |row: Row| row.kind == MOUNT_TYPE && row.source == catalogue;
        if rows(&table.unwrap_or_default()).any(has_it) {
            let name = std::fs::read_to_string(folder.join("comm")).unwrap_or_default();
            found.push((number, name.trim().to_owned()));
        }
    }
    found
}

/// The processes that keep a pool mounted elsewhere, as a clause for messages. None: nothing does.
pub fn kept_elsewhere(catalogue: &Path) -> Option<String> {
    let all = mounted_elsewhere(catalogue);
    let named: Vec<String> = all
        .iter()
        .take(NAMED_MAX)
        .map(|(number, name)| format!("process {number}, {name}"))
        .collect();
    let more = if all.len() > NAMED_MAX { ", …" } else { "" };
    (!all.is_empty()).then(|| {
        format!(
            "another mount namespace still has it mounted ({}{more}): end that container or service, or unmount the pool in it \
             (`nsenter --target PROCESS --mount umount FOLDER`)",
            named.join("; ")
        )
    })
}

/// The catalogue of the pool that is mounted on this folder, by the kernel's table alone.
pub(crate) fn mounted_on(folder: &Path) -> Option<PathBuf> {
    let table = mount_table().ok()?;
    let mut rows = rows(&table);
    rows.find(|row| row.kind == MOUNT_TYPE && row.mount == folder)
        .map(|row| row.source)
}

/// Where anything is mounted inside of a folder; not on the folder itself.
pub(crate) fn mounts_below(folder: &Path) -> Result<Vec<PathBuf>, PoolError> {
    let table = mount_table()?;
    Ok(rows(&table)
        .map(|row| row.mount)
        .filter(|mount| mount != folder && mount.starts_with(folder))
        .collect())
}

/// Processes that a message names.
const NAMED_MAX: usize = 3;

const MOUNT_TABLE: &str = "/proc/self/mountinfo";

fn mount_table() -> Result<Vec<u8>, PoolError> {
    std::fs::read(MOUNT_TABLE).map_err(|error| PoolError::system("read", MOUNT_TABLE, error))
}

/// A line of it.
struct Row {
    id: u64,
    root: PathBuf,
    mount: PathBuf,
    kind: String,
    source: PathBuf,
}

impl Row {
    /// A mount of ours. The type alone does not tell: other programs may use it.
    ///
    /// Errors   [`PoolError::Refused`]: the caller may not look into the catalogue
    fn is_pool(&self) -> Result<bool, PoolError> {
        if self.kind != MOUNT_TYPE {
            return Ok(false);
        }
        match is_file(&self.source.join(FORMAT_FILE)) {
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                refused(CatalogueRefusal::ShutMount {
                    catalogue: self.source.clone(),
                    mount: self.mount.clone(),
                })
            }
            found => Ok(found.unwrap_or(false) && self.source.join(TREE).is_dir()),
        }
    }
}

/// `id parent maj:min root mountpoint options… - type source superoptions` (proc(5)); a path need
/// not be text.
fn rows(table: &[u8]) -> impl Iterator<Item = Row> {
    table.split(|&byte| byte == b'\n').filter_map(|line| {
        let words: Vec<&[u8]> = line.split(|&byte| byte == b' ').collect();
        let dash = words.iter().position(|word| word == b"-")?;
        Some(Row {
            id: std::str::from_utf8(words.first()?).ok()?.parse().ok()?,
            root: path_of(words.get(3)?),
            mount: path_of(words.get(4)?),
            kind: String::from_utf8_lossy(words.get(dash + 1)?).into_owned(),
            source: path_of(words.get(dash + 2)?),
        })
    })
}

/// The kernel writes blank, tab, newline and backslash as `\` and three octal digits.
fn path_of(word: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((&byte, after)) = rest.split_first() {
        let digits = after.first_chunk::<3>().filter(|_| byte == b'\\');
        let code = digits
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(code) => {
                bytes.push(code);
                rest = &after[3..];
            }
            None => {
                bytes.push(byte);
                rest = after;
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStrExt;

    #[test]
    fn rows_of_the_table_with_blanks_and_bytes_that_are_no_text_read_back() {
        let table = b"36 35 0:31 /sub\\040folder /mnt/a\\134b rw shared:1 - fuse.rushes /srv/\xff\\012c rw,user_id=0\n\
            37 35 8:1 / / rw - ext4 /dev/sda1 rw\n";
        let found: Vec<Row> = rows(table).collect();
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].id, 36);
        assert_eq!(found[0].root, Path::new("/sub folder"));
        assert_eq!(found[0].mount, Path::new("/mnt/a\\b"));
        assert_eq!(found[0].kind, MOUNT_TYPE);
        assert_eq!(found[0].source.as_os_str().as_bytes(), b"/srv/\xff\nc");
        assert_eq!(found[1].kind, "ext4");
    }
}
