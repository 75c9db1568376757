//! Defines sticky addresses, which named workloads keep: the record of a workload, and the workload's addresses in a
//! block.

use std::net::IpAddr;

use kv::{Key, Value};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use super::{Attribute, Block};
use crate::model::codec::{Document, Malformed, from_json, to_json};
use crate::net::Family;
use crate::sticky::{PINNED, STICKY_FOR, STICKY_UNTIL, WaitEnd, end_of_wait, is_pinned, overdue, waits_until};
use crate::timestamps::rfc3339;

/// The stored record of a workload's sticky addresses. The record lists all sticky addresses of a workload, so that a
/// single read finds them. Whether a sticky address is held, waiting or pinned is recorded in the address's block. An
/// entry of a workload's sticky record is ignored if the address's block does not keep the address for the workload.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StickyRecord {
    /// The workload's sticky addresses, in the order in which they were recorded.
    #[serde(default)]
    pub addresses: Vec<StickyAddress>,
}

/// A sticky address that a workload keeps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StickyAddress {
    /// The kept address.
    pub address: IpAddr,
    /// The network in which the workload has the address, or `None` for any network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
    /// The container's interface that has the address, or `None` for any interface.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
}

impl StickyAddress {
    /// True if the given interface of the given network may have the sticky address.
    pub fn is_for(&self, network: &str, interface: &str) -> bool {
        self.network.as_ref().is_none_or(|own| own == network)
            && self.interface.as_ref().is_none_or(|own| own == interface)
    }
}

impl StickyRecord {
    /// Returns the addresses of a family from the workload's sticky record that the given interface may use in the
    /// given network.
    pub fn of(&self, family: Family, network: &str, interface: &str) -> Vec<StickyAddress> {
        let own = |one: &&StickyAddress| Family::of(one.address) == family && one.is_for(network, interface);
        self.addresses.iter().filter(own).cloned().collect()
    }

    /// Adds a sticky address to the record, replacing an existing entry of the address.
    pub fn add(&mut self, new: StickyAddress) {
        self.remove(new.address);
        self.addresses.push(new);
    }

    /// Removes an address from the workload's record. Returns false if the address was not recorded.
    pub fn remove(&mut self, address: IpAddr) -> bool {
        let before = self.addresses.len();
        self.addresses.retain(|one| one.address != address);
        self.addresses.len() < before
    }
}

impl Document for StickyRecord {
    fn decode(key: &Key, value: &[u8]) -> Result<Self, Malformed> {
        from_json(key, value)
    }

    fn encode(&self) -> Result<Value, Malformed> {
        to_json(self)
    }
}

impl Block {
    /// Sets the entry of an address, whether the address is held, free or waiting for a workload. Like an assignment,
    /// setting the entry changes the address's sequence number. Returns false if the address is outside this block.
    pub fn keep(&mut self, ip: IpAddr, entry: &Attribute) -> bool {
        let Some(ordinal) = self.ordinal(ip) else { return false };
        self.set_taken(&[ordinal], entry);
        self.compact();
        true
    }

    /// Assigns a sticky address to its workload, and records the given entry. A pinned address stays pinned.
    pub fn assign_kept(&mut self, ip: IpAddr, entry: &Attribute) {
        let is_pinned = self.attributes_of(ip).is_some_and(is_pinned);
        if self.keep(ip, entry) && is_pinned {
            self.renew(ip, [(STICKY_FOR, Some(PINNED))]);
        }
    }

    /// Returns the sticky addresses whose wait for their workload has ended, each with the end of its wait.
    pub fn overdue(&self, now: OffsetDateTime) -> impl Iterator<Item = (OffsetDateTime, IpAddr)> {
        self.allocated().filter_map(move |(ip, entry)| Some((overdue(entry, now)?, ip)))
    }

    /// Frees, in memory, the sticky addresses whose wait for their workload has ended. Assignments call `free_overdue`
    /// only if they find no other free address.
    pub fn free_overdue(&mut self, now: OffsetDateTime) {
        let over: Vec<usize> = self.overdue(now).filter_map(|(_, ip)| self.ordinal(ip)).collect();
        if !over.is_empty() {
            over.into_iter().for_each(|ordinal| self.set_free(ordinal));
            self.compact();
        }
    }

    /// True if a sticky address waits for its workload until a recorded time. Once the recorded end of the wait has
    /// passed, the address can be assigned, even if the block still records the wait.
    pub(super) fn may_become_overdue(&self) -> bool {
        self.allocated().any(|(_, entry)| matches!(waits_until(entry), Some(WaitEnd::At(_))))
    }

    /// True if all addresses of the block are free or wait for their workloads.
    pub fn only_waits(&self) -> bool {
        self.allocated().all(|(_, entry)| waits_until(entry).is_some())
    }
}

impl Attribute {
    /// Corrects the end of a sticky address's wait for its workload, if a clock that was ahead recorded the end too
    /// late. Returns true if the address's entry was changed.
    pub(super) fn correct_wait(&mut self, now: OffsetDateTime, cooldown_seconds: i64) -> bool {
        let Some(end) = end_of_wait(self, now, cooldown_seconds) else { return false };
        self.set(STICKY_UNTIL, &rfc3339(end));
        true
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
    use crate::sticky::STICKY;

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
    fn sticky_address_waits_and_is_taken_again() {
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
            assert_eq!(waits_until(entry), Some(WaitEnd::At(until)));
            assert_ne!(block.sequence_number_of(ip), number);
            assert!(!block.is_empty());
            assert!(!block.free_addresses().any(|free| free == ip));
            assert_eq!(block.overdue(until).count(), 0);
            assert_eq!(block.overdue(until + Duration::SECOND).collect::<Vec<_>>(), [(until, ip)]);

            let again = holder("net.c2", "web-0", "30");
            assert!(block.keep(ip, &again));
            assert_eq!(block.attributes_of(ip), Some(&again));
            assert_eq!(block.free_addresses().count(), 3);
            assert_eq!(block.overdue(until + Duration::SECOND).count(), 0);
        }
    }

    #[test]
    fn sticky_pins_wait_for_ever_and_others_are_free_at_once() {
        let mut block = block();
        let none = Reservations::default();
        let kept = block.assign_auto(1, &holder("net.c1", "web-0", "forever"), &none)[0];
        let plain = Attribute::new(Some("net.c1"), BTreeMap::new());
        let other = block.assign_auto(1, &plain, &none)[0];
        assert_eq!(block.release_by_handle("net.c1", NOW, 0).released, [kept, other]);
        assert_eq!(block.lookup(other), AddressState::Free);
        let entry = block.attributes_of(kept).unwrap();
        assert_eq!((waits_until(entry), entry.get(STICKY_UNTIL)), (Some(WaitEnd::Forever), Some("forever")));
        assert_eq!(block.overdue(NOW + Duration::days(40_000)).count(), 0);
    }

    #[test]
    fn sticky_pin_outlives_use_and_wrong_clock_is_corrected() {
        let mut block = block();
        let none = Reservations::default();
        let ip = block.assign_auto(1, &holder("net.c1", "web-0", "pinned"), &none)[0];
        block.release_by_handle("net.c1", NOW, 0);
        assert_eq!(waits_until(block.attributes_of(ip).unwrap()), Some(WaitEnd::Forever));
        block.assign_kept(ip, &holder("net.c2", "web-0", "30"));
        assert!(is_pinned(block.attributes_of(ip).unwrap()));

        // A wait that is endless because of the network's former configuration does not pin the address.
        block.keep(ip, &holder("net.c2", "web-0", "forever"));
        block.release_by_handle("net.c2", NOW, 0);
        block.assign_kept(ip, &holder("net.c3", "web-0", "30"));
        assert_eq!(block.attributes_of(ip).unwrap().get(STICKY_FOR), Some("30"));

        block.keep(ip, &holder("net.c3", "web-0", "30"));
        block.release_by_handle("net.c3", NOW + Duration::days(3650), 0);
        assert_eq!(block.apply_cooldown(NOW, 0).moved, 1);
        let end = NOW + Duration::seconds(30);
        assert_eq!(waits_until(block.attributes_of(ip).unwrap()), Some(WaitEnd::At(end)));
        // A difference of a few seconds between two machines' clocks is not corrected.
        assert_eq!(block.apply_cooldown(NOW - Duration::seconds(5), 0).moved, 0);
        assert_eq!(block.apply_cooldown(end, 0).moved, 0);
    }

    #[test]
    fn sticky_full_block_is_not_full_for_ever() {
        let mut block = block();
        let none = Reservations::default();
        block.assign_auto(4, &holder("net.c1", "web-0", "30"), &none);
        assert!(block.is_full());
        block.release_where(NOW, 0, |ip, _| ip == "10.0.0.2".parse::<IpAddr>().unwrap());
        assert!(!block.is_full());
        assert!(!block.keep("10.0.0.9".parse().unwrap(), &holder("net.c2", "web-0", "30")));
    }
}
