//! A storage in memory that behaves like Ceph RBD: for the simulator, benchmarks and drills.
//!
//! This module owns the simulated storage and refuses what a real one refuses. It knows nothing of
//! faults (see `faults`), and nothing of it survives the process.

mod make;
mod session;
mod world;

use super::{Backend, Caps, Ctl, Error, Result, Session};
use crate::model::{ErrorKind, Known, Lane, Record, Step, Uid};
use session::SimSession;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use world::{Image, Mark, SimFile, World, image_name};

/// What the simulated storage looks like.
#[derive(Debug, Clone, Default)]
pub struct SimConfig {
    /// Domain → its roots (pools).
    pub domains: BTreeMap<String, Vec<String>>,
    /// Who we are: goes into the mark of every image.
    pub instance: String,
    /// How long a step takes; one that isn't named takes no time. Background steps report
    /// progress meanwhile.
    pub latency: BTreeMap<Step, Duration>,
}

/// The simulated storage. Clones of it, and all sessions, see the same world.
#[derive(Debug, Clone)]
pub struct SimBackend {
    config: Arc<SimConfig>,
    world: Arc<Mutex<World>>,
}

/// An image, as a test or a leak check sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimImage {
    /// Its root.
    pub root: String,
    /// Its name.
    pub name: String,
    /// The uid in its mark.
    pub uid: Option<Uid>,
    /// Whether it is in its place, a carrier, in the trash, or only begun (`Free`).
    pub known: Known,
    /// Snapshots in it, hidden ones included.
    pub snapshots: usize,
}

impl SimBackend {
    /// An empty world.
    #[must_use]
    pub fn new(config: SimConfig) -> SimBackend {
        let mut world = World::default();
        for root in config.domains.values().flatten() {
            if !world.roots.contains_key(root) {
                world.add_root(root);
            }
        }
        SimBackend {
            config: Arc::new(config),
            world: Arc::new(Mutex::new(world)),
        }
    }

    /// The same world as another instance of volward sees it.
    #[must_use]
    pub fn as_instance(&self, instance: &str) -> SimBackend {
        let mut config = (*self.config).clone();
        instance.clone_into(&mut config.instance);
        SimBackend {
            config: Arc::new(config),
            world: Arc::clone(&self.world),
        }
    }

    /// Every image that is there.
    #[must_use]
    pub fn images(&self) -> Vec<SimImage> {
        let world = self.lock();
        let show = |root: &String, image: &Image| SimImage {
            root: root.clone(),
            name: image.name.clone(),
            uid: image.mark.as_ref().map(|mark| mark.record.id.uid()),
            known: image.known(),
            snapshots: image.snapshots.len(),
        };
        let mut all = Vec::new();
        for (name, root) in &world.roots {
            all.extend(root.images.values().map(|image| show(name, image)));
        }
        all
    }

    /// Puts an image of somebody else under the name of that record's: without a mark, or with
    /// the mark of `owner`.
    pub fn plant(&self, record: &Record, owner: Option<(&str, &Record)>) {
        let mut world = self.lock();
        let name = image_name(&record.born, record.image);
        let Some(id) = world.add_image(&record.place.root, name, 4096) else {
            return;
        };
        if let Some(image) = world.image_mut(&record.place.root, &id) {
            image.mark = owner.map(|(instance, record)| Mark {
                instance: instance.to_owned(),
                record: record.clone(),
                whole: true,
                carrier: false,
            });
        }
    }

    /// Makes a file that can be imported.
    pub fn add_file(&self, path: &str, size_bytes: u64, data: &[u8]) {
        let file = SimFile {
            size_bytes,
            data: Arc::new(data.to_vec()),
        };
        self.lock().files.insert(path.to_owned(), file);
    }

    /// Says who has the volume open elsewhere. False when there is no such volume.
    pub fn set_watchers(&self, uid: Uid, watchers: &[&str]) -> bool {
        self.with_image(uid, |image| {
            image.watchers = watchers.iter().map(|who| (*who).to_owned()).collect();
        })
        .is_some()
    }

    /// Writes the first bytes of a volume. False when there is no such volume.
    pub fn write(&self, uid: Uid, data: &[u8]) -> bool {
        self.with_image(uid, |image| image.data = Arc::new(data.to_vec()))
            .is_some()
    }

    /// The first bytes of a volume, as far as they were written.
    #[must_use]
    pub fn read(&self, uid: Uid) -> Option<Vec<u8>> {
        self.with_image(uid, |image| image.data.to_vec())
    }

    /// Fills a root, or makes room again.
    pub fn set_full(&self, root: &str, full: bool) {
        if let Some(root) = self.lock().roots.get_mut(root) {
            root.full = full;
        }
    }

    /// Puts another, empty root where that one was.
    pub fn replace_root(&self, root: &str) {
        self.lock().add_root(root);
    }

    fn with_image<T>(&self, uid: Uid, change: impl FnOnce(&mut Image) -> T) -> Option<T> {
        let mut world = self.lock();
        let mut all = world.roots.values_mut().flat_map(|r| r.images.values_mut());
        let ours = |image: &&mut Image| image.mark.as_ref().is_some_and(|m| m.record.image == uid);
        all.find(ours).map(change)
    }

    fn lock(&self) -> MutexGuard<'_, World> {
        lock(&self.world)
    }
}

fn lock(world: &Mutex<World>) -> MutexGuard<'_, World> {
    // Nothing panics between two changes that belong together.
    world.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Backend for SimBackend {
    fn caps(&self) -> Caps {
        Caps {
            qos: true,
            encryption: true,
            import_raw: true,
            import_qcow2: true,
            chains: true,
            size_unit: 1,
        }
    }

    fn connect(&self, domain: &str, _lane: Lane, _ctl: &dyn Ctl) -> Result<Box<dyn Session>> {
        if !self.config.domains.contains_key(domain) {
            let message = format!("domain {domain} is not one of the simulated storage");
            return Err(Error::new(ErrorKind::Invalid, "connect", message).untouched());
        }
        let session = SimSession::new(
            Arc::clone(&self.config),
            Arc::clone(&self.world),
            domain.to_owned(),
        );
        session.take_time(Step::Connect);
        Ok(Box::new(session))
    }
}
