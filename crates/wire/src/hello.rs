//! The daemon's first frame.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// A file, as the kernel knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileId {
    /// The device.
    pub device: u64,
    /// The inode.
    pub inode: u64,
}

impl FileId {
    /// The file with this metadata.
    pub fn of(metadata: &Metadata) -> Self {
        Self { device: metadata.dev(), inode: metadata.ino() }
    }

    /// The file at a path; `None` if there is none.
    pub fn at(path: &Path) -> Option<Self> {
        path.metadata().ok().as_ref().map(Self::of)
    }
}

/// The store that a daemon has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Identity {
    /// There is no store at the daemon's place.
    Nothing,
    /// An embedded store.
    Embedded {
        /// Its id.
        id: String,
        /// The file `queue` of its folder. A client that sees another one there means another store.
        queue: FileId,
    },
    /// A cluster.
    Cluster {
        /// The way in which it is reached: endpoints, user, the client's certificate. No secret is part of it. A client that
        /// would come in another way is not served under this one.
        access: String,
    },
}

/// The daemon's description of itself, before anything else.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The version of the daemon's program. The bodies of requests belong to it.
    pub program: String,
    /// The process id of the daemon, as the daemon sees it.
    pub process: u32,
    /// The daemon's store.
    pub store: Identity,
}

impl Hello {
    /// A greeting of this program.
    pub fn new(store: Identity) -> Self {
        Self { program: env!("CARGO_PKG_VERSION").to_owned(), process: std::process::id(), store }
    }

    /// True if the daemon is of the same version as this program.
    pub fn is_same_version(&self) -> bool {
        self.program == env!("CARGO_PKG_VERSION")
    }

    /// True if the daemon has the embedded store in this folder.
    pub fn has_store_in(&self, folder: &Path) -> bool {
        match &self.store {
            Identity::Embedded { queue, .. } => FileId::at(&folder.join("queue")) == Some(*queue),
            Identity::Nothing | Identity::Cluster { .. } => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_is_known_by_its_queue() {
        let folder = tempfile::tempdir().unwrap();
        let queue = folder.path().join("queue");
        std::fs::write(&queue, "").unwrap();
        let hello = Hello::new(Identity::Embedded { id: "x".to_owned(), queue: FileId::at(&queue).unwrap() });
        assert!(hello.has_store_in(folder.path()) && hello.is_same_version());
        let other = tempfile::tempdir().unwrap();
        assert!(!hello.has_store_in(other.path()));
        std::fs::write(other.path().join("queue"), "").unwrap();
        assert!(!hello.has_store_in(other.path()));
        assert!(!Hello::new(Identity::Nothing).has_store_in(other.path()));
    }
}
