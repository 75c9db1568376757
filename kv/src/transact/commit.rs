//! The commit of an attempt: one guarded transaction.

use super::{Commit, Transaction, out_of_time};
use crate::error::{ErrorKind, Outcome, Result};
use crate::request::{Compare, Op, Txn};

/// The most guards of one commit: below the 128 compares of a transaction, with room to spare.
const MAX_GUARDS: usize = 120;

impl Transaction {
    /// Commits what was written.
    pub(super) async fn commit(&mut self) -> Result<Commit> {
        // Deleting what is not there is nothing to do.
        self.writes.retain(|key, value| value.is_some() || self.guards.get(key).is_some_and(|guard| guard.is_set()));
        if self.writes.is_empty() {
            // A peek is newer than the attempt's revision: only a commit proves what it found.
            return Ok(if self.relied_on_peek { Commit::Overtaken } else { Commit::Done(self.at) });
        }
        if self.is_older_than_a_peek() {
            return Ok(Commit::Overtaken);
        }
        let guards = self.guards.len() + self.guarded_ranges.len();
        if guards > MAX_GUARDS {
            return Err(self.error(ErrorKind::ReadSetTooLarge { guards }));
        }
        let txn = self.guarded_txn();
        if self.deadline.work_is_over() {
            return Err(out_of_time());
        }
        match self.store.txn(txn.clone()).await {
            Ok(answer) if answer.succeeded => Ok(Commit::Done(answer.revision)),
            Ok(_) => Ok(Commit::Overtaken),
            Err(error) if error.outcome() == Outcome::Unknown => self.settle(txn, error).await,
            Err(error) if error.kind().is_transient() => Ok(Commit::Refused(error)),
            Err(error) => Err(error),
        }
    }

    fn guarded_txn(&self) -> Txn {
        let keys = self.guards.iter().map(|(key, revision)| Compare::unchanged(key.clone(), *revision));
        let ranges = self.guarded_ranges.iter().map(|range| Compare::nothing_newer(range.clone(), self.at));
        let writes = self.writes.iter().map(|(key, value)| match value {
            Some(value) => Op::put(key.clone(), value.clone()),
            None => Op::delete(key.clone()),
        });
        Txn::new().with_compares(keys).with_compares(ranges).with_success(writes)
    }
}
