//! Selects the pools for an assignment, and decides in which order an assignment tries the blocks of a pool.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::model::{AssignmentMode, HostReserved, Labels, Pool, PoolUse};
use crate::net::{Count, Family, number};
use crate::reservations::Reservations;
use crate::selector::SelectorError;

/// The reason why no pool can be used for a request. The messages of [`PoolError`] equal Calico's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The text by which a request names a pool is neither a CIDR nor a pool's name.
    #[error("error parsing pool {0:?}: invalid CIDR address: {0}")]
    UnknownName(String),
    /// The family of a requested pool is not that of the requested addresses.
    #[error("\"{0}\" isn't a {1} address")]
    WrongFamily(IpAddr, Family),
    /// A requested pool is not enabled, or no pool has exactly the requested CIDR.
    #[error("the given pool ({0}) does not exist, or is not enabled")]
    NotGiven(IpNet),
    /// No pool of the family is enabled, or the blocks of all enabled pools are too small.
    #[error("cannot find a qualified ippool")]
    NoneQualified,
    /// No pool can be used for the requesting node and namespace, because of the pools' selectors.
    #[error("no configured Calico pools for node {0}")]
    NoneForNode(String),
    /// No pool allows the use, such as `Tunnel`, for which the addresses are requested.
    #[error("cannot find a qualified ippool, no pools match the required use ({0})")]
    NoneForUse(PoolUse),
    /// A selector of the pool with this name cannot be parsed.
    #[error("pool {0}: {1}")]
    BadSelector(String, #[source] SelectorError),
    /// A specifically requested address lies in no enabled pool.
    #[error("The provided IP address is not in a configured pool\n")]
    AddressOutside,
    /// A specifically requested address lies in a pool that does not allow the use for which the address is requested.
    #[error(
        "IP address {ip} is in IP pool {pool:?}, which is not allowed for use \"{wanted}\" (allowedUses: [{}])",
        .allowed.join(" ")
    )]
    AddressNotForUse {
        /// The requested address.
        ip: IpAddr,
        /// The name of the pool that contains the requested address.
        pool: String,
        /// The use for which the address is requested.
        wanted: PoolUse,
        /// The uses, such as `Workload`, that the pool allows.
        allowed: Vec<String>,
    },
}

/// Returns the CIDR of a pool that a request names by CIDR or by name. If `text` is a CIDR, [`select_pools`] checks
/// later whether an enabled pool has this CIDR.
///
/// # Errors
/// [`PoolError::UnknownName`] if no pool has the name `text`. [`PoolError::WrongFamily`] if the CIDR's family differs
/// from the requested family.
pub fn parse_requested(text: &str, pools: &[Pool], family: Family) -> Result<IpNet, PoolError> {
    let by_name = || pools.iter().find(|pool| pool.name() == text).map(Pool::cidr);
    let net = text.parse().ok().or_else(by_name).ok_or_else(|| PoolError::UnknownName(text.to_owned()))?.trunc();
    if Family::of_net(net) == family { Ok(net) } else { Err(PoolError::WrongFamily(net.network(), family)) }
}

/// The properties of a request that decide which pools are selected.
#[derive(Clone, Debug)]
pub struct PoolQuery<'a> {
    /// The family of the requested addresses.
    pub family: Family,
    /// The CIDRs of the requested pools, in the order of the request. If no pools are requested, pools are chosen by
    /// their selectors.
    pub requested: &'a [IpNet],
    /// The name of the node for which addresses are requested.
    pub node: &'a str,
    /// The node's labels.
    pub node_labels: &'a Labels,
    /// The labels of the container's namespace.
    pub namespace_labels: &'a Labels,
    /// The use for which the addresses are requested.
    pub wanted: PoolUse,
    /// The addresses that are reserved for the node itself in each block.
    pub host_reserved: Option<&'a HostReserved>,
}

/// Selects the pools from which addresses may be assigned, in the order in which they are tried.
///
/// `all` contains all pools, ordered by name. If pools are requested, the function selects them in the order of the
/// request, regardless of their selectors and assignment modes. If no pools are requested, the function selects the
/// pools with automatic assignment whose selectors match both the node and the namespace. A selected pool is always
/// enabled, allows the requested use, and has blocks with more addresses than are reserved for the node.
///
/// # Errors
/// [`PoolError`] if no pool can be used, or if a requested pool does not exist.
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

/// The first reason why no address is assigned from a pool. The variants are in the order in which [`select_pools`]
/// checks the reasons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// The pool's family is not that of the requested addresses.
    OtherFamily,
    /// The pool is disabled, is being deleted, or is marked as not allocatable.
    NotEnabled,
    /// The pool is smaller than one of its blocks, or all addresses of a block would be reserved for the node.
    BlocksTooSmall,
    /// The request names other pools, but not this pool.
    NotRequested,
    /// The pool's assignment mode is manual, and the request does not name the pool.
    Manual,
    /// The pool's node selector does not match the requesting node.
    Node,
    /// The pool's namespace selector does not match the container's namespace.
    Namespace,
    /// The pool does not allow the use for which addresses are requested.
    Use,
}

/// Returns the reason why [`select_pools`] does not select a pool, or `None` if the pool is selected.
///
/// # Errors
/// [`PoolError::BadSelector`] if the decision depends on a selector of the pool that cannot be parsed.
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

/// True if [`select_pools`] needs the labels of the container's namespace, because a pool that could be used has a
/// namespace selector. Pools whose node selector cannot be parsed are ignored.
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

/// Returns the enabled pools of a family.
pub fn enabled_pools(all: &[Pool], family: Family) -> impl Iterator<Item = &Pool> {
    all.iter().filter(move |pool| pool.family() == family && pool.is_enabled())
}

/// True if the pool is not smaller than one of its blocks, and each block has more addresses than are reserved for the
/// node.
fn has_room(pool: &Pool, query: &PoolQuery<'_>) -> bool {
    let kept = query.host_reserved.map_or(0, |kept| kept.start.saturating_add(kept.end));
    block_addresses(pool).is_some_and(|addresses| addresses > Count::from(kept))
}

/// Returns the number of addresses or prefixes in each block of the pool; `None` if the pool cannot be divided into
/// blocks of its block size.
fn block_addresses(pool: &Pool) -> Option<Count> {
    let first = pool.family().network(pool.cidr().network(), pool.block_size())?;
    (pool.block_size() >= pool.cidr().prefix_len()).then(|| Count::of_parts(first, pool.length()))
}

type JudgedPool<'a> = (&'a Pool, Option<Obstacle>);

/// Returns the usable pools that the request names, in the order of the request. Returns all usable pools if the
/// request names no pool.
fn requested<'a>(usable: Vec<JudgedPool<'a>>, query: &PoolQuery<'_>) -> Result<Vec<JudgedPool<'a>>, PoolError> {
    if query.requested.is_empty() {
        return Ok(usable);
    }
    let mut chosen: Vec<JudgedPool<'a>> = Vec::new();
    for net in query.requested {
        let found = usable.iter().find(|(pool, _)| pool.cidr() == *net).ok_or(PoolError::NotGiven(*net))?;
        if !chosen.iter().any(|(other, _)| other.cidr() == *net) {
            chosen.push(*found);
        }
    }
    Ok(chosen)
}

/// Returns the reason why a pool is not selected for a request that names no pool; `None` if the pool is selected.
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

/// Returns the enabled pool that contains a specifically requested address.
///
/// # Errors
/// [`PoolError::AddressOutside`] if no enabled pool contains the address. [`PoolError::AddressNotForUse`] if the pool
/// does not allow the use `wanted`.
pub fn pool_of(all: &[Pool], ip: IpAddr, wanted: PoolUse) -> Result<&Pool, PoolError> {
    let mut enabled = enabled_pools(all, Family::of(ip));
    let pool = enabled.find(|pool| pool.cidr().contains(&ip)).ok_or(PoolError::AddressOutside)?;
    if pool.allows(wanted) {
        return Ok(pool);
    }
    let allowed = pool.allowed_uses().into_iter().map(str::to_owned).collect();
    Err(PoolError::AddressNotForUse { ip, pool: pool.name().to_owned(), wanted, allowed })
}

/// Returns the possible block of a pool that contains an address. Returns `None` if the address is outside the pool, or
/// if the pool cannot be divided into blocks of its block size.
pub fn block_of(pool: &Pool, ip: IpAddr) -> Option<IpNet> {
    block_addresses(pool)?;
    pool.cidr().contains(&ip).then(|| pool.family().network(ip, pool.block_size()))?
}

/// Returns the index of the block at which a host starts its search in each pool. A host's start index is the 32-bit
/// FNV-1 hash of the host's name; [`blocks_from`] takes it modulo the number of blocks. Different hosts usually start
/// at different blocks, so they rarely try to claim the same block.
pub fn start_of(host: &str) -> u64 {
    let hash = host.bytes().fold(0x811c_9dc5_u32, |hash, byte| hash.wrapping_mul(0x0100_0193) ^ u32::from(byte));
    hash.into()
}

/// Returns all possible blocks of a pool, each once. The first returned block has the index `start` (modulo the number
/// of blocks), and the pool's first block follows the pool's last block.
///
/// If `start` is `start_of(host)`, the host always tries the same blocks first. For a pool of one-address blocks, pass
/// a random `start`. With a fixed `start`, every search first visits the blocks that the host already owns.
pub fn blocks_from(pool: &Pool, start: u64) -> PoolBlocks {
    let count = block_addresses(pool).map_or(0, |_| {
        let bits = u32::from(pool.block_size() - pool.cidr().prefix_len());
        // Only the pool ::/0 with blocks of one address has 2^128 blocks, one more than fits into `u128`, so the last
        // block of this pool is never used.
        1_u128.checked_shl(bits).unwrap_or(u128::MAX)
    });
    let index = u128::from(start).checked_rem(count).unwrap_or(0);
    PoolBlocks { pool: pool.cidr(), block_size: pool.block_size(), count, index, left: count }
}

/// An iterator over the possible blocks of a pool; see [`blocks_from`].
#[derive(Clone, Debug)]
pub struct PoolBlocks {
    pool: IpNet,
    block_size: u8,
    count: u128,
    index: u128,
    left: u128,
}

impl PoolBlocks {
    /// Returns the next block with at least one unreserved address. Skips a run of fully reserved blocks in one step,
    /// because an IPv6 pool can have too many reserved blocks to visit each of them.
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

    /// Skips all blocks after block number `current` that end at or before the address `last` (as an integer).
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

impl Iterator for PoolBlocks {
    type Item = IpNet;

    fn next(&mut self) -> Option<IpNet> {
        self.left = self.left.checked_sub(1)?;
        let family = Family::of_net(self.pool);
        // `checked_shl` checks only the shift width. No bits are lost, because the shifted value is an offset inside
        // the pool.
        let distance = self.index.checked_shl(u32::from(family.bits().saturating_sub(self.block_size))).unwrap_or(0);
        self.index = if self.index + 1 == self.count { 0 } else { self.index + 1 };
        let first = number(self.pool.network()).checked_add(distance)?;
        family.network(family.address(first)?, self.block_size)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use time::macros::datetime;

    use super::*;
    use crate::model::NewPool;

    fn make(new: NewPool) -> Pool {
        Pool::new(&new, "u", datetime!(2026-01-01 0:00 UTC)).unwrap()
    }

    fn new(name: &str, cidr: &str) -> NewPool {
        NewPool::new(name, net(cidr))
    }

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    fn pools() -> Vec<Pool> {
        let mut off = make(new("off", "10.9.0.0/16"));
        off.disable();
        vec![
            make(new("a", "10.1.0.0/16").with_node_selector("zone == 'a'")),
            make(new("hand", "10.2.0.0/16").with_assignment_mode(AssignmentMode::Manual)),
            make(new("main", "10.3.0.0/16")),
            off,
            make(new("six", "fd80::/64")),
            make(new("team", "10.4.0.0/16").with_namespace_selector("team == 'x'")),
            make(new("tunnels", "10.5.0.0/16").with_allowed_uses([PoolUse::Tunnel])),
        ]
    }

    fn names<'a>(
        pools: &'a [Pool],
        requested: &[&str],
        node: &[(&str, &str)],
        change: impl FnOnce(&mut PoolQuery<'_>),
    ) -> Result<Vec<&'a str>, String> {
        let labels = |pairs: &[(&str, &str)]| pairs.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect::<Labels>();
        let (node_labels, namespace_labels) = (labels(node), Labels::new());
        let requested: Vec<IpNet> = requested.iter().map(|text| net(text)).collect();
        let mut query = PoolQuery {
            family: Family::V4,
            requested: &requested,
            node: "node1",
            node_labels: &node_labels,
            namespace_labels: &namespace_labels,
            wanted: PoolUse::Workload,
            host_reserved: None,
        };
        change(&mut query);
        let chosen = select_pools(pools, &query).map_err(|error| error.to_string())?;
        Ok(chosen.into_iter().map(Pool::name).collect())
    }

    #[test]
    fn pools_are_chosen_by_selectors() {
        let pools = pools();
        let team = Labels::from([("team".into(), "x".into())]);
        assert_eq!(names(&pools, &[], &[], |_| ()), Ok(vec!["main"]));
        assert_eq!(names(&pools, &[], &[("zone", "a")], |_| ()), Ok(vec!["a", "main"]));
        assert_eq!(names(&pools, &[], &[], |query| query.family = Family::V6), Ok(vec!["six"]));
        assert_eq!(names(&pools, &[], &[], |query| query.wanted = PoolUse::Tunnel), Ok(vec!["main", "tunnels"]));
        let (zone, requested) = (Labels::new(), []);
        let query = PoolQuery {
            family: Family::V4,
            requested: &requested,
            node: "n",
            node_labels: &zone,
            namespace_labels: &team,
            wanted: PoolUse::Workload,
            host_reserved: None,
        };
        assert_eq!(select_pools(&pools, &query).unwrap().len(), 2);
    }

    #[test]
    fn pools_requested_ignore_selectors_and_modes() {
        let pools = pools();
        let requested = ["10.2.0.0/16", "10.1.0.0/16", "10.2.0.0/16"];
        assert_eq!(names(&pools, &requested, &[], |_| ()), Ok(vec!["hand", "a"]));
        let error = |requested: &[&str]| names(&pools, requested, &[], |_| ()).unwrap_err();
        assert_eq!(error(&["10.9.0.0/16"]), "the given pool (10.9.0.0/16) does not exist, or is not enabled");
        assert_eq!(error(&["10.3.0.0/24"]), "the given pool (10.3.0.0/24) does not exist, or is not enabled");
        // As in Calico, if no pool is enabled at all, the error says that no pool is enabled, and does not name the
        // requested pool.
        let only_off = &pools[3..4];
        assert_eq!(names(only_off, &["10.9.0.0/16"], &[], |_| ()).unwrap_err(), "cannot find a qualified ippool");
        assert_eq!(
            error(&["10.5.0.0/16"]),
            "cannot find a qualified ippool, no pools match the required use (Workload)"
        );
    }

    #[test]
    fn pools_say_why_none_is_left() {
        let pools = pools();
        let kept = |start| HostReserved { start, end: 0, ..HostReserved::default() };
        assert_eq!(names(&pools[3..4], &[], &[], |_| ()).unwrap_err(), "cannot find a qualified ippool");
        assert_eq!(names(&pools[..2], &[], &[], |_| ()).unwrap_err(), "no configured Calico pools for node node1");
        let (fits, too_many) = (kept(63), kept(64));
        let mut query = PoolQuery {
            family: Family::V4,
            requested: &[],
            node: "n",
            node_labels: &Labels::new(),
            namespace_labels: &Labels::new(),
            wanted: PoolUse::Workload,
            host_reserved: Some(&fits),
        };
        assert!(select_pools(&pools, &query).is_ok());
        query.host_reserved = Some(&too_many);
        assert_eq!(select_pools(&pools, &query).unwrap_err(), PoolError::NoneQualified);
        let bad = [make(new("bad", "10.0.0.0/16").with_node_selector("a =="))];
        assert!(names(&bad, &[], &[], |_| ()).unwrap_err().starts_with("pool bad: invalid selector: "));
    }

    #[test]
    fn pools_are_requested_by_name_or_network() {
        let pools = pools();
        let parse = |text, family| parse_requested(text, &pools, family).map_err(|error| error.to_string());
        assert_eq!(parse("hand", Family::V4), Ok(net("10.2.0.0/16")));
        assert_eq!(parse("10.2.3.4/16", Family::V4), Ok(net("10.2.0.0/16")));
        assert_eq!(parse("10.99.0.0/16", Family::V4), Ok(net("10.99.0.0/16")));
        assert_eq!(
            parse("nopool", Family::V4),
            Err("error parsing pool \"nopool\": invalid CIDR address: nopool".to_owned())
        );
        assert_eq!(parse("fd80::/64", Family::V4), Err("\"fd80::\" isn't a IPv4 address".to_owned()));
        assert_eq!(parse("main", Family::V6), Err("\"10.3.0.0\" isn't a IPv6 address".to_owned()));
    }

    #[test]
    fn pools_of_wanted_addresses_are_found() {
        let pools = pools();
        let of = |ip: &str| {
            pool_of(&pools, ip.parse().unwrap(), PoolUse::Workload).map(Pool::name).map_err(|error| error.to_string())
        };
        assert_eq!(of("10.2.0.9"), Ok("hand"));
        assert_eq!(of("10.9.0.9"), Err("The provided IP address is not in a configured pool\n".to_owned()));
        assert_eq!(
        of("10.5.0.6"),
        Err("IP address 10.5.0.6 is in IP pool \"tunnels\", which is not allowed for use \"Workload\" (allowedUses: \
             [Tunnel])"
            .to_owned())
    );
        assert_eq!(block_of(&pools[2], "10.3.1.70".parse().unwrap()), Some(net("10.3.1.64/26")));
        assert_eq!(block_of(&pools[2], "10.4.1.70".parse().unwrap()), None);
        assert_eq!(block_of(&pools[4], "fd80::ffff".parse().unwrap()), Some(net("fd80::ffc0/122")));
    }

    #[test]
    fn blocks_come_once_from_start_of_host() {
        // The expected hashes are published values of 32-bit FNV-1.
        assert_eq!(start_of(""), 0x811c_9dc5);
        assert_eq!(start_of("a"), 0x050c_5d7e);
        assert_eq!(start_of("foobar"), 0x31f0_b262);
        let pool = make(new("p", "10.0.0.0/24").with_block_size(28));
        let blocks: Vec<IpNet> = blocks_from(&pool, 16 + 14).collect();
        assert_eq!(blocks.len(), 16);
        assert_eq!(blocks[..4], [net("10.0.0.224/28"), net("10.0.0.240/28"), net("10.0.0.0/28"), net("10.0.0.16/28")]);
        assert_eq!(blocks.iter().collect::<HashSet<_>>().len(), 16);
        assert!(blocks.iter().all(|block| pool.cidr().contains(block)));
    }

    #[test]
    fn blocks_of_large_and_odd_pools_do_not_overflow() {
        let six = make(new("p", "::/0").with_block_size(128));
        assert_eq!(blocks_from(&six, 5).take(2).collect::<Vec<_>>(), [net("::5/128"), net("::6/128")]);
        let last = make(new("p", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ff00/120").with_block_size(122));
        assert_eq!(blocks_from(&last, 3).count(), 4);
        let four = make(new("p", "255.255.255.0/24").with_block_size(32));
        assert_eq!(blocks_from(&four, 255).count(), 256);
        let one = make(new("p", "10.0.0.0/26"));
        assert_eq!(blocks_from(&one, u64::MAX).collect::<Vec<_>>(), [net("10.0.0.0/26")]);
        // Only programs other than Margay write pools with a block size larger than the pool or a prefix length longer
        // than an address.
        for block_size in [20, 33, 255] {
            let odd = make(new("p", "10.0.0.0/26").with_block_size(block_size));
            assert_eq!(blocks_from(&odd, 7).count(), 0);
            assert_eq!(block_of(&odd, "10.0.0.1".parse().unwrap()), None);
            assert!(names(&[odd], &[], &[], |_| ()).is_err());
        }
    }

    fn unreserved(mut blocks: PoolBlocks, reservations: &Reservations) -> Vec<IpNet> {
        std::iter::from_fn(|| blocks.next_unreserved(reservations)).collect()
    }

    #[test]
    fn blocks_are_skipped_when_reserved() {
        let pool = make(new("p", "10.0.1.0/24").with_block_size(28));
        let sets: [&[&str]; 8] = [
            &[],
            &["10.0.1.0/25"],
            &["10.0.1.128/25"],
            &["10.0.0.0/16"],
            &["10.0.1.0/27", "10.0.1.64/28", "10.0.1.96/32"],
            &["10.0.1.16/28", "10.0.1.32/27", "10.0.1.64/29", "10.0.1.240/28"],
            &["10.0.0.0/24", "10.0.1.0/28", "10.0.1.224/27", "10.0.2.0/24"],
            &["10.0.1.8/29", "10.0.1.16/29"],
        ];
        for nets in sets {
            let reservations = Reservations::new(nets.iter().map(|text| net(text)));
            for start in 0..16 {
                let expected: Vec<_> = blocks_from(&pool, start).filter(|block| !reservations.covers(*block)).collect();
                assert_eq!(unreserved(blocks_from(&pool, start), &reservations), expected, "{nets:?} from {start}");
            }
        }
    }

    #[test]
    fn blocks_of_huge_network_are_found_at_once() {
        // The reservations cover all addresses of the pool except fd06::10 to fd06::17.
        let around = ["fd06::/124", "fd06::18/125", "fd06::20/123"].map(net);
        let rest = (0..58_u8)
            .map(|bit| IpNet::new(IpAddr::V6(((0xfd06_u128 << 112) | (1 << (6 + bit))).into()), 122 - bit).unwrap());
        let reservations = Reservations::new(around.into_iter().chain(rest));
        let pool = make(new("p", "fd06::/64").with_block_size(122));
        for start in [0, 1, u64::MAX] {
            assert_eq!(unreserved(blocks_from(&pool, start), &reservations), [net("fd06::/122")]);
        }
        let all = Reservations::new([net("::/0")]);
        let six = make(new("p", "::/0").with_block_size(128));
        assert_eq!(unreserved(blocks_from(&six, 5), &all), []);
    }

    #[test]
    fn namespace_is_asked_for_only_where_it_matters() {
        let (none, zone) = (Labels::new(), Labels::from([("zone".into(), "a".into())]));
        let requested = [net("10.4.0.0/16")];
        let asks = |all: &[Pool], change: &dyn Fn(&mut PoolQuery<'_>)| {
            let mut query = PoolQuery {
                family: Family::V4,
                requested: &[],
                node: "n",
                node_labels: &none,
                namespace_labels: &none,
                wanted: PoolUse::Workload,
                host_reserved: None,
            };
            query.node_labels = &zone;
            change(&mut query);
            asks_for_namespace(all, &query)
        };
        assert!(asks(&pools(), &|_| ()));
        assert!(!asks(&pools(), &|query| query.family = Family::V6));
        let without: Vec<Pool> = pools().into_iter().filter(|pool| pool.name() != "team").collect();
        assert!(!asks(&without, &|_| ()));
        let team = || new("team", "10.4.0.0/16").with_namespace_selector("team == 'x'");
        for other in [
            team().with_node_selector("zone == 'b'"),
            team().with_assignment_mode(AssignmentMode::Manual),
            team().with_allowed_uses([PoolUse::Tunnel]),
        ] {
            assert!(!asks(&[make(other)], &|_| ()));
        }
        let named = PoolQuery {
            family: Family::V4,
            requested: &requested,
            node: "n",
            node_labels: &none,
            namespace_labels: &none,
            wanted: PoolUse::Workload,
            host_reserved: None,
        };
        assert!(!asks_for_namespace(&pools(), &named), "a pool that is named is taken whatever its selectors say");
    }
}
