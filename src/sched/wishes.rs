//! Wishes for objects that are there: another size, deletion, retry, restore, purge.

use super::Sched;
use super::request::{Accepted, Answer, Named, Refusal, VolumeChange, Why};
use super::request::{bad_field, conflict, deleting, refuse};
use crate::model::{ErrorKind, Known, Lane, Millis, Name, ObjectId, Phase, Record, Uid, Wish};

impl Sched {
    pub(super) fn change_volume(
        &mut self,
        name: &Name,
        uid: Option<Uid>,
        if_generation: Option<u64>,
        change: VolumeChange,
        rows: &[Record],
    ) -> Answer {
        let record = self.find_named(&Named::Volume(name.clone()), uid, rows)?;
        if record.wish == Wish::Absent {
            return Err(deleting(record));
        }
        if let Some(generation) = if_generation
            && generation != record.generation
        {
            let words = format!(
                "volume/{name} has generation {} now, not {generation}; look at it again",
                record.generation
            );
            return Err(Refusal {
                existing: Some(Box::new(record)),
                ..bad_field(Why::Generation, "if_generation", words)
            });
        }
        let body = record
            .volume()
            .cloned()
            .unwrap_or_else(|| unreachable!("a volume has a body"));
        let size_bytes = match change.size_bytes {
            Some(wished) if wished < body.size_bytes => {
                let words = format!(
                    "volume/{name} has {} bytes and {wished} were asked for; volumes only grow",
                    body.size_bytes
                );
                return Err(bad_field(Why::Shrink, "size", words));
            }
            Some(wished) => self.check_size(wished)?,
            None => body.size_bytes,
        };
        let qos = change.qos.unwrap_or(body.qos);
        if qos.is_some() && !self.policy.caps.qos {
            let words = "this backend can't limit the I/O of a volume; leave qos out".to_owned();
            return Err(bad_field(Why::Unsupported, "qos", words));
        }
        let labels = change.labels.unwrap_or_else(|| record.labels.clone());
        let id = record.id;
        if (size_bytes, &qos, &labels) == (body.size_bytes, &body.qos, &record.labels) {
            return Ok(Accepted {
                record,
                known: true,
            });
        }
        if record.is_settled() {
            self.check_backlog(&record.place.domain, Lane::Create)?;
        }
        self.table.attach(record);
        self.table.change(id, |record, now| {
            if let Some(volume) = record.volume_mut() {
                volume.size_bytes = size_bytes;
                volume.qos = qos;
            }
            record.labels = labels;
            new_wish(record, now);
            resume(record, now);
        });
        self.wished(id);
        self.accepted(id, false)
    }

    pub(super) fn delete(&mut self, object: &Named, uid: Option<Uid>, rows: &[Record]) -> Answer {
        let record = self.find_named(object, uid, rows)?;
        let id = record.id;
        if record.wish == Wish::Absent && record.phase != Phase::Failed {
            return Ok(Accepted {
                record,
                known: true,
            });
        }
        self.table.attach(record);
        self.table.change(id, |record, now| {
            record.wish = Wish::Absent;
            record.deletion_requested_at.get_or_insert(now);
            new_wish(record, now);
            record.move_to(Phase::Deleting, now);
            if let Some(volume) = record.volume_mut() {
                volume.flatten = false;
            }
        });
        self.wished(id);
        self.accepted(id, false)
    }

    pub(super) fn retry(&mut self, object: &Named, uid: Option<Uid>, rows: &[Record]) -> Answer {
        let record = self.find_named(object, uid, rows)?;
        let id = record.id;
        let (kind, name) = (object.kind(), object.name());
        if let Some(run) = self.table.get(id).and_then(|object| object.run.as_ref())
            && !run.step.is_background()
        {
            let (step, attempt) = (run.step.as_str(), run.attempt);
            let words = match run.held_since {
                Some(_) => format!(
                    "{kind}/{name} is held: its {step} (attempt {attempt}) hangs in the storage \
                     library and may still act; it goes on by itself when that returns"
                ),
                None => format!("{kind}/{name} is running {step} (attempt {attempt}) right now"),
            };
            return Err(Refusal {
                existing: Some(Box::new(record)),
                ..refuse(Why::Held, words)
            });
        }
        if record.phase == Phase::Ready && record.observed_generation == record.generation {
            return Ok(Accepted {
                record,
                known: true,
            });
        }
        self.table.attach(record);
        self.table.change(id, |record, now| {
            record.wished_at = now;
            afresh(record);
            resume(record, now);
        });
        self.wished(id);
        self.accepted(id, false)
    }

    pub(super) fn restore(&mut self, uid: Uid, name: Option<Name>, rows: &[Record]) -> Answer {
        let record = self.find_trash(uid, rows)?;
        let id = record.id;
        if record.phase == Phase::Reclaiming {
            let words = format!("trash/{uid} is being reclaimed: it isn't whole any more");
            return Err(refuse(Why::Reclaiming, words));
        }
        let name = name.unwrap_or_else(|| record.name.clone());
        if let Some(there) = self.find("volume", &name, rows) {
            return Err(conflict(there));
        }
        self.check_backlog(&record.place.domain, Lane::Create)?;
        self.table.attach(record);
        self.table.change(id, |record, now| {
            record.wish = Wish::Present;
            record.name = name;
            record.deletion_requested_at = None;
            new_wish(record, now);
            record.move_to(Phase::Creating, now);
        });
        self.wished(id);
        self.accepted(id, false)
    }

    pub(super) fn purge(&mut self, uid: Uid, rows: &[Record]) -> Answer {
        let record = self.find_trash(uid, rows)?;
        let id = record.id;
        self.table.attach(record);
        self.table.change(id, |record, now| {
            record.next_attempt_at = None;
            if let Some(volume) = record.volume_mut() {
                volume.reclaim_after = Some(now);
            }
        });
        self.table.touch(id, |object| object.wait_until = None);
        self.accepted(id, false)
    }

    /// A wish was uttered: nothing keeps the object waiting for its time, and what runs on it in
    /// the background, or for the sake of the last wish, shall end.
    pub(super) fn wished(&mut self, id: ObjectId) {
        self.table.touch(id, |object| object.wait_until = None);
        let Some(object) = self.table.get(id) else {
            return;
        };
        let outdated = object.record.wish == Wish::Absent;
        if object
            .run
            .as_ref()
            .is_some_and(|run| run.step.is_background() || outdated)
        {
            self.cancel(id);
        }
    }
}

/// Another wish: counts start again.
fn new_wish(record: &mut Record, now: Millis) {
    record.generation += 1;
    record.wished_at = now;
    afresh(record);
}

fn afresh(record: &mut Record) {
    record.attempts = 0;
    record.hangs = 0;
    record.waits = 0;
    record.next_attempt_at = None;
    record.reason = None::<ErrorKind>;
    record.message = None;
}

/// A failed object goes on from where it stands.
pub fn resume(record: &mut Record, now: Millis) {
    if record.phase != Phase::Failed {
        return;
    }
    let phase = match record.wish {
        Wish::Absent => Phase::Deleting,
        Wish::Present if record.known == Known::Live && record.observed_generation > 0 => {
            Phase::Updating
        }
        Wish::Present => Phase::Creating,
    };
    record.move_to(phase, now);
}
