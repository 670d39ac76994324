//! Who may ask: Host names and tokens. Knows nothing of sockets and routes.

use std::fs::File;
use std::hint::black_box;
use std::io::Read;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::front::{Answer, Request};

/// Fewer characters can be guessed.
const TOKEN_MIN_CHARS: usize = 16;
const TOKEN_MAX_BYTES: u64 = 4096;

/// Why a token file is refused, in words.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TokenError(String);

/// The secret of a listener.
#[derive(Clone)]
pub struct Token(Vec<u8>);

impl std::fmt::Debug for Token {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Token(…)")
    }
}

impl Token {
    /// Reads a token file; space around the token doesn't count.
    ///
    /// # Errors
    /// It can't be read, others can read or write it, or it holds no token of 16 characters or
    /// more without a space.
    pub fn load(path: &Path) -> Result<Token, TokenError> {
        let shown = path.display();
        let unreadable =
            |error| TokenError(format!("token file {shown}: {error}; name a readable file"));
        let file = File::open(path).map_err(unreadable)?;
        let mode = file.metadata().map_err(unreadable)?.mode();
        if mode & 0o027 != 0 {
            return Err(TokenError(format!(
                "token file {shown}: others can read it or its group can write it (mode {:04o}); \
                 chmod 0640 or less, and make a new token",
                mode & 0o7777
            )));
        }
        let mut text = String::new();
        file.take(TOKEN_MAX_BYTES)
            .read_to_string(&mut text)
            .map_err(unreadable)?;
        let token = text.trim();
        if token.chars().count() < TOKEN_MIN_CHARS {
            return Err(TokenError(format!(
                "token file {shown}: the token has {} characters, at least {TOKEN_MIN_CHARS} are \
                 needed; make one with `openssl rand -hex 32`",
                token.chars().count()
            )));
        }
        if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(TokenError(format!(
                "token file {shown}: the token holds a space or a character beyond ASCII; make \
                 one with `openssl rand -hex 32`"
            )));
        }
        Ok(Token(token.as_bytes().to_vec()))
    }

    /// Whether this is the token, in a time that depends on the length of `given` only.
    #[must_use]
    pub fn matches(&self, given: &[u8]) -> bool {
        let mut differs = u8::from(self.0.len() != given.len());
        for (at, byte) in given.iter().enumerate() {
            differs |= black_box(byte ^ self.0[at % self.0.len()]);
        }
        black_box(differs) == 0
    }
}

/// Host names under which a TCP listener may be asked: it keeps foreign web pages from reaching
/// it through a name of theirs (DNS rebinding).
#[derive(Debug, Clone)]
pub struct AllowedHosts(Vec<String>);

impl AllowedHosts {
    /// The configured names, or the listen address and localhost if there are none. A name without
    /// a port stands for every port.
    #[must_use]
    pub fn new(listen: SocketAddr, configured: &[String]) -> AllowedHosts {
        if !configured.is_empty() {
            return AllowedHosts(
                configured
                    .iter()
                    .map(|name| name.to_ascii_lowercase())
                    .collect(),
            );
        }
        let own = if listen.is_ipv4() {
            listen.ip().to_string()
        } else {
            format!("[{}]", listen.ip())
        };
        AllowedHosts(vec![own, "localhost".to_owned()])
    }

    /// Whether that Host value may be used.
    #[must_use]
    pub fn allows(&self, host: &str) -> bool {
        let host = host.to_ascii_lowercase();
        // The colons of an IPv6 address stand within brackets.
        let bare = match host.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
            _ => host.as_str(),
        };
        self.0.iter().any(|name| *name == host || name == bare)
    }
}

/// The rules of one listener; the default lets everybody in (a unix socket has its mode).
#[derive(Debug, Clone, Default)]
pub struct Guard {
    /// Checked when set.
    pub hosts: Option<AllowedHosts>,
    /// Asked for when set.
    pub token: Option<Token>,
    /// The token is taken as the password of Basic too, for browsers.
    pub basic: bool,
    /// Paths that need no token.
    pub open_paths: Vec<&'static str>,
}

impl Guard {
    /// # Errors
    /// The answer for whoever may not ask: 421 for a wrong Host, 401 for a wrong or missing token.
    // An answer is made once per refusal; boxing it would save nothing.
    #[allow(clippy::result_large_err)]
    pub fn check(&self, request: &Request) -> Result<(), Answer> {
        // HTTP/1.0 may lack a Host; browsers never do.
        if let (Some(hosts), Some(host)) = (&self.hosts, request.header("host"))
            && !hosts.allows(host)
        {
            let words = format!("Host {host:?} is not served here; add it to allowed_hosts");
            return Err(Answer::problem(421, "misdirected", &words));
        }
        let Some(token) = &self.token else {
            return Ok(());
        };
        if self.open_paths.contains(&request.path.as_str()) {
            return Ok(());
        }
        let given = request
            .header("authorization")
            .and_then(|value| self.secret(value));
        match given {
            Some(given) if token.matches(&given) => Ok(()),
            given => Err(self.unauthorized(given.is_some())),
        }
    }

    fn secret(&self, authorization: &str) -> Option<Vec<u8>> {
        let (scheme, value) = authorization.split_once(' ')?;
        let value = value.trim();
        if scheme.eq_ignore_ascii_case("bearer") {
            return Some(value.as_bytes().to_vec());
        }
        if !(self.basic && scheme.eq_ignore_ascii_case("basic")) {
            return None;
        }
        let pair = base64(value)?;
        let colon = pair.iter().position(|byte| *byte == b':')?;
        Some(pair[colon + 1..].to_vec())
    }

    fn unauthorized(&self, wrong: bool) -> Answer {
        let words = if wrong {
            "the token is not the one of the token file; send the right one"
        } else {
            "a token is needed: send `Authorization: Bearer TOKEN`"
        };
        let answer = Answer::problem(401, "unauthorized", words)
            .with_header("WWW-Authenticate", "Bearer realm=\"volward\"");
        if self.basic {
            answer.with_header("WWW-Authenticate", "Basic realm=\"volward\"")
        } else {
            answer
        }
    }
}

/// Decodes base64 (RFC 4648, 4), with or without padding.
fn base64(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3 + 2);
    let (mut bits, mut held) = (0_u32, 0_u32);
    for byte in text.trim_end_matches('=').bytes() {
        let digit = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = (bits << 6 | u32::from(digit)) & 0x3fff;
        held += 6;
        if held >= 8 {
            held -= 8;
            bytes.push(((bits >> held) & 0xff) as u8);
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::front::Peer;
    use std::os::unix::fs::PermissionsExt;

    const SECRET: &str = "0123456789abcdef";

    fn request(path: &str, headers: &[(&str, &str)]) -> Request {
        Request {
            method: "GET".to_owned(),
            path: path.to_owned(),
            query: None,
            headers: headers
                .iter()
                .map(|(n, v)| ((*n).to_owned(), (*v).to_owned()))
                .collect(),
            body: Vec::new(),
            peer: Peer::Unix,
            last_call: false,
        }
    }

    #[test]
    fn token_files() {
        let path = std::env::temp_dir().join(format!("vw-token-{}", std::process::id()));
        let load = |text: &str, mode: u32| {
            std::fs::write(&path, text).expect("written");
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(&path, mode).expect("the mode");
            Token::load(&path).map_err(|error| error.to_string())
        };
        assert!(
            load(&format!("{SECRET}\n"), 0o600)
                .expect("taken")
                .matches(SECRET.as_bytes())
        );
        assert!(load(SECRET, 0o640).is_ok());
        assert!(
            load(SECRET, 0o644)
                .expect_err("readable")
                .contains("others can read")
        );
        assert!(
            load("\n", 0o600)
                .expect_err("empty")
                .contains("0 characters")
        );
        assert!(
            load("012345678 abcdefgh", 0o600)
                .expect_err("a space")
                .contains("a space")
        );
        std::fs::remove_file(&path).expect("removed");
    }

    #[test]
    fn tokens_are_compared_whole() {
        let token = Token(SECRET.as_bytes().to_vec());
        assert!(token.matches(SECRET.as_bytes()));
        assert!(!token.matches(b""));
        assert!(!token.matches(&SECRET.as_bytes()[..15]));
        assert!(!token.matches(format!("{SECRET}{SECRET}").as_bytes()));
        assert!(!token.matches(b"0123456789abcdeF"));
    }

    #[test]
    fn who_gets_in() {
        let guard = Guard {
            token: Some(Token(SECRET.as_bytes().to_vec())),
            basic: true,
            open_paths: vec!["/healthz"],
            hosts: Some(AllowedHosts::new(([127, 0, 0, 1], 9701).into(), &[])),
        };
        let status = |path, headers: &[(&str, &str)]| {
            guard
                .check(&request(path, headers))
                .map_err(|answer| answer.status)
        };
        assert_eq!(status("/healthz", &[]), Ok(()));
        assert_eq!(status("/healthz/", &[]), Err(401));
        assert_eq!(
            status("/", &[("AUTHORIZATION", "bearer 0123456789abcdef")]),
            Ok(())
        );
        assert_eq!(
            status("/", &[("Authorization", "Bearer 0123456789abcdee")]),
            Err(401)
        );
        // any:0123456789abcdef
        let basic = [("Authorization", "Basic YW55OjAxMjM0NTY3ODlhYmNkZWY=")];
        assert_eq!(status("/", &basic), Ok(()));
        assert_eq!(status("/healthz", &[("Host", "127.0.0.1:9701")]), Ok(()));
        assert_eq!(status("/healthz", &[("Host", "LOCALHOST")]), Ok(()));
        assert_eq!(
            status("/healthz", &[("Host", "evil.example:9701")]),
            Err(421)
        );
    }
}
