//! Taking volumes and snapshots away, and bringing them back.
//!
//! Out of sight in milliseconds: the trash, or, with snapshots, a mark. Space is freed by
//! `reclaim` alone. "Gone" is said only after name, id and trash were looked at.

use super::cluster::{EBUSY, EINVAL, ENOTEMPTY, EPERM};
use super::image::{self, Image, Mode};
use super::look::{self, About, Header, Spot};
use super::mark::{self, Owner};
use super::volume::{Ours, shown_bytes};
use super::wire::Snap;
use super::{Desk, RbdSession};
use crate::backend::{Ctl, Error, Found, Reclaimed, Result, Retired, SnapshotState, VolumeState};
use crate::model::{ErrorKind, Known, Millis, ObjectId, Record};

impl RbdSession {
    pub(super) fn retire(&self, record: &Record) -> Result<Retired> {
        let desk = self.desk(record)?;
        match desk.find(record)? {
            Spot::Nowhere => Ok(Retired::Gone),
            Spot::Trash { entry, .. } => Ok(Retired::Trashed {
                image_id: Some(entry.id),
            }),
            // Only its name reaches what is left of it, and the name is ours by its uid.
            Spot::Lost { id, header } => match self.owner(&header, &id, record) {
                Owner::Ours(_) => self.remove_remnant(&desk),
                _ => Err(desk.foreign("it has no mark of ours")),
            },
            Spot::Named { header: None, .. } if record.known == Known::Nothing => {
                Err(desk.foreign("it is half made, and not by us"))
            }
            Spot::Named { header: None, .. } => self.remove_remnant(&desk),
            Spot::Named {
                id,
                name,
                header: Some(header),
            } => self.retire_named(&desk, record, id, name, header),
        }
    }

    fn owner(&self, header: &Header, id: &str, record: &Record) -> Owner {
        header.owner(id, &self.config().instance, Some(record.image))
    }

    fn remove_remnant(&self, desk: &Desk) -> Result<Retired> {
        match image::remove(&desk.io, &desk.name) {
            Err(fail) if !fail.is_gone() => Err(fail.about(format!("remnant {}", desk.title))),
            _ => {
                desk.check_pool()?;
                Ok(Retired::Gone)
            }
        }
    }

    fn retire_named(
        &self,
        desk: &Desk,
        record: &Record,
        id: String,
        name: String,
        header: Header,
    ) -> Result<Retired> {
        let mark = match self.owner(&header, &id, record) {
            Owner::Ours(mark) => mark,
            // Made after we saw the name free, and killed before it was marked: empty, or a
            // clone that nobody has seen.
            Owner::Unmarked if record.known == Known::Free => return self.remove_remnant(desk),
            Owner::Unmarked => return Err(desk.foreign("it has no mark")),
            Owner::Foreign(words) => return Err(desk.foreign(&words)),
        };
        let snaps = look::snapshots(&desk.io, &id, &header.snap_ids).about(&desk.title)?;
        let held = self.user_snaps(&snaps);
        let mut ours = Ours {
            id,
            name,
            header,
            mark,
        };
        if held.is_empty() {
            self.move_to_trash(desk, &ours)?;
            return Ok(Retired::Trashed {
                image_id: Some(ours.id),
            });
        }
        if !ours.mark.carrier {
            ours.mark.carrier = true;
            self.write_mark(desk, &ours)?;
        }
        Ok(Retired::Carrier { snapshots: held })
    }

    /// librbd first adds the trash entry, then removes the name. A call that was killed, or that a
    /// full pool refused, may have done the first only; what counts is where the image is.
    fn move_to_trash(&self, desk: &Desk, ours: &Ours) -> Result<()> {
        let Err(fail) = image::trash_move(&desk.io, &ours.name) else {
            return Ok(());
        };
        if !fail.is_gone() {
            return Err(fail.about(&desk.title));
        }
        if image::trash_get(&desk.io, &ours.id)
            .about(&desk.title)?
            .is_some()
        {
            // Its name may be left over; no other image can get it, because of the uid in it.
            let _ = desk.io.remove(&format!("rbd_id.{}", ours.name));
            return Ok(());
        }
        // The image was there just now. A full pool that never had a trash answers like this.
        let mut error = fail.about(&desk.title);
        error.kind = ErrorKind::Transient;
        error.message = format!(
            "{}: the pool has no trash, and none can be made while it is full; make room, or \
             raise the full ratio for a moment",
            desk.title
        );
        Err(error)
    }

    /// Snapshots that somebody may want, in words.
    fn user_snaps(&self, snaps: &[Snap]) -> Vec<String> {
        snaps
            .iter()
            .filter(|snap| {
                !snap.trashed && !mark::is_hidden_snap(&self.config().prefix, &snap.name)
            })
            .map(|snap| format!("snapshot {}", snap.name))
            .collect()
    }

    pub(super) fn remove_snapshot(&self, record: &Record) -> Result<Retired> {
        let desk = self.desk(record)?;
        let (id, header) = match desk.find(record)? {
            Spot::Nowhere | Spot::Lost { .. } => return Ok(Retired::Gone),
            Spot::Named {
                id,
                header: Some(header),
                ..
            } => (id, header),
            Spot::Trash {
                entry,
                header: Some(header),
            } => (entry.id, header),
            Spot::Named { header: None, .. } | Spot::Trash { header: None, .. } => {
                return Ok(Retired::Gone);
            }
        };
        if !matches!(self.owner(&header, &id, record), Owner::Ours(_)) {
            return Err(desk.foreign("it has no mark of ours"));
        }
        let snap = mark::snap_name(record.name.as_str(), record.id.uid());
        let snaps = look::snapshots(&desk.io, &id, &header.snap_ids).about(&desk.title)?;
        if snaps.iter().any(|s| s.name == snap && !s.trashed) {
            let image = Image::open(&desk.io, &id, Mode::Write).about(&desk.title)?;
            match image.snap_remove(&snap) {
                Err(fail) if !fail.is_gone() => {
                    return Err(fail.about(format!("snapshot {}@{snap}", desk.title)));
                }
                _ => {}
            }
        }
        let key = format!("{}{}", mark::KEY_SNAPSHOT, record.id.uid());
        look::set_metadata(&desk.io, &id, &Default::default(), &[key]).about(&desk.title)?;
        Ok(Retired::Gone)
    }

    pub(super) fn free(&self, record: &Record, ctl: &dyn Ctl) -> Result<Reclaimed> {
        let desk = self.desk(record)?;
        let spot = desk.find(record).map_err(Error::untouched)?;
        let (id, header) = match spot {
            Spot::Nowhere => return Ok(Reclaimed::Done),
            Spot::Trash { entry, header } => (entry.id, header),
            Spot::Named { .. } | Spot::Lost { .. } => {
                match self.retire(record).map_err(Error::untouched)? {
                    Retired::Gone => return Ok(Reclaimed::Done),
                    Retired::Carrier { snapshots } => {
                        return Ok(Reclaimed::Blocked { by: snapshots });
                    }
                    Retired::Trashed { image_id } => {
                        let id = image_id.unwrap_or_default();
                        let header = look::header(&desk.io, &id).about(&desk.title)?;
                        (id, header)
                    }
                }
            }
        };
        if let Some(header) = header {
            if let Some(by) = self.reclaim_blockers(&desk, record, &id, &header)? {
                return Ok(Reclaimed::Blocked { by });
            }
            if let Owner::Ours(mut mark) = self.owner(&header, &id, record) {
                mark.reclaiming = true;
                self.note(&desk, &id, &mark)?;
                return self.remove_for_good(&desk, &id, Some(mark), ctl);
            }
        }
        // Without a header nothing is left but names; the uid in its name says whose it was.
        self.remove_for_good(&desk, &id, None, ctl)
    }

    fn note(&self, desk: &Desk, id: &str, mark: &mark::Mark) -> Result<()> {
        let set = [(mark::KEY_MARK.to_owned(), mark.text())].into();
        look::set_metadata(&desk.io, id, &set, &[])
            .about(&desk.title)
            .map_err(Error::untouched)
    }

    /// Why a trashed image can't go now. Hidden snapshots are removed on the way.
    fn reclaim_blockers(
        &self,
        desk: &Desk,
        record: &Record,
        id: &str,
        header: &Header,
    ) -> Result<Option<Vec<String>>> {
        match self.owner(header, id, record) {
            Owner::Ours(_) => {}
            Owner::Unmarked => return Err(desk.foreign("it has no mark").untouched()),
            Owner::Foreign(words) => return Err(desk.foreign(&words).untouched()),
        }
        let untouched = Error::untouched;
        let mut snaps = look::snapshots(&desk.io, id, &header.snap_ids)
            .about(&desk.title)
            .map_err(untouched)?;
        let hidden: Vec<&Snap> = snaps
            .iter()
            .filter(|s| !s.trashed && mark::is_hidden_snap(&self.config().prefix, &s.name))
            .collect();
        if !hidden.is_empty() {
            let image = Image::open(&desk.io, id, Mode::Write)
                .about(&desk.title)
                .map_err(untouched)?;
            for snap in hidden {
                image
                    .snap_remove(&snap.name)
                    .about(&desk.title)
                    .map_err(untouched)?;
            }
            drop(image);
            let fresh = look::header(&desk.io, id)
                .about(&desk.title)
                .map_err(untouched)?;
            let ids = fresh.map(|header| header.snap_ids).unwrap_or_default();
            snaps = look::snapshots(&desk.io, id, &ids)
                .about(&desk.title)
                .map_err(untouched)?;
        }
        let mut by = self.user_snaps(&snaps);
        for snap in snaps.iter().filter(|snap| snap.trashed) {
            let children = look::children(&desk.io, id, snap.id, &desk.pools())
                .about(&desk.title)
                .map_err(untouched)?;
            if children.is_empty() {
                by.push(format!("snapshot {} without children", snap.id));
            }
            by.extend(children);
        }
        Ok((!by.is_empty()).then_some(by))
    }

    fn remove_for_good(
        &self,
        desk: &Desk,
        id: &str,
        mark: Option<mark::Mark>,
        ctl: &dyn Ctl,
    ) -> Result<Reclaimed> {
        let reported = image::trash_remove(&desk.io, id, ctl);
        let fail = match reported.outcome {
            Ok(()) => return Ok(Reclaimed::Done),
            Err(fail) if fail.is_gone() => {
                desk.check_pool()?;
                return Ok(Reclaimed::Done);
            }
            Err(fail) => fail,
        };
        let mut error = fail.about(&desk.title);
        if reported.begun || !matches!(fail.errno, EBUSY | ENOTEMPTY | EPERM) {
            return Err(error);
        }
        // Refused before anything was removed, so it is whole again.
        error.touched = false;
        if let Some(mut mark) = mark {
            mark.reclaiming = false;
            self.note(desk, id, &mark)?;
        }
        if fail.errno == EBUSY {
            error.blockers = look::watchers(&desk.io, id);
            if !error.blockers.is_empty() {
                let who = error.blockers.join(", ");
                error.message = format!("{}: another client has it open: {who}", desk.title);
            }
        }
        if fail.errno == EPERM
            && let Ok(Some(entry)) = image::trash_get(&desk.io, id)
            && entry.deferred_until_s > 0
        {
            error.kind = ErrorKind::NotYet;
            error.not_before = Some(Millis(entry.deferred_until_s.saturating_mul(1000)));
            error.message = format!("{}: its deferral in the trash isn't over", desk.title);
        }
        Err(error)
    }

    pub(super) fn bring_back(&self, record: &Record, ctl: &dyn Ctl) -> Result<VolumeState> {
        let desk = self.desk(record)?;
        if let Spot::Trash { entry, header } = desk.find(record)? {
            let mark = header.map(|header| self.owner(&header, &entry.id, record));
            match mark {
                Some(Owner::Ours(mark)) if !mark.reclaiming => {}
                Some(Owner::Foreign(words)) => return Err(desk.foreign(&words)),
                _ => {
                    let words = format!("{}: it isn't whole any more", desk.title);
                    return Err(Error::new(ErrorKind::Gone, "restore", words).untouched());
                }
            }
            image::trash_restore(&desk.io, &entry.id, &desk.name).about(&desk.title)?;
        }
        let ours = self.must_be_ours(&desk, record)?;
        self.update(&desk, record, ours, ctl)
    }

    pub(super) fn make_independent(&self, record: &Record, ctl: &dyn Ctl) -> Result<VolumeState> {
        let desk = self.desk(record)?;
        let (id, name, header) = match desk.find(record)? {
            Spot::Named {
                id,
                name,
                header: Some(header),
            } => (id, name, header),
            Spot::Trash {
                entry,
                header: Some(header),
            } => (entry.id, entry.name, header),
            _ => return Err(desk.vanished()),
        };
        let Owner::Ours(mark) = self.owner(&header, &id, record) else {
            return Err(desk.foreign("it has no mark of ours"));
        };
        let mut ours = Ours {
            id,
            name,
            header,
            mark,
        };
        if ours.header.parent.is_none() {
            return Ok(ours.state(&desk, false));
        }
        let image = Image::open(&desk.io, &ours.id, Mode::Write).about(&desk.title)?;
        match image.flatten(ctl) {
            Err(fail) if fail.errno != EINVAL => return Err(fail.about(&desk.title)),
            _ => {}
        }
        ours.header.parent = None;
        Ok(ours.state(&desk, true))
    }

    pub(super) fn look(&self, record: &Record) -> Result<Option<Found>> {
        let desk = self.desk(record)?;
        let spot = desk.find(record)?;
        if let ObjectId::Snapshot(uid) = record.id {
            let (id, header) = match spot {
                Spot::Named {
                    id,
                    header: Some(header),
                    ..
                } => (id, header),
                Spot::Trash {
                    entry,
                    header: Some(header),
                } => (entry.id, header),
                _ => return Ok(None),
            };
            let mark = match self.owner(&header, &id, record) {
                Owner::Ours(mark) => mark,
                Owner::Unmarked => return Ok(None),
                Owner::Foreign(words) => return Ok(Some(Found::Foreign(words))),
            };
            let name = mark::snap_name(record.name.as_str(), uid);
            let snaps = look::snapshots(&desk.io, &id, &header.snap_ids).about(&desk.title)?;
            let found = snaps.into_iter().find(|s| s.name == name && !s.trashed);
            return Ok(found.map(|snap| {
                Found::Snapshot(SnapshotState {
                    size_bytes: shown_bytes(snap.size_bytes, mark.luks),
                    identity: Some(desk.identity.clone()),
                    did: false,
                })
            }));
        }
        Ok(match spot {
            Spot::Nowhere => None,
            Spot::Lost { .. } | Spot::Named { header: None, .. } => Some(Found::Half),
            Spot::Named {
                id,
                name,
                header: Some(header),
            } => Some(match self.owner(&header, &id, record) {
                Owner::Ours(mark) if mark.filling => Found::Half,
                Owner::Ours(mark) => Found::Volume(
                    Ours {
                        id,
                        name,
                        header,
                        mark,
                    }
                    .state(&desk, false),
                ),
                Owner::Unmarked => Found::Unmarked,
                Owner::Foreign(words) => Found::Foreign(words),
            }),
            Spot::Trash { entry, header } => {
                let owner = header.map(|header| self.owner(&header, &entry.id, record));
                if let Some(Owner::Foreign(words)) = owner {
                    return Ok(Some(Found::Foreign(words)));
                }
                Some(Found::Trashed {
                    image_id: Some(entry.id),
                    whole: matches!(owner, Some(Owner::Ours(mark)) if !mark.reclaiming),
                })
            }
        })
    }
}
