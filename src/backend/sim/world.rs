//! The simulated world: roots, images, snapshots and how they hold each other.
//!
//! Plain data under one lock. It knows nothing of sessions, time or threads.

use crate::model::{Body, Known, Name, ObjectId, Record, Uid};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Everything that is there.
#[derive(Debug, Default)]
pub struct World {
    pub roots: BTreeMap<String, Root>,
    /// Files that can be imported: path → contents.
    pub files: BTreeMap<String, SimFile>,
    /// Snapshot → the root and id of each image that reads from it.
    children: BTreeMap<Parent, BTreeSet<(String, String)>>,
    next_id: u64,
}

/// A file that can be imported.
#[derive(Debug, Clone)]
pub struct SimFile {
    pub size_bytes: u64,
    pub data: Arc<Vec<u8>>,
}

/// A pool.
#[derive(Debug)]
pub struct Root {
    pub identity: String,
    pub full: bool,
    /// By image id.
    pub images: BTreeMap<String, Image>,
    /// Image name → image id, of those that aren't in the trash.
    pub names: BTreeMap<String, String>,
    /// The same of those that are in the trash. Names never come twice: they carry the uid.
    pub trash: BTreeMap<String, String>,
}

/// An image, in its place or in the trash.
#[derive(Debug, Clone)]
pub struct Image {
    pub id: String,
    pub name: String,
    pub size_bytes: u64,
    /// The first bytes of it, as far as anybody wrote any.
    pub data: Arc<Vec<u8>>,
    pub mark: Option<Mark>,
    pub trashed: bool,
    /// Part of it was removed by a reclaim.
    pub torn: bool,
    pub encrypted: bool,
    pub parent: Option<Parent>,
    pub snapshots: BTreeMap<Uid, Snapshot>,
    /// Who has it open elsewhere.
    pub watchers: Vec<String>,
}

/// What makes an image ours.
#[derive(Debug, Clone)]
pub struct Mark {
    pub instance: String,
    pub record: Record,
    /// Whether the image is filled, or was only begun.
    pub whole: bool,
    /// A deleted volume that stays for its snapshots.
    pub carrier: bool,
}

/// A snapshot within an image.
#[derive(Debug, Clone)]
pub struct Snapshot {
    pub title: String,
    pub size_bytes: u64,
    pub data: Arc<Vec<u8>>,
    /// Its mark; a hidden one for a clone of a volume has none.
    pub record: Option<Record>,
    /// Removed, and there for its children only.
    pub trashed: bool,
}

/// The snapshot that a clone reads from.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Parent {
    pub root: String,
    pub image: String,
    pub snapshot: Uid,
}

/// What a name or an id leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Look {
    Nothing,
    /// Ours, in its place or in the trash: the image id.
    Ours(String),
    /// There, without a mark.
    Unmarked(String),
    /// Somebody else's, in words.
    Foreign(String),
}

/// The name of the image that a volume was born with.
pub fn image_name(born: &Name, image: Uid) -> String {
    format!("volward-{born}-{}", image.lower())
}

impl World {
    pub fn add_root(&mut self, name: &str) {
        self.next_id += 1;
        let root = Root {
            identity: format!("sim/{}", self.next_id),
            full: false,
            images: BTreeMap::new(),
            names: BTreeMap::new(),
            trash: BTreeMap::new(),
        };
        self.roots.insert(name.to_owned(), root);
    }

    /// Makes an unmarked image and says its id. The name must be free.
    pub fn add_image(&mut self, root: &str, name: String, size_bytes: u64) -> Option<String> {
        self.next_id += 1;
        let id = format!("{:012x}", self.next_id);
        let root = self.roots.get_mut(root)?;
        root.names.insert(name.clone(), id.clone());
        let image = Image {
            id: id.clone(),
            name,
            size_bytes,
            data: Arc::default(),
            mark: None,
            trashed: false,
            torn: false,
            encrypted: false,
            parent: None,
            snapshots: BTreeMap::new(),
            watchers: Vec::new(),
        };
        root.images.insert(id.clone(), image);
        Some(id)
    }

    pub fn image(&self, root: &str, id: &str) -> Option<&Image> {
        self.roots.get(root)?.images.get(id)
    }

    pub fn image_mut(&mut self, root: &str, id: &str) -> Option<&mut Image> {
        self.roots.get_mut(root)?.images.get_mut(id)
    }

    /// What is in place under the name of the record's image.
    pub fn look(&self, record: &Record, instance: &str) -> Look {
        let name = image_name(&record.born, record.image);
        let Some(root) = self.roots.get(&record.place.root) else {
            return Look::Nothing;
        };
        let found = root.names.get(&name).and_then(|id| root.images.get(id));
        found.map_or(Look::Nothing, |image| {
            image.whose(record.image, &name, instance)
        })
    }

    /// The id of the record's image, if it is in the trash.
    pub fn look_in_trash(&self, record: &Record, instance: &str) -> Option<String> {
        let name = image_name(&record.born, record.image);
        let root = self.roots.get(&record.place.root)?;
        let image = root.images.get(root.trash.get(&name)?)?;
        let ours = matches!(image.whose(record.image, &name, instance), Look::Ours(_));
        ours.then(|| image.id.clone())
    }

    /// Moves an image to the trash, or back.
    pub fn move_image(&mut self, root: &str, id: &str, to_trash: bool) {
        let Some(root) = self.roots.get_mut(root) else {
            return;
        };
        let Some(image) = root.images.get_mut(id) else {
            return;
        };
        image.trashed = to_trash;
        let (from, to) = if to_trash {
            (&mut root.names, &mut root.trash)
        } else {
            (&mut root.trash, &mut root.names)
        };
        from.remove(&image.name);
        to.insert(image.name.clone(), image.id.clone());
    }

    /// The volumes that read from that snapshot of that image, in words.
    pub fn children(&self, parent: &Parent) -> Vec<String> {
        let ids = self.children.get(parent).into_iter().flatten();
        let images = ids.filter_map(|(root, id)| self.image(root, id));
        images.map(Image::title).collect()
    }

    /// Makes an image read from a snapshot.
    pub fn adopt(&mut self, parent: Parent, root: &str, id: &str) {
        let child = (root.to_owned(), id.to_owned());
        self.children
            .entry(parent.clone())
            .or_default()
            .insert(child);
        if let Some(image) = self.image_mut(root, id) {
            image.parent = Some(parent);
        }
    }

    /// Removes an image and lets go of its parent.
    pub fn remove_image(&mut self, root_name: &str, id: &str) {
        self.release(root_name, id);
        let Some(root) = self.roots.get_mut(root_name) else {
            return;
        };
        if let Some(image) = root.images.remove(id) {
            let names = if image.trashed {
                &mut root.trash
            } else {
                &mut root.names
            };
            names.remove(&image.name);
        }
    }

    /// Makes an image independent of its parent.
    pub fn release(&mut self, root: &str, id: &str) {
        let Some(parent) = self.image_mut(root, id).and_then(|i| i.parent.take()) else {
            return;
        };
        if let Some(children) = self.children.get_mut(&parent) {
            children.remove(&(root.to_owned(), id.to_owned()));
        }
        self.sweep(&parent);
    }

    /// A snapshot that was removed, and is there for its children only, goes with the last one.
    pub fn sweep(&mut self, parent: &Parent) {
        let childless = self.children.get(parent).is_none_or(BTreeSet::is_empty);
        if !childless {
            return;
        }
        self.children.remove(parent);
        if let Some(image) = self.image_mut(&parent.root, &parent.image) {
            let trashed = image.snapshots.get(&parent.snapshot).map(|s| s.trashed);
            if trashed == Some(true) {
                image.snapshots.remove(&parent.snapshot);
            }
        }
    }
}

impl Image {
    fn whose(&self, uid: Uid, name: &str, instance: &str) -> Look {
        match &self.mark {
            None => Look::Unmarked(self.id.clone()),
            Some(mark) if mark.instance != instance => Look::Foreign(format!(
                "image {name} belongs to instance {}, not to us",
                mark.instance
            )),
            Some(mark) if mark.record.image != uid => {
                Look::Foreign(format!("image {name} belongs to {}", mark.record.title()))
            }
            Some(_) => Look::Ours(self.id.clone()),
        }
    }

    pub fn whole(&self) -> bool {
        self.mark.as_ref().is_some_and(|mark| mark.whole)
    }

    /// As a blocker is named.
    pub fn title(&self) -> String {
        match &self.mark {
            Some(mark) if self.trashed => format!("trash/{}", mark.record.id.uid()),
            Some(mark) => format!("volume/{}", mark.record.name),
            None => format!("image {}", self.name),
        }
    }

    /// User snapshots that were not removed, in words.
    pub fn live_snapshots(&self) -> Vec<String> {
        let live = self.snapshots.values().filter(|snapshot| !snapshot.trashed);
        live.map(|snapshot| snapshot.title.clone()).collect()
    }

    pub fn known(&self) -> Known {
        match &self.mark {
            Some(_) if self.trashed => Known::Trashed,
            Some(mark) if mark.carrier => Known::Carrier,
            Some(mark) if mark.whole => Known::Live,
            _ => Known::Free,
        }
    }
}

/// Whether a record is a volume's.
pub fn is_volume(record: &Record) -> bool {
    matches!(record.body, Body::Volume(_)) && matches!(record.id, ObjectId::Volume(_))
}
