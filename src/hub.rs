//! What the loop shares with everybody else: the way in, and snapshots for reading.
//!
//! Nobody who reads here enters the loop, the store's writer or the backend.

pub mod ledger;

use crate::clock::Clock;
use crate::config::Config;
use crate::heartbeat::Health;
use crate::http::park::Park;
use crate::metrics::Metrics;
use crate::model::Millis;
use crate::pool::Pools;
use crate::sched::{Accepted, Refusal, Request, View};
use crate::store::{Reader, StoreError};
use crossbeam::channel::{Sender, TrySendError};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Why a request was not even looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unavailable {
    /// So many wait already that it was not taken.
    Busy,
    /// It could not be made durable; the words of the store.
    Store(String),
    /// The daemon ends.
    Ending,
}

/// What comes of a request.
pub type Answer = Result<Result<Accepted, Refusal>, Unavailable>;

/// A request on its way to the loop, and what is done with the answer, on the loop's thread.
pub(crate) struct Ask {
    /// The wish.
    pub request: Request,
    /// Must not block.
    pub reply: Box<dyn FnOnce(Answer) + Send>,
}

/// What else is said to the loop.
pub(crate) enum Word {
    /// The configuration was read again.
    Reload(Box<Config>),
    /// SIGTERM: finish what runs.
    Drain,
    /// The address of a session, to be made durable before its first use.
    Session(ledger::Call),
}

/// Readers of the store that are kept open.
const READERS: usize = 8;

/// Shared by the loop, the HTTP servers and the signals. Cheap to clone.
#[derive(Clone)]
pub struct Hub(Arc<Inner>);

struct Inner {
    asks: Sender<Ask>,
    words: Sender<Word>,
    view: Mutex<Arc<View>>,
    config: Mutex<Arc<Config>>,
    needs_restart: Mutex<Vec<String>>,
    store_path: PathBuf,
    store_error: Mutex<Option<String>>,
    readers: Mutex<Vec<Reader>>,
    restart: Mutex<Option<String>>,
    draining: AtomicBool,
    /// What belongs to every listener.
    parts: Parts,
}

/// The parts that are what they are from start to end.
#[allow(missing_debug_implementations)] // nobody prints a running daemon
pub struct Parts {
    /// All thread pools.
    pub pools: Pools,
    /// Monotonic and wall time.
    pub clock: Clock,
    /// The wall time at which `clock` began.
    pub began_at: Millis,
    /// Heartbeats of loop and watchdog.
    pub health: Health,
    /// Those who wait for a change.
    pub park: Park,
    /// Fault rules, if drills are allowed.
    pub faults: Option<crate::backend::faults::FaultRules>,
    /// Counters and histograms.
    pub metrics: Metrics,
    /// What the backend can do.
    pub caps: crate::backend::Caps,
    /// Who we are, as in the images' marks.
    pub instance: String,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Hub {
    pub(crate) fn new(asks: Sender<Ask>, words: Sender<Word>, config: Config, parts: Parts) -> Hub {
        Hub(Arc::new(Inner {
            asks,
            words,
            view: Mutex::default(),
            store_path: config.store_path.clone(),
            config: Mutex::new(Arc::new(config)),
            needs_restart: Mutex::default(),
            store_error: Mutex::default(),
            readers: Mutex::default(),
            restart: Mutex::default(),
            draining: AtomicBool::new(false),
            parts,
        }))
    }

    /// What is the same from start to end.
    #[must_use]
    pub fn parts(&self) -> &Parts {
        &self.0.parts
    }

    /// The time that the scheduler lives in: the wall clock at start plus what has passed since.
    #[must_use]
    pub fn now(&self) -> Millis {
        self.0.parts.began_at.plus(self.0.parts.clock.now_ms())
    }

    /// Hands a request to the loop; never waits. The reply is called in any case.
    pub fn ask(&self, request: Request, reply: Box<dyn FnOnce(Answer) + Send>) {
        match self.0.asks.try_send(Ask { request, reply }) {
            Ok(()) => {}
            Err(TrySendError::Full(ask)) => (ask.reply)(Err(Unavailable::Busy)),
            Err(TrySendError::Disconnected(ask)) => (ask.reply)(Err(Unavailable::Ending)),
        }
    }

    /// Tells the loop something that isn't a request. False when the loop has ended.
    pub(crate) fn tell(&self, word: Word) -> bool {
        self.0.words.send(word).is_ok()
    }

    /// How everything stood a moment ago.
    #[must_use]
    pub fn view(&self) -> Arc<View> {
        Arc::clone(&lock(&self.0.view))
    }

    pub(crate) fn show(&self, view: View) {
        *lock(&self.0.view) = Arc::new(view);
    }

    /// The configuration in force.
    #[must_use]
    pub fn config(&self) -> Arc<Config> {
        Arc::clone(&lock(&self.0.config))
    }

    pub(crate) fn configure(&self, config: Config, needs_restart: Vec<String>) {
        *lock(&self.0.config) = Arc::new(config);
        *lock(&self.0.needs_restart) = needs_restart;
    }

    /// Sections of a reloaded configuration that wait for a restart.
    #[must_use]
    pub fn needs_restart(&self) -> Vec<String> {
        lock(&self.0.needs_restart).clone()
    }

    /// Why the store can't be written, while it can't.
    #[must_use]
    pub fn store_error(&self) -> Option<String> {
        lock(&self.0.store_error).clone()
    }

    pub(crate) fn set_store_error(&self, words: Option<String>) {
        *lock(&self.0.store_error) = words;
    }

    /// Why only a new process helps, if so.
    #[must_use]
    pub fn restart_wanted(&self) -> Option<String> {
        lock(&self.0.restart).clone()
    }

    pub(crate) fn want_restart(&self, why: String) {
        *lock(&self.0.restart) = Some(why);
    }

    /// Whether no new wishes are taken.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.0.draining.load(Ordering::Relaxed)
    }

    pub(crate) fn drain(&self) {
        self.0.draining.store(true, Ordering::Relaxed);
    }

    /// Reads the store, beside the writer.
    ///
    /// # Errors
    /// What the store says.
    pub fn read<T>(
        &self,
        read: impl FnOnce(&Reader) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let kept = lock(&self.0.readers).pop();
        let reader = match kept {
            Some(reader) => reader,
            None => Reader::open(&self.0.store_path)?,
        };
        let found = read(&reader)?;
        let mut readers = lock(&self.0.readers);
        if readers.len() < READERS {
            readers.push(reader);
        }
        Ok(found)
    }
}

impl std::fmt::Debug for Hub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hub").finish_non_exhaustive()
    }
}
