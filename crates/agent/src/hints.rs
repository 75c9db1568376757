//! Keeps hints in files: the blocks that this node last used in a network. [`ipam_core::hints`] explains the purpose of
//! hints.
//!
//! Hint files are in a private folder (mode 0700) in memory (below `/run`). There is one small hint file for each
//! store, network and node. A hint file is ignored if it is unreadable, damaged, or about another store, network or
//! node. Without a hint file, an ADD needs one more round trip to the store, and writes a new hint file. An ADD that
//! finds all blocks of a pool claimed and full writes them to a separate file, which is valid for one minute. For a
//! network with several pools, a separate file lists the full pools for one minute.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use host::HeldBlocks;
use ipam_core::attachment::Attachment;
use ipam_core::hints::{FullBlocks, Hints};
use ipnet::IpNet;
use kv::Revision;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::whole_file;

pub(crate) const HINTS_FOLDER: &str = "/run/margay/hints";

/// The folder in which the plugin and `margay gc` record the blocks where a node holds addresses.
const HELD_BLOCKS_FOLDER: &str = "/run/margay";

/// Maximum size of a hint file, in bytes. A hint file contains three names and at most a few dozen blocks.
const MAX_HINT_BYTES: u64 = 64 * 1024;

/// The hint files of one store in a folder.
#[derive(Clone, Debug)]
pub(crate) struct FileHints {
    folder: PathBuf,
    store: String,
}

/// The content of a hint file.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct HintFile<T> {
    store: String,
    network: String,
    node: String,
    blocks: T,
}

/// A list of a network's full blocks or full pools, as kept in a hint file.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct FullNetworks {
    /// When the first full block or pool in this list was read from the store, in Unix seconds.
    since: u64,
    /// The full blocks with their mod revisions, or the full pools with the number 0 instead of a revision.
    written: BTreeMap<IpNet, i64>,
}

#[derive(Clone, Copy)]
enum FullKind {
    Blocks,
    Pools,
}

impl FullKind {
    fn prefix(self) -> &'static str {
        match self {
            Self::Blocks => "full",
            Self::Pools => "pools",
        }
    }
}

/// How long a list of full blocks or full pools is used, in seconds since its first entry was read from the store.
const MAX_FULL_AGE_SECONDS: u64 = 60;
/// Maximum size of the file that lists full blocks, in bytes; enough for tens of thousands of blocks.
const MAX_FULL_BYTES: u64 = 4 * 1024 * 1024;

fn unix_now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl FileHints {
    /// Creates a handle on a folder with hint files about the named store. The first hint that is written creates the
    /// folder.
    pub(crate) fn new(folder: impl Into<PathBuf>, store: impl Into<String>) -> Self {
        Self { folder: folder.into(), store: store.into() }
    }

    fn name(&self, attachment: &Attachment) -> String {
        whole_file::name_of(&[&self.store, &attachment.network, &attachment.node]) + ".json"
    }

    fn full_name(&self, kind: FullKind, attachment: &Attachment) -> String {
        format!("{}-{}", kind.prefix(), self.name(attachment))
    }

    /// Reads a hint file. Returns `None` if the hint file is about another store, or about another network or node than
    /// the attachment's.
    fn read<T: DeserializeOwned>(&self, name: &str, attachment: &Attachment, most: u64) -> Option<T> {
        let bytes = whole_file::read(&self.folder.join(name), most).ok()?;
        let hint: HintFile<T> = serde_json::from_slice(&bytes).ok()?;
        let is_ours = hint.store == self.store && hint.network == attachment.network && hint.node == attachment.node;
        is_ours.then_some(hint.blocks)
    }

    fn write(&self, name: &str, attachment: &Attachment, blocks: impl Serialize) {
        let Attachment { network, node, .. } = attachment.clone();
        let hint = HintFile { store: self.store.clone(), network, node, blocks };
        let bytes = serde_json::to_vec(&hint).map_err(std::io::Error::other);
        if let Err(error) = bytes.and_then(|bytes| whole_file::replace(&self.folder, name, &bytes)) {
            tracing::debug!(
                %error,
                "cannot cache which blocks this node uses and which are full; the next CNI \
                 call reads blocks from the store"
            );
        }
    }

    /// Reads the full blocks or full pools in a hint file, unless the file's first entry is older than
    /// [`MAX_FULL_AGE_SECONDS`].
    fn full_at(&self, kind: FullKind, attachment: &Attachment, now: u64) -> Option<FullNetworks> {
        let full: FullNetworks = self.read(&self.full_name(kind, attachment), attachment, MAX_FULL_BYTES)?;
        (now.checked_sub(full.since)? < MAX_FULL_AGE_SECONDS).then_some(full)
    }

    /// Adds full blocks or full pools to the hint file that lists them.
    fn add_full(&self, kind: FullKind, attachment: &Attachment, more: impl Iterator<Item = (IpNet, i64)>) {
        let now = unix_now();
        let full = self.full_at(kind, attachment, now);
        let mut full = full.unwrap_or_else(|| FullNetworks { since: now, written: BTreeMap::new() });
        full.written.extend(more);
        self.write(&self.full_name(kind, attachment), attachment, full);
    }
}

impl Hints for FileHints {
    fn recall(&self, attachment: &Attachment) -> Vec<IpNet> {
        self.read(&self.name(attachment), attachment, MAX_HINT_BYTES).unwrap_or_default()
    }

    fn remember(&self, attachment: &Attachment, blocks: &[IpNet]) {
        self.write(&self.name(attachment), attachment, blocks);
    }

    fn recall_full(&self, attachment: &Attachment) -> FullBlocks {
        let written =
            self.full_at(FullKind::Blocks, attachment, unix_now()).map(|full| full.written).unwrap_or_default();
        written.into_iter().map(|(cidr, written)| (cidr, Revision::new(written))).collect()
    }

    fn about_to_hold(&self, node: &str, blocks: &[IpNet]) {
        let memory = HeldBlocks::new(Path::new(HELD_BLOCKS_FOLDER), &self.store, node);
        if let Err(error) = blocks.iter().try_for_each(|cidr| memory.note(&cidr.to_string())) {
            tracing::warn!(
                %error,
                "cannot record that this node borrows an address from a block of another owner; if the address leaks, \
                 margay gc finds it only in the daily full scan"
            );
        }
    }

    fn held(&self, node: &str) -> Vec<IpNet> {
        let memory = HeldBlocks::new(Path::new(HELD_BLOCKS_FOLDER), &self.store, node);
        let noted = memory.notes().blocks;
        let found = host::boot_id().and_then(|boot| memory.load(&boot)).map(|held| held.blocks).unwrap_or_default();
        noted.iter().chain(&found).filter_map(|cidr| cidr.parse().ok()).collect()
    }

    fn remember_full(&self, attachment: &Attachment, blocks: &FullBlocks) {
        let written = blocks.iter().map(|(cidr, written)| (*cidr, written.get()));
        self.add_full(FullKind::Blocks, attachment, written);
    }

    fn recall_full_pools(&self, attachment: &Attachment) -> Vec<IpNet> {
        let full = self.full_at(FullKind::Pools, attachment, unix_now());
        full.map(|full| full.written.into_keys().collect()).unwrap_or_default()
    }

    fn remember_full_pools(&self, attachment: &Attachment, pools: &[IpNet]) {
        self.add_full(FullKind::Pools, attachment, pools.iter().map(|pool| (*pool, 0)));
    }
}

/// Hints that only record which pools of a network are full. Hints about blocks would not make calls on an embedded
/// store faster, because reading an embedded store needs no round trip.
#[derive(Debug)]
pub(crate) struct FullPoolHints(pub(crate) FileHints);

impl Hints for FullPoolHints {
    fn recall(&self, _: &Attachment) -> Vec<IpNet> {
        Vec::new()
    }

    fn remember(&self, _: &Attachment, _: &[IpNet]) {}

    fn recall_full_pools(&self, attachment: &Attachment) -> Vec<IpNet> {
        self.0.recall_full_pools(attachment)
    }

    fn remember_full_pools(&self, attachment: &Attachment, pools: &[IpNet]) {
        self.0.remember_full_pools(attachment, pools);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn attachment(network: &str, container: &str) -> Attachment {
        let text = str::to_owned;
        let (network, container) = (text(network), text(container));
        Attachment { network, container, interface: text("eth0"), node: text("n"), boot: None }
    }

    fn blocks(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn hints_are_kept_by_network_and_store_and_are_private() {
        let folder = tempfile::tempdir().unwrap();
        let hints = FileHints::new(folder.path().join("hints"), "etcd://h:1");
        let one = attachment("net", "c1");
        assert_eq!(hints.recall(&one), []);
        for used in [blocks(&["10.0.0.0/26"]), blocks(&["10.0.0.64/26", "10.0.0.0/26", "fd00::/122"])] {
            hints.remember(&one, &used);
            assert_eq!(hints.recall(&attachment("net", "c2")), used);
        }
        assert_eq!(hints.recall(&attachment("other", "c1")), []);
        assert_eq!(FileHints::new(folder.path().join("hints"), "etcd://h:2").recall(&one), []);
        let files: Vec<_> = hints.folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(files.len(), 1, "{files:?}");
        assert_eq!(fs::metadata(&files[0]).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(&hints.folder).unwrap().permissions().mode() & 0o777, 0o700);
    }

    #[test]
    fn hints_of_full_blocks_last_one_minute_from_first() {
        let folder = tempfile::tempdir().unwrap();
        let hints = FileHints::new(folder.path(), "etcd://h:1");
        let one = attachment("net", "c1");
        let full = |text: &str| FullBlocks::from([(text.parse().unwrap(), Revision::new(7))]);
        hints.remember_full(&one, &full("10.0.0.0/26"));
        let since = hints.full_at(FullKind::Blocks, &one, unix_now()).unwrap().since;
        hints.remember_full(&one, &full("10.0.0.64/26"));
        let mut both = full("10.0.0.0/26");
        both.extend(full("10.0.0.64/26"));
        assert_eq!(hints.recall_full(&one), both);
        assert_eq!(hints.recall_full(&attachment("other", "c1")), FullBlocks::new());
        assert!(
            hints
                .full_at(FullKind::Blocks, &one, since + MAX_FULL_AGE_SECONDS - 1)
                .is_some_and(|full| full.since == since)
        );
        assert!(hints.full_at(FullKind::Blocks, &one, since + MAX_FULL_AGE_SECONDS).is_none());
        // If the clock was set back, the age of the hint file is unknown, so the file is ignored.
        assert!(hints.full_at(FullKind::Blocks, &one, since - 1).is_none());
        fs::write(folder.path().join(hints.full_name(FullKind::Blocks, &one)), "nonsense").unwrap();
        assert_eq!(hints.recall_full(&one), FullBlocks::new());
    }

    #[test]
    fn hints_of_full_pools_are_apart_from_blocks() {
        let folder = tempfile::tempdir().unwrap();
        let hints = FullPoolHints(FileHints::new(folder.path(), "redb:///store"));
        let one = attachment("net", "c1");
        hints.remember_full_pools(&one, &blocks(&["10.1.0.0/29"]));
        hints.remember_full_pools(&one, &blocks(&["10.0.0.0/29"]));
        hints.remember(&one, &blocks(&["10.2.0.0/29"]));
        assert_eq!(hints.recall_full_pools(&attachment("net", "c2")), blocks(&["10.0.0.0/29", "10.1.0.0/29"]));
        assert_eq!(hints.recall_full_pools(&attachment("other", "c1")), []);
        assert!(hints.recall(&one).is_empty() && hints.recall_full(&one).is_empty());
        let since = hints.0.full_at(FullKind::Pools, &one, unix_now()).unwrap().since;
        assert!(hints.0.full_at(FullKind::Pools, &one, since + MAX_FULL_AGE_SECONDS).is_none());
    }

    #[test]
    fn hints_file_is_ignored_and_rewritten_when_malformed() {
        let folder = tempfile::tempdir().unwrap();
        let hints = FileHints::new(folder.path(), "etcd://h:1");
        let one = attachment("net", "c1");
        hints.remember(&one, &blocks(&["10.0.0.0/26"]));
        let path = folder.path().join(hints.name(&one));
        let whole = fs::read(&path).unwrap();
        let mut others: Vec<Vec<u8>> = (0..whole.len()).map(|length| whole[..length].to_vec()).collect();
        others.push(b"{\"store\":\"etcd://h:1\",\"network\":\"net\",\"node\":\"n\",\"blocks\":[\"all\"]}".to_vec());
        others.push(String::from_utf8(whole.clone()).unwrap().replace("\"net\"", "\"ten\"").into_bytes());
        others.push(vec![b' '; 1 << 17]);
        for other in others {
            fs::write(&path, &other).unwrap();
            assert_eq!(hints.recall(&one), [], "{}", String::from_utf8_lossy(&other));
        }
        hints.remember(&one, &blocks(&["10.0.0.0/26"]));
        assert_eq!(fs::read(&path).unwrap(), whole);
        // If the folder for hints cannot be created, hints are not stored, but plugin calls still succeed.
        let nowhere = FileHints::new(path.join("hints"), "etcd://h:1");
        nowhere.remember(&one, &blocks(&["10.0.0.0/26"]));
        assert_eq!(nowhere.recall(&one), []);
    }
}
