//! Places where a crash test can kill the process: `VOLWARD_FAILPOINT=name` or `name:nth` aborts
//! it when that place is reached (for the nth time).

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Every place, in the order in which a life of a volume passes them. Each stands between two
/// system calls that change something.
pub const NAMES: &[&str] = &[
    "root.written",
    "root.linked",
    "root.unlinked",
    "make.directory",
    "make.meta",
    "make.image",
    "make.filled",
    "make.synced",
    "make.renamed",
    "update.grown",
    "update.written",
    "update.renamed",
    "trash.renamed",
    "restore.renamed",
    "snapshot.renamed",
    "reclaim.renamed",
    "reclaim.truncated",
    "remove.image",
    "remove.meta",
    "remove.directory",
];

struct Armed {
    name: String,
    nth: u64,
    passed: AtomicU64,
}

/// Aborts the process if it was told to die here.
pub fn at(name: &'static str) {
    debug_assert!(NAMES.contains(&name), "{name} is not in the list");
    static ARMED: OnceLock<Option<Armed>> = OnceLock::new();
    // Read once: a process that isn't under test pays for one load.
    let Some(armed) = ARMED.get_or_init(armed) else {
        return;
    };
    if armed.name == name && armed.passed.fetch_add(1, Ordering::SeqCst) + 1 == armed.nth {
        eprintln!("VOLWARD_FAILPOINT: abort at {name}");
        std::process::abort();
    }
}

fn armed() -> Option<Armed> {
    let text = std::env::var("VOLWARD_FAILPOINT").ok()?;
    let (name, nth) = match text.split_once(':') {
        Some((name, nth)) => (name, nth.parse().ok()?),
        None => (text.as_str(), 1),
    };
    Some(Armed {
        name: name.to_owned(),
        nth,
        passed: AtomicU64::new(0),
    })
}
