//! The daemon as its users meet it: the real binary on the file backend, with drills.

#[path = "common/daemon.rs"]
mod daemon;

use daemon::Daemon;
use rustix::process::Signal;
use serde_json::{Value, json};

const QUICK: &str = "[deadlines]\ntrash = \"1s\"\ncreate = \"1s\"\ncancel_grace = \"200ms\"\n\
                     [trash]\nkeep = \"1h\"\n";

fn create(daemon: &Daemon, name: &str) -> Value {
    let body = json!({"name": name, "size": "1MiB"});
    let made = daemon.call("POST", "/v1/volumes?wait=60s", Some(body));
    assert_eq!(made.status, 202, "{}", made.body);
    assert_eq!(made.body["status"]["phase"], "ready", "{}", made.body);
    made.body
}

fn slug(daemon: &Daemon, method: &str, path: &str, body: Value) -> (u16, String) {
    let answer = daemon.call(method, path, Some(body));
    let slug = answer.body["type"].as_str().unwrap_or("").to_owned();
    (answer.status, slug)
}

#[test]
fn a_life_of_a_volume() {
    let daemon = Daemon::start("");
    let first = create(&daemon, "db-01");
    let again = daemon.call(
        "POST",
        "/v1/volumes",
        Some(json!({"name": "db-01", "size": "1MiB"})),
    );
    assert_eq!((again.status, &again.body["uid"]), (200, &first["uid"]));
    let other = json!({"name": "db-01", "size": "2MiB"});
    let other = daemon.call("POST", "/v1/volumes", Some(other));
    assert_eq!(other.status, 409);
    assert!(
        other.body["detail"].as_str().unwrap().contains("size"),
        "{}",
        other.body
    );
    let grown = daemon.call(
        "PATCH",
        "/v1/volumes/db-01?wait=60s",
        Some(json!({"size": "3MiB"})),
    );
    assert_eq!(
        grown.body["status"]["size_bytes"],
        3 << 20,
        "{}",
        grown.body
    );
    assert_eq!(grown.body["observed_generation"], 2);
    let shrink = slug(
        &daemon,
        "PATCH",
        "/v1/volumes/db-01",
        json!({"size": "1MiB"}),
    );
    assert_eq!(shrink, (422, "shrink".to_owned()));
    let stale = json!({"size": "4MiB", "if_generation": 1});
    assert_eq!(slug(&daemon, "PATCH", "/v1/volumes/db-01", stale).0, 409);
    let snapshot = json!({"name": "s1", "volume": "db-01"});
    let snapshot = daemon.call("POST", "/v1/snapshots?wait=60s", Some(snapshot));
    assert_eq!(
        snapshot.body["status"]["phase"], "ready",
        "{}",
        snapshot.body
    );
    let clone = json!({"name": "c1", "source": {"snapshot": "s1"}});
    let clone = daemon.call("POST", "/v1/volumes?wait=60s", Some(clone));
    assert_eq!(
        clone.body["status"]["size_bytes"],
        3 << 20,
        "{}",
        clone.body
    );
    assert_eq!(
        daemon.get("/v1/snapshots/s1")["status"]["children"],
        json!(["c1"])
    );
    // Its snapshot and its clone survive it.
    let path = format!(
        "/v1/volumes/db-01?wait=60s&uid={}",
        first["uid"].as_str().unwrap()
    );
    let deleted = daemon.call("DELETE", &path, None);
    assert_eq!(
        (deleted.status, &deleted.body["status"]["phase"]),
        (202, &json!("deleted"))
    );
    assert_eq!(daemon.call("GET", "/v1/volumes/db-01", None).status, 404);
    assert_eq!(daemon.get("/v1/snapshots/s1")["status"]["phase"], "ready");
    let entry = daemon.get("/v1/trash")["items"][0].clone();
    assert_eq!(
        (&entry["uid"], &entry["name"]),
        (&first["uid"], &json!("db-01"))
    );
    let restore = format!(
        "/v1/trash/{}/restore?wait=60s",
        entry["uid"].as_str().unwrap()
    );
    let back = daemon.call("POST", &restore, None);
    assert_eq!((back.status, &back.body["uid"]), (202, &first["uid"]));
    assert_eq!(back.body["status"]["phase"], "ready", "{}", back.body);
    let gone = daemon.call("DELETE", "/v1/snapshots/s1?wait=60s", None);
    assert_eq!(gone.body["status"]["phase"], "deleted", "{}", gone.body);
    daemon.call("DELETE", "/v1/volumes/db-01?wait=60s", None);
    let purge = format!("/v1/trash/{}", first["uid"].as_str().unwrap());
    assert_eq!(daemon.call("DELETE", &purge, None).status, 202);
    daemon.until("the trash is empty", |daemon| {
        daemon.get("/v1/trash")["items"] == json!([])
    });
    assert_eq!(daemon.files("trash"), Vec::<String>::new());
    assert_eq!(daemon.files("snapshots"), Vec::<String>::new());
    let events = daemon.get("/v1/events?limit=1000");
    let seqs: Vec<u64> = events["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|e| e["seq"].as_u64().unwrap())
        .collect();
    assert!(
        seqs.iter().zip(1..).all(|(seq, n)| *seq == n),
        "a gap in {seqs:?}"
    );
}

#[test]
fn what_is_wrong_is_told_and_nothing_is_kept_of_it() {
    let daemon = Daemon::start("");
    let long = "x".repeat(10_000);
    for (body, status) in [
        (json!({"name": "a/b", "size": 1}), 422),
        (json!({"name": "..", "size": 1}), 422),
        (json!({"name": "a\0b", "size": 1}), 422),
        (json!({"name": long, "size": 1}), 422),
        (json!({"name": "v", "size": 0}), 422),
        (json!({"name": "v", "size": -1}), 422),
        (json!({"name": "v", "size": 1.5}), 422),
        (
            json!({"name": "v", "size": 18_446_744_073_709_551_615_u64}),
            422,
        ),
        (json!({"name": "v", "size": "ten"}), 422),
        (json!({"name": "v"}), 422),
        (json!({"name": "v", "size": 1, "colour": "red"}), 422),
        (json!({"name": "v", "size": 1, "class": "none"}), 422),
        (json!({"name": "v", "source": {"snapshot": "none"}}), 422),
        (json!({"name": "v", "size": 1, "qos": {"iops": 5}}), 422),
        (
            json!({"name": "v", "size": 1, "encryption": {"key_id": "k"}}),
            422,
        ),
        (
            json!({"name": "v", "source": {"file": "/etc/passwd", "format": "raw"}}),
            422,
        ),
    ] {
        let answer = daemon.call("POST", "/v1/volumes", Some(body.clone()));
        assert_eq!(answer.status, status, "{body:.200}: {}", answer.body);
        let detail = answer.body["detail"].as_str().unwrap_or("");
        assert!(
            detail.len() > 10 && answer.body["field"].is_string(),
            "{}",
            answer.body
        );
    }
    assert_eq!(daemon.call("GET", "/v2", None).status, 404);
    assert_eq!(
        daemon.call("PUT", "/v1/volumes", Some(json!({}))).status,
        405
    );
    assert_eq!(daemon.call("GET", "/v1/volumes/none", None).status, 404);
    assert_eq!(daemon.call("DELETE", "/v1/volumes/none", None).status, 404);
    assert_eq!(daemon.volumes().len(), 0);
}

#[test]
fn hung_deletes_delay_no_create_and_settle_by_themselves() {
    let extra = format!("{QUICK}[lanes.delete]\nthreads = 4\nabandoned_max = 40\n");
    let daemon = Daemon::start(&extra);
    for n in 0..30 {
        create(&daemon, &format!("victim-{n}"));
    }
    daemon.faults(json!([{"step": "trash", "name": "victim-*", "action": "hang"}]));
    for n in 0..30 {
        assert_eq!(
            daemon
                .call("DELETE", &format!("/v1/volumes/victim-{n}"), None)
                .status,
            202
        );
    }
    for n in 0..50 {
        create(&daemon, &format!("during-{n}"));
    }
    daemon.until("a thread is abandoned", |daemon| {
        daemon.status()["hung"]
            .as_array()
            .is_some_and(|hung| !hung.is_empty())
    });
    create(&daemon, "after");
    let hung = daemon.status()["hung"][0].clone();
    assert_eq!(
        (&hung["step"], &hung["lane"]),
        (&json!("trash"), &json!("delete"))
    );
    let health = daemon
        .health()
        .send("GET", "/healthz", None, daemon::FAR)
        .unwrap();
    assert_eq!(
        (health.status, &health.body["status"]),
        (200, &json!("degraded"))
    );
    daemon.heal();
    daemon.until("the victims are gone", |daemon| {
        daemon.volumes().len() == 51
    });
    daemon.until("all is well again", |daemon| {
        let health = daemon
            .health()
            .send("GET", "/healthz", None, daemon::FAR)
            .unwrap();
        health.body["status"] == "ok"
    });
    assert_eq!(daemon.files("trash").len(), 30);
}

#[test]
fn an_outage_costs_nobody_an_attempt() {
    let daemon = Daemon::start(QUICK);
    for n in 0..5 {
        create(&daemon, &format!("v-{n}"));
    }
    daemon.faults(json!([{"step": "*", "action": "error", "errno": 110}]));
    for n in 0..5 {
        daemon.call("DELETE", &format!("/v1/volumes/v-{n}"), None);
        let body = json!({"name": format!("w-{n}"), "size": "1MiB"});
        assert_eq!(daemon.call("POST", "/v1/volumes", Some(body)).status, 202);
    }
    daemon.until("both breakers are open", |daemon| {
        let lanes = daemon.status()["lanes"].clone();
        lanes
            .as_array()
            .unwrap()
            .iter()
            .all(|lane| lane["breaker"]["state"] != "closed")
    });
    for volume in daemon.volumes() {
        assert_ne!(volume["status"]["phase"], "failed", "{volume}");
    }
    let view = daemon.get("/v1/volumes/w-0");
    assert!(
        view["status"]["message"].is_string(),
        "it says why it waits: {view}"
    );
    daemon.heal();
    for n in 0..5 {
        let path = format!("/v1/volumes/w-{n}?wait=60s");
        let volume = daemon.get(&path);
        assert_eq!(volume["status"]["phase"], "ready", "{volume}");
        assert_eq!(volume["status"]["attempt"], 0, "{volume}");
    }
    daemon.until("the deletes went on", |daemon| daemon.volumes().len() == 5);
}

#[test]
fn a_create_that_succeeds_late_after_its_deletion_leaves_nothing() {
    let daemon = Daemon::start(QUICK);
    daemon.faults(json!([{"step": "create", "action": "late-ok", "for": "3s"}]));
    let body = json!({"name": "late", "size": "1MiB"});
    let made = daemon.call("POST", "/v1/volumes", Some(body));
    daemon.until("the create hangs", |daemon| {
        daemon.status()["hung"]
            .as_array()
            .is_some_and(|hung| hung.len() == 1)
    });
    assert_eq!(daemon.call("DELETE", "/v1/volumes/late", None).status, 202);
    daemon.until("it is out of sight", |daemon| daemon.volumes().is_empty());
    let uid = made.body["uid"].as_str().unwrap();
    daemon.call("DELETE", &format!("/v1/trash/{uid}"), None);
    daemon.until("nothing is left", |daemon| {
        daemon.get("/v1/trash")["items"] == json!([])
            && daemon.files("trash").is_empty()
            && daemon.files("volumes").is_empty()
            && daemon.files("tmp").is_empty()
    });
}

#[test]
fn a_panic_of_the_backend_is_a_failed_attempt() {
    let daemon = Daemon::start("[retry]\nattempts = 2\nbase = \"10ms\"\n");
    daemon.faults(json!([{"step": "create", "name": "bad", "action": "panic"}]));
    let body = json!({"name": "bad", "size": "1MiB"});
    let bad = daemon.call("POST", "/v1/volumes?wait=60s", Some(body)).body;
    assert_eq!(
        (&bad["status"]["phase"], &bad["status"]["reason"]),
        (&json!("failed"), &json!("Transient"))
    );
    create(&daemon, "good");
    daemon.heal();
    assert_eq!(
        daemon.call("POST", "/v1/volumes/bad/retry", None).status,
        202
    );
    assert_eq!(
        daemon.get("/v1/volumes/bad?wait=60s")["status"]["phase"],
        "ready"
    );
}

#[test]
fn threads_that_hang_on_a_healthy_backend_end_in_exit_75() {
    let extra = format!(
        "{QUICK}[lanes.delete]\nthreads = 2\nabandoned_max = 1\n[restart]\nafter = \"1s\"\n\
         [breaker]\nopen = \"200ms\"\nopen_cap = \"500ms\"\n[retry]\nhangs = 5\n"
    );
    let mut daemon = Daemon::start(&extra);
    create(&daemon, "stuck");
    daemon.faults(json!([{"step": "trash", "action": "hang"}]));
    daemon.call("DELETE", "/v1/volumes/stuck", None);
    assert_eq!(daemon.ended().code(), Some(75), "{}", daemon.log());
    daemon.again(&[]);
    daemon.wait_ready();
    daemon.until("it settles after the restart", |daemon| {
        daemon.volumes().is_empty()
    });
}

#[test]
fn a_full_pool_while_the_probe_fails_stops_that_pool_only() {
    let extra = format!(
        "{QUICK}[lanes.delete]\nthreads = 2\nabandoned_max = 1\n[restart]\nafter = \"1s\"\n\
         [breaker]\nopen = \"200ms\"\nopen_cap = \"500ms\"\n"
    );
    let daemon = Daemon::start(&extra);
    create(&daemon, "a");
    create(&daemon, "b");
    daemon.faults(json!([
        {"step": "trash", "action": "hang"}, {"step": "probe", "action": "error", "errno": 5}
    ]));
    daemon.call("DELETE", "/v1/volumes/a", None);
    daemon.until("the pool is full", |daemon| {
        daemon.status()["lanes"][1]["abandoned"] == 1
    });
    daemon.call("DELETE", "/v1/volumes/b", None);
    create(&daemon, "c");
    let health = daemon
        .health()
        .send("GET", "/healthz", None, daemon::FAR)
        .unwrap();
    assert_eq!(
        (health.status, &health.body["status"]),
        (200, &json!("degraded"))
    );
    assert!(
        daemon
            .volumes()
            .iter()
            .all(|volume| volume["status"]["phase"] != "failed")
    );
    daemon.heal();
    daemon.until("both deletes went on", |daemon| daemon.volumes().len() == 1);
}

#[test]
fn sigterm_finishes_what_runs_and_names_what_hangs() {
    let extra = format!("{QUICK}[shutdown]\ngrace = \"1s\"\n");
    let mut daemon = Daemon::start(&extra);
    create(&daemon, "hangs");
    daemon.faults(json!([{"step": "trash", "action": "hang"}]));
    daemon.call("DELETE", "/v1/volumes/hangs", None);
    daemon.until("it runs", |daemon| {
        let status = daemon.status();
        status["running"] != json!([]) || status["hung"] != json!([])
    });
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.ended().code(), Some(0), "{}", daemon.log());
    assert!(
        daemon.log().contains("left behind: trash of volume/hangs"),
        "{}",
        daemon.log()
    );
    daemon.again(&[]);
    daemon.wait_ready();
    daemon.until("it went on", |daemon| daemon.volumes().is_empty());
}

#[test]
fn the_second_instance_is_refused_and_robs_nobody() {
    let daemon = Daemon::start("");
    let second = std::process::Command::new(env!("CARGO_BIN_EXE_volward"))
        .args(["serve", "--config"])
        .arg(daemon.dir.join("volward.toml"))
        .output()
        .expect("the binary");
    let words = String::from_utf8_lossy(&second.stderr).into_owned();
    assert_eq!(second.status.code(), Some(2), "{words}");
    assert!(
        words.contains(&daemon.child.id().to_string()),
        "it names the holder: {words}"
    );
    create(&daemon, "still-served");
}

#[test]
fn a_reload_changes_lanes_live_and_a_bad_file_changes_nothing() {
    let daemon = Daemon::start("[lanes.create]\nthreads = 2\n");
    let path = daemon.dir.join("volward.toml");
    let threads = |daemon: &Daemon| daemon.status()["lanes"][0]["threads"].clone();
    assert_eq!(threads(&daemon), 2);
    std::fs::write(
        &path,
        daemon::config(&daemon.dir, "[lanes.create]\nthreads = 5\n"),
    )
    .unwrap();
    daemon.signal(Signal::HUP);
    daemon.until("five workers", |daemon| threads(daemon) == 5);
    std::fs::write(&path, "[lanes.create]\nthreds = 7\n").unwrap();
    daemon.signal(Signal::HUP);
    daemon.until("it says so", |daemon| daemon.log().contains("threds"));
    assert_eq!(threads(&daemon), 5);
    create(&daemon, "v");
}

#[test]
fn a_full_backlog_is_told_and_deletes_are_taken_all_the_same() {
    let daemon = Daemon::start("[limits]\nbacklog = 3\n");
    create(&daemon, "old");
    daemon.faults(json!([{"step": "*", "name": "*", "action": "error", "errno": 110}]));
    let mut refused = None;
    for n in 0..10 {
        let body = json!({"name": format!("v-{n}"), "size": "1MiB"});
        let answer = daemon.call("POST", "/v1/volumes", Some(body));
        if answer.status == 429 {
            refused = Some(answer.body);
            break;
        }
    }
    let refused = refused.expect("a refusal");
    assert_eq!(
        (&refused["type"], &refused["retry_after_s"]),
        (&json!("backlog"), &json!(1))
    );
    assert_eq!(daemon.call("DELETE", "/v1/volumes/old", None).status, 202);
    daemon.heal();
    daemon.until("what was taken is done", |daemon| {
        let volumes = daemon.volumes();
        volumes.len() == 3 && volumes.iter().all(|v| v["status"]["phase"] == "ready")
    });
}

#[test]
fn many_who_wait_delay_nobody() {
    let daemon = Daemon::start("");
    let newest = daemon.get("/v1/events")["next"].as_u64().unwrap();
    std::thread::scope(|scope| {
        let path = format!("/v1/events?after={newest}&wait=60s");
        let waiting: Vec<_> = (0..100)
            .map(|_| {
                let path = path.clone();
                let client = daemon.client();
                scope.spawn(move || client.send("GET", &path, None, daemon::FAR))
            })
            .collect();
        create(&daemon, "wakes-them");
        for one in waiting {
            let answer = one.join().expect("a thread").expect("an answer");
            assert_eq!(answer.status, 200);
            assert!(
                answer.body["next"].as_u64().unwrap() > newest,
                "{}",
                answer.body
            );
        }
    });
}

#[test]
fn what_hangs_again_and_again_on_a_healthy_backend_is_given_up() {
    let extra = format!(
        "{QUICK}[lanes.delete]\nthreads = 2\nabandoned_max = 1\n[restart]\nafter = \"1s\"\n\
         [breaker]\nopen = \"200ms\"\nopen_cap = \"500ms\"\n[retry]\nhangs = 2\n\
         [[backend.faults.rules]]\nstep = \"trash\"\nname = \"stuck\"\naction = \"hang\"\n"
    );
    let mut daemon = Daemon::start(&extra);
    create(&daemon, "stuck");
    daemon.call("DELETE", "/v1/volumes/stuck", None);
    assert_eq!(daemon.ended().code(), Some(75), "{}", daemon.log());
    daemon.again(&[]);
    daemon.wait_ready();
    daemon.until("it is given up", |daemon| {
        let volumes = daemon
            .client()
            .send("GET", "/v1/volumes/stuck", None, daemon::FAR);
        volumes.is_ok_and(|answer| answer.body["status"]["phase"] == "failed")
    });
    let stuck = daemon.get("/v1/volumes/stuck");
    assert_eq!(stuck["status"]["reason"], "Hung", "{stuck}");
    // The process that holds the second hang ends once more; then nothing is left to do.
    assert_eq!(daemon.ended().code(), Some(75), "{}", daemon.log());
    daemon.again(&[]);
    daemon.wait_ready();
    create(&daemon, "other");
    let stuck = daemon.get("/v1/volumes/stuck");
    assert_eq!(stuck["status"]["phase"], "failed", "{stuck}");
}
