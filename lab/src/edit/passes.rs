// SPDX-License-Identifier: Apache-2.0
//! A cut list that clients repeat: memory that does not hold it, and each pass in numbers.
//!
//! Passes are comparable because each begins like the first: clients start one after the other,
//! none is behind, and the disk is idle before. As long as the server's memory holds much less than
//! the lists, only the server's knowledge differs. Absent: playing, which [`super::editor`] does.

use super::editor::Edited;
use super::report::{ClientRow, EditRun, KindRow, MedianRow, percentile, shown};
use super::script::{Pace, Passes, Script};
use super::workload::Part;
use crate::cli::CACHE_BYTES;
use crate::clients::player::now_ns;
use crate::experiments::compare::spread;
use crate::reports::plot::{Line, Marks, Plot};
use crate::stage::Stage;
use crate::stage::blocks::BlockStatistics;
use anyhow::{Result, ensure};
use serde::Serialize;
use serde_json::Value;
use std::fmt::Write as _;
use std::time::Duration;

/// With buffers of the default size the daemon refuses a smaller cache. Units: bytes.
const CACHE_BYTES_MIN: u64 = 64 << 20;
/// Without `--cache` the cache is the size of the lists divided by this.
const LIST_PART: u64 = 4;
/// Lists are at least so many times as large as the memory for them: even a cache that always keeps
/// the best part of them then reads half of each pass from the disk.
const LIST_TIMES_MIN: u64 = 2;
const MIB: u64 = 1 << 20;

/// Bytes that all clients with a list read in one pass, each counted once. Units: bytes.
pub fn list_bytes(parts: &[Part]) -> u64 {
    let lists = parts.iter().filter(|part| part.script.passes.count > 1);
    let mut stretches: Vec<(&str, u64, u64)> =
        lists.flat_map(|part| part.script.stretches()).collect();
    stretches.sort_unstable();
    let mut bytes = 0;
    let mut known = ("", 0);
    for (path, from, to) in stretches {
        let from = match known.0 == path {
            true => from.max(known.1),
            false => from,
        };
        bytes += to.saturating_sub(from);
        if known.0 != path || known.1 < to {
            known = (path, to);
        }
    }
    bytes
}

/// Memory for cached data that lists of `list_bytes` do not fit into.
///
/// Units    told: bytes, as on the command line; buffer_bytes: memory for writers, which a rival
/// also uses as cache
/// Errors   the lists are too short for that: their size, the size expected, the remedy
pub fn cache_bytes(list_bytes: u64, told: Option<u64>, buffer_bytes: u64) -> Result<u64> {
    let part = list_bytes / LIST_PART / MIB * MIB;
    let cache = told.unwrap_or(part.clamp(CACHE_BYTES_MIN, CACHE_BYTES));
    let most = list_bytes / LIST_TIMES_MIN / MIB;
    let memory = cache + buffer_bytes;
    ensure!(
        memory / MIB <= most,
        "the cut lists of all clients are {} MiB, and the server keeps {} MiB in memory; expected lists of at \
         least {LIST_TIMES_MIN} times that, since passes after the first would come from memory; {}",
        list_bytes / MIB,
        memory / MIB,
        match most.checked_sub(buffer_bytes / MIB) {
            Some(most) if most >= CACHE_BYTES_MIN / MIB =>
                format!("give --cache {most}MiB or less"),
            _ if buffer_bytes > 0 =>
                "give a smaller --write-buffer, more --seconds or more clients".to_owned(),
            _ => "give more --seconds or more clients".to_owned(),
        }
    );
    Ok(cache)
}

/// A pass of one client.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ClientPass {
    /// Its number, from 1 on.
    pub pass: u64,
    /// Frames with a time.
    pub frames: u64,
    /// Frames past their deadline, or skipped because the next pass began.
    pub late_frames: u64,
    /// Frames that came.
    pub frames_done: u64,
    /// Units: ms. Null: no frame came.
    pub worst_lateness_ms: Option<f64>,
    /// First frames that came, of runs from one cut to the next.
    pub cuts: u64,
    /// Bytes received.
    pub bytes_read: u64,
}

/// A pass of all clients of one kind in one run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct KindPass {
    /// Its number, from 1 on.
    pub pass: u64,
    /// Frames with a time.
    pub frames: u64,
    /// Frames past their deadline, or skipped because the next pass began.
    pub late_frames: u64,
    /// Frames that came.
    pub frames_done: u64,
    /// Clients with a late frame.
    pub late_clients: u64,
    /// Units: ms. Null: no frame came.
    pub worst_lateness_ms: Option<f64>,
    /// First frames that came, of runs from one cut to the next.
    pub cuts: u64,
    /// The median wait for a first frame. Units: ms. Null: there was none.
    pub first_frame_ms_p50: Option<f64>,
    /// The 95th percentile of these waits.
    pub first_frame_ms_p95: Option<f64>,
    /// The longest of these waits.
    pub first_frame_ms_max: Option<f64>,
    /// Bytes received.
    pub bytes_read: u64,
}

/// The disk in a pass of one run, for all clients together.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RunPass {
    /// Its number, from 1 on.
    pub pass: u64,
    /// When its first client began, after the first client of the run. Units: s.
    pub start_s: f64,
    /// Frames with a time, of all clients with a list.
    pub frames: u64,
    /// Frames past their deadline, or skipped.
    pub late_frames: u64,
    /// Bytes that the block devices read for all programs. Null: there is no block device.
    pub disk_bytes_read: Option<u64>,
    /// The reads that the block devices served.
    pub disk_read_count: Option<u64>,
}

/// A pass in all runs of one server with one mix, one kind of client.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct MedianPass {
    /// Its number, from 1 on.
    pub pass: u64,
    /// Frames with a time, of one run.
    pub frames: u64,
    /// Lowest, median, highest.
    pub late_frames: (f64, f64, f64),
    /// The worst of all runs. Units: ms.
    pub worst_lateness_ms: Option<f64>,
    /// The median wait over the cuts of all runs. Units: ms.
    pub first_frame_ms_p50: Option<f64>,
    /// The 95th percentile of these waits.
    pub first_frame_ms_p95: Option<f64>,
    /// The longest of these waits.
    pub first_frame_ms_max: Option<f64>,
    /// Bytes received: lowest, median, highest.
    pub bytes_read: (f64, f64, f64),
    /// Read by the block devices for all kinds of clients: lowest, median, highest. Null: there is
    /// no block device.
    pub disk_bytes_read: Option<(f64, f64, f64)>,
}

/// The passes of one client; none where it plays its list once.
pub fn of_client(script: &Script, edited: &Edited) -> Vec<ClientPass> {
    if script.pace != Pace::Clock || script.passes.count <= 1 {
        return Vec::new();
    }
    let starts = &edited.pass_starts;
    let pass = |index: u64| {
        let start = starts.get(index as usize);
        let next = starts.get(index as usize + 1);
        let end = |next: Option<usize>, all: usize| next.unwrap_or(all);
        let span = |from: Option<usize>, to: usize| from.unwrap_or(to)..to;
        let frames = span(
            start.map(|start| start.frame_count),
            end(next.map(|next| next.frame_count), edited.lateness_ms.len()),
        );
        let cuts = span(
            start.map(|start| start.cut_count),
            end(next.map(|next| next.cut_count), edited.first_frame_ms.len()),
        );
        let read = next.map_or(edited.bytes_read, |next| next.bytes_read);
        let lateness = edited.lateness_ms[frames.clone()].iter();
        let came_late = lateness.clone().filter(|(_, late)| *late > 0.0).count() as u64;
        let never_came = script.frame_count().saturating_sub(frames.len() as u64);
        ClientPass {
            pass: index + 1,
            frames: script.frame_count(),
            late_frames: came_late + never_came,
            frames_done: frames.len() as u64,
            worst_lateness_ms: lateness.map(|(_, late)| f64::from(*late)).reduce(f64::max),
            cuts: cuts.len() as u64,
            bytes_read: read - start.map_or(read, |start| start.bytes_read),
        }
    };
    (0..script.passes.count).map(pass).collect()
}

/// Waits for first frames of one pass. Units: ms.
fn waits<'a>(rows: &'a [&ClientRow], pass: usize) -> impl Iterator<Item = f64> + Clone + 'a {
    rows.iter().flat_map(move |row| {
        let before: u64 = row.passes.iter().take(pass).map(|pass| pass.cuts).sum();
        let count = row.passes.get(pass).map_or(0, |pass| pass.cuts);
        let all = row.first_frame_ms.iter().skip(before as usize);
        all.take(count as usize).map(|(_, wait)| f64::from(*wait))
    })
}

/// The passes of clients of one kind.
pub fn of_kind(rows: &[&ClientRow]) -> Vec<KindPass> {
    let count = rows.iter().map(|row| row.passes.len()).max().unwrap_or(0);
    let pass = |index: usize| {
        let mine = rows.iter().filter_map(|row| row.passes.get(index));
        let sum = |of: fn(&ClientPass) -> u64| mine.clone().map(of).sum::<u64>();
        let worst = mine.clone().filter_map(|pass| pass.worst_lateness_ms);
        KindPass {
            pass: index as u64 + 1,
            frames: sum(|pass| pass.frames),
            late_frames: sum(|pass| pass.late_frames),
            frames_done: sum(|pass| pass.frames_done),
            late_clients: mine.clone().filter(|pass| pass.late_frames > 0).count() as u64,
            worst_lateness_ms: worst.reduce(f64::max),
            cuts: sum(|pass| pass.cuts),
            first_frame_ms_p50: percentile(waits(rows, index), 50),
            first_frame_ms_p95: percentile(waits(rows, index), 95),
            first_frame_ms_max: percentile(waits(rows, index), 100),
            bytes_read: sum(|pass| pass.bytes_read),
        }
    };
    (0..count).map(pass).collect()
}

/// The passes of one kind in several runs, from the rows of its clients, its kind and the runs.
pub fn of_runs(clients: &[&ClientRow], kinds: &[&KindRow], runs: &[&EditRun]) -> Vec<MedianPass> {
    let count = kinds.iter().map(|row| row.passes.len()).max().unwrap_or(0);
    let pass = |index: usize| {
        let mine = kinds.iter().filter_map(|row| row.passes.get(index));
        let worst = mine.clone().filter_map(|pass| pass.worst_lateness_ms);
        let disk = runs.iter().filter_map(|run| run.passes.get(index));
        let disk: Vec<f64> = disk
            .filter_map(|pass| pass.disk_bytes_read)
            .map(|bytes| bytes as f64)
            .collect();
        MedianPass {
            pass: index as u64 + 1,
            frames: mine.clone().next().map_or(0, |pass| pass.frames),
            late_frames: spread(mine.clone().map(|pass| pass.late_frames as f64)),
            worst_lateness_ms: worst.reduce(f64::max),
            first_frame_ms_p50: percentile(waits(clients, index), 50),
            first_frame_ms_p95: percentile(waits(clients, index), 95),
            first_frame_ms_max: percentile(waits(clients, index), 100),
            bytes_read: spread(mine.map(|pass| pass.bytes_read as f64)),
            disk_bytes_read: (!disk.is_empty()).then(|| spread(disk)),
        }
    };
    (0..count).map(pass).collect()
}

/// The disk's counters between passes.
#[derive(Debug)]
pub struct DiskMarks {
    /// When each pass after the first counts as begun: in the middle of the rest before it, so that
    /// neither a late frame nor an early request counts in the other pass. Units: ns,
    /// CLOCK_MONOTONIC.
    due: Vec<u64>,
    seen: Vec<BlockStatistics>,
}

impl DiskMarks {
    /// Takes the counters at the beginning of the first pass.
    ///
    /// Units    t0: ns, CLOCK_MONOTONIC
    pub fn begin(stage: &Stage, t0: u64, passes: Passes, rest: Duration) -> Result<DiskMarks> {
        let half = rest.as_nanos() as u64 / 2;
        Ok(DiskMarks {
            due: (1..passes.count)
                .map(|pass| t0 + passes.start_ns(pass) - half)
                .collect(),
            seen: vec![stage.block_statistics()?],
        })
    }

    /// Time until the next pass counts as begun; `None`: the last one has.
    pub fn wait(&self) -> Option<Duration> {
        let due = self.due.get(self.seen.len() - 1)?;
        Some(Duration::from_nanos(due.saturating_sub(now_ns())))
    }

    /// Take the counters if it is time.
    pub fn look(&mut self, stage: &Stage) -> Result<()> {
        if self.wait().is_some_and(|wait| wait.is_zero()) {
            self.seen.push(stage.block_statistics()?);
        }
        Ok(())
    }

    /// Takes the counters at the end of the last pass.
    ///
    /// Returns  the disk's work over all passes, and in each where there are several
    pub fn end(mut self, stage: &Stage, passes: Passes) -> Result<(Value, Vec<RunPass>)> {
        self.seen.push(stage.block_statistics()?);
        let first = self.seen.first().cloned().unwrap_or_default();
        let last = self.seen.last().cloned().unwrap_or_default();
        let all = first.until(&last);
        if passes.count <= 1 {
            return Ok((all, Vec::new()));
        }
        let pairs = self.seen.iter().zip(self.seen.iter().skip(1));
        let rows = (0..passes.count).zip(pairs).map(|(pass, (from, to))| {
            let work = from.until(to);
            RunPass {
                pass: pass + 1,
                start_s: passes.start_ns(pass) as f64 / 1e9,
                disk_bytes_read: work["read_bytes"].as_u64(),
                disk_read_count: work["read_count"].as_u64(),
                ..RunPass::default()
            }
        });
        Ok((all, rows.collect()))
    }
}

impl EditRun {
    /// Sum up the frames of all clients in each pass.
    pub fn count_passes(&mut self) {
        for (index, pass) in self.passes.iter_mut().enumerate() {
            let kinds = self.kinds.iter().filter_map(|row| row.passes.get(index));
            pass.frames = kinds.clone().map(|row| row.frames).sum();
            pass.late_frames = kinds.map(|row| row.late_frames).sum();
        }
    }

    /// Each pass in a few words; nothing where there is only one.
    pub fn words_on_passes(&self) -> String {
        let mut words = String::new();
        for pass in &self.passes {
            let disk = pass.disk_bytes_read;
            let _ = write!(
                words,
                "; pass {}: {} of {} frames late, {} MB from the disk",
                pass.pass,
                pass.late_frames,
                pass.frames,
                disk.map_or("—".to_owned(), |bytes| (bytes / 1_000_000).to_string())
            );
        }
        words
    }
}

/// Rows of a table, one for each pass; nothing where there is only one.
pub fn table(medians: &[MedianRow]) -> String {
    let mut out = String::new();
    if medians.iter().all(|row| row.passes.is_empty()) {
        return out;
    }
    out += "\n| mix | server | kind | pass | late frames | of | worst ms | first frame p50 | p95 | worst ms | read MB | from the disk MB |\n";
    out += "|---|---|---|---|---|---|---|---|---|---|---|---|\n";
    let number = |value: Option<f64>| value.map_or("—".to_owned(), |v| format!("{v:.0}"));
    let mb = |(low, median, high): (f64, f64, f64)| shown((low / 1e6, median / 1e6, high / 1e6), 0);
    for row in medians {
        for pass in &row.passes {
            let _ = writeln!(
                out,
                "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
                row.mix,
                row.server,
                row.kind,
                pass.pass,
                shown(pass.late_frames, 0),
                pass.frames,
                number(pass.worst_lateness_ms),
                number(pass.first_frame_ms_p50),
                number(pass.first_frame_ms_p95),
                number(pass.first_frame_ms_max),
                mb(pass.bytes_read),
                pass.disk_bytes_read.map_or("—".to_owned(), mb),
            );
        }
    }
    out
}

/// Panels over the passes, a line for each row: late frames, first frames, the disk. None where
/// there is only one pass.
pub fn plots(medians: &[MedianRow]) -> Vec<Plot> {
    if medians.iter().all(|row| row.passes.is_empty()) {
        return Vec::new();
    }
    let is_one_mix = medians.iter().all(|row| row.mix == medians[0].mix);
    let panel = |title: &str, y_label: &str, of: &dyn Fn(&MedianPass) -> Option<Figure>| Plot {
        title: title.to_owned(),
        x_label: "pass over the cut list".to_owned(),
        y_label: y_label.to_owned(),
        y_max: None,
        level: None,
        marks: Marks::Spread,
        is_counted: true,
        lines: medians
            .iter()
            .filter(|row| !row.passes.is_empty())
            .map(|row| Line {
                name: match is_one_mix {
                    true => format!("{} {}", row.server, row.kind),
                    false => format!("{} {} {}", row.server, row.kind, row.mix),
                },
                points: row
                    .passes
                    .iter()
                    .filter_map(|pass| {
                        let (low, middle, high) = of(pass)?;
                        Some((pass.pass as f64, middle, low, high))
                    })
                    .collect(),
            })
            .collect(),
    };
    vec![
        panel("Late frames (lowest, median, highest)", "frames", &|pass| {
            Some(pass.late_frames)
        }),
        panel(
            "From a cut to its first frame (p50, p95, longest)",
            "ms",
            &|pass| {
                Some((
                    pass.first_frame_ms_p50?,
                    pass.first_frame_ms_p95?,
                    pass.first_frame_ms_max?,
                ))
            },
        ),
        panel(
            "Read from the disk for all clients (lowest, median, highest)",
            "MB",
            &|pass| {
                let (low, median, high) = pass.disk_bytes_read?;
                Some((low / 1e6, median / 1e6, high / 1e6))
            },
        ),
    ]
}

/// Lower end, value, upper end.
type Figure = (f64, f64, f64);

#[cfg(test)]
mod tests {
    use super::super::editor::PassStart;
    use super::super::script::{Head, Run, Source};
    use super::*;

    fn script(stretches: &[(u64, u64)], count: u64) -> Script {
        let run = |(from, frame_count): &(u64, u64)| Run {
            heads: vec![Head {
                file: 0,
                from: *from,
                stride: 10,
                bytes: 10,
                every: 1,
                writes: false,
            }],
            frame_count: *frame_count,
            period_ns: 1,
        };
        Script {
            files: vec![Source {
                path: "clip".to_owned(),
                number: 0,
                bytes: 1000,
                keep_open: true,
                is_real: false,
                grows: false,
            }],
            runs: stretches.iter().map(run).collect(),
            passes: Passes {
                count,
                every_ns: 100,
            },
            ..Script::default()
        }
    }

    fn part(script: Script) -> Part {
        Part {
            client: 0,
            kind: "timeline".to_owned(),
            is_beside: false,
            script,
        }
    }

    #[test]
    fn bytes_that_two_clients_read_are_counted_once() {
        let parts = [
            part(script(&[(0, 10), (500, 1)], 2)),
            part(script(&[(50, 10), (20, 2), (510, 1)], 2)),
            part(script(&[(800, 10)], 1)),
        ];
        assert_eq!(list_bytes(&parts), 150 + 20, "the last plays no list again");
        let mut other = script(&[(0, 10)], 2);
        other.files[0].path = "other".to_owned();
        assert_eq!(list_bytes(&[part(script(&[(0, 10)], 2)), part(other)]), 200);
    }

    #[test]
    fn a_cache_is_a_quarter_of_the_lists_between_the_least_and_the_usual() {
        let of = |mib: u64| cache_bytes(mib * MIB, None, 0).map(|bytes| bytes / MIB);
        assert_eq!(of(400).unwrap(), 100);
        assert_eq!(of(130).unwrap(), 64);
        assert_eq!(of(8000).unwrap(), 1024);
        let said = format!("{:#}", of(127).unwrap_err());
        assert!(said.contains("127 MiB") && said.contains("more --seconds"));
    }

    #[test]
    fn memory_that_holds_more_than_half_of_the_lists_is_refused() {
        let of = |cache: u64, buffer: u64| {
            cache_bytes(400 * MIB, Some(cache * MIB), buffer * MIB).map(|bytes| bytes / MIB)
        };
        assert_eq!(of(200, 0).unwrap(), 200);
        let said = format!("{:#}", of(201, 0).unwrap_err());
        assert!(said.contains("--cache 200MiB"), "{said}");
        let said = format!("{:#}", of(100, 120).unwrap_err());
        assert!(
            said.contains("220 MiB") && said.contains("--cache 80MiB"),
            "{said}"
        );
        let said = format!("{:#}", of(64, 180).unwrap_err());
        assert!(said.contains("--write-buffer"), "{said}");
    }

    /// Two passes of three frames: in the first all came, one of them late; in the second only one.
    fn edited() -> Edited {
        let start = |frame_count: usize, cut_count: usize, bytes_read: u64| PassStart {
            frame_count,
            cut_count,
            bytes_read,
        };
        Edited {
            lateness_ms: vec![(0.0, -5.0), (1.0, 7.0), (2.0, -1.0), (100.0, -3.0)],
            first_frame_ms: vec![(0.0, 80.0), (1.0, 20.0), (100.0, 4.0)],
            pass_starts: vec![start(0, 0, 0), start(3, 2, 30)],
            bytes_read: 40,
            frame_count: 4,
            ..Edited::default()
        }
    }

    fn row() -> ClientRow {
        let script = script(&[(0, 2), (100, 1)], 3);
        ClientRow::new(0, "timeline", &script, &edited(), 0)
    }

    #[test]
    fn each_pass_has_its_own_frames_and_a_pass_that_never_began_is_late() {
        let row = row();
        let told: Vec<_> = row
            .passes
            .iter()
            .map(|pass| (pass.frames, pass.late_frames, pass.frames_done, pass.cuts))
            .collect();
        assert_eq!(told, [(3, 1, 3, 2), (3, 2, 1, 1), (3, 3, 0, 0)]);
        let read: Vec<u64> = row.passes.iter().map(|pass| pass.bytes_read).collect();
        assert_eq!(read, [30, 10, 0]);
        assert_eq!(row.passes[0].worst_lateness_ms, Some(7.0));
        assert_eq!(row.passes[2].worst_lateness_ms, None);
        assert_eq!((row.frames, row.late_frames), (9, 6), "of all passes");
    }

    #[test]
    fn a_list_that_is_played_once_has_no_passes() {
        let script = script(&[(0, 3)], 1);
        assert_eq!(of_client(&script, &edited()), []);
        let row = ClientRow::new(0, "timeline", &script, &edited(), 0);
        assert_eq!(of_kind(&[&row]), []);
        assert_eq!(table(&[MedianRow::default()]), "");
        assert!(plots(&[MedianRow::default()]).is_empty());
    }

    fn medians() -> Vec<MedianRow> {
        let disk = |pass: u64, bytes: u64| RunPass {
            pass,
            disk_bytes_read: Some(bytes),
            ..RunPass::default()
        };
        let row = row();
        let mut run = EditRun {
            server: "stock".to_owned(),
            mix: "timeline=1".to_owned(),
            kinds: vec![KindRow::new("timeline", &[(&row, &edited())])],
            per_client: vec![row],
            passes: vec![disk(1, 9_000_000), disk(2, 3_000_000), disk(3, 0)],
            ..EditRun::default()
        };
        run.count_passes();
        assert!(
            run.line()
                .contains("pass 2: 2 of 3 frames late, 3 MB from the disk")
        );
        super::super::report::medians(&[run])
    }

    #[test]
    fn the_table_and_the_pictures_have_each_pass() {
        let medians = medians();
        let first = &medians[0].passes[0];
        assert_eq!(first.first_frame_ms_p50, Some(20.0));
        assert_eq!(first.first_frame_ms_max, Some(80.0));
        assert_eq!(medians[0].passes[1].first_frame_ms_max, Some(4.0));
        assert_eq!(first.disk_bytes_read, Some((9e6, 9e6, 9e6)));
        let text = table(&medians);
        assert!(text.contains("| timeline=1 | stock | timeline | 1 | 1 | 3 | 7 | 20 | 80 | 80 |"));
        let plots = plots(&medians);
        assert_eq!(plots.len(), 3);
        let frames = &plots[1].lines[0];
        assert_eq!(frames.name, "stock timeline");
        assert_eq!(frames.points[0], (1.0, 80.0, 20.0, 80.0));
        assert_eq!(frames.points.len(), 2, "no first frame came in the last");
        assert_eq!(plots[2].lines[0].points[1], (2.0, 3.0, 3.0, 3.0));
    }

    #[test]
    fn every_field_of_a_pass_is_described() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/lab-json.md");
        let text = std::fs::read_to_string(path).unwrap();
        for row in [
            serde_json::to_value(ClientPass::default()),
            serde_json::to_value(KindPass::default()),
            serde_json::to_value(RunPass::default()),
            serde_json::to_value(MedianPass::default()),
        ] {
            for name in row.unwrap().as_object().unwrap().keys() {
                assert!(
                    text.contains(&format!("`{name}`")),
                    "{name} is not in {path}"
                );
            }
        }
    }
}
