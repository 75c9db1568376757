//! The plan of one container's network.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;

/// The next hop of a container's IPv4 routes. No machine has it: the host's end answers for every address.
pub(crate) const IPV4_NEXT_HOP: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);

/// The plan of one container's network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The name of the end that stays on the host, for example `calic1`.
    pub host_interface: String,
    /// The fate of an interface of that name that is there already.
    pub old_interface: OldInterface,
    /// The name of the end in the container, `CNI_IFNAME`.
    pub interface: String,
    /// The MTU of both ends in bytes; 0 for what the kernel chooses.
    pub mtu: u32,
    /// How many queues both ends have to send, and how many to receive; 0 means 1.
    pub queues: u32,
    /// The kind of the pair.
    pub device: Device,
    /// The MAC address of the container's end; `None` for one that the kernel chooses. The kernel takes the first six
    /// bytes of a longer one.
    pub mac: Option<Vec<u8>>,
    /// The addresses of the container, as /32 and /128, in the order in which they are assigned.
    pub addresses: Vec<IpAddr>,
    /// Networks that the container has for itself: the host routes them to it, and what the container does not use of one
    /// is unreachable, so that packets to it do not go back and forth.
    pub prefixes: Vec<IpNet>,
    /// Where the container sends packets to the host. A route is used only if there is an address of its family.
    pub routes: Vec<IpNet>,
    /// Whether the container forwards packets between its interfaces.
    pub forwarding: Forwarding,
    /// How the container finds the next hop of its IPv4 routes.
    pub next_hop: NextHop,
}

/// The fate of an interface of the host that has the wanted name already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OldInterface {
    /// It is removed, whatever it is: the name is this workload's alone.
    Removed,
    /// It is removed unless its other end is in the network namespace of another container, which makes
    /// [`Error::Taken`](crate::Error::Taken).
    KeptIfInUse,
}

/// How a container finds the next hop of its IPv4 routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextHop {
    /// It asks by ARP, and the host's proxy ARP answers. The host must have a route to the next hop by another interface,
    /// which a default route is: so does Calico.
    Asked,
    /// It knows the MAC address of the host's end, so that it reaches a host without a default route, too.
    Known,
}

/// The kind of a pair of interfaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// A veth pair, which every kernel has.
    Veth,
    /// A netkit pair (Linux 6.7 and later), or a veth pair where the kernel has none.
    Netkit,
}

/// Whether a container forwards packets. It is set for the families of which the container has an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forwarding {
    /// Forward.
    On,
    /// Do not, even if the namespace did so before.
    Off,
}

impl Forwarding {
    /// The text for the kernel's settings.
    pub(crate) fn value(self) -> &'static str {
        match self {
            Self::On => "1",
            Self::Off => "0",
        }
    }
}

impl Plan {
    /// The networks that the host routes to the container: each address, and each prefix.
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

    /// The IPv4 routes of the container that lead through the host, if it has an IPv4 address.
    pub(crate) fn ipv4_routes(&self) -> impl Iterator<Item = IpNet> {
        let used = self.has_ipv4();
        self.routes.iter().filter(move |route| used && route.addr().is_ipv4()).map(IpNet::trunc)
    }

    /// The IPv6 routes of the container, if it has an IPv6 address.
    pub(crate) fn ipv6_routes(&self) -> impl Iterator<Item = IpNet> {
        let used = self.has_ipv6();
        self.routes.iter().filter(move |route| used && route.addr().is_ipv6()).map(IpNet::trunc)
    }
}
