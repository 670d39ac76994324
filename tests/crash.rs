//! kill -9 on the real binary under mixed load, at random moments and inside every file operation:
//! what was acknowledged holds, and the files are exactly what the records say.
//!
//! `CRASH_ROUNDS=N` sets how many random kills there are (30).

#[path = "common/daemon.rs"]
mod daemon;

use daemon::{Daemon, FAR};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use volward::client::Client;

/// A small seeded generator, so that a failing round can be run again.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// What a client knows for sure of a name, or that it doesn't know.
#[derive(Debug, Clone, PartialEq)]
enum Known {
    There(String),
    Gone,
    /// Its last request was cut off.
    InDoubt,
}

type Book = BTreeMap<String, Known>;

/// One client: so many requests on names of its own, or until nobody answers.
fn load(client: &Client, lane: u64, seed: u64, requests: u64, book: &mut Book) {
    let mut dice = Dice(seed | 1);
    for _ in 0..requests {
        let volume = format!("v{lane}-{}", dice.below(6));
        let snapshot = format!("s{lane}-{}", dice.below(3));
        let (kind, name, method, path, body) = match dice.below(10) {
            0..3 => {
                let body = json!({"name": volume, "size": "64KiB"});
                (
                    "volumes",
                    volume,
                    "POST",
                    "/v1/volumes".to_owned(),
                    Some(body),
                )
            }
            3 => {
                let body = json!({"name": volume, "source": {"snapshot": snapshot}});
                (
                    "volumes",
                    volume,
                    "POST",
                    "/v1/volumes".to_owned(),
                    Some(body),
                )
            }
            4 => {
                let body = json!({"name": snapshot, "volume": volume});
                (
                    "snapshots",
                    snapshot,
                    "POST",
                    "/v1/snapshots".to_owned(),
                    Some(body),
                )
            }
            5 => {
                let size = (dice.below(8) + 1) * 65_536;
                let path = format!("/v1/volumes/{volume}");
                (
                    "volumes",
                    volume,
                    "PATCH",
                    path,
                    Some(json!({"size": size})),
                )
            }
            6 | 7 => {
                let path = format!("/v1/volumes/{volume}");
                ("volumes", volume, "DELETE", path, None)
            }
            8 => {
                let path = format!("/v1/snapshots/{snapshot}");
                ("snapshots", snapshot, "DELETE", path, None)
            }
            _ => {
                // Wait for something now and then, so that work gets to its end.
                let path = format!("/v1/volumes/{volume}?wait=5s");
                ("", volume, "GET", path, None)
            }
        };
        let key = format!("{kind}/{name}");
        let before = book.get(&key).cloned().unwrap_or(Known::Gone);
        if method != "GET" {
            book.insert(key.clone(), Known::InDoubt);
        }
        let Ok(answer) = client.send(method, &path, body.as_ref(), FAR) else {
            return;
        };
        let uid = answer.body["uid"].as_str().unwrap_or("").to_owned();
        match (method, answer.status) {
            ("GET", _) => {}
            ("DELETE", 202) => drop(book.insert(key, Known::Gone)),
            (_, 200 | 202) => drop(book.insert(key, Known::There(uid))),
            _ => drop(book.insert(key, before)),
        }
    }
}

/// Four clients at once; when the first has so many answers, kill -9 under the others.
fn round(daemon: &mut Daemon, seed: u64, requests: u64, books: &mut [Book]) {
    let client = daemon.client();
    let seed_of = |lane: u64| {
        seed.wrapping_mul(31)
            .wrapping_add(lane.wrapping_mul(0x9e37_79b9))
    };
    let (first, others) = books.split_first_mut().expect("four books");
    std::thread::scope(|scope| {
        for (lane, book) in (1..).zip(others) {
            let client = client.clone();
            scope.spawn(move || load(&client, lane, seed_of(lane), 1_000_000, book));
        }
        load(&client, 0, seed_of(0), requests, first);
        daemon.kill();
    });
}

fn check_acknowledged(daemon: &Daemon, books: &mut [Book]) {
    for book in books {
        for (key, known) in book.iter_mut() {
            let there = daemon.call("GET", &format!("/v1/{key}"), None);
            match known {
                Known::There(uid) => {
                    assert_eq!(
                        there.status, 200,
                        "{key} ({uid}) was acknowledged and is lost"
                    );
                    assert_eq!(there.body["uid"], *uid, "{key} is another one");
                    let deleting = there.body["deletion_requested_at"].is_string();
                    assert!(!deleting, "{key} is being deleted and nobody asked for it");
                }
                Known::Gone => {
                    let deleting = there.body["deletion_requested_at"].is_string();
                    assert!(
                        there.status == 404 || deleting,
                        "{key} is back: {}",
                        there.body
                    );
                }
                Known::InDoubt => {
                    // From here on it is known again.
                    let deleting = there.body["deletion_requested_at"].is_string();
                    let uid = there.body["uid"].as_str().unwrap_or("").to_owned();
                    let alive = there.status == 200 && !deleting;
                    *known = if alive {
                        Known::There(uid)
                    } else {
                        Known::Gone
                    };
                }
            }
        }
    }
}

fn list(daemon: &Daemon, what: &str) -> Vec<Value> {
    let page = daemon.get(&format!("/v1/{what}?limit=1000"));
    page["items"].as_array().cloned().expect("items")
}

/// Everything settles, and the files are what the records say.
fn check_files(daemon: &Daemon) {
    daemon.until("everything has settled", |daemon| {
        let settled = |item: &Value| {
            let phase = item["status"]["phase"].as_str().unwrap_or("");
            matches!(phase, "ready" | "failed")
        };
        list(daemon, "volumes").iter().all(settled) && list(daemon, "snapshots").iter().all(settled)
    });
    let named = |item: &Value| {
        let uid = item["uid"].as_str().expect("a uid").to_lowercase();
        format!("{}-{uid}", item["name"].as_str().expect("a name"))
    };
    let of = |items: &[Value], phase: &str| -> BTreeSet<String> {
        let some = items.iter().filter(|item| item["status"]["phase"] == phase);
        some.map(named).collect()
    };
    for what in ["volumes", "snapshots"] {
        let items = list(daemon, what);
        let files = daemon.files(what).into_iter().collect::<BTreeSet<String>>();
        let (ready, failed) = (of(&items, "ready"), of(&items, "failed"));
        // A failed object may have something or nothing; its record is there to clean it up.
        let known: BTreeSet<String> = ready.union(&failed).cloned().collect();
        assert!(
            files.is_superset(&ready) && files.is_subset(&known),
            "{what}: {files:?} {items:?} {}",
            daemon.log()
        );
    }
    // Reclaim goes on meanwhile: at some moment both must agree.
    daemon.until("the trash agrees with its files", |daemon| {
        let entries: BTreeSet<String> = list(daemon, "trash")
            .iter()
            .map(|item| item["uid"].as_str().expect("a uid").to_lowercase())
            .collect();
        let files = daemon
            .files("trash")
            .into_iter()
            .collect::<BTreeSet<String>>();
        entries == files && daemon.files("tmp").is_empty()
    });
    for item in list(daemon, "volumes") {
        if item["status"]["phase"] == "ready" {
            let path = item["status"]["handle"].as_str().expect("a handle");
            let length = std::fs::metadata(path).expect("an image").len();
            assert_eq!(Some(length), item["spec"]["size_bytes"].as_u64(), "{item}");
        }
    }
}

#[test]
fn kill_9_at_random_moments_loses_nothing() {
    let rounds = std::env::var("CRASH_ROUNDS").map_or(30, |n| n.parse().expect("a number"));
    let mut daemon = Daemon::start("[trash]\nkeep = \"1s\"\n");
    let mut books = vec![Book::new(); 4];
    for number in 0..rounds {
        let requests = 5 + number * 7 % 60;
        round(&mut daemon, 1 + number, requests, &mut books);
        daemon.again(&[]);
        daemon.wait_ready();
        check_acknowledged(&daemon, &mut books);
    }
    check_files(&daemon);
}

#[test]
fn a_crash_inside_any_file_operation_loses_nothing() {
    for point in volward::backend::file::FAILPOINTS {
        for nth in [1, 2] {
            let armed = format!("{point}:{nth}");
            let environment = [("VOLWARD_FAILPOINT", armed.as_str())];
            let mut daemon = Daemon::launch("[trash]\nkeep = \"100ms\"\n", &environment);
            let mut books = vec![Book::new(); 1];
            let client = daemon.client();
            // Until the socket is there nobody answers: the load begins with the first answer.
            daemon.until("it listens or has died", |daemon| {
                let dead = std::fs::read_to_string(daemon.dir.join("log"))
                    .is_ok_and(|log| log.contains("VOLWARD_FAILPOINT: abort"));
                dead || client.send("GET", "/v1/status", None, FAR).is_ok()
            });
            load(&client, 0, 7 + nth, 150, &mut books[0]);
            // Some points are passed once in the life of a root only.
            let _ = daemon.child.kill();
            let _ = daemon.child.wait();
            daemon.again(&[]);
            daemon.wait_ready();
            check_acknowledged(&daemon, &mut books);
            check_files(&daemon);
        }
    }
}
