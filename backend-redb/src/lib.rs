#![doc = include_str!("../README.md")]
//!
//! # Inside
//!
//! A store on redb: one crash-safe database file, with a journal to which new commits are written first.
//!
//! The store is a folder; see [`kv_local`] for the folder's contents and the store lock. The private module `file`
//! explains which of redb's syncs `backend-redb` avoids, and how. When the disk is full, the store can still be read,
//! but a commit fails unless the database file has enough free pages.

mod error;
mod file;
mod table;

use std::io;
use std::path::Path;

use driver::LocalDriver;
use kv::Result;
use kv_local::{CommitLog, Engine, OpenOptions, SpareSpace};
use kv_mvcc::{MvccStore, Table};
use redb::StorageBackend;

/// The redb engine for stores of the crate [`kv_local`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Redb;

/// The driver for stores with `redb://` URLs. A redb store commits all waiting transactions together, so callers may
/// have many transactions in flight.
pub static DRIVER: LocalDriver<Redb> = LocalDriver::new(Redb).with_writes_in_flight(128);

impl Engine for Redb {
    fn name(&self) -> &'static str {
        "redb"
    }

    fn entry(&self) -> &'static str {
        "db.redb"
    }

    fn files(&self) -> &'static [&'static str] {
        &["db.redb"]
    }

    fn log(&self) -> CommitLog {
        CommitLog::Journal
    }

    fn open(&self, entry: &Path, store: &str) -> Result<Box<dyn Table>> {
        Ok(Box::new(table::in_file(entry, store)?))
    }

    fn shrink(&self, entry: &Path, store: &str) -> Result<SpareSpace> {
        table::shrink_file(entry, store)?;
        Ok(SpareSpace::GivenBack)
    }
}

/// Opens a redb table on custom storage, for example in memory. The function `storage` is called each time the table is
/// opened: first by `table_on`, and again after each failed commit. The argument `store` is the store's name in error
/// messages.
///
/// As with [`Engine::open`], the rows that the opened table contains may be lost in a power cut until the next commit
/// makes them durable. Always use the opened table behind a [`kv_mvcc::journal::JournaledTable`].
///
/// # Errors
/// An error of the kind `Corrupt`, `Io`, `NoSpace`, `Locked` or `UnknownFormat`.
pub fn table_on<B: StorageBackend>(
    storage: impl Fn() -> io::Result<B> + Send + Sync + 'static,
    store: &str,
) -> Result<Box<dyn Table>> {
    Ok(Box::new(table::RedbTable::open(Box::new(move || storage().map_err(redb::Error::Io)), store)?))
}

/// Opens the redb store in the folder `path` (see [`kv_local::open_blocking`]).
///
/// # Errors
/// See [`kv_local::open_blocking`].
pub async fn open(path: &Path, options: &OpenOptions) -> Result<MvccStore> {
    kv_local::open(Redb, path, options).await
}
