// SPDX-License-Identifier: Apache-2.0
//! When a pool tidies itself: only while no client asks anything of it, and no contract is on its
//! members; or always, where a client always plays.
//!
//! Beginning is slow and ending is quick. Unless it is always to tidy, it begins when for [`QUIET`]
//! no client has asked and no contract was there; it ends at the first request or contract, and
//! begins again after another [`QUIET`]. Files that a whole pass has put in order are left alone
//! for [`PASS_EVERY`], unless members have come.

use crate::units::{Duration, Instant};
use alloc::format;
use alloc::string::{String, ToString};
use core::fmt;

/// A pool without requests for so long is idle.
pub const QUIET: Duration = Duration::from_s(60);
/// From the end of a whole pass to the next one.
pub const PASS_EVERY: Duration = Duration::from_s(12 * 3600);
const MINUTES_OF_DAY: u16 = 24 * 60;

/// When a pool may tidy itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Schedule {
    /// Never.
    #[default]
    Off,
    /// At any time of day.
    Idle,
    /// At any time, also beside clients that play and record. core/pool/pace limits how much they
    /// notice.
    Always,
    /// From one time of day to another, over midnight if that is earlier.
    Daily {
        /// Units: minutes after midnight, local time; below 1440.
        from: u16,
        /// As `from`, and another one.
        to: u16,
    },
}

impl Schedule {
    /// `off`, `idle`, `always`, or `02:00-06:00`. None: it is none of them.
    pub fn of(text: &str) -> Option<Schedule> {
        match text {
            "off" => Some(Schedule::Off),
            "idle" => Some(Schedule::Idle),
            "always" => Some(Schedule::Always),
            _ => {
                let (from, to) = text.split_once('-')?;
                let (from, to) = (minute_of(from)?, minute_of(to)?);
                (from != to).then_some(Schedule::Daily { from, to })
            }
        }
    }

    /// Units    minute: after midnight, local time
    pub fn allows(self, minute: u16) -> bool {
        match self {
            Schedule::Off => false,
            Schedule::Idle | Schedule::Always => true,
            Schedule::Daily { from, to } if from < to => (from..to).contains(&minute),
            Schedule::Daily { from, to } => minute >= from || minute < to,
        }
    }
}

/// As [`Schedule::of`] reads it.
impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |minute: u16| format!("{:02}:{:02}", minute / 60, minute % 60);
        let said: String = match *self {
            Schedule::Off => "off".to_string(),
            Schedule::Idle => "idle".to_string(),
            Schedule::Always => "always".to_string(),
            Schedule::Daily { from, to } => format!("{}-{}", text(from), text(to)),
        };
        f.write_str(&said)
    }
}

fn minute_of(text: &str) -> Option<u16> {
    let (hour, minute) = text.split_once(':')?;
    let is_number = |part: &str| part.len() == 2 && part.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number(hour) || !is_number(minute) {
        return None;
    }
    let (hour, minute): (u16, u16) = (hour.parse().ok()?, minute.parse().ok()?);
    (hour < 24 && minute < 60)
        .then_some(hour * 60 + minute)
        .filter(|minute| *minute < MINUTES_OF_DAY)
}

/// The state of the pool, as of a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// As the pool says.
    pub schedule: Schedule,
    /// Units: minutes after midnight, local time.
    pub minute: u16,
    /// Requests for bytes so far, opens among them; names do not count.
    pub asked_count: u64,
    /// Clients have files open whose requests are not seen.
    pub has_unseen: bool,
    /// A contract is on a member's device.
    pub is_promised: bool,
    /// A command is under way, or waits.
    pub has_command: bool,
    /// Changes with the members.
    pub members: u64,
}

/// Why a pool does not tidy itself at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Its schedule is off.
    Off,
    /// It is not the time of day.
    Window,
    /// A command is under way.
    Command,
    /// Streams have contracts.
    Promised,
    /// A client has asked for something just now.
    Asked,
    /// All is in order since a while ago.
    Done,
}

impl Wait {
    /// A word for programs.
    pub const fn name(self) -> &'static str {
        match self {
            Wait::Off => "off",
            Wait::Window => "window",
            Wait::Command => "command",
            Wait::Promised => "promised",
            Wait::Asked => "asked",
            Wait::Done => "done",
        }
    }
}

/// Decides from one look to the next.
#[derive(Clone, Copy, Debug)]
pub struct Tidier {
    quiet: Duration,
    begun_at: Instant,
    asked_count: u64,
    /// When a client last asked, or a contract was there.
    busy_at: Instant,
    /// When a whole pass was done, and with which members.
    done: Option<(Instant, u64)>,
}

impl Tidier {
    /// One that has seen nothing yet: the pool was busy until now.
    ///
    /// `quiet`  as [`QUIET`], unless an operator says otherwise
    pub fn new(now: Instant, quiet: Duration) -> Tidier {
        Tidier {
            quiet,
            begun_at: now,
            asked_count: 0,
            busy_at: now,
            done: None,
        }
    }

    /// A whole pass is done.
    pub fn passed(&mut self, now: Instant, members: u64) {
        self.done = Some((now, members));
    }

    /// Notes the facts of `seen`, and says whether to tidy now: before a pass begins.
    pub fn decide_to_begin(&mut self, now: Instant, seen: Seen) -> Result<(), Wait> {
        self.decide_to_go_on(now, seen)?;
        let since = match seen.schedule {
            // A user that has just mounted it must not wait for this.
            Schedule::Always => self.begun_at,
            _ => self.busy_at,
        };
        if now.0.saturating_sub(since.0) < self.quiet.0 {
            return Err(Wait::Asked);
        }
        match self.done {
            Some((then, members))
                if members == seen.members && now.0.saturating_sub(then.0) < PASS_EVERY.0 =>
            {
                Err(Wait::Done)
            }
            _ => Ok(()),
        }
    }

    /// Others want bytes, or did until a moment ago.
    pub fn is_beside_others(&self, now: Instant) -> bool {
        now.0.saturating_sub(self.busy_at.0) < self.quiet.0
    }

    /// Notes the facts of `seen`, and says whether to go on: before each step of a copy.
    pub fn decide_to_go_on(&mut self, now: Instant, seen: Seen) -> Result<(), Wait> {
        let is_asked = seen.asked_count != self.asked_count || seen.has_unseen;
        self.asked_count = seen.asked_count;
        if is_asked || seen.is_promised {
            self.busy_at = now;
        }
        match seen.schedule {
            Schedule::Off => Err(Wait::Off),
            schedule if !schedule.allows(seen.minute) => Err(Wait::Window),
            _ if seen.has_command => Err(Wait::Command),
            Schedule::Always => Ok(()),
            _ if seen.is_promised => Err(Wait::Promised),
            _ if is_asked => Err(Wait::Asked),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: Seen = Seen {
        schedule: Schedule::Idle,
        minute: 180,
        asked_count: 7,
        has_unseen: false,
        is_promised: false,
        has_command: false,
        members: 1,
    };

    fn at(seconds: u64) -> Instant {
        Instant(seconds * 1_000_000_000)
    }

    #[test]
    fn schedules_are_read_as_they_are_written_and_nothing_else_is_one() {
        for text in [
            "off",
            "idle",
            "always",
            "02:00-06:00",
            "22:30-05:59",
            "00:00-23:59",
        ] {
            let schedule = Schedule::of(text).unwrap_or_else(|| panic!("{text}"));
            assert_eq!(schedule.to_string(), text);
        }
        for text in [
            "",
            "on",
            "2:00-6:00",
            "02:00",
            "02:00-02:00",
            "24:00-01:00",
            "01:60-02:00",
            "02:00-06:00 ",
            "+2:00-06:00",
            "02:00-06:00-07:00",
        ] {
            assert_eq!(Schedule::of(text), None, "{text:?}");
        }
    }

    #[test]
    fn a_window_may_reach_over_midnight() {
        let night = Schedule::of("22:00-02:00").unwrap();
        for (hour, expected) in [
            (21, false),
            (22, true),
            (23, true),
            (0, true),
            (1, true),
            (2, false),
            (12, false),
        ] {
            assert_eq!(night.allows(hour * 60), expected, "{hour}");
        }
        let morning = Schedule::of("02:00-06:00").unwrap();
        assert!(
            morning.allows(120)
                && morning.allows(359)
                && !morning.allows(360)
                && !morning.allows(119)
        );
        assert!(!Schedule::Off.allows(120) && Schedule::Idle.allows(720));
    }

    #[test]
    fn it_begins_after_a_minute_of_quiet_and_ends_at_the_first_request() {
        let mut tidier = Tidier::new(at(0), QUIET);
        assert_eq!(tidier.decide_to_begin(at(1), IDLE), Err(Wait::Asked));
        assert_eq!(
            tidier.decide_to_begin(at(60), IDLE),
            Err(Wait::Asked),
            "asked at second 1"
        );
        assert_eq!(tidier.decide_to_begin(at(61), IDLE), Ok(()));
        assert_eq!(tidier.decide_to_go_on(at(62), IDLE), Ok(()));
        let asked = Seen {
            asked_count: 8,
            ..IDLE
        };
        assert_eq!(tidier.decide_to_go_on(at(63), asked), Err(Wait::Asked));
        // Once is enough for a whole minute.
        assert_eq!(tidier.decide_to_begin(at(64), asked), Err(Wait::Asked));
        assert_eq!(tidier.decide_to_begin(at(122), asked), Err(Wait::Asked));
        assert_eq!(tidier.decide_to_begin(at(123), asked), Ok(()));
    }

    #[test]
    fn promises_and_commands_end_it_and_a_promise_that_ended_is_waited_out() {
        let mut tidier = Tidier::new(at(0), QUIET);
        let _ = tidier.decide_to_begin(at(0), IDLE);
        assert_eq!(tidier.decide_to_begin(at(60), IDLE), Ok(()));
        let promised = Seen {
            is_promised: true,
            ..IDLE
        };
        assert_eq!(
            tidier.decide_to_go_on(at(61), promised),
            Err(Wait::Promised)
        );
        assert_eq!(tidier.decide_to_begin(at(100), IDLE), Err(Wait::Asked));
        assert_eq!(tidier.decide_to_begin(at(121), IDLE), Ok(()));
        let command = Seen {
            has_command: true,
            ..IDLE
        };
        assert_eq!(tidier.decide_to_go_on(at(122), command), Err(Wait::Command));
        let unseen = Seen {
            has_unseen: true,
            ..IDLE
        };
        assert_eq!(tidier.decide_to_go_on(at(122), unseen), Err(Wait::Asked));
        assert_eq!(tidier.decide_to_begin(at(181), IDLE), Err(Wait::Asked));
        assert_eq!(tidier.decide_to_begin(at(182), IDLE), Ok(()));
        // A command is no user: when it is done this goes on.
        assert_eq!(tidier.decide_to_begin(at(183), IDLE), Ok(()));
        let late = Seen {
            schedule: Schedule::Daily { from: 60, to: 180 },
            ..IDLE
        };
        assert_eq!(tidier.decide_to_go_on(at(184), late), Err(Wait::Window));
        let off = Seen {
            schedule: Schedule::Off,
            ..IDLE
        };
        assert_eq!(tidier.decide_to_go_on(at(185), off), Err(Wait::Off));
    }

    #[test]
    fn always_is_beside_streams_and_requests_but_not_beside_a_command_nor_twice() {
        let mut tidier = Tidier::new(at(0), QUIET);
        let busy = |asked_count| Seen {
            schedule: Schedule::Always,
            asked_count,
            has_unseen: true,
            is_promised: true,
            ..IDLE
        };
        assert_eq!(tidier.decide_to_begin(at(59), busy(1)), Err(Wait::Asked));
        assert_eq!(tidier.decide_to_begin(at(60), busy(2)), Ok(()));
        assert_eq!(tidier.decide_to_go_on(at(61), busy(3)), Ok(()));
        assert!(tidier.is_beside_others(at(61)) && !tidier.is_beside_others(at(121)));
        let command = Seen {
            has_command: true,
            ..busy(4)
        };
        assert_eq!(tidier.decide_to_go_on(at(62), command), Err(Wait::Command));
        assert_eq!(tidier.decide_to_begin(at(63), busy(5)), Ok(()));
        tidier.passed(at(70), IDLE.members);
        assert_eq!(tidier.decide_to_begin(at(71), busy(6)), Err(Wait::Done));
    }

    #[test]
    fn what_is_in_order_is_left_alone_until_tomorrow_or_until_members_come() {
        let mut tidier = Tidier::new(at(0), QUIET);
        let _ = tidier.decide_to_begin(at(0), IDLE);
        assert_eq!(tidier.decide_to_begin(at(60), IDLE), Ok(()));
        tidier.passed(at(70), IDLE.members);
        assert_eq!(tidier.decide_to_begin(at(200), IDLE), Err(Wait::Done));
        let more = Seen { members: 2, ..IDLE };
        assert_eq!(tidier.decide_to_begin(at(201), more), Ok(()));
        tidier.passed(at(210), 2);
        assert_eq!(
            tidier.decide_to_begin(at(209 + 12 * 3600), more),
            Err(Wait::Done)
        );
        assert_eq!(tidier.decide_to_begin(at(210 + 12 * 3600), more), Ok(()));
    }
}
