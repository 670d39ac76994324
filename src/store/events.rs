//! The event log: numbered without gaps, trimmed from its old end only.
//!
//! Owns the table `event`. Knows entries, not what they mean.

use super::Db;
use super::error::{At as _, Result};
use super::rows::{opt_uint, signed, uint};
use crate::model::{Entry, Millis};
use rusqlite::params;

/// One line of the event log with its number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Logged {
    /// Its number; the first is 1, and there are no gaps.
    pub seq: u64,
    /// The line.
    pub entry: Entry,
}

/// Which events a reader wants.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EventQuery {
    /// Only those with a higher number.
    pub after: u64,
    /// At most this many, 1 to 1000.
    pub limit: usize,
    /// Only those of this object, such as `volume/db-01`.
    pub object: Option<String>,
}

/// Some events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventPage {
    /// The events, oldest first.
    pub items: Vec<Logged>,
    /// Where to go on: every event up to this number has been looked at.
    pub next: u64,
    /// The number of the oldest event that is kept; 1 if there was none yet. A reader whose
    /// `after` is below `oldest - 1` has missed some.
    pub oldest: u64,
    /// The number of the newest event; 0 if there was none yet. A reader whose `after` is above
    /// has seen another log (the state file was made anew).
    pub newest: u64,
}

/// At most this many events go per call of `trim`, so that the loop isn't held up.
pub const TRIM_MAX: u64 = 1000;

/// Appends.
pub fn append(db: &Db, seq: u64, entry: &Entry) -> Result<()> {
    let doing = "writing the event log";
    let mut add = db
        .conn
        .prepare_cached(
            "INSERT INTO event (seq, at, object, warning, reason, message)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
        )
        .at(&db.path, doing)?;
    let Entry {
        at,
        object,
        warning,
        reason,
        message,
    } = entry;
    add.execute(params![
        signed(seq),
        signed(at.0),
        object,
        warning,
        reason,
        message
    ])
    .at(&db.path, doing)?;
    Ok(())
}

/// The numbers of the oldest and the newest event; (1, 0) if there is none.
pub fn span(db: &Db) -> Result<(u64, u64)> {
    // Two subqueries: each is one step down the tree; min and max in one would read it all.
    let mut ends = db
        .conn
        .prepare_cached("SELECT (SELECT min(seq) FROM event), (SELECT max(seq) FROM event)")
        .at(&db.path, "reading the event log")?;
    let (oldest, newest): (Option<u64>, Option<u64>) = ends
        .query_row([], |row| Ok((opt_uint(row, 0)?, opt_uint(row, 1)?)))
        .at(&db.path, "reading the event log")?;
    Ok((oldest.unwrap_or(1), newest.unwrap_or(0)))
}

/// A page. The caller holds a read transaction, so that its parts belong together.
pub fn page(db: &Db, query: &EventQuery) -> Result<EventPage> {
    let doing = "reading the event log";
    let (oldest, newest) = span(db)?;
    let limit = query.limit.clamp(1, super::PAGE_MAX);
    let sql = if query.object.is_some() {
        "SELECT seq, at, object, warning, reason, message FROM event
         WHERE object = ?3 AND seq > ?1 ORDER BY seq LIMIT ?2"
    } else {
        "SELECT seq, at, object, warning, reason, message FROM event
         WHERE seq > ?1 AND ?3 IS NULL ORDER BY seq LIMIT ?2"
    };
    let mut select = db.conn.prepare_cached(sql).at(&db.path, doing)?;
    let items = select
        .query_map(
            params![signed(query.after), signed(limit as u64), query.object],
            |row| {
                Ok(Logged {
                    seq: uint(row, 0)?,
                    entry: Entry {
                        at: Millis(uint(row, 1)?),
                        object: row.get(2)?,
                        warning: row.get(3)?,
                        reason: row.get(4)?,
                        message: row.get(5)?,
                    },
                })
            },
        )
        .at(&db.path, doing)?
        .collect::<rusqlite::Result<Vec<Logged>>>()
        .at(&db.path, doing)?;
    let next = match items.last() {
        Some(last) if items.len() == limit => last.seq,
        _ => newest.max(query.after),
    };
    Ok(EventPage {
        items,
        next,
        oldest,
        newest,
    })
}

/// Removes the oldest events beyond `max` and those from before `keep_before`, at most
/// [`TRIM_MAX`] of them, and never the newest: it holds the number. Says how many went.
pub fn trim(db: &Db, max: u64, keep_before: Millis) -> Result<u64> {
    let doing = "trimming the event log";
    let (oldest, newest) = span(db)?;
    if newest == 0 {
        return Ok(0);
    }
    let beyond = newest.saturating_sub(max.max(1));
    let bound = newest.saturating_sub(1).min(oldest + TRIM_MAX - 1);
    // The first event that is young enough ends it: a log with holes would be a lie.
    let young: Option<u64> = db
        .conn
        .prepare_cached("SELECT min(seq) FROM event WHERE seq <= ?1 AND at >= ?2")
        .and_then(|mut first| {
            first.query_row(params![signed(bound), signed(keep_before.0)], |row| {
                opt_uint(row, 0)
            })
        })
        .at(&db.path, doing)?;
    let old = young.map_or(bound, |seq| seq - 1);
    let last = old.max(beyond).min(bound);
    let gone = db
        .conn
        .prepare_cached("DELETE FROM event WHERE seq <= ?1")
        .and_then(|mut delete| delete.execute([signed(last)]))
        .at(&db.path, doing)?;
    Ok(gone as u64)
}
