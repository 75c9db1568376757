//! Releasing the blocks of a pool, of all owners.

use ipnet::IpNet;
use kv::{Content, Deadline, Range, Revision, StoreExt};

use super::{Release, ReleaseIf, ReleasedBlocks};
use crate::boxed;
use crate::error::{Error, Result};
use crate::ipam::{Ipam, transact};
use crate::model::{Owner, keys};

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

    /// The owners of affinities to the blocks of a network.
    async fn affinities_inside(&self, cidr: IpNet) -> Result<Vec<(Owner, IpNet)>> {
        let mut inside = Vec::new();
        for prefix in [keys::host_affinities_prefix(), keys::virtual_affinities_prefix()] {
            let listing = self.store().list_at(Range::Prefix(prefix), Revision::UNSET, Content::KeysOnly).await?;
            let parsed = listing.kvs.iter().filter_map(|kv| keys::parse_affinity(&kv.key));
            inside.extend(parsed.filter(|(_, block)| cidr.contains(&block.network())));
        }
        Ok(inside)
    }
}
