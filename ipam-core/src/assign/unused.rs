//! Deleting a pool that a network's configuration once defined and in which nothing is in use.
//!
//! The blocks, affinities and reservations of the pool go in the commit that makes the network's new pool. Guards: the pool,
//! its reservations, and that no block of the family came or changed meanwhile.

use std::collections::BTreeSet;

use ipnet::IpNet;
use kv::Range;

use super::request::AssignRequest;
use super::{bridge, define};
use crate::error::Result;
use crate::model::keys::{self, ResourceKind};
use crate::model::{AssignmentMode, Block, NETWORK_ANNOTATION, Owner, Pool, fitting_block_size};
use crate::net::{Family, overlap};
use crate::surroundings::Surroundings;
use crate::workset::{Found, Workset};

/// Maximum number of stored blocks of the family: one guard covers all of them, and a store checks each.
const MAX_BLOCKS_GUARDED: usize = 64;
/// Number of keys besides blocks and affinities that go with a pool: its own, and two reservations.
const KEYS_OF_POOL: usize = 3;

/// True if a pool was made for this network by an earlier configuration, of the family of `cidr`, and the present
/// configuration does not have it. A pool that an operator has disabled or opened to other networks is the operator's. One
/// on the same addresses counts only if its blocks have the size of the new ones: else a new block would lie where the
/// commit still finds an old one.
pub(super) fn is_left(pool: &Pool, cidr: IpNet, request: &AssignRequest) -> bool {
    pool.resource().annotation(NETWORK_ANNOTATION) == Some(request.attachment.network.as_str())
        && pool.family() == Family::of_net(cidr)
        && pool.is_enabled()
        && (!overlap(pool.cidr(), cidr) || pool.block_size() == fitting_block_size(cidr, None))
        && pool.assignment_mode() == AssignmentMode::Manual
        && !request.define.iter().any(|one| one.cidr == pool.cidr())
}

/// Deletes a pool unless an address of it is in use, in cooldown or kept for a workload. It stays as well if its blocks and
/// affinities are too many for one commit ([`Surroundings::deletable`]). `stored` are the stored blocks of the family; those
/// of a deleted pool are removed from it.
pub(super) async fn delete(
    work: &mut Workset<'_>,
    around: &mut Surroundings,
    pool: &Pool,
    stored: &mut Vec<IpNet>,
) -> Result<()> {
    if stored.len() > MAX_BLOCKS_GUARDED || !around.pools.iter().any(|other| other.name() == pool.name()) {
        return Ok(());
    }
    let known = stored.iter().copied().chain(work.blocks().map(Block::cidr));
    let blocks: BTreeSet<IpNet> = known.filter(|block| overlap(*block, pool.cidr())).collect();
    let mut affinities: BTreeSet<(Owner, IpNet)> = BTreeSet::new();
    for prefix in [keys::host_affinities_prefix(), keys::virtual_affinities_prefix()] {
        let listed = work.tx.snapshot_keys(&Range::Prefix(prefix)).await?;
        let parsed = listed.iter().filter_map(keys::parse_affinity);
        affinities.extend(parsed.filter(|(_, block)| overlap(*block, pool.cidr())));
    }
    work.tx.list(&Range::Prefix(keys::blocks_prefix(Some(pool.family())))).await?;
    for cidr in &blocks {
        match work.find(*cidr).await? {
            Found::There(block) if block.is_empty() && pool.cidr().contains(cidr) => {
                affinities.extend(block.owner().map(|owner| (owner, *cidr)));
            }
            _ => return Ok(()),
        }
    }
    let Some(left) = around.deletable.checked_sub(blocks.len() + affinities.len() + KEYS_OF_POOL) else {
        return Ok(());
    };
    around.deletable = left;
    for (owner, cidr) in affinities {
        work.drop_affinity(&owner, cidr).await?;
    }
    for cidr in &blocks {
        work.change(*cidr, Block::clear_owner).await?;
    }
    for name in [bridge::reservation_name(pool.name()), define::reservation_name(pool.name())] {
        let key = keys::resource(ResourceKind::IpReservation, &name);
        work.tx.get(&key).await?;
        work.tx.delete(&key)?;
        around.remove_reservation(&name);
    }
    let key = keys::resource(ResourceKind::IpPool, pool.name());
    work.tx.get(&key).await?;
    work.tx.delete(&key)?;
    around.pools.retain(|other| other.name() != pool.name());
    stored.retain(|cidr| !blocks.contains(cidr));
    tracing::debug!(pool = pool.name(), cidr = %pool.cidr(), "deleting an unused pool that the network has left");
    Ok(())
}
