// SPDX-License-Identifier: Apache-2.0
//! Several servers at several stream counts, interleaved and repeated, with every raw report kept.
//!
//! Interleaving, each server once and then each again, spreads other work of the machine over all
//! of them. The printed figures are medians with the lowest and the highest value; percentiles are
//! never averaged.

use crate::experiments::play::Play;
use crate::reports::plot::{Line, Marks, Plot};
use crate::reports::report::Report;
use crate::servers::server::Kind;
use crate::stage::Stage;
use crate::stage::room::Room;
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::str::FromStr;

/// Length of a step of the timeline plot. Units: s.
const STEP_S: f64 = 0.25;
/// Frames later than this are drawn at this height. Units: ms.
const LATENESS_SHOWN_MAX_MS: f64 = 4000.0;

/// A server as it enters a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Contender {
    /// Which server.
    pub kind: Kind,
    /// False: Rushes without its analyser.
    pub analyser: bool,
}

impl FromStr for Contender {
    type Err = String;
    fn from_str(text: &str) -> Result<Contender, String> {
        let (kind, analyser) = match text {
            "rushes" => (Kind::Rushes, true),
            "rushes-no-analyser" => (Kind::Rushes, false),
            "stock" => (Kind::Stock, true),
            "stock-tuned" => (Kind::StockTuned, true),
            "stock-strict" => (Kind::StockStrict, true),
            "stock-uring" => (Kind::StockUring, true),
            "io_uring" => (Kind::IoUring, true),
            "absent" => (Kind::Absent, true),
            _ => {
                return Err(format!(
                    "`{text}` is not a server; expected rushes, rushes-no-analyser, stock, \
                     stock-tuned, stock-strict, stock-uring, io_uring or absent"
                ));
            }
        };
        Ok(Contender { kind, analyser })
    }
}

impl std::fmt::Display for Contender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tail = if self.analyser { "" } else { "-no-analyser" };
        f.pad(&format!("{}{tail}", self.kind))
    }
}

/// All reports of a comparison, by server and stream count.
pub type Results = BTreeMap<(Contender, u64), Vec<Report>>;

/// Play every combination `repeat` times and write the reports into `out`.
pub fn compare(
    room: &Room,
    stage: &mut Stage,
    base: &Play,
    contenders: &[Contender],
    stream_counts: &[u64],
    repeat: u64,
    out: &Path,
) -> Result<Results> {
    fs::create_dir_all(out).with_context(|| format!("{} cannot be made", out.display()))?;
    let mut results = Results::new();
    for round in 1..=repeat {
        for streams in stream_counts {
            for contender in contenders {
                let mut play = base.clone();
                play.server.kind = contender.kind;
                play.server.analyser = contender.analyser;
                play.stream_count = *streams;
                play.timeline = true;
                let report = play.run(room, stage, false)?;
                let file = out.join(format!("{contender}-{streams}-{round}.json"));
                fs::write(&file, serde_json::to_vec(&report)?)
                    .with_context(|| format!("{} cannot be written", file.display()))?;
                eprintln!("{}", line_of(*contender, &report));
                results
                    .entry((*contender, *streams))
                    .or_default()
                    .push(report);
            }
        }
    }
    Ok(results)
}

/// One run in one line.
pub fn line_of(contender: Contender, report: &Report) -> String {
    format!(
        "{contender:>18}: {:>2} streams, {:>5} of {} frames late (admitted {}: {}), worst {:>8.1} ms, first frame {:>6.1} ms, \
         copies {:>5.1} MB/s, CPU {:>5.2} s, wrong bytes {}{}",
        report.streams,
        report.late_frames,
        report.frames,
        report.streams_admitted,
        report.late_frames_admitted,
        report.worst_lateness_ms,
        report.first_frame_ms_max,
        report.copy_mb_per_s,
        report.server_cpu_s,
        report.bytes_wrong,
        if report.copy_failures.is_empty() {
            String::new()
        } else {
            format!(", {} copies FAILED", report.copy_failures.len())
        }
    )
}

/// Lowest, median, highest.
pub fn spread(values: impl IntoIterator<Item = f64>) -> (f64, f64, f64) {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let (Some(low), Some(high)) = (values.first(), values.last()) else {
        return (f64::NAN, f64::NAN, f64::NAN);
    };
    let middle = values.len() / 2;
    let median = if values.len().is_multiple_of(2) {
        (values[middle - 1] + values[middle]) / 2.0
    } else {
        values[middle]
    };
    (*low, median, *high)
}

/// Medians and spreads as a table in Markdown.
pub fn table(results: &Results) -> Result<String> {
    let mut out = String::new();
    writeln!(
        out,
        "| server | streams | runs | late frames | of admitted | worst ms | first frame ms | copies MB/s | server CPU s | wrong bytes |"
    )?;
    writeln!(out, "|---|---|---|---|---|---|---|---|---|---|")?;
    for ((contender, streams), reports) in results {
        let show = |digits: usize, value: fn(&Report) -> f64| {
            let (low, median, high) = spread(reports.iter().map(value));
            if low == high {
                format!("{median:.digits$}")
            } else {
                format!("{median:.digits$} ({low:.digits$}–{high:.digits$})")
            }
        };
        writeln!(
            out,
            "| {contender} | {streams} | {} | {} | {} | {} | {} | {} | {} | {} |",
            reports.len(),
            show(0, |r| r.late_frames as f64),
            show(0, |r| r.late_frames_admitted as f64),
            show(1, |r| r.worst_lateness_ms),
            show(1, |r| r.first_frame_ms_max),
            show(1, |r| r.copy_mb_per_s),
            show(2, |r| r.server_cpu_s),
            show(0, |r| r.bytes_wrong as f64)
        )?;
    }
    Ok(out)
}

/// Draw late frames over streams, and lateness over time for each stream count.
pub fn draw(results: &Results, out: &Path) -> Result<()> {
    let mut contenders: Vec<Contender> = results.keys().map(|(contender, _)| *contender).collect();
    contenders.dedup();
    let line = |contender: &Contender| Line {
        name: contender.to_string(),
        points: results
            .iter()
            .filter(|((one, _), _)| one == contender)
            .map(|((_, streams), reports)| {
                let share = |r: &Report| 100.0 * r.late_frames as f64 / r.frames.max(1) as f64;
                let (low, median, high) = spread(reports.iter().map(share));
                (*streams as f64, median, low, high)
            })
            .collect(),
    };
    let some = results
        .values()
        .flatten()
        .next()
        .context("no results to draw")?;
    let copies = match some.copies {
        0 => String::new(),
        count => format!(", {count} copies beside them"),
    };
    let kind = if some.sequence {
        "frame sequences"
    } else {
        "streams"
    };
    Plot {
        title: format!(
            "Late frames: {kind} of {:.0} Mb/s on {}{copies}",
            some.bitrate as f64 / 1e6,
            some.head.disk.as_deref().unwrap_or_default()
        ),
        x_label: "streams".to_owned(),
        y_label: "late frames, percent".to_owned(),
        y_max: None,
        level: None,
        marks: Marks::Spread,
        is_counted: false,
        lines: contenders.iter().map(line).collect(),
    }
    .draw(out, "late-frames")?;
    let mut counts: Vec<u64> = results.keys().map(|(_, streams)| *streams).collect();
    counts.sort_unstable();
    counts.dedup();
    for streams in counts {
        let lines = contenders
            .iter()
            .filter_map(|contender| {
                let report = results.get(&(*contender, streams))?.last()?;
                Some(timeline_of(contender.to_string(), report))
            })
            .collect();
        draw_timeline(lines, streams, some, out, &format!("timeline-{streams}"))?;
    }
    Ok(())
}

/// Draw lateness over time, with a line for each server.
pub fn draw_timeline(
    lines: Vec<Line>,
    streams: u64,
    some: &Report,
    out: &Path,
    name: &str,
) -> Result<()> {
    let copies = match some.copies {
        0 => String::new(),
        count => format!(", {count} copies beside them"),
    };
    Plot {
        title: format!(
            "The latest frame of {streams} streams of {:.0} Mb/s{copies}",
            some.bitrate as f64 / 1e6
        ),
        x_label: "seconds since the first player started".to_owned(),
        y_label: "lateness, ms (below 0: in time)".to_owned(),
        y_max: None,
        level: Some((0.0, "deadline".to_owned())),
        marks: Marks::Lines,
        is_counted: false,
        lines,
    }
    .draw(out, name)
}

/// The latest frame of each quarter of a second.
pub fn timeline_of(name: String, report: &Report) -> Line {
    let period_s = 1.0 / report.frames_per_s.max(1e-9);
    let preroll_s = report.preroll_ms / 1e3;
    let mut steps: BTreeMap<u64, f64> = BTreeMap::new();
    for timeline in report.timeline.iter().flatten() {
        for (frame, lateness) in timeline.lateness_ms.iter().enumerate() {
            let due_s = timeline.start_s + preroll_s + frame as f64 * period_s;
            let worst = steps
                .entry((due_s / STEP_S) as u64)
                .or_insert(f64::NEG_INFINITY);
            *worst = worst.max(f64::from(*lateness));
        }
    }
    let points = steps
        .into_iter()
        .map(|(step, worst)| {
            let shown = worst.min(LATENESS_SHOWN_MAX_MS);
            (step as f64 * STEP_S, shown, shown, shown)
        })
        .collect();
    Line { name, points }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reports::report::Timeline;

    #[test]
    fn medians_are_of_the_middle() {
        assert_eq!(spread([3.0, 1.0, 2.0]), (1.0, 2.0, 3.0));
        assert_eq!(spread([4.0, 1.0, 2.0, 3.0]), (1.0, 2.5, 4.0));
    }

    #[test]
    fn a_timeline_shows_the_latest_frame_of_each_step() {
        let report = Report {
            frames_per_s: 25.0,
            preroll_ms: 500.0,
            timeline: Some(vec![Timeline {
                stream: 0,
                start_s: 0.0,
                lateness_ms: vec![-400.0, -500.0, 30.0, -450.0, -490.0, -480.0, -470.0, -460.0],
            }]),
            ..Report::default()
        };
        let points = timeline_of("x".to_owned(), &report).points;
        assert_eq!(points[0], (0.5, 30.0, 30.0, 30.0));
        assert_eq!(points[1].1, -460.0);
    }

    #[test]
    fn contenders_read_as_they_are_written() {
        for name in [
            "rushes",
            "rushes-no-analyser",
            "stock",
            "stock-tuned",
            "io_uring",
            "absent",
        ] {
            assert_eq!(name.parse::<Contender>().unwrap().to_string(), name);
        }
        assert!("samba".parse::<Contender>().is_err());
    }
}
