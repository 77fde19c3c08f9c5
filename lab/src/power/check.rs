// SPDX-License-Identifier: Apache-2.0
//! Checks the files found after a power cut against the states that are allowed.
//!
//! Three promises: synced bytes are there; a file renamed into place is whole, the old one or the
//! new one; no file ever shows a byte that was never its own. It compares the [`Tree`] that was
//! read with the [`History`] of the steps, knows nothing of disks and mounts, and allows the file
//! system nothing beyond the history.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::history::{FileHistory, History, Occupant, Version, possible};
use super::sector::{SECTOR_BYTES, Stamp, describe};

/// The entry at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Node {
    /// A folder.
    Folder,
    /// A file with its content.
    File(Vec<u8>),
    /// An entry that could not be read, and the error.
    Unreadable(String),
}

/// The contents of a file system after a cut, by path.
pub type Tree = BTreeMap<String, Node>;

/// Which promise is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// Bytes of another file, or of none.
    Foreign,
    /// Synced bytes are not there.
    Lost,
    /// A file, folder or name is missing, or is there and must not be.
    Name,
    /// A size that the file has not had since its last sync.
    Size,
    /// An entry could not be read, or the file system not mounted.
    Unreadable,
    /// The file system's own checker, or `rushes pool fsck`, found a fault.
    Inconsistent,
}

/// One broken promise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Which promise.
    pub rule: Rule,
    /// The path.
    pub path: String,
    /// The file at that path; 0: no file's.
    pub file: u64,
    /// The contents that were allowed.
    pub expected: String,
    /// The contents that were read.
    pub read: String,
}

/// All broken promises in one lane's folder after a cut with `done` acknowledged steps.
pub fn check(history: &History, done: usize, tree: &Tree) -> Vec<Finding> {
    let mut findings: Vec<Finding> = history
        .paths
        .keys()
        .filter_map(|path| wrong_at(history, done, path, tree.get(path)))
        .collect();
    let wrong: BTreeSet<String> = findings.iter().map(|f| f.path.clone()).collect();
    for file in history.files.values() {
        findings.extend(vanished(file, done, tree, &wrong));
    }
    findings
}

/// Paths that no lane ever made.
pub fn strangers(histories: &[History], tree: &Tree) -> Vec<Finding> {
    tree.iter()
        .filter(|(path, _)| histories.iter().all(|h| !h.paths.contains_key(*path)))
        .map(|(path, node)| Finding {
            rule: Rule::Name,
            path: path.clone(),
            file: 0,
            expected: String::from("nothing: nobody made it"),
            read: kind_of(Some(node)),
        })
        .collect()
}

/// Checks the files in `lost+found`: all bytes of each must be those that one file had at some
/// time.
pub fn orphans(histories: &[History], found: &Tree) -> Vec<Finding> {
    let wrong = found.iter().filter_map(|(path, node)| {
        let (file, read) = mixed(histories, node)?;
        Some((path, file, read))
    });
    wrong
        .map(|(path, file, read)| Finding {
            rule: Rule::Foreign,
            path: path.clone(),
            file,
            expected: String::from("bytes of one file"),
            read,
        })
        .collect()
}

/// The file that a file without a name most resembles, and the first sector that is not of it;
/// `None`: all are.
fn mixed(histories: &[History], node: &Node) -> Option<(u64, String)> {
    let Node::File(bytes) = node else {
        return Some((0, kind_of(Some(node))));
    };
    // The first sector whose bytes the file never had.
    let strange = |file: &FileHistory| {
        let mut sectors = bytes.chunks(SECTOR_BYTES).zip(0..);
        sectors.find(|&(got, index)| {
            let versions = file.versions_ever(index).chain([&Version::Zero]);
            !file.is_one_of(index, got, versions)
        })
    };
    let files = histories.iter().flat_map(|history| history.files.values());
    let closest = files
        .map(|file| (file.file, strange(file)))
        .max_by_key(|(_, strange)| strange.map_or(u64::MAX, |(_, index)| index));
    let (file, strange) = closest?;
    let (got, index) = strange?;
    Some((file, format!("sector {index}: {}", describe(got))))
}

fn kind_of(node: Option<&Node>) -> String {
    match node {
        None => String::from("nothing"),
        Some(Node::Folder) => String::from("a folder"),
        Some(Node::File(bytes)) => format!("a file of {} bytes", bytes.len()),
        Some(Node::Unreadable(reason)) => format!("an error: {reason}"),
    }
}

/// The broken promise at a path, if its occupant or content is not an allowed one.
fn wrong_at(history: &History, done: usize, path: &str, node: Option<&Node>) -> Option<Finding> {
    let (changes, safe) = possible(history.paths.get(path)?, done);
    let mut occupants: Vec<Occupant> = changes.iter().map(|change| change.what).collect();
    if !safe {
        occupants.push(Occupant::Nobody);
    }
    if let Some(Node::Unreadable(reason)) = node {
        return Some(Finding {
            rule: Rule::Unreadable,
            path: path.to_owned(),
            file: 0,
            expected: in_words(&occupants),
            read: reason.clone(),
        });
    }
    let mut complaint = None;
    for &occupant in &occupants {
        match (occupant, node) {
            (Occupant::Nobody, None) | (Occupant::Folder, Some(Node::Folder)) => return None,
            (Occupant::File(file), Some(Node::File(bytes))) => {
                match content_of(&history.files[&file], done, path, bytes) {
                    None => return None,
                    // Of several files report the closest: one with a wrong size before one with
                    // foreign bytes.
                    Some(new) => {
                        let closer = complaint
                            .as_ref()
                            .is_none_or(|old: &Finding| new.rule > old.rule);
                        complaint = if closer { Some(new) } else { complaint };
                    }
                }
            }
            _ => {}
        }
    }
    complaint.or_else(|| {
        Some(Finding {
            rule: Rule::Name,
            path: path.to_owned(),
            file: 0,
            expected: in_words(&occupants),
            read: kind_of(node),
        })
    })
}

fn in_words(occupants: &[Occupant]) -> String {
    let words: Vec<String> = occupants
        .iter()
        .map(|occupant| match occupant {
            Occupant::Nobody => String::from("nothing"),
            Occupant::Folder => String::from("a folder"),
            Occupant::File(file) => format!("file {file:#x}"),
        })
        .collect();
    words.join(" or ")
}

/// A file whose name is safe and that no step removed must be at one of its possible paths: each
/// path by itself may be allowed while the file is at none of them.
fn vanished(
    file: &FileHistory,
    done: usize,
    tree: &Tree,
    wrong: &BTreeSet<String>,
) -> Option<Finding> {
    let (names, safe) = possible(&file.names, done);
    if !safe || names.iter().any(|name| name.what.is_none()) {
        return None;
    }
    let paths: Vec<&String> = names.iter().filter_map(|name| name.what.as_ref()).collect();
    let is_there = |path: &&String| match tree.get(*path) {
        Some(Node::File(bytes)) => content_of(file, done, path, bytes).is_none(),
        _ => false,
    };
    let said = |path: &&String| wrong.contains(*path);
    if paths.iter().any(is_there) || paths.iter().any(said) {
        return None;
    }
    let path = paths.first()?.to_string();
    Some(Finding {
        rule: Rule::Name,
        read: kind_of(tree.get(&path)),
        path,
        file: file.file,
        expected: format!(
            "file {:#x} here or at one of its later names ({} in all)",
            file.file,
            paths.len()
        ),
    })
}

/// The first fault in the content of a file.
fn content_of(file: &FileHistory, done: usize, path: &str, bytes: &[u8]) -> Option<Finding> {
    let finding = |rule, expected: String, read: String| {
        let path = path.to_owned();
        let file = file.file;
        Some(Finding {
            rule,
            path,
            file,
            expected,
            read,
        })
    };
    for (index, got) in bytes.chunks(SECTOR_BYTES).enumerate() {
        let index = index as u64;
        let versions = file.versions(index, done);
        if file.is_one_of(index, got, &versions) {
            continue;
        }
        let words: Vec<String> = versions
            .iter()
            .map(|version| describe(&version.bytes(file.file, index)[..got.len()]))
            .collect();
        let expected = format!(
            "sector {index}, last synced by step {}: {}",
            file.floor(done),
            words.join(" or ")
        );
        return finding(rule_of(file.file, index, got), expected, describe(got));
    }
    let (least, most) = file.sizes(done);
    let size = bytes.len() as u64;
    if (least..=most).contains(&size) {
        return None;
    }
    let expected = format!(
        "{least} to {most} bytes, last synced by step {}",
        file.floor(done)
    );
    finding(Rule::Size, expected, format!("{size} bytes"))
}

/// Own bytes that are too old, or zeros, are lost bytes. All others are foreign.
fn rule_of(file: u64, index: u64, got: &[u8]) -> Rule {
    let own = Stamp::of(got).is_some_and(|stamp| (stamp.file, stamp.index) == (file, index));
    if own || got.iter().all(|&byte| byte == 0) {
        Rule::Lost
    } else {
        Rule::Foreign
    }
}

#[cfg(test)]
mod tests {
    use super::super::script::Step;
    use super::super::sector::{NOBODY, content};
    use super::*;

    const OLD: u64 = 1;
    const NEW: u64 = 2;

    fn write(file: u64, offset: u64, length: u64) -> Step {
        Step::Write {
            file,
            offset,
            length,
            direct: false,
        }
    }

    fn create(file: u64, path: &str) -> Step {
        let path = path.into();
        Step::Create { file, path }
    }

    fn sync(file: u64) -> Step {
        Step::Sync {
            file,
            data_only: false,
        }
    }

    /// A file of two pages, synced; a second write to its second page; then a rename of another
    /// file over it.
    fn steps() -> Vec<Step> {
        vec![
            create(OLD, "l/a"),
            write(OLD, 0, 8192),
            sync(OLD),
            write(OLD, 4096, 4096),
            create(NEW, "l/t"),
            write(NEW, 0, 3000),
            sync(NEW),
            Step::Rename {
                file: NEW,
                from: "l/t".into(),
                to: "l/a".into(),
            },
            Step::SyncFolder { path: "l".into() },
        ]
    }

    fn tree(files: &[(&str, Vec<u8>)]) -> Tree {
        let mut tree = Tree::from([(String::from("l"), Node::Folder)]);
        for (path, bytes) in files {
            tree.insert((*path).to_owned(), Node::File(bytes.clone()));
        }
        tree
    }

    fn old(generations: [u64; 2]) -> Vec<u8> {
        let mut bytes = content(OLD, generations[0], 0, 4096);
        bytes.extend(content(OLD, generations[1], 4096, 4096));
        bytes
    }

    fn new() -> Vec<u8> {
        content(NEW, 6, 0, 3000)
    }

    fn rules(done: usize, files: &[(&str, Vec<u8>)]) -> Vec<Rule> {
        let history = History::of("l", &steps());
        let findings = check(&history, done, &tree(files));
        findings.iter().map(|finding| finding.rule).collect()
    }

    #[test]
    fn what_was_synced_may_be_that_or_newer_and_nothing_else() {
        let mut both = old([2, 4]);
        both[4096..6144].copy_from_slice(&old([2, 2])[4096..6144]);
        for good in [old([2, 2]), old([2, 4]), both] {
            assert_eq!(rules(4, &[("l/a", good)]), []);
        }
        let mut zeros = old([2, 2]);
        zeros[512..1024].fill(0);
        let short = old([2, 2])[..8191].to_vec();
        for (bad, rule) in [
            (old([4, 2]), Rule::Lost),
            (zeros, Rule::Lost),
            (short, Rule::Size),
            (Vec::new(), Rule::Size),
        ] {
            assert_eq!(rules(4, &[("l/a", bad)]), [rule]);
        }
        assert_eq!(rules(4, &[]), [Rule::Name]);
        // Before the sync was acknowledged all bytes may be missing, but not wrong.
        assert_eq!(rules(2, &[]), []);
        assert_eq!(rules(2, &[("l/a", vec![0; 512])]), []);
    }

    #[test]
    fn other_bytes_are_foreign_wherever_they_come_from() {
        let mut garbage = old([2, 2]);
        garbage[100] ^= 1;
        let mut nobody = old([2, 2]);
        nobody[..4096].copy_from_slice(&content(NOBODY, 1, 0, 4096));
        let mut elsewhere = old([2, 2]);
        elsewhere.copy_within(0..512, 512);
        for bad in [garbage, nobody, elsewhere, content(NEW, 6, 0, 8192)] {
            assert_eq!(rules(4, &[("l/a", bad.clone())]), [Rule::Foreign]);
            // Not even an unsynced file may show them.
            assert_eq!(rules(1, &[("l/a", bad)]), [Rule::Foreign]);
        }
    }

    #[test]
    fn renamed_into_place_is_the_old_or_the_new_and_after_the_sync_the_new() {
        assert_eq!(rules(7, &[("l/a", old([2, 4])), ("l/t", new())]), []);
        assert_eq!(rules(8, &[("l/a", new())]), []);
        assert_eq!(rules(9, &[("l/a", new())]), []);
        // The old file after the folder was synced; an empty one; one cut off; half of each.
        assert_eq!(rules(9, &[("l/a", old([2, 4]))]), [Rule::Foreign]);
        assert_eq!(rules(9, &[("l/a", Vec::new())]), [Rule::Size]);
        assert_eq!(rules(8, &[("l/a", Vec::new())]), [Rule::Size]);
        assert_eq!(rules(8, &[("l/a", new()[..2048].to_vec())]), [Rule::Size]);
        let mut half = new();
        half[1024..].copy_from_slice(&old([2, 2])[1024..3000]);
        assert_eq!(rules(8, &[("l/a", half)]), [Rule::Foreign]);
    }

    #[test]
    fn file_that_is_at_none_of_its_names_is_missed() {
        // Gone from the old name and not at the new one: each path alone would be allowed.
        assert_eq!(rules(8, &[("l/a", old([2, 4]))]), [Rule::Name]);
    }

    #[test]
    fn orphan_is_of_one_file_and_of_any_time() {
        let history = [History::of("l", &steps())];
        let wrong = |bytes: Vec<u8>| {
            let found = Tree::from([(String::from("lost+found/1"), Node::File(bytes))]);
            let findings = orphans(&history, &found);
            findings.iter().map(|f| f.file).collect::<Vec<_>>()
        };
        let mut holes = old([2, 4]);
        holes[512..2048].fill(0);
        for good in [old([2, 2]), holes, new(), vec![0; 700]] {
            assert!(wrong(good).is_empty());
        }
        let mut mixed = old([2, 2]);
        mixed[512..1024].copy_from_slice(&new()[512..1024]);
        assert_eq!(wrong(mixed), [OLD]);
        let mut garbage = old([2, 2]);
        garbage[5000] ^= 1;
        assert_eq!(wrong(garbage), [OLD]);
        assert_eq!(wrong(vec![7; 512]).len(), 1);
    }

    #[test]
    fn stranger_and_unreadable_are_told() {
        let history = History::of("l", &steps());
        let mut found = tree(&[("l/what", Vec::new())]);
        let findings = strangers(std::slice::from_ref(&history), &found);
        assert_eq!(findings[0].path, "l/what");
        found.insert("l/a".into(), Node::Unreadable("EIO".into()));
        assert_eq!(check(&history, 1, &found)[0].rule, Rule::Unreadable);
    }
}
