//! The dashboard in headless Chromium, the metrics under promtool, and the drills of
//! docs/drills.md, against a running daemon.

#![allow(clippy::unwrap_used)] // a test may fail by panicking, its helpers as well
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

static COUNT: AtomicU32 = AtomicU32::new(0);

/// A daemon on sparse files that ends with the test.
struct Daemon {
    dir: PathBuf,
    port: u16,
    child: Child,
}

impl Daemon {
    fn start() -> Daemon {
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("volward-ops-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        let at = dir.display();
        let config = format!(
            "[api]\nlisten = \"unix:{at}/api.sock\"\n[health]\nlisten = \"127.0.0.1:{port}\"\n\
             [store]\npath = \"{at}/volward.db\"\n[backend]\nkind = \"file\"\n\
             [backend.file]\nroot = \"{at}/volumes\"\n[backend.faults]\nenabled = true\n\
             [deadlines]\ntrash = \"2s\"\ncreate = \"2s\"\ncancel_grace = \"500ms\"\n\
             [lanes.delete]\nthreads = 4\nabandoned_max = 32\n"
        );
        std::fs::write(dir.join("volward.toml"), config).unwrap();
        let log = std::fs::File::create(dir.join("log")).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_volward"))
            .args(["serve", "--config"])
            .arg(dir.join("volward.toml"))
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let daemon = Daemon { dir, port, child };
        let end = Instant::now() + Duration::from_secs(60);
        while !daemon.get("/readyz").status.success() {
            assert!(
                Instant::now() < end,
                "the daemon isn't ready: {}",
                daemon.log()
            );
            std::thread::yield_now();
        }
        daemon
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.join("log")).unwrap_or_default()
    }

    fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    fn get(&self, path: &str) -> Output {
        let mut curl = Command::new("curl");
        curl.args(["--silent", "--fail", "--max-time", "10"]);
        curl.arg(self.url(path)).output().unwrap()
    }

    /// Runs a script of the shell that talks to this daemon.
    fn shell(&self, script: &str) -> Output {
        let binary = Path::new(env!("CARGO_BIN_EXE_volward")).parent().unwrap();
        let path = std::env::var("PATH").unwrap_or_default();
        Command::new("timeout")
            .args(["300", "bash", "-euo", "pipefail", "-c", script])
            .env("VOLWARD_API", self.dir.join("api.sock"))
            .env("PATH", format!("{}:{path}", binary.display()))
            .stdin(Stdio::null())
            .output()
            .unwrap()
    }

    /// Fifteen deletions hang, the breaker of their pool is open.
    fn hang(&self) {
        let blocks = drills();
        let drill = blocks.iter().find(|(title, _)| title == "Deletions hang");
        let script = format!(
            "{}\n{}\nseen pool/default/delete BreakerOpen",
            blocks[0].1,
            drill.unwrap().1
        );
        held(&self.shell(&script), "the hang drill");
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn held(output: &Output, what: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{what}: {said}\n{shown}");
}

fn present(command: &str) -> bool {
    let asked = Command::new(command)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    let there = asked.is_ok_and(|status| status.success());
    assert!(
        there || std::env::var_os("VOLWARD_OPS").is_none(),
        "VOLWARD_OPS is set, but {command} is missing"
    );
    there
}

/// The shell blocks of docs/drills.md with their headings, in order.
fn drills() -> Vec<(String, String)> {
    let text = include_str!("../docs/drills.md");
    let (mut found, mut title, mut inside) = (Vec::new(), String::new(), false);
    for line in text.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            title = heading.to_owned();
        } else if line == "```sh" {
            inside = true;
            found.push((title.clone(), String::new()));
        } else if line == "```" {
            inside = false;
        } else if inside {
            let (_, block): &mut (String, String) = found.last_mut().unwrap();
            block.push_str(line);
            block.push('\n');
        }
    }
    found
}

#[test]
fn every_drill_goes_as_its_page_says() {
    let daemon = Daemon::start();
    let blocks = drills();
    assert!(blocks.len() > 8, "only {} blocks", blocks.len());
    let script: String = blocks
        .iter()
        .map(|(title, block)| format!("echo \"== {title}\" >&2\n{block}"))
        .collect();
    held(&daemon.shell(&script), "docs/drills.md");
    let metrics = daemon.get("/metrics");
    if present("promtool") {
        let script = format!(
            "curl --silent '{}' | promtool check metrics",
            daemon.url("/metrics")
        );
        let checked = daemon.shell(&script);
        held(&checked, "promtool check metrics");
        assert_eq!(
            String::from_utf8_lossy(&checked.stderr),
            "",
            "promtool complains"
        );
    }
    let metrics = String::from_utf8(metrics.stdout).unwrap();
    let written = concat!(
        include_str!("../etc/alerts.yml"),
        include_str!("../etc/grafana.json")
    );
    for name in metric_names(written) {
        let base = name.strip_suffix("_bucket").unwrap_or(&name);
        assert!(
            metrics.contains(&format!("# TYPE {base} ")),
            "{name} is asked for in etc/, but no metric"
        );
    }
}

/// The words that begin with `volward_`.
fn metric_names(text: &str) -> Vec<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let ours = words.filter(|word| word.starts_with("volward_"));
    ours.map(str::to_owned).collect()
}

fn look(daemon: &Daemon, arguments: &[&str]) -> String {
    let seen = Command::new("timeout")
        .args([
            "120",
            "python3",
            concat!(env!("CARGO_MANIFEST_DIR"), "/tests/browser/drive.py"),
        ])
        .arg(daemon.url("/"))
        .args(["--seconds", "40"])
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    held(&seen, "Chromium");
    String::from_utf8(seen.stdout).unwrap()
}

#[test]
fn the_page_says_what_is_wrong_and_when_the_daemon_is_gone() {
    if !present("chromium") {
        eprintln!("no chromium here: the dashboard isn't looked at");
        return;
    }
    let daemon = Daemon::start();
    let calm = look(&daemon, &["--wait", "document.title.startsWith('✓')"]);
    assert!(calm.contains("All is well."), "{calm}");
    assert!(calm.contains("No call hangs."), "{calm}");

    daemon.hang();
    let wait = "document.querySelectorAll('[data-pool=\"default/delete\"] .tile.lost').length >= 3 \
                && document.querySelectorAll('#events tr').length > 5";
    let hung = look(&daemon, &["--phone", "--wait", wait]);
    for words in [
        "It works, with trouble.",
        "pool default/delete is paused",
        "of at most 32 calls hang",
        "HUNG trash",
        "volume/victim-1",
        "BreakerOpen",
    ] {
        assert!(hung.contains(words), "{words:?} isn't on the page:\n{hung}");
    }
    let wide = look(
        &daemon,
        &[
            "--phone",
            "--wait",
            wait,
            "--eval",
            "document.documentElement.scrollWidth",
        ],
    );
    assert_eq!(wide.trim(), "390", "the page is wider than a phone");

    let kill = format!("kill -9 {}", daemon.child.id());
    let gone = look(
        &daemon,
        &[
            "--run",
            &kill,
            "--then",
            "!document.getElementById('gone').hidden",
        ],
    );
    assert!(gone.contains("The daemon does not answer."), "{gone}");
    assert!(!gone.contains("It works"), "an old verdict stands:\n{gone}");
}

#[test]
fn the_page_asks_for_nothing_from_outside() {
    let page = include_str!("../src/http/dashboard.html");
    for word in [
        "http://",
        "https://",
        "src=",
        "url(",
        "@import",
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
    ] {
        let found = page
            .replace("http://www.w3.org/2000/svg", "")
            .contains(word);
        assert!(!found, "{word} is in the dashboard");
    }
}
