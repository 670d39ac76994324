//! Records, entries and directories for the other tests.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use volward::model::{
    Body, Entry, Known, Millis, Name, ObjectId, Phase, Place, Record, SnapshotBody, Source, Uid,
    VolumeBody, Wish,
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
    Record {
        id,
        name: name(called),
        born: name(called),
        image: id.uid(),
        place: place("fast"),
        generation: 1,
        observed_generation: u64::from(phase == Phase::Ready),
        wish: Wish::Present,
        phase,
        known: Known::Nothing,
        look: false,
        attempts: 0,
        hangs: 0,
        waits: 0,
        next_attempt_at: None,
        reason: None,
        message: None,
        labels: [("team".to_owned(), "db".to_owned())].into(),
        created_at: Millis(1),
        updated_at: Millis(2),
        phase_since: Millis(3),
        wished_at: Millis(4),
        deletion_requested_at: None,
        body,
    }
}

pub fn volume(n: u64, called: &str, phase: Phase) -> Record {
    let body = Body::Volume(Box::new(VolumeBody {
        size_bytes: 10 << 30,
        source: None,
        qos: None,
        encryption: None,
        encrypted: false,
        request: format!(r#"{{"name":"{called}","size":10737418240,"class":"fast"}}"#),
        seen_size_bytes: None,
        used_bytes: None,
        handle: None,
        wwn: None,
        image_id: None,
        depth: 0,
        trashed_at: None,
        reclaim_after: None,
        blocked_by: Vec::new(),
        flatten: false,
    }));
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
