//! Copies of images: by reflink where the file system can, else extent by extent, and never of a
//! file that somebody writes to meanwhile.

use super::errors::{cancelled, fail, fail_io, invalid};
use super::holders::{Of, holders};
use super::lease::{Against, Lease};
use crate::backend::{Ctl, Error, Result};
use crate::model::{ErrorKind, Record};
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};

/// How much is copied between two looks at the lease and the cancel flag.
const CHUNK_BYTES: u64 = 1 << 20;
/// How much is written before it is made durable, so that the last fsync isn't one long silence.
const FLUSH_BYTES: u64 = 64 << 20;
/// How often a copy begins again because a writer came.
const TRIES: u32 = 3;

/// What a copy is of and for.
pub struct Copy<'a> {
    pub record: &'a Record,
    pub from: &'a File,
    /// What `from` is, for messages.
    pub source: &'a str,
    pub to: &'a File,
    pub ctl: &'a dyn Ctl,
    /// A source that nobody should write to, such as a snapshot: if the file system has no leases
    /// it is enough that it doesn't change.
    pub frozen: bool,
}

/// A copy that didn't come to its end.
enum Stop {
    /// Somebody wants to write to the source.
    Broken,
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        Stop::Failed(error)
    }
}

impl Copy<'_> {
    /// Copies all of it; says how many bytes the source has.
    pub fn run(&self) -> Result<u64> {
        for _ in 0..TRIES {
            let lease = self.lease()?;
            match self.attempt(lease.as_ref()) {
                Ok(size) => return Ok(size),
                Err(Stop::Failed(error)) => return Err(error),
                // The lease is dropped first: the writer goes on at once.
                Err(Stop::Broken) => drop(lease),
            }
        }
        Err(self.in_use("it is written to again and again while it is copied"))
    }

    fn lease(&self) -> Result<Option<Lease<'_>>> {
        match Lease::take(self.from, Against::Writers) {
            Ok(lease) => Ok(Some(lease)),
            Err(Errno::AGAIN) => Err(self.in_use("somebody has it open for writing")),
            Err(_) if self.frozen => Ok(None),
            Err(errno @ (Errno::ACCESS | Errno::PERM)) => {
                let what = format!(
                    "{}: a read lease on {}, which is needed for a copy that isn't torn; volward \
                     must own the file or have CAP_LEASE",
                    self.record.title(),
                    self.source
                );
                Err(fail(errno, "F_SETLEASE", &what))
            }
            Err(errno) => Err(invalid(
                "F_SETLEASE",
                format!(
                    "{}: the file system of {} has no leases (errno {}), so a copy of it can't be \
                     kept from being torn; use a local file system",
                    self.record.title(),
                    self.source,
                    errno.raw_os_error()
                ),
            )),
        }
    }

    fn in_use(&self, why: &str) -> Error {
        let by = holders(self.from, Of::Writers);
        let message = format!("{}: {}: {why}", self.record.title(), self.source);
        let mut error = Error::new(ErrorKind::InUse, "F_SETLEASE", message);
        error.errno = Some(Errno::AGAIN.raw_os_error());
        error.held_by(by)
    }

    fn attempt(&self, lease: Option<&Lease<'_>>) -> std::result::Result<u64, Stop> {
        let before = self.version()?;
        let size = before.0;
        self.to
            .set_len(0)
            .and_then(|()| self.to.set_len(size))
            .map_err(|error| fail_io(&error, "ftruncate", &self.record.title()))?;
        if !self.reflink()? {
            self.extents(size, lease)?;
        }
        let unchanged = self.version()? == before;
        if lease.is_some_and(|lease| !lease.holds()) {
            return Err(Stop::Broken);
        }
        if !unchanged {
            return Err(Stop::Failed(
                self.in_use("it was changed while it was copied"),
            ));
        }
        Ok(size)
    }

    /// Size and times: they differ after any write.
    fn version(&self) -> Result<(u64, i64, i64, i64, i64)> {
        let stat = self.from.metadata();
        let stat = stat.map_err(|error| fail_io(&error, "fstat", self.source))?;
        Ok((
            stat.len(),
            stat.mtime(),
            stat.mtime_nsec(),
            stat.ctime(),
            stat.ctime_nsec(),
        ))
    }

    /// Shares the source's blocks, if the file system can.
    fn reflink(&self) -> Result<bool> {
        match rustix::fs::ioctl_ficlone(self.to, self.from) {
            Ok(()) => Ok(true),
            Err(
                Errno::OPNOTSUPP
                | Errno::XDEV
                | Errno::INVAL
                | Errno::NOTTY
                | Errno::NOSYS
                | Errno::TXTBSY
                | Errno::PERM,
            ) => Ok(false),
            Err(errno) => Err(fail(errno, "FICLONE", &self.record.title())),
        }
    }

    fn extents(&self, size: u64, lease: Option<&Lease<'_>>) -> std::result::Result<(), Stop> {
        let mut buffer = vec![0u8; CHUNK_BYTES as usize];
        let (mut at, mut unflushed) = (0, 0);
        while let Some((start, end)) = self.next_extent(at, size)? {
            at = start;
            while at < end {
                let length = CHUNK_BYTES.min(end - at) as usize;
                let chunk = &mut buffer[..length];
                self.from
                    .read_exact_at(chunk, at)
                    .map_err(|error| fail_io(&error, "read", self.source))?;
                // Zeros that are written out in the source stay a hole here.
                if chunk.iter().any(|byte| *byte != 0) {
                    self.to
                        .write_all_at(chunk, at)
                        .map_err(|error| fail_io(&error, "write", &self.record.title()))?;
                    unflushed += length as u64;
                }
                at += length as u64;
                if unflushed >= FLUSH_BYTES {
                    self.flush()?;
                    unflushed = 0;
                }
                if lease.is_some_and(|lease| !lease.holds()) {
                    return Err(Stop::Broken);
                }
                if self.ctl.progress(at, size).is_break() || self.ctl.cancelled() {
                    return Err(Stop::Failed(cancelled(self.record, "copy")));
                }
            }
        }
        Ok(self.flush()?)
    }

    fn flush(&self) -> Result<()> {
        let flushed = self.to.sync_data();
        flushed.map_err(|error| fail_io(&error, "fdatasync", &self.record.title()))
    }

    /// The next range that holds data, from there on.
    fn next_extent(&self, at: u64, size: u64) -> Result<Option<(u64, u64)>> {
        if at >= size {
            return Ok(None);
        }
        let start = match rustix::fs::seek(self.from, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(None),
            // A file system without holes: all of it is data.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(Some((at, size))),
            Err(errno) => return Err(fail(errno, "lseek", self.source)),
        };
        let end = rustix::fs::seek(self.from, SeekFrom::Hole(start));
        let end = end.map_err(|errno| fail(errno, "lseek", self.source))?;
        // A file that shrinks meanwhile shows as a short read.
        Ok((start < size).then_some((start, end.min(size))))
    }
}
