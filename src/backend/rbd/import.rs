//! Filling an image from a raw file: holes stay holes, progress is reported, it can be ended early.

use super::image::Image;
use super::look::About;
use crate::backend::{Ctl, Error, Result};
use crate::model::ErrorKind;
use rustix::fs::{Mode, OFlags, ResolveFlags, SeekFrom, open as open_path, openat2, seek};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Bytes of one write: an object, as a rule.
const PIECE: usize = 4 << 20;
/// Writes under way at once.
const DEPTH: usize = 4;
/// Bytes freed by one call.
const DISCARD: u64 = 1 << 30;

fn refused(path: &str, words: &str) -> Error {
    Error::new(
        ErrorKind::Invalid,
        "import",
        format!("file {path}: {words}"),
    )
}

fn failed(path: &str, error: &std::io::Error) -> Error {
    let errno = error.raw_os_error().unwrap_or(5);
    Error::of_errno(errno, "import", format!("file {path}: {error}"))
}

/// Opens a file that lies below one of the directories, whatever links there are, and that isn't
/// larger than the volume.
pub fn open(path: &str, dirs: &[PathBuf], volume_bytes: u64) -> Result<File> {
    let below = dirs.iter().find_map(|dir| {
        let rest = Path::new(path).strip_prefix(dir).ok()?;
        (!rest.as_os_str().is_empty()).then_some((dir, rest))
    });
    let Some((dir, rest)) = below else {
        return Err(refused(
            path,
            "it lies in none of the configured import_dirs",
        ));
    };
    let opened = open_path(
        dir,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .and_then(|dir| {
        // A FIFO must not hold the worker, so it isn't waited for.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        openat2(&dir, rest, flags, Mode::empty(), resolve)
    });
    let file = File::from(opened.map_err(|errno| failed(path, &errno.into()))?);
    let about = file.metadata().map_err(|error| failed(path, &error))?;
    if !about.is_file() {
        return Err(refused(path, "it is no regular file"));
    }
    if about.len() > volume_bytes {
        let words = format!(
            "it has {} bytes, the volume only {volume_bytes}",
            about.len()
        );
        return Err(refused(path, &words));
    }
    Ok(file)
}

fn check_cancel(ctl: &dyn Ctl, done: u64, total: u64, title: &str) -> Result<()> {
    if ctl.progress(done, total).is_break() || ctl.cancelled() {
        let words = format!("{title}: ended early, as asked for");
        return Err(Error::new(ErrorKind::Cancelled, "import", words));
    }
    Ok(())
}

/// Frees all of an image.
pub fn discard_all(image: &Image, bytes: u64, title: &str, ctl: &dyn Ctl) -> Result<()> {
    let mut at = 0;
    while at < bytes {
        check_cancel(ctl, 0, bytes, title)?;
        let length = DISCARD.min(bytes - at);
        image.discard(at, length).about(title)?;
        at += length;
    }
    Ok(())
}

/// Copies the data of the file; the image must be empty.
pub fn fill(image: &Image, file: &File, path: &str, title: &str, ctl: &dyn Ctl) -> Result<()> {
    let before = file.metadata().map_err(|error| failed(path, &error))?;
    let total = before.len();
    let mut writer = image.writer(DEPTH);
    let mut at = 0;
    while at < total {
        check_cancel(ctl, at, total, title)?;
        match seek(file, SeekFrom::Data(at)) {
            Ok(data) => at = data,
            // No data behind this.
            Err(rustix::io::Errno::NXIO) => break,
            // A file system without holes.
            Err(_) => {}
        }
        // Up to the end of this piece of the image, so that objects are written whole.
        let room = PIECE - usize::try_from(at % PIECE as u64).unwrap_or(0);
        let length = usize::try_from(total - at).unwrap_or(room).min(room);
        let mut piece = vec![0u8; length].into_boxed_slice();
        file.read_exact_at(&mut piece, at)
            .map_err(|error| failed(path, &error))?;
        if piece.iter().any(|byte| *byte != 0) {
            writer.write(at, piece).about(title)?;
        }
        at += length as u64;
    }
    writer.finish().about(title)?;
    let after = file.metadata().map_err(|error| failed(path, &error))?;
    if after.len() != total || after.modified().ok() != before.modified().ok() {
        return Err(refused(path, "it changed while it was read"));
    }
    check_cancel(ctl, total, total, title)
}
