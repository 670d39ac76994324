//! The file backend on real directories, with real writers, kills and mounts.

#![allow(clippy::unwrap_used)] // In a test a panic is the answer, in its helpers as well.

#[path = "file_backend/attack.rs"]
mod attack;
mod common;
#[path = "file_backend/copies.rs"]
mod copies;
#[path = "file_backend/crash.rs"]
mod crash;
#[path = "file_backend/roots.rs"]
mod roots;
#[path = "file_backend/scratch.rs"]
mod scratch;

use common::conformance::{self, Tools, World};
use common::records::{place, seen, volume};
use scratch::Scratch;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};
use volward::backend::faults::{Action, FaultRules, Faulty, Rule};
use volward::backend::{Backend, Found, Unwatched};
use volward::model::{ErrorKind, Lane, Record, Step};

struct Behind(Scratch);

impl Tools for Behind {
    fn write(&self, volume: &Record, data: &[u8]) {
        let image = self.0.image_of(volume);
        let file = std::fs::File::options().write(true).open(image).unwrap();
        file.write_all_at(data, 0).unwrap();
    }

    fn read(&self, volume: &Record, length: usize) -> Vec<u8> {
        let mut data = vec![0; length];
        let file = std::fs::File::open(self.0.image_of(volume)).unwrap();
        file.read_exact_at(&mut data, 0).unwrap();
        data
    }

    fn plant(&self, record: &Record) {
        let image = self.0.image_of(record);
        std::fs::create_dir_all(image.parent().unwrap()).unwrap();
        std::fs::write(image, b"whose?").unwrap();
    }

    fn file(&self, data: &[u8], size_bytes: u64) -> String {
        let path = self.0.imports().join("a.raw");
        std::fs::write(&path, data).unwrap();
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.set_len(size_bytes).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn all(&self) -> Vec<String> {
        self.0.all()
    }
}

#[test]
fn it_does_what_every_backend_does() {
    conformance::run(&|| {
        let scratch = Scratch::new();
        // The root has its id before two instances meet in it.
        let mut session = scratch.session();
        session.probe(&Unwatched).unwrap();
        World {
            backend: Box::new(scratch.backend("ours")),
            other: Box::new(scratch.backend("theirs")),
            place: place("local", scratch.root()),
            tools: Box::new(Behind(scratch)),
        }
    });
}

#[test]
fn files_have_no_encryption_and_say_so() {
    let scratch = Scratch::new();
    let mut session = scratch.session();
    let record = volume("db-01", 1, 4096, &scratch.place());
    let error = session
        .ensure_volume(Step::Encrypt, &record, &Unwatched)
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::Invalid);
}

#[test]
fn an_image_is_a_plain_sparse_file_of_whole_sectors() {
    let scratch = Scratch::new();
    let mut session = scratch.session();
    let record = volume("db-01", 1, (1 << 40) + 1, &scratch.place());
    let state = session
        .ensure_volume(Step::Create, &record, &Unwatched)
        .unwrap();
    assert_eq!(state.size_bytes, (1 << 40) + 512);
    assert_eq!(PathBuf::from(&state.handle), scratch.image_of(&record));
    assert!(state.used_bytes.unwrap() < 1 << 20, "it isn't sparse");
    let record = seen(record, &state);
    session.retire_volume(&record, &Unwatched).unwrap();
    session.reclaim(&record, &Unwatched).unwrap();
    assert!(scratch.all().is_empty());
}

#[test]
fn an_open_image_is_not_freed_under_its_user() {
    let scratch = Scratch::new();
    let mut session = scratch.session();
    let record = volume("db-01", 1, 4096, &scratch.place());
    let state = session
        .ensure_volume(Step::Create, &record, &Unwatched)
        .unwrap();
    let record = seen(record, &state);
    let user = std::fs::File::open(&state.handle).unwrap();
    session.retire_volume(&record, &Unwatched).unwrap();
    let error = session.reclaim(&record, &Unwatched).unwrap_err();
    assert_eq!((error.kind, error.touched), (ErrorKind::InUse, false));
    let own = format!("process {}", std::process::id());
    assert!(error.blockers[0].starts_with(&own), "{:?}", error.blockers);
    drop(user);
    session.reclaim(&record, &Unwatched).unwrap();
    assert!(scratch.all().is_empty());
}

#[test]
fn a_drill_leaves_it_really_half_made() {
    let scratch = Scratch::new();
    let faults = FaultRules::new(1);
    faults.set(vec![Rule::new(Some(Step::Create), Action::Half)]);
    let drilled = Faulty::new(scratch.backend("ours"), faults.clone());
    let record = volume("db-01", 1, 4096, &scratch.place());
    thread::scope(|scope| {
        let hung = scope.spawn(|| {
            let mut session = drilled.connect("local", Lane::Create, &Unwatched).unwrap();
            session.ensure_volume(Step::Create, &record, &Unwatched)
        });
        let begun = Instant::now();
        while faults.hanging() == 0 {
            assert!(begun.elapsed() < Duration::from_secs(60), "it never hung");
            thread::yield_now();
        }
        let mut session = scratch.session();
        assert_eq!(
            session.inspect(&record, &Unwatched).unwrap(),
            Some(Found::Half)
        );
        faults.clear();
        assert!(hung.join().unwrap().unwrap().did);
        let found = session.inspect(&record, &Unwatched).unwrap();
        assert!(matches!(found, Some(Found::Volume(_))));
    });
}
