//! The scheduler: decides, and does nothing else.
//!
//! `step(now, event)` takes one event and returns the commands that follow from it. It is pure: it
//! never does I/O, never reads a clock, never spawns, and knows `model` and the plain types of
//! `backend` only. The daemon commits the writes of a batch of steps before it performs any other
//! command; if the commit fails it calls `rollback`, and the scheduler is back at the committed
//! state. The simulator in `tests/sim.rs` drives the same three calls.
//!
//! It is level-triggered: an object has a wish and a state, and `settle` starts whatever brings
//! the state closer to the wish. Requests only change wishes; results only change what is known.

mod admit;
mod backoff;
mod domain;
mod outcome;
mod policy;
mod probe;
mod request;
mod settle;
mod table;
mod trouble;
mod view;
mod watch;
mod wishes;
mod work;

pub use domain::{Gate, LaneState, Pause, ProbeState};
pub use policy::{ClassPolicy, DomainPolicy, Policy, RetryPolicy};
pub use request::{
    Accepted, Lookup, Named, NewVolume, Refusal, Request, SourceWish, VolumeChange, Why,
};
pub use view::{DomainView, LaneView, View};

use crate::backend::{Error, Outcome};
use crate::model::{Entry, Lane, Millis, ObjectId, Phase, Record, Step};
use domain::Domain;
use std::collections::BTreeMap;
use table::Table;

/// Names the request that an answer belongs to.
pub type Ticket = u64;

/// What can happen.
#[derive(Debug, Clone)]
pub enum Event {
    /// What the store holds; the first event of all.
    Loaded {
        /// Every record that isn't settled.
        records: Vec<Record>,
        /// How many objects of each kind are in each phase, settled ones included.
        counts: BTreeMap<(&'static str, Phase), u64>,
        /// Root → which cluster and pool, or which root directory, it is.
        identities: BTreeMap<String, String>,
    },
    /// Somebody wishes something.
    Request {
        /// Names the answer.
        ticket: Ticket,
        /// The wish.
        request: Box<Request>,
        /// The stored rows that it names (see `Request::lookups`).
        rows: Vec<Record>,
    },
    /// An attempt ended, and its worker owns the outcome.
    Finished {
        /// Which attempt.
        attempt: u64,
        /// Of which object.
        object: ObjectId,
        /// What it brought.
        result: Result<Outcome, Error>,
        /// Stored rows of the children of that image (see `lookups_of`).
        rows: Vec<Record>,
    },
    /// An attempt hangs; its thread was abandoned. The object is held from now on.
    Abandoned {
        /// Which attempt.
        attempt: u64,
        /// Of which object.
        object: ObjectId,
        /// When it was taken up.
        started_at: Millis,
        /// When it was abandoned.
        at: Millis,
        /// Its deadline in milliseconds.
        deadline_ms: u64,
        /// What it was doing: its own step, or `Connect` when it hangs on the way there.
        step: Step,
    },
    /// An abandoned attempt returned after all: this is what really happened.
    LateReturn {
        /// Which attempt.
        attempt: u64,
        /// Of which object.
        object: ObjectId,
        /// What it brought.
        result: Result<Outcome, Error>,
        /// Stored rows of the children of that image (see `lookups_of`).
        rows: Vec<Record>,
    },
    /// A probe ended.
    Probed {
        /// Of which domain.
        domain: String,
        /// Root → identity, or why not.
        result: Result<BTreeMap<String, String>, Error>,
    },
    /// Time has passed.
    Tick {
        /// Running attempts → when they last made progress.
        progress: BTreeMap<u64, Millis>,
    },
    /// A pool has another number of live workers.
    LaneChanged {
        /// Of which domain.
        domain: String,
        /// Which pool.
        lane: Lane,
        /// Workers that take jobs, busy ones included, abandoned ones not.
        workers: usize,
    },
    /// The configuration was read again.
    ConfigChanged(Box<Policy>),
    /// No new wishes and no new work from now on; what runs may finish.
    Drain,
}

/// What the daemon shall do. Writes come first and are committed before anything else is done.
#[derive(Debug, Clone)]
pub enum Command {
    /// Store this record.
    Put(Box<Record>),
    /// Remove this record.
    Remove(ObjectId),
    /// Append to the event log.
    Log(Entry),
    /// Remember which cluster and pool, or which root directory, a root is.
    Identity {
        /// The pool or directory.
        root: String,
        /// Which one.
        identity: String,
    },
    /// Run a step on a free worker.
    Dispatch(Dispatch),
    /// Ask a running attempt to end early.
    Cancel {
        /// Which attempt.
        attempt: u64,
        /// In which domain.
        domain: String,
        /// In which pool.
        lane: Lane,
    },
    /// Ask the backend whether it answers.
    Probe {
        /// Which domain.
        domain: String,
        /// Whether calls are abandoned there: then get their threads back after a success.
        recover: bool,
    },
    /// Answer a request.
    Reply {
        /// Which one.
        ticket: Ticket,
        /// What to say.
        answer: Box<Result<Accepted, Refusal>>,
    },
    /// A pool is full of hung threads although its backend is well: end this process in order, so
    /// that the supervisor starts a new one.
    Restart {
        /// Why, in a sentence.
        why: String,
    },
    /// Send a `Tick` at that time, if nothing happens before.
    WakeAt(Millis),
}

/// A step of an object, for a worker.
#[derive(Debug, Clone)]
pub struct Dispatch {
    /// Which object.
    pub object: ObjectId,
    /// Its number; unique in the life of the process.
    pub attempt: u64,
    /// What to do.
    pub step: Step,
    /// In which domain.
    pub domain: String,
    /// In which pool.
    pub lane: Lane,
    /// The object as committed.
    pub record: Box<Record>,
}

/// The scheduler.
#[derive(Debug)]
pub struct Sched {
    policy: Policy,
    table: Table,
    domains: BTreeMap<String, Domain>,
    identities: BTreeMap<String, String>,
    attempts: u64,
    draining: bool,
    restarting: bool,
    rng: backoff::Rng,
    now: Millis,
    stuck_reports: u64,
    hot_loops: u64,
    /// What `rollback` goes back to, besides the objects (which have a journal of their own).
    saved: Option<Saved>,
    out: Vec<Command>,
}

#[derive(Debug, Clone)]
struct Saved {
    domains: BTreeMap<String, Domain>,
    identities: BTreeMap<String, String>,
    restarting: bool,
    draining: bool,
    rng: backoff::Rng,
}

impl Sched {
    /// A scheduler without objects; `Event::Loaded` comes next. The seed feeds the jitter of
    /// retries and nothing else.
    #[must_use]
    pub fn new(policy: Policy, seed: u64) -> Sched {
        let mut sched = Sched {
            policy,
            table: Table::default(),
            domains: BTreeMap::new(),
            identities: BTreeMap::new(),
            attempts: 0,
            draining: false,
            restarting: false,
            rng: backoff::Rng::new(seed),
            now: Millis::default(),
            stuck_reports: 0,
            hot_loops: 0,
            saved: None,
            out: Vec::new(),
        };
        sched.adapt_domains();
        sched
    }

    /// Takes one event and says what follows. Steps between two calls of `committed` or
    /// `rollback` form a batch.
    pub fn step(&mut self, now: Millis, event: Event) -> Vec<Command> {
        if self.saved.is_none() {
            self.saved = Some(Saved {
                domains: self.domains.clone(),
                identities: self.identities.clone(),
                restarting: self.restarting,
                draining: self.draining,
                rng: self.rng.clone(),
            });
        }
        self.now = now;
        self.table.at(now);
        self.take(event);
        self.settle();
        self.emit()
    }

    /// What the event itself says; what follows from it is up to `settle`.
    fn take(&mut self, event: Event) {
        match event {
            Event::Loaded {
                records,
                counts,
                identities,
            } => {
                self.loaded(records, counts, identities);
            }
            Event::Request {
                ticket,
                request,
                rows,
            } => self.request(ticket, *request, &rows),
            Event::Finished {
                attempt,
                object,
                result,
                rows,
            } => {
                self.finished(attempt, object, result, &rows, false);
            }
            Event::LateReturn {
                attempt,
                object,
                result,
                rows,
            } => {
                self.finished(attempt, object, result, &rows, true);
            }
            Event::Abandoned {
                attempt,
                object,
                started_at,
                at,
                deadline_ms,
                step,
            } => {
                self.abandoned(
                    attempt,
                    object,
                    &trouble::Hang {
                        started_at,
                        at,
                        deadline_ms,
                        step,
                    },
                );
            }
            Event::Probed { domain, result } => self.probed(&domain, result),
            Event::Tick { progress } => self.watch(&progress),
            Event::LaneChanged {
                domain,
                lane,
                workers,
            } => {
                if let Some(domain) = self.domains.get_mut(&domain) {
                    domain.lane_mut(lane).workers = workers;
                }
            }
            Event::ConfigChanged(policy) => {
                self.policy = *policy;
                self.adapt_domains();
            }
            Event::Drain => self.draining = true,
        }
    }

    /// The writes of the batch are durable.
    pub fn committed(&mut self) {
        self.saved = None;
        self.table.committed();
    }

    /// The writes of the batch could not be made durable: back to the committed state. Attempt
    /// numbers are not used again. A changed configuration stays.
    pub fn rollback(&mut self) {
        self.table.rollback();
        if let Some(saved) = self.saved.take() {
            self.domains = saved.domains;
            self.identities = saved.identities;
            self.restarting = saved.restarting;
            self.draining = saved.draining;
            self.rng = saved.rng;
            self.adapt_domains();
        }
        self.out.clear();
    }

    /// Which stored rows an event needs beside it.
    #[must_use]
    pub fn lookups_of(event: &Event) -> Vec<Lookup> {
        match event {
            Event::Request { request, .. } => request.lookups(),
            Event::Finished { object, result, .. } | Event::LateReturn { object, result, .. } => {
                outcome::lookups(*object, result)
            }
            _ => Vec::new(),
        }
    }

    fn loaded(
        &mut self,
        records: Vec<Record>,
        counts: BTreeMap<(&'static str, Phase), u64>,
        identities: BTreeMap<String, String>,
    ) {
        self.identities = identities;
        self.table.load(records, counts);
        for domain in self.domains.values_mut() {
            domain.probe.next_at = Some(self.now);
        }
    }

    fn adapt_domains(&mut self) {
        for (name, policy) in &self.policy.domains {
            self.domains
                .entry(name.clone())
                .or_insert_with(|| Domain::new(policy))
                .adapt(policy);
        }
    }

    fn emit(&mut self) -> Vec<Command> {
        let mut commands = self.table.take_writes();
        commands.append(&mut self.out);
        let wakes = [
            self.table.next_timer(),
            self.table.next_stuck().map(|(at, _)| at),
            self.next_domain_wake(),
        ];
        if let Some(at) = wakes.into_iter().flatten().min() {
            commands.push(Command::WakeAt(at));
        }
        commands
    }

    fn log(&mut self, at: Millis, object: String, warning: bool, reason: &str, message: String) {
        let reason = reason.to_owned();
        self.out.push(Command::Log(Entry {
            at,
            object,
            warning,
            reason,
            message,
        }));
    }

    fn log_object(&mut self, id: ObjectId, warning: bool, reason: &str, message: String) {
        self.log_object_at(self.now, id, warning, reason, message);
    }

    fn log_object_at(
        &mut self,
        at: Millis,
        id: ObjectId,
        warning: bool,
        reason: &str,
        message: String,
    ) {
        let title = self.table.get(id).map(|object| object.record.title());
        self.log(
            at,
            title.unwrap_or_else(|| id.uid().to_string()),
            warning,
            reason,
            message,
        );
    }
}
