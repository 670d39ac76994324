//! The directory of one volume or snapshot: its image, and the mark that makes it ours.
//!
//! An entry is made under `tmp/UID`, whole and durable, and only then renamed to its place; so
//! what is in place is whole, and what is under `tmp` is half made.

use super::errors::{fail, foreign, invalid};
use super::failpoint;
use super::root::{Kind, Root, names, open_directory, open_file, read_small, sync, write_small};
use crate::backend::{Result, VolumeState};
use crate::model::{Name, ObjectId, Record, Source, Uid};
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

pub const IMAGE: &str = "image";
/// The image of a trashed volume once its space is being freed: it can't be restored any more.
pub const TORN: &str = "image.reclaiming";
const META: &str = "meta.json";
const META_NEW: &str = "meta.json.new";

/// The contents of `meta.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Mark {
    /// `volume` or `snapshot`.
    pub volward: String,
    /// Whose image it is.
    pub uid: Uid,
    /// For people; the record has it as well.
    pub name: Name,
    /// The generation of the record that was last brought about.
    pub generation: u64,
    /// The instance that made it.
    pub instance: String,
    /// All that `volward rebuild` needs.
    pub record: Record,
}

impl Mark {
    /// The mark of an object in that root.
    pub fn new(root: &Root, record: &Record, instance: &str) -> Mark {
        let mut record = record.clone();
        // Known by now, whether or not the record has heard of it.
        record.place.identity = Some(root.identity.clone());
        Mark {
            volward: record.id.kind().to_owned(),
            uid: record.id.uid(),
            name: record.name.clone(),
            generation: record.generation,
            instance: instance.to_owned(),
            record,
        }
    }
}

/// An open entry.
#[derive(Debug)]
pub struct Entry {
    pub directory: OwnedFd,
    /// Its path, for messages and handles.
    pub path: String,
    pub mark: Option<Box<Mark>>,
}

/// Where an entry stands: a directory of the root, and its name there.
#[derive(Debug)]
pub struct Spot<'a> {
    pub root: &'a Root,
    pub kind: Kind,
    pub name: String,
}

/// What stands at a spot.
#[derive(Debug)]
pub enum Look {
    Nothing,
    Ours(Entry),
    Unmarked,
    Foreign(String),
}

/// The name of the directory of an object in its place.
pub fn place_name(record: &Record) -> (Kind, String) {
    match record.id {
        ObjectId::Volume(uid) => (Kind::Volumes, directory_name(&record.born, uid)),
        ObjectId::Snapshot(uid) => (Kind::Snapshots, directory_name(&record.name, uid)),
    }
}

/// The name of the directory that a record's image or a source is in.
pub fn source_name(source: &Source) -> Option<(Kind, String, Uid)> {
    match source {
        Source::Snapshot { name, uid, .. } => {
            Some((Kind::Snapshots, directory_name(name, *uid), *uid))
        }
        Source::Volume { born, uid, .. } => Some((Kind::Volumes, directory_name(born, *uid), *uid)),
        Source::File { .. } => None,
    }
}

pub fn directory_name(name: &Name, uid: Uid) -> String {
    format!("{name}-{}", uid.lower())
}

impl<'a> Spot<'a> {
    pub fn new(root: &'a Root, kind: Kind, name: String) -> Spot<'a> {
        Spot { root, kind, name }
    }

    /// Where the object belongs.
    pub fn place(root: &'a Root, record: &Record) -> Spot<'a> {
        let (kind, name) = place_name(record);
        Spot::new(root, kind, name)
    }

    /// Where it is made, and removed.
    pub fn tmp(root: &'a Root, record: &Record) -> Spot<'a> {
        Spot::new(root, Kind::Tmp, record.id.uid().lower())
    }

    /// Where it is when it was deleted.
    pub fn trash(root: &'a Root, record: &Record) -> Spot<'a> {
        Spot::new(root, Kind::Trash, record.id.uid().lower())
    }

    pub fn path(&self) -> String {
        format!("{}/{}", self.root.within(self.kind), self.name)
    }

    /// What stands here, and whether it is that object's.
    pub fn look(&self, uid: Uid, instance: &str) -> Result<Look> {
        let Some(parent) = self.root.directory_if_there(self.kind)? else {
            return Ok(Look::Nothing);
        };
        let directory = match open_directory(&parent, &self.name) {
            Ok(directory) => directory,
            Err(Errno::NOENT) => return Ok(Look::Nothing),
            Err(Errno::LOOP | Errno::NOTDIR) => {
                let path = self.path();
                return Ok(Look::Foreign(format!("{path} is not a directory of ours")));
            }
            Err(errno) => return Err(fail(errno, "open", &self.path())),
        };
        let path = self.path();
        let Some(mark) = read_mark(&directory, &path)? else {
            return Ok(Look::Unmarked);
        };
        if mark.uid != uid || mark.instance != instance {
            let Mark { instance, name, .. } = mark;
            let whose = format!("{path} belongs to {name} of instance {instance}");
            return Ok(Look::Foreign(whose));
        }
        Ok(Look::Ours(Entry {
            directory,
            path,
            mark: Some(Box::new(mark)),
        }))
    }

    /// Makes an empty directory here, with the mark in it.
    pub fn make(&self, mark: &Mark) -> Result<Entry> {
        let parent = self.root.directory(self.kind)?;
        let path = self.path();
        rustix::fs::mkdirat(&parent, &self.name, Mode::RWXU)
            .map_err(|errno| fail(errno, "mkdir", &path))?;
        failpoint::at("make.directory");
        let directory = open_directory(&parent, &self.name);
        let directory = directory.map_err(|errno| fail(errno, "open", &path))?;
        write_small(&directory, META, mark, &path)?;
        failpoint::at("make.meta");
        Ok(Entry {
            directory,
            path,
            mark: Some(Box::new(mark.clone())),
        })
    }

    /// Moves what is here to another spot of the same root, durably.
    pub fn rename(&self, to: &Spot<'_>, point: &'static str) -> Result<()> {
        let (from_parent, to_parent) =
            (self.root.directory(self.kind)?, to.root.directory(to.kind)?);
        let renamed = rustix::fs::renameat(&from_parent, &self.name, &to_parent, &to.name);
        renamed.map_err(|errno| match errno {
            Errno::NOTEMPTY | Errno::EXIST => foreign(&format!("{} is taken", to.path())),
            errno => fail(errno, "rename", &self.path()),
        })?;
        failpoint::at(point);
        // First where it is now: a crash between shows it twice or once, never not at all.
        sync(&to_parent, &to.path())?;
        sync(&from_parent, &self.path())
    }

    /// Makes durable that it is here, for a rename whose process died before it did so.
    pub fn settle(&self) -> Result<()> {
        sync(
            &self.root.directory(self.kind)?,
            &self.root.within(self.kind),
        )
    }

    /// Removes the directory with all that we put into it. Anything else in it keeps it.
    pub fn remove(&self) -> Result<bool> {
        let Some(parent) = self.root.directory_if_there(self.kind)? else {
            return Ok(false);
        };
        let path = self.path();
        let directory = match open_directory(&parent, &self.name) {
            Ok(directory) => directory,
            Err(Errno::NOENT) => return Ok(false),
            Err(errno) => return Err(fail(errno, "open", &path)),
        };
        let found = names(&directory, &path)?;
        let ours = [IMAGE, TORN, META_NEW, META];
        if let Some(other) = found.iter().find(|name| !ours.contains(&name.as_str())) {
            return Err(foreign(&format!("{path} holds {other}, which isn't ours")));
        }
        // The mark goes last, so that what is left of a crash is still marked.
        for name in ours {
            match rustix::fs::unlinkat(&directory, name, AtFlags::empty()) {
                Ok(()) if name == META => failpoint::at("remove.meta"),
                Ok(()) => failpoint::at("remove.image"),
                Err(Errno::NOENT) => {}
                Err(errno) => return Err(fail(errno, "unlink", &format!("{path}/{name}"))),
            }
        }
        match rustix::fs::unlinkat(&parent, &self.name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(fail(errno, "rmdir", &path)),
        }
        failpoint::at("remove.directory");
        sync(&parent, &path)?;
        Ok(true)
    }
}

/// The mark of a directory; none if there is no readable one.
fn read_mark(directory: &OwnedFd, path: &str) -> Result<Option<Mark>> {
    let text = read_small(directory, META, &format!("{path}/{META}"))?;
    Ok(text.and_then(|text| serde_json::from_slice(&text).ok()))
}

impl Entry {
    /// Its image, `None` if that file isn't there.
    pub fn image(&self, flags: OFlags) -> Result<Option<File>> {
        open_file(&self.directory, IMAGE, flags, &self.image_path())
    }

    pub fn image_path(&self) -> String {
        format!("{}/{IMAGE}", self.path)
    }

    /// Makes its image, empty.
    pub fn make_image(&self) -> Result<File> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        let mode = Mode::RUSR | Mode::WUSR;
        let fd = rustix::fs::openat(&self.directory, IMAGE, flags | OFlags::CLOEXEC, mode);
        let image = File::from(fd.map_err(|errno| fail(errno, "open", &self.image_path()))?);
        failpoint::at("make.image");
        Ok(image)
    }

    /// Replaces its mark, durably.
    pub fn write_mark(&mut self, mark: Mark) -> Result<()> {
        write_small(&self.directory, META_NEW, &mark, &self.path)?;
        failpoint::at("update.written");
        rustix::fs::renameat(&self.directory, META_NEW, &self.directory, META)
            .map_err(|errno| fail(errno, "rename", &self.path))?;
        failpoint::at("update.renamed");
        self.mark = Some(Box::new(mark));
        sync(&self.directory, &self.path)
    }

    /// Marks the image as being reclaimed, durably; says whether there was one.
    pub fn tear(&self) -> Result<bool> {
        match rustix::fs::renameat(&self.directory, IMAGE, &self.directory, TORN) {
            Ok(()) => {}
            Err(Errno::NOENT) => return Ok(false),
            Err(errno) => return Err(fail(errno, "rename", &self.image_path()).untouched()),
        }
        failpoint::at("reclaim.renamed");
        sync(&self.directory, &self.path)?;
        Ok(true)
    }

    /// What is left of an image that is being reclaimed.
    pub fn torn(&self) -> Result<Option<File>> {
        let path = format!("{}/{TORN}", self.path);
        open_file(&self.directory, TORN, OFlags::RDWR, &path)
    }

    /// The volume as it stands, `None` if its image isn't there.
    pub fn state(&self, root: &Root, did: bool) -> Result<Option<VolumeState>> {
        let Some(image) = self.image(OFlags::RDONLY)? else {
            return Ok(None);
        };
        let stat = image
            .metadata()
            .map_err(|error| super::errors::fail_io(&error, "fstat", &self.image_path()))?;
        Ok(Some(VolumeState {
            size_bytes: stat.len(),
            // Linux counts blocks of 512 bytes, whatever the file system's are.
            used_bytes: Some(stat.blocks() * 512),
            handle: self.image_path(),
            wwn: None,
            image_id: None,
            encrypted: false,
            has_parent: false,
            identity: Some(root.identity.clone()),
            generation: self.mark.as_ref().map_or(0, |mark| mark.generation),
            did,
        }))
    }
}

/// All entries of one directory of a root that carry a mark.
pub fn marked(root: &Root, kind: Kind) -> Result<Vec<Entry>> {
    let Some(parent) = root.directory_if_there(kind)? else {
        return Ok(Vec::new());
    };
    let mut found = Vec::new();
    for name in names(&parent, &root.within(kind))? {
        let path = format!("{}/{name}", root.within(kind));
        let directory = match open_directory(&parent, &name) {
            Ok(directory) => directory,
            // Not ours, or gone since.
            Err(Errno::NOTDIR | Errno::LOOP | Errno::NOENT) => continue,
            Err(errno) => return Err(fail(errno, "open", &path)),
        };
        if let Some(mark) = read_mark(&directory, &path)? {
            found.push(Entry {
                directory,
                path,
                mark: Some(Box::new(mark)),
            });
        }
    }
    Ok(found)
}

/// The wished size of a volume in bytes, rounded up to whole sectors; 0 is "as its source".
pub fn wished_size(record: &Record, unit: u64) -> Result<u64> {
    let size = record.volume().map_or(0, |volume| volume.size_bytes);
    let rounded = size.checked_next_multiple_of(unit);
    match rounded.filter(|size| *size <= i64::MAX as u64) {
        Some(0) if record.source().is_none() => Err(invalid(
            "ftruncate",
            format!("{}: it has no size", record.title()),
        )),
        Some(size) => Ok(size),
        None => {
            let message = format!("{}: {size} bytes are too many for a file", record.title());
            Err(invalid("ftruncate", message))
        }
    }
}
