//! The settings of secondary networks: mask, gateway and routes, and the pools in the words of host-local or whereabouts.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::args::{AddressForm, parse_address};
use crate::error::{CniError, Result};
use crate::gojson::{Json, quoted};
use crate::netconf::NetConf;
use crate::request::{Bridged, Gateway, OwnPool};
use crate::result::{Route, RouteOptions};
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
}

/// Refuses the keys that mean nothing on a network of Calico's own plugin, where they could only be a misunderstanding.
///
/// # Errors
/// Code 7.
pub(crate) fn refuse_on_calico(conf: &NetConf) -> Result<()> {
    let keys = [("mask", &conf.ipam.mask), ("gateway", &conf.ipam.gateway), ("routes", &conf.ipam.routes)];
    match keys.into_iter().find(|(_, value)| value.is_some()) {
        None => Ok(()),
        Some((key, _)) => Err(CniError::config(format!("ipam.{key} cannot be used with \"type\": \"calico\""))
            .with_details("remove it: Calico's networks have no common subnet, gateway or routes")),
    }
}

impl BridgedSettings {
    /// Reads the settings.
    ///
    /// # Errors
    /// Code 7 for a setting that cannot be carried out.
    pub(crate) fn from_conf(conf: &NetConf) -> Result<Self> {
        let (own_pools, gateways) = own_pools(conf)?;
        let has_gateway = conf.plugin == "ptp"
            || (conf.plugin == "bridge" && (conf.is_gateway || conf.is_default_gateway))
            // host-local always names one, and whereabouts none that is not configured.
            || (!own_pools.is_empty() && !whereabouts::is_used(&conf.ipam.whereabouts));
        let default = if has_gateway { Gateway::First } else { Gateway::Recorded };
        let mut network = Bridged { gateway_v4: default, gateway_v6: default, own_pools };
        for address in gateways {
            *slot(&mut network, address) = Gateway::At(address);
        }
        read_gateway(conf.ipam.gateway.as_ref(), &mut network)?;
        Ok(Self { mask: read_mask(conf.ipam.mask.as_ref())?, routes: read_routes(conf.ipam.routes.as_ref())?, network })
    }
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

/// `"first"`, an address, or a list of at most one address per family. The empty text counts as absent, as for
/// host-local.
fn read_gateway(value: Option<&Json>, network: &mut Bridged) -> Result<()> {
    let Some(value) = value else { return Ok(()) };
    let mut seen = [false; 2];
    for element in value.one_or_many() {
        match element.as_str() {
            Some("") => {}
            Some("first") if !matches!(value, Json::Array(_)) => {
                (network.gateway_v4, network.gateway_v6) = (Gateway::First, Gateway::First);
            }
            _ => {
                let address = address_at(element, "ipam.gateway", " or \"first\"")?;
                let seen = if address.is_ipv4() { &mut seen[0] } else { &mut seen[1] };
                if std::mem::replace(seen, true) {
                    return Err(CniError::config("ipam.gateway has several addresses of one family"));
                }
                *slot(network, address) = Gateway::At(address);
            }
        }
    }
    Ok(())
}

fn read_routes(value: Option<&Json>) -> Result<Vec<Route>> {
    match value {
        None => Ok(Vec::new()),
        Some(Json::Array(elements)) => elements.iter().map(read_route).collect(),
        Some(_) => Err(CniError::config("ipam.routes must be a list of objects with a dst and, if wanted, a gw")),
    }
}

fn read_route(element: &Json) -> Result<Route> {
    let dst = element
        .member("dst")
        .and_then(Json::as_str)
        .ok_or_else(|| CniError::config("a route in ipam.routes has no dst"))?;
    let dst = dst.parse().map_err(|_| CniError::config(format!("ipam.routes: dst {} is not a CIDR", quoted(dst))))?;
    let gw = match element.member("gw") {
        None => None,
        Some(Json::String(text)) if text.is_empty() => None,
        Some(gw) => Some(address_at(gw, "ipam.routes: gw", "")?),
    };
    let number = |name: &str| match element.member(name) {
        None => Ok(None),
        Some(Json::Number(number)) if number.is_i64() => Ok(number.as_i64()),
        Some(_) => Err(CniError::config(format!("ipam.routes: {name} is not a whole number"))),
    };
    // 0 is no value for the first three, but one for a table and a scope.
    let positive = |name: &str| number(name).map(|number| number.filter(|number| *number != 0));
    let options = RouteOptions {
        mtu: positive("mtu")?,
        advmss: positive("advmss")?,
        priority: positive("priority")?,
        table: number("table")?,
        scope: number("scope")?,
    };
    Ok(Route { dst, gw, options })
}

pub(crate) fn address_at(value: &Json, setting: &str, or: &str) -> Result<IpAddr> {
    let wrong = |found: &str| CniError::config(format!("{setting} must be an address{or}, not {found}"));
    let text = value.as_str().ok_or_else(|| wrong(&format!("a JSON {}", value.kind())))?;
    parse_address(text, AddressForm::Bare).map_err(|_| wrong(&quoted(text)))
}

/// A range of a configuration.
#[derive(Debug)]
pub(crate) struct Range {
    pub(crate) subnet: IpNet,
    pub(crate) first: IpAddr,
    pub(crate) last: IpAddr,
    pub(crate) gateway: Option<IpAddr>,
}

/// The pools that the configuration defines itself, and the gateways that it names for them. As for host-local, the
/// ranges of the runtime come first, then `subnet` with its keys, then `ranges`.
fn own_pools(conf: &NetConf) -> Result<(Vec<OwnPool>, Vec<IpAddr>)> {
    let mut sets: Vec<Vec<Range>> = Vec::new();
    read_sets(conf.runtime_ranges.as_ref(), "runtimeConfig.ipRanges", &mut sets)?;
    if let Some(subnet) = &conf.ipam.subnet {
        sets.push(vec![read_range(subnet, conf.ipam.range_start.as_ref(), conf.ipam.range_end.as_ref(), None)?]);
    } else if conf.ipam.range_start.is_some() || conf.ipam.range_end.is_some() {
        return Err(CniError::config("ipam.rangeStart and ipam.rangeEnd need ipam.subnet"));
    }
    read_sets(conf.ipam.ranges.as_ref(), "ipam.ranges", &mut sets)?;
    let mut name = None;
    if whereabouts::is_used(&conf.ipam.whereabouts) {
        if !sets.is_empty() {
            return Err(CniError::config("ipam defines its addresses twice")
                .with_details("use either range and ipRanges (whereabouts), or subnet and ranges (host-local)"));
        }
        sets = whereabouts::read(&conf.ipam.whereabouts)?;
        name = whereabouts::network_name(&conf.ipam.whereabouts)?;
    }
    let mut pools: Vec<OwnPool> = Vec::new();
    let mut gateways = Vec::new();
    for set in sets {
        gateways.extend(set.iter().find_map(|range| range.gateway));
        let Some(mut pool) = pool_of(set)? else { continue };
        pool.name.clone_from(&name);
        if pools.iter().any(|other| other.subnet.addr().is_ipv4() == pool.subnet.addr().is_ipv4()) {
            return Err(one_pool("the configuration defines several pools of one family"));
        }
        pools.push(pool);
    }
    let names_others = !conf.ipam.ipv4_pools.is_empty() || !conf.ipam.ipv6_pools.is_empty();
    if !pools.is_empty() && names_others {
        return Err(CniError::config("ipam defines pools of its own and names others")
            .with_details("use either subnet, ranges or range, or ipv4_pools and ipv6_pools"));
    }
    Ok((pools, gateways))
}

fn one_pool(message: &str) -> CniError {
    CniError::config(message).with_details("a bridged network takes one subnet per family")
}

fn read_sets(value: Option<&Json>, setting: &str, sets: &mut Vec<Vec<Range>>) -> Result<()> {
    let wrong = || CniError::config(format!("{setting} must be a list of lists of objects with a subnet"));
    let Some(value) = value else { return Ok(()) };
    let Json::Array(elements) = value else { return Err(wrong()) };
    for element in elements {
        let Json::Array(ranges) = element else { return Err(wrong()) };
        let set = ranges.iter().map(|range| {
            let subnet = range.member("subnet").ok_or_else(wrong)?;
            read_range(subnet, range.member("rangeStart"), range.member("rangeEnd"), range.member("gateway"))
        });
        sets.push(set.collect::<Result<_>>()?);
    }
    Ok(())
}

fn read_range(subnet: &Json, first: Option<&Json>, last: Option<&Json>, gateway: Option<&Json>) -> Result<Range> {
    let text = subnet.as_str().unwrap_or_default();
    let subnet: IpNet = text.parse().map_err(|_| CniError::config(format!("subnet {} is not a CIDR", quoted(text))))?;
    if subnet.addr() != subnet.network() {
        let details = format!("write {}", subnet.trunc());
        return Err(CniError::config(format!("subnet {subnet} has host bits set")).with_details(details));
    }
    if subnet.prefix_len() > subnet.max_prefix_len() - 2 {
        return Err(CniError::config(format!("subnet {subnet} is too small to give out addresses")));
    }
    let given = |value: Option<&Json>, name: &str| match value {
        None => Ok(None),
        Some(Json::String(text)) if text.is_empty() => Ok(None),
        Some(value) => {
            let address = address_at(value, name, "")?;
            if subnet.contains(&address) {
                Ok(Some(address))
            } else {
                Err(CniError::config(format!("{name} {address} is not in subnet {subnet}")))
            }
        }
    };
    let (lowest, highest) = usable(subnet);
    let (first, last) = (given(first, "rangeStart")?.unwrap_or(lowest), given(last, "rangeEnd")?.unwrap_or(highest));
    if first > last {
        return Err(CniError::config(format!("rangeStart {first} is after rangeEnd {last}")));
    }
    // A gateway may be elsewhere: on a routed link it often is.
    let gateway = match gateway.map(Json::as_str) {
        None | Some(Some("")) => None,
        _ => gateway.map(|gateway| address_at(gateway, "gateway", "")).transpose()?,
    };
    Ok(Range { subnet, first, last, gateway })
}

/// The range from which host-local assigns in a subnet without further keys: all addresses but the first and, for IPv4,
/// the last.
fn usable(subnet: IpNet) -> (IpAddr, IpAddr) {
    match subnet {
        IpNet::V4(net) => {
            let (first, last) = (u32::from(net.network()), u32::from(net.broadcast()));
            (IpAddr::V4(first.saturating_add(1).into()), IpAddr::V4(last.saturating_sub(1).into()))
        }
        IpNet::V6(net) => {
            let first = u128::from(net.network()).saturating_add(1);
            (IpAddr::V6(first.into()), IpAddr::V6(net.broadcast()))
        }
    }
}

/// One pool from a set of ranges; none from an empty set.
fn pool_of(mut set: Vec<Range>) -> Result<Option<OwnPool>> {
    set.sort_by_key(|range| range.first);
    let Some(subnet) = set.first().map(|range| range.subnet) else { return Ok(None) };
    if let Some(other) = set.iter().find(|range| range.subnet != subnet) {
        return Err(one_pool(&format!("a set of ranges has the subnets {subnet} and {}", other.subnet)));
    }
    if let Some((a, b)) = set.iter().zip(set.iter().skip(1)).find(|(a, b)| b.first <= a.last) {
        let message = format!("the ranges {}-{} and {}-{} overlap", a.first, a.last, b.first, b.last);
        return Err(CniError::config(message));
    }
    Ok(Some(OwnPool { name: None, subnet, ranges: set.iter().map(|range| (range.first, range.last)).collect() }))
}

#[cfg(test)]
#[path = "bridged_tests.rs"]
mod tests;
