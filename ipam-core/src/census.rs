//! Determines the use of every address of every block, and the use of quotas, at one revision, for display and metrics.
//! [`Ipam::share_of`] counts a single node's share of the pools without reading all blocks of other nodes.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;
use kv::{Content, Deadline, Range, Revision};

use crate::assign_context::pool_holding;
use crate::attachment::BOOT;
use crate::boxed_future;
use crate::error::Result;
use crate::gc::ReadScope;
use crate::ipam::Ipam;
use crate::model::keys::{self, ResourceKind};
use crate::model::{
    AddressState, Attribute, Block, Document, IpReservation, IpamConfig, Node, Owner, Pool, QuotaCount, QuotaSubject,
    Quotas,
};
use crate::quarantine::{Quarantine, quarantine_of};
use crate::reservations::Reservations;
use crate::usage::{SnapshotReader, reread};
use crate::utilization::{Usage, UtilizationCounter};
use crate::write_set::each_of;

/// How one address of a block is used. An address that is both in use and reserved counts as in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AddressUse {
    /// The address is free and can be assigned.
    Free,
    /// The address is reserved, so it is not assigned.
    Reserved,
    /// The address was released and is in cooldown.
    InCooldown,
    /// The block's owner holds the address. An address also counts as used if the node of its holder or of the block's
    /// owner is unknown.
    Used,
    /// A node other than the block's owner holds the address.
    Borrowed,
}

/// A block and the use of each of its addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockCensus {
    /// The block's CIDR.
    pub cidr: IpNet,
    /// The owner of the block, if it has one.
    pub owner: Option<Owner>,
    /// The use of each address of the block, in the order of the addresses.
    pub uses: Vec<AddressUse>,
}

impl BlockCensus {
    /// The number of addresses in the block that have the use `wanted`.
    pub fn count(&self, wanted: AddressUse) -> usize {
        self.uses.iter().filter(|found| **found == wanted).count()
    }
}

/// A pool and its blocks, with the use of their addresses.
#[derive(Clone, Debug)]
pub struct PoolCensus {
    /// The counted pool.
    pub pool: Pool,
    /// The address counts of the pool, as in [`Ipam::utilization`].
    pub usage: Usage,
    /// The blocks of the pool, in the order of their addresses.
    pub blocks: Vec<BlockCensus>,
}

/// How many blocks a node owns, and how many addresses it holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeCensus {
    /// The number of blocks that the node owns.
    pub blocks: usize,
    /// The number of addresses that the node holds, in its own blocks and in other owners' blocks.
    pub used: usize,
    /// The number of addresses that the node holds, by the boot id under which they were assigned. Addresses without a
    /// recorded boot are not counted.
    pub boots: BTreeMap<String, usize>,
}

/// How all addresses and quotas of a store are used, at one revision.
#[derive(Clone, Debug, Default)]
pub struct Census {
    /// The store revision at which all blocks and quotas were read.
    pub revision: Revision,
    /// All pools with their counted addresses, ordered by name.
    pub pools: Vec<PoolCensus>,
    /// Blocks that lie in no pool, in the order of their addresses.
    pub orphaned: Vec<BlockCensus>,
    /// The counts of each node that has blocks or addresses, by the node's name.
    pub nodes: BTreeMap<String, NodeCensus>,
    /// The names of the nodes that are registered in the store.
    pub registered: BTreeSet<String>,
    /// Each quota and how much of it is used, ordered by the kind and name of the quota's subject.
    pub quotas: Vec<QuotaUse>,
    /// The quarantined addresses of the store.
    pub quarantined: Quarantine,
}

impl Census {
    /// The number of addresses that unregistered nodes hold; 0 if the store has no registered nodes at all.
    pub fn of_gone_nodes(&self) -> usize {
        if self.registered.is_empty() {
            return 0;
        }
        self.nodes.iter().filter(|(name, _)| !self.registered.contains(*name)).map(|(_, node)| node.used).sum()
    }
}

impl Ipam {
    /// Determines the use of every address of every block, and the use of the quotas. Blocks are read in pages, and one
    /// byte of memory is kept for each address.
    ///
    /// # Errors
    /// Any store error; `Timeout` if `deadline` has passed. Damaged documents are logged and skipped.
    #[boxed_future]
    pub async fn census(&self, deadline: Deadline) -> Result<Census> {
        Ok(reread(|| self.read_census(deadline)).await?)
    }

    async fn read_census(&self, deadline: Deadline) -> kv::Result<Census> {
        let mut reading = SnapshotReader::new(deadline);
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

        let mut tally = UtilizationCounter::new(&pools, &reservations);
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
    /// Adds a block to the counts of the nodes that use the block, and returns the use of each address of the block.
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

/// The quota of a namespace, CNI network or node, and the number of addresses that count against the quota.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuotaUse {
    /// The namespace, CNI network or node to which the quota applies.
    pub subject: QuotaSubject,
    /// Maximum number of addresses that the quota's subject may hold.
    pub limit: u64,
    /// The number of addresses that the quota's subject holds.
    pub used: u64,
}

impl QuotaUse {
    /// Returns the percentage of the quota's limit that is used, rounded down; 100 if the limit is 0.
    pub fn percent(&self) -> u64 {
        self.used.saturating_mul(100).checked_div(self.limit).unwrap_or(100)
    }
}

/// Counts the addresses that subjects with a quota hold, one block at a time.
struct QuotaTally {
    quotas: Quotas,
    counted: BTreeMap<QuotaSubject, u64>,
}

impl QuotaTally {
    fn add(&mut self, block: &Block) {
        each_of(&self.quotas, block, |kind, name, _| {
            *self.counted.entry(QuotaSubject::new(kind, name)).or_default() += 1;
        });
    }

    /// Returns a [`QuotaUse`] for every quota of a named subject, and for every other subject with addresses that the
    /// quota for [`Quotas::ANY_OTHER`] limits.
    fn finish(mut self) -> Vec<QuotaUse> {
        for (subject, _) in self.quotas.all().filter(|(subject, _)| subject.name != Quotas::ANY_OTHER) {
            self.counted.entry(subject).or_default();
        }
        let used = |(subject, used): (QuotaSubject, u64)| {
            let limit = self.quotas.limit(subject.kind, &subject.name)?;
            Some(QuotaUse { subject, limit, used })
        };
        self.counted.into_iter().filter_map(used).collect()
    }
}

impl Ipam {
    async fn read_quotas(&self, reading: &mut SnapshotReader) -> kv::Result<QuotaTally> {
        let (quotas, counted) = self.read_counters(reading, Range::Key(keys::quotas())).await?;
        Ok(QuotaTally { quotas, counted })
    }

    /// Returns the use of the quotas according to their stored counters. A quota counter may be too high; it is too low
    /// only if other programs also assign addresses. Subjects to which no address was assigned since the last change of
    /// any quota are not in the result.
    async fn counted_quotas(&self, reading: &mut SnapshotReader) -> kv::Result<Vec<QuotaUse>> {
        let (quotas, counted) = self.read_counters(reading, Range::prefix(keys::QUOTAS_PREFIX)).await?;
        let used = |(subject, used): (QuotaSubject, u64)| {
            let limit = quotas.limit(subject.kind, &subject.name)?;
            Some(QuotaUse { subject, limit, used })
        };
        Ok(counted.into_iter().filter_map(used).collect())
    }

    async fn read_counters(
        &self,
        reading: &mut SnapshotReader,
        range: Range,
    ) -> kv::Result<(Quotas, BTreeMap<QuotaSubject, u64>)> {
        let (mut quotas, mut at, mut counters) = (Quotas::default(), Revision::UNSET, Vec::new());
        self.each(range, Content::Full, reading, |kv| {
            if let Some(subject) = keys::parse_quota_use(&kv.key) {
                counters.push((subject, kv.value.clone()));
            } else if kv.key == keys::quotas() {
                at = kv.mod_revision;
                quotas = Quotas::decode(&kv.key, kv.value.as_bytes()).unwrap_or_else(|error| {
                    tracing::warn!(%error, "cannot decode the stored quotas; continuing as if no quota were set");
                    Quotas::default()
                });
            }
        })
        .await?;
        let good = |(subject, value)| Some((subject, QuotaCount::good(Some(&value), at)?));
        Ok((quotas, counters.into_iter().filter_map(good).collect()))
    }
}

/// How many of a pool's blocks and addresses a node uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolShare {
    /// The number of blocks that the node owns.
    pub blocks: usize,
    /// The number of addresses of the pool that the node holds, in its own blocks and in other owners' blocks.
    pub used: usize,
    /// The number of addresses that the node holds in blocks of other owners.
    pub borrowed: usize,
    /// The number of addresses in the node's blocks that other nodes hold.
    pub lent: usize,
    /// The number of addresses in the node's blocks that are in cooldown.
    pub in_cooldown: usize,
    /// The number of free addresses in the node's blocks.
    pub free: usize,
}

/// How many blocks and addresses of each pool a node uses.
#[derive(Clone, Debug, Default)]
pub struct NodeShare {
    /// The lowest store revision at which the blocks, pools and quotas for these shares were read.
    pub revision: Revision,
    /// The CIDR of each pool and the node's share of the pool, by the pool's name. Pools that the node does not use are
    /// included.
    pub pools: BTreeMap<String, (IpNet, PoolShare)>,
    /// The number of blocks outside of all pools, among the blocks that were read.
    pub orphaned: usize,
    /// The number of addresses that the node holds, by the boot id under which they were assigned. Addresses without a
    /// recorded boot are not counted.
    pub boots: BTreeMap<String, usize>,
    /// The use of the cluster's quotas, according to their stored counters.
    pub quotas: Vec<QuotaUse>,
}

impl Ipam {
    /// Counts a node's shares of all pools, and the blocks that lie in no pool. Only the blocks that `reach` selects
    /// are read, so the cost does not depend on the size of the cluster.
    ///
    /// # Errors
    /// Any store error. Damaged documents are logged and skipped.
    #[boxed_future]
    pub async fn share_of(&self, node: &str, reach: &ReadScope, deadline: Deadline) -> Result<NodeShare> {
        let mut reading = SnapshotReader::new(deadline);
        let resources = |kind| Range::Prefix(keys::resources_prefix(kind));
        let pools: Vec<Pool> = self.read_all(resources(ResourceKind::IpPool), &mut reading).await?;
        let reservations: Vec<IpReservation> =
            self.read_all(resources(ResourceKind::IpReservation), &mut reading).await?;
        let config: Vec<IpamConfig> = self.read_all(Range::Key(keys::config()), &mut reading).await?;
        let quotas = self.counted_quotas(&mut reading).await?;
        let (reservations, _) = Reservations::from_documents(&reservations);
        let cooldown = config.first().map_or(0, IpamConfig::cooldown_seconds);
        let now = self.now();

        let mut share = NodeShare { revision: reading.at, quotas, ..NodeShare::default() };
        share.pools = pools.iter().map(|pool| (pool.name().to_owned(), (pool.cidr(), PoolShare::default()))).collect();
        self.read_near(node, reach, deadline, |mut block: Block| {
            _ = block.apply_cooldown(now, cooldown);
            block.free_overdue(now);
            share.add(&block, node, &reservations, pool_holding(&pools, block.cidr()));
        })
        .await?;
        Ok(share)
    }
}

impl NodeShare {
    fn add(&mut self, block: &Block, node: &str, reservations: &Reservations, pool: Option<&Pool>) {
        let mut census = Census::default();
        let counted = census.count(block, reservations);
        let its = census.nodes.remove(node).unwrap_or_default();
        let is_own = counted.owner.as_ref().and_then(Owner::node) == Some(node);
        for (boot, count) in its.boots {
            *self.boots.entry(boot).or_default() += count;
        }
        let Some(share) = pool.and_then(|pool| self.pools.get_mut(pool.name())).map(|(_, share)| share) else {
            self.orphaned += 1;
            return;
        };
        share.used += its.used;
        if is_own {
            share.blocks += 1;
            share.lent += counted.count(AddressUse::Borrowed);
            share.in_cooldown += counted.count(AddressUse::InCooldown);
            share.free += counted.count(AddressUse::Free);
        } else {
            share.borrowed += its.used;
        }
    }
}
