//! A store on SQLite, as somebody outside this project would write it: an example of the seam
//! [`kv_mvcc::Table`], judged by the crate `conformance` in `tests/conformance.rs`.
//!
//! `table.rs` keeps rows in one SQLite table, which is all that an engine has to do; [`kv_mvcc::MvccStore`] makes
//! revisions, history and watches of them. [`Sqlite`] says where the file lies, so that [`kv_local`] can do for it
//! what it does for every store on disk: the folder, the queue of processes, and telling damage from a new store.

mod error;
mod table;

use std::path::Path;

use driver::LocalDriver;
use kv::Result;
use kv_local::{CommitLog, Engine, OpenOptions};
use kv_mvcc::{MvccStore, Table};

pub use table::SqliteTable;

/// SQLite, as an engine of [`kv_local`].
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

/// SQLite as Margay's programs see it: the line that plugs it in.
pub static DRIVER: LocalDriver<Sqlite> = LocalDriver::new(Sqlite);

/// Opens the store in the folder `path`.
///
/// # Errors
/// Those of [`kv_local::open_blocking`].
pub async fn open(path: &Path, options: &OpenOptions) -> Result<MvccStore> {
    kv_local::open(Sqlite, path, options).await
}
