//! One worker's way to the simulated storage.

use super::world::{Image, Look, Mark, Parent, Snapshot, World, is_volume};
use super::{SimConfig, lock};
use crate::backend::{
    Ctl, Error, Found, Marked, Reclaimed, Result, Retired, Session, SnapshotState, VolumeState,
};
use crate::model::{ErrorKind, Known, Place, Record, Step, Uid};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// How often a background step reports.
const REPORTS: u64 = 16;

pub struct SimSession {
    config: Arc<SimConfig>,
    world: Arc<Mutex<World>>,
    domain: String,
}

impl SimSession {
    pub fn new(config: Arc<SimConfig>, world: Arc<Mutex<World>>, domain: String) -> SimSession {
        SimSession {
            config,
            world,
            domain,
        }
    }

    /// Takes the time that such a step takes, at once.
    pub fn take_time(&self, step: Step) {
        if let Some(time) = self.config.latency.get(&step) {
            std::thread::sleep(*time);
        }
    }

    /// Takes the time of a background step in pieces and reports after each.
    fn take_time_reporting(&self, step: Step, record: &Record, ctl: &dyn Ctl) -> Result<()> {
        let time = self.config.latency.get(&step).copied().unwrap_or_default();
        for done in 1..=REPORTS {
            if !time.is_zero() {
                std::thread::sleep(time / REPORTS as u32);
            }
            if ctl.progress(done, REPORTS).is_break() {
                let message = format!("{}: {} was cancelled", record.title(), step.as_str());
                return Err(Error::new(ErrorKind::Cancelled, step.as_str(), message));
            }
        }
        Ok(())
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, World> {
        lock(&self.world)
    }

    fn instance(&self) -> &str {
        &self.config.instance
    }

    /// Refuses a place that isn't in this domain or isn't the one that the record knows.
    pub(super) fn check_place(&self, world: &World, place: &Place, title: &str) -> Result<()> {
        let roots = self.config.domains.get(&self.domain);
        let ours = roots.is_some_and(|roots| roots.contains(&place.root));
        let Some(root) = world.roots.get(&place.root).filter(|_| ours) else {
            let message = format!(
                "{title}: root {} is not one of domain {}",
                place.root, self.domain
            );
            return Err(Error::new(ErrorKind::Invalid, "place", message).untouched());
        };
        match &place.identity {
            Some(identity) if *identity != root.identity => {
                let message = format!(
                    "{title}: root {} is {} now, and was {identity}",
                    place.root, root.identity
                );
                Err(Error::new(ErrorKind::Unreachable, "place", message).untouched())
            }
            _ => Ok(()),
        }
    }

    pub(super) fn mark(&self, record: &Record, whole: bool) -> Mark {
        Mark {
            instance: self.config.instance.clone(),
            record: record.clone(),
            whole,
            carrier: false,
        }
    }

    fn survey_root(&self, root_name: &str, world: &World) -> Vec<Marked> {
        let Some(root) = world.roots.get(root_name) else {
            return Vec::new();
        };
        let mut found = Vec::new();
        for image in root.images.values() {
            let Some(mark) = &image.mark else { continue };
            let state = state_of(image, root_name, Some(root.identity.clone()), false);
            for snapshot in image.snapshots.values().filter(|s| !s.trashed) {
                if let Some(record) = &snapshot.record {
                    found.push(Marked {
                        record: record.clone(),
                        known: Known::Live,
                        state: VolumeState {
                            size_bytes: snapshot.size_bytes,
                            identity: Some(root.identity.clone()),
                            generation: record.generation,
                            ..VolumeState::default()
                        },
                        instance: mark.instance.clone(),
                    });
                }
            }
            found.push(Marked {
                record: mark.record.clone(),
                known: image.known(),
                state,
                instance: mark.instance.clone(),
            });
        }
        found
    }
}

impl Session for SimSession {
    fn ensure_volume(&mut self, step: Step, record: &Record, ctl: &dyn Ctl) -> Result<VolumeState> {
        let look = {
            let mut world = self.lock();
            self.check_place(&world, &record.place, &record.title())?;
            match world.look(record, self.instance()) {
                Look::Foreign(whose) => return Err(foreign(&whose)),
                Look::Unmarked(_) if record.known != Known::Free => {
                    return Err(foreign("an image without a mark has our name"));
                }
                Look::Unmarked(id) => {
                    // Our own remnant: removed and made again.
                    world.remove_image(&record.place.root, &id);
                    Look::Nothing
                }
                Look::Ours(id)
                    if world
                        .image(&record.place.root, &id)
                        .is_some_and(|image| !image.whole()) =>
                {
                    world.remove_image(&record.place.root, &id);
                    Look::Nothing
                }
                look => look,
            }
        };
        match look {
            Look::Ours(id) => self.update(record, &id, step),
            _ if self.lock().look_in_trash(record, self.instance()).is_some() => {
                Err(gone(record, "it is in the trash; restore it first"))
            }
            _ if matches!(step, Step::Update | Step::Encrypt)
                || !matches!(record.known, Known::Nothing | Known::Free) =>
            {
                Err(gone(record, "its image is not there any more"))
            }
            _ => self.create(record, step, ctl),
        }
    }

    fn ensure_snapshot(&mut self, record: &Record, _ctl: &dyn Ctl) -> Result<SnapshotState> {
        self.take_time(Step::Snapshot);
        let mut world = self.lock();
        self.check_place(&world, &record.place, &record.title())?;
        let id = match world.look(record, self.instance()) {
            Look::Ours(id) => id,
            Look::Foreign(whose) => return Err(foreign(&whose)),
            Look::Nothing | Look::Unmarked(_) => {
                return Err(gone(record, "its volume is not there"));
            }
        };
        let root = record.place.root.clone();
        let identity = world.roots.get(&root).map(|root| root.identity.clone());
        let image = world.image_mut(&root, &id);
        let image = image.ok_or_else(|| gone(record, "its volume is not there"))?;
        let uid = record.id.uid();
        if let Some(there) = image.snapshots.get(&uid).filter(|s| !s.trashed) {
            return Ok(SnapshotState {
                size_bytes: there.size_bytes,
                identity,
                did: false,
            });
        }
        let snapshot = Snapshot {
            title: record.title(),
            size_bytes: image.size_bytes,
            data: Arc::clone(&image.data),
            record: Some(record.clone()),
            trashed: false,
        };
        let size_bytes = snapshot.size_bytes;
        image.snapshots.insert(uid, snapshot);
        Ok(SnapshotState {
            size_bytes,
            identity,
            did: true,
        })
    }

    fn retire_volume(&mut self, record: &Record, _ctl: &dyn Ctl) -> Result<Retired> {
        self.take_time(Step::Trash);
        let mut world = self.lock();
        self.check_place(&world, &record.place, &record.title())?;
        let root = record.place.root.clone();
        let id = match world.look(record, self.instance()) {
            Look::Ours(id) => id,
            Look::Unmarked(id) if record.known == Known::Free => {
                world.remove_image(&root, &id);
                return Ok(Retired::Gone);
            }
            Look::Foreign(_) | Look::Unmarked(_) if never_made(record) => {
                return Ok(Retired::Gone);
            }
            Look::Foreign(whose) => return Err(foreign(&whose)),
            Look::Unmarked(_) => return Err(foreign("an image without a mark has our name")),
            Look::Nothing => {
                let trashed = world.look_in_trash(record, self.instance());
                return Ok(
                    trashed.map_or(Retired::Gone, |id| Retired::Trashed { image_id: Some(id) })
                );
            }
        };
        let Some(image) = world.image_mut(&root, &id) else {
            return Ok(Retired::Gone);
        };
        if !image.whole() {
            world.remove_image(&root, &id);
            return Ok(Retired::Gone);
        }
        let snapshots = image.live_snapshots();
        let carrier = !snapshots.is_empty();
        if let Some(mark) = &mut image.mark {
            mark.record = record.clone();
            mark.carrier = carrier;
        }
        if carrier {
            return Ok(Retired::Carrier { snapshots });
        }
        world.move_image(&root, &id, true);
        Ok(Retired::Trashed { image_id: Some(id) })
    }

    fn retire_snapshot(&mut self, record: &Record, _ctl: &dyn Ctl) -> Result<Retired> {
        self.take_time(Step::RemoveSnapshot);
        let mut world = self.lock();
        self.check_place(&world, &record.place, &record.title())?;
        let root = record.place.root.clone();
        let id = match world.look(record, self.instance()) {
            Look::Ours(id) => id,
            Look::Nothing => return Ok(Retired::Gone),
            Look::Foreign(_) | Look::Unmarked(_) if never_made(record) => {
                return Ok(Retired::Gone);
            }
            Look::Foreign(whose) => return Err(foreign(&whose)),
            Look::Unmarked(_) => return Err(foreign("an image without a mark has our name")),
        };
        let uid = record.id.uid();
        let parent = Parent {
            root: root.clone(),
            image: id.clone(),
            snapshot: uid,
        };
        let image = world.image_mut(&root, &id);
        if let Some(snapshot) = image.and_then(|image| image.snapshots.get_mut(&uid)) {
            snapshot.trashed = true;
        }
        world.sweep(&parent);
        Ok(Retired::Gone)
    }

    fn reclaim(&mut self, record: &Record, ctl: &dyn Ctl) -> Result<Reclaimed> {
        let root = record.place.root.clone();
        let id = {
            let world = self.lock();
            self.check_place(&world, &record.place, &record.title())?;
            let Some(id) = world.look_in_trash(record, self.instance()) else {
                return match world.look(record, self.instance()) {
                    Look::Ours(_) => Err(not_in_trash(record)),
                    _ => Ok(Reclaimed::Done),
                };
            };
            let Some(image) = world.image(&root, &id) else {
                return Ok(Reclaimed::Done);
            };
            if !image.watchers.is_empty() {
                let message = format!("{}: it is open elsewhere", record.title());
                return Err(Error::of_errno(16, "trash_remove", message)
                    .held_by(image.watchers.clone())
                    .untouched());
            }
            let by = blockers(&world, &root, image);
            if !by.is_empty() {
                return Ok(Reclaimed::Blocked { by });
            }
            id
        };
        if ctl.cancelled()
            && self
                .lock()
                .image(&root, &id)
                .is_some_and(|image| !image.torn)
        {
            let message = format!("{}: reclaim was cancelled", record.title());
            return Err(Error::new(ErrorKind::Cancelled, "reclaim", message).untouched());
        }
        if let Some(image) = self.lock().image_mut(&root, &id) {
            image.torn = true;
        }
        self.take_time_reporting(Step::Reclaim, record, ctl)?;
        self.lock().remove_image(&root, &id);
        Ok(Reclaimed::Done)
    }

    fn restore(&mut self, record: &Record, _ctl: &dyn Ctl) -> Result<VolumeState> {
        self.take_time(Step::Restore);
        let mut world = self.lock();
        self.check_place(&world, &record.place, &record.title())?;
        let root = record.place.root.clone();
        let mark = self.mark(record, true);
        match world.look(record, self.instance()) {
            Look::Ours(id) => {
                let image = world.image_mut(&root, &id);
                let image = image.ok_or_else(|| gone(record, "it is not there"))?;
                let did = image.mark.as_ref().is_some_and(|mark| mark.carrier);
                image.mark = Some(mark);
                return self.state(&world, record, &id, did);
            }
            Look::Foreign(whose) => return Err(foreign(&whose)),
            Look::Unmarked(_) => return Err(foreign("an image without a mark has our name")),
            Look::Nothing => {}
        }
        let id = world.look_in_trash(record, self.instance());
        let id = id.ok_or_else(|| gone(record, "it is not in the trash any more"))?;
        let image = world.image_mut(&root, &id);
        let image = image.ok_or_else(|| gone(record, "it is not in the trash any more"))?;
        if image.torn {
            return Err(gone(record, "part of its space is freed already"));
        }
        image.mark = Some(mark);
        world.move_image(&root, &id, false);
        self.state(&world, record, &id, true)
    }

    fn flatten(&mut self, record: &Record, ctl: &dyn Ctl) -> Result<VolumeState> {
        let id = {
            let world = self.lock();
            self.check_place(&world, &record.place, &record.title())?;
            let id = match world.look(record, self.instance()) {
                Look::Ours(id) => id,
                Look::Foreign(whose) => return Err(foreign(&whose)),
                _ => world
                    .look_in_trash(record, self.instance())
                    .ok_or_else(|| gone(record, "it is not there"))?,
            };
            let image = world.image(&record.place.root, &id);
            if image.is_none_or(|image| image.parent.is_none()) {
                return self.state(&world, record, &id, false);
            }
            id
        };
        self.take_time_reporting(Step::Flatten, record, ctl)?;
        let mut world = self.lock();
        world.release(&record.place.root, &id);
        self.state(&world, record, &id, true)
    }

    fn inspect(&mut self, record: &Record, _ctl: &dyn Ctl) -> Result<Option<Found>> {
        self.take_time(Step::Inspect);
        let world = self.lock();
        self.check_place(&world, &record.place, &record.title())?;
        let root = &record.place.root;
        let look = world.look(record, self.instance());
        if !is_volume(record) {
            return Ok(match look {
                Look::Ours(id) => snapshot_of(&world, record, &id).map(Found::Snapshot),
                Look::Foreign(whose) => Some(Found::Foreign(whose)),
                Look::Nothing | Look::Unmarked(_) => None,
            });
        }
        Ok(match look {
            Look::Ours(id) => match world.image(root, &id) {
                Some(image) if !image.whole() => Some(Found::Half),
                _ => Some(Found::Volume(self.state(&world, record, &id, false)?)),
            },
            Look::Foreign(whose) => Some(Found::Foreign(whose)),
            Look::Unmarked(_) => Some(Found::Unmarked),
            Look::Nothing => {
                world
                    .look_in_trash(record, self.instance())
                    .map(|id| Found::Trashed {
                        whole: world.image(root, &id).is_some_and(|image| !image.torn),
                        image_id: Some(id),
                    })
            }
        })
    }

    fn probe(&mut self, _ctl: &dyn Ctl) -> Result<BTreeMap<String, String>> {
        self.take_time(Step::Probe);
        let world = self.lock();
        let roots = self.config.domains.get(&self.domain).into_iter().flatten();
        let known = roots.filter_map(|name| {
            let root = world.roots.get(name)?;
            Some((name.clone(), root.identity.clone()))
        });
        Ok(known.collect())
    }

    fn survey(&mut self, _ctl: &dyn Ctl) -> Result<Vec<Marked>> {
        let world = self.lock();
        let roots = self.config.domains.get(&self.domain).into_iter().flatten();
        Ok(roots
            .flat_map(|root| self.survey_root(root, &world))
            .collect())
    }
}

/// Whatever has our name, we never made anything under it.
fn never_made(record: &Record) -> bool {
    matches!(record.known, Known::Nothing | Known::Free)
}

pub(super) fn gone(record: &Record, why: &str) -> Error {
    Error::of_errno(2, "open", format!("{}: {why}", record.title())).untouched()
}

fn foreign(whose: &str) -> Error {
    let message = format!("{whose}; it is left as it is");
    Error::of_errno(17, "create", message).untouched()
}

fn not_in_trash(record: &Record) -> Error {
    let message = format!("{}: it is in its place, not in the trash", record.title());
    Error::new(ErrorKind::Invalid, "trash_remove", message).untouched()
}

/// What keeps an image in the trash: snapshots, and whoever reads from removed ones.
fn blockers(world: &World, root: &str, image: &Image) -> Vec<String> {
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

fn snapshot_of(world: &World, record: &Record, id: &str) -> Option<SnapshotState> {
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

pub(super) fn state_of(
    image: &Image,
    root: &str,
    identity: Option<String>,
    did: bool,
) -> VolumeState {
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
