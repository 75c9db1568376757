//! Evaluates read requests on a state of the store. Reads and transactions look up entries through the trait
//! [`Entries`]. [`PinnedReader`] reads one revision in slices, so that commits can run between two slices.

use std::collections::BTreeMap;
use std::ops::{Bound, ControlFlow};
use std::time::{Duration, Instant};

use kv::{
    Compare, Content, Error, ErrorKind, Key, Kv, OpResult, Operation, Range, RangeResponse, Result, Revision, Target,
    TxnRange, Value,
};

use crate::codec::{LogPosition, Pointer, StateRow};
use crate::error::{compacted, revision};
use crate::rows::{ROWS_PER_TIME_CHECK, Rows, VisitEntry, next_values};
use crate::table::{Merge, Table};

/// Entries that hide the table's entries for the same keys; `None` for a key that does not exist.
pub(crate) type KeyOverlay = BTreeMap<Key, Option<Pointer>>;

/// Gives access to the entries of one state of the store.
pub(crate) trait Entries {
    fn entry(&mut self, key: &[u8]) -> Result<Option<Pointer>>;

    /// Visits the entries with keys from `from` (inclusive) to `to` (exclusive; `None`: to the end) in ascending order,
    /// until `visit` returns `Break`.
    fn each(&mut self, from: &[u8], to: Option<&[u8]>, visit: VisitEntry<'_>) -> Result<()>;

    fn value(&mut self, pointer: &Pointer) -> Result<Value>;

    /// Reads the values of the entries in `pointers`, in the order of `pointers`.
    fn values(&mut self, pointers: &[Pointer]) -> Result<Vec<Value>> {
        pointers.iter().map(|pointer| self.value(pointer)).collect()
    }
}

/// The entries of an overlay with keys from `from` to `to`, for merging into a scan of the table's entries.
pub(crate) fn overlaid<'o>(
    overlay: &'o KeyOverlay,
    from: &[u8],
    to: Option<&[u8]>,
) -> Merge<impl Iterator<Item = (&'o [u8], Option<Pointer>)> + use<'o>> {
    let to = match to {
        // `BTreeMap::range` panics if the end of the range is below its start.
        Some(to) => Bound::Excluded(to.max(from)),
        None => Bound::Unbounded,
    };
    let range = overlay.range::<[u8], _>((Bound::Included(from), to));
    Merge::new(range.map(|(key, pointer)| (key.as_bytes(), *pointer)))
}

/// Visits the entries whose keys are in a range. A range of a single key is looked up without a scan.
fn each_in(
    entries: &mut dyn Entries,
    range: &Range,
    visit: &mut dyn FnMut(&[u8], Pointer) -> ControlFlow<()>,
) -> Result<()> {
    if let Range::Key(key) = range {
        if let Some(pointer) = entries.entry(key.as_bytes())? {
            // The range has only one key, so there is nothing more to visit, whatever `visit` returns.
            let _ = visit(key.as_bytes(), pointer);
        }
        return Ok(());
    }
    if range.is_empty() {
        return Ok(());
    }
    let (from, to) = range.bounds();
    entries.each(from.as_bytes(), to.as_ref().map(Key::as_bytes), visit)
}

/// Returns the live keys of a range with their pointers, in ascending order.
pub(crate) fn found_in(entries: &mut dyn Entries, range: &Range) -> Result<Vec<(Key, Pointer)>> {
    let mut found = Vec::new();
    each_in(entries, range, &mut |key, pointer| {
        found.push((Key::from(key), pointer));
        ControlFlow::Continue(())
    })?;
    Ok(found)
}

/// Evaluates a range request on the entries of a state of the store. The caller must fill in the revision of the
/// returned response.
pub(crate) fn read(entries: &mut dyn Entries, request: &TxnRange) -> Result<RangeResponse> {
    let limit = usize::try_from(request.limit).ok().filter(|limit| *limit > 0).unwrap_or(usize::MAX);
    let wanted = if request.content == Content::CountOnly { 0 } else { limit };
    let mut count = 0;
    let mut found = Vec::new();
    each_in(entries, &request.range, &mut |key, pointer| {
        count += 1;
        if found.len() < wanted {
            found.push((Key::from(key), pointer));
        }
        ControlFlow::Continue(())
    })?;
    let more = request.content != Content::CountOnly && count > found.len() as u64;
    let kvs = match request.content {
        Content::Full => with_values(entries, found)?,
        Content::KeysOnly | Content::CountOnly => {
            found.into_iter().map(|(key, pointer)| kv_of(key, &pointer, Value::default())).collect()
        }
    };
    Ok(RangeResponse { revision: Revision::UNSET, kvs, count, more })
}

pub(crate) fn with_values(entries: &mut dyn Entries, found: Vec<(Key, Pointer)>) -> Result<Vec<Kv>> {
    let pointers: Vec<Pointer> = found.iter().map(|(_, pointer)| *pointer).collect();
    let values = entries.values(&pointers)?;
    Ok(found.into_iter().zip(values).map(|((key, pointer), value)| kv_of(key, &pointer, value)).collect())
}

pub(crate) fn all_hold(entries: &mut dyn Entries, compares: &[Compare]) -> Result<bool> {
    for compare in compares {
        if !holds(entries, compare)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn holds(entries: &mut dyn Entries, compare: &Compare) -> Result<bool> {
    let found = found_in(entries, &compare.range)?;
    if found.is_empty() {
        return Ok(compare.holds(None));
    }
    for (key, pointer) in found {
        let value = match compare.target {
            Target::Value(_) => entries.value(&pointer)?,
            Target::Version(_) | Target::CreateRevision(_) | Target::ModRevision(_) | Target::Lease(_) => {
                Value::default()
            }
        };
        if !compare.holds(Some(&kv_of(key, &pointer, value))) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Converts an entry and its value to the type [`Kv`] of the store's interface.
pub(crate) fn kv_of(key: Key, pointer: &Pointer, value: Value) -> Kv {
    Kv {
        key,
        value,
        create_revision: revision(pointer.create_revision),
        mod_revision: revision(pointer.place.revision),
        version: pointer.version.cast_signed(),
        lease: pointer.lease,
    }
}

pub(crate) fn stamp(results: &mut [OpResult], at: Revision) {
    for result in results {
        if let OpResult::Range(answer) = result {
            answer.revision = at;
        }
    }
}

/// Maximum time for which a long read holds the same view of the table.
const MAX_VIEW_DURATION: Duration = Duration::from_millis(5);

/// Maximum number of consecutive short views that end before the end of the log, because writers append faster than the
/// reader reads. After the maximum number of short views, the reader holds one view until the end of the log, while
/// writers wait.
const MAX_CATCH_UP_VIEWS: usize = 8;

/// For how long a pinned read holds one view of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ViewHold {
    Slices,
    /// Used when compaction overtook a read several times: the read keeps a single view until it ends.
    ToTheEnd,
}

/// When a view was opened, and for how long it may be held.
#[derive(Clone, Copy)]
struct ViewSlice {
    opened: Instant,
    hold: ViewHold,
}

impl ViewSlice {
    fn begin(hold: ViewHold) -> Self {
        Self { opened: Instant::now(), hold }
    }

    fn is_over(self) -> bool {
        self.hold == ViewHold::Slices && self.opened.elapsed() >= MAX_VIEW_DURATION
    }
}

/// For a key that has changed since the pinned revision, the key's first log row after this revision contains the entry
/// as of the pinned revision. For each key that changed after the pinned revision, the reader takes the key's entry as
/// of the pinned revision from the log, in a series of views. A key that has not changed since the pinned revision
/// still has the rows that it had then.
pub(crate) struct PinnedReader<'t> {
    table: &'t dyn Table,
    store: &'static str,
    /// The view of the table that the reader currently holds. The map `then` undoes the changes that the current view
    /// shows but that were made after the pinned revision.
    rows: Option<Rows<'t>>,
    slice: ViewSlice,
    current: u64,
    at: u64,
    /// The first log position whose change the reader has not collected into `then` yet.
    seen: LogPosition,
    then: KeyOverlay,
    about: Range,
}

impl<'t> PinnedReader<'t> {
    /// Starts a read of the keys in `about` at revision `at`; an `at` below 1 means the latest revision. `floor` is a
    /// revision that the store is known to have reached.
    ///
    /// # Errors
    /// `FutureRevision` or `Compacted` if revision `at` is not readable; `RevisionRegressed` if the store's newest
    /// revision is below `floor`.
    pub(crate) fn open(
        table: &'t dyn Table,
        store: &'static str,
        at: Revision,
        about: Range,
        floor: u64,
        hold: ViewHold,
    ) -> Result<Self> {
        let rows = Rows::of(table, store)?;
        let slice = ViewSlice::begin(hold);
        let StateRow { revision, compacted: mark, .. } = rows.state()?;
        if revision < floor {
            return Err(Error::new(ErrorKind::RevisionRegressed, Operation::Range, store));
        }
        let at = if at.is_set() { at.get().unsigned_abs() } else { revision };
        if at > revision {
            return Err(Error::new(ErrorKind::FutureRevision, Operation::Range, store));
        }
        if at < mark {
            return Err(compacted(store, Operation::Range, mark));
        }
        let (seen, then) = (LogPosition::first_of(at + 1), KeyOverlay::new());
        let mut pinned = Self { table, store, rows: None, slice, current: revision, at, seen, then, about };
        if pinned.catch_up(&rows, revision)? {
            pinned.rows = Some(rows);
        }
        Ok(pinned)
    }

    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    pub(crate) fn current(&self) -> u64 {
        self.current
    }

    /// Returns a view that may be held for longer, and the overlay that undoes all changes between the pinned revision
    /// and this view.
    fn ready(&mut self) -> Result<(&Rows<'t>, &KeyOverlay, ViewSlice)> {
        let rows = match self.rows.take() {
            Some(rows) if !self.slice.is_over() => rows,
            old => {
                // The old view must be dropped first: a commit may wait for the old view, and opening the new view
                // would wait for that commit, which is a deadlock.
                drop(old);
                self.fresh()?
            }
        };
        Ok((self.rows.insert(rows), &self.then, self.slice))
    }

    /// Opens a new view of the table and collects all changes between the pinned revision and that view.
    fn fresh(&mut self) -> Result<Rows<'t>> {
        let (hold, mut attempts) = (self.slice.hold, 0);
        loop {
            let rows = Rows::of(self.table, self.store)?;
            self.slice = ViewSlice::begin(if attempts < MAX_CATCH_UP_VIEWS { hold } else { ViewHold::ToTheEnd });
            let StateRow { revision, compacted: mark, .. } = rows.state()?;
            if self.at < mark {
                return Err(compacted(self.store, Operation::Range, mark));
            }
            if self.catch_up(&rows, revision)? {
                self.slice.hold = hold;
                return Ok(rows);
            }
            attempts += 1;
        }
    }

    /// Collects the log's changes up to `revision` into `then`. Returns false if the view had to end before the end of
    /// the log was reached.
    fn catch_up(&mut self, rows: &Rows<'t>, revision: u64) -> Result<bool> {
        if self.seen.revision > revision {
            return Ok(true);
        }
        let (mut looked, mut complete) = (0, true);
        rows.log(self.seen, revision, &mut |place, row, _| {
            if self.about.contains(&row.key) {
                self.then.entry(Key::from(row.key)).or_insert(row.prev);
            }
            self.seen = place.next();
            looked += 1;
            if looked % ROWS_PER_TIME_CHECK == 0 && self.slice.is_over() {
                complete = false;
                return ControlFlow::Break(());
            }
            ControlFlow::Continue(())
        })?;
        if complete {
            self.seen = LogPosition::first_of(revision + 1);
        }
        Ok(complete)
    }
}

impl Entries for PinnedReader<'_> {
    fn entry(&mut self, key: &[u8]) -> Result<Option<Pointer>> {
        let (rows, then, _) = self.ready()?;
        then.get(key).map_or_else(|| rows.pointer(key), |then| Ok(*then))
    }

    fn each(&mut self, from: &[u8], to: Option<&[u8]>, visit: VisitEntry<'_>) -> Result<()> {
        let mut from = from.to_vec();
        loop {
            let (rows, then, slice) = self.ready()?;
            let mut merge = overlaid(then, &from, to);
            let (mut looked, mut stopped, mut resume) = (0, false, None);
            rows.pointers(&from, to, &mut |key, pointer| {
                looked += 1;
                if merge.before(Some(key), visit).is_break() {
                    stopped = true;
                } else if looked % ROWS_PER_TIME_CHECK == 0 && slice.is_over() {
                    resume = Some(key.to_vec());
                } else if let Some(pointer) = merge.instead_of(key).unwrap_or(Some(pointer)) {
                    stopped = visit(key, pointer).is_break();
                }
                if stopped || resume.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            })?;
            match resume {
                Some(key) => from = key,
                None if stopped => return Ok(()),
                None => {
                    // Only overlay entries are left and no scan follows, so a `Break` from `visit` is ignored.
                    let _ = merge.before(None, visit);
                    return Ok(());
                }
            }
        }
    }

    fn value(&mut self, pointer: &Pointer) -> Result<Value> {
        self.ready()?.0.value(pointer)
    }

    fn values(&mut self, pointers: &[Pointer]) -> Result<Vec<Value>> {
        let mut values = Vec::with_capacity(pointers.len());
        while values.len() < pointers.len() {
            let (rows, _, slice) = self.ready()?;
            next_values(rows, &pointers[values.len()..], &mut values, || slice.is_over())?;
        }
        Ok(values)
    }
}
