//! Two examples of custom stores: one keeps its rows in memory ([`Shared`]), the other in a file ([`FileTable`]). The
//! folder `src/bin` contains Margay's programs, built with the file-based example store.

mod file;
mod memory;

use std::path::Path;

use driver::{Drivers, LocalDriver};
use kv::Result;
use kv_local::{CommitLog, Engine};
use kv_mvcc::Table;

pub use file::FileTable;
pub use memory::{Shared, open};

/// The engine for [`kv_local`] that keeps a store's rows in a file.
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

/// The driver through which Margay's programs use the file-based example store.
pub static DRIVER: LocalDriver<FileRows> = LocalDriver::new(FileRows);

/// The drivers of the stores in Margay's own programs, plus the driver [`DRIVER`] of this example.
pub fn drivers() -> Drivers {
    stores::drivers().with(&DRIVER)
}
