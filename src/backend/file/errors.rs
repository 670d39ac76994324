//! What an errno of a file system call means.

use crate::backend::Error;
use crate::model::{ErrorKind, Record};
use rustix::io::Errno;

/// The error of a call on `what`. Where the table of `ErrorKind::of_errno` is about images, this
/// one is about files: a path that is missing in the middle of our work is not an object that is
/// gone, and a stale handle is a storage that can't be reached.
pub fn fail(errno: Errno, op: &'static str, what: &str) -> Error {
    let kind = match errno {
        Errno::NOENT | Errno::EXIST | Errno::NOTEMPTY => ErrorKind::Transient,
        Errno::STALE | Errno::NODEV | Errno::NXIO | Errno::HOSTDOWN | Errno::REMOTEIO => {
            ErrorKind::Unreachable
        }
        Errno::FBIG | Errno::LOOP | Errno::NOTDIR | Errno::ISDIR | Errno::OPNOTSUPP => {
            ErrorKind::Invalid
        }
        other => ErrorKind::of_errno(other.raw_os_error()),
    };
    let hint = match errno {
        Errno::LOOP => "; a symbolic link stands where none may be",
        Errno::NOTDIR => "; something else stands where a directory should be",
        Errno::ROFS => "; the file system is mounted read-only",
        Errno::FBIG => "; that is more than this file system can hold in one file",
        Errno::STALE => "; the mount is stale, mount it again",
        _ => "",
    };
    let mut error = Error::new(kind, op, format!("{what}: {}{hint}", words(errno)));
    error.errno = Some(errno.raw_os_error());
    error
}

/// The same of a call of the standard library.
pub fn fail_io(error: &std::io::Error, op: &'static str, what: &str) -> Error {
    let errno = error
        .raw_os_error()
        .map_or(Errno::IO, Errno::from_raw_os_error);
    fail(errno, op, what)
}

fn words(errno: Errno) -> String {
    let text = std::io::Error::from(errno).to_string();
    // The number stands at the end of the error anyway.
    text.split(" (os error").next().unwrap_or(&text).to_owned()
}

/// The object, or what it is made from, is not there.
pub fn gone(record: &Record, why: &str) -> Error {
    Error::of_errno(2, "open", format!("{}: {why}", record.title())).untouched()
}

/// Something that isn't ours stands there.
pub fn foreign(whose: &str) -> Error {
    let message = format!("{whose}; it is left as it is");
    Error::of_errno(17, "rename", message).untouched()
}

/// The root is not the one that it should be, or can't be told.
pub fn unreachable(message: String) -> Error {
    Error::new(ErrorKind::Unreachable, "open", message).untouched()
}

/// It can't be done as asked.
pub fn invalid(op: &'static str, message: String) -> Error {
    Error::new(ErrorKind::Invalid, op, message).untouched()
}

/// Its owner asked for an early end.
pub fn cancelled(record: &Record, op: &'static str) -> Error {
    let message = format!("{}: {op} was cancelled", record.title());
    Error::new(ErrorKind::Cancelled, op, message)
}
