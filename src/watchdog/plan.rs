//! What the watchdog sleeps for, as its wakers see it.
//!
//! Publishing a slot and then reading the plan, against announcing a look and then reading the
//! slots: with a full fence between the two on each side at least one of them sees the other, so
//! no deadline is slept through. `tests/handover.rs` checks that.

use crate::sync::{AtomicU64, Ordering, fence};

/// The time that the watchdog sleeps until; the end of time while it looks, as then anything may
/// have come too late for this look.
#[derive(Debug, Default)]
pub(crate) struct Plan(AtomicU64);

impl Plan {
    pub(crate) fn is_later_than(&self, at_ms: u64) -> bool {
        fence(Ordering::SeqCst);
        at_ms < self.0.load(Ordering::SeqCst)
    }

    pub(crate) fn begin_look(&self) {
        self.0.store(u64::MAX, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    pub(crate) fn end_look(&self, next_ms: u64) {
        self.0.store(next_ms, Ordering::SeqCst);
    }
}
