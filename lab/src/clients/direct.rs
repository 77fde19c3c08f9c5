// SPDX-License-Identifier: Apache-2.0
//! A file for reads with O_DIRECT: no cache of the kernel has its bytes before or afterwards.
//!
//! Any place and length will do: it reads the pages around them. Absent: writing.

use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::io::Result;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// The alignment of memory, places and lengths that direct I/O requires. Units: bytes.
const ALIGN: u64 = 4096;

/// An open file, and memory for its largest request.
#[derive(Debug)]
pub struct DirectFile {
    file: File,
    memory: Vec<u8>,
}

impl DirectFile {
    /// Open it for reading.
    ///
    /// Errors   it is not there, or its file system has no direct I/O (EINVAL)
    pub fn open(path: &Path) -> Result<DirectFile> {
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(OFlags::DIRECT.bits() as i32)
            .open(path)?;
        Ok(DirectFile {
            file,
            memory: Vec::new(),
        })
    }

    /// One request; returns how much of `buffer` it filled.
    pub fn read_at(&mut self, buffer: &mut [u8], offset: u64) -> Result<usize> {
        let from = offset / ALIGN * ALIGN;
        let before = (offset - from) as usize;
        let length = (before + buffer.len()).next_multiple_of(ALIGN as usize);
        if self.memory.len() < length + ALIGN as usize {
            self.memory.resize(length + ALIGN as usize, 0);
        }
        let start = self.memory.as_ptr().align_offset(ALIGN as usize);
        let pages = &mut self.memory[start..start + length];
        let got = self.file.read_at(pages, from)?;
        let came = got.saturating_sub(before).min(buffer.len());
        buffer[..came].copy_from_slice(&pages[before..before + came]);
        Ok(came)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_any_place_come_and_end_with_the_file() {
        // A folder in memory may have no direct I/O; the build's folder has.
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
        let path = folder.join(format!("direct-{}.bin", std::process::id()));
        let content: Vec<u8> = (0..10_000u32).map(|at| (at / 7) as u8).collect();
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(&path, &content).unwrap();
        let opened = DirectFile::open(&path);
        std::fs::remove_file(&path).unwrap();
        let Ok(mut file) = opened else {
            assert!(
                std::env::var_os("RUSHES_TEST_ALL").is_none_or(|value| value != "1"),
                "{} has no direct I/O",
                folder.display()
            );
            eprintln!("SKIPPED bytes_of_any_place_come_and_end_with_the_file: no direct I/O");
            return;
        };
        for (offset, length, wanted) in [(0, 4096, 4096), (4000, 500, 500), (9999, 100, 1)] {
            let mut buffer = vec![0; length];
            let got = file.read_at(&mut buffer, offset).unwrap();
            assert_eq!(got, wanted, "{length} from {offset}");
            let right = &content[offset as usize..offset as usize + wanted];
            assert_eq!(&buffer[..got], right);
        }
        assert_eq!(file.read_at(&mut [0; 10], 10_000).unwrap(), 0);
    }
}
