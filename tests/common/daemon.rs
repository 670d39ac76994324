//! The real binary, in a directory of its own, driven through its sockets.

#![allow(dead_code)] // each test uses its part

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use volward::client::{Answer, Client, Target};

/// Longer than anything here takes on a busy machine.
pub const FAR: Duration = Duration::from_secs(60);

pub struct Daemon {
    pub dir: PathBuf,
    pub child: Child,
    environment: Vec<(String, String)>,
    keep: bool,
}

/// What a test's configuration has in common: all in one directory, the file backend, drills.
pub fn config(dir: &Path, extra: &str) -> String {
    let dir = dir.display();
    format!(
        "[api]\nlisten = \"unix:{dir}/api.sock\"\n[health]\nlisten = \"unix:{dir}/health.sock\"\n\
         [store]\npath = \"{dir}/state/volward.db\"\n[backend]\nkind = \"file\"\n\
         [backend.file]\nroot = \"{dir}/volumes\"\n[backend.faults]\nenabled = true\n{extra}"
    )
}

impl Daemon {
    /// Starts in a new directory and waits until it takes work.
    pub fn start(extra: &str) -> Daemon {
        let daemon = Daemon::launch(extra, &[]);
        daemon.wait_ready();
        daemon
    }

    /// Starts in a new directory and doesn't wait.
    pub fn launch(extra: &str, environment: &[(&str, &str)]) -> Daemon {
        Daemon::launch_as(|dir| config(dir, extra), environment)
    }

    /// Starts in a new directory with the configuration that `write` makes for it.
    pub fn launch_as(write: impl Fn(&Path) -> String, environment: &[(&str, &str)]) -> Daemon {
        let unique = format!("volward-test-{}-{:?}", std::process::id(), Instant::now());
        let name: String = unique
            .chars()
            .filter(|c| c.is_ascii_alphanumeric() || *c == '-')
            .collect();
        let dir = std::env::temp_dir().join(name);
        std::fs::create_dir_all(dir.join("state")).expect("a directory");
        std::fs::write(dir.join("volward.toml"), write(&dir)).expect("a configuration");
        let environment: Vec<(String, String)> = environment
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect();
        let child = spawn(&dir, &environment);
        Daemon {
            dir,
            child,
            environment,
            keep: false,
        }
    }

    /// Starts again in the same directory.
    pub fn again(&mut self, environment: &[(&str, &str)]) {
        self.environment = environment
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect();
        self.child = spawn(&self.dir, &self.environment);
    }

    pub fn wait_ready(&self) {
        let end = Instant::now() + FAR;
        let client = self.health();
        loop {
            if let Ok(answer) = client.send("GET", "/readyz", None, FAR)
                && answer.status == 200
            {
                return;
            }
            assert!(Instant::now() < end, "not ready: {}", self.log());
            std::thread::yield_now();
        }
    }

    pub fn client(&self) -> Client {
        Client::new(Target::Unix(self.dir.join("api.sock")), None)
    }

    pub fn health(&self) -> Client {
        Client::new(Target::Unix(self.dir.join("health.sock")), None)
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.join("log")).unwrap_or_default()
    }

    pub fn call(&self, method: &str, path: &str, body: Option<Value>) -> Answer {
        let sent = self.client().send(method, path, body.as_ref(), FAR);
        sent.unwrap_or_else(|error| panic!("{method} {path}: {error}: {}", self.log()))
    }

    pub fn get(&self, path: &str) -> Value {
        let answer = self.call("GET", path, None);
        assert_eq!(answer.status, 200, "{path}: {}", answer.body);
        answer.body
    }

    pub fn status(&self) -> Value {
        self.health()
            .send("GET", "/v1/status", None, FAR)
            .expect("a status")
            .body
    }

    pub fn volumes(&self) -> Vec<Value> {
        let page = self.get("/v1/volumes?limit=1000");
        page["items"].as_array().cloned().expect("items")
    }

    pub fn faults(&self, rules: Value) {
        let set = self.call(
            "PUT",
            "/v1/faults",
            Some(serde_json::json!({ "rules": rules })),
        );
        assert_eq!(set.status, 200, "{}", set.body);
    }

    pub fn heal(&self) {
        assert_eq!(self.call("DELETE", "/v1/faults", None).status, 200);
    }

    /// Asks again and again until it holds.
    pub fn until(&self, what: &str, mut holds: impl FnMut(&Daemon) -> bool) {
        let end = Instant::now() + FAR;
        while !holds(self) {
            assert!(
                Instant::now() < end,
                "never: {what}: {} {}",
                self.status(),
                self.log()
            );
            std::thread::yield_now();
        }
    }

    pub fn kill(&mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("gone");
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).expect("a signal");
    }

    /// Waits for its end.
    pub fn ended(&mut self) -> ExitStatus {
        let end = Instant::now() + FAR;
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status;
            }
            assert!(Instant::now() < end, "it doesn't end: {}", self.log());
            std::thread::yield_now();
        }
    }

    /// The names in a directory below the file root.
    pub fn files(&self, within: &str) -> Vec<String> {
        let read = std::fs::read_dir(self.dir.join("volumes").join(within));
        let mut names: Vec<String> = read
            .into_iter()
            .flatten()
            .map(|entry| {
                entry
                    .expect("an entry")
                    .file_name()
                    .to_string_lossy()
                    .into_owned()
            })
            .collect();
        names.sort();
        names
    }
}

fn spawn(dir: &Path, environment: &[(String, String)]) -> Child {
    let log = std::fs::File::options()
        .create(true)
        .append(true)
        .open(dir.join("log"))
        .expect("a log");
    Command::new(env!("CARGO_BIN_EXE_volward"))
        .args(["serve", "--config"])
        .arg(dir.join("volward.toml"))
        .envs(environment.iter().map(|(k, v)| (k, v)))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .expect("the binary")
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if !self.keep && !std::thread::panicking() {
            let _ = std::fs::remove_dir_all(&self.dir);
        }
    }
}
