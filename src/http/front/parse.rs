//! Bytes become requests. Knows nothing of sockets: the same bytes give the same requests and the
//! same refusals, however they were cut into pieces on the way.

use super::answer::Answer;

/// Headers per request; more are refused with 431.
const HEADERS_MAX: usize = 64;

/// How much of a request is taken.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub head_max_bytes: usize,
    pub body_max_bytes: usize,
}

/// One whole request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Parts {
    pub method: String,
    pub path: String,
    pub query: Option<String>,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    pub keep_alive: bool,
    pub http_1_0: bool,
}

/// Why a request is not taken; the connection is closed after these words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub status: u16,
    pub slug: &'static str,
    pub detail: String,
}

impl Refusal {
    pub(crate) fn new(status: u16, slug: &'static str, detail: impl Into<String>) -> Refusal {
        Refusal {
            status,
            slug,
            detail: detail.into(),
        }
    }

    pub(crate) fn answer(&self) -> Answer {
        Answer::problem(self.status, self.slug, &self.detail)
    }
}

/// What the bytes so far amount to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Parsed {
    /// Not yet a whole request.
    More,
    /// The client waits for `100 Continue` before it sends the body; said once per request.
    Continue,
    Complete(Parts),
    Refused(Refusal),
}

/// A head that is complete, its body perhaps not.
#[derive(Debug)]
struct Head {
    parts: Parts,
    body_bytes: usize,
    continue_due: bool,
}

/// The bytes of one connection that are not yet a request.
#[derive(Debug, Default)]
pub(crate) struct Parser {
    bytes: Vec<u8>,
    /// Where the current request begins in `bytes`.
    start: usize,
    /// How far behind `start` we have looked for ends of lines.
    scanned: usize,
    head: Option<Head>,
}

impl Parser {
    /// Takes bytes from the wire. Bounded by the caller, who reads only after `Parsed::More`.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        if self.start > 0 {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// Whether nothing of a request has come yet.
    pub(crate) fn is_empty(&self) -> bool {
        self.head.is_none() && self.start == self.bytes.len()
    }

    /// Gives memory back while the connection is idle.
    pub(crate) fn rest(&mut self) {
        if self.is_empty() {
            self.start = 0;
            self.bytes.clear();
            self.bytes.shrink_to(1024);
        }
    }

    /// The next request, if it is whole.
    pub(crate) fn next(&mut self, limits: Limits) -> Parsed {
        if self.head.is_none() {
            match self.next_head(limits) {
                Ok(Some(head)) => self.head = Some(head),
                Ok(None) => return Parsed::More,
                Err(refusal) => return Parsed::Refused(refusal),
            }
        }
        let Some(mut head) = self.head.take() else {
            return Parsed::More;
        };
        let pending = &self.bytes[self.start..];
        if pending.len() < head.body_bytes {
            let say = std::mem::take(&mut head.continue_due);
            self.head = Some(head);
            return if say { Parsed::Continue } else { Parsed::More };
        }
        head.parts.body = pending[..head.body_bytes].to_vec();
        self.start += head.body_bytes;
        Parsed::Complete(head.parts)
    }

    fn next_head(&mut self, limits: Limits) -> Result<Option<Head>, Refusal> {
        // Empty lines before a request line are skipped (RFC 9112, 2.2).
        while self.scanned == 0 {
            let pending = &self.bytes[self.start..];
            let skip = if pending.starts_with(b"\r\n") {
                2
            } else {
                usize::from(pending.starts_with(b"\n"))
            };
            if skip == 0 {
                break;
            }
            self.start += skip;
        }
        let pending = &self.bytes[self.start..];
        match pending.first() {
            None => return Ok(None),
            // Perhaps half of an empty line: to be looked at again as a whole.
            Some(b'\r') if pending.len() == 1 => return Ok(None),
            Some(first) if !(first.is_ascii_alphabetic() || *first == b'\r') => {
                return Err(malformed("the request line doesn't begin with a method"));
            }
            Some(_) => {}
        }
        let window = &pending[..pending.len().min(limits.head_max_bytes)];
        // Whole lines only, so that the result doesn't depend on where the bytes were cut.
        let line_end = window[self.scanned..]
            .iter()
            .rposition(|byte| *byte == b'\n');
        if let Some(at) = line_end {
            let lines = &window[..=self.scanned + at];
            if let Some((head, used)) = parse_head(lines, limits)? {
                self.start += used;
                self.scanned = 0;
                return Ok(Some(head));
            }
        }
        self.scanned = window.len();
        if window.len() == limits.head_max_bytes {
            if !window.contains(&b'\n') {
                let words = format!("the request line exceeds {} bytes", limits.head_max_bytes);
                return Err(Refusal::new(414, "uri_too_long", words));
            }
            return Err(Refusal::new(
                431,
                "head_too_large",
                format!(
                    "request line and headers exceed {} bytes; send fewer or shorter headers",
                    limits.head_max_bytes
                ),
            ));
        }
        Ok(None)
    }
}

fn malformed(why: impl std::fmt::Display) -> Refusal {
    Refusal::new(
        400,
        "malformed_request",
        format!("not an HTTP/1.1 request: {why}"),
    )
}

/// The head in `lines`, if complete, and its length in bytes.
fn parse_head(lines: &[u8], limits: Limits) -> Result<Option<(Head, usize)>, Refusal> {
    let mut fields = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut raw = httparse::Request::new(&mut fields);
    let used = match raw.parse(lines) {
        Ok(httparse::Status::Partial) => return Ok(None),
        Ok(httparse::Status::Complete(used)) => used,
        Err(httparse::Error::TooManyHeaders) => {
            let words = format!("more than {HEADERS_MAX} headers; send fewer");
            return Err(Refusal::new(431, "head_too_large", words));
        }
        Err(httparse::Error::Version) => {
            let words = "HTTP/1.1 and HTTP/1.0 are spoken here, without TLS; use one of them";
            return Err(Refusal::new(505, "http_version", words));
        }
        Err(error) => return Err(malformed(error)),
    };
    let mut headers = Vec::with_capacity(raw.headers.len());
    for field in raw.headers.iter() {
        let value = std::str::from_utf8(field.value)
            .map_err(|_| malformed(format_args!("header {} is not UTF-8", field.name)))?;
        headers.push((field.name.to_owned(), value.to_owned()));
    }
    let http_1_0 = raw.version == Some(0);
    let (path, query) = split_target(raw.path.unwrap_or_default(), &mut headers)?;
    check_host(&headers, http_1_0)?;
    let body_bytes = body_length(&headers, limits)?;
    let parts = Parts {
        method: raw.method.unwrap_or_default().to_owned(),
        path,
        query,
        keep_alive: keep_alive(&headers, http_1_0),
        headers,
        body: Vec::new(),
        http_1_0,
    };
    let continue_due = expects_continue(&parts)?;
    Ok(Some((
        Head {
            parts,
            body_bytes,
            continue_due,
        },
        used,
    )))
}

/// Path and query. The absolute form is taken as well (RFC 9112, 3.2.2); its authority replaces
/// the Host header.
fn split_target(
    target: &str,
    headers: &mut [(String, String)],
) -> Result<(String, Option<String>), Refusal> {
    let mut local = target;
    if let Some((scheme, rest)) = target.split_once("://")
        && (scheme.eq_ignore_ascii_case("http") || scheme.eq_ignore_ascii_case("https"))
    {
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, after) = rest.split_at(end);
        local = if after.is_empty() { "/" } else { after };
        if !local.starts_with('/') {
            return Err(malformed("a target without a path"));
        }
        let hosts = headers
            .iter_mut()
            .filter(|(name, _)| name.eq_ignore_ascii_case("host"));
        for (_, value) in hosts {
            authority.clone_into(value);
        }
    }
    if !(local.starts_with('/') || local == "*") {
        return Err(malformed("the target is neither a path nor an http URL"));
    }
    Ok(match local.split_once('?') {
        Some((path, query)) => (path.to_owned(), Some(query.to_owned())),
        None => (local.to_owned(), None),
    })
}

fn values<'h>(
    headers: &'h [(String, String)],
    name: &'static str,
) -> impl Iterator<Item = &'h str> {
    headers
        .iter()
        .filter(move |(field, _)| field.eq_ignore_ascii_case(name))
        .map(|(_, value)| value.as_str())
}

fn check_host(headers: &[(String, String)], http_1_0: bool) -> Result<(), Refusal> {
    match values(headers, "host").count() {
        1 => Ok(()),
        0 if http_1_0 => Ok(()),
        0 => Err(malformed("the Host header is missing")),
        _ => Err(malformed("more than one Host header")),
    }
}

/// The bytes of the body that follows; 0 without Content-Length.
fn body_length(headers: &[(String, String)], limits: Limits) -> Result<usize, Refusal> {
    if values(headers, "transfer-encoding").next().is_some() {
        let words = "Transfer-Encoding is not taken here; send the body with a Content-Length";
        return Err(Refusal::new(411, "length_required", words));
    }
    let mut lengths = values(headers, "content-length");
    let Some(length) = lengths.next() else {
        return Ok(0);
    };
    if lengths.next().is_some() {
        return Err(malformed("more than one Content-Length header"));
    }
    if length.is_empty() || !length.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(malformed("Content-Length is not a number"));
    }
    match length.parse::<usize>() {
        Ok(bytes) if bytes <= limits.body_max_bytes => Ok(bytes),
        _ => Err(Refusal::new(
            413,
            "body_too_large",
            format!(
                "a body of {length} bytes; at most {} are taken",
                limits.body_max_bytes
            ),
        )),
    }
}

fn keep_alive(headers: &[(String, String)], http_1_0: bool) -> bool {
    let mut keep = !http_1_0;
    for option in values(headers, "connection").flat_map(|value| value.split(',')) {
        let option = option.trim();
        if option.eq_ignore_ascii_case("close") {
            return false;
        }
        keep |= option.eq_ignore_ascii_case("keep-alive");
    }
    keep
}

fn expects_continue(parts: &Parts) -> Result<bool, Refusal> {
    match values(&parts.headers, "expect").next() {
        // An HTTP/1.0 client doesn't know 1xx answers (RFC 9110, 10.1.1).
        None => Ok(false),
        Some(value) if value.eq_ignore_ascii_case("100-continue") => Ok(!parts.http_1_0),
        Some(value) => {
            let words = format!("expectation {value:?} is unknown; only 100-continue is met");
            Err(Refusal::new(417, "expectation", words))
        }
    }
}

#[cfg(test)]
#[path = "parse_tests.rs"]
mod tests;
