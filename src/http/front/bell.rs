//! The bell: how other threads wake the poll thread without ever waiting for it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};

/// An eventfd with two flags in front of it, so that a busy front costs no system call per ring.
#[derive(Debug)]
pub(crate) struct Bell {
    descriptor: OwnedFd,
    /// Somebody has rung and the poll thread hasn't looked yet.
    rung: AtomicBool,
    /// A parked request may have been woken: look through them.
    sweep: AtomicBool,
}

impl Bell {
    /// # Errors
    /// When the process is out of descriptors.
    pub(crate) fn new() -> std::io::Result<Bell> {
        let descriptor = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Bell {
            descriptor,
            rung: AtomicBool::new(false),
            sweep: AtomicBool::new(false),
        })
    }

    /// Wakes the poll thread. Never blocks: the write fails only with EAGAIN at 2^64-2 rings, and
    /// then the descriptor is readable anyway.
    pub(crate) fn ring(&self) {
        if !self.rung.swap(true, Ordering::SeqCst) {
            let _full = rustix::io::write(&self.descriptor, &1_u64.to_ne_bytes());
        }
    }

    /// Wakes the poll thread to look through its parked requests.
    pub(crate) fn ring_for_parked(&self) {
        self.sweep.store(true, Ordering::SeqCst);
        self.ring();
    }

    /// The poll thread has seen the descriptor readable: from here on a new ring writes again. To
    /// be called before the messages are taken, so that none is left behind without a ring. It
    /// reads whatever `rung` says: a ringer's write may come after we cleared its flag.
    pub(crate) fn silence(&self) {
        let mut count = [0_u8; 8];
        let _empty = rustix::io::read(&self.descriptor, &mut count);
        self.rung.store(false, Ordering::SeqCst);
    }

    /// Whether the parked requests are to be looked through; asked once per ring.
    pub(crate) fn take_sweep(&self) -> bool {
        self.sweep.load(Ordering::SeqCst) && self.sweep.swap(false, Ordering::SeqCst)
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}
