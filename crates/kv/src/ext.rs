//! Shorthands on the four methods of a store.

use async_trait::async_trait;
use futures::StreamExt;

use crate::error::Result;
use crate::key::{Key, Range, Revision, Value};
use crate::pages::Pages;
use crate::request::{Compare, Content, Op, RangeRequest, Txn, WatchRequest};
use crate::response::{Kv, OpResult, RangeResponse};
use crate::store::{Store, WatchStream};

/// How many keys a page of a listing holds at the most.
const MOST_KEYS: usize = 500;

/// A state of a range, and everything that happens to it from then on.
pub struct Snapshot {
    /// The revision of the state.
    pub revision: Revision,
    /// The keys at that revision, ascending.
    pub kvs: Vec<Kv>,
    /// The changes after that revision, without gap or repeat.
    pub changes: WatchStream,
}

impl std::fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Snapshot").field("revision", &self.revision).field("kvs", &self.kvs).finish_non_exhaustive()
    }
}

/// The outcome of a write that depends on the state of its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Conditional {
    /// The write happened, at this revision.
    Done(Revision),
    /// Nothing was written. The key is as here; `None` if it is absent.
    Found(Option<Kv>),
}

impl Conditional {
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
        let mut pages = Pages::new(range, at).with_content(content).with_most_keys(MOST_KEYS);
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
    async fn create(&self, key: impl Into<Key> + Send, value: impl Into<Value> + Send) -> Result<Conditional> {
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
    ) -> Result<Conditional> {
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
    async fn delete_if(&self, key: impl Into<Key> + Send, mod_revision: Revision) -> Result<Conditional> {
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
async fn conditional<S: Store + ?Sized>(store: &S, key: Key, mod_revision: Revision, op: Op) -> Result<Conditional> {
    let txn = Txn::new()
        .with_compares([Compare::unchanged(key.clone(), mod_revision)])
        .with_success([op])
        .with_failure([Op::range(Range::Key(key))]);
    let answer = store.txn(txn).await?;
    if answer.succeeded {
        return Ok(Conditional::Done(answer.revision));
    }
    let found = answer.results.into_iter().find_map(|result| match result {
        OpResult::Range(mut found) => found.kvs.pop(),
        _ => None,
    });
    Ok(Conditional::Found(found))
}
