//! Limits the number of unanswered requests, their bytes in memory, and the time in which a message must arrive. If a
//! client exceeds its share, the server refuses the client's request with etcd's text for too many requests. A refused
//! client does not affect the requests of other clients.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use http::{Request, Response};
use http_body::{Body as HttpBody, Frame, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Sleep, sleep};
use tonic::Status;
use tonic::body::Body;
use tower_service::Service;

use crate::convert::Refusal;

/// Maximum size of a request in bytes, as in etcd: 1.5 MiB, and 512 KiB for the encoding around keys and values.
pub(crate) const MAX_REQUEST_BYTES: usize = 1_572_864 + 512 * 1024;

/// Maximum number of open requests of all clients. A stream of watches counts as one request.
const MAX_OPEN_REQUESTS: usize = 20_000;
/// Maximum total size of a client's unanswered messages in bytes, enough for about sixteen messages of the maximum
/// size.
const MAX_CLIENT_BYTES: usize = 32 * 1024 * 1024;
/// Maximum total size of all clients' unanswered messages in bytes.
const MAX_TOTAL_BYTES: usize = 256 * 1024 * 1024;
/// Maximum time to wait for the next part of a message, or for the first part of a request's only message.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(30);
/// Length in bytes of the prefix of a gRPC message, which has a flag and the message's length.
const GRPC_PREFIX_BYTES: usize = 5;

/// A connection's share of the memory for unanswered messages. The extensions of each request hold the `ClientShare` of
/// its connection.
#[derive(Clone, Debug)]
pub struct ClientShare {
    bytes: Arc<Semaphore>,
}

impl Default for ClientShare {
    fn default() -> Self {
        Self { bytes: Arc::new(Semaphore::new(MAX_CLIENT_BYTES)) }
    }
}

/// The limits for the requests of all clients together.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    open: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
}

impl Default for Limits {
    fn default() -> Self {
        Self { open: Arc::new(Semaphore::new(MAX_OPEN_REQUESTS)), bytes: Arc::new(Semaphore::new(MAX_TOTAL_BYTES)) }
    }
}

/// A service whose requests are limited in number, size and time.
#[derive(Clone, Debug)]
pub struct LimitedService<S> {
    inner: S,
    limits: Limits,
}

impl<S> LimitedService<S> {
    pub(crate) fn new(inner: S, limits: Limits) -> Self {
        Self { inner, limits }
    }
}

impl<S> Service<Request<Body>> for LimitedService<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let Ok(open) = Arc::clone(&self.limits.open).try_acquire_owned() else {
            return Box::pin(async { Ok(Refusal::TooManyRequests.status().into_http()) });
        };
        let client = request.extensions().get::<ClientShare>().cloned().unwrap_or_default();
        let messages = MessageCount::of_path(request.uri().path());
        let held = Arc::new(Mutex::new(Vec::new()));
        let answered = Arc::clone(&held);
        let request = request.map(|inner| {
            let header = Vec::with_capacity(GRPC_PREFIX_BYTES);
            let all = Arc::clone(&self.limits.bytes);
            Body::new(IncomingBody {
                inner,
                messages,
                client,
                all,
                held,
                header,
                rest: 0,
                begun: false,
                end: None,
                _open: open,
            })
        });
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await;
            // The request has been processed, so the permits for the bytes of its message are released.
            drop(answered);
            answer
        })
    }
}

/// Whether a request consists of one message or of a stream of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MessageCount {
    One,
    /// The client may send further messages while the server answers the request.
    Many,
}

impl MessageCount {
    fn of_path(path: &str) -> Self {
        if path.ends_with("/Watch") || path.ends_with("/LeaseKeepAlive") { Self::Many } else { Self::One }
    }
}

/// Permits for the bytes of unanswered messages. Each item is a pair of permits for the same bytes: one from the
/// client's share, and one from the limit of all clients.
type BytePermits = Arc<Mutex<Vec<[OwnedSemaphorePermit; 2]>>>;

/// The body of a request that is still being received.
struct IncomingBody {
    inner: Body,
    messages: MessageCount,
    client: ClientShare,
    all: Arc<Semaphore>,
    held: BytePermits,
    /// The bytes of the next message's prefix that have been received.
    header: Vec<u8>,
    /// Number of bytes of the current message that have not been received.
    rest: usize,
    /// Whether the prefix of any message has been received.
    begun: bool,
    /// The timeout of waiting for the next part of a message.
    end: Option<Pin<Box<Sleep>>>,
    _open: OwnedSemaphorePermit,
}

impl IncomingBody {
    /// Returns whether the client still has to send bytes: the rest of a message that has begun, or the request's only
    /// message.
    fn is_owed(&self) -> bool {
        self.rest > 0 || !self.header.is_empty() || (self.messages == MessageCount::One && !self.begun)
    }

    fn held(&self) -> MutexGuard<'_, Vec<[OwnedSemaphorePermit; 2]>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts the bytes of a part of the request's body.
    ///
    /// # Errors
    /// The refusal of a message that exceeds the client's share or the limit of all clients.
    fn take_note(&mut self, part: &Bytes) -> Result<(), Status> {
        let mut part = &part[..];
        while part.has_remaining() {
            if self.rest > 0 {
                let taken = self.rest.min(part.len());
                part.advance(taken);
                self.rest -= taken;
                if self.rest == 0 && self.messages == MessageCount::Many {
                    // A complete message of a stream no longer needs permits, because it has been processed or waits in
                    // a bounded queue.
                    self.held().clear();
                }
                continue;
            }
            let taken = part.len().min(GRPC_PREFIX_BYTES - self.header.len());
            self.header.extend(part.iter().take(taken));
            part.advance(taken);
            if let [_, length @ ..] = &self.header[..]
                && let Ok(length) = <[u8; 4]>::try_from(length)
            {
                self.header.clear();
                self.begin(u32::from_be_bytes(length))?;
            }
        }
        Ok(())
    }

    fn begin(&mut self, length: u32) -> Result<(), Status> {
        self.begun = true;
        self.rest = length as usize;
        // The decoder refuses a message longer than MAX_REQUEST_BYTES, with a more specific text than
        // `Refusal::TooManyRequests`.
        if self.rest > MAX_REQUEST_BYTES {
            return Ok(());
        }
        let refused = |_| Refusal::TooManyRequests.status();
        let its = Arc::clone(&self.client.bytes).try_acquire_many_owned(length).map_err(refused)?;
        let of_all = Arc::clone(&self.all).try_acquire_many_owned(length).map_err(refused)?;
        self.held().push([its, of_all]);
        Ok(())
    }
}

impl HttpBody for IncomingBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let Poll::Ready(frame) = Pin::new(&mut self.inner).poll_frame(cx) else {
            if self.is_owed() {
                ready!(self.end.get_or_insert_with(|| Box::pin(sleep(MESSAGE_TIMEOUT))).as_mut().poll(cx));
                return Poll::Ready(Some(Err(Refusal::Timeout.status())));
            }
            return Poll::Pending;
        };
        self.end = None;
        if let Some(Ok(frame)) = &frame
            && let Some(part) = frame.data_ref()
        {
            self.take_note(part)?;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures::StreamExt;
    use futures::channel::mpsc::{UnboundedSender, unbounded};
    use http_body_util::{BodyExt, StreamBody};
    use tokio::task::{JoinHandle, yield_now};
    use tokio::time::Instant;
    use tonic::Code;

    use super::*;

    const PUT: &str = "/etcdserverpb.KV/Put";
    const WATCH: &str = "/etcdserverpb.Watch/Watch";

    /// A request whose body the test is still sending.
    struct Sending {
        parts: UnboundedSender<Bytes>,
        answer: JoinHandle<Code>,
    }

    impl Sending {
        /// Starts a request to a service that reads the whole body and then works for the duration `takes`.
        fn begin(limits: &Limits, client: &ClientShare, path: &str, takes: Duration) -> Self {
            let (parts, sent) = unbounded();
            let body = Body::new(StreamBody::new(sent.map(|part| Ok::<_, Infallible>(Frame::data(part)))));
            let mut request = Request::new(body);
            *request.uri_mut() = path.parse().unwrap();
            request.extensions_mut().insert(client.clone());
            let read = tower::service_fn(move |request: Request<Body>| async move {
                if let Err(status) = request.into_body().collect().await {
                    return Ok::<_, Infallible>(status.into_http());
                }
                sleep(takes).await;
                Ok(Response::new(Body::empty()))
            });
            let answer = LimitedService::new(read, limits.clone()).call(request);
            let answer = tokio::spawn(async {
                let answer = answer.await.unwrap();
                Status::from_header_map(answer.headers()).map_or(Code::Ok, |status| status.code())
            });
            Self { parts, answer }
        }

        /// Sends the prefix of a message of length `length`, and the first `up_to` bytes of the message.
        fn send(&self, length: usize, up_to: usize) {
            let prefix = u32::try_from(length).unwrap().to_be_bytes();
            for part in [&[0][..], &prefix, &vec![7; up_to]] {
                self.parts.unbounded_send(Bytes::copy_from_slice(part)).unwrap();
            }
        }

        async fn answer(self) -> Code {
            drop(self.parts);
            self.answer.await.unwrap()
        }
    }

    fn free(limits: &Limits, client: &ClientShare) -> [usize; 3] {
        [&limits.open, &limits.bytes, &client.bytes].map(|room| room.available_permits())
    }

    #[tokio::test(start_paused = true)]
    async fn request_ends_when_message_does_not_come() {
        let (limits, client) = (Limits::default(), ClientShare::default());
        for up_to in [None, Some(0), Some(99)] {
            let sending = Sending::begin(&limits, &client, PUT, Duration::ZERO);
            if let Some(up_to) = up_to {
                sending.send(100, up_to);
            }
            let begun = Instant::now();
            assert_eq!(sending.answer.await.unwrap(), Code::Unavailable, "{up_to:?}");
            assert!(begun.elapsed() >= MESSAGE_TIMEOUT);
        }
        assert_eq!(free(&limits, &client), [MAX_OPEN_REQUESTS, MAX_TOTAL_BYTES, MAX_CLIENT_BYTES]);
    }

    #[tokio::test(start_paused = true)]
    async fn stream_may_be_silent_between_messages() {
        let (limits, client) = (Limits::default(), ClientShare::default());
        let sending = Sending::begin(&limits, &client, WATCH, Duration::ZERO);
        for _ in 0..3 {
            sleep(10 * MESSAGE_TIMEOUT).await;
            sending.send(1000, 1000);
        }
        sleep(Duration::from_secs(1)).await;
        assert_eq!(
            free(&limits, &client),
            [MAX_OPEN_REQUESTS - 1, MAX_TOTAL_BYTES, MAX_CLIENT_BYTES],
            "its messages are worked off"
        );
        sending.send(1000, 999);
        assert_eq!(sending.answer.await.unwrap(), Code::Unavailable, "but not in the middle of one");
    }

    #[tokio::test(start_paused = true)]
    async fn client_share_is_limited_and_others_are_unaffected() {
        let (limits, client) = (Limits::default(), ClientShare::default());
        let large = MAX_REQUEST_BYTES;
        let takes = Duration::from_secs(3600);
        let within: Vec<_> = (0..MAX_CLIENT_BYTES / large)
            .map(|_| {
                let sending = Sending::begin(&limits, &client, PUT, takes);
                sending.send(large, large);
                sending
            })
            .collect();
        let beyond = Sending::begin(&limits, &client, PUT, Duration::ZERO);
        beyond.send(large, large);
        assert_eq!(beyond.answer().await, Code::ResourceExhausted);
        let other = Sending::begin(&limits, &ClientShare::default(), PUT, Duration::ZERO);
        other.send(large, large);
        assert_eq!(other.answer().await, Code::Ok);
        for sending in within {
            assert_eq!(sending.answer().await, Code::Ok);
        }
        let again = Sending::begin(&limits, &client, PUT, Duration::ZERO);
        again.send(large, large);
        assert_eq!(again.answer().await, Code::Ok, "an answered request counts towards the limit");
        assert_eq!(free(&limits, &client), [MAX_OPEN_REQUESTS, MAX_TOTAL_BYTES, MAX_CLIENT_BYTES]);
    }

    #[tokio::test(start_paused = true)]
    async fn requests_open_at_once_are_limited() {
        let (limits, client) = (Limits::default(), ClientShare::default());
        let open: Vec<_> =
            (0..MAX_OPEN_REQUESTS).map(|_| Sending::begin(&limits, &client, WATCH, Duration::ZERO)).collect();
        let beyond = Sending::begin(&limits, &client, WATCH, Duration::ZERO);
        assert_eq!(beyond.answer().await, Code::ResourceExhausted);
        for sending in open {
            sending.answer.abort();
        }
        yield_now().await;
        let again = Sending::begin(&limits, &client, WATCH, Duration::ZERO);
        assert_eq!(again.answer().await, Code::Ok);
    }
}
