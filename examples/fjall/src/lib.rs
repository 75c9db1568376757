//! A key-value store on fjall, a log-structured merge tree in pure Rust. This example shows that the trait
//! [`kv_mvcc::Table`] also fits an engine that works differently from [SQLite](https://sqlite.org). The module
//! `table.rs` keeps the store's rows in one fjall keyspace.

mod error;
mod table;

use std::path::Path;

use driver::LocalDriver;
use kv::Result;
use kv_local::{CommitLog, Engine};
use kv_mvcc::Table;

pub use table::FjallTable;

/// The fjall engine for [`kv_local`] that keeps a store's rows in fjall.
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

/// The driver through which Margay's programs use fjall.
pub static DRIVER: LocalDriver<Fjall> = LocalDriver::new(Fjall);
