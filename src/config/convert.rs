//! The one conversion from text to `Config`, section by section, with every default.

use super::read::{Found, Section, Sheet, nearest};
use super::{
    Api, Breaker, Config, Deadline, Deadlines, Doctor, Events, Fault, Health, LaneConfig, Lanes,
    Limits, Listen, Retry, Trash, classes,
};
use crate::model::Step;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use toml::de::DeTable;

const SECOND: u64 = 1_000;
const MINUTE: u64 = 60 * SECOND;
const HOUR: u64 = 60 * MINUTE;
const DAY: u64 = 24 * HOUR;

/// Any time that makes sense for a limit.
const SOME_TIME: std::ops::RangeInclusive<u64> = 1..=365 * DAY;

pub(super) fn config(text: &str) -> Result<Config, Vec<Fault>> {
    let sheet = Sheet::new(text);
    let table = match DeTable::parse(text) {
        Ok(table) => table,
        Err(error) => {
            let line = error.span().map(|span| sheet.line(span.start));
            let message = error.message().replace('\n', " ");
            sheet.fault(line, "", format!("this is no TOML: {message}"));
            return Err(sheet.into_faults());
        }
    };
    let root = Section::root(&sheet, table.get_ref());
    let backend_section = root.section("backend");
    let backend = classes::backend(&backend_section);
    let faults = classes::faults(&backend_section);
    backend_section.finish();
    let (class_map, default_class) = classes::classes(&root.section("classes"), &backend);
    let config = Config {
        api: api(root.section("api")),
        health: health(root.section("health")),
        log_level: log_level(root.section("log")),
        store_path: store(root.section("store")),
        events: events(root.section("events")),
        limits: limits(root.section("limits")),
        lanes: lanes(root.section("lanes")),
        deadlines: deadlines(root.section("deadlines")),
        retry: retry(root.section("retry")),
        breaker: breaker(root.section("breaker")),
        trash: trash(root.section("trash")),
        shutdown_grace_ms: one_duration(root.section("shutdown"), "grace", 30 * SECOND),
        restart_after_ms: one_duration(root.section("restart"), "after", 60 * SECOND),
        keys: keys(&root.section("keys")),
        doctor: doctor(root.section("doctor")),
        classes: class_map,
        default_class,
        backend,
        faults,
    };
    root.finish();
    let faults = sheet.into_faults();
    if faults.is_empty() {
        Ok(config)
    } else {
        Err(faults)
    }
}

/// An absolute path.
pub(super) fn path(found: &Found<'_, '_>) -> Option<PathBuf> {
    let path = PathBuf::from(found.string()?);
    if !path.is_absolute() {
        found.wrong("the path must be absolute; begin it with \"/\"");
        return None;
    }
    Some(path)
}

pub(super) fn path_of(section: &Section<'_, '_>, name: &str) -> Option<PathBuf> {
    path(&section.get(name)?)
}

fn number<T: TryFrom<u64>>(value: u64, fallback: T) -> T {
    T::try_from(value).unwrap_or(fallback)
}

fn listen(section: &Section<'_, '_>, default: Listen) -> Listen {
    let Some(found) = section.get("listen") else {
        return default;
    };
    let Some(text) = found.string() else {
        return default;
    };
    if let Some(path) = text.strip_prefix("unix:") {
        // The kernel's limit for the path of a socket is 108 bytes with the closing zero.
        if !path.starts_with('/') {
            found.wrong(
                "the path of the socket must be absolute, as in \"unix:/run/volward/api.sock\"",
            );
        } else if path.len() > 107 {
            found.wrong("the path of a socket has at most 107 bytes; use a shorter one");
        }
        return Listen::Unix(PathBuf::from(path));
    }
    let text = text.replace("localhost:", "127.0.0.1:");
    match text.parse::<SocketAddr>() {
        Ok(address) => Listen::Tcp(address),
        Err(_) => {
            found.wrong(
                "an address is \"unix:/PATH\" or \"IP:PORT\", such as \"unix:/run/volward/api.sock\" \
                 or \"127.0.0.1:9700\"",
            );
            default
        }
    }
}

fn api(section: Section<'_, '_>) -> Api {
    let api = Api {
        listen: listen(
            &section,
            Listen::Unix(PathBuf::from("/run/volward/api.sock")),
        ),
        mode: mode(&section),
        group: section.string("group"),
        token_file: path_of(&section, "token_file"),
        plaintext: section.boolean("plaintext", false),
        allowed_hosts: section.strings("allowed_hosts"),
    };
    if let Listen::Tcp(address) = api.listen {
        if api.token_file.is_none() {
            section.wrong(
                "token_file",
                format!(
                    "it is missing, and the API listens on TCP ({address}); set it to a private \
                     file with a token, or listen on \"unix:/run/volward/api.sock\""
                ),
            );
        }
        if !address.ip().is_loopback() && !api.plaintext {
            section.wrong(
                "listen",
                format!(
                    "{address} is reachable from other hosts and the token would go unencrypted; \
                     listen on 127.0.0.1 behind a TLS proxy, or set plaintext = true"
                ),
            );
        }
    }
    section.finish();
    api
}

/// The permissions of the socket: `"0660"`.
fn mode(section: &Section<'_, '_>) -> u32 {
    const DEFAULT: u32 = 0o660;
    let Some(found) = section.get("mode") else {
        return DEFAULT;
    };
    let text = match found.value.as_str() {
        Some(text) => text.to_owned(),
        None => {
            found.wrong("permissions stand in quotes and are octal, such as \"0660\"");
            return DEFAULT;
        }
    };
    match u32::from_str_radix(text.trim_start_matches("0o"), 8) {
        Ok(mode) if mode & !0o777 == 0 && mode & 0o600 == 0o600 => {
            if mode & 0o007 != 0 {
                found.wrong("everybody on this host could delete volumes; use \"0660\" and group");
            }
            mode
        }
        _ => {
            found.wrong("permissions are octal, from \"0600\" to \"0660\"");
            DEFAULT
        }
    }
}

fn health(section: Section<'_, '_>) -> Health {
    let default = Listen::Tcp(SocketAddr::from(([127, 0, 0, 1], 9701)));
    let health = Health {
        listen: listen(&section, default),
        token_file: path_of(&section, "token_file"),
        allowed_hosts: section.strings("allowed_hosts"),
        heartbeat_max_ms: section.duration("heartbeat_max", 10 * SECOND, SECOND..=HOUR),
    };
    section.finish();
    health
}

fn log_level(section: Section<'_, '_>) -> log::LevelFilter {
    let mut level = log::LevelFilter::Info;
    if let Some(found) = section.get("level")
        && let Some(text) = found.string()
    {
        match text.parse() {
            Ok(parsed) => level = parsed,
            Err(_) => found
                .wrong("a level is \"off\", \"error\", \"warn\", \"info\", \"debug\" or \"trace\""),
        }
    }
    section.finish();
    level
}

fn store(section: Section<'_, '_>) -> PathBuf {
    let path = path_of(&section, "path");
    section.finish();
    path.unwrap_or_else(|| PathBuf::from("/var/lib/volward/volward.db"))
}

fn events(section: Section<'_, '_>) -> Events {
    let events = Events {
        max: section.integer("max", 100_000, 100..=100_000_000),
        keep_ms: section.duration("keep", 7 * DAY, MINUTE..=3650 * DAY),
    };
    section.finish();
    events
}

fn limits(section: Section<'_, '_>) -> Limits {
    let int = |name, default, range| section.integer(name, default, range);
    let limits = Limits {
        backlog: number(int("backlog", 10_000, 1..=1_000_000), 10_000),
        max_size_bytes: section.size("max_size", 64 << 40, 1..=i64::MAX as u64),
        max_volumes: int("max_volumes", 1_000_000, 1..=100_000_000),
        clone_depth: number(int("clone_depth", 8, 1..=15), 8),
        clone_depth_max: number(int("clone_depth_max", 14, 1..=15), 14),
        threads: number(int("threads", 512, 16..=100_000), 512),
        encrypt: number(int("encrypt", 1, 1..=1_000), 1),
    };
    if limits.clone_depth > limits.clone_depth_max {
        section.wrong(
            "clone_depth",
            format!(
                "{} is above clone_depth_max ({}): clones would be refused before they are \
                 flattened; make it smaller",
                limits.clone_depth, limits.clone_depth_max
            ),
        );
    }
    section.finish();
    limits
}

fn lanes(section: Section<'_, '_>) -> Lanes {
    let lane = |name: &str| {
        let lane = section.section(name);
        let config = LaneConfig {
            // Background work never takes the last worker, so one alone would do none of it.
            threads: number(lane.integer("threads", 8, 2..=1_000), 8),
            abandoned_max: number(lane.integer("abandoned_max", 16, 1..=10_000), 16),
        };
        lane.finish();
        config
    };
    let lanes = Lanes {
        create: lane("create"),
        delete: lane("delete"),
    };
    section.finish();
    lanes
}

/// The default of a step: stall and total.
fn default_deadline(step: Step) -> (u64, u64) {
    match step {
        Step::Create => (MINUTE, 10 * MINUTE),
        Step::Snapshot => (MINUTE, 10 * MINUTE),
        Step::Import => (2 * MINUTE, 24 * HOUR),
        Step::Flatten | Step::Reclaim => (2 * MINUTE, 24 * HOUR),
        Step::Encrypt => (5 * MINUTE, 5 * MINUTE),
        Step::Update | Step::Restore => (MINUTE, MINUTE),
        Step::Trash | Step::RemoveSnapshot => (MINUTE, MINUTE),
        Step::Inspect | Step::Probe | Step::Connect => (30 * SECOND, 30 * SECOND),
    }
}

/// Steps that report progress may have a stall limit of their own.
fn reports_progress(step: Step) -> bool {
    matches!(
        step,
        Step::Create | Step::Snapshot | Step::Flatten | Step::Reclaim | Step::Import
    )
}

fn deadlines(section: Section<'_, '_>) -> Deadlines {
    let cancel_grace_ms = section.duration("cancel_grace", 5 * SECOND, 1..=HOUR);
    let steps = Step::ALL.map(|step| {
        let deadline = deadline(&section, step);
        // Steps that can't be cancelled don't look at the flag, and may be shorter than it.
        if reports_progress(step) && deadline.stall_ms <= cancel_grace_ms {
            section.wrong(
                step.as_str(),
                format!(
                    "its stall limit must be longer than cancel_grace ({}); raise it or lower \
                     deadlines.cancel_grace",
                    crate::duration::show_duration(cancel_grace_ms)
                ),
            );
        }
        deadline
    });
    section.finish();
    Deadlines {
        steps,
        cancel_grace_ms,
    }
}

fn deadline(section: &Section<'_, '_>, step: Step) -> Deadline {
    let (mut stall_ms, mut total_ms) = default_deadline(step);
    let Some(found) = section.get(step.as_str()) else {
        return Deadline { stall_ms, total_ms };
    };
    if !found.value.is_table() {
        let ms = found.duration(SOME_TIME).unwrap_or(total_ms);
        return Deadline {
            stall_ms: ms,
            total_ms: ms,
        };
    }
    if !reports_progress(step) {
        found.wrong("this step reports no progress; give one duration, such as \"30s\"");
        return Deadline { stall_ms, total_ms };
    }
    let table = section.section(step.as_str());
    stall_ms = table.duration("stall", stall_ms, SOME_TIME);
    total_ms = table.duration("total", total_ms.max(stall_ms), SOME_TIME);
    if stall_ms > total_ms {
        table.wrong("stall", "it is longer than total; make it shorter");
    }
    table.finish();
    Deadline { stall_ms, total_ms }
}

fn retry(section: Section<'_, '_>) -> Retry {
    let retry = Retry {
        attempts: number(section.integer("attempts", 5, 1..=1_000_000), 5),
        base_ms: section.duration("base", SECOND, 1..=DAY),
        cap_ms: section.duration("cap", 5 * MINUTE, 1..=DAY),
        hangs: number(section.integer("hangs", 3, 1..=1_000_000), 3),
    };
    if retry.base_ms > retry.cap_ms {
        section.wrong(
            "base",
            "it is longer than cap; make it shorter, or cap longer",
        );
    }
    section.finish();
    retry
}

fn breaker(section: Section<'_, '_>) -> Breaker {
    let breaker = Breaker {
        hangs: number(section.integer("hangs", 3, 1..=10_000), 3),
        open_ms: section.duration("open", SECOND, 10..=HOUR),
        open_cap_ms: section.duration("open_cap", 5 * SECOND, 10..=HOUR),
    };
    if breaker.open_ms > breaker.open_cap_ms {
        section.wrong(
            "open",
            "it is longer than open_cap; make it shorter, or open_cap longer",
        );
    }
    section.finish();
    breaker
}

fn trash(section: Section<'_, '_>) -> Trash {
    let trash = Trash {
        keep_ms: section.duration("keep", HOUR, 0..=3650 * DAY),
        flatten: section.boolean("flatten", false),
    };
    section.finish();
    trash
}

fn one_duration(section: Section<'_, '_>, name: &str, default: u64) -> u64 {
    let ms = section.duration(name, default, 0..=DAY);
    section.finish();
    ms
}

fn doctor(section: Section<'_, '_>) -> Doctor {
    let doctor = Doctor {
        enabled: section.boolean("enabled", true),
        every_ms: section.duration("every", MINUTE, 15 * SECOND..=DAY),
        kubelet_dir: path_of(&section, "kubelet_dir")
            .unwrap_or_else(|| PathBuf::from("/var/lib/kubelet")),
    };
    section.finish();
    doctor
}

fn keys(section: &Section<'_, '_>) -> BTreeMap<String, PathBuf> {
    let mut keys = BTreeMap::new();
    for id in section.names() {
        let key = section.section(&id);
        if let Err(error) = id.parse::<crate::model::Name>() {
            section.wrong(&id, format!("{error}; choose another key id"));
        }
        for word in ["passphrase", "key", "secret", "value"] {
            if key.names().iter().any(|name| name == word) {
                key.wrong(
                    word,
                    "secrets don't stand in this file; put it into a private file and name that \
                     with file",
                );
            }
        }
        match path_of(&key, "file") {
            Some(file) => {
                keys.insert(id, file);
            }
            None if key.get("file").is_none() => {
                key.wrong(
                    "file",
                    "it is missing; name the file that holds the passphrase",
                );
            }
            None => {}
        }
        key.finish();
    }
    keys
}

/// A word out of a fixed list.
pub(super) fn choice<'w>(found: &Found<'_, '_>, words: &[&'w str]) -> Option<&'w str> {
    let text = found.string()?;
    let chosen = words.iter().find(|word| **word == text).copied();
    if chosen.is_none() {
        let near = nearest(&text, words.iter().copied());
        let mend = near.map_or(String::new(), |near| format!("; did you mean {near:?}?"));
        found.wrong(format!("it must be one of {}{mend}", words.join(", ")));
    }
    chosen
}
