//! Moves and lends blocks of secondary networks, in a store that Calico also reads.
//!
//! Calico's routing uses the blocks of nodes: each node drops packets to unassigned addresses of its own blocks, and
//! announces these blocks to the other nodes. The blocks of secondary networks therefore belong to virtual owners, one
//! for each node, which Calico's routing ignores. Blocks for secondary networks that a node itself owned before are
//! moved when an assignment searches for free addresses. The commit of that assignment changes the blocks' owner, both
//! affinities and the names of the recorded attributes. A block that also has addresses of Calico's networks is not
//! moved, and no more of its addresses are assigned to secondary networks.

use std::net::IpAddr;

use ipnet::IpNet;
use kv::Range;
use time::OffsetDateTime;

use super::auto::FamilyAssigner;
use crate::assign_context::pool_holding;
use crate::error::Result;
use crate::model::{Block, Owner, keys};
use crate::write_set::{BlockSlot, WriteSet};

/// Maximum number of blocks moved in one assignment.
const MAX_BLOCKS_MOVED: usize = 16;
/// Maximum number of addresses in the blocks moved in one assignment: about 600 kilobytes.
const MAX_ADDRESSES_MOVED: usize = 2048;

/// Moves a node's block, with all its attributes, to the virtual owner of the node's secondary networks. Returns false
/// if the block has addresses that are not known to belong to a secondary network.
///
/// The commit guards the block and both affinities.
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
    /// True for a secondary network in a store that Calico reads.
    pub(super) fn is_secondary(&self) -> bool {
        self.request.bridge.is_some() && self.context.beside_calico
    }

    /// Returns the number of blocks in these pools that belong to the node's other owner. The blocks of the other owner
    /// also count towards the node's limit. For a secondary network, blocks that can be moved are moved, and addresses
    /// are taken from them.
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

    /// Returns the blocks in these pools to which the node's other owner has affinities.
    pub(super) async fn of_other(&self, work: &mut WriteSet<'_>) -> Result<Vec<IpNet>> {
        let prefix = self.other.as_ref().and_then(|other| keys::affinities_prefix(other, Some(self.family)));
        let Some(prefix) = prefix else { return Ok(Vec::new()) };
        let mut blocks = work.affine(&Range::Prefix(prefix)).await?;
        blocks.retain(|cidr| pool_holding(self.pools.iter().copied(), *cidr).is_some());
        Ok(blocks)
    }

    /// True if an address can be borrowed from a block of this owner. Calico's routing uses the blocks of nodes, so a
    /// secondary network borrows from a node's block only if the block can be moved. Calico's networks do not borrow
    /// from blocks of secondary networks.
    pub(super) fn may_borrow(&self, block: &Block, owner: &Owner) -> bool {
        match owner {
            Owner::Host(_) if self.is_secondary() => {
                block.is_secondary(|network| network == self.request.attachment.network)
            }
            Owner::Virtual(_) if self.request.bridge.is_none() => owner.node().is_none(),
            _ => true,
        }
    }

    /// Moves the block of another node from which a secondary network is about to borrow.
    pub(super) async fn move_for(&self, work: &mut WriteSet<'_>, cidr: IpNet) -> Result<()> {
        let owner = work.block(cidr).await?.and_then(Block::owner);
        if let (true, Some(Owner::Host(node))) = (self.is_secondary(), owner) {
            make_secondary(work, cidr, &node, &self.request.attachment.network, self.now).await?;
        }
        Ok(())
    }
}
