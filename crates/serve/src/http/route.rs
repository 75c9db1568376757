//! The way from a request to its answer.

use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::header::{ALLOW, HOST, HeaderValue};
use hyper::{Method, Request, StatusCode};
use ipam_core::model::keys;
use kv::{Content, Range, RangeRequest};
use serde::Serialize;
use tokio::time::timeout;

use super::answer::{Answer, json, text};
use super::{Shown, api, files, hosts, measured};

/// The longest time for the store to show that it is there.
const HEALTHY: Duration = Duration::from_secs(1);

/// The way by which a request came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// A port, which any page that a browser of this machine shows can ask.
    Network,
    /// A unix socket.
    Socket,
}

/// The answer to a request.
pub(super) async fn answer(request: &Request<Incoming>, origin: Origin, shown: &Arc<Shown>) -> Answer {
    if origin == Origin::Network && !names_us(request, shown) {
        let advice = "this name is not one of the daemon's; ask for 127.0.0.1 or localhost, or name it with --host";
        return text(StatusCode::MISDIRECTED_REQUEST, advice);
    }
    if ![Method::GET, Method::HEAD].contains(request.method()) {
        let mut answer = text(StatusCode::METHOD_NOT_ALLOWED, "everything here is read only: GET or HEAD");
        answer.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return answer;
    }
    let path = request.uri().path();
    match path {
        "/health" => health(shown).await,
        "/version" => version(shown),
        "/metrics" => measured::answer(shown).await,
        _ => match path.strip_prefix("/api/") {
            Some(question) => api::answer(question, request, shown).await,
            None => files::file(path, request.headers())
                .unwrap_or_else(|| text(StatusCode::NOT_FOUND, "there is nothing here")),
        },
    }
}

/// True if every name that the request has for its host is one of ours, and it has one.
fn names_us(request: &Request<Incoming>, shown: &Shown) -> bool {
    let of_headers = request.headers().get_all(HOST).iter().map(|host| host.to_str().unwrap_or_default());
    let mut names = of_headers.chain(request.uri().authority().map(|authority| authority.as_str())).peekable();
    names.peek().is_some() && names.all(|name| hosts::is_allowed(name, &shown.hosts))
}

/// Says whether the store can be read, by the cheapest of readings.
async fn health(shown: &Shown) -> Answer {
    let request = RangeRequest::new(Range::Key(keys::config())).with_content(Content::CountOnly);
    match timeout(HEALTHY, shown.store.range(request)).await {
        Ok(Ok(_)) => text(StatusCode::OK, "ok"),
        Ok(Err(error)) => text(StatusCode::SERVICE_UNAVAILABLE, error.to_string()),
        Err(_) => text(StatusCode::SERVICE_UNAVAILABLE, "the store did not answer within a second"),
    }
}

pub(super) fn version(shown: &Shown) -> Answer {
    #[derive(Serialize)]
    struct Version<'a> {
        name: &'static str,
        version: &'a str,
        store: &'a str,
        engine: &'a str,
    }
    let about = &shown.about;
    let version = Version { name: "margay", version: &about.version, store: &about.store, engine: &about.engine };
    json(StatusCode::OK, &version)
}
