//! The calls of a session: look what is there, do what is missing.
//!
//! An object is made under `tmp`, renamed to its place when it is whole, renamed to the trash when
//! it is deleted. So each name is whole or not there, and a call that was cut off anywhere is
//! simply made again.

use super::copy::Copy;
use super::entry::{Entry, Look, Mark, Spot, directory_name, marked, source_name, wished_size};
use super::errors::{cancelled, fail_io, foreign, gone};
use super::holders::{Of, holders};
use super::import::open_import;
use super::lease::{Against, Lease};
use super::root::{Kind, Root, sync};
use super::{FileBackend, SIZE_UNIT, failpoint};
use crate::backend::{
    Ctl, Error, Found, Marked, Reclaimed, Result, Retired, Session, SnapshotState, VolumeState,
};
use crate::model::{ErrorKind, Known, ObjectId, Record, Source, Step};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::fs::File;

/// How much of a trashed image is given back to the file system at once.
const RECLAIM_BYTES: u64 = 1 << 30;

/// A way to the files of one domain.
#[derive(Debug)]
pub struct FileSession {
    backend: FileBackend,
    domain: String,
}

impl FileSession {
    pub fn new(backend: FileBackend, domain: &str) -> FileSession {
        FileSession {
            backend,
            domain: domain.to_owned(),
        }
    }

    fn instance(&self) -> &str {
        &self.backend.config().instance
    }

    fn root_of(&self, record: &Record) -> Result<Root> {
        self.backend
            .root(&record.place.root, record.place.identity.as_deref())
    }

    fn look(&self, spot: &Spot<'_>, record: &Record) -> Result<Look> {
        spot.look(record.id.uid(), self.instance())
    }

    /// What is in the place of an object, if it is that object. What is no longer marked under the
    /// name that a look had found free is our own remnant, and goes.
    fn in_place(&self, root: &Root, record: &Record) -> Result<Option<Entry>> {
        let place = Spot::place(root, record);
        match self.look(&place, record)? {
            Look::Ours(entry) => Ok(Some(*entry)),
            Look::Nothing => Ok(None),
            Look::Unmarked if record.known == Known::Free => {
                place.remove()?;
                Ok(None)
            }
            Look::Unmarked => Err(foreign(&format!("{} has no mark", place.path()))),
            Look::Foreign(whose) => Err(foreign(&whose)),
        }
    }

    /// Removes what an attempt that was cut off has left of an object that is in no place yet.
    fn sweep(&self, root: &Root, record: &Record) -> Result<bool> {
        let tmp = Spot::tmp(root, record);
        match self.look(&tmp, record)? {
            Look::Nothing => Ok(false),
            // Its name is our uid, and only we make names here.
            Look::Ours(_) | Look::Unmarked => tmp.remove(),
            Look::Foreign(whose) => Err(foreign(&whose)),
        }
    }

    fn state(&self, root: &Root, entry: &Entry, did: bool) -> Result<VolumeState> {
        entry.state(root, did)?.ok_or_else(|| {
            let message = format!("{} is missing in its own directory", entry.image_path());
            Error::of_errno(2, "open", message).untouched()
        })
    }

    /// Makes a volume or a snapshot: under `tmp` first, whole, then in its place.
    fn make(
        &self,
        root: &Root,
        record: &Record,
        point: &'static str,
        fill: impl FnOnce(&File) -> Result<()>,
    ) -> Result<()> {
        self.sweep(root, record)?;
        let tmp = Spot::tmp(root, record);
        let entry = tmp.make(&Mark::new(record, self.instance()))?;
        let image = entry.make_image()?;
        fill(&image)?;
        failpoint::at("make.filled");
        let synced = image.sync_all();
        synced.map_err(|error| fail_io(&error, "fsync", &entry.image_path()))?;
        failpoint::at("make.synced");
        sync(&entry.directory, &entry.path)?;
        tmp.rename(&Spot::place(root, record), point)
    }

    fn fill_volume(&self, record: &Record, image: &File, ctl: &dyn Ctl) -> Result<()> {
        let wished = wished_size(record, SIZE_UNIT)?;
        let copied = match record.source() {
            None => 0,
            Some(Source::File { path, format }) => {
                let allowed = &self.backend.config().import_dirs;
                let from = open_import(record, allowed, path, *format)?;
                copy(record, &from, path, image, ctl, true)?
            }
            Some(source) => self.copy_source(record, source, image, ctl)?,
        };
        let size = wished.max(copied.next_multiple_of(SIZE_UNIT));
        let grown = image.set_len(size);
        grown.map_err(|error| fail_io(&error, "ftruncate", &record.title()))
    }

    fn copy_source(
        &self,
        record: &Record,
        source: &Source,
        image: &File,
        ctl: &dyn Ctl,
    ) -> Result<u64> {
        let (Source::Snapshot { place, .. } | Source::Volume { place, .. }) = source else {
            return Err(gone(record, "it has no source to copy"));
        };
        let (kind, name, uid) =
            source_name(source).ok_or_else(|| gone(record, "its source has no directory"))?;
        let root = self.backend.root(&place.root, place.identity.as_deref())?;
        let spot = Spot::new(&root, kind, name);
        let Look::Ours(entry) = spot.look(uid, self.instance())? else {
            return Err(gone(
                record,
                &format!("its source {} is not there", spot.path()),
            ));
        };
        let from = entry.image(OFlags::RDONLY)?;
        let from = from.ok_or_else(|| gone(record, "the image of its source is not there"))?;
        let frozen = kind == Kind::Snapshots;
        copy(record, &from, &entry.image_path(), image, ctl, frozen)
    }

    /// Grows an image that is there and writes its mark, if anything of it differs.
    fn update(&self, root: &Root, record: &Record, mut entry: Entry) -> Result<VolumeState> {
        let wished = wished_size(record, SIZE_UNIT)?;
        let state = self.state(root, &entry, false)?;
        let mut did = false;
        if state.size_bytes < wished {
            let image = entry.image(OFlags::RDWR)?;
            let image = image.ok_or_else(|| gone(record, "its image is not there"))?;
            let grown = image.set_len(wished).and_then(|()| image.sync_all());
            grown.map_err(|error| fail_io(&error, "ftruncate", &entry.image_path()))?;
            failpoint::at("update.grown");
            did = true;
        }
        let marked = entry.mark.as_ref();
        let same = |mark: &Mark| mark.generation == record.generation && mark.name == record.name;
        if !marked.is_some_and(same) {
            entry.write_mark(Mark::new(record, self.instance()))?;
            did = true;
        }
        self.state(root, &entry, did)
    }

    /// Gives the space of a torn image back, piece by piece.
    fn shrink(&self, record: &Record, entry: &Entry, ctl: &dyn Ctl) -> Result<()> {
        let Some(image) = entry.torn()? else {
            return Ok(());
        };
        let failed = |error: std::io::Error| fail_io(&error, "ftruncate", &entry.path);
        let total = image.metadata().map_err(failed)?.len();
        let mut left = total;
        while left > 0 {
            if ctl.cancelled() || ctl.progress(total - left, total).is_break() {
                return Err(cancelled(record, "reclaim"));
            }
            left = left.saturating_sub(RECLAIM_BYTES);
            image.set_len(left).map_err(failed)?;
            failpoint::at("reclaim.truncated");
        }
        Ok(())
    }
}

fn copy(
    record: &Record,
    from: &File,
    source: &str,
    to: &File,
    ctl: &dyn Ctl,
    frozen: bool,
) -> Result<u64> {
    let copy = Copy {
        record,
        from,
        source,
        to,
        ctl,
        frozen,
    };
    copy.run()
}

/// A trashed image that somebody still has open (a loop device, a guest) is left whole.
fn not_in_use(record: &Record, entry: &Entry) -> Result<()> {
    let image = entry.image(OFlags::RDONLY).map_err(Error::untouched)?;
    let Some(image) = image else { return Ok(()) };
    match Lease::take(&image, Against::Everybody) {
        Err(Errno::AGAIN | Errno::BUSY) => {
            let by = holders(&image, Of::Everybody);
            let message = format!("{} is still open: {}", record.title(), by.join(", "));
            let error = Error::of_errno(16, "F_SETLEASE", message);
            Err(error.held_by(by).untouched())
        }
        // No lease on this file system: it can't be told, and unlinking hurts no open file; its
        // space is freed when it is closed.
        Ok(_) | Err(_) => Ok(()),
    }
}

impl Session for FileSession {
    fn ensure_volume(&mut self, step: Step, record: &Record, ctl: &dyn Ctl) -> Result<VolumeState> {
        let root = self.root_of(record)?;
        if let Some(entry) = self.in_place(&root, record)? {
            Spot::place(&root, record).settle()?;
            return self.update(&root, record, entry);
        }
        if !matches!(step, Step::Create | Step::Import) {
            return Err(gone(record, "its directory is not there"));
        }
        self.make(&root, record, "make.renamed", |image| {
            self.fill_volume(record, image, ctl)
        })?;
        match self.in_place(&root, record)? {
            Some(entry) => self.state(&root, &entry, true),
            None => Err(gone(record, "it vanished while it was made")),
        }
    }

    fn ensure_snapshot(&mut self, record: &Record, ctl: &dyn Ctl) -> Result<SnapshotState> {
        let root = self.root_of(record)?;
        let mut did = false;
        if self.in_place(&root, record)?.is_none() {
            let name = directory_name(&record.born, record.image);
            let volume = Spot::new(&root, Kind::Volumes, name);
            let Look::Ours(source) = volume.look(record.image, self.instance())? else {
                return Err(gone(record, "its volume is not there"));
            };
            let from = source.image(OFlags::RDONLY)?;
            let from = from.ok_or_else(|| gone(record, "the image of its volume is not there"))?;
            self.make(&root, record, "snapshot.renamed", |image| {
                copy(record, &from, &source.image_path(), image, ctl, false).map(drop)
            })?;
            did = true;
        }
        let place = Spot::place(&root, record);
        place.settle()?;
        let Some(entry) = self.in_place(&root, record)? else {
            return Err(gone(record, "it vanished while it was made"));
        };
        let size_bytes = self.state(&root, &entry, did)?.size_bytes;
        Ok(SnapshotState {
            size_bytes,
            identity: Some(root.identity.clone()),
            did,
        })
    }

    fn retire_volume(&mut self, record: &Record, _ctl: &dyn Ctl) -> Result<Retired> {
        let root = self.root_of(record)?;
        let (place, trash) = (Spot::place(&root, record), Spot::trash(&root, record));
        let ours = match self.look(&place, record)? {
            Look::Ours(_) => true,
            Look::Unmarked if record.known == Known::Free => {
                place.remove()?;
                false
            }
            // Somebody else's under our name: nothing of ours is there.
            Look::Nothing | Look::Unmarked | Look::Foreign(_) => false,
        };
        if ours {
            place.rename(&trash, "trash.renamed")?;
        }
        self.sweep(&root, record)?;
        match self.look(&trash, record)? {
            Look::Ours(_) | Look::Unmarked => {
                trash.settle()?;
                place.settle()?;
                Ok(Retired::Trashed { image_id: None })
            }
            Look::Nothing | Look::Foreign(_) => Ok(Retired::Gone),
        }
    }

    fn retire_snapshot(&mut self, record: &Record, _ctl: &dyn Ctl) -> Result<Retired> {
        let root = self.root_of(record)?;
        let place = Spot::place(&root, record);
        self.sweep(&root, record)?;
        if let Look::Ours(_) = self.look(&place, record)? {
            place.rename(&Spot::tmp(&root, record), "trash.renamed")?;
            self.sweep(&root, record)?;
        }
        Ok(Retired::Gone)
    }

    fn reclaim(&mut self, record: &Record, ctl: &dyn Ctl) -> Result<Reclaimed> {
        let root = self.root_of(record).map_err(Error::untouched)?;
        let trash = Spot::trash(&root, record);
        let entry = match self.look(&trash, record).map_err(Error::untouched)? {
            Look::Ours(entry) => entry,
            // Its mark goes last, so what is left without one is the end of an earlier call.
            Look::Unmarked => {
                trash.remove()?;
                return Ok(Reclaimed::Done);
            }
            Look::Nothing => {
                if let Look::Ours(_) = self.look(&Spot::place(&root, record), record)? {
                    let message = format!("{} is in its place, not in the trash", record.title());
                    return Err(Error::new(ErrorKind::Internal, "reclaim", message).untouched());
                }
                return Ok(Reclaimed::Done);
            }
            Look::Foreign(whose) => return Err(foreign(&whose)),
        };
        if ctl.cancelled() && entry.torn()?.is_none() {
            return Err(cancelled(record, "reclaim").untouched());
        }
        not_in_use(record, &entry)?;
        entry.tear()?;
        self.shrink(record, &entry, ctl)?;
        trash.remove()?;
        Ok(Reclaimed::Done)
    }

    fn restore(&mut self, record: &Record, _ctl: &dyn Ctl) -> Result<VolumeState> {
        let root = self.root_of(record)?;
        let (place, trash) = (Spot::place(&root, record), Spot::trash(&root, record));
        if let Look::Ours(entry) = self.look(&trash, record)? {
            if entry.image(OFlags::RDONLY)?.is_none() {
                return Err(gone(record, "its image was reclaimed already"));
            }
            trash.rename(&place, "restore.renamed")?;
        }
        match self.in_place(&root, record)? {
            Some(entry) => {
                place.settle()?;
                self.state(&root, &entry, true)
            }
            None => Err(gone(record, "it is not in the trash any more")),
        }
    }

    fn flatten(&mut self, record: &Record, _ctl: &dyn Ctl) -> Result<VolumeState> {
        let root = self.root_of(record)?;
        // Files never depend on a parent.
        match self.in_place(&root, record)? {
            Some(entry) => self.state(&root, &entry, false),
            None => Err(gone(record, "its directory is not there")),
        }
    }

    fn inspect(&mut self, record: &Record, _ctl: &dyn Ctl) -> Result<Option<Found>> {
        let root = self.root_of(record)?;
        let place = Spot::place(&root, record);
        match self.look(&place, record)? {
            Look::Ours(entry) => {
                place.settle()?;
                let Some(state) = entry.state(&root, false)? else {
                    return Ok(Some(Found::Half));
                };
                return Ok(Some(match record.id {
                    ObjectId::Volume(_) => Found::Volume(state),
                    ObjectId::Snapshot(_) => Found::Snapshot(SnapshotState {
                        size_bytes: state.size_bytes,
                        identity: state.identity,
                        did: false,
                    }),
                }));
            }
            Look::Unmarked => return Ok(Some(Found::Unmarked)),
            Look::Foreign(whose) => return Ok(Some(Found::Foreign(whose))),
            Look::Nothing => {}
        }
        if let ObjectId::Volume(_) = record.id
            && let Look::Ours(entry) = self.look(&Spot::trash(&root, record), record)?
        {
            let whole = entry.image(OFlags::RDONLY)?.is_some();
            return Ok(Some(Found::Trashed {
                image_id: None,
                whole,
            }));
        }
        let half = !matches!(self.look(&Spot::tmp(&root, record), record)?, Look::Nothing);
        Ok((half && matches!(record.id, ObjectId::Volume(_))).then_some(Found::Half))
    }

    fn probe(&mut self, _ctl: &dyn Ctl) -> Result<BTreeMap<String, String>> {
        let roots = self.backend.config().domains.get(&self.domain);
        let mut found = BTreeMap::new();
        for path in roots.into_iter().flatten() {
            let root = self.backend.root(path, None)?;
            found.insert(path.clone(), root.identity);
        }
        Ok(found)
    }

    fn survey(&mut self, _ctl: &dyn Ctl) -> Result<Vec<Marked>> {
        let roots = self.backend.config().domains.get(&self.domain);
        let mut all = Vec::new();
        for path in roots.into_iter().flatten() {
            let root = self.backend.root(path, None)?;
            for (kind, known) in [
                (Kind::Volumes, Known::Live),
                (Kind::Snapshots, Known::Live),
                (Kind::Trash, Known::Trashed),
            ] {
                for entry in marked(&root, kind)? {
                    let state = entry.state(&root, false)?.unwrap_or_default();
                    if let Some(mark) = entry.mark {
                        all.push(Marked {
                            record: mark.record,
                            known,
                            state,
                            instance: mark.instance,
                        });
                    }
                }
            }
        }
        Ok(all)
    }
}
