//! How a worker gets at the store: it has it open all the time, or opens it for each operation, as the plugin does, or connects to
//! a daemon for each operation, and opens the store if there is none.

use std::sync::Arc;
use std::time::Duration;

use backend_etcd::{EtcdStore, Options};
use datastore::served::connect;
use datastore::{Create, Location, OpenOptions, OpenStore};
use ipam_core::Ipam;
use ipam_core::intents::Intents;
use kv::{Result, Store};

use crate::faults::{Newest, Observed};
use crate::scene;

/// How long a process waits for the lock.
const LOCK_WAIT: Duration = Duration::from_secs(60);

/// The options with which an embedded store is opened.
pub(crate) fn open_options(create: Create) -> OpenOptions {
    create.with_wait(LOCK_WAIT)
}

/// Opens an embedded store.
pub(crate) async fn open(location: &Location, create: Create) -> Result<OpenStore> {
    datastore::open(location, &open_options(create)).await
}

/// A client of an etcd. It gives up on a call that takes long, so that servers that stand still are noticed.
pub(crate) fn open_etcd(url: &str) -> Result<Arc<dyn Store>> {
    let options = Options::new([url]).with_call_timeout(Duration::from_secs(2));
    Ok(Arc::new(EtcdStore::open(&options)?))
}

/// A store that a worker can get at.
#[derive(Clone, Debug)]
pub(crate) enum Access {
    /// It is open.
    Open(Ipam, Newest),
    /// It is in a folder, and one process has it at a time.
    Folder(Location, Newest),
    /// The same, and that process may be a daemon.
    Served(Location, Newest),
}

/// The store, for one operation.
pub(crate) struct Session {
    pub(crate) ipam: Ipam,
    opened: Option<OpenStore>,
    /// Whether a daemon has the store.
    pub(crate) is_served: bool,
}

impl Access {
    /// A store that is open, where what is about to be done is noted.
    pub(crate) fn open(store: Arc<dyn Store>, newest: Newest, intents: Arc<dyn Intents>) -> Self {
        Self::Open(scene::allocator(store).with_intents(intents), newest)
    }

    /// How far the store is, as far as is known here.
    pub(crate) fn newest(&self) -> i64 {
        match self {
            Self::Open(_, newest) | Self::Folder(_, newest) | Self::Served(_, newest) => newest.get(),
        }
    }

    /// Gets at it.
    pub(crate) async fn begin(&self) -> Result<Session> {
        match self {
            Self::Open(ipam, _) => Ok(Session { ipam: ipam.clone(), opened: None, is_served: false }),
            Self::Served(location, newest) => {
                if let Some(served) = connect(location, LOCK_WAIT).await {
                    let store = Observed::new(Arc::new(served), newest.clone());
                    return Ok(Session { ipam: scene::allocator(Arc::new(store)), opened: None, is_served: true });
                }
                Box::pin(Self::Folder(location.clone(), newest.clone()).begin()).await
            }
            Self::Folder(location, newest) => {
                let opened = open(location, Create::Never).await?;
                let store = Observed::new(opened.store(), newest.clone());
                Ok(Session { ipam: scene::allocator(Arc::new(store)), opened: Some(opened), is_served: false })
            }
        }
    }
}

impl Session {
    /// Lets go of it.
    pub(crate) async fn end(self) -> Result<()> {
        match self.opened {
            Some(store) => store.close().await,
            None => Ok(()),
        }
    }
}
