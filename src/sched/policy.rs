//! The part of the configuration that the scheduler decides by.

use crate::backend::Caps;
use crate::model::{Lane, Place, Qos};
use std::collections::{BTreeMap, BTreeSet};

/// Bounds and rules. All times are in milliseconds.
#[derive(Debug, Clone)]
pub struct Policy {
    /// What the backend can do.
    pub caps: Caps,
    /// Class → where its volumes go.
    pub classes: BTreeMap<String, ClassPolicy>,
    /// Domain → its pools.
    pub domains: BTreeMap<String, DomainPolicy>,
    /// Directories that files may be imported from.
    pub import_dirs: Vec<String>,
    /// Key ids that encryption may name.
    pub keys: BTreeSet<String>,
    /// Most unmet wishes per lane and domain.
    pub backlog: usize,
    /// Most bytes of a volume.
    pub max_size_bytes: u64,
    /// Most volumes, trash entries included.
    pub max_volumes: u64,
    /// Clones deeper than this are flattened in the background.
    pub clone_depth: u32,
    /// Clones deeper than this are refused.
    pub clone_depth_max: u32,
    /// Most LUKS2 formats at once.
    pub encrypt: usize,
    /// Failing attempts.
    pub retry: RetryPolicy,
    /// Hangs in a row that open a pool's breaker.
    pub breaker_hangs: u32,
    /// How long a breaker stays open at first.
    pub breaker_open_ms: u64,
    /// What that doubles up to.
    pub breaker_open_cap_ms: u64,
    /// How long a trash entry stays whole.
    pub trash_keep_ms: u64,
    /// Whether children that block a reclaim are flattened.
    pub trash_flatten: bool,
    /// How long a pool may be full of hung threads on a healthy backend.
    pub restart_after_ms: u64,
}

/// Failing attempts.
#[derive(Debug, Clone, Copy)]
pub struct RetryPolicy {
    /// Charged attempts before an object is given up.
    pub attempts: u32,
    /// The first wait.
    pub base_ms: u64,
    /// The longest wait.
    pub cap_ms: u64,
    /// Hangs on a healthy backend before an object is given up.
    pub hangs: u32,
}

/// A class of volumes.
#[derive(Debug, Clone)]
pub struct ClassPolicy {
    /// Where its volumes go; `class` and `domain` are filled in, `identity` is not.
    pub place: Place,
    /// Limits of volumes that name none.
    pub qos: Option<Qos>,
}

/// The pools of a domain.
#[derive(Debug, Clone, Copy)]
pub struct DomainPolicy {
    /// Workers of the create pool and of the delete pool.
    pub threads: [usize; 2],
    /// Abandoned threads that each of them may have.
    pub abandoned_max: [usize; 2],
}

impl DomainPolicy {
    /// Workers of that pool.
    #[must_use]
    pub fn threads(&self, lane: Lane) -> usize {
        self.threads[lane as usize]
    }

    /// Abandoned threads that that pool may have.
    #[must_use]
    pub fn abandoned_max(&self, lane: Lane) -> usize {
        self.abandoned_max[lane as usize]
    }
}
