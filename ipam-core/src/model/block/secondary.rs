//! Recognizes the addresses of secondary networks in blocks. Secondary networks are networks that are not Calico's, in
//! a store that Calico also reads.

use std::net::IpAddr;

use super::Block;
use crate::attachment::{OWN_NODE, use_own_names};
use crate::model::Attribute;

impl Attribute {
    /// True if the block's entry belongs to an address of a secondary network. Only entries of secondary networks have
    /// Margay's attribute for the node. The argument `known` recognizes names of secondary networks, for addresses that
    /// were assigned before Margay's node attribute existed.
    pub fn is_secondary(&self, known: impl Fn(&str) -> bool) -> bool {
        self.get(OWN_NODE).is_some() || self.network().is_some_and(known)
    }
}

impl Block {
    /// True if every held address of the block belongs to a secondary network, or if no address is held.
    pub fn is_secondary(&self, known: impl Fn(&str) -> bool) -> bool {
        let mut held = self.allocated().filter(|(_, entry)| entry.released_at().is_none());
        held.all(|(_, entry)| entry.is_secondary(&known))
    }

    /// Replaces Calico's attribute names with Margay's on the block's addresses of secondary networks. Returns the
    /// number of addresses whose attribute names were replaced. Replacing the attribute names changes the address's
    /// sequence number, like a new assignment. If Calico's kube-controllers read an address before its attribute names
    /// were replaced, their release request has the old sequence number and fails.
    pub fn use_own_names(&mut self, known: impl Fn(&str) -> bool) -> usize {
        let held = self.allocated().filter(|(_, entry)| entry.released_at().is_none() && entry.is_secondary(&known));
        let addresses: Vec<IpAddr> = held.map(|(address, _)| address).collect();
        addresses.into_iter().filter(|address| self.use_own_names_of(*address)).count()
    }

    /// Replaces Calico's attribute names with Margay's on one address. Returns false if the address already has
    /// Margay's attribute names, or has no holder.
    pub fn use_own_names_of(&mut self, address: IpAddr) -> bool {
        let (Some(entry), Some(ordinal)) = (self.attributes_of(address), self.ordinal(address)) else { return false };
        let mut attributes = entry.attributes_with_network();
        if !use_own_names(&mut attributes) {
            return false;
        }
        let mut entry = entry.clone();
        entry.set_attributes(attributes);
        let same = self.attributes().iter().position(|other| *other == entry);
        let index = same.unwrap_or_else(|| self.push_attribute(entry));
        if let Some(slot) = self.allocations.get_mut(ordinal) {
            *slot = Some(index);
        }
        self.set_sequence(ordinal);
        self.compact();
        true
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use time::OffsetDateTime;

    use super::*;
    use crate::attachment::NETWORK;
    use crate::model::Owner;
    use crate::reservations::Reservations;

    fn holder(handle: &str, attributes: &[(&str, &str)]) -> Attribute {
        let attributes: BTreeMap<_, _> = attributes.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        Attribute::new(Some(handle), attributes)
    }

    #[test]
    fn secondary_names_change_only_when_network_is_known() {
        let cidr = "10.0.0.0/29".parse().unwrap();
        let mut block = Block::new(cidr, Some(&Owner::host("a")), OffsetDateTime::UNIX_EPOCH, None).unwrap();
        let none = Reservations::default();
        let old = [("node", "a"), ("pod", "web"), ("namespace", "shop"), (NETWORK, "macvlan")];
        let first = block.assign_auto(2, &holder("macvlan.c1", &old), &none);
        let other = block.assign_auto(1, &holder("calico.c1", &[("node", "a"), (NETWORK, "calico")]), &none)[0];
        block.bump();
        let number = block.sequence_number_of(first[0]);
        assert!(!block.is_secondary(|network| network == "macvlan"));
        assert!(block.is_secondary(|_| true));
        assert_eq!(block.use_own_names(|network| network == "macvlan"), 2);
        assert_eq!(block.use_own_names(|network| network == "macvlan"), 0);
        for ip in &first {
            let entry = block.attributes_of(*ip).unwrap();
            assert_eq!((entry.get("pod"), entry.get("node")), (None, None));
            assert_eq!((entry.pod(), entry.namespace(), entry.node()), (Some("web"), Some("shop"), Some("a")));
            assert_ne!(block.sequence_number_of(*ip), number);
        }
        assert_eq!(block.attributes().len(), 2, "two addresses share an entry as before");
        assert_eq!(block.attributes_of(other).unwrap().get("node"), Some("a"));
    }
}
