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

mod overlaps;
mod quotas;

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;
use kv::{Content, Key, Range, Revision, Transaction, TxnRange};
use smol_str::SmolStr;
use time::OffsetDateTime;

use crate::error::{Error, Result};
use crate::hints::FullBlocks;
use crate::model::{
    Affinity, AffinityState, Block, Document, Handle, Owner, is_of_prefixes, keys, overlaps_of_addresses, same_handle,
};
use quotas::Limits;
pub(crate) use quotas::{each_of, likely_counters};

/// How many blocks are read in one round trip.
pub const BLOCKS_AT_ONCE: usize = 16;

/// The blocks, handles and affinities that a transaction works on.
#[derive(Debug)]
pub struct Workset<'t> {
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
    limits: Limits,
    /// The block that was read ahead last, alone, and the ranges around it.
    around: Option<(IpNet, Vec<Range>)>,
}

/// The result of a search at the place of a block.
#[derive(Debug)]
pub enum Found<'w> {
    /// Nothing is stored.
    Absent,
    /// Something is stored that is no block.
    Damaged,
    /// A block.
    There(&'w Block),
}

impl<'t> Workset<'t> {
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
            limits: Limits::default(),
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
    pub async fn find(&mut self, cidr: IpNet) -> Result<Found<'_>> {
        match self.block(cidr).await {
            Ok(_) => {}
            Err(Error::Malformed(error)) => {
                tracing::warn!(%cidr, %error, "passing over a damaged block");
                return Ok(Found::Damaged);
            }
            Err(error) => return Err(error),
        }
        Ok(self.block(cidr).await?.map_or(Found::Absent, Found::There))
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
