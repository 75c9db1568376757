//! A block for an owner, without an address of it.

use ipnet::IpNet;
use kv::Range;

use super::{NextBlock, Pass};
use crate::error::{Error, Result};
use crate::model::keys;
use crate::surroundings::pool_holding;
use crate::workset::Workset;

impl Pass<'_> {
    /// A block of the owner's in these pools, full or not, in the order of their keys; else one that is claimed. It
    /// also finishes a foreign writer's work that was left half done.
    ///
    /// # Errors
    /// `BlockLimit` or `NoNewBlocks` if it has none and can get none.
    pub(in super::super) async fn ensure_block(&self, work: &mut Workset<'_>) -> Result<IpNet> {
        let Some(prefix) = keys::affinities_prefix(&self.owner, Some(self.family)) else {
            return Err(Error::NoNewBlocks);
        };
        let affine = work.affine(&Range::Prefix(prefix)).await?;
        let (kept, others): (Vec<_>, Vec<_>) =
            affine.into_iter().partition(|cidr| pool_holding(self.pools.iter().copied(), *cidr).is_some());
        self.release_unselected(work, &others).await?;
        let own = kept.len() + self.of_other(work).await?.len();
        for cidr in kept {
            if !self.around.reservations.covers(cidr) && self.is_own(work, cidr).await? {
                return Ok(cidr);
            }
        }
        if !self.around.config.auto_allocate_blocks() {
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
