// SPDX-License-Identifier: Apache-2.0
//! docs/reference is held to the code: each page names every field that a program prints or reads.

use rushes_tests::tree::root;
use std::collections::BTreeSet;

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Names between backquotes that could be a field or a key.
fn described(text: &str) -> BTreeSet<String> {
    text.split('`')
        .skip(1)
        .step_by(2)
        .map(str::to_owned)
        .collect()
}

/// `pub name: Type` of every struct in a source file.
fn public_fields(source: &str) -> BTreeSet<String> {
    source
        .lines()
        .filter_map(|line| line.trim().strip_prefix("pub ")?.split_once(':'))
        .map(|(name, _)| name.to_owned())
        .filter(|name| name.chars().all(|c| c.is_ascii_lowercase() || c == '_'))
        .collect()
}

#[test]
fn every_field_of_status_is_described() {
    let fields = public_fields(&read("engine/control/src/status.rs"));
    assert!(fields.len() > 60, "only {} fields found", fields.len());
    let described = described(&read("docs/reference/control.md"));
    let missing: Vec<_> = fields.difference(&described).collect();
    assert!(
        missing.is_empty(),
        "docs/reference/control.md does not describe {missing:?}"
    );
}

#[test]
fn every_field_of_a_lab_report_is_described() {
    let described = described(&read("docs/reference/lab-json.md"));
    for (path, name) in [
        ("lab/src/reports/report.rs", "Report"),
        ("lab/src/reports/report.rs", "StreamRow"),
        ("lab/src/reports/report.rs", "Timeline"),
        ("lab/src/edit/report.rs", "EditReport"),
        ("lab/src/edit/report.rs", "EditRun"),
        ("lab/src/edit/report.rs", "KindRow"),
        ("lab/src/edit/report.rs", "ClientRow"),
        ("lab/src/edit/report.rs", "MedianRow"),
        ("lab/src/experiments/fill.rs", "FillReport"),
        ("lab/src/reports/written.rs", "WriteReport"),
        ("lab/src/reports/written.rs", "FileRow"),
        ("lab/src/experiments/scatter.rs", "ScatterReport"),
        ("lab/src/experiments/throughput.rs", "ThroughputReport"),
        ("lab/src/experiments/most.rs", "MostReport"),
        ("lab/src/experiments/metadata.rs", "MetadataReport"),
        ("lab/src/experiments/metadata.rs", "RateRow"),
        ("lab/src/experiments/strokes.rs", "StrokesReport"),
        ("lab/src/experiments/strokes.rs", "StrokeRow"),
        ("lab/src/power/report.rs", "PowerReport"),
        ("lab/src/power/report.rs", "Violation"),
        ("lab/src/power/check.rs", "Finding"),
    ] {
        let source = read(path);
        let start = source
            .find(&format!("pub struct {name} {{"))
            .unwrap_or_else(|| panic!("{path} has no struct {name}"));
        let end = source[start..]
            .find("\n}")
            .map_or(source.len(), |end| start + end);
        let mut fields = public_fields(&source[start..end]);
        // The fields of the finding stand among those of the violation.
        fields.remove("finding");
        assert!(!fields.is_empty(), "no field of {name} found");
        let missing: Vec<_> = fields.difference(&described).collect();
        assert!(
            missing.is_empty(),
            "docs/reference/lab-json.md does not describe {missing:?} of {name}"
        );
    }
}

/// Structs that are printed as JSON, each with all its fields, public or not.
fn printed(source: &str) -> Vec<(String, BTreeSet<String>)> {
    let mut found = Vec::new();
    let derives = source.match_indices("#[derive(").map(|(at, _)| at);
    for at in derives {
        let rest = &source[at..];
        let derived = rest.split(']').next().unwrap_or_default();
        let Some((before, body)) = rest.split_once(" {\n") else {
            continue;
        };
        let Some((_, name)) = before.rsplit_once("struct ") else {
            continue;
        };
        if !derived.contains("Serialize") || before.matches("#[derive(").count() > 1 {
            continue;
        }
        let body = body.split("\n}").next().unwrap_or_default();
        let all_public: String = body
            .lines()
            .map(|line| line.trim().replace("pub(crate) ", "").replace("pub ", ""))
            .filter(|line| !line.starts_with("//") && !line.starts_with("#["))
            .map(|line| format!("pub {line}\n"))
            .collect();
        found.push((name.to_owned(), public_fields(&all_public)));
    }
    found
}

#[test]
fn every_field_of_the_pool_commands_is_described() {
    let text = read("docs/reference/pool-json.md");
    let folder = root().join("cli/src/pool");
    let mut paths: Vec<String> = std::fs::read_dir(folder)
        .expect("the command has sources")
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .map(|name| format!("cli/src/pool/{name}"))
        .collect();
    // Its structs are printed as they are.
    paths.push(String::from("engine/pool/src/failed.rs"));
    let mut struct_count = 0;
    for path in paths {
        for (name, fields) in printed(&read(&path)) {
            let command = match name.as_str() {
                "PoolReport" | "MemberReport" => "create",
                "FileReport" | "SegmentReport" | "ObjectReport" => "where",
                "DestroyReport" => "destroy",
                "MountReport" if path.ends_with("pool/mount.rs") => "mount",
                "FsckReport" | "MissingReport" | "FindingReport" => "fsck",
                "RescueReport" => "rescue",
                "AddReport" | "RemoveReport" => "add",
                "DrainReport" => "drain",
                "RebalanceReport" | "FullerReport" | "LeftOutReport" | "Failure" => "rebalance",
                "DefragReport" | "FragmentsReport" => "defrag",
                "StatusReport" | "MountReport" | "WorkReport" | "TidyReport" | "TidiedReport"
                | "MovedReport" | "MemberStatusReport" => "status",
                "PolicyReport" | "RuleReport" | "ClassReport" => "policy",
                "ExportReport" => "export nfs",
                // A list of the above, which is printed by its parts.
                "Failed" => continue,
                other => {
                    panic!("{path}: which section of docs/reference/pool-json.md has {other}?")
                }
            };
            assert!(!fields.is_empty(), "no field of {name} found in {path}");
            let heading = format!("`rushes pool {command} --json`");
            let section = text
                .split("\n## ")
                .find(|section| section.starts_with(&heading))
                .unwrap_or_else(|| panic!("no section {heading}"));
            let described = described(section);
            let missing: Vec<_> = fields.difference(&described).collect();
            assert!(
                missing.is_empty(),
                "docs/reference/pool-json.md does not describe {missing:?} of {name} under {heading}"
            );
            struct_count += 1;
        }
    }
    assert!(struct_count >= 26, "only {struct_count} structs found");
}

#[test]
fn every_field_of_what_is_left_in_lanes_is_described() {
    let fields = public_fields(&read("engine/daemon/src/lanes_left.rs"));
    assert!(fields.len() > 15, "only {} fields found", fields.len());
    let described = described(&read("docs/reference/recover-json.md"));
    let missing: Vec<_> = fields.difference(&described).collect();
    assert!(
        missing.is_empty(),
        "docs/reference/recover-json.md does not describe {missing:?}"
    );
}

#[test]
fn every_promise_can_be_measured() {
    let figures = read("bench/figures.py");
    let promises = read("bench/PROMISES.md");
    let mut seen = 0;
    for word in described(&promises) {
        let Some(name) = word.strip_prefix("make figure-") else {
            continue;
        };
        let function = format!("def figure_{}(", name.replace('-', "_"));
        assert!(
            figures.contains(&function),
            "bench/PROMISES.md names `make figure-{name}`, bench/figures.py does not know it"
        );
        seen += 1;
    }
    assert!(seen > 10, "only {seen} figures found in bench/PROMISES.md");
    // And PROMISES.md names each figure that can be measured, as a promise or as only reported.
    let functions = figures.split("\ndef figure_").skip(1);
    for name in functions.filter_map(|text| text.split('(').next()) {
        let name = name.replace('_', "-");
        assert!(
            promises.contains(&format!("`make figure-{name}`")),
            "bench/figures.py knows `make figure-{name}`, bench/PROMISES.md does not name it"
        );
    }
}

/// The first cells of the tables under `## heading`.
fn keys_under(text: &str, heading: &str) -> BTreeSet<String> {
    let section = text
        .split("\n## ")
        .find(|section| section.starts_with(heading))
        .unwrap_or_else(|| panic!("no section {heading}"));
    section
        .lines()
        .filter(|line| line.starts_with("| `"))
        .filter_map(|line| line.split('`').nth(1))
        .map(str::to_owned)
        .collect()
}

/// The keys that the reader of one section asks for, as string literals.
fn keys_read_by(source: &str, function: &str) -> BTreeSet<String> {
    let start = source
        .find(&format!("fn {function}("))
        .unwrap_or_else(|| panic!("the configuration reader has no fn {function}"));
    let end = source[start..]
        .find("\n}\n")
        .map_or(source.len(), |end| start + end);
    let body: String = source[start..end].split_whitespace().collect();
    let mut keys = BTreeSet::new();
    for (at, _) in body.match_indices("reader,\"") {
        let rest = &body[at + "reader,\"".len()..];
        keys.extend(rest.split('"').next().map(str::to_owned));
    }
    for (at, _) in body.match_indices("&mutsection,\"") {
        let rest = &body[at + "&mutsection,\"".len()..];
        keys.extend(rest.split('"').next().map(str::to_owned));
    }
    assert!(!keys.is_empty(), "no key found in fn {function}");
    keys
}

#[test]
fn every_key_of_the_configuration_is_described_and_no_other() {
    let source = read("engine/daemon/src/config/mod.rs");
    let reference = read("docs/reference/config.md");
    for (heading, functions) in [
        ("[cache]", &["read_cache"][..]),
        ("[server]", &["read_server", "read_policy"]),
        ("[write]", &["read_write"]),
        ("[[share]]", &["read_shares"]),
        ("[[rule]]", &["read_rule"]),
    ] {
        let read: BTreeSet<String> = functions
            .iter()
            .flat_map(|function| keys_read_by(&source, function))
            .collect();
        assert_eq!(
            keys_under(&reference, heading),
            read,
            "left: docs/reference/config.md under {heading}; right: the reader"
        );
    }
}

#[test]
fn every_message_and_op_of_a_session_is_described_with_its_number() {
    let source = read("core/src/format/mod.rs");
    let reference = read("docs/reference/session.md");
    let mut seen = 0;
    for module in ["pub mod message", "pub mod op"] {
        let start = source.find(module).expect("format.rs has the module");
        let end = source[start..].find("\n}").expect("a module ends") + start;
        for line in source[start..end].lines() {
            let Some(rest) = line.trim().strip_prefix("pub const ") else {
                continue;
            };
            let (name, value) = rest.split_once(": u32 = ").expect("numbers are u32");
            let row = format!("`{name}` ({})", value.trim_end_matches(';'));
            assert!(
                reference.contains(&row),
                "docs/reference/session.md lacks a row {row}"
            );
            seen += 1;
        }
    }
    assert!(seen >= 9, "only {seen} messages and ops found");
    let version = source
        .lines()
        .find_map(|line| line.strip_prefix("pub const VERSION: u32 = "))
        .expect("format.rs has a version")
        .trim_end_matches(';');
    assert!(reference.contains(&format!("Version **{version}**")));
}
