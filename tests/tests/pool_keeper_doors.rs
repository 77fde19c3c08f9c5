// SPDX-License-Identifier: Apache-2.0
//! The process that serves a mount is killed, again and again, under clients of SMB and of an iSCSI
//! disk: they wait for the next one, get no error and read no wrong byte. NFS and programs are in
//! pool_keeper.rs.

use rushes_tests::daemon::Daemon;
use rushes_tests::export::{Export, ISCSI};
use rushes_tests::fsx::{self, Plan};
use rushes_tests::initiator::{Blocks, Disk};
use rushes_tests::needs::{self, Need};
use rushes_tests::pattern;
use rushes_tests::pool::{EXT4, PoolWorld, SERVES_AT_LEAST, XFS};
use rushes_tests::smb2::{self, Connection, Disposition};
use rushes_tests::smbd::{self, SHARE, Smbd, SmbdSpec};
use rushes_tests::stop::StopAtEnd;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const BLOCK: usize = 65_536;
const DISK_BLOCKS: u64 = 256;
const TAKE_BLOCKS: u64 = 160;
const KILLS: usize = 15;
/// Each client goes on within this time.
const PATIENCE: Duration = Duration::from_secs(90);

/// Counts of each client's answers, and the flag that stops all.
#[derive(Default)]
struct Clients {
    stop: AtomicBool,
    recorder: AtomicU64,
    disk: AtomicU64,
    anything: Arc<AtomicU64>,
}

impl Clients {
    fn go_on(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    fn answers(&self) -> [u64; 3] {
        [&self.recorder, &self.disk, &*self.anything].map(|one| one.load(Ordering::Relaxed))
    }

    /// Waits until each has got three more answers, and the serving process has lived for a while.
    fn wait_for_all(&self, world: &PoolWorld) {
        let (before, begun) = (self.answers(), Instant::now());
        std::thread::sleep(SERVES_AT_LEAST);
        loop {
            let now = self.answers();
            let all = before.iter().zip(now).all(|(before, now)| now > before + 2);
            if all || !self.go_on() {
                return;
            }
            assert!(
                begun.elapsed() < PATIENCE,
                "{before:?} {now:?}: {}",
                world.log()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Records one take over the other; reads behind the end meanwhile, and all of a take at last.
    fn record(&self, port: u16) {
        let client = Connection::connect(port, SHARE).expect("smbd lets guests in");
        for take in 1.. {
            let (file, _) = client
                .open("take.mov", Disposition::OverwriteIf)
                .expect("made");
            for block in 0..TAKE_BLOCKS {
                if !self.go_on() {
                    client.close(file).expect("closed");
                    return;
                }
                let at = block * BLOCK as u64;
                let bytes = pattern::bytes(take, at, BLOCK);
                client.write(file, at, &bytes).expect("written");
                let behind = at / 2 / BLOCK as u64 * BLOCK as u64;
                let found = client.read(file, behind, BLOCK).expect("read");
                pattern::check(take, behind, &found, "take.mov");
                if block % 32 == 31 {
                    client.flush(file).expect("flushed");
                }
                self.recorder.fetch_add(1, Ordering::Relaxed);
            }
            client.close(file).expect("closed");
            let (file, info) = client
                .open("take.mov", Disposition::Open)
                .expect("it is there");
            assert_eq!(info.size, TAKE_BLOCKS * BLOCK as u64);
            for at in (0..TAKE_BLOCKS).map(|block| block * BLOCK as u64) {
                let found = client.read(file, at, BLOCK).expect("read");
                pattern::check(take, at, &found, "take.mov");
                self.recorder.fetch_add(1, Ordering::Relaxed);
            }
            client.close(file).expect("closed");
        }
    }

    /// Writes and reads blocks of a disk, each filled with one byte. Returns these bytes.
    fn use_disk(&self, url: &str) -> Vec<u8> {
        let mut disk = Disk::log_in(url);
        let mut blocks = Blocks::new(5, DISK_BLOCKS, BLOCK);
        while self.go_on() {
            let command = blocks.command();
            let said = disk.ask(&command);
            said.unwrap_or_else(|said| panic!("{command}: {said}"));
            self.disk.fetch_add(1, Ordering::Relaxed);
        }
        disk.ask("flush").expect("flushed");
        blocks.into_bytes()
    }

    /// All other operations of SMB clients, compared with a model.
    fn do_anything(&self, port: u16, world: &PoolWorld) {
        let folder = world.path("");
        for seed in 40.. {
            if !self.go_on() {
                return;
            }
            let plan = Plan {
                workers: 3,
                steps: Arc::clone(&self.anything),
                ..Plan::new(seed, 150)
            };
            fsx::run(port, &folder, &plan).unwrap_or_else(|divergence| panic!("{divergence}"));
            // The next round uses the same names.
            for entry in fs::read_dir(&folder).expect("listed").flatten() {
                if entry.file_name().to_string_lossy().starts_with('w') {
                    fs::remove_file(entry.path()).expect("removed");
                }
            }
        }
    }
}

fn shared(world: &PoolWorld) -> Smbd {
    let everybody = fs::Permissions::from_mode(0o777);
    fs::set_permissions(world.path(""), everybody).expect("our own mount");
    let lines = ["allocation roundup size = 0", "oplocks = no"];
    let share = smb2::SHARE_LINES.into_iter().chain(lines);
    smbd::start(
        &world.scratch,
        &SmbdSpec {
            path: world.path(""),
            share: share.map(String::from).collect(),
            global: vec![String::from(smb2::GLOBAL)],
        },
    )
}

fn clients_do_not_notice(with_daemon: bool) {
    let programs = [Need::Program("smbd"), Need::Program("pdbedit")];
    if !needs::all_there(&programs) || !needs::all_there(ISCSI) {
        return;
    }
    let Some(mut world) = PoolWorld::kept(&[(EXT4, 200), (XFS, 300)]) else {
        return;
    };
    let daemon: Option<Daemon> = with_daemon.then(|| world.served(2, ""));
    let smbd = shared(&world);
    let export = Export::iscsi(&world, "edit.disk", &["--size", "16MiB"]);
    let (server, url) = (export.server(), export.disk("edit.disk"));
    let clients = Clients::default();
    let (mut pauses, mut blocks) = (Vec::new(), Vec::new());
    std::thread::scope(|scope| {
        let (world, clients, port) = (&world, &clients, smbd.port());
        scope.spawn(move || {
            let _stop = StopAtEnd(&clients.stop);
            clients.record(port);
        });
        scope.spawn(move || {
            let _stop = StopAtEnd(&clients.stop);
            clients.do_anything(port, world);
        });
        let disk = scope.spawn(|| {
            let _stop = StopAtEnd(&clients.stop);
            clients.use_disk(&url)
        });
        let _stop = StopAtEnd(&clients.stop);
        for _ in 0..KILLS {
            clients.wait_for_all(world);
            if !clients.go_on() {
                break;
            }
            pauses.push(world.measure_kill());
        }
        clients.wait_for_all(world);
        clients.stop.store(true, Ordering::Relaxed);
        blocks = disk.join().expect("no panic");
    });
    assert_eq!(pauses.len(), KILLS, "a client stopped");
    pauses.sort();
    eprintln!("pauses {pauses:?}, answers {:?}", clients.answers());
    // tgtd was not started again, and the file has the written bytes.
    assert_eq!(export.server(), server, "{}", export.log());
    export.end();
    drop(smbd);
    let mut found = Vec::new();
    File::open(world.path("edit.disk"))
        .and_then(|mut file| file.read_to_end(&mut found))
        .expect("read");
    for (block, bytes) in found.chunks(BLOCK).enumerate() {
        assert!(bytes.iter().all(|byte| *byte == blocks[block]), "{block}");
    }
    assert_eq!(found.len(), DISK_BLOCKS as usize * BLOCK);
    world.end();
    if let Some(mut daemon) = daemon {
        daemon.end();
    }
    let (report, code) = world.json(&["fsck", "--repair"], &[]);
    assert_eq!(code, Some(0), "{report}");
}

#[test]
fn smb_and_iscsi_clients_do_not_notice_that_the_mounts_process_is_killed() {
    clients_do_not_notice(false);
}

#[test]
fn nor_where_what_they_read_and_write_goes_through_a_daemon() {
    clients_do_not_notice(true);
}
