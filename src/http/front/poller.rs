//! The poll thread: it alone touches the listener and the connections, and never blocks on one.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam::channel::Sender;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{SendFlags, SocketFlags, acceptfrom_with, send};

use super::answer::{Answer, Encoding, encode};
use super::conn::{Conn, Io, State};
use super::parse::{Limits, Parsed, Parts, Refusal};
use super::relay::{Message, Peer, Relay, Request, Responder, Waiting};
use super::{FrontConfig, Job, Listener};

/// The heartbeat of an idle front.
const BEAT: Duration = Duration::from_secs(1);
/// How long the listener rests after an accept error.
const BACK_OFF: Duration = Duration::from_millis(100);
/// How long a closed connection may still send.
const LINGER: Duration = Duration::from_secs(1);
/// Connections taken in one turn.
const ACCEPTS_PER_TURN: usize = 64;

pub(super) struct Poller {
    listener: Option<Listener>,
    config: FrontConfig,
    limits: Limits,
    jobs: Sender<Job>,
    relay: Arc<Relay>,
    conns: BTreeMap<u64, Conn>,
    next_id: u64,
    now: Instant,
    /// A descriptor to give up when there is none left, so that a caller can be turned away.
    spare: Option<OwnedFd>,
    rest_until: Option<Instant>,
    /// A woken request found the queue full.
    backlogged: bool,
    stop_at: Option<Instant>,
}

/// What a wait brought.
struct Ready {
    bell: bool,
    listener: bool,
    conns: Vec<(u64, PollFlags)>,
}

fn open_spare() -> rustix::io::Result<OwnedFd> {
    rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}

impl Poller {
    pub(super) fn new(
        listener: Listener,
        config: FrontConfig,
        jobs: Sender<Job>,
        relay: Arc<Relay>,
    ) -> io::Result<Poller> {
        Ok(Poller {
            listener: Some(listener),
            limits: Limits {
                head_max_bytes: config.head_max_bytes,
                body_max_bytes: config.body_max_bytes,
            },
            config,
            jobs,
            relay,
            conns: BTreeMap::new(),
            next_id: 0,
            now: Instant::now(),
            spare: Some(open_spare()?),
            rest_until: None,
            backlogged: false,
            stop_at: None,
        })
    }

    /// Until it is stopped; says how many requests were cut off.
    pub(super) fn run(mut self) -> usize {
        loop {
            self.relay.beat();
            if let Some(at) = self.stop_at
                && (self.conns.is_empty() || self.now >= at)
            {
                return self.conns.values().filter(|conn| !conn.is_idle()).count();
            }
            let ready = self.wait();
            self.now = Instant::now();
            if ready.bell {
                self.relay.bell.silence();
            }
            for message in self.relay.take() {
                self.deliver(message);
            }
            if self.relay.bell.take_sweep() || self.backlogged {
                self.sweep();
            }
            for (id, flags) in ready.conns {
                self.serve(id, flags);
            }
            if ready.listener {
                self.accept();
            }
            self.expire();
            if self.stop_at.is_none() {
                self.stop_at = self.relay.stop_at();
                if self.stop_at.is_some() {
                    self.begin_stop();
                }
            }
        }
    }

    fn wait(&mut self) -> Ready {
        if self.rest_until.is_some_and(|until| until <= self.now) {
            self.rest_until = None;
            self.spare = self.spare.take().or_else(|| open_spare().ok());
        }
        let ids: Vec<u64> = self.conns.keys().copied().collect();
        let listening = self.listener.as_ref().filter(|_| self.rest_until.is_none());
        let mut polled = Vec::with_capacity(ids.len() + 2);
        polled.push(PollFd::new(self.relay.bell.as_ref(), PollFlags::IN));
        for conn in self.conns.values() {
            polled.push(PollFd::from_borrowed_fd(conn.descriptor(), conn.interest()));
        }
        if let Some(listener) = listening {
            polled.push(PollFd::new(&listener.socket, PollFlags::IN));
        }
        let timers = self.conns.values().filter_map(|conn| conn.deadline);
        let earliest = timers.chain(self.rest_until).chain(self.stop_at).min();
        let pause = earliest.map_or(BEAT, |at| at.saturating_duration_since(self.now).min(BEAT));
        // poll counts whole milliseconds on some kernels: one more, or the last one would spin.
        let pause = pause + Duration::from_millis(1);
        let timeout = Timespec::try_from(pause).unwrap_or(Timespec {
            tv_sec: 1,
            tv_nsec: 0,
        });
        match poll(&mut polled, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => {
                log::error!("listener={} poll: {error}", self.config.name);
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        let fired = |at: usize| polled.get(at).map_or(PollFlags::empty(), PollFd::revents);
        Ready {
            bell: !fired(0).is_empty(),
            listener: listening.is_some() && !fired(ids.len() + 1).is_empty(),
            conns: (1..)
                .zip(&ids)
                .map(|(at, id)| (*id, fired(at)))
                .filter(|(_, flags)| !flags.is_empty())
                .collect(),
        }
    }

    fn deliver(&mut self, message: Message) {
        match message {
            Message::Answer {
                conn,
                route,
                answer,
            } => {
                self.answer(conn, &answer, route);
                self.pump(conn);
            }
            Message::Park { conn: id, waiting } => {
                let parked = self
                    .conns
                    .values()
                    .filter(|c| matches!(c.state, State::Parked(_)));
                let full = parked.count() >= self.config.parked_max;
                let Some(conn) = self.conns.get_mut(&id) else {
                    return;
                };
                waiting.ticket.attach(&self.relay.bell);
                let woken = waiting.ticket.is_woken();
                let hopeless = full || conn.half_closed || self.stop_at.is_some();
                conn.deadline = Some(waiting.deadline);
                conn.state = State::Parked(waiting);
                if woken || hopeless {
                    self.resume(id, hopeless);
                }
            }
        }
    }

    /// Hands out the parked requests that were woken.
    fn sweep(&mut self) {
        self.backlogged = false;
        let due: Vec<(u64, bool)> = self
            .conns
            .iter()
            .filter_map(|(id, conn)| match &conn.state {
                State::Parked(waiting) => {
                    let last = waiting.request.last_call || waiting.deadline <= self.now;
                    (last || waiting.ticket.is_woken()).then_some((*id, last))
                }
                _ => None,
            })
            .collect();
        for (id, last) in due {
            self.resume(id, last);
        }
    }

    /// Gives a parked request to a responder again; it stays parked while the queue is full.
    fn resume(&mut self, id: u64, last_call: bool) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        match std::mem::replace(&mut conn.state, State::Working) {
            State::Parked(mut waiting) => {
                waiting.request.last_call |= last_call;
                conn.deadline = None;
                let Waiting {
                    ticket,
                    request,
                    route,
                    deadline,
                } = *waiting;
                if let Err(request) = self.dispatch(id, request, route)
                    && let Some(conn) = self.conns.get_mut(&id)
                {
                    // A responder that gets free rings the bell.
                    self.backlogged = true;
                    let waiting = Waiting {
                        ticket,
                        request,
                        route,
                        deadline,
                    };
                    conn.state = State::Parked(Box::new(waiting));
                }
            }
            other => conn.state = other,
        }
    }

    /// Gives the request back when the queue is full.
    // The request moves either way; a box would cost every one of them.
    #[allow(clippy::result_large_err)]
    fn dispatch(&self, id: u64, request: Request, route: &'static str) -> Result<(), Request> {
        let Some(conn) = self.conns.get(&id) else {
            return Ok(());
        };
        let gone = Arc::clone(&conn.gone);
        let responder = Responder::new(id, Arc::clone(&self.relay), gone, route);
        self.jobs
            .try_send(Job { request, responder })
            .map_err(|full| {
                let Job { request, responder } = full.into_inner();
                responder.defuse();
                request
            })
    }

    fn serve(&mut self, id: u64, flags: PollFlags) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        match conn.state {
            State::Reading { .. } => self.read(id),
            State::Writing { .. } => self.pump(id),
            State::Lingering { .. } => {
                if conn.read() == Io::End {
                    self.close(id);
                }
            }
            State::Working | State::Parked(_) => {
                if flags.intersects(PollFlags::HUP | PollFlags::ERR) {
                    self.close(id);
                } else if flags.contains(PollFlags::RDHUP) {
                    // Closed, or merely done with sending; a parked request is answered at once.
                    conn.half_closed = true;
                    self.resume(id, true);
                }
            }
        }
    }

    fn read(&mut self, id: u64) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        match conn.read() {
            Io::Some => self.pump(id),
            Io::Later => {}
            Io::End if conn.parser.is_empty() => self.close(id),
            Io::End => {
                let words = "the request ended before it was whole; send all of it";
                self.refuse(id, &Refusal::new(400, "malformed_request", words));
                self.pump(id);
            }
        }
    }

    /// Takes a connection as far as it goes without waiting.
    fn pump(&mut self, id: u64) {
        while let Some(conn) = self.conns.get_mut(&id) {
            match conn.state {
                State::Reading { .. } => match conn.parser.next(self.limits) {
                    Parsed::More => return self.more(id),
                    Parsed::Continue => {
                        if !conn.write_short(b"HTTP/1.1 100 Continue\r\n\r\n") {
                            return self.close(id);
                        }
                    }
                    Parsed::Refused(refusal) => self.refuse(id, &refusal),
                    Parsed::Complete(parts) => self.admit(id, parts),
                },
                State::Writing { .. } => match conn.write() {
                    Io::Later => return,
                    Io::End => return self.close(id),
                    Io::Some => self.written(id),
                },
                State::Working | State::Parked(_) | State::Lingering { .. } => return,
            }
        }
    }

    fn more(&mut self, id: u64) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        let State::Reading { since } = &mut conn.state else {
            return;
        };
        if conn.parser.is_empty() {
            *since = None;
            conn.parser.rest();
            conn.deadline = Some(conn.idle_since + self.config.idle_timeout);
            if self.stop_at.is_some() {
                self.close(id);
            }
        } else {
            conn.deadline = Some(*since.get_or_insert(self.now) + self.config.read_timeout);
        }
    }

    fn admit(&mut self, id: u64, parts: Parts) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        let head_only = parts.method == "HEAD";
        conn.how = Encoding {
            head_only,
            keep_alive: parts.keep_alive,
            say_keep_alive: parts.keep_alive && parts.http_1_0,
        };
        conn.state = State::Working;
        conn.deadline = None;
        let request = Request {
            method: if head_only {
                "GET".to_owned()
            } else {
                parts.method
            },
            path: parts.path,
            query: parts.query,
            headers: parts.headers,
            body: parts.body,
            peer: conn.peer,
            last_call: false,
        };
        if let Err(answer) = self.config.guard.check(&request) {
            return self.answer(id, &answer, "");
        }
        if self.dispatch(id, request, "").is_err() {
            let words = "more requests wait than can be answered; try again in a second";
            let answer = Answer::problem(503, "busy", words).with_header("Retry-After", "1");
            self.answer(id, &answer, "");
        }
    }

    fn refuse(&mut self, id: u64, refusal: &Refusal) {
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.how = Encoding {
                head_only: false,
                keep_alive: false,
                say_keep_alive: false,
            };
        }
        self.answer(id, &refusal.answer(), "");
    }

    /// Lays the answer on the connection; `pump` writes it.
    fn answer(&mut self, id: u64, answer: &Answer, route: &'static str) {
        if let Some(count) = &self.config.counter {
            count(route, answer.status);
        }
        let stopping = self.stop_at.is_some();
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        conn.how.keep_alive &= !stopping;
        let bytes = encode(answer, conn.how);
        conn.state = State::Writing { bytes, sent: 0 };
        conn.deadline = Some(self.now + self.config.write_timeout);
        self.relieve(id);
    }

    /// Keeps the sum of unsent answers below its bound: the slowest readers go, the newest stays.
    fn relieve(&mut self, newest: u64) {
        let mut held: Vec<(Option<Instant>, u64, usize)> = self
            .conns
            .iter()
            .filter_map(|(id, conn)| match &conn.state {
                State::Writing { bytes, .. } => Some((conn.deadline, *id, bytes.len())),
                _ => None,
            })
            .collect();
        let mut sum: usize = held.iter().map(|(_, _, bytes)| bytes).sum();
        if sum <= self.config.buffered_max_bytes {
            return;
        }
        held.sort_unstable();
        for (_, id, bytes) in held {
            if id != newest && sum > self.config.buffered_max_bytes {
                sum -= bytes;
                self.close(id);
            }
        }
    }

    fn written(&mut self, id: u64) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        conn.idle_since = self.now;
        if conn.how.keep_alive {
            conn.state = State::Reading { since: None };
        } else {
            conn.end_writing();
            conn.state = State::Lingering { thrown: 0 };
            conn.deadline = Some(self.now + LINGER);
        }
    }

    fn close(&mut self, id: u64) {
        if let Some(conn) = self.conns.remove(&id) {
            conn.gone.store(true, Ordering::Relaxed);
        }
    }

    fn expire(&mut self) {
        let now = self.now;
        let due = |conn: &Conn| conn.deadline.is_some_and(|at| at <= now);
        let ids: Vec<u64> = self
            .conns
            .iter()
            .filter(|(_, c)| due(c))
            .map(|(id, _)| *id)
            .collect();
        for id in ids {
            let Some(conn) = self.conns.get(&id) else {
                continue;
            };
            match conn.state {
                State::Parked(_) => self.resume(id, true),
                State::Reading { since: Some(_) } => {
                    let words = "the request did not come whole in time; send it faster";
                    self.refuse(id, &Refusal::new(408, "request_timeout", words));
                    self.pump(id);
                }
                _ => self.close(id),
            }
        }
    }

    fn begin_stop(&mut self) {
        self.listener = None;
        let ids: Vec<u64> = self.conns.keys().copied().collect();
        for id in ids {
            self.resume(id, true);
            // What has arrived already is still answered.
            if self.conns.get(&id).is_some_and(Conn::is_idle) {
                self.read(id);
            }
            if self.conns.get(&id).is_some_and(Conn::is_idle) {
                self.close(id);
            }
        }
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTS_PER_TURN {
            let Some(listener) = &self.listener else {
                return;
            };
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match acceptfrom_with(&listener.socket, flags) {
                Ok((socket, from)) => {
                    let from = from.and_then(|any| SocketAddr::try_from(any).ok());
                    let peer = match listener.tcp_address() {
                        Some(_) => from.map_or(Peer::Unix, Peer::Tcp),
                        None => Peer::Unix,
                    };
                    self.welcome(socket, peer);
                }
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED | Errno::PROTO) => {}
                Err(error) => {
                    // Without a descriptor accept fails even when nobody calls.
                    if !self.somebody_calls() {
                        return;
                    }
                    let starved = matches!(error, Errno::MFILE | Errno::NFILE);
                    if !(starved && self.evict_idle()) {
                        return self.turn_away(error);
                    }
                }
            }
        }
    }

    fn somebody_calls(&self) -> bool {
        let Some(listener) = &self.listener else {
            return false;
        };
        let mut polled = [PollFd::new(&listener.socket, PollFlags::IN)];
        let at_once = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        poll(&mut polled, Some(&at_once)).is_ok_and(|count| count > 0)
    }

    /// With the spare descriptor one caller is told, then the listener rests.
    fn turn_away(&mut self, error: Errno) {
        log::warn!(
            "listener={} accept: {error}; it is tried again soon",
            self.config.name
        );
        if self.spare.take().is_some()
            && let Some(listener) = &self.listener
            && let Ok((socket, _)) = acceptfrom_with(&listener.socket, SocketFlags::NONBLOCK)
        {
            self.say_full(&socket);
        }
        self.spare = open_spare().ok();
        self.rest_until = Some(self.now + BACK_OFF);
    }

    fn welcome(&mut self, socket: OwnedFd, peer: Peer) {
        if self.conns.len() >= self.config.max_conns && !self.evict_idle() {
            return self.say_full(&socket);
        }
        if matches!(peer, Peer::Tcp(_)) {
            let _slower = rustix::net::sockopt::set_tcp_nodelay(&socket, true);
        }
        let idle_until = self.now + self.config.idle_timeout;
        self.conns
            .insert(self.next_id, Conn::new(socket, peer, self.now, idle_until));
        self.next_id += 1;
    }

    /// Closes the connection that has rested longest; false when all are in use.
    fn evict_idle(&mut self) -> bool {
        let idle = self.conns.iter().filter(|(_, conn)| conn.is_idle());
        let oldest = idle
            .min_by_key(|(_, conn)| conn.idle_since)
            .map(|(id, _)| *id);
        oldest.inspect(|id| self.close(*id)).is_some()
    }

    fn say_full(&self, socket: &OwnedFd) {
        let words = "too many connections; try again in a second";
        let answer = Answer::problem(503, "busy", words).with_header("Retry-After", "1");
        if let Some(count) = &self.config.counter {
            count("", answer.status);
        }
        let how = Encoding {
            head_only: false,
            keep_alive: false,
            say_keep_alive: false,
        };
        let _best_effort = send(socket, &encode(&answer, how), SendFlags::NOSIGNAL);
    }
}
