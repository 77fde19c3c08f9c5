// SPDX-License-Identifier: Apache-2.0
//! Clients that come, open the file, close it and leave, for the world of `write_tests`; and the
//! file without a user, which may be forgotten.

use super::*;

impl World {
    pub(super) fn join(&mut self) {
        let session = SessionId(self.next_session);
        self.next_session += 1;
        let lane = LaneId(self.next_lane);
        self.next_lane += 1;
        self.lanes.insert(
            lane,
            LaneMemory {
                bytes: vec![0xDD; (u64::from(LANE_PAGES) * PAGE_BYTES) as usize],
                records: BTreeMap::new(),
            },
        );
        self.clients.push((session, lane, Doing::Nothing));
        self.step(Event::SessionOpened {
            session,
            label: SessionLabel::default(),
        });
        self.step(Event::LaneAdded {
            lane,
            session: Some(session),
            page_count: LANE_PAGES,
            record_count: RECORDS,
        });
        self.open(session, HANDLE, Some(self.way));
    }

    pub(super) fn leave(&mut self) {
        let index = self.random.below(self.clients.len() as u64) as usize;
        let (session, _, _) = self.clients.swap_remove(index);
        self.closed.retain(|closed| *closed != session);
        self.step(Event::SessionClosed { session });
        self.join();
    }

    fn open(&mut self, session: SessionId, handle: HandleId, way: Option<WriteWay>) {
        self.step(Event::Opening {
            session,
            handle,
            path: "take.mov".to_string(),
            part: FilePart::WHOLE,
        });
        let facts = Ok(FileFacts {
            way,
            ..self.facts()
        });
        self.step(Event::Opened {
            session,
            handle,
            facts,
        });
    }

    /// Another client opens the file; the look at it for that open found this.
    pub(super) fn open_again(&mut self, way: Option<WriteWay>) {
        let (session, handle) = (self.clients[0].0, HandleId(u32::MAX));
        self.open(session, handle, way);
        self.step(Event::Closed { session, handle });
    }

    /// A client that has closed the file opens it again one day; one that has it open may close it,
    /// also while it waits.
    pub(super) fn open_or_close(&mut self, session: SessionId) {
        let place = self.closed.iter().position(|closed| *closed == session);
        match place {
            Some(place) if self.random.one_in(20) => {
                self.closed.swap_remove(place);
                self.open(session, HANDLE, Some(self.way));
            }
            None if self.random.one_in(40) => self.close(session),
            _ => {}
        }
    }

    fn close(&mut self, session: SessionId) {
        self.closed.push(session);
        self.step(Event::Closed {
            session,
            handle: HANDLE,
        });
    }

    /// All clients are done with the file.
    pub(super) fn close_all(&mut self) {
        let sessions: Vec<SessionId> = self.clients.iter().map(|client| client.0).collect();
        for session in sessions {
            if !self.closed.contains(&session) {
                self.close(session);
            }
        }
    }

    /// The driver closes it: no answer about it counts any more, and it gives back the blocks that
    /// it had reserved.
    pub(super) fn forget(&mut self) {
        self.counts.forgotten += 1;
        self.reserves.clear();
        self.reserved_end = 0;
        self.syncs.clear();
        self.stats = 0;
        self.settles = 0;
    }
}

/// Bytes are cached of it: they would be, for ever.
#[test]
fn a_file_whose_last_user_leaves_while_he_waits_for_a_sync_may_be_forgotten() {
    let mut world = quiet();
    world.write(0, ByteRange::new(0, 2 * PAGE_BYTES));
    world.write_back(Ok(()));
    let (session, request) = (world.clients[0].0, world.fresh());
    world.step(Event::Read {
        session,
        handle: HANDLE,
        request: RequestId(request),
        range: ByteRange::new(0, 100),
        sent: world.now,
    });
    world.end_io();
    world.step(Event::ReadEnd {
        session,
        request: RequestId(request),
    });
    for index in [1, 2] {
        world.close(world.clients[index].0);
    }
    world.sync(0);
    assert_eq!(world.syncs.len(), 1, "the driver has it");
    world.step(Event::SessionClosed { session });
    world.step(Event::Crowded);
    // Its time was still being set.
    let version = world.version;
    world.step(Event::Settled {
        file: FILE,
        version,
    });
    assert_eq!(world.counts.forgotten, 1);
}
