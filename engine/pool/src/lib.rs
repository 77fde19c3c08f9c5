// SPDX-License-Identifier: Apache-2.0
//! A pool: one directory tree over many file systems.
//!
//! The **catalogue** is a folder on one file system; below its `tree/` is the real directory tree
//! with owners, modes, times and attributes. A regular file there is a **stub**: its size is the
//! file's, it has no bytes, and its layout, an attribute that only root sees, names the **objects**
//! on the **members** that have them. Formats and order of durable steps: docs/decisions/0021.
//!
//! This crate keeps no lock for single files and no cache: a door that calls it for a file holds
//! that file's lock. Each function says how "exclusive" is meant there. The caller is root, with
//! file-system uid 0, also while the door acts for another user.

mod balance;
mod catalogue;
mod catalogue_room;
mod change;
mod create;
mod data;
mod defrag;
mod destroy;
mod error;
mod failed;
mod failing;
mod find;
mod format;
mod fsck;
mod gather;
mod hole;
mod kept;
mod layout_room;
mod member;
mod mountpoint;
mod names;
mod online;
mod others;
mod pool;
mod refusal;
mod refused;
mod request;
mod rescue;
mod reserved;
mod rules;
mod sequences;
mod settle;
mod tidied;
mod walk;
mod wishes;
mod xattr;

pub use balance::{Evenness, Kept, LeftOut, evenness, rebalance};
pub use catalogue::{Catalogue, TREE};
pub use catalogue_room::Growth;
pub use change::{
    Drained, Nobody, Parting, Users, add, drain, is_add_interrupted, names_follow, remove,
    set_draining,
};
pub use create::{Created, MEMBER_COUNT_MAX, Wanted, create};
pub use defrag::defrag;
pub use destroy::{Destroyed, Doomed, Files};
pub use error::{ObjectFault, PoolError};
pub use failed::{Failed, Failure};
pub use find::{MOUNT_TYPE, Mounted, Place, find, kept_elsewhere, mounted, mounts_of};
pub use format::{Duty, FORMAT_FILE, FORMAT_VERSION, FormatFault, MemberId};
pub use fsck::{Fsck, Issue, IssueKind, Progress, State, fsck};
pub use gather::{Defragged, Fragments};
pub use member::{Access, Member, MemberState, MemberStatus, ObjectName};
pub use mountpoint::check_mountpoint;
pub use names::{FoundUnsettled, Inode, NameLog, inode, newest_log};
pub use online::{Move, Moved, each_file_in};
pub use others::draining_with_room;
pub use pool::{Buried, Members, Opens, Pool, Readers, SpillReason, Usage};
pub use refusal::{
    AddRefusal, CatalogueRefusal, FolderRefusal, LackedClass, MemberRefusal, NoLog, Occupant,
    OtherCatalogue, Overlap, PolicyRefusal, PoolFolder, Refusal, RescueRefusal, Role, WorkRefusal,
};
pub use request::{
    Asked, Asker, Door, DoorStatus, Listener, MountState, Request, Told, Work, WorkKind,
};
pub use rescue::{Rescued, rescue};
pub use reserved::RoomBefore;
pub use rushes_core::pool::rules::{PATTERN_BYTES_MAX, RULE_COUNT_MAX};
pub use rushes_core::pool::tidy::Schedule;
pub use rushes_core::pool::wish::WISH_BYTES_MAX;
pub use rushes_core::pool::{
    Class, FileIdentity, Layout, LayoutFault, Located, MemberNumber, Object, ObjectId, Policy,
    PoolId, Rule, RuleChange, RuleFault, Segment, Shape, Spread, WISH_ATTRIBUTE, Wish, WishFault,
};
pub use rushes_core::units::{ByteCount, ByteOffset, ByteRange};
pub use tidied::{Tidied, set_schedule};
pub use wishes::{PolicyChange, change_classes, change_policy};
pub use xattr::{HIDDEN_PREFIX, INODE_ATTRIBUTE, LAYOUT_ATTRIBUTE, OBJECT_ATTRIBUTE};
