//! The model backend: images, snapshots, children, trash. What is in here is the truth.

use std::collections::{BTreeMap, BTreeSet};
use volward::backend::{Error, Found, Outcome, Reclaimed, Retired, SnapshotState, VolumeState};
use volward::model::{ErrorKind, Known, ObjectId, Record, Source, Step, Uid};

/// How far an attempt gets with its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    Nothing,
    Half,
    Whole,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    pub size: u64,
    pub whole: bool,
    pub marked: bool,
    pub trashed: bool,
    pub encrypted: bool,
    /// Snapshots by uid.
    pub snapshots: BTreeSet<Uid>,
    /// The image that this one is a clone of.
    pub parent: Option<Uid>,
}

#[derive(Debug, Default, Clone)]
pub struct Disk {
    pub images: BTreeMap<Uid, Image>,
    /// How many calls changed something.
    pub changes: u64,
}

type Answer = Result<Outcome, Error>;

fn gone(what: &str) -> Error {
    Error::of_errno(2, "model", format!("{what} is not there"))
}

impl Disk {
    pub fn children(&self, of: Uid) -> Vec<Uid> {
        let child = |(uid, image): (&Uid, &Image)| (image.parent == Some(of)).then_some(*uid);
        self.images.iter().filter_map(child).collect()
    }

    fn state(&self, uid: Uid) -> VolumeState {
        let image = &self.images[&uid];
        VolumeState {
            size_bytes: image.size,
            handle: format!("model:{uid}"),
            encrypted: image.encrypted,
            has_parent: image.parent.is_some(),
            did: true,
            ..VolumeState::default()
        }
    }

    /// Does the work of a step, as far as `extent` says.
    pub fn act(&mut self, step: Step, record: &Record, extent: Extent) -> Answer {
        if std::env::var_os("VOLWARD_SIM_TRACE").is_some() {
            println!(
                "act {step:?} {extent:?} {:?} {:?}",
                record.id,
                self.images.get(&record.image)
            );
        }
        if step != Step::Inspect && extent != Extent::Nothing {
            self.changes += 1;
        }
        match step {
            Step::Inspect => Ok(Outcome::Found(self.look(record))),
            Step::Create | Step::Import | Step::Update | Step::Encrypt => {
                self.ensure(step, record, extent)
            }
            Step::Snapshot => self.snapshot(record, extent),
            Step::Trash => Ok(Outcome::Retired(self.retire(record, extent))),
            Step::RemoveSnapshot => {
                if extent == Extent::Whole
                    && let Some(image) = self.images.get_mut(&record.image)
                {
                    image.snapshots.remove(&record.id.uid());
                }
                Ok(Outcome::Retired(Retired::Gone))
            }
            Step::Reclaim => self.reclaim(record, extent),
            Step::Restore => self.restore(record, extent),
            Step::Flatten => {
                let image = self
                    .images
                    .get_mut(&record.image)
                    .ok_or_else(|| gone("image"))?;
                if extent == Extent::Whole {
                    image.parent = None;
                }
                Ok(Outcome::Volume(self.state(record.image)))
            }
            Step::Probe | Step::Connect => panic!("{step:?} is no step of an object"),
        }
    }

    fn look(&self, record: &Record) -> Option<Found> {
        let image = self.images.get(&record.image)?;
        match record.id {
            ObjectId::Snapshot(uid) => image.snapshots.contains(&uid).then(|| {
                Found::Snapshot(SnapshotState {
                    size_bytes: 1,
                    ..Default::default()
                })
            }),
            ObjectId::Volume(_) if image.trashed => Some(Found::Trashed {
                image_id: None,
                whole: image.whole,
            }),
            ObjectId::Volume(_) if image.whole => Some(Found::Volume(self.state(record.image))),
            ObjectId::Volume(_) if image.marked => Some(Found::Half),
            ObjectId::Volume(_) => Some(Found::Unmarked),
        }
    }

    fn ensure(&mut self, step: Step, record: &Record, extent: Extent) -> Answer {
        let uid = record.image;
        let volume = record.volume().expect("a volume");
        let makes = matches!(step, Step::Create | Step::Import);
        let parent = match volume.source.as_ref().filter(|_| makes) {
            Some(Source::Snapshot {
                uid: snapshot,
                image,
                ..
            }) => {
                let there = self.images.get(image).is_some_and(|image| {
                    image.whole && !image.trashed && image.snapshots.contains(snapshot)
                });
                Some(
                    there
                        .then_some(*image)
                        .ok_or_else(|| gone("source snapshot"))?,
                )
            }
            Some(Source::Volume { uid, .. }) => {
                let there = self.images.get(uid).is_some_and(|i| i.whole && !i.trashed);
                Some(there.then_some(*uid).ok_or_else(|| gone("source volume"))?)
            }
            Some(Source::File { .. }) | None => None,
        };
        match self.images.get(&uid) {
            None if !makes => return Err(gone("image")),
            Some(image) if image.trashed => return Err(gone("image")),
            Some(image) if !image.whole && !image.marked && record.known != Known::Free => {
                return Err(Error::of_errno(17, "model", "unmarked image"));
            }
            _ => {}
        }
        if extent == Extent::Nothing {
            return Ok(Outcome::Volume(VolumeState::default()));
        }
        let marked = uid.0.is_multiple_of(2);
        let image = self.images.entry(uid).or_insert_with(|| Image {
            size: 0,
            whole: false,
            marked,
            trashed: false,
            encrypted: false,
            snapshots: BTreeSet::new(),
            parent,
        });
        if extent == Extent::Half {
            return Ok(Outcome::Volume(VolumeState::default()));
        }
        image.whole = true;
        image.marked = true;
        image.size = image.size.max(volume.size_bytes).max(1);
        image.encrypted |= step == Step::Encrypt;
        Ok(Outcome::Volume(self.state(uid)))
    }

    fn snapshot(&mut self, record: &Record, extent: Extent) -> Answer {
        let image = self
            .images
            .get_mut(&record.image)
            .filter(|i| i.whole && !i.trashed);
        let image = image.ok_or_else(|| gone("volume of the snapshot"))?;
        if extent == Extent::Whole {
            image.snapshots.insert(record.id.uid());
        }
        let state = SnapshotState {
            size_bytes: image.size,
            ..SnapshotState::default()
        };
        Ok(Outcome::Snapshot(state))
    }

    fn retire(&mut self, record: &Record, extent: Extent) -> Retired {
        let Some(image) = self.images.get_mut(&record.image) else {
            return Retired::Gone;
        };
        if !image.snapshots.is_empty() {
            let snapshots = image.snapshots.iter().map(ToString::to_string).collect();
            return Retired::Carrier { snapshots };
        }
        if extent == Extent::Whole {
            image.trashed = true;
        }
        Retired::Trashed { image_id: None }
    }

    fn reclaim(&mut self, record: &Record, extent: Extent) -> Answer {
        let uid = record.image;
        let children = self.children(uid);
        let Some(image) = self.images.get_mut(&uid) else {
            return Ok(Outcome::Reclaimed(Reclaimed::Done));
        };
        assert!(image.trashed, "reclaim of an image that isn't in the trash");
        if !children.is_empty() {
            let by = children.iter().map(ToString::to_string).collect();
            return Ok(Outcome::Reclaimed(Reclaimed::Blocked { by }));
        }
        match extent {
            Extent::Nothing => {}
            Extent::Half => image.whole = false,
            Extent::Whole => {
                self.images.remove(&uid);
            }
        }
        Ok(Outcome::Reclaimed(Reclaimed::Done))
    }

    fn restore(&mut self, record: &Record, extent: Extent) -> Answer {
        let uid = record.image;
        let image = self
            .images
            .get_mut(&uid)
            .ok_or_else(|| gone("trash entry"))?;
        if !image.whole {
            return Err(Error::new(ErrorKind::Gone, "model", "partly removed"));
        }
        if extent == Extent::Whole {
            image.trashed = false;
        }
        Ok(Outcome::Volume(self.state(uid)))
    }
}
