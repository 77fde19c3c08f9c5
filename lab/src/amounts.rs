// SPDX-License-Identifier: Apache-2.0
//! Sizes, rates and spans of time on the lab's command line, in the syntax of
//! `engine/daemon/src/config/amount.rs`, which the lab may not import.
//!
//! In addition a size may have a bare, decimal `k`, `M`, `G` or `T`, and a span that is a bare
//! number is in seconds.

use std::time::Duration;

const SIZES: &[(&str, f64)] = &[
    ("", 1.0),
    ("b", 1.0),
    ("kib", 1024.0),
    ("mib", 1_048_576.0),
    ("gib", 1_073_741_824.0),
    ("tib", 1_099_511_627_776.0),
    ("kb", 1e3),
    ("mb", 1e6),
    ("gb", 1e9),
    ("tb", 1e12),
    ("k", 1e3),
    ("m", 1e6),
    ("g", 1e9),
    ("t", 1e12),
];

const RATES: &[(&str, f64)] = &[("", 1.0), ("k", 1e3), ("m", 1e6), ("g", 1e9)];

const SPANS: &[(&str, f64)] = &[
    ("", 1.0),
    ("ns", 1e-9),
    ("us", 1e-6),
    ("µs", 1e-6),
    ("ms", 1e-3),
    ("s", 1.0),
    ("min", 60.0),
];

/// A number, then one of `units` in any case.
fn scaled(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let text = text.trim();
    let is_number = |c: char| c.is_ascii_digit() || c == '.';
    let end = text.find(|c| !is_number(c)).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit = unit.trim().to_lowercase();
    let (_, factor) = units.iter().find(|(name, _)| *name == unit)?;
    Some(number.parse::<f64>().ok()? * factor)
}

/// A size. Units: bytes. `1GiB`, `750MB`, `100M`, `4096`.
pub fn parse_amount(text: &str) -> Result<u64, String> {
    let bytes = scaled(text, SIZES).filter(|bytes| *bytes < 9e18);
    let bytes = bytes.map(|bytes| bytes.round() as u64);
    bytes.ok_or_else(|| {
        format!("`{text}` is not a size; expected bytes, for instance 1GiB, 512MiB, 750MB or 100M")
    })
}

/// A rate. Units: bits a second. `100M`, `1.5G`, `100 Mb/s`; refuses bytes a second rather than
/// guess.
pub fn parse_bitrate(text: &str) -> Result<u64, String> {
    let no_rate = || {
        format!("`{text}` is not a rate; expected bits a second, for instance 100M, 1.5G or 48k")
    };
    if text.trim().ends_with("B/s") || text.trim().ends_with("Bps") {
        return Err(no_rate());
    }
    let lower = text.trim().to_lowercase();
    let endings = ["bit/s", "bits/s", "b/s", "bps", "bits", "bit"];
    let bare = endings.iter().find_map(|ending| lower.strip_suffix(ending));
    let bits = scaled(bare.unwrap_or(&lower), RATES).filter(|bits| *bits < 1e18);
    bits.map(|bits| bits.round() as u64).ok_or_else(no_rate)
}

/// A span of time. `500ms`, `2s`, `2min`, or `1.5`, which is in seconds.
pub fn parse_span(text: &str) -> Result<Duration, String> {
    let seconds = scaled(text, SPANS);
    let span = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    span.ok_or_else(|| {
        format!("`{text}` is not a duration; expected for instance 500ms, 2s or 5min")
    })
}

/// A span of time longer than 0. Units: s.
pub fn parse_seconds(text: &str) -> Result<f64, String> {
    let seconds = parse_span(text)?.as_secs_f64();
    if seconds == 0.0 {
        return Err("a run of 0 s shows nothing; expected more".to_owned());
    }
    Ok(seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_rates_and_spans_mean_what_they_say_elsewhere() {
        let sizes = [
            ("100M", Some(100_000_000)),
            ("1GiB", Some(1 << 30)),
            ("1 gib", Some(1 << 30)),
            ("40GB", Some(40_000_000_000)),
            ("1.5k", Some(1500)),
            ("4096", Some(4096)),
            ("512B", Some(512)),
            ("fast", None),
            ("-1", None),
            ("GiB", None),
            ("", None),
            ("1e9", None),
            ("1.2.3M", None),
        ];
        for (text, expect) in sizes {
            assert_eq!(parse_amount(text).ok(), expect, "{text:?}");
        }
        let rates = [
            ("100M", Some(100_000_000)),
            ("100 Mb/s", Some(100_000_000)),
            ("1.485G", Some(1_485_000_000)),
            ("48kbit", Some(48_000)),
            ("100MB/s", None),
            ("100MiB", None),
        ];
        for (text, expect) in rates {
            assert_eq!(parse_bitrate(text).ok(), expect, "{text:?}");
        }
        let spans = [
            ("500ms", Some(Duration::from_millis(500))),
            ("2", Some(Duration::from_secs(2))),
            ("0.25 s", Some(Duration::from_millis(250))),
            ("2min", Some(Duration::from_secs(120))),
            // "m" and "M" are milli and mega elsewhere, so they do not mean minutes here.
            ("2m", None),
            ("2M", None),
            ("-1s", None),
            ("soon", None),
        ];
        for (text, expect) in spans {
            assert_eq!(parse_span(text).ok(), expect, "{text:?}");
        }
        assert!(parse_seconds("0s").is_err());
    }
}
