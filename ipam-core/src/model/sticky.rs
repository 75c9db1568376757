//! The record of the addresses that a named workload keeps.

use std::net::IpAddr;

use kv::{Key, Value};
use serde::{Deserialize, Serialize};

use super::codec::{Document, Malformed, from_json, to_json};
use crate::net::Family;

/// The document under the key of a workload's name: its addresses, so that one read finds them. The state of an address
/// is recorded in its block; an address that is the workload's no more is passed over.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StickyRecord {
    /// The addresses, in the order in which they were recorded.
    #[serde(default)]
    pub addresses: Vec<StickyAddress>,
}

/// An address of a workload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StickyAddress {
    /// The address.
    pub address: IpAddr,
    /// The network in which the workload has it; any network if none is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
    /// The interface in the container; any interface if none is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
}

impl StickyAddress {
    /// True if an interface of a network may have the address.
    pub fn is_for(&self, network: &str, interface: &str) -> bool {
        self.network.as_ref().is_none_or(|own| own == network)
            && self.interface.as_ref().is_none_or(|own| own == interface)
    }
}

impl StickyRecord {
    /// The addresses of a family that an interface of a network may have.
    pub fn of(&self, family: Family, network: &str, interface: &str) -> Vec<StickyAddress> {
        let own = |one: &&StickyAddress| Family::of(one.address) == family && one.is_for(network, interface);
        self.addresses.iter().filter(own).cloned().collect()
    }

    /// Adds an address. One that is recorded already is replaced.
    pub fn add(&mut self, new: StickyAddress) {
        self.remove(new.address);
        self.addresses.push(new);
    }

    /// Removes an address. False if it was not there.
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
