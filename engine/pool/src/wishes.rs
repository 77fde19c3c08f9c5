// SPDX-License-Identifier: Apache-2.0
//! The policies of files, folders and the pool, and how busy devices are, as the daemon told a
//! door.
//!
//! core/pool decides by both: this module only reads and keeps them.

use crate::change::write;
use crate::error::PoolError;
use crate::format::CatalogueFormat;
use crate::pool::Pool;
use crate::refusal::{LackedClass, MemberRefusal, PolicyRefusal, refused};
use crate::rules::Rules;
use crate::xattr;
use rushes_core::pool::{Class, MemberNumber, Rule, RuleChange, WISH_ATTRIBUTE, Wish};
use std::collections::{BTreeSet, HashMap};
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long reported loads count.
const LOADS_LIVE: Duration = Duration::from_secs(10);

/// Bandwidth of devices that no contract has, and the time of that report.
#[derive(Debug, Default)]
pub(crate) struct Loads(Mutex<Option<(Instant, HashMap<u64, u64>)>>);

impl Loads {
    fn set(&self, now: Instant, loads: HashMap<u64, u64>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((now, loads));
    }

    fn of(&self, now: Instant, device: u64) -> Option<u64> {
        let told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (then, loads) = told.as_ref()?;
        let is_fresh = now.duration_since(*then) < LOADS_LIVE;
        loads.get(&device).copied().filter(|_| is_fresh)
    }
}

/// The policy of a pool from now on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyChange {
    /// Of files without one of their own. None: as it is.
    pub wish: Option<Wish>,
    /// Of new files with names of a pattern.
    pub rules: RuleChange,
    /// Of members, with None for no class; others stay as they are.
    pub classes: Vec<(MemberNumber, Option<Class>)>,
}

impl Pool {
    /// Its policy for files without one of their own.
    pub fn wish(&self) -> Wish {
        self.format().wish
    }

    /// Its rules for new files with names of a pattern; the first that matches counts.
    pub fn rules(&self) -> Vec<Rule> {
        self.format().rules.iter().cloned().collect()
    }

    /// The policy of its rules for a new file. None: they have none.
    ///
    /// `path`   of that file below the root of the tree; called only where there are rules. None:
    ///          not known
    pub fn rule_for(&self, path: impl FnOnce() -> Option<PathBuf>) -> Option<Wish> {
        let rules = self.name_rules();
        if rules.is_empty() {
            return None;
        }
        let rule = rules.first(&path()?)?.wish().clone();
        (rule != Wish::default()).then_some(rule)
    }

    /// The policy of a file, and where it has none that of the pool. A text that is no policy
    /// counts as none: doors accept none.
    ///
    /// Assumes  `stub`: opened, not by O_PATH
    pub fn wish_of(&self, stub: BorrowedFd<'_>) -> Wish {
        let text = xattr::get(stub, WISH_ATTRIBUTE).ok().flatten();
        let own = text
            .and_then(|text| String::from_utf8(text).ok())
            .and_then(|text| Wish::of(&text).ok());
        own.unwrap_or_default().or(&self.wish())
    }

    /// The class that a policy asks for and no member has. None: some member can take such files,
    /// or could if it were there.
    pub fn cannot_meet(&self, wish: &Wish) -> Option<LackedClass> {
        let members = self.members();
        lacks(wish, members.iter().map(|member| member.class()))
    }

    /// Set the bandwidth of devices that no contract has; that of others is not known. It counts
    /// for 10 s.
    ///
    /// Units    device: as [`crate::MemberStatus::device`] · bandwidth: bytes per second
    pub fn set_loads(&self, loads: impl IntoIterator<Item = (u64, u64)>) {
        self.loads()
            .set(Instant::now(), loads.into_iter().collect());
    }

    /// As [`Pool::set_loads`] has set it. None: not known.
    pub fn unpromised(&self, device: u64) -> Option<u64> {
        self.loads().of(Instant::now(), device)
    }
}

fn lacks<'a>(wish: &Wish, classes: impl Iterator<Item = Option<&'a Class>>) -> Option<LackedClass> {
    let wanted = wish.class.as_ref()?;
    let known: BTreeSet<&Class> = classes.flatten().collect();
    (!known.contains(wanted)).then(|| LackedClass {
        class: wanted.clone(),
        known: known.into_iter().cloned().collect(),
        rule: None,
    })
}

/// Set, durably, where files of a pool go. Those that have bytes stay where they are.
///
/// Assumes  only the caller serves the pool, and opens it anew to see the change
/// Errors   [`PoolError::Refused`]: a member that is not in the pool, a class that none has, or a
///          rule that is none; then nothing was changed
pub fn change_policy(pool: Pool, change: PolicyChange) -> Result<(), PoolError> {
    let mut format = pool.format();
    give_classes(&mut format, change.classes)?;
    if let Some(wish) = change.wish {
        format.wish = wish;
    }
    let rules: Vec<Rule> = format.rules.iter().cloned().collect();
    let rules = change.rules.of(&rules).map_err(PolicyRefusal::Rule)?;
    format.rules = Rules::of(rules)?;
    if let Some(lacked) = lacks_any(&format) {
        return refused(PolicyRefusal::Lacks(lacked));
    }
    if format == pool.format() {
        return Ok(());
    }
    write(&pool, &format)
}

/// Set, durably, the classes of members; if a door has the pool, the door does it. Files that have
/// bytes stay where they are.
///
/// Assumes  no other caller changes members
/// Errors   as [`change_policy`]
pub fn change_classes(
    pool: &Pool,
    classes: Vec<(MemberNumber, Option<Class>)>,
) -> Result<(), PoolError> {
    let mut format = pool.format();
    give_classes(&mut format, classes)?;
    if let Some(lacked) = lacks_any(&format) {
        return refused(PolicyRefusal::Lacks(lacked));
    }
    if format == pool.format() {
        return Ok(());
    }
    write(pool, &format)?;
    pool.adopt(format);
    Ok(())
}

fn give_classes(
    format: &mut CatalogueFormat,
    classes: Vec<(MemberNumber, Option<Class>)>,
) -> Result<(), PoolError> {
    let known: Vec<MemberNumber> = format.members.iter().map(|entry| entry.number).collect();
    for (number, class) in classes {
        let mut entries = format.members.iter_mut();
        let Some(entry) = entries.find(|entry| entry.number == number) else {
            return refused(MemberRefusal::Unknown { number, known });
        };
        entry.class = class;
    }
    Ok(())
}

/// The class that the pool, or a rule of it, asks for and no member has.
pub(crate) fn lacks_any(format: &CatalogueFormat) -> Option<LackedClass> {
    let classes = || format.members.iter().map(|entry| entry.class.as_ref());
    lacks(&format.wish, classes()).or_else(|| {
        format.rules.iter().find_map(|rule| {
            let mut lacked = lacks(rule.wish(), classes())?;
            lacked.rule = Some(rule.pattern().to_owned());
            Some(lacked)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_are_believed_for_a_while_and_those_of_others_are_not_known() {
        let loads = Loads::default();
        let now = Instant::now();
        assert_eq!(loads.of(now, 7), None);
        loads.set(now, [(7, 100), (8, 0)].into());
        assert_eq!(loads.of(now, 7), Some(100));
        assert_eq!(loads.of(now + LOADS_LIVE / 2, 8), Some(0));
        assert_eq!(loads.of(now, 9), None);
        assert_eq!(loads.of(now + LOADS_LIVE, 7), None);
        // A new report replaces the former one as a whole.
        loads.set(now + LOADS_LIVE, [(9, 5)].into());
        assert_eq!(loads.of(now + LOADS_LIVE, 9), Some(5));
        assert_eq!(loads.of(now + LOADS_LIVE, 7), None);
    }

    #[test]
    fn a_class_that_no_member_is_of_is_named_with_those_there_are() {
        let (ssd, raid) = (Class::of("ssd"), Class::of("raid"));
        let wish = Wish::of("class=ssd").unwrap();
        let of = |classes: &[Option<&Class>]| lacks(&wish, classes.iter().copied());
        assert_eq!(of(&[None, ssd.as_ref()]), None);
        let said = of(&[None, raid.as_ref(), raid.as_ref()])
            .unwrap()
            .to_string();
        assert!(said.contains("class ssd (they are of raid)"), "{said}");
        let said = of(&[None]).unwrap().to_string();
        assert!(said.contains("none is of a class yet"), "{said}");
        assert_eq!(lacks(&Wish::default(), [None].into_iter()), None);
    }
}
