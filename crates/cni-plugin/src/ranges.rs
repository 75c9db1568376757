//! Parses the address ranges in a network configuration that uses the keys of host-local or of whereabouts, for example
//! the keys `range`, `range_start`, `range_end`, `exclude`, `ipRanges` and `network_name`.
//!
//! A range in whereabouts' notation may have host bits, or be written as `FIRST-LAST/LENGTH`. As in whereabouts, the
//! first and the last address of the range's network are never assigned. A container gets one address from each range
//! in whereabouts' notation.

use std::net::IpAddr;

use agent::{CniError, Result};
use ipam_core::net::{Family, bounds, number};
use ipnet::IpNet;

use crate::env::{AddressForm, parse_address};
use crate::gojson::{GoJson, quoted};
use crate::netconf::WhereaboutsConf;

/// Advice for the error that a gateway is outside of every IPv4 subnet of the network.
pub(crate) const GATEWAY_OUTSIDE: &str = "name one inside, or leave it out and name it as gw in ipam.routes";

/// True if a configuration value is present and is not an empty string.
pub(crate) fn is_given(value: Option<&GoJson>) -> bool {
    value.is_some_and(|value| value.as_str() != Some(""))
}

/// Parses an address. `setting` (the name of the setting) and `or` (what it accepts besides an address) only appear in
/// the error message.
///
/// # Errors
/// CNI error code 7 if the configured value is not an IP address.
pub(crate) fn address_at(value: &GoJson, setting: &str, or: &str) -> Result<IpAddr> {
    let wrong = |found: &str| CniError::config(format!("{setting} must be an address{or}, not {found}"));
    let text = value.as_str().ok_or_else(|| wrong(&format!("a JSON {}", value.kind())))?;
    parse_address(text, AddressForm::Bare).map_err(|_| wrong(&quoted(text)))
}

/// A range of assignable addresses, and the subnet that contains the range.
#[derive(Debug)]
pub(crate) struct AddressRange {
    pub(crate) subnet: IpNet,
    pub(crate) first: IpAddr,
    pub(crate) last: IpAddr,
    pub(crate) gateway: Option<IpAddr>,
}

/// Parses a setting of host-local, which is a list of lists of objects. Each inner list of the setting is appended to
/// `sets` as a set of ranges.
///
/// # Errors
/// CNI error code 7 for a malformed setting of host-local.
pub(crate) fn read_sets(value: Option<&GoJson>, setting: &str, sets: &mut Vec<Vec<AddressRange>>) -> Result<()> {
    let wrong = || CniError::config(format!("{setting} must be a list of lists of objects with a subnet"));
    let Some(value) = value else { return Ok(()) };
    let GoJson::Array(elements) = value else { return Err(wrong()) };
    for element in elements {
        let GoJson::Array(ranges) = element else { return Err(wrong()) };
        if ranges.is_empty() {
            return Err(CniError::config(format!("{setting} has an empty set of ranges")));
        }
        let set = ranges.iter().map(|range| {
            let subnet = range.member("subnet").ok_or_else(wrong)?;
            read_range(subnet, range.member("rangeStart"), range.member("rangeEnd"), range.member("gateway"))
        });
        sets.push(set.collect::<Result<_>>()?);
    }
    Ok(())
}

/// Parses one range of addresses in a subnet. By default, a range contains all usable addresses of its subnet.
///
/// # Errors
/// CNI error code 7 for a malformed range of addresses.
pub(crate) fn read_range(
    subnet: &GoJson,
    first: Option<&GoJson>,
    last: Option<&GoJson>,
    gateway: Option<&GoJson>,
) -> Result<AddressRange> {
    let text = subnet.as_str().ok_or_else(|| {
        CniError::config(format!("subnet must be a text, not a JSON {}", subnet.kind())).with_details(
            "several subnets are written as ranges: [[{\"subnet\": \"10.1.0.0/24\"}], [{\"subnet\": \"fd00::/64\"}]]",
        )
    })?;
    let subnet: IpNet = text.parse().map_err(|_| CniError::config(format!("subnet {} is not a CIDR", quoted(text))))?;
    if subnet.addr() != subnet.network() {
        let details = format!("write {}", subnet.trunc());
        return Err(CniError::config(format!("subnet {subnet} has host bits set")).with_details(details));
    }
    if subnet.prefix_len() > subnet.max_prefix_len() - 2 {
        return Err(CniError::config(format!("subnet {subnet} is too small for containers' addresses")));
    }
    let given = |value: Option<&GoJson>, name: &str| match value {
        None => Ok(None),
        Some(GoJson::String(text)) if text.is_empty() => Ok(None),
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
    let gateway = match gateway.map(GoJson::as_str) {
        None | Some(Some("")) => None,
        _ => gateway.map(|gateway| address_at(gateway, "gateway", "")).transpose()?,
    };
    match gateway {
        Some(gateway) if gateway.is_ipv4() != first.is_ipv4() => {
            return Err(of_another_family(gateway, subnet));
        }
        // An IPv6 gateway outside of the subnet is allowed, because many routers are known by their link-local address.
        Some(gateway) if gateway.is_ipv4() && !subnet.contains(&gateway) => {
            return Err(CniError::config(format!("gateway {gateway} is outside of subnet {subnet}"))
                .with_details(GATEWAY_OUTSIDE));
        }
        _ => {}
    }
    Ok(AddressRange { subnet, first, last, gateway })
}

pub(crate) fn of_another_family(gateway: IpAddr, subnet: IpNet) -> CniError {
    CniError::config(format!("gateway {gateway} is of another family than subnet {subnet}"))
}

/// Returns the range that host-local uses in a subnet by default: all addresses except the first and, for IPv4, except
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

/// True if the network configuration defines its addresses with the keys of whereabouts.
pub(crate) fn is_whereabouts(conf: &WhereaboutsConf) -> bool {
    has_elements(conf.ip_ranges.as_ref()) || is_given(conf.range.as_ref())
}

/// Returns the first whereabouts-only key in a configuration that has no whereabouts range. Without a range in
/// whereabouts' notation, the other keys of whereabouts have no effect.
pub(crate) fn key_without_range(conf: &WhereaboutsConf) -> Option<&'static str> {
    let keys = [
        ("range", conf.range.is_some()),
        ("ipRanges", conf.ip_ranges.is_some()),
        ("range_start", is_given(conf.range_start.as_ref())),
        ("range_end", is_given(conf.range_end.as_ref())),
        ("exclude", has_elements(conf.exclude.as_ref())),
    ];
    keys.into_iter().find(|(_, is_there)| *is_there).map(|(key, _)| key)
}

/// True if a configuration value is present and is not an empty list.
fn has_elements(value: Option<&GoJson>) -> bool {
    value.is_some_and(|value| *value != GoJson::Array(Vec::new()))
}

/// Returns the value of whereabouts' key `network_name`, or `None` if the value is empty.
///
/// # Errors
/// CNI error code 7 if `network_name` is not a string, or contains no letter or digit.
pub(crate) fn network_name(conf: &WhereaboutsConf) -> Result<Option<String>> {
    match &conf.network_name {
        None => Ok(None),
        Some(GoJson::String(name)) if name.is_empty() => Ok(None),
        Some(GoJson::String(name)) if name.contains(|c: char| c.is_ascii_alphanumeric()) => Ok(Some(name.clone())),
        Some(_) => Err(CniError::config("ipam.network_name must be a text with a letter or a digit")),
    }
}

/// Parses the sets of ranges in whereabouts' notation: one set for the key `range`, and one set for each element of
/// `ipRanges`. A set contains several ranges if an excluded network splits the configured range.
///
/// # Errors
/// CNI error code 7 for a malformed range, or for a range without an assignable address.
pub(crate) fn read_whereabouts(conf: &WhereaboutsConf) -> Result<Vec<Vec<AddressRange>>> {
    let mut sets = Vec::new();
    if conf.range.as_ref().is_some_and(|range| range.as_str().is_none()) {
        return Err(CniError::config("ipam.range must be a text"));
    }
    if let Some(range) = text_of(conf.range.as_ref()) {
        sets.push(read_whereabouts_range(
            range,
            conf.range_start.as_ref(),
            conf.range_end.as_ref(),
            conf.exclude.as_ref(),
        )?);
    }
    let wrong = || CniError::config("ipam.ipRanges must be a list of objects with a range");
    match &conf.ip_ranges {
        None => {}
        Some(GoJson::Array(elements)) => {
            for element in elements {
                let range = text_of(element.member("range")).ok_or_else(wrong)?;
                let [start, end, exclude] = ["range_start", "range_end", "exclude"].map(|name| element.member(name));
                sets.push(read_whereabouts_range(range, start, end, exclude)?);
            }
        }
        Some(_) => return Err(wrong()),
    }
    Ok(sets)
}

fn text_of(value: Option<&GoJson>) -> Option<&str> {
    value.and_then(GoJson::as_str).filter(|text| !text.is_empty())
}

fn read_whereabouts_range(
    range: &str,
    start: Option<&GoJson>,
    end: Option<&GoJson>,
    exclude: Option<&GoJson>,
) -> Result<Vec<AddressRange>> {
    let wrong = || {
        CniError::config(format!("ipam.range {} is not a range", quoted(range)))
            .with_details("write 10.0.0.0/24, or 10.0.0.10-10.0.0.99/24")
    };
    let (first, cidr) = range.split_once('-').map_or((None, range), |(first, cidr)| (Some(first), cidr));
    let cidr: IpNet = cidr.trim().parse().map_err(|_| wrong())?;
    let subnet = cidr.trunc();
    if subnet.prefix_len() > subnet.max_prefix_len() - 2 {
        return Err(CniError::config(format!("ipam.range {subnet} is too small for containers' addresses")));
    }
    let bound = |value: Option<&GoJson>, name: &str| {
        value.filter(|value| is_given(Some(value))).map(|value| address_at(value, name, "")).transpose()
    };
    let (mut from, mut to) = (bound(start, "ipam.range_start")?, bound(end, "ipam.range_end")?);
    if let Some(first) = first {
        from = Some(first.trim().parse().map_err(|_| wrong())?);
        to = Some(cidr.addr());
    }
    if let Some(address) = [from, to].into_iter().flatten().find(|address| !subnet.contains(address)) {
        return Err(CniError::config(format!("{address} is not in ipam.range {subnet}")));
    }
    let family = Family::of_net(subnet);
    let (network, broadcast) = bounds(subnet);
    let first = from.map_or(0, number).max(network + 1);
    let last = to.map_or(u128::MAX, number).min(broadcast - 1);
    let spans = without(first, last, excluded(exclude)?.into_iter().filter(|net| Family::of_net(*net) == family));
    if spans.is_empty() {
        return Err(CniError::config(format!("ipam.range {} has no address left that may be assigned", quoted(range)))
            .with_details("look at range_start, range_end and exclude"));
    }
    let range = |(first, last)| {
        Some(AddressRange { subnet, first: family.address(first)?, last: family.address(last)?, gateway: None })
    };
    Ok(spans.into_iter().filter_map(range).collect())
}

/// Parses the networks in whereabouts' key `exclude`. The address of an excluded network may have host bits. A single
/// address in `exclude` counts as a network with one address.
fn excluded(value: Option<&GoJson>) -> Result<Vec<IpNet>> {
    let wrong = |found: &str| CniError::config(format!("ipam.exclude: {found} is neither a network nor an address"));
    let elements = match value {
        None | Some(GoJson::Null) => &[],
        Some(GoJson::Array(elements)) => elements.as_slice(),
        Some(other) => return Err(wrong(&format!("a JSON {}", other.kind()))),
    };
    let read = |element: &GoJson| {
        let text = element.as_str().ok_or_else(|| wrong(&format!("a JSON {}", element.kind())))?;
        let net = text.parse::<IpNet>().or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
        net.map(|net| net.trunc()).map_err(|_| wrong(&quoted(text)))
    };
    elements.iter().map(read).collect()
}

/// Returns the parts of an address range that are outside of all excluded networks, in ascending order. In the
/// arguments and the result, IP addresses are represented as integers.
fn without(first: u128, last: u128, excluded: impl Iterator<Item = IpNet>) -> Vec<(u128, u128)> {
    let mut excluded: Vec<(u128, u128)> = excluded.map(bounds).collect();
    excluded.sort_unstable();
    let (mut spans, mut next) = (Vec::new(), first);
    for (low, high) in excluded.into_iter().take_while(|(low, _)| *low <= last) {
        if low > next {
            spans.push((next, low - 1));
        }
        next = next.max(high.saturating_add(1));
    }
    if next <= last {
        spans.push((next, last));
    }
    spans
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netconf::NetConf;

    fn conf(ipam: &str) -> WhereaboutsConf {
        let text = format!(r#"{{"ipam":{ipam}}}"#);
        NetConf::decode(&GoJson::parse(text.as_bytes()).unwrap()).unwrap().ipam.whereabouts
    }

    fn sets(ipam: &str) -> Vec<String> {
        let set = |set: &Vec<AddressRange>| {
            let spans: Vec<String> = set.iter().map(|range| format!("{}-{}", range.first, range.last)).collect();
            format!("{} {}", set[0].subnet, spans.join(","))
        };
        read_whereabouts(&conf(ipam)).unwrap().iter().map(set).collect()
    }

    #[test]
    fn ranges_are_read_as_whereabouts_reads_them() {
        assert_eq!(sets(r#"{"range":"192.168.2.225/28"}"#), ["192.168.2.224/28 192.168.2.225-192.168.2.238"]);
        assert_eq!(sets(r#"{"range":"10.0.0.9-10.0.0.20/24"}"#), ["10.0.0.0/24 10.0.0.9-10.0.0.20"]);
        assert_eq!(
            sets(r#"{"range":"10.0.0.0/24","range_start":"10.0.0.0","range_end":"10.0.0.255"}"#),
            ["10.0.0.0/24 10.0.0.1-10.0.0.254"],
            "the ends of the network are never assigned"
        );
        let both = r#"{"range":"10.0.0.0/24","range_end":"10.0.0.9","ipRanges":[{"range":"fd00::/120","range_start":"fd00::10"}]}"#;
        assert_eq!(sets(both), ["10.0.0.0/24 10.0.0.1-10.0.0.9", "fd00::/120 fd00::10-fd00::fe"]);
        assert_eq!(sets(r#"{"range":"","ipRanges":[{"range":"fd00::/120"}]}"#), ["fd00::/120 fd00::1-fd00::fe"]);
    }

    #[test]
    fn ranges_exclude_what_lies_between() {
        assert_eq!(
            sets(r#"{"range":"192.168.2.225/28","exclude":["192.168.2.236/32","192.168.2.229/30","fd00::/64"]}"#),
            ["192.168.2.224/28 192.168.2.225-192.168.2.227,192.168.2.232-192.168.2.235,192.168.2.237-192.168.2.238"]
        );
        assert_eq!(
            sets(r#"{"range":"10.0.0.0/29","exclude":["10.0.0.0/30","10.0.0.1","10.0.0.6"]}"#),
            ["10.0.0.0/29 10.0.0.4-10.0.0.5"]
        );
    }

    #[test]
    fn ranges_are_refused_when_malformed() {
        for (ipam, expected) in [
            (r#"{"range":"x"}"#, "ipam.range \"x\" is not a range"),
            (r#"{"range":["10.0.0.0/24"]}"#, "ipam.range must be a text"),
            (r#"{"range":"10.0.0.9-x/24"}"#, "is not a range"),
            (r#"{"range":"10.0.0.0/31"}"#, "ipam.range 10.0.0.0/31 is too small for containers' addresses"),
            (r#"{"range":"10.0.0.0/24","range_start":"10.0.1.1"}"#, "10.0.1.1 is not in ipam.range 10.0.0.0/24"),
            (r#"{"range":"10.1.0.9-10.0.0.20/24"}"#, "10.1.0.9 is not in ipam.range 10.0.0.0/24"),
            (r#"{"range":"10.0.0.0/24","range_start":1}"#, "ipam.range_start must be an address, not a JSON number"),
            (r#"{"range":"10.0.0.20-10.0.0.9/24"}"#, "has no address left that may be assigned"),
            (r#"{"range":"10.0.0.0/24","exclude":["10.0.0.0/8"]}"#, "has no address left that may be assigned"),
            (r#"{"range":"10.0.0.0/24","exclude":"10.0.0.1"}"#, "ipam.exclude: a JSON string is neither"),
            (r#"{"range":"10.0.0.0/24","exclude":["a"]}"#, "ipam.exclude: \"a\" is neither a network nor an address"),
            (r#"{"ipRanges":{}}"#, "ipam.ipRanges must be a list of objects with a range"),
            (r#"{"ipRanges":[{}]}"#, "ipam.ipRanges must be a list of objects with a range"),
        ] {
            let error = read_whereabouts(&conf(ipam)).unwrap_err();
            assert!(error.code().number() == 7 && error.message().contains(expected), "{ipam}: {}", error.message());
        }
        assert!(network_name(&conf(r#"{"network_name":"-"}"#)).is_err());
        assert_eq!(network_name(&conf(r#"{"network_name":""}"#)).unwrap(), None);
    }
}
