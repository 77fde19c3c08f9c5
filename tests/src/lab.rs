// SPDX-License-Identifier: Apache-2.0
//! Runs of `rushes lab` from end to end, small.

use crate::disk::Disk;
use crate::needs::{self, Need, all_there};
use crate::scratch::Scratch;
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

/// Whether the machine has all that a run through smbd needs. If not, names the missing things.
pub fn is_all_there() -> bool {
    let programs = ["rushes", "rushes-lab", "smbd", "pdbedit", "mkfs.ext4"];
    let needed: Vec<Need<'_>> = [Need::Root, Need::Module]
        .into_iter()
        .chain(programs.map(Need::Program))
        .collect();
    all_there(&needed)
}

/// `rushes lab WORDS… --json` with its files on this disk, and its folders in `rooms`.
pub fn run(scratch: &Scratch, disk: &Disk, rooms: &Path, words: &[&str]) -> Output {
    let module = needs::module().expect("checked before");
    Command::new(needs::path_of("rushes"))
        .arg("lab")
        .args(words)
        .arg("--json")
        .arg("--disk")
        .arg(disk.path())
        .arg("--module")
        .arg(module)
        .env("TMPDIR", rooms)
        .current_dir(scratch.path())
        .output()
        .expect("rushes starts")
}

/// The JSON object that a run printed.
///
/// Panics   when the run failed
pub fn report_of(output: &Output, context: &[&str]) -> Value {
    assert!(
        output.status.success(),
        "{context:?}: {}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8_lossy(&output.stdout);
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{context:?}: {error} in {text}"))
}
