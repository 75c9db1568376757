//! The trait.

use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;
use futures::stream::BoxStream;

use crate::error::Result;
use crate::key::Revision;
use crate::request::{RangeRequest, Txn, WatchRequest};
use crate::response::{Batch, RangeResponse, TxnResponse};

/// The items of [`Store::watch`]: one for each revision with events, reports of progress if requested, and at last a terminal error.
///
/// The stream owns all it needs. Dropping it ends the watch.
pub type WatchStream = BoxStream<'static, Result<Batch>>;

/// A store: an ordered map of keys to values with one counter of revisions.
///
/// `SEMANTICS.md` in this crate has the numbered rules; in short, an implementation must ensure that
///
/// 1. every method begins with the request's own `check`, so that all stores refuse the same things;
/// 2. calls are strictly serialisable, in the total order that revisions give;
/// 3. a write that was acknowledged survives a crash, and nothing is visible before it would;
/// 4. a failed write says honestly whether it may have happened ([`Error::outcome`](crate::Error::outcome)), and is
///    never sent twice on the store's own account, save when it was certainly never sent at all;
/// 5. no method blocks the thread that polls it.
///
/// The crate `conformance` judges an implementation.
#[async_trait]
pub trait Store: Debug + Send + Sync + 'static {
    /// Reads a range of keys at one revision, linearizable when it is the latest.
    ///
    /// # Errors
    /// `Compacted` below the compaction mark and `FutureRevision` above the store's revision, also for absent keys.
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse>;

    /// Runs a transaction: all of one branch or nothing, at one revision.
    ///
    /// # Errors
    /// An invalid request is refused whole, before anything runs. Any other error carries an
    /// [`Outcome`](crate::Outcome); a compare that does not hold is no error.
    async fn txn(&self, txn: Txn) -> Result<TxnResponse>;

    /// Watches a range from a revision on. The watch is registered when this returns.
    ///
    /// # Errors
    /// A request with an empty range or a start below 1. On the stream: `Compacted` when the start is, or falls, below
    /// the compaction mark, `Disconnected` when the store cannot go on without a gap. Both end it.
    async fn watch(&self, request: WatchRequest) -> Result<WatchStream>;

    /// Gives up the history before a revision: states below it become unreadable, the state at it stays.
    ///
    /// # Errors
    /// `Compacted` if the mark is there or beyond already, `FutureRevision` above the store's revision.
    async fn compact(&self, revision: Revision) -> Result<()>;
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl<S: Store + ?Sized> Store for Arc<S> {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        (**self).range(request).await
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        (**self).txn(txn).await
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        (**self).watch(request).await
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        (**self).compact(revision).await
    }
}
