//! Provides arithmetic on addresses and CIDRs of both families.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::{Serialize, Serializer};

/// An address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// The family of IPv4 addresses.
    V4,
    /// The family of IPv6 addresses.
    V6,
}

impl Family {
    /// Returns the family of an address.
    pub fn of(ip: IpAddr) -> Self {
        if ip.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    /// Returns the family of a CIDR.
    pub fn of_net(net: IpNet) -> Self {
        Self::of(net.addr())
    }

    /// Returns the number of bits of an address of this family: 32 or 128.
    pub fn bits(self) -> u8 {
        match self {
            Self::V4 => 32,
            Self::V6 => 128,
        }
    }

    /// Returns the prefix lengths that a block of single addresses can have.
    pub fn block_sizes(self) -> RangeInclusive<u8> {
        match self {
            Self::V4 => 20..=32,
            Self::V6 => 116..=128,
        }
    }

    /// Returns the key segment of the family, which is `ipv4` or `ipv6`.
    pub fn key_segment(self) -> &'static str {
        match self {
            Self::V4 => "ipv4",
            Self::V6 => "ipv6",
        }
    }

    /// Converts an integer to the address of this family that has the integer's bits; the inverse of [`number`].
    /// Returns `None` if the integer is too large for the family.
    pub fn address(self, number: u128) -> Option<IpAddr> {
        match self {
            Self::V4 => u32::try_from(number).ok().map(|bits| Ipv4Addr::from_bits(bits).into()),
            Self::V6 => Some(Ipv6Addr::from_bits(number).into()),
        }
    }

    /// Returns the CIDR with a given prefix length that contains an address. Returns `None` if the prefix length is too
    /// large, or if the address is not of this family.
    pub fn network(self, ip: IpAddr, prefix: u8) -> Option<IpNet> {
        let net = match (self, ip) {
            (Self::V4, IpAddr::V4(ip)) => Ipv4Net::new(ip, prefix).ok()?.into(),
            (Self::V6, IpAddr::V6(ip)) => Ipv6Net::new(ip, prefix).ok()?.into(),
            _ => return None,
        };
        Some(IpNet::trunc(&net))
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        })
    }
}

/// Returns the bits of an address as an integer.
pub fn number(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(ip) => ip.to_bits().into(),
        IpAddr::V6(ip) => ip.to_bits(),
    }
}

/// Returns the first and the last address of a CIDR as integers (see [`number`]).
pub fn bounds(net: IpNet) -> (u128, u128) {
    (number(net.network()), number(net.broadcast()))
}

/// Returns the address that is `offset` addresses after a CIDR's first address, or `None` if it is outside the CIDR.
pub fn nth(net: IpNet, offset: u128) -> Option<IpAddr> {
    let (first, last) = bounds(net);
    let number = first.checked_add(offset).filter(|number| *number <= last)?;
    Family::of_net(net).address(number)
}

/// True if two CIDRs have at least one common address.
pub fn overlap(a: IpNet, b: IpNet) -> bool {
    a.contains(&b) || b.contains(&a)
}

/// A number of addresses, exact from 0 to 2^128. The type `u128` is too small, because there are 2^128 IPv6 addresses.
///
/// A sum of counts saturates at 2^128. A count is displayed and serialized as decimal text, because many JSON parsers
/// lose precision beyond 2^53.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Count {
    // True if the count is 2^128; then `low` is 0. `all` is declared before `low`, so that the derived order of counts
    // is the numeric order.
    all: bool,
    low: u128,
}

impl Count {
    /// The count 0.
    pub const ZERO: Self = Self { all: false, low: 0 };
    /// The count 2^128, the number of all IPv6 addresses.
    pub const ALL: Self = Self { all: true, low: 0 };

    /// Creates a count from an integer.
    pub const fn new(count: u128) -> Self {
        Self { all: false, low: count }
    }

    /// Returns the number of addresses in a CIDR.
    pub fn of_net(net: IpNet) -> Self {
        Self::of_parts(net, Family::of_net(net).bits())
    }

    /// Returns the number of subnets of prefix length `length` in a CIDR. Returns 1 if `length` is less than the CIDR's
    /// prefix length.
    pub fn of_parts(net: IpNet, length: u8) -> Self {
        let bits = length.saturating_sub(net.prefix_len());
        1_u128.checked_shl(bits.into()).map_or(Self::ALL, Self::new)
    }

    /// Returns the number of integers from `first` to `last`, both inclusive. Returns 0 if `last` is less than `first`.
    pub fn of_span(first: u128, last: u128) -> Self {
        match last.checked_sub(first) {
            None => Self::ZERO,
            Some(distance) => distance.checked_add(1).map_or(Self::ALL, Self::new),
        }
    }

    /// Returns the sum of two counts, saturating at 2^128.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        if self.all || other.all {
            return Self::ALL;
        }
        self.low.checked_add(other.low).map_or(Self::ALL, Self::new)
    }

    /// Returns the difference of two counts, saturating at 0.
    #[must_use]
    pub fn minus(self, other: Self) -> Self {
        match (self.all, other.all) {
            (_, true) => Self::ZERO,
            (true, false) if other.low == 0 => Self::ALL,
            // For x > 0, the difference 2^128 - x is the negation of x modulo 2^128.
            (true, false) => Self::new(other.low.wrapping_neg()),
            (false, false) => Self::new(self.low.saturating_sub(other.low)),
        }
    }

    /// Returns the count as an integer; `None` if the count is 2^128.
    pub fn to_u128(self) -> Option<u128> {
        (!self.all).then_some(self.low)
    }

    /// Returns the count as a float, whose precision suffices only for percentages.
    #[expect(clippy::cast_precision_loss, reason = "a percentage needs no higher precision")]
    pub fn to_f64(self) -> f64 {
        if self.all { (u128::MAX as f64) + 1.0 } else { self.low as f64 }
    }
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.all { f.pad("340282366920938463463374607431768211456") } else { f.pad(&self.low.to_string()) }
    }
}

impl Serialize for Count {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl From<usize> for Count {
    fn from(count: usize) -> Self {
        Self::new(count as u128)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_exact_up_to_all_of_ipv6() {
        let all = Count::of_net("::/0".parse().unwrap());
        assert_eq!(all, Count::ALL);
        assert_eq!(all.to_string(), "340282366920938463463374607431768211456");
        assert_eq!(all.minus(Count::new(1)), Count::new(u128::MAX));
        assert_eq!(all.minus(Count::ZERO), all);
        assert_eq!(all.minus(all), Count::ZERO);
        assert_eq!(Count::new(u128::MAX).plus(Count::new(1)), all);
        assert!(all > Count::new(u128::MAX));
        assert_eq!(Count::of_span(0, u128::MAX), all);
        assert_eq!(Count::of_span(5, 4), Count::ZERO);
        assert_eq!(Count::of_net("0.0.0.0/0".parse().unwrap()), Count::new(1 << 32));
        assert_eq!(Count::of_net("10.0.0.1/32".parse().unwrap()), Count::new(1));
        assert_eq!(Count::of_parts("2001:db8::/48".parse().unwrap(), 64), Count::new(1 << 16));
        assert_eq!(Count::of_parts("2001:db8::/64".parse().unwrap(), 64), Count::new(1));
        assert_eq!(Count::of_parts("::/0".parse().unwrap(), 128), Count::ALL);
        assert_eq!(serde_json::to_string(&Count::new(7)).unwrap(), "\"7\"");
    }

    #[test]
    fn nth_address_stays_inside() {
        let net: IpNet = "255.255.255.252/30".parse().unwrap();
        assert_eq!(nth(net, 3), Some("255.255.255.255".parse().unwrap()));
        assert_eq!(nth(net, 4), None);
        let all: IpNet = "::/0".parse().unwrap();
        assert_eq!(nth(all, u128::MAX), Some("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff".parse().unwrap()));
    }
}
