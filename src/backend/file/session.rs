//! One worker's way to the files: what each step does.

use super::copy::Copy;
use super::entry::{
    Entry, Look, Mark, Spot, TORN, directory_name, marked, source_name, wished_size,
};
use super::errors::{cancelled, fail, fail_io, foreign, gone, invalid, unreachable};
use super::holders::{Of, holders};
use super::import::open_import;
use super::lease::{Against, Lease};
use super::root::{Kind, Root, sync};
use super::{SECTOR_BYTES, Shared, failpoint};
use crate::backend::{
    Ctl, Error, Found, Marked, Reclaimed, Result, Retired, Session, SnapshotState, VolumeState,
};
use crate::model::{ErrorKind, Known, ObjectId, Place, Record, Source, Step, Uid};
use rustix::fs::{OFlags, StatVfsMountFlags};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;

/// A large image is freed in at most about so many pieces, each with a report.
const RECLAIM_PIECES: u64 = 1024;
/// And in no smaller ones.
const RECLAIM_PIECE_MIN_BYTES: u64 = 64 << 20;

pub struct FileSession {
    shared: Arc<Shared>,
    domain: String,
    roots: Vec<String>,
}

/// Where a new image's bytes come from.
struct Origin {
    file: File,
    path: String,
    frozen: bool,
}

impl FileSession {
    pub fn new(shared: Arc<Shared>, domain: String, roots: Vec<String>) -> FileSession {
        FileSession {
            shared,
            domain,
            roots,
        }
    }

    fn instance(&self) -> &str {
        &self.shared.config.instance
    }

    fn open(&self, place: &Place) -> Result<Root> {
        if !self.roots.contains(&place.root) {
            let (root, domain) = (&place.root, &self.domain);
            let message = format!("root {root} is not one of domain {domain}");
            return Err(invalid("open", message));
        }
        self.shared.open(&place.root, place.identity.as_deref())
    }

    fn look(&self, spot: &Spot<'_>, uid: Uid) -> Result<Look> {
        spot.look(uid, self.instance())
    }

    /// Looks at the place of an object, and says no if that isn't its own.
    fn look_own(&self, root: &Root, record: &Record) -> Result<Option<Entry>> {
        let place = Spot::place(root, record);
        match self.look(&place, record.id.uid())? {
            Look::Ours(entry) => Ok(Some(entry)),
            Look::Nothing => Ok(None),
            Look::Foreign(whose) => Err(foreign(&whose)),
            // A look found this name free before our first create: our own remnant.
            Look::Unmarked if record.known == Known::Free => {
                place.remove()?;
                Ok(None)
            }
            Look::Unmarked => Err(foreign(&format!("{} carries no mark", place.path()))),
        }
    }

    /// The same for what is to go: whatever has our name where we never made anything stays.
    fn look_to_retire(&self, root: &Root, record: &Record) -> Result<Option<Entry>> {
        match self.look_own(root, record) {
            Err(error)
                if error.kind == ErrorKind::AlreadyExists
                    && matches!(record.known, Known::Nothing | Known::Free) =>
            {
                Ok(None)
            }
            other => other,
        }
    }

    /// Makes a new image under `tmp`, fills it, and puts it in its place.
    fn make(&self, root: &Root, record: &Record, ctl: &dyn Ctl) -> Result<Entry> {
        let tmp = Spot::tmp(root, record);
        // What a killed predecessor left: nobody else acts on this uid.
        tmp.remove()?;
        let entry = tmp.make(&Mark::new(root, record, self.instance()))?;
        let filled = self.fill(root, &entry, record, ctl);
        if let Err(error) = filled {
            drop(entry);
            // What can't be removed now is removed by the next attempt.
            let _ = tmp.remove();
            return Err(error);
        }
        sync(&entry.directory, &entry.path)?;
        failpoint::at("make.synced");
        let place = Spot::place(root, record);
        tmp.rename(&place, "make.renamed")?;
        Ok(Entry {
            path: place.path(),
            ..entry
        })
    }

    fn fill(&self, root: &Root, entry: &Entry, record: &Record, ctl: &dyn Ctl) -> Result<()> {
        let origin = match record.id {
            ObjectId::Snapshot(_) => Some(self.origin_of_snapshot(root, record)?),
            ObjectId::Volume(_) => self.origin_of_volume(record)?,
        };
        let image = entry.make_image()?;
        let mut copied = 0;
        if let Some(origin) = &origin {
            let copy = Copy {
                record,
                from: &origin.file,
                source: &origin.path,
                to: &image,
                ctl,
                frozen: origin.frozen,
            };
            copied = copy.run()?;
        }
        if let ObjectId::Volume(_) = record.id {
            resize(&image, record, copied)?;
        }
        failpoint::at("make.filled");
        // Half of it: there, and not in its place yet.
        if ctl.progress(1, 2).is_break() {
            return Err(cancelled(record, "create"));
        }
        image
            .sync_all()
            .map_err(|error| fail_io(&error, "fsync", &entry.image_path()))
    }

    fn origin_of_volume(&self, record: &Record) -> Result<Option<Origin>> {
        let Some(source) = record.source() else {
            return Ok(None);
        };
        let origin = match source {
            Source::File { path, format } => Origin {
                file: open_import(record, &self.shared.config.import_dirs, path, *format)?,
                path: path.clone(),
                frozen: true,
            },
            Source::Snapshot { place, .. } => self.origin_of_ours(record, source, place, true)?,
            Source::Volume { place, .. } => self.origin_of_ours(record, source, place, false)?,
        };
        let wished = wished_size(record, SECTOR_BYTES)?;
        let stat = origin.file.metadata();
        let stat = stat.map_err(|error| fail_io(&error, "fstat", &origin.path))?;
        if wished != 0 && wished < stat.len() {
            let message = format!(
                "{}: {wished} bytes are less than the {} of {}",
                record.title(),
                stat.len(),
                origin.path
            );
            return Err(invalid("ftruncate", message));
        }
        Ok(Some(origin))
    }

    fn origin_of_ours(
        &self,
        record: &Record,
        source: &Source,
        place: &Place,
        frozen: bool,
    ) -> Result<Origin> {
        let root = self.open(place)?;
        let (kind, name, uid) =
            source_name(source).ok_or_else(|| gone(record, "its source has no image"))?;
        self.open_source(record, &Spot::new(&root, kind, name), uid, frozen)
    }

    fn origin_of_snapshot(&self, root: &Root, record: &Record) -> Result<Origin> {
        let name = directory_name(&record.born, record.image);
        let spot = Spot::new(root, Kind::Volumes, name);
        self.open_source(record, &spot, record.image, false)
    }

    fn open_source(
        &self,
        record: &Record,
        spot: &Spot<'_>,
        uid: Uid,
        frozen: bool,
    ) -> Result<Origin> {
        let missing = || gone(record, &format!("its source {} is not there", spot.path()));
        let entry = match self.look(spot, uid)? {
            Look::Ours(entry) => entry,
            Look::Foreign(whose) => return Err(gone(record, &whose)),
            Look::Nothing | Look::Unmarked => return Err(missing()),
        };
        Ok(Origin {
            // A lease against writers is only given on a file that is open for reading only.
            file: entry.image(OFlags::RDONLY)?.ok_or_else(missing)?,
            path: entry.image_path(),
            frozen,
        })
    }

    /// Brings a volume that is there to the record's size and mark.
    fn update(&self, root: &Root, record: &Record, entry: &mut Entry) -> Result<VolumeState> {
        let wished = wished_size(record, SECTOR_BYTES)?;
        let image = entry.image(OFlags::RDWR)?;
        let image = image.ok_or_else(|| gone(record, "its image file was removed"))?;
        let grown = grow(&image, record, wished)?;
        if grown {
            failpoint::at("update.grown");
            image
                .sync_all()
                .map_err(|error| fail_io(&error, "fsync", &entry.image_path()))?;
        }
        let marked = self.refresh_mark(root, entry, record)?;
        // An earlier process may have died between its rename and its fsync.
        Spot::place(root, record).settle()?;
        state(entry, root, record, grown || marked)
    }

    /// Writes the record into the mark if it has changed since.
    fn refresh_mark(&self, root: &Root, entry: &mut Entry, record: &Record) -> Result<bool> {
        let mark = Mark::new(root, record, self.instance());
        let same = entry.mark.as_ref().is_some_and(|old| {
            old.generation == mark.generation
                && old.name == mark.name
                && old.record.place == mark.record.place
                && old.record.labels == mark.record.labels
        });
        if !same {
            entry.write_mark(mark)?;
        }
        Ok(!same)
    }

    /// Frees what is left of a torn image, from its end, in pieces.
    fn shrink(&self, entry: &Entry, record: &Record, ctl: &dyn Ctl) -> Result<()> {
        let Some(image) = entry.torn()? else {
            return Ok(());
        };
        let path = format!("{}/{TORN}", entry.path);
        let stat = image.metadata();
        let total = stat.map_err(|error| fail_io(&error, "fstat", &path))?.len();
        let piece = (total / RECLAIM_PIECES).max(RECLAIM_PIECE_MIN_BYTES);
        let mut left = total;
        while left > 0 {
            if ctl.cancelled() {
                return Err(cancelled(record, "reclaim"));
            }
            left = left.saturating_sub(piece);
            image
                .set_len(left)
                .map_err(|error| fail_io(&error, "ftruncate", &path))?;
            failpoint::at("reclaim.truncated");
            if ctl.progress(total - left, total).is_break() {
                return Err(cancelled(record, "reclaim"));
            }
        }
        Ok(())
    }

    fn survey_root(&self, path: &str, found: &mut Vec<Marked>) -> Result<()> {
        let root = self.shared.find(path)?;
        let kinds = [
            (Kind::Volumes, Known::Live),
            (Kind::Snapshots, Known::Live),
            (Kind::Trash, Known::Trashed),
            (Kind::Tmp, Known::Free),
        ];
        for (kind, known) in kinds {
            for entry in marked(&root, kind)? {
                let state = entry.state(&root, false)?.unwrap_or_default();
                let Some(mark) = entry.mark else { continue };
                found.push(Marked {
                    record: mark.record,
                    known,
                    state,
                    instance: mark.instance,
                });
            }
        }
        Ok(())
    }
}

impl Session for FileSession {
    fn ensure_volume(&mut self, step: Step, record: &Record, ctl: &dyn Ctl) -> Result<VolumeState> {
        if step == Step::Encrypt {
            let message = format!("{}: files can't be encrypted", record.title());
            return Err(invalid("encrypt", message));
        }
        let root = self.open(&record.place)?;
        let never_made = matches!(record.known, Known::Nothing | Known::Free);
        if let Some(mut entry) = self.look_own(&root, record)? {
            return self.update(&root, record, &mut entry);
        }
        if let Look::Ours(_) = self.look(&Spot::trash(&root, record), record.id.uid())? {
            return Err(gone(record, "it is in the trash; restore it first"));
        }
        if step == Step::Update || !never_made {
            // An empty image in its place would hide the loss.
            return Err(gone(record, "its image is not there any more"));
        }
        let entry = self.make(&root, record, ctl)?;
        state(&entry, &root, record, true)
    }

    fn ensure_snapshot(&mut self, record: &Record, ctl: &dyn Ctl) -> Result<SnapshotState> {
        let root = self.open(&record.place)?;
        let (entry, did) = match self.look_own(&root, record)? {
            Some(entry) => {
                Spot::place(&root, record).settle()?;
                (entry, false)
            }
            None => (self.make(&root, record, ctl)?, true),
        };
        let state = state(&entry, &root, record, did)?;
        Ok(SnapshotState {
            size_bytes: state.size_bytes,
            identity: state.identity,
            did,
        })
    }

    fn retire_volume(&mut self, record: &Record, _ctl: &dyn Ctl) -> Result<Retired> {
        let root = self.open(&record.place)?;
        let trash = Spot::trash(&root, record);
        let found = self.look_to_retire(&root, record)?;
        // A half-made one leaves no trash entry.
        Spot::tmp(&root, record).remove()?;
        let place = Spot::place(&root, record);
        match (found, self.look(&trash, record.id.uid())?) {
            (Some(_), Look::Ours(_)) => Err(foreign(&format!("{} is taken", trash.path()))),
            (Some(entry), _) if entry.image(OFlags::RDONLY)?.is_none() => {
                drop(entry);
                place.remove()?;
                Ok(Retired::Gone)
            }
            (Some(_), _) => {
                place.rename(&trash, "trash.renamed")?;
                Ok(Retired::Trashed { image_id: None })
            }
            (None, Look::Ours(_)) => {
                // An earlier process may have died between its rename and its fsync.
                trash.settle()?;
                place.settle()?;
                Ok(Retired::Trashed { image_id: None })
            }
            (None, Look::Nothing | Look::Unmarked | Look::Foreign(_)) => {
                place.settle()?;
                Ok(Retired::Gone)
            }
        }
    }

    fn retire_snapshot(&mut self, record: &Record, _ctl: &dyn Ctl) -> Result<Retired> {
        let root = self.open(&record.place)?;
        let tmp = Spot::tmp(&root, record);
        tmp.remove()?;
        if self.look_to_retire(&root, record)?.is_some() {
            // In one piece out of sight, then in pieces.
            Spot::place(&root, record).rename(&tmp, "snapshot.renamed")?;
            tmp.remove()?;
        } else {
            Spot::place(&root, record).settle()?;
        }
        Ok(Retired::Gone)
    }

    fn reclaim(&mut self, record: &Record, ctl: &dyn Ctl) -> Result<Reclaimed> {
        let root = self.open(&record.place)?;
        let trash = Spot::trash(&root, record);
        let entry = match self
            .look(&trash, record.id.uid())
            .map_err(Error::untouched)?
        {
            Look::Ours(entry) => entry,
            Look::Nothing => {
                if let Look::Ours(_) = self.look(&Spot::place(&root, record), record.id.uid())? {
                    let message =
                        format!("{}: it is in its place, not in the trash", record.title());
                    return Err(invalid("unlink", message));
                }
                trash.settle()?;
                return Ok(Reclaimed::Done);
            }
            Look::Foreign(whose) => return Err(foreign(&whose)),
            // The mark goes last, then the directory: this is what a crash between leaves. Its
            // name is our uid, and whatever else may be in it keeps it there.
            Look::Unmarked => {
                trash.remove()?;
                return Ok(Reclaimed::Done);
            }
        };
        if ctl.cancelled() {
            let error = cancelled(record, "reclaim");
            let whole = entry.image(OFlags::RDONLY)?.is_some();
            return Err(if whole { error.untouched() } else { error });
        }
        refuse_in_use(&entry, record)?;
        entry.tear()?;
        self.shrink(&entry, record, ctl)?;
        drop(entry);
        trash.remove()?;
        Ok(Reclaimed::Done)
    }

    fn restore(&mut self, record: &Record, _ctl: &dyn Ctl) -> Result<VolumeState> {
        let root = self.open(&record.place)?;
        if let Some(mut entry) = self.look_own(&root, record)? {
            self.refresh_mark(&root, &mut entry, record)?;
            Spot::place(&root, record).settle()?;
            Spot::trash(&root, record).settle()?;
            return state(&entry, &root, record, false);
        }
        let trash = Spot::trash(&root, record);
        let Look::Ours(mut entry) = self.look(&trash, record.id.uid())? else {
            return Err(gone(record, "it is not in the trash any more"));
        };
        if entry.image(OFlags::RDONLY)?.is_none() {
            return Err(gone(record, "part of its space is freed already"));
        }
        let place = Spot::place(&root, record);
        trash.rename(&place, "restore.renamed")?;
        entry.path = place.path();
        self.refresh_mark(&root, &mut entry, record)?;
        state(&entry, &root, record, true)
    }

    fn flatten(&mut self, record: &Record, _ctl: &dyn Ctl) -> Result<VolumeState> {
        // Files share blocks, not fates: there is nothing to do.
        let root = self.open(&record.place)?;
        let entry = match self.look_own(&root, record)? {
            Some(entry) => entry,
            None => match self.look(&Spot::trash(&root, record), record.id.uid())? {
                Look::Ours(entry) => entry,
                _ => return Err(gone(record, "it is not there")),
            },
        };
        state(&entry, &root, record, false)
    }

    fn inspect(&mut self, record: &Record, _ctl: &dyn Ctl) -> Result<Option<Found>> {
        let root = self.open(&record.place)?;
        let uid = record.id.uid();
        let is_volume = matches!(record.id, ObjectId::Volume(_));
        let other = match self.look(&Spot::place(&root, record), uid)? {
            Look::Ours(entry) => {
                let Some(state) = entry.state(&root, false)? else {
                    return Ok(Some(Found::Half));
                };
                return Ok(Some(if is_volume {
                    Found::Volume(state)
                } else {
                    Found::Snapshot(SnapshotState {
                        size_bytes: state.size_bytes,
                        identity: state.identity,
                        did: false,
                    })
                }));
            }
            Look::Nothing => None,
            Look::Unmarked => Some(Found::Unmarked),
            Look::Foreign(whose) => Some(Found::Foreign(whose)),
        };
        if let Look::Ours(entry) = self.look(&Spot::trash(&root, record), uid)? {
            return Ok(Some(Found::Trashed {
                image_id: None,
                whole: entry.image(OFlags::RDONLY)?.is_some(),
            }));
        }
        if other.is_none() {
            let tmp = self.look(&Spot::tmp(&root, record), uid)?;
            return Ok((!matches!(tmp, Look::Nothing)).then_some(Found::Half));
        }
        Ok(other)
    }

    fn probe(&mut self, _ctl: &dyn Ctl) -> Result<BTreeMap<String, String>> {
        let mut identities = BTreeMap::new();
        for path in &self.roots {
            let root = self.shared.open(path, None)?;
            root.tidy();
            let stat = rustix::fs::fstatvfs(&root.fd)
                .map_err(|errno| fail(errno, "statvfs", &format!("root {path}")))?;
            if stat.f_flag.contains(StatVfsMountFlags::RDONLY) {
                return Err(unreachable(format!(
                    "root {path} is mounted read-only; look for disk errors, then mount it again"
                )));
            }
            identities.insert(path.clone(), root.identity);
        }
        Ok(identities)
    }

    fn survey(&mut self, _ctl: &dyn Ctl) -> Result<Vec<Marked>> {
        let mut found = Vec::new();
        for root in &self.roots {
            self.survey_root(root, &mut found)?;
        }
        Ok(found)
    }
}

fn state(entry: &Entry, root: &Root, record: &Record, did: bool) -> Result<VolumeState> {
    let state = entry.state(root, did)?;
    state.ok_or_else(|| gone(record, "its image file was removed"))
}

/// Gives a new image its size: the wished one, or that of what it was copied from.
fn resize(image: &File, record: &Record, copied: u64) -> Result<()> {
    let wished = match wished_size(record, SECTOR_BYTES)? {
        0 => copied.next_multiple_of(SECTOR_BYTES).max(SECTOR_BYTES),
        size => size,
    };
    grow(image, record, wished).map(|_| ())
}

/// Makes a file larger if it is smaller. Never the other way.
fn grow(image: &File, record: &Record, wished: u64) -> Result<bool> {
    let title = record.title();
    let size = || {
        let stat = image.metadata();
        stat.map(|stat| stat.len())
            .map_err(|error| fail_io(&error, "fstat", &title))
    };
    if size()? >= wished {
        return Ok(false);
    }
    image
        .set_len(wished)
        .map_err(|error| fail_io(&error, "ftruncate", &title))?;
    let now = size()?;
    if now != wished {
        let message = format!("{title}: its file has {now} bytes after it was given {wished}");
        return Err(Error::new(ErrorKind::Transient, "ftruncate", message));
    }
    Ok(true)
}

/// A trashed image that a guest or a loop device still has open is not freed under it.
fn refuse_in_use(entry: &Entry, record: &Record) -> Result<()> {
    let Some(image) = entry.image(OFlags::RDONLY).map_err(Error::untouched)? else {
        return Ok(());
    };
    let by = match Lease::take(&image, Against::Everybody) {
        Ok(_) => return Ok(()),
        Err(Errno::AGAIN) => holders(&image, Of::Everybody),
        // No leases here: what /proc shows has to do.
        Err(_) => match holders(&image, Of::Everybody) {
            none if none.is_empty() => return Ok(()),
            by => by,
        },
    };
    let message = format!("{}: somebody has its image open", record.title());
    Err(
        Error::of_errno(Errno::BUSY.raw_os_error(), "F_SETLEASE", message)
            .held_by(by)
            .untouched(),
    )
}
