//! The independent checker: says what must hold, and never asks the scheduler.

use super::disk::Disk;
use std::collections::{BTreeMap, BTreeSet};
use volward::model::{
    ErrorKind, Known, Lane, Name, ObjectId, Phase, Record, Source, Step, Uid, Wish,
};
use volward::sched::Dispatch;

/// An acknowledged wish.
#[derive(Debug, Clone)]
pub enum Promise {
    /// It shall be there, with at least so many bytes.
    There { name: Name, size: u64 },
    /// It shall go.
    Gone,
}

#[derive(Debug, Clone)]
struct Use {
    attempt: u64,
    domain: String,
    lane: Lane,
    background: bool,
    held: bool,
    /// Image → exclusive?
    images: Vec<(Uid, bool)>,
}

/// What an object was charged, as far as the world can tell.
#[derive(Debug, Clone, Copy, Default)]
pub struct Bill {
    /// Answers that may cost an attempt, since the last success or wish.
    pub attempts: u32,
    /// Hangs, since the last success or wish.
    pub hangs: u32,
}

#[derive(Debug, Default)]
pub struct Checker {
    uses: BTreeMap<ObjectId, Use>,
    pub promises: BTreeMap<ObjectId, Promise>,
    bills: BTreeMap<ObjectId, Bill>,
    /// Objects whose image was seen whole.
    were_whole: BTreeSet<ObjectId>,
    /// Highest event number and how many were committed.
    pub dispatches: u64,
    pub seen_steps: BTreeSet<Step>,
}

impl Checker {
    /// A step goes to a worker. `committed` is what the store holds at that instant.
    pub fn dispatched(
        &mut self,
        job: &Dispatch,
        committed: Option<&Record>,
        workers: usize,
        abandoned_max: usize,
    ) {
        self.dispatches += 1;
        self.seen_steps.insert(job.step);
        let committed =
            committed.unwrap_or_else(|| panic!("dispatch of what isn't stored: {job:?}"));
        // A later event of the same batch may have changed the wish, or given it up, meanwhile.
        assert!(
            committed.generation >= job.record.generation
                && committed.known == job.record.known
                && committed.look == job.record.look,
            "act before commit: {job:?} {committed:?}"
        );
        let changes = matches!(
            job.step,
            Step::Create | Step::Import | Step::Snapshot | Step::Restore | Step::Update
        );
        assert!(
            !changes || committed.look,
            "no trace of the attempt is durable: {job:?}"
        );
        if job.step == Step::Reclaim {
            assert_eq!(
                committed.phase,
                Phase::Reclaiming,
                "reclaim of what can be restored"
            );
        }
        if matches!(job.step, Step::Create | Step::Import) {
            assert_eq!(committed.known, Known::Free, "create before a look");
        }
        assert!(
            !self.uses.contains_key(&job.object),
            "dispatch of a busy or held object: {job:?}"
        );
        let mut images = vec![(job.record.image, true)];
        if matches!(job.step, Step::Create | Step::Flatten) {
            match job.record.source() {
                Some(Source::Snapshot { image, .. }) => images.push((*image, false)),
                Some(Source::Volume { uid, .. }) => images.push((*uid, false)),
                Some(Source::File { .. }) | None => {}
            }
        }
        for (image, alone) in &images {
            for (object, other) in &self.uses {
                let meets = |(i, a): &(Uid, bool)| i == image && (*a || *alone);
                assert!(
                    !other.images.iter().any(meets),
                    "two attempts on image {image}: {} of {object:?} and {job:?}",
                    other.attempt
                );
            }
        }
        let background = job.step.is_background();
        let pool = || {
            self.uses
                .values()
                .filter(|u| u.domain == job.domain && u.lane == job.lane)
        };
        let busy = pool().filter(|u| !u.held).count() + 1;
        let behind = pool().filter(|u| !u.held && u.background).count() + usize::from(background);
        assert!(busy <= workers, "{busy} attempts for {workers} workers");
        assert!(behind < workers, "the background took the last worker");
        assert!(
            pool().filter(|u| u.held).count() < abandoned_max,
            "dispatch in a full pool"
        );
        let it = Use {
            attempt: job.attempt,
            domain: job.domain.clone(),
            lane: job.lane,
            background,
            held: false,
            images,
        };
        self.uses.insert(job.object, it);
    }

    pub fn abandoned(&mut self, object: ObjectId) {
        self.uses
            .get_mut(&object)
            .expect("an abandoned attempt is known")
            .held = true;
        self.bills.entry(object).or_default().hangs += 1;
    }

    /// The call of that attempt has really ended, whatever the scheduler knows.
    pub fn ended(&mut self, object: ObjectId, attempt: u64) {
        if self
            .uses
            .get(&object)
            .is_some_and(|it| it.attempt == attempt)
        {
            self.uses.remove(&object);
        }
    }

    /// The process died, and what it had begun was fenced off.
    pub fn crashed(&mut self) {
        self.uses.clear();
    }

    /// An answer that may cost an attempt was given.
    pub fn billed(&mut self, object: ObjectId) {
        self.bills.entry(object).or_default().attempts += 1;
    }

    /// What was written is durable now.
    pub fn committed(&mut self, changed: &BTreeMap<ObjectId, Option<Record>>, disk: &Disk) {
        for (id, record) in changed {
            match record {
                Some(record) => self.check_record(record, disk),
                None => self.check_removed(*id, disk),
            }
        }
    }

    fn check_record(&mut self, record: &Record, disk: &Disk) {
        let id = record.id;
        let image = disk.images.get(&record.image);
        let busy = self.uses.contains_key(&id);
        if record.phase == Phase::Ready && !busy {
            let image = image.unwrap_or_else(|| panic!("ready without an image: {record:?}"));
            match id {
                ObjectId::Volume(_) => {
                    assert!(
                        image.whole && !image.trashed,
                        "ready, but {image:?}: {record:?}"
                    );
                    if record.observed_generation == record.generation {
                        let size = record.volume().map_or(0, |volume| volume.size_bytes);
                        assert!(
                            image.size >= size,
                            "ready, but too small: {image:?} {record:?}"
                        );
                    }
                }
                ObjectId::Snapshot(uid) => {
                    assert!(
                        image.snapshots.contains(&uid),
                        "ready, but not there: {record:?}"
                    );
                }
            }
        }
        if record.phase == Phase::Trashed && record.known == Known::Trashed && !busy {
            assert!(
                image.is_some_and(|image| image.trashed),
                "not in the trash: {record:?}"
            );
            // What was deleted before it was ever whole can't be restored, and nobody expects it.
            let torn = image.is_some_and(|image| !image.whole) && self.were_whole.contains(&id);
            assert!(
                !torn,
                "shown as restorable, and a part of it is gone: {record:?}"
            );
        }
        if image.is_some_and(|image| image.whole) {
            self.were_whole.insert(id);
        }
        let bill = self.bills.entry(id).or_default();
        assert!(
            record.attempts <= bill.attempts,
            "charged {} attempts of {}: {record:?}",
            record.attempts,
            bill.attempts
        );
        assert!(
            record.hangs <= bill.hangs,
            "charged hangs that never were: {record:?}"
        );
        if record.phase == Phase::Failed {
            let outage = matches!(
                record.reason,
                Some(ErrorKind::Unreachable | ErrorKind::SessionLost | ErrorKind::NoSpace) | None
            );
            assert!(!outage, "an outage failed an object: {record:?}");
            assert!(
                record.message.is_some(),
                "failed without a word: {record:?}"
            );
        }
        match self.promises.get(&id) {
            Some(Promise::There { name, size }) => {
                assert_eq!(
                    record.wish,
                    Wish::Present,
                    "a wish was turned round: {record:?}"
                );
                assert_eq!(record.name, *name);
                let wished = record.volume().map_or(*size, |volume| volume.size_bytes);
                assert!(
                    wished >= *size,
                    "a wish for {size} bytes was lost: {record:?}"
                );
            }
            Some(Promise::Gone) => {
                assert_eq!(record.wish, Wish::Absent, "a deletion was lost: {record:?}");
            }
            None => {}
        }
    }

    fn check_removed(&mut self, id: ObjectId, disk: &Disk) {
        let promise = self.promises.remove(&id);
        let wanted = matches!(promise, Some(Promise::There { .. }));
        assert!(
            !wanted,
            "{id:?} was promised to be there, and its record is gone"
        );
        assert!(
            !self.uses.contains_key(&id),
            "{id:?} went while an attempt is on it"
        );
        match id {
            ObjectId::Volume(uid) => {
                assert!(
                    !disk.images.contains_key(&uid),
                    "{id:?} went, its image is there"
                );
            }
            ObjectId::Snapshot(uid) => {
                let left = disk
                    .images
                    .values()
                    .any(|image| image.snapshots.contains(&uid));
                assert!(!left, "{id:?} went, the snapshot is there");
            }
        }
        self.bills.remove(&id);
    }

    /// Every acknowledged wish must have its record, at any time.
    pub fn nothing_lost(&self, store: &BTreeMap<ObjectId, Record>) {
        for (id, promise) in &self.promises {
            assert!(
                store.contains_key(id),
                "{id:?} was acknowledged ({promise:?}) and is lost"
            );
        }
    }

    /// The end, when the world is well: all is as wished and nothing else is there.
    pub fn at_rest(&self, store: &BTreeMap<ObjectId, Record>, disk: &Disk) {
        assert!(
            self.uses.is_empty(),
            "attempts are left over: {:?}",
            self.uses
        );
        for record in store.values() {
            let image = disk.images.get(&record.image);
            match (record.wish, record.id) {
                (Wish::Present, _) => {
                    assert_eq!(record.phase, Phase::Ready, "not met: {record:?}");
                    assert_eq!(record.observed_generation, record.generation, "{record:?}");
                }
                (Wish::Absent, ObjectId::Volume(uid)) => {
                    let needed = image.is_some_and(|image| !image.snapshots.is_empty())
                        || !disk.children(uid).is_empty();
                    assert!(needed, "nobody needs it and it is still there: {record:?}");
                }
                (Wish::Absent, ObjectId::Snapshot(_)) => panic!("not gone: {record:?}"),
            }
        }
        for (uid, image) in &disk.images {
            let record = store.get(&ObjectId::Volume(*uid));
            assert!(record.is_some(), "an image is left over: {uid} {image:?}");
            for snapshot in &image.snapshots {
                let record = store.get(&ObjectId::Snapshot(*snapshot));
                assert!(
                    record.is_some(),
                    "a snapshot is left over: {snapshot} of {uid}"
                );
            }
        }
    }
}
