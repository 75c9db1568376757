//! The estates of nodes in a store, as of one revision, for a caller that frees them when a node is gone, or hands them
//! on when a node got another name.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;
use kv::{Content, Deadline, Key, Range, Transaction};

use super::endpoints::NodeEndpoint;
use super::hand_over::named_handles_in;
use super::hold::Hold;
use crate::error::{Error, Result};
use crate::ipam::{Ipam, Nodes};
use crate::model::keys::{self, ResourceKind};
use crate::model::{Block, Document, WINDOWS_RESERVED_HANDLE};
use crate::sticky::waits_until;
use crate::usage::{Reading, reread};
use crate::vm::is_vms;

/// Which nodes a store knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// Those that are registered.
    pub registered: BTreeSet<String>,
    /// The one name under which a store has every node: only on an embedded store in which none is registered.
    pub pinned: Option<String>,
}

/// A node's addresses in a block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// The block is the node's.
    pub is_own: bool,
    /// The node has an affinity to it, or to what was a block of its own once.
    pub has_affinity: bool,
    /// How many addresses of it are recorded for the node.
    pub addresses: usize,
    /// The handles of the node's tunnels, and of its own prefixes, that have addresses of it.
    pub tunnels: Vec<String>,
    /// How long the block is as it is stored.
    pub(super) bytes: usize,
}

/// All that a node has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Estate {
    /// Its name.
    pub node: String,
    /// The blocks that are its own, that it has an affinity to, or that have addresses of it.
    pub parts: BTreeMap<IpNet, Part>,
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

impl Estate {
    /// The blocks that are its own, or that it has an affinity to.
    pub fn blocks(&self) -> impl Iterator<Item = IpNet> {
        self.parts.iter().filter(|(_, part)| part.is_own || part.has_affinity).map(|(cidr, _)| *cidr)
    }

    fn part(&mut self, cidr: IpNet) -> &mut Part {
        self.parts.entry(cidr).or_default()
    }
}

/// The estates of nodes in a store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Estates {
    /// Which nodes the store knows.
    pub known: Known,
    /// All nodes that have addresses or blocks, or are registered, whether they were looked at or not; and those that were looked
    /// at and have endpoints.
    pub nodes: BTreeSet<String>,
    /// The estates of the scanned nodes, by name; nodes that have nothing are not here.
    pub estates: BTreeMap<String, Estate>,
}

impl Estates {
    fn estate(&mut self, node: &str) -> &mut Estate {
        let new = || Estate { node: node.to_owned(), ..Estate::default() };
        self.estates.entry(node.to_owned()).or_insert_with(new)
    }

    fn add_affinity(&mut self, key: &Key, wanted: &dyn Fn(&Known, &str) -> bool) {
        match keys::parse_affinity(key) {
            Some((owner, cidr)) => {
                let Some(node) = owner.node().map(str::to_owned) else { return };
                if wanted(&self.known, &node) {
                    self.estate(&node).part(cidr).has_affinity = true;
                }
                self.nodes.insert(node);
            }
            // Old versions kept no more than the node's name.
            _ => {
                let Some(node) = keys::parse_legacy_host(key).map(str::to_owned) else { return };
                if wanted(&self.known, &node) {
                    self.estate(&node);
                }
                self.nodes.insert(node);
            }
        }
    }

    fn add_block(&mut self, block: &Block, bytes: usize, wanted: &dyn Fn(&Known, &str) -> bool) {
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
                let estate = self.estate(node);
                estate.part(cidr).addresses += 1;
                if second.is_empty() && !is_vms(entry) {
                    estate.holds.push(Hold::of(block, address, entry));
                } else {
                    estate.shared += 1;
                }
            }
        }
        for node in &concerned {
            if wanted(&self.known, node) {
                let tunnels = named_handles_in(block, node).into_iter().collect();
                let part = self.estate(node).part(cidr);
                (part.bytes, part.tunnels) = (bytes, tunnels);
            }
        }
        if let Some(owner) = owner.filter(|owner| wanted(&self.known, owner)) {
            let estate = self.estate(&owner);
            estate.part(cidr).is_own = true;
            estate.nameless += nameless;
            estate.of_others += named;
        }
        self.nodes.extend(concerned);
    }
}

impl Ipam {
    /// The estates of the `wanted` nodes as of one revision, with their endpoints as of after that, read in pages.
    ///
    /// # Errors
    /// Those of the store. Damaged blocks are passed over, and the log says so.
    pub async fn estates(
        &self,
        wanted: impl Fn(&Known, &str) -> bool + Send + Sync,
        deadline: Deadline,
    ) -> Result<Estates> {
        let mut found = reread(|| self.read_estates(&wanted, deadline)).await?;
        self.read_endpoints(&mut found, &wanted, deadline).await?;
        Ok(found)
    }

    async fn read_endpoints(
        &self,
        found: &mut Estates,
        wanted: &(impl Fn(&Known, &str) -> bool + Send + Sync),
        deadline: Deadline,
    ) -> Result<()> {
        let known = &found.known;
        for endpoint in self.node_endpoints(|node| wanted(known, node), deadline).await? {
            found.nodes.insert(endpoint.node.clone());
            found.estate(&endpoint.node).endpoints.push(endpoint);
        }
        Ok(())
    }

    async fn read_estates(
        &self,
        wanted: &(impl Fn(&Known, &str) -> bool + Send + Sync),
        deadline: Deadline,
    ) -> kv::Result<Estates> {
        let (mut found, mut reading) = (Estates::default(), Reading::new(deadline));
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
