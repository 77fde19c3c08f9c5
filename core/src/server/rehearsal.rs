// SPDX-License-Identifier: Apache-2.0
//! The memory of rehearsal: which run followed which, for each user of each share.
//!
//! An editor plays the same stretch of a timeline again and again. A *run* is a stretch of a file
//! that was played: the file and the first byte are its place, and its length was read. Each run
//! has the place of the run that followed it. `ways` reads ahead by that (docs/decisions/0051).
//!
//! The memory is bounded: the runs that were played longest ago are forgotten first. The driver
//! keeps it from one daemon to the next: [`Rehearsal::remembered`] goes out, [`Rehearsal::recall`]
//! takes it in, and trusts none of it.

use crate::server::FileKey;
use crate::units::*;
use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;

/// Runs that are remembered of one user.
const RUN_COUNT_MAX: usize = 4096;
/// Users that are remembered.
const USER_COUNT_MAX: usize = 64;
/// Runs of all users together: some 5 MB.
const ALL_COUNT_MAX: usize = 32_768;
/// No file is longer, so that no remembered run ends behind this. Units: bytes.
const END_MAX: u64 = i64::MAX as u64;

/// A run that ends so much earlier than last time is as long as last time.
const JITTER: Duration = Duration::from_ms(250);

/// Where a run begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RunPlace {
    /// Its file.
    pub file: FileKey,
    /// Its first byte.
    pub start: u64,
}

/// A run that was played.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct PlayedRun {
    /// How much of it was read, from its place on. Units: bytes.
    pub length: u64,
    /// The rate at which it was played.
    pub rate: BytesPerSecond,
    /// Where its reader went on. None: not known.
    pub next: Option<RunPlace>,
    /// When it was played last, in the order of all runs.
    played: u64,
}

/// A user of a share.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShareUser {
    /// The share.
    pub share: String,
    /// The user.
    pub user: String,
}

/// A run of the memory, as the driver keeps it from one daemon to the next.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RememberedRun {
    /// The user that played it.
    pub user: Arc<ShareUser>,
    /// Where it begins.
    pub place: RunPlace,
    /// How much of it was read, from its place on. Units: bytes.
    pub length: u64,
    /// The rate at which it was played.
    pub rate: BytesPerSecond,
    /// Where its reader went on. None: not known.
    pub next: Option<RunPlace>,
}

impl RememberedRun {
    /// Some server may have remembered it.
    fn is_possible(&self) -> bool {
        let end = self.place.start.checked_add(self.length);
        self.length > 0 && self.rate.0 > 0 && end.is_some_and(|end| end <= END_MAX)
    }
}

/// The runs of one user.
#[derive(Clone, Debug, Default)]
struct Runs {
    by_place: BTreeMap<RunPlace, PlayedRun>,
    /// The same, in the order in which they were played.
    by_age: BTreeMap<u64, RunPlace>,
}

/// The runs of all users.
#[derive(Clone, Debug, Default)]
pub(super) struct Rehearsal {
    users: BTreeMap<ShareUser, Runs>,
    /// Changes so far. Their order is that in which the runs were played.
    change_count: u64,
}

impl Runs {
    fn enter(&mut self, place: RunPlace, run: PlayedRun) {
        if let Some(former) = self.by_place.insert(place, run) {
            self.by_age.remove(&former.played);
        }
        self.by_age.insert(run.played, place);
        while self.by_place.len() > RUN_COUNT_MAX {
            self.forget_oldest();
        }
    }

    fn forget_oldest(&mut self) {
        if let Some((_, oldest)) = self.by_age.pop_first() {
            self.by_place.remove(&oldest);
        }
    }

    /// When one of them was played last.
    fn played(&self) -> u64 {
        self.by_age
            .last_key_value()
            .map_or(0, |(played, _)| *played)
    }
}

impl Rehearsal {
    /// A run was played to its end. The run that followed it last time is kept until
    /// [`Rehearsal::goes_on`] says otherwise.
    pub(super) fn ends(
        &mut self,
        user: &ShareUser,
        place: RunPlace,
        length: u64,
        rate: BytesPerSecond,
    ) {
        self.change_count += 1;
        let played = self.change_count;
        if !self.users.contains_key(user) {
            self.make_room();
        }
        let runs = self.users.entry(user.clone()).or_default();
        let former = runs.by_place.get(&place);
        let next = former.and_then(|run| run.next);
        // A client that reads ahead goes beyond its cut by more or by less each time.
        let much = rate.bytes_in(JITTER).0;
        let longest = former.map_or(0, |run| run.length);
        let length = match longest.saturating_sub(length) <= much {
            true => length.max(longest),
            false => length,
        };
        let run = PlayedRun {
            length,
            rate,
            next,
            played,
        };
        runs.enter(place, run);
        self.forget_oldest();
    }

    /// Forget runs above the limit for all users, of the user that played longest ago.
    fn forget_oldest(&mut self) {
        let count = |users: &BTreeMap<ShareUser, Runs>| -> usize {
            users.values().map(|runs| runs.by_place.len()).sum()
        };
        while count(&self.users) > ALL_COUNT_MAX {
            let with_runs = self.users.values_mut();
            let with_runs = with_runs.filter(|runs| !runs.by_place.is_empty());
            match with_runs.min_by_key(|runs| runs.played()) {
                Some(runs) => runs.forget_oldest(),
                None => return,
            }
        }
    }

    fn make_room(&mut self) {
        while self.users.len() >= USER_COUNT_MAX {
            let oldest = self.users.iter().min_by_key(|(_, runs)| runs.played());
            let Some(oldest) = oldest.map(|(user, _)| user.clone()) else {
                return;
            };
            self.users.remove(&oldest);
        }
    }

    /// The reader of a run went on at another place.
    pub(super) fn goes_on(&mut self, user: &ShareUser, from: RunPlace, to: RunPlace) {
        let run = self.users.get_mut(user);
        if let Some(run) = run.and_then(|runs| runs.by_place.get_mut(&from))
            && run.next != Some(to)
        {
            run.next = Some(to);
            self.change_count += 1;
        }
    }

    /// Another number with each change.
    pub(super) fn change_count(&self) -> u64 {
        self.change_count
    }

    /// All runs in the order in which they were played, oldest first.
    pub(super) fn remembered(&self) -> Vec<RememberedRun> {
        let mut all = Vec::new();
        for (user, runs) in &self.users {
            let user = Arc::new(user.clone());
            let runs = runs.by_place.iter();
            all.extend(runs.map(|(place, run)| {
                let remembered = RememberedRun {
                    user: user.clone(),
                    place: *place,
                    length: run.length,
                    rate: run.rate,
                    next: run.next,
                };
                (run.played, remembered)
            }));
        }
        all.sort_unstable_by_key(|(played, _)| *played);
        all.into_iter().map(|(_, run)| run).collect()
    }

    /// Take in runs that an earlier server remembered, oldest first. Those of this one are newer.
    pub(super) fn recall(&mut self, remembered: Vec<RememberedRun>) {
        let present = self.remembered();
        self.users.clear();
        let too_many = remembered.len().saturating_sub(ALL_COUNT_MAX);
        let former = remembered.into_iter().skip(too_many);
        for run in former.filter(RememberedRun::is_possible).chain(present) {
            self.ends(&run.user, run.place, run.length, run.rate);
            if let Some(next) = run.next {
                self.goes_on(&run.user, run.place, next);
            }
        }
    }

    /// The run that a user has played from this place on.
    pub(super) fn run_at(&self, user: &ShareUser, place: RunPlace) -> Option<PlayedRun> {
        self.users.get(user)?.by_place.get(&place).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::format;

    const RATE: BytesPerSecond = BytesPerSecond(12_500_000);

    fn user(name: &str) -> ShareUser {
        ShareUser {
            share: String::from("media"),
            user: String::from(name),
        }
    }

    fn place(inode: u64, start: u64) -> RunPlace {
        RunPlace {
            file: FileKey { device: 1, inode },
            start,
        }
    }

    #[test]
    fn run_keeps_its_next_one_when_it_is_played_again() {
        let mut rehearsal = Rehearsal::default();
        let ana = user("ana");
        rehearsal.ends(&ana, place(1, 0), 100, RATE);
        assert_eq!(rehearsal.run_at(&ana, place(1, 0)).unwrap().next, None);
        rehearsal.goes_on(&ana, place(1, 0), place(2, 50));
        rehearsal.ends(&ana, place(1, 0), 120, RATE);
        let run = rehearsal.run_at(&ana, place(1, 0)).unwrap();
        assert_eq!((run.length, run.next), (120, Some(place(2, 50))));
    }

    #[test]
    fn users_and_shares_have_runs_of_their_own() {
        let mut rehearsal = Rehearsal::default();
        rehearsal.ends(&user("ana"), place(1, 0), 100, RATE);
        assert_eq!(rehearsal.run_at(&user("ben"), place(1, 0)), None);
        let elsewhere = ShareUser {
            share: String::from("other"),
            ..user("ana")
        };
        assert_eq!(rehearsal.run_at(&elsewhere, place(1, 0)), None);
    }

    #[test]
    fn runs_that_were_played_longest_ago_are_forgotten_first() {
        let mut rehearsal = Rehearsal::default();
        let ana = user("ana");
        for number in 0..RUN_COUNT_MAX as u64 {
            rehearsal.ends(&ana, place(number, 0), 100, RATE);
        }
        // The first one is played again, so the second one is the oldest.
        rehearsal.ends(&ana, place(0, 0), 100, RATE);
        rehearsal.ends(&ana, place(RUN_COUNT_MAX as u64, 0), 100, RATE);
        assert!(rehearsal.run_at(&ana, place(0, 0)).is_some());
        assert_eq!(rehearsal.run_at(&ana, place(1, 0)), None);
        assert!(rehearsal.run_at(&ana, place(2, 0)).is_some());
    }

    #[test]
    fn user_who_played_longest_ago_is_forgotten_first() {
        let mut rehearsal = Rehearsal::default();
        for number in 0..USER_COUNT_MAX {
            rehearsal.ends(&user(&format!("u{number}")), place(1, 0), 100, RATE);
        }
        rehearsal.ends(&user("u0"), place(1, 0), 100, RATE);
        rehearsal.ends(&user("new"), place(1, 0), 100, RATE);
        assert!(rehearsal.run_at(&user("u0"), place(1, 0)).is_some());
        assert_eq!(rehearsal.run_at(&user("u1"), place(1, 0)), None);
        assert_eq!(rehearsal.users.len(), USER_COUNT_MAX);
    }

    #[test]
    fn user_that_played_longest_ago_gives_way_where_all_have_too_many() {
        let mut rehearsal = Rehearsal::default();
        let users = ALL_COUNT_MAX / RUN_COUNT_MAX + 1;
        for number in 0..users {
            let name = user(&format!("u{number}"));
            for run in 0..RUN_COUNT_MAX as u64 {
                rehearsal.ends(&name, place(run, 0), 100, RATE);
            }
        }
        let counts: Vec<usize> = (0..users)
            .map(|number| {
                let runs = rehearsal.users.get(&user(&format!("u{number}")));
                runs.map_or(0, |runs| runs.by_place.len())
            })
            .collect();
        assert_eq!(counts.iter().sum::<usize>(), ALL_COUNT_MAX);
        assert_eq!((counts[0], counts[1]), (0, RUN_COUNT_MAX));
    }

    #[test]
    fn way_of_a_run_that_was_not_played_is_not_remembered() {
        let mut rehearsal = Rehearsal::default();
        rehearsal.goes_on(&user("ana"), place(1, 0), place(2, 0));
        assert_eq!(rehearsal.run_at(&user("ana"), place(1, 0)), None);
    }

    fn remembered(name: &str, place: RunPlace, length: u64) -> RememberedRun {
        RememberedRun {
            user: Arc::new(user(name)),
            place,
            length,
            rate: RATE,
            next: None,
        }
    }

    /// A server of a later daemon.
    fn after(runs: Vec<RememberedRun>) -> Rehearsal {
        let mut rehearsal = Rehearsal::default();
        rehearsal.recall(runs);
        rehearsal
    }

    #[test]
    fn recalled_runs_are_those_that_were_remembered_in_their_order() {
        let mut rehearsal = Rehearsal::default();
        for (name, inode) in [("ben", 3), ("ana", 1), ("ben", 2), ("ana", 9), ("ben", 3)] {
            rehearsal.ends(&user(name), place(inode, 7), 100 + inode, RATE);
        }
        rehearsal.goes_on(&user("ana"), place(1, 7), place(9, 7));
        let runs = rehearsal.remembered();
        let inodes: Vec<u64> = runs.iter().map(|run| run.place.file.inode).collect();
        assert_eq!(inodes, [1, 2, 9, 3]);
        assert_eq!(runs[0].next, Some(place(9, 7)));
        assert_eq!(after(runs.clone()).remembered(), runs);
    }

    #[test]
    fn runs_are_forgotten_in_the_same_order_after_a_recall() {
        let mut rehearsal = Rehearsal::default();
        let ana = user("ana");
        for number in 0..RUN_COUNT_MAX as u64 {
            rehearsal.ends(&ana, place(number, 0), 100, RATE);
        }
        rehearsal.ends(&ana, place(0, 0), 100, RATE);
        let mut later = after(rehearsal.remembered());
        later.ends(&ana, place(RUN_COUNT_MAX as u64, 0), 100, RATE);
        assert!(later.run_at(&ana, place(0, 0)).is_some());
        assert_eq!(later.run_at(&ana, place(1, 0)), None);
        assert!(later.run_at(&ana, place(2, 0)).is_some());
    }

    #[test]
    fn runs_played_before_a_recall_are_newer() {
        let mut rehearsal = Rehearsal::default();
        let ana = user("ana");
        rehearsal.ends(&ana, place(1, 0), 100, RATE);
        rehearsal.ends(&ana, place(2, 0), 100, RATE);
        rehearsal.goes_on(&ana, place(2, 0), place(1, 0));
        let before = rehearsal.change_count();
        rehearsal.recall(Vec::from([
            RememberedRun {
                next: Some(place(8, 0)),
                ..remembered("ana", place(1, 0), 50_000_000)
            },
            RememberedRun {
                next: Some(place(8, 0)),
                ..remembered("ana", place(2, 0), 50_000_000)
            },
            remembered("ana", place(3, 0), 50_000_000),
        ]));
        assert!(rehearsal.change_count() > before);
        let run = |inode| rehearsal.run_at(&ana, place(inode, 0)).unwrap();
        // Where no later run is known, the former one is.
        assert_eq!((run(1).length, run(1).next), (100, Some(place(8, 0))));
        assert_eq!((run(2).length, run(2).next), (100, Some(place(1, 0))));
        let runs = rehearsal.remembered();
        let inodes: Vec<u64> = runs.iter().map(|run| run.place.file.inode).collect();
        assert_eq!(inodes, [3, 1, 2]);
    }

    #[test]
    fn impossible_runs_are_not_recalled() {
        let slow = RememberedRun {
            rate: BytesPerSecond(0),
            ..remembered("ana", place(5, 0), 100)
        };
        let nowhere = RememberedRun {
            next: Some(place(u64::MAX, u64::MAX)),
            ..remembered("ana", place(6, END_MAX - 100), 100)
        };
        let rehearsal = after(Vec::from([
            remembered("ana", place(1, 0), u64::MAX),
            remembered("ana", place(2, u64::MAX), 1),
            remembered("ana", place(3, END_MAX), 1),
            remembered("ana", place(4, 0), 0),
            slow,
            nowhere.clone(),
        ]));
        assert_eq!(rehearsal.remembered(), [nowhere]);
    }

    #[test]
    fn bounds_hold_for_a_recall_of_too_many_runs() {
        let of_users = (0..2 * USER_COUNT_MAX).map(|number| {
            let name = format!("u{number}");
            remembered(&name, place(1, 0), 100)
        });
        let rehearsal = after(of_users.collect());
        assert_eq!(rehearsal.users.len(), USER_COUNT_MAX);
        assert_eq!(rehearsal.run_at(&user("u0"), place(1, 0)), None);

        let of_all = (0..3 * ALL_COUNT_MAX as u64).map(|number| {
            let name = format!("u{}", number % 10);
            remembered(&name, place(number, 0), 100)
        });
        let rehearsal = after(of_all.collect());
        let counts = rehearsal.users.values().map(|runs| runs.by_place.len());
        assert!(counts.clone().all(|count| count <= RUN_COUNT_MAX));
        assert!(counts.sum::<usize>() <= ALL_COUNT_MAX);
        assert!(!rehearsal.users.is_empty());
    }
}
