//! Broken on purpose, to see that the torture notices.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use async_trait::async_trait;
use ipam_core::attachment::Attachment;
use ipam_core::intents::{IntentId, Intents, Pending};
use kv::{RangeRequest, RangeResponse, Result, Revision, Store, Txn, TxnResponse, WatchRequest, WatchStream};

/// The broken part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sabotage {
    /// Nothing.
    #[default]
    None,
    /// Now and then the store carries a commit out although its guards do not hold.
    Guards,
    /// Now and then the store acknowledges a commit that it has not carried out.
    Commits,
    /// Now and then the store leaves out the last write of a commit.
    Atomicity,
    /// Callers that break off leave no notes.
    Intents,
}

impl Sabotage {
    /// One commit of so many lands late. Callers without notes are wrong only where such a commit lands after a DEL, so that is
    /// frequent with them: the torture notices it within seconds.
    pub(crate) fn rarity_of_late_commits(self) -> u32 {
        if self == Self::Intents { 4 } else { 60 }
    }
}

/// How many commits go well for one that does not.
const RARITY: u64 = 50;

/// A store that is broken.
#[derive(Clone, Debug)]
pub(crate) struct Broken {
    inner: Arc<dyn Store>,
    sabotage: Sabotage,
    commits: Arc<AtomicU64>,
}

impl Broken {
    /// The store itself, if nothing of it must be broken.
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
        if txn.is_read_only() || self.commits.fetch_add(1, SeqCst) % RARITY < RARITY - 1 {
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

/// Notes nothing.
#[derive(Debug)]
pub(crate) struct NoIntents;

#[async_trait]
impl Intents for NoIntents {
    fn record(&self, _attachment: &Attachment, _txn: &Txn) -> io::Result<IntentId> {
        Ok(IntentId(String::new()))
    }

    fn forget(&self, _id: &IntentId) {}

    async fn pending(&self, _attachment: &Attachment) -> io::Result<Vec<Pending>> {
        Ok(Vec::new())
    }
}
