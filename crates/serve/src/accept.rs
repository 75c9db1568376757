//! The acceptance of clients: on the private socket, for the page, and for etcd's API.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::sleep;

/// How long to wait before the next client is accepted after the system refused one, for want of file descriptors say.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// The way in for clients.
#[derive(Debug)]
pub enum Listener {
    /// A port.
    Tcp(TcpListener),
    /// A unix socket.
    Unix(UnixListener),
}

/// A client that has connected.
#[derive(Debug)]
pub(crate) enum ClientStream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// A connection of either kind.
pub(crate) trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for S {}

impl ClientStream {
    /// The connection, of either kind.
    pub(crate) fn into_stream(self) -> Box<dyn ByteStream> {
        match self {
            Self::Tcp(stream) => Box::new(stream),
            Self::Unix(stream) => Box::new(stream),
        }
    }
}

/// The fate of a client that is one too many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExcessPolicy {
    /// It waits in the backlog of the listener until there is room.
    Waits,
    /// It is accepted without a place.
    IsAccepted,
}

/// A listener, and the room for its clients.
#[derive(Debug)]
pub(crate) struct Acceptor {
    /// The purpose of the clients, for the log.
    what: &'static str,
    listener: Listener,
    room: Arc<Semaphore>,
    excess: ExcessPolicy,
}

impl Acceptor {
    pub(crate) fn new(what: &'static str, listener: Listener, room: Arc<Semaphore>, excess: ExcessPolicy) -> Self {
        Self { what, listener, room, excess }
    }

    /// The next client, with its place; `None` for one too many. A call that is dropped loses no client.
    pub(crate) async fn next(&self) -> (ClientStream, Option<OwnedSemaphorePermit>) {
        loop {
            let place = match self.excess {
                // The semaphore is never closed.
                ExcessPolicy::Waits => Arc::clone(&self.room).acquire_owned().await.ok(),
                ExcessPolicy::IsAccepted => None,
            };
            match self.accept().await {
                Ok(client) => return (client, place.or_else(|| Arc::clone(&self.room).try_acquire_owned().ok())),
                Err(error) => {
                    tracing::warn!(%error, what = self.what, "a client could not be accepted");
                    sleep(RETRY_INTERVAL).await;
                }
            }
        }
    }

    async fn accept(&self) -> io::Result<ClientStream> {
        match &self.listener {
            Listener::Tcp(listener) => {
                let (stream, _) = listener.accept().await?;
                // Without it every answer waits for the client's acknowledgement of the one before.
                if let Err(error) = stream.set_nodelay(true) {
                    tracing::debug!(%error, what = self.what, "a client is gone");
                }
                Ok(ClientStream::Tcp(stream))
            }
            Listener::Unix(listener) => Ok(ClientStream::Unix(listener.accept().await?.0)),
        }
    }
}
