//! Volumes as sparse files below one or more root directories: the embedded default.

use super::{Backend, Caps, Ctl, Error, Result, Session};
use crate::model::{ErrorKind, Lane};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

/// Where the files are.
#[derive(Debug, Clone, Default)]
pub struct FileConfig {
    /// Domain → its root directories, as absolute paths (the `root` of a record's place).
    pub domains: BTreeMap<String, Vec<String>>,
    /// Files may be imported from below these directories only.
    pub import_dirs: Vec<PathBuf>,
    /// Who we are: goes into the mark of every image and into new id files.
    pub instance: String,
}

/// Volumes as files.
#[derive(Debug, Clone)]
pub struct FileBackend {
    config: Arc<FileConfig>,
}

impl FileBackend {
    /// Touches nothing yet: a root on a hung mount delays nobody's start.
    #[must_use]
    pub fn new(config: FileConfig) -> FileBackend {
        FileBackend {
            config: Arc::new(config),
        }
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
            size_unit: 1,
        }
    }

    fn connect(&self, domain: &str, _lane: Lane, _ctl: &dyn Ctl) -> Result<Box<dyn Session>> {
        let _ = &self.config;
        let message = format!("domain {domain}: not built yet");
        Err(Error::new(ErrorKind::Internal, "connect", message))
    }
}
