//! The health listener: probes, metrics, the dashboard; read only, no secrets.

use super::api;
use super::front::{Answer, Handler, Request, Responder};
use super::status;
use crate::hub::Hub;

/// The dashboard: one page without anything from outside.
const DASHBOARD: &str = include_str!("dashboard.html");

/// Answers the health listener.
#[derive(Debug)]
pub struct Health {
    hub: Hub,
}

impl Health {
    /// The health of that daemon.
    #[must_use]
    pub fn new(hub: Hub) -> Health {
        Health { hub }
    }
}

impl Handler for Health {
    fn handle(&self, request: Request, mut responder: Responder) {
        let hub = &self.hub;
        let (route, known) = match request.path.as_str() {
            "/healthz" => ("healthz", true),
            "/readyz" => ("readyz", true),
            "/metrics" => ("metrics", true),
            "/" => ("dashboard", true),
            "/v1/status" => ("status", true),
            "/v1/events" => ("events", true),
            _ => ("", false),
        };
        responder.set_route(route);
        if !known {
            return responder.send(api::nowhere(&request.path));
        }
        if request.method != "GET" {
            let words = format!("{} takes GET and HEAD only", request.path);
            let answer = Answer::problem(405, "method", &words);
            return responder.send(answer.with_header("Allow", "GET, HEAD"));
        }
        let json = |(code, shown): (u16, serde_json::Value)| api::json(code, &shown);
        match route {
            "healthz" => responder.send(json(status::healthz(hub))),
            "readyz" => responder.send(json(status::readyz(hub))),
            "status" => responder.send(json((200, status::status(hub)))),
            "events" => api::events(hub, request, responder),
            "metrics" => {
                let mut answer = Answer::text(200, status::metrics(hub));
                answer.content_type = "text/plain; version=0.0.4; charset=utf-8".into();
                responder.send(answer);
            }
            _ => responder.send(dashboard()),
        }
    }
}

fn dashboard() -> Answer {
    let mut answer = Answer::text(200, DASHBOARD);
    answer.content_type = "text/html; charset=utf-8".into();
    let policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
                  connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; \
                  frame-ancestors 'none'";
    answer
        .with_header("Content-Security-Policy", policy)
        .with_header("X-Content-Type-Options", "nosniff")
        .with_header("Referrer-Policy", "no-referrer")
        .with_header("Cache-Control", "no-store")
}
