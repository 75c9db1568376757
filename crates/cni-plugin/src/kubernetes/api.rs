//! Sends authenticated requests to the Kubernetes API, and reuses one connection while the server keeps it open.

use std::path::PathBuf;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{ACCEPT, AUTHORIZATION, HOST, HeaderValue, PROXY_AUTHORIZATION, RETRY_AFTER, USER_AGENT};
use hyper::{HeaderMap, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::time::{Instant, sleep, timeout_at};

use super::dial::{self, ApiFailure, ApiProblem, ApiRoute};

/// Maximum size of the body of a Kubernetes API response, in bytes; larger than any namespace, pod or virtual machine.
const MAX_RESPONSE_BYTES: usize = 4 << 20;
/// Maximum number of characters of a Kubernetes API error message that Margay's own error message quotes.
const MAX_MESSAGE_CHARS: usize = 1000;
/// Maximum number of retries of a request to which the Kubernetes API responded with `Retry-After`.
const MAX_RETRIES: usize = 10;
/// Maximum time limit of a single API request.
const MAX_REQUEST_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);
/// Minimum pause before an API request is retried.
const MIN_RETRY_INTERVAL: Duration = Duration::from_millis(100);

pub(super) const CHECK_ADDRESS: &str = "check that the Kubernetes API runs, and that this host can reach it";

/// A connection to the Kubernetes API, with the credentials for requests on that connection.
pub(super) struct Api {
    pub(super) way: ApiRoute,
    /// The path prefix of every request, taken from the API's URL.
    pub(super) prefix: String,
    pub(super) login: Login,
    pub(super) agent: &'static str,
    /// The connection of the previous request, kept for reuse.
    pub(super) kept: Option<SendRequest<Empty<Bytes>>>,
    /// The secret part of the credentials, masked in error messages.
    pub(super) secret: String,
}

#[derive(Debug)]
pub(super) struct ApiResponse {
    pub(super) status: StatusCode,
    pub(super) body: Bytes,
    /// The pause before the request is retried, if the Kubernetes API asks for a retry.
    pause: Option<Duration>,
}

/// The body of an error response of the Kubernetes API.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct ApiStatus {
    pub(super) message: String,
    pub(super) reason: String,
}

impl Api {
    /// Returns the Kubernetes API's URL for use in messages.
    pub(super) fn url(&self) -> String {
        format!("{}{}", self.way.address.url(), self.prefix)
    }

    /// Sends a GET request for a path of the Kubernetes API. The request and its retries together take at most `left`.
    pub(super) async fn get(&mut self, path: &str, left: Duration) -> Result<ApiResponse, ApiFailure> {
        let deadline = deadline(left);
        match timeout_at(deadline, self.get_with_retries(path, deadline)).await {
            Ok(answer) => answer,
            Err(_) => Err(ApiFailure::Late(left)),
        }
    }

    /// Sends a request and retries it while the API asks for a retry, as Kubernetes's own client does.
    async fn get_with_retries(&mut self, path: &str, deadline: Instant) -> Result<ApiResponse, ApiFailure> {
        for _ in 0..MAX_RETRIES {
            let answer = self.get_once(path).await?;
            match answer.pause {
                Some(pause) if pause < deadline.duration_since(Instant::now()) => sleep(pause).await,
                _ => return Ok(answer),
            }
        }
        self.get_once(path).await
    }

    async fn get_once(&mut self, path: &str) -> Result<ApiResponse, ApiFailure> {
        if let Some(kept) = self.kept.take().filter(|kept| !kept.is_closed()) {
            // The API server may close an idle connection at any time, so a request that fails on a reused connection
            // is sent again on a new one.
            if let Ok(answer) = self.exchange(kept, path).await {
                return Ok(answer);
            }
        }
        let stream = self.way.open().await?;
        let (sender, connection) =
            handshake(TokioIo::new(stream)).await.map_err(|error| self.connection_problem(&error))?;
        tokio::spawn(connection);
        Ok(self.exchange(sender, path).await?)
    }

    async fn exchange(&mut self, mut sender: SendRequest<Empty<Bytes>>, path: &str) -> Result<ApiResponse, ApiProblem> {
        let request = self.request(path)?;
        sender.ready().await.map_err(|error| self.connection_problem(&error))?;
        let answer = sender.send_request(request).await.map_err(|error| self.connection_problem(&error))?;
        let (head, body) = answer.into_parts();
        let cut = |_| {
            ApiProblem::transient(format!("the answer of {} was cut off, or has no end", self.url()), CHECK_ADDRESS)
        };
        let body = Limited::new(body, MAX_RESPONSE_BYTES).collect().await.map_err(cut)?.to_bytes();
        self.kept = Some(sender);
        let has_trouble = head.status == StatusCode::TOO_MANY_REQUESTS || head.status.is_server_error();
        let pause = if has_trouble { pause(&head.headers) } else { None };
        Ok(ApiResponse { status: head.status, body, pause })
    }

    fn request(&mut self, path: &str) -> Result<Request<Empty<Bytes>>, ApiProblem> {
        let server = if self.way.is_read_by_proxy() { self.way.address.url() } else { String::new() };
        let mut request = Request::get(format!("{server}{}{path}", self.prefix))
            .header(HOST, &self.way.address.authority)
            .header(ACCEPT, "application/json")
            .header(USER_AGENT, self.agent);
        if let Some(credential) = self.login.credential()? {
            request = request.header(AUTHORIZATION, credential.header);
            self.secret = credential.secret;
        }
        let for_proxy = self.way.proxy.as_ref().filter(|_| self.way.is_read_by_proxy());
        if let Some(authorization) = for_proxy.and_then(|proxy| proxy.authorization.clone()) {
            request = request.header(PROXY_AUTHORIZATION, authorization);
        }
        let cannot = |error| ApiProblem::new(format!("cannot ask for it: {error}"), CHECK_ADDRESS);
        request.body(Empty::new()).map_err(cannot)
    }

    fn connection_problem(&self, error: &hyper::Error) -> ApiProblem {
        ApiProblem::transient(format!("the connection to {} broke: {error}", self.url()), CHECK_ADDRESS)
    }

    /// Parses an error response of the Kubernetes API, shortens the message in the response, and masks the secret part
    /// of the credentials in the message.
    pub(super) fn status(&self, answer: &ApiResponse) -> ApiStatus {
        let mut status: ApiStatus = serde_json::from_slice(&answer.body).unwrap_or_default();
        if !self.secret.is_empty() {
            status.message = status.message.replace(&self.secret, "***");
        }
        if let Some((end, _)) = status.message.char_indices().nth(MAX_MESSAGE_CHARS) {
            status.message.truncate(end);
        }
        status
    }

    /// Returns the error message that Kubernetes's own client prints for an error response.
    pub(super) fn complaint(&self, answer: &ApiResponse, kind: &str, name: &str) -> String {
        let message = self.status(answer).message;
        match answer.status {
            _ if !message.is_empty() => message,
            StatusCode::NOT_FOUND => format!("the server could not find the requested resource (get {kind} {name})"),
            StatusCode::UNAUTHORIZED => "Unauthorized".to_owned(),
            status => format!("{} answered {status}", self.url()),
        }
    }

    /// Returns Go's error message for a request whose connection could not be opened.
    pub(super) fn no_connection(&self, path: &str, error: &std::io::Error) -> String {
        // Rust appends `(os error N)` to the message of an I/O error, and Go does not.
        let reason = error.to_string().to_lowercase();
        let reason = reason.split(" (os error").next().unwrap_or_default();
        let first = self.way.first();
        let by = if self.way.proxy.is_some() { "proxyconnect tcp: " } else { "" };
        // An I/O error without an error number comes from the name lookup.
        let what = match error.raw_os_error() {
            Some(_) => format!("dial tcp {}: connect: {reason}", first.with_port()),
            None => format!("dial tcp: lookup {}: {reason}", first.host),
        };
        format!("Get \"{}{path}\": {by}{what}", self.url())
    }
}

/// Returns the deadline of a request, which is `left` from now, but no later than [`MAX_REQUEST_TIMEOUT`] from now.
pub(super) fn deadline(left: Duration) -> Instant {
    Instant::now() + left.min(MAX_REQUEST_TIMEOUT)
}

fn pause(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds).max(MIN_RETRY_INTERVAL))
}

/// The credentials of a kubeconfig's user, other than a client certificate.
pub(super) enum Login {
    /// The kubeconfig's user has no token and no password.
    Unnamed,
    Token(String),
    /// The path of a file that contains a bearer token. The token file may be replaced at any time.
    TokenFile(PathBuf),
    /// The user name and the password for Basic authentication.
    Password(String, String),
}

/// The value of an Authorization header, and the part of the value that is secret.
pub(super) struct Credential {
    pub(super) header: HeaderValue,
    pub(super) secret: String,
}

impl Login {
    /// Returns the credential for the next API request, for which a token file is read again.
    pub(super) fn credential(&self) -> Result<Option<Credential>, ApiProblem> {
        let (scheme, secret) = match self {
            Self::Unnamed => return Ok(None),
            Self::Token(token) => ("Bearer", token.clone()),
            Self::TokenFile(path) => {
                let token = String::from_utf8_lossy(&dial::read_credentials(path)?).trim().to_owned();
                if token.is_empty() {
                    return Err(ApiProblem::new(format!("{} is empty", path.display()), "it must have a token"));
                }
                ("Bearer", token)
            }
            Self::Password(user, password) => ("Basic", STANDARD.encode(format!("{user}:{password}"))),
        };
        let bad = |_| ApiProblem::new("the token for the Kubernetes API has characters that none has", "check it");
        let mut header = HeaderValue::try_from(format!("{scheme} {secret}")).map_err(bad)?;
        header.set_sensitive(true);
        Ok(Some(Credential { header, secret }))
    }
}
