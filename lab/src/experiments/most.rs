// SPDX-License-Identifier: Apache-2.0
//! How many streams does a server keep without a late frame?
//!
//! Rushes refuses streams that do not fit, so one run with too many suffices: the contracts that it
//! kept to the last frame count. For a server without contracts the lab bisects.

use crate::experiments::compare::Contender;
use crate::experiments::play::Play;
use crate::reports::head::Head;
use crate::reports::outcome::Outcome;
use crate::reports::report::Report;
use crate::servers::server::Kind;
use crate::stage::Stage;
use crate::stage::room::Room;
use anyhow::{Result, ensure};
use serde::Serialize;
use std::fmt::Write as _;

/// The answer for one server.
#[derive(Clone, Debug, Serialize)]
pub struct MostReport {
    /// Which experiment, server and disks.
    #[serde(flatten)]
    pub(crate) head: Head,
    /// Units: bits a second.
    pub bitrate: u64,
    /// How long each plays. Units: s.
    pub seconds: f64,
    /// Clients that copied meanwhile.
    pub copies: u64,
    /// Streams without a late frame; with Rushes those under contract from their first read on.
    pub streams_kept: u64,
    /// The fewest streams to try.
    pub streams_least: u64,
    /// The most streams to try.
    pub streams_most: u64,
    /// Wrong bytes of all runs.
    pub bytes_wrong: u64,
    /// The reports of the runs, as `play` prints them, in order of time.
    pub runs: Vec<Report>,
}

impl Outcome for MostReport {
    fn table(&self) -> Result<String> {
        let mut out = String::new();
        for run in &self.runs {
            let _ = writeln!(
                out,
                "  {:>3} streams: {:>3} admitted, {:>5} of {} frames late, of admitted streams {}",
                run.streams,
                run.streams_admitted,
                run.late_frames,
                run.frames,
                run.late_frames_admitted
            );
        }
        let _ = writeln!(
            out,
            "{} over {}, {}: {} streams of {:.0} Mb/s without a late frame, asked for at most {}",
            self.head.server(),
            self.head.words_on_disks(),
            self.head.layout(),
            self.streams_kept,
            self.bitrate as f64 / 1e6,
            self.streams_most
        );
        Ok(out)
    }

    /// Wrong bytes are a failure, even if all frames came in time.
    ///
    /// Errors   there were wrong bytes
    fn check(&self) -> Result<()> {
        ensure!(
            self.bytes_wrong == 0,
            "{} wrong bytes, expected none; the reports have them",
            self.bytes_wrong
        );
        Ok(())
    }
}

/// The largest number from `least` to `most` for which `keeps` says true, provided that it says
/// false for all larger ones; one less than `least` if there is none.
pub fn largest(least: u64, most: u64, keeps: &mut dyn FnMut(u64) -> Result<bool>) -> Result<u64> {
    let (mut kept, mut lost) = (least.saturating_sub(1), most + 1);
    while lost - kept > 1 {
        let middle = kept + (lost - kept) / 2;
        match keeps(middle)? {
            true => kept = middle,
            false => lost = middle,
        }
    }
    Ok(kept)
}

/// Streams with a contract from their first read on that the server kept.
fn promises_kept(report: &Report) -> u64 {
    let rows = report.per_stream.iter();
    rows.filter(|row| row.admitted && row.late_frames == 0 && row.error.is_none())
        .count() as u64
}

/// Find the number of streams. The stage must cover `most` streams.
pub fn search(
    room: &Room,
    stage: &mut Stage,
    base: &Play,
    contender: Contender,
    (least, most): (u64, u64),
    quiet: bool,
) -> Result<MostReport> {
    ensure!(
        least >= 1 && least <= most,
        "--least {least} --most {most}: expected at least 1, and not more than --most"
    );
    let mut play = base.clone();
    play.server.kind = contender.kind;
    play.server.analyser = contender.analyser;
    let mut runs: Vec<Report> = Vec::new();
    let mut probe = |count: u64| -> Result<Report> {
        play.stream_count = count;
        play.server.client_count = count + play.copy_count;
        let report = play.run(room, stage, quiet)?;
        eprintln!(
            "{}",
            crate::experiments::compare::line_of(contender, &report)
        );
        runs.push(report.clone());
        Ok(report)
    };
    let kept = if contender.kind == Kind::Rushes {
        promises_kept(&probe(most)?)
    } else {
        largest(least, most, &mut |count| {
            let report = probe(count)?;
            Ok(report.late_frames == 0 && report.errors.is_empty())
        })?
    };
    Ok(MostReport {
        head: Head {
            file_system: None,
            ..Head::of("most")
                .on(stage)
                .by(base.server.way)
                .with_server(&contender.to_string())
        },
        bitrate: base.bitrate,
        seconds: base.seconds,
        copies: base.copy_count,
        streams_kept: kept,
        streams_least: least,
        streams_most: most,
        bytes_wrong: runs.iter().map(|run| run.bytes_wrong).sum(),
        runs,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reports::report::StreamRow;

    #[test]
    fn the_largest_number_is_found_in_few_runs() {
        for limit in 0..=30 {
            let mut asked = Vec::new();
            let found = largest(3, 24, &mut |count| {
                asked.push(count);
                Ok(count <= limit)
            });
            assert_eq!(found.unwrap(), limit.clamp(2, 24));
            assert!(asked.len() <= 5, "{asked:?}");
            assert!(asked.iter().all(|count| (3..=24).contains(count)));
        }
    }

    #[test]
    fn a_promise_counts_when_every_frame_of_it_was_in_time() {
        let row = |admitted, late_frames| StreamRow {
            admitted,
            late_frames,
            ..StreamRow::default()
        };
        let report = Report {
            per_stream: vec![row(true, 0), row(true, 1), row(false, 0), row(true, 0)],
            ..Report::default()
        };
        assert_eq!(promises_kept(&report), 2);
    }
}
