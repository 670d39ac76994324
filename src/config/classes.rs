//! `[backend…]` and `[classes…]`: which storage, where new volumes go, and what fails together.

use super::convert::{choice, path, path_of};
use super::read::{Found, Section};
use super::{Backend, Class, ClassQos, FaultRule, Faults, FileBackend, RbdBackend, SimBackend};
use crate::model::{Name, Step};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use toml::de::DeValue;

const KINDS: [&str; 3] = ["file", "rbd", "sim"];

pub(super) fn backend(section: &Section<'_, '_>) -> Backend {
    let kind = section.get("kind").and_then(|found| choice(&found, &KINDS));
    let file = file(section.section("file"));
    let rbd = rbd(section.section("rbd"));
    let sim = sim(section.section("sim"));
    let kind = kind.unwrap_or("file");
    for other in KINDS.into_iter().filter(|other| *other != kind) {
        if section.get(other).is_some() {
            section.wrong(
                other,
                format!("kind is {kind:?}, so this has no effect; set kind or remove it"),
            );
        }
    }
    match kind {
        "rbd" => Backend::Rbd(rbd),
        "sim" => Backend::Sim(sim),
        _ => Backend::File(file),
    }
}

fn paths(section: &Section<'_, '_>, name: &str) -> Vec<PathBuf> {
    let Some(found) = section.get(name) else {
        return Vec::new();
    };
    match found.value {
        DeValue::Array(items) => items
            .iter()
            .filter_map(|item| path(&found.item(item)))
            .collect(),
        _ => {
            found.wrong("a list of directories is needed, such as [\"/srv/images\"]");
            Vec::new()
        }
    }
}

fn file(section: Section<'_, '_>) -> FileBackend {
    let file = FileBackend {
        root: path_of(&section, "root")
            .unwrap_or_else(|| PathBuf::from("/var/lib/volward/volumes")),
        import_dirs: paths(&section, "import_dirs"),
    };
    section.finish();
    file
}

fn rbd(section: Section<'_, '_>) -> RbdBackend {
    let user = section
        .string("user")
        .unwrap_or_else(|| "volward".to_owned());
    if user.starts_with("client.") {
        section.wrong("user", format!("{user:?}: leave out \"client.\""));
    }
    let prefix = section
        .string("prefix")
        .unwrap_or_else(|| "volward".to_owned());
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "._-".contains(c);
    if prefix.len() > 32 || !prefix.chars().all(fits) {
        section.wrong(
            "prefix",
            format!("{prefix:?}: it has at most 32 characters of a-z, 0-9, '.', '_' and '-'"),
        );
    }
    let rbd = RbdBackend {
        conf: path_of(&section, "conf").unwrap_or_else(|| PathBuf::from("/etc/ceph/ceph.conf")),
        user,
        keyring: path_of(&section, "keyring"),
        pool: section.string("pool"),
        namespace: section.string("namespace"),
        prefix,
        import_dirs: paths(&section, "import_dirs"),
        options: options(&section.section("options")),
        mon_timeout_ms: section.duration("mon_timeout", 30_000, 1_000..=600_000),
        sessions_max: usize::try_from(section.integer("sessions_max", 64, 4..=10_000))
            .unwrap_or(64),
    };
    section.finish();
    rbd
}

/// Free keys with text values; a secret among them is refused.
fn options(section: &Section<'_, '_>) -> BTreeMap<String, String> {
    let mut options = BTreeMap::new();
    for name in section.names() {
        if name == "key" {
            section.wrong(
                &name,
                "secrets don't stand in this file; name a keyring instead",
            );
        } else if name == "rados_osd_op_timeout" {
            section.wrong(
                &name,
                "after such a timeout the outcome is unknown; remove it",
            );
        }
        if let Some(value) = section.string(&name) {
            options.insert(name, value);
        }
    }
    options
}

fn sim(section: Section<'_, '_>) -> SimBackend {
    let latency = section.section("latency");
    let mut latency_ms = BTreeMap::new();
    for step in Step::ALL {
        if let Some(found) = latency.get(step.as_str())
            && let Some(ms) = found.duration(0..=3_600_000)
        {
            latency_ms.insert(step, ms);
        }
    }
    latency.finish();
    section.finish();
    SimBackend { latency_ms }
}

pub(super) fn faults(backend: &Section<'_, '_>) -> Faults {
    let section = backend.section("faults");
    let mut faults = Faults {
        enabled: section.boolean("enabled", false),
        seed: section.integer("seed", 1, 0..=i64::MAX as u64),
        rules: Vec::new(),
    };
    if let Some(found) = section.get("rules") {
        match found.value {
            DeValue::Array(items) => {
                for item in items.iter() {
                    let item = found.item(item);
                    faults.rules.push(FaultRule {
                        line: item.line,
                        json: json(item.value),
                    });
                }
            }
            _ => found.wrong("a list of rules is needed; write [[backend.faults.rules]]"),
        }
        if !faults.enabled {
            section.wrong(
                "enabled",
                "it is false, so the rules have no effect; set it to true or remove them",
            );
        }
    }
    section.finish();
    faults
}

fn json(value: &DeValue<'_>) -> serde_json::Value {
    use serde_json::Value;
    match value {
        DeValue::String(text) => Value::from(text.as_ref()),
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
            .map_or_else(|_| Value::from(number.as_str()), Value::from),
        DeValue::Float(number) => number
            .as_str()
            .parse::<f64>()
            .map_or_else(|_| Value::from(number.as_str()), Value::from),
        DeValue::Boolean(flag) => Value::from(*flag),
        DeValue::Datetime(time) => Value::from(time.to_string()),
        DeValue::Array(items) => items.iter().map(|item| json(item.get_ref())).collect(),
        DeValue::Table(table) => Value::Object(
            table
                .iter()
                .map(|(key, value)| (key.get_ref().to_string(), json(value.get_ref())))
                .collect(),
        ),
    }
}

pub(super) fn classes(
    section: &Section<'_, '_>,
    backend: &Backend,
) -> (BTreeMap<String, Class>, Option<String>) {
    let mut classes = BTreeMap::new();
    let mut lines = BTreeMap::new();
    for name in section.names() {
        let class = section.section(&name);
        if let Err(error) = name.parse::<Name>() {
            section.wrong(&name, format!("{error}; choose another class name"));
        }
        lines.insert(name.clone(), class.line);
        let made = one_class(&class, &name, backend);
        class.finish();
        classes.insert(name, made);
    }
    if classes.is_empty() {
        let (root, namespace) = default_root(backend);
        match root {
            Some(root) => {
                let class = Class {
                    domain: "default".to_owned(),
                    root,
                    namespace,
                    ..Class::default()
                };
                classes.insert("default".to_owned(), class);
            }
            None => section.sheet.fault(
                None,
                "backend.rbd.pool",
                "it is missing and there are no classes; name a pool there or in [classes.NAME]",
            ),
        }
    }
    name_domains(section, &mut classes, &lines);
    let default_class = match classes.len() {
        1 => classes.keys().next().cloned(),
        _ => classes.keys().find(|name| *name == "default").cloned(),
    };
    (classes, default_class)
}

fn default_root(backend: &Backend) -> (Option<String>, Option<String>) {
    match backend {
        Backend::File(file) => (Some(file.root.display().to_string()), None),
        Backend::Rbd(rbd) => (rbd.pool.clone(), rbd.namespace.clone()),
        Backend::Sim(_) => (Some("sim".to_owned()), None),
    }
}

/// A class as it is written; an empty domain is filled in later.
fn one_class(section: &Section<'_, '_>, name: &str, backend: &Backend) -> Class {
    let rbd = matches!(backend, Backend::Rbd(_));
    let (default_root, default_namespace) = default_root(backend);
    let foreign = |key: &str, found: Found<'_, '_>, use_instead: &str| {
        found.wrong(format!(
            "the {} backend has no {key} in a class; {use_instead}",
            backend.kind()
        ));
    };
    let pool = section.get("pool");
    let root = section.get("root");
    let place = match backend {
        Backend::Rbd(_) => {
            root.into_iter()
                .for_each(|found| foreign("root", found, "use pool"));
            pool.and_then(|found| found.string())
        }
        Backend::File(_) => {
            pool.into_iter()
                .for_each(|found| foreign("pool", found, "use root"));
            root.and_then(|found| path(&found))
                .map(|path| path.components().collect::<PathBuf>().display().to_string())
        }
        Backend::Sim(_) => {
            pool.into_iter()
                .for_each(|found| foreign("pool", found, "use root"));
            root.and_then(|found| found.string())
                .or_else(|| Some(name.to_owned()))
        }
    };
    let Some(place) = place.or(default_root) else {
        section.wrong(
            "pool",
            "it is missing; name a pool here or in [backend.rbd]",
        );
        return Class::default();
    };
    let qos = section.section("qos");
    let many = 1..=i64::MAX as u64;
    let class = Class {
        domain: domain(section),
        root: place,
        data_pool: section.string("data_pool"),
        namespace: section.string("namespace").or(default_namespace),
        object_size_bytes: object_size(section),
        qos: ClassQos {
            iops: qos.get("iops").and_then(|f| f.integer(many.clone())),
            bytes_per_second: qos
                .get("bytes_per_second")
                .and_then(|f| f.size(many.clone())),
            burst_percent: qos
                .get("burst_percent")
                .and_then(|f| f.integer(100..=100_000)),
            burst_seconds: qos
                .get("burst")
                .and_then(|f| f.duration(1_000..=3_600_000))
                .map(|ms| ms / 1_000),
        },
    };
    qos.finish();
    if !rbd {
        for key in ["data_pool", "namespace", "object_size", "qos"] {
            if let Some(found) = section.get(key) {
                foreign(key, found, "remove it");
            }
        }
    }
    class
}

fn domain(section: &Section<'_, '_>) -> String {
    let Some(found) = section.get("domain") else {
        return String::new();
    };
    let Some(text) = found.string() else {
        return String::new();
    };
    if let Err(error) = text.parse::<Name>() {
        found.wrong(format!("{error}; choose another domain name"));
    }
    text
}

fn object_size(section: &Section<'_, '_>) -> Option<u64> {
    let found = section.get("object_size")?;
    let bytes = found.size(4096..=32 << 20)?;
    if !bytes.is_power_of_two() {
        found.wrong("it must be a power of two from \"4KiB\" to \"32MiB\"");
    }
    Some(bytes)
}

/// Gives every class its domain: classes that share a pool or root (data pools included) fail
/// together, so they are one. An unnamed domain is called as its first pool, or its first class.
fn name_domains(
    section: &Section<'_, '_>,
    classes: &mut BTreeMap<String, Class>,
    lines: &BTreeMap<String, Option<usize>>,
) {
    for group in groups(classes) {
        let named = group.iter().find(|name| !classes[*name].domain.is_empty());
        let Some(first) = named.or(group.first()) else {
            continue;
        };
        let class = &classes[first];
        let domain = if !class.domain.is_empty() {
            class.domain.clone()
        } else if class.root.parse::<Name>().is_ok() {
            class.root.clone()
        } else {
            first.clone()
        };
        for name in &group {
            let Some(class) = classes.get_mut(name) else {
                continue;
            };
            if !class.domain.is_empty() && class.domain != domain {
                section.sheet.fault(
                    lines.get(name).copied().flatten(),
                    section.key(&format!("{name}.domain")),
                    format!(
                        "{:?}: class {first:?} is in domain {domain:?} and shares a pool or root \
                         with it; what does so fails together, so give both the same domain",
                        class.domain
                    ),
                );
            }
            class.domain.clone_from(&domain);
        }
    }
}

/// Classes that share pools or roots, directly or through others.
fn groups(classes: &BTreeMap<String, Class>) -> Vec<Vec<String>> {
    let mut groups: Vec<(BTreeSet<&str>, Vec<String>)> = Vec::new();
    for (name, class) in classes {
        let roots = std::iter::once(&class.root).chain(&class.data_pool);
        let mut roots: BTreeSet<&str> = roots.map(String::as_str).collect();
        let mut names = Vec::new();
        let (touching, apart) = groups
            .into_iter()
            .partition(|(others, _)| !others.is_disjoint(&roots));
        groups = apart;
        for (others, members) in touching {
            roots.extend(others);
            names.extend(members);
        }
        names.push(name.clone());
        names.sort_unstable();
        groups.push((roots, names));
    }
    groups.into_iter().map(|(_, names)| names).collect()
}
