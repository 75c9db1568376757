//! Intents: what an assignment is about to commit, noted for the case that its process dies before it knows the outcome.
//!
//! On a store of other processes a commit may land after its sender has died, and even after somebody has looked and seen
//! nothing. So the transaction is noted before it is sent and the note is removed when its outcome is known. Whoever next
//! assigns to the attachment or releases it, and finds a note, sends that very transaction again. Either it goes through
//! now, and its addresses are there to be found; or its guards do not hold, so it has happened or something that it relied
//! on has changed, and it cannot happen any more. (Unless it guards absences alone, all written by it, and all of them are
//! absent once more when it lands: a block that was made for it has then been deleted meanwhile.)
//!
//! An embedded store needs no notes: its commits are made by the process that asks for them, under a lock on the store that
//! ends with the process. Whoever opens the store next finds a dead process's commit there or not, and it cannot come later.

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use kv::{
    Deadline, ErrorKind, Operation, Outcome, RangeRequest, RangeResponse, Revision, Store, Txn, TxnResponse,
    WatchRequest, WatchStream,
};

use crate::attachment::Attachment;
use crate::error::Result;
use crate::ipam::Ipam;

/// The longest pause before an intent is sent once more.
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// Names one noted intent.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct IntentId(pub String);

/// An intent of which the outcome is not known.
#[derive(Clone, Debug, PartialEq)]
pub struct Pending {
    /// Which one.
    pub id: IntentId,
    /// The transaction.
    pub txn: Txn,
}

/// Where intents are noted. They have to outlive the process, but not the machine, and are needed between two round trips:
/// calls should take no longer than a few writes to memory.
pub trait Intents: Send + Sync + fmt::Debug {
    /// Notes what is about to be sent for an attachment. Nothing is sent if this fails.
    ///
    /// # Errors
    /// What keeps it from being noted.
    fn record(&self, attachment: &Attachment, txn: &Txn) -> io::Result<IntentId>;

    /// Removes a note: its outcome is known. One that stays by mistake costs its finder a round trip.
    fn forget(&self, id: &IntentId);

    /// What is noted for an attachment. Notes of others, and notes that cannot be read, are not an error.
    ///
    /// # Errors
    /// What keeps it from being known whether there are notes at all.
    fn pending(&self, attachment: &Attachment) -> io::Result<Vec<Pending>>;
}

impl Ipam {
    /// Makes sure that nothing that was noted for an attachment can land from now on.
    pub(crate) async fn settle_intents(&self, attachment: &Attachment, deadline: Deadline) -> Result<()> {
        let Some(intents) = self.intents() else { return Ok(()) };
        for Pending { id, txn } in intents.pending(attachment).map_err(unreadable)? {
            tracing::info!(?id, container = attachment.container, "an earlier assignment broke off; sending it again");
            send_again(self.store(), &txn, deadline).await?;
            intents.forget(&id);
        }
        Ok(())
    }

    /// The store for an assignment to an attachment: one that notes what goes out, where intents are noted at all.
    pub(crate) fn noting(&self, attachment: &Attachment) -> Arc<dyn Store> {
        let inner = Arc::clone(self.store());
        match self.intents() {
            None => inner,
            Some(intents) => {
                let (intents, attachment) = (Arc::clone(intents), attachment.clone());
                Arc::new(Noting { inner, intents, attachment, noted: Mutex::default() })
            }
        }
    }
}

/// Sends a transaction until it is answered. What the answer says does not matter.
async fn send_again(store: &Arc<dyn Store>, txn: &Txn, deadline: Deadline) -> kv::Result<()> {
    let mut pause = Duration::from_millis(5);
    loop {
        let error = match store.txn(txn.clone()).await {
            Ok(_) => return Ok(()),
            Err(error) => error,
        };
        if matches!(error.kind(), ErrorKind::InvalidArgument(_) | ErrorKind::TooLarge { .. }) {
            tracing::warn!(%error, "the store refuses what was noted, now and always");
            return Ok(());
        }
        let is_hopeless = !error.kind().is_transient() && error.outcome() == Outcome::NotApplied;
        if is_hopeless || deadline.work_is_over() {
            return Err(error);
        }
        tokio::time::sleep(pause.min(deadline.remaining_for_work())).await;
        pause = LONGEST_PAUSE.min(pause * 2);
    }
}

fn unreadable(error: io::Error) -> kv::Error {
    kv::Error::new(ErrorKind::Io, Operation::Open, "intents")
        .with_detail("cannot see whether an earlier assignment broke off")
        .with_source(error)
}

/// A store that notes each transaction that writes, before it is sent, until its outcome is known.
#[derive(Debug)]
struct Noting {
    inner: Arc<dyn Store>,
    intents: Arc<dyn Intents>,
    attachment: Attachment,
    /// What is noted now.
    noted: Mutex<Option<Noted>>,
}

#[derive(Clone, Debug)]
struct Noted {
    id: IntentId,
    txn: Txn,
    /// True once a sending of it has failed without telling whether it happened.
    in_doubt: bool,
}

impl Noting {
    /// Notes a transaction, unless it is the noted one that is sent again. What it reads where its guards fail is no part of
    /// it: that is asked only when it is sent again.
    fn note(&self, txn: &Txn) -> kv::Result<()> {
        let mut noted = self.noted.lock().unwrap_or_else(PoisonError::into_inner);
        if noted.as_ref().is_some_and(|noted| noted.txn.compares == txn.compares && noted.txn.success == txn.success) {
            return Ok(());
        }
        let txn = Txn::new().with_compares(txn.compares.clone()).with_success(txn.success.clone());
        let id = self.intents.record(&self.attachment, &txn).map_err(|error| {
            kv::Error::new(ErrorKind::Io, Operation::Txn, "intents")
                .with_outcome(Outcome::NotApplied)
                .with_detail("cannot note what is about to be done, so nothing was done")
                .with_source(error)
        })?;
        *noted = Some(Noted { id, txn, in_doubt: false });
        Ok(())
    }

    /// Removes the note if the outcome is known now.
    fn judge(&self, answer: &kv::Result<TxnResponse>) {
        let mut noted = self.noted.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(current) = noted.as_mut() else { return };
        match answer {
            Err(error) if error.outcome() == Outcome::Unknown => current.in_doubt = true,
            Err(_) if current.in_doubt => {}
            Ok(_) | Err(_) => {
                self.intents.forget(&current.id);
                *noted = None;
            }
        }
    }
}

#[async_trait]
impl Store for Noting {
    async fn range(&self, request: RangeRequest) -> kv::Result<RangeResponse> {
        self.inner.range(request).await
    }

    async fn txn(&self, txn: Txn) -> kv::Result<TxnResponse> {
        if txn.is_read_only() {
            return self.inner.txn(txn).await;
        }
        self.note(&txn)?;
        let answer = self.inner.txn(txn).await;
        self.judge(&answer);
        answer
    }

    async fn watch(&self, request: WatchRequest) -> kv::Result<WatchStream> {
        self.inner.watch(request).await
    }

    async fn compact(&self, revision: Revision) -> kv::Result<()> {
        self.inner.compact(revision).await
    }
}
