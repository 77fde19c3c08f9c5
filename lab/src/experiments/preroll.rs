// SPDX-License-Identifier: Apache-2.0
//! How long must players wait before their first deadline, when all start at once?
//!
//! A player requests frames at the same instants with any preroll. So for a server that does not
//! know the preroll one run shows how long it would have had to be. Rushes knows it and plans by
//! it, so there the lab searches for the smallest by doubling and bisection.

use crate::experiments::compare::Contender;
use crate::experiments::play::{Play, Start};
use crate::reports::report::Report;
use crate::servers::server::Kind;
use crate::stage::Stage;
use crate::stage::room::Room;
use anyhow::Result;
use serde::Serialize;
use std::fmt::Write as _;
use std::time::Duration;

/// The smallest preroll for one server and stream count.
#[derive(Clone, Debug, Serialize)]
pub struct Answer {
    /// The server.
    pub server: String,
    /// Players, all started at once.
    pub streams: u64,
    /// `None`: frames never came, or players need more than the longest to try. Units: ms.
    pub preroll_ms: Option<f64>,
    /// Every preroll tried, with its worst lateness and its late frames. Units: ms, ms.
    pub tried: Vec<(f64, f64, u64)>,
}

/// The range of the search.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    /// Longest preroll to try. Units: ms.
    pub max_ms: u64,
    /// Precision of the answer. Units: ms.
    pub step_ms: u64,
}

/// Find the smallest preroll.
pub fn search(
    room: &Room,
    stage: &mut Stage,
    base: &Play,
    contender: Contender,
    streams: u64,
    range: Range,
) -> Result<Answer> {
    let mut play = base.clone();
    play.server.kind = contender.kind;
    play.server.analyser = contender.analyser;
    play.stream_count = streams;
    play.start = Start::Together;
    let mut answer = Answer {
        server: contender.to_string(),
        streams,
        preroll_ms: None,
        tried: Vec::new(),
    };
    let mut probe = |ms: u64| -> Result<Report> {
        play.preroll = Duration::from_millis(ms);
        play.server.preroll = play.preroll;
        let report = play.run(room, stage, false)?;
        answer
            .tried
            .push((ms as f64, report.worst_lateness_ms, report.late_frames));
        eprintln!(
            "{contender:>18}: {streams} together, preroll {ms} ms: {} late, worst {:.1} ms",
            report.late_frames, report.worst_lateness_ms
        );
        Ok(report)
    };
    if contender.kind != Kind::Rushes {
        let first = base.preroll.as_millis() as u64;
        let needed = first as f64 + probe(first)?.worst_lateness_ms;
        answer.preroll_ms = (needed <= range.max_ms as f64).then_some(needed.max(0.0));
        return Ok(answer);
    }
    let (mut low, mut high) = (0, None);
    let mut next = base.preroll.as_millis() as u64;
    loop {
        let report = probe(next)?;
        if report.late_frames == 0 {
            high = Some(next);
        } else {
            low = next;
        }
        next = match high {
            Some(high) if high - low <= range.step_ms => break,
            Some(high) => ((low + high) / 2)
                .next_multiple_of(range.step_ms)
                .min(high - 1),
            None if low >= range.max_ms => break,
            None => (low * 2).min(range.max_ms),
        };
    }
    answer.preroll_ms = high.map(|ms| ms as f64);
    Ok(answer)
}

/// A table with a row for each stream count and a column for each server.
pub fn table(answers: &[Answer]) -> Result<String> {
    let mut servers: Vec<&str> = Vec::new();
    let mut counts: Vec<u64> = answers.iter().map(|answer| answer.streams).collect();
    counts.sort_unstable();
    counts.dedup();
    for answer in answers {
        if !servers.contains(&answer.server.as_str()) {
            servers.push(&answer.server);
        }
    }
    let mut out = format!("| streams together | {} |\n", servers.join(" | "));
    writeln!(out, "|---|{}", "---|".repeat(servers.len()))?;
    for streams in counts {
        write!(out, "| {streams} |")?;
        for server in &servers {
            let answer = answers
                .iter()
                .find(|answer| answer.streams == streams && answer.server == *server);
            match answer.map(|answer| answer.preroll_ms) {
                Some(Some(ms)) => write!(out, " {ms:.0} ms |")?,
                Some(None) => write!(out, " never |")?,
                None => write!(out, " |")?,
            }
        }
        writeln!(out)?;
    }
    Ok(out)
}
