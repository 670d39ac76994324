//! No room, and no right to write: refused with words, whole as before, and well again by itself.

use super::rows::{Dir, commit, entry, name, open, options, uid, volume};
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_remount, unmount};
use std::fs;
use std::path::{Path, PathBuf};
use volward::model::{ObjectId, Phase};
use volward::store::{Store, StoreError, VolumeQuery};

/// A small file system of its own, where the test may mount one.
struct Small(PathBuf);

impl Small {
    fn mount(dir: &Dir, size: &str) -> Option<Small> {
        let path = dir.path().join("small");
        fs::create_dir(&path).unwrap();
        let data = std::ffi::CString::new(format!("size={size}")).unwrap();
        match mount(
            "tmpfs",
            &path,
            "tmpfs",
            MountFlags::empty(),
            data.as_c_str(),
        ) {
            Ok(()) => Some(Small(path)),
            Err(errno) => {
                eprintln!("no tmpfs can be mounted here ({errno}); the other way is tested");
                None
            }
        }
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

/// Writes until it says that the disk is full; returns how many transactions were committed.
fn fill(store: &mut Store) -> u64 {
    for n in 0..100_000 {
        if let Err(error) = one(store, n) {
            assert!(matches!(error, StoreError::Full(_)), "{error:?}");
            return n;
        }
    }
    panic!("it never got full");
}

/// One transaction: four volumes and an event.
fn one(store: &mut Store, n: u64) -> Result<(), StoreError> {
    store.begin().unwrap();
    let written = (n * 4..n * 4 + 4)
        .try_for_each(|id| store.put(&volume(id, &format!("v{id}"), Phase::Ready)))
        .and_then(|()| store.log(&entry("daemon", n)));
    if let Err(error) = written {
        // Nothing more gets into the broken transaction, and it can't be committed.
        let more = store.put(&volume(1_000_000, "more", Phase::Ready));
        assert_eq!(more, Err(error.clone()));
        assert_eq!(store.commit(), Err(error.clone()));
        return Err(error);
    }
    store.commit()
}

/// Nothing of the failed transaction is there, all of the others is, and reading goes on.
fn whole(store: &Store, committed: u64) {
    let counts = store.load().unwrap().counts;
    assert_eq!(counts[&("volume", Phase::Ready)], committed * 4);
    let reader = store.reader().unwrap();
    assert_eq!(reader.counts().unwrap(), counts);
    let query = VolumeQuery {
        limit: 10,
        ..VolumeQuery::default()
    };
    assert_eq!(reader.volumes(&query).unwrap().items.len(), 10);
    let next = ObjectId::Volume(uid(committed * 4));
    assert_eq!(reader.by_id(next).unwrap(), None);
}

fn goes_on(store: &mut Store, committed: u64) {
    let id = committed * 4;
    let seq = commit(store, |store| {
        store.put(&volume(id, "again", Phase::Ready)).unwrap();
        store.log(&entry("daemon", 1)).unwrap()
    });
    assert_eq!(seq, committed + 1, "no gap");
    assert!(store.volume_named(&name("again")).unwrap().is_some());
    store.check().unwrap();
}

#[test]
fn a_full_disk_loses_nothing_and_heals() {
    let dir = Dir::new();
    let Some(small) = Small::mount(&dir, "3m") else {
        return;
    };
    let path = small.0.join("state.db");
    let ballast = small.0.join("ballast");
    let mut store = Store::open(&path, &options()).unwrap();
    commit(&mut store, |store| {
        store.put(&volume(0, "v0", Phase::Ready))
    })
    .unwrap();
    fs::write(&ballast, vec![1; 1 << 20]).unwrap();
    let committed = fill(&mut store);
    assert!(committed > 3, "{committed}");
    whole(&store, committed);
    for _ in 0..3 {
        // However often it is tried: refused as full, for reads as before.
        store.begin().unwrap();
        let mut error = None;
        for n in 0..200 {
            let record = volume(5_000_000 + n, &format!("big{n}"), Phase::Ready);
            error = store.put(&record).err();
            if error.is_some() {
                break;
            }
        }
        let error = store.commit().err().or(error).expect("no room for that");
        assert!(matches!(error, StoreError::Full(_)), "{error:?}");
        assert!(error.may_heal());
        whole(&store, committed);
    }
    fs::remove_file(&ballast).unwrap();
    goes_on(&mut store, committed);
    drop(store);
    let store = Store::open(&path, &options()).unwrap();
    assert_eq!(
        store.load().unwrap().counts[&("volume", Phase::Ready)],
        committed * 4 + 1
    );
    store.check().unwrap();
}

/// The same by the limit on the file's size: runs everywhere.
#[test]
fn a_file_at_its_limit_loses_nothing_and_goes_on_when_that_is_raised() {
    let dir = Dir::new();
    let mut limited = options();
    limited.max_pages = Some(200);
    let mut store = Store::open(&dir.state(), &limited).unwrap();
    let committed = fill(&mut store);
    assert!(committed > 3, "{committed}");
    whole(&store, committed);
    // What needs no room still goes.
    commit(&mut store, |store| {
        for n in 0..40 {
            assert!(store.remove(ObjectId::Volume(uid(n))).unwrap());
        }
    });
    commit(&mut store, |store| {
        for n in 0..10 {
            let record = volume(n, &format!("v{n}"), Phase::Ready);
            store.put(&record).unwrap();
        }
    });
    drop(store);
    let mut store = open(&dir).unwrap();
    commit(&mut store, |store| {
        for n in 10..40 {
            let record = volume(n, &format!("v{n}"), Phase::Ready);
            store.put(&record).unwrap();
        }
    });
    whole(&store, committed);
    goes_on(&mut store, committed);
}

#[test]
fn a_disk_without_room_for_a_new_file_is_told_and_leaves_nothing_behind() {
    let dir = Dir::new();
    let Some(small) = Small::mount(&dir, "64k") else {
        return;
    };
    let path = small.0.join("state.db");
    let ballast = small.0.join("ballast");
    let _ = fs::write(&ballast, vec![1; 48 << 10]);
    let error = Store::open(&path, &options()).unwrap_err();
    assert!(matches!(error, StoreError::Full(_)), "{error:?}");
    assert!(error.to_string().contains("state.db"), "{error}");
    assert!(!path.exists());
}

fn refused_as_read_only(path: &Path) {
    let error = Store::open(path, &options()).unwrap_err();
    assert!(matches!(error, StoreError::ReadOnly(_)), "{error:?}");
    let words = error.to_string();
    for part in ["state.db", "writable", "store.path"] {
        assert!(words.contains(part), "{words}");
    }
}

#[test]
fn a_place_that_cannot_be_written_is_named() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = Dir::new();
    if rustix::process::geteuid().is_root() {
        // Rights don't stop root; a read-only file system does.
        let Some(small) = Small::mount(&dir, "4m") else {
            return;
        };
        let remount = |flags| mount_remount(&small.0, flags, "").unwrap();
        remount(MountFlags::RDONLY);
        refused_as_read_only(&small.0.join("state.db"));
        refused_as_read_only(&small.0.join("deeper/state.db"));
        remount(MountFlags::empty());
        drop(Store::open(&small.0.join("state.db"), &options()).unwrap());
        remount(MountFlags::RDONLY);
        refused_as_read_only(&small.0.join("state.db"));
        return;
    }
    let locked = dir.path().join("locked");
    fs::create_dir(&locked).unwrap();
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o555)).unwrap();
    refused_as_read_only(&locked.join("state.db"));
    refused_as_read_only(&locked.join("deeper/state.db"));
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o755)).unwrap();
}
