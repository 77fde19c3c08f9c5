// SPDX-License-Identifier: Apache-2.0
//! Metadata: how many files a second clients create, examine, list, rename and delete in some
//! folders, in turn.
//!
//! Each client has a folder of its own, as each project has, or several; each round measures all
//! folders, so that other work of the machine affects all of them alike. Files are empty, but for
//! each `bytes_every`-th one: other experiments measure bytes.

use crate::reports::head::Head;
use crate::reports::outcome::Outcome;
use crate::stage::room::go_on;
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::time::Instant;

/// The operations on every file, in this order; rename is optional.
const OPERATIONS: [&str; 5] = ["create", "stat", "readdir", "rename", "unlink"];
/// The length of a file that is not empty. Units: bytes.
const SOME_BYTES: usize = 4096;

/// A folder with a label.
#[derive(Clone, Debug)]
pub struct LabelledFolder {
    /// Its name in the report.
    pub label: String,
    /// An empty folder, or one whose files have other names.
    pub path: PathBuf,
}

impl std::str::FromStr for LabelledFolder {
    type Err = String;

    fn from_str(text: &str) -> Result<LabelledFolder, String> {
        match text.split_once('=') {
            Some((label, path)) if !label.is_empty() && !path.is_empty() => Ok(LabelledFolder {
                label: label.to_owned(),
                path: PathBuf::from(path),
            }),
            _ => Err(format!("{text:?}: expected LABEL=FOLDER")),
        }
    }
}

/// The load.
#[derive(Clone, Debug)]
pub struct Metadata {
    /// The folders to measure.
    pub places: Vec<LabelledFolder>,
    /// Files of each client.
    pub file_count: u64,
    /// Numbers of clients at once, each measured.
    pub client_counts: Vec<u64>,
    /// Number of repetitions.
    pub round_count: u64,
    /// Folders for the files of each client.
    pub folder_count: u64,
    /// One file in so many has bytes; 0: none has.
    pub bytes_every: u64,
    /// Clients rename files before they delete them.
    pub renames: bool,
}

/// One JSON object. Fields may be added, never renamed or given another unit.
#[derive(Clone, Debug, Serialize)]
pub struct MetadataReport {
    /// Which experiment, server and disks.
    #[serde(flatten)]
    pub(crate) head: Head,
    /// Files of each client.
    pub files: u64,
    /// Folders for these files.
    pub folders: u64,
    /// One file in so many has bytes; 0: none has.
    pub bytes_every: u64,
    /// A row for each folder, number of clients and operation.
    pub rates: Vec<RateRow>,
}

/// The rate of an operation in a folder.
#[derive(Clone, Debug, Serialize)]
pub struct RateRow {
    /// Label of the folder.
    pub label: String,
    /// Clients at once.
    pub clients: u64,
    /// `create`, `stat`, `readdir`, which counts names, `rename`, `unlink`.
    pub operation: String,
    /// Rate of all clients together in each round. Units: operations a second.
    pub per_s: Vec<f64>,
    /// Their median.
    pub median_per_s: f64,
}

impl Metadata {
    /// Measure all folders.
    ///
    /// Errors   a folder cannot be written to, or has files of a former run
    pub fn run(&self) -> Result<MetadataReport> {
        let mut rates: Vec<RateRow> = Vec::new();
        for _ in 0..self.round_count {
            for &clients in &self.client_counts {
                for place in &self.places {
                    let found = self
                        .measure(&place.path, clients)
                        .with_context(|| format!("in {}", place.path.display()))?;
                    for (operation, per_s) in self.operations().zip(found) {
                        let row = rates.iter_mut().find(|row| {
                            row.label == place.label
                                && row.clients == clients
                                && row.operation == operation
                        });
                        match row {
                            Some(row) => row.per_s.push(per_s),
                            None => rates.push(RateRow {
                                label: place.label.clone(),
                                clients,
                                operation: operation.to_owned(),
                                per_s: vec![per_s],
                                median_per_s: 0.0,
                            }),
                        }
                    }
                }
            }
        }
        for row in &mut rates {
            let mut sorted = row.per_s.clone();
            sorted.sort_by(f64::total_cmp);
            row.median_per_s = sorted[sorted.len() / 2];
        }
        Ok(MetadataReport {
            head: Head::of("metadata"),
            files: self.file_count,
            folders: self.folder_count,
            bytes_every: self.bytes_every,
            rates,
        })
    }

    fn operations(&self) -> impl Iterator<Item = &'static str> {
        let renames = self.renames;
        OPERATIONS
            .into_iter()
            .filter(move |operation| renames || *operation != "rename")
    }

    /// Measures one folder. Returns operations a second, in their order.
    fn measure(&self, folder: &Path, clients: u64) -> Result<Vec<f64>> {
        let folders: Vec<PathBuf> = (0..clients)
            .map(|client| folder.join(format!("metadata{client}")))
            .collect();
        for folder in &folders {
            fs::create_dir(folder).with_context(|| format!("make {}", folder.display()))?;
            for part in self.parts(folder).iter().filter(|part| *part != folder) {
                fs::create_dir(part)?;
            }
        }
        let mut rates = Vec::new();
        for operation in self.operations() {
            go_on()?;
            let begin = Barrier::new(folders.len());
            let taken = std::thread::scope(|scope| {
                let running: Vec<_> = folders
                    .iter()
                    .map(|folder| {
                        let begin = &begin;
                        scope.spawn(move || {
                            begin.wait();
                            // The working thread takes the time: a thread that waits for it may
                            // wake up late.
                            let begun = Instant::now();
                            self.all(folder, operation)?;
                            Ok::<_, anyhow::Error>((begun, Instant::now()))
                        })
                    })
                    .collect();
                let mut times = Vec::new();
                for client in running {
                    match client.join() {
                        Ok(done) => times.push(done?),
                        Err(_) => bail!("a client panicked"),
                    }
                }
                let first = times.iter().map(|(begun, _)| *begun).min();
                let last = times.iter().map(|(_, ended)| *ended).max();
                let (first, last) = first.zip(last).context("there is no client")?;
                Ok(last - first)
            })?;
            rates.push((self.file_count * clients) as f64 / taken.as_secs_f64());
        }
        for folder in &folders {
            for part in self.parts(folder).iter().filter(|part| *part != folder) {
                fs::remove_dir(part)?;
            }
            fs::remove_dir(folder)?;
        }
        Ok(rates)
    }

    /// The folders of a client's files.
    fn parts(&self, folder: &Path) -> Vec<PathBuf> {
        match self.folder_count {
            1 => vec![folder.to_path_buf()],
            count => (0..count)
                .map(|number| folder.join(format!("{number:03}")))
                .collect(),
        }
    }

    fn all(&self, folder: &Path, operation: &str) -> Result<()> {
        let parts = self.parts(folder);
        let place = |number: u64| &parts[(number % self.folder_count) as usize];
        let name = |number: u64| place(number).join(format!("frame{number:07}.dpx"));
        let renamed = |number: u64| place(number).join(format!("frame{number:07}.new"));
        if operation == "readdir" {
            let mut count = 0;
            for part in &parts {
                count += fs::read_dir(part)?.count() as u64;
            }
            if count != self.file_count {
                bail!("{count} names were listed; expected {}", self.file_count);
            }
            return Ok(());
        }
        for number in 0..self.file_count {
            match operation {
                "create" => {
                    let mut file = File::create_new(name(number))?;
                    if self.bytes_every > 0 && number.is_multiple_of(self.bytes_every) {
                        file.write_all(&[1; SOME_BYTES])?;
                    }
                }
                // Not in the order of creation.
                "stat" => {
                    fs::symlink_metadata(name(stride(number, self.file_count)))?;
                }
                "rename" => fs::rename(name(number), renamed(number))?,
                _ if self.renames => fs::remove_file(renamed(number))?,
                _ => fs::remove_file(name(number))?,
            }
        }
        Ok(())
    }
}

/// The `number`-th of `count` files in another order.
///
/// Returns  each number below `count` once: the step has no divisor in common with it
fn stride(number: u64, count: u64) -> u64 {
    let step = [7u64, 11, 13, 17]
        .into_iter()
        .find(|step| !count.is_multiple_of(*step));
    number * step.unwrap_or(1) % count
}

impl Outcome for MetadataReport {
    fn table(&self) -> Result<String> {
        let mut out = String::new();
        let _ = writeln!(
            out,
            "{:<16} {:>7}  {}",
            "folder",
            "clients",
            OPERATIONS.map(|name| format!("{name:>10}/s")).join(" ")
        );
        let mut seen: Vec<(&str, u64)> = Vec::new();
        for row in &self.rates {
            let key = (row.label.as_str(), row.clients);
            if seen.contains(&key) {
                continue;
            }
            seen.push(key);
            let rates = OPERATIONS.map(|operation| {
                let row = self.rates.iter().find(|row| {
                    (row.label.as_str(), row.clients) == key && row.operation == operation
                });
                row.map_or_else(
                    || " ".repeat(12),
                    |row| format!("{:>12.0}", row.median_per_s),
                )
            });
            let _ = writeln!(out, "{:<16} {:>7}  {}", key.0, key.1, rates.join(" "));
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_is_counted_and_nothing_is_left() {
        let folder = std::env::temp_dir().join(format!("rushes-metadata-{}", std::process::id()));
        fs::create_dir(&folder).expect("a temporary folder");
        let load = Metadata {
            places: vec![LabelledFolder {
                label: String::from("here"),
                path: folder.clone(),
            }],
            file_count: 50,
            client_counts: vec![1, 3],
            round_count: 2,
            folder_count: 3,
            bytes_every: 10,
            renames: true,
        };
        let report = load.run().expect("it is ours");
        assert_eq!(report.rates.len(), 2 * OPERATIONS.len());
        for row in &report.rates {
            assert_eq!(row.per_s.len(), 2);
            assert!(row.median_per_s > 0.0);
        }
        assert_eq!(report.table().unwrap().lines().count(), 3);
        assert_eq!(fs::read_dir(&folder).expect("listed").count(), 0);
        let without = Metadata {
            renames: false,
            round_count: 1,
            ..load.clone()
        };
        let report = without.run().expect("it is ours");
        assert!(report.rates.iter().all(|row| row.operation != "rename"));
        assert_eq!(fs::read_dir(&folder).expect("listed").count(), 0);
        fs::create_dir(folder.join("metadata0")).expect("made");
        let said = load.run().expect_err("a former run is there").to_string();
        assert!(said.contains(&folder.display().to_string()), "{said}");
        fs::remove_dir_all(&folder).expect("ours");
    }

    #[test]
    fn each_file_is_looked_at_once() {
        for count in [1, 2, 50, 77, 7 * 11 * 13, 10_000] {
            let mut seen: Vec<u64> = (0..count).map(|number| stride(number, count)).collect();
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..count), "{count}");
        }
    }

    #[test]
    fn a_place_has_a_label_and_a_folder() {
        let place: LabelledFolder = "pool=/srv/a=b".parse().expect("a place");
        assert_eq!(
            (place.label.as_str(), place.path.to_str()),
            ("pool", Some("/srv/a=b"))
        );
        assert!("pool".parse::<LabelledFolder>().is_err());
        assert!("=x".parse::<LabelledFolder>().is_err());
    }
}
