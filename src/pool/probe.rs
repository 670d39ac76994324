//! The probe thread of a domain: asks whether the storage answers, and is never abandoned.

use super::worker::caught;
use super::{ProbeJob, Probing, Refusal, Report, Shared, lock};
use crate::backend::{self, Error, Session, Unwatched};
use crate::model::{ErrorKind, Lane};
use crossbeam::channel::{Receiver, Sender, bounded};
use std::collections::BTreeMap;
use std::mem;
use std::sync::{Arc, Mutex};

pub(super) struct Probe {
    domain: Arc<str>,
    sender: Sender<Order>,
    orders: Receiver<Order>,
    state: Mutex<State>,
}

enum Order {
    Ask(ProbeJob),
    Leave,
}

#[derive(Default)]
struct State {
    thread: Thread,
    removed: bool,
    out: Option<Probing>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Thread {
    #[default]
    None,
    Alive,
    /// It takes no more jobs, and may still close its session.
    Leaving,
}

impl Probe {
    pub(super) fn new(domain: Arc<str>) -> Probe {
        // One job, and a word to leave that came before it.
        let (sender, orders) = bounded(2);
        Probe {
            domain,
            sender,
            orders,
            state: Mutex::default(),
        }
    }

    /// Takes jobs (again).
    pub(super) fn restore(self: &Arc<Probe>, shared: &Arc<Shared>) -> Result<(), Refusal> {
        let mut state = lock(&self.state);
        state.removed = false;
        self.ensure(shared, &mut state)
    }

    /// Takes no more jobs; its thread ends when it has nothing to do. It is kept, so that a domain
    /// that comes back never has two threads.
    pub(super) fn remove(&self) {
        let mut state = lock(&self.state);
        state.removed = true;
        // If there is no room, there is something that wakes it anyway.
        drop(self.sender.try_send(Order::Leave));
    }

    /// Starts the thread if there is none.
    fn ensure(self: &Arc<Probe>, shared: &Arc<Shared>, state: &mut State) -> Result<(), Refusal> {
        if state.thread != Thread::None {
            return Ok(());
        }
        let body = Body {
            shared: Arc::clone(shared),
            probe: Arc::clone(self),
            session: None,
            runs: false,
        };
        let name = format!("probe-{}", self.domain);
        shared.start_thread(&name, Box::new(move || body.run()))?;
        state.thread = Thread::Alive;
        Ok(())
    }

    pub(super) fn dispatch(
        self: &Arc<Probe>,
        shared: &Arc<Shared>,
        job: ProbeJob,
    ) -> Result<(), ProbeJob> {
        let mut state = lock(&self.state);
        if state.removed || state.out.is_some() || state.thread == Thread::Leaving {
            return Err(job);
        }
        if let Err(refusal) = self.ensure(shared, &mut state) {
            log::warn!("domain={} no probe: {refusal}", self.domain);
            return Err(job);
        }
        let out = Probing {
            domain: Arc::clone(&self.domain),
            attempt: job.attempt,
            started_at: shared.clock.wall(),
        };
        match self.sender.try_send(Order::Ask(job)) {
            Ok(()) => {
                state.out = Some(out);
                Ok(())
            }
            Err(error) => match error.into_inner() {
                Order::Ask(job) => Err(job),
                Order::Leave => unreachable!("a job was sent"),
            },
        }
    }

    pub(super) fn out(&self) -> Option<Probing> {
        lock(&self.state).out.clone()
    }

    /// Whether the thread is to end now; it gets no more jobs then.
    fn leaves(&self) -> bool {
        let mut state = lock(&self.state);
        let leaves = state.removed && state.out.is_none();
        if leaves {
            state.thread = Thread::Leaving;
        }
        leaves
    }
}

struct Body {
    shared: Arc<Shared>,
    probe: Arc<Probe>,
    session: Option<Box<dyn Session>>,
    /// It has a thread that was counted: only then is there one to give back.
    runs: bool,
}

impl Body {
    fn run(mut self) {
        self.runs = true;
        while !self.probe.leaves() {
            match self.probe.orders.recv() {
                Ok(Order::Ask(job)) => self.answer(&job),
                Ok(Order::Leave) => {}
                Err(_) => unreachable!("it holds a sender itself"),
            }
        }
    }

    fn answer(&mut self, job: &ProbeJob) {
        let clock = self.shared.clock.clone();
        let (started_at, started_ms) = (clock.wall(), clock.now_ms());
        let result = self.ask();
        let recovered = (job.recover && result.is_ok()).then(|| {
            caught("recover", || {
                self.shared.backend.recover_abandoned(&self.probe.domain)
            })
        });
        lock(&self.probe.state).out = None;
        self.shared.report(Report::Probed {
            domain: Arc::clone(&self.probe.domain),
            attempt: job.attempt,
            result,
            recovered,
            started_at,
            ended_at: clock.wall(),
            ran_ms: clock.now_ms() - started_ms,
        });
    }

    fn ask(&mut self) -> backend::Result<BTreeMap<String, String>> {
        let mut session = match self.session.take() {
            Some(session) => session,
            None => caught("connect", || {
                self.shared
                    .backend
                    .connect(&self.probe.domain, Lane::Create, &Unwatched)
            })?,
        };
        let mut panicked = true;
        let result = caught("probe", || {
            let result = session.probe(&Unwatched);
            panicked = false;
            result
        });
        if panicked && self.shared.may_leak() {
            mem::forget(session);
        } else if panicked || matches!(&result, Err(error) if error.kind == ErrorKind::SessionLost)
        {
            drop(caught("close", || {
                drop(session);
                Ok(())
            }));
        } else {
            self.session = Some(session);
        }
        result
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        if !self.runs {
            return;
        }
        if let Some(session) = self.session.take() {
            drop(caught("close", || {
                drop(session);
                Ok(())
            }));
        }
        let mut state = lock(&self.probe.state);
        state.thread = Thread::None;
        let died_in = state.out.take();
        drop(state);
        if let Some(out) = died_in {
            self.confess(out);
        }
        self.shared.thread_ended();
        self.shared.waker.ring();
    }
}

impl Body {
    /// A fault of this module ended the thread: the loop still gets its answer.
    fn confess(&self, out: Probing) {
        let message = "the probe thread died";
        self.shared.report(Report::Probed {
            domain: out.domain,
            attempt: out.attempt,
            result: Err(Error::new(ErrorKind::Internal, "probe", message)),
            recovered: None,
            started_at: out.started_at,
            ended_at: self.shared.clock.wall(),
            ran_ms: 0,
        });
    }
}
