//! From a location to an open store.

use std::sync::Arc;
use std::time::Duration;

use kv::{Result, Store};
use kv_mvcc::Blocking;

use crate::engines::{self, Opened};
use crate::location::Location;

/// Whether a store that is not there is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Create {
    /// No: its absence is an error of kind `Missing`.
    Never,
    /// Yes, with its folder and the folders above it.
    IfMissing,
}

/// An open store. An embedded one keeps every other process out until it is closed, so close it as soon as possible.
#[derive(Debug)]
pub struct OpenStore {
    opened: Opened,
}

impl OpenStore {
    /// The store.
    pub fn store(&self) -> Arc<dyn Store> {
        self.opened.store()
    }

    /// Waits for what is in flight and closes the store, whoever else still holds it; their calls fail with `Closed`.
    ///
    /// # Errors
    /// What the engine reports. Everything that was acknowledged is durable all the same.
    pub async fn close(self) -> Result<()> {
        self.opened.close().await
    }
}

/// Opens a store. An embedded one is opened by one process at a time; others wait their turn, for `wait` at the most. A
/// cluster is asked whether it is there, lets us in, and is new enough.
///
/// Must be called on a tokio runtime.
///
/// # Errors
/// `Missing` if there is nothing and `create` says never; `Locked` if the turn did not come in time; `Unsupported` for
/// an engine that this build was made without, and for etcd settings that are none; else the engine's.
pub async fn open(location: &Location, create: Create, wait: Duration) -> Result<OpenStore> {
    open_as(location, create, wait, Blocking::OnThreads).await
}

/// Opens a store as [`open`] does, for a process that does one thing at a time and ends: an embedded store then works
/// on the thread that asks, which saves the cost of other threads, and a cluster is not asked anything.
///
/// # Errors
/// Those of [`open`].
pub async fn open_in_place(location: &Location, create: Create, wait: Duration) -> Result<OpenStore> {
    open_as(location, create, wait, Blocking::InPlace).await
}

async fn open_as(location: &Location, create: Create, wait: Duration, blocking: Blocking) -> Result<OpenStore> {
    let opened = match location {
        Location::Sled(path) => engines::sled(path, create, wait, blocking).await?,
        Location::Redb(path) => engines::redb(path, create, wait, blocking).await?,
        Location::Memory => engines::memory(),
        Location::Etcd(etcd) => engines::etcd(etcd, blocking).await?,
    };
    Ok(OpenStore { opened })
}
