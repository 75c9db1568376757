//! The end of a quarantine, by a person.
//!
//! Guards: the reservation that records the quarantine.

use std::net::IpAddr;

use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{Document, IpReservation};
use ipam_core::quarantine::{QUARANTINE, Quarantined, take};
use ipam_core::{Error, Result, transact};
use kv::Deadline;

use crate::Operator;

impl Operator {
    /// Takes an address out of the quarantine. Returns why it was there.
    ///
    /// # Errors
    /// `Invalid` if it is not in there.
    pub async fn release_quarantined(&self, ip: IpAddr, deadline: Deadline) -> Result<Quarantined> {
        let key = keys::resource(ResourceKind::IpReservation, QUARANTINE);
        transact!(self.ipam(), deadline, |tx| {
            let stored = tx.get(&key).await?;
            let document = stored.map(|value| IpReservation::decode(&key, value.as_bytes())).transpose()?;
            let taken = document.and_then(|mut document| Some((take(&mut document, ip)?, document)));
            let (taken, document) = taken.ok_or_else(|| Error::Invalid(format!("{ip} is not in quarantine")))?;
            match document.texts().is_empty() {
                true => tx.delete(&key)?,
                false => tx.put(&key, document.encode()?)?,
            }
            Ok(taken)
        })
    }
}
