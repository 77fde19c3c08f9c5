// SPDX-License-Identifier: Apache-2.0
//! A request that waits for a member waits in that member's line: a few threads for each, so that a
//! member that is slow, or hangs, delays no request to another one.
//!
//! All requests share the threads that take them from the kernel. Such a thread itself waits for a
//! disk only while few threads are at that member; otherwise the work goes into the member's line.
//! So does work that waits for a daemon that has bytes of the member, or for a thread that changes
//! the file. Threads start when they are needed and end when they are not.

use crate::lock::locked;
use rushes_pool::MemberNumber;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Threads that take requests and wait for one member's disk at most, and for all disks.
const WITHIN_MEMBER_MAX: usize = 8;
const WITHIN_ALL_MAX: usize = 48;
/// An idle thread ends after this.
const LINGER: Duration = Duration::from_secs(5);

/// The thing that a line waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Line {
    /// A member's disk.
    Disk(MemberNumber),
    /// A daemon that has bytes of a member's objects that the disk lacks.
    Daemon(MemberNumber),
    /// The thread that changes the file of this node.
    File(u64),
}

impl Line {
    /// Threads at most.
    fn thread_count_max(self) -> usize {
        match self {
            Line::Disk(_) => 16,
            Line::Daemon(_) => 8,
            Line::File(_) => 1,
        }
    }
}

type Work = Box<dyn FnOnce() + Send>;

/// All lines in which work waits.
#[derive(Default)]
pub(crate) struct Lines {
    all: Arc<Mutex<HashMap<Line, Waiting>>>,
    within: Mutex<Within>,
}

/// One line.
#[derive(Default)]
struct Waiting {
    works: VecDeque<Work>,
    thread_count: usize,
    idle_count: usize,
    /// Work has come.
    came: Arc<Condvar>,
}

/// Where threads that take requests wait.
#[derive(Default)]
struct Within {
    all: usize,
    members: HashMap<MemberNumber, usize>,
}

impl Lines {
    /// Queues work for one of the line's threads.
    pub(crate) fn put(&self, line: Line, work: impl FnOnce() + Send + 'static) {
        let mut all = locked(&self.all);
        let waiting = all.entry(line).or_default();
        waiting.works.push_back(Box::new(work));
        if waiting.works.len() <= waiting.idle_count {
            waiting.came.notify_one();
            return;
        }
        if waiting.thread_count == line.thread_count_max() {
            return;
        }
        waiting.thread_count += 1;
        drop(all);
        let lines = Arc::clone(&self.all);
        let started = std::thread::Builder::new()
            .name(line.name())
            .spawn(move || walk(&lines, line));
        if let Err(error) = started {
            self.go_without_thread(line, &error);
        }
    }

    /// A thread did not start: the line's other threads do its work, or else this one does.
    fn go_without_thread(&self, line: Line, error: &std::io::Error) {
        let mut all = locked(&self.all);
        let Some(waiting) = all.get_mut(&line) else {
            return;
        };
        waiting.thread_count -= 1;
        let left = match waiting.thread_count {
            0 => all.remove(&line).map(|waiting| waiting.works),
            _ => None,
        };
        drop(all);
        tracing::warn!(
            "cannot start a thread for requests that wait for a member ({error}); other requests \
             may wait behind them"
        );
        left.into_iter().flatten().for_each(|work| work());
    }

    /// Lets a thread that takes requests wait for a member's disk as long as this lives. None:
    /// enough of them wait.
    pub(crate) fn enter(&self, member: MemberNumber) -> Option<Inside<'_>> {
        let mut within = locked(&self.within);
        if within.all == WITHIN_ALL_MAX {
            return None;
        }
        let count = within.members.entry(member).or_default();
        if *count == WITHIN_MEMBER_MAX {
            return None;
        }
        *count += 1;
        within.all += 1;
        Some(Inside {
            lines: self,
            member,
        })
    }
}

impl Line {
    /// The name of its threads; the kernel keeps 15 bytes.
    fn name(self) -> String {
        match self {
            Line::Disk(member) => format!("disk-{}", member.0),
            Line::Daemon(member) => format!("facts-{}", member.0),
            Line::File(_) => String::from("file"),
        }
    }
}

/// One thread of a line; it ends when no work has come for a while.
fn walk(lines: &Mutex<HashMap<Line, Waiting>>, line: Line) {
    let mut all = locked(lines);
    loop {
        let Some(waiting) = all.get_mut(&line) else {
            return;
        };
        if let Some(work) = waiting.works.pop_front() {
            drop(all);
            work();
            all = locked(lines);
            continue;
        }
        waiting.idle_count += 1;
        let came = Arc::clone(&waiting.came);
        let (again, waited) = came
            .wait_timeout(all, LINGER)
            .unwrap_or_else(PoisonError::into_inner);
        all = again;
        let Some(waiting) = all.get_mut(&line) else {
            return;
        };
        waiting.idle_count -= 1;
        if waited.timed_out() && waiting.works.is_empty() {
            waiting.thread_count -= 1;
            if waiting.thread_count == 0 {
                all.remove(&line);
            }
            return;
        }
    }
}

/// See [`Lines::enter`].
pub(crate) struct Inside<'a> {
    lines: &'a Lines,
    member: MemberNumber,
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        let mut within = locked(&self.lines.within);
        within.all -= 1;
        if let Some(count) = within.members.get_mut(&self.member) {
            *count -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn who_waits_in_one_line_keeps_nobody_from_another() {
        let lines = Lines::default();
        let (hung, other) = (MemberNumber(1), MemberNumber(2));
        let (go, gate) = channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        let (done, ended) = channel();
        for number in 0..100 {
            let (gate, done) = (Arc::clone(&gate), done.clone());
            lines.put(Line::Disk(hung), move || {
                let _ = locked(&gate).recv();
                let _ = done.send(number);
            });
        }
        let (came, is_there) = channel();
        for line in [Line::Disk(other), Line::Daemon(hung), Line::File(7)] {
            let came = came.clone();
            lines.put(line, move || {
                let _ = came.send(line);
            });
        }
        for _ in 0..3 {
            is_there.recv_timeout(PATIENCE).expect("at once");
        }
        assert_eq!(locked(&lines.all)[&Line::Disk(hung)].thread_count, 16);
        assert!(ended.try_recv().is_err(), "it hangs");
        drop(go);
        let mut all: Vec<i32> = (0..100)
            .map(|_| ended.recv_timeout(PATIENCE).expect("each is done"))
            .collect();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..100), "each once");
    }

    #[test]
    fn few_that_take_requests_are_at_one_disk() {
        let lines = Lines::default();
        let all: Vec<_> = (0..20).map(|_| lines.enter(MemberNumber(1))).collect();
        assert_eq!(all.iter().flatten().count(), WITHIN_MEMBER_MAX);
        assert!(lines.enter(MemberNumber(2)).is_some());
        drop(all);
        assert!(lines.enter(MemberNumber(1)).is_some());
        let all: Vec<_> = (0..100).map(|one| lines.enter(MemberNumber(one))).collect();
        assert_eq!(all.iter().flatten().count(), WITHIN_ALL_MAX);
    }
}
