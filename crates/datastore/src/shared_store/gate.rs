//! Holds the open store, counts the calls that use it, and decides which task may close it.
//!
//! A future that waits for the store is only woken, never handed a permit to use the store. A permit in a future that
//! is never polled again would keep the store open forever. A caller that finds the store closed waits for a change of
//! the gate's state, and then tries again. A use of the store is counted in the same poll that returns its `StoreUse`,
//! so a future that is never polled again leaks no use.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{Mutex, OwnedMutexGuard, watch};
use tokio::time::sleep_until;

use driver::Opened;

/// After a hand-over, the minimum and maximum time for which this process keeps the store for its own waiting callers
/// before the next hand-over.
const CALLER_SHARE: RangeInclusive<Duration> = Duration::from_millis(5)..=Duration::from_millis(250);

/// The gate's open store, the number of its current users, and the right to close or open it.
pub(super) struct StoreGate {
    state: watch::Sender<GateState>,
    turn: Arc<Mutex<()>>,
}

struct GateState {
    store: Option<Arc<Box<dyn Opened>>>,
    users: usize,
    /// True while a task closes or opens the store. While `is_turning` is true, no new use of the store can begin.
    is_turning: bool,
    /// True once the store is closed permanently.
    has_ended: bool,
    opened_at: Instant,
    /// The instant until which the store stays open for the callers that waited during the last hand-over.
    share_end: Instant,
}

/// The open store, or the reason why the store is not open now.
pub(super) enum GateStatus {
    Open(StoreUse),
    /// The store is closed now, and no task is opening it.
    Closed,
    /// A task is currently closing or opening the store.
    Turning,
    /// The store is closed permanently.
    Ended,
}

/// A use of the open store by one call; the store is not closed while a `StoreUse` exists.
pub(super) struct StoreUse {
    gate: Arc<StoreGate>,
    /// The open store; `None` only while the `StoreUse` is being dropped.
    store: Option<Arc<Box<dyn Opened>>>,
}

/// The exclusive right of one task to close and open the store, until the `HandOverTurn` is dropped.
pub(super) struct HandOverTurn {
    gate: Arc<StoreGate>,
    begun: Instant,
    _alone: OwnedMutexGuard<()>,
}

impl StoreGate {
    /// Creates a gate without an open store.
    pub(super) fn new() -> Arc<Self> {
        let now = Instant::now();
        let state =
            GateState { store: None, users: 0, is_turning: false, has_ended: false, opened_at: now, share_end: now };
        Arc::new(Self { state: watch::Sender::new(state), turn: Arc::default() })
    }

    /// Begins a use of the store if the store is open; otherwise returns why the store is not open.
    pub(super) fn enter(self: &Arc<Self>) -> GateStatus {
        let mut found = GateStatus::Closed;
        self.state.send_if_modified(|state| {
            found = match &state.store {
                _ if state.has_ended => GateStatus::Ended,
                _ if state.is_turning => GateStatus::Turning,
                None => GateStatus::Closed,
                Some(store) => {
                    state.users += 1;
                    GateStatus::Open(StoreUse { gate: Arc::clone(self), store: Some(Arc::clone(store)) })
                }
            };
            false
        });
        found
    }

    /// Waits while a task is closing or opening the store, and then begins a use of the store or reports that the store
    /// is closed.
    pub(super) async fn wait(self: &Arc<Self>) -> GateStatus {
        let mut changes = None;
        loop {
            match self.enter() {
                GateStatus::Turning => {}
                found => return found,
            }
            // Try once more to use the store after subscribing to the gate's state, because a state change before the
            // subscription would be missed.
            match &mut changes {
                None => changes = Some(self.state.subscribe()),
                // Waiting for a state change cannot fail, because the sender exists as long as the gate.
                Some(changes) => _ = watch::Receiver::changed(changes).await,
            }
        }
    }

    /// Ends the gate permanently, so no further use of the store can begin.
    pub(super) fn end(&self) {
        self.state.send_modify(|state| state.has_ended = true);
    }

    pub(super) async fn wait_until_open(&self) {
        let is_open = |state: &GateState| state.store.is_some() && !state.is_turning;
        // Waiting for a state change cannot fail, because the sender exists as long as the gate.
        let _ = self.state.subscribe().wait_for(is_open).await;
    }

    /// Calls `look` on the open store without counting as a user of the store; returns `None` if the store is closed.
    /// The function `look` must not block.
    pub(super) fn peek<T>(&self, look: impl FnOnce(&dyn Opened) -> T) -> Option<T> {
        self.state.borrow().store.as_deref().map(|store| look(&**store))
    }

    /// Returns how long the store has been open; `None` if the store is closed.
    pub(super) fn open_for(&self) -> Option<Duration> {
        let state = self.state.borrow();
        state.store.as_ref().map(|_| state.opened_at.elapsed())
    }

    /// Returns true if the store is closed and no task is opening it.
    pub(super) fn is_given_up(&self) -> bool {
        let state = self.state.borrow();
        state.store.is_none() && !state.is_turning
    }

    /// Waits until `share_end`, up to which the store stays open for the callers that waited during the last hand-over.
    pub(super) async fn share(&self) {
        let end = self.state.borrow().share_end;
        sleep_until(end.into()).await;
    }

    /// Waits until no other task has the right to close the store, and until all uses of the store have ended. No new
    /// use of the store can begin until the returned `HandOverTurn` is dropped. `turn` must be awaited only in a task
    /// that the `SharedStore` itself has spawned, because such a task is polled until it ends.
    pub(super) async fn turn(self: &Arc<Self>) -> HandOverTurn {
        let alone = Arc::clone(&self.turn).lock_owned().await;
        self.state.send_if_modified(|state| {
            state.is_turning = true;
            false
        });
        let turn = HandOverTurn { gate: Arc::clone(self), begun: Instant::now(), _alone: alone };
        let _ = self.state.subscribe().wait_for(|state| state.users == 0).await;
        turn
    }
}

impl StoreUse {
    pub(super) fn store(&self) -> Option<&dyn Opened> {
        self.store.as_deref().map(|store| &**store)
    }
}

impl Drop for StoreUse {
    fn drop(&mut self) {
        // Drop the handle before decrementing the user count: closing needs the last handle, and starts when the count
        // reaches zero.
        self.store = None;
        self.gate.state.send_if_modified(|state| {
            state.users -= 1;
            state.is_turning && state.users == 0
        });
    }
}

impl HandOverTurn {
    pub(super) fn is_open(&self) -> bool {
        self.gate.state.borrow().store.is_some()
    }

    /// Takes the open store out of the gate, for the task that will close it.
    pub(super) fn take(&mut self) -> Option<Box<dyn Opened>> {
        let mut store = None;
        self.gate.state.send_if_modified(|state| {
            store = state.store.take();
            false
        });
        store.and_then(Arc::into_inner)
    }

    /// Puts an open store into the gate, where calls can use the store once the `HandOverTurn` is dropped.
    pub(super) fn put(&mut self, store: Box<dyn Opened>) {
        self.gate.state.send_if_modified(|state| {
            state.store = Some(Arc::new(store));
            state.opened_at = Instant::now();
            false
        });
    }
}

impl Drop for HandOverTurn {
    fn drop(&mut self) {
        // Waiting callers of this process get a minimum time after each hand-over; otherwise processes that keep
        // arriving could starve these callers.
        let has_callers = self.gate.state.receiver_count() > 0;
        let share = if has_callers {
            self.begun.elapsed().clamp(*CALLER_SHARE.start(), *CALLER_SHARE.end())
        } else {
            Duration::ZERO
        };
        self.gate.state.send_modify(|state| {
            state.is_turning = false;
            state.share_end = Instant::now() + share;
        });
    }
}
