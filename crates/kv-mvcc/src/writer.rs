//! Implements the writer: a queue of write jobs, and the task that drains this queue. All commits of a store go through
//! the writer's queue.
//!
//! A caller puts a write job into the queue and waits for the job's answer. A job in an empty queue starts a task that
//! drains the queue and ends when the queue is empty again. Transactions that are queued at the same time are committed
//! together, each at its own revision. If a caller stops waiting, its write job is dropped unless the job has already
//! started.
//!
//! Each commit also removes a few rows of expired history from the table.
//!
//! When the disk is full, all writes to the store fail. On a host with a full disk, releasing addresses matters most,
//! so a handle for [`Purpose::Release`] frees disk space for its write. Before the writer uses reserved space, it drops
//! history, which frees space within the engine's files. If dropping history does not free enough space, the writer
//! releases the store's [`SpaceReserve`] in parts until the write succeeds or the reserve is empty. A store handle with
//! any other purpose than `Release` never uses the reserved disk space, and refuses to write while a part of it is
//! missing.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kv::{Error, ErrorKind, Operation, Outcome, Purpose, Result, Txn, TxnResponse};
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;

use crate::codec::{self, LogPosition, LogRow, StateRow};
use crate::error::{SharedError, caught, closed, compacted, corrupt, guarded};
use crate::options::{Blocking, Retention, SpaceReserve, micros};
use crate::rows::Rows;
use crate::stage::StagedState;
use crate::store::StoreCore;
use crate::table::{Table, Write};

const MAX_GROUP_TXNS: usize = 256;
/// When the rows of a commit reach this many bytes, no more transactions are added to the commit.
const MAX_GROUP_BYTES: usize = 8 * 1024 * 1024;

pub(crate) type Reply<T> = oneshot::Sender<Result<T>>;

/// A change of the table that is not a transaction, for example a grant of a lease. A `TableTask` itself sends the
/// result to the caller that waits for the change. A `TableTask` gets `None` instead of the table if the store was
/// closed before the task ran.
pub(crate) type TableTask = Box<dyn FnOnce(&StoreCore, Option<&dyn Table>) + Send>;

pub(crate) enum WriteJob {
    /// Runs a transaction and sends the response to the caller.
    Txn {
        txn: Txn,
        purpose: Purpose,
        reply: Reply<TxnResponse>,
    },
    Compact {
        revision: u64,
        reply: Reply<()>,
    },
    /// Removes all log rows below the compaction mark.
    Sweep {
        reply: Reply<()>,
    },
    /// Frees disk space for releasing an address, after the release failed with the error `full`.
    MakeRoom {
        full: Error,
        reply: Reply<()>,
    },
    /// Runs a change of the table that is not a transaction.
    Change(TableTask),
}

#[derive(Default)]
pub(crate) struct JobQueue {
    jobs: VecDeque<WriteJob>,
    draining: bool,
}

impl StoreCore {
    fn queue(&self) -> MutexGuard<'_, JobQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a write job and waits for the job's answer.
    ///
    /// # Errors
    /// Any error of the write job; `Closed` if the store was closed.
    pub(crate) async fn submit<T>(
        self: &Arc<Self>,
        operation: Operation,
        job: impl FnOnce(Reply<T>) -> WriteJob,
    ) -> Result<T> {
        self.check_open(operation)?;
        let (reply, answer) = oneshot::channel();
        self.enqueue(job(reply));
        // If the runtime shuts down before the job ends, the job's answer is lost and the outcome is unknown.
        let unknown = || closed(self.name, operation).with_outcome(Outcome::Unknown);
        answer.await.unwrap_or_else(|_| Err(unknown()))
    }

    fn enqueue(self: &Arc<Self>, job: WriteJob) {
        let mut queue = self.queue();
        queue.jobs.push_back(job);
        if std::mem::replace(&mut queue.draining, true) {
            return;
        }
        drop(queue);
        let drainer = QueueDrainer { inner: Arc::clone(self), finished: false };
        match self.blocking {
            Blocking::OnThreads => {
                spawn_blocking(move || {
                    let table = Arc::clone(&drainer.inner.table);
                    drainer.run(table.blocking_read().as_deref());
                });
            }
            // `try_read` fails only while the store is being closed, because nothing else takes the write lock.
            Blocking::InPlace => match self.table.try_read() {
                Ok(table) => drainer.run(table.as_deref()),
                Err(_) => drainer.run(None),
            },
        }
    }
}

/// Drains the queue of write jobs. Dropping a drainer before the queue is empty drops the remaining jobs, whose callers
/// then get an error.
struct QueueDrainer {
    inner: Arc<StoreCore>,
    finished: bool,
}

impl Drop for QueueDrainer {
    fn drop(&mut self) {
        if !self.finished {
            let mut queue = self.inner.queue();
            queue.draining = false;
            queue.jobs.clear();
        }
    }
}

impl QueueDrainer {
    fn run(mut self, table: Option<&dyn Table>) {
        let inner = Arc::clone(&self.inner);
        while let Some(job) = self.next() {
            let Some(table) = table else {
                refuse(job, &inner);
                continue;
            };
            // Panics of the engine are caught where the engine is called, so a panic here is a bug in this crate;
            // uncaught, it would stop all later writes. A panic drops the write job's reply channel, which tells the
            // caller that the outcome is unknown.
            let _ = caught(|| inner.work(table, job));
        }
    }

    /// Takes the next write job; if there is none, marks the drainer as finished.
    fn next(&mut self) -> Option<WriteJob> {
        let mut queue = self.inner.queue();
        let job = queue.jobs.pop_front();
        if job.is_none() {
            queue.draining = false;
            drop(queue);
            self.finished = true;
        }
        job
    }
}

/// Answers a write job that was queued after the store was closed.
fn refuse(job: WriteJob, inner: &StoreCore) {
    let store = inner.name;
    // `send` fails only if the caller has stopped waiting for the answer, so a failure is ignored.
    match job {
        WriteJob::Txn { reply, .. } => drop(reply.send(Err(closed(store, Operation::Txn)))),
        WriteJob::Compact { reply, .. } => drop(reply.send(Err(closed(store, Operation::Compact)))),
        // A compaction succeeds even if the store is closed before the compacted rows are removed: the compaction mark
        // is durable, and a compaction does not promise when rows are removed.
        WriteJob::Sweep { reply } => drop(reply.send(Ok(()))),
        WriteJob::MakeRoom { reply, .. } => drop(reply.send(Err(closed(store, Operation::Txn)))),
        WriteJob::Change(make) => make(inner, None),
    }
}

/// The results of a staged group of transactions before the group's commit.
struct TxnGroup {
    replies: Vec<(Reply<TxnResponse>, Result<TxnResponse>)>,
    old: Option<StateRow>,
    /// The state of the store after the group's transactions, and the rows to write; `None` if the group changes
    /// nothing.
    new: Option<(StateRow, Vec<Write>)>,
}

impl StoreCore {
    fn work(self: &Arc<Self>, table: &dyn Table, job: WriteJob) {
        match job {
            // The caller has stopped waiting for the answer, so the transaction can be dropped like a request that
            // never arrived.
            WriteJob::Txn { reply, .. } if reply.is_closed() => {}
            WriteJob::Txn { txn, purpose, reply } => self.work_group(table, purpose, txn, reply),
            WriteJob::Compact { revision, reply } => match self.compact(table, revision) {
                Ok(()) => self.queue().jobs.push_back(WriteJob::Sweep { reply }),
                Err(error) => drop(reply.send(Err(error))),
            },
            WriteJob::MakeRoom { full, reply } => drop(reply.send(self.make_room(table, full))),
            WriteJob::Change(make) => make(self, Some(table)),
            WriteJob::Sweep { reply } => match self.sweep_some(table, Purpose::Any, |state| state.compacted) {
                Ok(SweepProgress::More) => self.queue().jobs.push_back(WriteJob::Sweep { reply }),
                Ok(SweepProgress::Done | SweepProgress::Nothing) => drop(reply.send(Ok(()))),
                Err(error) => {
                    // An error of removing compacted rows is only logged: the compaction mark is durable, so the
                    // compaction has succeeded. Later commits remove the rows below the compaction mark.
                    tracing::warn!(
                        %error,
                        "cannot delete compacted revisions from the store; trying again at later commits"
                    );
                    drop(reply.send(Ok(())));
                }
            },
        }
    }

    /// Runs a transaction in one commit with the transactions of the same purpose that follow it in the queue.
    fn work_group(&self, table: &dyn Table, purpose: Purpose, txn: Txn, reply: Reply<TxnResponse>) {
        let mut waiting = VecDeque::from([(txn, reply)]);
        let mut group = TxnGroup { replies: Vec::new(), old: None, new: None };
        let staged = self
            .ensure_writable(table, Operation::Txn, purpose)
            .and_then(|()| guarded(self.name, Operation::Txn, || self.stage(table, purpose, &mut waiting, &mut group)));
        let failure = match (staged, group.old, group.new) {
            (Err(error), ..) => Some(error.with_outcome(Outcome::NotApplied)),
            (Ok(()), Some(old), Some((new, writes))) => self.commit(table, purpose, writes, &old, new).err(),
            (Ok(()), ..) => None,
        };
        let failure = failure.map(SharedError::new);
        let answer = |found: Result<TxnResponse>| match &failure {
            Some(failure) => Err(failure.error(self.name, Operation::Txn, failure.outcome())),
            None => found,
        };
        // `send` fails only if the caller has stopped waiting for the answer, so a failure is ignored.
        for (reply, found) in group.replies {
            let _ = reply.send(answer(found));
        }
        for (_, reply) in waiting {
            let _ = reply.send(answer(Err(closed(self.name, Operation::Txn))));
        }
    }

    /// Computes the effect of the transactions in `waiting` as one group, and refills `waiting` from the job queue.
    fn stage(
        &self,
        table: &dyn Table,
        purpose: Purpose,
        waiting: &mut VecDeque<(Txn, Reply<TxnResponse>)>,
        group: &mut TxnGroup,
    ) -> Result<()> {
        let rows = Rows::of(table, self.name)?;
        let old = rows.state()?;
        group.old = Some(old);
        let mut stage = StagedState::new(&rows, self.name, old);
        while let Some((txn, _)) = waiting.front() {
            let answer = stage.apply(txn, self.clock.micros());
            if let Some((_, reply)) = waiting.pop_front() {
                group.replies.push((reply, answer));
            }
            if group.replies.len() < MAX_GROUP_TXNS && stage.bytes() < MAX_GROUP_BYTES {
                waiting.extend(self.next_txn(purpose));
            }
        }
        let (mut writes, mut new) = stage.finish()?;
        if writes.is_empty() {
            return Ok(());
        }
        self.sweep_expired(&rows, purpose, &old, &mut new, &mut writes)?;
        group.new = Some((new, writes));
        Ok(())
    }

    /// Adds the removal of some expired history to the rows of a commit. While reserved disk space is missing, an
    /// address release drops the whole history instead of only expired rows; otherwise the history that releases add
    /// would use up the reserve at the journal's checkpoints.
    ///
    /// # Errors
    /// Any error of reading the log.
    pub(crate) fn sweep_expired(
        &self,
        rows: &Rows<'_>,
        purpose: Purpose,
        old: &StateRow,
        new: &mut StateRow,
        writes: &mut Vec<Write>,
    ) -> Result<()> {
        if purpose == Purpose::Release && self.reserve.as_ref().is_some_and(|reserve| reserve.is_short()) {
            new.compacted = new.compacted.max(old.revision);
            return sweep(rows, old.revision, &ExpiredHistory::MARK_ONLY, MAX_SWEPT_ROWS, new, writes);
        }
        let bounds = ExpiredHistory::at(&self.retention(), self.clock.micros(), old.time);
        let budget = sweep_budget(writes.len());
        sweep(rows, old.revision, &bounds, budget, new, writes)
    }

    /// Takes the next write job from the queue if it is a transaction of purpose `purpose` whose caller is still
    /// waiting.
    fn next_txn(&self, purpose: Purpose) -> Option<(Txn, Reply<TxnResponse>)> {
        let mut queue = self.queue();
        loop {
            match queue.jobs.pop_front()? {
                WriteJob::Txn { reply, .. } if reply.is_closed() => {}
                WriteJob::Txn { txn, purpose: its, reply } if its == purpose => return Some((txn, reply)),
                other => {
                    queue.jobs.push_front(other);
                    return None;
                }
            }
        }
    }

    fn compact(&self, table: &dyn Table, mark: u64) -> Result<()> {
        self.ensure_writable(table, Operation::Compact, Purpose::Any)?;
        let old = guarded(self.name, Operation::Compact, || Rows::of(table, self.name)?.state())
            .map_err(|error| error.with_outcome(Outcome::NotApplied))?;
        if mark <= old.compacted {
            return Err(compacted(self.name, Operation::Compact, old.compacted));
        }
        if mark > old.revision {
            return Err(Error::new(ErrorKind::FutureRevision, Operation::Compact, self.name));
        }
        self.commit(table, Purpose::Any, Vec::new(), &old, StateRow { compacted: mark, ..old })
    }

    /// Drops all history before the newest revision, and removes some of the dropped rows. Returns false if no row
    /// could be removed.
    fn give_up_history(&self, table: &dyn Table, purpose: Purpose) -> Result<bool> {
        Ok(self.sweep_some(table, purpose, |state| state.revision)? != SweepProgress::Nothing)
    }

    /// Raises the compaction mark to `mark`, and removes some of the log rows below the mark.
    fn sweep_some(
        &self,
        table: &dyn Table,
        purpose: Purpose,
        mark: impl Fn(&StateRow) -> u64,
    ) -> Result<SweepProgress> {
        self.ensure_writable(table, Operation::Compact, purpose)?;
        let (old, new, writes) = guarded(self.name, Operation::Compact, || {
            let rows = Rows::of(table, self.name)?;
            let old = rows.state()?;
            let mut new = StateRow { compacted: old.compacted.max(mark(&old)), ..old };
            let mut writes = Vec::new();
            sweep(&rows, old.revision, &ExpiredHistory::MARK_ONLY, MAX_SWEPT_ROWS, &mut new, &mut writes)?;
            Ok((old, new, writes))
        })?;
        if writes.is_empty() {
            return Ok(SweepProgress::Nothing);
        }
        let progress = if writes.len() < MAX_SWEPT_ROWS { SweepProgress::Done } else { SweepProgress::More };
        self.commit(table, purpose, writes, &old, new)?;
        Ok(progress)
    }

    /// Commits rows, and publishes the new state once the commit is durable. If the engine reports a failed commit,
    /// reopens the table to find out whether the commit happened.
    ///
    /// # Errors
    /// The engine's error. The error's outcome says whether the reopened table contains the commit, or is `Unknown` if
    /// the table could not be reopened.
    pub(crate) fn commit(
        &self,
        table: &dyn Table,
        purpose: Purpose,
        mut writes: Vec<Write>,
        old: &StateRow,
        new: StateRow,
    ) -> Result<()> {
        let row = codec::encode(codec::STATE_KEY, &new)
            .map_err(|damage| corrupt(self.name, Operation::Txn, damage.0).with_outcome(Outcome::NotApplied))?;
        writes.push(Write::Put(codec::STATE_KEY.to_vec(), row));
        let begun = Instant::now();
        let Err(error) = guarded(self.name, Operation::Txn, || table.commit(&writes)) else {
            if let Some(observer) = self.observer.get() {
                observer(begun.elapsed());
            }
            self.publish(new);
            self.watch_index.committed(old.revision, new.revision, &writes);
            return Ok(());
        };
        match self.recover(table, purpose) {
            Ok(found) if found == new => {
                tracing::warn!(
                    %error,
                    "the storage engine reported an error, but the commit was written; reporting success"
                );
                Ok(())
            }
            Ok(found) if found == *old => Err(error.with_outcome(Outcome::NotApplied)),
            Ok(_) | Err(_) => {
                self.poisoned.store(true, Ordering::Relaxed);
                Err(error.with_outcome(Outcome::Unknown))
            }
        }
    }

    /// Reopens the table after a failed commit, and returns the state that the table has now.
    fn recover(&self, table: &dyn Table, purpose: Purpose) -> Result<StateRow> {
        let reopen = || {
            table.recover()?;
            Rows::of(table, self.name)?.state()
        };
        let state = loop {
            match guarded(self.name, Operation::Open, reopen) {
                Err(error) if self.release_reserved_space(&error, purpose) => {}
                state => break state?,
            }
        };
        if state.revision < self.published().state.revision {
            return Err(Error::new(ErrorKind::RevisionRegressed, Operation::Open, self.name));
        }
        self.publish(state);
        self.watch_index.found(state.revision);
        Ok(state)
    }

    /// Fails unless the store currently accepts writes for the purpose `purpose`. If the outcome of an earlier commit
    /// is still unknown, tries again to determine that outcome.
    pub(crate) fn ensure_writable(&self, table: &dyn Table, operation: Operation, purpose: Purpose) -> Result<()> {
        self.check_reserve(operation, purpose)?;
        if !self.poisoned.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.recover(table, purpose).map_err(|error| {
            // If the disk is full, the error is `NoSpace` and not `Poisoned`, because the user can free disk space.
            let kind = if *error.kind() == ErrorKind::NoSpace { ErrorKind::NoSpace } else { ErrorKind::Poisoned };
            Error::new(kind, operation, self.name).with_source(error).with_outcome(Outcome::NotApplied)
        })?;
        self.poisoned.store(false, Ordering::Relaxed);
        Ok(())
    }

    fn publish(&self, state: StateRow) {
        self.published().state = state;
    }
}

/// Whether a commit has left expired rows in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SweepProgress {
    More,
    Done,
    Nothing,
}

/// Each commit removes at least this many expired rows, if there are as many.
const MIN_SWEPT_ROWS: usize = 32;
/// Number of expired rows that a commit removes for each row that the commit writes.
const SWEPT_ROWS_PER_WRITE: usize = 4;
/// Maximum number of expired rows that one commit removes.
const MAX_SWEPT_ROWS: usize = 1024;
/// Maximum plausible distance between the store's clock and the newest revision's time, and between the times of
/// neighbouring revisions. If a distance exceeds `MAX_CLOCK_GAP`, the ages of revisions are not trusted.
const MAX_CLOCK_GAP: Duration = Duration::from_secs(24 * 60 * 60);

/// Maximum number of expired rows to remove in a commit that writes `writes` rows.
fn sweep_budget(writes: usize) -> usize {
    writes.saturating_mul(SWEPT_ROWS_PER_WRITE).clamp(MIN_SWEPT_ROWS, MAX_SWEPT_ROWS)
}

/// The limits that decide which history of a store has expired, and so how far the compaction mark is raised. Which
/// revisions are readable depends on the compaction mark alone.
#[derive(Clone, Copy)]
pub(crate) struct ExpiredHistory {
    revisions: Option<u64>,
    bytes: Option<u64>,
    /// The time, in microseconds since 1970, before which all log rows have expired.
    expired_before: Option<u64>,
    /// The limit on the number of revisions applies only to log rows from before the time `counted_before`, in
    /// microseconds since 1970.
    counted_before: Option<u64>,
}

impl ExpiredHistory {
    /// No limits on the history: only the history below the compaction mark has expired.
    const MARK_ONLY: Self = Self { revisions: None, bytes: None, expired_before: None, counted_before: None };

    /// Computes which history has expired under the limits `retention` at the time `now`. `newest` is the time of the
    /// newest revision; `now` and `newest` are in microseconds since 1970.
    pub(crate) fn at(retention: &Retention, now: u64, newest: u64) -> Self {
        let trusted = now.abs_diff(newest) <= micros(MAX_CLOCK_GAP);
        let expired_before = retention.age.filter(|_| trusted).map(|age| now.saturating_sub(micros(age)));
        let counted_before = retention.min_age.map(|age| now.saturating_sub(micros(age)));
        Self { revisions: retention.revisions, bytes: retention.bytes, expired_before, counted_before }
    }

    fn has_expired(&self, state: &StateRow, revision: u64, row: &LogRow) -> bool {
        self.bytes.is_some_and(|bytes| state.log_bytes > bytes)
            || self.expired_before.is_some_and(|time| row.time < time)
            || (revision < self.first_counted(state) && self.counted_before.is_some_and(|time| row.time < time))
    }

    /// The oldest revision that the limit on the number of revisions keeps. The newest revision is always kept.
    fn first_counted(&self, state: &StateRow) -> u64 {
        self.revisions.map_or(0, |most| (state.revision + 1).saturating_sub(most.max(1)))
    }

    /// Drops the age limit if the ages of the revisions that it would remove are not certain.
    ///
    /// The times of two neighbouring revisions can be far apart because there were no writes, or because the clock has
    /// jumped. After a jump of the clock, all earlier revisions look old. After a forward jump of the clock, revisions
    /// that only look old are kept until the maximum age has passed since the jump. To guard against clock jumps, the
    /// age limit applies only if the newest expired and the oldest kept revision were made at most a day apart.
    fn with_known_ages(self, rows: &Rows<'_>, swept: LogPosition, newest: u64) -> Result<Self> {
        let Some(time) = self.expired_before else { return Ok(self) };
        let unaged = Self { expired_before: None, ..self };
        let (mut expired, mut kept) = ((swept.revision, rows.time_of(swept, newest)?), None);
        if expired.1 >= time {
            return Ok(unaged);
        }
        let mut end = newest + 1;
        while end - expired.0 > 1 {
            let middle = expired.0 + (end - expired.0) / 2;
            let found = rows.time_of(LogPosition::first_of(middle), newest)?;
            if found < time {
                expired = (middle, found);
            } else {
                (end, kept) = (middle, Some(found));
            }
        }
        // `kept` is `None` if even the newest revision has expired. The newest revision is kept even if it has expired;
        // its time is at most a day away from the store's clock.
        let gap = kept.map_or(0, |kept| kept.saturating_sub(expired.1));
        Ok(if gap > micros(MAX_CLOCK_GAP) { unaged } else { self })
    }

    /// True if any log row may have expired, by the limits on the history or by the compaction mark.
    fn expire_anything(&self, state: &StateRow) -> bool {
        state.swept.revision < state.compacted
            || self.expired_before.is_some()
            || self.bytes.is_some_and(|bytes| state.log_bytes > bytes)
            || state.swept.revision < self.first_counted(state)
    }
}

/// Raises the compaction mark past expired revisions, and removes about `budget` rows below the mark. `state` is the
/// store's state after the commit that removes the rows; `rows` is a view of the table at revision `newest`, before
/// this commit.
///
/// # Errors
/// Any error of reading the log.
pub(crate) fn sweep(
    rows: &Rows<'_>,
    newest: u64,
    bounds: &ExpiredHistory,
    budget: usize,
    state: &mut StateRow,
    writes: &mut Vec<Write>,
) -> Result<()> {
    if bounds.counted_before.is_none() {
        state.compacted = state.compacted.max(bounds.first_counted(state));
    }
    if !bounds.expire_anything(state) || state.swept.revision > newest {
        return Ok(());
    }
    let bounds = bounds.with_known_ages(rows, state.swept.max(LogPosition::first_of(2)), newest)?;
    let end = writes.len() + budget;
    rows.log(state.swept, newest, &mut |place, row, cost| {
        if writes.len() >= end {
            return ControlFlow::Break(());
        }
        if place.revision >= state.compacted {
            // The newest revision never expires, so the log always contains the newest revision.
            if place.revision >= state.revision || !bounds.has_expired(state, place.revision, &row) {
                state.swept = place;
                return ControlFlow::Break(());
            }
            state.compacted = place.revision + 1;
        }
        writes.push(Write::Delete(codec::log_key(place)));
        if let Some(prev) = &row.prev {
            writes.extend((0..prev.chunks()).map(|chunk| Write::Delete(codec::value_key(prev.place, chunk))));
        }
        state.log_bytes = state.log_bytes.saturating_sub(cost);
        state.swept = place.next();
        ControlFlow::Continue(())
    })
}

impl StoreCore {
    /// Queues a transaction and waits for the transaction's response. If an address release fails because the disk is
    /// full, frees disk space and tries the release again.
    ///
    /// # Errors
    /// Any error of the transaction; `NoSpace` if the disk is full and no disk space can be freed.
    pub(crate) async fn write(self: &Arc<Self>, txn: Txn, purpose: Purpose) -> Result<TxnResponse> {
        if purpose == Purpose::Any {
            return self.submit(Operation::Txn, |reply| WriteJob::Txn { txn, purpose, reply }).await;
        }
        loop {
            let again = txn.clone();
            match self.submit(Operation::Txn, |reply| WriteJob::Txn { txn: again, purpose, reply }).await {
                Err(error) if is_full(&error) && error.outcome() == Outcome::NotApplied => {
                    self.submit(Operation::Txn, |reply| WriteJob::MakeRoom { full: error, reply }).await?;
                }
                answer => return answer,
            }
        }
    }

    /// Frees space for a release of an address on a full disk. Drops history if the disk has space for the commit that
    /// drops it; otherwise, frees a part of the reserve and then drops history.
    ///
    /// # Errors
    /// The disk-full error `full` if no disk space can be freed.
    fn make_room(&self, table: &dyn Table, full: Error) -> Result<()> {
        if matches!(self.give_up_history(table, Purpose::Release), Ok(true)) {
            tracing::warn!("the disk is full; deleted old revisions of the store so that addresses can be released");
            return Ok(());
        }
        if !self.release_reserved_space(&full, Purpose::Release) {
            return Err(full.with_outcome(Outcome::NotApplied));
        }
        // If history is dropped first, the rest of the reserved disk space remains for later releases. If dropping
        // history fails for lack of space, the release itself may still fit into the freed space.
        let _ = self.give_up_history(table, Purpose::Release);
        Ok(())
    }

    /// For an address release that failed because of a full disk, frees a part of the reserved disk space, if any is
    /// left.
    fn release_reserved_space(&self, full: &Error, purpose: Purpose) -> bool {
        let given_up =
            purpose == Purpose::Release && is_full(full) && self.reserve.as_ref().is_some_and(|one| one.release_part());
        if given_up {
            self.spent.store(true, Ordering::Relaxed);
        }
        given_up
    }

    /// Refuses a write that is not a release while a part of the reserved disk space is missing.
    ///
    /// # Errors
    /// `NoSpace` if a part of the reserved disk space is missing.
    fn check_reserve(&self, operation: Operation, purpose: Purpose) -> Result<()> {
        if purpose == Purpose::Release || !self.spent.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.check_reserved_space(operation, |reserve| {
            reserve.restore().map_err(|missing| (ErrorKind::NoSpace, missing))
        })?;
        self.spent.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Checks that the disk has space for a commit of any purpose.
    ///
    /// # Errors
    /// `NoSpace` if the disk has no space for a commit; `Io` if the disk is not writable.
    pub(crate) fn check_room(&self) -> Result<()> {
        self.check_reserve(Operation::Txn, Purpose::Any)?;
        self.check_reserved_space(Operation::Txn, |reserve| reserve.check_room())
    }

    fn check_reserved_space(
        &self,
        operation: Operation,
        ask: impl Fn(&dyn SpaceReserve) -> Result<(), (ErrorKind, String)>,
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
