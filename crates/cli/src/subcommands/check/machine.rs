//! Finds address conflicts on this machine that cannot be found in a single store.
//!
//! Two networks with different stores may assign the same address to two containers, even though each store is
//! consistent. This machine may have routes that send a pool's addresses elsewhere: to a VPN, a Docker network or a
//! local network. If a route directs a pool's addresses to another network, the containers of the pool and the hosts of
//! the other network cannot reach each other.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use datastore::ConfiguredNetwork;
use host::Route;
use ipam_core::net::overlap;
use ipam_operator::inspect::{Code, Finding, Inspection, Subject};
use ipnet::IpNet;
use kv::Deadline;

use crate::error::CommandResult;
use crate::store::StoreAccess;

/// Time limit of reading the pools of a store other than the checked store.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// An address range from which networks assign the addresses of one store.
struct AssignedRange {
    store: String,
    net: IpNet,
    /// The pool or network configuration that defines the address range.
    by: String,
}

/// Finds networks whose address ranges overlap with address ranges of other stores. Returns findings about overlaps,
/// and notes about stores that could not be read. Opens only embedded stores on this machine and the store that is
/// being checked. Clusters other than the checked store are not opened; their address ranges come from the network
/// configurations.
pub(super) async fn find_overlapping_networks(
    at: StoreAccess<'_>,
    inspection: &Inspection,
) -> (Vec<Finding>, Vec<String>) {
    let (networks, mut notes) = datastore::networks(at.location.drivers(), at.conf_dir);
    let of_store = |store: &str, pools: &[(String, IpNet)]| -> Vec<AssignedRange> {
        let place = |(name, net): &(String, IpNet)| AssignedRange {
            store: store.to_owned(),
            net: *net,
            by: format!("pool {name}"),
        };
        pools.iter().map(place).collect()
    };
    let own = at.to_string();
    let mut places = of_store(&own, &inspection.pools);
    let mut seen = BTreeSet::from([own]);
    for network in &networks {
        let store = network.store.to_string();
        places.extend(configured_ranges(network, &store));
        if network.store.path().is_some() && seen.insert(store.clone()) {
            match read_pools(at.other(&network.store).with_wait(READ_TIMEOUT)).await {
                Ok(pools) => places.extend(of_store(&store, &pools)),
                Err(failure) => notes.push(format!("the pools of {store} could not be read: {}", failure.message())),
            }
        }
    }
    (compare_ranges(&places), notes)
}

/// Returns the address ranges that are written in a network's configuration.
fn configured_ranges<'n>(network: &'n ConfiguredNetwork, store: &'n str) -> impl Iterator<Item = AssignedRange> {
    let nets = network.subnets.iter().filter_map(|text| text.parse::<IpNet>().ok());
    nets.map(move |net| AssignedRange {
        store: store.to_owned(),
        net: net.trunc(),
        by: format!("network {}", network.name),
    })
}

/// Reads the names and CIDRs of a store's pools. Returns an empty list if the store does not exist.
async fn read_pools(at: StoreAccess<'_>) -> CommandResult<Vec<(String, IpNet)>> {
    let Some(open) = at.open_existing().await? else { return Ok(Vec::new()) };
    let store = open.store();
    at.with_operator_on(open, store, async |operator| {
        let pools = operator.ipam().inventory(Deadline::after(READ_TIMEOUT)).await?.pools;
        Ok(pools.iter().map(|pool| (pool.name().to_owned(), pool.cidr())).collect())
    })
    .await
}

/// Finds address ranges of different stores that overlap. Reports each pair of overlapping ranges only once, even if
/// several network configurations have these ranges.
fn compare_ranges(places: &[AssignedRange]) -> Vec<Finding> {
    let mut found = BTreeMap::new();
    for (index, one) in places.iter().enumerate() {
        for other in places.iter().take(index) {
            if one.store != other.store && overlap(one.net, other.net) {
                let mut pair = [one, other];
                pair.sort_by_key(|place| (&place.store, place.net));
                let [first, second] = pair;
                let key = (&first.store, first.net, &second.store, second.net);
                found.entry(key).or_insert_with(|| {
                    let what = format!(
                        "{} ({} in {}) and {} ({} in {})",
                        first.by, first.net, first.store, second.by, second.net, second.store
                    );
                    Finding::new(Code::NetworksOverlap, Subject::Network(first.net.to_string()), what)
                });
            }
        }
    }
    found.into_values().collect()
}

/// The name prefixes of network interfaces that other programs, such as Docker or VPNs, create.
const FOREIGN_DEVICES: [&str; 9] = ["docker", "virbr", "podman", "lxcbr", "lxdbr", "wg", "tun", "tailscale", "ppp"];
/// The name prefixes of the network interfaces that Calico creates.
const CALICO_DEVICES: [&str; 4] = ["cali", "tunl0", "vxlan", "wireguard.cali"];

/// For each pool, finds the routes to the pool's addresses that were not made by a network that uses the pool.
/// `lengths` has for each pool the prefix length of the addresses or prefixes that the pool assigns. `is_bridge` tells
/// whether a network interface is a bridge.
pub(super) fn find_overlapping_routes(
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

/// True for a route that was probably created by a network that uses the pool: a route to a single address, an assigned
/// prefix, a block, or the subnet of an interface. `length` is the prefix length of the addresses or prefixes that the
/// pool assigns.
fn is_own(pool: IpNet, length: u8, route: &Route, is_bridge: impl Fn(&str) -> bool) -> bool {
    let begins = |names: &[&str]| names.iter().any(|name| route.device.starts_with(name));
    let is_inside = pool.contains(&route.net);
    let longest = route.net.max_prefix_len();
    if !is_inside {
        return false;
    }
    // Calico's routes to the blocks of other nodes have a gateway. Most blocks have 64 (2^6) addresses, so the prefix
    // of a block is 6 bits shorter than that of an address.
    let is_block = route.has_gateway && route.net.prefix_len() + 6 >= length;
    let is_small = route.net.prefix_len() == longest || route.drops || is_block || begins(&CALICO_DEVICES);
    let is_interface = route.net == pool || is_bridge(&route.device);
    is_small || (is_interface && !route.has_gateway && !begins(&FOREIGN_DEVICES))
}

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
        let findings = find_overlapping_routes(&pools, &lengths, &[route], |device| {
            device.starts_with("cni") || device == "docker0"
        });
        assert!(findings.iter().all(|finding| finding.what.contains(&format!("{net} dev {device}"))));
        !findings.is_empty()
    }

    #[test]
    fn routes_that_lead_elsewhere_are_found() {
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
    fn routes_of_pool_itself_are_ignored() {
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
