//! The unused addresses that scans have found, and since when: a file for each store, in memory, so that it ends with
//! the boot. If the file is lost, a collection only waits longer; a file that is not surely our own counts as lost.

use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::hash::{Hash, Hasher};
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipam_core::gc::Allocation;
use nix::fcntl::OFlag;
use nix::unistd::geteuid;
use serde::{Deserialize, Serialize};

/// The least time between two scans that find an address unused, before it is freed. A runtime configures an interface
/// well within this time after the address was assigned.
pub(super) const APART: Duration = Duration::from_secs(60);

/// The form of the file.
const FORMAT: u32 = 1;
/// A size that the file of a whole machine does not reach.
const MAX_BYTES: u64 = 64 << 20;

/// One assignment of an address; a later assignment of the same address is another one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Seen {
    address: IpAddr,
    handle: String,
    sequence_number: u64,
}

impl Seen {
    fn of(one: &Allocation) -> Self {
        Self { address: one.address, handle: one.handle.clone(), sequence_number: one.sequence_number }
    }
}

#[derive(Serialize, Deserialize)]
struct Stored {
    format: u32,
    boot_id: String,
    store: String,
    looks: Vec<Scan>,
}

#[derive(Serialize, Deserialize)]
struct Scan {
    #[serde(flatten)]
    seen: Seen,
    /// The time of the first scan that found it unused, in milliseconds of the machine's running time.
    since: u64,
}

/// The assignments of a store that scans have found unused.
#[derive(Debug)]
pub(super) struct Scans {
    path: PathBuf,
    boot_id: String,
    store: String,
    since: BTreeMap<Seen, Duration>,
}

impl Scans {
    /// Reads the findings of this boot; there are none if there is no file, or it is not surely ours.
    pub(super) fn load(folder: &Path, store: &str, boot_id: &str, now: Duration) -> Self {
        let mut hasher = DefaultHasher::new();
        store.hash(&mut hasher);
        let path = folder.join(format!("looks-{:016x}.json", hasher.finish()));
        let stored = read(&path).filter(|it| it.format == FORMAT && it.boot_id == boot_id && it.store == store);
        let looks = stored.into_iter().flat_map(|stored| stored.looks);
        let since = looks.map(|scan| (scan.seen, Duration::from_millis(scan.since))).filter(|(_, since)| *since <= now);
        Self { path, boot_id: boot_id.to_owned(), store: store.to_owned(), since: since.collect() }
    }

    /// Records that these assignments and no others are unused now. Returns since when each of them is.
    pub(super) fn note<'a>(&mut self, unused: impl Iterator<Item = &'a Allocation>, now: Duration) -> Vec<Duration> {
        let seen = |one| Seen::of(one);
        let unused: Vec<(Seen, Duration)> = unused
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
        let looks = self.since.iter().map(|(seen, since)| Scan {
            seen: seen.clone(),
            since: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
        });
        let stored =
            Stored { format: FORMAT, boot_id: self.boot_id.clone(), store: self.store.clone(), looks: looks.collect() };
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
fn read(path: &Path) -> Option<Stored> {
    let flags = (OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits();
    let file: File = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
    let about = file.metadata().ok()?;
    if !about.is_file() || about.uid() != geteuid().as_raw() || about.mode() & 0o077 != 0 || about.len() > MAX_BYTES {
        tracing::warn!(path = %path.display(), "these scans are not surely ours, so they do not count");
        return None;
    }
    let mut bytes = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut bytes).ok()?;
    serde_json::from_slice(&bytes).ok()
}
