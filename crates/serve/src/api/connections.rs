//! Listens for clients of etcd's API and accepts their connections. With mutual TLS, the server and every client show a
//! certificate.

use std::fs::{self, Permissions};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};
use std::{fmt, io};

use etcd_api::ClientShare;
use futures::Stream;
use futures::stream::unfold;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};
use tonic::transport::server::Connected;

use super::authority::AuthorityFilter;
use super::{ApiOptions, ListenAddress};
use crate::accept::{self, Acceptor, ExcessPolicy, Listener};

/// Maximum number of connected clients. When the maximum number of API clients is connected, further clients are
/// disconnected immediately.
const MAX_CLIENTS: usize = 1024;
/// Time limit for a client's TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
pub(super) struct ApiListener {
    listener: Listener,
    url: String,
    tls: Option<Arc<ReloadingTls>>,
}

impl ApiListener {
    /// Listens for API clients at an address. Replaces a unix socket file that an earlier daemon did not remove. Only
    /// the daemon's user may connect to a unix socket.
    ///
    /// # Errors
    /// Any I/O error.
    pub(super) async fn bind(address: &ListenAddress, tls: Option<Arc<ReloadingTls>>) -> io::Result<Self> {
        let (listener, url) = match address {
            ListenAddress::Tcp { addresses, .. } => {
                let listener = TcpListener::bind(&addresses[..]).await?;
                let scheme = if tls.is_some() { "https" } else { "http" };
                let url = format!("{scheme}://{}", listener.local_addr()?);
                (Listener::Tcp(listener), url)
            }
            ListenAddress::Unix(path) => (Listener::Unix(bind_unix(path)?), format!("unix://{}", path.display())),
        };
        Ok(Self { listener, url, tls })
    }

    /// The URL of this listener, with the actual port if the system chose the port.
    pub(super) fn url(&self) -> &str {
        &self.url
    }
}

fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    if fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
        fs::remove_file(path)?;
    }
    // The socket is moved to its path only after its mode is set, so that no other user can ever connect to the socket.
    let draft = path.with_extension(format!("{}.new", std::process::id()));
    let listener = UnixListener::bind(&draft)?;
    let placed = fs::set_permissions(&draft, Permissions::from_mode(0o600)).and_then(|()| fs::rename(&draft, path));
    if placed.is_err() {
        let _ = fs::remove_file(&draft);
    }
    placed.map(|()| listener)
}

/// A client connection, which counts against the maximum number of clients until it closes.
pub(super) struct ApiConnection {
    io: AuthorityFilter<Box<dyn accept::ByteStream>>,
    client: ClientShare,
    _place: OwnedSemaphorePermit,
}

/// Returns a stream of the connections that all listeners accept. Spawns the accept loops of the listeners on the
/// `JoinSet` `tasks`.
pub(super) fn accept_connections(
    offers: Vec<ApiListener>,
    tasks: &mut JoinSet<()>,
) -> impl Stream<Item = io::Result<ApiConnection>> + use<> {
    let (connected, connections) = mpsc::channel(1);
    let room = Arc::new(Semaphore::new(MAX_CLIENTS));
    for offer in offers {
        tasks.spawn(accept_at(offer, Arc::clone(&room), connected.clone()));
    }
    let next = |mut connections: mpsc::Receiver<ApiConnection>| async {
        connections.recv().await.map(|connection| (Ok(connection), connections))
    };
    Box::pin(unfold(connections, next))
}

async fn accept_at(offer: ApiListener, room: Arc<Semaphore>, connected: mpsc::Sender<ApiConnection>) {
    let ApiListener { listener, tls, .. } = offer;
    let acceptor = Acceptor::new("the etcd API that margay serves", listener, room, ExcessPolicy::IsAccepted);
    loop {
        match acceptor.next().await {
            (client, Some(place)) => admit(client, tls.as_ref(), place, &connected),
            (_, None) => tracing::warn!(
                most = MAX_CLIENTS,
                "rejected a client of the etcd API that margay serves, because too many clients are connected"
            ),
        }
    }
}

/// Admits a client. With TLS, a TCP connection is passed on only after its handshake is complete.
fn admit(
    client: accept::ClientStream,
    tls: Option<&Arc<ReloadingTls>>,
    place: OwnedSemaphorePermit,
    connected: &mpsc::Sender<ApiConnection>,
) {
    let (tls, stream) = match (tls, client) {
        (Some(tls), accept::ClientStream::Tcp(stream)) => (tls, stream),
        (_, client) => return hand_on(client.into_stream(), place, connected),
    };
    let (acceptor, connected) = (tls.acceptor(), connected.clone());
    tokio::spawn(async move {
        match timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await {
            Ok(Ok(stream)) => hand_on(Box::new(stream), place, &connected),
            Ok(Err(error)) => {
                tracing::warn!(%error, "a TLS handshake failed with a client of the etcd API that margay serves");
            }
            Err(_) => {
                tracing::warn!("a client of the etcd API that margay serves did not complete its TLS handshake");
            }
        }
    });
}

fn hand_on(io: Box<dyn accept::ByteStream>, place: OwnedSemaphorePermit, connected: &mpsc::Sender<ApiConnection>) {
    let connected = connected.clone();
    tokio::spawn(async move {
        // Sending an accepted connection to the API's server fails only when the daemon stops.
        let _ = connected
            .send(ApiConnection { io: AuthorityFilter::new(io), client: ClientShare::default(), _place: place })
            .await;
    });
}

impl Connected for ApiConnection {
    type ConnectInfo = ClientShare;

    fn connect_info(&self) -> ClientShare {
        self.client.clone()
    }
}

impl AsyncRead for ApiConnection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, into)
    }
}

impl AsyncWrite for ApiConnection {
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

/// Paths of the API's TLS files, all in PEM form.
#[derive(Clone, Debug)]
pub(super) struct TlsFiles {
    cert: PathBuf,
    key: PathBuf,
    client_ca: PathBuf,
}

/// Size and modification time of each TLS file; `None` for a file whose metadata cannot be read.
type FileStamp = [Option<(u64, SystemTime)>; 3];

/// The server's TLS configuration, which is loaded again when a TLS file has changed.
pub(super) struct ReloadingTls {
    files: TlsFiles,
    current: Mutex<(FileStamp, Arc<ServerConfig>)>,
}

impl fmt::Debug for ReloadingTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReloadingTls").field("files", &self.files).finish_non_exhaustive()
    }
}

impl TlsFiles {
    /// Takes the paths of the TLS files from the options. Returns `None` unless the options contain the paths of the
    /// certificate, the key and the CA.
    pub(super) fn of(options: &ApiOptions) -> Option<Self> {
        let ApiOptions { cert: Some(cert), key: Some(key), client_ca: Some(client_ca), .. } = options else {
            return None;
        };
        Some(Self { cert: cert.clone(), key: key.clone(), client_ca: client_ca.clone() })
    }

    fn stamp(&self) -> FileStamp {
        [&self.cert, &self.key, &self.client_ca]
            .map(|path| path.metadata().and_then(|found| Ok((found.len(), found.modified()?))).ok())
    }

    /// Reads the TLS files. An error message names the faulty TLS file and never quotes the file's content.
    fn load(&self) -> Result<ServerConfig, String> {
        let unusable = |path: &Path, what: &str| format!("{} holds no usable {what}", path.display());
        let mut roots = RootCertStore::empty();
        for authority in certificates(&self.client_ca)? {
            roots.add(authority).map_err(|_| unusable(&self.client_ca, "authority"))?;
        }
        let provider = Arc::new(ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
        let verifier = verifier.build().map_err(|_| unusable(&self.client_ca, "authority"))?;
        let key = PrivateKeyDer::from_pem_slice(&read_file(&self.key)?).map_err(|_| unusable(&self.key, "key"))?;
        let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let builder = builder.map_err(|error| error.to_string())?.with_client_cert_verifier(verifier);
        let config = builder.with_single_cert(certificates(&self.cert)?, key);
        let mut config =
            config.map_err(|_| format!("{} is not the key of {}", self.key.display(), self.cert.display()))?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(config)
    }
}

impl ReloadingTls {
    /// Loads the TLS files.
    ///
    /// # Errors
    /// An error message with the name of the file that cannot be read or used.
    pub(super) fn load(files: TlsFiles) -> Result<Self, String> {
        // The sizes and modification times of the TLS files are read before their content, so that a change between the
        // two reads is noticed when the next client connects.
        let stamp = files.stamp();
        let config = Arc::new(files.load()?);
        Ok(Self { files, current: Mutex::new((stamp, config)) })
    }

    /// Returns the TLS acceptor for the next client. If changed TLS files cannot be used, the current certificate stays
    /// in use.
    pub(super) fn acceptor(&self) -> TlsAcceptor {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let stamp = self.files.stamp();
        if stamp != current.0 {
            current.0 = stamp;
            match self.files.load() {
                Ok(config) => {
                    tracing::info!("loaded the changed TLS certificates for the etcd API that margay serves");
                    current.1 = Arc::new(config);
                }
                Err(why) => {
                    tracing::warn!(
                        why,
                        "cannot load the changed TLS certificates for the etcd API that margay serves; keeping the old \
                         certificates"
                    );
                }
            }
        }
        TlsAcceptor::from(Arc::clone(&current.1))
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let text = read_file(path)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        _ => Err(format!("{} holds no certificate in PEM form", path.display())),
    }
}

fn read_file(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|error: io::Error| format!("cannot read {}: {error}", path.display()))
}
