//! Releasing the blocks of a pool, of all owners.

use ipnet::IpNet;
use kv::{Content, Deadline, Range, Revision, StoreExt};

use super::{Release, ReleaseIf, ReleasedBlocks};
use crate::boxed;
use crate::error::{Error, Result};
use crate::ipam::{Ipam, transact};
use crate::model::{NewPool, Owner, keys};
use crate::net::overlap;

/// The most passes over the affinities. If an affinity proves stale, the block may have another owner, whose affinity
/// was made after the listing.
const LOOKS: usize = 3;

impl Ipam {
    /// Releases all blocks inside a network, of nodes and of virtual owners: before a pool is deleted or divided. The
    /// network need not be a pool's. Disable the pool first: a block that is claimed meanwhile is missed. No address is
    /// released.
    ///
    /// Calico passes over virtual owners, and releases blocks in use, too: [`ReleaseIf::Any`].
    ///
    /// # Errors
    /// Damaged blocks, after all others were done; those of the store, when some blocks may have been released already.
    #[boxed]
    pub async fn release_pool_affinities(
        &self,
        cidr: IpNet,
        which: ReleaseIf,
        deadline: Deadline,
    ) -> Result<ReleasedBlocks> {
        let cidr = cidr.trunc();
        let mut done = ReleasedBlocks::default();
        let mut failure = None;
        for _ in 0..LOOKS {
            let mut stale = false;
            (done.in_use, failure) = (Vec::new(), None);
            for (owner, block) in self.affinities_inside(cidr).await? {
                match transact!(self, deadline, |tx| self.release_block(tx, &owner, block, which).await) {
                    Ok(Release::Done) => done.released.push(block),
                    Ok(Release::InUse) => done.in_use.push(block),
                    Ok(Release::NotOurs) => stale = true,
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

    /// Deletes the affinities to blocks that are not there and that a new pool would not have: they are inside the pool or
    /// around it, and of another size than its blocks. Their owners, or Calico, could make those blocks over others.
    /// Returns how many were deleted.
    ///
    /// # Errors
    /// Any store error; some affinities may have been deleted already.
    #[boxed]
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

    /// The owners of affinities to the blocks of a network, and to a block around it.
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
