//! Shared helpers of the daemon's tests.

#![allow(dead_code)] // Each test program uses only some of these helpers.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Duration;

use datastore::{Create, Location};
use tempfile::TempDir;

/// The conformance cases that the daemon cannot pass. Some conformance cases need a server store, direct access to the
/// store's files, or other processes. Some conformance cases need a store that stays closed, but the daemon reopens its
/// store at the next call.
pub(crate) static IGNORED: LazyLock<Vec<&'static str>> = LazyLock::new(|| {
    let elsewhere = ["D10_power_cuts", "M02_take_turns_and_count", "M05_watched_from_elsewhere"];
    let closed = ["X10_use_after_close", "D14_closed_under_writers"];
    [conformance::WITHOUT_SERVERS, conformance::WITHOUT_FILES, &elsewhere, &closed].concat()
});

#[derive(Debug)]
pub(crate) struct Folder {
    engine: &'static str,
    path: PathBuf,
    _root: TempDir,
}

impl Folder {
    /// Creates a temporary folder without a store.
    pub(crate) fn new(engine: &'static str) -> io::Result<Self> {
        let root = tempfile::tempdir()?;
        Ok(Self { engine, path: root.path().join("store"), _root: root })
    }

    /// Creates a temporary folder with a new store.
    pub(crate) async fn with_store(engine: &'static str) -> Result<Self, conformance::BoxError> {
        let folder = Self::new(engine)?;
        folder.make().await?;
        Ok(folder)
    }

    pub(crate) async fn make(&self) -> kv::Result<()> {
        datastore::open(&self.location(), &Create::IfMissing.with_wait(Duration::from_secs(10))).await?.close().await
    }

    pub(crate) fn location(&self) -> Location {
        stores::of_engine(self.engine, &self.path).unwrap_or_else(|error| panic!("{error}"))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the total size in bytes of all files in the store's folder.
    pub(crate) fn bytes(&self) -> io::Result<u64> {
        size(&self.path)
    }
}

fn size(path: &Path) -> io::Result<u64> {
    let metadata = path.symlink_metadata()?;
    if !metadata.is_dir() {
        return Ok(metadata.len());
    }
    path.read_dir()?.map(|entry| size(&entry?.path())).sum()
}
