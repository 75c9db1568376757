//! The store of a call, and the time that the call has for it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use datastore::Location;

/// The least time for a later step of a call.
pub const LEAST: Duration = Duration::from_secs(1);
/// How long a call on an embedded store may take, from waiting for the store to the answer: as long as one of Calico's
/// plugin on its cluster.
const BUDGET: Duration = Duration::from_secs(90);

/// The location of the store, and the lock that goes with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreAt {
    /// The store.
    pub location: Location,
    /// `ipam_lock_file`, else Calico's own: the file that all of Calico's plugins on this host lock while they work on a
    /// cluster's store. Embedded stores have a lock of their own.
    pub lock_file: PathBuf,
    /// How long a call on a cluster's store may take: `datastore_timeout`, or 10 s.
    pub patience: Duration,
    /// The part of the call's time that earlier steps have used, where the store is embedded.
    pub spent: Duration,
}

impl StoreAt {
    /// The store, with what is left of the time for a call: one clock covers all steps of the call. There is
    /// always enough to hear that nothing can be done.
    #[must_use]
    pub fn with_time_left(&self, begun: Instant) -> Self {
        let left = self.patience.saturating_sub(begun.elapsed()).max(LEAST);
        Self { patience: left.min(self.patience), spent: self.spent + begun.elapsed(), ..self.clone() }
    }

    /// How long a call may take.
    pub fn budget(&self) -> Duration {
        if self.location.is_shared() { self.patience } else { BUDGET.saturating_sub(self.spent).max(LEAST) }
    }
}
