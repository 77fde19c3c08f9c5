// SPDX-License-Identifier: Apache-2.0
//! Files and folders inherit the policy of the folder in which they are made, and files also get
//! that of the pool's placement rules for their name; a text that is no policy is refused.
//!
//! engine/pool applies a policy when a file gets its first bytes. Links and renames leave it as it
//! is.

use crate::door::Door;
use crate::kernel::answer::Answer;
use crate::lock::locked;
use crate::tree::attributes::by_descriptor;
use rushes_pool::{WISH_ATTRIBUTE, WISH_BYTES_MAX, Wish};
use rustix::fs::{XattrFlags, getxattr, readlink, setxattr};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

impl Door {
    /// Gives a new folder the policy of the folder in which it was made.
    pub(crate) fn inherit_wish(&self, folder: impl AsFd, made: impl AsFd) {
        if let Some(wish) = self.wish_of(folder) {
            self.give(&wish, made);
        }
    }

    /// The folder's own policy, as it stands there. None if it cannot be read; the log then says
    /// so.
    fn wish_of(&self, folder: impl AsFd) -> Option<Vec<u8>> {
        let found = read_wish(folder, &**self.nodes.tree());
        found.unwrap_or_else(|sentence| {
            tracing::warn!("{sentence}");
            None
        })
    }

    /// Without its policy the file exists and works: its bytes go where the pool's policy says.
    fn give(&self, wish: &[u8], made: impl AsFd) {
        if let Err(sentence) = write_wish(wish, made, &**self.nodes.tree()) {
            tracing::warn!("{sentence}");
        }
    }

    /// The same for a file of this name; a placement rule may add to its folder's policy. This
    /// reads one attribute, and mostly there is none.
    ///
    /// From then on the policy is the file's own, whatever happens to name and rule. A folder that
    /// is renamed at this moment counts under either name.
    pub(crate) fn wish_by_name(&self, folder: impl AsFd, name: &OsStr, made: impl AsFd) {
        let path = || {
            let path = self.path_in_tree(&folder, name);
            if path.is_none() {
                self.say_once(String::from(
                    "a file was created whose path is longer than 4096 bytes; no placement rule \
                     matches such files, so the policy of their folder or of the pool counts",
                ));
            }
            path
        };
        let rule = self.pool.rule_for(path);
        let own = self.wish_of(&folder);
        let wish = match (own, rule) {
            (None, None) => return,
            (Some(own), None) => own,
            (own, Some(rule)) => {
                // A program may have written an invalid policy there past the door; then it does
                // not count.
                let text = own.and_then(|own| String::from_utf8(own).ok());
                let own = text.and_then(|text| Wish::of(&text).ok());
                let wish = own.unwrap_or_default().or(&rule);
                wish.to_string().into_bytes()
            }
        };
        self.give(&wish, made);
    }

    /// The path below the root of the tree.
    fn path_in_tree(&self, folder: impl AsFd, name: &OsStr) -> Option<PathBuf> {
        Some(path_below(folder, &**self.nodes.tree())?.join(name))
    }

    /// EINVAL for an invalid value of that attribute; the log says why. It also says if the pool
    /// cannot meet a valid one.
    pub(crate) fn check_wish(&self, name: &OsStr, value: &[u8]) -> Answer<()> {
        if name != WISH_ATTRIBUTE {
            return Ok(());
        }
        let text = str::from_utf8(value).map_err(|_| String::from("it is not text in UTF-8"));
        let wish = text.and_then(|text| Wish::of(text).map_err(|fault| fault.to_string()));
        match wish {
            Ok(wish) => {
                if let Some(lacked) = self.pool.cannot_meet(&wish) {
                    self.say_once(format!("{WISH_ATTRIBUTE}: {lacked}"));
                }
                Ok(())
            }
            Err(fault) => {
                self.say_once(format!("{WISH_ATTRIBUTE} is refused: {fault}"));
                Err(Errno::INVAL)
            }
        }
    }

    /// Logs a sentence once, since a program may try again and again.
    pub(crate) fn say_once(&self, sentence: String) {
        let mut last = locked(&self.wish_fault);
        if *last != sentence {
            tracing::warn!("{sentence}");
            *last = sentence;
        }
    }
}

/// Errors   a sentence for the log
fn read_wish(folder: impl AsFd, tree: impl AsFd) -> Result<Option<Vec<u8>>, String> {
    let mut value = [0; WISH_BYTES_MAX];
    match getxattr(by_descriptor(&folder), WISH_ATTRIBUTE, &mut value[..]) {
        Ok(length) => Ok(Some(value[..length].to_vec())),
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
        Err(error) => {
            let name = name_in(folder, tree);
            Err(format!("{name}: cannot read the folder's policy: {error}"))
        }
    }
}

/// Errors   a sentence for the log
fn write_wish(wish: &[u8], made: impl AsFd, tree: impl AsFd) -> Result<(), String> {
    let given = setxattr(
        by_descriptor(&made),
        WISH_ATTRIBUTE,
        wish,
        XattrFlags::empty(),
    );
    given.map_err(|error| format!("{}: cannot set its policy: {error}", name_in(made, tree)))
}

/// The name of a file or folder in the log, in quotes, since a name may have any byte in it.
fn name_in(open: impl AsFd, tree: impl AsFd) -> String {
    match path_below(open, tree) {
        Some(path) if path == Path::new("") => String::from("the pool's root"),
        Some(path) => format!("{path:?}"),
        None => String::from("a file or folder without a name"),
    }
}

/// The path below an open folder. The kernel knows the path of each open file and folder; also of
/// the tree's root, wherever the catalogue is now.
fn path_below(open: impl AsFd, tree: impl AsFd) -> Option<PathBuf> {
    let path = path_of(open)?;
    path.strip_prefix(path_of(tree)?)
        .map(Path::to_path_buf)
        .ok()
}

fn path_of(open: impl AsFd) -> Option<PathBuf> {
    let own = format!("/proc/self/fd/{}", open.as_fd().as_raw_fd());
    let path = readlink(own, Vec::new()).ok()?;
    Some(PathBuf::from(OsString::from_vec(path.into_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};

    #[test]
    fn policy_that_cannot_be_read_or_set_is_told_with_its_file() {
        let root = std::env::temp_dir().join(format!("rushes-wish-{}", std::process::id()));
        let reel = root.join("day 1/reel");
        fs::create_dir_all(&reel).unwrap();
        let (tree, folder) = (File::open(&root).unwrap(), File::open(&reel).unwrap());
        assert_eq!(read_wish(&folder, &tree), Ok(None));
        // The kernel takes no attribute as long as that.
        let told = write_wish(&vec![b'x'; 1 << 17], &folder, &tree).unwrap_err();
        assert!(told.starts_with("\"day 1/reel\": cannot set"), "{told}");
        // A program may write one past the door that is longer than any policy.
        let long = vec![b'x'; WISH_BYTES_MAX + 1];
        if write_wish(&long, &folder, &tree).is_ok() {
            let told = read_wish(&folder, &tree).unwrap_err();
            assert!(told.starts_with("\"day 1/reel\": cannot read"), "{told}");
        }
        assert_eq!(name_in(&tree, &tree), "the pool's root");
        assert_eq!(name_in(&tree, &folder), "a file or folder without a name");
        fs::remove_dir_all(&root).unwrap();
    }
}
