//! Creates the pools that a CNI network configuration defines by subnets and ranges, as a configuration of host-local
//! does.
//!
//! The commit of the network's first assignment creates the pool, and reserves the addresses outside the configured
//! ranges. If the ranges in the configuration change later, the next assignment updates the reservation. CNI networks
//! with the same subnet share one pool. The reservation for a shared pool records the ranges of each CNI network, and
//! covers only the addresses outside all these ranges. An assignment for a CNI network uses only addresses in the
//! network's own ranges.
//!
//! An assignment finds the stored pool of a definition by the defined subnet. If the stored pool with the defined name
//! has another subnet, a new pool is created. The new pool replaces the stored pool if the CNI network no longer uses
//! the stored pool and none of the stored pool's addresses is in use. If the stored pool cannot be replaced, the new
//! pool gets a numbered name. The commit that creates the new pool also deletes the replaced pool with its blocks,
//! affinities and reservations. The commit that replaces a pool guards the pool and its reservations, and fails if a
//! block of the family has changed since the pool was found unused.

use std::collections::{BTreeMap, BTreeSet};
use std::iter;
use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Subnets, Ipv6Subnets};
use kv::Range;

use super::bridge;
use super::request::{AssignRequest, PoolDefinition};
use crate::assign_context::AssignContext;
use crate::error::{BridgeError, Result};
use crate::free_range;
use crate::ipam::Ipam;
use crate::model::keys::{self, ResourceKind};
use crate::model::{
    AssignmentMode, Block, Document, IpReservation, NETWORK_ANNOTATION, NewPool, Owner, Pool, check_new_pool,
    fitting_block_size,
};
use crate::net::{Family, bounds, number, overlap};
use crate::pools::start_of;
use crate::write_set::{BlockSlot, WriteSet};

/// The annotation in which a shared pool's reservation records the ranges of each network as JSON, for example
/// `{"lab":["10.0.0.9-10.0.0.20"]}`. If the stored reservation was made for other ranges of a CNI network, the
/// network's next assignment updates this annotation. An empty list of ranges in the annotation means that the network
/// uses the whole subnet.
pub const RANGES_ANNOTATION: &str = "margay.io/ranges";

/// Returns the name of the reservation for those addresses of a pool that lie outside the configured ranges.
pub fn reservation_name(pool: &str) -> String {
    format!("margay-range-{pool}")
}

/// Ensures that the pool of a pool definition and the reservation for the pool exist, and returns the pool's name.
///
/// The commit guards the pool and the reservation, and fails if any pool or reservation has changed since `context` was
/// read.
pub(super) async fn prepare(
    ipam: &Ipam,
    work: &mut WriteSet<'_>,
    context: &mut AssignContext,
    definition: &PoolDefinition,
    request: &AssignRequest,
) -> Result<String> {
    let name = match pool_of(context, definition) {
        Some(pool) => pool.name().to_owned(),
        None => create(ipam, work, context, definition, request).await?,
    };
    if definition.free_of.is_none() {
        reserve_the_rest(ipam, work, context, &name, definition, &request.attachment.network).await?;
    }
    Ok(name)
}

/// Finds the stored pool that a pool definition describes.
pub(super) fn pool_of<'s>(context: &'s AssignContext, definition: &PoolDefinition) -> Option<&'s Pool> {
    let family = Family::of_net(definition.cidr);
    context.pools.iter().find(|pool| match definition.free_of {
        Some(_) => pool.name() == definition.name && pool.family() == family,
        None => pool.cidr() == definition.cidr,
    })
}

async fn create(
    ipam: &Ipam,
    work: &mut WriteSet<'_>,
    context: &mut AssignContext,
    definition: &PoolDefinition,
    request: &AssignRequest,
) -> Result<String> {
    let family = Family::of_net(definition.cidr);
    // Guard every stored pool. If there are too many pools, guard one shared key instead. Concurrent creations of pools
    // then fail and retry.
    ipam.pools_beside(work.tx).await?;
    let stored = work.tx.snapshot_keys(&Range::Prefix(keys::blocks_prefix(Some(family)))).await?;
    let mut stored: Vec<IpNet> = stored.iter().filter_map(keys::parse_block).collect();
    let cidr = match &definition.free_of {
        None => definition.cidr,
        Some(taken) => {
            let pools = context.pools.iter().map(Pool::cidr);
            let taken: Vec<IpNet> = taken.iter().copied().chain(pools).chain(stored.iter().copied()).collect();
            let bits = definition.cidr.prefix_len();
            let random = || (start_of(&ipam.uid()) << 16) ^ start_of(&ipam.uid());
            free_range::choose(bits, &taken, random).ok_or_else(|| {
                BridgeError::BadRanges(format!(
                    "there is no free private network of /{bits} for \"subnet\": \"auto\"; name the subnet"
                ))
            })?
        }
    };
    let name = name_for(work, context, definition, cidr, request, &mut stored).await?;
    if let Some(other) = context.pools.iter().find(|pool| overlap(pool.cidr(), cidr)) {
        let text = format!(
            "subnet {cidr} overlaps with {} of pool {}; choose another subnet, or delete that pool (margay pool delete {}) \
             when none of its addresses is in use",
            other.cidr(),
            other.name(),
            other.name()
        );
        return Err(BridgeError::BadRanges(text).into());
    }
    // The pool's assignment mode is manual, because only networks that name the pool may use its addresses.
    let new = NewPool::new(&name, cidr)
        .with_block_size(fitting_block_size(cidr, None))
        .with_assignment_mode(AssignmentMode::Manual);
    check_new_pool(&new, &context.pools, &stored).map_err(|error| BridgeError::BadRanges(error.to_string()))?;
    let mut pool = Pool::new(&new, &ipam.uid(), ipam.now())?;
    if definition.free_of.is_none() {
        pool.resource_mut().set_annotation(NETWORK_ANNOTATION, &request.attachment.network);
    }
    let key = keys::resource(ResourceKind::IpPool, &name);
    work.tx.get(&key).await?;
    work.tx.put(&key, pool.encode()?)?;
    context.pools.push(pool);
    Ok(name)
}

/// Chooses the name of a new pool: the definition's name, or else the first numbered name that no stored pool has.
/// Deletes an unused stored pool that overlaps with the new pool, or whose name is the definition's name with or
/// without a number. A pool is unused if the CNI network no longer uses the pool and none of the pool's addresses is in
/// use. The blocks of a deleted pool are removed from `stored`.
async fn name_for(
    work: &mut WriteSet<'_>,
    context: &mut AssignContext,
    definition: &PoolDefinition,
    cidr: IpNet,
    request: &AssignRequest,
    stored: &mut Vec<IpNet>,
) -> Result<String> {
    let left: Vec<Pool> = context.pools.iter().filter(|pool| is_left(pool, cidr, request)).cloned().collect();
    for pool in left.iter().filter(|pool| overlap(pool.cidr(), cidr)) {
        delete_unused(work, context, pool, stored).await?;
    }
    let numbered = (2..).map(|number| format!("{}-{number}", definition.name));
    for name in iter::once(definition.name.clone()).chain(numbered) {
        if let Some(pool) = left.iter().find(|pool| pool.name() == name) {
            delete_unused(work, context, pool, stored).await?;
        }
        if context.pools.iter().any(|pool| pool.name() == name) {
            if definition.free_of.is_some() {
                let text = format!("pool {name} of this network is of another family; give the network another name");
                return Err(BridgeError::BadRanges(text).into());
            }
            continue;
        }
        // The store may have a damaged pool document under this candidate name. Damaged pool documents are not in
        // `context.pools`.
        if work.tx.get(&keys::resource(ResourceKind::IpPool, &name)).await?.is_none() {
            return Ok(name);
        }
    }
    Ok(definition.name.clone())
}

/// Creates or updates the reservation for the addresses outside the configured ranges.
async fn reserve_the_rest(
    ipam: &Ipam,
    work: &mut WriteSet<'_>,
    context: &mut AssignContext,
    pool: &str,
    definition: &PoolDefinition,
    network: &str,
) -> Result<()> {
    let name = reservation_name(pool);
    let key = keys::resource(ResourceKind::IpReservation, &name);
    let own = outside_but_ends(definition.cidr, &definition.ranges);
    let stored = work.tx.get(&key).await?;
    let stored = stored.map(|value| IpReservation::decode(&key, value.as_bytes())).transpose()?;
    let texts = |nets: &[IpNet]| nets.iter().map(ToString::to_string).collect::<Vec<_>>();
    let as_stored = stored.as_ref().map(IpReservation::texts).unwrap_or_default();
    let noted = stored.as_ref().map(ranges_of).unwrap_or_default();
    if noted.is_empty() && texts(&own) == as_stored {
        return Ok(());
    }
    let mut ranges = noted.clone();
    ranges.insert(network.to_owned(), definition.ranges.iter().map(|(a, b)| format!("{a}-{b}")).collect());
    let outside_all = outside_but_ends(definition.cidr, &together(&ranges));
    if ranges.len() > 1 {
        context.keep_off(&name, &own);
    }
    if ranges == noted && texts(&outside_all) == as_stored {
        return Ok(());
    }
    let is_new = stored.is_none();
    let mut document = stored.unwrap_or_else(|| IpReservation::new(&name, &[], &ipam.uid(), ipam.now()));
    document.set_networks(&outside_all);
    if !is_new {
        let text = serde_json::to_string(&ranges).unwrap_or_default();
        document.resource_mut().set_annotation(RANGES_ANNOTATION, &text);
    }
    work.tx.put(&key, document.encode()?)?;
    context.set_reservation(document);
    Ok(())
}

/// Returns the ranges that a pool's reservation records for each CNI network. Returns an empty map if the reservation
/// records no ranges or its annotation cannot be parsed.
fn ranges_of(reservation: &IpReservation) -> BTreeMap<String, Vec<String>> {
    let text = reservation.resource().annotation(RANGES_ANNOTATION).unwrap_or_default();
    serde_json::from_str(text).unwrap_or_default()
}

/// Returns the ranges of all CNI networks together, or an empty list if one of the CNI networks uses the whole subnet.
fn together(ranges: &BTreeMap<String, Vec<String>>) -> Vec<(IpAddr, IpAddr)> {
    if ranges.values().any(Vec::is_empty) {
        return Vec::new();
    }
    let range = |text: &String| {
        let (first, last) = text.split_once('-')?;
        Some((first.parse().ok()?, last.parse().ok()?))
    };
    ranges.values().flatten().filter_map(range).collect()
}

/// Returns the parts of a subnet outside the ranges, without the network address and the broadcast address, which
/// another reservation covers (see [`bridge::reserved`]).
fn outside_but_ends(cidr: IpNet, ranges: &[(IpAddr, IpAddr)]) -> Vec<IpNet> {
    let ends = bridge::reserved(cidr, None);
    let mut outside = outside(cidr, ranges);
    outside.retain(|net| !ends.contains(net));
    outside
}

/// Returns the parts of a subnet that lie outside the inclusive ranges, as few CIDRs as possible. Returns no CIDR if
/// `ranges` is empty.
pub(super) fn outside(cidr: IpNet, ranges: &[(IpAddr, IpAddr)]) -> Vec<IpNet> {
    if ranges.is_empty() {
        return Vec::new();
    }
    let mut inside: Vec<(u128, u128)> = ranges.iter().map(|(first, last)| (number(*first), number(*last))).collect();
    inside.sort_unstable();
    let (mut next, end) = bounds(cidr);
    let mut gaps = Vec::new();
    for (first, last) in inside {
        if first > next {
            gaps.push((next, first - 1));
        }
        // The ranges may overlap, since several CNI networks can have ranges in one pool.
        match last.checked_add(1) {
            Some(after) => next = next.max(after),
            None => return networks(cidr, gaps),
        }
    }
    if next <= end {
        gaps.push((next, end));
    }
    networks(cidr, gaps)
}

/// Converts inclusive spans of addresses, given as numbers, to CIDRs.
fn networks(cidr: IpNet, spans: Vec<(u128, u128)>) -> Vec<IpNet> {
    let family = Family::of_net(cidr);
    let span = |(first, last): (u128, u128)| -> Vec<IpNet> {
        match (family.address(first), family.address(last)) {
            (Some(IpAddr::V4(first)), Some(IpAddr::V4(last))) => {
                Ipv4Subnets::new(first, last, 0).map(IpNet::V4).collect()
            }
            (Some(IpAddr::V6(first)), Some(IpAddr::V6(last))) => {
                Ipv6Subnets::new(first, last, 0).map(IpNet::V6).collect()
            }
            _ => Vec::new(),
        }
    };
    spans.into_iter().flat_map(span).collect()
}

/// Maximum number of stored blocks of a family for which unused pools are replaced. If a family has more than 64 stored
/// blocks, its unused pools are kept, because one commit cannot guard all these blocks.
const MAX_BLOCKS_GUARDED: usize = 64;
/// Number of keys that are deleted with each pool, besides its blocks and affinities: the keys of the pool and of its
/// two reservations.
const KEYS_PER_POOL: usize = 3;

/// True if the new pool with the CIDR `cidr` may replace `pool`. An earlier configuration of the CNI network must have
/// created `pool`, and the current configuration must not define it. `pool` must have the address family of `cidr`. A
/// pool that an operator has disabled, or opened to other CNI networks, is not replaced. An overlapping pool must have
/// the block size of the new pool. The blocks of the replaced pool exist until the commit deletes them, and blocks of
/// the new pool must not overlap with old blocks of another size.
fn is_left(pool: &Pool, cidr: IpNet, request: &AssignRequest) -> bool {
    pool.resource().annotation(NETWORK_ANNOTATION) == Some(request.attachment.network.as_str())
        && pool.family() == Family::of_net(cidr)
        && pool.is_enabled()
        && (!overlap(pool.cidr(), cidr) || pool.block_size() == fitting_block_size(cidr, None))
        && pool.assignment_mode() == AssignmentMode::Manual
        && !request.define.iter().any(|one| one.cidr == pool.cidr())
}

/// Deletes a pool, unless one of its addresses is in use, in cooldown or kept for a workload. An unused pool is kept if
/// one commit cannot delete all its blocks and affinities ([`AssignContext::deletable`]). `stored` lists the stored
/// blocks of the family; the function removes the blocks of the deleted pool from `stored`.
async fn delete_unused(
    work: &mut WriteSet<'_>,
    context: &mut AssignContext,
    pool: &Pool,
    stored: &mut Vec<IpNet>,
) -> Result<()> {
    if stored.len() > MAX_BLOCKS_GUARDED || !context.pools.iter().any(|other| other.name() == pool.name()) {
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
            BlockSlot::There(block) if block.is_empty() && pool.cidr().contains(cidr) => {
                affinities.extend(block.owner().map(|owner| (owner, *cidr)));
            }
            _ => return Ok(()),
        }
    }
    let Some(left) = context.deletable.checked_sub(blocks.len() + affinities.len() + KEYS_PER_POOL) else {
        return Ok(());
    };
    context.deletable = left;
    for (owner, cidr) in affinities {
        work.drop_affinity(&owner, cidr).await?;
    }
    for cidr in &blocks {
        work.change(*cidr, Block::clear_owner).await?;
    }
    for name in [bridge::reservation_name(pool.name()), reservation_name(pool.name())] {
        let key = keys::resource(ResourceKind::IpReservation, &name);
        work.tx.get(&key).await?;
        work.tx.delete(&key)?;
        context.remove_reservation(&name);
    }
    let key = keys::resource(ResourceKind::IpPool, pool.name());
    work.tx.get(&key).await?;
    work.tx.delete(&key)?;
    context.pools.retain(|other| other.name() != pool.name());
    stored.retain(|cidr| !blocks.contains(cidr));
    tracing::debug!(
        pool = pool.name(),
        cidr = %pool.cidr(),
        "deleting an unused pool that the network configuration no longer defines"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gaps(cidr: &str, ranges: &[(&str, &str)]) -> Vec<String> {
        let ranges: Vec<_> = ranges.iter().map(|(a, b)| (a.parse().unwrap(), b.parse().unwrap())).collect();
        outside(cidr.parse().unwrap(), &ranges).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn define_covers_outside_exactly() {
        assert_eq!(gaps("10.0.0.0/24", &[]), Vec::<String>::new());
        assert_eq!(gaps("10.0.0.0/24", &[("10.0.0.0", "10.0.0.255")]), Vec::<String>::new());
        assert_eq!(gaps("10.0.0.0/24", &[("10.0.0.128", "10.0.0.255")]), ["10.0.0.0/25"]);
        assert_eq!(
            gaps("10.0.0.0/28", &[("10.0.0.10", "10.0.0.12"), ("10.0.0.2", "10.0.0.4")]),
            ["10.0.0.0/31", "10.0.0.5/32", "10.0.0.6/31", "10.0.0.8/31", "10.0.0.13/32", "10.0.0.14/31"]
        );
        assert_eq!(gaps("::/126", &[("::1", "::2")]), ["::/128", "::3/128"]);
        let last = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff";
        assert_eq!(gaps("ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffe/127", &[(last, last)]).len(), 1);
    }
}
