//! Answers that wait until an object has settled, without holding a thread.
//!
//! A waiting request is laid down in the park as a request of its own (method `WAIT`, which no
//! client can send), whose body says which object, which status, and what was seen last.

use super::{json, problem, refusal};
use crate::http::front::{Request, Responder};
use crate::http::park::Key;
use crate::hub::Hub;
use crate::model::{ObjectId, Phase, Record};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::time::{Duration, Instant};

/// The method of a request that waits: not a token, so that no client can send it.
pub const WAIT: &str = "(wait)";

/// What a waiting request waits for.
#[derive(Debug, Serialize, Deserialize)]
pub struct Held {
    id: ObjectId,
    status: u16,
    /// Since the Unix epoch of the daemon's monotonic clock; 0 doesn't wait.
    until_ms: Option<u64>,
    wait_ms: u64,
    last: Option<Value>,
}

impl Held {
    pub fn new(status: u16, record: &Record, wait_ms: u64) -> Held {
        Held {
            id: record.id,
            status,
            until_ms: None,
            wait_ms,
            last: None,
        }
    }

    /// The one that a parked request brings back.
    pub fn of(request: &Request) -> Option<Held> {
        (request.method == WAIT).then(|| serde_json::from_slice(&request.body).ok())?
    }
}

/// Whether a client that waits for it has waited enough.
fn is_settled(record: &Record) -> bool {
    match record.phase {
        Phase::Ready | Phase::Failed => {
            record.phase == Phase::Failed || record.observed_generation == record.generation
        }
        Phase::Trashed | Phase::Reclaiming | Phase::Gone => true,
        Phase::Pending | Phase::Creating | Phase::Updating | Phase::Deleting => false,
    }
}

/// Answers a write at once, or goes on to wait.
pub fn begin(hub: &Hub, held: Held, record: &Record, request: Request, responder: Responder) {
    if held.wait_ms == 0 || is_settled(record) {
        let shown = super::read::show(hub, record);
        return responder.send(json(held.status, &shown));
    }
    let last = super::read::show(hub, record);
    lay_down(
        hub,
        Held {
            last: Some(last),
            ..held
        },
        request,
        responder,
    );
}

fn lay_down(hub: &Hub, mut held: Held, mut request: Request, responder: Responder) {
    let now_ms = hub.parts().clock.now_ms();
    let until_ms = *held.until_ms.get_or_insert(now_ms + held.wait_ms);
    let key = Key::Object(held.id.uid().0);
    let ticket = hub.parts().park.register(&[key]);
    // It may have settled before the ticket was there.
    let seen = hub.read(|reader| reader.by_id(held.id));
    if matches!(&seen, Ok(Some(record)) if !is_settled(record)) {
        let left = Duration::from_millis(until_ms.saturating_sub(now_ms));
        request.method = WAIT.to_owned();
        request.body = serde_json::to_vec(&held).unwrap_or_default();
        return hub
            .parts()
            .park
            .park(ticket, request, responder, Instant::now() + left);
    }
    answer(hub, held, seen, responder);
}

fn answer(
    hub: &Hub,
    held: Held,
    seen: Result<Option<Record>, crate::store::StoreError>,
    responder: Responder,
) {
    match (seen, held.last) {
        (Ok(Some(record)), _) => {
            responder.send(json(held.status, &super::read::show(hub, &record)));
        }
        (Ok(None), Some(last)) => responder.send(json(held.status, &refusal::deleted(last))),
        (Ok(None), None) => responder.send(super::nowhere("such object any more")),
        (Err(error), _) => responder.send(problem(&refusal::unreadable(&error))),
    }
}

/// Looks at the object: answers when it has settled or the time is up, waits otherwise.
pub fn look(hub: &Hub, mut held: Held, request: Request, responder: Responder) {
    let seen = hub.read(|reader| reader.by_id(held.id));
    let now_ms = hub.parts().clock.now_ms();
    let over = request.last_call
        || held.wait_ms == 0
        || held.until_ms.is_some_and(|until_ms| now_ms >= until_ms);
    if let Ok(Some(record)) = &seen
        && !over
        && !is_settled(record)
    {
        held.last = Some(super::read::show(hub, record));
        return lay_down(hub, held, request, responder);
    }
    answer(hub, held, seen, responder);
}
