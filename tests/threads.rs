//! The real watchdog over real threads and the real clock. What must come is waited for; nothing
//! here judges how fast it came.

use crossbeam::channel::{Receiver, bounded};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use volward::backend::faults::{FaultRules, Faulty, Rule};
use volward::backend::sim::{SimBackend, SimConfig};
use volward::clock::Clock;
use volward::heartbeat::{Health, Heartbeats};
use volward::model::{Body, Lane, Millis, ObjectId, Place, Record, Step, Uid, VolumeBody};
use volward::pool::{DomainLayout, Job, Layout, Pools, Report, reports_capacity, system_spawner};
use volward::slot::{Deadline, Plan};
use volward::watchdog::{Settings, Watchdog};

/// How long a test waits for what must come before it fails.
const PATIENCE: Duration = Duration::from_secs(120);
const LONG_MS: u64 = 600_000;

struct Rig {
    pools: Pools,
    reports: Receiver<Report>,
    faults: FaultRules,
    watchdog: Watchdog,
    health: Health,
    attempts: u64,
}

impl Rig {
    fn new(threads: usize, abandoned_max: usize) -> Rig {
        let sim = SimBackend::new(SimConfig {
            domains: BTreeMap::from([("a".to_owned(), vec!["pool".to_owned()])]),
            instance: "me".to_owned(),
            latency: BTreeMap::new(),
        });
        let faults = FaultRules::new(7);
        let layout = Layout {
            domains: vec![DomainLayout {
                domain: Arc::from("a"),
                create_threads: threads,
                delete_threads: 2,
                create_abandoned_max: abandoned_max,
                delete_abandoned_max: 2,
            }],
            threads_max: 512,
            stack_bytes: 256 << 10,
            connect: Plan {
                deadline: Deadline::whole(LONG_MS),
                cancel_grace_ms: 0,
            },
        };
        let clock = Clock::real();
        let (report, reports) = bounded(reports_capacity(layout.threads_max));
        let backend = Arc::new(Faulty::new(sim, faults.clone()));
        let pools =
            Pools::start(backend, &layout, clock.clone(), system_spawner(), report).expect("pools");
        let beats = Arc::new(Heartbeats::default());
        let settings = Settings {
            heartbeat_max_ms: 60_000,
            beats: Arc::clone(&beats),
            systemd: None,
        };
        let watchdog = Watchdog::start(&pools, settings).expect("a watchdog");
        Rig {
            pools,
            reports,
            faults,
            watchdog,
            health: Health::new(beats, clock, 60_000),
            attempts: 0,
        }
    }

    fn rule(&self, json: &str) {
        let rules: Vec<Rule> = serde_json::from_str(json).expect("rules");
        self.faults.set(rules);
    }

    /// Dispatches a look for a volume of that name.
    fn look(&mut self, name: &str, deadline_ms: u64) -> u64 {
        self.attempts += 1;
        let record = record(self.attempts, name);
        let job = Job {
            object: record.id,
            title: name.to_owned(),
            attempt: self.attempts,
            step: Step::Inspect,
            record: Arc::new(record),
            deadline: Deadline::whole(deadline_ms),
            cancel_grace_ms: 0,
            domain: Arc::from("a"),
            lane: Lane::Create,
        };
        self.until(|pools| pools.free("a", Lane::Create) > 0);
        self.pools.dispatch(job).expect("a free worker");
        self.attempts
    }

    /// The next report of an attempt.
    fn report(&self) -> Report {
        loop {
            let report = self.reports.recv_timeout(PATIENCE).expect("a report");
            if !matches!(report, Report::LaneChanged { .. }) {
                return report;
            }
        }
    }

    fn until(&self, what: impl Fn(&Pools) -> bool) {
        let begun = Instant::now();
        while !what(&self.pools) {
            assert!(begun.elapsed() < PATIENCE, "it didn't come about");
            std::thread::yield_now();
        }
    }

    fn end(self) {
        self.faults.clear();
        self.pools.shutdown();
        self.until(|pools| pools.threads() == 0);
        self.watchdog.stop();
        assert!(!self.health.vitals().watchdog_alive, "it has ended");
    }
}

fn record(n: u64, name: &str) -> Record {
    let place = Place {
        class: "fast".to_owned(),
        domain: "a".to_owned(),
        root: "pool".to_owned(),
        data_pool: None,
        namespace: None,
        identity: None,
    };
    let body = Body::Volume(Box::new(VolumeBody::of_size(4096, String::new())));
    let id = ObjectId::Volume(Uid::new(1, u128::from(n)));
    Record::accepted(id, name.parse().expect("a name"), place, body, Millis(0))
}

#[test]
fn hung_attempts_are_replaced_and_return_late_once_while_others_go_on() {
    const HUNG: u64 = 100;
    let mut rig = Rig::new(2, 128);
    rig.rule(r#"[{"step":"inspect","name":"hung-*","action":"hang"}]"#);
    let mut lateness = Vec::new();
    for n in 0..HUNG {
        let hung = rig.look(&format!("hung-{n}"), 20);
        let fine = rig.look("fine", LONG_MS);
        for _ in 0..2 {
            match rig.report() {
                Report::Abandoned { about, late_ms, .. } => {
                    assert_eq!(about.attempt, hung);
                    lateness.push(late_ms);
                }
                Report::Finished { about, result, .. } => {
                    assert_eq!(about.attempt, fine);
                    assert!(result.is_ok(), "{result:?}");
                }
                other => panic!("{other:?}"),
            }
        }
    }
    assert!(rig.health.vitals().watchdog_alive);
    lateness.sort_unstable();
    println!(
        "abandoned {} attempts; behind their deadline: p50 {} ms, p99 {} ms, worst {} ms",
        lateness.len(),
        lateness[lateness.len() / 2],
        lateness[lateness.len() * 99 / 100],
        lateness[lateness.len() - 1],
    );
    assert_eq!(rig.pools.counts("a", Lane::Create).abandoned, 100);
    rig.faults.clear();
    let mut late = Vec::new();
    for _ in 0..HUNG {
        match rig.report() {
            Report::LateReturn { about, .. } => late.push(about.attempt),
            other => panic!("{other:?}"),
        }
    }
    late.sort_unstable();
    late.dedup();
    assert_eq!(late.len(), 100, "each of them once");
    rig.until(|pools| pools.threads() == 2 + 2 + 1);
    rig.end();
}

/// Attempt → how it ended.
type Ends = BTreeMap<u64, Vec<&'static str>>;

fn note(ends: &mut Ends, report: Report) {
    let (about, end) = match report {
        Report::Finished { about, .. } => (about, "finished"),
        Report::Abandoned { about, .. } => (about, "abandoned"),
        Report::LateReturn { about, .. } => (about, "late"),
        _ => return,
    };
    ends.entry(about.attempt).or_default().push(end);
}

#[test]
fn every_attempt_that_ends_at_its_deadline_has_one_owner() {
    const ATTEMPTS: u64 = 1_000;
    let mut rig = Rig::new(4, 64);
    rig.rule(r#"[{"step":"inspect","action":"delay","for":"3ms"}]"#);
    let mut ends = Ends::new();
    for _ in 0..ATTEMPTS {
        rig.look("racer", 3);
        for report in rig.reports.try_iter() {
            note(&mut ends, report);
        }
    }
    // Nothing runs any more. One more job, and then all threads end: no report is still to come.
    rig.until(|pools| {
        let counts = pools.counts("a", Lane::Create);
        counts.busy == 0 && counts.abandoned == 0
    });
    rig.faults.clear();
    let last = rig.look("last", LONG_MS);
    while !matches!(&ends.get(&last), Some(end) if !end.is_empty()) {
        note(
            &mut ends,
            rig.reports.recv_timeout(PATIENCE).expect("a report"),
        );
    }
    rig.pools.shutdown();
    rig.until(|pools| pools.threads() == 0);
    for report in rig.reports.try_iter() {
        note(&mut ends, report);
    }
    let abandoned = ends.values().filter(|end| end.len() == 2).count();
    println!("{abandoned} of {ATTEMPTS} were abandoned");
    assert_eq!(ends.len() as u64, ATTEMPTS + 1, "none without an end");
    for (attempt, end) in ends {
        assert!(
            end == ["finished"] || end == ["abandoned", "late"],
            "attempt {attempt}: {end:?}"
        );
    }
    rig.end();
}

#[test]
fn a_watchdog_without_work_does_not_tick() {
    let mut rig = Rig::new(2, 2);
    for _ in 0..10 {
        rig.look("fine", LONG_MS);
        assert!(matches!(rig.report(), Report::Finished { .. }));
    }
    // It may still wake for what it saw running; then it must find a second without a tick, and a
    // watchdog that polls never does.
    let quiet = (0..30).any(|_| {
        let before = rig.watchdog.ticks();
        assert!(
            rig.reports
                .recv_timeout(Duration::from_millis(1_200))
                .is_err()
        );
        rig.watchdog.ticks() == before
    });
    assert!(quiet, "it polls");
    assert!(rig.health.vitals().watchdog_alive, "asleep isn't dead");
    rig.end();
}
