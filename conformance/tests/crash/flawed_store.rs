//! Wraps a store in a layer that injects faults; the faults are not in the store's table of rows.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use async_trait::async_trait;
use kv::{
    Error, ErrorKind, Operation, Outcome, RangeRequest, RangeResponse, Result, Revision, Store, Txn, TxnResponse,
    WatchRequest, WatchStream,
};

use crate::breakage::Breakage;

/// A correct store with one injected fault.
#[derive(Debug)]
pub(crate) struct FlawedStore {
    inner: Arc<dyn Store>,
    way: Breakage,
    txns: AtomicU64,
    /// The `revision` of the last `compact` call on this wrapper.
    mark: AtomicI64,
}

impl FlawedStore {
    pub(crate) fn around(inner: Arc<dyn Store>, way: Breakage) -> Arc<dyn Store> {
        Arc::new(Self { inner, way, txns: AtomicU64::new(0), mark: AtomicI64::new(0) })
    }

    fn check(&self, revision: Revision, operation: Operation) -> Result<()> {
        let mark = self.mark.load(Ordering::SeqCst);
        if revision.is_set() && revision.get() < mark {
            let kind = ErrorKind::Compacted { compact_revision: Revision::new(mark) };
            return Err(Error::new(kind, operation, "odd"));
        }
        Ok(())
    }
}

#[async_trait]
impl Store for FlawedStore {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        self.check(request.at, Operation::Range)?;
        self.inner.range(request).await
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        if self.way == Breakage::OpByOp && txn.compares.is_empty() {
            let mut last = None;
            for op in txn.success {
                last = Some(self.inner.txn(Txn::new().with_success([op])).await?);
            }
            return last.ok_or_else(|| Error::new(ErrorKind::Unsupported, Operation::Txn, "odd"));
        }
        let answer = self.inner.txn(txn).await;
        if self.way == Breakage::CallsItNotApplied && self.txns.fetch_add(1, Ordering::Relaxed) % 50 == 49 {
            return Err(Error::new(ErrorKind::CommitIo, Operation::Txn, "odd").with_outcome(Outcome::NotApplied));
        }
        answer
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        self.check(request.start, Operation::Watch)?;
        self.inner.watch(request).await
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        if self.way != Breakage::ForgetsMark {
            return self.inner.compact(revision).await;
        }
        self.check(revision.next(), Operation::Compact)?;
        self.mark.store(revision.get(), Ordering::SeqCst);
        Ok(())
    }
}
