//! Keeps a store open in this process and hands it over to other processes when they wait for it. The daemon hands the
//! store over when other processes wait for the store lock. A long reader hands the store over between two of its
//! calls. The main plugin hands the store over while it runs an external program, such as an IPAM plugin.
//!
//! Each call of a store method has an [`OpenGuard`], and the shared store stays open while any guard exists. A
//! hand-over waits until all guards are dropped, closes the store, and opens it again after the queued processes have
//! had it. Calls that arrive during a hand-over wait until the hand-over has ended. Watches resume after a hand-over,
//! because the only state of a watch is a revision. A watch ends with an error if a different store is at the location
//! after the hand-over.
//!
//! A caller may stop polling a future without dropping it: for example, a stream whose client does not read, or a
//! `select!` arm while another arm runs. Therefore a future that is returned to a caller must not keep an [`OpenGuard`]
//! across an `await`, nor wait for a lock that a hand-over needs. Code that keeps the store open runs in a task of its
//! own, not in the caller's future.

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

/// The maximum time after a Yield frame for which a hand-over waits until the sender of the frame has queued for the
/// store lock.
const YIELD_GRACE: Duration = Duration::from_millis(20);
/// Maximum time that a failed store call spends on finding out which process has the store open.
const HOLDER_SEARCH_TIMEOUT: Duration = Duration::from_millis(500);
/// Interval at which a hand-over checks whether the process that announced itself has queued for the store lock.
const HOLDER_SEARCH_INTERVAL: Duration = Duration::from_millis(1);
/// A store that this process keeps open and hands over to other processes when they wait for it; cheap to clone.
#[derive(Clone)]
pub struct SharedStore {
    shared: Arc<SharedInner>,
    /// The purpose of the transactions that callers send through this handle.
    purpose: Purpose,
    /// The only store generation that this handle accepts; `None` if the handle accepts any store at the location.
    pinned: Option<u64>,
}

struct SharedInner {
    location: Location,
    name: String,
    gate: Arc<StoreGate>,
    seen: Mutex<CurrentStore>,
    holding: SharedStoreOptions,
    /// The oldest revision that clients of etcd's API may read, as of the last time the store was open.
    oldest_for_clients: AtomicI64,
}

/// The identity, generation and queue file of the store that was opened last.
#[derive(Clone)]
struct CurrentStore {
    identity: StoreIdentity,
    /// The two 64-bit halves of an embedded store's id.
    halves: (u64, u64),
    /// The generation of the store: a number that increases when a different store is found at the location.
    generation: u64,
    queued: Option<Arc<QueueFile>>,
}

/// A use of the open store by one task, which ends when the guard is dropped; until then, the store stays open.
///
/// A task must drop its guard before it requests another guard. While a hand-over waits for guards to be dropped, no
/// new use of the store begins, so the request for a second guard would wait for ever. Only a task that is polled until
/// it ends may have an `OpenGuard`.
pub struct OpenGuard {
    used: StoreUse,
    /// The generation of the store: a number that increases when a different store is found at the location.
    pub generation: u64,
}

impl OpenGuard {
    /// Returns a handle that writes with the given purpose, whatever purpose the store was opened for.
    ///
    /// # Errors
    /// `Closed` if the store is closed, which cannot happen while the guard exists.
    pub fn store(&self, purpose: Purpose) -> Result<Arc<dyn Store>> {
        let open = self.open()?;
        Ok(match open.embedded() {
            Some(store) => Arc::new(store.with_purpose(purpose)),
            None => open.store(),
        })
    }

    /// Returns the store that the guard keeps open.
    pub fn open(&self) -> Result<&dyn Opened> {
        // The error `Closed` never occurs, because an `OpenGuard` is only created with an open store.
        self.used.store().ok_or_else(|| Error::new(ErrorKind::Closed, Operation::Open, "store"))
    }
}

impl fmt::Debug for SharedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedStore").field("store", &self.shared.name).finish_non_exhaustive()
    }
}

impl fmt::Debug for OpenGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenGuard").field("generation", &self.generation).finish_non_exhaustive()
    }
}

impl SharedStore {
    /// Creates a handle to the store at this location; the first call on the handle opens the store.
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

    /// Opens the store at this location and returns a handle to the open store. Later calls on the handle fail with
    /// `RevisionRegressed` if a different store has replaced the store at this location.
    ///
    /// # Errors
    /// `Locked` if other processes hold the store for longer than `wait`; any error of opening the store.
    pub(crate) async fn begin(location: Location, holding: SharedStoreOptions, wait: Duration) -> Result<Self> {
        let shared_store = Self::new(location, holding);
        let mut turn = shared_store.shared.gate.turn().await;
        shared_store.reopen(&mut turn, wait).await?;
        drop(turn);
        Ok(Self { pinned: Some(shared_store.generation()), ..shared_store })
    }

    /// Returns a handle for transactions that only release addresses, which still succeed when the disk is full.
    #[must_use]
    pub fn to_release(&self) -> Self {
        Self { purpose: Purpose::Release, ..self.clone() }
    }

    /// The location of the shared store.
    pub fn location(&self) -> &Location {
        &self.shared.location
    }

    /// Returns the identity of the store that was opened last, and its generation. If the store is closed and no
    /// hand-over is running, `identity` opens the store first.
    pub async fn identity(&self) -> (StoreIdentity, u64) {
        // After the store was closed, the store's last known identity may be outdated, for example because the store
        // was moved away.
        if self.seen().identity == StoreIdentity::Nothing || self.shared.gate.is_given_up() {
            match self.keep_open(Instant::now() + Duration::from_millis(500)).await {
                Ok(kept) => drop(kept),
                Err(error) if *error.kind() == ErrorKind::Missing => {
                    tracing::debug!(%error, "the store that this daemon serves does not exist yet");
                }
                Err(error) => tracing::warn!(
                    %error,
                    "cannot open the store; trying again at the next request to the daemon"
                ),
            }
        }
        let CurrentStore { identity, generation, .. } = self.seen();
        (identity, generation)
    }

    pub(crate) fn identity_seen(&self) -> StoreIdentity {
        self.seen().identity
    }

    /// The generation of the store that was opened last: a number that increases when a different store is found at the
    /// location.
    pub fn generation(&self) -> u64 {
        self.place().1
    }

    /// The two 64-bit halves of the id of the embedded store that was opened last, and the store's generation.
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

    /// Waits until the store is open, and returns a guard that keeps the store open.
    ///
    /// # Errors
    /// The error `Locked` if other processes keep the store until the deadline `until`; any error of opening the store.
    pub async fn keep_open(&self, until: Instant) -> Result<OpenGuard> {
        let locked = || self.error(ErrorKind::Locked, Operation::Open);
        loop {
            match timeout_at(until.into(), self.shared.gate.wait()).await {
                Ok(GateStatus::Open(used)) => return Ok(OpenGuard { used, generation: self.generation() }),
                Ok(GateStatus::Ended) => return Err(self.error(ErrorKind::Closed, Operation::Open)),
                Ok(GateStatus::Closed | GateStatus::Turning) => {}
                Err(_) => return Err(locked()),
            }
            // If the wait for the store times out, the returned error names the process that has the store open.
            // Finding out which process has the store open takes extra time after the deadline.
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

    async fn reopen(&self, turn: &mut HandOverTurn, wait: Duration) -> Result<()> {
        let SharedStoreOptions { options, opens_when_full, history, observer, .. } = &self.shared.holding;
        let _wait = WaitNotice::begin(&**observer);
        let location = &self.shared.location;
        let options = options.clone().with_wait(wait);
        let open = match open_here(location, &options).await {
            // On a full disk, the store is opened for releases of addresses only. If the store was opened for releases
            // on a full disk, it refuses all other writes until the disk space reserved for releases is restored.
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
            tracing::warn!(%error, "cannot change the history limits of the store; keeping the old limits");
        }
        let mut seen = self.shared.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.identity != identity {
            if seen.identity != StoreIdentity::Nothing {
                tracing::warn!(
                    store = self.shared.name,
                    "another store has replaced the store at this path; serving the new store"
                );
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

    /// Waits until the shared store is open.
    pub async fn wait_until_open(&self) {
        self.shared.gate.wait_until_open().await;
    }

    /// Returns true if another process waits for the store lock, or if a different folder is at the store's path now.
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
        // This process's own ticket is the first in the store's queue.
        is_moved || seen.queued.is_some_and(|queued| queued.count() > 1)
    }

    /// Closes the store for the processes that wait for the store lock, and then opens it again. If a process has
    /// announced that it will queue, the hand-over waits at most 20 ms until that process has queued. Between two
    /// hand-overs, waiting callers of this process get the store for as long as the last hand-over took, at most 250
    /// ms.
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
        // Processes that already wait for the store lock get the lock before this process does.
        self.reopen_after_hand_over(&mut turn).await;
    }

    /// Closes the store until the next call on this handle, so that other processes can open it.
    pub async fn release_store(&self) {
        self.run_to_end(|shared_store| async move {
            let mut turn = shared_store.shared.gate.turn().await;
            shared_store.close_for_others(&mut turn).await;
        })
        .await;
    }

    /// Closes the store, so that other processes can open it; returns false if the store was closed already.
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
            tracing::warn!(%error, "cannot open the store; trying again at the next request to the daemon");
        }
    }

    /// Closes the store at the end of a store call, if a process waits for the store lock and the store has been open
    /// for long enough.
    async fn yield_now(&self) {
        let (Some(least), Some(open_for)) = (self.shared.holding.yields_after, self.shared.gate.open_for()) else {
            return;
        };
        if open_for >= least && self.is_wanted() {
            self.release_store().await;
        }
    }

    /// Returns the oldest revision that clients of etcd's API may read. While another process has the store,
    /// `oldest_for_clients` returns the last known revision.
    pub fn oldest_for_clients(&self) -> Revision {
        let now = self.shared.gate.peek(|open| Some(open.embedded()?.status().oldest_for_clients.get())).flatten();
        let kept = &self.shared.oldest_for_clients;
        if let Some(now) = now {
            kept.store(now, Ordering::Relaxed);
        }
        Revision::new(kept.load(Ordering::Relaxed))
    }

    /// Closes the store, lets its engine return unneeded disk space, and opens the store again.
    ///
    /// # Errors
    /// The engine's error.
    pub async fn defragment(&self) -> Result<()> {
        let defragmented = self.run_to_end(|shared_store| async move { shared_store.defragment_at_once().await }).await;
        defragmented.unwrap_or_else(|| Err(self.error(ErrorKind::Closed, Operation::Open)))
    }

    /// Runs `work` in a task that runs to its end even if the caller's future is dropped. If closing the store were
    /// interrupted, a watch could still have a handle to the store, and this process would keep the store lock.
    /// `run_to_end` returns `None` if `work` panicked, or if the runtime is shutting down.
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

    /// Returns the error for a client whose store was replaced by a different store at the same location.
    pub fn replaced(&self, operation: Operation) -> Error {
        self.error(ErrorKind::RevisionRegressed, operation).with_detail("another store took its place; begin anew")
    }

    /// Closes the store after all calls that keep it open have ended; the next call on this handle opens it again.
    ///
    /// # Errors
    /// The engine's error. Every acknowledged commit is durable, even if closing the store fails.
    pub async fn close(&self) -> Result<()> {
        let closed = self.run_to_end(|shared_store| async move { shared_store.close_at_once().await }).await;
        closed.unwrap_or_else(|| Err(self.error(ErrorKind::Closed, Operation::Open)))
    }

    /// Closes the store permanently, after all calls that keep it open have ended. After `end`, calls on any handle of
    /// the store fail with `Closed`.
    ///
    /// # Errors
    /// See [`close`](Self::close).
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

/// The progress of a process that wants the store: announced by a Yield frame, or queued for the store lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum YieldAnnouncement {
    /// The process has announced that it wants the store, but may not be in the queue for the store lock yet.
    Yes,
    /// The process already waits in the queue for the store lock.
    No,
}

/// The maximum wait for the store, which is used if a longer wait would overflow the clock. 30 years are longer than
/// any process runs, so the wait is unlimited in practice.
const UNLIMITED_WAIT: Duration = Duration::from_secs(30 * 365 * 24 * 60 * 60);
/// Minimum time that a long reader keeps the store before it yields to a waiting process.
pub const MIN_HOLD_DURATION: Duration = Duration::from_millis(10);

/// The settings with which a process keeps a store open and shares it with other processes.
#[derive(Clone)]
pub struct SharedStoreOptions {
    /// The options with which this process opens the store each time.
    pub options: OpenOptions,
    /// One deadline for the sum of all waits for the store lock; with `None`, [`OpenOptions::wait`] limits each wait.
    pub until: Option<Instant>,
    /// The minimum time for which the store stays open before it is yielded to a waiting process at the end of a store
    /// call. If `yields_after` is `None`, only [`SharedStore::hand_over`](SharedStore::hand_over) and
    /// [`SharedStore::release_store`](SharedStore::release_store) yield the store.
    pub yields_after: Option<Duration>,
    /// Says whether a store on a full disk is opened for releases of addresses only; otherwise, opening the store
    /// fails. On a full disk, releases of addresses may use disk space that is reserved for them.
    pub opens_when_full: bool,
    /// The history limits that are set when a store of format 2 is opened. With `None`, the history limits that are
    /// recorded in the store stay in force.
    pub history: Option<Retention>,
    /// The observer that the shared store notifies of its events.
    pub observer: Arc<dyn SharedStoreObserver>,
}

impl SharedStoreOptions {
    /// Creates options for a store that is opened with `options` and handed over only on request.
    pub fn new(options: OpenOptions) -> Self {
        Self { options, until: None, yields_after: None, opens_when_full: false, history: None, observer: Arc::new(()) }
    }

    /// Returns the deadline until which a store call that begins now waits for the store.
    pub(crate) fn wait_deadline(&self) -> Instant {
        let now = Instant::now();
        // If the deadline would overflow the clock, the wait is practically unlimited.
        let end = now.checked_add(self.options.wait).unwrap_or(now + UNLIMITED_WAIT);
        self.until.map_or(end, |until| until.min(end))
    }
}

/// An observer that a shared store notifies of its events, for example of a hand-over.
pub trait SharedStoreObserver: Send + Sync {
    /// Called when this process has opened the store.
    fn taken(&self) {}
    /// Called before this process closes the store to hand it over to another process.
    fn handed_over(&self) {}
    /// Called before the program that owns the shared store closes it; the next call on the store may open it again.
    fn released(&self) {}
    /// Called when this process starts to wait for the store lock or for the engine to open the store; a watchdog must
    /// not take this wait for a hang.
    fn wait_begins(&self) {}
    /// Called when the wait that [`wait_begins`](Self::wait_begins) announced has ended.
    fn wait_ends(&self) {}
    /// Called when a commit has become durable on the disk. `took` is the time since the commit's first write.
    fn synced(&self, took: Duration) {
        let _ = took;
    }
}

impl SharedStoreObserver for () {}

/// Notifies the observer of the start and the end of a wait that must not count as a hang.
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
