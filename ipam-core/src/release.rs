//! Releases the addresses of an attachment or of a handle, or single addresses. The addresses of an attachment are
//! released in one commit. Other releases take as many commits as needed, and each commit also updates the handles of
//! its addresses.
//!
//! A release guards every block that loses an address and the handles of these addresses, so that no address is
//! released that was assigned to another holder after the read. The handle names the blocks to read. If no address is
//! found, the handle is not guarded, because there is nothing to release as of the revision that was read.
//!
//! Calico releases by handle, regardless of the node's name. In Margay a handle alone is not enough, because a
//! container id that a person has chosen can occur on two nodes. An allocation of another node is released with the
//! attachment only if handle, network and interface match, and if either the container id is one that runtimes
//! generate, or the other node is no longer registered.
//!
//! DEL of a virtual machine's pod removes the pod from the owners of the machine's addresses. The addresses are
//! released with the machine. Whether another pod is an owner is read from the blocks. Each block that was read is also
//! written, so the result still holds at the commit.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use kv::{Deadline, Key, Range, Transaction};

use crate::assign_context::{decode_all, excludes_node, pool_holding, read_config};
use crate::attachment::{Attachment, Ownership};
use crate::block_lookup::group_by_block;
use crate::boxed_future;
use crate::endpoints::EndpointToDelete;
use crate::error::{ErrorSubject, Result};
use crate::hints;
use crate::ipam::{Ipam, transact};
use crate::model::keys::{self, ResourceKind};
use crate::model::{
    Attribute, Block, Document, Handle, Node, OwnerChange, OwnerUpdate, Pool, ReleaseRequest, handle_id,
};
use crate::vm::{VmFate, VmHoldings, VmPod, is_off, switch_key};
use crate::workloads::{forget, names_of};
use crate::write_set::{WriteSet, likely_counters};

/// Maximum number of blocks of a handle changed in one commit. Four blocks of the largest usual size take a megabyte.
const MAX_BLOCKS_PER_COMMIT: usize = 4;
/// Maximum number of single addresses released in one commit. Each address can have a separate handle, which needs a
/// guard.
const MAX_ADDRESSES_PER_COMMIT: usize = 60;
/// Number of attempts of a release that also lower the quota counters. Concurrent releases conflict on these counters,
/// so later attempts do not lower the counters.
const MAX_COUNTER_ATTEMPTS: usize = 3;

/// The outcome of a release of single addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReleasedAddresses {
    /// The addresses that were held before the release and are not held any more.
    pub released: Vec<IpAddr>,
    /// The requested addresses that had no holder.
    pub unallocated: Vec<IpAddr>,
}

impl Ipam {
    /// Releases all addresses that are recorded for an attachment, and all addresses that the attachment's handle holds
    /// on its node without a recorded interface. A renamed node may have addresses of the container under the node's
    /// former name. Addresses under the node's former name are released as well if the container id is one that
    /// runtimes generate, or if the node's former name is no longer registered. Finding no address is not an error, so
    /// the call can be repeated.
    ///
    /// If [pending commits](crate::pending_commits) are recorded, an interrupted assignment is settled first, so that
    /// its commit cannot happen afterwards. `old_handles` are the handles under which earlier versions of Calico kept a
    /// workload's addresses.
    ///
    /// # Errors
    /// Any store error. `Malformed` for damaged documents that the release needs.
    #[boxed_future]
    pub async fn release_attachment(
        &self,
        attachment: &Attachment,
        old_handles: &[String],
        deadline: Deadline,
    ) -> Result<Vec<IpAddr>> {
        self.release_attachment_of(attachment, old_handles, &[], None, None, deadline).await
    }

    /// Releases all addresses of an attachment, with additional information from the caller; see
    /// [`release_attachment`](Self::release_attachment). `addresses` name blocks to read first, which saves a round
    /// trip, but do not restrict the release. `namespace` is the pod's namespace, and saves a round trip if namespaces
    /// have quotas. If `endpoint` is given, this stored endpoint of the attachment is deleted in the same commit.
    ///
    /// # Errors
    /// Any error of [`release_attachment`](Self::release_attachment). `Malformed` for a damaged endpoint of a pod.
    #[boxed_future]
    pub async fn release_attachment_of(
        &self,
        attachment: &Attachment,
        old_handles: &[String],
        addresses: &[IpAddr],
        endpoint: Option<&EndpointToDelete>,
        namespace: Option<&str>,
        deadline: Deadline,
    ) -> Result<Vec<IpAddr>> {
        self.settle_pending_commits(attachment, deadline).await?;
        let recalled = self.recall(attachment);
        let likely = hints::blocks_to_release(&recalled, addresses);
        let handle = attachment.handle();
        let handles: Vec<String> = [handle].into_iter().chain(old_handles.iter().cloned()).collect();
        let mut tries = 0;
        let (released, kept) = transact!(self, deadline, |tx| {
            tries += 1;
            let more = likely.iter().map(|cidr| keys::block(*cidr)).chain(endpoint.map(EndpointToDelete::key));
            let more = more.chain(likely_counters(&attachment.network, &attachment.node, namespace));
            prefetch(self, tx, &attachment.node, &handles, more).await?;
            if let Some(endpoint) = endpoint {
                endpoint.delete(tx).await?;
            }
            let mut own = attachment.clone();
            own.node = self.known_name(tx, &attachment.node).await?;
            let cooldown = read_config(tx).await?.cooldown_seconds();
            let mut work = WriteSet::new(tx, self.now(), cooldown);
            if tries > MAX_COUNTER_ATTEMPTS {
                work.leave_counters().await?;
            }
            let (gone, renamed) = self.release_own(&mut work, &own, &handles, cooldown).await?;
            let kept = gone.kept.clone();
            Ok(((gone.write(work, &own.node).await?, renamed), kept))
        })?;
        // A recreated workload will first need the blocks in which its addresses wait.
        if !kept.is_empty() {
            self.remember(attachment, &recalled, &hints::with_used(&recalled, kept.into_iter()));
        }
        Ok(OtherHandles::reported(released))
    }

    /// Releases the addresses that an attachment holds under these handles, as part of a write set.
    async fn release_own(
        &self,
        work: &mut WriteSet<'_>,
        own: &Attachment,
        handles: &[String],
        cooldown: i64,
    ) -> Result<(HandleRelease, OtherHandles)> {
        let renamed = OtherHandles::find(work, own, handles).await?;
        let mine = |entry: &Attribute| own.claim(entry) != Ownership::Foreign || renamed.has(own, entry);
        let gone = self.release_from_handles(work, handles, usize::MAX, cooldown, mine).await?;
        Ok((gone, renamed))
    }

    /// Releases all addresses of a handle, on any node, in one commit for every four blocks.
    ///
    /// # Errors
    /// `NotFound` if the handle does not exist. Any store error, after which some addresses may be released already;
    /// the call can be repeated.
    #[boxed_future]
    pub async fn release_by_handle(&self, handle: &str, deadline: Deadline) -> Result<Vec<IpAddr>> {
        let handles = [handle.to_owned()];
        let mut released: Vec<IpAddr> = Vec::new();
        let mut again = false;
        loop {
            let (some, left) = transact!(self, deadline, |tx| {
                prefetch(self, tx, "", &handles, []).await?;
                if tx.get(&keys::handle(handle)).await?.is_none() && !again {
                    return Err(ErrorSubject::Handle.not_found(handle));
                }
                self.release_handles(tx, &handles, MAX_BLOCKS_PER_COMMIT, |_| true).await
            })?;
            released.extend(some);
            again = true;
            if left == 0 {
                released.sort_unstable();
                return Ok(released);
            }
        }
    }

    /// Releases all addresses of a container in every network, with a commit for each handle.
    ///
    /// # Errors
    /// `NotFound` if no address is recorded for the container. Any store error.
    #[boxed_future]
    pub async fn release_by_container(&self, container: &str, deadline: Deadline) -> Result<Vec<IpAddr>> {
        let blocks = kv::StoreExt::list(self.store(), Range::Prefix(keys::blocks_prefix(None))).await?;
        let blocks = blocks.kvs.into_iter().map(|kv| (kv.key, kv.value)).collect::<Vec<_>>();
        let mut handles = BTreeSet::new();
        for block in decode_all::<Block>(&blocks) {
            for (_, entry) in block.allocated() {
                let Some(handle) = entry.handle() else { continue };
                let recorded = entry.network().is_some_and(|network| handle_id(network, container) == handle);
                if recorded || handle == container {
                    handles.insert(handle.to_owned());
                }
            }
        }
        if handles.is_empty() {
            return Err(ErrorSubject::AddressOfContainer.not_found(container));
        }
        let mut released = Vec::new();
        for handle in handles {
            released.extend(self.release_by_handle(&handle, deadline).await?);
        }
        Ok(released)
    }

    /// Releases single addresses. Addresses without a holder, or already in cooldown, are returned in `unallocated`. Up
    /// to 60 addresses in up to 4 blocks are released in one atomic commit. Larger numbers of addresses take several
    /// commits, block by block.
    ///
    /// # Errors
    /// `ReleaseConflict` if an address is held by another handle than its request names, or has another sequence
    /// number. On this error, no address of the failed commit or of later commits is released. Any store error, after
    /// which some addresses may be released already.
    #[boxed_future]
    pub async fn release_ips(&self, requests: &[ReleaseRequest], deadline: Deadline) -> Result<ReleasedAddresses> {
        let mut ordered = requests.to_vec();
        ordered.sort_by_key(|request| request.address);
        let mut done = ReleasedAddresses::default();
        while !ordered.is_empty() {
            let (some, looked_at) = self.release_first(&ordered, deadline).await?;
            done.released.extend(some.released);
            done.unallocated.extend(some.unallocated);
            ordered.retain(|request| !looked_at.contains(&request.address));
        }
        Ok(done)
    }

    /// Releases as many of the first requests as fit into one commit, and returns their addresses. The requests must be
    /// sorted.
    async fn release_first(
        &self,
        requests: &[ReleaseRequest],
        deadline: Deadline,
    ) -> Result<(ReleasedAddresses, BTreeSet<IpAddr>)> {
        let first = first_requests(requests, MAX_ADDRESSES_PER_COMMIT);
        transact!(self, deadline, |tx| {
            let pools_range = Range::Prefix(keys::resources_prefix(ResourceKind::IpPool));
            tx.prefetch(vec![keys::config()], vec![pools_range.clone().into()]).await?;
            let config = read_config(tx).await?;
            let pools: Vec<Pool> = decode_all(&tx.snapshot_list(&pools_range).await?);
            let mut blocks = group_by_block(tx, &pools, first).await?;
            while blocks.len() > MAX_BLOCKS_PER_COMMIT {
                blocks.pop_last();
            }
            let looked_at = blocks.values().flatten().map(|request| request.address).collect();
            let mut work = WriteSet::new(tx, self.now(), config.cooldown_seconds());
            work.read_ahead(&blocks.keys().copied().collect::<Vec<_>>()).await?;
            let mut done = ReleasedAddresses::default();
            for (cidr, requests) in blocks {
                self.release_from(&mut work, cidr, &requests, config.cooldown_seconds(), &mut done).await?;
            }
            work.write().await?;
            Ok((done, looked_at))
        })
    }

    async fn release_from(
        &self,
        work: &mut WriteSet<'_>,
        cidr: IpNet,
        requests: &[ReleaseRequest],
        cooldown_seconds: i64,
        done: &mut ReleasedAddresses,
    ) -> Result<()> {
        let requested = || requests.iter().map(|request| request.address);
        let Some(block) = work.block(cidr).await? else {
            done.unallocated.extend(requested());
            return Ok(());
        };
        if requests.iter().all(|request| block.attributes_of(request.address).is_none()) {
            done.unallocated.extend(requested());
            return Ok(());
        }
        let now = self.now();
        let ended = requests.iter().filter(|request| request.handle.is_none());
        let kept = names_of(block, ended.map(|request| block.first_of(request.address)));
        let released = work.change(cidr, |block| block.release_addresses(requests, now, cooldown_seconds)).await?;
        let Some(released) = released else { return Ok(()) };
        let released = released?;
        for handle in released.by_handle.keys() {
            work.touch_handle(handle, cidr);
        }
        for (ip, name) in kept {
            forget(work.tx, &name, ip).await?;
        }
        done.released.extend(released.released);
        done.unallocated.extend(released.unallocated);
        Ok(())
    }

    /// Releases the addresses of the handles that the `mine` predicate accepts, in the first `most` blocks that the
    /// handles name. Also returns the number of blocks of the handles that remain to be read.
    async fn release_handles(
        &self,
        tx: &mut Transaction,
        handles: &[String],
        most: usize,
        mine: impl Fn(&Attribute) -> bool,
    ) -> Result<(Vec<IpAddr>, usize)> {
        let cooldown = read_config(tx).await?.cooldown_seconds();
        let mut work = WriteSet::new(tx, self.now(), cooldown);
        let mut gone = self.release_from_handles(&mut work, handles, most, cooldown, mine).await?;
        work.write().await?;
        gone.released.sort_unstable();
        Ok((gone.released, gone.left))
    }

    /// Releases addresses as [`Self::release_handles`] does, but as part of a write set.
    async fn release_from_handles(
        &self,
        work: &mut WriteSet<'_>,
        handles: &[String],
        most: usize,
        cooldown: i64,
        mine: impl Fn(&Attribute) -> bool,
    ) -> Result<HandleRelease> {
        let now = self.now();
        let mut gone = HandleRelease::default();
        let mut named = blocks_of_handles(work, handles).await?;
        gone.left = named.len().saturating_sub(most);
        named.truncate(most);
        let blocks: Vec<IpNet> = named.iter().map(|(_, cidr)| *cidr).collect();
        work.read_ahead(&blocks).await?;
        for (handle, cidr) in &named {
            let test = |_: IpAddr, entry: &Attribute| entry.has_handle(handle) && mine(entry);
            let found = match work.block(*cidr).await? {
                None => HandleEntry::NoBlock,
                Some(block) if block.allocated().any(|(ip, entry)| test(ip, entry)) => HandleEntry::Addresses,
                Some(block) if block.ips_by_handle(handle).is_empty() => HandleEntry::NoBlock,
                Some(_) => HandleEntry::Others,
            };
            match found {
                HandleEntry::Others => continue,
                // The handle names a block without addresses of the handle, because another writer was interrupted. The
                // handle is repaired.
                HandleEntry::NoBlock => {}
                HandleEntry::Addresses => {
                    let change =
                        work.change(*cidr, |block| (block.release_where(now, cooldown, test), block.is_empty()));
                    if let Some((released, is_empty)) = change.await? {
                        if is_empty {
                            gone.emptied.insert(*cidr);
                        } else if let Some(block) = work.block(*cidr).await?
                            && !names_of(block, released.released.iter().copied()).is_empty()
                        {
                            gone.kept.insert(*cidr);
                        }
                        gone.released.extend(released.released);
                    }
                }
            }
            work.touch_handle(handle, *cidr);
        }
        Ok(gone)
    }
}

/// The outcome of a release by handle.
#[derive(Default)]
struct HandleRelease {
    released: Vec<IpAddr>,
    /// Blocks that became empty by the release.
    emptied: BTreeSet<IpNet>,
    /// Blocks whose released addresses now wait for their workload.
    kept: BTreeSet<IpNet>,
    /// The number of blocks of the handles that were not read.
    left: usize,
}

impl HandleRelease {
    /// Writes the changes, and releases blocks that the node should not keep. Returns the released addresses in
    /// ascending order.
    async fn write(mut self, mut work: WriteSet<'_>, node: &str) -> Result<Vec<IpAddr>> {
        release_unselected_blocks(&mut work, node, &self.emptied).await?;
        work.write().await?;
        self.released.sort_unstable();
        Ok(self.released)
    }
}

/// Returns about the first `most` requests. All requests for one address stay together.
fn first_requests(requests: &[ReleaseRequest], most: usize) -> &[ReleaseRequest] {
    let last = requests.get(most.saturating_sub(1)).map(|request| request.address);
    let more = requests.iter().skip(most).take_while(|request| Some(request.address) == last).count();
    requests.get(..most + more).unwrap_or(requests)
}

/// The entries of a handle in a block that the handle names.
enum HandleEntry {
    Addresses,
    Others,
    NoBlock,
}

/// Prefetches in one round trip the keys of a release by handle, the `more` keys, and the blocks that the release
/// probably changes.
async fn prefetch(
    ipam: &Ipam,
    tx: &mut Transaction,
    node: &str,
    handles: &[String],
    more: impl IntoIterator<Item = Key>,
) -> Result<()> {
    let mut keys: Vec<Key> = handles.iter().map(|handle| keys::handle(handle)).collect();
    keys.extend(more);
    keys.push(keys::config());
    if !node.is_empty() {
        keys.extend(ipam.host_keys(node));
    }
    tx.prefetch(keys, vec![Range::Prefix(keys::resources_prefix(ResourceKind::IpPool)).into()]).await?;
    Ok(())
}

async fn blocks_of_handles(work: &mut WriteSet<'_>, handles: &[String]) -> Result<Vec<(String, IpNet)>> {
    let mut named = Vec::new();
    for handle in handles {
        let key = keys::handle(handle);
        let Some(stored) = work.tx.snapshot_get(&key).await? else { continue };
        let document = Handle::decode(&key, stored.as_bytes())?;
        named.extend(document.blocks().map(|(cidr, _)| (handle.clone(), cidr)));
    }
    Ok(named)
}

/// Releases blocks of the node that became empty and whose pool no longer selects the node, as Calico does after a
/// release. Node and pools are read without guards. If the node or a pool changes before the commit, the next ADD
/// releases the blocks.
async fn release_unselected_blocks(work: &mut WriteSet<'_>, node: &str, emptied: &BTreeSet<IpNet>) -> Result<()> {
    let key = keys::resource(ResourceKind::Node, node);
    let Some(stored) = work.tx.snapshot_get(&key).await? else { return Ok(()) };
    let labels = Node::decode(&key, stored.as_bytes())?.labels().clone();
    let range = Range::Prefix(keys::resources_prefix(ResourceKind::IpPool));
    let pools: Vec<Pool> = decode_all(&work.tx.snapshot_list(&range).await?);
    for cidr in emptied {
        let owner = work.block(*cidr).await?.and_then(Block::owner).filter(|owner| owner.node() == Some(node));
        let unselected = pool_holding(&pools, *cidr).is_some_and(|pool| excludes_node(pool, &labels));
        if let (Some(owner), true) = (owner, unselected) {
            work.change(*cidr, Block::clear_owner).await?;
            work.drop_affinity(&owner, *cidr).await?;
        }
    }
    Ok(())
}

/// Addresses of the attachment's handle that are recorded for other nodes: the addresses to release and the addresses
/// to keep, by node.
#[derive(Debug, Default)]
struct OtherHandles {
    handle: String,
    goes: BTreeMap<String, BTreeSet<IpAddr>>,
    stays: BTreeMap<String, BTreeSet<IpAddr>>,
}

impl OtherHandles {
    /// Scans the blocks of the handles, one of which is the attachment's. If the other node must be unregistered, its
    /// registration is read and guarded. Reading the registration is needed only if the container id is not one that
    /// runtimes generate.
    async fn find(work: &mut WriteSet<'_>, own: &Attachment, handles: &[String]) -> Result<Self> {
        let named = blocks_of_handles(work, handles).await?;
        let blocks: Vec<IpNet> = named.iter().map(|(_, cidr)| *cidr).collect();
        work.read_ahead(&blocks).await?;
        let mut renamed = Self { handle: own.handle(), ..Self::default() };
        let mut found: BTreeMap<String, BTreeSet<IpAddr>> = BTreeMap::new();
        for (_, cidr) in named.iter().filter(|(handle, _)| *handle == renamed.handle) {
            let Some(block) = work.block(*cidr).await? else { continue };
            for (ip, entry) in block.allocated().filter(|(_, entry)| entry.has_handle(&renamed.handle)) {
                if let Some(node) = own.other_node(entry) {
                    found.entry(node.to_owned()).or_default().insert(ip);
                }
            }
        }
        for (node, addresses) in found {
            let key = keys::resource(ResourceKind::Node, &node);
            let goes = own.has_unique_id() || work.tx.get(&key).await?.is_none();
            let names = if goes { &mut renamed.goes } else { &mut renamed.stays };
            names.insert(node, addresses);
        }
        Ok(renamed)
    }

    /// True if an allocation that is recorded for another node is released with the attachment.
    fn has(&self, own: &Attachment, entry: &Attribute) -> bool {
        !self.goes.is_empty()
            && entry.has_handle(&self.handle)
            && own.other_node(entry).is_some_and(|node| self.goes.contains_key(node))
    }

    /// Logs the addresses that were recorded for other nodes, and returns the released ones.
    fn reported((released, renamed): (Vec<IpAddr>, Self)) -> Vec<IpAddr> {
        let Self { handle, goes, stays } = &renamed;
        for (node, addresses) in goes {
            tracing::warn!(handle, node, ?addresses, "released addresses that were recorded for another node name");
        }
        for (node, addresses) in stays {
            tracing::warn!(
                handle,
                node,
                ?addresses,
                "kept addresses of this container ID: they are recorded for another registered node"
            );
        }
        released
    }
}

impl Ipam {
    /// Removes a pod from the owners of its virtual machine's addresses. If no owner is left, and either the machine is
    /// being deleted or keeping machines' addresses is turned off, all addresses of the machine are released. The same
    /// commit releases the container's own addresses, which are found as in
    /// [`release_attachment_of`](Self::release_attachment_of). Finding no address is not an error, so the call can be
    /// repeated.
    ///
    /// # Errors
    /// Any store error. `Malformed` for damaged documents that the release needs.
    #[boxed_future]
    pub async fn release_vm_pod(
        &self,
        vm: &VmPod,
        attachment: &Attachment,
        old_handles: &[String],
        addresses: &[IpAddr],
        deadline: Deadline,
    ) -> Result<Vec<IpAddr>> {
        self.settle_pending_commits(attachment, deadline).await?;
        let likely = hints::blocks_to_release(&self.recall(attachment), addresses);
        let own_handles: Vec<String> = [attachment.handle()].into_iter().chain(old_handles.iter().cloned()).collect();
        let all_handles: Vec<String> = own_handles.iter().chain([&vm.handle]).cloned().collect();
        transact!(self, deadline, |tx| {
            let more = likely.iter().map(|cidr| keys::block(*cidr)).chain([switch_key()]);
            let more = more.chain(likely_counters(&attachment.network, &attachment.node, Some(&vm.namespace)));
            prefetch(self, tx, &attachment.node, &all_handles, more).await?;
            let mut own = attachment.clone();
            own.node = self.known_name(tx, &attachment.node).await?;
            let is_off = is_off(tx).await?;
            let cooldown = read_config(tx).await?.cooldown_seconds();
            let mut work = WriteSet::new(tx, self.now(), cooldown);
            let (mut gone, renamed) = self.release_own(&mut work, &own, &own_handles, cooldown).await?;

            let holds = VmHoldings::read(&mut work, &vm.handle).await?;
            let (owned, has_others) = owned_by(&mut work, vm, &holds).await?;
            if has_others || (vm.fate == VmFate::Stays && !is_off) {
                for (ip, cidr, update) in owned {
                    work.change(cidr, |block| block.set_owners(ip, &vm.handle, &update)).await?.transpose()?;
                }
                holds.mend(&mut work, &vm.handle).await?;
            } else {
                let handle = [vm.handle.clone()];
                let more = self.release_from_handles(&mut work, &handle, usize::MAX, cooldown, |_| true).await?;
                gone.released.extend(more.released);
                gone.emptied.extend(more.emptied);
            }
            Ok((gone.write(work, &own.node).await?, renamed))
        })
        .map(OtherHandles::reported)
    }
}

/// Returns the addresses that the pod owns, each with the change that removes the pod, and whether another pod is also
/// an owner.
async fn owned_by(
    work: &mut WriteSet<'_>,
    vm: &VmPod,
    holds: &VmHoldings,
) -> Result<(Vec<(IpAddr, IpNet, OwnerUpdate)>, bool)> {
    let (mut owned, mut has_others) = (Vec::new(), false);
    for (ip, cidr) in &holds.addresses {
        let Some(entry) = work.block(*cidr).await?.and_then(|block| block.attributes_of(*ip)) else { continue };
        let owners = [entry.attributes(), entry.alternate_attributes()];
        let [active, alternate] = owners.map(|owner| vm.is_named_by(owner).then(OwnerChange::clear));
        has_others |= owners.iter().any(|owner| !owner.is_empty() && !vm.is_named_by(owner));
        if active.is_some() || alternate.is_some() {
            owned.push((*ip, *cidr, OwnerUpdate { active, alternate }));
        }
    }
    Ok((owned, has_others))
}
