//! Connections, with a bound on their number, on the time of each, and on the time for which a client takes no byte.

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

use super::Shown;
use super::answer::secure;
use super::route::{Origin, answer};
use crate::accept::{Acceptor, Excess, Listener, Stream};

/// The bytes that a connection reads ahead and holds back.
const BUFFER: usize = 16 * 1024;
/// The most headers of a request.
const HEADERS: usize = 64;
/// The time that requests have to end when the daemon does.
const FAREWELL: Duration = Duration::from_millis(500);
/// The most clients that are refused at a time because there are too many.
const TURNED_AWAY: usize = 64;
/// The longest time to tell one.
const TELLING: Duration = Duration::from_millis(500);

/// The answer to a client that is one too many.
const BUSY: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\n\
    content-length: 32\r\ncache-control: no-store\r\nretry-after: 5\r\nconnection: close\r\n\r\n\
    too many connections; try again\n";

/// Answers the clients of a listener until `stop` is done. Open requests then have half a second; streams of events end after it.
///
/// # Errors
/// None now; an error of a connection ends that connection.
pub async fn serve(listener: Listener, shown: Arc<Shown>, stop: impl Future<Output = ()>) -> io::Result<()> {
    let origin = match &listener {
        Listener::Tcp(_) => Origin::Network,
        Listener::Unix(_) => Origin::Socket,
    };
    let room = Arc::new(Semaphore::new(shown.limits.connections));
    let acceptor = Acceptor::new("the page", listener, room, Excess::IsAccepted);
    let lobby = Arc::new(Semaphore::new(TURNED_AWAY));
    let (stopper, stopped) = watch::channel(());
    let mut connections = JoinSet::new();
    let mut stop = pin!(stop);
    loop {
        let (client, place) = tokio::select! {
            () = &mut stop => break,
            next = acceptor.next() => next,
            // The outcome of a connection is no concern of others.
            Some(_) = connections.join_next() => continue,
        };
        let stream = client.into_stream();
        match place {
            Some(place) => {
                let (shown, stopped) = (Arc::clone(&shown), stopped.clone());
                connections.spawn(async move {
                    let _place = place;
                    let _counted = shown.metrics.viewer();
                    converse(stream, origin, &shown, stopped).await;
                });
            }
            None => {
                if let Ok(place) = Arc::clone(&lobby).try_acquire_owned() {
                    connections.spawn(async move {
                        let _place = place;
                        _ = timeout(TELLING, turn_away(stream)).await;
                    });
                }
            }
        }
    }
    drop(stopper);
    _ = timeout(FAREWELL, async { while connections.join_next().await.is_some() {} }).await;
    Ok(())
}

/// Answers the requests of a connection, one after the other.
async fn converse(stream: Box<dyn Stream>, origin: Origin, shown: &Arc<Shown>, mut stopped: watch::Receiver<()>) {
    let service = service_fn(|request: Request<Incoming>| async move {
        let mut answer = answer(&request, origin, shown).await;
        secure(answer.headers_mut());
        Ok::<_, Infallible>(answer)
    });
    let limits = shown.limits;
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.headers)
        .max_headers(HEADERS)
        .max_buf_size(BUFFER)
        .serve_connection(TokioIo::new(Stalling::new(stream, limits.stall)), service);
    let mut connection = pin!(connection);
    let outcome = tokio::select! {
        outcome = connection.as_mut() => outcome,
        // The sender says nothing; it goes with the daemon.
        _ = stopped.changed() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = outcome {
        tracing::debug!(%error, "an HTTP connection ended");
    }
}

/// Tells a client that there are too many, and lets it read that: a connection that is closed with something unread takes
/// the answer with it.
async fn turn_away(mut stream: Box<dyn Stream>) {
    if stream.write_all(BUSY).await.is_ok() && stream.shutdown().await.is_ok() {
        let mut unread = [0; 1024];
        while stream.read(&mut unread).await.is_ok_and(|read| read > 0) {}
    }
}

/// A stream with a bound on the time of a write: it fails if it could not go on for so long.
struct Stalling<S> {
    stream: S,
    patience: Duration,
    /// Runs while a write waits.
    clock: Pin<Box<Sleep>>,
    waits: Waits,
}

/// The state of a write.
#[derive(PartialEq, Eq)]
enum Waits {
    No,
    Yes,
}

impl<S> Stalling<S> {
    pub(super) fn new(stream: S, patience: Duration) -> Self {
        Self { stream, patience, clock: Box::pin(sleep(patience)), waits: Waits::No }
    }

    /// Lets a write wait, but not for ever.
    fn judge<T>(&mut self, cx: &mut Context<'_>, outcome: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if outcome.is_ready() {
            self.waits = Waits::No;
            return outcome;
        }
        if self.waits == Waits::No {
            self.waits = Waits::Yes;
            self.clock.as_mut().reset(Instant::now() + self.patience);
        }
        ready!(self.clock.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client takes nothing")))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Stalling<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Stalling<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let outcome = Pin::new(&mut this.stream).poll_write(cx, bytes);
        this.judge(cx, outcome)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let outcome = Pin::new(&mut this.stream).poll_write_vectored(cx, bytes);
        this.judge(cx, outcome)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let outcome = Pin::new(&mut this.stream).poll_flush(cx);
        this.judge(cx, outcome)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let outcome = Pin::new(&mut this.stream).poll_shutdown(cx);
        this.judge(cx, outcome)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    #[test]
    fn busy_answer_has_right_length() {
        let text = std::str::from_utf8(BUSY).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}\r\n", body.len())), "{} bytes", body.len());
    }

    #[tokio::test(start_paused = true)]
    async fn write_ends_only_when_client_stops_reading() {
        let (near, mut far) = duplex(16);
        let mut stream = Stalling::new(near, Duration::from_secs(5));
        let writing = tokio::spawn(async move {
            let first = stream.write_all(&[1; 40]).await.map_err(|error| error.kind());
            let second = stream.write_all(&[2; 40]).await.map_err(|error| error.kind());
            (first, second)
        });
        let mut read = [0; 40];
        for part in read.chunks_mut(8) {
            // Each wait is shorter than the client is given, all together are longer.
            sleep(Duration::from_secs(3)).await;
            far.read_exact(part).await.unwrap();
        }
        assert_eq!(writing.await.unwrap(), (Ok(()), Err(io::ErrorKind::TimedOut)));
    }
}
