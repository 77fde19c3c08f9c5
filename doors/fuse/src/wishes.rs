// SPDX-License-Identifier: Apache-2.0
//! Wishes of folders go over to what is made in them; a text that is no wish is refused.
//!
//! What comes of a wish is engine/pool's, when a file gets its first bytes. Links and renames leave it as it is.

use crate::answer::Answer;
use crate::attributes::by_descriptor;
use crate::door::Door;
use crate::nodes::locked;
use rushes_pool::{WISH_ATTRIBUTE, WISH_BYTES_MAX, Wish};
use rustix::fs::{XattrFlags, getxattr, setxattr};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::fd::AsFd;

impl Door {
    /// A file or folder that was just made in this folder wishes what that does. One attribute is asked for, and mostly there is none.
    pub(crate) fn inherit_wish(&self, folder: impl AsFd, made: impl AsFd) {
        let mut value = [0; WISH_BYTES_MAX];
        let length = match getxattr(by_descriptor(folder), WISH_ATTRIBUTE, &mut value[..]) {
            Ok(length) => length,
            Err(Errno::NODATA | Errno::OPNOTSUPP) => return,
            Err(error) => return tracing::warn!("the wish of a folder cannot be read: {error}"),
        };
        let made = by_descriptor(made);
        let none = XattrFlags::empty();
        if let Err(error) = setxattr(made, WISH_ATTRIBUTE, &value[..length], none) {
            // It is there, and works: its bytes go where the pool says.
            tracing::warn!("a file or folder does not get the wish of its folder: {error}");
        }
    }

    /// EINVAL for a value of that attribute that nobody could follow; the log says why.
    pub(crate) fn must_be_wish(&self, name: &OsStr, value: &[u8]) -> Answer<()> {
        if name != WISH_ATTRIBUTE {
            return Ok(());
        }
        let text = str::from_utf8(value).map_err(|_| String::from("it is no text"));
        let wish = text.and_then(|text| Wish::of(text).map_err(|fault| fault.to_string()));
        match wish {
            Ok(wish) => {
                if let Some(sentence) = self.pool.cannot_meet(&wish) {
                    self.say_once(format!("{WISH_ATTRIBUTE}: {sentence}"));
                }
                Ok(())
            }
            Err(fault) => {
                self.say_once(format!("{WISH_ATTRIBUTE} is refused: {fault}"));
                Err(Errno::INVAL)
            }
        }
    }

    /// Somebody may try it over and over.
    fn say_once(&self, sentence: String) {
        let mut last = locked(&self.wish_fault);
        if *last != sentence {
            tracing::warn!("{sentence}");
            *last = sentence;
        }
    }
}
