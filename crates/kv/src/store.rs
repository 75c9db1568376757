//! The trait [`Store`], the shorthands [`StoreExt`] on its four methods, [`Pages`] for ranges that are larger than an answer, and
//! the [`Purpose`] of the writes through a handle.

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

/// How many keys a page of a listing holds at the most.
const MAX_PAGE_KEYS: usize = 500;

/// A state of a range, and everything that happens to it from then on.
pub struct Snapshot {
    /// The revision of the state.
    pub revision: Revision,
    /// The keys at that revision, ascending.
    pub kvs: Vec<Kv>,
    /// The changes after that revision, without gap or repeat.
    pub changes: WatchStream,
}

impl Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot").field("revision", &self.revision).field("kvs", &self.kvs).finish_non_exhaustive()
    }
}

/// The outcome of a write that depends on the state of its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConditionalOutcome {
    /// The write happened, at this revision.
    Done(Revision),
    /// Nothing was written. The key is as here; `None` if it is absent.
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

/// Shorthands for callers, implemented for every [`Store`]; nobody implements this by hand.
#[async_trait]
pub trait StoreExt: Store {
    /// One key at the latest revision.
    ///
    /// # Errors
    /// Those of [`Store::range`].
    async fn get(&self, key: impl Into<Key> + Send) -> Result<Option<Kv>> {
        Ok(self.range(RangeRequest::new(Range::key(key))).await?.kvs.pop())
    }

    /// All of a range at one revision, read in [`Pages`] of about a megabyte, so that no answer is too large and no store is
    /// held up for long.
    ///
    /// # Errors
    /// Those of [`Store::range`]; `Compacted` if the history moved past the revision between two pages.
    async fn list(&self, range: Range) -> Result<RangeResponse> {
        self.list_at(range, Revision::UNSET, Content::Full).await
    }

    /// Like [`list`](Self::list), at a given revision (below 1: the latest) and with as much of each key as asked for.
    ///
    /// # Errors
    /// Those of [`list`](Self::list).
    async fn list_at(&self, range: Range, at: Revision, content: Content) -> Result<RangeResponse> {
        let mut pages = Pages::new(range, at).with_content(content).with_max_keys(MAX_PAGE_KEYS);
        let mut listing = pages.next_answer(self).await?.unwrap_or_default();
        while let Some(page) = pages.next_answer(self).await? {
            listing.kvs.extend(page.kvs);
            listing.more = page.more;
        }
        Ok(listing)
    }

    /// How many keys a range has.
    ///
    /// # Errors
    /// Those of [`Store::range`].
    async fn count(&self, range: Range) -> Result<u64> {
        Ok(self.range(RangeRequest::new(range).with_content(Content::CountOnly)).await?.count)
    }

    /// Writes a key whatever is there, and returns the revision of the write.
    ///
    /// # Errors
    /// Those of [`Store::txn`].
    async fn put(&self, key: impl Into<Key> + Send, value: impl Into<Value> + Send) -> Result<Revision> {
        Ok(self.txn(Txn::new().with_success([Op::put(key, value)])).await?.revision)
    }

    /// Writes a key if it is absent.
    ///
    /// # Errors
    /// Those of [`Store::txn`].
    async fn create(&self, key: impl Into<Key> + Send, value: impl Into<Value> + Send) -> Result<ConditionalOutcome> {
        self.update_if(key, value, Revision::UNSET).await
    }

    /// Writes a key if it was last written at `mod_revision` (unset: if it is absent).
    ///
    /// # Errors
    /// Those of [`Store::txn`].
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

    /// Deletes a range, and returns how many keys that were.
    ///
    /// # Errors
    /// Those of [`Store::txn`].
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
    /// Those of [`Store::txn`].
    async fn delete_if(&self, key: impl Into<Key> + Send, mod_revision: Revision) -> Result<ConditionalOutcome> {
        let key = key.into();
        conditional(self, key.clone(), mod_revision, Op::delete(key)).await
    }

    /// The state of a range, and a watch from the revision after it: the way to follow a range without gap or repeat.
    ///
    /// # Errors
    /// Those of [`list`](Self::list) and of [`Store::watch`].
    async fn snapshot_then_watch(&self, range: Range) -> Result<Snapshot> {
        let listing = self.list(range.clone()).await?;
        let changes = self.watch(WatchRequest::new(range, listing.revision.next())).await?;
        Ok(Snapshot { revision: listing.revision, kvs: listing.kvs, changes: changes.boxed() })
    }
}

impl<S: Store + ?Sized> StoreExt for S {}

/// Runs `op` if `key` was last written at `mod_revision`; otherwise says what is there.
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

/// How many bytes of keys and values a page should have.
const PAGE_BYTES: usize = 1 << 20;
/// How many keys a page has at first: a single value can have more than a megabyte.
const FIRST_PAGE_KEYS: usize = 16;
/// The same without values: as many of the longest keys have about two megabytes.
const FIRST_PAGE_BARE_KEYS: usize = 500;
/// How many times as many keys as the page before a page has at most: what comes next may be larger.
const MAX_PAGE_GROWTH: usize = 8;
/// How many bytes a key and its value count at least, so that a page of small ones is no listing of everything.
const MIN_ENTRY_BYTES: usize = 64;

/// All of a range at one revision, about a megabyte at a time, for a caller that reads more than it can hold. The store may
/// be another one for each page, as long as it is the same data.
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
    /// Of a range, at a revision (unset: the latest at the first page).
    pub fn new(range: Range, at: Revision) -> Self {
        let (content, bytes, limit, most) = (Content::Full, PAGE_BYTES, FIRST_PAGE_KEYS, usize::MAX);
        Self { rest: Some(range.clone()), range, at, content, bytes, limit, most }
    }

    /// With as much of each key as asked for.
    #[must_use]
    pub fn with_content(mut self, content: Content) -> Self {
        self.content = content;
        self.limit = if content == Content::Full { FIRST_PAGE_KEYS } else { FIRST_PAGE_BARE_KEYS };
        self
    }

    /// With this many keys to a page at the most.
    #[must_use]
    pub fn with_max_keys(mut self, keys: usize) -> Self {
        self.most = keys;
        self
    }

    /// With this many bytes of keys and values to a page, about: each page of a cluster costs it a walk through all keys
    /// that are left, and each page of an embedded store keeps others waiting.
    #[must_use]
    pub fn with_page_bytes(mut self, bytes: usize) -> Self {
        self.bytes = bytes;
        self
    }

    /// The revision; unset before the first page if none was given.
    pub fn revision(&self) -> Revision {
        self.at
    }

    /// True after the last page.
    pub fn is_over(&self) -> bool {
        self.rest.is_none()
    }

    /// The next keys, ascending; `None` after the last.
    ///
    /// # Errors
    /// Those of [`Store::range`]; `Compacted` if the history moved past the revision between two pages.
    pub async fn next<S: Store + ?Sized>(&mut self, store: &S) -> Result<Option<Vec<Kv>>> {
        Ok(self.next_answer(store).await?.map(|page| page.kvs))
    }

    /// The next page as the store answers it.
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

/// The purpose of the writes through a store or a handle to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Purpose {
    /// Any write.
    #[default]
    Any,
    /// A release. On a full disk an embedded store drops history, and room that it keeps for that.
    Release,
}
