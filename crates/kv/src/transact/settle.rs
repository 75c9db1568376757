//! Settling a commit of unknown outcome. The docs of [`transact!`](crate::transact!) say why it is sound.

use std::collections::BTreeSet;
use std::error::Error as StdError;

use futures::StreamExt;
use futures::future::try_join_all;

use super::{Commit, Transaction, out_of_time, pause};
use crate::error::{Error, Outcome, Result};
use crate::key::{Key, Range, Revision};
use crate::request::{Content, Op, RangeRequest, Txn, TxnRange, WatchRequest};
use crate::response::{OpResult, RangeResponse, TxnResponse};
use crate::wrap::tracing_targets::TRANSACT;

/// How often a write is sent again after an error that waiting is not known to cure.
const HOPELESS_RESENDS: u32 = 2;
/// How many states of a key are looked at for its creation.
const MAX_STATES: i64 = 1024;
/// How many reads are under way at a time.
const READS_AT_ONCE: usize = 64;

/// The key whose history tells whether the commit has happened.
enum Clue {
    /// It was there, last written at this revision: the first change after it decides.
    Changed(Key, Revision),
    /// All keys that are written were absent, this one among them: its creations decide. The second is the revision up to
    /// which none of them was ours.
    Created(Key, Revision),
}

impl Clue {
    fn key(&self) -> &Key {
        match self {
            Self::Changed(key, _) | Self::Created(key, _) => key,
        }
    }
}

/// Why one try did not settle it.
enum Unsettled {
    /// Another try may.
    ForNow(Error),
    /// No other try can.
    ForGood(Box<dyn StdError + Send + Sync>),
}

impl Transaction {
    /// Finds out whether a transaction whose reply was lost has happened, and sends it again if it has not. A transaction that
    /// cannot happen any more is not sent again.
    pub(super) async fn settle(&self, txn: Txn, mut unknown: Error) -> Result<Commit> {
        let Some(mut clue) = self.clue() else { return Err(unknown) };
        let is_final = unknown.is_final();
        let probe = TxnRange::new(Range::Key(clue.key().clone())).with_content(Content::KeysOnly);
        let txn = txn.with_failure([Op::Range(probe)]);
        let mut hopeless = 0;
        for attempt in 1.. {
            tracing::debug!(target: TRANSACT, attempt, error = %unknown, "settling a write of unknown outcome");
            pause(attempt, self.deadline.remaining()).await;
            let settled = match is_final {
                true => self.find_commit(&mut clue).await,
                false => self.try_to_settle(&txn, &mut clue).await.map(Some),
            };
            match settled {
                Ok(Some(commit)) => return Ok(commit),
                Ok(None) => return Err(unknown.with_outcome(Outcome::NotApplied)),
                Err(Unsettled::ForGood(reason)) => return Err(unknown.with_source(reason)),
                Err(Unsettled::ForNow(error)) => {
                    hopeless += u32::from(!error.kind().is_transient());
                    if !is_final && error.outcome() == Outcome::Unknown {
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

    fn clue(&self) -> Option<Clue> {
        let guarded = self.writes.keys().map(|key| (key, self.guards.get(key).copied().unwrap_or_default()));
        let there = guarded.into_iter().find(|(_, guard)| guard.is_set());
        let changed = there.map(|(key, guard)| Clue::Changed(key.clone(), guard));
        changed.or_else(|| self.writes.keys().next().map(|key| Clue::Created(key.clone(), self.newest_seen())))
    }

    /// The newest revision that an answer to this attempt had: its commit was sent after that.
    fn newest_seen(&self) -> Revision {
        self.presumed.values().copied().fold(self.at, Revision::max)
    }

    async fn try_to_settle(&self, txn: &Txn, clue: &mut Clue) -> Result<Commit, Unsettled> {
        if let Clue::Created(..) = clue
            && let Some(commit) = self.find_commit(clue).await?
        {
            return Ok(commit);
        }
        let answer = self.store.txn(txn.clone()).await.map_err(Unsettled::ForNow)?;
        if answer.succeeded {
            return Ok(Commit::Done(answer.revision));
        }
        let ours = match clue {
            Clue::Changed(key, guard) => self.find_change(key, *guard, written_at(&answer)).await?,
            Clue::Created(key, looked_until) => self.find_creation(key, *looked_until, answer.revision).await?,
        };
        Ok(ours.map_or(Commit::Overtaken, Commit::Done))
    }

    /// Finds this commit by reading; `None` if it has not happened until now.
    async fn find_commit(&self, clue: &mut Clue) -> Result<Option<Commit>, Unsettled> {
        let state = self.state_of(clue.key(), Revision::UNSET).await.map_err(of_reading)?;
        let ours = match clue {
            Clue::Changed(key, guard) => {
                let written = state.kvs.first().map_or(Revision::UNSET, |kv| kv.mod_revision);
                self.find_change(key, *guard, written).await?
            }
            Clue::Created(key, looked_until) => {
                let found = self.find_creation(key, *looked_until, state.revision).await?;
                *looked_until = state.revision;
                found
            }
        };
        Ok(ours.map(Commit::Done))
    }

    /// The revision of the first change of a key after `guard`, if it was this commit; `written` is when it was last written.
    async fn find_change(&self, key: &Key, guard: Revision, written: Revision) -> Result<Option<Revision>, Unsettled> {
        if written == guard {
            return Ok(None);
        }
        let revision = self.first_change(key).await.map_err(of_reading)?;
        Ok(self.is_ours(revision).await.map_err(of_reading)?.then_some(revision))
    }

    /// The revision after `after`, at most `until`, at which this commit created the key, if there is one.
    async fn find_creation(&self, key: &Key, after: Revision, until: Revision) -> Result<Option<Revision>, Unsettled> {
        let (after, mut until) = (after.get(), until.get());
        let (mut looked_at, mut step) = (0, 1);
        while until > after {
            let from = after.max(until - step);
            looked_at += until - from;
            if looked_at > MAX_STATES {
                let reason = format!("too many changes came after it to look for it among them (over {MAX_STATES})");
                return Err(Unsettled::ForGood(reason.into()));
            }
            if self.deadline.is_over() {
                return Err(Unsettled::ForNow(out_of_time()));
            }
            let states = (from + 1..=until).map(|revision| self.state_of(key, Revision::new(revision)));
            let states = try_join_all(states).await.map_err(of_reading)?;
            let created: BTreeSet<Revision> =
                states.into_iter().flat_map(|state| state.kvs).map(|kv| kv.create_revision).collect();
            for revision in created.iter().filter(|revision| revision.get() > after) {
                if self.is_ours(*revision).await.map_err(of_reading)? {
                    return Ok(Some(*revision));
                }
            }
            // Since its creation the key was there all the time.
            until = created.first().map_or(from, |revision| from.min(revision.get() - 1));
            step = (step * 2).min(READS_AT_ONCE as i64);
        }
        Ok(None)
    }

    /// A key without its value, at a revision (unset: now).
    async fn state_of(&self, key: &Key, at: Revision) -> Result<RangeResponse> {
        let request = RangeRequest::new(Range::Key(key.clone())).with_at(at).with_content(Content::KeysOnly);
        self.store.range(request).await
    }

    /// True if everything that this attempt writes was written, as it writes it, at one revision.
    async fn is_ours(&self, revision: Revision) -> Result<bool> {
        let writes: Vec<_> = self.writes.iter().collect();
        for writes in writes.chunks(READS_AT_ONCE) {
            let reads = writes.iter().map(|(key, _)| RangeRequest::new(Range::key((*key).clone())).with_at(revision));
            let states = try_join_all(reads.map(|read| self.store.range(read))).await?;
            let as_written = writes.iter().zip(&states).all(|((_, value), state)| match (value, state.kvs.first()) {
                (Some(value), Some(kv)) => kv.mod_revision == revision && kv.value == *value,
                (None, found) => found.is_none(),
                (Some(_), None) => false,
            });
            if !as_written {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// When a key, which has changed, changed first after it was looked at.
    async fn first_change(&self, key: &Key) -> Result<Revision> {
        let looked_at = self.presumed.get(key).copied().unwrap_or(self.at);
        let request = WatchRequest::new(Range::Key(key.clone()), looked_at.next());
        let mut changes = self.store.watch(request).await?;
        // Dropping a watch on a timer loses nothing: it only reads.
        match tokio::time::timeout(self.deadline.remaining(), changes.next()).await {
            Ok(Some(batch)) => Ok(batch?.revision),
            Ok(None) | Err(_) => Err(out_of_time()),
        }
    }
}

/// A read that failed: what waiting does not cure, such as a history that was compacted, stays so.
fn of_reading(error: Error) -> Unsettled {
    if error.kind().is_transient() { Unsettled::ForNow(error) } else { Unsettled::ForGood(error.into()) }
}

/// When the one key was last written that a transaction read instead of writing; unset if it is absent.
fn written_at(answer: &TxnResponse) -> Revision {
    match answer.results.first() {
        Some(OpResult::Range(found)) => found.kvs.first().map_or(Revision::UNSET, |kv| kv.mod_revision),
        _ => Revision::UNSET,
    }
}
