//! Forgetting an owner of blocks.

use ipnet::IpNet;
use kv::{Deadline, Transaction};

use super::{Release, ReleaseIf, ReleasedBlocks};
use crate::boxed;
use crate::error::Result;
use crate::ipam::{Ipam, transact};
use crate::model::{Block, Document, Owner, keys};

impl Ipam {
    /// Forgets a node that is gone, or a virtual owner: releases all its blocks, also those in use and those of its
    /// secondary networks, and deletes the keys that old versions kept for a node. The holder of an address of such a
    /// block keeps it, also the node's own containers: release those by their handles. The node's document is not
    /// changed. Can be repeated.
    ///
    /// # Errors
    /// Those of [`release_all_affinities`](Self::release_all_affinities); what old versions kept is deleted all the same
    /// where the store can be reached.
    #[boxed]
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

    /// Releases one block of a node that is gone, by exactly this name, also if it is in use; true if it was the
    /// node's. An affinity of the node to a block of another owner is deleted as well. The commit fails if the node has
    /// come back.
    ///
    /// # Errors
    /// `Invalid` if the node is registered; a damaged block; those of the store.
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
                    was_its |= matches!(self.release_block(tx, owner, cidr, ReleaseIf::Any).await?, Release::Done);
                }
            }
            Ok(was_its)
        })
    }

    /// Deletes what old versions kept for a node that is gone.
    ///
    /// # Errors
    /// `Invalid` if the node is registered; those of the store.
    pub async fn drop_legacy(&self, node: &str, deadline: Deadline) -> Result<()> {
        transact!(self, deadline, |tx| {
            self.require_gone(tx, node).await?;
            drop_legacy_in(tx, node).await
        })
    }
}

/// Deletes what old versions kept for a node, as a part of a commit.
pub(crate) async fn drop_legacy_in(tx: &mut Transaction, node: &str) -> Result<()> {
    let key = keys::legacy_host(node);
    if tx.get(&key).await?.is_some() {
        tx.delete(&key)?;
    }
    Ok(())
}
