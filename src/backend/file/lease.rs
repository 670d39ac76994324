//! Leases on files (fcntl(2), F_SETLEASE): the kernel refuses one while somebody has the file open
//! for writing, and tells its holder before it lets a writer in. No safe crate here offers them,
//! so this is the one place of the file backend with `unsafe`.

#![allow(unsafe_code)]

use rustix::io::Errno;
use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

// Linux, include/uapi/asm-generic/fcntl.h and include/uapi/linux/fcntl.h.
const F_SETSIG: c_int = 10;
const F_SETLEASE: c_int = 1024;
const F_GETLEASE: c_int = 1025;
const F_RDLCK: c_int = 0;
const F_WRLCK: c_int = 1;
const F_UNLCK: c_int = 2;
/// Its default action is to be ignored. The kernel's own choice, SIGIO, would end the process.
const SIGURG: c_int = 23;

unsafe extern "C" {
    fn fcntl(fd: c_int, command: c_int, ...) -> c_int;
}

/// A process between its fork and its exec has copies of all descriptors of its parent, closed
/// ones of ours included: that is over in a moment, and nobody to report.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(5);

/// What a lease keeps out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Against {
    /// Whoever opens the file for writing or truncates it.
    Writers,
    /// Whoever opens it at all.
    Everybody,
}

/// A lease, until it is dropped.
#[derive(Debug)]
pub struct Lease<'a> {
    file: BorrowedFd<'a>,
    kind: c_int,
}

impl<'a> Lease<'a> {
    /// Takes a lease. Against writers the file must be open for reading only.
    ///
    /// # Errors
    /// EAGAIN when somebody has the file open in the way that the lease is against; EACCES when
    /// the file isn't ours and CAP_LEASE is missing; EINVAL and others when the file system has
    /// no leases.
    pub fn take(file: &'a impl AsFd, against: Against) -> Result<Lease<'a>, Errno> {
        let file = file.as_fd();
        let kind = match against {
            Against::Writers => F_RDLCK,
            Against::Everybody => F_WRLCK,
        };
        // First of all the signal: from the moment the lease stands it may be broken. An ignored
        // signal is dropped by the kernel, so it can neither pile up nor interrupt anything.
        call(file, F_SETSIG, SIGURG)?;
        let mut tries = TRIES;
        loop {
            tries -= 1;
            match call(file, F_SETLEASE, kind) {
                Ok(_) => return Ok(Lease { file, kind }),
                Err(Errno::AGAIN) if tries > 0 => std::thread::sleep(PAUSE),
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Whether nobody has come or is waiting to come. Once false it stays false: the kernel has
    /// the lease marked as being broken, or has ended it.
    #[must_use]
    pub fn holds(&self) -> bool {
        call(self.file, F_GETLEASE, 0) == Ok(self.kind)
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        // Lets a waiting writer in at once. A lease that was ended already makes this fail, and
        // closing the file would end it as well.
        let _ = call(self.file, F_SETLEASE, F_UNLCK);
    }
}

fn call(file: BorrowedFd<'_>, command: c_int, argument: c_int) -> Result<c_int, Errno> {
    // SAFETY: the descriptor is open as long as it is borrowed, and each of the three commands
    // takes or ignores one integer by value: the kernel reads and writes no memory of ours.
    let answer = unsafe { fcntl(file.as_raw_fd(), command, argument) };
    if answer < 0 {
        let error = std::io::Error::last_os_error();
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO));
    }
    Ok(answer)
}
