//! What was committed before a kill -9 is there, and nothing is half there.

use super::rows::{Dir, commit, entry, name, open, snapshot, uid, volume};
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use volward::model::{Phase, Record};
use volward::store::{EventQuery, Store, StoreError};

const STATE: &str = "VOLWARD_TEST_STORE";

/// What transaction `n` writes: all of it or nothing.
fn parts(n: u64) -> [Record; 2] {
    let (id, called) = (n * 2, format!("v{n}"));
    [
        volume(id, &called, Phase::Pending),
        snapshot(id + 1, &format!("s{n}"), &called, Phase::Pending),
    ]
}

/// Not a test by itself: what `Writer` runs in a process of its own.
#[test]
fn child_that_writes_until_it_is_killed() {
    let Some(path) = std::env::var_os(STATE) else {
        return;
    };
    let mut store = Store::open(Path::new(&path), &super::rows::options()).unwrap();
    println!("\nopen");
    let first = store.load().unwrap().records.len() as u64 / 2;
    for n in first..first + 1_000_000 {
        commit(&mut store, |store| {
            for record in parts(n) {
                store.put(&record).unwrap();
            }
            store.log(&entry("daemon", n)).unwrap();
            // Changed again within the transaction: the last one counts.
            let mut changed = parts(n);
            changed[0].phase = Phase::Creating;
            store.put(&changed[0]).unwrap();
        });
        println!("committed {n}");
    }
}

struct Writer(Child);

impl Writer {
    fn start(dir: &Dir) -> (Writer, impl Iterator<Item = String>) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture", "--test-threads=1"])
            .arg("kill::child_that_writes_until_it_is_killed")
            .env(STATE, dir.state())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        (Writer(child), lines.map_while(Result::ok))
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn committed(line: &str) -> Option<u64> {
    line.strip_prefix("committed ")?.parse().ok()
}

#[test]
fn what_was_committed_before_a_kill_is_there_and_nothing_is_half_there() {
    let dir = Dir::new();
    let mut total = 0;
    for acknowledged in [1, 40, 150] {
        let (mut writer, mut lines) = Writer::start(&dir);
        let seen = lines.by_ref().filter_map(|line| committed(&line));
        let reached = seen.take(acknowledged).last().unwrap();
        writer.0.kill().unwrap();
        writer.0.wait().unwrap();
        // Lines that were still in the pipe are acknowledged as well.
        let last = lines
            .filter_map(|l| committed(&l))
            .last()
            .unwrap_or(reached);
        let log = dir.path().join("state.db-wal");
        assert!(log.metadata().unwrap().len() > 0, "killed with a log");

        let store = open(&dir).unwrap();
        store.check().unwrap();
        let count = store.load().unwrap().records.len() as u64 / 2;
        assert!(count > last, "{count} of {last} and more");
        for n in 0..count {
            let [mut made, snap] = parts(n);
            made.phase = Phase::Creating;
            let there = store.fetch(&[made.id, snap.id]).unwrap();
            assert_eq!(there, [made, snap], "transaction {n}");
        }
        let [next, snap] = parts(count);
        assert!(store.fetch(&[next.id, snap.id]).unwrap().is_empty());
        let query = EventQuery {
            after: count - 1,
            limit: 10,
            object: None,
        };
        let page = store.reader().unwrap().events(&query).unwrap();
        assert_eq!((page.newest, page.items.len()), (count, 1));
        assert!(count > total);
        total = count;
    }
}

#[test]
fn another_process_that_holds_the_file_is_named_and_its_end_frees_it() {
    let dir = Dir::new();
    let (mut writer, mut lines) = Writer::start(&dir);
    assert!(lines.any(|line| line == "open"));
    let error = open(&dir).unwrap_err();
    let StoreError::Locked { pid, words, .. } = error else {
        panic!("{error:?}");
    };
    assert_eq!(pid, Some(writer.0.id()));
    assert!(
        words.contains(&format!("process {}", writer.0.id())),
        "{words}"
    );
    writer.0.kill().unwrap();
    writer.0.wait().unwrap();
    let mut store = open(&dir).unwrap();
    commit(&mut store, |store| {
        store.put(&volume(9_000_001, "mine", Phase::Ready))
    })
    .unwrap();
    let mine = store.volume_named(&name("mine")).unwrap().unwrap();
    assert_eq!(mine.id.uid(), uid(9_000_001));
}
