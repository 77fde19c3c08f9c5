// SPDX-License-Identifier: Apache-2.0
//! Real files behind the clips of an EDL: found by name in a folder, copied onto the stage, and
//! compared with the pieces that clients got.
//!
//! A client notes a hash of each piece; the lab reads the originals when all clients have ended, so
//! that the comparison delays no frame.

use super::editor::Hashed;
use super::edl::Event;
use crate::stage::{Plan, Stage};
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

/// A file that stands behind a clip.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Original {
    /// Its path.
    pub path: PathBuf,
    /// Units: bytes.
    pub bytes: u64,
}

/// The file of each clip, in the order in which clips appear.
///
/// Errors   one is missing, or too short for the stretch that the list shows of it: the line, the
/// file or size found, the one expected, the remedy
pub fn find(events: &[Event], folder: &Path, frame_bytes: u64) -> Result<Vec<Original>> {
    let mut known: BTreeMap<String, PathBuf> = BTreeMap::new();
    let entries = fs::read_dir(folder)
        .with_context(|| format!("{} (--media) cannot be listed", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        if path.is_file() {
            known.insert(name_of(&path.to_string_lossy()), path);
        }
    }
    let mut originals: Vec<Original> = Vec::new();
    for event in events {
        let Some(clip) = event.clip else {
            continue;
        };
        if clip == originals.len() {
            let names = [&event.name, &event.reel];
            let found = names.iter().find_map(|name| known.get(&name_of(name)));
            let Some(path) = found else {
                bail!(
                    "line {}: neither the clip `{}` nor its reel `{}` is a file of {}; expected one of that name, with any extension: put it \
                     there, or leave --media out, and files of the lab stand in",
                    event.line,
                    event.name,
                    event.reel,
                    folder.display()
                );
            };
            let bytes = fs::metadata(path)?.len();
            originals.push(Original {
                path: path.clone(),
                bytes,
            });
        }
        let original = &originals[clip];
        let wanted = (event.from + event.frame_count) * frame_bytes;
        ensure!(
            wanted <= original.bytes,
            "line {}: frames {} to {} of `{}` were read, and {} has {} of {frame_bytes} bytes; give the rate of the footage with --bitrate \
             and --fps, or a longer file",
            event.line,
            event.from,
            event.from + event.frame_count,
            event.name,
            original.path.display(),
            original.bytes / frame_bytes.max(1)
        );
    }
    ensure!(
        !originals.is_empty(),
        "it shows nothing but black; leave --media out"
    );
    Ok(originals)
}

/// The name without folder and extension, in lower case.
fn name_of(name: &str) -> String {
    let stem = Path::new(name).file_stem().unwrap_or_default();
    stem.to_string_lossy().to_lowercase()
}

/// Copies a file to its path on the stage and syncs it.
pub fn copy(original: &Original, path: &Path) -> Result<()> {
    let cannot = || format!("{} cannot be copied", original.path.display());
    fs::copy(&original.path, path).with_context(cannot)?;
    File::open(path)?.sync_all().with_context(cannot)
}

/// Bytes of the pieces that differ from the original.
pub fn wrong_bytes(original: &Original, pieces: &[&Hashed]) -> Result<u64> {
    let cannot = || format!("{} cannot be read", original.path.display());
    let file = File::open(&original.path).with_context(cannot)?;
    let mut wrong = 0;
    let mut buffer = Vec::new();
    for piece in pieces {
        buffer.resize(piece.bytes as usize, 0);
        file.read_exact_at(&mut buffer, piece.place)
            .with_context(cannot)?;
        // A hash does not say how many bytes differ: the whole piece counts.
        if xxh3_64(&buffer) != piece.hash {
            wrong += piece.bytes;
        }
    }
    Ok(wrong)
}

/// A stage with these files in place of made-up footage.
pub fn prepare(
    room: &crate::stage::room::Room,
    place: &crate::stage::ground::Place,
    plan: &Plan,
    originals: &[Original],
) -> Result<Stage> {
    Stage::prepare_real(room, place, plan, &mut |stream, path| {
        let original = originals.get(stream as usize);
        copy(original.context("a clip without a file")?, path)
    })
}

#[cfg(test)]
mod tests {
    use super::super::edl;
    use super::*;

    const LIST: &str = "001 A001 V C 01:00:00:00 01:00:02:00 00:00:00:00 00:00:02:00\n\
        * FROM CLIP NAME: Take One.mov\n\
        002 A002 V C 01:00:00:00 01:00:01:00 00:00:02:00 00:00:03:00\n\
        003 A001 V C 01:00:00:00 01:00:01:00 00:00:03:00 00:00:04:00\n\
        * FROM CLIP NAME: Take One.mov\n";

    fn folder(files: &[(&str, u64)]) -> crate::stage::room::Room {
        let room = crate::stage::room::Room::create().unwrap();
        for (name, bytes) in files {
            let file = File::create(room.path().join(name)).unwrap();
            file.set_len(*bytes).unwrap();
        }
        room
    }

    #[test]
    fn clips_are_found_by_name_or_by_reel() {
        let events = edl::parse(LIST.as_bytes(), 25).unwrap();
        let room = folder(&[("take one.MXF", 5000), ("a002.mov", 2500)]);
        let found = find(&events, room.path(), 100).unwrap();
        let sizes: Vec<u64> = found.iter().map(|original| original.bytes).collect();
        assert_eq!(sizes, [5000, 2500]);
    }

    #[test]
    fn a_clip_that_is_not_there_or_too_short_is_named_with_its_line() {
        let events = edl::parse(LIST.as_bytes(), 25).unwrap();
        let room = folder(&[("take one.MXF", 5000)]);
        let said = format!("{:#}", find(&events, room.path(), 100).unwrap_err());
        for part in ["line 3", "`A002`", "any extension", "--media"] {
            assert!(said.contains(part), "{part} is not in: {said}");
        }
        let said = format!("{:#}", find(&events, room.path(), 101).unwrap_err());
        for part in [
            "line 1",
            "`Take One.mov`",
            "take one.MXF has 49",
            "--bitrate",
        ] {
            assert!(said.contains(part), "{part} is not in: {said}");
        }
    }

    #[test]
    fn a_piece_that_is_another_is_wrong_as_a_whole() {
        let room = folder(&[]);
        let path = room.path().join("a.mov");
        fs::write(&path, b"0123456789").unwrap();
        let original = Original { path, bytes: 10 };
        let piece = |place, content: &[u8]| Hashed {
            file: 0,
            place,
            bytes: content.len() as u64,
            hash: xxh3_64(content),
        };
        let (right, wrong) = (piece(2, b"2345"), piece(6, b"6780"));
        assert_eq!(wrong_bytes(&original, &[&right, &wrong]).unwrap(), 4);
    }
}
