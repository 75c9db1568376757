//! A store that others get whenever they wait for it.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use kv::{
    Error, ErrorKind, Operation, RangeRequest, RangeResponse, Result, Revision, Store, Txn, TxnResponse, WatchRequest,
    WatchStream,
};
use tokio::sync::{Mutex, MutexGuard};

use crate::care;
use crate::location::Location;
use crate::open::{Create, OpenStore, open};

/// How long a reader of much has an embedded store at least; then it releases the store when another process waits.
pub const TURN: Duration = Duration::from_millis(10);

/// A store that is there, for a caller that reads much of it: an embedded one is closed between two calls when others
/// wait for it, and opened again for the next call. A read at one revision stays the same. A cluster stays open.
///
/// A watch is only good within a turn; so [`watch`](Store::watch) of an embedded store is `Unsupported`.
#[derive(Debug)]
pub struct Turns {
    location: Location,
    wait: Duration,
    turn: Mutex<Option<Turn>>,
    /// Which embedded store it was at first.
    id: OnceLock<String>,
}

#[derive(Debug)]
struct Turn {
    open: OpenStore,
    began: Instant,
}

impl Turns {
    /// Opens the store, and waits for each turn for `wait` at the most.
    ///
    /// # Errors
    /// Those of [`open`].
    pub async fn open(location: &Location, wait: Duration) -> Result<Self> {
        let new = Self { location: location.clone(), wait, turn: Mutex::new(None), id: OnceLock::new() };
        let turn = new.begin().await?;
        *new.turn.lock().await = Some(turn);
        Ok(new)
    }

    /// Closes the store.
    ///
    /// # Errors
    /// Those of [`OpenStore::close`].
    pub async fn close(&self) -> Result<()> {
        match self.turn.lock().await.take() {
            Some(turn) => turn.open.close().await,
            None => Ok(()),
        }
    }

    async fn begin(&self) -> Result<Turn> {
        let open = open(&self.location, Create::Never, self.wait).await?;
        if let Some(store) = open.embedded() {
            let id = store.id().to_string();
            if *self.id.get_or_init(|| id.clone()) != id {
                open.close().await?;
                return Err(Error::new(ErrorKind::RevisionRegressed, Operation::Open, self.location.to_string()));
            }
        }
        Ok(Turn { open, began: Instant::now() })
    }

    /// The open store, for one call.
    async fn store(&self) -> Result<(MutexGuard<'_, Option<Turn>>, Arc<dyn Store>)> {
        let mut held = self.turn.lock().await;
        let turn = match held.take() {
            Some(turn) => turn,
            None => self.begin().await?,
        };
        let store = held.insert(turn).open.store();
        Ok((held, store))
    }

    /// Gives the store back if it is time.
    async fn end(&self, mut held: MutexGuard<'_, Option<Turn>>) -> Result<()> {
        let is_long = held.as_ref().is_some_and(|turn| turn.began.elapsed() >= TURN);
        if is_long
            && care::waiting(&self.location).await? > 0
            && let Some(turn) = held.take()
        {
            turn.open.close().await?;
        }
        Ok(())
    }
}

#[async_trait]
impl Store for Turns {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        let (turn, store) = self.store().await?;
        let answer = store.range(request).await;
        self.end(turn).await?;
        answer
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        let (turn, store) = self.store().await?;
        let answer = store.txn(txn).await;
        // The outcome of a transaction counts for more than the end of the lock; the next call reports that.
        _ = self.end(turn).await;
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
