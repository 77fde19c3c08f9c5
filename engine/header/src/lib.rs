// SPDX-License-Identifier: Apache-2.0
//! The rate that a container's own header gives: MP4 and MOV, MXF, AVI, WAV.
//!
//! [`probe`] does at most [`PROBE_READ_COUNT_MAX`] reads of [`PROBE_BYTES_MAX`] bytes together, 64
//! windows of 16 KiB and 256 heads of 512 bytes, and never reads the media itself. It believes
//! nothing: it checks every length against the file, bounds every loop, and returns an error, not a
//! guess, for a header that contradicts itself. It does not decode, and it knows no single-frame
//! files such as DPX, TIFF and EXR: a sequence's rate is not in its frames.
#![forbid(unsafe_code)]

mod boxes;
mod klv;
mod riff;
mod source;

pub use source::{PROBE_BYTES_MAX, PROBE_READ_COUNT_MAX, ReadAt};

use rushes_core::units::{BytesPerSecond, Duration, NS_PER_S};
use source::Source;
use std::fmt;

/// How media and its description are packed in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Container {
    /// `.mov`
    QuickTime,
    /// `.mp4` and its relatives
    Mp4,
    /// `.mxf`
    Mxf,
    /// `.avi`, OpenDML included
    Avi,
    /// `.wav`, RF64 and BW64 included
    Wave,
}

impl fmt::Display for Container {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Container::QuickTime => "QuickTime",
            Container::Mp4 => "MP4",
            Container::Mxf => "MXF",
            Container::Avi => "AVI",
            Container::Wave => "WAV",
        })
    }
}

/// The facts that a header gives of the whole file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeaderFacts {
    /// Which kind of file.
    pub container: Container,
    /// How long it plays; more than nothing.
    pub duration: Duration,
    /// Bytes of media over duration: the mean rate of playing all of it.
    pub bytes_per_second: BytesPerSecond,
    /// Pictures in a thousand seconds, 23,976 for 24/1.001; None for sound, or when the header does
    /// not say.
    pub frames_per_kilosecond: Option<u32>,
}

/// Why a header could not be read.
#[derive(Debug)]
pub enum HeaderError {
    /// The file could not be read.
    Read {
        /// Where.
        offset: u64,
        /// Why.
        source: std::io::Error,
    },
    /// The header contradicts itself or the size of the file.
    Broken {
        /// The container that the file seemed to be.
        container: Container,
        /// Where.
        offset: u64,
        /// Its fault.
        problem: &'static str,
    },
    /// The part that was looked for lies behind more than [`PROBE_READ_COUNT_MAX`] reads.
    TooScattered,
}

impl fmt::Display for HeaderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HeaderError::Read { offset, source } => {
                write!(f, "cannot read the header at byte {offset}: {source}")
            }
            HeaderError::Broken {
                container,
                offset,
                problem,
            } => write!(
                f,
                "the {container} header is broken at byte {offset}: {problem}"
            ),
            HeaderError::TooScattered => write!(
                f,
                "the header was not found within {PROBE_READ_COUNT_MAX} reads; give the file's \
                 rate in a rule with a bitrate"
            ),
        }
    }
}

impl std::error::Error for HeaderError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            HeaderError::Read { source, .. } => Some(source),
            _ => None,
        }
    }
}

/// The facts in the header of a file of `size` bytes.
///
/// Returns  None for a file of another kind, or one whose header does not say, such as a file that
/// is still being recorded. Errors   see [`HeaderError`]; none is a reason not to serve the file
pub fn probe(reader: &mut dyn ReadAt, size: u64) -> Result<Option<HeaderFacts>, HeaderError> {
    let mut source = Source::new(reader, size);
    let Some(start) = source.array::<12>(0)? else {
        return Ok(None);
    };
    if let Some(form) = riff::form_of(&start) {
        return riff::probe(&mut source, form);
    }
    if boxes::looks_like_it(&start) {
        return boxes::probe(&mut source);
    }
    match klv::find_header_partition(&mut source)? {
        Some(offset) => klv::probe(&mut source, offset),
        None => Ok(None),
    }
}

/// A fraction of seconds, as headers give it.
///
/// Returns  None when it is nothing, or longer than a year
fn duration_of(units: u64, units_per_second: u64) -> Option<Duration> {
    const YEAR_NS: u128 = 366 * 86_400 * NS_PER_S as u128;
    let ns = u128::from(units) * u128::from(NS_PER_S) / u128::from(units_per_second.max(1));
    let plausible = units_per_second > 0 && ns > 0 && ns <= YEAR_NS;
    plausible.then_some(Duration(ns as u64))
}

/// `rate / scale` pictures a second, in thousandths. None when it is nothing or above 100,000.
fn frames_per_kilosecond(rate: u64, scale: u64) -> Option<u32> {
    let thousandths = (u128::from(rate) * 1000).checked_div(u128::from(scale))?;
    (1..=100_000_000)
        .contains(&thousandths)
        .then_some(thousandths as u32)
}

/// Facts, when there is media and time to play it in.
fn facts(
    container: Container,
    duration: Option<Duration>,
    media_bytes: u64,
    frames_per_kilosecond: Option<u32>,
) -> Option<HeaderFacts> {
    let duration = duration?;
    let rate = u128::from(media_bytes) * u128::from(NS_PER_S) / u128::from(duration.0);
    let rate = u64::try_from(rate).ok().filter(|&rate| rate > 0)?;
    Some(HeaderFacts {
        container,
        duration,
        bytes_per_second: BytesPerSecond(rate),
        frames_per_kilosecond,
    })
}
