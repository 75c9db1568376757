//! Optimistic, serialisable transactions: read at one revision, decide, commit if nothing that was read has changed.

mod commit;
mod hints;
mod settle;
mod transaction;

use std::sync::Arc;
use std::time::{Duration, Instant};

pub use transaction::{MAX_CREATION_GUARDED, MAX_GUARDED_LIST, Transaction};

use crate::error::{Error, ErrorKind, Operation, Outcome, Result};
use crate::key::{Key, Revision};
use crate::store::Store;

/// The longest pause before another attempt.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

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
    pub beside: Vec<Key>,
}

impl TransactOptions {
    /// Until the deadline, or a hundred attempts.
    pub fn new(deadline: Deadline) -> Self {
        Self { deadline, attempts: 100, beside: Vec::new() }
    }

    /// With another bound on the attempts.
    #[must_use]
    pub fn with_attempts(mut self, attempts: u32) -> Self {
        self.attempts = attempts;
        self
    }

    /// Reading these keys along with whatever is read first, so that the body can read them without another round trip.
    #[must_use]
    pub fn with_beside(mut self, keys: impl IntoIterator<Item = Key>) -> Self {
        self.beside.extend(keys);
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
                return Err(self.because(out_of_time()));
            }
            pause(self.made, deadline.remaining_for_work()).await;
        }
        if self.made == self.options.attempts {
            let kind = ErrorKind::Conflict { attempts: self.made };
            return Err(self.because(Error::new(kind, Operation::Transact, "store")));
        }
        self.made += 1;
        let mut new = Transaction::new(Arc::clone(&self.store), deadline);
        new.may_rely_on_peek = self.may_rely_on_peek;
        Ok(new.reading_beside(self.options.beside.clone()))
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
    fn because(&mut self, error: Error) -> Error {
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
    let ceiling = LONGEST_PAUSE.min(Duration::from_micros(500) * 2u32.saturating_pow(attempt.min(16)));
    tokio::time::sleep(ceiling.min(longest).mul_f64(fastrand::f64())).await;
}
