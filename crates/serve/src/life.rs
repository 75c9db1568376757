//! Starts and stops the daemon: handles options, opens listeners, notifies systemd, and closes the store cleanly.

use std::future::pending;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener as StdUnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use std::{fs, io};

use datastore::{Location, served};
use ipam_core::Nodes;
use ipam_operator::Operator;
use kv::Store;
use kv_mvcc::Retention;
use listenfd::ListenFd;
use sd_notify::NotifyState;
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use wire::StoreIdentity;

use crate::accept::Listener;
use crate::api;
use crate::daemon::Daemon;
use crate::http::{self, DaemonInfo, PageContext};
use crate::socket::{self, ServeLock};

/// Time limit for closing the store. Commits in progress end within milliseconds.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// The reason why the daemon cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The store exists only in the memory of its process.
    #[error("{0} is gone with its process, so it cannot be served")]
    Unservable(Location),
    /// Another daemon serves the store.
    #[error("another margay serve has {0}: see it with: pgrep -a margay; end that one first")]
    Served(Location),
    /// The daemon cannot create the private socket.
    #[error("cannot listen in {folder}: {0}", folder = wire::name::SOCKET_FOLDER)]
    Socket(#[source] io::Error),
    /// The daemon cannot offer the web page at this address.
    #[error("cannot listen at {0} for --http: {1}; give another 127.0.0.1:PORT or unix:PATH")]
    Http(String, #[source] io::Error),
    /// The daemon cannot offer etcd's API.
    #[error("{0}")]
    Api(api::ApiError),
    /// The store's format cannot keep bounds on its history.
    #[error("the options --history-... take a store of format 2: upgrade it with: margay --store {0} store upgrade")]
    History(Location),
    /// An operating-system error that prevents the start, for example while signal handlers are set up.
    #[error("cannot start: {0}")]
    System(#[source] io::Error),
}

/// Options of the daemon.
#[derive(Clone, Debug)]
pub struct Options {
    /// The location of the store.
    pub location: Location,
    /// Addresses (`HOST:PORT` or `unix:PATH`) at which the daemon serves the web page and the metrics.
    pub http: Vec<String>,
    /// Host names under which a browser may open the web page, besides the loopback names.
    pub hosts: Vec<String>,
    /// Options of etcd's API.
    pub api: api::ApiOptions,
    /// Bounds on the history for a store of format 2; `None` keeps the bounds that the store already has.
    pub history: Option<Retention>,
    /// Whether to refuse a store of an older format, because such a store keeps no bounds on its history.
    pub history_required: bool,
    /// The name of this node.
    pub node: String,
    /// The shortened boot id of this machine, if known.
    pub boot: Option<String>,
}

/// Serves a store until SIGTERM or SIGINT. Calls `started` with the startup line once the daemon serves clients.
///
/// # Errors
/// Returns the reason why the daemon cannot start.
pub async fn run(options: Options, started: impl FnOnce(&str)) -> Result<(), StartError> {
    let location = options.location.clone();
    let name = served::instance(&location).ok_or_else(|| StartError::Unservable(location.clone()))?;
    let mut end = signal(SignalKind::terminate()).map_err(StartError::System)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(StartError::System)?;
    let serve_lock =
        ServeLock::take(&name, |uid| served::is_trusted(&location, uid)).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => StartError::Served(location.clone()),
            _ => StartError::Socket(error),
        })?;
    socket::remove_stale();
    let listener = listener(&serve_lock).map_err(StartError::Socket)?;
    let mut tasks = JoinSet::new();
    let daemon = Daemon::start(location.clone(), options.history, &mut tasks);
    // The store is opened before clients connect, so that the first client need not wait.
    let (identity, _) = daemon.shared_store.identity().await;
    if options.history_required && !daemon.shared_store.has_bounds_of_its_own().await {
        return Err(StartError::History(location));
    }
    tasks.spawn(Arc::clone(&daemon).listen(listener));
    let pages = offer_page(&daemon, &options, &mut tasks).await?;
    let api = api::offer(&daemon, &location, &options.api, &mut tasks).await.map_err(StartError::Api)?;
    let missing = if identity == StoreIdentity::Nothing { " (there is no store yet)" } else { "" };
    started(&format!("serving {}{missing} at {}{pages}{api}", options.location, serve_lock.socket().display()));
    notify(&[NotifyState::Ready]);
    if let Some(within) = sd_notify::watchdog_enabled() {
        tasks.spawn(stay_alive(within));
    }
    tokio::select! {
        _ = end.recv() => {}
        _ = interrupt.recv() => {}
    }
    notify(&[NotifyState::Stopping]);
    serve_lock.remove_socket();
    tasks.shutdown().await;
    match timeout(SHUTDOWN_TIMEOUT, daemon.shared_store.close()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(%error, "the store could not be closed cleanly"),
        Err(_) => tracing::warn!(
            "stopping the daemon while a request still runs; all changes that the request has committed are kept"
        ),
    }
    Ok(())
}

/// Returns the private socket that systemd has passed, or creates a new socket.
fn listener(serve_lock: &ServeLock) -> io::Result<UnixListener> {
    let passed: Option<StdUnixListener> = ListenFd::from_env().take_unix_listener(0)?;
    let listener = match passed {
        Some(listener) => listener,
        None => serve_lock.listen()?,
    };
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

/// Notifies systemd's watchdog six times per watchdog timeout, because some notifications are late on an overloaded
/// machine. Without notifications, systemd kills the daemon.
async fn stay_alive(within: Duration) {
    loop {
        notify(&[NotifyState::Watchdog]);
        sleep(within / 6).await;
    }
}

fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!(%error, "cannot notify systemd of the daemon's state");
    }
}

/// Prefix of an HTTP address that is the path of a unix socket.
const UNIX_PREFIX: &str = "unix:";

/// Offers the web page at all configured addresses. Returns the part of the startup line that lists the addresses.
///
/// # Errors
/// An error that names the address that cannot be used.
async fn offer_page(daemon: &Arc<Daemon>, options: &Options, tasks: &mut JoinSet<()>) -> Result<String, StartError> {
    let page = Arc::new(page_context(daemon, options));
    let mut said = String::new();
    for address in &options.http {
        let listener = listen_for_page(address).await.map_err(|error| StartError::Http(address.clone(), error))?;
        match &listener {
            Listener::Tcp(listener) => {
                let local = listener.local_addr().map_err(StartError::System)?;
                said += &format!(", with a page at http://{local}/");
            }
            Listener::Unix(_) => said += &format!(", with a page at {address}"),
        }
        let (page, address) = (Arc::clone(&page), address.clone());
        tasks.spawn(async move {
            if let Err(error) = http::serve(listener, page, pending()).await {
                tracing::error!(%error, address, "the HTTP server of the status page has stopped");
            }
        });
    }
    Ok(said)
}

fn page_context(daemon: &Arc<Daemon>, options: &Options) -> PageContext {
    let nodes = if options.location.is_shared() { Nodes::Registered } else { Nodes::FirstSeen };
    let about = DaemonInfo {
        store: options.location.to_string(),
        engine: options.location.facts().name.to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        node: options.node.clone(),
        boot: options.boot.clone(),
    };
    let store: Arc<dyn Store> = Arc::new(daemon.shared_store.clone());
    let page = PageContext::new(Operator::new(Arc::clone(&store), nodes), about, Arc::clone(&daemon.metrics))
        .with_hosts(options.hosts.clone())
        .with_history(daemon.shared_store.clone());
    if nodes == Nodes::FirstSeen {
        return page;
    }
    // On a cluster, `/metrics` covers only this node.
    let (ipam, node) = (agent::ipam_for_store(store, &options.location, None), options.node.clone());
    page.with_reach(Arc::new(move || ipam.read_scope_of(&node)))
}

async fn listen_for_page(address: &str) -> io::Result<Listener> {
    let Some(path) = address.strip_prefix(UNIX_PREFIX) else {
        return Ok(Listener::Tcp(TcpListener::bind(address).await?));
    };
    let path = Path::new(path);
    // A socket file of an earlier daemon may still exist at this path.
    if fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
        fs::remove_file(path)?;
    }
    Ok(Listener::Unix(UnixListener::bind(path)?))
}
