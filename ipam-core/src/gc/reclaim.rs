//! An assignment that finds no room frees what is left over from earlier boots, in its own commit.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use kv::Deadline;
use time::OffsetDateTime;

use super::decide::{Verdict, verdict};
use super::{Allocation, Evidence, Kind};
use crate::attachment::Attachment;
use crate::error::{Error, Result};
use crate::ipam::Ipam;
use crate::model::{Block, Document, Handle, Subject, keys};
use crate::workset::{Found, Workset};

/// How many attachments one assignment frees at most, so that the next ones find room at once.
const MOST_ATTACHMENTS: usize = 16;
/// How many blocks and handles that may touch: well below what a commit can, which has the assignment's own besides.
const MOST_KEYS: usize = 64;

/// An attachment with an address of an earlier boot, and when that was given.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Leftover {
    /// Unix seconds; what nobody knows the time of comes last.
    since: i64,
    handle: String,
    interface: String,
}

impl Leftover {
    /// The leftovers in the blocks from the node of an attachment and boots other than its own, oldest first, each
    /// attachment once and the one that asks not at all.
    pub(crate) fn in_blocks<'b>(blocks: impl Iterator<Item = &'b Block>, asks: &Attachment) -> Vec<Self> {
        let allocations = blocks.flat_map(|block| {
            let of_node = |(address, entry)| match Allocation::of(block, address, entry, &asks.node) {
                Kind::Ours(one) => Some(*one),
                Kind::Unmarked | Kind::Special | Kind::Other => None,
            };
            block.allocated().filter_map(of_node).collect::<Vec<_>>()
        });
        Self::among(allocations, asks)
    }

    /// The same among these allocations of the node.
    fn among(allocations: impl Iterator<Item = Allocation>, asks: &Attachment) -> Vec<Self> {
        let Some(boot) = &asks.boot else { return Vec::new() };
        let mut found: Vec<Self> = Vec::new();
        for one in allocations {
            let its_own = one.interface == asks.interface && one.handle == asks.handle();
            if !its_own && one.boot.as_ref().is_some_and(|other| other != boot) {
                let since = one.assigned_at().map_or(i64::MAX, OffsetDateTime::unix_timestamp);
                found.push(Self { since, handle: one.handle, interface: one.interface });
            }
        }
        found.sort();
        let mut known = BTreeSet::new();
        found.retain(|one| known.insert((one.handle.clone(), one.interface.clone())));
        found
    }
}

/// The leftovers that an assignment may free, and the evidence.
#[derive(Debug)]
pub(crate) struct Leftovers {
    /// Oldest first.
    pub(crate) found: Vec<Leftover>,
    /// The evidence of the machine, gathered after they were found.
    pub(crate) evidence: Evidence,
}

impl Ipam {
    /// The leftovers on an attachment's node that count for the subject of a quota, wherever they are, oldest first.
    ///
    /// # Errors
    /// Those of the store.
    pub(crate) async fn leftovers_of(
        &self,
        subject: &Subject,
        asks: &Attachment,
        deadline: Deadline,
    ) -> Result<Vec<Leftover>> {
        if asks.boot.is_none() {
            return Ok(Vec::new());
        }
        let (holdings, _) = self.holdings_within(&asks.node, &self.reach_of(&asks.node), deadline).await?;
        let counts = |one: &Allocation| subject.kind.name_in(&one.entry) == Some(&subject.name);
        Ok(Leftover::among(holdings.allocations.into_iter().filter(counts), asks))
    }

    /// Frees leftovers of a node as a part of what the workset will write. An attachment that has become live, was
    /// renewed, or is spread over too many blocks stays.
    pub(crate) async fn free_leftovers(
        &self,
        work: &mut Workset<'_>,
        node: &str,
        leftovers: &Leftovers,
    ) -> Result<Vec<Allocation>> {
        let (mut freed, mut blocks, mut attachments) = (Vec::new(), BTreeSet::new(), 0);
        for leftover in &leftovers.found {
            let allocations = whole(work, node, leftover).await?;
            let all: Vec<&Allocation> = allocations.iter().collect();
            let began = self.began(&leftovers.evidence);
            if all.is_empty() || verdict(&all, &leftovers.evidence, began) != Verdict::Earlier {
                continue;
            }
            let more: BTreeSet<IpNet> = allocations.iter().map(|one| one.block).collect();
            if attachments + 1 + blocks.union(&more).count() > MOST_KEYS {
                continue;
            }
            for cidr in &more {
                let addresses: BTreeSet<IpAddr> =
                    allocations.iter().filter(|one| one.block == *cidr).map(|one| one.address).collect();
                let now = self.now();
                // Nobody has used them since the machine began to run, so they need not rest; where they are to rest all the
                // same, the assignment does not come here.
                work.change(*cidr, |block| block.release_where(now, 0, |ip, _| addresses.contains(&ip))).await?;
                work.touch_handle(&leftover.handle, *cidr);
            }
            blocks.extend(more);
            freed.extend(allocations);
            attachments += 1;
            if attachments == MOST_ATTACHMENTS {
                break;
            }
        }
        Ok(freed)
    }
}

/// All that an attachment has on the node, in whatever block. Nothing if its handle or a block is damaged.
async fn whole(work: &mut Workset<'_>, node: &str, leftover: &Leftover) -> Result<Vec<Allocation>> {
    let key = keys::handle(&leftover.handle);
    let Some(stored) = work.tx.snapshot_get(&key).await? else { return Ok(Vec::new()) };
    let blocks: Vec<IpNet> = match Handle::decode(&key, stored.as_bytes()) {
        Ok(handle) => handle.blocks().map(|(cidr, _)| cidr).collect(),
        Err(error) => {
            tracing::warn!(%error, "passing over a damaged handle");
            return Ok(Vec::new());
        }
    };
    if blocks.len() > MOST_KEYS / 2 {
        return Ok(Vec::new());
    }
    work.read_ahead(&blocks).await?;
    let mut found = Vec::new();
    for cidr in blocks {
        let block = match work.find(cidr).await? {
            Found::There(block) => block,
            Found::Absent => continue,
            Found::Damaged => return Ok(Vec::new()),
        };
        for (address, entry) in block.allocated().filter(|(_, entry)| entry.has_handle(&leftover.handle)) {
            if let Kind::Ours(one) = Allocation::of(block, address, entry, node)
                && one.interface == leftover.interface
            {
                found.push(*one);
            }
        }
    }
    Ok(found)
}

/// True if an assignment failed for want of room.
pub(crate) fn is_short(error: &Error) -> bool {
    error.is_exhaustion()
}
