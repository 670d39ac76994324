//! How a worker wakes the watchdog for a deadline that is earlier than what it sleeps for.

use super::plan::Plan;
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
