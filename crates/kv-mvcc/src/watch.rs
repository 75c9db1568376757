//! Watches: a cursor on the log, and a seat at its tip.
//!
//! Catching up, following live, resuming, lagging and being overtaken by compaction are one and the same: read on from
//! the cursor, if it is not below the mark.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream::unfold;
use kv::{
    Batch, Event, EventKind, Key, Kv, Operation, Prev, Progress, Range, Result, Revision, Value, WatchRequest,
    WatchStream,
};
use tokio::time::timeout;

use crate::codec::{Change, LogRow, Place};
use crate::entries::kv_of;
use crate::error::{compacted, revision};
use crate::options::time;
use crate::rows::{ROWS_PER_LOOK, Rows};
use crate::store::{Inner, MvccStore};
use crate::table::Table;
use crate::tip::{News, Seat};

/// How long one look at the log may take.
const SLICE: Duration = Duration::from_millis(5);
/// A quiet watch that reports its progress waits so long after a commit, so that a thousand of them cost little.
const REPORT: Duration = Duration::from_millis(200);
/// How many bytes of events one look at the log may gather; it always takes one event.
const SLICE_BYTES: usize = 1024 * 1024;

/// Watches a checked request.
pub(crate) fn watch(inner: Arc<Inner>, request: WatchRequest) -> WatchStream {
    let WatchRequest { range, start, prev, progress, .. } = request;
    let seat = inner.tip.seat(&range);
    let cursor = Cursor { next: Place::first_of(start.get().unsigned_abs()), partial: None };
    let watcher = Watcher {
        inner,
        seat,
        range: Arc::new(range),
        prev,
        progress,
        cursor,
        is_behind: true,
        ready: VecDeque::new(),
        end: End::Open,
    };
    unfold(watcher, |mut watcher| async move { watcher.next().await.map(|item| (item, watcher)) }).boxed()
}

struct Watcher {
    inner: Arc<Inner>,
    seat: Seat,
    range: Arc<Range>,
    prev: Prev,
    progress: Progress,
    cursor: Cursor,
    /// There may be changes after the cursor that the log was not searched for.
    is_behind: bool,
    ready: VecDeque<Batch>,
    end: End,
}

/// Whether more can come.
#[derive(PartialEq, Eq)]
enum End {
    Open,
    Reached,
}

/// How far a watch has come.
#[derive(Clone, Default)]
struct Cursor {
    /// The next place of the log to read.
    next: Place,
    /// The events so far of a revision that is not read to its end.
    partial: Option<Batch>,
}

/// The result of one scan of the log.
struct Found {
    ready: VecDeque<Batch>,
    cursor: Cursor,
    /// The newest revision.
    newest: u64,
}

impl Watcher {
    async fn next(&mut self) -> Option<Result<Batch>> {
        loop {
            if let Some(batch) = self.ready.pop_front() {
                return Some(Ok(batch));
            }
            if self.end == End::Reached {
                return None;
            }
            if let Err(error) = self.advance().await {
                self.end = End::Reached;
                return Some(Err(error));
            }
        }
    }

    /// Waits until there is something after the cursor, and reads some of it; or reports the progress.
    async fn advance(&mut self) -> Result<()> {
        self.inner.check_open(Operation::Watch)?;
        let next = self.cursor.next.revision;
        if self.is_behind && self.inner.published().state.revision >= next {
            return self.read().await;
        }
        match self.seat.news() {
            News::Changed(from) => {
                self.is_behind = true;
                self.skip_to(from);
            }
            // A watch that begins in the future, or has read on, is ahead of that.
            News::Passed(passed) if passed < next => self.wait().await,
            News::Passed(passed) => {
                self.is_behind = false;
                self.skip_to(passed + 1);
                if self.progress == Progress::Report {
                    self.ready.push_back(Batch::progress(revision(passed)));
                }
            }
        }
        Ok(())
    }

    /// Nothing in the range has changed before this revision.
    fn skip_to(&mut self, next: u64) {
        if self.cursor.partial.is_none() && self.cursor.next.revision < next {
            self.cursor.next = Place::first_of(next);
        }
    }

    /// Waits until there may be news.
    async fn wait(&self) {
        if self.progress == Progress::Omit {
            return self.seat.woken().await;
        }
        self.seat.wants_any();
        if self.inner.published().state.revision < self.cursor.next.revision {
            self.seat.woken().await;
        }
        // A change in the range comes at once.
        if !self.seat.has_changed() {
            let _ = timeout(REPORT, self.seat.woken()).await;
        }
    }

    /// Reads some of the log after the cursor.
    async fn read(&mut self) -> Result<()> {
        let (range, prev, cursor) = (Arc::clone(&self.range), self.prev, std::mem::take(&mut self.cursor));
        let found = self
            .inner
            .blocking(Operation::Watch, move |inner, table| scan(table, inner.name, &range, prev, cursor))
            .await?;
        let newest = revision(found.newest);
        let is_quiet = found.ready.back().is_none_or(|batch| batch.revision < newest);
        let has_all = found.cursor.partial.is_none() && found.cursor.next.revision > found.newest;
        (self.ready, self.cursor, self.is_behind) = (found.ready, found.cursor, !has_all);
        if self.progress == Progress::Report && has_all && is_quiet {
            self.ready.push_back(Batch::progress(newest));
        }
        Ok(())
    }
}

/// A part of what has happened in a range.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Changes {
    /// Whole revisions, ascending; possibly none, where nothing in the range has changed.
    pub batches: Vec<Batch>,
    /// Where to go on.
    pub next: Revision,
    /// The newest revision. All is read once `next` is above it.
    pub newest: Revision,
}

impl MvccStore {
    /// The events that a watch would deliver by now, a part at a time: for a caller that releases the store in between,
    /// or reads the past only. Takes about 5 ms, and more where a single revision does.
    ///
    /// # Errors
    /// Those of a watch: `Compacted` if its start is below the mark; those of the table.
    pub async fn changes(&self, request: WatchRequest) -> Result<Changes> {
        request.check(self.inner().name)?;
        let WatchRequest { range, start, prev, .. } = request;
        let work = move |inner: &Inner, table: &dyn Table| {
            let mut cursor = Cursor { next: Place::first_of(start.get().unsigned_abs()), partial: None };
            loop {
                let found = scan(table, inner.name, &range, prev, cursor)?;
                cursor = found.cursor;
                // A revision that is read in part is read again.
                let next = cursor.partial.as_ref().map_or(revision(cursor.next.revision), |batch| batch.revision);
                if next > start || found.newest < start.get().unsigned_abs() {
                    return Ok(Changes { batches: found.ready.into(), next, newest: revision(found.newest) });
                }
            }
        };
        self.inner().blocking(Operation::Watch, work).await
    }
}

/// Reads a slice of the log in one short view.
fn scan(table: &dyn Table, store: &'static str, range: &Range, prev: Prev, cursor: Cursor) -> Result<Found> {
    let Cursor { mut next, mut partial } = cursor;
    let rows = Rows::of(table, store)?;
    let state = rows.state()?;
    if next.revision < state.compacted {
        return Err(compacted(store, Operation::Watch, state.compacted));
    }
    let mut gathered = Vec::new();
    let (began, mut looked, mut bytes, mut complete) = (Instant::now(), 0, 0, true);
    rows.log(next, state.revision, &mut |place, row, _| {
        let time_is_up = looked > 0 && looked % ROWS_PER_LOOK == 0 && began.elapsed() >= SLICE;
        if time_is_up || bytes >= SLICE_BYTES {
            complete = false;
            return ControlFlow::Break(());
        }
        looked += 1;
        next = place.next();
        if range.contains(&row.key) {
            bytes += event_bytes(&row, prev);
            gathered.push((place, row));
        }
        ControlFlow::Continue(())
    })?;
    let mut ready = VecDeque::new();
    for (place, row) in gathered {
        let time = time(row.time);
        let event = event(&rows, place, row, prev)?;
        match &mut partial {
            Some(batch) if batch.revision == revision(place.revision) => batch.events.push(event),
            _ => {
                let batch = Batch { revision: revision(place.revision), time, events: vec![event] };
                ready.extend(partial.replace(batch));
            }
        }
    }
    if complete {
        ready.extend(partial.take());
        next = Place::first_of(next.revision.max(state.revision + 1));
    }
    Ok(Found { ready, cursor: Cursor { next, partial }, newest: state.revision })
}

/// The size that a row counts for.
fn event_bytes(row: &LogRow, prev: Prev) -> usize {
    let new = match &row.change {
        Change::Put(pointer) => pointer.len as usize,
        Change::Delete => 0,
    };
    let old = row.prev.filter(|_| prev == Prev::Return).map_or(0, |prev| prev.len as usize);
    row.key.len() + new + old
}

/// A row of the log as callers know it.
fn event(rows: &Rows<'_>, place: Place, row: LogRow, prev: Prev) -> Result<Event> {
    let key = Key::from(row.key);
    let prev = match row.prev.filter(|_| prev == Prev::Return) {
        Some(pointer) => Some(kv_of(key.clone(), &pointer, rows.value(&pointer)?)),
        None => None,
    };
    Ok(match &row.change {
        Change::Put(pointer) => {
            let value = rows.value(pointer)?;
            Event { kind: EventKind::Put, kv: kv_of(key, pointer, value), prev }
        }
        Change::Delete => {
            let kv = Kv {
                key,
                value: Value::default(),
                create_revision: Revision::UNSET,
                mod_revision: revision(place.revision),
                version: 0,
                lease: None,
            };
            Event { kind: EventKind::Delete, kv, prev }
        }
    })
}
