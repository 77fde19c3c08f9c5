// SPDX-License-Identifier: Apache-2.0
//! `rushes recover`: writes, lists or deletes data that an ended daemon left in lanes.

use crate::args::RecoverArgs;
use crate::ask::{print_json, say};
use crate::serve::log_to_stderr;
use crate::show;
use rushes_daemon::config::{Config, DEFAULT_CONFIG};
use rushes_daemon::lanes_left::{DamageLeft, FileLeft, LaneLeft, give_up, list, list_in};
use rushes_daemon::{ServeError, config_of};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The program that starts this command names the folder of the missing daemon.
const RUNTIME_DIR: &str = "RUSHES_RUNTIME_DIR";

/// Ranges of a file, and damaged records of a lane, in the text; JSON has all.
const SHOWN_MAX: usize = 8;

pub(crate) fn run(args: &RecoverArgs) -> Result<ExitCode, String> {
    let config = match load(&args.config.config) {
        Err(error) if args.list => return list_all_the_same(args, &error),
        loaded => loaded?,
    };
    if let Some(lane) = args.give_up {
        return run_give_up(&config, lane, args.yes);
    }
    if args.list {
        return listed(list(&config), args.json);
    }
    log_to_stderr(&args.log)?;
    // If a door has started this command, its clients wait, and no person reads the output.
    let is_door_s = std::env::var_os(RUNTIME_DIR).is_some() && !std::io::stderr().is_terminal();
    let left = (!is_door_s).then(|| list(&config));
    let result = rushes_daemon::recover(config, args.hung_after);
    if let (Ok(()), Some(Ok(left))) = (&result, left) {
        tracing::info!("{}", recovered(&left));
    }
    match result {
        Err(ServeError::Running { dir, holder }) => Err(format!(
            "a daemon serves from {} ({holder}), so there is nothing to recover: it writes what \
             clients wrote, and what an earlier daemon left, by itself. `rushes status` says what \
             it cannot write, `rushes recover --list` lists what it has not written yet",
            dir.display()
        )),
        result => ended(result),
    }
}

fn listed(left: Result<Vec<LaneLeft>, ServeError>, as_json: bool) -> Result<ExitCode, String> {
    let left = left.map_err(|error| error.to_string())?;
    if as_json {
        print_json(&left)?;
    } else {
        say(&table(&left))?;
    }
    Ok(match left.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(1),
    })
}

/// The configuration cannot be used. If the folder with the lanes is known all the same, list them
/// behind the error.
fn list_all_the_same(args: &RecoverArgs, error: &str) -> Result<ExitCode, String> {
    let file = &args.config.config;
    let missed = std::env::var_os(RUNTIME_DIR).map(PathBuf::from);
    let Some(dir) = missed.or_else(|| Config::runtime_dir_of(file)) else {
        return Err(error.to_owned());
    };
    eprintln!(
        "rushes: {error}\nThis is what is left in {}; without a valid configuration files are \
         named by their numbers, and nothing can be written",
        dir.display()
    );
    listed(list_in(&dir, &[]), args.json)
}

/// The work of a recovery that left nothing. `left`: the lanes before it.
fn recovered(left: &[LaneLeft]) -> String {
    let writes: u64 = left.iter().map(|lane| lane.write_count).sum();
    let bytes = show::bytes(left.iter().map(|lane| lane.bytes).sum());
    match writes {
        0 => String::from("no data was left to be written"),
        1 => format!("the data that was left is on the disks: one write, {bytes}"),
        _ => format!("the data that was left is on the disks: {writes} writes, {bytes}"),
    }
}

/// The configuration that the user named; if none, and a door has named its missing daemon, that
/// daemon's.
fn load(named: &Path) -> Result<Config, String> {
    let is_named =
        named != Path::new(DEFAULT_CONFIG) || std::env::var_os("RUSHES_CONFIG").is_some();
    let missed = std::env::var_os(RUNTIME_DIR).map(PathBuf::from);
    let Some(missed) = missed.filter(|_| !is_named) else {
        return Config::load(named).map_err(|error| error.to_string());
    };
    let file = config_of(&missed).unwrap_or_else(|| named.to_path_buf());
    let config = Config::load(&file).map_err(|error| error.to_string())?;
    if !is_same_folder(&config.runtime_dir, &missed) {
        return Err(format!(
            "the data that is left is in {} ({RUNTIME_DIR}), but {} is the configuration of a \
             daemon with {}; expected the one of the first folder: rushes recover --config FILE",
            missed.display(),
            file.display(),
            config.runtime_dir.display()
        ));
    }
    Ok(config)
}

/// A door may have the path by another name: /var/run is a link.
fn is_same_folder(one: &Path, other: &Path) -> bool {
    one == other
        || matches!((one.canonicalize(), other.canonicalize()), (Ok(one), Ok(other)) if one == other)
}

/// 1: it has done its work, and some data is left.
pub(crate) fn ended(result: Result<(), ServeError>) -> Result<ExitCode, String> {
    match result {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error @ ServeError::Left { .. }) => {
            eprintln!("rushes: {error}");
            Ok(ExitCode::from(1))
        }
        Err(error) => Err(error.to_string()),
    }
}

fn run_give_up(config: &Config, lane: u32, yes: bool) -> Result<ExitCode, String> {
    if !yes {
        // First show the data concerned.
        let mut left = list(config).map_err(|error| error.to_string())?;
        left.retain(|left| left.lane == lane);
        if left.is_empty() {
            return Err(format!(
                "there is no data in a lane {lane}; `rushes recover --list` shows the lanes that \
                 have data"
            ));
        }
        say(&table(&left))?;
        return Err(format!(
            "nothing is given up: lane {lane} has acknowledged data; to lose it nevertheless: \
             rushes recover --give-up {lane} --yes"
        ));
    }
    give_up(config, lane).map_err(|error| match error {
        ServeError::Running { dir, holder } => format!(
            "nothing is given up: a daemon serves from {} ({holder}) and has the lanes; stop it \
             (`systemctl stop rushes`), and repeat this",
            dir.display()
        ),
        error => error.to_string(),
    })?;
    println!("lane {lane} is given up");
    Ok(ExitCode::SUCCESS)
}

fn table(left: &[LaneLeft]) -> String {
    if left.is_empty() {
        return String::from("nothing is left\n");
    }
    left.iter().map(of_lane).collect()
}

fn of_lane(lane: &LaneLeft) -> String {
    let what = format!(
        "{}, {}, of {}",
        show::count(lane.write_count, "write"),
        show::bytes(lane.bytes),
        show::count(lane.files.len() as u64, "file")
    );
    let mut out = match &lane.fault {
        None => format!("lane {}: {what}\n", lane.lane),
        // The fault names the lane.
        Some(fault) => format!(
            "{fault}\n  it takes {} of memory; still readable: {what}\n",
            show::bytes(lane.memory_bytes)
        ),
    };
    for file in &lane.files {
        out += &of_file(file, lane.fault.is_some());
    }
    for damage in lane.damage.iter().take(SHOWN_MAX) {
        out += &of_damage(damage, lane);
    }
    let more = lane.damage.len().saturating_sub(SHOWN_MAX);
    if more > 0 {
        let records = if more == 1 { "record" } else { "records" };
        out += &format!("  and {more} more damaged {records}: see --json\n");
    }
    out
}

fn of_file(file: &FileLeft, with_ranges: bool) -> String {
    let place = match &file.path {
        Some(path) => format!("{} (inode {})", path.display(), file.inode),
        None if file.inode == 0 => String::from("a file whose record is damaged"),
        None => format!(
            "inode {} of device {}:{}",
            file.inode, file.device_major, file.device_minor
        ),
    };
    let mut out = format!(
        "  {place}: {} in {}, up to byte {}\n",
        show::bytes(file.bytes),
        show::count(file.write_count, "write"),
        file.end
    );
    if with_ranges {
        let shown: Vec<String> = file
            .ranges
            .iter()
            .take(SHOWN_MAX)
            .map(|range| format!("{}-{}", range.start, range.end.saturating_sub(1)))
            .collect();
        let more = file.ranges.len().saturating_sub(SHOWN_MAX);
        let more = match more {
            0 => String::new(),
            _ => format!(" and {more} more ranges: see --json"),
        };
        out += &format!("    readable are bytes {}{more}\n", shown.join(", "));
    }
    out
}

fn of_damage(damage: &DamageLeft, lane: &LaneLeft) -> String {
    format!(
        "  damaged: record {} of a {}, at byte {} of {}: {}\n",
        damage.record,
        damage.what,
        damage.table_offset,
        lane.table.display(),
        damage.reason
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtime_folder_is_known_by_any_of_its_names() {
        let folder = std::env::temp_dir().join(format!("rushes-recover.{}", std::process::id()));
        let (real, link) = (folder.join("run"), folder.join("var-run"));
        std::fs::create_dir_all(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let missing = folder.join("missing");
        let found = (is_same_folder(&real, &link), is_same_folder(&real, &folder));
        let gone = (
            is_same_folder(&missing, &missing),
            is_same_folder(&missing, &real),
        );
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found, (true, false));
        assert_eq!(gone, (true, false));
    }
}
