// SPDX-License-Identifier: Apache-2.0
//! `rushes_core::format`'s structures as the bytes of packets and the words of rings.
//!
//! Pure: bytes in, values or a sentence out. Defines the form of a packet once, for both ends.

use rushes_core::format::{
    ConnectMessage, FoundMessage, MAGIC, MessageHead, NAME_BYTES_MAX, OpenMessage, PATH_BYTES_MAX,
    REPLY_SLOTS_MAX, RefusedMessage, Reply, Request, StationMessage, VERSION, WantedMessage,
    WelcomeMessage, message,
};
use rushes_core::units::FilePart;
use std::fmt;
use std::io;

/// Why this side gives a peer up.
#[derive(Debug)]
pub enum PeerError {
    /// It closed the session, or died.
    Closed,
    /// It speaks another version.
    Version {
        /// Its version.
        theirs: u32,
    },
    /// It broke a rule: a sentence that says what was read and what was expected.
    Broken(String),
    /// The socket failed.
    Io(io::Error),
}

impl fmt::Display for PeerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PeerError::Closed => write!(f, "the peer closed the session"),
            PeerError::Version { theirs } => write!(
                f,
                "the peer speaks version {theirs} of the session protocol, this side version {VERSION}; \
                 install door and daemon of one release"
            ),
            PeerError::Broken(what) => write!(f, "{what}"),
            PeerError::Io(error) => write!(f, "the session socket failed: {error}"),
        }
    }
}

impl std::error::Error for PeerError {}

impl From<io::Error> for PeerError {
    fn from(error: io::Error) -> PeerError {
        match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => PeerError::Closed,
            _ => PeerError::Io(error),
        }
    }
}

pub(crate) fn broken(what: impl Into<String>) -> PeerError {
    PeerError::Broken(what.into())
}

/// Longest packet of either direction. Units: bytes.
pub(crate) const PACKET_BYTES_MAX: usize = size_of::<OpenMessage>() + PATH_BYTES_MAX;

/// Little-endian integers one after the other.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*taken)
    }
    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }
    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }
}

fn head(message: u32) -> Vec<u8> {
    let head = MessageHead {
        magic: MAGIC,
        version: VERSION,
        message,
        reserved: 0,
    };
    let mut bytes = Vec::with_capacity(size_of::<ConnectMessage>());
    for word in [head.magic, head.version, head.message, head.reserved] {
        bytes.extend(word.to_le_bytes());
    }
    bytes
}

/// Check a packet's head, and return the message's kind.
pub(crate) fn read_head(bytes: &[u8]) -> Result<u32, PeerError> {
    let mut reader = Reader(bytes);
    let (Some(magic), Some(version), Some(message), Some(reserved)) =
        (reader.u32(), reader.u32(), reader.u32(), reader.u32())
    else {
        return Err(broken(format!(
            "read a packet of {} bytes; expected a head of {}",
            bytes.len(),
            size_of::<MessageHead>()
        )));
    };
    if magic != MAGIC {
        return Err(broken(format!(
            "read a packet that starts with {magic:#010x}; expected {MAGIC:#010x}"
        )));
    }
    if version != VERSION {
        return Err(PeerError::Version { theirs: version });
    }
    if reserved != 0 {
        return Err(broken(format!(
            "read {reserved:#x} in the reserved word of a head; expected zero"
        )));
    }
    Ok(message)
}

/// The part behind the head of a message that must be `kind` and exactly `size` long.
fn body<'a>(bytes: &'a [u8], kind: u32, name: &str, size: usize) -> Result<Reader<'a>, PeerError> {
    let found = read_head(bytes)?;
    if found != kind {
        return Err(broken(format!(
            "read message {found}; expected {kind} ({name})"
        )));
    }
    if bytes.len() != size {
        return Err(broken(format!(
            "read a {name} message of {} bytes; expected {size}",
            bytes.len()
        )));
    }
    Ok(Reader(&bytes[size_of::<MessageHead>()..]))
}

/// The caller has checked the size: None cannot happen, and is a broken packet all the same.
fn whole<T>(value: Option<T>) -> Result<T, PeerError> {
    value.ok_or_else(|| broken("read a packet that ends early"))
}

/// A client's description of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Connect {
    /// One of `rushes_core::format::door`.
    pub door: u32,
    /// The share's name.
    pub share: String,
    /// The user that is connected.
    pub user: String,
    /// From where.
    pub client: String,
    /// Which pool's door; 0: none. See `rushes_core::format::ConnectMessage`.
    pub pool: u64,
}

fn name_field(name: &str) -> [u8; NAME_BYTES_MAX] {
    let mut field = [0; NAME_BYTES_MAX];
    // Cut at a character: the other side expects UTF-8.
    let mut length = name.len().min(NAME_BYTES_MAX);
    while !name.is_char_boundary(length) {
        length -= 1;
    }
    field[..length].copy_from_slice(&name.as_bytes()[..length]);
    field
}

fn name_of(field: &[u8], what: &str) -> Result<String, PeerError> {
    let length = field
        .iter()
        .position(|&byte| byte == 0)
        .unwrap_or(field.len());
    match std::str::from_utf8(&field[..length]) {
        Ok(name) if !name.chars().any(char::is_control) => Ok(name.to_owned()),
        _ => Err(broken(format!(
            "read a {what} that is not printable UTF-8: {:?}",
            String::from_utf8_lossy(&field[..length])
        ))),
    }
}

pub(crate) fn write_connect(connect: &Connect) -> Vec<u8> {
    let mut bytes = head(message::CONNECT);
    bytes.extend(connect.door.to_le_bytes());
    bytes.extend(0u32.to_le_bytes());
    for name in [&connect.share, &connect.user, &connect.client] {
        bytes.extend(name_field(name));
    }
    bytes.extend(connect.pool.to_le_bytes());
    bytes
}

pub(crate) fn read_connect(bytes: &[u8]) -> Result<Connect, PeerError> {
    let size = size_of::<ConnectMessage>();
    let mut reader = body(bytes, message::CONNECT, "CONNECT", size)?;
    let door = whole(reader.u32())?;
    let reserved = whole(reader.u32())?;
    if reserved != 0 {
        return Err(broken("read a CONNECT whose reserved word is not zero"));
    }
    let share: [u8; NAME_BYTES_MAX] = whole(reader.take())?;
    let user: [u8; NAME_BYTES_MAX] = whole(reader.take())?;
    let client: [u8; NAME_BYTES_MAX] = whole(reader.take())?;
    Ok(Connect {
        door,
        share: name_of(&share, "share name")?,
        user: name_of(&user, "user name")?,
        client: name_of(&client, "client name")?,
        pool: whole(reader.u64())?,
    })
}

pub(crate) fn write_welcome(welcome: &WelcomeMessage) -> Vec<u8> {
    let mut bytes = head(message::WELCOME);
    for word in [
        welcome.session,
        welcome.slot_count,
        welcome.slot_bytes,
        welcome.ring_entries,
    ] {
        bytes.extend(word.to_le_bytes());
    }
    for word in [
        welcome.read_bytes_max,
        welcome.write_bytes_max,
        welcome.secret,
    ] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(welcome.lane.to_le_bytes());
    bytes.extend(welcome.lane_pages.to_le_bytes());
    bytes
}

pub(crate) fn read_welcome(bytes: &[u8]) -> Result<WelcomeMessage, PeerError> {
    let size = size_of::<WelcomeMessage>();
    let mut reader = body(bytes, message::WELCOME, "WELCOME", size)?;
    Ok(WelcomeMessage {
        head: MessageHead {
            magic: MAGIC,
            version: VERSION,
            message: message::WELCOME,
            reserved: 0,
        },
        session: whole(reader.u32())?,
        slot_count: whole(reader.u32())?,
        slot_bytes: whole(reader.u32())?,
        ring_entries: whole(reader.u32())?,
        read_bytes_max: whole(reader.u64())?,
        write_bytes_max: whole(reader.u64())?,
        secret: whole(reader.u64())?,
        lane: whole(reader.u32())?,
        lane_pages: whole(reader.u32())?,
    })
}

const REASON_BYTES_MAX: usize = 232;

pub(crate) fn write_refused(errno: u32, reason: &str) -> Vec<u8> {
    let mut bytes = head(message::REFUSED);
    bytes.extend(errno.to_le_bytes());
    bytes.extend(0u32.to_le_bytes());
    let mut field = [0; REASON_BYTES_MAX];
    // One byte is left for the NUL, so that C can print it in place.
    let mut length = reason.len().min(REASON_BYTES_MAX - 1);
    while !reason.is_char_boundary(length) {
        length -= 1;
    }
    field[..length].copy_from_slice(&reason.as_bytes()[..length]);
    bytes.extend(field);
    bytes
}

/// Errno and sentence.
pub(crate) fn read_refused(bytes: &[u8]) -> Result<(u32, String), PeerError> {
    let size = size_of::<RefusedMessage>();
    let mut reader = body(bytes, message::REFUSED, "REFUSED", size)?;
    let errno = whole(reader.u32())?;
    let _reserved = whole(reader.u32())?;
    let field: [u8; REASON_BYTES_MAX] = whole(reader.take())?;
    let length = field
        .iter()
        .position(|&byte| byte == 0)
        .unwrap_or(field.len());
    Ok((
        errno,
        String::from_utf8_lossy(&field[..length]).into_owned(),
    ))
}

/// The user whose quota and rights count for writes to a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Writer {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

pub(crate) fn write_open(
    handle: u32,
    path_bytes: usize,
    writer: Writer,
    part: FilePart,
) -> Vec<u8> {
    let mut bytes = head(message::OPEN);
    // A path has at most PATH_BYTES_MAX, as the caller checked.
    for word in [handle, path_bytes as u32, writer.uid, writer.gid] {
        bytes.extend(word.to_le_bytes());
    }
    for word in [part.index(), part.count()] {
        bytes.extend(word.to_le_bytes());
    }
    bytes
}

/// Handle, writer, part and path. The path is relative, without "..", NUL or empty parts.
pub(crate) fn read_open(bytes: &[u8]) -> Result<(u32, Writer, FilePart, &[u8]), PeerError> {
    let fixed = size_of::<OpenMessage>();
    if bytes.len() < fixed {
        read_head(bytes)?;
        return Err(broken(format!(
            "read an OPEN message of {} bytes; expected at least {fixed}",
            bytes.len()
        )));
    }
    let mut reader = body(&bytes[..fixed], message::OPEN, "OPEN", fixed)?;
    let handle = whole(reader.u32())?;
    let path_bytes = whole(reader.u32())? as usize;
    let writer = Writer {
        uid: whole(reader.u32())?,
        gid: whole(reader.u32())?,
    };
    let (index, count) = (whole(reader.u32())?, whole(reader.u32())?);
    let part = FilePart::new(index, count).ok_or_else(|| {
        broken(format!(
            "read an OPEN message for part {index} of {count}; expected one below the count, and at most {} of them",
            FilePart::COUNT_MAX
        ))
    })?;
    let path = &bytes[fixed..];
    if path.len() != path_bytes || path_bytes > PATH_BYTES_MAX {
        return Err(broken(format!(
            "read an OPEN message with {} bytes of path; expected the {path_bytes} it names, at most {PATH_BYTES_MAX}",
            path.len()
        )));
    }
    if !path_is_plain(path) {
        return Err(broken(format!(
            "read the path {:?}; expected one below the share's root, without \"..\"",
            String::from_utf8_lossy(path)
        )));
    }
    Ok((handle, writer, part, path))
}

/// The head of a WANTED; its path follows, which has at most PATH_BYTES_MAX, as the caller checked.
pub(crate) fn write_wanted(number: u64, path_bytes: usize) -> Vec<u8> {
    let mut bytes = head(message::WANTED);
    bytes.extend(number.to_le_bytes());
    bytes.extend((path_bytes as u32).to_le_bytes());
    bytes.extend(0u32.to_le_bytes());
    bytes
}

/// Number and path of a WANTED.
pub(crate) fn read_wanted(bytes: &[u8]) -> Result<(u64, &[u8]), PeerError> {
    let fixed = size_of::<WantedMessage>();
    let Some((said, path)) = bytes.split_at_checked(fixed) else {
        read_head(bytes)?;
        return Err(broken(format!(
            "read a WANTED message of {} bytes; expected at least {fixed}",
            bytes.len()
        )));
    };
    let mut reader = body(said, message::WANTED, "WANTED", fixed)?;
    let number = whole(reader.u64())?;
    let path_bytes = whole(reader.u32())? as usize;
    let reserved = whole(reader.u32())?;
    if path.len() != path_bytes || reserved != 0 || !path_is_plain(path) {
        return Err(broken(format!(
            "read a WANTED message with {} bytes of path; expected the {path_bytes} it names, a path below a root without \"..\"",
            path.len()
        )));
    }
    Ok((number, path))
}

pub(crate) fn write_found(number: u64, errno: u32) -> Vec<u8> {
    let mut bytes = head(message::FOUND);
    bytes.extend(number.to_le_bytes());
    bytes.extend(errno.to_le_bytes());
    bytes.extend(0u32.to_le_bytes());
    bytes
}

/// Number and errno of a FOUND.
pub(crate) fn read_found(bytes: &[u8]) -> Result<(u64, u32), PeerError> {
    let size = size_of::<FoundMessage>();
    let mut reader = body(bytes, message::FOUND, "FOUND", size)?;
    let number = whole(reader.u64())?;
    let errno = whole(reader.u32())?;
    if whole(reader.u32())? != 0 {
        return Err(broken("read a FOUND whose reserved word is not zero"));
    }
    Ok((number, errno))
}

/// The user and client of a handle. Replaces control characters, as a program may have any name.
pub(crate) fn write_station(handle: u32, user: &str, client: &str) -> Vec<u8> {
    let mut bytes = head(message::STATION);
    bytes.extend(handle.to_le_bytes());
    bytes.extend(0u32.to_le_bytes());
    for name in [user, client] {
        let name: String = name
            .chars()
            .map(|c| if c.is_control() { '?' } else { c })
            .collect();
        bytes.extend(name_field(&name));
    }
    bytes
}

/// Handle, user and client of a STATION.
pub(crate) fn read_station(bytes: &[u8]) -> Result<(u32, String, String), PeerError> {
    let size = size_of::<StationMessage>();
    let mut reader = body(bytes, message::STATION, "STATION", size)?;
    let handle = whole(reader.u32())?;
    if whole(reader.u32())? != 0 {
        return Err(broken("read a STATION whose reserved word is not zero"));
    }
    let user: [u8; NAME_BYTES_MAX] = whole(reader.take())?;
    let client: [u8; NAME_BYTES_MAX] = whole(reader.take())?;
    Ok((
        handle,
        name_of(&user, "user name")?,
        name_of(&client, "client name")?,
    ))
}

pub(crate) fn path_is_plain(path: &[u8]) -> bool {
    !path.is_empty()
        && !path.contains(&0)
        && path
            .split(|&byte| byte == b'/')
            .all(|part| !part.is_empty() && part != b"..")
}

/// Low word first.
fn join(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

fn low(word: u64) -> u32 {
    word as u32
}

fn high(word: u64) -> u32 {
    (word >> 32) as u32
}

pub(crate) const REQUEST_WORDS: usize = size_of::<Request>() / 8;
pub(crate) const REPLY_WORDS: usize = size_of::<Reply>() / 8;

pub(crate) fn request_words(request: &Request) -> [u64; REQUEST_WORDS] {
    [
        request.id,
        join(request.op, request.handle),
        request.offset,
        request.length,
        request.device,
        request.inode,
        request.sent_ns,
        request.reserved,
    ]
}

pub(crate) fn request_of(words: [u64; REQUEST_WORDS]) -> Request {
    Request {
        id: words[0],
        op: low(words[1]),
        handle: high(words[1]),
        offset: words[2],
        length: words[3],
        device: words[4],
        inode: words[5],
        sent_ns: words[6],
        reserved: words[7],
    }
}

pub(crate) fn reply_words(reply: &Reply) -> [u64; REPLY_WORDS] {
    let mut words = [0; REPLY_WORDS];
    words[0] = reply.id;
    words[1] = join(reply.errno, reply.slot_count);
    words[2] = reply.length;
    words[3] = join(reply.first_offset, reply.reserved);
    for (word, pair) in words[4..].iter_mut().zip(reply.slots.chunks_exact(2)) {
        *word = join(pair[0], pair[1]);
    }
    words
}

pub(crate) fn reply_of(words: [u64; REPLY_WORDS]) -> Reply {
    let mut slots = [0; REPLY_SLOTS_MAX];
    for (pair, word) in slots.chunks_exact_mut(2).zip(&words[4..]) {
        pair[0] = low(*word);
        pair[1] = high(*word);
    }
    Reply {
        id: words[0],
        errno: low(words[1]),
        slot_count: high(words[1]),
        length: words[2],
        first_offset: low(words[3]),
        reserved: high(words[3]),
        slots,
        padding: [0; 4],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The words must be the bytes of the `repr(C)` structure, which other languages see.
    fn bytes_of<T: Copy>(value: &T) -> Vec<u8> {
        // SAFETY: these structures have no padding (asserted by their sizes in core/format).
        unsafe { std::slice::from_raw_parts((&raw const *value).cast::<u8>(), size_of::<T>()) }
            .to_vec()
    }

    fn bytes_of_words(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn words_are_the_bytes_of_the_structures() {
        let request = Request {
            id: 1 << 40,
            op: 2,
            handle: 3,
            offset: 4,
            length: 5,
            device: 6,
            inode: 7,
            sent_ns: 8,
            reserved: 9,
        };
        assert_eq!(bytes_of(&request), bytes_of_words(&request_words(&request)));
        assert_eq!(request_of(request_words(&request)), request);
        let reply = Reply {
            id: 1 << 50,
            errno: 1,
            slot_count: 2,
            length: 3,
            first_offset: 4,
            reserved: 5,
            slots: std::array::from_fn(|n| n as u32 + 100),
            padding: [0; 4],
        };
        assert_eq!(bytes_of(&reply), bytes_of_words(&reply_words(&reply)));
        assert_eq!(reply_of(reply_words(&reply)), reply);
    }

    #[test]
    fn messages_have_the_sizes_and_fields_of_the_structures() {
        let connect = Connect {
            door: 1,
            share: "media".into(),
            user: "eva".into(),
            client: "10.0.0.7".into(),
            pool: 0x0123_4567_89ab_cdef,
        };
        let bytes = write_connect(&connect);
        assert_eq!(bytes.len(), size_of::<ConnectMessage>());
        assert_eq!(read_connect(&bytes).unwrap(), connect);
        let welcome = WelcomeMessage {
            head: MessageHead {
                magic: MAGIC,
                version: VERSION,
                message: message::WELCOME,
                reserved: 0,
            },
            session: 7,
            slot_count: 8,
            slot_bytes: 9,
            ring_entries: 10,
            read_bytes_max: 1 << 40,
            write_bytes_max: 10,
            secret: 11,
            lane: 12,
            lane_pages: 13,
        };
        assert_eq!(write_welcome(&welcome), bytes_of(&welcome));
        assert_eq!(read_welcome(&bytes_of(&welcome)).unwrap(), welcome);
        let long = "é".repeat(200);
        let refused = write_refused(13, &long);
        assert_eq!(refused.len(), size_of::<RefusedMessage>());
        let (errno, reason) = read_refused(&refused).unwrap();
        assert_eq!(errno, 13);
        assert!(long.starts_with(&reason) && reason.len() == 230);
        let writer = Writer { uid: 6, gid: 7 };
        let part = FilePart::new(8, 9).unwrap();
        let mut open = write_open(4, 5, writer, part);
        let same = OpenMessage {
            head: MessageHead {
                magic: MAGIC,
                version: VERSION,
                message: message::OPEN,
                reserved: 0,
            },
            handle: 4,
            path_bytes: 5,
            uid: 6,
            gid: 7,
            part: 8,
            part_count: 9,
        };
        assert_eq!(open, bytes_of(&same));
        open.extend(b"a/b.c");
        assert_eq!(
            read_open(&open).unwrap(),
            (4, writer, part, b"a/b.c".as_slice())
        );
        let mut wanted = write_wanted(1 << 40, 5);
        assert_eq!(wanted.len(), size_of::<WantedMessage>());
        wanted.extend(b"a/b.c");
        assert_eq!(
            read_wanted(&wanted).unwrap(),
            (1 << 40, b"a/b.c".as_slice())
        );
        let found = write_found(1 << 41, 2);
        assert_eq!(found.len(), size_of::<FoundMessage>());
        assert_eq!(read_found(&found).unwrap(), (1 << 41, 2));
        let station = write_station(9, "anna", &"ü".repeat(40));
        assert_eq!(station.len(), size_of::<StationMessage>());
        let read = read_station(&station).unwrap();
        assert_eq!(read, (9, "anna".into(), "ü".repeat(32)));
        // A program may be called anything.
        let read = read_station(&write_station(9, "", "a\n\u{1b}[2Jb")).unwrap();
        assert_eq!(read.2, "a??[2Jb");
    }

    #[test]
    fn names_too_long_are_cut_at_a_character() {
        let connect = Connect {
            user: "ü".repeat(40),
            ..Connect::default()
        };
        assert_eq!(
            read_connect(&write_connect(&connect)).unwrap().user,
            "ü".repeat(32)
        );
        let connect = Connect {
            user: format!("x{}", "ü".repeat(40)),
            ..Connect::default()
        };
        assert_eq!(
            read_connect(&write_connect(&connect)).unwrap().user,
            format!("x{}", "ü".repeat(31))
        );
    }

    #[test]
    fn paths_that_lead_out_are_refused() {
        for path in ["", "/etc/passwd", "..", "a/../b", "a//b", "a/", "a\0b"] {
            assert!(!path_is_plain(path.as_bytes()), "{path:?}");
        }
        for path in ["a", "a/b", "..a", "a/...", ".", "a b/ü"] {
            assert!(path_is_plain(path.as_bytes()), "{path:?}");
        }
    }

    #[test]
    fn wrong_packets_say_what_was_read_and_expected() {
        let check = |bytes: &[u8], expected: &str| {
            let said = read_connect(bytes).unwrap_err().to_string();
            assert!(said.contains(expected), "{said:?} has no {expected:?}");
        };
        let good = write_connect(&Connect::default());
        check(b"", "0 bytes");
        check(&good[..20], "20 bytes; expected 224");
        check(b"GET / HTTP/1.1\r\n\r\n", "expected 0x31485352");
        let mut changed = good.clone();
        changed[4] = 9;
        check(&changed, "version 9");
        let mut changed = good.clone();
        changed[8] = 4;
        check(&changed, "read message 4; expected 1");
        let mut changed = good.clone();
        changed[24] = 0xff;
        check(&changed, "not printable");
    }

    #[test]
    fn parts_that_are_none_are_refused() {
        let named = |index: u32, count: u32| {
            let mut open = write_open(1, 1, Writer::default(), FilePart::WHOLE);
            open[32..36].copy_from_slice(&index.to_le_bytes());
            open[36..40].copy_from_slice(&count.to_le_bytes());
            open.push(b'a');
            let said = read_open(&open).map(|(_, _, part, _)| (part.index(), part.count()));
            said.map_err(|error| error.to_string())
        };
        for (index, count) in [
            (0, 1),
            (3, 4),
            (FilePart::COUNT_MAX - 1, FilePart::COUNT_MAX),
        ] {
            assert_eq!(named(index, count), Ok((index, count)));
        }
        for (index, count) in [
            (0, 0),
            (1, 1),
            (4, 4),
            (0, FilePart::COUNT_MAX + 1),
            (u32::MAX, u32::MAX),
            (u32::MAX, 4),
        ] {
            let said = named(index, count).unwrap_err();
            let expected = format!("part {index} of {count}; expected one below");
            assert!(said.contains(&expected), "{said}");
        }
    }

    proptest! {
        #[test]
        fn no_packet_makes_us_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), valid_head: bool, kind in 0u32..8) {
            let mut packet = if valid_head { head(kind) } else { Vec::new() };
            packet.extend(bytes);
            let _ = read_connect(&packet);
            let _ = read_welcome(&packet);
            let _ = read_refused(&packet);
            let _ = read_found(&packet);
            if let Ok((_, path)) = read_wanted(&packet) {
                prop_assert!(path_is_plain(path));
            }
            if let Ok((_, _, part, path)) = read_open(&packet) {
                prop_assert!(part.index() < part.count() && part.count() <= FilePart::COUNT_MAX);
                prop_assert!(path_is_plain(path));
            }
        }
    }
}
