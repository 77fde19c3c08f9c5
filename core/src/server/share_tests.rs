// SPDX-License-Identifier: Apache-2.0
//! Short reads beside long ones, all without a contract: those of a client that uses less than its
//! share of the device go first.

use super::tests::{Bench, facts};
use super::*;

const MIB: u64 = 1 << 20;
/// A read of a copy, which keeps two of them waiting.
const LONG: u64 = 8 * MIB;
/// The answer to a short read comes after so many of the device's requests, at most: the one that
/// it has, and the read's own.
const SOON: usize = 2;

/// Copies in these sessions, each with two reads waiting, for long enough to have used their
/// shares.
struct Copies {
    bench: Bench,
    /// Session, handle and the offset that it reads next, of each.
    copies: Vec<(u32, u32, u64)>,
    /// Reads that wait: request and copy.
    waiting: Vec<(u64, usize)>,
    answered: u64,
    next_request: u64,
}

impl Copies {
    fn of(sessions: &[u32]) -> Copies {
        let mut bench = Bench::new(256);
        let mut known = BTreeSet::new();
        let mut copies = Vec::new();
        for (number, &session) in (1..).zip(sessions) {
            if known.insert(session) {
                bench.session(session);
            }
            bench.open(session, number, "copied", facts(number, 4 << 30));
            copies.push((session, number, 0));
        }
        let mut all = Copies {
            bench,
            copies,
            waiting: Vec::new(),
            answered: 0,
            next_request: 1,
        };
        for copy in 0..sessions.len() {
            all.ask(copy);
            all.ask(copy);
        }
        all.run(400);
        all
    }

    fn ask(&mut self, copy: usize) {
        let (session, handle, at) = self.copies[copy];
        self.copies[copy].2 = at + LONG;
        let request = self.fresh();
        self.waiting.push((request, copy));
        self.bench.read(session, handle, request, at, LONG);
    }

    fn fresh(&mut self) -> u64 {
        self.next_request += 1;
        self.next_request
    }

    /// The device serves so many requests; each copy asks for more as soon as it has an answer.
    fn run(&mut self, count: usize) {
        for _ in 0..count {
            self.bench.run(1);
            self.bench.answer_looks();
            let is_done = |bench: &Bench, request| bench.outcome(request).is_some();
            while let Some(place) =
                (self.waiting.iter()).position(|(request, _)| is_done(&self.bench, *request))
            {
                let (request, copy) = self.waiting.remove(place);
                self.answered += 1;
                self.bench.end(self.copies[copy].0, request);
                self.ask(copy);
            }
        }
    }

    /// How many requests the device served until this read had its answer.
    fn wait_of(&mut self, session: u32, handle: u32, at: u64, length: u64) -> usize {
        let request = self.fresh();
        self.bench.read(session, handle, request, at, length);
        for count in 0..100 {
            if self.bench.outcome(request).is_some() {
                self.bench.end(session, request);
                return count;
            }
            self.run(1);
        }
        panic!("nobody answers it");
    }
}

#[test]
fn an_editor_who_opens_a_clip_beside_copies_waits_for_one_request_of_theirs() {
    let mut all = Copies::of(&[1, 2, 3, 4, 5, 6]);
    all.bench.session(7);
    all.bench.open(7, 7, "played", facts(7, 4 << 30));
    let waits: Vec<usize> = (0..20)
        .map(|frame| {
            // As a player does: bytes that are fetched ahead of it keep it from waiting at all.
            all.run(1);
            all.wait_of(7, 7, frame * 400_000, 400_000)
        })
        .collect();
    assert!(waits.iter().all(|wait| *wait <= SOON), "{waits:?}");
    assert!(
        waits.iter().filter(|wait| **wait > 0).count() < 10,
        "{waits:?}"
    );
}

/// All clients of an NFS server, or of a mount, are one session.
#[test]
fn an_editor_whose_session_copies_waits_for_one_request_of_the_copy() {
    for others in [&[1, 1][..], &[1, 1, 2, 3]] {
        let mut all = Copies::of(others);
        all.bench.open(1, 9, "played", facts(9, 4 << 30));
        let wait = all.wait_of(1, 9, 0, 100_000);
        // Its session has used its share of the device: it waits for that session's next turn.
        let turns = others.len() * (16 << 20) / (4 << 20);
        let expected = if others.len() == 2 { SOON } else { turns };
        assert!(wait <= expected, "{others:?}: {wait}");
    }
}

#[test]
fn whoever_reads_here_and_there_leaves_copies_most_of_the_device() {
    let mut all = Copies::of(&[1, 2]);
    all.bench.session(7);
    all.bench.open(7, 7, "here and there", facts(7, 4 << 30));
    let before = (all.answered, all.bench.now);
    let mut wait_count = 0;
    for nth in 0..200 {
        wait_count += all.wait_of(7, 7, nth * 37 % 101 * 30 * MIB, 64 << 10);
    }
    let served = (all.answered - before.0) * LONG;
    let seconds = all.bench.now.since(before.1).0 as f64 / 1e9;
    // The bench's device moves 4 MiB in 25 ms.
    let share = served as f64 / seconds / (4.0 * MIB as f64 / 0.025);
    assert!(share > 0.4, "{share} of the device, {wait_count} requests");
}

#[test]
fn whoever_copied_plays_as_others_do_a_few_seconds_later() {
    let mut all = Copies::of(&[1, 2, 3]);
    // The first one's copy is over.
    let (session, handle, _) = all.copies[0];
    all.waiting.retain(|(_, copy)| *copy != 0);
    all.bench.step(Event::Closed {
        session: SessionId(session),
        handle: HandleId(handle),
    });
    let before = all.bench.now;
    while all.bench.now.since(before) < Duration::from_s(6) {
        all.run(1);
    }
    all.bench
        .open(session, handle + 9, "played", facts(9, 4 << 30));
    let wait = all.wait_of(session, handle + 9, 0, 100_000);
    assert!(wait <= SOON, "{wait}");
}

#[test]
fn a_queue_of_more_than_ten_seconds_does_not_stop_whoever_reads_little() {
    let mut all = Copies::of(&[1, 2]);
    for _ in 0..120 {
        all.ask(0);
        all.ask(1);
    }
    let before = all.bench.now;
    while all.bench.now.since(before) < Duration::from_s(11) {
        all.run(1);
    }
    all.bench.session(7);
    all.bench.open(7, 7, "played", facts(7, 4 << 30));
    for frame in 0..20 {
        all.run(1);
        // The one that the device has, one that waited for long, and its own.
        let wait = all.wait_of(7, 7, frame * 400_000, 400_000);
        assert!(wait <= SOON + 1, "{frame}: {wait}");
    }
}

/// Each new client is light. A question of admission in the simulator had a read wait for a minute.
#[test]
fn new_clients_one_after_another_do_not_keep_a_copy_waiting_for_long() {
    let mut all = Copies::of(&[1]);
    let mut new: Vec<(u32, u64)> = Vec::new();
    let mut next = 10;
    let (mut answered, mut since) = (all.answered, all.bench.now);
    let mut longest = Duration::ZERO;
    for _ in 0..2000 {
        while new.len() < 3 {
            next += 1;
            let request = all.fresh();
            all.bench.session(next);
            all.bench
                .open(next, next, "looked at", facts(next, 4 << 30));
            all.bench.read(next, next, request, 0, 100_000);
            new.push((next, request));
        }
        all.run(1);
        new.retain(|(session, request)| {
            let waits = all.bench.outcome(*request).is_none();
            if !waits {
                all.bench.end(*session, *request);
            }
            waits
        });
        longest = longest.max(all.bench.now.since(since));
        if all.answered > answered {
            (answered, since) = (all.answered, all.bench.now);
        }
    }
    assert!(longest < Duration::from_s(12), "{} ms", longest.ms());
}
