//! Checks the host name of a request, then routes the request to the web page's API, to `/metrics` or to a file of the
//! web page.
//!
//! A page of another site can let its own host name resolve to 127.0.0.1 (DNS rebinding). After DNS rebinding, the
//! browser sends the malicious page's requests to this daemon, with that page's host name in `Host`. The daemon rejects
//! requests whose host name is not this machine's own.

use std::fmt::Write;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::header::{ALLOW, CACHE_CONTROL, ETAG, HOST, HeaderValue, IF_NONE_MATCH};
use hyper::{HeaderMap, Method, Request, StatusCode};
use ipam_core::model::keys;
use ipam_core::samples::{Samples, oldest_revision};
use kv::{Content, Deadline, Range, RangeRequest};
use serde::Serialize;
use tokio::time::timeout;

use super::answer::{HttpError, HttpResponse, json, text, whole};
use super::{PageContext, api};

const HEALTH_TIMEOUT: Duration = Duration::from_secs(1);

/// How a request reached the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// The request came through a TCP port. Any web page in a browser on this machine can send requests to the daemon's
    /// TCP port.
    Network,
    /// The request came through a unix socket.
    Socket,
}

pub(super) async fn answer(request: &Request<Incoming>, origin: Origin, page: &Arc<PageContext>) -> HttpResponse {
    if origin == Origin::Network && !has_allowed_host(request, page) {
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
        "/health" => health(page).await,
        "/version" => version(page),
        "/metrics" => metrics_answer(page).await,
        _ => match path.strip_prefix("/api/") {
            Some(question) => api::answer(question, request, page).await,
            None => page_file(path, request.headers())
                .unwrap_or_else(|| text(StatusCode::NOT_FOUND, "there is nothing here")),
        },
    }
}

/// Returns true if a request names at least one host, and every host that it names is allowed.
fn has_allowed_host(request: &Request<Incoming>, page: &PageContext) -> bool {
    let of_headers = request.headers().get_all(HOST).iter().map(|host| host.to_str().unwrap_or_default());
    let mut names = of_headers.chain(request.uri().authority().map(|authority| authority.as_str())).peekable();
    names.peek().is_some() && names.all(|name| is_allowed(name, &page.hosts))
}

/// Reports whether the store can be read, with the cheapest possible read.
async fn health(page: &PageContext) -> HttpResponse {
    let request = RangeRequest::new(Range::Key(keys::config())).with_content(Content::CountOnly);
    match timeout(HEALTH_TIMEOUT, page.store.range(request)).await {
        Ok(Ok(_)) => text(StatusCode::OK, "ok"),
        Ok(Err(error)) => text(StatusCode::SERVICE_UNAVAILABLE, error.to_string()),
        Err(_) => text(StatusCode::SERVICE_UNAVAILABLE, "the store did not answer within a second"),
    }
}

pub(super) fn version(page: &PageContext) -> HttpResponse {
    #[derive(Serialize)]
    struct Version<'a> {
        name: &'static str,
        version: &'a str,
        store: &'a str,
        engine: &'a str,
    }
    let about = &page.about;
    let version = Version { name: "margay", version: &about.version, store: &about.store, engine: &about.engine };
    json(StatusCode::OK, &version)
}

/// Returns whether `host`, with or without a port, is a loopback name or is in `named`.
fn is_allowed(host: &str, named: &[String]) -> bool {
    let Some(name) = without_port(host) else { return false };
    let is_loopback = name.eq_ignore_ascii_case("localhost") || name.parse().is_ok_and(|ip: IpAddr| ip.is_loopback());
    is_loopback || named.iter().any(|other| other.trim_matches(['[', ']']).eq_ignore_ascii_case(name))
}

/// Returns the name or address in `host` without the port. Returns `None` if `host` is malformed, for example if its
/// port has characters other than digits.
fn without_port(host: &str) -> Option<&str> {
    let (name, port) = match host.strip_prefix('[') {
        Some(rest) => rest.split_once(']')?,
        None => host.split_at(host.find(':').unwrap_or(host.len())),
    };
    let is_port =
        port.is_empty() || port.strip_prefix(':').is_some_and(|port| port.bytes().all(|b| b.is_ascii_digit()));
    (is_port && !name.is_empty()).then_some(name)
}

const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Returns the answer to `/metrics`. If the store cannot be read, the store's metrics are missing and
/// `margay_serve_store_read` is 0.
async fn metrics_answer(page: &Arc<PageContext>) -> HttpResponse {
    let samples = match timeout(page.limits.answer, samples(page)).await {
        Ok(Ok(samples)) => Some(samples.text()),
        Ok(Err(failure)) => {
            tracing::warn!(error = failure.text, "cannot read the store; answering without the metrics of the store");
            None
        }
        Err(_) => None,
    };
    let read = u8::from(samples.is_some());
    let mut text = samples.unwrap_or_default();
    _ = write!(
        text,
        "# HELP margay_serve_store_read 1 if the store could be read for this answer, else 0.\n\
         # TYPE margay_serve_store_read gauge\nmargay_serve_store_read {read}\n{}# EOF\n",
        page.metrics.text()
    );
    whole(StatusCode::OK, METRICS_TYPE, text)
}

async fn samples(page: &Arc<PageContext>) -> Result<Samples, HttpError> {
    let (node, boot) = (&page.about.node, page.about.boot.as_deref());
    let mut samples = Samples::default();
    let revision = match &page.reach {
        Some(reach) => {
            let share = page.operator.ipam().share_of(node, &reach(), Deadline::after(page.limits.answer)).await?;
            samples.of_node(&share, boot);
            share.revision
        }
        None => {
            let census = page.cache.census(page.operator.ipam()).await?;
            samples.of_all(&census, node, boot);
            // If a forecast is slow, the answer is sent without it; the forecast continues, and a later answer includes
            // it.
            let forecast = tokio::spawn({
                let page = Arc::clone(page);
                async move { page.cache.forecast(&page.operator).await }
            });
            match timeout(page.limits.answer / 2, forecast).await {
                Ok(Ok(Ok(forecast))) => forecast.pools.iter().for_each(|pool| pool.sample(&mut samples)),
                Ok(Ok(Err(failure))) => {
                    tracing::warn!(
                        error = failure.text,
                        "cannot read the history of the store; leaving the pool forecast out of the metrics"
                    );
                }
                _ => tracing::warn!("the pool forecast was not ready in time; leaving the forecast out of the metrics"),
            }
            census.revision
        }
    };
    samples.of_store(revision, oldest_revision(&*page.store, revision).await?);
    if let Some(held) = &page.history
        && let Ok(history) = held
            .with_embedded(|store, _| async move {
                Ok((store.oldest().await?.time, store.status().log_bytes, store.retention().bytes))
            })
            .await
    {
        let (oldest, log_bytes, most) = history;
        samples.of_history(oldest, log_bytes, most);
    }
    Ok(samples)
}

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

/// The path, content type and content of one file of the web page.
type PageFile = (&'static str, &'static str, &'static str);

const PAGE_FILES: &[PageFile] = &[
    ("/", HTML, include_str!("page/index.html")),
    ("/style.css", CSS, include_str!("page/style.css")),
    ("/theme.js", SCRIPT, include_str!("page/theme.js")),
    ("/page.js", SCRIPT, include_str!("page/page.js")),
    ("/api.js", SCRIPT, include_str!("page/api.js")),
    ("/dom.js", SCRIPT, include_str!("page/dom.js")),
    ("/format.js", SCRIPT, include_str!("page/format.js")),
    ("/overview.js", SCRIPT, include_str!("page/overview.js")),
    ("/pool.js", SCRIPT, include_str!("page/pool.js")),
    ("/map.js", SCRIPT, include_str!("page/map.js")),
    ("/block.js", SCRIPT, include_str!("page/block.js")),
    ("/address.js", SCRIPT, include_str!("page/address.js")),
    ("/events.js", SCRIPT, include_str!("page/events.js")),
    ("/problems.js", SCRIPT, include_str!("page/problems.js")),
];

/// Returns the file of the web page that has this path. If the browser's `If-None-Match` has the file's tag, returns
/// status 304 without content.
fn page_file(path: &str, headers: &HeaderMap) -> Option<HttpResponse> {
    let (_, kind, text) = PAGE_FILES.iter().find(|(at, ..)| *at == path)?;
    let etag = etag(text);
    let has_it = headers.get(IF_NONE_MATCH).is_some_and(|held| held.as_bytes() == etag.as_bytes());
    let mut answer = match has_it {
        true => whole(StatusCode::NOT_MODIFIED, kind, ""),
        false => whole(StatusCode::OK, kind, *text),
    };
    answer.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    if let Ok(etag) = HeaderValue::from_str(&etag) {
        answer.headers_mut().insert(ETAG, etag);
    }
    Some(answer)
}

fn etag(text: &str) -> String {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    format!("\"{:016x}\"", hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn route_allows_only_loopback_and_named_hosts() {
        let named = vec!["ipam.lan".to_owned(), "10.1.2.3".to_owned(), "[fd00::1]".to_owned()];
        for host in [
            "localhost",
            "LOCALHOST:8080",
            "127.0.0.1",
            "127.1.2.3:80",
            "[::1]",
            "[::1]:80",
            "ipam.lan",
            "Ipam.Lan:81",
            "10.1.2.3:9",
            "[fd00::1]:9",
        ] {
            assert!(is_allowed(host, &named), "{host}");
        }
        for host in [
            "",
            ":80",
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "10.1.2.4",
            "[::2]",
            "::1",
            "[::1",
            "[::1]x",
            "localhost:80x",
            "localhost@evil.example",
            "evil.example#localhost",
            "0.0.0.0",
        ] {
            assert!(!is_allowed(host, &named), "{host}");
        }
    }

    #[test]
    fn route_files_name_only_existing_files() {
        let is_there = |path: &str| PAGE_FILES.iter().any(|(at, ..)| *at == path);
        for (path, _, text) in PAGE_FILES {
            for line in text.lines().filter(|line| line.starts_with("import ")) {
                let named = line.rsplit('"').nth(1).and_then(|name| name.strip_prefix('.')).unwrap();
                assert!(is_there(named), "{path} imports {named}");
            }
            for part in text.split(['"', '\'']).filter(|_| *path == "/") {
                assert!(!part.ends_with(".js") || is_there(&format!("/{part}")), "{path} names {part}");
            }
        }
    }

    #[test]
    fn route_files_name_no_other_host_and_write_no_html() {
        for (path, _, text) in PAGE_FILES {
            for foreign in
                ["https://", "http://", "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("]
            {
                let found = text.matches(foreign).count();
                // The URL of the SVG namespace is only a name. Browsers send no request to the URL of an XML namespace.
                let names = text.matches("http://www.w3.org/2000/svg").count();
                assert_eq!(found, if foreign == "http://" { names } else { 0 }, "{foreign} in {path}");
            }
        }
    }
}
