//! Answers, and how they become bytes (status line and headers by `tiny_http`).

use std::borrow::Cow;

use tiny_http::{Header, Response, StatusCode};

/// What a request gets back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The HTTP status, 200 to 599.
    pub status: u16,
    /// The media type of `body`; not sent when empty.
    pub content_type: Cow<'static, str>,
    /// Further headers. `Content-Length`, `Connection`, `Date` and `Server` are the front's.
    pub headers: Vec<(&'static str, String)>,
    /// The content, sent with a Content-Length; left out for HEAD.
    pub body: Vec<u8>,
}

impl Answer {
    /// A JSON answer.
    #[must_use]
    pub fn json(status: u16, body: Vec<u8>) -> Answer {
        Answer {
            status,
            content_type: "application/json".into(),
            headers: Vec::new(),
            body,
        }
    }

    /// A plain text answer.
    #[must_use]
    pub fn text(status: u16, body: impl Into<String>) -> Answer {
        Answer {
            status,
            content_type: "text/plain; charset=utf-8".into(),
            headers: Vec::new(),
            body: body.into().into_bytes(),
        }
    }

    /// An error as RFC 9457 problem details: `slug` is its stable type, `detail` names the thing,
    /// the cause and the mend.
    #[must_use]
    pub fn problem(status: u16, slug: &str, detail: &str) -> Answer {
        let body = serde_json::json!({
            "type": slug,
            "title": StatusCode(status).default_reason_phrase(),
            "status": status,
            "detail": detail,
        });
        Answer {
            status,
            content_type: "application/problem+json".into(),
            headers: Vec::new(),
            body: body.to_string().into_bytes(),
        }
    }

    /// The same answer with one more header.
    #[must_use]
    pub fn with_header(mut self, name: &'static str, value: impl Into<String>) -> Answer {
        self.headers.push((name, value.into()));
        self
    }
}

/// How the answer travels: a property of the request and of the connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Encoding {
    pub head_only: bool,
    pub keep_alive: bool,
    /// An HTTP/1.0 client has to be told that its connection stays.
    pub say_keep_alive: bool,
}

/// The bytes of a whole response.
pub(crate) fn encode(answer: &Answer, how: Encoding) -> Vec<u8> {
    let mut response = Response::new(
        StatusCode(answer.status),
        Vec::new(),
        std::io::empty(),
        Some(answer.body.len()),
        None,
    )
    // Never chunked: every length is known here.
    .with_chunked_threshold(usize::MAX);
    let own = [
        ("Server", "volward"),
        ("Content-Type", answer.content_type.as_ref()),
    ];
    let given = answer
        .headers
        .iter()
        .map(|(name, value)| (*name, value.as_str()));
    for (name, value) in own.into_iter().chain(given) {
        if !value.is_empty()
            && let Ok(header) = Header::from_bytes(name.as_bytes(), harmless(value).as_bytes())
        {
            response.add_header(header);
        }
    }
    let mut bytes = Vec::with_capacity(256 + answer.body.len());
    let written = response.raw_print(&mut bytes, (1, 1).into(), &[], true, None);
    debug_assert!(written.is_ok(), "writing into memory can't fail");
    let bodiless = matches!(answer.status, 204 | 304);
    // tiny_http ends with the Content-Length and the empty line, and has no say about Connection.
    bytes.truncate(bytes.len().saturating_sub(2));
    if bodiless && bytes.ends_with(b"Content-Length: 0\r\n") {
        bytes.truncate(bytes.len() - b"Content-Length: 0\r\n".len());
    }
    if !how.keep_alive {
        bytes.extend_from_slice(b"Connection: close\r\n");
    } else if how.say_keep_alive {
        bytes.extend_from_slice(b"Connection: keep-alive\r\n");
    }
    bytes.extend_from_slice(b"\r\n");
    if !how.head_only && !bodiless {
        bytes.extend_from_slice(&answer.body);
    }
    bytes
}

/// A header value without anything that could end the header: what a client sent must not become
/// a header of ours.
fn harmless(value: &str) -> Cow<'_, str> {
    let bad = |character: char| !(character == ' ' || character.is_ascii_graphic());
    if value.contains(bad) {
        value.replace(bad, "?").into()
    } else {
        value.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEEP: Encoding = Encoding {
        head_only: false,
        keep_alive: true,
        say_keep_alive: false,
    };

    fn text(answer: &Answer, how: Encoding) -> String {
        String::from_utf8(encode(answer, how)).expect("ASCII")
    }

    #[test]
    fn length_and_body_of_each_form() {
        let answer = Answer::text(200, "hello");
        let whole = text(&answer, KEEP);
        assert!(whole.starts_with("HTTP/1.1 200 OK\r\n"), "{whole}");
        assert!(whole.contains("\r\nContent-Length: 5\r\n") && whole.ends_with("\r\n\r\nhello"));
        assert!(!whole.contains("Connection:"), "{whole}");
        let head = text(
            &answer,
            Encoding {
                head_only: true,
                ..KEEP
            },
        );
        assert!(
            head.contains("\r\nContent-Length: 5\r\n") && head.ends_with("\r\n\r\n"),
            "{head}"
        );
        let last = text(
            &answer,
            Encoding {
                keep_alive: false,
                ..KEEP
            },
        );
        assert!(last.contains("\r\nConnection: close\r\n"), "{last}");
        let old = text(
            &answer,
            Encoding {
                say_keep_alive: true,
                ..KEEP
            },
        );
        assert!(old.contains("\r\nConnection: keep-alive\r\n"), "{old}");
        let none = text(&Answer::text(204, ""), KEEP);
        assert!(
            !none.contains("Content-Length") && none.ends_with("\r\n\r\n"),
            "{none}"
        );
    }

    #[test]
    fn big_answers_are_not_chunked() {
        let whole = text(&Answer::text(200, "x".repeat(1 << 20)), KEEP);
        assert!(whole.contains("Content-Length: 1048576\r\n") && !whole.contains("chunked"));
    }

    #[test]
    fn a_value_can_not_start_a_header() {
        let answer = Answer::text(200, "").with_header("Location", "/a\r\nSet-Cookie: b");
        let whole = text(&answer, KEEP);
        assert!(whole.contains("Location: /a??Set-Cookie: b\r\n"), "{whole}");
    }

    #[test]
    fn a_problem_is_whole() {
        let answer = Answer::problem(413, "body_too_large", "a \"big\" one");
        let value: serde_json::Value = serde_json::from_slice(&answer.body).expect("JSON");
        assert_eq!(value["type"], "body_too_large");
        assert_eq!(value["title"], "Payload Too Large");
        assert_eq!(value["status"], 413);
        assert_eq!(value["detail"], "a \"big\" one");
    }
}
