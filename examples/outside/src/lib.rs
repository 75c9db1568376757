//! An example of a custom store: its rows in memory ([`Shared`]), and in a file ([`FileTable`]). Margay's programs with
//! this store are in `src/bin`.

mod file;
mod memory;

use std::path::Path;

use driver::{Drivers, LocalDriver};
use kv::Result;
use kv_local::{CommitLog, Engine};
use kv_mvcc::Table;

pub use file::FileTable;
pub use memory::{Shared, open};

/// The rows in a file as an engine of [`kv_local`].
#[derive(Clone, Copy, Debug)]
pub struct FileRows;

impl Engine for FileRows {
    fn name(&self) -> &'static str {
        "rows"
    }

    fn entry(&self) -> &'static str {
        "rows"
    }

    fn files(&self) -> &'static [&'static str] {
        &["rows/all"]
    }

    fn log(&self) -> CommitLog {
        CommitLog::Own
    }

    fn open(&self, entry: &Path, store: &str) -> Result<Box<dyn Table>> {
        Ok(Box::new(FileTable::open(entry, store)?))
    }
}

/// The driver through which programs use the store.
pub static DRIVER: LocalDriver<FileRows> = LocalDriver::new(FileRows);

/// The stores of Margay's programs, and this one.
pub fn drivers() -> Drivers {
    stores::drivers().with(&DRIVER)
}
