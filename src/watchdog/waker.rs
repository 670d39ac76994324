//! How a worker wakes the watchdog for a deadline that is earlier than what it sleeps for.
//!
//! Publishing a slot and then reading the watchdog's plan, against announcing a look and then
//! reading the slots: with a full fence between the two on each side at least one of them sees
//! the other, so no deadline is slept through. `tests/handover.rs` checks that.

use crate::sync::{AtomicU64, Ordering, fence};
use crossbeam::sync::Unparker;
use std::sync::OnceLock;

/// When the watchdog wakes, and the bell beside its bed.
#[derive(Debug, Default)]
pub(crate) struct Waker {
    plan: Plan,
    bell: OnceLock<Unparker>,
}

impl Waker {
    pub(super) fn attach(&self, bell: Unparker) {
        if self.bell.set(bell).is_err() {
            log::error!("these pools have a watchdog already");
        }
    }

    /// A slot was published, and something is due for it at that monotonic time.
    pub(crate) fn due(&self, at_ms: u64) {
        if self.plan.is_later_than(at_ms) {
            self.ring();
        }
    }

    /// Wakes the watchdog now.
    pub(crate) fn ring(&self) {
        if let Some(bell) = self.bell.get() {
            bell.unpark();
        }
    }

    pub(super) fn begin_look(&self) {
        self.plan.begin_look();
    }

    pub(super) fn end_look(&self, next_ms: u64) {
        self.plan.end_look(next_ms);
    }
}

/// The time that the watchdog sleeps until; the end of time while it looks, as then anything may
/// have come too late for this look.
#[derive(Debug, Default)]
struct Plan(AtomicU64);

impl Plan {
    fn is_later_than(&self, at_ms: u64) -> bool {
        fence(Ordering::SeqCst);
        at_ms < self.0.load(Ordering::SeqCst)
    }

    fn begin_look(&self) {
        self.0.store(u64::MAX, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    fn end_look(&self, next_ms: u64) {
        self.0.store(next_ms, Ordering::SeqCst);
    }
}
