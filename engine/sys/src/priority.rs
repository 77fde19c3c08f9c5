// SPDX-License-Identifier: Apache-2.0
//! Asking the kernel to run a thread before others.

use std::io;

/// Run the calling thread in the round-robin real-time class at `level` (1 lowest to 99). Threads
/// it starts afterwards (io_uring's workers too) are ordinary again.
///
/// Errors   EPERM without CAP_SYS_NICE or RLIMIT_RTPRIO; in a cgroup v1 without real-time budget.
pub fn real_time(level: u8) -> io::Result<()> {
    let parameter = libc::sched_param {
        sched_priority: i32::from(level),
    };
    let policy = libc::SCHED_RR | libc::SCHED_RESET_ON_FORK;
    // SAFETY: pid 0 is the calling thread; the kernel only reads the parameter.
    if unsafe { libc::sched_setscheduler(0, policy, &raw const parameter) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Make the calling thread as nice as `nice` (-20 first to 19 last).
///
/// Errors   EACCES, EPERM without CAP_SYS_NICE or RLIMIT_NICE.
pub fn nice(nice: i32) -> io::Result<()> {
    // On Linux, "process" 0 is the calling thread (setpriority(2), "C library/kernel differences").
    rustix::process::setpriority_process(None, nice)?;
    Ok(())
}

/// Put the calling thread's I/O into class idle (ioprio_set(2)): it goes only when no other process
/// uses the disk. Only schedulers that know classes heed it: bfq, mq-deadline, kyber.
///
/// Errors   none in practice; EINVAL from a kernel without it.
pub fn idle_io() -> io::Result<()> {
    const CLASS_IDLE: libc::c_long = 3;
    io_class(CLASS_IDLE)
}

/// Give the calling thread's reads and writes ordinary priority again, after [`idle_io`].
///
/// Errors   as there
pub fn ordinary_io() -> io::Result<()> {
    const CLASS_NONE: libc::c_long = 0;
    io_class(CLASS_NONE)
}

fn io_class(class: libc::c_long) -> io::Result<()> {
    const WHO_PROCESS: libc::c_long = 1;
    const CLASS_SHIFT: u32 = 13;
    // SAFETY: "process" 0 is the calling thread; no memory is involved.
    let result = unsafe {
        libc::syscall(
            libc::SYS_ioprio_set,
            WHO_PROCESS,
            0 as libc::c_long,
            class << CLASS_SHIFT,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_reads_idly_and_then_as_others_do() {
        let class = || {
            // SAFETY: "process" 0 is the calling thread; no memory is involved.
            let found = unsafe { libc::syscall(libc::SYS_ioprio_get, 1, 0) };
            found >> 13
        };
        let seen = std::thread::spawn(move || {
            idle_io().unwrap();
            let idle = class();
            ordinary_io().unwrap();
            (idle, class())
        });
        let (idle, after) = seen.join().unwrap();
        assert_eq!(idle, 3);
        assert_ne!(after, 3);
    }

    #[test]
    fn a_thread_gets_it_or_is_told_why_not_and_others_stay_ordinary() {
        let policy = std::thread::spawn(|| {
            let asked = real_time(1);
            // SAFETY: pid 0 is the calling thread; no memory is involved.
            let policy = unsafe { libc::sched_getscheduler(0) } & !libc::SCHED_RESET_ON_FORK;
            let child = std::thread::spawn(|| {
                // SAFETY: as above.
                unsafe { libc::sched_getscheduler(0) }
            });
            assert_eq!(child.join().unwrap(), libc::SCHED_OTHER);
            match asked {
                Ok(()) => assert_eq!(policy, libc::SCHED_RR),
                Err(error) => assert!(error.raw_os_error().is_some(), "{error}"),
            }
            policy
        });
        policy.join().unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { libc::sched_getscheduler(0) }, libc::SCHED_OTHER);
    }
}
