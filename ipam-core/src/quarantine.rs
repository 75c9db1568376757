//! Manages the quarantine of addresses that a device on the network uses although the store has not assigned them to
//! the device. A quarantined address is reserved for a day, or until an operator releases it.
//!
//! One IPReservation with a fixed name lists all quarantined addresses, so neither Margay nor Calico assigns them on
//! any node. An annotation of the reservation records when and why each address was quarantined. Addresses that were
//! quarantined more than a day ago are removed when the next address is quarantined.
//!
//! One commit releases the attachment's address and quarantines it. The commit guards the reservation, the blocks that
//! lose an address, and the attachment's handle.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use kv::Deadline;
use serde::{Deserialize, Serialize};
use time::{Duration, OffsetDateTime};

use crate::assign_context::read_config;
use crate::attachment::{Attachment, Ownership};
use crate::boxed_future;
use crate::check::held_by;
use crate::error::Result;
use crate::ipam::{Ipam, transact};
use crate::model::keys::{self, ResourceKind};
use crate::model::{Document, IpReservation};
use crate::reservations::{Reservations, parse_entry};
use crate::timestamps::{age, parse_rfc3339, rfc3339};
use crate::write_set::WriteSet;

/// The name of the reservation that lists the quarantined addresses.
pub const QUARANTINE: &str = "margay-quarantine";
/// The annotation of the quarantine's reservation: a JSON object that maps addresses to their [`QuarantineEntry`].
const QUARANTINE_ANNOTATION: &str = "margay.io/quarantine";
/// Maximum number of quarantined addresses, limited because each ADD reads all of them.
pub const MAX_QUARANTINED_ADDRESSES: usize = 256;
/// How long an address stays in quarantine, unless the quarantine is full.
pub const QUARANTINE_PERIOD: Duration = Duration::DAY;

/// When and why an address was quarantined, and by which node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuarantineEntry {
    /// The start of the address's quarantine, as RFC 3339 in UTC.
    pub since: String,
    /// The observation that led to the quarantine, as text.
    pub reason: String,
    /// The node that has observed a device with the quarantined address.
    pub node: String,
}

/// The quarantined addresses, each with when and why it was quarantined.
pub type Quarantine = BTreeMap<IpAddr, QuarantineEntry>;

/// A quarantined address, as shown by `margay ipam quarantine list` (as JSON) and by the daemon's web page.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct QuarantineRow {
    /// The quarantined address.
    pub address: IpAddr,
    /// When and why the address was quarantined, and by which node.
    #[serde(flatten)]
    pub why: QuarantineEntry,
}

/// Returns the rows of a quarantine, one for each address.
pub fn quarantine_rows(quarantine: Quarantine) -> Vec<QuarantineRow> {
    quarantine.into_iter().map(|(address, why)| QuarantineRow { address, why }).collect()
}

/// Returns the addresses that the reservation named [`QUARANTINE`] quarantines. If an operator removes an address from
/// the quarantine's reservation, the address is no longer quarantined.
pub fn quarantine_of(reservations: &[IpReservation]) -> Quarantine {
    reservations.iter().find(|one| one.name() == QUARANTINE).map(recorded).unwrap_or_default()
}

fn recorded(document: &IpReservation) -> Quarantine {
    let noted = document.resource().annotation(QUARANTINE_ANNOTATION);
    let mut noted: Quarantine = noted.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    let (reserved, _) = Reservations::from_documents([document]);
    noted.retain(|ip, _| reserved.contains(*ip));
    noted
}

/// True if an address has been in quarantine for at least [`QUARANTINE_PERIOD`].
fn is_over(entry: &QuarantineEntry, now: OffsetDateTime) -> bool {
    parse_rfc3339(&entry.since).is_some_and(|since| age(now, since) >= QUARANTINE_PERIOD)
}

/// Returns a reservation without the addresses whose time in quarantine is over. Addresses whose quarantine is over can
/// be assigned, and the CNI plugin probes them again when they are assigned.
pub(crate) fn in_force(mut document: IpReservation, now: OffsetDateTime) -> IpReservation {
    if document.name() == QUARANTINE {
        let before = recorded(&document);
        if before.values().any(|entry| is_over(entry, now)) {
            let mut after = before.clone();
            after.retain(|_, entry| !is_over(entry, now));
            record(&mut document, &before, &after);
        }
    }
    document
}

/// Adds addresses to the quarantine, and removes addresses whose time in quarantine is over. If more than
/// [`MAX_QUARANTINED_ADDRESSES`] addresses are then quarantined, removes and returns the oldest.
fn add(document: &mut IpReservation, new: &Quarantine, now: OffsetDateTime) -> Vec<IpAddr> {
    let before = recorded(document);
    let mut after = before.clone();
    after.retain(|_, entry| !is_over(entry, now));
    after.extend(new.iter().map(|(ip, entry)| (*ip, entry.clone())));
    let mut dropped = Vec::new();
    while after.len() > MAX_QUARANTINED_ADDRESSES {
        let Some(ip) = after.iter().min_by_key(|(_, entry)| &entry.since).map(|(ip, _)| *ip) else { break };
        after.remove(&ip);
        dropped.push(ip);
    }
    record(document, &before, &after);
    dropped
}

/// Removes an address from the quarantine, and returns its quarantine entry; `None` if the address is not quarantined.
pub fn take(document: &mut IpReservation, ip: IpAddr) -> Option<QuarantineEntry> {
    let before = recorded(document);
    let mut after = before.clone();
    let taken = after.remove(&ip)?;
    record(document, &before, &after);
    Some(taken)
}

/// Replaces the quarantined addresses in the reservation. CIDRs that an operator has added to the reservation are kept.
fn record(document: &mut IpReservation, before: &Quarantine, after: &Quarantine) {
    let single = |ip: &IpAddr| IpNet::from(*ip);
    let mut networks: Vec<IpNet> = document.texts().iter().filter_map(|text| parse_entry(text)).collect();
    networks.retain(|net| !before.keys().any(|ip| single(ip) == *net));
    networks.extend(after.keys().map(single));
    document.set_networks(&networks);
    document.resource_mut().set_annotation(QUARANTINE_ANNOTATION, &serde_json::to_string(after).unwrap_or_default());
}

impl Ipam {
    /// Releases and quarantines addresses that were just assigned to an attachment but that another device uses, in one
    /// commit. `found` contains each address with the reason for its quarantine. Addresses that the attachment does not
    /// hold are ignored. Returns the addresses that were quarantined.
    ///
    /// # Errors
    /// Any store error. `Malformed` for damaged documents that the commit needs.
    #[boxed_future]
    pub async fn quarantine(
        &self,
        attachment: &Attachment,
        found: &[(IpAddr, String)],
        deadline: Deadline,
    ) -> Result<Vec<IpAddr>> {
        let handle = attachment.handle();
        let key = keys::resource(ResourceKind::IpReservation, QUARANTINE);
        let (done, dropped) = transact!(self, deadline, |tx| {
            let mut first = self.host_keys(&attachment.node);
            first.extend([keys::handle(&handle), keys::config(), key.clone()]);
            tx.prefetch(first, Vec::new()).await?;
            let mut own = attachment.clone();
            own.node = self.known_name(tx, &attachment.node).await?;
            let cooldown = read_config(tx).await?.cooldown_seconds();
            let now = self.now();
            let mut work = WriteSet::new(tx, now, cooldown);
            let held = held_by(&mut work, &own, None, |claim| claim == Ownership::Own).await?;
            let mut new = Quarantine::new();
            for one in &held {
                let Some((ip, reason)) = found.iter().find(|(ip, _)| *ip == one.ip) else { continue };
                let release = work.change(one.block, |block| {
                    block.release_where(now, cooldown, |held, entry| held == *ip && entry.has_handle(&handle))
                });
                release.await?;
                work.touch_handle(&handle, one.block);
                let (since, reason, node) = (rfc3339(now), reason.clone(), own.node.clone());
                new.insert(*ip, QuarantineEntry { since, reason, node });
            }
            if new.is_empty() {
                return Ok((Vec::new(), Vec::new()));
            }
            let stored = work.tx.get(&key).await?;
            let stored = stored.map(|value| IpReservation::decode(&key, value.as_bytes())).transpose()?;
            let mut document = stored.unwrap_or_else(|| IpReservation::new(QUARANTINE, &[], &self.uid(), now));
            let dropped = add(&mut document, &new, now);
            work.tx.put(&key, document.encode()?)?;
            work.write().await?;
            Ok((new.into_keys().collect::<Vec<_>>(), dropped))
        })?;
        if !dropped.is_empty() {
            tracing::warn!(
                ?dropped,
                "the quarantine is full; the addresses that were quarantined earliest can be assigned again"
            );
        }
        Ok(done)
    }
}

#[cfg(test)]
mod tests {
    use time::macros::datetime;

    use super::*;

    const NOW: OffsetDateTime = datetime!(2026-01-02 00:00 UTC);

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn since(at: OffsetDateTime) -> QuarantineEntry {
        QuarantineEntry { since: rfc3339(at), reason: "02:00:00:00:00:01 answered on eth1".into(), node: "n1".into() }
    }

    fn new(networks: &[&str]) -> IpReservation {
        let networks: Vec<IpNet> = networks.iter().map(|net| net.parse().unwrap()).collect();
        IpReservation::new(QUARANTINE, &networks, "u", NOW)
    }

    #[test]
    fn quarantine_entry_stays_one_day() {
        let mut document = new(&["10.9.0.0/24"]);
        add(&mut document, &[(ip("10.0.0.2"), since(NOW))].into(), NOW);
        add(&mut document, &[(ip("fd00::2"), since(NOW))].into(), NOW + Duration::hours(23));
        assert_eq!(document.texts(), ["10.9.0.0/24", "10.0.0.2/32", "fd00::2/128"]);
        let both = quarantine_of(&[new(&[]), document.clone()][1..]);
        assert_eq!(both, [(ip("10.0.0.2"), since(NOW)), (ip("fd00::2"), since(NOW))].into());
        let later = NOW + Duration::DAY;
        add(&mut document, &[(ip("10.0.0.3"), since(later))].into(), later);
        assert_eq!(document.texts(), ["10.9.0.0/24", "10.0.0.3/32"], "what a person added stays");
    }

    #[test]
    fn quarantine_drops_oldest_when_too_many() {
        let mut document = new(&[]);
        let entry = |n: u32| {
            let seconds = Duration::seconds(i64::from(n));
            (IpAddr::from((0x0a00_0000 + n).to_be_bytes()), since(NOW + seconds))
        };
        let most = u32::try_from(MAX_QUARANTINED_ADDRESSES).unwrap();
        assert!(add(&mut document, &(0..most).map(entry).collect(), NOW).is_empty());
        assert_eq!(add(&mut document, &[entry(most)].into(), NOW), [ip("10.0.0.0")]);
        assert_eq!(
            (document.texts().len(), recorded(&document).len()),
            (MAX_QUARANTINED_ADDRESSES, MAX_QUARANTINED_ADDRESSES)
        );
        assert!(document.encode().unwrap().as_bytes().len() < 64 << 10);
    }

    #[test]
    fn quarantine_entry_is_taken_out() {
        let mut document = new(&[]);
        add(&mut document, &[(ip("10.0.0.2"), since(NOW)), (ip("10.0.0.3"), since(NOW))].into(), NOW);
        assert_eq!(take(&mut document, ip("10.0.0.2")), Some(since(NOW)));
        assert_eq!(take(&mut document, ip("10.0.0.2")), None);
        assert_eq!(document.texts(), ["10.0.0.3/32"]);
    }

    #[test]
    fn quarantine_damage_is_no_entry() {
        let mut document = new(&["10.0.0.2/32"]);
        assert!(recorded(&document).is_empty());
        for damaged in ["", "[]", r#"{"10.0.0.2":7}"#, r#"{"x":{"since":"","reason":"","node":""}}"#] {
            document.resource_mut().set_annotation(QUARANTINE_ANNOTATION, damaged);
            assert!(recorded(&document).is_empty(), "{damaged}");
            add(&mut document.clone(), &[(ip("10.0.0.3"), since(NOW))].into(), NOW);
        }
        let gone = r#"{"10.0.0.3":{"since":"x","reason":"r","node":"n"}}"#;
        document.resource_mut().set_annotation(QUARANTINE_ANNOTATION, gone);
        assert!(recorded(&document).is_empty(), "a person took it out of the reservation");
    }
}
