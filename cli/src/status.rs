// SPDX-License-Identifier: Apache-2.0
//! `rushes status`: the ledger as text.

use crate::args::StatusArgs;
use crate::ask::{ask, print_json, say, unexpected};
use crate::show::{self, Table};
use rushes_control::{Answer, Ask, GuiltyStatus, SeatStatus, ShareStatus, Status, StreamStatus};
use std::process::ExitCode;

pub(crate) fn run(args: &StatusArgs) -> Result<ExitCode, String> {
    let status = match ask(&args.daemon, &Ask::Status {})? {
        Answer::Status(status) => status,
        other => return Err(unexpected(&other)),
    };
    if args.json {
        print_json(&status)?;
    } else {
        say(&text(&status))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// All of it, for a terminal or a log.
pub(crate) fn text(status: &Status) -> String {
    let mut out = head(status);
    out += "\ndevices\n";
    out += &devices(status).text();
    out += &slowness(status);
    out += &left_unread(status);
    out += "\nshares\n";
    out += &shares(status).text();
    for trouble in status
        .shares
        .iter()
        .filter_map(|share| share.trouble.as_ref())
    {
        out += &format!("note: {trouble}\n");
    }
    let open = status.streams.iter().filter(|stream| stream.open).count();
    out += &format!(
        "\nseats: {} · streams: {open} open, {} in the ledger\n",
        status.seats.len(),
        status.streams.len()
    );
    out += &seats(status);
    out += &refusals(status);
    out += &format!("\nsessions: {}\n", status.sessions.len());
    if !status.sessions.is_empty() {
        out += &sessions(status).text();
    }
    out
}

/// A line for each seat, with its open streams below it, and then the streams of no seat, which are
/// closed.
fn seats(status: &Status) -> String {
    let of_seat = |seat: &SeatStatus| {
        let all = status.streams.iter();
        all.filter(|stream| stream.open && seat.streams.contains(&stream.stream))
            .cloned()
            .collect::<Vec<StreamStatus>>()
    };
    let groups: Vec<Vec<StreamStatus>> = status.seats.iter().map(of_seat).collect();
    let is_seated = |stream: &&StreamStatus| {
        let numbers = groups.iter().flatten().map(|seated| seated.stream);
        stream.open && numbers.into_iter().any(|number| number == stream.stream)
    };
    let others = status.streams.iter().filter(|stream| !is_seated(stream));
    let all: Vec<StreamStatus> = groups.iter().flatten().chain(others).cloned().collect();
    let table = streams(&all).text();
    let mut lines = table.lines();
    let mut out = String::new();
    let mut add = |line: &str| {
        out += line;
        out.push('\n');
    };
    let head = lines.next().unwrap_or_default();
    if !all.is_empty() {
        add(head);
    }
    for (seat, group) in status.seats.iter().zip(&groups) {
        add(&seat_line(seat));
        lines.by_ref().take(group.len()).for_each(&mut add);
    }
    let mut rest = lines.peekable();
    if rest.peek().is_some() {
        add("closed:");
    }
    rest.for_each(&mut add);
    out
}

/// Read-ahead in vain is told of from this part of a device's reads on: one in so many bytes.
const UNREAD_PART: u64 = 10;

/// "anna at 10.0.0.7 on media: plays · 100 Mb/s promised · 2 playheads"
fn seat_line(seat: &SeatStatus) -> String {
    let who = match (seat.user.as_str(), seat.client.as_str()) {
        ("", "") => format!("session {}", seat.session),
        (user, "") => String::from(user),
        ("", client) => String::from(client),
        (user, client) => format!("{user} at {client}"),
    };
    let share = match seat.share.as_str() {
        "" => String::new(),
        share => format!(" on {share}"),
    };
    let silent = show::uptime(seat.silent_ms as f64 / 1000.0);
    let mut parts = vec![match seat.state.as_str() {
        "plays" => String::from("plays"),
        state => format!("{state} for {silent}"),
    }];
    parts.push(match seat.promised_bytes_per_s {
        0 => String::from("nothing promised"),
        rate => format!("{} promised", show::bitrate(rate * 8)),
    });
    match seat.playheads.len() {
        0 => {}
        count => parts.push(show::count(count as u64, "playhead")),
    }
    if let Some(run) = seat.run_bytes {
        parts.push(format!("runs of {}", show::bytes(run)));
    }
    if seat.rehearsed_cuts > 0 {
        parts.push(format!(
            "as rehearsed: {} of {}",
            seat.foreseen_cuts,
            show::count(seat.rehearsed_cuts, "cut")
        ));
    }
    if seat.unread_bytes > 0 {
        parts.push(format!("{} left unread", show::bytes(seat.unread_bytes)));
    }
    for kept in &seat.kept {
        parts.push(format!(
            "keeps {} on {} for {} more",
            show::bitrate(kept.rate_bytes_per_s * 8),
            kept.device,
            show::uptime(kept.left_ms.div_ceil(1000) as f64)
        ));
    }
    show::one_line(&format!("  {who}{share}: {}", parts.join(" · ")))
}

/// Why open streams have no contract.
fn refusals(status: &Status) -> String {
    let mut out = String::new();
    for stream in status.streams.iter().filter(|stream| stream.open) {
        if let ("refused", Some(why)) = (stream.standing.as_str(), &stream.refusal) {
            out += &format!("stream {} has no contract: {why}\n", stream.stream);
        }
    }
    out
}

/// The devices that are slower than their model says.
fn slowness(status: &Status) -> String {
    let mut out = String::new();
    for device in &status.devices {
        if device.slowness_permille > 1000 {
            out += &format!(
                "{} takes {}.{} times as long as its model says{}\n",
                device.name,
                device.slowness_permille / 1000,
                device.slowness_permille % 1000 / 100,
                match device.foreign_permille {
                    0 => String::new(),
                    others => format!("; others take {} % of its time", others / 10),
                }
            );
        }
    }
    out
}

/// The devices of whose read-ahead much was in vain.
fn left_unread(status: &Status) -> String {
    let mut out = String::new();
    for device in &status.devices {
        let read = device.real_time_bytes + device.best_effort_bytes;
        if device.unread_bytes > read / UNREAD_PART {
            out += &format!(
                "{} was read ahead of clients that left {} unread\n",
                device.name,
                show::bytes(device.unread_bytes)
            );
        }
    }
    out
}

/// The daemon, its cache and its notes.
pub(crate) fn head(status: &Status) -> String {
    let daemon = &status.daemon;
    let cache = &status.cache;
    let mut out = format!(
        "rushes {} (pid {}) up {} · CPU {:.1} s · memory {} beside the cache\n",
        daemon.version,
        daemon.pid,
        show::uptime(daemon.uptime_s),
        daemon.cpu_s,
        show::bytes(daemon.rss_beside_cache_bytes),
    );
    out += &format!(
        "cache {} in {} buffers: {} free, {} held for streams, {} in clients' hands · {} hits, {} misses\n",
        show::bytes(cache.bytes),
        cache.buffer_count,
        cache.free_count,
        cache.held_count,
        cache.pinned_count,
        cache.hit_count,
        cache.miss_count,
    );
    let write = &status.write;
    if write.buffer_bytes > 0 {
        out += &format!(
            "write buffer {}: {} in use for {} · {}, {} left to their clients\n",
            show::bytes(write.buffer_bytes),
            show::bytes(write.used_bytes),
            show::count(write.dirty_file_count.into(), "file"),
            show::count(write.write_count, "write"),
            write.plain_count,
        );
    }
    let turn = &daemon.event_loop;
    out += &format!(
        "event loop ({}): turns of {} µs (median), {} (p99), {} (p99.9), {} (longest)\n",
        turn.priority, turn.lag_p50_us, turn.lag_p99_us, turn.lag_p999_us, turn.lag_max_us
    );
    for note in &daemon.notes {
        out += &format!("note: {note}\n");
    }
    if let Some(error) = &daemon.reload_error {
        out += &format!("the last reload failed: {error}\n");
    }
    out
}

fn devices(status: &Status) -> Table {
    let mut table = Table::new(&[
        "device",
        "model",
        ">position",
        ">rate",
        ">contracts",
        ">promised",
        ">read (contract)",
        ">read (other)",
        ">busy",
    ]);
    for device in &status.devices {
        table.row(vec![
            device.name.clone(),
            device.model_source.clone(),
            format!(
                "{:.1}..{:.1} ms",
                device.read_fixed_ms,
                device.read_fixed_ms + device.read_span_ms
            ),
            show::byte_rate(device.read_bytes_per_s),
            device.contract_count.to_string(),
            show::byte_rate(device.promised_bytes_per_s),
            show::bytes(device.real_time_bytes),
            show::bytes(device.best_effort_bytes),
            format!("{:.1} s", device.busy_s),
        ]);
    }
    table
}

fn shares(status: &Status) -> Table {
    let mut table = Table::new(&[
        "share",
        "folder",
        "file system",
        "mounted on",
        "device",
        "I/O",
        "writes by",
        "changes by others",
    ]);
    for share in &status.shares {
        if share.is_absent {
            let mut row = vec![share.name.clone(), share.path.clone()];
            row.resize(8, String::from("-"));
            table.row(row);
            continue;
        }
        table.row(vec![
            share.name.clone(),
            share.path.clone(),
            share.file_system.clone(),
            share.mounted_on.clone(),
            share.device.clone(),
            String::from(if share.direct_io {
                "direct"
            } else {
                "buffered"
            }),
            way_of(share),
            String::from(if share.foreign_changes_noticed {
                "noticed at once"
            } else {
                "noticed within a second"
            }),
        ]);
    }
    table
}

/// The way of writes; with the reason if it is not the good one.
fn way_of(share: &ShareStatus) -> String {
    match share.write_way.as_str() {
        "extents" => String::from("extents"),
        way => format!("{way} ({})", share.write_way_reason),
    }
}

/// The ledger.
pub(crate) fn streams(streams: &[StreamStatus]) -> Table {
    let mut table = Table::new(&[
        ">#",
        "standing",
        ">rate",
        "from",
        ">reads",
        ">due",
        ">late",
        ">promised late",
        ">worst",
        "guilty",
        ">ahead",
        "user",
        "file",
    ]);
    for stream in streams {
        table.row(vec![
            stream.stream.to_string(),
            standing(stream).to_string(),
            stream
                .rate_bytes_per_s
                .map_or_else(|| String::from("?"), |rate| show::bitrate(rate * 8)),
            stream.rate_source.clone().unwrap_or_default(),
            stream.read_count.to_string(),
            stream.due_count.to_string(),
            stream.late_count.to_string(),
            stream.promised_late_count.to_string(),
            if stream.late_count > 0 {
                format!("{:.0} ms", stream.worst_lateness_ms)
            } else {
                String::from("-")
            },
            guilty(&stream.guilty),
            format!("{:.0} ms", stream.ahead_ms),
            stream.user.clone(),
            file_of(stream, 48),
        ]);
    }
    table
}

/// The path, and the part of that file if it is not all of it.
pub(crate) fn file_of(stream: &StreamStatus, width: usize) -> String {
    let path = show::tail(&stream.path, width);
    match &stream.part {
        Some(part) => format!("{path} ({part})"),
        None => path,
    }
}

fn standing(stream: &StreamStatus) -> &str {
    match (stream.open, stream.standing.as_str()) {
        (false, _) => "closed",
        (true, "best_effort") => "best effort",
        (true, other) => other,
    }
}

/// "device 3, queue 1"
fn guilty(guilty: &GuiltyStatus) -> String {
    let mut stages = [
        (guilty.door, "door"),
        (guilty.open, "open"),
        (guilty.cache, "cache"),
        (guilty.queue, "queue"),
        (guilty.device, "device"),
    ];
    stages.sort_by_key(|(count, _)| std::cmp::Reverse(*count));
    let told: Vec<String> = stages
        .iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, name)| format!("{name} {count}"))
        .collect();
    if told.is_empty() {
        String::from("-")
    } else {
        told.join(", ")
    }
}

fn sessions(status: &Status) -> Table {
    let mut table = Table::new(&[">#", "door", "share", "user", "client", ">pid", ">files"]);
    for session in &status.sessions {
        table.row(vec![
            session.session.to_string(),
            session.door.clone(),
            session.share.clone(),
            session.user.clone(),
            session.client.clone(),
            session.pid.to_string(),
            session.handle_count.to_string(),
        ]);
    }
    table
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use rushes_control::{DeviceStatus, KeptStatus, PlayheadStatus, SessionStatus};

    /// A status with one of everything.
    pub(crate) fn sample() -> Status {
        let mut status = Status::default();
        status.daemon.version = String::from("0.1.0");
        status.daemon.pid = 42;
        status.daemon.uptime_s = 61.0;
        status.daemon.notes = vec![String::from("md0 was never measured")];
        status.cache.bytes = 1 << 30;
        status.cache.buffer_count = 1024;
        status.devices.push(DeviceStatus {
            name: String::from("md0"),
            model_source: String::from("calibrated"),
            read_fixed_ms: 6.0,
            read_span_ms: 17.0,
            read_bytes_per_s: 172_000_000,
            contract_count: 1,
            promised_bytes_per_s: 12_500_000,
            ..DeviceStatus::default()
        });
        status.shares.push(ShareStatus {
            name: String::from("media"),
            path: String::from("/srv/media"),
            file_system: String::from("ext4"),
            direct_io: true,
            write_way: String::from("extents"),
            write_way_reason: String::from("ext4 reserves blocks before bytes (fallocate)"),
            device: String::from("md0"),
            foreign_changes_noticed: true,
            mounted_on: String::from("/srv"),
            is_absent: false,
            trouble: None,
        });
        status.sessions.push(SessionStatus {
            session: 7,
            door: String::from("smb"),
            user: String::from("anna"),
            ..SessionStatus::default()
        });
        status.streams.push(StreamStatus {
            stream: 3,
            standing: String::from("contract"),
            rate_bytes_per_s: Some(12_500_000),
            rate_source: Some(String::from("header")),
            read_count: 500,
            due_count: 480,
            on_time_count: 478,
            late_count: 2,
            worst_lateness_ms: 12.4,
            guilty: GuiltyStatus {
                queue: 1,
                device: 1,
                ..GuiltyStatus::default()
            },
            ahead_ms: 1800.0,
            user: String::from("anna"),
            path: String::from("footage/take.mov"),
            open: true,
            ..StreamStatus::default()
        });
        status.streams.push(StreamStatus {
            stream: 4,
            standing: String::from("contract"),
            path: String::from("scans/reel.mxf"),
            part: Some(String::from("2/4")),
            open: true,
            ..StreamStatus::default()
        });
        status.streams.push(StreamStatus {
            stream: 2,
            standing: String::from("contract"),
            path: String::from("footage/former.mov"),
            ..StreamStatus::default()
        });
        let playhead = |stream| PlayheadStatus {
            stream,
            position_bytes: 250_000_000,
            standing: String::from("contract"),
        };
        status.seats.push(SeatStatus {
            session: 8,
            share: String::from("media"),
            user: String::from("bea"),
            client: String::from("10.0.0.8"),
            state: String::from("away"),
            promised_bytes_per_s: 12_500_000,
            silent_ms: 4_200,
            kept: vec![KeptStatus {
                device: String::from("md0"),
                rate_bytes_per_s: 12_500_000,
                path: String::from("footage/former.mov"),
                left_ms: 25_800,
            }],
            ..SeatStatus::default()
        });
        status.seats.push(SeatStatus {
            session: 7,
            share: String::from("media"),
            user: String::from("anna"),
            client: String::from("10.0.0.7"),
            state: String::from("plays"),
            promised_bytes_per_s: 12_500_000,
            run_bytes: Some(37 << 20),
            rehearsed_cuts: 14,
            foreseen_cuts: 12,
            unread_bytes: 120 << 20,
            playheads: vec![playhead(3), playhead(4)],
            streams: vec![3, 4],
            ..SeatStatus::default()
        });
        status
    }

    #[test]
    fn a_seat_is_a_line_with_its_files_below_it() {
        let text = text(&sample());
        let at = |part: &str| {
            let found = text.find(part);
            found.unwrap_or_else(|| panic!("{part:?} is missing in\n{text}"))
        };
        let order = [
            "seats: 2 · streams: 2 open, 3 in the ledger",
            "bea at 10.0.0.8 on media: away for 4 s · 100 Mb/s promised · keeps 100 Mb/s on md0 for 26 s more",
            "anna at 10.0.0.7 on media: plays · 100 Mb/s promised · 2 playheads · runs of 37.0 MiB · \
             as rehearsed: 12 of 14 cuts · 120.0 MiB left unread",
            "footage/take.mov",
            "scans/reel.mxf (2/4)",
            "closed:",
            "footage/former.mov",
        ];
        let places: Vec<usize> = order.iter().map(|part| at(part)).collect();
        assert!(places.is_sorted(), "{places:?} in\n{text}");
    }

    #[test]
    fn the_ledger_names_stream_rate_lateness_and_the_guilty() {
        let text = text(&sample());
        for expect in [
            "up 1 min 1 s",
            "note: md0 was never measured",
            "md0",
            "calibrated",
            "6.0..23.0 ms",
            "172.0 MB/s",
            "100 Mb/s",
            "header",
            "12 ms",
            "queue 1, device 1",
            "footage/take.mov",
            "scans/reel.mxf (2/4)",
            "streams: 2 open",
            "seats: 2",
            "direct",
        ] {
            assert!(text.contains(expect), "{expect:?} is missing in\n{text}");
        }
    }

    #[test]
    fn cuts_and_read_ahead_are_told_of_where_they_tell_something() {
        let mut status = sample();
        let (device, seat) = (&mut status.devices[0], &mut status.seats[1]);
        (device.real_time_bytes, device.unread_bytes) = (1 << 30, 64 << 20);
        (seat.rehearsed_cuts, seat.foreseen_cuts, seat.unread_bytes) = (0, 0, 0);
        let quiet = text(&status);
        for silent in ["rehearsed", "unread"] {
            assert!(!quiet.contains(silent), "{silent:?} is told in\n{quiet}");
        }
        status.devices[0].unread_bytes = 512 << 20;
        status.seats[1].rehearsed_cuts = 1;
        let told = text(&status);
        for expect in [
            "md0 was read ahead of clients that left 512.0 MiB unread\n",
            " · as rehearsed: 0 of 1 cut\n",
        ] {
            assert!(told.contains(expect), "{expect:?} is missing in\n{told}");
        }
    }

    #[test]
    fn reload_that_failed_is_told_until_one_succeeds() {
        let mut status = sample();
        assert!(!text(&status).contains("reload"));
        status.daemon.reload_error = Some(String::from("rule 3: bitrate 0"));
        let text = text(&status);
        assert!(
            text.contains("the last reload failed: rule 3: bitrate 0\n"),
            "{text}"
        );
    }

    #[test]
    fn nothing_connected_is_no_error() {
        assert!(text(&Status::default()).contains("sessions: 0"));
    }
}
