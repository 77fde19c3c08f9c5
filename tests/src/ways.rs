// SPDX-License-Identifier: Apache-2.0
//! A program that reads and writes files in each way a program can: through the kernel's cache,
//! past it, by AIO, by io_uring, by mappings, by calls that change bytes without bringing any.

use crate::needs;
use crate::ring::RING;
use rustix::fs::OFlags;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Each line that it hears is a call; it says what came of that in one line.
const HANDS: &str = r#"
import ctypes, mmap, os, platform, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
SETUP, GETEVENTS, SUBMIT = (0, 4, 2) if platform.machine() == "aarch64" else (206, 208, 209)
PIECE = 65536
context = ctypes.c_ulong(0)
files, maps, rings = {}, {}, []

def checked(result, what):
    if result < 0:
        raise OSError(ctypes.get_errno(), what)
    return result

def filled(length, byte):
    memory = mmap.mmap(-1, length)
    memory.write(bytes([byte]) * length)
    return memory

def distinct(memory):
    return bytes(sorted(set(bytes(memory)))).hex()

def aio(fd, at, memory):
    length = len(memory)
    if context.value == 0:
        checked(libc.syscall(SETUP, 64, ctypes.byref(context)), "io_setup")
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    blocks = [ctypes.create_string_buffer(struct.pack("=QIIHhIQQqQII", 0, 0, 0, 1, 0, fd, address + o, min(PIECE, length - o), at + o, 0, 0, 0))
              for o in range(0, length, PIECE)]
    pointers = (ctypes.c_void_p * len(blocks))(*[ctypes.addressof(b) for b in blocks])
    sent = checked(libc.syscall(SUBMIT, context, ctypes.c_long(len(blocks)), pointers), "io_submit")
    events = ctypes.create_string_buffer(32 * sent)
    got = checked(libc.syscall(GETEVENTS, context, ctypes.c_long(sent), ctypes.c_long(sent), events, None), "io_getevents")
    for number in range(got):
        result = struct.unpack_from("=q", events, 32 * number + 16)[0]
        if result <= 0:
            raise OSError(-result, "a write")
    assert sent == len(blocks) and got == sent, (sent, got)

def call(word, name, at, length, what):
    if word == "open":
        files[name] = os.open(what, at)
        return "done"
    if word == "close":
        if name in maps:
            maps.pop(name).close()
        os.close(files.pop(name))
        return "done"
    fd = files[name]
    if word == "map":
        maps[name] = mmap.mmap(fd, 0, prot=mmap.PROT_READ | (mmap.PROT_WRITE if at else 0))
    elif word == "write":
        assert os.pwrite(fd, filled(length, int(what)), at) == length
    elif word == "aio":
        aio(fd, at, filled(length, int(what)))
    elif word == "ring":
        if not rings:
            rings.append(Ring())
        memory = filled(length, int(what))
        rings[0].write(fd, at, ctypes.addressof(ctypes.c_char.from_buffer(memory)), length)
    elif word == "splice":
        pipe = os.pipe()
        done = 0
        while done < length:
            sent = os.write(pipe[1], bytes([int(what)]) * min(PIECE, length - done))
            while sent > 0:
                moved = os.splice(pipe[0], fd, sent, offset_dst=at + done)
                sent, done = sent - moved, done + moved
        os.close(pipe[0])
        os.close(pipe[1])
    elif word == "store":
        maps[name][at:at + length] = bytes([int(what)]) * length
    elif word == "punch" or word == "zero":
        mode = 3 if word == "punch" else 0x10
        checked(libc.fallocate(fd, mode, ctypes.c_long(at), ctypes.c_long(length)), word)
    elif word == "cut":
        size = os.fstat(fd).st_size
        os.ftruncate(fd, at)
        os.ftruncate(fd, size)
    elif word == "copy":
        done = 0
        while done < length:
            done += os.copy_file_range(files[what], fd, length - done, done, at + done)
    elif word == "see":
        memory = mmap.mmap(-1, length)
        assert os.preadv(fd, [memory], at) == length
        return distinct(memory)
    elif word == "mapped":
        return distinct(maps[name][at:at + length])
    elif word == "sent":
        to = os.memfd_create("sent")
        done = 0
        while done < length:
            done += os.sendfile(to, fd, at + done, length - done)
        seen = os.pread(to, length, 0)
        os.close(to)
        return distinct(seen)
    return "done"

for line in sys.stdin:
    word, name, at, length, what = line.rstrip("\n").split("\t", 4)
    try:
        print(call(word, name, int(at), int(length), what), flush=True)
    except Exception as error:
        print("failed:", repr(error).replace("\n", " "), flush=True)
"#;

/// Such a program. It ends when it is dropped.
#[derive(Debug)]
pub struct Hands {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

/// A range of a file. Units: bytes.
pub type Range = (u64, u64);

/// Each way to change the bytes of a range: the names under which [`Hands::open_to_change`] opens
/// the file.
pub const WRITERS: [&str; 14] = [
    "cached",
    "write only",
    "direct",
    "aio",
    "aio, write only",
    "aio, direct",
    "ring",
    "ring, direct",
    "spliced",
    "mapping",
    "copied from a file",
    "punched",
    "zeroed",
    "cut and made longer",
];

/// Each way to read a range: the call, and the name under which [`Hands::open_to_read`] opens the
/// file.
pub const READERS: [(&str, &str); 5] = [
    ("see", "old open"),
    ("see", "old direct"),
    ("sent", "old open"),
    ("mapped", "old mapping"),
    ("see", "beside the writer"),
];

fn flags_of(way: &str) -> OFlags {
    match way {
        "write only" | "aio, write only" => OFlags::WRONLY,
        "direct" | "aio, direct" | "ring, direct" => OFlags::RDWR | OFlags::DIRECT,
        _ => OFlags::RDWR,
    }
}

impl Hands {
    /// Needs python3.
    pub fn new() -> Hands {
        let mut child = Command::new(needs::path_of("python3"))
            .args(["-c", &format!("{RING}{HANDS}")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 starts");
        Hands {
            input: child.stdin.take(),
            output: BufReader::new(child.stdout.take().expect("it is piped")),
            child,
        }
    }

    /// Its answer to a call.
    ///
    /// Errors   the sentence of what failed
    pub fn ask(
        &mut self,
        word: &str,
        name: &str,
        (at, length): Range,
        what: &str,
    ) -> Result<String, String> {
        let input = self.input.as_mut().expect("it lives");
        writeln!(input, "{word}\t{name}\t{at}\t{length}\t{what}").expect("it hears");
        let mut line = String::new();
        self.output.read_line(&mut line).expect("it says so");
        let line = line.trim_end();
        match line.strip_prefix("failed: ") {
            Some(error) => Err(format!("{word} {name}: {error}")),
            None => Ok(line.to_owned()),
        }
    }

    /// A call that succeeds.
    pub fn does(&mut self, word: &str, name: &str, range: Range, what: &str) -> String {
        self.ask(word, name, range, what)
            .unwrap_or_else(|error| panic!("{error}"))
    }

    /// Opened with these flags, under this name.
    pub fn open(&mut self, name: &str, path: &Path, flags: OFlags) {
        let path = path.to_str().expect("text");
        self.does("open", name, (u64::from(flags.bits()), 0), path);
    }

    /// Closed, mapping and all.
    pub fn close(&mut self, name: &str) {
        self.does("close", name, (0, 0), "-");
    }

    /// The file opened for each of [`READERS`], the first of them with these flags.
    pub fn open_to_read(&mut self, path: &Path, first: OFlags) {
        self.open("old open", path, first);
        self.open("old direct", path, OFlags::RDONLY | OFlags::DIRECT);
        self.open("old mapping", path, OFlags::RDONLY);
        self.does("map", "old mapping", (0, 0), "-");
        self.open("beside the writer", path, OFlags::RDWR);
    }

    /// Closed for all of [`READERS`].
    pub fn close_readers(&mut self) {
        for name in ["old open", "old direct", "old mapping", "beside the writer"] {
            self.close(name);
        }
    }

    /// The file opened for one of [`WRITERS`], so that the open is of the kind that the mount makes
    /// it.
    pub fn open_to_change(&mut self, way: &str, path: &Path) {
        self.open(way, path, flags_of(way));
        if way == "mapping" {
            self.does("map", way, (1, 0), "-");
        }
    }

    /// A range changed to this byte in one of [`WRITERS`]; a cut goes to the end of the file. For a
    /// copy another file is open as "source".
    ///
    /// Returns   the byte that is there now: 0 where the way brings none
    pub fn change(&mut self, way: &str, (at, length): Range, byte: u8) -> u8 {
        let what = byte.to_string();
        let word = match way {
            "cached" | "write only" | "direct" => "write",
            "aio" | "aio, write only" | "aio, direct" => "aio",
            "ring" | "ring, direct" => "ring",
            "spliced" => "splice",
            "mapping" => "store",
            "copied from a file" => {
                self.does("write", "source", (0, length), &what);
                self.does("copy", way, (at, length), "source");
                return byte;
            }
            "punched" => "punch",
            "zeroed" => "zero",
            _ => "cut",
        };
        self.does(word, way, (at, length), &what);
        if matches!(word, "punch" | "zero" | "cut") {
            0
        } else {
            byte
        }
    }
}

impl Default for Hands {
    fn default() -> Hands {
        Hands::new()
    }
}

impl Drop for Hands {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.wait();
    }
}
