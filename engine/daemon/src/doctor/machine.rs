// SPDX-License-Identifier: Apache-2.0
//! Kernel, memory, limits, clock.

use super::{Finding, Level};
use crate::config::{Config, amount};
use crate::process::kib;
use rushes_sys::watch::ChangeWatch;
use rushes_sys::{Ring, RingLimits, Segment, SegmentHome};
use rustix::process::{Resource, geteuid, getrlimit};
use std::sync::Arc;

const AREA: &str = "machine";
/// Memory that should be left beside the cache.
const SPARE_BYTES: u64 = 512 << 20;
/// A smaller cache holds a few streams only.
const CACHE_BYTES_MIN: u64 = 64 << 20;
/// Each session takes four descriptors, each open file one.
const DESCRIPTOR_COUNT_MIN: u64 = 8192;

pub(super) fn examine(config: Option<&Config>, findings: &mut Vec<Finding>) {
    if !geteuid().is_root() {
        findings.push(Finding::of(
            Level::Warning,
            AREA,
            "this user is not root: devices, shares' folders, the daemon's folder and its rights \
             are not checked",
            "run `sudo rushes check`",
        ));
    }
    findings.push(io_uring());
    // An ordinary user lacks rights that the daemon has.
    if geteuid().is_root() {
        findings.push(fanotify());
    }
    if let Some(config) = config {
        memory(config, findings);
    }
    descriptors(findings);
    clock(findings);
}

fn io_uring() -> Finding {
    let ring = Segment::create(SegmentHome::Memfd, 1, 4096)
        .and_then(|(segment, _)| Ring::new(Arc::new(segment), RingLimits::default()));
    match ring {
        Ok(ring) if ring.facts().buffers_registered => Finding::ok(AREA, "io_uring is there"),
        Ok(_) => Finding::of(
            Level::Note,
            AREA,
            "io_uring is there, but buffers cannot be registered: reads cost a little more CPU",
            "raise LimitMEMLOCK of the service to infinity",
        ),
        Err(error) => Finding::of(
            Level::Error,
            AREA,
            error.to_string(),
            no_ring_remedy(&error.source),
        ),
    }
}

fn no_ring_remedy(error: &std::io::Error) -> &'static str {
    use rustix::io::Errno;
    match Errno::from_io_error(error) {
        Some(Errno::NOMEM) => {
            "this process may lock too little memory: run it with `ulimit -l unlimited`, the daemon with LimitMEMLOCK=infinity"
        }
        Some(Errno::MFILE | Errno::NFILE) => {
            "too many files are open: end programs that hold many, or raise `ulimit -n` and fs.file-max"
        }
        _ => {
            "Linux 5.11 or later with io_uring: set kernel.io_uring_disabled = 0 (sysctl), and allow it in \
             containers"
        }
    }
}

fn fanotify() -> Finding {
    match ChangeWatch::new() {
        Ok(_) => Finding::ok(
            AREA,
            "changes by other programs are noticed at once (fanotify)",
        ),
        Err(error) => Finding::of(
            Level::Note,
            AREA,
            format!(
                "fanotify is not available ({error}): changes by other programs are noticed within \
                 a second, by polling"
            ),
            "run the daemon with CAP_SYS_ADMIN, if other programs write to shares",
        ),
    }
}

/// The machine's memory when `want` bytes of cache and write buffer do not fit it.
pub(crate) fn memory_too_small_for(want: u64) -> Option<u64> {
    let total = kib(&meminfo(), "MemTotal:");
    does_not_fit(want, total).then_some(total)
}

fn does_not_fit(want: u64, total: u64) -> bool {
    total > 0 && want.saturating_add(SPARE_BYTES) > total
}

fn meminfo() -> String {
    std::fs::read_to_string("/proc/meminfo").unwrap_or_default()
}

fn memory(config: &Config, findings: &mut Vec<Finding>) {
    let want = config.memory_bytes();
    let text = meminfo();
    let total = kib(&text, "MemTotal:");
    let available = kib(&text, "MemAvailable:");
    let running = config.runtime_dir.join("control.sock").exists();
    if does_not_fit(want, total) {
        findings.push(Finding::of(
            Level::Error,
            AREA,
            format!(
                "cache.bytes and write.buffer_bytes are {} together, the machine has {} in all",
                amount::show_size(want),
                mib(total)
            ),
            too_large_remedy(total),
        ));
    } else if available > 0 && want > available && !running {
        findings.push(Finding::of(
            Level::Warning,
            AREA,
            format!(
                "cache.bytes and write.buffer_bytes are {} together, only {} are available now",
                amount::show_size(want),
                mib(available)
            ),
            "stop what uses the memory, or set them lower",
        ));
    } else {
        findings.push(Finding::ok(
            AREA,
            format!(
                "memory suffices for cache and write buffer, {}",
                amount::show_size(want)
            ),
        ));
    }
}

fn too_large_remedy(total: u64) -> String {
    let most = total.saturating_sub(SPARE_BYTES) / 2;
    match most >= CACHE_BYTES_MIN {
        true => format!("set them to at most {} together", mib(most)),
        false => format!(
            "this machine has too little memory: Rushes needs {} beside cache and write buffer, \
             and a cache of {} or more",
            mib(SPARE_BYTES),
            mib(CACHE_BYTES_MIN)
        ),
    }
}

fn mib(bytes: u64) -> String {
    format!("{}MiB", bytes >> 20)
}

fn descriptors(findings: &mut Vec<Finding>) {
    let limit = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    if limit < DESCRIPTOR_COUNT_MIN {
        findings.push(Finding::of(
            Level::Warning,
            AREA,
            format!("at most {limit} files can be open; each session takes four and each file one"),
            "set LimitNOFILE=65536 in the service (packaging/rushes.service does)",
        ));
    }
}

fn clock(findings: &mut Vec<Finding>) {
    let path = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    let Ok(source) = std::fs::read_to_string(path) else {
        return;
    };
    let source = source.trim();
    if matches!(source, "hpet" | "acpi_pm" | "jiffies" | "refined-jiffies") {
        findings.push(Finding::of(
            Level::Warning,
            AREA,
            format!("the kernel's clock is {source}: reading it is a slow call, deadlines are kept less well"),
            "make the firmware's TSC usable (kernel parameter tsc=reliable, or a newer firmware)",
        ));
    } else {
        findings.push(Finding::ok(AREA, format!("the clock is {source}")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_cache_larger_than_the_machine_is_an_error() {
        let text = "[cache]\nbytes = \"1TiB\"\n[[share]]\nname = \"m\"\npath = \"/m\"\n";
        let config = Config::parse(Path::new("x"), text, |_| true).unwrap();
        let mut findings = Vec::new();
        memory(&config, &mut findings);
        assert_eq!(findings[0].level, Level::Error, "{findings:?}");
        assert!(findings[0].finding.contains("cache.bytes"), "{findings:?}");
        let remedy = findings[0].remedy.as_ref().unwrap();
        assert!(remedy.contains("at most") || remedy.contains("too little memory"));
        assert_eq!(
            too_large_remedy(16 << 30),
            "set them to at most 7936MiB together"
        );
        assert!(!too_large_remedy(400 << 20).contains("0MiB together"));
    }

    #[test]
    fn remedy_of_a_ring_that_cannot_be_made_is_of_its_error() {
        let told = |errno: rustix::io::Errno| no_ring_remedy(&errno.into());
        assert!(told(rustix::io::Errno::NOMEM).contains("LimitMEMLOCK"));
        assert!(told(rustix::io::Errno::MFILE).contains("ulimit -n"));
        assert!(told(rustix::io::Errno::NOSYS).starts_with("Linux 5.11"));
    }
}
