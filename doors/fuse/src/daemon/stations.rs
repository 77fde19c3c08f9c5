// SPDX-License-Identifier: Apache-2.0
//! Finds the people who have the mount's files open: the daemon's ledger names them and their
//! machines, although the mount has one session for all. Decision: docs/decisions/0047.
//!
//! With each open the kernel reports the account and the thread that asks. The account is the user:
//! smbd and Ganesha ask on their client's. smbd has a process for each client, so the client is the
//! host at the other end of that process's connection to the port on which smbd listens; of any
//! other process the name is used. A thread of its own finds all this out, only for files that the
//! daemon knows: no request waits for it.
//!
//! A process's number may belong to another process by the time of the look: one that began after
//! the open does not count.

use super::finder::Queues;
use super::queue::Job;
use crate::bytes::descriptors::Opener;
use crate::lock::locked;
use nix::unistd::{Uid, User};
use rushes_core::server::Station;
use rushes_pool::{Object, ObjectId};
use rustix::fs::{Mode, OFlags, open};
use rustix::time::{ClockId, clock_gettime};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// The unit of times in /proc. The same on all supported machines (USER_HZ of the kernel's
/// interface). Units: ns.
const TICK_NS: u64 = 10_000_000;
/// Users whose names are remembered; likewise processes.
const COUNT_MAX: usize = 1024;
/// Names in the label of a file; beyond that the label says how many more there are.
const NAME_COUNT_MAX: usize = 2;
/// The name of an unknown client, as in the session.
const UNKNOWN: &str = "mount";
/// Lines read of one table of connections.
const LINE_COUNT_MAX: usize = 100_000;

/// See the module.
pub(super) struct Stations {
    known: Mutex<Known>,
    asked: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Known {
    /// By the number of their node.
    files: HashMap<u64, File>,
    of: HashMap<ObjectId, u64>,
    /// Files that wait for a look.
    asked: VecDeque<u64>,
    is_closing: bool,
    /// Earlier findings: a program that opens, reads and closes at once is gone by the time of the
    /// look.
    before: Before,
}

/// Users by name, and processes: the start of each, and its client.
#[derive(Default)]
struct Before {
    users: HashMap<u32, String>,
    processes: HashMap<u32, (u64, String)>,
}

impl Before {
    /// Looks without waiting.
    fn station(&self, open: &Open) -> Option<Station> {
        let user = self.users.get(&open.opener.user)?;
        let (began, client) = self.processes.get(&open.opener.process)?;
        let folder = Path::new("/proc").join(open.opener.process.to_string());
        let (_, begins) = stat_of(&fs::read_to_string(folder.join("stat")).ok()?)?;
        (begins == *began && begins <= open.at).then(|| Station {
            user: user.clone(),
            client: client.clone(),
        })
    }

    fn learn(&mut self, open: &Open, (station, began): (&Station, Option<u64>)) {
        if self.users.len() >= COUNT_MAX {
            self.users.clear();
        }
        if self.processes.len() >= COUNT_MAX {
            self.processes.clear();
        }
        self.users.insert(open.opener.user, station.user.clone());
        if let Some(began) = began {
            let what = (began, station.client.clone());
            self.processes.insert(open.opener.process, what);
        }
    }
}

#[derive(Default)]
struct File {
    /// The kernel's opens by file handle; in the order in which they came.
    opens: BTreeMap<u64, Open>,
    /// The objects that the daemon may know.
    objects: HashSet<Object>,
    label: Option<Station>,
    is_asked: bool,
}

#[derive(Clone)]
struct Open {
    opener: Opener,
    /// The time of the open since the machine started. Units: ns.
    at: u64,
    station: Option<Station>,
}

impl File {
    /// All known users and clients that have it open, in few words.
    fn named(&self) -> Option<Station> {
        let stations = self.opens.values().filter_map(|open| open.station.as_ref());
        stations.clone().next()?;
        Some(Station {
            user: listed(stations.clone().map(|station| station.user.as_str())),
            client: listed(stations.map(|station| station.client.as_str())),
        })
    }
}

impl Known {
    fn ask(&mut self, number: u64) -> bool {
        let file = self.files.get_mut(&number);
        let Some(file) = file.filter(|file| !file.is_asked && !file.opens.is_empty()) else {
            return false;
        };
        file.is_asked = true;
        self.asked.push_back(number);
        true
    }

    fn forget_if_unused(&mut self, number: u64) {
        let is_unused = |file: &File| file.opens.is_empty() && file.objects.is_empty();
        if self.files.get(&number).is_some_and(is_unused) {
            self.files.remove(&number);
        }
    }
}

impl Stations {
    pub(super) fn start(queues: &Arc<Queues>) -> io::Result<Arc<Stations>> {
        let stations = Arc::new(Stations {
            known: Mutex::default(),
            asked: Condvar::new(),
            thread: Mutex::default(),
        });
        let (own, queues) = (Arc::clone(&stations), Arc::clone(queues));
        let thread = std::thread::Builder::new()
            .name(String::from("stations"))
            .spawn(move || own.run(&queues))?;
        *locked(&stations.thread) = Some(thread);
        Ok(stations)
    }

    pub(super) fn end(&self) {
        locked(&self.known).is_closing = true;
        self.asked.notify_all();
        if let Some(thread) = locked(&self.thread).take() {
            let _ = thread.join();
        }
    }

    /// Counts one more open of the file.
    pub(super) fn opened(&self, number: u64, handle: u64, opener: Opener) {
        let mut known = locked(&self.known);
        let file = known.files.entry(number).or_default();
        let open = Open {
            opener,
            at: since_start(),
            station: None,
        };
        file.opens.insert(handle, open);
        // The daemon knows the file already.
        if !file.objects.is_empty() && known.ask(number) {
            self.asked.notify_all();
        }
    }

    /// Counts one open less. The last one stays known as long as the daemon knows the file.
    pub(super) fn left(&self, number: u64, handle: u64) {
        let mut known = locked(&self.known);
        let Some(file) = known.files.get_mut(&number) else {
            return;
        };
        let was_there = file.opens.remove(&handle).is_some();
        let is_told = was_there && !file.objects.is_empty();
        if is_told && known.ask(number) {
            self.asked.notify_all();
        }
        known.forget_if_unused(number);
    }

    /// The object has bytes of the file.
    pub(super) fn add_object(&self, number: u64, object: Object) {
        let mut known = locked(&self.known);
        known
            .files
            .entry(number)
            .or_default()
            .objects
            .insert(object);
        known.of.insert(object.id, number);
    }

    /// The object is closed.
    pub(super) fn forget(&self, object: Object) {
        let mut known = locked(&self.known);
        let Some(number) = known.of.remove(&object.id) else {
            return;
        };
        if let Some(file) = known.files.get_mut(&number) {
            file.objects.remove(&object);
        }
        known.forget_if_unused(number);
    }

    /// The object's user and client. None: a thread finds them out and sends [`Job::Stationed`].
    pub(super) fn of(&self, object: ObjectId) -> Option<Station> {
        let known = &mut *locked(&self.known);
        let number = *known.of.get(&object)?;
        let file = known.files.get_mut(&number)?;
        if file.label.is_none() {
            for open in file
                .opens
                .values_mut()
                .filter(|open| open.station.is_none())
            {
                open.station = known.before.station(open);
            }
            if file.opens.values().all(|open| open.station.is_some()) {
                file.label = file.named();
            }
        }
        let label = file.label.clone();
        if label.is_none() && known.ask(number) {
            self.asked.notify_all();
        }
        label
    }

    fn run(&self, queues: &Queues) {
        while let Some((number, mut opens)) = self.next() {
            // With no lock held: user names may come over the network.
            for open in opens.values_mut().filter(|open| open.station.is_none()) {
                let client = client_of(Path::new("/proc"), open.opener.process, open.at);
                let began = client.as_ref().map(|(_, began)| *began);
                let client = client.map_or_else(|| String::from(UNKNOWN), |(client, _)| client);
                let user = name_of(open.opener.user);
                let station = Station { user, client };
                locked(&self.known).before.learn(open, (&station, began));
                open.station = Some(station);
            }
            for object in self.found(number, &opens) {
                let queues = queues.read().unwrap_or_else(PoisonError::into_inner);
                if let Some(queue) = queues.get(&object.member) {
                    queue.push(Job::Stationed(object.id));
                }
            }
        }
    }

    /// The next file to look at. None: the thread ends.
    fn next(&self) -> Option<(u64, BTreeMap<u64, Open>)> {
        let mut known = locked(&self.known);
        loop {
            if known.is_closing {
                return None;
            }
            if let Some(number) = known.asked.pop_front() {
                if let Some(file) = known.files.get_mut(&number) {
                    file.is_asked = false;
                    return Some((number, file.opens.clone()));
                }
                continue;
            }
            known = self
                .asked
                .wait(known)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns the objects whose label has changed
    fn found(&self, number: u64, looked: &BTreeMap<u64, Open>) -> Vec<Object> {
        let mut known = locked(&self.known);
        let Some(file) = known.files.get_mut(&number) else {
            return Vec::new();
        };
        for (handle, open) in &mut file.opens {
            if open.station.is_none() {
                open.station = looked.get(handle).and_then(|open| open.station.clone());
            }
        }
        let label = file.named();
        if label.is_none() || label == file.label {
            return Vec::new();
        }
        file.label = label;
        file.objects.iter().copied().collect()
    }
}

fn since_start() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// `anna`, `anna, ben`, `anna, ben and 3 more`
fn listed<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let mut different: Vec<&str> = Vec::new();
    for name in names {
        if !different.contains(&name) {
            different.push(name);
        }
    }
    let shown = different.len().min(NAME_COUNT_MAX);
    let list = different[..shown].join(", ");
    match different.len() - shown {
        0 => list,
        more => format!("{list} and {more} more"),
    }
}

fn name_of(user: u32) -> String {
    let found = User::from_uid(Uid::from_raw(user)).ok().flatten();
    found.map_or_else(|| user.to_string(), |user| user.name)
}

/// The client of this process, or the process's name; and its start. None: it is gone, or another
/// process has its number.
///
/// `opened`  when it opened the file, since the machine started. Units: ns
fn client_of(proc: &Path, process: u32, opened: u64) -> Option<(String, u64)> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let held = open(proc.join(process.to_string()), flags, Mode::empty()).ok()?;
    // A file read through this belongs to that process, or cannot be read.
    let folder = PathBuf::from(format!("/proc/self/fd/{}", held.as_raw_fd()));
    let (own, began) = stat_of(&fs::read_to_string(folder.join("stat")).ok()?)?;
    if began > opened {
        return None;
    }
    // A thread has a name of its own; people know the program's name.
    let name = leader_of(&folder, proc).unwrap_or(own);
    let peer = name.starts_with("smbd").then(|| peer_of(&folder)).flatten();
    Some((peer.map_or(name, |peer| peer.to_string()), began))
}

/// The name of the process to which a thread belongs.
fn leader_of(folder: &Path, proc: &Path) -> Option<String> {
    let status = fs::read_to_string(folder.join("status")).ok()?;
    let leader = status.lines().find_map(|line| line.strip_prefix("Tgid:"))?;
    let stat = fs::read_to_string(proc.join(leader.trim()).join("stat")).ok()?;
    Some(stat_of(&stat)?.0)
}

/// Name and start of a process, from its `stat`.
fn stat_of(stat: &str) -> Option<(String, u64)> {
    // The name may contain any character, brackets too.
    let (head, rest) = stat.rsplit_once(')')?;
    let name = head.split_once('(')?.1;
    // proc(5): starttime is field 22, and the first behind the name is field 3.
    let ticks: u64 = rest.split_whitespace().nth(22 - 3)?.parse().ok()?;
    Some((name.to_owned(), ticks.saturating_mul(TICK_NS)))
}

/// The host at the other end of one of its connections to a port on which a program listens.
fn peer_of(folder: &Path) -> Option<IpAddr> {
    let sockets: HashSet<u64> = fs::read_dir(folder.join("fd"))
        .ok()?
        .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok())
        .filter_map(|target| {
            let target = target.to_str()?;
            let inode = target.strip_prefix("socket:[")?.strip_suffix(']')?;
            inode.parse().ok()
        })
        .collect();
    let table = |name: &str| fs::read_to_string(folder.join("net").join(name)).unwrap_or_default();
    peer_in(&[table("tcp"), table("tcp6")], &sockets)
}

/// The same, from tables of connections (`/proc/net/tcp`). Of several connections it takes the
/// oldest.
fn peer_in(tables: &[String], sockets: &HashSet<u64>) -> Option<IpAddr> {
    const ESTABLISHED: &str = "01";
    const LISTENS: &str = "0A";
    let lines = || {
        let all = tables
            .iter()
            .flat_map(|table| table.lines().take(LINE_COUNT_MAX));
        all.filter_map(|line| {
            let mut words = line.split_whitespace().skip(1);
            let (own, other, state) = (words.next()?, words.next()?, words.next()?);
            // tx:rx, timer, retransmissions, uid, timeout, inode.
            let inode: u64 = words.nth(5)?.parse().ok()?;
            Some((address(own)?, address(other)?, state, inode))
        })
    };
    let listens = lines().filter(|(_, _, state, _)| *state == LISTENS);
    let ports: HashSet<u16> = listens.map(|((_, port), ..)| port).collect();
    lines()
        .filter(|((_, port), _, state, inode)| {
            *state == ESTABLISHED && ports.contains(port) && sockets.contains(inode)
        })
        .min_by_key(|(.., inode)| *inode)
        .map(|(_, (peer, _), ..)| peer)
}

/// `0100007F:01BD`: groups of four bytes in the byte order of this machine.
fn address(text: &str) -> Option<(IpAddr, u16)> {
    let (host, port) = text.split_once(':')?;
    let word = |at: usize| {
        let word = host.get(at * 8..(at + 1) * 8)?;
        Some(u32::from_str_radix(word, 16).ok()?.to_ne_bytes())
    };
    let host = match host.len() {
        8 => IpAddr::from(word(0)?),
        32 => {
            let mut bytes = [0; 16];
            for (at, four) in bytes.chunks_exact_mut(4).enumerate() {
                four.copy_from_slice(&word(at)?);
            }
            // An IPv4 client at a socket for both protocols.
            Ipv6Addr::from(bytes).to_canonical()
        }
        _ => return None,
    };
    Some((host, u16::from_str_radix(port, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rushes_pool::MemberNumber;

    const TCP: &str = "\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:01BD 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 100 1 0 100 0 0 10 0
   1: 0107A8C0:01BD 1507A8C0:C350 01 00000000:00000000 02:00000000 00000000     0        0 201 2 0 20 4 30 10 -1
   2: 0107A8C0:D2F0 0207A8C0:0185 01 00000000:00000000 02:00000000 00000000     0        0 150 2 0 20 4 30 10 -1
   3: 0107A8C0:01BD 1607A8C0:C351 01 00000000:00000000 02:00000000 00000000     0        0 202 2 0 20 4 30 10 -1
";
    const TCP6: &str = "\
  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0000000000000000FFFF00000107A8C0:01BD 0000000000000000FFFF00001707A8C0:C352 01 00000000:00000000 00:00000000 00000000     0        0 203 1
   1: 000080FE00000000FF005450AE3B5EFE:01BD 000080FE00000000FF005450B03B5EFE:C353 01 00000000:00000000 00:00000000 00000000     0        0 204 1
";

    #[test]
    fn client_is_at_the_other_end_of_the_connection_to_a_port_that_is_listened_on() {
        let tables = [String::from(TCP), String::from(TCP6)];
        let peer = |sockets: &[u64]| {
            let found = peer_in(&tables, &sockets.iter().copied().collect());
            found.map(|peer| peer.to_string()).unwrap_or_default()
        };
        // Beside it smbd has a connection of its own, to a directory.
        assert_eq!(peer(&[7, 150, 201]), "192.168.7.21");
        assert_eq!(peer(&[150]), "");
        assert_eq!(peer(&[203]), "192.168.7.23");
        assert_eq!(peer(&[204]), "fe80::5054:ff:fe5e:3bb0");
        // Two of one client: the first.
        assert_eq!(peer(&[202, 201]), "192.168.7.21");
        assert_eq!(peer(&[100]), "");
        assert!(peer_in(&[String::from("nonsense\n\n:::")], &HashSet::new()).is_none());
    }

    #[test]
    fn a_process_is_told_by_its_name_and_one_that_came_later_is_not() {
        let own = std::process::id();
        let found = client_of(Path::new("/proc"), own, since_start());
        let (name, began) = found.expect("it is we");
        let comm = fs::read_to_string("/proc/self/comm").expect("it is there");
        assert_eq!(name, comm.trim_end());
        // Its threads, under any name.
        let of_thread = std::thread::spawn(|| {
            let thread = rustix::thread::gettid().as_raw_nonzero().get() as u32;
            client_of(Path::new("/proc"), thread, since_start()).map(|(name, _)| name)
        });
        assert_eq!(of_thread.join().expect("no panic").as_ref(), Some(&name));
        // Known from then on, without another look at its name.
        let mut before = Before::default();
        let mut open = Open {
            opener: Opener {
                user: 0,
                process: own,
            },
            at: since_start(),
            station: None,
        };
        assert_eq!(before.station(&open), None);
        let station = Station {
            user: String::from("anna"),
            client: name,
        };
        before.learn(&open, (&station, Some(began)));
        assert_eq!(before.station(&open).as_ref(), Some(&station));
        open.at = 1;
        assert_eq!(before.station(&open), None);
        before.learn(&open, (&station, Some(began + TICK_NS)));
        open.at = since_start();
        assert_eq!(before.station(&open), None);
        assert_eq!(client_of(Path::new("/proc"), own, 1), None);
        assert_eq!(client_of(Path::new("/proc"), 0, u64::MAX), None);
        let stat = "77 (a) (b) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 555 20 21";
        let expect = (String::from("a) (b"), 555 * TICK_NS);
        assert_eq!(stat_of(stat), Some(expect));
    }

    #[test]
    fn label_names_all_who_have_it_open_and_stays_when_the_last_one_leaves() {
        let (stations, object) = (
            Stations {
                known: Mutex::default(),
                asked: Condvar::new(),
                thread: Mutex::default(),
            },
            Object {
                member: MemberNumber(1),
                id: ObjectId(2),
            },
        );
        let look = |names: &[(u64, &str)]| {
            let (number, mut opens) = stations.next().expect("somebody asked");
            for (handle, name) in names {
                if let Some(open) = opens.get_mut(handle) {
                    open.station = Some(Station {
                        user: String::from(*name),
                        client: String::from("here"),
                    });
                }
            }
            stations.found(number, &opens)
        };
        let opener = Opener {
            user: 0,
            process: 0,
        };
        stations.opened(9, 1, opener);
        stations.add_object(9, object);
        assert_eq!(stations.of(object.id), None);
        assert_eq!(look(&[(1, "anna")]), [object]);
        assert_eq!(
            stations.of(object.id).map(|label| label.user).as_deref(),
            Some("anna")
        );
        stations.opened(9, 2, opener);
        assert_eq!(look(&[(2, "ben")]), [object]);
        let label = stations.of(object.id).expect("it is known");
        assert_eq!(
            (label.user.as_str(), label.client.as_str()),
            ("anna, ben", "here")
        );
        stations.left(9, 1);
        assert_eq!(look(&[]), [object]);
        assert_eq!(
            stations.of(object.id).map(|label| label.user).as_deref(),
            Some("ben")
        );
        stations.left(9, 2);
        assert_eq!(
            stations.of(object.id).map(|label| label.user).as_deref(),
            Some("ben")
        );
        stations.forget(object);
        assert!(locked(&stations.known).files.is_empty());
        assert_eq!(
            listed(["a", "b", "a", "c", "d"].into_iter()),
            "a, b and 2 more"
        );
    }
}
