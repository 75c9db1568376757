//! Counts the addresses of pools and blocks that are in use, reserved and available.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::Serialize;

use crate::model::{Block, Pool};
use crate::net::Count;
use crate::reservations::Reservations;

/// How many addresses of a pool or block are in use, reserved and available.
///
/// A reserved address can be in use if it was specifically requested, so the sum of `in_use`, `reserved` and
/// `available` can exceed `capacity`. An address in cooldown counts as in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// The total number of addresses of the pool or block.
    pub capacity: Count,
    /// The number of addresses that are in use, or in cooldown.
    pub in_use: Count,
    /// The number of reserved addresses of the pool or block.
    pub reserved: Count,
    /// The number of addresses that are neither in use nor reserved.
    pub available: Count,
}

/// The address counts of a block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BlockUsage {
    /// The block's CIDR.
    #[serde(serialize_with = "as_text")]
    pub cidr: IpNet,
    /// The address counts of the block.
    #[serde(flatten)]
    pub usage: Usage,
}

/// The address counts of a pool and of its blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PoolUsage {
    /// The name of the pool.
    pub name: String,
    /// The pool's CIDR.
    #[serde(serialize_with = "as_text")]
    pub cidr: IpNet,
    /// The length of the prefixes that the pool assigns; `None` for a pool of single addresses. In a pool of prefixes,
    /// all counts are numbers of prefixes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix_length: Option<u8>,
    /// The address counts of the pool.
    #[serde(flatten)]
    pub usage: Usage,
    /// The stored blocks of the pool with their address counts, in the order in which the blocks were passed in.
    pub blocks: Vec<BlockUsage>,
}

/// The address counts of all pools.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Utilization {
    /// The counts of the pools, in the order in which the pools were passed in.
    pub pools: Vec<PoolUsage>,
    /// The blocks that lie in no pool, because their pool was deleted or was recreated with another CIDR.
    pub orphaned: Vec<BlockUsage>,
}

impl Utilization {
    /// Keeps only the counts of the pools in `named`, given by name or CIDR. Names of unknown pools are ignored. As in
    /// Calico, the counts of blocks outside of all pools are dropped.
    #[must_use]
    pub fn of_pools(mut self, named: &[&str]) -> Self {
        self.pools.retain(|pool| named.iter().any(|name| *name == pool.name || *name == pool.cidr.to_string()));
        self.orphaned.clear();
        self
    }
}

fn as_text<S: serde::Serializer>(net: &IpNet, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(net)
}

/// Counts the addresses of pools and blocks. A block counts towards the first pool that contains it completely.
pub fn utilization<'a>(
    pools: impl IntoIterator<Item = &'a Pool>,
    blocks: impl IntoIterator<Item = &'a Block>,
    reservations: &Reservations,
) -> Utilization {
    let mut tally = UtilizationCounter::new(pools, reservations);
    for block in blocks {
        _ = tally.add(block);
    }
    tally.finish()
}

/// Counts addresses one block at a time, so that the blocks need not be in memory all at once.
pub(crate) struct UtilizationCounter<'r> {
    reservations: &'r Reservations,
    pools: Vec<PoolCounter>,
    orphaned: Vec<BlockUsage>,
}

impl<'r> UtilizationCounter<'r> {
    pub(crate) fn new<'a>(pools: impl IntoIterator<Item = &'a Pool>, reservations: &'r Reservations) -> Self {
        let pools = pools.into_iter().map(|pool| PoolCounter::new(pool, reservations)).collect();
        Self { reservations, pools, orphaned: Vec::new() }
    }

    /// Adds the addresses of a block to the counts, and returns the index of the block's pool.
    pub(crate) fn add(&mut self, block: &Block) -> Option<usize> {
        let (usage, unreserved) = block_usage(block, self.reservations);
        let place = self.pools.iter().position(|pool| pool.usage.cidr.contains(&block.cidr()));
        match place.and_then(|place| self.pools.get_mut(place)) {
            Some(pool) => pool.add(usage, unreserved),
            None => self.orphaned.push(usage),
        }
        place
    }

    pub(crate) fn finish(self) -> Utilization {
        Utilization { pools: self.pools.into_iter().map(PoolCounter::finish).collect(), orphaned: self.orphaned }
    }
}

struct PoolCounter {
    usage: PoolUsage,
    // The number of the pool's addresses that are in use and not reserved.
    unreserved: Count,
}

impl PoolCounter {
    fn new(pool: &Pool, reservations: &Reservations) -> Self {
        let cidr = pool.cidr();
        let reserved = reservations.count_of_length(cidr, pool.length());
        let usage = Usage { capacity: pool.capacity(), reserved, ..Usage::default() };
        let (name, prefix_length) = (pool.name().to_owned(), pool.prefix_length());
        let usage = PoolUsage { name, cidr, prefix_length, usage, blocks: Vec::new() };
        Self { usage, unreserved: Count::ZERO }
    }

    fn add(&mut self, block: BlockUsage, unreserved: Count) {
        self.usage.usage.in_use = self.usage.usage.in_use.plus(block.usage.in_use);
        self.unreserved = self.unreserved.plus(unreserved);
        self.usage.blocks.push(block);
    }

    fn finish(mut self) -> PoolUsage {
        let usage = &mut self.usage.usage;
        usage.available = usage.capacity.minus(usage.reserved).minus(self.unreserved);
        self.usage
    }
}

/// Returns the address counts of a block, and the number of its addresses that are in use and not reserved.
fn block_usage(block: &Block, reservations: &Reservations) -> (BlockUsage, Count) {
    let reserved = |ip: &IpAddr| block.is_reserved(*ip, reservations);
    let free = block.free_addresses().count();
    let available = block.free_count(reservations);
    let in_use = Count::from(block.capacity()).minus(Count::from(free));
    let both = block.allocated().filter(|(ip, _)| reserved(ip)).count();
    let usage = Usage {
        capacity: Count::from(block.capacity()),
        in_use,
        reserved: reservations.count_of_length(block.cidr(), block.length()),
        available: Count::from(available),
    };
    (BlockUsage { cidr: block.cidr(), usage }, in_use.minus(Count::from(both)))
}

#[cfg(test)]
mod tests {
    use time::macros::datetime;

    use super::*;
    use crate::model::{Attribute, NewPool};

    #[test]
    fn utilization_of_largest_pool_is_exact() {
        let now = datetime!(2026-01-01 0:00 UTC);
        let pool = Pool::new(&NewPool::new("all", "::/0".parse().unwrap()), "u", now).unwrap();
        let mut block = Block::new("fd80::/122".parse().unwrap(), None, now, None).unwrap();
        let _ = block.assign_auto(1, &Attribute::default(), &Reservations::default());
        block.assign_specific("fd80::3f".parse().unwrap(), &Attribute::default()).unwrap();
        let orphan = Block::new("10.0.0.0/26".parse().unwrap(), None, now, None).unwrap();
        let reservations = Reservations::new(["fd80::30/124".parse().unwrap()]);
        let counted = utilization([&pool], [&block, &orphan], &reservations);
        let usage = counted.pools[0].usage;
        assert_eq!(usage.capacity, Count::ALL);
        assert_eq!((usage.in_use, usage.reserved), (Count::new(2), Count::new(16)));
        // The second address of the block is both in use and reserved.
        assert_eq!(usage.available, Count::ALL.minus(Count::new(17)));
        assert_eq!(counted.pools[0].blocks[0].usage.available, Count::new(64 - 17));
        assert_eq!(counted.orphaned.len(), 1);
        for named in ["all", "::/0"] {
            let some = counted.clone().of_pools(&[named, "other"]);
            assert_eq!((some.pools.len(), some.orphaned.len()), (1, 0));
        }
        assert!(counted.of_pools(&["other"]).pools.is_empty());
        let empty = utilization([&pool], [], &Reservations::default());
        assert_eq!(empty.pools[0].usage.available, Count::ALL);
        assert_eq!(
            serde_json::to_value(&empty.pools[0]).unwrap(),
            serde_json::json!({"name":"all","cidr":"::/0","capacity":"340282366920938463463374607431768211456",
                "in_use":"0","reserved":"0","available":"340282366920938463463374607431768211456","blocks":[]})
        );
    }
}
