//! One connection: its socket, what it is at, and until when.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};

use super::answer::Encoding;
use super::parse::Parser;
use super::relay::{Peer, Waiting};

/// Bytes of a closed connection that are read and thrown away.
const LINGER_MAX_BYTES: usize = 1 << 20;
const CHUNK_BYTES: usize = 16 << 10;

/// What a connection is at.
#[derive(Debug)]
pub(super) enum State {
    /// Between requests, or within one (then since when).
    Reading {
        since: Option<Instant>,
    },
    /// Its request is with a responder, or with whoever holds the `Responder`.
    Working,
    Parked(Box<Waiting>),
    Writing {
        bytes: Vec<u8>,
        sent: usize,
    },
    /// All is said; what still comes is thrown away, so that no reset overtakes the last answer.
    Lingering {
        thrown: usize,
    },
}

#[derive(Debug)]
pub(super) struct Conn {
    socket: OwnedFd,
    pub peer: Peer,
    pub parser: Parser,
    pub state: State,
    pub how: Encoding,
    /// When the present state has lasted too long.
    pub deadline: Option<Instant>,
    /// When it came, or finished its last request.
    pub idle_since: Instant,
    /// The client will send nothing more.
    pub half_closed: bool,
    pub gone: Arc<AtomicBool>,
}

/// What came of an attempt to read or write.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Io {
    Some,
    Later,
    End,
}

impl Conn {
    pub(super) fn new(socket: OwnedFd, peer: Peer, now: Instant, idle_until: Instant) -> Conn {
        Conn {
            socket,
            peer,
            parser: Parser::default(),
            state: State::Reading { since: None },
            how: Encoding {
                head_only: false,
                keep_alive: false,
                say_keep_alive: false,
            },
            deadline: Some(idle_until),
            idle_since: now,
            half_closed: false,
            gone: Arc::default(),
        }
    }

    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// What to wait for. Hang-ups and errors are always reported.
    pub(super) fn interest(&self) -> PollFlags {
        match self.state {
            State::Reading { .. } | State::Lingering { .. } => PollFlags::IN,
            State::Writing { .. } => PollFlags::OUT,
            State::Working | State::Parked(_) if self.half_closed => PollFlags::empty(),
            State::Working | State::Parked(_) => PollFlags::RDHUP,
        }
    }

    /// Whether closing it costs nobody anything.
    pub(super) fn is_idle(&self) -> bool {
        match self.state {
            State::Reading { since } => since.is_none() && self.parser.is_empty(),
            State::Lingering { .. } => true,
            State::Working | State::Parked(_) | State::Writing { .. } => false,
        }
    }

    /// Reads once.
    pub(super) fn read(&mut self) -> Io {
        let mut chunk = [0_u8; CHUNK_BYTES];
        match recv(&self.socket, &mut chunk, RecvFlags::empty()) {
            Ok((_, 0)) => Io::End,
            Ok((_, count)) => {
                if let State::Lingering { thrown } = &mut self.state {
                    *thrown += count;
                    return if *thrown > LINGER_MAX_BYTES {
                        Io::End
                    } else {
                        Io::Some
                    };
                }
                self.parser.push(&chunk[..count]);
                Io::Some
            }
            Err(Errno::AGAIN | Errno::INTR) => Io::Later,
            Err(_) => Io::End,
        }
    }

    /// Writes what it can of the answer; `End` when the client is gone, `Some` when all is sent.
    pub(super) fn write(&mut self) -> Io {
        let State::Writing { bytes, sent } = &mut self.state else {
            return Io::Some;
        };
        while *sent < bytes.len() {
            match send(&self.socket, &bytes[*sent..], SendFlags::NOSIGNAL) {
                Ok(count) => *sent += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Io::Later,
                Err(_) => return Io::End,
            }
        }
        Io::Some
    }

    /// A few bytes beside an answer; whether they went out whole.
    pub(super) fn write_short(&self, bytes: &[u8]) -> bool {
        send(&self.socket, bytes, SendFlags::NOSIGNAL) == Ok(bytes.len())
    }

    pub(super) fn end_writing(&self) {
        let _gone_already = shutdown(&self.socket, Shutdown::Write);
    }
}
