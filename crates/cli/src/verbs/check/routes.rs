//! Routes of this machine that lead addresses of a pool elsewhere: to another network of a VPN, of Docker or of the
//! machine's own, whose addresses the containers then cannot reach, or the other way round.

use std::collections::BTreeMap;
use std::path::Path;

use host::Route;
use ipam_core::net::overlap;
use ipam_operator::inspect::{Code, Finding, Subject};
use ipnet::IpNet;

/// How the names of interfaces begin that other programs make.
const FOREIGN: [&str; 9] = ["docker", "virbr", "podman", "lxcbr", "lxdbr", "wg", "tun", "tailscale", "ppp"];
/// How the names of Calico's interfaces begin.
const CALICOS: [&str; 4] = ["cali", "tunl0", "vxlan", "wireguard.cali"];

/// The findings: for each pool the routes that are not its own. `lengths` has the lengths of prefixes, by pool. `is_bridge`
/// says of an interface whether it is a bridge.
pub(super) fn overlapping(
    pools: &[(String, IpNet)],
    lengths: &BTreeMap<IpNet, u8>,
    routes: &[Route],
    is_bridge: impl Fn(&str) -> bool,
) -> Vec<Finding> {
    let foreign = |(name, pool): &(String, IpNet)| {
        let length = lengths.get(pool).copied().unwrap_or(pool.max_prefix_len());
        let routes =
            routes.iter().filter(|route| overlap(route.net, *pool) && !is_own(*pool, length, route, &is_bridge));
        let texts: Vec<String> = routes.map(|route| format!("{} dev {}", route.net, route.device)).collect();
        (!texts.is_empty()).then(|| {
            let what = format!("pool {name} ({pool}) overlaps with: {}", texts.join(", "));
            Finding::new(Code::RouteOverlaps, Subject::Network(pool.to_string()), what)
        })
    };
    pools.iter().filter_map(foreign).collect()
}

/// True for a route that a network on the pool has made, as far as a route shows that: one to a single address or prefix, to a
/// block, or to the interface that has the pool's subnet. `length` is that of what the pool assigns.
fn is_own(pool: IpNet, length: u8, route: &Route, is_bridge: impl Fn(&str) -> bool) -> bool {
    let begins = |names: &[&str]| names.iter().any(|name| route.device.starts_with(name));
    let is_inside = pool.contains(&route.net);
    let longest = route.net.max_prefix_len();
    if !is_inside {
        return false;
    }
    // Calico's routes to the blocks of other nodes lead through a gateway. Most blocks have 64 addresses.
    let is_block = route.has_gateway && route.net.prefix_len() + 6 >= length;
    let is_small = route.net.prefix_len() == longest || route.drops || is_block || begins(&CALICOS);
    let is_interface = route.net == pool || is_bridge(&route.device);
    is_small || (is_interface && !route.has_gateway && !begins(&FOREIGN))
}

/// True if an interface of this machine is a bridge.
pub(super) fn is_bridge(device: &str) -> bool {
    Path::new("/sys/class/net").join(device).join("bridge").exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(pool: &str, net: &str, device: &str, has_gateway: bool) -> bool {
        let route = Route { net: net.parse().unwrap(), device: device.into(), has_gateway, drops: device == "*" };
        let pool: IpNet = pool.parse().unwrap();
        let lengths = BTreeMap::from([("fd89::/48".parse().unwrap(), 64)]);
        let pools = [("lab".to_owned(), pool)];
        let findings =
            overlapping(&pools, &lengths, &[route], |device| device.starts_with("cni") || device == "docker0");
        assert!(findings.iter().all(|finding| finding.what.contains(&format!("{net} dev {device}"))));
        !findings.is_empty()
    }

    #[test]
    fn what_leads_elsewhere_is_found() {
        for (net, device, has_gateway) in [
            ("10.0.0.0/8", "wg0", false),
            ("10.88.0.0/15", "eth0", true),
            ("10.88.0.0/16", "docker0", false),
            ("10.88.0.0/16", "wg0", false),
            ("10.88.0.0/16", "eth0", true),
            ("10.88.4.0/24", "eth1", false),
            ("10.88.4.0/24", "eth0", true),
            ("10.88.4.0/24", "docker0", false),
            ("10.88.4.0/26", "tun0", false),
        ] {
            assert!(found("10.88.0.0/16", net, device, has_gateway), "{net} {device}");
        }
        assert!(found("fd88::/64", "fd88::/16", "wg0", false));
    }

    #[test]
    fn the_pools_own_routes_are_not() {
        for (net, device, has_gateway) in [
            ("10.88.0.0/16", "cni0", false),
            ("10.88.0.0/16", "eth1", false),
            ("10.88.4.0/26", "cni0", false),
            ("10.88.4.7/32", "cali0123456789a", false),
            ("10.88.4.7/32", "veth1", false),
            ("10.88.4.0/26", "*", false),
            ("10.88.4.0/26", "tunl0", true),
            ("10.88.4.0/26", "eth0", true),
            ("10.89.0.0/16", "wg0", false),
        ] {
            assert!(!found("10.88.0.0/16", net, device, has_gateway), "{net} {device}");
        }
        assert!(!found("fd88::/64", "fd88::/64", "cni0", false));
        assert!(!found("fd89::/48", "fd89:0:0:7::/64", "eth0", true), "a router's, to a prefix");
    }
}
