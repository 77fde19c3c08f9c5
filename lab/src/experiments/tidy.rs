// SPDX-License-Identifier: Apache-2.0
//! A pool that needs tidying, and tidies itself while others play and record: which players are
//! late, how much does the pool move, and are all bytes right afterwards?
//!
//! Before the run the lab writes files beside the footage: with interleaved extents, for a defrag,
//! or whole before it adds members, for a rebalance or for wider stripes. The mount tidies from
//! just before the first player's start to the last one's end. Afterwards the lab reads every byte
//! of these files and of the footage, past all caches. Absent: frames, which the players judge.

use crate::stage::Stage;
use crate::stage::footage::Clip;
use anyhow::{Context, Result, ensure};
use rustix::fs::{FallocateFlags, XattrFlags, fallocate, setxattr};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;

const BUFFER_BYTES: usize = 4 << 20;
/// Length of one interleaved extent. Units: bytes.
const PIECE_BYTES: u64 = 256 << 10;
/// Clip numbers of these files begin here, above those of streams and copiers.
const CLIP_BASE: u64 = 1 << 21;
/// Their folder, below the share.
const FOLDER: &str = "shots";

/// The disorder to tidy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Untidy {
    /// Members are added that have nothing; the others are fuller
    Rebalance,
    /// Files lie in pieces
    Defrag,
    /// A group of two members is added, over which striped files could be spread, too
    Grow,
}

impl Untidy {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Untidy::Rebalance => "rebalance",
            Untidy::Defrag => "defrag",
            Untidy::Grow => "grow",
        }
    }
}

/// The files to tidy.
#[derive(Clone, Debug)]
pub struct Tidy {
    /// The disorder.
    pub untidy: Untidy,
    /// Files beside the footage.
    pub file_count: u64,
    /// Size of each. Units: bytes.
    pub file_bytes: u64,
    /// When the pool tidies itself, in the words of `rushes pool policy`.
    pub schedule: String,
    /// Seed of the content.
    pub seed: u64,
}

/// The results. Fields may be added, never renamed or given another unit.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct TidyReport {
    /// `rebalance`, `defrag` or `grow`.
    pub untidy: String,
    /// When the pool tidied itself.
    pub schedule: String,
    /// Files beside the footage.
    pub files: u64,
    /// Size of all of them together. Units: bytes.
    pub file_bytes: u64,
    /// Bytes that the pool moved while others played. Units: bytes.
    pub moved_bytes: u64,
    /// Files of which it moved bytes.
    pub moved_count: u64,
    /// The pool went through all of its files.
    pub is_whole: bool,
    /// Files that could not be moved.
    pub failed_count: u64,
    /// Wrong bytes of these files and of the footage, afterwards.
    pub tidied_bytes_wrong: u64,
    /// The pool's status.
    pub status: Value,
}

impl Tidy {
    /// Room for the files. Units: bytes.
    pub fn bytes(&self) -> u64 {
        self.file_count * self.file_bytes
    }

    fn path(number: u64) -> String {
        format!("{FOLDER}/shot{number:03}.mov")
    }

    fn clip(&self, number: u64) -> Clip {
        Clip {
            seed: self.seed,
            number: CLIP_BASE + number,
        }
    }

    /// Writes the files, then adds members.
    pub fn prepare(&self, stage: &Stage) -> Result<()> {
        let array = stage.array().filter(|_| stage.is_pool());
        let array = array.context("tidying is for pools; give --layout pool or pool-striped")?;
        stage.make_folder_anew(FOLDER)?;
        if self.untidy == Untidy::Grow {
            // Stripes over as many groups of two members as there are.
            let words = format!("striped={}x2", stage.disk_count() / 2);
            let (folder, words) = (stage.root().join(FOLDER), words.as_bytes());
            setxattr(&folder, "user.rushes.policy", words, XattrFlags::empty())
                .context("the policy of a folder cannot be set")?;
        }
        let mut files = Vec::new();
        for number in 0..self.file_count {
            let path = stage.root().join(Tidy::path(number));
            let file = File::create(&path).with_context(|| format!("{}", path.display()))?;
            files.push(file);
        }
        if self.untidy == Untidy::Defrag {
            for at in (0..self.file_bytes).step_by(PIECE_BYTES as usize) {
                for file in &files {
                    let length = PIECE_BYTES.min(self.file_bytes - at);
                    fallocate(file, FallocateFlags::empty(), at, length)
                        .context("a file in pieces cannot be made")?;
                }
            }
        }
        let mut buffer = vec![0; BUFFER_BYTES];
        for (number, file) in files.iter().enumerate() {
            let mut at = 0;
            while at < self.file_bytes {
                let length = (BUFFER_BYTES as u64).min(self.file_bytes - at) as usize;
                self.clip(number as u64).fill(at, &mut buffer[..length]);
                file.write_all_at(&buffer[..length], at)?;
                at += length as u64;
            }
            file.sync_all()?;
        }
        drop(files);
        array.add_members()
    }

    /// Let the pool tidy itself from now on.
    pub fn begin(&self, stage: &Stage) -> Result<()> {
        let array = stage.array().context("no pool")?;
        array.tidy(&self.schedule)
    }

    /// End the tidying; returns the pool's status.
    pub fn end(&self, stage: &Stage) -> Result<Value> {
        let array = stage.array().context("no pool")?;
        array.tidy("off")?;
        array.pool_status()
    }

    /// Read everything back, when the server is gone.
    pub fn judge(&self, stage: &Stage, status: Value) -> Result<TidyReport> {
        let last = &status["tidy"]["last"];
        let of = |kind: &str, name: &str| last[kind][name].as_u64().unwrap_or(0);
        let sum = |name: &str| of("rebalance", name) + of("defrag", name);
        let plan = stage.plan();
        let mut wrong = 0;
        for number in 0..self.file_count {
            let path = stage.root().join(Tidy::path(number));
            wrong += wrong_bytes(&path, self.clip(number), self.file_bytes)?;
        }
        if !plan.sequence {
            for stream in 0..plan.stream_count {
                let path = stage.root().join(plan.stream_path(stream));
                let bytes = plan.frame_offset(plan.frame_count);
                wrong += wrong_bytes(&path, plan.stream_clip(stream), bytes)?;
            }
        }
        Ok(TidyReport {
            untidy: self.untidy.name().to_owned(),
            schedule: self.schedule.clone(),
            files: self.file_count,
            file_bytes: self.bytes(),
            moved_bytes: sum("moved_bytes"),
            moved_count: sum("moved_count"),
            is_whole: last["is_whole"].as_bool().unwrap_or(false),
            failed_count: last["failed_count"].as_u64().unwrap_or(0),
            tidied_bytes_wrong: wrong,
            status,
        })
    }
}

fn wrong_bytes(path: &Path, clip: Clip, bytes: u64) -> Result<u64> {
    let mut file = File::open(path).with_context(|| format!("{}", path.display()))?;
    let mut buffer = vec![0; BUFFER_BYTES];
    let (mut at, mut wrong) = (0, 0);
    while at < bytes {
        let wanted = (bytes - at).min(BUFFER_BYTES as u64) as usize;
        let got = file.read(&mut buffer[..wanted])?;
        if got == 0 {
            // Missing bytes are wrong.
            return Ok(wrong + bytes - at);
        }
        wrong += clip.wrong_bytes(at, &buffer[..got]);
        at += got as u64;
    }
    Ok(wrong)
}

impl TidyReport {
    /// Errors   a wrong byte, or a file that could not be moved
    pub fn check(&self) -> Result<()> {
        ensure!(
            self.tidied_bytes_wrong == 0 && self.failed_count == 0,
            "{} bytes are wrong, and {} files could not be moved; the report has them",
            self.tidied_bytes_wrong,
            self.failed_count
        );
        Ok(())
    }

    /// The report as text for people.
    pub fn text(&self) -> String {
        format!(
            "  tidied meanwhile ({}): {} MiB of {} files moved, {}; {} bytes wrong\n",
            self.untidy,
            self.moved_bytes >> 20,
            self.moved_count,
            match self.is_whole {
                true => "all is in order",
                false => "not done yet",
            },
            self.tidied_bytes_wrong
        )
    }
}
