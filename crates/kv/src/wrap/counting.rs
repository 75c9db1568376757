//! Counts calls and bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use async_trait::async_trait;

use crate::error::Result;
use crate::key::Revision;
use crate::request::{RangeRequest, Txn, WatchRequest};
use crate::response::{Kv, OpResult, RangeResponse, TxnResponse};
use crate::store::{Store, WatchStream};

/// The calls that went through a [`Counting`] store so far. A call is a round trip.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Calls of [`Store::range`].
    pub ranges: u64,
    /// Calls of [`Store::txn`].
    pub txns: u64,
    /// Calls of [`Store::watch`].
    pub watches: u64,
    /// Calls of [`Store::compact`].
    pub compactions: u64,
    /// Bytes of transactions, as [`Txn::size`] counts them.
    pub bytes_sent: u64,
    /// Bytes of keys and values in answers.
    pub bytes_received: u64,
}

impl Counts {
    /// Round trips of reads and transactions together.
    pub fn round_trips(&self) -> u64 {
        self.ranges + self.txns
    }
}

#[derive(Debug, Default)]
struct Counters {
    ranges: AtomicU64,
    txns: AtomicU64,
    watches: AtomicU64,
    compactions: AtomicU64,
    bytes_sent: AtomicU64,
    bytes_received: AtomicU64,
}

/// A store that counts what goes through it. Clones count together.
#[derive(Clone, Debug)]
pub struct Counting<S> {
    inner: S,
    counters: Arc<Counters>,
}

impl<S: Store> Counting<S> {
    /// Counts around this store, from zero.
    pub fn new(inner: S) -> Self {
        Self { inner, counters: Arc::default() }
    }

    /// The counts since the last call; they start again from zero.
    pub fn take(&self) -> Counts {
        let take = |counter: &AtomicU64| counter.swap(0, Relaxed);
        Counts {
            ranges: take(&self.counters.ranges),
            txns: take(&self.counters.txns),
            watches: take(&self.counters.watches),
            compactions: take(&self.counters.compactions),
            bytes_sent: take(&self.counters.bytes_sent),
            bytes_received: take(&self.counters.bytes_received),
        }
    }

    fn received(&self, kvs: &[Kv]) {
        let bytes: usize = kvs.iter().map(Kv::size).sum();
        self.counters.bytes_received.fetch_add(bytes as u64, Relaxed);
    }
}

#[async_trait]
impl<S: Store> Store for Counting<S> {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        self.counters.ranges.fetch_add(1, Relaxed);
        let answer = self.inner.range(request).await?;
        self.received(&answer.kvs);
        Ok(answer)
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        self.counters.txns.fetch_add(1, Relaxed);
        self.counters.bytes_sent.fetch_add(txn.size() as u64, Relaxed);
        let answer = self.inner.txn(txn).await?;
        for result in &answer.results {
            match result {
                OpResult::Put { prev } => self.received(prev.as_slice()),
                OpResult::Delete { prevs, .. } => self.received(prevs),
                OpResult::Range(found) => self.received(&found.kvs),
            }
        }
        Ok(answer)
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        self.counters.watches.fetch_add(1, Relaxed);
        self.inner.watch(request).await
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        self.counters.compactions.fetch_add(1, Relaxed);
        self.inner.compact(revision).await
    }
}
