//! Defines the trait [`Store`], the shorthand methods of [`StoreExt`], [`Pages`] for large reads, and the [`Purpose`]
//! of writes.

use std::fmt::{self, Debug};
use std::sync::Arc;

use async_trait::async_trait;
use futures::StreamExt;
use futures::stream::BoxStream;

use crate::error::Result;
use crate::key::{Key, Range, Revision, Value};
use crate::request::{
    Batch, Compare, Content, Kv, Op, OpResult, RangeRequest, RangeResponse, Txn, TxnResponse, WatchRequest,
};

/// The stream that [`Store::watch`] returns: one batch for each revision with events, and progress reports if
/// requested. If the watch fails, the last item of the stream is its error.
///
/// To end a watch, a caller drops its stream.
pub type WatchStream = BoxStream<'static, Result<Batch>>;

/// An ordered map of keys to values with one revision counter.
///
/// The numbered rules for stores are in the file `SEMANTICS.md` of the crate `kv`. In short, every implementation of
/// [`Store`] must meet the following five conditions.
///
/// 1. Every method of the store first calls `check` on its request, so all stores reject the same requests.
/// 2. Calls of the store are strictly serialisable, in the order of their revisions.
/// 3. An acknowledged write survives a crash, and no read or watch sees a write that is not durable yet.
/// 4. A failed write reports whether it may have happened ([`Error::outcome`](crate::Error::outcome)). A store may
///    resend a write only if the earlier request was never sent.
/// 5. No method of the store blocks the thread that polls it.
///
/// The crate `conformance` tests implementations of the trait [`Store`].
#[async_trait]
pub trait Store: Debug + Send + Sync + 'static {
    /// Reads the keys in a range at one revision. A read of the latest revision is linearizable.
    ///
    /// # Errors
    /// `Compacted` if the requested revision is below the compaction mark, `FutureRevision` if the requested revision
    /// is above the store's. A read of a range without keys also checks the requested revision.
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse>;

    /// Runs one of the two branches of a transaction atomically, at one revision.
    ///
    /// # Errors
    /// An invalid transaction is rejected before any of its operations runs. Any other error of a transaction says in
    /// its [`Outcome`](crate::Outcome) whether the transaction may have happened. A transaction whose compares do not
    /// hold is not an error.
    async fn txn(&self, txn: Txn) -> Result<TxnResponse>;

    /// Watches a key range from the request's `start` revision (inclusive). When `watch` returns, the store has
    /// registered the watch, so the watch misses no later change.
    ///
    /// # Errors
    /// `InvalidArgument` if the range is empty or `start` is below 1. A watch's stream ends with `Compacted` when the
    /// compaction mark passes the next revision to deliver. A watch's stream ends with `Disconnected` when the store
    /// cannot continue without a gap.
    async fn watch(&self, request: WatchRequest) -> Result<WatchStream>;

    /// Compacts the store: drops its history before `revision`. After a compaction, the state at `revision` stays
    /// readable; older states become unreadable.
    ///
    /// # Errors
    /// `Compacted` if the compaction mark is at or above `revision`, and `FutureRevision` if `revision` is above the
    /// store's revision.
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

/// Maximum number of keys in one page that [`StoreExt::list_at`] reads.
const MAX_PAGE_KEYS: usize = 500;

/// The state of a key range at one revision, and a watch of all later changes.
pub struct Snapshot {
    /// The revision at which the range was read: `kvs` is the state of the range at this revision.
    pub revision: Revision,
    /// The keys of the range as of `revision`, in ascending order.
    pub kvs: Vec<Kv>,
    /// The stream of changes after `revision`, without gaps or repetitions.
    pub changes: WatchStream,
}

impl Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot").field("revision", &self.revision).field("kvs", &self.kvs).finish_non_exhaustive()
    }
}

/// The result of a conditional write (create, update or delete): done, or refused with the key's current state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConditionalOutcome {
    /// The conditional write happened at this revision.
    Done(Revision),
    /// Nothing was written, because the key was not in the required state. Contains the key's current entry, or `None`
    /// if the key is absent.
    Found(Option<Kv>),
}

impl ConditionalOutcome {
    /// Returns the revision of the conditional write, or `None` if nothing was written.
    pub fn done(&self) -> Option<Revision> {
        match self {
            Self::Done(revision) => Some(*revision),
            Self::Found(_) => None,
        }
    }
}

/// Shorthand methods for callers, implemented for every [`Store`].
#[async_trait]
pub trait StoreExt: Store {
    /// Reads one key at the latest revision.
    ///
    /// # Errors
    /// Any error of [`Store::range`].
    async fn get(&self, key: impl Into<Key> + Send) -> Result<Option<Kv>> {
        Ok(self.range(RangeRequest::new(Range::key(key))).await?.kvs.pop())
    }

    /// Reads all keys of a range at one revision, in [`Pages`] of about a megabyte. Reading in pages keeps each answer
    /// small enough for the store, and each read short.
    ///
    /// # Errors
    /// `Compacted` if the revision was compacted between two pages, or any error of [`Store::range`].
    async fn list(&self, range: Range) -> Result<RangeResponse> {
        self.list_at(range, Revision::UNSET, Content::Full).await
    }

    /// Like [`list`](Self::list), but reads at the revision `at`, and only the requested parts of each key. A revision
    /// `at` below 1 means the latest.
    ///
    /// # Errors
    /// Any error of [`list`](Self::list).
    async fn list_at(&self, range: Range, at: Revision, content: Content) -> Result<RangeResponse> {
        let mut pages = Pages::new(range, at).with_content(content).with_max_keys(MAX_PAGE_KEYS);
        let mut listing = pages.next_answer(self).await?.unwrap_or_default();
        while let Some(page) = pages.next_answer(self).await? {
            listing.kvs.extend(page.kvs);
            listing.more = page.more;
        }
        Ok(listing)
    }

    /// Counts the keys in a range.
    ///
    /// # Errors
    /// Any error of [`Store::range`].
    async fn count(&self, range: Range) -> Result<u64> {
        Ok(self.range(RangeRequest::new(range).with_content(Content::CountOnly)).await?.count)
    }

    /// Writes a key unconditionally and returns the revision of the write.
    ///
    /// # Errors
    /// Any error of [`Store::txn`].
    async fn put(&self, key: impl Into<Key> + Send, value: impl Into<Value> + Send) -> Result<Revision> {
        Ok(self.txn(Txn::new().with_success([Op::put(key, value)])).await?.revision)
    }

    /// Writes a key if it is absent.
    ///
    /// # Errors
    /// Any error of [`Store::txn`].
    async fn create(&self, key: impl Into<Key> + Send, value: impl Into<Value> + Send) -> Result<ConditionalOutcome> {
        self.update_if(key, value, Revision::UNSET).await
    }

    /// Writes a key if it was last written at `mod_revision`; if `mod_revision` is unset, writes the key only if it is
    /// absent.
    ///
    /// # Errors
    /// Any error of [`Store::txn`].
    async fn update_if(
        &self,
        key: impl Into<Key> + Send,
        value: impl Into<Value> + Send,
        mod_revision: Revision,
    ) -> Result<ConditionalOutcome> {
        let key = key.into();
        let value = value.into();
        conditional(self, key.clone(), mod_revision, Op::put(key, value)).await
    }

    /// Deletes the keys of a range and returns the number of deleted keys.
    ///
    /// # Errors
    /// Any error of [`Store::txn`].
    async fn delete(&self, range: Range) -> Result<u64> {
        let answer = self.txn(Txn::new().with_success([Op::delete_range(range)])).await?;
        Ok(answer
            .results
            .iter()
            .map(|result| if let OpResult::Delete { count, .. } = result { *count } else { 0 })
            .sum())
    }

    /// Deletes a key if it was last written at `mod_revision`.
    ///
    /// # Errors
    /// Any error of [`Store::txn`].
    async fn delete_if(&self, key: impl Into<Key> + Send, mod_revision: Revision) -> Result<ConditionalOutcome> {
        let key = key.into();
        conditional(self, key.clone(), mod_revision, Op::delete(key)).await
    }

    /// Reads a key range and watches it from the next revision on, so the caller misses no change and gets none twice.
    ///
    /// # Errors
    /// Any error of [`list`](Self::list) or [`Store::watch`].
    async fn snapshot_then_watch(&self, range: Range) -> Result<Snapshot> {
        let listing = self.list(range.clone()).await?;
        let changes = self.watch(WatchRequest::new(range, listing.revision.next())).await?;
        Ok(Snapshot { revision: listing.revision, kvs: listing.kvs, changes: changes.boxed() })
    }
}

impl<S: Store + ?Sized> StoreExt for S {}

/// Runs the write `op` if `key` was last written at `mod_revision`; otherwise returns the current state of `key`.
async fn conditional<S: Store + ?Sized>(
    store: &S,
    key: Key,
    mod_revision: Revision,
    op: Op,
) -> Result<ConditionalOutcome> {
    let txn = Txn::new()
        .with_compares([Compare::unchanged(key.clone(), mod_revision)])
        .with_success([op])
        .with_failure([Op::range(Range::Key(key))]);
    let answer = store.txn(txn).await?;
    if answer.succeeded {
        return Ok(ConditionalOutcome::Done(answer.revision));
    }
    let found = answer.results.into_iter().find_map(|result| match result {
        OpResult::Range(mut found) => found.kvs.pop(),
        _ => None,
    });
    Ok(ConditionalOutcome::Found(found))
}

/// Default size of a page of a listing: 1 MiB of keys and values.
const PAGE_BYTES: usize = 1 << 20;
/// Number of keys in the first page of a listing; few, because one value can be larger than a megabyte.
const FIRST_PAGE_KEYS: usize = 16;
/// Number of keys in the first page of a listing without values: 500 keys of maximum length are about two megabytes.
const FIRST_PAGE_BARE_KEYS: usize = 500;
/// Maximum ratio of the number of keys in one page to the number of keys in the previous page. The values in the next
/// page may be larger, so the number of keys must not grow too fast.
const MAX_PAGE_GROWTH: usize = 8;
/// Each entry counts as at least this many bytes of a page, which limits the number of tiny entries per page.
const MIN_ENTRY_BYTES: usize = 64;

/// Reads a key range at one revision in pages of about a megabyte, for callers that cannot hold the whole range in
/// memory. Each page of a range may be read through a different store handle, if all handles have the same data.
#[derive(Debug)]
pub struct Pages {
    range: Range,
    rest: Option<Range>,
    at: Revision,
    content: Content,
    bytes: usize,
    limit: usize,
    most: usize,
}

impl Pages {
    /// Creates a reader for the pages of a key range at a revision. If `at` is unset, the first page of the range is
    /// read at the latest revision, and all further pages at the same revision.
    pub fn new(range: Range, at: Revision) -> Self {
        let (content, bytes, limit, most) = (Content::Full, PAGE_BYTES, FIRST_PAGE_KEYS, usize::MAX);
        Self { rest: Some(range.clone()), range, at, content, bytes, limit, most }
    }

    /// Sets which parts of each key the pages of the listing contain.
    #[must_use]
    pub fn with_content(mut self, content: Content) -> Self {
        self.content = content;
        self.limit = if content == Content::Full { FIRST_PAGE_KEYS } else { FIRST_PAGE_BARE_KEYS };
        self
    }

    /// Limits each page of the listing to at most `keys` keys.
    #[must_use]
    pub fn with_max_keys(mut self, keys: usize) -> Self {
        self.most = keys;
        self
    }

    /// Sets the size that the pages of a range should have, in bytes of keys and values. Smaller pages cost an etcd
    /// cluster more: for each page, an etcd cluster walks through all remaining keys of the range. On an embedded
    /// store, larger pages make other processes wait longer, because no other process can use the store during a page.
    #[must_use]
    pub fn with_page_bytes(mut self, bytes: usize) -> Self {
        self.bytes = bytes;
        self
    }

    /// The revision at which the pages are read; unset before the first page if [`new`](Self::new) got no revision.
    pub fn revision(&self) -> Revision {
        self.at
    }

    /// Returns true if the last page of the range has been read.
    pub fn is_over(&self) -> bool {
        self.rest.is_none()
    }

    /// Reads the next page, with its keys in ascending order; returns `None` after the last page.
    ///
    /// # Errors
    /// `Compacted` if the revision was compacted between two pages, or any error of [`Store::range`].
    pub async fn next<S: Store + ?Sized>(&mut self, store: &S) -> Result<Option<Vec<Kv>>> {
        Ok(self.next_answer(store).await?.map(|page| page.kvs))
    }

    async fn next_answer<S: Store + ?Sized>(&mut self, store: &S) -> Result<Option<RangeResponse>> {
        let Some(range) = &self.rest else { return Ok(None) };
        let limit = i64::try_from(self.limit.clamp(1, self.most.max(1))).unwrap_or(i64::MAX);
        let request = RangeRequest::new(range.clone()).with_at(self.at).with_limit(limit).with_content(self.content);
        let page = store.range(request).await?;
        if !self.at.is_set() {
            self.at = page.revision;
        }
        let bytes: usize = page.kvs.iter().map(Kv::size).sum();
        let each = (bytes / page.kvs.len().max(1)).max(MIN_ENTRY_BYTES);
        self.limit = (self.bytes / each).clamp(1, self.limit.saturating_mul(MAX_PAGE_GROWTH));
        self.rest = page.kvs.last().filter(|_| page.more).map(|last| self.range.rest(last.key.successor()));
        Ok(Some(page))
    }
}

/// Says whether a store handle may be used for writes of any kind, or only for writes that release IP addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Purpose {
    /// The store handle may make writes of any kind.
    #[default]
    Any,
    /// The store handle may only release addresses.
    Release,
}
