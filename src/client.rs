//! A small HTTP/1.1 client for the API, over a unix socket or TCP; one request per connection.
//!
//! It knows the wire and nothing of commands or terminals. Everything it reads is bounded.

use serde_json::Value;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

/// The longest answer that is read, in bytes.
const ANSWER_MAX: u64 = 64 << 20;

/// Where the API is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// A unix socket.
    Unix(PathBuf),
    /// `host:port`.
    Tcp(String),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Unix(path) => write!(f, "{}", path.display()),
            Target::Tcp(address) => write!(f, "http://{address}"),
        }
    }
}

impl Target {
    /// A socket path, `unix:PATH` or `http://HOST:PORT`.
    ///
    /// # Errors
    /// A sentence with the mend.
    pub fn parse(text: &str) -> Result<Target, String> {
        let path = text.strip_prefix("unix:").unwrap_or(text);
        if path.starts_with('/') {
            return Ok(Target::Unix(PathBuf::from(path)));
        }
        match text
            .strip_prefix("http://")
            .map(|rest| rest.trim_end_matches('/'))
        {
            Some(rest) if rest.contains('/') || rest.is_empty() => {}
            Some(rest)
                if rest
                    .rsplit_once(':')
                    .is_some_and(|(_, p)| p.parse::<u16>().is_ok()) =>
            {
                return Ok(Target::Tcp(rest.to_owned()));
            }
            Some(rest) => return Ok(Target::Tcp(format!("{rest}:9700"))),
            None => {}
        }
        Err(format!(
            "{text:?} is no API address; use a socket path such as /run/volward/api.sock or a URL \
             such as http://127.0.0.1:9700"
        ))
    }
}

/// A way to one API.
#[derive(Clone)]
pub struct Client {
    target: Target,
    token: Option<String>,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The token stays out of logs.
        f.debug_struct("Client")
            .field("target", &self.target)
            .finish_non_exhaustive()
    }
}

/// An answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// The HTTP status.
    pub status: u16,
    /// The JSON of the body; null if there was none.
    pub body: Value,
}

impl Client {
    /// A client; `token` goes into `Authorization`.
    #[must_use]
    pub fn new(target: Target, token: Option<String>) -> Client {
        Client { target, token }
    }

    /// Where it goes.
    #[must_use]
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Sends one request and reads its answer. No single read or write takes longer than
    /// `timeout`.
    ///
    /// # Errors
    /// When the daemon can't be reached or doesn't answer in HTTP and JSON.
    pub fn send(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
        timeout: Duration,
    ) -> io::Result<Answer> {
        let body = body.map(Value::to_string).unwrap_or_default();
        let host = match &self.target {
            Target::Unix(_) => "localhost",
            Target::Tcp(address) => address,
        };
        let mut request = format!(
            "{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\
             Accept: application/json\r\nContent-Length: {}\r\n",
            body.len()
        );
        if !body.is_empty() {
            request.push_str("Content-Type: application/json\r\n");
        }
        if let Some(token) = &self.token {
            request.push_str(&format!("Authorization: Bearer {token}\r\n"));
        }
        request.push_str("\r\n");
        request.push_str(&body);
        let mut bytes = Vec::new();
        match &self.target {
            Target::Unix(path) => {
                let stream = UnixStream::connect(path)?;
                stream.set_read_timeout(Some(timeout))?;
                stream.set_write_timeout(Some(timeout))?;
                exchange(stream, &request, &mut bytes)?;
            }
            Target::Tcp(address) => {
                let address = address
                    .to_socket_addrs()?
                    .next()
                    .ok_or(io::ErrorKind::NotFound)?;
                let stream = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
                stream.set_read_timeout(Some(timeout))?;
                stream.set_write_timeout(Some(timeout))?;
                exchange(stream, &request, &mut bytes)?;
            }
        }
        answer(&bytes)
    }
}

fn exchange<S: Read + Write>(mut stream: S, request: &str, bytes: &mut Vec<u8>) -> io::Result<()> {
    // A server may answer and close before it has read all; its answer counts.
    let sent = stream.write_all(request.as_bytes());
    let read = stream.take(ANSWER_MAX).read_to_end(bytes);
    if bytes.is_empty() {
        sent?;
        read?;
    }
    Ok(())
}

fn broken(why: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("the answer is no HTTP of volward: {why}"),
    )
}

fn answer(bytes: &[u8]) -> io::Result<Answer> {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut head = httparse::Response::new(&mut headers);
    let length = match head.parse(bytes) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) => return Err(broken("it ends in its head")),
        Err(error) => return Err(broken(&error.to_string())),
    };
    let header = |name: &str| {
        let found = head
            .headers
            .iter()
            .find(|h| h.name.eq_ignore_ascii_case(name));
        found.and_then(|h| std::str::from_utf8(h.value).ok())
    };
    let rest = &bytes[length..];
    let body = if header("transfer-encoding").is_some_and(|v| v.eq_ignore_ascii_case("chunked")) {
        unchunk(rest)?
    } else {
        match header("content-length").and_then(|v| v.trim().parse::<usize>().ok()) {
            Some(length) if length > rest.len() => return Err(broken("it ends in its body")),
            Some(length) => rest[..length].to_vec(),
            None => rest.to_vec(),
        }
    };
    let status = head.code.unwrap_or(0);
    let body = if body.is_empty() {
        Value::Null
    } else {
        serde_json::from_slice(&body)
            .map_err(|error| broken(&format!("status {status}, {error}")))?
    };
    Ok(Answer { status, body })
}

fn unchunk(mut rest: &[u8]) -> io::Result<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        match httparse::parse_chunk_size(rest) {
            Ok(httparse::Status::Complete((_, 0))) => return Ok(body),
            Ok(httparse::Status::Complete((start, size))) => {
                let size = usize::try_from(size).map_err(|_| broken("a chunk is too big"))?;
                let end = start.checked_add(size).filter(|end| end + 2 <= rest.len());
                let end = end.ok_or_else(|| broken("it ends in a chunk"))?;
                body.extend_from_slice(&rest[start..end]);
                rest = &rest[end + 2..];
            }
            _ => return Err(broken("a chunk has no size")),
        }
    }
}
