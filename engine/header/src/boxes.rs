// SPDX-License-Identifier: Apache-2.0
//! MP4 and QuickTime: boxes in boxes. The probe reads a few words at fixed places of their bodies,
//! and ignores the bytes behind these: writers pad.
//!
//! The description, `moov`, stands before the media or behind it. Either way the sizes of the boxes
//! before it lead there. Inside, the probe steps over the sample tables, which can be megabytes,
//! and reads movie header, tracks' media headers, handlers, sample counts, and the place of the
//! last chunk.
//!
//! A file may still be incomplete. The sizes of its boxes with media declare its later length, if
//! the last chunks of the tracks lie in them. In a file with fragments, which has an `mvex` or a
//! `moof`, the movie header counts only the media outside of fragments. These boxes give the rest:
//!
//! | box | says | is believed |
//! |---|---|---|
//! | `sidx` | bytes and time of each fragment | when it reaches to the end of the file or beyond |
//! | `mfra`, at the very end | where fragments begin, and when | always: its writer was done |
//! | `mehd` | time of all fragments | when an `mfra` shows that all of them are there |

use crate::source::{Source, WINDOW_BYTES, broken, part};
use crate::{Container, HeaderError, HeaderFacts, duration_of, facts, frames_per_kilosecond};
use rushes_core::units::Duration;

/// Boxes looked at on one level. The reads of a probe bound the cost of reaching them.
const BOX_COUNT_MAX: u32 = 4096;

/// Tracks whose last chunk the probe looks up: the tracks of one file end together.
const CHUNK_TRACK_COUNT_MAX: usize = 4;

/// Tracks remembered.
const TRACK_COUNT_MAX: usize = 64;

/// Fragments that an incomplete file's index must list to be believed: an index of one fragment may
/// be that fragment's own.
const FRAGMENT_COUNT_MIN: u64 = 2;

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
    /// Bytes that are no box end the level, and are no error.
    is_lenient: bool,
}

impl Walk {
    fn inside(found: Found) -> Walk {
        Walk {
            at: found.body,
            end: found.end,
            left: BOX_COUNT_MAX,
            is_lenient: true,
        }
    }

    fn next(&mut self, source: &mut Source<'_>) -> Result<Option<Found>, HeaderError> {
        // QuickTime may end a level with four zero bytes.
        if self.left == 0 || self.at.saturating_add(8) > self.end {
            return Ok(None);
        }
        self.left -= 1;
        let start = self.at;
        let Some(head) = source.head::<8>(start)? else {
            return Ok(None);
        };
        let (body, end) = match u32::from_be_bytes(part(&head, 0)) {
            // To the end of the file, or of the box it is in.
            0 => (start + 8, self.end),
            1 => {
                let Some(long) = source.head::<16>(start)? else {
                    return Ok(None);
                };
                let length = u64::from_be_bytes(part(&long, 8));
                (start + 16, start.saturating_add(length))
            }
            length => (start + 8, start.saturating_add(u64::from(length))),
        };
        if end < body {
            let problem = "a box is smaller than its own header";
            return match self.is_lenient {
                true => Ok(None),
                false => Err(broken(Container::Mp4, start, problem)),
            };
        }
        self.at = end;
        Ok(Some(Found {
            kind: part(&head, 4),
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

/// The boxes with media.
#[derive(Clone, Copy, Default)]
struct Media {
    /// As declared. Units: bytes.
    bytes: u64,
    /// Where the last of them ends, as declared.
    end: u64,
}

pub(crate) fn probe(source: &mut Source<'_>) -> Result<Option<HeaderFacts>, HeaderError> {
    let mut walk = Walk {
        at: 0,
        end: source.size(),
        left: BOX_COUNT_MAX,
        is_lenient: false,
    };
    // Before there was `ftyp` there was only QuickTime.
    let mut container = Container::QuickTime;
    let mut movie = None;
    let mut media = Media::default();
    let mut index: Option<Index> = None;
    let mut is_fragmented = false;
    while let Some(found) = walk.next(source)? {
        match &found.kind {
            b"ftyp" => container = brand_of(source, found)?,
            b"moov" if movie.is_none() => {
                movie = Some(found);
                // Of a box behind it only the size matters.
                walk.is_lenient = true;
            }
            b"sidx" if index.is_none() => {
                is_fragmented = true;
                index = Index::read(source, found)?;
            }
            b"moof" => is_fragmented = true,
            b"mdat" => {
                media.bytes = media.bytes.saturating_add(found.end - found.body);
                media.end = media.end.max(found.end);
            }
            _ => {}
        }
        // A fragmented file has thousands of these; other boxes describe them.
        if found.kind == *b"moof" && movie.is_some() {
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
    let description = Movie::read(source, container, movie)?;
    let Some(description) = description else {
        return Ok(None);
    };
    let frames = description.frames();
    if is_fragmented || description.is_fragmented {
        let told = description.in_fragments(source, index)?;
        return Ok(
            told.and_then(|(bytes, duration)| facts(container, Some(duration), bytes, frames))
        );
    }
    let is_declared = |track: &Track| track.last_chunk.is_none_or(|chunk| chunk < media.end);
    if !description.tracks.iter().all(is_declared) {
        // A last chunk lies beyond the media boxes that are there: the rest will come.
        return Ok(None);
    }
    let duration = description.clock.duration();
    Ok(facts(container, duration, media.bytes, frames))
}

fn brand_of(source: &mut Source<'_>, ftyp: Found) -> Result<Container, HeaderError> {
    let brand = source.array::<4>(ftyp.body)?;
    Ok(match brand.as_ref() {
        Some(b"qt  ") => Container::QuickTime,
        _ => Container::Mp4,
    })
}

/// The fields that `mvhd` and `mdhd` begin with.
#[derive(Clone, Copy, Default)]
struct Clock {
    timescale: u64,
    units: u64,
}

impl Clock {
    fn read(
        source: &mut Source<'_>,
        container: Container,
        found: Found,
    ) -> Result<Clock, HeaderError> {
        // Version and flags; when it was made and changed; units a second; how many. In version 1
        // times are long.
        let short = fields::<20>(source, found)?;
        let long = fields::<32>(source, found)?;
        match (short, long) {
            (Some(short), _) if short[0] == 0 => Ok(Clock {
                timescale: u64::from(u32::from_be_bytes(part(&short, 12))),
                units: u64::from(u32::from_be_bytes(part(&short, 16))),
            }),
            (_, Some(long)) if long[0] == 1 => Ok(Clock {
                timescale: u64::from(u32::from_be_bytes(part(&long, 20))),
                units: u64::from_be_bytes(part(&long, 24)),
            }),
            _ => {
                let problem = "a box has a wrong length";
                Err(broken(container, found.start, problem))
            }
        }
    }

    /// None when it is not known.
    fn duration(&self) -> Option<Duration> {
        let known = self.units > 0 && !DURATION_UNKNOWN.contains(&self.units);
        known
            .then(|| duration_of(self.units, self.timescale))
            .flatten()
    }
}

/// The first `N` bytes of a box. None when it is shorter.
fn fields<const N: usize>(
    source: &mut Source<'_>,
    found: Found,
) -> Result<Option<[u8; N]>, HeaderError> {
    if found.end - found.body < N as u64 {
        return Ok(None);
    }
    source.array::<N>(found.body)
}

#[derive(Default)]
struct Track {
    number: u32,
    clock: Clock,
    is_video: bool,
    sample_count: u64,
    /// Where its last chunk begins.
    last_chunk: Option<u64>,
}

/// The contents of the movie box.
struct Movie {
    clock: Clock,
    /// Time of all fragments, in units of `clock`.
    fragment_units: u64,
    is_fragmented: bool,
    /// Length of the description itself.
    bytes: u64,
    tracks: Vec<Track>,
}

impl Movie {
    /// None: the movie box is compressed.
    fn read(
        source: &mut Source<'_>,
        container: Container,
        found: Found,
    ) -> Result<Option<Movie>, HeaderError> {
        let mut clock = None;
        let mut fragment_units = 0;
        let mut is_fragmented = false;
        let mut tracks: Vec<Track> = Vec::new();
        let mut walk = Walk::inside(found);
        while let Some(inner) = walk.next(source)? {
            match &inner.kind {
                b"mvhd" => clock = Some(Clock::read(source, container, inner)?),
                b"trak" if tracks.len() < TRACK_COUNT_MAX => {
                    let with_chunks = tracks.len() < CHUNK_TRACK_COUNT_MAX;
                    tracks.push(Track::read(source, container, inner, with_chunks)?);
                }
                b"mvex" => {
                    is_fragmented = true;
                    if let Some(mehd) = Walk::inside(inner).find(source, b"mehd")? {
                        fragment_units = read_fragment_units(source, mehd)?;
                    }
                }
                // Compressed movie headers died with the last century.
                b"cmov" => return Ok(None),
                _ => {}
            }
        }
        let Some(clock) = clock else {
            return Err(broken(
                container,
                found.start,
                "the movie box has no movie header",
            ));
        };
        Ok(Some(Movie {
            clock,
            fragment_units,
            is_fragmented,
            bytes: found.end - found.start,
            tracks,
        }))
    }

    /// Pictures in a thousand seconds, of the first video track.
    fn frames(&self) -> Option<u32> {
        let track = self.tracks.iter().find(|track| track.is_video)?;
        let rate = track.sample_count.saturating_mul(track.clock.timescale);
        frames_per_kilosecond(rate, track.clock.units)
    }

    /// Bytes and time of all fragments together. None: no box gives them, or not of all.
    fn in_fragments(
        &self,
        source: &mut Source<'_>,
        index: Option<Index>,
    ) -> Result<Option<(u64, Duration)>, HeaderError> {
        let all = Clock {
            units: self.fragment_units,
            ..self.clock
        };
        let all = all.duration();
        if let Some(index) = index
            && index.is_of_all(source, all)?
        {
            return Ok(Some((index.bytes, index.duration)));
        }
        let Some(points) = Points::read(source, &self.tracks)? else {
            return Ok(None);
        };
        let bytes = points.start.saturating_sub(self.bytes);
        // The table gives the start of the last fragment, not its length: take the mean of the
        // others. The media that the movie box itself describes comes before them.
        let own = self.clock.duration().unwrap_or_default();
        let last = points.time.0 / (points.count - 1);
        let counted = Duration(points.time.0.saturating_add(last).saturating_add(own.0));
        let duration = all.or(Some(counted));
        Ok(duration.map(|duration| (bytes, duration)))
    }
}

fn read_fragment_units(source: &mut Source<'_>, mehd: Found) -> Result<u64, HeaderError> {
    let short = fields::<8>(source, mehd)?.unwrap_or_default();
    let long = fields::<12>(source, mehd)?.unwrap_or_default();
    Ok(match long[0] {
        1 => u64::from_be_bytes(part(&long, 4)),
        _ => u64::from(u32::from_be_bytes(part(&short, 4))),
    })
}

impl Track {
    fn read(
        source: &mut Source<'_>,
        container: Container,
        found: Found,
        with_chunks: bool,
    ) -> Result<Track, HeaderError> {
        let mut track = Track::default();
        let mut walk = Walk::inside(found);
        while let Some(inner) = walk.next(source)? {
            match &inner.kind {
                b"tkhd" => {
                    let head = fields::<24>(source, inner)?.unwrap_or_default();
                    let place = if head[0] == 1 { 20 } else { 12 };
                    track.number = u32::from_be_bytes(part(&head, place));
                }
                b"mdia" => {
                    track.read_media(source, container, inner, with_chunks)?;
                    break;
                }
                _ => {}
            }
        }
        Ok(track)
    }

    fn read_media(
        &mut self,
        source: &mut Source<'_>,
        container: Container,
        media: Found,
        with_chunks: bool,
    ) -> Result<(), HeaderError> {
        let mut walk = Walk::inside(media);
        while let Some(found) = walk.next(source)? {
            match &found.kind {
                b"mdhd" => self.clock = Clock::read(source, container, found)?,
                b"hdlr" => {
                    // Version and flags, component type, handler.
                    let head = fields::<12>(source, found)?.unwrap_or_default();
                    self.is_video = &head[8..] == b"vide";
                }
                b"minf" if self.is_video || with_chunks => {
                    return self.read_tables(source, found, with_chunks);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Reads the heads of the tables and one entry: a table may be megabytes.
    fn read_tables(
        &mut self,
        source: &mut Source<'_>,
        minf: Found,
        with_chunks: bool,
    ) -> Result<(), HeaderError> {
        let Some(stbl) = Walk::inside(minf).find(source, b"stbl")? else {
            return Ok(());
        };
        let mut walk = Walk::inside(stbl);
        while let Some(found) = walk.next(source)? {
            match &found.kind {
                b"stsz" | b"stz2" => {
                    // Version and flags, one size for all, count.
                    let head = fields::<12>(source, found)?.unwrap_or_default();
                    self.sample_count = u64::from(u32::from_be_bytes(part(&head, 8)));
                }
                b"stco" if with_chunks => self.last_chunk = last_chunk::<4>(source, found)?,
                b"co64" if with_chunks => self.last_chunk = last_chunk::<8>(source, found)?,
                _ => {}
            }
        }
        Ok(())
    }
}

/// The last entry of a table of chunk offsets of `N` bytes each.
fn last_chunk<const N: usize>(
    source: &mut Source<'_>,
    found: Found,
) -> Result<Option<u64>, HeaderError> {
    let head = fields::<8>(source, found)?.unwrap_or_default();
    let count = u64::from(u32::from_be_bytes(part(&head, 4)));
    if count == 0 {
        return Ok(None);
    }
    let at = found.body + 8 + (count - 1) * N as u64;
    if at + N as u64 > found.end {
        return Ok(None);
    }
    let entry = source.array::<N>(at)?;
    Ok(entry.map(|entry| {
        entry
            .iter()
            .fold(0, |offset, byte| offset << 8 | u64::from(*byte))
    }))
}

/// The facts that a segment index gives of the fragments behind it.
#[derive(Clone, Copy)]
struct Index {
    count: u64,
    bytes: u64,
    duration: Duration,
    /// Where the last fragment that it lists ends.
    end: u64,
}

impl Index {
    /// None: it has nothing of use.
    fn read(source: &mut Source<'_>, found: Found) -> Result<Option<Index>, HeaderError> {
        // Version and flags, which track, units a second, time and offset of the first, how many.
        let head = source.array::<32>(found.body)?;
        let Some(head) = head else {
            return Ok(None);
        };
        let timescale = u64::from(u32::from_be_bytes(part(&head, 8)));
        let (first, place) = match head[0] {
            0 => (u64::from(u32::from_be_bytes(part(&head, 16))), 20),
            _ => (u64::from_be_bytes(part(&head, 20)), 28),
        };
        let count = u64::from(u16::from_be_bytes(part(&head, place + 2)));
        let start = found.body + place as u64 + 4;
        if start + count * 12 > found.end {
            return Ok(None);
        }
        let (mut bytes, mut units) = (0u64, 0u64);
        let mut done = 0;
        while done < count {
            // Bytes, of which the first bit says whether they are an index again; time; where
            // decoding may begin.
            let together = (count - done).min(WINDOW_BYTES as u64 / 12);
            let Some(entries) = source.bytes(start + done * 12, together as usize * 12)? else {
                return Ok(None);
            };
            for entry in entries.chunks_exact(12) {
                bytes += u64::from(u32::from_be_bytes(part(entry, 0)) & 0x7fff_ffff);
                units += u64::from(u32::from_be_bytes(part(entry, 4)));
            }
            done += together;
        }
        Ok(duration_of(units, timescale).map(|duration| Index {
            count,
            bytes,
            duration,
            end: found.end.saturating_add(first).saturating_add(bytes),
        }))
    }

    /// Whether it lists all fragments, present and future.
    fn is_of_all(
        &self,
        source: &mut Source<'_>,
        all: Option<Duration>,
    ) -> Result<bool, HeaderError> {
        let agrees = all.is_none_or(|all| {
            let apart = all.0.abs_diff(self.duration.0);
            apart <= all.0 / 50
        });
        if self.end >= source.size() {
            let is_whole = self.end == source.size() && all.is_some();
            return Ok(agrees && (is_whole || self.count >= FRAGMENT_COUNT_MIN));
        }
        let next = source.array::<8>(self.end)?.unwrap_or_default();
        Ok(agrees && &next[4..] == b"mfra")
    }
}

/// The table of the fragments' starts, at the end of a file.
struct Points {
    /// Where the table begins and the media ends.
    start: u64,
    /// Fragments that it lists, at least two.
    count: u64,
    /// From the first of them to the last.
    time: Duration,
}

impl Points {
    /// None: there is none, or it lists fewer than two fragments.
    fn read(source: &mut Source<'_>, tracks: &[Track]) -> Result<Option<Points>, HeaderError> {
        // Its last box has its whole length: size, `mfro`, version and flags, length.
        let size = source.size();
        let last = source
            .array::<16>(size.saturating_sub(16))?
            .unwrap_or_default();
        let length = u64::from(u32::from_be_bytes(part(&last, 12)));
        if &last[4..8] != b"mfro" || length > size {
            return Ok(None);
        }
        let mut walk = Walk {
            at: size - length,
            end: size,
            left: 1,
            is_lenient: true,
        };
        let Some(table) = walk.find(source, b"mfra")? else {
            return Ok(None);
        };
        if table.end != size {
            return Ok(None);
        }
        let mut walk = Walk::inside(table);
        while let Some(found) = walk.find(source, b"tfra")? {
            let told = read_track_points(source, tracks, found)?;
            if let Some((count, time)) = told {
                return Ok(Some(Points {
                    start: table.start,
                    count,
                    time,
                }));
            }
        }
        Ok(None)
    }
}

/// How many fragments of a track the table lists, and the time from the first of them to the last.
fn read_track_points(
    source: &mut Source<'_>,
    tracks: &[Track],
    tfra: Found,
) -> Result<Option<(u64, Duration)>, HeaderError> {
    // Version and flags, track, lengths of the last three numbers of an entry, how many.
    let Some(head) = fields::<16>(source, tfra)? else {
        return Ok(None);
    };
    let number = u32::from_be_bytes(part(&head, 4));
    let lengths = u64::from(head[11]);
    let rest = (lengths >> 4 & 3) + (lengths >> 2 & 3) + (lengths & 3) + 3;
    let count = u64::from(u32::from_be_bytes(part(&head, 12)));
    // Time and place, then numbers in the fragment.
    let is_long = head[0] == 1;
    let entry_bytes = rest + if is_long { 16 } else { 8 };
    let start = tfra.body + 16;
    if count < 2 || start + count * entry_bytes > tfra.end {
        return Ok(None);
    }
    let mut time_at = |at: u64| -> Result<u64, HeaderError> {
        let time = source.array::<8>(at)?.unwrap_or_default();
        Ok(match is_long {
            true => u64::from_be_bytes(time),
            false => u64::from(u32::from_be_bytes(part(&time, 0))),
        })
    };
    let first = time_at(start)?;
    let last = time_at(start + (count - 1) * entry_bytes)?;
    let track = tracks.iter().find(|track| track.number == number);
    let timescale = track.map_or(0, |track| track.clock.timescale);
    let time = duration_of(last.saturating_sub(first), timescale);
    Ok(time.map(|time| (count, time)))
}
