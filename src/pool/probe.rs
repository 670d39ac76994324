//! The probe thread of a domain: asks whether the storage answers, and is never abandoned.

use super::worker::caught;
use super::{ProbeJob, Probing, Refusal, Report, Shared, lock};
use crate::backend::{self, Session, Unwatched};
use crate::model::{ErrorKind, Lane};
use crossbeam::channel::{Receiver, Sender, TrySendError, bounded};
use std::collections::BTreeMap;
use std::mem;
use std::sync::{Arc, Mutex, Weak};

pub(super) struct Probe {
    domain: Arc<str>,
    jobs: Sender<ProbeJob>,
    orders: Receiver<ProbeJob>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    has_thread: bool,
    out: Option<Probing>,
}

impl Probe {
    pub(super) fn new(domain: Arc<str>) -> Probe {
        let (jobs, orders) = bounded(1);
        Probe {
            domain,
            jobs,
            orders,
            state: Mutex::default(),
        }
    }

    /// Starts the thread if there is none.
    pub(super) fn ensure(self: &Arc<Probe>, shared: &Arc<Shared>) -> Result<(), Refusal> {
        if mem::replace(&mut lock(&self.state).has_thread, true) {
            return Ok(());
        }
        // The thread holds no sender, so that it ends when the domain is removed.
        let body = Body {
            shared: Arc::clone(shared),
            probe: Arc::downgrade(self),
            domain: Arc::clone(&self.domain),
            session: None,
            runs: false,
        };
        let orders = self.orders.clone();
        let started = shared.start_thread(
            &format!("probe-{}", self.domain),
            Box::new(move || body.run(&orders)),
        );
        if started.is_err() {
            lock(&self.state).has_thread = false;
        }
        started
    }

    pub(super) fn dispatch(
        self: &Arc<Probe>,
        shared: &Arc<Shared>,
        job: ProbeJob,
    ) -> Result<(), ProbeJob> {
        if let Err(refusal) = self.ensure(shared) {
            log::warn!("domain={} no probe: {refusal}", self.domain);
            return Err(job);
        }
        let mut state = lock(&self.state);
        if state.out.is_some() {
            return Err(job);
        }
        let out = Probing {
            domain: Arc::clone(&self.domain),
            attempt: job.attempt,
            started_at: shared.clock.wall(),
        };
        match self.jobs.try_send(job) {
            Ok(()) => {
                state.out = Some(out);
                Ok(())
            }
            Err(TrySendError::Full(job) | TrySendError::Disconnected(job)) => Err(job),
        }
    }

    pub(super) fn out(&self) -> Option<Probing> {
        lock(&self.state).out.clone()
    }
}

struct Body {
    shared: Arc<Shared>,
    probe: Weak<Probe>,
    domain: Arc<str>,
    session: Option<Box<dyn Session>>,
    /// It has a thread that was counted: only then is there one to give back.
    runs: bool,
}

impl Body {
    fn run(mut self, orders: &Receiver<ProbeJob>) {
        self.runs = true;
        while let Ok(job) = orders.recv() {
            self.answer(&job);
        }
    }

    fn answer(&mut self, job: &ProbeJob) {
        let clock = self.shared.clock.clone();
        let (started_at, started_ms) = (clock.wall(), clock.now_ms());
        let result = self.ask();
        let recovered = (job.recover && result.is_ok()).then(|| {
            caught("recover", || {
                self.shared.backend.recover_abandoned(&self.domain)
            })
        });
        if let Some(probe) = self.probe.upgrade() {
            lock(&probe.state).out = None;
        }
        self.shared.report(Report::Probed {
            domain: Arc::clone(&self.domain),
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
                    .connect(&self.domain, Lane::Create, &Unwatched)
            })?,
        };
        let mut panicked = true;
        let result = caught("probe", || {
            let result = session.probe(&Unwatched);
            panicked = false;
            result
        });
        if panicked {
            mem::forget(session);
        } else if matches!(&result, Err(error) if error.kind == ErrorKind::SessionLost) {
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
        if let Some(probe) = self.probe.upgrade() {
            let mut state = lock(&probe.state);
            state.has_thread = false;
            state.out = None;
        }
        self.shared.thread_ended();
        self.shared.waker.ring();
    }
}
