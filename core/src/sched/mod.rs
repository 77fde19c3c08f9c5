// SPDX-License-Identifier: Apache-2.0
//! The order of one device: which claim goes next, and which may join.
//!
//! The trick is that there is one policy and two users of it. [`choose`] names the next one, given
//! every stream's claim on the device; [`admission::dry_run`] plays the same function forward from
//! the claims as they stand, with the newcomer added, and admits exactly when no claim would be
//! late. So a contract does not rest on a formula about the scheduler: it rests on the scheduler.

pub mod admission;
mod model;
mod policy;

pub use model::{DeviceModel, RefinedModel, ServiceModel};
pub use policy::{BestEffortClaim, Choice, Claim, Load, Order, choose, spare};
