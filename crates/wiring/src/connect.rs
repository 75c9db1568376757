//! Connects a container to its host with a pair of interfaces, and adds the host's routes to the container.

use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use netlink_packet_route::AddressFamily;
use nix::libc::{RT_SCOPE_HOST, RT_SCOPE_LINK, RT_SCOPE_NOWHERE, RT_SCOPE_SITE, RT_SCOPE_UNIVERSE, RT_TABLE_MAIN};

use crate::error::{Errno, Error};
use crate::link::{check_name, look_up, mac_text, not_found};
use crate::messages::{self, HOST_MAC, Link, Route};
use crate::namespace::{NetNamespace, run_in_thread};
use crate::netlink::{NetlinkRequest, NetlinkSocket};
use crate::plan::{Device, IPV4_NEXT_HOP, NextHop, OldInterface, Plan};
use crate::sysctl;

/// The link-local address of every host end: the kernel derives it (EUI-64) from the MAC address that all host ends
/// have.
const HOST_LINK_LOCAL: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0xecee, 0xeeff, 0xfeee, 0xeeee);

/// Time limit for the host's end of the pair to get the requested MAC address; Calico's plugin has the same limit.
const MAC_TIMEOUT: Duration = Duration::from_secs(5);
/// How long to wait until the kernel has assigned a link-local address to the host's end of the pair. Calico's plugin
/// waits 500 ms, which is too short for a machine under load.
const LINK_LOCAL_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the host's end of the pair stays down, so that the kernel assigns a new link-local address to it.
const DOWN_INTERVAL: Duration = Duration::from_millis(50);

/// The result of [`connect`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectResult {
    /// The MAC address of the pair's end in the container, in lower case with colons. If [`Plan::mac`] has more than
    /// six bytes, the result contains all of them, although the kernel uses only the first six.
    pub mac: String,
}

/// Connects a container to its host with a new pair of interfaces.
///
/// First removes an existing host interface that has the name of the pair's host end, if [`Plan::old_interface`]
/// permits the removal. If a step after the creation of the new pair fails, this function removes the new pair of
/// interfaces with its addresses and routes. The function removes no interfaces except the old host interface and the
/// new pair.
///
/// # Errors
///
/// [`Error::Failed`] for the first step that failed, with the message of Calico's plugin. [`Error::Taken`] if another
/// container has the host interface. [`Error::TimedOut`] after the deadline. After the deadline, a background thread
/// removes the new pair of interfaces when the kernel permits the removal. If the process ends before the background
/// thread has removed the pair, the pair remains.
pub fn connect(namespace: &Path, plan: &Plan, deadline: Instant) -> Result<ConnectResult, Error> {
    for name in [&plan.host_interface, &plan.interface] {
        check_name(name).map_err(|errno| Error::failed("", errno))?;
    }
    let container = NetNamespace::open(namespace)?;
    let work = ConnectTask { plan: plan.clone(), container, host: NetNamespace::own()?, deadline };
    let late = || late(&plan.interface);
    run_in_thread(deadline, late, move |outcome| match work.run() {
        Ok((wired, pair)) => {
            if outcome.send(Ok(wired)).is_ok() {
                pair.keep();
            }
        }
        Err(error) => drop(outcome.send(Err(error))),
    })
}

fn late(interface: &str) -> Error {
    Error::TimedOut(format!("timed out setting up device {interface:?} in netns"))
}

/// A newly created pair of interfaces. Dropping this value removes the interfaces, unless [`keep`](Self::keep) was
/// called.
struct InterfacePair {
    container: NetlinkSocket,
    end: Link,
    kept: bool,
}

impl InterfacePair {
    fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for InterfacePair {
    fn drop(&mut self) {
        if !self.kept
            && let Err(errno) = self.container.one(messages::remove(self.end.index))
            && errno != Errno::NO_DEVICE
        {
            tracing::warn!(
                interface = self.end.name,
                %errno,
                "cannot remove the container's veth or netkit pair after a failed ADD; the pair stays until DEL"
            );
        }
    }
}

struct HostEnd {
    index: u32,
    /// The link-local address at which the container reaches the host. `None` if the kernel chose the MAC address of
    /// the host's end, so that its link-local address cannot be predicted.
    link_local: Option<Ipv6Addr>,
}

struct ConnectTask {
    plan: Plan,
    container: NetNamespace,
    host: NetNamespace,
    deadline: Instant,
}

impl ConnectTask {
    /// Carries out all steps of [`connect`], on a thread that is in the host's network namespace at the start. The
    /// steps have the same order as in Calico's plugin: an interface is configured before it is set up, and the
    /// container's routes are added before its addresses.
    fn run(&self) -> Result<(ConnectResult, InterfacePair), Error> {
        let (plan, host) = (&self.plan, NetlinkSocket::route()?);
        self.remove_old(&host)?;
        self.container.enter()?;
        let pair = self.make_pair(&host)?;
        let host_end = self.host_end(&host)?;
        if plan.has_ipv6() {
            let key = format!("ipv6/conf/{}/accept_dad", plan.interface);
            let failed = |reason| Error::failed(&format!("failed to disable DAD for {}", plan.interface), reason);
            sysctl::write(&key, "0").map_err(failed)?;
        }
        self.in_time()?;

        self.host.enter()?;
        self.set_up_host(&host, &host_end)?;
        self.container.enter()?;
        self.set_up_container(&host, &host_end, &pair)?;
        add_host_routes(&host, &plan.host_interface, host_end.index, &plan.reached())?;
        self.in_time()?;
        let mac = mac_text(plan.mac.as_ref().unwrap_or(&pair.end.mac));
        Ok((ConnectResult { mac }, pair))
    }

    fn in_time(&self) -> Result<(), Error> {
        if Instant::now() < self.deadline { Ok(()) } else { Err(late(&self.plan.interface)) }
    }

    fn remove_old(&self, host: &NetlinkSocket) -> Result<(), Error> {
        let name = &self.plan.host_interface;
        let failed = |errno| Error::failed(&format!("failed to delete old hostVeth {name}"), errno);
        let old = match look_up(host, name) {
            Ok(old) => old,
            Err(Errno::NO_DEVICE) => return Ok(()),
            Err(errno) => return Err(failed(errno)),
        };
        if self.plan.old_interface == OldInterface::KeptIfInUse && self.belongs_to_another(&old)? {
            return Err(Error::Taken(format!("interface {name} on the host belongs to another container")));
        }
        match host.one(messages::remove(old.index)) {
            Ok(_) | Err(Errno::NO_DEVICE) => Ok(()),
            Err(errno) => Err(failed(errno)),
        }
    }

    /// Returns whether an interface of the host belongs to a pair whose other end is in another container. When this
    /// function returns, the thread may be in the container's network namespace instead of the host's.
    fn belongs_to_another(&self, old: &Link) -> Result<bool, Error> {
        if !old.is_of_a_pair() || !old.other_is_elsewhere {
            return Ok(false);
        }
        self.container.enter()?;
        match look_up(&NetlinkSocket::route()?, &self.plan.interface) {
            Ok(end) => Ok(end.other != Some(old.index) || old.other != Some(end.index)),
            Err(_) => Ok(true),
        }
    }

    /// Creates the plan's pair of interfaces. The calling thread must be in the container's network namespace.
    fn make_pair(&self, host: &NetlinkSocket) -> Result<InterfacePair, Error> {
        let container = NetlinkSocket::route()?;
        let request = |device| messages::pair(&self.plan, device, &self.host, &self.container);
        let refused = |errno: Errno| Error::failed("", errno);
        if self.plan.device == Device::Netkit {
            match host.one(request(Device::Netkit)) {
                Ok(_) => {
                    let found = look_up(&container, &self.plan.interface);
                    return self.pair_of(container, found);
                }
                Err(Errno::NOT_SUPPORTED) => {}
                Err(errno) => return Err(refused(errno)),
            }
        }
        // The netlink message contains two requests: to create the pair, and to look up the index of the container's
        // end. If the name was already taken, the lookup finds that older interface. This is harmless, because the
        // kernel has then refused to create the pair.
        let mut answers = container
            .exchange(&[request(Device::Veth), messages::look_up(&self.plan.interface)])
            .map_err(refused)?
            .into_iter();
        answers.next().unwrap_or(Err(Errno::GARBLED)).map_err(refused)?;
        let found = answers.next().unwrap_or(Err(Errno::GARBLED)).and_then(|payload| messages::read_link(&payload));
        self.pair_of(container, found)
    }

    /// Returns the new pair of interfaces, given the result of looking up the container's end.
    fn pair_of(&self, container: NetlinkSocket, found: Result<Link, Errno>) -> Result<InterfacePair, Error> {
        let name = &self.plan.interface;
        match found {
            Ok(end) => Ok(InterfacePair { container, end, kept: false }),
            Err(errno) => {
                // The interface name was free before the pair was created, so the interface that now has the name is
                // the container's end of the new pair.
                let _ = container.one(messages::remove_named(name));
                Err(not_found(name, errno))
            }
        }
    }

    /// Finds the host's end of the pair, and makes sure that it has the MAC address [`HOST_MAC`]. The pair was created
    /// with [`HOST_MAC`], but other software on the host may have changed the address since.
    fn host_end(&self, host: &NetlinkSocket) -> Result<HostEnd, Error> {
        let name = &self.plan.host_interface;
        let find = || look_up(host, name).map_err(|errno| not_found(name, errno));
        let mut link = find()?;
        let mut pauses = Backoff::new(Duration::from_millis(1), Duration::from_millis(100), MAC_TIMEOUT, self.deadline);
        while link.mac != HOST_MAC {
            if let Err(errno) = host.one(messages::mac(link.index, &HOST_MAC)) {
                tracing::warn!(
                    interface = name,
                    %errno,
                    "cannot set the MAC address of the host interface; keeping the MAC address that the kernel chose"
                );
                return Ok(HostEnd { index: link.index, link_local: None });
            }
            link = find()?;
            if link.mac != HOST_MAC && !pauses.pause() {
                let mac = mac_text(&HOST_MAC);
                let text = format!("timed out waiting for host-side interface {name:?} to accept MAC {mac}");
                return Err(Error::TimedOut(text));
            }
        }
        Ok(HostEnd { index: link.index, link_local: Some(HOST_LINK_LOCAL) })
    }

    /// Applies the settings of the host's end of the pair, and sets that interface up. The calling thread must be in
    /// the host's network namespace.
    fn set_up_host(&self, host: &NetlinkSocket, end: &HostEnd) -> Result<(), Error> {
        let name = &self.plan.host_interface;
        let failed = |reason| Error::failed(&format!("error configuring sysctls for interface: {name}, error"), reason);
        let unless_refused = |key: &str, value| {
            if let Err(reason) = sysctl::set(key, value) {
                tracing::warn!("{reason}");
            }
        };
        if self.plan.has_ipv4() {
            sysctl::set(&format!("ipv4/conf/{name}/route_localnet"), "1").map_err(failed)?;
            unless_refused(&format!("ipv4/neigh/{name}/proxy_delay"), "0");
            sysctl::set(&format!("ipv4/conf/{name}/proxy_arp"), "1").map_err(failed)?;
            sysctl::set(&format!("ipv4/conf/{name}/forwarding"), "1").map_err(failed)?;
        }
        if self.plan.has_ipv6() {
            for (key, value) in [("accept_dad", "0"), ("disable_ipv6", "0"), ("proxy_ndp", "1"), ("forwarding", "1")] {
                sysctl::set(&format!("ipv6/conf/{name}/{key}"), value).map_err(failed)?;
            }
        }
        unless_refused(&format!("ipv6/conf/{name}/accept_ra"), "0");
        host.all(&[set_up(end.index, name)]).map(drop)
    }

    /// Sets the container's end of the pair up, and adds the container's routes and addresses. The calling thread must
    /// be in the container's network namespace.
    fn set_up_container(&self, host: &NetlinkSocket, host_end: &HostEnd, pair: &InterfacePair) -> Result<(), Error> {
        let (plan, index) = (&self.plan, pair.end.index);
        let mut requests = vec![set_up(index, &plan.interface)];
        if let Some(mac) = &plan.mac {
            let failure = format!(
                "failed to set container-side interface MAC to {} as requested via cni.projectcalico.org/hwAddr",
                mac_text(mac)
            );
            requests.push(messages::mac(index, mac).with_failure(failure));
        }
        if plan.has_ipv4() {
            let failure = "failed to add route inside the container".to_owned();
            requests.push(messages::route(IpAddr::from(IPV4_NEXT_HOP).into(), index).with_failure(failure));
        }
        // If the MAC address of the host's end is not [`HOST_MAC`], add no neighbour entry: the container then finds
        // the next hop by ARP.
        if plan.has_ipv4() && plan.next_hop == NextHop::Known && host_end.link_local.is_some() {
            let failure = format!("failed to tell the container how to reach {IPV4_NEXT_HOP}");
            requests.push(messages::neighbour(index, IPV4_NEXT_HOP, &HOST_MAC).with_failure(failure));
        }
        for route in plan.ipv4_routes() {
            let failure = format!("failed to add IPv4 route for {route} via {IPV4_NEXT_HOP}");
            requests.push(messages::route_via(route, IPV4_NEXT_HOP.into(), index).with_failure(failure));
        }
        if plan.has_ipv6() {
            pair.container.all(&requests)?;
            requests.clear();
            for interface in ["all", "default", "lo"] {
                let key = format!("ipv6/conf/{interface}/disable_ipv6");
                sysctl::set(&key, "0").map_err(Error::Failed)?;
            }
            let next_hop = self.link_local(host, host_end)?;
            for route in plan.ipv6_routes() {
                let failure = format!("failed to add IPv6 route for {route} via {next_hop}");
                requests.push(messages::route_via(route, next_hop.into(), index).with_failure(failure));
            }
        }
        for address in &plan.addresses {
            let failure = format!("failed to add IP addr to {:?}", plan.interface);
            requests.push(messages::address(index, *address).with_failure(failure));
        }
        for prefix in &plan.prefixes {
            let failure = format!("failed to add route for what the container does not use of {prefix}");
            requests.push(messages::unreachable(*prefix).with_failure(failure));
        }
        pair.container.all(&requests)?;

        let families = [(plan.has_ipv4(), "ipv4/ip_forward"), (plan.has_ipv6(), "ipv6/conf/all/forwarding")];
        for (_, key) in families.into_iter().filter(|(wanted, _)| *wanted) {
            let failed = |reason| Error::failed("error configuring sysctls for the container netns, error", reason);
            sysctl::write(key, plan.forwarding.value()).map_err(failed)?;
        }
        Ok(())
    }

    /// Waits until the host's end has the IPv6 link-local address at which the container reaches the host.
    fn link_local(&self, host: &NetlinkSocket, end: &HostEnd) -> Result<Ipv6Addr, Error> {
        let mut pauses =
            Backoff::new(Duration::from_millis(1), Duration::from_millis(50), LINK_LOCAL_TIMEOUT, self.deadline);
        loop {
            let found = link_local_addresses(host, end.index).map_err(|errno| {
                Error::failed("failed to get IPv6 addresses for host side of the pod interface", errno)
            })?;
            match (found.first(), end.link_local) {
                (Some(first), None) => return Ok(*first),
                (Some(_), Some(wanted)) if found.contains(&wanted) => return Ok(wanted),
                (Some(_), Some(_)) => self.renew_link_local(host, end)?,
                (None, _) => {}
            }
            if !pauses.pause() {
                return Err(Error::TimedOut(found.first().map_or_else(
                    || "failed to get IPv6 addresses for host side of the pod interface".to_owned(),
                    |wrong| format!("host-side interface got wrong link-local IP address: {wrong}"),
                )));
            }
        }
    }

    /// Sets the host's end down and up, so that the kernel assigns a new link-local address to it.
    fn renew_link_local(&self, host: &NetlinkSocket, end: &HostEnd) -> Result<(), Error> {
        let name = &self.plan.host_interface;
        let down = messages::down(end.index).with_failure(format!("failed to set {name:?} down"));
        let mac = messages::mac(end.index, &HOST_MAC).with_failure(format!("failed to set MAC of {name:?}"));
        host.all(&[down, mac])?;
        sleep(DOWN_INTERVAL);
        host.all(&[set_up(end.index, name)]).map(drop)
    }
}

fn set_up(index: u32, name: &str) -> NetlinkRequest {
    messages::up(index).with_failure(format!("failed to set {name:?} up"))
}

/// Lists the IPv6 link-local addresses of an interface.
pub(crate) fn link_local_addresses(socket: &NetlinkSocket, index: u32) -> Result<Vec<Ipv6Addr>, Errno> {
    let mut found = Vec::new();
    for payload in socket.list(&messages::addresses(index, AddressFamily::Inet6))? {
        let listed = messages::read_address(&payload)?;
        if let IpAddr::V6(address) = listed.address
            && listed.index == index
            && address.is_unicast_link_local()
        {
            found.push(address);
        }
    }
    Ok(found)
}

/// Adds a host route to the container for each of the container's addresses and prefixes.
///
/// Felix adds the same routes and may be faster, so it is no error if an identical route exists. If the route to one
/// address exists, this function continues with the other addresses, unlike Calico's plugin. This function also adds
/// the routes that Calico's plugin leaves to Felix.
///
/// # Errors
///
/// The kernel refuses a route, or there is already a different route to the same destination.
fn add_host_routes(host: &NetlinkSocket, name: &str, index: u32, reached: &[IpNet]) -> Result<(), Error> {
    let requests: Vec<NetlinkRequest> = reached.iter().map(|network| messages::route(*network, index)).collect();
    let failed =
        |reason: String| Error::failed(&format!("error adding host side routes for interface: {name}, error"), reason);
    let answers = host.exchange(&requests).map_err(|errno| failed(errno.to_string()))?;
    for (&destination, answer) in reached.iter().zip(answers) {
        match answer {
            Ok(_) => {}
            Err(Errno::EXISTS) => find_conflict(host, name, index, destination).map_err(failed)?,
            Err(errno) => {
                let route = format!("Ifindex: {index}, Dst: {destination}, Scope: link, Iface: {name}");
                return Err(failed(format!("failed to add route ({route}): {errno}")));
            }
        }
    }
    Ok(())
}

/// Checks that the existing route to a destination is identical to the route that was to be added. If a different route
/// to the destination exists, the error names it.
fn find_conflict(host: &NetlinkSocket, name: &str, index: u32, destination: IpNet) -> Result<(), String> {
    let mut other = String::new();
    for route in
        main_table(host, messages::family(destination.addr())).map_err(|_| "error listing routes".to_owned())?
    {
        if route.destination != destination {
            continue;
        }
        if route.index == Some(index) && scope_is_link(&route) {
            return Ok(());
        }
        if other.is_empty() {
            let at = route.index.unwrap_or_default();
            let interface = look_up_by_number(host, at).map_or_else(|| "unknown".to_owned(), |link| link.name);
            let scope = scope_text(route.scope);
            other = format!("route (Ifindex: {at}, Dst: {destination}, Scope: {scope}, Iface: {interface})");
        }
    }
    Err(format!(
        "route (Ifindex: {index}, Dst: {destination}, Scope: link) already exists for an interface other than '{name}': {other}"
    ))
}

/// Returns whether a host route has the same scope as the routes that this crate adds. Returns true for every IPv6
/// route, because the kernel has no link scope for IPv6.
pub(crate) fn scope_is_link(route: &Route) -> bool {
    route.scope == RT_SCOPE_LINK || route.destination.addr().is_ipv6()
}

/// Lists the routes of one address family in the main routing table.
pub(crate) fn main_table(socket: &NetlinkSocket, family: AddressFamily) -> Result<Vec<Route>, Errno> {
    let mut routes = Vec::new();
    for payload in socket.list(&messages::routes(family))? {
        let route = messages::read_route(&payload)?;
        if route.table == u32::from(RT_TABLE_MAIN) {
            routes.push(route);
        }
    }
    Ok(routes)
}

fn look_up_by_number(socket: &NetlinkSocket, index: u32) -> Option<Link> {
    messages::read_link(&socket.one(messages::link_by_number(index)).ok()?).ok()
}

/// Returns a route's scope in the spelling of Go's netlink library.
fn scope_text(scope: u8) -> String {
    match scope {
        RT_SCOPE_UNIVERSE => "universe".to_owned(),
        RT_SCOPE_SITE => "site".to_owned(),
        RT_SCOPE_LINK => "link".to_owned(),
        RT_SCOPE_HOST => "host".to_owned(),
        RT_SCOPE_NOWHERE => "nowhere".to_owned(),
        other => other.to_string(),
    }
}

/// Increasing pauses between repeated checks of a condition. Starts with a short pause, because the kernel usually
/// needs only a moment. The pause between two checks doubles each time, up to `longest`.
struct Backoff {
    next: Duration,
    longest: Duration,
    until: Instant,
}

impl Backoff {
    /// Creates a series of pauses that ends after `patience`, or at the deadline if the deadline is earlier.
    pub(crate) fn new(first: Duration, longest: Duration, patience: Duration, deadline: Instant) -> Self {
        let now = Instant::now();
        let until = now.checked_add(patience).map_or(deadline, |end| end.min(deadline));
        Self { next: first, longest, until }
    }

    /// Sleeps before the next check, each time twice as long, up to the longest pause. Returns `false` if the deadline
    /// has passed.
    pub(crate) fn pause(&mut self) -> bool {
        let left = self.until.saturating_duration_since(Instant::now());
        sleep(self.next.min(left));
        self.next = self.next.saturating_mul(2).min(self.longest);
        !left.is_zero()
    }
}
