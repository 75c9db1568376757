//! Logs every call.

use std::time::Instant;

use async_trait::async_trait;

use super::tracing_targets::STORE;
use crate::error::Result;
use crate::key::Revision;
use crate::request::{RangeRequest, Txn, WatchRequest};
use crate::response::{RangeResponse, TxnResponse};
use crate::store::{Store, WatchStream};

/// A store that logs each call at debug level: what was asked, how long it took, what came of it. Never a value.
#[derive(Clone, Debug)]
pub struct Traced<S>(S);

impl<S: Store> Traced<S> {
    /// Logs around this store.
    pub fn new(inner: S) -> Self {
        Self(inner)
    }
}

#[async_trait]
impl<S: Store> Store for Traced<S> {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        let range = request.range.to_string();
        let start = Instant::now();
        let answer = self.0.range(request).await;
        let elapsed = start.elapsed();
        match &answer {
            Ok(found) => {
                tracing::debug!(target: STORE, %range, ?elapsed, revision = %found.revision, count = found.count, "range");
            }
            Err(error) => tracing::debug!(target: STORE, %range, ?elapsed, %error, "range failed"),
        }
        answer
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        let (compares, ops, bytes) = (txn.compares.len(), txn.success.len(), txn.size());
        let start = Instant::now();
        let answer = self.0.txn(txn).await;
        let elapsed = start.elapsed();
        match &answer {
            Ok(done) => {
                let (revision, succeeded) = (done.revision, done.succeeded);
                tracing::debug!(target: STORE, compares, ops, bytes, ?elapsed, %revision, succeeded, "txn");
            }
            Err(error) => tracing::debug!(target: STORE, compares, ops, bytes, ?elapsed, %error, "txn failed"),
        }
        answer
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        tracing::debug!(target: STORE, range = %request.range, start = %request.start, "watch");
        self.0.watch(request).await
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        tracing::debug!(target: STORE, %revision, "compact");
        self.0.compact(revision).await
    }
}
