//! Refusals of the scheduler as problems of the API.

use super::title;
use crate::http::wire::{self, Problem};
use crate::hub::{Hub, Unavailable};
use crate::sched::{Refusal, Why};
use serde_json::Value;

/// When a refused request is worth another try, in seconds.
const RETRY_S: u64 = 1;

/// Status and slug of each kind.
fn slug(why: Why) -> (u16, &'static str) {
    match why {
        Why::NotFound => (404, "not-found"),
        Why::Conflict => (409, "conflict"),
        Why::Deleting => (409, "deleting"),
        Why::Reclaiming => (409, "reclaiming"),
        Why::Uid => (409, "uid"),
        Why::Generation => (409, "generation"),
        Why::Held => (409, "held"),
        Why::Shrink => (422, "shrink"),
        Why::CrossDomain => (422, "cross_domain"),
        Why::Unsupported => (422, "unsupported"),
        Why::Invalid => (422, "invalid"),
        Why::Limit => (429, "limit"),
        Why::Backlog => (429, "backlog"),
        Why::Draining => (503, "draining"),
    }
}

/// A refusal in the form of the API. `body` is the request's, to name the fields that differ.
pub fn of(refusal: &Refusal, body: &[u8], hub: &Hub) -> Problem {
    let (status, slug) = slug(refusal.why);
    let mut words = refusal.message.clone();
    let existing = refusal.existing.as_deref();
    if refusal.why == Why::Conflict
        && let Some(volume) = existing.and_then(|record| record.volume())
        && let Ok(asked) = wire::CreateVolume::parse(body)
    {
        let asked = asked.normalised(hub.config().default_class.as_deref());
        let differ = wire::differences(&volume.request, &asked);
        if !differ.is_empty() {
            words = format!("{words}: {}; give yours another name", differ.join(", "));
        }
    }
    let mut problem = Problem::new(status, slug, words);
    if let Some(field) = refusal.field {
        problem = problem.field(field);
    }
    if let Some(record) = existing {
        problem = problem.object(title(record));
    }
    if status == 429 || status == 503 {
        problem = problem.retry_after(RETRY_S);
    }
    problem
}

/// A request that was not even looked at.
pub fn unavailable(why: &Unavailable) -> Problem {
    let (status, slug, words) = match why {
        Unavailable::Busy => (
            429,
            "backlog",
            "more requests wait than are taken up; send this again".to_owned(),
        ),
        Unavailable::Store(words) => (
            503,
            "store",
            format!("nothing was stored, the state can't be written: {words}"),
        ),
        Unavailable::Ending => (503, "draining", "volward is shutting down".to_owned()),
    };
    Problem::new(status, slug, words).retry_after(RETRY_S)
}

/// The store could not be read.
pub fn unreadable(error: &crate::store::StoreError) -> Problem {
    let words = format!("the state can't be read: {error}");
    Problem::new(503, "store", words).retry_after(RETRY_S)
}

/// Keeps a value's shape when something is to be said about an object that is gone.
pub fn deleted(mut last: Value) -> Value {
    last["status"]["phase"] = Value::from("deleted");
    last
}
