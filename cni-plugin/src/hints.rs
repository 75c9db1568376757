//! Hints as files: which blocks this node used last in a network; see [`ipam_core::hints`] for what they are for.
//!
//! A folder in memory (`/run`), readable by its owner alone, with one small file for each store, network and node. What
//! cannot be read, is damaged, or is about something else is as good as nothing: it costs a round trip, and the next ADD
//! writes it anew.

use std::path::PathBuf;

use ipam_core::attachment::Attachment;
use ipam_core::hints::Hints;
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::whole_file;

/// Where the plugin keeps its hints.
pub(crate) const HINTS_FOLDER: &str = "/run/margay/hints";

/// A hint has some names and a few dozen networks.
const MAX_BYTES: u64 = 64 * 1024;

/// Hints in the files of a folder.
#[derive(Clone, Debug)]
pub(crate) struct FileHints {
    folder: PathBuf,
    store: String,
}

/// What is in a file.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Hint {
    store: String,
    network: String,
    node: String,
    blocks: Vec<IpNet>,
}

impl FileHints {
    /// Hints in this folder, about the store of this name. The folder is made when something is remembered.
    pub(crate) fn new(folder: impl Into<PathBuf>, store: impl Into<String>) -> Self {
        Self { folder: folder.into(), store: store.into() }
    }

    fn name(&self, attachment: &Attachment) -> String {
        whole_file::name_of(&[&self.store, &attachment.network, &attachment.node]) + ".json"
    }
}

impl Hints for FileHints {
    fn recall(&self, attachment: &Attachment) -> Vec<IpNet> {
        let read = whole_file::read(&self.folder.join(self.name(attachment)), MAX_BYTES);
        let Some(hint) = read.ok().and_then(|bytes| serde_json::from_slice::<Hint>(&bytes).ok()) else {
            return Vec::new();
        };
        let is_ours = hint.store == self.store && hint.network == attachment.network && hint.node == attachment.node;
        if is_ours { hint.blocks } else { Vec::new() }
    }

    fn remember(&self, attachment: &Attachment, blocks: &[IpNet]) {
        let Self { store, .. } = self.clone();
        let Attachment { network, node, .. } = attachment.clone();
        let hint = Hint { store, network, node, blocks: blocks.to_vec() };
        let written = serde_json::to_vec(&hint)
            .map_err(std::io::Error::other)
            .and_then(|bytes| whole_file::write(&self.folder, &self.name(attachment), &bytes));
        if let Err(error) = written {
            tracing::debug!(%error, "which blocks were used is not remembered; the next call asks for them");
        }
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
    fn what_was_used_is_remembered_for_each_network_and_store_and_private() {
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
    fn what_is_no_hint_is_as_good_as_none_and_written_anew() {
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
        // A folder that cannot be: nothing is remembered, and nobody minds.
        let nowhere = FileHints::new(path.join("hints"), "etcd://h:1");
        nowhere.remember(&one, &blocks(&["10.0.0.0/26"]));
        assert_eq!(nowhere.recall(&one), []);
    }
}
