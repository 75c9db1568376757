//! Reads the IP routes of this machine.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// A route in this network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// The destination network of the route.
    pub net: IpNet,
    /// The name of the interface through which the route sends packets.
    pub device: String,
    /// True if the route leads to a gateway.
    pub has_gateway: bool,
    /// True if the route drops packets, for example the route that a node has for its own block.
    pub drops: bool,
}

/// The kernel's route flag `RTF_GATEWAY`.
const RTF_GATEWAY: u32 = 0x2;
/// The kernel's route flag `RTF_REJECT`.
const RTF_REJECT: u32 = 0x200;

/// Minimum prefix length of a route that does not count as a default route. Routes of length /1 count as default
/// routes, because VPNs replace the default route by two /1 routes.
const MIN_PREFIX_LENGTH: u8 = 2;

/// Returns the destinations of all routes of this network namespace, in all routing tables, without default routes. The
/// destinations include the addresses of the namespace's own interfaces. If IPv6 is disabled, only IPv4 routes are
/// returned.
///
/// # Errors
/// Any error of reading the routes in `/proc`.
pub fn routes() -> io::Result<Vec<IpNet>> {
    let mut nets = parse_trie_routes(&fs::read_to_string("/proc/self/net/fib_trie")?);
    nets.extend(v6_routes()?.into_iter().map(|route| route.net));
    Ok(nets)
}

/// Parses `/proc/net/fib_trie`, which contains the IPv4 routes of all tables: a line `|-- ADDRESS`, followed by a line
/// `/LENGTH SCOPE KIND` for each route to that address.
fn parse_trie_routes(text: &str) -> Vec<IpNet> {
    let (mut nets, mut address) = (Vec::new(), None);
    for line in text.lines().map(str::trim_start) {
        if let Some(leaf) = line.strip_prefix("|-- ") {
            address = leaf.trim_end().parse::<Ipv4Addr>().ok();
        } else if let Some(length) = line.strip_prefix('/') {
            let length = length.split(' ').next().and_then(|length| length.parse().ok());
            let net = address.zip(length).and_then(|(address, length)| Ipv4Net::new(address, length).ok());
            nets.extend(net.filter(|net| net.prefix_len() >= MIN_PREFIX_LENGTH).map(IpNet::V4));
        }
    }
    nets
}

/// The IPv6 routes of all tables; empty if IPv6 is disabled.
fn v6_routes() -> io::Result<Vec<Route>> {
    match fs::read_to_string("/proc/self/net/ipv6_route") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        read => Ok(read?.lines().filter_map(parse_v6_route).collect()),
    }
}

/// Returns the IPv6 routes of all tables and the IPv4 routes of the main table, without default routes, each with its
/// interface.
///
/// # Errors
/// Any error of reading the routes in `/proc`.
pub fn all_routes() -> io::Result<Vec<Route>> {
    let v4 = fs::read_to_string("/proc/self/net/route")?;
    let mut routes: Vec<Route> = v4.lines().filter_map(parse_v4_route).collect();
    routes.extend(v6_routes()?);
    Ok(routes)
}

fn route(net: IpNet, device: &str, flags: &str) -> Option<Route> {
    let flags = u32::from_str_radix(flags, 16).ok()?;
    let device = device.to_owned();
    Some(Route { net, device, has_gateway: flags & RTF_GATEWAY != 0, drops: flags & RTF_REJECT != 0 })
}

/// Parses a line of `/proc/net/route`: the columns are interface, destination, gateway and flags, and the eighth column
/// is the mask. The numbers in `/proc/net/route` are hexadecimal, in the machine's byte order.
fn parse_v4_route(line: &str) -> Option<Route> {
    let mut columns = line.split_whitespace();
    let device = columns.next()?;
    let address =
        |column: &str| u32::from_str_radix(column, 16).ok().map(|number| Ipv4Addr::from(number.to_ne_bytes()));
    let destination = address(columns.next()?)?;
    let flags = columns.nth(1)?;
    let mask = address(columns.nth(3)?)?;
    let net = Ipv4Net::with_netmask(destination, mask).ok().filter(|net| net.prefix_len() >= MIN_PREFIX_LENGTH)?;
    route(net.into(), device, flags)
}

/// Parses a line of `/proc/net/ipv6_route`: the first two columns are destination and prefix length in hexadecimal, and
/// the ninth and tenth columns are the flags and the interface. Returns `None` if the route is a multicast route.
fn parse_v6_route(line: &str) -> Option<Route> {
    let mut columns = line.split_whitespace();
    let address = Ipv6Addr::from(u128::from_str_radix(columns.next()?, 16).ok()?);
    let length = u8::from_str_radix(columns.next()?, 16).ok()?;
    let net = Ipv6Net::new(address, length)
        .ok()
        .filter(|net| net.prefix_len() >= MIN_PREFIX_LENGTH && !address.is_multicast())?;
    let flags = columns.nth(6)?;
    route(net.into(), columns.next()?, flags)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_are_read_from_kernel_lines() {
        let little_endian = |line: &str| parse_v4_route(line).map(|route| route.net.to_string());
        if cfg!(target_endian = "little") {
            let line = "eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0";
            assert_eq!(little_endian(line).as_deref(), Some("192.0.2.0/24"));
            let line = "wg0\t0000000A\t010200C0\t0003\t0\t0\t0\t000000FF\t0\t0\t0";
            let net = "10.0.0.0/8".parse().unwrap();
            assert_eq!(
                parse_v4_route(line),
                Some(Route { net, device: "wg0".into(), has_gateway: true, drops: false })
            );
            let line = "*\t0000000A\t00000000\t0200\t0\t0\t0\tC0FFFFFF\t0\t0\t0";
            assert!(parse_v4_route(line).is_some_and(|route| route.drops && route.net.prefix_len() == 26));
        }
        assert_eq!(
            parse_v4_route("eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0"),
            None,
            "a default route"
        );
        assert_eq!(
            parse_v4_route("tun0\t00000000\t010200C0\t0003\t0\t0\t0\t00000080\t0\t0\t0"),
            None,
            "a half of a default route"
        );
        assert_eq!(
            parse_v4_route("Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT"),
            None
        );
        let v6 = "fd000000000000000000000000000000 40 00000000000000000000000000000000 00 0 0 0 0 00000001 eth0";
        assert_eq!(
            parse_v6_route(v6).map(|route| (route.net.to_string(), route.device)),
            Some(("fd00::/64".into(), "eth0".into()))
        );
        assert_eq!(parse_v6_route("ff000000000000000000000000000000 08 0 00 0 0 0 0 0 eth0"), None);
        assert_eq!(parse_v6_route(""), None);
    }

    #[test]
    fn routes_of_other_tables_and_own_addresses_are_read() {
        let text = "Id 52:\n  |-- 10.200.77.0\n     /24 link UNICAST\nMain:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 0.0.0.0\n        \
            /0 universe UNICAST\n     |-- 192.0.2.2\n        /32 host LOCAL\n";
        let nets = ["10.200.77.0/24", "192.0.2.2/32"].map(|net| net.parse::<IpNet>().unwrap());
        assert_eq!(parse_trie_routes(text), nets);
        assert_eq!(parse_trie_routes("/24\n|-- x\n/24\n|--\n"), []);
    }

    #[test]
    fn routes_of_loopback_exist() {
        let loopback = "127.0.0.0/8".parse().unwrap();
        assert!(routes().unwrap().contains(&loopback));
    }
}
