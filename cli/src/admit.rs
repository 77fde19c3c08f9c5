// SPDX-License-Identifier: Apache-2.0
//! `rushes admit`: could more streams be promised?

use crate::args::AdmitArgs;
use crate::ask::{ask, print_json, say, unexpected};
use crate::show;
use rushes_control::{Admission, Answer, Ask};
use rushes_pool::{Mounted, mounted};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

pub(crate) fn run(args: &AdmitArgs) -> Result<ExitCode, String> {
    let path = args.path.as_deref().map(canonical).transpose()?;
    let pool = path.as_deref().and_then(pool_with);
    let path = path.map(|path| path.to_string_lossy().into_owned());
    let question = Ask::Admit {
        bitrate: args.bitrate,
        count: args.count,
        path,
    };
    let answer = ask(&args.daemon, &question).map_err(|error| match &pool {
        None => error,
        Some(pool) => format!(
            "{error}. It lies in the pool {}, whose files lie on several disks, each asked by itself: name a folder of a member \
             (`rushes pool status` lists them), or no --path for all disks",
            pool.catalogue.display()
        ),
    })?;
    let admission = match answer {
        Answer::Admit(admission) => admission,
        other => return Err(unexpected(&other)),
    };
    if args.json {
        print_json(&admission)?;
    } else {
        say(&text(&admission))?;
    }
    Ok(if admission.admitted {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(1)
    })
}

fn canonical(path: &Path) -> Result<PathBuf, String> {
    path.canonicalize()
        .map_err(|error| format!("{}: {error}; expected a path that exists", path.display()))
}

/// The mounted pool that a path lies in.
fn pool_with(path: &Path) -> Option<Mounted> {
    let mounted = mounted().unwrap_or_default();
    mounted
        .into_iter()
        .find(|pool| path.starts_with(&pool.mount))
}

fn text(admission: &Admission) -> String {
    let mut out = String::new();
    let asked = match admission.count {
        1 => format!("one stream of {}", show::bitrate(admission.bitrate)),
        n => format!("{n} streams of {}", show::bitrate(admission.bitrate)),
    };
    for verdict in &admission.devices {
        let word = if verdict.admitted { "yes" } else { "no" };
        out += &format!("{}: {word}, {asked}: {}\n", verdict.device, verdict.reason);
        out += &match (verdict.admitted, verdict.more_count) {
            // (What is left cannot be told in bytes a second: it depends on how they are read.)
            (false, 0) => format!(
                "    room for none of {} now; {}\n",
                show::bitrate(admission.bitrate),
                match verdict.lower {
                    Some(lower) => format!(
                        "for {} of {} each: {} in such streams",
                        lower.count,
                        show::bitrate(lower.bitrate),
                        show::byte_rate(lower.bytes_per_s),
                    ),
                    None => String::from("nor of much lower rates"),
                }
            ),
            (admitted, count) => format!(
                "    room for {count} {} of {} each{}: {} in such streams; of another rate there may be more room\n",
                if admitted { "more" } else { "now" },
                show::bitrate(admission.bitrate),
                if admitted { " with these" } else { "" },
                show::byte_rate(verdict.left_bytes_per_s),
            ),
        };
        if verdict.guessed_model {
            out += "    the daemon knows no measurement of the device, this rests on a cautious guess: rushes \
                    calibrate PATH --save, then systemctl reload rushes\n";
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use rushes_control::{DeviceVerdict, LowerRate};

    #[test]
    fn a_verdict_reads_as_a_sentence() {
        let admission = Admission {
            admitted: false,
            bitrate: 100_000_000,
            count: 2,
            devices: vec![DeviceVerdict {
                device: String::from("md0"),
                admitted: false,
                reason: String::from("the device would be busy 104 % of the time"),
                more_count: 1,
                left_bytes_per_s: 14_000_000,
                lower: None,
                guessed_model: true,
            }],
        };
        let text = text(&admission);
        assert!(
            text.starts_with("md0: no, 2 streams of 100 Mb/s: the device would be busy 104 %"),
            "{text}"
        );
        assert!(
            text.contains("room for 1 now of 100 Mb/s each: 14.0 MB/s in such streams"),
            "{text}"
        );
        assert!(text.contains("rushes calibrate"), "{text}");
    }

    #[test]
    fn where_there_is_room_for_none_a_lower_rate_that_fits_is_named() {
        let mut admission = Admission {
            admitted: false,
            bitrate: 4_000_000_000,
            count: 1,
            devices: vec![DeviceVerdict {
                device: String::from("md0"),
                admitted: false,
                reason: String::from("the device would be busy 190 % of the time"),
                more_count: 0,
                left_bytes_per_s: 0,
                lower: Some(LowerRate {
                    bitrate: 1_000_000_000,
                    count: 2,
                    bytes_per_s: 250_000_000,
                }),
                guessed_model: false,
            }],
        };
        let told = text(&admission);
        assert!(
            told.contains("; for 2 of 1 Gb/s each: 250.0 MB/s in such streams"),
            "{told}"
        );
        admission.devices[0].lower = None;
        let told = text(&admission);
        assert!(told.contains("; nor of much lower rates"), "{told}");
        assert!(!told.contains(" 0 B/s"), "{told}");
    }
}
