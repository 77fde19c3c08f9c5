// SPDX-License-Identifier: Apache-2.0
//! The rules that every file of the project keeps to. Each test names the file, the line and the
//! remedy.

use rushes_tests::rust_text::{code_only, has_word, without_tests, word_lines};
use rushes_tests::tree::{SourceFile, root, source_files};
use std::path::Path;

/// Lines of a file without its tests; a longer file is about two things.
const LINES_MAX: usize = 1500;

const COMMENT_COLUMNS_MAX: usize = 100;

fn rust_files() -> Vec<SourceFile> {
    source_files()
        .into_iter()
        .filter(|file| file.is("rs"))
        .collect()
}

/// Collects complaints, so that one run names them all.
#[derive(Default)]
struct Complaints(Vec<String>);

impl Complaints {
    fn add(&mut self, complaint: String) {
        self.0.push(complaint);
    }

    fn none(self) {
        assert!(self.0.is_empty(), "\n{}", self.0.join("\n"));
    }
}

/// Licence of a file by where it stands.
fn licence_of(path: &str) -> &'static str {
    if path.starts_with("doors/smb/") {
        "GPL-3.0-or-later"
    } else {
        "Apache-2.0"
    }
}

#[test]
fn every_source_file_names_its_licence() {
    let mut complaints = Complaints::default();
    for file in source_files() {
        let name = Path::new(&file.path).file_name().unwrap_or_default();
        let is_source = ["rs", "c", "h", "sh", "py", "service", "socket"]
            .iter()
            .any(|extension| file.is(extension))
            || name == "Makefile"
            || file.text.starts_with("#!");
        let wanted = format!("SPDX-License-Identifier: {}", licence_of(&file.path));
        if is_source && !file.text.lines().take(4).any(|line| line.contains(&wanted)) {
            complaints.add(format!("{}: its first lines lack \"{wanted}\"", file.path));
        }
    }
    complaints.none();
}

#[test]
fn no_test_stands_where_none_is_run() {
    let mut complaints = Complaints::default();
    for file in source_files().iter().filter(|file| file.is("toml")) {
        if !file.path.ends_with("Cargo.toml") {
            continue;
        }
        let folder = Path::new(&file.path).parent().unwrap_or(Path::new(""));
        for target in file.text.split("[[").skip(1) {
            let target = target.split("\n[").next().unwrap_or_default();
            if !target.lines().any(|line| line == "test = false") {
                continue;
            }
            let path = target.lines().find_map(|l| l.strip_prefix("path = "));
            let path = folder.join(path.expect("it says where it is").trim_matches('"'));
            let path = path.to_string_lossy();
            let sources = rust_files();
            let source = sources.iter().find(|source| source.path == path);
            let source = source.unwrap_or_else(|| panic!("{}: no {path}", file.path));
            if source.text.contains("#[test]") {
                complaints.add(format!(
                    "{path}: {} says test = false, so cargo runs no test that stands in it",
                    file.path
                ));
            }
        }
    }
    complaints.none();
}

#[test]
fn the_longest_tests_are_there() {
    let root = root();
    let listed = std::fs::read_to_string(root.join("tests/longest.txt")).expect("it can be read");
    let mut complaints = Complaints::default();
    for name in listed.lines().filter(|line| !line.starts_with('#')) {
        let (krate, target) = name.split_once(':').unwrap_or(("tests", name));
        let folders = ["", "engine/", "doors/"];
        let is_there = folders.iter().any(|folder| {
            root.join(format!("{folder}{krate}/tests/{target}.rs"))
                .is_file()
        });
        if !is_there {
            complaints.add(format!(
                "tests/longest.txt: there is no test program {name}"
            ));
        }
    }
    complaints.none();
}

#[test]
fn every_rust_file_says_what_it_is() {
    let mut complaints = Complaints::default();
    for file in rust_files() {
        let second = file.text.lines().nth(1).unwrap_or_default();
        if !second.starts_with("//! ") {
            complaints.add(format!(
                "{}:2: a //! header is missing: what this is and what it does not do",
                file.path
            ));
        }
    }
    complaints.none();
}

#[test]
fn no_rust_file_holds_two_nouns() {
    let mut complaints = Complaints::default();
    for file in rust_files() {
        let without = without_tests(&code_only(&file.text));
        let blank_from_tests = file
            .text
            .lines()
            .zip(without.lines())
            .filter(|(full, cut)| cut.trim().is_empty() && !code_only(full).trim().is_empty())
            .count();
        let lines = file.text.lines().count() - blank_from_tests;
        if lines > LINES_MAX {
            complaints.add(format!(
                "{}: {lines} lines without tests, more than {LINES_MAX}: which two nouns are in it?",
                file.path
            ));
        }
    }
    complaints.none();
}

#[test]
fn nothing_is_left_unfinished() {
    let mut complaints = Complaints::default();
    for file in rust_files() {
        let code = code_only(&file.text);
        for word in ["todo", "unimplemented", "dbg"] {
            for line in word_lines(&code, word) {
                if code
                    .lines()
                    .nth(line - 1)
                    .is_some_and(|l| l.contains(&format!("{word}!")))
                {
                    complaints.add(format!("{}:{line}: {word}!", file.path));
                }
            }
        }
        for (number, line) in code.lines().enumerate() {
            if line.contains("#[ignore") {
                complaints.add(format!(
                    "{}:{}: an ignored test; let it skip aloud, or remove it",
                    file.path,
                    number + 1
                ));
            }
        }
        for (number, line) in file.text.lines().enumerate() {
            let says_todo =
                line.contains(concat!("TO", "DO")) || line.contains(concat!("FIX", "ME"));
            if says_todo && !line.contains("issue ") && !line.contains('#') {
                complaints.add(format!("{}:{}: names no issue", file.path, number + 1));
            }
        }
    }
    complaints.none();
}

#[test]
fn blocks_are_reserved_by_the_kernel_or_not_at_all() {
    // Where the kernel refuses, the C library writes a zero into each block: into the file, and at
    // the disk's pace.
    let word = concat!("posix_", "fallocate");
    let mut complaints = Complaints::default();
    for file in source_files() {
        if !["rs", "c", "h"].iter().any(|extension| file.is(extension)) {
            continue;
        }
        for line in word_lines(&code_only(&file.text), word) {
            complaints.add(format!(
                "{}:{line}: {word}; fallocate(2) says whether there are blocks",
                file.path
            ));
        }
    }
    complaints.none();
}

#[test]
fn nobody_has_all_disks_of_the_machine_written() {
    // Tests beside the one that does it count on bytes that the kernel has not written yet.
    let word = concat!("fs::", "sync()");
    let mut complaints = Complaints::default();
    for file in rust_files() {
        for (number, line) in code_only(&file.text).lines().enumerate() {
            if line.contains(word) {
                complaints.add(format!(
                    "{}:{}: {word}; kit's mounts::sync_below writes those of one folder",
                    file.path,
                    number + 1
                ));
            }
        }
    }
    complaints.none();
}

#[test]
fn nothing_rests_on_a_clock_that_may_go_backwards() {
    // Dates for people, times of files, and work at a time of day that an operator has set; nothing
    // else.
    let dates = [
        "engine/daemon/src/calibrate.rs",
        "engine/daemon/src/doctor/shares.rs",
        "engine/sys/src/clock.rs",
        "engine/sys/src/space.rs",
    ];
    let mut complaints = Complaints::default();
    for file in rust_files() {
        let is_product = ["core/", "engine/", "doors/", "cli/"]
            .iter()
            .any(|room| file.path.starts_with(room));
        if !is_product || dates.contains(&file.path.as_str()) {
            continue;
        }
        let code = without_tests(&code_only(&file.text));
        for (number, line) in code.lines().enumerate() {
            if line.contains("SystemTime::now") || line.contains("Realtime") {
                complaints.add(format!(
                    "{}:{}: the time of day; Instant never goes back",
                    file.path,
                    number + 1
                ));
            }
        }
    }
    complaints.none();
}

#[test]
fn no_file_names_the_machine_it_was_written_on() {
    // Pieces, so that this file does not complain about itself.
    let machine_paths = [
        concat!("/wo", "rk/"),
        concat!("/ro", "ot/"),
        concat!("/ho", "me/"),
        concat!("/tmp/", "target-"),
        concat!("/tmp/", "brief"),
    ];
    let mut complaints = Complaints::default();
    for file in source_files() {
        for (number, line) in file.text.lines().enumerate() {
            for path in machine_paths {
                if line.contains(path) {
                    complaints.add(format!("{}:{}: {path}", file.path, number + 1));
                }
            }
        }
    }
    complaints.none();
}

#[test]
fn every_crate_takes_the_strict_lints() {
    let mut complaints = Complaints::default();
    for file in source_files() {
        if !file.path.ends_with("Cargo.toml") || file.path == "Cargo.toml" {
            continue;
        }
        if !file.text.contains("[lints]\nworkspace = true") {
            complaints.add(format!("{}: lacks [lints] workspace = true", file.path));
        }
    }
    complaints.none();
}

#[test]
fn links_between_documents_lead_somewhere() {
    let mut complaints = Complaints::default();
    for file in source_files().iter().filter(|file| file.is("md")) {
        let folder = root().join(&file.path);
        let folder = folder.parent().expect("a file is in a folder");
        for (number, line) in file.text.lines().enumerate() {
            for target in link_targets(line) {
                let path = target.split('#').next().unwrap_or_default();
                if path.is_empty() || path.contains("://") || path.starts_with("mailto:") {
                    continue;
                }
                if !folder.join(path).exists() {
                    complaints.add(format!(
                        "{}:{}: leads to {path}, which is not there",
                        file.path,
                        number + 1
                    ));
                }
            }
        }
    }
    complaints.none();
}

/// The targets in `](…)`.
fn link_targets(line: &str) -> Vec<&str> {
    line.match_indices("](")
        .filter_map(|(at, _)| {
            let rest = &line[at + 2..];
            Some(&rest[..rest.find(')')?])
        })
        .collect()
}

/// A page; signs of tables and lists count. A decision whose rules need more has them in `detail`.
const DECISION_WORDS_MAX: usize = 620;

#[test]
fn every_decision_has_a_number_of_its_own_and_fits_a_page() {
    let mut complaints = Complaints::default();
    let mut numbers = std::collections::BTreeMap::new();
    let mut belonging = Vec::new();
    for file in source_files() {
        let Some(name) = file.path.strip_prefix("docs/decisions/") else {
            continue;
        };
        // The measurements of a page, and its rules in detail, have its number.
        let (folder, name) = name.rsplit_once('/').unwrap_or(("", name));
        let number: String = name.chars().take_while(char::is_ascii_digit).collect();
        if number.len() != 4 {
            complaints.add(format!("{}: starts with no four-digit number", file.path));
        }
        if !folder.is_empty() {
            belonging.push((file.path.clone(), number));
            continue;
        }
        if let Some(other) = numbers.insert(number, file.path.clone()) {
            complaints.add(format!("{} and {other} share a number", file.path));
        }
        let lines = file.text.lines().count();
        if lines > 80 {
            complaints.add(format!("{}: {lines} lines are more than a page", file.path));
        }
        let words = file.text.split_whitespace().count();
        if words > DECISION_WORDS_MAX {
            complaints.add(format!("{}: {words} words are more than a page", file.path));
        }
    }
    for (path, number) in belonging {
        if !numbers.contains_key(&number) {
            complaints.add(format!("{path}: no decision has the number {number}"));
        }
    }
    complaints.none();
}

/// Lines whose prose starts a sentence with a headless "who" clause. May only fall.
const HEADLESS_WHO_MAX: usize = 0;
/// Lines whose prose starts a sentence with a headless "what" clause. May only fall.
const HEADLESS_WHAT_MAX: usize = 2;
/// Lines of comments with one of these words anywhere: mostly a clause that stands for a noun. An
/// indirect question is one, too, and may stay. May only fall.
const CLAUSE_WORDS_MAX: usize = 109;
/// Lines whose prose uses a personal pronoun for a program, client or device. May only fall.
const PRONOUN_MAX: usize = 0;

#[test]
fn comments_are_wrapped() {
    let mut complaints = Complaints::default();
    for file in rust_files() {
        let mut is_drawn = false;
        for (line, number) in file.text.lines().zip(1..) {
            let text = line.trim_start();
            let columns = line.chars().count();
            let is_comment = text.starts_with("//");
            is_drawn &= is_comment;
            if text.contains("```") {
                is_drawn = !is_drawn;
            }
            // Links and tables cannot be broken either.
            let is_prose = is_comment && !is_drawn && !text.contains("http") && !text.contains('|');
            if is_prose && columns > COMMENT_COLUMNS_MAX {
                complaints.add(format!(
                    "{}:{number}: a comment of {columns} columns; wrap it at {COMMENT_COLUMNS_MAX}",
                    file.path
                ));
            }
        }
    }
    complaints.none();
}

/// Comments and string literals of a file; every other character is a blank.
fn prose_only(text: &str) -> String {
    text.chars()
        .zip(code_only(text).chars())
        .map(|(full, code)| if full == code { ' ' } else { full })
        .zip(text.chars())
        .map(|(prose, full)| if full == '\n' { '\n' } else { prose })
        .collect()
}

/// A sentence in this line starts with one of the words. A question is not a clause.
fn starts_a_sentence_with(line: &str, words: &[&str]) -> bool {
    line.split(['.', ':', ';', '?'])
        .zip(line.split_inclusive(['.', ':', ';', '?']))
        .filter(|(_, ended)| !ended.ends_with('?'))
        .filter_map(|(sentence, _)| {
            let sentence = sentence.trim_start_matches(|c: char| !c.is_alphanumeric());
            sentence.split(|c: char| !c.is_alphanumeric()).next()
        })
        .any(|first| words.contains(&first))
}

#[test]
fn programs_that_run_alone_say_so_in_one_way() {
    // tests/programs.sh finds them by the beginning of this line.
    let mut complaints = Complaints::default();
    for file in rust_files() {
        let headers = file.text.lines().filter(|line| line.starts_with("//!"));
        for line in headers.filter(|line| {
            line.contains("programs.sh") || line.to_lowercase().contains("runs alone")
        }) {
            if !line.starts_with("//! Runs alone (tests/programs.sh): ") {
                complaints.add(format!(
                    "{}: `{line}`; expected `//! Runs alone (tests/programs.sh): …`",
                    file.path
                ));
            }
        }
    }
    complaints.none();
}

#[test]
fn the_worst_english_only_falls() {
    // Rules 1 and 2 of docs/style.md. Pieces, so that this file does not count itself.
    let who = [concat!("W", "ho"), concat!("W", "hoever")];
    let what = [concat!("W", "hat"), concat!("W", "hatever")];
    let pronouns = [concat!("h", "e"), concat!("h", "is"), concat!("h", "im")];
    let clauses = ["what", "whatever", "who", "whoever"];
    let mut counts = [0; 4];
    for file in rust_files() {
        let comments = file.text.lines().map(str::trim_start);
        counts[3] += comments
            .filter(|line| line.starts_with("//"))
            .map(str::to_lowercase)
            .filter(|line| clauses.iter().any(|word| has_word(line, word)))
            .count();
        for line in prose_only(&file.text).lines() {
            counts[0] += usize::from(starts_a_sentence_with(line, &who));
            counts[1] += usize::from(starts_a_sentence_with(line, &what));
            counts[2] += usize::from(pronouns.iter().any(|word| has_word(line, word)));
        }
    }
    let limits = [
        ("HEADLESS_WHO_MAX", HEADLESS_WHO_MAX),
        ("HEADLESS_WHAT_MAX", HEADLESS_WHAT_MAX),
        ("PRONOUN_MAX", PRONOUN_MAX),
        ("CLAUSE_WORDS_MAX", CLAUSE_WORDS_MAX),
    ];
    let mut complaints = Complaints::default();
    for ((name, limit), count) in limits.into_iter().zip(counts) {
        if count > limit {
            complaints.add(format!(
                "{count} lines, more than {name} = {limit}; name the subject as docs/style.md says"
            ));
        } else if count < limit {
            complaints.add(format!(
                "{count} lines, fewer than {name} = {limit}; lower it to {count}"
            ));
        }
    }
    complaints.none();
}
