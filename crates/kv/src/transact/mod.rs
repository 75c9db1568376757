//! Optimistic, serialisable transactions: read at one revision, decide, commit if nothing that was read has changed.
//!
//! This file has the attempts of a transaction, the guarded commit at the end of each, and the settling of a commit of unknown
//! outcome, which the docs of [`transact!`](crate::transact!) prove sound. [`Transaction`] is what the body of an attempt reads and writes.

mod transaction;

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error as StdError;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::future::try_join_all;

use crate::error::{Error, ErrorKind, Operation, Outcome, Result};
use crate::key::{Key, Range, Revision};
use crate::request::{
    Compare, Content, Op, OpResult, RangeRequest, RangeResponse, Txn, TxnRange, TxnResponse, WatchRequest,
};
use crate::store::Store;
use crate::wrap::tracing_targets::TRANSACT;

pub use transaction::{MAX_CREATION_GUARDED_KEYS, MAX_GUARDED_KEYS, Transaction};

/// The longest pause before another attempt.
const MAX_PAUSE: Duration = Duration::from_millis(100);

/// How long a whole call may take, from waiting for a lock to the answer.
///
/// Its last fifth is for settling a write whose outcome is unknown: no new attempt starts in it.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    start: Instant,
    budget: Duration,
}

impl Deadline {
    /// A deadline this far from now.
    pub fn after(budget: Duration) -> Self {
        Self { start: Instant::now(), budget }
    }

    /// The remaining time.
    pub fn remaining(&self) -> Duration {
        self.budget.saturating_sub(self.start.elapsed())
    }

    /// The remaining time in which work may start.
    pub fn remaining_for_work(&self) -> Duration {
        (self.budget / 5 * 4).saturating_sub(self.start.elapsed())
    }

    /// True when all of it is over.
    pub fn is_over(&self) -> bool {
        self.remaining().is_zero()
    }

    /// True when only settling may go on.
    pub fn work_is_over(&self) -> bool {
        self.remaining_for_work().is_zero()
    }
}

/// How [`transact!`](crate::transact!) goes about it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TransactOptions {
    /// When to give up.
    pub deadline: Deadline,
    /// After how many attempts to give up; Calico's clients try a hundred times.
    pub attempts: u32,
    /// Keys that the first request reads along with what it is about.
    pub extra_reads: Vec<Key>,
}

impl TransactOptions {
    /// Until the deadline, or a hundred attempts.
    pub fn new(deadline: Deadline) -> Self {
        Self { deadline, attempts: 100, extra_reads: Vec::new() }
    }

    /// With another bound on the attempts.
    #[must_use]
    pub fn with_attempts(mut self, attempts: u32) -> Self {
        self.attempts = attempts;
        self
    }

    /// Reading these keys along with whatever is read first, so that the body can read them without another round trip.
    #[must_use]
    pub fn with_extra_reads(mut self, keys: impl IntoIterator<Item = Key>) -> Self {
        self.extra_reads.extend(keys);
        self
    }
}

/// The result of [`transact!`](crate::transact!): the value of its body, and the revision at which it is true.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Committed<T> {
    /// The value of the body.
    pub value: T,
    /// The revision of the commit; for a body that wrote nothing the revision that it read.
    pub revision: Revision,
    /// How many attempts it took.
    pub attempts: u32,
}

/// Runs a body until its reads and writes have happened at one revision, as if nobody else were there: a
/// `Result<`[`Committed`]`<T>, E>`, where the body is a `Result<T, E>` and `E` can be made from [`Error`](crate::Error).
///
/// ```
/// # async fn example(store: std::sync::Arc<dyn kv::Store>, options: kv::TransactOptions) -> kv::Result<()> {
/// let key = kv::Key::from("counter");
/// let committed = kv::transact!(store, options, |tx| {
///     let length = tx.get(&key).await?.map_or(0, |value| value.len());
///     tx.put(&key, "x".repeat(length + 1))?;
///     Ok::<_, kv::Error>(length + 1)
/// })?;
/// println!("{} at revision {}", committed.value, committed.revision);
/// # Ok(())
/// # }
/// ```
///
/// The body reads and writes through the [`Transaction`] that it is given. It may run several times, so it must have no
/// effects besides. When it is `Ok`, its writes are committed together, provided that nothing it read through
/// [`get`](Transaction::get) and [`list`](Transaction::list) has changed; otherwise it runs again on fresh data. When
/// it is an error, or writes nothing, its answer is true as of the one revision that it read, and nothing is written.
///
/// A write whose reply is lost is settled before anything else happens, by the history of a key that it writes:
///
/// - If it writes a key that was there, its guard on that key's mod revision holds until the first change of the key and
///   never again. So it happens once at most, and the same transaction can be sent again. If that fails, the first change
///   of the key is looked at: it was our own, or we were overtaken.
/// - If every key that it writes was absent, its guards hold again once others have removed what it created. So the same
///   transaction is sent again only after a check of each state of one of these keys since the attempt: if the key was
///   created by us in one of them, the transaction has happened, whatever became of the key since. If the history was
///   compacted, or there is too much of it, the outcome stays unknown.
///
/// A change is our own if all keys that we write have our values at its revision. Two cases cannot be recognised. A transaction
/// whose request is still on its way, and that guards only absences, may land after its guards failed and hold again.
/// Another writer's transaction that wrote the very same keys and values is taken for our own.
///
/// It is a macro because an async closure that is given a reference makes a future that is not `Send`.
///
/// # Errors
/// The error of the body, and errors of the store. `Conflict` when the attempts are used up, `Timeout` when the deadline is. An
/// error with [`Outcome::Unknown`](crate::Outcome::Unknown) means that even settling failed.
#[macro_export]
macro_rules! transact {
    ($store:expr, $options:expr, |$tx:ident| $body:expr) => {{
        let mut attempts = $crate::Attempts::new($store, $options);
        loop {
            let mut attempt = match attempts.begin().await {
                Ok(attempt) => attempt,
                Err(error) => break Err(error.into()),
            };
            let outcome = {
                let $tx = &mut attempt;
                async { $body }.await
            };
            match attempts.end(attempt, outcome).await {
                Ok(None) => {}
                Ok(Some(committed)) => break Ok(committed),
                Err(error) => break Err(error),
            }
        }
    }};
}

/// The attempts of one [`transact!`](crate::transact!): what its loop is made of.
#[derive(Debug)]
pub struct Attempts {
    store: Arc<dyn Store>,
    options: TransactOptions,
    made: u32,
    refusal: Option<Error>,
    /// True until an attempt that relied on a peek ended without the commit that proves it.
    may_rely_on_peek: bool,
}

impl Attempts {
    /// No attempt made yet.
    pub fn new(store: Arc<dyn Store>, options: TransactOptions) -> Self {
        Self { store, options, made: 0, refusal: None, may_rely_on_peek: true }
    }

    /// The next attempt; after the first, a pause comes before it.
    ///
    /// # Errors
    /// `Conflict` and `Timeout`, when no other attempt may start.
    pub async fn begin(&mut self) -> Result<Transaction> {
        let deadline = self.options.deadline;
        if self.made > 0 {
            if deadline.work_is_over() {
                return Err(self.attach_last_error(out_of_time()));
            }
            pause(self.made, deadline.remaining_for_work()).await;
        }
        if self.made == self.options.attempts {
            let kind = ErrorKind::Conflict { attempts: self.made };
            return Err(self.attach_last_error(Error::new(kind, Operation::Transact, "store")));
        }
        self.made += 1;
        let mut new = Transaction::new(Arc::clone(&self.store), deadline);
        new.may_rely_on_peek = self.may_rely_on_peek;
        Ok(new.with_extra_reads(self.options.extra_reads.clone()))
    }

    /// Commits an attempt whose body had this outcome: `None` if another attempt is due.
    ///
    /// # Errors
    /// The body's, and those of the store.
    pub async fn end<T, E: From<Error>>(
        &mut self,
        mut attempt: Transaction,
        outcome: Result<T, E>,
    ) -> Result<Option<Committed<T>>, E> {
        if attempt.is_stale() {
            return Ok(None);
        }
        // A peek proves nothing unless the attempt is committed.
        if attempt.relied_on_peek && (outcome.is_err() || !attempt.has_writes()) {
            self.may_rely_on_peek = false;
            return Ok(None);
        }
        let value = outcome?;
        match attempt.commit().await? {
            Commit::Done(revision) => return Ok(Some(Committed { value, revision, attempts: self.made })),
            // Without writes it was no commit: all that it was to delete was absent.
            Commit::Overtaken => self.may_rely_on_peek &= attempt.has_writes() || !attempt.relied_on_peek,
            Commit::Refused(error) => self.refusal = Some(error),
        }
        Ok(None)
    }

    /// Gives up, with the store's last refusal as the cause if there was one.
    fn attach_last_error(&mut self, error: Error) -> Error {
        match self.refusal.take() {
            Some(refusal) => error.with_source(refusal),
            None => error,
        }
    }
}

/// The outcome of an attempt to commit.
enum Commit {
    /// It happened at this revision; for a body that wrote nothing it is the one that was read.
    Done(Revision),
    /// Something that the attempt relied on has changed.
    Overtaken,
    /// The store did not do it, and may a little later.
    Refused(Error),
}

/// The deadline passed between two round trips: nothing is in flight.
fn out_of_time() -> Error {
    Error::new(ErrorKind::Timeout, Operation::Transact, "store").with_outcome(Outcome::NotApplied)
}

/// Waits a random time that grows with the attempts, at most `longest`: writers that collided should not collide again.
async fn pause(attempt: u32, longest: Duration) {
    let ceiling = MAX_PAUSE.min(Duration::from_micros(500) * 2u32.saturating_pow(attempt.min(16)));
    tokio::time::sleep(ceiling.min(longest).mul_f64(fastrand::f64())).await;
}

/// The most guards of one commit: below the 128 compares of a transaction, with room to spare.
const MAX_GUARDS: usize = 120;

impl Transaction {
    /// Commits what was written.
    async fn commit(&mut self) -> Result<Commit> {
        // Deleting what is not there is nothing to do.
        self.writes.retain(|key, value| value.is_some() || self.guards.get(key).is_some_and(|guard| guard.is_set()));
        if self.writes.is_empty() {
            // A peek is newer than the attempt's revision: only a commit proves what it found.
            return Ok(if self.relied_on_peek { Commit::Overtaken } else { Commit::Done(self.at) });
        }
        if self.is_older_than_a_peek() {
            return Ok(Commit::Overtaken);
        }
        let others = self.guards.len() + self.guarded_ranges.len();
        let created = merged(&self.creation_guards, MAX_GUARDS.saturating_sub(others));
        let guards = others + created.len();
        if guards > MAX_GUARDS {
            return Err(self.error(ErrorKind::ReadSetTooLarge { guards }));
        }
        let txn = self.guarded_txn(&created);
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

    fn guarded_txn(&self, created: &BTreeMap<Range, Revision>) -> Txn {
        let keys = self.guards.iter().map(|(key, revision)| Compare::unchanged(key.clone(), *revision));
        let ranges = self.guarded_ranges.iter().map(|range| Compare::nothing_newer(range.clone(), self.at));
        let created = created.iter().map(|(range, revision)| Compare::none_created_after(range.clone(), *revision));
        let writes = self.writes.iter().map(|(key, value)| match value {
            Some(value) => Op::put(key.clone(), value.clone()),
            None => Op::delete(key.clone()),
        });
        Txn::new().with_compares(keys).with_compares(ranges).with_compares(created).with_success(writes)
    }
}

/// Guards against creation, at most this many where there are some: neighbours become one that spans both, those first
/// whose keys have most in common. A wider guard may fail for a key that does no harm, and never misses one.
fn merged(guards: &BTreeMap<Range, Revision>, most: usize) -> BTreeMap<Range, Revision> {
    if guards.len() <= most {
        return guards.clone();
    }
    let mut spans: Vec<_> = guards.iter().map(|(range, at)| (range.bounds(), *at)).collect();
    spans.sort();
    let common = |one: &[u8], other: &[u8]| one.iter().zip(other).take_while(|(a, b)| a == b).count();
    while spans.len() > most.max(1) {
        let closeness = |place: &usize| common(spans[*place].0.0.as_bytes(), spans[*place + 1].0.0.as_bytes());
        let Some(place) = (0..spans.len() - 1).max_by_key(closeness) else { break };
        let ((_, other_to), other_at) = spans.remove(place + 1);
        let ((_, to), at) = &mut spans[place];
        *to = to.take().and_then(|to| other_to.map(|other| to.max(other)));
        *at = (*at).min(other_at);
    }
    let range = |(from, to)| match to {
        Some(to) => Range::FromTo(from, to),
        None => Range::From(from),
    };
    spans.into_iter().map(|(bounds, at)| (range(bounds), at)).collect()
}

/// How often a write is sent again after an error that waiting is not known to cure.
const MAX_HOPELESS_RESENDS: u32 = 2;
/// How many states of a key are looked at for its creation.
const MAX_SEARCHED_STATES: i64 = 1024;
/// How many reads are under way at a time.
const MAX_CONCURRENT_READS: usize = 64;

/// The key whose history tells whether the commit has happened.
enum SettleClue {
    /// It was there, last written at this revision: the first change after it decides.
    Changed(Key, Revision),
    /// All keys that are written were absent, this one among them: its creations decide. The second is the revision up to
    /// which none of them was ours.
    Created(Key, Revision),
}

impl SettleClue {
    fn key(&self) -> &Key {
        match self {
            Self::Changed(key, _) | Self::Created(key, _) => key,
        }
    }
}

/// Why one try did not settle it.
enum SettleFailure {
    /// Another try may.
    ForNow(Error),
    /// No other try can.
    ForGood(Box<dyn StdError + Send + Sync>),
}

impl Transaction {
    /// Finds out whether a transaction whose reply was lost has happened, and sends it again if it has not. A transaction that
    /// cannot happen any more is not sent again.
    async fn settle(&self, txn: Txn, mut unknown: Error) -> Result<Commit> {
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
                Err(SettleFailure::ForGood(reason)) => return Err(unknown.with_source(reason)),
                Err(SettleFailure::ForNow(error)) => {
                    hopeless += u32::from(!error.kind().is_transient());
                    if !is_final && error.outcome() == Outcome::Unknown {
                        unknown = error;
                    }
                }
            }
            if hopeless > MAX_HOPELESS_RESENDS || self.deadline.is_over() {
                break;
            }
        }
        Err(unknown)
    }

    fn clue(&self) -> Option<SettleClue> {
        let guarded = self.writes.keys().map(|key| (key, self.guards.get(key).copied().unwrap_or_default()));
        let there = guarded.into_iter().find(|(_, guard)| guard.is_set());
        let changed = there.map(|(key, guard)| SettleClue::Changed(key.clone(), guard));
        changed.or_else(|| self.writes.keys().next().map(|key| SettleClue::Created(key.clone(), self.newest_seen())))
    }

    /// The newest revision that an answer to this attempt had: its commit was sent after that.
    fn newest_seen(&self) -> Revision {
        self.presumed.values().copied().fold(self.at, Revision::max)
    }

    async fn try_to_settle(&self, txn: &Txn, clue: &mut SettleClue) -> Result<Commit, SettleFailure> {
        if let SettleClue::Created(..) = clue
            && let Some(commit) = self.find_commit(clue).await?
        {
            return Ok(commit);
        }
        let answer = self.store.txn(txn.clone()).await.map_err(SettleFailure::ForNow)?;
        if answer.succeeded {
            return Ok(Commit::Done(answer.revision));
        }
        let ours = match clue {
            SettleClue::Changed(key, guard) => self.find_change(key, *guard, written_at(&answer)).await?,
            SettleClue::Created(key, looked_until) => self.find_creation(key, *looked_until, answer.revision).await?,
        };
        Ok(ours.map_or(Commit::Overtaken, Commit::Done))
    }

    /// Finds this commit by reading; `None` if it has not happened until now.
    async fn find_commit(&self, clue: &mut SettleClue) -> Result<Option<Commit>, SettleFailure> {
        let state = self.state_of(clue.key(), Revision::UNSET).await.map_err(read_failure)?;
        let ours = match clue {
            SettleClue::Changed(key, guard) => {
                let written = state.kvs.first().map_or(Revision::UNSET, |kv| kv.mod_revision);
                self.find_change(key, *guard, written).await?
            }
            SettleClue::Created(key, looked_until) => {
                let found = self.find_creation(key, *looked_until, state.revision).await?;
                *looked_until = state.revision;
                found
            }
        };
        Ok(ours.map(Commit::Done))
    }

    /// The revision of the first change of a key after `guard`, if it was this commit; `written` is when it was last written.
    async fn find_change(
        &self,
        key: &Key,
        guard: Revision,
        written: Revision,
    ) -> Result<Option<Revision>, SettleFailure> {
        if written == guard {
            return Ok(None);
        }
        let revision = self.first_change(key).await.map_err(read_failure)?;
        Ok(self.is_ours(revision).await.map_err(read_failure)?.then_some(revision))
    }

    /// The revision after `after`, at most `until`, at which this commit created the key, if there is one.
    async fn find_creation(
        &self,
        key: &Key,
        after: Revision,
        until: Revision,
    ) -> Result<Option<Revision>, SettleFailure> {
        let (after, mut until) = (after.get(), until.get());
        let (mut looked_at, mut step) = (0, 1);
        while until > after {
            let from = after.max(until - step);
            looked_at += until - from;
            if looked_at > MAX_SEARCHED_STATES {
                let reason =
                    format!("too many changes came after it to look for it among them (over {MAX_SEARCHED_STATES})");
                return Err(SettleFailure::ForGood(reason.into()));
            }
            if self.deadline.is_over() {
                return Err(SettleFailure::ForNow(out_of_time()));
            }
            let states = (from + 1..=until).map(|revision| self.state_of(key, Revision::new(revision)));
            let states = try_join_all(states).await.map_err(read_failure)?;
            let created: BTreeSet<Revision> =
                states.into_iter().flat_map(|state| state.kvs).map(|kv| kv.create_revision).collect();
            for revision in created.iter().filter(|revision| revision.get() > after) {
                if self.is_ours(*revision).await.map_err(read_failure)? {
                    return Ok(Some(*revision));
                }
            }
            // Since its creation the key was there all the time.
            until = created.first().map_or(from, |revision| from.min(revision.get() - 1));
            step = (step * 2).min(MAX_CONCURRENT_READS as i64);
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
        for writes in writes.chunks(MAX_CONCURRENT_READS) {
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
fn read_failure(error: Error) -> SettleFailure {
    if error.kind().is_transient() { SettleFailure::ForNow(error) } else { SettleFailure::ForGood(error.into()) }
}

/// When the one key was last written that a transaction read instead of writing; unset if it is absent.
fn written_at(answer: &TxnResponse) -> Revision {
    match answer.results.first() {
        Some(OpResult::Range(found)) => found.kvs.first().map_or(Revision::UNSET, |kv| kv.mod_revision),
        _ => Revision::UNSET,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guards_span_neighbours_when_too_many() {
        let guards: BTreeMap<Range, Revision> = [("a1", 5), ("a3", 4), ("a31", 7), ("b", 9)]
            .map(|(key, at)| (Range::prefix(key), Revision::new(at)))
            .into();
        assert_eq!(merged(&guards, 4), guards);
        let three = merged(&guards, 3);
        let at = |range: Range| three.get(&range).copied();
        assert_eq!(three.len(), 3);
        assert_eq!(at(Range::FromTo("a3".into(), "a4".into())), Some(Revision::new(4)));
        let one = merged(&guards, 0);
        assert_eq!(one, [(Range::FromTo("a1".into(), "c".into()), Revision::new(4))].into());
    }
}
