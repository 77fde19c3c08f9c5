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
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Block, Borders, Cell, Gauge, Paragraph, Row, Table};
use rushes_control::{Answer, Ask, DeviceStatus, Status, StreamStatus};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Height of the picture of `--once`: room for the streams of one busy room.
const ONCE_ROWS_MAX: u16 = 200;

pub(crate) fn run(args: &TopArgs) -> Result<ExitCode, String> {
    let dir = runtime_dir(&args.daemon)?;
    if args.json {
        json(args, &dir)
    } else if args.once {
        let (before, now) = two(args, &dir)?;
        say(&picture(&before, &now, args.width))?;
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

/// One picture as text.
fn picture(before: &Status, now: &Status, width: u16) -> String {
    let rows = 10 + now.devices.len() + now.streams.len() + now.daemon.notes.len();
    let height = u16::try_from(rows).unwrap_or(u16::MAX).min(ONCE_ROWS_MAX);
    let mut terminal = match Terminal::new(TestBackend::new(width.max(40), height)) {
        Ok(terminal) => terminal,
        Err(never) => match never {},
    };
    match terminal.draw(|frame| draw(frame, before, now, &Around::default())) {
        Ok(_) => {}
        Err(never) => match never {},
    }
    let buffer = terminal.backend().buffer().clone();
    let mut out = String::new();
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
    let notes = now.daemon.notes.len() + usize::from(around.trouble.is_some());
    let [head, cache, devices, streams] = Layout::vertical([
        Constraint::Length(2 + notes as u16),
        Constraint::Length(1),
        Constraint::Length(2 + now.devices.len() as u16),
        Constraint::Min(2),
    ])
    .areas(frame.area());
    frame.render_widget(head_widget(now, around), head);
    frame.render_widget(cache_widget(now), cache);
    frame.render_widget(devices_widget(before, now), devices);
    frame.render_widget(streams_widget(before, now), streams);
}

fn head_widget<'a>(now: &Status, around: &Around<'_>) -> Paragraph<'a> {
    let daemon = &now.daemon;
    let (mut due, mut late, mut promised_late) = (0, 0, 0);
    for stream in &now.streams {
        due += stream.due_count;
        late += stream.late_count;
        promised_late += stream.promised_late_count;
    }
    let mut lines = vec![
        Line::from(format!(
            "rushes {} · up {} · CPU {:.1} s · memory {} beside the cache{}",
            daemon.version,
            show::uptime(daemon.uptime_s),
            daemon.cpu_s,
            show::bytes(daemon.rss_beside_cache_bytes),
            around.keys
        )),
        Line::styled(
            format!(
                "{} streams open · {} sessions · reads due {due}, late {late} (promised: {promised_late}) · event loop p99 {} µs",
                now.streams.iter().filter(|stream| stream.open).count(),
                now.sessions.len(),
                daemon.event_loop.lag_p99_us
            ),
            lateness_style(late),
        ),
    ];
    for note in &daemon.notes {
        lines.push(Line::styled(
            format!("note: {note}"),
            Style::new().fg(Color::Yellow),
        ));
    }
    if let Some(trouble) = around.trouble {
        lines.push(Line::styled(
            trouble.to_string(),
            Style::new().fg(Color::Red),
        ));
    }
    Paragraph::new(Text::from(lines))
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

fn header<'a>(names: &[&'static str]) -> Row<'a> {
    Row::new(
        names
            .iter()
            .map(|name| Cell::from(*name))
            .collect::<Vec<_>>(),
    )
    .style(Style::new().add_modifier(Modifier::BOLD))
}

fn devices_widget<'a>(before: &Status, now: &Status) -> Table<'a> {
    let seconds = (now.daemon.uptime_s - before.daemon.uptime_s).max(0.001);
    let rows: Vec<Row<'a>> = now
        .devices
        .iter()
        .map(|device| {
            let earlier = before
                .devices
                .iter()
                .find(|other| other.device == device.device);
            device_row(device, earlier, seconds)
        })
        .collect();
    Table::new(
        rows,
        [
            Constraint::Length(12),
            Constraint::Length(20),
            Constraint::Length(10),
            Constraint::Length(12),
            Constraint::Length(14),
            Constraint::Length(14),
            Constraint::Length(6),
        ],
    )
    .header(header(&[
        "device",
        "model",
        "contracts",
        "promised",
        "contract",
        "other",
        "busy",
    ]))
    .block(Block::new().borders(Borders::TOP))
}

fn device_row<'a>(device: &DeviceStatus, earlier: Option<&DeviceStatus>, seconds: f64) -> Row<'a> {
    let rate = |now: u64, before: Option<u64>| {
        let moved = now.saturating_sub(before.unwrap_or(now));
        show::byte_rate((moved as f64 / seconds) as u64)
    };
    let busy = earlier.map_or(0.0, |earlier| (device.busy_s - earlier.busy_s) / seconds);
    Row::new(vec![
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
    ])
}

fn streams_widget<'a>(before: &Status, now: &Status) -> Table<'a> {
    let seconds = (now.daemon.uptime_s - before.daemon.uptime_s).max(0.001);
    let rows: Vec<Row<'a>> = now
        .streams
        .iter()
        .map(|stream| {
            let earlier = before
                .streams
                .iter()
                .find(|other| other.stream == stream.stream);
            stream_row(stream, earlier, seconds)
        })
        .collect();
    Table::new(
        rows,
        [
            Constraint::Length(5),
            Constraint::Length(11),
            Constraint::Length(10),
            Constraint::Length(8),
            Constraint::Length(11),
            Constraint::Length(8),
            Constraint::Length(6),
            Constraint::Length(8),
            Constraint::Length(9),
            Constraint::Length(10),
            Constraint::Min(10),
        ],
    )
    .header(header(&[
        "#", "standing", "rate", "from", "now", "due", "late", "worst", "ahead", "user", "file",
    ]))
    .block(Block::new().borders(Borders::TOP))
}

fn stream_row<'a>(stream: &StreamStatus, earlier: Option<&StreamStatus>, seconds: f64) -> Row<'a> {
    let moved = stream
        .bytes
        .saturating_sub(earlier.map_or(stream.bytes, |earlier| earlier.bytes));
    let style = match (stream.open, stream.late_count, stream.standing.as_str()) {
        (false, _, _) => Style::new().add_modifier(Modifier::DIM),
        (true, 1.., _) => Style::new().fg(Color::Red),
        (true, 0, "contract") => Style::new().fg(Color::Green),
        (true, 0, _) => Style::new(),
    };
    Row::new(vec![
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
        file_of(stream, 60),
    ])
    .style(style)
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
        let picture = picture(&before, &now, 140);
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
    fn an_idle_daemon_in_a_small_window_is_drawn_too() {
        let idle = Status::default();
        assert!(picture(&idle, &idle, 1).contains("rushes"));
    }
}
