// SPDX-License-Identifier: Apache-2.0
//! Man pages and completions, made from the table of arguments.

use crate::args::Cli;
use crate::ask::say;
use crate::lab;
use clap::CommandFactory;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

/// What the table of arguments does not know, for `rushes(1)`.
const MORE: &str = r#".SH "EXIT STATUS"
.TP
0
It was done; of a question (admit, check, recover, pool fsck): yes, nothing is wrong, nothing is left.
.TP
1
The answer is no, something is wrong, or something is left; it is said what.
.TP
2
It could not be done, or could not be asked; the reason is on standard error.
.PP
Where a command differs, its own page says so.
.SH FILES
.TP
/etc/rushes/rushes.toml
The configuration.
.TP
/run/rushes
The runtime folder: sockets, and what clients were told is safe and no disk has yet. Nothing in it is to be removed.
.TP
/var/lib/rushes
Calibrations, and what else outlives the daemon.
.SH EXAMPLES
.TP
rushes check
Is anything in the way?
.TP
rushes calibrate /srv/media \-\-save
Measure the disk below a share, so that promises rest on it.
.TP
rushes admit \-\-bitrate 120M \-\-count 2
May two more streams of 120 Mb/s begin?
.TP
rushes top
Streams, their contracts and lateness, live.
"#;

/// The page `rushes(1)` on standard output, or a page for each command into `out`.
pub(crate) fn man(out: Option<&Path>) -> Result<ExitCode, String> {
    let command = Cli::command();
    let Some(out) = out else {
        let mut page = Vec::new();
        clap_mangen::Man::new(command)
            .render(&mut page)
            .and_then(|()| page.write_all(MORE.as_bytes()))
            .and_then(|()| io::stdout().write_all(&page))
            .map_err(|error| format!("the man page cannot be written: {error}"))?;
        return Ok(ExitCode::SUCCESS);
    };
    std::fs::create_dir_all(out)
        .and_then(|()| clap_mangen::generate_to(command, out))
        .and_then(|()| {
            let mut page = File::options().append(true).open(out.join("rushes.1"))?;
            page.write_all(MORE.as_bytes())
        })
        .map_err(|error| {
            format!(
                "man pages cannot be written into {}: {error}; expected a folder that can be written",
                out.display()
            )
        })?;
    Ok(ExitCode::SUCCESS)
}

/// Completions on standard output, those of the lab among them if it is installed.
pub(crate) fn completions(shell: clap_complete::Shell) -> Result<ExitCode, String> {
    let mut command = Cli::command();
    match lab::words() {
        Ok(words) => command = command.mut_subcommand("lab", |_| words.command()),
        Err(error) => eprintln!("rushes: behind `rushes lab` nothing is completed: {error}"),
    }
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut command, "rushes", &mut text);
    say(&String::from_utf8_lossy(&text))?;
    Ok(ExitCode::SUCCESS)
}
