//! Assigns free addresses of one family: from the host's own blocks, from a newly claimed block, or borrowed from
//! another owner's block. Also computes the possible blocks of a pool, and finds the blocks that are stored.
//!
//! The commit of an assignment guards the blocks and affinities that it changes, but not the blocks from which it
//! assigns no address. If an address becomes free in an unguarded block before the commit, the assignment merely does
//! not use the address.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use kv::{Key, Range, Revision};
use time::{Duration, OffsetDateTime};

use super::request::AssignRequest;
use crate::assign_context::{AssignContext, excludes_node, pool_holding};
use crate::error::{Error, Result};
use crate::ipam::Ipam;
use crate::model::{Attribute, Block, Owner, PREFIX_LENGTH_ANNOTATION, Pool, keys};
use crate::net::{Family, overlap};
use crate::pools::{self, PoolBlocks};
use crate::reservations::Reservations;
use crate::sticky::overdue;
use crate::timestamps::unix_nanos;
use crate::write_set::{BLOCKS_PER_READ, BlockSlot, WriteSet};

/// Minimum age of an owner's claim on an empty block before another host may take over the block. A host that has just
/// claimed a block may be about to assign addresses from the block.
const MIN_RECLAIM_AGE: Duration = Duration::seconds(60);
/// Maximum number of a host's blocks whose values are read in one round trip. If a host has more than 4 blocks, an
/// additional round trip first reads the revisions of their last writes.
const MAX_BLOCKS_READ_AT_ONCE: usize = 4;
/// Maximum number of stored blocks that are searched for an empty block, once a block with an address to borrow is
/// known.
const MAX_BLOCKS_SEARCHED_FOR_EMPTY: usize = 64;
/// Number of a pool's blocks that are read in one round trip while searching for a block to take over; the first chunk
/// is smaller.
const BLOCKS_PER_SCAN: usize = 64;
/// Maximum number of unclaimed blocks that are checked for overlaps in a pool with stored blocks of other sizes.
/// Checking a block for overlaps costs one request.
const MAX_CANDIDATES_APART: usize = 16;
/// Maximum number of the node's blocks that one assignment releases because the block's pool no longer selects the
/// node.
const MAX_BLOCKS_RELEASED: usize = 4;

/// Assigns addresses of one family to the holder of a request.
#[derive(Debug)]
pub(super) struct FamilyAssigner<'a> {
    pub(super) ipam: &'a Ipam,
    pub(super) request: &'a AssignRequest,
    pub(super) context: &'a AssignContext,
    pub(super) family: Family,
    pub(super) wanted: usize,
    pub(super) holder: &'a Attribute,
    pub(super) handle: &'a str,
    /// The pools from which addresses may be assigned, in the order in which they are tried.
    pub(super) pools: &'a [&'a Pool],
    pub(super) owner: Owner,
    /// The second owner under which the node has blocks: the node's virtual owner, or the node itself if `owner` is the
    /// virtual owner. A node has two owners of blocks: the node itself, and the virtual owner of its secondary
    /// networks.
    pub(super) other: Option<Owner>,
    pub(super) now: OffsetDateTime,
}

/// The next block from which addresses are assigned when the host's own blocks are full.
enum NextBlock {
    Block(IpNet),
    Borrow(IpNet),
    Nothing,
}

impl FamilyAssigner<'_> {
    /// Assigns all wanted addresses: first free addresses, then sticky addresses whose wait for their workload has
    /// ended.
    ///
    /// # Errors
    /// `Exhausted`, `BlockLimit` or `NoNewBlocks` if fewer than the wanted addresses are available.
    pub(super) async fn run(&self, work: &mut WriteSet<'_>) -> Result<Vec<(IpAddr, IpNet)>> {
        let mut taken = Vec::new();
        if let Err(short) = self.take_free(work, &mut taken).await {
            if !short.is_exhaustion() {
                return Err(short);
            }
            self.take_overdue(work, &mut taken).await?;
            if taken.len() < self.wanted {
                return Err(short);
            }
        }
        Ok(taken)
    }

    /// Assigns the wanted number of addresses, from free addresses only.
    ///
    /// # Errors
    /// Any error of [`Self::run`].
    pub(super) async fn take_free(&self, work: &mut WriteSet<'_>, taken: &mut Vec<(IpAddr, IpNet)>) -> Result<()> {
        let mut own = self.take_from_own(work, taken).await?;
        if taken.len() < self.wanted {
            own += self.take_from_other(work, taken).await?;
        }
        while taken.len() < self.wanted {
            let may_claim = self.context.config.auto_allocate_blocks() && own < self.limit();
            match self.claim(work, may_claim).await? {
                NextBlock::Block(cidr) => {
                    own += 1;
                    self.take(work, cidr, taken).await?;
                }
                NextBlock::Borrow(cidr) => {
                    self.move_for(work, cidr).await?;
                    self.take(work, cidr, taken).await?;
                }
                NextBlock::Nothing => return Err(self.shortage(taken.len(), own)),
            }
        }
        Ok(())
    }

    /// Returns the maximum number of blocks that the host may own.
    pub(super) fn limit(&self) -> usize {
        if !self.context.host.limited {
            return usize::MAX;
        }
        usize::try_from(self.context.config.block_limit(self.request.max_blocks)).unwrap_or(usize::MAX)
    }

    pub(super) fn shortage(&self, assigned: usize, own: usize) -> Error {
        let config = &self.context.config;
        if !config.auto_allocate_blocks() {
            return Error::NoNewBlocks;
        }
        if own >= self.limit() {
            return Error::BlockLimit;
        }
        let names: Vec<String> = self.pools.iter().map(|pool| pool.cidr().to_string()).collect();
        let message = if config.strict_affinity() {
            "No more free affine blocks and strict affinity enabled".to_owned()
        } else {
            format!("No IPs available in pools: [{}]", names.join(" "))
        };
        Error::Exhausted { family: self.family, assigned, requested: self.wanted, messages: vec![message] }
    }

    /// Assigns addresses from the host's own blocks. If another writer has left the claim of a block unfinished,
    /// completes the claim. Returns the number of the host's blocks in the pools; if the first blocks have enough free
    /// addresses, the remaining blocks are not counted.
    async fn take_from_own(&self, work: &mut WriteSet<'_>, taken: &mut Vec<(IpAddr, IpNet)>) -> Result<usize> {
        let Some(prefix) = keys::affinities_prefix(&self.owner, Some(self.family)) else { return Ok(0) };
        let affine = work.affine(&Range::Prefix(prefix)).await?;
        let (kept, others): (Vec<_>, Vec<_>) = affine.into_iter().partition(|cidr| self.pool_of(*cidr).is_some());
        self.release_unselected(work, &others).await?;

        // Blocks that the transaction has already read are tried first, because another read of these blocks costs no
        // request.
        let (read, unread): (Vec<_>, Vec<_>) = kept.into_iter().partition(|cidr| work.written_at(*cidr).is_some());
        Ok(self.take_from(work, read, taken).await? + self.take_from(work, unread, taken).await?)
    }

    /// Assigns addresses from the host's blocks in `blocks`. Returns how many of the blocks that it visited belong to
    /// the host; it stops visiting blocks when enough addresses are assigned.
    async fn take_from(
        &self,
        work: &mut WriteSet<'_>,
        blocks: Vec<IpNet>,
        taken: &mut Vec<(IpAddr, IpNet)>,
    ) -> Result<usize> {
        if taken.len() >= self.wanted {
            return Ok(0);
        }
        let mut own = 0;
        let mut rest = self.latest_first(work, blocks).await?.into_iter().peekable();
        // The host's most recently written block usually has a free address, so the search reads only this block at
        // first. If the first block is full, the search reads the host's following blocks in large chunks.
        let mut at_once = 1;
        while taken.len() < self.wanted && rest.peek().is_some() {
            let chunk: Vec<_> = rest.by_ref().take(at_once).collect();
            work.read_ahead_own(&self.owner, &chunk).await?;
            for cidr in chunk {
                if taken.len() < self.wanted && self.is_own(work, cidr).await? {
                    own += 1;
                    self.take(work, cidr, taken).await?;
                }
            }
            at_once = BLOCKS_PER_READ;
        }
        Ok(own)
    }

    /// Sorts the blocks by their last write, most recent first. A recently written block probably has a free address,
    /// because an address was assigned or released in it, whereas a block without recent writes is usually full. Calico
    /// tries a host's blocks in key order.
    async fn latest_first(&self, work: &mut WriteSet<'_>, mut blocks: Vec<IpNet>) -> Result<Vec<IpNet>> {
        if blocks.len() <= MAX_BLOCKS_READ_AT_ONCE {
            if blocks.len() > 1 {
                work.read_ahead_own(&self.owner, &blocks).await?;
            }
            blocks.sort_by_key(|cidr| Reverse(work.written_at(*cidr)));
            return Ok(blocks);
        }
        let written = work.probe(&blocks).await?;
        let mut dated: Vec<_> = written.into_iter().zip(blocks).collect();
        dated.sort_by_key(|(written, _)| Reverse(*written));
        Ok(dated.into_iter().map(|(_, block)| block).collect())
    }

    /// Completes or deletes the host's affinity to a block. Returns true if the host now owns the block, so that its
    /// addresses may be assigned. A stale affinity is deleted, and an unconfirmed affinity is confirmed. If the
    /// affinity's block is missing, creates the block. Deletes the affinity if the missing block has another size than
    /// its pool's blocks, or would overlap with a stored block.
    async fn is_own(&self, work: &mut WriteSet<'_>, cidr: IpNet) -> Result<bool> {
        let is_confirmed = work.has_confirmed(&self.owner, cidr).await?;
        if matches!(work.find(cidr).await?, BlockSlot::Absent) && !self.may_make_again(work, cidr).await? {
            work.drop_affinity(&self.owner, cidr).await?;
            return Ok(false);
        }
        match work.find(cidr).await? {
            BlockSlot::Damaged => return Ok(false),
            BlockSlot::There(block) if !block.is_owned_by(&self.owner) => {
                work.drop_affinity(&self.owner, cidr).await?;
                return Ok(false);
            }
            BlockSlot::There(_) if is_confirmed => return Ok(true),
            // The block is rewritten without a change, so that a concurrent writer that is about to claim the block
            // fails and retries.
            BlockSlot::There(_) => drop(work.change(cidr, |_| ()).await?),
            BlockSlot::Absent => self.create(work, cidr).await?,
        }
        work.confirm_affinity(&self.owner, cidr).await?;
        Ok(true)
    }

    /// True if the missing block of an affinity can be created. Returns false if the pool of the affinity was recreated
    /// with another block size.
    async fn may_make_again(&self, work: &mut WriteSet<'_>, cidr: IpNet) -> Result<bool> {
        let is_of_pool = |pool: &Pool| pool.block_size() == cidr.prefix_len() && pool.cidr().contains(&cidr);
        Ok(self.pool_of(cidr).is_some_and(is_of_pool) && work.obstacle(cidr).await?.is_none())
    }

    /// Releases the node's empty blocks in pools that no longer select the node.
    async fn release_unselected(&self, work: &mut WriteSet<'_>, others: &[IpNet]) -> Result<()> {
        let unselected = others.iter().copied().filter(|cidr| {
            pool_holding(&self.context.pools, *cidr).is_some_and(|pool| excludes_node(pool, &self.context.host.labels))
        });
        for cidr in unselected.take(MAX_BLOCKS_RELEASED).collect::<Vec<_>>() {
            let is_empty = match work.find(cidr).await? {
                BlockSlot::There(block) => block.is_owned_by(&self.owner) && block.is_empty(),
                BlockSlot::Absent | BlockSlot::Damaged => false,
            };
            if is_empty {
                work.change(cidr, Block::clear_owner).await?;
                work.drop_affinity(&self.owner, cidr).await?;
            }
        }
        Ok(())
    }

    pub(super) async fn take(
        &self,
        work: &mut WriteSet<'_>,
        cidr: IpNet,
        taken: &mut Vec<(IpAddr, IpNet)>,
    ) -> Result<()> {
        let missing = self.wanted - taken.len();
        if missing == 0 || !self.has_room(work, cidr).await? {
            return Ok(());
        }
        let reservations = &self.context.reservations;
        let assign = |block: &mut Block| block.assign_auto(missing, self.holder, reservations);
        let assigned = work.change(cidr, assign).await?.unwrap_or_default();
        taken.extend(assigned.into_iter().map(|ip| (ip, cidr)));
        work.touch_handle(self.handle, cidr);
        Ok(())
    }

    async fn has_room(&self, work: &mut WriteSet<'_>, cidr: IpNet) -> Result<bool> {
        let has_room = match work.find(cidr).await? {
            BlockSlot::There(block) => {
                block.length() == self.length_in(cidr) && block.free_count(&self.context.reservations) > 0
            }
            BlockSlot::Absent | BlockSlot::Damaged => false,
        };
        Ok(has_room && self.is_apart(work, cidr).await?)
    }

    /// True if no other stored block overlaps with this block. The store may have overlapping blocks, because Calico
    /// and Margay 0.1.0 could create them.
    pub(super) async fn is_apart(&self, work: &mut WriteSet<'_>, cidr: IpNet) -> Result<bool> {
        let other = work.overlap_of(cidr).await?;
        if let Some(other) = other {
            tracing::warn!(%cidr, %other, "two blocks overlap; assigning no address from them");
        }
        Ok(other.is_none())
    }

    /// Returns the length of the prefixes that the block's pool assigns; for a pool of single addresses, 32 (IPv4) or
    /// 128 (IPv6).
    fn length_in(&self, cidr: IpNet) -> u8 {
        self.pool_of(cidr).map_or(self.family.bits(), Pool::length)
    }

    fn pool_of(&self, cidr: IpNet) -> Option<&Pool> {
        pool_holding(self.pools.iter().copied(), cidr)
    }

    async fn create(&self, work: &mut WriteSet<'_>, cidr: IpNet) -> Result<()> {
        if let Some(pool) = self.pool_of(cidr) {
            refuse_among_prefixes(work, pool).await?;
        }
        let reserved = self.request.host_reserved.as_ref();
        let block = Block::of_length(cidr, self.length_in(cidr), Some(&self.owner), self.now, reserved);
        work.create(block?).await
    }

    /// Claims a block that is not stored yet. If every block is stored, claims a stored block that the host owns
    /// without an affinity, or an empty block. An empty block of another host is claimed only if that host claimed it
    /// at least [`MIN_RECLAIM_AGE`] ago. If no block can be claimed, returns a block from which an address can be
    /// borrowed.
    async fn claim(&self, work: &mut WriteSet<'_>, may_claim: bool) -> Result<NextBlock> {
        if may_claim {
            for pool in self.pools {
                if let Some(cidr) = self.find_new(work, pool).await? {
                    self.create(work, cidr).await?;
                    work.confirm_affinity(&self.owner, cidr).await?;
                    return Ok(NextBlock::Block(cidr));
                }
            }
        }
        self.find_used(work, may_claim).await
    }

    /// Takes over a stored block for the host, or else chooses a block from which an address can be borrowed. To find a
    /// block, Calico reads all blocks of all pools. Once Margay knows a block from which an address can be borrowed, it
    /// searches at most [`MAX_BLOCKS_SEARCHED_FOR_EMPTY`] blocks for an empty block.
    async fn find_used(&self, work: &mut WriteSet<'_>, may_claim: bool) -> Result<NextBlock> {
        let (mut borrow, mut looked_at) = (None, 0);
        for pool in self.pools {
            let blocks = self.candidates(work, pool).await?;
            // The first chunk of blocks to read is small, because one of the first few blocks in the pool's order
            // usually has a free address. If all blocks of the first chunk are full, many more blocks may have to be
            // scanned, so the next chunks are larger.
            let (first, rest) = blocks.split_at(blocks.len().min(BLOCKS_PER_READ));
            for chunk in std::iter::once(first).chain(rest.chunks(BLOCKS_PER_SCAN)) {
                if let Some(cidr) = borrow.filter(|_| !may_claim || looked_at >= MAX_BLOCKS_SEARCHED_FOR_EMPTY) {
                    return Ok(NextBlock::Borrow(cidr));
                }
                looked_at += chunk.len();
                for cidr in work.scan(chunk, |block| self.is_usable(block)).await? {
                    match self.judge(work, cidr).await? {
                        StoredBlockUse::Reclaim(former) if may_claim && self.is_apart(work, cidr).await? => {
                            self.take_over(work, cidr, former).await?;
                            return Ok(NextBlock::Block(cidr));
                        }
                        StoredBlockUse::Reclaim(_) | StoredBlockUse::Borrow
                            if borrow.is_none()
                                && !self.context.config.strict_affinity()
                                && self.is_apart(work, cidr).await? =>
                        {
                            borrow = Some(cidr);
                        }
                        _ => {}
                    }
                }
            }
        }
        self.ipam.remember_full(&self.request.attachment, work.full());
        Ok(borrow.map_or(NextBlock::Nothing, NextBlock::Borrow))
    }

    /// Returns the blocks of a pool that may be stored, except blocks that were full when last read and have not been
    /// written since.
    async fn candidates(&self, work: &mut WriteSet<'_>, pool: &Pool) -> Result<Vec<IpNet>> {
        let blocks = find_stored(work, pool, self.walk(pool)).await?;
        let full = self.ipam.recall_full(&self.request.attachment);
        if full.is_empty() {
            return Ok(blocks);
        }
        let written = work.probe(&blocks).await?.into_iter();
        let is_worth_it =
            |(cidr, written): &(IpNet, Option<Revision>)| written.is_some() && full.get(cidr) != written.as_ref();
        Ok(blocks.into_iter().zip(written).filter(is_worth_it).map(|(cidr, _)| cidr).collect())
    }

    /// Finds the pool's first block, in the order of [`CandidateBlocks`], that is not stored.
    async fn find_new(&self, work: &mut WriteSet<'_>, pool: &Pool) -> Result<Option<IpNet>> {
        let mut places = CandidateBlocks::new(pool, &self.context.host.name, self.now);
        let mut chunks = 0;
        while let Some(chunk) = places.next_chunk(&self.context.reservations) {
            let mut wanted: Vec<IpNet> = chunk.into_iter().filter(|cidr| !work.is_changed(*cidr)).collect();
            // If another host was quicker, several hosts are probably claiming blocks in this part of the pool, and all
            // but one of them would fail again if they tried the same next block.
            if work.tx.times_overtaken() > 0 {
                wanted = places.shuffled(wanted, work.tx.times_overtaken());
            }
            // Blocks are read in chunks. The requests for the first two chunks also read the keys of stored blocks that
            // could overlap with a block in the chunk. If the first two chunks have no unclaimed block, the pool is
            // nearly full, so the requests for later chunks of blocks do not read the keys of overlapping blocks.
            chunks += 1;
            let probed = if chunks <= 2 { work.probe_along(&wanted).await } else { work.probe(&wanted).await };
            let written = probed?;
            let mut probed = wanted.into_iter().zip(written);
            if let Some((absent, _)) = probed.find(|(_, written)| written.is_none()) {
                return match work.obstacle(absent).await? {
                    None => Ok(Some(absent)),
                    Some(_) => self.find_apart(work, pool).await,
                };
            }
        }
        Ok(None)
    }

    /// Finds a block that can be created in a pool whose CIDR contains stored blocks of another size, which a deleted
    /// pool has left.
    async fn find_apart(&self, work: &mut WriteSet<'_>, pool: &Pool) -> Result<Option<IpNet>> {
        let taken = self.context.reservations.with(&work.taken_in(pool).await?);
        let mut walk = self.walk(pool);
        for _ in 0..MAX_CANDIDATES_APART {
            let Some(cidr) = walk.next_unreserved(&taken) else { break };
            match work.obstacle(cidr).await? {
                None => return Ok(Some(cidr)),
                Some(obstacle) => {
                    tracing::warn!(
                        pool = pool.name(),
                        %obstacle,
                        "cannot create a block in one part of the pool: a stored block overlaps with this part, or too \
                         many blocks are stored near this part; trying another part"
                    );
                }
            }
        }
        Ok(None)
    }

    fn walk(&self, pool: &Pool) -> PoolBlocks {
        walk(pool, &self.context.host.name, self.now)
    }

    /// True if the block has a free address, or an address that may become free. An address may become free if it is a
    /// leftover of this host's earlier boot, or a sticky address whose wait for its workload has ended.
    fn is_usable(&self, block: &Block) -> bool {
        let is_ours = |entry: &Attribute| entry.node() == Some(&self.context.host.name);
        block.free_count(&self.context.reservations) > 0
            || block.allocated().any(|(_, entry)| is_ours(entry) || overdue(entry, self.now).is_some())
    }

    /// Decides whether the host can take over a stored block or can borrow an address from it.
    async fn judge(&self, work: &mut WriteSet<'_>, cidr: IpNet) -> Result<StoredBlockUse> {
        let BlockSlot::There(block) = work.find(cidr).await? else { return Ok(StoredBlockUse::Nothing) };
        if block.length() != self.length_in(cidr) || block.free_count(&self.context.reservations) == 0 {
            return Ok(StoredBlockUse::Nothing);
        }
        let owner = block.owner();
        let is_old = block.claim_age(self.now).is_none_or(|age| age >= MIN_RECLAIM_AGE);
        Ok(match owner {
            Some(owner) if owner == self.owner => StoredBlockUse::Reclaim(None),
            // A block in which all assigned addresses wait for their workloads can get a new owner, like an empty
            // block.
            None if block.is_empty() || block.only_waits() => StoredBlockUse::Reclaim(None),
            Some(owner) if owner.node().is_some() && block.is_empty() && is_old => StoredBlockUse::Reclaim(Some(owner)),
            Some(owner) if !self.may_borrow(block, &owner) => StoredBlockUse::Nothing,
            _ => StoredBlockUse::Borrow,
        })
    }

    pub(super) async fn take_over(&self, work: &mut WriteSet<'_>, cidr: IpNet, former: Option<Owner>) -> Result<()> {
        if let Some(former) = former {
            return work.hand_block(cidr, &former, &self.owner, self.now).await;
        }
        work.change(cidr, |block| block.set_owner(&self.owner, self.now)).await?;
        work.confirm_affinity(&self.owner, cidr).await
    }
}

/// Whether a host can take over a stored block or can borrow an address from it.
enum StoredBlockUse {
    /// The host can become the block's owner. Contains the block's current owner, if any; taking over the block deletes
    /// this owner's affinity to it.
    Reclaim(Option<Owner>),
    Borrow,
    Nothing,
}

impl FamilyAssigner<'_> {
    /// Returns the owner's first block in the pools, in the order of the blocks' keys, even if the block is full. If
    /// the owner has no block, claims a block. If another writer was interrupted while it claimed a block for the
    /// owner, completes that claim.
    ///
    /// # Errors
    /// `BlockLimit` or `NoNewBlocks` if the owner has no block and cannot claim one.
    pub(super) async fn ensure_block(&self, work: &mut WriteSet<'_>) -> Result<IpNet> {
        let Some(prefix) = keys::affinities_prefix(&self.owner, Some(self.family)) else {
            return Err(Error::NoNewBlocks);
        };
        let affine = work.affine(&Range::Prefix(prefix)).await?;
        let (kept, others): (Vec<_>, Vec<_>) =
            affine.into_iter().partition(|cidr| pool_holding(self.pools.iter().copied(), *cidr).is_some());
        self.release_unselected(work, &others).await?;
        let own = kept.len() + self.of_other(work).await?.len();
        for cidr in kept {
            if !self.context.reservations.covers(cidr) && self.is_own(work, cidr).await? {
                return Ok(cidr);
            }
        }
        if !self.context.config.auto_allocate_blocks() {
            return Err(Error::NoNewBlocks);
        }
        if own >= self.limit() {
            return Err(Error::BlockLimit);
        }
        match self.claim(work, true).await? {
            NextBlock::Block(cidr) => Ok(cidr),
            NextBlock::Borrow(_) | NextBlock::Nothing => Err(Error::NoNewBlocks),
        }
    }
}

/// Maximum number of blocks whose existence is queried in one round trip.
const BLOCKS_PER_PROBE: usize = 64;
/// Number of chunks of candidate blocks that a search takes from scattered places in a large pool, before it scans the
/// pool in order. If 99 % of the pool's blocks are claimed, the 256 candidate blocks from scattered places include an
/// unclaimed block with a probability of 92 %.
const SCATTERED_CHUNKS: u64 = 4;
/// Pools with fewer than 2^9 blocks are scanned in order instead of at scattered places.
const MIN_SCATTERED_POOL_BITS: u8 = 9;
/// In a pool with more than 2^12 possible blocks, the stored blocks are found by listing their keys instead of querying
/// the key of each possible block.
const MAX_PROBED_POOL_BITS: u8 = 12;

/// Returns all possible blocks of a pool, in the order in which a host tries them. Different hosts usually start at
/// different blocks. In a pool of one-address blocks, a host needs many blocks, so each search for a new block starts
/// at a different block.
fn walk(pool: &Pool, host: &str, now: OffsetDateTime) -> PoolBlocks {
    let shared = pool.block_size() < pool.family().bits();
    pools::blocks_from(pool, if shared { pools::start_of(host) } else { unix_nanos(now) })
}

/// The order in which a host searches for a block that is not stored yet. Blocks are searched in chunks, each in one
/// round trip. The first chunk of blocks begins at the host's start block. In a large pool, the second to fifth chunks
/// are scattered over the whole pool, because claimed blocks form long runs of consecutive blocks. After the chunk at
/// the host's start block and the scattered chunks, the search visits all blocks of the pool in ascending order.
struct CandidateBlocks<'a> {
    pool: &'a Pool,
    walk: PoolBlocks,
    start: u64,
    chunk: u64,
}

impl<'a> CandidateBlocks<'a> {
    fn new(pool: &'a Pool, host: &str, now: OffsetDateTime) -> Self {
        Self { pool, walk: walk(pool, host, now), start: pools::start_of(host), chunk: 0 }
    }

    /// Returns the next chunk of blocks with unreserved addresses, or `None` at the end of the pool.
    fn next_chunk(&mut self, reservations: &Reservations) -> Option<Vec<IpNet>> {
        let chunk = self.chunk;
        self.chunk += 1;
        let found: Vec<IpNet> = match chunk {
            1..=SCATTERED_CHUNKS if self.is_large() => self.scattered(chunk, reservations),
            _ => std::iter::from_fn(|| self.walk.next_unreserved(reservations)).take(BLOCKS_PER_PROBE).collect(),
        };
        (!found.is_empty()).then_some(found)
    }

    fn is_large(&self) -> bool {
        self.pool.block_size().saturating_sub(self.pool.cidr().prefix_len()) >= MIN_SCATTERED_POOL_BITS
    }

    /// Returns the blocks of a chunk in an order that depends on the host and on how often the host was overtaken. The
    /// orders of hosts with neighbouring start blocks are unrelated.
    fn shuffled(&self, blocks: Vec<IpNet>, times_overtaken: u32) -> Vec<IpNet> {
        let first = scatter(self.start.wrapping_add(u64::from(times_overtaken) << 32));
        let mut ranked: Vec<_> = (first..).map(scatter).zip(blocks).collect();
        ranked.sort_unstable();
        ranked.into_iter().map(|(_, block)| block).collect()
    }

    /// Returns one chunk of blocks that are scattered over the pool. The blocks of a chunk depend only on the host, the
    /// chunk number and the reservations.
    fn scattered(&self, chunk: u64, reservations: &Reservations) -> Vec<IpNet> {
        let first = chunk * BLOCKS_PER_PROBE as u64;
        let places = (first..first + BLOCKS_PER_PROBE as u64).map(|number| scatter(self.start.wrapping_add(number)));
        let blocks = places.filter_map(|place| pools::blocks_from(self.pool, place).next_unreserved(reservations));
        blocks.collect::<BTreeSet<_>>().into_iter().collect()
    }
}

/// Hashes a number to 32 bits, so that the hashes of consecutive numbers are far apart. The hash is the upper half of
/// `number * (2^64 / golden ratio)`, truncated to 64 bits.
fn scatter(number: u64) -> u64 {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32
}

/// Returns a list of the pool's possible blocks that includes all its stored blocks. For a pool with up to 2^12
/// possible blocks, returns all possible blocks, in the order in which the host tries them. For a pool with more than
/// 2^12 possible blocks, returns the stored blocks in key order, listed without a guard.
async fn find_stored(work: &mut WriteSet<'_>, pool: &Pool, walk: PoolBlocks) -> Result<Vec<IpNet>> {
    if pool.block_size().saturating_sub(pool.cidr().prefix_len()) <= MAX_PROBED_POOL_BITS {
        return Ok(walk.collect());
    }
    let range = Range::Prefix(keys::blocks_prefix(Some(pool.family())));
    let stored: Vec<Key> = work.tx.snapshot_keys(&range).await?;
    let blocks = stored.iter().filter_map(keys::parse_block);
    Ok(blocks.filter(|cidr| pool.cidr().contains(cidr)).collect())
}

/// Fails if an assignment needs a new block of single addresses in a pool that has no prefix annotation but contains
/// blocks of prefixes. A pool of prefixes loses its annotation if another program rewrites the pool without the
/// annotation.
///
/// # Errors
/// `Invalid` if the pool has a block of prefixes; the error message names the block. Any store error.
pub async fn refuse_among_prefixes(work: &mut WriteSet<'_>, pool: &Pool) -> Result<()> {
    if pool.prefix_length().is_some() {
        return Ok(());
    }
    let stored = Range::Prefix(keys::blocks_of_prefixes_prefix(pool.family()));
    let stored = work.tx.snapshot_keys(&stored).await?;
    if let Some(other) = stored.iter().filter_map(keys::parse_block).find(|other| overlap(*other, pool.cidr())) {
        return Err(Error::Invalid(format!(
            "pool {name} has addresses now, and prefixes of it are stored in block {other}; write its annotation \
             {PREFIX_LENGTH_ANNOTATION} again, as it was, with: margay apply",
            name = pool.name()
        )));
    }
    Ok(())
}
