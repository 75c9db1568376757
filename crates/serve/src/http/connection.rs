//! Serves HTTP connections. The server limits the number of connections, the duration of a request, and the time in
//! which a client reads nothing.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, Sleep, sleep, timeout};

use super::PageContext;
use super::answer::add_security_headers;
use super::route::{Origin, answer};
use crate::accept::{Acceptor, ByteStream, ExcessPolicy, Listener};

/// Size in bytes of a connection's read buffer and of its write buffer.
const MAX_BUFFER_BYTES: usize = 16 * 1024;
/// Maximum number of headers of a request.
const MAX_HEADERS: usize = 64;
/// Time limit for open requests when the daemon stops.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_millis(500);
/// Maximum number of clients that are rejected at the same time.
const MAX_REJECTIONS: usize = 64;
/// Time limit for sending the rejection to a client.
const REJECTION_TIMEOUT: Duration = Duration::from_millis(500);

/// The answer to a client that connects when the maximum number of connections is reached.
const BUSY_RESPONSE: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\n\
    content-length: 32\r\ncache-control: no-store\r\nretry-after: 5\r\nconnection: close\r\n\r\n\
    too many connections; try again\n";

/// Answers the clients of a listener until `stop` completes. After `stop` has completed, open requests get half a
/// second more, and event streams end immediately.
///
/// # Errors
/// Never returns an error at present: an error of a connection ends only that connection.
pub async fn serve(listener: Listener, page: Arc<PageContext>, stop: impl Future<Output = ()>) -> io::Result<()> {
    let origin = match &listener {
        Listener::Tcp(_) => Origin::Network,
        Listener::Unix(_) => Origin::Socket,
    };
    let room = Arc::new(Semaphore::new(page.limits.connections));
    let acceptor = Acceptor::new("the page", listener, room, ExcessPolicy::IsAccepted);
    let lobby = Arc::new(Semaphore::new(MAX_REJECTIONS));
    let (stopper, stopped) = watch::channel(());
    let mut connections = JoinSet::new();
    let mut stop = pin!(stop);
    loop {
        let (client, place) = tokio::select! {
            () = &mut stop => break,
            next = acceptor.next() => next,
            // A failed connection does not affect the other connections.
            Some(_) = connections.join_next() => continue,
        };
        let stream = client.into_stream();
        match place {
            Some(place) => {
                let (page, stopped) = (Arc::clone(&page), stopped.clone());
                connections.spawn(async move {
                    let _place = place;
                    let _counted = page.metrics.count_viewer();
                    serve_requests(stream, origin, &page, stopped).await;
                });
            }
            None => {
                if let Ok(place) = Arc::clone(&lobby).try_acquire_owned() {
                    connections.spawn(async move {
                        let _place = place;
                        _ = timeout(REJECTION_TIMEOUT, reject_client(stream)).await;
                    });
                }
            }
        }
    }
    drop(stopper);
    _ = timeout(SHUTDOWN_TIMEOUT, async { while connections.join_next().await.is_some() {} }).await;
    Ok(())
}

/// Answers the requests of a connection, one after the other.
async fn serve_requests(
    stream: Box<dyn ByteStream>,
    origin: Origin,
    page: &Arc<PageContext>,
    mut stopped: watch::Receiver<()>,
) {
    let service = service_fn(|request: Request<Incoming>| async move {
        let mut answer = answer(&request, origin, page).await;
        add_security_headers(answer.headers_mut());
        Ok::<_, Infallible>(answer)
    });
    let limits = page.limits;
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.headers)
        .max_headers(MAX_HEADERS)
        .max_buf_size(MAX_BUFFER_BYTES)
        .serve_connection(TokioIo::new(StallTimeout::new(stream, limits.stall)), service);
    let mut connection = pin!(connection);
    let outcome = tokio::select! {
        outcome = connection.as_mut() => outcome,
        // The `stopped` channel carries no value and closes when the server stops.
        _ = stopped.changed() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = outcome {
        tracing::debug!(%error, "a connection to the HTTP server of the status page failed");
    }
}

/// Answers that there are too many clients, then reads until the client closes the connection. A client may lose the
/// answer if the server closes a connection that has unread input.
async fn reject_client(mut stream: Box<dyn ByteStream>) {
    if stream.write_all(BUSY_RESPONSE).await.is_ok() && stream.shutdown().await.is_ok() {
        let mut unread = [0; 1024];
        while stream.read(&mut unread).await.is_ok_and(|read| read > 0) {}
    }
}

/// A stream whose writes fail after they have made no progress for `patience`.
struct StallTimeout<S> {
    stream: S,
    patience: Duration,
    /// The timer of a write that waits for the client to read.
    clock: Pin<Box<Sleep>>,
    waits: WriteState,
}

#[derive(PartialEq, Eq)]
enum WriteState {
    Idle,
    Waiting,
}

impl<S> StallTimeout<S> {
    pub(super) fn new(stream: S, patience: Duration) -> Self {
        Self { stream, patience, clock: Box::pin(sleep(patience)), waits: WriteState::Idle }
    }

    /// Returns the outcome of a write, or `TimedOut` when the write has waited for `patience`.
    fn poll_with_timeout<T>(&mut self, cx: &mut Context<'_>, outcome: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if outcome.is_ready() {
            self.waits = WriteState::Idle;
            return outcome;
        }
        if self.waits == WriteState::Idle {
            self.waits = WriteState::Waiting;
            self.clock.as_mut().reset(Instant::now() + self.patience);
        }
        ready!(self.clock.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client takes nothing")))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for StallTimeout<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for StallTimeout<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let outcome = Pin::new(&mut this.stream).poll_write(cx, bytes);
        this.poll_with_timeout(cx, outcome)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let outcome = Pin::new(&mut this.stream).poll_write_vectored(cx, bytes);
        this.poll_with_timeout(cx, outcome)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let outcome = Pin::new(&mut this.stream).poll_flush(cx);
        this.poll_with_timeout(cx, outcome)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let outcome = Pin::new(&mut this.stream).poll_shutdown(cx);
        this.poll_with_timeout(cx, outcome)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    #[test]
    fn busy_answer_has_right_length() {
        let text = std::str::from_utf8(BUSY_RESPONSE).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}\r\n", body.len())), "{} bytes", body.len());
    }

    #[tokio::test(start_paused = true)]
    async fn write_ends_only_when_client_stops_reading() {
        let (near, mut far) = duplex(16);
        let mut stream = StallTimeout::new(near, Duration::from_secs(5));
        let writing = tokio::spawn(async move {
            let first = stream.write_all(&[1; 40]).await.map_err(|error| error.kind());
            let second = stream.write_all(&[2; 40]).await.map_err(|error| error.kind());
            (first, second)
        });
        let mut read = [0; 40];
        for part in read.chunks_mut(8) {
            // Each pause of the client is shorter than the server's timeout, but the sum of the pauses is longer.
            sleep(Duration::from_secs(3)).await;
            far.read_exact(part).await.unwrap();
        }
        assert_eq!(writing.await.unwrap(), (Ok(()), Err(io::ErrorKind::TimedOut)));
    }
}
