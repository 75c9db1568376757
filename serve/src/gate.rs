//! The open store, its uses, and the right to close it.
//!
//! Nothing here grants a permit to a future that waits: such a future would keep the permit from the moment it is granted until it is
//! polled, which its owner may never do. A caller that finds the store closed waits for a change and looks again, and its use begins
//! in the poll that returns it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use datastore::OpenStore;
use tokio::sync::{Mutex, OwnedMutexGuard, watch};
use tokio::time::sleep_until;

/// The bounds on the time that callers who waited for the store get before it is closed again.
const MIN_SHARE: Duration = Duration::from_millis(5);
const MAX_SHARE: Duration = Duration::from_millis(250);

/// The open store of a daemon.
pub(crate) struct Gate {
    state: watch::Sender<State>,
    turn: Arc<Mutex<()>>,
}

struct State {
    store: Option<Arc<OpenStore>>,
    /// How many uses of the store there are.
    users: usize,
    /// True while a task closes or opens the store; then no use begins.
    is_turning: bool,
    /// The store stays open until then.
    share_end: Instant,
}

/// The state of the store, as a caller finds it.
pub(crate) enum Found {
    Open(Use),
    /// The store is not open, and no task opens it.
    Closed,
    /// A task closes or opens the store.
    Turning,
}

/// The open store, which is not closed while this exists.
pub(crate) struct Use {
    gate: Arc<Gate>,
    /// `None` only while this is dropped.
    store: Option<Arc<OpenStore>>,
}

/// The right of one task to close and open the store.
pub(crate) struct Turn {
    gate: Arc<Gate>,
    begun: Instant,
    _alone: OwnedMutexGuard<()>,
}

impl Gate {
    /// Without an open store.
    pub(crate) fn new() -> Arc<Self> {
        let state = State { store: None, users: 0, is_turning: false, share_end: Instant::now() };
        Arc::new(Self { state: watch::Sender::new(state), turn: Arc::default() })
    }

    /// Begins a use of the store, if it is open.
    pub(crate) fn enter(self: &Arc<Self>) -> Found {
        let mut found = Found::Closed;
        self.state.send_if_modified(|state| {
            found = match &state.store {
                _ if state.is_turning => Found::Turning,
                None => Found::Closed,
                Some(store) => {
                    state.users += 1;
                    Found::Open(Use { gate: Arc::clone(self), store: Some(Arc::clone(store)) })
                }
            };
            false
        });
        found
    }

    /// Begins a use of the store, or says that it is closed, once no task closes or opens it.
    pub(crate) async fn wait(self: &Arc<Self>) -> Option<Use> {
        let mut changes = None;
        loop {
            match self.enter() {
                Found::Open(used) => return Some(used),
                Found::Closed => return None,
                Found::Turning => {}
            }
            // The first look at a new receiver comes after it was made, so that no change is missed.
            match &mut changes {
                None => changes = Some(self.state.subscribe()),
                // The sender lives as long as the gate.
                Some(changes) => _ = watch::Receiver::changed(changes).await,
            }
        }
    }

    /// Waits until the store is open.
    pub(crate) async fn until_open(&self) {
        let is_open = |state: &State| state.store.is_some() && !state.is_turning;
        // The sender lives as long as the gate.
        let _ = self.state.subscribe().wait_for(is_open).await;
    }

    /// Looks at the store if it is open, without a use of it: `look` must not wait.
    pub(crate) fn peek<T>(&self, look: impl FnOnce(&OpenStore) -> T) -> Option<T> {
        self.state.borrow().store.as_deref().map(look)
    }

    /// True if the store is closed, and no task opens it.
    pub(crate) fn is_given_up(&self) -> bool {
        let state = self.state.borrow();
        state.store.is_none() && !state.is_turning
    }

    /// Waits until the callers who waited for the store have had their share of it.
    pub(crate) async fn share(&self) {
        let end = self.state.borrow().share_end;
        sleep_until(end.into()).await;
    }

    /// Waits for the other turns and for all uses to end; no use begins before the turn ends. Only tasks of the daemon's own may await
    /// this: they are polled until they end.
    pub(crate) async fn turn(self: &Arc<Self>) -> Turn {
        let alone = Arc::clone(&self.turn).lock_owned().await;
        self.state.send_if_modified(|state| {
            state.is_turning = true;
            false
        });
        let turn = Turn { gate: Arc::clone(self), begun: Instant::now(), _alone: alone };
        let _ = self.state.subscribe().wait_for(|state| state.users == 0).await;
        turn
    }
}

impl Use {
    /// The store.
    pub(crate) fn store(&self) -> Option<&OpenStore> {
        self.store.as_deref()
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        // The last use of a turn's store must leave the only handle to it.
        self.store = None;
        self.gate.state.send_if_modified(|state| {
            state.users -= 1;
            state.is_turning && state.users == 0
        });
    }
}

impl Turn {
    /// True if the store is open.
    pub(crate) fn is_open(&self) -> bool {
        self.gate.state.borrow().store.is_some()
    }

    /// Takes the store out, to close it.
    pub(crate) fn take(&mut self) -> Option<OpenStore> {
        let mut store = None;
        self.gate.state.send_if_modified(|state| {
            store = state.store.take();
            false
        });
        store.and_then(Arc::into_inner)
    }

    /// Puts an open store in.
    pub(crate) fn put(&mut self, store: OpenStore) {
        self.gate.state.send_if_modified(|state| {
            state.store = Some(Arc::new(store));
            false
        });
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // Processes that come one after the other would else have the store nearly all of the time.
        let has_callers = self.gate.state.receiver_count() > 0;
        let share = if has_callers { self.begun.elapsed().clamp(MIN_SHARE, MAX_SHARE) } else { Duration::ZERO };
        self.gate.state.send_modify(|state| {
            state.is_turning = false;
            state.share_end = Instant::now() + share;
        });
    }
}
