//! Forgetting an owner of blocks.

use kv::Deadline;

use super::{ReleaseIf, ReleasedBlocks};
use crate::error::Result;
use crate::ipam::{Ipam, transact};
use crate::model::{Owner, keys};

impl Ipam {
    /// Forgets a node that is gone, or a virtual owner: gives back all its blocks, also those in use, and deletes what old
    /// versions kept for a node. Whoever holds an address of such a block keeps it, also the node's own containers: release
    /// those by their handles. The node's document is not touched. Can be repeated.
    ///
    /// # Errors
    /// Those of [`release_all_affinities`](Self::release_all_affinities); what old versions kept is deleted all the same
    /// where the store can be reached.
    pub async fn remove_owner(&self, owner: &Owner, deadline: Deadline) -> Result<ReleasedBlocks> {
        let released = self.release_all_affinities(owner, ReleaseIf::Any, deadline).await;
        if let Owner::Host(name) = owner {
            let key = keys::legacy_host(name);
            transact!(self, deadline, |tx| {
                tx.get(&key).await?;
                Ok(tx.delete(&key)?)
            })?;
        }
        released
    }
}
