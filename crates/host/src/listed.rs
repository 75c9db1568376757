//! Addresses as the kernel lists them for everybody, for processes that even root may not touch, such as those that a
//! security module shields. Only interfaces that are up are in these lists.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The addresses in the network namespace of a thread, by its folder in /proc.
pub(crate) fn addresses_of(thread: &Path) -> io::Result<BTreeSet<IpAddr>> {
    let read = |name: &str| fs::read_to_string(thread.join("net").join(name));
    let mut addresses: BTreeSet<IpAddr> = v4(&read("fib_trie")?).collect();
    match read("if_inet6") {
        Ok(text) => addresses.extend(v6(&text)),
        // A kernel without IPv6; a thread that has gone had no IPv4 either.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    Ok(addresses)
}

/// The mark that tells the lists of one network namespace from those of all others at the same time: the inode of
/// one of its lists. Everybody may ask for it.
pub(crate) fn listing(thread: &Path) -> io::Result<u64> {
    fs::metadata(thread.join("net/dev")).map(|about| about.ino())
}

/// The local addresses in `fib_trie`: a line that ends with the address, and after it one with `/32 host LOCAL`.
fn v4(text: &str) -> impl Iterator<Item = IpAddr> {
    let mut last = None;
    text.lines().filter_map(move |line| {
        if let Some((_, leaf)) = line.split_once("|-- ") {
            last = leaf.trim().parse::<Ipv4Addr>().ok();
            return None;
        }
        last.filter(|_| line.trim() == "/32 host LOCAL").map(IpAddr::V4)
    })
}

/// `if_inet6`: a line for each address, which comes first, in 32 digits.
fn v6(text: &str) -> impl Iterator<Item = IpAddr> {
    text.lines().filter_map(|line| {
        let digits = line.split_whitespace().next().filter(|digits| digits.len() == 32)?;
        u128::from_str_radix(digits, 16).ok().map(|bits| IpAddr::V6(Ipv6Addr::from(bits)))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
mod tests {
    use super::*;

    #[test]
    fn local_addresses_are_told_from_networks_and_broadcasts() {
        let text = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 0.0.0.0\n        /0 universe UNICAST\n     +-- 10.0.0.0/24 2 0 2\n\
            \x20       |-- 10.0.0.0\n           /24 link UNICAST\n        |-- 10.0.0.5\n           /32 host LOCAL\n\
            \x20       |-- 10.0.0.255\n           /32 link BROADCAST\n     |-- 127.0.0.0\n        /8 host LOCAL\n";
        assert_eq!(v4(text).collect::<Vec<_>>(), ["10.0.0.5".parse::<IpAddr>().unwrap()]);
    }

    #[test]
    fn addresses_of_ipv6_have_32_digits() {
        let text = "fd000000000000000000000000000002 04 40 00 82     eth0\n00000000000000000000000000000001 01 80 10 80 lo\nx\n";
        let expected: [IpAddr; 2] = ["fd00::2".parse().unwrap(), "::1".parse().unwrap()];
        assert_eq!(v6(text).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn the_own_addresses_are_listed() {
        assert!(addresses_of(Path::new("/proc/thread-self")).unwrap().contains(&"127.0.0.1".parse().unwrap()));
    }
}
