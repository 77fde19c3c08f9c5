// SPDX-License-Identifier: Apache-2.0
//! The slow disk on the real kernel: bytes, timing, faults, and that nothing stays behind.
//!
//! Runs alone (tests/programs.sh): it measures times. They have wide bounds, since the machine may
//! be busy; the tests of the model itself use a virtual clock. Without root or `/dev/fuse`
//! these tests skip aloud.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rushes_core::units::ByteCount;
use rushes_kit::mounts::sync_below;
use rushes_lab::disk::timing::{Direction, DiskTiming};
use rushes_lab::disk::{DiskSpec, Fault, FileSystem, SlowDisk};
use rushes_lab::stage::take::Take;

const PROGRAM: &str = env!("CARGO_BIN_EXE_rushes-lab");
const PAGE: usize = 4096;

/// False, with a message, where there can be no slow disk; under `make test` that is a failure.
fn possible(test: &str) -> bool {
    let possible = rustix::process::geteuid().is_root() && File::open("/dev/fuse").is_ok();
    if !possible {
        assert!(
            std::env::var_os("RUSHES_TEST_ALL").is_none_or(|value| value != "1"),
            "{test} needs root and /dev/fuse"
        );
        eprintln!("SKIPPED {test}: it needs root and /dev/fuse");
    }
    possible
}

fn spec(name: String, mib: u64) -> DiskSpec {
    DiskSpec {
        name,
        program: Some(PathBuf::from(PROGRAM)),
        ..DiskSpec::table5(ByteCount::from_mib(mib))
    }
}

/// A disk for a test.
fn disk(test: &str, mib: u64) -> Option<SlowDisk> {
    possible(test).then(|| SlowDisk::create(&spec(name_of(test), mib)).expect("the disk comes up"))
}

/// A name that is unique among simultaneous runs.
fn name_of(test: &str) -> String {
    format!("test-{test}-{}", std::process::id())
}

fn folder_of(name: &str) -> PathBuf {
    Path::new("/run/rushes-lab/disks").join(name)
}

fn backing_of(name: &str) -> PathBuf {
    Path::new("/dev/shm").join(format!("rushes-disk-{name}.img"))
}

/// The loop devices for whose backing file `is` returns true.
fn devices_over(is: impl Fn(&str) -> bool) -> BTreeSet<OsString> {
    fs::read_dir("/sys/block")
        .expect("sysfs is there")
        .flatten()
        .filter(|entry| {
            fs::read_to_string(entry.path().join("loop/backing_file")).is_ok_and(|file| is(&file))
        })
        .map(|entry| entry.file_name())
        .collect()
}

/// Number of loop devices for whose backing file `is` returns true.
fn attached_to(is: impl Fn(&str) -> bool) -> usize {
    devices_over(is).len()
}

/// Runs `rushes-lab disk clean`; other tests may do so at the same time, so its errors do not
/// matter.
fn clean() {
    let status = Command::new(PROGRAM)
        .args(["disk", "clean"])
        .stdout(Stdio::null())
        .status();
    assert!(status.is_ok(), "{status:?}");
}

/// True when no trace of a disk is left: folder, backing file, loop device, mount.
fn is_gone(name: &str) -> bool {
    let part = format!("/{name}/");
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("proc is there");
    let attached = attached_to(|file| file.contains(&part)) > 0;
    !folder_of(name).exists() && !backing_of(name).exists() && !attached && !mounts.contains(&part)
}

fn within(span: Duration, what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < span, "{what}: not within {span:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn open_direct(path: &Path) -> File {
    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(rustix::fs::OFlags::DIRECT.bits() as i32)
        .open(path)
        .expect("the device opens")
}

/// Runs `act` on `pages` pages of memory that direct I/O accepts.
fn with_pages<T>(pages: usize, act: impl FnOnce(&mut [u8]) -> T) -> T {
    let mut memory = vec![0u8; (pages + 1) * PAGE];
    let start = memory.as_ptr().align_offset(PAGE);
    act(&mut memory[start..start + pages * PAGE])
}

fn read_at(device: &File, pages: usize, offset: u64) -> std::io::Result<Vec<u8>> {
    with_pages(pages, |buffer| {
        device.read_exact_at(buffer, offset)?;
        Ok(buffer.to_vec())
    })
}

fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

#[test]
fn what_was_written_is_read_and_zeros_take_no_memory() {
    let Some(disk) = disk("bytes", 512) else {
        return;
    };
    disk.timing(false).unwrap();
    let device = open_direct(disk.block_device());
    let place = |index: u64| index * 20_000_000 / PAGE as u64 * PAGE as u64;
    for index in 0..24 {
        with_pages(300, |buffer| {
            buffer.copy_from_slice(&pattern(index, 300 * PAGE));
            device.write_all_at(buffer, place(index)).unwrap();
        });
    }
    for index in (0..24).rev() {
        let got = read_at(&device, 300, place(index)).unwrap();
        assert!(got == pattern(index, 300 * PAGE), "run {index} differs");
    }
    let used = || fs::metadata(backing_of(&disk.name())).unwrap().blocks() * 512;
    let before = used();
    assert!((29_000_000..40_000_000).contains(&before), "{before}");
    // Zeros over bytes give the memory back, and read as zeros.
    with_pages(300, |buffer| device.write_all_at(buffer, 0).unwrap());
    assert!(
        used() <= before - 299 * PAGE as u64,
        "{} of {before}",
        used()
    );
    let zeros = read_at(&device, 300, 0).unwrap();
    assert!(zeros.iter().all(|&byte| byte == 0));
    drop(device);
    disk.close().unwrap();
}

#[test]
fn real_requests_take_the_time_of_the_model_and_not_less() {
    let Some(disk) = disk("time", 2048) else {
        return;
    };
    let device = open_direct(disk.block_device());
    disk.reset_statistics().unwrap();
    let start = Instant::now();
    for mib in [3u64, 1500, 700, 1900, 20, 1000, 400, 1700, 90, 1300] {
        read_at(&device, 256, mib << 20).unwrap();
    }
    let taken = start.elapsed().as_secs_f64() * 1e3;
    let read = disk.statistics().unwrap().read;
    assert_eq!(read.bytes, 10 << 20);
    // A busy kernel may send a request in two parts, the second one first: then the first is
    // positioned too.
    assert!((10..=14).contains(&read.positioned_count), "{read:?}");
    // Ten times 6.1 ms of transfer, and positioning between 0.4 and 1.53 times 15.2 ms.
    let positioned = read.positioned_count as f64;
    let least = 61.0 + 6.0 * positioned;
    assert!(
        (least..61.0 + 23.3 * positioned).contains(&read.busy_ms),
        "{read:?}"
    );
    assert!(taken >= read.busy_ms, "{taken} ms for {read:?}");
    assert!(
        taken < read.busy_ms * 2.0 + 200.0,
        "{taken} ms for {read:?}"
    );
    drop(device);
    disk.close().unwrap();
}

#[test]
fn requests_that_wait_are_taken_in_order_of_place() {
    let Some(disk) = disk("order", 2048) else {
        return;
    };
    let path = disk.block_device().to_owned();
    let places = [1900u64, 100, 1500, 300, 1100, 500, 900, 700];
    // A short stall, so that all requests are there when the disk takes the first.
    disk.reset_statistics().unwrap();
    disk.inject(Fault::Stall { ms: 60 }).unwrap();
    std::thread::scope(|scope| {
        for mib in places {
            let path = &path;
            scope.spawn(move || read_at(&open_direct(path), 16, mib << 20).unwrap());
        }
    });
    let read = disk.statistics().unwrap().read;
    // In order of place a seek takes k = 0.76, 11.5 ms; after 100 ms the requests that have waited
    // longest come first. That makes 104 ms, at worst 112; in the order of arrival it would be 141.
    assert_eq!(read.positioned_count, 8);
    assert!(read.busy_ms < 125.0, "{read:?}");
    disk.close().unwrap();
}

#[test]
fn failing_range_fails_with_eio_and_only_it() {
    let Some(disk) = disk("fail", 64) else {
        return;
    };
    disk.timing(false).unwrap();
    let device = open_direct(disk.block_device());
    disk.inject(Fault::Fail {
        direction: Direction::Read,
        start: 8 << 20,
        length: 4096,
        count: Some(2),
    })
    .unwrap();
    for _ in 0..2 {
        let error = read_at(&device, 4, (8 << 20) - 4096).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(5), "{error}");
    }
    // The fault has a count of two; and requests beside the range do not fail.
    read_at(&device, 4, (8 << 20) - 4096).unwrap();
    read_at(&device, 1, (8 << 20) + 4096).unwrap();
    disk.inject(Fault::Fail {
        direction: Direction::Write,
        start: 0,
        length: 1 << 20,
        count: None,
    })
    .unwrap();
    let write = || with_pages(1, |buffer| device.write_all_at(buffer, 4096));
    assert_eq!(write().unwrap_err().raw_os_error(), Some(5));
    disk.clear_faults().unwrap();
    write().unwrap();
    drop(device);
    disk.close().unwrap();
}

#[test]
fn stall_and_slowness_hold_requests_up() {
    let Some(disk) = disk("stall", 64) else {
        return;
    };
    let device = open_direct(disk.block_device());
    let time = || {
        let start = Instant::now();
        read_at(&device, 1, 32 << 20).unwrap();
        start.elapsed()
    };
    disk.inject(Fault::Stall { ms: 400 }).unwrap();
    assert!(time() > Duration::from_millis(380));
    disk.inject(Fault::Slow { factor: 30.0 }).unwrap();
    // The shortest positioning, 6 ms, thirty times.
    assert!(time() > Duration::from_millis(170));
    disk.inject(Fault::Stall { ms: 60_000 }).unwrap();
    disk.clear_faults().unwrap();
    assert!(time() < Duration::from_secs(10));
    drop(device);
    disk.close().unwrap();
}

#[test]
fn timing_switched_off_ends_what_waits() {
    let Some(disk) = disk("off", 64) else {
        return;
    };
    let path = disk.block_device().to_owned();
    disk.inject(Fault::Slow { factor: 1000.0 }).unwrap();
    let start = Instant::now();
    std::thread::scope(|scope| {
        for mib in [10u64, 20, 30, 40] {
            let path = &path;
            scope.spawn(move || read_at(&open_direct(path), 1, mib << 20).unwrap());
        }
        std::thread::sleep(Duration::from_millis(100));
        disk.clear_faults().unwrap();
        disk.timing(false).unwrap();
    });
    // Four times ten seconds otherwise.
    assert!(start.elapsed() < Duration::from_secs(5));
    disk.close().unwrap();
}

fn write_back_disk(test: &str, mib: u64) -> Option<SlowDisk> {
    let spec = DiskSpec {
        timing: DiskTiming::TABLE5_WRITE_BACK,
        ..spec(name_of(test), mib)
    };
    possible(test).then(|| SlowDisk::create(&spec).expect("the disk comes up"))
}

#[test]
fn write_cache_takes_writes_at_once_and_a_flush_waits_for_the_medium() {
    let Some(disk) = write_back_disk("cache", 1024) else {
        return;
    };
    let device = open_direct(disk.block_device());
    let start = Instant::now();
    for mib in 0..20u64 {
        with_pages(256, |buffer| {
            buffer.copy_from_slice(&pattern(mib, 1 << 20));
            device
                .write_all_at(buffer, (mib * 7 % 20) * (40 << 20))
                .unwrap();
        });
    }
    // On the medium it would take 20 times 7 ms of transfer and 10 ms of positioning.
    let taken = start.elapsed();
    let told = disk.statistics().unwrap();
    assert!(told.cached_bytes >= 20 << 20, "{told:?}");
    assert!(taken < Duration::from_millis(300), "{taken:?}");
    // Read back while some bytes are in the cache and some are not.
    for mib in 0..20u64 {
        let got = read_at(&device, 256, (mib * 7 % 20) * (40 << 20)).unwrap();
        assert!(got == pattern(mib, 1 << 20), "run {mib} differs");
    }
    device.sync_all().unwrap();
    let told = disk.statistics().unwrap();
    assert_eq!(told.cache_bytes, 0);
    assert!(told.write.busy_ms > 20.0 * 7.2, "{told:?}");
    drop(device);
    disk.close().unwrap();
}

#[test]
fn lost_power_takes_what_was_not_flushed_and_nothing_else() {
    let Some(disk) = write_back_disk("power", 256) else {
        return;
    };
    let device = open_direct(disk.block_device());
    let write = |seed: u64, offset: u64| {
        with_pages(256, |buffer| {
            buffer.copy_from_slice(&pattern(seed, 1 << 20));
            device.write_all_at(buffer, offset)
        })
    };
    write(1, 0).unwrap();
    write(2, 64 << 20).unwrap();
    device.sync_all().unwrap();
    write(3, 64 << 20).unwrap();
    write(4, 128 << 20).unwrap();
    disk.power_off(9).unwrap();
    assert_eq!(write(5, 0).unwrap_err().raw_os_error(), Some(5));
    assert!(read_at(&device, 1, 0).is_err());
    assert!(device.sync_all().is_err());
    disk.power_on().unwrap();
    assert!(read_at(&device, 256, 0).unwrap() == pattern(1, 1 << 20));
    // Each other page is the old one or the new one, and of the 512 some are of either kind.
    let mut kept = 0;
    for (offset, old, new) in [
        (64 << 20, pattern(2, 1 << 20), pattern(3, 1 << 20)),
        (128 << 20, vec![0; 1 << 20], pattern(4, 1 << 20)),
    ] {
        let got = read_at(&device, 256, offset).unwrap();
        for ((got, old), new) in got.chunks(PAGE).zip(old.chunks(PAGE)).zip(new.chunks(PAGE)) {
            assert!(got == old || got == new);
            kept += usize::from(got == new);
        }
    }
    assert!((1..512).contains(&kept), "{kept}");
    drop(device);
    disk.close().unwrap();
}

#[test]
fn command_that_is_not_understood_is_refused_and_told() {
    let Some(disk) = disk("nonsense", 16) else {
        return;
    };
    let control = folder_of(&disk.name()).join("mnt/control");
    let error = fs::write(control, "timing perhaps\n").unwrap_err();
    assert_eq!(error.raw_os_error(), Some(22));
    let told = disk.statistics().unwrap().last_error.unwrap();
    assert!(told.contains("timing perhaps"), "{told}");
    disk.close().unwrap();
}

#[test]
fn disk_with_a_file_system_in_use_goes_away_whole() {
    let Some(disk) = disk("mounted", 512) else {
        return;
    };
    let name = disk.name();
    let folder = std::env::temp_dir().join(format!("rushes-lab-{name}"));
    fs::create_dir_all(&folder).unwrap();
    disk.format(FileSystem::Ext4).unwrap();
    assert!(disk.statistics().unwrap().timing, "format leaves it on");
    disk.mount(&folder, "").unwrap();
    disk.timing(false).unwrap();
    fs::write(folder.join("clip"), pattern(1, 1 << 20)).unwrap();
    let held = File::open(folder.join("clip")).unwrap();
    let close = std::thread::spawn(move || disk.close());
    // Close retries its unmount for some seconds; the file is closed before that.
    std::thread::sleep(Duration::from_millis(300));
    drop(held);
    close.join().unwrap().unwrap();
    assert!(is_gone(&name));
    fs::remove_dir(folder).unwrap();
}

#[test]
fn xfs_is_made_and_keeps_files() {
    let Some(disk) = disk("xfs", 512) else {
        return;
    };
    let folder = std::env::temp_dir().join(format!("rushes-lab-{}", disk.name()));
    fs::create_dir_all(&folder).unwrap();
    disk.timing(false).unwrap();
    disk.format(FileSystem::Xfs).unwrap();
    disk.mount(&folder, "noatime").unwrap();
    let bytes = pattern(2, 5 << 20);
    fs::write(folder.join("clip"), &bytes).unwrap();
    sync_below(&folder).unwrap();
    assert!(fs::read(folder.join("clip")).unwrap() == bytes);
    disk.close().unwrap();
    fs::remove_dir(folder).unwrap();
}

#[test]
fn nothing_stays_behind_after_a_panic() {
    let Some(disk) = disk("panic", 16) else {
        return;
    };
    let name = disk.name();
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _disk = disk;
        panic!("on purpose");
    }));
    assert!(result.is_err());
    assert!(is_gone(&name));
}

/// Kills the owner at many moments, since each step of putting a disk up can be its last.
#[test]
fn nothing_stays_behind_when_the_owner_is_killed() {
    if !possible("killed") {
        return;
    }
    // The kernel shows only this of a loop device over a file that is no longer mounted.
    let nameless = || devices_over(|file| file == "/disk\n");
    let before = nameless();
    for delay_ms in [0, 2, 5, 10, 15, 20, 30, 40, 60, 90, 130, 400] {
        let mut owner = Command::new(PROGRAM)
            .args(["disk", "measure", "--size", "256MiB", "--seconds", "30"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let name = format!("{}-0", owner.id());
        std::thread::sleep(Duration::from_millis(delay_ms));
        owner.kill().unwrap();
        owner.wait().unwrap();
        // A server takes its disk down by itself; without one, the next clean removes the parts.
        std::thread::sleep(Duration::from_millis(100));
        within(Duration::from_secs(30), "disk gone", || {
            clean();
            is_gone(&name)
        });
    }
    // Loop devices that other programs left before do not count.
    within(Duration::from_secs(30), "all detached", || {
        nameless().is_subset(&before)
    });
}

#[test]
fn server_takes_its_disk_down_when_the_owner_is_killed() {
    if !possible("orphaned") {
        return;
    }
    let mut owner = Command::new(PROGRAM)
        .args(["disk", "measure", "--size", "256MiB", "--seconds", "30"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let name = format!("{}-0", owner.id());
    let part = format!("/{name}/");
    let start = Instant::now();
    while attached_to(|file| file.contains(&part)) == 0 && start.elapsed().as_secs() < 20 {
        std::thread::sleep(Duration::from_millis(20));
    }
    let up = folder_of(&name).exists();
    owner.kill().unwrap();
    owner.wait().unwrap();
    assert!(up, "the disk was not up within 20 s");
    // This test calls no clean, on purpose.
    within(Duration::from_secs(30), "disk gone", || is_gone(&name));
}

#[test]
fn clean_takes_down_what_a_killed_server_left_and_nothing_in_use() {
    let Some(kept) = disk("kept", 16) else {
        return;
    };
    let name = name_of("orphan");
    let orphan = SlowDisk::create_detached(&spec(name.clone(), 16)).unwrap();
    clean();
    assert!(orphan.statistics().is_ok(), "a detached disk is in use");
    let server = i32::try_from(orphan.server_pid()).unwrap();
    let server = rustix::process::Pid::from_raw(server).unwrap();
    rustix::process::kill_process(server, rustix::process::Signal::KILL).unwrap();
    drop(orphan);
    within(Duration::from_secs(20), "orphan cleaned", || {
        clean();
        is_gone(&name)
    });
    assert!(kept.statistics().is_ok(), "a disk in use was cleaned away");
    kept.close().unwrap();
}

#[test]
fn second_disk_of_a_name_is_refused_and_the_first_stays() {
    let Some(first) = disk("twice", 16) else {
        return;
    };
    let error = SlowDisk::create(&spec(first.name(), 16)).unwrap_err();
    assert!(error.to_string().contains("create"), "{error}");
    assert!(first.statistics().is_ok());
    first.close().unwrap();
}

/// A small run of `disk measure`, through the whole stack.
#[test]
fn measured_table_is_near_the_model() {
    if !possible("measure") {
        return;
    }
    let output = Command::new(PROGRAM)
        .args(["disk", "measure", "--size", "1GiB", "--seconds", "0.4"])
        .arg("--json")
        .output()
        .unwrap();
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words}");
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let number = |value: &serde_json::Value, key: &str| value[key].as_f64().unwrap();
    let cells = json["table5"]["cells"].as_array().unwrap();
    assert_eq!(cells.len(), 14);
    for cell in cells {
        let (mbps, model) = (number(cell, "mbps"), number(cell, "model_mbps"));
        // With a handful of places many seeks may be short. And a busy machine is slower.
        assert!(mbps < model * 1.4 && mbps > model * 0.3, "{cell}");
    }
    let statistics = &json["statistics"];
    let busy = number(&statistics["read"], "busy_ms") + number(&statistics["write"], "busy_ms");
    let elapsed = number(statistics, "elapsed_ms");
    assert!(busy < elapsed, "{busy} ms of work in {elapsed} ms");
}

#[test]
fn stamped_pages_are_noted_when_they_come_with_and_without_a_cache() {
    if !possible("stamps") {
        return;
    }
    let key = NonZeroU64::new(4711);
    for timing in [DiskTiming::TABLE5, DiskTiming::TABLE5_WRITE_BACK] {
        let name = name_of(&format!("stamps-{}", timing.write_cache_bytes));
        let disk = SlowDisk::create(&DiskSpec {
            timing,
            ..spec(name, 64)
        })
        .expect("the disk comes up");
        let device = open_direct(disk.block_device());
        let take = Take {
            key: 4711,
            number: 6,
        };
        let write = |file_offset: u64, disk_offset: u64| {
            with_pages(2, |pages| {
                take.fill(file_offset, pages);
                device
                    .write_all_at(pages, disk_offset)
                    .expect("it takes them");
            });
        };
        write(0, 1 << 20);
        assert_eq!(disk.arrivals().expect("it tells"), [], "nobody asked");
        disk.watch_stamps(key).expect("it listens");
        write(40 << 12, 2 << 20);
        disk.timing(false).expect("it listens");
        write(80 << 12, 3 << 20);
        let seen: Vec<_> = disk
            .arrivals()
            .expect("it tells")
            .iter()
            .map(|one| (one.number, one.page, one.count, one.whole))
            .collect();
        assert_eq!(seen, [(6, 40, 2, true), (6, 80, 2, true)]);
        disk.watch_stamps(None).expect("it listens");
        write(90 << 12, 4 << 20);
        assert_eq!(disk.arrivals().expect("it tells").len(), 2);
        // Taking down a disk in use takes longer.
        drop(device);
        disk.close().expect("it goes");
    }
}
