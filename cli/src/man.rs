// SPDX-License-Identifier: Apache-2.0
//! Man pages and completions, made from the table of arguments.

use crate::args::Cli;
use crate::ask::say;
use crate::lab;
use clap::CommandFactory;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

/// A file or folder with its purpose.
type Named = (&'static str, &'static str);
/// A command line with its purpose.
type Example = (&'static str, &'static str);

/// The sections of a page that the table of arguments does not have.
struct More {
    /// Display name of the command: `rushes-pool-create`.
    command: &'static str,
    files: &'static [Named],
    examples: &'static [Example],
}

const CONFIG: Named = ("/etc/rushes/rushes.toml", "The configuration.");
const RUNTIME: Named = (
    "/run/rushes",
    "The runtime folder: sockets, and acknowledged data that no disk has yet. Delete nothing in it.",
);
const CONTROL: Named = (
    "/run/rushes/control.sock",
    "The socket on which the daemon answers.",
);
const STATE: Named = (
    "/var/lib/rushes",
    "Calibrations, and other things that outlive the daemon.",
);
const POOL: Named = (
    "CATALOGUE/rushes-pool, MEMBER/rushes-pool",
    "The format files of a pool: its id, its policy, its members. Delete neither.",
);
const TREE: Named = (
    "CATALOGUE/tree",
    "The directory tree: files with names, rights and times, and without bytes.",
);
const OBJECTS: Named = ("MEMBER/objects", "The bytes of files.");
const SERVICE: Named = (
    "/etc/rushes/pool-NAME.conf",
    "Settings of the services rushes-pool@NAME, rushes-pool-nfs@NAME and rushes-pool-iscsi@NAME.",
);

const PAGES: &[More] = &[
    More {
        command: "rushes",
        files: &[CONFIG, RUNTIME, STATE, SERVICE],
        examples: &[
            ("rushes check", "Examine configuration and machine."),
            (
                "rushes calibrate /srv/media --save",
                "Measure the disk below a share, so that promises rest on it.",
            ),
            (
                "rushes admit --bitrate 120M --count 2",
                "May two more streams of 120 Mb/s begin?",
            ),
            ("rushes top", "Streams, their contracts and lateness, live."),
        ],
    },
    More {
        command: "rushes-serve",
        files: &[CONFIG, RUNTIME, STATE],
        examples: &[(
            "rushes serve --config /tmp/rushes.toml --log debug",
            "Try a configuration by hand, with a verbose log.",
        )],
    },
    More {
        command: "rushes-recover",
        files: &[CONFIG, RUNTIME],
        examples: &[
            (
                "rushes recover --list",
                "Which data is left? Before the machine is switched off it must say `nothing is left`.",
            ),
            ("rushes recover", "Write all that can be written."),
            (
                "rushes recover --give-up 17",
                "Show the data that is lost if lane 17 is given up; --yes gives it up.",
            ),
        ],
    },
    More {
        command: "rushes-check",
        files: &[
            CONFIG,
            SERVICE,
            (
                "/usr/share/doc/rushes/examples/rushes.toml",
                "The sample to begin with.",
            ),
        ],
        examples: &[
            ("rushes check", "Examine everything."),
            (
                "rushes check --config /tmp/new.toml --json",
                "Examine a new configuration before it is installed, for a script.",
            ),
        ],
    },
    More {
        command: "rushes-status",
        files: &[CONFIG, CONTROL],
        examples: &[
            ("rushes status", "The ledger, for people."),
            ("rushes status --json", "All of it, for programs."),
        ],
    },
    More {
        command: "rushes-top",
        files: &[CONFIG, CONTROL],
        examples: &[
            ("rushes top", "Live, until q."),
            (
                "rushes top --once --width 160",
                "One screen, for a mail or a log.",
            ),
        ],
    },
    More {
        command: "rushes-admit",
        files: &[CONFIG, CONTROL],
        examples: &[
            (
                "rushes admit --bitrate 120M --count 2",
                "May two more streams of 120 Mb/s begin, on every device?",
            ),
            (
                "rushes admit --bitrate 120M --path /srv/media",
                "The same of one stream on the device of this folder.",
            ),
        ],
    },
    More {
        command: "rushes-calibrate",
        files: &[CONFIG, STATE],
        examples: &[
            (
                "rushes calibrate /srv/media --save",
                "Measure the device, and keep the result; then systemctl reload rushes.",
            ),
            (
                "rushes calibrate /srv/media --quick",
                "A rough model within seconds, only shown.",
            ),
        ],
    },
    More {
        command: "rushes-pool",
        files: &[POOL, TREE, OBJECTS, SERVICE],
        examples: &[
            (
                "rushes pool create /mnt/ssd/catalogue /mnt/a/pool /mnt/b/pool",
                "Make a pool of two disks.",
            ),
            (
                "rushes pool mount /mnt/ssd/catalogue /srv/media",
                "Mount it, in the foreground.",
            ),
            ("rushes pool status", "How are the mounted pools?"),
        ],
    },
    More {
        command: "rushes-pool-create",
        files: &[POOL, TREE, OBJECTS],
        examples: &[(
            "rushes pool create /mnt/ssd/catalogue /mnt/a/pool /mnt/b/pool",
            "Make a pool of two disks, with its names on a third.",
        )],
    },
    More {
        command: "rushes-pool-ls",
        files: &[POOL],
        examples: &[
            ("rushes pool ls", "The members of all mounted pools."),
            (
                "rushes pool ls /mnt/ssd/catalogue --json",
                "Those of one pool, mounted or not, for a script.",
            ),
        ],
    },
    More {
        command: "rushes-pool-where",
        files: &[TREE, OBJECTS],
        examples: &[(
            "rushes pool where /srv/media/reel.mov",
            "The members that hold the bytes of a file.",
        )],
    },
    More {
        command: "rushes-pool-mount",
        files: &[POOL, CONFIG, RUNTIME, SERVICE],
        examples: &[
            (
                "rushes pool mount /mnt/ssd/catalogue /srv/media",
                "Mount a pool, in the foreground.",
            ),
            (
                "rushes pool mount --keeper --protect /mnt/ssd/catalogue /srv/media",
                "As the service rushes-pool@NAME does it.",
            ),
        ],
    },
    More {
        command: "rushes-pool-destroy",
        files: &[POOL, TREE, OBJECTS],
        examples: &[
            (
                "rushes pool destroy /mnt/ssd/catalogue",
                "Show what would be deleted.",
            ),
            (
                "rushes pool destroy --yes /mnt/ssd/catalogue",
                "Delete a pool without files.",
            ),
        ],
    },
    More {
        command: "rushes-pool-fsck",
        files: &[POOL, TREE, OBJECTS],
        examples: &[
            ("rushes pool fsck /mnt/ssd/catalogue", "Only look."),
            (
                "rushes pool fsck --repair /mnt/ssd/catalogue",
                "Repair what can be repaired without losing a byte.",
            ),
        ],
    },
    More {
        command: "rushes-pool-rescue",
        files: &[
            POOL,
            ("MEMBER/names", "The log of names, on two of the members."),
        ],
        examples: &[(
            "rushes pool rescue /mnt/ssd2/catalogue /mnt/a/pool /mnt/b/pool",
            "Rebuild the catalogue in a new folder from all members that are left.",
        )],
    },
    More {
        command: "rushes-pool-add",
        files: &[POOL],
        examples: &[(
            "rushes pool add /mnt/ssd/catalogue /mnt/c/pool",
            "Add a disk; `rushes pool rebalance` then moves files to it.",
        )],
    },
    More {
        command: "rushes-pool-drain",
        files: &[POOL, OBJECTS],
        examples: &[
            (
                "rushes pool drain /mnt/ssd/catalogue 1",
                "Move all bytes off member 1.",
            ),
            (
                "rushes pool drain --cancel /mnt/ssd/catalogue 1",
                "Let it take new bytes again.",
            ),
        ],
    },
    More {
        command: "rushes-pool-rebalance",
        files: &[POOL, OBJECTS],
        examples: &[(
            "rushes pool rebalance /mnt/ssd/catalogue",
            "Fill a member that was added.",
        )],
    },
    More {
        command: "rushes-pool-defrag",
        files: &[POOL, OBJECTS],
        examples: &[
            ("rushes pool defrag /mnt/ssd/catalogue", "The whole pool."),
            (
                "rushes pool defrag /mnt/ssd/catalogue /srv/media/reels",
                "One folder of the mounted pool.",
            ),
        ],
    },
    More {
        command: "rushes-pool-remove",
        files: &[POOL],
        examples: &[
            (
                "rushes pool remove /mnt/ssd/catalogue 1",
                "Remove a drained member.",
            ),
            (
                "rushes pool remove --lost --yes /mnt/ssd/catalogue 1",
                "Give up a member whose disk is dead, with its bytes.",
            ),
        ],
    },
    More {
        command: "rushes-pool-status",
        files: &[POOL, OBJECTS],
        examples: &[("rushes pool status", "How are the mounted pools?")],
    },
    More {
        command: "rushes-pool-policy",
        files: &[POOL],
        examples: &[
            (
                "rushes pool policy /mnt/ssd/catalogue",
                "Show the policy of the pool and its rules.",
            ),
            (
                "rushes pool policy /srv/media/conform --set striped=2",
                "Files that are made in this folder from now on lie on two members.",
            ),
            (
                "rushes pool policy /mnt/ssd/catalogue --class 0=ssd,1=raid",
                "Name classes of members.",
            ),
        ],
    },
    More {
        command: "rushes-pool-export",
        files: &[SERVICE, RUNTIME],
        examples: &[(
            "rushes pool export nfs /srv/media --listen 192.168.7.1 --client 192.168.7.0/24",
            "By NFS, to the machines of one network.",
        )],
    },
    More {
        command: "rushes-pool-export-nfs",
        files: &[
            SERVICE,
            (
                "/run/rushes/nfs-NAME-ID/ganesha.conf",
                "The configuration of Ganesha, written at each start.",
            ),
            (
                "/var/lib/rushes/nfs-NAME-ID",
                "The clients that had files open.",
            ),
        ],
        examples: &[(
            "rushes pool export nfs /srv/media --listen 192.168.7.1 --client 192.168.7.0/24",
            "To the machines of one network.",
        )],
    },
    More {
        command: "rushes-pool-export-iscsi",
        files: &[SERVICE, RUNTIME],
        examples: &[(
            "rushes pool export iscsi /srv/media/avid.disk --size 2TiB --listen 192.168.7.1 --client 192.168.7.21",
            "A disk of 2 TiB for one machine.",
        )],
    },
    More {
        command: "rushes-lab",
        files: &[(
            "/usr/bin/rushes-lab",
            "The program that runs; `make build` makes it, `make server` does not.",
        )],
        examples: &[(
            "rushes lab play --disk /srv/media --streams 12 --bitrate 100M --seconds 60",
            "Play twelve streams from your own disk: who drops frames?",
        )],
    },
    More {
        command: "rushes-completions",
        files: &[(
            "/usr/share/bash-completion/completions/rushes",
            "The place to which `make install` writes those of bash.",
        )],
        examples: &[(
            "rushes completions zsh",
            "Print those of zsh; redirect them to a file `_rushes` in its fpath.",
        )],
    },
    More {
        command: "rushes-man",
        files: &[(
            "/usr/share/man/man1/rushes.1",
            "One of the pages that `make install` writes.",
        )],
        examples: &[
            ("rushes man", "Print rushes(1)."),
            (
                "rushes man --out /tmp/man",
                "Write a page for each command.",
            ),
        ],
    },
];

/// The exit codes of `rushes` as a whole, and of a command without its own.
const EXIT_STATUS: &[Named] = &[
    (
        "0",
        "It was done; of a question (admit, check, recover, pool fsck): yes, nothing is wrong, nothing is left.",
    ),
    (
        "1",
        "The answer is no, something is wrong, or something is left; the output says what.",
    ),
    (
        "2",
        "It could not be done, or could not be asked; the reason is on standard error.",
    ),
];

/// The start of the sentence in a help text that becomes a section of its page.
const EXIT_CODE: &str = "Exit code: ";

/// A page: the part from the table of arguments, and the sections that the table does not have.
fn page(command: clap::Command) -> io::Result<Vec<u8>> {
    let name = command.get_display_name().unwrap_or(command.get_name());
    let more = PAGES.iter().find(|more| more.command == name);
    let help = command.get_after_help().map(|help| help.to_string());
    let (extra, exit) = parted(help.as_deref().unwrap_or_default());
    let mut page = Vec::new();
    let shown = (!extra.is_empty()).then_some(extra);
    // Without a value clap would keep the old one.
    let reset = command.after_help(clap::builder::Resettable::from(
        shown.map(clap::builder::StyledStr::from),
    ));
    clap_mangen::Man::new(reset).render(&mut page)?;
    writeln!(page, ".SH \"EXIT STATUS\"")?;
    match exit {
        Some(exit) => writeln!(page, "{}", plain(&exit))?,
        None => items(&mut page, EXIT_STATUS)?,
    }
    if let Some(more) = more {
        writeln!(page, ".SH FILES")?;
        items(&mut page, more.files)?;
        writeln!(page, ".SH EXAMPLES")?;
        items(&mut page, more.examples)?;
    }
    Ok(page)
}

/// A help text without its exit codes, and the exit codes.
fn parted(help: &str) -> (String, Option<String>) {
    let Some((before, rest)) = help.split_once(EXIT_CODE) else {
        return (help.to_owned(), None);
    };
    let (exit, after) = rest.split_once("\n\n").unwrap_or((rest, ""));
    let extra = match (before.trim_end(), after) {
        ("", after) => after.to_owned(),
        (before, "") => before.to_owned(),
        (before, after) => format!("{before}\n\n{after}"),
    };
    (extra, Some(exit.to_owned()))
}

fn items(page: &mut Vec<u8>, items: &[Named]) -> io::Result<()> {
    for (name, purpose) in items {
        writeln!(page, ".TP\n{}\n{}", plain(name), plain(purpose))?;
    }
    Ok(())
}

/// Text for roff, without any command.
fn plain(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    match text.starts_with(['.', '\'']) {
        true => format!("\\&{text}"),
        false => text,
    }
}

/// The pages of a command and of all commands below it, by file name.
fn pages(command: &clap::Command, all: &mut Vec<(String, Vec<u8>)>) -> io::Result<()> {
    for inner in command.get_subcommands().filter(|one| !one.is_hide_set()) {
        pages(inner, all)?;
    }
    let name = command.get_display_name().unwrap_or(command.get_name());
    all.push((format!("{name}.1"), page(command.clone())?));
    Ok(())
}

fn all_pages() -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    let mut all = Vec::new();
    pages(&command, &mut all)?;
    Ok(all)
}

/// The page `rushes(1)` on standard output, or a page for each command into `out`.
pub(crate) fn man(out: Option<&Path>) -> Result<ExitCode, String> {
    let pages = all_pages().map_err(|error| format!("the man pages cannot be made: {error}"))?;
    let Some(out) = out else {
        let first = pages.iter().find(|(name, _)| name == "rushes.1");
        let page = first.map_or(&[][..], |(_, page)| page);
        say(&String::from_utf8_lossy(page))?;
        return Ok(ExitCode::SUCCESS);
    };
    std::fs::create_dir_all(out)
        .and_then(|()| {
            pages
                .iter()
                .try_for_each(|(name, page)| std::fs::write(out.join(name), page))
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

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[test]
    fn each_page_has_files_examples_and_exit_status() {
        let pages = all_pages().unwrap();
        assert_eq!(pages.len(), PAGES.len(), "a row of PAGES for each command");
        for (name, page) in pages {
            let page = String::from_utf8(page).unwrap();
            for section in [
                ".SH \"EXIT STATUS\"\n",
                ".SH FILES\n.TP",
                ".SH EXAMPLES\n.TP\nrushes",
            ] {
                assert_eq!(
                    page.matches(section).count(),
                    1,
                    "{name}: {section}: {page}"
                );
            }
            // It stands in its own section alone.
            assert!(!page.contains(EXIT_CODE), "{name}: {page}");
        }
    }

    #[test]
    fn each_example_is_of_its_command_and_understood() {
        for more in PAGES {
            for (example, _) in more.examples {
                let words: Vec<&str> = example.split(' ').collect();
                assert!(words.join("-").starts_with(more.command), "{example}");
                let read = Cli::try_parse_from(&words);
                assert!(read.is_ok(), "{example}: {}", read.unwrap_err());
            }
        }
    }

    #[test]
    fn exit_codes_of_a_help_text_are_told_apart_from_the_rest() {
        let told = |help| {
            let (extra, exit) = parted(help);
            (extra, exit.unwrap_or_default())
        };
        let pair = |extra: &str, exit: &str| (String::from(extra), String::from(exit));
        assert_eq!(told("Exit code: 0 yes, 1 no."), pair("", "0 yes, 1 no."));
        assert_eq!(told("A. Exit code: 0 yes."), pair("A.", "0 yes."));
        assert_eq!(told("A. Exit code: 0.\n\nB."), pair("A.\n\nB.", "0."));
        assert_eq!(told("A."), pair("A.", ""));
        assert_eq!(plain(".x -y"), "\\&.x \\-y");
    }
}
