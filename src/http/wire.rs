//! The JSON of the API: request bodies, answers, problems and queries.
//!
//! This module owns the outer form of everything. Wire types are not core types: what is stored
//! may change without the API changing. It knows `model` and nothing of sockets, threads or the
//! store.

mod body;
mod query;

pub use body::{
    CreateSnapshot, CreateVolume, EncryptionRequest, PatchVolume, Restore, SourceRequest,
    differences, parse_body,
};
pub use query::{EventQuery, ListQuery, ObjectQuery, percent_decode};

use crate::model::{Entry, Millis, Phase, Qos, Record, Source, SourceFormat};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// An error as RFC 9457 puts it (`application/problem+json`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// A stable slug, such as `conflict`.
    #[serde(rename = "type")]
    pub slug: Box<str>,
    /// The slug in words.
    pub title: Box<str>,
    /// The HTTP status.
    pub status: u16,
    /// The thing, the cause, the mend.
    pub detail: Box<str>,
    /// Which object, such as `volume/db-01`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub object: Option<Box<str>>,
    /// Which field of the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub field: Option<Box<str>>,
    /// When it is worth another try, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_after_s: Option<u64>,
    /// The oldest event that is kept (410).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oldest: Option<u64>,
}

impl Problem {
    /// A problem; the title follows from the slug.
    #[must_use]
    pub fn new(status: u16, slug: &str, detail: impl Into<Box<str>>) -> Problem {
        let mut title = slug.replace('-', " ");
        if let Some(first) = title.get_mut(..1) {
            first.make_ascii_uppercase();
        }
        Problem {
            slug: slug.into(),
            title: title.into(),
            status,
            detail: detail.into(),
            object: None,
            field: None,
            retry_after_s: None,
            oldest: None,
        }
    }

    /// The same with the field that is wrong.
    #[must_use]
    pub fn field(mut self, field: impl Into<Box<str>>) -> Problem {
        self.field = Some(field.into());
        self
    }

    /// The same with the object that it is about.
    #[must_use]
    pub fn object(mut self, object: impl Into<Box<str>>) -> Problem {
        self.object = Some(object.into());
        self
    }

    /// The same with the time after which it is worth another try.
    #[must_use]
    pub fn retry_after(mut self, seconds: u64) -> Problem {
        self.retry_after_s = Some(seconds);
        self
    }

    /// 422 for one field.
    #[must_use]
    pub fn invalid(field: impl Into<Box<str>>, detail: impl Into<Box<str>>) -> Problem {
        Problem::new(422, "invalid", detail).field(field)
    }
}

/// RFC 3339, UTC, milliseconds.
#[must_use]
pub fn time(at: Millis) -> String {
    let at = i64::try_from(at.0)
        .ok()
        .and_then(|ms| jiff::Timestamp::from_millisecond(ms).ok())
        .unwrap_or(jiff::Timestamp::MAX);
    format!("{at:.3}")
}

fn time_value(at: Option<Millis>) -> Value {
    at.map_or(Value::Null, |at| Value::from(time(at)))
}

/// Work done of a total, in the units of the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Progress {
    /// Done so far.
    pub done: u64,
    /// Altogether.
    pub total: u64,
}

/// What is known of a running or abandoned attempt beyond the record.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Live {
    /// The step that runs or hangs.
    pub step: Option<&'static str>,
    /// The number of the attempt; the record's count otherwise.
    pub attempt: Option<u32>,
    /// How far it is.
    pub progress: Option<Progress>,
    /// Since when its call hangs, abandoned.
    pub hung_since: Option<Millis>,
    /// Volumes made from this snapshot, by name.
    pub children: Vec<String>,
}

/// The phase as the API shows it: trash phases of a volume that a client still asks about are
/// `deleted`.
fn phase(phase: Phase) -> &'static str {
    match phase {
        Phase::Trashed | Phase::Reclaiming | Phase::Gone => "deleted",
        shown => shown.as_str(),
    }
}

fn source(source: &Source) -> Value {
    match source {
        Source::Snapshot { name, .. } => json!({"snapshot": name}),
        Source::Volume { name, .. } => json!({"volume": name}),
        Source::File { path, format } => json!({"file": path, "format": format_word(*format)}),
    }
}

fn format_word(format: SourceFormat) -> &'static str {
    match format {
        SourceFormat::Raw => "raw",
        SourceFormat::Qcow2 => "qcow2",
    }
}

fn qos(qos: Option<&Qos>) -> Value {
    qos.map_or(
        Value::Null,
        |qos| json!({"iops": qos.iops, "bytes_per_second": qos.bytes_per_second}),
    )
}

/// What both kinds have in common of `status`.
fn status(record: &Record, live: &Live) -> Value {
    json!({
        "phase": phase(record.phase),
        "domain": record.place.domain,
        "step": live.step,
        "attempt": live.attempt.unwrap_or(record.attempts),
        "progress": live.progress,
        "next_attempt_at": time_value(record.next_attempt_at),
        "hung_since": time_value(live.hung_since),
        "reason": record.reason.map(|reason| reason.as_str()),
        "message": record.message,
    })
}

fn envelope(record: &Record, spec: Value, status: Value) -> Value {
    json!({
        "name": record.name,
        "uid": record.id.uid(),
        "generation": record.generation,
        "observed_generation": record.observed_generation,
        "spec": spec,
        "status": status,
        "created_at": time(record.created_at),
        "updated_at": time(record.updated_at),
        "deletion_requested_at": time_value(record.deletion_requested_at),
    })
}

/// The object of a volume or a snapshot, whichever the record is.
#[must_use]
pub fn object(record: &Record, live: &Live) -> Value {
    let mut shown = status(record, live);
    let Some(volume) = record.volume() else {
        let snapshot = record.snapshot();
        shown["size_bytes"] = json!(snapshot.and_then(|snapshot| snapshot.size_bytes));
        shown["volume"] = json!(snapshot.map(|snapshot| &snapshot.volume));
        shown["volume_uid"] = json!(record.image);
        shown["children"] = json!(live.children);
        let volume = snapshot.map(|snapshot| &snapshot.volume);
        return envelope(
            record,
            json!({"volume": volume, "labels": record.labels}),
            shown,
        );
    };
    shown["size_bytes"] = json!(volume.seen_size_bytes);
    shown["used_bytes"] = json!(volume.used_bytes);
    shown["handle"] = json!(volume.handle);
    shown["wwn"] = json!(volume.wwn);
    let spec = json!({
        "size_bytes": volume.size_bytes,
        "class": record.place.class,
        "source": volume.source.as_ref().map(source),
        "qos": qos(volume.qos.as_ref()),
        "encryption": volume.encryption.as_ref().map(|id| json!({"key_id": id})),
        "labels": record.labels,
    });
    envelope(record, spec, shown)
}

/// An entry of `GET /v1/trash`.
#[must_use]
pub fn trash_entry(record: &Record, live: &Live) -> Value {
    let volume = record.volume();
    json!({
        "uid": record.id.uid(),
        "name": record.name,
        "size_bytes": volume.map(|volume| volume.size_bytes),
        "deleted_at": time_value(volume.and_then(|volume| volume.trashed_at)),
        "reclaim_after": time_value(volume.and_then(|volume| volume.reclaim_after)),
        "progress": live.progress,
        "blocked_by": volume.map(|volume| volume.blocked_by.clone()).unwrap_or_default(),
    })
}

/// An item of `GET /v1/events`.
#[must_use]
pub fn event(seq: u64, entry: &Entry) -> Value {
    json!({
        "seq": seq,
        "at": time(entry.at),
        "object": entry.object,
        "type": if entry.warning { "warning" } else { "normal" },
        "reason": entry.reason,
        "message": entry.message,
    })
}

/// A page of a list.
#[must_use]
pub fn page(items: Vec<Value>, next: Option<&str>) -> Value {
    json!({"items": items, "next": next})
}

/// A pool of a domain in `GET /v1/status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PoolStatus {
    /// `create` or `delete`.
    pub lane: &'static str,
    /// The domain.
    pub domain: String,
    /// Workers that the configuration asks for.
    pub threads: usize,
    /// Workers with a job.
    pub busy: usize,
    /// Workers without.
    pub idle: usize,
    /// Threads that hang in the backend.
    pub abandoned: usize,
    /// Most of them.
    pub abandoned_max: usize,
    /// Unmet wishes.
    pub backlog: usize,
    /// The age of the oldest one in seconds.
    pub oldest_pending_s: Option<u64>,
    /// The breaker.
    pub breaker: BreakerStatus,
}

/// The breaker of a pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BreakerStatus {
    /// `closed`, `open` or `half-open`.
    pub state: &'static str,
    /// Since when it isn't closed, RFC 3339.
    pub since: Option<String>,
    /// Why.
    pub message: Option<String>,
}

/// A running or abandoned attempt in `GET /v1/status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RunStatus {
    /// Which object, such as `volume/db-01`.
    pub object: String,
    /// What is done to it.
    pub step: &'static str,
    /// `create` or `delete`.
    pub lane: &'static str,
    /// The domain.
    pub domain: String,
    /// Its number.
    pub attempt: u32,
    /// For how long.
    pub elapsed_ms: u64,
    /// How long it may altogether.
    pub deadline_ms: u64,
    /// How far it is.
    pub progress: Option<Progress>,
    /// When it was abandoned, RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub abandoned_at: Option<String>,
}

/// `GET /v1/status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Default)]
pub struct Status {
    /// The version of volward.
    pub version: String,
    /// Since it started.
    pub uptime_s: u64,
    /// `file`, `rbd` or `sim`.
    pub backend: String,
    /// Per domain and lane.
    pub lanes: Vec<PoolStatus>,
    /// What runs.
    pub running: Vec<RunStatus>,
    /// What hangs, abandoned.
    pub hung: Vec<RunStatus>,
    /// Objects: kind → phase → count.
    pub counts: BTreeMap<String, BTreeMap<String, u64>>,
    /// Thread → age of its heartbeat in milliseconds.
    pub heartbeats: BTreeMap<String, u64>,
    /// Sections of a reloaded configuration that wait for a restart.
    pub needs_restart: Vec<String>,
    /// Whether it stops.
    pub draining: bool,
}

#[cfg(test)]
mod tests;
