//! A connection that ends if its client takes no byte for too long.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

/// A stream with a bound on the time of a write: it fails if it could not go on for so long.
pub(super) struct Stalling<S> {
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

    #[tokio::test(start_paused = true)]
    async fn a_write_ends_when_nobody_reads_and_goes_on_when_somebody_does() {
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
