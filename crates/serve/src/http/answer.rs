//! Answers, with the headers that each of them has.

use std::convert::Infallible;
use std::fmt;

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use hyper::{Response, StatusCode};
use serde::Serialize;

/// The body of an answer: whole, or a stream of events.
pub(super) type Body = UnsyncBoxBody<Bytes, Infallible>;

/// An answer.
pub(super) type Answer = Response<Body>;

/// The limits of a browser: it may show an answer, run this program's scripts, ask this daemon, and nothing else.
const SECURITY: [(HeaderName, &str); 6] = [
    (
        hyper::header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'",
    ),
    (hyper::header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (hyper::header::X_FRAME_OPTIONS, "DENY"),
    (hyper::header::REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
];

/// Adds the headers of every answer. Nobody keeps an answer that says nothing else about it.
pub(super) fn secure(headers: &mut HeaderMap) {
    for (name, value) in SECURITY {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers.entry(CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
}

/// An answer with a body of this type.
pub(super) fn whole(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(Full::new(body.into()).boxed_unsync());
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}

/// A short text.
pub(super) fn text(status: StatusCode, text: impl Into<String>) -> Answer {
    let mut text = text.into();
    text.push('\n');
    whole(status, "text/plain; charset=utf-8", text)
}

/// A document of JSON.
pub(super) fn json(status: StatusCode, document: &impl Serialize) -> Answer {
    match serde_json::to_vec(document) {
        Ok(bytes) => whole(status, "application/json", bytes),
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("JSON: {error}")),
    }
}

/// The reason for which a question has no answer.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) status: StatusCode,
    pub(super) text: String,
}

impl Failure {
    /// The question makes no sense.
    pub(super) fn question(text: impl Into<String>) -> Self {
        Self { status: StatusCode::BAD_REQUEST, text: text.into() }
    }

    /// The store does not answer now.
    pub(super) fn store(error: impl fmt::Display) -> Self {
        Self { status: StatusCode::SERVICE_UNAVAILABLE, text: error.to_string() }
    }
}

impl From<kv::Error> for Failure {
    fn from(error: kv::Error) -> Self {
        Self::store(error)
    }
}

impl From<ipam_core::Error> for Failure {
    fn from(error: ipam_core::Error) -> Self {
        Self::store(error)
    }
}

impl From<Failure> for Answer {
    fn from(failure: Failure) -> Self {
        #[derive(Serialize)]
        struct Reported {
            error: String,
        }
        json(failure.status, &Reported { error: failure.text })
    }
}
