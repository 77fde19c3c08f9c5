// SPDX-License-Identifier: Apache-2.0
//! `rushes check`: the doctor's findings, printed.

use crate::args::CheckArgs;
use crate::ask::{print_json, say};
use crate::show;
use rushes_daemon::doctor::{Level, Places, Report, examine};
use rushes_pool::{Pool, PoolError};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

pub(crate) fn run(args: &CheckArgs) -> Result<ExitCode, String> {
    let (pools, members) = pools()?;
    let report = examine(&Places {
        config: args.config.config.clone(),
        smb_conf: args.smb_conf.clone(),
        pools,
        members,
    });
    if args.json {
        print_json(&report)?;
    } else {
        say(&text(&report))?;
    }
    Ok(if report.ok {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(1)
    })
}

/// The folder with the configurations of pools' services: `pool-NAME.conf`, with the line
/// `CATALOGUE=`.
const SERVICES: &str = "/etc/rushes";

/// The mounts of pools, and the members' folders of pools that are mounted or have a service.
fn pools() -> Result<(Vec<PathBuf>, Vec<PathBuf>), String> {
    // A user without access to their catalogues gets all other findings.
    let all = match rushes_pool::mounted() {
        Err(PoolError::Refused(_)) => Vec::new(),
        found => found.map_err(|error| error.to_string())?,
    };
    let mut catalogues = of_services(Path::new(SERVICES));
    catalogues.extend(all.iter().map(|mounted| mounted.catalogue.clone()));
    catalogues.sort();
    catalogues.dedup();
    let members = catalogues
        .iter()
        .filter_map(|catalogue| Pool::look(catalogue).ok())
        .flat_map(|pool| {
            let members = pool.members();
            let paths: Vec<PathBuf> = members.iter().map(|one| one.path().to_path_buf()).collect();
            paths
        })
        .collect();
    let mounts = all.into_iter().map(|mounted| mounted.mount).collect();
    Ok((mounts, members))
}

/// Catalogues of the pools that have a service.
fn of_services(folder: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let is_of_pool = |name: &str| name.starts_with("pool-") && name.ends_with(".conf");
    files
        .filter(|file| file.file_name().to_str().is_some_and(is_of_pool))
        .filter_map(|file| std::fs::read_to_string(file.path()).ok())
        .filter_map(|text| {
            let mut lines = text.lines();
            let line = lines.find_map(|line| line.trim().strip_prefix("CATALOGUE="))?;
            Some(PathBuf::from(line.trim().trim_matches(['"', '\''])))
        })
        .collect()
}

fn text(report: &Report) -> String {
    let mut out = String::new();
    for finding in &report.findings {
        let word = match finding.level {
            Level::Ok => "ok     ",
            Level::Note => "note   ",
            Level::Warning => "warning",
            Level::Error => "ERROR  ",
        };
        out += &format!("{word}  {}: {}\n", finding.area, finding.finding);
        if let Some(remedy) = &finding.remedy {
            out += &format!("         remedy: {remedy}\n");
        }
    }
    out += &match (report.error_count, report.warning_count) {
        (0, 0) => String::from("\nNo fault was found.\n"),
        (errors, warnings) => {
            format!(
                "\n{}, {}\n",
                show::count(errors.into(), "error"),
                show::count(warnings.into(), "warning")
            )
        }
    };
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use rushes_daemon::doctor::Finding;

    #[test]
    fn catalogues_of_pools_that_are_not_mounted_are_known_by_their_services() {
        let folder = std::env::temp_dir().join(format!("rushes-services-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let conf = "# of the rack\nFOLDER=/srv/media\nCATALOGUE=\"/mnt/ssd/catalogue\"\n";
        std::fs::write(folder.join("pool-media.conf"), conf).unwrap();
        std::fs::write(folder.join("rushes.toml"), "CATALOGUE=/no").unwrap();
        let found = of_services(&folder);
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found, [Path::new("/mnt/ssd/catalogue")]);
    }

    #[test]
    fn every_finding_is_printed_with_its_remedy() {
        let report = Report {
            check_version: 1,
            ok: false,
            error_count: 1,
            warning_count: 0,
            findings: vec![Finding {
                level: Level::Error,
                area: String::from("share media"),
                finding: String::from("it is not there"),
                remedy: Some(String::from("mount it")),
            }],
        };
        assert_eq!(
            text(&report),
            "ERROR    share media: it is not there\n         remedy: mount it\n\n1 error, 0 warnings\n"
        );
    }
}
