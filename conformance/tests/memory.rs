//! Runs all conformance cases on the in-memory store.

use std::ops::ControlFlow;
use std::process::ExitCode;
use std::sync::Arc;

use async_trait::async_trait;
use conformance::{Ability, BoxError, Fixture, Harness};
use kv::Store;
use kv_mvcc::{MemoryTable, MvccStore, Options, Table};

struct Memory;

/// A fixture with an in-memory store. Reopening the fixture opens a new store on the same in-memory table.
#[derive(Debug)]
struct Held {
    table: MemoryTable,
    store: Arc<MvccStore>,
}

fn open(table: &MemoryTable) -> Result<Arc<MvccStore>, BoxError> {
    let options = Options { name: "memory", ..Options::default() };
    Ok(Arc::new(MvccStore::open(Box::new(table.clone()), options)?))
}

#[async_trait]
impl Harness for Memory {
    fn abilities(&self) -> &[Ability] {
        &[Ability::New, Ability::Reopen, Ability::Close, Ability::Measure, Ability::Progress]
    }

    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError> {
        let table = MemoryTable::new();
        Ok(Box::new(Held { store: open(&table)?, table }))
    }
}

#[async_trait]
impl Fixture for Held {
    fn store(&self) -> Arc<dyn Store> {
        self.store.clone()
    }

    async fn reopen(&mut self) -> Result<(), BoxError> {
        self.store.close().await?;
        self.store = open(&self.table)?;
        Ok(())
    }

    async fn close(&mut self) -> Result<(), BoxError> {
        Ok(self.store.close().await?)
    }

    async fn stored_bytes(&self) -> Result<u64, BoxError> {
        let mut bytes = 0;
        self.table.view()?.scan(&[], &[u8::MAX], &mut |key, value| {
            bytes += (key.len() + value.len()) as u64;
            ControlFlow::Continue(())
        })?;
        Ok(bytes)
    }
}

/// The cases that need more than one process or a power cut. Other processes cannot reach an in-memory store, and a
/// crash loses its data.
const IGNORED: &[&str] = &["D10_power_cuts", "M02_take_turns_and_count", "M05_watched_from_elsewhere"];

fn main() -> ExitCode {
    conformance::main(Memory, &[conformance::WITHOUT_SERVERS, conformance::WITHOUT_FILES, IGNORED].concat())
}
