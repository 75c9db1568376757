//! Taking back what two or more reports agree that nobody uses.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipam_core::Result;
use ipam_core::attachment::OWN_NODE;
use ipam_core::covering::blocks_of;
use ipam_core::model::keys::{self, ResourceKind};
use ipam_core::model::{Block, Document, Handle, Owner, Pool, ReleaseRequest, same_handle};
use ipam_core::sticky::waits_until;
use ipam_core::surroundings::{decode_all, read_config};
use ipam_core::transact;
use ipam_core::vm::is_vms;
use ipam_core::workset::Workset;
use ipnet::IpNet;
use kv::{Deadline, Range, Revision, Transaction};

use crate::Operator;

/// How many addresses go in one commit: each can have a handle of its own, which is a guard.
const MOST_ADDRESSES: usize = 60;

/// The outcome for addresses that nobody uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reclaimed {
    /// They are free, in cooldown, or wait for the workload that keeps them.
    pub released: Vec<IpAddr>,
    /// They were assigned or released since, and were left alone.
    pub changed: Vec<IpAddr>,
}

/// A handle as it was last written at a revision.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HandleRevision {
    /// Its id.
    pub id: String,
    /// The revision.
    pub revision: Revision,
}

impl Operator {
    /// Releases addresses, each only if it is still held as its request says. One that is not is left alone, and so is one
    /// of a network that is not Calico's while its node is registered: of such an address calicoctl cannot tell whether it
    /// is in use. The others are released all the same. A commit for each block, or for every 60 addresses of it.
    ///
    /// # Errors
    /// Damaged blocks and handles; those of the store, when some addresses may be released already.
    pub async fn reclaim(&self, requests: &[ReleaseRequest], deadline: Deadline) -> Result<Reclaimed> {
        let grouped = transact!(self.ipam(), deadline, |tx| {
            let pools_range = Range::Prefix(keys::resources_prefix(ResourceKind::IpPool));
            tx.prefetch(Vec::new(), vec![pools_range.clone().into()]).await?;
            let pools: Vec<Pool> = decode_all(&tx.snapshot_list(&pools_range).await?);
            blocks_of(tx, &pools, requests).await
        })?;
        let mut done = Reclaimed::default();
        for (cidr, requests) in grouped {
            for some in requests.chunks(MOST_ADDRESSES) {
                let reclaimed = transact!(self.ipam(), deadline, |tx| self.reclaim_from(tx, cidr, some).await)?;
                done.released.extend(reclaimed.released);
                done.changed.extend(reclaimed.changed);
            }
        }
        Ok(done)
    }

    async fn reclaim_from(&self, tx: &mut Transaction, cidr: IpNet, requests: &[ReleaseRequest]) -> Result<Reclaimed> {
        tx.prefetch(vec![keys::config(), keys::block(cidr)], Vec::new()).await?;
        let cooldown = read_config(tx).await?.cooldown_seconds();
        let now = self.ipam().now();
        let mut work = Workset::new(tx, now, cooldown);
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
        let mut done =
            Reclaimed { changed: changed.iter().map(|request| request.address).collect(), ..Reclaimed::default() };
        if held.is_empty() {
            return Ok(done);
        }
        // A workload that keeps its address still does: what nobody uses waits for it.
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

    /// Deletes handles under which nothing is held, each only if it was last written at the revision that is said.
    /// Returns the ids of those that are gone now.
    ///
    /// # Errors
    /// Those of the store.
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

/// The nodes of those addresses that are of networks which are not Calico's.
fn secondary_nodes(block: Option<&Block>, requests: &[ReleaseRequest]) -> BTreeSet<String> {
    let entries = requests.iter().filter_map(|request| block?.attributes_of(request.address));
    entries.filter_map(|entry| entry.get(OWN_NODE)).map(str::to_owned).collect()
}

/// True for an address of a network that is not Calico's, on a node that is registered. A report of calicoctl says of each
/// of them that nobody uses it, since no workload endpoint of Calico's has it.
fn is_spared(block: &Block, request: &ReleaseRequest, spared: &BTreeSet<String>) -> bool {
    let entry = block.attributes_of(request.address);
    entry.and_then(|entry| entry.get(OWN_NODE)).is_some_and(|node| spared.contains(node))
}

/// True if an address is held, under the handle and with the sequence number that the request says.
fn is_as_said(block: &Block, request: &ReleaseRequest) -> bool {
    let number = block.sequence_number_of(request.address);
    let Some(entry) = block.attributes_of(request.address) else { return false };
    // A virtual machine has its address also while it is stopped, and whatever became of its last node. An address that
    // waits for its workload is in no use, as it should be.
    !is_vms(entry)
        && waits_until(entry).is_none()
        && request.sequence_number.is_none_or(|said| said == number)
        && request.handle.as_ref().is_none_or(|said| same_handle(entry.handle_id().unwrap_or_default(), said))
}
