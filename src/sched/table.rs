//! The objects that are not settled, and every index over them.
//!
//! Each index is a pure function of the objects: `contribute` adds or removes what one object
//! brings to all of them, and nothing else touches them. Objects are changed through `change`
//! (record) and `touch` (what is forgotten by a restart) only, which keep a journal, so that a
//! batch whose commit failed can be taken back.

use super::Command;
use super::work::{self, Class, Work};
use crate::model::{Known, Lane, Millis, Name, ObjectId, Phase, Record, Step, Uid};
use std::collections::{BTreeMap, BTreeSet};

/// An object without progress for this long is reported as stuck.
pub const STUCK_AFTER_MS: u64 = 600_000;

/// A running or abandoned attempt.
#[derive(Debug, Clone)]
pub struct Run {
    /// Its number.
    pub attempt: u64,
    /// What it does.
    pub step: Step,
    /// In which pool.
    pub lane: Lane,
    /// In which domain.
    pub domain: String,
    /// The generation of the wish that it was dispatched with.
    pub generation: u64,
    /// When it was dispatched.
    pub since: Millis,
    /// When its thread was abandoned: nothing runs on the object until it returns.
    pub held_since: Option<Millis>,
    /// The image that it works on, exclusively.
    pub key: Uid,
    /// The image that it reads, together with others.
    pub shared: Option<Uid>,
    /// This hang was counted already.
    pub hang_counted: bool,
    /// A reclaim whose dispatch marked the entry as being reclaimed: none had begun before, so if
    /// this one touched nothing the image is whole.
    pub first_reclaim: bool,
    /// It was asked to end early, by a wish.
    pub cancelled: bool,
}

/// What an object waits for, besides a free worker and the time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WaitKey {
    /// An image that another attempt works on.
    Image(Uid),
    /// A source that isn't there yet.
    Source(ObjectId),
    /// A place among the LUKS2 formats that may run at once.
    Encrypt,
}

/// An object in memory: its record and what a restart forgets.
#[derive(Debug, Clone)]
pub struct Object {
    /// As stored, or about to be.
    pub record: Record,
    /// Its attempt.
    pub run: Option<Run>,
    /// Nothing is tried before that time.
    pub wait_until: Option<Millis>,
    /// What it waits for.
    pub parked: Option<WaitKey>,
    /// Somebody accepted still needs it as a source.
    pub pinned: bool,
    /// A carrier whose snapshots have become fewer.
    pub recheck: bool,
    /// Dispatches in a row that changed nothing.
    pub spins: u32,
    /// When it was last dispatched.
    pub dispatched_at: Option<Millis>,
    /// Since when it has made no progress.
    pub idle_since: Millis,
    /// It was reported as stuck, for this episode.
    pub stuck: bool,
}

impl Object {
    pub fn new(record: Record) -> Object {
        let keep = match (record.phase, record.known, record.volume()) {
            (Phase::Trashed, Known::Trashed, Some(volume)) => volume.reclaim_after,
            _ => None,
        };
        Object {
            wait_until: record.next_attempt_at.max(keep),
            recheck: record.known == Known::Carrier,
            idle_since: record.phase_since,
            record,
            run: None,
            parked: None,
            pinned: false,
            spins: 0,
            dispatched_at: None,
            stuck: false,
        }
    }

    /// Nothing is left to do for it and nothing runs: it need not stay in memory.
    fn at_rest(&self) -> bool {
        self.record.is_settled() && self.run.is_none() && !self.pinned
    }

    /// An unmet wish that is being worked on: part of the backlog.
    pub fn unmet(&self) -> bool {
        let record = &self.record;
        match record.phase {
            Phase::Pending | Phase::Creating | Phase::Updating | Phase::Deleting => true,
            Phase::Ready => record.observed_generation < record.generation,
            Phase::Failed | Phase::Trashed | Phase::Reclaiming | Phase::Gone => false,
        }
    }

    /// When it counts as stuck if it makes no progress until then.
    fn stuck_at(&self) -> Option<Millis> {
        let record = &self.record;
        let watched = match record.phase {
            Phase::Failed | Phase::Gone => false,
            Phase::Ready => !record.is_settled() || self.unmet(),
            Phase::Trashed => record.known != Known::Carrier || self.run.is_some(),
            _ => true,
        };
        (watched && !self.stuck).then(|| self.idle_since.plus(STUCK_AFTER_MS))
    }
}

/// What waits for workers of a pool, oldest wish first.
#[derive(Debug, Default)]
pub struct Queues(BTreeMap<Class, BTreeSet<(Millis, ObjectId)>>);

impl Queues {
    /// The objects of that class, oldest wish first.
    pub fn of(&self, class: Class) -> impl Iterator<Item = (Millis, ObjectId)> {
        self.0.get(&class).into_iter().flatten().copied()
    }
}

/// What runs in a pool.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Busy {
    /// Attempts with a worker of their own, background included.
    pub running: usize,
    /// Of these, background.
    pub background: usize,
    /// Attempts whose thread was abandoned.
    pub held: usize,
}

/// Who uses an image.
#[derive(Debug, Default, Clone)]
pub struct Users {
    exclusive: Option<ObjectId>,
    shared: BTreeSet<ObjectId>,
}

type Pool = (String, Lane);

/// The objects and their indexes.
#[derive(Debug, Default)]
pub struct Table {
    now: Millis,
    objects: BTreeMap<ObjectId, Object>,
    names: BTreeMap<(&'static str, Name), ObjectId>,
    queues: BTreeMap<Pool, Queues>,
    vanish: BTreeSet<ObjectId>,
    timers: BTreeSet<(Millis, ObjectId)>,
    stuck: BTreeSet<(Millis, ObjectId)>,
    waiting: BTreeMap<WaitKey, BTreeSet<ObjectId>>,
    pins: BTreeMap<ObjectId, BTreeSet<ObjectId>>,
    unmet: BTreeMap<Pool, BTreeSet<(Millis, ObjectId)>>,
    busy: BTreeMap<Pool, Busy>,
    held: BTreeMap<String, BTreeSet<ObjectId>>,
    images: BTreeMap<Uid, Users>,
    encrypting: usize,
    /// Objects by kind and phase; those that left memory because they settled still count.
    counts: BTreeMap<(&'static str, Phase), u64>,
    /// What was before this batch, of each object that it touched.
    journal: BTreeMap<ObjectId, Option<Object>>,
    saved_counts: Option<BTreeMap<(&'static str, Phase), u64>>,
    dirty: BTreeSet<ObjectId>,
    repin: BTreeSet<ObjectId>,
}

impl Table {
    /// Sets the time that changes are stamped with.
    pub fn at(&mut self, now: Millis) {
        self.now = now;
        if self.saved_counts.is_none() {
            self.saved_counts = Some(self.counts.clone());
        }
    }

    /// Takes over what the store holds.
    pub fn load(&mut self, records: Vec<Record>, counts: BTreeMap<(&'static str, Phase), u64>) {
        self.counts = counts;
        for record in records {
            let (id, written_at) = (record.id, record.updated_at);
            self.attach(record);
            self.mend_times(id, written_at);
        }
    }

    /// The clock may have been set back since the record was written: waits keep their length.
    fn mend_times(&mut self, id: ObjectId, written_at: Millis) {
        let now = self.now;
        if written_at > now {
            self.touch(id, |object| {
                let left = |at: Millis| now.plus(at.since(written_at));
                object.wait_until = object.wait_until.map(left);
                object.idle_since = object.idle_since.min(now);
            });
        }
    }

    pub fn get(&self, id: ObjectId) -> Option<&Object> {
        self.objects.get(&id)
    }

    /// The object with that name that isn't in the trash.
    pub fn named(&self, kind: &'static str, name: &Name) -> Option<&Object> {
        let id = self.names.get(&(kind, name.clone()))?;
        self.objects.get(id)
    }

    pub fn objects(&self) -> impl Iterator<Item = &Object> {
        self.objects.values()
    }

    /// Objects by kind and phase, settled ones included.
    pub fn counts(&self) -> &BTreeMap<(&'static str, Phase), u64> {
        &self.counts
    }

    /// How many volumes there are, trash entries included.
    pub fn volumes(&self) -> u64 {
        self.counts
            .iter()
            .filter(|((kind, _), _)| *kind == "volume")
            .map(|(_, n)| n)
            .sum()
    }

    /// Adds an object that was just accepted.
    pub fn insert(&mut self, record: Record) {
        let id = record.id;
        *self.counts.entry((id.kind(), record.phase)).or_default() += 1;
        self.dirty.insert(id);
        self.attach(record);
    }

    /// Takes a stored object into memory.
    pub fn attach(&mut self, record: Record) {
        let id = record.id;
        if self.objects.contains_key(&id) {
            return;
        }
        self.journal.entry(id).or_insert(None);
        let mut object = Object::new(record);
        object.pinned = self.pins.contains_key(&id);
        self.contribute(&object, true);
        self.objects.insert(id, object);
        self.repin();
    }

    /// Changes the record of an object in memory.
    pub fn change(&mut self, id: ObjectId, f: impl FnOnce(&mut Record, Millis)) {
        let now = self.now;
        self.touch(id, |object| {
            let phase = object.record.phase;
            f(&mut object.record, now);
            object.record.updated_at = now;
            if object.record.phase != phase {
                object.idle_since = now;
                object.stuck = false;
            }
        });
        self.dirty.insert(id);
    }

    /// Changes what a restart forgets of an object in memory.
    pub fn touch(&mut self, id: ObjectId, f: impl FnOnce(&mut Object)) {
        let Some(mut object) = self.objects.remove(&id) else {
            return;
        };
        self.journal
            .entry(id)
            .or_insert_with(|| Some(object.clone()));
        self.contribute(&object, false);
        let before = (
            object.record.phase,
            object.run.as_ref().map(|run| run.attempt),
        );
        f(&mut object);
        if object.record.phase != before.0 {
            self.count(id, before.0, object.record.phase);
        }
        self.contribute(&object, true);
        let wake_source = work::is_live(&object.record) || object.record.phase == Phase::Failed;
        self.objects.insert(id, object);
        if wake_source {
            self.wake(WaitKey::Source(id));
        }
        self.repin();
    }

    /// Ends an object: nothing of it is left.
    pub fn remove(&mut self, id: ObjectId) {
        let Some(object) = self.objects.remove(&id) else {
            return;
        };
        self.contribute(&object, false);
        if let Some(count) = self.counts.get_mut(&(id.kind(), object.record.phase)) {
            *count = count.saturating_sub(1);
        }
        self.journal.entry(id).or_insert(Some(object));
        self.dirty.insert(id);
        self.wake(WaitKey::Source(id));
        self.repin();
    }

    /// Everything that waits for that may be looked at again.
    pub fn wake(&mut self, key: WaitKey) {
        for id in self.waiting.get(&key).cloned().unwrap_or_default() {
            self.touch(id, |object| object.parked = None);
        }
    }

    /// Objects whose time has come are looked at again.
    pub fn ring(&mut self) {
        while let Some((at, id)) = self.timers.first().copied()
            && at <= self.now
        {
            self.touch(id, |object| object.wait_until = None);
        }
    }

    pub fn next_timer(&self) -> Option<Millis> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// When the next object counts as stuck.
    pub fn next_stuck(&self) -> Option<(Millis, ObjectId)> {
        self.stuck.first().copied()
    }

    pub fn queues(&self, domain: &str, lane: Lane) -> Option<&Queues> {
        self.queues.get(&(domain.to_owned(), lane))
    }

    pub fn busy(&self, domain: &str, lane: Lane) -> Busy {
        self.busy
            .get(&(domain.to_owned(), lane))
            .copied()
            .unwrap_or_default()
    }

    /// Unmet wishes of a pool.
    pub fn backlog(&self, domain: &str, lane: Lane) -> usize {
        self.unmet
            .get(&(domain.to_owned(), lane))
            .map_or(0, BTreeSet::len)
    }

    /// When the oldest unmet wish of a pool was uttered.
    pub fn oldest(&self, domain: &str, lane: Lane) -> Option<Millis> {
        self.unmet
            .get(&(domain.to_owned(), lane))?
            .first()
            .map(|(at, _)| *at)
    }

    /// The next object that nothing was made of and nothing shall be.
    pub fn next_vanishing(&self) -> Option<ObjectId> {
        self.vanish.first().copied()
    }

    /// Objects whose attempts are abandoned in that domain.
    pub fn held(&self, domain: &str) -> impl Iterator<Item = ObjectId> {
        self.held.get(domain).into_iter().flatten().copied()
    }

    /// Objects that wait for something besides a worker and the time.
    pub fn parked(&self) -> impl Iterator<Item = ObjectId> {
        self.waiting.values().flatten().copied()
    }

    /// Who works on an image.
    pub fn user_of(&self, image: Uid) -> Option<ObjectId> {
        let users = self.images.get(&image)?;
        users.exclusive.or(users.shared.first().copied())
    }

    pub fn encrypting(&self) -> usize {
        self.encrypting
    }

    /// Those who still need that object as their source.
    pub fn dependents(&self, id: ObjectId) -> Vec<ObjectId> {
        self.pins.get(&id).into_iter().flatten().copied().collect()
    }

    /// Whether an attempt on `key` (exclusive) and `shared` would meet another one; if so, on
    /// which image and whose.
    pub fn conflict(&self, key: Uid, shared: Option<Uid>) -> Option<(Uid, ObjectId)> {
        if let Some(users) = self.images.get(&key)
            && let Some(user) = users.exclusive.or(users.shared.first().copied())
        {
            return Some((key, user));
        }
        let shared = shared?;
        let user = self.images.get(&shared)?.exclusive?;
        Some((shared, user))
    }

    /// The writes since the last call.
    pub fn take_writes(&mut self) -> Vec<Command> {
        std::mem::take(&mut self.dirty)
            .into_iter()
            .map(|id| match self.objects.get(&id) {
                Some(object) => Command::Put(Box::new(object.record.clone())),
                None => Command::Remove(id),
            })
            .collect()
    }

    /// The batch is durable; what has settled leaves memory.
    pub fn committed(&mut self) {
        self.saved_counts = None;
        for id in std::mem::take(&mut self.journal).into_keys() {
            if self.objects.get(&id).is_some_and(Object::at_rest)
                && let Some(object) = self.objects.remove(&id)
            {
                self.contribute(&object, false);
            }
        }
        self.repin.clear();
    }

    /// The batch never was.
    pub fn rollback(&mut self) {
        let journal = std::mem::take(&mut self.journal);
        // All that is new goes before anything old comes back: they may share images and names.
        for id in journal.keys() {
            if let Some(object) = self.objects.remove(id) {
                self.contribute(&object, false);
            }
        }
        for (id, object) in journal {
            if let Some(object) = object {
                self.contribute(&object, true);
                self.objects.insert(id, object);
            }
        }
        if let Some(counts) = self.saved_counts.take() {
            self.counts = counts;
        }
        self.dirty.clear();
        self.repin.clear();
    }

    fn count(&mut self, id: ObjectId, from: Phase, to: Phase) {
        if let Some(count) = self.counts.get_mut(&(id.kind(), from)) {
            *count = count.saturating_sub(1);
        }
        *self.counts.entry((id.kind(), to)).or_default() += 1;
    }

    /// Tells sources whether somebody still needs them.
    fn repin(&mut self) {
        while let Some(id) = self.repin.pop_first() {
            let pinned = self.pins.contains_key(&id);
            if self
                .objects
                .get(&id)
                .is_some_and(|object| object.pinned != pinned)
            {
                self.touch(id, |object| object.pinned = pinned);
            }
        }
    }

    /// Adds (`plus`) or removes what one object brings to the indexes.
    fn contribute(&mut self, object: &Object, plus: bool) {
        let record = &object.record;
        let id = record.id;
        let pool = |lane: Lane| (record.place.domain.clone(), lane);
        if !record.phase.is_trash() {
            let key = (id.kind(), record.name.clone());
            if plus {
                self.names.insert(key, id);
            } else if self.names.get(&key) == Some(&id) {
                self.names.remove(&key);
            }
        }
        if let Some(source) = work::needs_source(record) {
            put(self.pins.entry(source).or_default(), id, plus);
            drop_empty(&mut self.pins, &source);
            self.repin.insert(source);
        }
        if object.unmet() {
            let key = pool(record.lane());
            put(
                self.unmet.entry(key).or_default(),
                (record.wished_at, id),
                plus,
            );
        }
        if let Some(at) = object.stuck_at() {
            put(&mut self.stuck, (at, id), plus);
        }
        match &object.run {
            Some(run) => self.contribute_run(id, run, plus),
            None => self.contribute_waiting(object, plus),
        }
    }

    fn contribute_run(&mut self, id: ObjectId, run: &Run, plus: bool) {
        let busy = self.busy.entry((run.domain.clone(), run.lane)).or_default();
        if run.held_since.is_some() {
            tally(&mut busy.held, plus);
            put(self.held.entry(run.domain.clone()).or_default(), id, plus);
        } else {
            tally(&mut busy.running, plus);
            if run.step.is_background() {
                tally(&mut busy.background, plus);
            }
        }
        if run.step == Step::Encrypt {
            tally(&mut self.encrypting, plus);
        }
        let users = self.images.entry(run.key).or_default();
        let free = users.exclusive.is_none() && users.shared.is_empty();
        assert!(!plus || free, "two attempts on image {}", run.key);
        users.exclusive = plus.then_some(id);
        if let Some(shared) = run.shared {
            let users = self.images.entry(shared).or_default();
            assert!(
                !plus || users.exclusive.is_none(),
                "two attempts on image {shared}"
            );
            put(&mut users.shared, id, plus);
        }
        for image in [Some(run.key), run.shared].into_iter().flatten() {
            let unused = |users: &Users| users.exclusive.is_none() && users.shared.is_empty();
            if self.images.get(&image).is_some_and(unused) {
                self.images.remove(&image);
            }
        }
    }

    fn contribute_waiting(&mut self, object: &Object, plus: bool) {
        let record = &object.record;
        let id = record.id;
        // Whatever else keeps it from going: what it waits for must be able to wake it.
        if let Some(key) = object.parked {
            put(self.waiting.entry(key).or_default(), id, plus);
            drop_empty(&mut self.waiting, &key);
        }
        let step = match work::next(object) {
            Work::Nothing => return,
            Work::Vanish => return put(&mut self.vanish, id, plus),
            Work::Step(step) => step,
        };
        if let Some(at) = object.wait_until {
            put(&mut self.timers, (at, id), plus);
        } else if object.parked.is_none() {
            let pool = (record.place.domain.clone(), work::lane(object, step));
            let queue = self.queues.entry(pool).or_default();
            let queue = queue.0.entry(Class::of(step)).or_default();
            put(queue, (record.wished_at, id), plus);
        }
    }
}

fn put<T: Ord>(set: &mut BTreeSet<T>, item: T, plus: bool) {
    if plus {
        set.insert(item);
    } else {
        set.remove(&item);
    }
}

fn drop_empty<K: Ord, T>(map: &mut BTreeMap<K, BTreeSet<T>>, key: &K) {
    if map.get(key).is_some_and(BTreeSet::is_empty) {
        map.remove(key);
    }
}

fn tally(count: &mut usize, plus: bool) {
    if plus {
        *count += 1;
    } else {
        *count = count.saturating_sub(1);
    }
}
