// SPDX-License-Identifier: Apache-2.0
//! Man pages and completions, made from the table of arguments.

use crate::args::Cli;
use clap::CommandFactory;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

/// The page `rushes(1)` on standard output, or a page for each command into `out`.
pub(crate) fn man(out: Option<&Path>) -> Result<ExitCode, String> {
    let command = Cli::command();
    let Some(out) = out else {
        let mut page = Vec::new();
        clap_mangen::Man::new(command)
            .render(&mut page)
            .and_then(|()| io::stdout().write_all(&page))
            .map_err(|error| format!("the man page cannot be written: {error}"))?;
        return Ok(ExitCode::SUCCESS);
    };
    std::fs::create_dir_all(out)
        .and_then(|()| clap_mangen::generate_to(command, out))
        .map_err(|error| {
            format!(
                "man pages cannot be written into {}: {error}; expected a folder that can be written",
                out.display()
            )
        })?;
    Ok(ExitCode::SUCCESS)
}

/// Completions on standard output.
pub(crate) fn completions(shell: clap_complete::Shell) -> ExitCode {
    clap_complete::generate(shell, &mut Cli::command(), "rushes", &mut io::stdout());
    ExitCode::SUCCESS
}
