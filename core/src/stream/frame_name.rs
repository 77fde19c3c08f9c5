// SPDX-License-Identifier: Apache-2.0
//! The name of one frame: `A001_C003_000123.tif` is prefix `A001_C003_`, number 123, width 6,
//! suffix `.tif`.
//!
//! The number is the last run of digits before the extension, so that `.jp2` and `.dpx10` are no
//! numbers. A name that ends in `.0001` has no extension but a number. That is a guess: in
//! `shot_1001_v002.exr` it is another one, and only several names together say which
//! ([`FrameName::others`]).

use alloc::string::String;
use core::fmt::Write;

/// Longest file name Linux knows. Units: bytes.
const NAME_BYTES_MAX: usize = 255;

/// Longest run of digits taken for a frame number; more would not fit 64 bits.
const DIGIT_COUNT_MAX: usize = 18;

/// Extensions of files that hold a whole clip: neighbours of `clip_03.mov` are other clips.
const CLIP_EXTENSIONS: [&str; 36] = [
    "3gp", "aac", "aif", "aiff", "asf", "avi", "braw", "bwf", "caf", "crm", "dv", "flac", "gxf",
    "insv", "lxf", "m2ts", "m2v", "m4a", "m4v", "mkv", "mov", "mp3", "mp4", "mpeg", "mpg", "mts",
    "mxf", "nev", "ogg", "qt", "r3d", "rf64", "ts", "wav", "webm", "wmv",
];

/// The most runs of digits that are tried in one name.
const RUN_COUNT_MAX: usize = 8;

/// A file name with a frame number in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameName<'a> {
    prefix: &'a str,
    suffix: &'a str,
    number: u64,
    width: u8,
    padded: bool,
}

impl<'a> FrameName<'a> {
    /// Take a name apart. None: it has no number, or one of more than 18 digits.
    pub fn parse(name: &'a str) -> Option<FrameName<'a>> {
        let (start, end) = last_run(name, stem_bytes(name))?;
        FrameName::with_run(name, start, end)
    }

    /// The readings of a name in which another run of digits is the number than
    /// [`FrameName::parse`] takes; the last of these first.
    pub fn others(name: &'a str) -> impl Iterator<Item = FrameName<'a>> {
        let mut run = last_run(name, stem_bytes(name));
        let next = move || {
            run = last_run(name, run?.0);
            run
        };
        core::iter::from_fn(next)
            .take(RUN_COUNT_MAX)
            .filter_map(move |(start, end)| FrameName::with_run(name, start, end))
    }

    /// The reading of a name in which the number stands behind `prefix`. None: the name has no such
    /// prefix, or no number there.
    pub fn behind(name: &'a str, prefix: &str) -> Option<FrameName<'a>> {
        let rest = name.strip_prefix(prefix)?;
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        match digits {
            0 => None,
            _ => FrameName::with_run(name, prefix.len(), prefix.len() + digits),
        }
    }

    /// None: more digits than a number has.
    fn with_run(name: &'a str, start: usize, end: usize) -> Option<FrameName<'a>> {
        if end - start > DIGIT_COUNT_MAX {
            return None;
        }
        let digits = &name[start..end];
        Some(FrameName {
            prefix: &name[..start],
            suffix: &name[end..],
            number: digits.parse().ok()?,
            width: (end - start) as u8,
            padded: digits.len() > 1 && digits.starts_with('0'),
        })
    }

    /// The frame's number.
    pub const fn number(&self) -> u64 {
        self.number
    }

    /// Digits of the number, leading zeros included.
    pub const fn width(&self) -> u8 {
        self.width
    }

    /// The part before the number.
    pub const fn prefix(&self) -> &'a str {
        self.prefix
    }

    /// The part behind it, extension included.
    pub const fn suffix(&self) -> &'a str {
        self.suffix
    }

    /// True when the extension is that of a whole clip (`.mov`, `.wav`), so that the number counts
    /// clips and not frames.
    pub fn is_clip(&self) -> bool {
        let extension = self.suffix.rsplit('.').next().unwrap_or("");
        CLIP_EXTENSIONS
            .iter()
            .any(|clip| extension.eq_ignore_ascii_case(clip))
    }

    /// The name of frame `number` of the same sequence, padded to this name's width.
    /// None: it would be longer than a file name may be.
    pub fn with_number(&self, number: u64) -> Option<String> {
        frame_file_name(self.prefix, number, self.width, self.suffix)
    }

    /// True when `other` is a frame of the same sequence: same prefix and suffix, and a width that
    /// the same way of counting gives (`0999` and `1000`, `9` and `10`, but not `09` and `9`).
    pub fn same_sequence(&self, other: &FrameName<'_>) -> bool {
        self.prefix == other.prefix
            && self.suffix == other.suffix
            && widths_agree(self.width, other.width, self.padded, other.padded)
    }

    /// Whether the number has zeros in front.
    pub const fn padded(&self) -> bool {
        self.padded
    }
}

/// Two widths belong to one way of counting when they are the same, or when the wider number is
/// wide because it is large and not because of leading zeros.
fn widths_agree(a: u8, b: u8, a_padded: bool, b_padded: bool) -> bool {
    match a.cmp(&b) {
        core::cmp::Ordering::Equal => true,
        core::cmp::Ordering::Less => !b_padded,
        core::cmp::Ordering::Greater => !a_padded,
    }
}

pub(super) fn frame_file_name(
    prefix: &str,
    number: u64,
    width: u8,
    suffix: &str,
) -> Option<String> {
    let mut name = String::with_capacity(prefix.len() + 20 + suffix.len());
    name.push_str(prefix);
    write!(name, "{number:0width$}", width = usize::from(width)).ok()?;
    name.push_str(suffix);
    (name.len() <= NAME_BYTES_MAX).then_some(name)
}

/// The length of a name without its extension.
fn stem_bytes(name: &str) -> usize {
    match name.rfind('.') {
        Some(dot) if !all_digits(&name[dot + 1..]) => dot,
        _ => name.len(),
    }
}

/// Where the last run of digits in the first `bytes` bytes of a name starts and ends.
fn last_run(name: &str, bytes: usize) -> Option<(usize, usize)> {
    let bytes = &name.as_bytes()[..bytes];
    let end = bytes.iter().rposition(u8::is_ascii_digit)? + 1;
    let start = bytes[..end]
        .iter()
        .rposition(|byte| !byte.is_ascii_digit())
        .map_or(0, |last| last + 1);
    Some((start, end))
}

fn all_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &str, expect: Option<(&str, u64, u8, &str)>) {
        let found = FrameName::parse(name).map(|f| (f.prefix(), f.number(), f.width(), f.suffix()));
        assert_eq!(found, expect, "{name}");
    }

    #[test]
    fn names_are_taken_apart() {
        check("shot.0001.dpx", Some(("shot.", 1, 4, ".dpx")));
        check("A001_C003_000123.tif", Some(("A001_C003_", 123, 6, ".tif")));
        check("img12.exr", Some(("img", 12, 2, ".exr")));
        check("0042.exr", Some(("", 42, 4, ".exr")));
        check("frame7", Some(("frame", 7, 1, "")));
        check("render.0100", Some(("render.", 100, 4, "")));
        check("scan_0007.jp2", Some(("scan_", 7, 4, ".jp2")));
        check("v2_final.exr", Some(("v", 2, 1, "_final.exr")));
        check("Szene_Ä0001ß.tif", Some(("Szene_Ä", 1, 4, "ß.tif")));
        check("poster.jp2", None);
        check("readme", None);
        check("", None);
        check(".", None);
        check("...", None);
        check("x1234567890123456789.dpx", None);
        check(
            "x123456789012345678.dpx",
            Some(("x", 123_456_789_012_345_678, 18, ".dpx")),
        );
        check("٣.dpx", None);
    }

    #[test]
    fn each_run_of_digits_may_be_the_number() {
        let others = |name| {
            let found = FrameName::others(name).map(|f| (f.prefix(), f.number(), f.suffix()));
            found.collect::<alloc::vec::Vec<_>>()
        };
        assert_eq!(
            others("A7_1001_v002.exr"),
            [("A7_", 1001, "_v002.exr"), ("A", 7, "_1001_v002.exr")]
        );
        assert_eq!(others("scan_000001_4k.dpx"), [("scan_", 1, "_4k.dpx")]);
        assert_eq!(others("x1234567890123456789_1.dpx"), []);
        assert_eq!(others("f.0001.dpx"), []);
        assert_eq!(others("readme"), []);
        let behind = |prefix| FrameName::behind("s_1001_v002.exr", prefix).map(|f| f.number());
        assert_eq!(behind("s_"), Some(1001));
        assert_eq!(behind("s"), None);
        assert_eq!(behind("t_"), None);
    }

    #[test]
    fn neighbours_keep_the_width() {
        let name = |n: &str, to: u64| FrameName::parse(n).and_then(|f| f.with_number(to));
        assert_eq!(name("shot.0001.dpx", 2).as_deref(), Some("shot.0002.dpx"));
        assert_eq!(
            name("shot.0999.dpx", 1000).as_deref(),
            Some("shot.1000.dpx")
        );
        assert_eq!(name("s9999.dpx", 10_000).as_deref(), Some("s10000.dpx"));
        assert_eq!(name("img9.exr", 10).as_deref(), Some("img10.exr"));
    }

    #[test]
    fn a_name_longer_than_the_file_system_allows_is_no_name() {
        let long = alloc::format!("{}9", "x".repeat(254));
        let frame = FrameName::parse(&long).unwrap();
        assert!(frame.with_number(8).is_some());
        assert_eq!(frame.with_number(10), None);
    }

    #[test]
    fn sequences_are_told_apart() {
        let same = |a: &str, b: &str| {
            let (a, b) = (FrameName::parse(a).unwrap(), FrameName::parse(b).unwrap());
            assert_eq!(a.same_sequence(&b), b.same_sequence(&a));
            a.same_sequence(&b)
        };
        assert!(same("s.0001.dpx", "s.0002.dpx"));
        assert!(same("s.0999.dpx", "s.1000.dpx"));
        assert!(same("s9.dpx", "s10.dpx"));
        assert!(same("s.9999.dpx", "s.10000.dpx"));
        assert!(!same("s.0001.dpx", "s.00002.dpx"));
        assert!(!same("s.0001.dpx", "t.0002.dpx"));
        assert!(!same("s.0001.dpx", "s.0002.exr"));
    }

    #[test]
    fn clips_are_no_frames() {
        let clip = |name: &str| FrameName::parse(name).unwrap().is_clip();
        assert!(clip("A001_C003.MOV"));
        assert!(clip("take1.wav"));
        assert!(clip("A001_0001.CRM") && clip("n0001.nev") && clip("tape7.dv"));
        assert!(!clip("shot.0001.dpx"));
        assert!(!clip("shot.0001"));
    }
}
