//! Makes and changes simulated volumes.

use super::session::{SimSession, gone, state_of};
use super::world::{Image, Parent, SimFile, Snapshot, World, image_name};
use crate::backend::{Ctl, Error, Result, VolumeState};
use crate::model::{ErrorKind, Record, Source, Step, VolumeBody};
use std::sync::Arc;

/// What a new image is filled with.
struct Filling {
    size_bytes: u64,
    data: Arc<Vec<u8>>,
    parent: Option<Parent>,
}

impl SimSession {
    pub(super) fn create(&self, record: &Record, step: Step, ctl: &dyn Ctl) -> Result<VolumeState> {
        let size_bytes = wished_size(record)?;
        let (root, id) = {
            let mut world = self.lock();
            refuse_when_full(&world, record)?;
            // Whatever it is made from must be there before anything is made.
            self.filling(&world, record, size_bytes)?;
            let root = record.place.root.clone();
            let name = image_name(&record.born, record.image);
            let id = world.add_image(&root, name, size_bytes);
            let id = id.ok_or_else(|| gone(record, "its root is not there"))?;
            if let Some(image) = world.image_mut(&root, &id).filter(|_| step == Step::Import) {
                image.mark = Some(self.mark(record, false));
            }
            (root, id)
        };
        // Here the image is half made: an imported one says so in its mark, any other has none.
        let half = ctl.progress(1, 2);
        self.take_time(step);
        if half.is_break() || ctl.cancelled() {
            let message = format!("{}: {} was cancelled", record.title(), step.as_str());
            return Err(Error::new(ErrorKind::Cancelled, step.as_str(), message));
        }
        let mut world = self.lock();
        let filling = self.filling(&world, record, size_bytes)?;
        if let Some(parent) = &filling.parent {
            hold(&mut world, parent, record);
        }
        let mark = self.mark(record, true);
        let image = world.image_mut(&root, &id);
        let image = image.ok_or_else(|| gone(record, "its image vanished while it was made"))?;
        image.mark = Some(mark);
        image.size_bytes = filling.size_bytes;
        image.data = filling.data;
        if let Some(parent) = filling.parent {
            world.adopt(parent, &root, &id);
        }
        self.state(&world, record, &id, true)
    }

    /// Looks up what the record is made from.
    fn filling(&self, world: &World, record: &Record, size_bytes: u64) -> Result<Filling> {
        let (root, parent_id, snapshot) = match record.source() {
            None => {
                return Ok(Filling {
                    size_bytes,
                    data: Arc::default(),
                    parent: None,
                });
            }
            Some(Source::File { path, .. }) => return import(world, record, path, size_bytes),
            Some(Source::Snapshot {
                name,
                uid,
                image,
                image_born,
                place,
            }) => {
                self.check_place(world, place, &format!("snapshot/{name}"))?;
                let wanted = image_name(image_born, *image);
                let (id, found) = in_place(world, &place.root, &wanted)
                    .ok_or_else(|| gone(record, &format!("snapshot {name} is not there")))?;
                let live = found
                    .snapshots
                    .get(uid)
                    .filter(|snapshot| !snapshot.trashed);
                let live =
                    live.ok_or_else(|| gone(record, &format!("snapshot {name} is not there")))?;
                (
                    place.root.clone(),
                    id,
                    (*uid, live.size_bytes, Arc::clone(&live.data)),
                )
            }
            Some(Source::Volume {
                name,
                uid,
                born,
                place,
            }) => {
                self.check_place(world, place, &format!("volume/{name}"))?;
                let (id, found) = in_place(world, &place.root, &image_name(born, *uid))
                    .filter(|(_, image)| image.whole())
                    .ok_or_else(|| gone(record, &format!("volume {name} is not there")))?;
                // The hidden snapshot is named after the child.
                let hidden = record.id.uid();
                (
                    place.root.clone(),
                    id,
                    (hidden, found.size_bytes, Arc::clone(&found.data)),
                )
            }
        };
        let (uid, source_bytes, data) = snapshot;
        refuse_smaller(record, size_bytes, source_bytes)?;
        let parent = Parent {
            root,
            image: parent_id,
            snapshot: uid,
        };
        Ok(Filling {
            size_bytes,
            data,
            parent: Some(parent),
        })
    }

    /// Brings an image that is there and ours to the record's size and mark.
    pub(super) fn update(&self, record: &Record, id: &str, step: Step) -> Result<VolumeState> {
        let wished = wished_size(record)?;
        self.take_time(step);
        let mut world = self.lock();
        let root = record.place.root.clone();
        let image = world.image(&root, id);
        let image = image.ok_or_else(|| gone(record, "it vanished meanwhile"))?;
        let grow = wished > image.size_bytes;
        if grow {
            refuse_when_full(&world, record)?;
        }
        let encrypt = step == Step::Encrypt && !image.encrypted;
        let stale = image
            .mark
            .as_ref()
            .is_none_or(|mark| mark.record.generation != record.generation || mark.carrier);
        let mark = self.mark(record, true);
        if let Some(image) = world.image_mut(&root, id) {
            image.size_bytes = image.size_bytes.max(wished);
            image.encrypted |= encrypt;
            image.mark = Some(mark);
        }
        self.state(&world, record, id, grow || encrypt || stale)
    }

    pub(super) fn state(
        &self,
        world: &World,
        record: &Record,
        id: &str,
        did: bool,
    ) -> Result<VolumeState> {
        let root = &record.place.root;
        let image = world.image(root, id);
        let image = image.ok_or_else(|| gone(record, "it is not there"))?;
        let identity = world.roots.get(root).map(|root| root.identity.clone());
        Ok(state_of(image, root, identity, did))
    }
}

fn wished_size(record: &Record) -> Result<u64> {
    let size = record.volume().map(|volume: &VolumeBody| volume.size_bytes);
    size.filter(|size| *size > 0).ok_or_else(|| {
        let message = format!("{}: it has no size", record.title());
        Error::new(ErrorKind::Invalid, "create", message).untouched()
    })
}

fn refuse_smaller(record: &Record, size_bytes: u64, source_bytes: u64) -> Result<()> {
    if size_bytes >= source_bytes {
        return Ok(());
    }
    let message = format!(
        "{}: {size_bytes} bytes are less than its source's {source_bytes}",
        record.title()
    );
    Err(Error::new(ErrorKind::Invalid, "create", message).untouched())
}

fn refuse_when_full(world: &World, record: &Record) -> Result<()> {
    let root = &record.place.root;
    if world.roots.get(root).is_some_and(|root| root.full) {
        let message = format!("{}: root {root} is full", record.title());
        return Err(Error::of_errno(28, "create", message).untouched());
    }
    Ok(())
}

fn import(world: &World, record: &Record, path: &str, size_bytes: u64) -> Result<Filling> {
    let file: &SimFile = world
        .files
        .get(path)
        .ok_or_else(|| gone(record, &format!("file {path} is not there")))?;
    refuse_smaller(record, size_bytes, file.size_bytes)?;
    Ok(Filling {
        size_bytes,
        data: Arc::clone(&file.data),
        parent: None,
    })
}

fn in_place<'a>(world: &'a World, root: &str, name: &str) -> Option<(String, &'a Image)> {
    let root = world.roots.get(root)?;
    let id = root.names.get(name)?;
    Some((id.clone(), root.images.get(id)?))
}

/// Makes the hidden snapshot that a clone of a volume reads from. That of a user's is there.
fn hold(world: &mut World, parent: &Parent, record: &Record) {
    if let Some(image) = world.image_mut(&parent.root, &parent.image) {
        let hidden = Snapshot {
            title: format!("the source of {}", record.title()),
            size_bytes: image.size_bytes,
            data: Arc::clone(&image.data),
            record: None,
            trashed: true,
        };
        image.snapshots.entry(parent.snapshot).or_insert(hidden);
    }
}
