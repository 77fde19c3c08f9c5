// SPDX-License-Identifier: Apache-2.0
//! A daemon that is killed again and again while clients work, and what their requests had to wait.
//!
//! The longest request is measured and printed, not judged: it also waits for its turn. A daemon
//! that dies before anybody has had anything of it leaves requests waiting for the next one: those
//! over several kills are measured by themselves.

use crate::daemon::Daemon;
use crate::pattern;
use crate::random::Random;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The state that all clients share.
#[derive(Debug, Default)]
pub struct Stage {
    done: AtomicBool,
    /// How often the daemon was killed so far.
    kills: AtomicU64,
    /// The slowest of all requests in whose time it was killed once at most; and of the others.
    slowest: Mutex<[Slow; 2]>,
}

/// A request that took long.
#[derive(Clone, Debug, Default)]
struct Slow {
    taken: Duration,
    /// Kills in its time.
    kills: u64,
    what: String,
}

/// When a request was begun.
#[derive(Clone, Copy, Debug)]
pub struct Begun {
    at: Instant,
    kills: u64,
}

impl Stage {
    /// Clients are to go on.
    pub fn goes_on(&self) -> bool {
        !self.done.load(Ordering::Relaxed)
    }

    /// Clients are to end.
    pub fn end(&self) {
        self.done.store(true, Ordering::Relaxed);
    }

    /// A request begins.
    pub fn begin(&self) -> Begun {
        Begun {
            at: Instant::now(),
            kills: self.kills.load(Ordering::Relaxed),
        }
    }

    /// A request has ended.
    pub fn took(&self, begun: Begun, whose: &str, what: &str) {
        let taken = begun.at.elapsed();
        let kills = self.kills.load(Ordering::Relaxed) - begun.kills;
        let mut slowest = self.slowest.lock().expect("nobody panics with it");
        let slow = &mut slowest[usize::from(kills > 1)];
        if taken <= slow.taken {
            return;
        }
        if taken > Duration::from_secs(1) {
            println!(
                "{whose}: {what} took {} ms, {kills} kills",
                taken.as_millis()
            );
        }
        *slow = Slow {
            taken,
            kills,
            what: format!("{whose}: {what}"),
        };
    }

    /// One line of what was done and what took longest, as bench/figures.py reads it.
    pub fn summary(&self, clients: usize, steps: u64) -> String {
        let [one, several] = self.slowest.lock().expect("nobody panics with it").clone();
        format!(
            "{clients} clients, {steps} steps, {} kills, longest request {} ms ({}); {} ms ({}) over {} kills",
            self.kills.load(Ordering::Relaxed),
            one.taken.as_millis(),
            one.what,
            several.taken.as_millis(),
            several.what,
            several.kills,
        )
    }
}

/// Writes over parts of stripes of its own and reads them, while others have the stripes beside.
#[derive(Debug)]
pub struct Painter {
    number: u64,
    stripe_bytes: u64,
    /// Where each begins in the file, and the bytes that it must have.
    stripes: Vec<(u64, Vec<u8>)>,
    random: Random,
    step: u64,
}

/// A request of a [`Painter`].
#[derive(Debug)]
pub enum Stroke<'a> {
    /// Writes these bytes from this offset on.
    Write(u64, &'a [u8]),
    /// Reads so many bytes from this offset on.
    Read(u64, usize),
}

impl Painter {
    /// `count`: painters of the file. `seed`: of the file's pattern
    pub fn new(number: u64, count: u64, file_bytes: u64, stripe_bytes: u64, seed: u64) -> Painter {
        let own = (number..file_bytes / stripe_bytes).step_by(count as usize);
        let stripes = own
            .map(|index| index * stripe_bytes)
            .map(|at| (at, pattern::bytes(seed, at, stripe_bytes as usize)))
            .collect();
        Painter {
            number,
            stripe_bytes,
            stripes,
            random: Random(number + 11),
            step: 0,
        }
    }

    /// The next request, done by `act`, which returns the bytes of a read.
    ///
    /// Panics   when a read gives other bytes than the last writes
    pub fn stroke(&mut self, context: &str, act: impl FnOnce(Stroke<'_>) -> Vec<u8>) {
        self.step += 1;
        let which = self.random.below(self.stripes.len() as u64) as usize;
        let (at, bytes) = &mut self.stripes[which];
        let from = self.random.below(self.stripe_bytes);
        let to = from + 1 + self.random.below(self.stripe_bytes - from);
        let (offset, part) = (*at + from, from as usize..to as usize);
        if self.random.below(2) == 0 {
            let new = pattern::bytes((self.number + 1) << 32 | self.step, offset, part.len());
            bytes[part].copy_from_slice(&new);
            act(Stroke::Write(offset, &new));
            return;
        }
        let found = act(Stroke::Read(offset, part.len()));
        let wrong = found
            .iter()
            .zip(&bytes[part.clone()])
            .position(|(a, b)| a != b);
        assert_eq!(
            (found.len(), wrong),
            (part.len(), None),
            "{context}, painter {}, step {}, {offset}",
            self.number,
            self.step
        );
    }

    /// The bytes that its stripes must have, and where each begins.
    pub fn stripes(self) -> Vec<(u64, Vec<u8>)> {
        self.stripes
    }
}

/// Ends all others, whatever happens.
#[derive(Debug)]
pub struct Finally<'a>(pub &'a Stage);

impl Drop for Finally<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// One of several that work together fails: nobody goes on.
#[derive(Debug)]
pub struct OnPanic<'a>(pub &'a Stage);

impl Drop for OnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.end();
        }
    }
}

/// How often it is to be killed: `RUSHES_TEST_KILLS`, otherwise 50.
pub fn wanted() -> usize {
    let text = std::env::var("RUSHES_TEST_KILLS").unwrap_or_else(|_| String::from("50"));
    text.parse().expect("RUSHES_TEST_KILLS is a number")
}

/// Kill the daemon so often and start it again. Before it is killed it `serves`, and then each
/// client ends `least` steps, so that nobody is only kept waiting; but some daemons die before
/// anybody has had anything of them.
///
/// `now` says how many steps each client has ended.
pub fn kill<const CLIENTS: usize>(
    daemon: &mut Daemon,
    stage: &Stage,
    serves: impl Fn(&Daemon) -> bool,
    now: impl Fn() -> [u64; CLIENTS],
    least: u64,
    count: usize,
) {
    let mut random = Random(5);
    let all_go_on = |before: [u64; CLIENTS]| {
        let gone_on = |(now, before): (u64, u64)| now - before >= least;
        while !now().into_iter().zip(before).all(gone_on) && stage.goes_on() {
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    all_go_on([0; CLIENTS]);
    for _ in 0..count {
        std::thread::sleep(Duration::from_millis(random.below(200)));
        if !stage.goes_on() {
            break;
        }
        stage.kills.fetch_add(1, Ordering::Relaxed);
        daemon.kill();
        daemon.start_again();
        if random.below(4) == 0 {
            continue;
        }
        while !serves(daemon) && stage.goes_on() {
            std::thread::sleep(Duration::from_millis(10));
        }
        all_go_on(now());
    }
}
