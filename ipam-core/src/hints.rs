//! Remembers the blocks in which a host last found free addresses, so that the next call can prefetch these blocks.
//!
//! On a networked store, an assignment costs one read and one commit only if its block is known before the first read.
//! The program that runs the allocator can therefore remember the blocks that were used. A hint only decides which
//! blocks are read first, and is never trusted. A wrong, stale or missing hint costs a round trip and has no other
//! effect.
//!
//! If all blocks of a pool are claimed, an assignment may have to scan thousands of blocks, and runtimes retry it every
//! few seconds. Full blocks are therefore remembered too, each with the revision of its last write. A block whose key
//! still has this revision is still full.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use kv::Revision;

use crate::attachment::Attachment;
use crate::model::is_of_prefixes;
use crate::net::Family;

/// Maximum number of remembered blocks. The number exceeds Calico's default block limit of a host.
const MAX_REMEMBERED_BLOCKS: usize = 32;
/// Maximum number of addresses of a released attachment whose possible blocks are prefetched.
const MAX_HINTED_ADDRESSES: usize = 4;

/// Remembers the blocks that a node used in a network. An implementation may forget hints at any time.
pub trait Hints: Send + Sync + fmt::Debug {
    /// Returns the blocks that attachments of this node and network used last, most recent first.
    fn recall(&self, attachment: &Attachment) -> Vec<IpNet>;

    /// Remembers the blocks that attachments of this node and network used, most recent first.
    fn remember(&self, attachment: &Attachment, blocks: &[IpNet]);

    /// Returns blocks that were full, each with the revision of its last write. A block counts as full until its
    /// revision changes. Implementations must forget full blocks within a minute, because a restored cluster restarts
    /// its revisions.
    fn recall_full(&self, _attachment: &Attachment) -> FullBlocks {
        FullBlocks::new()
    }

    /// Adds these full blocks to the remembered full blocks.
    fn remember_full(&self, _attachment: &Attachment, _blocks: &FullBlocks) {}

    /// Returns the networks of pools that had no free address for this node. Assignments try these pools last, so
    /// implementations must forget these pools within a minute.
    fn recall_full_pools(&self, _attachment: &Attachment) -> Vec<IpNet> {
        Vec::new()
    }

    /// Adds these pools to the remembered full pools.
    fn remember_full_pools(&self, _attachment: &Attachment, _pools: &[IpNet]) {}

    /// Records, before the commit, that a node is about to hold addresses in blocks that it does not own. A scan of the
    /// node's addresses reads these blocks besides the node's own blocks. If a record is lost, scans miss addresses
    /// until the next scan of all blocks. A superfluous record costs a read.
    fn about_to_hold(&self, _node: &str, _blocks: &[IpNet]) {}

    /// Returns the remembered blocks of other owners in which a node may hold addresses.
    fn held(&self, _node: &str) -> Vec<IpNet> {
        Vec::new()
    }
}

/// Full blocks, each with the revision of its last write.
pub type FullBlocks = BTreeMap<IpNet, Revision>;

/// Puts the blocks that were just used first, before the recalled blocks, and keeps at most [`MAX_REMEMBERED_BLOCKS`]
/// blocks.
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

/// Returns the blocks from which the next addresses of a family are likely to come, most likely first.
pub(crate) fn latest_of(recalled: &[IpNet], family: Family) -> impl Iterator<Item = IpNet> {
    recalled.iter().copied().filter(move |cidr| Family::of_net(*cidr) == family)
}

/// Returns the blocks that probably hold the addresses of an attachment to release. If the block size is unknown, the
/// result includes blocks of every size.
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

/// Returns all blocks of prefixes that could contain an address.
pub fn possible_blocks_of_prefixes(ip: IpAddr) -> Vec<IpNet> {
    let family = Family::of(ip);
    (0..family.bits()).map_while(|length| family.network(ip, length).filter(|net| is_of_prefixes(*net))).collect()
}

/// Returns all blocks that could contain an address. The address's pool determines the block size, which is unknown
/// until the pools have been read.
pub fn possible_blocks(ip: IpAddr) -> Vec<IpNet> {
    let family = Family::of(ip);
    family.block_sizes().filter_map(|prefix| family.network(ip, prefix)).collect()
}
