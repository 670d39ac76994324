//! Tests of the parser of requests.

use super::*;

const LIMITS: Limits = Limits {
    head_max_bytes: 16 << 10,
    body_max_bytes: 64 << 10,
};

/// Everything that these bytes give, pushed in these pieces.
fn run(pieces: &[&[u8]]) -> Vec<Parsed> {
    let mut parser = Parser::default();
    let mut seen = Vec::new();
    for piece in pieces {
        parser.push(piece);
        loop {
            match parser.next(LIMITS) {
                Parsed::More => break,
                // Whether the body was there already is all that a cut may change.
                Parsed::Continue => {}
                Parsed::Refused(refusal) => {
                    seen.push(Parsed::Refused(refusal));
                    return seen;
                }
                complete => seen.push(complete),
            }
        }
    }
    seen
}

fn one(bytes: &str) -> Parsed {
    run(&[bytes.as_bytes()])
        .into_iter()
        .next()
        .unwrap_or(Parsed::More)
}

fn parts(bytes: &str) -> Parts {
    match one(bytes) {
        Parsed::Complete(parts) => parts,
        other => panic!("{bytes:?} gives {other:?}"),
    }
}

fn status(bytes: &str) -> u16 {
    match one(bytes) {
        Parsed::Refused(refusal) => refusal.status,
        other => panic!("{bytes:?} gives {other:?}"),
    }
}

#[test]
fn a_request_is_taken_apart() {
    let got = parts("POST /v1/x?a=1?b HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabcREST");
    assert_eq!((got.method.as_str(), got.path.as_str()), ("POST", "/v1/x"));
    assert_eq!(got.query.as_deref(), Some("a=1?b"));
    assert_eq!(got.body, b"abc");
    assert!(got.keep_alive && !got.http_1_0);
    let bare = parts("\r\n\nGET / HTTP/1.1\nHost: h\n\n");
    assert_eq!(bare.path, "/");
    let absolute = parts("GET http://other:1/p?q HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(
        (absolute.path.as_str(), absolute.query.as_deref()),
        ("/p", Some("q"))
    );
    assert_eq!(absolute.headers[0].1, "other:1");
}

#[test]
fn who_keeps_the_connection() {
    let keeps = |version: &str, connection: &str| {
        parts(&format!(
            "GET / HTTP/{version}\r\nHost: h\r\n{connection}\r\n"
        ))
        .keep_alive
    };
    assert!(keeps("1.1", ""));
    assert!(!keeps("1.1", "Connection: close\r\n"));
    assert!(!keeps("1.1", "Connection: keep-alive, Close\r\n"));
    assert!(!keeps("1.0", ""));
    assert!(keeps("1.0", "Connection: Keep-Alive\r\n"));
}

#[test]
fn refusals() {
    let post = |headers: &str| status(&format!("POST / HTTP/1.1\r\nHost: h\r\n{headers}\r\n"));
    assert_eq!(post("Transfer-Encoding: chunked\r\n"), 411);
    assert_eq!(
        post("Transfer-Encoding: gzip\r\nContent-Length: 3\r\n"),
        411
    );
    assert_eq!(post("Content-Length: 3\r\nContent-Length: 4\r\n"), 400);
    assert_eq!(post("Content-Length: 3\r\nContent-Length: 3\r\n"), 400);
    assert_eq!(post("Content-Length: 3, 3\r\n"), 400);
    assert_eq!(post("Content-Length: +3\r\n"), 400);
    assert_eq!(post("Content-Length: -3\r\n"), 400);
    assert_eq!(post("Content-Length:\r\n"), 400);
    assert_eq!(post("Content-Length: 65537\r\n"), 413);
    assert_eq!(post("Content-Length: 99999999999999999999999999\r\n"), 413);
    assert_eq!(post("Expect: tea\r\n"), 417);
    assert_eq!(post("Host: again\r\n"), 400);
    assert_eq!(post(&"A: b\r\n".repeat(70)), 431);
    assert_eq!(post(" folded\r\n"), 400);
    assert_eq!(post("Name : value\r\n"), 400);
    assert_eq!(status("GET / HTTP/1.1\r\n\r\n"), 400, "no Host");
    assert_eq!(status("GET / HTTP/2.0\r\n"), 505);
    assert_eq!(status("GET relative HTTP/1.1\r\nHost: h\r\n\r\n"), 400);
    assert_eq!(
        status("\u{16}\u{3}\u{1}"),
        400,
        "a TLS hello, at its first byte"
    );
    assert_eq!(
        status(&format!("GET /{} HTTP/1.1\r\n", "x".repeat(16 << 10))),
        414
    );
    assert_eq!(status(&"x".repeat(16 << 10)), 414);
    parts("GET / HTTP/1.0\r\n\r\n");
}

#[test]
fn the_head_limit_is_exact() {
    let head = |bytes: usize| {
        let frame = "GET / HTTP/1.1\r\nHost: h\r\nA: \r\n\r\n".len();
        format!(
            "GET / HTTP/1.1\r\nHost: h\r\nA: {}\r\n\r\n",
            "x".repeat(bytes - frame)
        )
    };
    parts(&head(16 << 10));
    assert_eq!(status(&head((16 << 10) + 1)), 431);
}

#[test]
fn continue_is_said_once_and_only_when_the_body_is_missing() {
    let head = b"POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n";
    let mut parser = Parser::default();
    parser.push(head);
    assert_eq!(parser.next(LIMITS), Parsed::Continue);
    assert_eq!(parser.next(LIMITS), Parsed::More);
    parser.push(b"a");
    assert_eq!(parser.next(LIMITS), Parsed::More);
    parser.push(b"b");
    assert!(matches!(parser.next(LIMITS), Parsed::Complete(parts) if parts.body == b"ab"));
    assert!(parser.is_empty());
}

/// A small seeded generator (splitmix64).
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % below as u64).expect("small")
    }
}

/// A stream of requests, mostly good ones, with some bytes changed.
fn stream(dice: &mut Dice) -> Vec<u8> {
    const HEADERS: [&str; 10] = [
        "Host: h\r\n",
        "Connection: keep-alive\r\n",
        "Content-Length: 5\r\n",
        "Content-Length: x\r\n",
        "Transfer-Encoding: chunked\r\n",
        "Expect: 100-continue\r\n",
        "X: \u{fc}\u{20ac}\r\n",
        "Accept: */*\n",
        "\r\n",
        "Content-Length: 70000\r\n",
    ];
    let mut bytes = Vec::new();
    for _ in 0..=dice.roll(4) {
        bytes.extend_from_slice(b"POST /a?b HTTP/1.1\r\nHost: h\r\n");
        for _ in 0..dice.roll(3) {
            bytes.extend_from_slice(HEADERS[1 + dice.roll(9)].as_bytes());
        }
        if dice.roll(4) == 0 {
            bytes.extend_from_slice(format!("P: {}\r\n", "y".repeat(dice.roll(17_000))).as_bytes());
        }
        let body = dice.roll(60);
        bytes.extend_from_slice(format!("Content-Length: {body}\r\n\r\n").as_bytes());
        bytes.extend((0..body).map(|at| b"\n\r :GET"[at % 7]));
    }
    for _ in 0..dice.roll(3) {
        let at = dice.roll(bytes.len());
        bytes[at] = u8::try_from(dice.roll(256)).expect("a byte");
    }
    bytes
}

#[test]
fn cutting_changes_nothing() {
    let mut complete = 0;
    let mut refused = 0;
    for seed in 0..3_000 {
        let mut dice = Dice(seed);
        let bytes = stream(&mut dice);
        let whole = run(&[&bytes]);
        let mut pieces: Vec<&[u8]> = Vec::new();
        let mut rest = bytes.as_slice();
        let widest = [1, 7, 100, 5_000][dice.roll(4)];
        while !rest.is_empty() {
            let (piece, after) = rest.split_at((1 + dice.roll(widest)).min(rest.len()));
            pieces.push(piece);
            rest = after;
        }
        assert_eq!(run(&pieces), whole, "seed {seed}: {}", bytes.escape_ascii());
        for parsed in &whole {
            complete += usize::from(matches!(parsed, Parsed::Complete(_)));
            refused += usize::from(matches!(parsed, Parsed::Refused(_)));
        }
    }
    assert!(
        complete > 1_000 && refused > 500,
        "the streams are a mixture: {complete}, {refused}"
    );
}
