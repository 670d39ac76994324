//! Requests: what users may wish, and what is refused before anything is stored.

use super::{Command, Sched, Ticket, work};
use crate::model::{
    Body, ErrorKind, Known, Lane, Millis, Name, ObjectId, Phase, Place, Qos, Record, SnapshotBody,
    Source, SourceFormat, Uid, VolumeBody, Wish,
};
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
    fn kind(&self) -> &'static str {
        match self {
            Named::Volume(_) => "volume",
            Named::Snapshot(_) => "snapshot",
        }
    }

    fn name(&self) -> &Name {
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
                let mut all = vec![Lookup::VolumeUid(*uid)];
                all.extend(name.clone().map(Lookup::Volume));
                all
            }
            Request::Purge { uid } => vec![Lookup::VolumeUid(*uid)],
        }
    }
}

type Answer = Result<Accepted, Refusal>;

fn refuse(why: Why, message: String) -> Refusal {
    Refusal {
        why,
        message,
        field: None,
        existing: None,
    }
}

fn bad_field(why: Why, field: &'static str, message: String) -> Refusal {
    Refusal {
        field: Some(field),
        ..refuse(why, message)
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
        self.out.push(Command::Reply { ticket, answer });
    }

    /// The object of that name: memory knows better than the rows.
    fn find(&self, kind: &'static str, name: &Name, rows: &[Record]) -> Option<Record> {
        if let Some(object) = self.table.named(kind, name) {
            return Some(object.record.clone());
        }
        let row = rows
            .iter()
            .find(|row| row.id.kind() == kind && row.name == *name && !row.phase.is_trash())?;
        // It is in memory under another name or in the trash: the row is not of today.
        self.table.get(row.id).is_none().then(|| row.clone())
    }

    fn find_trash(&self, uid: Uid, rows: &[Record]) -> Result<Record, Refusal> {
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

    fn find_named(
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

    fn accepted(&self, id: ObjectId, known: bool) -> Answer {
        match self.table.get(id) {
            Some(object) => Ok(Accepted {
                record: object.record.clone(),
                known,
            }),
            None => Err(refuse(Why::NotFound, format!("{} is gone", id.uid()))),
        }
    }

    fn check_backlog(&self, domain: &str, lane: Lane) -> Result<(), Refusal> {
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

    fn create_volume(&mut self, new: NewVolume, rows: &[Record]) -> Answer {
        if let Some(there) = self.find("volume", &new.name, rows) {
            return same_or_conflict(there, &new.request);
        }
        let (source, from) = self.resolve_source(new.source.as_ref(), rows)?;
        let place = self.place(new.class.as_deref(), from.as_ref())?;
        self.check_able(&new)?;
        let size_bytes = self.size_of_new(&new, from.as_ref())?;
        let depth = self.depth_of_new(from.as_ref())?;
        if self.table.volumes() >= self.policy.max_volumes {
            let words = format!(
                "there are {} volumes, trash included, and limits.max_volumes allows {}; purge \
                 the trash or raise the limit",
                self.table.volumes(),
                self.policy.max_volumes
            );
            return Err(refuse(Why::Limit, words));
        }
        self.check_backlog(&place.domain, Lane::Create)?;
        let body = VolumeBody {
            size_bytes,
            source,
            qos: new.qos,
            encryption: new.encryption,
            encrypted: false,
            request: new.request,
            seen_size_bytes: None,
            used_bytes: None,
            handle: None,
            wwn: None,
            image_id: None,
            depth,
            trashed_at: None,
            reclaim_after: None,
            blocked_by: Vec::new(),
            flatten: depth > self.policy.clone_depth && self.policy.caps.chains,
        };
        let id = ObjectId::Volume(new.uid);
        let mut record = blank(id, new.name, place, Body::Volume(Box::new(body)), self.now);
        record.labels = new.labels;
        self.table.insert(record);
        self.accepted(id, false)
    }

    fn resolve_source(
        &self,
        wish: Option<&SourceWish>,
        rows: &[Record],
    ) -> Result<(Option<Source>, Option<Record>), Refusal> {
        let (kind, name) = match wish {
            None => return Ok((None, None)),
            Some(SourceWish::File(path, format)) => {
                self.check_file(path, *format)?;
                return Ok((
                    Some(Source::File {
                        path: path.clone(),
                        format: *format,
                    }),
                    None,
                ));
            }
            Some(SourceWish::Snapshot(name)) => ("snapshot", name),
            Some(SourceWish::Volume(name)) => ("volume", name),
        };
        let from = self.find(kind, name, rows).ok_or_else(|| {
            bad_field(
                Why::Invalid,
                "source",
                format!("there is no {kind} {name} to copy"),
            )
        })?;
        if from.wish == Wish::Absent {
            let words = format!("{kind}/{name} is being deleted and can't be a source");
            return Err(bad_field(Why::Deleting, "source", words));
        }
        if from.phase == Phase::Failed && !work::is_live(&from) {
            let words = format!(
                "{kind}/{name} failed and can't be a source ({}); retry or delete it",
                from.message.as_deref().unwrap_or("no reason is known")
            );
            return Err(bad_field(Why::Invalid, "source", words));
        }
        let encrypted = from
            .volume()
            .is_some_and(|volume| volume.encryption.is_some());
        if encrypted {
            let words = format!("{kind}/{name} is encrypted; copies of those are not supported");
            return Err(bad_field(Why::Unsupported, "source", words));
        }
        let (name, place, uid) = (from.name.clone(), from.place.clone(), from.id.uid());
        let born = from.born.clone();
        let source = match from.id {
            ObjectId::Volume(_) => Source::Volume {
                name,
                uid,
                born,
                place,
            },
            ObjectId::Snapshot(_) => Source::Snapshot {
                name,
                uid,
                image: from.image,
                image_born: born,
                place,
            },
        };
        Ok((Some(source), Some(from)))
    }

    fn check_file(&self, path: &str, format: SourceFormat) -> Result<(), Refusal> {
        let caps = &self.policy.caps;
        let able = match format {
            SourceFormat::Raw => caps.import_raw,
            SourceFormat::Qcow2 => caps.import_qcow2,
        };
        if !able {
            let words = format!("this backend can't import {format:?} files").to_lowercase();
            return Err(bad_field(Why::Unsupported, "source", words));
        }
        let clean = path.starts_with('/')
            && !path.contains('\0')
            && path
                .split('/')
                .skip(1)
                .all(|part| !matches!(part, "" | "." | ".."));
        let below = |dir: &String| {
            path.strip_prefix(dir.trim_end_matches('/'))
                .is_some_and(|rest| rest.starts_with('/'))
        };
        if clean && self.policy.import_dirs.iter().any(below) {
            return Ok(());
        }
        let words = format!(
            "{path:?} is not below a directory that import_dirs allows ({}), or is not written \
             plainly (absolute, without '.', '..' and '//')",
            if self.policy.import_dirs.is_empty() {
                "none".to_owned()
            } else {
                self.policy.import_dirs.join(", ")
            }
        );
        Err(bad_field(Why::Invalid, "source", words))
    }

    fn place(&self, class: Option<&str>, from: Option<&Record>) -> Result<Place, Refusal> {
        let classes = &self.policy.classes;
        let known = || classes.keys().cloned().collect::<Vec<_>>().join(", ");
        let only = || {
            if classes.len() == 1 {
                classes.keys().next().cloned()
            } else {
                None
            }
        };
        let class = class
            .map(str::to_owned)
            .or_else(|| from.map(|from| from.place.class.clone()))
            .or_else(only)
            .or_else(|| {
                classes
                    .contains_key("default")
                    .then(|| "default".to_owned())
            })
            .ok_or_else(|| {
                let words = format!("say which class: there are {}", known());
                bad_field(Why::Invalid, "class", words)
            })?;
        let Some(policy) = classes.get(&class) else {
            let words = format!("there is no class {class:?}; there are {}", known());
            return Err(bad_field(Why::Invalid, "class", words));
        };
        let mut place = policy.place.clone();
        if let Some(from) = from
            && from.place.domain != place.domain
        {
            let words = format!(
                "{} is in domain {} and class {class} in domain {}; classes that shall copy from \
                 each other need the same `domain`",
                from.title(),
                from.place.domain,
                place.domain
            );
            return Err(bad_field(Why::CrossDomain, "source", words));
        }
        place.identity = self.identities.get(&place.root).cloned();
        Ok(place)
    }

    fn check_able(&self, new: &NewVolume) -> Result<(), Refusal> {
        let caps = &self.policy.caps;
        if new.qos.is_some() && !caps.qos {
            let words = "this backend can't limit the I/O of a volume; leave qos out".to_owned();
            return Err(bad_field(Why::Unsupported, "qos", words));
        }
        let Some(key) = &new.encryption else {
            return Ok(());
        };
        if !caps.encryption {
            let words = "this backend can't encrypt volumes; leave encryption out".to_owned();
            return Err(bad_field(Why::Unsupported, "encryption", words));
        }
        if new.source.is_some() {
            let words = "a volume with a source can't be encrypted; leave one of both out";
            return Err(bad_field(Why::Unsupported, "encryption", words.to_owned()));
        }
        if !self.policy.keys.contains(key) {
            let words = format!("there is no key {key:?}; the configuration names it [keys.ID]");
            return Err(bad_field(Why::Invalid, "encryption", words));
        }
        Ok(())
    }

    fn size_of_new(&self, new: &NewVolume, from: Option<&Record>) -> Result<u64, Refusal> {
        let least = from.map(|from| match &from.body {
            Body::Volume(volume) => volume.seen_size_bytes.unwrap_or(volume.size_bytes),
            Body::Snapshot(snapshot) => snapshot.size_bytes.unwrap_or(0),
        });
        let file = matches!(new.source, Some(SourceWish::File(..)));
        let Some(wished) = new.size_bytes.or(least).or(file.then_some(0)) else {
            let words = "a volume without a source needs a size, such as \"10GiB\"".to_owned();
            return Err(bad_field(Why::Invalid, "size", words));
        };
        if let Some(least) = least
            && wished < least
        {
            let words = format!(
                "{wished} bytes are less than the {least} bytes of the source; ask for more"
            );
            return Err(bad_field(Why::Invalid, "size", words));
        }
        // A file says by itself how long it is.
        if file && new.size_bytes.is_none() {
            return Ok(0);
        }
        self.check_size(wished)
    }

    /// The size rounded up to what the backend can do.
    fn check_size(&self, wished: u64) -> Result<u64, Refusal> {
        if wished == 0 {
            let words = "a volume has at least one byte".to_owned();
            return Err(bad_field(Why::Invalid, "size", words));
        }
        let max = self.policy.max_size_bytes;
        let rounded = wished.checked_next_multiple_of(self.policy.caps.size_unit.max(1));
        rounded.filter(|size| *size <= max).ok_or_else(|| {
            let words =
                format!("{wished} bytes are more than limits.max_size allows ({max} bytes)");
            bad_field(Why::Invalid, "size", words)
        })
    }

    fn depth_of_new(&self, from: Option<&Record>) -> Result<u32, Refusal> {
        let depth = match from.map(|from| &from.body) {
            None => 0,
            Some(Body::Volume(volume)) => volume.depth + 1,
            Some(Body::Snapshot(snapshot)) => snapshot.depth + 1,
        };
        if self.policy.caps.chains && depth > self.policy.clone_depth_max {
            let words = format!(
                "the chain of parents would be {depth} long and limits.clone_depth_max is {}; \
                 the source is being flattened in the background, try again later",
                self.policy.clone_depth_max
            );
            return Err(bad_field(Why::Invalid, "source", words));
        }
        Ok(depth)
    }

    fn change_volume(
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

    fn create_snapshot(
        &mut self,
        uid: Uid,
        name: Name,
        volume: &Name,
        labels: BTreeMap<String, String>,
        rows: &[Record],
    ) -> Answer {
        if let Some(there) = self.find("snapshot", &name, rows) {
            let same = there
                .snapshot()
                .is_some_and(|snapshot| snapshot.volume == *volume)
                && there.labels == labels;
            return match there.wish {
                Wish::Absent => Err(deleting(there)),
                Wish::Present if same => Ok(Accepted {
                    record: there,
                    known: true,
                }),
                Wish::Present => Err(conflict(there)),
            };
        }
        let of = self.find("volume", volume, rows).ok_or_else(|| {
            bad_field(
                Why::Invalid,
                "volume",
                format!("there is no volume {volume}"),
            )
        })?;
        if of.wish == Wish::Absent {
            let words = format!("volume/{volume} is being deleted");
            return Err(bad_field(Why::Deleting, "volume", words));
        }
        if of.phase == Phase::Failed && !work::is_live(&of) {
            let words = format!(
                "volume/{volume} failed, there is nothing to take a snapshot of; retry or delete it"
            );
            return Err(bad_field(Why::Invalid, "volume", words));
        }
        self.check_backlog(&of.place.domain, Lane::Create)?;
        let size = of
            .volume()
            .map(|body| body.seen_size_bytes.unwrap_or(body.size_bytes));
        let depth = of.volume().map_or(0, |body| body.depth);
        let id = ObjectId::Snapshot(uid);
        let body = Body::Snapshot(SnapshotBody {
            volume: of.name,
            size_bytes: size,
            depth,
        });
        let mut record = blank(id, name, of.place, body, self.now);
        record.born = of.born;
        record.image = of.image;
        record.labels = labels;
        self.table.insert(record);
        self.wished(id);
        self.accepted(id, false)
    }

    fn delete(&mut self, object: &Named, uid: Option<Uid>, rows: &[Record]) -> Answer {
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

    fn retry(&mut self, object: &Named, uid: Option<Uid>, rows: &[Record]) -> Answer {
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

    fn restore(&mut self, uid: Uid, name: Option<Name>, rows: &[Record]) -> Answer {
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

    fn purge(&mut self, uid: Uid, rows: &[Record]) -> Answer {
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
    fn wished(&mut self, id: ObjectId) {
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

/// A record of an object that was just accepted.
fn blank(id: ObjectId, name: Name, place: Place, body: Body, now: Millis) -> Record {
    Record {
        id,
        born: name.clone(),
        name,
        image: id.uid(),
        place,
        generation: 1,
        observed_generation: 0,
        wish: Wish::Present,
        phase: Phase::Pending,
        known: Known::Nothing,
        look: false,
        attempts: 0,
        hangs: 0,
        waits: 0,
        next_attempt_at: None,
        reason: None,
        message: None,
        labels: BTreeMap::new(),
        created_at: now,
        updated_at: now,
        phase_since: now,
        wished_at: now,
        deletion_requested_at: None,
        body,
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
pub(super) fn resume(record: &mut Record, now: Millis) {
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

fn same_or_conflict(there: Record, request: &str) -> Answer {
    if there.wish == Wish::Absent {
        return Err(deleting(there));
    }
    let same = there
        .volume()
        .is_some_and(|volume| volume.request == request);
    if same {
        Ok(Accepted {
            record: there,
            known: true,
        })
    } else {
        Err(conflict(there))
    }
}

fn not_found(kind: &str, name: &Name) -> Refusal {
    refuse(Why::NotFound, format!("there is no {kind} {name}"))
}

fn deleting(there: Record) -> Refusal {
    let words = format!(
        "{} is still being deleted; try again when it is gone",
        there.title()
    );
    Refusal {
        existing: Some(Box::new(there)),
        ..bad_field(Why::Deleting, "name", words)
    }
}

fn conflict(there: Record) -> Refusal {
    let words = format!("{} is there already and differs", there.title());
    Refusal {
        existing: Some(Box::new(there)),
        ..bad_field(Why::Conflict, "name", words)
    }
}
