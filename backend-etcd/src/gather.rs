//! A connection that sends what belongs together at once.
//!
//! A request is three frames (what is asked, the question, its end), which the library below writes one after the other. Each
//! would be a segment of its own, a call of the kernel here, and something that wakes the server up there. So what is
//! written is kept until nothing more comes when the others have had their turn.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::HttpConnector;
use tonic::transport::Uri;
use tower::Service;

/// So many bytes are sent without waiting for more.
const ENOUGH: usize = 16 * 1024;
/// How often others have a turn before what there is is sent.
const MOST_TURNS: u8 = 3;

/// Makes connections that gather.
#[derive(Clone, Debug)]
pub(crate) struct Gathering(pub(crate) HttpConnector);

type Connecting<T, E> = Pin<Box<dyn Future<Output = Result<T, E>> + Send>>;

impl Service<Uri> for Gathering {
    type Response = Gather<<HttpConnector as Service<Uri>>::Response>;
    type Error = <HttpConnector as Service<Uri>>::Error;
    type Future = Connecting<Self::Response, Self::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Service::<Uri>::poll_ready(&mut self.0, context)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = self.0.call(uri);
        Box::pin(async move { connecting.await.map(Gather::new) })
    }
}

/// A connection that sends when nothing more comes.
#[derive(Debug)]
pub(crate) struct Gather<T> {
    inner: T,
    kept: Vec<u8>,
    /// How much was kept when others last had their turn, and how many turns they have had.
    seen: usize,
    turns: u8,
}

impl<T> Gather<T> {
    fn new(inner: T) -> Self {
        Self { inner, kept: Vec::new(), seen: 0, turns: 0 }
    }
}

impl<T: Write + Unpin> Gather<T> {
    /// Sends all that is kept.
    fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.kept.is_empty() {
            match Pin::new(&mut self.inner).poll_write(context, &self.kept) {
                Poll::Ready(Ok(0)) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Poll::Ready(Ok(sent)) => drop(self.kept.drain(..sent)),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => return Poll::Pending,
            }
        }
        (self.seen, self.turns) = (0, 0);
        Poll::Ready(Ok(()))
    }
}

impl<T: Write + Unpin> Write for Gather<T> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[IoSlice::new(bytes)])
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.kept.len() >= ENOUGH {
            ready!(this.poll_send(context))?;
        }
        parts.iter().for_each(|part| this.kept.extend_from_slice(part));
        Poll::Ready(Ok(parts.iter().map(|part| part.len()).sum()))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.kept.len() > this.seen && this.kept.len() < ENOUGH && this.turns < MOST_TURNS {
            this.seen = this.kept.len();
            this.turns += 1;
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        ready!(this.poll_send(context))?;
        Pin::new(&mut this.inner).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_send(context))?;
        Pin::new(&mut this.inner).poll_shutdown(context)
    }
}

impl<T: Read + Unpin> Read for Gather<T> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_read(context, buffer)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::time::Duration;

    use hyper_util::rt::TokioIo;
    use tokio::io::AsyncReadExt;
    use tokio::time::timeout;

    use super::*;

    async fn write(gather: &mut Gather<impl Write + Unpin>, bytes: &[u8]) {
        let mut left = bytes;
        while !left.is_empty() {
            let written = poll_fn(|context| Pin::new(&mut *gather).poll_write(context, left)).await.unwrap();
            left = &left[written..];
        }
    }

    async fn flush(gather: &mut Gather<impl Write + Unpin>) {
        poll_fn(|context| Pin::new(&mut *gather).poll_flush(context)).await.unwrap();
    }

    #[tokio::test]
    async fn what_is_written_while_others_have_their_turn_goes_along() {
        let (ours, mut theirs) = tokio::io::duplex(1 << 16);
        let mut gather = Gather::new(TokioIo::new(ours));
        write(&mut gather, b"what is asked, ").await;
        let mut first = true;
        poll_fn(|context| {
            let flushed = Pin::new(&mut gather).poll_flush(context);
            if std::mem::take(&mut first) {
                assert!(flushed.is_pending(), "it did not wait");
                let parts = [IoSlice::new(b"the question, "), IoSlice::new(b"its end")];
                assert!(Pin::new(&mut gather).poll_write_vectored(context, &parts).is_ready());
            }
            flushed
        })
        .await
        .unwrap();
        let mut buffer = [0; 64];
        let read = theirs.read(&mut buffer).await.unwrap();
        assert_eq!(&buffer[..read], b"what is asked, the question, its end");
        // Nothing is kept back when nothing more comes.
        write(&mut gather, b"alone").await;
        flush(&mut gather).await;
        let read = timeout(Duration::from_secs(5), theirs.read(&mut buffer)).await.unwrap().unwrap();
        assert_eq!(&buffer[..read], b"alone");
    }

    #[tokio::test]
    async fn all_of_it_arrives_in_order_however_little_the_other_side_takes() {
        let (ours, mut theirs) = tokio::io::duplex(7);
        let all: Vec<u8> = (0..100_000_u32).flat_map(u32::to_le_bytes).collect();
        let expected = all.clone();
        let sending = async move {
            let mut gather = Gather::new(TokioIo::new(ours));
            for (number, part) in all.chunks(4_999).enumerate() {
                write(&mut gather, part).await;
                if number % 3 == 0 {
                    flush(&mut gather).await;
                }
            }
            poll_fn(|context| Pin::new(&mut gather).poll_shutdown(context)).await.unwrap();
        };
        let receiving = async move {
            let mut received = Vec::new();
            theirs.read_to_end(&mut received).await.unwrap();
            received
        };
        let ((), received) = tokio::join!(sending, receiving);
        assert!(received == expected);
    }
}
