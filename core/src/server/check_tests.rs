// SPDX-License-Identifier: Apache-2.0
//! A state that contradicts itself is found, in any part.

use super::*;

fn odd(spoil: impl FnOnce(&mut Server)) -> String {
    let mut server = Server::new(Limits::default(), Policy::default());
    let mut actions = Actions::default();
    let session = SessionId(1);
    let events = [
        Event::SessionOpened {
            session,
            label: SessionLabel::default(),
        },
        Event::Opening {
            session,
            handle: HandleId(1),
            path: "a.mov".into(),
            part: FilePart::default(),
        },
        Event::LaneAdded {
            lane: LaneId(1),
            session: Some(session),
            page_count: 64,
            record_count: 8,
        },
    ];
    for event in events {
        server.step(Instant(1), event, &mut actions);
    }
    assert_eq!(server.check(), Vec::<String>::new());
    spoil(&mut server);
    server.check().join("; ")
}

#[track_caller]
fn finds(what: &str, spoil: impl FnOnce(&mut Server)) {
    let told = odd(spoil);
    assert!(
        told.contains(what),
        "expected \"{what}\", was told \"{told}\""
    );
}

#[test]
fn a_count_that_is_wrong_is_told() {
    finds("handles of session 1", |server| {
        server
            .sessions
            .get_mut(&SessionId(1))
            .expect("it is open")
            .handle_count = 2;
    });
    finds("bytes in the hands of session 1", |server| {
        server
            .sessions
            .get_mut(&SessionId(1))
            .expect("it is open")
            .pinned_bytes = 1;
    });
    finds("what is promised to all", |server| server.promised.rate = 1);
    finds("files that are being written out", |server| {
        server.writing_out.push(FileId(1))
    });
}

#[test]
fn what_nobody_has_any_more_is_told() {
    finds("buffer 0 counts", |server| {
        let block = crate::cache::Block {
            file: FileId(1),
            number: 0,
        };
        let (slot, _) = server.cache.take(block).expect("a free buffer");
        server.cache.pin(slot);
    });
    finds("pages of lane 1", |server| {
        let lane = server.lanes.get_mut(&LaneId(1)).expect("it was added");
        lane.pages.take(1, 64).expect("a free page");
    });
    finds("records of lane 1", |server| {
        server
            .lanes
            .get_mut(&LaneId(1))
            .expect("it was added")
            .records
            .pop();
    });
    finds("of sessions that are gone", |server| {
        server.sessions.remove(&SessionId(1));
    });
}
