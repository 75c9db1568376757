//! Defines the plan of one container's network: interfaces, addresses, routes and settings.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;

/// The next hop of a container's IPv4 routes. No machine has this next-hop address; the host's end of the interface
/// pair answers ARP requests for every address.
pub(crate) const IPV4_NEXT_HOP: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);

/// The plan of one container's network: interfaces, addresses, routes and settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The name of the interface that stays on the host, for example `calic1`.
    pub host_interface: String,
    /// What to do with an existing host interface that has the name `host_interface`.
    pub old_interface: OldInterface,
    /// The name of the interface in the container, from `CNI_IFNAME`.
    pub interface: String,
    /// The MTU in bytes of both ends of the interface pair; 0 for the kernel's default.
    pub mtu: u32,
    /// Number of send queues, and also of receive queues, of each end of the interface pair; 0 means 1.
    pub queues: u32,
    /// The kind of the interface pair: veth or netkit.
    pub device: Device,
    /// The MAC address of the interface in the container; `None` if the kernel is to choose one. Of a MAC address
    /// longer than six bytes, the kernel uses the first six bytes.
    pub mac: Option<Vec<u8>>,
    /// The addresses of the container, each as /32 or /128, in the order in which they are added.
    pub addresses: Vec<IpAddr>,
    /// Networks (prefixes) that are assigned to the container as a whole. The host routes the container's prefixes to
    /// the container. In the container, packets to unused addresses of its prefixes are rejected, so that such packets
    /// do not loop between the container and the host.
    pub prefixes: Vec<IpNet>,
    /// Destinations to which the container gets a route through the host. Destinations of an address family in which
    /// the container has no address are ignored.
    pub routes: Vec<IpNet>,
    /// Whether the container forwards packets between its interfaces.
    pub forwarding: Forwarding,
    /// How the container finds the next hop of its IPv4 routes.
    pub next_hop: NextHop,
}

/// What to do with an existing host interface that has the wanted name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OldInterface {
    /// An interface that already has the host end's name is always removed, because only this container can have an
    /// interface of that name.
    Removed,
    /// An interface that already has the host end's name is removed, unless its peer is in the network namespace of
    /// another container. If that peer is in another container, the call fails with
    /// [`Error::Taken`](crate::Error::Taken).
    KeptIfInUse,
}

/// How a container finds the next hop of its IPv4 routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextHop {
    /// As with Calico, the container finds the next hop by ARP, and the host's proxy ARP answers. For proxy ARP, the
    /// host needs a route to the next hop by another interface, for example a default route.
    Asked,
    /// The container gets a permanent neighbour entry that maps the next hop to the MAC address of the host's end. A
    /// permanent neighbour entry also works if the host has no default route.
    Known,
}

/// The kind of an interface pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// A veth pair, which every kernel supports.
    Veth,
    /// A netkit pair (Linux 6.7 and later), or a veth pair if the kernel does not support netkit.
    Netkit,
}

/// Whether a container forwards packets between its interfaces. The forwarding setting applies to each address family
/// in which the container has an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forwarding {
    /// The container forwards packets between its interfaces.
    On,
    /// The container does not forward packets; if forwarding is on in its network namespace, it is turned off.
    Off,
}

impl Forwarding {
    /// Returns the value to write to the kernel's forwarding settings.
    pub(crate) fn value(self) -> &'static str {
        match self {
            Self::On => "1",
            Self::Off => "0",
        }
    }
}

impl Plan {
    /// Returns the destinations that the host routes to the container: each address and each prefix of the container.
    pub(crate) fn reached(&self) -> Vec<IpNet> {
        let addresses = self.addresses.iter().copied().map(IpNet::from);
        addresses.chain(self.prefixes.iter().copied()).collect()
    }

    pub(crate) fn has_ipv4(&self) -> bool {
        self.addresses.iter().any(IpAddr::is_ipv4)
    }

    pub(crate) fn has_ipv6(&self) -> bool {
        self.addresses.iter().any(IpAddr::is_ipv6)
    }

    /// Returns the destinations of the container's IPv4 routes through the host. A container without an IPv4 address
    /// has no IPv4 routes.
    pub(crate) fn ipv4_routes(&self) -> impl Iterator<Item = IpNet> {
        let used = self.has_ipv4();
        self.routes.iter().filter(move |route| used && route.addr().is_ipv4()).map(IpNet::trunc)
    }

    /// Returns the destinations of the container's IPv6 routes through the host. A container without an IPv6 address
    /// has no IPv6 routes.
    pub(crate) fn ipv6_routes(&self) -> impl Iterator<Item = IpNet> {
        let used = self.has_ipv6();
        self.routes.iter().filter(move |route| used && route.addr().is_ipv6()).map(IpNet::trunc)
    }
}
