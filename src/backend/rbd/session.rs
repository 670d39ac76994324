//! Connections to the cluster: who shares which, how they are retired, and how they are fenced.
//!
//! One connection ([`Link`]) per lane and domain, shared by the workers of that pool and by nobody
//! else, because calls that hang in a connection can starve others in it. Its address is in the
//! ledger before it is used. Once a call in it was abandoned it is retired: new work goes to a new
//! link, and the old one lives until its last call has returned. This module knows nothing of
//! images. Everything that blocks here asks only the monitors and is bounded by their timeouts.

use super::RbdConfig;
use super::cluster::{Access, Cluster, EACCES, ENOENT, EPERM, Fail, IoCtx};
use crate::backend::{Error, Result};
use crate::model::{ErrorKind, Lane};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// After this time an OSD has dropped the watches and broken the locks of a client that is gone
/// (`osd_client_watch_timeout`).
const WATCH_TIMEOUT: Duration = Duration::from_secs(30);
/// How long fenced addresses stay on the blocklist, in seconds. Longer than an OSD can be expected
/// to hang and then go on with what it was asked before.
const FENCE_S: u32 = 24 * 3600;

/// A lock whose holder has panicked is as good as any: each critical section leaves a valid state.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A connection with what was opened through it.
#[derive(Debug)]
pub struct Link {
    config: Arc<RbdConfig>,
    domain: String,
    address: String,
    fsid: String,
    retired: Arc<AtomicBool>,
    // By pool and namespace. Emptied before the connection goes.
    contexts: Mutex<BTreeMap<(String, String), Arc<IoCtx>>>,
    // `None` only while it is being dropped.
    cluster: Option<Arc<Cluster>>,
}

impl Link {
    /// The pool and namespace through this connection.
    pub fn io(&self, pool: &str, namespace: Option<&str>) -> Result<Arc<IoCtx>> {
        let key = (pool.to_owned(), namespace.unwrap_or("").to_owned());
        if let Some(io) = lock(&self.contexts).get(&key) {
            return Ok(Arc::clone(io));
        }
        // Not under the lock: this may wait for the monitors.
        let cluster = self.cluster()?;
        let io = IoCtx::open(cluster, pool, namespace).map_err(|fail| {
            let mut error = fail.about(format!("pool {pool}")).untouched();
            if fail.is_gone() {
                error.kind = ErrorKind::Unreachable;
                error.message = format!("pool {pool}: the cluster has no such pool");
            }
            error
        })?;
        let mut contexts = lock(&self.contexts);
        Ok(Arc::clone(
            contexts.entry(key).or_insert_with(|| Arc::new(io)),
        ))
    }

    fn cluster(&self) -> Result<&Arc<Cluster>> {
        self.cluster
            .as_ref()
            .ok_or_else(|| Error::new(ErrorKind::Internal, "link", "the connection is closed"))
    }

    /// Which cluster and pool that context is: `FSID/POOL-ID`.
    pub fn identity(&self, io: &IoCtx) -> String {
        format!("{}/{}", self.fsid, io.pool_id())
    }

    /// Fails if the pool that a context was opened for is no more, or another one has its name.
    /// Without this, an answer of "not there" might mean the pool.
    pub fn check_pool(&self, io: &IoCtx, pool: &str) -> Result<()> {
        let found = self.cluster()?.pool_id(pool);
        match found {
            Ok(id) if id == io.pool_id() => Ok(()),
            Ok(_) | Err(Fail { errno: ENOENT, .. }) => Err(Error::new(
                ErrorKind::Unreachable,
                "rados_pool_lookup",
                format!("pool {pool}: it was removed from the cluster"),
            )
            .untouched()),
            Err(fail) => Err(fail.about(format!("pool {pool}")).untouched()),
        }
    }

    /// Not to be used for new work.
    pub fn retire(&self) {
        self.retired.store(true, Ordering::Release);
    }

    /// Whether new work must go elsewhere.
    pub fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Acquire)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        lock(&self.contexts).clear();
        drop(self.cluster.take());
        // Only now can it do nothing more. A failure costs the successor a needless fence.
        let _ = self.config.ledger.closed(&self.domain, &self.address);
    }
}

/// Who may use which connection.
#[derive(Debug)]
pub struct Links {
    config: Arc<RbdConfig>,
    started: Instant,
    state: Mutex<State>,
    // By domain: whether the sessions of earlier processes were fenced.
    fenced: BTreeMap<String, Mutex<bool>>,
}

#[derive(Debug, Default)]
struct State {
    gates: BTreeMap<(String, Lane), Arc<Gate>>,
    all: Vec<Known>,
    // What `retire` has taken away. Dropped by somebody who may block.
    attic: Vec<Arc<Gate>>,
}

/// A connection that was made, alive or not. Looking at it keeps nothing alive, so that nobody who
/// mustn't block becomes the one who drops the connection.
#[derive(Debug)]
struct Known {
    domain: String,
    lane: Lane,
    address: String,
    retired: Arc<AtomicBool>,
    fenced: bool,
    link: Weak<Link>,
}

/// One lane's way in. Its lock is held while connecting, so that workers who come at once share
/// one connection; all that happens under it is bounded by the monitors' timeouts.
#[derive(Debug, Default)]
struct Gate {
    link: Mutex<Option<Arc<Link>>>,
}

impl Links {
    /// No connection yet.
    pub fn new(config: Arc<RbdConfig>) -> Links {
        let fenced = config
            .classes
            .values()
            .map(|class| (class.domain.clone(), Mutex::new(false)))
            .collect();
        Links {
            config,
            started: Instant::now(),
            state: Mutex::default(),
            fenced,
        }
    }

    /// The connection of that lane, made if there is none.
    pub fn get(&self, domain: &str, lane: Lane) -> Result<Arc<Link>> {
        self.clear_attic();
        let gate = {
            let mut state = lock(&self.state);
            let key = (domain.to_owned(), lane);
            Arc::clone(state.gates.entry(key).or_default())
        };
        let mut slot = lock(&gate.link);
        if let Some(link) = slot.as_ref().filter(|link| !link.is_retired()) {
            return Ok(Arc::clone(link));
        }
        let link = self.open(domain, lane, &gate)?;
        let old = slot.replace(Arc::clone(&link));
        drop(slot);
        drop(old);
        Ok(link)
    }

    /// From now on nobody gets that lane's connection any more. Never blocks.
    pub fn retire(&self, domain: &str, lane: Lane) {
        let mut state = lock(&self.state);
        if let Some(gate) = state.gates.remove(&(domain.to_owned(), lane)) {
            state.attic.push(gate);
        }
        for known in &state.all {
            if known.domain == domain && known.lane == lane {
                known.retired.store(true, Ordering::Release);
            }
        }
    }

    /// Puts the retired connections of a domain that are still in use on the blocklist, so that
    /// the calls in them return as soon as their OSD answers. Says how many.
    pub fn fence_retired(&self, domain: &str) -> Result<usize> {
        self.clear_attic();
        let stuck: Vec<(String, Lane)> = lock(&self.state)
            .all
            .iter()
            .filter(|known| {
                known.domain == domain
                    && known.retired.load(Ordering::Acquire)
                    && !known.fenced
                    && known.link.strong_count() > 0
            })
            .map(|known| (known.address.clone(), known.lane))
            .collect();
        for (address, lane) in &stuck {
            let by = self.get(domain, *lane)?;
            by.cluster()?
                .blocklist(address, FENCE_S)
                .map_err(|fail| fail.about(format!("our own session {address}")))?;
            for known in &mut lock(&self.state).all {
                known.fenced |= known.address == *address;
            }
        }
        Ok(stuck.len())
    }

    fn clear_attic(&self) {
        let gates = std::mem::take(&mut lock(&self.state).attic);
        drop(gates);
    }

    fn open(&self, domain: &str, lane: Lane, gate: &Arc<Gate>) -> Result<Arc<Link>> {
        let Some(fenced) = self.fenced.get(domain) else {
            return Err(Error::new(
                ErrorKind::Internal,
                "connect",
                format!("domain {domain}: no class is in it"),
            ));
        };
        self.check_budget()?;
        let link = Arc::new(self.connect(domain)?);
        {
            let mut state = lock(&self.state);
            state.all.retain(|known| known.link.strong_count() > 0);
            state.all.push(Known {
                domain: domain.to_owned(),
                lane,
                address: link.address.clone(),
                retired: Arc::clone(&link.retired),
                fenced: false,
                link: Arc::downgrade(&link),
            });
            // Retired while it was being made.
            let current = state.gates.get(&(domain.to_owned(), lane));
            if !current.is_some_and(|current| Arc::ptr_eq(current, gate)) {
                link.retire();
            }
        }
        let mut fenced = lock(fenced);
        if !*fenced {
            self.fence_predecessors(domain, &link)?;
            *fenced = true;
        }
        Ok(link)
    }

    fn check_budget(&self) -> Result<()> {
        let state = lock(&self.state);
        let alive = |known: &&Known| known.link.strong_count() > 0;
        let alive = state.all.iter().filter(alive).count();
        if alive < self.config.sessions_max {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Unreachable,
            "connect",
            format!(
                "{alive} sessions are open, abandoned ones included, and no more are allowed; \
                 they end when the calls in them return"
            ),
        )
        .untouched())
    }

    fn connect(&self, domain: &str) -> Result<Link> {
        let config = &self.config;
        let failed = |fail: Fail| {
            // Whatever is wrong with the way to the cluster, no volume is to blame.
            let conf = config.conf.display();
            let mut error = fail.about(format!("cluster of {conf} as client.{}", config.user));
            error.kind = ErrorKind::Unreachable;
            if matches!(fail.errno, ENOENT | EPERM | EACCES) {
                error.message = format!(
                    "cluster of {conf}: client.{} isn't let in; check that the keyring is there \
                     and belongs to that client",
                    config.user
                );
            }
            error.untouched()
        };
        let cluster = Cluster::connect(&access(config)).map_err(failed)?;
        let (address, fsid) = (
            cluster.address().map_err(failed)?,
            cluster.fsid().map_err(failed)?,
        );
        config.ledger.opened(domain, &address)?;
        Ok(Link {
            config: Arc::clone(config),
            domain: domain.to_owned(),
            address,
            fsid,
            retired: Arc::default(),
            contexts: Mutex::default(),
            cluster: Some(Arc::new(cluster)),
        })
    }

    /// Sees to it that no session of an earlier process can act in that domain any more.
    fn fence_predecessors(&self, domain: &str, by: &Link) -> Result<()> {
        let ledger = &self.config.ledger;
        let ours: Vec<String> = lock(&self.state)
            .all
            .iter()
            .map(|known| known.address.clone())
            .collect();
        for address in ledger.predecessors(domain)? {
            if ours.contains(&address) || address == by.address {
                continue;
            }
            match by.cluster()?.blocklist(&address, FENCE_S) {
                Ok(()) => {}
                Err(Fail {
                    errno: EPERM | EACCES,
                    op,
                }) => {
                    let left = WATCH_TIMEOUT.saturating_sub(self.started.elapsed());
                    if !left.is_zero() {
                        return Err(Error::new(
                            ErrorKind::Unreachable,
                            op,
                            format!(
                                "domain {domain}: an earlier process may still act there, and \
                                 client.{} may not fence it off (mon 'profile rbd' would let \
                                 it); waiting another {} s until its watches have expired",
                                self.config.user,
                                left.as_secs() + 1
                            ),
                        )
                        .untouched());
                    }
                }
                Err(fail) => {
                    let thing = format!("session {address} of an earlier process");
                    return Err(fail.about(thing).untouched());
                }
            }
            ledger.closed(domain, &address)?;
        }
        Ok(())
    }
}

/// The options of every connection.
fn access(config: &RbdConfig) -> Access {
    let timeout = config.mon_timeout_s.max(1).to_string();
    let fixed = [
        // A monitor that doesn't answer must not hold a connect for five minutes.
        ("client_mount_timeout", timeout.as_str()),
        ("rados_mon_op_timeout", timeout.as_str()),
        // Calls that are stuck use up these two, and then nothing gets through in this session.
        ("objecter_inflight_ops", "1000000"),
        ("objecter_inflight_op_bytes", "1099511627776"),
        // Imports write each byte once.
        ("rbd_cache", "false"),
        // `rbd_remove` is for remnants, which must go.
        ("rbd_move_to_trash_on_remove", "false"),
        // Sockets and logs of daemons; sessions of one process would fight for them.
        ("admin_socket", ""),
        ("log_file", ""),
        ("log_to_stderr", "false"),
    ];
    let mut options: Vec<(String, String)> = fixed
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect();
    if let Some(keyring) = &config.keyring {
        options.push(("keyring".into(), keyring.to_string_lossy().into_owned()));
    }
    options.extend(config.options.clone());
    Access {
        conf: config.conf.clone(),
        user: config.user.clone(),
        options,
    }
}
