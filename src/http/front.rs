//! The front of a listener: one poll thread that owns every connection, and a few responders.
//!
//! It owns sockets, limits and deadlines; it must not know routes, the store or the backend.
//! `tiny_http`'s own server is not used: it ends at the first accept error, starts threads without
//! limit and has no timeouts.

pub mod answer;
pub(crate) mod bell;
mod conn;
pub mod listen;
mod parse;
mod poller;
pub mod relay;

use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, bounded};

pub use answer::Answer;
pub use listen::{BindError, ListenSpec, Listener};
pub use relay::{Handler, Peer, Request, Responder};

use super::auth::Guard;
use crate::spawn::{panic_text, spawn};
use relay::Relay;

const STACK_BYTES: usize = 1 << 20;

/// Told once per answer: the route (empty when the front itself refused) and the status. Called
/// on the poll thread, so it must be quick.
pub type Counter = Arc<dyn Fn(&'static str, u16) + Send + Sync>;

/// The bounds of a front.
#[derive(Clone)]
pub struct FrontConfig {
    /// Names the threads; at most 12 bytes show.
    pub name: String,
    /// Threads that run the handler.
    pub responders: usize,
    /// Connections; beyond it the longest idle one goes, or the new one gets 503.
    pub max_conns: usize,
    /// Request line and headers.
    pub head_max_bytes: usize,
    /// Body of a request.
    pub body_max_bytes: usize,
    /// From the first byte of a request to its last: 408 after it.
    pub read_timeout: Duration,
    /// From the first byte of an answer to its last: closed after it.
    pub write_timeout: Duration,
    /// How long a connection may rest between requests.
    pub idle_timeout: Duration,
    /// Requests that wait for a responder: 503 beyond it.
    pub queue: usize,
    /// Parked requests; beyond it they are answered as if their time were up.
    pub parked_max: usize,
    /// Answers that wait for slow readers, all together; beyond it the slowest is closed.
    pub buffered_max_bytes: usize,
    /// Who may ask.
    pub guard: Guard,
    /// The counters.
    pub counter: Option<Counter>,
}

impl Default for FrontConfig {
    fn default() -> FrontConfig {
        FrontConfig {
            name: "http".to_owned(),
            responders: 4,
            max_conns: 1024,
            head_max_bytes: 16 << 10,
            body_max_bytes: 64 << 10,
            read_timeout: Duration::from_secs(5),
            write_timeout: Duration::from_secs(20),
            idle_timeout: Duration::from_secs(60),
            queue: 256,
            parked_max: 512,
            buffered_max_bytes: 64 << 20,
            guard: Guard::default(),
            counter: None,
        }
    }
}

impl fmt::Debug for FrontConfig {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("FrontConfig")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// A request on its way to a responder.
pub(crate) struct Job {
    pub request: Request,
    pub responder: Responder,
}

/// A running front; dropping it stops it without grace.
#[derive(Debug)]
pub struct Front {
    relay: Arc<Relay>,
    ended: Receiver<usize>,
}

impl Front {
    /// Starts the poll thread and the responders.
    ///
    /// # Errors
    /// When the system has no thread or descriptor to give.
    pub fn start(
        listener: Listener,
        config: FrontConfig,
        handler: Arc<dyn Handler>,
    ) -> io::Result<Front> {
        let responders = config.responders.max(1);
        let relay = Arc::new(Relay::new(responders)?);
        let (jobs, taken) = bounded::<Job>(config.queue.max(1));
        for number in 0..responders {
            let (taken, relay, handler) = (taken.clone(), Arc::clone(&relay), Arc::clone(&handler));
            spawn(
                &format!("{}-{number}", config.name),
                STACK_BYTES,
                move || {
                    respond(number, &taken, &relay, handler.as_ref());
                },
            )?;
        }
        let (tell, ended) = bounded(1);
        let name = config.name.clone();
        let poller = poller::Poller::new(listener, config, jobs, Arc::clone(&relay))?;
        spawn(&name, STACK_BYTES, move || {
            let cut = poller.run();
            let _nobody_asks = tell.try_send(cut);
        })?;
        Ok(Front { relay, ended })
    }

    /// How long ago the front last showed that it works: the poll thread's heartbeat (once a
    /// second when idle), and, if every responder is busy, how long the latest has been.
    #[must_use]
    pub fn beat_age(&self) -> Duration {
        self.relay.beat_age()
    }

    /// Stops listening, lets what is in work be answered, and says how many requests were cut off
    /// unanswered after `grace`; `None` when the poll thread is gone or doesn't answer.
    pub fn shutdown(self, grace: Duration) -> Option<usize> {
        self.relay.stop(Instant::now() + grace);
        self.ended.recv_timeout(grace + Duration::from_secs(2)).ok()
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        if self.relay.stop_at().is_none() {
            self.relay.stop(Instant::now());
        }
    }
}

/// A responder's life: it ends when the poll thread has ended.
fn respond(number: usize, jobs: &Receiver<Job>, relay: &Relay, handler: &dyn Handler) {
    for Job { request, responder } in jobs {
        relay.set_busy(number, true);
        let what = format!("{} {}", request.method, request.path);
        // The responder is dropped by the unwinding, and that answers 500.
        let run = AssertUnwindSafe(|| handler.handle(request, responder));
        if let Err(payload) = catch_unwind(run) {
            log::error!(
                "request={what:?} panicked: {}",
                panic_text(payload.as_ref())
            );
        }
        relay.set_busy(number, false);
        // Room in the queue: a woken request may wait for it.
        relay.bell.ring();
    }
}
