//! The simulated storage refuses and allows what every backend does.

#![allow(clippy::unwrap_used)] // In a test a panic is the answer, in its helpers as well.

mod common;

use common::conformance::{self, Tools, World};
use common::records::{place, seen, volume};
use std::collections::BTreeMap;
use volward::backend::sim::{SimBackend, SimConfig};
use volward::backend::{Backend, Unwatched};
use volward::model::{ErrorKind, Lane, Record, Step};

struct Behind(SimBackend);

impl Tools for Behind {
    fn write(&self, volume: &Record, data: &[u8]) {
        assert!(self.0.write(volume.image, data));
    }

    fn read(&self, volume: &Record, length: usize) -> Vec<u8> {
        let mut data = self.0.read(volume.image).unwrap();
        data.resize(length, 0);
        data
    }

    fn plant(&self, record: &Record) {
        self.0.plant(record, None);
    }

    fn file(&self, data: &[u8], size_bytes: u64) -> String {
        self.0.add_file("/images/a.raw", size_bytes, data);
        "/images/a.raw".to_owned()
    }

    fn all(&self) -> Vec<String> {
        let images = self.0.images();
        images.iter().map(|image| format!("{image:?}")).collect()
    }
}

fn backend() -> SimBackend {
    SimBackend::new(SimConfig {
        domains: BTreeMap::from([("fast".to_owned(), vec!["pool".to_owned()])]),
        instance: "ours".to_owned(),
        latency: BTreeMap::new(),
    })
}

#[test]
fn it_does_what_every_backend_does() {
    conformance::run(&|| {
        let sim = backend();
        World {
            backend: Box::new(sim.clone()),
            other: Box::new(sim.as_instance("theirs")),
            place: place("fast", "pool"),
            tools: Box::new(Behind(sim)),
        }
    });
}

#[test]
fn a_watcher_holds_back_the_reclaim_and_is_named() {
    let sim = backend();
    let mut session = sim.connect("fast", Lane::Delete, &Unwatched).unwrap();
    let record = volume("db-01", 1, 4096, &place("fast", "pool"));
    let state = session
        .ensure_volume(Step::Create, &record, &Unwatched)
        .unwrap();
    let record = seen(record, &state);
    session.retire_volume(&record, &Unwatched).unwrap();
    assert!(sim.set_watchers(record.image, &["10.0.0.7:0/123"]));
    let error = session.reclaim(&record, &Unwatched).unwrap_err();
    assert_eq!((error.kind, error.touched), (ErrorKind::InUse, false));
    assert_eq!(error.blockers, ["10.0.0.7:0/123"]);
    sim.set_watchers(record.image, &[]);
    session.reclaim(&record, &Unwatched).unwrap();
    assert!(sim.images().is_empty());
}

#[test]
fn a_full_pool_takes_nothing_new_and_still_deletes() {
    let sim = backend();
    let mut session = sim.connect("fast", Lane::Create, &Unwatched).unwrap();
    let record = volume("db-01", 1, 4096, &place("fast", "pool"));
    let state = session
        .ensure_volume(Step::Create, &record, &Unwatched)
        .unwrap();
    let record = seen(record, &state);
    sim.set_full("pool", true);
    let second = volume("db-02", 2, 4096, &place("fast", "pool"));
    let error = session
        .ensure_volume(Step::Create, &second, &Unwatched)
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::NoSpace);
    session.retire_volume(&record, &Unwatched).unwrap();
    session.reclaim(&record, &Unwatched).unwrap();
    assert!(sim.images().is_empty());
}

#[test]
fn another_pool_in_its_place_is_told_apart() {
    let sim = backend();
    let mut session = sim.connect("fast", Lane::Create, &Unwatched).unwrap();
    let record = volume("db-01", 1, 4096, &place("fast", "pool"));
    let state = session
        .ensure_volume(Step::Create, &record, &Unwatched)
        .unwrap();
    let record = seen(record, &state);
    sim.replace_root("pool");
    let error = session.retire_volume(&record, &Unwatched).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unreachable);
}
