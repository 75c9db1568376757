#![doc = include_str!("../README.md")]
//!
//! # Inside
//!
//! A store on redb: one file, crash safe, and a journal in front of it.
//!
//! The store is a folder; see [`kv_local`] for its contents and its lock. The private module `file` says where redb's
//! other syncs went. A store on a full disk can be read; a commit there fails unless the pages that it needs are free
//! within the file.

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

/// redb, as an engine of [`kv_local`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Redb;

/// The driver of `redb://`. It makes one commit of the transactions that wait.
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

/// Opens a table of redb on a storage of one's own, for instance in memory. `storage` gives it anew each time that the
/// table is opened: now, and again after a failed commit. `store` names it in errors.
///
/// As with [`Engine::open`], what the table shows when it is opened need not be durable before the next commit: it belongs
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

/// Opens the store in the folder `path`; see [`kv_local::open_blocking`] for what that means and for its errors.
///
/// # Errors
/// Those of [`kv_local::open_blocking`].
pub async fn open(path: &Path, options: &OpenOptions) -> Result<MvccStore> {
    kv_local::open(Redb, path, options).await
}
