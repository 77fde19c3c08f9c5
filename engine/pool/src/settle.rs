// SPDX-License-Identifier: Apache-2.0
//! Files whose first objects nobody has made durable yet.
//!
//! Who makes a file waits for no disk: its objects are made, and its record names them, without a flush of either. The record says so
//! ([`Layout::is_unsettled`]). It says so no longer before anything of the file is told to be durable, and some time later in any case.

use crate::error::{ObjectFault, PoolError};
use crate::member::Access;
use crate::pool::Pool;
use rushes_core::pool::check::part_of;
use rushes_core::pool::{Layout, MemberNumber, Object};
use rushes_core::units::ByteCount;
use rustix::fs::fsync;
use std::os::fd::BorrowedFd;

impl Pool {
    /// Its objects are durable, and its record says so. To make that durable is the caller's: he syncs the stub.
    ///
    /// Assumes  exclusive, as [`Pool::set_layout`]
    pub fn settle(&self, stub: BorrowedFd<'_>, layout: &mut Layout) -> Result<(), PoolError> {
        if !layout.is_unsettled() {
            return Ok(());
        }
        for object in layout.objects() {
            let fd = self.open_object(layout, object, Access::Read)?;
            let member = self.known(object.member)?;
            fsync(&fd)
                .map_err(|error| member.failed("make an object durable", "objects", error))?;
            member.sync_name(object.id)?;
        }
        self.settled(stub, layout)
    }

    /// The same, where [`Pool::sync_member`] has made them durable.
    ///
    /// Assumes  as [`Pool::settle`]; they were there before
    pub fn settled(&self, stub: BorrowedFd<'_>, layout: &mut Layout) -> Result<(), PoolError> {
        let mut next = layout.clone();
        next.set_unsettled(false);
        self.set_layout(stub, &next)?;
        *layout = next;
        Ok(())
    }

    /// All that was written to a member is durable.
    pub fn sync_member(&self, number: MemberNumber) -> Result<(), PoolError> {
        self.known(number)?.sync()
    }

    /// See whether a power cut has left the record of an unsettled file and not its objects. Then it has none from now on, and reads as zeroes: nobody
    /// had synced it. An object that lacks its mark gets that.
    ///
    /// Assumes  exclusive, as [`Pool::set_layout`]
    /// Returns  true: it had lost them
    /// Errors   an object cannot be opened for another reason, as of a member that is away; nothing is changed then
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

    /// It has no objects any more, and reads as zeroes.
    pub(crate) fn empty(&self, stub: BorrowedFd<'_>, layout: &mut Layout) -> Result<(), PoolError> {
        let mut next = layout.clone();
        let gone = next.cut(ByteCount(0));
        self.set_layout(stub, &next)?;
        fsync(stub).map_err(|error| PoolError::system("make a layout durable", "", error))?;
        for object in gone {
            self.forget(layout.file, object);
        }
        *layout = next;
        Ok(())
    }
}
