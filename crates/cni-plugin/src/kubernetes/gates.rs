//! Waits for readiness gates, the servers that must respond before an ADD continues (`readiness_gates`).

use std::time::Duration;

use agent::{CniError, Code, Result};
use bytes::Bytes;
use http_body_util::Empty;
use hyper::header::{AUTHORIZATION, HOST, USER_AGENT};
use hyper::{Request, Uri};
use hyper_util::rt::TokioIo;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout_at};

use super::api::deadline;
use super::dial::{self, ApiAddress, ApiRoute, TlsTrust, password};
use crate::gojson::quoted;

/// How often a readiness gate is queried, and how long it may take to open. As in Calico's plugin, the first query is
/// sent only after a pause.
const GATE_PACE: GatePace = GatePace { interval: Duration::from_secs(5), longest: Duration::from_secs(30) };

#[derive(Clone, Copy)]
struct GatePace {
    interval: Duration,
    longest: Duration,
}

/// Waits until all readiness gates are open, one gate after another. A readiness gate is open once it responds with an
/// HTTP status from 200 to 399; the rest of the response is ignored. Each readiness gate must open within 30 seconds,
/// and all readiness gates together within `left`.
///
/// # Errors
/// CNI error code 999 with Calico's message if a gate is not a URL, or does not open within 30 seconds. CNI error code
/// 11 if the gates were not all open within `left`.
pub(crate) async fn wait(urls: &[String], left: Duration) -> Result<()> {
    wait_at(urls, left, GATE_PACE).await
}

async fn wait_at(urls: &[String], left: Duration, pace: GatePace) -> Result<()> {
    let deadline = deadline(left);
    let gates: Vec<ReadinessGate> = urls.iter().map(|url| ReadinessGate::new(url)).collect::<Result<_>>()?;
    for gate in gates {
        let its_own = Instant::now() + pace.longest;
        let mut last = "it gave no answer".to_owned();
        let opened = timeout_at(its_own.min(deadline), gate.wait_until_open(pace.interval, &mut last)).await;
        opened.map_err(|_| {
            let code = if its_own <= deadline { Code::Internal } else { Code::TryAgain };
            let details = format!("the readiness gate {} is not open: {last}", gate.way.address.url());
            CniError::new(code, "context deadline exceeded").with_details(details)
        })?;
    }
    Ok(())
}

struct ReadinessGate {
    way: ApiRoute,
    uri: Uri,
}

impl ReadinessGate {
    fn new(url: &str) -> Result<Self> {
        // The error messages contain the URL without its user and password.
        let shown = without_user(url);
        let invalid =
            |reason: String| CniError::internal(format!("invalid URL set for ReadinessGates:{shown} Error:{reason}"));
        let no_uri = || invalid(format!("parse {}: invalid URI for request", quoted(&shown)));
        let uri: Uri = url.parse().map_err(|_| no_uri())?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) {
            let has_scheme = uri.scheme().is_some() || url.starts_with('/');
            let scheme = quoted(uri.scheme_str().unwrap_or_default());
            return Err(if has_scheme { invalid(format!("unsupported protocol scheme {scheme}")) } else { no_uri() });
        }
        let address = ApiAddress::of(&uri).ok_or_else(no_uri)?;
        let way = ApiRoute::new(address, None, None, || dial::tls_config(&TlsTrust::System, None));
        let way = way.map_err(|problem| CniError::internal(problem.what))?;
        Ok(Self { way: way.ok_or_else(no_uri)?, uri })
    }

    /// Queries a readiness gate repeatedly until it is open. After each failed query of the gate, the reason of the
    /// failure is stored in `last`.
    async fn wait_until_open(&self, pause: Duration, last: &mut String) {
        let mut tries = interval(pause);
        // After a slow query of a gate, the next query waits a full interval (`MissedTickBehavior::Delay`).
        tries.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tries.tick().await;
            match self.ask().await {
                Ok(status) if (200..400).contains(&status) => return,
                Ok(status) => *last = format!("it answered {status}"),
                Err(reason) => *last = reason,
            }
        }
    }

    /// Queries a readiness gate once and returns the HTTP status of the response.
    async fn ask(&self) -> Result<u16, String> {
        let stream = self.way.open().await.map_err(|failure| failure.to_string())?;
        let broken = |error: hyper::Error| format!("the connection broke: {error}");
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
        tokio::spawn(connection);
        let path = self.uri.path_and_query().map_or("/", |path| path.as_str());
        let mut request = Request::get(path)
            .header(HOST, &self.way.address.authority)
            .header(USER_AGENT, concat!("margay/", env!("CARGO_PKG_VERSION")));
        if let Some(password) = password(&self.uri) {
            request = request.header(AUTHORIZATION, password);
        }
        let request = request.body(Empty::<Bytes>::new()).map_err(|error| error.to_string())?;
        Ok(sender.send_request(request).await.map_err(broken)?.status().as_u16())
    }
}

/// Removes the user and the password from a URL.
fn without_user(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").map_or(("", url), |(scheme, rest)| (&url[..scheme.len() + 3], rest));
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let host = rest[..end].rfind('@').map_or(0, |at| at + 1);
    format!("{scheme}{}", &rest[host..])
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::time::Instant;

    use super::*;
    use crate::kubernetes::tests::trust::Certificates;
    use crate::kubernetes::tests::{Reply, Server};

    const FAST: GatePace = GatePace { interval: Duration::from_millis(100), longest: Duration::from_millis(500) };
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn gates_show_no_password() {
        let error = ReadinessGate::new("ftp://user:secret@a:1/b?c=@").map(drop).unwrap_err();
        assert_eq!(
            error.message(),
            "invalid URL set for ReadinessGates:ftp://a:1/b?c=@ Error:unsupported protocol scheme \"ftp\""
        );
        assert!(!ReadinessGate::new("user:secret@a b").map(drop).unwrap_err().message().contains("secret"));
    }

    fn gates(urls: &[&str]) -> Vec<String> {
        urls.iter().map(|url| (*url).to_owned()).collect()
    }

    fn replying(statuses: &'static [&'static str]) -> Server {
        Server::start(move |number, _| Reply::status(statuses[number.min(statuses.len() - 1)], ""))
    }

    #[tokio::test]
    async fn gates_cost_nothing_when_open() {
        let (first, second) = (replying(&["200 OK"]), replying(&["399 Odd"]));
        let begun = Instant::now();
        let urls = [format!("{}/version?x=y", first.url()), second.url().replace("//", "//me:x%20y@")];
        wait(&urls, LONG).await.unwrap();
        assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
        let head = first.only_head();
        assert!(head.starts_with(&format!("GET /version?x=y HTTP/1.1\r\nhost: {}\r\n", first.address)), "{head}");
        assert!(!head.contains("authorization"), "{head}");
        let head = second.only_head();
        assert!(head.starts_with("GET / HTTP/1.1\r\n"), "{head}");
        // The Authorization header contains the Base64 form of `me:x y`.
        assert!(head.contains("\r\nauthorization: Basic bWU6eCB5\r\n"), "{head}");
        wait(&[], Duration::ZERO).await.unwrap();
    }

    #[tokio::test]
    async fn gate_is_waited_for_when_it_opens_later() {
        let gate = replying(&["503 Service Unavailable", "404 Not Found", "400 Bad Request", "302 Found"]);
        let begun = Instant::now();
        wait_at(&[gate.url()], LONG, FAST).await.unwrap();
        assert_eq!(gate.heads().len(), 4);
        assert!(begun.elapsed() >= FAST.interval * 3, "{:?}", begun.elapsed());
    }

    #[tokio::test]
    async fn gate_server_is_found_when_it_starts_later() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(300));
            let (mut stream, _) = std::net::TcpListener::bind(address).unwrap().accept().unwrap();
            assert!(stream.read(&mut [0; 1000]).unwrap() > 0);
            // The client must not wait for the end of the response body, which this server never sends.
            stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").unwrap();
            // Keep the connection open until the client closes it.
            let _ = std::io::copy(&mut stream, &mut std::io::sink());
        });
        wait_at(&[format!("http://{address}/")], LONG, GatePace { longest: LONG, ..FAST }).await.unwrap();
    }

    #[tokio::test]
    async fn gate_is_error_in_time_when_it_stays_closed() {
        let (closed, silent) = (replying(&["404 Not Found"]), Server::saying(Reply::Nothing));
        let stranger = Certificates::make().start();
        for (url, last) in [
            (closed.url(), "it answered 404"),
            (silent.url(), "it gave no answer"),
            ("http://127.0.0.1:1".to_owned(), "connection refused"),
            (stranger.url(), "is not trusted, or does not speak TLS"),
        ] {
            let begun = Instant::now();
            let error = wait_at(std::slice::from_ref(&url), LONG, FAST).await.unwrap_err();
            assert_eq!((error.code().number(), error.message()), (999, "context deadline exceeded"));
            let details = error.details().to_lowercase();
            assert!(details.starts_with(&format!("the readiness gate {url} is not open: ")), "{details}");
            assert!(details.contains(&last.to_lowercase()), "{details}");
            assert!(begun.elapsed() >= FAST.longest && begun.elapsed() < FAST.longest * 6, "{:?}", begun.elapsed());
            // The remaining time of the plugin call may be shorter than the time limit of a gate.
            let error = wait_at(&[url], Duration::from_millis(200), FAST).await.unwrap_err();
            assert_eq!((error.code().number(), error.message()), (11, "context deadline exceeded"));
        }
        let asked = closed.heads().len();
        assert!((2..=10).contains(&asked), "{asked}");
    }

    #[tokio::test]
    async fn gate_url_is_checked_before_any_wait() {
        let gate = replying(&["404 Not Found"]);
        for (url, reason) in [
            ("no url", "parse \"no url\": invalid URI for request"),
            ("", "parse \"\": invalid URI for request"),
            ("localhost", "parse \"localhost\": invalid URI for request"),
            ("http://", "parse \"http://\": invalid URI for request"),
            ("/healthz", "unsupported protocol scheme \"\""),
            ("ftp://127.0.0.1/x", "unsupported protocol scheme \"ftp\""),
        ] {
            let error = wait(&gates(&[&gate.url(), url]), LONG).await.unwrap_err();
            let expected = format!("invalid URL set for ReadinessGates:{url} Error:{reason}");
            assert_eq!((error.code().number(), error.message()), (999, expected.as_str()));
        }
        assert_eq!(gate.heads().len(), 0);
    }
}
