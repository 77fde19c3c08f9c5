// SPDX-License-Identifier: Apache-2.0
//! The steps of a workload: a seed decides them before the first is performed.
//!
//! Several lanes work side by side, each in a folder of its own, so that one syncs while another is
//! in the middle of a step; within a lane steps follow each other. Each lane has weights of its
//! own: some kinds of step never happen in it, others often.

use super::chance::Chance;

/// Lanes of a recording.
pub const LANE_COUNT: u64 = 3;

/// Steps of a lane.
const STEP_COUNT: usize = 120;

/// Files of a lane at one time; with their size it bounds the bytes on a small disk.
const FILES_MAX: usize = 5;
const FOLDERS_MAX: usize = 3;

/// Largest size of a file. Units: bytes.
const FILE_BYTES_MAX: u64 = 512 << 10;

const PAGE: u64 = 4096;

/// One step. Paths are relative to the root of the file system. The bytes written are
/// [`super::sector::content`] with the step's number plus one as generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// mkdir.
    MakeFolder {
        /// Its path.
        path: String,
    },
    /// A new, empty file.
    Create {
        /// Its number, unique in the recording.
        file: u64,
        /// Its path, where nothing is.
        path: String,
    },
    /// A write at any place, also behind the end.
    Write {
        /// Number of the file.
        file: u64,
        /// Units: bytes.
        offset: u64,
        /// Units: bytes.
        length: u64,
        /// By direct I/O; whole pages then.
        direct: bool,
    },
    /// A write with O_DSYNC, durable when it is answered, with all earlier writes of the file.
    WriteThrough {
        /// Number of the file.
        file: u64,
        /// Units: bytes.
        offset: u64,
        /// Units: bytes.
        length: u64,
    },
    /// Another size.
    Truncate {
        /// Number of the file.
        file: u64,
        /// Units: bytes.
        size: u64,
    },
    /// A hole: zeros in a range whose blocks are freed; the size stays.
    Punch {
        /// Number of the file.
        file: u64,
        /// Units: bytes.
        offset: u64,
        /// Units: bytes.
        length: u64,
    },
    /// Blocks without content; the size stays.
    Reserve {
        /// Number of the file.
        file: u64,
        /// Units: bytes.
        offset: u64,
        /// Units: bytes.
        length: u64,
    },
    /// fsync, or fdatasync.
    Sync {
        /// Number of the file.
        file: u64,
        /// fdatasync.
        data_only: bool,
    },
    /// fsync of a folder.
    SyncFolder {
        /// Its path.
        path: String,
    },
    /// A sync of the whole file system.
    SyncAll,
    /// The start of a file's write-back, without a wait for its end.
    LetGo {
        /// Number of the file.
        file: u64,
    },
    /// A rename; replaces a file that has the new name.
    Rename {
        /// Number of the file.
        file: u64,
        /// Its former path.
        from: String,
        /// Its path now.
        to: String,
    },
    /// The deletion of a file.
    Unlink {
        /// Number of the file.
        file: u64,
        /// Its former path.
        path: String,
    },
}

/// The folder of a path.
pub fn folder_of(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// The folder in which a lane works.
pub fn lane_folder(lane: u64) -> String {
    format!("lane{lane}")
}

/// The steps of one lane.
pub fn steps(seed: u64, lane: u64) -> Vec<Step> {
    Author::new(seed, lane).write()
}

struct Live {
    file: u64,
    path: String,
    size: u64,
}

struct Author {
    chance: Chance,
    lane: u64,
    weights: Vec<u64>,
    files_made: u64,
    names_made: u64,
    folders: Vec<String>,
    live: Vec<Live>,
    steps: Vec<Step>,
}

impl Author {
    fn new(seed: u64, lane: u64) -> Author {
        let mut chance = Chance::new(seed, lane);
        let usual = [8, 10, 10, 10, 4, 3, 4, 5, 6, 4, 6, 3, 1, 12, 2, 1, 3];
        let mut weights: Vec<u64> = usual
            .iter()
            .map(|weight| weight * chance.pick(&[0, 1, 1, 1, 3]))
            .collect();
        // Without files and writes a cut can lose nothing.
        for kind in [0, 1] {
            weights[kind] = weights[kind].max(usual[kind]);
        }
        // Nor where each write is synced at once: most lanes sync rarely, so that many writes are
        // under way.
        let patience = chance.pick(&[1, 4, 4]);
        for kind in [8, 9, 14, 15] {
            weights[kind] = (weights[kind] / patience).max(u64::from(kind == 8));
        }
        Author {
            chance,
            lane,
            weights,
            files_made: 0,
            names_made: 0,
            folders: vec![lane_folder(lane)],
            live: Vec::new(),
            steps: Vec::new(),
        }
    }

    fn write(mut self) -> Vec<Step> {
        while self.steps.len() < STEP_COUNT {
            let kind = self.chance.weighted(&self.weights);
            if self.live.is_empty() || kind == 0 {
                self.create();
            } else {
                let which = self.chance.below(self.live.len() as u64) as usize;
                self.act(kind, which);
            }
        }
        self.steps
    }

    fn act(&mut self, kind: usize, which: usize) {
        let Live { file, size, .. } = self.live[which];
        match kind {
            1 => {
                let offset = self.place(FILE_BYTES_MAX / 2);
                self.put(which, offset);
            }
            2 => self.put(which, size),
            3 => {
                let offset = self.place(size);
                self.put(which, offset);
            }
            4 => {
                let size = self.place(size);
                self.truncate(which, size);
            }
            5 => {
                let size = (size + self.place(64 << 10)).min(FILE_BYTES_MAX);
                self.truncate(which, size);
            }
            6 | 7 => {
                let offset = self.place(size + (32 << 10));
                let length = self.length();
                self.steps.push(if kind == 6 {
                    Step::Punch {
                        file,
                        offset,
                        length,
                    }
                } else {
                    Step::Reserve {
                        file,
                        offset,
                        length,
                    }
                });
            }
            8 | 9 => self.steps.push(Step::Sync {
                file,
                data_only: kind == 9,
            }),
            10 => self.replace(which),
            11 => self.unlink(which),
            12 => self.make_folder(),
            13 => self.steps.push(Step::LetGo { file }),
            14 => {
                let path = self.any_folder();
                self.steps.push(Step::SyncFolder { path });
            }
            15 => self.steps.push(Step::SyncAll),
            _ => self.move_away(which),
        }
    }

    fn any_folder(&mut self) -> String {
        let which = self.chance.below(self.folders.len() as u64) as usize;
        self.folders[which].clone()
    }

    /// A path without a file. Names repeat, so that one path names several files over time.
    fn free_path(&mut self) -> String {
        let folder = self.any_folder();
        for _ in 0..8 {
            let path = format!("{folder}/f{}", self.chance.below(8));
            if self.live.iter().all(|live| live.path != path) {
                return path;
            }
        }
        self.names_made += 1;
        format!("{folder}/g{}", self.names_made)
    }

    fn new_file(&mut self, path: String) {
        self.files_made += 1;
        let file = (self.lane << 32) | self.files_made;
        self.steps.push(Step::Create {
            file,
            path: path.clone(),
        });
        self.live.push(Live {
            file,
            path,
            size: 0,
        });
    }

    fn create(&mut self) {
        if self.live.len() >= FILES_MAX {
            let which = self.chance.below(self.live.len() as u64) as usize;
            return self.unlink(which);
        }
        let path = self.free_path();
        self.new_file(path);
        let new = self.live.len() - 1;
        match self.chance.below(10) {
            0 | 1 => {}
            2 => self.copy_in(new),
            _ => self.put(new, 0),
        }
    }

    /// Copies a file in as clients do: first the length, then the bytes, at last an fdatasync.
    fn copy_in(&mut self, which: usize) {
        let size = self.length().max(4 * PAGE);
        self.truncate(which, size);
        let file = self.live[which].file;
        if self.chance.percent(70) {
            let data_only = self.chance.percent(50);
            self.steps.push(Step::Sync { file, data_only });
        }
        for _ in 0..1 + self.chance.below(2) {
            let offset = self.place(size - 2 * PAGE);
            let length = self.place(size - offset).max(1);
            self.steps.push(Step::Write {
                file,
                offset,
                length,
                direct: false,
            });
        }
        let data_only = true;
        self.steps.push(Step::Sync { file, data_only });
    }

    /// An offset up to `most`: often on a page, often on a sector, sometimes anywhere.
    fn place(&mut self, most: u64) -> u64 {
        let unit = self.chance.pick(&[PAGE, PAGE, 512, 512, 1]);
        self.chance.below(most + 1) / unit * unit
    }

    fn length(&mut self) -> u64 {
        let most = self
            .chance
            .pick(&[2048, 16 << 10, 16 << 10, 64 << 10, 128 << 10]);
        self.place(most).max(self.chance.pick(&[1, 512, PAGE]))
    }

    fn put(&mut self, which: usize, offset: u64) {
        let mut length = self.length();
        let mut offset = offset.min(FILE_BYTES_MAX - PAGE);
        let direct = self.chance.percent(25);
        if direct {
            offset = offset / PAGE * PAGE;
            length = length.next_multiple_of(PAGE);
        }
        length = length.min(FILE_BYTES_MAX - offset);
        let live = &mut self.live[which];
        live.size = live.size.max(offset + length);
        let file = live.file;
        self.steps.push(match self.chance.below(12) {
            0 => Step::WriteThrough {
                file,
                offset,
                length,
            },
            _ => Step::Write {
                file,
                offset,
                length,
                direct,
            },
        });
    }

    fn truncate(&mut self, which: usize, size: u64) {
        let live = &mut self.live[which];
        live.size = size;
        self.steps.push(Step::Truncate {
            file: live.file,
            size,
        });
    }

    /// Saves a file as programs do: writes a new file beside the old one, syncs it, renames it over
    /// the old one and mostly syncs the folder.
    fn replace(&mut self, which: usize) {
        let to = self.live[which].path.clone();
        self.names_made += 1;
        let from = format!("{}/t{}", folder_of(&to), self.names_made);
        self.new_file(from.clone());
        let new = self.live.len() - 1;
        for _ in 0..1 + self.chance.below(3) {
            let offset = self.live[new].size;
            self.put(new, offset);
        }
        let file = self.live[new].file;
        let data_only = self.chance.percent(50);
        self.steps.push(Step::Sync { file, data_only });
        self.rename(new, from, to);
    }

    fn move_away(&mut self, which: usize) {
        let from = self.live[which].path.clone();
        let to = self.free_path();
        self.rename(which, from, to);
    }

    fn rename(&mut self, which: usize, from: String, to: String) {
        let file = self.live[which].file;
        let path = folder_of(&to).to_owned();
        self.live[which].path.clone_from(&to);
        self.live
            .retain(|live| live.file == file || live.path != to);
        self.steps.push(Step::Rename { file, from, to });
        if self.chance.percent(60) {
            self.steps.push(Step::SyncFolder { path });
        }
    }

    fn unlink(&mut self, which: usize) {
        let Live { file, path, .. } = self.live.swap_remove(which);
        let folder = folder_of(&path).to_owned();
        self.steps.push(Step::Unlink { file, path });
        if self.chance.percent(25) {
            self.steps.push(Step::SyncFolder { path: folder });
        }
    }

    fn make_folder(&mut self) {
        if self.folders.len() <= FOLDERS_MAX {
            let path = format!("{}/d{}", lane_folder(self.lane), self.folders.len());
            self.folders.push(path.clone());
            self.steps.push(Step::MakeFolder { path });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_decides_all_and_another_seed_something_else() {
        assert_eq!(steps(5, 1), steps(5, 1));
        assert_ne!(steps(5, 1), steps(6, 1));
        assert_ne!(steps(5, 1), steps(5, 2));
    }

    #[test]
    fn every_kind_of_step_happens_and_files_stay_small() {
        let mut seen = [false; 13];
        for seed in 0..40 {
            for step in steps(seed, 0) {
                if let Step::Write {
                    offset,
                    length,
                    direct,
                    ..
                } = step
                {
                    assert!(length > 0 && offset + length <= FILE_BYTES_MAX);
                    assert!(!direct || offset % PAGE == 0 && length % PAGE == 0);
                }
                seen[match step {
                    Step::MakeFolder { .. } => 0,
                    Step::Create { .. } => 1,
                    Step::Write { .. } => 2,
                    Step::Truncate { .. } => 3,
                    Step::Punch { .. } => 4,
                    Step::Reserve { .. } => 5,
                    Step::Sync { .. } => 6,
                    Step::SyncFolder { .. } => 7,
                    Step::SyncAll => 8,
                    Step::LetGo { .. } => 9,
                    Step::Rename { .. } => 10,
                    Step::Unlink { .. } => 11,
                    Step::WriteThrough { .. } => 12,
                }] = true;
            }
        }
        assert_eq!(seen, [true; 13]);
    }
}
