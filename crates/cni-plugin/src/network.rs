//! The kind of a network, and the pools that its own configuration defines.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;

use datastore::DEFAULT_CONF_DIR;
use ipam_core::assign::{Gateway, PoolDefinition};
use ipam_core::pools::start_of;
use ipnet::IpNet;

/// The kind of network that the addresses are for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Network {
    /// Routed, with Calico's rules and errors.
    Calico,
    /// IP subnets on a wire: pools in which network, broadcast and gateway address are never assigned to a container.
    Bridged(Bridged),
}

/// The settings of a secondary network for its pools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bridged {
    /// The gateway of the IPv4 pool.
    pub(crate) gateway_v4: Gateway,
    /// The gateway of the IPv6 pool.
    pub(crate) gateway_v6: Gateway,
    /// Gateways where there are several pools of a family: each is that of the pool in which it lies, before the pool's own.
    pub(crate) gateways: Vec<IpAddr>,
    /// Pools that the configuration itself defines with the keys of host-local or whereabouts. If there is any, the
    /// request names no others, and the store and the pools are made if they are missing.
    pub(crate) own_pools: Vec<OwnPool>,
    /// How often each pool comes first, by its name or subnet; 1 for those that are not there.
    pub(crate) weights: BTreeMap<String, u32>,
}

impl Bridged {
    /// The number of the set of ranges that an address is of; the last one if it is of none.
    pub(crate) fn set_of(&self, address: IpAddr) -> usize {
        let by_range = self.own_pools.iter().find(|pool| pool.has(address));
        let pool = by_range.or_else(|| self.own_pools.iter().find(|pool| pool.subnet.contains(&address)));
        pool.map_or(usize::MAX, |pool| pool.set)
    }
}

/// A pool that a network's configuration defines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OwnPool {
    /// The name after which a new pool is called; `None` for the network's.
    pub(crate) name: Option<String>,
    /// The subnet, without host bits; at most /30 or /126.
    pub(crate) subnet: IpNet,
    /// The assignable addresses: first and last address of each range, in ascending order, apart from each other,
    /// inside the subnet. Empty for all of it.
    pub(crate) ranges: Vec<(IpAddr, IpAddr)>,
    /// The number of its set: an attachment gets one address of each set.
    pub(crate) set: usize,
    /// Its number among the subnets of its family.
    pub(crate) number: usize,
    /// True for `"subnet": "auto"`: the pool is the one of its name, and a new one gets a free network of the size of
    /// `subnet`.
    pub(crate) is_auto: bool,
    /// The gateway that its ranges name.
    pub(crate) gateway: Option<IpAddr>,
}

impl OwnPool {
    /// All of a subnet.
    pub(crate) fn of(subnet: IpNet) -> Self {
        Self { name: None, subnet, ranges: Vec::new(), set: 0, number: 0, is_auto: false, gateway: None }
    }

    /// True if the address is of the pool's ranges.
    pub(crate) fn has(&self, address: IpAddr) -> bool {
        self.ranges.iter().any(|(first, last)| *first <= address && address <= *last)
    }

    /// True for IPv4.
    pub(crate) fn is_v4(&self) -> bool {
        self.subnet.addr().is_ipv4()
    }

    /// The subnet as text.
    pub(crate) fn text(&self) -> String {
        self.subnet.to_string()
    }
}

/// The pools that a configuration defines, named after the network; an IPv6 one says so, so that a network may get a
/// second family later. Further ones of a family are numbered.
pub(crate) fn definitions(network: &str, pools: &[OwnPool]) -> Vec<PoolDefinition> {
    let used = if pools.iter().any(|pool| pool.is_auto) { used_here() } else { Vec::new() };
    let definition = |pool: &OwnPool| {
        let network = pool.name.as_deref().unwrap_or(network);
        let mut name = pool_name(network);
        // A chosen subnet does not tell networks apart whose names differ in letters that no pool's name can have.
        if pool.is_auto && name != network {
            name += &format!("-{:08x}", start_of(network));
        }
        if !pool.is_v4() {
            name += "-ipv6";
        }
        if pool.number > 0 {
            name += &format!("-{}", pool.number + 1);
        }
        let (ranges, free_of) = (pool.ranges.clone(), pool.is_auto.then(|| used.clone()));
        PoolDefinition { name, cidr: pool.subnet, ranges, set: pool.set, free_of, gateway: pool.gateway }
    };
    pools.iter().map(definition).collect()
}

/// The networks that this machine uses, and that a pool of its own choice keeps off.
fn used_here() -> Vec<IpNet> {
    let mut used = host::routes().unwrap_or_else(|error| {
        tracing::warn!(%error, "the routes of this machine could not be read: a new subnet may overlap with one of them");
        Vec::new()
    });
    used.extend(datastore::runtime_subnets(Path::new(DEFAULT_CONF_DIR)).0);
    used
}

/// A network's name as the name of a pool, which has fewer letters to choose from.
fn pool_name(network: &str) -> String {
    let letter = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    network.chars().map(letter).collect::<String>().trim_matches('-').to_owned()
}
