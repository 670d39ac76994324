//! `volward serve`: puts everything together, and takes it apart in order.

use super::backends::{self, Built};
use super::engine::{End, Engine, Inlets};
use crate::cli::{Exit, ServeArgs};
use crate::clock::Clock;
use crate::config::{Config, Listen};
use crate::heartbeat::{Health, Heartbeats};
use crate::http::api::Api;
use crate::http::auth::{AllowedHosts, Guard, Token};
use crate::http::front::{Front, FrontConfig, Handler, ListenSpec, Listener};
use crate::http::park::Park;
use crate::hub::ledger::DaemonLedger;
use crate::hub::{Hub, Parts, Word};
use crate::metrics::Metrics;
use crate::model::Lane;
use crate::pool::{self, DomainLayout, Layout, Pools};
use crate::sched::{Event, Sched};
use crate::slot::{Deadline, Plan};
use crate::spawn;
use crate::store::{OpenOptions, Store, StoreError};
use crate::watchdog::{Settings, Systemd, Watchdog};
use crossbeam::channel::bounded;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Requests that may wait for the loop.
const ASKS: usize = 2048;
/// Words other than requests that may wait for the loop.
const WORDS: usize = 256;
/// The stack of a worker; librbd calls need more than they look.
const STACK_BYTES: usize = 1 << 20;
/// How long a start waits for a predecessor that is ending.
const LOCK_PATIENCE: Duration = Duration::from_secs(60);
/// How long the HTTP servers may take to answer what they have.
const FRONT_GRACE: Duration = Duration::from_secs(2);

/// Runs the daemon until it is told to end.
#[must_use]
pub fn serve(args: &ServeArgs, config: Config) -> Exit {
    crate::log_setup::start(config.log_level);
    let path = args.config.config.clone();
    match run(args.take_over, config, path) {
        Ok(exit) => exit,
        Err(words) => {
            log::error!("{words}");
            Exit::Usage
        }
    }
}

fn run(take_over: bool, config: Config, path: PathBuf) -> Result<Exit, String> {
    let store = open_store(&config, take_over)?;
    check_classes(&config, &store)?;
    // Both addresses first: one that is taken must not cost anybody anything.
    let api_listener = Listener::bind(&listen_spec(&config.api.listen, &config))
        .map_err(|error| format!("api.listen: {error}"))?;
    let health_listener = Listener::bind(&listen_spec(&config.health.listen, &config))
        .map_err(|error| format!("health.listen: {error}"))?;
    let guards = (
        api_guard(&config, &api_listener)?,
        health_guard(&config, &health_listener)?,
    );
    let loaded = store.load().map_err(|error| error.to_string())?;
    let signals = Signals::new([SIGTERM, SIGINT, SIGHUP])
        .map_err(|error| format!("signals can't be taken: {error}"))?;
    let world = World::start(&config, &store, &loaded.identities)?;
    let hub = world.hub.clone();
    let api = front(
        "api",
        api_listener,
        guards.0,
        &hub,
        Arc::new(Api::new(hub.clone())),
    )?;
    let health: Arc<dyn Handler> = Arc::new(crate::http::health::Health::new(hub.clone()));
    let health = front("health", health_listener, guards.1, &hub, health)?;
    let caps = hub.parts().caps;
    let sched = Sched::new(backends::policy_with(&config, caps), seed());
    let hub_of_signals = hub.clone();
    let told = world.systemd.clone();
    spawn::spawn("signals", 256 << 10, move || {
        obey(signals, &hub_of_signals, &path, told.as_ref())
    })
    .map_err(|error| format!("no thread for signals: {error}"))?;
    let loaded = Event::Loaded {
        records: loaded.records,
        counts: loaded.counts,
        identities: loaded.identities,
    };
    say_hello(&config, &hub);
    if let Some(systemd) = &world.systemd {
        systemd.ready();
    }
    let engine = Engine::new(hub, store, sched, world.inlets);
    // The loop is this thread; a panic in it is a fault of ours and ends the process.
    let end = engine.run(loaded, &world.beats);
    Ok(farewell(end, api, health, world.watchdog))
}

/// Everything with threads but the HTTP servers and the loop.
struct World {
    hub: Hub,
    inlets: Inlets,
    beats: Arc<Heartbeats>,
    watchdog: Watchdog,
    systemd: Option<Systemd>,
}

impl World {
    fn start(
        config: &Config,
        store: &Store,
        identities: &BTreeMap<String, String>,
    ) -> Result<World, String> {
        let ledger = Arc::new(DaemonLedger::default());
        let Built { backend, faults } = backends::build(
            config,
            store.instance(),
            Arc::clone(&ledger) as Arc<_>,
            identities.clone(),
        )?;
        let caps = backend.caps();
        let clock = Clock::real();
        let began_at = clock.wall();
        let threads_max = config.limits.threads;
        let (report, reports) = bounded(pool::reports_capacity(threads_max));
        let spawner = pool::system_spawner();
        let pools = Pools::start(backend, &layout(config), clock.clone(), spawner, report)
            .map_err(|error| format!("the worker threads can't be started: {error}"))?;
        let beats = Arc::new(Heartbeats::default());
        let systemd =
            Systemd::start().map_err(|error| format!("no thread for systemd: {error}"))?;
        let heartbeat_max_ms = config.health.heartbeat_max_ms;
        let settings = Settings {
            heartbeat_max_ms,
            beats: Arc::clone(&beats),
            systemd: systemd.clone(),
        };
        let watchdog = Watchdog::start(&pools, settings)
            .map_err(|error| format!("no thread for the watchdog: {error}"))?;
        let (asks_in, asks) = bounded(ASKS);
        let (words_in, words) = bounded(WORDS);
        let parts = Parts {
            pools,
            clock: clock.clone(),
            began_at,
            health: Health::new(Arc::clone(&beats), clock, heartbeat_max_ms),
            park: Park::new(),
            faults,
            metrics: Metrics::new(),
            caps,
            instance: store.instance().to_owned(),
        };
        let hub = Hub::new(asks_in, words_in, config.clone(), parts);
        ledger.connect(hub.clone());
        let inlets = Inlets {
            asks,
            words,
            reports,
        };
        Ok(World {
            hub,
            inlets,
            beats,
            watchdog,
            systemd,
        })
    }
}

fn open_store(config: &Config, take_over: bool) -> Result<Store, String> {
    let mut options = OpenOptions::new(machine_id());
    options.take_over = take_over;
    let patience = Instant::now() + LOCK_PATIENCE;
    let mut told = false;
    loop {
        match Store::open(&config.store_path, &options) {
            Ok(store) => return Ok(store),
            // It only waits for threads in the kernel: so do we.
            Err(StoreError::Locked {
                ending: true,
                words,
                ..
            }) if Instant::now() < patience => {
                if !told {
                    log::warn!("{words}; waiting for it");
                    told = true;
                }
                std::thread::park_timeout(Duration::from_millis(250));
            }
            Err(error) => return Err(error.to_string()),
        }
    }
}

/// Which machine this is: state files are not for another one.
pub(super) fn machine_id() -> String {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let known = read("/etc/machine-id").or_else(|| read("/var/lib/dbus/machine-id"));
    let text = known
        .map(|text| text.trim().to_owned())
        .filter(|text| !text.is_empty());
    text.unwrap_or_else(|| {
        let name = rustix::system::uname()
            .nodename()
            .to_string_lossy()
            .into_owned();
        format!("host {name}")
    })
}

/// A class that objects were placed by can't go, nor lead elsewhere.
pub(super) fn check_classes(config: &Config, store: &Store) -> Result<(), String> {
    let used = store.classes_in_use().map_err(|error| error.to_string())?;
    for class in used {
        let (name, count) = (&class.class, class.count);
        let Some(now) = config.classes.get(name) else {
            return Err(format!(
                "classes.{name} is gone from the configuration, but {count} objects were made \
                 with it; put it back, or delete them first"
            ));
        };
        let before = (&class.domain, &class.root, class.namespace.as_ref());
        if before != (&now.domain, &now.root, now.namespace.as_ref()) {
            return Err(format!(
                "classes.{name} leads to {} (domain {}) now, but {count} objects of it are in {} \
                 (domain {}); give the new place a class of its own",
                now.root, now.domain, class.root, class.domain
            ));
        }
    }
    Ok(())
}

fn layout(config: &Config) -> Layout {
    let lanes = &config.lanes;
    let connect = config.deadlines.of(crate::model::Step::Connect);
    let domain = |name: String| DomainLayout {
        domain: Arc::from(name),
        create_threads: lanes.create.threads,
        delete_threads: lanes.delete.threads,
        create_abandoned_max: lanes.create.abandoned_max,
        delete_abandoned_max: lanes.delete.abandoned_max,
    };
    Layout {
        domains: backends::roots(config).into_keys().map(domain).collect(),
        threads_max: config.limits.threads,
        stack_bytes: STACK_BYTES,
        connect: Plan {
            deadline: Deadline {
                stall_ms: connect.stall_ms,
                total_ms: connect.total_ms,
            },
            cancel_grace_ms: config.deadlines.cancel_grace_ms,
        },
    }
}

fn listen_spec(listen: &Listen, config: &Config) -> ListenSpec {
    match listen {
        Listen::Unix(path) => ListenSpec::Unix {
            path: path.clone(),
            mode: config.api.mode,
            group: config.api.group.clone(),
        },
        Listen::Tcp(address) => ListenSpec::Tcp(*address),
    }
}

fn token(file: Option<&PathBuf>, key: &str) -> Result<Option<Token>, String> {
    let load = |path: &PathBuf| Token::load(path).map_err(|error| format!("{key}: {error}"));
    file.map(load).transpose()
}

fn hosts(listener: &Listener, configured: &[String]) -> Option<AllowedHosts> {
    listener
        .tcp_address()
        .map(|address| AllowedHosts::new(address, configured))
}

fn api_guard(config: &Config, listener: &Listener) -> Result<Guard, String> {
    Ok(Guard {
        hosts: hosts(listener, &config.api.allowed_hosts),
        token: token(config.api.token_file.as_ref(), "api.token_file")?,
        basic: false,
        open_paths: Vec::new(),
    })
}

fn health_guard(config: &Config, listener: &Listener) -> Result<Guard, String> {
    Ok(Guard {
        hosts: hosts(listener, &config.health.allowed_hosts),
        token: token(config.health.token_file.as_ref(), "health.token_file")?,
        basic: true,
        open_paths: vec!["/healthz", "/readyz"],
    })
}

fn front(
    name: &'static str,
    listener: Listener,
    guard: Guard,
    hub: &Hub,
    handler: Arc<dyn Handler>,
) -> Result<Front, String> {
    let metrics = hub.parts().metrics.clone();
    let config = FrontConfig {
        name: name.to_owned(),
        guard,
        counter: Some(Arc::new(move |route, code| {
            metrics.answered(name, route, code)
        })),
        ..FrontConfig::default()
    };
    Front::start(listener, config, handler)
        .map_err(|error| format!("the {name} server can't be started: {error}"))
}

fn seed() -> u64 {
    let mut bytes = [0; 8];
    // Jitter only: without the system's generator it is merely the same each time.
    let _filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    u64::from_le_bytes(bytes)
}

/// Obeys signals: the first SIGTERM drains, the second ends at once, SIGHUP reads the
/// configuration again.
fn obey(mut signals: Signals, hub: &Hub, path: &std::path::Path, systemd: Option<&Systemd>) {
    let mut ending = false;
    for signal in signals.forever() {
        if signal == SIGHUP {
            systemd.inspect(|it| it.reloading());
            reload(hub, path);
            systemd.inspect(|it| it.ready());
        } else if ending {
            log::warn!("a second signal: ending at once");
            std::process::exit(Exit::Failed as i32);
        } else {
            ending = true;
            systemd.inspect(|it| it.stopping());
            log::info!(
                "ending: no new requests, what runs may finish; a second signal ends at once"
            );
            hub.tell(Word::Drain);
        }
    }
}

fn reload(hub: &Hub, path: &std::path::Path) {
    match Config::load(path) {
        Ok(config) => {
            hub.tell(Word::Reload(Box::new(config)));
        }
        Err(error) => log::error!("the configuration stays as it was: {error}"),
    }
}

fn say_hello(config: &Config, hub: &Hub) {
    let lanes: usize = Lane::ALL.len() * backends::roots(config).len();
    log::info!(
        "volward {} backend={} api={} health={} store={} pools={lanes} instance={}",
        env!("CARGO_PKG_VERSION"),
        config.backend.kind(),
        config.api.listen,
        config.health.listen,
        config.store_path.display(),
        hub.parts().instance
    );
    if hub.parts().faults.is_some() {
        log::warn!("drill: [backend.faults] is enabled, this daemon misbehaves on demand");
    }
}

/// The loop has ended; store and lock are closed. The rest follows, whatever still hangs.
fn farewell(end: End, api: Front, health: Front, watchdog: Watchdog) -> Exit {
    let exit = match end {
        End::Drained(hung) => {
            for words in &hung {
                log::warn!("left behind: {words}; it is looked at first at the next start");
            }
            Exit::Done
        }
        End::Restart(why) => {
            log::error!("exit 75, start me again: {why}");
            Exit::RestartMe
        }
    };
    api.shutdown(FRONT_GRACE);
    health.shutdown(FRONT_GRACE);
    watchdog.stop();
    log::info!("ended");
    // Threads that hang in the kernel must not hold up the end of the others.
    std::process::exit(exit as i32);
}
