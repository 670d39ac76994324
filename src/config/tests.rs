//! Tests of reading configurations.

use super::*;

const DOCUMENTED: &str = include_str!("../../etc/volward.toml");

fn ok(text: &str) -> Config {
    match Config::parse(text, "t.toml") {
        Ok(config) => config,
        Err(error) => panic!("{error}\nin {text}"),
    }
}

/// Asserts that a text is refused, with all these words in one fault.
fn bad(text: &str, words: &[&str]) {
    let Err(error) = Config::parse(text, "t.toml") else {
        panic!("accepted: {text}");
    };
    let shown = error.to_string();
    assert!(
        shown
            .lines()
            .any(|line| words.iter().all(|word| line.contains(word))),
        "{words:?} not together in:\n{shown}"
    );
}

#[test]
fn the_documented_file_has_the_defaults() {
    assert_eq!(ok(DOCUMENTED), Config::default());
    // And it shows every deadline.
    for step in Step::ALL {
        assert!(
            DOCUMENTED.contains(&format!("\n{} = ", step.as_str())),
            "{step:?}"
        );
    }
}

#[test]
fn the_keys_that_are_commented_out_exist() {
    let section = |name: &str| {
        let start = DOCUMENTED.find(&format!("# [{name}]")).expect(name);
        let lines = DOCUMENTED[start..]
            .lines()
            .take_while(|line| line.starts_with("# "));
        lines.map(|line| &line[2..]).collect::<Vec<_>>().join("\n")
    };
    let rbd = section("backend.rbd");
    let class = section("classes.fast").replace("root = ", "# root = ");
    let config = ok(&format!("[backend]\nkind='rbd'\n{rbd}\n{class}"));
    assert_eq!(config.classes["fast"].qos.burst_seconds, Some(10));
    assert_eq!(config.domains(), ["ssd"]);
    ok(&format!(
        "[backend]\nkind='sim'\n{}",
        section("backend.sim")
    ));
    ok(&section("keys.backup-2026"));
    let faults = ok(&format!(
        "[backend.faults]\nenabled=true\n{}",
        "[[backend.faults.rules]]\nstep='trash'\ncount=15"
    ));
    assert_eq!(
        faults.faults.body(),
        serde_json::json!({"rules":[{"step":"trash","count":15}]})
    );
}

#[test]
fn unknown_keys_name_line_and_nearest() {
    bad(
        "[retry]\n\natempts = 3",
        &["t.toml:3", "retry.atempts", "\"attempts\""],
    );
    bad("[apii]\nx=1", &["t.toml:1", "apii", "\"api\""]);
    bad(
        "[lanes.create]\nworkers = 3",
        &["t.toml:2", "lanes.create.workers", "threads"],
    );
    bad("[store", &["t.toml:1", "no TOML"]);
}

#[test]
fn wrong_values_name_key_value_line_and_mend() {
    let table: [(&str, &[&str]); 13] = [
        (
            "[trash]\nkeep = 30",
            &["t.toml:2: trash.keep: 30", "\"30s\""],
        ),
        ("[trash]\nkeep = '30'", &["trash.keep", "\"30s\""]),
        (
            "[trash]\nkeep = '30 parsecs'",
            &["trash.keep", "parsecs", "1h30m"],
        ),
        (
            "[limits]\nmax_size = '10 XiB'",
            &["limits.max_size", "XiB", "GiB"],
        ),
        (
            "[limits]\nbacklog = -1",
            &["limits.backlog: -1", "from 1 to"],
        ),
        (
            "[limits]\nbacklog = 'many'",
            &["limits.backlog", "whole number"],
        ),
        (
            "[limits]\nclone_depth = 15",
            &["limits.clone_depth", "clone_depth_max (14)"],
        ),
        (
            "[lanes.delete]\nthreads = 1",
            &["t.toml:2", "lanes.delete.threads", "from 2 to"],
        ),
        (
            "[deadlines]\ncreate = '4s'",
            &["deadlines.create", "cancel_grace"],
        ),
        (
            "[deadlines]\nreclaim = {stall='2h', total='1h'}",
            &["deadlines.reclaim.stall", "longer than total"],
        ),
        (
            "[deadlines]\ntrash = {stall='2s', total='1h'}",
            &["deadlines.trash", "no progress"],
        ),
        ("[store]\npath = 'x.db'", &["store.path", "absolute"]),
        (
            "[backend]\nkind = 'rdb'",
            &["backend.kind", "\"rdb\"", "did you mean \"rbd\""],
        ),
    ];
    for (text, words) in table {
        bad(text, words);
    }
}

#[test]
fn all_faults_are_named_at_once() {
    let error = Config::parse("[retry]\nx=1\ncap=5\n[log]\nlevel='loud'", "t").unwrap_err();
    let lines: Vec<_> = error.faults.iter().map(|fault| fault.line).collect();
    assert_eq!(lines, [Some(2), Some(3), Some(5)]);
}

#[test]
fn the_api_on_tcp_is_guarded() {
    bad(
        "[api]\nlisten='127.0.0.1:9700'",
        &["t.toml:1", "api.token_file", "missing"],
    );
    bad(
        "[api]\nlisten='0.0.0.0:9700'\ntoken_file='/t'",
        &["t.toml:2", "api.listen", "plaintext = true"],
    );
    ok("[api]\nlisten='0.0.0.0:9700'\ntoken_file='/t'\nplaintext=true");
    ok("[api]\nlisten='[::1]:9700'\ntoken_file='/t'");
    bad("[api]\ntoken='secret'", &["api.token", "token_file"]);
    bad("[api]\nmode='0666'", &["api.mode", "everybody"]);
    bad(
        "[keys.k]\npassphrase='s'",
        &["keys.k.passphrase", "private file"],
    );
}

#[test]
fn classes_that_share_a_pool_are_one_domain() {
    let rbd = "[backend]\nkind='rbd'\n";
    let config = ok(&format!(
        "{rbd}[classes.a]\npool='p'\n[classes.b]\npool='p'\n[classes.c]\npool='q'\ndata_pool='p'"
    ));
    assert_eq!(config.domains(), ["p"]);
    let config = ok(&format!(
        "{rbd}[classes.a]\npool='p'\ndomain='d'\n[classes.b]\npool='p'\n[classes.c]\npool='q'"
    ));
    assert_eq!(config.classes["b"].domain, "d");
    assert_eq!(config.domains(), ["d", "q"]);
    bad(
        &format!("{rbd}[classes.a]\npool='p'\ndomain='d'\n[classes.b]\npool='p'\ndomain='e'"),
        &["t.toml:6", "classes.b.domain", "\"a\"", "same domain"],
    );
    // A class between two others ties all three together, whatever their names.
    let config = ok(&format!(
        "{rbd}[classes.a]\npool='p'\n[classes.b]\npool='q'\n[classes.c]\npool='p'\ndata_pool='q'"
    ));
    assert_eq!(config.domains().len(), 1);
    bad(rbd, &["backend.rbd.pool", "missing"]);
    bad("[classes.a]\npool='p'", &["classes.a.pool", "use root"]);
    assert_eq!(
        ok("[classes.x]\nroot='/srv/x'").default_class.as_deref(),
        Some("x")
    );
}

#[test]
fn a_reload_says_what_waits() {
    let old = Config::default();
    let new = ok("[retry]\nattempts=9\n[store]\npath='/x.db'\n[limits]\nthreads=99\nbacklog=5");
    let (applies, restart) = old.live_changes(&new);
    assert_eq!(applies, ["retry", "limits"]);
    assert_eq!(restart, ["store.path", "limits.threads"]);
    let live = old.with_live(&new);
    assert_eq!((live.retry.attempts, live.limits.threads), (9, 512));
    assert!(live.live_changes(&new).0.is_empty());
}

#[test]
fn deadlines_are_found_by_step() {
    for (index, step) in Step::ALL.into_iter().enumerate() {
        assert_eq!(step as usize, index);
    }
    let config = ok("[deadlines]\nflatten='7m'\nprobe='3s'");
    assert_eq!(
        config.deadlines.of(Step::Flatten),
        Deadline {
            stall_ms: 420_000,
            total_ms: 420_000
        }
    );
    assert_eq!(config.deadlines.of(Step::Probe).total_ms, 3_000);
}
