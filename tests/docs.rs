//! The runbook and the drills are complete, the alerts hold, the unit is tight.

#![allow(clippy::unwrap_used)] // a test may fail by panicking, its helpers as well
use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Stdio};
use volward::model::{ErrorKind, Step};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

fn read(path: &str) -> String {
    let path = Path::new(ROOT).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The words that have a heading of their own in the runbook.
fn headings() -> BTreeSet<String> {
    let text = read("docs/runbook.md");
    let entries = text.lines().filter_map(|line| line.strip_prefix("## "));
    let entries: Vec<String> = entries.map(str::to_owned).collect();
    let unique: BTreeSet<String> = entries.iter().cloned().collect();
    assert_eq!(entries.len(), unique.len(), "a heading is there twice");
    unique
}

fn alerts() -> BTreeSet<String> {
    let text = read("etc/alerts.yml");
    let names = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "));
    names.map(str::to_owned).collect()
}

/// The scheduler's string literals of one CamelCase word: they are event reasons.
fn event_reasons() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir(Path::new(ROOT).join("src/sched")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|it| it != "rs") {
            continue;
        }
        let text = std::fs::read_to_string(path).unwrap();
        for piece in text
            .lines()
            .flat_map(|line| line.split('"').skip(1).step_by(2))
        {
            let camel = piece.len() > 1
                && piece.starts_with(|c: char| c.is_ascii_uppercase())
                && piece.chars().all(|c| c.is_ascii_alphabetic());
            if camel {
                found.insert(piece.to_owned());
            }
        }
    }
    found
}

#[test]
fn the_runbook_knows_every_reason_and_every_alert_and_nothing_else() {
    let mut wanted: BTreeSet<String> = ErrorKind::ALL.iter().map(|it| it.as_str().into()).collect();
    let reasons = event_reasons();
    assert!(
        reasons.contains("Hung") && reasons.contains("NoSpace"),
        "{reasons:?}"
    );
    wanted.extend(reasons);
    let alerts = alerts();
    assert!(alerts.len() > 10, "{alerts:?}");
    wanted.extend(alerts);
    assert_eq!(headings(), wanted);
}

#[test]
fn links_of_the_runbook_and_the_alerts_lead_somewhere() {
    let anchors: BTreeSet<String> = headings().iter().map(|it| it.to_lowercase()).collect();
    let runbook = read("docs/runbook.md");
    let alert_rules = read("etc/alerts.yml");
    let links = runbook
        .split("](#")
        .skip(1)
        .map(|it| it.split(')').next().unwrap());
    let from_alerts = alert_rules.split("runbook.md#").skip(1);
    let from_alerts = from_alerts.map(|it| it.split('"').next().unwrap());
    let mut count = 0;
    for link in links.chain(from_alerts) {
        assert!(anchors.contains(link), "#{link} leads nowhere");
        count += 1;
    }
    assert!(count > alerts().len());
    assert_eq!(alert_rules.matches("runbook.md#").count(), alerts().len());
}

#[test]
fn the_drills_know_every_step_and_action() {
    let text = read("docs/drills.md");
    for step in Step::ALL {
        let step = step.as_str();
        let known = text.contains(&format!("\"step\":\"{step}\""));
        assert!(known, "no drill with step {step}");
    }
    for action in ["hang", "delay", "error", "late-ok", "half", "panic"] {
        let known = text.contains(&format!("\"action\":\"{action}\""));
        assert!(known, "no drill with action {action}");
    }
}

#[test]
fn every_alert_has_a_case_in_which_it_fires() {
    let cases = read("tests/alerts_test.yml");
    for alert in alerts() {
        let case = format!("count(ALERTS{{alertname=\"{alert}\",alertstate=\"firing\"}})");
        assert!(cases.contains(&case), "{alert} has no case");
    }
    check("promtool", &["check", "rules", "etc/alerts.yml"]);
    check("promtool", &["test", "rules", "tests/alerts_test.yml"]);
}

#[test]
fn the_dashboard_for_grafana_is_valid_json() {
    let board: serde_json::Value = serde_json::from_str(&read("etc/grafana.json")).unwrap();
    let panels = board["panels"].as_array().unwrap();
    assert!(panels.len() > 10);
    let ids: BTreeSet<i64> = panels.iter().map(|it| it["id"].as_i64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len(), "two panels with one id");
}

/// Runs a checker if this host has it (with VOLWARD_OPS set it must). What it said.
fn check(command: &str, arguments: &[&str]) -> Option<String> {
    let ran = Command::new(command)
        .args(arguments)
        .current_dir(ROOT)
        .stdin(Stdio::null())
        .output();
    let Ok(ran) = ran else {
        let must = std::env::var_os("VOLWARD_OPS").is_some();
        assert!(!must, "VOLWARD_OPS is set, but {command} is missing");
        eprintln!("no {command} here: {arguments:?} isn't checked");
        return None;
    };
    let said = String::from_utf8_lossy(&ran.stdout).into_owned();
    let complaint = String::from_utf8_lossy(&ran.stderr);
    assert!(
        ran.status.success(),
        "{command} {arguments:?}: {complaint}{said}"
    );
    assert_eq!(complaint, "", "{command} {arguments:?}");
    Some(said)
}

#[test]
fn the_unit_is_valid_and_tight() {
    let unit = read("etc/volward.service");
    let has = |line: &str| assert!(unit.lines().any(|it| it == line), "{line} is missing");
    has("Type=notify");
    has("RestartForceExitStatus=75");
    has("NoNewPrivileges=yes");
    has("ProtectSystem=strict");
    // The binary and the manual are installed with the package; the rest is checked as it is.
    let dir = std::env::temp_dir().join(format!("volward-unit-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let path = dir.join("volward.service");
    let here = unit
        .replace("/usr/bin/volward", env!("CARGO_BIN_EXE_volward"))
        .replace("Documentation=man:volward(1)\n", "");
    std::fs::write(&path, here).unwrap();
    let path = path.to_str().unwrap();
    check("systemd-analyze", &["verify", path]);
    // In tenths: above 2.0 it complains.
    check(
        "systemd-analyze",
        &["security", "--offline=yes", "--threshold=20", path],
    );
    std::fs::remove_dir_all(dir).unwrap();
}
