//! The configuration: one TOML file becomes one valid `Config`, or errors that name the key, the
//! value, the line and the mend.
//!
//! This module owns every default and every rule about values. It knows the vocabulary (`model`)
//! and nothing of threads, HTTP or backends. All times are in milliseconds, all sizes in bytes.
//! `Config::parse` looks at the text alone; `Config::check_paths` looks at the files it names.

mod check;
mod classes;
mod convert;
mod live;
mod read;

use crate::model::Step;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// Everything that can be configured.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The API listener.
    pub api: Api,
    /// The health listener.
    pub health: Health,
    /// Most talkative level that is logged.
    pub log_level: log::LevelFilter,
    /// The state file (SQLite).
    pub store_path: PathBuf,
    /// The event log.
    pub events: Events,
    /// Bounds.
    pub limits: Limits,
    /// Thread pools, per domain.
    pub lanes: Lanes,
    /// How long steps may take.
    pub deadlines: Deadlines,
    /// Failing attempts.
    pub retry: Retry,
    /// When a pool stops trying.
    pub breaker: Breaker,
    /// What happens to deleted volumes.
    pub trash: Trash,
    /// How long running steps may go on after SIGTERM.
    pub shutdown_grace_ms: u64,
    /// How long a pool may be full of hung threads on a healthy backend before volward asks to be
    /// restarted.
    pub restart_after_ms: u64,
    /// Passphrase files of encrypted volumes, by key id.
    pub keys: BTreeMap<String, PathBuf>,
    /// The background scan for stale mounts and hung devices.
    pub doctor: Doctor,
    /// Where new volumes go, by class name. Never empty.
    pub classes: BTreeMap<String, Class>,
    /// The class of requests that name none: `default`, or the only one there is.
    pub default_class: Option<String>,
    /// The storage.
    pub backend: Backend,
    /// Misbehaviour on purpose, for drills.
    pub faults: Faults,
}

/// Where a listener listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listen {
    /// A unix socket.
    Unix(PathBuf),
    /// A TCP address.
    Tcp(std::net::SocketAddr),
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Listen::Unix(path) => write!(f, "unix:{}", path.display()),
            Listen::Tcp(address) => write!(f, "{address}"),
        }
    }
}

/// `[api]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Api {
    /// Where.
    pub listen: Listen,
    /// Permissions of the socket, such as 0o660.
    pub mode: u32,
    /// Group of the socket, by name or number.
    pub group: Option<String>,
    /// The file with the bearer token; TCP needs one.
    pub token_file: Option<PathBuf>,
    /// Whether the token may go unencrypted beyond this host.
    pub plaintext: bool,
    /// Further values of `Host` (TCP), without port.
    pub allowed_hosts: Vec<String>,
}

/// `[health]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Health {
    /// Where.
    pub listen: Listen,
    /// The file with the token for everything but `/healthz` and `/readyz`.
    pub token_file: Option<PathBuf>,
    /// Further values of `Host` (TCP), without port.
    pub allowed_hosts: Vec<String>,
    /// How old a heartbeat may be before `/healthz` answers 503.
    pub heartbeat_max_ms: u64,
}

/// `[events]`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Events {
    /// How many are kept.
    pub max: u64,
    /// How long they are kept.
    pub keep_ms: u64,
}

/// `[limits]`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most unmet wishes per lane and domain.
    pub backlog: usize,
    /// Most bytes of a volume.
    pub max_size_bytes: u64,
    /// Most volumes, trash entries included.
    pub max_volumes: u64,
    /// Clones deeper than this are flattened in the background.
    pub clone_depth: u32,
    /// Clones deeper than this are refused.
    pub clone_depth_max: u32,
    /// Most threads of the process, abandoned ones and those of sessions included.
    pub threads: usize,
    /// Most LUKS2 formats at once.
    pub encrypt: usize,
}

/// `[lanes.create]` or `[lanes.delete]`: each domain gets a pool of its own with these bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaneConfig {
    /// Workers, at least 2.
    pub threads: usize,
    /// Most abandoned threads.
    pub abandoned_max: usize,
}

/// `[lanes]`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lanes {
    /// create, import, update, encrypt, snapshot, restore.
    pub create: LaneConfig,
    /// trash, remove_snapshot, flatten, reclaim.
    pub delete: LaneConfig,
}

/// The deadline of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadline {
    /// Longest time without progress. Equal to `total_ms` for steps that report none.
    pub stall_ms: u64,
    /// Longest time altogether.
    pub total_ms: u64,
}

/// `[deadlines]`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadlines {
    /// By step, in the order of `Step::ALL`.
    pub steps: [Deadline; Step::ALL.len()],
    /// So long before a deadline the cancel flag goes up.
    pub cancel_grace_ms: u64,
}

impl Deadlines {
    /// The deadline of that step.
    #[must_use]
    pub fn of(&self, step: Step) -> Deadline {
        // `Step` is declared in the order of `Step::ALL`, which a test holds on to.
        self.steps[step as usize]
    }
}

/// `[retry]`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retry {
    /// Charged attempts before an object is given up.
    pub attempts: u32,
    /// The first wait.
    pub base_ms: u64,
    /// The longest wait.
    pub cap_ms: u64,
    /// Hangs on a healthy backend before an object is given up.
    pub hangs: u32,
}

/// `[breaker]`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Breaker {
    /// Hangs in a row that open it.
    pub hangs: u32,
    /// How long it stays open at first.
    pub open_ms: u64,
    /// What that doubles up to.
    pub open_cap_ms: u64,
}

/// `[trash]`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trash {
    /// How long a deleted volume can be restored.
    pub keep_ms: u64,
    /// Whether children that block a reclaim are flattened.
    pub flatten: bool,
}

/// `[doctor]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Doctor {
    /// Whether the daemon scans this host in the background.
    pub enabled: bool,
    /// How often.
    pub every_ms: u64,
    /// Where a kubelet keeps its pods, for the checks of their directories.
    pub kubelet_dir: PathBuf,
}

/// `[classes.NAME]`
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Class {
    /// What fails together with it.
    pub domain: String,
    /// The pool (rbd), the root directory (file), any name (sim).
    pub root: String,
    /// A pool of its own for the data (rbd).
    pub data_pool: Option<String>,
    /// The namespace in the pool (rbd).
    pub namespace: Option<String>,
    /// The size of the objects in bytes (rbd), a power of two from 4 KiB to 32 MiB.
    pub object_size_bytes: Option<u64>,
    /// Limits of volumes that name none (rbd).
    pub qos: ClassQos,
}

/// `[classes.NAME.qos]`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ClassQos {
    /// Operations per second.
    pub iops: Option<u64>,
    /// Bytes per second.
    pub bytes_per_second: Option<u64>,
    /// A burst may reach this many times the limit, in hundredths (150 is one and a half times).
    pub burst_percent: Option<u64>,
    /// For how long it may, in whole seconds.
    pub burst_seconds: Option<u64>,
}

/// `[backend]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Backend {
    /// Sparse files on a local file system.
    File(FileBackend),
    /// Images of a Ceph cluster.
    Rbd(RbdBackend),
    /// In memory; everything is gone when the process ends.
    Sim(SimBackend),
}

impl Backend {
    /// The word of `backend.kind`.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Backend::File(_) => "file",
            Backend::Rbd(_) => "rbd",
            Backend::Sim(_) => "sim",
        }
    }

    /// The directories that files may be imported from.
    #[must_use]
    pub fn import_dirs(&self) -> &[PathBuf] {
        match self {
            Backend::File(file) => &file.import_dirs,
            Backend::Rbd(rbd) => &rbd.import_dirs,
            Backend::Sim(_) => &[],
        }
    }
}

/// `[backend.file]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileBackend {
    /// The root of classes that name none.
    pub root: PathBuf,
    /// Directories that files may be imported from.
    pub import_dirs: Vec<PathBuf>,
}

/// `[backend.rbd]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RbdBackend {
    /// The cluster's configuration file.
    pub conf: PathBuf,
    /// The client's name without `client.`.
    pub user: String,
    /// Its keyring; `None` leaves it to `conf`.
    pub keyring: Option<PathBuf>,
    /// The pool of classes that name none.
    pub pool: Option<String>,
    /// The namespace of classes that name none.
    pub namespace: Option<String>,
    /// The first part of every image's name.
    pub prefix: String,
    /// Directories that files may be imported from.
    pub import_dirs: Vec<PathBuf>,
    /// Further options of the client.
    pub options: BTreeMap<String, String>,
    /// How long a request to the monitors may take.
    pub mon_timeout_ms: u64,
    /// Most sessions at once, retired ones included.
    pub sessions_max: usize,
}

/// `[backend.sim]`
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SimBackend {
    /// How long each step takes.
    pub latency_ms: BTreeMap<Step, u64>,
}

/// `[backend.faults]`
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Faults {
    /// Whether the backend is wrapped and the routes of `/v1/faults` exist.
    pub enabled: bool,
    /// The seed of the rules' dice.
    pub seed: u64,
    /// The rules at start, in the form of `PUT /v1/faults`: one JSON object each.
    pub rules: Vec<FaultRule>,
}

/// One rule of `[[backend.faults.rules]]`; the backend's own fault module judges its content.
#[derive(Debug, Clone, PartialEq)]
pub struct FaultRule {
    /// Where it stands in the file, from 1.
    pub line: usize,
    /// The rule as JSON.
    pub json: serde_json::Value,
}

impl Faults {
    /// All rules as the body of `PUT /v1/faults`.
    #[must_use]
    pub fn body(&self) -> serde_json::Value {
        let rules: Vec<_> = self.rules.iter().map(|rule| rule.json.clone()).collect();
        serde_json::json!({ "rules": rules })
    }
}

/// Everything that is wrong with a configuration file. `Display` is one line per fault:
/// `FILE:LINE: KEY: what is wrong; the mend`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// The faults, by line. Never empty.
    pub faults: Vec<Fault>,
    /// The name of the file.
    pub file: String,
}

/// One fault of a configuration file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Where it stands, from 1; `None` if it is about the whole file or something that isn't there.
    pub line: Option<usize>,
    /// The key, such as `lanes.create.threads`; empty for the whole file.
    pub key: String,
    /// The value, the cause and the mend.
    pub message: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, fault) in self.faults.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            f.write_str(&self.file)?;
            if let Some(line) = fault.line {
                write!(f, ":{line}")?;
            }
            if !fault.key.is_empty() {
                write!(f, ": {}", fault.key)?;
            }
            write!(f, ": {}", fault.message)?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigError {}

impl Config {
    /// Reads and checks a file. Looks at nothing else: see `check_paths`.
    ///
    /// # Errors
    /// When the file can't be read, or with everything that is wrong in it.
    pub fn load(path: &Path) -> Result<Config, ConfigError> {
        let file = path.display().to_string();
        match std::fs::read_to_string(path) {
            Ok(text) => Config::parse(&text, &file),
            Err(error) => Err(ConfigError {
                faults: vec![Fault {
                    line: None,
                    key: String::new(),
                    message: format!(
                        "can't be read: {error}; check the path given with --config and its \
                         permissions"
                    ),
                }],
                file,
            }),
        }
    }

    /// Checks a text; `file` is what errors call it.
    ///
    /// # Errors
    /// With everything that is wrong in it.
    pub fn parse(text: &str, file: &str) -> Result<Config, ConfigError> {
        convert::config(text).map_err(|faults| ConfigError {
            faults,
            file: file.to_owned(),
        })
    }

    /// The names of all domains.
    #[must_use]
    pub fn domains(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.classes.values().map(|c| c.domain.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        names
    }
}

impl Default for Config {
    /// What an empty file means.
    fn default() -> Config {
        match Config::parse("", "defaults") {
            Ok(config) => config,
            Err(error) => unreachable!("an empty configuration is valid: {error}"),
        }
    }
}

#[cfg(test)]
mod tests;
