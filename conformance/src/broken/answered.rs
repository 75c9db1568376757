//! Broken stores that return false answers to their callers.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use async_trait::async_trait;
use kv::{
    Error, ErrorKind, Op, OpResult, Operation, RangeRequest, RangeResponse, Result, Revision, Store, Txn, TxnResponse,
};
use tokio::task::yield_now;

use super::Twist;

/// A counter that selects every fourth call of a store.
#[derive(Debug, Default)]
struct EveryFewCalls(AtomicU64);

impl EveryFewCalls {
    fn is_now(&self) -> bool {
        self.0.fetch_add(1, Ordering::Relaxed) % 4 == 3
    }
}

/// Returns true for a transaction that certainly writes, because it has no compares and contains only puts.
fn only_puts(txn: &Txn) -> bool {
    let put = |op: &Op| matches!(op, Op::Put { .. });
    txn.compares.is_empty() && !txn.success.is_empty() && txn.success.iter().all(put) && txn.check("broken").is_ok()
}

#[derive(Debug, Default)]
pub(super) struct StaleWhileOthersWrite;

/// The number of transactions that currently run on the broken store, over all its handles.
static WRITING: AtomicUsize = AtomicUsize::new(0);

#[async_trait]
impl Twist for StaleWhileOthersWrite {
    async fn range(&self, inner: &dyn Store, request: RangeRequest) -> Result<RangeResponse> {
        let now = inner.range(request.clone()).await?;
        if request.at.is_set() || WRITING.load(Ordering::SeqCst) == 0 {
            return Ok(now);
        }
        let before = Revision::new(now.revision.get() - 1);
        match inner.range(request.with_at(before)).await {
            Ok(old) => Ok(RangeResponse { revision: before, ..old }),
            Err(_) => Ok(now),
        }
    }

    async fn txn(&self, inner: &dyn Store, txn: Txn) -> Result<TxnResponse> {
        WRITING.fetch_add(1, Ordering::SeqCst);
        yield_now().await;
        let answer = inner.txn(txn).await;
        WRITING.fetch_sub(1, Ordering::SeqCst);
        answer
    }
}

#[derive(Debug, Default)]
pub(super) struct ForgetsAcknowledged(EveryFewCalls);

#[async_trait]
impl Twist for ForgetsAcknowledged {
    async fn txn(&self, inner: &dyn Store, txn: Txn) -> Result<TxnResponse> {
        if !only_puts(&txn) || !self.0.is_now() {
            return inner.txn(txn).await;
        }
        let revision = inner.txn(Txn::new()).await?.revision.next();
        let results = txn.success.iter().map(|_| OpResult::Put { prev: None }).collect();
        Ok(TxnResponse { revision, succeeded: true, results })
    }
}

#[derive(Debug, Default)]
pub(super) struct WritesTwice(EveryFewCalls);

#[async_trait]
impl Twist for WritesTwice {
    async fn txn(&self, inner: &dyn Store, txn: Txn) -> Result<TxnResponse> {
        let again = (only_puts(&txn) && self.0.is_now()).then(|| txn.clone());
        let answer = inner.txn(txn).await?;
        if let Some(again) = again {
            inner.txn(again).await?;
        }
        Ok(answer)
    }
}

#[derive(Debug, Default)]
pub(super) struct CallsUnknownDefinite(EveryFewCalls);

#[async_trait]
impl Twist for CallsUnknownDefinite {
    async fn txn(&self, inner: &dyn Store, txn: Txn) -> Result<TxnResponse> {
        let lie = only_puts(&txn) && self.0.is_now();
        let answer = inner.txn(txn).await?;
        if lie { Err(Error::new(ErrorKind::Throttled, Operation::Txn, "broken")) } else { Ok(answer) }
    }
}
