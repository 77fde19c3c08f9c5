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
use std::path::PathBuf;

impl Door {
    /// Gives a new folder the policy of the folder in which it was made.
    pub(crate) fn inherit_wish(&self, folder: impl AsFd, made: impl AsFd) {
        if let Some(wish) = wish_of(folder) {
            give(&wish, made);
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
        let own = wish_of(&folder);
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
        give(&wish, made);
    }

    /// The path below the root of the tree. The kernel knows the path of each open folder; also of
    /// the tree's root, wherever the catalogue is now.
    fn path_in_tree(&self, folder: impl AsFd, name: &OsStr) -> Option<PathBuf> {
        let folder = path_of(folder)?;
        let tree = path_of(&**self.nodes.tree())?;
        Some(folder.strip_prefix(tree).ok()?.join(name))
    }

    /// EINVAL for an invalid value of that attribute; the log says why. It also says if the pool
    /// cannot meet a valid one.
    pub(crate) fn must_be_wish(&self, name: &OsStr, value: &[u8]) -> Answer<()> {
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

/// The folder's own policy, as it stands there.
fn wish_of(folder: impl AsFd) -> Option<Vec<u8>> {
    let mut value = [0; WISH_BYTES_MAX];
    match getxattr(by_descriptor(folder), WISH_ATTRIBUTE, &mut value[..]) {
        Ok(length) => Some(value[..length].to_vec()),
        Err(Errno::NODATA | Errno::OPNOTSUPP) => None,
        Err(error) => {
            tracing::warn!("cannot read the policy of a folder: {error}");
            None
        }
    }
}

fn give(wish: &[u8], made: impl AsFd) {
    let made = by_descriptor(made);
    if let Err(error) = setxattr(made, WISH_ATTRIBUTE, wish, XattrFlags::empty()) {
        // The file exists and works: its bytes go where the pool's policy says.
        tracing::warn!("cannot set the policy of a file or folder: {error}");
    }
}

fn path_of(folder: impl AsFd) -> Option<PathBuf> {
    let own = format!("/proc/self/fd/{}", folder.as_fd().as_raw_fd());
    let path = readlink(own, Vec::new()).ok()?;
    Some(PathBuf::from(OsString::from_vec(path.into_bytes())))
}
