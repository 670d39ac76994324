//! How the daemon is: `GET /v1/status`, `/healthz`, `/readyz`, and the gauges. Reads atomics and
//! snapshots only.

use super::wire::{self, BreakerStatus, PoolStatus, Progress, RunStatus, Status};
use crate::hub::Hub;
use crate::metrics::Gauges;
use crate::model::{Lane, Millis};
use crate::pool::Running;
use crate::sched::LaneView;
use serde_json::{Value, json};
use std::collections::BTreeMap;

fn run(hub: &Hub, run: &Running) -> RunStatus {
    let now_ms = hub.parts().clock.now_ms();
    let deadline_ms = run
        .deadline_at
        .since(hub.parts().clock.wall_at(run.about.started_ms));
    RunStatus {
        object: run.title.clone(),
        step: run.doing.as_str(),
        lane: run.about.lane.as_str(),
        domain: run.about.domain.to_string(),
        attempt: u32::try_from(run.about.attempt).unwrap_or(u32::MAX),
        elapsed_ms: now_ms.saturating_sub(run.about.started_ms),
        deadline_ms,
        progress: (run.total > 0).then_some(Progress {
            done: run.done,
            total: run.total,
        }),
        abandoned_at: run.abandoned.then(|| wire::time(run.deadline_at)),
    }
}

fn pool(hub: &Hub, lane: &LaneView, now: Millis) -> PoolStatus {
    let counts = hub.parts().pools.counts(&lane.domain, lane.lane);
    let trouble = lane.trouble.as_ref();
    PoolStatus {
        lane: lane.lane.as_str(),
        domain: lane.domain.clone(),
        threads: counts.threads,
        busy: counts.busy,
        idle: counts.idle,
        abandoned: counts.abandoned,
        abandoned_max: lane.abandoned_max,
        backlog: lane.backlog,
        oldest_pending_s: lane.oldest_pending.map(|at| now.since(at) / 1000),
        breaker: BreakerStatus {
            state: lane.breaker,
            since: trouble.map(|(since, _)| wire::time(*since)),
            message: trouble.map(|(_, why)| why.clone()),
        },
    }
}

/// Heartbeat ages in milliseconds.
fn heartbeats(hub: &Hub) -> BTreeMap<String, u64> {
    let vitals = hub.parts().health.vitals();
    [
        ("loop".to_owned(), vitals.loop_age_ms),
        ("watchdog".to_owned(), vitals.watchdog_late_ms),
    ]
    .into()
}

/// `GET /v1/status`.
#[must_use]
pub fn status(hub: &Hub) -> Value {
    let view = hub.view();
    let now = hub.now();
    let running = hub.parts().pools.running();
    let of = |abandoned: bool| {
        let some = running.iter().filter(move |run| run.abandoned == abandoned);
        some.map(|it| run(hub, it)).collect::<Vec<RunStatus>>()
    };
    let mut counts: BTreeMap<String, BTreeMap<String, u64>> = BTreeMap::new();
    for ((kind, phase), count) in &view.counts {
        let phases = counts.entry((*kind).to_owned()).or_default();
        phases.insert(phase.as_str().to_owned(), *count);
    }
    let status = Status {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        uptime_s: hub.parts().clock.now_ms() / 1000,
        backend: hub.config().backend.kind().to_owned(),
        lanes: view.lanes.iter().map(|lane| pool(hub, lane, now)).collect(),
        running: of(false),
        hung: of(true),
        counts,
        heartbeats: heartbeats(hub),
        needs_restart: hub.needs_restart(),
        draining: hub.is_draining(),
    };
    let mut shown = serde_json::to_value(status).unwrap_or_default();
    let domains = view.domains.iter().map(|domain| {
        json!({
            "domain": domain.name,
            "reached": domain.last_ok_at.is_some(),
            "last_answer_at": domain.last_ok_at.map(wire::time),
            "probing_since": domain.probing_since.map(wire::time),
            "error": domain.error,
            "no_space": domain.no_space.as_ref().map(|(_, why)| why),
        })
    });
    shown["domains"] = domains.collect();
    shown["checks"] = json!(checks(hub));
    shown["waiting"] = json!(view.waiting.len());
    shown["drill"] = json!(hub.parts().faults.is_some());
    shown
}

/// What is wrong, in words: check, whether it only degrades, what to know.
#[must_use]
pub fn checks(hub: &Hub) -> Vec<Value> {
    let mut found = Vec::new();
    let mut say = |check: &str, level: &str, words: String| {
        found.push(json!({"check": check, "level": level, "message": words}));
    };
    let vitals = hub.parts().health.vitals();
    if !vitals.loop_alive {
        let words = format!("the loop has not beaten for {} ms", vitals.loop_age_ms);
        say("loop", "restart", words);
    }
    if !vitals.watchdog_alive {
        say(
            "watchdog",
            "restart",
            "the watchdog does not beat".to_owned(),
        );
    }
    if let Some(why) = hub.restart_wanted() {
        say("threads", "restart", why);
    }
    if let Some(words) = hub.store_error() {
        say("store", "degraded", format!("writes are refused: {words}"));
    }
    if hub.parts().faults.is_some() {
        let words =
            "drill: fault rules are allowed; set [backend.faults] enabled = false to end it";
        say("drill", "info", words.to_owned());
    }
    let view = hub.view();
    for domain in &view.domains {
        if let Some(why) = &domain.error {
            say(
                "backend",
                "degraded",
                format!("domain {}: {why}", domain.name),
            );
        } else if domain.last_ok_at.is_none() {
            let words = format!("domain {} has not answered yet", domain.name);
            say("backend", "degraded", words);
        }
        if let Some((_, why)) = &domain.no_space {
            let words = format!("domain {} has no room, creates wait: {why}", domain.name);
            say("space", "degraded", words);
        }
    }
    for lane in &view.lanes {
        let name = format!("pool {}/{}", lane.domain, lane.lane.as_str());
        if let Some((_, why)) = &lane.trouble {
            say("breaker", "degraded", format!("{name} is paused: {why}"));
        }
        let hung = hub.parts().pools.counts(&lane.domain, lane.lane).abandoned;
        if hung > 0 {
            let words = format!(
                "{name}: {hung} of at most {} calls hang",
                lane.abandoned_max
            );
            say("hung", "degraded", words);
        }
    }
    found
}

/// `GET /healthz`: whether a restart would help, and everything that is wrong.
#[must_use]
pub fn healthz(hub: &Hub) -> (u16, Value) {
    let checks = checks(hub);
    let has = |level: &str| checks.iter().any(|check| check["level"] == level);
    let status = if has("restart") {
        "failed"
    } else if has("degraded") {
        "degraded"
    } else {
        "ok"
    };
    let code = if has("restart") { 503 } else { 200 };
    let mut shown = json!({"status": status, "checks": checks});
    if hub.parts().faults.is_some() {
        shown["drill"] = json!(true);
    }
    (code, shown)
}

/// `GET /readyz`: whether work is welcome, and why not.
#[must_use]
pub fn readyz(hub: &Hub) -> (u16, Value) {
    let view = hub.view();
    let mut reasons = Vec::new();
    if hub.is_draining() || view.draining {
        reasons.push("volward is shutting down".to_owned());
    }
    if let Some(words) = hub.store_error() {
        reasons.push(format!("the state can't be written: {words}"));
    }
    if view.domains.is_empty()
        || view
            .domains
            .iter()
            .all(|domain| domain.last_ok_at.is_none())
    {
        reasons.push("the backend has not been reached yet".to_owned());
    }
    let full = |lane: &&LaneView| lane.lane == Lane::Create && lane.backlog >= view.backlog_max;
    if let Some(lane) = view.lanes.iter().find(full) {
        reasons.push(format!(
            "the create backlog of domain {} is full",
            lane.domain
        ));
    }
    let code = if reasons.is_empty() { 200 } else { 503 };
    (
        code,
        json!({"ready": reasons.is_empty(), "reasons": reasons}),
    )
}

fn pool_gauges(hub: &Hub, gauges: &Gauges, lane: &LaneView, backlog_max: usize, now: Millis) {
    let count = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
    let pool = [lane.lane.as_str(), lane.domain.as_str()];
    let counts = hub.parts().pools.counts(&lane.domain, lane.lane);
    gauges
        .backlog
        .with_label_values(&pool)
        .set(count(lane.backlog));
    for (state, n) in [
        ("busy", counts.busy),
        ("idle", counts.idle),
        ("abandoned", counts.abandoned),
    ] {
        gauges
            .workers
            .with_label_values(&[pool[0], pool[1], state])
            .set(count(n));
    }
    gauges
        .abandoned
        .with_label_values(&pool)
        .set(count(counts.abandoned));
    let breaker = match lane.breaker {
        "closed" => 0,
        "half-open" => 1,
        _ => 2,
    };
    gauges.breaker.with_label_values(&pool).set(breaker);
    let most = count(lane.abandoned_max);
    gauges.abandoned_max.with_label_values(&pool).set(most);
    let most = count(backlog_max);
    gauges.backlog_max.with_label_values(&pool).set(most);
    let oldest = lane
        .oldest_pending
        .map_or(0.0, |at| now.since(at) as f64 / 1000.0);
    gauges.oldest.with_label_values(&pool).set(oldest);
}

/// The text of `/metrics`.
#[must_use]
pub fn metrics(hub: &Hub) -> String {
    let view = hub.view();
    let now = hub.now();
    let metrics = &hub.parts().metrics;
    let gauges = metrics.gauges();
    for lane in &view.lanes {
        pool_gauges(hub, gauges, lane, view.backlog_max, now);
    }
    for domain in &view.domains {
        let label = [domain.name.as_str()];
        let reached = domain.last_ok_at.is_some() && domain.error.is_none();
        let full = domain.no_space.is_some();
        gauges
            .domain_reached
            .with_label_values(&label)
            .set(i64::from(reached));
        gauges
            .domain_full
            .with_label_values(&label)
            .set(i64::from(full));
    }
    for ((kind, phase), n) in &view.counts {
        let n = i64::try_from(*n).unwrap_or(i64::MAX);
        gauges
            .objects
            .with_label_values(&[*kind, phase.as_str()])
            .set(n);
    }
    for (thread, age_ms) in heartbeats(hub) {
        gauges
            .heartbeat
            .with_label_values(&[thread])
            .set(age_ms as f64 / 1000.0);
    }
    let none: [&str; 0] = [];
    let writable = i64::from(hub.store_error().is_none());
    gauges.store_writable.with_label_values(&none).set(writable);
    let drill = i64::from(hub.parts().faults.is_some());
    gauges.drill.with_label_values(&none).set(drill);
    let started = gauges.started.with_label_values(&none);
    if started.get() == 0 {
        // Once: a wall clock that is set later would look like a restart.
        let at_s = hub.parts().clock.wall_at(0).0 / 1000;
        started.set(i64::try_from(at_s).unwrap_or(i64::MAX));
    }
    metrics.text()
}
