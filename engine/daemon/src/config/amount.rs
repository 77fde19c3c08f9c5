// SPDX-License-Identifier: Apache-2.0
//! Sizes, rates and times as people write them.
//!
//! `"1GiB"`, `"500ms"`, `"100M"`. KiB is 1,024 bytes, KB is 1,000; a rate is bits a second, as on
//! a delivery sheet. Integer arithmetic throughout: no size is rounded silently.

/// The form of a size, for error sentences.
pub const SIZE_EXPECTED: &str = "a size in bytes such as 1073741824, \"1GiB\" or \"512MiB\"";

/// The form of a bitrate.
pub const BITRATE_EXPECTED: &str =
    "bits a second of one stream, such as 100000000, \"100M\", \"1.5G\" or \"48k\"";

/// The form of a span of time.
pub const DURATION_EXPECTED: &str =
    "a time with its unit (ms, s, min or h), such as \"500ms\" or \"2s\"";

const SIZE_UNITS: &[(&str, u64)] = &[
    ("", 1),
    ("b", 1),
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
];

const BITRATE_UNITS: &[(&str, u64)] = &[
    ("", 1),
    ("k", 1_000),
    ("m", 1_000_000),
    ("g", 1_000_000_000),
];

const DURATION_UNITS: &[(&str, u64)] = &[
    ("ns", 1),
    ("us", 1_000),
    ("µs", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("min", 60_000_000_000),
    ("h", 3_600_000_000_000),
];

/// A size. Units: bytes. None when it is no size.
pub fn parse_size(text: &str) -> Option<u64> {
    parse(text, SIZE_UNITS)
}

/// Rates that make sense, in bits a second: from spoken word at its thinnest (below it a unit was
/// forgotten) to more than uncompressed 8K at 120 frames a second, which is 76 Gb/s.
pub const BITRATES: std::ops::RangeInclusive<u64> = 8_000..=1_000_000_000_000;

/// The sentence for a rate outside of [`BITRATES`].
pub const BITRATES_EXPECTED: &str = "expected bits a second, at least \"8k\" and at most \"1000G\"; is a unit missing, as in \"100M\"?";

/// A bitrate. Units: bits/s. `"100M"`, `"100 Mb/s"`, `"100Mbit"`, `"100Mbps"`.
///
/// A capital B before `/s` is a byte (`"100MB/s"`), eight times as much: it is refused rather than
/// guessed at.
pub fn parse_bitrate(text: &str) -> Option<u64> {
    if text.trim().ends_with("B/s") || text.trim().ends_with("Bps") {
        return None;
    }
    let lower = text.trim().to_ascii_lowercase();
    let bare = ["bit/s", "bits/s", "b/s", "bps", "bits", "bit"]
        .iter()
        .find_map(|ending| lower.strip_suffix(ending))
        .unwrap_or(&lower);
    parse(bare, BITRATE_UNITS)
}

/// A span of time. Units: ns. None for a number without a unit.
pub fn parse_duration(text: &str) -> Option<u64> {
    parse(text, DURATION_UNITS)
}

/// `text` = digits, perhaps a fraction, then one of `units` in any case.
fn parse(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let text = text.trim();
    let number_end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.' && c != '_')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(number_end);
    let unit = unit.trim().to_lowercase();
    let factor = units.iter().find(|(name, _)| *name == unit)?.1;
    scaled(&number.replace('_', ""), factor)
}

/// `number · factor`, exact or None: "1.5" GiB is whole bytes, "0.3" B is not.
fn scaled(number: &str, factor: u64) -> Option<u64> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() || fraction.len() > 9 || (number.contains('.') && fraction.is_empty()) {
        return None;
    }
    let tens = 10u128.pow(fraction.len() as u32);
    let whole: u64 = whole.parse().ok()?;
    let parts: u64 = if fraction.is_empty() {
        0
    } else {
        fraction.parse().ok()?
    };
    let scaled = (u128::from(whole) * tens + u128::from(parts)) * u128::from(factor);
    if !scaled.is_multiple_of(tens) {
        return None;
    }
    u64::try_from(scaled / tens).ok()
}

/// `1073741824` as "1 GiB", `1000` as "1000 B": exact, never rounded.
pub fn show_size(bytes: u64) -> String {
    for (unit, factor) in [
        ("TiB", 1u64 << 40),
        ("GiB", 1 << 30),
        ("MiB", 1 << 20),
        ("KiB", 1 << 10),
    ] {
        if bytes >= factor && bytes.is_multiple_of(factor) {
            return format!("{} {unit}", bytes / factor);
        }
    }
    format!("{bytes} B")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_mean_what_they_say() {
        for (text, expect) in [
            ("1GiB", Some(1 << 30)),
            ("1 gib", Some(1 << 30)),
            ("1.5GiB", Some(3 << 29)),
            ("1GB", Some(1_000_000_000)),
            ("4096", Some(4096)),
            ("4_096", Some(4096)),
            ("512B", Some(512)),
            ("0.3B", None),
            ("1G", None),
            ("GiB", None),
            ("-1GiB", None),
            ("1.GiB", None),
            ("", None),
            ("99999999999999999999", None),
            ("16777216TiB", None),
            ("1e9", None),
        ] {
            assert_eq!(parse_size(text), expect, "size {text:?}");
        }
        for (text, expect) in [
            ("100M", Some(100_000_000)),
            ("100 Mb/s", Some(100_000_000)),
            ("100Mbit", Some(100_000_000)),
            ("100mbps", Some(100_000_000)),
            ("1.485G", Some(1_485_000_000)),
            ("48k", Some(48_000)),
            ("100000000", Some(100_000_000)),
            ("100 MB", None),
            ("100MB/s", None),
            ("100 MBps", None),
            ("100MiB", None),
            ("fast", None),
        ] {
            assert_eq!(parse_bitrate(text), expect, "bitrate {text:?}");
        }
        for (text, expect) in [
            ("500ms", Some(500_000_000)),
            ("2s", Some(2_000_000_000)),
            ("0.25 s", Some(250_000_000)),
            ("10us", Some(10_000)),
            ("500", None),
            ("500 msec", None),
        ] {
            assert_eq!(parse_duration(text), expect, "duration {text:?}");
        }
        assert_eq!(show_size(1 << 30), "1 GiB");
        assert_eq!(show_size(3 << 19), "1536 KiB");
        assert_eq!(show_size(1000), "1000 B");
    }
}
