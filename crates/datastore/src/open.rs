//! Opens the store at a location, either in this process or through a daemon that has the store open. If the daemon
//! ends while the store is open, this process opens the store directly.

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

/// An open store. While this process has an embedded store open, no other process can open it, so callers should close
/// an `OpenStore` as soon as possible.
#[derive(Debug)]
pub struct OpenStore {
    opened: OpenKind,
}

#[derive(Debug)]
enum OpenKind {
    /// The store was opened in this process, by the store's driver, and stays open until `close`.
    Here(Box<dyn driver::Opened>),
    /// The store was opened in this process, which can close it temporarily for other processes.
    Shared(SharedStore),
    /// The store is reached through a daemon, or this process opened it after that daemon ended.
    Served(ServedOrDirect),
}

impl OpenStore {
    async fn here(location: &Location, options: &OpenOptions) -> Result<Self> {
        Ok(Self { opened: OpenKind::Here(open_here(location, options).await?) })
    }

    /// Returns the handle for reads and writes of the store.
    pub fn store(&self) -> Arc<dyn Store> {
        match &self.opened {
            OpenKind::Here(store) => store.store(),
            OpenKind::Shared(store) => Arc::new(store.clone()),
            OpenKind::Served(store) => Arc::new(store.clone()),
        }
    }

    /// Checks that an ordinary commit has room: that an embedded store has disk space, or that a cluster has raised no
    /// alarm. `check_room` checks nothing while a daemon has the store open.
    ///
    /// # Errors
    /// The error `NoSpace` if there is no room for a commit; `Io` if the disk cannot be written to; `Corrupt` if the
    /// cluster has raised its corruption alarm; any error of a request to the cluster.
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

    /// The embedded store if this process keeps it open until [`close`](Self::close); `None` otherwise.
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

    /// The connection to the daemon through which the store was opened; `None` if the store was opened without a
    /// daemon.
    pub fn served(&self) -> Option<&ServedStore> {
        match &self.opened {
            OpenKind::Here(_) | OpenKind::Shared(_) => None,
            OpenKind::Served(store) => Some(store.served()),
        }
    }

    /// Returns true if other processes cannot use the store until this process closes it.
    pub fn is_exclusive(&self) -> bool {
        match &self.opened {
            OpenKind::Here(store) => store.embedded().is_some(),
            OpenKind::Shared(_) => true,
            OpenKind::Served(store) => store.direct().is_some(),
        }
    }

    /// Closes a [shared](Sharing::OnRequest) store until the next call on it, so that other processes can open it.
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

    /// Waits for running store calls to end, and then closes the store. After `close`, calls on any clone of the
    /// store's handle fail with `Closed`.
    ///
    /// # Errors
    /// The engine's error. Every acknowledged commit is durable, even if closing the store fails.
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

/// Opens the store at a location.
///
/// Only one process at a time can have an embedded store open. A second process waits for the store lock, for at most
/// [`OpenOptions::wait`], or uses the store through the daemon that has it open. [`OpenOptions::sharing`] selects how
/// this process shares the store with other processes. For a cluster, `open` checks that the cluster responds, accepts
/// the login and has a supported version.
///
/// [`Blocking::InPlace`](kv_mvcc::Blocking::InPlace) is for a short-lived process that performs one operation at a
/// time. With `InPlace`, an embedded store does its work on the calling thread, which saves the cost of additional
/// threads. With `InPlace`, `open` sends no request to a cluster, and [`OpenOptions::wait`], counted from the call of
/// `open`, limits the total time of all requests.
///
/// The function `open` must be called on a tokio runtime.
///
/// # Errors
/// `Missing` if there is no store and the options do not allow creating it; `Locked` if the store lock did not become
/// free in time; any other error of the driver.
pub async fn open(location: &Location, options: &OpenOptions) -> Result<OpenStore> {
    if options.sharing == Sharing::Alone || location.path().is_none() {
        return OpenStore::here(location, options).await;
    }
    let (until, yields_after) = match options.sharing {
        Sharing::Alone | Sharing::Served => (None, None),
        Sharing::InTurns => (None, Some(MIN_HOLD_DURATION)),
        // With `Sharing::OnRequest`, `options.wait` limits the total time that this process waits for the store.
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

/// A store that is used through a daemon, and is opened in this process once the daemon has ended. All clones of a
/// `ServedOrDirect` switch from the daemon to the direct store together.
#[derive(Clone)]
struct ServedOrDirect {
    served: ServedStore,
    shared: Arc<DaemonOrDirect>,
}

struct DaemonOrDirect {
    location: Location,
    holding: SharedStoreOptions,
    /// The deadline for this process to get the store lock, set when the daemon first fails.
    until: OnceLock<Instant>,
    /// The store that this process opened after the daemon ended.
    direct: OnceCell<SharedStore>,
}

impl fmt::Debug for ServedOrDirect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServedOrDirect").field("served", &self.served).finish_non_exhaustive()
    }
}

impl ServedOrDirect {
    pub(crate) fn new(served: ServedStore, location: Location, holding: SharedStoreOptions) -> Self {
        // The daemon had a store at this location, so if the store is missing now, this process must not create it.
        let holding = SharedStoreOptions { options: holding.options.clone().with_create(Create::Never), ..holding };
        let (until, direct) = (OnceLock::new(), OnceCell::new());
        Self { served, shared: Arc::new(DaemonOrDirect { location, holding, until, direct }) }
    }

    pub(crate) fn served(&self) -> &ServedStore {
        &self.served
    }

    /// Returns the store as this process has opened it; `None` while the store is reached through the daemon.
    pub(crate) fn direct(&self) -> Option<&SharedStore> {
        self.shared.direct.get()
    }

    /// Opens the store in this process after the daemon has failed without starting on a request.
    ///
    /// # Errors
    /// If `error` is not of the kind `NotSent`, returns `error` unchanged. Otherwise any error of opening the store;
    /// `RevisionRegressed` if a different store is at this location now; `Closed` if other processes keep the store
    /// locked until the deadline. The error kind is `Closed` and not `Locked`, because `Locked` would make the caller
    /// retry.
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
                // A caller that set its own deadline gets `Locked` (other callers get `Closed`), because this caller
                // knows that its deadline has passed.
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

/// A watch through the daemon, which continues without the daemon after the daemon has ended.
struct FallbackWatch {
    store: ServedOrDirect,
    /// The request that resumes the watch after the last received batch.
    request: WatchRequest,
    /// The stream of events of the watch; `None` once the watch has ended.
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

    /// Restarts the watch: through a daemon if one is running by now, otherwise in this process.
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
