//! Files that are not as volward left them: refused with words, and left as they are.

use super::rows::{Dir, commit, entry, name, open, options, uid, volume};
use rusqlite::Connection;
use std::fs;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::Path;
use volward::model::{ObjectId, Phase};
use volward::store::{SCHEMA, Store, StoreError};

fn has(words: &str, parts: &[&str]) {
    for part in parts {
        assert!(words.contains(part), "no {part:?} in: {words}");
    }
}

/// A closed state file with that many volumes.
fn filled(dir: &Dir, count: u64) {
    let mut store = open(dir).unwrap();
    commit(&mut store, |store| {
        for n in 0..count {
            store
                .put(&volume(n, &format!("v{n:05}"), Phase::Ready))
                .unwrap();
        }
        store.log(&entry("daemon", 1)).unwrap();
    });
}

fn tamper(dir: &Dir, sql: &str) {
    let conn = Connection::open(dir.state()).unwrap();
    conn.execute_batch(sql).unwrap();
}

#[test]
fn a_second_instance_is_told_who_holds_the_file() {
    let dir = Dir::new();
    let first = open(&dir).unwrap();
    let link = dir.path().join("link.db");
    std::os::unix::fs::symlink(dir.state(), &link).unwrap();
    for path in [dir.state(), link] {
        let error = Store::open(&path, &options()).unwrap_err();
        let StoreError::Locked { pid, ending, words } = error else {
            panic!("{error:?}");
        };
        assert_eq!(pid, Some(std::process::id()));
        assert!(!ending);
        let process = format!("process {}", std::process::id());
        has(
            &words,
            &["state.db", &process, "on host", "since 2", "store.path"],
        );
    }
    drop(first);
    open(&dir).unwrap();
}

#[test]
fn what_is_no_state_file_is_refused_and_not_touched() {
    let dir = Dir::new();
    let refused = |path: &Path, parts: &[&str]| {
        let before = fs::read(path).unwrap();
        let error = Store::open(path, &options()).unwrap_err();
        assert!(matches!(error, StoreError::NotAStore(_)), "{error:?}");
        has(&error.to_string(), parts);
        assert_eq!(fs::read(path).unwrap(), before);
    };
    let text = dir.path().join("notes.txt");
    fs::write(&text, "my notes\n".repeat(1000)).unwrap();
    refused(&text, &["notes.txt", "not touched", "store.path"]);
    fs::write(&text, "short").unwrap();
    refused(&text, &["notes.txt", "not touched"]);

    for mode in ["wal", "delete"] {
        let other = dir.path().join(format!("{mode}.db"));
        let conn = Connection::open(&other).unwrap();
        conn.pragma_update(None, "journal_mode", mode).unwrap();
        conn.execute_batch("CREATE TABLE songs (name TEXT)")
            .unwrap();
        conn.close().unwrap();
        refused(&other, &["another program", "store.path"]);
    }

    let folder = dir.path().join("folder");
    fs::create_dir(&folder).unwrap();
    let error = Store::open(&folder, &options()).unwrap_err();
    assert!(matches!(error, StoreError::NotAStore(_)), "{error:?}");
    assert!(!dir.path().join("folder.lock").exists());
    let error = Store::open(&text.join("state.db"), &options()).unwrap_err();
    assert!(matches!(error, StoreError::NotAStore(_)), "{error:?}");
}

#[test]
fn overwritten_pages_are_found_at_open() {
    let dir = Dir::new();
    filled(&dir, 500);
    let len = fs::metadata(dir.state()).unwrap().len();
    let mut file = fs::File::options().write(true).open(dir.state()).unwrap();
    file.seek(SeekFrom::Start(len / 2 / 4096 * 4096)).unwrap();
    file.write_all(&[0xAB; 8192]).unwrap();
    drop(file);
    let error = open(&dir).unwrap_err();
    assert!(matches!(error, StoreError::Damaged(_)), "{error:?}");
    has(&error.to_string(), &["state.db", "volward rebuild"]);
}

/// Where nothing is read at open, the check of the pages finds it.
#[test]
fn an_overwritten_page_of_the_event_log_is_found_at_open() {
    let dir = Dir::new();
    let mut store = open(&dir).unwrap();
    commit(&mut store, |store| {
        for at in 0..500 {
            store.log(&entry("volume/a", at)).unwrap();
        }
    });
    drop(store);
    let conn = Connection::open(dir.state()).unwrap();
    let sql =
        "SELECT pageno FROM dbstat WHERE name = 'event' AND pagetype = 'leaf' LIMIT 1 OFFSET 2";
    let page: u64 = conn
        .query_row(sql, [], |row| row.get::<_, u32>(0))
        .unwrap()
        .into();
    conn.close().unwrap();
    let mut file = fs::File::options().write(true).open(dir.state()).unwrap();
    file.seek(SeekFrom::Start((page - 1) * 4096)).unwrap();
    file.write_all(&[0xAB; 4096]).unwrap();
    drop(file);
    let error = open(&dir).unwrap_err();
    assert!(matches!(error, StoreError::Damaged(_)), "{error:?}");
    has(&error.to_string(), &["state.db", "volward rebuild"]);
}

/// The file is too big to be checked at open: the damage shows where it is read, as an error.
#[test]
fn overwritten_pages_of_a_big_file_are_an_error_where_they_are_read() {
    let dir = Dir::new();
    filled(&dir, 500);
    let len = fs::metadata(dir.state()).unwrap().len();
    let mut file = fs::File::options().write(true).open(dir.state()).unwrap();
    // All but the first pages, which hold the schema and the roots of the tables.
    let from = 40 * 4096;
    file.seek(SeekFrom::Start(from)).unwrap();
    file.write_all(&vec![0xAB; usize::try_from(len - from).unwrap()])
        .unwrap();
    drop(file);
    let mut unchecked = options();
    unchecked.check_max_bytes = 0;
    let store = Store::open(&dir.state(), &unchecked).unwrap();
    let ids: Vec<ObjectId> = (0..500).map(|n| ObjectId::Volume(uid(n))).collect();
    let error = store.fetch(&ids).unwrap_err();
    assert!(matches!(error, StoreError::Damaged(_)), "{error:?}");
    has(&error.to_string(), &["state.db", "volward rebuild"]);
    let error = store.check().unwrap_err();
    assert!(matches!(error, StoreError::Damaged(_)), "{error:?}");
}

#[test]
fn a_truncated_file_is_found_at_open_however_big() {
    let dir = Dir::new();
    filled(&dir, 500);
    let len = fs::metadata(dir.state()).unwrap().len();
    let mut unchecked = options();
    unchecked.check_max_bytes = 0;
    for cut in [len - 1, len - 4096, len / 2, 4096] {
        let file = fs::File::options().write(true).open(dir.state()).unwrap();
        file.set_len(cut).unwrap();
        drop(file);
        let error = Store::open(&dir.state(), &unchecked).unwrap_err();
        assert!(matches!(error, StoreError::Damaged(_)), "{error:?}");
        has(&error.to_string(), &["cut short", "volward rebuild"]);
        assert_eq!(fs::metadata(dir.state()).unwrap().len(), cut);
    }
    for cut in [99, 0] {
        let file = fs::File::options().write(true).open(dir.state()).unwrap();
        file.set_len(cut).unwrap();
        drop(file);
        let error = open(&dir).unwrap_err();
        has(&error.to_string(), &["state.db", "volward rebuild"]);
        assert_eq!(fs::metadata(dir.state()).unwrap().len(), cut);
    }
}

#[test]
fn a_missing_file_beside_its_log_is_not_made_anew() {
    let dir = Dir::new();
    filled(&dir, 1);
    fs::remove_file(dir.state()).unwrap();
    fs::write(dir.path().join("state.db-wal"), vec![7; 4096]).unwrap();
    let error = open(&dir).unwrap_err();
    assert!(matches!(error, StoreError::Damaged(_)), "{error:?}");
    has(&error.to_string(), &["missing", "-wal", "volward rebuild"]);
    assert!(!dir.state().exists());
}

#[test]
fn a_row_that_is_no_record_is_named() {
    let row = uid(3).to_string();
    let tampered = [
        "UPDATE volume SET json = '{}' WHERE uid = 'UID'",
        "UPDATE volume SET json = replace(json, 'v00003', 'V!') WHERE uid = 'UID'",
        "UPDATE volume SET json = replace(json, 'v00003', 'other') WHERE uid = 'UID'",
        "UPDATE volume SET json = (SELECT json FROM volume WHERE name = 'v00001') \
         WHERE uid = 'UID'",
    ];
    for sql in tampered {
        let dir = Dir::new();
        filled(&dir, 5);
        tamper(&dir, &sql.replace("UID", &row));
        let store = open(&dir).unwrap();
        let error = store.volume(uid(3)).unwrap_err();
        assert!(matches!(error, StoreError::Damaged(_)), "{error:?}");
        has(&error.to_string(), &["row volume", &row, "volward rebuild"]);
        store.volume(uid(2)).unwrap().unwrap();
        let error = store.check().unwrap_err();
        has(&error.to_string(), &["row volume", &row]);
    }
    // One that isn't settled stops the start, with the same words.
    let dir = Dir::new();
    filled(&dir, 5);
    let sql = "UPDATE volume SET json = '{', settled = 0 WHERE uid = 'UID'";
    tamper(&dir, &sql.replace("UID", &row));
    let error = open(&dir).unwrap().load().unwrap_err();
    has(&error.to_string(), &["row volume", &row, "volward rebuild"]);
}

#[test]
fn counts_that_do_not_fit_are_found_at_open() {
    let dir = Dir::new();
    filled(&dir, 5);
    tamper(&dir, "DELETE FROM volume WHERE name = 'v00001'");
    let error = open(&dir).unwrap_err();
    assert!(matches!(error, StoreError::Damaged(_)), "{error:?}");
    has(&error.to_string(), &["counts", "volward rebuild"]);
}

#[test]
fn a_newer_schema_is_refused() {
    let dir = Dir::new();
    filled(&dir, 1);
    tamper(&dir, "UPDATE meta SET value = '7' WHERE key = 'schema'");
    let error = open(&dir).unwrap_err();
    let StoreError::Newer {
        found,
        known,
        words,
    } = error
    else {
        panic!("{error:?}");
    };
    assert_eq!((found, known), (7, SCHEMA));
    has(
        &words,
        &["newer volward", "schema 7", "run the newer version"],
    );
}

#[test]
fn a_copy_on_another_machine_is_refused_unless_taken_over() {
    let dir = Dir::new();
    filled(&dir, 1);
    let mut other = options();
    other.machine_id = "machine-b".into();
    for _ in 0..2 {
        let error = Store::open(&dir.state(), &other).unwrap_err();
        assert!(matches!(error, StoreError::OtherMachine(_)), "{error:?}");
        has(
            &error.to_string(),
            &["machine-a", "machine-b", "--take-over"],
        );
    }
    other.take_over = true;
    drop(Store::open(&dir.state(), &other).unwrap());
    other.take_over = false;
    drop(Store::open(&dir.state(), &other).unwrap());
    let error = open(&dir).unwrap_err();
    assert!(matches!(error, StoreError::OtherMachine(_)), "{error:?}");
}

/// A file of schema 0: records as JSON, without columns and counts.
fn version_0(dir: &Dir, records: &[volward::model::Record]) {
    let conn = Connection::open(dir.state()).unwrap();
    conn.execute_batch(
        "PRAGMA journal_mode = WAL;
         CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
         INSERT INTO meta VALUES ('schema', '0'), ('instance', 'old'), ('machine', 'machine-a');
         CREATE TABLE volume (uid TEXT PRIMARY KEY, json TEXT NOT NULL) STRICT;
         CREATE TABLE snapshot (uid TEXT PRIMARY KEY, json TEXT NOT NULL) STRICT;
         CREATE TABLE event (
             seq INTEGER PRIMARY KEY, at INTEGER NOT NULL, object TEXT NOT NULL,
             warning INTEGER NOT NULL, reason TEXT NOT NULL, message TEXT NOT NULL) STRICT;
         CREATE INDEX event_object ON event (object, seq);
         INSERT INTO event VALUES (41, 1, 'volume/a', 0, 'Created', 'it is there');",
    )
    .unwrap();
    for record in records {
        let sql = format!("INSERT INTO {} VALUES (?1, ?2)", record.id.kind());
        let json = serde_json::to_string(record).unwrap();
        let row = [record.id.uid().to_string(), json];
        conn.execute(&sql, row).unwrap();
    }
    conn.close().unwrap();
}

#[test]
fn an_older_schema_is_migrated() {
    let dir = Dir::new();
    let records = [
        volume(1, "a", Phase::Ready),
        volume(2, "a", Phase::Trashed),
        volume(3, "b", Phase::Creating),
        super::rows::snapshot(4, "s", "a", Phase::Ready),
    ];
    version_0(&dir, &records);
    for _ in 0..2 {
        let mut store = open(&dir).unwrap();
        assert_eq!(store.instance(), "old");
        for record in &records {
            assert_eq!(store.fetch(&[record.id]).unwrap().first(), Some(record));
        }
        let owner = store.volume_named(&name("a")).unwrap().unwrap();
        assert_eq!(owner.id.uid(), uid(1));
        let loaded = store.load().unwrap();
        assert_eq!(loaded.records, records[1..3]);
        assert_eq!(loaded.counts[&("volume", Phase::Ready)], 1);
        store.begin().unwrap();
        assert_eq!(store.log(&entry("volume/a", 2)).unwrap(), 42);
        store.rollback().unwrap();
        store.check().unwrap();
    }
}

#[test]
fn a_migration_that_fails_changes_nothing() {
    let dir = Dir::new();
    let good = volume(1, "a", Phase::Ready);
    version_0(&dir, std::slice::from_ref(&good));
    let row = uid(2).to_string();
    tamper(
        &dir,
        &format!("INSERT INTO volume VALUES ('{row}', '{{}}')"),
    );
    let error = open(&dir).unwrap_err();
    assert!(matches!(error, StoreError::Damaged(_)), "{error:?}");
    has(&error.to_string(), &["row volume", &row, "volward rebuild"]);
    let twin = volume(3, "a", Phase::Ready);
    let json = serde_json::to_string(&twin).unwrap();
    let sql = format!(
        "DELETE FROM volume WHERE uid = '{row}'; INSERT INTO volume VALUES ('{}', '{json}')",
        uid(3)
    );
    tamper(&dir, &sql);
    let error = open(&dir).unwrap_err();
    has(&error.to_string(), &["the same name", &uid(1).to_string()]);
    tamper(
        &dir,
        &format!("DELETE FROM volume WHERE uid = '{}'", uid(3)),
    );
    let store = open(&dir).unwrap();
    assert_eq!(store.fetch(&[good.id]).unwrap(), [good]);
    store.check().unwrap();
}

#[test]
fn a_file_that_is_taken_away_while_it_is_open_takes_no_more_writes() {
    let dir = Dir::new();
    let mut store = open(&dir).unwrap();
    commit(&mut store, |store| store.put(&volume(1, "a", Phase::Ready))).unwrap();
    let aside = dir.path().join("aside.db");
    fs::rename(dir.state(), &aside).unwrap();
    store.begin().unwrap();
    store.put(&volume(2, "b", Phase::Ready)).unwrap();
    let error = store.commit().unwrap_err();
    assert!(matches!(error, StoreError::Damaged(_)), "{error:?}");
    has(&error.to_string(), &["removed or replaced"]);
    fs::rename(&aside, dir.state()).unwrap();
    commit(&mut store, |store| store.put(&volume(2, "b", Phase::Ready))).unwrap();
    drop(store);
    assert_eq!(open(&dir).unwrap().load().unwrap().counts.len(), 1);
}
