//! Connects to the daemon (`margay serve`) that keeps a store open, and sends store requests to it.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use driver::{ClusterAddress, Location, Pem, StorePlace};
use futures::StreamExt;
use futures::stream::unfold;
use kv::{
    Batch, Error, ErrorKind, Operation, Purpose, RangeRequest, RangeResponse, Result, Revision, Store, Txn,
    TxnResponse, WatchRequest, WatchStream,
};
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};
use wire::keys::{Request, StoreReply, TimedRequest};
use wire::{FROZEN_TIMEOUT, Frame, FrameKind, Hello, MAX_ANSWER_BODY_BYTES, StoreIdentity, malformed, name, peer};

/// The path of the socket of a store's daemon; `None` for a kind of store that daemons cannot serve.
pub fn socket(location: &Location) -> Option<PathBuf> {
    instance(location).map(|name| name::socket(&name))
}

/// The name of a store's daemon, which is also the instance name of its systemd units.
pub fn instance(location: &Location) -> Option<String> {
    match location.place() {
        StorePlace::Folder(path) => Some(name::of_folder(&canonical(path))),
        StorePlace::Cluster(address) => Some(name::of_cluster(&access(address))),
        _ => None,
    }
}

/// The name that distinguishes the NAT rules of the store at this location from the rules of other stores on the
/// machine. For a cluster, the name contains the cluster's id `guid`, so that it is the same on all nodes and does not
/// change with the endpoints.
pub fn rules_name(location: &Location, guid: &str) -> String {
    match location.place() {
        StorePlace::Cluster(_) if guid.is_empty() => location.facts().name.to_owned(),
        StorePlace::Cluster(_) => format!("{}-{guid}", location.facts().name),
        _ => instance(location).unwrap_or_default(),
    }
}

/// The identity of the cluster at this location; `None` if the location is not a cluster.
pub fn cluster(location: &Location) -> Option<StoreIdentity> {
    Some(StoreIdentity::Cluster { access: access(location.cluster()?) })
}

/// Describes a cluster's endpoints and credentials without secrets. A daemon's identity includes the description of its
/// endpoints and login, so a client with another login never uses the daemon.
fn access(address: &ClusterAddress) -> String {
    let ClusterAddress { endpoints, discovery_srv, access, .. } = address.in_order();
    let user = access.login.as_ref().map(|login| &login.user);
    let certificate = match access.identity.as_ref().map(|identity| &identity.certificate) {
        Some(Pem::File(path)) => Some(path.display().to_string()),
        Some(Pem::Inline(text)) => Some(text.clone()),
        None => None,
    };
    // The `Debug` format quotes each part of the description, so different endpoints or credentials never produce equal
    // texts.
    format!("{endpoints:?} {discovery_srv:?} {user:?} {certificate:?}")
}

/// Resolves the symbolic links in the part of a path that exists.
fn canonical(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let found = path.ancestors().find_map(|above| Some((above, above.canonicalize().ok()?)));
    let Some((above, found)) = found else { return path };
    match path.strip_prefix(above) {
        Ok(rest) if rest.as_os_str().is_empty() => found,
        Ok(rest) => found.join(rest),
        Err(_) => path,
    }
}

/// Returns true if this process trusts a daemon that runs as user `uid` with the store: only root and the store's owner
/// are trusted. If the store does not exist yet, the user of this process counts as the store's owner.
pub fn is_trusted(location: &Location, uid: u32) -> bool {
    let owner = location.path().and_then(|path| fs::metadata(path).ok()).map(|folder| folder.uid());
    uid == 0 || uid == owner.unwrap_or_else(|| nix::unistd::geteuid().as_raw())
}

/// Returns true if the daemon that sent the frame `hello` serves the store at this location and runs the same version
/// of Margay.
pub fn is_meant(location: &Location, hello: &Hello) -> bool {
    hello.is_same_version()
        && match (location.path(), &hello.store) {
            // If the folder contains another engine's files, the daemon is not used: opening the store through the
            // driver reports the right error.
            (Some(folder), _) => {
                let is_ours = || kv_local::engine_in(folder).is_none_or(|engine| engine == location.facts().name);
                hello.has_store_in(folder) && is_ours()
            }
            (None, store) => cluster(location).as_ref() == Some(store),
        }
}

/// Interval between two attempts to connect to a busy daemon whose connection backlog is full.
const BACKLOG_INTERVAL: Duration = Duration::from_millis(5);
/// Maximum number of idle connections to a daemon that a client keeps for later calls.
const MAX_IDLE_CONNECTIONS: usize = 16;

/// A store that a daemon keeps open, and to which this process sends its calls. Clones of a `ServedStore` share their
/// connections to the daemon.
///
/// Each call of a served store uses a connection that no other call uses at the time. Dropping the future of a store
/// call closes the call's connection, and the daemon starts no work for a call whose connection is closed.
#[derive(Clone, Debug)]
pub struct ServedStore {
    shared: Arc<DaemonConnections>,
    purpose: Purpose,
}

#[derive(Debug)]
struct DaemonConnections {
    location: Location,
    /// The store's location as text, which names the store in error messages.
    name: String,
    socket: PathBuf,
    /// Maximum duration of a call to the daemon, counted from when the daemon begins to work on the call.
    within: Duration,
    store: StoreIdentity,
    idle: Mutex<Vec<UnixStream>>,
}

/// Connects to the daemon of a store; returns `None` if no daemon serves the store, so that the caller must open the
/// store itself. `within` is the maximum duration of each call to the daemon.
pub async fn connect(location: &Location, within: Duration) -> Option<ServedStore> {
    let socket = socket(location)?;
    let name = location.to_string();
    match timeout(FROZEN_TIMEOUT.min(within), dial(location, &socket)).await {
        Ok(Ok((stream, hello))) => {
            let (location, store) = (location.clone(), hello.store);
            let idle = Mutex::new(vec![stream]);
            let shared = Arc::new(DaemonConnections { location, name, socket, within, store, idle });
            Some(ServedStore { shared, purpose: Purpose::Any })
        }
        Ok(Err(error)) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => None,
        Ok(Err(error)) => {
            tracing::debug!(%error, store = name, "cannot use the margay daemon; opening the store directly");
            None
        }
        Err(_) => {
            tracing::warn!(store = name, "the margay daemon did not answer in time; opening the store directly");
            None
        }
    }
}

/// Connects to a daemon's socket, and retries while the daemon's connection backlog is full.
async fn connect_to(socket: &Path) -> io::Result<UnixStream> {
    loop {
        match UnixStream::connect(socket).await {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => sleep(BACKLOG_INTERVAL).await,
            connected => return connected,
        }
    }
}

async fn dial(location: &Location, socket: &Path) -> io::Result<(UnixStream, Hello)> {
    let mut stream = connect_to(socket).await?;
    if !is_trusted(location, peer::uid(&stream)?) {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "the daemon runs as another user"));
    }
    let hello: Hello = next(&mut stream).await?.expect(FrameKind::Hello)?.decode()?;
    if !is_meant(location, &hello) {
        return Err(io::Error::other("the daemon has another store, or is of another version"));
    }
    Ok((stream, hello))
}

/// Reads the next frame from the daemon; fails if the connection has ended.
async fn next(stream: &mut UnixStream) -> io::Result<Frame> {
    Frame::read(stream, MAX_ANSWER_BODY_BYTES).await?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

fn is_broken_off(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof)
}

/// The I/O error of a failed call to the daemon, and whether the daemon had begun to work on the call.
enum FailedCall {
    /// The call to the daemon failed before the daemon began to work on it.
    Before(io::Error),
    /// The call to the daemon failed after the daemon had begun to work on it.
    After(io::Error),
}

impl ServedStore {
    /// Returns a handle for writes that release addresses, which may use the reserved space on a full disk.
    #[must_use]
    pub fn to_release(&self) -> Self {
        Self { shared: Arc::clone(&self.shared), purpose: Purpose::Release }
    }

    pub(crate) fn identity(&self) -> &StoreIdentity {
        &self.shared.store
    }

    /// The id of the embedded store that the daemon served on the first connection; empty for a cluster.
    pub fn id(&self) -> &str {
        match &self.shared.store {
            StoreIdentity::Embedded { id, .. } => id,
            StoreIdentity::Nothing | StoreIdentity::Cluster { .. } => "",
        }
    }

    /// Returns the oldest readable revision, and the time of this revision if known.
    ///
    /// # Errors
    /// Any error of reading from the store.
    pub async fn oldest(&self) -> Result<(Revision, Option<SystemTime>)> {
        match self.call(Operation::Range, Request::Oldest).await? {
            StoreReply::Oldest(revision, time) => Ok((revision, time)),
            _ => Err(self.odd(Operation::Range)),
        }
    }

    /// Returns the name of the store's engine, for error messages about invalid requests.
    fn engine(&self) -> &'static str {
        self.shared.location.facts().name
    }

    fn error(&self, kind: ErrorKind, operation: Operation) -> Error {
        Error::new(kind, operation, self.shared.name.clone())
    }

    /// Takes an idle connection to the daemon, or opens a new connection.
    async fn link(&self, operation: Operation) -> Result<UnixStream> {
        let idle = || self.shared.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        while let Some(stream) = idle() {
            // An idle connection to the daemon may be closed already, because the daemon closes connections that are
            // idle for too long.
            if !peer::is_gone(&stream) {
                return Ok(stream);
            }
        }
        let DaemonConnections { location, socket, store, within, .. } = &*self.shared;
        let not_sent =
            || self.error(ErrorKind::NotSent, operation).with_detail("the daemon margay serve has ended or hangs");
        match timeout(FROZEN_TIMEOUT.min(*within), dial(location, socket)).await {
            Ok(Ok((stream, hello))) if hello.store == *store => Ok(stream),
            Ok(Ok(_)) => Err(self.error(ErrorKind::RevisionRegressed, operation)),
            Ok(Err(error)) => Err(not_sent().with_source(error)),
            Err(_) => Err(not_sent()),
        }
    }

    fn keep(&self, stream: UnixStream) {
        let mut idle = self.shared.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < MAX_IDLE_CONNECTIONS {
            idle.push(stream);
        }
    }

    /// Sends a request to the daemon, and waits until the daemon begins to work on the request.
    async fn begin(&self, stream: &mut UnixStream, frame: &Frame) -> Result<(), FailedCall> {
        let begin = async {
            stream.write_all(&frame.to_bytes()).await.map_err(FailedCall::Before)?;
            match Frame::read(stream, MAX_ANSWER_BODY_BYTES).await {
                Ok(Some(frame)) => frame.expect(FrameKind::Taken).map(drop).map_err(FailedCall::Before),
                Ok(None) => Err(FailedCall::Before(io::ErrorKind::UnexpectedEof.into())),
                // The connection to the daemon ended inside a frame, so the daemon had already begun to answer the
                // call.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(FailedCall::After(error)),
                Err(error) => Err(FailedCall::Before(error)),
            }
        };
        timeout(FROZEN_TIMEOUT, begin).await.unwrap_or_else(|_| Err(FailedCall::Before(io::ErrorKind::TimedOut.into())))
    }

    async fn attempt(&self, stream: &mut UnixStream, frame: &Frame) -> Result<StoreReply, FailedCall> {
        self.begin(stream, frame).await?;
        // The daemon knows the time limit of the call from the request, and normally answers before this client's
        // longer timeout.
        match timeout(self.shared.within + FROZEN_TIMEOUT, next(stream)).await {
            Ok(answer) => answer.and_then(|frame| frame.expect(FrameKind::Answer)?.decode()).map_err(FailedCall::After),
            Err(_) => Err(FailedCall::After(io::ErrorKind::TimedOut.into())),
        }
    }

    fn frame(&self, operation: Operation, request: Request) -> Result<Frame> {
        let asked = TimedRequest { within: self.shared.within, request };
        Frame::new(FrameKind::Keys, &asked)
            .map_err(|error| self.error(ErrorKind::Undecodable, operation).with_source(error))
    }

    async fn call(&self, operation: Operation, request: Request) -> Result<StoreReply> {
        let writes = match &request {
            Request::Txn(txn, _) => !txn.is_read_only(),
            Request::Compact(_) => true,
            _ => false,
        };
        let frame = self.frame(operation, request)?;
        let mut attempts = 0;
        loop {
            attempts += 1;
            let mut stream = self.link(operation).await?;
            match self.attempt(&mut stream, &frame).await {
                Ok(StoreReply::Failed(failed)) => {
                    self.keep(stream);
                    return Err(failed.into());
                }
                Ok(answer) => {
                    self.keep(stream);
                    return Ok(answer);
                }
                Err(FailedCall::After(error)) if error.kind() == io::ErrorKind::TimedOut => {
                    return Err(self.error(ErrorKind::Timeout, operation));
                }
                // The daemon may have carried out the write before the connection failed, so the client must not repeat
                // the write.
                Err(FailedCall::After(error)) if writes || !is_broken_off(&error) => {
                    let kind = ErrorKind::Disconnected { resume_from: Revision::UNSET };
                    return Err(self.error(kind, operation).with_source(error));
                }
                // The call to the daemon is retried once, because the daemon may have closed the idle connection or may
                // have been restarted.
                Err(FailedCall::Before(_) | FailedCall::After(_)) if attempts == 1 => {}
                Err(FailedCall::Before(error) | FailedCall::After(error)) => {
                    return Err(self.error(ErrorKind::NotSent, operation).with_source(error));
                }
            }
        }
    }

    fn odd(&self, operation: Operation) -> Error {
        self.error(ErrorKind::Undecodable, operation).with_source(malformed("the answer to another request"))
    }
}

#[async_trait]
impl Store for ServedStore {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        request.check(self.engine())?;
        match self.call(Operation::Range, Request::Range(request)).await? {
            StoreReply::Range(answer) => Ok(answer),
            _ => Err(self.odd(Operation::Range)),
        }
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        txn.check(self.engine())?;
        match self.call(Operation::Txn, Request::Txn(txn, self.purpose)).await? {
            StoreReply::Txn(answer) => Ok(answer),
            _ => Err(self.odd(Operation::Txn)),
        }
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        request.check(self.engine())?;
        let frame = self.frame(Operation::Watch, Request::Watch(request.clone()))?;
        let mut stream = self.link(Operation::Watch).await?;
        if self.begin(&mut stream, &frame).await.is_err() {
            stream = self.link(Operation::Watch).await?;
            let begun = self.begin(&mut stream, &frame).await;
            begun.map_err(|(FailedCall::Before(error) | FailedCall::After(error))| {
                self.error(ErrorKind::NotSent, Operation::Watch).with_source(error)
            })?;
        }
        let mut watching = ServedWatch { store: self.clone(), stream: Some(stream), resume_from: request.start };
        match watching.item().await {
            Ok(StoreReply::Watching) => Ok(unfold(watching, ServedWatch::next).boxed()),
            Ok(_) => Err(self.odd(Operation::Watch)),
            // The daemon has not begun the watch, so the client can repeat the request for the watch.
            Err(error) if matches!(error.kind(), ErrorKind::Disconnected { .. }) => {
                Err(self.error(ErrorKind::NotSent, Operation::Watch).with_source(error))
            }
            Err(error) => Err(error),
        }
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        revision.check(self.engine())?;
        match self.call(Operation::Compact, Request::Compact(revision)).await? {
            StoreReply::Compacted => Ok(()),
            _ => Err(self.odd(Operation::Compact)),
        }
    }
}

/// A watch that receives its events through a connection to the daemon.
struct ServedWatch {
    store: ServedStore,
    /// The watch's connection to the daemon; `None` once the watch has ended.
    stream: Option<UnixStream>,
    /// The revision at which the watch resumes, which follows the last received batch of events.
    resume_from: Revision,
}

impl ServedWatch {
    async fn item(&mut self) -> Result<StoreReply> {
        let kind = ErrorKind::Disconnected { resume_from: self.resume_from };
        let lost = self.store.error(kind, Operation::Watch);
        let Some(stream) = &mut self.stream else { return Err(lost) };
        match next(stream).await.and_then(|frame| frame.expect(FrameKind::Answer)?.decode()) {
            Ok(StoreReply::Failed(failed)) => Err(failed.into()),
            Ok(answer) => Ok(answer),
            Err(error) => Err(lost.with_source(error)),
        }
    }

    async fn next(mut self) -> Option<(Result<Batch>, Self)> {
        self.stream.as_ref()?;
        let item = match self.item().await {
            Ok(StoreReply::Happened(batch)) => {
                self.resume_from = batch.revision.next();
                Ok(batch)
            }
            Ok(_) => Err(self.store.odd(Operation::Watch)),
            Err(error) => Err(error),
        };
        if item.is_err() {
            self.stream = None;
        }
        Some((item, self))
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use driver::{Access, Login};
    use tokio::net::UnixSocket;

    use super::*;

    fn at(url: &str) -> Location {
        stores::at(url).unwrap()
    }

    #[test]
    fn socket_is_same_for_link_and_target() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        fs::create_dir(root.join("real")).unwrap();
        std::os::unix::fs::symlink(root.join("real"), root.join("link")).unwrap();
        let name = |path: &str| instance(&at(&format!("sled://{}", root.join(path).display()))).unwrap();
        assert_eq!(name("link"), name("real"));
        assert_eq!(name("link/a/b"), name("real/a/b"), "a path that does not exist yet");
        assert_ne!(name("real/a"), name("real/b"));
        assert_eq!(instance(&at("memory:")), None);
    }

    #[test]
    fn socket_of_default_store_has_name_of_systemd() {
        let name = instance(&at("sled:///nowhere/margay/ipam.sled"));
        assert_eq!(name.as_deref(), Some("nowhere-margay-ipam.sled"));
    }

    #[test]
    fn socket_is_apart_for_each_identity() {
        let plain = at("etcd://a:1,b:2");
        assert_eq!(instance(&plain), instance(&at("etcd://b:2,a:1")));
        let login = Some(Login { user: "calico".to_owned(), password: "hidden".to_owned() });
        let Ok(named) = plain.clone().with_access(|access| Ok::<_, Infallible>(Access { login, ..access }));
        assert_ne!(instance(&plain), instance(&named));
        assert!(!instance(&named).unwrap().contains("hidden"));
    }

    #[tokio::test]
    async fn socket_is_waited_for_when_backlog_is_full() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("sock");
        let listener = UnixSocket::new_stream().unwrap();
        listener.bind(&socket).unwrap();
        let listener = listener.listen(0).unwrap();
        let _first = UnixStream::connect(&socket).await.unwrap();
        assert_eq!(UnixStream::connect(&socket).await.unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let second = tokio::spawn(async move { connect_to(&socket).await });
        sleep(BACKLOG_INTERVAL * 3).await;
        assert!(!second.is_finished());
        let _accepted = listener.accept().await.unwrap();
        second.await.unwrap().unwrap();
    }
}
