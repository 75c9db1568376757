//! Provides store wrappers that count calls and bytes, inject faults of networks and servers, log calls, or rehearse
//! writes. Tests, metrics and benchmarks use the store wrappers, so the stores themselves need no hooks.

mod rehearsal;

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures::StreamExt;

use self::tracing_targets::STORE;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::key::Revision;
use crate::request::{Kv, OpResult, RangeRequest, RangeResponse, Txn, TxnResponse, WatchRequest};
use crate::store::{Store, WatchStream};

pub use rehearsal::Rehearsal;

/// The log targets of the crate `kv`.
pub mod tracing_targets {
    /// The log target for calls of a [`Store`](crate::Store).
    pub const STORE: &str = "margay::store";
    /// The log target for calls of [`transact!`](crate::transact!).
    pub const TRANSACT: &str = "margay::transact";
}

/// The numbers of calls and bytes that a [`CountingStore`] has counted; each store call is one round trip.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallCounts {
    /// Number of calls of [`Store::range`].
    pub ranges: u64,
    /// Number of calls of [`Store::txn`].
    pub txns: u64,
    /// Number of calls of [`Store::watch`].
    pub watches: u64,
    /// Number of calls of [`Store::compact`].
    pub compactions: u64,
    /// Number of bytes in transactions, as [`Txn::size`] counts them.
    pub bytes_sent: u64,
    /// Number of bytes of the keys and values in answers.
    pub bytes_received: u64,
}

impl CallCounts {
    /// Returns the number of reads plus the number of transactions.
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

/// A store wrapper that counts calls and bytes; clones of a counting store share their counters.
#[derive(Clone, Debug)]
pub struct CountingStore<S> {
    inner: S,
    counters: Arc<Counters>,
}

impl<S: Store> CountingStore<S> {
    /// Creates a wrapper around `inner` with all counters at zero.
    pub fn new(inner: S) -> Self {
        Self { inner, counters: Arc::default() }
    }

    /// Returns the call and byte counts since the last call of `take`, and resets them to zero.
    pub fn take(&self) -> CallCounts {
        let take = |counter: &AtomicU64| counter.swap(0, Relaxed);
        CallCounts {
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
impl<S: Store> Store for CountingStore<S> {
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

/// A fault that a [`FaultyStore`] injects into one store call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The request is not sent, and the caller gets `NotSent`.
    NotSent,
    /// The request is lost on the way to the store, and the caller gets `Timeout`.
    RequestLost,
    /// The store executes the request, but the answer is lost, and the caller gets `Disconnected`.
    ReplyLost,
    /// The call fails with `Timeout`; if it is a transaction, [`FaultyStore::deliver_held`] executes it later.
    Held,
    /// The store call is delayed by this duration.
    Delay(Duration),
    /// If the store call is a watch, it ends with `Disconnected` after its first batch; other calls fail with
    /// `NotSent`.
    Disconnect,
}

/// Decides which store calls fail, and how. A [`FaultyStore`] calls [`next`](Self::next) once for each store call, in
/// the order in which these calls begin.
pub trait Faults: Send + Sync + 'static {
    /// Returns the fault to inject into the next store call, if any.
    fn next(&self, operation: Operation) -> Option<Fault>;
}

impl<F: Fn(Operation) -> Option<Fault> + Send + Sync + 'static> Faults for F {
    fn next(&self, operation: Operation) -> Option<Fault> {
        self(operation)
    }
}

/// A store wrapper that injects [`Faults`]; clones of a faulty store share the faults and the held transactions.
#[derive(Clone)]
pub struct FaultyStore<S> {
    inner: S,
    faults: Arc<dyn Faults>,
    held: Arc<Mutex<VecDeque<Txn>>>,
}

impl<S: Store> FaultyStore<S> {
    /// Creates a wrapper around `inner` that injects the given faults.
    pub fn new(inner: S, faults: impl Faults) -> Self {
        Self { inner, faults: Arc::new(faults), held: Arc::default() }
    }

    /// Creates a store wrapper that injects the listed faults into the first transactions, in order; all other calls
    /// succeed.
    pub fn script(inner: S, faults: impl IntoIterator<Item = Option<Fault>>) -> Self {
        let script: Mutex<VecDeque<Option<Fault>>> = Mutex::new(faults.into_iter().collect());
        Self::new(inner, move |operation| match operation {
            Operation::Txn => script.lock().unwrap_or_else(PoisonError::into_inner).pop_front().flatten(),
            _ => None,
        })
    }

    /// Executes the held transactions in order, like a server that was frozen and continues.
    ///
    /// # Errors
    /// The first error that the inner store returns for a held transaction; the later held transactions stay in the
    /// queue.
    pub async fn deliver_held(&self) -> Result<Vec<TxnResponse>> {
        let mut answers = Vec::new();
        while let Some(txn) = self.pop_held() {
            answers.push(self.inner.txn(txn).await?);
        }
        Ok(answers)
    }

    fn pop_held(&self) -> Option<Txn> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    /// Injects the faults that take effect before the inner store is called, and returns the fault to inject
    /// afterwards.
    async fn request(&self, operation: Operation) -> Result<Option<Fault>> {
        let fault = self.faults.next(operation);
        match fault {
            Some(Fault::NotSent) => Err(self.error(ErrorKind::NotSent, operation)),
            Some(Fault::Disconnect) if operation != Operation::Watch => Err(self.error(ErrorKind::NotSent, operation)),
            Some(Fault::RequestLost) => Err(self.error(ErrorKind::Timeout, operation)),
            Some(Fault::Held) if operation != Operation::Txn => Err(self.error(ErrorKind::Timeout, operation)),
            Some(Fault::Delay(time)) => {
                tokio::time::sleep(time).await;
                Ok(None)
            }
            fault => Ok(fault),
        }
    }

    /// Injects the faults that take effect after the inner store has executed the request.
    fn reply<T>(&self, fault: Option<Fault>, operation: Operation, answer: T) -> Result<T> {
        match fault {
            Some(Fault::ReplyLost) => {
                Err(self.error(ErrorKind::Disconnected { resume_from: Revision::UNSET }, operation))
            }
            _ => Ok(answer),
        }
    }

    fn error(&self, kind: ErrorKind, operation: Operation) -> Error {
        Error::new(kind, operation, "faulty").with_detail("injected")
    }
}

impl<S: fmt::Debug> fmt::Debug for FaultyStore<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Faulty").field(&self.inner).finish()
    }
}

#[async_trait]
impl<S: Store> Store for FaultyStore<S> {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        let fault = self.request(Operation::Range).await?;
        let answer = self.inner.range(request).await?;
        self.reply(fault, Operation::Range, answer)
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        let fault = self.request(Operation::Txn).await?;
        if fault == Some(Fault::Held) {
            self.held.lock().unwrap_or_else(PoisonError::into_inner).push_back(txn);
            return Err(self.error(ErrorKind::Timeout, Operation::Txn));
        }
        let answer = self.inner.txn(txn).await?;
        self.reply(fault, Operation::Txn, answer)
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        let fault = self.request(Operation::Watch).await?;
        let stream = self.inner.watch(request).await?;
        if fault != Some(Fault::Disconnect) {
            return self.reply(fault, Operation::Watch, stream);
        }
        let this = self.error(ErrorKind::Closed, Operation::Watch);
        let store = this.store().to_owned();
        let cut = stream.take(1).flat_map(move |batch| {
            let resume_from = batch.as_ref().map_or(Revision::UNSET, |batch| batch.revision.next());
            let end = Error::new(ErrorKind::Disconnected { resume_from }, Operation::Watch, store.clone());
            futures::stream::iter([batch, Err(end)])
        });
        Ok(cut.boxed())
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        let fault = self.request(Operation::Compact).await?;
        self.inner.compact(revision).await?;
        self.reply(fault, Operation::Compact, ())
    }
}

/// A store wrapper that logs each call at debug level with its keys, duration and result, but never with values.
#[derive(Clone, Debug)]
pub struct TracedStore<S>(S);

impl<S: Store> TracedStore<S> {
    /// Creates a logging wrapper around `inner`.
    pub fn new(inner: S) -> Self {
        Self(inner)
    }
}

#[async_trait]
impl<S: Store> Store for TracedStore<S> {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        let range = request.range.to_string();
        let start = Instant::now();
        let answer = self.0.range(request).await;
        let elapsed = start.elapsed();
        match &answer {
            Ok(found) => {
                tracing::debug!(target: STORE, %range, ?elapsed, revision = %found.revision, count = found.count, "read a range of keys");
            }
            Err(error) => tracing::debug!(target: STORE, %range, ?elapsed, %error, "failed to read a range of keys"),
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
                tracing::debug!(target: STORE, compares, ops, bytes, ?elapsed, %revision, succeeded, "ran a transaction");
            }
            Err(error) => {
                tracing::debug!(target: STORE, compares, ops, bytes, ?elapsed, %error, "a transaction failed");
            }
        }
        answer
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        tracing::debug!(target: STORE, range = %request.range, start = %request.start, "starting a watch");
        self.0.watch(request).await
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        tracing::debug!(target: STORE, %revision, "compacting the store");
        self.0.compact(revision).await
    }
}
