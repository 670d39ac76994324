//! Records as rows: the JSON is the truth, the columns beside it are derived from it for the
//! indexes.
//!
//! Owns the tables `volume` and `snapshot`, which have the same columns. What is read is checked
//! here: a row that is no record is `Damaged` and named, never a panic.

use super::Db;
use super::error::{At as _, Result, StoreError, damaged};
use super::tally::{Deltas, Key, Spot};
use crate::model::{Name, ObjectId, Phase, Record, Source, Uid};
use rusqlite::types::Type;
use rusqlite::{OptionalExtension as _, Params, Row, params};
use std::collections::BTreeSet;

/// The statements of one of the two tables.
#[derive(Debug)]
pub struct Sql {
    pub kind: &'static str,
    find: &'static str,
    owner: &'static str,
    displace: &'static str,
    touch: &'static str,
    step: &'static str,
    update: &'static str,
    insert: &'static str,
    delete: &'static str,
    by_uid: &'static str,
    by_name: &'static str,
    unsettled: &'static str,
    pub scan: &'static str,
    pub scan_phase: &'static str,
    /// By class (volumes) or by volume (snapshots).
    pub scan_group: &'static str,
}

macro_rules! statements {
    ($table:literal, $group:literal) => {
        Sql {
            kind: $table,
            find: concat!(
                "SELECT id, name, named, phase, class, domain, root, namespace, settled, source, ",
                "source_image, of_volume FROM ",
                $table,
                " WHERE uid = ?1"
            ),
            owner: concat!(
                "SELECT id, uid FROM ",
                $table,
                " WHERE named = 1 AND name = ?1"
            ),
            displace: concat!("UPDATE ", $table, " SET named = 0 WHERE id = ?1"),
            touch: concat!(
                "UPDATE ",
                $table,
                " SET labels = ?2, json = ?3 WHERE id = ?1"
            ),
            step: concat!(
                "UPDATE ",
                $table,
                " SET labels = ?2, json = ?3, phase = ?4, settled = ?5 WHERE id = ?1"
            ),
            update: concat!(
                "UPDATE ",
                $table,
                " SET labels = ?2, json = ?3, name = ?4, named = ?5, ",
                "phase = ?6, class = ?7, domain = ?8, root = ?9, namespace = ?10, settled = ?11, ",
                "source = ?12, source_image = ?13, of_volume = ?14 WHERE id = ?1"
            ),
            insert: concat!(
                "INSERT INTO ",
                $table,
                " (uid, labels, json, name, named, phase, class, domain, ",
                "root, namespace, settled, source, source_image, of_volume) ",
                "VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14)"
            ),
            delete: concat!("DELETE FROM ", $table, " WHERE id = ?1"),
            by_uid: concat!(
                "SELECT uid, name, phase, json FROM ",
                $table,
                " WHERE uid = ?1"
            ),
            by_name: concat!(
                "SELECT uid, name, phase, json FROM ",
                $table,
                " WHERE named = 1 AND name = ?1"
            ),
            unsettled: concat!(
                "SELECT uid, name, phase, json FROM ",
                $table,
                " INDEXED BY ",
                $table,
                "_unsettled WHERE settled = 0 ORDER BY uid"
            ),
            scan: concat!(
                "SELECT uid, name, phase, json, labels, class, of_volume FROM ",
                $table,
                " INDEXED BY ",
                $table,
                "_name WHERE named = 1 AND name > ?1 AND ?2 IS NULL ",
                "ORDER BY name"
            ),
            scan_phase: concat!(
                "SELECT uid, name, phase, json, labels, class, of_volume FROM ",
                $table,
                " INDEXED BY ",
                $table,
                "_phase WHERE named = 1 AND phase <> 'ready' AND phase = ?2 AND name > ?1 ",
                "ORDER BY name"
            ),
            scan_group: concat!(
                "SELECT uid, name, phase, json, labels, class, of_volume FROM ",
                $table,
                " INDEXED BY ",
                $table,
                "_",
                $group,
                " WHERE named = 1 AND ",
                $group,
                " = ?2 AND name > ?1 ORDER BY name"
            ),
        }
    };
}

pub const VOLUME: Sql = statements!("volume", "class");
pub const SNAPSHOT: Sql = statements!("snapshot", "of_volume");

impl Sql {
    pub fn of(id: ObjectId) -> &'static Sql {
        match id {
            ObjectId::Volume(_) => &VOLUME,
            ObjectId::Snapshot(_) => &SNAPSHOT,
        }
    }
}

/// What the open transaction has changed beside the rows.
#[derive(Debug, Default)]
pub struct Pending {
    /// Changes of the counts.
    pub deltas: Deltas,
    /// Objects that lost their name to another one of this transaction and have not been written
    /// themselves yet. A batch comes in any order; at its commit nobody may be left here.
    pub displaced: BTreeSet<ObjectId>,
}

/// The columns that indexes and counts need.
#[derive(Debug, PartialEq, Eq)]
struct Columns {
    name: String,
    named: bool,
    phase: Phase,
    spot: Spot,
    settled: bool,
    source: Option<String>,
    source_image: Option<String>,
    of_volume: Option<String>,
}

impl Columns {
    fn of(record: &Record) -> Columns {
        let source = record.source();
        Columns {
            name: record.name.to_string(),
            named: !record.phase.is_trash() && record.phase != Phase::Gone,
            phase: record.phase,
            spot: Spot::of(&record.place),
            settled: record.is_settled(),
            source: source
                .and_then(Source::object)
                .map(|id| id.uid().to_string()),
            source_image: source.and_then(Source::image).map(|uid| uid.to_string()),
            of_volume: record.snapshot().map(|body| body.volume.to_string()),
        }
    }

    fn differs_in_phase_only(&self, new: &Columns) -> bool {
        self.named == new.named
            && self.name == new.name
            && self.spot == new.spot
            && self.source == new.source
            && self.source_image == new.source_image
            && self.of_volume == new.of_volume
    }

    fn key(&self, kind: &'static str) -> Key {
        Key {
            kind,
            phase: self.phase,
            spot: self.spot.clone(),
        }
    }
}

/// Stores a record in the open transaction, new or changed.
pub fn put(db: &Db, pending: &mut Pending, record: &Record) -> Result<()> {
    let sql = Sql::of(record.id);
    if record.volume().is_some() != matches!(record.id, ObjectId::Volume(_)) {
        let title = record.title();
        return Err(StoreError::Internal(format!(
            "{title}: its id and its body differ in kind"
        )));
    }
    let json = serde_json::to_string(record)
        .map_err(|error| StoreError::Internal(format!("{}: {error}", record.title())))?;
    let labels = (!record.labels.is_empty())
        .then(|| serde_json::to_string(&record.labels))
        .transpose()
        .map_err(|error| StoreError::Internal(format!("{}: {error}", record.title())))?;
    let new = Columns::of(record);
    let old = find(db, sql, record.id)?;
    pending.displaced.remove(&record.id);
    match &old {
        // Most writes change no column or move on by a phase: the other indexes are left alone.
        Some((id, old)) if *old == new => {
            execute(db, sql.touch, params![id, labels, json])?;
        }
        Some((id, old)) if old.differs_in_phase_only(&new) => {
            let phase = new.phase.as_str();
            execute(db, sql.step, params![id, labels, json, phase, new.settled])?;
        }
        Some((id, _)) => {
            take_name(db, sql, pending, record, &new)?;
            write(db, sql.update, id, (labels, json), &new)?;
        }
        None => {
            take_name(db, sql, pending, record, &new)?;
            write(
                db,
                sql.insert,
                &record.id.uid().to_string(),
                (labels, json),
                &new,
            )?;
        }
    }
    let old = old.map(|(_, old)| old.key(sql.kind));
    let new = new.key(sql.kind);
    if old.as_ref() != Some(&new) {
        if let Some(old) = old {
            *pending.deltas.entry(old).or_default() -= 1;
        }
        *pending.deltas.entry(new).or_default() += 1;
    }
    Ok(())
}

/// Writes all columns; `id` is the row of an update, the uid of an insert.
fn write(
    db: &Db,
    text: &str,
    id: &dyn rusqlite::ToSql,
    (labels, json): (Option<String>, String),
    new: &Columns,
) -> Result<()> {
    let all = params![
        id,
        labels,
        json,
        new.name,
        new.named,
        new.phase.as_str(),
        new.spot.class,
        new.spot.domain,
        new.spot.root,
        new.spot.namespace,
        new.settled,
        new.source,
        new.source_image,
        new.of_volume
    ];
    execute(db, text, all)
}

fn execute(db: &Db, sql: &str, params: impl Params) -> Result<()> {
    db.conn
        .prepare_cached(sql)
        .and_then(|mut statement| statement.execute(params))
        .map(drop)
        .at(&db.path, "writing a record")
}

/// Takes the name from whoever else has it; that one must be written in the same transaction.
fn take_name(
    db: &Db,
    sql: &Sql,
    pending: &mut Pending,
    record: &Record,
    new: &Columns,
) -> Result<()> {
    let doing = "writing a record";
    if !new.named {
        return Ok(());
    }
    let owner: Option<(i64, String)> = db
        .conn
        .prepare_cached(sql.owner)
        .and_then(|mut owner| {
            owner
                .query_row([record.name.as_str()], |row| Ok((row.get(0)?, row.get(1)?)))
                .optional()
        })
        .at(&db.path, doing)?;
    let Some((id, uid)) = owner else {
        return Ok(());
    };
    let uid: Uid = uid
        .parse()
        .map_err(|error| damaged(&db.path, &format!("row {} {uid}: {error}", sql.kind)))?;
    if uid == record.id.uid() {
        return Ok(());
    }
    db.conn
        .prepare_cached(sql.displace)
        .and_then(|mut displace| displace.execute([id]))
        .at(&db.path, doing)?;
    pending.displaced.insert(match record.id {
        ObjectId::Volume(_) => ObjectId::Volume(uid),
        ObjectId::Snapshot(_) => ObjectId::Snapshot(uid),
    });
    Ok(())
}

/// Removes a record in the open transaction; says whether it was there.
pub fn remove(db: &Db, pending: &mut Pending, id: ObjectId) -> Result<bool> {
    let sql = Sql::of(id);
    pending.displaced.remove(&id);
    let Some((row, old)) = find(db, sql, id)? else {
        return Ok(false);
    };
    db.conn
        .prepare_cached(sql.delete)
        .and_then(|mut delete| delete.execute([row]))
        .at(&db.path, "removing a record")?;
    *pending.deltas.entry(old.key(sql.kind)).or_default() -= 1;
    Ok(true)
}

fn find(db: &Db, sql: &Sql, id: ObjectId) -> Result<Option<(i64, Columns)>> {
    db.conn
        .prepare_cached(sql.find)
        .and_then(|mut find| {
            find.query_row([id.uid().to_string()], |row| {
                let phase: String = row.get(3)?;
                let phase = Phase::parse(&phase).ok_or_else(|| {
                    let error = format!("{phase:?} is no phase");
                    rusqlite::Error::FromSqlConversionFailure(3, Type::Text, error.into())
                })?;
                let columns = Columns {
                    name: row.get(1)?,
                    named: row.get(2)?,
                    phase,
                    spot: Spot {
                        class: row.get(4)?,
                        domain: row.get(5)?,
                        root: row.get(6)?,
                        namespace: row.get(7)?,
                    },
                    settled: row.get(8)?,
                    source: row.get(9)?,
                    source_image: row.get(10)?,
                    of_volume: row.get(11)?,
                };
                Ok((row.get(0)?, columns))
            })
            .optional()
        })
        .at(&db.path, &format!("reading {} {}", sql.kind, id.uid()))
}

/// The record of a row whose first columns are uid, name, phase and json.
pub fn record(db: &Db, kind: &'static str, row: &Row<'_>) -> Result<Record> {
    let doing = "reading a record";
    let uid: String = row.get(0).at(&db.path, doing)?;
    let bad = |cause: String| damaged(&db.path, &format!("row {kind} {uid}: {cause}"));
    let text = |at: usize| -> Result<&str> {
        let value = row.get_ref(at).at(&db.path, doing)?;
        value.as_str().map_err(|error| bad(error.to_string()))
    };
    let record: Record = serde_json::from_str(text(3)?).map_err(|error| bad(error.to_string()))?;
    let is_volume = matches!(record.id, ObjectId::Volume(_));
    let same = record.id.kind() == kind
        && record.volume().is_some() == is_volume
        && record.id.uid().to_string() == uid
        && record.name.as_str() == text(1)?
        && record.phase.as_str() == text(2)?;
    if same {
        Ok(record)
    } else {
        Err(bad("its record says something else than its columns".into()))
    }
}

/// The records of a statement whose rows begin with uid, name, phase and json.
pub fn select(db: &Db, kind: &'static str, sql: &str, params: impl Params) -> Result<Vec<Record>> {
    let doing = "reading records";
    let mut select = db.conn.prepare_cached(sql).at(&db.path, doing)?;
    let mut rows = select.query(params).at(&db.path, doing)?;
    let mut records = Vec::new();
    while let Some(row) = rows.next().at(&db.path, doing)? {
        records.push(record(db, kind, row)?);
    }
    Ok(records)
}

/// The object of that name that isn't in the trash.
pub fn by_name(db: &Db, sql: &Sql, name: &Name) -> Result<Option<Record>> {
    select(db, sql.kind, sql.by_name, [name.as_str()]).map(|mut rows| rows.pop())
}

/// The object with that id, in the trash or not.
pub fn by_id(db: &Db, id: ObjectId) -> Result<Option<Record>> {
    let sql = Sql::of(id);
    select(db, sql.kind, sql.by_uid, [id.uid().to_string()]).map(|mut rows| rows.pop())
}

/// Everything that isn't settled.
pub fn unsettled(db: &Db) -> Result<Vec<Record>> {
    let mut all = select(db, VOLUME.kind, VOLUME.unsettled, [])?;
    all.append(&mut select(db, SNAPSHOT.kind, SNAPSHOT.unsettled, [])?);
    Ok(all)
}

/// Volumes and trash entries that were made from that volume, its snapshots, or that snapshot.
pub fn children(db: &Db, of: Uid, limit: usize) -> Result<Vec<Record>> {
    const SQL: &str = "SELECT uid, name, phase, json FROM volume
        WHERE source_image = ?1 OR source = ?1 ORDER BY uid LIMIT ?2";
    let limit = signed(limit as u64);
    select(db, VOLUME.kind, SQL, params![of.to_string(), limit])
}

/// Reads every record, one at a time, and checks that its columns are those that it would get.
pub fn check(db: &Db) -> Result<()> {
    let doing = "checking the records";
    for sql in [&VOLUME, &SNAPSHOT] {
        let text = format!("SELECT uid, name, phase, json FROM {}", sql.kind);
        let mut all = db.conn.prepare(&text).at(&db.path, doing)?;
        let mut found = all.query([]).at(&db.path, doing)?;
        while let Some(row) = found.next().at(&db.path, doing)? {
            let record = record(db, sql.kind, row)?;
            let columns = find(db, sql, record.id)?.map(|(_, columns)| columns);
            if columns != Some(Columns::of(&record)) {
                let cause = format!(
                    "row {} {}: its columns are wrong",
                    sql.kind,
                    record.id.uid()
                );
                return Err(damaged(&db.path, &cause));
            }
        }
    }
    Ok(())
}

/// SQLite's integers are signed; times and numbers stay at the end instead of wrapping.
pub fn signed(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// A column that is never negative.
pub fn uint(row: &Row<'_>, at: usize) -> rusqlite::Result<u64> {
    let n: i64 = row.get(at)?;
    u64::try_from(n).map_err(|_| rusqlite::Error::IntegralValueOutOfRange(at, n))
}

/// A column that is never negative and may be empty.
pub fn opt_uint(row: &Row<'_>, at: usize) -> rusqlite::Result<Option<u64>> {
    let n: Option<i64> = row.get(at)?;
    n.map(|n| u64::try_from(n).map_err(|_| rusqlite::Error::IntegralValueOutOfRange(at, n)))
        .transpose()
}
