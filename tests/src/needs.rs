// SPDX-License-Identifier: Apache-2.0
//! The needs of a test, and how it skips aloud on a machine that lacks one.
//!
//! Started by hand, a test that lacks something says so and passes. Under `make test`
//! (`RUSHES_TEST_ALL=1`) it fails instead: a pass there means that everything ran.

use std::io::Write;
use std::path::{Path, PathBuf};

/// Where a program is, beside the test's own target folder or in PATH.
///
/// Ours are looked for in the release build first, which is what `make build` makes.
pub fn program(name: &str) -> Option<PathBuf> {
    let ours = target_folders()
        .into_iter()
        .flat_map(|target| [target.join("release"), target.join("debug")]);
    let system = std::env::var_os("PATH").unwrap_or_default();
    let system: Vec<PathBuf> = std::env::split_paths(&system)
        .chain([PathBuf::from("/usr/sbin"), PathBuf::from("/sbin")])
        .collect();
    ours.chain(system)
        .map(|folder| folder.join(name))
        .find(|path| path.is_file())
}

/// The target folder this test was built into, then the usual one.
fn target_folders() -> Vec<PathBuf> {
    // …/target/release/smb-fsx or …/target/debug/deps/test-0123
    let exe = std::env::current_exe().unwrap_or_default();
    exe.ancestors()
        .skip(2)
        .take(2)
        .map(Path::to_path_buf)
        .chain([crate::tree::root().join("target")])
        .collect()
}

/// Where what is built beside programs lies, and what is kept of tests.
pub fn build_folder() -> PathBuf {
    std::env::var_os("RUSHES_BUILD_DIR")
        .map_or_else(|| crate::tree::root().join("build"), PathBuf::from)
}

/// The Samba module that `doors/smb/build.sh` builds.
pub fn module() -> Option<PathBuf> {
    let path = build_folder().join("rushes.so");
    path.is_file().then_some(path)
}

/// One thing that may be missing.
#[derive(Clone, Copy, Debug)]
pub enum Need<'a> {
    /// uid 0.
    Root,
    /// A program, ours or the system's.
    Program(&'a str),
    /// The built Samba module.
    Module,
}

impl Need<'_> {
    /// None when it is there; else what is missing and how to get it.
    fn missing(&self) -> Option<String> {
        match self {
            Need::Root => {
                let is_root = std::fs::read_to_string("/proc/self/status")
                    .unwrap_or_default()
                    .lines()
                    .any(|line| line.starts_with("Uid:\t0\t"));
                (!is_root).then(|| "uid 0 (it mounts disks and runs smbd)".to_owned())
            }
            Need::Program(name) => program(name)
                .is_none()
                .then(|| format!("the program {name} (make setup build)")),
            Need::Module => module()
                .is_none()
                .then(|| "the Samba module (make build)".to_owned()),
        }
    }
}

/// Whether everything is there. If not, says what is missing.
///
/// Panics   when something is missing and `RUSHES_TEST_ALL` is 1
pub fn all_there(needs: &[Need<'_>]) -> bool {
    let missing: Vec<String> = needs.iter().filter_map(Need::missing).collect();
    if missing.is_empty() {
        return true;
    }
    skip(&format!("this test needs {}", missing.join(", ")));
    false
}

/// Say aloud that a test is skipped, and why; it then returns.
///
/// Panics   when `RUSHES_TEST_ALL` is 1
pub fn skip(sentence: &str) {
    assert!(
        std::env::var_os("RUSHES_TEST_ALL").is_none_or(|value| value != "1"),
        "{sentence}; it may not be skipped under RUSHES_TEST_ALL=1"
    );
    // Past libtest, which keeps what passing tests print to itself.
    let _ = writeln!(std::io::stderr(), "SKIPPED: {sentence}");
}

/// A program that must be there because [`all_there`] said so.
pub fn path_of(name: &str) -> PathBuf {
    program(name).unwrap_or_else(|| Path::new(name).to_path_buf())
}
