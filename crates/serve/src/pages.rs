//! The addresses at which the daemon offers its page and its numbers.

use std::fs;
use std::future::pending;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;

use ipam_core::Nodes;
use ipam_operator::Operator;
use kv::Store;
use tokio::net::{TcpListener, UnixListener};
use tokio::task::JoinSet;

use crate::accept::Listener;
use crate::daemon::Daemon;
use crate::http::{self, About, Shown};
use crate::life::{Options, Refusal};

/// The prefix of an address that is the path of a unix socket.
const UNIX: &str = "unix:";

/// Listens at all addresses. Returns the message about it, if any.
///
/// # Errors
/// The address that cannot be had.
pub(crate) async fn offer(daemon: &Arc<Daemon>, options: &Options, tasks: &mut JoinSet<()>) -> Result<String, Refusal> {
    let shown = Arc::new(shown(daemon, options));
    let mut said = String::new();
    for address in &options.http {
        let listener = listen(address).await.map_err(|error| Refusal::Http(address.clone(), error))?;
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

fn shown(daemon: &Arc<Daemon>, options: &Options) -> Shown {
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
    shown.with_reach(Arc::new(move || ipam.reach_of(&node)))
}

async fn listen(address: &str) -> io::Result<Listener> {
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
