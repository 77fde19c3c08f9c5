// SPDX-License-Identifier: Apache-2.0
//! Writes by io_uring, for the Python programs of these tests: Python's library has no word for it.

/// A class that goes before such a program, which has `checked` and `libc`. Offsets are those of
/// `struct io_uring_params` and `io_uring_sqe` (io_uring_setup(2)).
pub(crate) const RING: &str = r#"
import ctypes, mmap, struct

class Ring:
    """One request at a time of io_uring."""
    def __init__(self):
        params = ctypes.create_string_buffer(120)
        self.fd = checked(libc.syscall(425, 4, params), "io_uring_setup")
        word = lambda at: struct.unpack_from("=I", params, at)[0]
        entries, answers = word(0), word(4)
        self.tail, self.mask, self.array = word(44), word(48), word(64)
        self.head, self.answer_mask, self.answer = word(80), word(88), word(100)
        self.queue = mmap.mmap(self.fd, self.array + 4 * entries, offset=0)
        self.answered = mmap.mmap(self.fd, self.answer + 16 * answers, offset=0x8000000)
        self.requests = mmap.mmap(self.fd, 64 * entries, offset=0x10000000)

    def write(self, to, at, address, length):
        get = lambda memory, place: struct.unpack_from("=I", memory, place)[0]
        tail = get(self.queue, self.tail)
        index = tail & get(self.queue, self.mask)
        struct.pack_into("=BBHiQQIIQ24x", self.requests, 64 * index, 23, 0, 0, to, at, address, length, 0, 0)
        struct.pack_into("=I", self.queue, self.array + 4 * index, index)
        struct.pack_into("=I", self.queue, self.tail, tail + 1)
        checked(libc.syscall(426, self.fd, 1, 1, 1, None, ctypes.c_long(0)), "io_uring_enter")
        head = get(self.answered, self.head)
        place = self.answer + 16 * (head & get(self.answered, self.answer_mask))
        done = struct.unpack_from("=i", self.answered, place + 8)[0]
        struct.pack_into("=I", self.answered, self.head, head + 1)
        if done != length:
            raise OSError(5, "a write by io_uring: %d" % done)
"#;
