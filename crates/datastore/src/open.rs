//! From a location to an open store.

use std::sync::Arc;
use std::time::Instant;

use driver::{ClusterStore, Location, OpenOptions, Sharing};
use kv::{Purpose, Result, Store};
use kv_mvcc::MvccStore;

use crate::held::{Held, Holding, LEAST_HOLD};
use crate::here::open_here;
use crate::served::{self, ServedOrAlone, ServedStore};

/// An open store. An embedded one keeps every other process out until it is closed, so close it as soon as possible.
#[derive(Debug)]
pub struct OpenStore {
    opened: Opened,
}

#[derive(Debug)]
enum Opened {
    /// Its driver has opened it.
    Here(Box<dyn driver::Opened>),
    /// The same, and other processes may have it in between.
    Held(Held),
    /// A daemon has it, or had it at first.
    Served(ServedOrAlone),
}

impl OpenStore {
    async fn here(location: &Location, options: &OpenOptions) -> Result<Self> {
        Ok(Self { opened: Opened::Here(open_here(location, options).await?) })
    }

    /// The store.
    pub fn store(&self) -> Arc<dyn Store> {
        match &self.opened {
            Opened::Here(store) => store.store(),
            Opened::Held(store) => Arc::new(store.clone()),
            Opened::Served(store) => Arc::new(store.clone()),
        }
    }

    /// Checks that a usual commit finds room: on the disk of an embedded store, or in a cluster without an alarm.
    ///
    /// # Errors
    /// `NoSpace` if it does not; `Io` for a disk that cannot be written to; `Corrupt` for a cluster with that alarm; errors
    /// of a call to a cluster.
    pub async fn check_room(&self) -> Result<()> {
        match &self.opened {
            Opened::Here(store) => store.check_room().await,
            Opened::Held(store) => store.check_room().await,
            Opened::Served(store) => match store.alone() {
                Some(store) => store.check_room().await,
                None => Ok(()),
            },
        }
    }

    /// The store as an embedded one whose files this process has open until it closes it; `None` for any other.
    pub fn embedded(&self) -> Option<&MvccStore> {
        match &self.opened {
            Opened::Here(store) => store.embedded(),
            Opened::Held(_) | Opened::Served(_) => None,
        }
    }

    /// The store as a cluster's; `None` for any other.
    pub fn cluster(&self) -> Option<Arc<dyn ClusterStore>> {
        match &self.opened {
            Opened::Here(store) => store.cluster(),
            Opened::Held(_) | Opened::Served(_) => None,
        }
    }

    /// The store as one that a daemon has, or had when it was opened; `None` for any other.
    pub fn served(&self) -> Option<&ServedStore> {
        match &self.opened {
            Opened::Here(_) | Opened::Held(_) => None,
            Opened::Served(store) => Some(store.served()),
        }
    }

    /// True if other processes must wait for the store.
    pub fn is_exclusive(&self) -> bool {
        match &self.opened {
            Opened::Here(store) => store.embedded().is_some(),
            Opened::Held(_) => true,
            Opened::Served(store) => store.alone().is_some(),
        }
    }

    /// Lets other processes have a store that is [held](Sharing::OnRequest), until its next call.
    pub async fn put_down(&self) {
        let held = match &self.opened {
            Opened::Held(store) => Some(store),
            Opened::Served(store) => store.alone(),
            Opened::Here(_) => None,
        };
        if let Some(store) = held {
            store.put_down().await;
        }
    }

    /// Waits for calls in flight and closes the store, also for other holders of a handle; their calls fail with
    /// `Closed`.
    ///
    /// # Errors
    /// The error of the engine. Everything that was acknowledged is durable all the same.
    pub async fn close(self) -> Result<()> {
        match &self.opened {
            Opened::Here(store) => store.close().await,
            Opened::Held(store) => store.end().await,
            Opened::Served(store) => match store.alone() {
                Some(store) => store.end().await,
                None => Ok(()),
            },
        }
    }
}

/// Opens a store. An embedded one is open in one process at a time: others wait for the lock, for [`OpenOptions::wait`] at the
/// most, unless a daemon has it; [`OpenOptions::sharing`] says how this process has it. A cluster is asked whether it is there, lets
/// us in, and is new enough.
///
/// [`Blocking::InPlace`](kv_mvcc::Blocking::InPlace) is for a process that does one thing at a time and ends: an embedded store
/// then works on the thread that asks, which saves the cost of other threads; a cluster is not asked anything yet, and `wait` is
/// how long all that is asked of it may take, beginning now.
///
/// Must be called on a tokio runtime.
///
/// # Errors
/// `Missing` if there is nothing and the options make nothing; `Locked` if the lock was not free in time; else the driver's.
pub async fn open(location: &Location, options: &OpenOptions) -> Result<OpenStore> {
    if options.sharing == Sharing::Alone || location.path().is_none() {
        return OpenStore::here(location, options).await;
    }
    let (until, yields_after) = match options.sharing {
        Sharing::Alone | Sharing::Served => (None, None),
        Sharing::InTurns => (None, Some(LEAST_HOLD)),
        // All waits of this process together take no longer.
        Sharing::OnRequest => (Instant::now().checked_add(options.wait), None),
    };
    let holding = Holding { until, yields_after, ..Holding::new(options.clone()) };
    if let Some(store) = served::connect(location, options.wait).await {
        let store = if options.purpose == Purpose::Release { store.to_release() } else { store };
        return Ok(OpenStore { opened: Opened::Served(ServedOrAlone::new(store, location.clone(), holding)) });
    }
    if options.sharing == Sharing::Served {
        return OpenStore::here(location, options).await;
    }
    let held = Held::begin(location.clone(), holding, options.wait).await?;
    Ok(OpenStore { opened: Opened::Held(held) })
}
