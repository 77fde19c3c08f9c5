// SPDX-License-Identifier: Apache-2.0
//! The loop's answers to people: status, admission, reload, stop.

use crate::config::{Config, ConfigError};
use crate::desk::Guess;
use crate::event_loop::Daemon;
use crate::jobs::{Job, Reloaded};
use crate::share::ServedShare;
use crate::worker::Urgency;
use rushes_control::*;
use rushes_core::format;
use rushes_core::server::*;
use rushes_core::units::*;
use rushes_sys::{clock, notify};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::SyncSender;

/// How often a bitrate that does not fit at all is halved to find one that fits.
const LOWER_HALVES: u32 = 12;

impl Daemon {
    /// The answer, or None if `asker` gets it later.
    pub(super) fn answer(&mut self, ask: Ask, asker: &SyncSender<Answer>) -> Option<Answer> {
        match ask {
            Ask::Status {} => {
                self.desk.tell_guesses(self.guesses());
                Some(Answer::Status(Box::new(self.status())))
            }
            Ask::Admit {
                bitrate,
                count,
                path,
            } => Some(self.admit(bitrate, count, path.as_deref())),
            Ask::Reload {} => {
                self.reload_askers.push(asker.clone());
                self.start_reload();
                None
            }
            Ask::Stop {} => {
                tracing::info!("stop requested");
                self.stopping = true;
                Some(Answer::Done {
                    notes: vec![String::from("the daemon stops")],
                })
            }
        }
    }

    fn admit(&self, bitrate: u64, count: u32, path: Option<&str>) -> Answer {
        let devices = match path {
            None => {
                let there = self.shares.iter().filter(|served| !served.is_nowhere);
                let mut devices: Vec<DeviceId> = there.map(|served| served.device).collect();
                devices.sort();
                devices.dedup();
                devices
            }
            Some(path) => match self.share_above(path) {
                Some(served) if served.is_nowhere => {
                    let why = served
                        .trouble
                        .as_deref()
                        .unwrap_or("its share's folder cannot be opened");
                    let error = format!("{path} is not served now: {why}");
                    return Answer::Error { error };
                }
                Some(served) => vec![served.device],
                None => {
                    return Answer::Error {
                        error: format!(
                            "{path} is in no share; expected a path below one of: {}",
                            self.share_paths()
                        ),
                    };
                }
            },
        };
        let rate = BytesPerSecond::from_bits(bitrate);
        let now = clock::now();
        let verdicts: Vec<DeviceVerdict> = devices
            .into_iter()
            .map(|device| {
                let verdict = self.server.could_admit(now, device, rate, count);
                let known = self.devices.get(device);
                let shares = self.shares.iter();
                let shares = shares.filter(|one| one.device == device && !one.is_nowhere);
                DeviceVerdict {
                    device: self.device_name(device),
                    shares: shares.map(|one| one.share.config.name.clone()).collect(),
                    admitted: verdict.admitted,
                    reason: verdict.reason,
                    more_count: verdict.more_count,
                    left_bytes_per_s: verdict.left.0,
                    lower: match (verdict.admitted, verdict.more_count) {
                        (false, 0) => self.lower_rate(now, device, bitrate),
                        _ => None,
                    },
                    guessed_model: known.is_some_and(|known| known.source.is_guess()),
                }
            })
            .collect();
        Answer::Admit(Admission {
            admitted: !verdicts.is_empty() && verdicts.iter().all(|verdict| verdict.admitted),
            bitrate,
            count,
            devices: verdicts,
        })
    }

    /// The highest halving of a bitrate of which a stream fits, where none of that bitrate does.
    fn lower_rate(&self, now: Instant, device: DeviceId, bitrate: u64) -> Option<LowerRate> {
        let halves = (1..=LOWER_HALVES).map(|halves| bitrate >> halves);
        halves.filter(|&bitrate| bitrate > 0).find_map(|bitrate| {
            let rate = BytesPerSecond::from_bits(bitrate);
            let verdict = self.server.could_admit(now, device, rate, 1);
            let count = match verdict.admitted {
                true => verdict.more_count.saturating_add(1),
                false => return None,
            };
            Some(LowerRate {
                bitrate,
                count,
                bytes_per_s: rate.0.saturating_mul(u64::from(count)),
            })
        })
    }

    /// By name alone: asking the file system could make the loop wait.
    fn share_above(&self, path: &str) -> Option<&Arc<ServedShare>> {
        let is_above = |served: &&Arc<ServedShare>| {
            let root: &Path = &served.share.config.path;
            Path::new(path).starts_with(root) || Path::new(path).starts_with(&served.share.real)
        };
        let mut all = self.shares.iter().filter(is_above);
        let there = all.clone().find(|served| !served.is_nowhere);
        there.or_else(|| all.next())
    }

    fn share_paths(&self) -> String {
        let paths: Vec<String> = self
            .shares
            .iter()
            .map(|served| served.share.config.path.display().to_string())
            .collect();
        paths.join(", ")
    }

    pub(super) fn device_name(&self, device: DeviceId) -> String {
        self.devices.get(device).map_or_else(
            || format!("device {}", device.0),
            |known| known.name.clone(),
        )
    }

    fn status(&self) -> Status {
        let now = clock::now();
        Status {
            status_version: STATUS_VERSION,
            daemon: self.daemon_status(now),
            cache: self.cache_status(),
            write: self.write_status(),
            shares: self.share_status(),
            devices: self.device_status(),
            sessions: self.session_status(),
            seats: self
                .server
                .seats(now)
                .into_iter()
                .map(|record| self.seat_status(record))
                .collect(),
            streams: self
                .server
                .streams(now)
                .into_iter()
                .map(|record| self.stream_status(record))
                .collect(),
        }
    }

    fn daemon_status(&self, now: Instant) -> DaemonStatus {
        let policy = &self.config.policy;
        let mut notes = self.notes.clone();
        let mut unwritten = self.kept_sentences();
        unwritten.extend(self.failing_sentences());
        notes.extend(unwritten.iter().cloned());
        if self.server.writes().unclaimed_count > 0 {
            notes.push(self.unclaimed_sentence());
        }
        notes.extend(self.notes_of_left());
        if self.ring.facts().real_time_refused {
            notes.push(String::from(
                "the kernel refused real-time I/O priority (CAP_SYS_NICE or CAP_SYS_ADMIN is missing): \
                 reads under contract go as best effort",
            ));
        }
        DaemonStatus {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_string(),
            protocol_version: format::VERSION,
            uptime_s: now.since(self.started).0 as f64 / 1e9,
            config: self.config.file.display().to_string(),
            runtime_dir: self.config.runtime_dir.display().to_string(),
            event_loop: LoopStatus {
                turn_count: self.lag.turn_count(),
                lag_p50_us: self.lag.quantile_us(0.5),
                lag_p99_us: self.lag.quantile_us(0.99),
                lag_p999_us: self.lag.quantile_us(0.999),
                lag_max_us: self.lag.max_us(),
                priority: self.priority.clone(),
                worker_queue_count: self.workers.queue_count() as u64,
            },
            policy: PolicyStatus {
                preroll_ms: policy.preroll.ms(),
                pause_ms: policy.pause.ms(),
                margin_permille: policy.margin_permille,
                analyser: policy.analyser,
                contracts_from_cadence: policy.contracts_from_cadence,
                contracts_from_header: policy.contracts_from_header,
                coalesce: policy.coalesce,
                rehearsal: policy.rehearsal,
                rule_count: self.config.rules.len() as u32,
            },
            notes,
            unwritten,
            refused_session_count: self.counts.refused,
            expelled_session_count: self.counts.expelled,
            plain_open_count: self.counts.plain,
            reload_error: self.reload_error.clone(),
            // The desk fills in memory and CPU time.
            ..DaemonStatus::default()
        }
    }

    fn cache_status(&self) -> CacheStatus {
        let cache = self.server.cache();
        let buffer_bytes = u64::from(self.limits.slot_bytes);
        CacheStatus {
            bytes: u64::from(self.limits.slot_count) * buffer_bytes,
            buffer_bytes,
            buffer_count: cache.slot_count,
            free_count: cache.free_count,
            held_count: cache.held_count,
            pinned_count: cache.pinned_count,
            hit_count: cache.hit_count,
            miss_count: cache.miss_count,
            locked: self.locked,
        }
    }

    fn write_status(&self) -> WriteStatus {
        let writes = self.server.writes();
        // Bytes of a former daemon whose file has not been found are not on a disk either.
        let (_, kept_bytes, kept_files) = self.kept_sums();
        WriteStatus {
            buffer_bytes: self
                .lanes
                .as_ref()
                .map_or(0, |_| self.limits.write_buffer_bytes),
            used_bytes: writes.used_bytes.0 + kept_bytes,
            age_ms: self.config.policy.write_age.ms(),
            dirty_file_count: writes.dirty_file_count + kept_files as u32,
            waiting_count: writes.waiting_count,
            write_count: writes.write_count,
            plain_count: writes.plain_count + self.counts.ungranted,
        }
    }

    fn share_status(&self) -> Vec<ShareStatus> {
        let absent = self.moves.absent().map(|(config, why)| ShareStatus {
            name: config.name.clone(),
            path: config.path.display().to_string(),
            is_absent: true,
            trouble: Some(why.to_owned()),
            ..ShareStatus::default()
        });
        self.shares
            .iter()
            .map(|served| {
                let (way, reason) = served.share.way(self.config.write_buffer_bytes);
                ShareStatus {
                    name: served.share.config.name.clone(),
                    path: served.share.config.path.display().to_string(),
                    file_system: served.share.file_system.clone(),
                    direct_io: served.share.direct_io,
                    write_way: way.name().to_string(),
                    write_way_reason: reason,
                    device: self.device_name(served.device),
                    foreign_changes_noticed: self.changes.is_some()
                        && !served.share.unwatchable.load(Ordering::Relaxed),
                    mounted_on: served.share.mount_point.display().to_string(),
                    is_absent: served.is_nowhere,
                    trouble: served.trouble.clone(),
                }
            })
            .chain(absent)
            .collect()
    }

    /// True: a share on the device is served, it has contracts, or a former mount of it is still in
    /// use. False for a disk that only was below a mount point once.
    fn is_in_use(&self, record: &DeviceRecord) -> bool {
        let mut shares = self.shares.iter();
        shares.any(|served| served.device == record.device && !served.is_nowhere)
            || record.contract_count > 0
            || self.is_left_on(&self.device_name(record.device))
    }

    /// Devices of shares whose model is a guess. A device that a share lies on only while the
    /// share's own file system is away need not be measured.
    fn guesses(&self) -> Vec<Guess> {
        let mut guesses: Vec<Guess> = Vec::new();
        let shares = self.shares.iter();
        for served in shares.filter(|served| served.trouble.is_none()) {
            let Some(known) = self.devices.get(served.device) else {
                continue;
            };
            let is_told = guesses.iter().any(|guess| guess.device == known.name);
            if known.source.is_guess() && !is_told {
                guesses.push(Guess {
                    device: known.name.clone(),
                    path: served.share.config.path.clone(),
                    identity: served.share.identity.clone(),
                    state_dir: self.config.state_dir.clone(),
                });
            }
        }
        guesses
    }

    fn device_status(&self) -> Vec<DeviceStatus> {
        let ms = |span: Duration| span.0 as f64 / 1e6;
        self.server
            .devices()
            .into_iter()
            .filter(|record| self.is_in_use(record))
            .map(|record| DeviceStatus {
                name: self.device_name(record.device),
                device: record.device.0,
                model_source: self
                    .devices
                    .get(record.device)
                    .map_or_else(String::new, |known| known.source.text().to_string()),
                read_fixed_ms: ms(record.model.read.fixed),
                read_span_ms: ms(record.model.read.span),
                read_bytes_per_s: record.model.read.rate.0,
                size_bytes: record.model.size.0,
                contract_count: record.contract_count,
                promised_bytes_per_s: record.promised.0,
                real_time_request_count: record.request_count[0],
                best_effort_request_count: record.request_count[1],
                real_time_bytes: record.bytes[0].0,
                best_effort_bytes: record.bytes[1].0,
                write_request_count: record.write_count,
                written_bytes: record.written.0,
                write_bridged_bytes: record.write_bridged.0,
                read_bridged_bytes: record.read_bridged.0,
                unread_bytes: record.unread.0,
                batch_count: record.batch_count,
                flush_count: record.flush_count,
                busy_s: record.busy.0 as f64 / 1e9,
                slowness_permille: record.slowness_permille,
                foreign_permille: record.foreign_permille,
            })
            .collect()
    }

    fn session_status(&self) -> Vec<SessionStatus> {
        let mut sessions: Vec<SessionStatus> = self
            .sessions
            .doors
            .iter()
            .map(|(id, door)| SessionStatus {
                session: id.0,
                door: door.door_name().to_string(),
                pid: door.session.peer().pid,
                share: door.share.share.config.name.clone(),
                user: door.user.clone(),
                client: door.client.clone(),
                handle_count: door.handles.len() as u32,
            })
            .collect();
        sessions.sort_by_key(|session| session.session);
        sessions
    }

    fn seat_status(&self, record: SeatRecord) -> SeatStatus {
        let playheads = record.playheads.into_iter().map(|one| PlayheadStatus {
            stream: one.stream,
            position_bytes: one.position.0,
            standing: String::from(standing_name(one.standing)),
        });
        let kept = record.kept.into_iter().map(|one| KeptStatus {
            device: self.device_name(one.device),
            rate_bytes_per_s: one.rate.0,
            path: one.path,
            left_ms: one.left.ms(),
        });
        SeatStatus {
            session: record.session.0,
            share: record.label.share,
            user: record.label.user,
            client: record.label.client,
            state: String::from(match record.state {
                SeatState::Plays => "plays",
                SeatState::Paused => "paused",
                SeatState::Away => "away",
            }),
            promised_bytes_per_s: record.promised.0,
            silent_ms: record.silent.ms(),
            run_bytes: record.run.map(|run| run.0),
            rehearsed_cuts: record.rehearsed_cuts,
            foreseen_cuts: record.foreseen_cuts,
            unread_bytes: record.unread.0,
            playheads: playheads.collect(),
            kept: kept.collect(),
            streams: record.streams,
        }
    }

    fn stream_status(&self, record: StreamRecord) -> StreamStatus {
        let ms = |span: Duration| span.0 as f64 / 1e6;
        StreamStatus {
            stream: record.number,
            session: record.session.0,
            share: record.label.share,
            user: record.label.user,
            client: record.label.client,
            path: record.path,
            part: (!record.part.is_whole()).then(|| record.part.to_string()),
            sequence: record.sequence,
            device: record
                .devices
                .iter()
                .map(|device| self.device_name(*device))
                .collect::<Vec<_>>()
                .join(", "),
            standing: String::from(standing_name(record.standing)),
            rate_bytes_per_s: record.rate.map(|(rate, _)| rate.0),
            rate_source: record.rate.map(|(_, source)| {
                String::from(match source {
                    RateSource::Rule => "rule",
                    RateSource::Header => "header",
                    RateSource::Cadence => "cadence",
                })
            }),
            refusal: record.refusal.map(|refusal| refusal.sentence()),
            read_count: record.reads.read_count,
            due_count: record.reads.due_count,
            on_time_count: record.reads.on_time_count(),
            late_count: record.reads.late_count,
            promised_count: record.reads.promised_count,
            promised_late_count: record.reads.promised_late_count,
            worst_lateness_ms: ms(record.reads.worst_lateness),
            guilty: GuiltyStatus {
                door: record.reads.guilty[Stage::Door as usize],
                open: record.reads.guilty[Stage::Open as usize],
                cache: record.reads.guilty[Stage::Cache as usize],
                queue: record.reads.guilty[Stage::Queue as usize],
                device: record.reads.guilty[Stage::Device as usize],
            },
            bytes: record.reads.bytes.0,
            hit_count: record.reads.hit_count,
            ahead_ms: ms(record.ahead),
            open: record.open,
        }
    }

    // ---- Reload ----

    pub(super) fn start_reload(&mut self) {
        if self.reloading {
            // One is under way; its askers and those that come meanwhile get its result.
            return;
        }
        self.reloading = true;
        let since = clock::now().0 / 1000;
        tell_manager(&format!("RELOADING=1\nMONOTONIC_USEC={since}"));
        let job = Job::Reload {
            file: self.config.file.clone(),
            known: self
                .shares
                .iter()
                .map(|served| served.share.clone())
                .collect(),
        };
        if self.workers.push(Urgency::Now, job).is_err() {
            self.end_reload(Err(String::from(
                "all worker threads are busy, perhaps because a share hangs; the old configuration \
                 stays in force; retry the reload in a moment",
            )));
        }
    }

    pub(super) fn reloaded(&mut self, result: Result<Box<Reloaded>, ConfigError>) {
        let outcome = match result {
            Ok(reloaded) => Ok(self.apply(*reloaded)),
            Err(error) => Err(format!(
                "the new configuration is invalid, so the old one stays in force:\n{error}"
            )),
        };
        self.end_reload(outcome);
    }

    fn end_reload(&mut self, outcome: Result<Vec<String>, String>) {
        self.reloading = false;
        tell_manager("READY=1");
        let answer = match outcome {
            Ok(notes) => {
                self.reload_error = None;
                for note in &notes {
                    tracing::info!("reload: {note}");
                }
                Answer::Done { notes }
            }
            Err(error) => {
                tracing::error!("reload: {error}");
                self.reload_error = Some(error.clone());
                Answer::Error { error }
            }
        };
        for asker in self.reload_askers.drain(..) {
            let _ = asker.try_send(answer.clone());
        }
    }

    /// Apply the settings that can change while the daemon runs; name those that cannot.
    fn apply(&mut self, reloaded: Reloaded) -> Vec<String> {
        let Reloaded {
            mut config,
            shares,
            measured,
        } = reloaded;
        let mut notes = keep_fixed(&self.config, &mut config);
        let policy_changed = config.policy != self.config.policy;
        // Before the new shares, which are served as the new file says.
        let config = Arc::new(config);
        self.config = config.clone();
        self.moves_only_of(&config);
        for (share, opened) in shares {
            match opened {
                Ok(opened) => {
                    let now = self.share_is_at(*opened);
                    notes.push(format!(
                        "share {:?} is served from now on from {} ({})",
                        now.config.name,
                        now.mount_point.display(),
                        now.file_system
                    ));
                }
                Err(error) => {
                    self.looked(share, Err(error));
                }
            }
        }
        notes.extend(self.devices_measured(measured));
        self.look_for_kept_soon();
        notes.extend(self.moves.absent().map(|(_, why)| why.to_owned()));
        let troubles = self
            .shares
            .iter()
            .filter_map(|served| served.trouble.clone());
        notes.extend(troubles);
        for served in &self.shares {
            let old = &served.share.config;
            match config.share(&old.name) {
                None => notes.push(format!(
                    "share {:?} is no longer configured; it is served until the daemon is restarted",
                    old.name
                )),
                Some(new) if new.path != old.path => notes.push(format!(
                    "the folder of share {:?} stays {} until the daemon is restarted",
                    old.name,
                    old.path.display()
                )),
                Some(new) if new.exclusive != old.exclusive => notes.push(format!(
                    "share {:?} stays exclusive = {} until the daemon is restarted",
                    old.name, old.exclusive
                )),
                Some(_) => {}
            }
        }
        if policy_changed {
            notes.push(String::from("the policy changed"));
            self.feed(Event::PolicyChanged(config.policy.clone()));
        }
        notes.push(match config.rules.len() {
            1 => String::from("1 rule is in force"),
            count => format!("{count} rules are in force"),
        });
        notes
    }
}

/// Restore the old values of settings that cannot change while the daemon runs, and say so.
fn keep_fixed(old: &Config, new: &mut Config) -> Vec<String> {
    let mut notes = Vec::new();
    let mut fixed = |key: &str, same: bool, kept: String| {
        if !same {
            notes.push(format!("{key} stays {kept} until the daemon is restarted"));
        }
    };
    fixed(
        "cache.bytes",
        old.cache_bytes == new.cache_bytes,
        crate::config::amount::show_size(old.cache_bytes),
    );
    fixed(
        "cache.buffer_bytes",
        old.buffer_bytes == new.buffer_bytes,
        crate::config::amount::show_size(u64::from(old.buffer_bytes)),
    );
    fixed(
        "write.buffer_bytes",
        old.write_buffer_bytes == new.write_buffer_bytes,
        crate::config::amount::show_size(old.write_buffer_bytes),
    );
    let show = |path: &PathBuf| path.display().to_string();
    fixed(
        "server.runtime_dir",
        old.runtime_dir == new.runtime_dir,
        show(&old.runtime_dir),
    );
    fixed(
        "server.control_group",
        old.control_group == new.control_group,
        format!("{:?}", old.control_group.as_deref().unwrap_or("none")),
    );
    fixed(
        "server.metrics_listen",
        old.metrics_listen == new.metrics_listen,
        old.metrics_listen
            .map_or_else(|| String::from("none"), |address| address.to_string()),
    );
    new.cache_bytes = old.cache_bytes;
    new.write_buffer_bytes = old.write_buffer_bytes;
    new.buffer_bytes = old.buffer_bytes;
    new.runtime_dir.clone_from(&old.runtime_dir);
    new.control_group.clone_from(&old.control_group);
    new.metrics_listen = old.metrics_listen;
    notes
}

/// Notify systemd, if it started us. The daemon serves on if that fails.
pub(crate) fn tell_manager(state: &str) {
    if let Err(error) = notify::notify(state) {
        tracing::warn!("cannot notify the service manager of {state:?}: {error}");
    }
}

fn standing_name(standing: Standing) -> &'static str {
    match standing {
        Standing::Contract => "contract",
        Standing::Refused => "refused",
        Standing::BestEffort => "best_effort",
    }
}
