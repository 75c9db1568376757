#![doc = include_str!("../README.md")]
//!
//! # Inside
//!
//! This crate implements a store on sled, an engine that keeps a folder of log segments.
//!
//! The store is a folder; see [`kv_local`] for the folder's contents and the store lock.
//!
//! sled 0.34 requires more care from its user than redb does; the private module `table` describes the workarounds. One
//! drawback has no workaround: opening the store writes a snapshot with three syncs, which takes some milliseconds. For
//! this reason, a store on a full disk cannot even be read until the disk has room. sled's housekeeping reuses parts of
//! sled's log without a sync before the reuse; `tests/cuts.rs` simulates power cuts at these moments.

mod error;
mod priority;
mod table;

use std::path::Path;

use driver::LocalDriver;
use kv::Result;
use kv_local::{CommitLog, Engine, OpenOptions};
use kv_mvcc::{MvccStore, Table};

/// The sled engine for [`kv_local`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Sled;

/// The driver of `sled://`. The number of large commits in flight is small, because many large commits would take
/// gigabytes of memory. A long reader reads all keys in one turn, because opening the store takes longer than reading
/// the usual number of keys per turn.
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

/// Opens the store in the folder `path` (see [`kv_local::open_blocking`]).
///
/// # Errors
/// See [`kv_local::open_blocking`].
pub async fn open(path: &Path, options: &OpenOptions) -> Result<MvccStore> {
    kv_local::open(Sled, path, options).await
}
