//! Runs optimistic, serialisable transactions. The body of a transaction reads at one revision; its writes are
//! committed if the keys that it read have not changed.
//!
//! The module `transact` contains the attempts of a transaction, their guarded commits, and the code that finds out the
//! outcome of a commit that was not answered. The docs of [`transact!`](crate::transact!) explain why `transact!` can
//! find out the outcome of a commit reliably. A [`Transaction`] provides the reads and writes for the body of a
//! transaction.

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

const MAX_PAUSE: Duration = Duration::from_millis(100);

/// The time limit of a whole [`transact!`](crate::transact!) call, including waits for locks.
///
/// The last fifth of the time is reserved for finding out the outcome of an unanswered commit, so no new attempt starts
/// then.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    start: Instant,
    budget: Duration,
}

impl Deadline {
    /// Creates a deadline that is `budget` from now.
    pub fn after(budget: Duration) -> Self {
        Self { start: Instant::now(), budget }
    }

    /// The time until the deadline.
    pub fn remaining(&self) -> Duration {
        self.budget.saturating_sub(self.start.elapsed())
    }

    /// The time left for starting new attempts, which ends when four fifths of the time limit have passed.
    pub fn remaining_for_work(&self) -> Duration {
        (self.budget / 5 * 4).saturating_sub(self.start.elapsed())
    }

    /// Returns true if the deadline has passed.
    pub fn is_over(&self) -> bool {
        self.remaining().is_zero()
    }

    /// Returns true if no new attempt may start any more; the remaining time is for settling an unanswered commit.
    pub fn work_is_over(&self) -> bool {
        self.remaining_for_work().is_zero()
    }
}

/// The limits of a [`transact!`](crate::transact!) call, and extra keys that its first request reads.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TransactOptions {
    /// The time limit of the whole `transact!` call.
    pub deadline: Deadline,
    /// Maximum number of times that the transaction is tried; 100 by default, as in Calico's clients.
    pub attempts: u32,
    /// Keys that the first request of each attempt prefetches, together with the first keys that the body reads.
    pub extra_reads: Vec<Key>,
}

impl TransactOptions {
    /// Creates transaction options with the given deadline and at most 100 attempts.
    pub fn new(deadline: Deadline) -> Self {
        Self { deadline, attempts: 100, extra_reads: Vec::new() }
    }

    /// Sets the maximum number of times that the transaction is tried.
    #[must_use]
    pub fn with_attempts(mut self, attempts: u32) -> Self {
        self.attempts = attempts;
        self
    }

    /// Adds keys to the first request of each attempt; the transaction body can read these keys without another round
    /// trip.
    #[must_use]
    pub fn with_extra_reads(mut self, keys: impl IntoIterator<Item = Key>) -> Self {
        self.extra_reads.extend(keys);
        self
    }
}

/// The result of a [`transact!`](crate::transact!) call that succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Committed<T> {
    /// The value that the transaction body returned.
    pub value: T,
    /// The revision of the commit; if the body wrote nothing, the revision at which the body read.
    pub revision: Revision,
    /// The number of attempts that the transaction made.
    pub attempts: u32,
}

/// Runs a transaction body until its reads and writes have taken effect together, at one revision and isolated from
/// other writers. For a body of type `Result<T, E>`, returns `Result<`[`Committed`]`<T>, E>`; `E` must implement
/// `From<`[`Error`](crate::Error)`>`.
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
/// The body reads and writes through the [`Transaction`] that the macro passes to it. The body may run several times,
/// so it must have no side effects apart from its writes through the [`Transaction`]. When the transaction body returns
/// `Ok`, its writes are committed together. The commit fails if a key that the body read through
/// [`get`](Transaction::get) or [`list`](Transaction::list) has changed; the body then runs again on fresh data. If the
/// body returns an error or writes nothing, the store stays unchanged, and the result reflects the store's state at one
/// revision.
///
/// If the answer to a commit is lost, `transact!` finds out from the history of one written key whether the commit has
/// happened.
///
/// - If an unanswered commit writes a key that existed, the commit has a guard on the mod revision of this key. The
///   guard on the mod revision holds until the first change of the guarded key, and never again. The guard on the mod
///   revision lets the commit happen at most once, so `transact!` may safely send it again. If the commit was sent
///   again and fails, `transact!` finds the guarded key's first change after the guarded revision, and checks whether
///   this commit or another writer made that change.
/// - If all written keys were absent before a commit, the commit could happen twice: its guards hold again once the
///   created keys are deleted. Before `transact!` sends a key-creating commit again, it checks each state that one of
///   the written keys has had since the attempt began. If the commit wrote one of these states of the key, the
///   transaction has happened, even if the key was changed or deleted later. If the history of the written key was
///   compacted, or has too many states, the outcome of the commit stays unknown.
///
/// A change of a key is attributed to this transaction if, at the revision of that change, every key that the
/// transaction writes has the value that it writes. In two situations, `transact!` misjudges the outcome: a commit is
/// applied late, or another writer's transaction is identical. If a commit that only requires keys to be absent is
/// still in flight, it may be applied later, when these keys have been deleted. If another writer's transaction has
/// exactly the same keys and values, `transact!` mistakes this transaction for its own.
///
/// `transact!` is a macro because the future of an async closure with a reference argument is not `Send`.
///
/// # Errors
/// Any error of the transaction body or the store. `Conflict` after the last attempt; `Timeout` when the deadline of
/// the call has passed. An error with [`Outcome::Unknown`](crate::Outcome::Unknown) means that `transact!` could not
/// find out whether the commit has happened.
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

/// The state of one [`transact!`](crate::transact!) call, whose loop calls [`begin`](Self::begin) and
/// [`end`](Self::end) for each attempt.
#[derive(Debug)]
pub struct Attempts {
    store: Arc<dyn Store>,
    options: TransactOptions,
    made: u32,
    /// Number of attempts whose writes were not committed because another writer was quicker.
    overtaken: u32,
    refusal: Option<Error>,
    /// Says whether attempts may rely on a peek: false once an attempt that relied on a peek ended without sending a
    /// commit.
    may_rely_on_peek: bool,
}

impl Attempts {
    /// Creates the state of a `transact!` call that has made no attempt yet.
    pub fn new(store: Arc<dyn Store>, options: TransactOptions) -> Self {
        Self { store, options, made: 0, overtaken: 0, refusal: None, may_rely_on_peek: true }
    }

    /// Begins the next attempt of the transaction, after a pause if an earlier attempt has failed.
    ///
    /// # Errors
    /// `Conflict` if all attempts are used up, `Timeout` if no time is left for another attempt.
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
        new.overtaken = self.overtaken;
        new.may_rely_on_peek = self.may_rely_on_peek;
        Ok(new.with_extra_reads(self.options.extra_reads.clone()))
    }

    /// Commits an attempt whose transaction body returned `outcome`; returns `None` if the transaction needs another
    /// attempt.
    ///
    /// # Errors
    /// The error of the transaction body, or any error of the store.
    pub async fn end<T, E: From<Error>>(
        &mut self,
        mut attempt: Transaction,
        outcome: Result<T, E>,
    ) -> Result<Option<Committed<T>>, E> {
        if attempt.is_stale() {
            return Ok(None);
        }
        // Only a commit can confirm the result of a peek, so an attempt that relied on a peek and makes no commit is
        // discarded.
        if attempt.relied_on_peek && (outcome.is_err() || !attempt.has_writes()) {
            self.may_rely_on_peek = false;
            return Ok(None);
        }
        let value = outcome?;
        match attempt.commit().await? {
            Commit::Done(revision) => return Ok(Some(Committed { value, revision, attempts: self.made })),
            // If the attempt has no writes left, because each key to delete was absent, the attempt made no commit.
            Commit::Overtaken => {
                self.overtaken += u32::from(attempt.has_writes());
                self.may_rely_on_peek &= attempt.has_writes() || !attempt.relied_on_peek;
            }
            Commit::Refused(error) => self.refusal = Some(error),
        }
        Ok(None)
    }

    /// If the store refused an earlier commit of this `transact!` call, sets the store's last refusal as the source of
    /// `error`.
    fn attach_last_error(&mut self, error: Error) -> Error {
        match self.refusal.take() {
            Some(refusal) => error.with_source(refusal),
            None => error,
        }
    }
}

enum Commit {
    /// The attempt was committed at this revision. If the transaction body wrote nothing, `Done` has the revision at
    /// which the body read.
    Done(Revision),
    /// A key or key range that the attempt read with a guard has changed.
    Overtaken,
    /// The store refused the commit with a transient error, so the commit has not happened.
    Refused(Error),
}

/// Creates the error of a deadline that passed between two requests, when no request was in flight.
fn out_of_time() -> Error {
    Error::new(ErrorKind::Timeout, Operation::Transact, "store").with_outcome(Outcome::NotApplied)
}

/// Sleeps for a random time. The maximum grows with each attempt, up to `longest` and `MAX_PAUSE`, so that competing
/// writers rarely collide again.
async fn pause(attempt: u32, longest: Duration) {
    let ceiling = MAX_PAUSE.min(Duration::from_micros(500) * 2u32.saturating_pow(attempt.min(16)));
    tokio::time::sleep(ceiling.min(longest).mul_f64(fastrand::f64())).await;
}

/// Maximum number of guards in one commit: a few less than the 128 compares that a transaction may have.
const MAX_GUARDS: usize = 120;

impl Transaction {
    /// Sends the writes and guards of this attempt to the store as one transaction.
    async fn commit(&mut self) -> Result<Commit> {
        // Deletions of absent keys are dropped, because they would change nothing.
        self.writes.retain(|key, value| value.is_some() || self.guards.get(key).is_some_and(|guard| guard.is_set()));
        if self.writes.is_empty() {
            // A peek reads a newer revision than the attempt; only the guards of the attempt's commit can show that
            // what the peek read still holds.
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

/// Reduces the number of guards against new keys to at most `most`, by merging neighbouring ranges, beginning with the
/// pair that shares the longest prefix. A merged guard may fail because of an unrelated key, but it also fails for
/// every key for which an original guard would fail.
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

/// Maximum number of times that `transact!` sends an unanswered commit again after errors that are not transient.
const MAX_HOPELESS_RESENDS: u32 = 2;
/// Maximum number of states of a key that `transact!` reads to find out when the key was created.
const MAX_SEARCHED_STATES: i64 = 1024;
const MAX_CONCURRENT_READS: usize = 64;

/// The key whose history shows whether the unanswered commit has happened.
enum SettleClue {
    /// Before the commit, the written key existed and was last written at this revision. Whether the commit has
    /// happened follows from the key's first change after this revision.
    Changed(Key, Revision),
    /// The commit requires that all keys that it writes are absent, so if it has happened, it created this key. The
    /// key's history has been searched up to this revision.
    Created(Key, Revision),
}

impl SettleClue {
    fn key(&self) -> &Key {
        match self {
            Self::Changed(key, _) | Self::Created(key, _) => key,
        }
    }
}

/// The reason why `transact!` could not find out whether a commit has happened.
enum SettleFailure {
    /// The outcome of the commit could not be found out yet; a later attempt may succeed.
    ForNow(Error),
    /// The outcome of the commit can never be found out, for example because the key's history was compacted.
    ForGood(Box<dyn StdError + Send + Sync>),
}

impl Transaction {
    /// Finds out whether an unanswered commit has happened: reads the history of one written key, and sends the commit
    /// again if the first request may still be in flight.
    async fn settle(&self, txn: Txn, mut unknown: Error) -> Result<Commit> {
        let Some(mut clue) = self.clue() else { return Err(unknown) };
        let is_final = unknown.is_final();
        let probe = TxnRange::new(Range::Key(clue.key().clone())).with_content(Content::KeysOnly);
        let txn = txn.with_failure([Op::Range(probe)]);
        let mut hopeless = 0;
        for attempt in 1.. {
            tracing::debug!(target: TRANSACT, attempt, error = %unknown, "checking whether a write with unknown outcome was committed");
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

    /// The newest revision in any answer that this attempt got before its commit.
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

    /// Searches the store's history for the unanswered commit; returns `None` if it has not happened so far.
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

    /// If this attempt's commit made the first change of `key` after revision `guard`, returns the revision of that
    /// change. In `find_change`, the argument `written` is the current mod revision of the key.
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

    /// If this attempt's commit created `key` at a revision in `after+1..=until`, returns that revision.
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
            // At each state that was read, the key existed since its creation without interruption. So the states back
            // to the oldest creation are known, and the search goes on just before it.
            until = created.first().map_or(from, |revision| from.min(revision.get() - 1));
            step = (step * 2).min(MAX_CONCURRENT_READS as i64);
        }
        Ok(None)
    }

    /// Reads a key at a revision, without its value; an unset revision means the latest.
    async fn state_of(&self, key: &Key, at: Revision) -> Result<RangeResponse> {
        let request = RangeRequest::new(Range::Key(key.clone())).with_at(at).with_content(Content::KeysOnly);
        self.store.range(request).await
    }

    /// Returns true if all keys that this attempt writes were written at `revision` with the attempt's values.
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

    /// Returns the revision of the first change of `key` after this attempt read it; the caller must know that `key`
    /// has changed.
    async fn first_change(&self, key: &Key) -> Result<Revision> {
        let looked_at = self.presumed.get(key).copied().unwrap_or(self.at);
        let request = WatchRequest::new(Range::Key(key.clone()), looked_at.next());
        let mut changes = self.store.watch(request).await?;
        // Dropping the watch at a timeout is safe, because a watch only reads.
        match tokio::time::timeout(self.deadline.remaining(), changes.next()).await {
            Ok(Some(batch)) => Ok(batch?.revision),
            Ok(None) | Err(_) => Err(out_of_time()),
        }
    }
}

/// Converts an error of a read that searches for an unanswered commit into the reason why the search failed. A read
/// error that is not transient, for example about compacted history, ends the search for the outcome.
fn read_failure(error: Error) -> SettleFailure {
    if error.kind().is_transient() { SettleFailure::ForNow(error) } else { SettleFailure::ForGood(error.into()) }
}

/// The mod revision of the key that the transaction's failure branch read; unset if the key is absent.
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
