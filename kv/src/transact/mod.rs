//! Optimistic, serialisable transactions: read at one revision, decide, commit if nothing that was read has changed.

mod commit;
mod transaction;

use std::time::{Duration, Instant};

pub use transaction::Transaction;

use crate::error::{Error, ErrorKind, Operation, Outcome};
use crate::key::Revision;
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

    /// What is left of the whole.
    pub fn remaining(&self) -> Duration {
        self.budget.saturating_sub(self.start.elapsed())
    }

    /// What is left of the part in which work may start.
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

/// How [`transact`] goes about it.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct TransactOptions {
    /// When to give up.
    pub deadline: Deadline,
    /// After how many attempts to give up; Calico's clients try a hundred times.
    pub attempts: u32,
}

impl TransactOptions {
    /// Until the deadline, or a hundred attempts.
    pub fn new(deadline: Deadline) -> Self {
        Self { deadline, attempts: 100 }
    }

    /// With another bound on the attempts.
    #[must_use]
    pub fn with_attempts(mut self, attempts: u32) -> Self {
        self.attempts = attempts;
        self
    }
}

/// What [`transact`] returns: what its body returned, and the revision at which that is true.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Committed<T> {
    /// What the body returned.
    pub value: T,
    /// The revision of the commit; for a body that wrote nothing the revision that it read.
    pub revision: Revision,
    /// How many attempts it took.
    pub attempts: u32,
}

/// Runs `body` until its reads and writes have happened at one revision, as if nobody else were there.
///
/// The body reads and writes through the [`Transaction`] that it is given. It may run several times, so it must have no
/// effects besides. When it returns `Ok`, its writes are committed together, provided that nothing it read through
/// [`get`](Transaction::get) and [`list`](Transaction::list) has changed; otherwise it runs again on fresh data. When
/// it returns an error, or writes nothing, its answer is true as of the one revision that it read, and nothing is
/// written.
///
/// A write whose reply is lost is settled before anything else happens: the same guarded transaction is sent again; if
/// its guards no longer hold, the history of the written keys tells whether that was our own doing.
///
/// # Errors
/// What the body returns, and errors of the store. `Conflict` when the attempts are used up, `Timeout` when the
/// deadline is. An error with [`Outcome::Unknown`] means that even settling failed.
pub async fn transact<T, E, F>(store: &dyn Store, options: &TransactOptions, mut body: F) -> Result<Committed<T>, E>
where
    E: From<Error>,
    F: AsyncFnMut(&mut Transaction<'_>) -> Result<T, E>,
{
    let deadline = options.deadline;
    let mut refusal = None;
    for attempt in 1..=options.attempts {
        let mut transaction = Transaction::new(store, deadline);
        let outcome = body(&mut transaction).await;
        if !transaction.is_stale() {
            let value = outcome?;
            match transaction.commit().await? {
                Commit::Done(revision) => return Ok(Committed { value, revision, attempts: attempt }),
                Commit::Overtaken => {}
                Commit::Refused(error) => refusal = Some(error),
            }
        }
        if deadline.work_is_over() {
            return Err(because(out_of_time(), refusal).into());
        }
        pause(attempt, deadline.remaining_for_work()).await;
    }
    let conflict = Error::new(ErrorKind::Conflict { attempts: options.attempts }, Operation::Transact, "store");
    Err(because(conflict, refusal).into())
}

/// What came of an attempt to commit.
enum Commit {
    /// It happened at this revision; for a body that wrote nothing it is the one that was read.
    Done(Revision),
    /// Something that the attempt relied on has changed.
    Overtaken,
    /// The store did not do it, and may a little later.
    Refused(Error),
}

/// Gives up, with the store's last refusal as the cause if there was one.
fn because(error: Error, refusal: Option<Error>) -> Error {
    match refusal {
        Some(refusal) => error.with_source(refusal),
        None => error,
    }
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
