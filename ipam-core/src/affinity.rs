//! Claims blocks for an owner, releases the blocks of an owner or of a pool, and removes owners that no longer exist.
//! An owner is a node, or a virtual owner such as Calico's load balancer.
//!
//! Each block is claimed or released in one commit, together with its affinity. If a call that claims or releases
//! several blocks is interrupted, each block is either changed completely or not at all. Each commit guards the block
//! and the owner's affinity to the block; a commit that claims a block also guards the pool and the settings. A release
//! of all blocks of an owner lists the owner's affinities without a guard, so it can miss an affinity that is created
//! during the release.

use ipnet::IpNet;
use kv::{Content, Deadline, Key, Range, Revision, StoreExt, Transaction, TxnRange};

use crate::assign::refuse_among_prefixes;
use crate::assign_context::read_config;
use crate::boxed_future;
use crate::error::{Error, Result};
use crate::ipam::{Ipam, transact};
use crate::model::keys::{self, ResourceKind};
use crate::model::{Block, Document, NewPool, Owner, Pool, ranges_around};
use crate::net::{Family, overlap};
use crate::pools;
use crate::write_set::WriteSet;

/// Maximum number of blocks that one call of [`Ipam::claim_affinity`] claims. Without a limit, `claim_affinity` could
/// run for ever, because an IPv6 pool can have more than 2^64 blocks.
pub const MAX_BLOCKS_CLAIMED: u128 = 4096;

/// Which of an owner's blocks a call such as [`Ipam::release_affinity`] releases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseIf {
    /// Releases only blocks in which no address is held or in cooldown.
    Empty,
    /// Releases all blocks. The addresses in the released blocks stay assigned to their handles. A released block has
    /// no owner, and is deleted when its last address is released.
    Any,
}

/// The outcome of [`Ipam::claim_affinity`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimedBlocks {
    /// The blocks of the requested CIDR that the owner has after the call, including blocks that it had before.
    pub claimed: Vec<IpNet>,
    /// The blocks of the requested CIDR that were not claimed. A block cannot be claimed if it has another owner, if it
    /// is ownerless and has addresses in use, or if it would overlap with a stored block.
    pub failed: Vec<IpNet>,
}

/// The owner's blocks, split into those that a call such as [`Ipam::release_affinity`] released and those that it kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReleasedBlocks {
    /// The blocks that the owner lost because of the call.
    pub released: Vec<IpNet>,
    /// The blocks that were not released, because some of their addresses are in use ([`ReleaseIf::Empty`] only).
    pub in_use: Vec<IpNet>,
}

enum BlockRelease {
    Done,
    InUse,
    NotOurs,
}

impl Ipam {
    /// Claims every block of a CIDR for the owner, except blocks of other owners. The CIDR must consist of one or more
    /// blocks of an enabled pool. Like Calico, this function checks neither the block limit nor the pool's node
    /// selector.
    ///
    /// # Errors
    /// `OutsidePools` for a CIDR in no enabled pool, and `SmallerThanBlock` for a CIDR smaller than a block, with
    /// Calico's error messages. `Invalid` for more than [`MAX_BLOCKS_CLAIMED`] blocks, or for an owner that is neither
    /// a node nor virtual. `UnknownNode` if the node is not registered. Any store error; some blocks may have been
    /// claimed before the error.
    #[boxed_future]
    pub async fn claim_affinity(&self, owner: &Owner, cidr: IpNet, deadline: Deadline) -> Result<ClaimedBlocks> {
        let cidr = cidr.trunc();
        let pool = self.pool_around(cidr, Pool::is_enabled, deadline).await?;
        let mut done = ClaimedBlocks::default();
        for block in blocks_in(&pool, cidr)? {
            let is_claimed = transact!(self, deadline, |tx| self.claim_block(tx, owner, &pool, block).await)?;
            if is_claimed { done.claimed.push(block) } else { done.failed.push(block) }
        }
        Ok(done)
    }

    /// Releases the owner's blocks inside a CIDR. The CIDR must consist of one or more blocks of an enabled or disabled
    /// pool. Addresses in the released blocks stay assigned, and blocks of other owners are left unchanged.
    ///
    /// # Errors
    /// `OutsidePools` for a CIDR in no pool, and `SmallerThanBlock` for a CIDR smaller than a block. `Malformed` for
    /// damaged blocks; all other blocks are released before this error is returned. Any store error.
    #[boxed_future]
    pub async fn release_affinity(
        &self,
        owner: &Owner,
        cidr: IpNet,
        which: ReleaseIf,
        deadline: Deadline,
    ) -> Result<ReleasedBlocks> {
        let cidr = cidr.trunc();
        self.pool_around(cidr, |_| true, deadline).await?;
        self.release_those(owner, Family::of_net(cidr), |block| cidr.contains(block), which, deadline).await
    }

    /// Releases all blocks of an owner, even of a node that is no longer registered. Addresses in the released blocks
    /// stay assigned.
    ///
    /// # Errors
    /// `Invalid` for an owner that is neither a node nor virtual. `Malformed` for damaged blocks; all other blocks are
    /// released before this error is returned. Any store error.
    #[boxed_future]
    pub async fn release_all_affinities(
        &self,
        owner: &Owner,
        which: ReleaseIf,
        deadline: Deadline,
    ) -> Result<ReleasedBlocks> {
        let mut done = ReleasedBlocks::default();
        let mut failure = None;
        for family in [Family::V4, Family::V6] {
            match self.release_those(owner, family, |_| true, which, deadline).await {
                Ok(blocks) => {
                    done.released.extend(blocks.released);
                    done.in_use.extend(blocks.in_use);
                }
                Err(error @ Error::Malformed(_)) => failure = Some(error),
                Err(error) => return Err(error),
            }
        }
        failure.map_or(Ok(done), Err)
    }

    /// Releases all blocks of a node, and all blocks of the virtual owner of the node's secondary networks.
    ///
    /// # Errors
    /// Any error of [`release_all_affinities`](Self::release_all_affinities).
    #[boxed_future]
    pub async fn release_node_affinities(
        &self,
        node: &str,
        which: ReleaseIf,
        deadline: Deadline,
    ) -> Result<ReleasedBlocks> {
        let [host, secondary] = Owner::all_of(node);
        let mut done = self.release_all_affinities(&host, which, deadline).await;
        let more = self.release_all_affinities(&secondary, which, deadline).await;
        if let (Ok(done), Ok(more)) = (&mut done, &more) {
            done.released.extend(&more.released);
            done.in_use.extend(&more.in_use);
        }
        more.and(done)
    }

    /// Returns the pool that contains the whole CIDR and that the `usable` predicate accepts. Fails if the CIDR is
    /// smaller than a block of the pool.
    async fn pool_around(&self, cidr: IpNet, usable: impl Fn(&Pool) -> bool, deadline: Deadline) -> Result<Pool> {
        let pools = self.inventory(deadline).await?.pools;
        let pool = pools.into_iter().find(|pool| pool.cidr().contains(&cidr) && usable(pool));
        let pool = pool.ok_or(Error::OutsidePools(cidr))?;
        if cidr.prefix_len() > pool.block_size() {
            return Err(Error::SmallerThanBlock(cidr));
        }
        Ok(pool)
    }

    /// Claims a block for an owner. Returns false for a block that cannot be claimed; see [`ClaimedBlocks::failed`].
    async fn claim_block(&self, tx: &mut Transaction, owner: &Owner, pool: &Pool, cidr: IpNet) -> Result<bool> {
        let pool_key = keys::resource(ResourceKind::IpPool, pool.name());
        let mut needed = self.claimant_keys(owner);
        needed.extend([keys::config(), pool_key.clone(), keys::block(cidr)]);
        tx.prefetch(needed, ranges_around(&[cidr]).into_iter().map(TxnRange::keys_of).collect()).await?;
        let host = self.claimant(tx, owner).await?;
        if tx.get(&pool_key).await?.is_none() {
            return Err(Error::OutsidePools(cidr));
        }
        host.pin(tx)?;
        let owner = host.owner();
        let cooldown = read_config(tx).await?.cooldown_seconds();
        let now = self.now();
        let mut work = WriteSet::new(tx, now, cooldown);
        match work.block(cidr).await?.map(|block| (block.owner(), block.is_empty())) {
            None => {
                refuse_among_prefixes(&mut work, pool).await?;
                if work.obstacle(cidr).await?.is_some() {
                    return Ok(false);
                }
                let block = Block::of_length(cidr, pool.length(), Some(&owner), now, None);
                work.create(block?).await?;
            }
            Some((Some(former), _)) if former == owner => {
                if work.has_confirmed(&owner, cidr).await? {
                    return Ok(true);
                }
                // The block is rewritten without a change, so that a concurrent assignment from this block fails and
                // retries.
                work.change(cidr, |_| ()).await?;
            }
            Some((None, true)) => drop(work.change(cidr, |block| block.set_owner(&owner, now)).await?),
            Some(_) => return Ok(false),
        }
        work.confirm_affinity(&owner, cidr).await?;
        work.write().await?;
        Ok(true)
    }

    /// Releases the owner's blocks of one family that the `mine` predicate accepts.
    async fn release_those(
        &self,
        owner: &Owner,
        family: Family,
        mine: impl Fn(&IpNet) -> bool,
        which: ReleaseIf,
        deadline: Deadline,
    ) -> Result<ReleasedBlocks> {
        let owner = transact!(self, deadline, |tx| {
            tx.prefetch(self.claimant_keys(owner), Vec::new()).await?;
            self.known_owner(tx, owner).await
        })?;
        let mut done = ReleasedBlocks::default();
        let mut failure = None;
        for cidr in self.affine_blocks(&owner, family).await?.into_iter().filter(mine) {
            match transact!(self, deadline, |tx| self.release_block(tx, &owner, cidr, which).await) {
                Ok(BlockRelease::Done) => done.released.push(cidr),
                Ok(BlockRelease::InUse) => done.in_use.push(cidr),
                Ok(BlockRelease::NotOurs) => {}
                Err(error @ Error::Malformed(_)) => failure = Some(error),
                Err(error) => return Err(error),
            }
        }
        failure.map_or(Ok(done), Err)
    }

    async fn affine_blocks(&self, owner: &Owner, family: Family) -> Result<Vec<IpNet>> {
        let Some(prefix) = keys::affinities_prefix(owner, Some(family)) else { return Ok(Vec::new()) };
        let listing = self.store().list_at(Range::Prefix(prefix), Revision::UNSET, Content::KeysOnly).await?;
        Ok(listing.kvs.iter().filter_map(|kv| Some(keys::parse_affinity(&kv.key)?.1)).collect())
    }

    /// Releases one block of an owner. If the block does not exist or has another owner, only the owner's stale
    /// affinity to the block is deleted.
    async fn release_block(
        &self,
        tx: &mut Transaction,
        owner: &Owner,
        cidr: IpNet,
        which: ReleaseIf,
    ) -> Result<BlockRelease> {
        let needed: Vec<Key> = [Some(keys::config()), Some(keys::block(cidr)), keys::affinity(owner, cidr)]
            .into_iter()
            .flatten()
            .collect();
        tx.prefetch(needed, Vec::new()).await?;
        let cooldown = read_config(tx).await?.cooldown_seconds();
        let mut work = WriteSet::new(tx, self.now(), cooldown);
        let verdict = match work.block(cidr).await? {
            Some(block) if block.is_owned_by(owner) && block.is_empty() => BlockRelease::Done,
            Some(block) if block.is_owned_by(owner) && which == ReleaseIf::Any => BlockRelease::Done,
            Some(block) if block.is_owned_by(owner) => return Ok(BlockRelease::InUse),
            Some(_) | None => BlockRelease::NotOurs,
        };
        if matches!(verdict, BlockRelease::Done) {
            work.change(cidr, Block::clear_owner).await?;
        }
        work.drop_affinity(owner, cidr).await?;
        work.write().await?;
        Ok(verdict)
    }
}

/// Returns all possible blocks of a pool that lie inside a CIDR, in ascending order.
fn blocks_in(pool: &Pool, cidr: IpNet) -> Result<Vec<IpNet>> {
    let bits = u32::from(pool.block_size().saturating_sub(cidr.prefix_len()));
    let count = 1_u128.checked_shl(bits).unwrap_or(u128::MAX);
    if count > MAX_BLOCKS_CLAIMED {
        return Err(Error::Invalid(format!(
            "The requested CIDR ({cidr}) has more than {MAX_BLOCKS_CLAIMED} blocks: claim a part of it at a time"
        )));
    }
    let Some(first) = pools::block_of(pool, cidr.network()) else { return Err(Error::OutsidePools(cidr)) };
    let subnets = cidr.subnets(first.prefix_len()).map_err(|_| Error::SmallerThanBlock(cidr))?;
    Ok(subnets.collect())
}

/// Maximum number of times that [`Ipam::release_pool_affinities`] lists the affinities. An affinity from the list may
/// be stale, and its block may belong to another owner by now. The release then lists the affinities again.
const MAX_AFFINITY_PASSES: usize = 3;

impl Ipam {
    /// Releases all blocks inside any CIDR, of nodes and of virtual owners, for example before a pool is deleted or
    /// divided. Disable the pool before calling this function, because a block that is claimed during the release can
    /// be missed. Addresses in the released blocks stay assigned.
    ///
    /// Calico's function that releases the blocks of a pool ignores blocks of virtual owners, and releases blocks in
    /// use as with [`ReleaseIf::Any`].
    ///
    /// # Errors
    /// `Malformed` for damaged blocks; all other blocks are released before this error is returned. Any store error;
    /// some blocks may already be released.
    #[boxed_future]
    pub async fn release_pool_affinities(
        &self,
        cidr: IpNet,
        which: ReleaseIf,
        deadline: Deadline,
    ) -> Result<ReleasedBlocks> {
        let cidr = cidr.trunc();
        let mut done = ReleasedBlocks::default();
        let mut failure = None;
        for _ in 0..MAX_AFFINITY_PASSES {
            let mut stale = false;
            (done.in_use, failure) = (Vec::new(), None);
            for (owner, block) in self.affinities_inside(cidr).await? {
                match transact!(self, deadline, |tx| self.release_block(tx, &owner, block, which).await) {
                    Ok(BlockRelease::Done) => done.released.push(block),
                    Ok(BlockRelease::InUse) => done.in_use.push(block),
                    Ok(BlockRelease::NotOurs) => stale = true,
                    Err(error @ Error::Malformed(_)) => failure = Some(error),
                    Err(error) => return Err(error),
                }
            }
            if !stale {
                break;
            }
        }
        failure.map_or(Ok(done), Err)
    }

    /// Before a pool is created, deletes the affinities to missing blocks that would overlap with the new pool and
    /// would differ from its block size. If the affinity to a missing block stayed, Margay or Calico could later create
    /// that block, which may overlap with a block of the new pool. Returns the number of deleted affinities.
    ///
    /// # Errors
    /// Any store error; some affinities may already be deleted.
    #[boxed_future]
    pub async fn drop_affinities_beside(&self, new: &NewPool, deadline: Deadline) -> Result<usize> {
        let mut dropped = 0;
        for (owner, block) in self.affinities_inside(new.cidr).await? {
            let Some(key) = keys::affinity(&owner, block).filter(|_| block.prefix_len() != new.size_of_blocks()) else {
                continue;
            };
            dropped += transact!(self, deadline, |tx| {
                tx.prefetch(vec![key.clone(), keys::block(block)], Vec::new()).await?;
                let is_stale = tx.get(&keys::block(block)).await?.is_none() && tx.get(&key).await?.is_some();
                if is_stale {
                    tx.delete(&key)?;
                }
                Ok(usize::from(is_stale))
            })?;
        }
        Ok(dropped)
    }

    /// Returns the affinities to blocks that overlap with a CIDR, each as the owner and the block.
    async fn affinities_inside(&self, cidr: IpNet) -> Result<Vec<(Owner, IpNet)>> {
        let mut inside = Vec::new();
        for prefix in [keys::host_affinities_prefix(), keys::virtual_affinities_prefix()] {
            let listing = self.store().list_at(Range::Prefix(prefix), Revision::UNSET, Content::KeysOnly).await?;
            let parsed = listing.kvs.iter().filter_map(|kv| keys::parse_affinity(&kv.key));
            inside.extend(parsed.filter(|(_, block)| overlap(*block, cidr)));
        }
        Ok(inside)
    }
}

impl Ipam {
    /// Removes a node that no longer exists, or a virtual owner. Releases all blocks of the owner, even blocks in use.
    /// For a node, also releases the blocks of the node's secondary networks and deletes the keys that old versions of
    /// Calico stored for the node. Addresses in the released blocks stay assigned to their handles; the caller must
    /// release the addresses of the node's containers by handle. Removing an owner does not change the node's own
    /// document. After an error, `remove_owner` can be called again.
    ///
    /// # Errors
    /// Any error of [`release_all_affinities`](Self::release_all_affinities). If releasing the blocks fails,
    /// `remove_owner` still deletes the keys of old Calico versions, unless the store cannot be reached.
    #[boxed_future]
    pub async fn remove_owner(&self, owner: &Owner, deadline: Deadline) -> Result<ReleasedBlocks> {
        let released = match owner {
            Owner::Host(name) => self.release_node_affinities(name, ReleaseIf::Any, deadline).await,
            _ => self.release_all_affinities(owner, ReleaseIf::Any, deadline).await,
        };
        if let Owner::Host(name) = owner {
            let key = keys::legacy_host(name);
            transact!(self, deadline, |tx| {
                tx.get(&key).await?;
                Ok(tx.delete(&key)?)
            })?;
        }
        released
    }

    /// Releases one block of a node that no longer exists, even if addresses of the block are in use. Returns true if
    /// the node, or the virtual owner of its secondary networks, owned the block. The owner recorded in the block must
    /// equal `node` exactly. If the block has another owner, the node's stale affinity to the block is deleted. The
    /// commit that releases the block fails if the node is registered again.
    ///
    /// # Errors
    /// `Invalid` if the node is registered. `Malformed` for a damaged block. Any store error.
    pub async fn give_up_block(&self, node: &str, cidr: IpNet, deadline: Deadline) -> Result<bool> {
        let owners = Owner::all_of(node);
        transact!(self, deadline, |tx| {
            let affinities = owners.iter().filter_map(|owner| keys::affinity(owner, cidr));
            tx.prefetch(affinities.chain([keys::block(cidr)]).collect(), Vec::new()).await?;
            self.require_gone(tx, node).await?;
            let key = keys::block(cidr);
            let stored = tx.snapshot_get(&key).await?;
            let whose = stored.and_then(|value| Block::decode(&key, value.as_bytes()).ok()?.owner());
            let mut was_its = false;
            for owner in &owners {
                let Some(affinity) = keys::affinity(owner, cidr) else { continue };
                if whose.as_ref() == Some(owner) || tx.snapshot_get(&affinity).await?.is_some() {
                    was_its |= matches!(self.release_block(tx, owner, cidr, ReleaseIf::Any).await?, BlockRelease::Done);
                }
            }
            Ok(was_its)
        })
    }

    /// Deletes the keys that old versions of Calico stored for a node that no longer exists.
    ///
    /// # Errors
    /// `Invalid` if the node is registered. Any store error.
    pub async fn drop_legacy(&self, node: &str, deadline: Deadline) -> Result<()> {
        transact!(self, deadline, |tx| {
            self.require_gone(tx, node).await?;
            drop_legacy_in(tx, node).await
        })
    }
}

/// Deletes the keys that old versions of Calico stored for a node, as part of a commit.
pub(crate) async fn drop_legacy_in(tx: &mut Transaction, node: &str) -> Result<()> {
    let key = keys::legacy_host(node);
    if tx.get(&key).await?.is_some() {
        tx.delete(&key)?;
    }
    Ok(())
}
