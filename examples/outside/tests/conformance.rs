//! Runs the conformance cases on the in-memory example store.

use std::process::ExitCode;
use std::sync::Arc;

use async_trait::async_trait;
use conformance::{Ability, BoxError, Fixture, Harness};
use kv::Store;
use kv_mvcc::MvccStore;
use outside::{Shared, open};

struct InMemory;

#[derive(Debug)]
struct OneStore {
    rows: Shared,
    store: Arc<MvccStore>,
}

#[async_trait]
impl Harness for InMemory {
    fn abilities(&self) -> &[Ability] {
        &[Ability::New, Ability::Reopen, Ability::Close, Ability::Progress]
    }

    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError> {
        let rows = Shared::default();
        Ok(Box::new(OneStore { store: Arc::new(open(&rows)?), rows }))
    }
}

#[async_trait]
impl Fixture for OneStore {
    fn store(&self) -> Arc<dyn Store> {
        self.store.clone()
    }

    async fn reopen(&mut self) -> Result<(), BoxError> {
        self.store.close().await?;
        self.store = Arc::new(open(&self.rows)?);
        Ok(())
    }

    async fn close(&mut self) -> Result<(), BoxError> {
        Ok(self.store.close().await?)
    }
}

/// Conformance cases that need a store which another process can open, or whose size can be measured.
const IN_MEMORY: &[&str] =
    &["D10_power_cuts", "H16_bounded_room", "M02_take_turns_and_count", "M05_watched_from_elsewhere"];

fn main() -> ExitCode {
    conformance::main(InMemory, &[conformance::WITHOUT_SERVERS, conformance::WITHOUT_FILES, IN_MEMORY].concat())
}
