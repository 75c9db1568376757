//! The estates of nodes in a store, as of one revision, for a caller that frees them when a node is gone, or hands them over: a
//! machine got another name, or one took the place of another with its containers, which keep their addresses.
//!
//! Each commit of a hand-over makes whole blocks the other node's: owner, affinity, what is recorded with the addresses, and the
//! handles of tunnels and of the node's own prefixes, which have the node's name in them. A store whose one node is pinned
//! pins the new name in the same commit, so that a DEL finds what the commit has moved. Guards: the blocks, the affinities,
//! the handles that change, and that the old node is not registered.

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

/// Which nodes a store knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KnownNodes {
    /// Those that are registered.
    pub registered: BTreeSet<String>,
    /// The one name under which a store has every node: only on an embedded store in which none is registered.
    pub pinned: Option<String>,
}

/// A node's addresses in a block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockPart {
    /// The block is the node's.
    pub is_own: bool,
    /// The node has an affinity to it, or to what was a block of its own once.
    pub has_affinity: bool,
    /// How many addresses of it are recorded for the node.
    pub addresses: usize,
    /// The handles of the node's tunnels, and of its own prefixes, that have addresses of it.
    pub tunnels: Vec<String>,
    /// How long the block is as it is stored.
    bytes: usize,
}

/// All that a node has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DepartedNode {
    /// Its name.
    pub node: String,
    /// The blocks that are its own, that it has an affinity to, or that have addresses of it.
    pub parts: BTreeMap<IpNet, BlockPart>,
    /// The addresses that are recorded for it, by any writer, tunnels among them; by block.
    pub holds: Vec<Hold>,
    /// How many addresses are recorded for it and for a second owner, who may be alive, or are a virtual machine's, which may
    /// run elsewhere next.
    pub shared: usize,
    /// How many addresses of its blocks are recorded for no node. Those that wait for their workloads are not among them.
    pub nameless: usize,
    /// How many addresses of its blocks are recorded for other nodes.
    pub of_others: usize,
    /// Its workload endpoints, those that the CNI plugin has stored.
    pub endpoints: Vec<NodeEndpoint>,
}

impl DepartedNode {
    /// The blocks that are its own, or that it has an affinity to.
    pub fn blocks(&self) -> impl Iterator<Item = IpNet> {
        self.parts.iter().filter(|(_, part)| part.is_own || part.has_affinity).map(|(cidr, _)| *cidr)
    }

    fn part(&mut self, cidr: IpNet) -> &mut BlockPart {
        self.parts.entry(cidr).or_default()
    }
}

/// The estates of nodes in a store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DepartedNodes {
    /// Which nodes the store knows.
    pub known: KnownNodes,
    /// All nodes that have addresses or blocks, or are registered, whether they were looked at or not; and those that were looked
    /// at and have endpoints.
    pub nodes: BTreeSet<String>,
    /// The estates of the scanned nodes, by name; nodes that have nothing are not here.
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
            // Old versions kept no more than the node's name.
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
    /// The estates of the `wanted` nodes as of one revision, with their endpoints as of after that, read in pages.
    ///
    /// # Errors
    /// Those of the store. Damaged blocks are passed over, and the log says so.
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
            Err(error) => tracing::warn!(%error, "passing over a damaged block"),
        })
        .await?;
        Ok(found)
    }

    /// That a node is not registered; it stays so until the commit.
    pub(crate) async fn require_gone(&self, tx: &mut Transaction, node: &str) -> Result<()> {
        match tx.get(&keys::resource(ResourceKind::Node, node)).await? {
            None => Ok(()),
            Some(_) => Err(Error::Invalid(format!("node {node} is registered, so what it has is its own"))),
        }
    }
}

/// How many keys the blocks of a commit have; it has a few of its own besides.
const MAX_KEYS_PER_COMMIT: usize = 96;
/// How many bytes the blocks of a commit have, unless one alone has more.
const MAX_BYTES_PER_COMMIT: usize = 1_000_000;

/// The blocks and addresses that a commit has handed over.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HandOverResult {
    /// The blocks that are its own now.
    pub blocks: Vec<IpNet>,
    /// The addresses that are recorded for it now.
    pub addresses: Vec<IpAddr>,
    /// The handles that have another name now: the old one and the new one.
    pub handles: Vec<(String, String)>,
}

/// The handles that end with the node's name and have something in a block: those of its tunnels, and of the prefixes that it
/// has itself.
fn named_handles_in(block: &Block, node: &str) -> BTreeSet<String> {
    let handles = block.allocated().filter_map(|(_, entry)| entry.handle());
    handles.filter(|handle| is_node_handle(handle, node)).map(str::to_owned).collect()
}

/// The addresses of a block that are recorded for a node, also as a second owner.
fn recorded_for(block: &Block, node: &str) -> Vec<IpAddr> {
    let is_its = |recorded: Option<&str>| recorded == Some(node);
    let held = block.allocated().filter(|(_, entry)| entry.released_at().is_none());
    let its = held.filter(|(_, entry)| is_its(entry.node()) || is_its(entry.alternate_node()));
    its.map(|(address, _)| address).collect()
}

impl DepartedNode {
    /// Its blocks as one commit each can hand them over; a single empty one if it has no blocks.
    pub fn shares(&self) -> Vec<Vec<IpNet>> {
        let (mut shares, mut share, mut keys, mut bytes) = (Vec::new(), Vec::new(), 0, 0);
        for (cidr, part) in &self.parts {
            // The block and two affinities; each tunnel has two handles.
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
    /// Makes what the node `from` has in some blocks the node `to`'s, one of [`DepartedNode::shares`], in one commit. Blocks
    /// that are the other node's already stay as they are, so it can be repeated.
    ///
    /// # Errors
    /// `Invalid` if `from` is registered, or `to` cannot be the name of another node; `UnknownNode` if nodes are registered
    /// and `to` is not; damaged handles; those of the store.
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

    /// That a node is registered, where nodes are.
    pub(super) async fn require_known(&self, tx: &mut Transaction, node: &str) -> Result<()> {
        let registered = Range::Prefix(keys::resources_prefix(ResourceKind::Node));
        let is_known = tx.snapshot_get(&keys::resource(ResourceKind::Node, node)).await?.is_some();
        if is_known || (self.nodes() == Nodes::FirstSeen && tx.snapshot_is_empty(&registered).await?) {
            return Ok(());
        }
        Err(Error::UnknownNode(node.to_owned()))
    }

    /// Gives the store's one node its new name, and drops what old versions kept under the old one.
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
    // One to a block that is another's or not there is stale, and goes.
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
