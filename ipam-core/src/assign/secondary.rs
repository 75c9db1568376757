//! Decides which owners have the blocks of secondary networks, and which networks may borrow from a block, in a store
//! that Calico also uses.
//!
//! Calico's routing is based on the blocks that nodes own. Each node drops packets to unassigned addresses of its
//! blocks, and announces its blocks to the other nodes. The blocks of secondary networks belong to one virtual owner
//! per node, because Calico's routing ignores the blocks of virtual owners. A node may still own blocks with addresses
//! of secondary networks that were assigned before Calico used the store. An assignment that searches for free
//! addresses moves blocks of secondary networks from nodes to virtual owners. To move a block, the commit changes the
//! block's owner, the affinities of both owners and the names of the recorded attributes. A block that also has
//! addresses of Calico's networks is not moved, and its free addresses are not assigned to secondary networks.

use std::net::IpAddr;

use ipnet::IpNet;
use kv::Range;
use time::OffsetDateTime;

use super::auto::FamilyAssigner;
use crate::assign_context::pool_holding;
use crate::error::Result;
use crate::model::{Block, Owner, keys};
use crate::write_set::{BlockSlot, WriteSet};

/// Maximum number of blocks that one assignment moves to a virtual owner.
const MAX_BLOCKS_MOVED: usize = 16;
/// Maximum total number of addresses in the blocks that one assignment moves to a virtual owner. Blocks with 2,048
/// addresses in total take about 600 kB in the store.
const MAX_ADDRESSES_MOVED: usize = 2048;

/// Changes the owner of a block from a node to the virtual owner of the node's secondary networks. Returns false if the
/// block has addresses that may belong to a network of Calico.
///
/// The commit that moves a block guards the block, and the affinities of the old and the new owner.
pub(super) async fn make_secondary(
    work: &mut WriteSet<'_>,
    cidr: IpNet,
    node: &str,
    network: &str,
    now: OffsetDateTime,
) -> Result<bool> {
    let [host, secondary] = Owner::all_of(node);
    let known = |name: &str| name == network;
    let may_move = match work.find(cidr).await? {
        BlockSlot::There(block) => block.is_owned_by(&host) && block.is_secondary(known),
        BlockSlot::Absent | BlockSlot::Damaged => false,
    };
    if may_move {
        work.change(cidr, |block| block.use_own_names(known)).await?;
        work.hand_block(cidr, &host, &secondary, now).await?;
    }
    Ok(may_move)
}

impl FamilyAssigner<'_> {
    /// True if the request is for a secondary network in a store that Calico also uses.
    pub(super) fn is_secondary(&self) -> bool {
        self.request.bridge.is_some() && self.context.beside_calico
    }

    /// Returns the number of blocks in the pools that belong to [`Self::other`], the second of the node's two owners.
    /// Blocks of [`Self::other`] also count towards the node's block limit. For a secondary network, moves the node's
    /// blocks to its virtual owner where possible, and assigns addresses from them.
    pub(super) async fn take_from_other(
        &self,
        work: &mut WriteSet<'_>,
        taken: &mut Vec<(IpAddr, IpNet)>,
    ) -> Result<usize> {
        let mut blocks = self.of_other(work).await?;
        let count = blocks.len();
        if let (true, Some(Owner::Host(node))) = (self.is_secondary(), &self.other) {
            let mut room = MAX_ADDRESSES_MOVED;
            blocks.truncate(MAX_BLOCKS_MOVED);
            work.read_ahead_of(&Owner::all_of(node), &blocks).await?;
            for cidr in blocks {
                let BlockSlot::There(block) = work.find(cidr).await? else { continue };
                let Some(left) = room.checked_sub(block.capacity()) else { continue };
                if make_secondary(work, cidr, node, &self.request.attachment.network, self.now).await? {
                    room = left;
                    self.take(work, cidr, taken).await?;
                }
            }
        }
        Ok(count)
    }

    /// Returns the blocks in the given pools to which [`Self::other`], the second of the node's two owners, has
    /// affinities.
    pub(super) async fn of_other(&self, work: &mut WriteSet<'_>) -> Result<Vec<IpNet>> {
        let prefix = self.other.as_ref().and_then(|other| keys::affinities_prefix(other, Some(self.family)));
        let Some(prefix) = prefix else { return Ok(Vec::new()) };
        let mut blocks = work.affine(&Range::Prefix(prefix)).await?;
        blocks.retain(|cidr| pool_holding(self.pools.iter().copied(), *cidr).is_some());
        Ok(blocks)
    }

    /// True if the request's network may borrow an address from a block of `owner`. A secondary network borrows from a
    /// node's block only if the block can be moved to a virtual owner, because Calico's routing is based on the blocks
    /// of nodes. Calico's networks do not borrow from blocks of secondary networks.
    pub(super) fn may_borrow(&self, block: &Block, owner: &Owner) -> bool {
        match owner {
            Owner::Host(_) if self.is_secondary() => {
                block.is_secondary(|network| network == self.request.attachment.network)
            }
            Owner::Virtual(_) if self.request.bridge.is_none() => owner.node().is_none(),
            _ => true,
        }
    }

    /// Before a secondary network borrows from a block that another node owns, changes the block's owner to that node's
    /// virtual owner.
    pub(super) async fn move_for(&self, work: &mut WriteSet<'_>, cidr: IpNet) -> Result<()> {
        let owner = work.block(cidr).await?.and_then(Block::owner);
        if let (true, Some(Owner::Host(node))) = (self.is_secondary(), owner) {
            make_secondary(work, cidr, &node, &self.request.attachment.network, self.now).await?;
        }
        Ok(())
    }
}
