//! The store as the torture finds it, with pools that are too small for everybody, registered nodes and a clock that runs fast; and how
//! a worker gets at it: it has it open all the time, or opens it for each operation, as the plugin does, or connects to a daemon for
//! each operation, and opens the store if there is none.

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
/// The IPv6 pool, as large.
pub(crate) const POOL_V6: &str = "fd00::/122";

/// How much faster the clock of the allocators runs, so that empty blocks are old enough to be taken over in a second.
const FASTER: i32 = 60;
/// When it showed the right time: 2026-01-01.
const EPOCH: i64 = 1_767_225_600;

/// The longest that one call may take.
pub(crate) fn deadline() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

/// A clock that runs fast, and shows the same time in every process.
fn clock() -> Clock {
    let epoch = OffsetDateTime::from_unix_timestamp(EPOCH).unwrap_or(OffsetDateTime::UNIX_EPOCH);
    Arc::new(move || epoch + (OffsetDateTime::now_utc() - epoch) * FASTER)
}

/// The allocator on a store of a cluster.
pub(crate) fn allocator(store: Arc<dyn Store>) -> Ipam {
    Ipam::new(store, Nodes::Registered).with_clock(clock())
}

/// Makes pools and nodes.
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

/// Takes the blocks of all nodes back.
pub(crate) async fn take_back(store: &Arc<dyn Store>, plan: &Plan) -> Result<(), Failure> {
    let ipam = allocator(Arc::clone(store));
    for number in 0..plan.nodes {
        ipam.release_all_affinities(&Owner::host(Plan::node(number)), ReleaseIf::Any, deadline()).await?;
    }
    Ok(())
}

/// How long a process waits for the lock.
const LOCK_WAIT: Duration = Duration::from_secs(60);

/// The options with which an embedded store is opened.
pub(crate) fn open_options(create: Create) -> OpenOptions {
    create.with_wait(LOCK_WAIT)
}

/// Opens an embedded store.
pub(crate) async fn open(location: &Location, create: Create) -> Result<OpenStore> {
    datastore::open(location, &open_options(create)).await
}

/// A client of an etcd. It gives up on a call that takes long, so that servers that stand still are noticed.
pub(crate) fn open_etcd(url: &str) -> Result<Arc<dyn Store>> {
    let options = Options::new([url]).with_call_timeout(Duration::from_secs(2));
    Ok(Arc::new(EtcdStore::open(&options)?))
}

/// A store that a worker can get at.
#[derive(Clone, Debug)]
pub(crate) enum Access {
    /// It is open.
    Open(Ipam, Newest),
    /// It is in a folder, and one process has it at a time.
    Folder(Location, Newest),
    /// The same, and that process may be a daemon.
    Served(Location, Newest),
}

/// The store, for one operation.
pub(crate) struct Session {
    pub(crate) ipam: Ipam,
    opened: Option<OpenStore>,
    /// Whether a daemon has the store.
    pub(crate) is_served: bool,
}

impl Access {
    /// A store that is open, where what is about to be done is noted.
    pub(crate) fn open(store: Arc<dyn Store>, newest: Newest, intents: Arc<dyn PendingCommits>) -> Self {
        Self::Open(allocator(store).with_pending_commits(intents), newest)
    }

    /// How far the store is, as far as is known here.
    pub(crate) fn newest(&self) -> i64 {
        match self {
            Self::Open(_, newest) | Self::Folder(_, newest) | Self::Served(_, newest) => newest.get(),
        }
    }

    /// Gets at it.
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
    /// Lets go of it.
    pub(crate) async fn end(self) -> Result<()> {
        match self.opened {
            Some(store) => store.close().await,
            None => Ok(()),
        }
    }
}
