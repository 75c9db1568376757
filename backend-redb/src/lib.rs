#![doc = include_str!("../README.md")]
//!
//! # Inside
//!
//! This crate implements a store on redb: one crash-safe file, with a journal in front of the file.
//!
//! The store is a folder; see [`kv_local`] for the folder's contents and the store lock. The private module `file`
//! explains which of redb's syncs are avoided, and how. A store on a full disk can be read. A commit on a full disk
//! fails unless the file has enough free pages.

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

/// The redb engine for [`kv_local`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Redb;

/// The driver of `redb://`. The store commits all waiting transactions together, so many transactions can be in flight.
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

/// Opens a redb table on custom storage, for instance in memory. `storage` is called each time the table is opened: by
/// this function, and after each failed commit. `store` is the store's name in errors.
///
/// As with [`Engine::open`], the content of the table need not be durable until the next commit, so put the table
/// behind a [`kv_mvcc::journal::JournaledTable`].
///
/// # Errors
/// `Corrupt`, `Io`, `NoSpace`, `Locked`, `UnknownFormat`.
pub fn table_on<B: StorageBackend>(
    storage: impl Fn() -> io::Result<B> + Send + Sync + 'static,
    store: &str,
) -> Result<Box<dyn Table>> {
    Ok(Box::new(table::RedbTable::open(Box::new(move || storage().map_err(redb::Error::Io)), store)?))
}

/// Opens the store in the folder `path` (see [`kv_local::open_blocking`]).
///
/// # Errors
/// See [`kv_local::open_blocking`].
pub async fn open(path: &Path, options: &OpenOptions) -> Result<MvccStore> {
    kv_local::open(Redb, path, options).await
}
