//! Repairs findings with one guarded commit each, and releases unused addresses and handles that a report lists.
//!
//! The commit of a repair guards the keys that it changes and the keys that the finding depends on. Repairing a finding
//! that no longer exists writes nothing and is not an error. A repair does not change handles and affinities that were
//! written after the inspection. A recently written key may be part of an unfinished change by another program, such as
//! Calico, that writes one key per commit.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipam_core::assign::bridge;
use ipam_core::assign_context::{decode_all, read_config};
use ipam_core::attachment::OWN_NODE;
use ipam_core::block_lookup::group_by_block;
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{
    Affinity, AffinityState, Block, Document, Handle, IpReservation, Owner, Pool, ReleaseRequest, StoredBlock,
    same_handle, without_tunnels,
};
use ipam_core::sticky::waits_until;
use ipam_core::vm::is_vms;
use ipam_core::write_set::WriteSet;
use ipam_core::{Result, transact};
use ipnet::IpNet;
use kv::{Deadline, Key, Range, Revision, Transaction};

use super::cluster_documents::lacking;
use super::finding::{Code, Finding, Subject};
use crate::Operator;

/// The result of a repair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum RepairResult {
    /// The finding was repaired.
    Done,
    /// Nothing was repaired, because the finding no longer exists or its document was written after the inspection. The
    /// caller should inspect the store again to see which faults are left.
    Changed,
}

impl Operator {
    /// Repairs a finding of the inspection of revision `at`, without ever freeing an allocated address.
    ///
    /// # Errors
    /// `Invalid` for a finding that is not mendable; `Malformed` if another document that the repair needs is damaged;
    /// any store error.
    pub async fn mend(&self, finding: &Finding, at: Revision, deadline: Deadline) -> Result<RepairResult> {
        if !finding.mendable {
            let text = format!("{} {}: it cannot be mended without a person", finding.code, finding.subject);
            return Err(ipam_core::Error::Invalid(text));
        }
        match &finding.subject {
            Subject::Block(cidr) => {
                transact!(self.ipam(), deadline, |tx| self.mend_block(tx, *cidr, finding).await)
            }
            Subject::Affinity(owner, cidr) => {
                transact!(self.ipam(), deadline, |tx| self.mend_affinity(tx, owner, *cidr, at).await)
            }
            Subject::Handle(id) => {
                transact!(self.ipam(), deadline, |tx| self.mend_handle(tx, id, &finding.blocks, at).await)
            }
            Subject::Workload(name) => {
                transact!(self.ipam(), deadline, |tx| self.mend_record(tx, name, &finding.blocks, at).await)
            }
            Subject::Reservation(name) => transact!(self.ipam(), deadline, |tx| mend_bridge(tx, name).await),
            Subject::Pool(name) => transact!(self.ipam(), deadline, |tx| mend_pool(tx, name).await),
            Subject::Endpoint(namespace, name) => {
                transact!(self.ipam(), deadline, |tx| self.mend_endpoint(tx, (namespace, name), at).await)
            }
            _ => Ok(RepairResult::Changed),
        }
    }

    async fn mend_block(&self, tx: &mut Transaction, cidr: IpNet, finding: &Finding) -> Result<RepairResult> {
        let code = finding.code;
        let known = |network: &str| finding.networks.iter().any(|name| name == network);
        let key = keys::block(cidr);
        tx.prefetch(vec![key.clone(), keys::config()], vec![pools_range().into()]).await?;
        let Some(value) = tx.get(&key).await? else { return Ok(RepairResult::Changed) };
        let stored = StoredBlock::read(&key, value.as_bytes())?;
        let rest = read_config(tx).await?.cooldown_seconds();
        let pools: Vec<Pool> = decode_all(&tx.snapshot_list(&pools_range()).await?);
        let is_gone = self.is_gone(tx, stored.block().owner()).await?;
        let mut work = WriteSet::new(tx, self.ipam().now(), rest);
        // Reading a block through the write set frees addresses whose cooldown is over, so later checks see the block
        // as it will be written.
        let Some(block) = work.block(cidr).await?.cloned() else { return Ok(RepairResult::Changed) };
        let pool = pools.iter().find(|pool| pool.cidr().contains(&cidr));
        let (is_empty, owner) = (block.is_empty(), block.owner());
        let holds = match code {
            Code::ReleasedInFuture => *stored.block() != block,
            Code::BlockOutsidePools => pool.is_none() && is_empty,
            Code::BlockOfOtherSize => pool.is_some_and(|pool| pool.block_size() != cidr.prefix_len()) && is_empty,
            Code::OwnerGone => is_gone && is_empty,
            Code::EmptyBlock => owner.is_none() && is_empty,
            Code::OddOwner => owner.as_ref().is_some_and(|owner| keys::affinity(owner, cidr).is_none()),
            Code::OwnerWithoutAffinity => match owner.as_ref().and_then(|owner| keys::affinity(owner, cidr)) {
                Some(affinity) => work.tx.get(&affinity).await?.is_none(),
                None => false,
            },
            Code::SecondaryOfNode => matches!(owner, Some(Owner::Host(_))) && !is_empty && block.is_secondary(known),
            Code::CalicosNames => block.clone().use_own_names(known) > 0,
            _ => stored.flaws().can_be_tidied(),
        };
        if !holds {
            return Ok(RepairResult::Changed);
        }
        match (code, owner) {
            (Code::OwnerWithoutAffinity, Some(owner)) => {
                work.change(cidr, |_| ()).await?;
                work.confirm_affinity(&owner, cidr).await?;
            }
            (Code::SecondaryOfNode, Some(Owner::Host(node))) => {
                let [host, secondary] = Owner::all_of(&node);
                work.change(cidr, |block| block.use_own_names(known)).await?;
                work.hand_block(cidr, &host, &secondary, self.ipam().now()).await?;
            }
            (Code::CalicosNames, _) => drop(work.change(cidr, |block| block.use_own_names(known)).await?),
            (Code::BlockOutsidePools | Code::BlockOfOtherSize | Code::OwnerGone | Code::OddOwner, owner) => {
                work.change(cidr, Block::clear_owner).await?;
                if let Some(owner) = owner {
                    work.drop_affinity(&owner, cidr).await?;
                }
            }
            _ => drop(work.change(cidr, Block::tidy).await?),
        }
        work.write().await?;
        Ok(RepairResult::Done)
    }

    /// True if the owner is a node that is not registered although other nodes are registered. The transaction's commit
    /// fails if the node's document exists again by then.
    pub(super) async fn is_gone(&self, tx: &mut Transaction, owner: Option<Owner>) -> Result<bool> {
        let Some(name) = owner.as_ref().and_then(Owner::node) else { return Ok(false) };
        let registered = Range::Prefix(keys::resources_prefix(ResourceKind::Node));
        let is_registered = tx.get(&keys::resource(ResourceKind::Node, name)).await?.is_some();
        Ok(!is_registered && !tx.snapshot_is_empty(&registered).await?)
    }

    /// Makes an affinity agree with its block, or deletes the affinity if the affinity's owner does not own the block.
    async fn mend_affinity(
        &self,
        tx: &mut Transaction,
        owner: &Owner,
        cidr: IpNet,
        at: Revision,
    ) -> Result<RepairResult> {
        let Some(key) = keys::affinity(owner, cidr) else { return Ok(RepairResult::Changed) };
        tx.prefetch(vec![key.clone(), keys::block(cidr), keys::config()], Vec::new()).await?;
        let Some(value) = tx.get(&key).await? else { return Ok(RepairResult::Changed) };
        if is_newer(tx, &key, at) {
            return Ok(RepairResult::Changed);
        }
        let state = Affinity::decode(&key, value.as_bytes()).map(|affinity| affinity.state());
        let rest = read_config(tx).await?.cooldown_seconds();
        let mut work = WriteSet::new(tx, self.ipam().now(), rest);
        let own = work.block(cidr).await?.filter(|block| block.is_owned_by(owner));
        let Some(is_empty) = own.map(Block::is_empty) else {
            work.drop_affinity(owner, cidr).await?;
            work.write().await?;
            return Ok(RepairResult::Done);
        };
        match state {
            Ok(AffinityState::Confirmed) => return Ok(RepairResult::Changed),
            Ok(AffinityState::PendingDeletion) if is_empty => {
                work.change(cidr, Block::clear_owner).await?;
                work.drop_affinity(owner, cidr).await?;
            }
            _ => {
                // Rewrites the block unchanged. If a concurrent writer has read the block in order to claim it, this
                // rewrite makes the writer's commit fail.
                work.change(cidr, |_| ()).await?;
                work.confirm_affinity(owner, cidr).await?;
            }
        }
        work.write().await?;
        Ok(RepairResult::Done)
    }
}

/// True if the transaction has read this key, and the key was last written after revision `at`.
pub(super) fn is_newer(tx: &Transaction, key: &Key, at: Revision) -> bool {
    tx.written_at(key).is_some_and(|written| written > at)
}

/// Adds the missing addresses to a bridged network's reservation.
async fn mend_bridge(tx: &mut Transaction, name: &str) -> Result<RepairResult> {
    let key = keys::resource(ResourceKind::IpReservation, name);
    tx.prefetch(vec![key.clone()], vec![pools_range().into()]).await?;
    let Some(value) = tx.get(&key).await? else { return Ok(RepairResult::Changed) };
    let mut document = IpReservation::decode(&key, value.as_bytes())?;
    let pools: Vec<Pool> = decode_all(&tx.snapshot_list(&pools_range()).await?);
    let pool = pools.iter().find(|pool| bridge::reservation_name(pool.name()) == name);
    let missing = pool.map(|pool| lacking(pool, &document)).unwrap_or_default();
    if missing.is_empty() {
        return Ok(RepairResult::Changed);
    }
    let stored = document.texts();
    let entries = stored.iter().filter_map(|text| ipam_core::reservations::parse_entry(text));
    let networks: Vec<IpNet> = entries.chain(missing).collect();
    document.set_networks(&networks);
    tx.put(&key, document.encode()?)?;
    Ok(RepairResult::Done)
}

/// Removes `Tunnel` from the allowed uses of a pool with a namespace selector.
async fn mend_pool(tx: &mut Transaction, name: &str) -> Result<RepairResult> {
    let key = keys::resource(ResourceKind::IpPool, name);
    let Some(value) = tx.get(&key).await? else { return Ok(RepairResult::Changed) };
    let Some(pool) = without_tunnels(&Pool::decode(&key, value.as_bytes())?) else { return Ok(RepairResult::Changed) };
    tx.put(&key, pool.encode()?)?;
    Ok(RepairResult::Done)
}

pub(super) fn pools_range() -> Range {
    Range::Prefix(keys::resources_prefix(ResourceKind::IpPool))
}

/// Maximum number of addresses released in one commit, which must guard and write the handle of each address.
const MAX_ADDRESSES_PER_COMMIT: usize = 60;

/// The outcome of [`Operator::reclaim`] for each requested address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReclaimResult {
    /// The released addresses, each of which is free, in cooldown, or waits for the workload that keeps it.
    pub released: Vec<IpAddr>,
    /// The requested addresses that were not released, because the holder has changed or the address must not be
    /// released.
    pub changed: Vec<IpAddr>,
}

/// The id of a handle, and the revision that last wrote the handle.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HandleRevision {
    /// The handle's id.
    pub id: String,
    /// The revision that last wrote the handle.
    pub revision: Revision,
}

impl Operator {
    /// Releases addresses, each only if its handle and sequence number are still those of the request. Three kinds of
    /// addresses are never released: addresses of virtual machines, addresses that wait for their workload, and
    /// addresses of secondary networks whose node is registered. Release requests are usually made from a calicoctl
    /// report, which lists all addresses of secondary networks as unused, even those in use. Each commit releases at
    /// most 60 addresses of one block.
    ///
    /// # Errors
    /// `Malformed` for damaged blocks and handles; any store error. If an error occurs, some of the addresses may
    /// already have been released.
    pub async fn reclaim(&self, requests: &[ReleaseRequest], deadline: Deadline) -> Result<ReclaimResult> {
        let grouped = transact!(self.ipam(), deadline, |tx| {
            let pools_range = Range::Prefix(keys::resources_prefix(ResourceKind::IpPool));
            tx.prefetch(Vec::new(), vec![pools_range.clone().into()]).await?;
            let pools: Vec<Pool> = decode_all(&tx.snapshot_list(&pools_range).await?);
            group_by_block(tx, &pools, requests).await
        })?;
        let mut done = ReclaimResult::default();
        for (cidr, requests) in grouped {
            for some in requests.chunks(MAX_ADDRESSES_PER_COMMIT) {
                let reclaimed = transact!(self.ipam(), deadline, |tx| self.reclaim_from(tx, cidr, some).await)?;
                done.released.extend(reclaimed.released);
                done.changed.extend(reclaimed.changed);
            }
        }
        Ok(done)
    }

    async fn reclaim_from(
        &self,
        tx: &mut Transaction,
        cidr: IpNet,
        requests: &[ReleaseRequest],
    ) -> Result<ReclaimResult> {
        tx.prefetch(vec![keys::config(), keys::block(cidr)], Vec::new()).await?;
        let cooldown = read_config(tx).await?.cooldown_seconds();
        let now = self.ipam().now();
        let mut work = WriteSet::new(tx, now, cooldown);
        let mut spared = BTreeSet::new();
        for node in secondary_nodes(work.block(cidr).await?, requests) {
            if !self.is_gone(work.tx, Some(Owner::Host(node.clone()))).await? {
                spared.insert(node);
            }
        }
        let block = work.block(cidr).await?;
        let (held, changed): (Vec<_>, Vec<_>) = requests.iter().cloned().partition(|request| {
            block.is_some_and(|block| is_as_said(block, request) && !is_spared(block, request, &spared))
        });
        let mut done = ReclaimResult {
            changed: changed.iter().map(|request| request.address).collect(),
            ..ReclaimResult::default()
        };
        if held.is_empty() {
            return Ok(done);
        }
        // A released address that a workload keeps is not freed: the address waits for the workload.
        let named: BTreeSet<IpAddr> =
            held.iter().filter_map(|request| Some(block?.first_of(request.address))).collect();
        if let Some(released) =
            work.change(cidr, |block| block.release_where(now, cooldown, |ip, _| named.contains(&ip))).await?
        {
            for handle in released.by_handle.keys() {
                work.touch_handle(handle, cidr);
            }
            done.released = released.released;
        }
        work.write().await?;
        Ok(done)
    }

    /// Deletes handles under which no address is held. A handle is kept if it was written again after the revision in
    /// the request. Returns the ids of the deleted handles.
    ///
    /// # Errors
    /// Any store error.
    pub async fn reclaim_handles(&self, handles: &[HandleRevision], deadline: Deadline) -> Result<Vec<String>> {
        let mut gone = Vec::new();
        for HandleRevision { id, revision } in handles {
            let key = keys::handle(id);
            let is_gone = transact!(self.ipam(), deadline, |tx| {
                let Some(value) = tx.get(&key).await? else { return Ok(false) };
                if tx.written_at(&key) != Some(*revision) {
                    return Ok(false);
                }
                let handle = Handle::decode(&key, value.as_bytes()).unwrap_or_else(|_| Handle::new());
                let named: BTreeMap<IpNet, i64> = handle.blocks().collect();
                let names: BTreeSet<IpNet> = named.into_keys().collect();
                for cidr in names {
                    let key = keys::block(cidr);
                    let block = tx.get(&key).await?.map(|value| Block::decode(&key, value.as_bytes())).transpose()?;
                    if block.is_some_and(|block| !block.ips_by_handle(id).is_empty()) {
                        return Ok(false);
                    }
                }
                tx.delete(&key)?;
                Ok(true)
            })?;
            if is_gone {
                gone.push(id.clone());
            }
        }
        Ok(gone)
    }
}

/// Returns the nodes for which requested addresses of secondary networks are held.
fn secondary_nodes(block: Option<&Block>, requests: &[ReleaseRequest]) -> BTreeSet<String> {
    let entries = requests.iter().filter_map(|request| block?.attributes_of(request.address));
    entries.filter_map(|entry| entry.get(OWN_NODE)).map(str::to_owned).collect()
}

/// True for an address of a secondary network that is held for a registered node. calicoctl's report lists every
/// address of a secondary network as unused, since secondary networks have no workload endpoints.
fn is_spared(block: &Block, request: &ReleaseRequest, spared: &BTreeSet<String>) -> bool {
    let entry = block.attributes_of(request.address);
    entry.and_then(|entry| entry.get(OWN_NODE)).is_some_and(|node| spared.contains(node))
}

/// True if a requested address may be released: its handle and sequence number match the request, and the address is
/// not kept for a virtual machine or workload.
fn is_as_said(block: &Block, request: &ReleaseRequest) -> bool {
    let number = block.sequence_number_of(request.address);
    let Some(entry) = block.attributes_of(request.address) else { return false };
    // A virtual machine keeps its address while the machine is stopped, even if the machine's last node is gone. An
    // address that waits for its workload must not be released, because the workload needs the address when it starts
    // again.
    !is_vms(entry)
        && waits_until(entry).is_none()
        && request.sequence_number.is_none_or(|said| said == number)
        && request.handle.as_ref().is_none_or(|said| same_handle(entry.handle_id().unwrap_or_default(), said))
}
