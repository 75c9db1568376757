//! Implements watches. Each watch has a cursor on the log; a watch that has reached the end of the log is woken by the
//! next commit that changes its range.
//!
//! New, live, resumed and slow watches all work in the same way: the watch reads the log from its cursor on. A watch
//! fails only if its cursor is below the compaction mark.
//!
//! The [`WatchIndex`] contains the watches that have read the log to its end. A commit wakes only the watches whose
//! range the commit changes, so thousands of quiet watches cost a commit only a few microseconds.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream::unfold;
use kv::{
    Batch, Event, EventKind, Key, Kv, Operation, Prev, Progress, Range, Result, Revision, Value, WatchRequest,
    WatchStream,
};
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::codec::{self, Change, LogPosition, LogRow};
use crate::error::{compacted, revision};
use crate::options::time;
use crate::read::kv_of;
use crate::rows::{ROWS_PER_TIME_CHECK, Rows};
use crate::store::{MvccStore, StoreCore};
use crate::table::{Table, Write};

/// Maximum time for one scan of the log by a watch.
const MAX_SCAN_DURATION: Duration = Duration::from_millis(5);
/// After a commit, a quiet watch waits this long before it reports its progress. Reporting progress after each commit
/// would be expensive with a thousand quiet watches.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);
/// Maximum size in bytes of the events that one scan of the log returns; a scan always returns at least one event.
const MAX_SCAN_BYTES: usize = 1024 * 1024;

/// Opens a watch. The caller must have checked that the request is valid.
pub(crate) fn watch(inner: Arc<StoreCore>, request: WatchRequest) -> WatchStream {
    let WatchRequest { range, start, prev, progress, .. } = request;
    let registration = inner.watch_index.registration(&range);
    let cursor = WatchCursor { next: LogPosition::first_of(start.get().unsigned_abs()), partial: None };
    let watcher = LogWatcher {
        inner,
        registration,
        range: Arc::new(range),
        prev,
        progress,
        cursor,
        is_behind: true,
        ready: VecDeque::new(),
        end: WatchEnd::Open,
    };
    unfold(watcher, |mut watcher| async move { watcher.next().await.map(|item| (item, watcher)) }).boxed()
}

struct LogWatcher {
    inner: Arc<StoreCore>,
    registration: WatchRegistration,
    range: Arc<Range>,
    prev: Prev,
    progress: Progress,
    cursor: WatchCursor,
    /// True if the log may contain changes after the watch's cursor.
    is_behind: bool,
    ready: VecDeque<Batch>,
    end: WatchEnd,
}

#[derive(PartialEq, Eq)]
enum WatchEnd {
    Open,
    Reached,
}

#[derive(Clone, Default)]
struct WatchCursor {
    next: LogPosition,
    /// The events read so far of a revision that is not completely read.
    partial: Option<Batch>,
}

struct LogScan {
    ready: VecDeque<Batch>,
    cursor: WatchCursor,
    newest: u64,
}

impl LogWatcher {
    async fn next(&mut self) -> Option<Result<Batch>> {
        loop {
            if let Some(batch) = self.ready.pop_front() {
                return Some(Ok(batch));
            }
            if self.end == WatchEnd::Reached {
                return None;
            }
            if let Err(error) = self.advance().await {
                self.end = WatchEnd::Reached;
                return Some(Err(error));
            }
        }
    }

    /// Makes one step of a watch: reads a part of the log after the cursor, waits for changes, or reports progress to
    /// the caller.
    async fn advance(&mut self) -> Result<()> {
        self.inner.check_open(Operation::Watch)?;
        let next = self.cursor.next.revision;
        if self.is_behind && self.inner.published().state.revision >= next {
            return self.read().await;
        }
        match self.registration.news() {
            WatchNews::Changed(from) => {
                self.is_behind = true;
                self.skip_to(from);
            }
            // A watch is ahead of the watch index if it started at a future revision, or has already read revisions
            // that the index has not passed.
            WatchNews::Passed(passed) if passed < next => self.wait().await,
            WatchNews::Passed(passed) => {
                self.is_behind = false;
                self.skip_to(passed + 1);
                if self.progress == Progress::Report {
                    self.ready.push_back(Batch::progress(revision(passed)));
                }
            }
        }
        Ok(())
    }

    /// Moves the watch's cursor to `next`, because no earlier revision changed the watched range.
    fn skip_to(&mut self, next: u64) {
        if self.cursor.partial.is_none() && self.cursor.next.revision < next {
            self.cursor.next = LogPosition::first_of(next);
        }
    }

    /// Waits until the watch may have an event or a progress report to deliver.
    async fn wait(&self) {
        if self.progress == Progress::Omit {
            return self.registration.woken().await;
        }
        self.registration.wants_any();
        if self.inner.published().state.revision < self.cursor.next.revision {
            self.registration.woken().await;
        }
        // A change in the watched range is delivered at once, without waiting for the progress interval.
        if !self.registration.has_changed() {
            let _ = timeout(PROGRESS_INTERVAL, self.registration.woken()).await;
        }
    }

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

/// A part of the changes in a range, as returned by one call of [`MvccStore::changes`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Changes {
    /// One batch of events for each completely read revision, in ascending order; empty if the range did not change.
    pub batches: Vec<Batch>,
    /// The revision at which the next part of the changes starts.
    pub next: Revision,
    /// The newest revision of the store at the time of the read. All changes have been read once `next` is above
    /// `newest`.
    pub newest: Revision,
}

impl MvccStore {
    /// Reads the events that a watch would deliver up to now, one part per call. Use `changes` instead of a watch if
    /// the store must be released between two parts, or if no future changes are needed. A call of `changes` ends after
    /// about 5 ms, but always reads at least one whole revision.
    ///
    /// # Errors
    /// `Compacted` if the request starts below the compaction mark; an error for an invalid request; any error of the
    /// table.
    pub async fn changes(&self, request: WatchRequest) -> Result<Changes> {
        request.check(self.inner().name)?;
        let WatchRequest { range, start, prev, .. } = request;
        let work = move |inner: &StoreCore, table: &dyn Table| {
            let mut cursor = WatchCursor { next: LogPosition::first_of(start.get().unsigned_abs()), partial: None };
            loop {
                let found = scan(table, inner.name, &range, prev, cursor)?;
                cursor = found.cursor;
                // If a call of `changes` ends within a revision, the next call starts again at that revision.
                let next = cursor.partial.as_ref().map_or(revision(cursor.next.revision), |batch| batch.revision);
                if next > start || found.newest < start.get().unsigned_abs() {
                    return Ok(Changes { batches: found.ready.into(), next, newest: revision(found.newest) });
                }
            }
        };
        self.inner().blocking(Operation::Watch, work).await
    }
}

/// Scans a part of the log after `cursor` in one short view of the table.
fn scan(table: &dyn Table, store: &'static str, range: &Range, prev: Prev, cursor: WatchCursor) -> Result<LogScan> {
    let WatchCursor { mut next, mut partial } = cursor;
    let rows = Rows::of(table, store)?;
    let state = rows.state()?;
    if next.revision < state.compacted {
        return Err(compacted(store, Operation::Watch, state.compacted));
    }
    let mut gathered = Vec::new();
    let (began, mut looked, mut bytes, mut complete) = (Instant::now(), 0, 0, true);
    rows.log(next, state.revision, &mut |place, row, _| {
        let time_is_up = looked > 0 && looked % ROWS_PER_TIME_CHECK == 0 && began.elapsed() >= MAX_SCAN_DURATION;
        if time_is_up || bytes >= MAX_SCAN_BYTES {
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
        next = LogPosition::first_of(next.revision.max(state.revision + 1));
    }
    Ok(LogScan { ready, cursor: WatchCursor { next, partial }, newest: state.revision })
}

/// The number of bytes that the event of a log row adds towards the limit [`MAX_SCAN_BYTES`].
fn event_bytes(row: &LogRow, prev: Prev) -> usize {
    let new = match &row.change {
        Change::Put(pointer) => pointer.len as usize,
        Change::Delete => 0,
    };
    let old = row.prev.filter(|_| prev == Prev::Return).map_or(0, |prev| prev.len as usize);
    row.key.len() + new + old
}

fn event(rows: &Rows<'_>, place: LogPosition, row: LogRow, prev: Prev) -> Result<Event> {
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

/// The registered watches of a store.
#[derive(Default)]
pub(crate) struct WatchIndex {
    watches: Mutex<WatchSlots>,
}

#[derive(Default)]
struct WatchSlots {
    /// The newest revision whose commit was compared with the watched ranges.
    passed: u64,
    slots: Vec<Slot>,
    free: Vec<usize>,
    ranges: RangeIndex,
    /// The slots of the watches that the next commit must wake, whatever the commit changes.
    curious: Vec<usize>,
}

/// A slot of the index, which holds one registered watch and is reused after this watch was dropped.
#[derive(Default)]
struct Slot {
    watch: Option<SlotWatch>,
    is_curious: bool,
}

struct SlotWatch {
    kind: IndexedRange,
    /// The first revision that may have changed the watched range.
    changed: Option<u64>,
    wake: Arc<Notify>,
}

impl WatchSlots {
    fn watch(&mut self, slot: usize) -> Option<&mut SlotWatch> {
        self.slots.get_mut(slot)?.watch.as_mut()
    }
}

/// The range of a watch, in the form that the index stores.
#[derive(Clone)]
enum IndexedRange {
    Key(Vec<u8>),
    Prefix(Vec<u8>),
    Other(Range),
}

impl IndexedRange {
    fn of(range: &Range) -> Self {
        match range {
            Range::Key(key) => Self::Key(key.as_bytes().to_vec()),
            Range::Prefix(prefix) => Self::Prefix(prefix.as_bytes().to_vec()),
            // etcd clients encode a prefix as the range from the prefix to the smallest key after all keys with this
            // prefix.
            Range::FromTo(from, to) if from.prefix_end().as_ref() == Some(to) => Self::Prefix(from.as_bytes().to_vec()),
            other => Self::Other(other.clone()),
        }
    }
}

/// Finds the slots of the watches whose range contains a key. Most watches have a single key or a prefix as their
/// range, so a lookup finds them without visiting all other watches.
#[derive(Default)]
struct RangeIndex {
    keys: SlotList,
    prefixes: SlotList,
    /// For each prefix length in bytes, the number of watched prefixes of that length.
    lengths: Vec<usize>,
    others: Vec<(Range, usize)>,
}

impl RangeIndex {
    fn insert(&mut self, kind: &IndexedRange, slot: usize) {
        match kind {
            IndexedRange::Key(key) => self.keys.insert(key, slot),
            IndexedRange::Prefix(prefix) => {
                if self.lengths.len() <= prefix.len() {
                    self.lengths.resize(prefix.len() + 1, 0);
                }
                self.count(prefix).into_iter().for_each(|count| *count += 1);
                self.prefixes.insert(prefix, slot);
            }
            IndexedRange::Other(range) => self.others.push((range.clone(), slot)),
        }
    }

    fn remove(&mut self, kind: &IndexedRange, slot: usize) {
        match kind {
            IndexedRange::Key(key) => self.keys.remove(key, slot),
            IndexedRange::Prefix(prefix) => {
                self.count(prefix).into_iter().for_each(|count| *count -= 1);
                self.prefixes.remove(prefix, slot);
            }
            IndexedRange::Other(_) => self.others.retain(|(_, other)| *other != slot),
        }
    }

    fn count(&mut self, prefix: &[u8]) -> Option<&mut usize> {
        self.lengths.get_mut(prefix.len())
    }

    /// Adds to `found` the slots of the watches whose range contains the key.
    fn find(&self, key: &[u8], found: &mut Vec<usize>) {
        self.keys.find(key, found);
        let lengths = self.lengths.iter().enumerate().filter(|(_, count)| **count > 0);
        for prefix in lengths.filter_map(|(length, _)| key.get(..length)) {
            self.prefixes.find(prefix, found);
        }
        found.extend(self.others.iter().filter(|(range, _)| range.contains(key)).map(|(_, slot)| *slot));
    }
}

/// A map from watched keys or prefixes to slots, as a sorted list, which needs less memory and less code than a tree or
/// hash map. The amount of code matters because the CNI plugin contains the code of watches.
#[derive(Default)]
struct SlotList(Vec<(Vec<u8>, usize)>);

impl SlotList {
    fn place(&self, text: &[u8], slot: usize) -> usize {
        self.0.partition_point(|(other, at)| (&other[..], *at) < (text, slot))
    }

    fn insert(&mut self, text: &[u8], slot: usize) {
        self.0.insert(self.place(text, slot), (text.to_vec(), slot));
    }

    fn remove(&mut self, text: &[u8], slot: usize) {
        let place = self.place(text, slot);
        if self.0.get(place).is_some_and(|(other, at)| other == text && *at == slot) {
            self.0.remove(place);
        }
    }

    fn find(&self, text: &[u8], found: &mut Vec<usize>) {
        let from = self.0.get(self.place(text, 0)..).unwrap_or_default();
        found.extend(from.iter().take_while(|(other, _)| other == text).map(|(_, slot)| *slot));
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WatchNews {
    /// A commit may have changed the watched range at this revision or later.
    Changed(u64),
    /// `Passed(revision)`: no commit up to `revision` has changed the watched range.
    Passed(u64),
}

/// The registration of a watch in the index, which is removed when this value is dropped.
struct WatchRegistration {
    watch_index: Arc<WatchIndex>,
    slot: usize,
    wake: Arc<Notify>,
}

impl WatchIndex {
    /// Creates an index without watches for a store at the given revision.
    pub(crate) fn at(revision: u64) -> Arc<Self> {
        Arc::new(Self { watches: Mutex::new(WatchSlots { passed: revision, ..WatchSlots::default() }) })
    }

    fn watches(&self) -> MutexGuard<'_, WatchSlots> {
        self.watches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a watch of `range`, without reporting changes that were committed before.
    fn registration(self: &Arc<Self>, range: &Range) -> WatchRegistration {
        let (kind, wake) = (IndexedRange::of(range), Arc::new(Notify::new()));
        let mut watches = self.watches();
        let slot = watches.free.pop().unwrap_or_else(|| {
            watches.slots.push(Slot::default());
            watches.slots.len() - 1
        });
        watches.ranges.insert(&kind, slot);
        if let Some(slot) = watches.slots.get_mut(slot) {
            slot.watch = Some(SlotWatch { kind, changed: None, wake: Arc::clone(&wake) });
        }
        WatchRegistration { watch_index: Arc::clone(self), slot, wake }
    }

    /// Wakes the watches whose range is changed by the committed `writes`, which led from revision `old` to `new`. The
    /// caller must already have made the new state of the store visible to readers.
    pub(crate) fn committed(&self, old: u64, new: u64, writes: &[Write]) {
        let mut watches = self.watches();
        watches.passed = new;
        if watches.slots.len() == watches.free.len() {
            return;
        }
        let mut found = Vec::new();
        for write in writes {
            if let Some(key) = write.key().strip_prefix(&[codec::CURRENT]) {
                watches.ranges.find(key, &mut found);
            }
        }
        for slot in found {
            if let Some(watch) = watches.watch(slot).filter(|watch| watch.changed.is_none()) {
                watch.changed = Some(old + 1);
                watch.wake.notify_one();
            }
        }
        while let Some(slot) = watches.curious.pop() {
            if let Some(slot) = watches.slots.get_mut(slot) {
                slot.is_curious = false;
                slot.watch.iter().for_each(|watch| watch.wake.notify_one());
            }
        }
    }

    /// Wakes all watches after recovery finds the table at revision `new`: the writes of the recovered commit are
    /// unknown, so they may concern any watch. The caller must already have made the new state of the store visible to
    /// readers.
    pub(crate) fn found(&self, new: u64) {
        let mut watches = self.watches();
        let from = watches.passed + 1;
        watches.passed = new;
        for watch in watches.slots.iter_mut().filter_map(|slot| slot.watch.as_mut()) {
            watch.changed.get_or_insert(from);
            watch.wake.notify_one();
        }
    }

    pub(crate) fn close(&self) {
        self.watches().slots.iter().filter_map(|slot| slot.watch.as_ref()).for_each(|watch| watch.wake.notify_one());
    }
}

impl WatchRegistration {
    /// Returns what has happened to the watched range since the last call.
    fn news(&self) -> WatchNews {
        let mut watches = self.watch_index.watches();
        let changed = watches.watch(self.slot).and_then(|watch| watch.changed.take());
        changed.map_or(WatchNews::Passed(watches.passed), WatchNews::Changed)
    }

    /// True if the watched range may have changed since the last call of `news`.
    fn has_changed(&self) -> bool {
        self.watch_index.watches().watch(self.slot).is_some_and(|watch| watch.changed.is_some())
    }

    /// Makes the next commit wake the watch, whatever that commit changes.
    fn wants_any(&self) {
        let mut watches = self.watch_index.watches();
        let slot = watches.slots.get_mut(self.slot);
        if slot.is_some_and(|slot| !std::mem::replace(&mut slot.is_curious, true)) {
            watches.curious.push(self.slot);
        }
    }

    /// Waits until the watch may have an event or a progress report to deliver.
    async fn woken(&self) {
        self.wake.notified().await;
    }
}

impl Drop for WatchRegistration {
    fn drop(&mut self) {
        let mut watches = self.watch_index.watches();
        let watch = watches.slots.get_mut(self.slot).and_then(|slot| slot.watch.take());
        if let Some(watch) = watch {
            watches.ranges.remove(&watch.kind, self.slot);
            watches.free.push(self.slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(key: &str) -> Write {
        Write::Put(codec::current_key(key.as_bytes()), Vec::new())
    }

    #[test]
    fn watch_index_wakes_ranges_that_commit_changes() {
        let watch_index = Arc::<WatchIndex>::default();
        let seats = [Range::key("b"), Range::prefix("b"), Range::From("c".into()), Range::All]
            .map(|r| watch_index.registration(&r));
        let news = || seats.each_ref().map(WatchRegistration::news);
        let (changed, passed) = (WatchNews::Changed, WatchNews::Passed);
        watch_index.committed(1, 2, &[put("b")]);
        assert_eq!(news(), [changed(2), changed(2), passed(2), changed(2)]);
        assert_eq!(news(), [passed(2); 4]);
        watch_index.committed(2, 5, &[put("ba"), Write::Delete(codec::current_key(b"a"))]);
        watch_index.committed(5, 6, &[put("d")]);
        assert_eq!(news(), [passed(6), changed(3), changed(6), changed(3)]);
        // Only rows of live keys can change a watched range, so writing a log row wakes no watch.
        watch_index.committed(6, 7, &[Write::Put(vec![codec::LOG, b'b'], Vec::new())]);
        assert_eq!(news(), [passed(7); 4]);
        watch_index.found(9);
        assert_eq!(news(), [changed(8); 4]);
        drop(seats);
        let watches = watch_index.watches();
        assert!(watches.ranges.keys.0.is_empty() && watches.ranges.prefixes.0.is_empty());
        assert!(watches.ranges.lengths.iter().all(|count| *count == 0) && watches.ranges.others.is_empty());
        assert_eq!(watches.slots.len(), watches.free.len());
    }

    /// The index must find the same watches as a comparison of the key with each watched range.
    #[test]
    fn watch_index_agrees_with_ranges() {
        let mut random = fastrand::Rng::with_seed(7);
        let mut text = |most: usize| -> Vec<u8> {
            (0..random.usize(..=most)).map(|_| *random.choice(&[b'a', b'b', 0xff]).unwrap()).collect()
        };
        let mut ranges: Vec<Range> = vec![Range::All, Range::Prefix(Key::default())];
        for _ in 0..100 {
            let (one, other) = (Key::new(text(3)), Key::new(text(3)));
            let end = one.prefix_end().unwrap_or_else(|| other.clone());
            ranges.extend([Range::Key(one.clone()), Range::Prefix(one.clone()), Range::From(one.clone())]);
            ranges.extend([Range::FromTo(one.clone(), end), Range::FromTo(one, other)]);
        }
        let watch_index = Arc::<WatchIndex>::default();
        let mut seats: Vec<_> = ranges.iter().map(|range| (range, watch_index.registration(range))).collect();
        for revision in 1..300 {
            let key = text(4);
            watch_index.committed(revision - 1, revision, &[Write::Put(codec::current_key(&key), Vec::new())]);
            for (range, registration) in &seats {
                let is_changed = registration.news() == WatchNews::Changed(revision);
                assert_eq!(is_changed, range.contains(&key), "{range:?} {key:?}");
            }
            if revision % 10 == 0 {
                seats.pop();
            }
        }
    }

    #[tokio::test]
    async fn watch_index_wakes_by_range_or_any_commit() {
        let watch_index = Arc::<WatchIndex>::default();
        let (quiet, other) = (watch_index.registration(&Range::key("a")), watch_index.registration(&Range::key("b")));
        watch_index.committed(1, 2, &[put("b")]);
        other.woken().await;
        assert!(futures::poll!(std::pin::pin!(quiet.woken())).is_pending());
        quiet.wants_any();
        watch_index.committed(2, 3, &[put("b")]);
        quiet.woken().await;
        watch_index.committed(3, 4, &[put("b")]);
        assert!(futures::poll!(std::pin::pin!(quiet.woken())).is_pending(), "once");
        watch_index.close();
        quiet.woken().await;
    }
}
