//! A store on SQLite, written as a third party would write it: an example of [`kv_mvcc::Table`] that
//! `tests/conformance.rs` tests.
//!
//! The module `table.rs` keeps the store's rows in one SQLite table. An engine such as [`Sqlite`] only stores rows; the
//! wrapper [`kv_mvcc::MvccStore`] adds revisions, history and watches. The type [`Sqlite`] names the engine's files,
//! and [`kv_local`] manages these files as for every embedded store. The crate [`kv_local`] creates the folder, queues
//! the processes that wait for the store, and distinguishes a damaged store from a new one.

mod error;
mod table;

use std::path::Path;

use driver::LocalDriver;
use kv::Result;
use kv_local::{CommitLog, Engine, OpenOptions};
use kv_mvcc::{MvccStore, Table};

pub use table::SqliteTable;

/// The SQLite engine for [`kv_local`] that keeps a store's rows in SQLite.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sqlite;

impl Engine for Sqlite {
    fn name(&self) -> &'static str {
        "sqlite"
    }

    fn entry(&self) -> &'static str {
        "sqlite"
    }

    fn files(&self) -> &'static [&'static str] {
        &["sqlite/db"]
    }

    fn log(&self) -> CommitLog {
        CommitLog::Own
    }

    fn open(&self, entry: &Path, store: &str) -> Result<Box<dyn Table>> {
        Ok(Box::new(SqliteTable::open(entry, store)?))
    }
}

/// The driver through which Margay's programs use SQLite.
pub static DRIVER: LocalDriver<Sqlite> = LocalDriver::new(Sqlite);

/// Opens the SQLite store in the folder `path`.
///
/// # Errors
/// Any error that [`kv_local::open_blocking`] returns.
pub async fn open(path: &Path, options: &OpenOptions) -> Result<MvccStore> {
    kv_local::open(Sqlite, path, options).await
}
