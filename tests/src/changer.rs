// SPDX-License-Identifier: Apache-2.0
//! A program on the server that changes a file of a share in every way there is, as it is told.
//!
//! Python, since half of these ways (mappings, requests handed to the kernel without waiting) want
//! pointers.

use crate::needs;
use crate::ring::RING;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Longest file that it handles: it maps so much of it once, and keeps that.
pub const LENGTH_MAX: u64 = 8 << 20;

/// `WAY OFFSET LENGTH STAMP`: bytes are the stamp again and again, the first at OFFSET.
const CHANGER: &str = r#"
import ctypes, fcntl, mmap, os, struct, sys
path, other, most = sys.argv[1], sys.argv[2], int(sys.argv[3])
libc = ctypes.CDLL(None, use_errno=True)
fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
os.fchmod(fd, 0o666)
end = os.open(path, os.O_WRONLY | os.O_APPEND)
bare = os.open(path, os.O_RDWR | os.O_DIRECT)
donor = os.open(other, os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(fd, most)
memory = mmap.mmap(fd, most)
os.ftruncate(fd, 0)
page = mmap.mmap(-1, 2 << 20)
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
context = ctypes.c_ulong(0)
SETUP, GET, SUBMIT = {"x86_64": (206, 208, 209), "aarch64": (0, 4, 2)}[os.uname().machine]

def checked(result, what):
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, what + ": " + os.strerror(code))
    return result

checked(libc.syscall(SETUP, 8, ctypes.byref(context)), "io_setup")

def allocate(mode, at, length):
    checked(libc.fallocate(fd, mode, ctypes.c_long(at), ctypes.c_long(length)), "fallocate")

def asynchronous(to, at, length):
    block = ctypes.create_string_buffer(struct.pack("=QIIHhIQQqQII", 0, 0, 0, 1, 0, to, address, length, at, 0, 0, 0))
    one = ctypes.c_void_p(ctypes.addressof(block))
    checked(libc.syscall(SUBMIT, context, ctypes.c_long(1), ctypes.byref(one)), "io_submit")
    event = ctypes.create_string_buffer(32)
    checked(libc.syscall(GET, context, ctypes.c_long(1), ctypes.c_long(1), event, None), "io_getevents")
    done = struct.unpack("=QQqq", event.raw)[2]
    if done != length:
        raise OSError(5, "asynchronous write: %d" % done)

ring = Ring()
pipe = os.pipe()

def given(data):
    os.ftruncate(donor, 0)
    os.pwrite(donor, data, 0)

def change(way, at, length, stamp):
    data = (stamp * (length // len(stamp) + 1))[:length]
    if way == "write":
        os.pwrite(fd, data, at)
    elif way == "append":
        os.write(end, data)
    elif way == "direct":
        page[:length] = data
        os.pwritev(bare, [memoryview(page)[:length]], at)
    elif way == "asynchronous direct":
        page[:length] = data
        asynchronous(bare, at, length)
    elif way == "asynchronous":
        page[:length] = data
        asynchronous(fd, at, length)
    elif way == "ring" or way == "direct ring":
        page[:length] = data
        ring.write(bare if way == "direct ring" else fd, at, address, length)
    elif way == "splice":
        done = 0
        while done < length:
            sent = os.write(pipe[1], data[done:done + 65536])
            while sent > 0:
                moved = os.splice(pipe[0], fd, sent, offset_dst=at + done)
                sent, done = sent - moved, done + moved
    elif way == "store":
        memory[at:at + length] = data
    elif way == "sync":
        memory.flush()
    elif way == "truncate":
        os.ftruncate(fd, at)
    elif way == "punch":
        allocate(3, at, length)
    elif way == "zero":
        allocate(16, at, length)
    elif way == "collapse":
        allocate(8, at, length)
    elif way == "insert":
        allocate(32, at, length)
    elif way == "extend":
        allocate(0, at, length)
    elif way == "clone":
        given(data)
        fcntl.ioctl(fd, 0x4020940d, struct.pack("=qQQQ", donor, 0, length, at))
    elif way == "copy":
        given(data)
        done = 0
        while done < length:  # (XFS shares whole blocks, and ends there.)
            moved = os.copy_file_range(donor, fd, length - done, done, at + done)
            if moved == 0:
                raise OSError(5, "short copy")
            done += moved
    elif way == "sendfile":
        given(data)
        os.lseek(fd, at, 0)
        if os.sendfile(fd, donor, 0, length) != length:
            raise OSError(5, "short sendfile")
    elif way == "renew":
        again = os.open(path, os.O_WRONLY | os.O_TRUNC)
        os.write(again, data)
        os.close(again)
    else:
        raise OSError(22, way)

print("ready", flush=True)
for line in sys.stdin:
    way, at, length, stamp = line.rstrip("\n").split("\t")
    try:
        change(way, int(at), int(length), stamp.encode())
        print("done", flush=True)
    except OSError as error:
        print(error, flush=True)
"#;

/// Such a program, with a file of its own. It ends when it is dropped.
#[derive(Debug)]
pub struct Changer {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

/// One change.
#[derive(Clone, Debug)]
pub struct Change {
    /// How.
    pub way: &'static str,
    /// Where.
    pub at: u64,
    /// How much.
    pub length: u64,
    /// With what, again and again.
    pub stamp: String,
}

impl Changer {
    /// `path`: its file. `donor`: one on the same file system, from which it copies. Needs python3.
    pub fn new(path: &Path, donor: &Path) -> Changer {
        let mut child = Command::new(needs::path_of("python3"))
            .args(["-c", &format!("{RING}{CHANGER}")])
            .args([path, donor])
            .arg(LENGTH_MAX.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 starts");
        let mut changer = Changer {
            input: child.stdin.take(),
            output: BufReader::new(child.stdout.take().expect("it is piped")),
            child,
        };
        assert_eq!(changer.line(), "ready");
        changer
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("it says so");
        line.trim_end().to_owned()
    }

    /// It begins to change its file.
    pub fn begin(&mut self, change: &Change) {
        let input = self.input.as_mut().expect("it lives");
        writeln!(
            input,
            "{}\t{}\t{}\t{}",
            change.way, change.at, change.length, change.stamp
        )
        .expect("it hears");
    }

    /// It has done so.
    ///
    /// Errors   what its call said
    pub fn end(&mut self) -> Result<(), String> {
        match self.line().as_str() {
            "done" => Ok(()),
            other => Err(other.to_owned()),
        }
    }
}

impl Drop for Changer {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.wait();
    }
}
