//! The border to the storage: what volward asks of a backend and what it gets back.
//!
//! A backend knows `model` only. Every method of a session is idempotent, finds out by itself what
//! is already there, and says what it found or did. Methods may block for ever: the caller runs
//! them on a thread that it can afford to lose.

pub mod faults;
pub mod file;
#[cfg(feature = "rbd")]
pub mod rbd;
pub mod sim;

use crate::model::{ErrorKind, Known, Lane, Millis, Record, Step};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::ControlFlow;
use std::sync::Arc;

/// What happened, and how the scheduler shall take it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    /// Decides what happens next; policy never looks at anything else.
    pub kind: ErrorKind,
    /// The call that failed, such as `rbd_create4` or `rename`.
    pub op: &'static str,
    /// The positive errno, if there was one.
    pub errno: Option<i32>,
    /// A sentence that names the thing and the cause.
    pub message: String,
    /// Who holds it: watchers, snapshots, children, in words (`InUse`, `Blocked`).
    pub blockers: Vec<String>,
    /// When it is worth another try (`NotYet`).
    pub not_before: Option<Millis>,
    /// Whether anything of the object may have been changed or removed by this call. A reclaim
    /// that failed without touching anything leaves the image restorable.
    pub touched: bool,
}

impl Error {
    /// An error of that kind. It counts as having touched the object.
    #[must_use]
    pub fn new(kind: ErrorKind, op: &'static str, message: impl Into<String>) -> Error {
        Error {
            kind,
            op,
            errno: None,
            message: message.into(),
            blockers: Vec::new(),
            not_before: None,
            touched: true,
        }
    }

    /// The error of a system or library call: the kind follows from the errno.
    #[must_use]
    pub fn of_errno(errno: i32, op: &'static str, message: impl Into<String>) -> Error {
        let mut error = Error::new(ErrorKind::of_errno(errno), op, message);
        error.errno = Some(errno);
        error
    }

    /// The same error, known to have changed nothing.
    #[must_use]
    pub fn untouched(mut self) -> Error {
        self.touched = false;
        self
    }

    /// The same error with the names of those who hold the object.
    #[must_use]
    pub fn held_by(mut self, blockers: Vec<String>) -> Error {
        self.blockers = blockers;
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match self.errno {
            Some(errno) => write!(f, " ({}: errno {errno})", self.op),
            None => write!(f, " ({})", self.op),
        }
    }
}

impl std::error::Error for Error {}

/// The result of a backend call.
pub type Result<T> = std::result::Result<T, Error>;

/// What an attempt tells while it runs, and how it is told to stop. May be called from any thread
/// (librbd calls back on its own).
pub trait Ctl: Send + Sync {
    /// Reports work done of a total, in units of the caller's choice. `Break` asks for an early
    /// and clean end: return an error of kind `Cancelled` as soon as the state is consistent.
    fn progress(&self, done: u64, total: u64) -> ControlFlow<()>;

    /// Whether an early end is asked for.
    fn cancelled(&self) -> bool;
}

/// A `Ctl` that nobody watches and nobody cancels.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unwatched;

impl Ctl for Unwatched {
    fn progress(&self, _done: u64, _total: u64) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    fn cancelled(&self) -> bool {
        false
    }
}

/// Where a backend keeps the addresses of its sessions, so that a successor can fence them off.
pub trait Ledger: Send + Sync {
    /// Makes the address of a session durable. Called, and waited for, before its first use.
    ///
    /// # Errors
    /// When it can't be made durable: the session must not be used then.
    fn opened(&self, domain: &str, address: &str) -> Result<()>;

    /// The addresses of earlier processes that may still act in that domain.
    ///
    /// # Errors
    /// When they can't be read.
    fn predecessors(&self, domain: &str) -> Result<Vec<String>>;

    /// Forgets an address: it can't act any more.
    ///
    /// # Errors
    /// When that can't be made durable.
    fn closed(&self, domain: &str, address: &str) -> Result<()>;
}

/// A `Ledger` for backends whose sessions end with their process.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoLedger;

impl Ledger for NoLedger {
    fn opened(&self, _domain: &str, _address: &str) -> Result<()> {
        Ok(())
    }

    fn predecessors(&self, _domain: &str) -> Result<Vec<String>> {
        Ok(Vec::new())
    }

    fn closed(&self, _domain: &str, _address: &str) -> Result<()> {
        Ok(())
    }
}

/// What a backend can do; requests for anything else are refused before they are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Caps {
    /// Limits on I/O.
    pub qos: bool,
    /// LUKS2, for volumes without a source.
    pub encryption: bool,
    /// Import of raw files.
    pub import_raw: bool,
    /// Import of qcow2 files.
    pub import_qcow2: bool,
    /// Clones depend on their parent, so chains must be kept short.
    pub chains: bool,
    /// Sizes are a multiple of this many bytes (at least 1); others are rounded up.
    pub size_unit: u64,
}

/// The storage behind one daemon: all its domains.
pub trait Backend: Send + Sync {
    /// What it can do. Never blocks.
    fn caps(&self) -> Caps;

    /// Opens a session for one worker of a pool. Workers of a pool may share what is beneath;
    /// different lanes and domains never do. May block.
    ///
    /// # Errors
    /// When the backend can't be reached or refuses us.
    fn connect(&self, domain: &str, lane: Lane, ctl: &dyn Ctl) -> Result<Box<dyn Session>>;

    /// Gets back the threads of abandoned calls of that domain where that is possible, by fencing
    /// off the sessions that they are stuck in. Called from the domain's probe thread after a
    /// successful probe while calls are abandoned. Says how many sessions were fenced. May block.
    ///
    /// # Errors
    /// When fencing failed.
    fn recover_abandoned(&self, domain: &str) -> Result<usize> {
        let _ = domain;
        Ok(0)
    }

    /// The worker that used a session of that pool was abandoned inside a call: new sessions of
    /// the pool must not share anything with it. Called by the watchdog: must not block.
    fn retire(&self, domain: &str, lane: Lane) {
        let _ = (domain, lane);
    }
}

impl<B: Backend + ?Sized> Backend for Arc<B> {
    fn caps(&self) -> Caps {
        (**self).caps()
    }

    fn connect(&self, domain: &str, lane: Lane, ctl: &dyn Ctl) -> Result<Box<dyn Session>> {
        (**self).connect(domain, lane, ctl)
    }

    fn recover_abandoned(&self, domain: &str) -> Result<usize> {
        (**self).recover_abandoned(domain)
    }

    fn retire(&self, domain: &str, lane: Lane) {
        (**self).retire(domain, lane);
    }
}

/// A volume as the backend sees it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VolumeState {
    /// The size in bytes that its user sees.
    pub size_bytes: u64,
    /// Allocated bytes, where that is cheap to know.
    pub used_bytes: Option<u64>,
    /// What other tools call it.
    pub handle: String,
    /// Its world wide name.
    pub wwn: Option<String>,
    /// The backend's own id of the image.
    pub image_id: Option<String>,
    /// Whether its LUKS2 format is done.
    pub encrypted: bool,
    /// Whether it depends on a parent image.
    pub has_parent: bool,
    /// Which cluster and pool, or which root, this was seen in.
    pub identity: Option<String>,
    /// The generation in its mark.
    pub generation: u64,
    /// Whether this call changed something, or found all as wished.
    pub did: bool,
}

/// A snapshot as the backend sees it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SnapshotState {
    /// The size of the volume when it was taken, in bytes.
    pub size_bytes: u64,
    /// Which cluster and pool, or which root, this was seen in.
    pub identity: Option<String>,
    /// Whether this call changed something, or found it there.
    pub did: bool,
}

/// Where a retired object is now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Retired {
    /// In the trash, whole.
    Trashed {
        /// The backend's own id of the image, if it has one.
        image_id: Option<String>,
    },
    /// In its place, hidden, because snapshots of it live on.
    Carrier {
        /// The snapshots, in words.
        snapshots: Vec<String>,
    },
    /// Nothing of it is there, confirmed by id and in the trash.
    Gone,
}

/// How far a reclaim came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reclaimed {
    /// Nothing is left.
    Done,
    /// It is whole, and can't go as long as these are there (in words).
    Blocked {
        /// Children or snapshots.
        by: Vec<String>,
    },
}

/// What a look found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// Our volume, complete and in its place (also a carrier).
    Volume(VolumeState),
    /// Our volume, half made: `ensure_volume` can finish or replace it.
    Half,
    /// Our volume, in the trash.
    Trashed {
        /// The backend's own id of the image, if it has one.
        image_id: Option<String>,
        /// Whether all of it is still there, so that it can be restored.
        whole: bool,
    },
    /// Our snapshot.
    Snapshot(SnapshotState),
    /// Something without a mark under our name. If a look found that name free before our first
    /// create (`Known::Free`), it is our own remnant.
    Unmarked,
    /// Somebody else's; the text says whose, in words.
    Foreign(String),
}

/// A marked image, as `volward rebuild` reads it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Marked {
    /// The record that was put into the mark, as last written.
    pub record: Record,
    /// Where the image is.
    pub known: Known,
    /// As it stands.
    pub state: VolumeState,
    /// The instance that made it.
    pub instance: String,
}

/// One worker's way to the storage. The record says what is wished and what is known: its `place`
/// says where (with an `identity` that differs from what is found there, the answer is an error of
/// kind `Unreachable`, and nothing is touched), its `known` whether an unmarked image under our
/// name is our own remnant, its `generation` goes into the mark.
pub trait Session: Send {
    /// Makes what is missing for that step: `Create` (empty or clone), `Import`, `Update` (grow,
    /// QoS, mark), `Encrypt`. A volume that is not whole afterwards is not reported as one.
    ///
    /// # Errors
    /// As the storage says; what is there stays in a state from which the same call goes on.
    fn ensure_volume(&mut self, step: Step, record: &Record, ctl: &dyn Ctl) -> Result<VolumeState>;

    /// Makes the snapshot.
    ///
    /// # Errors
    /// `Gone` when its volume isn't there.
    fn ensure_snapshot(&mut self, record: &Record, ctl: &dyn Ctl) -> Result<SnapshotState>;

    /// Takes a volume out of sight, in milliseconds: trash, carrier, or nothing was there. Also
    /// for half-made volumes and for carriers whose last snapshot has gone.
    ///
    /// # Errors
    /// As the storage says; never because of snapshots or children.
    fn retire_volume(&mut self, record: &Record, ctl: &dyn Ctl) -> Result<Retired>;

    /// Removes a snapshot; what was cloned from it lives on.
    ///
    /// # Errors
    /// As the storage says.
    fn retire_snapshot(&mut self, record: &Record, ctl: &dyn Ctl) -> Result<Retired>;

    /// Frees the space of a trashed volume. Long; reports progress; can be cancelled; a repeated
    /// call goes on where the last one stopped.
    ///
    /// # Errors
    /// With `touched` false if and only if the volume is surely still whole.
    fn reclaim(&mut self, record: &Record, ctl: &dyn Ctl) -> Result<Reclaimed>;

    /// Takes a volume back out of the trash (or out of being a carrier).
    ///
    /// # Errors
    /// `Gone` when it isn't there any more.
    fn restore(&mut self, record: &Record, ctl: &dyn Ctl) -> Result<VolumeState>;

    /// Makes a clone independent of its parent. Long; reports progress; can be cancelled.
    ///
    /// # Errors
    /// As the storage says; the volume stays usable.
    fn flatten(&mut self, record: &Record, ctl: &dyn Ctl) -> Result<VolumeState>;

    /// Looks what is there of the object, by name, by id and in the trash. Changes nothing.
    ///
    /// # Errors
    /// When it can't be known now.
    fn inspect(&mut self, record: &Record, ctl: &dyn Ctl) -> Result<Option<Found>>;

    /// Asks the storage of the session's domain whether it answers; says which cluster and pool
    /// or which root each configured root of the domain is: root → identity.
    ///
    /// # Errors
    /// When it doesn't answer, or answers as another one than before.
    fn probe(&mut self, ctl: &dyn Ctl) -> Result<BTreeMap<String, String>>;

    /// Every marked image of the domain, for `volward rebuild`. Changes nothing.
    ///
    /// # Errors
    /// As the storage says.
    fn survey(&mut self, ctl: &dyn Ctl) -> Result<Vec<Marked>>;
}

/// What an attempt brought.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Of create, import, update, encrypt, restore and flatten.
    Volume(VolumeState),
    /// Of snapshot.
    Snapshot(SnapshotState),
    /// Of trash and remove_snapshot.
    Retired(Retired),
    /// Of reclaim.
    Reclaimed(Reclaimed),
    /// Of inspect.
    Found(Option<Found>),
}

/// Runs one step of an object: the one place that knows which method a step is.
///
/// # Errors
/// Whatever the method says.
pub fn run_step(
    session: &mut dyn Session,
    step: Step,
    record: &Record,
    ctl: &dyn Ctl,
) -> Result<Outcome> {
    match step {
        Step::Create | Step::Import | Step::Update | Step::Encrypt => session
            .ensure_volume(step, record, ctl)
            .map(Outcome::Volume),
        Step::Snapshot => session.ensure_snapshot(record, ctl).map(Outcome::Snapshot),
        Step::Restore => session.restore(record, ctl).map(Outcome::Volume),
        Step::Inspect => session.inspect(record, ctl).map(Outcome::Found),
        Step::Trash => session.retire_volume(record, ctl).map(Outcome::Retired),
        Step::RemoveSnapshot => session.retire_snapshot(record, ctl).map(Outcome::Retired),
        Step::Flatten => session.flatten(record, ctl).map(Outcome::Volume),
        Step::Reclaim => session.reclaim(record, ctl).map(Outcome::Reclaimed),
        Step::Probe | Step::Connect => Err(Error::new(
            ErrorKind::Internal,
            step.as_str(),
            "not a step of an object",
        )),
    }
}

/// A backend that is shared by all threads.
pub type SharedBackend = Arc<dyn Backend>;
