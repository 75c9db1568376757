//! A node's share of the pools of a cluster, without a look at the shares of others.

use std::collections::BTreeMap;

use ipnet::IpNet;
use kv::{Deadline, Range, Revision};

use super::{AddressUse, Census, QuotaUse};
use crate::boxed;
use crate::error::Result;
use crate::gc::Reach;
use crate::ipam::Ipam;
use crate::model::keys::{self, ResourceKind};
use crate::model::{Block, IpReservation, IpamConfig, Owner, Pool};
use crate::reservations::Reservations;
use crate::surroundings::pool_holding;
use crate::usage::Reading;

/// A node's share of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolShare {
    /// How many blocks are its own.
    pub blocks: usize,
    /// How many addresses it has, in its own blocks and in others.
    pub used: usize,
    /// How many of them are in blocks of others.
    pub borrowed: usize,
    /// How many addresses of its own blocks others have.
    pub lent: usize,
    /// How many addresses of its own blocks rest.
    pub in_cooldown: usize,
    /// How many addresses of its own blocks are free.
    pub free: usize,
}

/// A node's share.
#[derive(Clone, Debug, Default)]
pub struct NodeShare {
    /// A revision since which it is so.
    pub revision: Revision,
    /// The share of each pool, by the pool's name; pools without a share are here, too.
    pub pools: BTreeMap<String, (IpNet, PoolShare)>,
    /// How many blocks in its reach lie in no pool.
    pub orphaned: usize,
    /// How many of its addresses were given in which boot, where that is recorded.
    pub boots: BTreeMap<String, usize>,
    /// The use of the cluster's quotas, by their counters.
    pub quotas: Vec<QuotaUse>,
}

impl Ipam {
    /// The share of a node of a cluster, as far as it is in reach. It costs the same in a cluster of any size.
    ///
    /// # Errors
    /// Those of the store. Damaged documents are passed over, and the log says so.
    #[boxed]
    pub async fn share_of(&self, node: &str, reach: &Reach, deadline: Deadline) -> Result<NodeShare> {
        let mut reading = Reading::new(deadline);
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
