//! Compares a container's actual network with its plan.

use std::net::IpAddr;
use std::path::Path;
use std::time::Instant;

use ipnet::IpNet;
use netlink_packet_route::AddressFamily;

use crate::connect::{link_local_addresses, main_table, scope_is_link};
use crate::error::{Errno, Error};
use crate::link::{look_up, mac_text};
use crate::messages::{self, Link, Route};
use crate::namespace::{NetNamespace, run_in_thread};
use crate::netlink::NetlinkSocket;
use crate::plan::{IPV4_NEXT_HOP, Plan};
use crate::sysctl;

/// Compares the network of a container with the container's plan, and changes nothing. Returns one message for each
/// difference from the plan. An empty result means that the network is as [`connect`](crate::connect) has set it up.
///
/// # Errors
///
/// The network namespace cannot be entered, the kernel does not answer, or the deadline passes.
pub fn inspect(namespace: &Path, plan: &Plan, deadline: Instant) -> Result<Vec<String>, Error> {
    let container = NetNamespace::open(namespace)?;
    let plan = plan.clone();
    let late = || Error::TimedOut(format!("timed out inspecting device {:?} in netns", plan.interface));
    let work = Inspection { plan: plan.clone(), container, differences: Vec::new() };
    run_in_thread(deadline, late, move |outcome| drop(outcome.send(work.run())))
}

struct Inspection {
    plan: Plan,
    container: NetNamespace,
    differences: Vec<String>,
}

impl Inspection {
    fn run(mut self) -> Result<Vec<String>, Error> {
        let host = NetlinkSocket::route()?;
        let host_end = self.host_end(&host)?;
        self.container.enter()?;
        let container = NetlinkSocket::route()?;
        let end = self.container_end(&container, host_end.as_ref())?;
        if let Some(end) = &end {
            self.addresses(&container, end.index)?;
            self.container_routes(&container, end.index, &host, host_end.as_ref())?;
        }
        let forwarding = self.plan.forwarding.value();
        if self.plan.has_ipv4() {
            self.setting("in the container", "ipv4/ip_forward", forwarding);
        }
        if self.plan.has_ipv6() {
            self.setting("in the container", "ipv6/conf/all/forwarding", forwarding);
        }
        Ok(self.differences)
    }

    /// Compares the host's end of the interface pair with the plan. The calling thread must be in the host's network
    /// namespace.
    fn host_end(&mut self, host: &NetlinkSocket) -> Result<Option<Link>, Error> {
        let name = self.plan.host_interface.clone();
        let Some(link) = find(host, &name)? else {
            self.differ(format!("interface {name} is missing on the host"));
            return Ok(None);
        };
        self.link("on the host", &link);
        for family in self.families() {
            let routes = main_table(host, family).map_err(unanswered)?;
            let there = |to: IpNet, route: &Route| {
                route.destination == to && route.index == Some(link.index) && scope_is_link(route)
            };
            for to in self.plan.reached().into_iter().filter(|to| messages::family(to.addr()) == family) {
                if !routes.iter().any(|route| there(to, route)) {
                    self.differ(format!("the route to {to} by {name} is missing on the host"));
                }
            }
        }
        if self.plan.has_ipv4() {
            for key in ["route_localnet", "proxy_arp", "forwarding"] {
                self.setting("on the host", &format!("ipv4/conf/{name}/{key}"), "1");
            }
        }
        if self.plan.has_ipv6() {
            for (key, value) in [("disable_ipv6", "0"), ("proxy_ndp", "1"), ("forwarding", "1")] {
                self.setting("on the host", &format!("ipv6/conf/{name}/{key}"), value);
            }
        }
        Ok(Some(link))
    }

    fn container_end(&mut self, container: &NetlinkSocket, host_end: Option<&Link>) -> Result<Option<Link>, Error> {
        let name = self.plan.interface.clone();
        let Some(link) = find(container, &name)? else {
            self.differ(format!("interface {name} is missing in the container"));
            return Ok(None);
        };
        self.link("in the container", &link);
        // Only the first six bytes of the plan's MAC address are compared, because the kernel keeps no more.
        if let Some(wanted) = &self.plan.mac
            && wanted.get(..link.mac.len()) != Some(link.mac.as_slice())
        {
            let (has, wanted) = (mac_text(&link.mac), mac_text(wanted));
            self.differ(format!("interface {name} in the container has the MAC address {has} instead of {wanted}"));
        }
        if let Some(host_end) = host_end
            && host_end.other.is_some_and(|other| other != link.index)
        {
            let host_name = &host_end.name;
            self.differ(format!("interface {host_name} on the host is not the other end of {name} in the container"));
        }
        Ok(Some(link))
    }

    /// Checks the properties that both ends of the interface pair must have.
    fn link(&mut self, place: &str, link: &Link) {
        let name = &link.name;
        if !link.is_of_a_pair() {
            self.differ(format!("interface {name} {place} is not an end of a veth or netkit pair"));
        }
        if !link.up {
            self.differ(format!("interface {name} {place} is down"));
        }
        if self.plan.mtu != 0 && link.mtu != self.plan.mtu {
            let (has, wanted) = (link.mtu, self.plan.mtu);
            self.differ(format!("interface {name} {place} has the MTU {has} instead of {wanted}"));
        }
    }

    fn addresses(&mut self, container: &NetlinkSocket, index: u32) -> Result<(), Error> {
        let mut found = Vec::new();
        for family in self.families() {
            for payload in container.list(&messages::addresses(index, family)).map_err(unanswered)? {
                let listed = messages::read_address(&payload).map_err(unanswered)?;
                if listed.index == index {
                    found.push((listed.address, listed.prefix));
                }
            }
        }
        for address in self.plan.addresses.clone() {
            let wanted = IpNet::from(address);
            if !found.contains(&(address, wanted.prefix_len())) {
                self.differ(format!("address {wanted} is missing on {} in the container", self.plan.interface));
            }
        }
        Ok(())
    }

    fn container_routes(
        &mut self,
        container: &NetlinkSocket,
        index: u32,
        host: &NetlinkSocket,
        host_end: Option<&Link>,
    ) -> Result<(), Error> {
        // With an IPv4 address, the container has a route to the next hop itself. For IPv6, the next hop may be any
        // link-local address of the host's end.
        let mut wanted: Vec<(IpNet, Option<Vec<IpAddr>>)> = Vec::new();
        if self.plan.has_ipv4() {
            wanted.push((IpAddr::from(IPV4_NEXT_HOP).into(), None));
        }
        wanted.extend(self.plan.ipv4_routes().map(|route| (route, Some(vec![IPV4_NEXT_HOP.into()]))));
        if let Some(host_end) = host_end
            && self.plan.has_ipv6()
        {
            let hops: Vec<IpAddr> =
                link_local_addresses(host, host_end.index).map_err(unanswered)?.into_iter().map(IpAddr::from).collect();
            wanted.extend(self.plan.ipv6_routes().map(|route| (route, Some(hops.clone()))));
        }

        let mut there = Vec::new();
        for family in self.families() {
            there.extend(main_table(container, family).map_err(unanswered)?);
        }
        for (to, hops) in wanted {
            let as_wanted = |route: &Route| {
                route.destination == to
                    && route.index == Some(index)
                    && match (&hops, route.next_hop) {
                        (None, None) => true,
                        (Some(hops), Some(hop)) => hops.contains(&hop),
                        _ => false,
                    }
            };
            if !there.iter().any(as_wanted) {
                self.differ(format!("the route to {to} by {} is missing in the container", self.plan.interface));
            }
        }
        Ok(())
    }

    /// Compares a kernel setting (sysctl) in this thread's network namespace with the wanted value.
    fn setting(&mut self, place: &str, key: &str, wanted: &str) {
        let is = sysctl::read(key).unwrap_or_else(|| "unknown".to_owned());
        if is != wanted {
            let name = key.replace('/', ".");
            self.differ(format!("the setting net.{name} {place} is {is} instead of {wanted}"));
        }
    }

    /// Returns the address families in which the container has an address.
    fn families(&self) -> impl Iterator<Item = AddressFamily> + use<> {
        let families = [(self.plan.has_ipv4(), AddressFamily::Inet), (self.plan.has_ipv6(), AddressFamily::Inet6)];
        families.into_iter().filter_map(|(wanted, family)| wanted.then_some(family))
    }

    fn differ(&mut self, sentence: String) {
        self.differences.push(sentence);
    }
}

/// Returns the interface with this name, or `None` if there is no such interface.
fn find(socket: &NetlinkSocket, name: &str) -> Result<Option<Link>, Error> {
    match look_up(socket, name) {
        Ok(link) => Ok(Some(link)),
        Err(Errno::NO_DEVICE) => Ok(None),
        Err(errno) => Err(unanswered(errno)),
    }
}

fn unanswered(errno: Errno) -> Error {
    Error::failed("failed to read the network from the kernel", errno)
}
