//! New objects: what is refused before anything is stored, and the record of what isn't.

use super::request::{Accepted, Answer, NewVolume, Refusal, SourceWish, Why};
use super::request::{bad_field, conflict, deleting, refuse};
use super::{Sched, work};
use crate::model::{
    Body, Lane, Name, ObjectId, Phase, Place, Record, SnapshotBody, Source, SourceFormat, Uid,
    VolumeBody, Wish,
};
use std::collections::BTreeMap;

impl Sched {
    pub(super) fn create_volume(&mut self, new: NewVolume, rows: &[Record]) -> Answer {
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
        let class_qos = self
            .policy
            .classes
            .get(&place.class)
            .and_then(|class| class.qos)
            .filter(|_| self.policy.caps.qos);
        let body = VolumeBody {
            source,
            qos: new.qos.or(class_qos),
            encryption: new.encryption,
            depth,
            flatten: depth > self.policy.clone_depth && self.policy.caps.chains,
            ..VolumeBody::of_size(size_bytes, new.request)
        };
        let id = ObjectId::Volume(new.uid);
        let mut record =
            Record::accepted(id, new.name, place, Body::Volume(Box::new(body)), self.now);
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
    pub(super) fn check_size(&self, wished: u64) -> Result<u64, Refusal> {
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

    pub(super) fn create_snapshot(
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
        let mut record = Record::accepted(id, name, of.place, body, self.now);
        record.born = of.born;
        record.image = of.image;
        record.labels = labels;
        self.table.insert(record);
        self.wished(id);
        self.accepted(id, false)
    }
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
