//! What can go wrong with the state file, and in which words.
//!
//! Owns the kinds and their classification from SQLite's codes. Knows no tables.

use rusqlite::ErrorCode;
use std::path::Path;
use thiserror::Error;

/// The result of a call to the store.
pub type Result<T> = std::result::Result<T, StoreError>;

/// Why the store could not do it. The text names the file, the cause and the mend; the kind
/// decides what the daemon does.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum StoreError {
    /// Another instance holds the state file.
    #[error("{words}")]
    Locked {
        /// The process that holds it, as far as that is known.
        pid: Option<u32>,
        /// That process is ending and only waits for threads in the kernel: waiting helps.
        ending: bool,
        /// Who holds it, since when, and what to do.
        words: String,
    },
    /// No room on the disk. It heals by itself when there is room again.
    #[error("{0}")]
    Full(String),
    /// The file or its directory can't be written.
    #[error("{0}")]
    ReadOnly(String),
    /// The disk failed to read or write.
    #[error("{0}")]
    Io(String),
    /// Somebody else (such as a database shell) holds a lock inside the file.
    #[error("{0}")]
    Busy(String),
    /// The content is not what volward wrote.
    #[error("{0}")]
    Damaged(String),
    /// The file is something else; it was not touched.
    #[error("{0}")]
    NotAStore(String),
    /// A newer volward wrote it.
    #[error("{words}")]
    Newer {
        /// The schema of the file.
        found: u64,
        /// The newest schema that this program knows.
        known: u64,
        /// The same in words.
        words: String,
    },
    /// It was copied from another machine.
    #[error("{0}")]
    OtherMachine(String),
    /// A commit would give one name to two objects.
    #[error("{0}")]
    Taken(String),
    /// A fault of volward itself.
    #[error("{0}")]
    Internal(String),
}

impl StoreError {
    /// Whether the same call may succeed later without anybody touching the file's content.
    #[must_use]
    pub fn may_heal(&self) -> bool {
        matches!(
            self,
            StoreError::Full(_) | StoreError::ReadOnly(_) | StoreError::Io(_) | StoreError::Busy(_)
        )
    }
}

/// Gives an error of SQLite the file and the deed that it belongs to.
pub(super) trait At<T> {
    /// `doing` follows "while": "reading a volume".
    fn at(self, path: &Path, doing: &str) -> Result<T>;
}

impl<T> At<T> for rusqlite::Result<T> {
    fn at(self, path: &Path, doing: &str) -> Result<T> {
        self.map_err(|error| classify(&error, path, doing))
    }
}

/// The sentence for a damaged file.
pub(super) fn damaged(path: &Path, cause: &str) -> StoreError {
    StoreError::Damaged(format!(
        "state file {} is damaged: {cause}; move it and its -wal file aside and run `volward \
         rebuild`, which makes the records anew from the images' own marks",
        path.display()
    ))
}

fn classify(error: &rusqlite::Error, path: &Path, doing: &str) -> StoreError {
    let file = path.display();
    let Some(code) = error.sqlite_error_code() else {
        return match error {
            rusqlite::Error::FromSqlConversionFailure(..)
            | rusqlite::Error::IntegralValueOutOfRange(..)
            | rusqlite::Error::InvalidColumnType(..)
            | rusqlite::Error::Utf8Error(..) => damaged(path, &format!("{error}, while {doing}")),
            _ => StoreError::Internal(format!("state file {file}: {error}, while {doing}")),
        };
    };
    match code {
        ErrorCode::DiskFull => full(path, doing),
        // Of a full disk SQLite says so only for writes; for the sync of a write or for the
        // growth of its index it is an I/O error.
        ErrorCode::SystemIoFailure if no_room(path) => full(path, doing),
        ErrorCode::SystemIoFailure | ErrorCode::OutOfMemory => StoreError::Io(format!(
            "state file {file}: {error}, while {doing}; look for errors of the disk in the \
             kernel log; it is tried again"
        )),
        ErrorCode::ReadOnly | ErrorCode::CannotOpen | ErrorCode::PermissionDenied => {
            not_writable(path, &format!("{error}, while {doing}"))
        }
        ErrorCode::DatabaseBusy
        | ErrorCode::DatabaseLocked
        | ErrorCode::FileLockingProtocolFailed => StoreError::Busy(format!(
            "state file {file} is locked by another program, while {doing}; close database shells \
             and backups that hold it; it is tried again"
        )),
        ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase => {
            damaged(path, &format!("{error}, while {doing}"))
        }
        _ => StoreError::Internal(format!("state file {file}: {error}, while {doing}")),
    }
}

/// The sentence for a file or directory that can't be written.
pub(super) fn not_writable(path: &Path, cause: &str) -> StoreError {
    StoreError::ReadOnly(format!(
        "state file {} can't be opened for writing: {cause}; make the file and its directory \
         writable for this user on a file system that isn't mounted read-only, or set `store.path`",
        path.display()
    ))
}

fn full(path: &Path, doing: &str) -> StoreError {
    StoreError::Full(format!(
        "no room for state file {}, while {doing}; free space on its file system, it goes on by \
         itself then",
        path.display()
    ))
}

/// Less than this many free bytes make an I/O error one of a full disk.
const ROOM_BYTES: u64 = 1 << 20;

fn no_room(path: &Path) -> bool {
    let Some(dir) = path.parent() else {
        return false;
    };
    rustix::fs::statvfs(dir)
        .is_ok_and(|stat| stat.f_bavail.saturating_mul(stat.f_frsize) < ROOM_BYTES)
}

/// The error of a system call on that file or its directory.
pub(super) fn of_io(error: &std::io::Error, path: &Path, doing: &str) -> StoreError {
    use std::io::ErrorKind as Kind;
    match error.kind() {
        Kind::PermissionDenied | Kind::ReadOnlyFilesystem => {
            not_writable(path, &format!("{error}, while {doing}"))
        }
        Kind::StorageFull | Kind::QuotaExceeded => full(path, doing),
        Kind::NotADirectory | Kind::AlreadyExists | Kind::IsADirectory => {
            StoreError::NotAStore(format!(
                "state file {}: {error}, while {doing}; set `store.path` to a file in a directory \
                 of its own",
                path.display()
            ))
        }
        _ => StoreError::Io(format!(
            "state file {}: {error}, while {doing}",
            path.display()
        )),
    }
}
