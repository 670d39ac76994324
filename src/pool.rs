//! The threads that may block: a pool per domain and lane, and a probe thread per domain.
//!
//! A worker takes a job, publishes it in its slot, calls the backend, closes the slot and reports.
//! The watchdog (`watchdog.rs`) gives up what overruns its deadline and puts a fresh worker in its
//! place; the abandoned thread ends by itself when its call returns. Nothing here waits for a
//! worker, and no lock is held across a call of the backend.

mod job;
mod lane;
mod probe;
mod refusal;
mod worker;

pub use job::{About, Job, ProbeJob, Report, Unreplaced};
pub use lane::{Counts, THREADS_MAX};
pub(crate) use lane::{Given, Pool, Seat};
pub use refusal::PoolsError;
pub(crate) use refusal::Refusal;

use crate::backend::SharedBackend;
use crate::clock::Clock;
use crate::model::{Lane, Millis, Step};
use crate::slot::{Plan, Stage, State};
use crate::spawn;
use crate::watchdog::Waker;
use crossbeam::channel::{Sender, TrySendError};
use probe::Probe;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{fmt, io};

/// Sessions that may be left behind unclosed, in the life of a process.
const LEAKED_MAX: usize = 64;

/// How many threads each domain gets, and what bounds them all.
#[derive(Debug, Clone)]
pub struct Layout {
    /// The domains to start with.
    pub domains: Vec<DomainLayout>,
    /// `limits.threads`: workers, probe threads and abandoned threads of all pools together.
    pub threads_max: usize,
    /// The stack of a worker, in bytes.
    pub stack_bytes: usize,
    /// The deadline of opening a session.
    pub connect: Plan,
}

/// The pools of one domain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DomainLayout {
    /// Its name.
    pub domain: Arc<str>,
    /// Workers of the create lane.
    pub create_threads: usize,
    /// Workers of the delete lane.
    pub delete_threads: usize,
    /// Abandoned threads that the create lane may have.
    pub create_abandoned_max: usize,
    /// Abandoned threads that the delete lane may have.
    pub delete_abandoned_max: usize,
}

impl DomainLayout {
    fn threads(&self, lane: Lane) -> usize {
        match lane {
            Lane::Create => self.create_threads,
            Lane::Delete => self.delete_threads,
        }
    }

    fn abandoned_max(&self, lane: Lane) -> usize {
        match lane {
            Lane::Create => self.create_abandoned_max,
            Lane::Delete => self.delete_abandoned_max,
        }
    }
}

/// The capacity of a reports channel that never fills up while the loop only dispatches to free
/// workers: for each thread an attempt brings at most `Abandoned`, two `LaneChanged` and
/// `LateReturn`; probes and resizes add a few. If it fills up all the same, nothing blocks and
/// nothing is lost: see `Shared::report`.
#[must_use]
pub fn reports_capacity(threads_max: usize) -> usize {
    4 * threads_max + 64
}

/// How a thread is started: `spawn::spawn`, or something that fails on purpose in a test.
pub type Spawner =
    Arc<dyn Fn(&str, usize, Box<dyn FnOnce() + Send>) -> io::Result<()> + Send + Sync>;

/// The spawner of the daemon.
#[must_use]
pub fn system_spawner() -> Spawner {
    Arc::new(|name, stack_bytes, body| spawn::spawn(name, stack_bytes, body).map(drop))
}

/// One attempt that a thread is inside of, for `status`.
#[derive(Debug, Clone)]
pub struct Running {
    /// Object, step, attempt, domain, lane and start.
    pub about: About,
    /// The object in words.
    pub title: String,
    /// What the thread is doing: the step of the job, or `Connect`.
    pub doing: Step,
    /// The watchdog has given it up.
    pub abandoned: bool,
    /// When the cancel flag went up, on the wall clock.
    pub cancelled_at: Option<Millis>,
    /// When it is abandoned (or was due to be), on the wall clock.
    pub deadline_at: Millis,
    /// When progress was last seen, on the wall clock.
    pub progress_at: Millis,
    /// Work done, in the backend's units.
    pub done: u64,
    /// All of the work, in the same units; 0 if the backend didn't say.
    pub total: u64,
}

/// A probe that a thread is inside of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probing {
    /// Which domain.
    pub domain: Arc<str>,
    /// The attempt number of its job.
    pub attempt: u64,
    /// When it began, on the wall clock.
    pub started_at: Millis,
}

/// All pools of the daemon. Cheap to clone; every clone is the same pools.
#[derive(Clone)]
pub struct Pools {
    pub(crate) shared: Arc<Shared>,
}

type Key = (Arc<str>, Lane);

/// What workers, probes, the loop and the watchdog share.
pub(crate) struct Shared {
    pub(crate) backend: SharedBackend,
    pub(crate) clock: Clock,
    pub(crate) waker: Waker,
    pub(crate) connect: Plan,
    reports: Sender<Report>,
    /// Reports that found the channel full, oldest first.
    spilled: Mutex<VecDeque<Report>>,
    /// Sessions that were left behind because a call of theirs panicked.
    leaked: AtomicUsize,
    spawner: Spawner,
    stack_bytes: usize,
    threads: AtomicUsize,
    threads_max: AtomicUsize,
    pools: Mutex<BTreeMap<Key, Arc<Pool>>>,
    probes: Mutex<BTreeMap<Arc<str>, Arc<Probe>>>,
}

/// Locks; a panic elsewhere while it was held changes nothing, as every holder leaves the data
/// whole between any two of its lines that can panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// Reports to the loop, in order, and never blocks: what finds the channel full is kept, and
    /// goes first with the next report or look of the watchdog.
    pub(crate) fn report(&self, report: Report) {
        let mut spilled = lock(&self.spilled);
        spilled.push_back(report);
        if !self.drain(&mut spilled) {
            log::debug!("the loop is behind: {} reports wait", spilled.len());
            self.waker.ring();
        }
    }

    /// Sends what was kept. False if some of it is still here.
    pub(crate) fn flush(&self) -> bool {
        self.drain(&mut lock(&self.spilled))
    }

    fn drain(&self, spilled: &mut VecDeque<Report>) -> bool {
        while let Some(report) = spilled.pop_front() {
            match self.reports.try_send(report) {
                Ok(()) => {}
                Err(TrySendError::Full(report)) => {
                    spilled.push_front(report);
                    return false;
                }
                Err(TrySendError::Disconnected(_)) => spilled.clear(),
            }
        }
        true
    }

    /// Whether one more session may be left behind unclosed.
    pub(crate) fn may_leak(&self) -> bool {
        self.leaked
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |leaked| {
                (leaked < LEAKED_MAX).then_some(leaked + 1)
            })
            .is_ok()
    }

    /// Tells what may be left untold when the channel is full.
    pub(crate) fn mention(&self, report: Report) {
        drop(self.reports.try_send(report));
    }

    /// Starts a thread within the budget.
    fn start_thread(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> Result<(), Refusal> {
        let max = self.threads_max.load(Ordering::Relaxed);
        self.threads
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |alive| {
                (alive < max).then_some(alive + 1)
            })
            .map_err(|_| Refusal::Budget(max))?;
        (self.spawner)(name, self.stack_bytes, body).map_err(|error| {
            self.thread_ended();
            Refusal::System(error)
        })
    }

    fn thread_ended(&self) {
        self.threads.fetch_sub(1, Ordering::AcqRel);
    }

    pub(crate) fn all_pools(&self) -> Vec<Arc<Pool>> {
        lock(&self.pools).values().cloned().collect()
    }

    /// Forgets pools that were removed and have no thread left.
    pub(crate) fn sweep(&self) {
        lock(&self.pools).retain(|_, pool| !pool.is_over());
    }

    fn pool(&self, domain: &str, lane: Lane) -> Option<Arc<Pool>> {
        lock(&self.pools).get(&(Arc::from(domain), lane)).cloned()
    }
}

impl Pools {
    /// Starts all pools and probe threads. `reports` should have `reports_capacity` places.
    ///
    /// # Errors
    /// When a thread can't be started, or the pools can need more than `threads_max`. What was
    /// started by then ends again.
    pub fn start(
        backend: SharedBackend,
        layout: &Layout,
        clock: Clock,
        spawner: Spawner,
        reports: Sender<Report>,
    ) -> Result<Pools, PoolsError> {
        let pools = Pools {
            shared: Arc::new(Shared {
                backend,
                clock,
                waker: Waker::default(),
                connect: layout.connect,
                reports,
                spilled: Mutex::default(),
                leaked: AtomicUsize::new(0),
                spawner,
                stack_bytes: layout.stack_bytes,
                threads: AtomicUsize::new(0),
                threads_max: AtomicUsize::new(layout.threads_max),
                pools: Mutex::default(),
                probes: Mutex::default(),
            }),
        };
        for domain in &layout.domains {
            if let Err(error) = pools.add_domain(domain) {
                pools.shutdown();
                return Err(error);
            }
        }
        Ok(pools)
    }

    /// Adds a domain, or gives a known one (also a removed one) these numbers.
    ///
    /// # Errors
    /// When all pools can then need more than `threads_max` (nothing is changed), or when a thread
    /// can't be started: workers that are missing then are started later, a missing probe thread
    /// is started by the next `probe`.
    pub fn add_domain(&self, layout: &DomainLayout) -> Result<(), PoolsError> {
        let share: usize = Lane::ALL
            .into_iter()
            .map(|lane| layout.threads(lane) + layout.abandoned_max(lane))
            .sum();
        let known = self.shared.pool(&layout.domain, Lane::Create);
        let has_probe = known.is_some_and(|pool| !pool.is_removed());
        self.afford(share + usize::from(!has_probe), |(domain, _)| {
            *domain == layout.domain
        })?;
        let probe = Arc::clone(
            lock(&self.shared.probes)
                .entry(Arc::clone(&layout.domain))
                .or_insert_with(|| Arc::new(Probe::new(Arc::clone(&layout.domain)))),
        );
        let mut outcome = probe.restore(&self.shared);
        for lane in Lane::ALL {
            let pool = Arc::clone(
                lock(&self.shared.pools)
                    .entry((Arc::clone(&layout.domain), lane))
                    .or_insert_with(|| Arc::new(Pool::new(Arc::clone(&layout.domain), lane))),
            );
            pool.configure(layout.threads(lane), layout.abandoned_max(lane));
            let filled = pool.fill(&self.shared, self.shared.clock.now_ms());
            pool.announce(&self.shared);
            outcome = outcome.and(filled.map(drop));
        }
        self.shared.waker.ring();
        outcome.map_err(|refusal| PoolsError::Spawn {
            domain: layout.domain.to_string(),
            cause: refusal.to_string(),
        })
    }

    /// Takes a domain away: its workers end after what they are doing, its probe thread as well.
    pub fn remove_domain(&self, domain: &str) {
        let probe = lock(&self.shared.probes).get(domain).cloned();
        if let Some(probe) = probe {
            probe.remove();
        }
        for lane in Lane::ALL {
            if let Some(pool) = self.shared.pool(domain, lane) {
                pool.remove(&self.shared);
            }
        }
        self.shared.waker.ring();
    }

    /// Gives a lane these numbers, live: missing workers are started (now, or later if the system
    /// has no thread to give), surplus ones end when they have nothing to do. To move threads from
    /// one lane to another, shrink first.
    ///
    /// # Errors
    /// When there is no such pool, or all pools can then need more than `threads_max`; nothing is
    /// changed then.
    pub fn resize(
        &self,
        domain: &str,
        lane: Lane,
        threads: usize,
        abandoned_max: usize,
    ) -> Result<(), PoolsError> {
        let pool = self
            .shared
            .pool(domain, lane)
            .filter(|pool| !pool.is_removed())
            .ok_or_else(|| PoolsError::NoPool {
                domain: domain.to_owned(),
            })?;
        self.afford(threads + abandoned_max, |(other, of)| {
            &**other == domain && *of == lane
        })?;
        pool.configure(threads, abandoned_max);
        if let Err(refusal) = pool.fill(&self.shared, self.shared.clock.now_ms()) {
            pool.complain(&self.shared, &refusal);
        }
        pool.announce(&self.shared);
        self.shared.waker.ring();
        Ok(())
    }

    /// Changes `limits.threads`.
    ///
    /// # Errors
    /// When the pools can need more.
    pub fn set_threads_max(&self, threads_max: usize) -> Result<(), PoolsError> {
        let needed = self.needed(|_| false);
        if needed > threads_max {
            return Err(PoolsError::Budget {
                threads_max,
                needed,
            });
        }
        self.shared
            .threads_max
            .store(threads_max, Ordering::Relaxed);
        self.shared.waker.ring();
        Ok(())
    }

    /// Whether `share` threads more can be promised in place of what those pools have.
    fn afford(&self, share: usize, instead_of: impl Fn(&Key) -> bool) -> Result<(), PoolsError> {
        let needed = self.needed(instead_of) + share;
        let threads_max = self.shared.threads_max.load(Ordering::Relaxed);
        if needed <= threads_max {
            return Ok(());
        }
        Err(PoolsError::Budget {
            threads_max,
            needed,
        })
    }

    /// The most threads that all can need: each pool, but for those, its workers and what it may
    /// abandon, so that none ever lacks a thread because of another; and a probe per domain.
    fn needed(&self, but_for: impl Fn(&Key) -> bool) -> usize {
        let pools = lock(&self.shared.pools);
        let mut needed = 0;
        for (key, pool) in pools.iter() {
            if !but_for(key) {
                needed += pool.share();
            }
            // Each domain has one pool of either lane: its probe is counted with one of them.
            needed += usize::from(key.1 == Lane::Create && !pool.is_removed());
        }
        needed
    }

    /// How many workers of that pool are free: that many jobs it takes now.
    #[must_use]
    pub fn free(&self, domain: &str, lane: Lane) -> usize {
        self.counts(domain, lane).idle
    }

    /// The numbers of one pool; all 0 if there is none.
    #[must_use]
    pub fn counts(&self, domain: &str, lane: Lane) -> Counts {
        self.shared
            .pool(domain, lane)
            .map(|pool| pool.counts())
            .unwrap_or_default()
    }

    /// All threads that are alive: workers, probe threads and abandoned threads.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.shared.threads.load(Ordering::Acquire)
    }

    /// Hands a job to a free worker of its pool. Never blocks.
    ///
    /// # Errors
    /// The job, when no worker is free (or there is no such pool).
    pub fn dispatch(&self, job: Job) -> Result<(), Box<Job>> {
        match self.shared.pool(&job.domain, job.lane) {
            Some(pool) => pool.dispatch(Box::new(job), self.shared.clock.now_ms()),
            None => Err(Box::new(job)),
        }
    }

    /// Asks a domain whether it answers. Never blocks.
    ///
    /// # Errors
    /// The job, when a probe of that domain is still out, or there is no thread for it.
    pub fn probe(&self, job: ProbeJob) -> Result<(), ProbeJob> {
        let probe = lock(&self.shared.probes).get(&job.domain).cloned();
        match probe {
            Some(probe) => probe.dispatch(&self.shared, job),
            None => Err(job),
        }
    }

    /// Raises the cancel flag of an attempt, running or not yet begun. False if it has ended, was
    /// abandoned or is cancelled already.
    pub fn cancel(&self, attempt: u64) -> bool {
        let now_ms = self.shared.clock.now_ms();
        self.shared
            .all_pools()
            .iter()
            .any(|pool| pool.cancel(attempt, now_ms))
    }

    /// Everything that runs now, abandoned attempts included, oldest first.
    #[must_use]
    pub fn running(&self) -> Vec<Running> {
        let mut all: Vec<Running> = self
            .shared
            .all_pools()
            .iter()
            .flat_map(|pool| pool.seats())
            .filter_map(|seat| self.snapshot(&seat))
            .collect();
        all.sort_by_key(|running| (running.about.started_ms, running.about.attempt));
        all
    }

    /// The probes that are out.
    #[must_use]
    pub fn probing(&self) -> Vec<Probing> {
        let probes: Vec<Arc<Probe>> = lock(&self.shared.probes).values().cloned().collect();
        probes.iter().filter_map(|probe| probe.out()).collect()
    }

    /// Ends what can end: free workers and idle probe threads at once, running attempts are
    /// cancelled and their workers end afterwards. Says what still runs. Waits for nobody, as
    /// only the loop can take the reports meanwhile; hung threads stay, and the process ends with
    /// `_exit`. The order of an end: stop dispatching, `shutdown`, take reports until nothing
    /// `running` is unabandoned or the patience is over, stop the watchdog, close store and lock,
    /// exit.
    pub fn shutdown(&self) -> Vec<Running> {
        let probes: Vec<Arc<Probe>> = lock(&self.shared.probes).values().cloned().collect();
        for probe in probes {
            probe.remove();
        }
        let now_ms = self.shared.clock.now_ms();
        for pool in self.shared.all_pools() {
            pool.remove(&self.shared);
            pool.cancel_all(now_ms);
        }
        self.shared.waker.ring();
        self.running()
    }

    /// Sessions that were left behind unclosed because a call of theirs panicked. Bounded:
    /// beyond `LEAKED_MAX` such sessions are closed.
    #[must_use]
    pub fn leaked_sessions(&self) -> usize {
        self.shared.leaked.load(Ordering::Relaxed)
    }

    fn snapshot(&self, seat: &Seat) -> Option<Running> {
        let (about, title) = lock(&seat.about).clone()?;
        let seen = seat.slot.seen();
        if seen.attempt() != about.attempt {
            return None;
        }
        let abandoned = match seen.state() {
            State::Running => false,
            State::Abandoned => true,
            State::Idle | State::Done => return None,
        };
        let about = About {
            connecting: seen.stage() == Stage::Connect,
            ..about
        };
        let due = seat.slot.due(seen);
        let (done, total) = seat.slot.figures();
        let wall = |at_ms| self.shared.clock.wall_at(at_ms);
        Some(Running {
            title,
            doing: about.doing(),
            about,
            abandoned,
            cancelled_at: seat.slot.cancelled_at_ms().map(wall),
            deadline_at: wall(due.abandon_ms),
            progress_at: wall(due.progress_ms),
            done,
            total,
        })
    }
}

impl fmt::Debug for Pools {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pools")
            .field("threads", &self.threads())
            .finish_non_exhaustive()
    }
}
