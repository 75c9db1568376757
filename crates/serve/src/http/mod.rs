//! The daemon's HTTP side for browsers and scrapers: `/metrics`, `/health`, `/version` and a page.
//!
//! The server only reads, and only to answer a request. [`ClientLimits`] bound the number of connections, the time for
//! headers, the time for a request, and the time in which a client reads nothing. The page is a few files in the
//! program. It requests nothing from other hosts, and the headers of every answer forbid that.

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

/// Facts about the daemon, without secrets.
#[derive(Clone, Debug, Default)]
pub struct DaemonInfo {
    /// The URL of the store, without user and password.
    pub store: String,
    /// The name of the store's engine: `redb`, `sled` or `etcd`.
    pub engine: String,
    /// The version of the program.
    pub version: String,
    /// The name of this node.
    pub node: String,
    /// The first 8 characters of this machine's boot id, if known.
    pub boot: Option<String>,
}

/// Limits on connections and requests.
#[derive(Clone, Copy, Debug)]
pub struct ClientLimits {
    /// Maximum number of connections. Further clients get the answer 503.
    pub connections: usize,
    /// Time limit for the headers of a request. It also ends a connection that is kept open without a request.
    pub headers: Duration,
    /// Maximum time in which a client reads no byte of an answer. After that, the connection is closed.
    pub stall: Duration,
    /// Time limit for an answer.
    pub answer: Duration,
    /// Time without events after which a stream sends a comment to stay alive.
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

/// Returns the part of a cluster's store that `/metrics` reads.
pub type NodeReach = Arc<dyn Fn() -> ReadScope + Send + Sync>;

/// The store that the page shows, and the clients that may see it.
pub struct PageContext {
    /// The store that answers read.
    pub store: Arc<dyn Store>,
    /// The operator's view of the store.
    pub operator: Operator,
    /// Facts about the daemon.
    pub about: DaemonInfo,
    /// Metrics of the daemon's own work.
    pub metrics: Arc<Metrics>,
    /// Names under which a browser may open the page, besides the names of loopback.
    pub hosts: Vec<String>,
    /// Limits on connections and requests.
    pub limits: ClientLimits,
    /// The store whose history has metrics; `None` omits them.
    history: Option<SharedStore>,
    /// The part of the store that `/metrics` reads; `None` reads all of it, as on a store of one machine.
    pub reach: Option<NodeReach>,
    cache: AnswerCache,
}

impl PageContext {
    /// Creates a page for an operator's store. Browsers can open it only under the names of loopback.
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

    /// Also answers browsers that use these names. A name has no port.
    #[must_use]
    pub fn with_hosts(mut self, hosts: Vec<String>) -> Self {
        self.hosts = hosts;
        self
    }

    /// Adds metrics of this store's history, if the store is embedded.
    #[must_use]
    pub fn with_history(mut self, shared_store: SharedStore) -> Self {
        self.history = Some(shared_store);
        self
    }

    /// Replaces the limits on connections and requests.
    #[must_use]
    pub fn with_limits(mut self, limits: ClientLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Limits `/metrics` to this node's part of a cluster's store, so that the work does not grow with the cluster.
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
