//! Starts what can start: one idempotent pass after every event.

use super::domain::Gate;
use super::table::{Run, WaitKey};
use super::work::{self, Class, Work};
use super::{Command, Dispatch, Sched};
use crate::model::{ErrorKind, Lane, Millis, ObjectId, Phase, Record, Source, Step, Uid, Wish};

/// Dispatches in a row that change nothing before an object is slowed down.
const SPINS_MAX: u32 = 16;
/// Dispatches further apart than this are no hot loop.
const SPIN_MS: u64 = 10_000;
/// How many waiting objects are looked at for one that has not hung, to go first.
const CANARY_SCAN: usize = 64;

/// What came of an object that was to be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Started {
    /// It runs.
    Yes,
    /// It left its queue: it waits for something, or was given up.
    Aside,
}

impl Sched {
    /// Restores the invariant that whatever can start has started.
    pub(super) fn settle(&mut self) {
        self.table.ring();
        self.settle_domains();
        while let Some(id) = self.table.next_vanishing() {
            self.vanish(id);
        }
        if self.draining {
            return;
        }
        let names: Vec<String> = self.domains.keys().cloned().collect();
        for name in &names {
            for lane in Lane::ALL {
                while self.start_next(name, lane, false) {}
            }
        }
        // What runs in the background comes after everything else, in both pools.
        for name in &names {
            for lane in Lane::ALL {
                while self.start_next(name, lane, true) {}
            }
        }
    }

    /// Nothing was ever made of it, and nothing shall be.
    fn vanish(&mut self, id: ObjectId) {
        self.log_object(
            id,
            false,
            "Deleted",
            "nothing had been made of it".to_owned(),
        );
        self.gone(id);
    }

    /// Takes the next object of a pool's queues. False when nothing more can start.
    fn start_next(&mut self, name: &str, lane: Lane, background: bool) -> bool {
        let Some(domain) = self.domains.get(name) else {
            return false;
        };
        let state = domain.lane(lane);
        let busy = self.table.busy(name, lane);
        let free = state.workers.saturating_sub(busy.running);
        let needed = if background { 2 } else { 1 };
        if free < needed || busy.held >= state.abandoned_max {
            return false;
        }
        let half_open = match &state.gate {
            Gate::Closed { .. } => false,
            Gate::HalfOpen { canary: None, .. } => true,
            Gate::HalfOpen { .. } | Gate::Open { .. } | Gate::Probing { .. } => return false,
        };
        let Some(id) = self.candidate(name, lane, background, half_open) else {
            return false;
        };
        if self.start(id, lane) == Started::Yes && half_open {
            self.set_canary(name, lane, id);
        }
        true
    }

    /// The oldest wish of a pool that may go now. The first one after trouble shall be one that
    /// has not hung, if there is one.
    fn candidate(
        &self,
        name: &str,
        lane: Lane,
        background: bool,
        half_open: bool,
    ) -> Option<ObjectId> {
        let queues = self.table.queues(name, lane)?;
        let pick = |class: Class| -> Option<(Millis, ObjectId)> {
            let mut waiting = queues.of(class);
            if !half_open {
                return waiting.next();
            }
            let unhung = |id: &ObjectId| {
                self.table
                    .get(*id)
                    .is_some_and(|object| object.record.hangs == 0)
            };
            let scanned = || queues.of(class).take(CANARY_SCAN);
            scanned()
                .find(|(_, id)| unhung(id))
                .or_else(|| waiting.next())
        };
        if background {
            return pick(Class::Background).map(|(_, id)| id);
        }
        let space = if self.has_room(name) {
            pick(Class::Space)
        } else {
            None
        };
        [pick(Class::Plain), space]
            .into_iter()
            .flatten()
            .min()
            .map(|(_, id)| id)
    }

    /// Whether something that needs space may go: always, or as the one that tries.
    fn has_room(&self, name: &str) -> bool {
        match self
            .domains
            .get(name)
            .and_then(|domain| domain.pause.as_ref())
        {
            None => true,
            Some(pause) => pause.canary.is_none() && pause.next_canary_at <= self.now,
        }
    }

    fn set_canary(&mut self, name: &str, lane: Lane, id: ObjectId) {
        if let Some(domain) = self.domains.get_mut(name)
            && let Gate::HalfOpen { canary, .. } = &mut domain.lane_mut(lane).gate
        {
            *canary = Some(id);
        }
    }

    fn start(&mut self, id: ObjectId, lane: Lane) -> Started {
        let Some(object) = self.table.get(id) else {
            return Started::Aside;
        };
        let Work::Step(step) = work::next(object) else {
            return Started::Aside;
        };
        if let Some(waits) = self.source_missing(id, step) {
            return waits;
        }
        let Some(object) = self.table.get(id) else {
            return Started::Aside;
        };
        let (key, shared) = keys(&object.record, step);
        if step == Step::Encrypt && self.table.encrypting() >= self.policy.encrypt {
            return self.park(id, WaitKey::Encrypt);
        }
        if let Some((image, user)) = self.table.conflict(key, shared) {
            let behind = self.table.get(user).and_then(|object| object.run.as_ref());
            if behind.is_some_and(|run| run.step.is_background()) && !step.is_background() {
                self.cancel(user);
            }
            return self.park(id, WaitKey::Image(image));
        }
        if self.is_hot(id) {
            return Started::Aside;
        }
        self.dispatch(id, step, lane, key, shared);
        Started::Yes
    }

    /// A copy waits until its source is there, and fails with it.
    fn source_missing(&mut self, id: ObjectId, step: Step) -> Option<Started> {
        if !matches!(step, Step::Create | Step::Snapshot | Step::Inspect) {
            return None;
        }
        let record = &self.table.get(id)?.record;
        let source = &self.table.get(work::needs_source(record)?)?.record;
        if work::is_live(source) {
            return None;
        }
        if source.phase == Phase::Failed {
            let why = source.message.clone().unwrap_or_default();
            let words = format!("its source {} failed: {why}", source.title());
            self.give_up(id, ErrorKind::Gone, words);
            return Some(Started::Aside);
        }
        if source.phase.is_trash() {
            let title = source.title();
            let words = format!("its source was deleted ({title}); restore that, then retry");
            self.give_up(id, ErrorKind::Gone, words);
            return Some(Started::Aside);
        }
        let source = source.id;
        Some(self.park(id, WaitKey::Source(source)))
    }

    fn park(&mut self, id: ObjectId, key: WaitKey) -> Started {
        self.table.touch(id, |object| object.parked = Some(key));
        Started::Aside
    }

    /// An object that is dispatched again and again without getting anywhere is slowed down.
    fn is_hot(&mut self, id: ObjectId) -> bool {
        let now = self.now;
        let Some(object) = self.table.get(id) else {
            return false;
        };
        let quick = object
            .dispatched_at
            .is_some_and(|at| now.since(at) < SPIN_MS);
        let spins = if quick { object.spins + 1 } else { 0 };
        let hot = spins >= SPINS_MAX;
        let at = now.plus(self.policy.retry.cap_ms);
        self.table.touch(id, |object| {
            object.spins = if hot { 0 } else { spins };
            object.dispatched_at = Some(now);
            if hot {
                object.wait_until = Some(at);
            }
        });
        if hot {
            self.hot_loops += 1;
            self.table
                .change(id, |record, _| record.next_attempt_at = Some(at));
            let words = format!(
                "it was tried {SPINS_MAX} times in a row and nothing changed; the next try is in \
                 {} s",
                self.policy.retry.cap_ms / 1000
            );
            self.log_object(id, true, "HotLoop", words);
        }
        hot
    }

    fn dispatch(&mut self, id: ObjectId, step: Step, lane: Lane, key: Uid, shared: Option<Uid>) {
        self.attempts += 1;
        let attempt = self.attempts;
        let phase = self.table.get(id).map(|object| object.record.phase);
        let first_reclaim = step == Step::Reclaim && phase == Some(Phase::Trashed);
        if step != Step::Inspect {
            self.table
                .change(id, |record, now| begin(record, step, now));
        }
        let now = self.now;
        let Some(object) = self.table.get(id) else {
            return;
        };
        let record = object.record.clone();
        let domain = record.place.domain.clone();
        let run = Run {
            attempt,
            step,
            lane,
            domain: domain.clone(),
            generation: record.generation,
            since: now,
            held_since: None,
            key,
            shared,
            hang_counted: false,
            first_reclaim,
            cancelled: false,
        };
        self.table.touch(id, |object| object.run = Some(run));
        if Class::of(step) == Class::Space
            && let Some(pause) = self.domains.get_mut(&domain).and_then(|d| d.pause.as_mut())
        {
            pause.canary = Some(id);
        }
        let record = Box::new(record);
        let job = Dispatch {
            object: id,
            attempt,
            step,
            domain,
            lane,
            record,
        };
        self.out.push(Command::Dispatch(job));
    }

    /// Asks the attempt that runs on an object to end early.
    pub(super) fn cancel(&mut self, id: ObjectId) {
        let Some(run) = self.table.get(id).and_then(|object| object.run.as_ref()) else {
            return;
        };
        if run.cancelled || run.held_since.is_some() {
            return;
        }
        let (attempt, domain, lane) = (run.attempt, run.domain.clone(), run.lane);
        self.table.touch(id, |object| {
            if let Some(run) = &mut object.run {
                run.cancelled = true;
            }
        });
        self.out.push(Command::Cancel {
            attempt,
            domain,
            lane,
        });
    }
}

/// What an attempt works on, alone, and what it reads together with others.
fn keys(record: &Record, step: Step) -> (Uid, Option<Uid>) {
    let copies = matches!(step, Step::Create | Step::Flatten);
    let shared = record.source().filter(|_| copies).and_then(Source::image);
    (record.image, shared.filter(|image| *image != record.image))
}

/// What is committed before a step is done.
fn begin(record: &mut Record, step: Step, now: Millis) {
    let present = record.wish == Wish::Present;
    match step {
        Step::Create | Step::Import | Step::Snapshot | Step::Restore => {
            record.look = true;
            if present {
                record.move_to(Phase::Creating, now);
            }
        }
        Step::Encrypt => record.look = true,
        Step::Update => {
            record.look = true;
            // A volume that came to be while its wish changed was never ready before.
            if present && record.phase == Phase::Ready {
                record.move_to(Phase::Updating, now);
            }
        }
        Step::Trash | Step::RemoveSnapshot => record.look = true,
        Step::Reclaim => record.move_to(Phase::Reclaiming, now),
        Step::Flatten | Step::Inspect | Step::Probe | Step::Connect => {}
    }
}
