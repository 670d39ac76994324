//! The simulated world: a store, pools, a watchdog, backends with moods, clients, crashes; all of
//! it driven by a virtual clock and the dice.

use super::checker::{Checker, Promise};
use super::dice::Dice;
use super::disk::{Disk, Extent};
use super::options::{Mood, Options};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use volward::backend::{Error, Outcome};
use volward::model::{
    Entry, ErrorKind, Lane, Millis, Name, ObjectId, Phase, Record, Step, Uid, Wish,
};
use volward::sched::{
    Command, Dispatch, Event, Lookup, Named, NewVolume, Request, Sched, SourceWish, VolumeChange,
};

/// A call into the backend.
#[derive(Debug, Clone)]
struct Call {
    job: Dispatch,
    /// When its work takes effect: at the start, or at the end.
    early: bool,
    extent: Extent,
    /// What it answers in the end, if not what the disk says.
    answer: Option<Error>,
    /// The disk's answer, once the work was done.
    done: Option<Result<Outcome, Error>>,
    hangs: bool,
    abandoned: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Happening {
    Client,
    CallEnds(u64),
    Deadline(u64),
    ProbeEnds { domain: String, asked_in: u64 },
    Wake,
    Mood(String),
    Crash,
    Config,
    Stop,
}

pub struct World {
    pub dice: Dice,
    pub options: Options,
    now: u64,
    /// The wall clock is ahead of `now` by so much; it jumps only while no daemon runs.
    ahead: u64,
    process: u64,
    sched: Sched,
    store: BTreeMap<ObjectId, Record>,
    identities: BTreeMap<String, String>,
    log: Vec<Entry>,
    disk: Disk,
    pub checker: Checker,
    inbox: VecDeque<Event>,
    agenda: BTreeMap<(u64, u64), Happening>,
    sequence: u64,
    calls: BTreeMap<u64, Call>,
    moods: BTreeMap<String, Mood>,
    abandoned: BTreeMap<(String, Lane), usize>,
    wake_at: Option<u64>,
    uids: u128,
    healed: bool,
    restart_asked: bool,
    pub steps: u64,
    pub crashes: u64,
    pub restarts: u64,
    /// What the pools last said, as far as the scheduler knows.
    workers: BTreeMap<(String, Lane), usize>,
    /// The same when an attempt was decided on.
    workers_at: BTreeMap<u64, usize>,
    /// The largest bound on abandoned threads so far.
    held_max: usize,
    trace: bool,
    ticks: u64,
    ticked_at: u64,
}

impl World {
    pub fn new(seed: u64) -> World {
        let mut dice = Dice::new(seed);
        let options = Options::draw(&mut dice);
        let sched = Sched::new(options.policy.clone(), seed);
        let mut world = World {
            moods: options.domains().map(|name| (name, Mood::Well)).collect(),
            dice,
            options,
            now: 1_000_000,
            ahead: 0,
            process: 0,
            sched,
            store: BTreeMap::new(),
            identities: BTreeMap::new(),
            log: Vec::new(),
            disk: Disk::default(),
            checker: Checker::default(),
            inbox: VecDeque::new(),
            agenda: BTreeMap::new(),
            sequence: 0,
            calls: BTreeMap::new(),
            abandoned: BTreeMap::new(),
            wake_at: None,
            uids: u128::from(seed) << 64,
            healed: false,
            restart_asked: false,
            steps: 0,
            crashes: 0,
            restarts: 0,
            workers: BTreeMap::new(),
            workers_at: BTreeMap::new(),
            held_max: 0,
            ticks: 0,
            ticked_at: 0,
            trace: std::env::var_os("VOLWARD_SIM_TRACE").is_some(),
        };
        world.boot();
        world
    }

    /// The safety phase, then the liveness phase.
    pub fn run(&mut self) {
        let end = self.now + self.options.span_ms;
        self.plan(0, Happening::Client);
        for domain in self.options.domains().collect::<Vec<_>>() {
            self.plan_roughly(self.options.mood_every_ms, Happening::Mood(domain));
        }
        self.plan_roughly(self.options.crash_every_ms, Happening::Crash);
        self.plan_roughly(self.options.config_every_ms, Happening::Config);
        self.plan_roughly(self.options.stop_every_ms, Happening::Stop);
        while self.now < end && self.advance(end) {}
        self.heal();
        self.check_prompt();
        self.settle_all();
        self.delete_some();
        self.settle_all();
    }

    // ---- time ----

    fn plan(&mut self, after_ms: u64, what: Happening) {
        self.sequence += 1;
        self.agenda
            .insert((self.now + after_ms, self.sequence), what);
    }

    fn plan_roughly(&mut self, every_ms: u64, what: Happening) {
        if every_ms > 0 && !self.healed {
            let after = self.dice.between(1, every_ms * 2);
            self.plan(after, what);
        }
    }

    fn wall(&self) -> Millis {
        Millis(self.now + self.ahead)
    }

    /// Does what is next. False when nothing is planned before `end`.
    fn advance(&mut self, end: u64) -> bool {
        if !self.inbox.is_empty() {
            self.batch();
            return true;
        }
        let Some(((at, _), _)) = self.agenda.first_key_value() else {
            return false;
        };
        if *at > end {
            self.now = end;
            return false;
        }
        let ((at, _), what) = self.agenda.pop_first().expect("just seen");
        self.now = self.now.max(at);
        self.happen(what);
        // Now and then several things come together in one batch.
        if self.dice.chance(self.options.together) {
            return true;
        }
        if !self.inbox.is_empty() {
            self.batch();
        }
        true
    }

    fn happen(&mut self, what: Happening) {
        match what {
            Happening::Client => {
                if !self.healed {
                    self.ask_something();
                    let after = self.dice.below(self.options.client_every_ms * 2);
                    self.plan(after, Happening::Client);
                }
            }
            Happening::CallEnds(attempt) => self.call_ends(attempt),
            Happening::Deadline(attempt) => self.deadline(attempt),
            Happening::ProbeEnds { domain, asked_in } if asked_in == self.process => {
                self.probe_ends(domain);
            }
            Happening::ProbeEnds { .. } => {}
            Happening::Wake => {
                if self.wake_at.is_some_and(|at| at <= self.now) {
                    self.ticks = if self.ticked_at == self.now {
                        self.ticks + 1
                    } else {
                        0
                    };
                    self.ticked_at = self.now;
                    assert!(self.ticks < 1000, "the scheduler wakes itself without end");
                    self.wake_at = None;
                    self.inbox.push_back(Event::Tick {
                        progress: BTreeMap::new(),
                    });
                }
            }
            Happening::Mood(domain) => {
                if !self.healed {
                    let mood = Mood::draw(&mut self.dice);
                    self.turn(&domain, mood);
                    self.plan_roughly(self.options.mood_every_ms, Happening::Mood(domain));
                }
            }
            Happening::Crash => {
                if !self.healed {
                    self.crash();
                    self.plan_roughly(self.options.crash_every_ms, Happening::Crash);
                }
            }
            Happening::Config => {
                if !self.healed {
                    self.options.redraw(&mut self.dice);
                    self.reconfigure();
                    self.plan_roughly(self.options.config_every_ms, Happening::Config);
                }
            }
            Happening::Stop => {
                if !self.healed {
                    self.inbox.push_back(Event::Drain);
                    self.batch();
                    self.crash();
                    self.plan_roughly(self.options.stop_every_ms, Happening::Stop);
                }
            }
        }
    }

    fn reconfigure(&mut self) {
        self.held_max = 5;
        self.inbox
            .push_back(Event::ConfigChanged(Box::new(self.options.policy.clone())));
        for domain in self.options.domains().collect::<Vec<_>>() {
            for lane in Lane::ALL {
                let workers = self.options.policy.domains[&domain].threads(lane);
                self.inbox.push_back(Event::LaneChanged {
                    domain: domain.clone(),
                    lane,
                    workers,
                });
            }
        }
    }

    // ---- the daemon's loop ----

    fn rows(&self, event: &Event, open: &BTreeMap<ObjectId, Option<Record>>) -> Vec<Record> {
        let current = |id: &ObjectId| match open.get(id) {
            Some(changed) => changed.clone(),
            None => self.store.get(id).cloned(),
        };
        let ids: BTreeSet<ObjectId> = self.store.keys().chain(open.keys()).copied().collect();
        let all = || ids.iter().filter_map(current);
        let mut rows = Vec::new();
        for lookup in Sched::lookups_of(event) {
            match lookup {
                Lookup::Volume(name) => {
                    rows.extend(all().filter(|r| {
                        r.id.kind() == "volume" && r.name == name && !r.phase.is_trash()
                    }))
                }
                Lookup::Snapshot(name) => {
                    rows.extend(all().filter(|r| r.id.kind() == "snapshot" && r.name == name));
                }
                Lookup::NamesakeOf(uid) => {
                    let name = current(&ObjectId::Volume(uid)).map(|record| record.name);
                    rows.extend(all().filter(|r| {
                        r.id.kind() == "volume"
                            && Some(&r.name) == name.as_ref()
                            && !r.phase.is_trash()
                    }));
                }
                Lookup::VolumeUid(uid) => rows.extend(current(&ObjectId::Volume(uid))),
                Lookup::ChildrenOf(uid) => {
                    rows.extend(all().filter(|r| r.source().and_then(|s| s.image()) == Some(uid)))
                }
            }
        }
        rows
    }

    /// One batch: steps, one commit, then the commands; with everything that can go wrong.
    fn batch(&mut self) {
        let mut open: BTreeMap<ObjectId, Option<Record>> = BTreeMap::new();
        let mut later = Vec::new();
        let mut taken = Vec::new();
        let mut replies = Vec::new();
        let workers_before = self.workers.clone();
        for _ in 0..self.options.batch_max {
            let Some(event) = self.inbox.pop_front() else {
                break;
            };
            let rows = self.rows(&event, &open);
            let mut stepped = event.clone();
            match &mut stepped {
                Event::Request { rows: slot, .. }
                | Event::Finished { rows: slot, .. }
                | Event::LateReturn { rows: slot, .. } => *slot = rows,
                _ => {}
            }
            if self.trace {
                println!("{} {event:?}", self.now);
            }
            if let Event::LaneChanged {
                domain,
                lane,
                workers,
            } = &event
            {
                self.workers.insert((domain.clone(), *lane), *workers);
            }
            taken.push(event);
            self.steps += 1;
            for command in self.sched.step(self.wall(), stepped) {
                match command {
                    Command::Put(record) => {
                        open.insert(record.id, Some(*record));
                    }
                    Command::Remove(id) => {
                        open.insert(id, None);
                    }
                    Command::Reply { answer, .. } => replies.push(*answer),
                    Command::Dispatch(job) => {
                        let workers = self.workers[&(job.domain.clone(), job.lane)];
                        self.workers_at.insert(job.attempt, workers);
                        later.push(Command::Dispatch(job));
                    }
                    other => later.push(other),
                }
            }
        }
        if !self.healed && self.dice.chance(self.options.commit_fails) {
            self.sched.rollback();
            self.workers = workers_before;
            // Requests are answered with 503; everything else is stepped again.
            taken.retain(|event| !matches!(event, Event::Request { .. }));
            for event in taken.into_iter().rev() {
                self.inbox.push_front(event);
            }
            return;
        }
        if !self.healed && self.dice.chance(self.options.dies_before_commit) {
            return self.crash();
        }
        self.commit(open, replies);
        for command in later {
            if !self.healed && self.dice.chance(self.options.dies_between_commands) {
                return self.crash();
            }
            self.perform(command);
        }
        if std::mem::take(&mut self.restart_asked) {
            self.restarts += 1;
            self.crash();
        }
    }

    fn commit(
        &mut self,
        open: BTreeMap<ObjectId, Option<Record>>,
        replies: Vec<Result<volward::sched::Accepted, volward::sched::Refusal>>,
    ) {
        for (id, record) in &open {
            match record {
                Some(record) => self.store.insert(*id, record.clone()),
                None => self.store.remove(id),
            };
        }
        self.sched.committed();
        for accepted in replies.into_iter().flatten() {
            let record = accepted.record;
            let size = record.volume().map_or(0, |volume| volume.size_bytes);
            let promise = match record.wish {
                Wish::Present => Promise::There {
                    name: record.name.clone(),
                    size,
                },
                Wish::Absent => Promise::Gone,
            };
            self.checker.promises.insert(record.id, promise);
        }
        self.checker.committed(&open, &self.disk);
        self.checker.nothing_lost(&self.store);
        self.check_names();
    }

    fn check_names(&self) {
        let mut names = BTreeSet::new();
        for record in self
            .store
            .values()
            .filter(|record| !record.phase.is_trash())
        {
            let fresh = names.insert((record.id.kind(), record.name.clone()));
            assert!(fresh, "two objects are named {}", record.title());
        }
    }

    fn perform(&mut self, command: Command) {
        match command {
            Command::Dispatch(job) => self.dispatch(job),
            Command::Cancel { attempt, .. } => self.cancel(attempt),
            Command::Probe { domain, recover } => {
                if recover && self.dice.chance(500) && self.moods[&domain] == Mood::Well {
                    self.fence(&domain);
                }
                let after = self.dice.between(1, 50);
                self.plan(
                    after,
                    Happening::ProbeEnds {
                        domain,
                        asked_in: self.process,
                    },
                );
            }
            Command::WakeAt(at) => {
                let at = at.0.saturating_sub(self.ahead).max(self.now);
                if self.wake_at.is_none_or(|planned| at < planned) {
                    self.wake_at = Some(at);
                    self.plan(at - self.now, Happening::Wake);
                }
            }
            Command::Log(entry) => self.log.push(entry),
            Command::Identity { root, identity } => {
                self.identities.insert(root, identity);
            }
            Command::Restart { .. } => self.restart_asked = true,
            Command::Put(_) | Command::Remove(_) | Command::Reply { .. } => unreachable!("taken"),
        }
    }

    fn dispatch(&mut self, job: Dispatch) {
        if self.trace {
            println!(
                "{} dispatch {} {:?} {:?}",
                self.now, job.attempt, job.step, job.object
            );
        }
        let bounds = &self.options.policy.domains[&job.domain];
        let workers = self.workers_at[&job.attempt];
        let max = self.held_max.max(bounds.abandoned_max(job.lane));
        self.checker
            .dispatched(&job, self.store.get(&job.object), workers, max);
        let attempt = job.attempt;
        let mood = self.moods[&job.domain];
        let plan = self
            .options
            .plan(&mut self.dice, mood, job.step, self.healed);
        let mut call = Call {
            job,
            early: plan.early,
            extent: plan.extent,
            answer: plan.answer,
            done: None,
            hangs: plan.ends_after_ms.is_none(),
            abandoned: false,
        };
        if call.early {
            let extent = call.extent;
            call.done = Some(self.disk.act(call.job.step, &call.job.record, extent));
        }
        self.calls.insert(attempt, call);
        if let Some(after) = plan.ends_after_ms {
            self.plan(after, Happening::CallEnds(attempt));
        }
        self.plan(self.options.deadline_ms, Happening::Deadline(attempt));
    }

    // ---- calls ----

    fn call_ends(&mut self, attempt: u64) {
        let Some(mut call) = self.calls.remove(&attempt) else {
            return;
        };
        let extent = call.extent;
        let did = match call.done.take() {
            Some(did) if call.answer.is_some() => did,
            // A success is said of the whole work only.
            _ if call.answer.is_none() => {
                self.disk
                    .act(call.job.step, &call.job.record, Extent::Whole)
            }
            _ => self.disk.act(call.job.step, &call.job.record, extent),
        };
        // Also of an attempt that never got to its work, whatever an earlier one has begun.
        let untouched = extent == Extent::Nothing;
        let result = match (call.answer, did) {
            (_, Err(error)) => Err(error),
            (Some(error), Ok(_)) if untouched => Err(error.untouched()),
            (Some(error), Ok(_)) => Err(error),
            (None, Ok(outcome)) => Ok(outcome),
        };
        let object = call.job.object;
        self.checker.ended(object, attempt);
        let may_cost = |error: &Error| {
            matches!(
                error.kind,
                ErrorKind::Transient | ErrorKind::Internal | ErrorKind::Hung
            )
        };
        let rows = Vec::new();
        if call.abandoned {
            let pool = (call.job.domain.clone(), call.job.lane);
            *self.abandoned.get_mut(&pool).expect("it was counted") -= 1;
            self.inbox.push_back(Event::LateReturn {
                attempt,
                object,
                result,
                rows,
            });
        } else {
            if result.as_ref().is_err_and(may_cost) {
                self.checker.billed(object);
            }
            self.inbox.push_back(Event::Finished {
                attempt,
                object,
                result,
                rows,
            });
        }
    }

    fn deadline(&mut self, attempt: u64) {
        let Some(call) = self.calls.get_mut(&attempt) else {
            return;
        };
        if call.abandoned {
            return;
        }
        let (domain, lane) = (call.job.domain.clone(), call.job.lane);
        let bounds = self.options.policy.domains[&domain];
        let count = self.abandoned.entry((domain.clone(), lane)).or_default();
        if *count >= bounds.abandoned_max(lane) {
            return self.plan(1000, Happening::Deadline(attempt));
        }
        *count += 1;
        call.abandoned = true;
        let (object, step) = (call.job.object, call.job.step);
        self.checker.abandoned(object);
        let deadline_ms = self.options.deadline_ms;
        let at = self.wall();
        let started_at = Millis(at.0 - deadline_ms);
        let hang = Event::Abandoned {
            attempt,
            object,
            started_at,
            at,
            deadline_ms,
            step,
        };
        self.inbox.push_back(hang);
        let workers = bounds.threads(lane);
        self.inbox.push_back(Event::LaneChanged {
            domain,
            lane,
            workers,
        });
    }

    fn cancel(&mut self, attempt: u64) {
        let heeds = self.dice.chance(800);
        let half = self.dice.chance(500);
        let Some(call) = self.calls.get_mut(&attempt) else {
            return;
        };
        if call.hangs || call.early || !heeds {
            return;
        }
        call.answer = Some(Error::of_errno(125, "model", "cancelled"));
        call.extent = if half { Extent::Half } else { Extent::Nothing };
        self.plan(20, Happening::CallEnds(attempt));
    }

    /// Abandoned calls of that domain come back because their session was fenced off.
    fn fence(&mut self, domain: &str) {
        let stuck: Vec<u64> = self
            .calls
            .iter()
            .filter(|(_, call)| call.abandoned && call.job.domain == domain)
            .map(|(attempt, _)| *attempt)
            .collect();
        for attempt in stuck {
            if self.dice.chance(700) {
                let extent = self.options.some_extent(&mut self.dice);
                let call = self.calls.get_mut(&attempt).expect("just listed");
                call.answer = Some(Error::of_errno(108, "model", "fenced off"));
                if call.done.is_none() {
                    call.extent = extent;
                }
                self.plan(30, Happening::CallEnds(attempt));
            }
        }
    }

    fn turn(&mut self, domain: &str, mood: Mood) {
        self.moods.insert(domain.to_owned(), mood);
        if mood == Mood::Hanging {
            return;
        }
        // What hung with the backend comes back when it answers again.
        let hung: Vec<u64> = self
            .calls
            .iter()
            .filter(|(_, call)| call.hangs && call.job.domain == domain)
            .map(|(attempt, _)| *attempt)
            .collect();
        for attempt in hung {
            if self.healed || self.dice.chance(900) {
                let after = self.dice.between(1, 200);
                self.plan(after, Happening::CallEnds(attempt));
            }
        }
    }

    fn probe_ends(&mut self, domain: String) {
        let result = match self.moods[&domain] {
            Mood::Hanging => {
                let asked_in = self.process;
                return self.plan(500, Happening::ProbeEnds { domain, asked_in });
            }
            Mood::Unreachable => Err(Error::of_errno(110, "probe", "no answer")),
            Mood::Well | Mood::Full | Mood::Flaky => {
                Ok([(domain.clone(), format!("root of {domain}"))].into())
            }
        };
        self.inbox.push_back(Event::Probed { domain, result });
    }

    // ---- the end of processes, and of trouble ----

    /// kill -9 and a new start. What was under way happened, or not, or by half; then it is
    /// fenced off.
    fn crash(&mut self) {
        self.crashes += 1;
        for call in std::mem::take(&mut self.calls).into_values() {
            if call.done.is_none() {
                let extent = self.options.some_extent(&mut self.dice);
                let _ = self.disk.act(call.job.step, &call.job.record, extent);
            }
        }
        self.checker.crashed();
        self.boot();
    }

    fn boot(&mut self) {
        self.process += 1;
        self.inbox.clear();
        self.abandoned.clear();
        for (name, bounds) in &self.options.policy.domains {
            for lane in Lane::ALL {
                self.workers
                    .insert((name.clone(), lane), bounds.threads(lane));
            }
        }
        self.held_max = 0;
        self.wake_at = None;
        self.restart_asked = false;
        self.agenda.retain(|_, what| {
            !matches!(
                what,
                Happening::CallEnds(_) | Happening::Deadline(_) | Happening::Wake
            )
        });
        if !self.healed && self.dice.chance(200) {
            self.ahead = self.dice.below(self.options.clock_jump_ms + 1);
        }
        let seed = self.dice.roll();
        self.sched = Sched::new(self.options.policy.clone(), seed);
        let mut counts = BTreeMap::new();
        for record in self.store.values() {
            *counts.entry((record.id.kind(), record.phase)).or_default() += 1;
        }
        let records = self
            .store
            .values()
            .filter(|record| !record.is_settled())
            .cloned()
            .collect();
        let identities = self.identities.clone();
        self.inbox.push_back(Event::Loaded {
            records,
            counts,
            identities,
        });
        self.batch();
    }

    fn heal(&mut self) {
        self.healed = true;
        for domain in self.options.domains().collect::<Vec<_>>() {
            self.turn(&domain, Mood::Well);
        }
        // Calls that hang although all is well do so no longer.
        let hung: Vec<u64> = self.calls.keys().copied().collect();
        for attempt in hung {
            self.plan(100, Happening::CallEnds(attempt));
        }
    }

    fn run_for(&mut self, ms: u64) {
        let end = self.now + ms;
        while self.advance(end) {}
    }

    /// An outage ends: within two minutes everything that only waited for that has gone on.
    fn check_prompt(&mut self) {
        self.run_for(120_000);
        for record in self.store.values() {
            let under_way = matches!(
                record.phase,
                Phase::Pending | Phase::Creating | Phase::Updating | Phase::Deleting
            );
            let excused = record.waits > 0 || record.attempts > 0 || record.hangs > 0;
            let waits_for_other = record.source().is_some() || record.id.kind() == "snapshot";
            let waits = record.wish == Wish::Absent || waits_for_other;
            assert!(
                !under_way || excused || waits,
                "all is well for two minutes, and this waits: {record:?}"
            );
        }
    }

    fn send(&mut self, request: Request) {
        let ticket = self.steps;
        let (request, rows) = (Box::new(request), Vec::new());
        self.inbox.push_back(Event::Request {
            ticket,
            request,
            rows,
        });
    }

    /// All wishes must be met within a budget; what was given up is asked for again, twice.
    fn settle_all(&mut self) {
        for round in 0..24 {
            self.run_for(30 * 60_000);
            let failed: Vec<Record> = self
                .store
                .values()
                .filter(|r| r.phase == Phase::Failed)
                .cloned()
                .collect();
            for record in &failed {
                let (object, uid) = (named(record), Some(record.id.uid()));
                self.send(if round < 2 {
                    Request::Retry { object, uid }
                } else {
                    Request::Delete { object, uid }
                });
            }
            if failed.is_empty() && self.is_quiet() && round > 4 {
                break;
            }
        }
        self.checker.at_rest(&self.store, &self.disk);
        let view = self.sched.view();
        assert!(
            view.lanes
                .iter()
                .all(|lane| lane.backlog == 0 && lane.held == 0),
            "{view:?}"
        );
        assert!(
            view.lanes.iter().all(|lane| lane.breaker == "closed"),
            "{view:?}"
        );
        let mut counts = BTreeMap::new();
        for record in self.store.values() {
            *counts
                .entry((record.id.kind(), record.phase))
                .or_insert(0u64) += 1;
        }
        let shown: BTreeMap<_, _> = view.counts.into_iter().filter(|(_, n)| *n > 0).collect();
        assert_eq!(shown, counts, "the counts are off");
    }

    fn is_quiet(&self) -> bool {
        self.calls.is_empty()
            && self.inbox.is_empty()
            && self
                .store
                .values()
                .all(|r| r.is_settled() || r.phase == Phase::Trashed)
    }

    fn delete_some(&mut self) {
        for record in self.store.values().cloned().collect::<Vec<_>>() {
            if record.phase == Phase::Ready && self.dice.chance(700) {
                let (object, uid) = (named(&record), Some(record.id.uid()));
                self.send(Request::Delete { object, uid });
            }
        }
    }

    // ---- clients ----

    fn new_uid(&mut self) -> Uid {
        self.uids += 1;
        Uid(self.uids)
    }

    fn some_name(&mut self, kind: &str) -> Name {
        let n = self.dice.below(self.options.names);
        format!("{kind}{n}").parse().expect("a name")
    }

    fn ask_something(&mut self) {
        let request = match self.dice.below(100) {
            0..35 => self.a_new_volume(),
            35..47 => Request::CreateSnapshot {
                uid: self.new_uid(),
                name: self.some_name("s"),
                volume: self.some_name("v"),
                labels: BTreeMap::new(),
            },
            47..60 => Request::ChangeVolume {
                name: self.some_name("v"),
                uid: None,
                if_generation: None,
                change: VolumeChange {
                    size_bytes: Some(self.dice.between(1, 1000)),
                    ..VolumeChange::default()
                },
            },
            60..76 => Request::Delete {
                object: Named::Volume(self.some_name("v")),
                uid: None,
            },
            76..84 => Request::Delete {
                object: Named::Snapshot(self.some_name("s")),
                uid: None,
            },
            84..90 => Request::Retry {
                object: Named::Volume(self.some_name("v")),
                uid: None,
            },
            90..97 => {
                let Some(uid) = self.some_trash() else { return };
                let name = self.dice.chance(500).then(|| self.some_name("v"));
                Request::Restore { uid, name }
            }
            _ => {
                let Some(uid) = self.some_trash() else { return };
                Request::Purge { uid }
            }
        };
        self.send(request);
    }

    fn some_trash(&mut self) -> Option<Uid> {
        let entries: Vec<Uid> = self
            .store
            .values()
            .filter(|r| r.phase.is_trash())
            .map(|r| r.id.uid())
            .collect();
        if entries.is_empty() {
            None
        } else {
            Some(*self.dice.pick(&entries))
        }
    }

    fn a_new_volume(&mut self) -> Request {
        let source = match self.dice.below(10) {
            0..5 => None,
            5..7 => Some(SourceWish::Snapshot(self.some_name("s"))),
            _ => Some(SourceWish::Volume(self.some_name("v"))),
        };
        let encryption = (source.is_none() && self.dice.chance(100)).then(|| "key".to_owned());
        let names: Vec<String> = self.options.domains().collect();
        Request::CreateVolume(Box::new(NewVolume {
            uid: self.new_uid(),
            name: self.some_name("v"),
            size_bytes: source.is_none().then(|| self.dice.between(1, 500)),
            class: source.is_none().then(|| self.dice.pick(&names).clone()),
            source,
            qos: None,
            encryption,
            labels: BTreeMap::new(),
            request: self.dice.below(2).to_string(),
        }))
    }
}

fn named(record: &Record) -> Named {
    match record.id {
        ObjectId::Volume(_) => Named::Volume(record.name.clone()),
        ObjectId::Snapshot(_) => Named::Snapshot(record.name.clone()),
    }
}

/// Every step of an object that the world must have seen, over many seeds.
pub const STEPS: [Step; 10] = [
    Step::Create,
    Step::Update,
    Step::Encrypt,
    Step::Snapshot,
    Step::Restore,
    Step::Inspect,
    Step::Trash,
    Step::RemoveSnapshot,
    Step::Flatten,
    Step::Reclaim,
];
