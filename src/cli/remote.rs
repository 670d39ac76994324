//! The commands that talk to a running daemon.

use super::show::{cell, clean, table};
use super::{EventsArgs, Exit, Global, ListArgs, Output, SnapshotCommand, StatusArgs};
use super::{TrashCommand, VolumeCommand, WaitArgs};
use crate::client::{Answer, Client, Target};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Map, Value, json};
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Why a command didn't do what was asked.
#[derive(Debug)]
pub(super) struct Failure {
    pub exit: Exit,
    pub message: String,
}

impl Failure {
    fn new(exit: Exit, message: impl Into<String>) -> Failure {
        Failure {
            exit,
            message: message.into(),
        }
    }
}

type Outcome<T = ()> = Result<T, Failure>;

pub(super) struct Remote {
    client: Client,
    output: Output,
}

const OBJECT: [(&str, &str); 6] = [
    ("NAME", "/name"),
    ("PHASE", "/status/phase"),
    ("BYTES", "/status/size_bytes"),
    ("DOMAIN", "/status/domain"),
    ("REASON", "/status/reason"),
    ("MESSAGE", "/status/message"),
];
const TRASH: [(&str, &str); 5] = [
    ("UID", "/uid"),
    ("NAME", "/name"),
    ("BYTES", "/size_bytes"),
    ("DELETED", "/deleted_at"),
    ("RECLAIM AFTER", "/reclaim_after"),
];
const POOL: [(&str, &str); 8] = [
    ("DOMAIN", "/domain"),
    ("LANE", "/lane"),
    ("THREADS", "/threads"),
    ("BUSY", "/busy"),
    ("ABANDONED", "/abandoned"),
    ("BACKLOG", "/backlog"),
    ("OLDEST (S)", "/oldest_pending_s"),
    ("BREAKER", "/breaker/state"),
];

/// A part of a path or a query, escaped.
fn escape(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~".contains(&b);
    text.bytes()
        .map(|b| {
            if plain(b) {
                char::from(b).to_string()
            } else {
                format!("%{b:02X}")
            }
        })
        .collect()
}

fn print(text: &str) -> Outcome {
    // A reader that has gone (`| head`) is no failure of ours, but there is no more to do.
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|error| Failure::new(Exit::Failed, format!("standard output: {error}")))
}

impl Remote {
    pub fn new(global: &Global) -> Outcome<Remote> {
        let usage = |message: String| Failure::new(Exit::Usage, message);
        let target = Target::parse(&global.api).map_err(usage)?;
        let token = match &global.token_file {
            None => None,
            Some(file) => {
                let text = std::fs::read_to_string(file)
                    .map_err(|error| usage(format!("token file {}: {error}", file.display())))?;
                let token = text.trim().to_owned();
                if token.is_empty() || !token.chars().all(|c| c.is_ascii_graphic()) {
                    return Err(usage(format!(
                        "token file {} holds no token",
                        file.display()
                    )));
                }
                Some(token)
            }
        };
        Ok(Remote {
            client: Client::new(target, token),
            output: global.output,
        })
    }

    /// Any answer; only a missing one is a failure.
    fn raw(&self, method: &str, path: &str, body: Option<&Value>) -> Outcome<Answer> {
        let sent = self
            .client
            .send(method, path, body, Duration::from_secs(75));
        sent.map_err(|error| {
            Failure::new(
                Exit::Unreachable,
                format!(
                    "can't reach the daemon at {}: {error}; is it running, and is --api right?",
                    self.client.target()
                ),
            )
        })
    }

    /// The body of a good answer.
    fn call(&self, method: &str, path: &str, body: Option<&Value>) -> Outcome<Value> {
        let answer = self.raw(method, path, body)?;
        if (200..300).contains(&answer.status) {
            return Ok(answer.body);
        }
        let exit = match answer.status {
            400 | 413 | 415 | 422 => Exit::Usage,
            404 => Exit::NotFound,
            409 => Exit::Conflict,
            _ => Exit::Failed,
        };
        let detail = answer.body["detail"].as_str().unwrap_or("no detail given");
        let mut message = format!("{detail} (HTTP {})", answer.status);
        if let Some(seconds) = answer.body["retry_after_s"].as_u64() {
            message.push_str(&format!("; try again in {seconds}s"));
        }
        Err(Failure::new(exit, message))
    }

    fn show(&self, value: &Value, columns: &[(&str, &str)]) -> Outcome {
        match self.output {
            Output::Json => print(&format!("{value:#}\n")),
            Output::Table => match value["items"].as_array() {
                Some(items) => print(&table(items, columns)),
                None => print(&table(std::slice::from_ref(value), columns)),
            },
        }
    }

    pub fn volume(&self, command: &VolumeCommand) -> Outcome {
        match command {
            VolumeCommand::Create { wait, .. } => {
                let object = self.call("POST", "/v1/volumes", Some(&create_body(command)))?;
                self.settle("volumes", object, wait)
            }
            VolumeCommand::Get { name, wait } => self.get("volumes", name, wait),
            VolumeCommand::List(args) => self.list("volumes", args),
            VolumeCommand::Resize { name, size, wait } => {
                let now = self.call("GET", &format!("/v1/volumes/{}", escape(name)), None)?;
                let path = format!(
                    "/v1/volumes/{}?uid={}",
                    escape(name),
                    escape(&cell(&now["uid"]))
                );
                let object = self.call("PATCH", &path, Some(&json!({"size": size})))?;
                self.settle("volumes", object, wait)
            }
            VolumeCommand::Delete { name, wait } => self.delete("volumes", name, wait),
            VolumeCommand::Retry { name, wait } => self.retry("volumes", name, wait),
        }
    }

    pub fn snapshot(&self, command: &SnapshotCommand) -> Outcome {
        match command {
            SnapshotCommand::Create {
                name,
                volume,
                label,
                wait,
            } => {
                let labels: Map<_, _> = label.iter().map(|(k, v)| (k.clone(), json!(v))).collect();
                let body = json!({"name": name, "volume": volume, "labels": labels});
                let object = self.call("POST", "/v1/snapshots", Some(&body))?;
                self.settle("snapshots", object, wait)
            }
            SnapshotCommand::Get { name, wait } => self.get("snapshots", name, wait),
            SnapshotCommand::List(args) => self.list("snapshots", args),
            SnapshotCommand::Delete { name, wait } => self.delete("snapshots", name, wait),
            SnapshotCommand::Retry { name, wait } => self.retry("snapshots", name, wait),
        }
    }

    pub fn trash(&self, command: &TrashCommand) -> Outcome {
        match command {
            TrashCommand::List => self.pages("/v1/trash", "", &TRASH),
            TrashCommand::Restore { uid, name, wait } => {
                let body = name
                    .as_ref()
                    .map_or(json!({}), |name| json!({"name": name}));
                let path = format!("/v1/trash/{}/restore", escape(uid));
                let object = self.call("POST", &path, Some(&body))?;
                self.settle("volumes", object, wait)
            }
            TrashCommand::Purge { uid } => {
                let entry = self.call("DELETE", &format!("/v1/trash/{}", escape(uid)), None)?;
                self.show(&entry, &TRASH)
            }
        }
    }

    fn get(&self, kind: &str, name: &str, wait: &WaitArgs) -> Outcome {
        let object = self.call("GET", &format!("/v1/{kind}/{}", escape(name)), None)?;
        self.settle(kind, object, wait)
    }

    /// Deletes the object that has that name now, and no successor of it.
    fn delete(&self, kind: &str, name: &str, wait: &WaitArgs) -> Outcome {
        let path = format!("/v1/{kind}/{}", escape(name));
        let now = self.call("GET", &path, None)?;
        let path = format!("{path}?uid={}", escape(&cell(&now["uid"])));
        let object = self.call("DELETE", &path, None)?;
        self.settle(kind, object, wait)
    }

    fn retry(&self, kind: &str, name: &str, wait: &WaitArgs) -> Outcome {
        let path = format!("/v1/{kind}/{}", escape(name));
        let now = self.call("GET", &path, None)?;
        let path = format!("{path}/retry?uid={}", escape(&cell(&now["uid"])));
        let object = self.call("POST", &path, None)?;
        self.settle(kind, object, wait)
    }

    fn list(&self, kind: &str, args: &ListArgs) -> Outcome {
        let mut query = String::new();
        if let Some(phase) = &args.phase {
            query.push_str(&format!("&phase={}", escape(phase)));
        }
        if let Some(class) = &args.class {
            query.push_str(&format!("&class={}", escape(class)));
        }
        if let Some((key, value)) = &args.label {
            query.push_str(&format!("&label={}", escape(&format!("{key}={value}"))));
        }
        self.pages(&format!("/v1/{kind}"), &query, &OBJECT)
    }

    /// All pages of a list as one.
    fn pages(&self, path: &str, query: &str, columns: &[(&str, &str)]) -> Outcome {
        let mut items = Vec::new();
        let mut after = String::new();
        loop {
            let page = self.call("GET", &format!("{path}?limit=1000{query}{after}"), None)?;
            items.extend(page["items"].as_array().cloned().unwrap_or_default());
            match page["next"].as_str() {
                Some(next) => after = format!("&after={}", escape(next)),
                None => break,
            }
        }
        self.show(&json!({"items": items}), columns)
    }

    /// Shows the object, after waiting for it if that was asked for.
    fn settle(&self, kind: &str, mut object: Value, wait: &WaitArgs) -> Outcome {
        let Some(wait_ms) = wait.wait else {
            return self.show(&object, &OBJECT);
        };
        let end = Instant::now() + Duration::from_millis(wait_ms);
        let bar = bar();
        let (name, uid) = (cell(&object["name"]), cell(&object["uid"]));
        while !settled(&object) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bar.finish_and_clear();
                self.show(&object, &OBJECT)?;
                let phase = cell(&object["status"]["phase"]);
                let message = format!("{name} is still {phase}; the daemon goes on with it");
                return Err(Failure::new(Exit::TimedOut, message));
            }
            // Short rounds on a terminal, so that the bar moves.
            let round = if bar.is_hidden() { 30_000 } else { 1_000 };
            let ms = left.as_millis().clamp(1, round);
            let path = format!(
                "/v1/{kind}/{}?uid={}&wait={ms}ms",
                escape(&name),
                escape(&uid)
            );
            object = match self.call("GET", &path, None) {
                // It was being deleted, and went between two looks.
                Err(failure)
                    if failure.exit == Exit::NotFound
                        && object["deletion_requested_at"].is_string() =>
                {
                    object["status"]["phase"] = json!("deleted");
                    object
                }
                other => other?,
            };
            draw(&bar, &object);
        }
        bar.finish_and_clear();
        self.show(&object, &OBJECT)?;
        if object["status"]["phase"] == "failed" {
            let (reason, why) = (
                cell(&object["status"]["reason"]),
                cell(&object["status"]["message"]),
            );
            return Err(Failure::new(
                Exit::Failed,
                format!("{name} failed: {reason}: {why}"),
            ));
        }
        Ok(())
    }

    pub fn events(&self, args: &EventsArgs) -> Outcome {
        let object = args
            .object
            .as_ref()
            .map_or(String::new(), |o| format!("&object={}", escape(o)));
        let mut after = args.after;
        loop {
            let from = after.map_or(String::new(), |seq| format!("&after={seq}"));
            let wait = if args.follow { "&wait=30s" } else { "" };
            let path = format!("/v1/events?limit=1000{from}{wait}{object}");
            let answer = self.raw("GET", &path, None)?;
            if answer.status == 410 {
                let oldest = answer.body["oldest"].as_u64().unwrap_or(1);
                eprintln!(
                    "volward: events before {oldest} are no longer kept; going on from there"
                );
                after = Some(oldest.saturating_sub(1));
                continue;
            }
            if answer.status != 200 {
                self.call("GET", &path, None)?;
                continue;
            }
            let items = answer.body["items"].as_array().cloned().unwrap_or_default();
            for item in &items {
                match self.output {
                    Output::Json => print(&format!("{item}\n"))?,
                    Output::Table => {
                        let cells = ["seq", "at", "type", "object", "reason", "message"]
                            .map(|k| cell(&item[k]));
                        print(&format!("{}\n", cells.join("  ")))?;
                    }
                }
            }
            let next = answer.body["next"].as_u64().or(after);
            let more = !items.is_empty() && next != after;
            after = next;
            if !more && !args.follow {
                return Ok(());
            }
        }
    }

    pub fn status(&self, args: &StatusArgs) -> Outcome {
        loop {
            let status = self.call("GET", "/v1/status", None)?;
            let text = match self.output {
                Output::Json => format!("{status:#}\n"),
                Output::Table => status_text(&status),
            };
            let redraw = args.watch && std::io::stdout().is_terminal();
            print(&format!(
                "{}{text}",
                if redraw { "\x1b[H\x1b[2J" } else { "" }
            ))?;
            if !args.watch {
                return Ok(());
            }
            std::thread::sleep(Duration::from_secs(2));
        }
    }
}

fn status_text(status: &Value) -> String {
    let list = |key: &str| status[key].as_array().cloned().unwrap_or_default();
    let mut text = format!(
        "volward {}  backend {}  up {}s\n\n{}",
        cell(&status["version"]),
        cell(&status["backend"]),
        cell(&status["uptime_s"]),
        table(&list("lanes"), &POOL)
    );
    for (title, key) in [("running", "running"), ("hung", "hung")] {
        let items = list(key);
        if !items.is_empty() {
            let columns = [
                ("OBJECT", "/object"),
                ("STEP", "/step"),
                ("DOMAIN", "/domain"),
                ("MS", "/elapsed_ms"),
            ];
            text.push_str(&format!("\n{title}\n{}", table(&items, &columns)));
        }
    }
    text
}

fn create_body(command: &VolumeCommand) -> Value {
    let VolumeCommand::Create {
        name,
        size,
        class,
        from_snapshot,
        from_volume,
        from_file,
        format,
        iops,
        bytes_per_second,
        key_id,
        label,
        ..
    } = command
    else {
        return Value::Null;
    };
    let mut body = json!({"name": name});
    if let Some(size) = size {
        body["size"] = json!(size);
    }
    if let Some(class) = class {
        body["class"] = json!(class);
    }
    if let Some(name) = from_snapshot {
        body["source"] = json!({"snapshot": name});
    }
    if let Some(name) = from_volume {
        body["source"] = json!({"volume": name});
    }
    if let Some(path) = from_file {
        body["source"] = json!({"file": path, "format": format});
    }
    if iops.is_some() || bytes_per_second.is_some() {
        body["qos"] = json!({"iops": iops, "bytes_per_second": bytes_per_second});
    }
    if let Some(key_id) = key_id {
        body["encryption"] = json!({"key_id": key_id});
    }
    if !label.is_empty() {
        body["labels"] = label
            .iter()
            .map(|(k, v)| (k.clone(), json!(v)))
            .collect::<Map<_, _>>()
            .into();
    }
    body
}

fn settled(object: &Value) -> bool {
    let current = object["observed_generation"] == object["generation"];
    match object["status"]["phase"].as_str() {
        Some("deleted") => true,
        // Giving up settles a wish although it was not brought about.
        Some("failed") => true,
        Some("ready") => current,
        _ => false,
    }
}

/// Indicatif draws on a terminal only; elsewhere the bar is hidden.
fn bar() -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(100);
    if let Ok(style) = ProgressStyle::with_template("{msg:30} [{bar:40}] {percent:>3}%  {elapsed}")
    {
        bar.set_style(style);
    }
    bar
}

fn draw(bar: &ProgressBar, object: &Value) {
    let status = &object["status"];
    if let (Some(done), Some(total)) = (
        status["progress"]["done"].as_u64(),
        status["progress"]["total"].as_u64(),
    ) {
        bar.set_length(total);
        bar.set_position(done);
    }
    let step = if status["step"].is_null() {
        &status["phase"]
    } else {
        &status["step"]
    };
    bar.set_message(clean(&format!("{} {}", cell(&object["name"]), cell(step))));
}
