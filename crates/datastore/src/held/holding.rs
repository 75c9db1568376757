//! The settings of a store that is held, and its observer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use driver::OpenOptions;
use kv_mvcc::Retention;

/// Longer than any process lives.
const AGES: Duration = Duration::from_secs(30 * 365 * 24 * 60 * 60);
/// How long a reader of much has the store at least; then it gives the store to a process that waits.
pub const LEAST_HOLD: Duration = Duration::from_millis(10);

/// How a store is held.
#[derive(Clone)]
pub struct Holding {
    /// How it is opened, each time.
    pub options: OpenOptions,
    /// No call waits for the store beyond this moment.
    pub until: Option<Instant>,
    /// Once the store has been open for so long, the end of a call gives it to a process that waits; `None` leaves that to
    /// [`Held::hand_over`](super::Held::hand_over) and [`Held::put_down`](super::Held::put_down).
    pub yields_after: Option<Duration>,
    /// Where a full disk has no room to open it for all purposes, it is opened for releases, which may use what is kept for them.
    pub opens_when_full: bool,
    /// The bounds on its history that a store of format 2 gets; `None` leaves it those that it has.
    pub history: Option<Retention>,
    /// The observer of the store.
    pub observer: Arc<dyn Observer>,
}

impl Holding {
    /// A store that is opened with these options, and handed over when it is said.
    pub fn new(options: OpenOptions) -> Self {
        Self { options, until: None, yields_after: None, opens_when_full: false, history: None, observer: Arc::new(()) }
    }

    /// The moment until which a call waits for the store.
    pub(crate) fn patience(&self) -> Instant {
        let now = Instant::now();
        // A wait that no clock can measure is as good as none.
        let end = now.checked_add(self.options.wait).unwrap_or(now + AGES);
        self.until.map_or(end, |until| until.min(end))
    }
}

/// An observer of a held store.
pub trait Observer: Send + Sync {
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

impl Observer for () {}

/// A wait that is no standstill.
pub(super) struct Wait<'o>(&'o dyn Observer);

impl<'o> Wait<'o> {
    pub(super) fn begin(observer: &'o dyn Observer) -> Self {
        observer.wait_begins();
        Self(observer)
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.0.wait_ends();
    }
}
