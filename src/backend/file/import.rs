//! Files that volumes are filled from: only below the directories that the configuration allows.

use super::errors::{fail, gone, invalid};
use crate::backend::Result;
use crate::model::{Record, SourceFormat};
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use std::fs::File;
use std::path::{Component, Path, PathBuf};

/// Opens such a file. No `..`, link or mount trick leads out of its directory, and what isn't a
/// regular file is never opened for reading, so a FIFO or a tape can't hold us up.
pub fn open_import(
    record: &Record,
    allowed: &[PathBuf],
    path: &str,
    format: SourceFormat,
) -> Result<File> {
    if format == SourceFormat::Qcow2 {
        let message = format!(
            "{}: the file backend imports raw files only; convert {path} with qemu-img",
            record.title()
        );
        return Err(invalid("open", message));
    }
    let (directory, within) = below(allowed, Path::new(path)).ok_or_else(|| {
        let message = format!(
            "{}: {path} is not below a directory of import_dirs",
            record.title()
        );
        invalid("open", message)
    })?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::openat(CWD, directory, flags, Mode::empty())
        .map_err(|errno| fail(errno, "open", &directory.display().to_string()))?;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let open = |flags: OFlags| {
        let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        rustix::fs::openat2(&directory, within, flags, Mode::empty(), resolve).map_err(|errno| {
            match errno {
                Errno::NOENT => gone(record, &format!("file {path} is not there")),
                errno => fail(errno, "openat2", path).untouched(),
            }
        })
    };
    let stat = |fd: &_| rustix::fs::fstat(fd).map_err(|errno| fail(errno, "fstat", path));
    // Looked at before it is opened: opening some devices does something.
    let seen = stat(&open(OFlags::PATH)?)?;
    if !FileType::from_raw_mode(seen.st_mode).is_file() {
        let message = format!("{}: {path} is not a regular file", record.title());
        return Err(invalid("open", message));
    }
    let fd = open(OFlags::RDONLY | OFlags::NONBLOCK)?;
    let opened = stat(&fd)?;
    if (opened.st_dev, opened.st_ino) != (seen.st_dev, seen.st_ino) {
        let message = format!(
            "{}: {path} was replaced while it was opened",
            record.title()
        );
        return Err(invalid("open", message));
    }
    Ok(File::from(fd))
}

/// The allowed directory that a path is below, and the rest of the path.
fn below<'a>(allowed: &'a [PathBuf], path: &'a Path) -> Option<(&'a Path, &'a Path)> {
    let plain = path
        .components()
        .all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    if !plain || !path.is_absolute() {
        return None;
    }
    allowed.iter().find_map(|directory| {
        let within = path.strip_prefix(directory).ok()?;
        (!within.as_os_str().is_empty()).then_some((directory.as_path(), within))
    })
}
