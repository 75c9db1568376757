//! Accepts clients on the private socket and on the listeners of the web page and of etcd's API.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::sleep;

/// How long to wait after a failed accept. Accepting fails, for example, when file descriptors have run out.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// A listening socket of the daemon.
#[derive(Debug)]
pub enum Listener {
    /// A listening TCP socket.
    Tcp(TcpListener),
    /// A listening unix socket.
    Unix(UnixListener),
}

/// An accepted client connection.
#[derive(Debug)]
pub(crate) enum ClientStream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// The traits of a boxed TCP, TLS or unix connection.
pub(crate) trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for S {}

impl ClientStream {
    pub(crate) fn into_stream(self) -> Box<dyn ByteStream> {
        match self {
            Self::Tcp(stream) => Box::new(stream),
            Self::Unix(stream) => Box::new(stream),
        }
    }
}

/// The treatment of a client that exceeds the maximum number of clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExcessPolicy {
    /// Leaves the client in the listener's backlog until another client disconnects.
    Waits,
    /// Accepts the client without a permit; the caller can then reject the client.
    IsAccepted,
}

/// A listener, and the permits that limit the number of the listener's connections.
#[derive(Debug)]
pub(crate) struct Acceptor {
    /// The kind of clients that connect to this listener, for log messages.
    what: &'static str,
    listener: Listener,
    room: Arc<Semaphore>,
    excess: ExcessPolicy,
}

impl Acceptor {
    pub(crate) fn new(what: &'static str, listener: Listener, room: Arc<Semaphore>, excess: ExcessPolicy) -> Self {
        Self { what, listener, room, excess }
    }

    /// Accepts the next client. The permit is `None` if the client exceeds the maximum number of clients. No client is
    /// lost if the returned future is dropped before it completes.
    pub(crate) async fn next(&self) -> (ClientStream, Option<OwnedSemaphorePermit>) {
        loop {
            let place = match self.excess {
                // Acquiring a permit cannot fail, because the semaphore is never closed.
                ExcessPolicy::Waits => Arc::clone(&self.room).acquire_owned().await.ok(),
                ExcessPolicy::IsAccepted => None,
            };
            match self.accept().await {
                Ok(client) => return (client, place.or_else(|| Arc::clone(&self.room).try_acquire_owned().ok())),
                Err(error) => {
                    tracing::warn!(%error, what = self.what, "cannot accept a client connection; trying again");
                    sleep(RETRY_INTERVAL).await;
                }
            }
        }
    }

    async fn accept(&self) -> io::Result<ClientStream> {
        match &self.listener {
            Listener::Tcp(listener) => {
                let (stream, _) = listener.accept().await?;
                // Nagle's algorithm would hold each answer back until the client has acknowledged the previous one.
                if let Err(error) = stream.set_nodelay(true) {
                    tracing::debug!(%error, what = self.what, "a client disconnected while its connection was set up");
                }
                Ok(ClientStream::Tcp(stream))
            }
            Listener::Unix(listener) => Ok(ClientStream::Unix(listener.accept().await?.0)),
        }
    }
}
