//! Query strings.

use super::Problem;
use crate::duration::parse_duration;
use crate::model::{Name, Phase, Uid};

/// The longest `wait` in milliseconds.
const WAIT_MAX_MS: u64 = 60_000;

/// Of one object: `uid`, `wait`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ObjectQuery {
    /// Only if it has that uid.
    pub uid: Option<Uid>,
    /// How long the answer may wait, in milliseconds.
    pub wait_ms: u64,
}

/// Of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListQuery {
    /// Most items.
    pub limit: usize,
    /// Names (in the trash: uids) after this one.
    pub after: Option<String>,
    /// In that phase only.
    pub phase: Option<Phase>,
    /// With that label only: key and value.
    pub label: Option<(String, String)>,
    /// Of that class only.
    pub class: Option<String>,
}

/// Of the events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventQuery {
    /// After this number; `None` begins with the oldest.
    pub after: Option<u64>,
    /// Most items.
    pub limit: usize,
    /// Of that object only, such as `volume/db-01`.
    pub object: Option<String>,
    /// How long the answer may wait for the first one, in milliseconds.
    pub wait_ms: u64,
}

/// `%41` is `A`; `+` is a space where `plus` says so (queries).
///
/// # Errors
/// 400 when an escape is broken or the result isn't UTF-8.
pub fn percent_decode(text: &str, plus: bool) -> Result<String, Problem> {
    let broken = || {
        let shown: String = text.chars().take(80).collect();
        Problem::new(
            400,
            "malformed",
            format!("{shown:?} has a broken percent escape"),
        )
    };
    let mut bytes = text.bytes();
    let mut out = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        match byte {
            b'%' => {
                let mut digit = || bytes.next().and_then(|b| char::from(b).to_digit(16));
                let (high, low) = (digit().ok_or_else(broken)?, digit().ok_or_else(broken)?);
                out.push(u8::try_from(high * 16 + low).map_err(|_| broken())?);
            }
            b'+' if plus => out.push(b' '),
            other => out.push(other),
        }
    }
    String::from_utf8(out).map_err(|_| broken())
}

/// The pairs of a query, each key one of `known` and only once.
fn pairs(query: &str, known: &[&'static str]) -> Result<Vec<(&'static str, String)>, Problem> {
    let mut pairs: Vec<(&'static str, String)> = Vec::new();
    for part in query.split('&').filter(|part| !part.is_empty()) {
        let (key, value) = part.split_once('=').unwrap_or((part, ""));
        let (key, value) = (percent_decode(key, true)?, percent_decode(value, true)?);
        let Some(key) = known.iter().find(|word| **word == key).copied() else {
            let known = known.join(", ");
            return Err(Problem::invalid(
                key.clone(),
                format!("{key:?} is no query parameter here; known ones are {known}"),
            ));
        };
        if pairs.iter().any(|(seen, _)| *seen == key) {
            return Err(Problem::invalid(
                key,
                format!("{key} is given twice; give it once"),
            ));
        }
        pairs.push((key, value));
    }
    Ok(pairs)
}

fn wait(value: &str) -> Result<u64, Problem> {
    match parse_duration(value) {
        Ok(ms) => Ok(ms.min(WAIT_MAX_MS)),
        Err(error) => Err(Problem::invalid("wait", format!("wait {value:?}: {error}"))),
    }
}

fn limit(value: &str) -> Result<usize, Problem> {
    match value.parse() {
        Ok(limit @ 1..=1000) => Ok(limit),
        _ => Err(Problem::invalid(
            "limit",
            format!("limit {value:?} is no number from 1 to 1000"),
        )),
    }
}

impl ObjectQuery {
    /// Reads a query string, without its `?`.
    ///
    /// # Errors
    /// 400 or 422, naming the parameter.
    pub fn parse(query: &str) -> Result<ObjectQuery, Problem> {
        let mut parsed = ObjectQuery::default();
        for (key, value) in pairs(query, &["uid", "wait"])? {
            match key {
                "uid" => {
                    let uid = value.parse();
                    parsed.uid =
                        Some(uid.map_err(|error| Problem::invalid("uid", format!("{error}")))?);
                }
                _ => parsed.wait_ms = wait(&value)?,
            }
        }
        Ok(parsed)
    }
}

impl ListQuery {
    /// Reads a query string, without its `?`.
    ///
    /// # Errors
    /// 400 or 422, naming the parameter.
    pub fn parse(query: &str) -> Result<ListQuery, Problem> {
        let mut parsed = ListQuery {
            limit: 100,
            after: None,
            phase: None,
            label: None,
            class: None,
        };
        for (key, value) in pairs(query, &["limit", "after", "phase", "label", "class"])? {
            match key {
                "limit" => parsed.limit = limit(&value)?,
                "after" => {
                    if value.parse::<Name>().is_err() && value.parse::<Uid>().is_err() {
                        return Err(Problem::invalid(
                            "after",
                            format!("after {value:?} is no name"),
                        ));
                    }
                    parsed.after = Some(value);
                }
                "phase" => {
                    let phase = Phase::parse(&value)
                        .filter(|phase| !phase.is_trash() && *phase != Phase::Gone);
                    parsed.phase = Some(phase.ok_or_else(|| {
                        Problem::invalid(
                            "phase",
                            format!("phase {value:?} is none of pending, creating, ready, updating, deleting, failed"),
                        )
                    })?);
                }
                "label" => {
                    let (key, value) = value.split_once('=').ok_or_else(|| {
                        Problem::invalid(
                            "label",
                            format!("label {value:?} must look like key=value"),
                        )
                    })?;
                    parsed.label = Some((key.to_owned(), value.to_owned()));
                }
                _ => parsed.class = Some(value),
            }
        }
        Ok(parsed)
    }
}

impl EventQuery {
    /// Reads a query string, without its `?`.
    ///
    /// # Errors
    /// 400 or 422, naming the parameter.
    pub fn parse(query: &str) -> Result<EventQuery, Problem> {
        let mut parsed = EventQuery {
            after: None,
            limit: 100,
            object: None,
            wait_ms: 0,
        };
        for (key, value) in pairs(query, &["after", "limit", "object", "wait"])? {
            match key {
                "after" => {
                    let after = value.parse();
                    parsed.after = Some(after.map_err(|_| {
                        Problem::invalid("after", format!("after {value:?} is no event number"))
                    })?);
                }
                "limit" => parsed.limit = limit(&value)?,
                "object" => parsed.object = Some(value),
                _ => parsed.wait_ms = wait(&value)?,
            }
        }
        Ok(parsed)
    }
}
