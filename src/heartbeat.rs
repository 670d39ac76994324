//! Signs of life of the threads that everything depends on. Atomics only: whoever asks whether
//! volward lives never waits for a thread, a lock or the storage.

use crate::clock::Clock;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The last signs of life. Written by the loop and the watchdog, read by `Health`.
#[derive(Debug, Default)]
pub struct Heartbeats {
    loop_ms: AtomicU64,
    /// Until when the watchdog means to sleep: it may sleep for hours while nothing runs.
    watchdog_until_ms: AtomicU64,
    watchdog_over: AtomicBool,
}

impl Heartbeats {
    /// The loop lives, at that monotonic time. It beats in every iteration, at least once a
    /// second.
    pub fn loop_beat(&self, now_ms: u64) {
        self.loop_ms.store(now_ms, Ordering::Relaxed);
    }

    /// Milliseconds since the loop last beat.
    #[must_use]
    pub fn loop_age_ms(&self, now_ms: u64) -> u64 {
        now_ms.saturating_sub(self.loop_ms.load(Ordering::Relaxed))
    }

    pub(crate) fn watchdog_sleeps(&self, until_ms: u64) {
        self.watchdog_until_ms.store(until_ms, Ordering::Relaxed);
    }

    pub(crate) fn watchdog_ended(&self) {
        self.watchdog_over.store(true, Ordering::Relaxed);
    }

    /// Milliseconds by which the watchdog has overslept; `None` if its thread has ended.
    #[must_use]
    pub fn watchdog_overslept_ms(&self, now_ms: u64) -> Option<u64> {
        let until_ms = self.watchdog_until_ms.load(Ordering::Relaxed);
        (!self.watchdog_over.load(Ordering::Relaxed)).then(|| now_ms.saturating_sub(until_ms))
    }
}

/// Whether the threads that everything depends on are alive.
#[derive(Debug, Clone)]
pub struct Health {
    beats: Arc<Heartbeats>,
    clock: Clock,
    heartbeat_max_ms: u64,
}

/// What `Health` found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vitals {
    /// Milliseconds since the loop last beat.
    pub loop_age_ms: u64,
    /// The loop beat within `heartbeat_max`.
    pub loop_alive: bool,
    /// Milliseconds by which the watchdog is overdue; the whole uptime if it has ended.
    pub watchdog_late_ms: u64,
    /// The watchdog runs, and is not overdue by more than `heartbeat_max`.
    pub watchdog_alive: bool,
}

impl Health {
    /// Judges by `heartbeat_max_ms`, the longest silence of a living thread.
    #[must_use]
    pub fn new(beats: Arc<Heartbeats>, clock: Clock, heartbeat_max_ms: u64) -> Health {
        Health {
            beats,
            clock,
            heartbeat_max_ms,
        }
    }

    /// How it is now.
    #[must_use]
    pub fn vitals(&self) -> Vitals {
        let now_ms = self.clock.now_ms();
        let loop_age_ms = self.beats.loop_age_ms(now_ms);
        let late_ms = self.beats.watchdog_overslept_ms(now_ms);
        Vitals {
            watchdog_late_ms: late_ms.unwrap_or(now_ms),
            loop_age_ms,
            loop_alive: loop_age_ms <= self.heartbeat_max_ms,
            watchdog_alive: late_ms.is_some_and(|late_ms| late_ms <= self.heartbeat_max_ms),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_of_the_loop_is_noticed_and_sleep_of_the_watchdog_is_not() {
        let clock = Clock::manual();
        let beats = Arc::new(Heartbeats::default());
        let health = Health::new(Arc::clone(&beats), clock.clone(), 5_000);
        beats.watchdog_sleeps(u64::MAX);
        clock.advance(5_000);
        assert!(health.vitals().loop_alive);
        clock.advance(1);
        assert!(!health.vitals().loop_alive);
        assert!(health.vitals().watchdog_alive);
        beats.loop_beat(clock.now_ms());
        assert!(health.vitals().loop_alive);
        beats.watchdog_sleeps(6_000);
        clock.advance(6_000);
        assert!(!health.vitals().watchdog_alive);
        beats.watchdog_sleeps(u64::MAX);
        beats.watchdog_ended();
        assert!(!health.vitals().watchdog_alive);
    }
}
