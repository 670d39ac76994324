//! Why there is no thread, or no pool as asked.

use std::{fmt, io};
use thiserror::Error;

/// Why a thread wasn't started.
#[derive(Debug)]
pub(crate) enum Refusal {
    Budget(usize),
    Crowded(usize),
    System(io::Error),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Budget(max) => write!(f, "limits.threads ({max}) is reached"),
            Refusal::Crowded(gone) => write!(
                f,
                "no new worker until one of {gone} threads that were given up or told to leave ends"
            ),
            Refusal::System(error) => write!(f, "the system gave no thread: {error}"),
        }
    }
}

/// Why the pools can't be as asked.
#[derive(Debug, Error)]
pub enum PoolsError {
    /// Some pool could then not replace what it abandons, because others used up the threads.
    #[error(
        "limits.threads is {threads_max}, but the pools can need {needed} threads (workers, those \
         that may be abandoned, a probe per domain); raise it, or lower lanes.*.threads and \
         lanes.*.abandoned_max"
    )]
    Budget {
        /// `limits.threads`.
        threads_max: usize,
        /// What all pools together can need.
        needed: usize,
    },
    /// There is no such pool.
    #[error("there is no pool for domain {domain}")]
    NoPool {
        /// Which domain.
        domain: String,
    },
    /// A thread could not be started.
    #[error("domain {domain}: {cause}")]
    Spawn {
        /// Which domain.
        domain: String,
        /// In words.
        cause: String,
    },
}
