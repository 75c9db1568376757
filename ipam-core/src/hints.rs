//! Hints: where a host found room last, so that the next call reads that along with everything else.
//!
//! On a store that is a network away, a steady assignment is one read and one commit only if the block it will take
//! from is known before anything was read. So the program around the allocator may remember the blocks that were used.
//! Hints are read first and never believed: a hint that is wrong, stale or missing costs a round trip, and that is all.
//!
//! Where all blocks of a pool are claimed, an assignment may have to scan thousands of them, and is repeated every few
//! seconds. So the full blocks are remembered too, each with the revision of its last write: while the keys alone show
//! that a block was not written again, it is still full.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use kv::Revision;

use crate::attachment::Attachment;
use crate::model::is_of_prefixes;
use crate::net::Family;

/// The number of remembered blocks: more than Calico lets a host have by default.
const MAX_REMEMBERED_BLOCKS: usize = 32;
/// The most addresses of an attachment that ends whose possible blocks are read at once.
const MAX_HINTED_ADDRESSES: usize = 4;

/// Remembers the blocks that a node used in a network. It may forget at any time.
pub trait Hints: Send + Sync + fmt::Debug {
    /// The blocks that were used last by attachments of this one's node and network, the latest first.
    fn recall(&self, attachment: &Attachment) -> Vec<IpNet>;

    /// Remembers them.
    fn remember(&self, attachment: &Attachment, blocks: &[IpNet]);

    /// Blocks that were full, each with the revision of its last write. They are believed as long as they were not
    /// written again, so this must forget within a minute: a restored cluster counts its revisions anew.
    fn recall_full(&self, _attachment: &Attachment) -> FullBlocks {
        FullBlocks::new()
    }

    /// Remembers these full blocks besides the remembered ones.
    fn remember_full(&self, _attachment: &Attachment, _blocks: &FullBlocks) {}

    /// The pools of the network that had no room for this node. They are tried last, and so this must forget within a
    /// minute.
    fn recall_full_pools(&self, _attachment: &Attachment) -> Vec<IpNet> {
        Vec::new()
    }

    /// Remembers these pools besides the remembered ones.
    fn remember_full_pools(&self, _attachment: &Attachment, _pools: &[IpNet]) {}

    /// Records that a node is about to hold addresses of blocks that are not its own, before that is committed. A scan
    /// of the node's addresses reads those blocks besides its own. If a record is lost, such scans miss addresses until
    /// the next pass through all blocks; one too many costs a read.
    fn about_to_hold(&self, _node: &str, _blocks: &[IpNet]) {}

    /// The blocks in which a node may hold something besides its own, as far as is remembered.
    fn held(&self, _node: &str) -> Vec<IpNet> {
        Vec::new()
    }
}

/// Full blocks, each with the revision of its last write.
pub type FullBlocks = BTreeMap<IpNet, Revision>;

/// Puts the blocks that were used now first.
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

/// The blocks from which a family's next addresses are likely to come, the likeliest first.
pub(crate) fn latest_of(recalled: &[IpNet], family: Family) -> impl Iterator<Item = IpNet> {
    recalled.iter().copied().filter(move |cidr| Family::of_net(*cidr) == family)
}

/// The blocks that probably have the addresses of an attachment that ends. Where their size is not known, these are
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

/// Every block of prefixes that an address can be inside of.
pub fn possible_blocks_of_prefixes(ip: IpAddr) -> Vec<IpNet> {
    let family = Family::of(ip);
    (0..family.bits()).map_while(|length| family.network(ip, length).filter(|net| is_of_prefixes(*net))).collect()
}

/// Every block that an address can be of: its pool determines which one it is, and is not known before it was read.
pub fn possible_blocks(ip: IpAddr) -> Vec<IpNet> {
    let family = Family::of(ip);
    family.block_sizes().filter_map(|prefix| family.network(ip, prefix)).collect()
}
