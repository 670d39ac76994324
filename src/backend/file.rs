//! Volumes as sparse files below one or more root directories: the embedded default.
//!
//! `entry` knows what a volume looks like on the disk, `root` what a root is, `copy` how an image
//! is copied whole, `session` which of that each call needs.

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

use super::{Backend, Caps, Ctl, Result, Session};
use crate::model::Lane;
use root::Root;
use session::FileSession;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// Images are whole sectors, as block devices are.
const SIZE_UNIT: u64 = 512;

/// Where the files are.
#[derive(Debug, Clone, Default)]
pub struct FileConfig {
    /// Domain → its root directories, as absolute paths (the `root` of a record's place).
    pub domains: BTreeMap<String, Vec<String>>,
    /// Files may be imported from below these directories only.
    pub import_dirs: Vec<PathBuf>,
    /// Who we are: goes into the mark of every image and into new id files.
    pub instance: String,
    /// Root → the id that it is known to have. A root that is known is never made anew: an empty
    /// directory in its place is a disk that isn't mounted.
    pub identities: BTreeMap<String, String>,
}

/// Volumes as files.
#[derive(Debug, Clone)]
pub struct FileBackend(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    config: FileConfig,
    known: Mutex<BTreeMap<String, String>>,
}

impl FileBackend {
    /// Touches nothing yet: a root on a hung mount delays nobody's start.
    #[must_use]
    pub fn new(config: FileConfig) -> FileBackend {
        let known = Mutex::new(config.identities.clone());
        FileBackend(Arc::new(Inner { config, known }))
    }

    fn config(&self) -> &FileConfig {
        &self.0.config
    }

    /// Opens a root, as the one that it is known to be.
    fn root(&self, path: &str, expected: Option<&str>) -> Result<Root> {
        let lock = || self.0.known.lock().unwrap_or_else(PoisonError::into_inner);
        let known = lock().get(path).cloned();
        let expected = expected.map(str::to_owned).or(known);
        if expected.is_none() {
            root::make_missing(path)?;
        }
        let root = Root::open(path, expected.as_deref(), &self.config().instance)?;
        lock().insert(path.to_owned(), root.identity.clone());
        Ok(root)
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
            size_unit: SIZE_UNIT,
        }
    }

    fn connect(&self, domain: &str, _lane: Lane, _ctl: &dyn Ctl) -> Result<Box<dyn Session>> {
        Ok(Box::new(FileSession::new(self.clone(), domain)))
    }
}
