//! What is written comes back, is counted, is numbered, and has a name of its own.

use super::rows::{Dir, clone, commit, entry, name, open, options, place, snapshot, uid, volume};
use volward::model::{Known, Millis, ObjectId, Phase, Source};
use volward::store::{EventQuery, Store, StoreError, TRIM_MAX};

#[test]
fn what_is_put_comes_back_after_a_restart() {
    let dir = Dir::new();
    let mut store = open(&dir).unwrap();
    let instance = store.instance().to_owned();
    assert_eq!(instance.len(), 32);
    let pending = volume(1, "pending", Phase::Pending);
    let ready = volume(2, "ready", Phase::Ready);
    let mut flatten = volume(3, "flatten", Phase::Ready);
    flatten.volume_mut().unwrap().flatten = true;
    let failed = volume(4, "failed", Phase::Failed);
    let mut trashed = volume(5, "ready", Phase::Trashed);
    trashed.known = Known::Trashed;
    let snap = snapshot(6, "snap", "ready", Phase::Creating);
    let settled_snap = snapshot(7, "snap2", "ready", Phase::Ready);
    let all = [
        &pending,
        &ready,
        &flatten,
        &failed,
        &trashed,
        &snap,
        &settled_snap,
    ];
    commit(&mut store, |store| {
        for record in all {
            store.put(record).unwrap();
        }
        store.identity("pool-fast", "fsid/3").unwrap();
        store.identity("pool-fast", "fsid/4").unwrap();
        store.set_meta("seed", "17").unwrap();
        store.put_finding("C3/loop0", "{}").unwrap();
        store.put_finding("C3/loop1", "{}").unwrap();
        store.remove_finding("C3/loop0").unwrap();
    });
    drop(store);

    let store = open(&dir).unwrap();
    assert_eq!(store.instance(), instance);
    let loaded = store.load().unwrap();
    let unsettled = [&pending, &flatten, &trashed, &snap].map(Clone::clone);
    assert_eq!(loaded.records, unsettled);
    let counts = [
        (("snapshot", Phase::Creating), 1),
        (("snapshot", Phase::Ready), 1),
        (("volume", Phase::Pending), 1),
        (("volume", Phase::Ready), 2),
        (("volume", Phase::Failed), 1),
        (("volume", Phase::Trashed), 1),
    ];
    assert_eq!(loaded.counts, counts.into());
    assert_eq!(
        loaded.identities,
        [("pool-fast".to_owned(), "fsid/4".to_owned())].into()
    );
    assert_eq!(store.meta("seed").unwrap().as_deref(), Some("17"));
    assert_eq!(store.findings().unwrap().len(), 1);
    for record in all {
        assert_eq!(store.fetch(&[record.id]).unwrap().first(), Some(record));
    }
    store.check().unwrap();
}

#[test]
fn lookups_see_the_open_transaction_and_its_end() {
    let dir = Dir::new();
    let mut store = open(&dir).unwrap();
    commit(&mut store, |store| store.put(&volume(1, "a", Phase::Ready))).unwrap();

    store.begin().unwrap();
    store.put(&volume(2, "b", Phase::Pending)).unwrap();
    store.put(&volume(1, "a", Phase::Deleting)).unwrap();
    assert!(store.remove(ObjectId::Volume(uid(1))).unwrap());
    assert!(!store.remove(ObjectId::Volume(uid(1))).unwrap());
    assert!(store.volume_named(&name("b")).unwrap().is_some());
    assert!(store.volume_named(&name("a")).unwrap().is_none());
    store.rollback().unwrap();

    assert!(store.volume_named(&name("b")).unwrap().is_none());
    let back = store.volume(uid(1)).unwrap().unwrap();
    assert_eq!(back.phase, Phase::Ready);
    assert_eq!(
        store.load().unwrap().counts,
        [(("volume", Phase::Ready), 1)].into()
    );
    let unordered = [ObjectId::Volume(uid(9)), ObjectId::Volume(uid(1))];
    assert_eq!(store.fetch(&unordered).unwrap(), [back]);
    store.check().unwrap();
}

#[test]
fn children_are_found_by_image_and_by_snapshot() {
    let dir = Dir::new();
    let mut store = open(&dir).unwrap();
    let (base, snap) = (uid(1), uid(2));
    let child = clone(3, "child", snap, base);
    let mut binned = clone(4, "binned", snap, base);
    binned.phase = Phase::Trashed;
    let mut direct = volume(5, "direct", Phase::Ready);
    direct.volume_mut().unwrap().source = Some(Source::Volume {
        name: name("base"),
        uid: base,
        born: name("base"),
        place: place("fast"),
    });
    let other = clone(6, "other", uid(99), uid(98));
    commit(&mut store, |store| {
        for record in [&child, &binned, &direct, &other] {
            store.put(record).unwrap();
        }
    });
    let of_image = store.children_of(base, 10).unwrap();
    assert_eq!(of_image, [child.clone(), binned.clone(), direct.clone()]);
    assert_eq!(
        store.children_of(snap, 10).unwrap(),
        [child.clone(), binned]
    );
    assert_eq!(store.children_of(base, 2).unwrap().len(), 2);
    // For users, only what isn't in the trash, and only that snapshot's.
    let reader = store.reader().unwrap();
    assert_eq!(reader.children(snap).unwrap(), [name("child")]);
    // A volume that was made from nothing any more is nobody's child.
    let mut free = child;
    free.volume_mut().unwrap().source = None;
    commit(&mut store, |store| store.put(&free)).unwrap();
    assert_eq!(store.children_of(base, 10).unwrap().len(), 2);
}

#[test]
fn numbers_of_events_have_no_gaps() {
    let dir = Dir::new();
    let mut store = open(&dir).unwrap();
    let seqs = commit(&mut store, |store| {
        [1, 2].map(|at| store.log(&entry("volume/a", at)).unwrap())
    });
    assert_eq!(seqs, [1, 2]);
    store.begin().unwrap();
    assert_eq!(store.log(&entry("volume/lost", 3)).unwrap(), 3);
    store.rollback().unwrap();
    let seq = commit(&mut store, |store| {
        store.log(&entry("volume/b", 4)).unwrap()
    });
    assert_eq!(seq, 3);
    // Killed in the middle of a transaction: nothing of it was there.
    store.begin().unwrap();
    store.log(&entry("volume/lost", 5)).unwrap();
    drop(store);

    let mut store = open(&dir).unwrap();
    let seq = commit(&mut store, |store| {
        store.log(&entry("volume/c", 6)).unwrap()
    });
    assert_eq!(seq, 4);
    // Even when all that may go has gone, the numbers go on after a restart.
    commit(&mut store, |store| store.trim_events(1, Millis(u64::MAX))).unwrap();
    drop(store);
    let mut store = open(&dir).unwrap();
    let seq = commit(&mut store, |store| {
        store.log(&entry("volume/d", 7)).unwrap()
    });
    assert_eq!(seq, 5);
    let page = store
        .reader()
        .unwrap()
        .events(&EventQuery {
            limit: 10,
            ..EventQuery::default()
        })
        .unwrap();
    let seqs: Vec<u64> = page.items.iter().map(|logged| logged.seq).collect();
    assert_eq!(seqs, [4, 5]);
    assert_eq!((page.oldest, page.newest, page.next), (4, 5, 5));
}

#[test]
fn the_event_log_is_trimmed_from_its_old_end_a_part_at_a_time() {
    let dir = Dir::new();
    let mut store = open(&dir).unwrap();
    let count = TRIM_MAX + 500;
    commit(&mut store, |store| {
        for at in 1..=count {
            store.log(&entry("volume/a", at)).unwrap();
        }
    });
    let mut trim =
        |max, before| commit(&mut store, |s| s.trim_events(max, Millis(before)).unwrap());
    assert_eq!(trim(count, 0), 0);
    // By age: 1 to 9 are older than 10.
    assert_eq!(trim(count, 10), 9);
    // By number, and no more than TRIM_MAX of them per call.
    assert_eq!(trim(100, 0), TRIM_MAX);
    assert_eq!(trim(100, 0), 500 - 100 - 9);
    assert_eq!(trim(100, 0), 0);
    // An old one behind a young one stays: no holes.
    commit(&mut store, |store| {
        store.log(&entry("volume/a", 1)).unwrap();
    });
    let mut trim =
        |max, before| commit(&mut store, |s| s.trim_events(max, Millis(before)).unwrap());
    assert_eq!(trim(1000, 2), 0);
}

#[test]
fn a_name_has_one_owner_outside_the_trash() {
    let dir = Dir::new();
    let mut store = open(&dir).unwrap();
    commit(&mut store, |store| {
        store.put(&volume(10, "db", Phase::Ready)).unwrap();
        // Snapshots have names of their own, and the trash has any.
        store.put(&snapshot(11, "db", "db", Phase::Ready)).unwrap();
        store.put(&volume(12, "db", Phase::Trashed)).unwrap();
        store.put(&volume(13, "db", Phase::Reclaiming)).unwrap();
    });
    store.begin().unwrap();
    store.put(&volume(20, "db", Phase::Pending)).unwrap();
    let error = store.commit().unwrap_err();
    assert!(matches!(error, StoreError::Taken(_)), "{error:?}");
    let owner = store.volume_named(&name("db")).unwrap().unwrap();
    assert_eq!(owner.id.uid(), uid(10));

    // Both fight for it: still no.
    store.begin().unwrap();
    store.put(&volume(20, "db", Phase::Pending)).unwrap();
    store.put(&volume(10, "db", Phase::Updating)).unwrap();
    let error = store.commit().unwrap_err();
    assert!(matches!(error, StoreError::Taken(_)), "{error:?}");
    store.check().unwrap();
}

#[test]
fn a_name_changes_hands_in_a_batch_of_any_order() {
    let dir = Dir::new();
    let mut store = open(&dir).unwrap();
    commit(&mut store, |store| {
        store.put(&volume(1, "db", Phase::Trashed)).unwrap();
        store.put(&volume(2, "db", Phase::Ready)).unwrap();
        store
            .put(&snapshot(3, "snap", "db", Phase::Deleting))
            .unwrap();
    });
    commit(&mut store, |store| {
        // The older one is restored before the newer one is put in the trash.
        store.put(&volume(1, "db", Phase::Creating)).unwrap();
        let owner = store.volume_named(&name("db")).unwrap().unwrap();
        assert_eq!(owner.id.uid(), uid(1));
        store.put(&volume(2, "db", Phase::Trashed)).unwrap();
        // A new snapshot is there before the old one of its name is gone.
        store
            .put(&snapshot(4, "snap", "db", Phase::Pending))
            .unwrap();
        store.remove(ObjectId::Snapshot(uid(3))).unwrap();
    });
    let owner = store.volume_named(&name("db")).unwrap().unwrap();
    assert_eq!(owner.id.uid(), uid(1));
    let snap = store.snapshot_named(&name("snap")).unwrap().unwrap();
    assert_eq!(snap.id.uid(), uid(4));
    store.check().unwrap();
}

#[test]
fn classes_in_use_follow_every_change() {
    let dir = Dir::new();
    let mut store = open(&dir).unwrap();
    let mut slow = volume(3, "c", Phase::Ready);
    slow.place = place("slow");
    slow.place.namespace = Some("tenant".into());
    commit(&mut store, |store| {
        store.put(&volume(1, "a", Phase::Ready)).unwrap();
        store.put(&volume(2, "b", Phase::Trashed)).unwrap();
        store.put(&slow).unwrap();
    });
    let used = |store: &Store| -> Vec<(String, String, Option<String>, u64)> {
        let all = store.classes_in_use().unwrap().into_iter();
        all.map(|u| (u.class, u.root, u.namespace, u.count))
            .collect()
    };
    let fast = |n| ("fast".to_owned(), "pool-fast".to_owned(), None, n);
    let tenant = Some("tenant".to_owned());
    let slow_1 = ("slow".to_owned(), "pool-slow".to_owned(), tenant, 1);
    assert_eq!(used(&store), [fast(2), slow_1.clone()]);
    commit(&mut store, |store| {
        store.remove(slow.id).unwrap();
        store.remove(ObjectId::Volume(uid(2))).unwrap();
    });
    assert_eq!(used(&store), [fast(1)]);
    // The same phase in another place: it is counted there.
    let mut moved = volume(1, "a", Phase::Ready);
    moved.place = slow.place;
    commit(&mut store, |store| store.put(&moved)).unwrap();
    assert_eq!(used(&store), [slow_1]);
    store.check().unwrap();
}

#[test]
fn sessions_of_earlier_runs_are_told_from_our_own() {
    let dir = Dir::new();
    let mut store = open(&dir).unwrap();
    commit(&mut store, |store| {
        store.session_opened("rbd", "10.0.0.1:0/1").unwrap();
        store.session_opened("rbd", "10.0.0.1:0/2").unwrap();
        store.session_opened("other", "10.0.0.1:0/3").unwrap();
        store.session_closed("rbd", "10.0.0.1:0/2").unwrap();
    });
    assert_eq!(store.sessions("rbd").unwrap(), ["10.0.0.1:0/1"]);
    assert!(store.predecessors("rbd").unwrap().is_empty());
    drop(store);
    let mut store = open(&dir).unwrap();
    commit(&mut store, |store| {
        store.session_opened("rbd", "10.0.0.1:0/9").unwrap();
    });
    assert_eq!(store.predecessors("rbd").unwrap(), ["10.0.0.1:0/1"]);
    assert_eq!(store.sessions("rbd").unwrap().len(), 2);
}

#[test]
fn writes_need_a_transaction_and_own_settings_are_not_set() {
    let dir = Dir::new();
    let mut store = open(&dir).unwrap();
    let internal = |result: Result<(), StoreError>| {
        assert!(matches!(result, Err(StoreError::Internal(_))), "{result:?}");
    };
    internal(store.put(&volume(1, "a", Phase::Ready)));
    internal(store.commit());
    store.begin().unwrap();
    internal(store.begin());
    internal(store.set_meta("instance", "stolen"));
    // After a failed write nothing of the transaction can become durable.
    internal(store.put(&volume(1, "a", Phase::Ready)));
    internal(store.commit());
    assert!(store.volume(uid(1)).unwrap().is_none());
    commit(&mut store, |store| store.put(&volume(1, "a", Phase::Ready))).unwrap();
}

#[test]
fn a_new_file_can_have_a_given_instance_and_a_private_directory() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = Dir::new();
    let path = dir.path().join("var/lib/state.db");
    let mut given = options();
    given.instance = Some("0123456789abcdef0123456789abcdef".into());
    let store = Store::open(&path, &given).unwrap();
    assert_eq!(store.instance(), "0123456789abcdef0123456789abcdef");
    let mode = |path: &std::path::Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(path.parent().unwrap()) & 0o027, 0);
    assert_eq!(mode(&path) & 0o027, 0);
    assert_eq!(mode(&dir.path().join("var/lib/state.db-wal")) & 0o027, 0);
}
