//! Combines the addresses of all reservations into one set of reserved addresses.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::model::IpReservation;
use crate::net::{Count, Family, bounds, number};

/// A set of reserved addresses of both families.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reservations {
    v4: Spans,
    v6: Spans,
}

/// An entry of a reservation that reserves nothing, because it is neither a CIDR nor an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkippedReservation {
    /// The name of the reservation that contains the skipped entry.
    pub reservation: String,
    /// The text of the entry that reserves nothing.
    pub entry: String,
}

/// Addresses of one family, as inclusive spans of integers, which are ascending and separated by gaps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Spans(Vec<(u128, u128)>);

impl Reservations {
    /// Creates the set of all addresses in `networks`.
    pub fn new(networks: impl IntoIterator<Item = IpNet>) -> Self {
        let (v4, v6): (Vec<_>, Vec<_>) = networks.into_iter().partition(|net| Family::of_net(*net) == Family::V4);
        Self { v4: Spans::merge(v4), v6: Spans::merge(v6) }
    }

    /// Creates the set of all addresses in the given reservations. As in Calico, entries that cannot be parsed reserve
    /// nothing. Returns the set, and the entries that cannot be parsed, so that the caller can log them.
    pub fn from_documents<'a>(
        documents: impl IntoIterator<Item = &'a IpReservation>,
    ) -> (Self, Vec<SkippedReservation>) {
        let (mut networks, mut skipped) = (Vec::new(), Vec::new());
        for document in documents {
            for entry in document.texts() {
                match parse_entry(&entry) {
                    Some(net) => networks.push(net),
                    None => skipped.push(SkippedReservation { reservation: document.name().to_owned(), entry }),
                }
            }
        }
        (Self::new(networks), skipped)
    }

    /// Returns a copy of the set, extended by the addresses in `networks`.
    pub(crate) fn with(&self, networks: &[IpNet]) -> Self {
        let mut other = Self::new(networks.iter().copied());
        other.v4 = Spans::merge_spans(self.v4.0.iter().chain(&other.v4.0).copied().collect());
        other.v6 = Spans::merge_spans(self.v6.0.iter().chain(&other.v6.0).copied().collect());
        other
    }

    /// True if the set contains no address.
    pub fn is_empty(&self) -> bool {
        self.v4.0.is_empty() && self.v6.0.is_empty()
    }

    /// True if the address is reserved.
    pub fn contains(&self, ip: IpAddr) -> bool {
        let number = number(ip);
        self.of(Family::of(ip)).within(number, number).next().is_some()
    }

    /// True if any address of the CIDR is reserved.
    pub fn touches(&self, net: IpNet) -> bool {
        let (first, last) = bounds(net);
        self.of(Family::of_net(net)).within(first, last).next().is_some()
    }

    /// True if every address of the CIDR is reserved, by one or more reservations.
    pub fn covers(&self, net: IpNet) -> bool {
        self.count_in(net) == Count::of_net(net)
    }

    /// If every address of the CIDR is reserved, returns the last address (as an integer) of the span of reserved
    /// addresses that contains the CIDR. Otherwise returns `None`.
    pub(crate) fn end_of_cover(&self, net: IpNet) -> Option<u128> {
        let (first, last) = bounds(net);
        let spans = &self.of(Family::of_net(net)).0;
        // Spans of reserved addresses neither overlap nor touch, so a fully reserved CIDR lies in a single span.
        let span = spans.get(spans.partition_point(|span| span.1 < last))?;
        (span.0 <= first).then_some(span.1)
    }

    /// Returns the number of reserved addresses in the CIDR.
    pub fn count_in(&self, net: IpNet) -> Count {
        let (first, last) = bounds(net);
        let parts = self.of(Family::of_net(net)).within(first, last);
        parts.fold(Count::ZERO, |sum, (first, last)| sum.plus(Count::of_span(first, last)))
    }

    /// Returns the number of subnets of prefix length `length` in the CIDR that contain a reserved address.
    pub fn count_of_length(&self, net: IpNet, length: u8) -> Count {
        let host_bits = u32::from(Family::of_net(net).bits().saturating_sub(length));
        if host_bits == 0 {
            return self.count_in(net);
        }
        let (first, last) = bounds(net);
        let unit = |number: u128| number.checked_shr(host_bits).unwrap_or(0);
        let mut counted = (Count::ZERO, None);
        for (first, last) in self.of(Family::of_net(net)).within(first, last) {
            // A subnet that contains the end of one reserved span and the start of the next is counted once.
            let first = counted.1.map_or(unit(first), |before: u128| unit(first).max(before + 1));
            counted = (counted.0.plus(Count::of_span(first, unit(last))), Some(unit(last)));
        }
        counted.0
    }

    fn of(&self, family: Family) -> &Spans {
        match family {
            Family::V4 => &self.v4,
            Family::V6 => &self.v6,
        }
    }
}

impl Spans {
    fn merge(networks: Vec<IpNet>) -> Self {
        Self::merge_spans(networks.into_iter().map(bounds).collect())
    }

    fn merge_spans(mut spans: Vec<(u128, u128)>) -> Self {
        spans.sort_unstable();
        let mut merged: Vec<(u128, u128)> = Vec::with_capacity(spans.len());
        for (first, last) in spans {
            match merged.last_mut() {
                Some(before) if first <= before.1.saturating_add(1) => before.1 = before.1.max(last),
                _ => merged.push((first, last)),
            }
        }
        Self(merged)
    }

    /// Returns the parts of the reserved spans between the addresses `first` and `last`, both inclusive.
    fn within(&self, first: u128, last: u128) -> impl Iterator<Item = (u128, u128)> {
        let start = self.0.partition_point(|span| span.1 < first);
        let spans = self.0.get(start..).unwrap_or_default().iter().take_while(move |span| span.0 <= last);
        spans.map(move |span| (span.0.max(first), span.1.min(last)))
    }
}

/// Parses an entry of a reservation, which is a CIDR or a single address. The host bits of a CIDR are cleared.
pub fn parse_entry(entry: &str) -> Option<IpNet> {
    match entry.parse::<IpNet>() {
        Ok(net) => Some(net.trunc()),
        Err(_) => entry.parse::<IpAddr>().ok().map(IpNet::from),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use time::macros::datetime;

    use super::*;
    use crate::model::{Document, keys};

    fn set(nets: &[&str]) -> Reservations {
        Reservations::new(nets.iter().map(|net| net.parse().unwrap()))
    }

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    #[test]
    fn reservations_count_as_union() {
        let set = set(&["10.0.0.0/27", "10.0.0.32/27", "10.0.0.16/28", "10.0.1.0/30", "255.255.255.255/32"]);
        assert!(set.covers(net("10.0.0.0/26")));
        assert!(set.covers(net("10.0.0.40/29")));
        assert!(!set.covers(net("10.0.0.0/25")));
        assert_eq!(set.count_in(net("10.0.0.0/16")), Count::new(68));
        assert_eq!(set.count_in(net("0.0.0.0/0")), Count::new(69));
        assert!(set.contains("10.0.1.3".parse().unwrap()) && !set.contains("10.0.1.4".parse().unwrap()));
        assert!(set.contains("255.255.255.255".parse().unwrap()));
        assert!(!set.contains("::a00:0".parse().unwrap()));
        assert!(!Reservations::default().covers(net("10.0.0.0/32")));
    }

    #[test]
    fn reservations_of_ipv6_are_exact_to_end() {
        let all = set(&["::/1", "8000::/1"]);
        assert_eq!(all.count_in(net("::/0")), Count::ALL);
        assert!(all.covers(net("::/0")));
        let most = set(&["::/1", "8000::/2", "c000::/2", "::/128"]);
        assert!(most.covers(net("::/0")));
        assert!(!set(&["::/1", "8000::/2", "c000::/3"]).covers(net("::/0")));
        assert_eq!(set(&["::/0"]).count_in(net("fd80::/64")), Count::new(1 << 64));
    }

    #[test]
    fn reservations_tolerate_addresses_and_nonsense() {
        let key = keys::resource(keys::ResourceKind::IpReservation, "r");
        let text = br#"{"spec":{"reservedCIDRs":["10.0.0.1","10.0.0.9/30","fd80::1","nonsense",7,"10.0.0.0/33"]}}"#;
        let document = IpReservation::decode(&key, text).unwrap();
        let (set, skipped) = Reservations::from_documents([&document]);
        assert_eq!(set.count_in(net("10.0.0.0/24")), Count::new(5));
        assert!(set.contains("fd80::1".parse().unwrap()));
        let entries: Vec<_> = skipped.iter().map(|skipped| skipped.entry.as_str()).collect();
        assert_eq!(entries, ["nonsense", "7", "10.0.0.0/33"]);
        for text in [&b"{}"[..], br#"{"spec":{"reservedCIDRs":null}}"#, br#"{"spec":{"reservedCIDRs":"x"}}"#] {
            let document = IpReservation::decode(&key, text).unwrap();
            assert!(Reservations::from_documents([&document]).0.is_empty());
        }
        let made = IpReservation::new("r", &[net("10.0.0.1/32")], "u", datetime!(2026-01-01 0:00 UTC));
        assert_eq!(made.texts(), ["10.0.0.1/32"]);
    }

    proptest! {
        #[test]
        fn reservations_equal_set_of_addresses(
            nets in prop::collection::vec((0_u32..256, 24_u8..=32), 0..8),
            probe in (0_u32..256, 24_u8..=32),
        ) {
            let net = |(low, prefix): (u32, u8)| {
                Family::V4.network(Family::V4.address(u128::from(0x0a00_0000 + low)).unwrap(), prefix).unwrap()
            };
            let nets: Vec<IpNet> = nets.into_iter().map(net).collect();
            let probe = net(probe);
            let set = Reservations::new(nets.clone());
            let addresses = || (0..256_u128).filter_map(|low| Family::V4.address(0x0a00_0000 + low));
            let inside = addresses().filter(|ip| probe.contains(ip)).collect::<Vec<_>>();
            let reserved = inside.iter().filter(|ip| nets.iter().any(|net| net.contains(*ip))).count();
            prop_assert_eq!(set.count_in(probe), Count::from(reserved));
            prop_assert_eq!(set.covers(probe), reserved == inside.len());
            for ip in addresses() {
                prop_assert_eq!(set.contains(ip), nets.iter().any(|net| net.contains(&ip)));
            }
        }
    }
}
