//! Changes the owners of an address that moves from one pod to another, as when a virtual machine migrates.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::Block;

const POD: &str = "pod";
const NAMESPACE: &str = "namespace";

/// The owner that an address must have for a change of its owner to be made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ExpectedOwner {
    /// The address may have any owner, or none, before the change.
    #[default]
    Anyone,
    /// The address must have no owner before the change.
    None,
    /// The address must be owned by the given pod, according to the attributes `namespace` and `pod`.
    Pod {
        /// The pod's namespace.
        namespace: String,
        /// The pod's name.
        name: String,
    },
}

impl ExpectedOwner {
    /// Returns the namespace and the name of the expected pod, for Calico's error message. If no pod is expected, both
    /// the namespace and the name are empty.
    fn pod(&self) -> (&str, &str) {
        match self {
            Self::Pod { namespace, name } => (namespace, name),
            Self::Anyone | Self::None => ("", ""),
        }
    }

    fn is_met(&self, attributes: &BTreeMap<String, String>) -> bool {
        match self {
            Self::Anyone => true,
            Self::None => attributes.is_empty(),
            Self::Pod { namespace, name } => {
                attributes.get(NAMESPACE) == Some(namespace) && attributes.get(POD) == Some(name)
            }
        }
    }
}

/// A change of the active or the alternate owner of an address. The new attributes replace all existing attributes of
/// the changed owner.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OwnerChange {
    /// The new attributes of the owner; empty to remove the owner.
    pub attributes: BTreeMap<String, String>,
    /// The owner that the address must have for the change to be made.
    pub expected: ExpectedOwner,
}

impl OwnerChange {
    /// Creates an owner change that replaces the owner's attributes by the given attributes.
    pub fn to(attributes: BTreeMap<String, String>) -> Self {
        Self { attributes, expected: ExpectedOwner::Anyone }
    }

    /// Creates an owner change that removes the owner, with all its attributes.
    pub fn clear() -> Self {
        Self::default()
    }

    /// Adds the condition that the address has the `expected` owner.
    #[must_use]
    pub fn if_owned_by(mut self, expected: ExpectedOwner) -> Self {
        self.expected = expected;
        self
    }
}

/// The changes to the active owner and the alternate owner of an address. If a field is `None`, the corresponding owner
/// stays unchanged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnerUpdate {
    /// The change of the active owner, which the document stores in `secondary`.
    pub active: Option<OwnerChange>,
    /// The change of the alternate owner, which the document stores in `alternateOwnerAttrs`.
    pub alternate: Option<OwnerChange>,
}

/// The reason why the owners of an address were not changed. The messages of [`OwnerRefusal`] equal Calico's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OwnerRefusal {
    /// The handle does not hold the address.
    #[error("IP {address} is not assigned to handle {handle}")]
    OtherHandle {
        /// The address whose owners were to be changed.
        address: IpAddr,
        /// The expected handle, under which the address is not held.
        handle: String,
    },
    /// The address has another owner than expected.
    #[error(transparent)]
    OtherOwner(Box<OtherOwner>),
}

/// The error for an address that has another owner than expected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "update conflict: {address}: cannot set {part}: expected pod={} namespace={} but found pod={pod} namespace={namespace}",
    .expected.pod().1, .expected.pod().0
)]
#[non_exhaustive]
pub struct OtherOwner {
    /// The address whose owner was to be changed.
    pub address: IpAddr,
    /// Calico's name of the owner's attributes, `ActiveOwnerAttrs` or `AlternateOwnerAttrs`.
    pub part: &'static str,
    /// The owner that the address was expected to have.
    pub expected: ExpectedOwner,
    /// The name of the pod that owns the address; empty if no pod owns the address.
    pub pod: String,
    /// The namespace of the pod that owns the address; empty if no pod owns the address.
    pub namespace: String,
}

impl Block {
    /// Changes the owners of an address that the given handle holds. Returns false if the address already has the
    /// requested owners. Both owners are compared with the expected owners before any owner is changed. Other addresses
    /// keep their owners, even if they shared a block entry with the changed address. The address keeps its sequence
    /// number, because a change of owners is no new assignment.
    ///
    /// # Errors
    /// [`OwnerRefusal`] if the handle does not hold the address, or if an owner of the address is not the expected one.
    /// If an owner change fails, the block is unchanged.
    pub fn set_owners(&mut self, address: IpAddr, handle: &str, update: &OwnerUpdate) -> Result<bool, OwnerRefusal> {
        let held = self.attributes_of(address).filter(|entry| entry.has_handle(handle));
        let (Some(entry), Some(ordinal)) = (held, self.ordinal(address)) else {
            return Err(OwnerRefusal::OtherHandle { address, handle: handle.to_owned() });
        };
        let parts = [
            ("ActiveOwnerAttrs", &update.active, entry.attributes()),
            ("AlternateOwnerAttrs", &update.alternate, entry.alternate_attributes()),
        ];
        for (part, change, current) in parts {
            let Some(OwnerChange { expected, .. }) = change else { continue };
            if !expected.is_met(current) {
                let found = |name| current.get(name).cloned().unwrap_or_default();
                let (expected, pod, namespace) = (expected.clone(), found(POD), found(NAMESPACE));
                let other = OtherOwner { address, part, expected, pod, namespace };
                return Err(OwnerRefusal::OtherOwner(Box::new(other)));
            }
        }
        let mut entry = entry.clone();
        if let Some(change) = &update.active {
            entry.set_attributes(change.attributes.clone());
        }
        if let Some(change) = &update.alternate {
            entry.set_alternate_attributes(change.attributes.clone());
        }
        if self.attributes_of(address) == Some(&entry) {
            return Ok(false);
        }
        let same = self.attributes().iter().position(|other| *other == entry);
        let index = same.unwrap_or_else(|| self.push_attribute(entry));
        if let Some(slot) = self.allocations.get_mut(ordinal) {
            *slot = Some(index);
        }
        self.compact();
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use time::OffsetDateTime;

    use super::*;
    use crate::model::{Attribute, Owner};
    use crate::reservations::Reservations;

    fn pod(name: &str) -> BTreeMap<String, String> {
        [(NAMESPACE, "shop"), (POD, name)].map(|(key, value)| (key.to_owned(), value.to_owned())).into()
    }

    fn expected(name: &str) -> ExpectedOwner {
        ExpectedOwner::Pod { namespace: "shop".into(), name: name.into() }
    }

    fn active(change: OwnerChange) -> OwnerUpdate {
        OwnerUpdate { active: Some(change), alternate: None }
    }

    fn alternate(change: OwnerChange) -> OwnerUpdate {
        OwnerUpdate { active: None, alternate: Some(change) }
    }

    /// A block in which pod `a` has two addresses that share an entry.
    fn block() -> (Block, IpAddr, IpAddr) {
        let cidr = "10.0.0.0/30".parse().unwrap();
        let now = OffsetDateTime::UNIX_EPOCH;
        let mut block = Block::new(cidr, Some(&Owner::host("n")), now, None).unwrap();
        let taken = block.assign_auto(2, &Attribute::new(Some("h"), pod("a")), &Reservations::default());
        (block, taken[0], taken[1])
    }

    #[test]
    fn owner_moves_one_address_and_keeps_sequence_number() {
        let (mut block, first, second) = block();
        block.bump();
        let number = block.sequence_number_of(first);
        assert_eq!(block.set_owners(first, "h", &alternate(OwnerChange::to(pod("b")))), Ok(true));
        let entry = block.attributes_of(first).unwrap();
        assert_eq!((entry.attributes(), entry.alternate_attributes()), (&pod("a"), &pod("b")));
        assert!(block.attributes_of(second).unwrap().alternate_attributes().is_empty());
        let swap = OwnerUpdate {
            active: Some(OwnerChange::to(pod("b")).if_owned_by(expected("a"))),
            alternate: Some(OwnerChange::to(pod("a")).if_owned_by(expected("b"))),
        };
        assert_eq!(block.set_owners(first, "h", &swap), Ok(true));
        let entry = block.attributes_of(first).unwrap();
        assert_eq!((entry.attributes(), entry.alternate_attributes()), (&pod("b"), &pod("a")));
        assert_eq!(block.sequence_number_of(first), number);
        assert_eq!(block.ips_by_handle("h"), [first, second]);
    }

    #[test]
    fn owner_change_shares_entries_and_skips_no_op() {
        let (mut block, first, _) = block();
        let before = block.clone();
        assert_eq!(block.set_owners(first, "h", &active(OwnerChange::to(pod("a")))), Ok(false));
        assert_eq!(block.set_owners(first, "h", &OwnerUpdate::default()), Ok(false));
        assert_eq!(block.set_owners(first, "h", &alternate(OwnerChange::clear())), Ok(false));
        assert_eq!(block, before);
        assert_eq!(block.set_owners(first, "h", &active(OwnerChange::clear())), Ok(true));
        assert!(block.attributes_of(first).unwrap().attributes().is_empty());
        assert_eq!(block.set_owners(first, "h", &active(OwnerChange::to(pod("a")))), Ok(true));
        assert_eq!(block.attributes().len(), 1, "both addresses share an entry once more");
    }

    #[test]
    fn owner_change_does_nothing_when_expectation_is_unmet() {
        let (mut block, first, _) = block();
        let before = block.clone();
        let update = OwnerUpdate {
            active: Some(OwnerChange::to(pod("b")).if_owned_by(expected("a"))),
            alternate: Some(OwnerChange::clear().if_owned_by(expected("b"))),
        };
        let refusal = block.set_owners(first, "h", &update).unwrap_err();
        assert_eq!(
            refusal.to_string(),
            "update conflict: 10.0.0.0: cannot set AlternateOwnerAttrs: expected pod=b namespace=shop but found \
             pod= namespace="
        );
        let refusal = block
            .set_owners(first, "h", &active(OwnerChange::to(pod("b")).if_owned_by(ExpectedOwner::None)))
            .unwrap_err();
        assert_eq!(
            refusal.to_string(),
            "update conflict: 10.0.0.0: cannot set ActiveOwnerAttrs: expected pod= namespace= but found pod=a \
             namespace=shop"
        );
        assert_eq!(block, before);
        assert_eq!(
            block.set_owners(first, "h", &alternate(OwnerChange::to(pod("b")).if_owned_by(ExpectedOwner::None))),
            Ok(true)
        );
    }

    #[test]
    fn owner_change_needs_handle() {
        let (mut block, first, _) = block();
        let update = active(OwnerChange::clear());
        let refusal = block.set_owners(first, "other", &update).unwrap_err();
        assert_eq!(refusal.to_string(), "IP 10.0.0.0 is not assigned to handle other");
        for address in ["10.0.0.3", "10.9.9.9"] {
            assert!(block.set_owners(address.parse().unwrap(), "h", &update).is_err(), "{address}");
        }
    }
}
