//! An address reservation: networks whose addresses are assigned only if they are requested.

use std::net::IpAddr;

use ipnet::IpNet;
use kv::{Key, Value};
use serde_json::{Map, Value as Json};
use time::OffsetDateTime;

use super::codec::{Document, Malformed};
use super::keys::ResourceKind;
use super::resource::Resource;
use super::spec_field::spec_fields;
use crate::DocumentError;

spec_fields! {
    /// The fields that a reservation's spec can have.
    pub const RESERVATION_FIELDS:
    CIDRS = "reservedCIDRs" as "IPReservation.ReservedCIDRs";
}

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
        let entries = self.resource.spec(CIDRS).and_then(Json::as_array).into_iter().flatten();
        entries.map(|entry| entry.as_str().map_or_else(|| entry.to_string(), str::to_owned)).collect()
    }

    /// Sets what is reserved.
    pub fn set_networks(&mut self, networks: &[IpNet]) {
        let texts = networks.iter().map(|net| net.trunc().to_string().into()).collect();
        self.resource.set_spec(CIDRS, Some(Json::Array(texts)));
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

/// Reads a reservation's spec, and returns it as it is stored.
///
/// # Errors
/// [`DocumentError::Invalid`] for an entry that is neither a network nor an address.
pub fn read_reservation_spec(written: &Map<String, Json>) -> Result<Map<String, Json>, DocumentError> {
    let wrong = |value: &Json| DocumentError::field(CIDRS.shown, value, "must be a list of networks and addresses");
    let Some(value) = CIDRS.get(written) else { return Ok(Map::new()) };
    let listed = value.as_array().ok_or_else(|| wrong(value))?;
    for entry in listed {
        let text = entry.as_str().ok_or_else(|| wrong(entry))?;
        if text.parse::<IpNet>().is_err() && text.parse::<IpAddr>().is_err() {
            return Err(DocumentError::field(CIDRS.shown, text, "is neither a network nor an address"));
        }
    }
    let stored = (!listed.is_empty()).then(|| CIDRS.with(value.clone()));
    Ok(stored.into_iter().collect())
}

impl Document for IpReservation {
    fn decode(key: &Key, value: &[u8]) -> Result<Self, Malformed> {
        Ok(Self { resource: Resource::decode(ResourceKind::IpReservation, key, value)? })
    }

    fn encode(&self) -> Result<Value, Malformed> {
        self.resource.encode()
    }
}
