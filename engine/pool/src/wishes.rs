// SPDX-License-Identifier: Apache-2.0
//! Where files are wished to go, as files, folders and the pool say it, and how busy devices are,
//! as the daemon told it to a door.
//!
//! The effect of both is core/pool's: here they are only read and kept.

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

/// Loads that were told are not believed any longer.
const LOADS_LIVE: Duration = Duration::from_secs(10);

/// Bandwidth of devices that nobody was promised, and when that was told.
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
    /// Of files that say nothing themselves. None: as it is.
    pub wish: Option<Wish>,
    /// Of files that are made under names of a pattern.
    pub rules: RuleChange,
    /// Of members, with None for one that is to be of no class; others stay as they are.
    pub classes: Vec<(MemberNumber, Option<Class>)>,
}

impl Pool {
    /// Its wish for files that say nothing themselves.
    pub fn wish(&self) -> Wish {
        self.format().wish
    }

    /// Its rules for files that are made under names of a pattern; the first that matches counts.
    pub fn rules(&self) -> Vec<Rule> {
        self.format().rules.iter().cloned().collect()
    }

    /// The wish of its rules for a file that is made now. None: nothing.
    ///
    /// `path`   of that file below the root of the tree; asked for only where there are rules.
    /// None: not known
    pub fn rule_for(&self, path: impl FnOnce() -> Option<PathBuf>) -> Option<Wish> {
        let rules = self.name_rules();
        if rules.is_empty() {
            return None;
        }
        let rule = rules.first(&path()?)?.wish().clone();
        (rule != Wish::default()).then_some(rule)
    }

    /// The wish of a file, and where it says nothing that of the pool. A text that is no wish says
    /// nothing: doors take none.
    ///
    /// Assumes  `stub`: opened (not O_PATH)
    pub fn wish_of(&self, stub: BorrowedFd<'_>) -> Wish {
        let text = xattr::get(stub, WISH_ATTRIBUTE).ok().flatten();
        let own = text
            .and_then(|text| String::from_utf8(text).ok())
            .and_then(|text| Wish::of(&text).ok());
        own.unwrap_or_default().or(&self.wish())
    }

    /// The class that a wish asks for and no member is of. None: some member can take what is
    /// wished so, or could if it were there.
    pub fn cannot_meet(&self, wish: &Wish) -> Option<LackedClass> {
        let members = self.members();
        lacks(wish, members.iter().map(|member| member.class()))
    }

    /// How much bandwidth devices have that nobody was promised; those that are not named are not
    /// known. It is believed for 10 s.
    ///
    /// Units    device: as [`crate::MemberStatus::device`] · bandwidth: bytes per second
    pub fn set_loads(&self, loads: impl IntoIterator<Item = (u64, u64)>) {
        self.loads()
            .set(Instant::now(), loads.into_iter().collect());
    }

    /// As [`Pool::set_loads`] was told. None: not known.
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

/// Say, durably, where files of a pool are to go. Those that have bytes stay where they are.
///
/// Assumes  nobody serves the pool but the caller, who opens it anew to see what is said then
/// Errors   [`PoolError::Refused`]: a member that is not there, a class that none is of, or a rule
/// that is none; then nothing was changed
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

/// Say, durably, of which class members are from now on; a door may have the pool, and does it.
/// Files that have bytes stay where they are.
///
/// Assumes  nobody else changes members
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

/// The class that the pool, or a rule of it, asks for and no member is of.
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
        // Loads that are told anew replace all of it.
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
