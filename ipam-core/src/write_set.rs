//! Collects the changes that one transaction makes to blocks, and to their handles and affinities.
//!
//! A write set reads blocks without guarding them. A block is guarded as soon as the transaction changes it.
//! [`WriteSet::write`] gives each changed block its next sequence number, updates the handles' counts, and deletes
//! empty blocks without an owner. After every commit of Margay, blocks, handles and affinities agree.
//!
//! When Calico assigns an address, it increases the handle's count before it writes the block. When Calico releases an
//! address, it decreases the handle's count after it has written the block. Between the two writes of a Calico
//! assignment or release, the handle's count exceeds the number of its addresses in the block. Margay does not lower a
//! count that is too high, because Calico may be between its two writes, and could then leave an address without a
//! handle. A handle's count for a block is removed only when the handle holds no address of the block any more. A
//! commit that removes a handle's count also rewrites the block, so that a concurrent writer of the block fails and
//! retries.
//!
//! Before a transaction creates a block, it checks that no stored block overlaps with the new block. The check for
//! overlaps reads the keys of possible overlapping blocks, and the commit guards that no key of an overlapping block is
//! created after the check. Assignments from existing blocks do not conflict with the guard against overlapping blocks,
//! because they create no blocks. Calico checks only the key of the block that it creates, so Calico can create
//! overlapping blocks, as could Margay's first version. An assignment also checks whether the existing block that it
//! uses overlaps with another block, which Calico may have created. The overlap check of an existing block adds no
//! guard, because Calico could create an overlapping block even after the commit.

mod quotas;

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;
use kv::{Content, Key, Range, Revision, Transaction, TxnRange};
use smol_str::SmolStr;
use time::OffsetDateTime;

use crate::error::{Error, OverlapError, Result};
use crate::hints::FullBlocks;
use crate::model::{
    Affinity, AffinityState, Block, Cover, Document, Handle, Owner, Pool, Precision, covers_of_overlaps,
    is_of_prefixes, keys, overlaps_of_addresses, ranges_around, same_handle,
};
use crate::net::{Family, overlap};

use quotas::QuotaLimits;
pub(crate) use quotas::{each_of, likely_counters};

/// Maximum number of blocks whose values are read in one round trip.
pub const BLOCKS_PER_READ: usize = 16;

/// The blocks, handles and affinities that one transaction reads and changes.
#[derive(Debug)]
pub struct WriteSet<'t> {
    /// The transaction to which this write set adds its reads and changes. Callers may use the transaction to read and
    /// write keys of other documents.
    pub tx: &'t mut Transaction,
    now: OffsetDateTime,
    cooldown_seconds: i64,
    /// The blocks that were read, including the changes of this transaction; `None` if the block does not exist.
    blocks: BTreeMap<IpNet, Option<Block>>,
    changed: BTreeSet<IpNet>,
    /// For each changed block, the handles of its held addresses before the first change.
    before: BTreeMap<IpNet, Vec<SmolStr>>,
    /// Blocks with an address whose recorded release time is too far in the future. Reading a block corrects these
    /// release times in memory; the stored times stay wrong until a commit writes the block.
    misdated: Vec<IpNet>,
    /// For each block whose key was read without the value, the revision of its last write; `None` if the block does
    /// not exist.
    probed: BTreeMap<IpNet, Option<Revision>>,
    full: FullBlocks,
    /// The keys of new affinities that the commit will create.
    claimed: BTreeSet<Key>,
    /// The handles whose addresses this transaction assigns or releases, each with the blocks of these addresses.
    handles: BTreeMap<String, BTreeSet<IpNet>>,
    /// The quotas, and how this transaction changes the number of addresses that count against each quota.
    limits: QuotaLimits,
    /// The block of the last prefetch, if [`Self::read_ahead_of`] prefetched a single block, and the key ranges of
    /// overlapping blocks that were read along with it.
    around: Option<(IpNet, Vec<Range>)>,
}

/// The result of [`WriteSet::find`], which returns no error for a damaged block.
#[derive(Debug)]
pub enum BlockSlot<'w> {
    /// No value is stored under the block's key.
    Absent,
    /// The value under the block's key is not a valid block.
    Damaged,
    /// The block is stored and valid.
    There(&'w Block),
}

impl<'t> WriteSet<'t> {
    /// Creates an empty write set for a transaction. `now` is the current time, and `cooldown_seconds` the cooldown of
    /// released addresses.
    pub fn new(tx: &'t mut Transaction, now: OffsetDateTime, cooldown_seconds: i64) -> Self {
        Self {
            tx,
            now,
            cooldown_seconds,
            blocks: BTreeMap::new(),
            changed: BTreeSet::new(),
            before: BTreeMap::new(),
            misdated: Vec::new(),
            probed: BTreeMap::new(),
            full: FullBlocks::new(),
            claimed: BTreeSet::new(),
            handles: BTreeMap::new(),
            limits: QuotaLimits::default(),
            around: None,
        }
    }

    /// Prefetches the values of blocks in one round trip.
    pub async fn read_ahead(&mut self, blocks: &[IpNet]) -> Result<()> {
        self.read_ahead_of(&[], blocks).await
    }

    /// Prefetches blocks and the owner's affinities to these blocks; see [`Self::read_ahead_of`].
    pub async fn read_ahead_own(&mut self, owner: &Owner, blocks: &[IpNet]) -> Result<()> {
        self.read_ahead_of(std::slice::from_ref(owner), blocks).await
    }

    /// Prefetches blocks and the affinities of several owners to these blocks in one round trip. For a single block,
    /// the prefetch also reads the key ranges that [`Self::overlap_of`] needs. If more than one block is given, the key
    /// ranges of overlapping blocks are not read, because that would need too many requests.
    pub async fn read_ahead_of(&mut self, owners: &[Owner], blocks: &[IpNet]) -> Result<()> {
        let unread = blocks.iter().filter(|cidr| !self.blocks.contains_key(*cidr));
        let mut unread: Vec<Key> = unread.map(|cidr| keys::block(*cidr)).collect();
        unread.extend(blocks.iter().flat_map(|cidr| owners.iter().filter_map(|owner| keys::affinity(owner, *cidr))));
        self.around = match blocks {
            [cidr] if !owners.is_empty() && !is_of_prefixes(*cidr) => Some((*cidr, overlaps_of_addresses(*cidr))),
            _ => None,
        };
        let around = self.around.iter().flat_map(|(_, ranges)| ranges.iter().cloned());
        Ok(self.tx.prefetch(unread, around.map(TxnRange::keys_of).collect()).await?)
    }

    /// Returns a block; `None` if the block does not exist. The returned block includes the changes of this
    /// transaction, and addresses whose cooldown has ended are free in it.
    ///
    /// # Errors
    /// `Malformed` if the stored value is not a valid block.
    pub async fn block(&mut self, cidr: IpNet) -> Result<Option<&Block>> {
        if !self.blocks.contains_key(&cidr) {
            let key = keys::block(cidr);
            let stored = self.tx.snapshot_get(&key).await?;
            let block = stored.map(|value| Block::decode(&key, value.as_bytes())).transpose()?;
            let (block, is_misdated) = block.map(|block| self.after_cooldown(block)).unzip();
            self.insert(cidr, block, is_misdated == Some(true));
        }
        Ok(self.blocks.get(&cidr).and_then(Option::as_ref))
    }

    /// Returns a block like [`Self::block`], but logs a damaged block and returns [`BlockSlot::Damaged`].
    pub async fn find(&mut self, cidr: IpNet) -> Result<BlockSlot<'_>> {
        match self.block(cidr).await {
            Ok(_) => {}
            Err(Error::Malformed(error)) => {
                tracing::warn!(%cidr, %error, "skipping a stored block that cannot be decoded");
                return Ok(BlockSlot::Damaged);
            }
            Err(error) => return Err(error),
        }
        Ok(self.block(cidr).await?.map_or(BlockSlot::Absent, BlockSlot::There))
    }

    /// Reads blocks in one round trip, and keeps the blocks that `keep` accepts in the write set. Blocks that the
    /// transaction had read before the scan, and blocks with a release time too far in the future, stay in the write
    /// set even if `keep` rejects them. The scan drops any other block from memory as soon as `keep` rejects it, so
    /// that a search through a pool of thousands of blocks does not fill the memory. Damaged blocks are logged and
    /// skipped. Returns the given blocks that are in the write set after the scan, in the given order.
    pub async fn scan(&mut self, blocks: &[IpNet], keep: impl Fn(&Block) -> bool) -> Result<Vec<IpNet>> {
        let unread: Vec<IpNet> = blocks.iter().copied().filter(|cidr| !self.blocks.contains_key(cidr)).collect();
        let names: Vec<Key> = unread.iter().map(|cidr| keys::block(*cidr)).collect();
        let found = self.tx.peek(&names, Content::Full).await?;
        for ((cidr, key), kv) in unread.into_iter().zip(&names).zip(found) {
            let Some(kv) = kv else { continue };
            match Block::decode(key, kv.value.as_bytes()) {
                Ok(block) => {
                    let (block, is_misdated) = self.after_cooldown(block);
                    if is_misdated || keep(&block) {
                        self.insert(cidr, Some(block), is_misdated);
                    } else if block.is_full() {
                        self.full.insert(cidr, kv.mod_revision);
                    }
                }
                Err(error) => tracing::warn!(%cidr, %error, "skipping a stored block that cannot be decoded"),
            }
        }
        Ok(blocks.iter().copied().filter(|cidr| self.blocks.contains_key(cidr)).collect())
    }

    /// Returns the full blocks that [`Self::scan`] has read and not kept.
    pub fn full(&self) -> &FullBlocks {
        &self.full
    }

    /// Returns the revision of the last write of each block, or `None` for a block that does not exist. Reads only the
    /// keys of the blocks, without a guard; see [`Transaction::peek`].
    pub async fn probe(&mut self, blocks: &[IpNet]) -> Result<Vec<Option<Revision>>> {
        self.probe_with(blocks, &[]).await
    }

    async fn probe_with(&mut self, blocks: &[IpNet], along: &[Range]) -> Result<Vec<Option<Revision>>> {
        let unknown: Vec<IpNet> = blocks.iter().copied().filter(|cidr| !self.probed.contains_key(cidr)).collect();
        let names: Vec<Key> = unknown.iter().map(|cidr| keys::block(*cidr)).collect();
        let found = self.tx.peek_with(&names, Content::KeysOnly, along).await?;
        let written = found.into_iter().map(|kv| kv.map(|kv| kv.mod_revision));
        self.probed.extend(unknown.into_iter().zip(written));
        Ok(blocks.iter().map(|cidr| self.probed.get(cidr).copied().flatten()).collect())
    }

    /// Frees the block's addresses whose cooldown is over. The returned flag is true if a recorded release time was too
    /// far in the future.
    fn after_cooldown(&self, mut block: Block) -> (Block, bool) {
        let is_misdated = block.apply_cooldown(self.now, self.cooldown_seconds).moved > 0;
        (block, is_misdated)
    }

    fn insert(&mut self, cidr: IpNet, block: Option<Block>, is_misdated: bool) {
        if is_misdated {
            self.misdated.push(cidr);
        }
        self.blocks.insert(cidr, block);
    }

    /// Guards a block, and calls `change` with the block. Returns the result of `change`; `None` if the block does not
    /// exist.
    pub async fn change<T>(&mut self, cidr: IpNet, change: impl FnOnce(&mut Block) -> T) -> Result<Option<T>> {
        self.prepare(cidr).await?;
        Ok(self.blocks.get_mut(&cidr).and_then(Option::as_mut).map(change))
    }

    /// Prepares a block for a change: guards the block, and notes the handles that hold its addresses.
    async fn prepare(&mut self, cidr: IpNet) -> Result<()> {
        self.block(cidr).await?;
        self.tx.get(&keys::block(cidr)).await?;
        self.read_quotas().await?;
        if let Some(Some(block)) = self.blocks.get(&cidr)
            && self.changed.insert(cidr)
        {
            self.before.insert(cidr, block.handles());
            self.limits.note(block);
        }
        Ok(())
    }

    /// Returns the revision at which a block was last written, or `None` if the block was not read.
    pub fn written_at(&self, cidr: IpNet) -> Option<Revision> {
        self.tx.written_at(&keys::block(cidr))
    }

    /// True if the commit will write the block.
    pub fn is_changed(&self, cidr: IpNet) -> bool {
        self.changed.contains(&cidr)
    }

    /// Returns the blocks, among those read so far, in which a recorded release time was too far in the future.
    pub fn misdated(&self) -> &[IpNet] {
        &self.misdated
    }

    /// Returns the blocks that this write set has read so far.
    pub fn blocks(&self) -> impl Iterator<Item = &Block> {
        self.blocks.values().flatten()
    }

    /// Records that a handle's addresses in a block have changed, so that the commit updates the handle's count for the
    /// block.
    pub fn touch_handle(&mut self, id: &str, cidr: IpNet) {
        self.handles.entry(id.to_owned()).or_default().insert(cidr);
    }

    /// Creates or confirms the affinity of an owner to a block.
    pub async fn confirm_affinity(&mut self, owner: &Owner, cidr: IpNet) -> Result<()> {
        let Some(key) = keys::affinity(owner, cidr) else { return Ok(()) };
        let affinity = match self.tx.get(&key).await? {
            None => {
                self.claimed.insert(key.clone());
                Affinity::new(AffinityState::Confirmed)
            }
            Some(value) => match Affinity::decode(&key, value.as_bytes()) {
                Ok(stored) if stored.state() == AffinityState::Confirmed => return Ok(()),
                Ok(mut stored) => {
                    stored.set_state(AffinityState::Confirmed);
                    stored
                }
                Err(_) => Affinity::new(AffinityState::Confirmed),
            },
        };
        Ok(self.tx.put(&key, affinity.encode()?)?)
    }

    /// True if the affinity of an owner to a block is confirmed.
    pub async fn has_confirmed(&mut self, owner: &Owner, cidr: IpNet) -> Result<bool> {
        let Some(key) = keys::affinity(owner, cidr) else { return Ok(false) };
        let stored = self.tx.snapshot_get(&key).await?;
        let state = stored.and_then(|value| Affinity::decode(&key, value.as_bytes()).ok()).map(|one| one.state());
        Ok(state == Some(AffinityState::Confirmed))
    }

    /// Deletes the affinity of an owner to a block. Guards the block, so that the commit fails if another writer makes
    /// `owner` the block's owner.
    pub async fn drop_affinity(&mut self, owner: &Owner, cidr: IpNet) -> Result<()> {
        if let Some(key) = keys::affinity(owner, cidr) {
            self.tx.get(&keys::block(cidr)).await?;
            self.tx.get(&key).await?;
            self.tx.delete(&key)?;
        }
        Ok(())
    }

    /// Changes the owner of a block, deletes the former owner's affinity to the block, and creates one for the new
    /// owner. The block records `now` as the time of the claim.
    pub async fn hand_block(&mut self, cidr: IpNet, from: &Owner, to: &Owner, now: OffsetDateTime) -> Result<()> {
        self.drop_affinity(from, cidr).await?;
        self.change(cidr, |block| block.set_owner(to, now)).await?;
        self.confirm_affinity(to, cidr).await
    }

    /// Returns the blocks to which the affinities in a key range belong, ascending by key, including affinities that
    /// this transaction creates. The affinities are read without a guard, because each block itself names its owner.
    pub async fn affine(&mut self, affinities: &Range) -> Result<Vec<IpNet>> {
        let mut listed = self.claimed.clone();
        listed.retain(|key| affinities.contains(key.as_bytes()));
        listed.extend(self.tx.snapshot_keys(affinities).await?);
        Ok(listed.iter().filter_map(|key| Some(keys::parse_affinity(key)?.1)).collect())
    }

    /// Adds all changes to the transaction as writes and deletions of keys.
    pub async fn write(mut self) -> Result<()> {
        for (id, blocks) in std::mem::take(&mut self.handles) {
            self.write_handle(&id, &blocks).await?;
        }
        self.write_counters().await?;
        for cidr in &self.changed {
            let Some(Some(block)) = self.blocks.get_mut(cidr) else { continue };
            let key = keys::block(*cidr);
            if block.is_empty() && block.owner().is_none() {
                self.tx.delete(&key)?;
            } else {
                block.bump();
                self.tx.put(&key, block.encode()?)?;
            }
        }
        Ok(())
    }

    async fn write_handle(&mut self, id: &str, blocks: &BTreeSet<IpNet>) -> Result<()> {
        let key = keys::handle(id);
        let stored = self.tx.get(&key).await?;
        let mut handle = match stored {
            Some(value) => Handle::decode(&key, value.as_bytes())?,
            None => Handle::new(),
        };
        for cidr in blocks {
            let count = self.count(id, *cidr, handle.count(*cidr)).await?;
            handle.set(*cidr, count);
        }
        if handle.is_empty() {
            self.tx.delete(&key)?;
        } else {
            self.tx.put(&key, handle.encode()?)?;
        }
        Ok(())
    }

    /// Returns the number of a block's addresses to store in a handle, given the number `counted` that the handle
    /// stores now.
    async fn count(&mut self, id: &str, cidr: IpNet, counted: i64) -> Result<i64> {
        let of = |block: &Block| count_of(block.ips_by_handle(id).iter());
        let held = self.block(cidr).await?.map_or(0, of);
        let before = match self.changed.contains(&cidr) {
            true => {
                self.before.get(&cidr).map_or(0, |handles| count_of(handles.iter().filter(|one| same_handle(one, id))))
            }
            false => held,
        };
        if held > 0 {
            return Ok(held.max(counted.saturating_add(held - before)));
        }
        if counted > before {
            self.change(cidr, |_| ()).await?;
        }
        Ok(0)
    }
}

fn count_of<T>(these: impl Iterator<Item = T>) -> i64 {
    i64::try_from(these.count()).unwrap_or(i64::MAX)
}

/// Maximum number of blocks for which [`WriteSet::probe_along`] also reads the keys of overlapping blocks. If half of a
/// pool's blocks are claimed, 15 of 16 searches for an unclaimed block find one among 4 blocks, and the other searches
/// need one more request. Reading the keys of possible overlapping blocks for 16 instead of 4 blocks doubled etcd's
/// work when a node got its first address.
const MAX_BLOCKS_READ_ALONG: usize = 4;

impl WriteSet<'_> {
    /// Adds a new block, which the commit creates. The commit fails if another writer has created a block that overlaps
    /// with the new block.
    ///
    /// # Errors
    /// `Overlap` if an overlapping block exists, or if one commit cannot guard the keys of all blocks that might
    /// overlap with the new block. Any store error.
    pub async fn create(&mut self, block: Block) -> Result<()> {
        let cidr = block.cidr();
        for range in self.ranges_to_guard(cidr).await?? {
            self.tx.guard_creation(&range).await?;
        }
        self.tx.get(&keys::block(cidr)).await?;
        self.blocks.insert(cidr, Some(block));
        self.changed.insert(cidr);
        Ok(())
    }

    /// Returns the reason why a block cannot be created: a stored block overlaps with it, or one commit cannot guard
    /// the keys of all blocks that might overlap with it. Returns `None` if the block can be created. The check for
    /// overlaps costs one request, or none if [`Self::probe_along`] was called for the block.
    pub async fn obstacle(&mut self, cidr: IpNet) -> Result<Option<OverlapError>> {
        Ok(self.ranges_to_guard(cidr).await?.err())
    }

    /// Returns the key ranges in which the commit must guard against the creation of overlapping blocks, or the reason
    /// why the block cannot be created.
    async fn ranges_to_guard(&mut self, cidr: IpNet) -> Result<std::result::Result<Vec<Range>, OverlapError>> {
        let covers = covers_of_overlaps(cidr, Precision::Coarse);
        self.tx.peek_ranges(&coarse(&covers)).await?;
        let leaving: Vec<IpNet> = self.changed.iter().copied().filter(|other| self.is_leaving(*other)).collect();
        let is_other = |other: &IpNet| *other != cidr && overlap(*other, cidr) && !leaving.contains(other);
        if let Some(other) = self.changed.iter().copied().find(is_other) {
            return Ok(Err(OverlapError::Block { block: cidr, other }));
        }
        let mut guarded = Vec::new();
        for (place, cover) in covers.into_iter().enumerate() {
            let Some(ranges) = self.guardable(cidr, place, cover).await? else {
                return Ok(Err(OverlapError::TooManyAround { block: cidr }));
            };
            let stored = self.tx.peek_ranges(&ranges).await?.concat();
            if let Some(other) = stored.iter().filter_map(keys::parse_block).find(is_other) {
                return Ok(Err(OverlapError::Block { block: cidr, other }));
            }
            guarded.extend(ranges);
        }
        Ok(Ok(guarded))
    }

    /// True if the commit will delete the block.
    fn is_leaving(&self, cidr: IpNet) -> bool {
        let block = self.blocks.get(&cidr).and_then(Option::as_ref).filter(|_| self.changed.contains(&cidr));
        block.is_some_and(|block| block.is_empty() && block.owner().is_none())
    }

    /// Returns key ranges that a commit can guard and that cover the keys of all blocks that may overlap with the block
    /// `cidr`. Returns `None` if the key ranges contain too many keys to guard.
    async fn guardable(&mut self, cidr: IpNet, place: usize, cover: Cover) -> Result<Option<Vec<Range>>> {
        if self.has_few_keys(&cover.coarse).await? {
            return Ok(Some(cover.coarse));
        }
        let exact = covers_of_overlaps(cidr, Precision::Exact).into_iter().nth(place).and_then(|cover| cover.exact);
        let Some(exact) = exact else { return Ok(None) };
        Ok(self.has_few_keys(&exact).await?.then_some(exact))
    }

    async fn has_few_keys(&mut self, ranges: &[Range]) -> Result<bool> {
        let keys = self.tx.peek_ranges(ranges).await?;
        Ok(keys.iter().all(|keys| keys.len() <= kv::MAX_CREATION_GUARDED_KEYS))
    }

    /// Finds a stored block that overlaps with the given stored block of single addresses. Searching for an overlapping
    /// block adds no guard, and costs one request, or none if the transaction has already read the ranges of
    /// [`overlaps_of_addresses`].
    pub async fn overlap_of(&mut self, cidr: IpNet) -> Result<Option<IpNet>> {
        if is_of_prefixes(cidr) {
            // A stored block of prefixes is not checked for overlaps, because Calico creates no blocks of prefixes.
            return Ok(None);
        }
        let stored = match &self.around {
            Some((block, ranges)) if *block == cidr => self.tx.peek_ranges(ranges).await?,
            _ => self.tx.peek_ranges(&overlaps_of_addresses(cidr)).await?,
        };
        let mut others = stored.iter().flatten().filter_map(keys::parse_block);
        Ok(others.find(|other| *other != cidr && overlap(*other, cidr)))
    }

    /// Like [`Self::probe`], returns the revision of the last write of each block, or `None` for a block that does not
    /// exist. The request that reads the blocks also reads the key ranges that [`Self::obstacle`] needs for at most the
    /// first 4 blocks.
    pub async fn probe_along(&mut self, blocks: &[IpNet]) -> Result<Vec<Option<Revision>>> {
        // Blocks that overlap with neighboring blocks have keys in the same key ranges. Scattered blocks need more key
        // ranges than neighboring blocks, so one request can include the ranges of fewer blocks.
        let fitting = [MAX_BLOCKS_READ_ALONG, MAX_BLOCKS_READ_ALONG / 2, MAX_BLOCKS_READ_ALONG / 4]
            .into_iter()
            .find_map(|most| {
                let ranges = ranges_around(&blocks[..blocks.len().min(most)]);
                (blocks.len() + ranges.len() <= kv::MAX_TXN_OPS).then_some(ranges)
            });
        self.probe_with(blocks, &fitting.unwrap_or_default()).await
    }

    /// Returns the CIDRs in a pool in which no block can be created, because a stored block overlaps with them. For a
    /// stored block that is smaller than the pool's block size, returns the pool's possible block that contains the
    /// stored block. Returns a stored block itself if it is at least as large as the pool's blocks. The keys of all
    /// blocks of the family are read without a guard.
    pub async fn taken_in(&mut self, pool: &Pool) -> Result<Vec<IpNet>> {
        let family = pool.family();
        let mut stored: Vec<Key> = Vec::new();
        for prefix in [keys::blocks_of_addresses_prefix(family), keys::blocks_of_prefixes_prefix(family)] {
            stored.extend(self.tx.snapshot_keys(&Range::Prefix(prefix)).await?);
        }
        let blocks = stored.iter().filter_map(keys::parse_block).chain(self.changed.iter().copied());
        let taken = blocks.filter(|block| {
            Family::of_net(*block) == family && overlap(*block, pool.cidr()) && !self.is_leaving(*block)
        });
        Ok(taken
            .filter_map(|block| family.network(block.network(), block.prefix_len().min(pool.block_size())))
            .collect())
    }
}

fn coarse(covers: &[Cover]) -> Vec<Range> {
    covers.iter().flat_map(|cover| cover.coarse.iter().cloned()).collect()
}
