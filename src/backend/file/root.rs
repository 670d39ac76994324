//! A root directory: its id file, and the directories in it.
//!
//! The id file tells a root from an empty mount point and from another disk. A root is opened anew
//! for each call, so that a change of mounts is seen.

use super::errors::{fail, fail_io, invalid, unreachable};
use super::failpoint;
use crate::backend::{Error, Result};
use crate::model::Uid;
use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

const ID_FILE: &str = "volward-root.json";
/// What an id file begins with before it has its name.
const ID_FILE_NEW: &str = ".volward-root.json.";
/// No file of ours is larger (a record with all its labels stays below 128 KiB).
const SMALL_FILE_MAX: u64 = 1 << 20;

/// An open root that is what it should be.
#[derive(Debug)]
pub struct Root {
    pub fd: OwnedFd,
    /// The path as configured.
    pub path: String,
    /// The id in its id file.
    pub identity: String,
}

/// The directories of a root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Volumes,
    Snapshots,
    Trash,
    Tmp,
}

impl Kind {
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::Volumes => "volumes",
            Kind::Snapshots => "snapshots",
            Kind::Trash => "trash",
            Kind::Tmp => "tmp",
        }
    }
}

/// The contents of the id file.
#[derive(Debug, Serialize, Deserialize)]
struct IdFile {
    /// What this file is, for whoever finds it.
    volward: String,
    id: Uid,
    /// The instance that made the root.
    instance: String,
}

impl Root {
    /// Opens a root and checks that it is the one that is meant. A root that has no id file, is
    /// empty and not `expected` to be a certain one is new: it gets its id file.
    ///
    /// # Errors
    /// `Unreachable` when it is missing, not the expected one, or can't be told.
    pub fn open(path: &str, expected: Option<&str>, instance: &str) -> Result<Root> {
        let fd = open_root(path)?;
        let identity = match read_id(&fd, path)? {
            Some(identity) => identity,
            None if expected.is_some() => {
                return Err(unreachable(format!(
                    "root {path}: its id file {ID_FILE} is missing; is the disk mounted?"
                )));
            }
            None => initialise(&fd, path, instance)?,
        };
        Root::checked(fd, path, identity, expected)
    }

    /// The same, but makes no new root: an empty mount point must not pass for one that holds
    /// nothing.
    ///
    /// # Errors
    /// As `open`, and `Unreachable` when it has no id file.
    pub fn find(path: &str, expected: Option<&str>) -> Result<Root> {
        let fd = open_root(path)?;
        let identity = read_id(&fd, path)?.ok_or_else(|| {
            unreachable(format!(
                "root {path} has no id file {ID_FILE}; mount its disk, or, if it was never used, \
                 take its class out of the configuration for now"
            ))
        })?;
        Root::checked(fd, path, identity, expected)
    }

    fn checked(fd: OwnedFd, path: &str, identity: String, expected: Option<&str>) -> Result<Root> {
        if let Some(expected) = expected.filter(|expected| *expected != identity) {
            return Err(unreachable(format!(
                "root {path}: it is {identity}, and {expected} was there before; another disk is \
                 mounted here"
            )));
        }
        Ok(Root {
            fd,
            path: path.to_owned(),
            identity,
        })
    }

    /// Removes what a process left that died while it gave the root its id. The root has one now.
    pub fn tidy(&self) {
        for name in names(&self.fd, &self.path).unwrap_or_default() {
            if name.starts_with(ID_FILE_NEW) {
                // It is in nobody's way: the next probe tries again.
                let _ = rustix::fs::unlinkat(&self.fd, &name, AtFlags::empty());
            }
        }
    }

    /// One of its directories, made if it is missing.
    pub fn directory(&self, kind: Kind) -> Result<OwnedFd> {
        let name = kind.as_str();
        if let Some(fd) = self.directory_if_there(kind)? {
            return Ok(fd);
        }
        match rustix::fs::mkdirat(&self.fd, name, Mode::RWXU) {
            Ok(()) => sync(&self.fd, &self.path)?,
            // Another worker was faster.
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(fail(errno, "mkdir", &self.within(kind))),
        }
        let fd = open_directory(&self.fd, name);
        fd.map_err(|errno| fail(errno, "open", &self.within(kind)))
    }

    /// One of its directories.
    pub fn directory_if_there(&self, kind: Kind) -> Result<Option<OwnedFd>> {
        match open_directory(&self.fd, kind.as_str()) {
            Ok(fd) => Ok(Some(fd)),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(fail(errno, "open", &self.within(kind))),
        }
    }

    /// The path of one of its directories, for messages.
    pub fn within(&self, kind: Kind) -> String {
        format!("{}/{}", self.path, kind.as_str())
    }
}

/// Makes the directory of a root that nobody knows yet; its parent must be there.
pub fn make_missing(path: &str) -> Result<()> {
    match rustix::fs::mkdirat(CWD, path, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(Errno::NOENT) => Err(unreachable(format!(
            "root {path} is not there, nor the directory that it would be in; make it, or mount \
             the disk"
        ))),
        Err(errno) => Err(fail(errno, "mkdir", &format!("root {path}")).untouched()),
    }
}

fn open_root(path: &str) -> Result<OwnedFd> {
    if !Path::new(path).is_absolute() {
        return Err(invalid("open", format!("root {path} is no absolute path")));
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    match rustix::fs::openat(CWD, path, flags, Mode::empty()) {
        Ok(fd) => Ok(fd),
        Err(Errno::NOENT) => Err(unreachable(format!(
            "root {path} is not there; is the disk mounted?"
        ))),
        Err(errno) => Err(fail(errno, "open", &format!("root {path}")).untouched()),
    }
}

fn read_id(root: &OwnedFd, path: &str) -> Result<Option<String>> {
    let what = format!("{path}/{ID_FILE}");
    let Some(text) = read_small(root, ID_FILE, &what).map_err(Error::untouched)? else {
        return Ok(None);
    };
    match serde_json::from_slice::<IdFile>(&text) {
        Ok(file) => Ok(Some(file.id.to_string())),
        Err(why) => Err(unreachable(format!(
            "{what} is damaged ({why}); restore it from a backup: the records of its volumes name \
             the id"
        ))),
    }
}

/// Makes the id file of a new root. Only an empty directory is one: anything else may be a disk
/// of somebody else.
fn initialise(root: &OwnedFd, path: &str, instance: &str) -> Result<String> {
    let ours = |name: &str| name == "lost+found" || name.starts_with(ID_FILE_NEW);
    if let Some(other) = names(root, path)?.into_iter().find(|name| !ours(name)) {
        // Another worker may have just made it.
        if let Some(identity) = read_id(root, path)? {
            return Ok(identity);
        }
        return Err(unreachable(format!(
            "root {path} has no id file {ID_FILE} and isn't empty ({other}): it isn't taken for a \
             new root; give an empty directory"
        )));
    }
    let id = new_id();
    let file = IdFile {
        volward: "root".to_owned(),
        id,
        instance: instance.to_owned(),
    };
    let name = format!("{ID_FILE_NEW}{id}");
    let what = format!("{path}/{name}");
    write_small(root, &name, &file, &what)?;
    failpoint::at("root.written");
    // A link never replaces, so of two workers exactly one gives the root its id.
    let linked = rustix::fs::linkat(root, &name, root, ID_FILE, AtFlags::empty());
    failpoint::at("root.linked");
    let _ = rustix::fs::unlinkat(root, &name, AtFlags::empty());
    failpoint::at("root.unlinked");
    match linked {
        Ok(()) | Err(Errno::EXIST) => sync(root, path)?,
        // Its name was taken away by a tidying probe of the winner's.
        Err(Errno::NOENT) => {}
        Err(errno) => return Err(fail(errno, "link", &what)),
    }
    read_id(root, path)?.ok_or_else(|| unreachable(format!("root {path}: its id file vanished")))
}

/// A new id: the time and 80 random bits.
fn new_id() -> Uid {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let at_ms = now.map_or(0, |now| u64::try_from(now.as_millis()).unwrap_or(0));
    let mut random = [0u8; 16];
    // Sixteen bytes are given whole or not at all; without any the process id and the time have
    // to do, and a link that exists is never replaced anyway.
    if rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty()).is_err() {
        random[..4].copy_from_slice(&std::process::id().to_ne_bytes());
    }
    Uid::new(at_ms, u128::from_ne_bytes(random) >> 48)
}

/// Opens a directory without following a link.
pub fn open_directory(at: &impl AsFd, name: &str) -> std::result::Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(at, name, flags, Mode::empty())
}

/// The names in a directory, without `.` and `..`; what isn't UTF-8 was not made by us.
pub fn names(directory: &impl AsFd, what: &str) -> Result<Vec<String>> {
    let read = || {
        let mut names = Vec::new();
        for entry in Dir::read_from(directory)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if name != "." && name != ".." {
                names.push(name);
            }
        }
        Ok(names)
    };
    read().map_err(|errno| fail(errno, "readdir", what))
}

/// Makes a directory's entries durable.
pub fn sync(directory: &impl AsFd, what: &str) -> Result<()> {
    rustix::fs::fsync(directory).map_err(|errno| fail(errno, "fsync", what))
}

/// Opens a regular file for reading, without following a link or waiting on a FIFO.
pub fn open_file(at: &impl AsFd, name: &str, flags: OFlags, what: &str) -> Result<Option<File>> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let fd = match rustix::fs::openat(at, name, flags, Mode::empty()) {
        Ok(fd) => fd,
        Err(Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(fail(errno, "open", what)),
    };
    let stat = rustix::fs::fstat(&fd).map_err(|errno| fail(errno, "fstat", what))?;
    if !rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file() {
        return Err(invalid("open", format!("{what} is not a regular file")));
    }
    Ok(Some(File::from(fd)))
}

/// The contents of a small file, `None` if it isn't there.
pub fn read_small(at: &impl AsFd, name: &str, what: &str) -> Result<Option<Vec<u8>>> {
    let Some(file) = open_file(at, name, OFlags::RDONLY, what)? else {
        return Ok(None);
    };
    let mut text = Vec::new();
    let read = file.take(SMALL_FILE_MAX).read_to_end(&mut text);
    read.map_err(|error| fail_io(&error, "read", what))?;
    Ok(Some(text))
}

/// Writes a small file as JSON and makes its contents durable, not its name.
pub fn write_small(at: &impl AsFd, name: &str, value: &impl Serialize, what: &str) -> Result<()> {
    let text = serde_json::to_vec_pretty(value);
    let text = text.map_err(|error| invalid("write", format!("{what}: {error}")))?;
    let flags =
        OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = rustix::fs::openat(at, name, flags, Mode::RUSR | Mode::WUSR);
    let mut file = File::from(fd.map_err(|errno| fail(errno, "open", what))?);
    let written = file.write_all(&text).and_then(|()| file.sync_all());
    written.map_err(|error| fail_io(&error, "write", what))
}
