//! The store as the torture finds it: pools that are too small for everybody, registered nodes, a clock that runs fast.

use std::sync::Arc;
use std::time::Duration;

use ipam_core::affinity::ReleaseIf;
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{Document, Labels, NewPool, Node, Owner};
use ipam_core::{Clock, Ipam, Nodes};
use kv::{Deadline, Store, StoreExt};
use time::OffsetDateTime;

use crate::Failure;
use crate::plan::Plan;

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
