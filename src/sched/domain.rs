//! What fails together: a domain's pools with their breakers, its probe, its pause for lack of
//! space.

use super::policy::DomainPolicy;
use crate::model::{Lane, Millis, ObjectId};

/// A domain.
#[derive(Debug, Clone)]
pub struct Domain {
    lanes: [LaneState; 2],
    /// Whether the backend answers.
    pub probe: ProbeState,
    /// No space: creates wait.
    pub pause: Option<Pause>,
}

/// A pool, as the scheduler sees it. What runs in it is counted by the table.
#[derive(Debug, Clone)]
pub struct LaneState {
    /// Live workers, busy ones included, abandoned ones not.
    pub workers: usize,
    /// Abandoned threads that it may have.
    pub abandoned_max: usize,
    /// Its breaker.
    pub gate: Gate,
    /// Since when it has had `abandoned_max` abandoned threads.
    pub full_since: Option<Millis>,
}

/// The breaker of a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Gate {
    /// Work flows; this many attempts were abandoned since the last success.
    Closed {
        /// Abandoned attempts in a row.
        hangs: u32,
    },
    /// Objects wait, unharmed.
    Open {
        /// Since when work hasn't flowed.
        since: Millis,
        /// When the probe goes.
        until: Millis,
        /// How long it stays open this time.
        open_ms: u64,
        /// Why, in a sentence.
        why: String,
    },
    /// The probe is under way; a hung one is waited for.
    Probing {
        /// Since when work hasn't flowed.
        since: Millis,
        /// How long it was open.
        open_ms: u64,
        /// Why, in a sentence.
        why: String,
    },
    /// The probe came back: one object goes first.
    HalfOpen {
        /// Since when work hasn't flowed.
        since: Millis,
        /// How long it was open.
        open_ms: u64,
        /// Why, in a sentence.
        why: String,
        /// The object that goes first, once it was found.
        canary: Option<ObjectId>,
    },
}

impl Gate {
    /// The word of the status and the metrics.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Gate::Closed { .. } => "closed",
            Gate::Open { .. } | Gate::Probing { .. } => "open",
            Gate::HalfOpen { .. } => "half-open",
        }
    }

    /// Since when work hasn't flowed, and why.
    #[must_use]
    pub fn trouble(&self) -> Option<(Millis, &str)> {
        match self {
            Gate::Closed { .. } => None,
            Gate::Open { since, why, .. }
            | Gate::Probing { since, why, .. }
            | Gate::HalfOpen { since, why, .. } => Some((*since, why)),
        }
    }
}

/// What is known of a domain's backend.
#[derive(Debug, Clone, Default)]
pub struct ProbeState {
    /// Since when a probe is under way.
    pub outstanding_since: Option<Millis>,
    /// When the next one goes.
    pub next_at: Option<Millis>,
    /// When the last one succeeded.
    pub last_ok_at: Option<Millis>,
    /// Since when all of them succeeded.
    pub ok_since: Option<Millis>,
    /// Why the last one failed, in a sentence.
    pub error: Option<String>,
}

/// A domain without space.
#[derive(Debug, Clone)]
pub struct Pause {
    /// Since when.
    pub since: Millis,
    /// When one create may try.
    pub next_canary_at: Millis,
    /// The one that tries.
    pub canary: Option<ObjectId>,
    /// What the backend said.
    pub why: String,
}

impl Domain {
    pub fn new(policy: &DomainPolicy) -> Domain {
        let lane = |lane: Lane| LaneState {
            workers: policy.threads(lane),
            abandoned_max: policy.abandoned_max(lane),
            gate: Gate::Closed { hangs: 0 },
            full_since: None,
        };
        Domain {
            lanes: [lane(Lane::Create), lane(Lane::Delete)],
            probe: ProbeState::default(),
            pause: None,
        }
    }

    /// Takes over new bounds. The number of workers follows when the pool says so.
    pub fn adapt(&mut self, policy: &DomainPolicy) {
        for lane in Lane::ALL {
            self.lane_mut(lane).abandoned_max = policy.abandoned_max(lane);
        }
    }

    pub fn lane(&self, lane: Lane) -> &LaneState {
        &self.lanes[lane as usize]
    }

    pub fn lane_mut(&mut self, lane: Lane) -> &mut LaneState {
        &mut self.lanes[lane as usize]
    }
}
