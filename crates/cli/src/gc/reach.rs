//! The blocks of a cluster's store that a scan reads: the node's own, those in which it is known to hold something, and
//! once a day all others, by their keys.

use std::path::Path;
use std::time::Duration;

use datastore::Location;
use host::{Held, HeldBlocks, Notes};
use ipam_core::gc::{Holdings, Pass, Reach};
use ipam_core::model::keys;
use ipam_operator::Operator;
use ipnet::IpNet;
use kv::{Content, Range, RangeRequest, Revision};

use crate::error::Result;

/// The time after which all blocks are scanned again.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// The next scan of all blocks is later by up to this time, so that the nodes of a cluster do not all scan at once.
const SPREAD: Duration = Duration::from_secs(60 * 60);
/// The most blocks of a cluster that are all scanned at the first scan of a boot.
const FEW: u64 = 64;
/// In a larger cluster the first scan of all blocks is later by up to this time for each block, a day at most. So a
/// cluster is read at a steady rate even if all its nodes were started at once.
const PER_BLOCK: Duration = Duration::from_secs(17);

/// A node's memory of a cluster's store.
pub(crate) struct Memory {
    held: HeldBlocks,
    boot_id: String,
    notes: Notes,
    found: Option<Held>,
}

/// The blocks that a scan reads, and the memory to write afterwards.
pub(super) struct Plan {
    pub(super) reach: Reach,
    memory: Memory,
    /// The time of the next scan of all blocks, in seconds since the boot began.
    due: u64,
}

impl Memory {
    /// The memory below a folder; `None` for a store of one machine, which is always read as a whole.
    pub(crate) fn of(folder: &Path, location: &Location, node: &str, boot_id: &str) -> Option<Self> {
        if !location.is_shared() {
            return None;
        }
        let held = HeldBlocks::new(folder, &location.in_order(), node);
        // In this order: a block that moves from the notes to the findings meanwhile is in the findings.
        let notes = held.notes();
        let found = held.load(boot_id);
        Some(Self { held, boot_id: boot_id.to_owned(), notes, found })
    }

    /// The node's own blocks, and those in which it is known to hold something.
    pub(crate) fn reach(&self) -> Reach {
        let found = self.found.iter().flat_map(|found| &found.blocks);
        Reach::near(self.notes.blocks.iter().chain(found).filter_map(|cidr| cidr.parse::<IpNet>().ok()))
    }

    /// The plan for a scan now. `all` scans all blocks, whether that is due or not.
    pub(super) async fn plan(self, operator: &Operator, all: bool) -> Result<Plan> {
        let now = host::uptime().unwrap_or_default().as_secs();
        let next = now + DAY.as_secs() + fastrand::u64(..SPREAD.as_secs());
        let (is_due, due) = match &self.found {
            // A time that is too far ahead was not written here.
            Some(found) if (now..=next + SPREAD.as_secs()).contains(&found.due) => (false, found.due),
            Some(_) => (true, next),
            None => first(operator, now, next).await?,
        };
        let mut reach = self.reach();
        if is_due || all {
            let passed = self.found.as_ref().and_then(|found| found.passed);
            reach.pass = Pass::Since(passed.map_or(Revision::UNSET, Revision::new));
        }
        Ok(Plan { reach, memory: self, due: if all { next } else { due } })
    }
}

/// Whether the first scan of a boot reads all blocks, and the time of the next scan that does.
async fn first(operator: &Operator, now: u64, next: u64) -> Result<(bool, u64)> {
    let all = RangeRequest::new(Range::Prefix(keys::blocks_prefix(None))).with_content(Content::CountOnly);
    let blocks = operator.ipam().store().range(all).await?.count;
    if blocks <= FEW {
        return Ok((true, next));
    }
    let longest = blocks.saturating_mul(PER_BLOCK.as_secs()).min(DAY.as_secs());
    Ok((false, now + fastrand::u64(..longest)))
}

impl Plan {
    /// Records the blocks in which something was found. If that fails, the next scan reads more; that is no error.
    pub(super) fn keep(self, holdings: &Holdings, passed: Option<Revision>) {
        let before = self.memory.found.and_then(|found| found.passed);
        let held = Held {
            blocks: holdings.allocations.iter().map(|one| one.block.to_string()).collect(),
            passed: passed.map(Revision::get).or(before),
            due: self.due,
        };
        if let Err(error) = self.memory.held.save(&self.memory.boot_id, &held, &self.memory.notes) {
            tracing::warn!(%error, "in which blocks this node holds something cannot be kept in memory");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_of_the_plugin_is_found_in_whatever_order_the_members_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let [one, other] = ["etcd://a:1,b:1", "etcd://b:1,a:1"].map(|url| stores::at(url).unwrap());
        HeldBlocks::new(folder.path(), &one.in_order(), "n").note("10.0.0.0/26").unwrap();
        for location in [one, other] {
            let memory = Memory::of(folder.path(), &location, "n", "boot").unwrap();
            assert_eq!(memory.reach(), Reach::near(["10.0.0.0/26".parse().unwrap()]), "{location}");
        }
    }
}
