// SPDX-License-Identifier: Apache-2.0
//! MP4 and QuickTime: boxes in boxes. The boxes are decoded by `mp4-atom`; here is the walk to them.
//!
//! The description (`moov`) stands before the media or behind it. Either way it is reached by the
//! sizes of the boxes before it, and inside it the sample tables, which can be megabytes, are stepped
//! over: movie header, then the first video track's media header, handler and sample count.

use crate::source::{Source, broken, part};
use crate::{Container, HeaderError, HeaderFacts, duration_of, facts, frames_per_kilosecond};
use mp4_atom::{Atom, Decode, Hdlr, Header, Mdhd, Mehd, Mvhd};

/// Boxes looked at on one level. Fragmented files have thousands; the first tell enough.
const BOX_COUNT_MAX: u32 = 64;

/// Longest box of those that are decoded whole. Units: bytes.
const DECODED_BYTES_MAX: u64 = 4096;

/// A duration of all ones says "not known".
const DURATION_UNKNOWN: [u64; 2] = [u32::MAX as u64, u64::MAX];

/// True when a file can begin with such a box.
pub(crate) fn looks_like_it(start: &[u8; 12]) -> bool {
    let first = matches!(
        &start[4..8],
        b"ftyp" | b"moov" | b"mdat" | b"wide" | b"free" | b"skip" | b"pnot" | b"styp"
    );
    let size = u32::from_be_bytes(part(start, 0));
    first && (size <= 1 || size >= 8)
}

#[derive(Clone, Copy)]
struct Found {
    kind: [u8; 4],
    start: u64,
    body: u64,
    end: u64,
}

/// The boxes of one level.
struct Walk {
    at: u64,
    end: u64,
    left: u32,
}

impl Walk {
    fn inside(found: Found) -> Walk {
        Walk {
            at: found.body,
            end: found.end,
            left: BOX_COUNT_MAX,
        }
    }

    fn next(&mut self, source: &mut Source<'_>) -> Result<Option<Found>, HeaderError> {
        // QuickTime may end a level with four zero bytes.
        if self.left == 0 || self.at.saturating_add(8) > self.end {
            return Ok(None);
        }
        self.left -= 1;
        let start = self.at;
        let most = (self.end - start).min(16) as usize;
        let Some(bytes) = source.bytes(start, most)? else {
            return Ok(None);
        };
        let mut rest = bytes;
        let problem = "a box is smaller than its own header";
        let header =
            Header::decode(&mut rest).map_err(|_| broken(Container::Mp4, start, problem))?;
        let body = start + (bytes.len() - rest.len()) as u64;
        let end = match header.size {
            Some(length) => body.saturating_add(length as u64),
            None => self.end,
        };
        self.at = end;
        Ok(Some(Found {
            kind: header.kind.into(),
            start,
            body,
            end,
        }))
    }

    /// The first box of this kind among those still to come.
    fn find(
        &mut self,
        source: &mut Source<'_>,
        kind: &[u8; 4],
    ) -> Result<Option<Found>, HeaderError> {
        while let Some(found) = self.next(source)? {
            if &found.kind == kind {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }
}

pub(crate) fn probe(source: &mut Source<'_>) -> Result<Option<HeaderFacts>, HeaderError> {
    let whole = Found {
        kind: *b"file",
        start: 0,
        body: 0,
        end: source.size(),
    };
    // Before there was `ftyp` there was only QuickTime.
    let mut container = Container::QuickTime;
    let mut movie = None;
    let mut media_bytes = 0u64;
    let mut fragmented = false;
    let mut walk = Walk::inside(whole);
    while let Some(found) = walk.next(source)? {
        match &found.kind {
            b"ftyp" => container = brand_of(source, found)?,
            b"moov" if movie.is_none() => movie = Some(found),
            b"moof" | b"sidx" => fragmented = true,
            b"mdat" => {
                let present = found.end.min(source.size()) - found.body.min(source.size());
                media_bytes = media_bytes.saturating_add(present);
            }
            _ => {}
        }
        // Of thousands of fragments the rest is media, all but their headers.
        if fragmented && movie.is_some() {
            media_bytes = source.size() - found.start;
            break;
        }
    }
    let Some(movie) = movie else {
        return Ok(None);
    };
    if movie.end > source.size() {
        let problem = "the movie box is longer than the file";
        return Err(broken(container, movie.start, problem));
    }
    read_movie(source, container, movie, media_bytes)
}

fn brand_of(source: &mut Source<'_>, ftyp: Found) -> Result<Container, HeaderError> {
    let brand = source.array::<4>(ftyp.body)?;
    Ok(match brand.as_ref() {
        Some(b"qt  ") => Container::QuickTime,
        _ => Container::Mp4,
    })
}

fn read_movie(
    source: &mut Source<'_>,
    container: Container,
    movie: Found,
    media_bytes: u64,
) -> Result<Option<HeaderFacts>, HeaderError> {
    let mut header: Option<Mvhd> = None;
    let mut fragments: Option<Mehd> = None;
    let mut frames = None;
    let mut walk = Walk::inside(movie);
    while let Some(found) = walk.next(source)? {
        match &found.kind {
            b"mvhd" => header = Some(decoded(source, container, found)?),
            b"trak" if frames.is_none() => frames = read_track(source, container, found)?,
            b"mvex" => {
                if let Some(mehd) = Walk::inside(found).find(source, b"mehd")? {
                    fragments = Some(decoded(source, container, mehd)?);
                }
            }
            // Compressed movie headers died with the last century.
            b"cmov" => return Ok(None),
            _ => {}
        }
    }
    let Some(header) = header else {
        return Err(broken(container, movie.start, "a movie without its header"));
    };
    let known = |units: &u64| *units > 0 && !DURATION_UNKNOWN.contains(units);
    let units = Some(header.duration)
        .filter(known)
        .or_else(|| fragments.map(|mehd| mehd.fragment_duration).filter(known));
    let duration = units.and_then(|units| duration_of(units, u64::from(header.timescale)));
    Ok(facts(container, duration, media_bytes, frames))
}

/// Pictures in a thousand seconds, if this is a video track.
fn read_track(
    source: &mut Source<'_>,
    container: Container,
    track: Found,
) -> Result<Option<u32>, HeaderError> {
    let Some(media) = Walk::inside(track).find(source, b"mdia")? else {
        return Ok(None);
    };
    let mut header: Option<Mdhd> = None;
    let mut is_video = false;
    let mut walk = Walk::inside(media);
    while let Some(found) = walk.next(source)? {
        match &found.kind {
            b"mdhd" => header = Some(decoded(source, container, found)?),
            // QuickTime's name in it may be in any encoding; then it is not worth an error.
            b"hdlr" => {
                let handler = decoded::<Hdlr>(source, container, found);
                is_video = handler.is_ok_and(|hdlr| hdlr.handler == b"vide".into());
            }
            b"minf" if is_video => {
                let sample_count = read_sample_count(source, found)?;
                return Ok(header.and_then(|h| {
                    let rate = sample_count.saturating_mul(u64::from(h.timescale));
                    frames_per_kilosecond(rate, h.duration)
                }));
            }
            _ => {}
        }
    }
    Ok(None)
}

/// Read from the head of the sample size table: the table itself may be megabytes.
fn read_sample_count(source: &mut Source<'_>, minf: Found) -> Result<u64, HeaderError> {
    let Some(stbl) = Walk::inside(minf).find(source, b"stbl")? else {
        return Ok(0);
    };
    let mut walk = Walk::inside(stbl);
    while let Some(found) = walk.next(source)? {
        if matches!(&found.kind, b"stsz" | b"stz2") {
            // Version and flags, one size for all, count.
            let head = source.array::<12>(found.body)?.unwrap_or_default();
            return Ok(u64::from(u32::from_be_bytes(part(&head, 8))));
        }
    }
    Ok(0)
}

fn decoded<T: Atom>(
    source: &mut Source<'_>,
    container: Container,
    found: Found,
) -> Result<T, HeaderError> {
    let length = found.end.saturating_sub(found.start);
    let problem = "a box has not the length it should have";
    if length > DECODED_BYTES_MAX {
        return Err(broken(container, found.start, problem));
    }
    let bytes = source.bytes(found.start, length as usize)?;
    let mut bytes = bytes.ok_or_else(|| broken(container, found.start, problem))?;
    T::decode(&mut bytes).map_err(|_| broken(container, found.start, problem))
}
