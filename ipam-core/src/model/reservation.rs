//! An address reservation: networks whose addresses are assigned only if they are requested.

use ipnet::IpNet;
use kv::{Key, Value};
use time::OffsetDateTime;

use super::codec::{Document, Malformed};
use super::keys::ResourceKind;
use super::resource::Resource;

const CIDRS: &str = "reservedCIDRs";

/// The document under a reservation's key.
#[derive(Clone, Debug, PartialEq)]
pub struct IpReservation {
    resource: Resource,
}

impl IpReservation {
    /// A new reservation of these networks; a single address is a /32 or a /128.
    pub fn new(name: &str, networks: &[IpNet], uid: &str, now: OffsetDateTime) -> Self {
        let mut new = Self { resource: Resource::new(ResourceKind::IpReservation, name, uid, now) };
        new.set_networks(networks);
        new
    }

    /// The name.
    pub fn name(&self) -> &str {
        self.resource.name()
    }

    /// The reserved networks or single addresses, as text. An entry that is not text is shown as its JSON.
    pub fn texts(&self) -> Vec<String> {
        let entries = self.resource.spec(CIDRS).and_then(serde_json::Value::as_array).into_iter().flatten();
        entries.map(|entry| entry.as_str().map_or_else(|| entry.to_string(), str::to_owned)).collect()
    }

    /// Sets what is reserved.
    pub fn set_networks(&mut self, networks: &[IpNet]) {
        let texts = networks.iter().map(|net| net.trunc().to_string().into()).collect();
        self.resource.set_spec(CIDRS, Some(serde_json::Value::Array(texts)));
    }

    /// The whole resource.
    pub fn resource(&self) -> &Resource {
        &self.resource
    }

    /// The whole resource, for its annotations.
    pub fn resource_mut(&mut self) -> &mut Resource {
        &mut self.resource
    }
}

impl Document for IpReservation {
    fn decode(key: &Key, value: &[u8]) -> Result<Self, Malformed> {
        Ok(Self { resource: Resource::decode(ResourceKind::IpReservation, key, value)? })
    }

    fn encode(&self) -> Result<Value, Malformed> {
        self.resource.encode()
    }
}
