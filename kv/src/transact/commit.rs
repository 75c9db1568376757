//! The commit of an attempt: one guarded transaction, and what is done when its outcome is unknown.

use futures::StreamExt;

use super::{Commit, Transaction, out_of_time, pause};
use crate::error::{Error, ErrorKind, Outcome, Result};
use crate::key::{Key, Range, Revision, Value};
use crate::request::{Compare, Content, Op, Txn, TxnRange, WatchRequest};
use crate::response::{EventKind, OpResult};
use crate::wrap::tracing_targets::TRANSACT;

/// The most guards of one commit: below the 128 compares of a transaction, with room to spare.
const MAX_GUARDS: usize = 120;
/// The most keys that the branch for failed guards reads: etcd evaluates it in the apply loop of every member.
const MAX_SETTLE_READS: usize = 64;
/// How often a write is sent again after an error that waiting is not known to cure.
const HOPELESS_RESENDS: u32 = 2;

impl Transaction {
    /// Commits what was written.
    pub(super) async fn commit(&mut self) -> Result<Commit> {
        // Deleting what is not there is nothing to do.
        self.writes.retain(|key, value| value.is_some() || self.guards.get(key).is_some_and(|guard| guard.is_set()));
        if self.writes.is_empty() {
            // What is only remembered may be so no more, and what is only guessed may never have been.
            return Ok(if self.is_unproven() { Commit::Overtaken } else { Commit::Done(self.at) });
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

    /// Finds out whether a transaction whose reply was lost has happened, by sending it again until it is answered.
    ///
    /// If it goes through now, it is done: either it had not happened, or it could not have gone through. If its guards
    /// no longer hold, either it had happened or another writer was first; the history of a written key tells which.
    async fn settle(&self, txn: Txn, mut unknown: Error) -> Result<Commit> {
        let written: Vec<Key> = self.writes.keys().take(MAX_SETTLE_READS).cloned().collect();
        let look =
            written.iter().map(|key| Op::Range(TxnRange::new(Range::Key(key.clone())).with_content(Content::KeysOnly)));
        let txn = txn.with_failure(look);
        let mut hopeless = 0;
        for attempt in 1.. {
            tracing::debug!(target: TRANSACT, attempt, error = %unknown, "settling a write of unknown outcome");
            pause(attempt, self.deadline.remaining()).await;
            match self.store.txn(txn.clone()).await {
                Ok(answer) if answer.succeeded => return Ok(Commit::Done(answer.revision)),
                Ok(answer) => return self.look_back(&written, &answer.results, unknown).await,
                Err(error) => {
                    hopeless += u32::from(!error.kind().is_transient());
                    if error.outcome() == Outcome::Unknown {
                        unknown = error;
                    }
                }
            }
            if hopeless > HOPELESS_RESENDS || self.deadline.is_over() {
                break;
            }
        }
        Err(unknown)
    }

    /// The guards failed: were we the ones who changed a written key first after the revision that we read?
    async fn look_back(&self, written: &[Key], now: &[OpResult], unknown: Error) -> Result<Commit> {
        let current = |result: &OpResult| match result {
            OpResult::Range(found) => found.kvs.first().map_or(Revision::UNSET, |kv| kv.mod_revision),
            _ => Revision::UNSET,
        };
        let was_there = |(key, result): (&Key, &OpResult)| {
            let revision = current(result);
            self.guards.get(key) == Some(&Revision::UNSET) && revision.is_set() && revision <= self.looked_at(key)
        };
        if written.iter().zip(now).any(was_there) {
            // It was taken to be absent and never was: the guards have not held at any time.
            return Ok(Commit::Overtaken);
        }
        let changed = written.iter().zip(now).find(|(key, result)| self.guards.get(*key) != Some(&current(result)));
        let Some((key, _)) = changed else {
            // Every key that we would have written is as it was: it has not happened, and somebody changed another guard.
            return Ok(Commit::Overtaken);
        };
        let ours = self.writes.get(key).and_then(Option::as_ref);
        match self.first_change(key).await {
            Ok((revision, value)) if value.as_ref() == ours => Ok(Commit::Done(revision)),
            Ok(_) => Ok(Commit::Overtaken),
            Err(error) => Err(unknown.with_source(error)),
        }
    }

    /// The first change of a key after the revision at which it was looked at: when, and what was written (`None`: deleted).
    async fn first_change(&self, key: &Key) -> Result<(Revision, Option<Value>)> {
        let request = WatchRequest::new(Range::Key(key.clone()), self.looked_at(key).next());
        let mut changes = self.store.watch(request).await?;
        // Dropping a watch on a timer loses nothing: it only reads.
        let next = tokio::time::timeout(self.deadline.remaining(), changes.next()).await;
        let batch = match next {
            Ok(Some(batch)) => batch?,
            Ok(None) | Err(_) => return Err(out_of_time()),
        };
        let event = batch.events.into_iter().next_back();
        Ok((batch.revision, event.filter(|event| event.kind == EventKind::Put).map(|event| event.kv.value)))
    }
}
