//! The example store of `README.md`, tested by the conformance suite. The conformance suite's `README.md` quotes this
//! file.

mod history;

use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use conformance::{Ability, BoxError, Fixture, Harness};
use futures::StreamExt;
use kv::{
    Error, Operation, RangeRequest, RangeResponse, Result, Revision, Store, Txn, TxnResponse, WatchRequest, WatchStream,
};
use tokio::sync::watch;

use crate::history::CallHistory;

const NAME: &str = "mine";

/// An in-memory example store: its history, and a channel that wakes watches.
#[derive(Clone, Debug)]
struct MyStore {
    history: Arc<Mutex<CallHistory>>,
    changed: watch::Sender<()>,
}

impl MyStore {
    fn new() -> Self {
        Self { history: Arc::default(), changed: watch::Sender::new(()) }
    }

    fn history(&self) -> MutexGuard<'_, CallHistory> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Store for MyStore {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        request.check(NAME)?; // the checks that all stores share
        self.history().range(&request).map_err(|kind| Error::new(kind, Operation::Range, NAME))
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        txn.check(NAME)?;
        txn.refuse_leases(NAME)?; // this store has no leases
        let answer = self.history().txn(&txn); // compares, then one branch, at one revision
        self.changed.send_replace(());
        Ok(answer)
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        request.check(NAME)?;
        let cursor = (self.clone(), self.changed.subscribe(), request.start);
        Ok(futures::stream::try_unfold(cursor, move |(store, mut changed, start)| {
            let request = request.clone();
            async move {
                loop {
                    changed.mark_unchanged();
                    let batch = store.history().events(&request, start); // the first revision from `start` on that has events
                    match batch.map_err(|kind| Error::new(kind, Operation::Watch, NAME))? {
                        Some(batch) => {
                            let next = batch.revision.next();
                            return Ok(Some((batch, (store, changed, next))));
                        }
                        None if changed.changed().await.is_err() => return Ok(None),
                        None => {}
                    }
                }
            }
        })
        .boxed())
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        revision.check(NAME)?;
        let compacted = self.history().compact(revision);
        self.changed.send_replace(());
        compacted.map_err(|kind| Error::new(kind, Operation::Compact, NAME))
    }
}

struct Memory; // makes stores

#[derive(Debug)]
struct OneStore(MyStore); // with everything that lives as long: a folder, a server

#[async_trait]
impl Harness for Memory {
    fn abilities(&self) -> &[Ability] {
        &[Ability::New]
    }

    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError> {
        Ok(Box::new(OneStore(MyStore::new())))
    }
}

impl Fixture for OneStore {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.0.clone())
    }
}

fn main() -> ExitCode {
    let ignored: Vec<&str> = include_str!("ignored.txt").lines().collect();
    conformance::main(Memory, &ignored)
}
