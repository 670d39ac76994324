//! The file itself: made whole or not at all, checked before it is trusted, migrated in one
//! transaction.
//!
//! Owns the schema and its versions. Knows records only to migrate them.

use super::error::{At as _, Result, StoreError, damaged, of_io};
use super::{Db, OpenOptions, rows, tally};
use crate::model::Record;
use rusqlite::{Connection, OpenFlags, OptionalExtension as _, params};
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The schema that this program writes.
pub const SCHEMA: u64 = 1;

/// `volume` and `snapshot` have the same columns. `named` is 1 for what owns its name: all but
/// the trash. The index by phase is without what is ready, so it stays small. `source` is the object that a volume was made from, `source_image` the image
/// beneath; `of_volume` the volume of a snapshot, by name.
const OBJECTS: &str = "
CREATE TABLE KIND (
    id INTEGER PRIMARY KEY, uid TEXT NOT NULL, name TEXT NOT NULL, named INTEGER NOT NULL,
    phase TEXT NOT NULL, class TEXT NOT NULL, domain TEXT NOT NULL, root TEXT NOT NULL,
    namespace TEXT NOT NULL, settled INTEGER NOT NULL, source TEXT, source_image TEXT,
    of_volume TEXT, labels TEXT, json TEXT NOT NULL) STRICT;
CREATE UNIQUE INDEX KIND_uid ON KIND (uid);
CREATE UNIQUE INDEX KIND_name ON KIND (name) WHERE named = 1;
CREATE INDEX KIND_phase ON KIND (phase, name) WHERE named = 1 AND phase <> 'ready';
CREATE INDEX KIND_unsettled ON KIND (uid) WHERE settled = 0;
";

const REST: &str = "
CREATE INDEX volume_class ON volume (class, name) WHERE named = 1;
CREATE INDEX volume_trash ON volume (uid) WHERE named = 0;
CREATE INDEX volume_source ON volume (source) WHERE source IS NOT NULL;
CREATE INDEX volume_source_image ON volume (source_image) WHERE source_image IS NOT NULL;
CREATE INDEX snapshot_of_volume ON snapshot (of_volume, name) WHERE named = 1;
CREATE TABLE tally (
    kind TEXT NOT NULL, phase TEXT NOT NULL, class TEXT NOT NULL, domain TEXT NOT NULL,
    root TEXT NOT NULL, namespace TEXT NOT NULL, n INTEGER NOT NULL CHECK (n >= 0),
    PRIMARY KEY (kind, phase, class, domain, root, namespace)) STRICT, WITHOUT ROWID;
CREATE TABLE identity (root TEXT PRIMARY KEY, id TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE session (
    domain TEXT NOT NULL, address TEXT NOT NULL, run TEXT NOT NULL,
    PRIMARY KEY (domain, address)) STRICT, WITHOUT ROWID;
CREATE TABLE finding (key TEXT PRIMARY KEY, json TEXT NOT NULL) STRICT, WITHOUT ROWID;
";

/// What version 0 had already, as it is today.
const SINCE_0: &str = "
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE event (
    seq INTEGER PRIMARY KEY, at INTEGER NOT NULL, object TEXT NOT NULL,
    warning INTEGER NOT NULL, reason TEXT NOT NULL, message TEXT NOT NULL) STRICT;
CREATE INDEX event_object ON event (object, seq);
";

/// A file beside the state file.
pub fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

fn objects() -> String {
    ["volume", "snapshot"]
        .map(|kind| OBJECTS.replace("KIND", kind))
        .concat()
        + REST
}

/// Makes a new state file under another name and puts it in place when it is whole and durable.
pub fn create(path: &Path, options: &OpenOptions) -> Result<()> {
    let doing = "making it";
    if file_len(&beside(path, "-wal")) > 0 {
        return Err(damaged(
            path,
            "the file is missing, but its log (-wal) is there: put both back from where they were \
             moved; otherwise",
        ));
    }
    let new = beside(path, ".new");
    for suffix in ["", "-journal", "-wal", "-shm"] {
        match std::fs::remove_file(beside(&new, suffix)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(of_io(&error, path, doing));
            }
            _ => {}
        }
    }
    File::options()
        .write(true)
        .create_new(true)
        .mode(0o640)
        .open(&new)
        .map_err(|error| of_io(&error, path, doing))?;
    let instance = options.instance.clone().map_or_else(random_id, Ok)?;
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(&new, flags).at(path, doing)?;
    conn.execute_batch(&format!(
        "PRAGMA synchronous = FULL; BEGIN IMMEDIATE; {SINCE_0} {} COMMIT;",
        objects()
    ))
    .at(path, doing)?;
    let schema = SCHEMA.to_string();
    let rows = [
        ("schema", schema.as_str()),
        ("instance", &instance),
        ("machine", &options.machine_id),
    ];
    conn.execute(
        "INSERT INTO meta (key, value) VALUES (?1, ?2), (?3, ?4), (?5, ?6)",
        rusqlite::params_from_iter(rows.iter().flat_map(|(key, value)| [key, value])),
    )
    .at(path, doing)?;
    conn.pragma_update(None, "journal_mode", "WAL")
        .at(path, doing)?;
    conn.close().map_err(|(_, error)| error).at(path, doing)?;
    std::fs::rename(&new, path)
        .and_then(|()| File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all())
        .map_err(|error| of_io(&error, path, doing))
}

/// 128 random bits in hexadecimal digits.
pub fn random_id() -> Result<String> {
    let mut bytes = [0u8; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|errno| StoreError::Io(format!("the kernel gives no random bytes: {errno}")))?;
    Ok(format!("{:032x}", u128::from_be_bytes(bytes)))
}

fn file_len(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |meta| meta.len())
}

/// Looks at the file before SQLite does: what isn't ours is left untouched, and what was cut
/// short is found even where nobody reads. Called under the lock, before any connection.
pub fn look(path: &Path) -> Result<()> {
    let doing = "opening it";
    let fail = |error: &std::io::Error| of_io(error, path, doing);
    let mut file = File::options()
        .read(true)
        .write(true)
        .open(path)
        .map_err(|error| fail(&error))?;
    let meta = file.metadata().map_err(|error| fail(&error))?;
    if meta.len() == 0 {
        return Err(damaged(
            path,
            "it is empty, and volward never leaves it so; if there was never any volume here, \
             remove it; otherwise",
        ));
    }
    let mut header = [0u8; 100];
    let whole = file.read_exact(&mut header).is_ok();
    if !whole || !header.starts_with(b"SQLite format 3\0") {
        return Err(StoreError::NotAStore(format!(
            "state file {} is no state file of volward (it doesn't begin as an SQLite file does); \
             it was not touched; set `store.path` to another file, or, if this was one once, move \
             it aside and run `volward rebuild`",
            path.display()
        )));
    }
    let page = match u64::from(u16::from_be_bytes([header[16], header[17]])) {
        1 => 65536,
        size => size,
    };
    let [a, b, c, d] = [header[28], header[29], header[30], header[31]];
    let pages = u64::from(u32::from_be_bytes([a, b, c, d]));
    // With a log beside it, the end of the file may still be in there.
    if file_len(&beside(path, "-wal")) == 0 && meta.len() < page * pages {
        let cause = format!(
            "it was cut short ({} of {} bytes are there)",
            meta.len(),
            page * pages
        );
        return Err(damaged(path, &cause));
    }
    Ok(())
}

/// Waits at most this long for another program that holds a lock inside the file.
pub const BUSY_WAIT: Duration = Duration::from_millis(500);

/// The writer's connection.
pub fn connect(path: &Path, options: &OpenOptions) -> Result<Db> {
    let doing = "opening it";
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(path, flags).at(path, doing)?;
    conn.busy_timeout(BUSY_WAIT).at(path, doing)?;
    conn.set_prepared_statement_cache_capacity(64);
    // A file of another program stays as it is: nothing here writes before `verify` but the mode.
    let mode: String = conn
        .query_row("PRAGMA journal_mode", [], |row| row.get(0))
        .at(path, doing)?;
    if mode != "wal" {
        let path = path.to_owned();
        return Err(not_wal(&Db { conn, path }));
    }
    conn.execute_batch(
        "PRAGMA synchronous = FULL; PRAGMA wal_autocheckpoint = 1000;
         PRAGMA journal_size_limit = 16777216; PRAGMA cache_size = -16384;
         PRAGMA temp_store = MEMORY; PRAGMA trusted_schema = OFF; PRAGMA cell_size_check = ON;",
    )
    .at(path, doing)?;
    if let Some(pages) = options.max_pages {
        conn.execute_batch(&format!("PRAGMA max_page_count = {pages}"))
            .at(path, doing)?;
    }
    let path = path.to_owned();
    Ok(Db { conn, path })
}

/// Makes the directory, and resolves symlinks: one file has one lock, by whatever path.
pub fn settle_path(path: &Path) -> Result<PathBuf> {
    let doing = "looking for its directory";
    let fail = |error: std::io::Error| of_io(&error, path, doing);
    if let Ok(whole) = std::fs::canonicalize(path) {
        // Before anything else, so that not even a lock file is left beside it.
        if !std::fs::metadata(&whole).map_err(fail)?.is_file() {
            let file = path.display();
            return Err(StoreError::NotAStore(format!(
                "state file {file} is no regular file; set `store.path` to another one"
            )));
        }
        return Ok(whole);
    }
    let Some(name) = path.file_name() else {
        let words = format!("{} names no file; set `store.path`", path.display());
        return Err(StoreError::NotAStore(words));
    };
    let dir = match path.parent() {
        Some(dir) if dir != Path::new("") => dir,
        _ => Path::new("."),
    };
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o750)
        .create(dir)
        .map_err(fail)?;
    Ok(std::fs::canonicalize(dir).map_err(fail)?.join(name))
}

/// Makes sure that the content is ours, whole, of this machine and of this schema.
pub fn verify(db: &Db, options: &OpenOptions) -> Result<()> {
    let schema = if is_ours(db)? {
        meta(db, "schema")?
    } else {
        None
    };
    let Some(schema) = schema else {
        return Err(other_program(&db.path));
    };
    let Ok(found) = schema.parse::<u64>() else {
        let cause = format!("its schema version is {schema:?}");
        return Err(damaged(&db.path, &cause));
    };
    if found > SCHEMA {
        return Err(StoreError::Newer {
            found,
            known: SCHEMA,
            words: format!(
                "state file {} was written by a newer volward (schema {found}); this one ({}) \
                 knows up to schema {SCHEMA}; run the newer version",
                db.path.display(),
                env!("CARGO_PKG_VERSION"),
            ),
        });
    }
    if file_len(&db.path) <= options.check_max_bytes {
        check_pages(db)?;
    }
    let taken_over = machine(db, options)?;
    if found < SCHEMA {
        migrate(db)?;
    }
    if taken_over {
        set_meta(db, "machine", &options.machine_id)?;
    }
    Ok(())
}

fn is_ours(db: &Db) -> Result<bool> {
    db.conn
        .query_row(
            "SELECT count(*) = 1 FROM sqlite_schema WHERE type = 'table' AND name = 'meta'",
            [],
            |row| row.get(0),
        )
        .at(&db.path, "reading its schema")
}

fn other_program(path: &Path) -> StoreError {
    StoreError::NotAStore(format!(
        "state file {} is an SQLite file of another program; it was not touched; set `store.path` \
         to another file",
        path.display()
    ))
}

/// Why a file isn't in the mode that every state file is made in.
pub fn not_wal(db: &Db) -> StoreError {
    match is_ours(db) {
        Ok(false) => other_program(&db.path),
        Ok(true) => damaged(
            &db.path,
            "it isn't in WAL mode any more, so another program has changed it (`PRAGMA \
             journal_mode = wal` puts that right); otherwise",
        ),
        Err(error) => error,
    }
}

/// Whether every page is what SQLite left there. Reads the whole file.
pub fn check_pages(db: &Db) -> Result<()> {
    let said: String = db
        .conn
        .query_row("PRAGMA quick_check(1)", [], |row| row.get(0))
        .at(&db.path, "checking it")?;
    if said == "ok" {
        return Ok(());
    }
    Err(damaged(&db.path, said.trim()))
}

/// Whether the file comes from another machine and may be taken over.
fn machine(db: &Db, options: &OpenOptions) -> Result<bool> {
    let was = meta(db, "machine")?.unwrap_or_default();
    if was == options.machine_id {
        return Ok(false);
    }
    if !options.take_over {
        return Err(StoreError::OtherMachine(format!(
            "state file {} belongs to the machine with the id {was}, this one is {}; two machines \
             that manage the same images destroy each other's work; if the other one is gone for \
             good, start once with --take-over",
            db.path.display(),
            options.machine_id
        )));
    }
    Ok(true)
}

pub fn meta(db: &Db, key: &str) -> Result<Option<String>> {
    db.conn
        .prepare_cached("SELECT value FROM meta WHERE key = ?1")
        .and_then(|mut get| get.query_row([key], |row| row.get(0)).optional())
        .at(&db.path, "reading its settings")
}

pub fn set_meta(db: &Db, key: &str, value: &str) -> Result<()> {
    db.conn
        .prepare_cached("INSERT OR REPLACE INTO meta (key, value) VALUES (?1, ?2)")
        .and_then(|mut set| set.execute([key, value]))
        .map(drop)
        .at(&db.path, "writing its settings")
}

/// From schema 0 (records as JSON without columns) to 1, in one transaction: after a crash or an
/// error the file is as it was.
fn migrate(db: &Db) -> Result<()> {
    let doing = "migrating it from schema 0";
    db.conn
        .execute_batch("BEGIN IMMEDIATE")
        .at(&db.path, doing)?;
    let done = migrate_0(db).and_then(|()| db.conn.execute_batch("COMMIT").at(&db.path, doing));
    if done.is_err() && !db.conn.is_autocommit() {
        db.conn.execute_batch("ROLLBACK").at(&db.path, doing)?;
    }
    done
}

fn migrate_0(db: &Db) -> Result<()> {
    let doing = "migrating it from schema 0";
    db.conn
        .execute_batch(&format!(
            "ALTER TABLE volume RENAME TO volume_0; ALTER TABLE snapshot RENAME TO snapshot_0; {}",
            objects()
        ))
        .at(&db.path, doing)?;
    let mut pending = rows::Pending::default();
    for kind in ["volume", "snapshot"] {
        let mut old = db
            .conn
            .prepare(&format!("SELECT uid, json FROM {kind}_0"))
            .at(&db.path, doing)?;
        let mut all = old.query([]).at(&db.path, doing)?;
        while let Some(row) = all.next().at(&db.path, doing)? {
            let uid: String = row.get(0).at(&db.path, doing)?;
            let json: String = row.get(1).at(&db.path, doing)?;
            let bad = |cause: String| damaged(&db.path, &format!("row {kind} {uid}: {cause}"));
            let record: Record =
                serde_json::from_str(&json).map_err(|error| bad(error.to_string()))?;
            if record.id.kind() != kind || record.id.uid().to_string() != uid {
                return Err(bad("its record is of another object".into()));
            }
            rows::put(db, &mut pending, &record)?;
            if let Some(other) = pending.displaced.first() {
                return Err(bad(format!("{} has the same name", other.uid())));
            }
        }
    }
    tally::flush(db, &pending.deltas)?;
    db.conn
        .execute_batch("DROP TABLE volume_0; DROP TABLE snapshot_0;")
        .at(&db.path, doing)?;
    db.conn
        .execute(
            "UPDATE meta SET value = ?1 WHERE key = 'schema'",
            params![SCHEMA.to_string()],
        )
        .map(drop)
        .at(&db.path, doing)
}
