//! Defines the trait [`Store`], the shorthands of [`StoreExt`], [`Pages`] for ranges larger than one answer, and the
//! [`Purpose`] of a handle's writes.

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

/// The items of [`Store::watch`]: one batch for each revision with events, progress reports if requested, and a
/// terminal error as the last item.
///
/// Dropping the stream ends the watch.
pub type WatchStream = BoxStream<'static, Result<Batch>>;

/// An ordered map of keys to values with one revision counter.
///
/// `SEMANTICS.md` in this crate has the numbered rules. In short, an implementation must ensure that
///
/// 1. every method first calls `check` of its request, so that all stores reject the same requests;
/// 2. calls are strictly serialisable, in the order of their revisions;
/// 3. an acknowledged write survives a crash, and no write is visible before it is durable;
/// 4. a failed write reports whether it may have happened ([`Error::outcome`](crate::Error::outcome)), and the store
///    resends a write only if the first request was certainly never sent;
/// 5. no method blocks the thread that polls it.
///
/// The crate `conformance` tests implementations of this trait.
#[async_trait]
pub trait Store: Debug + Send + Sync + 'static {
    /// Reads a range of keys at one revision. A read of the latest revision is linearizable.
    ///
    /// # Errors
    /// `Compacted` for a revision below the compaction mark, and `FutureRevision` for a revision above the store's
    /// revision, even if the range contains no keys.
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse>;

    /// Runs one branch of a transaction atomically, at one revision.
    ///
    /// # Errors
    /// An invalid request is rejected before any part of it runs. Any other error carries an
    /// [`Outcome`](crate::Outcome). A compare that does not hold is not an error.
    async fn txn(&self, txn: Txn) -> Result<TxnResponse>;

    /// Watches a range from `start` of the request, inclusive. The watch is registered when this method returns.
    ///
    /// # Errors
    /// `InvalidArgument` for an empty range or a start below 1. The stream ends with `Compacted` when the compaction
    /// mark passes the next revision to deliver, and with `Disconnected` when the store cannot continue without a gap.
    async fn watch(&self, request: WatchRequest) -> Result<WatchStream>;

    /// Drops the history before `revision`. The state at `revision` stays readable; earlier states become unreadable.
    ///
    /// # Errors
    /// `Compacted` if the compaction mark is already at `revision` or above, and `FutureRevision` if `revision` is
    /// above the store's revision.
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

/// Maximum number of keys in one page of [`StoreExt::list_at`].
const MAX_PAGE_KEYS: usize = 500;

/// The state of a range at one revision, and a watch of all later changes.
pub struct Snapshot {
    /// The revision of `kvs`.
    pub revision: Revision,
    /// The keys at `revision`, in ascending order.
    pub kvs: Vec<Kv>,
    /// The changes after `revision`, without gaps or repetitions.
    pub changes: WatchStream,
}

impl Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot").field("revision", &self.revision).field("kvs", &self.kvs).finish_non_exhaustive()
    }
}

/// The outcome of a write that requires its key to be in a given state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConditionalOutcome {
    /// The write happened at this revision.
    Done(Revision),
    /// Nothing was written, because the key has this state instead; `None` stands for an absent key.
    Found(Option<Kv>),
}

impl ConditionalOutcome {
    /// The revision of the write, if it happened.
    pub fn done(&self) -> Option<Revision> {
        match self {
            Self::Done(revision) => Some(*revision),
            Self::Found(_) => None,
        }
    }
}

/// Shorthands for callers, implemented for every [`Store`].
#[async_trait]
pub trait StoreExt: Store {
    /// Reads one key at the latest revision.
    ///
    /// # Errors
    /// Any error of [`Store::range`].
    async fn get(&self, key: impl Into<Key> + Send) -> Result<Option<Kv>> {
        Ok(self.range(RangeRequest::new(Range::key(key))).await?.kvs.pop())
    }

    /// Reads a whole range at one revision, in [`Pages`] of about a megabyte. Paging keeps each answer small enough
    /// for the store, and each read short.
    ///
    /// # Errors
    /// Any error of [`Store::range`]; `Compacted` if the revision was compacted between two pages.
    async fn list(&self, range: Range) -> Result<RangeResponse> {
        self.list_at(range, Revision::UNSET, Content::Full).await
    }

    /// Like [`list`](Self::list), but reads at the revision `at` (the latest if `at` is below 1), and only the
    /// requested part of each key.
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

    /// Writes a key if it was last written at `mod_revision`, or, if `mod_revision` is unset, if the key is absent.
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

    /// Deletes a range and returns the number of deleted keys.
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

    /// Reads a range and watches it from the next revision on, so that the caller sees every change exactly once.
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

/// Runs `op` if `key` was last written at `mod_revision`; otherwise returns the state of the key.
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

/// Default target size of a page: 1 MiB of keys and values.
const PAGE_BYTES: usize = 1 << 20;
/// Number of keys in the first page. The number is small because one value can have more than a megabyte.
const FIRST_PAGE_KEYS: usize = 16;
/// Number of keys in the first page of a read without values: 500 of the longest keys have about two megabytes.
const FIRST_PAGE_BARE_KEYS: usize = 500;
/// Maximum ratio of a page's keys to the previous page's keys, because the next keys may be larger.
const MAX_PAGE_GROWTH: usize = 8;
/// Each entry counts as at least this many bytes, so that a page of tiny entries does not list the whole range.
const MIN_ENTRY_BYTES: usize = 64;

/// Reads a range at one revision, about a megabyte at a time, for callers that cannot keep the whole range in memory.
/// Each page may be read through a different handle, provided that all handles have the same data.
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
    /// Creates the pages of a range at a revision. If `at` is unset, all pages are read at the latest revision at the
    /// time of the first page.
    pub fn new(range: Range, at: Revision) -> Self {
        let (content, bytes, limit, most) = (Content::Full, PAGE_BYTES, FIRST_PAGE_KEYS, usize::MAX);
        Self { rest: Some(range.clone()), range, at, content, bytes, limit, most }
    }

    /// Restricts the pages to the part `content` of each key.
    #[must_use]
    pub fn with_content(mut self, content: Content) -> Self {
        self.content = content;
        self.limit = if content == Content::Full { FIRST_PAGE_KEYS } else { FIRST_PAGE_BARE_KEYS };
        self
    }

    /// Limits each page to `keys` keys.
    #[must_use]
    pub fn with_max_keys(mut self, keys: usize) -> Self {
        self.most = keys;
        self
    }

    /// Sets the target size of a page in bytes of keys and values. For each page, an etcd cluster walks through all
    /// remaining keys of the range. On an embedded store, other users wait while a page is read.
    #[must_use]
    pub fn with_page_bytes(mut self, bytes: usize) -> Self {
        self.bytes = bytes;
        self
    }

    /// The revision of the pages; unset before the first page if [`new`](Self::new) got no revision.
    pub fn revision(&self) -> Revision {
        self.at
    }

    /// True if the last page of the range was read.
    pub fn is_over(&self) -> bool {
        self.rest.is_none()
    }

    /// Reads the next page of keys in ascending order; returns `None` after the last page.
    ///
    /// # Errors
    /// Any error of [`Store::range`]; `Compacted` if the revision was compacted between two pages.
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

/// The purpose of the writes through a handle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Purpose {
    /// Writes of any kind.
    #[default]
    Any,
    /// Releases of addresses. When the disk is full, an embedded store frees history and reserved space for a release.
    Release,
}
