//! Presents the keys under one prefix of a store as a store of their own.

use std::sync::Arc;

use async_trait::async_trait;
use futures::StreamExt;
use kv::{
    Batch, Compare, Error, ErrorKind, Event, InvalidArgument, Key, Kv, Op, OpResult, Operation, Range, RangeRequest,
    RangeResponse, Result, Revision, Store, Txn, TxnRange, TxnResponse, WatchRequest, WatchStream,
};

const NAME: &str = "prefixed";

/// A store that consists of those keys of an inner store that begin with one prefix.
///
/// All requests are confined to the prefix; answers, events and errors show keys without the prefix. A `PrefixedStore`
/// returns the revisions of the inner store unchanged. Compaction returns `Unsupported`, because it would affect keys
/// outside the prefix. An empty key is rejected as in every store, although the prefix alone would be a valid key of
/// the inner store. The inner store checks all other limits on requests; its limit on key length applies to keys with
/// the prefix.
#[derive(Clone, Debug)]
pub struct PrefixedStore {
    inner: Arc<dyn Store>,
    prefix: Key,
}

impl PrefixedStore {
    /// Creates a store from those keys of `inner` that begin with `prefix`. The key prefix should end with a separator,
    /// for example `/`.
    pub fn new(inner: Arc<dyn Store>, prefix: impl Into<Key>) -> Self {
        Self { inner, prefix: prefix.into() }
    }

    /// The key range of the inner store that contains all keys with the prefix.
    pub fn whole(&self) -> Range {
        Range::Prefix(self.prefix.clone())
    }

    fn key(&self, key: &Key) -> Key {
        Key::from([self.prefix.as_bytes(), key.as_bytes()].concat())
    }

    fn confined(&self, range: &Range, operation: Operation) -> Result<Range> {
        Ok(match range {
            Range::Key(key) if key.is_empty() => {
                return Err(Error::new(InvalidArgument::EmptyKey.into(), operation, NAME));
            }
            Range::Key(key) => Range::Key(self.key(key)),
            Range::Prefix(prefix) => Range::Prefix(self.key(prefix)),
            Range::FromTo(from, to) => Range::FromTo(self.key(from), self.key(to)),
            Range::From(from) => match self.prefix.prefix_end() {
                Some(end) => Range::FromTo(self.key(from), end),
                None => Range::From(self.key(from)),
            },
            Range::All => self.whole(),
        })
    }

    fn op(&self, op: Op) -> Result<Op> {
        Ok(match op {
            Op::Put { key, .. } if key.is_empty() => {
                return Err(Error::new(InvalidArgument::EmptyKey.into(), Operation::Txn, NAME));
            }
            Op::Put { key, value, prev, lease } => Op::Put { key: self.key(&key), value, prev, lease },
            Op::Delete { range, prev } => Op::Delete { range: self.confined(&range, Operation::Txn)?, prev },
            Op::Range(TxnRange { range, limit, content, .. }) => {
                Op::Range(TxnRange::new(self.confined(&range, Operation::Txn)?).with_limit(limit).with_content(content))
            }
        })
    }

    fn txn_within(&self, txn: Txn) -> Result<Txn> {
        let compare =
            |Compare { range, op, target, .. }| Ok(Compare::new(self.confined(&range, Operation::Txn)?, op, target));
        let ops = |ops: Vec<Op>| ops.into_iter().map(|op| self.op(op)).collect::<Result<Vec<_>>>();
        Ok(Txn::new()
            .with_compares(txn.compares.into_iter().map(compare).collect::<Result<Vec<_>>>()?)
            .with_success(ops(txn.success)?)
            .with_failure(ops(txn.failure)?))
    }

    /// Removes the prefix from a key. If an answer of the inner store contains a key without the prefix, the inner
    /// store is broken.
    fn stripped(&self, key: &Key, operation: Operation) -> Result<Key> {
        match key.as_bytes().strip_prefix(self.prefix.as_bytes()) {
            Some(rest) => Ok(Key::from(rest)),
            None => Err(Error::new(ErrorKind::Corrupt, operation, NAME)
                .with_detail(format!("the store answered with the key {key}, which is outside {}", self.whole()))),
        }
    }

    fn kv(&self, kv: Kv, operation: Operation) -> Result<Kv> {
        Ok(Kv { key: self.stripped(&kv.key, operation)?, ..kv })
    }

    fn kvs(&self, kvs: Vec<Kv>, operation: Operation) -> Result<Vec<Kv>> {
        kvs.into_iter().map(|kv| self.kv(kv, operation)).collect()
    }

    fn found(&self, found: RangeResponse, operation: Operation) -> Result<RangeResponse> {
        Ok(RangeResponse { kvs: self.kvs(found.kvs, operation)?, ..found })
    }

    fn result(&self, result: OpResult) -> Result<OpResult> {
        Ok(match result {
            OpResult::Put { prev } => OpResult::Put { prev: prev.map(|kv| self.kv(kv, Operation::Txn)).transpose()? },
            OpResult::Delete { count, prevs } => OpResult::Delete { count, prevs: self.kvs(prevs, Operation::Txn)? },
            OpResult::Range(found) => OpResult::Range(self.found(found, Operation::Txn)?),
        })
    }

    fn batch(&self, batch: Batch) -> Result<Batch> {
        let event = |event: Event| {
            let prev = event.prev.map(|kv| self.kv(kv, Operation::Watch)).transpose()?;
            Ok(Event { kv: self.kv(event.kv, Operation::Watch)?, prev, ..event })
        };
        Ok(Batch { events: batch.events.into_iter().map(event).collect::<Result<_>>()?, ..batch })
    }

    /// Removes the prefix from an error that names a key.
    fn error(&self, error: Error) -> Error {
        let ErrorKind::InvalidArgument(InvalidArgument::DuplicateKey(key)) = error.kind() else { return error };
        let key = match self.stripped(key, error.operation()) {
            Ok(key) => key,
            Err(outside) => return outside,
        };
        let kind = InvalidArgument::DuplicateKey(key).into();
        Error::new(kind, error.operation(), error.store().to_owned()).with_outcome(error.outcome())
    }
}

#[async_trait]
impl Store for PrefixedStore {
    async fn range(&self, mut request: RangeRequest) -> Result<RangeResponse> {
        request.range = self.confined(&request.range, Operation::Range)?;
        let found = self.inner.range(request).await.map_err(|error| self.error(error))?;
        self.found(found, Operation::Range)
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        let answer = self.inner.txn(self.txn_within(txn)?).await.map_err(|error| self.error(error))?;
        let results = answer.results.into_iter().map(|result| self.result(result)).collect::<Result<_>>()?;
        Ok(TxnResponse { results, ..answer })
    }

    async fn watch(&self, mut request: WatchRequest) -> Result<WatchStream> {
        request.range = self.confined(&request.range, Operation::Watch)?;
        let stream = self.inner.watch(request).await.map_err(|error| self.error(error))?;
        let this = self.clone();
        Ok(stream.map(move |item| item.and_then(|batch| this.batch(batch))).boxed())
    }

    async fn compact(&self, _: Revision) -> Result<()> {
        Err(Error::new(ErrorKind::Unsupported, Operation::Compact, NAME)
            .with_detail("a compaction would touch keys outside the prefix"))
    }
}

#[cfg(test)]
mod tests {
    use kv::StoreExt;

    use super::*;
    use crate::harness::Harness;
    use crate::reference::ReferenceHarness;

    async fn store() -> (Arc<dyn Store>, PrefixedStore) {
        let inner = ReferenceHarness.fresh().await.unwrap().store();
        for key in ["a", "p", "p.", "p0", "z", "\u{7f}"] {
            inner.put(key, "foreign").await.unwrap();
        }
        (inner.clone(), PrefixedStore::new(inner, "p/"))
    }

    #[tokio::test]
    async fn prefixed_ranges_stay_inside() {
        let (inner, within) = store().await;
        for key in ["a", "b", "\u{7f}"] {
            within.put(key, "ours").await.unwrap();
        }
        let ranges = [
            Range::All,
            Range::prefix(""),
            Range::From("".into()),
            Range::From("a".into()),
            Range::FromTo("".into(), "\u{7f}\u{7f}".into()),
        ];
        for range in ranges {
            let seen: Vec<String> =
                within.list(range.clone()).await.unwrap().kvs.iter().map(|kv| kv.key.to_string()).collect();
            assert_eq!(seen, ["a", "b", "\\x7f"], "{range}");
        }
        assert_eq!(within.delete(Range::From("".into())).await.unwrap(), 3);
        assert_eq!(inner.count(Range::All).await.unwrap(), 6);
    }

    #[tokio::test]
    async fn prefixed_events_and_errors_hide_prefix() {
        let (inner, within) = store().await;
        let at = within.put("k", "v").await.unwrap();
        inner.put("q", "foreign").await.unwrap();
        let mut watch = within.watch(WatchRequest::new(Range::All, at)).await.unwrap();
        let batch = watch.next().await.unwrap().unwrap();
        assert_eq!((batch.revision, batch.events[0].kv.key.clone()), (at, Key::from("k")));
        let twice = within.txn(Txn::new().with_success([Op::put("k", "a"), Op::put("k", "b")])).await.unwrap_err();
        assert_eq!(*twice.kind(), InvalidArgument::DuplicateKey("k".into()).into());
    }

    #[tokio::test]
    async fn prefixed_request_is_refused_when_reaching_outside() {
        let (_, within) = store().await;
        assert_eq!(*within.compact(Revision::new(2)).await.unwrap_err().kind(), ErrorKind::Unsupported);
        let empty = within.put("", "v").await.unwrap_err();
        assert_eq!(*empty.kind(), InvalidArgument::EmptyKey.into());
    }
}
