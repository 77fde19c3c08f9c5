// SPDX-License-Identifier: Apache-2.0
//! `rushes lab`: becomes the program `rushes-lab` beside this one.
//!
//! A separate program, as git does it, so that the server links neither FUSE nor an SMB client.

use crate::lab_words::Words;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

const PROGRAM: &str = "rushes-lab";

fn program() -> PathBuf {
    let beside = beside_this_program().filter(|path| path.exists());
    beside.unwrap_or_else(|| PathBuf::from(PROGRAM))
}

/// Its commands and options, for completions.
pub(crate) fn words() -> Result<Words, String> {
    let program = program();
    let said = Command::new(&program).arg("words").output();
    let said = said.map_err(|error| format!("{} cannot be started: {error}", program.display()))?;
    Words::read(&said.stdout).map_err(|error| {
        format!(
            "{} does not list its commands ({error}); expected the one of this release",
            program.display()
        )
    })
}

pub(crate) fn run(args: &[OsString]) -> Result<ExitCode, String> {
    let beside = beside_this_program();
    let program = program();
    let error = Command::new(&program).args(args).exec();
    Err(format!(
        "{} cannot be started: {error}; expected it beside {} or in PATH (`make build` makes both)",
        program.display(),
        beside.map_or_else(
            || String::from("this program"),
            |path| path.with_file_name("rushes").display().to_string()
        )
    ))
}

fn beside_this_program() -> Option<PathBuf> {
    Some(std::env::current_exe().ok()?.with_file_name(PROGRAM))
}
