//! The routes by which the host reaches a container.

use ipnet::IpNet;
use netlink_packet_route::AddressFamily;
use nix::libc::{RT_SCOPE_HOST, RT_SCOPE_LINK, RT_SCOPE_NOWHERE, RT_SCOPE_SITE, RT_SCOPE_UNIVERSE, RT_TABLE_MAIN};

use crate::error::{Errno, Error};
use crate::messages;
use crate::netlink::{Request, Socket};
use crate::replies::{self, Link, Route};

/// Adds a route for each address and prefix that leads to the host's end of a pair.
///
/// Felix adds the same routes, and may be faster: a route that is there already is fine. Unlike Calico's plugin, this goes
/// on with the other addresses then, and adds routes also where that leaves them to Felix.
///
/// # Errors
///
/// Another interface has a route with the same destination, or the kernel refuses the route.
pub(crate) fn add_on_host(host: &Socket, name: &str, index: u32, reached: &[IpNet]) -> Result<(), Error> {
    let requests: Vec<Request> = reached.iter().map(|network| messages::route(*network, index)).collect();
    let failed =
        |reason: String| Error::failed(&format!("error adding host side routes for interface: {name}, error"), reason);
    let answers = host.exchange(&requests).map_err(|errno| failed(errno.to_string()))?;
    for (&destination, answer) in reached.iter().zip(answers) {
        match answer {
            Ok(_) => {}
            Err(Errno::EXISTS) => conflict(host, name, index, destination).map_err(failed)?,
            Err(errno) => {
                let route = format!("Ifindex: {index}, Dst: {destination}, Scope: link, Iface: {name}");
                return Err(failed(format!("failed to add route ({route}): {errno}")));
            }
        }
    }
    Ok(())
}

/// Finds out about a route that cannot be added because there is one. Fine if it is the same one.
fn conflict(host: &Socket, name: &str, index: u32, destination: IpNet) -> Result<(), String> {
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
            let interface = interface(host, at).map_or_else(|| "unknown".to_owned(), |link| link.name);
            let scope = scope(route.scope);
            other = format!("route (Ifindex: {at}, Dst: {destination}, Scope: {scope}, Iface: {interface})");
        }
    }
    Err(format!(
        "route (Ifindex: {index}, Dst: {destination}, Scope: link) already exists for an interface other than '{name}': {other}"
    ))
}

/// Whether a route of the host is as this crate adds them. The kernel has no link scope in IPv6.
pub(crate) fn scope_is_link(route: &Route) -> bool {
    route.scope == RT_SCOPE_LINK || route.destination.addr().is_ipv6()
}

/// The routes of a family in the main table.
pub(crate) fn main_table(socket: &Socket, family: AddressFamily) -> Result<Vec<Route>, Errno> {
    let mut routes = Vec::new();
    for payload in socket.list(&messages::routes(family))? {
        let route = replies::route(&payload)?;
        if route.table == u32::from(RT_TABLE_MAIN) {
            routes.push(route);
        }
    }
    Ok(routes)
}

fn interface(socket: &Socket, index: u32) -> Option<Link> {
    replies::link(&socket.one(messages::link_by_number(index)).ok()?).ok()
}

/// A scope as Go's netlink library writes it.
fn scope(scope: u8) -> String {
    match scope {
        RT_SCOPE_UNIVERSE => "universe".to_owned(),
        RT_SCOPE_SITE => "site".to_owned(),
        RT_SCOPE_LINK => "link".to_owned(),
        RT_SCOPE_HOST => "host".to_owned(),
        RT_SCOPE_NOWHERE => "nowhere".to_owned(),
        other => other.to_string(),
    }
}
