//! Addresses that are kept from others: pins, unpins and lists those of workloads (see [`ipam_core::sticky`]), and ends a quarantine.

use std::net::IpAddr;

use ipam_core::assign::refuse_among_prefixes;
use ipam_core::assign_context::{decode_all, read_config};
use ipam_core::attachment::{INTERFACE, NETWORK};
use ipam_core::block_lookup::group_by_block;
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{AddressState, Attribute, Block, Document, IpReservation, Pool, ReleaseRequest, StickyAddress};
use ipam_core::pools::block_of;
use ipam_core::quarantine::{QUARANTINE, QuarantineEntry, take};
use ipam_core::reservations::Reservations;
use ipam_core::sticky::{PINNED, STICKY, STICKY_FOR, Sticky, WaitEnd, is_pinned, pinned_to, waits_until};
use ipam_core::usage::{SnapshotReader, reread};
use ipam_core::vm::is_vms;
use ipam_core::workloads::{forget, read_record, write_record};
use ipam_core::write_set::WriteSet;
use ipam_core::{Error, Result, transact};
use ipnet::IpNet;
use kv::{Deadline, Range, Transaction};

use crate::Operator;

/// An address that a workload keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptAddress {
    /// The address.
    pub address: IpAddr,
    /// The workload's name.
    pub workload: String,
    /// True if an operator has pinned it.
    pub is_pinned: bool,
    /// The end of its wait; `None` while it is in use.
    pub until: Option<WaitEnd>,
    /// The handle under which it is in use.
    pub handle: Option<String>,
    /// The network in which the workload had it last.
    pub network: Option<String>,
    /// The interface in the container that had it last.
    pub interface: Option<String>,
    /// The node on which it is in use.
    pub node: Option<String>,
}

impl KeptAddress {
    fn of(address: IpAddr, entry: &Attribute) -> Option<Self> {
        let text = |name: &str| entry.get(name).map(str::to_owned);
        let until = waits_until(entry);
        Some(Self {
            address,
            workload: text(STICKY)?,
            is_pinned: is_pinned(entry),
            until,
            handle: entry.handle().filter(|_| until.is_none()).map(str::to_owned),
            network: text(NETWORK),
            interface: text(INTERFACE),
            node: entry.node().map(str::to_owned),
        })
    }
}

impl Operator {
    /// Pins an address: it is for the workload of this name and for no other, for ever. An address in use stays with its
    /// holder, and waits for the workload after its release. A network that is named has the workload get the address
    /// there only. Without one an address that is in use or waits already stays for its network and interface, and a free
    /// one is for any.
    ///
    /// Guards: the block and the record of the workload.
    ///
    /// # Errors
    /// `Invalid` for a name that cannot be one, and for an address that is in no pool, reserved, in cooldown, another
    /// workload's, in use in another network than the named one, or a virtual machine's.
    pub async fn pin(&self, ip: IpAddr, name: &str, network: Option<&str>, deadline: Deadline) -> Result<KeptAddress> {
        Sticky::check_name(name).map_err(Error::Invalid)?;
        transact!(self.ipam(), deadline, |tx| {
            let around = AddressContext::read(tx, ip).await?;
            let Some(cidr) = around.assignable() else {
                return Err(Error::Invalid(format!("{ip} is in no pool; see which there are with margay pool list")));
            };
            let unit = around.unit();
            let ip = unit.network();
            if let Some(by) = around.reserved_by() {
                return Err(Error::Invalid(format!(
                    "{ip} is reserved by reservation {by}, so no workload can have it"
                )));
            }
            let cooldown = read_config(tx).await?.cooldown_seconds();
            let mut work = WriteSet::new(tx, self.ipam().now(), cooldown);
            let entry = match work.block(cidr).await?.map(|block| block.lookup(ip)) {
                None => {
                    if let Some(pool) = &around.pool {
                        refuse_among_prefixes(&mut work, pool).await?;
                    }
                    work.create(Block::of_length(cidr, unit.prefix_len(), None, self.ipam().now(), None)?).await?;
                    None
                }
                Some(AddressState::Free | AddressState::Outside) => None,
                Some(AddressState::CoolingDown(_)) => return Err(Error::CoolingDown(ip)),
                Some(AddressState::Assigned(entry)) => Some(entry.clone()),
            };
            if let Some(other) = entry.as_ref().and_then(|entry| entry.get(STICKY)).filter(|other| *other != name) {
                let text = format!("{ip} is kept for {other}; first: margay ipam unpin {ip}");
                return Err(Error::Invalid(text));
            }
            let in_use = entry.as_ref().is_some_and(|entry| waits_until(entry).is_none());
            let of = |attribute| entry.as_ref().and_then(|entry| entry.get(attribute));
            let (network, interface) = match network {
                Some(network) if of(NETWORK) != Some(network) => (Some(network), None),
                _ => (of(NETWORK), of(INTERFACE)),
            };
            if let Some(entry) = entry.as_ref().filter(|_| in_use) {
                refuse_use_elsewhere(ip, entry, network)?;
            }
            let waiting = pinned_to(name, network, interface);
            let pin = [(STICKY, Some(name)), (STICKY_FOR, Some(PINNED))];
            let changed = work.change(cidr, |block| match in_use {
                true => block.renew(ip, pin),
                false => drop(block.keep(ip, &waiting)),
            });
            changed.await?;
            let now = work.block(cidr).await?.and_then(|block| KeptAddress::of(ip, block.attributes_of(ip)?));
            let Some(kept) = now else { return Err(Error::Unassigned(ip)) };
            let mut record = read_record(work.tx, name).await?;
            record.remove(ip);
            // A pinned address comes before one that only waits for a time.
            let (network, interface) = (kept.network.clone(), kept.interface.clone());
            record.addresses.insert(0, StickyAddress { address: ip, network, interface });
            write_record(work.tx, name, &record)?;
            work.write().await?;
            Ok(kept)
        })
    }

    /// Ends that a workload keeps an address. An address in use stays with its holder; one that waits is free, or in
    /// cooldown. Returns what was recorded.
    ///
    /// # Errors
    /// `Invalid` if no workload keeps the address.
    pub async fn unpin(&self, ip: IpAddr, deadline: Deadline) -> Result<KeptAddress> {
        transact!(self.ipam(), deadline, |tx| {
            let cidr = AddressContext::read(tx, ip).await?.block;
            let cooldown = read_config(tx).await?.cooldown_seconds();
            let mut work = WriteSet::new(tx, self.ipam().now(), cooldown);
            let kept = match cidr {
                Some(cidr) => {
                    let kept = |block: &Block| KeptAddress::of(block.first_of(ip), block.attributes_of(ip)?);
                    work.block(cidr).await?.and_then(kept)
                }
                None => None,
            };
            let (Some(kept), Some(cidr)) = (kept, cidr) else {
                return Err(Error::Invalid(format!(
                    "no workload keeps {ip}; see which there are with margay ipam list"
                )));
            };
            let ip = work.block(cidr).await?.map_or(ip, |block| block.first_of(ip));
            let (now, request) = (self.ipam().now(), [ReleaseRequest::new(ip)]);
            if kept.until.is_some() {
                work.change(cidr, |block| block.release_addresses(&request, now, cooldown)).await?.transpose()?;
            } else {
                work.change(cidr, |block| block.renew(ip, [(STICKY, None), (STICKY_FOR, None)])).await?;
            }
            forget(work.tx, &kept.workload, ip).await?;
            work.write().await?;
            Ok(kept)
        })
    }

    /// The addresses that workloads keep, ascending, as of one revision.
    ///
    /// # Errors
    /// Those of the store. Damaged blocks are passed over, and the log says so.
    pub async fn kept_addresses(&self, deadline: Deadline) -> Result<Vec<KeptAddress>> {
        let read = || async {
            let mut all = Vec::new();
            let blocks = Range::Prefix(keys::blocks_prefix(None));
            self.ipam()
                .for_each(blocks, &mut SnapshotReader::new(deadline), |block: Block| {
                    all.extend(block.allocated().filter_map(|(ip, entry)| KeptAddress::of(ip, entry)));
                })
                .await?;
            all.sort_by_key(|one| one.address);
            Ok(all)
        };
        Ok(reread(read).await?)
    }
}

/// Refuses to pin an address whose holder would not leave it to the workload in this network.
fn refuse_use_elsewhere(ip: IpAddr, entry: &Attribute, network: Option<&str>) -> Result<()> {
    if is_vms(entry) {
        let text = format!("{ip} is a virtual machine's, which keeps it without a pin");
        return Err(Error::Invalid(text));
    }
    match (entry.get(NETWORK), network) {
        (Some(own), Some(other)) if own != other => Err(Error::Invalid(format!(
            "{ip} is in use in network {own}; pin it without --network, or once its container has ended"
        ))),
        _ => Ok(()),
    }
}

/// The documents around an address.
struct AddressContext {
    ip: IpAddr,
    pool: Option<Pool>,
    reservations: Vec<IpReservation>,
    /// The block that the address is of, in a pool or stored outside of all pools.
    block: Option<IpNet>,
}

impl AddressContext {
    async fn read(tx: &mut Transaction, ip: IpAddr) -> Result<Self> {
        let listed =
            [ResourceKind::IpPool, ResourceKind::IpReservation].map(|kind| Range::Prefix(keys::resources_prefix(kind)));
        tx.prefetch(vec![keys::config()], listed.iter().cloned().map(Into::into).collect()).await?;
        let pools: Vec<Pool> = decode_all(&tx.snapshot_list(&listed[0]).await?);
        let reservations = decode_all(&tx.snapshot_list(&listed[1]).await?);
        let block = group_by_block(tx, &pools, &[ReleaseRequest::new(ip)]).await?.into_keys().next();
        let pool = pools.into_iter().find(|pool| pool.cidr().contains(&ip));
        Ok(Self { ip, pool, reservations, block })
    }

    /// The block of the pool from which the address can be assigned.
    fn assignable(&self) -> Option<IpNet> {
        self.pool.as_ref().and_then(|pool| block_of(pool, self.ip))
    }

    /// The address, or in a pool of prefixes the prefix that has it.
    fn unit(&self) -> IpNet {
        self.pool.as_ref().map_or_else(|| self.ip.into(), |pool| pool.unit_of(self.ip))
    }

    fn reserved_by(&self) -> Option<&str> {
        let covers = |one: &&IpReservation| Reservations::from_documents([*one]).0.touches(self.unit());
        self.reservations.iter().find(covers).map(IpReservation::name)
    }
}

impl Operator {
    /// Takes an address out of the quarantine. Returns why it was there.
    ///
    /// # Errors
    /// `Invalid` if it is not in there.
    pub async fn release_quarantined(&self, ip: IpAddr, deadline: Deadline) -> Result<QuarantineEntry> {
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
