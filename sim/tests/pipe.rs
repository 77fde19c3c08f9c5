// SPDX-License-Identifier: Apache-2.0
//! A reader of the simulator's output may stop when it has seen enough.

use std::process::{Command, Stdio};

#[test]
fn a_reader_who_leaves_ends_it_without_a_word() {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let output = Command::new(env!("CARGO_BIN_EXE_rushes-sim"))
        .args(["run", "all", "--print"])
        .stdout(Stdio::from(writer))
        .stderr(Stdio::piped())
        .output()
        .expect("it starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert_eq!(said, "");
}
