//! Runs the conformance cases on a redb store whose simulated disk loses power.
//!
//! Both redb and the journal write to the simulated disk. When the power of the simulated disk fails, each sector that
//! was not synced has its old or its new content.

#![allow(clippy::unwrap_used, reason = "tests")]

mod disk;

use std::io;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use conformance::{Ability, BoxError, Fixture, Harness};
use disk::Disk;
use fastrand::Rng;
use kv::Store;
use kv_mvcc::journal::{DurableParts, JOURNAL_BYTES, JournaledTable, Medium};
use kv_mvcc::{MvccStore, Options};
use redb::StorageBackend;

struct OnDisk;

/// The files of a redb store: the table's file, the journal's file, and the record of the journal's durable parts.
#[derive(Clone, Debug, Default)]
struct Files {
    table: Disk,
    journal: Disk,
    noted: Arc<Mutex<DurableParts>>,
}

impl Files {
    fn new() -> Self {
        let table = Disk::default();
        Self { journal: table.beside(), table, noted: Arc::default() }
    }

    fn open(&self) -> kv::Result<Arc<MvccStore>> {
        let disk = self.table.clone();
        let table = backend_redb::table_on(move || Ok(disk.clone()), "redb")?;
        let table = JournaledTable::open(table, Box::new(self.clone()), "redb")?;
        Ok(Arc::new(MvccStore::open(Box::new(table), Options { name: "redb", ..Options::default() })?))
    }

    /// Returns the store's files as they are after a power cut, which may also lose the record of the journal's durable
    /// parts.
    fn after_power_cut(&self, random: &mut Rng) -> Self {
        let table = self.table.after_power_cut(random);
        let journal = table.beside();
        journal.state().clone_from(&self.journal.after_power_cut(random).state());
        let noted = if random.bool() { *self.noted.lock().unwrap() } else { DurableParts::default() };
        Self { table, journal, noted: Arc::new(Mutex::new(noted)) }
    }
}

impl Medium for Files {
    fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let there = self.journal.len()?.saturating_sub(offset);
        let length = buffer.len().min(usize::try_from(there).unwrap());
        StorageBackend::read(&self.journal, offset, &mut buffer[..length])?;
        Ok(length)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        if self.journal.state().content.is_empty() {
            self.journal.set_len(JOURNAL_BYTES)?;
        }
        StorageBackend::write(&self.journal, offset, bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.journal.sync_data()
    }

    fn noted(&self) -> DurableParts {
        *self.noted.lock().unwrap()
    }

    fn note(&self, noted: DurableParts) {
        *self.noted.lock().unwrap() = noted;
    }
}

#[derive(Debug)]
struct Held {
    files: Files,
    store: Arc<MvccStore>,
}

#[async_trait]
impl Harness for OnDisk {
    fn abilities(&self) -> &[Ability] {
        &[Ability::New, Ability::Reopen, Ability::Close, Ability::PowerLoss, Ability::Progress]
    }

    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError> {
        let files = Files::new();
        Ok(Box::new(Held { store: files.open()?, files }))
    }
}

#[async_trait]
impl Fixture for Held {
    fn store(&self) -> Arc<dyn Store> {
        self.store.clone()
    }

    async fn reopen(&mut self) -> Result<(), BoxError> {
        self.store.close().await?;
        self.store = self.files.open()?;
        Ok(())
    }

    async fn close(&mut self) -> Result<(), BoxError> {
        Ok(self.store.close().await?)
    }

    fn cut_power_after(&mut self, operations: u32) -> Result<(), BoxError> {
        self.files.table.set_operations_left(Some(operations));
        Ok(())
    }

    async fn restore_power(&mut self, seed: u64) -> Result<(), BoxError> {
        self.store.close().await?;
        self.files = self.files.after_power_cut(&mut Rng::with_seed(seed));
        self.store = self.files.open()?;
        Ok(())
    }
}

/// The conformance cases that need a real folder; they cannot run on a simulated disk in memory. The test program
/// `tests/conformance.rs` runs the cases that need a real folder.
const IGNORED: &[&str] = &["H16_bounded_room", "M02_take_turns_and_count", "M05_watched_from_elsewhere"];

fn main() -> ExitCode {
    conformance::main(OnDisk, &[conformance::WITHOUT_SERVERS, conformance::WITHOUT_FILES, IGNORED].concat())
}
