//! Snapshots and clones while somebody writes, and where blocks can be shared.

use crate::common::records::{from_snapshot, made_from, seen, snapshot, volume};
use crate::roots::Mount;
use crate::scratch::Scratch;
use std::fs::{self, File};
use std::ops::ControlFlow;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use volward::backend::{Ctl, Retired, Session, Unwatched};
use volward::model::{ErrorKind, Known, Record, Step};

const SIZE: u64 = 4 << 20;

/// A volume full of bytes.
fn filled(scratch: &Scratch, session: &mut dyn Session) -> Record {
    let record = volume("db-01", 1, SIZE, &scratch.place());
    let state = session
        .ensure_volume(Step::Create, &record, &Unwatched)
        .unwrap();
    fs::write(&state.handle, vec![1u8; SIZE as usize]).unwrap();
    seen(record, &state)
}

fn writer(record: &Record, scratch: &Scratch) -> std::io::Result<File> {
    let flags = rustix::fs::OFlags::NONBLOCK.bits();
    File::options()
        .write(true)
        .custom_flags(flags.try_into().unwrap())
        .open(scratch.image_of(record))
}

#[test]
fn a_writer_holds_back_the_snapshot_and_is_named() {
    let scratch = Scratch::new();
    let mut session = scratch.session();
    let source = filled(&scratch, session.as_mut());
    let guest = writer(&source, &scratch).unwrap();
    let before = scratch.all();
    let wished = snapshot("kept", 2, &source);
    let error = session.ensure_snapshot(&wished, &Unwatched).unwrap_err();
    assert_eq!(error.kind, ErrorKind::InUse, "{error}");
    let own = format!("process {}", std::process::id());
    assert!(error.blockers[0].starts_with(&own), "{:?}", error.blockers);
    assert_eq!(scratch.all(), before);
    drop(guest);
    // One that only reads holds nothing back.
    let _reader = File::open(scratch.image_of(&source)).unwrap();
    assert!(session.ensure_snapshot(&wished, &Unwatched).unwrap().did);
}

/// Wants to write to the source in the middle of a copy, so many times.
struct Intruder<'a> {
    scratch: &'a Scratch,
    source: &'a Record,
    times: AtomicU32,
    came: AtomicU32,
    last: Mutex<u64>,
}

impl Ctl for Intruder<'_> {
    fn progress(&self, done: u64, total: u64) -> ControlFlow<()> {
        // Once in each attempt, at its first report.
        let mut last = self.last.lock().unwrap();
        let first = *last == 0 || done <= *last;
        *last = done;
        if first && total == SIZE && self.times.load(Ordering::SeqCst) > 0 {
            self.times.fetch_sub(1, Ordering::SeqCst);
            self.came.fetch_add(1, Ordering::SeqCst);
            // The kernel makes it wait for the lease; it tells at once.
            let error = writer(self.source, self.scratch).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
        }
        ControlFlow::Continue(())
    }

    fn cancelled(&self) -> bool {
        false
    }
}

#[test]
fn a_writer_that_comes_breaks_the_copy_and_it_begins_again() {
    let scratch = Scratch::new();
    let mut session = scratch.session();
    let source = filled(&scratch, session.as_mut());
    for (uid, times) in [(2, 1), (3, 2), (4, 100)] {
        let intruder = Intruder {
            scratch: &scratch,
            source: &source,
            times: AtomicU32::new(times),
            came: AtomicU32::new(0),
            last: Mutex::new(0),
        };
        let wished = snapshot(&format!("kept-{uid}"), uid, &source);
        let answer = session.ensure_snapshot(&wished, &intruder);
        if intruder.came.load(Ordering::SeqCst) == 0 {
            eprintln!("not shown here: this file system shares blocks, so no copy can be met");
            return;
        }
        if times < 3 {
            assert!(answer.unwrap().did);
            assert_eq!(intruder.came.load(Ordering::SeqCst), times);
        } else {
            assert_eq!(answer.unwrap_err().kind, ErrorKind::InUse);
            assert_eq!(session.inspect(&wished, &Unwatched).unwrap(), None);
        }
        // The writer is let in afterwards.
        writer(&source, &scratch).unwrap();
    }
}

#[test]
fn no_snapshot_is_torn_by_a_concurrent_writer() {
    let scratch = Scratch::new();
    let mut session = scratch.session();
    let source = filled(&scratch, session.as_mut());
    let image = scratch.image_of(&source);
    let done = AtomicBool::new(false);
    let mut taken = 0;
    thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..u8::MAX {
                if done.load(Ordering::SeqCst) {
                    return;
                }
                let file = File::options().write(true).open(&image).unwrap();
                // From the end, so that a copy from the beginning would mix two rounds.
                for block in (0..4u64).rev() {
                    let data = vec![round; 1 << 20];
                    file.write_all_at(&data, block << 20).unwrap();
                }
                drop(file);
                thread::yield_now();
            }
        });
        for uid in 2..400u128 {
            let wished = snapshot("kept", uid, &source);
            match session.ensure_snapshot(&wished, &Unwatched) {
                Err(error) => assert_eq!(error.kind, ErrorKind::InUse, "{error}"),
                Ok(_) => {
                    let bytes = fs::read(scratch.image_of(&wished)).unwrap();
                    let first = bytes[0];
                    assert!(bytes.iter().all(|byte| *byte == first), "a torn snapshot");
                    let mut kept = wished;
                    kept.known = Known::Live;
                    let gone = session.retire_snapshot(&kept, &Unwatched);
                    assert_eq!(gone, Ok(Retired::Gone));
                    taken += 1;
                }
            }
            if taken == 10 {
                break;
            }
            thread::yield_now();
        }
        done.store(true, Ordering::SeqCst);
    });
    // With the writer gone there is nothing in the way.
    let last = snapshot("last", 1000, &source);
    assert!(session.ensure_snapshot(&last, &Unwatched).unwrap().did);
    assert_eq!(scratch.all().len(), 2, "{:?}", scratch.all());
}

#[test]
fn a_loop_device_holds_back_the_snapshot_and_is_named() {
    let scratch = Scratch::new();
    let mut session = scratch.session();
    let source = filled(&scratch, session.as_mut());
    let image = scratch.image_of(&source);
    let mut attach = Command::new("losetup");
    attach.args(["--find", "--show"]).arg(&image);
    let Some(device) = output_of(&mut attach) else {
        eprintln!("not shown here: losetup doesn't work");
        return;
    };
    let wished = snapshot("kept", 2, &source);
    let answer = session.ensure_snapshot(&wished, &Unwatched);
    let detach = Command::new("losetup").args(["--detach", &device]).status();
    assert!(detach.unwrap().success());
    let error = answer.unwrap_err();
    assert_eq!(error.kind, ErrorKind::InUse, "{error}");
    assert_eq!(error.blockers[0], format!("loop device {device}"));
}

fn output_of(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|o| o.status.success())?;
    Some(String::from_utf8(output.stdout).unwrap().trim().to_owned())
}

/// Takes a snapshot of 32 MiB and clones it; says by how many bytes the disk got fuller.
fn copied_bytes(scratch: &Scratch) -> u64 {
    let mut session = scratch.session();
    let record = volume("db-01", 1, 32 << 20, &scratch.place());
    let state = session
        .ensure_volume(Step::Create, &record, &Unwatched)
        .unwrap();
    let source = seen(record, &state);
    let data: Vec<u8> = (0..32u32 << 20).map(|at| (at % 251) as u8).collect();
    fs::write(&state.handle, &data).unwrap();
    File::open(&state.handle).unwrap().sync_all().unwrap();
    let free = || {
        let stat = rustix::fs::statvfs(scratch.root()).unwrap();
        stat.f_bfree * stat.f_frsize
    };
    let before = free();
    let mut kept = snapshot("kept", 2, &source);
    session.ensure_snapshot(&kept, &Unwatched).unwrap();
    kept.known = Known::Live;
    let mut clone = made_from(
        volume("clone", 3, 32 << 20, &scratch.place()),
        from_snapshot(&kept),
    );
    clone.volume_mut().unwrap().size_bytes = 64 << 20;
    let state = session
        .ensure_volume(Step::Create, &clone, &Unwatched)
        .unwrap();
    assert_eq!(state.size_bytes, 64 << 20);
    let taken = before.saturating_sub(free());
    assert!(fs::read(&state.handle).unwrap()[..32 << 20] == data[..]);
    taken
}

#[test]
fn blocks_are_shared_where_the_file_system_can() {
    let scratch = Scratch::new();
    let disk = scratch.directory.join("disk");
    File::create(&disk).unwrap().set_len(512 << 20).unwrap();
    for (make, options) in [("mkfs.xfs", &["-q"][..]), ("mkfs.btrfs", &["-q", "-f"])] {
        if output_of(Command::new(make).args(options).arg(&disk)).is_none() {
            eprintln!("not shown here: {make} doesn't work");
            continue;
        }
        let at = scratch.directory.join(make);
        let Some(_mount) = Mount::new(&["-o", "loop", disk.to_str().unwrap()], &at) else {
            continue;
        };
        let on_it = Scratch::at(at.clone(), "root");
        let taken = copied_bytes(&on_it);
        assert!(
            taken < 8 << 20,
            "{make}: {taken} bytes for two shared copies"
        );
        // Its directory is the mount point: it goes with the mount.
        std::mem::forget(on_it);
    }
}

#[test]
fn holes_stay_holes_in_a_copy() {
    let scratch = Scratch::new();
    let mut session = scratch.session();
    let record = volume("db-01", 1, 64 << 30, &scratch.place());
    let state = session
        .ensure_volume(Step::Create, &record, &Unwatched)
        .unwrap();
    let source = seen(record, &state);
    let file = File::options().write(true).open(&state.handle).unwrap();
    file.write_all_at(b"far out", 48 << 30).unwrap();
    file.write_all_at(&[0; 4096], 1 << 30).unwrap();
    drop(file);
    let kept = snapshot("kept", 2, &source);
    let state = session.ensure_snapshot(&kept, &Unwatched).unwrap();
    assert_eq!(state.size_bytes, 64 << 30);
    let copy = File::open(scratch.image_of(&kept)).unwrap();
    let mut bytes = [0; 7];
    copy.read_exact_at(&mut bytes, 48 << 30).unwrap();
    assert_eq!(&bytes, b"far out");
    let blocks = std::os::unix::fs::MetadataExt::blocks(&copy.metadata().unwrap());
    assert!(blocks * 512 < 4 << 20, "{blocks} blocks");
    assert!(Path::new(scratch.root()).join("tmp").exists());
}
