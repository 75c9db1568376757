//! Runs the conformance cases on the SQLite store.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use conformance::{Ability, BoxError, Fixture, Harness};
use kv::Store;
use kv_local::{Create, OpenOptions};
use kv_mvcc::MvccStore;
use tempfile::TempDir;

struct Sqlite;

#[derive(Debug)]
struct OneStore {
    path: PathBuf,
    store: Arc<MvccStore>,
    // The temporary folder; `None` if another process created the folder and will delete it.
    _folder: Option<TempDir>,
}

const WAIT: Duration = Duration::from_secs(10);

async fn open(path: &Path, wait: Duration) -> kv::Result<Arc<MvccStore>> {
    let options = OpenOptions::default().with_create(Create::IfMissing).with_wait(wait);
    Ok(Arc::new(sqlite_store::open(path, &options).await?))
}

#[async_trait]
impl Harness for Sqlite {
    fn abilities(&self) -> &[Ability] {
        use Ability::{Close, Embedded, Folder, Measure, New, Processes, Progress, Reopen};
        &[New, Reopen, Close, Measure, Processes, Embedded, Folder, Progress]
    }

    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("store");
        let store = open(&path, WAIT).await?;
        Ok(Box::new(OneStore { path, store, _folder: Some(folder) }))
    }

    async fn join(&self, address: &str, wait: Duration) -> kv::Result<Box<dyn Fixture>> {
        let store = open(Path::new(address), wait).await?;
        Ok(Box::new(OneStore { path: address.into(), store, _folder: None }))
    }

    fn address_in(&self, folder: &Path) -> Result<String, BoxError> {
        Ok(folder.join("store").display().to_string())
    }
}

#[async_trait]
impl Fixture for OneStore {
    fn store(&self) -> Arc<dyn Store> {
        self.store.clone()
    }

    async fn reopen(&mut self) -> Result<(), BoxError> {
        self.store.close().await?;
        self.store = open(&self.path, WAIT).await?;
        Ok(())
    }

    async fn close(&mut self) -> Result<(), BoxError> {
        Ok(self.store.close().await?)
    }

    async fn stored_bytes(&self) -> Result<u64, BoxError> {
        Ok(bytes_below(&self.path)?)
    }

    fn address(&self) -> Result<String, BoxError> {
        Ok(self.path.display().to_string())
    }
}

fn bytes_below(path: &Path) -> io::Result<u64> {
    let metadata = path.symlink_metadata()?;
    if !metadata.is_dir() {
        return Ok(metadata.len());
    }
    path.read_dir()?.map(|entry| bytes_below(&entry?.path())).sum()
}

/// Conformance cases that cannot run on the SQLite store, in addition to the cases that need servers.
const IGNORED: &[&str] = &[
    "D07_full_disk",
    "D08_data_gone",
    "D09_synced_before_acknowledged",
    "D10_power_cuts",
    "D12_later_version",
    "D15_any_damage",
];

fn main() -> ExitCode {
    conformance::main(Sqlite, &[conformance::WITHOUT_SERVERS, IGNORED].concat())
}
