//! What goes into a pool and what comes out of it.

use crate::backend::{self, Outcome};
use crate::model::{Lane, Millis, ObjectId, Record, Step};
use crate::slot::Deadline;
use std::collections::BTreeMap;
use std::sync::Arc;

/// One attempt, ready to run.
#[derive(Debug, Clone)]
pub struct Job {
    /// Which object.
    pub object: ObjectId,
    /// The object in words, for status and log.
    pub title: String,
    /// Unique in this process, from 1, below 2^60.
    pub attempt: u64,
    /// What to do. Never `Probe` or `Connect`.
    pub step: Step,
    /// What the backend gets.
    pub record: Arc<Record>,
    /// When it is abandoned.
    pub deadline: Deadline,
    /// The cancel flag goes up this many milliseconds before the deadline.
    pub cancel_grace_ms: u64,
    /// Which domain's pool.
    pub domain: Arc<str>,
    /// Which of its two lanes.
    pub lane: Lane,
}

/// A question to a domain whether it answers. It runs on the domain's probe thread and is never
/// abandoned.
#[derive(Debug, Clone)]
pub struct ProbeJob {
    /// After a success, get the threads of abandoned calls back where that is possible.
    pub recover: bool,
    /// Which domain.
    pub domain: Arc<str>,
    /// Unique in this process, like that of a `Job`.
    pub attempt: u64,
}

/// What every report about an attempt says.
#[derive(Debug, Clone)]
pub struct About {
    /// Which object.
    pub object: ObjectId,
    /// The attempt number of its job.
    pub attempt: u64,
    /// The step of its job.
    pub step: Step,
    /// The pool's domain.
    pub domain: Arc<str>,
    /// The pool's lane.
    pub lane: Lane,
    /// True if the attempt got no further than opening a session: the step never began.
    pub connecting: bool,
    /// When a worker took it, on the wall clock.
    pub started_at: Millis,
    /// The same on the monotonic clock, in milliseconds.
    pub started_ms: u64,
    /// How long the job had waited for a worker to take it, in milliseconds.
    pub waited_ms: u64,
}

impl About {
    /// What the thread was inside of: the step of the job, or `Connect`.
    #[must_use]
    pub fn doing(&self) -> Step {
        if self.connecting {
            Step::Connect
        } else {
            self.step
        }
    }
}

/// Why an abandoned worker has no replacement yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unreplaced {
    /// `limits.threads`, or this pool's share of it, is used up; tried again when a thread ends.
    Budget,
    /// The system gave no thread; tried again with backoff.
    SpawnFailed,
    /// The pool has been made smaller.
    NotWanted,
}

/// What the threads tell the loop.
#[derive(Debug, Clone)]
pub enum Report {
    /// An attempt ended and its worker is free again (unless the pool shrinks).
    Finished {
        /// Which attempt.
        about: About,
        /// What the backend said.
        result: backend::Result<Outcome>,
        /// When it ended, on the wall clock.
        ended_at: Millis,
        /// How long it ran, in milliseconds.
        ran_ms: u64,
    },
    /// An attempt was given up; its thread is still inside the backend.
    Abandoned {
        /// Which attempt.
        about: About,
        /// When, on the wall clock.
        abandoned_at: Millis,
        /// How long it had run, in milliseconds.
        ran_ms: u64,
        /// How long it was allowed to run, in milliseconds: from its start to its deadline, which
        /// progress may have put off.
        deadline_ms: u64,
        /// Milliseconds between its deadline and now.
        late_ms: u64,
        /// `None` if a replacement was started.
        unreplaced: Option<Unreplaced>,
    },
    /// An abandoned attempt came back. Its thread ends.
    LateReturn {
        /// Which attempt.
        about: About,
        /// What really happened.
        result: backend::Result<Outcome>,
        /// When it came back, on the wall clock.
        ended_at: Millis,
        /// How long it ran in all, in milliseconds.
        ran_ms: u64,
    },
    /// A probe was answered.
    Probed {
        /// Which domain.
        domain: Arc<str>,
        /// The attempt number of its job.
        attempt: u64,
        /// Root → identity, or why not.
        result: backend::Result<BTreeMap<String, String>>,
        /// How many sessions of abandoned calls were fenced off, if that was tried.
        recovered: Option<backend::Result<usize>>,
        /// When it began, on the wall clock.
        started_at: Millis,
        /// When it ended, on the wall clock.
        ended_at: Millis,
        /// How long it took, in milliseconds.
        ran_ms: u64,
    },
    /// The number of workers of a pool, after each change of it: at the start, after a resize, when
    /// a worker came or ended. After an `Abandoned` (which took one off) it says whether there is
    /// a replacement. The last one that was sent is the truth.
    LaneChanged {
        /// Which domain.
        domain: Arc<str>,
        /// Which lane.
        lane: Lane,
        /// Workers, busy ones included, abandoned ones not.
        workers: usize,
    },
    /// A worker could not be started; tried again with backoff. Only told if there is room in the
    /// channel: the counts say the same.
    SpawnFailed {
        /// Which domain.
        domain: Arc<str>,
        /// Which lane.
        lane: Lane,
        /// In words.
        cause: String,
        /// When, on the wall clock.
        at: Millis,
    },
}
