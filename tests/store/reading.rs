//! Readers: pages are complete, filters right, and the writer stands in nobody's way.

use super::rows::{Dir, commit, entry, name, open, place, snapshot, uid, volume};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use volward::model::{Name, ObjectId, Phase, Uid};
use volward::store::{EventQuery, Reader, SCAN_MAX, SnapshotQuery, Store, VolumeQuery};

fn all_names(reader: &Reader, query: &VolumeQuery) -> Vec<String> {
    let mut query = query.clone();
    let mut names = Vec::new();
    loop {
        let page = reader.volumes(&query).unwrap();
        assert!(page.items.len() <= query.limit);
        names.extend(page.items.iter().map(|record| record.name.to_string()));
        match page.next {
            Some(next) => {
                assert!(query.after.is_none_or(|after| after < next), "no way on");
                query.after = Some(next);
            }
            None => return names,
        }
    }
}

fn by_sevens() -> VolumeQuery {
    VolumeQuery {
        limit: 7,
        ..VolumeQuery::default()
    }
}

#[test]
fn pages_by_filter_are_complete() {
    let dir = Dir::new();
    let mut store = open(&dir).unwrap();
    commit(&mut store, |store| {
        for n in 0..100 {
            let phase = [Phase::Ready, Phase::Failed, Phase::Trashed][n as usize % 3];
            let mut record = volume(n, &format!("v{n:03}"), phase);
            if n % 4 == 0 {
                record.place = place("slow");
            }
            if n % 5 == 0 {
                record.labels = [("a \"b\"".to_owned(), "c".to_owned())].into();
            }
            store.put(&record).unwrap();
        }
    });
    let reader = store.reader().unwrap();
    let expect = |f: &dyn Fn(u64) -> bool| -> Vec<String> {
        let live = (0..100).filter(|n| n % 3 != 2 && f(*n));
        live.map(|n| format!("v{n:03}")).collect()
    };
    let query = |f: &dyn Fn(&mut VolumeQuery)| {
        let mut query = by_sevens();
        f(&mut query);
        all_names(&reader, &query)
    };
    let label = || Some(("a \"b\"".to_owned(), "c".to_owned()));
    assert_eq!(query(&|_| ()), expect(&|_| true));
    assert_eq!(
        query(&|q| q.phase = Some(Phase::Failed)),
        expect(&|n| n % 3 == 1)
    );
    assert_eq!(
        query(&|q| q.class = Some("slow".into())),
        expect(&|n| n % 4 == 0)
    );
    assert_eq!(query(&|q| q.label = label()), expect(&|n| n % 5 == 0));
    for (phase, third) in [(Phase::Ready, 0), (Phase::Failed, 1)] {
        let both = query(&|q| {
            q.phase = Some(phase);
            q.class = Some("slow".into());
            q.label = label();
        });
        assert_eq!(both, expect(&|n| n % 3 == third && n % 20 == 0));
    }
    assert!(query(&|q| q.phase = Some(Phase::Trashed)).is_empty());
    assert!(query(&|q| q.label = Some(("a".into(), "c".into()))).is_empty());
}

#[test]
fn the_trash_and_snapshots_have_pages_of_their_own() {
    let dir = Dir::new();
    let mut store = open(&dir).unwrap();
    commit(&mut store, |store| {
        for n in 0..25 {
            store.put(&volume(n, "same", Phase::Trashed)).unwrap();
            let of = if n % 2 == 0 { "even" } else { "odd" };
            let phase = [Phase::Ready, Phase::Failed][usize::from(n > 20)];
            store
                .put(&snapshot(100 + n, &format!("s{n:02}"), of, phase))
                .unwrap();
        }
    });
    let reader = store.reader().unwrap();
    let (mut after, mut seen): (Option<Uid>, Vec<Uid>) = (None, Vec::new());
    loop {
        let page = reader.trash(after, 10).unwrap();
        seen.extend(page.items.iter().map(|record| record.id.uid()));
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(seen, (0..25).map(uid).collect::<Vec<_>>());

    let list = |volume: Option<&str>, phase: Option<Phase>, after: Option<&str>| -> Vec<String> {
        let query = SnapshotQuery {
            limit: 1000,
            volume: volume.map(name),
            phase,
            after: after.map(name),
            label: Some(("team".into(), "db".into())),
        };
        let page = reader.snapshots(&query).unwrap();
        assert_eq!(page.next, None);
        page.items.iter().map(|r| r.name.to_string()).collect()
    };
    assert_eq!(list(None, None, None).len(), 25);
    assert_eq!(list(Some("odd"), None, Some("s19")), ["s21", "s23"]);
    assert_eq!(list(Some("odd"), Some(Phase::Failed), None), ["s21", "s23"]);
    let none: [&str; 0] = [];
    assert_eq!(list(Some("odd"), Some(Phase::Pending), None), none);
    let found = reader.snapshot_named(&name("s03")).unwrap().unwrap();
    assert_eq!(found.id, ObjectId::Snapshot(uid(103)));
    assert_eq!(reader.by_id(found.id).unwrap(), Some(found));
    assert_eq!(reader.volume_named(&name("same")).unwrap(), None);
}

#[test]
fn a_page_looks_at_no_more_rows_than_its_budget() {
    let dir = Dir::new();
    let mut store = open(&dir).unwrap();
    let count = SCAN_MAX as u64 + 10;
    commit(&mut store, |store| {
        for n in 0..count {
            let mut record = volume(n, &format!("v{n:06}"), Phase::Ready);
            if n + 1 == count {
                record.labels = [("rare".to_owned(), "yes".to_owned())].into();
            }
            store.put(&record).unwrap();
        }
    });
    let reader = store.reader().unwrap();
    let mut query = by_sevens();
    query.label = Some(("rare".into(), "yes".into()));
    let page = reader.volumes(&query).unwrap();
    assert!(page.items.is_empty());
    let last_seen: Name = name(&format!("v{:06}", SCAN_MAX - 1));
    assert_eq!(page.next.as_ref(), Some(&last_seen));
    query.after = page.next;
    let page = reader.volumes(&query).unwrap();
    assert_eq!((page.items.len(), page.next), (1, None));
}

#[test]
fn events_are_read_by_number_and_by_object() {
    let dir = Dir::new();
    let mut store = open(&dir).unwrap();
    let reader = store.reader().unwrap();
    let page = reader.events(&EventQuery::default()).unwrap();
    assert_eq!((page.items.len(), page.next), (0, 0));
    assert_eq!((page.oldest, page.newest), (1, 0));
    commit(&mut store, |store| {
        for n in 1..=20 {
            let object = if n % 10 == 0 { "volume/b" } else { "volume/a" };
            store.log(&entry(object, n)).unwrap();
        }
    });
    let read = |after, limit, object: Option<&str>| {
        let object = object.map(str::to_owned);
        let query = EventQuery {
            after,
            limit,
            object,
        };
        let page = reader.events(&query).unwrap();
        let seqs: Vec<u64> = page.items.iter().map(|logged| logged.seq).collect();
        (seqs, page.next)
    };
    assert_eq!(read(0, 3, None), (vec![1, 2, 3], 3));
    assert_eq!(read(18, 3, None), (vec![19, 20], 20));
    assert_eq!(read(20, 3, None), (vec![], 20));
    assert_eq!(read(0, 1, Some("volume/b")), (vec![10], 10));
    // The rest has been looked at as well: a follower doesn't go through it again.
    assert_eq!(read(0, 5, Some("volume/b")), (vec![10, 20], 20));
    assert_eq!(read(11, 5, Some("volume/c")), (vec![], 20));
    let logged = &reader
        .events(&EventQuery {
            after: 9,
            limit: 1,
            object: None,
        })
        .unwrap()
        .items[0];
    assert_eq!(logged.entry, entry("volume/b", 10));
}

#[test]
fn a_reader_sees_the_last_commit_while_the_writer_is_busy() {
    let dir = Dir::new();
    let mut store = open(&dir).unwrap();
    commit(&mut store, |store| store.put(&volume(1, "a", Phase::Ready))).unwrap();
    let reader = store.reader().unwrap();
    store.begin().unwrap();
    store.put(&volume(1, "a", Phase::Deleting)).unwrap();
    store.put(&volume(2, "b", Phase::Pending)).unwrap();
    assert_eq!(all_names(&reader, &by_sevens()), ["a"]);
    let seen = reader.volume_named(&name("a")).unwrap().unwrap();
    assert_eq!(seen.phase, Phase::Ready);
    assert_eq!(reader.counts().unwrap()[&("volume", Phase::Ready)], 1);
    // A reader that is opened now isn't blocked either.
    assert!(
        store
            .reader()
            .unwrap()
            .by_id(ObjectId::Volume(uid(2)))
            .unwrap()
            .is_none()
    );
    store.commit().unwrap();
    assert_eq!(all_names(&reader, &by_sevens()), ["a", "b"]);
    assert_eq!(reader.counts().unwrap()[&("volume", Phase::Deleting)], 1);
}

/// What is there all the time is in every listing exactly once, whatever comes and goes.
#[test]
fn listings_are_complete_under_concurrent_writes() {
    let dir = Dir::new();
    let mut store = open(&dir).unwrap();
    let constant: BTreeSet<String> = (0..300).map(|n| format!("k{n:04}")).collect();
    commit(&mut store, |store| {
        for (n, name) in constant.iter().enumerate() {
            store.put(&volume(n as u64, name, Phase::Ready)).unwrap();
        }
    });
    let reader = store.reader().unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut round = 0;
            while !done.load(Ordering::Relaxed) {
                round += 1;
                churn(&mut store, round);
            }
        });
        for _ in 0..20 {
            let names = all_names(&reader, &by_sevens());
            let mut sorted = names.clone();
            sorted.sort();
            sorted.dedup();
            assert_eq!(names, sorted, "in order, nothing twice");
            let seen: BTreeSet<String> = names.into_iter().filter(|n| !n.ends_with('x')).collect();
            assert_eq!(seen, constant);
        }
        done.store(true, Ordering::Relaxed);
    });
    store.check().unwrap();
}

fn churn(store: &mut Store, round: u64) {
    commit(store, |store| {
        for n in 0..30 {
            let id = 1000 + n;
            // Between the constant ones, now there, now in the trash; and those change too.
            let phase = [Phase::Ready, Phase::Trashed][((round + n) % 2) as usize];
            store
                .put(&volume(id, &format!("k{:04}x", n * 10), phase))
                .unwrap();
            let touched = [Phase::Ready, Phase::Updating][(round % 2) as usize];
            let n = (round * 7 + n) % 300;
            store.put(&volume(n, &format!("k{n:04}"), touched)).unwrap();
        }
    });
}

/// Readers that overlap for ever keep SQLite from starting its log anew; the store does it then.
#[test]
fn the_log_stays_bounded_under_overlapping_readers() {
    let dir = Dir::new();
    let mut store = open(&dir).unwrap();
    let mut record = volume(1, "a", Phase::Ready);
    commit(&mut store, |store| store.put(&record)).unwrap();
    let stop = AtomicBool::new(false);
    let peak = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut held = snapshot_of(&dir);
            while !stop.load(Ordering::Relaxed) {
                // Old by a commit, or by as long as a slow reader takes; and the next one is
                // there before it goes.
                std::thread::park_timeout(Duration::from_millis(10));
                held = snapshot_of(&dir);
            }
            drop(held);
        });
        let mut peak = 0;
        // 150 MiB of log in all; the bound is 64 MiB, looked at every 128 commits (32 MiB).
        for n in 0..600 {
            record.message = Some(["x", "y"][n % 2].repeat(256 << 10));
            commit(&mut store, |store| store.put(&record)).unwrap();
            reader.thread().unpark();
            let log = dir.path().join("state.db-wal").metadata().unwrap();
            peak = peak.max(log.len() >> 20);
        }
        stop.store(true, Ordering::Relaxed);
        peak
    });
    assert!(peak < 140, "{peak} MiB of log");
    store.check().unwrap();
}

/// A connection in the middle of reading.
fn snapshot_of(dir: &Dir) -> rusqlite::Connection {
    let flags = rusqlite::OpenFlags::SQLITE_OPEN_READ_ONLY;
    let conn = rusqlite::Connection::open_with_flags(dir.state(), flags).unwrap();
    conn.execute_batch("BEGIN; SELECT count(*) FROM volume;")
        .unwrap();
    conn
}
