//! Between the poll thread and everybody else: requests go out, answers come in.
//!
//! Nothing here waits for a client, and nobody waits for the poll thread.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::answer::Answer;
use super::bell::Bell;
use crate::http::park::Ticket;

/// Who asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// Somebody who may open our socket file.
    Unix,
    /// A TCP client.
    Tcp(SocketAddr),
}

/// A whole request.
#[derive(Debug, Clone)]
pub struct Request {
    /// As sent, except that HEAD arrives as GET (the front leaves the body out).
    pub method: String,
    /// The path, not percent-decoded.
    pub path: String,
    /// What stands behind the `?`, not decoded.
    pub query: Option<String>,
    /// In their order; see `header`.
    pub headers: Vec<(String, String)>,
    /// At most `FrontConfig::body_max_bytes`.
    pub body: Vec<u8>,
    /// Who asks.
    pub peer: Peer,
    /// The time of a parked request is up: answer now, parking again is not possible.
    pub last_call: bool,
}

impl Request {
    /// The first header of that name, in whatever case it came.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut found = self
            .headers
            .iter()
            .filter(|(field, _)| field.eq_ignore_ascii_case(name));
        found.next().map(|(_, value)| value.as_str())
    }
}

/// What answers requests; called on a responder thread.
pub trait Handler: Send + Sync {
    /// Answers now, or hands the responder to whoever will. A panic becomes a 500.
    fn handle(&self, request: Request, responder: Responder);
}

/// A request that waits; it rests with the poll thread.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub ticket: Ticket,
    pub request: Request,
    pub route: &'static str,
    pub deadline: Instant,
}

#[derive(Debug)]
pub(crate) enum Message {
    Answer {
        conn: u64,
        route: &'static str,
        answer: Answer,
    },
    Park {
        conn: u64,
        waiting: Box<Waiting>,
    },
}

/// What the poll thread shares with the responders and with `Front`.
#[derive(Debug)]
pub(crate) struct Relay {
    pub bell: Arc<Bell>,
    /// At most one message per request that is being worked on.
    mailbox: Mutex<Vec<Message>>,
    stop_at: Mutex<Option<Instant>>,
    started: Instant,
    beat_ms: AtomicU64,
    /// Since when each responder works on one request, in ms + 1; 0 is idle.
    busy_since_ms: Vec<AtomicU64>,
}

impl Relay {
    pub(crate) fn new(responders: usize) -> std::io::Result<Relay> {
        Ok(Relay {
            bell: Arc::new(Bell::new()?),
            mailbox: Mutex::default(),
            stop_at: Mutex::default(),
            started: Instant::now(),
            beat_ms: AtomicU64::new(0),
            busy_since_ms: (0..responders).map(|_| AtomicU64::new(0)).collect(),
        })
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn post(&self, message: Message) {
        self.mailbox
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(message);
        self.bell.ring();
    }

    pub(crate) fn take(&self) -> Vec<Message> {
        std::mem::take(&mut *self.mailbox.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn beat(&self) {
        self.beat_ms.store(self.now_ms(), Ordering::Relaxed);
    }

    pub(crate) fn set_busy(&self, responder: usize, busy: bool) {
        if let Some(since) = self.busy_since_ms.get(responder) {
            since.store(if busy { self.now_ms() + 1 } else { 0 }, Ordering::Relaxed);
        }
    }

    /// The age of the poll thread's last beat, or of the youngest request in work if every
    /// responder is at one: whichever is older.
    pub(crate) fn beat_age(&self) -> Duration {
        let now_ms = self.now_ms();
        let poll_ms = now_ms.saturating_sub(self.beat_ms.load(Ordering::Relaxed));
        let busy = self
            .busy_since_ms
            .iter()
            .map(|since| match since.load(Ordering::Relaxed) {
                0 => 0,
                since => (now_ms + 1).saturating_sub(since),
            });
        Duration::from_millis(poll_ms.max(busy.min().unwrap_or(0)))
    }

    /// Asks the poll thread to end, at that time at the latest.
    pub(crate) fn stop(&self, at: Instant) {
        *self.stop_at.lock().unwrap_or_else(PoisonError::into_inner) = Some(at);
        self.bell.ring();
    }

    pub(crate) fn stop_at(&self) -> Option<Instant> {
        *self.stop_at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The right to answer one request, once, from any thread and at any time. Dropping it unused
/// answers 500.
#[derive(Debug)]
pub struct Responder {
    conn: u64,
    relay: Arc<Relay>,
    gone: Arc<AtomicBool>,
    route: &'static str,
    spent: bool,
}

impl Responder {
    pub(crate) fn new(
        conn: u64,
        relay: Arc<Relay>,
        gone: Arc<AtomicBool>,
        route: &'static str,
    ) -> Responder {
        Responder {
            conn,
            relay,
            gone,
            route,
            spent: false,
        }
    }

    /// Names the route, for the counters; known only to the handler.
    pub fn set_route(&mut self, route: &'static str) {
        self.route = route;
    }

    /// Whether the client has gone, so that nobody will read the answer.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// Answers. Never blocks: the poll thread does the writing.
    pub fn send(mut self, answer: Answer) {
        self.spent = true;
        self.relay.post(Message::Answer {
            conn: self.conn,
            route: self.route,
            answer,
        });
    }

    /// Lays the request down until a key of the ticket is woken or the deadline comes; then the
    /// handler gets it again, at the deadline with `last_call`. See `Park`.
    pub(crate) fn park(mut self, ticket: Ticket, request: Request, deadline: Instant) {
        self.spent = true;
        let waiting = Box::new(Waiting {
            ticket,
            request,
            route: self.route,
            deadline,
        });
        self.relay.post(Message::Park {
            conn: self.conn,
            waiting,
        });
    }

    /// The request was never handed out: nothing is to be sent.
    pub(crate) fn defuse(mut self) {
        self.spent = true;
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        if !self.spent {
            let words = "the request was dropped without an answer; this is a fault of volward, \
                         see its log";
            let answer = Answer::problem(500, "internal", words);
            self.relay.post(Message::Answer {
                conn: self.conn,
                route: self.route,
                answer,
            });
        }
    }
}
