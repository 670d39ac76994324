//! Drills: rules that make any backend misbehave on purpose.
//!
//! This module owns the rules (`FaultRules`), and `Faulty`, which wraps a backend and its sessions
//! and applies them. It knows nothing of what it wraps, nor of HTTP or the configuration file;
//! the rules come in through serde.

mod rule;

pub use rule::{Action, BadRule, Rule, RuleSet};

use super::{
    Backend, Caps, Ctl, Error, Found, Marked, Reclaimed, Result, Retired, Session, SnapshotState,
    VolumeState,
};
use crate::model::{ErrorKind, Lane, Record, Step};
use serde::Serialize;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How often a delayed background step reports progress and looks whether it is cancelled.
const DELAY_TICK: Duration = Duration::from_millis(50);

/// The rules, shared by all who apply, show or change them.
#[derive(Debug, Clone)]
pub struct FaultRules {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Told whenever the rules are cleared.
    cleared: Condvar,
}

#[derive(Debug)]
struct State {
    seed: u64,
    rules: Vec<Armed>,
    /// Goes up with each clear: whoever waits by a rule waits for a higher one.
    clears: u64,
    /// Calls that hang by a rule now.
    hanging: usize,
}

#[derive(Debug)]
struct Armed {
    rule: Rule,
    matched: u64,
    struck: u64,
}

/// A rule and how often it has struck, as `GET /v1/faults` shows it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Struck {
    /// The rule as it was given, with its defaults filled in.
    #[serde(flatten)]
    pub rule: Rule,
    /// How many calls it has hit.
    pub struck: u64,
}

/// What a call has to suffer, and the number of clears at that time.
#[derive(Debug, Clone, Copy)]
struct Strike {
    action: Action,
    clears: u64,
}

impl FaultRules {
    /// No rules yet. The seed decides which calls a rule with a probability hits.
    #[must_use]
    pub fn new(seed: u64) -> FaultRules {
        FaultRules {
            shared: Arc::new(Shared {
                state: Mutex::new(State {
                    seed,
                    rules: Vec::new(),
                    clears: 0,
                    hanging: 0,
                }),
                cleared: Condvar::new(),
            }),
        }
    }

    /// Replaces all rules; their counts begin at zero. Calls that hang by an earlier rule go on
    /// hanging until `clear`.
    pub fn set(&self, rules: Vec<Rule>) {
        self.lock().rules = rules
            .into_iter()
            .map(|rule| Armed {
                rule,
                matched: 0,
                struck: 0,
            })
            .collect();
    }

    /// Every rule with how often it has struck, in the order in which they were given.
    #[must_use]
    pub fn list(&self) -> Vec<Struck> {
        let state = self.lock();
        let show = |armed: &Armed| Struck {
            rule: armed.rule.clone(),
            struck: armed.struck,
        };
        state.rules.iter().map(show).collect()
    }

    /// Removes all rules and lets every call go on that hangs or waits by one.
    pub fn clear(&self) {
        let mut state = self.lock();
        state.rules.clear();
        state.clears += 1;
        drop(state);
        self.shared.cleared.notify_all();
    }

    /// How many calls hang by a rule now.
    #[must_use]
    pub fn hanging(&self) -> usize {
        self.lock().hanging
    }

    /// The first rule that hits this call.
    fn strike(&self, step: Step, name: &str, domain: &str) -> Option<Strike> {
        let mut state = self.lock();
        let (seed, clears) = (state.seed, state.clears);
        for (at, armed) in state.rules.iter_mut().enumerate() {
            if !armed.rule.matches(step, name, domain) {
                continue;
            }
            armed.matched += 1;
            let spent = armed
                .rule
                .count
                .is_some_and(|count| armed.matched > u64::from(count));
            if spent || draw(seed, at, armed.matched) >= armed.rule.probability {
                continue;
            }
            armed.struck += 1;
            return Some(Strike {
                action: armed.rule.action,
                clears,
            });
        }
        None
    }

    /// Waits for the next clear, whatever else happens: this is a library call that hangs.
    fn hang(&self, clears: u64) {
        let mut state = self.lock();
        state.hanging += 1;
        while state.clears == clears {
            state = self
                .shared
                .cleared
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        state.hanging -= 1;
    }

    /// Waits that long, or until the next clear. Says whether it was cleared.
    fn pause(&self, time: Duration, clears: u64) -> bool {
        let state = self.lock();
        let (state, _) = self
            .shared
            .cleared
            .wait_timeout_while(state, time, |state| state.clears == clears)
            .unwrap_or_else(PoisonError::into_inner);
        state.clears != clears
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No rule is ever half changed, so a panic of a drill elsewhere spoils nothing.
        self.shared
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// A number in 0..1 for the `nth` matching call of a rule: the same for the same seed
/// (splitmix64).
fn draw(seed: u64, rule: usize, nth: u64) -> f64 {
    let mut z = seed
        .wrapping_add((rule as u64).wrapping_mul(0xD1B5_4A32_D192_ED03))
        .wrapping_add(nth.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^= z >> 31;
    // 53 bits are what a double holds exactly.
    (z >> 11) as f64 / (1u64 << 53) as f64
}

/// A backend that misbehaves by the rules.
#[derive(Debug)]
pub struct Faulty<B> {
    inner: B,
    rules: FaultRules,
}

impl<B: Backend> Faulty<B> {
    /// Wraps a backend (a `SharedBackend` is one as well).
    pub fn new(inner: B, rules: FaultRules) -> Faulty<B> {
        Faulty { inner, rules }
    }
}

impl<B: Backend> Backend for Faulty<B> {
    fn caps(&self) -> Caps {
        self.inner.caps()
    }

    fn connect(&self, domain: &str, lane: Lane, ctl: &dyn Ctl) -> Result<Box<dyn Session>> {
        let call = Call {
            rules: &self.rules,
            step: Step::Connect,
            name: "",
            domain,
        };
        let inner = call.run(ctl, |ctl| self.inner.connect(domain, lane, ctl))?;
        Ok(Box::new(FaultySession {
            inner,
            rules: self.rules.clone(),
            domain: domain.to_owned(),
        }))
    }

    fn recover_abandoned(&self, domain: &str) -> Result<usize> {
        self.inner.recover_abandoned(domain)
    }

    fn retire(&self, domain: &str, lane: Lane) {
        self.inner.retire(domain, lane);
    }
}

/// A session that misbehaves by the rules.
struct FaultySession {
    inner: Box<dyn Session>,
    rules: FaultRules,
    domain: String,
}

impl FaultySession {
    fn of_object<T>(
        &mut self,
        step: Step,
        record: &Record,
        ctl: &dyn Ctl,
        work: impl FnOnce(&mut dyn Session, &dyn Ctl) -> Result<T>,
    ) -> Result<T> {
        let call = Call {
            rules: &self.rules,
            step,
            name: record.name.as_str(),
            domain: &self.domain,
        };
        let inner = self.inner.as_mut();
        call.run(ctl, |ctl| work(inner, ctl))
    }
}

impl Session for FaultySession {
    fn ensure_volume(&mut self, step: Step, record: &Record, ctl: &dyn Ctl) -> Result<VolumeState> {
        self.of_object(step, record, ctl, |s, c| s.ensure_volume(step, record, c))
    }

    fn ensure_snapshot(&mut self, record: &Record, ctl: &dyn Ctl) -> Result<SnapshotState> {
        self.of_object(Step::Snapshot, record, ctl, |s, c| {
            s.ensure_snapshot(record, c)
        })
    }

    fn retire_volume(&mut self, record: &Record, ctl: &dyn Ctl) -> Result<Retired> {
        self.of_object(Step::Trash, record, ctl, |s, c| s.retire_volume(record, c))
    }

    fn retire_snapshot(&mut self, record: &Record, ctl: &dyn Ctl) -> Result<Retired> {
        self.of_object(Step::RemoveSnapshot, record, ctl, |s, c| {
            s.retire_snapshot(record, c)
        })
    }

    fn reclaim(&mut self, record: &Record, ctl: &dyn Ctl) -> Result<Reclaimed> {
        self.of_object(Step::Reclaim, record, ctl, |s, c| s.reclaim(record, c))
    }

    fn restore(&mut self, record: &Record, ctl: &dyn Ctl) -> Result<VolumeState> {
        self.of_object(Step::Restore, record, ctl, |s, c| s.restore(record, c))
    }

    fn flatten(&mut self, record: &Record, ctl: &dyn Ctl) -> Result<VolumeState> {
        self.of_object(Step::Flatten, record, ctl, |s, c| s.flatten(record, c))
    }

    fn inspect(&mut self, record: &Record, ctl: &dyn Ctl) -> Result<Option<Found>> {
        self.of_object(Step::Inspect, record, ctl, |s, c| s.inspect(record, c))
    }

    fn probe(&mut self, ctl: &dyn Ctl) -> Result<BTreeMap<String, String>> {
        let call = Call {
            rules: &self.rules,
            step: Step::Probe,
            name: "",
            domain: &self.domain,
        };
        let inner = self.inner.as_mut();
        call.run(ctl, |ctl| inner.probe(ctl))
    }

    fn survey(&mut self, ctl: &dyn Ctl) -> Result<Vec<Marked>> {
        // `rebuild` runs it outside of the daemon: no step, so no rule.
        self.inner.survey(ctl)
    }
}

/// One call that a rule may hit. Probes and connects have no name: only `*` matches them.
struct Call<'a> {
    rules: &'a FaultRules,
    step: Step,
    name: &'a str,
    domain: &'a str,
}

impl Call<'_> {
    fn run<T>(&self, ctl: &dyn Ctl, work: impl FnOnce(&dyn Ctl) -> Result<T>) -> Result<T> {
        let Some(strike) = self.rules.strike(self.step, self.name, self.domain) else {
            return work(ctl);
        };
        match strike.action {
            Action::Hang => {
                self.rules.hang(strike.clears);
                work(ctl)
            }
            Action::Delay(time) => {
                self.delay(time, strike.clears, ctl)?;
                work(ctl)
            }
            Action::Error(errno) => {
                let message = format!("{}: a drill answers with an error", self.what());
                Err(Error::of_errno(errno, "drill", message).untouched())
            }
            Action::LateOk(time) => {
                let answer = work(ctl);
                self.rules.pause(time, strike.clears);
                answer
            }
            Action::Half => self.half(strike.clears, ctl, work),
            Action::Panic => panic!("{}: a drill panics", self.what()),
        }
    }

    /// Waits, then lets the work begin. A background step shows that it is alive and can be
    /// cancelled meanwhile, as a real one can.
    fn delay(&self, time: Duration, clears: u64, ctl: &dyn Ctl) -> Result<()> {
        if !self.step.is_background() {
            self.rules.pause(time, clears);
            return Ok(());
        }
        let begun = Instant::now();
        let total = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        loop {
            let elapsed = begun.elapsed();
            let done = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
            if ctl.progress(done.min(total), total).is_break() {
                let message = format!("{}: cancelled during a drill's delay", self.what());
                return Err(Error::new(ErrorKind::Cancelled, "drill", message).untouched());
            }
            if elapsed >= time {
                return Ok(());
            }
            if self
                .rules
                .pause(DELAY_TICK.min(time.saturating_sub(elapsed)), clears)
            {
                return Ok(());
            }
        }
    }

    /// Lets the work run and stops it inside the report that it is half done, so that what it has
    /// made so far is really there, and half. Work that never reports as much is done as a whole
    /// and its answer held back: half of an atomic step is the step without its answer.
    fn half<T>(
        &self,
        clears: u64,
        ctl: &dyn Ctl,
        work: impl FnOnce(&dyn Ctl) -> Result<T>,
    ) -> Result<T> {
        let halfway = Halfway {
            inner: ctl,
            rules: self.rules,
            clears,
            hung: AtomicBool::new(false),
        };
        let answer = work(&halfway);
        if !halfway.hung.load(Ordering::SeqCst) {
            self.rules.hang(clears);
        }
        answer
    }

    fn what(&self) -> String {
        if self.name.is_empty() {
            format!("{} in domain {}", self.step.as_str(), self.domain)
        } else {
            format!("{} of {}", self.step.as_str(), self.name)
        }
    }
}

/// Hangs in the first report that says "half of it, or more".
struct Halfway<'a> {
    inner: &'a dyn Ctl,
    rules: &'a FaultRules,
    clears: u64,
    hung: AtomicBool,
}

impl Ctl for Halfway<'_> {
    fn progress(&self, done: u64, total: u64) -> ControlFlow<()> {
        let half = u128::from(done) * 2 >= u128::from(total);
        if half && !self.hung.swap(true, Ordering::SeqCst) {
            self.rules.hang(self.clears);
        }
        self.inner.progress(done, total)
    }

    fn cancelled(&self) -> bool {
        self.inner.cancelled()
    }
}

#[cfg(test)]
mod tests;
