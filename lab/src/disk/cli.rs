// SPDX-License-Identifier: Apache-2.0
//! `rushes-lab disk …`: the commands, their flags and their output.

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use rushes_core::units::ByteCount;

use super::control::Command;
use super::measure::{self, Plan};
use super::setup::{self, DiskError, DiskSpec, FileSystem, Room, SlowDisk};
use super::timing::DiskTiming;
use crate::amounts::{self, parse_amount};

/// Commands for slow disks.
#[derive(Debug, Subcommand)]
pub enum DiskCommand {
    /// Serve a disk that `up` or the lab has prepared (not for people).
    #[command(hide = true)]
    Serve {
        /// Its name.
        name: String,
        /// Stay until taken down.
        #[arg(long)]
        detached: bool,
    },
    /// Put a slow disk up; it stays until `down`.
    Up(Up),
    /// Take a disk down: unmount, detach, remove.
    Down {
        /// Its name.
        name: String,
    },
    /// Take down disks that killed runs left behind.
    Clean {
        /// Disks in use too.
        #[arg(long)]
        all: bool,
    },
    /// Measure Table 5 on a disk of its own and print it beside the paper's figures.
    Measure(Measure),
    /// Print the counts of the disks, as JSON.
    Stat {
        /// Its name; all disks without.
        name: Option<String>,
    },
    /// Tell a disk something: `timing on|off`, `fail read|write START LENGTH [COUNT]`, `slow
    /// FACTOR`, `stall MS`, `clear`, `reset`, `power off SEED`, `power on`, `stamps on KEY`,
    /// `stamps off`, `record on|off`, `mark N`.
    Tell {
        /// Its name.
        name: String,
        /// The command.
        #[arg(required = true, num_args = 1..)]
        words: Vec<String>,
    },
}

/// Flags of `disk up`.
#[derive(Debug, Args)]
pub struct Up {
    /// Its name.
    name: String,
    #[command(flatten)]
    kind: Kind,
    /// Make a file system on it.
    #[arg(long)]
    fs: Option<FileSystem>,
    /// Mount that in this folder.
    #[arg(long, requires = "fs")]
    mount: Option<PathBuf>,
}

/// Flags of `disk measure`.
#[derive(Debug, Args)]
pub struct Measure {
    #[command(flatten)]
    kind: Kind,
    /// Time for each of the 15 figures, in seconds.
    #[arg(long, default_value_t = 4.0, value_parser = parse_seconds)]
    seconds: f64,
    /// Reads only.
    #[arg(long)]
    no_writes: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Flags that describe a disk.
#[derive(Clone, Debug, Args)]
pub struct Kind {
    /// Size, for instance 40GB or 8GiB.
    #[arg(long, default_value = "40GiB", value_parser = parse_bytes)]
    size: ByteCount,
    /// Folder for the sparse file behind the disk.
    #[arg(long, default_value = "/dev/shm")]
    folder: PathBuf,
    /// Transfer rates, times those of Table 5.
    #[arg(long, default_value_t = 1.0)]
    rate: f64,
    /// Positioning times, times those of Table 5.
    #[arg(long, default_value_t = 1.0)]
    positioning: f64,
    /// With a volatile write cache of 256 MB, as the array of the paper had.
    #[arg(long)]
    write_back: bool,
}

impl Kind {
    /// The disk it describes.
    pub fn spec(&self) -> DiskSpec {
        let timing = if self.write_back {
            DiskTiming::TABLE5_WRITE_BACK
        } else {
            DiskTiming::TABLE5
        };
        DiskSpec {
            folder: self.folder.clone(),
            timing: timing
                .with_rates_times(self.rate)
                .with_positioning_times(self.positioning),
            ..DiskSpec::table5(self.size)
        }
    }
}

fn parse_bytes(text: &str) -> Result<ByteCount, String> {
    match parse_amount(text)? {
        0 => Err(String::from("a disk of 0 bytes has no room; expected more")),
        // The disk takes whole pages alone.
        bytes => Ok(ByteCount(bytes.next_multiple_of(4096))),
    }
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    match amounts::parse_seconds(text)? {
        seconds if (0.01..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err(format!("read \"{text}\": expected 0.01 s to 3600 s")),
    }
}

/// Runs a command.
pub fn run(command: &DiskCommand) -> Result<(), DiskError> {
    match command {
        DiskCommand::Serve { name, detached } => setup::serve(name, *detached),
        DiskCommand::Up(up) => put_up(up),
        DiskCommand::Down { name } => Room::named(name)?.take_down(false),
        DiskCommand::Clean { all } => {
            for name in setup::clean(*all)? {
                println!("took down {name}");
            }
            Ok(())
        }
        DiskCommand::Measure(flags) => measure_own(flags),
        DiskCommand::Stat { name } => print_statistics(name.as_deref()),
        DiskCommand::Tell { name, words } => {
            let command: Command = words
                .join(" ")
                .parse()
                .map_err(|reason: String| DiskError::new("command", name, reason))?;
            Room::named(name)?.command(&[command])
        }
    }
}

fn put_up(up: &Up) -> Result<(), DiskError> {
    let spec = DiskSpec {
        name: up.name.clone(),
        ..up.kind.spec()
    };
    let disk = SlowDisk::create_detached(&spec)?;
    let dressed = up
        .fs
        .map_or(Ok(()), |kind| disk.format(kind))
        .and_then(|()| match &up.mount {
            Some(folder) => disk.mount(folder, ""),
            None => Ok(()),
        });
    if let Err(error) = dressed {
        disk.close()?;
        return Err(error);
    }
    println!("{}", disk.block_device().display());
    Ok(())
}

fn measure_own(flags: &Measure) -> Result<(), DiskError> {
    let spec = flags.kind.spec();
    let disk = SlowDisk::create(&spec)?;
    let device = disk.block_device().display().to_string();
    let plan = Plan {
        time: Duration::from_secs_f64(flags.seconds),
        writes: !flags.no_writes,
    };
    let table = measure::measure(
        disk.block_device(),
        ByteCount(spec.bytes),
        spec.timing,
        plan,
        &mut |cell| {
            if !flags.json {
                eprintln!(
                    "{:>5} of {:>5} KiB: {:>7.1} Mb/s",
                    cell.direction,
                    cell.bytes >> 10,
                    cell.mbps
                );
            }
        },
    )
    .map_err(|error| DiskError::new("measure", &device, error))?;
    let statistics = disk.statistics()?;
    disk.close()?;
    let print = || {
        let mut out = std::io::stdout().lock();
        if flags.json {
            let json = serde_json::json!({ "table5": table, "statistics": statistics });
            return writeln!(out, "{json:#}");
        }
        table.print(&mut out)?;
        writeln!(
            out,
            "Answers left {:.2} ms late in the mean, {:.1} ms at worst; serving took {:.1} % of a processor.",
            statistics.oversleep_ms_mean,
            statistics.oversleep_ms_max,
            statistics.cpu_ms / statistics.elapsed_ms * 100.0
        )
    };
    print().map_err(|error| DiskError::new("print", "the table", error))
}

fn print_statistics(name: Option<&str>) -> Result<(), DiskError> {
    let rooms = match name {
        Some(name) => vec![Room::named(name)?],
        None => Room::all(),
    };
    let mut all = serde_json::Map::new();
    for room in rooms {
        let value = serde_json::to_value(room.statistics()?)
            .map_err(|error| DiskError::new("describe", &room.name(), error))?;
        all.insert(room.name(), value);
    }
    println!("{:#}", serde_json::Value::Object(all));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_units() {
        for (text, expect) in [
            ("4096", 4096),
            ("40GB", 40_000_000_000u64.next_multiple_of(4096)),
            ("8GiB", 8 << 30),
            ("1.5MiB", 3 << 19),
        ] {
            assert_eq!(parse_bytes(text), Ok(ByteCount(expect)), "{text}");
        }
        for text in ["", "GB", "0", "12 parsecs", "-3GB", "1e30GB"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }
}
