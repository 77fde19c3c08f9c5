// SPDX-License-Identifier: Apache-2.0
//! The C face of the client, as `include/rushes_client.h` declares it.
//!
//! It lives inside other programs' processes: a panic here would be a bug of ours, and is caught
//! all the same; the session then counts as dead and its reads are Plain.

#![allow(non_camel_case_types, missing_docs, clippy::missing_safety_doc)]

use crate::client::{Client, ConnectError, FileHandle, ReadError, Ticket};
use crate::facts::FactsView;
use crate::layout::{Connect, Writer};
use libc::{c_char, c_int, c_void, dev_t, gid_t, ino_t, iovec, size_t, ssize_t, uid_t};
use rushes_core::format::REPLY_SLOTS_MAX;
use rushes_core::format::facts::known_generation;
use rushes_core::units::{Duration, FilePart};
use rushes_sys::handle::Handle;
use std::collections::HashSet;
use std::ffi::{CStr, CString, OsStr};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::{Mutex, PoisonError};

/// As in the header; below every -errno.
pub const RUSHES_PLAIN: ssize_t = -65536;

/// A session. C sees only its address.
pub struct rushes_client {
    client: Client,
    /// To connect again.
    socket_path: PathBuf,
    who: Connect,
    /// So that rushes_disconnect can free them, and nothing frees one twice.
    files: HashSet<*mut rushes_file>,
    /// A call panicked: trust nothing of the state any more.
    poisoned: bool,
}

/// A file of a session. C sees only its address.
pub struct rushes_file {
    client: *mut rushes_client,
    handle: FileHandle,
}

#[repr(C)]
pub struct rushes_lease {
    pub id: u64,
    pub length: size_t,
    pub iov_count: c_int,
    pub iov: [iovec; REPLY_SLOTS_MAX],
}

#[repr(C)]
pub struct rushes_fact {
    pub size: u64,
    pub changed_ns: i64,
    pub generation: u64,
}

#[repr(C)]
pub struct rushes_completion {
    pub private_data: *mut c_void,
    pub result: ssize_t,
}

fn result_of(result: Result<usize, ReadError>) -> ssize_t {
    match result {
        // A buffer is never longer than isize::MAX.
        Ok(bytes) => bytes as ssize_t,
        Err(ReadError::Plain) => RUSHES_PLAIN,
        Err(ReadError::Errno(errno)) => -(errno as ssize_t),
    }
}

impl rushes_client {
    /// Run `work` unless an earlier call panicked; `otherwise` if so, or if this one does.
    fn guarded<T>(&mut self, otherwise: T, work: impl FnOnce(&mut rushes_client) -> T) -> T {
        if self.poisoned {
            return otherwise;
        }
        match catch_unwind(AssertUnwindSafe(|| work(self))) {
            Ok(value) => value,
            Err(_) => {
                self.poisoned = true;
                otherwise
            }
        }
    }
}

/// A sentence that C may keep for ever. The same sentence is kept once, and at most 32 are.
fn lasting(sentence: String) -> *const c_char {
    static KEPT: Mutex<Vec<&'static CStr>> = Mutex::new(Vec::new());
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let bytes: Vec<u8> = sentence
        .into_bytes()
        .into_iter()
        .filter(|&byte| byte != 0)
        .collect();
    let Ok(sentence) = CString::new(bytes) else {
        return c"unknown".as_ptr();
    };
    if let Some(found) = kept.iter().find(|found| ***found == *sentence) {
        return found.as_ptr();
    }
    if kept.len() >= 32 {
        return c"the daemon refused; see its log".as_ptr();
    }
    let leaked: &'static CStr = Box::leak(sentence.into_boxed_c_str());
    kept.push(leaked);
    leaked.as_ptr()
}

fn reason_of(error: ConnectError) -> *const c_char {
    match error {
        ConnectError::NoDaemon(error) => match error.raw_os_error() {
            Some(libc::EACCES | libc::EPERM) => {
                c"not allowed to connect to the daemon's socket".as_ptr()
            }
            _ => c"no daemon listens on its socket".as_ptr(),
        },
        ConnectError::Silent => c"the daemon did not answer in time".as_ptr(),
        ConnectError::Version { .. } => {
            c"the daemon speaks another version; install door and daemon of one release".as_ptr()
        }
        ConnectError::Refused { reason, .. } => lasting(format!("the daemon refused: {reason}")),
        ConnectError::Broken(error) => lasting(format!("the daemon's answer is invalid: {error}")),
    }
}

/// ETIMEDOUT: a daemon is there, and may answer later.
fn errno_of(error: &ConnectError) -> c_int {
    match error {
        ConnectError::Silent => libc::ETIMEDOUT,
        // Its queue is full.
        ConnectError::NoDaemon(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
            libc::ETIMEDOUT
        }
        ConnectError::Refused { .. } => libc::EACCES,
        _ => libc::ECONNREFUSED,
    }
}

fn set_errno(errno: c_int) {
    // SAFETY: the C library's own, of this thread.
    unsafe { *libc::__errno_location() = errno };
}

/// # Safety
/// `text` is null or a NUL-terminated string.
unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

/// # Safety
/// As the header says; `reason` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_connect(
    socket_path: *const c_char,
    door: u32,
    share: *const c_char,
    user: *const c_char,
    address: *const c_char,
    patience_ms: u32,
    reason: *mut *const c_char,
) -> *mut rushes_client {
    let connected = catch_unwind(|| {
        if socket_path.is_null() {
            return Err((c"no socket path was given".as_ptr(), libc::EINVAL));
        }
        // SAFETY: the caller gives NUL-terminated strings.
        let (path, who) = unsafe {
            let who = Connect {
                door,
                share: text(share),
                user: text(user),
                client: text(address),
                ..Connect::default()
            };
            (CStr::from_ptr(socket_path), who)
        };
        let path = Path::new(OsStr::from_bytes(path.to_bytes()));
        match Client::connect_within(path, &who, Duration::from_ms(patience_ms.into())) {
            Ok(client) => Ok(Box::into_raw(Box::new(rushes_client {
                client,
                socket_path: path.to_path_buf(),
                who,
                files: HashSet::new(),
                poisoned: false,
            }))),
            Err(error) => {
                let errno = errno_of(&error);
                Err((reason_of(error), errno))
            }
        }
    });
    let (client, (why, errno)) = match connected {
        Ok(Ok(client)) => (client, (c"connected".as_ptr(), 0)),
        Ok(Err(why)) => (null_mut(), why),
        Err(_) => {
            let why = c"a fault of the client library".as_ptr();
            (null_mut(), (why, libc::EPROTO))
        }
    };
    if client.is_null() {
        set_errno(errno);
    }
    if !reason.is_null() {
        // SAFETY: the caller's promise.
        unsafe { *reason = why };
    }
    client
}

/// # Safety
/// `client` is null or of rushes_connect and not disconnected; its files are not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_disconnect(client: *mut rushes_client) {
    if client.is_null() {
        return;
    }
    // SAFETY: it was made by Box::into_raw and is given back once.
    let client = unsafe { Box::from_raw(client) };
    for &file in &client.files {
        // SAFETY: every address in the set is of Box::into_raw and not yet freed.
        drop(unsafe { Box::from_raw(file) });
    }
    let _ = catch_unwind(AssertUnwindSafe(|| drop(client)));
}

/// # Safety
/// `client` is null or a connected client.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_alive(client: *const rushes_client) -> bool {
    // SAFETY: the caller's promise.
    unsafe { client.as_ref() }.is_some_and(|client| !client.poisoned && client.client.alive())
}

/// # Safety
/// `client` is null or a connected client.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_heartbeat(client: *const rushes_client) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { client.as_ref() }.map_or(0, |client| client.client.heartbeat())
}

/// # Safety
/// `client` is a connected client; `fds` has room for two.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_event_fds(client: *const rushes_client, fds: *mut c_int) {
    // SAFETY: the caller's promise.
    let (client, fds) = unsafe { (&*client, std::slice::from_raw_parts_mut(fds, 2)) };
    for (place, fd) in fds.iter_mut().zip(client.client.event_fds()) {
        *place = fd.as_raw_fd();
    }
}

/// # Safety
/// `client` is null or a connected client; `path` a NUL-terminated string; `fd` open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_open(
    client: *mut rushes_client,
    fd: c_int,
    path: *const c_char,
    uid: uid_t,
    gid: gid_t,
) -> *mut rushes_file {
    // SAFETY: the caller's promise; only this thread uses the client.
    let Some(session) = (unsafe { client.as_mut() }) else {
        return null_mut();
    };
    if path.is_null() || fd < 0 {
        return null_mut();
    }
    // SAFETY: the caller's promise: a string, and an open descriptor that outlives the call.
    let (path, fd) = unsafe { (CStr::from_ptr(path).to_bytes(), BorrowedFd::borrow_raw(fd)) };
    session.guarded(null_mut(), |session| {
        let Some(handle) = session
            .client
            .open_for(fd, path, Writer { uid, gid }, FilePart::WHOLE)
        else {
            return null_mut();
        };
        let file = Box::into_raw(Box::new(rushes_file { client, handle }));
        session.files.insert(file);
        file
    })
}

/// The session and handle behind a file.
///
/// # Safety
/// `file` is null or an open file of a connected client, which only this thread uses.
unsafe fn session_of<'a>(file: *mut rushes_file) -> Option<(&'a mut rushes_client, FileHandle)> {
    // SAFETY: the caller's promise; a file's client outlives it.
    unsafe {
        let file = file.as_ref()?;
        Some((file.client.as_mut()?, file.handle))
    }
}

/// # Safety
/// `file` is null or an open file, not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_close(file: *mut rushes_file) {
    // SAFETY: the caller's promise.
    let Some((session, handle)) = (unsafe { session_of(file) }) else {
        return;
    };
    if session.files.remove(&file) {
        // SAFETY: made by Box::into_raw, and in the set until now.
        drop(unsafe { Box::from_raw(file) });
    }
    session.guarded((), |session| session.client.close(handle));
}

/// # Safety
/// `file` is null or an open file; `buffer` as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_read_send(
    file: *mut rushes_file,
    buffer: *mut c_void,
    length: size_t,
    offset: u64,
    private_data: *mut c_void,
) -> u64 {
    // SAFETY: the caller's promise.
    let Some((session, handle)) = (unsafe { session_of(file) }) else {
        return 0;
    };
    session.guarded(0, |session| {
        // SAFETY: the header's promise about the buffer is `read_send`'s.
        let ticket = unsafe {
            session
                .client
                .read_send(handle, buffer.cast(), length, offset, private_data as usize)
        };
        ticket.map_or(0, Ticket::number)
    })
}

/// # Safety
/// `client` is null or a connected client.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_request_cancel(client: *mut rushes_client, ticket: u64) {
    // SAFETY: the caller's promise.
    if let Some(session) = unsafe { client.as_mut() } {
        session.guarded((), |session| {
            session.client.cancel_request(Ticket::from_number(ticket))
        });
    }
}

/// # Safety
/// `client` is null or a connected client; `completions` has room for `completion_count`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_poll(
    client: *mut rushes_client,
    completions: *mut rushes_completion,
    completion_count: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(session) = (unsafe { client.as_mut() }) else {
        return 0;
    };
    session.guarded(0, |session| {
        let mut count = 0;
        while count < completion_count {
            let Some(finished) = session.client.poll() else {
                return count;
            };
            let completion = rushes_completion {
                private_data: finished.private_data as *mut c_void,
                result: result_of(finished.result),
            };
            // SAFETY: count < completion_count, for which there is room.
            unsafe { completions.add(count as usize).write(completion) };
            count += 1;
        }
        session.client.poll_pause();
        count
    })
}

/// # Safety
/// `file` is null or an open file; `buffer` is valid for writing `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_read(
    file: *mut rushes_file,
    buffer: *mut c_void,
    length: size_t,
    offset: u64,
) -> ssize_t {
    // SAFETY: the caller's promise.
    let Some((session, handle)) = (unsafe { session_of(file) }) else {
        return RUSHES_PLAIN;
    };
    session.guarded(RUSHES_PLAIN, |session| {
        // SAFETY: the caller's promise.
        result_of(unsafe {
            session
                .client
                .read_raw(handle, buffer.cast(), length, offset)
        })
    })
}

/// # Safety
/// `file` is null or an open file; `lease` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_read_begin(
    file: *mut rushes_file,
    length: size_t,
    offset: u64,
    lease: *mut rushes_lease,
) -> c_int {
    const PLAIN: c_int = RUSHES_PLAIN as c_int;
    // SAFETY: the caller's promise.
    let Some((session, handle)) = (unsafe { session_of(file) }) else {
        return PLAIN;
    };
    session.guarded(PLAIN, |session| {
        let given = match session.client.lease(handle, length, offset) {
            Ok(given) => given,
            Err(ReadError::Plain) => return PLAIN,
            Err(ReadError::Errno(errno)) => return -(errno as c_int),
        };
        let nothing = iovec {
            iov_base: null_mut(),
            iov_len: 0,
        };
        let mut iov = [nothing; REPLY_SLOTS_MAX];
        for (place, (start, bytes)) in iov.iter_mut().zip(&given.pieces) {
            *place = iovec {
                iov_base: start.as_ptr().cast(),
                iov_len: *bytes,
            };
        }
        // SAFETY: the caller's promise.
        unsafe {
            lease.write(rushes_lease {
                id: given.id,
                length: given.length,
                iov_count: given.pieces.len() as c_int,
                iov,
            });
        }
        0
    })
}

/// # Safety
/// `file` is null or an open file; `lease` is null or of rushes_read_begin.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_read_end(file: *mut rushes_file, lease: *mut rushes_lease) {
    // SAFETY: the caller's promise.
    let (Some((session, _)), Some(lease)) = (unsafe { (session_of(file), lease.as_mut()) }) else {
        return;
    };
    session.guarded((), |session| session.client.lease_end(lease.id));
    lease.iov_count = 0;
    lease.id = 0;
}

/// # Safety
/// `client` is null or a connected client.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_changed(
    client: *mut rushes_client,
    device: dev_t,
    inode: ino_t,
    offset: u64,
    length: u64,
) {
    // SAFETY: the caller's promise.
    if let Some(session) = unsafe { client.as_mut() } {
        session.guarded((), |session| {
            session.client.changed(device, inode, offset, length)
        });
    }
}

/// # Safety
/// `client` is null or a connected client.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_resized(
    client: *mut rushes_client,
    device: dev_t,
    inode: ino_t,
    offset: u64,
) {
    // SAFETY: the caller's promise.
    if let Some(session) = unsafe { client.as_mut() } {
        session.guarded((), |session| session.client.resized(device, inode, offset));
    }
}

/// # Safety
/// `fd` is not closed meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_is_shared(fd: c_int) -> bool {
    if fd < 0 {
        return false;
    }
    // SAFETY: the caller's promise; the kernel checks that it is open.
    let file = unsafe { BorrowedFd::borrow_raw(fd) };
    rushes_sys::extents::moves(file).unwrap_or(false)
}

/// # Safety
/// `client` is null or a connected client.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_gone(client: *mut rushes_client, device: dev_t, inode: ino_t) {
    // SAFETY: the caller's promise.
    if let Some(session) = unsafe { client.as_mut() } {
        session.guarded((), |session| session.client.gone(device, inode));
    }
}

/// # Safety
/// `client` is null or a connected client.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_takes_writes(client: *const rushes_client) -> bool {
    // SAFETY: the caller's promise.
    unsafe { client.as_ref() }
        .is_some_and(|client| !client.poisoned && client.client.takes_writes())
}

/// # Safety
/// `file` is null or an open file; `buffer` as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_write_send(
    file: *mut rushes_file,
    buffer: *const c_void,
    length: size_t,
    offset: u64,
    private_data: *mut c_void,
) -> u64 {
    // SAFETY: the caller's promise.
    let Some((session, handle)) = (unsafe { session_of(file) }) else {
        return 0;
    };
    session.guarded(0, |session| {
        // SAFETY: the header's promise about the buffer is `write_send`'s.
        let ticket = unsafe {
            session
                .client
                .write_send(handle, buffer.cast(), length, offset, private_data as usize)
        };
        ticket.map_or(0, Ticket::number)
    })
}

/// # Safety
/// `file` is null or an open file; `buffer` is valid for reading `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_write(
    file: *mut rushes_file,
    buffer: *const c_void,
    length: size_t,
    offset: u64,
) -> ssize_t {
    // SAFETY: the caller's promise.
    let Some((session, handle)) = (unsafe { session_of(file) }) else {
        return RUSHES_PLAIN;
    };
    if length == 0 || buffer.is_null() {
        return RUSHES_PLAIN;
    }
    session.guarded(RUSHES_PLAIN, |session| {
        // SAFETY: the caller's promise.
        let bytes = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), length) };
        result_of(session.client.write(handle, bytes, offset))
    })
}

/// # Safety
/// `file` is null or an open file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_sync_send(
    file: *mut rushes_file,
    private_data: *mut c_void,
) -> u64 {
    // SAFETY: the caller's promise.
    let Some((session, handle)) = (unsafe { session_of(file) }) else {
        return 0;
    };
    session.guarded(0, |session| {
        let ticket = session.client.sync_send(handle, private_data as usize);
        ticket.map_or(0, Ticket::number)
    })
}

/// # Safety
/// `client` is null or a connected client.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_hold(
    client: *mut rushes_client,
    device: dev_t,
    inode: ino_t,
) -> ssize_t {
    // SAFETY: the caller's promise.
    let Some(session) = (unsafe { client.as_mut() }) else {
        return RUSHES_PLAIN;
    };
    session.guarded(RUSHES_PLAIN, |session| {
        result_of(session.client.hold(device, inode).map(|()| 0))
    })
}

/// # Safety
/// `client` is null or a connected client.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_timed(
    client: *mut rushes_client,
    device: dev_t,
    inode: ino_t,
    changed_ns: i64,
) -> bool {
    // SAFETY: the caller's promise.
    let Some(session) = (unsafe { client.as_mut() }) else {
        return false;
    };
    session.guarded(false, |session| {
        session.client.timed(device, inode, changed_ns)
    })
}

/// The facts of files. C sees only its address.
pub struct rushes_facts(FactsView);

/// # Safety
/// `socket_path` is null or a NUL-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_facts_open(socket_path: *const c_char) -> *mut rushes_facts {
    if socket_path.is_null() {
        return null_mut();
    }
    // SAFETY: the caller's promise.
    let path = unsafe { CStr::from_ptr(socket_path) };
    let folder = Path::new(OsStr::from_bytes(path.to_bytes())).parent();
    match folder.and_then(FactsView::open) {
        Some(view) => Box::into_raw(Box::new(rushes_facts(view))),
        None => null_mut(),
    }
}

/// # Safety
/// `facts` is null or of rushes_facts_open, not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_facts_close(facts: *mut rushes_facts) {
    if !facts.is_null() {
        // SAFETY: made by Box::into_raw, given back once.
        drop(unsafe { Box::from_raw(facts) });
    }
}

/// # Safety
/// `facts` is null or of rushes_facts_open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_plain_begin(facts: *const rushes_facts) -> bool {
    // SAFETY: the caller's promise.
    unsafe { facts.as_ref() }.is_none_or(|facts| facts.0.plain_changes_begin())
}

/// # Safety
/// `facts` is null or of rushes_facts_open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_plain_end(facts: *const rushes_facts) {
    // SAFETY: the caller's promise.
    if let Some(facts) = unsafe { facts.as_ref() } {
        facts.0.plain_changes_end();
    }
}

/// # Safety
/// `facts` is null or of rushes_facts_open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_has_facts(facts: *const rushes_facts) -> bool {
    // SAFETY: the caller's promise.
    unsafe { facts.as_ref() }.is_some_and(|facts| !facts.0.is_empty())
}

/// # Safety
/// `facts` is null or of rushes_facts_open; `fact` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_fact_of(
    facts: *const rushes_facts,
    device: dev_t,
    inode: ino_t,
    fact: *mut rushes_fact,
) -> bool {
    // SAFETY: the caller's promise.
    let Some(found) = (unsafe { facts.as_ref() }).and_then(|facts| facts.0.of(device, inode))
    else {
        return false;
    };
    // SAFETY: the caller's promise.
    unsafe {
        fact.write(rushes_fact {
            size: found.size,
            changed_ns: found.changed_ns,
            generation: found.generation,
        });
    }
    true
}

/// # Safety
/// `fd` is an open descriptor; O_PATH will do.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_generation(fd: c_int) -> u64 {
    // SAFETY: the caller's promise.
    let file = unsafe { BorrowedFd::borrow_raw(fd) };
    Handle::of(file).map_or(0, |handle| known_generation(handle.generation()))
}

/// # Safety
/// `facts` is null or of rushes_facts_open; `before` is valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_has_reserve(
    facts: *const rushes_facts,
    device: dev_t,
    inode: ino_t,
    before: *mut u64,
) -> bool {
    // SAFETY: the caller's promise.
    let facts = unsafe { facts.as_ref() };
    let Some(bytes) = facts.and_then(|facts| facts.0.reserved(device, inode)) else {
        return false;
    };
    // SAFETY: the caller's promise.
    unsafe { before.write(bytes) };
    true
}

/// # Safety
/// `facts` is null or of rushes_facts_open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_is_loose(
    facts: *const rushes_facts,
    device: dev_t,
    inode: ino_t,
) -> bool {
    // SAFETY: the caller's promise.
    unsafe { facts.as_ref() }.is_some_and(|facts| facts.0.is_loose(device, inode))
}

/// # Safety
/// `client` is null or a connected client.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_lose(client: *mut rushes_client) {
    // SAFETY: the caller's promise.
    if let Some(session) = unsafe { client.as_mut() } {
        session.guarded((), |session| session.client.lose());
    }
}

/// # Safety
/// `client` is null or a connected client.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_is_lost(client: *const rushes_client) -> bool {
    // SAFETY: the caller's promise.
    unsafe { client.as_ref() }.is_some_and(|client| !client.poisoned && client.client.is_lost())
}

/// # Safety
/// `client` is null or a connected client.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_is_recovered(client: *const rushes_client) -> bool {
    // SAFETY: the caller's promise.
    unsafe { client.as_ref() }.is_none_or(|client| client.client.is_recovered())
}

/// # Safety
/// `client` is null or a connected client.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_reconnect(client: *mut rushes_client, patience_ms: u32) -> bool {
    // SAFETY: the caller's promise.
    let Some(session) = (unsafe { client.as_mut() }) else {
        return false;
    };
    session.guarded(false, |session| {
        let (path, who) = (&session.socket_path, &session.who);
        if !session.client.is_lost() {
            return false;
        }
        let patience = Duration::from_ms(patience_ms.into());
        match session.client.reconnect(path, who, patience) {
            Ok(()) => true,
            Err(error) => {
                set_errno(errno_of(&error));
                false
            }
        }
    })
}

/// # Safety
/// `client` is null or a connected client.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rushes_give_up(client: *mut rushes_client) {
    // SAFETY: the caller's promise.
    if let Some(session) = unsafe { client.as_mut() } {
        session.guarded((), |session| session.client.give_up());
    }
}
