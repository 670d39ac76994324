//! Reads: straight from the store's readers, with what runs right now beside it.

use super::{json, problem, refusal};
use crate::http::front::{Answer, Request, Responder};
use crate::http::park::{Key, Ticket};
use crate::http::wire::{self, EventQuery, ListQuery, Live, Problem, Progress};
use crate::hub::Hub;
use crate::model::{ErrorKind, Name, ObjectId, Record, Uid};
use crate::pool::Running;
use crate::sched::Named;
use crate::store::{self, SnapshotQuery, VolumeQuery};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// What is known of objects beyond their records, as of one moment.
pub struct Now<'a> {
    hub: &'a Hub,
    runs: BTreeMap<ObjectId, Running>,
}

impl Now<'_> {
    pub fn of(hub: &Hub) -> Now<'_> {
        let running = hub.parts().pools.running().into_iter();
        let runs = running.map(|run| (run.about.object, run)).collect();
        Now { hub, runs }
    }

    /// What runs or hangs on an object, and what was made from it.
    fn live(&self, record: &Record) -> Live {
        let mut live = Live::default();
        if let Some(run) = self.runs.get(&record.id) {
            live.step = Some(run.doing.as_str());
            live.attempt = Some(record.attempts + 1);
            live.hung_since = run.abandoned.then_some(run.deadline_at);
            let (done, total) = (run.done, run.total);
            live.progress = (total > 0).then_some(Progress { done, total });
        }
        if let ObjectId::Snapshot(uid) = record.id {
            let children = self.hub.read(|reader| reader.children(uid));
            let children = children.unwrap_or_default();
            live.children = children.iter().map(ToString::to_string).collect();
        }
        live
    }

    /// A record as the API shows it: one that waits says for what.
    pub fn show(&self, record: &Record) -> Value {
        let live = self.live(record);
        if live.step.is_some() || record.reason.is_some() || record.is_settled() {
            return wire::object(record, &live);
        }
        let mut record = record.clone();
        (record.reason, record.message) = cause(self.hub, &record);
        wire::object(&record, &live)
    }
}

/// Why an unsettled object doesn't go on: what it waits for, or the breaker of its pool.
fn cause(hub: &Hub, record: &Record) -> (Option<ErrorKind>, Option<String>) {
    let view = hub.view();
    if let Some(words) = view.waiting.get(&record.id) {
        return (None, Some(words.clone()));
    }
    let (domain, lane) = (&record.place.domain, record.lane());
    let pool = view
        .lanes
        .iter()
        .find(|pool| pool.domain == *domain && pool.lane == lane);
    match pool.and_then(|pool| pool.trouble.as_ref()) {
        Some((_, why)) => {
            let words = format!("pool {domain}/{} is paused: {why}", lane.as_str());
            (Some(ErrorKind::Unreachable), Some(words))
        }
        None => (None, None),
    }
}

/// The object of that name, if it has that uid. One that went to the trash is found by its uid.
pub fn named(hub: &Hub, object: &Named, uid: Option<Uid>) -> Result<Record, Problem> {
    let found = hub.read(|reader| match object {
        Named::Volume(name) => reader.volume_named(name),
        Named::Snapshot(name) => reader.snapshot_named(name),
    });
    let (kind, name) = match object {
        Named::Volume(name) => ("volume", name),
        Named::Snapshot(name) => ("snapshot", name),
    };
    let missing = || {
        let words = format!("there is no {kind} {name}");
        Problem::new(404, "not-found", words).object(format!("{kind}/{name}"))
    };
    let found = found.map_err(|error| refusal::unreadable(&error))?;
    match (found, uid) {
        (Some(record), None) => Ok(record),
        (Some(record), Some(uid)) if record.id.uid() == uid => Ok(record),
        (Some(record), Some(uid)) => {
            let words = format!("{kind}/{name} has uid {} now, not {uid}", record.id.uid());
            Err(Problem::new(409, "uid", words).object(format!("{kind}/{name}")))
        }
        (None, _) => Err(missing()),
    }
}

fn list_query(request: &Request) -> Result<ListQuery, Problem> {
    ListQuery::parse(request.query.as_deref().unwrap_or(""))
}

fn after_name(query: &ListQuery) -> Result<Option<Name>, Problem> {
    let parse = |text: &String| {
        text.parse()
            .map_err(|_| Problem::invalid("after", "after is the last name of a page"))
    };
    query.after.as_ref().map(parse).transpose()
}

fn page(hub: &Hub, page: store::Page) -> Answer {
    let now = Now::of(hub);
    let items = page.items.iter().map(|record| now.show(record)).collect();
    json(
        200,
        &wire::page(items, page.next.as_ref().map(Name::as_str)),
    )
}

pub fn volumes(hub: &Hub, request: &Request) -> Result<Answer, Problem> {
    let query = list_query(request)?;
    let query = VolumeQuery {
        after: after_name(&query)?,
        limit: query.limit,
        phase: query.phase,
        class: query.class,
        label: query.label,
    };
    let found = hub.read(|reader| reader.volumes(&query));
    found
        .map(|found| page(hub, found))
        .map_err(|error| refusal::unreadable(&error))
}

pub fn snapshots(hub: &Hub, request: &Request) -> Result<Answer, Problem> {
    let query = list_query(request)?;
    if query.class.is_some() {
        return Err(Problem::invalid(
            "class",
            "snapshots have no class; filter by label",
        ));
    }
    let query = SnapshotQuery {
        after: after_name(&query)?,
        limit: query.limit,
        phase: query.phase,
        volume: None,
        label: query.label,
    };
    let found = hub.read(|reader| reader.snapshots(&query));
    found
        .map(|found| page(hub, found))
        .map_err(|error| refusal::unreadable(&error))
}

pub fn trash(hub: &Hub, request: &Request) -> Result<Answer, Problem> {
    let query = list_query(request)?;
    let parse = |text: &String| {
        text.parse::<Uid>()
            .map_err(|_| Problem::invalid("after", "after is the last uid of a page"))
    };
    let after = query.after.as_ref().map(parse).transpose()?;
    let found = hub.read(|reader| reader.trash(after, query.limit));
    let found = found.map_err(|error| refusal::unreadable(&error))?;
    let now = Now::of(hub);
    let entry = |record: &Record| {
        let mut shown = wire::trash_entry(record, &now.live(record));
        shown["phase"] = json!(record.phase.as_str());
        shown["reason"] = json!(record.reason.map(ErrorKind::as_str));
        shown["message"] = json!(record.message);
        shown["next_attempt_at"] = json!(record.next_attempt_at.map(wire::time));
        shown
    };
    let items = found.items.iter().map(entry).collect();
    Ok(json(
        200,
        &wire::page(items, found.next.map(|uid| uid.to_string()).as_deref()),
    ))
}

/// Events, waiting for the first one if asked to.
pub fn events(hub: &Hub, request: Request, responder: Responder) {
    let query = match EventQuery::parse(request.query.as_deref().unwrap_or("")) {
        Ok(query) => query,
        Err(bad) => return responder.send(problem(&bad)),
    };
    // Registered before the read: what comes in between is not missed.
    let waits = query.wait_ms > 0 && !request.last_call;
    let ticket = waits.then(|| hub.parts().park.register(&[Key::Events]));
    match event_page(hub, &query) {
        Ok(page) => {
            let empty = page["items"].as_array().is_none_or(Vec::is_empty);
            match ticket {
                Some(ticket) if empty => {
                    lay_down(hub, ticket, query.wait_ms, request, responder);
                }
                _ => responder.send(json(200, &page)),
            }
        }
        Err(bad) => responder.send(problem(&bad)),
    }
}

/// A request that was woken keeps its first deadline: it is noted in a header of its own, whose
/// name no client can send.
const UNTIL: &str = "(until)";

fn lay_down(hub: &Hub, ticket: Ticket, wait_ms: u64, mut request: Request, responder: Responder) {
    let now_ms = hub.parts().clock.now_ms();
    let noted = request
        .header(UNTIL)
        .and_then(|text| text.parse::<u64>().ok());
    let until_ms = noted.unwrap_or(now_ms + wait_ms);
    if noted.is_none() {
        request
            .headers
            .push((UNTIL.to_owned(), until_ms.to_string()));
    }
    let left = Duration::from_millis(until_ms.saturating_sub(now_ms));
    hub.parts()
        .park
        .park(ticket, request, responder, Instant::now() + left);
}

/// A page of events, or 410 for a reader that comes too late.
pub fn event_page(hub: &Hub, query: &EventQuery) -> Result<Value, Problem> {
    let asked = store::EventQuery {
        after: query.after.unwrap_or(0),
        limit: query.limit,
        object: query.object.clone(),
    };
    let page = hub.read(|reader| reader.events(&asked));
    let page = page.map_err(|error| refusal::unreadable(&error))?;
    if let Some(after) = query.after
        && after + 1 < page.oldest
    {
        let words = format!(
            "events up to {} are gone, the oldest is {}; list the objects again and go on after {}",
            page.oldest - 1,
            page.oldest,
            page.oldest - 1
        );
        let mut gone = Problem::new(410, "events-gone", words);
        gone.oldest = Some(page.oldest);
        return Err(gone);
    }
    let items: Vec<Value> = page
        .items
        .iter()
        .map(|logged| wire::event(logged.seq, &logged.entry))
        .collect();
    Ok(json!({"items": items, "next": page.next, "oldest": page.oldest, "newest": page.newest}))
}
