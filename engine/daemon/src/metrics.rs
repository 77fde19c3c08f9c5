// SPDX-License-Identifier: Apache-2.0
//! The status as Prometheus metrics.
//!
//! No label holds a path, a share, a user or a client: these are confidential, and labels without a
//! bound would overload the database. docs/guide/metrics.md has the rule and every label.

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};
use rushes_control::Status;
use std::collections::{HashMap, HashSet};
use std::fmt;

/// Sums over all streams and seats there ever were.
///
/// The ledger forgets streams that closed long ago, and a seat goes with its connection; a counter
/// must not go back when they do. So each status adds the increase of every stream and seat.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    seen: HashMap<u32, Sums>,
    sums: Sums,
    seen_cuts: HashMap<u32, Cuts>,
    cuts: Cuts,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    read: u64,
    due: u64,
    on_time: u64,
    late: [u64; 5],
    late_all: u64,
    promised: u64,
    promised_late: u64,
    bytes: u64,
}

/// Cuts of a seat, or of all.
#[derive(Clone, Copy, Debug, Default)]
struct Cuts {
    rehearsed: u64,
    foreseen: u64,
}

impl Totals {
    /// Add the increase since the last status.
    pub(crate) fn add(&mut self, status: &Status) {
        let mut seen = HashMap::with_capacity(status.streams.len());
        for stream in &status.streams {
            let now = Sums {
                read: stream.read_count,
                due: stream.due_count,
                on_time: stream.on_time_count,
                late: [
                    stream.guilty.door,
                    stream.guilty.open,
                    stream.guilty.cache,
                    stream.guilty.queue,
                    stream.guilty.device,
                ],
                late_all: stream.late_count,
                promised: stream.promised_count,
                promised_late: stream.promised_late_count,
                bytes: stream.bytes,
            };
            // No two streams of a daemon have the same number. If figures fell all the same, these
            // counters would have to go back, which no counter may.
            let before = match self.seen.get(&stream.stream) {
                Some(before) if before.read <= now.read && before.bytes <= now.bytes => *before,
                _ => Sums::default(),
            };
            self.sums.grow(&before, &now);
            seen.insert(stream.stream, now);
        }
        self.seen = seen;
        self.add_cuts(status);
    }

    fn add_cuts(&mut self, status: &Status) {
        // A seat without an open file or a contract is not in the status, and its counts go on
        // afterwards: they are known until its connection ends.
        let sessions = status.sessions.iter().map(|session| session.session);
        let seated = status.seats.iter().map(|seat| seat.session);
        let connected: HashSet<u32> = sessions.chain(seated).collect();
        self.seen_cuts
            .retain(|number, _| connected.contains(number));
        // The seats of a pool's door are of one session, and have no cuts.
        for seat in status.seats.iter().filter(|seat| seat.rehearsed_cuts > 0) {
            let now = Cuts {
                rehearsed: seat.rehearsed_cuts,
                foreseen: seat.foreseen_cuts,
            };
            let seen = self.seen_cuts.insert(seat.session, now);
            let before = seen
                .filter(|seen| seen.rehearsed <= now.rehearsed && seen.foreseen <= now.foreseen)
                .unwrap_or_default();
            self.cuts.rehearsed += now.rehearsed - before.rehearsed;
            self.cuts.foreseen += now.foreseen - before.foreseen;
        }
    }
}

impl Sums {
    fn grow(&mut self, before: &Sums, now: &Sums) {
        self.read += now.read.saturating_sub(before.read);
        self.due += now.due.saturating_sub(before.due);
        self.on_time += now.on_time.saturating_sub(before.on_time);
        self.late_all += now.late_all.saturating_sub(before.late_all);
        self.promised += now.promised.saturating_sub(before.promised);
        self.promised_late += now.promised_late.saturating_sub(before.promised_late);
        self.bytes += now.bytes.saturating_sub(before.bytes);
        for (sum, (before, now)) in self.late.iter_mut().zip(before.late.iter().zip(&now.late)) {
            *sum += now.saturating_sub(*before);
        }
    }
}

/// All metrics as text.
pub(crate) fn text(status: &Status, totals: &Totals) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("rushes");
    registry.register_collector(Box::new(Snapshot {
        status: status.clone(),
        sums: totals.sums,
        cuts: totals.cuts,
    }));
    let mut out = String::new();
    encode(&mut out, &registry)?;
    Ok(out)
}

#[derive(Debug)]
struct Snapshot {
    status: Status,
    sums: Sums,
    cuts: Cuts,
}

/// Values of one metric, each with its labels.
type Rows<'a, T> = Vec<(Vec<(&'static str, &'a str)>, T)>;

fn gauges(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    rows: Rows<'_, f64>,
) -> fmt::Result {
    let mut family = encoder.encode_descriptor(
        name,
        help,
        unit,
        prometheus_client::metrics::MetricType::Gauge,
    )?;
    for (labels, value) in rows {
        let value = ConstGauge::new(value);
        if labels.is_empty() {
            return value.encode(family);
        }
        value.encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}

fn counters(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    rows: Rows<'_, f64>,
) -> fmt::Result {
    let mut family = encoder.encode_descriptor(
        name,
        help,
        unit,
        prometheus_client::metrics::MetricType::Counter,
    )?;
    for (labels, value) in rows {
        let value = ConstCounter::new(value);
        if labels.is_empty() {
            return value.encode(family);
        }
        value.encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}

fn one<'a>(value: f64) -> Rows<'a, f64> {
    vec![(Vec::new(), value)]
}

fn by<'a>(label: &'static str, values: &[(&'a str, f64)]) -> Rows<'a, f64> {
    values
        .iter()
        .map(|(name, value)| (vec![(label, *name)], *value))
        .collect()
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.streams(&mut encoder)?;
        self.cache(&mut encoder)?;
        self.devices(&mut encoder)?;
        self.daemon(&mut encoder)
    }
}

impl Snapshot {
    fn streams(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let standing = |name: &str| {
            let open = self.status.streams.iter().filter(|stream| stream.open);
            open.filter(|stream| stream.standing == name).count() as f64
        };
        gauges(
            encoder,
            "streams",
            "Open streams by standing",
            None,
            by(
                "standing",
                &[
                    ("contract", standing("contract")),
                    ("refused", standing("refused")),
                    ("best_effort", standing("best_effort")),
                ],
            ),
        )?;
        let sums = &self.sums;
        counters(
            encoder,
            "stream_reads",
            "Reads of streams answered",
            None,
            one(sums.read as f64),
        )?;
        counters(
            encoder,
            "stream_reads_due",
            "Reads that were due by the player's clock, with or without a contract",
            None,
            one(sums.due as f64),
        )?;
        counters(
            encoder,
            "stream_reads_on_time",
            "Of those, reads answered in time",
            None,
            one(sums.on_time as f64),
        )?;
        counters(
            encoder,
            "stream_reads_late",
            "Of those, reads answered late, by guilty stage",
            None,
            by(
                "stage",
                &[
                    ("door", sums.late[0] as f64),
                    ("open", sums.late[1] as f64),
                    ("cache", sums.late[2] as f64),
                    ("queue", sums.late[3] as f64),
                    ("device", sums.late[4] as f64),
                ],
            ),
        )?;
        counters(
            encoder,
            "stream_reads_promised",
            "Reads under a contract",
            None,
            one(sums.promised as f64),
        )?;
        counters(
            encoder,
            "stream_reads_promised_late",
            "Reads under a contract answered later than was promised",
            None,
            one(sums.promised_late as f64),
        )?;
        counters(
            encoder,
            "stream_read",
            "Bytes of streams answered",
            Some(&Unit::Bytes),
            one(sums.bytes as f64),
        )?;
        counters(
            encoder,
            "seat_cuts_rehearsed",
            "Cuts out of runs that the user had played before",
            None,
            one(self.cuts.rehearsed as f64),
        )?;
        counters(
            encoder,
            "seat_cuts_foreseen",
            "Of those, cuts to where the user had cut last time",
            None,
            one(self.cuts.foreseen as f64),
        )?;
        gauges(
            encoder,
            "sessions",
            "Connected doors",
            None,
            one(self.status.sessions.len() as f64),
        )
    }

    fn cache(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let cache = &self.status.cache;
        gauges(
            encoder,
            "cache",
            "Size of the cache segment",
            Some(&Unit::Bytes),
            one(cache.bytes as f64),
        )?;
        gauges(
            encoder,
            "cache_buffers",
            "Buffers by state",
            None,
            by(
                "state",
                &[
                    ("free", f64::from(cache.free_count)),
                    ("held", f64::from(cache.held_count)),
                    ("pinned", f64::from(cache.pinned_count)),
                    ("all", f64::from(cache.buffer_count)),
                ],
            ),
        )?;
        counters(
            encoder,
            "cache_reads",
            "Reads by whether the cache had the bytes",
            None,
            by(
                "result",
                &[
                    ("hit", cache.hit_count as f64),
                    ("miss", cache.miss_count as f64),
                ],
            ),
        )
    }

    fn devices(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let devices = &self.status.devices;
        let each = |value: &dyn Fn(&rushes_control::DeviceStatus) -> f64| -> Rows<'_, f64> {
            devices
                .iter()
                .map(|device| (vec![("device", device.name.as_str())], value(device)))
                .collect()
        };
        let by_class = |real_time: &dyn Fn(&rushes_control::DeviceStatus) -> f64,
                        best_effort: &dyn Fn(&rushes_control::DeviceStatus) -> f64|
         -> Rows<'_, f64> {
            let mut rows: Rows<'_, f64> = Vec::new();
            for device in devices {
                for (class, value) in [
                    ("real_time", real_time(device)),
                    ("best_effort", best_effort(device)),
                ] {
                    rows.push((
                        vec![("device", device.name.as_str()), ("class", class)],
                        value,
                    ));
                }
            }
            rows
        };
        gauges(
            encoder,
            "device_contracts",
            "Streams under contract on a device",
            None,
            each(&|device| f64::from(device.contract_count)),
        )?;
        gauges(
            encoder,
            "device_promised_bytes_per_second",
            "Bandwidth of all contracts on a device together",
            None,
            each(&|device| device.promised_bytes_per_s as f64),
        )?;
        counters(
            encoder,
            "device_busy",
            "Time with a request in service",
            Some(&Unit::Seconds),
            each(&|device| device.busy_s),
        )?;
        counters(
            encoder,
            "device_requests",
            "Requests sent to a device by class",
            None,
            by_class(&|device| device.real_time_request_count as f64, &|device| {
                device.best_effort_request_count as f64
            }),
        )?;
        counters(
            encoder,
            "device_read",
            "Bytes read from a device by class",
            Some(&Unit::Bytes),
            by_class(&|device| device.real_time_bytes as f64, &|device| {
                device.best_effort_bytes as f64
            }),
        )?;
        counters(
            encoder,
            "device_unread",
            "Bytes fetched ahead of readers that these have left unread",
            Some(&Unit::Bytes),
            each(&|device| device.unread_bytes as f64),
        )?;
        self.coalescing(encoder, each)
    }

    fn coalescing<'a>(
        &'a self,
        encoder: &mut DescriptorEncoder<'_>,
        each: impl Fn(&dyn Fn(&rushes_control::DeviceStatus) -> f64) -> Rows<'a, f64>,
    ) -> fmt::Result {
        counters(
            encoder,
            "device_write_requests",
            "Requests that wrote to a device",
            None,
            each(&|device| device.write_request_count as f64),
        )?;
        counters(
            encoder,
            "device_written",
            "Bytes written to a device",
            Some(&Unit::Bytes),
            each(&|device| device.written_bytes as f64),
        )?;
        counters(
            encoder,
            "device_batches",
            "Turns in which a device was sent one request, or several at once",
            None,
            each(&|device| device.batch_count as f64),
        )?;
        counters(
            encoder,
            "device_flushes",
            "Flushes of a device's cache before a read",
            None,
            each(&|device| device.flush_count as f64),
        )?;
        let mut bridged: Rows<'_, f64> = Vec::new();
        for device in &self.status.devices {
            for (direction, bytes) in [
                ("read", device.read_bridged_bytes),
                ("write", device.write_bridged_bytes),
            ] {
                let labels = vec![("device", device.name.as_str()), ("direction", direction)];
                bridged.push((labels, bytes as f64));
            }
        }
        counters(
            encoder,
            "device_bridged",
            "Bytes of gaps that were read or written because another request would have cost more",
            Some(&Unit::Bytes),
            bridged,
        )
    }

    fn daemon(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let daemon = &self.status.daemon;
        let turn = &daemon.event_loop;
        let us = |us: u64| us as f64 / 1e6;
        gauges(
            encoder,
            "loop_lag",
            "Length of the event loop's turns since the start",
            Some(&Unit::Seconds),
            by(
                "quantile",
                &[
                    ("0.5", us(turn.lag_p50_us)),
                    ("0.99", us(turn.lag_p99_us)),
                    ("0.999", us(turn.lag_p999_us)),
                    ("1", us(turn.lag_max_us)),
                ],
            ),
        )?;
        gauges(
            encoder,
            "memory_beside_cache",
            "Resident memory without the cache segment",
            Some(&Unit::Bytes),
            one(daemon.rss_beside_cache_bytes as f64),
        )?;
        counters(
            encoder,
            "cpu",
            "CPU time used",
            Some(&Unit::Seconds),
            one(daemon.cpu_s),
        )?;
        counters(
            encoder,
            "sessions_refused",
            "Sessions that were refused",
            None,
            one(daemon.refused_session_count as f64),
        )?;
        counters(
            encoder,
            "sessions_expelled",
            "Sessions closed for breaking the protocol",
            None,
            one(daemon.expelled_session_count as f64),
        )?;
        counters(
            encoder,
            "opens_plain",
            "Files that a door named and the daemon does not serve",
            None,
            one(daemon.plain_open_count as f64),
        )?;
        gauges(
            encoder,
            "write_used",
            "Granted to clients, or acknowledged and not on a disk yet",
            Some(&Unit::Bytes),
            one(self.status.write.used_bytes as f64),
        )?;
        gauges(
            encoder,
            "write_obstacles",
            "Number of reasons why acknowledged bytes cannot be written now",
            None,
            one(daemon.unwritten.len() as f64),
        )?;
        gauges(
            encoder,
            "uptime",
            "Time since the daemon was ready",
            Some(&Unit::Seconds),
            one(daemon.uptime_s),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rushes_control::{DeviceStatus, SeatStatus, SessionStatus, StreamStatus};

    fn stream(number: u32, read_count: u64, late: u64) -> StreamStatus {
        StreamStatus {
            stream: number,
            standing: String::from("contract"),
            user: String::from("anna"),
            client: String::from("10.0.0.1"),
            path: String::from("secret/take.mov"),
            read_count,
            due_count: read_count,
            on_time_count: read_count - late,
            late_count: late,
            bytes: read_count * 100,
            guilty: rushes_control::GuiltyStatus {
                queue: late,
                ..Default::default()
            },
            open: true,
            ..StreamStatus::default()
        }
    }

    #[test]
    fn cuts_of_seats_that_come_and_go_count_once() {
        let seat = |session, rehearsed_cuts, foreseen_cuts| SeatStatus {
            session,
            rehearsed_cuts,
            foreseen_cuts,
            user: String::from("anna"),
            ..SeatStatus::default()
        };
        let connected = |session| SessionStatus {
            session,
            ..SessionStatus::default()
        };
        let mut totals = Totals::default();
        let mut look = |sessions: Vec<SessionStatus>, seats: Vec<SeatStatus>| {
            let status = Status {
                sessions,
                seats,
                ..Status::default()
            };
            totals.add(&status);
            text(&status, &totals).unwrap()
        };
        let both = || vec![connected(1), connected(2)];
        look(both(), vec![seat(1, 10, 8), seat(2, 3, 0)]);
        // The first has nothing open for a while.
        look(both(), vec![seat(2, 3, 0)]);
        look(both(), vec![seat(1, 12, 9), seat(2, 3, 0)]);
        // It leaves, and another one gets its number.
        look(vec![connected(2)], vec![seat(2, 4, 1)]);
        let text = look(both(), vec![seat(1, 1, 1), seat(2, 4, 1)]);
        for line in [
            "rushes_seat_cuts_rehearsed_total 17.0",
            "rushes_seat_cuts_foreseen_total 11.0",
        ] {
            assert!(text.contains(line), "{line:?} is missing in\n{text}");
        }
        assert!(!text.contains("anna"), "a user is told in\n{text}");
    }

    #[test]
    fn counters_never_go_back_and_nobody_is_named() {
        let mut totals = Totals::default();
        let mut status = Status::default();
        status.devices.push(DeviceStatus {
            name: String::from("md0"),
            busy_s: 1.5,
            write_request_count: 3,
            written_bytes: 70_000,
            write_bridged_bytes: 4096,
            batch_count: 2,
            unread_bytes: 5000,
            ..DeviceStatus::default()
        });
        status.streams = vec![stream(1, 10, 0), stream(2, 5, 1)];
        totals.add(&status);
        totals.add(&status);
        assert_eq!((totals.sums.read, totals.sums.late_all), (15, 1));
        // One is forgotten, and a new stream gets the number of the other.
        status.streams = vec![stream(2, 3, 2)];
        totals.add(&status);
        assert_eq!((totals.sums.read, totals.sums.late_all), (18, 3));

        let text = text(&status, &totals).unwrap();
        for line in [
            "rushes_streams{standing=\"contract\"} 1.0",
            "rushes_stream_reads_total 18.0",
            "rushes_stream_reads_late_total{stage=\"queue\"} 3.0",
            "rushes_stream_read_bytes_total 1800.0",
            "rushes_device_busy_seconds_total{device=\"md0\"} 1.5",
            "rushes_device_requests_total{device=\"md0\",class=\"real_time\"} 0.0",
            "rushes_device_write_requests_total{device=\"md0\"} 3.0",
            "rushes_device_written_bytes_total{device=\"md0\"} 70000.0",
            "rushes_device_batches_total{device=\"md0\"} 2.0",
            "rushes_device_unread_bytes_total{device=\"md0\"} 5000.0",
            "rushes_device_bridged_bytes_total{device=\"md0\",direction=\"write\"} 4096.0",
            "rushes_device_bridged_bytes_total{device=\"md0\",direction=\"read\"} 0.0",
            "# EOF",
        ] {
            assert!(text.contains(line), "{line:?} is missing in\n{text}");
        }
        for secret in ["anna", "10.0.0.1", "take.mov"] {
            assert!(!text.contains(secret), "{secret} is told in\n{text}");
        }
    }
}
