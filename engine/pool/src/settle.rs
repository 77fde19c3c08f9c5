// SPDX-License-Identifier: Apache-2.0
//! Unsettled files: their first objects are not durable yet.
//!
//! A program that makes a file waits for no disk: its objects are made, and its layout names them,
//! without a flush of either. The layout says so, by [`Layout::is_unsettled`]. It ceases to say so
//! before a door reports anything of the file as durable, and some time later in any case.

use crate::data::has_data;
use crate::error::{ObjectFault, PoolError};
use crate::member::Access;
use crate::pool::Pool;
use rushes_core::pool::check::part_of;
use rushes_core::pool::{Layout, Object};
use rustix::fs::{fstat, fsync};
use std::os::fd::{BorrowedFd, OwnedFd};

impl Pool {
    /// Make a file's objects durable, and say so in its layout. The caller makes that durable: it
    /// syncs the stub.
    ///
    /// Assumes  exclusive, as [`Pool::set_layout`]
    pub fn settle(&self, stub: BorrowedFd<'_>, layout: &mut Layout) -> Result<(), PoolError> {
        if !layout.is_unsettled() {
            return Ok(());
        }
        for object in layout.objects() {
            let Some(fd) = self.open_kept(layout, object)? else {
                continue;
            };
            let member = self.known(object.member)?;
            fsync(&fd)
                .map_err(|error| member.failed("make an object durable", "objects", error))?;
            member.sync_name(object.id)?;
        }
        self.say_settled(stub, layout)
    }

    /// The same, where [`Member::sync`](crate::Member::sync) has made them durable.
    ///
    /// Assumes  as [`Pool::settle`]; they were made before
    /// Errors   one of them is not there: then the file is unsettled still
    pub fn settled(&self, stub: BorrowedFd<'_>, layout: &mut Layout) -> Result<(), PoolError> {
        for object in layout.objects() {
            self.open_kept(layout, object)?;
        }
        self.say_settled(stub, layout)
    }

    /// Returns  None: it was given up with its member, and nothing of it waits for a disk
    fn open_kept(&self, layout: &Layout, object: Object) -> Result<Option<OwnedFd>, PoolError> {
        match self.open_object(layout, object, Access::Read) {
            Err(PoolError::Lost { .. }) => Ok(None),
            opened => opened.map(Some),
        }
    }

    fn say_settled(&self, stub: BorrowedFd<'_>, layout: &mut Layout) -> Result<(), PoolError> {
        let mut next = layout.clone();
        next.set_unsettled(false);
        self.set_layout(stub, &next)?;
        *layout = next;
        Ok(())
    }

    /// See whether a power cut has left the layout of an unsettled file and not its objects. Then
    /// it has none from now on, and reads as zeroes: no program had synced it. Objects that are
    /// there stay on their members if one ever got bytes. An object that lacks its mark gets it.
    ///
    /// Assumes  exclusive, as [`Pool::set_layout`]
    /// Returns  true: it had lost some
    /// Errors   an object does not open for another reason, as of a member that is away; nothing is
    ///          changed then
    pub fn look_for_unsettled(
        &self,
        stub: BorrowedFd<'_>,
        layout: &mut Layout,
    ) -> Result<bool, PoolError> {
        if !layout.is_unsettled() {
            return Ok(false);
        }
        let mut unmarked: Vec<Object> = Vec::new();
        let mut is_lost = false;
        for object in layout.objects() {
            match self.open_object(layout, object, Access::Read) {
                Ok(_) => {}
                Err(PoolError::Object {
                    fault: ObjectFault::Absent,
                    ..
                }) => is_lost = true,
                Err(PoolError::Object {
                    fault: ObjectFault::NoMark,
                    ..
                }) => unmarked.push(object),
                Err(error) => return Err(error),
            }
        }
        for object in unmarked {
            let part = part_of(layout, object);
            let member = self.known(object.member)?;
            member.write_mark(object.id, layout.file, part)?;
        }
        if is_lost {
            self.empty(stub, layout)?;
        }
        Ok(is_lost)
    }

    /// Take all objects from a file: it reads as zeroes. If one of them ever got bytes, none is
    /// deleted: the claim that no program synced the file may be outdated. No layout names them
    /// then, and fsck gives them a name; and the file gets a new number, so that they are never
    /// taken for its bytes.
    ///
    /// Returns  the objects that are left
    pub(crate) fn empty(
        &self,
        stub: BorrowedFd<'_>,
        layout: &mut Layout,
    ) -> Result<Vec<Object>, PoolError> {
        let mut there = Vec::new();
        let mut is_blank = true;
        for object in layout.objects() {
            match self.open_object(layout, object, Access::Read) {
                Ok(fd) => {
                    let failed = |error| PoolError::system("look at an object", "", error);
                    let block_count = fstat(&fd).map_err(failed)?.st_blocks;
                    // A daemon may still have to write the bytes of blocks that have none.
                    is_blank &= block_count == 0 && !has_data(&fd).map_err(failed)?;
                }
                Err(PoolError::Object {
                    fault: ObjectFault::Absent,
                    ..
                }) => continue,
                Err(_) => is_blank = false,
            }
            there.push(object);
        }
        let next = Layout::new(match is_blank {
            true => layout.file,
            false => self.new_file()?,
        });
        self.set_layout(stub, &next)?;
        fsync(stub).map_err(|error| PoolError::system("make a layout durable", "", error))?;
        if is_blank {
            for object in there.drain(..) {
                self.forget(layout.file, object);
            }
        }
        *layout = next;
        Ok(there)
    }
}
