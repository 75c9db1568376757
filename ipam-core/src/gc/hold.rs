//! Frees addresses and deletes their workload endpoints, unless an address was reassigned or released after it was
//! read. An assignment that finds no free address calls `free_leftovers` to free leftover addresses of earlier boots in
//! its own commit.
//!
//! A workload endpoint is deleted on the same evidence as its addresses, and in the same commit. If the container has
//! requested the address again, the commit that would free the address fails or skips the address, so the workload
//! endpoint of a live container is never deleted.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;

use ipnet::IpNet;
use kv::{Deadline, Key, Transaction};
use time::OffsetDateTime;

use super::decide::{Verdict, verdict};
use super::{Allocation, EntryRelation, Evidence, Holdings};
use crate::assign_context::read_config;
use crate::attachment::{Attachment, BOOT, INTERFACE, TIMESTAMP};
use crate::boxed_future;
use crate::endpoints::{EndpointOwner, EndpointToDelete};
use crate::error::{Error, Result};
use crate::ipam::{Ipam, transact};
use crate::model::keys::{self, ResourceKind};
use crate::model::{
    Attribute, Block, Document, Handle, Orchestrator, QuotaSubject, WorkloadEndpoint, split_endpoint_name,
};
use crate::write_set::{BlockSlot, WriteSet};

/// Maximum number of handles and endpoints in a commit that frees addresses. Each freed address can have its own handle
/// and its own endpoint, and one commit can change at most 120 keys.
const MAX_HANDLES_PER_COMMIT: usize = 64;

/// An address that a node holds, with everything that distinguishes the current assignment of the address from later
/// assignments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    /// The held address, or the first address of the held prefix.
    pub address: IpAddr,
    /// The held address or prefix as a CIDR.
    pub unit: IpNet,
    /// The block that contains the held address.
    pub block: IpNet,
    /// The handle under which the node holds the address, if any.
    pub handle: Option<String>,
    /// The sequence number of the address, which changes with each assignment of the address.
    pub sequence_number: u64,
    /// The workload endpoint to delete with the address; see [`with_endpoints`].
    pub endpoint: Option<EndpointToDelete>,
    /// The stored block entry of the address, with all attributes.
    entry: Attribute,
}

impl Hold {
    pub(super) fn of(block: &Block, address: IpAddr, entry: &Attribute) -> Self {
        Self {
            address,
            unit: block.unit_of(address),
            block: block.cidr(),
            handle: entry.handle().filter(|handle| !handle.is_empty()).map(str::to_owned),
            sequence_number: block.sequence_number_of(address),
            endpoint: None,
            entry: entry.clone(),
        }
    }

    fn with_endpoint(self, endpoint: Option<EndpointToDelete>) -> Self {
        Self { endpoint, ..self }
    }

    /// Returns the name of the node that is recorded for the address.
    pub fn node(&self) -> Option<&str> {
        self.entry.node()
    }

    /// Returns the recorded name of the holder's CNI network, if any.
    pub fn network(&self) -> Option<&str> {
        self.entry.network()
    }

    /// Returns the recorded name of the holder's interface, if any.
    pub fn interface(&self) -> Option<&str> {
        self.entry.get(INTERFACE)
    }

    /// Returns the boot in which the address was assigned, if recorded.
    pub fn boot(&self) -> Option<&str> {
        self.entry.get(BOOT)
    }

    /// Returns the recorded time at which the address was assigned.
    pub fn timestamp(&self) -> Option<&str> {
        self.entry.get(TIMESTAMP)
    }

    /// True if the address has not been reassigned or released since it was read.
    fn is_still_in(&self, block: &Block) -> bool {
        block.attributes_of(self.address) == Some(&self.entry)
            && block.sequence_number_of(self.address) == self.sequence_number
    }
}

impl From<&Hold> for Hold {
    fn from(hold: &Hold) -> Self {
        hold.clone()
    }
}

impl From<&Allocation> for Hold {
    fn from(one: &Allocation) -> Self {
        Self {
            address: one.address,
            unit: one.unit,
            block: one.block,
            handle: Some(one.handle.clone()),
            sequence_number: one.sequence_number,
            endpoint: None,
            entry: one.entry.clone(),
        }
    }
}

/// Which addresses and workload endpoints a commit has freed or kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FreeResult {
    /// The freed addresses, which are now free or in cooldown.
    pub released: Vec<IpAddr>,
    /// The addresses that were not freed, because they were reassigned or released after they had been read.
    pub changed: Vec<IpAddr>,
    /// The workload endpoints that were deleted with the addresses.
    pub endpoints: Vec<EndpointToDelete>,
}

/// Divides allocations into batches, each of which one commit can free. Each batch contains allocations of a single
/// block.
pub fn batches<'a, A>(held: &'a [A]) -> Vec<Vec<Hold>>
where
    Hold: From<&'a A>,
{
    let mut by_block: BTreeMap<IpNet, Vec<Hold>> = BTreeMap::new();
    for hold in held.iter().map(Hold::from) {
        by_block.entry(hold.block).or_default().push(hold);
    }
    by_block.into_values().flat_map(divided).collect()
}

fn divided(block: Vec<Hold>) -> Vec<Vec<Hold>> {
    let (mut batches, mut batch, mut keys) = (Vec::new(), Vec::new(), 0);
    for hold in block {
        let more = 1 + usize::from(hold.endpoint.is_some());
        if keys + more > MAX_HANDLES_PER_COMMIT {
            batches.push(std::mem::take(&mut batch));
            keys = 0;
        }
        keys += more;
        batch.push(hold);
    }
    batches.push(batch);
    batches
}

impl Ipam {
    /// Frees the allocations of one of the [`batches`] in one commit. Allocations that another writer has changed since
    /// they were read are kept.
    ///
    /// # Errors
    /// Any store error. `Malformed` for a damaged handle.
    #[boxed_future]
    pub async fn free(&self, batch: &[Hold], deadline: Deadline) -> Result<FreeResult> {
        let freed = transact!(self, deadline, |tx| self.free_in(tx, batch).await)?;
        tell(batch, &freed);
        Ok(freed)
    }

    /// Frees the holdings of a departed node like [`free`](Self::free). The commit that frees a departed node's
    /// addresses fails if the node is registered again.
    ///
    /// # Errors
    /// `Invalid` if the node is registered. Any error of [`free`](Self::free).
    #[boxed_future]
    pub async fn free_of_gone(&self, node: &str, batch: &[Hold], deadline: Deadline) -> Result<FreeResult> {
        let freed = transact!(self, deadline, |tx| {
            let mut first = keys_of_batch(batch);
            first.push(keys::resource(ResourceKind::Node, node));
            tx.prefetch(first, Vec::new()).await?;
            self.require_gone(tx, node).await?;
            self.free_in(tx, batch).await
        })?;
        tell(batch, &freed);
        Ok(freed)
    }

    async fn free_in(&self, tx: &mut Transaction, batch: &[Hold]) -> Result<FreeResult> {
        tx.prefetch(keys_of_batch(batch), Vec::new()).await?;
        let cooldown = read_config(tx).await?.cooldown_seconds();
        let now = self.now();
        let mut work = WriteSet::new(tx, now, cooldown);
        let mut freed = FreeResult::default();
        let blocks: BTreeSet<IpNet> = batch.iter().map(|hold| hold.block).collect();
        for cidr in blocks {
            let BlockSlot::There(block) = work.find(cidr).await? else { continue };
            let still = batch.iter().filter(|one| one.block == cidr && one.is_still_in(block));
            let still: BTreeMap<IpAddr, Option<String>> = still.map(|one| (one.address, one.handle.clone())).collect();
            if still.is_empty() {
                continue;
            }
            work.change(cidr, |block| block.release_where(now, cooldown, |ip, _| still.contains_key(&ip))).await?;
            for handle in still.values().flatten() {
                work.touch_handle(handle, cidr);
            }
            freed.released.extend(still.into_keys());
        }
        for hold in batch.iter().filter(|one| freed.released.contains(&one.address)) {
            if let Some(endpoint) = hold.endpoint.as_ref().filter(|one| !freed.endpoints.contains(one))
                && endpoint.delete(work.tx).await?
            {
                freed.endpoints.push(endpoint.clone());
            }
        }
        work.write().await?;
        let gone = batch.iter().map(|one| one.address).filter(|ip| !freed.released.contains(ip));
        freed.changed = gone.collect();
        Ok(freed)
    }
}

/// Returns the keys that a commit that frees a batch reads, for a prefetch. Without it, each handle would cost a request.
fn keys_of_batch(batch: &[Hold]) -> Vec<Key> {
    let mut found: BTreeSet<Key> = [keys::config()].into();
    for hold in batch {
        found.insert(keys::block(hold.block));
        found.extend(hold.handle.as_deref().map(keys::handle));
        found.extend(hold.endpoint.as_ref().map(EndpointToDelete::key));
    }
    found.into_iter().collect()
}

fn tell(batch: &[Hold], freed: &FreeResult) {
    for hold in batch.iter().filter(|one| freed.released.contains(&one.address)) {
        let (address, handle, interface, node) = (hold.address, &hold.handle, hold.interface(), hold.node());
        tracing::info!(%address, handle, interface, node, "freed an unused address");
    }
    for EndpointToDelete { namespace, name, .. } in &freed.endpoints {
        tracing::info!(namespace, name, "deleted the workload endpoint of a container that is gone");
    }
}

/// Maximum number of endpoints deleted in one commit. Each endpoint has one key, and one commit can change at most 120
/// keys.
pub const MAX_ENDPOINTS_PER_COMMIT: usize = 64;

/// Maximum number of endpoints handed over in one commit. Handing over an endpoint deletes one key and creates another
/// key.
pub const MAX_ENDPOINTS_MOVED_PER_COMMIT: usize = 32;

/// The workload endpoint of a container or a pod on a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeEndpoint {
    /// The name of the endpoint's node.
    pub node: String,
    /// The endpoint's namespace.
    pub namespace: String,
    /// The endpoint's name.
    pub name: String,
    /// The container's id; empty if the endpoint names no container.
    pub container: String,
    /// The name of the interface in the container, which is a part of the endpoint's name.
    pub interface: String,
    /// The addresses of the endpoint.
    pub addresses: Vec<IpAddr>,
}

impl NodeEndpoint {
    /// Converts a workload endpoint that the CNI plugin has stored. Returns `None` if another program has stored the
    /// endpoint, or if the node in the endpoint's name differs from the node in its document.
    fn of(endpoint: &WorkloadEndpoint) -> Option<Self> {
        let [node, orchestrator, ..] = split_endpoint_name(endpoint.name())?;
        let is_of_plugin = [Orchestrator::Cni, Orchestrator::K8s].iter().any(|known| known.as_str() == orchestrator);
        let is_of_node = endpoint.node().is_empty() || endpoint.node() == node;
        (is_of_plugin && is_of_node).then(|| Self {
            node,
            namespace: endpoint.namespace().to_owned(),
            name: endpoint.name().to_owned(),
            container: endpoint.container().to_owned(),
            interface: endpoint.endpoint().to_owned(),
            addresses: endpoint.addresses(),
        })
    }

    fn key(&self) -> Key {
        keys::workload_endpoint(&self.namespace, &self.name)
    }

    /// True if the endpoint belongs to the allocation's container, and has the allocation's interface or address.
    fn is_of(&self, one: &Allocation) -> bool {
        self.container == one.container
            && (self.interface == one.interface || self.addresses.iter().any(|ip| one.unit.contains(ip)))
    }
}

/// Pairs each allocation to be freed with the workload endpoint, if any, that must be deleted in the same commit.
///
/// An endpoint is kept if its container keeps another address, or if an interface of the machine has an address of the
/// endpoint.
pub fn with_endpoints(
    freed: &[Allocation],
    holdings: &Holdings,
    endpoints: &[NodeEndpoint],
    evidence: &Evidence,
) -> Vec<Hold> {
    let addresses: HashSet<IpAddr> = freed.iter().map(|one| one.address).collect();
    let others = holdings.allocations.iter().filter(|one| !addresses.contains(&one.address));
    let kept: HashSet<&str> = others.map(|one| one.container.as_str()).collect();
    let is_live = |endpoint: &NodeEndpoint| endpoint.addresses.iter().any(|ip| evidence.live.contains(ip));
    let mut going: HashMap<&str, Vec<&NodeEndpoint>> = HashMap::new();
    for endpoint in endpoints.iter().filter(|one| !kept.contains(one.container.as_str()) && !is_live(one)) {
        going.entry(&endpoint.container).or_default().push(endpoint);
    }
    let with_endpoint = |one: &Allocation| {
        let endpoint = going.get(one.container.as_str()).and_then(|of| of.iter().find(|endpoint| endpoint.is_of(one)));
        let endpoint = endpoint.map(|endpoint| EndpointToDelete {
            namespace: endpoint.namespace.clone(),
            name: endpoint.name.clone(),
            owner: EndpointOwner::Container(one.container.clone()),
        });
        Hold::from(one).with_endpoint(endpoint)
    };
    freed.iter().map(with_endpoint).collect()
}

impl Ipam {
    /// Returns the workload endpoints that the CNI plugin has stored for the wanted nodes, in all namespaces. Damaged
    /// endpoints are skipped. Reads the keys of all endpoints of the cluster, but only the documents of endpoints on
    /// the nodes that `is_wanted` accepts.
    ///
    /// # Errors
    /// Any store error.
    pub async fn node_endpoints(
        &self,
        is_wanted: impl Fn(&str) -> bool + Send + Sync,
        deadline: Deadline,
    ) -> Result<Vec<NodeEndpoint>> {
        let endpoints = self.endpoints_of_nodes(is_wanted, deadline).await?;
        Ok(endpoints.iter().filter_map(NodeEndpoint::of).collect())
    }

    /// Deletes at most [`MAX_ENDPOINTS_PER_COMMIT`] endpoints of a departed node in one commit, and returns the
    /// endpoints that existed.
    ///
    /// # Errors
    /// `Invalid` if the node is registered. Any store error.
    pub async fn delete_endpoints_of_gone<'e>(
        &self,
        node: &str,
        endpoints: &'e [NodeEndpoint],
        deadline: Deadline,
    ) -> Result<Vec<&'e NodeEndpoint>> {
        let deleted = transact!(self, deadline, |tx| {
            let registered = keys::resource(ResourceKind::Node, node);
            tx.prefetch(endpoints.iter().map(NodeEndpoint::key).chain([registered]).collect(), Vec::new()).await?;
            self.require_gone(tx, node).await?;
            let mut deleted = Vec::new();
            for endpoint in endpoints.iter().filter(|endpoint| endpoint.node == node) {
                let key = endpoint.key();
                if tx.get(&key).await?.is_some() {
                    tx.delete(&key)?;
                    deleted.push(endpoint);
                }
            }
            Ok(deleted)
        })?;
        for NodeEndpoint { namespace, name, .. } in &deleted {
            tracing::info!(namespace, name, node, "deleted the workload endpoint of a node that is gone");
        }
        Ok(deleted)
    }

    /// Hands over at most [`MAX_ENDPOINTS_MOVED_PER_COMMIT`] endpoints of node `from` to node `to` in one commit.
    /// Returns each endpoint that was handed over, with its new name. If node `to` already has an endpoint of the new
    /// name, that endpoint and the endpoint of `from` stay unchanged.
    ///
    /// # Errors
    /// Any error of [`hand_over`](Self::hand_over). `Malformed` for damaged endpoints.
    pub async fn hand_over_endpoints<'e>(
        &self,
        from: &str,
        to: &str,
        endpoints: &'e [NodeEndpoint],
        deadline: Deadline,
    ) -> Result<Vec<(&'e NodeEndpoint, String)>> {
        transact!(self, deadline, |tx| {
            let nodes = [from, to].map(|node| keys::resource(ResourceKind::Node, node));
            tx.prefetch(endpoints.iter().map(NodeEndpoint::key).chain(nodes).collect(), Vec::new()).await?;
            self.require_gone(tx, from).await?;
            self.require_known(tx, to).await?;
            let mut moved = Vec::new();
            for endpoint in endpoints.iter().filter(|endpoint| endpoint.node == from) {
                let key = endpoint.key();
                let Some(value) = tx.get(&key).await? else { continue };
                let Some(new) = WorkloadEndpoint::decode(&key, value.as_bytes())?.on_node(to) else { continue };
                if tx.get(&new.key()).await?.is_none() {
                    tx.put(&new.key(), new.encode()?)?;
                    tx.delete(&key)?;
                    moved.push((endpoint, new.name().to_owned()));
                }
            }
            Ok(moved)
        })
    }
}

/// Maximum number of leftover attachments that one assignment frees. When one assignment frees several attachments, the
/// assignments after it find free addresses immediately.
const MAX_LEFTOVER_ATTACHMENTS: usize = 16;
/// Maximum number of blocks and handles that one assignment changes to free leftovers. At most 64 changed keys leave
/// enough room in the commit for the keys of the assignment itself.
const MAX_LEFTOVER_KEYS: usize = 64;

/// An attachment that holds addresses of an earlier boot.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Leftover {
    /// When the leftover's addresses were assigned, in Unix seconds; the maximum if unknown, so that the leftover sorts
    /// last.
    since: i64,
    handle: String,
    interface: String,
}

impl Leftover {
    /// Returns the leftovers of earlier boots in the given blocks, oldest first, for the node that is named in `asks`.
    /// An attachment with several leftover addresses is returned once. The attachment `asks`, which makes the request,
    /// is not returned.
    pub(crate) fn in_blocks<'b>(blocks: impl Iterator<Item = &'b Block>, asks: &Attachment) -> Vec<Self> {
        let allocations = blocks.flat_map(|block| {
            let of_node = |(address, entry)| match Allocation::of(block, address, entry, &asks.node) {
                EntryRelation::Ours(one) => Some(*one),
                EntryRelation::Unmarked | EntryRelation::Special | EntryRelation::Other => None,
            };
            block.allocated().filter_map(of_node).collect::<Vec<_>>()
        });
        Self::among(allocations, asks)
    }

    /// Returns the leftovers of earlier boots among the given allocations of the node; see [`Self::in_blocks`].
    fn among(allocations: impl Iterator<Item = Allocation>, asks: &Attachment) -> Vec<Self> {
        let Some(boot) = &asks.boot else { return Vec::new() };
        let mut found: Vec<Self> = Vec::new();
        for one in allocations {
            let its_own = one.interface == asks.interface && one.handle == asks.handle();
            if !its_own && one.boot.as_ref().is_some_and(|other| other != boot) {
                let since = one.assigned_at().map_or(i64::MAX, OffsetDateTime::unix_timestamp);
                found.push(Self { since, handle: one.handle, interface: one.interface });
            }
        }
        found.sort();
        let mut known = BTreeSet::new();
        found.retain(|one| known.insert((one.handle.clone(), one.interface.clone())));
        found
    }
}

/// The leftovers that an assignment may free, and the evidence that they are unused.
#[derive(Debug)]
pub(crate) struct Leftovers {
    /// The leftover attachments of earlier boots, oldest first.
    pub(crate) found: Vec<Leftover>,
    /// The evidence about the machine, gathered after the leftovers were found.
    pub(crate) evidence: Evidence,
}

impl Ipam {
    /// Returns the leftovers on an attachment's node that count against the given quota, in any block, oldest first.
    ///
    /// # Errors
    /// Any store error.
    pub(crate) async fn leftovers_of(
        &self,
        subject: &QuotaSubject,
        asks: &Attachment,
        deadline: Deadline,
    ) -> Result<Vec<Leftover>> {
        if asks.boot.is_none() {
            return Ok(Vec::new());
        }
        let (holdings, _) = self.holdings_within(&asks.node, &self.read_scope_of(&asks.node), deadline).await?;
        let counts = |one: &Allocation| subject.kind.name_in(&one.entry) == Some(&subject.name);
        Ok(Leftover::among(holdings.allocations.into_iter().filter(counts), asks))
    }

    /// Frees leftover addresses of a node as part of an assignment's write set. A leftover attachment is not freed if
    /// it is in use again, if its addresses were reassigned, or if freeing it would exceed [`MAX_LEFTOVER_KEYS`].
    pub(crate) async fn free_leftovers(
        &self,
        work: &mut WriteSet<'_>,
        node: &str,
        leftovers: &Leftovers,
    ) -> Result<Vec<Allocation>> {
        let (mut freed, mut blocks, mut attachments) = (Vec::new(), BTreeSet::new(), 0);
        for leftover in &leftovers.found {
            let allocations = whole(work, node, leftover).await?;
            let all: Vec<&Allocation> = allocations.iter().collect();
            let began = self.boot_time(&leftovers.evidence);
            if all.is_empty() || verdict(&all, &leftovers.evidence, began) != Verdict::Earlier {
                continue;
            }
            let more: BTreeSet<IpNet> = allocations.iter().map(|one| one.block).collect();
            if attachments + 1 + blocks.union(&more).count() > MAX_LEFTOVER_KEYS {
                continue;
            }
            for cidr in &more {
                let addresses: BTreeSet<IpAddr> =
                    allocations.iter().filter(|one| one.block == *cidr).map(|one| one.address).collect();
                let now = self.now();
                // Leftover addresses were unused since the boot, so they are released without a cooldown. If the
                // settings have a cooldown, assignments free no leftovers.
                work.change(*cidr, |block| block.release_where(now, 0, |ip, _| addresses.contains(&ip))).await?;
                work.touch_handle(&leftover.handle, *cidr);
            }
            blocks.extend(more);
            freed.extend(allocations);
            attachments += 1;
            if attachments == MAX_LEFTOVER_ATTACHMENTS {
                break;
            }
        }
        Ok(freed)
    }
}

/// Returns all allocations of a leftover attachment on the node, in any block. Returns no allocations if the
/// attachment's handle or a block is damaged.
async fn whole(work: &mut WriteSet<'_>, node: &str, leftover: &Leftover) -> Result<Vec<Allocation>> {
    let key = keys::handle(&leftover.handle);
    let Some(stored) = work.tx.snapshot_get(&key).await? else { return Ok(Vec::new()) };
    let blocks: Vec<IpNet> = match Handle::decode(&key, stored.as_bytes()) {
        Ok(handle) => handle.blocks().map(|(cidr, _)| cidr).collect(),
        Err(error) => {
            tracing::warn!(
                %error,
                "skipping a stored handle that cannot be decoded; the addresses of the handle stay assigned"
            );
            return Ok(Vec::new());
        }
    };
    if blocks.len() > MAX_LEFTOVER_KEYS / 2 {
        return Ok(Vec::new());
    }
    work.read_ahead(&blocks).await?;
    let mut found = Vec::new();
    for cidr in blocks {
        let block = match work.find(cidr).await? {
            BlockSlot::There(block) => block,
            BlockSlot::Absent => continue,
            BlockSlot::Damaged => return Ok(Vec::new()),
        };
        for (address, entry) in block.allocated().filter(|(_, entry)| entry.has_handle(&leftover.handle)) {
            if let EntryRelation::Ours(one) = Allocation::of(block, address, entry, node)
                && one.interface == leftover.interface
            {
                found.push(*one);
            }
        }
    }
    Ok(found)
}

pub(crate) fn is_short(error: &Error) -> bool {
    error.is_exhaustion()
}
