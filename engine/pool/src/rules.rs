// SPDX-License-Identifier: Apache-2.0
//! Finds the placement rule of a pool for a name. core/pool defines rules; patterns are those of
//! the daemon's `[[rule]]` in docs/reference/config.md, by the same library in the same way, so
//! that one pattern means one thing.

use crate::refusal::PolicyRefusal;
use globset::{Candidate, GlobBuilder, GlobSet, GlobSetBuilder};
use rushes_core::pool::Rule;
use rushes_core::pool::rules::check_rules;
use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;
use unicode_normalization::{UnicodeNormalization, is_nfc};

/// The rules of a pool, in their order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rules(Arc<[Compiled]>);

#[derive(Debug)]
struct Compiled {
    rule: Rule,
    names: GlobSet,
}

impl PartialEq for Rules {
    fn eq(&self, other: &Rules) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Eq for Rules {}

impl Rules {
    /// Errors   about the first invalid one
    pub(crate) fn of(rules: Vec<Rule>) -> Result<Rules, PolicyRefusal> {
        check_rules(&rules).map_err(PolicyRefusal::Rule)?;
        let rules = rules.into_iter().map(|rule| {
            let names = compile(rule.pattern())?;
            Ok(Compiled { rule, names })
        });
        let rules: Result<Vec<Compiled>, PolicyRefusal> = rules.collect();
        rules.map(|rules| Rules(rules.into()))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Rule> {
        self.0.iter().map(|compiled| &compiled.rule)
    }

    /// The first one that matches this path below the root of the tree.
    pub(crate) fn first(&self, path: &Path) -> Option<&Rule> {
        if self.is_empty() {
            return None;
        }
        let path = composed(path);
        let candidate = Candidate::new(&path);
        let mut rules = self.0.iter();
        let found = rules.find(|compiled| compiled.names.is_match_candidate(&candidate));
        found.map(|compiled| &compiled.rule)
    }
}

/// Normalize a path to NFC, as the daemon's rules do. A path that is no UTF-8 stays as it is.
fn composed(path: &Path) -> Cow<'_, Path> {
    match path.to_str() {
        Some(text) if !is_nfc(text) => Cow::Owned(text.nfc().collect::<String>().into()),
        _ => Cow::Borrowed(path),
    }
}

/// `*` stays within a folder, `**` crosses them. A set of one pattern: a set returns an error for a
/// pattern too large for the library, where a single matcher panics.
fn compile(pattern: &str) -> Result<GlobSet, PolicyRefusal> {
    let letters: String = pattern.nfc().collect();
    let glob = GlobBuilder::new(&letters).literal_separator(true).build();
    let set = glob.and_then(|glob| GlobSetBuilder::new().add(glob).build());
    set.map_err(|error| PolicyRefusal::Pattern {
        pattern: pattern.to_owned(),
        fault: error.kind().clone(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    fn rules(rules: &[(&str, &str)]) -> Result<Rules, PolicyRefusal> {
        let rule = |&(pattern, words): &(&str, &str)| Rule::of(pattern, words).unwrap();
        Rules::of(rules.iter().map(rule).collect())
    }

    #[test]
    fn patterns_match_as_those_of_the_daemon() {
        let check = |pattern: &str, path: &[u8], expect: bool| {
            let rules = rules(&[(pattern, "single")]).unwrap();
            let found = rules.first(Path::new(OsStr::from_bytes(path)));
            let shown = path.escape_ascii();
            assert_eq!(found.is_some(), expect, "{pattern} and {shown}");
        };
        check("*.mov", b"clip.mov", true);
        check("*.mov", b"reel/clip.mov", false);
        check("reel/*/clip.mov", b"reel/1/clip.mov", true);
        check("reel/*/clip.mov", b"reel/1/2/clip.mov", false);
        check("reel/*/clip.mov", b"reel/clip.mov", false);
        check("**/*.mov", b"clip.mov", true);
        check("**/*.mov", b"a/b/c/clip.mov", true);
        check("**/*.mov", b"a/clip.MOV", false);
        check("**/*.{mov,MOV}", b"a/clip.MOV", true);
        check("conform/**/*.exr", b"conform/f.0001.exr", true);
        check("conform/**/*.exr", b"conform/a/b/f.0001.exr", true);
        check("conform/**/*.exr", b"old/conform/f.0001.exr", false);
        check("conform/**", b"conform/a/b", true);
        check("conform/**", b"conform", false);
        check("**", b"whatever/there is", true);
        // A ü as one character and as two, either way round.
        check("Grün/*", "Gru\u{308}n/a".as_bytes(), true);
        check("Gru\u{308}n/*", "Grün/ü".as_bytes(), true);
        check("Gr*n/\u{fc}", b"Gr\xff\xc3n/\xc3\xbc", true);
        check("take?.wav", b"take7.wav", true);
        check("take?.wav", b"take/.wav", false);
        check("take[0-9].wav", b"take7.wav", true);
        check("take[!0-9].wav", b"take7.wav", false);
        // The only exception: a character that is not one of these may be a `/`.
        check("take[!0-9]wav", b"take/wav", true);
        check("a[*]b", b"a*b", true);
        check("a[*]b", b"axb", false);
        check(r"a\*b", b"a*b", true);
        // Hidden files are files, and names need not be text.
        check("*.mov", b".mov", true);
        check("in/*", b"in/.hidden", true);
        check("in/*.mov", b"in/\xff\xfe.mov", true);
        check("in/m\u{fc}ller/*", "in/m\u{fc}ller/a".as_bytes(), true);
        // A decomposed ü, as Macs may send it, is the same letter.
        check("in/m\u{fc}ller/*", "in/mu\u{308}ller/a".as_bytes(), true);
        check("in/*.mov", b"in/two\nlines.mov", true);
    }

    #[test]
    fn the_first_that_matches_counts() {
        let rules = rules(&[
            ("keep/**", ""),
            ("**/*.proxy.mov", "class=archive"),
            ("**/*.mov", "class=ssd"),
        ])
        .unwrap();
        let check = |path: &str, expect: Option<&str>| {
            let found = rules.first(Path::new(path));
            let words = found.map(|rule| rule.wish().to_string());
            assert_eq!(words.as_deref(), expect, "{path}");
        };
        check("a/clip.proxy.mov", Some("class=archive"));
        check("a/clip.mov", Some("class=ssd"));
        check("keep/clip.mov", Some(""));
        check("a/clip.wav", None);
        assert_eq!(Rules::default().first(Path::new("a/clip.mov")), None);
    }

    #[test]
    fn what_is_no_pattern_is_refused_and_never_a_panic() {
        let deep = format!("{}x{}", "{a,".repeat(63), "}".repeat(63));
        let deepest = format!("{}x{}", "{".repeat(127), "}".repeat(127));
        for pattern in ["{mov", "a[", "a[z-a]", "a\\", &deep, &deepest] {
            match rules(&[(pattern, "single")]) {
                // Newer versions of the library may take it.
                Ok(rules) => drop(rules.first(Path::new("x"))),
                Err(fault) => {
                    let fault = fault.to_string();
                    assert!(fault.contains("is no pattern ("), "{fault}");
                    assert!(fault.contains("expected one such as"), "{fault}");
                }
            }
        }
        for pattern in ["{mov", "a[", "a[z-a]"] {
            assert!(rules(&[(pattern, "single")]).is_err(), "{pattern}");
        }
        let twice = rules(&[("a", "single"), ("a", "")]);
        assert!(twice.unwrap_err().to_string().contains("two rules"));
    }
}
