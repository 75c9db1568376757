//! The listeners of the API, and the connections of its clients.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use etcd_api::Client;
use futures::Stream;
use futures::stream::unfold;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tonic::transport::server::Connected;

use super::address::Address;
use super::authority::Corrected;
use super::tls::Tls;

/// So many clients are connected at once. Further ones are closed at once.
const MOST: usize = 1024;
/// A client has so long for the handshake of TLS.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long to wait before the next client is accepted after the system refused one.
const PAUSE: Duration = Duration::from_millis(50);

/// A listener of the API.
pub(super) enum Listener {
    Tcp(TcpListener, Option<Arc<Tls>>),
    Unix(UnixListener, PathBuf),
}

impl Listener {
    /// Listens. A unix socket that an earlier daemon has left is replaced; only the daemon's user may connect to it.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) async fn bind(address: &Address, tls: Option<Arc<Tls>>) -> io::Result<Self> {
        match address {
            Address::Tcp { addresses, .. } => Ok(Self::Tcp(TcpListener::bind(&addresses[..]).await?, tls)),
            Address::Unix(path) => Ok(Self::Unix(bind_unix(path)?, path.clone())),
        }
    }

    /// The URL, with the port that the system has chosen.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn url(&self) -> io::Result<String> {
        Ok(match self {
            Self::Tcp(listener, None) => format!("http://{}", listener.local_addr()?),
            Self::Tcp(listener, Some(_)) => format!("https://{}", listener.local_addr()?),
            Self::Unix(_, path) => format!("unix://{}", path.display()),
        })
    }
}

fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    if fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
        fs::remove_file(path)?;
    }
    // Nobody can connect between the two steps: the socket is another one until it is for its user alone.
    let draft = path.with_extension(format!("{}.new", std::process::id()));
    let listener = UnixListener::bind(&draft)?;
    let placed = fs::set_permissions(&draft, Permissions::from_mode(0o600)).and_then(|()| fs::rename(&draft, path));
    if placed.is_err() {
        let _ = fs::remove_file(&draft);
    }
    placed.map(|()| listener)
}

trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// The connection of a client.
pub(super) struct Connection {
    io: Corrected<Box<dyn Io>>,
    client: Client,
    _place: OwnedSemaphorePermit,
}

/// The connections of all listeners, whose tasks end with `tasks`.
pub(super) fn accept(
    listeners: Vec<Listener>,
    tasks: &mut JoinSet<()>,
) -> impl Stream<Item = io::Result<Connection>> + use<> {
    let (connected, connections) = mpsc::channel(1);
    let room = Arc::new(Semaphore::new(MOST));
    for listener in listeners {
        tasks.spawn(accept_at(listener, Arc::clone(&room), connected.clone()));
    }
    let next = |mut connections: mpsc::Receiver<Connection>| async {
        connections.recv().await.map(|connection| (Ok(connection), connections))
    };
    Box::pin(unfold(connections, next))
}

async fn accept_at(listener: Listener, room: Arc<Semaphore>, connected: mpsc::Sender<Connection>) {
    loop {
        let place = || Arc::clone(&room).try_acquire_owned();
        let accepted = match &listener {
            Listener::Tcp(listener, tls) => match listener.accept().await {
                Ok((stream, _)) => place().map(|place| admit(stream, tls.as_ref(), place, &connected)),
                Err(error) => {
                    refused(&error).await;
                    continue;
                }
            },
            Listener::Unix(listener, _) => match listener.accept().await {
                Ok((stream, _)) => place().map(|place| hand_on(Box::new(stream), place, &connected)),
                Err(error) => {
                    refused(&error).await;
                    continue;
                }
            },
        };
        if accepted.is_err() {
            tracing::warn!(most = MOST, "too many clients of etcd's API: one was sent away");
        }
    }
}

async fn refused(error: &io::Error) {
    tracing::warn!(%error, "a client of etcd's API could not be accepted");
    sleep(PAUSE).await;
}

/// Admits a client that came by TCP, after its handshake if that is wanted.
fn admit(stream: TcpStream, tls: Option<&Arc<Tls>>, place: OwnedSemaphorePermit, connected: &mpsc::Sender<Connection>) {
    // Without it every answer waits for the client's acknowledgement of the one before.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "a client of etcd's API is gone");
        return;
    }
    let Some(tls) = tls else { return hand_on(Box::new(stream), place, connected) };
    let (acceptor, connected) = (tls.acceptor(), connected.clone());
    tokio::spawn(async move {
        match timeout(HANDSHAKE, acceptor.accept(stream)).await {
            Ok(Ok(stream)) => hand_on(Box::new(stream), place, &connected),
            Ok(Err(error)) => tracing::warn!(%error, "a client of etcd's API was sent away in its TLS handshake"),
            Err(_) => tracing::warn!("a client of etcd's API did not complete its TLS handshake"),
        }
    });
}

fn hand_on(io: Box<dyn Io>, place: OwnedSemaphorePermit, connected: &mpsc::Sender<Connection>) {
    let connected = connected.clone();
    tokio::spawn(async move {
        // An error means that the daemon ends.
        let _ = connected.send(Connection { io: Corrected::new(io), client: Client::default(), _place: place }).await;
    });
}

impl Connected for Connection {
    type ConnectInfo = Client;

    fn connect_info(&self) -> Client {
        self.client.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, into)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
