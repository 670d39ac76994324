//! The watchdog: gives up what overruns its deadline, replaces its thread, and feeds systemd.
//!
//! It sleeps until the earliest deadline of any slot and is woken when an earlier one appears;
//! while nothing runs it sleeps until then. While something runs it looks at least once a second,
//! so that it notices when the process was stopped: see `PAUSE_MS`.

mod plan;
mod systemd;
#[cfg(test)]
mod tests;
mod waker;

pub use systemd::Systemd;
pub(crate) use waker::Waker;

use crate::heartbeat::Heartbeats;
use crate::pool::{About, Given, Pool, Pools, Refusal, Report, Seat, Shared, Unreplaced, lock};
use crate::slot::{Due, Seen, Stage, State};
use crate::spawn::{self, panic_text};
use crossbeam::sync::Parker;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use std::{fmt, io};

/// Being woken this much later than planned means that the process as a whole didn't run
/// (SIGSTOP, a frozen cgroup or virtual machine). Whatever ran then could make no progress either:
/// it gets `GRACE_MS`, or its deadline if that is shorter, from now on before it is abandoned.
/// (A suspended machine isn't seen at all: the monotonic clock stands still.)
const PAUSE_MS: u64 = 1_000;
const GRACE_MS: u64 = 5_000;

/// The longest sleep while something runs.
const LOOK_MS: u64 = 1_000;

/// How often reports that found their channel full are tried again.
const FLUSH_MS: u64 = 20;

/// What the watchdog thread is started with.
#[derive(Debug)]
pub struct Settings {
    /// The longest silence of a living loop, in milliseconds: after it systemd gets no more food.
    pub heartbeat_max_ms: u64,
    /// Where signs of life are kept.
    pub beats: Arc<Heartbeats>,
    /// The service manager, if there is one.
    pub systemd: Option<Systemd>,
}

/// The running watchdog.
pub struct Watchdog {
    shared: Arc<Shared>,
    stop: Arc<AtomicBool>,
    ticks: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Watchdog {
    /// Starts the watchdog over these pools. One per `Pools`.
    ///
    /// # Errors
    /// When its thread can't be started.
    pub fn start(pools: &Pools, settings: Settings) -> io::Result<Watchdog> {
        let shared = Arc::clone(&pools.shared);
        let stop = Arc::new(AtomicBool::new(false));
        let ticks = Arc::new(AtomicU64::new(0));
        let parker = Parker::new();
        shared.waker.attach(parker.unparker().clone());
        let mut guard = Guard {
            watch: Watch::new(Arc::clone(&shared)),
            settings,
            fed_ms: None,
            stop: Arc::clone(&stop),
            ticks: Arc::clone(&ticks),
        };
        let thread = spawn::spawn("watchdog", 256 << 10, move || guard.run(&parker))?;
        Ok(Watchdog {
            shared,
            stop,
            ticks,
            thread,
        })
    }

    /// How often it woke since its start.
    #[must_use]
    pub fn ticks(&self) -> u64 {
        self.ticks.load(Ordering::Relaxed)
    }

    /// Ends it, at the end of the process only: from here on nothing is abandoned.
    pub fn stop(self) {
        self.stop.store(true, Ordering::SeqCst);
        self.shared.waker.ring();
        drop(self.thread.join());
    }
}

impl fmt::Debug for Watchdog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watchdog")
            .field("ticks", &self.ticks())
            .finish_non_exhaustive()
    }
}

struct Guard {
    watch: Watch,
    settings: Settings,
    fed_ms: Option<u64>,
    stop: Arc<AtomicBool>,
    ticks: Arc<AtomicU64>,
}

impl Guard {
    fn run(&mut self, parker: &Parker) {
        while !self.stop.load(Ordering::SeqCst) {
            self.ticks.fetch_add(1, Ordering::Relaxed);
            let shared = Arc::clone(&self.watch.shared);
            shared.waker.begin_look();
            let now_ms = shared.clock.now_ms();
            // A look that hangs is noticed by what it was to be over with.
            self.settings.beats.watchdog_sleeps(now_ms);
            let next_ms = earlier(self.watch.look(now_ms), self.feed(now_ms));
            self.settings
                .beats
                .watchdog_sleeps(next_ms.unwrap_or(u64::MAX));
            shared.waker.end_look(next_ms.unwrap_or(u64::MAX));
            self.watch.planned_ms = next_ms;
            match next_ms {
                None => parker.park(),
                Some(at_ms) => {
                    let ms = at_ms.saturating_sub(shared.clock.now_ms());
                    parker.park_timeout(Duration::from_millis(ms));
                }
            }
        }
    }

    /// Feeds systemd if it is time and the loop beats. Says when the next time is.
    fn feed(&mut self, now_ms: u64) -> Option<u64> {
        let systemd = self.settings.systemd.as_ref()?;
        let every_ms = systemd.every_ms()?;
        let due_ms = self.fed_ms.map_or(now_ms, |fed_ms| fed_ms + every_ms);
        if now_ms < due_ms {
            return Some(due_ms);
        }
        let silent_ms = self.settings.beats.loop_age_ms(now_ms);
        if silent_ms <= self.settings.heartbeat_max_ms {
            systemd.feed();
        } else {
            log::error!("the loop hasn't beaten for {silent_ms} ms: systemd isn't fed");
        }
        self.fed_ms = Some(now_ms);
        Some(now_ms + every_ms)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.settings.beats.watchdog_ended();
    }
}

/// What the watchdog knows from one look to the next.
struct Watch {
    shared: Arc<Shared>,
    planned_ms: Option<u64>,
    resumed_ms: Option<u64>,
}

impl Watch {
    fn new(shared: Arc<Shared>) -> Watch {
        Watch {
            shared,
            planned_ms: None,
            resumed_ms: None,
        }
    }

    /// Does everything that is due and says when to look again.
    fn look(&mut self, now_ms: u64) -> Option<u64> {
        if self
            .planned_ms
            .is_some_and(|planned_ms| now_ms > planned_ms.saturating_add(PAUSE_MS))
        {
            log::warn!("the process stood still: running attempts get up to {GRACE_MS} ms more");
            self.resumed_ms = Some(now_ms);
        }
        let mut next_ms = None;
        for pool in self.shared.all_pools() {
            for seat in pool.seats() {
                next_ms = earlier(next_ms, self.look_at(&pool, &seat, now_ms));
            }
            next_ms = earlier(next_ms, self.mend(&pool, now_ms));
        }
        self.shared.sweep();
        if self.shared.flush() {
            next_ms
        } else {
            earlier(next_ms, Some(now_ms + FLUSH_MS))
        }
    }

    fn look_at(&self, pool: &Arc<Pool>, seat: &Arc<Seat>, now_ms: u64) -> Option<u64> {
        let seen = seat.slot.seen();
        if seen.state() != State::Running {
            return None;
        }
        let due = self.graced(seat.slot.due(seen));
        if now_ms >= due.abandon_ms {
            let verdict = lock(&seat.verdict);
            let given = pool.give_up(seat, seen);
            if matches!(given, Given::Up) {
                self.replace(pool, seat, seen, due, now_ms);
            }
            drop(verdict);
            return match given {
                Given::Up => None,
                Given::NoRoom => {
                    // Looked at again when a thread comes back.
                    seat.slot.cancel(seen.attempt(), now_ms);
                    None
                }
                Given::Not => Some(now_ms),
            };
        }
        if now_ms >= due.cancel_ms {
            if seat.slot.cancel(seen.attempt(), now_ms) {
                log::info!("attempt={} is near its deadline: cancelled", seen.attempt());
            }
            return Some(due.abandon_ms.min(now_ms + LOOK_MS));
        }
        Some(due.cancel_ms.min(now_ms + LOOK_MS))
    }

    fn graced(&self, mut due: Due) -> Due {
        if let Some(resumed_ms) = self.resumed_ms
            && due.started_ms < resumed_ms
        {
            let deadline = due.plan.deadline;
            let grace_ms = deadline.stall_ms.min(deadline.total_ms).min(GRACE_MS);
            let early_ms = due.abandon_ms - due.cancel_ms;
            due.abandon_ms = due.abandon_ms.max(resumed_ms + grace_ms);
            due.cancel_ms = due.abandon_ms - early_ms.min(grace_ms / 2);
        }
        due
    }

    /// An attempt was given up: its pool gets a fresh worker and the loop a report.
    fn replace(&self, pool: &Arc<Pool>, seat: &Seat, seen: Seen, due: Due, now_ms: u64) {
        let shared = &self.shared;
        let retired = catch_unwind(AssertUnwindSafe(|| {
            shared.backend.retire(&pool.domain, pool.lane);
        }));
        if let Err(payload) = retired {
            log::error!("retire panicked: {}", panic_text(payload.as_ref()));
        }
        let filled = pool.fill(shared, now_ms);
        let unreplaced = Unreplaced::of(&filled);
        if let Err(refusal) = &filled {
            pool.complain(shared, refusal);
        }
        let Some((about, title)) = lock(&seat.about).clone() else {
            return;
        };
        let ran_ms = now_ms.saturating_sub(about.started_ms);
        let deadline_ms = due.abandon_ms.saturating_sub(about.started_ms);
        let late_ms = now_ms.saturating_sub(due.abandon_ms);
        log::warn!(
            "{}={} attempt={} step={} lane={} domain={} abandoned after {ran_ms} ms: {title}",
            about.object.kind(),
            about.object.uid(),
            about.attempt,
            about.step.as_str(),
            about.lane.as_str(),
            about.domain,
        );
        shared.report(Report::Abandoned {
            about: About {
                connecting: seen.stage() == Stage::Connect,
                ..about
            },
            abandoned_at: shared.clock.wall(),
            ran_ms,
            deadline_ms,
            late_ms,
            unreplaced,
        });
        pool.announce(shared);
    }

    /// Starts workers that are missing. Says when to try again.
    fn mend(&self, pool: &Arc<Pool>, now_ms: u64) -> Option<u64> {
        if let Some(retry_at_ms) = pool.missing()?
            && now_ms < retry_at_ms
        {
            return Some(retry_at_ms);
        }
        match pool.fill(&self.shared, now_ms) {
            Ok(0) => {}
            Ok(_) => pool.announce_change(&self.shared),
            Err(refusal) => {
                pool.complain(&self.shared, &refusal);
                pool.announce_change(&self.shared);
                if !matches!(refusal, Refusal::System(_)) {
                    // A thread that ends rings.
                    return None;
                }
            }
        }
        pool.missing()
            .map(|at_ms| at_ms.unwrap_or(now_ms + LOOK_MS))
    }
}

fn earlier(a_ms: Option<u64>, b_ms: Option<u64>) -> Option<u64> {
    match (a_ms, b_ms) {
        (Some(a_ms), Some(b_ms)) => Some(a_ms.min(b_ms)),
        (one, other) => one.or(other),
    }
}
