//! The kernel's replies about interfaces, addresses and routes.
//!
//! Only the few attributes that are needed are read, straight from the bytes: the whole parser of `netlink-packet-route`
//! knows every kind of interface and traffic control, and would make a plugin nearly 400 KB larger.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use netlink_packet_core::NlasIterator;
use nix::libc::{
    AF_INET, IFA_ADDRESS, IFA_LOCAL, IFF_UP, IFLA_ADDRESS, IFLA_IFNAME, IFLA_INFO_KIND, IFLA_LINK, IFLA_LINK_NETNSID,
    IFLA_LINKINFO, IFLA_MTU, RTA_DST, RTA_GATEWAY, RTA_OIF, RTA_TABLE,
};

use crate::error::Errno;

/// The sizes of `ifinfomsg`, `ifaddrmsg` and `rtmsg`, which stand in front of the attributes.
const LINK_HEADER: usize = 16;
const ADDRESS_HEADER: usize = 8;
const ROUTE_HEADER: usize = 12;

/// An interface.
#[derive(Debug, Default)]
pub(crate) struct Link {
    pub(crate) index: u32,
    pub(crate) name: String,
    pub(crate) up: bool,
    pub(crate) mac: Vec<u8>,
    pub(crate) mtu: u32,
    /// `veth` for example; empty for hardware.
    pub(crate) kind: String,
    /// The number of the interface on which this one stands, in whatever namespace that is: the other end of a pair.
    pub(crate) other: Option<u32>,
    /// True if that interface is in another network namespace.
    pub(crate) other_is_elsewhere: bool,
}

impl Link {
    /// Whether this is one end of a pair as this crate makes them.
    pub(crate) fn is_of_a_pair(&self) -> bool {
        matches!(self.kind.as_str(), "veth" | "netkit")
    }
}

/// An address of an interface.
pub(crate) struct Address {
    pub(crate) index: u32,
    pub(crate) address: IpAddr,
    pub(crate) prefix: u8,
}

/// A route.
pub(crate) struct Route {
    pub(crate) table: u32,
    pub(crate) destination: IpNet,
    pub(crate) scope: u8,
    pub(crate) next_hop: Option<IpAddr>,
    pub(crate) index: Option<u32>,
}

/// Reads an interface.
pub(crate) fn link(payload: &[u8]) -> Result<Link, Errno> {
    let mut link = Link { index: number(payload.get(4..))?, ..Link::default() };
    let flags = number(payload.get(8..))?;
    link.up = flags & IFF_UP.cast_unsigned() != 0;
    for (kind, value) in attributes(payload, LINK_HEADER) {
        match kind {
            IFLA_IFNAME => link.name = text(value),
            IFLA_ADDRESS => link.mac = value.to_vec(),
            IFLA_MTU => link.mtu = number(Some(value))?,
            IFLA_LINK_NETNSID => link.other_is_elsewhere = true,
            IFLA_LINK => link.other = Some(number(Some(value))?),
            IFLA_LINKINFO => {
                let kind = attributes(value, 0).find(|(kind, _)| *kind == IFLA_INFO_KIND);
                link.kind = kind.map(|(_, name)| text(name)).unwrap_or_default();
            }
            _ => {}
        }
    }
    Ok(link)
}

/// Reads an address of an interface.
pub(crate) fn address(payload: &[u8]) -> Result<Address, Errno> {
    let (mut local, mut address) = (None, None);
    for (kind, value) in attributes(payload, ADDRESS_HEADER) {
        match kind {
            IFA_LOCAL => local = ip(value),
            IFA_ADDRESS => address = ip(value),
            _ => {}
        }
    }
    // IPv4 has its own address in the first one, IPv6 has only the second one.
    let address = local.or(address).ok_or(Errno::GARBLED)?;
    let prefix = payload.get(1).copied().ok_or(Errno::GARBLED)?;
    Ok(Address { index: number(payload.get(4..))?, address, prefix })
}

/// Reads a route.
pub(crate) fn route(payload: &[u8]) -> Result<Route, Errno> {
    let &[family, prefix, _, _, table, _, scope, ..] = payload else { return Err(Errno::GARBLED) };
    let (mut to, mut table, mut next_hop, mut index) = (None, u32::from(table), None, None);
    for (kind, value) in attributes(payload, ROUTE_HEADER) {
        match kind {
            RTA_DST => to = ip(value),
            RTA_TABLE => table = number(Some(value))?,
            RTA_GATEWAY => next_hop = ip(value),
            RTA_OIF => index = Some(number(Some(value))?),
            _ => {}
        }
    }
    let everything: IpAddr =
        if i32::from(family) == AF_INET { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let destination = IpNet::new(to.unwrap_or(everything), prefix).map_err(|_| Errno::GARBLED)?;
    Ok(Route { table, destination, scope, next_hop, index })
}

/// The attributes behind a header, with their types.
pub(crate) fn attributes(payload: &[u8], header: usize) -> impl Iterator<Item = (u16, &[u8])> {
    let behind = payload.get(header..).unwrap_or_default();
    NlasIterator::new(behind).map_while(Result::ok).filter_map(|attribute| {
        // A slice of the payload itself, which lives longer than the attribute.
        let (kind, length) = (attribute.kind(), attribute.value_length());
        let value = attribute.into_inner().get(4..)?.get(..length)?;
        Some((kind, value))
    })
}

/// The number at the beginning of some bytes.
fn number(bytes: Option<&[u8]>) -> Result<u32, Errno> {
    bytes.and_then(<[u8]>::first_chunk).copied().map(u32::from_ne_bytes).ok_or(Errno::GARBLED)
}

/// A text that the kernel ends with a zero.
pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes.strip_suffix(&[0]).unwrap_or(bytes)).into_owned()
}

fn ip(bytes: &[u8]) -> Option<IpAddr> {
    let ipv4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    ipv4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}
