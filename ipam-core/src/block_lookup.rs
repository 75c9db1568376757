//! Finds the stored block that contains an address. Usually the block's CIDR can be computed from the address's pool
//! and the pool's block size. If the pool was deleted, or its block size was changed after the block was created, a
//! stored block of another size can contain the address.

use std::collections::BTreeMap;

use ipnet::IpNet;
use kv::{Key, Range, Transaction};

use crate::error::Result;
use crate::hints::possible_blocks;
use crate::model::{AddressState, Block, Document, Pool, ReleaseRequest, is_of_prefixes, keys};
use crate::net::Family;
use crate::pools;

/// Maximum number of block keys read in one round trip.
const KEYS_PER_READ: usize = 64;

/// Groups release requests by the stored block that contains their address. The keys of the returned map are the CIDRs
/// of the blocks. In the returned map, an address without a stored block is listed under the CIDR that its block would
/// have in the address's pool. In the returned map, an address without a block and without a pool is listed under its
/// own /32 or /128. The lookup reads the blocks without a guard, so another writer may change them before the commit.
pub async fn group_by_block(
    tx: &mut Transaction,
    pools: &[Pool],
    requests: &[ReleaseRequest],
) -> Result<BTreeMap<IpNet, Vec<ReleaseRequest>>> {
    let mut stored = StoredBlocks::default();
    let usual = |request: &ReleaseRequest| pools.iter().find_map(|pool| pools::block_of(pool, request.address));
    stored.read(tx, requests.iter().filter_map(usual)).await?;
    let has_it =
        |stored: &StoredBlocks, cidr: &IpNet, request: &ReleaseRequest| stored.standing(*cidr, request) == Some(true);
    let elsewhere = requests.iter().filter(|one| !usual(one).is_some_and(|cidr| has_it(&stored, &cidr, one)));
    let possible: Vec<IpNet> = elsewhere.flat_map(|request| possible_blocks(request.address)).collect();
    stored.read(tx, possible).await?;
    let is_found = |request: &ReleaseRequest| {
        let mut all = usual(request).into_iter().chain(possible_blocks(request.address));
        all.any(|cidr| has_it(&stored, &cidr, request)) || usual(request).is_some_and(is_of_prefixes)
    };
    let not_found: Vec<&ReleaseRequest> = requests.iter().filter(|request| !is_found(request)).collect();
    let prefixes = blocks_of_prefixes(tx, &not_found).await?;
    stored.read(tx, prefixes.iter().copied()).await?;
    let mut grouped: BTreeMap<IpNet, Vec<ReleaseRequest>> = BTreeMap::new();
    for request in requests {
        let around = prefixes.iter().copied().filter(|cidr| cidr.contains(&request.address));
        let all = || usual(request).into_iter().chain(possible_blocks(request.address)).chain(around.clone());
        let found = all().find(|cidr| has_it(&stored, cidr, request));
        let found = found.or_else(|| all().find(|cidr| stored.standing(*cidr, request).is_some()));
        let cidr = found.or_else(|| usual(request)).unwrap_or_else(|| request.address.into());
        grouped.entry(cidr).or_default().push(request.clone());
    }
    Ok(grouped)
}

/// Returns the stored blocks of prefixes that contain requested addresses. Blocks are found even if their pool was
/// deleted or is no longer a pool of prefixes.
async fn blocks_of_prefixes(tx: &mut Transaction, requests: &[&ReleaseRequest]) -> Result<Vec<IpNet>> {
    let mut found = Vec::new();
    for family in [Family::V4, Family::V6] {
        let addresses = || requests.iter().map(|request| request.address).filter(|ip| Family::of(*ip) == family);
        if addresses().next().is_some() {
            let stored = tx.snapshot_keys(&Range::Prefix(keys::blocks_of_prefixes_prefix(family))).await?;
            let stored = stored.iter().filter_map(keys::parse_block);
            found.extend(stored.filter(|cidr| addresses().any(|ip| cidr.contains(&ip))));
        }
    }
    Ok(found)
}

/// The stored blocks that were read so far, by CIDR. The map's value for a CIDR is `None` if no block is stored, and
/// `Some(None)` if the stored block cannot be decoded.
#[derive(Default)]
struct StoredBlocks(BTreeMap<IpNet, Option<Option<Block>>>);

impl StoredBlocks {
    async fn read(&mut self, tx: &mut Transaction, blocks: impl IntoIterator<Item = IpNet>) -> Result<()> {
        let mut unread: Vec<IpNet> = blocks.into_iter().filter(|cidr| !self.0.contains_key(cidr)).collect();
        unread.sort_unstable();
        unread.dedup();
        for some in unread.chunks(KEYS_PER_READ) {
            let names: Vec<Key> = some.iter().map(|cidr| keys::block(*cidr)).collect();
            tx.prefetch(names.clone(), Vec::new()).await?;
            for (cidr, key) in some.iter().zip(names) {
                let value = tx.snapshot_get(&key).await?;
                self.0.insert(*cidr, value.map(|value| Block::decode(&key, value.as_bytes()).ok()));
            }
        }
        Ok(())
    }

    /// Returns true if the address of a request is held or in cooldown in a block, false if it is free, and `None` if
    /// the block is not stored. In a damaged block, every address counts as held, so release requests are grouped under
    /// the damaged block and its damage is reported.
    fn standing(&self, cidr: IpNet, request: &ReleaseRequest) -> Option<bool> {
        let block = self.0.get(&cidr)?.as_ref()?;
        Some(block.as_ref().is_none_or(|block| {
            matches!(block.lookup(request.address), AddressState::Assigned(_) | AddressState::CoolingDown(_))
        }))
    }
}
