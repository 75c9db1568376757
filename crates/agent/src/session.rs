//! The store of a call, a session that keeps it open for all steps of the call, and the allocator on an open store, as plugins and
//! the daemon have it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use datastore::{Blocking, ClusterStore, Create, Location, OpenOptions, OpenStore, Sharing};
use ipam_core::gc::{Evidence, LivenessSource};
use ipam_core::{Ipam, Nodes};
use kv::{Deadline, Purpose, Store};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;

use crate::error::{CniError, VerbFailure};
use crate::hints::{FileHints, FullPoolHints, HINTS_FOLDER};
use crate::pending_commits::{PENDING_COMMITS_FOLDER, PendingCommitFolder};

/// The least time for a later step of a call.
pub const MIN_STEP_BUDGET: Duration = Duration::from_secs(1);
/// How long a call on an embedded store may take, from waiting for the store to the answer: as long as one of Calico's
/// plugin on its cluster.
const EMBEDDED_CALL_TIMEOUT: Duration = Duration::from_secs(90);

/// The location of the store, and the lock that goes with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreAccess {
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

impl StoreAccess {
    /// The store, with what is left of the time for a call: one clock covers all steps of the call. There is
    /// always enough to hear that nothing can be done.
    #[must_use]
    pub fn with_time_left(&self, begun: Instant) -> Self {
        let left = self.patience.saturating_sub(begun.elapsed()).max(MIN_STEP_BUDGET);
        Self { patience: left.min(self.patience), spent: self.spent + begun.elapsed(), ..self.clone() }
    }

    /// How long a call may take.
    pub fn budget(&self) -> Duration {
        if self.location.is_shared() {
            self.patience
        } else {
            EMBEDDED_CALL_TIMEOUT.saturating_sub(self.spent).max(MIN_STEP_BUDGET)
        }
    }
}

/// An open store, the runtime that drives it, and the time that the call has.
#[derive(Debug)]
pub struct Session {
    location: Location,
    deadline: Deadline,
    open: OpenStore,
    runtime: Runtime,
}

impl Session {
    /// Opens the store: through its daemon, if an embedded store has one.
    ///
    /// # Errors
    /// Those of the store.
    pub fn open(at: &StoreAccess, purpose: Purpose) -> Result<Self, VerbFailure> {
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| CniError::internal(format!("cannot start: {error}")))?;
        let (location, deadline) = (at.location.clone(), Deadline::after(at.budget()));
        let wait = if location.is_shared() { deadline.remaining() } else { deadline.remaining_for_work() };
        let options = Create::Never.with_wait(wait).with_purpose(purpose).with_sharing(Sharing::OnRequest);
        let open = runtime.block_on(datastore::open(&location, &in_place(options)))?;
        Ok(Self { location, deadline, open, runtime })
    }

    /// The store.
    pub fn store(&self) -> Arc<dyn Store> {
        self.open.store()
    }

    /// The store, if this process has it open at this location.
    pub(crate) fn opened_at(&self, location: &Location) -> Option<&OpenStore> {
        let is_here = self.open.served().is_none() || self.open.is_exclusive();
        (self.location == *location && is_here).then_some(&self.open)
    }

    /// True if other processes must wait for the store.
    pub fn is_exclusive(&self) -> bool {
        self.open.is_exclusive()
    }

    /// The allocator on the store.
    pub fn ipam(&self) -> Ipam {
        ipam_for_store(self.store(), &self.location, self.open.cluster())
    }

    /// The moment at which the call must be over.
    pub fn deadline(&self) -> Deadline {
        self.deadline
    }

    /// Runs a future to its end.
    pub fn run<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    /// Lets other processes have the store until its next use.
    pub fn pause(&self) {
        self.runtime.block_on(self.open.release_store());
    }

    /// Closes the store.
    pub fn close(self) {
        if let Err(error) = self.runtime.block_on(self.open.close()) {
            tracing::warn!(%error, "the store could not be closed cleanly");
        }
        // The process does not wait for a name server that does not answer.
        self.runtime.shutdown_background();
    }
}

/// For a process that does one thing at a time and ends.
pub(crate) fn in_place(options: OpenOptions) -> OpenOptions {
    options.with_blocking(Blocking::InPlace)
}

/// The allocator on a store. On etcd a commit of a killed process may still be carried out, so the allocator records
/// each commit as pending before it sends it. On a store that a process has to itself nothing is carried out after its
/// death. On etcd it also remembers where it found room, which saves a round trip. Everywhere it remembers which of several
/// pools were full.
pub fn ipam_for_store(store: Arc<dyn Store>, location: &Location, cluster: Option<Arc<dyn ClusterStore>>) -> Ipam {
    if location.is_shared() {
        let intents = PendingCommitFolder::new(PENDING_COMMITS_FOLDER, location.to_string()).with_cluster(cluster);
        // Hints are read before the cluster has reported its id.
        let hints = FileHints::new(HINTS_FOLDER, location.in_order());
        Ipam::new(store, Nodes::Registered).with_pending_commits(Arc::new(intents)).with_hints(Arc::new(hints))
    } else {
        let hints = FullPoolHints(FileHints::new(HINTS_FOLDER, location.to_string()));
        Ipam::new(store, Nodes::FirstSeen).with_hints(Arc::new(hints))
    }
}

/// The allocator as [`ipam_for_store`] makes it, for a process that scans the machine when it finds no room.
pub(crate) fn ipam_with_liveness(
    store: Arc<dyn Store>,
    location: &Location,
    cluster: Option<Arc<dyn ClusterStore>>,
) -> Ipam {
    ipam_for_store(store, location, cluster).with_liveness(Arc::new(HostLiveness))
}

/// This machine, scanned when its evidence is requested.
#[derive(Clone, Copy, Debug)]
struct HostLiveness;

#[async_trait]
impl LivenessSource for HostLiveness {
    async fn evidence(&self) -> Option<Evidence> {
        let (done, looked) = oneshot::channel();
        // Nobody may wait for namespaces on the thread that runs the store.
        let scanning = std::thread::Builder::new().name("sight".into()).spawn(move || done.send(host::scan()));
        if let Err(error) = scanning {
            tracing::warn!(%error, "no thread can be started, so nothing that earlier boots have left is freed");
            return None;
        }
        match looked.await {
            Ok(Ok(host::NetnsScan { addresses: live, namespaces, within })) => {
                let (boot, up) = (host::short_boot(&host::boot_id()?)?, host::uptime()?);
                Some(Evidence { boot, up, live, namespaces, within })
            }
            Ok(Err(blind)) => {
                tracing::warn!(%blind, "nothing that earlier boots have left is freed");
                None
            }
            Err(_) => None,
        }
    }
}
