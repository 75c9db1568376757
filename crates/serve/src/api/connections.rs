//! The listeners of the API, and the connections of its clients.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use etcd_api::Client;
use futures::Stream;
use futures::stream::unfold;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tonic::transport::server::Connected;

use super::address::Address;
use super::authority::Corrected;
use super::tls::Tls;
use crate::accept::{self, Acceptor, Excess, Listener};

/// So many clients are connected at once. Further ones are closed at once.
const MOST: usize = 1024;
/// A client has so long for the handshake of TLS.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// The API at one address.
pub(super) struct Offer {
    listener: Listener,
    url: String,
    tls: Option<Arc<Tls>>,
}

impl Offer {
    /// Listens. A unix socket that an earlier daemon has left is replaced; only the daemon's user may connect to it.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) async fn bind(address: &Address, tls: Option<Arc<Tls>>) -> io::Result<Self> {
        let (listener, url) = match address {
            Address::Tcp { addresses, .. } => {
                let listener = TcpListener::bind(&addresses[..]).await?;
                let scheme = if tls.is_some() { "https" } else { "http" };
                let url = format!("{scheme}://{}", listener.local_addr()?);
                (Listener::Tcp(listener), url)
            }
            Address::Unix(path) => (Listener::Unix(bind_unix(path)?), format!("unix://{}", path.display())),
        };
        Ok(Self { listener, url, tls })
    }

    /// The URL, with the port that the system has chosen.
    pub(super) fn url(&self) -> &str {
        &self.url
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

/// The connection of a client.
pub(super) struct Connection {
    io: Corrected<Box<dyn accept::Stream>>,
    client: Client,
    _place: OwnedSemaphorePermit,
}

/// The connections at all addresses, whose tasks end with `tasks`.
pub(super) fn connections(
    offers: Vec<Offer>,
    tasks: &mut JoinSet<()>,
) -> impl Stream<Item = io::Result<Connection>> + use<> {
    let (connected, connections) = mpsc::channel(1);
    let room = Arc::new(Semaphore::new(MOST));
    for offer in offers {
        tasks.spawn(accept_at(offer, Arc::clone(&room), connected.clone()));
    }
    let next = |mut connections: mpsc::Receiver<Connection>| async {
        connections.recv().await.map(|connection| (Ok(connection), connections))
    };
    Box::pin(unfold(connections, next))
}

async fn accept_at(offer: Offer, room: Arc<Semaphore>, connected: mpsc::Sender<Connection>) {
    let Offer { listener, tls, .. } = offer;
    let acceptor = Acceptor::new("etcd's API", listener, room, Excess::IsAccepted);
    loop {
        match acceptor.next().await {
            (client, Some(place)) => admit(client, tls.as_ref(), place, &connected),
            (_, None) => tracing::warn!(most = MOST, "too many clients of etcd's API: one was sent away"),
        }
    }
}

/// Admits a client, after its handshake if it came by TCP and that is wanted.
fn admit(
    client: accept::Client,
    tls: Option<&Arc<Tls>>,
    place: OwnedSemaphorePermit,
    connected: &mpsc::Sender<Connection>,
) {
    let (tls, stream) = match (tls, client) {
        (Some(tls), accept::Client::Tcp(stream)) => (tls, stream),
        (_, client) => return hand_on(client.into_stream(), place, connected),
    };
    let (acceptor, connected) = (tls.acceptor(), connected.clone());
    tokio::spawn(async move {
        match timeout(HANDSHAKE, acceptor.accept(stream)).await {
            Ok(Ok(stream)) => hand_on(Box::new(stream), place, &connected),
            Ok(Err(error)) => tracing::warn!(%error, "a client of etcd's API was sent away in its TLS handshake"),
            Err(_) => tracing::warn!("a client of etcd's API did not complete its TLS handshake"),
        }
    });
}

fn hand_on(io: Box<dyn accept::Stream>, place: OwnedSemaphorePermit, connected: &mpsc::Sender<Connection>) {
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
