//! Encodes netlink requests for interfaces, addresses and routes, and decodes the kernel's replies.
//!
//! This module reads only the few attributes that the crate needs, directly from the bytes of a reply. The full parser
//! of `netlink-packet-route` supports every kind of interface and traffic control, and would make a plugin's binary
//! nearly 400 KB larger.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd;

use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE, NlasIterator};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoNetkit, InfoVeth, LinkAttribute, LinkExtentMask, LinkFlags, LinkInfo, LinkMessage,
    NetkitMode,
};
use netlink_packet_route::neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use nix::libc::{
    AF_INET, IFA_ADDRESS, IFA_LOCAL, IFF_UP, IFLA_ADDRESS, IFLA_IFNAME, IFLA_INFO_KIND, IFLA_LINK, IFLA_LINK_NETNSID,
    IFLA_LINKINFO, IFLA_MTU, RTA_DST, RTA_GATEWAY, RTA_OIF, RTA_TABLE, RTM_DELLINK, RTM_GETADDR, RTM_GETLINK,
    RTM_GETROUTE, RTM_NEWADDR, RTM_NEWLINK, RTM_NEWNEIGH, RTM_NEWROUTE, RTM_SETLINK,
};

use crate::error::Errno;
use crate::namespace::NetNamespace;
use crate::netlink::NetlinkRequest;
use crate::plan::{Device, Plan};

/// The MAC address of the host's end of every interface pair. All host ends may have the same MAC address, because no
/// two of them are on the same link.
pub(crate) const HOST_MAC: [u8; 6] = [0xee; 6];

/// Returns the request that creates the interface pair of a plan. The request for a veth pair must be sent in the
/// container's network namespace. The request for a netkit pair must be sent in the host's network namespace, because
/// the first end of a netkit pair must be the host's end. The request names the network namespace for the pair's second
/// end: the host's for a veth pair, the container's for a netkit pair.
pub(crate) fn pair(plan: &Plan, device: Device, host: &NetNamespace, container: &NetNamespace) -> NetlinkRequest {
    let queues = plan.queues.max(1);
    let mut both = vec![LinkAttribute::NumTxQueues(queues), LinkAttribute::NumRxQueues(queues)];
    if plan.mtu != 0 {
        both.push(LinkAttribute::Mtu(plan.mtu));
    }
    let mut host_end = LinkMessage::default();
    host_end.attributes = vec![
        LinkAttribute::IfName(plan.host_interface.clone()),
        LinkAttribute::TxQueueLen(0),
        LinkAttribute::Address(HOST_MAC.to_vec()),
    ];
    host_end.attributes.extend_from_slice(&both);
    let mut end = LinkMessage::default();
    end.attributes = vec![LinkAttribute::IfName(plan.interface.clone())];
    end.attributes.append(&mut both);

    let (mut first, kind, data) = match device {
        Device::Veth => {
            host_end.attributes.push(LinkAttribute::NetNsFd(host.file().as_raw_fd()));
            (end, InfoKind::Veth, InfoData::Veth(InfoVeth::Peer(host_end)))
        }
        Device::Netkit => {
            end.attributes.push(LinkAttribute::NetNsFd(container.file().as_raw_fd()));
            (
                host_end,
                InfoKind::Netkit,
                InfoData::Netkit(vec![InfoNetkit::Mode(NetkitMode::L2), InfoNetkit::Peer(end)]),
            )
        }
    };
    first.attributes.push(LinkAttribute::LinkInfo(vec![LinkInfo::Kind(kind), LinkInfo::Data(data)]));
    NetlinkRequest::change(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, &first)
}

pub(crate) fn look_up(name: &str) -> NetlinkRequest {
    let mut message = without_statistics();
    message.attributes.push(LinkAttribute::IfName(name.to_owned()));
    NetlinkRequest::tell(RTM_GETLINK, &message)
}

pub(crate) fn link_by_number(index: u32) -> NetlinkRequest {
    let mut message = without_statistics();
    message.header.index = index;
    NetlinkRequest::tell(RTM_GETLINK, &message)
}

pub(crate) fn interfaces() -> NetlinkRequest {
    NetlinkRequest::tell(RTM_GETLINK, &without_statistics())
}

fn without_statistics() -> LinkMessage {
    let mut message = LinkMessage::default();
    message.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
    message
}

pub(crate) fn remove_named(name: &str) -> NetlinkRequest {
    let mut message = LinkMessage::default();
    message.attributes.push(LinkAttribute::IfName(name.to_owned()));
    NetlinkRequest::change(RTM_DELLINK, 0, &message)
}

pub(crate) fn remove(index: u32) -> NetlinkRequest {
    NetlinkRequest::change(RTM_DELLINK, 0, &interface(index))
}

pub(crate) fn up(index: u32) -> NetlinkRequest {
    let mut message = interface(index);
    message.header.flags = LinkFlags::Up;
    message.header.change_mask = LinkFlags::Up;
    NetlinkRequest::change(RTM_SETLINK, 0, &message)
}

pub(crate) fn down(index: u32) -> NetlinkRequest {
    let mut message = interface(index);
    message.header.change_mask = LinkFlags::Up;
    NetlinkRequest::change(RTM_SETLINK, 0, &message)
}

pub(crate) fn mac(index: u32, mac: &[u8]) -> NetlinkRequest {
    let mut message = interface(index);
    message.attributes.push(LinkAttribute::Address(mac.to_vec()));
    NetlinkRequest::change(RTM_SETLINK, 0, &message)
}

fn interface(index: u32) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message
}

/// Returns the request that adds an address with prefix length 32 or 128 to an interface.
pub(crate) fn address(index: u32, address: IpAddr) -> NetlinkRequest {
    let mut message = AddressMessage::default();
    message.header.family = family(address);
    message.header.prefix_len = IpNet::from(address).prefix_len();
    message.header.index = index;
    message.attributes = vec![AddressAttribute::Local(address), AddressAttribute::Address(address)];
    NetlinkRequest::change(RTM_NEWADDR, NLM_F_CREATE | NLM_F_EXCL, &message)
}

/// Returns the request that lists an interface's addresses of one address family. A kernel before 4.20 ignores the
/// interface in the request and lists the addresses of all interfaces.
pub(crate) fn addresses(index: u32, family: AddressFamily) -> NetlinkRequest {
    let mut message = AddressMessage::default();
    message.header.family = family;
    message.header.index = index;
    NetlinkRequest::tell(RTM_GETADDR, &message)
}

/// Returns the request that adds a route to the main table; packets to the destination leave directly by an interface.
pub(crate) fn route(destination: IpNet, index: u32) -> NetlinkRequest {
    new_route(destination, index, RouteScope::Link, None)
}

/// Returns the request that adds a route to the main table; packets to the destination leave through a next hop.
pub(crate) fn route_via(destination: IpNet, next_hop: IpAddr, index: u32) -> NetlinkRequest {
    new_route(destination, index, RouteScope::Universe, Some(next_hop))
}

/// Returns the request that adds a route to the main table; packets to the network are rejected unless a more specific
/// route matches.
pub(crate) fn unreachable(destination: IpNet) -> NetlinkRequest {
    let message = route_message(destination, RouteScope::Universe, RouteType::Unreachable);
    NetlinkRequest::change(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_REPLACE, &message)
}

fn route_message(destination: IpNet, scope: RouteScope, kind: RouteType) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header.address_family = family(destination.addr());
    message.header.destination_prefix_length = destination.prefix_len();
    message.header.table = RouteHeader::RT_TABLE_MAIN;
    message.header.protocol = RouteProtocol::Boot;
    message.header.scope = scope;
    message.header.kind = kind;
    message.attributes = vec![RouteAttribute::Destination(RouteAddress::from(destination.addr()))];
    message
}

fn new_route(destination: IpNet, index: u32, scope: RouteScope, next_hop: Option<IpAddr>) -> NetlinkRequest {
    let mut message = route_message(destination, scope, RouteType::Unicast);
    message.attributes.extend(next_hop.map(|hop| RouteAttribute::Gateway(RouteAddress::from(hop))));
    message.attributes.push(RouteAttribute::Oif(index));
    NetlinkRequest::change(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_EXCL, &message)
}

/// Returns the request that adds a permanent neighbour entry, which maps an IPv4 address to a MAC address.
pub(crate) fn neighbour(index: u32, address: Ipv4Addr, mac: &[u8]) -> NetlinkRequest {
    let mut message = NeighbourMessage::default();
    message.header.family = AddressFamily::Inet;
    message.header.ifindex = index;
    message.header.state = NeighbourState::Permanent;
    message.header.kind = RouteType::Unicast;
    message.attributes = vec![
        NeighbourAttribute::Destination(NeighbourAddress::Inet(address)),
        NeighbourAttribute::LinkLayerAddress(mac.to_vec()),
    ];
    NetlinkRequest::change(RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_REPLACE, &message)
}

/// Returns the request that lists the main table's routes of one address family. A kernel before 4.20 ignores the table
/// in the request and lists the routes of all tables.
pub(crate) fn routes(family: AddressFamily) -> NetlinkRequest {
    let mut message = RouteMessage::default();
    message.header.address_family = family;
    message.header.table = RouteHeader::RT_TABLE_MAIN;
    NetlinkRequest::tell(RTM_GETROUTE, &message)
}

pub(crate) fn family(address: IpAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 }
}

/// Sizes in bytes of the headers `ifinfomsg`, `ifaddrmsg` and `rtmsg`, which precede the attributes in a reply.
const LINK_HEADER_BYTES: usize = 16;
const ADDRESS_HEADER_BYTES: usize = 8;
const ROUTE_HEADER_BYTES: usize = 12;

/// The attributes of a network interface that this crate reads.
#[derive(Debug, Default)]
pub(crate) struct Link {
    pub(crate) index: u32,
    pub(crate) name: String,
    pub(crate) up: bool,
    pub(crate) mac: Vec<u8>,
    pub(crate) mtu: u32,
    /// The kernel's name for the interface's kind, for example `veth`; empty for a hardware interface.
    pub(crate) kind: String,
    /// The index of the linked interface, in the linked interface's own network namespace. For an interface of a pair,
    /// the linked interface is the other end of the pair.
    pub(crate) other: Option<u32>,
    /// Whether the linked interface is in another network namespace.
    pub(crate) other_is_elsewhere: bool,
}

impl Link {
    /// Returns whether this interface belongs to a veth or netkit pair.
    pub(crate) fn is_of_a_pair(&self) -> bool {
        matches!(self.kind.as_str(), "veth" | "netkit")
    }
}

pub(crate) struct InterfaceAddress {
    pub(crate) index: u32,
    pub(crate) address: IpAddr,
    pub(crate) prefix: u8,
}

pub(crate) struct Route {
    pub(crate) table: u32,
    pub(crate) destination: IpNet,
    pub(crate) scope: u8,
    pub(crate) next_hop: Option<IpAddr>,
    pub(crate) index: Option<u32>,
}

pub(crate) fn read_link(payload: &[u8]) -> Result<Link, Errno> {
    let mut link = Link { index: number(payload.get(4..))?, ..Link::default() };
    let flags = number(payload.get(8..))?;
    link.up = flags & IFF_UP.cast_unsigned() != 0;
    for (kind, value) in attributes(payload, LINK_HEADER_BYTES) {
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

pub(crate) fn read_address(payload: &[u8]) -> Result<InterfaceAddress, Errno> {
    let (mut local, mut address) = (None, None);
    for (kind, value) in attributes(payload, ADDRESS_HEADER_BYTES) {
        match kind {
            IFA_LOCAL => local = ip(value),
            IFA_ADDRESS => address = ip(value),
            _ => {}
        }
    }
    // For IPv4, the attribute `IFA_LOCAL` contains the interface's own address. For IPv6, the interface's own address
    // is in `IFA_ADDRESS`, and there is no `IFA_LOCAL`.
    let address = local.or(address).ok_or(Errno::GARBLED)?;
    let prefix = payload.get(1).copied().ok_or(Errno::GARBLED)?;
    Ok(InterfaceAddress { index: number(payload.get(4..))?, address, prefix })
}

pub(crate) fn read_route(payload: &[u8]) -> Result<Route, Errno> {
    let &[family, prefix, _, _, table, _, scope, ..] = payload else { return Err(Errno::GARBLED) };
    let (mut to, mut table, mut next_hop, mut index) = (None, u32::from(table), None, None);
    for (kind, value) in attributes(payload, ROUTE_HEADER_BYTES) {
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

/// Iterates over the attributes that follow a header, as pairs of attribute type and value.
pub(crate) fn attributes(payload: &[u8], header: usize) -> impl Iterator<Item = (u16, &[u8])> {
    let behind = payload.get(header..).unwrap_or_default();
    NlasIterator::new(behind).map_while(Result::ok).filter_map(|attribute| {
        // Return the value as a slice of the payload, because the payload lives longer than the attribute.
        let (kind, length) = (attribute.kind(), attribute.value_length());
        let value = attribute.into_inner().get(4..)?.get(..length)?;
        Some((kind, value))
    })
}

/// Reads a `u32` in native byte order from the first bytes of a slice.
fn number(bytes: Option<&[u8]>) -> Result<u32, Errno> {
    bytes.and_then(<[u8]>::first_chunk).copied().map(u32::from_ne_bytes).ok_or(Errno::GARBLED)
}

/// Decodes a string, and drops the zero byte at its end.
pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes.strip_suffix(&[0]).unwrap_or(bytes)).into_owned()
}

fn ip(bytes: &[u8]) -> Option<IpAddr> {
    let ipv4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    ipv4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}
