// SPDX-License-Identifier: Apache-2.0
//! Members whose devices fail: it is said once, and they are tried until they work again. Where new bytes go meanwhile: engine/pool.

use crate::door::Door;
use rushes_pool::{Member, MemberNumber};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

const LOOK_EVERY: Duration = Duration::from_secs(1);

impl Door {
    /// Their numbers, each with what was said.
    pub(crate) fn failing(&self) -> Vec<(u16, String)> {
        let members = self.pool.members();
        let failing = |member: &Arc<Member>| Some((member.number().0, member.failing()?));
        members.iter().filter_map(failing).collect()
    }

    /// Until the door closes.
    pub(crate) fn look_after_failing(&self) {
        let mut said: BTreeSet<MemberNumber> = BTreeSet::new();
        while !self.closing.load(Ordering::Acquire) {
            for member in self.pool.members().iter() {
                let number = member.number();
                if let Some(why) = member.failing()
                    && said.insert(number)
                {
                    tracing::warn!(
                        "member {} ({}) fails: {why}; new files go to others until it works again",
                        number.0,
                        member.path().display()
                    );
                }
                member.try_again();
                if member.failing().is_none() && said.remove(&number) {
                    tracing::info!("member {} works again", number.0);
                }
            }
            std::thread::park_timeout(LOOK_EVERY);
        }
    }
}
