//! From a location to an open store: one that this process opens, or one that a daemon has. Once the daemon has ended, this process
//! has the store by itself.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use async_trait::async_trait;
use driver::{ClusterStore, Create, Location, OpenOptions, Sharing};
use futures::StreamExt;
use futures::stream::unfold;
use kv::{
    Batch, Error, ErrorKind, Operation, Purpose, RangeRequest, RangeResponse, Result, Revision, Store, Txn,
    TxnResponse, WatchRequest, WatchStream,
};
use kv_mvcc::MvccStore;
use tokio::sync::OnceCell;

use crate::maintenance::open_here;
use crate::served::{self, ServedStore};
use crate::shared_store::{MIN_HOLD_DURATION, SharedStore, SharedStoreOptions};

/// An open store. An embedded one keeps every other process out until it is closed, so close it as soon as possible.
#[derive(Debug)]
pub struct OpenStore {
    opened: OpenKind,
}

#[derive(Debug)]
enum OpenKind {
    /// Its driver has opened it.
    Here(Box<dyn driver::Opened>),
    /// The same, and other processes may have it in between.
    Shared(SharedStore),
    /// A daemon has it, or had it at first.
    Served(ServedOrDirect),
}

impl OpenStore {
    async fn here(location: &Location, options: &OpenOptions) -> Result<Self> {
        Ok(Self { opened: OpenKind::Here(open_here(location, options).await?) })
    }

    /// The store.
    pub fn store(&self) -> Arc<dyn Store> {
        match &self.opened {
            OpenKind::Here(store) => store.store(),
            OpenKind::Shared(store) => Arc::new(store.clone()),
            OpenKind::Served(store) => Arc::new(store.clone()),
        }
    }

    /// Checks that a usual commit finds room: on the disk of an embedded store, or in a cluster without an alarm.
    ///
    /// # Errors
    /// `NoSpace` if it does not; `Io` for a disk that cannot be written to; `Corrupt` for a cluster with that alarm; errors
    /// of a call to a cluster.
    pub async fn check_room(&self) -> Result<()> {
        match &self.opened {
            OpenKind::Here(store) => store.check_room().await,
            OpenKind::Shared(store) => store.check_room().await,
            OpenKind::Served(store) => match store.direct() {
                Some(store) => store.check_room().await,
                None => Ok(()),
            },
        }
    }

    /// The store as an embedded one whose files this process has open until it closes it; `None` for any other.
    pub fn embedded(&self) -> Option<&MvccStore> {
        match &self.opened {
            OpenKind::Here(store) => store.embedded(),
            OpenKind::Shared(_) | OpenKind::Served(_) => None,
        }
    }

    /// The store as a cluster's; `None` for any other.
    pub fn cluster(&self) -> Option<Arc<dyn ClusterStore>> {
        match &self.opened {
            OpenKind::Here(store) => store.cluster(),
            OpenKind::Shared(_) | OpenKind::Served(_) => None,
        }
    }

    /// The store as one that a daemon has, or had when it was opened; `None` for any other.
    pub fn served(&self) -> Option<&ServedStore> {
        match &self.opened {
            OpenKind::Here(_) | OpenKind::Shared(_) => None,
            OpenKind::Served(store) => Some(store.served()),
        }
    }

    /// True if other processes must wait for the store.
    pub fn is_exclusive(&self) -> bool {
        match &self.opened {
            OpenKind::Here(store) => store.embedded().is_some(),
            OpenKind::Shared(_) => true,
            OpenKind::Served(store) => store.direct().is_some(),
        }
    }

    /// Lets other processes have a store that is [held](Sharing::OnRequest), until its next call.
    pub async fn release_store(&self) {
        let shared_store = match &self.opened {
            OpenKind::Shared(store) => Some(store),
            OpenKind::Served(store) => store.direct(),
            OpenKind::Here(_) => None,
        };
        if let Some(store) = shared_store {
            store.release_store().await;
        }
    }

    /// Waits for calls in flight and closes the store, also for other holders of a handle; their calls fail with
    /// `Closed`.
    ///
    /// # Errors
    /// The error of the engine. Everything that was acknowledged is durable all the same.
    pub async fn close(self) -> Result<()> {
        match &self.opened {
            OpenKind::Here(store) => store.close().await,
            OpenKind::Shared(store) => store.end().await,
            OpenKind::Served(store) => match store.direct() {
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
        Sharing::InTurns => (None, Some(MIN_HOLD_DURATION)),
        // All waits of this process together take no longer.
        Sharing::OnRequest => (Instant::now().checked_add(options.wait), None),
    };
    let holding = SharedStoreOptions { until, yields_after, ..SharedStoreOptions::new(options.clone()) };
    if let Some(store) = served::connect(location, options.wait).await {
        let store = if options.purpose == Purpose::Release { store.to_release() } else { store };
        return Ok(OpenStore { opened: OpenKind::Served(ServedOrDirect::new(store, location.clone(), holding)) });
    }
    if options.sharing == Sharing::Served {
        return OpenStore::here(location, options).await;
    }
    let shared_store = SharedStore::begin(location.clone(), holding, options.wait).await?;
    Ok(OpenStore { opened: OpenKind::Shared(shared_store) })
}

/// A store behind a daemon's socket, and the way to it without the daemon. All clones leave the daemon together.
#[derive(Clone)]
struct ServedOrDirect {
    served: ServedStore,
    shared: Arc<DaemonOrDirect>,
}

struct DaemonOrDirect {
    location: Location,
    holding: SharedStoreOptions,
    /// The moment until which this process waits for the store, counted from the first failure of the daemon.
    until: OnceLock<Instant>,
    /// The store as this process has it, once the daemon has ended.
    direct: OnceCell<SharedStore>,
}

impl fmt::Debug for ServedOrDirect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServedOrAlone").field("served", &self.served).finish_non_exhaustive()
    }
}

impl ServedOrDirect {
    pub(crate) fn new(served: ServedStore, location: Location, holding: SharedStoreOptions) -> Self {
        // The store is there, so a folder without one is another place.
        let holding = SharedStoreOptions { options: holding.options.clone().with_create(Create::Never), ..holding };
        let (until, direct) = (OnceLock::new(), OnceCell::new());
        Self { served, shared: Arc::new(DaemonOrDirect { location, holding, until, direct }) }
    }

    /// The store behind the socket.
    pub(crate) fn served(&self) -> &ServedStore {
        &self.served
    }

    /// The store as this process has it; `None` as long as the daemon has it.
    pub(crate) fn direct(&self) -> Option<&SharedStore> {
        self.shared.direct.get()
    }

    /// Opens the store after a request that the daemon has not begun.
    ///
    /// # Errors
    /// The error of the request, if it may have been begun or says something else; those of opening the store;
    /// `RevisionRegressed` if another one is in its place; `Closed` if other processes have it for too long: a
    /// caller asks again after `Locked`.
    async fn open_directly(&self, error: Error) -> Result<&SharedStore> {
        if *error.kind() != ErrorKind::NotSent {
            return Err(error);
        }
        let DaemonOrDirect { location, holding, until, direct } = &*self.shared;
        let until = *until.get_or_init(|| holding.wait_deadline());
        let open = async || {
            tracing::warn!("cannot use the margay daemon ({error}); opening the store directly");
            let wait = until.saturating_duration_since(Instant::now());
            let begun = SharedStore::begin(location.clone(), holding.clone(), wait).await;
            let shared_store = begun.map_err(|error| match error.kind() {
                // With a moment of its own the caller knows when its time is over.
                ErrorKind::Locked if holding.until.is_none() => {
                    Error::new(ErrorKind::Closed, Operation::Open, location.to_string()).with_source(error)
                }
                _ => error,
            })?;
            if shared_store.identity_seen() == *self.served.identity() {
                return Ok(shared_store);
            }
            if let Err(error) = shared_store.end().await {
                tracing::warn!(%error, "the store could not be closed cleanly");
            }
            Err(Error::new(ErrorKind::RevisionRegressed, Operation::Open, location.to_string()))
        };
        direct.get_or_try_init(open).await
    }
}

#[async_trait]
impl Store for ServedOrDirect {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        if let Some(direct) = self.direct() {
            return direct.range(request).await;
        }
        match self.served.range(request.clone()).await {
            Err(error) => self.open_directly(error).await?.range(request).await,
            done => done,
        }
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        if let Some(direct) = self.direct() {
            return direct.txn(txn).await;
        }
        match self.served.txn(txn.clone()).await {
            Err(error) => self.open_directly(error).await?.txn(txn).await,
            done => done,
        }
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        if let Some(direct) = self.direct() {
            return direct.watch(request).await;
        }
        match self.served.watch(request.clone()).await {
            Err(error) => self.open_directly(error).await?.watch(request).await,
            Ok(stream) => {
                let watching = FallbackWatch { store: self.clone(), request, stream: Some(stream) };
                Ok(unfold(watching, FallbackWatch::next).boxed())
            }
        }
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        if let Some(direct) = self.direct() {
            return direct.compact(revision).await;
        }
        match self.served.compact(revision).await {
            Err(error) => self.open_directly(error).await?.compact(revision).await,
            done => done,
        }
    }
}

/// A watch through the daemon, which goes on without it.
struct FallbackWatch {
    store: ServedOrDirect,
    /// The request for what has not come yet.
    request: WatchRequest,
    /// `None` once it has ended.
    stream: Option<WatchStream>,
}

impl FallbackWatch {
    async fn next(mut self) -> Option<(Result<Batch>, Self)> {
        let mut item = self.stream.as_mut()?.next().await?;
        if let Err(error) = &item
            && matches!(error.kind(), ErrorKind::Disconnected { .. })
        {
            item = self.go_on().await;
        }
        match &item {
            Ok(batch) => self.request.start = batch.revision.next(),
            Err(_) => self.stream = None,
        }
        Some((item, self))
    }

    /// Begins the watch anew: of the daemon that was started meanwhile, or without one.
    async fn go_on(&mut self) -> Result<Batch> {
        let mut stream = match self.store.served.watch(self.request.clone()).await {
            Err(error) => self.store.open_directly(error).await?.watch(self.request.clone()).await?,
            Ok(stream) => stream,
        };
        let ended = || Error::new(ErrorKind::Closed, Operation::Watch, self.store.shared.location.to_string());
        let item = stream.next().await.unwrap_or_else(|| Err(ended()));
        self.stream = Some(stream);
        item
    }
}
