//! Records the commit that an assignment is about to send, in case the process dies before it knows the commit's
//! outcome.
//!
//! On a store that another process serves, a commit may happen after its sender has died, and even after another
//! process has searched for the commit's effect in vain. The transaction is therefore recorded before it is sent, and
//! the record is removed once the transaction can no longer happen. The next call that assigns to the attachment or
//! releases it finds the pending commit and sends the recorded transaction again. If the transaction succeeds, its
//! addresses can be found. If the transaction's guards fail, either the transaction has already happened, or a key that
//! it guards has changed.
//!
//! A changed key never returns to its old revision. But a transaction that creates a block guards the block, the
//! affinity and the handle as absent, and these keys may be absent again when the transaction arrives. If all keys that
//! the transaction guards as present are unchanged, the settling process rewrites one of these documents without a
//! change. The pool's document is always among them. After the rewrite, the guards of a late transaction fail.
//!
//! A pending commit belongs to one attachment. When pending commits are recorded, a commit assigns to one attachment
//! only.
//!
//! An embedded store needs no record of pending commits. The process with the store lock makes all commits, and the
//! lock ends with the process. The next process that opens the store sees whether a dead process's commit happened. A
//! commit of a dead process cannot happen later.

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use kv::{
    Compare, CompareOp, Deadline, ErrorKind, Key, MAX_TXN_OPS, Op, OpResult, Operation, Outcome, Range, RangeRequest,
    RangeResponse, Revision, Store, Target, Txn, TxnResponse, WatchRequest, WatchStream,
};

use crate::attachment::Attachment;
use crate::error::Result;

/// Maximum pause before a pending commit is sent again.
const MAX_RETRY_PAUSE: Duration = Duration::from_millis(200);

/// The id of a recorded pending commit.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PendingCommitId(pub String);

/// A recorded transaction with an unknown outcome.
#[derive(Clone, Debug, PartialEq)]
pub struct PendingCommit {
    /// The id of the pending commit's record.
    pub id: PendingCommitId,
    /// The recorded transaction.
    pub txn: Txn,
}

/// Keeps records of pending commits. The records must survive the process, but not the machine. A record is written
/// between two round trips, so a call should take no longer than a few writes to memory, unless an earlier process left
/// a record.
#[async_trait]
pub trait PendingCommits: Send + Sync + fmt::Debug {
    /// Records the transaction that is about to be sent for an attachment, so that [`Self::pending`] returns the
    /// transaction from now on. If recording fails, the transaction is not sent.
    ///
    /// # Errors
    /// Any reason why the transaction cannot be recorded.
    fn record(&self, attachment: &Attachment, txn: &Txn) -> io::Result<PendingCommitId>;

    /// Removes a pending commit with a known outcome. A record that was not removed costs the next call a round trip.
    fn forget(&self, id: &PendingCommitId);

    /// Returns the pending commits of an attachment on this store. Records of other stores, and records that cannot be
    /// read, are ignored. If any records exist, the store may be queried for its identity.
    ///
    /// # Errors
    /// Any reason why the store's pending commits cannot be determined. A store error is passed on unchanged.
    async fn pending(&self, attachment: &Attachment) -> io::Result<Vec<PendingCommit>>;
}

/// Ensures that no pending commit of this attachment can happen on this store from now on.
pub(crate) async fn settle_all(
    pending_commits: &dyn PendingCommits,
    store: &Arc<dyn Store>,
    attachment: &Attachment,
    deadline: Deadline,
) -> Result<()> {
    for PendingCommit { id, txn } in pending_commits.pending(attachment).await.map_err(unreadable)? {
        settle(store, &id, &txn, deadline).await?;
        pending_commits.forget(&id);
    }
    Ok(())
}

async fn settle(store: &Arc<dyn Store>, id: &PendingCommitId, txn: &Txn, deadline: Deadline) -> kv::Result<()> {
    tracing::info!(?id, "an earlier assignment was interrupted; sending its commit again");
    let answer = send_again(store, txn, deadline).await?;
    if answer.is_some_and(|answer| cannot_come_again(txn, &answer)) {
        return Ok(());
    }
    invalidate(store, txn, deadline).await
}

/// Sends a transaction until the store answers. Returns `None` if the store rejects it permanently.
async fn send_again(store: &Arc<dyn Store>, txn: &Txn, deadline: Deadline) -> kv::Result<Option<TxnResponse>> {
    let mut pause = Duration::from_millis(5);
    loop {
        let error = match store.txn(txn.clone()).await {
            Ok(answer) => return Ok(Some(answer)),
            Err(error) => error,
        };
        if matches!(error.kind(), ErrorKind::InvalidArgument(_) | ErrorKind::TooLarge { .. }) {
            tracing::warn!(%error, "the store rejected the repeated commit as invalid; dropping the commit");
            return Ok(None);
        }
        let is_hopeless = !error.kind().is_transient() && error.is_final();
        if is_hopeless || deadline.work_is_over() {
            return Err(error);
        }
        tokio::time::sleep(pause.min(deadline.remaining_for_work())).await;
        pause = MAX_RETRY_PAUSE.min(pause * 2);
    }
}

/// Returns the keys that a transaction guards as present, with the guarded revisions.
fn guarded_as_present(txn: &Txn) -> Vec<(Key, Revision)> {
    let guards = txn.compares.iter().filter_map(|compare| match (&compare.range, &compare.target) {
        (Range::Key(key), Target::ModRevision(revision)) if compare.op == CompareOp::Equal && revision.is_set() => {
            Some((key.clone(), *revision))
        }
        _ => None,
    });
    guards.take(MAX_TXN_OPS).collect()
}

/// True if the transaction has succeeded and changed a key that it guards as present. After such a success, a second
/// copy of the transaction that is still in transit always fails.
fn cannot_come_again(txn: &Txn, answer: &TxnResponse) -> bool {
    let guarded = guarded_as_present(txn);
    let writes = |range: Range| guarded.iter().any(|(key, _)| range == Range::Key(key.clone()));
    answer.succeeded
        && txn.success.iter().any(|op| match op {
            Op::Put { key, .. } => writes(Range::Key(key.clone())),
            Op::Delete { range, .. } => writes(range.clone()),
            _ => false,
        })
}

/// Ensures that a transaction can never succeed, even if keys that it guards become absent again.
async fn invalidate(store: &Arc<dyn Store>, txn: &Txn, deadline: Deadline) -> kv::Result<()> {
    let guarded = guarded_as_present(txn);
    let read = Txn::new().with_success(guarded.iter().map(|(key, _)| Op::range(Range::Key(key.clone()))));
    let Some(found) = send_again(store, &read, deadline).await? else { return Ok(()) };
    let mut unchanged = None;
    for ((key, revision), result) in guarded.into_iter().zip(found.results) {
        let OpResult::Range(found) = result else { continue };
        match found.kvs.into_iter().next() {
            Some(kv) if kv.mod_revision == revision => unchanged = Some((key, revision, kv.value)),
            _ => return Ok(()),
        }
    }
    let Some((key, revision, value)) = unchanged else {
        tracing::warn!(
            "the store may still apply an unanswered commit: none of the keys that the commit compares exists"
        );
        return Ok(());
    };
    tracing::info!(
        %key,
        "rewriting a key that an unanswered commit compares, so that the store can no longer apply the commit"
    );
    let again =
        Txn::new().with_compares([Compare::unchanged(key.clone(), revision)]).with_success([Op::put(key, value)]);
    // If another process changed the key first, the transaction's guards fail as well.
    send_again(store, &again, deadline).await.map(drop)
}

fn unreadable(error: io::Error) -> kv::Error {
    match error.downcast::<kv::Error>() {
        Ok(error) => error.with_outcome(Outcome::NotApplied),
        Err(error) => kv::Error::new(ErrorKind::Io, Operation::Open, "intents")
            .with_detail("cannot see whether an earlier assignment broke off")
            .with_source(error),
    }
}

/// A store for assignments to an attachment. Each writing transaction is recorded before it is sent, and the record is
/// kept until the transaction's outcome is known.
pub(crate) struct RecordingStore {
    inner: Arc<dyn Store>,
    pending_commits: Arc<dyn PendingCommits>,
    attachment: Attachment,
    /// The transaction that is currently recorded as a pending commit.
    recorded: Mutex<Option<RecordedCommit>>,
}

impl fmt::Debug for RecordingStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecordingStore").field("inner", &self.inner).finish_non_exhaustive()
    }
}

#[derive(Clone, Debug)]
struct RecordedCommit {
    id: PendingCommitId,
    txn: Txn,
    /// True once sending the transaction has failed with an unknown outcome.
    in_doubt: bool,
}

impl RecordingStore {
    pub(crate) fn new(inner: Arc<dyn Store>, pending_commits: Arc<dyn PendingCommits>, attachment: Attachment) -> Self {
        Self { inner, pending_commits, attachment, recorded: Mutex::default() }
    }

    /// Records a transaction, unless the transaction is a retry of the recorded one. The reads of the failure branch
    /// are not compared, because they are added only for a retry.
    fn record(&self, txn: &Txn) -> kv::Result<()> {
        let mut recorded = self.recorded.lock().unwrap_or_else(PoisonError::into_inner);
        if recorded
            .as_ref()
            .is_some_and(|recorded| recorded.txn.compares == txn.compares && recorded.txn.success == txn.success)
        {
            return Ok(());
        }
        let txn = Txn::new().with_compares(txn.compares.clone()).with_success(txn.success.clone());
        let id = self.pending_commits.record(&self.attachment, &txn).map_err(|error| {
            kv::Error::new(ErrorKind::Io, Operation::Txn, "intents")
                .with_outcome(Outcome::NotApplied)
                .with_detail("cannot note what is about to be done, so nothing was done")
                .with_source(error)
        })?;
        *recorded = Some(RecordedCommit { id, txn, in_doubt: false });
        Ok(())
    }

    /// Removes the record if the transaction's outcome is known.
    fn forget_if_final(&self, answer: &kv::Result<TxnResponse>) {
        let mut recorded = self.recorded.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(current) = recorded.as_mut() else { return };
        match answer {
            Err(error) if !error.is_final() => current.in_doubt = true,
            Err(_) if current.in_doubt => {}
            // The first transaction may still be in transit, so the next call settles it.
            Ok(answer) if current.in_doubt && !cannot_come_again(&current.txn, answer) => *recorded = None,
            Ok(_) | Err(_) => {
                self.pending_commits.forget(&current.id);
                *recorded = None;
            }
        }
    }
}

#[async_trait]
impl Store for RecordingStore {
    async fn range(&self, request: RangeRequest) -> kv::Result<RangeResponse> {
        self.inner.range(request).await
    }

    async fn txn(&self, txn: Txn) -> kv::Result<TxnResponse> {
        if txn.is_read_only() {
            return self.inner.txn(txn).await;
        }
        self.record(&txn)?;
        let answer = self.inner.txn(txn).await;
        self.forget_if_final(&answer);
        answer
    }

    async fn watch(&self, request: WatchRequest) -> kv::Result<WatchStream> {
        self.inner.watch(request).await
    }

    async fn compact(&self, revision: Revision) -> kv::Result<()> {
        self.inner.compact(revision).await
    }
}
