//! The RBD backend on a real cluster.
//!
//! Runs when `VOLWARD_CEPH=1`; then a missing cluster is a failure. The cluster is the one of
//! `VOLWARD_CEPH_CONF` (made by `scripts/ceph up`: tests pause its daemons), or one that the test
//! starts itself and takes down again. Tests run one after the other.
#![cfg(feature = "rbd")]
// Helpers of tests may fail as loudly as tests.
#![allow(clippy::unwrap_used, missing_debug_implementations)]

#[path = "ceph/lab.rs"]
mod lab;

use lab::{Lab, Ledger0, clone_of, record, snapshot_of, volume_clone_of};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use volward::backend::rbd::RbdBackend;
use volward::backend::{Backend, Ctl, Found, Reclaimed, Retired, Session, Unwatched};
use volward::model::{ErrorKind, Known, Lane, Qos, Record, Source, SourceFormat, Step};

fn session(backend: &RbdBackend, domain: &str, lane: Lane) -> Box<dyn Session> {
    backend.connect(domain, lane, &Unwatched).unwrap()
}

/// Makes it, and returns the record as the scheduler would keep it.
fn made(session: &mut dyn Session, mut record: Record) -> Record {
    let state = session
        .ensure_volume(Step::Create, &record, &Unwatched)
        .unwrap();
    record.known = Known::Live;
    let volume = record.volume_mut().unwrap();
    volume.image_id = state.image_id;
    record
}

fn trash_and_reclaim(session: &mut dyn Session, record: &Record) -> Reclaimed {
    session.retire_volume(record, &Unwatched).unwrap();
    session.reclaim(record, &Unwatched).unwrap()
}

#[test]
fn a_volume_from_its_making_to_its_end() {
    let Some(lab) = Lab::asked() else { return };
    let backend = lab.backend();
    let mut s = session(&backend, "fast", Lane::Create);
    let mut wish = record("db-01", "rbd");
    wish.volume_mut().unwrap().qos = Some(Qos {
        iops: Some(100),
        bytes_per_second: None,
    });
    assert_eq!(s.inspect(&wish, &Unwatched).unwrap(), None);
    let state = s.ensure_volume(Step::Create, &wish, &Unwatched).unwrap();
    assert!(state.did && state.size_bytes == 1 << 30 && !state.has_parent);
    let id = state.image_id.clone().unwrap();
    let name = state.handle.strip_prefix("rbd:rbd/").unwrap().to_owned();

    // What other tools see.
    let meta = lab.run(&["rbd", "image-meta", "list", &name]);
    assert!(meta.contains("conf_rbd_qos_iops_limit  100"), "{meta}");
    assert!(meta.contains(state.wwn.as_deref().unwrap()), "{meta}");

    // Again: found as it is.
    let again = s.ensure_volume(Step::Create, &wish, &Unwatched).unwrap();
    assert!(!again.did && again.image_id.as_ref() == Some(&id));

    // A newer wish: larger, other limits.
    wish.known = Known::Live;
    wish.generation = 2;
    let volume = wish.volume_mut().unwrap();
    volume.image_id = Some(id.clone());
    volume.size_bytes = 2 << 30;
    volume.qos = None;
    let state = s.ensure_volume(Step::Update, &wish, &Unwatched).unwrap();
    assert!(state.did && state.size_bytes == 2 << 30 && state.generation == 2);
    let meta = lab.run(&["rbd", "image-meta", "list", &name]);
    assert!(!meta.contains("conf_rbd_qos"), "{meta}");
    let found = s.inspect(&wish, &Unwatched).unwrap();
    assert!(matches!(found, Some(Found::Volume(v)) if v.size_bytes == 2 << 30 && !v.did));

    // Out of sight, back, and away for good.
    let trashed = Retired::Trashed {
        image_id: Some(id.clone()),
    };
    assert_eq!(s.retire_volume(&wish, &Unwatched).unwrap(), trashed);
    assert_eq!(s.retire_volume(&wish, &Unwatched).unwrap(), trashed);
    let found = s.inspect(&wish, &Unwatched).unwrap();
    assert!(matches!(found, Some(Found::Trashed { whole: true, .. })));
    assert_eq!(s.restore(&wish, &Unwatched).unwrap().size_bytes, 2 << 30);
    assert_eq!(trash_and_reclaim(&mut *s, &wish), Reclaimed::Done);
    assert_eq!(s.reclaim(&wish, &Unwatched).unwrap(), Reclaimed::Done);
    assert_eq!(s.retire_volume(&wish, &Unwatched).unwrap(), Retired::Gone);
    assert_eq!(s.inspect(&wish, &Unwatched).unwrap(), None);
    lab.assert_empty("rbd");
}

#[test]
fn snapshots_outlive_their_volume_and_clones_their_snapshot() {
    let Some(lab) = Lab::asked() else { return };
    let backend = lab.backend();
    let mut s = session(&backend, "fast", Lane::Create);
    let base = made(&mut *s, record("base", "rbd"));
    let snap = snapshot_of(&base, "s1");
    let taken = s.ensure_snapshot(&snap, &Unwatched).unwrap();
    assert!(taken.did && taken.size_bytes == 1 << 30);
    assert!(!s.ensure_snapshot(&snap, &Unwatched).unwrap().did);
    let found = s.inspect(&snap, &Unwatched).unwrap();
    assert!(matches!(found, Some(Found::Snapshot(_))));

    // The volume becomes the carrier of its snapshot; a clone can still be made.
    let retired = s.retire_volume(&base, &Unwatched).unwrap();
    assert!(matches!(retired, Retired::Carrier { ref snapshots } if snapshots.len() == 1));
    let child = made(&mut *s, clone_of(&base, &snap, "child"));
    let found = s.inspect(&child, &Unwatched).unwrap();
    assert!(matches!(found, Some(Found::Volume(v)) if v.has_parent));

    // A rebuild sees volume, snapshot and clone, each once.
    let mut seen: Vec<String> = s
        .survey(&Unwatched)
        .unwrap()
        .iter()
        .map(|m| format!("{} {:?}", m.record.name, m.known))
        .collect();
    seen.sort();
    assert_eq!(seen, ["base Carrier", "child Live", "s1 Live"]);

    // Its last snapshot goes though it has a clone; reclaim says what it waits for.
    assert_eq!(s.retire_snapshot(&snap, &Unwatched).unwrap(), Retired::Gone);
    let blocked = trash_and_reclaim(&mut *s, &base);
    let Reclaimed::Blocked { by } = blocked else {
        panic!("{blocked:?}")
    };
    assert!(by.len() == 1 && by[0].contains("child"), "{by:?}");
    assert!(!s.flatten(&child, &Unwatched).unwrap().has_parent);
    assert!(!s.flatten(&child, &Unwatched).unwrap().did);
    assert_eq!(s.reclaim(&base, &Unwatched).unwrap(), Reclaimed::Done);
    assert_eq!(trash_and_reclaim(&mut *s, &child), Reclaimed::Done);
    lab.assert_empty("rbd");
}

#[test]
fn a_clone_of_a_volume_inherits_data_and_no_mark() {
    let Some(lab) = Lab::asked() else { return };
    let backend = lab.backend();
    let mut s = session(&backend, "fast", Lane::Create);
    let base = made(&mut *s, record("base", "rbd"));
    let child = made(&mut *s, volume_clone_of(&base, "copy"));
    let found = s.inspect(&child, &Unwatched).unwrap();
    assert!(matches!(found, Some(Found::Volume(v)) if v.has_parent));
    // The hidden snapshot is out of the way, so the base can go to the trash at once.
    let retired = s.retire_volume(&base, &Unwatched).unwrap();
    assert!(matches!(retired, Retired::Trashed { .. }));
    let blocked = s.reclaim(&base, &Unwatched).unwrap();
    assert!(matches!(blocked, Reclaimed::Blocked { .. }));
    assert_eq!(trash_and_reclaim(&mut *s, &child), Reclaimed::Done);
    assert_eq!(s.reclaim(&base, &Unwatched).unwrap(), Reclaimed::Done);
    lab.assert_empty("rbd");
}

#[test]
fn what_is_not_ours_is_left_alone() {
    let Some(lab) = Lab::asked() else { return };
    let backend = lab.backend();
    let mut s = session(&backend, "fast", Lane::Create);
    // An unmarked image under the name that a new volume would get.
    let mut wish = record("taken", "rbd");
    let name = lab.image_name(&wish);
    lab.run(&["rbd", "create", "--size", "1G", &name]);
    assert_eq!(s.inspect(&wish, &Unwatched).unwrap(), Some(Found::Unmarked));
    wish.known = Known::Nothing;
    let error = s
        .ensure_volume(Step::Create, &wish, &Unwatched)
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::AlreadyExists);
    let error = s.retire_volume(&wish, &Unwatched).unwrap_err();
    assert_eq!(error.kind, ErrorKind::AlreadyExists);
    lab.run(&["rbd", "info", &name]);
    // Another one in the trash: reclaim refuses it.
    lab.run(&["rbd", "trash", "mv", &name]);
    let error = s.reclaim(&wish, &Unwatched).unwrap_err();
    assert!(error.kind == ErrorKind::AlreadyExists && !error.touched);
    assert!(lab.run(&["rbd", "trash", "ls"]).contains(&name));
    // The same name seen free before the create: our remnant, made again.
    lab.run(&["rbd", "create", "--size", "1M", &name]);
    wish.known = Known::Free;
    let state = s.ensure_volume(Step::Create, &wish, &Unwatched).unwrap();
    assert!(state.did && state.size_bytes == 1 << 30);
    // Another instance's volume.
    let other = lab.backend_of("other-instance", Arc::new(Ledger0::default()), "volward");
    let mut theirs = session(&other, "fast", Lane::Create);
    let found = theirs.inspect(&wish, &Unwatched).unwrap();
    assert!(matches!(found, Some(Found::Foreign(words)) if words.contains("test-instance")));
    let error = theirs.retire_volume(&wish, &Unwatched).unwrap_err();
    assert_eq!(error.kind, ErrorKind::AlreadyExists);
}

#[test]
fn another_pool_under_the_same_name_is_unreachable_not_gone() {
    let Some(lab) = Lab::asked() else { return };
    let backend = lab.backend();
    let mut s = session(&backend, "fast", Lane::Create);
    let mut wish = record("v", "rbd");
    wish.place.identity = Some("00000000-0000-0000-0000-000000000000/1".into());
    for result in [
        s.inspect(&wish, &Unwatched).map(drop),
        s.retire_volume(&wish, &Unwatched).map(drop),
        s.reclaim(&wish, &Unwatched).map(drop),
        s.ensure_volume(Step::Create, &wish, &Unwatched).map(drop),
    ] {
        assert_eq!(result.unwrap_err().kind, ErrorKind::Unreachable);
    }
    wish.place.identity = None;
    wish.place.root = "nowhere".into();
    let error = s.inspect(&wish, &Unwatched).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unreachable, "{error}");
}

#[test]
fn a_watcher_is_named_and_nothing_is_touched() {
    let Some(lab) = Lab::asked() else { return };
    let backend = lab.backend();
    let mut s = session(&backend, "fast", Lane::Delete);
    let volume = made(&mut *s, record("watched", "rbd"));
    let watcher = lab.watcher(&lab.image_name(&volume));
    s.retire_volume(&volume, &Unwatched).unwrap();
    let error = s.reclaim(&volume, &Unwatched).unwrap_err();
    assert_eq!(error.kind, ErrorKind::InUse, "{error}");
    assert!(!error.touched && error.blockers.len() == 1, "{error:?}");
    let found = s.inspect(&volume, &Unwatched).unwrap();
    assert!(matches!(found, Some(Found::Trashed { whole: true, .. })));
    drop(watcher);
    assert_eq!(s.reclaim(&volume, &Unwatched).unwrap(), Reclaimed::Done);
}

/// Breaks at the first report.
#[derive(Default)]
struct Impatient(AtomicBool);

impl Ctl for Impatient {
    fn progress(&self, _done: u64, _total: u64) -> ControlFlow<()> {
        self.0.store(true, Ordering::Relaxed);
        ControlFlow::Break(())
    }

    fn cancelled(&self) -> bool {
        false
    }
}

#[test]
fn an_import_that_was_cancelled_is_half_and_goes_on() {
    let Some(lab) = Lab::asked() else { return };
    let backend = lab.backend();
    let mut s = session(&backend, "fast", Lane::Create);
    let path = lab.dir.join("import/raw");
    let mut bytes = vec![0u8; 9 << 20];
    bytes[5 << 20] = 42;
    std::fs::write(&path, &bytes).unwrap();
    let mut wish = record("imported", "rbd");
    wish.volume_mut().unwrap().source = Some(Source::File {
        path: path.to_string_lossy().into_owned(),
        format: SourceFormat::Raw,
    });
    let error = s
        .ensure_volume(Step::Import, &wish, &Impatient::default())
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::Cancelled, "{error}");
    assert_eq!(s.inspect(&wish, &Unwatched).unwrap(), Some(Found::Half));
    s.ensure_volume(Step::Import, &wish, &Unwatched).unwrap();
    assert!(
        !s.ensure_volume(Step::Import, &wish, &Unwatched)
            .unwrap()
            .did
    );
    let out = lab.dir.join("import/out");
    let out = out.to_string_lossy();
    lab.run(&["rbd", "export", &lab.image_name(&wish), &out]);
    let exported = std::fs::read(&*out).unwrap();
    assert!(exported.len() == 1 << 30 && exported[..9 << 20] == bytes[..]);
    assert!(exported[9 << 20..].iter().all(|byte| *byte == 0));
    // A file that is larger than the volume, and one from elsewhere.
    wish.volume_mut().unwrap().size_bytes = 1 << 20;
    let error = s
        .ensure_volume(Step::Import, &wish, &Unwatched)
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::Invalid, "{error}");
    wish.volume_mut().unwrap().source = Some(Source::File {
        path: format!("{}/import/../key", lab.dir.display()),
        format: SourceFormat::Raw,
    });
    s.ensure_volume(Step::Import, &wish, &Unwatched)
        .unwrap_err();
}

#[test]
fn a_hung_pool_delays_nobody_else_and_its_calls_return_late() {
    let Some(lab) = Lab::asked() else { return };
    let backend = Arc::new(lab.backend());
    let mut slow = session(&backend, "slow", Lane::Delete);
    let victims: Vec<Record> = (0..4)
        .map(|n| made(&mut *slow, record(&format!("victim-{n}"), "slow")))
        .collect();
    lab.pause("slow");
    let (done, late) = mpsc::channel();
    for victim in victims.clone() {
        let (backend, done) = (Arc::clone(&backend), done.clone());
        std::thread::spawn(move || {
            let mut s = session(&backend, "slow", Lane::Delete);
            let _ = done.send(s.retire_volume(&victim, &Unwatched));
        });
    }
    let mut fast = session(&backend, "fast", Lane::Create);
    for n in 0..20 {
        made(&mut *fast, record(&format!("fine-{n}"), "rbd"));
    }
    assert!(late.try_recv().is_err(), "the pool was not hung");
    backend.retire("slow", Lane::Delete);
    lab.resume("slow");
    for _ in &victims {
        let retired = late.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(
            matches!(retired, Ok(Retired::Trashed { .. })),
            "{retired:?}"
        );
    }
    // A session of the retired connection goes on with a new one.
    for victim in &victims {
        assert_eq!(slow.reclaim(victim, &Unwatched).unwrap(), Reclaimed::Done);
    }
    lab.assert_empty("slow");
}

#[test]
fn abandoned_calls_come_back_when_their_session_is_fenced() {
    let Some(lab) = Lab::asked() else { return };
    let ledger = Arc::new(Ledger0::default());
    let backend = Arc::new(lab.backend_of("test-instance", Arc::clone(&ledger), "volward"));
    let mut create = session(&backend, "slow", Lane::Create);
    let victim = made(&mut *create, record("victim", "slow"));
    // A session that is stuck for good: it takes part in nothing after this.
    let stuck = session(&backend, "slow", Lane::Delete);
    let opened = ledger.open().len();
    assert_eq!(opened, 2, "one per lane");
    assert_eq!(backend.recover_abandoned("slow").unwrap(), 0);
    backend.retire("slow", Lane::Delete);
    assert_eq!(backend.recover_abandoned("slow").unwrap(), 1);
    assert_eq!(backend.recover_abandoned("slow").unwrap(), 0, "once");
    let blocklist = lab.run(&["ceph", "osd", "blocklist", "ls"]);
    assert_eq!(blocklist.lines().count(), 1, "{blocklist}");
    // It comes back, its address is forgotten, and another session does the work.
    drop(stuck);
    let mut again = session(&backend, "slow", Lane::Delete);
    assert_eq!(trash_and_reclaim(&mut *again, &victim), Reclaimed::Done);
    assert_eq!(ledger.open().len(), 2);
}

#[test]
fn a_session_on_the_blocklist_is_replaced() {
    let Some(lab) = Lab::asked() else { return };
    let ledger = Arc::new(Ledger0::default());
    let backend = lab.backend_of("test-instance", Arc::clone(&ledger), "volward");
    let mut s = session(&backend, "fast", Lane::Create);
    s.probe(&Unwatched).unwrap();
    let address = ledger.open().pop().unwrap();
    lab.run(&["ceph", "osd", "blocklist", "add", &address]);
    let limit = Instant::now() + Duration::from_secs(30);
    let lost = loop {
        match s.probe(&Unwatched) {
            Err(error) => break error,
            Ok(_) => assert!(Instant::now() < limit, "the blocklist has no effect"),
        }
    };
    assert_eq!(lost.kind, ErrorKind::SessionLost, "{lost}");
    s.probe(&Unwatched).unwrap();
    made(&mut *s, record("after", "rbd"));
}

#[test]
fn predecessors_are_fenced_before_the_first_job() {
    let Some(lab) = Lab::asked() else { return };
    let ledger = Arc::new(Ledger0::default());
    let backend = lab.backend_of("test-instance", Arc::clone(&ledger), "volward");
    let mut old = session(&backend, "fast", Lane::Create);
    old.probe(&Unwatched).unwrap();
    // What a process that was killed leaves: its addresses.
    let successor = Arc::new(Ledger0::after(&ledger.open()));
    let next = lab.backend_of("test-instance", Arc::clone(&successor), "volward");
    let mut new = session(&next, "fast", Lane::Create);
    assert!(successor.left().is_empty());
    made(&mut *new, record("new", "rbd"));
    // Our client has the newest map only when it asks; the cluster has fenced it already.
    let blocklist = lab.run(&["ceph", "osd", "blocklist", "ls"]);
    assert_eq!(blocklist.lines().count(), 1, "{blocklist}");
    // Without the capability it waits instead of acting beside its predecessor.
    let successor = Arc::new(Ledger0::after(&["127.0.0.1:0/12345".into()]));
    let next = lab.backend_of("test-instance", Arc::clone(&successor), "nofence");
    let error = next
        .connect("fast", Lane::Create, &Unwatched)
        .err()
        .expect("it may act only after 30 s");
    assert_eq!(error.kind, ErrorKind::Unreachable);
    assert!(error.message.contains("profile rbd"), "{error}");
}

#[test]
fn a_wrong_key_and_a_silent_monitor_blame_no_volume() {
    let Some(lab) = Lab::asked() else { return };
    let backend = lab.backend_of("i", Arc::new(Ledger0::default()), "nobody");
    let error = backend
        .connect("fast", Lane::Create, &Unwatched)
        .err()
        .unwrap();
    assert_eq!(error.kind, ErrorKind::Unreachable, "{error}");
    lab.pause("mon");
    let backend = lab.backend();
    let error = backend
        .connect("fast", Lane::Create, &Unwatched)
        .err()
        .unwrap();
    assert_eq!(error.kind, ErrorKind::Unreachable, "{error}");
    lab.resume("mon");
    backend.connect("fast", Lane::Create, &Unwatched).unwrap();
}

#[test]
fn a_full_cluster_refuses_creates_and_lets_deletes_through() {
    let Some(lab) = Lab::asked() else { return };
    let backend = lab.backend();
    let mut s = session(&backend, "fast", Lane::Create);
    let volume = made(&mut *s, record("old", "rbd"));
    lab.script(&["full"]);
    let limit = Instant::now() + Duration::from_secs(60);
    let mut n = 0;
    let error = loop {
        n += 1;
        let wish = record(&format!("new-{n}"), "rbd");
        match s.ensure_volume(Step::Create, &wish, &Unwatched) {
            Err(error) => break error,
            Ok(_) => assert!(Instant::now() < limit, "the cluster doesn't become full"),
        }
    };
    assert_eq!(error.kind, ErrorKind::NoSpace, "{error}");
    assert_eq!(trash_and_reclaim(&mut *s, &volume), Reclaimed::Done);
    lab.script(&["roomy"]);
}

#[test]
fn encryption_is_for_the_right_key_and_hides_its_header() {
    let Some(lab) = Lab::asked() else { return };
    let backend = lab.backend();
    let mut s = session(&backend, "fast", Lane::Create);
    let mut wish = record("secret", "rbd");
    wish.volume_mut().unwrap().encryption = Some("test".into());
    let state = s.ensure_volume(Step::Create, &wish, &Unwatched).unwrap();
    assert!(!state.encrypted && state.size_bytes == 1 << 30);
    wish.known = Known::Live;
    let state = s.ensure_volume(Step::Encrypt, &wish, &Unwatched).unwrap();
    assert!(state.encrypted && state.did && state.size_bytes == 1 << 30);
    assert!(
        !s.ensure_volume(Step::Encrypt, &wish, &Unwatched)
            .unwrap()
            .did
    );
    let info = lab.run(&["rbd", "info", "--format", "json", &lab.image_name(&wish)]);
    assert!(
        info.contains(&((1u64 << 30) + (16 << 20)).to_string()),
        "{info}"
    );
}

#[test]
fn a_sick_third_pool_is_never_read() {
    let Some(lab) = Lab::asked() else { return };
    lab.script(&["sick"]);
    let backend = lab.backend();
    let (done, outcome) = mpsc::channel();
    std::thread::spawn(move || {
        let mut s = session(&backend, "fast", Lane::Create);
        let base = made(&mut *s, record("base", "rbd"));
        let snap = snapshot_of(&base, "s");
        s.ensure_snapshot(&snap, &Unwatched).unwrap();
        let child = made(&mut *s, clone_of(&base, &snap, "child"));
        s.retire_snapshot(&snap, &Unwatched).unwrap();
        let blocked = trash_and_reclaim(&mut *s, &base);
        assert!(matches!(blocked, Reclaimed::Blocked { .. }), "{blocked:?}");
        trash_and_reclaim(&mut *s, &child);
        let _ = done.send(trash_and_reclaim(&mut *s, &base));
    });
    let last = outcome.recv_timeout(Duration::from_secs(60));
    assert_eq!(last, Ok(Reclaimed::Done));
}

#[test]
fn many_first_creates_at_once_on_a_pool_that_was_never_prepared() {
    let Some(lab) = Lab::asked() else { return };
    // As a new pool is: without what `rbd pool init` makes.
    lab.run(&["rados", "-p", "rbd", "rm", "rbd_info"]);
    let backend = Arc::new(lab.backend());
    let (done, outcome) = mpsc::channel();
    let begun = Instant::now();
    for worker in 0..8 {
        let (backend, done) = (Arc::clone(&backend), done.clone());
        std::thread::spawn(move || {
            let mut s = session(&backend, "fast", Lane::Create);
            for n in 0..25 {
                made(&mut *s, record(&format!("w{worker}-{n}"), "rbd"));
            }
            let _ = done.send(());
        });
    }
    for _ in 0..8 {
        let waited = outcome.recv_timeout(Duration::from_secs(60));
        assert_eq!(waited, Ok(()), "a worker failed or hangs");
    }
    println!("8 workers: 200 creates with marks in {:?}", begun.elapsed());
    let mut s = session(&backend, "fast", Lane::Create);
    let (mut with, begun) = (0, Instant::now());
    while with < 200 {
        made(&mut *s, record("one", "rbd"));
        with += 1;
    }
    println!("1 worker: 200 creates with marks in {:?}", begun.elapsed());
    println!("{}", lab.raw_creates(200));
    assert_eq!(lab.run(&["rbd", "ls"]).lines().count(), 600);
}

/// Not a test of its own: the process that `killed_creates_leave_nothing_behind` kills.
#[test]
fn victim_of_a_kill() {
    let Some(dir) = std::env::var_os("VOLWARD_TEST_VICTIM") else {
        return;
    };
    let backend = Arc::new(Lab::backend_in(dir.as_ref()));
    let list = std::env::var("VOLWARD_TEST_RECORDS").unwrap();
    let records: Vec<Record> =
        serde_json::from_str(&std::fs::read_to_string(list).unwrap()).unwrap();
    let workers: Vec<_> = records
        .chunks(4)
        .map(|records| {
            let (backend, records) = (Arc::clone(&backend), records.to_vec());
            std::thread::spawn(move || {
                let mut s = session(&backend, "fast", Lane::Create);
                for record in records {
                    made(&mut *s, record);
                }
            })
        })
        .collect();
    for worker in workers {
        worker.join().unwrap();
    }
}

#[test]
fn killed_creates_leave_nothing_behind() {
    let Some(lab) = Lab::asked() else { return };
    let backend = lab.backend();
    let mut s = session(&backend, "fast", Lane::Create);
    let (mut whole, mut remnants) = (0, 0);
    for round in 0..6 {
        let records: Vec<Record> = (0..32)
            .map(|n| record(&format!("k{round}-{n}"), "rbd"))
            .collect();
        let list = lab.dir.join("records.json");
        std::fs::write(&list, serde_json::to_string(&records).unwrap()).unwrap();
        let mut victim = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "victim_of_a_kill", "--nocapture"])
            .env("VOLWARD_TEST_VICTIM", &lab.dir)
            .env("VOLWARD_TEST_RECORDS", &list)
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        // As soon as the first images are seen, in the middle of the others.
        let limit = Instant::now() + Duration::from_secs(30);
        while !records
            .iter()
            .any(|r| s.inspect(r, &Unwatched).unwrap().is_some())
        {
            assert!(Instant::now() < limit, "the victim does nothing");
        }
        victim.kill().unwrap();
        victim.wait().unwrap();
        for (n, mut record) in records.into_iter().enumerate() {
            match s.inspect(&record, &Unwatched).unwrap() {
                Some(Found::Volume(_)) => whole += 1,
                Some(Found::Half | Found::Unmarked) => remnants += 1,
                None => {}
                other => panic!("{other:?}"),
            }
            // Half of them are wished for still, the others are not.
            if n % 2 == 0 {
                record = made(&mut *s, record);
            }
            assert_eq!(trash_and_reclaim(&mut *s, &record), Reclaimed::Done);
        }
    }
    println!("of 192 creates {whole} were whole and {remnants} remnants");
    let left = lab.run(&["rados", "-p", "rbd", "ls"]);
    let left: Vec<&str> = left
        .lines()
        .filter(|o| o.starts_with("rbd_id.") || o.starts_with("rbd_header."))
        .collect();
    assert!(left.is_empty(), "{left:?}");
    lab.assert_empty("rbd");
}

/// Tells that the lock of the image is held, and then does nothing any more.
struct Hold(std::path::PathBuf);

impl Ctl for Hold {
    fn progress(&self, done: u64, _total: u64) -> ControlFlow<()> {
        // By then the first writes have ended, so the lock was taken.
        if done >= 32 << 20 {
            std::fs::write(&self.0, "").unwrap();
            loop {
                std::thread::park();
            }
        }
        ControlFlow::Continue(())
    }

    fn cancelled(&self) -> bool {
        false
    }
}

/// Not a test of its own: the process that `a_killed_owner_of_a_lock_is_fenced` kills.
#[test]
fn victim_with_a_lock() {
    let Some(dir) = std::env::var_os("VOLWARD_TEST_HOLDER") else {
        return;
    };
    let dir = std::path::PathBuf::from(dir);
    let ledger = Arc::new(Ledger0::default());
    let backend = Lab::backend_at(&dir, "test-instance", Arc::clone(&ledger), "volward");
    let mut s = session(&backend, "fast", Lane::Create);
    std::fs::write(dir.join("addresses"), ledger.open().join("\n")).unwrap();
    let wish = std::fs::read_to_string(dir.join("records.json")).unwrap();
    let wish: Record = serde_json::from_str(&wish).unwrap();
    let _ = s.ensure_volume(Step::Import, &wish, &Hold(dir.join("holding")));
}

#[test]
fn a_killed_owner_of_a_lock_is_fenced() {
    let Some(lab) = Lab::asked() else { return };
    let path = lab.dir.join("import/big");
    std::fs::write(&path, vec![7u8; 64 << 20]).unwrap();
    let mut wish = record("locked", "rbd");
    wish.volume_mut().unwrap().source = Some(Source::File {
        path: path.to_string_lossy().into_owned(),
        format: SourceFormat::Raw,
    });
    let list = lab.dir.join("records.json");
    std::fs::write(list, serde_json::to_string(&wish).unwrap()).unwrap();
    let mut victim = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "victim_with_a_lock"])
        .env("VOLWARD_TEST_HOLDER", &lab.dir)
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let limit = Instant::now() + Duration::from_secs(60);
    while !lab.dir.join("holding").exists() {
        assert!(Instant::now() < limit, "the victim never held the lock");
        std::thread::yield_now();
    }
    victim.kill().unwrap();
    victim.wait().unwrap();
    let addresses = std::fs::read_to_string(lab.dir.join("addresses")).unwrap();
    let addresses: Vec<String> = addresses.lines().map(str::to_owned).collect();
    assert_eq!(addresses.len(), 1);
    // Without the fence the dead process would be in the way for 30 s: its watch still stands.
    assert!(
        lab.run(&["rbd", "status", &lab.image_name(&wish)])
            .contains("watcher=")
    );
    let ledger = Arc::new(Ledger0::after(&addresses));
    let backend = lab.backend_of("test-instance", Arc::clone(&ledger), "volward");
    let mut s = session(&backend, "fast", Lane::Create);
    let blocklist = lab.run(&["ceph", "osd", "blocklist", "ls"]);
    let nonce = addresses[0].rsplit('/').next().unwrap();
    assert!(blocklist.contains(nonce), "{blocklist} lacks {addresses:?}");
    assert!(ledger.left().is_empty());
    assert_eq!(s.inspect(&wish, &Unwatched).unwrap(), Some(Found::Half));
    assert_eq!(trash_and_reclaim(&mut *s, &wish), Reclaimed::Done);
    lab.assert_empty("rbd");
}

#[test]
fn fencing_gets_a_hung_call_back_and_another_session_does_the_work() {
    let Some(lab) = Lab::asked() else { return };
    let ledger = Arc::new(Ledger0::default());
    let backend = Arc::new(lab.backend_of("test-instance", Arc::clone(&ledger), "volward"));
    let mut create = session(&backend, "slow", Lane::Create);
    let victim = made(&mut *create, record("victim", "slow"));
    let mut hung = session(&backend, "slow", Lane::Delete);
    let old = ledger.open().pop().unwrap();
    lab.pause("slow");
    let (done, late) = mpsc::channel();
    let wish = victim.clone();
    std::thread::spawn(move || {
        let outcome = hung.retire_volume(&wish, &Unwatched);
        drop(hung);
        let _ = done.send(outcome);
    });
    backend.retire("slow", Lane::Delete);
    // Asks the monitor only, so it works while the pool hangs.
    assert_eq!(backend.recover_abandoned("slow").unwrap(), 1);
    assert!(late.try_recv().is_err(), "the call was not hung");
    lab.resume("slow");
    let outcome = late.recv_timeout(Duration::from_secs(60)).unwrap();
    // Rarely it gets through before its OSD learns of the fence.
    if let Err(error) = outcome {
        assert_eq!(error.kind, ErrorKind::SessionLost, "{error}");
    }
    assert!(
        !ledger.open().contains(&old),
        "its connection wasn't closed"
    );
    let mut again = session(&backend, "slow", Lane::Delete);
    assert_eq!(trash_and_reclaim(&mut *again, &victim), Reclaimed::Done);
    lab.assert_empty("slow");
}
