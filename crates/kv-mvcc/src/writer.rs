//! Implements the writer: a queue of jobs, and the task that drains the queue. All writes of a store happen in this
//! module.
//!
//! A caller puts a job into the queue and waits for the job's answer. The first job starts a task that drains the
//! queue and ends when the queue is empty. Transactions that wait at the same time are committed together, each at its
//! own revision. If a caller stops waiting, its job is dropped if the job has not started, and completed otherwise.
//!
//! Each commit also removes a few rows of expired history.
//!
//! On a full disk all writes fail, including the release of an address, although a host with a full disk needs its
//! releases most. A handle for [`Purpose::Release`] therefore makes room for its write. First the handle drops
//! history, which frees space within the engine's files. Then the handle frees parts of the store's [`SpaceReserve`],
//! one at a time, until the write succeeds or the reserve is empty. Handles with other purposes never use the reserve,
//! and do not write while a part of the reserve is missing.

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
/// A commit takes no further transactions once the commit has this many bytes.
const MAX_GROUP_BYTES: usize = 8 * 1024 * 1024;

pub(crate) type Reply<T> = oneshot::Sender<Result<T>>;

/// A change of the table that is not a transaction. The task sends the answer to its caller; if the task gets no
/// table, the answer is that the store was closed.
pub(crate) type TableTask = Box<dyn FnOnce(&StoreCore, Option<&dyn Table>) + Send>;

/// A job of the write queue.
pub(crate) enum WriteJob {
    /// Runs a transaction and answers its caller.
    Txn { txn: Txn, purpose: Purpose, reply: Reply<TxnResponse> },
    /// Raises the compaction mark.
    Compact { revision: u64, reply: Reply<()> },
    /// Removes the rows below the compaction mark, and answers when all these rows are removed.
    Sweep { reply: Reply<()> },
    /// Makes room for a release that failed with the error `full`.
    MakeRoom { full: Error, reply: Reply<()> },
    /// Makes another change of the table.
    Change(TableTask),
}

/// The queued jobs that have not started.
#[derive(Default)]
pub(crate) struct JobQueue {
    jobs: VecDeque<WriteJob>,
    draining: bool,
}

impl StoreCore {
    fn queue(&self) -> MutexGuard<'_, JobQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a job and waits for the job's answer.
    ///
    /// # Errors
    /// Any error of the job; `Closed` if the store was closed.
    pub(crate) async fn submit<T>(
        self: &Arc<Self>,
        operation: Operation,
        job: impl FnOnce(Reply<T>) -> WriteJob,
    ) -> Result<T> {
        self.check_open(operation)?;
        let (reply, answer) = oneshot::channel();
        self.enqueue(job(reply));
        // The job gives no answer if the runtime shuts down before or while the job runs.
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
            // Only closing the store takes the write lock of the table.
            Blocking::InPlace => match self.table.try_read() {
                Ok(table) => drainer.run(table.as_deref()),
                Err(_) => drainer.run(None),
            },
        }
    }
}

/// Drains the queue of jobs. A drainer that is dropped before the queue is empty drops the remaining jobs, and their
/// callers get an error.
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
            // Panics of engines are caught at the call of the engine. Catching panics here keeps a bug in this crate
            // from stopping all later writes. After a panic, the job's answer is dropped, which tells the caller that
            // the outcome is unknown.
            let _ = caught(|| inner.work(table, job));
        }
    }

    /// Takes the next job. When the queue is empty, the drainer is finished.
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

/// Answers a job that was queued after the store was closed.
fn refuse(job: WriteJob, inner: &StoreCore) {
    let store = inner.name;
    // If the caller has stopped waiting, dropping the answer is fine.
    match job {
        WriteJob::Txn { reply, .. } => drop(reply.send(Err(closed(store, Operation::Txn)))),
        WriteJob::Compact { reply, .. } => drop(reply.send(Err(closed(store, Operation::Compact)))),
        // The compaction mark is durable, and a compaction promises nothing more.
        WriteJob::Sweep { reply } => drop(reply.send(Ok(()))),
        WriteJob::MakeRoom { reply, .. } => drop(reply.send(Err(closed(store, Operation::Txn)))),
        WriteJob::Change(make) => make(inner, None),
    }
}

/// The results of a group of transactions before the commit.
struct TxnGroup {
    replies: Vec<(Reply<TxnResponse>, Result<TxnResponse>)>,
    /// The state of the store before the group.
    old: Option<StateRow>,
    /// The state of the store after the group, and the rows to write; `None` if the group changes nothing.
    new: Option<(StateRow, Vec<Write>)>,
}

impl StoreCore {
    fn work(self: &Arc<Self>, table: &dyn Table, job: WriteJob) {
        match job {
            // The caller has stopped waiting, so dropping the transaction has the same effect as a request that never
            // arrived.
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
                    // The compaction mark is durable. Later commits remove the rows below the mark.
                    tracing::warn!(%error, "cannot delete rows below the compaction revision; later commits delete them");
                    drop(reply.send(Ok(())));
                }
            },
        }
    }

    /// Runs a transaction together with the transactions of the same purpose that follow it in the queue.
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
        // If the caller has stopped waiting, dropping the answer is fine.
        for (reply, found) in group.replies {
            let _ = reply.send(answer(found));
        }
        for (_, reply) in waiting {
            let _ = reply.send(answer(Err(closed(self.name, Operation::Txn))));
        }
    }

    /// Computes the effect of a group of transactions, and refills `waiting` from the queue.
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

    /// Adds the removal of some expired history to a commit. While the reserve is short, a release on a full disk adds
    /// the removal of the whole history. Otherwise the history of the releases themselves would use up the reserve at
    /// each checkpoint of the journal.
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

    /// Takes the next job if it is a transaction of this purpose whose caller still waits.
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

    /// Drops all history before the newest revision, and removes some of the history's rows. Returns false if there
    /// were no rows to remove.
    fn give_up_history(&self, table: &dyn Table, purpose: Purpose) -> Result<bool> {
        Ok(self.sweep_some(table, purpose, |state| state.revision)? != SweepProgress::Nothing)
    }

    /// Raises the compaction mark to `mark`, and removes some of the rows below it.
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

    /// Commits, and publishes the new state once the commit is durable. If the engine fails, the table is reopened to
    /// find out whether the commit happened.
    ///
    /// # Errors
    /// The engine's error with the outcome that was found. The outcome is `Unknown` if it could not be found out.
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
                tracing::warn!(%error, "the storage engine reported an error, but the commit is in the store");
                Ok(())
            }
            Ok(found) if found == *old => Err(error.with_outcome(Outcome::NotApplied)),
            Ok(_) | Err(_) => {
                self.poisoned.store(true, Ordering::Relaxed);
                Err(error.with_outcome(Outcome::Unknown))
            }
        }
    }

    /// Reopens the table and returns its actual state.
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

    /// Fails unless the store can be written. If the outcome of an earlier commit is unknown, this method tries again
    /// to find out the outcome.
    pub(crate) fn ensure_writable(&self, table: &dyn Table, operation: Operation, purpose: Purpose) -> Result<()> {
        self.check_reserve(operation, purpose)?;
        if !self.poisoned.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.recover(table, purpose).map_err(|error| {
            // A full disk is reported as `NoSpace`, because the user can free disk space.
            let kind = if *error.kind() == ErrorKind::NoSpace { ErrorKind::NoSpace } else { ErrorKind::Poisoned };
            Error::new(kind, operation, self.name).with_source(error).with_outcome(Outcome::NotApplied)
        })?;
        self.poisoned.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Makes a durable state visible to readers.
    fn publish(&self, state: StateRow) {
        self.published().state = state;
    }
}

/// Says whether expired rows remain to be removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SweepProgress {
    More,
    Done,
    /// There were no expired rows to remove.
    Nothing,
}

/// Minimum number of expired rows that a commit removes, if the table has that many.
const MIN_SWEPT_ROWS: usize = 32;
/// Number of expired rows that a commit removes for each row that it writes.
const SWEPT_ROWS_PER_WRITE: usize = 4;
/// Maximum number of expired rows that a commit removes.
const MAX_SWEPT_ROWS: usize = 1024;
/// Maximum difference between the clock and the newest revision's time, and between the times of neighbouring
/// revisions, at which the ages of revisions are trusted.
const MAX_CLOCK_GAP: Duration = Duration::from_secs(24 * 60 * 60);

/// The number of expired rows that a commit of `writes` rows removes.
fn sweep_budget(writes: usize) -> usize {
    writes.saturating_mul(SWEPT_ROWS_PER_WRITE).clamp(MIN_SWEPT_ROWS, MAX_SWEPT_ROWS)
}

/// The limits that decide which history has expired. These limits only move the compaction mark. The mark and the rows
/// decide which revisions are readable.
#[derive(Clone, Copy)]
pub(crate) struct ExpiredHistory {
    revisions: Option<u64>,
    bytes: Option<u64>,
    /// Log rows from before this time have expired; microseconds since 1970.
    expired_before: Option<u64>,
    /// The limit on the number of revisions applies only to log rows from before this time; microseconds since 1970.
    counted_before: Option<u64>,
}

impl ExpiredHistory {
    /// A value without limits: only history below the compaction mark has expired.
    const MARK_ONLY: Self = Self { revisions: None, bytes: None, expired_before: None, counted_before: None };

    /// Computes the limits of `retention` at the time `now`, when the newest revision is from the time `newest`; both
    /// times are in microseconds since 1970.
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

    /// Drops the limit on age if the age of the history that this limit would remove is not certain.
    ///
    /// Two neighbouring revisions can be far apart because there were no writes, or because the clock has jumped.
    /// After a jump of the clock, all earlier revisions look old and must be kept until enough time has passed after
    /// the gap. The limit on age therefore applies only if there is no gap between the newest expired revision and the
    /// oldest revision that is kept.
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
        // If only the newest revision is kept, the time of that revision is within a day of the clock.
        let gap = kept.map_or(0, |kept| kept.saturating_sub(expired.1));
        Ok(if gap > micros(MAX_CLOCK_GAP) { unaged } else { self })
    }

    /// True if the log may contain expired rows.
    fn expire_anything(&self, state: &StateRow) -> bool {
        state.swept.revision < state.compacted
            || self.expired_before.is_some()
            || self.bytes.is_some_and(|bytes| state.log_bytes > bytes)
            || state.swept.revision < self.first_counted(state)
    }
}

/// Moves the compaction mark past expired revisions and removes about `budget` rows below the mark. `state` is the
/// state that this commit makes. `rows` show the table at revision `newest`, before this commit.
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
            // The newest revision is kept, so that the log always contains the current revision of the store.
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
    /// Queues a transaction and waits for its answer. A release that fails on a full disk makes room and tries again.
    ///
    /// # Errors
    /// Any error of the transaction; `NoSpace` if the disk is full and no space can be freed.
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

    /// Makes room for a release on a full disk. The method drops history, if the drop can be written. Otherwise the
    /// method frees a part of the reserve, and then drops history in the freed space.
    ///
    /// # Errors
    /// `full` if no space can be freed.
    fn make_room(&self, table: &dyn Table, full: Error) -> Result<()> {
        if matches!(self.give_up_history(table, Purpose::Release), Ok(true)) {
            tracing::warn!("the disk is full: deleted history of the store to make room for a release");
            return Ok(());
        }
        if !self.release_reserved_space(&full, Purpose::Release) {
            return Err(full.with_outcome(Outcome::NotApplied));
        }
        // Dropping history saves the reserve for later releases. If dropping history fails for lack of space, the
        // release alone may still fit.
        let _ = self.give_up_history(table, Purpose::Release);
        Ok(())
    }

    /// Frees a part of the reserve if the error `full` reports a full disk, the write is a release, and some of the
    /// reserve is left.
    fn release_reserved_space(&self, full: &Error, purpose: Purpose) -> bool {
        let given_up =
            purpose == Purpose::Release && is_full(full) && self.reserve.as_ref().is_some_and(|one| one.release_part());
        if given_up {
            self.spent.store(true, Ordering::Relaxed);
        }
        given_up
    }

    /// Fails for writes other than releases while a part of the reserve is missing.
    ///
    /// # Errors
    /// `NoSpace` if a part of the reserve is missing.
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
    /// `NoSpace`; `Io` for a disk that is not writable.
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
