// SPDX-License-Identifier: Apache-2.0
//! `rushes top`: the ledger, live.
//!
//! One function draws a picture from two statuses (rates are differences); the terminal and the
//! test buffer both use it.

use crate::args::TopArgs;
use crate::ask::{ask_in, runtime_dir, say, unexpected};
use crate::show;
use crate::status::file_of;
use ratatui::Frame;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Block, Borders, Gauge, Paragraph, Row, Table};
use rushes_control::{Answer, Ask, DeviceStatus, Status, StreamStatus};
use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Width of the picture of `--once` where nobody says another one, at least.
const ONCE_COLUMNS: u16 = 120;

pub(crate) fn run(args: &TopArgs) -> Result<ExitCode, String> {
    let dir = runtime_dir(&args.daemon)?;
    if args.json {
        json(args, &dir)
    } else if args.once {
        let (before, now) = two(args, &dir)?;
        say(&picture(&before, &now, Breadth::of_output(args.width)))?;
        Ok(ExitCode::SUCCESS)
    } else {
        live(args, &dir)
    }
}

fn status(args: &TopArgs, dir: &Path) -> Result<Status, String> {
    match ask_in(&args.daemon, dir, &Ask::Status {})? {
        Answer::Status(status) => Ok(*status),
        other => Err(unexpected(&other)),
    }
}

fn two(args: &TopArgs, dir: &Path) -> Result<(Status, Status), String> {
    let before = status(args, dir)?;
    std::thread::sleep(args.interval);
    Ok((before, status(args, dir)?))
}

fn json(args: &TopArgs, dir: &Path) -> Result<ExitCode, String> {
    loop {
        say(&rushes_control::line_of(&status(args, dir)?))?;
        if args.once {
            return Ok(ExitCode::SUCCESS);
        }
        std::thread::sleep(args.interval);
    }
}

/// How wide a picture is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Breadth {
    /// So many columns: long lines go on in the next one, and the columns of tables are fixed.
    Fixed(u16),
    /// As wide as its longest line, and so wide at least: nothing is cut off.
    Least(u16),
}

impl Breadth {
    /// For `--once`. `wanted`: by the user
    fn of_output(wanted: Option<u16>) -> Breadth {
        let own = || ratatui::crossterm::terminal::size().map(|(columns, _)| columns);
        match std::io::stdout().is_terminal() {
            true => Breadth::Fixed(wanted.or_else(|| own().ok()).unwrap_or(ONCE_COLUMNS)),
            false => Breadth::Least(wanted.unwrap_or(ONCE_COLUMNS)),
        }
    }

    fn is_fixed(self) -> bool {
        matches!(self, Breadth::Fixed(_))
    }
}

/// One picture as text.
fn picture(before: &Status, now: &Status, breadth: Breadth) -> String {
    let least = match breadth {
        Breadth::Fixed(columns) | Breadth::Least(columns) => columns.max(40),
    };
    let head_columns = breadth.is_fixed().then_some(least);
    let head = head_lines(now, &Around::default(), head_columns);
    let mut out = String::new();
    for line in head {
        out += &show::one_line(&line.to_string());
        out.push('\n');
    }
    let (devices, streams) = grids(before, now, breadth.is_fixed());
    let width = match breadth {
        Breadth::Fixed(_) => least,
        Breadth::Least(_) => least.max(devices.columns()).max(streams.columns()),
    };
    let rows = 5 + now.devices.len() + now.streams.len();
    let height = u16::try_from(rows).unwrap_or(u16::MAX);
    let mut terminal = match Terminal::new(TestBackend::new(width, height)) {
        Ok(terminal) => terminal,
        Err(never) => match never {},
    };
    match terminal.draw(|frame| draw_below(frame, frame.area(), now, (devices, streams))) {
        Ok(_) => {}
        Err(never) => match never {},
    }
    let buffer = terminal.backend().buffer().clone();
    for row in buffer.content.chunks(usize::from(buffer.area.width)) {
        let line: String = row.iter().map(|cell| cell.symbol()).collect();
        out += line.trim_end();
        out.push('\n');
    }
    out
}

fn live(args: &TopArgs, dir: &Path) -> Result<ExitCode, String> {
    let mut before = status(args, dir)?;
    let mut now = before.clone();
    let mut trouble: Option<String> = None;
    let mut terminal = ratatui::try_init().map_err(|error| {
        format!("standard output is not a terminal ({error}); use --once or --json")
    })?;
    let result = loop {
        let around = Around {
            keys: " · q leaves",
            trouble: trouble.as_deref(),
        };
        let drawn = terminal.draw(|frame| draw(frame, &before, &now, &around));
        if let Err(error) = drawn {
            break Err(format!("the terminal is gone: {error}"));
        }
        match wait_for_quit(args.interval) {
            Ok(true) => break Ok(ExitCode::SUCCESS),
            Ok(false) => {}
            Err(error) => break Err(format!("the terminal is gone: {error}")),
        }
        // A daemon that restarts does not end this command: it shows the error and keeps asking.
        match status(args, dir) {
            Ok(next) => {
                before = std::mem::replace(&mut now, next);
                trouble = None;
            }
            Err(error) => trouble = Some(error),
        }
    };
    ratatui::restore();
    result
}

/// True when the user wants to leave; false after `interval`.
fn wait_for_quit(interval: Duration) -> std::io::Result<bool> {
    let end = Instant::now() + interval;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if !event::poll(left)? {
            return Ok(false);
        }
        if let Event::Key(key) = event::read()? {
            let interrupt =
                key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
            if interrupt || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc) {
                return Ok(true);
            }
        }
    }
}

/// The parts of a picture that are in no status.
#[derive(Default)]
struct Around<'a> {
    /// The keys that have an effect; none in a picture that is only printed.
    keys: &'a str,
    /// Why the status is old.
    trouble: Option<&'a str>,
}

fn draw(frame: &mut Frame<'_>, before: &Status, now: &Status, around: &Around<'_>) {
    let lines = head_lines(now, around, Some(frame.area().width));
    let [head, below] =
        Layout::vertical([Constraint::Length(lines.len() as u16), Constraint::Min(5)])
            .areas(frame.area());
    frame.render_widget(Paragraph::new(Text::from(lines)), head);
    draw_below(frame, below, now, grids(before, now, true));
}

fn draw_below(frame: &mut Frame<'_>, area: Rect, now: &Status, (devices, streams): (Grid, Grid)) {
    let [cache, top, bottom] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(2 + now.devices.len() as u16),
        Constraint::Min(2),
    ])
    .areas(area);
    frame.render_widget(cache_widget(now), cache);
    frame.render_widget(devices.widget(), top);
    frame.render_widget(streams.widget(), bottom);
}

/// The table of devices and that of streams.
///
/// `is_fixed`  their columns are as wide as in any other picture, and long cells are cut off
fn grids(before: &Status, now: &Status, is_fixed: bool) -> (Grid, Grid) {
    let file_columns = if is_fixed { FILE_COLUMNS } else { usize::MAX };
    let mut devices = devices_grid(before, now);
    let mut streams = streams_grid(before, now, file_columns);
    if !is_fixed {
        devices.fit();
        streams.fit();
    }
    (devices, streams)
}

/// The lines above the tables. `columns`: longer lines go on in the next one; None: none does.
fn head_lines<'a>(now: &Status, around: &Around<'_>, columns: Option<u16>) -> Vec<Line<'a>> {
    let daemon = &now.daemon;
    let (mut due, mut late, mut promised_late) = (0, 0, 0);
    let open = now.streams.iter().filter(|stream| stream.open).count();
    for stream in &now.streams {
        due += stream.due_count;
        late += stream.late_count;
        promised_late += stream.promised_late_count;
    }
    let mut said = vec![
        (
            Style::new(),
            format!(
                "rushes {} · up {} · CPU {:.1} s · memory {} beside the cache{}",
                daemon.version,
                show::uptime(daemon.uptime_s),
                daemon.cpu_s,
                show::bytes(daemon.rss_beside_cache_bytes),
                around.keys
            ),
        ),
        (
            lateness_style(late),
            format!(
                "{} open · {} · reads due {due}, late {late} (promised: {promised_late}) · event loop p99 {} µs",
                show::count(open as u64, "stream"),
                show::count(now.sessions.len() as u64, "session"),
                daemon.event_loop.lag_p99_us
            ),
        ),
    ];
    for note in &daemon.notes {
        said.push((Style::new().fg(Color::Yellow), format!("note: {note}")));
    }
    if let Some(trouble) = around.trouble {
        said.push((Style::new().fg(Color::Red), trouble.to_string()));
    }
    said.iter()
        .flat_map(|(style, text)| {
            let lines = match columns {
                Some(columns) => show::wrapped(text, usize::from(columns)),
                None => vec![text.clone()],
            };
            lines.into_iter().map(|line| Line::styled(line, *style))
        })
        .collect()
}

fn lateness_style(late: u64) -> Style {
    if late > 0 {
        Style::new().fg(Color::Red).add_modifier(Modifier::BOLD)
    } else {
        Style::new().fg(Color::Green)
    }
}

fn cache_widget<'a>(now: &Status) -> Gauge<'a> {
    let cache = &now.cache;
    let all = f64::from(cache.buffer_count.max(1));
    let used = f64::from(cache.buffer_count.saturating_sub(cache.free_count));
    Gauge::default()
        .ratio((used / all).clamp(0.0, 1.0))
        .label(format!(
            "cache {}: {} held, {} pinned, {} hits, {} misses",
            show::bytes(cache.bytes),
            cache.held_count,
            cache.pinned_count,
            cache.hit_count,
            cache.miss_count
        ))
        .gauge_style(Style::new().fg(Color::Blue))
}

/// A table: its head, the widths of its columns, and its rows.
struct Grid {
    names: Vec<&'static str>,
    widths: Vec<u16>,
    rows: Vec<(Vec<String>, Style)>,
}

/// Of a long path in a picture of a fixed width.
const FILE_COLUMNS: usize = 60;
/// Between two columns.
const GAP: u16 = 1;

impl Grid {
    /// Make each column as wide as its widest cell, if that is wider.
    fn fit(&mut self) {
        for (at, width) in self.widths.iter_mut().enumerate() {
            let cells = self.rows.iter().map(|(cells, _)| cells[at].as_str());
            let widest = cells
                .chain([self.names[at]])
                .map(|cell| Line::from(cell).width());
            let widest = widest.max().unwrap_or(0);
            *width = (*width).max(u16::try_from(widest).unwrap_or(u16::MAX));
        }
    }

    fn columns(&self) -> u16 {
        let all = self.widths.iter().map(|width| width.saturating_add(GAP));
        all.fold(0, u16::saturating_add)
    }

    fn widget(self) -> Table<'static> {
        let last = self.widths.len().saturating_sub(1);
        let column = |(at, width): (usize, &u16)| match at == last {
            true => Constraint::Min(*width),
            false => Constraint::Length(*width),
        };
        let constraints: Vec<Constraint> = self.widths.iter().enumerate().map(column).collect();
        let head = Row::new(self.names).style(Style::new().add_modifier(Modifier::BOLD));
        let rows = self.rows.into_iter();
        let rows = rows.map(|(cells, style)| Row::new(cells).style(style));
        Table::new(rows, constraints)
            .column_spacing(GAP)
            .header(head)
            .block(Block::new().borders(Borders::TOP))
    }
}

fn devices_grid(before: &Status, now: &Status) -> Grid {
    let seconds = (now.daemon.uptime_s - before.daemon.uptime_s).max(0.001);
    let row = |device: &DeviceStatus| {
        let mut all = before.devices.iter();
        let earlier = all.find(|other| other.device == device.device);
        (device_row(device, earlier, seconds), Style::new())
    };
    Grid {
        names: vec![
            "device",
            "model",
            "contracts",
            "promised",
            "contract",
            "other",
            "busy",
        ],
        widths: vec![12, 20, 10, 12, 14, 14, 6],
        rows: now.devices.iter().map(row).collect(),
    }
}

fn device_row(device: &DeviceStatus, earlier: Option<&DeviceStatus>, seconds: f64) -> Vec<String> {
    let rate = |now: u64, before: Option<u64>| {
        let moved = now.saturating_sub(before.unwrap_or(now));
        show::byte_rate((moved as f64 / seconds) as u64)
    };
    let busy = earlier.map_or(0.0, |earlier| (device.busy_s - earlier.busy_s) / seconds);
    vec![
        device.name.clone(),
        device.model_source.clone(),
        device.contract_count.to_string(),
        show::byte_rate(device.promised_bytes_per_s),
        rate(device.real_time_bytes, earlier.map(|e| e.real_time_bytes)),
        rate(
            device.best_effort_bytes,
            earlier.map(|e| e.best_effort_bytes),
        ),
        format!("{:.0} %", (busy * 100.0).clamp(0.0, 100.0)),
    ]
}

fn streams_grid(before: &Status, now: &Status, file_columns: usize) -> Grid {
    let seconds = (now.daemon.uptime_s - before.daemon.uptime_s).max(0.001);
    let row = |stream: &StreamStatus| {
        let mut all = before.streams.iter();
        let earlier = all.find(|other| other.stream == stream.stream);
        stream_row(stream, earlier, seconds, file_columns)
    };
    Grid {
        names: vec![
            "#", "standing", "rate", "from", "now", "due", "late", "worst", "ahead", "user", "file",
        ],
        widths: vec![5, 11, 10, 8, 11, 8, 6, 8, 9, 10, 10],
        rows: now.streams.iter().map(row).collect(),
    }
}

fn stream_row(
    stream: &StreamStatus,
    earlier: Option<&StreamStatus>,
    seconds: f64,
    file_columns: usize,
) -> (Vec<String>, Style) {
    let moved = stream
        .bytes
        .saturating_sub(earlier.map_or(stream.bytes, |earlier| earlier.bytes));
    let style = match (stream.open, stream.late_count, stream.standing.as_str()) {
        (false, _, _) => Style::new().add_modifier(Modifier::DIM),
        (true, 1.., _) => Style::new().fg(Color::Red),
        (true, 0, "contract") => Style::new().fg(Color::Green),
        (true, 0, _) => Style::new(),
    };
    let cells = vec![
        stream.stream.to_string(),
        if stream.open {
            stream.standing.replace('_', " ")
        } else {
            String::from("closed")
        },
        stream.rate_bytes_per_s.map_or_else(
            || String::from("?"),
            |rate| show::bitrate(rate.saturating_mul(8)),
        ),
        stream.rate_source.clone().unwrap_or_default(),
        show::byte_rate((moved as f64 / seconds) as u64),
        stream.due_count.to_string(),
        stream.late_count.to_string(),
        format!("{:.0} ms", stream.worst_lateness_ms),
        format!("{:.1} s", stream.ahead_ms / 1000.0),
        stream.user.clone(),
        file_of(stream, file_columns),
    ];
    (cells, style)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::tests::sample;

    #[test]
    fn a_picture_shows_rates_as_differences() {
        let before = sample();
        let mut now = before.clone();
        now.daemon.uptime_s += 2.0;
        now.streams[0].bytes += 25_000_000;
        now.devices[0].real_time_bytes += 25_000_000;
        now.devices[0].busy_s += 1.0;
        let picture = picture(&before, &now, Breadth::Fixed(140));
        for expect in [
            "2 streams open",
            "reads due 480, late 2",
            "12.5 MB/s",
            "50 %",
            "contract",
            "footage/take.mov",
            "note: md0 was never measured",
        ] {
            assert!(
                picture.contains(expect),
                "{expect:?} is missing in\n{picture}"
            );
        }
        assert!(!picture.contains("leaves"), "it takes no keys:\n{picture}");
    }

    #[test]
    fn no_remedy_is_cut_off_in_a_terminal_it_goes_on_in_the_next_line() {
        let mut now = sample();
        let remedy = "rushes calibrate /media/media --save, then systemctl reload rushes";
        let long = "the disk was never measured, so this rests on a cautious guess: ".repeat(2);
        now.daemon.notes = vec![format!("{long}{remedy}")];
        now.devices[0].model_source = "m".repeat(50);
        now.streams[0].path = format!("{}/take.mov", "day".repeat(40));
        now.streams[0].user = String::from("somebody.with.a.name");
        let whole = picture(&now, &now, Breadth::Least(120));
        let path = now.streams[0].path.as_str();
        for expect in [remedy, path, "somebody.with.a.name", &"m".repeat(50)] {
            assert!(whole.contains(expect), "{expect:?} is missing in\n{whole}");
        }
        let screen = picture(&now, &now, Breadth::Fixed(80));
        let columns = |line: &str| line.chars().count();
        assert!(screen.lines().all(|line| columns(line) <= 80), "{screen}");
        let words: Vec<&str> = screen.split_whitespace().collect();
        assert!(words.join(" ").contains(remedy), "{screen}");
    }

    #[test]
    fn an_idle_daemon_in_a_small_window_is_drawn_too() {
        let idle = Status::default();
        assert!(picture(&idle, &idle, Breadth::Fixed(1)).contains("rushes"));
    }
}
