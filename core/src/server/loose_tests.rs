// SPDX-License-Identifier: Apache-2.0
//! The kernel's part in writes through its cache, for the world of `write_tests`; and the fate of
//! bytes that it could not write.

use super::*;

impl World {
    /// The driver has synced.
    pub(super) fn end_sync(&mut self) {
        if self.syncs.is_empty() {
            return;
        }
        let asked = self.syncs.remove(0);
        while !self.unwritten.is_empty() {
            self.write_from_cache();
        }
        let result = match core::mem::take(&mut self.has_lost) {
            true => Err(Errno::IO),
            false => Ok(()),
        };
        self.counts.syncs_failed += u64::from(result.is_err());
        if result.is_ok() {
            let on_device = |(at, byte): (usize, u8)| match self.device.get(at) {
                Some(&found) if Some(&found) != self.native.get(at) => found,
                _ => byte,
            };
            self.durable = asked.into_iter().enumerate().map(on_device).collect();
        }
        let is_doubted = self.doubts && result.is_err() && !self.random.one_in(3);
        self.counts.syncs_doubted += u64::from(is_doubted);
        self.step(match result {
            Err(errno) if is_doubted => Event::SyncDoubted { file: FILE, errno },
            _ => Event::Synced { file: FILE, result },
        });
        match result {
            Ok(()) => self.told.clear(),
            Err(_) => self.told.append(&mut self.untold),
        }
    }

    /// The file as a read finds it: the kernel writes its cached bytes there first, and the bytes
    /// that it could not write are in its cache alone.
    pub(super) fn seen_by(&mut self, io: &IoRead) -> Vec<u8> {
        if io.buffered {
            return self.native.clone();
        }
        while let Some(at) = self.unwritten.iter().position(|one| one.overlaps(io.range)) {
            let range = self.unwritten.swap_remove(at);
            let fails = self.failing && self.random.one_in(3);
            self.end_writing_from_cache(range, fails);
        }
        self.device.clone()
    }

    /// The same for a client that reads by itself. A page that the kernel could not write may be
    /// gone from its cache: the device's bytes come then.
    pub(super) fn seen_plainly(&mut self) -> Vec<u8> {
        let mut seen = self.native.clone();
        for range in self.untold.iter().chain(&self.told) {
            if self.random.one_in(2) {
                let end = (range.end() as usize).min(seen.len());
                let place = (range.start.0 as usize).min(end)..end;
                seen[place.clone()].copy_from_slice(&self.device[place]);
            }
        }
        seen
    }

    /// A client syncs, on a descriptor of its own: only the kernel has anything of the file.
    pub(super) fn sync_by_himself(
        &mut self,
        then: &[u8],
        since: &[(u64, Vec<u8>)],
        lengths: &[u64],
    ) {
        while !self.unwritten.is_empty() {
            self.write_from_cache();
        }
        self.counts.syncs_plain += 1;
        if core::mem::take(&mut self.has_lost) {
            return self.counts.syncs_refused += 1;
        }
        self.durable.clone_from(&self.device);
        self.check_synced(then, since, lengths);
    }

    /// The kernel writes something of its cache. If it cannot, it reports that to the next sync,
    /// once, and never tries again.
    pub(super) fn write_from_cache(&mut self) {
        if self.unwritten.is_empty() {
            return;
        }
        let index = self.random.below(self.unwritten.len() as u64) as usize;
        let range = self.unwritten.swap_remove(index);
        let fails = self.failing && self.random.one_in(3);
        self.end_writing_from_cache(range, fails);
    }

    fn end_writing_from_cache(&mut self, range: ByteRange, fails: bool) {
        if fails {
            self.has_lost = true;
            self.has_lost_past = true;
            self.falls_back = true;
            self.untold.push(range);
            self.counts.lost += 1;
            return;
        }
        let end = (range.end() as usize).min(self.native.len());
        let place = (range.start.0 as usize).min(end)..end;
        self.device[place.clone()].copy_from_slice(&self.native[place]);
    }

    /// One thing goes wrong at a time: a daemon's death does not lose as well the bytes of which it
    /// had a copy, unless the kernel had reported them: then the next one has it.
    pub(super) fn keep_what_is_untold(&mut self) {
        let told = self.device.clone();
        self.device.clone_from(&self.native);
        for range in core::mem::take(&mut self.told) {
            let end = (range.end() as usize).min(told.len());
            let place = (range.start.0 as usize).min(end)..end;
            self.device[place.clone()].copy_from_slice(&told[place]);
        }
        self.unwritten.clear();
        self.untold.clear();
        self.has_lost = false;
        self.has_lost_past = false;
        self.falls_back = false;
    }

    /// The kernel has these once more.
    pub(super) fn is_given_again(&mut self, range: ByteRange) {
        let told = core::mem::take(&mut self.told);
        let ends = |one: ByteRange| {
            let before = ByteRange::new(
                one.start.0,
                range.start.0.clamp(one.start.0, one.end()) - one.start.0,
            );
            let from = range.end().clamp(one.start.0, one.end());
            [before, ByteRange::new(from, one.end() - from)]
        };
        let left = told.into_iter().flat_map(ends);
        self.told = left.filter(|one| one.length.0 > 0).collect();
    }

    /// Nothing is lost.
    pub(super) fn keep_what_is_lost(&mut self) {
        self.told.clear();
        self.keep_what_is_untold();
    }

    /// Linux takes a write past its cache into it when the first look reports a failure, of any
    /// write.
    pub(super) fn falls_back(&mut self) -> bool {
        core::mem::take(&mut self.falls_back)
    }

    /// The driver's question behind each write past the kernel's cache.
    pub(super) fn tell_of_fallback(&mut self, io: &IoWrite) {
        if io.buffered {
            return;
        }
        let at = self.unwritten.iter().position(|one| *one == io.range);
        if let Some(at) = at.filter(|_| !self.falls_back_lazily) {
            let range = self.unwritten.swap_remove(at);
            let fails = self.failing && self.random.one_in(2);
            self.end_writing_from_cache(range, fails);
        }
        let is_cached = self.unwritten.contains(&io.range);
        let has_lost = !is_cached && core::mem::take(&mut self.has_lost_past);
        let lost = has_lost.then_some(Errno::IO);
        self.counts.fallbacks += u64::from(is_cached || has_lost);
        if is_cached || has_lost {
            self.step(Event::FellBack { io: io.io, lost });
        }
    }

    /// The kernel cannot write its cached bytes.
    pub(super) fn lose(&mut self) {
        assert!(!self.unwritten.is_empty(), "nothing went through its cache");
        for range in core::mem::take(&mut self.unwritten) {
            self.end_writing_from_cache(range, true);
        }
        (self.falls_back, self.has_lost_past) = (false, false);
    }

    /// Time goes by until nothing is dirty any more.
    fn write_all_back(&mut self) {
        for _ in 0..1000 {
            if self.ios.is_empty() && !self.is_dirty() {
                return;
            }
            self.now = self.now + Duration::from_ms(20);
            self.step(Event::Timer);
            for io in core::mem::take(&mut self.ios) {
                let Io::Write(io, parts, bytes) = io else {
                    panic!("nobody reads");
                };
                self.do_write(&io, &parts, &bytes);
                let result = Ok(io.range.length);
                self.step(Event::IoDone { io: io.io, result });
            }
        }
        panic!("bytes stay dirty");
    }

    /// Time goes by, and the driver does its work.
    fn wait(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.now = (self.now + Duration::from_ms(100)).min(end);
            self.step(Event::Timer);
            self.end_sync();
            if self.settles > 0 {
                self.settles -= 1;
                let version = self.version;
                self.step(Event::Settled {
                    file: FILE,
                    version,
                });
            }
        }
    }

    pub(super) fn is_dirty(&self) -> bool {
        let file = self.server.files.get(&FILE);
        file.is_some_and(|file| !file.writing.dirty.is_empty())
    }

    fn held(&self) -> u32 {
        let held = |lane: &LaneState| lane.pages.held_count();
        self.server.lanes.values().map(held).sum()
    }
}

/// The head and the tail of a piece that begins and ends within a page, whose middle went by direct
/// I/O.
fn half_lost() -> World {
    let mut world = quiet();
    let file = world.server.files.get_mut(&FILE).expect("it is open");
    file.writing.others_changed = 0;
    world.has_failed = true;
    world.write(0, ByteRange::new(1000, 10_000));
    world.write_all_back();
    assert!(world.native == world.flat && world.device != world.flat);
    assert_eq!(world.held(), 2, "two pages of three");
    world.lose();
    world
}

#[test]
fn what_the_kernel_could_not_write_is_written_again_before_a_sync_is_answered_well() {
    let mut world = half_lost();
    world.sync(0);
    world.end_sync();
    assert_eq!((world.counts.syncs, world.counts.syncs_refused), (0, 1));
    // The disk works again. The earlier error is reported no more.
    world.sync(0);
    assert_eq!(world.counts.syncs_refused, 2, "it does not have it yet");
    world.write_all_back();
    world.sync(0);
    world.end_sync();
    assert_eq!(world.counts.syncs, 1);
    assert!(world.device == world.flat);
    assert_eq!(world.held(), 0);
}

#[test]
fn what_the_kernel_could_not_write_is_found_out_although_nobody_syncs() {
    let mut world = half_lost();
    world.wait(Duration::from_s(37));
    assert_eq!(world.counts.syncs_failed, 1);
    world.write_all_back();
    world.wait(Duration::from_s(37));
    assert!(world.device == world.flat);
    assert_eq!(world.held(), 0);
}

#[test]
fn it_is_found_out_at_once_when_the_device_fails_otherwise() {
    let mut world = half_lost();
    world.write(1, ByteRange::new(16_384, 4096));
    world.write_back(Err(Errno::IO));
    world.end_sync();
    assert_eq!(world.counts.syncs_failed, 1);
    world.settle();
}

#[test]
fn a_file_that_is_let_go_of_goes_when_all_that_was_lost_is_on_the_device() {
    let mut world = half_lost();
    let key = world.server.files[&FILE].key;
    world.step(Event::LetGo { key });
    let sessions: Vec<SessionId> = world.clients.iter().map(|client| client.0).collect();
    for session in sessions {
        let handle = HANDLE;
        world.step(Event::Closed { session, handle });
    }
    world.step(Event::LetGo { key });
    world.step(Event::Timer);
    world.end_sync();
    assert_eq!(world.counts.syncs_failed, 1);
    world.write_all_back();
    // The driver sends this until the file is gone.
    world.step(Event::LetGo { key });
    world.wait(Duration::from_ms(500));
    assert!(world.device == world.flat);
    assert_eq!(world.held(), 0);
    world.step(Event::LetGo { key });
    assert!(!world.server.files.contains_key(&FILE));
}

#[test]
fn newer_bytes_are_not_written_over_by_what_was_lost() {
    let mut world = half_lost();
    // In the middle of the head, and by direct I/O over all of the tail.
    world.write(1, ByteRange::new(2000, 50));
    world.write(1, ByteRange::new(8192, 8192));
    assert_eq!(
        world.held(),
        1,
        "of the head two parts, of the tail nothing"
    );
    world.sync(0);
    world.write_all_back();
    world.end_sync();
    world.settle();
    assert!(world.device == world.flat);
}

/// Another program changes the file as the file system has it, and the server gets the report.
fn strange(world: &mut World, change: impl Fn(&mut Vec<u8>)) {
    change(&mut world.native);
    change(&mut world.device);
    world.settle_medium();
    world.version += 1;
    world.step(Event::ForeignChange { key: KEY });
}

#[test]
fn what_a_stranger_cut_off_is_not_written_again() {
    let mut world = half_lost();
    strange(&mut world, |copy| copy.truncate(9000));
    // The kernel reports a loss before the driver has looked where the file ends.
    world.end_sync();
    assert_eq!(world.counts.syncs_failed, 1);
    world.flat.truncate(9000);
    world.from.truncate(9000);
    world.settle();
    assert_eq!(world.device.len(), 9000);
}

/// Two at once: the end that was asked for first may be wrong.
#[test]
fn what_is_cut_twice_is_not_written_again() {
    let mut world = half_lost();
    strange(&mut world, |copy| copy.truncate(10_000));
    world.end_sync();
    strange(&mut world, |copy| copy.truncate(4096));
    assert_eq!(world.stats, 1);
    world.stats = 0;
    world.step(Event::Stat {
        file: FILE,
        size: ByteCount(10_000),
        version: world.version - 1,
        is_fresh: false,
    });
    assert_eq!(world.stats, 1, "it is asked again");
    world.flat.truncate(4096);
    world.from.truncate(4096);
    world.settle();
    assert_eq!(world.device.len(), 4096);
}

#[test]
fn what_a_stranger_wrote_elsewhere_stays_when_what_was_lost_is_written_again() {
    let mut world = half_lost();
    world.flat[5000..5010].fill(77);
    strange(&mut world, |copy| copy[5000..5010].fill(77));
    world.end_sync();
    assert_eq!(world.counts.syncs_failed, 1);
    world.settle();
    assert!(world.device == world.flat);
}

/// The other program's bytes cannot be told from those that a disk has had there all along.
#[test]
fn over_what_a_stranger_wrote_to_the_very_bytes_that_were_lost_ours_come_back() {
    let mut world = half_lost();
    strange(&mut world, |copy| copy[9000..9010].fill(77));
    world.end_sync();
    world.settle();
    assert_eq!(world.device[9000..9010], world.flat[9000..9010]);
}

#[test]
fn who_would_change_the_file_itself_comes_after_what_was_lost() {
    let mut world = half_lost();
    world.hold(1);
    world.wait(Duration::from_ms(200));
    // The client gets the failure, and may ask again.
    assert_eq!((world.counts.holds, world.counts.holds_refused), (0, 1));
    world.write_all_back();
    world.hold(1);
    world.wait(Duration::from_ms(500));
    assert_eq!(world.counts.holds, 1);
}

#[test]
fn a_page_in_the_kernels_cache_while_a_sync_fails_is_written_again_too() {
    let mut world = quiet();
    world.has_failed = true;
    world.write(0, ByteRange::new(100, 50));
    world.write_back(Ok(()));
    world.write(1, ByteRange::new(5000, 50));
    while world.ios.is_empty() {
        world.now = world.now + Duration::from_ms(20);
        world.step(Event::Timer);
    }
    // It is in the kernel's cache and lost from there before the driver reports the end of the
    // write.
    let Some(Io::Write(io, parts, bytes)) = world.ios.pop() else {
        panic!("a write");
    };
    world.do_write(&io, &parts, &bytes);
    world.lose();
    world.sync(2);
    world.hold(2);
    world.wait(Duration::from_ms(100));
    let result = Ok(io.range.length);
    world.server.hurry_loose(|_, _, _| true);
    world.step(Event::Timer);
    world.end_sync();
    assert_eq!(world.counts.syncs_failed, 1);
    world.step(Event::IoDone { io: io.io, result });
    world.settle();
    assert!(world.device == world.flat);
}

#[test]
fn a_lane_waits_for_what_is_loose_in_it_and_nothing_else_does() {
    let mut world = quiet();
    world.write(0, ByteRange::new(100, 50));
    world.write_back(Ok(()));
    let (session, lane, _) = world.clients.remove(0);
    world.step(Event::SessionClosed { session });
    assert!(world.lanes.contains_key(&lane) && world.held() == 1);
    assert_eq!(world.server.writes().used_bytes, ByteCount(0));
    world.wait(Duration::from_s(1));
    assert!(!world.lanes.contains_key(&lane) && world.held() == 0);
}

/// Nor is it taken for clean when the server ends and a client writes over all loose bytes, and on.
/// Found by the simulator's torture, seed 8000, round 70.
#[test]
fn a_file_is_not_clean_when_what_is_loose_in_it_is_written_over_while_the_server_ends() {
    let mut world = quiet();
    world.has_failed = true;
    world.write(0, ByteRange::new(1000, 2000));
    world.step(Event::PolicyChanged(Policy {
        write_age: Duration::ZERO,
        ..Policy::default()
    }));
    world.write_all_back();
    let is_loose = |world: &World| world.server.files[&FILE].writing.is_loose;
    assert!(is_loose(&world));
    let settles = world.settles;
    // The world itself checks whether a clean file has the length that doors show.
    world.write(1, ByteRange::new(0, 12_288));
    assert!(world.is_dirty() && !is_loose(&world));
    assert_eq!(world.settles, settles, "there is something to be written");
    world.settle();
}

/// Two writes past the kernel's cache, under way at once. Real torture, seed 900, round 15, found
/// it on ext4 and a disk that failed: old bytes were read, and nothing would have written them
/// again.
fn two_past() -> (World, Vec<IoWrite>) {
    let mut world = quiet();
    world.has_failed = true;
    world.falls_back_lazily = false;
    world.write(0, ByteRange::new(0, 8192));
    world.write(1, ByteRange::new(65_536, 8192));
    while world.ios.is_empty() {
        world.now = world.now + Duration::from_ms(20);
        world.step(Event::Timer);
    }
    let writes = core::mem::take(&mut world.ios).into_iter();
    let writes = writes.map(|io| {
        let Io::Write(io, parts, bytes) = io else {
            panic!("nobody reads");
        };
        world.falls_back = true;
        world.do_write(&io, &parts, &bytes);
        io
    });
    let writes: Vec<IoWrite> = writes.collect();
    assert_eq!(writes.len(), 2);
    let file = world.server.files.get_mut(&FILE).expect("it is open");
    file.writing.falls_back = true;
    (world, writes)
}

fn done(world: &mut World, io: &IoWrite) {
    let result = Ok(io.range.length);
    world.step(Event::IoDone { io: io.io, result });
}

#[test]
fn what_fell_back_into_the_kernels_cache_and_was_lost_there_is_written_again_and_all_that_was_under_way()
 {
    let (mut world, writes) = two_past();
    world.lose();
    let lost = Some(Errno::IO);
    world.step(Event::FellBack {
        io: writes[0].io,
        lost,
    });
    writes.iter().for_each(|io| done(&mut world, io));
    assert!(world.device != world.flat && world.is_dirty());
    // It has its records all the while, and no client gets an error yet: another program may have
    // written to a page at that moment.
    let records = world.lanes.values().map(|lane| lane.records.len());
    assert_eq!(records.sum::<usize>(), 2);
    world.sync(0);
    assert_eq!((world.counts.syncs, world.counts.syncs_refused), (0, 0));
    world.write_all_back();
    assert!(world.device == world.flat);
}

/// As a failing disk does it.
#[test]
fn who_syncs_is_told_when_the_kernel_keeps_nothing_for_the_third_time() {
    let (mut world, writes) = two_past();
    let lost = Some(Errno::IO);
    for _ in 0..u32::from(LOST_IN_A_ROW) {
        world.step(Event::FellBack {
            io: writes[0].io,
            lost,
        });
    }
    writes.iter().for_each(|io| done(&mut world, io));
    assert!(world.is_dirty());
    world.sync(0);
    assert_eq!((world.counts.syncs, world.counts.syncs_refused), (0, 1));
    world.write_all_back();
    assert!(world.device == world.flat);
    assert_eq!(world.server.files[&FILE].writing.lost_count, 0);
}

/// The reason for its fallback is gone with that. A daemon that dies before the kernel has reported
/// the outcome would have lost all of it.
#[test]
fn what_falls_back_for_the_first_time_has_its_record_until_it_has_gone_past_the_cache() {
    let (mut world, writes) = two_past();
    let file = world.server.files.get_mut(&FILE).expect("it is open");
    file.writing.falls_back = false;
    world.step(Event::FellBack {
        io: writes[0].io,
        lost: None,
    });
    done(&mut world, &writes[0]);
    let records = world.lanes.values().map(|lane| lane.records.len());
    assert!(world.is_dirty() && records.sum::<usize>() == 2);
    world.lose();
    world.write_back(Ok(()));
    assert!(!world.server.files[&FILE].writing.falls_back);
    let range = writes[0].range.start.0 as usize..writes[0].range.end() as usize;
    assert!(world.device[range.clone()] == world.flat[range]);
}

#[test]
fn what_fell_back_into_the_kernels_cache_is_kept_until_a_sync_covers_it() {
    let (mut world, writes) = two_past();
    for io in &writes {
        world.step(Event::FellBack {
            io: io.io,
            lost: None,
        });
        done(&mut world, io);
    }
    assert!(!world.is_dirty() && world.held() == 4);
    world.lose();
    world.sync(0);
    world.end_sync();
    assert_eq!((world.counts.syncs, world.counts.syncs_refused), (0, 1));
    world.write_all_back();
    world.sync(0);
    world.end_sync();
    assert!(world.device == world.flat && world.counts.syncs == 1 && world.held() == 0);
}

#[test]
fn nothing_else_is_told_of_a_write_that_is_over() {
    let (mut world, writes) = two_past();
    writes.iter().for_each(|io| done(&mut world, io));
    let lost = Some(Errno::IO);
    world.step(Event::FellBack {
        io: writes[0].io,
        lost,
    });
    world.step(Event::FellBack {
        io: IoId(u64::MAX),
        lost,
    });
    assert!(!world.is_dirty());
}

/// The kernel reports it to no other sync, and a client has written over the bytes that would be
/// written again.
#[test]
fn who_asks_while_a_write_out_fails_is_told_although_nothing_is_loose_any_more() {
    let mut world = quiet();
    world.has_failed = true;
    world.write(0, ByteRange::new(1000, 100));
    world.write_back(Ok(()));
    world.server.hurry_loose(|_, _, _| true);
    world.step(Event::Timer);
    assert_eq!(world.syncs.len(), 1);
    world.sync(0);
    world.write(1, ByteRange::new(900, 300));
    assert!(!world.server.files[&FILE].writing.is_loose);
    world.lose();
    world.end_sync();
    assert_eq!((world.counts.syncs, world.counts.syncs_refused), (0, 1));
    world.write_all_back();
}

/// The kernel reports the bytes that it could not write before a client reads them, or the client
/// gets the device's older ones.
#[test]
fn what_a_reader_was_told_of_is_written_again_and_a_sync_under_way_covers_nothing() {
    let mut world = half_lost();
    world.sync(0);
    assert_eq!(world.syncs.len(), 1);
    world.has_lost = false;
    world.step(Event::NotKept {
        file: FILE,
        errno: Errno::IO,
    });
    assert!(world.server.is_dirty(FILE), "a read finds them with us now");
    world.end_sync();
    // A client that waits for the sync waits on, and gets the result of the second try.
    assert_eq!((world.counts.syncs, world.counts.syncs_refused), (0, 0));
    world.write_all_back();
    world.end_sync();
    assert_eq!((world.counts.syncs, world.counts.syncs_refused), (1, 0));
    assert!(world.device == world.flat);
}

/// Here and there in a file, each read served before the next one. Returns for each whether the
/// client had to read by itself.
fn read_here_and_there(world: &mut World) -> Vec<bool> {
    let places = (0..60).map(|nth| nth * 37 % 61 * SLOT as u64);
    let reads = places.map(|at| {
        let (request, plain) = (world.fresh(), world.counts.plain);
        world.ask_read(1, request, ByteRange::new(at, 4096));
        while !world.ios.is_empty() {
            world.end_io();
        }
        world.now = world.now + Duration::from_ms(50);
        world.counts.plain > plain
    });
    reads.collect()
}

/// A client that reads by itself gets no report that the kernel has lost these bytes (real torture,
/// seed 14200, round 38).
#[test]
fn no_read_is_left_to_a_kernel_that_may_have_lost_what_is_to_be_read() {
    let mut world = quiet();
    let length = 61 * SLOT;
    (world.native, world.flat, world.from) = (vec![1; length], vec![1; length], vec![0; length]);
    world.durable = world.native.clone();
    world.keep_what_is_lost();
    world.boot();
    world.has_failed = true;
    world.write(0, ByteRange::new(1000, 10_000));
    world.write_all_back();
    assert!(world.held() > 0, "something is loose");
    world.lose();
    assert!(!read_here_and_there(&mut world).contains(&true));
    // As soon as the device has all of it the kernel serves such readers as well as we do.
    world.sync(0);
    world.end_sync();
    world.write_all_back();
    world.wait(Duration::from_s(40));
    assert_eq!(world.held(), 0);
    assert!(read_here_and_there(&mut world).contains(&true));
}

fn doubt_the_sync(world: &mut World) {
    assert_eq!(world.syncs.len(), 1, "it is asked for, and once");
    world.syncs.clear();
    world.has_lost = false;
    world.step(Event::SyncDoubted {
        file: FILE,
        errno: Errno::IO,
    });
}

/// The kernel reported a page that it could not take out of its cache, behind another write.
#[test]
fn who_syncs_hears_nothing_of_an_error_that_may_be_no_disks() {
    let mut world = half_lost();
    world.sync(0);
    doubt_the_sync(&mut world);
    // The bytes that the error may be about are written again before the next try.
    assert!(world.is_dirty() && world.syncs.is_empty());
    world.write_all_back();
    world.end_sync();
    assert_eq!((world.counts.syncs, world.counts.syncs_refused), (1, 0));
    assert!(world.device == world.flat && world.held() == 0);
}

/// A read got the report before each of three.
#[test]
fn who_syncs_is_told_when_a_sync_covers_nothing_for_the_third_time() {
    let mut world = half_lost();
    world.sync(0);
    for _ in 0..LOST_IN_A_ROW {
        assert_eq!(world.counts.syncs_refused, 0);
        world.has_lost = false;
        world.step(Event::NotKept {
            file: FILE,
            errno: Errno::IO,
        });
        world.end_sync();
        world.write_all_back();
    }
    assert_eq!((world.counts.syncs, world.counts.syncs_refused), (0, 1));
}

fn change_by_itself(world: &mut World, length: u64) {
    change_or_resize(world, length, true);
}

fn change_or_resize(world: &mut World, length: u64, has_bytes: bool) {
    world.step(Event::Changed {
        session: SessionId(1),
        request: RequestId(999_999),
        key: KEY,
        range: ByteRange::new(0, length),
        has_bytes,
    });
}

/// The server cannot write those again.
#[test]
fn who_syncs_is_told_of_an_error_that_may_be_about_what_a_client_wrote_by_itself() {
    let mut world = half_lost();
    // As a door does that has nothing to report.
    change_by_itself(&mut world, 0);
    world.sync(0);
    doubt_the_sync(&mut world);
    assert_eq!(world.counts.syncs_refused, 0);
    world.write_all_back();
    change_by_itself(&mut world, 1);
    doubt_the_sync(&mut world);
    assert_eq!(world.counts.syncs_refused, 1);
    world.write_all_back();
    world.sync(0);
    world.end_sync();
    assert_eq!((world.counts.syncs, world.counts.syncs_refused), (1, 1));
    // That has covered it.
    world.write(0, ByteRange::new(1000, 10));
    world.write_all_back();
    world.sync(0);
    doubt_the_sync(&mut world);
    assert_eq!((world.counts.syncs, world.counts.syncs_refused), (1, 1));
}

/// As copying programs do: the length first, then the bytes.
#[test]
fn who_syncs_hears_nothing_of_an_error_that_is_no_disks_behind_a_change_of_length_alone() {
    let mut world = half_lost();
    change_or_resize(&mut world, u64::MAX, false);
    world.sync(0);
    doubt_the_sync(&mut world);
    assert_eq!(world.counts.syncs_refused, 0);
    world.step(Event::Stat {
        file: FILE,
        size: ByteCount(world.native.len() as u64),
        version: world.version,
        is_fresh: false,
    });
    world.write_all_back();
    world.end_sync();
    assert_eq!((world.counts.syncs, world.counts.syncs_refused), (1, 0));
    assert!(world.device == world.flat);
}

#[test]
fn a_look_that_is_doubted_is_taken_again_for_nobody() {
    let mut world = half_lost();
    world.server.hurry_loose(|_, _, _| true);
    world.step(Event::Timer);
    doubt_the_sync(&mut world);
    assert!(world.is_dirty() && world.syncs.is_empty());
    assert!(world.server.writing_out.is_empty());
    world.write_all_back();
    world.sync(0);
    world.end_sync();
    assert!(world.device == world.flat && world.counts.syncs == 1);
}

/// It counted on the older write to get there.
#[test]
fn a_sync_waits_for_what_was_written_over_what_is_doubtful() {
    let (mut world, writes) = two_past();
    world.sync(2);
    world.write(0, ByteRange::new(0, 8192));
    world.step(Event::FellBack {
        io: writes[1].io,
        lost: None,
    });
    done(&mut world, &writes[1]);
    // A sync that a client asked for before has failed.
    let file = world.server.files.get_mut(&FILE).expect("it is open");
    file.writing.failed_syncs += 1;
    world.step(Event::FellBack {
        io: writes[0].io,
        lost: None,
    });
    done(&mut world, &writes[0]);
    world.end_sync();
    assert_eq!(world.counts.syncs, 0);
    world.write_all_back();
    world.end_sync();
    assert_eq!(world.counts.syncs, 1);
}
