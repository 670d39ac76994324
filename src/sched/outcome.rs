//! Results: what a finished attempt, a late one included, says of its object.

use super::table::{Run, WaitKey};
use super::{Lookup, Sched, work};
use crate::backend::{Error, Found, Outcome, Reclaimed, Retired, SnapshotState, VolumeState};
use crate::model::{ErrorKind, Known, Millis, ObjectId, Phase, Record, Source, Step, Wish};

/// Which stored rows a result needs beside it: the children that block a reclaim.
pub fn lookups(object: ObjectId, result: &Result<Outcome, Error>) -> Vec<Lookup> {
    match result {
        Ok(Outcome::Reclaimed(Reclaimed::Blocked { .. })) => vec![Lookup::ChildrenOf(object.uid())],
        _ => Vec::new(),
    }
}

impl Sched {
    /// An attempt ended. `late`: its thread had been abandoned.
    pub(super) fn finished(
        &mut self,
        attempt: u64,
        id: ObjectId,
        result: Result<Outcome, Error>,
        rows: &[Record],
        late: bool,
    ) {
        // The result of another attempt than the one that owns the object is of no consequence.
        let Some(run) = self.table.get(id).and_then(|object| object.run.clone()) else {
            return;
        };
        if run.attempt != attempt || run.held_since.is_some() != late {
            return;
        }
        self.table.touch(id, |object| object.run = None);
        self.table.wake(WaitKey::Image(run.key));
        run.shared
            .into_iter()
            .for_each(|image| self.table.wake(WaitKey::Image(image)));
        if run.step == Step::Encrypt {
            self.table.wake(WaitKey::Encrypt);
        }
        if late {
            let words = match &result {
                Ok(_) => "the call that hung has returned: it had worked".to_owned(),
                Err(error) => format!("the call that hung has returned: {error}"),
            };
            self.log_object(id, false, "LateReturn", words);
        }
        self.answered(&run, id, result.as_ref().err());
        let before = self.table.get(id).map(|object| footprint(&object.record));
        match result {
            Ok(outcome) => self.succeeded(id, &run, outcome, rows),
            Err(error) => self.failed(id, &run, error, late),
        }
        if self.table.get(id).map(|object| footprint(&object.record)) != before {
            self.table.touch(id, |object| object.spins = 0);
        }
    }

    fn succeeded(&mut self, id: ObjectId, run: &Run, outcome: Outcome, rows: &[Record]) {
        // What came back late may say that a given up object is well after all.
        self.table.change(id, |record, now| {
            super::wishes::resume(record, now);
            record.next_attempt_at = None;
            // A look brings nothing about: what failed before it counts on.
            if matches!(outcome, Outcome::Found(_)) {
                return;
            }
            record.attempts = 0;
            record.hangs = 0;
            if !matches!(outcome, Outcome::Reclaimed(Reclaimed::Blocked { .. })) {
                record.waits = 0;
            }
            record.reason = None;
            record.message = None;
        });
        match outcome {
            Outcome::Volume(state) => self.volume_seen(id, run, state),
            Outcome::Snapshot(state) => self.snapshot_seen(id, run.generation, &state),
            Outcome::Retired(retired) => self.retired(id, run, retired),
            Outcome::Reclaimed(Reclaimed::Done) => {
                self.log_object(id, false, "Reclaimed", "its space is free again".to_owned());
                self.gone(id);
            }
            Outcome::Reclaimed(Reclaimed::Blocked { by }) => self.blocked(id, by, rows),
            Outcome::Found(found) => self.looked(id, run, found),
        }
    }

    fn volume_seen(&mut self, id: ObjectId, run: &Run, state: VolumeState) {
        let step = run.step;
        let generation = run.generation;
        let mut news = None;
        self.table.change(id, |record, now| {
            absorb(record, state);
            if step == Step::Flatten {
                if let Some(volume) = record.volume_mut() {
                    volume.flatten = false;
                    volume.depth = 0;
                }
                return;
            }
            record.known = Known::Live;
            record.look = false;
            // A format or a restore brings about nothing else of the wish; an update follows.
            if !matches!(step, Step::Encrypt | Step::Restore) {
                record.observed_generation = record.observed_generation.max(generation);
            }
            let done = record.wish == Wish::Present
                && record.observed_generation > 0
                && step != Step::Restore
                && !work::needs_encrypt(record);
            if done && record.phase != Phase::Ready {
                news = Some(if record.phase == Phase::Updating {
                    "Updated"
                } else {
                    "Ready"
                });
                record.move_to(Phase::Ready, now);
            }
        });
        let volume = self.table.get(id).and_then(|object| object.record.volume());
        let words = volume
            .map(|volume| {
                let size = volume.seen_size_bytes.unwrap_or(0);
                let handle = volume.handle.as_deref().unwrap_or("");
                format!("{size} bytes, {handle}")
            })
            .unwrap_or_default();
        match (news, step) {
            (Some(reason), _) => self.log_object(id, false, reason, words),
            (None, Step::Flatten) => {
                let words = "it no longer depends on a parent".to_owned();
                self.log_object(id, false, "Flattened", words);
                self.parent_may_go(id);
            }
            (None, _) => {}
        }
    }

    fn snapshot_seen(&mut self, id: ObjectId, generation: u64, state: &SnapshotState) {
        let mut news = false;
        self.table.change(id, |record, now| {
            record.known = Known::Live;
            record.look = false;
            record.observed_generation = record.observed_generation.max(generation);
            remember_identity(record, state.identity.as_deref());
            if let crate::model::Body::Snapshot(snapshot) = &mut record.body {
                snapshot.size_bytes = Some(state.size_bytes);
            }
            if record.wish == Wish::Present && record.phase != Phase::Ready {
                record.move_to(Phase::Ready, now);
                news = true;
            }
        });
        if news {
            self.log_object(id, false, "Ready", format!("{} bytes", state.size_bytes));
        }
    }

    fn retired(&mut self, id: ObjectId, run: &Run, retired: Retired) {
        let ObjectId::Volume(_) = id else {
            self.log_object(id, false, "Deleted", "the snapshot is gone".to_owned());
            return self.gone(id);
        };
        let short = self.is_short_of_space(&run.domain);
        let keep = if short { 0 } else { self.policy.trash_keep_ms };
        let words = match &retired {
            Retired::Trashed { .. } => "it is out of sight, its space is freed later".to_owned(),
            Retired::Carrier { snapshots } => {
                format!(
                    "it is out of sight; its image stays for {}",
                    snapshots.join(", ")
                )
            }
            Retired::Gone => "nothing of it is there".to_owned(),
        };
        let first = self
            .table
            .get(id)
            .is_some_and(|o| o.record.phase == Phase::Deleting);
        if first {
            self.log_object(id, false, "Deleted", words);
        }
        let (known, image_id, by) = match retired {
            Retired::Gone => return self.gone(id),
            Retired::Trashed { image_id } => (Known::Trashed, image_id, Vec::new()),
            Retired::Carrier { snapshots } => (Known::Carrier, None, snapshots),
        };
        let mut due = None;
        self.table.change(id, |record, now| {
            record.known = known;
            record.look = false;
            record.observed_generation = record.observed_generation.max(run.generation);
            // It may have been asked back meanwhile: then it is restored at once.
            let kept = record.wish == Wish::Absent;
            if kept {
                record.move_to(Phase::Trashed, now);
            }
            if let Some(volume) = record.volume_mut() {
                volume.image_id = image_id.or(volume.image_id.take());
                volume.trashed_at.get_or_insert(now);
                let after = *volume.reclaim_after.get_or_insert(now.plus(keep));
                volume.blocked_by = by;
                due = (kept && known == Known::Trashed).then_some(after);
            }
        });
        self.table.touch(id, |object| {
            object.wait_until = due;
            object.recheck = false;
        });
    }

    /// A reclaim that can't go on as long as others need the image.
    fn blocked(&mut self, id: ObjectId, by: Vec<String>, rows: &[Record]) {
        let depends = |row: &Record| {
            row.phase == Phase::Ready && row.volume().is_some_and(|volume| volume.depth > 0)
        };
        for row in rows
            .iter()
            .filter(|row| self.policy.trash_flatten && depends(row))
        {
            self.table.attach(row.clone());
            self.table.change(row.id, |record, _| {
                let still = record.wish == Wish::Present;
                if let Some(volume) = record.volume_mut().filter(|_| still) {
                    volume.flatten = true;
                }
            });
        }
        let news = format!("it can't be reclaimed yet: {} still need it", by.join(", "));
        let error = Error::new(ErrorKind::Blocked, "reclaim", news)
            .held_by(by)
            .untouched();
        // That answer says that the image is whole.
        self.table.change(id, super::trouble::back_to_trash);
        self.wait_for_users(id, &error);
    }

    fn looked(&mut self, id: ObjectId, run: &Run, found: Option<Found>) {
        let Some(record) = self.table.get(id).map(|object| object.record.clone()) else {
            return;
        };
        let name = record.title();
        match found {
            None => match record.known {
                Known::Nothing | Known::Free => self.table.change(id, |record, _| {
                    record.known = Known::Free;
                    record.look = false;
                }),
                Known::Live | Known::Carrier | Known::Trashed => {
                    let words = format!(
                        "the image of {name} is gone from the backend: nothing of it is in its \
                         place nor in the trash; delete {name}, or bring the image back and retry"
                    );
                    self.give_up(id, ErrorKind::Gone, words);
                }
            },
            Some(Found::Volume(state)) => self.table.change(id, |record, _| {
                absorb(record, state);
                record.look = false;
                record.known = Known::Live;
                if let Some(volume) = record.volume_mut() {
                    untrash(volume);
                }
            }),
            Some(Found::Snapshot(state)) => self.snapshot_seen(id, run.generation, &state),
            Some(Found::Half) => match record.known {
                Known::Nothing | Known::Free => self.table.change(id, |record, _| {
                    record.known = Known::Free;
                    record.look = false;
                }),
                Known::Live | Known::Carrier | Known::Trashed => {
                    let words = format!("the image of {name} was whole and is not any more");
                    self.give_up(id, ErrorKind::Gone, words);
                }
            },
            Some(Found::Trashed { image_id, whole }) => {
                self.table.change(id, |record, _| {
                    record.known = Known::Trashed;
                    record.look = false;
                    if let Some(volume) = record.volume_mut() {
                        volume.image_id = image_id.or(volume.image_id.take());
                    }
                });
                if !whole && record.wish == Wish::Present {
                    let words = format!("the image of {name} was partly removed");
                    self.give_up(id, ErrorKind::Gone, words);
                }
            }
            // A committed look had found the name free: this is what our own create left.
            Some(Found::Unmarked) if record.known == Known::Free => {
                self.table.change(id, |record, _| record.look = false);
            }
            Some(Found::Unmarked) => {
                let words = format!(
                    "an image without a mark has the name that {name} would get; volward doesn't \
                     touch it: remove or rename it, then retry"
                );
                self.give_up(id, ErrorKind::AlreadyExists, words);
            }
            Some(Found::Foreign(whose)) => {
                let words = format!("the image of {name} belongs to {whose}; it is left alone");
                self.give_up(id, ErrorKind::AlreadyExists, words);
            }
        }
    }

    /// Nothing of the object is left on the backend.
    pub(super) fn gone(&mut self, id: ObjectId) {
        let Some(object) = self.table.get(id) else {
            return;
        };
        let image = object.record.image;
        let phase = object.record.phase;
        assert!(
            phase.may_move_to(Phase::Gone),
            "{id:?}: no move from {phase:?} to Gone"
        );
        self.parent_may_go(id);
        self.table.remove(id);
        if let ObjectId::Snapshot(_) = id {
            // Its carrier may have become free of snapshots.
            self.table.touch(ObjectId::Volume(image), |object| {
                object.recheck = object.record.known == Known::Carrier;
            });
        }
    }

    /// A child of an image in the trash went, or needs it no more: the image goes at once.
    fn parent_may_go(&mut self, child: ObjectId) {
        let parent = self
            .table
            .get(child)
            .and_then(|object| object.record.source())
            .and_then(Source::image)
            .map(ObjectId::Volume);
        let Some(parent) = parent else { return };
        let waits = |record: &Record| {
            record.phase == Phase::Trashed
                && matches!(record.reason, Some(ErrorKind::Blocked | ErrorKind::InUse))
        };
        if self
            .table
            .get(parent)
            .is_some_and(|object| waits(&object.record))
        {
            self.table
                .change(parent, |record, _| record.next_attempt_at = None);
            self.table.touch(parent, |object| object.wait_until = None);
        }
    }
}

/// What a repeated dispatch must change, or it is a hot loop.
fn footprint(record: &Record) -> (Phase, Known, bool, u64, u32, u32) {
    let Record {
        phase,
        known,
        look,
        observed_generation,
        attempts,
        waits,
        ..
    } = record;
    (
        *phase,
        *known,
        *look,
        *observed_generation,
        *attempts,
        *waits,
    )
}

fn remember_identity(record: &mut Record, identity: Option<&str>) {
    if record.place.identity.is_none() {
        record.place.identity = identity.map(str::to_owned);
    }
}

fn untrash(volume: &mut crate::model::VolumeBody) {
    volume.trashed_at = None::<Millis>;
    volume.reclaim_after = None;
    volume.blocked_by = Vec::new();
}

/// Takes over what the backend says of a volume in its place.
fn absorb(record: &mut Record, state: VolumeState) {
    remember_identity(record, state.identity.as_deref());
    let Some(volume) = record.volume_mut() else {
        return;
    };
    untrash(volume);
    volume.seen_size_bytes = Some(state.size_bytes);
    volume.used_bytes = state.used_bytes;
    volume.handle = Some(state.handle);
    volume.wwn = state.wwn.or(volume.wwn.take());
    volume.image_id = state.image_id.or(volume.image_id.take());
    volume.encrypted |= state.encrypted;
    // A file says by itself how long it is.
    if volume.size_bytes == 0 {
        volume.size_bytes = state.size_bytes;
    }
    if !state.has_parent {
        volume.depth = 0;
        volume.flatten = false;
    }
}
