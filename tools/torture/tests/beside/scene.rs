//! Sets up a cluster of two hosts and one small pool, and creates the callers on Calico's side and on Margay's side.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use ipam_core::affinity::ReleaseIf;
use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::attachment::Attachment;
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{Document, Labels, NewPool, Node};
use ipam_core::{Ipam, Nodes};
use kv::{Deadline, Kv, Range, Revision, Store, StoreExt, WatchRequest};
use time::OffsetDateTime;

use crate::calico::{Calico, JUST_NOW, Pool};
use crate::documents::{Affinity, Block, Handle, affinity_key, block_key, handle_key};
use crate::judge::{Judge, Stored};
use crate::turns::{Authors, Side};

/// The time, equal to `JUST_NOW`, that every allocator's clock shows in these tests.
const NOW: i64 = 1_800_000_000;
pub(crate) const HOSTS: [&str; 2] = ["a", "b"];

pub(crate) fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

pub(crate) fn allocator(store: Arc<dyn Store>) -> Ipam {
    let now = || OffsetDateTime::from_unix_timestamp(NOW).unwrap();
    Ipam::new(store, Nodes::Registered).with_clock(Arc::new(now))
}

/// Creates two nodes and a pool in the store.
pub(crate) async fn prepare(store: &Arc<dyn Store>, cidr: &str, block_size: u8) {
    for host in HOSTS {
        let node = Node::new(host, Labels::new(), "uid", OffsetDateTime::UNIX_EPOCH);
        store.put(keys::resource(ResourceKind::Node, host), node.encode().unwrap()).await.unwrap();
    }
    let pool = NewPool::new("v4", cidr.parse().unwrap()).with_block_size(block_size);
    allocator(Arc::clone(store)).create_pool(&pool, None, soon()).await.unwrap();
}

/// Returns the blocks of a pool, in ascending order.
pub(crate) fn blocks_of(cidr: &str, block_size: u8) -> Pool {
    let cidr: ipnet::IpNet = cidr.parse().unwrap();
    let blocks = cidr.subnets(block_size).unwrap().map(|block| block.to_string()).collect();
    Pool { blocks, size: 1 << (32 - block_size) }
}

pub(crate) fn calico(store: Arc<dyn Store>, host: &str, pool: &Pool) -> Calico {
    Calico { store, host: host.to_owned(), pool: pool.clone(), claimed: JUST_NOW, pod: None }
}

pub(crate) fn attachment(host: &str, container: &str) -> Attachment {
    Attachment {
        network: "net".into(),
        container: container.into(),
        interface: "eth0".into(),
        node: host.into(),
        boot: Some("boot0001".into()),
    }
}

pub(crate) async fn add(ipam: &Ipam, host: &str, container: &str) -> ipam_core::Result<IpAddr> {
    let request = AssignRequest::new(attachment(host, container), RequestedAddresses::any(1, 0));
    Ok(ipam.assign(&request, soon()).await?[0].ip)
}

pub(crate) async fn del(ipam: &Ipam, host: &str, container: &str) -> ipam_core::Result<Vec<IpAddr>> {
    ipam.release_attachment(&attachment(host, container), &[], soon()).await
}

/// The documents that the store contains when a test starts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Found {
    pub(crate) kvs: BTreeMap<String, String>,
}

impl Found {
    pub(crate) fn block(mut self, block: &Block) -> Self {
        self.kvs.insert(block_key(&block.cidr), serde_json::to_string(block).unwrap());
        self
    }

    pub(crate) fn affinity(mut self, host: &str, cidr: &str, state: &str) -> Self {
        let affinity = Affinity { state: state.to_owned(), deleted: false };
        self.kvs.insert(affinity_key(host, cidr), serde_json::to_string(&affinity).unwrap());
        self
    }

    pub(crate) fn handle(mut self, handle: &str, counts: &[(&str, i64)]) -> Self {
        let block = counts.iter().map(|(cidr, count)| ((*cidr).to_owned(), *count)).collect();
        self.kvs.insert(handle_key(handle), serde_json::to_string(&Handle { block, deleted: false }).unwrap());
        self
    }

    pub(crate) async fn store(&self, store: &Arc<dyn Store>) {
        for (key, value) in &self.kvs {
            store.put(key.as_str(), value.as_str()).await.unwrap();
        }
    }
}

/// Returns the store's current revision and all its keys. The test judges only revisions after the revision that this
/// function returns.
pub(crate) async fn everything(store: &Arc<dyn Store>) -> (Revision, Vec<Kv>) {
    let listed = store.list(Range::All).await.unwrap();
    (listed.revision, listed.kvs)
}

/// Judges all revisions since the start of the test. A revision without a recorded author counts as Margay's.
pub(crate) async fn judge(
    store: &Arc<dyn Store>,
    start: &(Revision, Vec<Kv>),
    authors: &Authors,
) -> Result<Judge, String> {
    let end = everything(store).await.0;
    let mut judge = Judge::new(&start.1);
    if start.0 == end {
        return Ok(judge);
    }
    let mut changes = store.watch(WatchRequest::new(Range::All, start.0.next())).await.unwrap();
    loop {
        let batch = changes.next().await.unwrap().unwrap();
        let side = authors.lock().unwrap().get(&batch.revision).copied().unwrap_or(Side::Ours);
        judge.advance(side, &batch.events).map_err(|what| format!("{}: {what}", batch.revision))?;
        if batch.revision == end {
            return Ok(judge);
        }
    }
}

/// Releases the addresses of every handle, and then all blocks. Fails if the store contains anything but empty blocks
/// after the releases.
pub(crate) async fn clean_up(store: &Arc<dyn Store>) -> Result<(), String> {
    let ipam = allocator(Arc::clone(store));
    let found = Stored::read(&everything(store).await.1);
    if !found.lost().is_empty() {
        return Err(format!("lost: {:?}", found.lost()));
    }
    for handle in found.handles.keys() {
        ipam.release_by_handle(handle, soon()).await.map_err(|error| format!("releasing {handle}: {error}"))?;
    }
    for host in HOSTS {
        ipam.release_node_affinities(host, ReleaseIf::Any, soon()).await.map_err(|error| error.to_string())?;
    }
    let left = Stored::read(&everything(store).await.1);
    // The release of a node's blocks looks them up by affinity, so an empty block without an affinity may remain. A
    // node that claims the network of a block without an affinity finds that the block already exists.
    let kept: Vec<_> = left.blocks.values().filter(|block| !block.is_empty()).collect();
    if !kept.is_empty() || !left.handles.is_empty() || !left.affinities.is_empty() {
        return Err(format!("left: {left:?}"));
    }
    Ok(())
}
