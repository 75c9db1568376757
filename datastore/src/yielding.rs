//! A store that others get whenever they wait for it.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use driver::{Location, OpenOptions};
use kv::{
    Error, ErrorKind, Operation, RangeRequest, RangeResponse, Result, Revision, Store, Txn, TxnResponse, WatchRequest,
    WatchStream,
};
use tokio::sync::{Mutex, MutexGuard};

use crate::care;
use crate::open::{OpenStore, open};

/// How long a reader of much has an embedded store at least; then it releases the store when another process waits.
pub const LEAST_HOLD: Duration = Duration::from_millis(10);

/// A store that is there, for a caller that reads much of it: an embedded one is closed between two calls when others
/// wait for it, and opened again for the next call. A read at one revision stays the same. A cluster stays open.
///
/// A watch ends when the store is closed; so [`watch`](Store::watch) of an embedded store is `Unsupported`.
#[derive(Debug)]
pub struct YieldingStore {
    location: Location,
    wait: Duration,
    held: Mutex<Option<Held>>,
    /// Which embedded store it was at first.
    id: OnceLock<String>,
}

#[derive(Debug)]
struct Held {
    open: OpenStore,
    began: Instant,
}

impl YieldingStore {
    /// Opens the store, and waits for the lock for `wait` at the most, each time.
    ///
    /// # Errors
    /// Those of [`open`].
    pub async fn open(location: &Location, wait: Duration) -> Result<Self> {
        let new = Self { location: location.clone(), wait, held: Mutex::new(None), id: OnceLock::new() };
        let held = new.begin().await?;
        *new.held.lock().await = Some(held);
        Ok(new)
    }

    /// Closes the store.
    ///
    /// # Errors
    /// Those of [`OpenStore::close`].
    pub async fn close(&self) -> Result<()> {
        match self.held.lock().await.take() {
            Some(held) => held.open.close().await,
            None => Ok(()),
        }
    }

    async fn begin(&self) -> Result<Held> {
        let open = open(&self.location, &OpenOptions::default().with_wait(self.wait)).await?;
        if let Some(store) = open.embedded() {
            let id = store.id().to_string();
            if *self.id.get_or_init(|| id.clone()) != id {
                open.close().await?;
                return Err(Error::new(ErrorKind::RevisionRegressed, Operation::Open, self.location.to_string()));
            }
        }
        Ok(Held { open, began: Instant::now() })
    }

    /// The open store, for one call.
    async fn store(&self) -> Result<(MutexGuard<'_, Option<Held>>, Arc<dyn Store>)> {
        let mut guard = self.held.lock().await;
        let held = match guard.take() {
            Some(held) => held,
            None => self.begin().await?,
        };
        let store = guard.insert(held).open.store();
        Ok((guard, store))
    }

    /// Closes the store if it is time.
    async fn end(&self, mut guard: MutexGuard<'_, Option<Held>>) -> Result<()> {
        let is_long = guard.as_ref().is_some_and(|held| held.began.elapsed() >= LEAST_HOLD);
        if is_long
            && care::waiting(&self.location).await? > 0
            && let Some(held) = guard.take()
        {
            held.open.close().await?;
        }
        Ok(())
    }
}

#[async_trait]
impl Store for YieldingStore {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        let (held, store) = self.store().await?;
        let answer = store.range(request).await;
        self.end(held).await?;
        answer
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        let (held, store) = self.store().await?;
        let answer = store.txn(txn).await;
        // The outcome of a transaction counts for more than the end of the lock; the next call reports that.
        _ = self.end(held).await;
        answer
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        if self.location.path().is_some() {
            return Err(Error::new(ErrorKind::Unsupported, Operation::Watch, "a store in turns"));
        }
        let (_turn, store) = self.store().await?;
        store.watch(request).await
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        let (_turn, store) = self.store().await?;
        store.compact(revision).await
    }
}
