//! Time for the threads: deadlines on the monotonic clock, the wall clock only for what is shown.

use crate::model::Millis;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The clock of this process. Cheap to clone; every clone shows the same time.
///
/// Monotonic times are milliseconds since the clock was made. They stand still while the machine
/// is suspended (`CLOCK_MONOTONIC`), and go on while the process is stopped.
#[derive(Debug, Clone)]
pub struct Clock(Source);

#[derive(Debug, Clone)]
enum Source {
    Real(Instant),
    Manual(Arc<AtomicU64>),
}

impl Clock {
    /// The real clock, which starts at 0 now.
    #[must_use]
    pub fn real() -> Clock {
        Clock(Source::Real(Instant::now()))
    }

    /// A clock that stands at 0 until `advance` moves it, for tests. Its wall time is its
    /// monotonic time.
    #[must_use]
    pub fn manual() -> Clock {
        Clock(Source::Manual(Arc::default()))
    }

    /// Milliseconds since the clock was made.
    #[must_use]
    pub fn now_ms(&self) -> u64 {
        match &self.0 {
            Source::Real(start) => whole_ms(start.elapsed()),
            Source::Manual(now) => now.load(Ordering::SeqCst),
        }
    }

    /// The wall clock's time now.
    #[must_use]
    pub fn wall(&self) -> Millis {
        match &self.0 {
            Source::Real(_) => Millis(
                SystemTime::now()
                    .duration_since(UNIX_EPOCH)
                    .map_or(0, whole_ms),
            ),
            Source::Manual(now) => Millis(now.load(Ordering::SeqCst)),
        }
    }

    /// The wall clock's time at a monotonic time, as the wall clock stands now. Works for past and
    /// future times.
    #[must_use]
    pub fn wall_at(&self, at_ms: u64) -> Millis {
        let now_ms = self.now_ms();
        let wall = self.wall();
        if at_ms >= now_ms {
            wall.plus(at_ms - now_ms)
        } else {
            Millis(wall.0.saturating_sub(now_ms - at_ms))
        }
    }

    /// Moves a manual clock by `ms`; a real clock doesn't care.
    pub fn advance(&self, ms: u64) {
        if let Source::Manual(now) = &self.0 {
            now.fetch_add(ms, Ordering::SeqCst);
        }
    }
}

fn whole_ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manual_clock_maps_both_ways() {
        let clock = Clock::manual();
        clock.advance(100);
        assert_eq!(clock.now_ms(), 100);
        assert_eq!(clock.wall_at(40), Millis(40));
        assert_eq!(clock.wall_at(140), Millis(140));
    }

    #[test]
    fn the_real_clock_never_goes_back() {
        let clock = Clock::real();
        let before = clock.now_ms();
        clock.advance(1_000_000);
        let after = clock.now_ms();
        assert!(before <= after && after < 1_000_000);
    }
}
