//! Reading beside the loop: a connection of its own that can't write, and pages by key.
//!
//! A reader sees the last commit, is never blocked by the writer and never blocks it. Every call
//! is bounded.

use super::error::{At as _, Result};
use super::events::{self, EventPage, EventQuery};
use super::rows::{self, SNAPSHOT, Sql, VOLUME, signed};
use super::{Db, PAGE_MAX, findings, tally};
use crate::model::{Name, ObjectId, Phase, Record, Uid};
use rusqlite::{Connection, OpenFlags, Row, params};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

/// One reader. Cheap enough for one per thread; may be sent to another thread.
#[derive(Debug)]
pub struct Reader {
    db: Db,
}

/// A part of a list, by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// The records, by name. Fewer than asked for (even none) doesn't mean that the list ends
    /// here: a filter that few objects pass is given up after [`SCAN_MAX`] others.
    pub items: Vec<Record>,
    /// Where to go on; `None` at the end of the list.
    pub next: Option<Name>,
}

/// A part of the trash, oldest volume first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrashPage {
    /// The entries.
    pub items: Vec<Record>,
    /// Where to go on; `None` at the end of the list.
    pub next: Option<Uid>,
}

/// Which volumes; empty: all that aren't in the trash.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VolumeQuery {
    /// Only names behind this one.
    pub after: Option<Name>,
    /// At most this many, 1 to 1000.
    pub limit: usize,
    /// Only in this phase.
    pub phase: Option<Phase>,
    /// Only of this class.
    pub class: Option<String>,
    /// Only with this label.
    pub label: Option<(String, String)>,
}

/// Which snapshots; empty: all.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SnapshotQuery {
    /// Only names behind this one.
    pub after: Option<Name>,
    /// At most this many, 1 to 1000.
    pub limit: usize,
    /// Only in this phase.
    pub phase: Option<Phase>,
    /// Only of the volumes that had this name then.
    pub volume: Option<Name>,
    /// Only with this label.
    pub label: Option<(String, String)>,
}

/// At most this many rows are looked at for one page.
pub const SCAN_MAX: usize = 20_000;

impl Reader {
    /// Opens a state file for reading. A [`super::Store`] must have it open.
    ///
    /// # Errors
    /// When it can't be read.
    pub fn open(path: &Path) -> Result<Reader> {
        let doing = "opening it for reading";
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let conn = Connection::open_with_flags(path, flags).at(path, doing)?;
        conn.busy_timeout(Duration::from_millis(250))
            .at(path, doing)?;
        conn.set_prepared_statement_cache_capacity(64);
        conn.execute_batch("PRAGMA query_only = ON; PRAGMA cache_size = -2048;")
            .at(path, doing)?;
        let path = path.to_owned();
        Ok(Reader {
            db: Db { conn, path },
        })
    }

    /// Volumes by name, those in the trash not.
    ///
    /// # Errors
    /// When they can't be read, or a row is damaged.
    pub fn volumes(&self, query: &VolumeQuery) -> Result<Page> {
        scan(
            &self.db,
            &VOLUME,
            &Scan {
                after: query.after.as_ref(),
                limit: query.limit,
                phase: query.phase,
                group: query.class.as_deref(),
                label: query.label.as_ref(),
            },
        )
    }

    /// Snapshots by name.
    ///
    /// # Errors
    /// When they can't be read, or a row is damaged.
    pub fn snapshots(&self, query: &SnapshotQuery) -> Result<Page> {
        scan(
            &self.db,
            &SNAPSHOT,
            &Scan {
                after: query.after.as_ref(),
                limit: query.limit,
                phase: query.phase,
                group: query.volume.as_ref().map(Name::as_str),
                label: query.label.as_ref(),
            },
        )
    }

    /// Trash entries and carriers with a uid behind `after`, by uid; `limit` is 1 to 1000.
    ///
    /// # Errors
    /// When they can't be read, or a row is damaged.
    pub fn trash(&self, after: Option<Uid>, limit: usize) -> Result<TrashPage> {
        const SQL: &str = "SELECT uid, name, phase, json FROM volume INDEXED BY volume_trash
            WHERE named = 0 AND uid > ?1 ORDER BY uid LIMIT ?2";
        let limit = limit.clamp(1, PAGE_MAX);
        let after = after.map_or_else(String::new, |uid| uid.to_string());
        let one_more = signed(limit as u64 + 1);
        let mut items = rows::select(&self.db, VOLUME.kind, SQL, params![after, one_more])?;
        let more = items.len() > limit;
        items.truncate(limit);
        let next = items.last().filter(|_| more).map(|last| last.id.uid());
        Ok(TrashPage { items, next })
    }

    /// The volume of that name that isn't in the trash.
    ///
    /// # Errors
    /// When it can't be read, or its row is damaged.
    pub fn volume_named(&self, name: &Name) -> Result<Option<Record>> {
        rows::by_name(&self.db, &VOLUME, name)
    }

    /// The snapshot of that name.
    ///
    /// # Errors
    /// When it can't be read, or its row is damaged.
    pub fn snapshot_named(&self, name: &Name) -> Result<Option<Record>> {
        rows::by_name(&self.db, &SNAPSHOT, name)
    }

    /// The object with that id, in the trash or not.
    ///
    /// # Errors
    /// When it can't be read, or its row is damaged.
    pub fn by_id(&self, id: ObjectId) -> Result<Option<Record>> {
        rows::by_id(&self.db, id)
    }

    /// The names of the volumes that were made from that snapshot and aren't in the trash, by
    /// age; at most 1000.
    ///
    /// # Errors
    /// When they can't be read.
    pub fn children(&self, snapshot: Uid) -> Result<Vec<Name>> {
        const SQL: &str = "SELECT uid, name, phase, json FROM volume INDEXED BY volume_source
            WHERE source = ?1 AND named = 1 ORDER BY uid LIMIT ?2";
        let limit = signed(PAGE_MAX as u64);
        let found = rows::select(
            &self.db,
            VOLUME.kind,
            SQL,
            params![snapshot.to_string(), limit],
        )?;
        Ok(found.into_iter().map(|record| record.name).collect())
    }

    /// Events by number.
    ///
    /// # Errors
    /// When they can't be read.
    pub fn events(&self, query: &EventQuery) -> Result<EventPage> {
        let view = self
            .db
            .conn
            .unchecked_transaction()
            .at(&self.db.path, "reading the event log")?;
        let page = events::page(&self.db, query);
        drop(view);
        page
    }

    /// How many objects of each kind are in each phase.
    ///
    /// # Errors
    /// When they can't be read.
    pub fn counts(&self) -> Result<BTreeMap<(&'static str, Phase), u64>> {
        tally::counts(&self.db)
    }

    /// The doctor's findings: key → JSON.
    ///
    /// # Errors
    /// When they can't be read.
    pub fn findings(&self) -> Result<BTreeMap<String, String>> {
        findings(&self.db)
    }
}

/// What a list is filtered by; `group` is the class of volumes and the volume of snapshots.
struct Scan<'a> {
    after: Option<&'a Name>,
    limit: usize,
    phase: Option<Phase>,
    group: Option<&'a str>,
    label: Option<&'a (String, String)>,
}

impl Scan<'_> {
    /// Whether a row passes, by its columns alone.
    fn passes(&self, row: &Row<'_>, group: usize) -> rusqlite::Result<bool> {
        if let Some(phase) = self.phase
            && row.get_ref(2)?.as_str()? != phase.as_str()
        {
            return Ok(false);
        }
        if let Some(wanted) = self.group
            && row.get_ref(group)?.as_str_or_null()? != Some(wanted)
        {
            return Ok(false);
        }
        let Some((key, value)) = self.label else {
            return Ok(true);
        };
        let Some(labels) = row.get_ref(4)?.as_str_or_null()? else {
            return Ok(false);
        };
        let labels: BTreeMap<String, String> = serde_json::from_str(labels).map_err(|error| {
            let kind = rusqlite::types::Type::Text;
            rusqlite::Error::FromSqlConversionFailure(4, kind, Box::new(error))
        })?;
        Ok(labels.get(key) == Some(value))
    }
}

/// Walks the index that narrows most in the order of names, and gives up after `SCAN_MAX` rows.
fn scan(db: &Db, sql: &'static Sql, scan: &Scan<'_>) -> Result<Page> {
    let doing = "listing";
    let group_column = if sql.kind == VOLUME.kind { 5 } else { 6 };
    let phase = scan.phase.map(Phase::as_str);
    let (text, key) = match (scan.group, phase) {
        (_, Some(phase)) if phase != "ready" => (sql.scan_phase, Some(phase)),
        (Some(group), _) => (sql.scan_group, Some(group)),
        (None, _) => (sql.scan, None),
    };
    let limit = scan.limit.clamp(1, PAGE_MAX);
    let after = scan.after.map_or("", Name::as_str);
    let mut select = db.conn.prepare_cached(text).at(&db.path, doing)?;
    let mut found = select.query(params![after, key]).at(&db.path, doing)?;
    let (mut items, mut seen, mut last) = (Vec::new(), 0, None);
    while let Some(row) = found.next().at(&db.path, doing)? {
        if items.len() == limit || seen == SCAN_MAX {
            return Ok(Page { items, next: last });
        }
        seen += 1;
        if scan.passes(row, group_column).at(&db.path, doing)? {
            let record = rows::record(db, sql.kind, row)?;
            last = Some(record.name.clone());
            items.push(record);
        } else if seen == SCAN_MAX {
            last = Some(rows::record(db, sql.kind, row)?.name);
        }
    }
    Ok(Page { items, next: None })
}
