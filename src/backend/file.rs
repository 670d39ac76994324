//! Volumes as sparse files below one or more root directories: the embedded default.
//!
//! ```text
//! ROOT/volward-root.json        the id of the root
//! ROOT/volumes/NAME-UID/        image, meta.json
//! ROOT/snapshots/NAME-UID/      image, meta.json
//! ROOT/trash/UID/               a deleted volume, whole; image.reclaiming once its space goes
//! ROOT/tmp/UID/                 what is being made or removed
//! ```
//!
//! This module owns that layout. An object changes its place by one rename, so it is always in
//! exactly one; nothing is reported before it is durable. It knows nothing of schedules.

mod copy;
mod entry;
mod errors;
mod failpoint;
mod holders;
mod import;
mod lease;
mod root;
mod session;

pub use failpoint::NAMES as FAILPOINTS;

use super::{Backend, Caps, Ctl, Error, Result, Session};
use crate::model::{ErrorKind, Lane};
use root::Root;
use session::FileSession;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// Sizes are whole sectors: a loop device shows no part of one.
const SECTOR_BYTES: u64 = 512;

/// Where the files are.
#[derive(Debug, Clone, Default)]
pub struct FileConfig {
    /// Domain → its root directories, as absolute paths (the `root` of a record's place).
    pub domains: BTreeMap<String, Vec<String>>,
    /// Files may be imported from below these directories only.
    pub import_dirs: Vec<PathBuf>,
    /// Who we are: goes into the mark of every image and into new id files.
    pub instance: String,
    /// Root → its identity, of those that have records already. Such a root is never taken for a
    /// new one: an unmounted disk leaves an empty directory that looks like one.
    pub identities: BTreeMap<String, String>,
}

/// Volumes as files. Clones of it are the same backend.
#[derive(Debug, Clone)]
pub struct FileBackend {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    config: FileConfig,
    /// Root → the identity that was seen first. Locked for a look only, never during I/O.
    seen: Mutex<BTreeMap<String, String>>,
}

impl FileBackend {
    /// Touches nothing yet: a root on a hung mount delays nobody's start.
    #[must_use]
    pub fn new(config: FileConfig) -> FileBackend {
        let seen = Mutex::new(config.identities.clone());
        FileBackend {
            shared: Arc::new(Shared { config, seen }),
        }
    }
}

impl Shared {
    /// Opens a root as the one that the record, or an earlier look, knows.
    fn open(&self, path: &str, identity: Option<&str>) -> Result<Root> {
        let seen = self.seen(path);
        let expected = identity.or(seen.as_deref());
        if expected.is_none() {
            root::make_missing(path)?;
        }
        let root = Root::open(path, expected, &self.config.instance)?;
        if seen.is_none() {
            let mut all = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
            all.insert(path.to_owned(), root.identity.clone());
        }
        Ok(root)
    }

    /// Opens a root that is there, and makes none.
    fn find(&self, path: &str) -> Result<Root> {
        Root::find(path, self.seen(path).as_deref())
    }

    fn seen(&self, path: &str) -> Option<String> {
        let all = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(path).cloned()
    }
}

impl Backend for FileBackend {
    fn caps(&self) -> Caps {
        Caps {
            qos: false,
            encryption: false,
            import_raw: true,
            import_qcow2: false,
            chains: false,
            size_unit: SECTOR_BYTES,
        }
    }

    fn connect(&self, domain: &str, _lane: Lane, _ctl: &dyn Ctl) -> Result<Box<dyn Session>> {
        let Some(roots) = self.shared.config.domains.get(domain) else {
            let message = format!("domain {domain} has no root directory in the configuration");
            return Err(Error::new(ErrorKind::Invalid, "connect", message).untouched());
        };
        Ok(Box::new(FileSession::new(
            Arc::clone(&self.shared),
            domain.to_owned(),
            roots.clone(),
        )))
    }
}
