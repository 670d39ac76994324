//! Answers that wait until an object has settled, without holding a thread.
//!
//! A waiting request is laid down in the park as a request of its own (method `WAIT`, which no
//! client can send), whose body says which object, which status, and what was seen last.

use super::read::Now;
use super::{json, problem, refusal};
use crate::http::front::{Request, Responder};
use crate::http::park::{Key, Ticket};
use crate::http::wire::{self, Live};
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

    fn key(&self) -> Key {
        Key::Object(self.id.uid().0)
    }

    /// Rests in the park until its object changes or its time is up, which it keeps.
    fn lay_down(mut self, hub: &Hub, ticket: Ticket, mut request: Request, responder: Responder) {
        let now_ms = hub.parts().clock.now_ms();
        let until_ms = *self.until_ms.get_or_insert(now_ms + self.wait_ms);
        let left = Duration::from_millis(until_ms.saturating_sub(now_ms));
        request.method = WAIT.to_owned();
        request.body = serde_json::to_vec(&self).unwrap_or_default();
        let park = &hub.parts().park;
        park.park(ticket, request, responder, Instant::now() + left);
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

/// Answers a write that was taken up, or lets it wait. Called on the loop's thread: nothing is read
/// here, and the object can't settle before the ticket is there. `known` was taken up before, so
/// more may be known of it than its record: a responder looks.
pub fn begin(
    hub: &Hub,
    mut held: Held,
    record: &Record,
    known: bool,
    request: Request,
    responder: Responder,
) {
    let shown = wire::object(record, &Live::default());
    if is_settled(record) {
        held.wait_ms = 0;
    }
    if held.wait_ms == 0 && !known {
        return responder.send(json(held.status, &shown));
    }
    held.last = Some(shown);
    let ticket = hub.parts().park.register(&[held.key()]);
    held.lay_down(hub, ticket, request, responder);
}

/// Looks at the object, on a responder: answers when it has settled or the time is up, lets it
/// wait otherwise.
pub fn look(hub: &Hub, mut held: Held, request: Request, responder: Responder) {
    let over = request.last_call || held.wait_ms == 0;
    // Registered before the read: what settles in between is not missed.
    let ticket = (!over).then(|| hub.parts().park.register(&[held.key()]));
    match (hub.read(|reader| reader.by_id(held.id)), ticket) {
        (Ok(Some(record)), Some(ticket)) if !is_settled(&record) => {
            held.last = Some(Now::of(hub).show(&record));
            held.lay_down(hub, ticket, request, responder);
        }
        (Ok(Some(record)), _) => {
            responder.send(json(held.status, &Now::of(hub).show(&record)));
        }
        (Ok(None), _) => match held.last {
            Some(last) => responder.send(json(held.status, &refusal::deleted(last))),
            None => responder.send(super::nowhere("such object any more")),
        },
        (Err(error), _) => responder.send(problem(&refusal::unreadable(&error))),
    }
}
