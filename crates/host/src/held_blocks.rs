//! Records in which blocks of a shared store this node holds addresses. The folder of the record is in memory (below
//! `/run`) and is lost on reboot. With the record in `held.json`, a scan for leftover addresses reads only the recorded
//! blocks and the node's own blocks, not all blocks of the cluster.
//!
//! Each pair of store and node has its own folder with the record of the node's blocks. Before an ADD takes an address
//! from another node's block, it records the block in a note file. A note is an empty file named after the block and
//! the current minute. Processes need no lock to write notes, because there is one file for each block and minute. An
//! ADD that crashes leaves at most one unneeded note file. A scan writes the blocks in which it found addresses of the
//! node to the file `held.json`, and then removes the notes that are older than the longest possible CNI call. The file
//! `held.json` counts as missing if the file is damaged, was written in another boot, or has the wrong owner or mode.
//! If `held.json` is missing, the next scan reads all blocks of the store and writes the file again.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crc::{CRC_64_XZ, Crc, Table};
use nix::fcntl::OFlag;
use nix::unistd::geteuid;
use serde::{Deserialize, Serialize};

use crate::machine::uptime;

/// Minimum age at which a scan removes a note file. An ADD's note file outlives the ADD: the ADD commits or fails long
/// before its note file reaches this age.
const MIN_NOTE_AGE: Duration = Duration::from_secs(10 * 60);
const FORMAT_VERSION: u32 = 1;
/// Maximum size of `held.json`, in bytes; far more than the record of one node needs.
const MAX_FILE_BYTES: u64 = 4 << 20;
const FILE_NAME: &str = "held.json";

static CRC_64: Crc<u64, Table<1>> = Crc::<u64, Table<1>>::new(&CRC_64_XZ);

/// The folder that records, for one store and one node, in which blocks the node holds addresses.
#[derive(Clone, Debug)]
pub struct HeldBlocks {
    folder: PathBuf,
    store: String,
    node: String,
}

/// The content of `held.json`: the results of all scans since the machine was booted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScanRecord {
    /// The blocks in which a scan found an address of the node, as CIDRs (`10.0.0.0/26`).
    pub blocks: BTreeSet<String>,
    /// The revision of the last scan that read all blocks of the store; `None` before the first such scan.
    pub passed: Option<i64>,
    /// When the next scan that reads all blocks is due, in seconds since boot.
    pub due: u64,
}

#[derive(Serialize, Deserialize)]
struct StoredScanRecord {
    format: u32,
    boot_id: String,
    store: String,
    node: String,
    #[serde(flatten)]
    held: ScanRecord,
}

/// The notes that ADDs have written about blocks of other nodes.
#[derive(Clone, Debug, Default)]
pub struct BlockNotes {
    /// The CIDRs of the blocks that are named in the note files.
    pub blocks: BTreeSet<String>,
    /// The note files that are too old to belong to an ADD that is still running.
    old: Vec<PathBuf>,
}

impl HeldBlocks {
    /// Creates a handle for the folder, below a base folder such as `/run/margay`, that records in which blocks of a
    /// store a node holds addresses. Creating the handle creates neither files nor folders.
    pub fn new(base: &Path, store: &str, node: &str) -> Self {
        let mut sum = CRC_64.digest();
        sum.update(store.as_bytes());
        sum.update(&[0]);
        sum.update(node.as_bytes());
        let folder = base.join(format!("held-{:016x}", sum.finalize()));
        Self { folder, store: store.to_owned(), node: node.to_owned() }
    }

    /// Writes a note that the node is about to take an address from the given block (a CIDR).
    ///
    /// # Errors
    /// Any error of writing the note.
    pub fn note(&self, block: &str) -> io::Result<()> {
        let minute = uptime().unwrap_or_default().as_secs() / 60;
        let path = self.folder.join(format!("{}~{minute}", block.replace('/', "-")));
        let open = || OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
        match open() {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.make_folder()?;
                open().map(drop)
            }
            opened => opened.map(drop),
        }
    }

    /// Lists the notes about blocks of this store and node. The caller must list the notes before it calls
    /// [`load`](Self::load) and before it reads the store; otherwise, a scan could miss a block.
    pub fn notes(&self) -> BlockNotes {
        let mut notes = BlockNotes::default();
        let now = uptime().unwrap_or_default();
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let parts = name.to_str().and_then(|name| name.split_once('~'));
            let Some((block, minute)) = parts.and_then(|(block, minute)| Some((block, minute.parse::<u64>().ok()?)))
            else {
                continue;
            };
            let Some((address, prefix)) = block.rsplit_once('-') else { continue };
            notes.blocks.insert(format!("{address}/{prefix}"));
            let made = Duration::from_secs(minute.saturating_mul(60).saturating_add(60));
            if made.checked_add(MIN_NOTE_AGE).is_some_and(|old| old < now) {
                notes.old.push(entry.path());
            }
        }
        notes
    }

    /// Loads `held.json`, which the last scan in this boot has saved. Returns `None` if `held.json` is missing,
    /// damaged, from an earlier boot, or accessible to another user.
    pub fn load(&self, boot_id: &str) -> Option<ScanRecord> {
        let flags = (OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits();
        let file = OpenOptions::new().read(true).custom_flags(flags).open(self.folder.join(FILE_NAME)).ok()?;
        let about = file.metadata().ok()?;
        if !about.is_file()
            || about.uid() != geteuid().as_raw()
            || about.mode() & 0o077 != 0
            || about.len() > MAX_FILE_BYTES
        {
            return None;
        }
        let mut bytes = Vec::new();
        file.take(MAX_FILE_BYTES).read_to_end(&mut bytes).ok()?;
        let stored: StoredScanRecord = serde_json::from_slice(&bytes).ok()?;
        let is_ours = stored.format == FORMAT_VERSION
            && stored.boot_id == boot_id
            && stored.store == self.store
            && stored.node == self.node;
        is_ours.then_some(stored.held)
    }

    /// Saves the scan result in `held.json`, and then removes the note files that had expired when the scan listed them
    /// (`notes`).
    ///
    /// # Errors
    /// Any error of writing `held.json`. If `held.json` cannot be written, the note files are kept.
    pub fn save(&self, boot_id: &str, held: &ScanRecord, notes: &BlockNotes) -> io::Result<()> {
        let (boot_id, store, node) = (boot_id.to_owned(), self.store.clone(), self.node.clone());
        let stored = StoredScanRecord { format: FORMAT_VERSION, boot_id, store, node, held: held.clone() };
        let bytes = serde_json::to_vec(&stored).map_err(io::Error::other)?;
        self.make_folder()?;
        let unfinished = self.folder.join(format!("{FILE_NAME}.{}.tmp", std::process::id()));
        let _ = fs::remove_file(&unfinished);
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&unfinished);
        let written = file
            .and_then(|mut file| file.write_all(&bytes))
            .and_then(|()| fs::rename(&unfinished, self.folder.join(FILE_NAME)));
        if let Err(error) = written {
            let _ = fs::remove_file(&unfinished);
            return Err(error);
        }
        for old in &notes.old {
            let _ = fs::remove_file(old);
        }
        Ok(())
    }

    fn make_folder(&self) -> io::Result<()> {
        // Other users must be able to read the parent folder, because their own folders are inside it.
        if let Some(above) = self.folder.parent() {
            DirBuilder::new().recursive(true).mode(0o755).create(above)?;
        }
        DirBuilder::new().recursive(true).mode(0o700).create(&self.folder)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn texts(texts: &[&str]) -> BTreeSet<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn netns_note_stays_while_calls_can_depend_on_it() {
        let base = tempfile::tempdir().unwrap();
        let memory = HeldBlocks::new(base.path(), "etcd://a:1", "n");
        assert!(memory.notes().blocks.is_empty() && memory.load("b").is_none());
        for block in ["10.0.0.0/26", "fd00::/122", "10.0.0.0/26"] {
            memory.note(block).unwrap();
        }
        let notes = memory.notes();
        assert_eq!(notes.blocks, texts(&["10.0.0.0/26", "fd00::/122"]));
        assert!(HeldBlocks::new(base.path(), "etcd://a:1", "m").notes().blocks.is_empty());
        assert!(HeldBlocks::new(base.path(), "etcd://b:1", "n").notes().blocks.is_empty());
        let modes = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(modes(&memory.folder), 0o700);
        let files: Vec<PathBuf> = memory.folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!((files.len(), modes(&files[0])), (2, 0o600));

        // Rename one note file so that its name has an old time, and add a file that is not a note.
        fs::rename(&files[0], memory.folder.join("10.9.0.0-26~0")).unwrap();
        fs::write(memory.folder.join("nonsense"), "").unwrap();
        let is_old = uptime().unwrap() > MIN_NOTE_AGE + Duration::from_secs(60);
        let held = ScanRecord { blocks: texts(&["10.9.0.0/26"]), passed: Some(7), due: 99 };
        memory.save("b", &held, &memory.notes()).unwrap();
        assert_eq!(memory.load("b"), Some(held));
        assert_eq!(memory.notes().blocks.contains("10.9.0.0/26"), !is_old);
        assert_eq!(memory.notes().blocks.len(), if is_old { 1 } else { 2 });
    }

    #[test]
    fn netns_note_is_ignored_when_not_surely_ours() {
        let base = tempfile::tempdir().unwrap();
        let memory = HeldBlocks::new(base.path(), "etcd://a:1", "n");
        let held = ScanRecord { blocks: texts(&["10.0.0.0/26"]), passed: None, due: 1 };
        memory.save("boot", &held, &BlockNotes::default()).unwrap();
        assert_eq!((memory.load("boot"), memory.load("other")), (Some(held), None));
        let path = memory.folder.join(FILE_NAME);
        let whole = fs::read(&path).unwrap();
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            assert_eq!(memory.load("boot"), None);
        }
        for (from, to) in [("\"n\"", "\"m\""), ("etcd://a", "etcd://b"), ("\"format\":1", "\"format\":2")] {
            fs::write(&path, String::from_utf8(whole.clone()).unwrap().replace(from, to)).unwrap();
            assert_eq!(memory.load("boot"), None, "{to}");
        }
        fs::write(&path, &whole).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(memory.load("boot"), None);
    }
}
