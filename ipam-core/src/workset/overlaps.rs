//! Blocks that have addresses in common.
//!
//! No commit makes a block unless it knows that no stored block contains it or lies in it. The keys of such blocks are
//! read, and the commit guards that no key was created among them since. Other nodes' assignments write existing keys,
//! so they are no conflict.
//!
//! Calico looks at nothing but the key of the block that it makes, so its writers can leave blocks that overlap; so could
//! Margay's first version. An assignment therefore checks the block that it is about to take an address from, without a
//! guard: Calico would not look at ours either.

use ipnet::IpNet;
use kv::{Key, Range};

use super::Workset;
use crate::error::{OverlapError, Result};
use crate::model::{
    Block, Cover, Pool, Precision, covers_of_overlaps, is_of_prefixes, keys, overlaps_of_addresses, ranges_around,
};
use crate::net::{Family, overlap};

/// The number of blocks that are read along in one probe: in a pool of which half is claimed, 15 of 16 walks meet a free place
/// among them, and the others make one more request. With 16 blocks, etcd had twice as much to do for the first address of a node.
const MAX_READ_ALONG: usize = 4;

impl Workset<'_> {
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
        Ok(keys.iter().all(|keys| keys.len() <= kv::MAX_CREATION_GUARDED))
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
    pub async fn probe_along(&mut self, blocks: &[IpNet]) -> Result<Vec<Option<kv::Revision>>> {
        // Blocks all over a pool have fewer ranges in common.
        let fitting = [MAX_READ_ALONG, MAX_READ_ALONG / 2, MAX_READ_ALONG / 4].into_iter().find_map(|most| {
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
