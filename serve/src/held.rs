//! A store that the daemon holds open, and that other processes get whenever they wait for it.
//!
//! Each call has a [`KeptOpen`]: while it lasts the store stays open. A hand-over waits until all are dropped, closes the store, lets the
//! processes that wait have it, and opens it again. Calls that come meanwhile wait for that. Watches go on after it, since a
//! revision is all that they have to remember. If another store is at the same place then, they end with an error.

use std::fmt;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use datastore::care::{self, Queued};
use datastore::{Create, Location, OpenStore, served};
use kv::{
    Error, ErrorKind, Operation, RangeRequest, RangeResponse, Result, Revision, Store, Txn, TxnResponse, WatchRequest,
    WatchStream,
};
use kv_mvcc::{MvccStore, Purpose, Retention};
use tokio::sync::{Notify, OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};
use tokio::time::{sleep, timeout_at};
use wire::{FileId, Identity};

use crate::metrics::Metrics;
use crate::watch_on::watch_on;

/// How long a process that has announced itself may take until it waits for the lock.
const ANNOUNCED: Duration = Duration::from_millis(20);
/// How often it is looked for.
const INTERVAL: Duration = Duration::from_millis(1);
/// How long the lock is waited for at once.
pub(crate) const WAIT: Duration = Duration::from_secs(60);

/// A store that is held. Clones are handles to the same one.
#[derive(Clone)]
pub struct Held {
    shared: Arc<Shared>,
    /// The purpose of the calls that this handle makes.
    purpose: Purpose,
}

struct Shared {
    location: Location,
    name: String,
    state: Arc<RwLock<State>>,
    /// The store that was there last.
    seen: Mutex<Seen>,
    metrics: Arc<Metrics>,
    /// The bounds that the store gets on its history; `None` leaves it those that it has.
    history: Option<Retention>,
    /// The store was opened.
    opened: Notify,
    /// The oldest revision that clients of etcd's API may read, as far as it is known.
    oldest_for_clients: AtomicI64,
}

#[derive(Default)]
struct State {
    open: Option<OpenStore>,
    /// The queue in front of the store.
    queued: Option<Queued>,
}

/// A store, and which one it is at this place.
#[derive(Clone)]
struct Seen {
    identity: Identity,
    /// The two halves of an embedded store's id.
    halves: (u64, u64),
    /// It grows when another store takes its place.
    generation: u64,
}

/// The store, which stays open as long as this is there.
///
/// A caller with one must not ask for another one before it drops the first: a hand-over may wait in between.
pub struct KeptOpen {
    state: OwnedRwLockReadGuard<State>,
    /// Which store it is, of those that were at this place.
    pub generation: u64,
}

impl KeptOpen {
    /// The store for writes of this purpose, whatever it was opened for.
    ///
    /// # Errors
    /// `Closed`.
    pub fn store(&self, purpose: Purpose) -> Result<Arc<dyn Store>> {
        let open = self.open()?;
        Ok(match open.embedded() {
            Some(store) => Arc::new(store.with_purpose(purpose)),
            None => open.store(),
        })
    }

    /// The open store.
    pub fn open(&self) -> Result<&OpenStore> {
        // It is made with an open store only.
        self.state.open.as_ref().ok_or_else(|| Error::new(ErrorKind::Closed, Operation::Open, "store"))
    }
}

/// The embedded store, kept open.
pub(crate) struct Embedded {
    pub(crate) store: MvccStore,
    kept: KeptOpen,
}

impl Embedded {
    /// Which store it is, of those that were at this place.
    pub(crate) fn generation(&self) -> u64 {
        self.kept.generation
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held").field("store", &self.shared.name).finish_non_exhaustive()
    }
}

impl fmt::Debug for KeptOpen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turn").field("generation", &self.generation).finish_non_exhaustive()
    }
}

impl Held {
    /// A handle to the store at this location, which the first call opens. The metrics follow the lock. A store of format 2 gets
    /// these bounds on its history, if there are any.
    pub fn new(location: Location, history: Option<Retention>, metrics: Arc<Metrics>) -> Self {
        let name = location.to_string();
        let seen = Mutex::new(Seen { identity: Identity::Nothing, halves: (0, 0), generation: 0 });
        Self {
            shared: Arc::new(Shared {
                location,
                name,
                state: Arc::default(),
                seen,
                metrics,
                history,
                opened: Notify::new(),
                oldest_for_clients: AtomicI64::new(0),
            }),
            purpose: Purpose::Any,
        }
    }

    /// A handle whose transactions only release, which they still can when the disk is full.
    #[must_use]
    pub(crate) fn to_release(&self) -> Self {
        Self { purpose: Purpose::Release, ..self.clone() }
    }

    /// Where the store is.
    pub fn location(&self) -> &Location {
        &self.shared.location
    }

    /// The store that was there last, and its generation. If none is open, and none is being handed over, this looks again.
    pub async fn identity(&self) -> (Identity, u64) {
        if self.seen().identity == Identity::Nothing || self.is_given_up() {
            match self.keep_open(Instant::now() + Duration::from_millis(500)).await {
                Ok(kept) => drop(kept),
                Err(error) if *error.kind() == ErrorKind::Missing => {
                    tracing::debug!(%error, "there is no store to serve yet");
                }
                Err(error) => tracing::warn!(%error, "the store is not open; the next call looks again"),
            }
        }
        let Seen { identity, generation, .. } = self.seen();
        (identity, generation)
    }

    /// True if the store could not be opened again, as after it was moved away: what was seen last says nothing then.
    fn is_given_up(&self) -> bool {
        self.shared.state.try_read().is_ok_and(|state| state.open.is_none())
    }

    /// Which store it is now, of those that were at this place.
    pub fn generation(&self) -> u64 {
        self.place().1
    }

    /// The two halves of the id of the embedded store that was there last, and its generation.
    pub(crate) fn place(&self) -> ((u64, u64), u64) {
        let seen = self.shared.seen.lock().unwrap_or_else(PoisonError::into_inner);
        (seen.halves, seen.generation)
    }

    fn seen(&self) -> Seen {
        self.shared.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn error(&self, kind: ErrorKind, operation: Operation) -> Error {
        Error::new(kind, operation, self.shared.name.clone())
    }

    /// Waits until the store is open, and keeps it so.
    ///
    /// # Errors
    /// Those of opening it; `Locked` if others have it until then.
    pub async fn keep_open(&self, until: Instant) -> Result<KeptOpen> {
        let wait = async {
            let state = Arc::clone(&self.shared.state).read_owned().await;
            if state.open.is_some() {
                return Ok::<_, Error>(state);
            }
            drop(state);
            let mut state = Arc::clone(&self.shared.state).write_owned().await;
            if state.open.is_none() {
                // Opening is rare, and its future is large: every call and every watch would have the room for it.
                Box::pin(self.reopen(&mut state, until.saturating_duration_since(Instant::now()))).await?;
            }
            Ok(state.downgrade())
        };
        match timeout_at(until.into(), wait).await {
            Ok(state) => Ok(KeptOpen { state: state?, generation: self.generation() }),
            Err(_) => Err(self.error(ErrorKind::Locked, Operation::Open)),
        }
    }

    /// Opens the store and looks which one it is.
    async fn reopen(&self, state: &mut OwnedRwLockWriteGuard<State>, wait: Duration) -> Result<()> {
        let location = &self.shared.location;
        let open = match datastore::open(location, Create::Never, wait).await {
            // There may be room for releases. Other writes are refused until what was kept for these is there again.
            Err(error) if *error.kind() == ErrorKind::NoSpace => datastore::open_to_release(location, wait).await?,
            opened => opened?,
        };
        let identity = match (open.embedded(), self.shared.location.path()) {
            (Some(store), Some(folder)) => {
                let queue = FileId::at(&folder.join("queue"));
                let queue = queue.ok_or_else(|| self.error(ErrorKind::Missing, Operation::Open))?;
                Identity::Embedded { id: store.id().to_string(), queue }
            }
            _ => served::cluster(&self.shared.location).unwrap_or(Identity::Nothing),
        };
        if let (Some(store), Some(history)) = (open.embedded(), self.shared.history)
            && store.has_leases()
            && store.retention() != history
            && let Err(error) = store.set_retention(history).await
        {
            tracing::warn!(%error, "the store keeps the bounds that it had on its history");
        }
        let mut seen = self.shared.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.identity != identity {
            if seen.identity != Identity::Nothing {
                tracing::warn!(store = self.shared.name, "another store is at this place now");
            }
            let halves = open.embedded().map(|store| store.id().as_u64_pair()).unwrap_or_default();
            *seen = Seen { identity, halves, generation: seen.generation + 1 };
        }
        if let Some(store) = open.embedded() {
            let metrics = Arc::clone(&self.shared.metrics);
            store.observe_commits(move |took| metrics.observe_sync(took));
            self.shared.metrics.lock_taken();
        }
        state.queued = care::queued(&self.shared.location).ok();
        state.open = Some(open);
        self.shared.opened.notify_one();
        Ok(())
    }

    /// Waits until the store is open. For one task alone.
    pub async fn until_open(&self) {
        // The lock of the state is waited for: the store is being opened at this call.
        while self.shared.state.read().await.open.is_none() {
            self.shared.opened.notified().await;
        }
    }

    /// True if a process waits for the lock, or another folder is where the store was opened.
    pub fn is_wanted(&self) -> bool {
        let Some(folder) = self.shared.location.path() else { return false };
        let Ok(state) = self.shared.state.try_read() else { return false };
        if state.open.is_none() {
            return false;
        }
        let is_moved = match self.seen().identity {
            Identity::Embedded { queue, .. } => FileId::at(&folder.join("queue")) != Some(queue),
            _ => false,
        };
        // The daemon has the first ticket.
        is_moved || state.queued.as_ref().is_some_and(|queued| queued.count() > 1)
    }

    /// Lets the processes that wait for the lock have the store, and takes it back. A process that has announced itself is
    /// waited for, at most 20 ms.
    pub async fn hand_over(&self, announced: Announced) {
        self.to_the_end(move |held| async move { held.hand_over_at_once(announced).await }).await;
    }

    async fn hand_over_at_once(&self, announced: Announced) {
        let mut state = Arc::clone(&self.shared.state).write_owned().await;
        let Some(open) = state.open.take() else { return };
        self.shared.metrics.lock_handed_over();
        if let Err(error) = open.close().await {
            tracing::warn!(%error, "the store could not be closed cleanly");
        }
        if announced == Announced::Yes {
            let end = Instant::now() + ANNOUNCED;
            while Instant::now() < end && state.queued.as_ref().is_some_and(|queued| queued.count() == 0) {
                sleep(INTERVAL).await;
            }
        }
        // The lock goes to the processes that wait now before it comes back.
        if let Err(error) = self.reopen(&mut state, WAIT).await {
            tracing::warn!(%error, "the store is not open; the next call looks again");
        }
    }

    /// The store as an embedded one, which stays open as long as this is there.
    ///
    /// # Errors
    /// Those of opening it; `Unsupported` for any other store.
    pub(crate) async fn embedded(&self) -> Result<Embedded> {
        let kept = self.keep_open(Instant::now() + WAIT).await?;
        let store = kept.open()?.embedded().cloned();
        let store = store.ok_or_else(|| self.error(ErrorKind::Unsupported, Operation::Open))?;
        Ok(Embedded { store, kept })
    }

    /// False for a store whose format has no bounds on its history; true also if there is no store yet.
    pub(crate) async fn has_bounds_of_its_own(&self) -> bool {
        match self.embedded().await {
            Ok(embedded) => embedded.store.has_leases(),
            Err(error) => *error.kind() != ErrorKind::Unsupported,
        }
    }

    /// The oldest revision that clients of etcd's API may read. While another process has the store, as it was before.
    pub(crate) fn oldest_for_clients(&self) -> Revision {
        let state = self.shared.state.try_read().ok();
        let store = state.as_ref().and_then(|state| state.open.as_ref()).and_then(OpenStore::embedded);
        let kept = &self.shared.oldest_for_clients;
        if let Some(store) = store {
            kept.store(store.status().oldest_for_clients.get(), Ordering::Relaxed);
        }
        Revision::new(kept.load(Ordering::Relaxed))
    }

    /// Checks that there is room for writes of all purposes.
    ///
    /// # Errors
    /// `NoSpace`; those of opening the store.
    pub(crate) async fn check_room(&self) -> Result<()> {
        self.keep_open(Instant::now() + WAIT).await?.open()?.check_room().await
    }

    /// Closes the store, has its engine give up the room that the files do not need, and opens it again.
    ///
    /// # Errors
    /// Those of the engine.
    pub(crate) async fn defragment(&self) -> Result<()> {
        let defragmented = self.to_the_end(|held| async move { held.defragment_at_once().await }).await;
        defragmented.unwrap_or_else(|| Err(self.error(ErrorKind::Closed, Operation::Open)))
    }

    /// Does something that closes the store, also if the caller goes away in the middle: a store that is half closed would keep its
    /// lock for as long as a watch has it. `None` if it panicked, or the runtime ends.
    async fn to_the_end<T: Send + 'static, F: Future<Output = T> + Send + 'static>(
        &self,
        work: impl FnOnce(Self) -> F,
    ) -> Option<T> {
        tokio::spawn(work(self.clone())).await.ok()
    }

    async fn defragment_at_once(&self) -> Result<()> {
        let mut state = Arc::clone(&self.shared.state).write_owned().await;
        if let Some(open) = state.open.take() {
            self.shared.metrics.lock_handed_over();
            if let Err(error) = open.close().await {
                tracing::warn!(%error, "the store could not be closed cleanly");
            }
        }
        let shrunk = care::shrink(&self.shared.location, WAIT).await;
        if let Err(error) = self.reopen(&mut state, WAIT).await {
            tracing::warn!(%error, "the store is not open; the next call looks again");
        }
        shrunk.map(drop)
    }

    /// Watches the store of a generation.
    ///
    /// # Errors
    /// Those of a watch; `RevisionRegressed` if another store has taken its place.
    pub async fn watch_of(&self, generation: u64, request: WatchRequest) -> Result<WatchStream> {
        let kept = self.keep_open(Instant::now() + WAIT).await?;
        if kept.generation != generation {
            return Err(self.replaced(Operation::Watch));
        }
        watch_on(self.clone(), kept, request).await
    }

    /// The error for a client that means a store whose place another one has taken.
    pub(crate) fn replaced(&self, operation: Operation) -> Error {
        self.error(ErrorKind::RevisionRegressed, operation).with_detail("another store took its place; begin anew")
    }

    /// Closes the store for good, once all that keep it open have ended.
    pub async fn close(&self) {
        let open = self.shared.state.write().await.open.take();
        self.shared.metrics.lock_released();
        if let Some(open) = open
            && let Err(error) = open.close().await
        {
            tracing::warn!(%error, "the store could not be closed cleanly");
        }
    }
}

/// Whether a process has said that it is about to wait for the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Announced {
    /// It has.
    Yes,
    /// It waits already.
    No,
}

/// A call of the store keeps it open, and waits for that as long as for the lock.
#[async_trait]
impl Store for Held {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        self.keep_open(Instant::now() + WAIT).await?.store(Purpose::Any)?.range(request).await
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        self.keep_open(Instant::now() + WAIT).await?.store(self.purpose)?.txn(txn).await
    }

    async fn watch(&self, request: WatchRequest) -> Result<WatchStream> {
        let kept = self.keep_open(Instant::now() + WAIT).await?;
        watch_on(self.clone(), kept, request).await
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        self.keep_open(Instant::now() + WAIT).await?.store(Purpose::Any)?.compact(revision).await
    }
}
