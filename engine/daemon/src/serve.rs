// SPDX-License-Identifier: Apache-2.0
//! Starts a daemon from a configuration, and stops it.

use crate::answers::tell_manager;
use crate::calibrate::Calibration;
use crate::config::{Config, ShareConfig, group_id};
use crate::desk::{Addresses, Desk};
use crate::error::{ServeError, is_root};
use crate::event_loop::{Daemon, Parts};
use crate::hung::take_or_end;
use crate::jobs::{calibration_for, work};
use crate::lanes::Lanes;
use crate::process;
use crate::recovery::ring_lock;
use crate::reserved;
use crate::runtime_dir::RuntimeDir;
use crate::share::Share;
use crate::signals::Signals;
use crate::worker::Workers;
use rushes_core::format::REPLY_SLOTS_MAX;
use rushes_core::server::Limits;
use rushes_shm::facts::{FactsTable, NoPlainChanges};
use rushes_shm::lane::lanes_in;
use rushes_shm::server::Listener;
use rushes_sys::limits::descriptor_count_max;
use rushes_sys::watch::ChangeWatch;
use rushes_sys::{
    Ring, RingLimits, Segment, SegmentHome, SegmentWarning, SysError, WRITE_PART_COUNT_MAX, clock,
    priority,
};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Cache of a daemon that only recovers. Units: bytes.
const RECOVER_CACHE_BYTES: u64 = 64 << 20;
/// A starting daemon waits at most so long for changes that doors began without a daemon. A door
/// may be stuck in one on a disk that does not answer.
const PLAIN_CHANGES_MAX: rushes_core::units::Duration = rushes_core::units::Duration::from_s(10);

/// Serve until SIGTERM, SIGINT or a request to stop. Runs on the calling thread, which it puts into
/// the real-time class if it may.
///
/// Errors   everything that keeps the daemon from starting, as a sentence with its remedy; Left: it
/// has stopped, and some data could not be written
pub fn serve(config: Config) -> Result<(), ServeError> {
    run(config, None)
}

/// Write the data that a daemon left, and end.
///
/// First kills a daemon that gives no answer for `patience`.
///
/// Errors   as [`serve`]; Running: a daemon is there, which does that itself; Left: some data could
/// not be written
pub fn recover(config: Config, patience: Duration) -> Result<(), ServeError> {
    run(config, Some(patience))
}

/// `hung_after`: Some: it only recovers, see [`recover`].
fn run(mut config: Config, hung_after: Option<Duration>) -> Result<(), ServeError> {
    let only_recovers = hung_after.is_some();
    if only_recovers {
        // No client reads through it or opens files, so it needs neither cache nor warm names.
        config.cache_bytes = RECOVER_CACHE_BYTES;
        config.buffer_bytes = 1 << 20;
        config.warm_metadata = false;
        config.write_buffer_bytes = config.write_buffer_bytes.max(RECOVER_CACHE_BYTES);
        config.metrics_listen = None;
    }
    process::raise_limits();
    // Otherwise the kernel would run out of memory, and might kill another program.
    let want = config.memory_bytes();
    if let Some(total) = crate::doctor::memory_too_small_for(want) {
        return Err(ServeError::Memory { want, total });
    }
    let runtime = match hung_after {
        None => RuntimeDir::take_to_serve(&config.runtime_dir)?,
        Some(patience) => take_or_end(&config.runtime_dir, patience)?,
    };
    if hung_after.is_none() {
        runtime.name_config(&config.file);
    }
    let (shares, absent) = open_shares(&config)?;

    let limits = limits(&config);
    let (segment, warnings) =
        Segment::create(SegmentHome::Anonymous, limits.slot_count, limits.slot_bytes)?;
    let locked = !warnings
        .iter()
        .any(|warning| matches!(warning, SegmentWarning::NotLocked(_)));
    let mut notes: Vec<String> = warnings.iter().map(|w| w.to_string()).collect();
    if !is_root() {
        notes.push(String::from(
            "the daemon runs as an ordinary user: it cannot open files of other users, lock its cache in memory or run before other programs; \
             expected root: start it with `sudo systemctl start rushes`",
        ));
    }
    let segment = Arc::new(segment);
    let workers = Workers::start(work).map_err(system("start the workers"))?;
    let signals = Signals::catch().map_err(system("catch signals"))?;
    let changes = ChangeWatch::new()
        .map_err(|error| {
            notes.push(format!(
                "changes by other programs are noticed within a second, by polling: fanotify: \
                 {error} (it needs CAP_SYS_ADMIN)"
            ));
        })
        .ok();
    let ring = Ring::new(segment.clone(), RingLimits::default())?;
    let desk = Desk::open(&Addresses {
        control: &runtime.control_socket(),
        control_group: config.control_group.as_deref().and_then(group_id),
        metrics: &runtime.metrics_socket(),
        metrics_tcp: config.metrics_listen,
    })?;
    // Held until doors find us: they could not report changes that they make before.
    let quiet = match config.write_buffer_bytes {
        0 => None,
        _ if only_recovers => None,
        _ => no_plain_changes(&runtime.lanes(), &mut notes),
    };
    let lanes = match config.write_buffer_bytes {
        // Also write the data of a daemon with another configuration.
        0 if is_any_left(&runtime.lanes())? || reserved::any_in(&runtime.lanes()) => {
            Some(Lanes::new(&runtime.lanes(), 0).map_err(ServeError::System)?)
        }
        0 => {
            // Remove the facts of a daemon that died while it cleared the last of them: doors would
            // read them.
            if let Some(facts) = FactsTable::find(&runtime.lanes()) {
                facts.remove(&runtime.lanes());
            }
            None
        }
        bytes => Some(Lanes::new(&runtime.lanes(), bytes).map_err(ServeError::System)?),
    };
    let ring_lock = match &lanes {
        Some(_) => Some(ring_lock(&runtime.lanes()).map_err(ServeError::System)?),
        None => None,
    };
    // Last, so that the threads made above stay ordinary.
    let priority = take_precedence(&mut notes);
    for note in &notes {
        tracing::warn!("{note}");
    }

    let mut daemon = Daemon::new(Parts {
        config,
        limits,
        segment,
        ring,
        desk,
        signals,
        workers,
        changes,
        priority,
        notes,
        locked,
        lanes,
        ring_lock,
        only_recovers,
    });
    for (share, calibration) in shares {
        daemon.add_share(share, calibration.map(|calibration| calibration.model()));
    }
    for (share, error) in absent {
        daemon.share_is_absent(share, &error);
    }
    daemon.recover()?;
    if !only_recovers {
        // Not before recovery: a door that waits too long does plain I/O.
        let socket = runtime.session_socket();
        let listener = Listener::bind(&socket).map_err(|source| ServeError::Listen {
            address: socket.display().to_string(),
            source,
        })?;
        daemon.listen(listener);
        runtime.say_started()?;
        tracing::info!("ready");
    }
    drop(quiet);
    tell_manager("READY=1");
    let ended = daemon.run();
    tell_manager("STOPPING=1");
    let ended = ended
        .map_err(ServeError::System)
        .and_then(|()| daemon.ended_clean());
    drop(daemon);
    drop(runtime);
    tracing::info!("stopped");
    ended
}

/// Whether the folder has lanes. A folder that cannot be read may be full of them.
fn is_any_left(lanes: &Path) -> Result<bool, ServeError> {
    match lanes_in(lanes) {
        Ok(left) => Ok(!left.is_empty()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(SysError::new("read", lanes.display().to_string(), error).into()),
    }
}

/// Wait until no door changes a file on its own descriptor. None: a door still does.
fn no_plain_changes(lanes: &Path, notes: &mut Vec<String>) -> Option<NoPlainChanges> {
    let start = clock::now();
    let found = std::fs::create_dir_all(lanes)
        .and_then(|()| NoPlainChanges::wait(lanes, PLAIN_CHANGES_MAX));
    let waited_ms = clock::now().since(start).ms();
    if waited_ms > 100 {
        tracing::warn!("waited {waited_ms} ms for writes that doors had begun without a daemon");
    }
    // A lack of room is reported by the next caller that needs it.
    if let Err(error) = &found
        && error.kind() != std::io::ErrorKind::StorageFull
    {
        notes.push(format!(
            "a change that a door began without a daemon has not ended in {} s, perhaps because a \
             disk does not answer; serving without waiting for it. If another client writes to the \
             same file now, one of the two writes may be lost ({error})",
            PLAIN_CHANGES_MAX.ms() / 1000
        ));
    }
    found.ok()
}

/// The bounds as the configuration sets them.
fn limits(config: &Config) -> Limits {
    let slot_bytes = config.buffer_bytes;
    let slot_count = config.cache_bytes / u64::from(slot_bytes);
    let default = Limits::default();
    // A written file takes more than one descriptor; each turn checks the sum.
    let files = descriptor_count_max() / 2;
    // A read that starts in the middle of a buffer needs one more.
    let replies = (REPLY_SLOTS_MAX as u64 - 1) * u64::from(slot_bytes);
    Limits {
        slot_count: u32::try_from(slot_count).unwrap_or(u32::MAX),
        slot_bytes,
        file_count_max: u32::try_from(files).unwrap_or(u32::MAX),
        read_bytes_max: default.read_bytes_max.min(replies),
        write_buffer_bytes: config.write_buffer_bytes,
        write_part_count_max: WRITE_PART_COUNT_MAX as u32,
        // Half at most: no session may take a small cache from all others.
        session_pin_bytes_max: default.session_pin_bytes_max.min(config.cache_bytes / 2),
        ..default
    }
}

/// Raise the thread's priority as far as the kernel lets us. Returns the granted one in words.
fn take_precedence(notes: &mut Vec<String>) -> String {
    let Err(refused) = priority::real_time(1) else {
        return String::from("real time");
    };
    const NICE: i32 = -15;
    if priority::nice(NICE).is_ok() {
        return format!("nice {NICE}");
    }
    notes.push(format!(
        "the event loop runs with ordinary priority and may be late when the machine is busy: \
         {refused} (it needs CAP_SYS_NICE or LimitRTPRIO=1)"
    ));
    String::from("ordinary")
}

fn system(operation: &'static str) -> impl FnOnce(std::io::Error) -> ServeError {
    move |source| ServeError::System(SysError::new(operation, "", source))
}

/// Shares with the calibrations of their devices.
type Opened = Vec<(Share, Option<Calibration>)>;
type Absent = Vec<(ShareConfig, ServeError)>;

/// The shares that are there, and the others with their errors: a disk that may never come back
/// must not delay the shares on other disks, nor the data that a former daemon left for those.
///
/// Errors   none is there
fn open_shares(config: &Config) -> Result<(Opened, Absent), ServeError> {
    let (mut opened, mut absent) = (Vec::new(), Vec::new());
    for share in &config.shares {
        match Share::open(share) {
            Ok(found) => {
                let calibration = calibration_for(&config.state_dir, &found);
                opened.push((found, calibration));
            }
            Err(error) => absent.push((share.clone(), error)),
        }
    }
    if opened.is_empty() && !absent.is_empty() {
        return Err(absent.swap_remove(0).1);
    }
    Ok((opened, absent))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_read_always_fits_one_reply() {
        for buffer in ["64KiB", "256KiB", "1MiB"] {
            let text = format!(
                "[cache]\nbytes = \"100MB\"\nbuffer_bytes = \"{buffer}\"\n[[share]]\nname = \"m\"\npath = \"/m\"\n"
            );
            let config = Config::parse(Path::new("x"), &text, |_| true).unwrap();
            let limits = limits(&config);
            let spanned = limits.read_bytes_max.div_ceil(u64::from(limits.slot_bytes)) + 1;
            assert!(spanned <= REPLY_SLOTS_MAX as u64, "{limits:?}");
            let cache = u64::from(limits.slot_count) * u64::from(limits.slot_bytes);
            assert!(cache <= config.cache_bytes && cache + (1 << 20) > config.cache_bytes);
        }
    }
}
