//! The slot of a worker: who owns the outcome of the attempt that it runs.
//!
//! One atomic word holds the attempt number, the stage, the cancel flag and the state, and every
//! change of it is a compare-and-swap from a word that names the attempt. So exactly one of worker
//! and watchdog ends an attempt, and neither an old deadline nor an old cancel can hit the next
//! attempt of a reused slot. A lost slot is never used again: its worker ends.
//!
//! Knows atomics only: no clock, no channel, no backend. Times are monotonic milliseconds.

use crate::sync::{AtomicU64, Ordering};

const STATE: u64 = 0b0011;
const IDLE: u64 = 0;
const RUNNING: u64 = 1;
const DONE: u64 = 2;
const ABANDONED: u64 = 3;
const CANCEL: u64 = 0b0100;
const WORK: u64 = 0b1000;
const SHIFT: u32 = 4;

/// When an attempt is given up, in milliseconds. A whole-step deadline has both equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadline {
    /// Without progress for this long.
    pub stall_ms: u64,
    /// After this long, whatever the progress.
    pub total_ms: u64,
}

impl Deadline {
    /// A deadline of the whole step: progress doesn't prolong it.
    #[must_use]
    pub fn whole(total_ms: u64) -> Deadline {
        Deadline {
            stall_ms: total_ms,
            total_ms,
        }
    }
}

/// How an attempt is bounded: its deadline, and how long before it the cancel flag goes up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// When it is abandoned.
    pub deadline: Deadline,
    /// The cancel flag goes up this long before, at most half of the stall deadline.
    pub cancel_grace_ms: u64,
}

/// What a running attempt is doing. Each stage has its own plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Opening (or closing) a session; nothing acts on the object.
    Connect,
    /// Inside the step itself.
    Work,
}

/// What a slot shows at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// It never ran anything.
    Idle,
    /// Its attempt runs.
    Running,
    /// The worker has the outcome.
    Done,
    /// The watchdog gave the attempt up.
    Abandoned,
}

/// The word of a slot, as it was read. Comparing against it is what makes a change safe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen(u64);

impl Seen {
    /// Which attempt.
    #[must_use]
    pub fn attempt(self) -> u64 {
        self.0 >> SHIFT
    }

    /// Its state.
    #[must_use]
    pub fn state(self) -> State {
        match self.0 & STATE {
            IDLE => State::Idle,
            RUNNING => State::Running,
            DONE => State::Done,
            _ => State::Abandoned,
        }
    }

    /// Whether an early end was asked for.
    #[must_use]
    pub fn cancelled(self) -> bool {
        self.0 & CANCEL != 0
    }

    /// What it is doing.
    #[must_use]
    pub fn stage(self) -> Stage {
        if self.0 & WORK == 0 {
            Stage::Connect
        } else {
            Stage::Work
        }
    }
}

/// The times of one stage. Stable as long as the word names that attempt and stage.
#[derive(Debug, Default)]
struct Timing {
    started_ms: AtomicU64,
    stall_ms: AtomicU64,
    total_ms: AtomicU64,
    cancel_grace_ms: AtomicU64,
    progress_ms: AtomicU64,
}

/// When something must be done about an attempt, in monotonic milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Due {
    /// When the stage began.
    pub started_ms: u64,
    /// When the last progress was seen (the start, if none was).
    pub progress_ms: u64,
    /// When the cancel flag goes up.
    pub cancel_ms: u64,
    /// When it is abandoned.
    pub abandon_ms: u64,
    /// The plan that this follows from.
    pub plan: Plan,
}

/// One worker's slot.
#[derive(Debug, Default)]
pub struct Slot {
    word: AtomicU64,
    connect: Timing,
    work: Timing,
    done: AtomicU64,
    total: AtomicU64,
    cancelled_ms: AtomicU64,
}

impl Slot {
    /// Publishes an attempt. `attempt` is below 2^60 and was never used before in this process.
    /// Only the worker that owns the slot calls this, and never after it lost an attempt.
    pub fn begin(&self, attempt: u64, stage: Stage, plan: Plan, cancelled: bool, now_ms: u64) {
        assert!(attempt >> (u64::BITS - SHIFT) == 0, "attempt number");
        assert!(
            matches!(self.seen().state(), State::Idle | State::Done),
            "a slot runs one attempt at a time"
        );
        self.done.store(0, Ordering::Relaxed);
        self.total.store(0, Ordering::Relaxed);
        let at = if cancelled { now_ms } else { 0 };
        self.cancelled_ms.store(at, Ordering::Relaxed);
        self.timing(stage).set(plan, now_ms);
        let word = attempt << SHIFT | RUNNING | bit(stage) | if cancelled { CANCEL } else { 0 };
        self.word.store(word, Ordering::SeqCst);
    }

    /// Goes from connecting to the step itself. False if the watchdog was faster: the worker then
    /// must not begin the step.
    #[must_use]
    pub fn enter_work(&self, attempt: u64, plan: Plan, now_ms: u64) -> bool {
        self.work.set(plan, now_ms);
        self.change(attempt, |word| word | WORK).is_some()
    }

    /// Ends the attempt with the worker as owner of its outcome. False if it was abandoned.
    #[must_use]
    pub fn finish(&self, attempt: u64) -> bool {
        self.change(attempt, |word| word & !STATE | DONE).is_some()
    }

    /// Ends the attempt with the watchdog as owner, provided that nothing changed since `seen`.
    #[must_use]
    pub fn abandon(&self, seen: Seen) -> bool {
        if seen.state() != State::Running {
            return false;
        }
        let lost = seen.0 & !STATE | ABANDONED;
        self.word
            .compare_exchange(seen.0, lost, Ordering::SeqCst, Ordering::SeqCst)
            .is_ok()
    }

    /// Raises the cancel flag of that attempt. False if it doesn't run or is cancelled already.
    pub fn cancel(&self, attempt: u64, now_ms: u64) -> bool {
        match self.change(attempt, |word| word | CANCEL) {
            Some(before) if !before.cancelled() => {
                self.cancelled_ms.store(now_ms, Ordering::Relaxed);
                true
            }
            Some(_) | None => false,
        }
    }

    /// Notes progress of that attempt and says whether it shall go on. Figures that repeat the
    /// last ones are no progress.
    #[must_use]
    pub fn progress(&self, attempt: u64, done: u64, total: u64, now_ms: u64) -> bool {
        let seen = self.seen();
        if seen.attempt() != attempt || seen.state() != State::Running {
            return false;
        }
        let before = self.done.swap(done, Ordering::Relaxed);
        let before_total = self.total.swap(total, Ordering::Relaxed);
        if before != done || before_total != total {
            self.timing(seen.stage())
                .progress_ms
                .store(now_ms, Ordering::Relaxed);
        }
        !seen.cancelled()
    }

    /// Whether that attempt shall end early: cancelled, or lost to the watchdog.
    #[must_use]
    pub fn stops(&self, attempt: u64) -> bool {
        let seen = self.seen();
        seen.attempt() != attempt || seen.state() != State::Running || seen.cancelled()
    }

    /// The word as it is now.
    #[must_use]
    pub fn seen(&self) -> Seen {
        Seen(self.word.load(Ordering::SeqCst))
    }

    /// When something must be done about the attempt that was seen running. If the slot has moved
    /// on meanwhile the answer is worthless, and `abandon(seen)` fails.
    #[must_use]
    pub fn due(&self, seen: Seen) -> Due {
        self.timing(seen.stage()).due()
    }

    /// Work done and its total, in the backend's units; 0 and 0 if none was reported.
    #[must_use]
    pub fn figures(&self) -> (u64, u64) {
        (
            self.done.load(Ordering::Relaxed),
            self.total.load(Ordering::Relaxed),
        )
    }

    /// When the cancel flag of the attempt went up, if it did.
    #[must_use]
    pub fn cancelled_at_ms(&self) -> Option<u64> {
        self.seen()
            .cancelled()
            .then(|| self.cancelled_ms.load(Ordering::Relaxed))
    }

    /// Changes the word of a running attempt; gives back what it was.
    fn change(&self, attempt: u64, to: impl Fn(u64) -> u64) -> Option<Seen> {
        let mut seen = self.seen();
        while seen.attempt() == attempt && seen.state() == State::Running {
            match self
                .word
                .compare_exchange(seen.0, to(seen.0), Ordering::SeqCst, Ordering::SeqCst)
            {
                Ok(_) => return Some(seen),
                Err(word) => seen = Seen(word),
            }
        }
        None
    }

    fn timing(&self, stage: Stage) -> &Timing {
        match stage {
            Stage::Connect => &self.connect,
            Stage::Work => &self.work,
        }
    }
}

impl Timing {
    fn set(&self, plan: Plan, now_ms: u64) {
        self.started_ms.store(now_ms, Ordering::Relaxed);
        self.progress_ms.store(now_ms, Ordering::Relaxed);
        self.stall_ms
            .store(plan.deadline.stall_ms, Ordering::Relaxed);
        self.total_ms
            .store(plan.deadline.total_ms, Ordering::Relaxed);
        self.cancel_grace_ms
            .store(plan.cancel_grace_ms, Ordering::Relaxed);
    }

    fn due(&self) -> Due {
        let plan = Plan {
            deadline: Deadline {
                stall_ms: self.stall_ms.load(Ordering::Relaxed),
                total_ms: self.total_ms.load(Ordering::Relaxed),
            },
            cancel_grace_ms: self.cancel_grace_ms.load(Ordering::Relaxed),
        };
        let started_ms = self.started_ms.load(Ordering::Relaxed);
        let progress_ms = self.progress_ms.load(Ordering::Relaxed);
        let Deadline { stall_ms, total_ms } = plan.deadline;
        let whole = started_ms.saturating_add(total_ms);
        let stall = if stall_ms == total_ms {
            whole
        } else {
            progress_ms.saturating_add(stall_ms)
        };
        let abandon_ms = whole.min(stall);
        let grace_ms = plan.cancel_grace_ms.min(stall_ms.min(total_ms) / 2);
        Due {
            started_ms,
            progress_ms,
            cancel_ms: abandon_ms.saturating_sub(grace_ms),
            abandon_ms,
            plan,
        }
    }
}

fn bit(stage: Stage) -> u64 {
    match stage {
        Stage::Connect => 0,
        Stage::Work => WORK,
    }
}
