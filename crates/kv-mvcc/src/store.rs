//! Implements the handle of a store, the state that all handles share, paged reads of a whole revision, and information
//! about the history.
//!
//! A range request also counts the keys beyond its limit, so reading a store in pages with range requests would visit
//! all remaining keys for every page. [`SnapshotPage`] is for callers that read a whole store in pages of limited size.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::ControlFlow;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use kv::{
    ErrorKind, Key, Kv, Op, OpResult, Operation, Outcome, Purpose, Range, RangeRequest, RangeResponse, Result,
    Revision, Store, Txn, TxnRange, TxnResponse, WatchRequest, WatchStream,
};
use tokio::sync::RwLock;
use uuid::Uuid;

use crate::codec::{self, LogPosition, StateRow, StoredRetention};
use crate::error::{closed, corrupt, guarded, revision};
use crate::open::{OpenFacts, Verification, open_table, verify};
use crate::options::{Blocking, Clock, Options, Retention, SpaceReserve, micros, time};
use crate::read::{Entries, PinnedReader, ViewHold, all_hold, read, stamp, with_values};
use crate::rows::Rows;
use crate::table::{Table, Write};
use crate::watch::{WatchIndex, watch as watch_log};
use crate::writer::{JobQueue, WriteJob};

/// Maximum number of attempts to read at the latest revision when compaction overtakes the read. The last attempt to
/// read reads everything in one view, so commits wait until the read ends.
const MAX_READ_ATTEMPTS: usize = 4;

/// A store with history and watches, whose rows are in an ordered table. Clones of a store are handles to the same
/// store. An open watch keeps the table open until the watch is dropped or the store is closed.
///
/// A store needs a tokio runtime, of either flavor. [`Options::blocking`] decides which threads do the work on the
/// table.
#[derive(Clone)]
pub struct MvccStore {
    inner: Arc<StoreCore>,
    purpose: Purpose,
}

type SyncObserver = Box<dyn Fn(Duration) + Send + Sync>;

/// The state that the handles, the watches and the writer of one store share.
pub(crate) struct StoreCore {
    pub(crate) name: &'static str,
    pub(crate) id: Uuid,
    pub(crate) format: u32,
    /// The limits on the history: those stored in the table, if any, or else those from the options.
    retention: Mutex<Retention>,
    pub(crate) clock: Clock,
    pub(crate) blocking: Blocking,
    /// The table of the store; `None` once the store is closed. Every call that accesses the table holds the table's
    /// read lock.
    pub(crate) table: Arc<RwLock<Option<Box<dyn Table>>>>,
    published: Mutex<DurableState>,
    pub(crate) watch_index: Arc<WatchIndex>,
    pub(crate) queue: Mutex<JobQueue>,
    /// True while the outcome of a commit is unknown; only the writer reads and sets this flag.
    pub(crate) poisoned: AtomicBool,
    pub(crate) reserve: Option<Arc<dyn SpaceReserve>>,
    /// The callback that gets the duration of each commit.
    pub(crate) observer: OnceLock<SyncObserver>,
    /// True while a part of the reserved disk space may be missing; only handles for releases may then write.
    pub(crate) spent: AtomicBool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct DurableState {
    pub(crate) state: StateRow,
    pub(crate) closed: bool,
}

/// The current revision, history and size of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreStatus {
    /// The newest revision of the store.
    pub revision: Revision,
    /// The compaction mark: the oldest readable revision; unset if all revisions are readable.
    pub compacted: Revision,
    /// The oldest revision that clients of etcd's API may read; unset if clients may read all revisions.
    pub oldest_for_clients: Revision,
    /// The time of the newest commit; `None` before the first write.
    pub time: Option<SystemTime>,
    /// The total size in bytes of the log and of the superseded values.
    pub log_bytes: u64,
    /// The number of live keys in the store.
    pub live: u64,
    /// The number of the store's row format.
    pub format: u32,
}

impl MvccStore {
    /// Opens the store in a table, or creates a store if the table has no rows. Opening a store blocks the calling
    /// thread.
    ///
    /// # Errors
    /// `UnknownFormat` if a newer version of the program wrote the store; `Corrupt` if rows are missing or damaged, or
    /// if the store's id is not [`Options::expected_id`]; any error of the table. The table is unchanged after
    /// `UnknownFormat` or `Corrupt`.
    pub fn open(table: Box<dyn Table>, options: Options) -> Result<Self> {
        let Options { name, retention, clock, blocking, expected_id, inspection, purpose, reserve, format } = options;
        let opened = guarded(name, Operation::Open, || open_table(&*table, name, expected_id, inspection, format));
        let OpenFacts { id, format, state, retention: own } = opened?;
        let table = Arc::new(RwLock::new(Some(table)));
        let is_spent = |reserve: &Arc<dyn SpaceReserve>| purpose == Purpose::Release || reserve.restore().is_err();
        let spent = reserve.as_ref().is_some_and(is_spent);
        let inner = Arc::new(StoreCore {
            name,
            id,
            format,
            retention: Mutex::new(own.unwrap_or(retention)),
            clock,
            blocking,
            table,
            published: Mutex::new(DurableState { state, closed: false }),
            watch_index: WatchIndex::at(state.revision),
            queue: Mutex::default(),
            poisoned: AtomicBool::new(false),
            reserve,
            observer: OnceLock::new(),
            spent: AtomicBool::new(spent),
        });
        Ok(Self { inner, purpose })
    }

    /// Creates another handle to this store, for writes of the given purpose.
    #[must_use]
    pub fn with_purpose(&self, purpose: Purpose) -> Self {
        Self { inner: Arc::clone(&self.inner), purpose }
    }

    /// Calls `observer` after each successful commit with the duration of the commit, from the first write until the
    /// commit was durable. Only the first observer of a store is used; `observe_commits` ignores all others.
    pub fn observe_commits(&self, observer: impl Fn(Duration) + Send + Sync + 'static) {
        let _ = self.inner.observer.set(Box::new(observer));
    }

    pub(crate) fn inner(&self) -> &Arc<StoreCore> {
        &self.inner
    }

    /// The id of the store, which was assigned when the store was created.
    pub fn id(&self) -> Uuid {
        self.inner.id
    }

    /// Returns the current revision, history and size of the store.
    pub fn status(&self) -> StoreStatus {
        let state = self.inner.published().state;
        StoreStatus {
            revision: revision(state.revision),
            compacted: revision(state.compacted),
            oldest_for_clients: revision(state.oldest_for_clients()),
            time: time(state.time).filter(|_| state.time > 0),
            log_bytes: state.log_bytes,
            live: state.live,
            format: self.inner.format,
        }
    }

    /// Reads every row of the store, a few at a time, and checks that the rows are intact and consistent with each
    /// other.
    ///
    /// # Errors
    /// `Corrupt` with a description of the damage; any error of the table.
    pub async fn verify(&self) -> Result<Verification> {
        self.inner.blocking(Operation::Range, |inner, table| verify(table, inner.name)).await
    }

    /// Checks that the disk is writable and has space for a usual commit. The disk check may fail although a commit
    /// would succeed because the engine's files have free space inside.
    ///
    /// # Errors
    /// `NoSpace` if the disk is full; `Io` for a read-only file system.
    pub async fn check_room(&self) -> Result<()> {
        self.inner.blocking(Operation::Txn, |inner, _| inner.check_room()).await
    }

    /// Closes the store for all its handles: waits for running calls, then drops the table. From the start of `close`
    /// on, every other call and every watch fails with `Closed`. Closing a closed store does nothing.
    ///
    /// If `close` is never called, the thread that drops the last handle of the store closes the table.
    ///
    /// # Errors
    /// `Corrupt` if the engine panicked while its table was closed.
    pub async fn close(&self) -> Result<()> {
        let name = self.inner.name;
        self.inner.published().closed = true;
        self.inner.watch_index.close();
        let table = Arc::clone(&self.inner.table).write_owned().await.take();
        let closing = self.inner.blocking.run(move || {
            guarded(name, Operation::Close, move || {
                drop(table);
                Ok(())
            })
        });
        // If the runtime shuts down before the closing task has run, it drops the task, and with it the table.
        closing.await.unwrap_or(Ok(()))
    }
}

impl fmt::Debug for MvccStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MvccStore").field("name", &self.inner.name).field("id", &self.inner.id).finish_non_exhaustive()
    }
}

impl StoreCore {
    pub(crate) fn published(&self) -> MutexGuard<'_, DurableState> {
        self.published.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn retention(&self) -> Retention {
        *self.retention.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn apply_retention(&self, retention: Retention) {
        *self.retention.lock().unwrap_or_else(PoisonError::into_inner) = retention;
    }

    pub(crate) fn check_open(&self, operation: Operation) -> Result<()> {
        if self.published().closed { Err(closed(self.name, operation)) } else { Ok(()) }
    }

    /// Runs the closure `work` with the table, on the threads that [`Options::blocking`] selects.
    ///
    /// # Errors
    /// Any error of `work`; `Closed` if the store was closed; `Corrupt` if the engine panicked.
    pub(crate) async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        operation: Operation,
        work: impl FnOnce(&Self, &dyn Table) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.check_open(operation)?;
        let table = Arc::clone(&self.table).read_owned().await;
        let inner = Arc::clone(self);
        let task = self.blocking.run(move || match table.as_deref() {
            Some(table) => guarded(inner.name, operation, || work(&inner, table)),
            None => Err(closed(inner.name, operation)),
        });
        // The blocking task catches panics, so an error means that the runtime shut down before the task ran.
        task.await.unwrap_or_else(|_| Err(closed(self.name, operation)))
    }

    /// Runs the closure `work` on a reader that is pinned to one revision of the store. A read of the latest revision
    /// starts again if compaction overtakes it.
    ///
    /// # Errors
    /// Any error of [`PinnedReader::open`] or of the closure `work`.
    pub(crate) fn pinned<T>(
        &self,
        table: &dyn Table,
        at: Revision,
        about: &Range,
        mut work: impl FnMut(&mut PinnedReader<'_>) -> Result<T>,
    ) -> Result<T> {
        let open = |hold| {
            let floor = self.published().state.revision;
            PinnedReader::open(table, self.name, at, about.clone(), floor, hold)
        };
        for _ in 1..MAX_READ_ATTEMPTS {
            match open(ViewHold::Slices).and_then(|mut pinned| work(&mut pinned)) {
                Err(error) if !at.is_set() && matches!(error.kind(), ErrorKind::Compacted { .. }) => {}
                result => return result,
            }
        }
        work(&mut open(ViewHold::ToTheEnd)?)
    }

    fn range(&self, table: &dyn Table, request: RangeRequest) -> Result<RangeResponse> {
        let RangeRequest { range, at, limit, content, .. } = request;
        let request = TxnRange::new(range).with_limit(limit).with_content(content);
        self.pinned(table, at, &request.range, |pinned| {
            let answer = read(pinned, &request)?;
            Ok(RangeResponse { revision: revision(pinned.current()), ..answer })
        })
    }

    fn read_only_txn(&self, table: &dyn Table, txn: &Txn) -> Result<TxnResponse> {
        self.pinned(table, Revision::UNSET, &Range::All, |pinned| {
            let succeeded = all_hold(pinned, &txn.compares)?;
            let mut results = Vec::new();
            for op in if succeeded { &txn.success } else { &txn.failure } {
                if let Op::Range(request) = op {
                    results.push(OpResult::Range(read(pinned, request)?));
                }
            }
            let revision = revision(pinned.current());
            stamp(&mut results, revision);
            Ok(TxnResponse { revision, succeeded, results })
        })
    }
}

#[async_trait]
impl Store for MvccStore {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        request.check(self.inner.name)?;
        self.inner.blocking(Operation::Range, |inner, table| inner.range(table, request)).await
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        txn.check(self.inner.name)?;
        if txn.is_read_only() {
            return self.inner.blocking(Operation::Txn, move |inner, table| inner.read_only_txn(table, &txn)).await;
        }
        self.inner.write(txn, self.purpose).await
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        request.check(self.inner.name)?;
        self.inner.check_open(Operation::Watch)?;
        Ok(watch_log(Arc::clone(&self.inner), request))
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        revision.check(self.inner.name)?;
        let revision = revision.get().unsigned_abs();
        self.inner.submit(Operation::Compact, |reply| WriteJob::Compact { revision, reply }).await
    }
}

const MAX_PAGE_KEYS: usize = 4096;

/// A page of the keys and values of a store at one revision.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SnapshotPage {
    /// The revision at which the page was read.
    pub at: Revision,
    /// The keys and values of the page, in ascending order of the keys.
    pub kvs: Vec<Kv>,
    /// The first key of the next page; `None` on the last page.
    pub next: Option<Key>,
}

impl MvccStore {
    /// Reads keys from `from` on, until the page has at least `bytes` bytes of keys and values or the maximum number of
    /// keys. The page shows revision `at`, or the latest revision if `at` is below 1.
    ///
    /// # Errors
    /// `Compacted` or `FutureRevision` if the revision `at` is not readable; any error of the table.
    pub async fn page(&self, from: Key, at: Revision, bytes: usize) -> Result<SnapshotPage> {
        self.inner()
            .blocking(Operation::Range, move |inner, table| {
                inner.pinned(table, at, &Range::From(from.clone()), |pinned| {
                    let (mut found, mut size, mut next) = (Vec::new(), 0, None);
                    pinned.each(from.as_bytes(), None, &mut |key, pointer| {
                        if size >= bytes || found.len() >= MAX_PAGE_KEYS {
                            next = Some(Key::from(key));
                            return ControlFlow::Break(());
                        }
                        size += key.len() + pointer.len as usize;
                        found.push((Key::from(key), pointer));
                        ControlFlow::Continue(())
                    })?;
                    let kvs = with_values(pinned, found)?;
                    Ok(SnapshotPage { at: revision(pinned.at()), kvs, next })
                })
            })
            .await
    }
}

/// Maximum number of key groups that [`MvccStore::history_shares`] reports separately.
const MAX_HISTORY_SHARES: usize = 1024;

/// The oldest readable revision and the time of its commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OldestRevision {
    /// The number of the oldest readable revision.
    pub revision: Revision,
    /// The time when the oldest readable revision was committed; `None` for revision 1, the empty store.
    pub time: Option<SystemTime>,
}

/// The part of the history that consists of changes to one group of keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HistoryShare {
    /// The number of changes to the keys of the group.
    pub changes: u64,
    /// The size in bytes of the log rows of the group's changes, and of the values that the changes superseded.
    pub bytes: u64,
}

impl MvccStore {
    /// Returns the oldest readable revision and the time of its commit.
    ///
    /// # Errors
    /// `Corrupt` if a row is damaged; any error of the table.
    pub async fn oldest(&self) -> Result<OldestRevision> {
        self.inner()
            .blocking(Operation::Range, |inner, table| {
                let rows = Rows::of(table, inner.name)?;
                let state = rows.state()?;
                let oldest = state.compacted.max(1);
                let mut written = None;
                rows.log(LogPosition::first_of(oldest), state.revision, &mut |place, row, _| {
                    written = (place.revision == oldest).then_some(row.time);
                    ControlFlow::Break(())
                })?;
                Ok(OldestRevision { revision: revision(oldest), time: written.and_then(time) })
            })
            .await
    }

    /// Computes how much of the history each group of keys has caused. The callback `group` returns the name of a key's
    /// group. Keys of groups beyond the first 1,024 are counted in the group with the empty name.
    ///
    /// # Errors
    /// `Corrupt` if a row is damaged; any error of the table.
    pub async fn history_shares(
        &self,
        group: impl Fn(&[u8]) -> Vec<u8> + Send + 'static,
    ) -> Result<BTreeMap<Vec<u8>, HistoryShare>> {
        self.inner()
            .blocking(Operation::Range, move |inner, table| {
                let rows = Rows::of(table, inner.name)?;
                let state = rows.state()?;
                let mut shares = BTreeMap::<_, HistoryShare>::new();
                rows.log(state.swept, state.revision, &mut |_, row, cost| {
                    let mut name = group(&row.key);
                    if shares.len() >= MAX_HISTORY_SHARES && !shares.contains_key(&name) {
                        name = Vec::new();
                    }
                    let share = shares.entry(name).or_default();
                    share.changes += 1;
                    share.bytes += cost;
                    ControlFlow::Continue(())
                })?;
                Ok(shares)
            })
            .await
    }

    /// The limits on the history that are in force for this store.
    pub fn retention(&self) -> Retention {
        self.inner().retention()
    }

    /// Stores limits on the history in the store itself. The stored limits override
    /// [`Options::retention`](crate::Options::retention) in every program that opens the store.
    ///
    /// # Errors
    /// `Unsupported` if the store's format is too old for stored limits; any error of a commit.
    pub async fn set_retention(&self, retention: Retention) -> Result<()> {
        self.check_format_for("bounds of its own")?;
        self.inner().change(Operation::Txn, move |inner, table| inner.set_retention(table, retention)).await
    }
}

impl StoreCore {
    fn set_retention(&self, table: &dyn Table, retention: Retention) -> Result<()> {
        self.ensure_writable(table, Operation::Txn, Purpose::Any)?;
        let staged = guarded(self.name, Operation::Txn, || {
            let row = codec::encode(codec::RETENTION_KEY, &StoredRetention::from(retention))
                .map_err(|damage| corrupt(self.name, Operation::Txn, damage.0))?;
            Ok((Rows::of(table, self.name)?.state()?, row))
        });
        let (old, row) = staged.map_err(|error| error.with_outcome(Outcome::NotApplied))?;
        let new = StateRow { other_changes: old.other_changes + 1, ..old };
        self.commit(table, Purpose::Any, vec![Write::Put(codec::RETENTION_KEY.to_vec(), row)], &old, new)?;
        self.apply_retention(retention);
        Ok(())
    }
}

impl From<Retention> for StoredRetention {
    fn from(Retention { revisions, age, bytes, min_age }: Retention) -> Self {
        Self { revisions, age: age.map(micros), bytes, min_age: min_age.map(micros) }
    }
}

impl From<StoredRetention> for Retention {
    fn from(StoredRetention { revisions, age, bytes, min_age }: StoredRetention) -> Self {
        let duration = Duration::from_micros;
        Self { revisions, age: age.map(duration), bytes, min_age: min_age.map(duration) }
    }
}

#[cfg(test)]
mod tests {
    use kv::{ErrorKind, Store, StoreExt};

    use super::*;
    use crate::memory;

    async fn all(store: &MvccStore, at: Revision, bytes: usize) -> Result<(Vec<Kv>, usize)> {
        let (mut from, mut kvs, mut pages) = (Some(Key::from("")), Vec::new(), 0);
        while let Some(key) = from {
            let page = store.page(key, at, bytes).await?;
            assert_eq!(page.at, at);
            kvs.extend(page.kvs);
            (from, pages) = (page.next, pages + 1);
        }
        Ok((kvs, pages))
    }

    #[tokio::test]
    async fn parts_add_up_to_whole_revision() {
        let store = memory();
        for number in 0..100 {
            store.put(format!("k{number:03}"), vec![7; number]).await.unwrap();
        }
        let at = store.range(RangeRequest::new(Range::All)).await.unwrap().revision;
        let then = store.list_at(Range::All, at, kv::Content::Full).await.unwrap().kvs;
        for (bytes, pages) in [(1, 100), (1000, 6), (usize::MAX, 1)] {
            assert_eq!(all(&store, at, bytes).await.unwrap(), (then.clone(), pages));
            // All pages of a snapshot are read at the first page's revision, so no page may show later changes.
            store.put("k050", "other").await.unwrap();
            store.delete(Range::key("k099")).await.unwrap();
            store.put(format!("k0{bytes}x"), "new").await.unwrap();
        }
        assert_eq!(store.page("k".into(), Revision::UNSET, 1).await.unwrap().kvs.len(), 1);
        store.compact(at.next()).await.unwrap();
        assert!(matches!(all(&store, at, 1).await.unwrap_err().kind(), ErrorKind::Compacted { .. }));
    }
}
