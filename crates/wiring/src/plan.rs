//! The plan of one container's network.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;

/// The next hop of a container's IPv4 routes. No machine has this address: the host's end answers for every address.
pub(crate) const IPV4_NEXT_HOP: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);

/// The plan of one container's network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The name of the end that stays on the host, for example `calic1`.
    pub host_interface: String,
    /// The treatment of an existing interface of that name.
    pub old_interface: OldInterface,
    /// The name of the end in the container, `CNI_IFNAME`.
    pub interface: String,
    /// The MTU of both ends in bytes; 0 for the kernel's default.
    pub mtu: u32,
    /// Number of send queues and of receive queues of both ends; 0 means 1.
    pub queues: u32,
    /// The kind of the pair.
    pub device: Device,
    /// The MAC address of the container's end; `None` for the kernel's choice. The kernel uses the first six bytes of a
    /// longer address.
    pub mac: Option<Vec<u8>>,
    /// The addresses of the container, as /32 and /128, in the order in which they are added.
    pub addresses: Vec<IpAddr>,
    /// Networks that belong to the container as a whole. The host routes them to the container. Unused addresses of a
    /// network are unreachable in the container, so that packets to them do not go back and forth.
    pub prefixes: Vec<IpNet>,
    /// Destinations that the container reaches through the host. A route is used only if the container has an address
    /// of its family.
    pub routes: Vec<IpNet>,
    /// Whether the container forwards packets between its interfaces.
    pub forwarding: Forwarding,
    /// How the container finds the next hop of its IPv4 routes.
    pub next_hop: NextHop,
}

/// The treatment of a host interface that already has the wanted name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OldInterface {
    /// The interface is removed, whatever it is: the name belongs to this workload only.
    Removed,
    /// The interface is removed, unless its other end is in the network namespace of another container. In that case
    /// the call fails with [`Error::Taken`](crate::Error::Taken).
    KeptIfInUse,
}

/// How a container finds the next hop of its IPv4 routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextHop {
    /// By ARP. The host's proxy ARP answers, which requires that the host has a route to the next hop by another
    /// interface, for example a default route. Calico works like this.
    Asked,
    /// By a permanent neighbour entry with the MAC address of the host's end. This also works on a host without a
    /// default route.
    Known,
}

/// The kind of a pair of interfaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// A veth pair, which every kernel has.
    Veth,
    /// A netkit pair (Linux 6.7 and later), or a veth pair if the kernel does not support netkit.
    Netkit,
}

/// Whether a container forwards packets. The setting applies to the families in which the container has an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forwarding {
    /// The container forwards packets.
    On,
    /// The container does not forward packets, even if its namespace did before.
    Off,
}

impl Forwarding {
    /// Returns the value for the kernel's settings.
    pub(crate) fn value(self) -> &'static str {
        match self {
            Self::On => "1",
            Self::Off => "0",
        }
    }
}

impl Plan {
    /// Returns the networks that the host routes to the container: each address and each prefix.
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

    /// Returns the IPv4 routes of the container through the host, if the container has an IPv4 address.
    pub(crate) fn ipv4_routes(&self) -> impl Iterator<Item = IpNet> {
        let used = self.has_ipv4();
        self.routes.iter().filter(move |route| used && route.addr().is_ipv4()).map(IpNet::trunc)
    }

    /// Returns the IPv6 routes of the container through the host, if the container has an IPv6 address.
    pub(crate) fn ipv6_routes(&self) -> impl Iterator<Item = IpNet> {
        let used = self.has_ipv6();
        self.routes.iter().filter(move |route| used && route.addr().is_ipv6()).map(IpNet::trunc)
    }
}
