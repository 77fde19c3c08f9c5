// SPDX-License-Identifier: Apache-2.0
//! The daemon's own figures, and the limits that it raises for itself.

use rushes_control::DaemonStatus;
use rustix::time::{ClockId, clock_gettime};

/// Fill in the figures of the process itself. Reads /proc, so the loop must not call it.
pub(crate) fn fill(daemon: &mut DaemonStatus, cache_bytes: u64) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let rss = kib(&status, "VmRSS:");
    daemon.rss_bytes = rss;
    daemon.rss_beside_cache_bytes = rss - kib(&status, "RssShmem:").min(cache_bytes).min(rss);
    let cpu = clock_gettime(ClockId::ProcessCPUTime);
    daemon.cpu_s = cpu.tv_sec as f64 + cpu.tv_nsec as f64 / 1e9;
}

/// `VmRSS:     1234 kB` of a file in /proc as bytes; 0 when it is not there.
pub(crate) fn kib(status: &str, name: &str) -> u64 {
    status
        .lines()
        .find_map(|line| {
            line.strip_prefix(name)?
                .trim()
                .strip_suffix(" kB")?
                .parse()
                .ok()
        })
        .map_or(0, |kib: u64| kib * 1024)
}

/// Every session and every file takes descriptors; and the length of a file is for its client and
/// its file system to limit, not for the daemon.
pub(crate) fn raise_limits() {
    if let Err(error) = rushes_sys::limits::raise_descriptor_limit() {
        tracing::warn!("cannot raise the limit of open files: {error}");
    }
    if let Err(error) = rushes_sys::limits::lift_file_size_limit() {
        tracing::warn!(
            "cannot raise the limit of file sizes (ulimit -f; LimitFSIZE= of the service): \
             {error}; clients' files cannot be longer than this limit"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_counted_without_the_cache() {
        assert_eq!(kib("Name:\tx\nVmRSS:\t    12 kB\n", "VmRSS:"), 12 * 1024);
        assert_eq!(kib("", "VmRSS:"), 0);
        let mut daemon = DaemonStatus::default();
        fill(&mut daemon, 1 << 30);
        assert!(daemon.rss_bytes > 0 && daemon.cpu_s > 0.0);
        assert!(daemon.rss_beside_cache_bytes <= daemon.rss_bytes);
    }
}
