//! Provides store wrappers for the torture: one records the newest revision that it has seen, one delays commits, and
//! one breaks the store's contract on purpose, to prove that the torture would detect a broken store.

use std::io;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicI64, AtomicU64};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use fastrand::Rng;
use ipam_core::attachment::Attachment;
use ipam_core::pending_commits::{PendingCommit, PendingCommitId, PendingCommits};
use kv::wrap::Fault;
use kv::{
    Error, ErrorKind, Operation, RangeRequest, RangeResponse, Result, Revision, Store, Txn, TxnResponse, WatchRequest,
    WatchStream,
};
use tokio::task::JoinSet;

use crate::ledger::Ledger;

/// The newest revision that the store has returned in any response. All clones of a [`Newest`] share the same revision.
#[derive(Clone, Debug, Default)]
pub(crate) struct Newest(Arc<AtomicI64>);

impl Newest {
    /// Returns the newest revision; 0 before the first response of the store.
    pub(crate) fn get(&self) -> i64 {
        self.0.load(SeqCst)
    }

    pub(crate) fn note(&self, revision: i64) {
        self.0.fetch_max(revision, SeqCst);
    }
}

/// A store wrapper that records the newest revision in the store's responses.
#[derive(Clone, Debug)]
pub(crate) struct Observed {
    inner: Arc<dyn Store>,
    newest: Newest,
}

impl Observed {
    pub(crate) fn new(inner: Arc<dyn Store>, newest: Newest) -> Self {
        Self { inner, newest }
    }
}

#[async_trait]
impl Store for Observed {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        let answer = self.inner.range(request).await?;
        self.newest.note(answer.revision.get());
        Ok(answer)
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        let answer = self.inner.txn(txn).await?;
        self.newest.note(answer.revision.get());
        Ok(answer)
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        self.inner.watch(request).await
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        self.inner.compact(revision).await
    }
}

/// A store wrapper that delays some commits, like a server that is frozen for a moment. The sender of a delayed commit
/// gets a timeout, but the commit still happens later.
#[derive(Clone, Debug)]
pub(crate) struct Late {
    inner: Arc<dyn Store>,
    /// On average, one commit in `rarity` commits is delayed.
    rarity: u32,
    rng: Arc<Mutex<Rng>>,
    ledger: Arc<Ledger>,
    late: Arc<Mutex<JoinSet<()>>>,
}

impl Late {
    pub(crate) fn new(inner: Arc<dyn Store>, rarity: u32, seed: u64, ledger: Arc<Ledger>) -> Self {
        Self { inner, rarity, rng: Arc::new(Mutex::new(Rng::with_seed(seed))), ledger, late: Arc::default() }
    }

    /// Waits until all delayed commits of this wrapper have happened.
    pub(crate) async fn landed(&self) {
        let late = std::mem::take(&mut *self.late.lock().unwrap_or_else(PoisonError::into_inner));
        late.join_all().await;
    }

    /// Chooses a random delay for a transaction. Returns `None` for every read and for most transactions.
    fn lateness(&self, txn: &Txn) -> Option<Duration> {
        if txn.is_read_only() {
            return None;
        }
        let mut rng = self.rng.lock().unwrap_or_else(PoisonError::into_inner);
        (rng.u32(..self.rarity) == 0).then(|| Duration::from_micros(rng.u64(..20_000)))
    }
}

#[async_trait]
impl Store for Late {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        self.inner.range(request).await
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        let Some(lateness) = self.lateness(&txn) else { return self.inner.txn(txn).await };
        self.ledger.count("fault: lands late", 1);
        let inner = Arc::clone(&self.inner);
        let mut late = self.late.lock().unwrap_or_else(PoisonError::into_inner);
        while late.try_join_next().is_some() {}
        // The caller whose commit was delayed never learns the outcome, but the checker sees the revision that the
        // commit made.
        late.spawn(async move {
            tokio::time::sleep(lateness).await;
            drop(inner.txn(txn).await);
        });
        drop(late);
        Err(Error::new(ErrorKind::Timeout, Operation::Txn, "late").with_detail("injected"))
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        self.inner.watch(request).await
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        self.inner.compact(revision).await
    }
}

/// Returns a function that chooses random faults for [`kv::wrap::FaultyStore`], so that about one store call in forty
/// fails or is delayed.
pub(crate) fn injected(seed: u64, ledger: Arc<Ledger>) -> impl Fn(Operation) -> Option<Fault> + Send + Sync {
    let rng = Mutex::new(Rng::with_seed(seed));
    move |_| {
        let mut rng = rng.lock().unwrap_or_else(PoisonError::into_inner);
        let (fault, what) = match rng.u32(..200) {
            0 => (Fault::ReplyLost, "fault: reply lost"),
            1 => (Fault::RequestLost, "fault: request lost"),
            2 => (Fault::NotSent, "fault: not sent"),
            3 | 4 => (Fault::Delay(Duration::from_micros(rng.u64(..5_000))), "fault: delay"),
            _ => return None,
        };
        drop(rng);
        ledger.count(what, 1);
        Some(fault)
    }
}

/// The part of a run that is broken on purpose, to prove that the checks detect it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sabotage {
    /// No part of the run is broken on purpose.
    #[default]
    None,
    /// One commit in fifty is carried out without a check of its guards.
    Guards,
    /// One commit in fifty is acknowledged but not carried out.
    Commits,
    /// One commit in fifty is carried out without its last write.
    Atomicity,
    /// With this fault, callers send commits without recording them as pending first.
    Intents,
}

impl Sabotage {
    /// Returns `n`: on average, one commit in `n` is delayed. [`Sabotage::Intents`] delays many commits, because the
    /// missing record of a pending commit shows only if the commit happens after the DEL. A run with
    /// [`Sabotage::Intents`] must find such a commit within seconds.
    pub(crate) fn rarity_of_late_commits(self) -> u32 {
        if self == Self::Intents { 4 } else { 60 }
    }
}

/// On average, one commit in `SABOTAGE_RARITY` commits is sabotaged.
const SABOTAGE_RARITY: u64 = 50;

/// A store wrapper that breaks the store's contract on purpose.
#[derive(Clone, Debug)]
pub(crate) struct Broken {
    inner: Arc<dyn Store>,
    sabotage: Sabotage,
    commits: Arc<AtomicU64>,
}

impl Broken {
    /// Wraps a store in a wrapper that carries out the sabotage. Returns the store unchanged if the sabotage does not
    /// concern stores.
    pub(crate) fn around(inner: Arc<dyn Store>, sabotage: Sabotage) -> Arc<dyn Store> {
        match sabotage {
            Sabotage::None | Sabotage::Intents => inner,
            _ => Arc::new(Self { inner, sabotage, commits: Arc::default() }),
        }
    }
}

#[async_trait]
impl Store for Broken {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        self.inner.range(request).await
    }

    async fn txn(&self, mut txn: Txn) -> Result<TxnResponse> {
        if txn.is_read_only() || self.commits.fetch_add(1, SeqCst) % SABOTAGE_RARITY < SABOTAGE_RARITY - 1 {
            return self.inner.txn(txn).await;
        }
        match self.sabotage {
            Sabotage::Guards => txn.compares.clear(),
            Sabotage::Atomicity => drop(txn.success.pop()),
            Sabotage::Commits => return self.inner.txn(Txn::new()).await,
            Sabotage::None | Sabotage::Intents => {}
        }
        self.inner.txn(txn).await
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        self.inner.watch(request).await
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        self.inner.compact(revision).await
    }
}

#[derive(Debug)]
pub(crate) struct NoIntents;

#[async_trait]
impl PendingCommits for NoIntents {
    fn record(&self, _attachment: &Attachment, _txn: &Txn) -> io::Result<PendingCommitId> {
        Ok(PendingCommitId(String::new()))
    }

    fn forget(&self, _id: &PendingCommitId) {}

    async fn pending(&self, _attachment: &Attachment) -> io::Result<Vec<PendingCommit>> {
        Ok(Vec::new())
    }
}
