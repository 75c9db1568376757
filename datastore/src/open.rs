//! From a location to an open store.

use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "etcd")]
use backend_etcd::EtcdStore;
use kv::{Result, Store};
use kv_mvcc::{Blocking, MvccStore, Purpose};

use crate::engines::{self, Opened};
use crate::location::Location;
use crate::served::{self, ServedStore};

/// Whether a store that is not there is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Create {
    /// No: its absence is an error of kind `Missing`.
    Never,
    /// Yes, with its folder and the folders above it.
    IfMissing,
}

/// How a store is opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Opening {
    pub(crate) create: Create,
    pub(crate) purpose: Purpose,
    /// How long to wait for the store lock.
    pub(crate) wait: Duration,
    pub(crate) blocking: Blocking,
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

    /// Checks that a usual commit finds room: on the disk of an embedded store, or in a cluster without an alarm.
    ///
    /// # Errors
    /// `NoSpace` if it does not; `Io` for a disk that cannot be written to; `Corrupt` for a cluster with that alarm; errors
    /// of a call to a cluster.
    pub async fn check_room(&self) -> Result<()> {
        self.opened.check_room().await
    }

    /// The store as an embedded one whose files this process has open; `None` for any other.
    pub fn embedded(&self) -> Option<&MvccStore> {
        match &self.opened {
            Opened::Mvcc(store) => Some(store),
            #[cfg(feature = "etcd")]
            Opened::Etcd(_) => None,
            Opened::Served(_) => None,
        }
    }

    /// The store as one on etcd; `None` for any other.
    #[cfg(feature = "etcd")]
    pub fn etcd(&self) -> Option<&EtcdStore> {
        match &self.opened {
            Opened::Etcd(store) => Some(store),
            Opened::Mvcc(_) | Opened::Served(_) => None,
        }
    }

    /// The store as one that a daemon has; `None` for any other.
    pub fn served(&self) -> Option<&ServedStore> {
        match &self.opened {
            Opened::Served(store) => Some(store),
            _ => None,
        }
    }

    /// Waits for calls in flight and closes the store, also for other holders of a handle; their calls fail with
    /// `Closed`.
    ///
    /// # Errors
    /// The error of the engine. Everything that was acknowledged is durable all the same.
    pub async fn close(self) -> Result<()> {
        self.opened.close().await
    }
}

/// Opens a store. An embedded one is opened by one process at a time; others wait for the lock, for `wait` at the most. A
/// cluster is asked whether it is there, lets us in, and is new enough.
///
/// Must be called on a tokio runtime.
///
/// # Errors
/// `Missing` if there is nothing and `create` says never; `Locked` if the lock was not free in time; `Unsupported` for
/// an engine that this build was made without, and for etcd settings that are none; else the engine's.
pub async fn open(location: &Location, create: Create, wait: Duration) -> Result<OpenStore> {
    open_as(location, Opening { create, purpose: Purpose::Any, wait, blocking: Blocking::OnThreads }).await
}

/// Reaches a store: if a daemon has it, through the daemon, which keeps it; otherwise as [`open`] does. Only an embedded store
/// is reached through a daemon.
///
/// # Errors
/// Those of [`open`].
pub async fn reach(location: &Location, create: Create, wait: Duration) -> Result<OpenStore> {
    match through_daemon(location, wait).await {
        Some(store) => Ok(OpenStore { opened: Opened::Served(store) }),
        None => open(location, create, wait).await,
    }
}

/// Reaches a store that is there as [`reach`] does, to release what is recorded in it.
///
/// # Errors
/// Those of [`open`].
pub async fn reach_to_release(location: &Location, wait: Duration) -> Result<OpenStore> {
    match through_daemon(location, wait).await {
        Some(store) => Ok(OpenStore { opened: Opened::Served(store.to_release()) }),
        None => open_to_release(location, wait).await,
    }
}

async fn through_daemon(location: &Location, wait: Duration) -> Option<ServedStore> {
    location.path()?;
    served::connect(location, wait).await
}

/// Opens a store that is there as [`open`] does, to release addresses that are recorded in it. If its disk is full, it
/// may use for that what is kept on the disk for it.
///
/// # Errors
/// Those of [`open`].
pub async fn open_to_release(location: &Location, wait: Duration) -> Result<OpenStore> {
    let (create, purpose) = (Create::Never, Purpose::Release);
    open_as(location, Opening { create, purpose, wait, blocking: Blocking::OnThreads }).await
}

/// Opens a store as [`open`] does, for a process that does one thing at a time and ends: an embedded store then works
/// on the thread that asks, which saves the cost of other threads. A cluster is not asked anything yet, and `wait` is how
/// long all that is asked of it may take, beginning now.
///
/// # Errors
/// Those of [`open`].
pub async fn open_in_place(location: &Location, create: Create, wait: Duration) -> Result<OpenStore> {
    open_as(location, Opening { create, purpose: Purpose::Any, wait, blocking: Blocking::InPlace }).await
}

/// Opens a store to release addresses that are recorded in it, as [`open_to_release`] does, in the way of
/// [`open_in_place`].
///
/// # Errors
/// Those of [`open`].
pub async fn open_in_place_to_release(location: &Location, wait: Duration) -> Result<OpenStore> {
    let (create, purpose) = (Create::Never, Purpose::Release);
    open_as(location, Opening { create, purpose, wait, blocking: Blocking::InPlace }).await
}

/// Reaches a store as [`reach`] does, and opens it as [`open_in_place`] does if no daemon has it.
///
/// # Errors
/// Those of [`open`].
pub async fn reach_in_place(location: &Location, create: Create, wait: Duration) -> Result<OpenStore> {
    match through_daemon(location, wait).await {
        Some(store) => Ok(OpenStore { opened: Opened::Served(store) }),
        None => open_in_place(location, create, wait).await,
    }
}

/// Reaches a store as [`reach_to_release`] does, and opens it as [`open_in_place_to_release`] does if no daemon has it.
///
/// # Errors
/// Those of [`open`].
pub async fn reach_in_place_to_release(location: &Location, wait: Duration) -> Result<OpenStore> {
    match through_daemon(location, wait).await {
        Some(store) => Ok(OpenStore { opened: Opened::Served(store.to_release()) }),
        None => open_in_place_to_release(location, wait).await,
    }
}

async fn open_as(location: &Location, opening: Opening) -> Result<OpenStore> {
    let opened = match location {
        Location::Sled(path) => engines::sled(path, opening).await?,
        Location::Redb(path) => engines::redb(path, opening).await?,
        Location::Memory => engines::memory(),
        Location::Etcd(etcd) => engines::etcd(etcd, opening).await?,
    };
    Ok(OpenStore { opened })
}
