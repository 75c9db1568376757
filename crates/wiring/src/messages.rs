//! The requests for interfaces, addresses and routes.

use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsRawFd;

use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
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
    RTM_DELLINK, RTM_GETADDR, RTM_GETLINK, RTM_GETROUTE, RTM_NEWADDR, RTM_NEWLINK, RTM_NEWNEIGH, RTM_NEWROUTE,
    RTM_SETLINK,
};

use crate::namespace::Namespace;
use crate::netlink::Request;
use crate::plan::{Device, Plan};

/// The MAC address of every host end. It needs no address of its own, since no network has more than one of them.
pub(crate) const HOST_MAC: [u8; 6] = [0xee; 6];

/// The pair of a plan. The namespaces are those of the end that is not where the request goes: a veth pair is asked for
/// in the container, a netkit pair on the host, whose end must be the first.
pub(crate) fn pair(plan: &Plan, device: Device, host: &Namespace, container: &Namespace) -> Request {
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
    Request::change(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, &first)
}

/// Tells of the interface with a name.
pub(crate) fn look_up(name: &str) -> Request {
    let mut message = without_statistics();
    message.attributes.push(LinkAttribute::IfName(name.to_owned()));
    Request::tell(RTM_GETLINK, &message)
}

/// Tells of the interface with a number.
pub(crate) fn link_by_number(index: u32) -> Request {
    let mut message = without_statistics();
    message.header.index = index;
    Request::tell(RTM_GETLINK, &message)
}

/// Lists all interfaces.
pub(crate) fn interfaces() -> Request {
    Request::tell(RTM_GETLINK, &without_statistics())
}

fn without_statistics() -> LinkMessage {
    let mut message = LinkMessage::default();
    message.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
    message
}

/// Removes the interface with a name.
pub(crate) fn remove_named(name: &str) -> Request {
    let mut message = LinkMessage::default();
    message.attributes.push(LinkAttribute::IfName(name.to_owned()));
    Request::change(RTM_DELLINK, 0, &message)
}

/// Removes an interface.
pub(crate) fn remove(index: u32) -> Request {
    Request::change(RTM_DELLINK, 0, &interface(index))
}

/// Sets an interface up.
pub(crate) fn up(index: u32) -> Request {
    let mut message = interface(index);
    message.header.flags = LinkFlags::Up;
    message.header.change_mask = LinkFlags::Up;
    Request::change(RTM_SETLINK, 0, &message)
}

/// Sets an interface down.
pub(crate) fn down(index: u32) -> Request {
    let mut message = interface(index);
    message.header.change_mask = LinkFlags::Up;
    Request::change(RTM_SETLINK, 0, &message)
}

/// Gives an interface a MAC address.
pub(crate) fn mac(index: u32, mac: &[u8]) -> Request {
    let mut message = interface(index);
    message.attributes.push(LinkAttribute::Address(mac.to_vec()));
    Request::change(RTM_SETLINK, 0, &message)
}

fn interface(index: u32) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message
}

/// Adds an address to an interface, as /32 or /128.
pub(crate) fn address(index: u32, address: IpAddr) -> Request {
    let mut message = AddressMessage::default();
    message.header.family = family(address);
    message.header.prefix_len = IpNet::from(address).prefix_len();
    message.header.index = index;
    message.attributes = vec![AddressAttribute::Local(address), AddressAttribute::Address(address)];
    Request::change(RTM_NEWADDR, NLM_F_CREATE | NLM_F_EXCL, &message)
}

/// Lists the addresses of a family that an interface has. A kernel before 4.20 lists those of all interfaces.
pub(crate) fn addresses(index: u32, family: AddressFamily) -> Request {
    let mut message = AddressMessage::default();
    message.header.family = family;
    message.header.index = index;
    Request::tell(RTM_GETADDR, &message)
}

/// Adds a route to the main table that leads straight to an interface.
pub(crate) fn route(destination: IpNet, index: u32) -> Request {
    new_route(destination, index, RouteScope::Link, None)
}

/// Adds a route to the main table that leads through a next hop.
pub(crate) fn route_via(destination: IpNet, next_hop: IpAddr, index: u32) -> Request {
    new_route(destination, index, RouteScope::Universe, Some(next_hop))
}

/// Makes the main table refuse packets to a network, unless a route to a part of it takes them.
pub(crate) fn unreachable(destination: IpNet) -> Request {
    let message = route_message(destination, RouteScope::Universe, RouteType::Unreachable);
    Request::change(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_REPLACE, &message)
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

fn new_route(destination: IpNet, index: u32, scope: RouteScope, next_hop: Option<IpAddr>) -> Request {
    let mut message = route_message(destination, scope, RouteType::Unicast);
    message.attributes.extend(next_hop.map(|hop| RouteAttribute::Gateway(RouteAddress::from(hop))));
    message.attributes.push(RouteAttribute::Oif(index));
    Request::change(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_EXCL, &message)
}

/// Tells an interface the MAC address of a neighbour for good.
pub(crate) fn neighbour(index: u32, address: Ipv4Addr, mac: &[u8]) -> Request {
    let mut message = NeighbourMessage::default();
    message.header.family = AddressFamily::Inet;
    message.header.ifindex = index;
    message.header.state = NeighbourState::Permanent;
    message.header.kind = RouteType::Unicast;
    message.attributes = vec![
        NeighbourAttribute::Destination(NeighbourAddress::Inet(address)),
        NeighbourAttribute::LinkLayerAddress(mac.to_vec()),
    ];
    Request::change(RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_REPLACE, &message)
}

/// Lists the routes of a family in the main table. A kernel before 4.20 lists those of all tables.
pub(crate) fn routes(family: AddressFamily) -> Request {
    let mut message = RouteMessage::default();
    message.header.address_family = family;
    message.header.table = RouteHeader::RT_TABLE_MAIN;
    Request::tell(RTM_GETROUTE, &message)
}

/// The family of an address.
pub(crate) fn family(address: IpAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 }
}
