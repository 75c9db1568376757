//! Defines hints: blocks in which a host last found free addresses, and which the host's next assignment prefetches.
//!
//! On a networked store, an assignment costs only one read and one commit if the block of the assigned address is known
//! before the first read. To save round trips, the program that uses the allocator can remember recently used blocks. A
//! hint only selects the blocks that are read first, so a wrong, stale or missing hint merely costs a round trip.
//!
//! If all blocks of a pool are claimed, an assignment may have to scan thousands of blocks, and runtimes retry a failed
//! ADD every few seconds. To avoid scanning full blocks again, the program that uses the allocator can remember them,
//! each with the revision of its last write. A full block remains full as long as the revision of its last write is
//! unchanged.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use kv::Revision;

use crate::attachment::Attachment;
use crate::model::is_of_prefixes;
use crate::net::Family;

/// Maximum number of recently used blocks that are remembered for a node and network; more than Calico's default limit
/// of blocks per host.
const MAX_REMEMBERED_BLOCKS: usize = 32;
/// Maximum number of addresses whose possible blocks are prefetched when an attachment is released.
const MAX_HINTED_ADDRESSES: usize = 4;

/// Stores hints: the blocks that a node recently used in a network. Implementations may forget hints at any time.
pub trait Hints: Send + Sync + fmt::Debug {
    /// Returns the blocks that were used last for the attachment's node and network, most recently used first.
    fn recall(&self, attachment: &Attachment) -> Vec<IpNet>;

    /// Replaces the blocks that [`Self::recall`] returns for the attachment's node and network; `blocks` is sorted with
    /// the most recently used block first.
    fn remember(&self, attachment: &Attachment, blocks: &[IpNet]);

    /// Returns the remembered full blocks, each with the revision of its last write. An assignment regards a remembered
    /// block as full until the block is written again, which changes its revision. Implementations must forget a full
    /// block within a minute, because after the restore of an etcd backup a changed block can have the remembered
    /// revision again.
    fn recall_full(&self, _attachment: &Attachment) -> FullBlocks {
        FullBlocks::new()
    }

    /// Remembers full blocks, so that [`Self::recall_full`] also returns them.
    fn remember_full(&self, _attachment: &Attachment, _blocks: &FullBlocks) {}

    /// Returns the CIDRs of pools in which no address was free for the attachment's node and network. Assignments try
    /// remembered full pools last, so implementations must forget a full pool within a minute.
    fn recall_full_pools(&self, _attachment: &Attachment) -> Vec<IpNet> {
        Vec::new()
    }

    /// Remembers the CIDRs of full pools, so that [`Self::recall_full_pools`] also returns them.
    fn remember_full_pools(&self, _attachment: &Attachment, _pools: &[IpNet]) {}

    /// Records that a node is about to borrow addresses from blocks of other owners. The allocator records the
    /// borrowing before it sends the commit of the assignment. A scan of the node's addresses reads the node's own
    /// blocks, and the blocks that are recorded as borrowed from. If the record of a borrowed block is lost, scans do
    /// not see the borrowed addresses until the next scan of all blocks. A block may be recorded although the
    /// assignment failed and borrowed nothing. Each scan of the node's addresses then reads one unnecessary block.
    fn about_to_hold(&self, _node: &str, _blocks: &[IpNet]) {}

    /// Returns the remembered blocks of other owners from which a node may have borrowed addresses.
    fn held(&self, _node: &str) -> Vec<IpNet> {
        Vec::new()
    }
}

/// Full blocks by CIDR, each with the revision of the block's last write.
pub type FullBlocks = BTreeMap<IpNet, Revision>;

/// Returns the blocks that were just used, followed by the remembered blocks: at most [`MAX_REMEMBERED_BLOCKS`],
/// without duplicates.
pub(crate) fn with_used(recalled: &[IpNet], used: impl Iterator<Item = IpNet>) -> Vec<IpNet> {
    let mut blocks: Vec<IpNet> = Vec::new();
    for cidr in used.chain(recalled.iter().copied()) {
        if !blocks.contains(&cidr) {
            blocks.push(cidr);
        }
    }
    blocks.truncate(MAX_REMEMBERED_BLOCKS);
    blocks
}

/// Returns the remembered blocks of a family, most recently used first. The node's next address of the family is
/// probably assigned from the most recently used block.
pub(crate) fn latest_of(recalled: &[IpNet], family: Family) -> impl Iterator<Item = IpNet> {
    recalled.iter().copied().filter(move |cidr| Family::of_net(*cidr) == family)
}

/// Returns the blocks to prefetch for the release of an attachment that has `addresses`. For an address outside of the
/// remembered blocks, the possible blocks of every block size are returned.
pub(crate) fn blocks_to_release(recalled: &[IpNet], addresses: &[IpAddr]) -> Vec<IpNet> {
    if addresses.is_empty() {
        return [Family::V4, Family::V6].into_iter().filter_map(|family| latest_of(recalled, family).next()).collect();
    }
    let blocks = addresses.iter().take(MAX_HINTED_ADDRESSES).flat_map(|ip| {
        match recalled.iter().find(|cidr| cidr.contains(ip)) {
            Some(cidr) => vec![*cidr],
            None => possible_blocks(*ip),
        }
    });
    blocks.collect()
}

/// Returns all possible blocks of prefixes, of every size, that contain an address.
pub fn possible_blocks_of_prefixes(ip: IpAddr) -> Vec<IpNet> {
    let family = Family::of(ip);
    (0..family.bits()).map_while(|length| family.network(ip, length).filter(|net| is_of_prefixes(*net))).collect()
}

/// Returns the possible blocks of single addresses, one of each block size, that contain an address. The possible
/// blocks of an address include one of every block size, because the pool that determines the block size may not have
/// been read yet.
pub fn possible_blocks(ip: IpAddr) -> Vec<IpNet> {
    let family = Family::of(ip);
    family.block_sizes().filter_map(|prefix| family.network(ip, prefix)).collect()
}
