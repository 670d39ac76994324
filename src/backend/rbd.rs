//! The `rbd` backend: volumes as images of Ceph RBD pools, through librbd.
//!
//! This module owns the configuration of the backend and its two faces, [`RbdBackend`] and the
//! sessions that it hands out. It knows `model` and the border in `backend` only: nothing of
//! lanes' threads, deadlines, retries or the store. Every call into librbd and librados goes
//! through the safe handles of `cluster` and `image`; `unsafe` stands there and in `ffi`.
//!
//! # Capabilities of the client
//! `mon 'profile rbd' osd 'profile rbd pool=POOL[, profile rbd pool=DATA-POOL ...]'` is all that
//! is needed. Of the monitors' profile volward uses reading the maps and adding to the blocklist;
//! the latter fences off its own earlier sessions, and without it a restart waits 30 s (the time
//! after which an OSD forgets a dead client's watches). No manager and no access to other pools is
//! needed: nothing here lists the children of an image through librbd, which reads every pool.

mod cluster;
mod ffi;
mod image;
mod import;
mod look;
mod mark;
mod retire;
mod session;
mod survey;
mod volume;
mod wire;

use self::cluster::{EACCES, EEXIST, EPERM, IoCtx};
use self::look::{About, Spot};
use self::session::{Link, Links, lock};
use crate::backend::{
    Backend, Caps, Ctl, Error, Found, Ledger, Marked, Reclaimed, Result, Retired, Session,
    SnapshotState, VolumeState,
};
use crate::model::{ErrorKind, Lane, Place, Record, Step};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How to reach the cluster and where to put images.
#[derive(Clone)]
pub struct RbdConfig {
    /// The cluster's configuration file, such as `/etc/ceph/ceph.conf`.
    pub conf: PathBuf,
    /// The client's name without `client.`, such as `volward`.
    pub user: String,
    /// The client's keyring; `None` leaves it to `conf`.
    pub keyring: Option<PathBuf>,
    /// Further options of the client, set after those that volward needs and before connecting.
    /// OSD operation timeouts are refused: after one the outcome is unknown, and late.
    pub options: BTreeMap<String, String>,
    /// How long one request to the monitors may take, in seconds; also the limit of a connect.
    pub mon_timeout_s: u64,
    /// The first part of every image's name: `PREFIX-NAME-UID`. At most 32 characters of
    /// `[a-z0-9._-]`, not empty.
    pub prefix: String,
    /// Where new images go, by class.
    pub classes: BTreeMap<String, RbdClass>,
    /// Directories that files may be imported from.
    pub import_dirs: Vec<PathBuf>,
    /// Files with the passphrases of encrypted volumes, by key id. One trailing newline is not
    /// part of the passphrase.
    pub keys: BTreeMap<String, PathBuf>,
    /// Which volward this is: part of every mark. Images of other instances are never touched.
    pub instance: String,
    /// Where the addresses of sessions are kept.
    pub ledger: Arc<dyn Ledger>,
    /// The most sessions (15 threads each) that may be alive at once, retired ones included.
    pub sessions_max: usize,
}

impl fmt::Debug for RbdConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RbdConfig")
            .field("conf", &self.conf)
            .field("user", &self.user)
            .field("prefix", &self.prefix)
            .field("classes", &self.classes)
            .finish_non_exhaustive()
    }
}

/// Where and how the images of one class are made.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RbdClass {
    /// What fails together with it.
    pub domain: String,
    /// The pool of the images.
    pub pool: String,
    /// A pool of its own for their data.
    pub data_pool: Option<String>,
    /// The namespace in the pool; it must exist.
    pub namespace: Option<String>,
    /// The size of the objects in bytes, a power of two from 4096 to 33554432; `None` leaves it to
    /// the cluster's configuration (4 MiB).
    pub object_size: Option<u64>,
    /// The feature bits; `None` means layering, exclusive lock, object map, fast diff and deep
    /// flatten (61).
    pub features: Option<u64>,
    /// Limits for volumes that name none, and how far all may burst.
    pub qos: ClassQos,
}

/// The limits of a class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ClassQos {
    /// Operations per second of a volume that names none.
    pub iops: Option<u64>,
    /// Bytes per second of a volume that names none.
    pub bytes_per_second: Option<u64>,
    /// A burst may reach this many times the limit, in hundredths (150 = one and a half times).
    pub burst_percent: Option<u64>,
    /// For how many seconds it may.
    pub burst_seconds: Option<u64>,
}

/// The images of one cluster.
#[derive(Debug)]
pub struct RbdBackend {
    shared: Arc<Shared>,
}

/// What all sessions share.
#[derive(Debug)]
struct Shared {
    config: Arc<RbdConfig>,
    links: Links,
    ready: Mutex<Ready>,
    prepared: Condvar,
}

/// How long a call waits for another one that prepares the same pool.
const PREPARE_WAIT: Duration = Duration::from_secs(10);

/// Which pools are prepared for images, and which are being prepared: `POOL/NAMESPACE`.
#[derive(Debug, Default)]
struct Ready {
    done: BTreeSet<String>,
    running: BTreeSet<String>,
}

impl RbdBackend {
    /// Checks the configuration; reaches out for nothing.
    ///
    /// # Errors
    /// `Invalid`, naming the key and the mend.
    pub fn new(config: RbdConfig) -> Result<RbdBackend> {
        check(&config)?;
        let config = Arc::new(config);
        Ok(RbdBackend {
            shared: Arc::new(Shared {
                links: Links::new(Arc::clone(&config)),
                config,
                ready: Mutex::default(),
                prepared: Condvar::new(),
            }),
        })
    }
}

fn check(config: &RbdConfig) -> Result<()> {
    let refuse = |words: String| Err(Error::new(ErrorKind::Invalid, "configuration", words));
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "._-".contains(c);
    if config.prefix.is_empty() || config.prefix.len() > 32 || !config.prefix.chars().all(fits) {
        return refuse(format!(
            "prefix {:?}: 1 to 32 characters of a-z, 0-9, '.', '_' and '-'",
            config.prefix
        ));
    }
    let key_of = |key: &str| key.replace([' ', '-'], "_");
    if let Some(key) = config
        .options
        .keys()
        .find(|key| key_of(key) == "rados_osd_op_timeout")
    {
        return refuse(format!(
            "option {key}: not to be set; a call that times out may still change the image later"
        ));
    }
    for (name, class) in &config.classes {
        let size = class.object_size.unwrap_or(4096);
        if !size.is_power_of_two() || !(4096..=32 << 20).contains(&size) {
            return refuse(format!(
                "class {name}: object_size {size} is no power of two from 4096 to 33554432"
            ));
        }
    }
    Ok(())
}

impl Backend for RbdBackend {
    fn caps(&self) -> Caps {
        Caps {
            qos: true,
            encryption: true,
            import_raw: true,
            import_qcow2: false,
            chains: true,
            size_unit: 512,
        }
    }

    fn connect(&self, domain: &str, lane: Lane, _ctl: &dyn Ctl) -> Result<Box<dyn Session>> {
        let link = self.shared.links.get(domain, lane)?;
        Ok(Box::new(RbdSession {
            shared: Arc::clone(&self.shared),
            domain: domain.to_owned(),
            lane,
            link,
        }))
    }

    fn recover_abandoned(&self, domain: &str) -> Result<usize> {
        self.shared.links.fence_retired(domain)
    }

    fn retire(&self, domain: &str, lane: Lane) {
        self.shared.links.retire(domain, lane);
    }
}

/// One worker's session.
#[derive(Debug)]
struct RbdSession {
    shared: Arc<Shared>,
    domain: String,
    lane: Lane,
    link: Arc<Link>,
}

/// Where the image of one record is or would be, and what to call it.
#[derive(Debug)]
struct Desk {
    link: Arc<Link>,
    io: Arc<IoCtx>,
    pool: String,
    namespace: Option<String>,
    /// The name that volward gives the image.
    name: String,
    /// The same for people.
    title: String,
    identity: String,
}

impl Desk {
    fn handle(&self, name: &str) -> String {
        match &self.namespace {
            Some(namespace) => format!("rbd:{}/{namespace}/{name}", self.pool),
            None => format!("rbd:{}/{name}", self.pool),
        }
    }

    /// Finds the record's image. "Nowhere" is said only of a pool that is there.
    fn find(&self, record: &Record) -> Result<Spot> {
        let id = record.volume().and_then(|v| v.image_id.as_deref());
        let spot = look::find(&self.io, &self.name, id).about(&self.title)?;
        if matches!(spot, Spot::Nowhere) {
            self.check_pool()?;
        }
        Ok(spot)
    }

    fn check_pool(&self) -> Result<()> {
        self.link.check_pool(&self.io, &self.pool)
    }

    fn pools(&self) -> Vec<(String, Arc<IoCtx>)> {
        let namespace = self.namespace.clone().unwrap_or_default();
        vec![(namespace, Arc::clone(&self.io))]
    }

    fn foreign(&self, words: &str) -> Error {
        let words = format!("{} is not ours and stays as it is: {words}", self.title);
        Error::new(ErrorKind::AlreadyExists, "look", words)
    }

    fn vanished(&self) -> Error {
        let words = format!("{}: it is not there any more", self.title);
        Error::new(ErrorKind::Gone, "look", words)
    }
}

impl RbdSession {
    fn config(&self) -> &RbdConfig {
        &self.shared.config
    }

    fn io_of(&self, place: &Place) -> Result<Arc<IoCtx>> {
        let io = self.link.io(&place.root, place.namespace.as_deref())?;
        let identity = self.link.identity(&io);
        if let Some(wished) = place
            .identity
            .as_ref()
            .filter(|wished| **wished != identity)
        {
            let words = format!(
                "pool {} is {identity} now, but the image was made in {wished}: another cluster \
                 or another pool; nothing is touched",
                place.root
            );
            return Err(Error::new(ErrorKind::Unreachable, "identity", words).untouched());
        }
        Ok(io)
    }

    fn desk(&self, record: &Record) -> Result<Desk> {
        let place = &record.place;
        let io = self.io_of(place)?;
        let name = mark::image_name(&self.config().prefix, record.born.as_str(), record.image);
        let space = place
            .namespace
            .as_ref()
            .map(|n| format!("{n}/"))
            .unwrap_or_default();
        Ok(Desk {
            identity: self.link.identity(&io),
            link: Arc::clone(&self.link),
            io,
            pool: place.root.clone(),
            namespace: place.namespace.clone(),
            title: format!("image {}/{space}{name}", place.root),
            name,
        })
    }

    /// Runs a method on a connection that may be used, and takes note if it is lost.
    fn run<T>(&mut self, record: &Record, work: impl FnOnce(&Self) -> Result<T>) -> Result<T> {
        if self.link.is_retired() {
            self.link = self.shared.links.get(&self.domain, self.lane)?;
        }
        let result = work(self);
        if let Err(error) = &result {
            match error.kind {
                ErrorKind::SessionLost => self.link.retire(),
                // "Not there" might mean the pool.
                ErrorKind::Gone => {
                    let place = &record.place;
                    let io = self.link.io(&place.root, place.namespace.as_deref())?;
                    self.link.check_pool(&io, &place.root)?;
                }
                _ => {}
            }
        }
        result
    }

    /// Sees to it that a pool was prepared before the first images are made in it: at once and
    /// from many sides, librbd's own preparation locks up.
    fn prepare(&self, pool: &str, namespace: Option<&str>) -> Result<()> {
        let key = format!("{pool}/{}", namespace.unwrap_or(""));
        let give_up = Instant::now() + PREPARE_WAIT;
        let mut ready = lock(&self.shared.ready);
        loop {
            if ready.done.contains(&key) {
                return Ok(());
            }
            if ready.running.insert(key.clone()) {
                break;
            }
            // The one who prepares it may be hung, so the wait has an end.
            let left = give_up.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let words = format!("pool {pool}: another call is preparing it for images");
                return Err(Error::new(ErrorKind::Unreachable, "rbd_pool_init", words).untouched());
            }
            let waited = self.shared.prepared.wait_timeout(ready, left);
            ready = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(ready);
        let outcome = self.prepare_alone(pool, namespace);
        let mut ready = lock(&self.shared.ready);
        ready.running.remove(&key);
        if outcome.is_ok() {
            ready.done.insert(key);
        }
        drop(ready);
        self.shared.prepared.notify_all();
        outcome
    }

    fn prepare_alone(&self, pool: &str, namespace: Option<&str>) -> Result<()> {
        let thing = format!("pool {pool}");
        // The trash must be there before the pool is full: then it can't be made any more, and
        // without it nothing can be deleted. If it is full already, deletes say so.
        let _ = self.link.io(pool, namespace)?.create("rbd_trash");
        let io = self.link.io(pool, None)?;
        if io.exists("rbd_info").about(&thing)? {
            return Ok(());
        }
        match image::pool_init(&io) {
            Ok(()) => return Ok(()),
            Err(fail) if fail.errno == EACCES || fail.errno == EPERM => {}
            Err(fail) => return Err(fail.about(&thing).untouched()),
        }
        // The capability to tag the pool is an administrator's, but all that must be done alone is
        // what librbd does with a pool's first image. So here is one, and away with it.
        let name = format!(
            "{}.prepare-{}",
            self.config().prefix,
            self.config().instance
        );
        match image::create(&io, &name, 1 << 20, &image::Layout::default()) {
            Err(fail) if fail.errno != EEXIST => {
                let mut error = fail.about(&thing).untouched();
                error.message = format!(
                    "{thing}: it can't be prepared for images; run once: rbd pool init {pool}"
                );
                return Err(error);
            }
            _ => {}
        }
        image::remove(&io, &name).about(&thing)
    }

    fn domain_classes(&self) -> impl Iterator<Item = &RbdClass> {
        let domain = &self.domain;
        self.config()
            .classes
            .values()
            .filter(move |class| class.domain == *domain)
    }
}

impl Session for RbdSession {
    fn ensure_volume(&mut self, step: Step, record: &Record, ctl: &dyn Ctl) -> Result<VolumeState> {
        self.run(record, |session| {
            let place = &record.place;
            session.prepare(&place.root, place.namespace.as_deref())?;
            if let Some(pool) = &place.data_pool {
                // A pool for data alone may not be able to hold images.
                let _ = session.prepare(pool, None);
            }
            session.make(step, record, ctl)
        })
    }

    fn ensure_snapshot(&mut self, record: &Record, _ctl: &dyn Ctl) -> Result<SnapshotState> {
        self.run(record, |session| session.snapshot(record))
    }

    fn retire_volume(&mut self, record: &Record, _ctl: &dyn Ctl) -> Result<Retired> {
        self.run(record, |session| session.retire(record))
    }

    fn retire_snapshot(&mut self, record: &Record, _ctl: &dyn Ctl) -> Result<Retired> {
        self.run(record, |session| session.remove_snapshot(record))
    }

    fn reclaim(&mut self, record: &Record, ctl: &dyn Ctl) -> Result<Reclaimed> {
        self.run(record, |session| session.free(record, ctl))
    }

    fn restore(&mut self, record: &Record, ctl: &dyn Ctl) -> Result<VolumeState> {
        self.run(record, |session| session.bring_back(record, ctl))
    }

    fn flatten(&mut self, record: &Record, ctl: &dyn Ctl) -> Result<VolumeState> {
        self.run(record, |session| session.make_independent(record, ctl))
    }

    fn inspect(&mut self, record: &Record, _ctl: &dyn Ctl) -> Result<Option<Found>> {
        self.run(record, |session| session.look(record))
    }

    fn probe(&mut self, _ctl: &dyn Ctl) -> Result<BTreeMap<String, String>> {
        if self.link.is_retired() {
            self.link = self.shared.links.get(&self.domain, self.lane)?;
        }
        let outcome = self.ask_pools();
        if outcome
            .as_ref()
            .is_err_and(|error| error.kind == ErrorKind::SessionLost)
        {
            self.link.retire();
        }
        outcome
    }

    fn survey(&mut self, ctl: &dyn Ctl) -> Result<Vec<Marked>> {
        if self.link.is_retired() {
            self.link = self.shared.links.get(&self.domain, self.lane)?;
        }
        survey::survey(self, ctl)
    }
}

impl RbdSession {
    fn ask_pools(&self) -> Result<BTreeMap<String, String>> {
        let mut roots = BTreeMap::new();
        for class in self.domain_classes() {
            for pool in std::iter::once(&class.pool).chain(&class.data_pool) {
                let io = self.link.io(pool, None)?;
                self.link.check_pool(&io, pool)?;
                // Whether the object is there doesn't matter; an OSD must say so.
                io.exists("rbd_directory")
                    .about(&format!("pool {pool}"))
                    .map_err(Error::untouched)?;
                if *pool == class.pool {
                    roots.insert(pool.clone(), self.link.identity(&io));
                }
            }
        }
        Ok(roots)
    }
}
