//! Reads the holdings (blocks, addresses and endpoints) of departed nodes at one revision. After reading a departed
//! node's holdings, callers free them or hand them over to another node. A hand-over is needed when a machine was
//! renamed, or when a new machine takes over the containers of an old machine with their addresses.
//!
//! Each commit of a hand-over transfers whole blocks to the other node, with their owner, their affinity and the
//! attributes of their addresses. The commit also renames the handles that contain the node's name: those of the node's
//! tunnels and of its own prefixes. If the store has a pinned node, the commit of a hand-over also pins the new name,
//! so that a DEL finds the transferred addresses. A hand-over commit fails if a block, an affinity or a changed handle
//! was changed by another writer, or if the old node is registered again.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use kv::{Content, Deadline, Key, Range, Transaction};

use super::hold::{Hold, NodeEndpoint};
use crate::affinity::drop_legacy_in;
use crate::assign_context::read_config;
use crate::boxed_future;
use crate::error::{Error, Result};
use crate::ipam::{Ipam, Nodes, transact};
use crate::model::keys::{self, ResourceKind};
use crate::model::{Block, Document, Owner, WINDOWS_RESERVED_HANDLE, is_node_handle, renamed_node_handle};
use crate::sticky::waits_until;
use crate::usage::{SnapshotReader, reread};
use crate::vm::is_vms;
use crate::write_set::{BlockSlot, WriteSet};

/// The names of the registered nodes of a store, and the pinned name of an embedded store's only node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KnownNodes {
    /// The names of the nodes that are registered in the store.
    pub registered: BTreeSet<String>,
    /// The pinned name of the store's only node, if the store is an embedded store without registered nodes.
    pub pinned: Option<String>,
}

/// The part of a block that belongs to a departed node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockPart {
    /// Whether the departed node owns the block.
    pub is_own: bool,
    /// Whether the departed node has an affinity to the block, even if the affinity is stale.
    pub has_affinity: bool,
    /// The number of the block's addresses that are recorded for the departed node.
    pub addresses: usize,
    /// The handles of the departed node's tunnels and own prefixes that hold addresses in the block.
    pub tunnels: Vec<String>,
    /// The size of the stored block, in bytes.
    bytes: usize,
}

/// The blocks, addresses and endpoints of one departed node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DepartedNode {
    /// The node's name.
    pub node: String,
    /// The blocks that the node owns, to which it has an affinity, or in which it holds addresses.
    pub parts: BTreeMap<IpNet, BlockPart>,
    /// The addresses that any program has recorded for the node, grouped by block and including the addresses of
    /// tunnels.
    pub holds: Vec<Hold>,
    /// The number of the node's addresses that must not simply be freed: addresses with a second owner, which may be
    /// alive, and addresses of virtual machines, which may start on another node.
    pub shared: usize,
    /// The number of addresses in the node's blocks for which no node is recorded, not counting sticky addresses that
    /// wait for their workloads.
    pub nameless: usize,
    /// The number of addresses in the node's blocks that are recorded for other nodes.
    pub of_others: usize,
    /// The node's workload endpoints that the CNI plugin has stored.
    pub endpoints: Vec<NodeEndpoint>,
}

impl DepartedNode {
    /// Returns the blocks that the node owns or to which it has an affinity.
    pub fn blocks(&self) -> impl Iterator<Item = IpNet> {
        self.parts.iter().filter(|(_, part)| part.is_own || part.has_affinity).map(|(cidr, _)| *cidr)
    }

    fn part(&mut self, cidr: IpNet) -> &mut BlockPart {
        self.parts.entry(cidr).or_default()
    }
}

/// The holdings of the departed nodes of a store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DepartedNodes {
    /// The registered nodes of the store, and the pinned node of an embedded store.
    pub known: KnownNodes,
    /// The names of all nodes that are registered or have addresses or blocks, even nodes for which the caller did not
    /// ask. Nodes that have only endpoints are included if the caller asked for these nodes.
    pub nodes: BTreeSet<String>,
    /// The holdings of the nodes for which the caller asked, by node name. Nodes without holdings are not in the map
    /// `departed`.
    pub departed: BTreeMap<String, DepartedNode>,
}

impl DepartedNodes {
    fn departed_node(&mut self, node: &str) -> &mut DepartedNode {
        let new = || DepartedNode { node: node.to_owned(), ..DepartedNode::default() };
        self.departed.entry(node.to_owned()).or_insert_with(new)
    }

    fn add_affinity(&mut self, key: &Key, wanted: &dyn Fn(&KnownNodes, &str) -> bool) {
        match keys::parse_affinity(key) {
            Some((owner, cidr)) => {
                let Some(node) = owner.node().map(str::to_owned) else { return };
                if wanted(&self.known, &node) {
                    self.departed_node(&node).part(cidr).has_affinity = true;
                }
                self.nodes.insert(node);
            }
            // Under the prefix of the affinities, old Calico versions also stored one key per node, which consists of
            // the prefix and the node's name and is no affinity.
            _ => {
                let Some(node) = keys::parse_legacy_host(key).map(str::to_owned) else { return };
                if wanted(&self.known, &node) {
                    self.departed_node(&node);
                }
                self.nodes.insert(node);
            }
        }
    }

    fn add_block(&mut self, block: &Block, bytes: usize, wanted: &dyn Fn(&KnownNodes, &str) -> bool) {
        let cidr = block.cidr();
        let owner = match block.owner() {
            Some(owner) => owner.node().filter(|name| !name.is_empty()).map(str::to_owned),
            None => None,
        };
        let mut concerned: BTreeSet<String> = owner.iter().cloned().collect();
        let (mut nameless, mut named) = (0, 0);
        for (address, entry) in block.allocated().filter(|(_, entry)| entry.released_at().is_none()) {
            let second = entry.alternate_attributes();
            concerned.extend(entry.alternate_node().filter(|node| !node.is_empty()).map(str::to_owned));
            let Some(node) = entry.node().filter(|node| !node.is_empty()) else {
                let windows = entry.handle_id().is_some_and(|id| id.eq_ignore_ascii_case(WINDOWS_RESERVED_HANDLE));
                nameless += usize::from(!windows && waits_until(entry).is_none());
                continue;
            };
            concerned.insert(node.to_owned());
            named += usize::from(owner.as_deref().is_some_and(|owner| owner != node));
            if wanted(&self.known, node) {
                let departed_node = self.departed_node(node);
                departed_node.part(cidr).addresses += 1;
                if second.is_empty() && !is_vms(entry) {
                    departed_node.holds.push(Hold::of(block, address, entry));
                } else {
                    departed_node.shared += 1;
                }
            }
        }
        for node in &concerned {
            if wanted(&self.known, node) {
                let tunnels = named_handles_in(block, node).into_iter().collect();
                let part = self.departed_node(node).part(cidr);
                (part.bytes, part.tunnels) = (bytes, tunnels);
            }
        }
        if let Some(owner) = owner.filter(|owner| wanted(&self.known, owner)) {
            let departed_node = self.departed_node(&owner);
            departed_node.part(cidr).is_own = true;
            departed_node.nameless += nameless;
            departed_node.of_others += named;
        }
        self.nodes.extend(concerned);
    }
}

impl Ipam {
    /// Reads the holdings of the `wanted` nodes at one revision, page by page, and then the nodes' endpoints.
    ///
    /// # Errors
    /// Any store error. Damaged blocks are logged and skipped.
    pub async fn departed_nodes(
        &self,
        wanted: impl Fn(&KnownNodes, &str) -> bool + Send + Sync,
        deadline: Deadline,
    ) -> Result<DepartedNodes> {
        let mut found = reread(|| self.read_departed_nodes(&wanted, deadline)).await?;
        self.read_endpoints(&mut found, &wanted, deadline).await?;
        Ok(found)
    }

    async fn read_endpoints(
        &self,
        found: &mut DepartedNodes,
        wanted: &(impl Fn(&KnownNodes, &str) -> bool + Send + Sync),
        deadline: Deadline,
    ) -> Result<()> {
        let known = &found.known;
        for endpoint in self.node_endpoints(|node| wanted(known, node), deadline).await? {
            found.nodes.insert(endpoint.node.clone());
            found.departed_node(&endpoint.node).endpoints.push(endpoint);
        }
        Ok(())
    }

    async fn read_departed_nodes(
        &self,
        wanted: &(impl Fn(&KnownNodes, &str) -> bool + Send + Sync),
        deadline: Deadline,
    ) -> kv::Result<DepartedNodes> {
        let (mut found, mut reading) = (DepartedNodes::default(), SnapshotReader::new(deadline));
        let nodes = Range::Prefix(keys::resources_prefix(ResourceKind::Node));
        self.each(nodes, Content::KeysOnly, &mut reading, |kv| {
            found.known.registered.extend(keys::parse_resource(ResourceKind::Node, &kv.key).map(str::to_owned));
        })
        .await?;
        if self.nodes() == Nodes::FirstSeen && found.known.registered.is_empty() {
            self.each(Range::Key(keys::PINNED_NODE.into()), Content::Full, &mut reading, |kv| {
                found.known.pinned = String::from_utf8(kv.value.as_bytes().to_vec()).ok();
            })
            .await?;
        }
        found.nodes.clone_from(&found.known.registered);
        for affinities in [keys::host_affinities_prefix(), keys::virtual_affinities_prefix()].map(Range::Prefix) {
            self.each(affinities, Content::KeysOnly, &mut reading, |kv| found.add_affinity(&kv.key, wanted)).await?;
        }
        let blocks = Range::Prefix(keys::blocks_prefix(None));
        self.each(blocks, Content::Full, &mut reading, |kv| match Block::decode(&kv.key, kv.value.as_bytes()) {
            Ok(block) => found.add_block(&block, kv.value.len(), wanted),
            Err(error) => tracing::warn!(%error, "skipping a stored block that cannot be decoded"),
        })
        .await?;
        Ok(found)
    }

    /// Fails if a node is registered, and makes the commit fail if the node is registered before the commit.
    pub(crate) async fn require_gone(&self, tx: &mut Transaction, node: &str) -> Result<()> {
        match tx.get(&keys::resource(ResourceKind::Node, node)).await? {
            None => Ok(()),
            Some(_) => Err(Error::Invalid(format!("node {node} is registered, so what it has is its own"))),
        }
    }
}

/// Maximum number of keys that one hand-over commit may change for its blocks. Besides the keys of the blocks, a
/// hand-over commit changes a few keys that belong to no block, such as the pinned node's name.
const MAX_KEYS_PER_COMMIT: usize = 96;
/// Maximum total size of the blocks in one hand-over commit, in bytes. A block that is larger than 1 MB is committed
/// alone.
const MAX_BYTES_PER_COMMIT: usize = 1_000_000;

/// The blocks, addresses and handles that one commit of a hand-over has changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HandOverResult {
    /// The blocks that the new node owns after the commit.
    pub blocks: Vec<IpNet>,
    /// The addresses that are recorded for the new node after the commit.
    pub addresses: Vec<IpAddr>,
    /// The renamed handles, each with its old and its new name.
    pub handles: Vec<(String, String)>,
}

/// Returns the handles in a block that belong to the node itself, for its tunnels and its own prefixes. The name of a
/// handle of this kind ends with the node's name.
fn named_handles_in(block: &Block, node: &str) -> BTreeSet<String> {
    let handles = block.allocated().filter_map(|(_, entry)| entry.handle());
    handles.filter(|handle| is_node_handle(handle, node)).map(str::to_owned).collect()
}

/// Returns the addresses of a block that are recorded for a node, as the holder or as the alternate holder.
fn recorded_for(block: &Block, node: &str) -> Vec<IpAddr> {
    let is_its = |recorded: Option<&str>| recorded == Some(node);
    let held = block.allocated().filter(|(_, entry)| entry.released_at().is_none());
    let its = held.filter(|(_, entry)| is_its(entry.node()) || is_its(entry.alternate_node()));
    its.map(|(address, _)| address).collect()
}

impl DepartedNode {
    /// Groups the node's blocks into lists, each of which one commit can hand over. Returns a single empty list if the
    /// node has no blocks.
    pub fn shares(&self) -> Vec<Vec<IpNet>> {
        let (mut shares, mut share, mut keys, mut bytes) = (Vec::new(), Vec::new(), 0, 0);
        for (cidr, part) in &self.parts {
            // Handing over a block changes three keys: the block, the old affinity and the new affinity. For each
            // tunnel handle in a handed-over block, the commit changes two further keys: the old handle and the renamed
            // handle.
            let more = 3 + 2 * part.tunnels.len();
            if !share.is_empty() && (keys + more > MAX_KEYS_PER_COMMIT || bytes + part.bytes > MAX_BYTES_PER_COMMIT) {
                shares.push(std::mem::take(&mut share));
                (keys, bytes) = (0, 0);
            }
            share.push(*cidr);
            (keys, bytes) = (keys + more, bytes + part.bytes);
        }
        if !share.is_empty() || shares.is_empty() {
            shares.push(share);
        }
        shares
    }
}

impl Ipam {
    /// Hands over the holdings of node `from` in some blocks to node `to`, in one commit. The argument `blocks` is one
    /// of the lists that [`DepartedNode::shares`] returns. Blocks that node `to` already owns are not changed, so a
    /// hand-over can be repeated.
    ///
    /// # Errors
    /// `Invalid` if node `from` is registered, or if `to` cannot be the name of another node. `UnknownNode` if the
    /// store has registered nodes but node `to` is not registered. `Malformed` for damaged handles. Any store error.
    #[boxed_future]
    pub async fn hand_over(
        &self,
        from: &str,
        to: &str,
        blocks: &[IpNet],
        deadline: Deadline,
    ) -> Result<HandOverResult> {
        if to.is_empty() || to.contains('/') || to == from {
            return Err(Error::Invalid(format!("{to:?} cannot be the name of another node")));
        }
        let needed: Vec<Key> = blocks
            .iter()
            .flat_map(|cidr| {
                let owners = [from, to].into_iter().flat_map(Owner::all_of);
                owners.filter_map(|owner| keys::affinity(&owner, *cidr)).chain([keys::block(*cidr)])
            })
            .chain([keys::config(), keys::PINNED_NODE.into(), keys::legacy_host(from)])
            .chain([from, to].map(|node| keys::resource(ResourceKind::Node, node)))
            .collect();
        transact!(self, deadline, |tx| {
            tx.prefetch(needed.clone(), Vec::new()).await?;
            self.require_gone(tx, from).await?;
            self.require_known(tx, to).await?;
            self.pin_instead(tx, from, to).await?;
            let cooldown = read_config(tx).await?.cooldown_seconds();
            let mut work = WriteSet::new(tx, self.now(), cooldown);
            let mut done = HandOverResult::default();
            for cidr in blocks {
                hand_over_block(&mut work, (from, to), *cidr, &mut done).await?;
            }
            work.write().await?;
            Ok(done)
        })
    }

    /// Fails if the store has registered nodes and `node` is not one of them.
    pub(super) async fn require_known(&self, tx: &mut Transaction, node: &str) -> Result<()> {
        let registered = Range::Prefix(keys::resources_prefix(ResourceKind::Node));
        let is_known = tx.snapshot_get(&keys::resource(ResourceKind::Node, node)).await?.is_some();
        if is_known || (self.nodes() == Nodes::FirstSeen && tx.snapshot_is_empty(&registered).await?) {
            return Ok(());
        }
        Err(Error::UnknownNode(node.to_owned()))
    }

    /// Pins the new name of the store's only node, and deletes the keys that old Calico versions stored under the old
    /// name.
    async fn pin_instead(&self, tx: &mut Transaction, from: &str, to: &str) -> Result<()> {
        let pin = Key::from(keys::PINNED_NODE);
        if self.nodes() == Nodes::FirstSeen
            && tx.get(&pin).await?.is_some_and(|name| name.as_bytes() == from.as_bytes())
        {
            tx.put(&pin, to)?;
        }
        drop_legacy_in(tx, from).await
    }
}

async fn hand_over_block(
    work: &mut WriteSet<'_>,
    (old, new): (&str, &str),
    cidr: IpNet,
    done: &mut HandOverResult,
) -> Result<()> {
    let (heir, addresses, named) = match work.find(cidr).await? {
        BlockSlot::Damaged => return Ok(()),
        BlockSlot::Absent => (None, Vec::new(), BTreeSet::new()),
        BlockSlot::There(block) => {
            let heir = block.owner().and_then(|owner| owner.renamed(old, new));
            (heir, recorded_for(block, old), named_handles_in(block, old))
        }
    };
    if heir.is_some() || !addresses.is_empty() || !named.is_empty() {
        work.change(cidr, |block| block.rename_node(old, new)).await?;
        for before in named {
            let Some(after) = renamed_node_handle(&before, old, new) else { continue };
            work.touch_handle(&before, cidr);
            work.touch_handle(&after, cidr);
            done.handles.push((before, after));
        }
        done.addresses.extend(addresses);
    }
    if let Some(heir) = &heir {
        work.confirm_affinity(heir, cidr).await?;
        done.blocks.push(cidr);
    }
    // The old node's affinity is deleted even if the new node gets no affinity, because the block is then missing or
    // has another owner, and the old affinity is stale.
    for owner in Owner::all_of(old) {
        let Some(key) = keys::affinity(&owner, cidr) else { continue };
        if work.tx.snapshot_get(&key).await?.is_some() {
            work.drop_affinity(&owner, cidr).await?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gc::BlockPart;

    fn departed_node(parts: usize, bytes: usize, tunnels: usize) -> DepartedNode {
        let cidr = |number: usize| format!("10.0.{number}.0/24").parse().unwrap();
        let tunnels = vec![String::new(); tunnels];
        let part = BlockPart { is_own: true, bytes, tunnels, ..BlockPart::default() };
        DepartedNode {
            parts: (0..parts).map(|number| (cidr(number), part.clone())).collect(),
            ..DepartedNode::default()
        }
    }

    #[test]
    fn shares_fit_into_commits_and_leave_nothing_out() {
        let sizes = |departed_node: &DepartedNode| departed_node.shares().iter().map(Vec::len).collect::<Vec<_>>();
        assert_eq!(sizes(&departed_node(0, 0, 0)), [0]);
        assert_eq!(sizes(&departed_node(70, 1, 0)), [32, 32, 6], "by keys");
        assert_eq!(sizes(&departed_node(5, 400_000, 0)), [2, 2, 1], "by bytes");
        assert_eq!(sizes(&departed_node(2, 2_000_000, 0)), [1, 1], "one that is longer than a commit should be");
        assert_eq!(sizes(&departed_node(10, 1, 5)), [7, 3], "by handles");
    }
}
