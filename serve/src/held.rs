//! A store that the daemon holds open, and that other processes get whenever they wait for it.
//!
//! Each call has a [`KeptOpen`]: while it lasts the store stays open. A hand-over waits until all are dropped, closes the store, lets the
//! processes that wait have it, and opens it again. Calls that come meanwhile wait for that. Watches go on after it, since a
//! revision is all that they have to remember. If another store is at the same place then, they end with an error.
//!
//! The owner of a future may stop polling it: a stream whose client does not read, a `select!` in the arm of another future. So
//! no future that is given away may have a `KeptOpen` across an `await`, or wait for a lock that a hand-over needs: what keeps
//! the store open runs in a task of its own.

use std::fmt;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use datastore::care::{self, Queued};
use datastore::{Create, Location, OpenStore, served};
use kv::{Error, ErrorKind, Operation, Result, Revision, Store};
use kv_mvcc::{Purpose, Retention};
use tokio::time::{sleep, timeout_at};
use wire::{FileId, Identity};

use crate::gate::{Gate, Turn, Use};
use crate::metrics::Metrics;

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
    pub(crate) purpose: Purpose,
}

struct Shared {
    location: Location,
    name: String,
    gate: Arc<Gate>,
    /// The store that was there last.
    seen: Mutex<Seen>,
    metrics: Arc<Metrics>,
    /// The bounds that the store gets on its history; `None` leaves it those that it has.
    history: Option<Retention>,
    /// The oldest revision that clients of etcd's API may read, as far as it is known.
    oldest_for_clients: AtomicI64,
}

/// A store, and which one it is at this place.
#[derive(Clone)]
struct Seen {
    identity: Identity,
    /// The two halves of an embedded store's id.
    halves: (u64, u64),
    /// It grows when another store takes its place.
    generation: u64,
    /// The queue in front of the store.
    queued: Option<Arc<Queued>>,
}

/// The store, which stays open as long as this is there.
///
/// A caller with one must not ask for another one before it drops the first: a hand-over may wait in between. It must be a task
/// that goes on to the end by itself.
pub struct KeptOpen {
    used: Use,
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
        self.used.store().ok_or_else(|| Error::new(ErrorKind::Closed, Operation::Open, "store"))
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
        let seen = Mutex::new(Seen { identity: Identity::Nothing, halves: (0, 0), generation: 0, queued: None });
        Self {
            shared: Arc::new(Shared {
                location,
                name,
                gate: Gate::new(),
                seen,
                metrics,
                history,
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
        // If the store could not be opened again, as after it was moved away, what was seen last says nothing.
        if self.seen().identity == Identity::Nothing || self.shared.gate.is_given_up() {
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

    pub(crate) fn error(&self, kind: ErrorKind, operation: Operation) -> Error {
        Error::new(kind, operation, self.shared.name.clone())
    }

    /// Waits until the store is open, and keeps it so.
    ///
    /// # Errors
    /// Those of opening it; `Locked` if others have it until then.
    pub async fn keep_open(&self, until: Instant) -> Result<KeptOpen> {
        let wait = async {
            loop {
                if let Some(used) = self.shared.gate.wait().await {
                    return Ok::<_, Error>(used);
                }
                let opened = self.to_the_end(move |held| async move { held.open_until(until).await }).await;
                opened.unwrap_or_else(|| Err(self.error(ErrorKind::Closed, Operation::Open)))?;
            }
        };
        match timeout_at(until.into(), wait).await {
            Ok(used) => Ok(KeptOpen { used: used?, generation: self.generation() }),
            Err(_) => Err(self.error(ErrorKind::Locked, Operation::Open)),
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
    async fn reopen(&self, turn: &mut Turn, wait: Duration) -> Result<()> {
        let _wait = self.shared.metrics.pulse.wait();
        let location = &self.shared.location;
        let open = match datastore::open(location, &Create::Never.with_wait(wait)).await {
            // There may be room for releases. Other writes are refused until what was kept for these is there again.
            Err(error) if *error.kind() == ErrorKind::NoSpace => {
                datastore::open(location, &Create::Never.with_wait(wait).with_purpose(Purpose::Release)).await?
            }
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
            *seen = Seen { identity, halves, generation: seen.generation + 1, queued: None };
        }
        seen.queued = care::queued(location).ok().map(Arc::new);
        drop(seen);
        if let Some(store) = open.embedded() {
            let metrics = Arc::clone(&self.shared.metrics);
            store.observe_commits(move |took| metrics.observe_sync(took));
            self.shared.metrics.lock_taken();
        }
        turn.put(open);
        Ok(())
    }

    /// Waits until the store is open.
    pub async fn until_open(&self) {
        self.shared.gate.until_open().await;
    }

    /// True if a process waits for the lock, or another folder is where the store was opened.
    pub fn is_wanted(&self) -> bool {
        let Some(folder) = self.shared.location.path() else { return false };
        if self.shared.gate.peek(|_| ()).is_none() {
            return false;
        }
        let seen = self.seen();
        let is_moved = match seen.identity {
            Identity::Embedded { queue, .. } => FileId::at(&folder.join("queue")) != Some(queue),
            _ => false,
        };
        // The daemon has the first ticket.
        is_moved || seen.queued.is_some_and(|queued| queued.count() > 1)
    }

    /// Lets the processes that wait for the lock have the store, and takes it back. A process that has announced itself is
    /// waited for, at most 20 ms. Callers who waited through the hand-over before have the store for as long as that took, at most
    /// 250 ms, before this one begins.
    pub async fn hand_over(&self, announced: Announced) {
        self.to_the_end(move |held| async move { held.hand_over_at_once(announced).await }).await;
    }

    async fn hand_over_at_once(&self, announced: Announced) {
        self.shared.gate.share().await;
        let mut turn = self.shared.gate.turn().await;
        let Some(open) = turn.take() else { return };
        self.shared.metrics.lock_handed_over();
        if let Err(error) = open.close().await {
            tracing::warn!(%error, "the store could not be closed cleanly");
        }
        if announced == Announced::Yes {
            let end = Instant::now() + ANNOUNCED;
            let queued = self.seen().queued;
            while Instant::now() < end && queued.as_ref().is_some_and(|queued| queued.count() == 0) {
                sleep(INTERVAL).await;
            }
        }
        // The lock goes to the processes that wait now before it comes back.
        if let Err(error) = self.reopen(&mut turn, WAIT).await {
            tracing::warn!(%error, "the store is not open; the next call looks again");
        }
    }

    /// The oldest revision that clients of etcd's API may read. While another process has the store, as it was before.
    pub(crate) fn oldest_for_clients(&self) -> Revision {
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
        let mut turn = self.shared.gate.turn().await;
        if let Some(open) = turn.take() {
            self.shared.metrics.lock_handed_over();
            if let Err(error) = open.close().await {
                tracing::warn!(%error, "the store could not be closed cleanly");
            }
        }
        let wait = self.shared.metrics.pulse.wait();
        let shrunk = care::shrink(&self.shared.location, WAIT).await;
        drop(wait);
        if let Err(error) = self.reopen(&mut turn, WAIT).await {
            tracing::warn!(%error, "the store is not open; the next call looks again");
        }
        shrunk.map(drop)
    }

    /// The error for a client that means a store whose place another one has taken.
    pub(crate) fn replaced(&self, operation: Operation) -> Error {
        self.error(ErrorKind::RevisionRegressed, operation).with_detail("another store took its place; begin anew")
    }

    /// Closes the store for good, once all that keep it open have ended.
    pub async fn close(&self) {
        self.to_the_end(|held| async move { held.close_at_once().await }).await;
    }

    async fn close_at_once(&self) {
        let open = self.shared.gate.turn().await.take();
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

#[cfg(test)]
#[path = "held_tests.rs"]
mod tests;
