//! The life of the daemon: what it starts with, how it says that it is ready and alive, the addresses of its page and its numbers, and how
//! it ends.

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
use wire::Identity;

use crate::accept::Listener;
use crate::api;
use crate::daemon::Daemon;
use crate::http::{self, About, Shown};
use crate::socket::{self, Place};

/// How long the end may take: turns that are under way end within milliseconds.
const END: Duration = Duration::from_secs(5);

/// Why there is no daemon.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// No daemon can serve such a store.
    #[error("{0} is gone with its process, so it cannot be served")]
    Unservable(Location),
    /// Another process serves the store.
    #[error("another margay serve has {0}: see it with: pgrep -a margay; end that one first")]
    Served(Location),
    /// The private socket cannot be had.
    #[error("cannot listen in {folder}: {0}", folder = wire::name::FOLDER)]
    Socket(#[source] io::Error),
    /// The page cannot be offered at this address.
    #[error("cannot listen at {0} for --http: {1}; give another 127.0.0.1:PORT or unix:PATH")]
    Http(String, #[source] io::Error),
    /// etcd's API cannot be offered.
    #[error("{0}")]
    Api(api::Refused),
    /// The store cannot have bounds on its history.
    #[error("the options --history-... take a store of format 2: upgrade it with: margay --store {0} store upgrade")]
    History(Location),
    /// The system refuses something else.
    #[error("cannot start: {0}")]
    System(#[source] io::Error),
}

/// The options of a daemon.
#[derive(Clone, Debug)]
pub struct Options {
    /// The store.
    pub location: Location,
    /// Where the page and the numbers are offered: `HOST:PORT`, or `unix:PATH`.
    pub http: Vec<String>,
    /// The names, besides those of loopback, under which a browser may ask.
    pub hosts: Vec<String>,
    /// Where and how etcd's API is offered.
    pub api: api::Options,
    /// The bounds on its history that a store of format 2 gets; `None` leaves it those that it has.
    pub history: Option<Retention>,
    /// True if a store of an older format, which has no bounds of its own, is refused.
    pub history_required: bool,
    /// The name of this node.
    pub node: String,
    /// The id of this machine's boot, shortened, where it is known.
    pub boot: Option<String>,
}

/// Serves a store until the process is asked to end. `started` is informed once callers are served.
///
/// # Errors
/// The reason why the daemon does not start.
pub async fn run(options: Options, started: impl FnOnce(&str)) -> Result<(), Refusal> {
    let location = options.location.clone();
    let name = served::instance(&location).ok_or_else(|| Refusal::Unservable(location.clone()))?;
    let mut end = signal(SignalKind::terminate()).map_err(Refusal::System)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(Refusal::System)?;
    let place = Place::take(&name, |uid| served::is_trusted(&location, uid)).map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => Refusal::Served(location.clone()),
        _ => Refusal::Socket(error),
    })?;
    socket::remove_stale();
    let listener = listener(&place).map_err(Refusal::Socket)?;
    let mut tasks = JoinSet::new();
    let daemon = Daemon::start(location.clone(), options.history, &mut tasks);
    // The first caller need not wait until the store is open.
    let (identity, _) = daemon.held.identity().await;
    if options.history_required && !daemon.held.has_bounds_of_its_own().await {
        return Err(Refusal::History(location));
    }
    tasks.spawn(Arc::clone(&daemon).listen(listener));
    let pages = offer_page(&daemon, &options, &mut tasks).await?;
    let api = api::offer(&daemon, &location, &options.api, &mut tasks).await.map_err(Refusal::Api)?;
    let missing = if identity == Identity::Nothing { " (there is no store yet)" } else { "" };
    started(&format!("serving {}{missing} at {}{pages}{api}", options.location, place.socket().display()));
    notify(&[NotifyState::Ready]);
    if let Some(within) = sd_notify::watchdog_enabled() {
        tasks.spawn(stay_alive(within));
    }
    tokio::select! {
        _ = end.recv() => {}
        _ = interrupt.recv() => {}
    }
    notify(&[NotifyState::Stopping]);
    place.remove_socket();
    tasks.shutdown().await;
    match timeout(END, daemon.held.close()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(%error, "the store could not be closed cleanly"),
        Err(_) => tracing::warn!("a call did not end in time; what it had committed is durable"),
    }
    Ok(())
}

/// The socket that systemd has passed, or a new one.
fn listener(place: &Place) -> io::Result<UnixListener> {
    let passed: Option<StdUnixListener> = ListenFd::from_env().take_unix_listener(0)?;
    let listener = match passed {
        Some(listener) => listener,
        None => place.listen()?,
    };
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

/// Tells systemd that the process is alive, six times as often as it wants to know: on a machine that is overloaded some of that
/// comes late. A process that hangs is killed then.
async fn stay_alive(within: Duration) {
    loop {
        notify(&[NotifyState::Watchdog]);
        sleep(within / 6).await;
    }
}

fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!(%error, "systemd was not informed");
    }
}

/// The prefix of an address that is the path of a unix socket.
const UNIX: &str = "unix:";

/// Listens at all addresses. Returns the message about it, if any.
///
/// # Errors
/// The address that cannot be had.
async fn offer_page(daemon: &Arc<Daemon>, options: &Options, tasks: &mut JoinSet<()>) -> Result<String, Refusal> {
    let shown = Arc::new(shown_by(daemon, options));
    let mut said = String::new();
    for address in &options.http {
        let listener = listen_for_page(address).await.map_err(|error| Refusal::Http(address.clone(), error))?;
        match &listener {
            Listener::Tcp(listener) => {
                let local = listener.local_addr().map_err(Refusal::System)?;
                said += &format!(", with a page at http://{local}/");
            }
            Listener::Unix(_) => said += &format!(", with a page at {address}"),
        }
        let (shown, address) = (Arc::clone(&shown), address.clone());
        tasks.spawn(async move {
            if let Err(error) = http::serve(listener, shown, pending()).await {
                tracing::error!(%error, address, "the page is not offered any more");
            }
        });
    }
    Ok(said)
}

fn shown_by(daemon: &Arc<Daemon>, options: &Options) -> Shown {
    let nodes = if options.location.is_shared() { Nodes::Registered } else { Nodes::FirstSeen };
    let about = About {
        store: options.location.to_string(),
        engine: options.location.facts().name.to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        node: options.node.clone(),
        boot: options.boot.clone(),
    };
    let store: Arc<dyn Store> = Arc::new(daemon.held.clone());
    let shown = Shown::new(Operator::new(Arc::clone(&store), nodes), about, Arc::clone(&daemon.metrics))
        .with_hosts(options.hosts.clone())
        .with_history(daemon.held.clone());
    if nodes == Nodes::FirstSeen {
        return shown;
    }
    // On a cluster the numbers are those of this node.
    let (ipam, node) = (agent::ipam_on(store, &options.location, None), options.node.clone());
    shown.with_reach(Arc::new(move || ipam.read_scope_of(&node)))
}

async fn listen_for_page(address: &str) -> io::Result<Listener> {
    let Some(path) = address.strip_prefix(UNIX) else {
        return Ok(Listener::Tcp(TcpListener::bind(address).await?));
    };
    let path = Path::new(path);
    // An earlier daemon may have left it.
    if fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
        fs::remove_file(path)?;
    }
    Ok(Listener::Unix(UnixListener::bind(path)?))
}
