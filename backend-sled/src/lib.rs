#![doc = include_str!("../README.md")]
//!
//! # Inside
//!
//! A store on sled, an engine that keeps its data in a folder of log segments.
//!
//! The store is a folder; see [`kv_local`] for the folder's contents and the store lock.
//!
//! The engine sled 0.34 needs more care than redb; the private module `table` describes the workarounds. One drawback
//! of sled has no workaround: each time the store is opened, sled writes a snapshot with three syncs, which takes some
//! milliseconds. On a full disk, a store cannot even be read until space is freed, because sled has to write a snapshot
//! when it opens the store. sled reuses parts of its log without a sync, so `tests/cuts.rs` simulates power cuts while
//! a part is reused.

mod error;
mod priority;
mod table;

use std::path::Path;

use driver::LocalDriver;
use kv::Result;
use kv_local::{CommitLog, Engine, OpenOptions};
use kv_mvcc::{MvccStore, Table};

/// The sled engine for stores of the crate [`kv_local`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Sled;

/// The driver for stores with `sled://` URLs. Callers of a sled store should have only a few large commits in flight,
/// because many of them would take gigabytes of memory. A process that reads many keys keeps a sled store open until it
/// has read all of them, because reopening the store would take longer than the reads.
pub static DRIVER: LocalDriver<Sled> = LocalDriver::new(Sled).with_writes_in_flight(8).with_keys_in_a_turn(usize::MAX);

impl Engine for Sled {
    fn name(&self) -> &'static str {
        "sled"
    }

    fn entry(&self) -> &'static str {
        "sled"
    }

    fn files(&self) -> &'static [&'static str] {
        &["sled/db", "sled/conf"]
    }

    fn log(&self) -> CommitLog {
        CommitLog::Own
    }

    fn open(&self, entry: &Path, store: &str) -> Result<Box<dyn Table>> {
        Ok(Box::new(table::SledTable::open(entry, store)?))
    }
}

/// Opens the sled store in the folder `path` (see [`kv_local::open_blocking`]).
///
/// # Errors
/// See [`kv_local::open_blocking`].
pub async fn open(path: &Path, options: &OpenOptions) -> Result<MvccStore> {
    kv_local::open(Sled, path, options).await
}
