//! The store on redb, on a disk that loses power, judged by all cases.
//!
//! The disk is simulated below redb: what was not synced when the power fails may be there or not, sector by sector.

mod disk;

use std::process::ExitCode;
use std::sync::Arc;

use async_trait::async_trait;
use conformance::{Ability, BoxError, Fixture, Harness};
use disk::Disk;
use fastrand::Rng;
use kv::Store;
use kv_mvcc::{MvccStore, Options};

struct OnDisk;

#[derive(Debug)]
struct Held {
    disk: Disk,
    store: Arc<MvccStore>,
}

fn open(disk: &Disk) -> kv::Result<Arc<MvccStore>> {
    let disk = disk.clone();
    let table = backend_redb::table_on(move || Ok(disk.clone()), "redb")?;
    Ok(Arc::new(MvccStore::open(table, Options { name: "redb", ..Options::default() })?))
}

#[async_trait]
impl Harness for OnDisk {
    fn abilities(&self) -> &[Ability] {
        &[Ability::New, Ability::Reopen, Ability::Close, Ability::PowerLoss]
    }

    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError> {
        let disk = Disk::default();
        Ok(Box::new(Held { store: open(&disk)?, disk }))
    }
}

#[async_trait]
impl Fixture for Held {
    fn store(&self) -> Arc<dyn Store> {
        self.store.clone()
    }

    async fn reopen(&mut self) -> Result<(), BoxError> {
        self.store.close().await?;
        self.store = open(&self.disk)?;
        Ok(())
    }

    async fn close(&mut self) -> Result<(), BoxError> {
        Ok(self.store.close().await?)
    }

    fn cut_power_after(&mut self, operations: u32) -> Result<(), BoxError> {
        self.disk.state().operations_left = Some(operations);
        Ok(())
    }

    async fn restore_power(&mut self, seed: u64) -> Result<(), BoxError> {
        self.store.close().await?;
        self.disk = self.disk.after_power_cut(&mut Rng::with_seed(seed));
        self.store = open(&self.disk)?;
        Ok(())
    }
}

/// The disk is in this process's memory; the store in a folder is judged by those.
const IGNORED: &[&str] = &["H16_bounded_room", "M02_take_turns_and_count", "M05_watched_from_elsewhere"];

fn main() -> ExitCode {
    conformance::main(OnDisk, &[conformance::WITHOUT_SERVERS, conformance::WITHOUT_FILES, IGNORED].concat())
}
