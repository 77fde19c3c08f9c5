// SPDX-License-Identifier: Apache-2.0
//! A request that waits for a member waits in that member's line: a few threads for each, so that a
//! member which is slow, or hangs, keeps nobody from another one.
//!
//! The threads that take requests of the kernel are everybody's. Work that may wait for a disk is
//! done by one of them only while few are at that member; the rest is put in the member's line, as
//! is work that waits for a daemon that has bytes of it, or for a thread that changes the file.
//! Threads come when they are needed and go when they are not.

use crate::lock::locked;
use rushes_pool::MemberNumber;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Threads that take requests and are at one member's disk at most, and at all disks.
const WITHIN_MEMBER_MAX: usize = 8;
const WITHIN_ALL_MAX: usize = 48;
/// A thread that has nothing to do goes after this.
const LINGER: Duration = Duration::from_secs(5);

/// The thing that is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Line {
    /// A member's disk.
    Disk(MemberNumber),
    /// A daemon, for bytes of a member's objects that they have not.
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

/// All lines that somebody stands in.
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
    /// Something is to be done.
    came: Arc<Condvar>,
}

/// Threads that take requests, where they are.
#[derive(Default)]
struct Within {
    all: usize,
    members: HashMap<MemberNumber, usize>,
}

impl Lines {
    /// Done by one of the line's threads, when its turn has come.
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
            self.lacks_thread(line, &error);
        }
    }

    /// One that could not be started: others do its work, or the thread that was to be spared.
    fn lacks_thread(&self, line: Line, error: &std::io::Error) {
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

    /// Leave for a thread that takes requests to wait for a member's disk as long as this lives.
    /// None: enough of them do.
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
    /// Of its threads; the kernel keeps 15 bytes.
    fn name(self) -> String {
        match self {
            Line::Disk(member) => format!("disk-{}", member.0),
            Line::Daemon(member) => format!("facts-{}", member.0),
            Line::File(_) => String::from("file"),
        }
    }
}

/// One thread of a line, until nothing has come for a while.
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
