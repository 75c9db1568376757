//! A store on sled: a folder of log segments.
//!
//! The store is a folder; see [`kv_mvcc::local`] for what is in it and who may use it when.

mod error;
mod table;

use std::path::Path;

use kv::Result;
use kv_mvcc::Table;
use kv_mvcc::local::Engine;

/// sled, as an engine of [`kv_mvcc::local`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Sled;

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

    fn open(&self, entry: &Path, store: &str) -> Result<Box<dyn Table>> {
        Ok(Box::new(table::SledTable::open(entry, store)?))
    }
}
