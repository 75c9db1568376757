//! The one place that knows the engines.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kv::{Result, Store};
use kv_mvcc::{Blocking, MvccStore};

use crate::open::Create;

/// An open store, and the handle that closes it.
#[derive(Debug)]
pub(crate) struct Opened {
    store: MvccStore,
}

impl Opened {
    pub(crate) fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.store.clone())
    }

    pub(crate) async fn close(self) -> Result<()> {
        self.store.close().await
    }
}

/// A new, empty store in memory.
pub(crate) fn memory() -> Opened {
    Opened { store: kv_mvcc::memory() }
}

#[cfg(feature = "sled")]
pub(crate) async fn sled(path: &Path, create: Create, wait: Duration, blocking: Blocking) -> Result<Opened> {
    Ok(Opened { store: backend_sled::open(path, &options(create, wait, blocking)).await? })
}

#[cfg(feature = "redb")]
pub(crate) async fn redb(path: &Path, create: Create, wait: Duration, blocking: Blocking) -> Result<Opened> {
    Ok(Opened { store: backend_redb::open(path, &options(create, wait, blocking)).await? })
}

#[cfg(not(feature = "sled"))]
pub(crate) async fn sled(_path: &Path, _create: Create, _wait: Duration, _blocking: Blocking) -> Result<Opened> {
    Err(crate::open::unsupported("sled").with_detail("this build was made without sled"))
}

#[cfg(not(feature = "redb"))]
pub(crate) async fn redb(_path: &Path, _create: Create, _wait: Duration, _blocking: Blocking) -> Result<Opened> {
    Err(crate::open::unsupported("redb").with_detail("this build was made without redb"))
}

#[cfg(any(feature = "sled", feature = "redb"))]
fn options(create: Create, wait: Duration, blocking: Blocking) -> kv_mvcc::local::OpenOptions {
    use kv_mvcc::local;

    let create = match create {
        Create::Never => local::Create::Never,
        Create::IfMissing => local::Create::IfMissing,
    };
    local::OpenOptions::default().with_create(create).with_wait(wait).with_blocking(blocking)
}
