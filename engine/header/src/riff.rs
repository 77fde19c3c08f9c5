// SPDX-License-Identifier: Apache-2.0
//! AVI and WAV: chunks of four letters and a little-endian length, padded to even.
//!
//! The crate `riff` walks the chunks, but allocates as many bytes as a chunk claims to have, and
//! parses none of their bodies. The probe needs a few words at fixed places:
//!
//! | chunk | offset in its data | bytes | meaning |
//! |---|---|---|---|
//! | `avih` | 0 | 4 | microseconds a frame |
//! | | 16 | 4 | frames in the first RIFF |
//! | `strh` | 0 | 4 | `vids` for pictures |
//! | | 20, 24, 32 | 4 each | scale, rate (rate/scale a second), length |
//! | `dmlh` | 0 | 4 | frames in all RIFFs (OpenDML) |
//! | `fmt ` | 8 | 4 | bytes a second |
//! | `ds64` | 8 | 8 | length of `data` (RF64, BW64) |
//!
//! A file may still be incomplete. A WAV header declares its byte rate. For an AVI, the probe takes
//! bytes and frames of the same part: those declared for the first RIFF, or all, once the last RIFF
//! ends where the file does.

use crate::source::{Source, broken, part};
use crate::{Container, HeaderError, HeaderFacts, duration_of, facts, frames_per_kilosecond};

/// Chunks looked at before giving up: `bext`, `iXML`, `junk` and their like come first.
const CHUNK_COUNT_MAX: u32 = 256;

/// RIFFs of one AVI that the probe steps over; in a file with more, the first gives the rate.
const RIFF_COUNT_MAX: u32 = 32;

/// A first RIFF as long as this may be followed by others. Units: bytes.
const RIFF_BYTES_LARGE: u32 = 500 << 20;

/// A length that says "see `ds64`" or "not known yet".
const LENGTH_UNKNOWN: u32 = u32::MAX;

/// The contents of a RIFF file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Avi,
    Wave,
}

/// The form, if these first bytes are of a RIFF file that we know.
pub(crate) fn form_of(start: &[u8; 12]) -> Option<Form> {
    match (&start[..4], &start[8..]) {
        (b"RIFF", b"AVI ") => Some(Form::Avi),
        (b"RIFF" | b"RF64" | b"BW64", b"WAVE") => Some(Form::Wave),
        _ => None,
    }
}

pub(crate) fn probe(
    source: &mut Source<'_>,
    form: Form,
) -> Result<Option<HeaderFacts>, HeaderError> {
    match form {
        Form::Avi => probe_avi(source),
        Form::Wave => probe_wave(source),
    }
}

struct Chunk {
    kind: [u8; 4],
    data: u64,
    length: u32,
}

/// Chunks one after the other, from `at` to `end`.
struct Chunks {
    at: u64,
    end: u64,
    left: u32,
    container: Container,
}

impl Chunks {
    fn new(container: Container, at: u64, end: u64) -> Chunks {
        Chunks {
            at,
            end,
            left: CHUNK_COUNT_MAX,
            container,
        }
    }

    fn next(&mut self, source: &mut Source<'_>) -> Result<Option<Chunk>, HeaderError> {
        if self.at.saturating_add(8) > self.end {
            return Ok(None);
        }
        self.left = self.left.checked_sub(1).ok_or(HeaderError::TooScattered)?;
        let Some(head) = source.head::<8>(self.at)? else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(part(&head, 4));
        let chunk = Chunk {
            kind: part(&head, 0),
            data: self.at + 8,
            length,
        };
        if !chunk.kind.iter().all(|byte| (0x20..0x7f).contains(byte)) {
            return Err(broken(
                self.container,
                self.at,
                "the name of a chunk is not text",
            ));
        }
        self.at = chunk.data + u64::from(length) + u64::from(length % 2);
        Ok(Some(chunk))
    }
}

// ---- AVI ----

#[derive(Default)]
struct AviHeader {
    frame_us: u32,
    frame_count: u32,
    /// Of the pictures: scale, rate, length.
    pictures: Option<(u32, u32, u32)>,
    frame_count_all: u32,
}

/// A list with media.
#[derive(Clone, Copy)]
struct Media {
    start: u64,
    /// As declared; None while it is being written. Units: bytes.
    length: Option<u32>,
}

fn probe_avi(source: &mut Source<'_>) -> Result<Option<HeaderFacts>, HeaderError> {
    let mut header = AviHeader::default();
    let mut chunks = Chunks::new(Container::Avi, 12, source.size());
    while let Some(chunk) = chunks.next(source)? {
        if &chunk.kind != b"LIST" {
            continue;
        }
        let list = source.array::<4>(chunk.data)?.unwrap_or_default();
        let end = chunk.data + u64::from(chunk.length);
        match &list {
            b"hdrl" => read_hdrl(source, &mut header, chunk.data + 4, end)?,
            // Everything from here on is media and its index.
            b"movi" => {
                let media = Media {
                    start: chunk.data,
                    length: known(chunk.length),
                };
                return header.facts_of(source, media);
            }
            _ => {}
        }
    }
    Ok(None)
}

/// A length that the writer has filled in.
fn known(length: u32) -> Option<u32> {
    Some(length).filter(|&length| length > 4 && length != LENGTH_UNKNOWN)
}

/// Where the RIFF chunk at `at` ends, as declared. None: there is none, or it does not say.
fn riff_end(source: &mut Source<'_>, at: u64) -> Result<Option<u64>, HeaderError> {
    let head = source.head::<8>(at)?.unwrap_or_default();
    let length = u32::from_le_bytes(part(&head, 4));
    let length = known(length).filter(|_| &head[..4] == b"RIFF");
    Ok(length.map(|length| at + 8 + u64::from(length) + u64::from(length % 2)))
}

/// Descends into the lists of the header: one per stream, and OpenDML's.
fn read_hdrl(
    source: &mut Source<'_>,
    header: &mut AviHeader,
    start: u64,
    end: u64,
) -> Result<(), HeaderError> {
    if end > source.size() {
        let problem = "the header list is longer than the file";
        return Err(broken(Container::Avi, start, problem));
    }
    let mut chunks = Chunks::new(Container::Avi, start, end);
    while let Some(chunk) = chunks.next(source)? {
        match &chunk.kind {
            // Enter the list: its chunks come next.
            b"LIST" => chunks.at = chunk.data + 4,
            b"avih" => {
                let body = source.array::<20>(chunk.data)?.unwrap_or_default();
                header.frame_us = u32::from_le_bytes(part(&body, 0));
                header.frame_count = u32::from_le_bytes(part(&body, 16));
            }
            b"strh" if header.pictures.is_none() => {
                let body = source.array::<36>(chunk.data)?.unwrap_or([0; 36]);
                let word = |at| u32::from_le_bytes(part(&body, at));
                let is_video = &body[..4] == b"vids";
                header.pictures = is_video.then(|| (word(20), word(24), word(32)));
            }
            b"dmlh" => {
                let body = source.array::<4>(chunk.data)?.unwrap_or_default();
                header.frame_count_all = u32::from_le_bytes(body);
            }
            _ => {}
        }
    }
    Ok(())
}

impl AviHeader {
    /// The facts declared of the first RIFF, or of all of them where all are there.
    fn facts_of(
        &self,
        source: &mut Source<'_>,
        media: Media,
    ) -> Result<Option<HeaderFacts>, HeaderError> {
        let (Some(length), Some(first_end)) = (media.length, riff_end(source, 0)?) else {
            // The writer has not filled in the length yet.
            return Ok(None);
        };
        let all = self.frame_count_all.max(self.stream_length());
        let only = (u64::from(length), all.max(self.frame_count));
        let found = if first_end > source.size() {
            self.first_alone(length)
        } else if source.size() - first_end < 12 {
            Some(only)
        } else {
            let mut end = first_end;
            let mut count = 0;
            while count < RIFF_COUNT_MAX
                && let Some(next) = riff_end(source, end)?
            {
                end = next;
                count += 1;
            }
            if count == 0 {
                match source.head::<8>(first_end)?.unwrap_or_default() {
                    // A copy whose size was set before its bytes were there.
                    [0, 0, 0, 0, 0, 0, 0, 0] => self.first_alone(length),
                    // The next RIFF is being written: frames of it are not in the first one.
                    [b'R', b'I', b'F', b'F', ..] if self.frame_count > 0 => {
                        Some((u64::from(length), self.frame_count))
                    }
                    // Other bytes behind an only RIFF.
                    _ => Some(only),
                }
            } else if end <= source.size() && source.size() - end < 12 {
                Some((end - media.start, all.max(self.frame_count)))
            } else {
                let is_first = all > self.frame_count;
                is_first.then_some((u64::from(length), self.frame_count))
            }
        };
        Ok(found.and_then(|(bytes, frame_count)| self.facts(bytes, frame_count)))
    }

    /// Bytes and frames of the first RIFF, where nothing is known of later ones. The main header
    /// counts the frames of the first one, but some writers count those of all RIFFs there.
    fn first_alone(&self, length: u32) -> Option<(u64, u32)> {
        let all = self.frame_count_all.max(self.stream_length());
        let is_its_own =
            all > self.frame_count || (length < RIFF_BYTES_LARGE && self.frame_count > 0);
        is_its_own.then_some((u64::from(length), self.frame_count))
    }

    fn stream_length(&self) -> u32 {
        self.pictures.map_or(0, |(_, _, length)| length)
    }

    fn facts(&self, media_bytes: u64, frame_count: u32) -> Option<HeaderFacts> {
        let (scale, rate, _) = self.pictures.unwrap_or_default();
        // The stream's own fraction is exact; microseconds a frame are not.
        let (rate, scale) = if rate > 0 && scale > 0 {
            (u64::from(rate), u64::from(scale))
        } else {
            (1_000_000, u64::from(self.frame_us))
        };
        facts(
            Container::Avi,
            duration_of(u64::from(frame_count).saturating_mul(scale), rate),
            media_bytes,
            frames_per_kilosecond(rate, scale),
        )
    }
}

// ---- WAV ----

fn probe_wave(source: &mut Source<'_>) -> Result<Option<HeaderFacts>, HeaderError> {
    let mut bytes_per_second = 0;
    let mut long_length = None;
    let mut chunks = Chunks::new(Container::Wave, 12, source.size());
    while let Some(chunk) = chunks.next(source)? {
        match &chunk.kind {
            b"ds64" => {
                let body = source.array::<16>(chunk.data)?.unwrap_or_default();
                long_length = Some(u64::from_le_bytes(part(&body, 8)));
            }
            b"fmt " => {
                let body = source.array::<12>(chunk.data)?.unwrap_or_default();
                bytes_per_second = u64::from(u32::from_le_bytes(part(&body, 8)));
            }
            b"data" => {
                let present = source.size() - chunk.data.min(source.size());
                let said = match (chunk.length, long_length) {
                    (LENGTH_UNKNOWN, Some(length)) => length,
                    // The recorder has not filled it in yet.
                    (0 | LENGTH_UNKNOWN, None) => present,
                    (length, _) => u64::from(length),
                };
                let duration = duration_of(said, bytes_per_second);
                return Ok(facts(Container::Wave, duration, said, None));
            }
            _ => {}
        }
    }
    Ok(None)
}
