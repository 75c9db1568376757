//! Records each commit that an assignment is about to send. If the process dies before it knows a commit's outcome,
//! another process can find it out from the record.
//!
//! A store in another process, such as etcd, may execute a commit after the commit's sender has died. The store may
//! execute the commit of a dead sender even after another process has looked for the commit's effect and found none.
//! Each transaction is recorded before it is sent, and its record is removed once the store can no longer execute the
//! transaction. If a process dies before it knows a commit's outcome, the next operation on the attachment finds the
//! pending commit and sends the recorded transaction again. If a recorded transaction succeeds when it is sent again,
//! the addresses that it assigned are in the store. If the guards of the repeated transaction fail, the transaction was
//! executed before, or a guarded key has changed.
//!
//! A key that has changed never gets its old revision again. A transaction that creates a block also guards the absence
//! of keys: those of the block, the affinity and the handle. An absent key is a weak guard, because a key can be
//! created and deleted again before a delayed copy of the transaction arrives. To rule out a delayed execution, the
//! process that settles the pending commit checks whether an existing key that the transaction guards has changed. If
//! none of the guarded keys has changed, the settling process rewrites one of them with an equal value, so that the
//! guards of a delayed copy of the transaction fail. Each transaction guards at least one existing key, that of the
//! pool's document.
//!
//! If pending commits are recorded, each commit assigns addresses to one attachment only, so that each record belongs
//! to one attachment.
//!
//! An embedded store needs no records of pending commits. Only the process that has the lock of the embedded store can
//! commit, and the lock is released when that process dies. In an embedded store, no commit of a dead process can be
//! executed later, so the next process that opens the store sees whether the last commit was executed.

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

/// Maximum pause between two attempts to send a transaction whose outcome is unknown.
const MAX_RETRY_PAUSE: Duration = Duration::from_millis(200);

/// The id of a recorded pending commit.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PendingCommitId(pub String);

/// A recorded transaction whose outcome is unknown.
#[derive(Clone, Debug, PartialEq)]
pub struct PendingCommit {
    /// The id of the pending commit's record.
    pub id: PendingCommitId,
    /// The recorded transaction.
    pub txn: Txn,
}

/// Keeps records of pending commits. The records must survive the end of the process, but need not survive a reboot of
/// the machine. Every assignment waits for the methods of this trait, so they must be fast and should not write to a
/// disk. An assignment may be slowed down only if an earlier process left the record of a pending commit.
#[async_trait]
pub trait PendingCommits: Send + Sync + fmt::Debug {
    /// Records a transaction that is about to be sent for an attachment; [`Self::pending`] returns the transaction from
    /// now on. If this method fails, the caller does not send the transaction.
    ///
    /// # Errors
    /// Any I/O error that prevents recording the transaction.
    fn record(&self, attachment: &Attachment, txn: &Txn) -> io::Result<PendingCommitId>;

    /// Removes the record of a pending commit whose outcome is known. If the record cannot be removed, the next
    /// operation on the attachment needs an additional round trip.
    fn forget(&self, id: &PendingCommitId);

    /// Returns the pending commits of an attachment for this store. Ignores records that cannot be decoded or that
    /// belong to a different store. To check that a record was made for this store, the implementation may query the
    /// store for its identity.
    ///
    /// # Errors
    /// Any I/O error that prevents reading the records of the pending commits. A store error that occurs while
    /// comparing stores is returned unchanged.
    async fn pending(&self, attachment: &Attachment) -> io::Result<Vec<PendingCommit>>;
}

/// Ensures that the store can execute no pending commit of an attachment from now on.
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

/// Sends a transaction again and again until the store answers. Returns `None` if the store rejects the transaction
/// permanently.
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

/// Returns the existing keys that a transaction guards, each with the revision that it must have.
fn guarded_as_present(txn: &Txn) -> Vec<(Key, Revision)> {
    let guards = txn.compares.iter().filter_map(|compare| match (&compare.range, &compare.target) {
        (Range::Key(key), Target::ModRevision(revision)) if compare.op == CompareOp::Equal && revision.is_set() => {
            Some((key.clone(), *revision))
        }
        _ => None,
    });
    guards.take(MAX_TXN_OPS).collect()
}

/// True if the transaction has succeeded and has overwritten or deleted a key whose revision it guards, so that a
/// delayed duplicate of the transaction always fails.
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

/// Makes every later execution of a transaction fail, even if a key whose absence the transaction guards is created and
/// deleted again.
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
            "the store may still apply an unanswered commit later; margay cannot prevent this, because the commit \
             depends on no existing key that margay could rewrite"
        );
        return Ok(());
    };
    tracing::info!(
        %key,
        "a commit got no answer; rewriting a key that the commit depends on, so that the store rejects the commit if \
         the commit arrives late"
    );
    let again =
        Txn::new().with_compares([Compare::unchanged(key.clone(), revision)]).with_success([Op::put(key, value)]);
    // If another process changes the guarded key before it is rewritten, the rewrite fails, but the guards of the
    // pending transaction then fail as well.
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

/// A store wrapper for assignments to one attachment. `RecordingStore` records each writing transaction before sending
/// it, and keeps the record until the transaction's outcome is known.
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
    /// True if the transaction was sent at least once with an unknown outcome.
    in_doubt: bool,
}

impl RecordingStore {
    pub(crate) fn new(inner: Arc<dyn Store>, pending_commits: Arc<dyn PendingCommits>, attachment: Attachment) -> Self {
        Self { inner, pending_commits, attachment, recorded: Mutex::default() }
    }

    /// Records a transaction, unless it is a retry of the recorded transaction. To recognize a retry, transactions are
    /// compared without the reads in their failure branches, because only retries have such reads.
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

    /// Removes the record of the transaction if the answer shows the transaction's outcome.
    fn forget_if_final(&self, answer: &kv::Result<TxnResponse>) {
        let mut recorded = self.recorded.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(current) = recorded.as_mut() else { return };
        match answer {
            Err(error) if !error.is_final() => current.in_doubt = true,
            Err(_) if current.in_doubt => {}
            // A copy of the transaction may still be in transit to the store, so the record of the pending commit is
            // kept for the next operation on the attachment.
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
