//! Keeps the open store, counts the calls that use the store, and decides which task may close the store.
//!
//! A waiting future is never granted a permit. A future would keep the permit from the grant until the future's next
//! poll, which may never come. Instead, a caller that finds the store closed waits for a state change and tries again.
//! A use of the store begins in the same poll that returns the `StoreUse` to the caller.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{Mutex, OwnedMutexGuard, watch};
use tokio::time::sleep_until;

use driver::Opened;

/// Minimum and maximum time that waiting callers get after a hand-over, before the next hand-over.
const CALLER_SHARE: RangeInclusive<Duration> = Duration::from_millis(5)..=Duration::from_millis(250);

/// The open store, the number of its users, and the right to close or open the store.
pub(super) struct StoreGate {
    state: watch::Sender<GateState>,
    turn: Arc<Mutex<()>>,
}

struct GateState {
    store: Option<Arc<Box<dyn Opened>>>,
    users: usize,
    /// True while a task closes or opens the store. No new use of the store can begin while `is_turning` is true.
    is_turning: bool,
    /// True once the store is closed permanently.
    has_ended: bool,
    opened_at: Instant,
    /// The instant until which the store stays open for the callers that waited through a hand-over.
    share_end: Instant,
}

/// The open store, or the reason why the store is not open.
pub(super) enum GateStatus {
    Open(StoreUse),
    /// The store is closed, and no task is opening it.
    Closed,
    /// A task is closing or opening the store.
    Turning,
    /// The store is closed permanently.
    Ended,
}

/// A use of the open store. The store is not closed while a `StoreUse` exists.
pub(super) struct StoreUse {
    gate: Arc<StoreGate>,
    /// The open store; `None` only during drop.
    store: Option<Arc<Box<dyn Opened>>>,
}

/// The exclusive right of one task to close and open the store.
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

    /// Begins a use of the store if the store is open.
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

    /// Waits until no task closes or opens the store. Then begins a use of the store, or reports that the store is
    /// closed.
    pub(super) async fn wait(self: &Arc<Self>) -> GateStatus {
        let mut changes = None;
        loop {
            match self.enter() {
                GateStatus::Turning => {}
                found => return found,
            }
            // Retry once after subscribing: a state change before the subscription would be missed.
            match &mut changes {
                None => changes = Some(self.state.subscribe()),
                // Waiting for a state change cannot fail, because the sender lives as long as the gate.
                Some(changes) => _ = watch::Receiver::changed(changes).await,
            }
        }
    }

    /// Closes the gate permanently: no further use of the store can begin.
    pub(super) fn end(&self) {
        self.state.send_modify(|state| state.has_ended = true);
    }

    /// Waits until the store is open.
    pub(super) async fn wait_until_open(&self) {
        let is_open = |state: &GateState| state.store.is_some() && !state.is_turning;
        // Waiting for a state change cannot fail, because the sender lives as long as the gate.
        let _ = self.state.subscribe().wait_for(is_open).await;
    }

    /// Calls `look` on the open store without beginning a use; returns `None` if the store is closed. `look` must not
    /// block.
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

    /// Waits until the callers that waited through the last hand-over have had the store for their share of time.
    pub(super) async fn share(&self) {
        let end = self.state.borrow().share_end;
        sleep_until(end.into()).await;
    }

    /// Waits until all other turns and all uses of the store have ended. No new use can begin until the returned turn
    /// is dropped. Await this function only in a task that the `SharedStore` itself has spawned: such a task is polled
    /// until it ends.
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
        // Drop the handle before the count of users reaches zero, so that the task that waits for the turn then has the
        // only handle.
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

    /// Takes the store out of the gate, so that the task that has the turn can close the store.
    pub(super) fn take(&mut self) -> Option<Box<dyn Opened>> {
        let mut store = None;
        self.gate.state.send_if_modified(|state| {
            store = state.store.take();
            false
        });
        store.and_then(Arc::into_inner)
    }

    /// Puts an open store into the gate, so that calls can use the store once the turn has ended.
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
        // Without this share of time, a series of arriving processes would have the store nearly all the time.
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
