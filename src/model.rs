//! What volward talks about: ids, names, sizes, phases, steps, lanes, error kinds, records.
//!
//! This module owns the vocabulary and the one table of allowed phase moves. It knows nothing of
//! threads, clocks, files, SQL or HTTP; everything else may import it.

mod ids;
mod phase;
mod record;
mod size;

pub use ids::{BadName, Name, ObjectId, Uid};
pub use phase::{ALL_PHASES, Phase};
pub use record::{
    Body, Entry, Known, Place, Qos, Record, SnapshotBody, Source, SourceFormat, VolumeBody, Wish,
};
pub use size::{BadSize, parse_size};

use serde::{Deserialize, Serialize};

/// A point in time: milliseconds since the Unix epoch, UTC.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
pub struct Millis(pub u64);

impl Millis {
    /// This time plus `ms` milliseconds; stays at the end of time instead of wrapping.
    #[must_use]
    pub fn plus(self, ms: u64) -> Millis {
        Millis(self.0.saturating_add(ms))
    }

    /// Milliseconds from `earlier` to this time, 0 if the clock went backwards.
    #[must_use]
    pub fn since(self, earlier: Millis) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// The two kinds of thread pool that every domain has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Lane {
    /// create, import, update, encrypt, snapshot, restore.
    Create,
    /// trash, remove_snapshot, flatten, reclaim.
    Delete,
}

impl Lane {
    /// Both lanes, in the order in which they are shown.
    pub const ALL: [Lane; 2] = [Lane::Create, Lane::Delete];

    /// The word of the API, the metrics and the configuration.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Lane::Create => "create",
            Lane::Delete => "delete",
        }
    }
}

/// One kind of work on the backend. The words are those of `[deadlines]`, of fault rules and of
/// the `step` of a running object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// Make an image, empty or as a clone.
    Create,
    /// Make an image and fill it from a file.
    Import,
    /// Grow or configure an image.
    Update,
    /// Format an image with LUKS2.
    Encrypt,
    /// Make a snapshot.
    Snapshot,
    /// Take an image back out of the trash.
    Restore,
    /// Look what is there, before anything is done after an unknown outcome.
    Inspect,
    /// Put an image out of sight.
    Trash,
    /// Remove a snapshot.
    RemoveSnapshot,
    /// Copy a parent's data into its clone, in the background.
    Flatten,
    /// Free the space of a trashed image, in the background.
    Reclaim,
    /// Ask whether the backend answers at all.
    Probe,
    /// Open a session.
    Connect,
}

impl Step {
    /// Every step, in the order of the documentation.
    pub const ALL: [Step; 13] = [
        Step::Create,
        Step::Import,
        Step::Update,
        Step::Encrypt,
        Step::Snapshot,
        Step::Restore,
        Step::Inspect,
        Step::Trash,
        Step::RemoveSnapshot,
        Step::Flatten,
        Step::Reclaim,
        Step::Probe,
        Step::Connect,
    ];

    /// The word of the API, of `[deadlines]` and of fault rules.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Step::Create => "create",
            Step::Import => "import",
            Step::Update => "update",
            Step::Encrypt => "encrypt",
            Step::Snapshot => "snapshot",
            Step::Restore => "restore",
            Step::Inspect => "inspect",
            Step::Trash => "trash",
            Step::RemoveSnapshot => "remove_snapshot",
            Step::Flatten => "flatten",
            Step::Reclaim => "reclaim",
            Step::Probe => "probe",
            Step::Connect => "connect",
        }
    }

    /// The step with that word.
    #[must_use]
    pub fn parse(word: &str) -> Option<Step> {
        Step::ALL.into_iter().find(|step| step.as_str() == word)
    }

    /// Background work: it never takes the last free worker, and a wish for its image cancels it.
    #[must_use]
    pub fn is_background(self) -> bool {
        matches!(self, Step::Flatten | Step::Reclaim)
    }
}

/// Why something is not as it should be. The kind decides what happens (see `sched`), and its name
/// is the `reason` of the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ErrorKind {
    /// ENOENT: the thing, or its source, is not there.
    Gone,
    /// EEXIST: something with that name is there that isn't ours.
    AlreadyExists,
    /// EBUSY, EMLINK: a watcher, a lock or a child holds it.
    InUse,
    /// ENOTEMPTY: user snapshots hold it.
    Blocked,
    /// EPERM with a deferral that isn't over.
    NotYet,
    /// EPERM, EACCES: a capability is missing.
    Forbidden,
    /// EINVAL and its like: it can't be done as asked.
    Invalid,
    /// ENOSPC, EDQUOT: no room.
    NoSpace,
    /// ETIMEDOUT, ENOTCONN, EHOSTUNREACH: the cluster can't be reached; the outcome is unknown.
    Unreachable,
    /// ESHUTDOWN: this session was blocklisted; a new one is needed.
    SessionLost,
    /// ECANCELED, by our own cancel flag.
    Cancelled,
    /// EIO, ENOMEM, EAGAIN, a panic and all that is unnamed: worth another try.
    Transient,
    /// The call didn't return before its deadline.
    Hung,
    /// A fault of volward itself.
    Internal,
}

impl ErrorKind {
    /// Every kind, for lists that must be complete.
    pub const ALL: [ErrorKind; 14] = [
        ErrorKind::Gone,
        ErrorKind::AlreadyExists,
        ErrorKind::InUse,
        ErrorKind::Blocked,
        ErrorKind::NotYet,
        ErrorKind::Forbidden,
        ErrorKind::Invalid,
        ErrorKind::NoSpace,
        ErrorKind::Unreachable,
        ErrorKind::SessionLost,
        ErrorKind::Cancelled,
        ErrorKind::Transient,
        ErrorKind::Hung,
        ErrorKind::Internal,
    ];

    /// The stable CamelCase word of the API.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            ErrorKind::Gone => "Gone",
            ErrorKind::AlreadyExists => "AlreadyExists",
            ErrorKind::InUse => "InUse",
            ErrorKind::Blocked => "Blocked",
            ErrorKind::NotYet => "NotYet",
            ErrorKind::Forbidden => "Forbidden",
            ErrorKind::Invalid => "Invalid",
            ErrorKind::NoSpace => "NoSpace",
            ErrorKind::Unreachable => "Unreachable",
            ErrorKind::SessionLost => "SessionLost",
            ErrorKind::Cancelled => "Cancelled",
            ErrorKind::Transient => "Transient",
            ErrorKind::Hung => "Hung",
            ErrorKind::Internal => "Internal",
        }
    }

    /// The kind of a Linux errno (positive), for calls where nothing more is known.
    /// ENOTEMPTY and EPERM depend on the call; backends that know better say so themselves.
    #[must_use]
    pub fn of_errno(errno: i32) -> ErrorKind {
        match errno {
            2 => ErrorKind::Gone,
            17 => ErrorKind::AlreadyExists,
            16 | 31 => ErrorKind::InUse,
            39 => ErrorKind::Blocked,
            1 | 13 => ErrorKind::Forbidden,
            22 | 30 | 38 | 18 | 33 | 36 => ErrorKind::Invalid,
            28 | 122 => ErrorKind::NoSpace,
            110 | 107 | 113 => ErrorKind::Unreachable,
            108 => ErrorKind::SessionLost,
            125 => ErrorKind::Cancelled,
            _ => ErrorKind::Transient,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_steps_are_read_back() {
        for step in Step::ALL {
            assert_eq!(Step::parse(step.as_str()), Some(step));
        }
        assert_eq!(Step::parse("creates"), None);
    }

    #[test]
    fn errnos_have_the_kind_of_the_design() {
        let table = [
            (2, ErrorKind::Gone),
            (17, ErrorKind::AlreadyExists),
            (16, ErrorKind::InUse),
            (31, ErrorKind::InUse),
            (39, ErrorKind::Blocked),
            (1, ErrorKind::Forbidden),
            (13, ErrorKind::Forbidden),
            (22, ErrorKind::Invalid),
            (28, ErrorKind::NoSpace),
            (122, ErrorKind::NoSpace),
            (110, ErrorKind::Unreachable),
            (107, ErrorKind::Unreachable),
            (113, ErrorKind::Unreachable),
            (108, ErrorKind::SessionLost),
            (125, ErrorKind::Cancelled),
            (5, ErrorKind::Transient),
            (11, ErrorKind::Transient),
            (12, ErrorKind::Transient),
            (9999, ErrorKind::Transient),
        ];
        for (errno, kind) in table {
            assert_eq!(ErrorKind::of_errno(errno), kind, "errno {errno}");
        }
    }

    #[test]
    fn time_never_wraps() {
        assert_eq!(Millis(5).since(Millis(9)), 0);
        assert_eq!(Millis(u64::MAX).plus(5), Millis(u64::MAX));
    }
}
