// SPDX-License-Identifier: Apache-2.0
//! The files of the project, as committed.
//!
//! Git is asked, so that scratch files and build output do not matter. Without git (a source
//! archive) the folder is walked instead, leaving out what `.gitignore` names at the top.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The top of the source tree.
pub fn root() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests
        .parent()
        .expect("tests/ is below the root")
        .to_path_buf()
}

/// One text file of the project.
#[derive(Clone, Debug)]
pub struct SourceFile {
    /// Below the root, with forward slashes.
    pub path: String,
    /// Its contents.
    pub text: String,
}

impl SourceFile {
    /// Whether the name ends in `.extension`.
    pub fn is(&self, extension: &str) -> bool {
        Path::new(&self.path)
            .extension()
            .is_some_and(|e| e == extension)
    }
}

/// Every text file of the project, in order of path. Binary files (not UTF-8) are left out.
pub fn source_files() -> Vec<SourceFile> {
    let root = root();
    let mut paths = tracked(&root).unwrap_or_else(|| walked(&root));
    paths.sort();
    assert!(
        paths.len() > 20,
        "only {} files found below {}: the search itself is broken",
        paths.len(),
        root.display()
    );
    paths
        .into_iter()
        .filter_map(|path| {
            let text = fs::read_to_string(root.join(&path)).ok()?;
            Some(SourceFile { path, text })
        })
        .collect()
}

/// Paths that git tracks, or None without git.
fn tracked(root: &Path) -> Option<Vec<String>> {
    let output = Command::new("git")
        .args(["-C"])
        .arg(root)
        .args(["ls-files", "-z"])
        .output()
        .ok()?;
    if !output.status.success() {
        return None;
    }
    let listed = String::from_utf8(output.stdout).ok()?;
    let paths: Vec<String> = listed
        .split('\0')
        .filter(|path| !path.is_empty())
        .map(str::to_owned)
        .collect();
    (!paths.is_empty()).then_some(paths)
}

/// Paths found by walking.
fn walked(root: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)
            .expect("source folder is readable")
            .flatten()
        {
            let path = entry.path();
            let name = entry.file_name();
            let top = folder == root;
            if top && (name == "target" || name == "build" || name == ".git") {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else if let Ok(below) = path.strip_prefix(root) {
                found.push(below.to_string_lossy().into_owned());
            }
        }
    }
    found
}
