// SPDX-License-Identifier: Apache-2.0
//! Plots of an edit: how long cuts took, and how late the latest frame was, a panel for each
//! server; for lists that clients repeat, all servers over the passes.

use super::passes;
use super::report::{EditRun, MedianRow};
use crate::reports::plot::{Line, Marks, Plot, draw_panels};
use anyhow::Result;
use std::collections::BTreeMap;
use std::path::Path;

/// Length of a step. Units: s.
const STEP_S: f64 = 0.25;
/// Longer waits and later frames are drawn at this height. Units: ms.
const SHOWN_MAX_MS: f64 = 4000.0;
/// Room above the highest point.
const HEADROOM: f64 = 1.05;

/// Draw `first-frame` and `lateness` into this folder, from the last run of each server with each
/// mix, and `passes` from their medians.
///
/// Errors   gnuplot is missing or refuses
pub fn draw(runs: &[EditRun], medians: &[MedianRow], late_ms: f64, out: &Path) -> Result<()> {
    let over_passes = passes::plots(medians);
    if !over_passes.is_empty() {
        draw_panels(&over_passes, out, "passes")?;
    }
    let mut servers: Vec<&str> = Vec::new();
    for run in runs {
        if !servers.contains(&run.server.as_str()) {
            servers.push(&run.server);
        }
    }
    let panels = |of: fn(&EditRun) -> Vec<(f64, f64)>| -> Vec<(String, Vec<Line>)> {
        let panel = |server: &&str| (server.to_string(), lines(runs, server, of));
        servers.iter().map(panel).collect()
    };
    let cuts = panels(first_frames);
    if cuts.iter().any(|(_, lines)| !lines.is_empty()) {
        let title = |server: &str| format!("{server}: from a cut to its first frame");
        let level = Some((late_ms, "late".to_owned()));
        let plots = plots(cuts, title, "ms", Marks::Dots, level);
        draw_panels(&plots, out, "first-frame")?;
    }
    let lateness = panels(latest);
    if lateness.iter().any(|(_, lines)| !lines.is_empty()) {
        let title = |server: &str| format!("{server}: the latest frame of all");
        let level = Some((0.0, "deadline".to_owned()));
        let label = "lateness, ms (below 0: in time)";
        let plots = plots(lateness, title, label, Marks::Lines, level);
        draw_panels(&plots, out, "lateness")?;
    }
    Ok(())
}

fn plots(
    panels: Vec<(String, Vec<Line>)>,
    title: impl Fn(&str) -> String,
    y_label: &str,
    marks: Marks,
    level: Option<(f64, String)>,
) -> Vec<Plot> {
    // One scale for all panels, so that a reader can compare them.
    let all = panels.iter().flat_map(|(_, lines)| lines);
    let points = all.flat_map(|line| &line.points).map(|point| point.1);
    let highest = points.fold(1.0, f64::max);
    let plot = |(server, lines): (String, Vec<Line>)| Plot {
        title: title(&server),
        x_label: "seconds since the first client started".to_owned(),
        y_label: y_label.to_owned(),
        y_max: Some(highest * HEADROOM),
        level: level.clone(),
        marks,
        is_counted: false,
        lines,
    };
    panels.into_iter().map(plot).collect()
}

/// One line for each mix, from its last run.
fn lines(runs: &[EditRun], server: &str, of: fn(&EditRun) -> Vec<(f64, f64)>) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for run in runs.iter().filter(|run| run.server == server) {
        let points: Vec<_> = of(run)
            .into_iter()
            .map(|(x, y)| (x, y.min(SHOWN_MAX_MS)))
            .map(|(x, y)| (x, y, y, y))
            .collect();
        if points.is_empty() {
            continue;
        }
        match lines.iter_mut().find(|line| line.name == run.mix) {
            Some(line) => line.points = points,
            None => lines.push(Line {
                name: run.mix.clone(),
                points,
            }),
        }
    }
    lines
}

/// Units: s, ms.
fn first_frames(run: &EditRun) -> Vec<(f64, f64)> {
    let of = |row: &super::report::ClientRow| {
        let start = row.start_s;
        let waits = row.first_frame_ms.clone();
        let shift = move |(at, wait): (f32, f32)| (start + f64::from(at) / 1e3, f64::from(wait));
        waits.into_iter().map(shift)
    };
    run.per_client.iter().flat_map(of).collect()
}

/// The latest frame of each step. Units: s, ms.
fn latest(run: &EditRun) -> Vec<(f64, f64)> {
    let mut steps: BTreeMap<u64, f64> = BTreeMap::new();
    for row in &run.per_client {
        for (at, lateness) in row.lateness_ms.iter().flatten() {
            let step = ((row.start_s + f64::from(*at) / 1e3) / STEP_S) as u64;
            let worst = steps.entry(step).or_insert(f64::NEG_INFINITY);
            *worst = worst.max(f64::from(*lateness));
        }
    }
    steps
        .into_iter()
        .map(|(step, worst)| (step as f64 * STEP_S, worst))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::report::ClientRow;
    use super::*;

    fn run(server: &str, round: u64, wait: f32) -> EditRun {
        EditRun {
            server: server.to_owned(),
            mix: "timeline=1".to_owned(),
            round,
            per_client: vec![ClientRow {
                start_s: 1.0,
                first_frame_ms: vec![(500.0, wait)],
                lateness_ms: Some(vec![(0.0, -300.0), (100.0, 20.0), (300.0, -5.0)]),
                ..ClientRow::default()
            }],
            ..EditRun::default()
        }
    }

    #[test]
    fn the_last_run_of_a_server_is_drawn() {
        let runs = [
            run("stock", 1, 50.0),
            run("rushes", 1, 9000.0),
            run("stock", 2, 70.0),
        ];
        let stock = lines(&runs, "stock", first_frames);
        assert_eq!(stock.len(), 1);
        assert_eq!(stock[0].points, [(1.5, 70.0, 70.0, 70.0)]);
        assert_eq!(
            lines(&runs, "rushes", first_frames)[0].points[0].1,
            SHOWN_MAX_MS
        );
        assert_eq!(latest(&runs[0]), [(1.0, 20.0), (1.25, -5.0)]);
    }
}
