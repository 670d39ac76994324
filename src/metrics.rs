//! What is counted and measured, for Prometheus. Gauges are filled when somebody asks.

use crate::backend::Outcome;
use crate::model::Millis;
use crate::pool::Report;
use crate::sched::Dispatch;
use prometheus::{
    GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGaugeVec, Opts,
    Registry, TextEncoder,
};
use std::sync::Arc;
use std::time::Duration;

/// Seconds from a millisecond to half an hour.
const BUCKETS_S: [f64; 14] = [
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 2.5, 10.0, 30.0, 120.0, 600.0, 1800.0,
];

/// All metrics. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Metrics(Arc<All>);

#[derive(Debug)]
struct All {
    registry: Registry,
    operations: IntCounterVec,
    operation_seconds: HistogramVec,
    queue_seconds: HistogramVec,
    abandoned_total: IntCounterVec,
    late_returns: IntCounterVec,
    commit_seconds: Histogram,
    events: IntCounterVec,
    requests: IntCounterVec,
    recovered: IntCounter,
    gauges: Gauges,
}

/// What is read off when somebody asks.
#[derive(Debug)]
pub struct Gauges {
    /// `volward_backlog{lane,domain}`
    pub backlog: IntGaugeVec,
    /// `volward_workers{lane,domain,state}`
    pub workers: IntGaugeVec,
    /// `volward_abandoned_threads{lane,domain}`
    pub abandoned: IntGaugeVec,
    /// `volward_breaker_state{lane,domain}`: 0 closed, 1 half-open, 2 open.
    pub breaker: IntGaugeVec,
    /// `volward_objects{kind,phase}`
    pub objects: IntGaugeVec,
    /// `volward_oldest_pending_seconds{lane,domain}`
    pub oldest: GaugeVec,
    /// `volward_heartbeat_age_seconds{thread}`
    pub heartbeat: GaugeVec,
    /// `volward_store_writable`: 1 or 0.
    pub store_writable: IntGaugeVec,
    /// `volward_abandoned_threads_max{lane,domain}`
    pub abandoned_max: IntGaugeVec,
    /// `volward_backlog_max{lane,domain}`
    pub backlog_max: IntGaugeVec,
    /// `volward_domain_reached{domain}`: 1 or 0.
    pub domain_reached: IntGaugeVec,
    /// `volward_domain_full{domain}`: 1 or 0.
    pub domain_full: IntGaugeVec,
    /// `volward_drill`: 1 or 0.
    pub drill: IntGaugeVec,
    /// `volward_start_time_seconds`: since the Unix epoch.
    pub started: IntGaugeVec,
}

/// Reasons that alerts count: they are there from the start, so that the first one is an increase.
const ALARMING: [&str; 6] = [
    "Failed",
    "HotLoop",
    "Hung",
    "NoSpace",
    "Restarting",
    "Stuck",
];

fn name(of: &str) -> String {
    format!("volward_{of}")
}

fn counter(registry: &Registry, what: &str, help: &str, labels: &[&str]) -> IntCounterVec {
    let made = IntCounterVec::new(Opts::new(name(what), help), labels);
    registered(registry, made)
}

fn gauge(registry: &Registry, what: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
    registered(
        registry,
        IntGaugeVec::new(Opts::new(name(what), help), labels),
    )
}

fn histogram(registry: &Registry, what: &str, help: &str, labels: &[&str]) -> HistogramVec {
    let options = HistogramOpts::new(name(what), help).buckets(BUCKETS_S.to_vec());
    registered(registry, HistogramVec::new(options, labels))
}

/// The names above are ours, valid and distinct.
fn registered<T: prometheus::core::Collector + Clone + 'static>(
    registry: &Registry,
    made: prometheus::Result<T>,
) -> T {
    let metric = made.unwrap_or_else(|error| unreachable!("a metric of ours: {error}"));
    let put = registry.register(Box::new(metric.clone()));
    put.unwrap_or_else(|error| unreachable!("a metric of ours: {error}"));
    metric
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics::new()
    }
}

impl Gauges {
    fn new(r: &Registry) -> Gauges {
        let pool = ["lane", "domain"];
        Gauges {
            backlog: gauge(r, "backlog", "Unmet wishes", &pool),
            workers: gauge(r, "workers", "Worker threads", &["lane", "domain", "state"]),
            abandoned: gauge(
                r,
                "abandoned_threads",
                "Threads that hang in the backend",
                &pool,
            ),
            breaker: gauge(r, "breaker_state", "0 closed, 1 half-open, 2 open", &pool),
            objects: gauge(r, "objects", "Volumes and snapshots", &["kind", "phase"]),
            oldest: registered(
                r,
                GaugeVec::new(
                    Opts::new(
                        name("oldest_pending_seconds"),
                        "Age of the oldest unmet wish",
                    ),
                    &pool,
                ),
            ),
            heartbeat: registered(
                r,
                GaugeVec::new(
                    Opts::new(name("heartbeat_age_seconds"), "Since a thread last beat"),
                    &["thread"],
                ),
            ),
            store_writable: gauge(r, "store_writable", "Whether the state can be written", &[]),
            abandoned_max: gauge(
                r,
                "abandoned_threads_max",
                "Threads that may hang before a pool stops",
                &pool,
            ),
            backlog_max: gauge(
                r,
                "backlog_max",
                "Unmet wishes before new ones are refused",
                &pool,
            ),
            domain_reached: gauge(
                r,
                "domain_reached",
                "Whether the last probe of the backend succeeded",
                &["domain"],
            ),
            domain_full: gauge(
                r,
                "domain_full",
                "Whether creates wait for room",
                &["domain"],
            ),
            drill: gauge(r, "drill", "Whether fault rules are allowed", &[]),
            started: gauge(
                r,
                "start_time_seconds",
                "When it started, since the Unix epoch",
                &[],
            ),
        }
    }
}

impl Metrics {
    /// All of them, at 0.
    #[must_use]
    pub fn new() -> Metrics {
        let r = Registry::new();
        let gauges = Gauges::new(&r);
        let commit = HistogramOpts::new(name("store_commit_seconds"), "Commits of the state file")
            .buckets(BUCKETS_S.to_vec());
        let build = gauge(&r, "build_info", "The version that runs", &["version"]);
        build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        let events = counter(&r, "events_total", "Events logged", &["reason"]);
        for reason in ALARMING {
            events.with_label_values(&[reason]).inc_by(0);
        }
        let outcome = ["lane", "step", "outcome"];
        Metrics(Arc::new(All {
            operations: counter(&r, "operations_total", "Attempts that ended", &outcome),
            operation_seconds: histogram(
                &r,
                "operation_seconds",
                "How long attempts took",
                &["lane", "step"],
            ),
            queue_seconds: histogram(
                &r,
                "queue_seconds",
                "From a wish to its dispatch",
                &["lane", "step"],
            ),
            abandoned_total: counter(
                &r,
                "abandoned_total",
                "Attempts given up at their deadline",
                &["lane", "domain"],
            ),
            late_returns: counter(
                &r,
                "late_returns_total",
                "Abandoned calls that returned",
                &["outcome"],
            ),
            commit_seconds: registered(&r, Histogram::with_opts(commit)),
            events,
            requests: counter(
                &r,
                "http_requests_total",
                "Answers given",
                &["listener", "route", "code"],
            ),
            recovered: registered(
                &r,
                IntCounter::new(name("sessions_recovered_total"), "Sessions fenced off"),
            ),
            gauges,
            registry: r,
        }))
    }

    /// What is read off when somebody asks.
    #[must_use]
    pub fn gauges(&self) -> &Gauges {
        &self.0.gauges
    }

    /// A pool said something.
    pub fn reported(&self, report: &Report) {
        match report {
            Report::Finished {
                about,
                result,
                ran_ms,
                ..
            } => {
                let (lane, step) = (about.lane.as_str(), about.step.as_str());
                let labels = [lane, step, outcome(result)];
                self.0.operations.with_label_values(&labels).inc();
                let seconds = Duration::from_millis(*ran_ms).as_secs_f64();
                self.0
                    .operation_seconds
                    .with_label_values(&[lane, step])
                    .observe(seconds);
            }
            Report::Abandoned { about, .. } => {
                let (lane, step) = (about.lane.as_str(), about.step.as_str());
                self.0
                    .operations
                    .with_label_values(&[lane, step, "Hung"])
                    .inc();
                self.0
                    .abandoned_total
                    .with_label_values(&[lane, &*about.domain])
                    .inc();
            }
            Report::LateReturn { result, .. } => {
                self.0
                    .late_returns
                    .with_label_values(&[outcome(result)])
                    .inc();
            }
            Report::Probed {
                recovered: Some(Ok(sessions)),
                ..
            } => {
                self.0.recovered.inc_by(*sessions as u64);
            }
            Report::Probed { .. } | Report::LaneChanged { .. } | Report::SpawnFailed { .. } => {}
        }
    }

    /// A step goes to a worker.
    pub fn queued(&self, dispatch: &Dispatch, now: Millis) {
        let labels = [dispatch.lane.as_str(), dispatch.step.as_str()];
        let record = &dispatch.record;
        // The time in the trash is kept on purpose.
        let kept_until = record.volume().and_then(|volume| volume.reclaim_after);
        let waits = record.next_attempt_at.max(kept_until);
        let ready_at = record.wished_at.max(waits.unwrap_or_default());
        let waited = Duration::from_millis(now.since(ready_at)).as_secs_f64();
        self.0
            .queue_seconds
            .with_label_values(&labels)
            .observe(waited);
    }

    /// A batch is durable.
    pub fn committed(&self, took: Duration) {
        self.0.commit_seconds.observe(took.as_secs_f64());
    }

    /// An event was logged.
    pub fn event(&self, reason: &str) {
        self.0.events.with_label_values(&[reason]).inc();
    }

    /// An answer was given.
    pub fn answered(&self, listener: &str, route: &str, code: u16) {
        let route = if route.is_empty() { "other" } else { route };
        self.0
            .requests
            .with_label_values(&[listener, route, &code.to_string()])
            .inc();
    }

    /// The text form of everything.
    #[must_use]
    pub fn text(&self) -> String {
        let all = self.0.registry.gather();
        TextEncoder::new()
            .encode_to_string(&all)
            .unwrap_or_default()
    }
}

fn outcome(result: &Result<Outcome, crate::backend::Error>) -> &'static str {
    match result {
        Ok(_) => "ok",
        Err(error) => error.kind.as_str(),
    }
}
