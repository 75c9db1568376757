//! The use of every address of every block, as of one revision, for a caller that draws or counts it.

mod quotas;
mod share;

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;
use kv::{Deadline, Range, Revision};

use crate::attachment::BOOT;
use crate::boxed;
use crate::error::Result;
use crate::ipam::Ipam;
use crate::model::keys::{self, ResourceKind};
use crate::model::{AddressState, Attribute, Block, IpReservation, IpamConfig, Node, Owner, Pool};
use crate::quarantine::{Quarantine, quarantine_of};
use crate::reservations::Reservations;
use crate::usage::{Reading, reread};
use crate::utilization::{Tally, Usage};

pub use quotas::QuotaUse;
pub use share::{NodeShare, PoolShare};

/// The use of an address of a block. An address that is in use and reserved counts as in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AddressUse {
    /// It can be assigned.
    Free,
    /// It is never assigned.
    Reserved,
    /// It was released, and is in cooldown.
    InCooldown,
    /// The block's owner has it, or it is not known who.
    Used,
    /// Another node than the block's owner has it.
    Borrowed,
}

/// A block, address by address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockCensus {
    /// The block.
    pub cidr: IpNet,
    /// The owner.
    pub owner: Option<Owner>,
    /// The uses of its addresses, in their order.
    pub uses: Vec<AddressUse>,
}

impl BlockCensus {
    /// How many addresses of the block are so.
    pub fn count(&self, wanted: AddressUse) -> usize {
        self.uses.iter().filter(|found| **found == wanted).count()
    }
}

/// A pool with its blocks.
#[derive(Clone, Debug)]
pub struct PoolCensus {
    /// The pool.
    pub pool: Pool,
    /// Its numbers, as [`Ipam::utilization`] has them.
    pub usage: Usage,
    /// Its blocks, in the order of their addresses.
    pub blocks: Vec<BlockCensus>,
}

/// The blocks and addresses of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeCensus {
    /// How many blocks are its own.
    pub blocks: usize,
    /// How many addresses it has, in its own blocks and in others.
    pub used: usize,
    /// How many of them were given in which boot of the node, where that is recorded.
    pub boots: BTreeMap<String, usize>,
}

/// Everything.
#[derive(Clone, Debug, Default)]
pub struct Census {
    /// The revision at which it is so.
    pub revision: Revision,
    /// The pools, by name.
    pub pools: Vec<PoolCensus>,
    /// Blocks that lie in no pool, in the order of their addresses.
    pub orphaned: Vec<BlockCensus>,
    /// The nodes that have blocks or addresses.
    pub nodes: BTreeMap<String, NodeCensus>,
    /// The nodes that are registered; empty if none is.
    pub registered: BTreeSet<String>,
    /// The use of the quotas, by kind and name.
    pub quotas: Vec<QuotaUse>,
    /// The addresses in quarantine.
    pub quarantined: Quarantine,
}

impl Census {
    /// How many addresses are in use by nodes that are not registered, in a store in which nodes are.
    pub fn of_gone_nodes(&self) -> usize {
        if self.registered.is_empty() {
            return 0;
        }
        self.nodes.iter().filter(|(name, _)| !self.registered.contains(*name)).map(|(_, node)| node.used).sum()
    }
}

impl Ipam {
    /// The use of every address of every block. Read in pages; what is kept is a byte for each address.
    ///
    /// # Errors
    /// Those of the store; `Timeout` after the deadline. Damaged documents are passed over, and the log says so.
    #[boxed]
    pub async fn census(&self, deadline: Deadline) -> Result<Census> {
        Ok(reread(|| self.read_census(deadline)).await?)
    }

    async fn read_census(&self, deadline: Deadline) -> kv::Result<Census> {
        let mut reading = Reading::new(deadline);
        let resources = |kind| Range::Prefix(keys::resources_prefix(kind));
        let pools: Vec<Pool> = self.read_all(resources(ResourceKind::IpPool), &mut reading).await?;
        let reservations: Vec<IpReservation> =
            self.read_all(resources(ResourceKind::IpReservation), &mut reading).await?;
        let nodes: Vec<Node> = self.read_all(resources(ResourceKind::Node), &mut reading).await?;
        let config: Vec<IpamConfig> = self.read_all(Range::Key(keys::config()), &mut reading).await?;
        let mut quotas = self.read_quotas(&mut reading).await?;
        let quarantined = quarantine_of(&reservations);
        let (reservations, _) = Reservations::from_documents(&reservations);
        let cooldown = config.first().map_or(0, IpamConfig::cooldown_seconds);
        let now = self.now();

        let mut tally = Tally::new(&pools, &reservations);
        let registered = nodes.iter().map(|node| node.name().to_owned()).collect();
        let mut census = Census { registered, quarantined, ..Census::default() };
        let mut blocks = Vec::new();
        self.for_each(Range::Prefix(keys::blocks_prefix(None)), &mut reading, |mut block: Block| {
            block.free_overdue(now);
            let place = tally.add(&block);
            quotas.add(&block);
            _ = block.apply_cooldown(now, cooldown);
            blocks.push((place, census.count(&block, &reservations)));
        })
        .await?;
        blocks.sort_by_key(|(_, block)| block.cidr);
        census.revision = reading.at;
        census.quotas = quotas.finish();
        let numbers = tally.finish().pools;
        census.pools =
            pools.into_iter().zip(numbers).map(|(pool, counted)| PoolCensus::new(pool, counted.usage)).collect();
        for (place, block) in blocks {
            match place.and_then(|place| census.pools.get_mut(place)) {
                Some(pool) => pool.blocks.push(block),
                None => census.orphaned.push(block),
            }
        }
        Ok(census)
    }
}

impl PoolCensus {
    fn new(pool: Pool, usage: Usage) -> Self {
        Self { pool, usage, blocks: Vec::new() }
    }
}

impl Census {
    /// Counts what a block's nodes have, and says what is with its addresses.
    fn count(&mut self, block: &Block, reservations: &Reservations) -> BlockCensus {
        let owner = block.owner();
        let host = owner.as_ref().and_then(Owner::node);
        if let Some(host) = host {
            self.nodes.entry(host.to_owned()).or_default().blocks += 1;
        }
        let mut uses = Vec::with_capacity(block.capacity());
        for ip in block.addresses() {
            uses.push(match block.lookup(ip) {
                AddressState::Assigned(entry) => self.of_holder(entry, host),
                AddressState::CoolingDown(_) => AddressUse::InCooldown,
                _ if block.is_reserved(ip, reservations) => AddressUse::Reserved,
                _ => AddressUse::Free,
            });
        }
        BlockCensus { cidr: block.cidr(), owner, uses }
    }

    fn of_holder(&mut self, entry: &Attribute, host: Option<&str>) -> AddressUse {
        let Some(node) = entry.node() else { return AddressUse::Used };
        if !self.nodes.contains_key(node) {
            self.nodes.insert(node.to_owned(), NodeCensus::default());
        }
        if let Some(counted) = self.nodes.get_mut(node) {
            counted.used += 1;
            if let Some(boot) = entry.get(BOOT) {
                *counted.boots.entry(boot.to_owned()).or_default() += 1;
            }
        }
        if host.is_some_and(|host| host != node) { AddressUse::Borrowed } else { AddressUse::Used }
    }
}
