//! The daemon's side for browsers and scrapers: `/metrics`, `/health`, `/version` and a page.
//!
//! Everything here only reads, and only to answer a request. A client has a bounded share: so many connections, so
//! many bytes of headers, so long for a request, and so long without taking any byte of an answer. The page is a few files
//! that are part of the program; it asks no other host, and the headers of every answer forbid it to.

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

/// The daemon's words about itself. They hold no secret.
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
    /// The first 8 characters of the id of this machine's boot, if they are known.
    pub boot: Option<String>,
}

/// The share of a client.
#[derive(Clone, Copy, Debug)]
pub struct ClientLimits {
    /// The most connections at a time; the next one gets the answer that the daemon is busy.
    pub connections: usize,
    /// The longest time for the headers of a request. A connection that is kept open without a request ends after this, too.
    pub headers: Duration,
    /// The longest time in which a client takes no byte of an answer; then its connection is closed.
    pub stall: Duration,
    /// The longest time for an answer.
    pub answer: Duration,
    /// The time after which a silent stream of events says that it lives.
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

/// The reach of `/metrics` into a cluster's store.
pub type NodeReach = Arc<dyn Fn() -> ReadScope + Send + Sync>;

/// A store to show, and the clients that may see it.
pub struct PageContext {
    /// The store.
    pub store: Arc<dyn Store>,
    /// The allocator on it.
    pub operator: Operator,
    /// The daemon's words about itself.
    pub about: DaemonInfo,
    /// The daemon's own numbers.
    pub metrics: Arc<Metrics>,
    /// The names, besides those of this machine's loopback, under which a browser may ask.
    pub hosts: Vec<String>,
    /// The share of a client.
    pub limits: ClientLimits,
    /// The store for the numbers of its history. `None` leaves them out.
    history: Option<SharedStore>,
    /// The reach of `/metrics`. `None` counts all of the store, as is right on a store of one machine.
    pub reach: Option<NodeReach>,
    cache: AnswerCache,
}

impl PageContext {
    /// The store of an allocator, shown to this machine alone.
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

    /// Shown also to browsers that ask under these names. A name has no port.
    #[must_use]
    pub fn with_hosts(mut self, hosts: Vec<String>) -> Self {
        self.hosts = hosts;
        self
    }

    /// With the numbers of the history of this store, if it is an embedded one.
    #[must_use]
    pub fn with_history(mut self, shared_store: SharedStore) -> Self {
        self.history = Some(shared_store);
        self
    }

    /// With another share of a client.
    #[must_use]
    pub fn with_limits(mut self, limits: ClientLimits) -> Self {
        self.limits = limits;
        self
    }

    /// With `/metrics` for this node's share of a cluster's store only, so that the work does not grow with the cluster.
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
