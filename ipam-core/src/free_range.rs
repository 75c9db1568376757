//! Chooses a free private CIDR for a pool that is defined without a CIDR.

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::net::overlap;

/// The private ranges from which the CIDRs of IPv4 pools are chosen, preferred first. Docker, podman, libvirt, flannel,
/// k3s, OpenShift and kubeadm use none of the ranges in this list by default.
const V4: [(Ipv4Addr, u8); 2] = [(Ipv4Addr::new(10, 200, 0, 0), 13), (Ipv4Addr::new(172, 28, 0, 0), 14)];

/// Returns a CIDR of prefix length `bits` that overlaps with none of the CIDRs in `taken`, or `None` if no CIDR is
/// free. For a prefix length of at most 30, returns the first free CIDR in the private IPv4 ranges. For a prefix length
/// larger than 30, returns a unique local IPv6 CIDR with a random prefix (RFC 4193).
pub fn choose(bits: u8, taken: &[IpNet], mut random: impl FnMut() -> u64) -> Option<IpNet> {
    let is_free = |cidr: &IpNet| !taken.iter().any(|other| overlap(*other, *cidr));
    if bits <= 30 {
        let within = |(first, length): (Ipv4Addr, u8)| Ipv4Net::new(first, length).ok()?.subnets(bits).ok();
        return V4.into_iter().filter_map(within).flatten().map(IpNet::V4).find(is_free);
    }
    let candidate = |_| {
        let prefix = (0xfd_u128 << 120) | (u128::from(random() & 0xff_ffff_ffff) << 80);
        Some(IpNet::V6(Ipv6Net::new(Ipv6Addr::from(prefix), bits).ok()?))
    };
    (0..100).filter_map(candidate).find(is_free)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(bits: u8, taken: &[&str]) -> Option<String> {
        let taken: Vec<IpNet> = taken.iter().map(|text| text.parse().unwrap()).collect();
        let mut next = 0;
        let random = || {
            next += 1;
            next
        };
        choose(bits, &taken, random).map(|cidr| cidr.to_string())
    }

    #[test]
    fn free_range_is_first_one() {
        assert_eq!(chosen(24, &[]).as_deref(), Some("10.200.0.0/24"));
        assert_eq!(chosen(24, &["10.200.0.0/23", "10.200.3.7/32"]).as_deref(), Some("10.200.2.0/24"));
        assert_eq!(chosen(16, &["10.0.0.0/8"]).as_deref(), Some("172.28.0.0/16"));
        assert_eq!(chosen(24, &["10.0.0.0/8", "172.16.0.0/12"]), None);
        assert_eq!(chosen(112, &[]).as_deref(), Some("fd00:0:1::/112"));
        assert_eq!(chosen(64, &["fd00:0:1::/48"]).as_deref(), Some("fd00:0:2::/64"));
        assert_eq!(chosen(64, &["fc00::/7"]), None);
    }
}
