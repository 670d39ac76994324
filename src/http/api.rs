//! The API: one match from a request to what it means, and the writes.
//!
//! Runs on responder threads. A write is handed to the loop with what shall be done with the
//! answer; nobody waits for it here.

mod faults;
mod read;
mod refusal;
mod wait;

use super::front::{Answer, Handler, Request, Responder};
use super::wire::{self, ObjectQuery, Problem};
use crate::hub::{Answer as Outcome, Hub};
use crate::model::{Name, ObjectId, Record, Uid};
use crate::sched::{self, Named, NewVolume, SourceWish, VolumeChange};
pub(super) use read::events;
use serde_json::Value;
use wait::Held;

/// Answers the API listener.
#[derive(Debug)]
pub struct Api {
    hub: Hub,
}

impl Api {
    /// The API of that daemon.
    #[must_use]
    pub fn new(hub: Hub) -> Api {
        Api { hub }
    }
}

/// What a request means.
#[derive(Debug)]
enum Call {
    CreateVolume,
    ListVolumes,
    Volume(Name),
    ChangeVolume(Name),
    Delete(Named),
    Retry(Named),
    CreateSnapshot,
    ListSnapshots,
    Snapshot(Name),
    ListTrash,
    Restore(Uid),
    Purge(Uid),
    Events,
    Status,
    Faults,
    SetFaults,
    ClearFaults,
}

/// Where a request goes: the word of the metrics, and what it means, or who may be asked how.
enum Route {
    To(&'static str, Call),
    Method(&'static str, &'static str),
    Nowhere,
    Bad(Box<Problem>),
}

pub(super) fn json(status: u16, value: &Value) -> Answer {
    Answer::json(status, value.to_string().into_bytes())
}

pub(super) fn problem(problem: &Problem) -> Answer {
    let body = serde_json::to_vec(problem).unwrap_or_default();
    let mut answer = Answer::json(problem.status, body);
    answer.content_type = "application/problem+json".into();
    match problem.retry_after_s {
        Some(seconds) => answer.with_header("Retry-After", seconds.to_string()),
        None => answer,
    }
}

/// The name in a path, or why it is none: such an object can't be there.
fn name(segment: &str) -> Result<Name, Box<Problem>> {
    let text = wire::percent_decode(segment, false).map_err(Box::new)?;
    text.parse().map_err(|error| {
        let words = format!("{text:.80}: {error}");
        Box::new(Problem::new(404, "not-found", words))
    })
}

fn uid(segment: &str) -> Result<Uid, Box<Problem>> {
    segment.parse().map_err(|error| {
        let words = format!("{segment:.80}: {error}");
        Box::new(Problem::new(404, "not-found", words))
    })
}

/// One arm per route.
fn route(method: &str, path: &str) -> Route {
    let parts: Vec<&str> = path.strip_prefix("/v1/").unwrap_or("").split('/').collect();
    let to = |word, call: Result<Call, Box<Problem>>| match call {
        Ok(call) => Route::To(word, call),
        Err(bad) => Route::Bad(bad),
    };
    let volume = |segment: &str| name(segment).map(Named::Volume);
    let snapshot = |segment: &str| name(segment).map(Named::Snapshot);
    match (parts.as_slice(), method) {
        (["volumes"], "GET") => to("volumes", Ok(Call::ListVolumes)),
        (["volumes"], "POST") => to("volumes", Ok(Call::CreateVolume)),
        (["volumes"], _) => Route::Method("volumes", "GET, HEAD, POST"),
        (["volumes", of], "GET") => to("volume", name(of).map(Call::Volume)),
        (["volumes", of], "PATCH") => to("volume", name(of).map(Call::ChangeVolume)),
        (["volumes", of], "DELETE") => to("volume", volume(of).map(Call::Delete)),
        (["volumes", _], _) => Route::Method("volume", "GET, HEAD, PATCH, DELETE"),
        (["volumes", of, "retry"], "POST") => to("volume-retry", volume(of).map(Call::Retry)),
        (["volumes", _, "retry"], _) => Route::Method("volume-retry", "POST"),
        (["snapshots"], "GET") => to("snapshots", Ok(Call::ListSnapshots)),
        (["snapshots"], "POST") => to("snapshots", Ok(Call::CreateSnapshot)),
        (["snapshots"], _) => Route::Method("snapshots", "GET, HEAD, POST"),
        (["snapshots", of], "GET") => to("snapshot", name(of).map(Call::Snapshot)),
        (["snapshots", of], "DELETE") => to("snapshot", snapshot(of).map(Call::Delete)),
        (["snapshots", _], _) => Route::Method("snapshot", "GET, HEAD, DELETE"),
        (["snapshots", of, "retry"], "POST") => to("snapshot-retry", snapshot(of).map(Call::Retry)),
        (["snapshots", _, "retry"], _) => Route::Method("snapshot-retry", "POST"),
        (["trash"], "GET") => to("trash", Ok(Call::ListTrash)),
        (["trash"], _) => Route::Method("trash", "GET, HEAD"),
        (["trash", of], "DELETE") => to("trash-entry", uid(of).map(Call::Purge)),
        (["trash", _], _) => Route::Method("trash-entry", "DELETE"),
        (["trash", of, "restore"], "POST") => to("trash-restore", uid(of).map(Call::Restore)),
        (["trash", _, "restore"], _) => Route::Method("trash-restore", "POST"),
        (["events"], "GET") => to("events", Ok(Call::Events)),
        (["events"], _) => Route::Method("events", "GET, HEAD"),
        (["status"], "GET") => to("status", Ok(Call::Status)),
        (["status"], _) => Route::Method("status", "GET, HEAD"),
        (["faults"], "GET") => to("faults", Ok(Call::Faults)),
        (["faults"], "PUT") => to("faults", Ok(Call::SetFaults)),
        (["faults"], "DELETE") => to("faults", Ok(Call::ClearFaults)),
        (["faults"], _) => Route::Method("faults", "GET, HEAD, PUT, DELETE"),
        _ => Route::Nowhere,
    }
}

impl Handler for Api {
    fn handle(&self, request: Request, mut responder: Responder) {
        if let Some(held) = Held::of(&request) {
            return wait::look(&self.hub, held, request, responder);
        }
        match route(&request.method, &request.path) {
            Route::To(word, call) => {
                responder.set_route(word);
                self.call(call, request, responder);
            }
            Route::Method(word, allow) => {
                responder.set_route(word);
                let words = format!("{} takes {allow}, not {}", request.path, request.method);
                let answer = problem(&Problem::new(405, "method", words));
                responder.send(answer.with_header("Allow", allow));
            }
            Route::Nowhere => responder.send(nowhere(&request.path)),
            Route::Bad(bad) => responder.send(problem(&bad)),
        }
    }
}

pub(super) fn nowhere(path: &str) -> Answer {
    let words = format!("there is no {path:.200}; the routes are in openapi.yaml");
    problem(&Problem::new(404, "not-found", words))
}

impl Api {
    fn call(&self, call: Call, request: Request, responder: Responder) {
        let hub = &self.hub;
        let done = match call {
            Call::ListVolumes => read::volumes(hub, &request),
            Call::ListSnapshots => read::snapshots(hub, &request),
            Call::ListTrash => read::trash(hub, &request),
            Call::Status => Ok(json(200, &super::status::status(hub))),
            Call::Volume(name) => return self.get(Named::Volume(name), &request, responder),
            Call::Snapshot(name) => return self.get(Named::Snapshot(name), &request, responder),
            Call::Events => return read::events(hub, request, responder),
            Call::Faults => faults::get(hub),
            Call::SetFaults => media_type(&request).and_then(|()| faults::put(hub, &request.body)),
            Call::ClearFaults => faults::delete(hub),
            Call::CreateVolume
            | Call::ChangeVolume(_)
            | Call::Delete(_)
            | Call::Retry(_)
            | Call::CreateSnapshot
            | Call::Restore(_)
            | Call::Purge(_) => return self.write(call, &request, responder),
        };
        responder.send(done.unwrap_or_else(|bad| problem(&bad)));
    }

    fn get(&self, object: Named, request: &Request, responder: Responder) {
        let query = match ObjectQuery::parse(request.query.as_deref().unwrap_or("")) {
            Ok(query) => query,
            Err(bad) => return responder.send(problem(&bad)),
        };
        match read::named(&self.hub, &object, query.uid) {
            Ok(record) if query.wait_ms == 0 => {
                responder.send(json(200, &read::Now::of(&self.hub).show(&record)));
            }
            Ok(record) => {
                let held = Held::new(200, &record, query.wait_ms);
                wait::look(&self.hub, held, request.clone(), responder);
            }
            Err(bad) => responder.send(problem(&bad)),
        }
    }

    fn write(&self, call: Call, request: &Request, responder: Responder) {
        let (wish, query, new) = match self.wish(call, request) {
            Ok(wish) => wish,
            Err(bad) => return responder.send(problem(&bad)),
        };
        let hub = self.hub.clone();
        let request = request.clone();
        let reply = move |outcome: Outcome| match outcome {
            Ok(Ok(accepted)) => {
                let status = if new && accepted.known { 200 } else { 202 };
                let held = Held::new(status, &accepted.record, query.wait_ms);
                let (record, known) = (&accepted.record, accepted.known);
                wait::begin(&hub, held, record, known, request, responder);
            }
            Ok(Err(refusal)) => {
                responder.send(problem(&refusal::of(&refusal, &request.body, &hub)))
            }
            Err(unavailable) => responder.send(problem(&refusal::unavailable(&unavailable))),
        };
        self.hub.ask(wish, Box::new(reply));
    }

    /// The wish of a write, its query, and whether it makes something new (then a repetition is
    /// answered with 200).
    fn wish(
        &self,
        call: Call,
        request: &Request,
    ) -> Result<(sched::Request, ObjectQuery, bool), Problem> {
        let query = ObjectQuery::parse(request.query.as_deref().unwrap_or(""))?;
        let body = &request.body;
        let typed = || media_type(request);
        let (wish, new) = match call {
            Call::CreateVolume => {
                typed()?;
                (self.new_volume(body)?, true)
            }
            Call::CreateSnapshot => {
                typed()?;
                (self.new_snapshot(body)?, true)
            }
            Call::ChangeVolume(name) => {
                typed()?;
                (change(name, &query, body)?, false)
            }
            Call::Delete(object) => (
                sched::Request::Delete {
                    object,
                    uid: query.uid,
                },
                false,
            ),
            Call::Retry(object) => (
                sched::Request::Retry {
                    object,
                    uid: query.uid,
                },
                false,
            ),
            Call::Restore(uid) => {
                let name = if body.is_empty() {
                    None
                } else {
                    typed()?;
                    wire::Restore::parse(body)?.name
                };
                (sched::Request::Restore { uid, name }, false)
            }
            Call::Purge(uid) => (sched::Request::Purge { uid }, false),
            other => unreachable!("{other:?} is no write"),
        };
        Ok((wish, query, new))
    }

    fn new_snapshot(&self, body: &[u8]) -> Result<sched::Request, Problem> {
        let asked = wire::CreateSnapshot::parse(body)?;
        Ok(sched::Request::CreateSnapshot {
            uid: self.uid(),
            name: asked.name,
            volume: asked.volume,
            labels: asked.labels,
        })
    }

    fn new_volume(&self, body: &[u8]) -> Result<sched::Request, Problem> {
        let asked = wire::CreateVolume::parse(body)?;
        let request = asked.normalised(self.hub.config().default_class.as_deref());
        let source = asked.source.map(|source| match source {
            wire::SourceRequest::Snapshot(name) => SourceWish::Snapshot(name),
            wire::SourceRequest::Volume(name) => SourceWish::Volume(name),
            wire::SourceRequest::File(path, format) => SourceWish::File(path, format),
        });
        Ok(sched::Request::CreateVolume(Box::new(NewVolume {
            uid: self.uid(),
            name: asked.name,
            size_bytes: asked.size_bytes,
            class: asked.class,
            source,
            qos: asked.qos,
            encryption: asked.encryption.map(|encryption| encryption.key_id),
            labels: asked.labels,
            request,
        })))
    }

    fn uid(&self) -> Uid {
        let mut bytes = [0; 16];
        // The system's generator never fails once it is initialised.
        let _filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
        Uid::new(self.hub.now().0, u128::from_le_bytes(bytes))
    }
}

fn change(name: Name, query: &ObjectQuery, body: &[u8]) -> Result<sched::Request, Problem> {
    let asked = wire::PatchVolume::parse(body)?;
    let change = VolumeChange {
        size_bytes: asked.size_bytes,
        qos: asked.qos,
        labels: asked.labels,
    };
    Ok(sched::Request::ChangeVolume {
        name,
        uid: query.uid,
        if_generation: asked.if_generation,
        change,
    })
}

fn media_type(request: &Request) -> Result<(), Problem> {
    let given = request.header("content-type").unwrap_or("application/json");
    let kind = given.split(';').next().unwrap_or("").trim();
    if kind.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let words = format!("the body is {kind:.80}; send application/json");
    Err(Problem::new(415, "media-type", words))
}

/// What the record's object is called in problems.
pub(super) fn title(record: &Record) -> String {
    match record.id {
        ObjectId::Volume(_) => format!("volume/{}", record.name),
        ObjectId::Snapshot(_) => format!("snapshot/{}", record.name),
    }
}
