//! The open store, its uses, and the right to close it.
//!
//! Nothing here grants a permit to a future that waits: such a future would keep the permit from the moment it is granted until it is
//! polled, which its owner may never do. A caller that finds the store closed waits for a change and looks again, and its use begins
//! in the poll that returns it.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{Mutex, OwnedMutexGuard, watch};
use tokio::time::sleep_until;

use driver::Opened;

/// The bounds on the time that callers who waited for the store get before it is handed over again.
const CALLER_SHARE: RangeInclusive<Duration> = Duration::from_millis(5)..=Duration::from_millis(250);

/// The open store of a holder.
pub(super) struct StoreGate {
    state: watch::Sender<GateState>,
    turn: Arc<Mutex<()>>,
}

struct GateState {
    store: Option<Arc<Box<dyn Opened>>>,
    /// How many uses of the store there are.
    users: usize,
    /// True while a task closes or opens the store; then no use begins.
    is_turning: bool,
    /// True once the store is closed for good.
    has_ended: bool,
    /// When it was opened.
    opened_at: Instant,
    /// The store stays open until then.
    share_end: Instant,
}

/// The state of the store, as a caller finds it.
pub(super) enum GateStatus {
    Open(StoreUse),
    /// The store is not open, and no task opens it.
    Closed,
    /// A task closes or opens the store.
    Turning,
    /// It is closed for good.
    Ended,
}

/// The open store, which is not closed while this exists.
pub(super) struct StoreUse {
    gate: Arc<StoreGate>,
    /// `None` only while this is dropped.
    store: Option<Arc<Box<dyn Opened>>>,
}

/// The right of one task to close and open the store.
pub(super) struct HandOverTurn {
    gate: Arc<StoreGate>,
    begun: Instant,
    _alone: OwnedMutexGuard<()>,
}

impl StoreGate {
    /// Without an open store.
    pub(super) fn new() -> Arc<Self> {
        let now = Instant::now();
        let state =
            GateState { store: None, users: 0, is_turning: false, has_ended: false, opened_at: now, share_end: now };
        Arc::new(Self { state: watch::Sender::new(state), turn: Arc::default() })
    }

    /// Begins a use of the store, if it is open.
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

    /// Begins a use of the store, or says that it is closed, once no task closes or opens it.
    pub(super) async fn wait(self: &Arc<Self>) -> GateStatus {
        let mut changes = None;
        loop {
            match self.enter() {
                GateStatus::Turning => {}
                found => return found,
            }
            // The first look at a new receiver comes after it was made, so that no change is missed.
            match &mut changes {
                None => changes = Some(self.state.subscribe()),
                // The sender lives as long as the gate.
                Some(changes) => _ = watch::Receiver::changed(changes).await,
            }
        }
    }

    /// No use begins any more.
    pub(super) fn end(&self) {
        self.state.send_modify(|state| state.has_ended = true);
    }

    /// Waits until the store is open.
    pub(super) async fn wait_until_open(&self) {
        let is_open = |state: &GateState| state.store.is_some() && !state.is_turning;
        // The sender lives as long as the gate.
        let _ = self.state.subscribe().wait_for(is_open).await;
    }

    /// Looks at the store if it is open, without a use of it: `look` must not wait.
    pub(super) fn peek<T>(&self, look: impl FnOnce(&dyn Opened) -> T) -> Option<T> {
        self.state.borrow().store.as_deref().map(|store| look(&**store))
    }

    /// For how long the store has been open, if it is.
    pub(super) fn open_for(&self) -> Option<Duration> {
        let state = self.state.borrow();
        state.store.as_ref().map(|_| state.opened_at.elapsed())
    }

    /// True if the store is closed, and no task opens it.
    pub(super) fn is_given_up(&self) -> bool {
        let state = self.state.borrow();
        state.store.is_none() && !state.is_turning
    }

    /// Waits until the callers who waited for the store have had their share of it.
    pub(super) async fn share(&self) {
        let end = self.state.borrow().share_end;
        sleep_until(end.into()).await;
    }

    /// Waits for the other turns and for all uses to end; no use begins before the turn ends. Only tasks of the holder's own may await
    /// this: they are polled until they end.
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
    /// The store.
    pub(super) fn store(&self) -> Option<&dyn Opened> {
        self.store.as_deref().map(|store| &**store)
    }
}

impl Drop for StoreUse {
    fn drop(&mut self) {
        // The last use of a turn's store must leave the only handle to it.
        self.store = None;
        self.gate.state.send_if_modified(|state| {
            state.users -= 1;
            state.is_turning && state.users == 0
        });
    }
}

impl HandOverTurn {
    /// True if the store is open.
    pub(super) fn is_open(&self) -> bool {
        self.gate.state.borrow().store.is_some()
    }

    /// Takes the store out, to close it.
    pub(super) fn take(&mut self) -> Option<Box<dyn Opened>> {
        let mut store = None;
        self.gate.state.send_if_modified(|state| {
            store = state.store.take();
            false
        });
        store.and_then(Arc::into_inner)
    }

    /// Puts an open store in.
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
        // Processes that come one after the other would else have the store nearly all of the time.
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
