//! What is to be done next for an object: one pure function of what is known of it.

use super::table::Object;
use crate::model::{Known, Lane, ObjectId, Phase, Record, Source, Step, Wish};

/// What brings an object closer to its wish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Nothing, now: all is as wished, or it was given up, or something else comes first.
    Nothing,
    /// Nothing was ever made of it, and nothing shall be: its record can go.
    Vanish,
    /// This step.
    Step(Step),
}

/// Which queue of a pool a step waits in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Goes as soon as a worker is free.
    Plain,
    /// Needs room: waits while the domain has none.
    Space,
    /// Never takes the last free worker.
    Background,
}

impl Class {
    pub fn of(step: Step) -> Class {
        match step {
            Step::Create | Step::Import | Step::Update | Step::Encrypt | Step::Snapshot => {
                Class::Space
            }
            Step::Flatten | Step::Reclaim => Class::Background,
            Step::Restore
            | Step::Inspect
            | Step::Trash
            | Step::RemoveSnapshot
            | Step::Probe
            | Step::Connect => Class::Plain,
        }
    }
}

/// What is next for that object, whether it runs already or not.
pub fn next(object: &Object) -> Work {
    let record = &object.record;
    if matches!(record.phase, Phase::Failed | Phase::Gone) {
        return Work::Nothing;
    }
    // A source that somebody was promised a copy of is made first, and deleted afterwards.
    // One that is in the trash already isn't: its dependents came too late.
    let promised = object.pinned && !record.phase.is_trash();
    let wish = if promised && !is_live(record) {
        Wish::Present
    } else {
        record.wish
    };
    match (wish, record.id) {
        (Wish::Present, ObjectId::Volume(_)) => volume_present(record),
        (Wish::Present, ObjectId::Snapshot(_)) => snapshot_present(record),
        (Wish::Absent, _) if promised => Work::Nothing,
        (Wish::Absent, ObjectId::Volume(_)) => volume_absent(object),
        (Wish::Absent, ObjectId::Snapshot(_)) => snapshot_absent(record),
    }
}

/// The pool that the object's next step belongs to.
pub fn lane(object: &Object, step: Step) -> Lane {
    match step {
        Step::Create
        | Step::Import
        | Step::Update
        | Step::Encrypt
        | Step::Snapshot
        | Step::Restore => Lane::Create,
        Step::Trash | Step::RemoveSnapshot | Step::Flatten | Step::Reclaim => Lane::Delete,
        // A look goes where the step goes that it precedes.
        Step::Inspect | Step::Probe | Step::Connect => {
            if object.pinned {
                Lane::Create
            } else {
                object.record.lane()
            }
        }
    }
}

/// Whether it was seen, complete and in its place.
pub fn is_live(record: &Record) -> bool {
    record.known == Known::Live
}

/// Whether it still needs its source: then the source may not go.
pub fn needs_source(record: &Record) -> Option<ObjectId> {
    let waits = record.wish == Wish::Present
        && !matches!(record.phase, Phase::Failed | Phase::Gone)
        && matches!(record.known, Known::Nothing | Known::Free);
    match record.id {
        _ if !waits => None,
        ObjectId::Volume(_) => record.source().and_then(Source::object),
        ObjectId::Snapshot(_) => Some(ObjectId::Volume(record.image)),
    }
}

/// Whether its LUKS2 format is still to be made.
pub fn needs_encrypt(record: &Record) -> bool {
    record
        .volume()
        .is_some_and(|volume| volume.encryption.is_some() && !volume.encrypted)
}

fn volume_present(record: &Record) -> Work {
    let flatten = record.volume().is_some_and(|volume| volume.flatten);
    let import = matches!(record.source(), Some(Source::File { .. }));
    Work::Step(match record.known {
        // The first look, committed before the first create: what is unmarked under our name
        // afterwards is our own remnant.
        Known::Nothing => Step::Inspect,
        _ if record.look => Step::Inspect,
        Known::Free if import => Step::Import,
        Known::Free => Step::Create,
        Known::Trashed | Known::Carrier => Step::Restore,
        Known::Live if needs_encrypt(record) => Step::Encrypt,
        Known::Live
            if record.observed_generation < record.generation || record.phase != Phase::Ready =>
        {
            Step::Update
        }
        Known::Live if flatten => Step::Flatten,
        Known::Live => return Work::Nothing,
    })
}

fn volume_absent(object: &Object) -> Work {
    let record = &object.record;
    match (record.phase, record.known) {
        (Phase::Reclaiming, _) => Work::Step(Step::Reclaim),
        (Phase::Trashed, Known::Carrier) if object.recheck => Work::Step(Step::Trash),
        (Phase::Trashed, Known::Carrier) => Work::Nothing,
        (Phase::Trashed, _) => Work::Step(Step::Reclaim),
        (_, Known::Nothing) => Work::Vanish,
        // Free says that the name was free once; half of an image may be there by now.
        _ => Work::Step(Step::Trash),
    }
}

fn snapshot_present(record: &Record) -> Work {
    match record.known {
        _ if record.look => Work::Step(Step::Inspect),
        Known::Live if record.phase == Phase::Ready => Work::Nothing,
        _ => Work::Step(Step::Snapshot),
    }
}

fn snapshot_absent(record: &Record) -> Work {
    match record.known {
        Known::Nothing if !record.look => Work::Vanish,
        _ => Work::Step(Step::RemoveSnapshot),
    }
}
