//! What a worker does: one job after the other, until it is surplus or its attempt was abandoned.

use super::lane::{End, Order};
use super::{Job, Pool, Report, Seat, Shared};
use crate::backend::{self, Ctl, Error, Outcome, Session, run_step};
use crate::clock::Clock;
use crate::model::{ErrorKind, Step};
use crate::slot::{Plan, Slot, Stage, State};
use crate::spawn::panic_text;
use std::mem;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// What a running attempt tells its slot.
#[derive(Debug, Clone)]
pub(super) struct AttemptCtl {
    pub(super) slot: Arc<Slot>,
    pub(super) attempt: u64,
    pub(super) clock: Clock,
}

impl Ctl for AttemptCtl {
    fn progress(&self, done: u64, total: u64) -> ControlFlow<()> {
        let now_ms = self.clock.now_ms();
        if self.slot.progress(self.attempt, done, total, now_ms) {
            ControlFlow::Continue(())
        } else {
            ControlFlow::Break(())
        }
    }

    fn cancelled(&self) -> bool {
        self.slot.stops(self.attempt)
    }
}

pub(super) fn plan(job: &Job) -> Plan {
    Plan {
        deadline: job.deadline,
        cancel_grace_ms: job.cancel_grace_ms,
    }
}

/// The body of a worker's thread.
pub(super) fn run(shared: &Arc<Shared>, pool: &Arc<Pool>, seat: &Arc<Seat>) {
    let mut worker = Worker {
        shared,
        pool,
        seat,
        session: Held::None,
        end: End::Crashed,
        owes: false,
    };
    loop {
        match pool.orders.recv() {
            Ok(Order::Run(job)) => {
                if !worker.attempt(&job) {
                    break;
                }
            }
            Ok(Order::Leave) | Err(_) => {
                worker.end = End::Left;
                break;
            }
        }
    }
}

/// The session of a worker.
enum Held {
    None,
    /// It works.
    Good(Box<dyn Session>),
    /// It is lost. Closing it may block, so that is done when the next attempt has published that
    /// it connects, under that deadline.
    Stale(Box<dyn Session>),
}

struct Worker<'a> {
    shared: &'a Arc<Shared>,
    pool: &'a Arc<Pool>,
    seat: &'a Arc<Seat>,
    session: Held,
    end: End,
    /// The loop waits for a result of the attempt that was begun last.
    owes: bool,
}

impl Worker<'_> {
    /// Runs one job. False if the thread must end afterwards.
    fn attempt(&mut self, job: &Job) -> bool {
        let stage = match self.session {
            Held::Good(_) => Stage::Work,
            Held::None | Held::Stale(_) => Stage::Connect,
        };
        let mut about = self.pool.begin(self.shared, self.seat, job, stage);
        self.owes = true;
        self.announce();
        let ctl = AttemptCtl {
            slot: Arc::clone(&self.seat.slot),
            attempt: job.attempt,
            clock: self.shared.clock.clone(),
        };
        // Before the step began, nothing of the object was touched.
        let connected = self.connect(job, &ctl).map_err(Error::untouched);
        let result = connected.and_then(|()| {
            about.connecting = false;
            self.work(job, &ctl)
        });
        let ended_at = self.shared.clock.wall();
        let ran_ms = self.shared.clock.now_ms() - about.started_ms;
        if self.seat.slot.finish(job.attempt) {
            let stays = self.pool.end(self.shared, self.seat);
            if !stays {
                self.end = End::Left;
            }
            self.owes = false;
            self.shared.report(Report::Finished {
                about,
                result,
                ended_at,
                ran_ms,
            });
            stays
        } else {
            self.end = End::Abandoned;
            self.owes = false;
            drop(super::lock(&self.seat.verdict));
            self.shared.report(Report::LateReturn {
                about,
                result,
                ended_at,
                ran_ms,
            });
            false
        }
    }

    /// Makes sure that there is a session and that the step may begin.
    fn connect(&mut self, job: &Job, ctl: &AttemptCtl) -> backend::Result<()> {
        if !matches!(self.session, Held::Good(_)) {
            // Only a lost session is dropped here, within the published attempt.
            let stale = mem::replace(&mut self.session, Held::None);
            let opened = caught("connect", || {
                drop(stale);
                self.shared
                    .backend
                    .connect(&job.domain, job.lane, ctl as &dyn Ctl)
            })?;
            self.session = Held::Good(opened);
            let now_ms = self.shared.clock.now_ms();
            if !self.seat.slot.enter_work(job.attempt, plan(job), now_ms) {
                return Err(stopped(job.step, "its session opened after its deadline"));
            }
            self.announce();
        }
        if ctl.cancelled() {
            return Err(stopped(job.step, "it was cancelled before it began"));
        }
        Ok(())
    }

    fn work(&mut self, job: &Job, ctl: &AttemptCtl) -> backend::Result<Outcome> {
        let Held::Good(mut session) = mem::replace(&mut self.session, Held::None) else {
            return Err(Error::new(
                ErrorKind::Internal,
                job.step.as_str(),
                "a worker without a session",
            ));
        };
        let call = catch_unwind(AssertUnwindSafe(|| {
            run_step(session.as_mut(), job.step, &job.record, ctl)
        }));
        match call {
            Ok(result) => {
                let lost = matches!(&result, Err(error) if error.kind == ErrorKind::SessionLost);
                self.session = if lost {
                    Held::Stale(session)
                } else {
                    Held::Good(session)
                };
                result
            }
            Err(payload) => {
                // Its state is unknown, and dropping it might panic or hang.
                if self.shared.may_leak() {
                    mem::forget(session);
                } else {
                    self.session = Held::Stale(session);
                }
                Err(panicked(job.step.as_str(), panic_text(payload.as_ref())))
            }
        }
    }

    /// Lets the watchdog know of the deadline that was just published.
    fn announce(&self) {
        let due = self.seat.slot.due(self.seat.slot.seen());
        self.shared.waker.due(due.cancel_ms);
    }
}

impl Drop for Worker<'_> {
    /// The outcome is known by now: what is left is the session, whose closing may block (the
    /// thread then counts as alive and, if it was abandoned, as abandoned until it has ended).
    fn drop(&mut self) {
        match mem::replace(&mut self.session, Held::None) {
            Held::None => {}
            Held::Good(session) | Held::Stale(session) => {
                drop(caught("close", || {
                    drop(session);
                    Ok(())
                }));
            }
        }
        if self.end == End::Crashed {
            self.confess();
        }
        if self.seat.slot.seen().state() == State::Abandoned {
            self.end = End::Abandoned;
        }
        self.pool.vacate(self.shared, self.seat, self.end);
    }
}

impl Worker<'_> {
    /// A fault of this module ended the thread: the loop still gets its result.
    fn confess(&self) {
        let Some((about, _)) = super::lock(&self.seat.about).clone() else {
            return;
        };
        let seen = self.seat.slot.seen();
        let message = "the worker's thread died";
        let error = Error::new(ErrorKind::Internal, about.step.as_str(), message);
        let result = Err(match seen.stage() {
            Stage::Connect => error.untouched(),
            Stage::Work => error,
        });
        let ended_at = self.shared.clock.wall();
        let ran_ms = self.shared.clock.now_ms() - about.started_ms;
        if self.seat.slot.finish(about.attempt) {
            self.shared.report(Report::Finished {
                about,
                result,
                ended_at,
                ran_ms,
            });
        } else if seen.state() == State::Abandoned && self.owes {
            drop(super::lock(&self.seat.verdict));
            self.shared.report(Report::LateReturn {
                about,
                result,
                ended_at,
                ran_ms,
            });
        }
    }
}

/// Runs a call of the backend and turns a panic into an error.
pub(super) fn caught<T>(
    op: &'static str,
    call: impl FnOnce() -> backend::Result<T>,
) -> backend::Result<T> {
    catch_unwind(AssertUnwindSafe(call))
        .unwrap_or_else(|payload| Err(panicked(op, panic_text(payload.as_ref()))))
}

fn panicked(op: &'static str, text: String) -> Error {
    Error::new(
        ErrorKind::Transient,
        op,
        format!("the backend panicked: {text}"),
    )
}

fn stopped(step: Step, why: &str) -> Error {
    Error::new(ErrorKind::Cancelled, step.as_str(), why).untouched()
}
