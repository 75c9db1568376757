//! Remembers which addresses earlier garbage collections on this machine found unused. Plans which blocks of a cluster
//! a garbage collection reads.
//!
//! Each store has a scan file. The scan file lists the unused addresses, each with the time when a scan first found the
//! address unused. The scan files are in the memory file system `/run`, so a reboot deletes them. If a scan file is
//! lost, the next garbage collection only waits longer before it frees addresses. A scan file is ignored if another
//! user could have written it.
//!
//! In a cluster, a garbage collection reads the node's own blocks, and those other blocks in which the node is known to
//! hold addresses. Once a day, a garbage collection reads all blocks of the cluster, not only those known to concern
//! this node.

use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use datastore::Location;
use host::{BlockNotes, HeldBlocks, ScanRecord};
use ipam_core::gc::{Allocation, Holdings, ReadScope, ScanScope};
use ipam_core::model::keys;
use ipam_operator::Operator;
use ipnet::IpNet;
use kv::{Content, Range, RangeRequest, Revision};
use serde::{Deserialize, Serialize};

use crate::error::CommandResult;
use crate::private_file::{read_private, write_private};

/// Minimum time between the two scans that must find an address unused before the address is freed. After an address is
/// assigned, the container runtime configures the interface in much less than `MIN_SCAN_INTERVAL`.
pub(super) const MIN_SCAN_INTERVAL: Duration = Duration::from_secs(60);

/// Version of the format of [`ScanFile`].
const SCAN_FILE_FORMAT: u32 = 1;

/// One assignment of an address to a container. The sequence number distinguishes an assignment from later assignments
/// of the same address.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct AssignmentId {
    address: IpAddr,
    handle: String,
    sequence_number: u64,
}

impl AssignmentId {
    fn of(one: &Allocation) -> Self {
        Self { address: one.address, handle: one.handle.clone(), sequence_number: one.sequence_number }
    }
}

#[derive(Serialize, Deserialize)]
struct ScanFile {
    format: u32,
    boot_id: String,
    store: String,
    looks: Vec<ScanEntry>,
}

#[derive(Serialize, Deserialize)]
struct ScanEntry {
    #[serde(flatten)]
    seen: AssignmentId,
    /// The time when a scan first found the address unused, in milliseconds since boot, not counting suspend.
    since: u64,
}

/// The assignments of a store that earlier scans have found unused.
#[derive(Debug)]
pub(super) struct StoreScans {
    path: PathBuf,
    boot_id: String,
    store: String,
    since: BTreeMap<AssignmentId, Duration>,
}

impl StoreScans {
    /// Reads the scan file of this boot. Returns no assignments if the scan file does not exist, or if another user
    /// could have written it.
    pub(super) fn load(folder: &Path, store: &str, boot_id: &str, now: Duration) -> Self {
        let mut hasher = DefaultHasher::new();
        store.hash(&mut hasher);
        let path = folder.join(format!("looks-{:016x}.json", hasher.finish()));
        let stored = read_private::<ScanFile>(&path)
            .filter(|it| it.format == SCAN_FILE_FORMAT && it.boot_id == boot_id && it.store == store);
        let looks = stored.into_iter().flat_map(|stored| stored.looks);
        let since = looks.map(|scan| (scan.seen, Duration::from_millis(scan.since))).filter(|(_, since)| *since <= now);
        Self { path, boot_id: boot_id.to_owned(), store: store.to_owned(), since: since.collect() }
    }

    /// Records that exactly the allocations in `unused` are unused now. For each allocation in `unused`, returns the
    /// time when a scan first found the allocation unused.
    pub(super) fn record_unused<'a>(
        &mut self,
        unused: impl Iterator<Item = &'a Allocation>,
        now: Duration,
    ) -> Vec<Duration> {
        let seen = |one| AssignmentId::of(one);
        let unused: Vec<(AssignmentId, Duration)> = unused
            .map(seen)
            .map(|one| {
                let since = self.since.get(&one).copied().unwrap_or(now);
                (one, since)
            })
            .collect();
        let since = unused.iter().map(|(_, since)| *since).collect();
        self.since = unused.into_iter().collect();
        since
    }

    /// Writes the scan file, which the next garbage collection reads.
    ///
    /// # Errors
    /// The scan file cannot be written.
    pub(super) fn save(&self) -> io::Result<()> {
        let looks = self.since.iter().map(|(seen, since)| ScanEntry {
            seen: seen.clone(),
            since: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
        });
        let stored = ScanFile {
            format: SCAN_FILE_FORMAT,
            boot_id: self.boot_id.clone(),
            store: self.store.clone(),
            looks: looks.collect(),
        };
        write_private(&self.path, &stored)
    }
}

/// Interval between two scans of all blocks of a cluster.
const FULL_SCAN_INTERVAL: Duration = Duration::from_secs(24 * 60 * 60);
/// Maximum random delay of the next scan of all blocks. The random delay keeps the nodes of a cluster from all scanning
/// at the same time.
const FULL_SCAN_SPREAD: Duration = Duration::from_secs(60 * 60);
/// If a cluster has at most this number of blocks, the first scan after a boot reads all blocks.
const MAX_BLOCKS_FOR_EARLY_SCAN: u64 = 64;
/// Maximum random delay, per block of the cluster, before the first scan of all blocks in a cluster with more than
/// [`MAX_BLOCKS_FOR_EARLY_SCAN`] blocks. The random delay before a scan of all blocks, at most a day, keeps the load of
/// a cluster low even if all nodes boot at the same time.
const SCAN_DELAY_PER_BLOCK: Duration = Duration::from_secs(17);

/// A record, kept on this node, of the blocks of a cluster in which the node holds addresses.
pub(crate) struct ScanMemory {
    held: HeldBlocks,
    boot_id: String,
    notes: BlockNotes,
    found: Option<ScanRecord>,
}

/// The blocks that a scan reads, and the block record that is updated after the scan.
pub(super) struct ScanPlan {
    pub(super) reach: ReadScope,
    memory: ScanMemory,
    /// When the next scan of all blocks is due, in seconds since the boot.
    due: u64,
}

impl ScanMemory {
    /// Loads the node's block record from a folder. Returns `None` for an embedded store, because a scan always reads
    /// all blocks of an embedded store.
    pub(crate) fn of(folder: &Path, location: &Location, node: &str, boot_id: &str) -> Option<Self> {
        if !location.is_shared() {
            return None;
        }
        let held = HeldBlocks::new(folder, &location.in_order(), node);
        // The notes about newly used blocks are read before the block record, because a CNI call may meanwhile move a
        // block from the notes to the record.
        let notes = held.notes();
        let found = held.load(boot_id);
        Some(Self { held, boot_id: boot_id.to_owned(), notes, found })
    }

    /// Returns the node's own blocks, and the other blocks in which the node is known to hold addresses.
    pub(crate) fn reach(&self) -> ReadScope {
        let found = self.found.iter().flat_map(|found| &found.blocks);
        ReadScope::near(self.notes.blocks.iter().chain(found).filter_map(|cidr| cidr.parse::<IpNet>().ok()))
    }

    /// Plans which blocks of a cluster a scan reads. With `all`, the scan reads all blocks even if a scan of all blocks
    /// is not due.
    pub(super) async fn plan_scan(self, operator: &Operator, all: bool) -> CommandResult<ScanPlan> {
        let now = host::uptime().unwrap_or_default().as_secs();
        let next = now + FULL_SCAN_INTERVAL.as_secs() + fastrand::u64(..FULL_SCAN_SPREAD.as_secs());
        let (is_due, due) = match &self.found {
            // If the recorded time of the next scan of all blocks is too far in the future, the time was not written by
            // Margay and is ignored.
            Some(found) if (now..=next + FULL_SCAN_SPREAD.as_secs()).contains(&found.due) => (false, found.due),
            Some(_) => (true, next),
            None => time_first_full_scan(operator, now, next).await?,
        };
        let mut reach = self.reach();
        if is_due || all {
            let passed = self.found.as_ref().and_then(|found| found.passed);
            reach.scan = ScanScope::Since(passed.map_or(Revision::UNSET, Revision::new));
        }
        Ok(ScanPlan { reach, memory: self, due: if all { next } else { due } })
    }
}

/// Decides whether the first scan after a boot reads all blocks, and when the next scan of all blocks is due.
async fn time_first_full_scan(operator: &Operator, now: u64, next: u64) -> CommandResult<(bool, u64)> {
    let all = RangeRequest::new(Range::Prefix(keys::blocks_prefix(None))).with_content(Content::CountOnly);
    let blocks = operator.ipam().store().range(all).await?.count;
    if blocks <= MAX_BLOCKS_FOR_EARLY_SCAN {
        return Ok((true, next));
    }
    let longest = blocks.saturating_mul(SCAN_DELAY_PER_BLOCK.as_secs()).min(FULL_SCAN_INTERVAL.as_secs());
    Ok((false, now + fastrand::u64(..longest)))
}

impl ScanPlan {
    /// Records in which blocks the node holds addresses. Failing to write the block record is only logged: the next
    /// scan just reads more blocks.
    pub(super) fn save(self, holdings: &Holdings, passed: Option<Revision>) {
        let before = self.memory.found.and_then(|found| found.passed);
        let held = ScanRecord {
            blocks: holdings.allocations.iter().map(|one| one.block.to_string()).collect(),
            passed: passed.map(Revision::get).or(before),
            due: self.due,
        };
        if let Err(error) = self.memory.held.save(&self.memory.boot_id, &held, &self.memory.notes) {
            tracing::warn!(
                %error,
                "cannot cache the list of blocks in which this node has addresses; the next margay gc reads more blocks"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plugin_note_is_found_with_members_in_any_order() {
        let folder = tempfile::tempdir().unwrap();
        let [one, other] = ["etcd://a:1,b:1", "etcd://b:1,a:1"].map(|url| stores::at(url).unwrap());
        HeldBlocks::new(folder.path(), &one.in_order(), "n").note("10.0.0.0/26").unwrap();
        for location in [one, other] {
            let memory = ScanMemory::of(folder.path(), &location, "n", "boot").unwrap();
            assert_eq!(memory.reach(), ReadScope::near(["10.0.0.0/26".parse().unwrap()]), "{location}");
        }
    }
}
