//! How many objects of each kind stand where: kept with the rows, in the same commit, so that a
//! start doesn't count a million of them.
//!
//! Owns the table `tally`. Knows places and phases, not records.

use super::Db;
use super::error::{At as _, Result, damaged};
use super::rows::uint;
use crate::model::{Phase, Place};
use rusqlite::params;
use std::collections::BTreeMap;

/// What is counted apart: phases for the metrics, places for "is this class in use?".
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    pub kind: &'static str,
    pub phase: Phase,
    pub spot: Spot,
}

/// The part of a place that a class says; an absent namespace is the empty text.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Spot {
    pub class: String,
    pub domain: String,
    pub root: String,
    pub namespace: String,
}

impl Spot {
    pub fn of(place: &Place) -> Spot {
        Spot {
            class: place.class.clone(),
            domain: place.domain.clone(),
            root: place.root.clone(),
            namespace: place.namespace.clone().unwrap_or_default(),
        }
    }
}

/// How many volumes, trash entries and snapshots a class has placed somewhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClassUse {
    /// The class.
    pub class: String,
    /// The domain.
    pub domain: String,
    /// The pool or root directory.
    pub root: String,
    /// The namespace in the pool.
    pub namespace: Option<String>,
    /// How many.
    pub count: u64,
}

/// The changes of the open transaction; written once, at its commit.
pub type Deltas = BTreeMap<Key, i64>;

/// Writes the changes.
pub fn flush(db: &Db, deltas: &Deltas) -> Result<()> {
    let doing = "counting objects";
    let mut add = db
        .conn
        .prepare_cached(
            "INSERT INTO tally (kind, phase, class, domain, root, namespace, n)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, max(?7, 0))
             ON CONFLICT DO UPDATE SET n = n + ?7",
        )
        .at(&db.path, doing)?;
    for (key, delta) in deltas.iter().filter(|(_, delta)| **delta != 0) {
        let spot = &key.spot;
        add.execute(params![
            key.kind,
            key.phase.as_str(),
            spot.class,
            spot.domain,
            spot.root,
            spot.namespace,
            delta
        ])
        .at(&db.path, doing)?;
    }
    if deltas.values().any(|delta| *delta < 0) {
        db.conn
            .prepare_cached("DELETE FROM tally WHERE n = 0")
            .and_then(|mut clear| clear.execute([]))
            .at(&db.path, doing)?;
    }
    Ok(())
}

/// Objects by kind and phase, as committed or written.
pub fn counts(db: &Db) -> Result<BTreeMap<(&'static str, Phase), u64>> {
    let doing = "reading the counts";
    let mut all = db
        .conn
        .prepare_cached("SELECT kind, phase, sum(n) FROM tally GROUP BY kind, phase")
        .at(&db.path, doing)?;
    let mut rows = all.query([]).at(&db.path, doing)?;
    let mut counts = BTreeMap::new();
    while let Some(row) = rows.next().at(&db.path, doing)? {
        let kind: String = row.get(0).at(&db.path, doing)?;
        let phase: String = row.get(1).at(&db.path, doing)?;
        let n: i64 = row.get(2).at(&db.path, doing)?;
        let key = (kind_of(&kind), Phase::parse(&phase), u64::try_from(n));
        let (Some(kind), Some(phase), Ok(n)) = key else {
            let row = format!("row {kind} {phase} {n} of the counts is none of volward's");
            return Err(damaged(&db.path, &row));
        };
        counts.insert((kind, phase), n);
    }
    Ok(counts)
}

fn kind_of(word: &str) -> Option<&'static str> {
    ["volume", "snapshot"]
        .into_iter()
        .find(|kind| *kind == word)
}

/// Which classes have placed objects, and where.
pub fn classes(db: &Db) -> Result<Vec<ClassUse>> {
    let doing = "reading which classes are in use";
    let mut all = db
        .conn
        .prepare_cached(
            "SELECT class, domain, root, namespace, sum(n) FROM tally
             GROUP BY class, domain, root, namespace ORDER BY class, domain, root, namespace",
        )
        .at(&db.path, doing)?;
    let rows = all
        .query_map([], |row| {
            let namespace: String = row.get(3)?;
            Ok(ClassUse {
                class: row.get(0)?,
                domain: row.get(1)?,
                root: row.get(2)?,
                namespace: Some(namespace).filter(|text| !text.is_empty()),
                count: uint(row, 4)?,
            })
        })
        .at(&db.path, doing)?;
    rows.collect::<rusqlite::Result<_>>().at(&db.path, doing)
}

/// Whether the counts are those of the rows. Reads all rows.
pub fn is_right(db: &Db) -> Result<bool> {
    const WRONG: &str = "
        WITH real AS (
            SELECT 'volume' AS kind, phase, class, domain, root, namespace, count(*) AS n
            FROM volume GROUP BY phase, class, domain, root, namespace
            UNION ALL
            SELECT 'snapshot', phase, class, domain, root, namespace, count(*)
            FROM snapshot GROUP BY phase, class, domain, root, namespace)
        SELECT EXISTS (SELECT * FROM real
                       EXCEPT SELECT kind, phase, class, domain, root, namespace, n FROM tally)
            OR EXISTS (SELECT kind, phase, class, domain, root, namespace, n FROM tally
                       EXCEPT SELECT * FROM real)";
    let wrong: bool = db
        .conn
        .query_row(WRONG, [], |row| row.get(0))
        .at(&db.path, "checking the counts")?;
    Ok(!wrong)
}
