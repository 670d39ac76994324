//! Requests: what users may wish, and how their wishes are taken up.

use super::{Command, Sched, Ticket};
use crate::model::{Lane, Name, ObjectId, Qos, Record, SourceFormat, Uid};
use std::collections::BTreeMap;

/// What somebody wishes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// A new volume.
    CreateVolume(Box<NewVolume>),
    /// Another size, other limits or labels.
    ChangeVolume {
        /// Which volume.
        name: Name,
        /// Only if it has this uid.
        uid: Option<Uid>,
        /// Only if it has this generation.
        if_generation: Option<u64>,
        /// What shall be different.
        change: VolumeChange,
    },
    /// A new snapshot of a volume.
    CreateSnapshot {
        /// The uid that it gets.
        uid: Uid,
        /// Its name.
        name: Name,
        /// Of which volume.
        volume: Name,
        /// Free text.
        labels: BTreeMap<String, String>,
    },
    /// An object shall go.
    Delete {
        /// Which one.
        object: Named,
        /// Only if it has this uid.
        uid: Option<Uid>,
    },
    /// A failed or waiting object is tried at once.
    Retry {
        /// Which one.
        object: Named,
        /// Only if it has this uid.
        uid: Option<Uid>,
    },
    /// A trash entry becomes a volume again.
    Restore {
        /// Which entry.
        uid: Uid,
        /// The name that it gets; its old one if none.
        name: Option<Name>,
    },
    /// The space of a trash entry is freed now.
    Purge {
        /// Which entry.
        uid: Uid,
    },
}

/// An object as users name it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Named {
    /// A volume that isn't in the trash.
    Volume(Name),
    /// A snapshot.
    Snapshot(Name),
}

impl Named {
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Named::Volume(_) => "volume",
            Named::Snapshot(_) => "snapshot",
        }
    }

    pub(super) fn name(&self) -> &Name {
        match self {
            Named::Volume(name) | Named::Snapshot(name) => name,
        }
    }
}

/// A wished volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewVolume {
    /// The uid that it gets.
    pub uid: Uid,
    /// Its name.
    pub name: Name,
    /// Its size in bytes; the source's if none.
    pub size_bytes: Option<u64>,
    /// Its class; the only one, the source's, or `default` if none.
    pub class: Option<String>,
    /// What it is made from.
    pub source: Option<SourceWish>,
    /// Limits on its I/O.
    pub qos: Option<Qos>,
    /// The key id of its encryption.
    pub encryption: Option<String>,
    /// Free text.
    pub labels: BTreeMap<String, String>,
    /// The request, normalised (JSON).
    pub request: String,
}

/// What a volume is made from, as users name it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceWish {
    /// A snapshot.
    Snapshot(Name),
    /// A volume as it stands.
    Volume(Name),
    /// A file, by absolute path.
    File(String, SourceFormat),
}

/// What shall be different about a volume; `None` stays.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VolumeChange {
    /// The size in bytes.
    pub size_bytes: Option<u64>,
    /// Limits on its I/O; `Some(None)` takes them away.
    pub qos: Option<Option<Qos>>,
    /// Free text, as a whole.
    pub labels: Option<BTreeMap<String, String>>,
}

/// A stored row that an event needs beside it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lookup {
    /// The volume of that name that isn't in the trash.
    Volume(Name),
    /// The snapshot of that name.
    Snapshot(Name),
    /// The volume or trash entry with that uid.
    VolumeUid(Uid),
    /// The volume that has the name which that trash entry had.
    NamesakeOf(Uid),
    /// The volumes that were made from that image or its snapshots.
    ChildrenOf(Uid),
}

/// A wish that was taken up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Accepted {
    /// The object as it stands.
    pub record: Record,
    /// The same wish was taken up before.
    pub known: bool,
}

/// A wish that was not taken up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Decides the status code.
    pub why: Why,
    /// A sentence that names the thing, the cause and the mend.
    pub message: String,
    /// The field of the request that it is about.
    pub field: Option<&'static str>,
    /// The object that stands in the way.
    pub existing: Option<Box<Record>>,
}

/// The kinds of refusal; the words of the API's problem types.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// No such object.
    NotFound,
    /// The name is taken by something else.
    Conflict,
    /// The object or its source is being deleted.
    Deleting,
    /// The trash entry is being reclaimed.
    Reclaiming,
    /// The name belongs to another uid now.
    Uid,
    /// The wish was made for another generation.
    Generation,
    /// Something runs or hangs on it.
    Held,
    /// Volumes only grow.
    Shrink,
    /// The source is in another domain.
    CrossDomain,
    /// The backend can't do that.
    Unsupported,
    /// The request can't be fulfilled as it is.
    Invalid,
    /// Too many volumes.
    Limit,
    /// Too many unmet wishes.
    Backlog,
    /// The daemon ends.
    Draining,
}

impl Request {
    /// Which stored rows it names.
    #[must_use]
    pub fn lookups(&self) -> Vec<Lookup> {
        match self {
            Request::CreateVolume(new) => {
                let mut all = vec![Lookup::Volume(new.name.clone())];
                match &new.source {
                    Some(SourceWish::Snapshot(name)) => all.push(Lookup::Snapshot(name.clone())),
                    Some(SourceWish::Volume(name)) => all.push(Lookup::Volume(name.clone())),
                    Some(SourceWish::File(..)) | None => {}
                }
                all
            }
            Request::ChangeVolume { name, .. } => vec![Lookup::Volume(name.clone())],
            Request::CreateSnapshot { name, volume, .. } => {
                vec![
                    Lookup::Snapshot(name.clone()),
                    Lookup::Volume(volume.clone()),
                ]
            }
            Request::Delete { object, .. } | Request::Retry { object, .. } => match object {
                Named::Volume(name) => vec![Lookup::Volume(name.clone())],
                Named::Snapshot(name) => vec![Lookup::Snapshot(name.clone())],
            },
            Request::Restore { uid, name } => {
                let wanted = name
                    .clone()
                    .map_or(Lookup::NamesakeOf(*uid), Lookup::Volume);
                vec![Lookup::VolumeUid(*uid), wanted]
            }
            Request::Purge { uid } => vec![Lookup::VolumeUid(*uid)],
        }
    }
}

pub(super) type Answer = Result<Accepted, Refusal>;
pub(super) fn refuse(why: Why, message: String) -> Refusal {
    Refusal {
        why,
        message,
        field: None,
        existing: None,
    }
}

pub(super) fn bad_field(why: Why, field: &'static str, message: String) -> Refusal {
    Refusal {
        field: Some(field),
        ..refuse(why, message)
    }
}

pub(super) fn not_found(kind: &str, name: &Name) -> Refusal {
    refuse(Why::NotFound, format!("there is no {kind} {name}"))
}

pub(super) fn deleting(there: Record) -> Refusal {
    let words = format!(
        "{} is still being deleted; try again when it is gone",
        there.title()
    );
    Refusal {
        existing: Some(Box::new(there)),
        ..bad_field(Why::Deleting, "name", words)
    }
}

pub(super) fn conflict(there: Record) -> Refusal {
    let words = format!("{} is there already and differs", there.title());
    Refusal {
        existing: Some(Box::new(there)),
        ..bad_field(Why::Conflict, "name", words)
    }
}

impl Sched {
    pub(super) fn request(&mut self, ticket: Ticket, request: Request, rows: &[Record]) {
        let answer = if self.draining {
            let words = "volward is shutting down; send this again once it is back";
            Err(refuse(Why::Draining, words.to_owned()))
        } else {
            match request {
                Request::CreateVolume(new) => self.create_volume(*new, rows),
                Request::ChangeVolume {
                    name,
                    uid,
                    if_generation,
                    change,
                } => self.change_volume(&name, uid, if_generation, change, rows),
                Request::CreateSnapshot {
                    uid,
                    name,
                    volume,
                    labels,
                } => self.create_snapshot(uid, name, &volume, labels, rows),
                Request::Delete { object, uid } => self.delete(&object, uid, rows),
                Request::Retry { object, uid } => self.retry(&object, uid, rows),
                Request::Restore { uid, name } => self.restore(uid, name, rows),
                Request::Purge { uid } => self.purge(uid, rows),
            }
        };
        self.out.push(Command::Reply {
            ticket,
            answer: Box::new(answer),
        });
    }

    /// The object of that name: memory knows better than the rows.
    pub(super) fn find(&self, kind: &'static str, name: &Name, rows: &[Record]) -> Option<Record> {
        if let Some(object) = self.table.named(kind, name) {
            return Some(object.record.clone());
        }
        let row = rows
            .iter()
            .find(|row| row.id.kind() == kind && row.name == *name && !row.phase.is_trash())?;
        // It is in memory under another name or in the trash: the row is not of today.
        self.table.get(row.id).is_none().then(|| row.clone())
    }

    pub(super) fn find_trash(&self, uid: Uid, rows: &[Record]) -> Result<Record, Refusal> {
        let id = ObjectId::Volume(uid);
        let row = || rows.iter().find(|row| row.id == id).cloned();
        self.table
            .get(id)
            .map(|object| object.record.clone())
            .or_else(row)
            .filter(|record| record.phase.is_trash())
            .ok_or_else(|| {
                let words = format!(
                    "trash/{uid} is not there: it was restored or reclaimed, or never was; \
                     GET /v1/trash lists what is"
                );
                refuse(Why::NotFound, words)
            })
    }

    pub(super) fn find_named(
        &self,
        object: &Named,
        uid: Option<Uid>,
        rows: &[Record],
    ) -> Result<Record, Refusal> {
        let (kind, name) = (object.kind(), object.name());
        let record = self
            .find(kind, name, rows)
            .ok_or_else(|| not_found(kind, name))?;
        match uid {
            Some(uid) if uid != record.id.uid() => {
                let words = format!(
                    "{kind}/{name} has uid {} now, not {uid}: the one you mean is gone",
                    record.id.uid()
                );
                Err(Refusal {
                    existing: Some(Box::new(record)),
                    ..refuse(Why::Uid, words)
                })
            }
            _ => Ok(record),
        }
    }

    pub(super) fn accepted(&self, id: ObjectId, known: bool) -> Answer {
        match self.table.get(id) {
            Some(object) => Ok(Accepted {
                record: object.record.clone(),
                known,
            }),
            None => Err(refuse(Why::NotFound, format!("{} is gone", id.uid()))),
        }
    }

    pub(super) fn check_backlog(&self, domain: &str, lane: Lane) -> Result<(), Refusal> {
        let waiting = self.table.backlog(domain, lane);
        if waiting < self.policy.backlog {
            return Ok(());
        }
        let words = format!(
            "the {} backlog of domain {domain} is full: {waiting} wishes wait; send this again \
             later, or raise limits.backlog",
            lane.as_str()
        );
        Err(refuse(Why::Backlog, words))
    }
}
