//! What every backend must do, told through the trait alone.

use super::records::{
    from_snapshot, from_volume, made_from, name, place, retired, seen, snapshot, volume,
};
use std::ops::ControlFlow;
use volward::backend::{
    Backend, Ctl, Error, Found, Reclaimed, Result, Retired, Session, Unwatched, VolumeState,
};
use volward::model::{ErrorKind, Known, Lane, Place, Record, Source, SourceFormat, Step};

const SIZE: u64 = 8 << 20;

/// An empty storage, as two instances of volward see it, and what a guest or an operator can do.
pub struct World {
    pub backend: Box<dyn Backend>,
    /// Another instance on the same storage.
    pub other: Box<dyn Backend>,
    pub place: Place,
    pub tools: Box<dyn Tools>,
}

/// What is done behind a backend's back.
pub trait Tools {
    /// Writes the first bytes of a volume, as a guest does.
    fn write(&self, volume: &Record, data: &[u8]);
    /// Reads the first bytes of a volume.
    fn read(&self, volume: &Record, length: usize) -> Vec<u8>;
    /// Puts something without a mark where that object's image would be.
    fn plant(&self, record: &Record);
    /// A file that may be imported.
    fn file(&self, data: &[u8], size_bytes: u64) -> String;
    /// All that is there, in words, in order.
    fn all(&self) -> Vec<String>;
}

/// A worker.
struct Worker<'a> {
    world: &'a World,
    session: Box<dyn Session>,
}

/// A `Ctl` that is told to stop from the beginning.
struct Stopped;

impl Ctl for Stopped {
    fn progress(&self, _done: u64, _total: u64) -> ControlFlow<()> {
        ControlFlow::Break(())
    }

    fn cancelled(&self) -> bool {
        true
    }
}

impl World {
    fn worker(&self) -> Worker<'_> {
        self.worker_of(self.backend.as_ref())
    }

    fn worker_of(&self, backend: &dyn Backend) -> Worker<'_> {
        let session = backend.connect(&self.place.domain, Lane::Create, &Unwatched);
        Worker {
            world: self,
            session: session.unwrap(),
        }
    }

    fn volume(&self, title: &str, uid: u128) -> Record {
        volume(title, uid, SIZE, &self.place)
    }
}

impl Worker<'_> {
    fn ensure(&mut self, step: Step, record: &Record) -> Result<VolumeState> {
        self.session.ensure_volume(step, record, &Unwatched)
    }

    fn create(&mut self, record: Record) -> Record {
        let state = self.ensure(Step::Create, &record).unwrap();
        assert!(
            state.did,
            "{}: made, and says that it was there",
            record.title()
        );
        seen(record, &state)
    }

    fn snapshot(&mut self, record: Record) -> Record {
        let state = self.session.ensure_snapshot(&record, &Unwatched).unwrap();
        assert!(state.did);
        let mut record = record;
        record.known = Known::Live;
        record
    }

    fn inspect(&mut self, record: &Record) -> Option<Found> {
        self.session.inspect(record, &Unwatched).unwrap()
    }

    fn retire(&mut self, record: &Record) -> Retired {
        self.session.retire_volume(record, &Unwatched).unwrap()
    }

    /// Retires a volume without live snapshots.
    fn trash(&mut self, record: Record) -> Record {
        let how = self.retire(&record);
        assert!(matches!(how, Retired::Trashed { .. }), "{how:?}");
        retired(record, &how)
    }

    fn reclaim(&mut self, record: &Record) -> Reclaimed {
        self.session.reclaim(record, &Unwatched).unwrap()
    }

    fn assert_bytes(&self, record: &Record, wanted: &[u8]) {
        let bytes = self.world.tools.read(record, wanted.len());
        assert!(bytes == wanted, "{}: other bytes", record.title());
    }
}

/// Checks a refusal: its kind, and that nothing has changed.
fn assert_refused<T: std::fmt::Debug>(
    world: &World,
    before: &[String],
    kind: ErrorKind,
    answer: Result<T>,
) -> Error {
    let error = answer.expect_err("it should be refused");
    assert_eq!(error.kind, kind, "{error}");
    assert!(!error.message.is_empty());
    assert_eq!(
        world.tools.all(),
        before,
        "a refusal has changed something: {error}"
    );
    error
}

/// Runs all of it, each part in a new world.
pub fn run(make: &dyn Fn() -> World) {
    type Part = fn(&World);
    let parts: &[(&str, Part)] = &[
        ("create", create_twice),
        ("sizes and names", sizes_and_names),
        ("lost", a_lost_image_is_not_made_again),
        ("foreign", what_is_foreign_stays),
        ("remnant", a_remnant_is_made_again),
        ("half", a_cancelled_create_goes_on),
        ("update", updates_grow_only),
        ("snapshot", a_snapshot_is_of_a_moment),
        ("clone", a_clone_lives_alone),
        ("sources", bad_sources_leave_nothing),
        ("delete with snapshots", deleted_with_snapshots_and_clones),
        ("restore", restored_whole),
        ("reclaim", reclaimed_once),
        ("blocked", reclaim_waits_for_children),
        ("identity", another_root_is_not_touched),
        ("import", imported),
        ("survey", survey_finds_all),
    ];
    for (title, part) in parts {
        eprintln!("conformance: {title}");
        part(&make());
    }
}

fn create_twice(world: &World) {
    let mut worker = world.worker();
    let wished = world.volume("db-01", 1);
    assert_eq!(worker.inspect(&wished), None);
    let made = worker.create(wished.clone());
    let before = world.tools.all();
    // Whatever the record knows by then, the same call again finds it there.
    for record in [&wished, &made] {
        for step in [Step::Create, Step::Update] {
            let again = world.worker().ensure(step, record).unwrap();
            assert!(!again.did);
            assert_eq!((again.size_bytes, again.generation), (SIZE, 1));
            assert!(!again.handle.is_empty() && again.identity.is_some());
        }
        let Some(Found::Volume(state)) = worker.inspect(record) else {
            panic!("it isn't found");
        };
        assert_eq!(state.size_bytes, SIZE);
    }
    assert_eq!(world.tools.all(), before);
}

fn sizes_and_names(world: &World) {
    let mut worker = world.worker();
    let longest = "a".repeat(63);
    let table = [
        ("a", 4096),
        (longest.as_str(), 3 * 4096),
        ("0.b_c-9", 1 << 40),
    ];
    for (at, (title, size)) in (10..).zip(table) {
        let record = worker.create(volume(title, at, size, &world.place));
        assert!(matches!(worker.inspect(&record), Some(Found::Volume(s)) if s.size_bytes == size));
        let kept = worker.snapshot(snapshot(title, at + 100, &record));
        assert!(matches!(worker.inspect(&kept), Some(Found::Snapshot(s)) if s.size_bytes == size));
        // Another volume of that name is another image.
        let twin = worker.create(volume(title, at + 200, size, &world.place));
        worker.trash(twin);
        assert!(matches!(worker.inspect(&record), Some(Found::Volume(_))));
    }
    let empty = world.tools.all();
    let none = volume("none", 99, 0, &world.place);
    let answer = worker.ensure(Step::Create, &none);
    assert_refused(world, &empty, ErrorKind::Invalid, answer);
}

fn a_lost_image_is_not_made_again(world: &World) {
    let mut worker = world.worker();
    let mut lost = world.volume("db-01", 1);
    let before = world.tools.all();
    for known in [Known::Live, Known::Carrier, Known::Trashed] {
        lost.known = known;
        let answer = worker.ensure(Step::Create, &lost);
        assert_refused(world, &before, ErrorKind::Gone, answer);
        assert_eq!(worker.retire(&lost), Retired::Gone);
    }
    for known in [Known::Free, Known::Live] {
        lost.known = known;
        let answer = worker.ensure(Step::Update, &lost);
        assert_refused(world, &before, ErrorKind::Gone, answer);
    }
    // In the trash it isn't lost, and isn't made a second time either.
    let trashed = worker.create(world.volume("db-02", 2));
    let trashed = worker.trash(trashed);
    let before = world.tools.all();
    for known in [Known::Free, Known::Live, Known::Trashed] {
        let mut record = trashed.clone();
        record.known = known;
        let answer = worker.ensure(Step::Create, &record);
        assert_refused(world, &before, ErrorKind::Gone, answer);
    }
}

fn what_is_foreign_stays(world: &World) {
    // Another instance has made it.
    let ours = world.volume("db-01", 1);
    world.worker_of(world.other.as_ref()).create(ours.clone());
    let mut worker = world.worker();
    let before = world.tools.all();
    assert!(matches!(worker.inspect(&ours), Some(Found::Foreign(_))));
    for known in [Known::Nothing, Known::Free, Known::Live] {
        let mut record = ours.clone();
        record.known = known;
        let answer = worker.ensure(Step::Create, &record);
        assert_refused(world, &before, ErrorKind::AlreadyExists, answer);
        let answer = worker.session.restore(&record, &Unwatched);
        assert_refused(world, &before, ErrorKind::AlreadyExists, answer);
        let gone = worker.session.retire_volume(&record, &Unwatched);
        if known == Known::Live {
            assert_refused(world, &before, ErrorKind::AlreadyExists, gone);
        } else {
            // Ours was never made, so nothing of it is there.
            assert_eq!(gone, Ok(Retired::Gone));
        }
        let kept = snapshot("kept", 7, &ours);
        let answer = worker.session.ensure_snapshot(&kept, &Unwatched);
        assert!(answer.is_err());
        assert_eq!(world.tools.all(), before);
    }
}

fn a_remnant_is_made_again(world: &World) {
    let mut worker = world.worker();
    let mut record = world.volume("db-01", 1);
    world.tools.plant(&record);
    assert_eq!(worker.inspect(&record), Some(Found::Unmarked));
    let before = world.tools.all();
    for known in [Known::Nothing, Known::Live] {
        record.known = known;
        let answer = worker.ensure(Step::Create, &record);
        assert_refused(world, &before, ErrorKind::AlreadyExists, answer);
    }
    record.known = Known::Nothing;
    assert_eq!(worker.retire(&record), Retired::Gone);
    assert_eq!(world.tools.all(), before);
    record.known = Known::Free;
    worker.create(record.clone());
    // And it is removed, if it is to go.
    let mut record = world.volume("db-02", 2);
    world.tools.plant(&record);
    record.known = Known::Free;
    assert_eq!(worker.retire(&record), Retired::Gone);
    assert_eq!(worker.inspect(&record), None);
}

fn a_cancelled_create_goes_on(world: &World) {
    let mut worker = world.worker();
    let before = world.tools.all();
    let record = world.volume("db-01", 1);
    let error = worker
        .session
        .ensure_volume(Step::Create, &record, &Stopped)
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::Cancelled);
    let found = worker.inspect(&record);
    assert!(
        matches!(found, None | Some(Found::Half | Found::Unmarked)),
        "{found:?}"
    );
    let record = worker.create(record);
    assert!(matches!(worker.inspect(&record), Some(Found::Volume(_))));
    // Or goes, without a trace.
    let record = world.volume("db-02", 2);
    let cancelled = worker
        .session
        .ensure_volume(Step::Create, &record, &Stopped);
    assert!(cancelled.is_err());
    assert_eq!(worker.retire(&record), Retired::Gone);
    assert_eq!(worker.inspect(&record), None);
    assert_eq!(world.tools.all().len(), before.len() + 1);
}

fn updates_grow_only(world: &World) {
    let mut worker = world.worker();
    let mut record = worker.create(world.volume("db-01", 1));
    world.tools.write(&record, b"data");
    record.generation = 2;
    record.volume_mut().unwrap().size_bytes = 2 * SIZE;
    let grown = worker.ensure(Step::Update, &record).unwrap();
    assert!(grown.did);
    assert_eq!((grown.size_bytes, grown.generation), (2 * SIZE, 2));
    assert!(!worker.ensure(Step::Update, &record).unwrap().did);
    record.generation = 3;
    record.volume_mut().unwrap().size_bytes = SIZE;
    let kept = worker.ensure(Step::Update, &record).unwrap();
    assert_eq!((kept.size_bytes, kept.generation), (2 * SIZE, 3));
    worker.assert_bytes(&record, b"data");
    let marked = worker.session.survey(&Unwatched).unwrap();
    assert_eq!(marked[0].record.generation, 3);
}

fn a_snapshot_is_of_a_moment(world: &World) {
    let mut worker = world.worker();
    let source = worker.create(world.volume("db-01", 1));
    world.tools.write(&source, b"before");
    let wished = snapshot("kept", 2, &source);
    assert_eq!(worker.inspect(&wished), None);
    let kept = worker.snapshot(wished.clone());
    world.tools.write(&source, b"after!");
    for record in [&wished, &kept] {
        let again = worker.session.ensure_snapshot(record, &Unwatched).unwrap();
        assert!(!again.did);
        assert_eq!(again.size_bytes, SIZE);
        assert!(matches!(worker.inspect(record), Some(Found::Snapshot(_))));
    }
    let clone = made_from(world.volume("clone", 3), from_snapshot(&kept));
    let clone = worker.create(clone);
    worker.assert_bytes(&clone, b"before");
    worker.assert_bytes(&source, b"after!");
    for _ in 0..2 {
        let gone = worker.session.retire_snapshot(&kept, &Unwatched);
        assert_eq!(gone, Ok(Retired::Gone));
        assert_eq!(worker.inspect(&kept), None);
    }
    worker.assert_bytes(&clone, b"before");
    worker.assert_bytes(&source, b"after!");
}

fn a_clone_lives_alone(world: &World) {
    let mut worker = world.worker();
    let source = worker.create(world.volume("db-01", 1));
    world.tools.write(&source, b"first");
    let mut clone = made_from(world.volume("clone", 2), from_volume(&source));
    clone.volume_mut().unwrap().size_bytes = 2 * SIZE;
    let clone = worker.create(clone);
    world.tools.write(&source, b"other");
    worker.assert_bytes(&clone, b"first");
    world.tools.write(&clone, b"third");
    worker.assert_bytes(&source, b"other");
    assert!(!worker.ensure(Step::Create, &clone).unwrap().did);
    let flat = worker.session.flatten(&clone, &Unwatched).unwrap();
    assert_eq!((flat.size_bytes, flat.has_parent), (2 * SIZE, false));
    assert!(!worker.session.flatten(&clone, &Unwatched).unwrap().did);
    worker.assert_bytes(&clone, b"third");
}

fn bad_sources_leave_nothing(world: &World) {
    let mut worker = world.worker();
    let source = worker.create(world.volume("db-01", 1));
    let kept = snapshot("kept", 2, &source);
    let before = world.tools.all();
    let missing = made_from(world.volume("c1", 3), from_snapshot(&kept));
    let answer = worker.ensure(Step::Create, &missing);
    assert_refused(world, &before, ErrorKind::Gone, answer);
    let missing = world.volume("nobody", 4);
    let orphan = made_from(world.volume("c2", 5), from_volume(&missing));
    let answer = worker.ensure(Step::Create, &orphan);
    assert_refused(world, &before, ErrorKind::Gone, answer);
    let answer = worker
        .session
        .ensure_snapshot(&snapshot("s", 6, &missing), &Unwatched);
    assert_refused(world, &before, ErrorKind::Gone, answer);
    let mut small = made_from(world.volume("c3", 7), from_volume(&source));
    small.volume_mut().unwrap().size_bytes = SIZE / 2;
    let answer = worker.ensure(Step::Create, &small);
    assert_refused(world, &before, ErrorKind::Invalid, answer);
}

fn deleted_with_snapshots_and_clones(world: &World) {
    let mut worker = world.worker();
    let empty = world.tools.all();
    let source = worker.create(world.volume("db-01", 1));
    world.tools.write(&source, b"base");
    let kept = worker.snapshot(snapshot("kept", 2, &source));
    let early = made_from(world.volume("early", 3), from_snapshot(&kept));
    let early = worker.create(early);
    // Deleting waits for nobody.
    let how = worker.retire(&source);
    let mut source = retired(source, &how);
    assert_eq!(worker.retire(&source), how, "the same call again");
    // What was made from it, and can still be made from its snapshot, is as before.
    worker.assert_bytes(&early, b"base");
    let late = made_from(world.volume("late", 4), from_snapshot(&kept));
    let late = worker.create(late);
    worker.assert_bytes(&late, b"base");
    let gone = worker.session.retire_snapshot(&kept, &Unwatched);
    assert_eq!(gone, Ok(Retired::Gone));
    if let Retired::Carrier { snapshots } = how {
        assert_eq!(snapshots.len(), 1, "{snapshots:?}");
        source = worker.trash(source);
    }
    for clone in [early, late] {
        worker.assert_bytes(&clone, b"base");
        worker.session.flatten(&clone, &Unwatched).unwrap();
        worker.assert_bytes(&clone, b"base");
        let clone = worker.trash(clone);
        assert_eq!(worker.reclaim(&clone), Reclaimed::Done);
    }
    assert_eq!(worker.reclaim(&source), Reclaimed::Done);
    // Nothing is left of any of it.
    let left = world.tools.all();
    assert!(left.len() <= empty.len().max(1), "{left:?}");
}

fn restored_whole(world: &World) {
    let mut worker = world.worker();
    let record = worker.create(world.volume("db-01", 1));
    world.tools.write(&record, b"data");
    let record = worker.trash(record);
    assert!(matches!(
        worker.inspect(&record),
        Some(Found::Trashed { whole: true, .. })
    ));
    assert!(matches!(worker.retire(&record), Retired::Trashed { .. }));
    // Under another name, by a worker that doesn't know the first one.
    let mut renamed = record.clone();
    renamed.name = name("db-02");
    renamed.generation = 5;
    let state = world
        .worker()
        .session
        .restore(&renamed, &Unwatched)
        .unwrap();
    assert_eq!(
        (state.size_bytes, state.generation, state.did),
        (SIZE, 5, true)
    );
    let back = seen(renamed, &state);
    worker.assert_bytes(&back, b"data");
    assert!(!worker.session.restore(&back, &Unwatched).unwrap().did);
    let marked = worker.session.survey(&Unwatched).unwrap();
    assert_eq!(marked[0].record.name.as_str(), "db-02");
    let record = worker.trash(back);
    assert_eq!(worker.reclaim(&record), Reclaimed::Done);
    let before = world.tools.all();
    let answer = worker.session.restore(&record, &Unwatched);
    assert_refused(world, &before, ErrorKind::Gone, answer);
}

fn reclaimed_once(world: &World) {
    let mut worker = world.worker();
    let record = worker.create(world.volume("db-01", 1));
    world.tools.write(&record, b"data");
    // Not what is in its place.
    let before = world.tools.all();
    let answer = worker.session.reclaim(&record, &Unwatched);
    let error = assert_refused(world, &before, ErrorKind::Invalid, answer);
    assert!(!error.touched);
    let record = worker.trash(record);
    // Cancelled before its first bite it is still whole, and says so.
    let error = worker.session.reclaim(&record, &Stopped).unwrap_err();
    assert_eq!((error.kind, error.touched), (ErrorKind::Cancelled, false));
    let state = worker.session.restore(&record, &Unwatched).unwrap();
    let record = seen(record, &state);
    worker.assert_bytes(&record, b"data");
    let record = worker.trash(record);
    for _ in 0..2 {
        assert_eq!(worker.reclaim(&record), Reclaimed::Done);
        assert_eq!(worker.inspect(&record), None);
        assert_eq!(worker.retire(&record), Retired::Gone);
    }
}

fn reclaim_waits_for_children(world: &World) {
    let mut worker = world.worker();
    let source = worker.create(world.volume("db-01", 1));
    let clone = made_from(world.volume("clone", 2), from_volume(&source));
    let clone = worker.create(clone);
    let source = worker.trash(source);
    if world.backend.caps().chains {
        let Reclaimed::Blocked { by } = worker.reclaim(&source) else {
            panic!("freed under its clone");
        };
        assert_eq!(by.len(), 1, "{by:?}");
        let found = worker.inspect(&source);
        assert!(matches!(found, Some(Found::Trashed { whole: true, .. })));
        let stopped = worker.session.flatten(&clone, &Stopped);
        assert_eq!(stopped.unwrap_err().kind, ErrorKind::Cancelled);
        assert!(worker.session.flatten(&clone, &Unwatched).unwrap().did);
    }
    assert_eq!(worker.reclaim(&source), Reclaimed::Done);
    assert!(matches!(worker.inspect(&clone), Some(Found::Volume(_))));
}

fn another_root_is_not_touched(world: &World) {
    let mut worker = world.worker();
    let record = worker.create(world.volume("db-01", 1));
    let trashed = worker.create(world.volume("db-02", 2));
    let trashed = worker.trash(trashed);
    let before = world.tools.all();
    let elsewhere = |record: &Record| {
        let mut record = record.clone();
        record.place.identity = Some("01ARZ3NDEKTSV4RRFFQ69G5FAV".to_owned());
        record
    };
    let (live, gone) = (elsewhere(&record), elsewhere(&trashed));
    let wanted = ErrorKind::Unreachable;
    let session = &mut worker.session;
    let c = &Unwatched;
    assert_refused(
        world,
        &before,
        wanted,
        session.ensure_volume(Step::Create, &live, c),
    );
    assert_refused(
        world,
        &before,
        wanted,
        session.ensure_volume(Step::Update, &live, c),
    );
    let kept = snapshot("kept", 3, &live);
    assert_refused(world, &before, wanted, session.ensure_snapshot(&kept, c));
    assert_refused(world, &before, wanted, session.retire_volume(&live, c));
    assert_refused(world, &before, wanted, session.retire_snapshot(&kept, c));
    let error = assert_refused(world, &before, wanted, session.reclaim(&gone, c));
    assert!(!error.touched);
    assert_refused(world, &before, wanted, session.restore(&gone, c));
    assert_refused(world, &before, wanted, session.flatten(&live, c));
    assert_refused(world, &before, wanted, session.inspect(&live, c));
    // A root that isn't one of the domain's is refused as well.
    let mut stray = world.volume("stray", 4);
    stray.place = place(&world.place.domain, "/nowhere");
    let answer = session.ensure_volume(Step::Create, &stray, c);
    assert_refused(world, &before, ErrorKind::Invalid, answer);
    let identities = session.probe(c).unwrap();
    assert_eq!(
        identities.get(&record.place.root),
        record.place.identity.as_ref()
    );
}

fn imported(world: &World) {
    let mut worker = world.worker();
    let path = world.tools.file(b"bytes of a file", 4096);
    let source = |path: &str| Source::File {
        path: path.to_owned(),
        format: SourceFormat::Raw,
    };
    let record = made_from(world.volume("db-01", 1), source(&path));
    let state = worker.ensure(Step::Import, &record).unwrap();
    assert_eq!((state.size_bytes, state.did), (SIZE, true));
    let record = seen(record, &state);
    worker.assert_bytes(&record, b"bytes of a file");
    assert!(!worker.ensure(Step::Import, &record).unwrap().did);
    let before = world.tools.all();
    let missing = made_from(world.volume("db-02", 2), source(&format!("{path}.not")));
    let answer = worker.ensure(Step::Import, &missing);
    assert_refused(world, &before, ErrorKind::Gone, answer);
    let mut small = made_from(world.volume("db-03", 3), source(&path));
    small.volume_mut().unwrap().size_bytes = 2048;
    let answer = worker.ensure(Step::Import, &small);
    assert_refused(world, &before, ErrorKind::Invalid, answer);
}

fn survey_finds_all(world: &World) {
    let mut worker = world.worker();
    let live = worker.create(world.volume("live", 1));
    let kept = worker.snapshot(snapshot("kept", 2, &live));
    let trashed = worker.create(world.volume("trashed", 3));
    worker.trash(trashed);
    let theirs = world.volume("theirs", 4);
    world.worker_of(world.other.as_ref()).create(theirs);
    world.tools.plant(&world.volume("unmarked", 5));
    let before = world.tools.all();
    let mut found: Vec<_> = worker.session.survey(&Unwatched).unwrap();
    found.sort_by_key(|marked| marked.record.id.uid());
    let shown: Vec<_> = found
        .iter()
        .map(|marked| (marked.record.name.as_str(), marked.known))
        .collect();
    let wanted = [
        ("live", Known::Live),
        ("kept", Known::Live),
        ("trashed", Known::Trashed),
        ("theirs", Known::Live),
    ];
    assert_eq!(shown, wanted);
    assert!(found[0].instance == found[1].instance && found[0].instance != found[3].instance);
    assert_eq!(found[1].record.id, kept.id);
    assert_eq!(found[1].record.image, live.image);
    assert!(found.iter().all(|marked| marked.state.size_bytes == SIZE));
    assert_eq!(world.tools.all(), before);
}
