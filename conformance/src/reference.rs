//! Presents the in-memory model of a store as a store. The tests of this crate use the reference store as a correct
//! store, and as the base of broken stores.

use std::sync::{Arc, Mutex, MutexGuard};

use async_trait::async_trait;
use futures::StreamExt;
use kv::{
    Batch, Error, Operation, Progress, RangeRequest, RangeResponse, Result, Revision, Store, Txn, TxnResponse,
    WatchRequest, WatchStream,
};
use tokio::sync::watch;

use crate::harness::{Ability, BoxError, Fixture, Harness};
use crate::model::Model;

const NAME: &str = "reference";

#[derive(Debug)]
struct SharedModel {
    model: Mutex<Model>,
    changed: watch::Sender<()>,
}

#[derive(Clone, Debug)]
pub(crate) struct ReferenceStore(Arc<SharedModel>);

impl ReferenceStore {
    pub(crate) fn new() -> Self {
        let model = Mutex::new(Model::new(Revision::new(1)));
        Self(Arc::new(SharedModel { model, changed: watch::Sender::new(()) }))
    }

    fn model(&self) -> MutexGuard<'_, Model> {
        self.0.model.lock().unwrap()
    }
}

#[async_trait]
impl Store for ReferenceStore {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        request.check(NAME)?;
        self.model().range(&request).map_err(|kind| Error::new(kind, Operation::Range, NAME))
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        txn.check(NAME)?;
        txn.refuse_leases(NAME)?;
        let answer = self.model().txn(&txn);
        self.0.changed.send_replace(());
        Ok(answer)
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        request.check(NAME)?;
        let changed = self.0.changed.subscribe();
        let cursor = Some((self.clone(), request.start, request, changed));
        Ok(futures::stream::unfold(cursor, |cursor| async {
            let (store, from, request, mut changed) = cursor?;
            loop {
                changed.mark_unchanged();
                let next = store.model().next_batch(&request, from);
                match next {
                    Ok(Some(batch)) => {
                        let from = batch.revision.next();
                        return Some((Ok(batch), Some((store, from, request, changed))));
                    }
                    Ok(None) if request.progress == Progress::Report && store.model().revision() >= from => {
                        let reached = store.model().revision();
                        return Some((Ok(Batch::progress(reached)), Some((store, reached.next(), request, changed))));
                    }
                    Ok(None) => changed.changed().await.ok()?,
                    Err(kind) => return Some((Err(Error::new(kind, Operation::Watch, NAME)), None)),
                }
            }
        })
        .boxed())
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        let compacted = self.model().compact(revision);
        self.0.changed.send_replace(());
        compacted.map_err(|kind| Error::new(kind, Operation::Compact, NAME))
    }
}

/// Makes reference stores. Reopening the reference store keeps its model.
#[derive(Debug)]
pub(crate) struct ReferenceHarness;

#[async_trait]
impl Harness for ReferenceHarness {
    fn abilities(&self) -> &[Ability] {
        &[Ability::New, Ability::Reopen, Ability::Progress]
    }

    async fn fresh(&self) -> Result<Box<dyn Fixture>, BoxError> {
        Ok(Box::new(ReferenceStore::new()))
    }
}

#[async_trait]
impl Fixture for ReferenceStore {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.clone())
    }

    async fn reopen(&mut self) -> Result<(), BoxError> {
        Ok(())
    }
}
