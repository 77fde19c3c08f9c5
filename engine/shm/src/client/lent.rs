// SPDX-License-Identifier: Apache-2.0
//! Bytes that are lent to another thread: it reads them in place, and the lender waits until it is
//! done with them.

use std::convert::Infallible;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// Bytes whose lender waits until this is dropped.
#[derive(Debug)]
pub struct Lent {
    start: *const u8,
    length: usize,
    /// Goes with it; nothing is ever sent.
    _held: SyncSender<Infallible>,
}

// SAFETY: it is a shared reference to bytes, which may be read by any thread, and they stay where
// they are as long as it lives (`lend`).
unsafe impl Send for Lent {}

impl Lent {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: start and length are those of a slice that `lend` borrows until this is dropped.
        unsafe { std::slice::from_raw_parts(self.start, self.length) }
    }
}

/// Waits for the bytes to come back, however `work` ended.
struct Back(Receiver<Infallible>);

impl Drop for Back {
    fn drop(&mut self) {
        // An error: the other end is gone.
        let _ = self.0.recv();
    }
}

/// Call `work` with bytes that may go to another thread; return when they are back.
pub fn lend<T>(bytes: &[u8], work: impl FnOnce(Lent) -> T) -> T {
    let (held, gone) = sync_channel(0);
    let _back = Back(gone);
    work(Lent {
        start: bytes.as_ptr(),
        length: bytes.len(),
        _held: held,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, mpsc};

    #[test]
    fn who_lends_waits_until_they_are_back() {
        let is_read = Arc::new(AtomicBool::new(false));
        let (give, take) = mpsc::channel::<Lent>();
        let (told, heard) = mpsc::channel();
        let reader = {
            let is_read = Arc::clone(&is_read);
            std::thread::spawn(move || {
                let lent = take.recv().expect("lent");
                // The lender has its answer, and has nothing else to do than to wait for them.
                told.send(()).expect("the lender waits");
                for _ in 0..1000 {
                    std::thread::yield_now();
                }
                assert_eq!(lent.bytes(), b"bytes");
                is_read.store(true, Ordering::Release);
            })
        };
        let bytes = b"bytes".to_vec();
        let answer = lend(&bytes, |lent| {
            give.send(lent).expect("the lender takes them");
            heard.recv().expect("the lender said so");
            5
        });
        assert!(is_read.load(Ordering::Acquire), "they are still read");
        assert_eq!(answer, 5);
        reader.join().expect("no panic");
    }

    #[test]
    fn what_nobody_takes_is_back_at_once() {
        assert_eq!(lend(b"bytes", |lent| lent.bytes().len()), 5);
        assert_eq!(lend(b"", |lent| lent.bytes().len()), 0);
    }
}
