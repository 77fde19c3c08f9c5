// SPDX-License-Identifier: Apache-2.0
//! A contract outlives the handle it was given for. A room of editors that close first is in
//! `sim/scenarios/timeline_closes_first.toml`.

use super::tests::{Bench, ruled};
use super::*;
use alloc::format;

const MIB: u64 = 1 << 20;
const BITS: u64 = 100_000_000;

/// A client that has one clip open at a time.
struct Player {
    session: u32,
    handle: u32,
    request: u64,
    at: u64,
    bits: u64,
    last_read: Instant,
}

impl Player {
    fn new(bench: &mut Bench, session: u32) -> Player {
        bench.step(Event::SessionOpened {
            session: SessionId(session),
            label: SessionLabel {
                share: "media".into(),
                user: format!("anna{session}"),
                client: "10.0.0.7".into(),
            },
        });
        Player {
            session,
            handle: 0,
            request: u64::from(session) << 32,
            at: 0,
            bits: BITS,
            last_read: bench.now,
        }
    }

    fn open(&mut self, bench: &mut Bench, bits: u64) {
        self.handle += 1;
        self.at = 0;
        self.bits = bits;
        let file = self.session % 30 * 10 + self.handle % 4;
        bench.open(
            self.session,
            self.handle,
            "clip",
            ruled(
                1000 + file * 20 + (bits / 30_000_000) as u32,
                900 * MIB,
                bits,
            ),
        );
    }

    fn close(&self, bench: &mut Bench) {
        bench.step(Event::Closed {
            session: SessionId(self.session),
            handle: HandleId(self.handle),
        });
    }

    fn play(&mut self, bench: &mut Bench, frames: u64) {
        for _ in 0..frames {
            let frame = self.bits / 8 / 25;
            self.request += 1;
            bench.read(self.session, self.handle, self.request, self.at, frame);
            while bench.outcome(self.request).is_none() {
                bench.serve_all();
                bench.answer_looks();
            }
            bench.end(self.session, self.request);
            self.at += frame;
            self.last_read = bench.now;
            bench.now = bench.now + Duration::from_ms(40);
        }
    }

    fn is_promised(&self, bench: &Bench) -> bool {
        let is_own = |stream: &Stream| {
            stream.session == SessionId(self.session)
                && stream.handle == Some(HandleId(self.handle))
        };
        let mut streams = bench.server.streams.iter();
        streams.any(|(_, stream)| is_own(stream) && stream.standing == Standing::Contract)
    }
}

/// Only the clock goes on.
fn wait(bench: &mut Bench, seconds: u64) {
    for _ in 0..seconds * 10 {
        bench.now = bench.now + Duration::from_ms(100);
        bench.step(Event::Timer);
        bench.serve_all();
    }
}

fn contracts(bench: &Bench) -> u32 {
    bench.server.devices()[0].contract_count
}

/// A device that is full of players, and one more that waits.
fn full_room(bench: &mut Bench) -> (Vec<Player>, Player) {
    let mut players = Vec::new();
    for nth in 1.. {
        let mut player = Player::new(bench, nth);
        player.open(bench, BITS);
        player.play(bench, 15);
        if !player.is_promised(bench) {
            return (players, player);
        }
        players.push(player);
    }
    unreachable!("a device is full some time")
}

#[test]
fn promise_is_taken_up_by_the_next_handle_though_others_wait_for_room() {
    let mut bench = Bench::new(1024);
    let (mut players, waiting) = full_room(&mut bench);
    assert!((9..=13).contains(&players.len()), "{}", players.len());
    for cut in 0..4 {
        for player in &mut players {
            player.close(&mut bench);
            bench.now = bench.now + Duration::from_ms(700);
            bench.step(Event::Timer);
            assert!(!waiting.is_promised(&bench));
            player.open(&mut bench, BITS);
            player.play(&mut bench, 1);
            assert!(player.is_promised(&bench), "cut {cut}");
        }
        let promised: u64 = players.len() as u64 * BITS / 8;
        assert_eq!(bench.server.promised.rate, promised);
    }
}

#[test]
fn kept_promise_has_no_buffers_and_nothing_is_fetched_for_it() {
    let mut bench = Bench::new(1024);
    let mut player = Player::new(&mut bench, 1);
    player.open(&mut bench, BITS);
    player.play(&mut bench, 20);
    assert!(bench.held_count() > 4);
    bench.serve_all();
    player.close(&mut bench);
    for _ in 0..100 {
        bench.now = bench.now + Duration::from_ms(100);
        bench.step(Event::Timer);
        assert_eq!((bench.flights.len(), bench.held_count()), (0, 0));
    }
    assert_eq!(
        (contracts(&bench), bench.server.promised.rate),
        (1, BITS / 8)
    );
}

#[test]
fn kept_promise_is_over_after_a_pause_s_time_and_others_get_it() {
    let mut bench = Bench::new(1024);
    let (players, mut waiting) = full_room(&mut bench);
    let last = &players[players.len() - 1];
    last.close(&mut bench);
    let until = last.last_read + Duration::from_s(10);
    let mut players: Vec<Player> = players.into_iter().rev().skip(1).collect();
    players.iter_mut().for_each(|one| one.play(&mut bench, 1));
    bench.step(Event::PolicyChanged(Policy {
        pause: Duration::from_s(10),
        ..Policy::default()
    }));
    while bench.now + Duration::from_s(2) < until {
        players.iter_mut().for_each(|one| one.play(&mut bench, 1));
        assert!(!waiting.is_promised(&bench), "{:?}", bench.now);
        wait(&mut bench, 1);
    }
    assert_eq!(bench.server.kept.len(), 1);
    players.iter_mut().for_each(|one| one.play(&mut bench, 1));
    wait(&mut bench, 2);
    waiting.play(&mut bench, 1);
    assert!(waiting.is_promised(&bench));
    assert!(bench.server.kept.is_empty());
}

#[test]
fn time_of_a_kept_promise_is_counted_from_the_last_read() {
    let mut bench = Bench::new(1024);
    let mut player = Player::new(&mut bench, 1);
    player.open(&mut bench, BITS);
    player.play(&mut bench, 20);
    wait(&mut bench, 25);
    player.close(&mut bench);
    wait(&mut bench, 4);
    assert_eq!(contracts(&bench), 1);
    wait(&mut bench, 2);
    assert_eq!((contracts(&bench), bench.server.promised.rate), (0, 0));
    // Closed after that time it is gone at once.
    player.open(&mut bench, BITS);
    player.play(&mut bench, 20);
    wait(&mut bench, 31);
    assert_eq!(contracts(&bench), 1);
    player.close(&mut bench);
    assert_eq!(contracts(&bench), 0);
}

#[test]
fn look_at_a_clip_leaves_no_promise() {
    let mut bench = Bench::new(1024);
    let mut player = Player::new(&mut bench, 1);
    for _ in 0..20 {
        player.open(&mut bench, BITS);
        player.play(&mut bench, 3);
        player.close(&mut bench);
        assert_eq!(contracts(&bench), 0);
    }
}

#[test]
fn client_that_opens_and_closes_for_ever_keeps_one_promise() {
    let mut bench = Bench::new(1024);
    let mut player = Player::new(&mut bench, 1);
    for clip in 0..10_000 {
        player.open(&mut bench, BITS);
        player.play(&mut bench, if clip % 100 == 0 { 15 } else { 1 });
        player.close(&mut bench);
        assert!(bench.server.kept.len() <= 1, "clip {clip}");
        assert!(bench.server.streams.iter().count() <= 1, "clip {clip}");
    }
}

#[test]
fn layers_that_are_closed_together_are_taken_up_each() {
    let mut bench = Bench::new(1024);
    let mut player = Player::new(&mut bench, 1);
    let layers = |bench: &mut Bench, player: &mut Player, bits: [u64; 3]| {
        let session = SessionId(1);
        let first = player.handle + 1;
        for bits in bits {
            player.open(bench, bits);
        }
        for frame in 0..20 {
            for (nth, bits) in bits.into_iter().enumerate() {
                player.handle = first + nth as u32;
                (player.bits, player.at) = (bits, frame * bits / 200);
                player.play(bench, 1);
            }
        }
        let own = bench.server.streams.iter();
        let standing: Vec<(u64, Standing)> = own
            .filter(|(_, stream)| stream.session == session)
            .map(|(_, stream)| (stream.rate_or_none().0 * 8, stream.standing))
            .collect();
        for nth in 0..3 {
            player.handle = first + nth;
            player.close(bench);
        }
        player.handle = first + 2;
        standing
    };
    for cut in 0..4 {
        // The sound is opened before the picture, and behind it.
        let bits = match cut % 2 {
            0 => [4_000_000, BITS, 4_000_000],
            _ => [BITS, 4_000_000, 4_000_000],
        };
        let standing = layers(&mut bench, &mut player, bits);
        let expected: Vec<_> = bits.map(|bits| (bits, Standing::Contract)).into();
        assert_eq!(standing.len(), 3, "cut {cut}");
        for one in expected {
            assert!(standing.contains(&one), "cut {cut}: {standing:?}");
        }
        assert_eq!(bench.server.kept.len(), 3);
        assert_eq!(bench.server.promised.rate, 108_000_000 / 8);
    }
}

#[test]
fn clip_of_a_higher_rate_is_asked_for_in_place_of_what_is_kept() {
    let mut bench = Bench::new(1024);
    let mut player = Player::new(&mut bench, 1);
    player.open(&mut bench, 600_000_000);
    player.play(&mut bench, 20);
    player.close(&mut bench);
    // Both together would be more than the device has.
    player.open(&mut bench, 1_000_000_000);
    player.play(&mut bench, 20);
    assert!(player.is_promised(&bench));
    assert_eq!(bench.server.promised.rate, 125_000_000);
    assert!(bench.server.kept.is_empty());
}

/// A client that waits for room may find it itself, when it asks the next time: the contract that
/// its seat has left is given back then. There are buffers for one picture and a sound: counted
/// twice, the contract would be refused its own buffers. The time of its question depends on that
/// of its arrival.
#[test]
fn kept_promise_that_its_seat_has_left_goes_to_who_waits_and_is_reckoned_once() {
    for frames_away in 0..15 {
        let mut bench = Bench::new(24);
        let mut player = Player::new(&mut bench, 1);
        player.open(&mut bench, BITS);
        player.play(&mut bench, 20);
        player.close(&mut bench);
        bench.now = bench.now + Duration::from_ms(40 * frames_away);
        let mut waiting = Player::new(&mut bench, 2);
        waiting.open(&mut bench, BITS);
        waiting.play(&mut bench, 15);
        assert!(!waiting.is_promised(&bench));
        // Its sound does not take up the picture's contract.
        player.open(&mut bench, 4_000_000);
        for _ in 0..100 {
            player.play(&mut bench, 1);
            bench.step(Event::Timer);
        }
        assert!(player.is_promised(&bench) && waiting.is_promised(&bench));
        assert!(bench.server.kept.is_empty());
        assert_eq!(
            (contracts(&bench), bench.server.promised.rate),
            (2, 13_000_000)
        );
    }
}

#[test]
fn session_that_ends_keeps_nothing() {
    let mut bench = Bench::new(1024);
    for (session, is_closed_first) in [(1, true), (2, false)] {
        let mut player = Player::new(&mut bench, session);
        player.open(&mut bench, BITS);
        player.play(&mut bench, 20);
        if is_closed_first {
            player.close(&mut bench);
        }
        assert_eq!(contracts(&bench), 1);
        bench.step(Event::SessionClosed {
            session: SessionId(session),
        });
        assert_eq!((contracts(&bench), bench.server.promised.rate), (0, 0));
    }
}

#[test]
fn sessions_that_come_and_go_for_ever_leave_nothing() {
    let mut bench = Bench::new(1024);
    for session in 1..=10_000 {
        let mut player = Player::new(&mut bench, session);
        player.open(&mut bench, BITS);
        player.play(&mut bench, if session % 500 == 1 { 15 } else { 1 });
        player.close(&mut bench);
        bench.step(Event::SessionClosed {
            session: SessionId(session),
        });
        assert!(bench.server.kept.is_empty(), "session {session}");
    }
    assert_eq!(bench.server.streams.iter().count(), 0);
}

/// Together they have as much as admission gave, and no more is served as if it were promised.
#[test]
fn two_hundred_connections_of_one_user_get_what_admission_gives() {
    let mut bench = Bench::new(1024);
    bench.step(Event::PolicyChanged(Policy {
        pause: Duration::from_s(600),
        ..Policy::default()
    }));
    let mut players: Vec<Player> = (1..=200)
        .map(|session| Player::new(&mut bench, session))
        .collect();
    for round in 0..2 {
        for player in &mut players {
            player.open(&mut bench, BITS);
            player.play(&mut bench, 13);
        }
        let promised = players.iter().filter(|one| one.is_promised(&bench)).count();
        assert!((8..=13).contains(&promised), "{promised} of 200");
        assert_eq!(bench.server.promised.rate, promised as u64 * BITS / 8);
        for player in &players {
            player.close(&mut bench);
        }
        assert_eq!(
            bench.server.promised.rate,
            promised as u64 * BITS / 8,
            "{round}"
        );
    }
}

#[test]
fn seats_tell_of_playheads_and_of_what_they_keep() {
    let mut bench = Bench::new(1024);
    let mut player = Player::new(&mut bench, 1);
    player.open(&mut bench, BITS);
    player.play(&mut bench, 20);
    let seat = |bench: &Bench| {
        let mut seats = bench.server.seats(bench.now);
        assert_eq!(seats.len(), 1);
        seats.remove(0)
    };
    let plays = seat(&bench);
    assert_eq!(
        (plays.state, plays.promised.0),
        (SeatState::Plays, BITS / 8)
    );
    assert_eq!(plays.label.user, "anna1");
    assert_eq!(plays.playheads.len(), 1);
    assert_eq!(plays.playheads[0].position.0, 20 * 500_000);
    wait(&mut bench, 5);
    assert_eq!(seat(&bench).state, SeatState::Paused);
    player.close(&mut bench);
    let away = seat(&bench);
    assert_eq!((away.state, away.promised.0), (SeatState::Away, BITS / 8));
    assert!(away.playheads.is_empty());
    assert_eq!(away.kept.len(), 1);
    let left = away.kept[0].left;
    assert!((20..26).contains(&(left.0 / NS_PER_S)), "{left:?}");
    wait(&mut bench, 30);
    assert!(bench.server.seats(bench.now).is_empty());
}
