//! The one place that writes: a queue of jobs, and the call that drains it.
//!
//! Callers put a job into the queue and wait for its answer. The first one starts a task that drains the queue and ends
//! when it is empty. Transactions that wait together are committed together, each at its own revision. A caller that goes
//! away changes nothing: its job is done or, if nobody has begun it, dropped.
//!
//! Each commit also sweeps: it takes away a few rows of the history that has expired.
//!
//! An address that comes back is a write, too, and a full disk would refuse it; but it is what a host needs most then.
//! So a handle for [`Purpose::Release`] makes room for itself, in this order: it gives up history, which frees room within the
//! engine's files; and it gives up some of the store's [`SpaceReserve`], again and again until the write goes through or nothing
//! is left. Every other handle leaves the reserve alone, and writes nothing while a part of it is gone.

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

/// The most transactions that share a commit.
const MAX_GROUP_TXNS: usize = 256;
/// A group takes no more transactions once it writes this much.
const MAX_GROUP_BYTES: usize = 8 * 1024 * 1024;

/// Where an answer goes.
pub(crate) type Reply<T> = oneshot::Sender<Result<T>>;

/// A change that is no transaction. It answers by itself; without a table it answers that the store was closed.
pub(crate) type TableTask = Box<dyn FnOnce(&StoreCore, Option<&dyn Table>) + Send>;

/// Something to write.
pub(crate) enum WriteJob {
    /// A transaction.
    Txn { txn: Txn, purpose: Purpose, reply: Reply<TxnResponse> },
    /// Raise the mark.
    Compact { revision: u64, reply: Reply<()> },
    /// Take away what is below the mark, and say when it is done.
    Sweep { reply: Reply<()> },
    /// Make room for a release, which failed with `full`.
    MakeRoom { full: Error, reply: Reply<()> },
    /// Make another change.
    Change(TableTask),
}

/// The jobs that nobody has begun.
#[derive(Default)]
pub(crate) struct JobQueue {
    jobs: VecDeque<WriteJob>,
    /// True while a task drains the queue.
    draining: bool,
}

impl StoreCore {
    fn queue(&self) -> MutexGuard<'_, JobQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a job done, and waits for its answer.
    ///
    /// # Errors
    /// Those of the job; `Closed`.
    pub(crate) async fn submit<T>(
        self: &Arc<Self>,
        operation: Operation,
        job: impl FnOnce(Reply<T>) -> WriteJob,
    ) -> Result<T> {
        self.check_open(operation)?;
        let (reply, answer) = oneshot::channel();
        self.enqueue(job(reply));
        // No answer comes from a runtime that shuts down before, or while, the job is done.
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
            // Only closing keeps readers out.
            Blocking::InPlace => match self.table.try_read() {
                Ok(table) => drainer.run(table.as_deref()),
                Err(_) => drainer.run(None),
            },
        }
    }
}

/// Drains the queue. If it is dropped before that is finished, the jobs are dropped with it, which their callers see.
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
            // Panics of engines are caught where they are called. This keeps a fault of our own from stopping all
            // writing: the job's answer is dropped, which says that its outcome is unknown.
            let _ = caught(|| inner.work(table, job));
        }
    }

    /// The next job; with none left, the drainer is finished.
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

/// Answers a job that came after the store was closed.
fn refuse(job: WriteJob, inner: &StoreCore) {
    let store = inner.name;
    // A caller that has gone needs no answer.
    match job {
        WriteJob::Txn { reply, .. } => drop(reply.send(Err(closed(store, Operation::Txn)))),
        WriteJob::Compact { reply, .. } => drop(reply.send(Err(closed(store, Operation::Compact)))),
        // The mark is durable, which is what a compaction promises.
        WriteJob::Sweep { reply } => drop(reply.send(Ok(()))),
        WriteJob::MakeRoom { reply, .. } => drop(reply.send(Err(closed(store, Operation::Txn)))),
        WriteJob::Change(make) => make(inner, None),
    }
}

/// A group of transactions, worked out and not yet written.
struct TxnGroup {
    replies: Vec<(Reply<TxnResponse>, Result<TxnResponse>)>,
    /// Where the store stands before.
    old: Option<StateRow>,
    /// Where it stands after, if anything changes.
    new: Option<(StateRow, Vec<Write>)>,
}

impl StoreCore {
    fn work(self: &Arc<Self>, table: &dyn Table, job: WriteJob) {
        match job {
            // The caller that waited for it has gone, and cannot distinguish this from a call that came too late.
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
                    // The mark is durable; what is below it goes with later commits.
                    tracing::warn!(%error, "rows below the compaction mark stay for now");
                    drop(reply.send(Ok(())));
                }
            },
        }
    }

    /// Does a transaction and those for the same purpose that wait right behind it.
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
        // A caller that has gone needs no answer.
        for (reply, found) in group.replies {
            let _ = reply.send(answer(found));
        }
        for (_, reply) in waiting {
            let _ = reply.send(answer(Err(closed(self.name, Operation::Txn))));
        }
    }

    /// Works out what a group does; `waiting` is refilled from the queue.
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
        self.sweep_expired(&rows, &old, &mut new, &mut writes)?;
        group.new = Some((new, writes));
        Ok(())
    }

    /// Adds to a commit the removal of some history that has expired.
    ///
    /// # Errors
    /// Those of reading the log.
    pub(crate) fn sweep_expired(
        &self,
        rows: &Rows<'_>,
        old: &StateRow,
        new: &mut StateRow,
        writes: &mut Vec<Write>,
    ) -> Result<()> {
        let bounds = ExpiredHistory::at(&self.retention(), self.clock.micros(), old.time);
        let budget = sweep_budget(writes.len());
        sweep(rows, old.revision, &bounds, budget, new, writes)
    }

    /// The next job, if it is a transaction for this purpose whose caller still waits.
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

    /// Gives up all states but the newest, and takes away a slice of their rows. False if there were none.
    fn give_up_history(&self, table: &dyn Table, purpose: Purpose) -> Result<bool> {
        Ok(self.sweep_some(table, purpose, |state| state.revision)? != SweepProgress::Nothing)
    }

    /// Raises the mark to `mark`, and takes away a slice of what is below it.
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

    /// Commits, and publishes once that is durable. If the engine fails, the table is opened again to see what it did.
    ///
    /// # Errors
    /// The engine's, with the outcome that was found; `Unknown` if nothing could be found out.
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
                tracing::warn!(%error, "the engine reported an error, but the commit is there");
                Ok(())
            }
            Ok(found) if found == *old => Err(error.with_outcome(Outcome::NotApplied)),
            Ok(_) | Err(_) => {
                self.poisoned.store(true, Ordering::Relaxed);
                Err(error.with_outcome(Outcome::Unknown))
            }
        }
    }

    /// Opens the table again, and says where the store really stands.
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

    /// Tries again to find out what became of a commit, if one is in doubt.
    pub(crate) fn ensure_writable(&self, table: &dyn Table, operation: Operation, purpose: Purpose) -> Result<()> {
        self.check_reserve(operation, purpose)?;
        if !self.poisoned.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.recover(table, purpose).map_err(|error| {
            // A full disk is the reason that somebody can do something about.
            let kind = if *error.kind() == ErrorKind::NoSpace { ErrorKind::NoSpace } else { ErrorKind::Poisoned };
            Error::new(kind, operation, self.name).with_source(error).with_outcome(Outcome::NotApplied)
        })?;
        self.poisoned.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Shows readers what is durable.
    fn publish(&self, state: StateRow) {
        self.published().state = state;
    }
}

/// Whether there is more to take away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SweepProgress {
    More,
    Done,
    /// There was nothing.
    Nothing,
}

/// How many rows a commit takes away at least, if there is something to take.
const MIN_SWEPT_ROWS: usize = 32;
/// How many rows it takes away for each one that it writes.
const SWEPT_ROWS_PER_WRITE: usize = 4;
/// The most rows that one commit takes away.
const MAX_SWEPT_ROWS: usize = 1024;
/// How far the clock may be from the newest revision, and one revision from the next, before ages say nothing.
const MAX_CLOCK_GAP: Duration = Duration::from_secs(24 * 60 * 60);

/// How many rows a commit that writes this many takes away.
fn sweep_budget(writes: usize) -> usize {
    writes.saturating_mul(SWEPT_ROWS_PER_WRITE).clamp(MIN_SWEPT_ROWS, MAX_SWEPT_ROWS)
}

/// The history that has expired. Only the mark and the rows decide what can be read; the bounds only move the mark.
#[derive(Clone, Copy)]
pub(crate) struct ExpiredHistory {
    revisions: Option<u64>,
    bytes: Option<u64>,
    /// Rows from before this time have expired; in microseconds since 1970.
    expired_before: Option<u64>,
    /// Rows from this time on do not expire by the number of revisions.
    counted_before: Option<u64>,
}

impl ExpiredHistory {
    /// Nothing but what is below the mark already.
    const MARK_ONLY: Self = Self { revisions: None, bytes: None, expired_before: None, counted_before: None };

    /// Those of `retention` at the time `now`, when the newest revision is from `newest`; both in microseconds.
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

    /// The oldest revision that the bound on their number keeps; the newest one can always be read.
    fn first_counted(&self, state: &StateRow) -> u64 {
        self.revisions.map_or(0, |most| (state.revision + 1).saturating_sub(most.max(1)))
    }

    /// The same without the bound on age, if nothing is known of the age of what has expired by it.
    ///
    /// Between two revisions that lie far apart either nobody came, or the clock has jumped. A jump makes everything
    /// before it look old, so it must not be given up until time has passed beyond the gap: ages count where the oldest
    /// revision that is kept follows the newest one that is not without such a gap.
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
        // With nothing to keep but the newest, that is within a day of the clock.
        let gap = kept.map_or(0, |kept| kept.saturating_sub(expired.1));
        Ok(if gap > micros(MAX_CLOCK_GAP) { unaged } else { self })
    }

    /// True if the log has to be looked at.
    fn expire_anything(&self, state: &StateRow) -> bool {
        state.swept.revision < state.compacted
            || self.expired_before.is_some()
            || self.bytes.is_some_and(|bytes| state.log_bytes > bytes)
            || state.swept.revision < self.first_counted(state)
    }
}

/// Moves the mark over what has expired and takes away rows below it, `budget` of them or a few more. `state` is where
/// the store will stand with this commit; `rows` show it at revision `newest`, which was committed before.
///
/// # Errors
/// Those of reading the log.
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
            // The newest revision stays, so that the log always shows where the store stands.
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
    /// Has a transaction carried out.
    ///
    /// # Errors
    /// Those of the job; `NoSpace` if nothing is left that could be given up.
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

    /// Makes room for a release: by giving up history if that can be written, else by giving up some of the reserve,
    /// and then history with the room that this made.
    ///
    /// # Errors
    /// `full` if there is nothing left to give up.
    fn make_room(&self, table: &dyn Table, full: Error) -> Result<()> {
        if matches!(self.give_up_history(table, Purpose::Release), Ok(true)) {
            tracing::warn!("the disk is full: older states of the store were given up for a release");
            return Ok(());
        }
        if !self.release_reserved_space(&full, Purpose::Release) {
            return Err(full.with_outcome(Outcome::NotApplied));
        }
        // It keeps the next ones from using up the reserve. If there is still too little room for it, the release alone
        // may fit in.
        let _ = self.give_up_history(table, Purpose::Release);
        Ok(())
    }

    /// Gives up some of the reserve because of this error, if the write is for a release and there is some left.
    fn release_reserved_space(&self, full: &Error, purpose: Purpose) -> bool {
        let given_up =
            purpose == Purpose::Release && is_full(full) && self.reserve.as_ref().is_some_and(|one| one.release_part());
        if given_up {
            self.spent.store(true, Ordering::Relaxed);
        }
        given_up
    }

    /// Refuses to write for anything but a release while a part of the reserve is gone.
    ///
    /// # Errors
    /// `NoSpace`.
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

    /// Checks that a commit that is no release could be written now.
    ///
    /// # Errors
    /// `NoSpace`; `Io` for a disk that cannot be written to.
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
