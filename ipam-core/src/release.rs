//! Releases the addresses of an attachment or of a handle, or single addresses. The addresses of an attachment are
//! released in one commit; the addresses of a handle can need several. Each commit also updates the handles of the
//! addresses that it releases.
//!
//! The commit of a release guards every block that loses an address, and the handles of these addresses. An address
//! that got another holder after it was read is not released. A release by handle reads the blocks that the handle
//! names. If the handle holds no address in the blocks that its document lists, the release writes and guards nothing.
//!
//! Calico releases all addresses of a handle, regardless of the node's name. Margay also checks the node that is
//! recorded with each address, because two nodes can use the same container id if a person chooses the id. An
//! allocation that names another node is released with the attachment only if its handle, network and interface match
//! those of the attachment. If the recorded node is registered, the container id must also look randomly generated,
//! because a person may have chosen the same id on two nodes.
//!
//! A DEL of a virtual machine's pod removes the pod from the owners of the machine's addresses; the addresses are
//! released when the machine is deleted. The addresses' block entries show whether another pod is an owner. The commit
//! guards the blocks from which addresses are released, so it fails if another pod has become an owner.

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

/// Maximum number of blocks from which one commit releases addresses. Four blocks of the largest usual size take about
/// 1 MB in the store.
const MAX_BLOCKS_PER_COMMIT: usize = 4;
/// Maximum number of single addresses that one commit releases. The commit must guard the handle of each address, and
/// one commit can have at most 120 guards.
const MAX_ADDRESSES_PER_COMMIT: usize = 60;
/// Number of attempts in which a release tries to lower the quota counters. After [`MAX_COUNTER_ATTEMPTS`] attempts, a
/// release leaves the quota counters unchanged, because concurrent releases could keep conflicting on them.
const MAX_COUNTER_ATTEMPTS: usize = 3;

/// The outcome of [`Ipam::release_ips`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReleasedAddresses {
    /// The requested addresses that were released.
    pub released: Vec<IpAddr>,
    /// The requested addresses that had no holder, and therefore were not released.
    pub unallocated: Vec<IpAddr>,
}

impl Ipam {
    /// Releases all addresses that are recorded for an attachment, and all addresses that the attachment's handle holds
    /// on its node without a recorded interface. If the node was renamed, addresses under the node's former name are
    /// also released, unless another node may have a container with an equal id. The call succeeds if there are no
    /// addresses to release, so it can be repeated.
    ///
    /// If [pending commits](crate::pending_commits) are recorded, an interrupted assignment to the attachment is
    /// settled first, so that its commit cannot be executed after the release. `old_handles` are the handles that
    /// earlier versions of Calico would have used for the attachment.
    ///
    /// # Errors
    /// Any store error. `Malformed` if a document that the release needs is damaged.
    #[boxed_future]
    pub async fn release_attachment(
        &self,
        attachment: &Attachment,
        old_handles: &[String],
        deadline: Deadline,
    ) -> Result<Vec<IpAddr>> {
        self.release_attachment_of(attachment, old_handles, &[], None, None, deadline).await
    }

    /// Releases all addresses of an attachment like [`release_attachment`](Self::release_attachment), with hints that
    /// save round trips and with a workload endpoint to delete. `addresses` are the attachment's addresses, if known.
    /// All addresses of the attachment are released; `addresses` only determines which blocks are prefetched to save a
    /// round trip. `namespace` is the pod's namespace, which saves a round trip if namespaces have quotas. If
    /// `endpoint` is given, the commit also deletes this workload endpoint.
    ///
    /// # Errors
    /// Any error of [`release_attachment`](Self::release_attachment). A damaged `endpoint` causes no error.
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
        // When the workload is recreated, its assignment needs the blocks in which its sticky addresses wait, so the
        // blocks are remembered as hints.
        if !kept.is_empty() {
            self.remember(attachment, &recalled, &hints::with_used(&recalled, kept.into_iter()));
        }
        Ok(OtherHandles::reported(released))
    }

    /// Adds the release of the addresses that an attachment holds under `handles` to a write set; the caller commits.
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

    /// Releases all addresses of a handle, on any node. Each commit releases the addresses in up to four blocks.
    ///
    /// # Errors
    /// `NotFound` if the handle does not exist. Any store error; some addresses may already be released, and the call
    /// can be repeated.
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

    /// Releases all addresses of a container in every network, one handle after the other.
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

    /// Releases single addresses. Addresses that have no holder, or are already in cooldown, are returned in
    /// `unallocated`. One commit releases up to 60 addresses in up to 4 blocks; more addresses need several commits.
    ///
    /// # Errors
    /// `ReleaseConflict` if the handle or the sequence number of an address differs from that of its request. Any store
    /// error. If a commit fails, the addresses that preceding commits of the same call released stay released.
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

    /// Carries out release requests from the start of the list, as many as fit into one commit. Returns the outcome of
    /// the commit, and the addresses of the release requests that it carried out. The requests must be sorted by
    /// address.
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

    /// Releases addresses that are held under the handles, in the first `most` blocks that the handles list. Releases
    /// only addresses whose block entry `mine` accepts. The second returned value is the number of blocks that the
    /// handles list but that were not read.
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

    /// Like [`Self::release_handles`], but only adds the changes to a write set; the caller commits.
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
                // The handle names a block in which it holds no address, because another writer was interrupted. The
                // commit of the release removes the block's entry from the handle.
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

/// The addresses that a release by handle has released, and the blocks whose owner or sticky records may have to be
/// updated.
#[derive(Default)]
struct HandleRelease {
    released: Vec<IpAddr>,
    /// Blocks in which no address is held after the release.
    emptied: BTreeSet<IpNet>,
    /// Blocks in which sticky addresses were released. These addresses wait for their workload.
    kept: BTreeSet<IpNet>,
    /// The number of blocks that the handles name but that were not read.
    left: usize,
}

impl HandleRelease {
    /// Adds the changes of the release to the transaction, and releases empty blocks of pools that no longer select the
    /// node. Returns the released addresses in ascending order.
    async fn write(mut self, mut work: WriteSet<'_>, node: &str) -> Result<Vec<IpAddr>> {
        release_unselected_blocks(&mut work, node, &self.emptied).await?;
        work.write().await?;
        self.released.sort_unstable();
        Ok(self.released)
    }
}

/// Returns the first `most` release requests. Further requests for the same address as the last of them are returned as
/// well.
fn first_requests(requests: &[ReleaseRequest], most: usize) -> &[ReleaseRequest] {
    let last = requests.get(most.saturating_sub(1)).map(|request| request.address);
    let more = requests.iter().skip(most).take_while(|request| Some(request.address) == last).count();
    requests.get(..most + more).unwrap_or(requests)
}

/// What a release by handle finds in a block that the handle lists: addresses to release, only addresses of the handle
/// that are to be kept, or no address of the handle.
enum HandleEntry {
    Addresses,
    Others,
    NoBlock,
}

/// Prefetches the keys that a release by handle reads, and the keys in `more`, in one round trip.
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
/// release. A release reads the node and the pools without guards. If one of these documents changes before the commit,
/// the node's next assignment releases the empty blocks.
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

/// Addresses under the attachment's handle that are recorded for nodes other than the attachment's, grouped by node.
/// `goes` lists the addresses to release, and `stays` lists the addresses to keep.
#[derive(Debug, Default)]
struct OtherHandles {
    handle: String,
    goes: BTreeMap<String, BTreeSet<IpAddr>>,
    stays: BTreeMap<String, BTreeSet<IpAddr>>,
}

impl OtherHandles {
    /// Reads the blocks of the given handles, one of which is the attachment's, and finds addresses that are recorded
    /// for nodes other than the attachment's. If a person may have chosen the container id, also reads whether the
    /// nodes that are recorded with the addresses are registered, and guards the keys of these nodes.
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

    /// True if an allocation is recorded for a node other than the attachment's, and must still be released with the
    /// attachment.
    fn has(&self, own: &Attachment, entry: &Attribute) -> bool {
        !self.goes.is_empty()
            && entry.has_handle(&self.handle)
            && own.other_node(entry).is_some_and(|node| self.goes.contains_key(node))
    }

    /// Logs the released addresses that were recorded for nodes other than the attachment's, and returns all released
    /// addresses.
    fn reported((released, renamed): (Vec<IpAddr>, Self)) -> Vec<IpAddr> {
        let Self { handle, goes, stays } = &renamed;
        for (node, addresses) in goes {
            tracing::warn!(
                handle,
                node,
                ?addresses,
                "released the container's addresses, although they were recorded under another node name"
            );
        }
        for (node, addresses) in stays {
            tracing::warn!(
                handle,
                node,
                ?addresses,
                "this container ID has addresses on another node that is registered; not releasing those addresses"
            );
        }
        released
    }
}

impl Ipam {
    /// Removes a pod from the owners of its virtual machine's addresses. If the virtual machine has no owner left,
    /// releases all its addresses, provided that it is being deleted, or that the setting by which virtual machines
    /// keep their addresses is off. The commit that removes the pod from the owners also releases the addresses of the
    /// container's own handle, as [`release_attachment_of`](Self::release_attachment_of) does. The call succeeds if
    /// there are no addresses to release, so it can be repeated.
    ///
    /// # Errors
    /// Any store error. `Malformed` if a document that the release needs is damaged.
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

/// Returns the addresses of which the pod is an owner, each with the update that removes the pod. The returned flag is
/// true if another pod is an owner of any of the virtual machine's addresses.
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
