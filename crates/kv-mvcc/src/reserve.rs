//! A full disk: the room that a release may use up, and the writes that then wait until there is room again.
//!
//! An address that comes back is a write, too, and a full disk would refuse it; but it is what a host needs most then.
//! So a handle for [`Purpose::Release`] makes room for itself, in this order: it gives up history, which frees room within the
//! engine's files; and it gives up some of the store's [`Reserve`], again and again until the write goes through or nothing
//! is left. Every other handle leaves the reserve alone, and writes nothing while a part of it is gone.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kv::{Error, ErrorKind, Operation, Outcome, Purpose, Result, Txn, TxnResponse};

use crate::options::Reserve;
use crate::store::Inner;
use crate::table::Table;
use crate::writer::Job;

impl Inner {
    /// Has a transaction carried out.
    ///
    /// # Errors
    /// Those of the job; `NoSpace` if nothing is left that could be given up.
    pub(crate) async fn write(self: &Arc<Self>, txn: Txn, purpose: Purpose) -> Result<TxnResponse> {
        if purpose == Purpose::Any {
            return self.submit(Operation::Txn, |reply| Job::Txn { txn, purpose, reply }).await;
        }
        loop {
            let again = txn.clone();
            match self.submit(Operation::Txn, |reply| Job::Txn { txn: again, purpose, reply }).await {
                Err(error) if is_full(&error) && error.outcome() == Outcome::NotApplied => {
                    self.submit(Operation::Txn, |reply| Job::MakeRoom { full: error, reply }).await?;
                }
                answer => return answer,
            }
        }
    }

    /// Makes room for a release: by giving up history if that can be written, else by giving up some of the reserve,
    /// and then history with the room that this made.
    ///
    /// # Errors
    /// `full` if there is nothing left to give up.
    pub(crate) fn make_room(&self, table: &dyn Table, full: Error) -> Result<()> {
        if matches!(self.give_up_history(table, Purpose::Release), Ok(true)) {
            tracing::warn!("the disk is full: older states of the store were given up for a release");
            return Ok(());
        }
        if !self.give_up_reserve(&full, Purpose::Release) {
            return Err(full.with_outcome(Outcome::NotApplied));
        }
        // It keeps the next ones from using up the reserve. If there is still too little room for it, the release alone
        // may fit in.
        let _ = self.give_up_history(table, Purpose::Release);
        Ok(())
    }

    /// Gives up some of the reserve because of this error, if the write is for a release and there is some left.
    pub(crate) fn give_up_reserve(&self, full: &Error, purpose: Purpose) -> bool {
        let given_up =
            purpose == Purpose::Release && is_full(full) && self.reserve.as_ref().is_some_and(|one| one.give_up());
        if given_up {
            self.spent.store(true, Ordering::Relaxed);
        }
        given_up
    }

    /// Refuses to write for anything but a release while a part of the reserve is gone.
    ///
    /// # Errors
    /// `NoSpace`.
    pub(crate) fn check_reserve(&self, operation: Operation, purpose: Purpose) -> Result<()> {
        if purpose == Purpose::Release || !self.spent.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.ask_reserve(operation, |reserve| reserve.restore().map_err(|missing| (ErrorKind::NoSpace, missing)))?;
        self.spent.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Checks that a commit that is no release could be written now.
    ///
    /// # Errors
    /// `NoSpace`; `Io` for a disk that cannot be written to.
    pub(crate) fn check_room(&self) -> Result<()> {
        self.check_reserve(Operation::Txn, Purpose::Any)?;
        self.ask_reserve(Operation::Txn, |reserve| reserve.check_room())
    }

    fn ask_reserve(
        &self,
        operation: Operation,
        ask: impl Fn(&dyn Reserve) -> Result<(), (ErrorKind, String)>,
    ) -> Result<()> {
        let answer = self.reserve.as_deref().map_or(Ok(()), ask);
        answer.map_err(|(kind, advice)| {
            Error::new(kind, operation, self.name).with_detail(advice).with_outcome(Outcome::NotApplied)
        })
    }
}

fn is_full(error: &Error) -> bool {
    *error.kind() == ErrorKind::NoSpace
}
