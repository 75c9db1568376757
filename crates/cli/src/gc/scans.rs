//! The memory of a scan of this machine, and its reads of the store of a cluster.
//!
//! The unused addresses that scans have found, and since when, are in a file for each store, in memory, so that it ends
//! with the boot. If the file is lost, a collection only waits longer; a file that is not surely our own counts as lost.
//!
//! Of a cluster's store a scan reads the node's own blocks, those in which it is known to hold something, and once a day all
//! others, by their keys.

use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::hash::{Hash, Hasher};
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use datastore::Location;
use host::{BlockNotes, HeldBlocks, ScanRecord};
use ipam_core::gc::{Allocation, Holdings, ReadScope, ScanScope};
use ipam_core::model::keys;
use ipam_operator::Operator;
use ipnet::IpNet;
use kv::{Content, Range, RangeRequest, Revision};
use nix::fcntl::OFlag;
use nix::unistd::geteuid;
use serde::{Deserialize, Serialize};

use crate::error::Result;

/// The least time between two scans that find an address unused, before it is freed. A runtime configures an interface
/// well within this time after the address was assigned.
pub(super) const MIN_SCAN_INTERVAL: Duration = Duration::from_secs(60);

/// The form of the file.
const SCAN_FILE_FORMAT: u32 = 1;
/// A size that the file of a whole machine does not reach.
const MAX_SCAN_FILE_BYTES: u64 = 64 << 20;

/// One assignment of an address; a later assignment of the same address is another one.
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
    /// The time of the first scan that found it unused, in milliseconds of the machine's running time.
    since: u64,
}

/// The assignments of a store that scans have found unused.
#[derive(Debug)]
pub(super) struct StoreScans {
    path: PathBuf,
    boot_id: String,
    store: String,
    since: BTreeMap<AssignmentId, Duration>,
}

impl StoreScans {
    /// Reads the findings of this boot; there are none if there is no file, or it is not surely ours.
    pub(super) fn load(folder: &Path, store: &str, boot_id: &str, now: Duration) -> Self {
        let mut hasher = DefaultHasher::new();
        store.hash(&mut hasher);
        let path = folder.join(format!("looks-{:016x}.json", hasher.finish()));
        let stored = read_stored_scan(&path)
            .filter(|it| it.format == SCAN_FILE_FORMAT && it.boot_id == boot_id && it.store == store);
        let looks = stored.into_iter().flat_map(|stored| stored.looks);
        let since = looks.map(|scan| (scan.seen, Duration::from_millis(scan.since))).filter(|(_, since)| *since <= now);
        Self { path, boot_id: boot_id.to_owned(), store: store.to_owned(), since: since.collect() }
    }

    /// Records that these assignments and no others are unused now. Returns since when each of them is.
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

    /// Writes the findings for the next run.
    ///
    /// # Errors
    /// Those of the file system.
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
        let bytes = serde_json::to_vec(&stored).map_err(io::Error::other)?;
        if let Some(folder) = self.path.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        }
        // The file has a name of its own until it is whole: two runs at once must not mix.
        let unfinished = self.path.with_extension(format!("{}.tmp", std::process::id()));
        let _ = fs::remove_file(&unfinished);
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&unfinished);
        let written =
            file.and_then(|mut file| file.write_all(&bytes)).and_then(|()| fs::rename(&unfinished, &self.path));
        if written.is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        written
    }
}

/// The contents of a file, if it is ours and no other user has access to it.
fn read_stored_scan(path: &Path) -> Option<ScanFile> {
    let flags = (OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits();
    let file: File = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
    let about = file.metadata().ok()?;
    if !about.is_file()
        || about.uid() != geteuid().as_raw()
        || about.mode() & 0o077 != 0
        || about.len() > MAX_SCAN_FILE_BYTES
    {
        tracing::warn!(path = %path.display(), "these scans are not surely ours, so they do not count");
        return None;
    }
    let mut bytes = Vec::new();
    file.take(MAX_SCAN_FILE_BYTES).read_to_end(&mut bytes).ok()?;
    serde_json::from_slice(&bytes).ok()
}

/// The time after which all blocks are scanned again.
const FULL_SCAN_INTERVAL: Duration = Duration::from_secs(24 * 60 * 60);
/// The next scan of all blocks is later by up to this time, so that the nodes of a cluster do not all scan at once.
const FULL_SCAN_SPREAD: Duration = Duration::from_secs(60 * 60);
/// The most blocks of a cluster that are all scanned at the first scan of a boot.
const MAX_BLOCKS_FOR_EARLY_SCAN: u64 = 64;
/// In a larger cluster the first scan of all blocks is later by up to this time for each block, a day at most. So a
/// cluster is read at a steady rate even if all its nodes were started at once.
const SCAN_DELAY_PER_BLOCK: Duration = Duration::from_secs(17);

/// A node's memory of a cluster's store.
pub(crate) struct ScanMemory {
    held: HeldBlocks,
    boot_id: String,
    notes: BlockNotes,
    found: Option<ScanRecord>,
}

/// The blocks that a scan reads, and the memory to write afterwards.
pub(super) struct ScanPlan {
    pub(super) reach: ReadScope,
    memory: ScanMemory,
    /// The time of the next scan of all blocks, in seconds since the boot began.
    due: u64,
}

impl ScanMemory {
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
    pub(crate) fn reach(&self) -> ReadScope {
        let found = self.found.iter().flat_map(|found| &found.blocks);
        ReadScope::near(self.notes.blocks.iter().chain(found).filter_map(|cidr| cidr.parse::<IpNet>().ok()))
    }

    /// The plan for a scan now. `all` scans all blocks, whether that is due or not.
    pub(super) async fn plan_scan(self, operator: &Operator, all: bool) -> Result<ScanPlan> {
        let now = host::uptime().unwrap_or_default().as_secs();
        let next = now + FULL_SCAN_INTERVAL.as_secs() + fastrand::u64(..FULL_SCAN_SPREAD.as_secs());
        let (is_due, due) = match &self.found {
            // A time that is too far ahead was not written here.
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

/// Whether the first scan of a boot reads all blocks, and the time of the next scan that does.
async fn time_first_full_scan(operator: &Operator, now: u64, next: u64) -> Result<(bool, u64)> {
    let all = RangeRequest::new(Range::Prefix(keys::blocks_prefix(None))).with_content(Content::CountOnly);
    let blocks = operator.ipam().store().range(all).await?.count;
    if blocks <= MAX_BLOCKS_FOR_EARLY_SCAN {
        return Ok((true, next));
    }
    let longest = blocks.saturating_mul(SCAN_DELAY_PER_BLOCK.as_secs()).min(FULL_SCAN_INTERVAL.as_secs());
    Ok((false, now + fastrand::u64(..longest)))
}

impl ScanPlan {
    /// Records the blocks in which something was found. If that fails, the next scan reads more; that is no error.
    pub(super) fn save(self, holdings: &Holdings, passed: Option<Revision>) {
        let before = self.memory.found.and_then(|found| found.passed);
        let held = ScanRecord {
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
