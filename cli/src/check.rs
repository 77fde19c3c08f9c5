// SPDX-License-Identifier: Apache-2.0
//! `rushes check`: the doctor's findings, printed.

use crate::args::CheckArgs;
use crate::ask::{print_json, say};
use rushes_daemon::doctor::{Level, Places, Report, examine};
use rushes_pool::PoolError;
use std::path::PathBuf;
use std::process::ExitCode;

pub(crate) fn run(args: &CheckArgs) -> Result<ExitCode, String> {
    let report = examine(&Places {
        config: args.config.config.clone(),
        smb_conf: args.smb_conf.clone(),
        pools: pools()?,
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

/// Where pools are mounted.
fn pools() -> Result<Vec<PathBuf>, String> {
    // Who may not look into their catalogues is told of all else.
    let all = match rushes_pool::mounted() {
        Err(PoolError::Refused(_)) => Vec::new(),
        found => found.map_err(|error| error.to_string())?,
    };
    Ok(all.into_iter().map(|mounted| mounted.mount).collect())
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
        (0, 0) => String::from("\nNothing is in the way.\n"),
        (errors, warnings) => {
            let count = |count: u32, what: &str| match count {
                1 => format!("1 {what}"),
                _ => format!("{count} {what}s"),
            };
            format!(
                "\n{}, {}\n",
                count(errors, "error"),
                count(warnings, "warning")
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
