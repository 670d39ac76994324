//! What a simulated storage says and refuses: the small questions of a session.

use super::session::Filling;
use super::world::{Image, Parent, SimFile, Snapshot, World};
use crate::backend::{Error, Result, SnapshotState, VolumeState};
use crate::model::{ErrorKind, Known, Record, Uid, VolumeBody};
use std::sync::Arc;

/// Whatever has our name, we never made anything under it.
pub fn never_made(record: &Record) -> bool {
    matches!(record.known, Known::Nothing | Known::Free)
}

pub fn gone(record: &Record, why: &str) -> Error {
    Error::of_errno(2, "open", format!("{}: {why}", record.title())).untouched()
}

pub fn foreign(whose: &str) -> Error {
    let message = format!("{whose}; it is left as it is");
    Error::of_errno(17, "create", message).untouched()
}

pub fn not_in_trash(record: &Record) -> Error {
    let message = format!("{}: it is in its place, not in the trash", record.title());
    Error::new(ErrorKind::Invalid, "trash_remove", message).untouched()
}

pub fn wished_size(record: &Record) -> Result<u64> {
    let size = record.volume().map(|volume: &VolumeBody| volume.size_bytes);
    size.filter(|size| *size > 0).ok_or_else(|| {
        let message = format!("{}: it has no size", record.title());
        Error::new(ErrorKind::Invalid, "create", message).untouched()
    })
}

pub fn refuse_smaller(record: &Record, size_bytes: u64, source_bytes: u64) -> Result<()> {
    if size_bytes >= source_bytes {
        return Ok(());
    }
    let message = format!(
        "{}: {size_bytes} bytes are less than its source's {source_bytes}",
        record.title()
    );
    Err(Error::new(ErrorKind::Invalid, "create", message).untouched())
}

pub fn refuse_when_full(world: &World, record: &Record) -> Result<()> {
    let root = &record.place.root;
    if world.roots.get(root).is_some_and(|root| root.full) {
        let message = format!("{}: root {root} is full", record.title());
        return Err(Error::of_errno(28, "create", message).untouched());
    }
    Ok(())
}

pub fn import(world: &World, record: &Record, path: &str, size_bytes: u64) -> Result<Filling> {
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

pub fn in_place<'a>(world: &'a World, root: &str, name: &str) -> Option<(String, &'a Image)> {
    let root = world.roots.get(root)?;
    let id = root.names.get(name)?;
    Some((id.clone(), root.images.get(id)?))
}

/// Makes the hidden snapshot that a clone of a volume reads from. That of a user's is there.
pub fn hold(world: &mut World, parent: &Parent, record: &Record) {
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

/// What keeps an image in the trash: snapshots, and whoever reads from removed ones.
pub fn blockers(world: &World, root: &str, image: &Image) -> Vec<String> {
    let mut by = image.live_snapshots();
    let removed = image.snapshots.iter().filter(|(_, s)| s.trashed);
    for (uid, _) in removed {
        by.extend(world.children(&Parent {
            root: root.to_owned(),
            image: image.id.clone(),
            snapshot: *uid,
        }));
    }
    by
}

pub fn snapshot_of(world: &World, record: &Record, id: &str) -> Option<SnapshotState> {
    let uid: Uid = record.id.uid();
    let root = &record.place.root;
    let image = world.image(root, id)?;
    let snapshot = image.snapshots.get(&uid).filter(|s| !s.trashed)?;
    Some(SnapshotState {
        size_bytes: snapshot.size_bytes,
        identity: world.roots.get(root).map(|root| root.identity.clone()),
        did: false,
    })
}

pub fn state_of(image: &Image, root: &str, identity: Option<String>, did: bool) -> VolumeState {
    let uid = image.mark.as_ref().map_or(0, |mark| mark.record.image.0);
    // A name as NAA type 5 has it: the digit 5 and fifteen hexadecimal ones.
    let wwn = format!("5{:015x}", uid & 0x0fff_ffff_ffff_ffff);
    VolumeState {
        size_bytes: image.size_bytes,
        used_bytes: None,
        handle: format!("sim:{root}/{}", image.name),
        wwn: Some(wwn),
        image_id: Some(image.id.clone()),
        encrypted: image.encrypted,
        has_parent: image.parent.is_some(),
        identity,
        generation: image.mark.as_ref().map_or(0, |mark| mark.record.generation),
        did,
    }
}
