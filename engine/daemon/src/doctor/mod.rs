// SPDX-License-Identifier: Apache-2.0
//! The doctor: looks at configuration and machine and says what is in the way, each time with a remedy.
//!
//! It changes nothing, and asks only what an operator could ask by hand. A finding without a remedy is
//! one that needs none.

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
    /// What it is about: `configuration`, `machine`, `samba`, `daemon`, `share NAME` or `pool FOLDER`.
    pub area: String,
    /// What was found.
    pub finding: String,
    /// What to do about it.
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
    /// Nothing is in the way.
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
    /// Samba's; None: where testparm looks.
    pub smb_conf: Option<PathBuf>,
    /// Folders at which pools are mounted.
    pub pools: Vec<PathBuf>,
    /// Folders of the members of pools, as their catalogues name them: also of those that are away.
    pub members: Vec<PathBuf>,
}

/// Look at everything. Takes a second or two: other programs are asked.
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
                        "what clients write is on the disk up to {} s after they have closed it: a program on the server that takes a file at its close \
                         (a watch folder) finds a part of it",
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
                    "correct that line; docs/reference/config.md has every key (/usr/share/doc/rushes, where it is installed)",
                ));
            }
            None
        }
        Err(error) => {
            findings.push(Finding::of(
                Level::Error,
                AREA,
                error.to_string(),
                format!(
                    "begin with the sample: sudo install -D -m 644 {SAMPLE} {}; write the folders of your shares into it, then run `rushes check` again",
                    file.display()
                ),
            ));
            None
        }
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
