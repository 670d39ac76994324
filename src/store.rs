//! The store: what volward knows, durable in one SQLite file.
//!
//! Owns the state file and all SQL. One [`Store`] writes (the loop), [`Reader`]s read beside it
//! on connections of their own. Memory holds none of it: a million settled volumes cost disk.
//! Rows become core types here and are checked on the way. It knows `model` only: nothing of the
//! scheduler, the backends or HTTP.

mod error;
mod events;
mod lock;
mod reader;
mod rows;
mod schema;
mod tally;

pub use error::{Result, StoreError};
pub use events::{EventPage, EventQuery, Logged, TRIM_MAX};
pub use reader::{Page, Reader, SCAN_MAX, SnapshotQuery, TrashPage, VolumeQuery};
pub use schema::SCHEMA;
pub use tally::ClassUse;

use crate::model::{Entry, Millis, Name, ObjectId, Phase, Record, Uid};
use error::{At as _, damaged, of_io};
use rows::{Pending, SNAPSHOT, VOLUME};
use rusqlite::{Connection, params};
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The most items of a page.
pub const PAGE_MAX: usize = 1000;

/// Beyond this many bytes the log (-wal) is written back even if readers have to be waited for
/// (at most [`LOG_WAIT`]); SQLite itself only tries when nobody reads.
const LOG_MAX_BYTES: u64 = 64 << 20;
const LOG_WAIT: Duration = Duration::from_millis(50);
/// Not at every commit: where it doesn't help, it would only cost time.
const LOG_TRY_EVERY: u32 = 128;

/// How to open a state file.
#[derive(Debug, Clone)]
pub struct OpenOptions {
    /// The id of this machine (`/etc/machine-id`).
    pub machine_id: String,
    /// Accept a file of another machine, and make it this one's.
    pub take_over: bool,
    /// The instance id of a file that is made anew (`volward rebuild`); random if none.
    pub instance: Option<String>,
    /// The most pages of 4096 bytes that the file may have; the disk's room if none.
    pub max_pages: Option<u32>,
    /// A file of at most this many bytes is checked page by page at open.
    pub check_max_bytes: u64,
}

impl OpenOptions {
    /// The defaults, for that machine.
    #[must_use]
    pub fn new(machine_id: impl Into<String>) -> OpenOptions {
        OpenOptions {
            machine_id: machine_id.into(),
            take_over: false,
            instance: None,
            max_pages: None,
            check_max_bytes: 64 << 20,
        }
    }
}

/// What the scheduler starts from.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Loaded {
    /// Every record that isn't settled.
    pub records: Vec<Record>,
    /// How many objects of each kind are in each phase, settled ones included.
    pub counts: BTreeMap<(&'static str, Phase), u64>,
    /// Root → which cluster and pool, or which root directory, it is.
    pub identities: BTreeMap<String, String>,
}

/// A connection and the file that it is to, for its errors.
#[derive(Debug)]
struct Db {
    conn: Connection,
    path: PathBuf,
}

/// Where the transaction stands.
#[derive(Debug)]
enum Tx {
    None,
    Open,
    /// A write failed. SQLite may have rolled back by itself, so nothing more may be written
    /// until `rollback` or a failing `commit`.
    Broken(StoreError),
}

/// The writer. All writes belong to a transaction: `begin`, writes, `commit` or `rollback`.
#[derive(Debug)]
pub struct Store {
    db: Db,
    tx: Tx,
    pending: Pending,
    /// The newest number of the event log, as written and as committed.
    seq: u64,
    committed_seq: u64,
    /// Device and inode of the file that is open.
    inode: (u64, u64),
    instance: String,
    run: String,
    since_log_try: u32,
    // After the connection: the lock goes last.
    _lock: lock::Lock,
}

impl Store {
    /// Opens the state file, or makes it if there is none (its directory as well, mode 0750).
    ///
    /// # Errors
    /// `Locked` when another instance has it; `NotAStore`, `Damaged`, `Newer`, `OtherMachine`,
    /// `ReadOnly`, `Full`, `Io`: the text says what to do. A refused file is left as it is.
    pub fn open(path: &Path, options: &OpenOptions) -> Result<Store> {
        let path = &schema::settle_path(path)?;
        let lock = lock::Lock::take(path)?;
        match std::fs::symlink_metadata(path) {
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                schema::create(path, options)?;
            }
            Err(error) => return Err(of_io(&error, path, "opening it")),
        }
        schema::look(path)?;
        let db = schema::connect(path, options)?;
        schema::verify(&db, options)?;
        if std::fs::metadata(path).is_ok_and(|meta| meta.len() <= options.check_max_bytes)
            && !tally::is_right(&db)?
        {
            return Err(damaged(path, "its counts don't fit its records"));
        }
        let instance = schema::meta(&db, "instance")?
            .ok_or_else(|| damaged(path, "its instance id is missing"))?;
        let (_, seq) = events::span(&db)?;
        Ok(Store {
            inode: inode(path).map_err(|error| of_io(&error, path, "opening it"))?,
            db,
            tx: Tx::None,
            pending: Pending::default(),
            seq,
            committed_seq: seq,
            instance,
            run: schema::random_id()?,
            since_log_try: 0,
            _lock: lock,
        })
    }

    /// The id of this instance: part of every image's mark.
    #[must_use]
    pub fn instance(&self) -> &str {
        &self.instance
    }

    /// The state file, symlinks resolved.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.db.path
    }

    /// Another reader of this file.
    ///
    /// # Errors
    /// When it can't be opened.
    pub fn reader(&self) -> Result<Reader> {
        Reader::open(&self.db.path)
    }

    /// Begins a transaction.
    ///
    /// # Errors
    /// `Internal` when one is open; `Busy`.
    pub fn begin(&mut self) -> Result<()> {
        if !matches!(self.tx, Tx::None) {
            let words = "a transaction is begun within another one";
            return Err(StoreError::Internal(words.into()));
        }
        // Only if an earlier rollback failed is anything left to undo.
        self.undo()?;
        self.db
            .conn
            .execute_batch("BEGIN IMMEDIATE")
            .at(&self.db.path, "beginning a transaction")?;
        self.tx = Tx::Open;
        Ok(())
    }

    /// Makes the transaction durable. If that fails it is rolled back as a whole, and the next
    /// one can begin.
    ///
    /// # Errors
    /// Whatever a write of the transaction failed with; `Taken` when two objects would have one
    /// name (in a batch, a name may change hands in any order); `Full`, `Io`, and so on.
    pub fn commit(&mut self) -> Result<()> {
        let result = match std::mem::replace(&mut self.tx, Tx::None) {
            Tx::None => {
                let words = "a commit without a transaction";
                return Err(StoreError::Internal(words.into()));
            }
            Tx::Broken(error) => Err(error),
            Tx::Open => self.finish(),
        };
        if let Err(error) = result {
            // If this fails as well, `begin` tries it again.
            let _ = self.undo();
            return Err(error);
        }
        self.pending = Pending::default();
        self.committed_seq = self.seq;
        self.bound_log();
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        if let Some(id) = self.pending.displaced.first() {
            return Err(StoreError::Taken(format!(
                "the name of {} {} would belong to two",
                id.kind(),
                id.uid()
            )));
        }
        // SQLite goes on writing to a file that has lost its name: lost at the next start.
        if inode(&self.db.path).ok() != Some(self.inode) {
            return Err(damaged(
                &self.db.path,
                "it was removed or replaced while volward runs; restart volward if the file now in \
                 its place is the right one; if there is none,",
            ));
        }
        tally::flush(&self.db, &self.pending.deltas)?;
        self.db
            .conn
            .execute_batch("COMMIT")
            .at(&self.db.path, "committing")
    }

    /// Undoes the transaction. Without one it does nothing.
    ///
    /// # Errors
    /// When even that fails.
    pub fn rollback(&mut self) -> Result<()> {
        self.tx = Tx::None;
        self.undo()
    }

    fn undo(&mut self) -> Result<()> {
        self.pending = Pending::default();
        self.seq = self.committed_seq;
        if self.db.conn.is_autocommit() {
            return Ok(());
        }
        self.db
            .conn
            .execute_batch("ROLLBACK")
            .at(&self.db.path, "rolling back")
    }

    /// Keeps the log (-wal) from growing without limit while readers overlap for ever.
    fn bound_log(&mut self) {
        self.since_log_try = self.since_log_try.saturating_add(1);
        if self.since_log_try < LOG_TRY_EVERY {
            return;
        }
        self.since_log_try = 0;
        let log = schema::beside(&self.db.path, "-wal");
        if std::fs::metadata(log).map_or(0, |meta| meta.len()) <= LOG_MAX_BYTES {
            return;
        }
        // The commit is durable whatever comes of this; a failure shows again at the next one.
        let conn = &self.db.conn;
        let tried = conn
            .busy_timeout(LOG_WAIT)
            .and_then(|()| {
                conn.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| {
                    row.get::<_, i64>(0)
                })
            })
            .and_then(|_| conn.busy_timeout(schema::BUSY_WAIT));
        if let Err(error) = tried {
            log::warn!(
                "log of {}: writing it back: {error}",
                self.db.path.display()
            );
        }
    }

    fn write<T>(&mut self, f: impl FnOnce(&Db, &mut Pending) -> Result<T>) -> Result<T> {
        match &self.tx {
            Tx::Open => {}
            Tx::None => {
                let words = "a write without a transaction";
                return Err(StoreError::Internal(words.into()));
            }
            Tx::Broken(error) => return Err(error.clone()),
        }
        let result = f(&self.db, &mut self.pending);
        if let Err(error) = &result {
            self.tx = Tx::Broken(error.clone());
        }
        result
    }

    /// Stores a record, new or changed. If its name belongs to another object, that one must be
    /// put (in the trash, or under another name) or removed in the same transaction.
    ///
    /// # Errors
    /// `Full`, `Io` and so on; the transaction can only be rolled back then.
    pub fn put(&mut self, record: &Record) -> Result<()> {
        self.write(|db, pending| rows::put(db, pending, record))
    }

    /// Removes a record; says whether it was there.
    ///
    /// # Errors
    /// As `put`.
    pub fn remove(&mut self, id: ObjectId) -> Result<bool> {
        self.write(|db, pending| rows::remove(db, pending, id))
    }

    /// Appends to the event log; says its number. Numbers have no gaps: those of a transaction
    /// that is rolled back are given again.
    ///
    /// # Errors
    /// As `put`.
    pub fn log(&mut self, entry: &Entry) -> Result<u64> {
        let seq = self.seq + 1;
        self.write(|db, _| events::append(db, seq, entry))?;
        self.seq = seq;
        Ok(seq)
    }

    /// Removes the oldest events beyond `max` and those from before `keep_before`, at most
    /// [`TRIM_MAX`] of them per call, and never the newest. Says how many went.
    ///
    /// # Errors
    /// As `put`.
    pub fn trim_events(&mut self, max: u64, keep_before: Millis) -> Result<u64> {
        self.write(|db, _| events::trim(db, max, keep_before))
    }

    /// Remembers a setting. The keys `schema`, `instance` and `machine` are the store's own.
    ///
    /// # Errors
    /// As `put`; `Internal` for a key of the store's own.
    pub fn set_meta(&mut self, key: &str, value: &str) -> Result<()> {
        self.write(|db, _| match key {
            "schema" | "instance" | "machine" => Err(StoreError::Internal(format!(
                "the setting {key} is the store's own"
            ))),
            _ => schema::set_meta(db, key, value),
        })
    }

    /// A remembered setting.
    ///
    /// # Errors
    /// When it can't be read.
    pub fn meta(&self, key: &str) -> Result<Option<String>> {
        schema::meta(&self.db, key)
    }

    /// Remembers which cluster and pool, or which root directory, a root is.
    ///
    /// # Errors
    /// As `put`.
    pub fn identity(&mut self, root: &str, id: &str) -> Result<()> {
        const SQL: &str = "INSERT OR REPLACE INTO identity (root, id) VALUES (?1, ?2)";
        self.write(|db, _| execute(db, SQL, params![root, id]))
    }

    /// Remembers the address of a session of this run.
    ///
    /// # Errors
    /// As `put`.
    pub fn session_opened(&mut self, domain: &str, address: &str) -> Result<()> {
        const SQL: &str =
            "INSERT OR REPLACE INTO session (domain, address, run) VALUES (?1, ?2, ?3)";
        let run = self.run.clone();
        self.write(|db, _| execute(db, SQL, params![domain, address, run]))
    }

    /// Forgets the address of a session: it can't act any more.
    ///
    /// # Errors
    /// As `put`.
    pub fn session_closed(&mut self, domain: &str, address: &str) -> Result<()> {
        const SQL: &str = "DELETE FROM session WHERE domain = ?1 AND address = ?2";
        self.write(|db, _| execute(db, SQL, params![domain, address]))
    }

    /// The addresses of the sessions of a domain, this run's included.
    ///
    /// # Errors
    /// When they can't be read.
    pub fn sessions(&self, domain: &str) -> Result<Vec<String>> {
        self.addresses(domain, "")
    }

    /// The addresses of the sessions that earlier runs left in a domain.
    ///
    /// # Errors
    /// When they can't be read.
    pub fn predecessors(&self, domain: &str) -> Result<Vec<String>> {
        self.addresses(domain, &self.run)
    }

    fn addresses(&self, domain: &str, without: &str) -> Result<Vec<String>> {
        const SQL: &str =
            "SELECT address FROM session WHERE domain = ?1 AND run <> ?2 ORDER BY address";
        self.db
            .conn
            .prepare_cached(SQL)
            .and_then(|mut all| {
                all.query_map([domain, without], |row| row.get(0))?
                    .collect::<rusqlite::Result<_>>()
            })
            .at(&self.db.path, "reading the sessions")
    }

    /// Remembers a finding of the doctor, as JSON.
    ///
    /// # Errors
    /// As `put`.
    pub fn put_finding(&mut self, key: &str, json: &str) -> Result<()> {
        const SQL: &str = "INSERT OR REPLACE INTO finding (key, json) VALUES (?1, ?2)";
        self.write(|db, _| execute(db, SQL, params![key, json]))
    }

    /// Forgets a finding.
    ///
    /// # Errors
    /// As `put`.
    pub fn remove_finding(&mut self, key: &str) -> Result<()> {
        self.write(|db, _| execute(db, "DELETE FROM finding WHERE key = ?1", [key]))
    }

    /// The findings: key → JSON.
    ///
    /// # Errors
    /// When they can't be read.
    pub fn findings(&self) -> Result<BTreeMap<String, String>> {
        findings(&self.db)
    }

    /// What the scheduler starts from. Memory grows with what is unsettled, not with the rest.
    ///
    /// # Errors
    /// When it can't be read; `Damaged` names the row.
    pub fn load(&self) -> Result<Loaded> {
        Ok(Loaded {
            records: rows::unsettled(&self.db)?,
            counts: tally::counts(&self.db)?,
            identities: pairs(&self.db, "SELECT root, id FROM identity")?,
        })
    }

    /// The volume of that name that isn't in the trash; sees the open transaction.
    ///
    /// # Errors
    /// When it can't be read; `Damaged` names the row. So do all lookups.
    pub fn volume_named(&self, name: &Name) -> Result<Option<Record>> {
        rows::by_name(&self.db, &VOLUME, name)
    }

    /// The snapshot of that name.
    ///
    /// # Errors
    /// As `volume_named`.
    pub fn snapshot_named(&self, name: &Name) -> Result<Option<Record>> {
        rows::by_name(&self.db, &SNAPSHOT, name)
    }

    /// The volume or trash entry with that uid.
    ///
    /// # Errors
    /// As `volume_named`.
    pub fn volume(&self, uid: Uid) -> Result<Option<Record>> {
        rows::by_id(&self.db, ObjectId::Volume(uid))
    }

    /// The objects with those ids, in that order; those that aren't there are left out.
    ///
    /// # Errors
    /// As `volume_named`.
    pub fn fetch(&self, ids: &[ObjectId]) -> Result<Vec<Record>> {
        ids.iter()
            .filter_map(|id| rows::by_id(&self.db, *id).transpose())
            .collect()
    }

    /// Volumes and trash entries that were made from that volume or one of its snapshots (or
    /// from the snapshot with that uid), by age, at most `limit`.
    ///
    /// # Errors
    /// As `volume_named`.
    pub fn children_of(&self, uid: Uid, limit: usize) -> Result<Vec<Record>> {
        rows::children(&self.db, uid, limit)
    }

    /// Which classes have placed volumes, trash entries or snapshots, where, and how many; as of
    /// the last commit.
    ///
    /// # Errors
    /// When it can't be read.
    pub fn classes_in_use(&self) -> Result<Vec<ClassUse>> {
        tally::classes(&self.db)
    }

    /// Checks the whole file: every page, every record, the counts. Takes long for a big one.
    ///
    /// # Errors
    /// `Damaged` with the first thing that is wrong.
    pub fn check(&self) -> Result<()> {
        schema::check_pages(&self.db)?;
        rows::check(&self.db)?;
        if tally::is_right(&self.db)? {
            return Ok(());
        }
        Err(damaged(&self.db.path, "its counts don't fit its records"))
    }
}

fn inode(path: &Path) -> std::io::Result<(u64, u64)> {
    std::fs::metadata(path).map(|meta| (meta.dev(), meta.ino()))
}

fn execute(db: &Db, sql: &str, params: impl rusqlite::Params) -> Result<()> {
    db.conn
        .prepare_cached(sql)
        .and_then(|mut statement| statement.execute(params))
        .map(drop)
        .at(&db.path, "writing")
}

fn findings(db: &Db) -> Result<BTreeMap<String, String>> {
    pairs(db, "SELECT key, json FROM finding")
}

fn pairs(db: &Db, sql: &str) -> Result<BTreeMap<String, String>> {
    db.conn
        .prepare_cached(sql)
        .and_then(|mut all| {
            all.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?
                .collect::<rusqlite::Result<_>>()
        })
        .at(&db.path, "reading")
}
