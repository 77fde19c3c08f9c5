// SPDX-License-Identifier: Apache-2.0
//! A pool that needs tidying, and tidies itself while others play and record: who is late, how much
//! is moved, and is it right afterwards?
//!
//! Before the run files are put on the pool beside the footage: cut in pieces that lie among each
//! other (to be defragmented), or whole before members are added (to be spread, or striped wider).
//! The mount tidies from just before the first player's start to the last one's end. Afterwards
//! every byte of these files and of the footage is read, past all caches. Frames are not judged
//! here: the players do that.

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
/// Of files in pieces: so long is each. Units: bytes.
const PIECE_BYTES: u64 = 256 << 10;
/// Their clips are no stream's and no copier's.
const CLIP_BASE: u64 = 1 << 21;
/// Where they are, below the share.
const FOLDER: &str = "shots";

/// The disorder that there is to tidy.
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
    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Untidy::Rebalance => "rebalance",
            Untidy::Defrag => "defrag",
            Untidy::Grow => "grow",
        }
    }
}

/// The files that are put there, and how.
#[derive(Clone, Debug)]
pub struct Tidy {
    /// The disorder.
    pub untidy: Untidy,
    /// Files beside the footage.
    pub file_count: u64,
    /// Of each. Units: bytes.
    pub file_bytes: u64,
    /// When the pool tidies itself, in the words of `rushes pool policy`.
    pub schedule: String,
    /// Of the content.
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
    /// All of them. Units: bytes.
    pub file_bytes: u64,
    /// Moved while others played. Units: bytes.
    pub moved_bytes: u64,
    /// Files of which something was moved.
    pub moved_count: u64,
    /// All of the pool was gone through.
    pub is_whole: bool,
    /// Files that could not be moved.
    pub failed_count: u64,
    /// Of these files and of the footage, afterwards.
    pub tidied_bytes_wrong: u64,
    /// As the pool says it.
    pub status: Value,
}

impl Tidy {
    /// Room for them. Units: bytes.
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

    /// Files, then members.
    pub fn prepare(&self, stage: &Stage) -> Result<()> {
        let array = stage.array().filter(|_| stage.is_pool());
        let array = array.context("tidying is for pools; give --layout pool or pool-striped")?;
        stage.make_folder_anew(FOLDER)?;
        if self.untidy == Untidy::Grow {
            // Over groups of two, as many as there are.
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

    /// From now on.
    pub fn begin(&self, stage: &Stage) -> Result<()> {
        let array = stage.array().context("no pool")?;
        array.tidy(&self.schedule)
    }

    /// No more, and what it came to, as the pool says it.
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
            // Bytes that are not there are wrong.
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

    /// For people.
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
