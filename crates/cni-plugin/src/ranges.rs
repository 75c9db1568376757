//! The ranges of addresses that a configuration names, in the words of host-local.

use std::net::IpAddr;

use agent::{CniError, Result};
use ipnet::IpNet;

use crate::args::{AddressForm, parse_address};
use crate::gojson::{Json, quoted};

/// Advice about an IPv4 gateway that lies in no subnet of the network.
pub(crate) const GATEWAY_OUTSIDE: &str = "name one inside, or leave it out and name it as gw in ipam.routes";

/// True for a value that is not the empty text.
pub(crate) fn is_given(value: Option<&Json>) -> bool {
    value.is_some_and(|value| value.as_str() != Some(""))
}

/// The address that a value is. `setting` and `or` are of the error: what must be an address, and what else it may be.
///
/// # Errors
/// Code 7.
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

/// Adds the sets of ranges of a setting in the words of host-local: a list of lists of objects.
///
/// # Errors
/// Code 7 for a setting that is none.
pub(crate) fn read_sets(value: Option<&Json>, setting: &str, sets: &mut Vec<Vec<Range>>) -> Result<()> {
    let wrong = || CniError::config(format!("{setting} must be a list of lists of objects with a subnet"));
    let Some(value) = value else { return Ok(()) };
    let Json::Array(elements) = value else { return Err(wrong()) };
    for element in elements {
        let Json::Array(ranges) = element else { return Err(wrong()) };
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

/// A range of a subnet; all usable addresses of it where its ends are not named.
///
/// # Errors
/// Code 7 for a range that is none.
pub(crate) fn read_range(
    subnet: &Json,
    first: Option<&Json>,
    last: Option<&Json>,
    gateway: Option<&Json>,
) -> Result<Range> {
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
    let gateway = match gateway.map(Json::as_str) {
        None | Some(Some("")) => None,
        _ => gateway.map(|gateway| address_at(gateway, "gateway", "")).transpose()?,
    };
    match gateway {
        Some(gateway) if gateway.is_ipv4() != first.is_ipv4() => {
            return Err(of_another_family(gateway, subnet));
        }
        // An IPv6 router is often known by its link-local address.
        Some(gateway) if gateway.is_ipv4() && !subnet.contains(&gateway) => {
            return Err(CniError::config(format!("gateway {gateway} is outside of subnet {subnet}"))
                .with_details(GATEWAY_OUTSIDE));
        }
        _ => {}
    }
    Ok(Range { subnet, first, last, gateway })
}

/// The error for a gateway that no subnet of the network can have.
pub(crate) fn of_another_family(gateway: IpAddr, subnet: IpNet) -> CniError {
    CniError::config(format!("gateway {gateway} is of another family than subnet {subnet}"))
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
