//! The settings of secondary networks: mask, gateway and routes, and the pools in the words of host-local or whereabouts.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use agent::{CniError, Result};
use ipam_core::assign::Gateway;
use ipam_core::net::overlap;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::gojson::Json;
use crate::netconf::{Ipam, NetConf};
use crate::network::{Bridged, Network, OwnPool};
use crate::probing::Probe;
use crate::ranges::{GATEWAY_OUTSIDE, Range, address_at, is_given, of_another_family, read_range, read_sets};
use crate::routes::{Route, read_routes};
use crate::weights;
use crate::whereabouts;

/// The mask that the addresses of a result have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Mask {
    /// The mask of the whole pool, as on one wire.
    #[default]
    Pool,
    /// The mask of the block.
    Block,
}

/// All settings of a secondary network's configuration for ADD.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct BridgedSettings {
    pub(crate) mask: Mask,
    pub(crate) routes: Vec<Route>,
    pub(crate) network: Bridged,
    pub(crate) probe: Option<Probe>,
}

/// Refuses the keys that mean nothing on a network of Calico's own plugin, where they could only be a misunderstanding.
///
/// # Errors
/// Code 7.
pub(crate) fn refuse_on_calico(conf: &NetConf) -> Result<()> {
    let Ipam { mask, gateway, routes, weights, probe, .. } = &conf.ipam;
    let keys = [("mask", mask), ("gateway", gateway), ("routes", routes), ("weights", weights), ("probe", probe)];
    match keys.into_iter().find(|(_, value)| value.is_some()) {
        None => Ok(()),
        Some((key, _)) => Err(CniError::config(format!("ipam.{key} cannot be used with \"type\": \"calico\""))
            .with_details("remove it: Calico's networks have no common subnet, gateway, routes or wire")),
    }
}

impl BridgedSettings {
    /// Reads the settings.
    ///
    /// # Errors
    /// Code 7 for a setting that cannot be carried out.
    pub(crate) fn from_conf(conf: &NetConf) -> Result<Self> {
        let own_pools = own_pools(conf)?;
        let weights = weights::read(conf, &own_pools)?;
        let has_gateway = conf.plugin == "ptp"
            || (conf.plugin == "bridge" && (conf.is_gateway || conf.is_default_gateway))
            // host-local always names one, and whereabouts none that is not configured.
            || (!own_pools.is_empty() && !whereabouts::is_used(&conf.ipam.whereabouts));
        let default = if has_gateway { Gateway::First } else { Gateway::Recorded };
        let mut network =
            Bridged { gateway_v4: default, gateway_v6: default, gateways: Vec::new(), own_pools, weights };
        set_gateways(conf, &mut network)?;
        let (mask, routes) = (read_mask(conf.ipam.mask.as_ref())?, read_routes(conf.ipam.routes.as_ref())?);
        Ok(Self { mask, routes, network, probe: Probe::from_conf(conf)? })
    }
}

/// The network with these settings; Calico's has none.
pub(crate) fn network_of(settings: Option<&BridgedSettings>) -> Network {
    settings.map_or(Network::Calico, |settings| Network::Bridged(settings.network.clone()))
}

fn slot(network: &mut Bridged, address: IpAddr) -> &mut Gateway {
    if address.is_ipv4() { &mut network.gateway_v4 } else { &mut network.gateway_v6 }
}

fn read_mask(value: Option<&Json>) -> Result<Mask> {
    match value.map(Json::as_str) {
        None | Some(Some("pool")) => Ok(Mask::Pool),
        Some(Some("block")) => Ok(Mask::Block),
        Some(_) => Err(CniError::config("ipam.mask must be \"pool\" or \"block\"")),
    }
}

/// Sets the gateways of `ipam.gateway`, which have the last word over those of the ranges.
fn set_gateways(conf: &NetConf, network: &mut Bridged) -> Result<()> {
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
            // The router of all of them, as its link-local address is.
            Some(address) => *slot(network, *address) = Gateway::At(*address),
            None => network.gateways.extend(given),
        }
    }
    Ok(())
}

/// An address, or a list of addresses; `None` for `"first"`. The empty text counts as absent, as for host-local.
fn read_gateway(value: Option<&Json>) -> Result<Option<Vec<IpAddr>>> {
    let mut given = Vec::new();
    for element in value.map(Json::one_or_many).unwrap_or_default() {
        match element.as_str() {
            Some("") => {}
            Some("first") if !matches!(value, Some(Json::Array(_))) => return Ok(None),
            _ => given.push(address_at(element, "ipam.gateway", " or \"first\"")?),
        }
    }
    Ok(Some(given))
}

/// The pools that the configuration defines itself. As for host-local, the ranges of the runtime come first, then `subnet`
/// with its keys, then `ranges`.
fn own_pools(conf: &NetConf) -> Result<Vec<OwnPool>> {
    let ipam = &conf.ipam;
    let mut sets: Vec<Vec<Range>> = Vec::new();
    read_sets(conf.runtime_ranges.as_ref(), "runtimeConfig.ipRanges", &mut sets)?;
    let is_auto = ipam.subnet.as_ref().and_then(Json::as_str) == Some("auto");
    if let Some(subnet) = ipam.subnet.as_ref().filter(|_| !is_auto) {
        sets.push(vec![read_range(subnet, ipam.range_start.as_ref(), ipam.range_end.as_ref(), None)?]);
    } else if is_given(ipam.range_start.as_ref()) || is_given(ipam.range_end.as_ref()) {
        return Err(CniError::config("ipam.rangeStart and ipam.rangeEnd need ipam.subnet")
            .with_details("it must be a network, such as 10.0.0.0/24"));
    }
    read_sets(ipam.ranges.as_ref(), "ipam.ranges", &mut sets)?;
    refuse_empty(ipam, !sets.is_empty() || is_auto)?;
    let mut name = None;
    if whereabouts::is_used(&ipam.whereabouts) {
        if !sets.is_empty() || is_auto {
            return Err(CniError::config("ipam defines its addresses twice")
                .with_details("use either range and ipRanges (whereabouts), or subnet and ranges (host-local)"));
        }
        sets = whereabouts::read(&ipam.whereabouts)?;
        name = whereabouts::network_name(&ipam.whereabouts)?;
    }
    if is_auto && !sets.is_empty() {
        return Err(CniError::config("ipam.subnet is \"auto\", and there are ranges besides")
            .with_details("with \"auto\" the network has one subnet of its own choice: remove the ranges"));
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

/// The pools of `"subnet": "auto"`: a /24, and a /64 where an IPv6 address is assigned, too.
fn auto_pools(conf: &NetConf) -> Vec<OwnPool> {
    let v4 = conf.ipam.assign_ipv4.as_deref() != Some("false");
    let v6 = conf.ipam.assign_ipv6.as_deref() == Some("true");
    let of_v4 = Ipv4Net::new(Ipv4Addr::UNSPECIFIED, 24).ok().filter(|_| v4).map(IpNet::V4);
    let of_v6 = Ipv6Net::new(Ipv6Addr::UNSPECIFIED, 64).ok().filter(|_| v6).map(IpNet::V6);
    let pool = |(set, subnet)| OwnPool { subnet, set, is_auto: true, ..OwnPool::of(subnet) };
    of_v4.into_iter().chain(of_v6).enumerate().map(pool).collect()
}

/// Refuses keys that are there and define no address: a template that had nothing to fill in renders such, and the network
/// must not take addresses from whatever pool there is.
fn refuse_empty(ipam: &Ipam, has_ranges: bool) -> Result<()> {
    if has_ranges || whereabouts::is_used(&ipam.whereabouts) {
        return Ok(());
    }
    let key = if ipam.ranges.is_some() { Some("ranges") } else { whereabouts::key_without_range(&ipam.whereabouts) };
    key.map_or(Ok(()), |key| {
        Err(CniError::config(format!("ipam.{key} is there, but no range of addresses is"))
            .with_details("name a subnet or a range, or remove the key to use pools of the store"))
    })
}

/// The pools of a set of ranges, one for each subnet, in the order in which these come first; none for an empty set.
/// `others` are those of the sets before.
fn pools_of(set: usize, ranges: &[Range], others: &[OwnPool]) -> Result<Vec<OwnPool>> {
    let mut pools: Vec<OwnPool> = Vec::new();
    for Range { subnet, first, last, gateway } in ranges {
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

#[cfg(test)]
#[path = "bridged_tests.rs"]
mod tests;
