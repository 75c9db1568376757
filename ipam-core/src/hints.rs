//! Hints: the blocks in which a host last found room, so that the next call can prefetch them.
//!
//! On a store across a network, an assignment in the steady state is one read and one commit only if its block is known
//! before anything is read. So the program around the allocator can remember the blocks that were used. A hint is only
//! read first and never trusted. If it is wrong, stale or missing, it costs a round trip and nothing else.
//!
//! If all blocks of a pool are claimed, an assignment may have to scan thousands of blocks, and is retried every few
//! seconds. So full blocks are remembered too, each with the revision of its last write. If the revision of the key is
//! unchanged, the block is still full.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use kv::Revision;

use crate::attachment::Attachment;
use crate::model::is_of_prefixes;
use crate::net::Family;

/// Number of remembered blocks, more than Calico's default block limit of a host.
const MAX_REMEMBERED_BLOCKS: usize = 32;
/// Maximum number of addresses of an ending attachment whose possible blocks are prefetched.
const MAX_HINTED_ADDRESSES: usize = 4;

/// Remembers the blocks that a node used in a network. An implementation may forget at any time.
pub trait Hints: Send + Sync + fmt::Debug {
    /// Returns the blocks last used by attachments of this node and network, latest first.
    fn recall(&self, attachment: &Attachment) -> Vec<IpNet>;

    /// Remembers the used blocks of this node and network, latest first.
    fn remember(&self, attachment: &Attachment, blocks: &[IpNet]);

    /// Returns blocks that were full, each with the revision of its last write. A block counts as full until its
    /// revision changes. Implementations must forget within a minute, because a restored cluster restarts its
    /// revisions.
    fn recall_full(&self, _attachment: &Attachment) -> FullBlocks {
        FullBlocks::new()
    }

    /// Adds these full blocks to the remembered ones.
    fn remember_full(&self, _attachment: &Attachment, _blocks: &FullBlocks) {}

    /// Returns the pools of the network that had no room for this node. They are tried last, so implementations must
    /// forget within a minute.
    fn recall_full_pools(&self, _attachment: &Attachment) -> Vec<IpNet> {
        Vec::new()
    }

    /// Adds these pools to the remembered ones.
    fn remember_full_pools(&self, _attachment: &Attachment, _pools: &[IpNet]) {}

    /// Records, before the commit, that a node is about to hold addresses in blocks that it does not own. A scan of the
    /// node's addresses reads these blocks besides its own. If a record is lost, scans miss addresses until the next
    /// scan of all blocks. A superfluous record costs a read.
    fn about_to_hold(&self, _node: &str, _blocks: &[IpNet]) {}

    /// Returns the remembered blocks of other owners in which a node may hold addresses.
    fn held(&self, _node: &str) -> Vec<IpNet> {
        Vec::new()
    }
}

/// Full blocks, each with the revision of its last write.
pub type FullBlocks = BTreeMap<IpNet, Revision>;

/// Puts the blocks that were just used first, and keeps at most [`MAX_REMEMBERED_BLOCKS`].
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

/// The blocks from which a family's next addresses are likely to come, likeliest first.
pub(crate) fn latest_of(recalled: &[IpNet], family: Family) -> impl Iterator<Item = IpNet> {
    recalled.iter().copied().filter(move |cidr| Family::of_net(*cidr) == family)
}

/// The blocks that probably hold the addresses of an ending attachment. If the block size is unknown, this includes
/// blocks of every size.
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

/// All blocks of prefixes that could contain an address.
pub fn possible_blocks_of_prefixes(ip: IpAddr) -> Vec<IpNet> {
    let family = Family::of(ip);
    (0..family.bits()).map_while(|length| family.network(ip, length).filter(|net| is_of_prefixes(*net))).collect()
}

/// All blocks that could contain an address. Its pool determines the block size, and is unknown before the pools were
/// read.
pub fn possible_blocks(ip: IpAddr) -> Vec<IpNet> {
    let family = Family::of(ip);
    family.block_sizes().filter_map(|prefix| family.network(ip, prefix)).collect()
}
