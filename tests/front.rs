//! Hostile clients against real listeners.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, bounded};
use volward::http::front::{
    Answer, Front, FrontConfig, Handler, ListenSpec, Listener, Request, Responder,
};
use volward::http::park::{Key, Park};

/// Nothing here takes so long; it only turns a hang into a failure.
const FAR: Duration = Duration::from_secs(30);
const GET: &[u8] = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n";

/// Parks `/wait`, panics on `/panic`, forgets `/drop`, sends a lot for `/big`, else echoes.
struct Routes {
    park: Park,
    /// Told when a `/wait` has been registered and handed over for parking.
    parked: Sender<()>,
    value: AtomicUsize,
    big_bytes: usize,
}

impl Handler for Routes {
    fn handle(&self, request: Request, responder: Responder) {
        match request.path.as_str() {
            "/panic" => panic!("as asked"),
            "/drop" => drop(responder),
            "/big" => responder.send(Answer::text(200, "x".repeat(self.big_bytes))),
            "/wait" => {
                let ticket = self.park.register(&[Key::Events]);
                let value = self.value.load(Ordering::SeqCst);
                if value > 0 || request.last_call {
                    // Gone before the answer is, so that a test may count.
                    drop(ticket);
                    let last = request.last_call;
                    return responder.send(Answer::text(200, format!("{value} {last}")));
                }
                let seconds = request.query.as_deref().and_then(|text| text.parse().ok());
                let deadline = Instant::now() + Duration::from_secs(seconds.unwrap_or(3600));
                self.park.park(ticket, request, responder, deadline);
                let _nobody_listens = self.parked.try_send(());
            }
            _ => responder.send(Answer::json(200, request.body)),
        }
    }
}

struct Server {
    front: Front,
    address: SocketAddr,
    routes: Arc<Routes>,
    parked: Receiver<()>,
}

fn start(config: FrontConfig) -> Server {
    let listener = Listener::bind(&ListenSpec::Tcp(([127, 0, 0, 1], 0).into())).expect("bound");
    let address = listener.tcp_address().expect("TCP");
    let (tell, parked) = bounded(4096);
    let routes = Arc::new(Routes {
        park: Park::new(),
        parked: tell,
        value: AtomicUsize::new(0),
        big_bytes: 32 << 20,
    });
    let handler: Arc<dyn Handler> = routes.clone();
    let front = Front::start(listener, config, handler).expect("started");
    Server {
        front,
        address,
        routes,
        parked,
    }
}

fn small() -> FrontConfig {
    FrontConfig {
        responders: 2,
        ..FrontConfig::default()
    }
}

impl Server {
    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).expect("connected");
        stream.set_read_timeout(Some(FAR)).expect("a timeout");
        stream.set_write_timeout(Some(FAR)).expect("a timeout");
        stream
    }

    fn send(&self, bytes: &[u8]) -> TcpStream {
        let mut stream = self.connect();
        stream.write_all(bytes).expect("sent");
        stream
    }

    fn status(&self, bytes: &[u8]) -> u16 {
        answer(&mut self.send(bytes)).0
    }

    fn assert_well(&self) {
        assert_eq!(self.status(GET), 200, "it still answers");
    }
}

/// Status, head and body of the next answer.
fn answer(stream: &mut TcpStream) -> (u16, String, Vec<u8>) {
    let mut head = Vec::new();
    let mut byte = [0_u8];
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).unwrap_or_else(|error| {
            panic!("{error} after {:?}", String::from_utf8_lossy(&head));
        });
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).expect("ASCII");
    let status = head[9..12].parse().expect("a status");
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("Content-Length: "));
    let mut body = vec![0; length.map_or(0, |text| text.parse().expect("a length"))];
    stream.read_exact(&mut body).expect("the body");
    (status, head, body)
}

fn ends(stream: &mut TcpStream) -> bool {
    let mut rest = [0_u8; 64 << 10];
    loop {
        match stream.read(&mut rest) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

#[test]
fn requests_follow_each_other_on_one_connection() {
    let server = start(small());
    let mut stream = server.send(
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\noneGET /drop HTTP/1.1\r\nHost: h\r\n\r\n\
          GET /panic HTTP/1.1\r\nHost: h\r\n\r\nPOST / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\
          Content-Length: 4\r\n\r\nlast",
    );
    assert_eq!(answer(&mut stream).2, b"one");
    let (status, head, _) = answer(&mut stream);
    assert!(
        status == 500 && head.contains("application/problem+json"),
        "{head}"
    );
    assert_eq!(answer(&mut stream).0, 500, "a panic");
    let (_, head, body) = answer(&mut stream);
    assert!(
        head.contains("Connection: close\r\n") && body == b"last",
        "{head}"
    );
    assert!(ends(&mut stream));
}

#[test]
fn refusals_have_words_and_end_the_connection() {
    let server = start(small());
    let long = "x".repeat(17 << 10);
    let cases = [
        (400, "\u{1}\u{2}\u{3}".to_owned()),
        (400, "GET / HTTP/1.1\r\n\r\n".to_owned()),
        (
            411,
            "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n".to_owned(),
        ),
        (
            413,
            format!("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 65537\r\n\r\n{long}"),
        ),
        (414, format!("GET /{long}")),
        (
            431,
            format!("GET / HTTP/1.1\r\nHost: h\r\nA: {long}\r\n\r\n"),
        ),
    ];
    for (expected, bytes) in cases {
        let mut stream = server.send(bytes.as_bytes());
        let (status, head, body) = answer(&mut stream);
        assert_eq!(status, expected, "{head}");
        let value: serde_json::Value = serde_json::from_slice(&body).expect("JSON");
        assert_eq!(value["status"], expected);
        assert!(head.contains("Connection: close"), "{head}");
        drop(stream.shutdown(Shutdown::Write));
        assert!(ends(&mut stream));
    }
}

#[test]
fn continue_head_and_old_clients() {
    let server = start(small());
    let mut stream = server
        .send(b"POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n");
    assert_eq!(answer(&mut stream).0, 100);
    stream
        .write_all(b"okHEAD / HTTP/1.0\r\n\r\n")
        .expect("sent");
    assert_eq!(answer(&mut stream).2, b"ok");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("to its end");
    assert!(
        text.starts_with("HTTP/1.1 200") && text.ends_with("\r\n\r\n"),
        "{text}"
    );
}

#[test]
fn slow_and_half_closed_clients() {
    let server = start(FrontConfig {
        read_timeout: Duration::from_millis(50),
        ..small()
    });
    let mut slow = server.send(b"GET / HT");
    let mut slow_body = server.send(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\nab");
    assert_eq!(answer(&mut slow).0, 408);
    assert_eq!(answer(&mut slow_body).0, 408);
    let mut cut = server.send(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\nab");
    cut.shutdown(Shutdown::Write).expect("half closed");
    assert_eq!(answer(&mut cut).0, 400, "it ended in the middle of a body");
    let mut half = server.send(GET);
    half.shutdown(Shutdown::Write).expect("half closed");
    assert_eq!(answer(&mut half).0, 200, "a half-closed client is answered");
    assert!(ends(&mut half));
    server.assert_well();
}

#[test]
fn who_never_reads_is_closed_and_delays_nobody() {
    let server = start(FrontConfig {
        write_timeout: Duration::from_millis(300),
        buffered_max_bytes: usize::MAX,
        ..small()
    });
    let mut deaf: Vec<TcpStream> = (0..4)
        .map(|_| server.send(b"GET /big HTTP/1.1\r\nHost: h\r\n\r\n"))
        .collect();
    server.assert_well();
    for stream in &mut deaf {
        // Its first byte shows that the answer is under way; the rest is never asked for.
        stream.read_exact(&mut [0]).expect("the first byte");
    }
    let deadline = Instant::now() + FAR;
    while deaf.iter().any(|stream| !is_reset(stream)) {
        assert!(Instant::now() < deadline, "a deaf client was never closed");
        server.assert_well();
    }
}

/// Whether the other side has closed: a write fails once its reset has come.
fn is_reset(stream: &TcpStream) -> bool {
    let mut stream = stream;
    stream.write(b"x").is_err()
}

#[test]
fn pipelined_waits_block_nobody() {
    // They all come at once: none shall find the queue full.
    let server = start(FrontConfig {
        queue: 1000,
        ..small()
    });
    let both = [b"GET /wait HTTP/1.1\r\nHost: h\r\n\r\n".as_slice(), GET].concat();
    let mut waiting: Vec<TcpStream> = (0..500).map(|_| server.send(&both)).collect();
    for _ in 0..500 {
        server.parked.recv_timeout(FAR).expect("parked");
    }
    server.assert_well();
    assert_eq!(server.routes.park.waiting(), 500);
    server.routes.value.store(7, Ordering::SeqCst);
    server.routes.park.wake(&[Key::Events]);
    for stream in &mut waiting {
        assert_eq!(answer(stream).2, b"7 false");
        assert_eq!(answer(stream).0, 200, "the request behind it");
    }
    assert_eq!(server.routes.park.waiting(), 0);
}

#[test]
fn a_parked_request_ends_in_time_or_with_its_client() {
    let server = start(FrontConfig {
        parked_max: 1,
        ..small()
    });
    let mut first = server.send(b"GET /wait?0 HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(answer(&mut first).2, b"0 true", "the last call");
    let gone = server.send(b"GET /wait HTTP/1.1\r\nHost: h\r\n\r\n");
    for _ in 0..2 {
        server.parked.recv_timeout(FAR).expect("parked");
    }
    let mut second = server.send(b"GET /wait HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(
        answer(&mut second).2,
        b"0 true",
        "no room: as if the time were up"
    );
    drop(gone);
    let deadline = Instant::now() + FAR;
    while server.routes.park.waiting() > 0 {
        assert!(Instant::now() < deadline, "a gone client stays registered");
        server.assert_well();
    }
}

#[test]
fn no_wake_is_lost() {
    let server = start(small());
    for _ in 0..500 {
        server.routes.value.store(0, Ordering::SeqCst);
        let mut stream = server.send(b"GET /wait HTTP/1.1\r\nHost: h\r\n\r\n");
        // Commit, then wake, at any moment of the other side's register, read, park.
        server.routes.value.store(1, Ordering::SeqCst);
        server.routes.park.wake(&[Key::Events]);
        assert_eq!(answer(&mut stream).2, b"1 false");
    }
}

#[test]
fn two_thousand_connections() {
    let server = start(FrontConfig {
        max_conns: 100,
        ..small()
    });
    let mut kept = Vec::new();
    for _ in 0..2000 {
        kept.push(server.connect());
    }
    server.assert_well();
    let open = kept.iter().filter(|stream| {
        let mut stream: &TcpStream = stream;
        stream.set_nonblocking(true).expect("set");
        stream
            .read(&mut [0])
            .is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
    });
    assert!(open.count() <= 100);
}

#[test]
fn garbage_is_survived() {
    let server = start(small());
    let mut seed = 1_u64;
    let mut roll = |below: usize| {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(seed >> 33).expect("31 bits") % below
    };
    for _ in 0..10_000 {
        let mut bytes = GET.to_vec();
        for _ in 0..roll(6) {
            let at = roll(bytes.len());
            bytes[at] = u8::try_from(roll(256)).expect("a byte");
        }
        bytes.truncate(1 + roll(bytes.len()));
        let mut stream = server.connect();
        let _closed_early = stream.write_all(&bytes);
        if roll(50) == 0 {
            let _closed_early = stream.shutdown(Shutdown::Write);
            assert!(ends(&mut stream));
        }
    }
    server.assert_well();
}

#[test]
fn shutdown_answers_what_is_there() {
    let server = start(small());
    let mut idle = server.send(GET);
    assert_eq!(answer(&mut idle).0, 200);
    let mut waiting = server.send(b"GET /wait HTTP/1.1\r\nHost: h\r\n\r\n");
    server.parked.recv_timeout(FAR).expect("parked");
    assert_eq!(server.front.shutdown(FAR), Some(0));
    let (_, head, body) = answer(&mut waiting);
    assert!(
        head.contains("Connection: close") && body == b"0 true",
        "{head}"
    );
    assert!(ends(&mut idle));
    assert!(
        TcpStream::connect(server.address).is_err(),
        "nobody listens"
    );
}

#[test]
fn out_of_descriptors() {
    const MARK: &str = "VOLWARD_TEST_FEW_DESCRIPTORS";
    if std::env::var_os(MARK).is_none() {
        let own = std::env::current_exe().expect("this test");
        let child = std::process::Command::new(own)
            .args(["--exact", "out_of_descriptors", "--nocapture"])
            .env(MARK, "1")
            .output()
            .expect("a child");
        assert!(
            child.status.success(),
            "{}",
            String::from_utf8_lossy(&child.stderr)
        );
        return;
    }
    let server = start(small());
    let mut busy = server.send(b"GET /wait HTTP/1.1\r\nHost: h\r\n\r\n");
    server.parked.recv_timeout(FAR).expect("parked");
    let limit = rustix::process::Rlimit {
        current: Some(64),
        maximum: Some(64),
    };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).expect("lowered");
    let mut hoard = Vec::new();
    while let Ok(file) = std::fs::File::open("/dev/null") {
        hoard.push(file);
    }
    // One for our side of a connection; the front has none but its spare.
    hoard.pop();
    let mut turned_away = server.connect();
    assert_eq!(answer(&mut turned_away).0, 503);
    drop(turned_away);
    drop(hoard);
    server.assert_well();
    server.routes.value.store(3, Ordering::SeqCst);
    server.routes.park.wake(&[Key::Events]);
    assert_eq!(
        answer(&mut busy).2,
        b"3 false",
        "what was there before went on"
    );
}
