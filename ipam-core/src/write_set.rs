//! The changes of one transaction: blocks, and the handles and affinities that go with them.
//!
//! Blocks are read without a guard; a block that is changed is guarded from then on. When the changes are written, each
//! changed block counts one write, the handles count the addresses that were assigned and released, and a block that is
//! empty and has no owner is deleted. So block, handle and affinity agree at every revision that we write.
//!
//! Calico counts an address in a handle before it writes the block, and subtracts one after it. So a surplus of the
//! count may be an address that is about to be assigned, or one that has just been released. The surplus is kept, or
//! else Calico's next step would leave an address that no handle names. Only when nothing is held any more the entry is
//! removed, and the block is written too: a writer that was about to write it must start again, and counts anew.
//!
//! No commit makes a block unless it knows that no stored block contains it or lies in it. The keys of such blocks are
//! read, and the commit guards that no key was created among them since. Other nodes' assignments write existing keys,
//! so they are no conflict. Calico looks at nothing but the key of the block that it makes, so its writers can leave blocks
//! that overlap; so could Margay's first version. An assignment therefore checks the block that it is about to take an
//! address from, without a guard: Calico would not look at ours either.

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

/// How many blocks are read in one round trip.
pub const BLOCKS_PER_READ: usize = 16;

/// The blocks, handles and affinities that a transaction works on.
#[derive(Debug)]
pub struct WriteSet<'t> {
    /// The transaction, for everything else.
    pub tx: &'t mut Transaction,
    now: OffsetDateTime,
    cooldown_seconds: i64,
    /// Blocks as they are now; `None` for those that are not there.
    blocks: BTreeMap<IpNet, Option<Block>>,
    changed: BTreeSet<IpNet>,
    /// The handle of each address that was held in the changed blocks as they were.
    before: BTreeMap<IpNet, Vec<SmolStr>>,
    /// Blocks with releases dated so far ahead that they were moved to now; unless written, their cooldown never ends.
    misdated: Vec<IpNet>,
    /// When blocks of which only the keys were queried were last written.
    probed: BTreeMap<IpNet, Option<Revision>>,
    /// Full blocks that were scanned and not kept.
    full: FullBlocks,
    /// Affinities that will be made.
    claimed: BTreeSet<Key>,
    /// The handles whose addresses were assigned or released, by id, each with the blocks.
    handles: BTreeMap<String, BTreeSet<IpNet>>,
    /// The quotas, and what is changed for those that have one.
    limits: QuotaLimits,
    /// The block that was read ahead last, alone, and the ranges around it.
    around: Option<(IpNet, Vec<Range>)>,
}

/// The result of a search at the place of a block.
#[derive(Debug)]
pub enum BlockSlot<'w> {
    /// Nothing is stored.
    Absent,
    /// Something is stored that is no block.
    Damaged,
    /// A block.
    There(&'w Block),
}

impl<'t> WriteSet<'t> {
    /// An empty workset at this time; released addresses are in cooldown for so many seconds.
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

    /// Reads blocks ahead, several in one round trip.
    pub async fn read_ahead(&mut self, blocks: &[IpNet]) -> Result<()> {
        self.read_ahead_of(&[], blocks).await
    }

    /// Reads blocks and the owner's affinities to them ahead, as [`Self::read_ahead_of`] does.
    pub async fn read_ahead_own(&mut self, owner: &Owner, blocks: &[IpNet]) -> Result<()> {
        self.read_ahead_of(std::slice::from_ref(owner), blocks).await
    }

    /// Reads blocks and the affinities of several owners to them ahead, in one round trip. For a single block it also reads
    /// the key ranges that [`Self::overlap_of`] needs; for several, these would be too many requests.
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

    /// A block as it is now, with the addresses freed whose cooldown is over; `None` if it is not there.
    ///
    /// # Errors
    /// `Malformed` if what is stored is no block.
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

    /// Like [`Self::block`], for searches: a damaged block is logged and passed over.
    pub async fn find(&mut self, cidr: IpNet) -> Result<BlockSlot<'_>> {
        match self.block(cidr).await {
            Ok(_) => {}
            Err(Error::Malformed(error)) => {
                tracing::warn!(%cidr, %error, "passing over a damaged block");
                return Ok(BlockSlot::Damaged);
            }
            Err(error) => return Err(error),
        }
        Ok(self.block(cidr).await?.map_or(BlockSlot::Absent, BlockSlot::There))
    }

    /// Scans blocks, in one round trip, and returns those that are kept, in their order: those that `keep` wants, those
    /// with releases dated too far ahead, and those that were read before. Others are forgotten at once, so that a
    /// search through a pool of thousands of blocks does not hold them all. A damaged block is logged and passed over.
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
                Err(error) => tracing::warn!(%cidr, %error, "passing over a damaged block"),
            }
        }
        Ok(blocks.iter().copied().filter(|cidr| self.blocks.contains_key(cidr)).collect())
    }

    /// The full blocks that were scanned and not kept.
    pub fn full(&self) -> &FullBlocks {
        &self.full
    }

    /// When blocks were last written, `None` for those that are not there, without reading them; see [`Transaction::peek`].
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

    /// A block with the addresses freed whose cooldown is over, and whether some releases are dated too far ahead.
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

    /// Changes a block that is there; the commit will fail if it has changed by then. `None` if it is not there.
    pub async fn change<T>(&mut self, cidr: IpNet, change: impl FnOnce(&mut Block) -> T) -> Result<Option<T>> {
        self.prepare(cidr).await?;
        Ok(self.blocks.get_mut(&cidr).and_then(Option::as_mut).map(change))
    }

    /// Makes a block ready to be changed: it is guarded, and its addresses as they were are noted.
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

    /// When a block that was read was last written; `None` also if it was not read.
    pub fn written_at(&self, cidr: IpNet) -> Option<Revision> {
        self.tx.written_at(&keys::block(cidr))
    }

    /// True if the block will be written.
    pub fn is_changed(&self, cidr: IpNet) -> bool {
        self.changed.contains(&cidr)
    }

    /// The blocks read so far with releases that are dated too far ahead.
    pub fn misdated(&self) -> &[IpNet] {
        &self.misdated
    }

    /// The blocks that were read so far.
    pub fn blocks(&self) -> impl Iterator<Item = &Block> {
        self.blocks.values().flatten()
    }

    /// Records that a handle's addresses in a block have changed.
    pub fn touch_handle(&mut self, id: &str, cidr: IpNet) {
        self.handles.entry(id.to_owned()).or_default().insert(cidr);
    }

    /// Makes the owner's affinity to a block a confirmed one.
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

    /// True if the owner's affinity to a block is a confirmed one.
    pub async fn has_confirmed(&mut self, owner: &Owner, cidr: IpNet) -> Result<bool> {
        let Some(key) = keys::affinity(owner, cidr) else { return Ok(false) };
        let stored = self.tx.snapshot_get(&key).await?;
        let state = stored.and_then(|value| Affinity::decode(&key, value.as_bytes()).ok()).map(|one| one.state());
        Ok(state == Some(AffinityState::Confirmed))
    }

    /// Deletes the owner's affinity to a block. The commit will fail if the block has changed by then: it may have
    /// become the owner's.
    pub async fn drop_affinity(&mut self, owner: &Owner, cidr: IpNet) -> Result<()> {
        if let Some(key) = keys::affinity(owner, cidr) {
            self.tx.get(&keys::block(cidr)).await?;
            self.tx.get(&key).await?;
            self.tx.delete(&key)?;
        }
        Ok(())
    }

    /// Makes an owner's block another one's, as of now: the block and both affinities.
    pub async fn hand_block(&mut self, cidr: IpNet, from: &Owner, to: &Owner, now: OffsetDateTime) -> Result<()> {
        self.drop_affinity(from, cidr).await?;
        self.change(cidr, |block| block.set_owner(to, now)).await?;
        self.confirm_affinity(to, cidr).await
    }

    /// The blocks of an owner in one family, ascending by key, those among them that it claims here. Not guarded: the
    /// block that is used itself names its owner.
    pub async fn affine(&mut self, affinities: &Range) -> Result<Vec<IpNet>> {
        let mut listed = self.claimed.clone();
        listed.retain(|key| affinities.contains(key.as_bytes()));
        listed.extend(self.tx.snapshot_keys(affinities).await?);
        Ok(listed.iter().filter_map(|key| Some(keys::parse_affinity(key)?.1)).collect())
    }

    /// Puts all changes into the transaction.
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

    /// The count of a handle for a block, where it has counted `counted`.
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

/// The number of blocks that are read along in one probe: in a pool of which half is claimed, 15 of 16 walks meet a free place
/// among them, and the others make one more request. With 16 blocks, etcd had twice as much to do for the first address of a node.
const MAX_BLOCKS_READ_ALONG: usize = 4;

impl WriteSet<'_> {
    /// Adds a block that is not there. The commit fails if a block that overlaps with it is made meanwhile.
    ///
    /// # Errors
    /// `Overlap` if there is such a block, or too many other blocks are around to guard against them; any store error.
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

    /// The reason why a block that is not stored cannot be made: another one overlaps with it, or too many other blocks
    /// are around. Costs one request, or none after [`Self::probe_along`].
    pub async fn obstacle(&mut self, cidr: IpNet) -> Result<Option<OverlapError>> {
        Ok(self.ranges_to_guard(cidr).await?.err())
    }

    /// The ranges in which no key may be created while a block is made, or the reason why it cannot be made.
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

    /// True for a block that the commit will delete.
    fn is_leaving(&self, cidr: IpNet) -> bool {
        let block = self.blocks.get(&cidr).and_then(Option::as_ref).filter(|_| self.changed.contains(&cidr));
        block.is_some_and(|block| block.is_empty() && block.owner().is_none())
    }

    /// The ranges of a block's cover at this place that a commit can guard; `None` if there are too many keys in them.
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

    /// A stored block that overlaps with this stored block of addresses. Not guarded. Costs one request, or none if the
    /// ranges of [`overlaps_of_addresses`] were read.
    pub async fn overlap_of(&mut self, cidr: IpNet) -> Result<Option<IpNet>> {
        if is_of_prefixes(cidr) {
            // Calico knows no such blocks.
            return Ok(None);
        }
        let stored = match &self.around {
            Some((block, ranges)) if *block == cidr => self.tx.peek_ranges(ranges).await?,
            _ => self.tx.peek_ranges(&overlaps_of_addresses(cidr)).await?,
        };
        let mut others = stored.iter().flatten().filter_map(keys::parse_block);
        Ok(others.find(|other| *other != cidr && overlap(*other, cidr)))
    }

    /// Like [`Self::probe`], and reads along what [`Self::obstacle`] needs to know of the first few blocks.
    pub async fn probe_along(&mut self, blocks: &[IpNet]) -> Result<Vec<Option<Revision>>> {
        // Blocks all over a pool have fewer ranges in common.
        let fitting = [MAX_BLOCKS_READ_ALONG, MAX_BLOCKS_READ_ALONG / 2, MAX_BLOCKS_READ_ALONG / 4]
            .into_iter()
            .find_map(|most| {
                let ranges = ranges_around(&blocks[..blocks.len().min(most)]);
                (blocks.len() + ranges.len() <= kv::MAX_TXN_OPS).then_some(ranges)
            });
        self.probe_with(blocks, &fitting.unwrap_or_default()).await
    }

    /// The blocks of a pool in whose place something is stored: blocks of the pool's size, smaller ones inside, or larger
    /// ones around. Reads the keys of all blocks of the family, without a guard.
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
