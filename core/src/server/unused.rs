// SPDX-License-Identifier: Apache-2.0
//! Files that nothing uses: known for their cached bytes, and no longer than there is room for the
//! files in use.
//!
//! The driver holds each known file open, and may hold only so many. It reports how many, and that
//! there are too many after all.

use super::*;

/// The part of the unused files that goes when the driver has no room at all, as one in so many;
/// and the least that goes.
const CROWDED_PART: usize = 8;
const CROWDED_COUNT: usize = 16;
/// The list is cleared of files that are used again when it has so many more than twice the known
/// files.
const LISTED_COUNT: usize = 64;

impl Server {
    /// A use of a file ended, which may have been its last.
    pub(super) fn note_unused(&mut self, id: FileId) {
        let Some(file) = self.files.get_mut(&id).filter(|file| file.use_count == 0) else {
            return;
        };
        self.unused_count += 1;
        file.unused_since = self.unused_count;
        self.unused.push_back((self.unused_count, id));
        // A file that is opened and closed again and again is listed each time.
        if self.unused.len() > 2 * self.files.len() + LISTED_COUNT {
            let files = &self.files;
            self.unused.retain(|(since, id)| {
                let file = files.get(id);
                file.is_some_and(|file| file.is_unused_since(*since))
            });
        }
    }

    /// Forget files above the limit, the longest unused first.
    pub(super) fn let_go_of_unused(&mut self, actions: &mut Actions) {
        let most = self.limits.file_count_max as usize;
        while self.files.len() > most && self.let_go_of_one(actions) {}
    }

    /// The driver had no room for a file.
    pub(super) fn crowded(&mut self, actions: &mut Actions) {
        let count = (self.unused.len() / CROWDED_PART).max(CROWDED_COUNT);
        self.let_go_of_some(count, actions);
    }

    /// Forget so many unused files, if there are.
    pub(super) fn let_go_of_some(&mut self, count: usize, actions: &mut Actions) {
        let most = self.files.len().saturating_sub(count);
        while self.files.len() > most && self.let_go_of_one(actions) {}
    }

    /// Forget the longest unused file, if that is first in the list. False: the list is empty.
    fn let_go_of_one(&mut self, actions: &mut Actions) -> bool {
        if self.is_recovering {
            // During a recovery nothing is forgotten.
            return false;
        }
        let Some((since, id)) = self.unused.pop_front() else {
            return false;
        };
        let file = self.files.get(&id);
        if file.is_some_and(|file| file.is_unused_since(since)) {
            self.drop_blocks(id, 0, u64::MAX);
            self.forget_if_unused(id, actions);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::*;
    use super::*;
    use alloc::format;

    /// Three files may be known.
    fn bench() -> Bench {
        let mut bench = Bench::new(64);
        bench.server.limits.file_count_max = 3;
        bench.session(1);
        bench
    }

    fn read_and_close(bench: &mut Bench, file: u32) {
        bench.open(1, file, &format!("file{file}"), facts(file, 1 << 20));
        bench.read(1, file, u64::from(file), 0, 4096);
        bench.serve_all();
        bench.end(1, u64::from(file));
        bench.step(Event::Closed {
            session: SessionId(1),
            handle: HandleId(file),
        });
    }

    #[test]
    fn files_that_nobody_uses_go_in_the_order_in_which_they_were_left() {
        let mut bench = bench();
        for file in 1..=3 {
            read_and_close(&mut bench, file);
        }
        assert!(bench.forgotten.is_empty(), "there is room for them");
        // Used once more, so that it is not the first to go.
        read_and_close(&mut bench, 1);
        for file in 4..=5 {
            read_and_close(&mut bench, file);
        }
        assert_eq!(bench.forgotten, [FileId(2), FileId(3)]);
    }

    #[test]
    fn a_file_that_is_used_stays_however_many_there_are() {
        let mut bench = bench();
        for file in 1..=6 {
            bench.open(1, file, &format!("file{file}"), facts(file, 1 << 20));
        }
        assert!(bench.forgotten.is_empty());
        assert_eq!(bench.server.files.len(), 6);
    }

    #[test]
    fn a_driver_without_room_has_files_closed_before_there_are_too_many() {
        let mut bench = bench();
        for file in 1..=3 {
            read_and_close(&mut bench, file);
        }
        bench.open(1, 4, "file4", facts(4, 1 << 20));
        bench.forgotten.clear();
        bench.step(Event::Crowded);
        assert_eq!(bench.forgotten, [FileId(2), FileId(3)]);
        bench.step(Event::Crowded);
        assert_eq!(bench.forgotten.len(), 2, "the other one is used");
    }

    #[test]
    fn as_many_go_as_the_driver_has_too_many() {
        let mut bench = bench();
        for file in 1..=3 {
            read_and_close(&mut bench, file);
        }
        bench.step(Event::Overfull { count: 2 });
        assert_eq!(bench.forgotten, [FileId(1), FileId(2)]);
        bench.step(Event::Overfull { count: 9 });
        assert_eq!(bench.forgotten.len(), 3);
    }
}
