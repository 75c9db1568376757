//! Defines the plan of one container's network.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;

/// The next hop of a container's IPv4 routes. No machine has this address, because the host's end answers for every
/// address.
pub(crate) const IPV4_NEXT_HOP: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);

/// The plan of one container's network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The name of the pair's end that stays on the host, for example `calic1`.
    pub host_interface: String,
    /// The treatment of an existing host interface with the name `host_interface`.
    pub old_interface: OldInterface,
    /// The name of the pair's end in the container, from `CNI_IFNAME`.
    pub interface: String,
    /// The MTU of both ends of the pair in bytes; 0 for the kernel's default.
    pub mtu: u32,
    /// Number of send queues and of receive queues of each end of the pair; 0 means 1.
    pub queues: u32,
    /// The kind of the pair of interfaces.
    pub device: Device,
    /// The MAC address of the container's end; `None` for the kernel's choice. The kernel uses the first six bytes of a
    /// longer address.
    pub mac: Option<Vec<u8>>,
    /// The addresses of the container, as /32 and /128, in the order in which they are added.
    pub addresses: Vec<IpAddr>,
    /// Networks that belong to the container as a whole. The host routes these networks to the container. In the
    /// container, the unused addresses of these networks are unreachable, so that packets to unused addresses do not
    /// loop between the container and the host.
    pub prefixes: Vec<IpNet>,
    /// Destinations that the container reaches through the host. A destination is ignored unless the container has an
    /// address of the same family.
    pub routes: Vec<IpNet>,
    /// Whether the container forwards packets between its interfaces.
    pub forwarding: Forwarding,
    /// How the container finds the next hop of its IPv4 routes.
    pub next_hop: NextHop,
}

/// The treatment of a host interface that already has the wanted name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OldInterface {
    /// The existing interface is always removed, because its name belongs to this workload only.
    Removed,
    /// The existing interface is removed, unless its other end is in the network namespace of another container. If
    /// another container has the other end, the call fails with [`Error::Taken`](crate::Error::Taken).
    KeptIfInUse,
}

/// How a container finds the next hop of its IPv4 routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextHop {
    /// The container finds the next hop by ARP, as with Calico, and the host's proxy ARP answers. Proxy ARP requires
    /// that the host has a route to the next hop by another interface, for example a default route.
    Asked,
    /// The container has a permanent neighbour entry with the MAC address of the host's end. A neighbour entry also
    /// works on a host without a default route.
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

/// Whether a container forwards packets. The setting applies to the address families in which the container has an
/// address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forwarding {
    /// The container forwards packets.
    On,
    /// The container does not forward packets, even if its namespace forwarded packets before.
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
