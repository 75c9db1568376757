//! Serves `/metrics`, `/health`, `/version` and a web page to browsers and scrapers over HTTP.
//!
//! The HTTP server only reads the store, and only to answer a request. [`ClientLimits`] bound the number of
//! connections, the time for headers, the time for a request, and the time in which a client reads nothing. The web
//! page consists of a few files that are compiled into the program. The web page requests nothing from other hosts, and
//! the headers of every answer forbid requests to other hosts.

mod answer;
mod api;
mod connection;
mod route;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use datastore::shared_store::SharedStore;
use ipam_core::gc::ReadScope;
use ipam_operator::Operator;
use kv::Store;

use crate::metrics::Metrics;
use answer::AnswerCache;

pub use connection::serve;

/// Facts about the daemon that the web page shows, without secrets.
#[derive(Clone, Debug, Default)]
pub struct DaemonInfo {
    /// The URL of the store, without user and password.
    pub store: String,
    /// The name of the store's engine, which is `redb`, `sled` or `etcd`.
    pub engine: String,
    /// The version of the program.
    pub version: String,
    /// The name of this node.
    pub node: String,
    /// The first 8 characters of this machine's boot id, if known.
    pub boot: Option<String>,
}

/// Limits on the HTTP server's connections and requests.
#[derive(Clone, Copy, Debug)]
pub struct ClientLimits {
    /// Maximum number of connections. When the maximum number of connections is reached, further clients get the HTTP
    /// status 503.
    pub connections: usize,
    /// Time limit for receiving the headers of a request. A connection that is idle between two requests is closed
    /// after the `headers` limit, too.
    pub headers: Duration,
    /// Maximum time in which a client reads no byte of an answer, before the server closes the client's connection.
    pub stall: Duration,
    /// Time limit for computing an answer.
    pub answer: Duration,
    /// Time without events after which an event stream sends a comment to keep the connection alive.
    pub heartbeat: Duration,
}

impl Default for ClientLimits {
    fn default() -> Self {
        Self {
            connections: 128,
            headers: Duration::from_secs(10),
            stall: Duration::from_secs(15),
            answer: Duration::from_secs(30),
            heartbeat: Duration::from_secs(15),
        }
    }
}

/// Returns the part of a cluster's store that `/metrics` may read.
pub type NodeReach = Arc<dyn Fn() -> ReadScope + Send + Sync>;

/// The store that the web page shows, and the settings of the HTTP server.
pub struct PageContext {
    /// The store from which the daemon answers HTTP requests.
    pub store: Arc<dyn Store>,
    /// The functions with which operators manage the store's IPAM documents.
    pub operator: Operator,
    /// Facts about the daemon that the web page shows.
    pub about: DaemonInfo,
    /// Metrics of the daemon's own work.
    pub metrics: Arc<Metrics>,
    /// Host names under which a browser may open the web page, besides the loopback names.
    pub hosts: Vec<String>,
    /// Limits on the HTTP server's connections and requests.
    pub limits: ClientLimits,
    /// The store whose history `/metrics` covers; `None` omits the metrics of the history.
    history: Option<SharedStore>,
    /// The part of the store that `/metrics` reads. `None` makes `/metrics` read the whole store, for a store that only
    /// one machine uses.
    pub reach: Option<NodeReach>,
    cache: AnswerCache,
}

impl PageContext {
    /// Creates the context of a web page for the store behind `operator`. Browsers can open the web page only under the
    /// loopback names.
    pub fn new(operator: Operator, about: DaemonInfo, metrics: Arc<Metrics>) -> Self {
        Self {
            store: Arc::clone(operator.ipam().store()),
            operator,
            about,
            metrics,
            hosts: Vec::new(),
            history: None,
            limits: ClientLimits::default(),
            reach: None,
            cache: AnswerCache::default(),
        }
    }

    /// Sets the host names, besides the loopback names, under which browsers may open the web page. The host names must
    /// not include a port.
    #[must_use]
    pub fn with_hosts(mut self, hosts: Vec<String>) -> Self {
        self.hosts = hosts;
        self
    }

    /// Adds metrics of the store's history to `/metrics`, if the store is embedded.
    #[must_use]
    pub fn with_history(mut self, shared_store: SharedStore) -> Self {
        self.history = Some(shared_store);
        self
    }

    /// Replaces the limits on the HTTP server's connections and requests.
    #[must_use]
    pub fn with_limits(mut self, limits: ClientLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Limits `/metrics` to this node's part of a cluster's store, so that the cost of `/metrics` does not grow with
    /// the cluster.
    #[must_use]
    pub fn with_reach(mut self, reach: NodeReach) -> Self {
        self.reach = Some(reach);
        self
    }
}

impl fmt::Debug for PageContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageContext").field("about", &self.about).field("hosts", &self.hosts).finish_non_exhaustive()
    }
}
