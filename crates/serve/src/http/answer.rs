//! Builds HTTP answers and their headers. Answers that require reading much of the store are computed one at a time,
//! and are cached briefly.

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use hyper::{Response, StatusCode};
use ipam_core::Ipam;
use ipam_core::census::Census;
use ipam_operator::Operator;
use ipam_operator::forecast::Forecast;
use kv::Deadline;
use serde::Serialize;
use tokio::sync::{Mutex, Semaphore};
use tokio::time::{Instant, sleep};

/// The body of an answer: bytes, or a stream of events.
pub(super) type Body = UnsyncBoxBody<Bytes, Infallible>;

pub(super) type HttpResponse = Response<Body>;

/// Security headers that allow a browser to show an answer, to run this program's scripts and to send requests to this
/// daemon, but nothing else.
const SECURITY_HEADERS: [(HeaderName, &str); 6] = [
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

/// Adds the headers that every answer has. Forbids caching unless the answer has its own `Cache-Control` header.
pub(super) fn add_security_headers(headers: &mut HeaderMap) {
    for (name, value) in SECURITY_HEADERS {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers.entry(CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
}

/// Returns an HTTP answer with the given body and content type.
pub(super) fn whole(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> HttpResponse {
    let mut answer = Response::new(Full::new(body.into()).boxed_unsync());
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}

pub(super) fn text(status: StatusCode, text: impl Into<String>) -> HttpResponse {
    let mut text = text.into();
    text.push('\n');
    whole(status, "text/plain; charset=utf-8", text)
}

pub(super) fn json(status: StatusCode, document: &impl Serialize) -> HttpResponse {
    match serde_json::to_vec(document) {
        Ok(bytes) => whole(status, "application/json", bytes),
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("JSON: {error}")),
    }
}

/// The HTTP status and text of the answer to a request that failed.
#[derive(Debug)]
pub(super) struct HttpError {
    pub(super) status: StatusCode,
    pub(super) text: String,
}

impl HttpError {
    pub(super) fn bad_request(text: impl Into<String>) -> Self {
        Self { status: StatusCode::BAD_REQUEST, text: text.into() }
    }

    /// Returns the error for a store that cannot answer now.
    pub(super) fn unavailable(error: impl fmt::Display) -> Self {
        Self { status: StatusCode::SERVICE_UNAVAILABLE, text: error.to_string() }
    }
}

impl From<kv::Error> for HttpError {
    fn from(error: kv::Error) -> Self {
        Self::unavailable(error)
    }
}

impl From<ipam_core::Error> for HttpError {
    fn from(error: ipam_core::Error) -> Self {
        Self::unavailable(error)
    }
}

impl From<HttpError> for HttpResponse {
    fn from(failure: HttpError) -> Self {
        #[derive(Serialize)]
        struct ErrorBody {
            error: String,
        }
        json(failure.status, &ErrorBody { error: failure.text })
    }
}

/// How long most answers are cached.
pub(super) const ANSWER_TTL: Duration = Duration::from_secs(2);
/// How long a forecast is cached. A forecast changes slowly, and its computation reads all blocks twice.
const FORECAST_TTL: Duration = Duration::from_secs(300);
/// Time limit for reading all blocks of the store for an answer.
pub(super) const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// Caches the answer to the most recent request of one kind.
#[derive(Debug)]
pub(super) struct Memo<T>(Arc<Mutex<Option<MemoEntry<T>>>>);

#[derive(Debug)]
struct MemoEntry<T> {
    question: String,
    until: Instant,
    answer: Arc<T>,
}

impl<T> Default for Memo<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<T: Send + Sync + 'static> Memo<T> {
    /// Returns the cached answer if it answers the given request and is recent enough. If no cached answer fits,
    /// computes a new answer; callers that arrive meanwhile wait for this computation. A cached answer is removed when
    /// it expires, so that an idle daemon keeps no memory for it.
    pub(super) async fn get(
        &self,
        question: &str,
        lasts: Duration,
        make: impl Future<Output = Result<T, HttpError>>,
    ) -> Result<Arc<T>, HttpError> {
        let mut last = self.0.lock().await;
        if let Some(entry) = last.as_ref().filter(|entry| entry.question == question && Instant::now() < entry.until) {
            return Ok(Arc::clone(&entry.answer));
        }
        *last = None;
        let answer = Arc::new(make.await?);
        let until = Instant::now() + lasts;
        *last = Some(MemoEntry { question: question.to_owned(), until, answer: Arc::clone(&answer) });
        let memo = Arc::downgrade(&self.0);
        tokio::spawn(async move {
            sleep(lasts).await;
            if let Some(memo) = memo.upgrade() {
                let mut last = memo.lock().await;
                if last.as_ref().is_some_and(|entry| Instant::now() >= entry.until) {
                    *last = None;
                }
            }
        });
        Ok(answer)
    }
}

/// The caches for answers, one per kind of request.
#[derive(Debug)]
pub(super) struct AnswerCache {
    census: Memo<Census>,
    forecast: Memo<Forecast>,
    pub(super) problems: Memo<String>,
    pub(super) search: Memo<String>,
    pub(super) held: Memo<String>,
    pub(super) history: Memo<String>,
    reading: Semaphore,
}

impl Default for AnswerCache {
    fn default() -> Self {
        Self {
            census: Memo::default(),
            forecast: Memo::default(),
            problems: Memo::default(),
            search: Memo::default(),
            held: Memo::default(),
            history: Memo::default(),
            reading: Semaphore::new(1),
        }
    }
}

impl AnswerCache {
    /// Returns the census (the use of all addresses) of the store, at most [`ANSWER_TTL`] old.
    pub(super) async fn census(&self, ipam: &Ipam) -> Result<Arc<Census>, HttpError> {
        self.census
            .get("", ANSWER_TTL, self.read_exclusively(async { Ok(ipam.census(Deadline::after(READ_TIMEOUT)).await?) }))
            .await
    }

    /// Returns the forecast of all pools, at most five minutes old.
    pub(super) async fn forecast(&self, operator: &Operator) -> Result<Arc<Forecast>, HttpError> {
        let make = async {
            let census = self.census(operator.ipam()).await?;
            self.read_exclusively(async { Ok(operator.forecast(&census, Deadline::after(READ_TIMEOUT)).await?) }).await
        };
        self.forecast.get("", FORECAST_TTL, make).await
    }

    /// Runs an expensive read of the store while no other expensive read runs. `read` must not call `read_exclusively`,
    /// because the inner call would wait for the outer call forever.
    pub(super) async fn read_exclusively<T>(
        &self,
        read: impl Future<Output = Result<T, HttpError>>,
    ) -> Result<T, HttpError> {
        // Acquiring a permit cannot fail, because the semaphore is never closed.
        let _reading = self.reading.acquire().await.map_err(HttpError::unavailable)?;
        read.await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn answer_is_cached_for_moment_and_then_forgotten() {
        let memo = Memo::default();
        let made = AtomicUsize::new(0);
        let make = || async {
            sleep(Duration::from_millis(100)).await;
            Ok(made.fetch_add(1, Ordering::SeqCst))
        };
        let answers = futures::future::join_all((0..5).map(|_| memo.get("a", ANSWER_TTL, make()))).await;
        assert!(answers.into_iter().all(|answer| *answer.unwrap() == 0));
        assert_eq!(*memo.get("b", ANSWER_TTL, make()).await.unwrap(), 1);
        assert_eq!(*memo.get("b", ANSWER_TTL, make()).await.unwrap(), 1);
        sleep(ANSWER_TTL + Duration::from_millis(1)).await;
        assert!(memo.0.lock().await.is_none());
        assert_eq!(*memo.get("b", ANSWER_TTL, make()).await.unwrap(), 2);
        let failed = memo.get("c", ANSWER_TTL, async { Err(HttpError::bad_request("no")) }).await;
        assert!(failed.is_err());
        assert_eq!(*memo.get("c", ANSWER_TTL, make()).await.unwrap(), 3, "a failure is not kept");
    }
}
