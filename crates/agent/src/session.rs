//! Opens the store once for all steps of a plugin call, and creates the allocator that plugins and the daemon use on an
//! open store.

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

/// Minimum time for each step of a plugin call after the first step, even if the time limit of the whole call has
/// passed.
pub const MIN_STEP_BUDGET: Duration = Duration::from_secs(1);
/// Time limit of a plugin call on an embedded store, including the wait for the store lock. Calico's plugin limits a
/// plugin call on a cluster to the same 90 seconds.
const EMBEDDED_CALL_TIMEOUT: Duration = Duration::from_secs(90);

/// How to use a store: its location, the lock file of this host, and the time limit of the plugin call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreAccess {
    /// The location of the store to open.
    pub location: Location,
    /// The file that Calico's plugins on this host lock while they work on a cluster's store. The setting
    /// `ipam_lock_file` overrides Calico's default lock file. An embedded store has its own lock and does not use
    /// Calico's lock file.
    pub lock_file: PathBuf,
    /// Time limit of a plugin call on a cluster's store: the setting `datastore_timeout`, or 10 s.
    pub patience: Duration,
    /// Time that earlier steps of the plugin call have used; counted only for an embedded store.
    pub spent: Duration,
}

impl StoreAccess {
    /// Returns a copy with the remaining time of the plugin call as its time limit. The copied `StoreAccess` has at
    /// least [`MIN_STEP_BUDGET`] left, which is enough time to report a failure to the runtime.
    #[must_use]
    pub fn with_time_left(&self, begun: Instant) -> Self {
        let left = self.patience.saturating_sub(begun.elapsed()).max(MIN_STEP_BUDGET);
        Self { patience: left.min(self.patience), spent: self.spent + begun.elapsed(), ..self.clone() }
    }

    /// Returns the time limit for the rest of the plugin call.
    pub fn budget(&self) -> Duration {
        if self.location.is_shared() {
            self.patience
        } else {
            EMBEDDED_CALL_TIMEOUT.saturating_sub(self.spent).max(MIN_STEP_BUDGET)
        }
    }
}

/// An open store for one plugin call, the async runtime that drives the store, and the deadline of the call.
#[derive(Debug)]
pub struct Session {
    location: Location,
    deadline: Deadline,
    open: OpenStore,
    runtime: Runtime,
}

impl Session {
    /// Opens the store. If an embedded store has a daemon, the session accesses the store through the daemon.
    ///
    /// # Errors
    /// Any store error.
    pub fn open(at: &StoreAccess, purpose: Purpose) -> Result<Self, VerbFailure> {
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| CniError::internal(format!("cannot start: {error}")))?;
        let (location, deadline) = (at.location.clone(), Deadline::after(at.budget()));
        let wait = if location.is_shared() { deadline.remaining() } else { deadline.remaining_for_work() };
        let options = Create::Never.with_wait(wait).with_purpose(purpose).with_sharing(Sharing::OnRequest);
        let open = runtime.block_on(datastore::open(&location, &in_place(options)))?;
        Ok(Self { location, deadline, open, runtime })
    }

    /// Returns the store that this session has opened.
    pub fn store(&self) -> Arc<dyn Store> {
        self.open.store()
    }

    /// Returns the open store if this process itself, and not a daemon, has opened the store at this location.
    pub(crate) fn opened_at(&self, location: &Location) -> Option<&OpenStore> {
        let is_here = self.open.served().is_none() || self.open.is_exclusive();
        (self.location == *location && is_here).then_some(&self.open)
    }

    /// Returns whether other processes cannot open the store while this session is open.
    pub fn is_exclusive(&self) -> bool {
        self.open.is_exclusive()
    }

    /// Returns the IPAM allocator on the session's store.
    pub fn ipam(&self) -> Ipam {
        ipam_for_store(self.store(), &self.location, self.open.cluster())
    }

    /// Returns the deadline of the plugin call.
    pub fn deadline(&self) -> Deadline {
        self.deadline
    }

    /// Runs a future to completion on the session's async runtime.
    pub fn run<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    /// Releases the store for other processes until this session uses the store again.
    pub fn pause(&self) {
        self.runtime.block_on(self.open.release_store());
    }

    /// Closes the store. A failure to close the store is only logged.
    pub fn close(self) {
        if let Err(error) = self.runtime.block_on(self.open.close()) {
            tracing::warn!(%error, "the store could not be closed cleanly");
        }
        // An unresponsive name server must not delay the end of the process.
        self.runtime.shutdown_background();
    }
}

/// Sets the open options for a process that carries out one operation and then ends.
pub(crate) fn in_place(options: OpenOptions) -> OpenOptions {
    options.with_blocking(Blocking::InPlace)
}

/// Returns the IPAM allocator on an open store.
///
/// On etcd, a commit that a process has sent may still be carried out after the process is killed. The allocator
/// records each commit as pending before it sends the commit, so that a later process can settle it. On an embedded
/// store, nothing is committed after the process has died, so the allocator records no pending commits. On etcd, the
/// allocator also remembers in which blocks it found free addresses, which saves a round trip to the store. On every
/// store, the allocator remembers which pools of a network were full.
pub fn ipam_for_store(store: Arc<dyn Store>, location: &Location, cluster: Option<Arc<dyn ClusterStore>>) -> Ipam {
    if location.is_shared() {
        let intents = PendingCommitFolder::new(PENDING_COMMITS_FOLDER, location.to_string()).with_cluster(cluster);
        // Hint files name the store without the cluster's id, because they are read before the cluster has answered any
        // request.
        let hints = FileHints::new(HINTS_FOLDER, location.in_order());
        Ipam::new(store, Nodes::Registered).with_pending_commits(Arc::new(intents)).with_hints(Arc::new(hints))
    } else {
        let hints = FullPoolHints(FileHints::new(HINTS_FOLDER, location.to_string()));
        Ipam::new(store, Nodes::FirstSeen).with_hints(Arc::new(hints))
    }
}

/// Returns an allocator like [`ipam_for_store`], which also scans the machine for unused addresses if no address is
/// free.
pub(crate) fn ipam_with_liveness(
    store: Arc<dyn Store>,
    location: &Location,
    cluster: Option<Arc<dyn ClusterStore>>,
) -> Ipam {
    ipam_for_store(store, location, cluster).with_liveness(Arc::new(HostLiveness))
}

/// Scans this machine for evidence of addresses in use, each time the allocator asks for a scan.
#[derive(Clone, Copy, Debug)]
struct HostLiveness;

#[async_trait]
impl LivenessSource for HostLiveness {
    async fn evidence(&self) -> Option<Evidence> {
        let (done, looked) = oneshot::channel();
        // The scan runs in its own thread, because looking at network namespaces must not block the thread that drives
        // the store.
        let scanning = std::thread::Builder::new().name("sight".into()).spawn(move || done.send(host::scan()));
        if let Err(error) = scanning {
            tracing::warn!(
                %error,
                "cannot start a thread to scan network namespaces; addresses left over from earlier boots stay assigned"
            );
            return None;
        }
        match looked.await {
            Ok(Ok(host::NetnsScan { addresses: live, namespaces, within })) => {
                let (boot, up) = (host::short_boot(&host::boot_id()?)?, host::uptime()?);
                Some(Evidence { boot, up, live, namespaces, within })
            }
            Ok(Err(blind)) => {
                tracing::warn!(
                    %blind,
                    "cannot scan all network namespaces; addresses left over from earlier boots stay assigned"
                );
                None
            }
            Err(_) => None,
        }
    }
}
