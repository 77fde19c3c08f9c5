// SPDX-License-Identifier: Apache-2.0
//! Requests that a pool refuses: one type for each group, with the facts that its sentence names.
//! A sentence says what was found, what was expected and what to do, in this order. Errors of
//! devices and file systems are no refusals: those are other kinds of [`PoolError`].

mod add;
mod catalogue;
mod folder;
mod member;
mod policy;
mod rescue;
mod work;

pub use add::AddRefusal;
pub use catalogue::{CatalogueRefusal, OtherCatalogue};
pub use folder::{FolderRefusal, Occupant, Overlap, PoolFolder, Role};
pub use member::{MemberRefusal, NoLog};
pub use policy::{LackedClass, PolicyRefusal};
pub use rescue::RescueRefusal;
pub use work::WorkRefusal;

use crate::error::PoolError;
use std::fmt;
use std::path::PathBuf;

/// A request that a pool refuses, by the part that refuses it.
#[derive(Debug)]
pub enum Refusal {
    /// Of `rushes pool add`.
    Add(AddRefusal),
    /// The path leads to no pool's catalogue, or to a catalogue that cannot be used.
    Catalogue(CatalogueRefusal),
    /// A folder cannot become a part of a pool, or a mount of one.
    Folder(FolderRefusal),
    /// A member cannot be drained or removed, or a pool be destroyed.
    Member(MemberRefusal),
    /// Of `rushes pool policy`.
    Policy(PolicyRefusal),
    /// Of `rushes pool rescue`.
    Rescue(RescueRefusal),
    /// Work on a whole pool, in a mount or without one.
    Work(WorkRefusal),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Add(refusal) => refusal.fmt(f),
            Refusal::Catalogue(refusal) => refusal.fmt(f),
            Refusal::Folder(refusal) => refusal.fmt(f),
            Refusal::Member(refusal) => refusal.fmt(f),
            Refusal::Policy(refusal) => refusal.fmt(f),
            Refusal::Rescue(refusal) => refusal.fmt(f),
            Refusal::Work(refusal) => refusal.fmt(f),
        }
    }
}

macro_rules! from {
    ($($group:ident($refusal:ident)),+) => {$(
        impl From<$refusal> for Refusal {
            fn from(refusal: $refusal) -> Refusal {
                Refusal::$group(refusal)
            }
        }

        impl From<$refusal> for PoolError {
            fn from(refusal: $refusal) -> PoolError {
                PoolError::Refused(Box::new(refusal.into()))
            }
        }
    )+};
}

from!(
    Add(AddRefusal),
    Catalogue(CatalogueRefusal),
    Folder(FolderRefusal),
    Member(MemberRefusal),
    Policy(PolicyRefusal),
    Rescue(RescueRefusal),
    Work(WorkRefusal)
);

/// The outcome of a refused request.
pub(crate) fn refused<T>(refusal: impl Into<Refusal>) -> Result<T, PoolError> {
    Err(PoolError::Refused(Box::new(refusal.into())))
}

/// As a command line has them.
fn spaced(paths: &[PathBuf]) -> String {
    let paths: Vec<String> = paths.iter().map(|one| one.display().to_string()).collect();
    paths.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// The names of a type's variants, as its source declares them: an example of each is due.
    fn declared(source: &str, name: &str) -> BTreeSet<String> {
        let start = format!("pub enum {name} {{");
        let body = source.lines().skip_while(|line| *line != start).skip(1);
        body.take_while(|line| *line != "}")
            .filter_map(|line| line.strip_prefix("    "))
            .filter(|line| line.starts_with(|first: char| first.is_ascii_uppercase()))
            .map(|line| line.split(|c: char| !c.is_alphanumeric()).next())
            .map(|name| name.unwrap_or_default().to_owned())
            .collect()
    }

    /// `without`  variants whose sentence, or a part of it, is another program's
    fn check<R: fmt::Debug + fmt::Display>(source: &str, examples: Vec<R>, without: &[&str]) {
        let name = std::any::type_name::<R>().rsplit("::").next().unwrap();
        let mut seen = BTreeSet::new();
        for example in &examples {
            let variant = format!("{example:?}");
            let variant = variant.split(|c: char| !c.is_alphanumeric()).next();
            let variant = variant.unwrap().to_owned();
            let sentence = example.to_string();
            let parts: Vec<&str> = sentence.splitn(2, "; expected ").collect();
            let is_whole = parts.len() == 2 && !parts[0].is_empty() && parts[1].contains("; ");
            assert_eq!(
                is_whole,
                !without.contains(&variant.as_str()),
                "{name}::{variant}: {sentence}"
            );
            assert!(!sentence.contains("  "), "{sentence}");
            assert!(!sentence.ends_with(['.', ';', ' ']), "{sentence}");
            seen.insert(variant);
        }
        let declared = declared(source, name);
        assert!(!declared.is_empty(), "{name}");
        assert_eq!(seen, declared, "{name}");
    }

    #[test]
    fn each_sentence_says_what_was_found_and_expected_and_what_to_do() {
        check(include_str!("refusal/add.rs"), add::examples(), &[]);
        check(
            include_str!("refusal/catalogue.rs"),
            catalogue::examples(),
            // The fault of a format file says it in a clause of its own.
            &["Format"],
        );
        check(
            include_str!("refusal/folder.rs"),
            folder::examples(),
            &["Format"],
        );
        check(include_str!("refusal/member.rs"), member::examples(), &[]);
        check(
            include_str!("refusal/policy.rs"),
            policy::examples(),
            // The sentence of rules is core's.
            &["Rule"],
        );
        check(include_str!("refusal/rescue.rs"), rescue::examples(), &[]);
        check(
            include_str!("refusal/work.rs"),
            work::examples(),
            // The sentence is the mount's own.
            &["ByMount"],
        );
    }
}
