// SPDX-License-Identifier: Apache-2.0
//! Requests of commands to the mount, over the socket in the catalogue's folder. care.rs does the
//! work.

use crate::door::Door;
use rushes_pool::{Asked, Listener, Told};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

/// Between two looks whether the door closes. Units: ms.
const LOOK_EVERY_MS: i64 = 250;

/// Listens, in a thread of its own, until the door closes. When this returns, commands find it.
pub(crate) fn start(door: &Arc<Door>) -> Option<JoinHandle<()>> {
    let listener = Listener::new(door.pool.catalogue().path());
    let hearing = listener.and_then(|listener| {
        let door = Arc::clone(door);
        std::thread::Builder::new()
            .name(String::from("control"))
            .spawn(move || door.hear(&listener))
    });
    hearing
        .inspect_err(|error| {
            tracing::warn!(
                "this mount cannot take commands that change the pool's members: {error}; they are refused until it is unmounted"
            );
        })
        .ok()
}

impl Door {
    fn hear(&self, listener: &Listener) {
        let limit = Timespec {
            tv_sec: 0,
            tv_nsec: LOOK_EVERY_MS * 1_000_000,
        };
        std::thread::scope(|scope| {
            while !self.closing.load(Ordering::Acquire) {
                // Interrupted or not: look again.
                let _ = poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&limit));
                match listener.accept() {
                    Ok(Some(asked)) => drop(scope.spawn(move || self.answer(asked))),
                    Ok(None) => {}
                    Err(error) => {
                        tracing::warn!("cannot read a command: {error}");
                        // Out of descriptors, most likely: the same error would come again at once.
                        std::thread::sleep(Duration::from_millis(LOOK_EVERY_MS as u64));
                    }
                }
            }
        });
    }

    fn answer(&self, mut asked: Asked) {
        let last = match asked.request() {
            Ok(request) => {
                let asker = asked.asker();
                self.look_after(&request, asker, &mut |told| asked.tell(told))
            }
            Err(sentence) => Told::Refused { sentence },
        };
        asked.tell(&last);
    }
}
