// SPDX-License-Identifier: Apache-2.0
//! The doctor: checks configuration and machine and reports each problem with its remedy.
//!
//! It changes nothing, and reads only facts that an operator could read by hand. A finding without
//! a remedy needs none.

mod daemon;
mod exports;
mod machine;
mod pools;
mod rules;
mod samba;
mod shares;

use crate::config::{Config, ConfigError};
pub(crate) use machine::memory_too_small_for;
use serde::Serialize;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Version of the field names of [`Report`].
pub const CHECK_VERSION: u32 = 1;

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Worth knowing.
    Note,
    /// It works, but not as well as it could or not for long.
    Warning,
    /// It does not work.
    Error,
}

/// One thing looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How bad it is.
    pub level: Level,
    /// Its subject: `configuration`, `machine`, `samba`, `daemon`, `share NAME` or `pool FOLDER`.
    pub area: String,
    /// The finding.
    pub finding: String,
    /// The remedy.
    pub remedy: Option<String>,
}

impl Finding {
    pub(super) fn ok(area: &str, finding: impl Into<String>) -> Finding {
        Finding {
            level: Level::Ok,
            area: area.to_string(),
            finding: finding.into(),
            remedy: None,
        }
    }

    pub(super) fn of(
        level: Level,
        area: &str,
        finding: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Finding {
        Finding {
            level,
            area: area.to_string(),
            finding: finding.into(),
            remedy: Some(remedy.into()),
        }
    }
}

/// All of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// [`CHECK_VERSION`].
    pub check_version: u32,
    /// There are no errors.
    pub ok: bool,
    /// How many errors.
    pub error_count: u32,
    /// How many warnings.
    pub warning_count: u32,
    /// In the order they were looked at.
    pub findings: Vec<Finding>,
}

/// Where to look.
#[derive(Clone, Debug)]
pub struct Places {
    /// The configuration.
    pub config: PathBuf,
    /// Samba's; None: the file that testparm reads by default.
    pub smb_conf: Option<PathBuf>,
    /// Folders at which pools are mounted.
    pub pools: Vec<PathBuf>,
    /// Folders of the members of pools, as their catalogues name them, also of missing members.
    pub members: Vec<PathBuf>,
}

/// Check everything. Takes a second or two, since it runs other programs.
pub fn examine(places: &Places) -> Report {
    let mut findings = Vec::new();
    let config = read_config(&places.config, &mut findings);
    machine::examine(config.as_ref(), &mut findings);
    let exported = exports::folders();
    for (config, share) in config
        .iter()
        .flat_map(|config| config.shares.iter().map(move |share| (config, share)))
    {
        shares::examine(config, share, &exported, &mut findings);
    }
    if config.is_some() || !places.pools.is_empty() {
        let shown = samba::Shown {
            config: config.as_ref(),
            pools: &places.pools,
            members: &places.members,
            exported: &exported,
        };
        samba::examine(&shown, places.smb_conf.as_deref(), &mut findings);
    }
    if let Some(config) = &config {
        rules::examine(config, &mut findings);
        daemon::examine(config, &mut findings);
    }
    let count = |level| findings.iter().filter(|f| f.level == level).count() as u32;
    let error_count = count(Level::Error);
    Report {
        check_version: CHECK_VERSION,
        ok: error_count == 0,
        error_count,
        warning_count: count(Level::Warning),
        findings,
    }
}

/// Where `make install` puts the sample of a configuration.
const SAMPLE: &str = "/usr/share/doc/rushes/examples/rushes.toml";

/// "1 share", "2 shares"
pub(crate) fn counted(count: usize, what: &str) -> String {
    match count {
        1 => format!("1 {what}"),
        _ => format!("{count} {what}s"),
    }
}

fn read_config(file: &Path, findings: &mut Vec<Finding>) -> Option<Config> {
    const AREA: &str = "configuration";
    match Config::load(file) {
        Ok(config) => {
            findings.push(Finding::ok(
                AREA,
                format!(
                    "{}: {}, {}, cache {} in buffers of {}",
                    file.display(),
                    counted(config.shares.len(), "share"),
                    counted(config.rules.len(), "rule"),
                    crate::config::amount::show_size(config.cache_bytes),
                    crate::config::amount::show_size(u64::from(config.buffer_bytes)),
                ),
            ));
            if config.write_buffer_bytes > 0 {
                findings.push(Finding::of(
                    Level::Note,
                    AREA,
                    format!(
                        "a file that a client wrote is complete on the disk up to {} s after its \
                         close: a program on the server that takes it at once (a watch folder) \
                         finds only a part of it",
                        config.policy.write_age.ms().div_ceil(1000)
                    ),
                    "docs/guide/recording.md, \"Programs that take a file when its client closes it\"",
                ));
            }
            Some(config)
        }
        Err(ConfigError::Wrong { file, problems }) => {
            for problem in problems {
                findings.push(Finding::of(
                    Level::Error,
                    AREA,
                    format!("{}: {problem}", file.display()),
                    problem.remedy.clone().unwrap_or_else(|| {
                        String::from("correct that line; docs/reference/config.md has every key (/usr/share/doc/rushes, where it is installed)")
                    }),
                ));
            }
            None
        }
        Err(error) => {
            findings.push(Finding::of(
                Level::Error,
                AREA,
                error.to_string(),
                unread_remedy(file, &error),
            ));
            None
        }
    }
}

/// The remedy for a configuration that cannot be read. It names the sample only if there is no
/// file, since the sample would replace it.
fn unread_remedy(file: &Path, error: &ConfigError) -> String {
    let kind = match error {
        ConfigError::Read { source, .. } => source.kind(),
        ConfigError::Wrong { .. } => ErrorKind::Other,
    };
    let shown = file.display();
    match kind {
        ErrorKind::NotFound => format!(
            "begin with the sample: sudo install -D -m 644 {SAMPLE} {shown}; write the folders of your shares into it, then run `rushes check` again"
        ),
        ErrorKind::PermissionDenied => {
            format!("run `sudo rushes check`; or let this user read it: chmod a+r {shown}")
        }
        ErrorKind::IsADirectory | ErrorKind::NotADirectory => {
            String::from("name the file itself: --config FOLDER/rushes.toml")
        }
        ErrorKind::InvalidData => format!("save {shown} as text in UTF-8"),
        _ => format!("see dmesg for what the disk of {shown} says"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_configuration_is_an_error_with_its_line() {
        let path = std::env::temp_dir().join(format!("rushes-doctor-{}.toml", std::process::id()));
        std::fs::write(&path, "[cache]\nbytes = \"x\"\n").unwrap();
        let report = examine(&Places {
            config: path.clone(),
            smb_conf: None,
            pools: Vec::new(),
            members: Vec::new(),
        });
        std::fs::remove_file(&path).unwrap();
        assert!(!report.ok && report.error_count >= 1);
        assert!(
            report.findings.iter().any(|f| f.level == Level::Error
                && f.finding.contains("line 2: cache.bytes")
                && f.remedy.is_some()),
            "{report:#?}"
        );
    }

    #[test]
    fn without_a_configuration_the_sample_and_the_command_to_begin_with_are_named() {
        let path = std::env::temp_dir().join(format!("rushes-no-{}.toml", std::process::id()));
        let report = examine(&Places {
            config: path.clone(),
            smb_conf: None,
            pools: Vec::new(),
            members: Vec::new(),
        });
        let found = report.findings.iter().find(|f| f.area == "configuration");
        let remedy = found.unwrap().remedy.as_ref().unwrap();
        let command = format!("install -D -m 644 {SAMPLE} {}", path.display());
        assert!(remedy.contains(&command), "{remedy}");
        let installed = include_str!("../../../../packaging/install.sh");
        assert!(
            installed.contains(&format!("$dest{SAMPLE}")),
            "it is not installed there"
        );
    }

    /// The findings about a configuration of this text.
    fn said_of(name: &str, text: &[u8]) -> Vec<Finding> {
        let path = std::env::temp_dir().join(format!("rushes-{name}-{}", std::process::id()));
        std::fs::write(&path, text).unwrap();
        let mut findings = Vec::new();
        read_config(&path, &mut findings);
        std::fs::remove_file(&path).unwrap();
        findings
    }

    #[test]
    fn watch_folders_are_noted_where_bytes_are_written_after_the_close() {
        let share = "[[share]]\nname = \"m\"\npath = \"/m\"\n";
        let written = "[write]\nbuffer_bytes = \"64MiB\"\nage = \"1500ms\"\n";
        let notes = |text: String| {
            let mut found = said_of("watch", text.as_bytes());
            found.retain(|one| one.level == Level::Note && one.finding.contains("a watch folder"));
            found
        };
        assert_eq!(notes(share.to_owned()), []);
        let [note] = <[Finding; 1]>::try_from(notes(format!("{written}{share}"))).unwrap();
        assert_eq!(note.area, "configuration");
        assert!(note.finding.contains("up to 2 s after"), "{note:?}");
        // The page has that section.
        let remedy = note.remedy.unwrap();
        let (page, section) = remedy.split_once(", \"").unwrap();
        assert_eq!(page, "docs/guide/recording.md");
        let guide = include_str!("../../../../docs/guide/recording.md");
        let section = format!("\n## {}\n", section.trim_end_matches('"'));
        assert!(guide.contains(&section), "{section}");
    }

    #[test]
    fn remedies_of_a_configuration_fit_their_findings() {
        let share = "[[share]]\nname = \"m\"\npath = \"/m\"\n";
        let rule = "[[rule]]\nmatch = \"*\"\nbitrate = \"8M\"\n";
        for (text, expect) in [
            (String::new(), "add three lines for each share"),
            (String::from("[[share]]\nname = \"m\"\n"), "add path = "),
            (format!("{share}[server\n"), "write it as key = value"),
            (
                format!("[server]\ncontrol_group = \"no-such-group\"\n{share}"),
                "groupadd --system no-such-group; or leave",
            ),
            (
                format!("{share}[[rule]]\nbitrate = \"8M\"\n"),
                "add match = ",
            ),
            (
                format!("{share}[[rule]]\nmatch = \"*\"\n"),
                "add one of the two",
            ),
            (
                format!("{share}{rule}frames_per_second = 24\n"),
                "take one of the two out",
            ),
            (
                format!("{share}{rule}{rule}"),
                "take one of the two rules out",
            ),
            (
                format!("[server]\nanalyser = false\ncontracts_from_header = true\n{share}"),
                "take this line out, or line 2",
            ),
            (
                format!("[cache]\nbytes = \"x\"\n{share}"),
                "correct that line",
            ),
        ] {
            let found = said_of("remedy", text.as_bytes());
            let fits = |one: &Finding| one.remedy.as_ref().is_some_and(|it| it.starts_with(expect));
            assert!(found.iter().any(fits), "{text}: {expect}: {found:#?}");
        }
        let found = said_of("bytes", b"\xff\xfe");
        let remedy = found[0].remedy.as_ref().unwrap();
        assert!(remedy.ends_with("as text in UTF-8"), "{remedy}");
        // The remedy never replaces an existing file by the sample.
        let mut found = Vec::new();
        read_config(&std::env::temp_dir(), &mut found);
        let remedy = found[0].remedy.as_ref().unwrap();
        assert!(remedy.starts_with("name the file itself"), "{remedy}");
    }

    #[test]
    fn one_share_is_no_shares() {
        assert_eq!(counted(1, "share"), "1 share");
        assert_eq!(counted(0, "rule"), "0 rules");
    }

    #[test]
    fn whatever_is_wrong_has_a_remedy() {
        let folder = std::env::temp_dir().join(format!("rushes-doctor-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("media")).unwrap();
        let config = folder.join("rushes.toml");
        std::fs::write(
            &config,
            format!(
                "[cache]\nbytes = \"64MiB\"\n[server]\nruntime_dir = {:?}\nstate_dir = {:?}\n\
                 [[share]]\nname = \"media\"\npath = {:?}\n[[share]]\nname = \"gone\"\npath = \"/nonexistent/x\"\n",
                folder.join("run"),
                folder.join("state"),
                folder.join("media"),
            ),
        )
        .unwrap();
        let smb_conf = folder.join("smb.conf");
        std::fs::write(&smb_conf, "[media]\npath = /elsewhere\n").unwrap();
        let report = examine(&Places {
            config,
            smb_conf: Some(smb_conf),
            pools: Vec::new(),
            members: Vec::new(),
        });
        std::fs::remove_dir_all(&folder).unwrap();
        for finding in &report.findings {
            assert!(!finding.finding.is_empty() && !finding.area.is_empty());
            if finding.level >= Level::Warning {
                assert!(finding.remedy.is_some(), "{finding:?}");
            }
        }
        let has = |area: &str, level, word: &str| {
            assert!(
                report
                    .findings
                    .iter()
                    .any(|f| f.area == area && f.level == level && f.finding.contains(word)),
                "no {level:?} of {area} with {word:?} in {report:#?}"
            );
        };
        has("share gone", Level::Error, "/nonexistent/x");
        has("share media", Level::Warning, "never measured");
        has("daemon", Level::Note, "not running");
    }
}
