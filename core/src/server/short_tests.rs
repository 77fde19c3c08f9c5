// SPDX-License-Identifier: Apache-2.0
//! The bytes that a device gives of a file that grows meanwhile, in the world of `write_tests`.

use super::*;

impl World {
    /// The device has read all of its requests, but has not reported that yet.
    fn read_early(&mut self) -> Vec<Io> {
        let (mut reads, others) = core::mem::take(&mut self.ios)
            .into_iter()
            .partition::<Vec<_>, _>(|io| matches!(io, Io::Read(..)));
        for io in &mut reads {
            if let Io::Read(io, _, early) = io {
                *early = Some(self.seen_by(io));
            }
        }
        self.ios = others;
        reads
    }

    /// It reports.
    fn tell(&mut self, reads: Vec<Io>) {
        for io in reads {
            let Io::Read(io, slots, early) = io else {
                continue;
            };
            let read = self.do_read(&io, &slots, &early.unwrap_or_default());
            let result = Ok(ByteCount(read));
            self.step(Event::IoDone { io: io.io, result });
        }
    }

    /// Answer the question how long the file is.
    pub(super) fn answer_stat(&mut self) {
        self.stats -= 1;
        let (size, version) = (ByteCount(self.native.len() as u64), self.version);
        self.step(Event::Stat {
            file: FILE,
            size,
            version,
            is_fresh: false,
        });
    }

    /// Client `index` asks to read.
    pub(super) fn ask_read(&mut self, index: usize, request: u64, range: ByteRange) {
        let session = self.clients[index].0;
        self.clients[index].2 = Doing::Reading {
            request,
            range,
            then: self.flat.clone(),
            since: Vec::new(),
            lengths: vec![self.flat.len() as u64],
        };
        self.step(Event::Read {
            session,
            handle: HANDLE,
            request: RequestId(request),
            range,
            sent: self.now,
        });
    }
}

/// The device read it before it grew: that is no device that returns less than it has, however
/// often it happens.
#[test]
fn whoever_reads_the_end_of_a_file_that_grows_all_the_time_is_answered() {
    let mut world = quiet();
    let page = 2 * PAGE_BYTES;
    world.write(0, ByteRange::new(page, 100));
    world.settle();
    let request = world.fresh();
    world.ask_read(1, request, ByteRange::new(page, PAGE_BYTES));
    let mut raced = 0;
    for step in 1..10 {
        while world.stats > 0 {
            world.answer_stat();
        }
        let reads = world.read_early();
        raced += reads.len();
        world.write(0, ByteRange::new(page + step * 100, 100));
        world.sync(0);
        while !matches!(world.clients[0].2, Doing::Nothing) {
            world.write_back(Ok(()));
            world.end_sync();
        }
        world.tell(reads);
    }
    world.settle();
    assert!(raced > 5, "{raced}");
    assert!(matches!(world.clients[1].2, Doing::Nothing));
}
