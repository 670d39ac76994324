//! For the tests: a storage whose every call does what the test says, and pools over it with a
//! clock and a watchdog that the test moves by hand. So nothing depends on how fast anything runs.

use crate::backend::{self, Backend, Caps, Ctl, Error, Found, Marked, Outcome, Reclaimed};
use crate::backend::{Retired, Session, SnapshotState, Unwatched, VolumeState};
use crate::clock::Clock;
use crate::model::{
    Body, ErrorKind, Lane, Millis, Name, ObjectId, Place, Record, SnapshotBody, Step, Uid,
};
use crate::pool::{DomainLayout, Job, Layout, Pools, Report, Spawner, system_spawner};
use crate::slot::{Deadline, Plan};
use crate::watchdog::Watch;
use crossbeam::channel::{Receiver, Sender, bounded};
use std::collections::BTreeMap;
use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// How long a test waits for what must come before it fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a call is told to do.
pub enum Act {
    Return,
    Fail(Error),
    Panic,
    /// Report progress, and tell the test whether to go on.
    Progress(u64),
    /// Wait for the cancel flag, then end as a good backend does.
    ObeyCancel,
}

/// A call that a thread is inside of. Dropped, it fails.
pub struct Call {
    pub step: Step,
    acts: Sender<Act>,
    goes_on: Receiver<bool>,
}

impl Call {
    pub fn act(&self, act: Act) {
        self.acts.send(act).expect("the call is under way");
    }

    /// True if the call shall go on.
    pub fn progress(&self, done: u64) -> bool {
        self.act(Act::Progress(done));
        self.goes_on.recv_timeout(PATIENCE).expect("an answer")
    }
}

/// The storage.
pub struct Puppet {
    calls: Sender<Call>,
    pub acts_on_connect: AtomicBool,
    pub acts_on_close: Arc<AtomicBool>,
    pub retired: AtomicUsize,
    pub recovered: AtomicUsize,
}

impl Puppet {
    fn play(calls: &Sender<Call>, step: Step, ctl: &dyn Ctl) -> backend::Result<()> {
        let (acts, told) = bounded(1_024);
        let (answer, goes_on) = bounded(1_024);
        let call = Call {
            step,
            acts,
            goes_on,
        };
        let gone = || Error::new(ErrorKind::Transient, "puppet", "the test is over");
        calls.send(call).map_err(|_| gone())?;
        loop {
            match told.recv().map_err(|_| gone())? {
                Act::Return => return Ok(()),
                Act::Fail(error) => return Err(error),
                Act::Panic => panic!("the library lost its mind"),
                Act::Progress(done) => {
                    let goes_on = ctl.progress(done, 100) == ControlFlow::Continue(());
                    answer.send(goes_on).map_err(|_| gone())?;
                }
                Act::ObeyCancel => {
                    while !ctl.cancelled() {
                        std::thread::yield_now();
                    }
                    return Err(Error::new(ErrorKind::Cancelled, "puppet", "as asked"));
                }
            }
        }
    }
}

impl Backend for Puppet {
    fn caps(&self) -> Caps {
        Caps::default()
    }

    fn connect(&self, _: &str, _: Lane, ctl: &dyn Ctl) -> backend::Result<Box<dyn Session>> {
        if self.acts_on_connect.load(Ordering::SeqCst) {
            Puppet::play(&self.calls, Step::Connect, ctl)?;
        }
        Ok(Box::new(Line {
            calls: self.calls.clone(),
            acts_on_close: Arc::clone(&self.acts_on_close),
        }))
    }

    fn recover_abandoned(&self, _: &str) -> backend::Result<usize> {
        self.recovered.fetch_add(1, Ordering::SeqCst);
        Ok(0)
    }

    fn retire(&self, _: &str, _: Lane) {
        self.retired.fetch_add(1, Ordering::SeqCst);
        panic!("not even this may end the watchdog");
    }
}

struct Line {
    calls: Sender<Call>,
    acts_on_close: Arc<AtomicBool>,
}

impl Drop for Line {
    fn drop(&mut self) {
        if self.acts_on_close.load(Ordering::SeqCst) {
            // However it ends, it ends.
            let _closed = Puppet::play(&self.calls, Step::Connect, &Unwatched);
        }
    }
}

impl Line {
    fn play(&self, step: Step, ctl: &dyn Ctl) -> backend::Result<()> {
        Puppet::play(&self.calls, step, ctl)
    }
}

impl Session for Line {
    fn ensure_volume(
        &mut self,
        step: Step,
        _: &Record,
        ctl: &dyn Ctl,
    ) -> backend::Result<VolumeState> {
        self.play(step, ctl).map(|()| VolumeState::default())
    }

    fn ensure_snapshot(&mut self, _: &Record, ctl: &dyn Ctl) -> backend::Result<SnapshotState> {
        self.play(Step::Snapshot, ctl)
            .map(|()| SnapshotState::default())
    }

    fn retire_volume(&mut self, _: &Record, ctl: &dyn Ctl) -> backend::Result<Retired> {
        self.play(Step::Trash, ctl).map(|()| Retired::Gone)
    }

    fn retire_snapshot(&mut self, _: &Record, ctl: &dyn Ctl) -> backend::Result<Retired> {
        self.play(Step::RemoveSnapshot, ctl).map(|()| Retired::Gone)
    }

    fn reclaim(&mut self, _: &Record, ctl: &dyn Ctl) -> backend::Result<Reclaimed> {
        self.play(Step::Reclaim, ctl).map(|()| Reclaimed::Done)
    }

    fn restore(&mut self, _: &Record, ctl: &dyn Ctl) -> backend::Result<VolumeState> {
        self.play(Step::Restore, ctl)
            .map(|()| VolumeState::default())
    }

    fn flatten(&mut self, _: &Record, ctl: &dyn Ctl) -> backend::Result<VolumeState> {
        self.play(Step::Flatten, ctl)
            .map(|()| VolumeState::default())
    }

    fn inspect(&mut self, _: &Record, ctl: &dyn Ctl) -> backend::Result<Option<Found>> {
        self.play(Step::Inspect, ctl).map(|()| None)
    }

    fn probe(&mut self, ctl: &dyn Ctl) -> backend::Result<BTreeMap<String, String>> {
        Puppet::play(&self.calls, Step::Probe, ctl).map(|()| BTreeMap::new())
    }

    fn survey(&mut self, _: &dyn Ctl) -> backend::Result<Vec<Marked>> {
        Ok(Vec::new())
    }
}

fn record(n: u64) -> Record {
    let name: Name = "db".parse().expect("a name");
    let place = Place {
        class: "fast".to_owned(),
        domain: "a".to_owned(),
        root: "pool".to_owned(),
        data_pool: None,
        namespace: None,
        identity: None,
    };
    let body = Body::Snapshot(SnapshotBody {
        volume: name.clone(),
        size_bytes: None,
        depth: 0,
    });
    let id = ObjectId::Snapshot(Uid::new(1, u128::from(n)));
    Record::accepted(id, name, place, body, Millis(0))
}

pub fn domain(name: &str, threads: usize, abandoned_max: usize) -> DomainLayout {
    DomainLayout {
        domain: Arc::from(name),
        create_threads: threads,
        delete_threads: threads,
        create_abandoned_max: abandoned_max,
        delete_abandoned_max: abandoned_max,
    }
}

/// Everything that a test needs.
pub struct Stage {
    pub puppet: Arc<Puppet>,
    pub pools: Pools,
    pub clock: Clock,
    pub reports: Receiver<Report>,
    /// While set, the system has no threads.
    pub dry: Arc<AtomicBool>,
    calls: Receiver<Call>,
    watch: Watch,
    attempts: u64,
}

/// The deadline of a job: 1 s, of its connect: 300 ms.
pub const DEADLINE_MS: u64 = 1_000;
pub const CONNECT_MS: u64 = 300;

impl Stage {
    /// Pools for these domains, with `room` places for reports.
    pub fn new(domains: Vec<DomainLayout>, room: usize) -> Stage {
        let (calls_in, calls) = bounded(1_024);
        let puppet = Arc::new(Puppet {
            calls: calls_in,
            acts_on_connect: AtomicBool::new(false),
            acts_on_close: Arc::default(),
            retired: AtomicUsize::new(0),
            recovered: AtomicUsize::new(0),
        });
        let clock = Clock::manual();
        let dry = Arc::new(AtomicBool::new(false));
        let (report, reports) = bounded(room);
        let plan = Plan {
            deadline: Deadline::whole(CONNECT_MS),
            cancel_grace_ms: 0,
        };
        let layout = Layout {
            domains,
            threads_max: 64,
            stack_bytes: 256 << 10,
            connect: plan,
        };
        let pools = Pools::start(
            Arc::clone(&puppet) as Arc<dyn Backend>,
            &layout,
            clock.clone(),
            spawner(&dry),
            report,
        )
        .expect("pools");
        let watch = Watch::new(Arc::clone(&pools.shared));
        Stage {
            puppet,
            pools,
            clock,
            reports,
            dry,
            calls,
            watch,
            attempts: 0,
        }
    }

    pub fn job(&mut self, step: Step, lane: Lane, deadline: Deadline) -> Job {
        self.attempts += 1;
        let record = record(self.attempts);
        Job {
            object: record.id,
            title: format!("job {}", self.attempts),
            attempt: self.attempts,
            step,
            record: Arc::new(record),
            deadline,
            cancel_grace_ms: 100,
            domain: Arc::from("a"),
            lane,
        }
    }

    /// Dispatches a create of domain `a` with a deadline of 1 s; gives the attempt.
    pub fn send(&mut self) -> u64 {
        let job = self.job(Step::Create, Lane::Create, Deadline::whole(DEADLINE_MS));
        let attempt = job.attempt;
        self.pools.dispatch(job).expect("a free worker");
        attempt
    }

    /// The next call that a thread enters.
    pub fn call(&self) -> Call {
        self.calls.recv_timeout(PATIENCE).expect("a call")
    }

    pub fn no_call(&self) -> bool {
        self.calls.is_empty()
    }

    /// Sends a create and waits until it is inside the storage.
    pub fn enter(&mut self) -> (u64, Call) {
        let attempt = self.send();
        (attempt, self.call())
    }

    /// Moves the clock and lets the watchdog look.
    pub fn pass(&mut self, ms: u64) -> Option<u64> {
        self.clock.advance(ms);
        let now_ms = self.clock.now_ms();
        // The time was passed on purpose: it isn't a pause of the process.
        self.watch.planned_ms = None;
        self.watch.look(now_ms)
    }

    /// The same after a pause of the process, that the watchdog wanted to wake up in.
    pub fn stand_still(&mut self, ms: u64) {
        self.watch.planned_ms = Some(self.clock.now_ms());
        self.clock.advance(ms);
        let now_ms = self.clock.now_ms();
        self.watch.look(now_ms);
    }

    /// The next report.
    pub fn report(&self) -> Report {
        self.reports.recv_timeout(PATIENCE).expect("a report")
    }

    /// The reports that are there, as one word each.
    pub fn told(&self) -> Vec<String> {
        self.reports
            .try_iter()
            .map(|report| word(&report))
            .collect()
    }

    /// Waits until something has come about that no report tells of.
    pub fn until(&self, what: impl Fn(&Pools) -> bool) {
        let begun = std::time::Instant::now();
        while !what(&self.pools) {
            assert!(begun.elapsed() < PATIENCE, "it didn't come about");
            std::thread::yield_now();
        }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.pools.shutdown();
    }
}

/// What matters of a report in one word.
pub fn word(report: &Report) -> String {
    let outcome = |result: &backend::Result<Outcome>| match result {
        Ok(_) => "ok".to_owned(),
        Err(error) => format!("{:?}", error.kind),
    };
    match report {
        Report::Finished { about, result, .. } => {
            format!("finished {} {}", about.attempt, outcome(result))
        }
        Report::Abandoned { about, .. } => format!("abandoned {}", about.attempt),
        Report::LateReturn { about, result, .. } => {
            format!("late {} {}", about.attempt, outcome(result))
        }
        Report::Probed { result, .. } => format!("probed {}", result.is_ok()),
        Report::LaneChanged { lane, workers, .. } => format!("{} {workers}", lane.as_str()),
        Report::SpawnFailed { .. } => "no thread".to_owned(),
    }
}

fn spawner(dry: &Arc<AtomicBool>) -> Spawner {
    let (dry, system) = (Arc::clone(dry), system_spawner());
    Arc::new(move |name, stack_bytes, body| {
        if dry.load(Ordering::SeqCst) {
            return Err(io::Error::from_raw_os_error(11));
        }
        system(name, stack_bytes, body)
    })
}
