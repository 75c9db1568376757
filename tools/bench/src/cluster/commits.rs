//! Counts the attempts and the commits of allocators, and finds out which guards made commits fail.

use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use ipam_core::model::keys;
use kv::{
    Compare, Content, Op, Range, RangeRequest, RangeResponse, Revision, Store, Target, Txn, TxnResponse, WatchRequest,
    WatchStream,
};

use crate::Outcome;

/// A store wrapper that counts attempts of assignments and keeps the guards of failed commits. Clones share their
/// counts.
#[derive(Clone, Debug)]
pub(super) struct CommitStore<S> {
    inner: S,
    counts: Arc<Mutex<CommitCounts>>,
}

/// The attempts and commits that a [`CommitStore`] has counted.
#[derive(Debug, Default)]
pub(super) struct CommitCounts {
    /// Number of attempts of assignments. Each attempt begins with a transaction that reads the IPAM settings.
    pub(super) attempts: usize,
    pub(super) failed: Vec<FailedCommit>,
}

/// A commit that changed nothing, because one of its guards did not hold.
#[derive(Debug)]
pub(super) struct FailedCommit {
    guards: Vec<Compare>,
    /// The store's revision when the guards were evaluated.
    at: Revision,
}

/// The kind of key that another writer had written when a commit failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Collision {
    /// A block that the commit writes.
    Block,
    /// A new block in a range of keys that the commit guards against overlapping blocks.
    Neighbour,
    Other,
}

impl<S: Store> CommitStore<S> {
    pub(super) fn new(inner: S) -> Self {
        Self { inner, counts: Arc::default() }
    }

    /// Returns the counts since the last call of `take`.
    pub(super) fn take(&self) -> CommitCounts {
        std::mem::take(&mut *self.counts.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn count(&self, count: impl FnOnce(&mut CommitCounts)) {
        count(&mut self.counts.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

#[async_trait]
impl<S: Store> Store for CommitStore<S> {
    async fn range(&self, request: RangeRequest) -> kv::Result<RangeResponse> {
        self.inner.range(request).await
    }

    async fn txn(&self, txn: Txn) -> kv::Result<TxnResponse> {
        if txn.is_read_only() {
            let settings = Range::Key(keys::config());
            if txn.success.iter().any(|op| matches!(op, Op::Range(read) if read.range == settings)) {
                self.count(|counts| counts.attempts += 1);
            }
            return self.inner.txn(txn).await;
        }
        let guards = txn.compares.clone();
        let answer = self.inner.txn(txn).await?;
        if !answer.succeeded {
            self.count(|counts| counts.failed.push(FailedCommit { guards, at: answer.revision }));
        }
        Ok(answer)
    }

    async fn watch(&self, request: WatchRequest) -> kv::Result<WatchStream> {
        self.inner.watch(request).await
    }

    async fn compact(&self, revision: Revision) -> kv::Result<()> {
        self.inner.compact(revision).await
    }
}

impl FailedCommit {
    /// Evaluates the guards again at the revision at which the commit failed.
    pub(super) async fn collision(&self, store: &impl Store) -> Outcome<Collision> {
        let mut collision = Collision::Other;
        for guard in &self.guards {
            let request = RangeRequest::new(guard.range.clone()).with_at(self.at).with_content(Content::KeysOnly);
            if guard.holds_for(&store.range(request).await?.kvs) {
                continue;
            }
            match (&guard.range, &guard.target) {
                (Range::Key(key), _) if keys::parse_block(key).is_some() => return Ok(Collision::Block),
                (_, Target::CreateRevision(_)) => collision = Collision::Neighbour,
                _ => {}
            }
        }
        Ok(collision)
    }
}
