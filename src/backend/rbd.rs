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
mod wire;

use crate::backend::{Backend, Caps, Ctl, Error, Ledger, Result, Session};
use crate::model::{ErrorKind, Lane};
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

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
    config: Arc<RbdConfig>,
}

impl RbdBackend {
    /// Checks the configuration; reaches out for nothing.
    ///
    /// # Errors
    /// `Invalid`, naming the key and the mend.
    pub fn new(config: RbdConfig) -> Result<RbdBackend> {
        Ok(RbdBackend {
            config: Arc::new(config),
        })
    }
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

    fn connect(&self, domain: &str, _lane: Lane, _ctl: &dyn Ctl) -> Result<Box<dyn Session>> {
        let _ = &self.config;
        Err(Error::new(ErrorKind::Internal, "connect", domain))
    }
}
