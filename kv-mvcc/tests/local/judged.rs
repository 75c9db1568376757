//! An engine's store, judged by the rules that every store has to keep.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use async_trait::async_trait;
use conformance::{Ability, BoxError, Fixture, Harness};
use kv::Store;
use kv_mvcc::MvccStore;
use kv_mvcc::local::{self, Create, Engine, OpenOptions};
use tempfile::TempDir;

/// Runs all cases.
pub(crate) fn main(engine: impl Engine + Copy + std::fmt::Debug + 'static) -> ExitCode {
    conformance::main(OnDisk(engine), &[])
}

struct OnDisk<E>(E);

#[derive(Debug)]
struct Held<E> {
    engine: E,
    folder: TempDir,
    store: Arc<MvccStore>,
}

async fn open(engine: impl Engine + 'static, folder: &Path) -> Result<Arc<MvccStore>, BoxError> {
    let options = OpenOptions::default().with_create(Create::IfMissing);
    Ok(Arc::new(local::open(engine, &folder.join("store"), &options).await?))
}

#[async_trait]
impl<E: Engine + Copy + std::fmt::Debug + 'static> Harness for OnDisk<E> {
    fn abilities(&self) -> &[Ability] {
        &[Ability::New, Ability::Reopen, Ability::Close, Ability::Measure]
    }

    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError> {
        let folder = tempfile::tempdir()?;
        let store = open(self.0, folder.path()).await?;
        Ok(Box::new(Held { engine: self.0, folder, store }))
    }
}

#[async_trait]
impl<E: Engine + Copy + std::fmt::Debug + 'static> Fixture for Held<E> {
    fn store(&self) -> Arc<dyn Store> {
        self.store.clone()
    }

    async fn reopen(&mut self) -> Result<(), BoxError> {
        self.store.close().await?;
        self.store = open(self.engine, self.folder.path()).await?;
        Ok(())
    }

    async fn close(&mut self) -> Result<(), BoxError> {
        Ok(self.store.close().await?)
    }

    async fn stored_bytes(&self) -> Result<u64, BoxError> {
        Ok(size(self.folder.path())?)
    }
}

/// The bytes of all files in and below `path`.
fn size(path: &Path) -> std::io::Result<u64> {
    let metadata = path.symlink_metadata()?;
    if !metadata.is_dir() {
        return Ok(metadata.len());
    }
    path.read_dir()?.map(|entry| size(&entry?.path())).sum()
}
