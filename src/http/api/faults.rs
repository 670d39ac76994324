//! Drills: the fault rules, where the configuration allows them.

use super::json;
use crate::backend::faults::{FaultRules, RuleSet};
use crate::http::front::Answer;
use crate::http::wire::{Problem, parse_body};
use crate::hub::Hub;
use serde_json::json;

fn rules(hub: &Hub) -> Result<&FaultRules, Problem> {
    hub.parts().faults.as_ref().ok_or_else(|| {
        let words = "drills are off; [backend.faults] enabled = true allows them";
        Problem::new(404, "not-found", words)
    })
}

pub fn get(hub: &Hub) -> Result<Answer, Problem> {
    let rules = rules(hub)?;
    Ok(json(
        200,
        &json!({"rules": rules.list(), "hanging": rules.hanging()}),
    ))
}

pub fn put(hub: &Hub, body: &[u8]) -> Result<Answer, Problem> {
    let rules = rules(hub)?;
    parse_body(body)?;
    let set: RuleSet = serde_json::from_slice(body)
        .map_err(|error| Problem::invalid("rules", format!("{error}")))?;
    log::warn!("drill: {} fault rules are set", set.rules.len());
    rules.set(set.rules);
    get(hub)
}

pub fn delete(hub: &Hub) -> Result<Answer, Problem> {
    rules(hub)?.clear();
    log::warn!("drill: over, what hung by a rule goes on");
    get(hub)
}
