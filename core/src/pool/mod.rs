// SPDX-License-Identifier: Apache-2.0
//! Decisions of a pool: which member takes a segment, the format of a file's layout record, and how
//! fast bytes are moved.
//!
//! Bytes, files and directories are engine/pool's; here are only numbers and the arithmetic of
//! them.

pub mod balance;
pub mod check;
pub mod defrag;
pub mod layout;
pub mod led;
pub mod names;
pub mod pace;
pub mod place;
pub mod rules;
pub mod stripe;
pub mod tidy;
pub mod vain;
pub mod wish;

pub use layout::{
    BackPointer, FileIdentity, Layout, LayoutFault, Located, MemberNumber, Object, ObjectId, Part,
    PoolId, Segment, Shape,
};
pub use place::{Asked, Policy, Room, follow, order};
pub use rules::{Rule, RuleChange, RuleFault};
pub use stripe::stripe;
pub use wish::{Class, Spread, WISH_ATTRIBUTE, Wish, WishFault};
