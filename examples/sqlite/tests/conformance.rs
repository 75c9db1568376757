//! The store on SQLite, judged by all cases.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use async_trait::async_trait;
use conformance::{Ability, BoxError, Fixture, Harness};
use kv::Store;
use kv_mvcc::MvccStore;
use kv_mvcc::local::{Create, OpenOptions};
use tempfile::TempDir;

struct Sqlite;

#[derive(Debug)]
struct OneStore {
    folder: TempDir,
    store: Arc<MvccStore>,
}

async fn open(folder: &Path) -> kv::Result<Arc<MvccStore>> {
    let options = OpenOptions::default().with_create(Create::IfMissing);
    Ok(Arc::new(sqlite_store::open(&folder.join("store"), &options).await?))
}

#[async_trait]
impl Harness for Sqlite {
    fn abilities(&self) -> &[Ability] {
        &[Ability::New, Ability::Reopen, Ability::Close, Ability::Measure]
    }

    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError> {
        let folder = tempfile::tempdir()?;
        let store = open(folder.path()).await?;
        Ok(Box::new(OneStore { folder, store }))
    }
}

#[async_trait]
impl Fixture for OneStore {
    fn store(&self) -> Arc<dyn Store> {
        self.store.clone()
    }

    async fn reopen(&mut self) -> Result<(), BoxError> {
        self.store.close().await?;
        self.store = open(self.folder.path()).await?;
        Ok(())
    }

    async fn close(&mut self) -> Result<(), BoxError> {
        Ok(self.store.close().await?)
    }

    async fn stored_bytes(&self) -> Result<u64, BoxError> {
        let mut bytes = 0;
        for file in self.folder.path().join("store").read_dir()? {
            bytes += file?.metadata()?.len();
        }
        Ok(bytes)
    }
}

/// What this environment cannot run.
const IGNORED: &[&str] = &[];

fn main() -> ExitCode {
    conformance::main(Sqlite, IGNORED)
}
