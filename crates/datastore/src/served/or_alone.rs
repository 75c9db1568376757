//! A store that a daemon has: once the daemon has ended, this process has the store by itself.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use async_trait::async_trait;
use driver::{Create, Location};
use futures::StreamExt;
use futures::stream::unfold;
use kv::{
    Batch, Error, ErrorKind, Operation, RangeRequest, RangeResponse, Result, Revision, Store, Txn, TxnResponse,
    WatchRequest, WatchStream,
};
use tokio::sync::OnceCell;

use super::ServedStore;
use crate::held::{Held, Holding};

/// A store behind a daemon's socket, and the way to it without the daemon. All clones leave the daemon together.
#[derive(Clone)]
pub(crate) struct ServedOrAlone {
    served: ServedStore,
    shared: Arc<Shared>,
}

struct Shared {
    location: Location,
    holding: Holding,
    /// The moment until which this process waits for the store, counted from the first failure of the daemon.
    until: OnceLock<Instant>,
    /// The store as this process has it, once the daemon has ended.
    alone: OnceCell<Held>,
}

impl std::fmt::Debug for ServedOrAlone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServedOrAlone").field("served", &self.served).finish_non_exhaustive()
    }
}

impl ServedOrAlone {
    pub(crate) fn new(served: ServedStore, location: Location, holding: Holding) -> Self {
        // The store is there, so a folder without one is another place.
        let holding = Holding { options: holding.options.clone().with_create(Create::Never), ..holding };
        let (until, alone) = (OnceLock::new(), OnceCell::new());
        Self { served, shared: Arc::new(Shared { location, holding, until, alone }) }
    }

    /// The store behind the socket.
    pub(crate) fn served(&self) -> &ServedStore {
        &self.served
    }

    /// The store as this process has it; `None` as long as the daemon has it.
    pub(crate) fn alone(&self) -> Option<&Held> {
        self.shared.alone.get()
    }

    /// Opens the store after a request that the daemon has not begun.
    ///
    /// # Errors
    /// The error of the request, if it may have been begun or says something else; those of opening the store;
    /// `RevisionRegressed` if another one is in its place; `Closed` if other processes have it for too long: a
    /// caller asks again after `Locked`.
    async fn open_directly(&self, error: Error) -> Result<&Held> {
        if *error.kind() != ErrorKind::NotSent {
            return Err(error);
        }
        let Shared { location, holding, until, alone } = &*self.shared;
        let until = *until.get_or_init(|| holding.patience());
        let open = async || {
            tracing::warn!("cannot use the margay daemon ({error}); opening the store directly");
            let wait = until.saturating_duration_since(Instant::now());
            let begun = Held::begin(location.clone(), holding.clone(), wait).await;
            let held = begun.map_err(|error| match error.kind() {
                // With a moment of its own the caller knows when its time is over.
                ErrorKind::Locked if holding.until.is_none() => {
                    Error::new(ErrorKind::Closed, Operation::Open, location.to_string()).with_source(error)
                }
                _ => error,
            })?;
            if held.identity_seen() == *self.served.identity() {
                return Ok(held);
            }
            if let Err(error) = held.end().await {
                tracing::warn!(%error, "the store could not be closed cleanly");
            }
            Err(Error::new(ErrorKind::RevisionRegressed, Operation::Open, location.to_string()))
        };
        alone.get_or_try_init(open).await
    }
}

#[async_trait]
impl Store for ServedOrAlone {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        if let Some(alone) = self.alone() {
            return alone.range(request).await;
        }
        match self.served.range(request.clone()).await {
            Err(error) => self.open_directly(error).await?.range(request).await,
            done => done,
        }
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        if let Some(alone) = self.alone() {
            return alone.txn(txn).await;
        }
        match self.served.txn(txn.clone()).await {
            Err(error) => self.open_directly(error).await?.txn(txn).await,
            done => done,
        }
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        if let Some(alone) = self.alone() {
            return alone.watch(request).await;
        }
        match self.served.watch(request.clone()).await {
            Err(error) => self.open_directly(error).await?.watch(request).await,
            Ok(stream) => {
                let watching = Watching { store: self.clone(), request, stream: Some(stream) };
                Ok(unfold(watching, Watching::next).boxed())
            }
        }
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        if let Some(alone) = self.alone() {
            return alone.compact(revision).await;
        }
        match self.served.compact(revision).await {
            Err(error) => self.open_directly(error).await?.compact(revision).await,
            done => done,
        }
    }
}

/// A watch through the daemon, which goes on without it.
struct Watching {
    store: ServedOrAlone,
    /// The request for what has not come yet.
    request: WatchRequest,
    /// `None` once it has ended.
    stream: Option<WatchStream>,
}

impl Watching {
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
