// SPDX-License-Identifier: Apache-2.0
//! ARCHITECTURE.md is held to the code: its tables of arrows equal the real graphs.
//!
//! Equal, not merely "at most": an arrow that nobody uses any more must leave the table, or the
//! table stops being a map.

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand};
use rushes_tests::rust_text::{code_only, has_word, path_heads, without_tests, word_lines};
use rushes_tests::tree::{SourceFile, root, source_files};
use std::collections::{BTreeMap, BTreeSet};

/// Importer → imported.
type Arrows = BTreeMap<String, BTreeSet<String>>;

/// The rows of the table under `marker`: names in backquotes of the first cell → those of the last.
fn table(marker: &str) -> Arrows {
    let text = std::fs::read_to_string(root().join("ARCHITECTURE.md"))
        .expect("ARCHITECTURE.md stands at the top");
    let mut lines = text.lines().skip_while(|line| !line.contains(marker));
    assert!(
        lines.next().is_some(),
        "ARCHITECTURE.md has no line with {marker}"
    );
    let mut arrows = Arrows::new();
    for line in lines
        .skip_while(|line| !line.starts_with('|'))
        .take_while(|line| line.starts_with('|'))
    {
        let cells: Vec<&str> = line.trim_matches('|').split('|').collect();
        let (Some(first), Some(last)) = (cells.first(), cells.last()) else {
            continue;
        };
        for from in names(first) {
            arrows.insert(from, names(last).into_iter().collect());
        }
    }
    assert!(
        !arrows.is_empty(),
        "the table under {marker} has no row with a `name`"
    );
    arrows
}

/// The names between backquotes.
fn names(cell: &str) -> Vec<String> {
    cell.split('`')
        .skip(1)
        .step_by(2)
        .map(str::to_owned)
        .collect()
}

fn metadata() -> Metadata {
    MetadataCommand::new()
        .manifest_path(root().join("Cargo.toml"))
        .no_deps()
        .exec()
        .expect("cargo metadata reads the workspace")
}

/// The imports of each crate inside the workspace. Dev-dependencies count: tests are code as well.
fn workspace_arrows(metadata: &Metadata) -> Arrows {
    let members = metadata.workspace_packages();
    let ours: BTreeSet<String> = members.iter().map(|p| p.name.to_string()).collect();
    members
        .iter()
        .map(|package| {
            let imported = package
                .dependencies
                .iter()
                .map(|d| d.name.clone())
                .filter(|name| ours.contains(name))
                .collect();
            (package.name.to_string(), imported)
        })
        .collect()
}

/// Panics with one line for every arrow that only one side has.
fn assert_same(what: &str, table: &Arrows, real: &Arrows) {
    let flat = |arrows: &Arrows| -> BTreeSet<String> {
        arrows
            .iter()
            .flat_map(|(from, to)| {
                let node = std::iter::once(from.clone());
                node.chain(to.iter().map(move |t| format!("{from} → {t}")))
            })
            .collect()
    };
    let (table, real) = (flat(table), flat(real));
    let undocumented: Vec<_> = real.difference(&table).collect();
    let stale: Vec<_> = table.difference(&real).collect();
    assert!(
        undocumented.is_empty() && stale.is_empty(),
        "{what}: ARCHITECTURE.md and the code differ.\n\
         In the code only (not allowed, or write a decision and add them to the table): {undocumented:#?}\n\
         In the table only (take them out): {stale:#?}"
    );
}

#[test]
fn crates_import_what_the_table_says() {
    assert_same(
        "crates",
        &table("<!-- table: crates -->"),
        &workspace_arrows(&metadata()),
    );
}

#[test]
fn nobody_imports_sim_lab_or_tests() {
    for (from, imported) in workspace_arrows(&metadata()) {
        for forbidden in ["rushes-sim", "rushes-lab", "rushes-tests"] {
            assert!(!imported.contains(forbidden), "{from} imports {forbidden}");
        }
    }
}

#[test]
fn only_lab_and_tests_import_the_kit() {
    for (from, imported) in workspace_arrows(&metadata()) {
        assert!(
            !imported.contains("rushes-kit") || ["rushes-lab", "rushes-tests"].contains(&&*from),
            "{from} imports rushes-kit, which is for the lab and the tests"
        );
    }
}

/// Files of one crate, below its `src/`.
fn sources_of<'a>(files: &'a [SourceFile], folder: &str) -> Vec<(&'a str, &'a SourceFile)> {
    let found: Vec<_> = files
        .iter()
        .filter(|file| file.is("rs"))
        .filter_map(|file| Some((file.path.strip_prefix(folder)?, file)))
        .collect();
    assert!(!found.is_empty(), "no Rust file below {folder}");
    found
}

#[test]
fn modules_of_core_import_what_the_table_says() {
    let files = source_files();
    let sources: Vec<_> = sources_of(&files, "core/src/")
        .into_iter()
        .map(|(below, file)| (top_module(below), below, file))
        .filter(|(module, ..)| *module != "lib")
        .collect();
    let modules: BTreeSet<&str> = sources.iter().map(|(module, ..)| *module).collect();
    let mut real: Arrows = BTreeMap::new();
    for (module, below, file) in &sources {
        let code = without_tests(&code_only(&file.text));
        let up_to_root = "super::".repeat(depth(below));
        let imported = path_heads(&code, "crate::")
            .into_iter()
            .chain(path_heads(&code, &up_to_root))
            .filter(|name| modules.contains(name.as_str()) && name != module);
        real.entry((*module).to_owned())
            .or_default()
            .extend(imported);
    }
    assert_same(
        "modules of core",
        &table("<!-- table: modules of core -->"),
        &real,
    );
}

/// `sched/model.rs` is of `sched`, `units.rs` of `units`.
fn top_module(below: &str) -> &str {
    below
        .split('/')
        .next()
        .unwrap_or(below)
        .trim_end_matches(".rs")
}

/// How many `super::` lead from a file of core to its root.
fn depth(below: &str) -> usize {
    let folders = below.matches('/').count();
    if below.ends_with("mod.rs") {
        folders
    } else {
        folders + 1
    }
}

#[test]
fn modules_of_core_point_one_way() {
    let mut left = table("<!-- table: modules of core -->");
    while !left.is_empty() {
        let free: Vec<String> = left
            .iter()
            .filter(|(_, to)| to.iter().all(|t| !left.contains_key(t)))
            .map(|(from, _)| from.clone())
            .collect();
        assert!(
            !free.is_empty(),
            "these modules of core import each other in a circle: {:?}",
            left.keys()
        );
        for module in free {
            left.remove(&module);
        }
    }
}

#[test]
fn core_is_pure() {
    let metadata = metadata();
    let core = metadata
        .workspace_packages()
        .into_iter()
        .find(|p| p.name.as_str() == "rushes-core")
        .expect("rushes-core is in the workspace");
    let needed: Vec<&str> = core
        .dependencies
        .iter()
        .filter(|d| d.kind != DependencyKind::Development)
        .map(|d| d.name.as_str())
        .collect();
    assert!(needed.is_empty(), "core depends on {needed:?}");

    let files = source_files();
    let sources = sources_of(&files, "core/");
    let lib = &sources
        .iter()
        .find(|(below, _)| *below == "src/lib.rs")
        .expect("core/src/lib.rs")
        .1;
    let head = code_only(&lib.text);
    assert!(
        head.contains("#![no_std]"),
        "core/src/lib.rs lost #![no_std]"
    );
    assert!(
        head.contains("#![forbid(unsafe_code)]"),
        "core/src/lib.rs lost #![forbid(unsafe_code)]"
    );
    for (below, file) in sources {
        if !below.starts_with("src/") {
            continue;
        }
        let code = without_tests(&code_only(&file.text));
        let lines: Vec<usize> = word_lines(&code, "std").collect();
        assert!(
            lines.is_empty(),
            "core/{below}:{lines:?}: std in core; clock, files, threads and chance arrive as arguments"
        );
    }
}

#[test]
fn unsafe_code_is_in_two_crates_only() {
    for file in source_files().iter().filter(|file| file.is("rs")) {
        if file.path.starts_with("engine/sys/") || file.path.starts_with("engine/shm/") {
            continue;
        }
        let code = code_only(&file.text);
        assert!(
            !has_word(&code, "unsafe"),
            "{}:{:?}: unsafe outside engine/sys and engine/shm; put a safe wrapper there",
            file.path,
            word_lines(&code, "unsafe").collect::<Vec<_>>()
        );
    }
}

#[test]
fn c_is_in_the_smb_door_only() {
    for file in source_files()
        .iter()
        .filter(|file| file.is("c") || file.is("h"))
    {
        assert!(
            file.path.starts_with("doors/smb/")
                || file.path == "engine/shm/include/rushes_client.h",
            "{}: C belongs into doors/smb",
            file.path
        );
    }
}

#[test]
fn every_room_of_the_map_exists() {
    let text = std::fs::read_to_string(root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    let mut seen = 0;
    for line in text.lines().filter(|line| line.starts_with("### ")) {
        for room in names(line).into_iter().filter(|name| name.ends_with('/')) {
            assert!(
                root().join(&room).is_dir(),
                "ARCHITECTURE.md describes {room}, which is not there"
            );
            seen += 1;
        }
    }
    assert!(
        seen > 8,
        "only {seen} rooms found in the headings of ARCHITECTURE.md"
    );
}
