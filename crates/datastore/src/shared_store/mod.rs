//! A store that a process holds open, and lends to other processes: the daemon whenever they wait for it, a reader of much between
//! two of its calls, and the main plugin while another program has its turn.
//!
//! Each call has a [`OpenGuard`]: while it lasts the store stays open. A hand-over waits until all are dropped, closes the store, lets the
//! processes that wait have it, and opens it again. Calls that come meanwhile wait for that. Watches go on after it, since a
//! revision is all that they have to remember. If another store is at the same place then, they end with an error.
//!
//! The owner of a future may stop polling it: a stream whose client does not read, a `select!` in the arm of another future. So
//! no future that is given away may have a `OpenGuard` across an `await`, or wait for a lock that a hand-over needs: what keeps
//! the store open runs in a task of its own.

mod calls;
mod gate;

use std::fmt;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use driver::{Location, OpenOptions, Opened};
use kv::{Error, ErrorKind, Operation, Purpose, Result, Revision, Store};
use kv_mvcc::Retention;
use tokio::time::{sleep, timeout_at};
use wire::{FileId, StoreIdentity};

use self::gate::{GateStatus, HandOverTurn, StoreGate, StoreUse};
use crate::maintenance::{self, QueueFile, open_here};
use crate::served;

/// How long a process that has announced itself may take until it waits for the lock.
const YIELD_GRACE: Duration = Duration::from_millis(20);
/// How long the search for the process may take that has the store.
const HOLDER_SEARCH_TIMEOUT: Duration = Duration::from_millis(500);
/// How often it is looked for.
const HOLDER_SEARCH_INTERVAL: Duration = Duration::from_millis(1);
/// A store that is held. Clones are handles to the same one.
#[derive(Clone)]
pub struct SharedStore {
    shared: Arc<SharedInner>,
    /// The purpose of the calls that this handle makes.
    purpose: Purpose,
    /// The store that this handle means, of those that were at this place; `None` for whichever is there.
    pinned: Option<u64>,
}

struct SharedInner {
    location: Location,
    name: String,
    gate: Arc<StoreGate>,
    /// The store that was there last.
    seen: Mutex<CurrentStore>,
    holding: SharedStoreOptions,
    /// The oldest revision that clients of etcd's API may read, as far as it is known.
    oldest_for_clients: AtomicI64,
}

/// A store, and which one it is at this place.
#[derive(Clone)]
struct CurrentStore {
    identity: StoreIdentity,
    /// The two halves of an embedded store's id.
    halves: (u64, u64),
    /// It grows when another store takes its place.
    generation: u64,
    /// The queue in front of the store.
    queued: Option<Arc<QueueFile>>,
}

/// The store, which stays open as long as this is there.
///
/// A caller with one must not ask for another one before it drops the first: a hand-over may wait in between. It must be a task
/// that goes on to the end by itself.
pub struct OpenGuard {
    used: StoreUse,
    /// Which store it is, of those that were at this place.
    pub generation: u64,
}

impl OpenGuard {
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
    pub fn open(&self) -> Result<&dyn Opened> {
        // It is made with an open store only.
        self.used.store().ok_or_else(|| Error::new(ErrorKind::Closed, Operation::Open, "store"))
    }
}

impl fmt::Debug for SharedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held").field("store", &self.shared.name).finish_non_exhaustive()
    }
}

impl fmt::Debug for OpenGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turn").field("generation", &self.generation).finish_non_exhaustive()
    }
}

impl SharedStore {
    /// A handle to the store at this location, which the first call opens.
    pub fn new(location: Location, holding: SharedStoreOptions) -> Self {
        let (name, purpose) = (location.to_string(), holding.options.purpose);
        let seen =
            Mutex::new(CurrentStore { identity: StoreIdentity::Nothing, halves: (0, 0), generation: 0, queued: None });
        Self {
            shared: Arc::new(SharedInner {
                location,
                name,
                gate: StoreGate::new(),
                seen,
                holding,
                oldest_for_clients: AtomicI64::new(0),
            }),
            purpose,
            pinned: None,
        }
    }

    /// A handle to the store that is at this location now. Its calls fail with `RevisionRegressed` if another store takes its place.
    ///
    /// # Errors
    /// Those of opening it; `Locked` if other processes have the store for all of `wait`.
    pub(crate) async fn begin(location: Location, holding: SharedStoreOptions, wait: Duration) -> Result<Self> {
        let shared_store = Self::new(location, holding);
        let mut turn = shared_store.shared.gate.turn().await;
        shared_store.reopen(&mut turn, wait).await?;
        drop(turn);
        Ok(Self { pinned: Some(shared_store.generation()), ..shared_store })
    }

    /// A handle whose transactions only release, which they still can when the disk is full.
    #[must_use]
    pub fn to_release(&self) -> Self {
        Self { purpose: Purpose::Release, ..self.clone() }
    }

    /// Where the store is.
    pub fn location(&self) -> &Location {
        &self.shared.location
    }

    /// The store that was there last, and its generation. If none is open, and none is being handed over, this looks again.
    pub async fn identity(&self) -> (StoreIdentity, u64) {
        // If the store could not be opened again, as after it was moved away, what was seen last says nothing.
        if self.seen().identity == StoreIdentity::Nothing || self.shared.gate.is_given_up() {
            match self.keep_open(Instant::now() + Duration::from_millis(500)).await {
                Ok(kept) => drop(kept),
                Err(error) if *error.kind() == ErrorKind::Missing => {
                    tracing::debug!(%error, "there is no store to serve yet");
                }
                Err(error) => tracing::warn!(%error, "the store is not open; the next call looks again"),
            }
        }
        let CurrentStore { identity, generation, .. } = self.seen();
        (identity, generation)
    }

    /// The store that was there last.
    pub(crate) fn identity_seen(&self) -> StoreIdentity {
        self.seen().identity
    }

    /// Which store it is now, of those that were at this place.
    pub fn generation(&self) -> u64 {
        self.place().1
    }

    /// The two halves of the id of the embedded store that was there last, and its generation.
    pub fn place(&self) -> ((u64, u64), u64) {
        let seen = self.shared.seen.lock().unwrap_or_else(PoisonError::into_inner);
        (seen.halves, seen.generation)
    }

    fn seen(&self) -> CurrentStore {
        self.shared.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn error(&self, kind: ErrorKind, operation: Operation) -> Error {
        Error::new(kind, operation, self.shared.name.clone())
    }

    /// Waits until the store is open, and keeps it so.
    ///
    /// # Errors
    /// Those of opening it; `Locked` if others have it until then.
    pub async fn keep_open(&self, until: Instant) -> Result<OpenGuard> {
        let locked = || self.error(ErrorKind::Locked, Operation::Open);
        loop {
            match timeout_at(until.into(), self.shared.gate.wait()).await {
                Ok(GateStatus::Open(used)) => return Ok(OpenGuard { used, generation: self.generation() }),
                Ok(GateStatus::Ended) => return Err(self.error(ErrorKind::Closed, Operation::Open)),
                Ok(GateStatus::Closed | GateStatus::Turning) => {}
                Err(_) => return Err(locked()),
            }
            // A call that waits in vain searches for the process that has the store, and its error names that.
            let opened = self.run_to_end(move |shared_store| async move { shared_store.open_until(until).await });
            match timeout_at((until + HOLDER_SEARCH_TIMEOUT).into(), opened).await {
                Ok(Some(opened)) => opened?,
                Ok(None) => return Err(self.error(ErrorKind::Closed, Operation::Open)),
                Err(_) => return Err(locked()),
            }
        }
    }

    async fn open_until(&self, until: Instant) -> Result<()> {
        let Ok(mut turn) = timeout_at(until.into(), self.shared.gate.turn()).await else {
            return Err(self.error(ErrorKind::Locked, Operation::Open));
        };
        if turn.is_open() {
            return Ok(());
        }
        self.reopen(&mut turn, until.saturating_duration_since(Instant::now())).await
    }

    /// Opens the store and looks which one it is.
    async fn reopen(&self, turn: &mut HandOverTurn, wait: Duration) -> Result<()> {
        let SharedStoreOptions { options, opens_when_full, history, observer, .. } = &self.shared.holding;
        let _wait = WaitNotice::begin(&**observer);
        let location = &self.shared.location;
        let options = options.clone().with_wait(wait);
        let open = match open_here(location, &options).await {
            // Other writes are refused until what was kept for releases is there again.
            Err(error) if *error.kind() == ErrorKind::NoSpace && *opens_when_full => {
                open_here(location, &options.with_purpose(Purpose::Release)).await?
            }
            opened => opened?,
        };
        let identity = match (open.embedded(), location.path()) {
            (Some(store), Some(folder)) => {
                let queue = FileId::at(&folder.join("queue"));
                let queue = queue.ok_or_else(|| self.error(ErrorKind::Missing, Operation::Open))?;
                StoreIdentity::Embedded { id: store.id().to_string(), queue }
            }
            _ => served::cluster(location).unwrap_or(StoreIdentity::Nothing),
        };
        if let (Some(store), Some(history)) = (open.embedded(), *history)
            && store.has_leases()
            && store.retention() != history
            && let Err(error) = store.set_retention(history).await
        {
            tracing::warn!(%error, "the store keeps the bounds that it had on its history");
        }
        let mut seen = self.shared.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.identity != identity {
            if seen.identity != StoreIdentity::Nothing {
                tracing::warn!(store = self.shared.name, "another store is at this place now");
            }
            let halves = open.embedded().map(|store| store.id().as_u64_pair()).unwrap_or_default();
            *seen = CurrentStore { identity, halves, generation: seen.generation + 1, queued: None };
        }
        seen.queued = maintenance::queued(location).ok().map(Arc::new);
        drop(seen);
        if let Some(store) = open.embedded() {
            let synced = Arc::clone(observer);
            store.observe_commits(move |took| synced.synced(took));
            observer.taken();
        }
        turn.put(open);
        Ok(())
    }

    /// Waits until the store is open.
    pub async fn wait_until_open(&self) {
        self.shared.gate.wait_until_open().await;
    }

    /// True if a process waits for the lock, or another folder is where the store was opened.
    pub fn is_wanted(&self) -> bool {
        let Some(folder) = self.shared.location.path() else { return false };
        if self.shared.gate.peek(|_| ()).is_none() {
            return false;
        }
        let seen = self.seen();
        let is_moved = match seen.identity {
            StoreIdentity::Embedded { queue, .. } => FileId::at(&folder.join("queue")) != Some(queue),
            _ => false,
        };
        // The daemon has the first ticket.
        is_moved || seen.queued.is_some_and(|queued| queued.count() > 1)
    }

    /// Lets the processes that wait for the lock have the store, and takes it back. A process that has announced itself is
    /// waited for, at most 20 ms. Callers who waited through the hand-over before have the store for as long as that took, at most
    /// 250 ms, before this one begins.
    pub async fn hand_over(&self, announced: YieldAnnouncement) {
        self.run_to_end(move |shared_store| async move { shared_store.hand_over_at_once(announced).await }).await;
    }

    async fn hand_over_at_once(&self, announced: YieldAnnouncement) {
        self.shared.gate.share().await;
        let mut turn = self.shared.gate.turn().await;
        if !self.close_for_others(&mut turn).await {
            return;
        }
        if announced == YieldAnnouncement::Yes {
            let end = Instant::now() + YIELD_GRACE;
            let queued = self.seen().queued;
            while Instant::now() < end && queued.as_ref().is_some_and(|queued| queued.count() == 0) {
                sleep(HOLDER_SEARCH_INTERVAL).await;
            }
        }
        // The lock goes to the processes that wait now before it comes back.
        self.reopen_after_hand_over(&mut turn).await;
    }

    /// Lets other processes have the store until the next call.
    pub async fn release_store(&self) {
        self.run_to_end(|shared_store| async move {
            let mut turn = shared_store.shared.gate.turn().await;
            shared_store.close_for_others(&mut turn).await;
        })
        .await;
    }

    /// Closes the store for other processes. False if it was not open.
    async fn close_for_others(&self, turn: &mut HandOverTurn) -> bool {
        let Some(open) = turn.take() else { return false };
        self.shared.holding.observer.handed_over();
        if let Err(error) = open.close().await {
            tracing::warn!(%error, "the store could not be closed cleanly");
        }
        true
    }

    async fn reopen_after_hand_over(&self, turn: &mut HandOverTurn) {
        if let Err(error) = self.reopen(turn, self.shared.holding.options.wait).await {
            tracing::warn!(%error, "the store is not open; the next call looks again");
        }
    }

    /// Gives the store to a process that waits, at the end of a call, if it has been open for long enough.
    async fn yield_now(&self) {
        let (Some(least), Some(open_for)) = (self.shared.holding.yields_after, self.shared.gate.open_for()) else {
            return;
        };
        if open_for >= least && self.is_wanted() {
            self.release_store().await;
        }
    }

    /// The oldest revision that clients of etcd's API may read. While another process has the store, as it was before.
    pub fn oldest_for_clients(&self) -> Revision {
        let now = self.shared.gate.peek(|open| Some(open.embedded()?.status().oldest_for_clients.get())).flatten();
        let kept = &self.shared.oldest_for_clients;
        if let Some(now) = now {
            kept.store(now, Ordering::Relaxed);
        }
        Revision::new(kept.load(Ordering::Relaxed))
    }

    /// Closes the store, has its engine give up the room that the files do not need, and opens it again.
    ///
    /// # Errors
    /// Those of the engine.
    pub async fn defragment(&self) -> Result<()> {
        let defragmented = self.run_to_end(|shared_store| async move { shared_store.defragment_at_once().await }).await;
        defragmented.unwrap_or_else(|| Err(self.error(ErrorKind::Closed, Operation::Open)))
    }

    /// Does something that closes the store, also if the caller goes away in the middle: a store that is half closed would keep its
    /// lock for as long as a watch has it. `None` if it panicked, or the runtime ends.
    async fn run_to_end<T: Send + 'static, F: Future<Output = T> + Send + 'static>(
        &self,
        work: impl FnOnce(Self) -> F,
    ) -> Option<T> {
        tokio::spawn(work(self.clone())).await.ok()
    }

    async fn defragment_at_once(&self) -> Result<()> {
        let mut turn = self.shared.gate.turn().await;
        self.close_for_others(&mut turn).await;
        let SharedStoreOptions { options, observer, .. } = &self.shared.holding;
        let wait = WaitNotice::begin(&**observer);
        let shrunk = maintenance::shrink(&self.shared.location, options.wait).await;
        drop(wait);
        self.reopen_after_hand_over(&mut turn).await;
        shrunk.map(drop)
    }

    /// The error for a client that means a store whose place another one has taken.
    pub fn replaced(&self, operation: Operation) -> Error {
        self.error(ErrorKind::RevisionRegressed, operation).with_detail("another store took its place; begin anew")
    }

    /// Closes the store, once all that keep it open have ended. The next call opens it again.
    ///
    /// # Errors
    /// The error of the engine. Everything that was acknowledged is durable all the same.
    pub async fn close(&self) -> Result<()> {
        let closed = self.run_to_end(|shared_store| async move { shared_store.close_at_once().await }).await;
        closed.unwrap_or_else(|| Err(self.error(ErrorKind::Closed, Operation::Open)))
    }

    /// Closes the store for good: later calls fail with `Closed`.
    ///
    /// # Errors
    /// Those of [`close`](Self::close).
    pub(crate) async fn end(&self) -> Result<()> {
        self.shared.gate.end();
        self.close().await
    }

    async fn close_at_once(&self) -> Result<()> {
        let open = self.shared.gate.turn().await.take();
        self.shared.holding.observer.released();
        match open {
            Some(open) => open.close().await,
            None => Ok(()),
        }
    }
}

/// Whether a process has said that it is about to wait for the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum YieldAnnouncement {
    /// It has.
    Yes,
    /// It waits already.
    No,
}

/// Longer than any process lives.
const UNLIMITED_WAIT: Duration = Duration::from_secs(30 * 365 * 24 * 60 * 60);
/// How long a reader of much has the store at least; then it gives the store to a process that waits.
pub const MIN_HOLD_DURATION: Duration = Duration::from_millis(10);

/// How a store is held.
#[derive(Clone)]
pub struct SharedStoreOptions {
    /// How it is opened, each time.
    pub options: OpenOptions,
    /// No call waits for the store beyond this moment.
    pub until: Option<Instant>,
    /// Once the store has been open for so long, the end of a call gives it to a process that waits; `None` leaves that to
    /// [`SharedStore::hand_over`](SharedStore::hand_over) and [`SharedStore::release_store`](SharedStore::release_store).
    pub yields_after: Option<Duration>,
    /// Where a full disk has no room to open it for all purposes, it is opened for releases, which may use what is kept for them.
    pub opens_when_full: bool,
    /// The bounds on its history that a store of format 2 gets; `None` leaves it those that it has.
    pub history: Option<Retention>,
    /// The observer of the store.
    pub observer: Arc<dyn SharedStoreObserver>,
}

impl SharedStoreOptions {
    /// A store that is opened with these options, and handed over when it is said.
    pub fn new(options: OpenOptions) -> Self {
        Self { options, until: None, yields_after: None, opens_when_full: false, history: None, observer: Arc::new(()) }
    }

    /// The moment until which a call waits for the store.
    pub(crate) fn wait_deadline(&self) -> Instant {
        let now = Instant::now();
        // A wait that no clock can measure is as good as none.
        let end = now.checked_add(self.options.wait).unwrap_or(now + UNLIMITED_WAIT);
        self.until.map_or(end, |until| until.min(end))
    }
}

/// An observer of a held store.
pub trait SharedStoreObserver: Send + Sync {
    /// The store is open.
    fn taken(&self) {}
    /// The store is closed, for other processes.
    fn handed_over(&self) {}
    /// The store is closed for good.
    fn released(&self) {}
    /// A wait begins that is no standstill: for another process, or for an engine that is being opened.
    fn wait_begins(&self) {}
    /// Such a wait ends.
    fn wait_ends(&self) {}
    /// The disk took so long to make a commit durable.
    fn synced(&self, took: Duration) {
        let _ = took;
    }
}

impl SharedStoreObserver for () {}

/// A wait that is no standstill.
struct WaitNotice<'o>(&'o dyn SharedStoreObserver);

impl<'o> WaitNotice<'o> {
    fn begin(observer: &'o dyn SharedStoreObserver) -> Self {
        observer.wait_begins();
        Self(observer)
    }
}

impl Drop for WaitNotice<'_> {
    fn drop(&mut self) {
        self.0.wait_ends();
    }
}
