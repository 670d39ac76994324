//! The daemon on a real cluster while one of its pools, or all of it, doesn't answer.
//!
//! When it runs and on which cluster: see `tests/ceph.rs`.
#![cfg(feature = "rbd")]
// Helpers of tests may fail as loudly as tests.
#![allow(clippy::unwrap_used, missing_debug_implementations)]

#[path = "common/daemon.rs"]
mod daemon;
#[allow(dead_code)] // another test program uses the rest
#[path = "ceph/lab.rs"]
mod lab;

use daemon::Daemon;
use lab::Lab;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;

/// So many of each kind hang at once.
const EACH: usize = 30;

/// The cluster's two pools as two classes; what hangs is abandoned soon.
fn config(dir: &Path, lab: &Path) -> String {
    let (dir, lab) = (dir.display(), lab.display());
    format!(
        "[api]\nlisten = \"unix:{dir}/api.sock\"\n[health]\nlisten = \"unix:{dir}/health.sock\"\n\
         [store]\npath = \"{dir}/state/volward.db\"\n[backend]\nkind = \"rbd\"\n\
         [backend.rbd]\nconf = \"{lab}/ceph.conf\"\nuser = \"volward\"\n\
         keyring = \"{lab}/volward.keyring\"\npool = \"rbd\"\n\
         [classes.fast]\npool = \"rbd\"\ndomain = \"fast\"\n\
         [classes.slow]\npool = \"slow\"\ndomain = \"slow\"\n\
         [deadlines]\ntrash = \"2s\"\ncreate = \"2s\"\ncancel_grace = \"500ms\"\n"
    )
}

fn start(lab: &Lab) -> Daemon {
    let daemon = Daemon::launch_as(|dir| config(dir, &lab.dir), &[]);
    daemon.wait_ready();
    daemon
}

/// Sends it; it must be taken.
fn send(daemon: &Daemon, method: &str, path: &str, body: Option<Value>) -> Value {
    let answer = daemon.call(method, path, body);
    assert_eq!(answer.status, 202, "{method} {path}: {}", answer.body);
    answer.body
}

fn create(daemon: &Daemon, name: &str, class: &str) {
    let body = json!({"name": name, "size": "1GiB", "class": class});
    send(daemon, "POST", "/v1/volumes", Some(body));
}

/// Each of the volumes whose name begins so is ready, and there are so many.
fn ready(daemon: &Daemon, prefix: &str, count: usize) -> bool {
    let volumes = daemon.volumes();
    let ready = |v: &&Value| {
        v["name"].as_str().unwrap().starts_with(prefix) && v["status"]["phase"] == "ready"
    };
    volumes.iter().filter(ready).count() == count
}

/// How many volumes have a name that begins so, in whatever phase.
fn named(daemon: &Daemon, prefix: &str) -> usize {
    let volumes = daemon.volumes();
    let named = |v: &&Value| v["name"].as_str().unwrap().starts_with(prefix);
    volumes.iter().filter(named).count()
}

fn trash(daemon: &Daemon) -> Vec<Value> {
    let page = daemon.get("/v1/trash?limit=1000");
    page["items"].as_array().cloned().unwrap()
}

fn words(text: &str, column: usize) -> BTreeSet<String> {
    let word = |line: &str| line.split_whitespace().nth(column).map(str::to_owned);
    text.lines().filter_map(word).collect()
}

/// What the cluster has in that pool is what the lists of the API say.
fn assert_agree(daemon: &Daemon, lab: &Lab, pool: &str) {
    let handle = format!("rbd:{pool}/");
    let volumes: BTreeSet<String> = daemon
        .volumes()
        .iter()
        .filter_map(|v| v["status"]["handle"].as_str()?.strip_prefix(&handle))
        .map(str::to_owned)
        .collect();
    let images = words(&lab.run(&["rbd", "ls", pool]), 0);
    assert_eq!(images, volumes);
    let entries = words(&lab.run(&["rbd", "trash", "ls", pool]), 1);
    let known = trash(daemon);
    assert_eq!(entries.len(), known.len(), "{entries:?} and {known:?}");
    for entry in &known {
        let uid = entry["uid"].as_str().unwrap().to_lowercase();
        let there = entries.iter().any(|e| e.to_lowercase().ends_with(&uid));
        assert!(there, "{uid} isn't in the trash of {pool}: {entries:?}");
    }
}

#[test]
fn ninety_hung_calls_on_one_pool_and_creates_on_the_other() {
    let Some(lab) = Lab::asked() else { return };
    let daemon = start(&lab);
    create(&daemon, "base", "slow");
    for n in 0..EACH {
        create(&daemon, &format!("delete-{n}"), "slow");
        create(&daemon, &format!("reclaim-{n}"), "slow");
    }
    daemon.until("all are made", |d| {
        ready(d, "delete-", EACH) && ready(d, "reclaim-", EACH) && ready(d, "base", 1)
    });
    let snapshot = json!({"name": "kept", "volume": "base"});
    let snapshot = send(&daemon, "POST", "/v1/snapshots?wait=60s", Some(snapshot));
    assert_eq!(snapshot["status"]["phase"], "ready", "{snapshot}");
    for n in 0..EACH {
        send(&daemon, "DELETE", &format!("/v1/volumes/reclaim-{n}"), None);
    }
    daemon.until("all to be reclaimed are in the trash", |d| {
        named(d, "reclaim-") == 0 && trash(d).len() == EACH
    });
    let doomed = trash(&daemon);

    lab.pause("slow");
    for (n, entry) in doomed.iter().enumerate() {
        let uid = entry["uid"].as_str().unwrap();
        send(&daemon, "DELETE", &format!("/v1/volumes/delete-{n}"), None);
        send(&daemon, "DELETE", &format!("/v1/trash/{uid}"), None);
        let clone = json!({"name": format!("clone-{n}"), "source": {"snapshot": "kept"}});
        send(&daemon, "POST", "/v1/volumes", Some(clone));
    }
    // The other pool takes all that it is asked for, and everything answers.
    for n in 0..100 {
        create(&daemon, &format!("fine-{n}"), "fast");
    }
    daemon.until("the other pool's are made", |d| ready(d, "fine-", 100));
    let alive = daemon.health().send("GET", "/healthz", None, daemon::FAR);
    assert_eq!(alive.unwrap().status, 200);
    daemon.until("what hangs is reported", |d| {
        let hung = d.status()["hung"].clone();
        hung.as_array().is_some_and(|hung| !hung.is_empty())
    });
    assert!(ready(&daemon, "clone-", 0), "the pool was not hung");
    assert_eq!(named(&daemon, "delete-"), EACH, "the pool was not hung");

    lab.resume("slow");
    let uids: BTreeSet<&str> = doomed.iter().filter_map(|e| e["uid"].as_str()).collect();
    daemon.until("all ninety have settled", |d| {
        let trashed = trash(d);
        let doomed = |e: &Value| uids.contains(e["uid"].as_str().unwrap());
        ready(d, "clone-", EACH)
            && named(d, "delete-") == 0
            && trashed.len() == EACH
            && !trashed.iter().any(doomed)
    });
    let failed = |v: &Value| v["status"]["phase"] == "failed";
    assert!(
        !daemon.volumes().iter().any(failed),
        "{:?}",
        daemon.volumes()
    );
    assert_agree(&daemon, &lab, "slow");
}
