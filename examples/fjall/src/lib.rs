//! A store on fjall, a log-structured merge tree in pure Rust: the second example, which shows that the seam fits an engine of
//! another kind than [SQLite's](https://sqlite.org). `table.rs` keeps rows in one keyspace.

mod error;
mod table;

use std::path::Path;

use driver::LocalDriver;
use kv::Result;
use kv_local::{CommitLog, Engine};
use kv_mvcc::Table;

pub use table::FjallTable;

/// fjall, as an engine of [`kv_local`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Fjall;

impl Engine for Fjall {
    fn name(&self) -> &'static str {
        "fjall"
    }

    fn entry(&self) -> &'static str {
        "fjall"
    }

    fn files(&self) -> &'static [&'static str] {
        &["fjall/version"]
    }

    fn log(&self) -> CommitLog {
        CommitLog::Own
    }

    fn open(&self, entry: &Path, store: &str) -> Result<Box<dyn Table>> {
        Ok(Box::new(FjallTable::open(entry, store)?))
    }
}

/// fjall as Margay's programs see it: the line that plugs it in.
pub static DRIVER: LocalDriver<Fjall> = LocalDriver::new(Fjall);
