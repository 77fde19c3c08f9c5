// SPDX-License-Identifier: Apache-2.0
//! Rules, compared with the names of files: a rule that matches no file is most often misspelled.
//!
//! Names and time are bounded: if a share has more names, its rules are not reported.

use super::{Finding, Level};
use crate::config::{Config, RuleConfig, ShareConfig};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const AREA: &str = "configuration";
/// Names looked at in one share.
const NAME_COUNT_MAX: usize = 100_000;
/// For all shares together.
const PATIENCE: Duration = Duration::from_secs(2);

pub(super) fn examine(config: &Config, findings: &mut Vec<Finding>) {
    let mut matched = vec![false; config.rules.len()];
    let mut unknown = Vec::new();
    let mut example = None;
    let end = Instant::now() + PATIENCE;
    for share in &config.shares {
        // A member's files are objects; rules are for names in the pool.
        let is_pool = !super::pools::members_in(&share.path).is_empty();
        let is_whole = !is_pool
            && walk(&share.path, end, |path| {
                example.get_or_insert_with(|| path.to_owned());
                for (rule, matched) in config.rules.iter().zip(&mut matched) {
                    *matched = *matched || rule.matches(&share.name, path);
                }
            });
        if !is_whole {
            unknown.push(share);
        }
    }
    let Some(example) = example else {
        // Nothing is there yet: no rule has anything to match.
        return;
    };
    let is_for = |rule: &RuleConfig, share: &ShareConfig| {
        let wanted = rule.share.as_ref();
        wanted.is_none_or(|wanted| wanted.eq_ignore_ascii_case(&share.name))
    };
    for (rule, _) in config.rules.iter().zip(matched).filter(|(_, it)| !it) {
        if unknown.iter().any(|share| is_for(rule, share)) {
            continue;
        }
        let place = match &rule.share {
            Some(share) => format!("share {share:?}"),
            None => String::from("any share"),
        };
        findings.push(Finding::of(
            Level::Note,
            AREA,
            format!("the rule match = {:?} matches no file of {place}", rule.pattern),
            format!(
                "correct it (it is compared with paths below the share's folder, such as {example:?}), or leave it for files to come"
            ),
        ));
    }
}

/// Every regular file below a folder, by its path in there. False: not all were seen.
fn walk(root: &Path, end: Instant, mut seen: impl FnMut(&str)) -> bool {
    let Ok(found) = std::fs::metadata(root) else {
        return false;
    };
    let mut folders = vec![PathBuf::new()];
    let mut count = 0;
    while let Some(folder) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(root.join(&folder)) else {
            return false;
        };
        for entry in entries.flatten() {
            count += 1;
            if count > NAME_COUNT_MAX || Instant::now() > end {
                return false;
            }
            let path = folder.join(entry.file_name());
            let Ok(kind) = entry.file_type() else {
                return false;
            };
            if kind.is_dir() {
                // A file system that is mounted below is no part of the share.
                if entry.metadata().is_ok_and(|it| it.dev() == found.dev()) {
                    folders.push(path);
                }
            } else if kind.is_file()
                && let Some(path) = path.to_str()
            {
                seen(path);
            }
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_that_matches_no_file_is_noted_and_one_that_may_is_not() {
        let base = std::env::temp_dir().join(format!("rushes-rules-{}", std::process::id()));
        std::fs::create_dir_all(base.join("a/footage")).unwrap();
        std::fs::create_dir_all(base.join("b")).unwrap();
        std::fs::create_dir_all(base.join("pool/objects")).unwrap();
        std::fs::write(base.join("pool/rushes-pool"), "{}").unwrap();
        let rules = "[[rule]]\nmatch = \"footage/*.mov\"\nbitrate = \"100M\"\n\
             [[rule]]\nmatch = \"fotage/*.mov\"\nbitrate = \"100M\"\n\
             [[rule]]\nmatch = \"**/*.mov\"\nshare = \"b\"\nbitrate = \"100M\"\n";
        let check = |shares: &[&str], expected: &[&str]| {
            let mut text = rules.to_owned();
            for name in shares {
                let path = base.join(name);
                text += &format!("[[share]]\nname = \"{name}\"\npath = {path:?}\n");
            }
            let config = Config::parse(Path::new("x"), &text, |_| true).unwrap();
            let mut findings = Vec::new();
            examine(&config, &mut findings);
            assert_eq!(findings.len(), expected.len(), "{shares:?}: {findings:#?}");
            for (finding, word) in findings.iter().zip(expected) {
                assert!(finding.finding.contains(word), "{finding:?}");
            }
        };
        // Nothing is there yet.
        check(&["a", "b"], &[]);
        std::fs::write(base.join("a/footage/1.mov"), "x").unwrap();
        check(&["a", "b"], &["fotage", "share \"b\""]);
        // A pool's members do not show its names.
        check(&["a", "b", "pool"], &["share \"b\""]);
        std::fs::write(base.join("b/2.mov"), "x").unwrap();
        check(&["a", "b"], &["fotage"]);
        std::fs::remove_dir_all(base).unwrap();
    }
}
