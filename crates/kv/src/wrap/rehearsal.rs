//! Defines a store wrapper that rehearses writes without changing the inner store.

use std::collections::BTreeMap;

use async_trait::async_trait;
use tokio::sync::{Mutex, MutexGuard};

use crate::error::{Error, ErrorKind, Operation, Result};
use crate::key::{Key, LeaseId, Range, Revision, Value};
use crate::request::{
    Compare, Content, Kv, Op, OpResult, Prev, RangeRequest, RangeResponse, Txn, TxnRange, TxnResponse, WatchRequest,
};
use crate::store::{Store, StoreExt, WatchStream};

const NAME: &str = "rehearsal";

/// A store that keeps all writes in memory, on top of the state that the inner store had at the first call. A rehearsal
/// evaluates compares, assigns revisions to its writes, and shows these writes in its reads. With a `Rehearsal`, a
/// caller tests a change and all its checks without writing to the inner store.
///
/// The inner store must keep its history since the first call of the rehearsal. The methods `watch` and `compact` of a
/// rehearsal fail with `Unsupported`.
#[derive(Debug)]
pub struct Rehearsal<S> {
    inner: S,
    state: Mutex<RehearsalState>,
}

#[derive(Debug, Default)]
struct RehearsalState {
    /// The revision of the inner store on which the rehearsal is based; unset before the first call.
    base: Revision,
    /// The newest revision of the rehearsal, including the revisions of rehearsed writes.
    newest: Revision,
    last: Revision,
    /// The rehearsed writes of each key, oldest first; `None` for a deletion.
    written: BTreeMap<Key, Vec<(Revision, Option<Kv>)>>,
}

impl<S: Store> Rehearsal<S> {
    /// Creates a rehearsal on top of the store `inner`.
    pub fn new(inner: S) -> Self {
        Self { inner, state: Mutex::default() }
    }

    /// Returns the state of the rehearsal; the first call fixes its base revision.
    async fn state(&self) -> Result<MutexGuard<'_, RehearsalState>> {
        let mut state = self.state.lock().await;
        if !state.base.is_set() {
            // Read an arbitrary key: only the store's revision in the answer is needed.
            let request = RangeRequest::new(Range::key("/")).with_content(Content::CountOnly);
            state.base = self.inner.range(request).await?.revision;
            state.newest = state.base;
        }
        Ok(state)
    }

    /// Reads a key range at a revision, including the rehearsed writes; the caller must set the revision of the answer.
    async fn read(&self, state: &RehearsalState, request: &TxnRange, at: Revision) -> Result<RangeResponse> {
        let below = at.min(state.base);
        if !state.within(&request.range).any(|(_, versions)| versions[0].0 <= at) {
            let request = RangeRequest::new(request.range.clone())
                .with_at(below)
                .with_limit(request.limit)
                .with_content(request.content);
            return self.inner.range(request).await;
        }
        let content = if request.content == Content::CountOnly { Content::KeysOnly } else { request.content };
        let listed = self.inner.list_at(request.range.clone(), below, content).await?;
        let mut found: BTreeMap<Key, Kv> = listed.kvs.into_iter().map(|kv| (kv.key.clone(), kv)).collect();
        for (key, versions) in state.within(&request.range) {
            match versions.iter().rev().find(|(revision, _)| *revision <= at) {
                Some((_, Some(kv))) if content == Content::Full => found.insert(key.clone(), kv.clone()),
                Some((_, Some(kv))) => found.insert(key.clone(), Kv { value: Value::default(), ..kv.clone() }),
                Some((_, None)) => found.remove(key),
                None => None,
            };
        }
        let count = found.len();
        let limit = match (request.content, usize::try_from(request.limit)) {
            (Content::CountOnly, _) => 0,
            (_, Ok(limit)) if limit > 0 => limit,
            _ => usize::MAX,
        };
        let more = request.content != Content::CountOnly && count > limit;
        let kvs = found.into_values().take(limit).collect();
        Ok(RangeResponse { revision: at, kvs, count: count as u64, more })
    }

    async fn kvs(&self, state: &RehearsalState, range: &Range, at: Revision) -> Result<Vec<Kv>> {
        Ok(self.read(state, &TxnRange::new(range.clone()), at).await?.kvs)
    }

    async fn all_hold(&self, state: &RehearsalState, compares: &[Compare]) -> Result<bool> {
        for compare in compares {
            if !compare.holds_for(&self.kvs(state, &compare.range, state.newest).await?) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn run(&self, state: &mut RehearsalState, ops: &[Op], at: Revision) -> Result<Vec<OpResult>> {
        let mut results = Vec::with_capacity(ops.len());
        for op in ops {
            results.push(match op {
                Op::Put { key, value, prev, lease } => {
                    let old = self.kvs(state, &Range::Key(key.clone()), at).await?.pop();
                    state.put(key, value, *lease, old.as_ref(), at);
                    OpResult::Put { prev: old.filter(|_| *prev == Prev::Return) }
                }
                Op::Delete { range, prev } => {
                    let old = self.kvs(state, range, at).await?;
                    old.iter().for_each(|kv| state.write(&kv.key, None, at));
                    let count = old.len() as u64;
                    OpResult::Delete { count, prevs: if *prev == Prev::Return { old } else { Vec::new() } }
                }
                Op::Range(request) => OpResult::Range(self.read(state, request, at).await?),
            });
        }
        Ok(results)
    }
}

impl RehearsalState {
    /// The rehearsed writes of the keys in a range.
    fn within<'s>(&'s self, range: &Range) -> impl Iterator<Item = (&'s Key, &'s Vec<(Revision, Option<Kv>)>)> {
        let (from, to) = range.bounds();
        self.written.range(from..).take_while(move |(key, _)| to.as_ref().is_none_or(|to| *key < to))
    }

    fn put(&mut self, key: &Key, value: &Value, lease: Option<LeaseId>, old: Option<&Kv>, at: Revision) {
        let kv = Kv {
            key: key.clone(),
            value: value.clone(),
            create_revision: old.map_or(at, |old| old.create_revision),
            mod_revision: at,
            version: old.map_or(1, |old| old.version + 1),
            lease,
        };
        self.write(key, Some(kv), at);
    }

    fn write(&mut self, key: &Key, kv: Option<Kv>, at: Revision) {
        self.last = at;
        self.written.entry(key.clone()).or_default().push((at, kv));
    }

    /// Drops all rehearsed writes at the given revision.
    fn undo(&mut self, at: Revision) {
        self.written.retain(|_, versions| {
            versions.retain(|(revision, _)| *revision != at);
            !versions.is_empty()
        });
        self.last = Revision::UNSET;
    }
}

#[async_trait]
impl<S: Store> Store for Rehearsal<S> {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        request.check(NAME)?;
        let state = self.state().await?;
        let at = if request.at.is_set() { request.at } else { state.newest };
        if at > state.newest {
            return Err(Error::new(ErrorKind::FutureRevision, Operation::Range, NAME));
        }
        let within = TxnRange::new(request.range).with_limit(request.limit).with_content(request.content);
        let answer = self.read(&state, &within, at).await?;
        Ok(RangeResponse { revision: state.newest, ..answer })
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        txn.check(NAME)?;
        let mut state = self.state().await?;
        let succeeded = self.all_hold(&state, &txn.compares).await?;
        let ops = if succeeded { &txn.success } else { &txn.failure };
        let at = state.newest.next();
        let mut results = match self.run(&mut state, ops, at).await {
            Ok(results) => results,
            Err(error) => {
                state.undo(at);
                return Err(error);
            }
        };
        if state.last == at {
            state.newest = at;
        }
        for result in &mut results {
            if let OpResult::Range(found) = result {
                found.revision = state.newest;
            }
        }
        Ok(TxnResponse { revision: state.newest, succeeded, results })
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        request.check(NAME)?;
        Err(Error::new(ErrorKind::Unsupported, Operation::Watch, NAME))
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        revision.check(NAME)?;
        Err(Error::new(ErrorKind::Unsupported, Operation::Compact, NAME))
    }
}
