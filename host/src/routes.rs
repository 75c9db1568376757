//! The networks to which this machine has routes.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// The destinations of the routes of this network namespace, without the default routes, addresses of the machine's own interfaces
/// included. IPv6 may be off.
///
/// # Errors
/// `/proc` cannot be read.
pub fn routes() -> io::Result<Vec<IpNet>> {
    let v4 = fs::read_to_string("/proc/self/net/route")?;
    let v6 = match fs::read_to_string("/proc/self/net/ipv6_route") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        read => read?,
    };
    Ok(v4.lines().filter_map(of_v4).map(IpNet::V4).chain(v6.lines().filter_map(of_v6).map(IpNet::V6)).collect())
}

/// A line of `/proc/net/route`: interface, destination, gateway, flags, ..., mask in the eighth column. Numbers are in the byte order of
/// the machine.
fn of_v4(line: &str) -> Option<Ipv4Net> {
    let mut columns = line.split_whitespace().skip(1);
    let address =
        |column: &str| u32::from_str_radix(column, 16).ok().map(|number| Ipv4Addr::from(number.to_ne_bytes()));
    let destination = address(columns.next()?)?;
    let mask = address(columns.nth(5)?)?;
    Ipv4Net::with_netmask(destination, mask).ok().filter(|net| net.prefix_len() > 0)
}

/// A line of `/proc/net/ipv6_route`: destination and its length in hexadecimal digits, ... . Multicast is left out.
fn of_v6(line: &str) -> Option<Ipv6Net> {
    let mut columns = line.split_whitespace();
    let address = Ipv6Addr::from(u128::from_str_radix(columns.next()?, 16).ok()?);
    let length = u8::from_str_radix(columns.next()?, 16).ok()?;
    Ipv6Net::new(address, length).ok().filter(|net| net.prefix_len() > 0 && !address.is_multicast())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_kernel_are_read() {
        let little_endian = |line: &str| of_v4(line).map(|net| net.to_string());
        if cfg!(target_endian = "little") {
            let line = "eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0";
            assert_eq!(little_endian(line).as_deref(), Some("192.0.2.0/24"));
        }
        assert_eq!(of_v4("eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0"), None, "a default route");
        assert_eq!(of_v4("Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT"), None);
        let v6 = "fd000000000000000000000000000000 40 00000000000000000000000000000000 00 0 0 0 0 00000001 eth0";
        assert_eq!(of_v6(v6).map(|net| net.to_string()).as_deref(), Some("fd00::/64"));
        assert_eq!(of_v6("ff000000000000000000000000000000 08 0 00 0 0 0 0 0 eth0"), None);
        assert_eq!(of_v6(""), None);
    }

    #[test]
    fn the_loopbacks_of_this_machine_are_there() {
        assert!(routes().is_ok());
    }
}
