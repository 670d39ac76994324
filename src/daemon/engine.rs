//! The loop: batch → step → commit → act.

use crate::config::Config;
use crate::http::park::Key;
use crate::hub::ledger::Call;
use crate::hub::{Answer, Ask, Hub, Unavailable, Word};
use crate::model::{Millis, ObjectId, Record};
use crate::pool::{Job, ProbeJob, Report};
use crate::sched::{Command, Dispatch, Event, Lookup, Sched, Ticket};
use crate::slot::Deadline;
use crate::store::{Store, StoreError};
use crossbeam::channel::{Receiver, Select};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Most events of one batch.
const BATCH: usize = 512;
/// The loop beats at least this often.
const BEAT_MS: u64 = 1_000;
/// The view of the others is at most this old while things happen.
const VIEW_MS: u64 = 50;
/// How long a failing store is left alone.
const STORE_PAUSE_MS: u64 = 500;
/// How often old events are trimmed, and how many batches of that at most.
const TRIM_MS: u64 = 10_000;
/// Children of an image that a blocked reclaim asks about.
const CHILDREN_MAX: usize = 100;

/// Why the loop ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// Everything that could finish did, or the patience was over; what still hangs.
    Drained(Vec<String>),
    /// Only a new process helps.
    Restart(String),
}

/// The ways in.
pub struct Inlets {
    pub asks: Receiver<Ask>,
    pub words: Receiver<Word>,
    pub reports: Receiver<Report>,
}

pub struct Engine {
    hub: Hub,
    store: Store,
    sched: Sched,
    inlets: Inlets,
    /// Results that could not be committed yet; they go first.
    kept: VecDeque<Event>,
    calls: Vec<Call>,
    replies: BTreeMap<Ticket, Box<dyn FnOnce(Answer) + Send>>,
    tickets: Ticket,
    wake_at: Option<Millis>,
    store_pause_until: Option<u64>,
    shown_ms: u64,
    show: bool,
    trim_ms: u64,
    deadlines: crate::config::Deadlines,
    end: Option<End>,
    drain_until: Option<u64>,
}

impl Engine {
    pub fn new(hub: Hub, store: Store, sched: Sched, inlets: Inlets) -> Engine {
        let deadlines = hub.config().deadlines;
        Engine {
            hub,
            store,
            sched,
            inlets,
            kept: VecDeque::new(),
            calls: Vec::new(),
            replies: BTreeMap::new(),
            tickets: 0,
            wake_at: None,
            store_pause_until: None,
            shown_ms: 0,
            show: true,
            trim_ms: 0,
            deadlines,
            end: None,
            drain_until: None,
        }
    }

    /// Runs until it ends in order; then store and lock are closed.
    pub fn run(mut self, loaded: Event, beats: &crate::heartbeat::Heartbeats) -> End {
        self.batch(vec![loaded]);
        while self.end.is_none() {
            beats.loop_beat(self.now_ms());
            let events = self.gather();
            if !events.is_empty() || !self.kept.is_empty() || !self.calls.is_empty() {
                self.batch(events);
            }
            self.tidy();
        }
        self.end
            .unwrap_or_else(|| unreachable!("the loop ends with an end"))
    }

    fn now_ms(&self) -> u64 {
        self.hub.parts().clock.now_ms()
    }

    fn now(&self) -> Millis {
        self.hub.now()
    }

    /// Waits for something to happen, and takes what has happened.
    fn gather(&mut self) -> Vec<Event> {
        let now = self.now();
        let mut wait = BEAT_MS;
        if let Some(at) = self.wake_at {
            wait = wait.min(at.since(now));
        }
        if self.show {
            wait = wait.min((self.shown_ms + VIEW_MS).saturating_sub(self.now_ms()));
        }
        if !self.kept.is_empty() || !self.calls.is_empty() {
            let pause = self.store_pause_until.unwrap_or(0);
            wait = wait.min(pause.saturating_sub(self.now_ms()));
        }
        if let Some(until) = self.drain_until {
            wait = wait.min(until.saturating_sub(self.now_ms()));
        }
        self.wait_for_any(Duration::from_millis(wait));
        self.take_all()
    }

    fn wait_for_any(&self, wait: Duration) {
        let mut select = Select::new();
        select.recv(&self.inlets.reports);
        select.recv(&self.inlets.words);
        // A store that can't be written is left alone: requests wait a moment, and the channel
        // refuses what is too much.
        select.recv(&self.inlets.asks);
        // Whether something is ready or the time is up: everything is looked at afterwards.
        let _ready = select.ready_timeout(wait);
    }

    fn take_all(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        while events.len() < BATCH
            && let Ok(report) = self.inlets.reports.try_recv()
        {
            events.extend(self.event_of(report));
        }
        while let Ok(word) = self.inlets.words.try_recv() {
            self.word(word, &mut events);
        }
        let now = self.now();
        if self.wake_at.is_some_and(|at| at <= now) {
            self.wake_at = None;
            events.push(Event::Tick {
                progress: self.progress(),
            });
        }
        while events.len() < BATCH
            && let Ok(ask) = self.inlets.asks.try_recv()
        {
            self.tickets += 1;
            let ticket = self.tickets;
            self.replies.insert(ticket, ask.reply);
            let (request, rows) = (Box::new(ask.request), Vec::new());
            events.push(Event::Request {
                ticket,
                request,
                rows,
            });
        }
        events
    }

    fn progress(&self) -> BTreeMap<u64, Millis> {
        let running = self.hub.parts().pools.running();
        running
            .into_iter()
            .map(|run| (run.about.attempt, self.in_our_time(run.progress_at)))
            .collect()
    }

    /// A time of the wall clock, as the scheduler counts: that clock may have been set since.
    fn in_our_time(&self, at: Millis) -> Millis {
        let ago_ms = self.hub.parts().clock.wall().since(at);
        Millis(self.now().0.saturating_sub(ago_ms))
    }

    fn event_of(&self, report: Report) -> Option<Event> {
        let rows = Vec::new();
        let at = |started_ms: u64| self.hub.parts().began_at.plus(started_ms);
        self.hub.parts().metrics.reported(&report);
        Some(match report {
            Report::Finished { about, result, .. } => Event::Finished {
                attempt: about.attempt,
                object: about.object,
                result,
                rows,
            },
            Report::LateReturn { about, result, .. } => Event::LateReturn {
                attempt: about.attempt,
                object: about.object,
                result,
                rows,
            },
            Report::Abandoned {
                about,
                ran_ms,
                deadline_ms,
                ..
            } => Event::Abandoned {
                attempt: about.attempt,
                object: about.object,
                started_at: at(about.started_ms),
                at: at(about.started_ms + ran_ms),
                deadline_ms,
                step: about.doing(),
            },
            Report::Probed { domain, result, .. } => Event::Probed {
                domain: domain.to_string(),
                result,
            },
            Report::LaneChanged {
                domain,
                lane,
                workers,
            } => Event::LaneChanged {
                domain: domain.to_string(),
                lane,
                workers,
            },
            Report::SpawnFailed {
                domain,
                lane,
                cause,
                ..
            } => {
                log::warn!(
                    "domain={domain} lane={} no worker could be started: {cause}",
                    lane.as_str()
                );
                return None;
            }
        })
    }

    fn word(&mut self, word: Word, events: &mut Vec<Event>) {
        match word {
            Word::Reload(config) => self.reload(*config, events),
            Word::Drain => {
                self.hub.drain();
                let grace = self.hub.config().shutdown_grace_ms;
                self.drain_until.get_or_insert(self.now_ms() + grace);
                events.push(Event::Drain);
            }
            Word::Session(call) => self.calls.push(call),
        }
    }

    fn reload(&mut self, new: Config, events: &mut Vec<Event>) {
        let old = self.hub.config();
        let (applies, needs_restart) = old.live_changes(&new);
        let config = old.with_live(&new);
        for (name, bounds) in &super::backends::policy(&config, &self.hub).domains {
            for lane in crate::model::Lane::ALL {
                let (threads, max) = (bounds.threads(lane), bounds.abandoned_max(lane));
                if let Err(error) = self.hub.parts().pools.resize(name, lane, threads, max) {
                    log::error!("lanes.{} stays as it was: {error}", lane.as_str());
                }
            }
        }
        log::set_max_level(config.log_level);
        self.deadlines = config.deadlines;
        let policy = super::backends::policy(&config, &self.hub);
        events.push(Event::ConfigChanged(Box::new(policy)));
        log::info!(
            "configuration read again: changed [{}], waiting for a restart [{}]",
            applies.join(", "),
            needs_restart.join(", ")
        );
        self.hub.configure(config, needs_restart);
    }

    /// One transaction.
    fn batch(&mut self, fresh: Vec<Event>) {
        let events: Vec<Event> = self.kept.drain(..).chain(fresh).collect();
        let calls = std::mem::take(&mut self.calls);
        let mut open = Open::default();
        let begun = self.store.begin();
        let stepped = match begun {
            Ok(()) => self.step_all(&events, &mut open),
            Err(error) => Err(error),
        };
        let answers: Vec<_> = match &stepped {
            Ok(()) => calls
                .iter()
                .map(|call| call.wish.apply(&mut self.store))
                .collect(),
            Err(_) => Vec::new(),
        };
        let started_ms = std::time::Instant::now();
        let done = match stepped {
            Ok(()) => self.store.commit(),
            Err(error) => {
                if let Err(again) = self.store.rollback() {
                    log::debug!("rollback: {again}");
                }
                Err(error)
            }
        };
        match done {
            Ok(()) => {
                self.hub.parts().metrics.committed(started_ms.elapsed());
                self.sched.committed();
                self.store_recovered();
                for (call, answer) in calls.into_iter().zip(answers) {
                    // A session that no longer waits has given up on its own.
                    let _ = call
                        .answer
                        .try_send(answer.map_err(|error| error.to_string()));
                }
                self.act(open);
            }
            Err(error) => self.not_committed(events, calls, &error),
        }
        self.show = true;
    }

    fn step_all(&mut self, events: &[Event], open: &mut Open) -> Result<(), StoreError> {
        let now = self.now();
        for event in events {
            let mut event = event.clone();
            let rows = self.rows(&event)?;
            if let Event::Request { rows: slot, .. }
            | Event::Finished { rows: slot, .. }
            | Event::LateReturn { rows: slot, .. } = &mut event
            {
                *slot = rows;
            }
            for command in self.sched.step(now, event) {
                self.write(command, open)?;
            }
        }
        Ok(())
    }

    fn rows(&self, event: &Event) -> Result<Vec<Record>, StoreError> {
        let mut rows = Vec::new();
        for lookup in Sched::lookups_of(event) {
            match lookup {
                Lookup::Volume(name) => rows.extend(self.store.volume_named(&name)?),
                Lookup::Snapshot(name) => rows.extend(self.store.snapshot_named(&name)?),
                Lookup::VolumeUid(uid) => rows.extend(self.store.volume(uid)?),
                Lookup::NamesakeOf(uid) => {
                    if let Some(record) = self.store.volume(uid)? {
                        rows.extend(self.store.volume_named(&record.name)?);
                    }
                }
                Lookup::ChildrenOf(uid) => {
                    rows.extend(self.store.children_of(uid, CHILDREN_MAX)?);
                }
            }
        }
        Ok(rows)
    }

    /// Writes go to the transaction; everything else waits for its commit.
    fn write(&mut self, command: Command, open: &mut Open) -> Result<(), StoreError> {
        match command {
            Command::Put(record) => {
                open.changed.insert(Key::Object(record.id.uid().0));
                open.pass(&record);
                self.store.put(&record)
            }
            Command::Remove(id) => {
                open.changed.insert(Key::Object(id.uid().0));
                self.store.remove(id).map(drop)
            }
            Command::Log(entry) => {
                open.changed.insert(Key::Events);
                let seq = self.store.log(&entry)?;
                open.entries.push((seq, entry));
                Ok(())
            }
            Command::Identity { root, identity } => self.store.identity(&root, &identity),
            later => {
                open.later.push(later);
                Ok(())
            }
        }
    }

    fn not_committed(&mut self, events: Vec<Event>, calls: Vec<Call>, error: &StoreError) {
        self.sched.rollback();
        let words = error.to_string();
        if self.hub.store_error().is_none() {
            log::error!("the state can't be written, requests are refused until it can: {words}");
        }
        self.hub.set_store_error(Some(words.clone()));
        self.store_pause_until = Some(self.now_ms() + STORE_PAUSE_MS);
        // Time comes again by itself; results come only once, and are stepped first when the
        // store can be written again. They are bounded by the threads.
        self.wake_at = Some(self.now().plus(STORE_PAUSE_MS));
        for event in events {
            match event {
                Event::Request { ticket, .. } => {
                    if let Some(reply) = self.replies.remove(&ticket) {
                        reply(Err(Unavailable::Store(words.clone())));
                    }
                }
                Event::Tick { .. } => {}
                kept => self.kept.push_back(kept),
            }
        }
        self.calls.extend(calls);
    }

    fn store_recovered(&mut self) {
        self.store_pause_until = None;
        if self.hub.store_error().is_some() {
            log::info!("the state can be written again");
            self.hub.set_store_error(None);
        }
    }

    /// What is done once the batch is durable: one arm per command.
    fn act(&mut self, open: Open) {
        for (seq, entry) in &open.entries {
            let level = if entry.warning {
                log::Level::Warn
            } else {
                log::Level::Info
            };
            let (object, reason, words) = (&entry.object, &entry.reason, &entry.message);
            log::log!(level, "object={object} reason={reason} event={seq} {words}");
            self.hub.parts().metrics.event(reason);
        }
        for command in open.later {
            match command {
                Command::Dispatch(dispatch) => self.dispatch(dispatch),
                Command::Cancel { attempt, .. } => {
                    self.hub.parts().pools.cancel(attempt);
                }
                Command::Probe { domain, recover } => self.probe(&domain, recover),
                Command::Reply { ticket, answer } => {
                    if let Some(reply) = self.replies.remove(&ticket) {
                        reply(Ok(*answer));
                    }
                }
                Command::Restart { why } => {
                    self.hub.want_restart(why.clone());
                    log::error!("restart: {why}");
                    self.end = Some(End::Restart(why));
                }
                Command::WakeAt(at) => {
                    self.wake_at = Some(self.wake_at.map_or(at, |planned| planned.min(at)));
                }
                Command::Put(_)
                | Command::Remove(_)
                | Command::Log(_)
                | Command::Identity { .. } => unreachable!("written before the commit"),
            }
        }
        let changed: Vec<Key> = open.changed.into_iter().collect();
        if !changed.is_empty() {
            self.hub.parts().park.wake(&changed);
        }
    }

    fn dispatch(&mut self, dispatch: Dispatch) {
        let deadline = self.deadlines.of(dispatch.step);
        self.hub.parts().metrics.queued(&dispatch, self.now());
        let job = Job {
            object: dispatch.object,
            title: dispatch.record.title(),
            attempt: dispatch.attempt,
            step: dispatch.step,
            record: Arc::new(*dispatch.record),
            deadline: Deadline {
                stall_ms: deadline.stall_ms,
                total_ms: deadline.total_ms,
            },
            cancel_grace_ms: self.deadlines.cancel_grace_ms,
            domain: Arc::from(dispatch.domain.as_str()),
            lane: dispatch.lane,
        };
        if let Err(job) = self.hub.parts().pools.dispatch(job) {
            // A worker went between two events: nothing was begun, and it goes again.
            let words = "no worker was free after all";
            let error =
                crate::backend::Error::new(crate::model::ErrorKind::SessionLost, "dispatch", words);
            let (attempt, object) = (job.attempt, job.object);
            let result = Err(error.untouched());
            self.kept.push_back(Event::Finished {
                attempt,
                object,
                result,
                rows: Vec::new(),
            });
        }
    }

    fn probe(&mut self, domain: &str, recover: bool) {
        let job = ProbeJob {
            domain: Arc::from(domain),
            attempt: 0,
            recover,
        };
        if self.hub.parts().pools.probe(job).is_err() {
            let words = "the probe thread is busy or could not be started";
            let error =
                crate::backend::Error::new(crate::model::ErrorKind::Transient, "probe", words);
            let (domain, result) = (domain.to_owned(), Err(error));
            self.kept.push_back(Event::Probed { domain, result });
        }
    }

    /// Between two batches: the view of the others, old events, the end of a drain.
    fn tidy(&mut self) {
        let now_ms = self.now_ms();
        if self.show && now_ms >= self.shown_ms + VIEW_MS {
            self.show = false;
            self.shown_ms = now_ms;
            self.hub.show(self.sched.view());
        }
        if now_ms >= self.trim_ms + TRIM_MS && self.store_pause_until.is_none() {
            self.trim_ms = now_ms;
            self.trim();
        }
        self.settle_drain();
    }

    fn trim(&mut self) {
        let events = self.hub.config().events;
        let before = Millis(self.now().0.saturating_sub(events.keep_ms));
        let trimmed = self.store.begin().and_then(|()| {
            let trimmed = self.store.trim_events(events.max, before)?;
            self.store.commit().map(|()| trimmed)
        });
        if let Err(error) = trimmed {
            log::debug!("old events could not be trimmed: {error}");
            if let Err(error) = self.store.rollback() {
                log::debug!("rollback: {error}");
            }
        }
    }

    fn settle_drain(&mut self) {
        let Some(until) = self.drain_until else {
            return;
        };
        if self.end.is_some() {
            return;
        }
        let running = self.hub.parts().pools.running();
        let busy = running.iter().any(|run| !run.abandoned);
        let settled = self.kept.is_empty() && self.inlets.reports.is_empty();
        if (!busy && settled) || self.now_ms() >= until {
            let words = |run: &crate::pool::Running| {
                format!(
                    "{} of {} (attempt {})",
                    run.doing.as_str(),
                    run.title,
                    run.about.attempt
                )
            };
            self.end = Some(End::Drained(running.iter().map(words).collect()));
        }
    }
}

/// A batch under way.
#[derive(Default)]
struct Open {
    changed: BTreeSet<Key>,
    entries: Vec<(u64, crate::model::Entry)>,
    later: Vec<Command>,
}

impl Open {
    /// Snapshots show their children, so those who look at a source look again as well.
    fn pass(&mut self, record: &Record) {
        if let Some(ObjectId::Snapshot(uid)) = record.source().and_then(|source| source.object()) {
            self.changed.insert(Key::Object(uid.0));
        }
    }
}
