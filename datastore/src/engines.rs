//! The one place that knows the engines.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kv::{Result, Store};

use crate::open::{Create, unsupported};

/// A store, and what closes it.
#[derive(Debug)]
pub(crate) struct Opened {}

impl Opened {
    pub(crate) fn store(&self) -> Arc<dyn Store> {
        unreachable!("no engine yet")
    }

    pub(crate) async fn close(self) -> Result<()> {
        Ok(())
    }
}

pub(crate) async fn sled(_path: &Path, _create: Create, _wait: Duration) -> Result<Opened> {
    Err(unsupported("sled").with_detail("this build has no sled"))
}

pub(crate) async fn redb(_path: &Path, _create: Create, _wait: Duration) -> Result<Opened> {
    Err(unsupported("redb").with_detail("this build has no redb"))
}

pub(crate) fn memory() -> Result<Opened> {
    Err(unsupported("memory").with_detail("this build has no memory store"))
}
