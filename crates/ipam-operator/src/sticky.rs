//! Pins, unpins and lists the addresses that workloads keep (see [`ipam_core::sticky`]), and removes addresses from the
//! quarantine.

use std::net::IpAddr;

use ipam_core::assign::refuse_among_prefixes;
use ipam_core::assign_context::{decode_all, read_config};
use ipam_core::attachment::INTERFACE;
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

/// An address that a workload keeps over restarts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptAddress {
    /// The address that the workload keeps.
    pub address: IpAddr,
    /// The name of the workload that keeps the address.
    pub workload: String,
    /// True if an operator has pinned the address.
    pub is_pinned: bool,
    /// When the address stops waiting for its workload; `None` if the address is in use.
    pub until: Option<WaitEnd>,
    /// The handle under which the address is in use; `None` if the address waits for its workload.
    pub handle: Option<String>,
    /// The network in which the workload last had the address.
    pub network: Option<String>,
    /// The name of the interface that last had the address, inside the workload's container.
    pub interface: Option<String>,
    /// The node on which the address is in use.
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
            network: entry.network().map(str::to_owned),
            interface: text(INTERFACE),
            node: entry.node().map(str::to_owned),
        })
    }
}

impl Operator {
    /// Pins an address, so that only the workload with this name can get the address from now on. If the address is in
    /// use, it stays with its holder, and waits for the workload after its release.
    ///
    /// If `network` is set, the workload can get the pinned address in this network only. If `network` is `None`, the
    /// pin of a free address is valid in any network. While an address is in use or waits for its workload, its pin is
    /// valid only in the network and interface of its current or last holder.
    ///
    /// The commit guards the address's block and the workload's record.
    ///
    /// # Errors
    /// `Invalid` for an impossible workload name, and for an address that is in no pool, is reserved, is kept for
    /// another workload, is used in a network other than `network`, or belongs to a virtual machine. `CoolingDown` for
    /// an address in cooldown.
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
            let recorded = entry.as_ref().and_then(Attribute::network);
            let (network, interface) = match network {
                Some(network) if recorded != Some(network) => (Some(network), None),
                _ => (recorded, entry.as_ref().and_then(|entry| entry.get(INTERFACE))),
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
            // In a workload's record, a new pin is put before all other addresses, so that assignments prefer the
            // pinned address.
            let (network, interface) = (kept.network.clone(), kept.interface.clone());
            record.addresses.insert(0, StickyAddress { address: ip, network, interface });
            write_record(work.tx, name, &record)?;
            work.write().await?;
            Ok(kept)
        })
    }

    /// Ends the pin or the wait of an address, so that no workload keeps the address any more. If the address is in
    /// use, it stays with its holder. If the address waits for its workload, the end of the wait frees the address or
    /// starts its cooldown. Returns the address as it was before this call ended its pin or its wait.
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

    /// Lists, in ascending order and at one revision, the addresses that are kept for workloads.
    ///
    /// # Errors
    /// Any store error; a damaged block is no error, but is logged, and its addresses are omitted.
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

/// Fails if an address in use cannot be pinned, because its holder is a virtual machine or is not in the network of the
/// pin.
fn refuse_use_elsewhere(ip: IpAddr, entry: &Attribute, network: Option<&str>) -> Result<()> {
    if is_vms(entry) {
        let text = format!("{ip} is a virtual machine's, which keeps it without a pin");
        return Err(Error::Invalid(text));
    }
    match (entry.network(), network) {
        (Some(own), Some(other)) if own != other => Err(Error::Invalid(format!(
            "{ip} is in use in network {own}; pin it without --network, or once its container has ended"
        ))),
        _ => Ok(()),
    }
}

/// The pool and the block of an address, and all reservations.
struct AddressContext {
    ip: IpAddr,
    pool: Option<Pool>,
    reservations: Vec<IpReservation>,
    /// The CIDR of the stored block that contains the address; this block can lie outside of all pools.
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

    /// The CIDR of the block from which the pool assigns the address; `None` if the address is in no pool.
    fn assignable(&self) -> Option<IpNet> {
        self.pool.as_ref().and_then(|pool| block_of(pool, self.ip))
    }

    /// In a pool of prefixes, the prefix that contains the address; in any other pool, the address itself.
    fn unit(&self) -> IpNet {
        self.pool.as_ref().map_or_else(|| self.ip.into(), |pool| pool.unit_of(self.ip))
    }

    fn reserved_by(&self) -> Option<&str> {
        let covers = |one: &&IpReservation| Reservations::from_documents([*one]).0.touches(self.unit());
        self.reservations.iter().find(covers).map(IpReservation::name)
    }
}

impl Operator {
    /// Removes an address from the quarantine, and returns the address's former quarantine entry.
    ///
    /// # Errors
    /// `Invalid` if the address is not in quarantine.
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
