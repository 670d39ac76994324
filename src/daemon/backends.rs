//! From the configuration to a backend and to the scheduler's policy.

use crate::backend::faults::{FaultRules, Faulty, RuleSet};
use crate::backend::file::{FileBackend, FileConfig};
use crate::backend::sim::{SimBackend, SimConfig};
use crate::backend::{Backend, Caps, Ledger, SharedBackend};
use crate::config::{self, Config};
use crate::hub::Hub;
use crate::model::{Place, Qos};
use crate::sched::{ClassPolicy, DomainPolicy, Policy, RetryPolicy};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// A backend, and the rules that make it misbehave.
pub struct Built {
    pub backend: SharedBackend,
    pub faults: Option<FaultRules>,
}

/// Domain → its roots.
pub fn roots(config: &Config) -> BTreeMap<String, Vec<String>> {
    let mut domains: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for class in config.classes.values() {
        let roots = domains.entry(class.domain.clone()).or_default();
        if !roots.contains(&class.root) {
            roots.push(class.root.clone());
        }
    }
    domains
}

/// Makes the backend; reaches for nothing yet.
pub fn build(
    config: &Config,
    instance: &str,
    ledger: Arc<dyn Ledger>,
    identities: BTreeMap<String, String>,
) -> Result<Built, String> {
    let faults = fault_rules(config)?;
    let backend: SharedBackend = match &config.backend {
        config::Backend::File(file) => {
            let made = FileBackend::new(FileConfig {
                domains: roots(config),
                import_dirs: file.import_dirs.clone(),
                instance: instance.to_owned(),
                identities,
            });
            wrap(made, faults.as_ref())
        }
        config::Backend::Sim(sim) => {
            let latency = sim.latency_ms.iter();
            let made = SimBackend::new(SimConfig {
                domains: roots(config),
                instance: instance.to_owned(),
                latency: latency
                    .map(|(step, ms)| (*step, Duration::from_millis(*ms)))
                    .collect(),
            });
            wrap(made, faults.as_ref())
        }
        config::Backend::Rbd(rbd) => rbd_backend(config, rbd, instance, ledger, faults.as_ref())?,
    };
    Ok(Built { backend, faults })
}

fn wrap<B: Backend + 'static>(backend: B, faults: Option<&FaultRules>) -> SharedBackend {
    match faults {
        Some(rules) => Arc::new(Faulty::new(backend, rules.clone())),
        None => Arc::new(backend),
    }
}

#[cfg(not(feature = "rbd"))]
fn rbd_backend(
    _config: &Config,
    _rbd: &config::RbdBackend,
    _instance: &str,
    _ledger: Arc<dyn Ledger>,
    _faults: Option<&FaultRules>,
) -> Result<SharedBackend, String> {
    Err(
        "backend.kind = \"rbd\": this binary was built without Ceph; build it with \
         `cargo build --release --features rbd`, or use \"file\""
            .to_owned(),
    )
}

#[cfg(feature = "rbd")]
fn rbd_backend(
    config: &Config,
    rbd: &config::RbdBackend,
    instance: &str,
    ledger: Arc<dyn Ledger>,
    faults: Option<&FaultRules>,
) -> Result<SharedBackend, String> {
    use crate::backend::rbd::{ClassQos, RbdBackend, RbdClass, RbdConfig};
    let class = |(name, class): (&String, &config::Class)| {
        let qos = ClassQos {
            iops: class.qos.iops,
            bytes_per_second: class.qos.bytes_per_second,
            burst_percent: class.qos.burst_percent,
            burst_seconds: class.qos.burst_seconds,
        };
        let made = RbdClass {
            domain: class.domain.clone(),
            pool: class.root.clone(),
            data_pool: class.data_pool.clone(),
            namespace: class.namespace.clone(),
            object_size: class.object_size_bytes,
            features: None,
            qos,
        };
        (name.clone(), made)
    };
    let made = RbdBackend::new(RbdConfig {
        conf: rbd.conf.clone(),
        user: rbd.user.clone(),
        keyring: rbd.keyring.clone(),
        options: rbd.options.clone(),
        mon_timeout_s: rbd.mon_timeout_ms.div_ceil(1000),
        prefix: rbd.prefix.clone(),
        classes: config.classes.iter().map(class).collect(),
        import_dirs: rbd.import_dirs.clone(),
        keys: config.keys.clone(),
        instance: instance.to_owned(),
        ledger,
        sessions_max: rbd.sessions_max,
    });
    made.map(|backend| wrap(backend, faults))
        .map_err(|error| format!("backend.rbd: {error}"))
}

fn fault_rules(config: &Config) -> Result<Option<FaultRules>, String> {
    if !config.faults.enabled {
        return Ok(None);
    }
    let rules = FaultRules::new(config.faults.seed);
    let set: RuleSet = serde_json::from_value(config.faults.body())
        .map_err(|error| format!("backend.faults.rules: {error}"))?;
    rules.set(set.rules);
    Ok(Some(rules))
}

/// The rules that the scheduler decides by.
pub fn policy(config: &Config, hub: &Hub) -> Policy {
    policy_with(config, hub.parts().caps)
}

/// The same before there is a hub.
pub fn policy_with(config: &Config, caps: Caps) -> Policy {
    let lanes = &config.lanes;
    let bounds = DomainPolicy {
        threads: [lanes.create.threads, lanes.delete.threads],
        abandoned_max: [lanes.create.abandoned_max, lanes.delete.abandoned_max],
    };
    let class = |(name, class): (&String, &config::Class)| {
        let place = Place {
            class: name.clone(),
            domain: class.domain.clone(),
            root: class.root.clone(),
            data_pool: class.data_pool.clone(),
            namespace: class.namespace.clone(),
            identity: None,
        };
        let limits = Qos {
            iops: class.qos.iops,
            bytes_per_second: class.qos.bytes_per_second,
        };
        let qos = (limits != Qos::default()).then_some(limits);
        (name.clone(), ClassPolicy { place, qos })
    };
    let limits = &config.limits;
    Policy {
        caps,
        classes: config.classes.iter().map(class).collect(),
        domains: roots(config)
            .into_keys()
            .map(|domain| (domain, bounds))
            .collect(),
        import_dirs: config
            .backend
            .import_dirs()
            .iter()
            .map(|dir| dir.to_string_lossy().into_owned())
            .collect(),
        keys: config.keys.keys().cloned().collect(),
        backlog: limits.backlog,
        max_size_bytes: limits.max_size_bytes,
        max_volumes: limits.max_volumes,
        clone_depth: limits.clone_depth,
        clone_depth_max: limits.clone_depth_max,
        encrypt: limits.encrypt,
        retry: RetryPolicy {
            attempts: config.retry.attempts,
            base_ms: config.retry.base_ms,
            cap_ms: config.retry.cap_ms,
            hangs: config.retry.hangs,
        },
        breaker_hangs: config.breaker.hangs,
        breaker_open_ms: config.breaker.open_ms,
        breaker_open_cap_ms: config.breaker.open_cap_ms,
        trash_keep_ms: config.trash.keep_ms,
        trash_flatten: config.trash.flatten,
        restart_after_ms: config.restart_after_ms,
    }
}
