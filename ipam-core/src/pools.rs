//! Which pools an address may come from, and in which order their blocks are tried.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::model::{AssignmentMode, HostReserved, Labels, Pool, PoolUse};
use crate::net::{Count, Family, number};
use crate::reservations::Reservations;
use crate::selector::SelectorError;

/// Why no pool can be used. The texts are Calico's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// A requested pool is neither a network nor the name of a pool.
    #[error("error parsing pool {0:?}: invalid CIDR address: {0}")]
    UnknownName(String),
    /// A requested pool is of the other family.
    #[error("\"{0}\" isn't a {1} address")]
    WrongFamily(IpAddr, Family),
    /// No enabled pool has exactly this network.
    #[error("the given pool ({0}) does not exist, or is not enabled")]
    NotGiven(IpNet),
    /// No pool of the family is enabled, or none has large enough blocks.
    #[error("cannot find a qualified ippool")]
    NoneQualified,
    /// No pool is for this node and namespace.
    #[error("no configured Calico pools for node {0}")]
    NoneForNode(String),
    /// None of the pools may be used for this.
    #[error("cannot find a qualified ippool, no pools match the required use ({0})")]
    NoneForUse(PoolUse),
    /// A selector of this pool cannot be read.
    #[error("pool {0}: {1}")]
    BadSelector(String, #[source] SelectorError),
    /// The wanted address is in no enabled pool.
    #[error("The provided IP address is not in a configured pool\n")]
    AddressOutside,
    /// The wanted address is in a pool that may not be used for this.
    #[error(
        "IP address {ip} is in IP pool {pool:?}, which is not allowed for use \"{wanted}\" (allowedUses: [{}])",
        .allowed.join(" ")
    )]
    AddressNotForUse {
        /// The address.
        ip: IpAddr,
        /// The name of its pool.
        pool: String,
        /// The wanted use.
        wanted: PoolUse,
        /// The permitted uses of the pool.
        allowed: Vec<String>,
    },
}

/// The network of a pool that a request names, by its network or by its name. [`select_pools`] checks whether there is
/// such a pool, and whether it is enabled.
///
/// # Errors
/// [`PoolError::UnknownName`] and [`PoolError::WrongFamily`].
pub fn parse_requested(text: &str, pools: &[Pool], family: Family) -> Result<IpNet, PoolError> {
    let by_name = || pools.iter().find(|pool| pool.name() == text).map(Pool::cidr);
    let net = text.parse().ok().or_else(by_name).ok_or_else(|| PoolError::UnknownName(text.to_owned()))?.trunc();
    if Family::of_net(net) == family { Ok(net) } else { Err(PoolError::WrongFamily(net.network(), family)) }
}

/// The facts by which pools are chosen.
#[derive(Clone, Debug)]
pub struct PoolQuery<'a> {
    /// The family of the wanted addresses.
    pub family: Family,
    /// The networks of the requested pools, in order; none to choose by selectors.
    pub requested: &'a [IpNet],
    /// The node that requests addresses.
    pub node: &'a str,
    /// Its labels.
    pub node_labels: &'a Labels,
    /// The labels of the container's namespace.
    pub namespace_labels: &'a Labels,
    /// The use of the wanted addresses.
    pub wanted: PoolUse,
    /// The addresses that the node keeps for itself in each block.
    pub host_reserved: Option<&'a HostReserved>,
}

/// The pools to take addresses from, in the order in which to try them.
///
/// `all` are all pools in the order of their names. Requested pools are taken in the order of the request, whatever
/// their selectors and assignment mode are; else all that are automatic and select both node and namespace. In either
/// case only enabled pools count, whose blocks hold more than the host keeps for itself, and that permit the wanted
/// use.
///
/// # Errors
/// [`PoolError`] if no pool is left, or a requested one is not there.
pub fn select_pools<'a>(all: &'a [Pool], query: &PoolQuery<'_>) -> Result<Vec<&'a Pool>, PoolError> {
    let mut usable = Vec::new();
    for pool in all {
        let obstacle = obstacle(pool, query)?;
        if !matches!(obstacle, Some(Obstacle::OtherFamily | Obstacle::NotEnabled | Obstacle::BlocksTooSmall)) {
            usable.push((pool, obstacle));
        }
    }
    if usable.is_empty() {
        return Err(PoolError::NoneQualified);
    }
    let mut chosen = requested(usable, query)?;
    chosen.retain(|(_, obstacle)| matches!(obstacle, None | Some(Obstacle::Use)));
    if chosen.is_empty() {
        return Err(PoolError::NoneForNode(query.node.to_owned()));
    }
    chosen.retain(|(_, obstacle)| obstacle.is_none());
    if chosen.is_empty() {
        return Err(PoolError::NoneForUse(query.wanted));
    }
    Ok(chosen.into_iter().map(|(pool, _)| pool).collect())
}

/// Why no address is taken from a pool; the first of these that holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// It is of the other family.
    OtherFamily,
    /// It is switched off, or being deleted, or marked as not allocatable.
    NotEnabled,
    /// Its blocks do not fit into it, or hold no more than the host keeps of each for itself.
    BlocksTooSmall,
    /// Other pools are requested by name.
    NotRequested,
    /// It is only for requests that name it.
    Manual,
    /// It is not for this node.
    Node,
    /// It is not for this namespace.
    Namespace,
    /// It does not permit the wanted use.
    Use,
}

/// Why [`select_pools`] does not choose a pool; `None` if it does.
///
/// # Errors
/// [`PoolError::BadSelector`] if a selector of the pool has to be read and cannot be.
pub fn obstacle(pool: &Pool, query: &PoolQuery<'_>) -> Result<Option<Obstacle>, PoolError> {
    let found = if pool.family() != query.family {
        Some(Obstacle::OtherFamily)
    } else if !pool.is_enabled() {
        Some(Obstacle::NotEnabled)
    } else if !has_room(pool, query) {
        Some(Obstacle::BlocksTooSmall)
    } else if query.requested.is_empty() {
        selection(pool, query)?
    } else {
        (!query.requested.contains(&pool.cidr())).then_some(Obstacle::NotRequested)
    };
    Ok(found.or_else(|| (!pool.allows(query.wanted)).then_some(Obstacle::Use)))
}

/// True if [`select_pools`] needs the labels of the namespace to choose pools. A pool whose node selector cannot be
/// read does not count.
pub fn asks_for_namespace(all: &[Pool], query: &PoolQuery<'_>) -> bool {
    let may_choose = |pool: &Pool| {
        has_room(pool, query)
            && pool.assignment_mode() == AssignmentMode::Automatic
            && pool.allows(query.wanted)
            && pool.selects_node(query.node_labels) == Ok(true)
    };
    query.requested.is_empty()
        && enabled_pools(all, query.family).any(|pool| !pool.namespace_selector().is_empty() && may_choose(pool))
}

/// The enabled pools of a family.
pub fn enabled_pools(all: &[Pool], family: Family) -> impl Iterator<Item = &Pool> {
    all.iter().filter(move |pool| pool.family() == family && pool.is_enabled())
}

/// True if the pool's blocks fit into it and hold more than the host keeps of each for itself.
fn has_room(pool: &Pool, query: &PoolQuery<'_>) -> bool {
    let kept = query.host_reserved.map_or(0, |kept| kept.start.saturating_add(kept.end));
    block_addresses(pool).is_some_and(|addresses| addresses > Count::from(kept))
}

/// How many addresses, or prefixes, a block of the pool has. `None` if the pool cannot be cut into such blocks.
fn block_addresses(pool: &Pool) -> Option<Count> {
    let first = pool.family().network(pool.cidr().network(), pool.block_size())?;
    (pool.block_size() >= pool.cidr().prefix_len()).then(|| Count::of_parts(first, pool.length()))
}

/// A pool, and what stands in its way.
type Judged<'a> = (&'a Pool, Option<Obstacle>);

/// The requested pools, in the order of the request; all where none is requested.
fn requested<'a>(usable: Vec<Judged<'a>>, query: &PoolQuery<'_>) -> Result<Vec<Judged<'a>>, PoolError> {
    if query.requested.is_empty() {
        return Ok(usable);
    }
    let mut chosen: Vec<Judged<'a>> = Vec::new();
    for net in query.requested {
        let found = usable.iter().find(|(pool, _)| pool.cidr() == *net).ok_or(PoolError::NotGiven(*net))?;
        if !chosen.iter().any(|(other, _)| other.cidr() == *net) {
            chosen.push(*found);
        }
    }
    Ok(chosen)
}

/// Why a pool is not chosen where none is requested by name.
fn selection(pool: &Pool, query: &PoolQuery<'_>) -> Result<Option<Obstacle>, PoolError> {
    if pool.assignment_mode() != AssignmentMode::Automatic {
        return Ok(Some(Obstacle::Manual));
    }
    let bad = |error| PoolError::BadSelector(pool.name().to_owned(), error);
    if !pool.selects_node(query.node_labels).map_err(bad)? {
        return Ok(Some(Obstacle::Node));
    }
    Ok((!pool.selects_namespace(query.namespace_labels).map_err(bad)?).then_some(Obstacle::Namespace))
}

/// The enabled pool that a wanted address is in.
///
/// # Errors
/// [`PoolError::AddressOutside`] and [`PoolError::AddressNotForUse`].
pub fn pool_of(all: &[Pool], ip: IpAddr, wanted: PoolUse) -> Result<&Pool, PoolError> {
    let mut enabled = enabled_pools(all, Family::of(ip));
    let pool = enabled.find(|pool| pool.cidr().contains(&ip)).ok_or(PoolError::AddressOutside)?;
    if pool.allows(wanted) {
        return Ok(pool);
    }
    let allowed = pool.allowed_uses().into_iter().map(str::to_owned).collect();
    Err(PoolError::AddressNotForUse { ip, pool: pool.name().to_owned(), wanted, allowed })
}

/// The block of a pool that an address lies in. `None` if the address is not of the pool, or the pool cannot be cut into
/// such blocks.
pub fn block_of(pool: &Pool, ip: IpAddr) -> Option<IpNet> {
    block_addresses(pool)?;
    pool.cidr().contains(&ip).then(|| pool.family().network(ip, pool.block_size()))?
}

/// Where a host starts in the blocks of each pool: the 32-bit FNV-1 hash of its name, so that hosts begin at different
/// blocks and rarely want the same one.
pub fn start_of(host: &str) -> u64 {
    let hash = host.bytes().fold(0x811c_9dc5_u32, |hash, byte| hash.wrapping_mul(0x0100_0193) ^ u32::from(byte));
    hash.into()
}

/// All blocks of a pool, each once: from the one at `start`, modulo their number, to the last, then from the first on.
///
/// `start` is [`start_of`] the host, so that a host tends to the same blocks; a random number suits pools whose blocks
/// are single addresses better, since such a block is never shared.
pub fn blocks_from(pool: &Pool, start: u64) -> Blocks {
    let count = block_addresses(pool).map_or(0, |_| {
        let bits = u32::from(pool.block_size() - pool.cidr().prefix_len());
        // Only ::/0 in blocks of one address has more than fits; its very last block is left out, which does no harm.
        1_u128.checked_shl(bits).unwrap_or(u128::MAX)
    });
    let index = u128::from(start).checked_rem(count).unwrap_or(0);
    Blocks { pool: pool.cidr(), block_size: pool.block_size(), count, index, left: count }
}

/// The blocks of a pool, from [`blocks_from`].
#[derive(Clone, Debug)]
pub struct Blocks {
    pool: IpNet,
    block_size: u8,
    count: u128,
    index: u128,
    left: u128,
}

impl Blocks {
    /// The next block of which at least one address is not reserved. However much is reserved, it is passed over in one
    /// step: a configured range may be a few addresses of an IPv6 network with more blocks than can be scanned.
    pub fn next_unreserved(&mut self, reservations: &Reservations) -> Option<IpNet> {
        loop {
            let current = self.index;
            let block = self.next()?;
            match reservations.end_of_cover(block) {
                None => return Some(block),
                Some(last) => self.pass_over(current, last),
            }
        }
    }

    /// Leaves out the blocks after the one with index `current`, which was the last to come, that end at the address with
    /// the number `last` or before it.
    fn pass_over(&mut self, current: u128, last: u128) {
        let bits = u32::from(Family::of_net(self.pool).bits().saturating_sub(self.block_size));
        let after = last.saturating_sub(number(self.pool.network())).checked_add(1);
        let end = after.map_or(self.count, |after| after.checked_shr(bits).unwrap_or(0).min(self.count));
        let skipped = end.saturating_sub(current.saturating_add(1)).min(self.left);
        self.left -= skipped;
        if skipped > 0 {
            self.index = if end == self.count { 0 } else { end };
        }
    }
}

impl Iterator for Blocks {
    type Item = IpNet;

    fn next(&mut self) -> Option<IpNet> {
        self.left = self.left.checked_sub(1)?;
        let family = Family::of_net(self.pool);
        // A block is at most as large as the pool, and all before it are inside the pool: nothing overflows.
        let distance = self.index.checked_shl(u32::from(family.bits().saturating_sub(self.block_size))).unwrap_or(0);
        self.index = if self.index + 1 == self.count { 0 } else { self.index + 1 };
        let first = number(self.pool.network()).checked_add(distance)?;
        family.network(family.address(first)?, self.block_size)
    }
}

#[cfg(test)]
mod tests;
