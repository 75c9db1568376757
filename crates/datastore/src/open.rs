//! Opens a location, either in this process or through the daemon that has the store open. If the daemon ends, this
//! process opens the store directly.

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

/// An open store. While an embedded store is open, no other process can open it, so close it as soon as possible.
#[derive(Debug)]
pub struct OpenStore {
    opened: OpenKind,
}

#[derive(Debug)]
enum OpenKind {
    /// Opened by its driver in this process.
    Here(Box<dyn driver::Opened>),
    /// Opened in this process, and closed now and then for other processes.
    Shared(SharedStore),
    /// Reached through a daemon, or opened directly after the daemon ended.
    Served(ServedOrDirect),
}

impl OpenStore {
    async fn here(location: &Location, options: &OpenOptions) -> Result<Self> {
        Ok(Self { opened: OpenKind::Here(open_here(location, options).await?) })
    }

    /// The store for reads and writes.
    pub fn store(&self) -> Arc<dyn Store> {
        match &self.opened {
            OpenKind::Here(store) => store.store(),
            OpenKind::Shared(store) => Arc::new(store.clone()),
            OpenKind::Served(store) => Arc::new(store.clone()),
        }
    }

    /// Checks that an ordinary commit has room: on the disk of an embedded store, or in a cluster without an alarm.
    /// Does nothing while a daemon has the store.
    ///
    /// # Errors
    /// `NoSpace` if there is no room; `Io` if the disk cannot be written to; `Corrupt` if the cluster has that alarm;
    /// any error of a request to the cluster.
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

    /// The embedded store that this process keeps open until it is closed; `None` for any other store.
    pub fn embedded(&self) -> Option<&MvccStore> {
        match &self.opened {
            OpenKind::Here(store) => store.embedded(),
            OpenKind::Shared(_) | OpenKind::Served(_) => None,
        }
    }

    /// The store's cluster operations; `None` if the store is not a cluster.
    pub fn cluster(&self) -> Option<Arc<dyn ClusterStore>> {
        match &self.opened {
            OpenKind::Here(store) => store.cluster(),
            OpenKind::Shared(_) | OpenKind::Served(_) => None,
        }
    }

    /// The connection to the daemon through which the store was opened; `None` if it was opened without a daemon.
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

    /// Closes a [shared](Sharing::OnRequest) store for other processes until the next call.
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

    /// Waits for calls in flight and closes the store. Calls of other clones fail with `Closed` from then on.
    ///
    /// # Errors
    /// The engine's error. Every acknowledged commit is durable even then.
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

/// Opens a store.
///
/// An embedded store is open in one process at a time. Other processes wait for its lock, at most
/// [`OpenOptions::wait`], unless a daemon has the store open. [`OpenOptions::sharing`] selects how this process shares
/// the store. For a cluster, this checks that the cluster answers, accepts the login and is new enough.
///
/// [`Blocking::InPlace`](kv_mvcc::Blocking::InPlace) is for a short-lived process that does one thing at a time. An
/// embedded store then works on the calling thread, which saves the cost of other threads. A cluster gets no request
/// yet; `wait` limits the total time of all its requests, counted from now.
///
/// Must be called on a tokio runtime.
///
/// # Errors
/// `Missing` if there is no store and the options create none; `Locked` if the lock was not free in time; else the
/// driver's error.
pub async fn open(location: &Location, options: &OpenOptions) -> Result<OpenStore> {
    if options.sharing == Sharing::Alone || location.path().is_none() {
        return OpenStore::here(location, options).await;
    }
    let (until, yields_after) = match options.sharing {
        Sharing::Alone | Sharing::Served => (None, None),
        Sharing::InTurns => (None, Some(MIN_HOLD_DURATION)),
        // The waits of this process together take at most `wait`.
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

/// A store that is reached through a daemon, and opened directly once the daemon has ended. All clones switch together.
#[derive(Clone)]
struct ServedOrDirect {
    served: ServedStore,
    shared: Arc<DaemonOrDirect>,
}

struct DaemonOrDirect {
    location: Location,
    holding: SharedStoreOptions,
    /// The deadline of this process's wait for the store, set by the daemon's first failure.
    until: OnceLock<Instant>,
    /// The store opened in this process, once the daemon has ended.
    direct: OnceCell<SharedStore>,
}

impl fmt::Debug for ServedOrDirect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServedOrAlone").field("served", &self.served).finish_non_exhaustive()
    }
}

impl ServedOrDirect {
    pub(crate) fn new(served: ServedStore, location: Location, holding: SharedStoreOptions) -> Self {
        // The daemon had a store here, so a missing store is an error and must not be created.
        let holding = SharedStoreOptions { options: holding.options.clone().with_create(Create::Never), ..holding };
        let (until, direct) = (OnceLock::new(), OnceCell::new());
        Self { served, shared: Arc::new(DaemonOrDirect { location, holding, until, direct }) }
    }

    /// The connection to the daemon.
    pub(crate) fn served(&self) -> &ServedStore {
        &self.served
    }

    /// The store opened in this process; `None` while the daemon has it.
    pub(crate) fn direct(&self) -> Option<&SharedStore> {
        self.shared.direct.get()
    }

    /// Opens the store in this process after a request that the daemon has not begun.
    ///
    /// # Errors
    /// `error` itself, unless its kind is `NotSent`; any error of opening the store; `RevisionRegressed` if another
    /// store is at this location now; `Closed` if other processes have the store for too long. (`Locked` would make the
    /// caller retry.)
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
                // A caller that set its own deadline can see when its time is over.
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

/// A watch through the daemon that continues without it.
struct FallbackWatch {
    store: ServedOrDirect,
    /// The request for the batches that have not arrived yet.
    request: WatchRequest,
    /// `None` once the watch has ended.
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

    /// Restarts the watch: with a daemon that was started meanwhile, or in this process.
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
