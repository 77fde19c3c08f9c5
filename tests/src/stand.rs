// SPDX-License-Identifier: Apache-2.0
//! The ground that random clients are let loose on: a plain share with our module, or a pool's
//! mount, and the daemon and the smbd of either.
//!
//! It starts and ends programs; it does not know what clients do.

use crate::daemon::{Daemon, DaemonSpec};
use crate::disk::Disk;
use crate::needs::{self, Need};
use crate::pool::{EXT4, Made, PoolWorld, XFS};
use crate::random::Random;
use crate::smb2;
use crate::smbd::{self, Smbd, SmbdSpec};
use crate::world::{Backing, Setup, World};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The bytes that may be written and not on disks yet.
const BUFFER: &str = "64MiB";
/// Of a disk that does what it is told, as a member of a pool.
const SLOW_DISK_BYTES: u64 = 1 << 30;

/// The pool or the plain share, and its daemon and smbd. They end in this order.
#[derive(Debug)]
pub enum Stand {
    /// On a pool's mount.
    Pool(Smbd, Daemon, PoolWorld),
    /// On a share with our module.
    Plain(World),
}

/// Lines of the share under which each byte that a client sees is the server's.
pub fn share_lines() -> Vec<String> {
    let ours = ["oplocks = no", "allocation roundup size = 0"];
    let all = smb2::SHARE_LINES.into_iter().chain(ours);
    all.map(String::from).collect()
}

impl Stand {
    /// With our module between smbd and the disk: a lane a client.
    pub fn plain() -> Option<Stand> {
        Stand::plain_on(Backing::Ext4)
    }

    /// The same on a disk of this kind.
    pub fn plain_on(backing: Backing) -> Option<Stand> {
        World::build(&Setup {
            backing,
            share: share_lines(),
            global: vec![String::from(smb2::GLOBAL)],
            write_buffer: Some(BUFFER),
            ..Setup::default()
        })
        .map(Stand::Plain)
    }

    /// On a pool's mount: a lane a member.
    pub fn pool() -> Option<Stand> {
        Stand::pool_of(&[(EXT4, 200), (XFS, 300)], false, false)
    }

    /// The same of these members, perhaps with a keeper of the mount, perhaps with one more member
    /// on a disk that does what it is told and has most room.
    pub fn pool_of(members: &[Made], is_kept: bool, has_slow_disk: bool) -> Option<Stand> {
        if !needs::all_there(&[Need::Program("smbd"), Need::Program("pdbedit")]) {
            return None;
        }
        if has_slow_disk && !needs::all_there(&[Need::Program("rushes-lab")]) {
            return None;
        }
        let mut world = if is_kept {
            PoolWorld::kept(members)?
        } else {
            PoolWorld::build(members)?
        };
        if has_slow_disk {
            world.add_slow_disk(SLOW_DISK_BYTES);
        }
        let members = world.file_systems().into_iter();
        let spec = DaemonSpec::of_members(members.map(|member| member.join("pool")));
        let daemon = Daemon::start(&world.scratch, &spec);
        let smbd = smbd_of(&world);
        Some(Stand::Pool(smbd, daemon, world))
    }

    /// The smbd that serves clients.
    pub fn smbd(&self) -> &Smbd {
        match self {
            Stand::Pool(smbd, ..) => smbd,
            Stand::Plain(world) => &world.smbd,
        }
    }

    /// The daemon that has the bytes that they write.
    pub fn daemon(&mut self) -> &mut Daemon {
        match self {
            Stand::Pool(_, daemon, _) => daemon,
            Stand::Plain(world) => world.daemon.as_mut().expect("there is one"),
        }
    }

    /// The folder of everything.
    pub fn scratch(&self) -> &Path {
        match self {
            Stand::Pool(.., world) => world.scratch.path(),
            Stand::Plain(world) => world.scratch.path(),
        }
    }

    /// Where the bytes of a file lie, whoever is there. Of a pool's file: of its first segment.
    pub fn place(&self, name: &str) -> PathBuf {
        match self {
            Stand::Pool(.., world) => {
                let report = world.where_is(name);
                let path = report["segments"][0]["objects"][0]["path"].as_str();
                PathBuf::from(path.expect("text"))
            }
            Stand::Plain(world) => world.path(name),
        }
    }

    /// A file as a program on the server sees it.
    pub fn seen(&self, name: &str) -> PathBuf {
        match self {
            Stand::Pool(.., world) => world.path(name),
            Stand::Plain(world) => world.path(name),
        }
    }

    /// The disk below a plain share, or the one of a pool that does what it is told.
    pub fn disk(&self) -> Option<&Disk> {
        match self {
            Stand::Pool(.., world) => world.obedient_disk(),
            Stand::Plain(world) => Some(&world.disk),
        }
    }

    /// `rushes recover`, with these options.
    pub fn recover(&self, options: &[&str]) -> Command {
        let mut command = Command::new(needs::path_of("rushes"));
        command
            .arg("recover")
            .args(options)
            .arg("--config")
            .arg(self.scratch().join("rushes.toml"))
            .current_dir(self.scratch())
            .stdin(Stdio::null());
        command
    }
}

/// An smbd on a pool's mount, where everybody may do everything.
pub fn smbd_of(world: &PoolWorld) -> Smbd {
    let everybody = fs::Permissions::from_mode(0o777);
    fs::set_permissions(world.path(""), everybody).expect("our own mount");
    let spec = SmbdSpec {
        path: world.path(""),
        share: share_lines(),
        global: vec![String::from(smb2::GLOBAL)],
    };
    smbd::start(&world.scratch, &spec)
}

/// The processes of an smbd that serve its clients.
#[derive(Debug)]
pub struct Servants {
    smbd: u32,
    /// Its other children, which were there before the first client.
    helpers: BTreeSet<u32>,
}

impl Servants {
    /// Of this one, which no client has come to yet.
    pub fn of(smbd: &Smbd) -> Servants {
        Servants {
            smbd: smbd.pid(),
            helpers: children(smbd.pid()).into_iter().collect(),
        }
    }

    /// SIGKILL to one of them.
    pub fn kill_one(&self, random: &mut Random) {
        let mut all = children(self.smbd);
        all.retain(|pid| !self.helpers.contains(pid));
        if !all.is_empty() {
            let pid = random.one_of(&all);
            let _ = Command::new("kill").arg("-9").arg(pid.to_string()).status();
        }
    }
}

fn children(parent: u32) -> Vec<u32> {
    let all = fs::read_dir("/proc").expect("it is there").flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let behind = stat.rsplit_once(')').map_or("", |(_, behind)| behind);
        behind.split_whitespace().nth(1) == Some(&parent.to_string())
    })
    .collect()
}
