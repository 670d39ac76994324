//! A storage in memory that behaves like Ceph RBD: for the simulator, benchmarks and drills.
//!
//! This module owns the simulated world and its rules. Nothing of it survives the process.

use super::{Backend, Caps, Ctl, Error, Result, Session};
use crate::model::{ErrorKind, Lane, Step};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

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
}

impl SimBackend {
    /// An empty world.
    #[must_use]
    pub fn new(config: SimConfig) -> SimBackend {
        SimBackend {
            config: Arc::new(config),
        }
    }
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
        let _ = &self.config;
        let message = format!("domain {domain}: not built yet");
        Err(Error::new(ErrorKind::Internal, "connect", message))
    }
}
