// SPDX-License-Identifier: Apache-2.0
//! `rushes admit`: could more streams get contracts?

use crate::args::AdmitArgs;
use crate::ask::{ask, print_json, say, unexpected};
use crate::show;
use rushes_control::{Admission, Answer, Ask, DeviceVerdict};
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
            "{error}. It is in the pool {}, whose files are on several disks: give --path a folder \
             of one member (`rushes pool status` lists them), or leave --path out to ask about all \
             disks",
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
    if admission.devices.is_empty() {
        out +=
            &format!("no, {asked}: no device of a share is there now; `rushes status` says why\n");
    }
    for verdict in &admission.devices {
        let word = if verdict.admitted { "yes" } else { "no" };
        out += &format!("{}: {word}, {asked}: {}\n", name(verdict), verdict.reason);
        out += &format!("    {}\n", room(admission, verdict));
        if verdict.guessed_model {
            out += "    the daemon has no measurement of the device, so this rests on a cautious guess: rushes calibrate PATH --save, then systemctl reload rushes\n";
        }
    }
    if admission.admitted && admission.devices.len() > 1 {
        let tightest = admission.devices.iter();
        if let Some(tightest) = tightest.min_by_key(|verdict| verdict.more_count) {
            out += &format!(
                "yes on all {} devices; the tightest is {}: {}\n",
                admission.devices.len(),
                name(tightest),
                room(admission, tightest)
            );
        }
    }
    out
}

/// A device, with the shares on it if the daemon reports them.
fn name(verdict: &DeviceVerdict) -> String {
    match verdict.shares.as_slice() {
        [] => verdict.device.clone(),
        [share] => format!("{} (share {share})", verdict.device),
        shares => format!("{} (shares {})", verdict.device, shares.join(", ")),
    }
}

/// The room of a device: after the requested streams if they fit, else now.
fn room(admission: &Admission, verdict: &DeviceVerdict) -> String {
    let rate = show::bitrate(admission.bitrate);
    let other = "there may be more room for another rate";
    match (verdict.admitted, verdict.more_count) {
        (true, 0) => format!("after these there is room for no more of {rate}; {other}"),
        (true, count) => format!(
            "after these there is room for {count} more of {rate} each: {} in such streams; {other}",
            show::byte_rate(admission.bitrate / 8 * u64::from(count)),
        ),
        // The rest cannot be given in bytes per second: it depends on how clients read it.
        (false, 0) => format!(
            "room for none of {rate} now; {}",
            match verdict.lower {
                Some(lower) => format!(
                    "for {} of {} each: {} in such streams",
                    lower.count,
                    show::bitrate(lower.bitrate),
                    show::byte_rate(lower.bytes_per_s),
                ),
                None => String::from("nor for much lower rates"),
            }
        ),
        (false, count) => format!(
            "room for {count} now of {rate} each: {} in such streams; {other}",
            show::byte_rate(verdict.left_bytes_per_s),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rushes_control::LowerRate;

    #[test]
    fn a_verdict_reads_as_a_sentence() {
        let admission = Admission {
            admitted: false,
            bitrate: 100_000_000,
            count: 2,
            devices: vec![DeviceVerdict {
                device: String::from("md0"),
                shares: Vec::new(),
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
                shares: Vec::new(),
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
        assert!(told.contains("; nor for much lower rates"), "{told}");
        assert!(!told.contains(" 0 B/s"), "{told}");
    }
    #[test]
    fn a_yes_says_how_much_is_left_behind_it_and_where_least() {
        let verdict = |device: &str, shares: &[&str], more_count| DeviceVerdict {
            device: String::from(device),
            shares: shares.iter().map(|share| String::from(*share)).collect(),
            admitted: true,
            reason: String::from("0 streams are under contract here"),
            more_count,
            left_bytes_per_s: 12_500_000 * u64::from(2 + more_count),
            ..DeviceVerdict::default()
        };
        let mut admission = Admission {
            admitted: true,
            bitrate: 100_000_000,
            count: 2,
            devices: vec![verdict("sda", &["media"], 5)],
        };
        let one = text(&admission);
        let left =
            "after these there is room for 5 more of 100 Mb/s each: 62.5 MB/s in such streams";
        assert!(
            one.starts_with("sda (share media): yes, 2 streams"),
            "{one}"
        );
        assert!(one.contains(left) && !one.contains("tightest"), "{one}");
        admission.devices.push(verdict("sdb", &["a", "b"], 0));
        let both = text(&admission);
        let last = "yes on all 2 devices; the tightest is sdb (shares a, b): after these there is room for no more of 100 Mb/s;";
        assert!(both.lines().last().unwrap().starts_with(last), "{both}");
        admission.devices.clear();
        admission.admitted = false;
        assert!(text(&admission).starts_with("no, 2 streams of 100 Mb/s: no device"));
    }
}
