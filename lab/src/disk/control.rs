// SPDX-License-Identifier: Apache-2.0
//! Commands to a running slow disk and its answers: writes and reads of the `control` file.
//!
//! Commands are lines of text, so that a shell can send them: `echo timing off > …/control`. A read
//! returns one JSON object. No command waits for the disk.

use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;

use rushes_core::units::Duration;
use serde::{Deserialize, Serialize};

use super::timing::{Direction, Request, Service};

/// An injected fault.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// Requests that touch these bytes fail with EIO, after the time that they would have taken.
    Fail {
        /// Reads or writes.
        direction: Direction,
        /// First bad byte of the disk.
        start: u64,
        /// Number of bad bytes.
        length: u64,
        /// So many requests fail, then no more; `None`: all.
        count: Option<u64>,
    },
    /// The time of every request is multiplied by this; 1 is normal.
    Slow {
        /// At least 0.
        factor: f64,
    },
    /// No request ends for so long from now.
    Stall {
        /// Units: ms.
        ms: u64,
    },
}

impl Fault {
    /// True when it makes such a request fail.
    pub(super) fn hits(&self, direction: Direction, offset: u64, length: u64) -> bool {
        matches!(*self, Fault::Fail { direction: which, start, length: bad, count }
            if which == direction
                && count != Some(0)
                && offset < start.saturating_add(bad)
                && start < offset.saturating_add(length))
    }
}

/// A line of the control file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Command {
    /// `timing on`, `timing off`: off, the disk serves requests as fast as memory allows.
    Timing(bool),
    /// `fail read START LENGTH [COUNT]`, `slow FACTOR`, `stall MS`.
    Inject(Fault),
    /// `clear`: no faults from now on; a stall ends.
    Clear,
    /// `reset`: statistics start at zero.
    Reset,
    /// `power off SEED`: the cache loses pages that the seed chooses, the medium gets the others;
    /// every request fails from now on.
    PowerOff(u64),
    /// `power on`: the disk serves requests again.
    PowerOn,
    /// `stamps on KEY`: the disk notes from now on when pages stamped with this key come; `stamps
    /// off`: no more.
    Stamps(Option<NonZeroU64>),
    /// `record on`, `record off`: every change from now on goes into a log as well.
    Record(bool),
    /// `mark N`: a mark that the recording program puts between earlier and later changes.
    Mark(u64),
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Direction::Read => "read",
            Direction::Write => "write",
        })
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Command::Timing(true) => f.write_str("timing on"),
            Command::Timing(false) => f.write_str("timing off"),
            Command::Inject(Fault::Fail {
                direction,
                start,
                length,
                count,
            }) => {
                write!(f, "fail {direction} {start} {length}")?;
                count.map_or(Ok(()), |count| write!(f, " {count}"))
            }
            Command::Inject(Fault::Slow { factor }) => write!(f, "slow {factor}"),
            Command::Inject(Fault::Stall { ms }) => write!(f, "stall {ms}"),
            Command::Clear => f.write_str("clear"),
            Command::Reset => f.write_str("reset"),
            Command::PowerOff(seed) => write!(f, "power off {seed}"),
            Command::PowerOn => f.write_str("power on"),
            Command::Stamps(Some(key)) => write!(f, "stamps on {key}"),
            Command::Stamps(None) => f.write_str("stamps off"),
            Command::Record(true) => f.write_str("record on"),
            Command::Record(false) => f.write_str("record off"),
            Command::Mark(number) => write!(f, "mark {number}"),
        }
    }
}

fn number<T: FromStr>(word: &str, what: &str) -> Result<T, String> {
    word.parse()
        .map_err(|_| format!("read \"{word}\"; expected {what}"))
}

impl FromStr for Command {
    type Err = String;

    fn from_str(line: &str) -> Result<Command, String> {
        let words: Vec<&str> = line.split_whitespace().collect();
        Ok(match words.as_slice() {
            ["timing", "on"] => Command::Timing(true),
            ["timing", "off"] => Command::Timing(false),
            ["fail", which, start, length, rest @ ..] if rest.len() <= 1 => {
                Command::Inject(Fault::Fail {
                    direction: match *which {
                        "read" => Direction::Read,
                        "write" => Direction::Write,
                        other => {
                            return Err(format!(
                                "read \"fail {other}\": expected \"fail read\" or \"fail write\""
                            ));
                        }
                    },
                    start: number(start, "the first bad byte")?,
                    length: number(length, "a number of bytes")?,
                    count: rest
                        .first()
                        .map(|word| number(word, "a number of requests"))
                        .transpose()?,
                })
            }
            ["slow", factor] => {
                let factor: f64 = number(factor, "a factor")?;
                if !factor.is_finite() || factor < 0.0 {
                    return Err(format!("read \"slow {factor}\": expected 0 or more"));
                }
                Command::Inject(Fault::Slow { factor })
            }
            ["stall", ms] => Command::Inject(Fault::Stall {
                ms: number(ms, "a number of milliseconds")?,
            }),
            ["clear"] => Command::Clear,
            ["reset"] => Command::Reset,
            ["power", "off", seed] => Command::PowerOff(number(seed, "a seed")?),
            ["power", "on"] => Command::PowerOn,
            ["stamps", "on", key] => Command::Stamps(Some(number(key, "a key above 0")?)),
            ["stamps", "off"] => Command::Stamps(None),
            ["record", "on"] => Command::Record(true),
            ["record", "off"] => Command::Record(false),
            ["mark", number_word] => Command::Mark(number(number_word, "a number")?),
            _ => {
                return Err(format!(
                    "read \"{}\": expected timing on|off, fail read|write START LENGTH [COUNT], \
                     slow FACTOR, stall MS, clear, reset, power off SEED, power on, stamps on KEY, stamps off, record on|off or mark N",
                    line.trim()
                ));
            }
        })
    }
}

/// The traffic in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Flow {
    /// Requests served, failed ones included.
    pub request_count: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Requests that started where the last one ended.
    pub sequential_count: u64,
    /// Requests for which the head had to move.
    pub positioned_count: u64,
    /// Time that the disk worked for them. Units: ms.
    pub busy_ms: f64,
    /// Longest from arrival to answer. Units: ms.
    pub longest_wait_ms: f64,
    /// Requests that an injected fault failed.
    pub failed_count: u64,
}

impl Flow {
    /// Count one more request.
    pub(super) fn count(&mut self, request: &Request, service: &Service) {
        self.request_count += 1;
        self.bytes += request.length.0;
        self.sequential_count += u64::from(!service.positioned);
        self.positioned_count += u64::from(service.positioned);
        self.busy_ms += as_ms(service.busy);
        let wait_ms = as_ms(service.done.since(request.arrived));
        self.longest_wait_ms = self.longest_wait_ms.max(wait_ms);
    }
}

/// The statistics of a slow disk since it was put up or since the last reset; reads and writes
/// count only while the timing is on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Statistics {
    /// Size of the disk.
    pub disk_bytes: u64,
    /// True when requests take the time of the model.
    pub timing: bool,
    /// Time since these counts began. Units: ms.
    pub elapsed_ms: f64,
    /// Reads.
    pub read: Flow,
    /// Writes.
    pub write: Flow,
    /// Requests served as fast as possible because the timing was off.
    pub untimed_count: u64,
    /// Flushes; they take no time on a disk without a write cache.
    pub flush_count: u64,
    /// Writes that went into the write cache; `write` then counts the runs that the head destaged.
    pub cached_count: u64,
    /// Their bytes.
    pub cached_bytes: u64,
    /// Bytes in the write cache now that the medium does not have.
    pub cache_bytes: u64,
    /// True while the power is off.
    pub powerless: bool,
    /// Discards and zeroed ranges; they take no time.
    pub discard_count: u64,
    /// Requests that wait now, without the one in service.
    pub waiting_count: u64,
    /// The most requests that ever waited.
    pub waiting_count_max: u64,
    /// How long after the model's instant the disk answered, on average. Units: ms.
    pub oversleep_ms_mean: f64,
    /// The same, at worst.
    pub oversleep_ms_max: f64,
    /// Processor time of the serving process since it started. Units: ms.
    pub cpu_ms: f64,
    /// Runs of stamped pages for which the log of arrivals had no room.
    #[serde(default)]
    pub stamps_lost_count: u64,
    /// The injected faults that act now.
    pub faults: Vec<Fault>,
    /// The error of the last command that failed.
    pub last_error: Option<String>,
}

pub(super) fn as_ms(span: Duration) -> f64 {
    span.0 as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_read_back_as_they_were_written() {
        for line in [
            "timing on",
            "timing off",
            "fail read 4096 8192",
            "fail write 0 512 3",
            "slow 2.5",
            "stall 250",
            "clear",
            "reset",
            "power off 17",
            "power on",
            "stamps on 99",
            "stamps off",
            "record on",
            "record off",
            "mark 12",
        ] {
            let command: Command = line.parse().unwrap();
            assert_eq!(command.to_string(), line);
        }
    }

    #[test]
    fn nonsense_is_refused_with_what_was_expected() {
        for (line, expect) in [
            ("", "expected timing on|off"),
            ("timing maybe", "expected timing on|off"),
            ("fail both 0 1", "expected \"fail read\""),
            ("fail read x 1", "the first bad byte"),
            ("fail read 0 -1", "a number of bytes"),
            ("fail read 0 1 2 3", "expected timing"),
            ("slow -1", "0 or more"),
            ("slow NaN", "0 or more"),
            ("stall soon", "milliseconds"),
            ("power off", "power off SEED"),
            ("power off now", "a seed"),
            ("stamps on 0", "a key above 0"),
            ("record", "record on|off"),
            ("mark it", "a number"),
        ] {
            let error = line.parse::<Command>().unwrap_err();
            assert!(error.contains(expect), "{line}: {error}");
        }
    }
}
