//! Records, entries and directories for the other tests.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use volward::model::{
    Body, Entry, Millis, Name, ObjectId, Phase, Place, Record, SnapshotBody, Source, Uid,
    VolumeBody,
};
use volward::store::{OpenOptions, Result, Store};

/// A directory that goes with the test.
pub struct Dir(PathBuf);

impl Dir {
    pub fn new() -> Dir {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("volward-store-{}-{n}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Dir(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn state(&self) -> PathBuf {
        self.0.join("state.db")
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn options() -> OpenOptions {
    OpenOptions::new("machine-a")
}

pub fn open(dir: &Dir) -> Result<Store> {
    Store::open(&dir.state(), &options())
}

pub fn uid(n: u64) -> Uid {
    Uid::new(1_000_000 + n, u128::from(n))
}

pub fn name(text: &str) -> Name {
    text.parse().unwrap()
}

pub fn place(class: &str) -> Place {
    Place {
        class: class.into(),
        domain: "rbd".into(),
        root: format!("pool-{class}"),
        data_pool: None,
        namespace: None,
        identity: None,
    }
}

fn record(id: ObjectId, called: &str, phase: Phase, body: Body) -> Record {
    let mut record = Record::accepted(id, name(called), place("fast"), body, Millis(1));
    record.observed_generation = u64::from(phase == Phase::Ready);
    record.phase = phase;
    record.labels = [("team".to_owned(), "db".to_owned())].into();
    (record.updated_at, record.phase_since, record.wished_at) = (Millis(2), Millis(3), Millis(4));
    record
}

pub fn volume(n: u64, called: &str, phase: Phase) -> Record {
    let body = Body::Volume(Box::new(VolumeBody::of_size(
        10 << 30,
        format!(r#"{{"name":"{called}","size":10737418240,"class":"fast"}}"#),
    )));
    record(ObjectId::Volume(uid(n)), called, phase, body)
}

pub fn snapshot(n: u64, called: &str, of: &str, phase: Phase) -> Record {
    let body = Body::Snapshot(SnapshotBody {
        volume: name(of),
        size_bytes: None,
        depth: 0,
    });
    record(ObjectId::Snapshot(uid(n)), called, phase, body)
}

/// A volume made from a snapshot of an image.
pub fn clone(n: u64, called: &str, snapshot: Uid, image: Uid) -> Record {
    let mut made = volume(n, called, Phase::Ready);
    made.volume_mut().unwrap().source = Some(Source::Snapshot {
        name: name("snap"),
        uid: snapshot,
        image,
        image_born: name("base"),
        place: place("fast"),
    });
    made
}

pub fn entry(object: &str, at: u64) -> Entry {
    Entry {
        at: Millis(at),
        object: object.into(),
        warning: false,
        reason: "Created".into(),
        message: "it is there".into(),
    }
}

/// One transaction.
pub fn commit<T>(store: &mut Store, f: impl FnOnce(&mut Store) -> T) -> T {
    store.begin().unwrap();
    let result = f(store);
    store.commit().unwrap();
    result
}
