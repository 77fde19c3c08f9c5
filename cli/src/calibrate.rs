// SPDX-License-Identifier: Apache-2.0
//! `rushes calibrate`: measure a device, with a bar to look at and a table to keep.

use crate::args::CalibrateArgs;
use crate::ask::print_json;
use indicatif::{ProgressBar, ProgressStyle};
use rushes_daemon::calibrate::{Options, Progress, Stage, calibrate};
use rushes_daemon::config::{Config, DEFAULT_STATE_DIR};
use std::path::PathBuf;
use std::process::ExitCode;

/// Steps of the bar.
const STEP_COUNT: u64 = 1000;

pub(crate) fn run(args: &CalibrateArgs) -> Result<ExitCode, String> {
    let options = Options {
        path: args.path.clone(),
        quick: args.quick,
        writes: !args.no_writes,
    };
    let bar = bar();
    let mut tell = |progress: Progress| {
        bar.set_message(match progress.stage {
            Stage::Preparing => "preparing",
            Stage::Reading => "reading",
            Stage::Writing => "writing",
        });
        bar.set_position((progress.part.clamp(0.0, 1.0) * STEP_COUNT as f64) as u64);
    };
    let measured = calibrate(&options, &mut tell);
    bar.finish_and_clear();
    let calibration = measured.map_err(|error| error.to_string())?;
    if let Some(file) = &calibration.buffered_file {
        eprintln!(
            "warning: /dev/{0} is the file {file}, and its requests go through this machine's \
             memory: the result shows the memory as much as the disk, and contracts that rest on \
             it will not hold. Give it direct I/O (losetup --direct-io=on /dev/{0}), and measure \
             again",
            calibration.identity.disk
        );
    }
    let saved = if args.save {
        let dir = state_dir(args);
        Some(calibration.save(&dir).map_err(|error| error.to_string())?)
    } else {
        None
    };
    if args.json {
        print_json(&calibration)?;
        return Ok(ExitCode::SUCCESS);
    }
    calibration
        .print_table(&mut std::io::stdout())
        .map_err(|error| format!("the table cannot be printed: {error}"))?;
    match saved {
        Some(file) => println!(
            "\nsaved in {}; the daemon uses it from its next start or reload on (`systemctl reload \
             rushes`)",
            file.display()
        ),
        None => println!("\nnot saved; with --save the daemon will use it"),
    }
    Ok(ExitCode::SUCCESS)
}

/// Drawn on standard error, and only on a terminal.
fn bar() -> ProgressBar {
    let bar = ProgressBar::new(STEP_COUNT);
    if let Ok(style) = ProgressStyle::with_template("{msg:10} {wide_bar} {percent:>3} %  {eta:>4}")
    {
        bar.set_style(style);
    }
    bar
}

/// By the option, else by the configuration, else the default.
fn state_dir(args: &CalibrateArgs) -> PathBuf {
    if let Some(dir) = &args.state_dir {
        return dir.clone();
    }
    let file = &args.config.config;
    Config::load(file).map_or_else(
        |error| {
            // A measurement before there is a configuration needs no warning.
            if file.exists() {
                eprintln!(
                    "warning: {error}. The result goes to {DEFAULT_STATE_DIR}; if the daemon has \
                     another state folder, give it with --state-dir"
                );
            }
            PathBuf::from(DEFAULT_STATE_DIR)
        },
        |config| config.state_dir,
    )
}
