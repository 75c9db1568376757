//! Defines the kinds of networks and the settings of secondary networks: the mask, gateway and routes of CNI results,
//! and the weights of pools. Reads the pools that a network configuration defines with the keys of host-local or
//! whereabouts.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use agent::{CniError, Result};
use datastore::DEFAULT_CONF_DIR;
use ipam_core::assign::{Gateway, PoolDefinition};
use ipam_core::net::overlap;
use ipam_core::pools::start_of;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::Serialize;

use crate::gojson::{GoJson, quoted};
use crate::netconf::{IpamConf, NetConf};
use crate::probing::Probe;
use crate::ranges::{
    self, AddressRange, GATEWAY_OUTSIDE, address_at, is_given, of_another_family, read_range, read_sets,
};

/// The kind of network whose addresses a plugin call assigns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Network {
    /// A routed network, on which addresses are assigned and errors are worded as in Calico.
    Calico,
    /// A secondary network, whose IP subnets are layer-2 segments. The network, broadcast and gateway addresses of a
    /// secondary network's pools are never assigned to a container.
    Bridged(BridgedNetwork),
}

/// The settings of a secondary network that concern its pools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BridgedNetwork {
    pub(crate) gateway_v4: Gateway,
    pub(crate) gateway_v6: Gateway,
    /// The configured gateways of a network that has several pools in one address family. Each configured gateway
    /// applies to the pool that contains its address, and takes precedence over that pool's own gateway.
    pub(crate) gateways: Vec<IpAddr>,
    /// The pools that the network configuration defines with the keys of host-local or whereabouts. If the network
    /// configuration defines pools, an ADD uses only these pools, and creates the store and the configured pools if
    /// they are missing.
    pub(crate) own_pools: Vec<OwnPool>,
    /// The weight of each pool, with the pool's name or subnet as the key. A pool that is missing from `weights` has
    /// weight 1.
    pub(crate) weights: BTreeMap<String, u32>,
}

impl BridgedNetwork {
    /// Returns the index of the set of ranges that contains an address, or `usize::MAX` if no set of ranges does.
    pub(crate) fn set_of(&self, address: IpAddr) -> usize {
        let by_range = self.own_pools.iter().find(|pool| pool.has(address));
        let pool = by_range.or_else(|| self.own_pools.iter().find(|pool| pool.subnet.contains(&address)));
        pool.map_or(usize::MAX, |pool| pool.set)
    }
}

/// A pool that a network's configuration defines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OwnPool {
    /// The configured `network_name`, after which a new pool is named; `None` if a new pool is named after the network.
    pub(crate) name: Option<String>,
    /// The pool's subnet, without host bits. The subnet is at least a /30 for IPv4, and at least a /126 for IPv6.
    pub(crate) subnet: IpNet,
    /// The pool's assignable addresses: the first and last address of each range, in ascending order, without overlap,
    /// inside the subnet. If the list of ranges is empty, the whole subnet is assignable.
    pub(crate) ranges: Vec<(IpAddr, IpAddr)>,
    /// The index of the set of ranges that this pool belongs to. An attachment gets one address from each set of
    /// ranges.
    pub(crate) set: usize,
    /// The index of this pool among the pools of its address family.
    pub(crate) number: usize,
    /// True if the configuration has `"subnet": "auto"` for this pool. A pool with an automatic subnet is found in the
    /// store by its name. If the store does not have the pool yet, a free network of the size of `subnet` becomes the
    /// pool's subnet.
    pub(crate) is_auto: bool,
    /// The gateway that the configuration names in this pool's ranges.
    pub(crate) gateway: Option<IpAddr>,
}

impl OwnPool {
    /// Creates a pool without ranges, so that its whole subnet is assignable.
    pub(crate) fn of(subnet: IpNet) -> Self {
        Self { name: None, subnet, ranges: Vec::new(), set: 0, number: 0, is_auto: false, gateway: None }
    }

    pub(crate) fn has(&self, address: IpAddr) -> bool {
        self.ranges.iter().any(|(first, last)| *first <= address && address <= *last)
    }

    pub(crate) fn is_v4(&self) -> bool {
        self.subnet.addr().is_ipv4()
    }

    pub(crate) fn text(&self) -> String {
        self.subnet.to_string()
    }
}

/// Returns the definitions of the pools in a network's configuration. The pools that a network configuration defines
/// are named after the network. The name of an IPv6 pool ends with `-ipv6`, so that an IPv4 network can get IPv6
/// addresses later, and an IPv6 network IPv4 addresses. The names of the second and all later pools of an address
/// family end with the pool's number.
pub(crate) fn definitions(network: &str, pools: &[OwnPool]) -> Vec<PoolDefinition> {
    let used = if pools.iter().any(|pool| pool.is_auto) { used_here() } else { Vec::new() };
    let definition = |pool: &OwnPool| {
        let network = pool.name.as_deref().unwrap_or(network);
        let mut name = pool_name(network);
        // Two network names may become equal when characters that a pool name does not allow are replaced. If such
        // networks have `"subnet": "auto"`, a checksum of the network's name in the pool's name keeps two networks from
        // sharing a pool.
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

/// Lists the networks that this machine has routes to, or that its runtimes' configurations use. A new pool with an
/// automatic subnet must not overlap with any of these networks.
fn used_here() -> Vec<IpNet> {
    let mut used = host::routes().unwrap_or_else(|error| {
        tracing::warn!(
            %error,
            "cannot read the routes of this machine; the subnet chosen for a new pool may overlap with a route"
        );
        Vec::new()
    });
    used.extend(datastore::runtime_subnets(Path::new(DEFAULT_CONF_DIR)).0);
    used
}

/// Converts a network's name to a pool's name, which allows fewer characters.
fn pool_name(network: &str) -> String {
    let letter = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    network.chars().map(letter).collect::<String>().trim_matches('-').to_owned()
}

/// The network mask of the addresses in a CNI result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum PrefixMask {
    /// The mask of the whole pool, because all addresses of the pool share one layer-2 segment.
    #[default]
    Pool,
    Block,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct BridgedSettings {
    pub(crate) mask: PrefixMask,
    pub(crate) routes: Vec<ResultRoute>,
    pub(crate) network: BridgedNetwork,
    pub(crate) probe: Option<Probe>,
}

/// Refuses the keys of secondary networks in the configuration of a Calico network.
///
/// # Errors
/// CNI error code 7 if the configuration contains a key of secondary networks.
pub(crate) fn refuse_on_calico(conf: &NetConf) -> Result<()> {
    let IpamConf { mask, gateway, routes, weights, probe, .. } = &conf.ipam;
    let keys = [("mask", mask), ("gateway", gateway), ("routes", routes), ("weights", weights), ("probe", probe)];
    match keys.into_iter().find(|(_, value)| value.is_some()) {
        None => Ok(()),
        Some((key, _)) => Err(CniError::config(format!("ipam.{key} cannot be used with \"type\": \"calico\""))
            .with_details("remove it: Calico's networks have no common subnet, gateway, routes or wire")),
    }
}

impl BridgedSettings {
    /// Reads and checks the settings of a secondary network in the network configuration.
    ///
    /// # Errors
    /// CNI error code 7 for an invalid setting of a secondary network.
    pub(crate) fn from_conf(conf: &NetConf) -> Result<Self> {
        let own_pools = own_pools(conf)?;
        let weights = read_weights(conf, &own_pools)?;
        let has_gateway = conf.plugin == "ptp"
            || (conf.plugin == "bridge" && (conf.is_gateway || conf.is_default_gateway))
            // host-local always returns a gateway, but whereabouts returns a gateway only if one is configured.
            || (!own_pools.is_empty() && !ranges::is_whereabouts(&conf.ipam.whereabouts));
        let default = if has_gateway { Gateway::First } else { Gateway::Recorded };
        let mut network =
            BridgedNetwork { gateway_v4: default, gateway_v6: default, gateways: Vec::new(), own_pools, weights };
        set_gateways(conf, &mut network)?;
        let (mask, routes) = (read_mask(conf.ipam.mask.as_ref())?, read_routes(conf.ipam.routes.as_ref())?);
        Ok(Self { mask, routes, network, probe: Probe::from_conf(conf)? })
    }
}

/// Returns whether a network is a Calico network or a secondary network. A network without settings for secondary
/// networks is a Calico network.
pub(crate) fn network_of(settings: Option<&BridgedSettings>) -> Network {
    settings.map_or(Network::Calico, |settings| Network::Bridged(settings.network.clone()))
}

fn slot(network: &mut BridgedNetwork, address: IpAddr) -> &mut Gateway {
    if address.is_ipv4() { &mut network.gateway_v4 } else { &mut network.gateway_v6 }
}

fn read_mask(value: Option<&GoJson>) -> Result<PrefixMask> {
    match value.map(GoJson::as_str) {
        None | Some(Some("pool")) => Ok(PrefixMask::Pool),
        Some(Some("block")) => Ok(PrefixMask::Block),
        Some(_) => Err(CniError::config("ipam.mask must be \"pool\" or \"block\"")),
    }
}

/// Applies the gateways in `ipam.gateway`, which override the gateways of the configured ranges.
fn set_gateways(conf: &NetConf, network: &mut BridgedNetwork) -> Result<()> {
    let Some(given) = read_gateway(conf.ipam.gateway.as_ref())? else {
        (network.gateway_v4, network.gateway_v6) = (Gateway::First, Gateway::First);
        network.own_pools.iter_mut().for_each(|pool| pool.gateway = None);
        return Ok(());
    };
    for (v4, named) in [(true, &conf.ipam.ipv4_pools), (false, &conf.ipam.ipv6_pools)] {
        let given: Vec<IpAddr> = given.iter().copied().filter(|address| address.is_ipv4() == v4).collect();
        let own = network.own_pools.iter().filter(|pool| pool.is_v4() == v4);
        let subnets: BTreeSet<IpNet> = own.map(|pool| pool.subnet).collect();
        if given.len() > subnets.len().max(named.len()).max(1) {
            return Err(CniError::config("ipam.gateway has several addresses of one family"));
        }
        let Some((first, others)) = given.split_first() else { continue };
        if let Some(OwnPool { subnet, .. }) = network.own_pools.first()
            && subnets.is_empty()
            && named.is_empty()
        {
            return Err(of_another_family(*first, *subnet));
        }
        if subnets.len() < 2 {
            *slot(network, *first) = Gateway::At(*first);
            network.own_pools.iter_mut().filter(|pool| pool.is_v4() == v4).for_each(|pool| pool.gateway = None);
            network.gateways.extend(others);
            continue;
        }
        let is_inside = |address: &&IpAddr| subnets.iter().any(|subnet| subnet.contains(*address));
        match given.iter().find(|address| !is_inside(address)) {
            Some(address) if v4 || given.len() > 1 => {
                let message = format!("ipam.gateway {address} is in no subnet of the network");
                return Err(CniError::config(message).with_details(GATEWAY_OUTSIDE));
            }
            // The configured address is the gateway of all pools of its address family, even if it is in none of their
            // subnets (for example, a link-local address).
            Some(address) => *slot(network, *address) = Gateway::At(*address),
            None => network.gateways.extend(given),
        }
    }
    Ok(())
}

/// Parses a gateway address or a list of gateway addresses, and returns `None` for `"first"`. As in host-local, an
/// empty string counts as no gateway.
fn read_gateway(value: Option<&GoJson>) -> Result<Option<Vec<IpAddr>>> {
    let mut given = Vec::new();
    for element in value.map(GoJson::one_or_many).unwrap_or_default() {
        match element.as_str() {
            Some("") => {}
            Some("first") if !matches!(value, Some(GoJson::Array(_))) => return Ok(None),
            _ => given.push(address_at(element, "ipam.gateway", " or \"first\"")?),
        }
    }
    Ok(Some(given))
}

/// Reads the pools that the network configuration defines. In the returned list, the runtime's ranges come first, as in
/// host-local, then the range of `ipam.subnet`, then the ranges of `ipam.ranges`.
fn own_pools(conf: &NetConf) -> Result<Vec<OwnPool>> {
    let ipam = &conf.ipam;
    let mut sets: Vec<Vec<AddressRange>> = Vec::new();
    read_sets(conf.runtime_ranges.as_ref(), "runtimeConfig.ipRanges", &mut sets)?;
    let is_auto = ipam.subnet.as_ref().and_then(GoJson::as_str) == Some("auto");
    if let Some(subnet) = ipam.subnet.as_ref().filter(|_| !is_auto) {
        sets.push(vec![read_range(subnet, ipam.range_start.as_ref(), ipam.range_end.as_ref(), None)?]);
    } else if is_given(ipam.range_start.as_ref()) || is_given(ipam.range_end.as_ref()) {
        return Err(CniError::config("ipam.rangeStart and ipam.rangeEnd need ipam.subnet")
            .with_details("it must be a network, such as 10.0.0.0/24"));
    }
    read_sets(ipam.ranges.as_ref(), "ipam.ranges", &mut sets)?;
    refuse_empty(ipam, !sets.is_empty() || is_auto)?;
    let mut name = None;
    if ranges::is_whereabouts(&ipam.whereabouts) {
        if !sets.is_empty() || is_auto {
            return Err(CniError::config("ipam defines its addresses twice").with_details(
                "use either range and ipRanges (whereabouts plugin), or subnet and ranges (host-local)",
            ));
        }
        sets = ranges::read_whereabouts(&ipam.whereabouts)?;
        name = ranges::network_name(&ipam.whereabouts)?;
    }
    if is_auto && !sets.is_empty() {
        return Err(CniError::config("ipam.subnet is \"auto\", and there are ranges besides")
            .with_details("with \"auto\" Margay chooses the network's only subnet: remove the ranges"));
    }
    let mut pools = if is_auto { auto_pools(conf) } else { Vec::new() };
    for (number, set) in sets.iter().enumerate() {
        let of_set = pools_of(number, set, &pools)?;
        pools.extend(of_set);
    }
    pools.iter_mut().for_each(|pool| pool.name.clone_from(&name));
    let names_others = !ipam.ipv4_pools.is_empty() || !ipam.ipv6_pools.is_empty();
    if !pools.is_empty() && names_others {
        return Err(CniError::config("ipam defines pools of its own and names others")
            .with_details("use either subnet, ranges or range, or ipv4_pools and ipv6_pools"));
    }
    Ok(pools)
}

/// Returns the pools of `"subnet": "auto"`: a /24 pool for IPv4, and also a /64 pool if the network assigns IPv6
/// addresses.
fn auto_pools(conf: &NetConf) -> Vec<OwnPool> {
    let v4 = conf.ipam.assign_ipv4.as_deref() != Some("false");
    let v6 = conf.ipam.assign_ipv6.as_deref() == Some("true");
    let of_v4 = Ipv4Net::new(Ipv4Addr::UNSPECIFIED, 24).ok().filter(|_| v4).map(IpNet::V4);
    let of_v6 = Ipv6Net::new(Ipv6Addr::UNSPECIFIED, 64).ok().filter(|_| v6).map(IpNet::V6);
    let pool = |(set, subnet)| OwnPool { subnet, set, is_auto: true, ..OwnPool::of(subnet) };
    of_v4.into_iter().chain(of_v6).enumerate().map(pool).collect()
}

/// Refuses a configuration whose pool keys are present but define no address, as in a template that was rendered
/// without values. If accepted, a configuration without addresses would make the network use an arbitrary pool of the
/// store.
fn refuse_empty(ipam: &IpamConf, has_ranges: bool) -> Result<()> {
    if has_ranges || ranges::is_whereabouts(&ipam.whereabouts) {
        return Ok(());
    }
    let key = if ipam.ranges.is_some() { Some("ranges") } else { ranges::key_without_range(&ipam.whereabouts) };
    key.map_or(Ok(()), |key| {
        Err(CniError::config(format!("ipam.{key} is there, but no range of addresses is"))
            .with_details("name a subnet or a range, or remove the key to use pools of the store"))
    })
}

/// Returns the pools of a set of ranges: one pool for each subnet, in the order in which the subnets first appear in
/// the ranges. If the set of ranges is empty, no pools are returned. `others` contains the pools of all sets of ranges
/// parsed so far.
fn pools_of(set: usize, ranges: &[AddressRange], others: &[OwnPool]) -> Result<Vec<OwnPool>> {
    let mut pools: Vec<OwnPool> = Vec::new();
    for AddressRange { subnet, first, last, gateway } in ranges {
        if pools.iter().any(|pool| pool.is_v4() != first.is_ipv4()) {
            return Err(CniError::config("a set of ranges has subnets of both families")
                .with_details("write a set for each family: [[{IPv4}], [{IPv6}]]"));
        }
        for other in others.iter().chain(&pools) {
            if other.subnet != *subnet && overlap(other.subnet, *subnet) {
                return Err(CniError::config(format!("the subnets {} and {subnet} overlap", other.subnet)));
            }
            if let Some((a, b)) = other.ranges.iter().find(|(a, b)| a <= last && first <= b) {
                return Err(CniError::config(format!("the ranges {a}-{b} and {first}-{last} overlap")));
            }
        }
        if let Some(pool) = pools.iter_mut().find(|pool| pool.subnet == *subnet) {
            pool.ranges.push((*first, *last));
            pool.ranges.sort();
            pool.gateway = pool.gateway.or(*gateway);
            continue;
        }
        let all = || others.iter().chain(&pools).filter(|other| other.is_v4() == first.is_ipv4());
        let same = all().find(|other| other.subnet == *subnet).map(|other| other.number);
        let number = same.unwrap_or_else(|| all().map(|other| other.number + 1).max().unwrap_or(0));
        pools.push(OwnPool { ranges: vec![(*first, *last)], set, number, gateway: *gateway, ..OwnPool::of(*subnet) });
    }
    Ok(pools)
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct ResultRoute {
    pub(crate) dst: IpNet,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) gw: Option<IpAddr>,
    #[serde(flatten)]
    pub(crate) options: RouteOptions,
}

/// The fields of a route other than its destination and gateway. Since CNI version 0.3.0, the routes of CNI results
/// contain options such as the MTU.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct RouteOptions {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mtu: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    advmss: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    table: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    scope: Option<i64>,
}

impl ResultRoute {
    pub(crate) fn to(dst: IpNet) -> Self {
        Self { dst, gw: None, options: RouteOptions::default() }
    }
}

/// Parses the list of routes in `ipam.routes`.
///
/// # Errors
/// CNI error code 7 if `ipam.routes` is not a list of routes.
fn read_routes(value: Option<&GoJson>) -> Result<Vec<ResultRoute>> {
    match value {
        None => Ok(Vec::new()),
        Some(GoJson::Array(elements)) => elements.iter().map(read_route).collect(),
        Some(_) => Err(CniError::config("ipam.routes must be a list of objects with a dst and, if wanted, a gw")),
    }
}

fn read_route(element: &GoJson) -> Result<ResultRoute> {
    let dst = element
        .member("dst")
        .and_then(GoJson::as_str)
        .ok_or_else(|| CniError::config("a route in ipam.routes has no dst"))?;
    let dst = dst.parse().map_err(|_| CniError::config(format!("ipam.routes: dst {} is not a CIDR", quoted(dst))))?;
    let gw = match element.member("gw") {
        None => None,
        Some(GoJson::String(text)) if text.is_empty() => None,
        Some(gw) => Some(address_at(gw, "ipam.routes: gw", "")?),
    };
    let number = |name: &str| match element.member(name) {
        None => Ok(None),
        Some(GoJson::Number(number)) if number.is_i64() => Ok(number.as_i64()),
        Some(_) => Err(CniError::config(format!("ipam.routes: {name} is not a whole number"))),
    };
    // The value 0 means absent for `mtu`, `advmss` and `priority`, but is valid for a routing table and a scope.
    let positive = |name: &str| number(name).map(|number| number.filter(|number| *number != 0));
    let options = RouteOptions {
        mtu: positive("mtu")?,
        advmss: positive("advmss")?,
        priority: positive("priority")?,
        table: number("table")?,
        scope: number("scope")?,
    };
    Ok(ResultRoute { dst, gw, options })
}

/// The weights with which pools are tried first, keyed by the pool's entry in `ipv4_pools` or `ipv6_pools`, or by the
/// pool's subnet.
pub(crate) type PoolWeights = BTreeMap<String, u32>;

/// Reads the weights of pools in `ipam.weights`.
///
/// # Errors
/// CNI error code 7 for an invalid weight, or for the weight of a pool that the network does not have.
fn read_weights(conf: &NetConf, own_pools: &[OwnPool]) -> Result<PoolWeights> {
    let wrong = || CniError::config("ipam.weights must be an object with a whole number for each pool");
    let members = match &conf.ipam.weights {
        None => return Ok(PoolWeights::new()),
        Some(GoJson::Object(members)) => members,
        Some(_) => return Err(wrong()),
    };
    let named = || conf.ipam.ipv4_pools.iter().chain(&conf.ipam.ipv6_pools);
    let weight = |(name, weight): &(String, GoJson)| {
        let is_there = named().any(|pool| pool == name) || own_pools.iter().any(|pool| pool.text() == *name);
        if !is_there {
            let message = format!("ipam.weights has {}, which is no pool of the network", quoted(name));
            return Err(
                CniError::config(message).with_details("name the pools as in ipv4_pools and ipv6_pools, or by subnet")
            );
        }
        let GoJson::Number(number) = weight else { return Err(wrong()) };
        let number = number.as_u64().and_then(|number| u32::try_from(number).ok()).ok_or_else(wrong)?;
        Ok((name.clone(), number))
    };
    members.iter().map(weight).collect()
}

/// Moves one pool to the front of `pools`: always the same pool for the same container. Over many containers, each pool
/// is tried first in proportion to its weight (default 1). The other pools keep their order in `pools`.
pub(crate) fn choose_first<T>(weights: &PoolWeights, container: &str, pools: &mut [T], name: impl Fn(&T) -> String) {
    if weights.is_empty() {
        return;
    }
    let each: Vec<u64> =
        pools.iter().map(|pool| weights.get(&name(pool)).map_or(1, |weight| (*weight).into())).collect();
    // A multiplicative hash gives very different numbers to container ids that differ only in their last digit.
    let number = start_of(container).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    let Some(mut place) = number.checked_rem(each.iter().sum()) else { return };
    for (index, weight) in each.into_iter().enumerate() {
        match place.checked_sub(weight) {
            Some(rest) => place = rest,
            None => return pools.get_mut(..=index).unwrap_or_default().rotate_right(1),
        }
    }
}

#[cfg(test)]
#[path = "bridged_tests.rs"]
mod tests;
