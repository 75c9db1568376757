//! Sets up a run, with pools that are too small for all nodes, registered nodes and a fast clock. This module also
//! defines how a worker reaches the store: the worker keeps the store open, opens it for each operation as the plugin
//! does, or connects to the daemon.

use std::sync::Arc;
use std::time::Duration;

use backend_etcd::{EtcdStore, Options};
use datastore::served::connect;
use datastore::{Create, Location, OpenOptions, OpenStore};
use ipam_core::affinity::ReleaseIf;
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{Document, Labels, NewPool, Node, Owner};
use ipam_core::pending_commits::PendingCommits;
use ipam_core::{Clock, Ipam, Nodes};
use kv::{Deadline, Result, Store, StoreExt};
use time::OffsetDateTime;

use crate::Failure;
use crate::command::Plan;
use crate::faults::{Newest, Observed};

/// The IPv4 pool: 64 addresses in blocks of 8.
pub(crate) const POOL_V4: &str = "10.0.0.0/26";
/// The IPv6 pool: 64 addresses in blocks of 8.
pub(crate) const POOL_V6: &str = "fd00::/122";

/// How many times faster than real time the allocators' clock runs, so that another node may take over an empty block
/// after less than a second.
const FASTER: i32 = 60;
/// The time at which the accelerated clock of a run equals real time, in seconds since 1970: 2026-01-01.
const EPOCH: i64 = 1_767_225_600;

/// The time limit of a call of the allocator.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum duration of a call: its time limit, and what a busy machine may add.
pub(crate) const MAX_CALL: Duration = CALL_TIMEOUT.saturating_add(Duration::from_secs(10));

pub(crate) fn deadline() -> Deadline {
    Deadline::after(CALL_TIMEOUT)
}

/// Returns a clock that runs faster than real time and shows the same time in every process.
fn clock() -> Clock {
    let epoch = OffsetDateTime::from_unix_timestamp(EPOCH).unwrap_or(OffsetDateTime::UNIX_EPOCH);
    Arc::new(move || epoch + (OffsetDateTime::now_utc() - epoch) * FASTER)
}

/// Returns an allocator on a store in which the nodes are registered.
pub(crate) fn allocator(store: Arc<dyn Store>) -> Ipam {
    Ipam::new(store, Nodes::Registered).with_clock(clock())
}

pub(crate) async fn prepare(store: &Arc<dyn Store>, plan: &Plan) -> Result<(), Failure> {
    for number in 0..plan.nodes {
        let name = Plan::node(number);
        let key = keys::resource(ResourceKind::Node, &name);
        let node = Node::new(&name, Labels::new(), "uid", OffsetDateTime::UNIX_EPOCH);
        store.put(key, node.encode().map_err(|error| Failure(error.to_string()))?).await?;
    }
    let ipam = allocator(Arc::clone(store));
    for (name, cidr, bits) in [("v4", POOL_V4, 29), ("v6", POOL_V6, 125)] {
        let cidr = cidr.parse().map_err(|error| Failure(format!("{cidr}: {error}")))?;
        ipam.create_pool(&NewPool::new(name, cidr).with_block_size(bits), None, deadline()).await?;
    }
    Ok(())
}

pub(crate) async fn take_back(store: &Arc<dyn Store>, plan: &Plan) -> Result<(), Failure> {
    let ipam = allocator(Arc::clone(store));
    for number in 0..plan.nodes {
        ipam.release_all_affinities(&Owner::host(Plan::node(number)), ReleaseIf::Any, deadline()).await?;
    }
    Ok(())
}

const LOCK_WAIT: Duration = Duration::from_secs(60);

pub(crate) fn open_options(create: Create) -> OpenOptions {
    create.with_wait(LOCK_WAIT)
}

pub(crate) async fn open(location: &Location, create: Create) -> Result<OpenStore> {
    datastore::open(location, &open_options(create)).await
}

/// Creates a client of an etcd server, with a short timeout for calls, so that the client detects a frozen server.
pub(crate) fn open_etcd(url: &str) -> Result<Arc<dyn Store>> {
    let options = Options::new([url]).with_call_timeout(Duration::from_secs(2));
    Ok(Arc::new(EtcdStore::open(&options)?))
}

/// How a worker reaches the store.
#[derive(Clone, Debug)]
pub(crate) enum Access {
    /// The worker keeps the store open during the whole run.
    Open(Ipam, Newest),
    /// The store is in a folder that only one process at a time can have open, so each operation opens and closes it.
    Folder(Location, Newest),
    /// The store is in a folder, and a daemon may have it open.
    Served(Location, Newest),
}

/// A store that a worker has opened for one operation.
pub(crate) struct Session {
    pub(crate) ipam: Ipam,
    opened: Option<OpenStore>,
    pub(crate) is_served: bool,
}

impl Access {
    /// Returns the worker's access to a store that stays open during the whole run. The allocator records its pending
    /// commits in `intents`.
    pub(crate) fn open(store: Arc<dyn Store>, newest: Newest, intents: Arc<dyn PendingCommits>) -> Self {
        Self::Open(allocator(store).with_pending_commits(intents), newest)
    }

    /// Returns the newest revision that the store has returned in any response so far.
    pub(crate) fn newest(&self) -> i64 {
        match self {
            Self::Open(_, newest) | Self::Folder(_, newest) | Self::Served(_, newest) => newest.get(),
        }
    }

    /// Opens the store for one operation, or connects to the daemon that has the store open.
    pub(crate) async fn begin(&self) -> Result<Session> {
        match self {
            Self::Open(ipam, _) => Ok(Session { ipam: ipam.clone(), opened: None, is_served: false }),
            Self::Served(location, newest) => {
                if let Some(served) = connect(location, LOCK_WAIT).await {
                    let store = Observed::new(Arc::new(served), newest.clone());
                    return Ok(Session { ipam: allocator(Arc::new(store)), opened: None, is_served: true });
                }
                Box::pin(Self::Folder(location.clone(), newest.clone()).begin()).await
            }
            Self::Folder(location, newest) => {
                let opened = open(location, Create::Never).await?;
                let store = Observed::new(opened.store(), newest.clone());
                Ok(Session { ipam: allocator(Arc::new(store)), opened: Some(opened), is_served: false })
            }
        }
    }
}

impl Session {
    /// Closes the store if it was opened for a single operation.
    pub(crate) async fn end(self) -> Result<()> {
        match self.opened {
            Some(store) => store.close().await,
            None => Ok(()),
        }
    }
}
