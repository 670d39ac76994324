//! One pool: the channel to its workers, its seats and its numbers.

use super::worker;
use super::{About, Job, Refusal, Report, Shared, Unreplaced, lock};
use crate::model::Lane;
use crate::slot::{Seen, Slot, Stage};
use crossbeam::channel::{Receiver, Sender, bounded};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// The most workers that one lane can have; also the places of its channel.
pub const THREADS_MAX: usize = 1024;

/// After a failed spawn the next try comes after this many milliseconds, then twice as many.
const SPAWN_BACKOFF_MS: u64 = 1_000;
const SPAWN_BACKOFF_MAX_MS: u64 = 30_000;

/// What a worker is told.
pub(super) enum Order {
    /// Run this.
    Run(Box<Job>),
    /// End.
    Leave,
}

/// The numbers of one pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// How many workers it shall have.
    pub wanted: usize,
    /// How many it has, abandoned ones not counted.
    pub threads: usize,
    /// Workers with an attempt.
    pub busy: usize,
    /// Workers without: jobs that it takes now.
    pub idle: usize,
    /// Threads that were given up and haven't come back.
    pub abandoned: usize,
    /// The most abandoned threads that it may have.
    pub abandoned_max: usize,
    /// Attempts beyond their deadline that can't be given up because of `abandoned_max`.
    pub late: usize,
}

/// A worker's place in the pool. An abandoned worker keeps its seat until it comes back.
pub(crate) struct Seat {
    pub(crate) slot: Arc<Slot>,
    /// What the slot runs, in words: written when an attempt begins, never held across a call.
    pub(crate) about: Mutex<Option<(About, String)>>,
    /// Held by the watchdog from before it gives an attempt up until the loop has been told, and
    /// taken by the worker before it tells of its late return: the loop hears both in that order.
    pub(crate) verdict: Mutex<()>,
    id: u64,
}

pub(crate) struct Pool {
    pub(crate) domain: Arc<str>,
    pub(crate) lane: Lane,
    pub(super) orders: Receiver<Order>,
    sender: Sender<Order>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    wanted: usize,
    /// Workers that aren't abandoned or leaving, those that are being started included.
    live: usize,
    starting: usize,
    ready: usize,
    /// Workers that were told to leave, or left by themselves, and haven't ended yet.
    leaving: usize,
    abandoned: usize,
    abandoned_max: usize,
    removed: bool,
    seats: Vec<Arc<Seat>>,
    /// Seats (by id) whose attempt is overdue while `abandoned_max` is reached.
    late: Vec<u64>,
    /// Attempts in the channel.
    queued: BTreeMap<u64, Queued>,
    last_id: u64,
    retry_at_ms: Option<u64>,
    backoff_ms: u64,
    /// The number of workers that the loop was told last.
    told: Option<usize>,
    /// The present lack of workers has been logged.
    lack_told: bool,
}

/// An attempt that no worker has taken yet.
struct Queued {
    cancelled: bool,
    since_ms: u64,
}

impl State {
    /// Workers that take jobs or have one.
    fn workers(&self) -> usize {
        self.live.saturating_sub(self.starting)
    }

    /// Whether another thread would be more than this pool may ever have: threads that were told
    /// to leave and those abandoned beyond a lowered `abandoned_max` use up its share.
    fn is_crowded(&self) -> bool {
        self.live + self.leaving + self.abandoned >= self.wanted + self.abandoned_max
    }

    /// Puts off the next try, unless one is to come anyway.
    fn back_off(&mut self, now_ms: u64) {
        if self.retry_at_ms.is_none_or(|at_ms| at_ms <= now_ms) {
            self.backoff_ms = match self.backoff_ms {
                0 => SPAWN_BACKOFF_MS,
                last_ms => (last_ms * 2).min(SPAWN_BACKOFF_MAX_MS),
            };
            self.retry_at_ms = Some(now_ms + self.backoff_ms);
        }
    }
}

/// What came of giving up an attempt.
pub(crate) enum Given {
    /// It is abandoned now; the replacement is up to `fill`.
    Up,
    /// `abandoned_max` is reached: it stays, and counts as late.
    NoRoom,
    /// It ended, or went on to something else, in the same moment.
    Not,
}

impl Pool {
    pub(super) fn new(domain: Arc<str>, lane: Lane) -> Pool {
        let (sender, orders) = bounded(THREADS_MAX);
        Pool {
            domain,
            lane,
            orders,
            sender,
            state: Mutex::default(),
        }
    }

    /// Gives it these numbers; `fill` and `announce` come next.
    pub(super) fn configure(&self, threads: usize, abandoned_max: usize) {
        let mut state = lock(&self.state);
        state.removed = false;
        state.abandoned_max = abandoned_max;
        drop(state);
        self.resize(threads);
    }

    pub(super) fn remove(&self, shared: &Shared) {
        lock(&self.state).removed = true;
        self.resize(0);
        self.announce(shared);
    }

    pub(super) fn is_removed(&self) -> bool {
        lock(&self.state).removed
    }

    /// The most threads that it may need; 0 once it was removed.
    pub(super) fn share(&self) -> usize {
        let state = lock(&self.state);
        if state.removed {
            0
        } else {
            state.wanted + state.abandoned_max
        }
    }

    /// Tells the loop how many workers there are. The number is read and sent under one lock, so
    /// the last one told is the last one true.
    pub(crate) fn announce(&self, shared: &Shared) {
        self.announce_in(shared, &mut lock(&self.state));
    }

    /// The same, unless that number was told last.
    pub(crate) fn announce_change(&self, shared: &Shared) {
        let mut state = lock(&self.state);
        if state.told != Some(state.workers()) {
            self.announce_in(shared, &mut state);
        }
    }

    fn announce_in(&self, shared: &Shared, state: &mut State) {
        state.told = Some(state.workers());
        shared.report(Report::LaneChanged {
            domain: Arc::clone(&self.domain),
            lane: self.lane,
            workers: state.workers(),
        });
    }

    /// Sets the number of workers and lets free surplus ones leave; busy ones leave at their end.
    fn resize(&self, threads: usize) {
        let mut state = lock(&self.state);
        state.wanted = threads.min(THREADS_MAX);
        state.retry_at_ms = None;
        while state.live > state.wanted && state.ready > 0 {
            if self.sender.try_send(Order::Leave).is_err() {
                break;
            }
            state.ready -= 1;
            state.live -= 1;
            state.leaving += 1;
        }
    }

    pub(super) fn is_over(&self) -> bool {
        let state = lock(&self.state);
        state.removed && state.seats.is_empty() && state.live == 0
    }

    pub(crate) fn counts(&self) -> Counts {
        let state = lock(&self.state);
        Counts {
            wanted: state.wanted,
            threads: state.workers(),
            busy: state.workers().saturating_sub(state.ready),
            idle: state.ready,
            abandoned: state.abandoned,
            abandoned_max: state.abandoned_max,
            late: state.late.len(),
        }
    }

    pub(crate) fn seats(&self) -> Vec<Arc<Seat>> {
        lock(&self.state).seats.clone()
    }

    pub(super) fn dispatch(&self, job: Box<Job>, now_ms: u64) -> Result<(), Box<Job>> {
        let mut state = lock(&self.state);
        if state.ready == 0 {
            return Err(job);
        }
        let attempt = job.attempt;
        match self.sender.try_send(Order::Run(job)) {
            Ok(()) => {
                state.ready -= 1;
                let queued = Queued {
                    cancelled: false,
                    since_ms: now_ms,
                };
                state.queued.insert(attempt, queued);
                Ok(())
            }
            Err(error) => match error.into_inner() {
                Order::Run(job) => Err(job),
                Order::Leave => unreachable!("a job was sent"),
            },
        }
    }

    pub(super) fn cancel(&self, attempt: u64, now_ms: u64) -> bool {
        let mut state = lock(&self.state);
        if let Some(queued) = state.queued.get_mut(&attempt) {
            return !std::mem::replace(&mut queued.cancelled, true);
        }
        state
            .seats
            .iter()
            .any(|seat| seat.slot.cancel(attempt, now_ms))
    }

    pub(super) fn cancel_all(&self, now_ms: u64) {
        let mut state = lock(&self.state);
        for queued in state.queued.values_mut() {
            queued.cancelled = true;
        }
        for seat in &state.seats {
            seat.slot.cancel(seat.slot.seen().attempt(), now_ms);
        }
    }

    /// A worker begins its job: from here on `cancel` finds it in its slot.
    pub(super) fn begin(&self, shared: &Shared, seat: &Seat, job: &Job, stage: Stage) -> About {
        let mut state = lock(&self.state);
        let queued = state.queued.remove(&job.attempt);
        let now_ms = shared.clock.now_ms();
        let since_ms = queued.as_ref().map_or(now_ms, |queued| queued.since_ms);
        let about = About {
            object: job.object,
            attempt: job.attempt,
            step: job.step,
            domain: Arc::clone(&job.domain),
            lane: job.lane,
            connecting: stage == Stage::Connect,
            started_at: shared.clock.wall(),
            started_ms: now_ms,
            waited_ms: now_ms.saturating_sub(since_ms),
        };
        let plan = match stage {
            Stage::Connect => shared.connect,
            Stage::Work => worker::plan(job),
        };
        let cancelled = queued.is_some_and(|queued| queued.cancelled);
        *lock(&seat.about) = Some((about.clone(), job.title.clone()));
        seat.slot.begin(job.attempt, stage, plan, cancelled, now_ms);
        about
    }

    /// A worker has ended its attempt. True if it goes on, false if it leaves.
    pub(super) fn end(&self, shared: &Shared, seat: &Seat) -> bool {
        let mut state = lock(&self.state);
        state.late.retain(|id| *id != seat.id);
        if state.live > state.wanted {
            state.live -= 1;
            state.leaving += 1;
            self.announce_in(shared, &mut state);
            return false;
        }
        state.ready += 1;
        true
    }

    /// A worker's thread ends, for whatever reason.
    pub(super) fn vacate(&self, shared: &Shared, seat: &Seat, end: End) {
        let mut state = lock(&self.state);
        state.seats.retain(|other| other.id != seat.id);
        state.late.retain(|id| *id != seat.id);
        match end {
            End::Abandoned => state.abandoned -= 1,
            End::Left => state.leaving -= 1,
            End::Crashed => {
                state.live -= 1;
                self.announce_in(shared, &mut state);
            }
        }
        drop(state);
        shared.thread_ended();
        shared.waker.ring();
    }

    /// The watchdog gives up the attempt that was seen in that seat.
    pub(crate) fn give_up(&self, seat: &Seat, seen: Seen) -> Given {
        let mut state = lock(&self.state);
        if state.abandoned >= state.abandoned_max {
            if seat.slot.seen() == seen && !state.late.contains(&seat.id) {
                state.late.push(seat.id);
            }
            return Given::NoRoom;
        }
        if !seat.slot.abandon(seen) {
            return Given::Not;
        }
        state.late.retain(|id| *id != seat.id);
        state.abandoned += 1;
        state.live -= 1;
        Given::Up
    }

    /// Whether workers are missing, and when the next try is due (`None`: now).
    pub(crate) fn missing(&self) -> Option<Option<u64>> {
        let state = lock(&self.state);
        (state.live < state.wanted).then_some(state.retry_at_ms)
    }

    /// Starts the workers that are missing. Says how many were started. Doesn't announce them: the
    /// loop must hear of an abandoned worker before it hears of the next.
    pub(crate) fn fill(self: &Arc<Pool>, shared: &Arc<Shared>, now_ms: u64) -> Filled {
        let mut started = 0;
        loop {
            let mut state = lock(&self.state);
            if state.live >= state.wanted {
                state.retry_at_ms = None;
                state.lack_told = false;
                return Ok(started);
            }
            if state.is_crowded() {
                return Err(Refusal::Crowded(state.leaving + state.abandoned));
            }
            state.live += 1;
            state.starting += 1;
            state.last_id += 1;
            let id = state.last_id;
            drop(state);
            if let Err(refusal) = self.hire(shared, id) {
                let mut state = lock(&self.state);
                state.live -= 1;
                state.starting -= 1;
                state.seats.retain(|seat| seat.id != id);
                if matches!(refusal, Refusal::System(_)) {
                    state.back_off(now_ms);
                }
                return Err(refusal);
            }
            let mut state = lock(&self.state);
            state.starting -= 1;
            state.ready += 1;
            state.backoff_ms = 0;
            state.retry_at_ms = None;
            started += 1;
        }
    }

    fn hire(self: &Arc<Pool>, shared: &Arc<Shared>, id: u64) -> Result<(), Refusal> {
        let seat = Arc::new(Seat {
            slot: Arc::default(),
            about: Mutex::default(),
            verdict: Mutex::default(),
            id,
        });
        lock(&self.state).seats.push(Arc::clone(&seat));
        let lane = self.lane.as_str();
        let (pool, crew) = (Arc::clone(self), Arc::clone(shared));
        shared.start_thread(
            &format!("{}{id}-{}", &lane[..3], self.domain),
            Box::new(move || worker::run(&crew, &pool, &seat)),
        )
    }

    /// Tells that workers couldn't be started: once per lack for a full budget, which goes on
    /// until some thread ends, and for the system at every try.
    pub(crate) fn complain(&self, shared: &Shared, refusal: &Refusal) {
        let told = std::mem::replace(&mut lock(&self.state).lack_told, true);
        if told && !matches!(refusal, Refusal::System(_)) {
            return;
        }
        let (domain, lane) = (Arc::clone(&self.domain), self.lane);
        log::warn!("domain={domain} lane={} {refusal}", lane.as_str());
        shared.mention(Report::SpawnFailed {
            domain,
            lane,
            cause: refusal.to_string(),
            at: shared.clock.wall(),
        });
    }
}

/// How many workers were started, or why one wasn't.
pub(crate) type Filled = Result<usize, Refusal>;

impl Unreplaced {
    pub(crate) fn of(filled: &Filled) -> Option<Unreplaced> {
        match filled {
            Ok(0) => Some(Unreplaced::NotWanted),
            Ok(_) => None,
            Err(Refusal::Budget(_) | Refusal::Crowded(_)) => Some(Unreplaced::Budget),
            Err(Refusal::System(_)) => Some(Unreplaced::SpawnFailed),
        }
    }
}

/// How a worker's thread ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// It came back from an abandoned attempt.
    Abandoned,
    /// It was surplus.
    Left,
    /// A fault of this module.
    Crashed,
}
