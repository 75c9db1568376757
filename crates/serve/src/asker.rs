//! The client that waits for an answer, and a store that commits nothing for a client that does not.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use kv::{
    Deadline, Error, ErrorKind, Operation, Outcome, RangeRequest, RangeResponse, Result, Revision, Store, Txn,
    TxnResponse, WatchRequest, WatchStream,
};
use wire::peer;

use crate::metrics::Metrics;

/// The longest time that a request may take, whatever the client says.
const LONGEST: Duration = Duration::from_secs(10 * 60);

/// The moment at which a request that comes now is of no use any more.
pub(crate) fn until(within: Duration) -> Instant {
    Instant::now() + within.min(LONGEST)
}

/// A client that waits for an answer, until a moment.
#[derive(Clone, Debug)]
pub struct Asker {
    connection: Arc<OwnedFd>,
    /// After that the answer is of no use.
    pub until: Instant,
}

impl Asker {
    /// The client at the other end of a connection.
    ///
    /// # Errors
    /// Those of the system.
    pub fn new(connection: impl AsFd, until: Instant) -> io::Result<Self> {
        Ok(Self { connection: Arc::new(connection.as_fd().try_clone_to_owned()?), until })
    }

    /// True while the connection is open and the moment has not come.
    pub fn still_asks(&self) -> bool {
        Instant::now() < self.until && !peer::is_gone(&*self.connection)
    }

    /// The time that is left, for a call of the allocator.
    pub fn deadline(&self) -> Deadline {
        Deadline::after(self.until.saturating_duration_since(Instant::now()))
    }
}

/// A store that refuses to commit once one of its clients does not ask any more.
///
/// A plugin whose connection is closed goes on by itself, or is dead and its runtime has called DEL. A commit for it would
/// come too late. Each request that it finishes is a beat of the [`Pulse`](crate::pulse::Pulse).
#[derive(Debug)]
pub struct AskedStore {
    inner: Arc<dyn Store>,
    askers: Vec<Asker>,
    metrics: Arc<Metrics>,
}

impl AskedStore {
    /// The store, as these clients ask for it. The time of each commit is noted.
    pub fn new(inner: Arc<dyn Store>, askers: Vec<Asker>, metrics: Arc<Metrics>) -> Self {
        Self { inner, askers, metrics }
    }
}

#[async_trait]
impl Store for AskedStore {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        let answer = self.inner.range(request).await;
        self.metrics.pulse.beat();
        answer
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        if txn.is_read_only() {
            let answer = self.inner.txn(txn).await;
            self.metrics.pulse.beat();
            return answer;
        }
        if !self.askers.iter().all(Asker::still_asks) {
            let error = Error::new(ErrorKind::Conflict { attempts: 0 }, Operation::Txn, "serve");
            return Err(error.with_detail("the caller does not ask any more").with_outcome(Outcome::NotApplied));
        }
        let begun = Instant::now();
        let answer = self.inner.txn(txn).await;
        self.metrics.observe_commit(begun.elapsed());
        answer
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        self.inner.watch(request).await
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        self.inner.compact(revision).await
    }
}
