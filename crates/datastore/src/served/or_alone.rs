//! A store that a daemon has: once the daemon has ended, this process has the store by itself.

use std::sync::Arc;

use async_trait::async_trait;
use driver::Location;
use kv::{
    Error, ErrorKind, Operation, RangeRequest, RangeResponse, Result, Revision, Store, Txn, TxnResponse, WatchRequest,
    WatchStream,
};
use tokio::sync::OnceCell;

use super::ServedStore;
use crate::held::{Held, Holding};

/// A store behind a daemon's socket, and the way to it without the daemon. Clones go over together.
#[derive(Clone)]
pub(crate) struct ServedOrAlone {
    served: ServedStore,
    shared: Arc<Shared>,
}

struct Shared {
    location: Location,
    holding: Holding,
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
        Self { served, shared: Arc::new(Shared { location, holding, alone: OnceCell::new() }) }
    }

    /// The store behind the socket.
    pub(crate) fn served(&self) -> &ServedStore {
        &self.served
    }

    /// The store as this process has it; `None` as long as the daemon has it.
    pub(crate) fn alone(&self) -> Option<&Held> {
        self.shared.alone.get()
    }

    /// The store without the daemon, after a request that the daemon has not begun.
    ///
    /// # Errors
    /// The error of the request, if it may have been begun or says something else; those of opening the store;
    /// `RevisionRegressed` if another one is in its place.
    async fn after(&self, error: Error, operation: Operation) -> Result<&Held> {
        if *error.kind() != ErrorKind::NotSent {
            return Err(error);
        }
        let open = async || {
            tracing::warn!(%error, "the daemon margay serve is of no use any more; going on without it");
            let Shared { location, holding, .. } = &*self.shared;
            let held = Held::begin(location.clone(), holding.clone()).await?;
            if held.id() != self.served.id() {
                held.end().await?;
                return Err(Error::new(ErrorKind::RevisionRegressed, operation, location.to_string()));
            }
            Ok(held)
        };
        self.shared.alone.get_or_try_init(open).await
    }
}

#[async_trait]
impl Store for ServedOrAlone {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        if let Some(alone) = self.alone() {
            return alone.range(request).await;
        }
        match self.served.range(request.clone()).await {
            Err(error) => self.after(error, Operation::Range).await?.range(request).await,
            done => done,
        }
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        if let Some(alone) = self.alone() {
            return alone.txn(txn).await;
        }
        match self.served.txn(txn.clone()).await {
            Err(error) => self.after(error, Operation::Txn).await?.txn(txn).await,
            done => done,
        }
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        if let Some(alone) = self.alone() {
            return alone.watch(request).await;
        }
        match self.served.watch(request.clone()).await {
            Err(error) => self.after(error, Operation::Watch).await?.watch(request).await,
            done => done,
        }
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        if let Some(alone) = self.alone() {
            return alone.compact(revision).await;
        }
        match self.served.compact(revision).await {
            Err(error) => self.after(error, Operation::Compact).await?.compact(revision).await,
            done => done,
        }
    }
}
