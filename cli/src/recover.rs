// SPDX-License-Identifier: Apache-2.0
//! `rushes recover`: what a daemon that ended has left in lanes, written, listed or given up.

use crate::args::RecoverArgs;
use crate::serve::log_to_stderr;
use crate::show;
use rushes_daemon::config::Config;
use rushes_daemon::lanes_left::{LaneLeft, give_up, list};
use std::process::ExitCode;

pub(crate) fn run(args: &RecoverArgs) -> Result<ExitCode, String> {
    let config = Config::load(&args.config.config).map_err(|error| error.to_string())?;
    if let Some(lane) = args.give_up {
        give_up(&config, lane).map_err(|error| error.to_string())?;
        println!("lane {lane} is given up");
        return Ok(ExitCode::SUCCESS);
    }
    if args.list {
        let left = list(&config).map_err(|error| error.to_string())?;
        if args.json {
            let text = serde_json::to_string_pretty(&left).map_err(|error| error.to_string())?;
            println!("{text}");
        } else {
            print!("{}", table(&left));
        }
        return Ok(ExitCode::SUCCESS);
    }
    log_to_stderr(&args.log)?;
    rushes_daemon::recover(config, args.hung_after).map_err(|error| error.to_string())?;
    Ok(ExitCode::SUCCESS)
}

fn table(left: &[LaneLeft]) -> String {
    if left.is_empty() {
        return String::from("nothing is left\n");
    }
    let mut out = String::new();
    for lane in left {
        match &lane.fault {
            Some(fault) => out += &format!("lane {}: cannot be read: {fault}\n", lane.lane),
            None => {
                out += &format!(
                    "lane {}: {} writes, {}, of {} files\n",
                    lane.lane,
                    lane.write_count,
                    show::bytes(lane.bytes),
                    lane.files.len()
                );
            }
        }
        for file in &lane.files {
            out += &format!(
                "  inode {} of device {}:{}: {} in {} writes, up to byte {}\n",
                file.inode,
                file.device_major,
                file.device_minor,
                show::bytes(file.bytes),
                file.write_count,
                file.end
            );
        }
    }
    out
}
