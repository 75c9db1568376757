//! Addresses of a block that workloads keep.

use std::net::IpAddr;

use time::OffsetDateTime;

use super::{Attribute, Block};
use crate::sticky::{Until, overdue, waits_until};

impl Block {
    /// Puts this entry in the place of whatever an address has: another holder, a workload that it waits for, or nothing.
    /// That counts as an assignment of the address. False if the address is not of this block.
    pub fn keep(&mut self, ip: IpAddr, entry: &Attribute) -> bool {
        let Some(ordinal) = self.ordinal(ip) else { return false };
        self.set_taken(&[ordinal], entry);
        self.compact();
        true
    }

    /// The addresses that wait for a workload whose time is over, the longest overdue first.
    pub fn overdue(&self, now: OffsetDateTime) -> Vec<IpAddr> {
        let mut found: Vec<(OffsetDateTime, IpAddr)> =
            self.allocated().filter_map(|(ip, entry)| Some((overdue(entry, now)?, ip))).collect();
        found.sort();
        found.into_iter().map(|(_, ip)| ip).collect()
    }

    /// True if an address waits for its workload for a time: it becomes assignable without a write.
    pub(super) fn may_become_overdue(&self) -> bool {
        self.allocated().any(|(_, entry)| matches!(waits_until(entry), Some(Until::At(_))))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use time::Duration;

    use super::*;
    use crate::attachment::{INTERFACE, NETWORK};
    use crate::model::AddressState;
    use crate::reservations::Reservations;
    use crate::sticky::{STICKY, STICKY_FOR, STICKY_UNTIL};

    const NOW: OffsetDateTime = OffsetDateTime::UNIX_EPOCH;

    fn block() -> Block {
        Block::new("10.0.0.0/30".parse().unwrap(), None, NOW, None).unwrap()
    }

    fn holder(handle: &str, name: &str, wait: &str) -> Attribute {
        let attributes = [(STICKY, name), (STICKY_FOR, wait), (NETWORK, "net"), (INTERFACE, "eth0"), ("node", "n")];
        let attributes = attributes.map(|(name, value)| (name.to_owned(), value.to_owned()));
        Attribute::new(Some(handle), BTreeMap::from(attributes))
    }

    #[test]
    fn a_released_address_waits_and_is_taken_again() {
        for cooldown in [0, 60] {
            let mut block = block();
            let none = Reservations::default();
            let ip = block.assign_auto(1, &holder("net.c1", "web-0", "30"), &none)[0];
            let number = block.sequence_number_of(ip);
            block.bump();
            let released = block.release_by_handle("net.c1", NOW, cooldown);
            assert_eq!((released.released, released.by_handle["net.c1"]), (vec![ip], 1));
            let AddressState::Assigned(entry) = block.lookup(ip) else { panic!("{:?}", block.lookup(ip)) };
            assert_eq!((entry.handle(), entry.node()), (None, None), "Calico passes over it");
            assert_eq!(
                (entry.get(STICKY), entry.get(NETWORK), entry.get(INTERFACE)),
                (Some("web-0"), Some("net"), Some("eth0"))
            );
            let until = NOW + Duration::seconds(30.max(cooldown));
            assert_eq!(waits_until(entry), Some(Until::At(until)));
            assert_ne!(block.sequence_number_of(ip), number);
            assert!(!block.is_empty());
            assert!(!block.free_addresses().any(|free| free == ip));
            assert!(block.overdue(until).is_empty());
            assert_eq!(block.overdue(until + Duration::SECOND), [ip]);

            let again = holder("net.c2", "web-0", "30");
            assert!(block.keep(ip, &again));
            assert_eq!(block.attributes_of(ip), Some(&again));
            assert_eq!(block.free_addresses().count(), 3);
            assert!(block.overdue(until + Duration::SECOND).is_empty());
        }
    }

    #[test]
    fn pinned_addresses_wait_for_ever_and_others_are_free_at_once() {
        let mut block = block();
        let none = Reservations::default();
        let kept = block.assign_auto(1, &holder("net.c1", "web-0", "forever"), &none)[0];
        let plain = Attribute::new(Some("net.c1"), BTreeMap::new());
        let other = block.assign_auto(1, &plain, &none)[0];
        assert_eq!(block.release_by_handle("net.c1", NOW, 0).released, [kept, other]);
        assert_eq!(block.lookup(other), AddressState::Free);
        let entry = block.attributes_of(kept).unwrap();
        assert_eq!((waits_until(entry), entry.get(STICKY_UNTIL)), (Some(Until::Forever), Some("forever")));
        assert!(block.overdue(NOW + Duration::days(40_000)).is_empty());
    }

    #[test]
    fn a_full_block_with_an_address_that_waits_is_not_full_for_ever() {
        let mut block = block();
        let none = Reservations::default();
        block.assign_auto(4, &holder("net.c1", "web-0", "30"), &none);
        assert!(block.is_full());
        block.release_where(NOW, 0, |ip, _| ip == "10.0.0.2".parse::<IpAddr>().unwrap());
        assert!(!block.is_full());
        assert!(!block.keep("10.0.0.9".parse().unwrap(), &holder("net.c2", "web-0", "30")));
    }
}
