//! A program that creates a veth pair between its own and another network namespace, sets both ends up, and adds a
//! route in the other namespace: the minimum work of a main plugin. `floor-wire` sends one netlink message to the
//! kernel for each network namespace.
//!
//! Usage: floor-wire ADD|DEL NAMESPACE INTERFACE

use std::error::Error;
use std::fs::File;
use std::os::fd::AsRawFd;

use netlink_packet_core::{NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{InfoData, InfoKind, InfoVeth, LinkAttribute, LinkFlags, LinkInfo, LinkMessage};
use netlink_packet_route::route::{RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType};
use netlink_sys::{Socket, protocols::NETLINK_ROUTE};
use nix::net::if_::if_nametoindex;
use nix::sched::{CloneFlags, setns};

type Outcome = Result<(), Box<dyn Error>>;

fn main() -> Outcome {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [verb, namespace, interface] = arguments.as_slice() else {
        return Err("usage: floor-wire ADD|DEL NAMESPACE INTERFACE".into());
    };
    let host = Socket::new(NETLINK_ROUTE)?;
    match verb.as_str() {
        "ADD" => add(&host, namespace, interface),
        _ => {
            let mut message = LinkMessage::default();
            message.attributes.push(LinkAttribute::IfName(interface.clone()));
            ask(&host, RouteNetlinkMessage::DelLink(message), 0)
        }
    }
}

fn add(host: &Socket, namespace: &str, interface: &str) -> Outcome {
    let here = File::open("/proc/thread-self/ns/net")?;
    setns(File::open(format!("/run/netns/{namespace}"))?, CloneFlags::CLONE_NEWNET)?;
    let container = Socket::new(NETLINK_ROUTE)?;
    let mut peer = LinkMessage::default();
    peer.attributes = vec![LinkAttribute::IfName(interface.to_owned()), LinkAttribute::NetNsFd(here.as_raw_fd())];
    let mut pair = LinkMessage::default();
    pair.attributes = vec![
        LinkAttribute::IfName("eth0".to_owned()),
        LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Veth),
            LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(peer))),
        ]),
    ];
    ask(&container, RouteNetlinkMessage::NewLink(pair), NLM_F_CREATE | NLM_F_EXCL)?;
    let inside = if_nametoindex("eth0")?;
    setns(&here, CloneFlags::CLONE_NEWNET)?;
    ask(host, RouteNetlinkMessage::SetLink(up(if_nametoindex(interface)?)), 0)?;
    ask(&container, RouteNetlinkMessage::SetLink(up(inside)), 0)?;
    let mut route = RouteMessage::default();
    route.header.address_family = netlink_packet_route::AddressFamily::Inet;
    route.header.table = RouteHeader::RT_TABLE_MAIN;
    route.header.protocol = RouteProtocol::Boot;
    route.header.scope = RouteScope::Link;
    route.header.kind = RouteType::Unicast;
    route.attributes.push(RouteAttribute::Oif(inside));
    ask(&container, RouteNetlinkMessage::NewRoute(route), NLM_F_CREATE | NLM_F_EXCL)
}

fn up(index: u32) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.header.flags = LinkFlags::Up;
    message.header.change_mask = LinkFlags::Up;
    message
}

fn ask(socket: &Socket, request: RouteNetlinkMessage, flags: u16) -> Outcome {
    let mut message = NetlinkMessage::from(request);
    message.header.flags = NLM_F_REQUEST | NLM_F_ACK | flags;
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    socket.send(&bytes, 0)?;
    let mut answer = Vec::with_capacity(4096);
    socket.recv(&mut answer, 0)?;
    match NetlinkMessage::<RouteNetlinkMessage>::deserialize(&answer)?.payload {
        NetlinkPayload::Error(error) if error.code.is_some() => Err(error.to_io().into()),
        _ => Ok(()),
    }
}
